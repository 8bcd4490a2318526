"""vLLM's batch-invariant mode: what is refused, and bits of requests alone, together, and cut in other ways."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from dsv4attn_vllm import arguments, hyper_connections, invariance, serving
from dsv4attn_vllm.compressor import StateCache
from dsv4attn_vllm.cuda import CUDAAttention
from dsv4attn_vllm.guard import RefusedError
from dsv4attn_vllm.invariance import SWITCH
from engine import Request, config_of
from models import V4, V41, Model, engine_of
from test_arguments import config_of_unchecked, on_cuda
from torch import Tensor
from vllm.config import VllmConfig
from whole import WholeEngine, whole_engine

from dsv4attn.core.contract.device import DeviceFacts
from dsv4attn.errors import NoBackendError

PARTS = "DSV4ATTN_VLLM_PARTS"


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(hyper_connections, "_serving", [])
    monkeypatch.setenv(SWITCH, "1")
    serving._serving.cache_clear()
    yield
    serving._serving.cache_clear()


# ---------------------------------------------------------------- refusals


def on_hopper(monkeypatch: pytest.MonkeyPatch, model: Model, **variables: str) -> VllmConfig:
    """A configuration for a GPU of sm_90 that nothing has checked."""
    config = config_of_unchecked(monkeypatch) if model is V4 else model.config()
    for name, value in {"DSV4ATTN_VLLM": "1", PARTS: "all", **variables}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TRITON_INTERPRET")
    object.__setattr__(config.device_config, "device_type", "cuda")
    on_cuda(monkeypatch, (9, 0))
    return config


def test_all_steps_on_a_gpu_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments.resolve(on_hopper(monkeypatch, V4))


@pytest.mark.parametrize(
    ("named", "missing"),
    [("auto", "mhc"), ("none", "indexer, compressor, mhc"), ("indexer,compressor", "mhc")],
)
def test_parts_of_vllm_are_refused(monkeypatch: pytest.MonkeyPatch, named: str, missing: str) -> None:
    config = on_hopper(monkeypatch, V4, **{PARTS: named})

    with pytest.raises(RefusedError, match=f"depend on the batch, got those of vLLM for {missing} -> set {PARTS}=all"):
        arguments.resolve(config)
    monkeypatch.setenv(SWITCH, "0")
    arguments.resolve(config)


def test_the_hyper_connections_of_v41_are_vllms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "0")
    config = on_hopper(monkeypatch, V41)
    arguments.resolve(config)
    monkeypatch.setenv(SWITCH, "1")

    with pytest.raises(RefusedError, match=f"{SWITCH}: expected unset for DeepSeek-V4.1, whose hyper-connections"):
        arguments.resolve(config)


def test_experts_that_are_routed_by_the_number_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    config = on_hopper(monkeypatch, V4)
    object.__setattr__(config.kernel_config, "moe_backend", "deep_gemm_mega_moe")

    with pytest.raises(RefusedError, match=r"--moe-backend: expected .*, got deep_gemm_mega_moe -> leave it out"):
        arguments.resolve(config)


@pytest.mark.parametrize("named", ["auto", "all"])
def test_a_cpu_is_refused(monkeypatch: pytest.MonkeyPatch, named: str) -> None:
    monkeypatch.setenv(PARTS, named)

    with pytest.raises(RefusedError, match=f"{SWITCH}: expected unset: other parts of vLLM's layers on this platform"):
        config_of()


def test_a_backend_that_is_not_deterministic_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    (tmp_path / "dsv4attn.toml").write_text("[options.sm90]\ndeterministic = false\n")
    config = on_hopper(monkeypatch, V4, DSV4ATTN_BACKEND="sm90", DSV4ATTN_CONFIG=str(tmp_path / "dsv4attn.toml"))

    with pytest.raises(NoBackendError, match="DETERMINISTIC"):
        arguments.resolve(config)


# ---------------------------------------------------------------- layers


@pytest.fixture
def invariant(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mode on this CPU, with layers of CUDA and all parts but hyper-connections, which these layers do not have."""
    monkeypatch.setenv(PARTS, "indexer,compressor")
    monkeypatch.setattr(invariance, "PLATFORMS", ("cuda", "cpu"))
    monkeypatch.setattr(invariance, "_NEEDED", ("indexer", "compressor"))


ALONE = [[(7, 40)], [(7, 1)]]
TOGETHER = [[(8, 31), (7, 11)], [(7, 29), (8, 1)], [(8, 1), (9, 5), (7, 1)]]
"""(request, tokens) of each step, in the order of the batch: a prompt alone, and cut among requests with more keys.

Other requests have 100 tokens before their first step.
"""


def rows_of(engine: WholeEngine, steps: list[list[tuple[int, int]]], name: int) -> list[Tensor]:
    """The outputs [n, hidden] of each layer for one request."""
    requests: dict[int, Request] = {}
    parts = []
    for step in steps:
        for request, _ in step:
            if request not in requests:
                requests[request] = engine.request(0 if request == name else 100)
                requests[request].name = request
        outs, row = engine.step([(requests[request], count) for request, count in step]), 0
        for request, count in step:
            if request == name:
                parts.append([out[row : row + count] for out in outs])
            row += count
    return [torch.cat(layer) for layer in zip(*parts, strict=True)]


def equal_layers(engine: WholeEngine) -> list[bool]:
    """Whether the bits of a request are those that it has alone, for each layer."""
    alone, together = rows_of(engine, ALONE, 7), rows_of(engine, TOGETHER, 7)
    return [torch.equal(first, second) for first, second in zip(alone, together, strict=True)]


@pytest.mark.usefixtures("invariant")
def test_bits_of_a_request_are_those_that_it_has_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole layers: a prompt alone, and one that is cut in another way among requests whose contexts are longer."""
    monkeypatch.setenv("DSV4ATTN_BACKEND", "triton")
    with whole_engine(CUDAAttention) as engine:
        assert engine.layers[0]._serving.backend.deterministic
        assert isinstance(engine.layers[1].compressor.state_cache, StateCache)
        assert equal_layers(engine) == [True] * 3


@pytest.mark.usefixtures("invariant")
def test_a_sum_that_depends_on_the_number_of_rows_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: what the compressors get."""
    monkeypatch.setenv("DSV4ATTN_BACKEND", "reference")
    with whole_engine(CUDAAttention, kinds=("c4a",)) as engine:
        [layer] = engine.layers
        product = layer._invariant_product
        layer._invariant_product = lambda x, *options: product(x, *options) * (1 + 0.01 * len(x))
        assert equal_layers(engine) == [False]


def ask_for_deterministic(monkeypatch: pytest.MonkeyPatch, folder: Path, name: str) -> None:
    """Ask for a deterministic backend, without vLLM's mode."""
    file = folder / "dsv4attn.toml"
    file.write_text(f"[options.{name}]\ndeterministic = true\n")
    for variable, value in {SWITCH: "0", "DSV4ATTN_BACKEND": name, "DSV4ATTN_CONFIG": str(file)}.items():
        monkeypatch.setenv(variable, value)


CUTS = [[70], [1, 69], [32, 38], [7, 0, 57, 1, 5], [3, 64, 3]]
"""Rows of each product."""


@pytest.mark.parametrize("model", [V4, V41], ids=str)
@pytest.mark.parametrize("name", ["reference", "triton"])
def test_bits_of_what_compressors_get_do_not_depend_on_the_rows_of_a_product(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model: Model, name: str
) -> None:
    """Scores of the compressors of a layer, of hidden states that are cut in several ways, in fp32.

    V4.1 has such products too on a deterministic backend, though the mode is refused for it.
    """
    ask_for_deterministic(monkeypatch, tmp_path, name)
    with engine_of(model, name) as engine:
        layer = next(layer for layer in engine.layers if layer.compressor is not None and layer.indexer is not None)
        compressors = [layer.compressor, layer.indexer.compressor] if model is V4 else [layer.compressor]
        hidden = torch.randn(70, layer.hidden_size).bfloat16()
        results = [[layer._run_parallel_input_projections(part) for part in hidden.split(rows)] for rows in CUTS]

        # queries and keys, these scores, weights of the indexer
        assert len(results[0][0]) == len(compressors) + 2
        for number, compressor in enumerate(compressors, start=1):
            first, *others = (torch.cat([inputs[number] for inputs in parts]) for parts in results)
            exact = hidden.double() @ compressor.fused_wkv_wgate.weight.double().T
            assert (first.dtype, first.shape) == (torch.float32, exact.shape)
            assert (first - exact).abs().max() < 1e-5 * exact.abs().max()
            assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("parts", ["none", "all"])
def test_kernels_of_these_products_are_compiled_before_the_first_request(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, parts: str
) -> None:
    """On a deterministic backend, whether compressors are vLLM's or not."""
    ask_for_deterministic(monkeypatch, tmp_path, "triton")
    monkeypatch.setenv(PARTS, parts)
    served = serving.serving_of(config_of())

    names = {v.name for v in served.backend.kernel_variants(served.bounds(), DeviceFacts.named("h100"))}

    assert {"product_kernel", "described_product_kernel"} <= names

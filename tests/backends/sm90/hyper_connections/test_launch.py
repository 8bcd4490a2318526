"""Hyper-connections of many tokens on Hopper, compared with torch, and the calls that the shared kernels serve."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from attrs import evolve
from torch import Tensor

from dsv4attn.backends._triton.compiling.variant import Variant
from dsv4attn.backends._triton.interpreted import INTERPRETED
from dsv4attn.backends._triton.launching.runtime import architecture, launch, observed
from dsv4attn.backends._triton.layer.hyper_connections import tuning as hc_tuning
from dsv4attn.backends._triton.untyped import Kernel
from dsv4attn.backends.sm90.hyper_connections import launch as hyper_connections
from dsv4attn.backends.sm90.launch import Sm90Backend
from dsv4attn.backends.sm90.ops import layer_ops
from dsv4attn.core.contract.device import DeviceFacts
from dsv4attn.core.contract.limits import Limits
from dsv4attn.core.contract.warmup import WarmupSpec
from dsv4attn.core.model.geometry import ModelGeometry
from tests.backends._triton.cache.caches import DEVICE
from tests.backends._triton.engine import launching_nothing
from tests.backends._triton.layer.test_hyper_connections import MIXES, StreamsCall, check_near, named, with_tuning
from tests.layer_ops import TorchOps
from tests.programs import told_by

FLASH, LIMITS = ModelGeometry.preset("flash"), Limits(4, 64, 4096)
TORCH = TorchOps()


def run_fused(call: StreamsCall, *, deterministic: bool = False) -> tuple[dict[str, Tensor], list[str]]:
    """Results of `mhc_fused_post_pre` by name, and the kernels that were launched."""
    with observed() as launched:
        residual, *mixes = layer_ops(deterministic=deterministic).mhc_fused_post_pre(
            call.x, call.residual, call.post, call.comb, call.weights
        )
    return {"residual": residual, **named("", MIXES, mixes)}, [variant.name for variant in launched]


def expected_of(call: StreamsCall, new_residual: Tensor) -> dict[str, Tensor]:
    """The results of torch. What follows the new streams is computed from the streams of the kernel.

    A device may round some of the new streams to the other neighbour.
    """
    residual = TORCH.mhc_post(call.x, call.residual, call.post, call.comb)
    return {"residual": residual, **named("", MIXES, TORCH.mhc_pre(new_residual, call.weights))}


def equal(results: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    """Whether all results have the same bits."""
    return all(torch.equal(results[name], expected[name]) for name in expected)


@pytest.mark.device
@pytest.mark.skipif(INTERPRETED or architecture() != "sm_90", reason="needs a Hopper GPU")
class TestOnDevice:
    @pytest.fixture(autouse=True)
    def many(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Plain calls of few tokens take Hopper's own kernel too."""
        monkeypatch.setattr(hyper_connections, "FEW", 0)

    @pytest.mark.parametrize(
        ("hidden", "count", "pad"),
        [(128, 1, 0), (128, 63, 8), (256, 64, 0), (384, 65, 8), (4096, 300, 0), (7168, 520, 16), (1024, 3000, 8)],
    )
    def test_it_is_torchs_op(self, hidden: int, count: int, pad: int) -> None:
        for seed in (0, 1):
            call = StreamsCall(4, hidden, count, seed=seed, normed=seed == 1, pad=pad)
            call.post, call.comb = call.post.contiguous(), call.comb.contiguous()
            results, kernels = run_fused(call, deterministic=True)

            assert kernels[0].startswith("post_products_tiles")
            check_near(results, expected_of(call, results["residual"]))

    def test_several_chunks_are_one(self, monkeypatch: pytest.MonkeyPatch) -> None:
        call = StreamsCall(4, 512, 700, normed=True)
        in_one_chunk, _ = run_fused(call)
        monkeypatch.setattr(hyper_connections, "CHUNK", 192)
        in_chunks, _ = run_fused(call)

        assert equal(in_chunks, in_one_chunk)

    def test_a_tokens_bits_do_not_depend_on_the_others(self) -> None:
        call = StreamsCall(4, 512, 400, normed=True)
        of_all_tokens, _ = run_fused(call, deterministic=True)
        for tokens in (slice(0, 1), slice(130, 333)):
            results, _ = run_fused(call.tokens(tokens), deterministic=True)
            assert equal(results, {name: result[tokens] for name, result in of_all_tokens.items()})

    def test_a_nan_stays_in_its_token(self) -> None:
        call = StreamsCall(4, 256, 300)
        call.residual[77, 2, 5] = torch.nan
        results, _ = run_fused(call)

        for name, result in results.items():
            assert result.flatten(1).isnan().any(1).nonzero().flatten().tolist() == [77], name

    def test_it_is_captured(self) -> None:
        call = StreamsCall(4, 256, 300, normed=True)
        expected, _ = run_fused(call)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results, _ = run_fused(call)
        for result in results.values():
            result.fill_(torch.nan)
        graph.replay()

        assert equal(results, expected)


def break_alignment(call: StreamsCall, case: str) -> None:
    if case == "rows":
        call.x = torch.cat([call.x, call.x[:, :1]], 1)[:, :-1]
    elif case == "post":
        call.post = torch.cat([call.post, call.post], 1)[:, ::2]
    elif case == "comb":
        call.comb = torch.cat([call.comb, call.comb], 2)[:, :, :4]
    elif case == "tokens of post":
        call.post = torch.cat([call.post, call.post], 1)[:, :4]
    elif case == "tokens of comb":
        call.comb = torch.cat([call.comb, call.comb], 1)[:, :4]


@pytest.mark.parametrize(
    ("case", "n", "hidden", "count", "dtype"),
    [
        ("rows", 4, 128, 5, torch.bfloat16),
        ("post", 4, 128, 5, torch.bfloat16),
        ("comb", 4, 128, 5, torch.bfloat16),
        # of tensors of more tokens
        ("rows", 4, 128, 1, torch.bfloat16),
        ("tokens of post", 4, 128, 1, torch.bfloat16),
        ("tokens of comb", 4, 128, 1, torch.bfloat16),
        ("streams", 3, 128, 5, torch.bfloat16),
        ("columns", 4, 160, 5, torch.bfloat16),
        ("slices", 4, 192, 5, torch.bfloat16),
        ("fp32", 4, 128, 5, torch.float32),
        ("few", 4, 128, 5, torch.bfloat16),
    ],
)
def test_what_it_does_not_serve_is_left_to_the_shared_kernels(
    case: str, n: int, hidden: int, count: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("launched")

    monkeypatch.setattr(hyper_connections, "INTERPRETED", False)
    monkeypatch.setattr(hyper_connections, "launch", refuse)
    if case == "slices":
        # plain calls have two slices, also of many tokens
        monkeypatch.setattr(hyper_connections, "FEW", 0)
    call = StreamsCall(n, hidden, count, dtype)
    break_alignment(call, case)
    results, kernels = run_fused(call, deterministic=case not in ("few", "slices"))

    assert [name.split("[")[0] for name in kernels] == ["products_kernel", "mix_kernel"]
    check_near(results, expected_of(call, results["residual"]))


class Launches:
    """What stands for `launch` of Hopper's own kernel, and launches nothing."""

    def __init__(self) -> None:
        self.variants, self.products_bytes = set[Variant](), 0

    def note(
        self, kernel: Kernel, _: tuple[int, ...], args: Sequence[Any], constants: Mapping[str, Any], *, num_warps: int
    ) -> None:
        """See `runtime.launch`."""
        self.variants.add(Variant.of(kernel, args, constants, num_warps, 1))
        self.products_bytes = args[6].nbytes


@pytest.mark.skipif(not INTERPRETED, reason="the kernel that is launched here reads nothing")
@pytest.mark.parametrize("hidden", [4096, 7168])
@pytest.mark.parametrize(("deterministic", "eps"), [(False, 1e-6), (True, 1e-6), (False, 0.0)])
def test_warm_up_foresees_the_variants_that_are_launched_and_no_others(
    deterministic: bool, eps: float, hidden: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, ops = Launches(), layer_ops(deterministic=deterministic)
    monkeypatch.setattr(hyper_connections, "INTERPRETED", False)
    monkeypatch.setattr(hyper_connections, "launch", own.note)
    monkeypatch.setattr(hyper_connections, "FEW", 0)
    bounds = WarmupSpec.of(evolve(FLASH, hidden_size=hidden, hc_eps=eps), LIMITS, aligned_rows=True, layer_parts=True)
    call, norm = StreamsCall(4, hidden, 3), torch.ones(hidden, device=DEVICE)
    fixed = hc_tuning.FIXED["sm_90"]
    with with_tuning(hc_tuning.HOPPER, fixed=fixed), launching_nothing(), observed() as mixes:
        for norm_weight in (None, norm, norm.bfloat16()):
            call.change_weights(norm_weight=norm_weight, hc_sinkhorn_eps=eps)
            ops.mhc_fused_post_pre(call.x, call.residual, call.post, call.comb, call.weights)
        monkeypatch.setattr(hyper_connections, "launch", launch)
        foreseen = {*hyper_connections.variants(bounds, deterministic=deterministic)}

    assert own.variants | {*mixes} == foreseen
    tiles = [dict(variant.constants) for variant in own.variants]
    assert tiles == [{"SLICES": 1, "STAGES": 3} if deterministic else {"SLICES": 2, "STAGES": 2}]
    assert hyper_connections.CHUNK * own.products_bytes // 3 <= ops.transient_bytes(hyper_connections.CHUNK)


def test_a_deterministic_backend_foresees_the_shared_kernels_for_one_number_of_tokens() -> None:
    bounds = WarmupSpec.of(FLASH, LIMITS, aligned_rows=True, layer_parts=True)
    variants = {*Sm90Backend(deterministic=True).kernel_variants(bounds, DeviceFacts.named("sm_90"))}
    constants: dict[str, Any] = {
        name: [dict(variant.constants) for variant in variants if variant.name == name]
        for name in ("products_kernel", "mix_kernel")
    }
    products = [variant for variant in variants if variant.name == "products_kernel"]
    of_new = [variant for variant in products if dict(variant.types)["X"] != "none"]

    tiles = {
        (c["BLOCK_M"], c["BLOCK_K"], c["STAGES"]) for v in products if v not in of_new for c in [dict(v.constants)]
    }
    assert tiles == {(64, 32, 3)}
    assert len(of_new) == 1
    assert {c["BLOCK_R"] for c in constants["mix_kernel"]} == {2}
    # the head has no iterations
    assert {(c["MIXES"], c["BY_FACTORS"]) for c in constants["mix_kernel"]} == {(24, True), (4, False)}


def test_a_model_without_epsilon_has_no_factors() -> None:
    bounds = WarmupSpec.of(evolve(FLASH, hc_eps=0.0), LIMITS, aligned_rows=True, layer_parts=True)
    variants = {*Sm90Backend().kernel_variants(bounds, DeviceFacts.named("sm_90"))}

    assert {dict(v.constants)["BY_FACTORS"] for v in variants if v.name == "mix_kernel"} == {False}


@pytest.mark.matrix
def test_its_variants_keep_every_limit() -> None:
    """Warm-up also foresees them, and the products that only deterministic calls have."""
    forms = told_by("-m", "tests.backends.sm90.hyper_connections.compiles")

    assert forms == [["post_products_tiles"], ["products_kernel"], ["post_products_tiles"]]

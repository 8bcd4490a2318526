"""DSV4ATTN_TRACE writes a line for each call of an op, and changes nothing else."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dsv4attn import SingleLayer, forward_mqa
from dsv4attn.config import Settings, load_settings
from dsv4attn.core.contract.backend import Backend
from dsv4attn.core.contract.phased import PhasedBackend
from dsv4attn.core.contract.problem import Problem
from dsv4attn.core.metadata.forward_context import set_forward_context
from dsv4attn.core.model.geometry import LayerKind, ModelGeometry
from dsv4attn.errors import ConfigError
from dsv4attn.selection import load_backend, select_backend
from dsv4attn.selection.reference_ops import reference_ops_of
from dsv4attn.selection.tracing import TracedBackend
from dsv4attn.testing.case import chosen
from dsv4attn.testing.cases.table import CASES
from dsv4attn.testing.conform import Subject, conform
from tests.harness import SMALL, forward_args
from tests.selection.planted_ops import install_planted
from tests.vendor_wheel import VendorWheels

VARIABLE = "DSV4ATTN_TRACE"
LINE = re.compile(r"^dsv4attn: (\w+) by (\w+), (no layer|layer [\w ]+(?: of [\w.]+)?), ([a-z ]+): (.*)$")
Lines = Callable[[], list[tuple[Any, ...]]]


@pytest.fixture
def traced_lines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Lines:
    """Set the variable to a file. Returns (op, source, layer, phase, arguments) of each line written since."""
    path = tmp_path / "trace.txt"
    monkeypatch.setenv(VARIABLE, str(path))

    def lines() -> list[tuple[Any, ...]]:
        matches = [LINE.match(line) for line in path.read_text(encoding="utf-8").splitlines()]
        path.write_text("", encoding="utf-8")
        return [match.groups() if match else () for match in matches]

    return lines


def layer_of(backend: Backend, kind: str = "c4a") -> SingleLayer:
    return SingleLayer(SMALL, kind, device="cpu", backend=backend, max_requests=2, max_tokens=32, max_model_len=64)


def run(layer: SingleLayer) -> list[Tensor]:
    generator = torch.Generator("cpu").manual_seed(3)
    request, results = layer.new_request(), []
    for n in (31, 1, 1):
        hidden = torch.randn(n, layer.hidden_size, generator=generator).to(layer.dtype)
        results += layer.step((request, hidden))
    return results


def test_each_call_of_an_op_is_one_line(traced_lines: Lines) -> None:
    layer = layer_of(load_backend("triton"))
    request = layer.new_request()
    layer.step((request, layer.random_hidden(31)))
    prefill = traced_lines()
    layer.step((request, layer.random_hidden(1)))
    decode = traced_lines()

    assert all(prefill)
    assert [line[0] for line in prefill if line[2] != "no layer"] == [
        "norm_q_kv",
        "qnorm_rope_kv_insert",
        "save_partial_states", "compress_norm_rope_store", "save_partial_states", "compress_norm_rope_store",
        "indexer_q_rope_quant", "select_topk", "compute_global_topk_indices_and_lens", "prefill", "inv_rope_o_proj",
    ]  # fmt: skip
    for lines, phase in ((prefill, "prefill"), (decode, "decode")):
        assert {line[1] for line in lines} == {"triton"}
        of_layer = [line for line in lines if line[2] != "no layer"]
        assert {(line[2], line[3]) for line in of_layer} == {("layer c4a ratio 4 of layer", phase)}
        # the builder's ops are of the whole step
        assert {line[0] for line in lines if line[2] == "no layer"} >= {"build_token_maps", "build_window_indices"}
        assert len([line for line in lines if line[0] == phase]) == 1
    (attend,) = (line for line in decode if line[0] == "decode")
    assert "q=bf16[1, 4, 32] " in attend[4]
    assert "window=fp8_ds_mla[" in attend[4]
    (select,) = (line for line in decode if line[0] == "select_topk")
    assert "token_map.visible_lens=int32[1]" in select[4]


def test_each_run_of_a_prepared_call_is_a_line(traced_lines: Lines) -> None:
    """Layers of a kind share the calls that the first of them prepared."""
    arguments = forward_args(LayerKind.CSA)
    arguments["backend"] = load_backend("triton")
    forward_mqa(**arguments)
    first = traced_lines()
    forward_mqa(**arguments)
    second = traced_lines()

    assert {line[0] for line in first} >= {"decode", "prefill"}
    assert first == second
    # without a bound layer the call itself says the kind
    assert {line[2] for line in first} == {"layer c4a ratio 4"}


@pytest.mark.parametrize("kind", ["swa", "c4a", "c128a"])
def test_a_trace_changes_no_bit(traced_lines: Lines, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    with_trace = run(layer_of(load_backend("reference"), kind))
    assert {line[2].split()[1] for line in traced_lines() if line[2] != "no layer"} == {kind}
    monkeypatch.setenv(VARIABLE, "0")
    without = run(layer_of(load_backend("reference"), kind))

    assert all(map(torch.equal, with_trace, without))
    assert traced_lines() == []


def test_lines_of_gathered_prefill_name_the_rows(traced_lines: Lines) -> None:
    run(layer_of(load_backend("reference")))
    ops = [line[0] for line in traced_lines()]
    run(layer_of(load_backend("sm90")))
    fused = [line for line in traced_lines() if line[0] == "prepare_rows"]

    assert {"dequantize_and_gather_k_cache", "combine_topk_swa_indices"} <= {*ops}
    assert all(line[3] == "prefill" for line in fused)


def test_a_line_says_whose_op_runs(traced_lines: Lines, monkeypatch: pytest.MonkeyPatch, wheels: VendorWheels) -> None:
    install_planted(wheels)
    monkeypatch.setenv("DSV4ATTN_REFERENCE_OPS", "attend,select_topk,builder_ops")
    backend = load_backend("acme")
    run(layer_of(backend))
    sources = {line[0]: line[1] for line in traced_lines()}

    assert reference_ops_of(backend) == ("attend", "select_topk", "builder_ops")
    assert {sources[op] for op in ("decode", "prefill", "select_topk", "build_token_maps")} == {"reference"}
    assert {sources[op] for op in ("qnorm_rope_kv_insert", "indexer_q_rope_quant", "inv_rope_o_proj")} == {"acme"}


def test_hyper_connections_are_traced_too(traced_lines: Lines) -> None:
    geometry = ModelGeometry.preset("flash")
    backend = load_backend("reference")
    assert isinstance(backend, TracedBackend)
    streams = torch.randn(3, geometry.hc_mult, 8, generator=torch.Generator("cpu").manual_seed(1))
    post = torch.ones(3, geometry.hc_mult, 1)
    backend.layer_ops.mhc_post(streams[:, 0], streams, post, torch.ones(3, geometry.hc_mult, geometry.hc_mult))
    (line,) = traced_lines()

    assert line[:4] == ("mhc_post", "reference", "no layer", "no phase")
    assert line[4].startswith(f"x=fp32[3, 8] residual=fp32[3, {geometry.hc_mult}, 8] ")


def test_a_compiled_layer_is_traced_when_it_runs(traced_lines: Lines) -> None:
    layer = layer_of(load_backend("reference"))
    request = layer.new_request()
    layer.step((request, layer.random_hidden(31)))
    compiled = torch.compile(lambda hidden, positions: layer.layer(hidden, positions) + 1, backend="eager")
    traced_lines()
    for _ in range(2):
        counts = [(request, 1)]
        with torch.no_grad(), set_forward_context(layer.caches.metadata(layer.caches.batch(counts))):
            compiled(layer.random_hidden(1), layer.caches.positions(counts))
        layer.caches.advance(counts)
        lines = traced_lines()
        assert len([line for line in lines if line[0] == "decode"]) == 1
        assert {line[2:4] for line in lines if line[2] != "no layer"} == {("layer c4a ratio 4 of layer", "decode")}


def test_a_line_runs_no_op_of_torch(capsys: pytest.CaptureFixture[str]) -> None:
    """So a trace neither waits for a device nor adds anything to a captured graph."""

    class NoOps(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise AssertionError(f"a trace ran {func}")

    class Silent(type(load_backend("reference"))):  # type: ignore[misc]
        def quantize_and_insert_k_cache(self, k: Any, cache: Any, slot_mapping: Any) -> None:
            pass

    layer = layer_of(load_backend("reference"))
    cache = layer.caches.caches[0].attention.swa
    backend = TracedBackend(Silent(), "1")
    keys, slots = torch.zeros(2, 32, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.int64)
    with NoOps():  # type: ignore[no-untyped-call]
        backend.quantize_and_insert_k_cache(keys, cache, slots)
    written = capsys.readouterr()

    assert written.out == ""
    assert written.err == (
        "dsv4attn: quantize_and_insert_k_cache by reference, no layer, no phase: k=bf16[2, 32] "
        f"cache=fp8_ds_mla[{cache.num_blocks} pages of 64] slot_mapping=int64[2]\n"
    )


def test_without_the_variable_nothing_is_around_a_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in (None, "", "0"):
        if value is None:
            monkeypatch.delenv(VARIABLE, raising=False)
        else:
            monkeypatch.setenv(VARIABLE, value)
        assert load_settings().trace == ""
        assert type(load_backend("triton")).__name__ == "GenericBackend"
    assert isinstance(load_backend("triton"), Backend)
    assert Settings().trace == ""


def test_a_file_that_cannot_be_written_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "no" / "folder"))
    with pytest.raises(ConfigError, match=r"^environment variable DSV4ATTN_TRACE: expected 0, 1 or a file that can be"):
        load_backend("triton")


@pytest.mark.matrix
def test_a_traced_backend_keeps_the_contract(traced_lines: Lines) -> None:
    cases = [case for case in chosen(CASES, None) if case.name in KIT_CASES]
    result = conform(Subject.named("reference", device="cpu"), cases)

    assert len(cases) == len(KIT_CASES)
    assert result.ok, result.verdict
    assert {*result.layer_parts.values()} == {"reference"}
    assert all(traced_lines())


KIT_CASES = ("decode-swa", "prefill-c4a", "mixed-c128a", "raw-c4a", "layers-c4a")


def test_copies_and_phases_are_traced(traced_lines: Lines) -> None:
    backend = load_backend("triton")
    copied = copy.deepcopy(backend)
    problems = [Problem.of(ModelGeometry.preset("flash"), "c4a", phase) for phase in ("decode", "prefill")]
    problems = [evolve(problem, lse=False) for problem in problems]
    pair = select_backend(*problems, backend="decode=triton,prefill=reference", device="cpu")

    assert isinstance(copied, TracedBackend)
    assert copied.wrapped is not backend.wrapped  # type: ignore[attr-defined]
    assert repr(copied).endswith(", traced>")
    assert copied.tuning == backend.tuning  # type: ignore[attr-defined]
    assert isinstance(pair, PhasedBackend)
    run(layer_of(pair))
    lines = traced_lines()
    assert {line[1] for line in lines if line[0] == "prefill"} == {"reference"}
    assert {line[1] for line in lines if line[0] == "decode"} == {"triton"}

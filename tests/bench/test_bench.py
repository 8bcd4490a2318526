"""Benchmarks measure what they say: the problem is right, and the figures follow from the times."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import Tensor

from dsv4attn.backends.reference.launch import ReferenceBackend
from dsv4attn.bench.measure import Measurement, measure
from dsv4attn.bench.overhead import Overhead, overhead
from dsv4attn.bench.problem import make_problem
from dsv4attn.cli import main
from dsv4attn.core.contract import AttentionCall, Phase
from dsv4attn.core.geometry import LayerGeometry, LayerKind, ModelGeometry
from dsv4attn.core.workspace import BufferSpec, simultaneous_bytes
from dsv4attn.selection import load_backend
from dsv4attn.testing import oracle

GEOMETRY = ModelGeometry(
    num_heads=2,
    head_dim=32,
    rope_dim=8,
    window=8,
    index_topk=6,
    layers=((LayerKind.SWA, 1), (LayerKind.C4A, 4), (LayerKind.C128A, 16)),
    max_position=4096,
    hidden_size=64,
    o_groups=2,
    o_lora_rank=16,
)


@pytest.mark.parametrize("kind", LayerKind)
@pytest.mark.parametrize("requests", [[(0, 40)], [(100, 1), (3, 1)]])
def test_a_problem_counts_the_keys_each_row_really_has(kind: LayerKind, requests: list[tuple[int, int]]) -> None:
    problem = make_problem(GEOMETRY, kind, requests, load_backend("reference"))
    problem.run()

    positions = [prefix + i for prefix, count in requests for i in range(count)]
    layer = problem.layer
    seen = [oracle.visible_keys(position, layer.window, layer.compress_ratio, None) for position in positions]
    limit = layer.topk or 10**9
    assert problem.keys_per_row.tolist() == [len(window) + min(len(entries), limit) for window, entries in seen]
    assert problem.flops == 4 * layer.num_heads * layer.head_dim * int(problem.keys_per_row.sum())
    assert bool(problem.out.isfinite().all())
    assert bool((problem.out != 0).any(-1).all())


def test_top_k_rows_are_distinct_visible_and_complete() -> None:
    problem = make_problem(GEOMETRY, LayerKind.C4A, [(0, 60)], load_backend("reference"))
    assert problem.topk_indices is not None
    for position, row in enumerate(problem.topk_indices.tolist()):
        entries = (position + 1) // 4
        chosen = [entry for entry in row if entry >= 0]
        assert len(set(chosen)) == len(chosen) == min(entries, 6)
        assert row[len(chosen) :] == [-1] * (6 - len(chosen))
        assert all(entry < entries for entry in chosen)


def test_figures_follow_from_the_times() -> None:
    measured = Measurement("swa", "prefill", 0, 4, 2.0, 3_000_000, [0.002, 0.004, 0.003], [0.001, 0.001, 0.003])
    assert (measured.step_ms, measured.products_ms, measured.ratio) == (3.0, 1.0, 2.0)
    np.testing.assert_allclose(measured.gflops, 1.0)


def test_measuring_runs_every_round_and_says_what_was_run() -> None:
    problem = make_problem(GEOMETRY, LayerKind.C4A, [(64, 5)], load_backend("reference"))
    measured = measure(problem, rounds=3)
    assert (measured.layer, measured.phase, measured.context, measured.tokens) == ("c4a", "prefill", 64, 5)
    assert len(measured.step_s) == len(measured.products_s) == 3
    assert min(*measured.step_s, *measured.products_s) > 0


class Scratchy(ReferenceBackend):
    """Wants scratch, and counts its attentions."""

    attended = 0

    def scratch(self, phase: Phase, layer: LayerGeometry, tokens: int, width: int) -> Sequence[BufferSpec]:
        return [((tokens, width), torch.float32)]

    def scratch_bound(self, phase: Phase, layer: LayerGeometry, max_tokens: int, max_width: int) -> int:
        return simultaneous_bytes(self.scratch(phase, layer, max_tokens, max_width))

    def decode(self, call: AttentionCall) -> None:
        call.scratch[0].fill_(torch.nan)
        self.attended += 1
        super().decode(call)


@pytest.mark.parametrize("form", ["dense", "ragged"])
@pytest.mark.parametrize("kind", LayerKind)
def test_each_road_of_the_overhead_but_the_idle_one_leads_to_the_same_output(kind: LayerKind, form: str) -> None:
    backend = Scratchy(decode_indices=form)
    problem = make_problem(GEOMETRY, kind, [(100, 1)], backend)
    problem.run()
    expected, backend.attended = problem.out.clone(), 0
    outs: list[Tensor] = []

    def note(call: Callable[[], None], device: torch.device) -> float:
        problem.out.fill_(torch.nan)
        call()
        outs.append(problem.out.clone())
        return 1.0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dsv4attn.bench.overhead.seconds", note)
        told = overhead(problem, rounds=4)

    assert [len(times) for times in (told.direct_s, told.plain_s, told.bound_s, told.idle_s)] == [4, 4, 4, 4]
    assert backend.attended == 4 * 5, "three roads and one call between rounds, in four rounds and one for warming up"
    for i, out in enumerate(outs):
        assert torch.equal(out, expected) if i % 4 < 3 else bool(out.isnan().all())


def test_shares_of_the_host_follow_from_the_fastest_tenth() -> None:
    slow = [100.0] * 60
    direct, plain, bound = ([2.0 * n] * 40 + slow for n in (1.0, 1.03, 1.2))
    told = Overhead("swa", direct, plain, bound, [1e-5] * 100)

    np.testing.assert_allclose([told.percent("plain"), told.percent("bound"), told.us("idle")], [3.0, 20.0, 10.0])
    assert told.as_json()["bound_us"] == told.us("bound")


def test_the_command_prints_one_object_or_a_table() -> None:
    options = ["bench", "--tokens", "8", "--prefix", "16", "--decodes", "2", "--rounds", "1"]
    told = json.loads(CliRunner().invoke(main, [*options, "--json"]).output)
    assert told["ok"]
    assert told["backend"] == "reference"
    assert [row["layer"] for row in told["results"]] == [kind for kind in ("swa", "c4a", "c128a") for _ in range(3)]
    assert [row["layer"] for row in told["host"]] == ["swa", "c4a", "c128a"]
    assert all(0 < row["idle_us"] < row["bound_us"] for row in told["host"])
    shown = CliRunner().invoke(main, options)
    assert shown.exit_code == 0
    assert "products" in shown.output
    assert "one decode token, c4a" in shown.output


def test_an_unknown_backend_is_an_error() -> None:
    failed = CliRunner().invoke(main, ["bench", "--backend", "reverence"])
    assert failed.exit_code == 2
    assert "did you mean 'reference'" in failed.output

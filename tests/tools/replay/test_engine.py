"""Whole replays of a small model: what is served, in which steps, and what the report says of it."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from attrs import evolve
from torch import Tensor

from dsv4attn.backends.reference.launch import ReferenceBackend
from dsv4attn.core.model.geometry import LayerKind, ModelGeometry
from dsv4attn.errors import ArgumentError, UnknownNameError
from dsv4attn.tools.replay.engine import Progress
from dsv4attn.tools.replay.results import Report
from dsv4attn.tools.replay.trace import generated_trace, shrink
from tests.tools.replay.bugs import Interrupted, WithoutSink
from tests.tools.replay.small import CONFIG, FORMS, GEOMETRY, TOKENS, replay, requests_of, run


class Recorder(ReferenceBackend):
    """Keeps the output of every position."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.outputs: dict[int, Tensor] = {}

    def inv_rope_o_proj(self, o: Tensor, positions: Tensor, *rest: Any) -> Tensor:
        self.outputs |= {position: o[i].clone() for i, position in enumerate(positions.tolist())}
        return super().inv_rope_o_proj(o, positions, *rest)


# what is served


@cache
def whole_run() -> Report:
    """The report of the small trace on all layers; it is run once."""
    return run()


def test_every_token_passes_through_every_layer_type() -> None:
    report = whole_run()

    assert report.ok
    assert (report.finished, report.requests) == (6, 6)
    assert report.prefill_tokens + report.decode_tokens == TOKENS
    assert (report.preemptions, report.recomputed_tokens) == (0, 0)
    assert [(x.kind, x.tokens, x.layers_in_model) for x in report.layers] == [
        ("swa", TOKENS, 1),
        ("c4a", TOKENS, 1),
        ("c128a", TOKENS, 1),
    ]
    assert all(min(x.seconds["insert"], x.seconds["attend"], x.seconds["project"]) > 0 for x in report.layers)


def test_the_built_in_trace_runs() -> None:
    assert run(requests=shrink(generated_trace(0), 150), check_rows=1, max_num_batched_tokens=128).ok


@pytest.mark.matrix
@pytest.mark.parametrize("block_size", [1, 3, 64])
def test_any_page_size_serves(block_size: int) -> None:
    assert run(block_size=block_size).ok


@pytest.mark.parametrize("kind", list(LayerKind))
def test_one_layer_type_alone_computes_what_it_does_with_others(kind: LayerKind) -> None:
    report = run(kinds=[kind])
    (alone,), beside = report.layers, whole_run().layers

    assert report.ok
    assert report.shares() == [1.0]
    assert alone.kind == kind.value
    assert alone.check is not None
    (same,) = (layer.check for layer in beside if layer.kind == alone.kind)
    assert same is not None
    assert (alone.check.rows, alone.check.worst) == (same.rows, same.worst)


def test_a_model_without_window_layers_still_has_its_mtp_ones() -> None:
    types = CONFIG["layer_types"][1:] * 2
    geometry = ModelGeometry.from_config({**CONFIG, "layer_types": types, "num_hidden_layers": 4})

    assert [x.kind for x in run(geometry=geometry).layers] == ["c4a", "c128a"]
    report = run(geometry=geometry, kinds=list(LayerKind))
    assert report.ok
    assert [(x.kind, x.layers_in_model) for x in report.layers] == [("swa", 0), ("c4a", 2), ("c128a", 2)]
    assert report.model_shares()[0] == 0


@pytest.mark.matrix
@pytest.mark.parametrize("cache", ["fp8_ds_mla", "bf16", "fp32"])
def test_chunks_do_not_change_what_is_computed(cache: str) -> None:
    request, result = requests_of((90, 20)), []
    for budget in (1, 7, 1000):
        backend = Recorder()
        assert run(backend, request, kinds=[LayerKind.CSA], max_num_batched_tokens=budget, cache=cache).ok
        assert sorted(backend.outputs) == list(range(109))
        result.append(torch.stack([backend.outputs[position] for position in range(109)]).double())

    # one bf16 step, or the order of fp32 sums
    tolerance = 1e-5 if cache == "fp32" else 2.0**-7
    for other in result[1:]:
        assert torch.allclose(result[0], other, rtol=tolerance, atol=tolerance / 10)


@pytest.mark.matrix
def test_requests_with_a_common_prefix_compute_the_same_there() -> None:
    requests = requests_of((600, 3), (550, 3), hash_ids=[(1, 2), (1, 3)])
    first, second = Recorder(), Recorder()
    for backend, request in ((first, requests[0]), (second, requests[1])):
        assert run(backend, [request], kinds=[LayerKind.HCA], max_num_batched_tokens=300, cache="fp32").ok
    same = [torch.allclose(first.outputs[i], second.outputs[i], rtol=1e-4, atol=1e-5) for i in range(550)]

    assert all(same[:512])
    assert not any(same[512:])
    assert run(requests=requests, max_num_batched_tokens=200, check_rows=8).ok


@pytest.mark.matrix
def test_with_scarce_memory_requests_are_preempted_and_come_out_right() -> None:
    requests = requests_of((250, 30), (250, 20), (240, 30))
    with pytest.raises(ArgumentError, match="max_kv_bytes") as refused:
        run(requests=requests, max_kv_bytes=1, max_num_batched_tokens=64)
    needed = int(refused.value.expected.split()[2].strip(","))
    report = run(requests=requests, max_kv_bytes=needed, max_num_batched_tokens=64, check_rows=2)

    assert report.ok
    assert report.finished == 3
    assert report.preemptions > 0
    assert report.prefill_tokens + report.decode_tokens == 279 + 269 + 269 + report.recomputed_tokens
    assert sum(x.kv_bytes_peak for x in report.layers) <= needed


@pytest.mark.matrix
def test_everything_is_repeatable() -> None:
    reports = [run(seed=seed) for seed in (3, 3, 4)]
    first, second, other = ([x.check.worst for x in report.layers if x.check] for report in reports)

    assert first == second != other


@pytest.mark.matrix
def test_all_rows_of_all_steps_can_be_checked() -> None:
    report = run(check_rows=32)

    assert report.ok
    assert [layer.check.rows for layer in report.layers if layer.check] == [TOKENS] * 3


def test_without_checks_nothing_fails_and_nothing_was_checked() -> None:
    report = run(WithoutSink(), check_rows=0)

    assert report.ok
    assert [layer.check for layer in report.layers] == [None, None, None]


# progress and interruption


def test_progress_is_reported_after_each_layer_type_and_ends_at_the_total() -> None:
    values: list[Progress] = []
    served = replay()
    report = served.run(values.append)

    assert [state.step for state in values] == [step for step in range(1, report.steps + 1) for _ in range(3)]
    assert values[-1] == Progress(served.total_tokens, report.steps, 1, 0)
    assert [state.tokens for state in values] == sorted(state.tokens for state in values)


def test_ctrl_c_leaves_a_report_of_what_has_run() -> None:
    report = run(Interrupted(45))

    assert report.interrupted
    assert not report.ok
    assert 0 < report.steps < 45
    assert 0 < report.finished < report.requests
    done = report.prefill_tokens + report.decode_tokens
    assert report.layers[0].tokens >= done > 0
    assert all(x.check is not None and x.check.ok for x in report.layers)


def test_ctrl_c_in_the_first_step_leaves_an_empty_report() -> None:
    report = run(Interrupted(0))

    assert (report.interrupted, report.steps, report.finished) == (True, 0, 0)
    assert [x.tokens_per_s for x in report.layers] == [0, 0, 0]
    assert report.shares() == [0, 0, 0]


# memory


def test_bytes_are_those_of_pages() -> None:
    # records of 24 codes, 8 bf16 and 8 bytes of scales; pages are multiples of 40 bytes; index keys of 36 bytes
    swa, c4a, c128a = run(block_size=4).layers
    c4a_bytes, c128a_bytes = 64 * (48 + 36) + 8, 16 * 48 + 32

    assert [x.kv_bytes_per_token for x in (swa, c4a, c128a)] == [0, c4a_bytes / 256, c128a_bytes / 256]
    assert {x.window_bytes_per_sequence for x in (swa, c4a, c128a)} == {3 * 200}
    assert 0 < swa.kv_bytes_peak < c128a.kv_bytes_peak < c4a.kv_bytes_peak


@pytest.mark.matrix
@pytest.mark.parametrize("forms", [FORMS[0], FORMS[-1]])
def test_no_layer_takes_more_workspace_than_its_plan(forms: dict[str, Any]) -> None:
    for layer in run(ReferenceBackend(**forms)).layers:
        assert 0 <= layer.workspace_bytes_peak <= layer.workspace_bytes_planned
        assert layer.workspace_bytes_peak > 0 or layer.kind == "swa"


# bad input


@pytest.mark.parametrize(
    ("change", "error", "problem"),
    [
        ({"cache": "fp8"}, UnknownNameError, "unknown cache 'fp8'; did you mean 'fp8_ds_mla'"),
        ({"requests": []}, ArgumentError, "requests: expected at least one, got none"),
        (
            {"requests": requests_of((3, 1), (4000, 200))},
            ArgumentError,
            r"request 1: expected at most the 4096 positions of small, got 4199 tokens -> shrink the requests",
        ),
        ({"max_kv_bytes": 100}, ArgumentError, "max_kv_bytes: expected at least [0-9]+, so that request 4 .101 tokens"),
        ({"geometry": evolve(GEOMETRY, layers=((LayerKind.CSA, 3),))}, ArgumentError, "a multiple of ratio 3"),
        ({"max_num_batched_tokens": 0}, ArgumentError, "max_num_batched_tokens"),
        ({"max_num_seqs": 0}, ArgumentError, "max_num_seqs"),
        ({"block_size": 0}, ArgumentError, "block_size"),
        ({"check_rows": -1}, ArgumentError, "check_rows"),
    ],
)
def test_bad_input_is_found_before_anything_runs(change: dict[str, Any], error: type[Exception], problem: str) -> None:
    with pytest.raises(error, match=problem):
        replay(**change)

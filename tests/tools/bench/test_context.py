"""Decode over ranks compared with one rank: sizes and memory, rounds on all ranks, what is wrong, and the tables."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from attrs import evolve
from rich.console import Console

from dsv4attn.backends.reference.launch import ReferenceBackend
from dsv4attn.core.context_parallel.attention import forward_mqa_over_ranks
from dsv4attn.core.context_parallel.selection import select_topk_over_ranks
from dsv4attn.errors import ArgumentError
from dsv4attn.tools.bench import context as bench
from dsv4attn.tools.bench import context_cases as sizes
from dsv4attn.tools.bench import context_step
from dsv4attn.tools.bench.clock import Spread
from dsv4attn.tools.bench.context import ContextRun
from dsv4attn.tools.bench.context_cases import check_memory, context_cases
from dsv4attn.tools.bench.forward_step import ForwardStep
from dsv4attn.tools.bench.rank_clock import RankClock, captured
from dsv4attn.tools.bench.report import context_text
from dsv4attn.tools.replay.over_ranks import MeteredContext
from tests.ranks import gloo_group
from tests.tools.bench.sample_runs import HERE

CPU = torch.device("cpu")
(CASE,) = context_cases(["flash_c4"], 2, [2100], 1, 1)


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[MeteredContext]:
    """A group of one rank."""
    with gloo_group(0, 1, tmp_path) as group:
        yield MeteredContext(group)


def measured(context: MeteredContext) -> bench.ContextResult:
    return bench.measure(CASE, ReferenceBackend(), context, context.sent, RankClock(CPU, context), 2)


def shown(*results: bench.ContextResult, width: int = 80, **facts: Any) -> list[str]:
    run = ContextRun(HERE, "2026-11-24 12:00", "", "sm90", "nccl", 2, 1, 20, graph=True, results=results)
    run = evolve(run, **facts)
    out = Console(width=width, file=io.StringIO(), record=True)
    out.print(context_text(run), crop=False)
    return [line.rstrip() for line in out.export_text().splitlines()]


def result(**facts: Any) -> bench.ContextResult:
    (case,) = context_cases(["flash_c4"], 8, [1048576], 2, 1)
    whole = {"entries": 1_226_833_920, "index keys": 283_115_520}
    part = {name: size // 2 for name, size in whole.items()}
    formula, sent = {"attention": 65792, "candidates": 4096}, {"attention": 65792.0, "candidates": 4096.0}
    spread = Spread(120e-6, 118e-6, 122e-6)
    times = (bench.PartTime("both", spread, Spread(100e-6, 99e-6, 101e-6)),)
    context_result = bench.ContextResult(case, 4.4e-3, 5e-3, 4096, (), times, whole, part, formula, sent)
    return evolve(context_result, **facts)


def test_bytes_are_those_of_whole_pages_and_of_a_rank() -> None:
    (case,) = context_cases(["flash_c4"], 8, [1048576], 2, 1)
    pages = 8 * 1048576 // 256

    assert (case.pages(1, 1), case.pages(2, 1), case.pages(3, 2)) == (4096, 2048, 1366)
    assert case.bytes(1, 1) - case.bytes(2, 1) > pages * 64 * (584 + 132) / 2
    assert case.bytes(2, 1) > 1.5 * pages * 64 * (584 + 132)


def test_what_does_not_fit_is_refused_before_anything_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "_free_bytes", lambda _, sharing: 12_000_000_000 // sharing)
    cases = context_cases(["flash_c4", "flash_c128"], 8, [8192, 1048576], 2, 1)
    check_memory(cases, 2, 1, CPU)
    expected = (
        r"--context: expected a case that fits the 3\.0 GB that are free for a rank on cpu, got 3\.9 GB \([\d,]+ byt"
    )
    with pytest.raises(ArgumentError, match=expected):
        check_memory(cases, 2, 1, CPU, sharing=4)


def test_free_memory_is_divided_by_the_ranks_of_a_host() -> None:
    whole, half = sizes._free_bytes(CPU, 1), sizes._free_bytes(CPU, 2)

    assert whole is not None
    assert half == pytest.approx(whole / 2, rel=0.2)


class Accelerator(RankClock):
    """A clock whose calls are hidden by four flushes or more."""

    def _warmed(self, call: Any) -> int:
        return 1

    def _span(self, call: Any, flushes: int, meet: Any = lambda: None) -> tuple[float, bool]:
        meet()
        call()
        return flushes / 1e3, flushes >= 4


def test_a_round_with_too_few_flushes_is_repeated(alone: MeteredContext) -> None:
    calls: list[str] = []
    single, ranks = Accelerator(CPU, alone).times_over_ranks(
        [lambda: calls.append("one")], [lambda: calls.append("ranks")], 2
    )

    assert calls == ["one"] * 3 + ["ranks"] * 3 + ["one", "ranks"]
    assert single == ranks == [Spread(4e-3, 4e-3, 4e-3)]


def test_a_call_is_captured_after_calls_that_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    module, calls = MagicMock(), list[str]()
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)

    def graph(_: Any, **options: Any) -> Any:
        calls.append(f"capture {options}")
        return nullcontext()

    module.graph.side_effect = graph
    replay = captured(lambda: calls.append("call"), torch.device("cuda", 1))

    assert calls == ["call"] * 3 + ["capture {'capture_error_mode': 'thread_local'}", "call"]
    assert replay is module.CUDAGraph.return_value.replay


def test_graphs_are_replayed_and_checked(alone: MeteredContext, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs: list[Any] = []

    def capture(call: Any, _: Any) -> Any:
        graphs.append(call)
        return call

    monkeypatch.setattr(bench, "captured", capture)
    result = bench.measure(CASE, ReferenceBackend(), alone, alone.sent, RankClock(CPU, alone), 1, graph=True)

    assert len(graphs) == 6
    assert result.wrong == ()


def test_a_group_of_one_rank_agrees_with_one_rank(alone: MeteredContext) -> None:
    result = measured(alone)

    assert result.wrong == ()
    assert 0 < result.error < 5e-3
    assert result.share == 1
    assert result.selected == 2 * 512
    assert [time.part for time in result.times] == ["scores, selection", "attention, merge", "both"]
    assert result.sent == result.formula


def test_a_wrong_merge_has_no_time(alone: MeteredContext, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = forward_mqa_over_ranks

    def wrong(context: Any, call: Any) -> None:
        whole(context, call)
        call.out[1].mul_(1.1)

    monkeypatch.setattr(context_step, "forward_mqa_over_ranks", wrong)
    result = measured(alone)

    assert result.times == ()
    assert len(result.wrong) == 1
    assert result.wrong[0].startswith("rank 0 of 1: attention is ")
    assert result.as_json()["times"] == []


def test_a_result_that_becomes_wrong_later_has_no_time(alone: MeteredContext, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, select = [0], select_topk_over_ranks

    def worse(*arguments: Any) -> None:
        select(*arguments)
        calls[0] += 1
        if calls[0] > 3:
            arguments[6][0, 0] += 1

    monkeypatch.setattr(context_step, "select_topk_over_ranks", worse)
    result = measured(alone)

    assert result.times == ()
    assert any("topk_indices of 1 of 2 tokens are not those that one rank selects" in line for line in result.wrong)


def test_one_rank_itself_is_checked_again(alone: MeteredContext, monkeypatch: pytest.MonkeyPatch) -> None:
    run, calls = ForwardStep.run, [0]

    def worse(step: Any) -> None:
        run(step)
        calls[0] += 1
        if calls[0] > 3:
            step.out.zero_()

    monkeypatch.setattr(ForwardStep, "run", worse)
    result = measured(alone)

    assert result.times == ()
    assert result.wrong[0].endswith(", on one rank itself after it was timed")


def test_a_nan_is_wrong_and_null(alone: MeteredContext, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context_step, "forward_mqa_over_ranks", lambda _, call: call.out.fill_(torch.nan))
    result = measured(alone)

    assert "attention is nan of the norm" in result.wrong[0]
    assert result.as_json()["error"] is None


@pytest.mark.parametrize("width", [80, 120])
def test_tables_fit_a_terminal(width: int) -> None:
    lines = shown(result(), width=width)

    assert max(map(len, lines)) <= width
    assert lines[1].startswith("2 ranks, interleave 1, nccl; sm90, replays of captured graphs, medians of")
    assert any(line.split() == ["both", "120.0", "±1.7%", "100.0", "±1.0%", "1.20"] for line in lines)
    assert any(line.split()[-4:] == ["entries", "1,226,833,920", "613,416,960", "0.500"] for line in lines)
    assert any(line.split()[-3:] == ["candidates", "4,096", "4,096"] for line in lines)


def test_what_is_wrong_is_named_and_a_star_is_explained() -> None:
    spread = Spread(1e-3, 1e-3, 1e-3, exposed=True)
    wrong = result(times=(), wrong=("rank 1 of 2: attention is 2.0e-01 of the norm from one rank's",))
    lines = shown(result(times=(bench.PartTime("both", spread, spread),)), wrong, width=120)

    assert "wrong: flash_c4 b=8 n=1048576: rank 1 of 2: attention is 2.0e-01 of the norm from one rank's" in lines
    assert any("1,000.0*" in line for line in lines)
    assert any(line.startswith("*: the host's own time") for line in lines)

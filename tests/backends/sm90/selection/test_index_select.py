"""Scores and selection in one launch on Hopper: when it serves, and next to two steps on the same inputs.

Where kernels are interpreted, the kernel of `tests.backends._triton.layer.scored` stands for Hopper's.
"""

from __future__ import annotations

from math import inf
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attrs import evolve
from torch import Tensor

from dsv4attn.backends._triton.interpreted import INTERPRETED
from dsv4attn.backends._triton.launching.runtime import observed
from dsv4attn.backends._triton.layer import ops as shared_ops
from dsv4attn.backends.sm90 import ops
from dsv4attn.backends.sm90.explain_notes import notes
from dsv4attn.backends.sm90.indexer import launch as index_logits
from dsv4attn.backends.sm90.launch import Sm90Backend
from dsv4attn.backends.sm90.selection import index_select
from dsv4attn.backends.sm90.tuning import LONGEST_BY_GROUPS, by_groups, in_one_launch, is_listed
from dsv4attn.core.contract.device import DeviceFacts
from dsv4attn.core.contract.problem import Problem
from dsv4attn.core.model.geometry import ModelGeometry
from dsv4attn.core.torch_ops.indexer import IndexQuery
from tests.backends._triton.layer import scored
from tests.backends.sm90.calls import measured_lines
from tests.backends.sm90.indexer.test_launch import DEVICE, drawn_call, hopper

UNITS = 132
FLASH = ModelGeometry.preset("deepseek-v4-flash")


def selected(select: Any, arguments: dict[str, Any], topk: int) -> tuple[Tensor, set[str]]:
    """What is selected, in rows that are apart, and names of the kernels that were launched."""
    tokens, table = arguments["token_map"].visible_lens.shape[0], arguments["token_map"].block_table
    whole = torch.full((tokens, topk + 3), 77, dtype=torch.int32, device=DEVICE)
    with observed() as seen:
        select(**arguments, out=whole[:, :topk], max_entries=table.shape[1] * arguments["cache"].block_size)
    assert (whole[:, topk:] == 77).all()
    return whole[:, :topk], {variant.name for variant in seen}


def in_two_steps(**arguments: Any) -> None:
    shared_ops.select_topk(**arguments, score=ops.score, deterministic=False)


def of_whole_numbers(arguments: dict[str, Any]) -> dict[str, Any]:
    """The same call, whose scores are exact in any order of their sums, and many of which are equal."""
    q = torch.randint(-2, 3, arguments["query"].values.shape, device=DEVICE).float().to(torch.float8_e4m3fn)
    arguments["cache"].region("nope").copy_(
        torch.randint(-2, 3, arguments["cache"].region("nope").shape, device=DEVICE)
        .float()
        .to(torch.float8_e4m3fn)
        .view(torch.uint8)
    )
    arguments["cache"].region("scale").fill_(1)
    weights = torch.randint(-2, 3, arguments["query"].weights.shape, device=DEVICE).float()
    return {**arguments, "query": IndexQuery(q, weights)}


@pytest.mark.skipif(not INTERPRETED, reason="a device has other kernels")
@pytest.mark.parametrize(
    ("case", "tokens", "topk"),
    [("served", 14, 9), ("few tokens", 11, 9), ("tokens of few", 14, 9), ("heads", 14, 9), ("page", 14, 9),
     ("many entries", 14, 1025), ("deterministic", 14, 9), ("none", 14, 0)],
)  # fmt: skip
def test_one_launch_serves_what_it_can_and_selects_what_two_steps_do(
    case: str, tokens: int, topk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ops, "in_one_launch", lambda count, *_: count >= 12)
    # for this launcher alone: the kernel of the scores cannot be interpreted either
    as_on_hopper = {**vars(index_logits), "serves": lambda query: query.values.shape[1:] == (64, 128)}
    monkeypatch.setattr(index_select, "index_logits", SimpleNamespace(**as_on_hopper))
    monkeypatch.setattr(index_select, "_launch", lambda *arguments: scored.select(*arguments[:5]))
    arguments = drawn_call(tokens, 48 if case == "page" else 64, 32 if case == "heads" else 64)
    if case != "page":
        arguments = of_whole_numbers(arguments)
    if case == "tokens of few":
        token_map = arguments["token_map"]
        arguments["token_map"] = evolve(token_map, block_table=token_map.block_table.repeat(3, 1)[:8])
    steps = Sm90Backend(deterministic=case == "deterministic").layer_ops
    actual, launched = selected(steps.select_topk, arguments, topk)
    expected, _ = selected(in_two_steps, arguments, topk)

    assert torch.equal(actual, expected)
    assert ("select_kernel" in launched) is (case == "served")
    assert case != "served" or launched == {"select_kernel"}


@pytest.mark.parametrize("page", [64, 128])
@pytest.mark.parametrize("topk", [1, 500, 512, 1024])
@pytest.mark.parametrize("tokens", [6, 41, 1100])
class TestOnDevice:
    pytestmark = hopper

    @pytest.mark.parametrize("lens", ["ragged", "alike"])
    def test_the_same_entries_are_selected_as_in_two_steps(self, tokens: int, topk: int, page: int, lens: str) -> None:
        arguments = drawn_call(tokens, page)
        if lens == "alike":
            arguments["token_map"].visible_lens.fill_(15 * page - 7)
        actual, launched = selected(index_select.select, arguments, topk)
        expected, _ = selected(in_two_steps, arguments, topk)

        assert torch.equal(actual, expected)
        assert launched == {"select_index"}

    def test_equal_scores_are_selected_in_order(self, tokens: int, topk: int, page: int) -> None:
        arguments = of_whole_numbers(drawn_call(tokens, page))
        expected, _ = selected(in_two_steps, arguments, topk)
        for _ in range(2):
            assert torch.equal(selected(index_select.select, arguments, topk)[0], expected)

    def test_what_is_launched_is_foreseen(self, tokens: int, topk: int, page: int) -> None:
        arguments = drawn_call(tokens, page)
        out = torch.empty(tokens, topk, dtype=torch.int32, device=DEVICE)
        with observed() as seen:
            assert index_select.select(**arguments, out=out, max_entries=900)

        assert [*seen] == [*index_select.variants(topk)]


def test_memory_does_not_grow_with_tokens_or_entries() -> None:
    held = index_select.scratch_bytes(1 << 20, 1024)

    assert held == index_select.scratch_bytes(1 << 21, 1024)
    assert held <= Sm90Backend().layer_ops.transient_bytes(1)


def measured() -> list[tuple[int, int, int, list[float]]]:
    """K, tokens, entries of calls; times in two steps, in one launch (inf: a decode), and by groups if measured."""
    prompts = [[*map(float, line)] for line in measured_lines("select_h100.txt")]
    both = [(int(topk), int(tokens), int(entries), times) for topk, tokens, entries, *times in prompts]
    for tokens, entries, topk, two_steps, groups, one_launch in measured_lines("select_groups_h100.txt"):
        times = [float(two_steps), float(one_launch), float(groups)]
        both.append((int(topk), int(tokens), int(entries), times))
    return both


def regrets(units: int = UNITS, *, topk: int | None = None, tokens: int | None = None) -> list[float]:
    """Time of the chosen way of each measured call, relative to the fastest one.

    units: multiprocessors. topk, tokens: what the choices are given instead of a call's own. Prompts that are selected
    by groups, and were not measured so, are left out.
    """
    lost = []
    for own, count, entries, times in measured():
        given, requests = tokens or count, count if times[1] == inf else 1
        way = 2 if by_groups(given, requests, entries) else 0
        if in_one_launch(given, requests, entries, topk or own, units):
            way = 1
        if way < len(times):
            lost.append(times[way] / min(times))
    return lost


def test_the_choice_is_that_of_the_measured_times() -> None:
    assert len(measured()) == 90
    assert len(regrets()) == 67
    assert max(regrets()) < 1.04


@pytest.mark.parametrize("change", [{"units": 16}, {"units": 10**6}, {"topk": 512}, {"topk": 1024}, {"tokens": 64}])
def test_another_choice_is_worse(change: dict[str, int]) -> None:
    assert max(regrets(**change)) > 1.05


def test_nothing_is_launched_at_once_without_tokens() -> None:
    assert not in_one_launch(0, 1, 65536, 1024, UNITS)


def test_decodes_of_several_tokens_are_chosen_for_like_prompts() -> None:
    assert by_groups(64, 64, 32_768)
    for requests in (32, 64):
        assert by_groups(requests, requests, LONGEST_BY_GROUPS)
        assert not by_groups(requests, requests, LONGEST_BY_GROUPS + 1)
    assert not by_groups(31, 31, 32_769)
    # for graphs of long contexts: each row as its own length wants it
    assert is_listed(31, 31, 32_769)
    assert is_listed(64, 64, LONGEST_BY_GROUPS + 1)
    assert not any(
        is_listed(*call) for call in ((32, 32, 32_769), (31, 31, 32_768), (62, 31, 1 << 20), (65, 65, 1 << 20))
    )
    for each, longest in ((2, 8192), (3, 8192), (4, 32_768), (15, 32_768)):
        assert by_groups(64 * each, 64, longest)
        assert not by_groups(64 * each, 64, longest + 1)
    assert in_one_launch(1024, 64, 16_384, 512, UNITS)


def test_explain_says_how_is_selected() -> None:
    device = DeviceFacts.named("sm_90")

    def said(*problem: Any, **changes: Any) -> list[str]:
        lines = notes(device, Problem.of(FLASH, *problem, **changes))
        return [line for line in lines if line.startswith("selection")]

    (line,) = said("c4a", "decode")
    assert "by groups of entries with 32,768 index keys at most, 262,144 for 32 requests or more" in line
    # requests of several tokens are chosen for like prompts
    (line,) = said("c4a", "decode", query_len=3)
    assert "64 requests of 3 tokens by groups of entries with 8,192 index keys at most, for" in line
    (line,) = said("c4a", "decode", query_len=16)
    assert "of 16 tokens by groups of entries with 8,192 index keys at most, in one launch with 16,384 or more" in line
    for topk, shorter, longer in ((512, "8,192", "16,384"), (1024, "32,768", "65,536")):
        (line,) = said("c4a", "prefill", topk=topk)
        assert f"by groups of entries with {shorter} index keys at most, in one launch with {longer} or more" in line
    assert not said("swa", "prefill")
    assert not said("c4a", "prefill", topk=2048)
    assert not said("c4a", "prefill", deterministic=True)

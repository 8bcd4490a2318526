"""Scores of index keys on Hopper, next to the shared kernel on the same inputs; and when it serves."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from attrs import evolve
from torch import Tensor

from dsv4attn.backends._triton.interpreted import INTERPRETED
from dsv4attn.backends._triton.launching.runtime import architecture, observed
from dsv4attn.backends._triton.layer.indexer import launch as shared_index_logits
from dsv4attn.backends.sm90.indexer import launch as index_logits
from dsv4attn.backends.sm90.launch import Sm90Backend
from dsv4attn.backends.sm90.selection import index_select
from dsv4attn.core.cache.index_records import store_index_keys
from dsv4attn.core.cache.layout import KVCacheLayout, PagedKVCache
from dsv4attn.core.torch_ops.arguments import TokenMap
from dsv4attn.core.torch_ops.indexer import IndexQuery
from tests.programs import told_by

hopper = [
    pytest.mark.device,
    pytest.mark.skipif(INTERPRETED or architecture() != "sm_90", reason="needs a Hopper GPU"),
]
DEVICE = torch.device("cpu" if INTERPRETED or not torch.cuda.is_available() else "cuda")


def drawn_call(tokens: int = 41, page: int = 64, heads: int = 64) -> dict[str, Any]:
    """Tokens of three requests and of one that does not exist, over ragged entries; some blocks are lost."""
    torch.manual_seed(tokens)
    layout = KVCacheLayout.index_fp8(128)
    cache = PagedKVCache.allocate(layout, 60, page, DEVICE)
    store_index_keys(torch.randn(60 * page, 128, device=DEVICE), cache, torch.arange(60 * page, device=DEVICE))
    table = torch.randperm(60)[: 3 * 15].view(3, 15).int().to(DEVICE)
    table[0, 3], table[1, 0], table[2, 5] = -1, 99, -(2**31)
    request = torch.sort(torch.randint(0, 3, (tokens,))).values.int().to(DEVICE)
    request[tokens // 2] = 7
    lens = torch.randint(0, 15 * page + 1, (tokens,), dtype=torch.int32).to(DEVICE)
    lens[::7] = 0
    q = torch.randn(tokens, heads, 128, device=DEVICE).to(torch.float8_e4m3fn)
    query = IndexQuery(q, torch.randn(tokens, heads, device=DEVICE))
    return {"query": query, "cache": cache, "token_map": TokenMap(table, request, lens)}


def scored(run: int, arguments: dict[str, Any], score: Any) -> tuple[Tensor, Tensor | None]:
    entries = int(arguments["token_map"].block_table.shape[1]) * arguments["cache"].block_size
    tokens = arguments["token_map"].visible_lens.shape[0]
    scores = torch.full((tokens, entries), 7.0, device=DEVICE)
    groups = -(-entries // run) * shared_index_logits.LANES if run else 0
    maxima = torch.full((tokens, groups), -torch.inf, device=DEVICE) if run else None
    if score is shared_index_logits.score:
        score = partial(score, by_length=False)
    assert score(**arguments, scores=scores, maxima=maxima, run=run) in ((run, 0), True)
    return scores, maxima


def alike(actual: Tensor, expected: Tensor) -> None:
    assert torch.equal(actual.isnan(), expected.isnan())
    assert torch.allclose(actual.nan_to_num(), expected.nan_to_num(), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("run", [0, 128])
@pytest.mark.parametrize("page", [64, 128])
@pytest.mark.parametrize("tokens", [6, 41, 300, 1100])
class TestOnDevice:
    pytestmark = hopper

    def test_scores_and_maxima_are_those_of_the_shared_kernel(self, tokens: int, page: int, run: int) -> None:
        arguments = drawn_call(tokens, page)
        actual, own_maxima = scored(run, arguments, index_logits.score)
        expected, maxima = scored(run, arguments, shared_index_logits.score)

        alike(actual, expected)
        if own_maxima is not None and maxima is not None:
            runs = -(-arguments["token_map"].visible_lens // run) * shared_index_logits.LANES
            seen = torch.arange(maxima.shape[1], device=DEVICE) < runs[:, None]
            alike(own_maxima[seen], maxima[seen])

    def test_tokens_that_see_the_same_are_shared_out_otherwise(self, tokens: int, page: int, run: int) -> None:
        arguments = drawn_call(tokens, page)
        arguments["token_map"].visible_lens.fill_(15 * page - 7)
        actual, own_maxima = scored(run, arguments, index_logits.score)
        expected, maxima = scored(run, arguments, shared_index_logits.score)

        alike(actual, expected)
        if own_maxima is not None and maxima is not None:
            alike(own_maxima, maxima)


class Logits:
    """Tokens of several requests, NaN after what they see and twice in it, and blocks that are lost."""

    def __init__(self, batch: int, drafts: int, page: int, lens: str) -> None:
        torch.manual_seed(batch)
        self.per, self.page, blocks = 11, page, 11 * batch
        raw = torch.full((blocks + 1, page * 132), 0x7F, dtype=torch.uint8, device=DEVICE)
        codes = torch.randn(blocks, page * 128, device=DEVICE).mul(64).to(torch.float8_e4m3fn)
        raw[:blocks, : page * 128] = codes.view(torch.uint8)
        scales = torch.exp2(torch.randint(-9, -4, (blocks, page), device=DEVICE).float())
        scales[0, 5] = torch.nan
        raw[:blocks, page * 128 :] = scales.view(torch.uint8)
        raw[blocks - 1, 3 * 128 + 7] = 0x7F
        self.cache = PagedKVCache(raw.view(-1, page, 132), KVCacheLayout.index_fp8(128))
        self.q = torch.randn(batch, drafts, 64, 128, device=DEVICE).to(torch.float8_e4m3fn)
        self.weights = torch.randn(batch * drafts, 64, device=DEVICE)
        most = self.per * page
        self.lens = torch.full((batch, drafts), most - 9, dtype=torch.int32, device=DEVICE)
        if lens == "ragged":
            self.lens = torch.randint(-3, most + 1, (batch, drafts), dtype=torch.int32, device=DEVICE)
            self.lens[batch // 2], self.lens[-1] = 0, most
        self.table = torch.randperm(blocks, device=DEVICE).int().view(batch, self.per)
        for request, seen in enumerate(self.lens.amax(1).clamp(min=0).tolist()):
            self.table[request, -(-seen // page) :] = blocks
        if batch > 2:
            self.table[0, 1], self.table[1, 0], self.table[2, -1] = -1, blocks + 9, -(2**31)

    def computed(self, function: Any, columns: int) -> Tensor:
        poison = torch.full((self.weights.shape[0], columns), 7.0, device=DEVICE)
        del poison
        arguments = self.q, self.cache, self.weights, self.lens, self.table
        logits: Tensor | None = function(*arguments, max_model_len=columns)
        assert logits is not None
        return logits


@pytest.mark.parametrize("lens", ["ragged", "alike"])
@pytest.mark.parametrize(("batch", "drafts", "page"), [(1, 2, 64), (5, 2, 128), (3, 3, 64), (40, 4, 64), (700, 2, 64)])
class TestLogits:
    pytestmark = hopper

    @pytest.mark.parametrize("further_columns", [-70, 0, 77, 3000])
    def test_they_are_those_of_the_shared_kernel(
        self, batch: int, drafts: int, page: int, lens: str, further_columns: int
    ) -> None:
        logits = Logits(batch, drafts, page, lens)
        columns = logits.per * page + further_columns
        for _ in range(2):
            actual = logits.computed(index_logits.fp8_paged_mqa_logits, columns)
            expected = logits.computed(shared_index_logits.fp8_paged_mqa_logits, columns)

            assert torch.equal(actual == -torch.inf, expected == -torch.inf)
            alike(actual.clamp(min=-1e30), expected.clamp(min=-1e30))

    def test_lengths_may_be_apart(self, batch: int, drafts: int, page: int, lens: str) -> None:
        logits = Logits(batch, drafts, page, lens)
        actual = logits.computed(index_logits.fp8_paged_mqa_logits, 500)
        logits.lens = torch.stack([logits.lens, logits.lens * 0 - 1], 2)[..., 0]
        again = logits.computed(index_logits.fp8_paged_mqa_logits, 500)

        assert torch.equal(actual.nan_to_num(nan=1e9), again.nan_to_num(nan=1e9))


class TestForms:
    pytestmark = hopper

    def test_what_is_launched_is_foreseen(self) -> None:
        logits, arguments = Logits(3, 2, 64, "ragged"), drawn_call(41)
        k = torch.randn(70, 128, device=DEVICE).to(torch.float8_e4m3fn)
        ends = torch.full((3,), 70, dtype=torch.int32, device=DEVICE)
        q, weights = logits.q[:, 0], logits.weights[:3]
        with observed() as seen:
            scored(0, arguments, index_logits.score)
            scored(128, arguments, index_logits.score)
            logits.computed(index_logits.fp8_paged_mqa_logits, 500)
            index_logits.fp8_mqa_logits(q, (k, torch.rand(70, device=DEVICE)), weights, ends * 0, ends)

        assert set(seen) == set(index_logits.variants(logits=True))


@pytest.mark.parametrize("tokens", [1, 40, 257])
class TestGathered:
    pytestmark = hopper

    def test_the_fields_function_is_that_of_the_shared_kernel(self, tokens: int) -> None:
        torch.manual_seed(tokens)
        k = torch.randn(700, 128, device=DEVICE).to(torch.float8_e4m3fn)
        q = torch.randn(tokens, 64, 128, device=DEVICE).to(torch.float8_e4m3fn)
        first = torch.randint(0, 600, (tokens,), dtype=torch.int32, device=DEVICE)
        end = (first + torch.randint(0, 300, (tokens,), device=DEVICE).int()).clamp(max=700)
        arguments = q, (k, torch.rand(700, device=DEVICE)), torch.randn(tokens, 64, device=DEVICE), first, end
        actual, expected = index_logits.fp8_mqa_logits(*arguments), shared_index_logits.fp8_mqa_logits(*arguments)
        assert actual is not None

        assert torch.equal(actual == -torch.inf, expected == -torch.inf)
        alike(actual.clamp(min=-1e30), expected.clamp(min=-1e30))


@pytest.mark.parametrize("case", ["heads", "page", "few tokens", "run", "interpreted"])
def test_what_it_does_not_serve_is_left_to_the_shared_kernel(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_logits, "INTERPRETED", case == "interpreted")
    arguments = drawn_call(
        2 if case == "few tokens" else 12, 48 if case == "page" else 64, 32 if case == "heads" else 64
    )
    tokens = arguments["token_map"].visible_lens.shape[0]
    scores = torch.zeros(tokens, 720, device=DEVICE)
    maxima, run = (torch.zeros(tokens, 4 * 64, device=DEVICE), 192) if case == "run" else (None, 0)
    with observed() as seen:
        assert not index_logits.score(**arguments, scores=scores, maxima=maxima, run=run)

    assert not seen
    assert (scores == 0).all()


@pytest.mark.parametrize("case", ["one token", "heads", "page", "interpreted"])
def test_logits_that_it_does_not_serve_are_left_to_the_shared_kernel(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_logits, "INTERPRETED", case == "interpreted")
    arguments = drawn_call(6, 48 if case == "page" else 64, 32 if case == "heads" else 64)
    query, tokens = arguments["query"], 1 if case == "one token" else 2
    q = query.values.view(6 // tokens, tokens, *query.values.shape[1:])
    lens = arguments["token_map"].visible_lens.view(6 // tokens, tokens)
    with observed() as seen:
        actual = index_logits.fp8_paged_mqa_logits(
            q,
            arguments["cache"],
            query.weights,
            lens,
            arguments["token_map"].block_table.repeat(2, 1)[: 6 // tokens],
            300,
        )

    assert actual is None
    assert not seen


def test_a_deterministic_backend_has_one_kernel_for_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> bool:
        raise AssertionError("asked")

    for name in ("score", "fp8_paged_mqa_logits", "fp8_mqa_logits"):
        monkeypatch.setattr(index_logits, name, refuse)
    steps, arguments = Sm90Backend(deterministic=True).layer_ops, drawn_call(6, heads=8)
    out = torch.empty(6, 4, dtype=torch.int32, device=DEVICE)
    query, cache, token_map = arguments["query"], arguments["cache"], arguments["token_map"]
    lens, table = token_map.visible_lens, token_map.block_table
    steps.select_topk(query, cache, evolve(token_map, visible_lens=lens.clamp(max=100)), out, 100)

    assert (out[lens == 0] == -1).all()
    q = query.values.unflatten(0, (3, 2))
    logits = steps.fp8_paged_mqa_logits(q, cache, query.weights, lens.view(3, 2), table, max_model_len=50)
    assert logits.shape == (6, 50)
    k, row = (
        torch.zeros(9, 128, device=DEVICE).to(torch.float8_e4m3fn),
        torch.zeros(6, dtype=torch.int32, device=DEVICE),
    )
    logits = steps.fp8_mqa_logits(query.values, (k, torch.ones(9, device=DEVICE)), query.weights, row, row + 9)
    assert (logits == 0).all()


@pytest.mark.matrix
@pytest.mark.parametrize("words", [["512"], pytest.param(["1024", "all"], marks=pytest.mark.slow)])
def test_every_form_keeps_every_limit_and_four_programs_fit_a_multiprocessor(words: list[str]) -> None:
    """The kernel that selects too may spill `index_select.SPILLS` bytes. Selection by groups has fewer programs."""
    found = told_by("-m", "tests.backends.sm90.indexer.compiles", *words)
    groups = found.pop("groups")

    assert [form for form in groups if form["reasons"] or not form["programs"]] == []
    assert len(groups) == (15 if "all" in words else 5)
    assert found == {
        "foreseen": True,
        "forms": [{"reasons": [], "programs": index_logits.PROGRAMS}] * 4,
        "selecting": [{"reasons": [], "programs": index_select.PROGRAMS}],
    }

"""Scores and selection in one kernel, on keys whose scores are any numbers, and next to the two steps.

Interpreted, lists have few places, so that short rows compact theirs many times.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from attrs import frozen
from hypothesis import strategies as st
from numpy.typing import NDArray

from dsv4attn.backends._triton.launching.runtime import observed
from dsv4attn.backends._triton.layer.indexer import launch as index_logits
from dsv4attn.backends._triton.layer.indexer.query import indexer_q_rope_quant
from dsv4attn.backends._triton.layer.selection import kernels_lists
from dsv4attn.backends._triton.layer.selection import launch as select
from dsv4attn.backends.sm90.selection import index_select as hopper
from dsv4attn.core.cache.index_records import store_index_keys
from dsv4attn.core.cache.layout import KVCacheLayout, PagedKVCache
from dsv4attn.core.torch_ops.arguments import TokenMap
from dsv4attn.core.torch_ops.indexer import IndexQuery
from tests.backends._triton.cache.caches import DEVICE
from tests.backends._triton.layer import kernels_scored as kernels_index_select
from tests.backends._triton.layer import scored as index_select
from tests.backends._triton.layer.test_select_topk import KINDS, interpreted, selected_by_oracle
from tests.core.attention.strategies import searched
from tests.programs import import_text

UNTOUCHED = 77
PAGE, DIM = 16, 16


@frozen
class Case:
    """Tokens of three requests, whose scores are drawn; one page of the second request is lost.

    lens: visible entries of each token, by the thousandth of `entries`. of: request of each token. places: of a list.
    """

    seed: int
    kind: str
    topk: int
    entries: int
    lens: Sequence[int] = (1000, 1000, 600)
    of: Sequence[int] = (0, 0, 1)
    tokens: int = 2
    places: int = 32

    def scores(self) -> NDArray[np.float32]:
        g = np.random.default_rng(self.seed)
        return np.array([KINDS[self.kind](g, self.entries) for _ in range(3)], dtype=np.float32)

    def call(self) -> dict[str, Any]:
        """Arguments of both steps: a score is the positive part of a number, less the positive part of its opposite."""
        pages = -(-self.entries // PAGE)
        cache = PagedKVCache.allocate(KVCacheLayout.rows(DIM, 0, dtype=torch.float32), 3 * pages + 1, PAGE, DEVICE)
        g = torch.Generator().manual_seed(self.seed)
        table = torch.randperm(3 * pages, generator=g).view(3, pages).int()
        keys = torch.zeros(3, pages * PAGE, DIM)
        keys[:, : self.entries, 0] = torch.from_numpy(self.scores())
        rows = cache.region("row")
        for r in range(3):
            rows[table[r].long().to(DEVICE)] = keys[r].view(pages, PAGE, DIM).to(DEVICE)
        if pages > 1:
            table[1, 1] = -1
        # no head is zero, whose product with infinity is NaN
        sign = torch.tensor([1.0, -1.0]).repeat(8)
        q = torch.zeros(len(self.of), 16, DIM)
        q[:, :, 0] = sign
        counts = [self.entries * n // 1000 if n <= 1000 else self.entries + n for n in self.lens]
        lens, of = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in (counts, list(self.of)))
        query = IndexQuery(q.to(DEVICE), (sign / 8).repeat(len(self.of), 1).to(DEVICE))
        return {"query": query, "cache": cache, "token_map": TokenMap(table.to(DEVICE), of, lens)}

    def agrees(self, module: ModuleType = index_select) -> bool:
        """Whether every row holds what the oracle selects, and nothing next to them was written."""
        call = self.call()
        whole = torch.full((len(self.of) + 1, self.topk + 9), UNTOUCHED, dtype=torch.int32, device=DEVICE)
        out = whole[:-1, : self.topk]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "SHORTEST", self.places)
            patch.setattr(module, "PART", 16 if self.places < 100 else 1024)
            module._constants.cache_clear()
            patch.setattr(module, "tile_of", lambda *_: index_logits.Tile(self.tokens, 16, 4, 1, 1))
            module.select(**call, out=out, max_entries=self.entries)
        actual = out.cpu().numpy().copy()
        out.fill_(UNTOUCHED)
        return bool((whole == UNTOUCHED).all()) and bool((actual == self.expected(**call)).all())

    def expected(self, query: IndexQuery, cache: PagedKVCache, token_map: TokenMap) -> NDArray[np.int64]:
        """What the oracle selects among stored scores."""
        scores = torch.full((len(self.of), self.entries), torch.nan, device=DEVICE)
        index_logits.score(query, cache, token_map, scores, None, 0)
        return selected_by_oracle(scores.cpu().numpy(), token_map.visible_lens.tolist(), self.topk)


cases = st.builds(
    Case,
    seed=st.integers(0, 2**16),
    kind=st.sampled_from(sorted(KINDS)),
    topk=st.sampled_from([1, 2, 3, 5, 8]),
    entries=st.sampled_from([1, 5, 16, 17, 40, 100, 300]),
    lens=st.lists(st.sampled_from([1000, 1000, 1003, 700, 300, 20, 0, -10]), min_size=5, max_size=5),
    of=st.lists(st.sampled_from([0, 0, 1, 2, 7, -1]), min_size=5, max_size=5),
    tokens=st.sampled_from([1, 2, 4]),
    places=st.sampled_from([32, 64]),
)


@pytest.mark.matrix
@searched(100, case=cases)
def test_the_largest_are_selected_whatever_the_scores_are(case: Case) -> None:
    assert case.agrees()


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_scores(kind: str) -> None:
    for seed, entries in enumerate((40, 300)):
        assert Case(seed, kind, 4, entries).agrees()


@pytest.mark.parametrize(("kind", "topk", "entries"), [("normal", 512, 5000), ("relu", 500, 3000)])
def test_rows_of_the_sizes_of_the_model(kind: str, topk: int, entries: int) -> None:
    case = Case(0, kind, topk, entries, [1000, 100], [0, 0], places=index_select.SHORTEST)
    assert case.agrees()


@pytest.mark.parametrize("layout", [KVCacheLayout.index_fp8(128), KVCacheLayout.index_mxfp4(128)])
@pytest.mark.parametrize("apart", [0, 3])
def test_codes_are_selected_as_in_two_steps(layout: KVCacheLayout, apart: int) -> None:
    torch.manual_seed(apart)
    cache = PagedKVCache.allocate(layout, 41, 64, DEVICE)
    slots = torch.arange(41 * 64, device=DEVICE)
    store_index_keys(torch.randn(len(slots), 128).round().to(DEVICE), cache, slots)
    q, w = torch.randn(5, 64 + apart, 128)[:, :64].to(DEVICE), torch.randn(5, 64 + apart)[:, :64].to(DEVICE)
    tables = torch.randn(5, 64, device=DEVICE)
    query = indexer_q_rope_quant(q, w, torch.arange(5, device=DEVICE), tables, layout)
    table = torch.randperm(41)[:40].view(2, 20).int().to(DEVICE)
    of = torch.tensor([0, 0, 0, 1, 1], dtype=torch.int32, device=DEVICE)
    lens = torch.tensor([700, 701, 1280, 3, 0], dtype=torch.int32, device=DEVICE)
    outs = []
    for step in (select_in_two_steps, index_select.select):
        out = torch.full((5, 64 + apart), UNTOUCHED, dtype=torch.int32, device=DEVICE)[:, :64]
        step(query, cache, TokenMap(table, of, lens), out, 1280)
        outs.append(out)

    assert torch.equal(*outs)


def select_in_two_steps(
    query: IndexQuery, cache: PagedKVCache, token_map: TokenMap, out: torch.Tensor, max_entries: int
) -> None:
    scores = torch.empty(out.shape[0], max_entries, device=DEVICE)
    index_logits.score(query, cache, token_map, scores, None, 0, exact_rows=True)
    select.select(scores, None, token_map.visible_lens, out, max_entries, run=0)


def test_nothing_happens_without_rows_or_columns() -> None:
    call = Case(0, "normal", 4, 40).call()
    for tokens, topk in ((0, 5), (3, 0)):
        part = {"query": call["query"].tokens(slice(tokens)), "token_map": call["token_map"].tokens(slice(tokens))}
        out = torch.empty(tokens, topk, dtype=torch.int32, device=DEVICE)
        with observed() as seen:
            index_select.select(part["query"], call["cache"], part["token_map"], out, 40)
        assert not seen


@pytest.mark.parametrize("topk", [1, 512, 513, 1024, 2048])
def test_a_list_has_space_for_what_is_kept_and_a_tile(topk: int) -> None:
    for module in (index_select, hopper):
        assert topk + module.slack_of(topk) <= module.capacity_of(topk) // 2


BUGS = {
    "members of a tile in one place": (kernels_index_select, "tl.cumsum(one, 0)", "tl.maximum(one, 1)"),
    "unseen entries": (kernels_index_select, "sees = entry[:, None] < lens[None, :]",
                       "sees = entry[:, None] < number[None, :] + limit"),
    "the first request of a tile only": (kernels_index_select, "uniform(highest + 1, ASM)", "uniform(lowest + 1, ASM)"),
    "a bound too high": (kernels_lists, "    return kept, key", "    return kept, key + (1 << 22)"),
    "members that are lost": (kernels_lists, "append(keys, members, key,", "append(keys, members, key + SIZE,"),
    "one token's bound for all": (kernels_lists, "tl.where(mine, score_of(key + 1), least)",
                                  "score_of(key + 1 + number * 0)"),
}  # fmt: skip


@interpreted
@pytest.mark.mutation
@pytest.mark.parametrize("bug", ["", *BUGS])
def test_planted_bugs_are_found(bug: str, tmp_path: Path) -> None:
    mutant = planted(*BUGS[bug], tmp_path) if bug else index_select
    agreed = all(
        Case(seed, kind, topk, entries, [1000, 300, 700, 1000], [0, 0, 1, 2], tokens).agrees(mutant)
        for seed, tokens in ((0, 2), (1, 4))
        for kind in ("normal", "few values", "ascending")
        for topk, entries in ((4, 300), (8, 100))
    )
    assert agreed is not bool(bug)


def planted(file: ModuleType, right: str, wrong: str, folder: Path) -> ModuleType:
    """A copy of the launcher, whose kernels have a bug in place of what is right in one of two files."""
    texts = {name: inspect.getsource(module) for name, module in KERNELS.items()}
    name = file.__name__.rpartition(".")[2]
    assert texts[name].count(right) == 1, f"the kernels no longer say {right!r} once"
    texts[name] = texts[name].replace(right, wrong)
    lists = import_text(folder / f"planted_lists_{folder.name}.py", texts["kernels_lists"])
    kernels = import_text(folder / f"planted_kernels_{folder.name}.py", texts["kernels_scored"])
    for function in ("make_space", "choose_listed"):
        setattr(kernels, function, getattr(lists, function))
    copy = import_text(folder / f"planted_{folder.name}.py", inspect.getsource(index_select))
    vars(copy)["select_kernel"] = kernels.select_kernel
    return copy


KERNELS = {"kernels_lists": kernels_lists, "kernels_scored": kernels_index_select}

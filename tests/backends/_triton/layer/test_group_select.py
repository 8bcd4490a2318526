"""Selection by groups of entries, judged entry by entry, and scores of one token at a time with their groups' maxima.

Forms are small, so that short rows take every way: all entries at once, groups first, many equal scores.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from attrs import field, frozen
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from dsv4attn.backends._triton.layer import group_select, index_logits, kernels_group_select, ops
from dsv4attn.backends._triton.layer.group_select import Form
from dsv4attn.core.cache.index_records import store_index_keys
from dsv4attn.core.cache.layout import KVCacheLayout, PagedKVCache
from dsv4attn.core.torch_ops.arguments import TokenMap
from dsv4attn.core.torch_ops.indexer import IndexQuery
from dsv4attn.testing import oracle_layer
from tests.backends._triton.cache.caches import DEVICE
from tests.backends._triton.layer.test_select_topk import KINDS, LOWEST, interpreted
from tests.programs import import_text

UNTOUCHED = 77
in_two_steps = partial(ops.select_topk, score=index_logits.score, deterministic=False)


def forms(topk: int, entries: int) -> list[Form]:
    """All entries at once, and groups first with few and many groups more than K."""
    grouped = [
        Form(
            size, 1 << (max(-(-entries // group), 1) - 1).bit_length(), group, size // group - topk, 4, probes, sub, 32
        )
        for size, group, probes, sub in ((16, 4, 2, 1), (32, 4, 4, 2), (64, 8, 2, 2))
        if size // group >= topk
    ]
    return [Form(512, warps=4, sub=1), Form(512, warps=4, probes=4), *grouped]


@frozen
class Case:
    """Rows of scores that are selected at once.

    lens: visible entries of each, by the thousandth of entries, or fewer than none. maxima: whether they are given.
    """

    seed: int
    kind: str
    topk: int
    entries: int
    lens: Sequence[int] = field(default=(1000, 1003, 600))
    maxima: bool = True

    def scores(self) -> NDArray[np.float32]:
        g = np.random.default_rng(self.seed)
        return np.array([KINDS[self.kind](g, self.entries) for _ in self.lens], dtype=np.float32)

    def counts(self) -> list[int]:
        return [self.entries * n // 1000 if n >= 0 else n for n in self.lens]

    def agrees(self, form: Form, module: ModuleType = group_select) -> bool:
        """Whether every row holds what the oracle selects, and nothing next to them was written."""
        scores, width = self.scores(), -(-self.entries // 64) * 64
        wide = np.full((len(scores), width), np.nan, dtype=np.float32)
        wide[:, : self.entries] = scores
        whole = torch.full((len(scores) + 1, self.topk + 9), UNTOUCHED, dtype=torch.int32, device=DEVICE)
        out, lens = whole[:-1, : self.topk], torch.tensor(self.counts(), dtype=torch.int32, device=DEVICE)
        maxima = torch.from_numpy(self._maxima(wide, form.group)).to(DEVICE) if self.maxima and form.groups else None
        module.choose(torch.from_numpy(wide).to(DEVICE), maxima, lens, out, self.entries, form)
        actual = out.cpu().numpy().copy()
        out.fill_(UNTOUCHED)
        return bool((whole == UNTOUCHED).all()) and bool((actual == self.expected(scores)).all())

    def _maxima(self, wide: NDArray[np.float32], group: int) -> NDArray[np.float32]:
        """Of each group that a row sees; NaN after that."""
        maxima = np.full((len(wide), wide.shape[1] // group), np.nan, dtype=np.float32)
        for row, x, count in zip(maxima, wide, self.counts(), strict=True):
            seen = max(min(count, self.entries), 0)
            known = np.full(len(x), -np.inf, dtype=np.float32)
            known[:seen] = np.where(np.isnan(x[:seen]), -np.inf, np.maximum(x[:seen], np.float32(LOWEST)))
            row[: -(-seen // group)] = known.reshape(-1, group).max(1)[: -(-seen // group)]
        return maxima

    def expected(self, scores: NDArray[np.float32]) -> NDArray[np.int64]:
        rows = np.full((len(scores), self.topk), -1)
        for row, x, count in zip(rows, scores, self.counts(), strict=True):
            # -inf is the lowest finite number
            chosen = oracle_layer.select(np.maximum(x[: max(count, 0)].astype(np.float64), LOWEST), self.topk)
            row[: len(chosen)] = chosen
        return rows


cases = st.builds(
    Case,
    seed=st.integers(0, 2**16),
    kind=st.sampled_from(sorted(KINDS)),
    topk=st.sampled_from([1, 2, 3, 4, 8]),
    entries=st.sampled_from([1, 5, 15, 16, 17, 40, 100, 300, 500]),
    lens=st.lists(st.sampled_from([1000, 1000, 1003, 700, 300, 20, 0, -10]), min_size=1, max_size=3),
    maxima=st.booleans(),
)


@given(cases, st.integers(0, 4))
def test_the_largest_are_selected_whatever_the_scores_are(case: Case, number: int) -> None:
    those = forms(case.topk, case.entries)
    assert case.agrees(those[number % len(those)])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("maxima", [True, False])
def test_every_kind_of_scores(kind: str, maxima: bool) -> None:
    for seed, entries in enumerate((40, 500)):
        assert all(Case(seed, kind, 4, entries, maxima=maxima).agrees(form) for form in forms(4, entries))


@pytest.mark.parametrize("kind", ["normal", "nearly all zero", "odd"])
@pytest.mark.parametrize(("topk", "entries"), [(512, 2048), (512, 8000), (1024, 16_000), (512, 140_000)])
def test_rows_of_the_sizes_of_the_model(kind: str, topk: int, entries: int) -> None:
    form = group_select.form_of(entries, topk)
    assert form is not None
    assert Case(0, kind, topk, entries, [1000], maxima=False).agrees(form)


def test_every_row_of_a_model_has_a_form() -> None:
    for topk in (1, 512, 1024):
        for entries in (1, 2048, 8192, 8193, 65_536, 262_144):
            form = group_select.form_of(entries, topk)

            assert form is not None
            assert form.size >= entries or form.groups * form.group >= entries
            assert not form.groups or topk + form.slack == form.size // form.group
            assert max(form.size, form.groups) <= 16_384
    assert group_select.form_of(262_145, 512) is None
    assert group_select.form_of(2048, 1025) is None


def call_of(layout: KVCacheLayout, page: int) -> tuple[dict[str, Any], int]:
    """Five tokens, one of each request, two of which do not exist, on pages of which two are lost."""
    torch.manual_seed(page)
    cache = PagedKVCache.allocate(layout, 60, page, DEVICE)
    q = torch.randn(5, 64, layout.head_dim, device=DEVICE)
    if layout.is_quantised:
        slots = torch.arange(60 * page, device=DEVICE)
        store_index_keys(torch.randn(len(slots), layout.head_dim, device=DEVICE), cache, slots)
        q = q.to(torch.float8_e4m3fn)
    else:
        cache.region("row").normal_()
    table = torch.randperm(60)[:51].view(3, 17).int().to(DEVICE)
    table[1, 2], table[0, 1] = -1, 99
    of = torch.tensor([0, 1, 2, 7, -1], dtype=torch.int32, device=DEVICE)
    lens = torch.tensor([900, 817, -3, 500, 200], dtype=torch.int32, device=DEVICE)
    query = IndexQuery(q, torch.randn(5, 64, device=DEVICE))
    return {"query": query, "cache": cache, "token_map": TokenMap(table, of, lens)}, 17 * page + 5


@pytest.mark.parametrize("page", [64, 48])
@pytest.mark.parametrize("layout", [KVCacheLayout.index_fp8(128), KVCacheLayout.rows(32, 0, dtype=torch.float32)])
def test_the_same_entries_are_selected_as_in_two_steps(page: int, layout: KVCacheLayout) -> None:
    call, entries = call_of(layout, page)
    expected = torch.full((5, 33), UNTOUCHED, dtype=torch.int32, device=DEVICE)
    in_two_steps(**call, out=expected, max_entries=entries)
    ways: list[tuple[Form, Any]] = [
        (Form(2048, warps=4), None),
        (Form(512, 256, 8, 31, 4), None),
        (Form(1024, 64, 16, 31, 4, tile=256), index_logits.score),
    ]
    for form, score in ways:
        out = torch.full((5, 40), UNTOUCHED, dtype=torch.int32, device=DEVICE)
        group_select.select(**call, out=out[:, :33], max_entries=entries, form=form, score_rows=score)

        assert torch.equal(out[:, :33], expected)
        assert (out[:, 33:] == UNTOUCHED).all()


def test_many_rows_are_selected_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    call, entries = call_of(KVCacheLayout.index_fp8(128), 64)
    outs = []
    for most in (1, 1 << 20):
        monkeypatch.setattr(group_select, "SCORES_BYTES", most)
        outs.append(torch.empty(5, 20, dtype=torch.int32, device=DEVICE))
        group_select.select(**call, out=outs[-1], max_entries=entries, form=Form(512, 256, 8, 44, 4))
    assert torch.equal(*outs)


def test_nothing_happens_without_columns() -> None:
    scores, lens = torch.zeros(3, 64, device=DEVICE), torch.zeros(3, dtype=torch.int32, device=DEVICE)
    group_select.choose(scores, None, lens, torch.empty(3, 0, dtype=torch.int32, device=DEVICE), 9, Form(2048))


# bugs that must be found

BUGS = {
    "NaN is a low number": ('LOWEST_SCORE), float("-inf"))', 'LOWEST_SCORE), tl.where(live, -3e38, float("-inf")))'),
    "-inf is absent": ("tl.maximum(x, LOWEST_SCORE)", "x"),
    "unseen entries": ("known_of(x, entry < count), (SIZE,)", "known_of(x, entry < count + 3), (SIZE,)"),
    "one tie less": ("tied > wanted - above)", "tied > wanted - above - 1)"),
    "one tie more": ("(tied > wanted - above)", "(tied > wanted - above + 1)"),
    "one place further": ("tl.cumsum(reaches.to(tl.int32), 0) - 1", "tl.cumsum(reaches.to(tl.int32), 0)"),
    "nothing after the last": ("column >= chosen", "column >= wanted"),
    "a group too few": ("groups = (count + (GROUP - 1)) // GROUP", "groups = count // GROUP"),
    "a bound too high": ("wanted // 8, 2, 0, ASM)", "0, 2, 0, ASM)\n        low += 1 << 22"),
    "no score is the highest": ("    high += 1\n    if SUB", "    if SUB"),
}  # fmt: skip


@pytest.mark.mutation
@interpreted
@pytest.mark.parametrize("name", ["", *BUGS])
def test_planted_bugs_are_found(name: str, tmp_path: Path) -> None:
    text = inspect.getsource(kernels_group_select)
    if name:
        right, wrong = BUGS[name]
        assert text.count(right) == 1, f"the kernels no longer say {right!r} once"
        text = text.replace(right, wrong)
    kernels = import_text(tmp_path / f"planted_kernels_{tmp_path.name}.py", text)
    copy = import_text(tmp_path / f"planted_{tmp_path.name}.py", inspect.getsource(group_select))
    vars(copy)["choose_groups_kernel"] = kernels.choose_groups_kernel
    agreed = all(
        Case(seed, kind, topk, entries, [1000, 997, 300, 9], maxima=seed % 2 == 0).agrees(form, copy)
        for seed in range(4)
        for kind in ("normal", "few values", "odd", "nan", "ascending")
        for topk, entries in ((4, 499), (3, 40), (8, 17))
        for form in forms(topk, entries)
    )
    assert agreed is not bool(name)

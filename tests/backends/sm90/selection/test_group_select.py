"""Selection by groups of entries, judged entry by entry; when it serves; and next to two steps on the same inputs.

Forms are small, so that short rows take every way: all entries at once, groups first, many equal scores.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from math import nan
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve, field, frozen
from hypothesis import strategies as st
from numpy.typing import NDArray

from dsv4attn.backends._triton.compiling.variant import Variant
from dsv4attn.backends._triton.interpreted import INTERPRETED
from dsv4attn.backends._triton.layer.indexer.launch import TILES, tiles_for
from dsv4attn.backends._triton.layer.selection import launch as select
from dsv4attn.backends._triton.layer.selection import scratch
from dsv4attn.backends.sm90 import ops
from dsv4attn.backends.sm90.indexer import launch as index_logits
from dsv4attn.backends.sm90.launch import Sm90Backend
from dsv4attn.backends.sm90.selection import group_select, kernels_group_select
from dsv4attn.backends.sm90.selection.group_select import Form
from dsv4attn.backends.sm90.tuning import LONGEST_BY_GROUPS
from dsv4attn.core.cache.layout import KVCacheLayout, PagedKVCache
from dsv4attn.core.contract.device import DeviceFacts
from dsv4attn.core.torch_ops import selection as torch_selection
from dsv4attn.core.torch_ops.arguments import TokenMap
from dsv4attn.core.torch_ops.indexer import IndexQuery
from dsv4attn.tools.cli.common import geometry_of
from dsv4attn.tools.cli.compile import bounds_of
from tests.backends._triton.layer import test_select_topk
from tests.backends._triton.layer.test_select_topk import LOWEST, interpreted, selected_by_oracle
from tests.backends.sm90.indexer.test_launch import DEVICE, drawn_call, hopper
from tests.backends.sm90.selection.test_index_select import in_two_steps, of_whole_numbers, selected
from tests.core.attention.strategies import searched
from tests.programs import import_text

UNTOUCHED = 77
KINDS = test_select_topk.KINDS | {
    "fewer than selected": lambda g, n: np.where(g.random(n) < 3 / n, g.standard_normal(n), np.nan)
}


def forms(topk: int, entries: int) -> list[Form]:
    """All entries at once, and groups first with few and many groups more than K."""
    grouped = [
        Form(size, 1 << (max(-(-entries // group), 4) - 1).bit_length(), group, size // group - topk, 32)
        for size, group in ((16, 4), (32, 4), (64, 8))
        if size // group >= topk
    ]
    chain = [Form(64, 256, 16, 4 - topk, 32, short=8, direct=32, middle=8)] if topk <= 4 else []
    return [Form(512, short=16), *grouped, *chain]


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
        if self.maxima and form.groups:
            maxima, form = torch.from_numpy(self._maxima(wide, form)).to(DEVICE), evolve(form, read=0)
        else:
            maxima = torch.full((len(scores), group_select.columns_of(self.entries, form)[0]), nan, device=DEVICE)
        # numbers of groups that no bug wrote are 0, and what a bug writes after its row stays in this memory
        plan, lists = None, torch.zeros(len(scores) + 16, 1024, device=DEVICE)[: len(scores)]
        if form.block:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(select, "SPLIT_LENGTH", 1024)
                plan = select.plan_of(len(scores), self.entries, self.topk, 132)
            lists = torch.full((len(scores), plan.lists), nan, device=DEVICE)
        module.choose(torch.from_numpy(wide).to(DEVICE), maxima, lens, out, self.entries, form, lists, plan)
        actual = out.cpu().numpy().copy()
        out.fill_(UNTOUCHED)
        return bool((whole == UNTOUCHED).all()) and bool((actual == self.expected(scores)).all())

    def _maxima(self, wide: NDArray[np.float32], form: Form) -> NDArray[np.float32]:
        """Of each group that a row sees; NaN after that."""
        maxima = np.full((len(wide), wide.shape[1] // min(form.group, 8)), np.nan, dtype=np.float32)
        for row, x, count in zip(maxima, wide, self.counts(), strict=True):
            seen = max(min(count, self.entries), 0)
            group = min(form.group, 8) if seen <= form.coarse else form.group
            known = np.full(len(x), -np.inf, dtype=np.float32)
            known[:seen] = np.where(np.isnan(x[:seen]), -np.inf, np.maximum(x[:seen], np.float32(LOWEST)))
            row[: -(-seen // group)] = known.reshape(-1, group).max(1)[: -(-seen // group)]
        return maxima

    def expected(self, scores: NDArray[np.float32]) -> NDArray[np.int64]:
        return selected_by_oracle(scores, self.counts(), self.topk)


cases = st.builds(
    Case,
    seed=st.integers(0, 2**16),
    kind=st.sampled_from(sorted(KINDS)),
    topk=st.sampled_from([1, 2, 3, 4, 8]),
    entries=st.sampled_from([1, 5, 15, 16, 17, 40, 100, 300, 500]),
    lens=st.lists(st.sampled_from([1000, 1000, 1003, 700, 300, 20, 0, -10]), min_size=1, max_size=3),
    maxima=st.booleans(),
)


@searched(100, case=cases, number=st.integers(0, 3))
def test_the_largest_are_selected_whatever_the_scores_are(case: Case, number: int) -> None:
    those = forms(case.topk, case.entries)
    assert case.agrees(those[number % len(those)])


@pytest.mark.in_turn
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("maxima", [True, False])
def test_every_kind_of_scores(kind: str, maxima: bool) -> None:
    for seed, entries in enumerate((40, 500)):
        assert all(Case(seed, kind, 4, entries, maxima=maxima).agrees(form) for form in forms(4, entries))


def at_the_lengths_of_forms(kind: str, module: ModuleType = group_select) -> bool:
    """Whether rows are selected from that are as long as a size for shorter rows has entries, and one more."""
    return Case(1, kind, 4, 1000, [7, 8, 9, 31, 32, 33, 64, 65, 66]).agrees(forms(4, 1000)[-1], module)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_the_lengths_where_forms_change(kind: str) -> None:
    assert at_the_lengths_of_forms(kind)


@pytest.mark.parametrize("kind", ["normal", "clustered", "odd"])
def test_long_rows_are_listed_in_parts_and_shorter_ones_are_not(kind: str) -> None:
    form = Form(2048, 256, 16, select.slack_of(4), short=256, direct=1024, middle=256, block=2048)
    assert Case(0, kind, 4, 9000, [1000, 220, 100, 20, 0]).agrees(form)


@pytest.mark.parametrize("kind", ["normal", "nearly all zero", "odd"])
@pytest.mark.parametrize(("topk", "entries"), [(512, 2048), (512, 8000), (1024, 16_000), (512, 140_000)])
def test_rows_of_the_sizes_of_the_model(kind: str, topk: int, entries: int) -> None:
    form = group_select.form_of(entries, topk, with_maxima=entries > 32_768)
    assert form is not None
    assert Case(0, kind, topk, entries, [1000]).agrees(form)


def test_every_row_of_a_model_has_a_form() -> None:
    for topk in (1, 512, 1024):
        for entries in (1, 2048, 8192, 8193, 65_536, 262_144):
            form = group_select.form_of(entries, topk, with_maxima=True, captured=True)

            assert form is not None
            assert form.size >= entries or form.groups * form.group >= entries
            assert not form.groups or topk + form.slack == form.size // form.group
            assert max(form.size, form.groups) <= 16_384
            shorter = form_lengths(form)
            assert shorter == sorted(shorter)
            assert max(shorter) < entries
    listed = group_select.form_of(1 << 20, 1024, with_maxima=True, captured=True, listed=True)
    assert listed is not None
    assert listed.block == 4096 <= listed.alone
    assert group_select.form_of(LONGEST_BY_GROUPS, 1024, with_maxima=True) is not None
    assert group_select.form_of(LONGEST_BY_GROUPS + 1, 512, with_maxima=True) is None
    assert group_select.form_of(2048, 1025, with_maxima=True) is None


def form_lengths(form: Form) -> list[int]:
    """Lengths up to which rows have sizes of their own."""
    return [0, *filter(None, (form.short, form.direct, 8 * form.middle))]


def call_of(each: int, page: int = 64, heads: int = 64, tokens: int = 14) -> dict[str, Any]:
    """Tokens whose scores are exact in any order of their sums, of requests of `each` tokens."""
    call = of_whole_numbers(drawn_call(tokens, page, heads))
    token_map = call["token_map"]
    return {**call, "token_map": evolve(token_map, block_table=token_map.block_table.repeat(5, 1)[: tokens // each])}


def by_torch(**arguments: Any) -> None:
    torch_selection.select_topk(**arguments)


@pytest.mark.skipif(not INTERPRETED, reason="a device has other kernels")
@pytest.mark.parametrize("groups", [0, 256])
@pytest.mark.parametrize("each", [1, 7])
@pytest.mark.parametrize("most", [1, 2**27])
@pytest.mark.pairwise
def test_the_same_entries_are_selected_as_by_torch(
    each: int, groups: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of requests of one token and of more, with and without groups, all rows at once and one after the other."""
    call, form = call_of(each), Form(512, groups, 8, 31, 64 if each > 1 else 0) if groups else Form(2048)
    monkeypatch.setattr(group_select, "form_of", lambda *_, **__: form)
    expected, _ = selected(by_torch, call, 33)
    monkeypatch.setattr(scratch, "BYTES", most)
    actual, launched = selected(Sm90Backend().layer_ops.select_topk, call, 33)

    assert torch.equal(actual, expected)
    assert launched == {"choose_groups_kernel", "score_groups_kernel" if each == 1 else "score_kernel"}


def odd_call(seed: int) -> tuple[dict[str, Any], int]:
    """A call with lost blocks, requests that do not exist, rows apart and lengths of every kind; and K, up to eight.

    Scores are exact in any order of their sums; some are NaN.
    """
    torch.manual_seed(seed)
    g = np.random.default_rng(seed)
    page, requests, columns = int(g.choice([64, 128, 192])), int(g.integers(3, 7)), int(g.integers(1, 6))
    tokens = int(g.choice([requests, int(g.integers(1, requests + 1)), 3 * requests]))
    cache = PagedKVCache.allocate(KVCacheLayout.index_fp8(128), 20, page, DEVICE)
    entries = cache.region("nope")
    entries.copy_(torch.randint(-2, 3, entries.shape).float().to(torch.float8_e4m3fn).view(torch.uint8))
    scales, last = cache.region("scale"), torch.where(torch.arange(page) % 8 == 7, 64.0, 1.0)
    # NaN here and there; or the largest score of a group is its last one's, which a row may not see
    drawn = torch.tensor([1.0, 1.0, 2.0, 0.0, nan])[torch.randint(0, 5, scales.shape)]
    scales.copy_(drawn if seed % 2 else last.reshape(1, page, 1).expand(scales.shape))
    table = torch.randint(-1, 22, (requests + 2, columns + 3)).int()[1 : requests + 1, 1 : columns + 1]
    longest = columns * page + int(g.choice([-61, -3, 0, 70]))
    lens = g.choice([0, 1, 8, longest, longest + 99, -5, *g.integers(0, longest, 12)], tokens)
    q = torch.randint(-2, 3, (tokens + 2, 70, 160)).float().to(torch.float8_e4m3fn)[1 : tokens + 1, :64, 16:144]
    weights = torch.randint(-2, 3, (tokens, 80)).float()[:, 7:71]
    numbers = torch.from_numpy(g.choice([-1, *[*range(requests)] * 3, requests], tokens)).int()
    token_map = TokenMap(table, numbers, torch.from_numpy(lens).int())
    call = {"query": IndexQuery(q, weights), "cache": cache, "token_map": token_map, "max_entries": longest}
    return call, int(g.choice([1, 5, 7, 8, 8, 8]))


def odd_call_agrees(seed: int, module: ModuleType = group_select) -> bool:
    """Whether an odd call is selected from as in two steps of torch's, and nothing next to its rows is written."""
    call, topk = odd_call(seed)
    tokens, requests = call["token_map"].visible_lens.shape[0], call["token_map"].block_table.shape[0]
    chain = {"short": 8, "direct": 64, "middle": 16} if seed % 2 else {}
    form = Form(64, 256, 8, 8 - topk, 0 if tokens <= requests else 32, **chain)
    whole = torch.full((tokens + 1, topk + 5), UNTOUCHED, dtype=torch.int32)
    expected = torch.empty(tokens, topk, dtype=torch.int32)
    # torch takes no longer rows than it is told of
    token_map = evolve(call["token_map"], visible_lens=call["token_map"].visible_lens.clamp(max=call["max_entries"]))
    torch_selection.select_topk(**{**call, "token_map": token_map}, out=expected)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "form_of", lambda *_, **__: form)
        patch.setattr(scratch, "BYTES", 2**27 if seed % 3 else 8000)
        assert module.select(**call, out=whole[:tokens, :topk], score_rows=ops.score)
    same = torch.equal(whole[:tokens, :topk], expected)
    return same and bool((whole[tokens:] == UNTOUCHED).all() and (whole[:, topk:] == UNTOUCHED).all())


@pytest.mark.matrix
@interpreted
def test_odd_calls_are_selected_from_as_by_torch() -> None:
    assert all(odd_call_agrees(seed) for seed in range(8))


@interpreted
def test_a_call_without_tokens_or_columns_writes_nothing() -> None:
    call, _ = odd_call(0)
    none = {**call, "query": call["query"].tokens(slice(0, 0)), "token_map": call["token_map"].tokens(slice(0, 0))}
    assert group_select.select(**none, out=torch.empty(0, 5, dtype=torch.int32), score_rows=ops.score)
    out = torch.empty(call["token_map"].visible_lens.shape[0], 0, dtype=torch.int32)
    assert group_select.select(**call, out=out, score_rows=ops.score)


def test_scores_of_a_tile_and_its_maxima_are_within_a_row() -> None:
    """Rows have columns for multiples of 64 entries, and a tile is written whole."""
    assert 64 % tiles_for(index_logits.LAYOUT, "sm_90").one.entries == 0
    assert 64 % TILES["sm_90"].one.entries == 0


@pytest.mark.parametrize("case", ["heads", "page", "many entries", "slower", "deterministic"])
def test_what_it_does_not_serve_is_selected_in_two_steps(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call = call_of(1, 48 if case == "page" else 64, 32 if case == "heads" else 64, tokens=5)
    if case == "slower":
        monkeypatch.setattr(group_select, "by_groups", lambda *_: False)
    topk = 1025 if case == "many entries" else 9
    actual, launched = selected(Sm90Backend(deterministic=case == "deterministic").layer_ops.select_topk, call, topk)

    assert torch.equal(actual, selected(by_torch, call, topk)[0])
    assert "choose_groups_kernel" not in launched
    if case in {"heads", "page"}:
        assert not group_select.select(**call, out=actual, max_entries=900, score_rows=ops.score)


@pytest.mark.parametrize("topk", [512, 1024])
def test_what_is_launched_is_foreseen_and_nothing_else(topk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of every length, of requests of one token and of more. The kernels are not run."""
    seen: set[Variant] = set()

    def record(kernel: Any, _: Any, args: Any, constants: Any, *, num_warps: int, **options: Any) -> None:
        seen.add(Variant.of(kernel, args, constants, num_warps, options.pop("num_stages", 1), **options))

    monkeypatch.setattr(group_select, "launch", record)
    monkeypatch.setattr(select, "launch", record)
    for tokens, requests, longest, captured in (
        (64, 64, 18, False), (1024, 3, 15, False), (64, 64, 18, True), (5, 5, 18, True)
    ):  # fmt: skip
        monkeypatch.setattr(group_select, "is_capturing", lambda _, captured=captured: captured)
        call, out = drawn_call(tokens), torch.empty(tokens, topk, dtype=torch.int32, device=DEVICE)
        table = call["token_map"].block_table.repeat(22, 1)[:requests]
        call["token_map"] = evolve(call["token_map"], block_table=table)
        lengths = [n for bits in range(11, longest + 1) for n in (2**bits, 2**bits - 70)]
        # graphs are captured for the longest rows of a model
        for entries in [2**longest] if captured else lengths:
            assert group_select.select(**call, out=out, max_entries=entries, score_rows=lambda *_: None)

    monkeypatch.undo()
    bounds = bounds_of(geometry_of("flash" if topk == 512 else "pro"), "e4m3fn")
    bounds = evolve(bounds, limits=evolve(bounds.limits, max_model_len=2**20))
    foreseen = {*Sm90Backend().kernel_variants(bounds, DeviceFacts.named("sm_90"))}
    assert seen == {v for v in foreseen if v in seen or v.name in {"choose_groups_kernel", "score_groups_kernel"}}


def test_memory_of_groups_is_as_large_as_they_are() -> None:
    for topk in (1, 512, 1024):
        for entries in (2048, 8192, 8200, 32_768, 65_536, 262_144):
            for with_maxima in (True, False):
                form = group_select.form_of(entries, topk, with_maxima=with_maxima)
                assert form is not None
                groups, lists = group_select.columns_of(entries, form)
                assert not form.groups or groups * (8 if form.middle or with_maxima else form.group) >= entries
                assert not form.groups or lists >= max(form.size // form.group, form.direct // 8)


class TestOnDevice:
    pytestmark = hopper

    @pytest.mark.parametrize("topk", [1, 500, 512, 1024])
    @pytest.mark.parametrize("each", [1, 7])
    def test_the_same_entries_are_selected_as_in_two_steps(self, each: int, topk: int) -> None:
        call = call_of(each)
        expected, _ = selected(in_two_steps, call, topk)
        actual, launched = selected(Sm90Backend().layer_ops.select_topk, call, topk)

        assert torch.equal(actual, expected)
        assert "choose_groups_kernel" in launched

    def test_a_captured_graph_selects_the_same(self) -> None:
        call, out = call_of(1), torch.empty(14, 512, dtype=torch.int32, device=DEVICE)
        assert group_select.select(**call, out=out, max_entries=900, score_rows=ops.score)
        expected, graph = out.clone(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            group_select.select(**call, out=out, max_entries=900, score_rows=ops.score)
        out.fill_(UNTOUCHED)
        graph.replay()

        assert torch.equal(out, expected)


def test_nothing_happens_without_columns() -> None:
    scores, lens = torch.zeros(3, 64, device=DEVICE), torch.zeros(3, dtype=torch.int32, device=DEVICE)
    group_select.choose(scores, None, lens, torch.empty(3, 0, dtype=torch.int32, device=DEVICE), 9, Form(2048), None)


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
    "a bound too high": ("        guess = fewer", "        low += 3 << 22\n        guess = fewer"),
    "a bound of few groups": ("tl.where(at_low >= wanted, least, low)", "tl.where(at_low > 0, least, low)"),
    "a guess counts twice": ("reached * 0, guess, reached >> 16", "reached * 0, guess, reached >> 15"),
    "NaN are counted": ("(largest >= score_of(low))", "(tl.maximum(largest, -3e38) >= -3e38)"),
    "no score is the highest": ("    high += 1\n    if not BOUNDED", "    if not BOUNDED"),
    "the last of a group": ("(count + 3) // 4, other=0.0)\n        tl.", "count // 4, other=0.0)\n        tl."),
    "a later request's table": ("(request >= 0) & (request < requests)", "request >= 0"),
    "an earlier request's table": ("(request >= 0) & (request < requests)", "request < requests"),
    "columns of no request": ("columns = tl.where(exists, columns, 0)", "columns += 0"),
    "unseen entries in maxima": ("known_of(score, entry < count)", "known_of(score, entry >= 0)"),
    "a length of another size": ("(count > SHORT) & (count <= DIRECT)", "(count >= SHORT) & (count < DIRECT)"),
    "groups of a longer row": ("if count > coarse:", "if count >= 0:"),
    "NaN in maxima": ("known_of(score, entry <", "known_of(tl.where(score == score, score, 1e9), entry <"),
    "maxima of the next group": ("start // EACH + tl.arange(0,", "start // EACH + 1 - tl.arange(0,"),
}  # fmt: skip
OF_CALLS = {
    "a later request's table",
    "an earlier request's table",
    "columns of no request",
    "unseen entries in maxima",
    "groups of a longer row",
    "NaN in maxima",
    "maxima of the next group",
}
"""Bugs of what is around the selection of a row: calls with keys and tables find them."""


@pytest.mark.mutation
@interpreted
@pytest.mark.parametrize("name", ["", *BUGS])
def test_planted_bugs_are_found(name: str, tmp_path: Path) -> None:
    # two guesses a step for these few numbers too, as kernels have it for many; other tests have one
    text = inspect.getsource(kernels_group_select).replace("FEW = tl.constexpr(2048)", "FEW = tl.constexpr(0)")
    assert "FEW = tl.constexpr(0)" in text
    if name:
        right, wrong = BUGS[name]
        assert text.count(right) == 1, f"the kernels no longer say {right!r} once"
        text = text.replace(right, wrong)
    kernels = import_text(tmp_path / f"planted_kernels_{tmp_path.name}.py", text)
    copy = import_text(tmp_path / f"planted_{tmp_path.name}.py", inspect.getsource(group_select))
    vars(copy).update({name: getattr(kernels, name) for name in ("choose_groups_kernel", "score_groups_kernel")})
    if name in OF_CALLS:
        assert not all(odd_call_agrees(seed, copy) for seed in range(14))
        return
    agreed = at_the_lengths_of_forms("normal", copy) and all(
        Case(seed, kind, topk, entries, [1000, 997, 300, 9], maxima=seed % 2 == 0).agrees(form, copy)
        for topk, entries in ((8, 17), (3, 40), (4, 499))
        for seed in range(2)
        for kind in ("normal", "few values", "odd", "nan", "ascending", "fewer than selected")
        for form in forms(topk, entries)
    )
    assert agreed is not bool(name)
    assert name or all(odd_call_agrees(seed, copy) for seed in range(14))

"""Selection kernels, judged entry by entry, on scores that are equal, extreme, absent, clustered, sorted or garbage.

Interpreted, a program has few entries in registers, so that small rows take every way: short, folded, listed in parts,
folded again, and selected a second time because the maxima were wrong.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from attrs import field, frozen
from hypothesis import strategies as st
from numpy.typing import NDArray

from dsv4attn.backends._triton.interpreted import INTERPRETED
from dsv4attn.backends._triton.launching.runtime import observed
from dsv4attn.backends._triton.layer import ops as layer_ops
from dsv4attn.backends._triton.layer.selection import kernels as kernels_select
from dsv4attn.backends._triton.layer.selection import launch as select
from dsv4attn.backends._triton.layer.selection import scratch
from dsv4attn.testing.oracle import layer as oracle_layer
from tests.backends._triton.cache.caches import DEVICE
from tests.backends._triton.index_ops.index_trials import planted
from tests.core.attention.strategies import searched

UNTOUCHED = 77
FURTHER_COLUMNS = 80
"""Columns next to the rows of out; more than a program that goes wrong has entries in registers, if these are small."""
LOWEST = float(np.finfo(np.float32).min)
ODD = np.array([0, -0.0, np.inf, -np.inf, LOWEST, -LOWEST, 1, -1, np.nan, 1e-45, -1e-45])
Rng = np.random.Generator
interpreted = pytest.mark.skipif(not INTERPRETED, reason="what is compiled is not changed from outside")


def normal(g: Rng, n: int) -> NDArray[np.float64]:
    return g.standard_normal(n)


def clustered(g: Rng, n: int) -> NDArray[np.float64]:
    x, begin = normal(g, n), int(g.integers(n))
    x[begin : begin + int(g.integers(1, n + 1))] += 10
    return x


def periodic(g: Rng, n: int) -> NDArray[np.float64]:
    """All large ones are in a few groups, whatever groups are."""
    x = normal(g, n)
    x[int(g.integers(8)) :: int(g.choice([4, 8, 16, 32]))] += 10
    return x


def with_nan(g: Rng, n: int) -> NDArray[np.float64]:
    return np.where(g.random(n) < 0.5, np.nan, normal(g, n))


KINDS: dict[str, Callable[[Rng, int], NDArray[Any]]] = {
    "normal": normal,
    "relu": lambda g, n: np.maximum(normal(g, n) - 0.25, 0),
    "nearly all zero": lambda g, n: np.maximum(normal(g, n) - 2, 0),
    "equal": lambda g, n: np.full(n, g.choice(ODD)),
    "clustered": clustered,
    "periodic": periodic,
    "ascending": lambda g, n: np.sort(normal(g, n)),
    "descending": lambda g, n: -np.sort(normal(g, n)),
    "few values": lambda g, n: g.integers(-3, 4, n).astype(np.float64),
    "subnormal": lambda g, n: g.integers(-20, 21, n) * 1e-45,
    "zeros": lambda g, n: g.choice([0, -0.0, -1, np.nan], n),
    "odd": lambda g, n: g.choice(ODD, n),
    "nan": with_nan,
}
MAXIMA = "none", "right", "wrong", "nan"


@contextmanager
def few_in_registers(module: ModuleType = select) -> Iterator[None]:
    """Small tiles. On a device they stay: what is compiled there is what runs."""
    tiles = {16: module.Tile(16, 2, 4), 32: module.Tile(16, 1, 4)}
    small: dict[str, Any] = {"SHORTEST": 16, "LANES": 4, "RUN": 8, "SPLITS": 8, "CHUNK": 16, "LISTED": 1}
    small |= {"SHORT": {16: tiles[16], 32: module.Tile(32, 1, 4)}, "LONG": tiles}
    small |= {"DEFAULT": module.Tiles(tiles, tiles), "TILES": {}}
    small["LISTS"] = {16: module.Tile(8, 1, 4), 32: tiles[32]}
    # on a device of few cores, no row would have parts
    small["multiprocessors"] = lambda: 32
    caches = [value for value in vars(module).values() if hasattr(value, "cache_clear")]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in small.items() if INTERPRETED else ():
            patch.setattr(module, name, value)
        for function in caches:
            function.cache_clear()
        yield
    for function in caches:
        function.cache_clear()


def selected_by_oracle(scores: NDArray[np.float32], counts: Sequence[int], topk: int) -> NDArray[np.int64]:
    """[T, K] entries that are selected among the first `count` scores of each row, and then -1."""
    rows = np.full((len(scores), topk), -1)
    for row, x, count in zip(rows, scores, counts, strict=True):
        # -inf is the lowest finite number
        chosen = oracle_layer.select(np.maximum(x[: max(count, 0)].astype(np.float64), LOWEST), topk)
        row[: len(chosen)] = chosen
    return rows


@frozen
class Case:
    """Rows of scores that are selected at once.

    lens: visible entries of each, by the thousandth of max_entries. maxima: one of MAXIMA. split: length beyond which
    rows have parts. apart: columns between rows of scores.
    """

    seed: int
    kind: str
    topk: int
    max_entries: int
    lens: Sequence[int] = field(default=(1000, 1000, 600))
    maxima: str = "right"
    split: int = 32
    run: int = 8
    apart: int = 0

    def scores(self) -> NDArray[np.float32]:
        g = np.random.default_rng(self.seed)
        rows = [KINDS[self.kind](g, self.max_entries) for _ in self.lens if self.max_entries]
        return np.array(rows, dtype=np.float32).reshape(len(self.lens), self.max_entries)

    def counts(self) -> list[int]:
        return [self.max_entries * n // 1000 if n <= 1000 else self.max_entries + n for n in self.lens]

    def _maxima(self, lanes: int, scores: NDArray[np.float32]) -> NDArray[np.float32]:
        columns = -(-self.max_entries // self.run) * lanes
        if self.maxima == "nan":
            return np.full((len(scores), columns), np.nan, dtype=np.float32)
        g = np.random.default_rng((self.seed, 1))
        if self.maxima == "wrong":
            wrong = g.standard_normal((len(scores), columns), np.float32)
            return np.asarray(wrong * np.float32(g.choice([0.1, 1, 10, 100])))
        maxima = np.full((len(scores), columns), np.nan, dtype=np.float32)
        for row, x, count in zip(maxima, scores, self.counts(), strict=True):
            seen = max(min(count, self.max_entries), 0)
            row[: -(-seen // self.run) * lanes] = -np.inf
            entry = np.arange(seen)[~np.isnan(x[:seen])]
            np.maximum.at(row, entry // self.run * lanes + entry % lanes, x[entry])
        return maxima

    def agrees(self, module: ModuleType = select) -> bool:
        """Whether every row holds what the oracle selects, and nothing next to them was written."""
        scores = self.scores()
        wide = np.full((len(scores), self.max_entries + self.apart), np.nan, dtype=np.float32)
        wide[:, : self.max_entries] = scores
        given_maxima = None
        if self.maxima != "none" and self.max_entries:
            given_maxima = torch.from_numpy(self._maxima(module.LANES, scores)).to(DEVICE)
        whole = torch.full((len(scores) + 1, self.topk + FURTHER_COLUMNS), UNTOUCHED, dtype=torch.int32, device=DEVICE)
        out = whole[:-1, : self.topk]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "SPLIT_LENGTH", self.split)
            lens = torch.tensor(self.counts(), dtype=torch.int32, device=DEVICE)
            run = 0 if given_maxima is None else self.run
            module.select(torch.from_numpy(wide).to(DEVICE), given_maxima, lens, out, self.max_entries, run=run)
        actual = out.cpu().numpy().copy()
        out.fill_(UNTOUCHED)
        return bool((whole == UNTOUCHED).all()) and bool((actual == self.expected(scores)).all())

    def expected(self, scores: NDArray[np.float32]) -> NDArray[np.int64]:
        return selected_by_oracle(scores, self.counts(), self.topk)


SIZES = [0, 1, 5, 15, 16, 17, 40, 100, 300]
cases = st.builds(
    Case,
    seed=st.integers(0, 2**16),
    kind=st.sampled_from(sorted(KINDS)),
    topk=st.sampled_from([1, 2, 3, 4, 5, 8]),
    max_entries=st.sampled_from(SIZES),
    lens=st.lists(st.sampled_from([1000, 1000, 1003, 700, 300, 20, 0, -10]), min_size=1, max_size=3),
    maxima=st.sampled_from(MAXIMA),
    split=st.sampled_from([32, 64, 10_000]),
    run=st.sampled_from([8, 16, 32]),
    apart=st.integers(0, 8),
)


def drawn(seed: int, **given_fields: Any) -> Case:
    """A case at random, without hypothesis: for many of them in one test."""
    g = np.random.default_rng(seed)
    fields: dict[str, Any] = {
        "kind": str(g.choice(sorted(KINDS))),
        "topk": int(g.choice([1, 3, 4, 5])),
        "max_entries": int(g.choice(SIZES[3:])),
        "lens": [int(g.choice([1000, 1003, 700, -10])) for _ in range(2)],
        "maxima": str(g.choice(MAXIMA)),
        "split": int(g.choice([32, 10_000])),
        "run": int(g.choice([8, 16])),
    }
    return Case(seed, **{**fields, **given_fields})


@searched(100, case=cases)
def test_the_largest_are_selected_whatever_the_scores_are(case: Case) -> None:
    with few_in_registers():
        assert case.agrees()


@pytest.mark.in_turn
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("split", [32, 10_000])
def test_every_kind_of_scores_in_parts_and_in_one(kind: str, split: int) -> None:
    with few_in_registers():
        for seed, maxima in enumerate(("none", "right", "wrong")):
            for size in (40, 300):
                assert Case(seed, kind, 4, size, maxima=maxima, split=split).agrees()


@pytest.mark.parametrize("kind", ["normal", "nearly all zero", "clustered", "odd"])
@pytest.mark.parametrize(("topk", "size"), [(512, 2048), (512, 5000), (1024, 6000), (2048, 10_000)])
def test_rows_of_the_sizes_of_the_model(kind: str, topk: int, size: int) -> None:
    assert Case(0, kind, topk, size, maxima="none", split=32768).agrees()


@pytest.mark.parametrize("kind", ["relu", "periodic", "equal"])
@pytest.mark.parametrize("maxima", ["none", "right"])
def test_long_rows_in_parts(kind: str, maxima: str) -> None:
    run = select.maxima_run(40_000, 512)
    assert select.plan_of(2, 40_000, 512, 4).parts > 1
    assert Case(0, kind, 512, 40_000, [1000, 100], maxima, 32768, run).agrees()


def test_nothing_happens_without_rows_or_columns() -> None:
    for rows, topk in ((0, 5), (3, 0)):
        out = torch.empty(rows, topk, dtype=torch.int32, device=DEVICE)
        scores, lens = torch.zeros(rows, 9, device=DEVICE), torch.zeros(rows, dtype=torch.int32, device=DEVICE)
        with observed() as seen:
            select.select(scores, None, lens, out, 9, run=0)
        assert not seen


def test_rows_that_see_nothing_are_filled() -> None:
    out = torch.full((2, 5), UNTOUCHED, dtype=torch.int32, device=DEVICE)
    lens = torch.tensor([7, -1], dtype=torch.int32, device=DEVICE)
    select.select(torch.empty(2, 0, device=DEVICE), None, lens, out, 0, run=0)
    assert (out == -1).all()


def test_more_than_can_be_selected_is_refused() -> None:
    out = torch.empty(1, select.MOST + 1, dtype=torch.int32, device=DEVICE)
    lens = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    with pytest.raises(AssertionError):
        select.select(torch.zeros(1, 9, device=DEVICE), None, lens, out, 9, run=0)


@pytest.mark.parametrize("topk", [1, 512, 513, 2048])
def test_a_run_gives_as_many_maxima_as_are_worth_reading(topk: int) -> None:
    for size in (1, 8192, select.SPLIT_LENGTH + 1, 32768, 262_144, 300_000, 1 << 20):
        run = select.maxima_run(size, topk)
        if run:
            columns, block = -(-size // run) * select.LANES, select.block_of(topk)

            assert run % select.LANES == 0
            assert columns <= select.WIDEST * block + select.LANES
            # of shorter rows the scores themselves are read, which are not many more
            assert columns >= block or size < 16 * block
        else:
            assert size <= 4 * select.block_of(topk)


def test_parts_of_a_call_have_one_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """So no more than is said is held when the next part begins."""
    for tokens, most, sizes in ((8, 3, [3, 3, 2]), (2, 3, [2]), (3, 3, [3]), (2, 0, [1, 1]), (0, 3, [])):
        monkeypatch.setattr(scratch, "BYTES", 4 * 192 * most)
        parts = [*scratch.parts(torch.empty(tokens, 5, dtype=torch.int32), 64, 0, 65)]
        assert [n for part, _ in parts for n in range(tokens)[part]] == [*range(tokens)]
        assert [[tuple(view.shape) for view in views] for _, views in parts] == [
            [(size, 64), (size, 0), (size, 128)] for size in sizes
        ]
        memories = {view.untyped_storage().data_ptr() for _, views in parts for view in views}
        assert len(memories) == min(len(sizes), 1)


def test_memory_does_not_follow_the_context() -> None:
    """Whatever is selected together asks for a few bytes, or for one size; and lists are no longer in longer rows."""
    out = torch.empty(64, 5, dtype=torch.int32)
    sizes = {scratch.buffer(out, size).nbytes for size in range(4, 2 * scratch.BYTES, 999_996)}
    assert {size for size in sizes if scratch.SMALL < size <= scratch.BYTES} == {scratch.BYTES}
    assert scratch.BYTES < scratch.CAPTURED < layer_ops.transient_bytes(1024) <= 266 * 2**20
    assert scratch.BYTES <= 258 * 2**20
    for topk, rows in itertools.product((512, 1024, 2048), (1, 8, 64, 99, 2048)):
        columns = [select.plan_of(rows, size, topk, 132).columns for size in (1 << 18, 1 << 19, 1 << 20)]
        assert len(set(columns[:2] if topk == 2048 else columns)) == 1
        assert 4 * rows * columns[0] <= scratch.BYTES - 4 * rows * 2**18 or rows > 99


def test_programs_of_a_long_plan_are_those_of_the_device() -> None:
    for rows in (1, 8, 64, 99):
        plan = select.plan_of(rows, 1 << 20, 512, 132)
        assert 1 < plan.parts <= select.SPLITS
        assert rows * plan.parts <= 4 * 132


@interpreted
@pytest.mark.parametrize("split", [32, 10_000])
@pytest.mark.parametrize("aligned", [True, False])
def test_warm_up_foresees_every_form_that_is_launched(
    split: int, aligned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with few_in_registers():
        monkeypatch.setattr(select, "SPLIT_LENGTH", split)
        for size in SIZES[1:]:
            for maxima in ("none", "right"):
                with observed() as seen:
                    # four columns apart, rows of 4 n entries are aligned
                    Case(0, "normal", 4, size, maxima=maxima, split=split, apart=-size % 4 if aligned else 1).agrees()

                assert seen
                assert set(seen) <= set(select.variants(4, size, aligned=aligned and size % 4 == 0))


# bugs that must be found

BUGS: dict[str, tuple[str, str]] = {
    "infinity is no number": ("size <= INFINITE", "size < INFINITE"),
    "NaN is the lowest number": ("LOWEST), ABSENT)", "LOWEST), tl.where(live, LOWEST, ABSENT))"),
    "-inf is absent": ("tl.maximum(order, LOWEST), ABSENT", "order, ABSENT"),
    "-0 is less than 0": ("tl.where(bits < 0, -size, size)", "tl.where(bits < 0, ~size, size)"),
    "negative numbers in the order of their bits": ("tl.where(bits < 0, -size, size)", "bits"),
    "columns behind the length read": ("keys_of(x, at < end)", "keys_of(x, at < end + 3)"),
    "one tie less": ("tl.where(reached > wanted, wanted - above, SIZE)",
                     "tl.where(reached > wanted, wanted - above - 1, SIZE)"),
    "all ties": ("tl.where(reached > wanted, wanted - above, SIZE)", "tl.where(reached > wanted, SIZE, SIZE)"),
    "nothing behind the last": ("column >= tl.minimum(reached, wanted)", "column >= wanted"),
    "entry 0 listed for ties": ("tl.store(LIST + place, entries, mask=(is_above",
                                "tl.store(LIST + place, tl.where(is_above, entries, 0), mask=(is_above"),
    "tiles before this one forgotten": ("return above + (both & 0xFFFF)", "return (both & 0xFFFF)"),
    "an interval one key short": ("keys, ABSENT), 0) + 1", "keys, ABSENT), 0)"),
    "maxima believed that are too large": ("few = hinted & (above + tied < wanted)",
                                           "few = hinted & (above + tied < 0)"),
    "maxima believed of one program": ("(hinted & (above + tied < wanted) & (bound",
                                       "(hinted & (above + tied < 0) & (bound"),
    "a bound that too few reach": ("reached * 0, wanted, slack)", "reached * 0, wanted // 2, slack)"),
    "ties of parts forgotten": ("lists = larger + tl.minimum(ties, wanted)", "lists = larger"),
    "a closer bound that too few reach": ("tl.where(enough, middle, low), tl", "tl.where(enough, high - 1, low), tl"),
    "one part's entries counted": ("above, tied = tl.sum(larger, 0)", "above, tied = tl.max(larger, 0)"),
}  # fmt: skip
"""None of them reads or writes outside of the memory that a right kernel may use."""


@pytest.mark.mutation
@interpreted
@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found(name: str, tmp_path: Path) -> None:
    changed = planted(select, kernels_select, tmp_path, *BUGS[name])
    with few_in_registers(changed):
        assert not all(drawn(seed).agrees(changed) for seed in range(400))


@interpreted
def test_a_copy_without_a_bug_is_right(tmp_path: Path) -> None:
    copy = planted(select, kernels_select, tmp_path, "", "")
    with few_in_registers(copy):
        assert all(drawn(seed).agrees(copy) for seed in range(20))

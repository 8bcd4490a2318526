"""The compressor: states and entries of V4, latents and rings of V4.1, and checks of all that is stored."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property

import attrs
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dsv4attn.core.cache.layout import KVCacheLayout, PagedKVCache
from dsv4attn.core.contract.problem import CacheFacts, Problem
from dsv4attn.core.model.geometry import LayerKind
from dsv4attn.core.torch_ops.arguments import EntryNorm, StatePages
from dsv4attn.testing.case import Bench, Measure, Wrong, worst_of
from dsv4attn.testing.kit.factories import CaseInput, cos_sin_table, normal
from dsv4attn.testing.kit.oracle_cache import OracleCache, PagePlacement, Pages
from dsv4attn.testing.kit.random_step import STALE_POSITIONS
from dsv4attn.testing.kit.strided import unchanged
from dsv4attn.testing.kit.tolerances import (
    F64,
    U8,
    Formula,
    as_f64,
    first_difference,
    hold_record,
    hold_shape,
    hold_values,
    read_row,
    rounded,
)
from dsv4attn.testing.oracle import attention as oracle
from dsv4attn.testing.oracle import layer as oracle_layer

KV, SCORE, APE, WEIGHT, ANGLES, STATES, ENTRIES = range(60, 67)
"""Streams of random numbers."""
OFFSETS = (0.0, 100.0, -100.0, 0.0)
"""Added to the scores of every fourth channel: fp32 has no exponential of the larger ones."""
SIZES = (1.0, 0.01, 30.0, 0.0, 1e-3, 1.0, 0.3, 3.0)
"""Scales of kv for every 32 dims, so that groups have different scales, and one has only zeros."""
SMALL = 2e-10
"""Scale of kv of every fourth request: eps matters, and entries are below the floor of a scale."""
PADDING = [(-1, position) for position in STALE_POSITIONS]
"""(request, position) of rows that are not real."""
Span = tuple[int, range]
"""A request and positions of it."""


def tokens_of(spans: Iterable[Span]) -> list[tuple[int, int]]:
    """(request, position) of every token of some spans."""
    return [(request, position) for request, positions in spans for position in positions]


def cut_into_steps(requests: Sequence[tuple[int, int]], sizes: Sequence[int]) -> Iterator[list[Span]]:
    """Steps of all requests, of these sizes again and again; request i begins with the i-th size.

    requests: (first position, number of tokens) of each.
    """
    ends = [first + count for first, count in requests]
    position, turn = [first for first, _ in requests], 0
    while position != ends:
        stops = [min(at + sizes[(turn + i) % len(sizes)], ends[i]) for i, at in enumerate(position)]
        yield [(i, range(at, stop)) for i, (at, stop) in enumerate(zip(position, stops, strict=True))]
        position, turn = stops, turn + 1


def hold_bytes(now: U8, expected: U8, name: str, where: str = "") -> None:
    """Raise Wrong unless bytes of pages are equal. where: of what, followed by a colon."""
    count, page, byte = first_difference(now, expected)
    if count:
        raise Wrong(f"{where}{count} bytes of {name} differ, first byte {byte} of page {page}")


def hold_entries(oracle_cache: OracleCache, untouched: U8, rows: Iterable[tuple[int, Formula, str]]) -> Measure:
    """Check the cache after an op has stored entries. Raises Wrong if a slot has another row than expected.

    It also raises Wrong if any byte outside these slots changed.
    untouched: bytes of all pages from before the op.
    rows: for each entry (slot, exact values, name for messages). The cache has the values rounded to its format.
    """
    now, expected, worst = oracle_cache.bytes(), untouched.copy(), Measure()
    for slot, row, name in rows:
        place = oracle_cache.place(slot)
        worst = worst_of(worst, hold_record(now[place], row, oracle_cache.cache.layout, f"{name}, slot {slot}"))
        expected[place] = now[place]
    count, page, byte = first_difference(now, expected)
    if count:
        raise Wrong(f"byte {byte} of page {page} of the entries was written, and belongs to no entry of the step")
    return worst


@attrs.frozen(kw_only=True, eq=False, slots=False)
class CompressorStep(CaseInput):
    """One step of a compressor, after earlier ones whose states the oracle has saved.

    layout: layout of the cache of entries.
    kind: kind of the layer, c4a or c128a.
    indexer: whether entries are index keys.
    requests: (tokens before, tokens of this step) of each.
    state_page: tokens of a state page.
    entry_page: entries of a page.
    gap: bytes between pages, in addition to those that the layouts ask for.
    size: scale of kv; with a small one eps matters.
    eps: epsilon of the norm.
    norm_dtype: of its weight; backends whose steps take no other get the same values in fp32.
    unused: value of every byte of the state pages that belongs to no state.
    """

    indexer: bool = False
    requests: Sequence[tuple[int, int]] = ((0, 13), (5, 8), (31, 2), (16, 4))
    state_page: int = 4
    entry_page: int = 64
    gap: int = 0
    size: float = 1.0
    eps: float = 1e-6
    norm_dtype: torch.dtype = torch.float32
    unused: int = 0xFF

    @property
    def ratio(self) -> int:
        """Tokens of an entry."""
        return self.layer.compress_ratio

    @property
    def overlap(self) -> bool:
        """Whether an entry covers the tokens of the one before too."""
        return self.kind is LayerKind.CSA

    @property
    def dim(self) -> int:
        """Dims of an entry."""
        return self.geometry.index_head_dim if self.indexer else self.layer.head_dim

    @property
    def width(self) -> int:
        """Channels of a token's kv."""
        return self.dim * (2 if self.overlap else 1)

    @property
    def state_layout(self) -> KVCacheLayout:
        """Layout of the state cache."""
        return KVCacheLayout.compressor_state(self.width)

    def named_layouts(self) -> list[KVCacheLayout]:
        """Layouts of both caches."""
        return [self.state_layout, self.layout]

    @property
    def index_page(self) -> int:
        """Entries of a page."""
        return self.entry_page

    def problems(self, *, lse: bool = True) -> list[Problem]:
        """Decode on the attention layer that the compressor belongs to."""
        if self.indexer:
            return super().problems(lse=lse)
        facts = CacheFacts.of(self.layout, self.entry_page)
        q_dtype = "float32" if self.layout.dtype == torch.float32 else "bfloat16"
        return [Problem("decode", self.layer, attrs.evolve(facts, page_size=64), facts, 128, q_dtype, lse=lse)]

    # values

    def _rows(self, stream: int, request: int, positions: Sequence[int]) -> F64:
        numbers = np.asarray(positions, dtype=np.int64)
        return normal((self.seed, stream, request), numbers, self.width)

    def kv_rows(self, request: int, positions: Sequence[int]) -> F64:
        """[n, w] kv of tokens."""
        sizes = np.resize(SIZES, self.dim // 32 + 1)[np.arange(self.width) % self.dim // 32]
        size = self.size * (SMALL if request % 4 == 3 else 1.0)
        return rounded(size * sizes * self._rows(KV, request, positions), torch.float32)

    def score_rows(self, request: int, positions: Sequence[int]) -> F64:
        """[n, w] scores of tokens, without a bias."""
        offsets = np.resize(OFFSETS, self.width)
        return rounded(2 * self._rows(SCORE, request, positions) + offsets, torch.float32)

    @cached_property
    def ape(self) -> F64:
        """[r, w] biases of the places in a window, unlike each other."""
        drawn = normal((self.seed, APE), np.arange(self.ratio, dtype=np.int64), self.width)
        return rounded(drawn, torch.float32)

    @cached_property
    def norm_weight(self) -> F64:
        """[d] weight of the norm."""
        return self.drawn_norm_weight(WEIGHT, self.dim, self.norm_dtype)

    @cached_property
    def table(self) -> F64:
        """[positions, rope] cosines, then sines, of random angles: only a step that reads the table is right."""
        last = max((context + count for context, count in self.requests), default=1)
        return cos_sin_table(self.drawn_angles(ANGLES, last, self.layer.rope_dim // 2))

    def state(self, request: int, position: int) -> F64:
        """[2 w] state of a token."""
        key = request, position
        if key not in self._states:
            kv, score = (rows(request, [position])[0] for rows in (self.kv_rows, self.score_rows))
            self._states[key] = oracle_layer.state_row(kv, score, self.ape, position)
        return self._states[key]

    @cached_property
    def _states(self) -> dict[tuple[int, int], F64]:
        """States that were asked for before, by request and position: they count in several entries."""
        return {}

    def entry(self, request: int, number: int) -> Formula:
        """An entry of a request, as it is stored but for the last rounding."""
        window = oracle_layer.entry_window(number, self.ratio, overlap=self.overlap)
        states = {position: self.state(request, position) for position, _ in window}
        kv, score = oracle_layer.window_states(states, number, self.ratio, overlap=self.overlap)
        cos, sin = np.split(self.table[number * self.ratio], 2)
        return Formula.exact(kv).pooled(score).normed(self.norm_weight, self.eps).turned(cos, sin)

    # places

    @property
    def window(self) -> int:
        """Tokens whose states make an entry."""
        return self.ratio * (2 if self.overlap else 1)

    @cached_property
    def state_pages(self) -> Pages:
        """State pages of the tokens of the step, and of those before that its entries need."""
        live = [(max(context - self.window + 1, 0), context + count) for context, count in self.requests]
        for number in itertools.count():
            pages = Pages(live, self.state_page, spare=3, dead=-1, key=(self.seed, STATES, number))
            if not (pages.table == 0).any():
                break
        return pages  # no request has page 0: no state is found where a read of an absent one may look

    @cached_property
    def entry_pages(self) -> Pages:
        """Pages of the entries of the step."""
        live = [(context // self.ratio, (context + count) // self.ratio) for context, count in self.requests]
        return Pages(live, self.entry_page, spare=2, dead=-1, key=(self.seed, ENTRIES))

    def blank_states(self) -> OracleCache:
        """A state cache without states."""
        placement = PagePlacement(self.state_page, self.gap)
        return OracleCache.blank(self.state_layout, self.state_pages.count, placement, self.device, self.unused)

    def blank_entries(self) -> OracleCache:
        """A cache without entries."""
        placement = PagePlacement(self.entry_page, self.gap)
        return OracleCache.blank(self.layout, self.entry_pages.count, placement, self.device)

    def save(self, oracle_cache: OracleCache, spans: Iterable[Span]) -> OracleCache:
        """Write the states of some tokens as the oracle has them."""
        for request, positions in spans:
            if len(positions):
                rows = np.stack([self.state(request, position) for position in positions])
                oracle_cache.write(self.state_pages.slots(request, positions), rows)
        return oracle_cache

    @property
    def earlier(self) -> list[Span]:
        """Tokens before the step whose states its entries need."""
        return [(i, range(max(context - self.window + 1, 0), context)) for i, (context, _) in enumerate(self.requests)]

    @property
    def spans(self) -> list[Span]:
        """Tokens of the step."""
        return [(i, range(context, context + count)) for i, (context, count) in enumerate(self.requests)]

    def completed(self, spans: Iterable[Span]) -> Iterator[tuple[int, int]]:
        """(request, number) of the entries that some tokens complete."""
        yield from ((request, p // self.ratio) for request, p in tokens_of(spans) if (p + 1) % self.ratio == 0)

    def state_slots(self, spans: Sequence[Span]) -> NDArray[np.int64]:
        """Slots of the states of tokens."""
        slots = [self.state_pages.slots(request, positions) for request, positions in spans]
        return np.concatenate([np.zeros(0, dtype=np.int64), *slots])

    def entry_slots(self, spans: Sequence[Span]) -> NDArray[np.int64]:
        """Slots of the entries that tokens complete; -1 for other tokens."""
        slots = [
            -1 if (position + 1) % self.ratio else self.entry_slot(request, position // self.ratio)
            for request, position in tokens_of(spans)
        ]
        return np.asarray(slots, dtype=np.int64)

    def projected(self, spans: Sequence[Span]) -> tuple[Tensor, Tensor]:
        """Return kv and scores [T, w] of tokens: halves of one tensor, as a projection makes them."""
        rows = [
            np.concatenate([self.kv_rows(request, positions), self.score_rows(request, positions)], 1)
            for request, positions in spans
            if len(positions)
        ]
        both = self.tensor(np.concatenate([np.zeros((0, 2 * self.width)), *rows]), torch.float32)
        return both[:, : self.width], both[:, self.width :]

    # judgement

    def entry_slot(self, request: int, number: int) -> int:
        """Slot of an entry."""
        return int(self.entry_pages.slots(request, [number])[0])

    def judge_entries(self, oracle_cache: OracleCache, untouched: U8, entries: Iterable[tuple[int, int]]) -> Measure:
        """Entries are those of the oracle, and all other bytes of their pages are those of `untouched`."""
        rows = (
            (self.entry_slot(request, number), self.entry(request, number), f"entry {number} of request {request}")
            for request, number in entries
        )
        return hold_entries(oracle_cache, untouched, rows)


def run_step(
    bench: Bench,
    inputs: CompressorStep,
    states: OracleCache,
    entries: OracleCache,
    spans: Sequence[Span],
    *,
    values: tuple[Tensor, Tensor] | None = None,
    slots: NDArray[np.int64] | None = None,
    padded: bool = False,
) -> None:
    """Save the states of some tokens, and make the entries that they complete.

    values: kv and scores of the tokens; None: their states are saved already. slots: slot mapping of the entries, other
    than that of the tokens. padded: whether rows of padding, with NaN and stale positions, stand before and after them.
    """
    ops, tokens = bench.layer_ops, tokens_of(spans)
    entry_slots, state_slots = inputs.entry_slots(spans) if slots is None else slots, inputs.state_slots(spans)
    if padded:
        tokens = [*PADDING, *tokens, *PADDING]
        entry_slots, state_slots = (np.pad(s, len(PADDING), constant_values=-1) for s in (entry_slots, state_slots))
        if values is not None:
            values = between_nan(values[0]), between_nan(values[1])
    positions = inputs.tensor(np.array([p for _, p in tokens], dtype=np.int64))
    if values is not None:
        kv, score = values
        ape = inputs.tensor(inputs.ape, torch.float32)
        ops.save_partial_states(kv, score, ape, positions, states.cache, inputs.tensor(state_slots))
    weight, angles = inputs.tensor(inputs.norm_weight, inputs.norm_dtype), inputs.tensor(inputs.table, torch.float32)
    ops.compress_norm_rope_store(
        # rows of the table lie apart, as in a table cut to fewer columns
        StatePages(states.cache, inputs.tensor(inputs.state_pages.table)[:, :-1]),
        inputs.tensor(np.array([request for request, _ in tokens], dtype=np.int32)),
        positions,
        inputs.tensor(entry_slots),
        EntryNorm(weight, inputs.eps, angles),
        inputs.ratio,
        entries.cache,
        overlap=inputs.overlap,
    )


def between_nan(rows: Tensor) -> Tensor:
    """Rows with as many rows of NaN before and after them as there are tokens in PADDING."""
    padding = rows.new_full((len(PADDING), rows.shape[1]), math.nan)
    return torch.cat([padding, rows, padding])


def compressed(
    bench: Bench, inputs: CompressorStep, *, slots: NDArray[np.int64] | None = None, stored: Sequence[int] | None = None
) -> tuple[OracleCache, Measure]:
    """Entries that the tokens of the step complete, from states that the oracle has saved. Raises Wrong.

    slots: see `run_step`. stored: tokens whose entries must be stored, instead of all that complete one.
    """
    states, entries = _prepared(inputs), inputs.blank_entries()
    states_before, untouched = states.bytes(), entries.bytes()
    run_step(bench, inputs, states, entries, inputs.spans, slots=slots)
    _hold_states(inputs, states.bytes(), states_before)
    expected = inputs.completed(inputs.spans)
    if stored is not None:
        tokens = tokens_of(inputs.spans)
        expected = ((tokens[i][0], tokens[i][1] // inputs.ratio) for i in stored)
    return entries, inputs.judge_entries(entries, untouched, expected)


def saved_and_compressed(
    bench: Bench, inputs: CompressorStep, values: tuple[Tensor, Tensor] | None = None
) -> tuple[OracleCache, OracleCache]:
    """States and entries after one step of all tokens. values: other kv and scores than those of the case input."""
    states, entries = inputs.blank_states(), inputs.blank_entries()
    values = inputs.projected(inputs.spans) if values is None else values
    run_step(bench, inputs, states, entries, inputs.spans, values=values)
    return states, entries


def saves_states(bench: Bench, inputs: CompressorStep) -> Measure:
    """The state of each token is in its slot, bit for bit, and no other byte is written."""
    expected, oracle_cache = inputs.save(inputs.blank_states(), inputs.spans), inputs.blank_states()
    _save(bench, inputs, oracle_cache.cache, inputs.state_slots(inputs.spans))
    return _hold_states(inputs, oracle_cache.bytes(), expected.bytes())


def saves_only_its_slots(bench: Bench, inputs: CompressorStep) -> Measure:
    """Slots that are negative or do not exist, and tokens past the slot mapping, write nothing."""
    tokens, capacity = tokens_of(inputs.spans), inputs.blank_states().cache.capacity - inputs.state_page
    slots = _wild(inputs.state_slots(inputs.spans)[:-3], capacity)
    expected, oracle_cache = inputs.blank_states(), inputs.blank_states()
    live = [i for i, slot in enumerate(slots) if 0 <= slot < capacity]
    expected.write(slots[live], np.stack([inputs.state(*tokens[i]) for i in live]))
    # a cache within a larger one, whose last page is not its own
    _save(bench, inputs, PagedKVCache(oracle_cache.cache.tensor[:-1], inputs.state_layout), slots)
    return _hold_states(inputs, oracle_cache.bytes(), expected.bytes())


def _save(bench: Bench, inputs: CompressorStep, cache: PagedKVCache, slots: np.ndarray) -> None:
    kv, score = inputs.projected(inputs.spans)
    positions = inputs.tensor(np.array([p for _, p in tokens_of(inputs.spans)], dtype=np.int64))
    ape = inputs.tensor(inputs.ape, torch.float32)
    with unchanged(kv=kv, score=score):
        bench.layer_ops.save_partial_states(kv, score, ape, positions, cache, inputs.tensor(slots))


def _wild(slots: np.ndarray, capacity: int) -> np.ndarray:
    """Slots of which some do not exist. Cut to 32 bits, some of these would be slots that no token has."""
    free = np.setdiff1d(np.arange(capacity), slots)
    slots = np.where(slots < capacity, slots, -1)
    slots[:8] = [-1, -7, capacity, 2**40, 2**32 + free[0], -(2**32) + free[1], capacity + 3, -(2**63)]
    return slots


def _hold_states(inputs: CompressorStep, now: U8, expected: U8) -> Measure:
    """Raise Wrong unless all bytes of state pages are the expected ones."""
    count, page, byte = first_difference(now, expected)
    if not count:
        return Measure()
    size = inputs.state_layout.record_bytes
    where = f"float {byte % size // 4}" if byte < size * inputs.state_page else "no float at all"
    slot = f"slot {page * inputs.state_page + byte // size}"
    raise Wrong(f"{count} bytes of states differ, first in {slot}, {where} of {size // 4}")


def _prepared(inputs: CompressorStep) -> OracleCache:
    """The states of the step and of the tokens before it, as the oracle saves them."""
    return inputs.save(inputs.blank_states(), [*inputs.earlier, *inputs.spans])


def compresses(bench: Bench, inputs: CompressorStep) -> Measure:
    """Entries that the step completes are those of the oracle; states stay as they are."""
    return compressed(bench, inputs)[1]


def compresses_only_its_slots(bench: Bench, inputs: CompressorStep) -> Measure:
    """Tokens whose slot is negative or does not exist, and tokens past the slot mapping, store no entry."""
    slots, capacity = inputs.entry_slots(inputs.spans), inputs.blank_entries().cache.capacity
    ends = np.flatnonzero(slots >= 0)
    free = np.setdiff1d(np.arange(capacity), slots)
    dropped = [-1, -7, capacity, 2**40, 2**32 + int(free[0]), capacity + 3]
    slots[ends[: len(dropped)]] = dropped
    slots = slots[: ends[-1]]
    stored = [end for end in ends[len(dropped) :] if end < len(slots)]
    if not stored:
        raise ValueError("the case input leaves no entry to store")
    return compressed(bench, inputs, slots=slots, stored=stored)[1]


def saves_and_compresses(bench: Bench, inputs: CompressorStep, *, padded: bool = False) -> Measure:
    """A step saves its states and makes its entries, from these and from states that were there before.

    padded: whether rows of padding stand before and after its tokens.
    """
    states, entries = inputs.save(inputs.blank_states(), inputs.earlier), inputs.blank_entries()
    untouched = entries.bytes()
    run_step(bench, inputs, states, entries, inputs.spans, values=inputs.projected(inputs.spans), padded=padded)
    _hold_states(inputs, states.bytes(), _prepared(inputs).bytes())
    return inputs.judge_entries(entries, untouched, inputs.completed(inputs.spans))


def stores_nothing(bench: Bench, inputs: CompressorStep) -> Measure:
    """A step without tokens, and one whose tokens complete no entry, store none."""
    states, entries = _prepared(inputs), inputs.blank_entries()
    states_before, untouched = states.bytes(), entries.bytes()
    none = [(0, range(0))]
    run_step(bench, inputs, states, entries, none, values=inputs.projected(none))
    first_tokens = [(i, range(first, first + 1)) for i, (first, _) in enumerate(inputs.requests)]
    incomplete = [(i, span) for i, span in first_tokens if span.stop % inputs.ratio]
    run_step(bench, inputs, states, entries, incomplete)
    _hold_states(inputs, states.bytes(), states_before)
    return inputs.judge_entries(entries, untouched, [])


def any_cut(*cuts: Sequence[int]) -> Callable[[Bench, CompressorStep], Measure]:
    """However the tokens of a request are cut into steps, the bytes of states and entries are the same.

    cuts: sizes of steps, again and again until all tokens are through.
    """

    def check(bench: Bench, inputs: CompressorStep) -> Measure:
        results = []
        for sizes in ((2**20,), *cuts):
            states, entries = inputs.blank_states(), inputs.blank_entries()
            untouched = entries.bytes()
            for spans in cut_into_steps(inputs.requests, sizes):
                run_step(bench, inputs, states, entries, spans, values=inputs.projected(spans))
            results.append((states.bytes(), entries.bytes()))
            measure = inputs.judge_entries(entries, untouched, inputs.completed(inputs.spans))
        states_in_one, entries_in_one = results[0]
        _hold_states(inputs, states_in_one, inputs.save(inputs.blank_states(), inputs.spans).bytes())
        for sizes, (states_now, entries_now) in zip(cuts, results[1:], strict=True):
            where = f"in steps of {', '.join(map(str, sizes))} tokens: "
            hold_bytes(states_now, states_in_one, "states", where)
            hold_bytes(entries_now, entries_in_one, "entries", where)
        return measure

    return check


def replays(bench: Bench, inputs: CompressorStep) -> Measure:
    """Drafts that are replaced, and tokens that are computed again, leave the bytes of one pass."""
    states_in_one, entries_in_one = saved_and_compressed(bench, inputs)
    states, entries = inputs.blank_states(), inputs.blank_entries()
    drafts = attrs.evolve(inputs, seed=inputs.seed + 1)
    for begin, end, values in ((0, 6, inputs), (6, 11, drafts), (6, 9, inputs), (9, 13, drafts), (5, 2**20, inputs)):
        spans = [(i, span[begin:end]) for i, span in inputs.spans]
        run_step(bench, inputs, states, entries, spans, values=values.projected(spans))
    hold_bytes(states.bytes(), states_in_one.bytes(), "states", "after drafts and a replay: ")
    hold_bytes(entries.bytes(), entries_in_one.bytes(), "entries", "after drafts and a replay: ")
    return Measure()


def unused_bytes(bench: Bench, inputs: CompressorStep) -> Measure:
    """Whatever bytes belong to no state, entries have the same bytes."""
    values = 0xFF, 0x00, 0x7F
    results = [compressed(bench, attrs.evolve(inputs, unused=byte))[0].bytes() for byte in values]
    for byte, entries in zip(values, results, strict=True):
        hold_bytes(entries, results[0], "entries", f"over unused bytes of 0x{byte:02X}: ")
    return Measure()


def moved(bench: Bench, inputs: CompressorStep) -> Measure:
    """Which pages hold a request, and how far apart they are, changes no byte of an entry."""
    page = inputs.layout.page_bytes(inputs.entry_page)
    near, apart = (compressed(bench, case)[0].bytes()[:, :page] for case in (inputs, attrs.evolve(inputs, gap=4608)))
    hold_bytes(apart, near, "entries", "with pages further apart: ")
    return Measure()


def spoils_own_entries(bench: Bench, inputs: CompressorStep) -> Measure:
    """A NaN in kv or in a score of a token makes the entries NaN that it counts in, and harms no other."""
    entries = saved_and_compressed(bench, inputs)[1]
    clean = entries.bytes()
    tokens, seen = tokens_of(inputs.spans), set[tuple[int, bool]]()
    for number, (token, overlap_half, part) in enumerate(((6, 0, 0), (6, 1, 1), (9, 1, 0), (11, 0, 1))):
        request, position = tokens[token]
        half = overlap_half if inputs.overlap else 0
        channel = half * inputs.dim + 5 + number
        values = inputs.projected(inputs.spans)
        values[part][token, channel] = torch.nan
        spoiled = saved_and_compressed(bench, inputs, values)[1].bytes()
        name = f"a NaN {'score' if part else 'kv'} of token {position} in channel {channel}"
        for owner, entry in inputs.completed(inputs.spans):
            window = oracle_layer.entry_window(entry, inputs.ratio, overlap=inputs.overlap)
            counts = owner == request and (position, half) in window
            place = entries.place(inputs.entry_slot(owner, entry))
            if counts and not np.isnan(read_row(spoiled[place], inputs.layout)).any():
                raise Wrong(f"{name}: entry {entry}, which it counts in, does not read as NaN")
            if not counts and not np.array_equal(spoiled[place], clean[place]):
                raise Wrong(f"{name}: entry {entry} of request {owner} changed, and the token does not count in it")
            seen.add((number, counts))
    if not all((number, True) in seen for number in range(4)):
        raise ValueError("the case input leaves no entry for a NaN")
    return Measure()


LATENT_KV, LATENT_SCORE, LATENT_WEIGHT, LATENT_ANGLES, RINGS, LATENT_ENTRIES = range(100, 106)
"""Streams of random numbers."""


@attrs.frozen(kw_only=True, eq=False, slots=False)
class LatentSteps(CaseInput):
    """Tokens of some requests from their first one on, and the pages of their rings and entries.

    layout: layout of the cache of entries.
    ratio: tokens of an entry.
    lengths: tokens of each request.
    state_page: tokens of a block of a ring.
    ring_blocks: blocks of a ring.
    size: scale of kv.
    eps: epsilon of the norms.
    """

    ratio: int = 2
    lengths: Sequence[int] = (31, 8, 17)
    state_page: int = 8
    ring_blocks: int = 1
    size: float = 1.0
    eps: float = 1e-20

    def named_layouts(self) -> list[KVCacheLayout]:
        """Layouts of both caches."""
        return [KVCacheLayout.compressor_state(self.dim), self.layout]

    @property
    def dim(self) -> int:
        """Dims of an entry."""
        return self.layout.head_dim

    @property
    def ring(self) -> int:
        """Tokens of a ring."""
        return self.state_page * self.ring_blocks

    def rows(self, stream: int, request: int, positions: Sequence[int]) -> F64:
        """[n, d] kv or scores of tokens."""
        drawn = normal((self.seed, stream, request), np.asarray(positions, dtype=np.int64), self.dim)
        if stream == LATENT_SCORE:
            return rounded(2 * drawn + np.resize(OFFSETS, self.dim), torch.float32)
        return rounded(self.size * drawn, torch.float32)

    def weight(self) -> F64:
        """[d] weight of a norm."""
        return self.drawn_norm_weight(LATENT_WEIGHT, self.dim)

    def latent(self, request: int, number: int) -> Formula:
        """A latent before it is rounded."""
        window = range(number * self.ratio, (number + 1) * self.ratio)
        kv = Formula.exact(self.rows(LATENT_KV, request, window))
        formula = Formula.exact(kv.value[0]) if self.ratio == 1 else kv.pooled(self.rows(LATENT_SCORE, request, window))
        return formula.normed(self.weight(), self.eps)

    def state_pages(self) -> Pages:
        """Pages of the rings."""
        live = [(0, self.ring)] * len(self.lengths)
        return Pages(live, self.state_page, spare=2, dead=-1, key=(RINGS,))

    @property
    def spans(self) -> list[Span]:
        """All tokens."""
        return [(request, range(length)) for request, length in enumerate(self.lengths)]

    @property
    def rings(self) -> NDArray[np.int32]:
        """[R, N] blocks of the rings."""
        return self.state_pages().table[:, : self.ring_blocks]

    def values(self, stream: int, spans: Sequence[Span]) -> Tensor:
        """[T, d] kv or scores."""
        rows = [self.rows(stream, request, positions) for request, positions in spans if len(positions)]
        return self.tensor(np.concatenate([np.zeros((0, self.dim)), *rows]), torch.float32)


def run_latents(
    bench: Bench, inputs: LatentSteps, states: OracleCache | None, spans: Sequence[Span], *, padded: bool = False
) -> Tensor:
    """The latents [T, d] of a step. Raises Wrong if what was given is changed.

    padded: whether rows of padding, with NaN and stale positions, stand between the requests. Their latents, which are
    not returned, must be zeros.
    """
    tokens = _with_padding(spans) if padded else tokens_of(spans)
    requests, positions = np.array(tokens, dtype=np.int64).reshape(-1, 2).T
    live = inputs.tensor(np.flatnonzero(requests >= 0))
    kv, score = (
        torch.full((len(tokens), inputs.dim), math.nan, device=inputs.device, dtype=torch.float32).index_copy_(
            0, live, inputs.values(stream, spans)
        )
        for stream in (LATENT_KV, LATENT_SCORE)
    )
    with unchanged(kv=kv, score=score):
        latents = bench.layer_ops.compress_latents(
            kv,
            None if states is None else score,
            inputs.tensor(positions),
            inputs.tensor(requests, torch.int32),
            inputs.tensor(inputs.weight(), torch.float32),
            inputs.eps,
            inputs.ratio,
            None if states is None else StatePages(states.cache, inputs.tensor(inputs.rings)),
        )
    hold_shape(latents, kv.shape, torch.bfloat16, "latents:")
    for row in np.flatnonzero(requests < 0):
        if latents[row].any():
            raise Wrong(f"latent of row {row}, which is padding: not zero")
    return latents[live]


def _with_padding(spans: Sequence[Span]) -> list[tuple[int, int]]:
    """(request, position) of tokens, with rows of padding, of request -1, before and after each request.

    Padding has the position after the request's last one, the position of its first one, and stale ones.
    """
    tokens = list[tuple[int, int]]()
    for request, span in [(-1, range(0)), *spans]:
        tokens += [(request, position) for position in span]
        ends = [span[-1] + 1, span[0]] if len(span) else []
        padding = *ends, STALE_POSITIONS[request], STALE_POSITIONS[request - 1]
        tokens += [(-1, position) for position in padding]
    return tokens


def _judge_latents(inputs: LatentSteps, latents: Tensor, spans: Sequence[Span]) -> Measure:
    measures = [Measure(0.0, 1.0)]
    for row, (request, position) in zip(latents, tokens_of(spans), strict=True):
        if (position + 1) % inputs.ratio == 0:
            number = position // inputs.ratio
            what = f"latent {number} of request {request}"
            measures.append(hold_values(row, inputs.latent(request, number), torch.bfloat16, what))
    return worst_of(*measures)


def _blank(inputs: LatentSteps) -> OracleCache:
    layout, placement = KVCacheLayout.compressor_state(inputs.dim), PagePlacement(inputs.state_page)
    return OracleCache.blank(layout, inputs.state_pages().count, placement, inputs.device)


def _judge_rings(inputs: LatentSteps, states: OracleCache, steps: Sequence[Sequence[Span]]) -> None:
    """The rings hold kv and scores of the last tokens, and no other byte was written. Raises Wrong."""
    expected, pages = _blank(inputs), inputs.state_pages()
    for request in range(len(inputs.lengths)):
        held = oracle_layer.ring_rows(
            [positions for step in steps for i, positions in step if i == request], inputs.ring
        )
        rows = np.concatenate(
            [inputs.rows(stream, request, list(held.values())) for stream in (LATENT_KV, LATENT_SCORE)], 1
        )
        expected.write(pages.slots(request, held), rows)
    hold_bytes(states.bytes(), expected.bytes(), "rings")


def makes_latents(*cuts: Sequence[int], padded: bool = False) -> Callable[[Bench, LatentSteps], Measure]:
    """Latents, and rings if the ratio has them, however requests are cut into steps of these sizes.

    padded: whether every step has rows of padding too.
    """

    def check(bench: Bench, inputs: LatentSteps) -> Measure:
        measures = []
        for sizes in ((2**20,), *cuts):
            steps = list(cut_into_steps([(0, length) for length in inputs.lengths], sizes))
            states = _blank(inputs) if inputs.ratio > 1 else None
            for spans in steps:
                latents = run_latents(bench, inputs, states, spans, padded=padded)
                measures.append(_judge_latents(inputs, latents, spans))
            if states is not None:
                _judge_rings(inputs, states, steps)
        return worst_of(*measures)

    return check


def replaces_drafts(bench: Bench, inputs: LatentSteps) -> Measure:
    """Drafts of another seed are written, and replaced."""
    drafts, states = attrs.evolve(inputs, seed=inputs.seed + 1), _blank(inputs)
    worst, last = Measure(0.0, 1.0), max(inputs.lengths)
    for begin, end, values in ((0, 5, inputs), (5, 8, drafts), (5, 6, inputs), (6, 8, drafts), (6, last, inputs)):
        spans = [(i, span[begin:end]) for i, span in inputs.spans]
        latents = run_latents(bench, values, states, spans)
        if values is inputs:
            worst = worst_of(worst, _judge_latents(inputs, latents, spans))
    _judge_rings(inputs, states, [inputs.spans])
    return worst


def stores(*, normed: bool, padded: bool = False) -> Callable[[Bench, LatentSteps], Measure]:
    """Rows are stored for the tokens that complete an entry. normed: whether they go through a norm, as index keys.

    padded: whether rows of padding, with NaN and stale positions, stand before and after the tokens.
    """

    def check(bench: Bench, inputs: LatentSteps) -> Measure:
        spans = inputs.spans
        live = [(0, -(-length // inputs.ratio)) for length in inputs.lengths]
        pages = Pages(live, 16, spare=2, dead=-1, key=(inputs.seed, LATENT_ENTRIES))
        oracle_cache = OracleCache.blank(inputs.layout, pages.count, PagePlacement(16), inputs.device)
        tokens, x = tokens_of(spans), inputs.values(LATENT_KV, spans).bfloat16()
        # every token has a slot: only those that complete an entry may use it
        slots = np.array([pages.slots(request, [p // inputs.ratio])[0] for request, p in tokens])
        slots[-inputs.ratio :] = [oracle_cache.cache.capacity, -7, -1][: inputs.ratio]
        if padded:
            tokens, x = [*PADDING, *tokens, *PADDING], between_nan(x)
            slots = np.pad(slots, len(PADDING), constant_values=-1)
        positions = inputs.tensor(np.array([p for _, p in tokens], dtype=np.int64))
        table = cos_sin_table(inputs.drawn_angles(LATENT_ANGLES, max(inputs.lengths), 32))
        weight = inputs.tensor(inputs.weight(), torch.float32) if normed else None
        untouched = oracle_cache.bytes()
        norm = EntryNorm(weight, inputs.eps, inputs.tensor(table, torch.float32))
        with unchanged(x=x):
            store = bench.layer_ops.norm_rope_store
            store(x, positions, inputs.tensor(slots), norm, inputs.ratio, oracle_cache.cache)
        stored = []
        for row, slot, (request, p) in zip(as_f64(x), slots, tokens, strict=True):
            if (p + 1) % inputs.ratio or not 0 <= slot < oracle_cache.cache.capacity:
                continue
            formula = Formula.exact(row)
            if normed:
                formula = _in_bf16(formula.normed(inputs.weight(), inputs.eps))
            cos, sin = np.split(table[p // inputs.ratio * inputs.ratio], 2)
            stored.append((slot, formula.turned(cos, sin), f"token {p} of request {request}"))
        return hold_entries(oracle_cache, untouched, stored)

    return check


def _in_bf16(formula: Formula) -> Formula:
    """Values rounded to bf16; near a midpoint either neighbour is right."""
    value = oracle.round_bf16(formula.value)
    ends = [np.abs(oracle.round_bf16(end) - value) for end in formula.ends]
    return Formula(value, np.maximum(*ends))

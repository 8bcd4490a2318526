"""The compressor: states and entries of V4, latents and rings of V4.1, and checks of all that is stored."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, partial

import attrs
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dsv4attn.core.cache.layout import KVCacheLayout, PagedKVCache
from dsv4attn.core.contract.problem import CacheFacts, Problem
from dsv4attn.core.model.geometry import LayerKind
from dsv4attn.core.torch_ops.arguments import EntryNorm, StatePages
from dsv4attn.testing import oracle, oracle_layer
from dsv4attn.testing.case import Bench, Measure, Wrong, worst_of
from dsv4attn.testing.factories import CaseInput, cos_sin_table, normal
from dsv4attn.testing.oracle_cache import OracleCache, PagePlacement, Pages, place_of
from dsv4attn.testing.random_step import STALE_POSITIONS
from dsv4attn.testing.tolerances import F64, U8, Formula, found, hold_record, hold_values, rounded

__all__ = [
    "CompressorStep", "LatentSteps", "any_cut", "compresses", "compresses_only_its_slots", "makes_latents", "moved",
    "replaces_drafts", "replays", "saves_and_compresses", "saves_only_its_slots", "saves_states", "spoils_own_entries",
    "stores", "stores_nothing", "unused_bytes",
]  # fmt: skip

KV, SCORE, APE, WEIGHT, ANGLES, STATES, ENTRIES = range(60, 67)
"""Streams of random numbers."""
OFFSETS = (0.0, 100.0, -100.0, 0.0)
"""Added to the scores of every fourth channel: fp32 has no exponential of the larger ones."""
SIZES = (1.0, 0.01, 30.0, 0.0, 1e-3, 1.0, 0.3, 3.0)
"""Scales of kv for every 32 dims, so that groups have different scales, and one has only zeros."""
SMALL = 2e-10
"""Scale of kv of every fourth request: eps matters, and entries are below the floor of a scale."""
Span = tuple[int, range]
"""A request and positions of it."""


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
        last = max((before + count for before, count in self.requests), default=1)
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
        live = [(max(before - self.window + 1, 0), before + count) for before, count in self.requests]
        for number in itertools.count():
            pages = Pages(live, self.state_page, spare=3, dead=-1, key=(self.seed, STATES, number))
            if not (pages.table == 0).any():
                break
        return pages  # no request has page 0: no state is found where a read of an absent one may look

    @cached_property
    def entry_pages(self) -> Pages:
        """Pages of the entries of the step."""
        live = [(before // self.ratio, (before + count) // self.ratio) for before, count in self.requests]
        return Pages(live, self.entry_page, spare=2, dead=-1, key=(self.seed, ENTRIES))

    def blank_states(self) -> OracleCache:
        """A state cache without states."""
        oracle_cache = OracleCache.blank(
            self.state_layout, self.state_pages.count, PagePlacement(self.state_page, self.gap), self.device
        )
        oracle_cache.placement.pages(oracle_cache.cache, 4096).fill_(self.unused)
        return oracle_cache

    def blank_entries(self) -> OracleCache:
        """A cache without entries."""
        return OracleCache.blank(
            self.layout, self.entry_pages.count, PagePlacement(self.entry_page, self.gap), self.device
        )

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
        return [(i, range(max(before - self.window + 1, 0), before)) for i, (before, _) in enumerate(self.requests)]

    @property
    def spans(self) -> list[Span]:
        """Tokens of the step."""
        return [(i, range(before, before + count)) for i, (before, count) in enumerate(self.requests)]

    def completed(self, spans: Iterable[Span]) -> Iterator[tuple[int, int]]:
        """(request, number) of the entries that some tokens complete."""
        for request, positions in spans:
            yield from ((request, p // self.ratio) for p in positions if (p + 1) % self.ratio == 0)

    def tokens(self, spans: Sequence[Span]) -> list[tuple[int, int]]:
        """(request, position) of every token of some spans."""
        return [(request, position) for request, positions in spans for position in positions]

    def state_slots(self, spans: Sequence[Span]) -> NDArray[np.int64]:
        """Slots of the states of tokens."""
        found = [self.state_pages.slots(request, positions) for request, positions in spans]
        return np.concatenate([np.zeros(0, dtype=np.int64), *found])

    def entry_slots(self, spans: Sequence[Span]) -> NDArray[np.int64]:
        """Slots of the entries that tokens complete; -1 for other tokens."""
        slots = [-1] * len(self.tokens(spans))
        for i, (request, position) in enumerate(self.tokens(spans)):
            if (position + 1) % self.ratio == 0:
                slots[i] = int(self.entry_pages.slots(request, [position // self.ratio])[0])
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

    def judge_entries(self, oracle_cache: OracleCache, before: U8, entries: Iterable[tuple[int, int]]) -> Measure:
        """Entries are those of the oracle, and no other byte of their pages has changed since `before`."""
        now, size, untouched, worst = oracle_cache.bytes(), self.entry_page, before.copy(), Measure()
        for request, number in entries:
            slot = int(self.entry_pages.slots(request, [number])[0])
            place = slot // size, place_of(self.layout, slot % size, size)
            where = f"entry {number} of request {request}, slot {slot}"
            measure = hold_record(now[place], self.entry(request, number), self.layout, where)
            worst = worst_of(worst, measure)
            untouched[place] = now[place]
        if not np.array_equal(now, untouched):
            page, byte = (int(axis[0]) for axis in np.nonzero(now != untouched))
            raise Wrong(f"byte {byte} of page {page} of the entries was written, and belongs to no entry of the step")
        return worst


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
    steps, tokens = bench.layer_ops, inputs.tokens(spans)
    entry_slots, state_slots = inputs.entry_slots(spans) if slots is None else slots, inputs.state_slots(spans)
    if padded:
        missing = [(-1, position) for position in STALE_POSITIONS]
        tokens = [*missing, *tokens, *missing]
        entry_slots, state_slots = (np.pad(s, len(missing), constant_values=-1) for s in (entry_slots, state_slots))
        if values is not None:
            nothing = values[0].new_full((len(missing), inputs.width), math.nan)
            values = torch.cat([nothing, values[0], nothing]), torch.cat([nothing, values[1], nothing])
    positions = inputs.tensor(np.array([p for _, p in tokens], dtype=np.int64))
    if values is not None:
        ape = inputs.tensor(inputs.ape, torch.float32)
        steps.save_partial_states(*values, ape, positions, states.cache, inputs.tensor(state_slots))
    steps.compress_norm_rope_store(
        # rows of the table lie apart, as in a table cut to fewer columns
        StatePages(states.cache, inputs.tensor(inputs.state_pages.table)[:, :-1]),
        inputs.tensor(np.array([request for request, _ in tokens], dtype=np.int32)),
        positions,
        inputs.tensor(entry_slots),
        EntryNorm(
            inputs.tensor(inputs.norm_weight, inputs.norm_dtype),
            inputs.eps,
            inputs.tensor(inputs.table, torch.float32),
        ),
        inputs.ratio,
        entries.cache,
        overlap=inputs.overlap,
    )


def saves_states(bench: Bench, inputs: CompressorStep) -> Measure:
    """The state of each token is in its slot, bit for bit, and no other byte is written."""
    wanted, oracle_cache = inputs.save(inputs.blank_states(), inputs.spans), inputs.blank_states()
    _save(bench, inputs, oracle_cache.cache, inputs.state_slots(inputs.spans))
    return _same_states(inputs, oracle_cache.bytes(), wanted.bytes())


def saves_only_its_slots(bench: Bench, inputs: CompressorStep) -> Measure:
    """Slots that are negative or do not exist, and tokens behind the slot mapping, write nothing."""
    tokens, capacity = inputs.tokens(inputs.spans), inputs.blank_states().cache.capacity - inputs.state_page
    slots = _wild(inputs.state_slots(inputs.spans)[:-3], capacity)
    wanted, oracle_cache = inputs.blank_states(), inputs.blank_states()
    live = [i for i, slot in enumerate(slots) if 0 <= slot < capacity]
    wanted.write(slots[live], np.stack([inputs.state(*tokens[i]) for i in live]))
    # a cache within a larger one, whose last page is not its own
    _save(bench, inputs, PagedKVCache(oracle_cache.cache.tensor[:-1], inputs.state_layout), slots)
    return _same_states(inputs, oracle_cache.bytes(), wanted.bytes())


def _save(bench: Bench, inputs: CompressorStep, cache: PagedKVCache, slots: np.ndarray) -> None:
    kv, score = inputs.projected(inputs.spans)
    positions = inputs.tensor(np.array([p for _, p in inputs.tokens(inputs.spans)], dtype=np.int64))
    ape = inputs.tensor(inputs.ape, torch.float32)
    before = kv.clone(), score.clone()
    bench.layer_ops.save_partial_states(kv, score, ape, positions, cache, inputs.tensor(slots))
    if not (torch.equal(kv, before[0]) and torch.equal(score, before[1])):
        raise Wrong("kv or scores were changed")


def _wild(slots: np.ndarray, capacity: int) -> np.ndarray:
    """Slots of which some do not exist. Cut to 32 bits, some of these would be slots that no token has."""
    free = np.setdiff1d(np.arange(capacity), slots)
    slots = np.where(slots < capacity, slots, -1)
    slots[:8] = [-1, -7, capacity, 2**40, 2**32 + free[0], -(2**32) + free[1], capacity + 3, -(2**63)]
    return slots


def _same_states(inputs: CompressorStep, now: U8, wanted: U8) -> Measure:
    if np.array_equal(now, wanted):
        return Measure()
    page, byte = (int(axis[0]) for axis in np.nonzero(now != wanted))
    size = inputs.state_layout.record_bytes
    where = f"float {byte % size // 4}" if byte < size * inputs.state_page else "no float at all"
    slot = f"slot {page * inputs.state_page + byte // size}"
    raise Wrong(f"{int((now != wanted).sum())} bytes of states differ, first in {slot}, {where} of {size // 4}")


def _prepared(inputs: CompressorStep) -> OracleCache:
    """The states of the step and of the tokens before it, as the oracle saves them."""
    return inputs.save(inputs.blank_states(), [*inputs.earlier, *inputs.spans])


def compresses(bench: Bench, inputs: CompressorStep) -> Measure:
    """Entries that the step completes are those of the oracle; states stay as they are."""
    states, entries = _prepared(inputs), inputs.blank_entries()
    before = states.bytes(), entries.bytes()
    run_step(bench, inputs, states, entries, inputs.spans)
    _same_states(inputs, states.bytes(), before[0])
    return inputs.judge_entries(entries, before[1], inputs.completed(inputs.spans))


def compresses_only_its_slots(bench: Bench, inputs: CompressorStep) -> Measure:
    """Tokens whose slot is negative or does not exist, and tokens behind the slot mapping, store no entry."""
    states, entries = _prepared(inputs), inputs.blank_entries()
    slots, before = inputs.entry_slots(inputs.spans), entries.bytes()
    ends, capacity = np.flatnonzero(slots >= 0), entries.cache.capacity
    free = np.setdiff1d(np.arange(capacity), slots)
    dropped = [-1, -7, capacity, 2**40, 2**32 + int(free[0]), capacity + 3]
    slots[ends[: len(dropped)]] = dropped
    short = slots[: ends[-1]]
    reached = [end for end in ends[len(dropped) :] if end < len(short)]
    if not reached:
        raise ValueError("the case input leaves no entry to store")
    run_step(bench, inputs, states, entries, inputs.spans, slots=short)
    tokens = inputs.tokens(inputs.spans)
    return inputs.judge_entries(entries, before, [(tokens[i][0], tokens[i][1] // inputs.ratio) for i in reached])


def saves_and_compresses(bench: Bench, inputs: CompressorStep, *, padded: bool = False) -> Measure:
    """A step saves its states and makes its entries, from these and from states that were there before.

    padded: whether rows of padding stand before and after its tokens.
    """
    states, entries = inputs.save(inputs.blank_states(), inputs.earlier), inputs.blank_entries()
    before = entries.bytes()
    run_step(bench, inputs, states, entries, inputs.spans, values=inputs.projected(inputs.spans), padded=padded)
    _same_states(inputs, states.bytes(), _prepared(inputs).bytes())
    return inputs.judge_entries(entries, before, inputs.completed(inputs.spans))


def stores_nothing(bench: Bench, inputs: CompressorStep) -> Measure:
    """A step without tokens, and one whose tokens complete no entry, store none."""
    states, entries = _prepared(inputs), inputs.blank_entries()
    before = states.bytes(), entries.bytes()
    none = [(0, range(0))]
    run_step(bench, inputs, states, entries, none, values=inputs.projected(none))
    incomplete = [
        (i, range(before, before + 1)) for i, (before, _) in enumerate(inputs.requests) if (before + 1) % inputs.ratio
    ]
    run_step(bench, inputs, states, entries, incomplete)
    _same_states(inputs, states.bytes(), before[0])
    return inputs.judge_entries(entries, before[1], [])


def any_cut(*cuts: Sequence[int]) -> Callable[[Bench, CompressorStep], Measure]:
    """However the tokens of a request are cut into steps, the bytes of states and entries are the same.

    cuts: sizes of steps, again and again until all tokens are through.
    """

    def check(bench: Bench, inputs: CompressorStep) -> Measure:
        results = []
        for sizes in ((2**20,), *cuts):
            states, entries = inputs.blank_states(), inputs.blank_entries()
            before = entries.bytes()
            for spans in _steps(inputs, sizes):
                run_step(bench, inputs, states, entries, spans, values=inputs.projected(spans))
            results.append((states.bytes(), entries.bytes()))
            measure = inputs.judge_entries(entries, before, inputs.completed(inputs.spans))
        _same_states(inputs, results[0][0], inputs.save(inputs.blank_states(), inputs.spans).bytes())
        for sizes, (states_now, entries_now) in zip(cuts, results[1:], strict=True):
            _require_same(f"in steps of {', '.join(map(str, sizes))} tokens", states_now, results[0][0], "states")
            _require_same(f"in steps of {', '.join(map(str, sizes))} tokens", entries_now, results[0][1], "entries")
        return measure

    return check


def _steps(inputs: CompressorStep, sizes: Sequence[int]) -> Iterator[list[Span]]:
    """Steps of all requests; request i begins with the i-th size."""
    done = [before for before, _ in inputs.requests]
    turn = 0
    while any(done[i] < before + count for i, (before, count) in enumerate(inputs.requests)):
        spans = []
        for i, (before, count) in enumerate(inputs.requests):
            end = min(done[i] + sizes[(turn + i) % len(sizes)], before + count)
            spans.append((i, range(done[i], end)))
            done[i] = end
        yield spans
        turn += 1


def _require_same(what: str, now: U8, wanted: U8, name: str) -> None:
    if not np.array_equal(now, wanted):
        page, byte = (int(axis[0]) for axis in np.nonzero(now != wanted))
        raise Wrong(f"{what}: {int((now != wanted).sum())} bytes of {name} differ, first byte {byte} of page {page}")


def replays(bench: Bench, inputs: CompressorStep) -> Measure:
    """Drafts that are replaced, and tokens that are computed again, leave the bytes of one pass."""
    plain = inputs.blank_states(), inputs.blank_entries()
    run_step(bench, inputs, *plain, inputs.spans, values=inputs.projected(inputs.spans))
    states, entries = inputs.blank_states(), inputs.blank_entries()
    drafts = attrs.evolve(inputs, seed=inputs.seed + 1)
    for begin, end, values in ((0, 6, inputs), (6, 11, drafts), (6, 9, inputs), (9, 13, drafts), (5, 2**20, inputs)):
        spans = [(i, span[begin:end]) for i, span in inputs.spans]
        run_step(bench, inputs, states, entries, spans, values=values.projected(spans))
    _require_same("after drafts and a replay", states.bytes(), plain[0].bytes(), "states")
    _require_same("after drafts and a replay", entries.bytes(), plain[1].bytes(), "entries")
    return Measure()


def unused_bytes(bench: Bench, inputs: CompressorStep) -> Measure:
    """Whatever bytes belong to no state, entries have the same bytes."""
    results = []
    for byte in (0xFF, 0x00, 0x7F):
        other = attrs.evolve(inputs, unused=byte)
        states, entries = _prepared(other), other.blank_entries()
        before = entries.bytes()
        run_step(bench, other, states, entries, other.spans)
        other.judge_entries(entries, before, other.completed(other.spans))
        results.append(entries.bytes())
        _require_same(f"over unused bytes of 0x{byte:02X}", results[-1], results[0], "entries")
    return Measure()


def moved(bench: Bench, inputs: CompressorStep) -> Measure:
    """Which pages hold a request, and how far apart they are, changes no byte of an entry."""
    results = []
    for other in (inputs, attrs.evolve(inputs, gap=4608)):
        states, entries = _prepared(other), other.blank_entries()
        before = entries.bytes()
        run_step(bench, other, states, entries, other.spans)
        other.judge_entries(entries, before, other.completed(other.spans))
        page = inputs.layout.page_bytes(inputs.entry_page)
        results.append(entries.bytes()[:, :page])
    _require_same("with pages further apart", results[1], results[0], "entries")
    return Measure()


def spoils_own_entries(bench: Bench, inputs: CompressorStep) -> Measure:
    """A NaN in kv or in a score of a token makes the entries NaN that it counts in, and harms no other."""
    clean = inputs.blank_states(), inputs.blank_entries()
    run_step(bench, inputs, *clean, inputs.spans, values=inputs.projected(inputs.spans))
    tokens, read = inputs.tokens(inputs.spans), {}
    for number, (token, half, part) in enumerate(((6, 0, 0), (6, 1, 1), (9, 1, 0), (11, 0, 1))):
        request, position = tokens[token]
        channel = (half if inputs.overlap else 0) * inputs.dim + 5 + number
        values = inputs.projected(inputs.spans)
        values[part][token, channel] = torch.nan
        states, entries = inputs.blank_states(), inputs.blank_entries()
        run_step(bench, inputs, states, entries, inputs.spans, values=values)
        name = f"a NaN {'score' if part else 'kv'} of token {position} in channel {channel}"
        for owner, entry in inputs.completed(inputs.spans):
            window = oracle_layer.entry_window(entry, inputs.ratio, overlap=inputs.overlap)
            hit = owner == request and (position, half if inputs.overlap else 0) in window
            slot = int(inputs.entry_pages.slots(owner, [entry])[0])
            place = slot // inputs.entry_page, place_of(inputs.layout, slot % inputs.entry_page, inputs.entry_page)
            record = entries.bytes()[place]
            if hit and not np.isnan(found(record, inputs.layout)).any():
                raise Wrong(f"{name}: entry {entry}, which it counts in, does not read as NaN")
            if not hit and not np.array_equal(record, clean[1].bytes()[place]):
                raise Wrong(f"{name}: entry {entry} of request {owner} changed, and the token does not count in it")
            read[number, hit] = True
    if not all((number, True) in read for number in range(4)):
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
        made = Formula.exact(kv.value[0]) if self.ratio == 1 else kv.pooled(self.rows(LATENT_SCORE, request, window))
        return made.normed(self.weight(), self.eps)

    def state_pages(self) -> Pages:
        """Pages of the rings."""
        live = [(0, self.ring)] * len(self.lengths)
        return Pages(live, self.state_page, spare=2, dead=-1, key=(RINGS,))

    def tokens(self, spans: Sequence[Span]) -> tuple[Tensor, Tensor]:
        """Positions [T] int64 and requests [T] int32."""
        pairs = [(request, position) for request, positions in spans for position in positions]
        requests, positions = (np.array([pair[i] for pair in pairs], dtype=np.int64) for i in range(2))
        return self.tensor(positions), self.tensor(requests, torch.int32)

    def values(self, stream: int, spans: Sequence[Span]) -> Tensor:
        """[T, d] kv or scores."""
        rows = [self.rows(stream, request, positions) for request, positions in spans if len(positions)]
        return self.tensor(np.concatenate([np.zeros((0, self.dim)), *rows]), torch.float32)

    def steps(self, sizes: Sequence[int]) -> list[list[Span]]:
        """Steps of all requests, of these sizes again and again; request i begins with the i-th."""
        done, found = [0] * len(self.lengths), list[list[Span]]()
        while any(at < length for at, length in zip(done, self.lengths, strict=True)):
            ends = [min(at + sizes[(len(found) + i) % len(sizes)], self.lengths[i]) for i, at in enumerate(done)]
            found.append([(i, range(at, end)) for i, (at, end) in enumerate(zip(done, ends, strict=True))])
            done = ends
        return found


def _run(
    bench: Bench, inputs: LatentSteps, states: OracleCache | None, spans: Sequence[Span], *, padded: bool = False
) -> Tensor:
    """The latents [T, d] of a step. Raises Wrong if what was given is changed.

    padded: whether rows of padding, with NaN and stale positions, stand between the requests. Their latents, which are
    not returned, must be zeros.
    """
    positions, requests = inputs.tokens(spans)
    kv, score = (inputs.values(stream, spans) for stream in (LATENT_KV, LATENT_SCORE))
    rows, live = list(range(len(positions))), torch.arange(len(positions), device="cpu")
    if padded:
        positions, requests, kv, score, live = _with_padding(inputs, spans, positions, requests, kv, score)
        rows = live.tolist()
    before = kv.clone(), score.clone()
    weight = inputs.tensor(inputs.weight(), torch.float32)
    run, eps, ratio = bench.layer_ops.compress_latents, inputs.eps, inputs.ratio
    if states is None:
        found = run(kv, None, positions, requests, weight, eps, ratio)
    else:
        rings = StatePages(states.cache, inputs.tensor(inputs.state_pages().table[:, : inputs.ring_blocks]))
        found = run(kv, score, positions, requests, weight, eps, ratio, rings)
    pairs = (kv, before[0]), (score, before[1])
    if not all(torch.equal(one.view(torch.int32), other.view(torch.int32)) for one, other in pairs):
        raise Wrong("kv or scores were changed")
    if found.dtype != torch.bfloat16 or found.shape != kv.shape:
        raise Wrong(f"latents: {list(found.shape)} {found.dtype}, expected {list(kv.shape)} torch.bfloat16")
    for row in sorted({*range(len(found))} - {*rows}):
        if not torch.equal(found[row], torch.zeros_like(found[row])):
            raise Wrong(f"latent of row {row}, which is padding: not zero")
    return found[live.to(found.device)]


def _with_padding(
    inputs: LatentSteps, spans: Sequence[Span], positions: Tensor, requests: Tensor, kv: Tensor, score: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(positions, requests, kv, scores, rows of the tokens), with rows of padding before and after each request.

    Padding has the position after the request's last one, the position of its first one, and stale ones.
    """
    order, extra, token = list[int](), list[int](), 0
    for request, span in [(-1, range(0)), *spans]:
        order += range(token, token + len(span))
        token += len(span)
        last = [span[-1] + 1, span[0]] if len(span) else []
        for position in (*last, STALE_POSITIONS[request], STALE_POSITIONS[request - 1]):
            order.append(len(positions) + len(extra))
            extra.append(position)
    places = torch.tensor(order, dtype=torch.int64, device=inputs.device)
    nothing = kv.new_full((len(extra), inputs.dim), math.nan)
    positions = torch.cat([positions, inputs.tensor(np.array(extra, dtype=np.int64))])[places]
    requests = torch.cat([requests, requests.new_full((len(extra),), -1)])[places]
    kv, score = (torch.cat([values, nothing])[places] for values in (kv, score))
    return positions, requests, kv, score, (places < token).nonzero()[:, 0]


def _place(what: str, at: tuple[int, ...]) -> str:
    return f"{what}, {list(at)}"


def _judge(inputs: LatentSteps, found: Tensor, spans: Sequence[Span]) -> Measure:
    worst, pairs = Measure(0.0, 1.0), [(request, p) for request, positions in spans for p in positions]
    for row, (request, position) in zip(found, pairs, strict=True):
        if (position + 1) % inputs.ratio:
            continue
        where = f"latent {position // inputs.ratio} of request {request}"
        wanted = inputs.latent(request, position // inputs.ratio)
        measure = hold_values(row, wanted, torch.bfloat16, partial(_place, where))
        worst = worst_of(worst, measure)
    return worst


def _blank(inputs: LatentSteps) -> OracleCache:
    layout = KVCacheLayout.compressor_state(inputs.dim)
    oracle_cache = OracleCache.blank(
        layout, inputs.state_pages().count, PagePlacement(inputs.state_page, 0), inputs.device
    )
    oracle_cache.placement.pages(oracle_cache.cache, 4096).fill_(0xFF)
    return oracle_cache


def _judge_rings(inputs: LatentSteps, states: OracleCache, steps: Sequence[Sequence[Span]]) -> None:
    """The rings hold kv and scores of the last tokens, and no other byte was written. Raises Wrong."""
    wanted, pages = _blank(inputs), inputs.state_pages()
    for request in range(len(inputs.lengths)):
        held = oracle_layer.ring_rows(
            [positions for step in steps for i, positions in step if i == request], inputs.ring
        )
        rows = np.concatenate(
            [inputs.rows(stream, request, list(held.values())) for stream in (LATENT_KV, LATENT_SCORE)], 1
        )
        wanted.write(pages.slots(request, held), rows)
    now, right = states.bytes(), wanted.bytes()
    if not np.array_equal(now, right):
        page, byte = (int(axis[0]) for axis in np.nonzero(now != right))
        raise Wrong(f"{int((now != right).sum())} bytes of rings differ, first byte {byte} of page {page}")


def makes_latents(*cuts: Sequence[int], padded: bool = False) -> Callable[[Bench, LatentSteps], Measure]:
    """Latents, and rings if the ratio has them, however requests are cut into steps of these sizes.

    padded: whether every step has rows of padding too.
    """

    def check(bench: Bench, inputs: LatentSteps) -> Measure:
        worst = Measure(0.0, 1.0)
        for sizes in ((2**20,), *cuts):
            steps, states = inputs.steps(sizes), _blank(inputs) if inputs.ratio > 1 else None
            for spans in steps:
                measure = _judge(inputs, _run(bench, inputs, states, spans, padded=padded), spans)
                worst = worst_of(worst, measure)
            if states is not None:
                _judge_rings(inputs, states, steps)
        return worst

    return check


def replaces_drafts(bench: Bench, inputs: LatentSteps) -> Measure:
    """Drafts of another seed are written, and replaced."""
    drafts, states = attrs.evolve(inputs, seed=inputs.seed + 1), _blank(inputs)
    worst, last = Measure(0.0, 1.0), max(inputs.lengths)
    for begin, end, values in ((0, 5, inputs), (5, 8, drafts), (5, 6, inputs), (6, 8, drafts), (6, last, inputs)):
        spans = [(i, range(length)[begin:end]) for i, length in enumerate(inputs.lengths)]
        found = _run(bench, values, states, spans)
        if values is inputs:
            worst = worst_of(worst, _judge(inputs, found, spans))
    _judge_rings(inputs, states, [[(i, range(length)) for i, length in enumerate(inputs.lengths)]])
    return worst


def stores(*, normed: bool, padded: bool = False) -> Callable[[Bench, LatentSteps], Measure]:
    """Rows are stored for the tokens that complete an entry. normed: whether they go through a norm, as index keys.

    padded: whether rows of padding, with NaN and stale positions, stand before and after the tokens.
    """

    def check(bench: Bench, inputs: LatentSteps) -> Measure:
        spans = [(i, range(length)) for i, length in enumerate(inputs.lengths)]
        live = [(0, -(-length // inputs.ratio)) for length in inputs.lengths]
        pages = Pages(live, 16, spare=2, dead=-1, key=(inputs.seed, LATENT_ENTRIES))
        oracle_cache = OracleCache.blank(inputs.layout, pages.count, PagePlacement(16, 0), inputs.device)
        (positions, requests), x = inputs.tokens(spans), inputs.values(LATENT_KV, spans).bfloat16()
        pairs = list(zip(requests.tolist(), positions.tolist(), strict=True))
        # every token has a slot: only those that complete an entry may use it
        slots = np.array([pages.slots(request, [p // inputs.ratio])[0] for request, p in pairs])
        slots[-inputs.ratio :] = [oracle_cache.cache.capacity, -7, -1][: inputs.ratio]
        if padded:
            around, nothing = (
                inputs.tensor(np.array(STALE_POSITIONS)),
                x.new_full((len(STALE_POSITIONS), inputs.dim), math.nan),
            )
            positions, x = torch.cat([around, positions, around]), torch.cat([nothing, x, nothing])
            missing = [(-1, position) for position in STALE_POSITIONS]
            pairs, slots = [*missing, *pairs, *missing], np.pad(slots, len(missing), constant_values=-1)
        table = cos_sin_table(inputs.drawn_angles(LATENT_ANGLES, max(inputs.lengths), 32))
        weight = inputs.tensor(inputs.weight(), torch.float32) if normed else None
        original, before = x.clone(), oracle_cache.bytes()
        norm = EntryNorm(weight, inputs.eps, inputs.tensor(table, torch.float32))
        store = bench.layer_ops.norm_rope_store
        store(x, positions, inputs.tensor(slots), norm, inputs.ratio, oracle_cache.cache)
        if not torch.equal(x.view(torch.int16), original.view(torch.int16)):
            raise Wrong("the rows that were given were changed")
        now, untouched, worst = oracle_cache.bytes(), before.copy(), Measure()
        for row, slot, (request, p) in zip(original.double().cpu().numpy(), slots, pairs, strict=True):
            if (p + 1) % inputs.ratio or not 0 <= slot < oracle_cache.cache.capacity:
                continue
            place, where = (slot // 16, place_of(inputs.layout, slot % 16, 16)), f"token {p} of request {request}"
            wanted = Formula.exact(row)
            if normed:
                wanted = _in_bf16(wanted.normed(inputs.weight(), inputs.eps))
            wanted = wanted.turned(*np.split(table[p // inputs.ratio * inputs.ratio], 2))
            measure = hold_record(now[place], wanted, inputs.layout, where)
            worst, untouched[place] = worst_of(worst, measure), now[place]
        if not np.array_equal(now, untouched):
            raise Wrong("bytes that belong to no entry of the step were written")
        return worst

    return check


def _in_bf16(formula: Formula) -> Formula:
    """Values rounded to bf16; near a midpoint either neighbour is right."""
    value = oracle.round_bf16(formula.value)
    ends = [np.abs(oracle.round_bf16(end) - value) for end in formula.ends]
    return Formula(value, np.maximum(*ends))

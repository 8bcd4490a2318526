"""Steps of a compressor: requests with states before a step, the step itself, and checks of states and entries."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property

import attrs
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dsv4attn.core.cache.layout import Fp8Format, KVCacheLayout
from dsv4attn.core.contract.backend import complete
from dsv4attn.core.contract.problem import CacheFacts, Problem
from dsv4attn.core.model.geometry import LayerGeometry, LayerKind, ModelGeometry
from dsv4attn.testing import oracle_layer
from dsv4attn.testing.case import Bench, Measure, Wrong
from dsv4attn.testing.layer_tolerances import Formula, hold_record
from dsv4attn.testing.oracle_cache import OracleCache, PagePlacement, place_of
from dsv4attn.testing.pages import Pages
from dsv4attn.testing.random_step import STALE_POSITIONS, normal
from dsv4attn.testing.tolerances import F64, U8, rounded

__all__ = ["CompressorStep", "Span", "attention_problems", "run_step"]

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


def attention_problems(layer: LayerGeometry, index: KVCacheLayout, *, lse: bool) -> list[Problem]:
    """Decode on the layer that an indexer belongs to; its keys and the index keys have one dialect of fp8."""
    facts = CacheFacts.named((index.fp8_format or Fp8Format.OCP).value, 64)
    return [Problem("decode", layer, facts, facts, 128, lse=lse)]


@attrs.frozen(kw_only=True, eq=False, slots=False)
class CompressorStep:
    """One step of a compressor, after earlier ones whose states the oracle has saved.

    geometry: the model.
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
    seed: seed of all random numbers.
    device: torch device.
    """

    geometry: ModelGeometry
    layout: KVCacheLayout
    kind: LayerKind = attrs.field(default=LayerKind.C4A, converter=LayerKind)
    indexer: bool = False
    requests: Sequence[tuple[int, int]] = ((0, 13), (5, 8), (31, 2), (16, 4))
    state_page: int = 4
    entry_page: int = 64
    gap: int = 0
    size: float = 1.0
    eps: float = 1e-6
    norm_dtype: torch.dtype = torch.float32
    unused: int = 0xFF
    seed: int = 0
    device: str = "cpu"

    @property
    def layer(self) -> LayerGeometry:
        """The layer's geometry."""
        return self.geometry.layer_of_kind(self.kind)

    @property
    def ratio(self) -> int:
        """Tokens of an entry."""
        return self.layer.compress_ratio

    @property
    def overlap(self) -> bool:
        """Whether an entry covers the tokens of the one before too."""
        return self.kind is LayerKind.C4A

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
            return attention_problems(self.layer, self.layout, lse=lse)
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
        return rounded(1 + 0.5 * normal((self.seed, WEIGHT), np.zeros(1, dtype=np.int64), self.dim)[0], self.norm_dtype)

    @cached_property
    def table(self) -> F64:
        """[positions, rope] cosines, then sines, of random angles: only a step that reads the table is right."""
        last = max((before + count for before, count in self.requests), default=1)
        angles = np.random.default_rng((self.seed, ANGLES)).uniform(-math.pi, math.pi, (last, self.layer.rope_dim // 2))
        return rounded(np.concatenate([np.cos(angles), np.sin(angles)], 1), torch.float32)

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

    def tensor(self, values: NDArray[np.generic], dtype: torch.dtype | None = None) -> Tensor:
        """Values on the device."""
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.device, dtype)

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
            worst = max(worst, measure, key=lambda m: m.fraction)
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
    steps, tokens = complete(bench.backend).layer_ops, inputs.tokens(spans)
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
        states.cache,
        inputs.tensor(inputs.state_pages.table)[:, :-1],  # rows lie apart, as in a table cut to fewer columns
        inputs.tensor(np.array([request for request, _ in tokens], dtype=np.int32)),
        positions,
        inputs.tensor(entry_slots),
        inputs.tensor(inputs.norm_weight, inputs.norm_dtype),
        inputs.eps,
        inputs.tensor(inputs.table, torch.float32),
        inputs.ratio,
        entries.cache,
        overlap=inputs.overlap,
    )

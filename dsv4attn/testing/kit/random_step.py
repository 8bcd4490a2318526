"""A complete one-layer step from a short description: memory, metadata, a run on any backend, the oracle's answer.

    scenario = StepFixture(kind="c4a", requests=[(1000, 1), (0, 40)], poison=0xFF)
    out, lse = scenario.check(backend)

A prompt in chunks, or a verify step token by token, is one step in several steps (`at`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cache, cached_property, lru_cache, partial
from itertools import accumulate, chain
from typing import Any, Literal, NamedTuple

import attrs
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dsv4attn.core.attention.call import ForwardCall
from dsv4attn.core.attention.forward_mqa import forward_mqa
from dsv4attn.core.attention.raw_q import insert_with_raw_q, prefill_takes_raw_q
from dsv4attn.core.cache.layer_caches import LayerCaches
from dsv4attn.core.cache.layout import KVCacheLayout
from dsv4attn.core.cache.ownership import Ownership
from dsv4attn.core.context_parallel.metadata import OwnedMetadataBuilder
from dsv4attn.core.contract import problem
from dsv4attn.core.contract.backend import Backend, RawQuery
from dsv4attn.core.contract.limits import Limits
from dsv4attn.core.memory.plan import plan_workspace
from dsv4attn.core.memory.workspace import WorkspaceManager
from dsv4attn.core.metadata.builder import MetadataBuilder
from dsv4attn.core.metadata.metadata import AttentionMetadata, Batch
from dsv4attn.core.model.geometry import LayerGeometry, LayerKind, ModelGeometry, Rope
from dsv4attn.core.model.rope import cos_sin_cache
from dsv4attn.core.reprs import frozen
from dsv4attn.testing.case import Bench, dtype_name
from dsv4attn.testing.kit.factories import (
    HEADS,
    AttentionInput,
    flash,
    frequencies,
    layout,
    layouts,
    normal,
    tiny_geometry,
)
from dsv4attn.testing.kit.oracle_cache import PagePlacement, Pages, poison
from dsv4attn.testing.kit.strided import StridedTensors
from dsv4attn.testing.kit.tolerances import F64, Expected, rounded, stored
from dsv4attn.testing.oracle import attention as oracle

Q, KV, ENTRY, SINK, TOPK, COMMON = range(6)  # streams of random numbers
MOST_HEADS = 2**12  # more heads than any model has
ABSENT = (-1, -7, 2**31 - 1, 0x7FC00000, -(2**31))  # entry numbers that name nothing; the fourth is a NaN's bits


STALE_POSITIONS = (0, 2**40, -5, 1, 2**31 - 1, -(2**62))
"""Positions of rows of padding: what earlier steps left there."""


class Token(NamedTuple):
    """A query row of the batch: number of its request, its position, and whether it is a token or padding."""

    request: int
    position: int
    valid: bool

    def __str__(self) -> str:
        """The row in messages."""
        return f"{'the token' if self.valid else 'the padding'} at position {self.position} of request {self.request}"


@attrs.frozen(kw_only=True, eq=False, slots=False)
class RandomStep(AttentionInput):
    """One step of one layer.

    kind: kind of the layer.
    requests: for each request (tokens before the step, tokens of the step[, rows of padding at the end of these]),
    decodes first.
    sinks: one for each head, "random", or None for no sinks.
    topk: rows of the indexer. "clean": valid numbers, then -1. "holes": valid numbers anywhere among -1. "garbage":
    valid numbers anywhere among numbers that name no entry. "none": no valid number.
    extra_rows: rows of q after those of the batch.
    outliers: whether every ninth NoPE channel of a key is 20 times as large as the others.
    common: size of a row that is added to all keys, relative to what they differ by. Their sums do not cancel then.
    first_head: number of this rank's first head; a rank has the rows and sinks of its own heads.
    distinct: entries whose numbers differ by a multiple of this have equal rows; None means that all rows differ. It
    limits the rows that are judged for a million tokens.
    """

    kind: LayerKind = attrs.field(default=LayerKind.SWA, converter=LayerKind)
    requests: Sequence[tuple[int, ...]]
    geometry: ModelGeometry = attrs.field(factory=tiny_geometry)
    layout: KVCacheLayout = attrs.Factory(lambda self: layouts(self.geometry)["ocp"], takes_self=True)
    sinks: Sequence[float] | Literal["random"] | None = "random"
    topk: Literal["clean", "holes", "garbage", "none"] = "clean"
    extra_rows: int = 0
    outliers: bool = False
    common: float = 0.0
    first_head: int = 0
    distinct: int | None = None

    @property
    def spans(self) -> list[range]:
        """Positions of this step, for each request."""
        return [range(prefix, prefix + count) for prefix, count, *_ in self.requests]

    @cached_property
    def tokens(self) -> list[Token]:
        """The rows of the batch, without the extra ones."""
        rows = []
        for i, (prefix, count, *padding) in enumerate(self.requests):
            rows += [Token(i, prefix + j, j < count - sum(padding)) for j in range(count)]
        return rows

    @property
    def _heads(self) -> NDArray[np.int64]:
        return np.arange(self.first_head, self.first_head + self.layer.num_heads, dtype=np.int64)

    def q_rows(self, request: int, positions: Sequence[int]) -> F64:
        """[n, H, D] queries before norm and rotation."""
        numbers = np.asarray(positions, dtype=np.int64)[:, None] * MOST_HEADS + self._heads
        return rounded(normal((self.seed, Q, request), numbers, self.layer.head_dim), self.q_dtype)

    def key_rows(self, request: int, positions: Sequence[int]) -> F64:
        """[n, D] keys before rotation."""
        return self._library.rows(KV, request, positions)

    def entry_rows(self, request: int, numbers: Sequence[int]) -> F64:
        """[n, D] compressed entries as they are stored, rotation included."""
        return self._library.rows(ENTRY, request, self._alike(numbers))

    def _alike(self, numbers: Sequence[int]) -> Sequence[int]:
        return [n % self.distinct for n in numbers] if self.distinct else numbers

    @cached_property
    def _library(self) -> _Library:
        dtype = torch.bfloat16 if self.q_dtype == torch.bfloat16 else self.layout.row_dtype
        layouts = self.layout, self.entry_layout
        return _library(self.seed, self.layer.nope_dim, self.layer.rope, *layouts, self.outliers, self.common, dtype)

    @cached_property
    def sink_values(self) -> F64 | None:
        """[H] sinks, or None."""
        values = 2 * normal((self.seed, SINK), self._heads, 1)[:, 0] if isinstance(self.sinks, str) else self.sinks
        return None if values is None else rounded(np.asarray(values, dtype=np.float64), torch.float32)

    @cached_property
    def topk_rows(self) -> NDArray[np.int32]:
        """[T', K] output of the indexer; rows after those of the batch hold garbage."""
        width = max(self.layer.topk, 1)
        rows = np.full((len(self.tokens) + self.extra_rows, width), 0x7FC00000, dtype=np.int32)
        for row, token in zip(rows, self.tokens, strict=False):
            rng = np.random.default_rng((self.seed, TOPK, token.request, token.position))
            complete = (token.position + 1) // self.layer.compress_ratio
            chosen, places = rng.choice(complete, min(complete, width), replace=False), np.arange(width)
            if self.topk == "none":
                chosen = chosen[:0]
            elif self.topk != "clean":
                chosen, places = chosen[: rng.integers(len(chosen) + 1)], rng.permutation(width)
            row[:] = rng.choice([*ABSENT, complete, complete + 1], width) if self.topk == "garbage" else -1
            row[places[: len(chosen)]] = chosen
        return rows

    def visible(self, row: int) -> tuple[list[int], list[int]]:
        """Window positions and compressed entries that a row of the batch may see."""
        token, ratio = self.tokens[row], None if self.kind is LayerKind.SWA else self.layer.compress_ratio
        if not token.valid:
            return [], []
        selected = self.topk_rows[row].tolist() if self.kind is LayerKind.CSA else None
        return oracle.visible_keys(token.position, self.layer.window, ratio, selected)

    def expected(self) -> tuple[F64, F64]:
        """Return (out [T', H, D], lse [T', H]) by the oracle alone: rows by position, no pages, no tables."""
        return self._expected.out, self._expected.lse

    @cached_property
    def _expected(self) -> Expected:
        layer, rope, library = self.layer, self.layer.rope, self._library
        answers = Expected.empty(len(self.tokens) + self.extra_rows, layer.num_heads, layer.head_dim)
        for t, token in enumerate(self.tokens):
            positions, entries = self.visible(t)
            records = [_record(library, KV, token.request, p) for p in positions]
            records += [_record(library, ENTRY, token.request, e) for e in self._alike(entries)]
            turn = oracle.rope_cos_sin(token.position, frequencies(rope))
            q = oracle.q_norm_rope(self.q_rows(token.request, [token.position])[0], *turn, rope.dim, layer.q_eps)
            answers.judge(t, rounded(q, self.q_dtype), records, self.sink_values, layer.scale)
        return answers

    def compare(self, out: Tensor, lse: Tensor) -> float:
        """Return the largest error in budgets, at most 1. Raises AssertionError naming the worst row."""
        error, where = self.judge(out, lse)
        assert error <= self.budget, where
        return error / self.budget

    def judge(self, out: Tensor, lse: Tensor | None) -> tuple[float, str]:
        """Return the largest error, in the unit of `budget`, and a sentence about its row."""
        starts = {t for t, token in enumerate(self.tokens) if token.position == self.requests[token.request][0]}
        return self._expected.verdict(out, lse, self.budget, self.layout, self._place, starts)

    def _place(self, row: int, head: int) -> str:
        token = self.tokens[row] if row < len(self.tokens) else "past the batch"
        return f"{self.kind.value} row {row} ({token}), head {head}"


@attrs.frozen(cache_hash=True)
class _Library:
    """Parameters of the keys of a step. Steps with equal parameters share their keys.

    dtype: rows are drawn with values of this type, which q and the cache can hold.
    """

    seed: int
    nope_dim: int
    rope: Rope
    layout: KVCacheLayout
    compressed_layout: KVCacheLayout
    outliers: bool
    common: float
    dtype: torch.dtype

    def rows(self, stream: int, request: int, numbers: Sequence[int]) -> F64:
        """[n, D] rows of a stream, before rotation."""
        numbers = [int(number) for number in numbers]
        if len(numbers) > _MOST_ROWS:
            return self._drawn(stream, request, numbers)
        # a dictionary of this call, because another thread may clear the common one
        known = {n: row for n in numbers if (row := _ROWS.get((self, stream, request, n))) is not None}
        missing = [number for number in dict.fromkeys(numbers) if number not in known]
        if missing:
            known.update(zip(missing, self._drawn(stream, request, missing), strict=True))
            if len(_ROWS) + len(missing) > _MOST_ROWS:
                _ROWS.clear()
            _ROWS.update(((self, stream, request, number), known[number]) for number in missing)
        width = self.nope_dim + self.rope.dim
        return np.array([known[number] for number in numbers]).reshape(len(numbers), width)

    def _drawn(self, stream: int, request: int, numbers: Sequence[int]) -> F64:
        """As `rows`, all at once."""
        width = self.nope_dim + self.rope.dim
        rows = normal((self.seed, stream, request), np.array(numbers, dtype=np.int64), width)
        rows += self.common * normal((self.seed, COMMON), np.zeros(1, dtype=np.int64), width)
        rows[:, 1 : self.nope_dim : 9] *= 20 if self.outliers else 1
        return rounded(rows, self.dtype)


_MOST_ROWS = 2**14
_ROWS: dict[tuple[_Library, int, int, int], F64] = {}
"""Rows before rotation, by library, stream, request and number: most steps begin with keys that others had too."""

_library = cache(_Library)
"""One object of equal parameters, so that those that are cached by it are found by its identity."""


@lru_cache(maxsize=2**14)
def _record(library: _Library, stream: int, request: int, number: int) -> F64:
    """[D] row as a cache returns it. Cached, because many steps use the same few thousand rows."""
    row = library.rows(stream, request, [number])[0]
    if stream == KV:
        turn = oracle.rope_cos_sin(number, frequencies(library.rope))
        row = oracle.apply_rope(row, *turn, library.rope.dim)
    return stored(row, library.layout if stream == KV else library.compressed_layout)


MORE = 19
"""Columns that hold -1, in rows that are wider than the window."""

WHOLE = Ownership(0, 1)
"""The ownership of a rank that has all entries."""


@frozen(eq=False)
class ForwardArgs:
    """The arguments of one `forward_mqa`, which may run any number of times.

    layer: geometry of the layer.
    limits: limits of the workspace plan.
    q: [T, H, D] queries after norm and rotation.
    caches: window cache and compressed cache, with the keys of the step.
    metadata: metadata of the step.
    attn_sink: [H] fp32, or None.
    topk_indices: [T, K] int32 for c4a layers, or None.
    strided: names among out and lse whose rows lie apart; the other tensors exist already.
    raw_q: given if q of prefill tokens is neither normalised nor rotated.
    """

    layer: LayerGeometry
    limits: Limits
    q: Tensor
    caches: LayerCaches
    metadata: AttentionMetadata
    attn_sink: Tensor | None
    topk_indices: Tensor | None
    strided: str = ""
    raw_q: RawQuery | None = None

    def workspace(self, backend: Backend, *, debug: bool = True) -> WorkspaceManager:
        """A workspace as planned for the limits, locked; with canaries when debugging."""
        workspace = WorkspaceManager(self.q.device, debug=debug)
        workspace.reserve(plan_workspace(self.layer, self.limits, backend, self.caches.swa.layout))
        workspace.lock()
        return workspace

    def run(
        self, backend: Backend, workspace: WorkspaceManager | None = None, *, with_lse: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Return (out, lse), both NaN before the run; lse stays NaN unless it is asked for."""
        workspace, strided, like = workspace or self.workspace(backend), StridedTensors(self.strided), self.q
        out = strided("out", torch.full(like.shape, math.nan, dtype=like.dtype, device=like.device))
        lse = strided("lse", torch.full(like.shape[:2], math.nan, dtype=torch.float32, device=like.device))
        forward_mqa(
            self.q,
            self.caches,
            self.metadata,
            backend,
            workspace,
            out,
            layer=self.layer,
            limits=self.limits,
            attn_sink=self.attn_sink,
            topk_indices=self.topk_indices,
            lse=lse if with_lse else None,
            raw_q=self.raw_q,
        )
        workspace.check_canaries()
        strided.check()
        return out, lse

    def answer(self, bench: Bench, workspace: WorkspaceManager | None = None) -> tuple[Tensor, Tensor | None]:
        """As `run` on a bench; lse is None where the backend returns none."""
        out, lse = self.run(bench.backend, workspace, with_lse=bench.lse)
        return out, lse if bench.lse else None


@attrs.frozen(kw_only=True, eq=False, slots=False)
class StepFixture(RandomStep):
    """A step in memory: pages, tables, metadata. It has the fields of `RandomStep`, and these.

    swa_block_size: records of a page of the window cache.
    compressed_block_tokens: tokens of a page of the compressed cache.
    page_padding: bytes between pages, as `PagePlacement.gap`.
    spare_pages: pages of each cache that belong to no request.
    pages_seed: seed of the order of the pages; it changes nothing else.
    dead_block: entry of block tables where no block is alive.
    num_speculative_tokens: as in `Limits`.
    short_prefills: as in `MetadataBuilder`.
    poison: byte written over all bytes of the caches that no query names, or None. With it, padding rows of q are NaN.
    pages_of: scenario whose pages this step shares, or None.
    causal: as in `Batch`.
    replay: first position of each request that a window may have; () is 0 for all.
    ahead: number of later positions of its request that a prefill token sees. The metadata are then made as an engine
       makes them, with slots in any order and -1 among them.
    ownership: entries of this rank, if ranks share them; windows are seen on rank 0 alone.
    raw_q: whether q of prefill tokens stays as it was projected, where the backend takes that.

    One half of `extra_rows` has the slot -1, the other half has no slot.
    """

    swa_block_size: int = 4
    compressed_block_tokens: int = 32
    page_padding: int = 0
    spare_pages: int = 3
    pages_seed: int = 0
    dead_block: int = -1
    num_speculative_tokens: int = 0
    short_prefills: bool = False
    poison: int | None = None
    pages_of: StepFixture | None = None
    causal: bool = True
    replay: Sequence[int] = ()
    ahead: int = 0
    ownership: Ownership = WHOLE
    raw_q: bool = False

    @property
    def num_decodes(self) -> int:
        """Decode requests of the step."""
        lens, threshold = [count for _, count, *_ in self.requests], 1 + self.num_speculative_tokens
        return next((i for i, n in enumerate(lens) if n > threshold), len(lens))

    def visible(self, row: int) -> tuple[list[int], list[int]]:
        """Window positions and compressed entries that a row of the batch may see, on this rank."""
        entries = self._owned(super().visible(row)[1])
        if self.ownership.rank:
            return [], entries
        (request, position, valid), window = self.tokens[row], self.layer.window
        span, decode = self.spans[request], request < self.num_decodes
        window_options: dict[str, Any] = {"earliest": self.replay[request] if self.replay else 0}
        if decode and not self.causal:
            window_options["block"] = span
        if self.ahead and not decode:
            window_options["last"] = min(position + self.ahead, span[-1])
        return oracle.visible_keys(position, window, None, None, **window_options)[0] if valid else [], entries

    def _owned(self, entries: Sequence[int]) -> list[int]:
        return [entry for entry in entries if self.ownership.owner(entry) == self.ownership.rank]

    def problems(self, *, lse: bool = True) -> list[problem.Problem]:
        """One support question for each phase that has work."""
        layer, first, columns = self.layer, self.num_decodes, 0
        lens = [count for _, count, *_ in self.requests]
        wide = {"decode": self.limits.decode_window_columns, "prefill": self.limits.prefill_window_columns}
        swa = problem.CacheFacts.of(self.layout, self.swa_block_size)
        compressed = None
        if self.kind is not LayerKind.SWA:
            page = self.compressed_block_tokens // layer.compress_ratio
            compressed = problem.CacheFacts.of(self.entry_layout, page)
            entries = max((prefix + count for prefix, count, *_ in self.requests), default=0) // layer.compress_ratio
            columns = layer.topk or -(-max(entries, 1) // 128) * 128
        return [
            problem.Problem(
                phase,
                layer,
                swa,
                compressed,
                columns,
                dtype_name(self.q_dtype),
                sink=self.sinks is not None,
                lse=lse,
                query_len=max(part, default=1) if phase == "decode" else 1,
                window_columns=wide[phase],
            )
            for phase, part in (("decode", lens[:first]), ("prefill", lens[first:]))
            if any(part)
        ]

    def at(self, *requests: tuple[int, ...]) -> StepFixture:
        """Another step of the same requests, on the same pages. A request without tokens takes no part in the step."""
        return attrs.evolve(self, requests=requests, pages_of=self.pages_of or self)

    def in_steps(self, cut: Sequence[int], only: int | None = None) -> Iterator[StepFixture]:
        """The step cut into steps. Each takes the next `cut[i]` tokens of every request, or of the request `only`."""
        chosen = [only in (None, i) for i in range(len(self.requests))]
        done = [0] * len(self.requests)
        for size in cut:
            takes = zip(done, self.requests, chosen, strict=True)
            counts = [min(size, n - d) if is_chosen else 0 for d, (_, n), is_chosen in takes]
            if any(counts):
                starts = (prefix + d for d, (prefix, _) in zip(done, self.requests, strict=True))
                yield self.at(*zip(starts, counts, strict=True))
            done = [d + n for d, n in zip(done, counts, strict=True)]
        assert done == [n if is_chosen else 0 for (_, n), is_chosen in zip(self.requests, chosen, strict=True)]

    def run(self, backend: Backend) -> tuple[Tensor, Tensor]:
        """Insert the history, run the step, and return (out, lse)."""
        return self.problem(backend).run(backend)

    def check(self, backend: Backend) -> tuple[Tensor, Tensor]:
        """Run, compare with the oracle, return (out, lse). Raises AssertionError naming the worst row."""
        out, lse = self.run(backend)
        self.compare(out, lse)
        return out, lse

    @cached_property
    def limits(self) -> Limits:
        """The tightest limits the step fits in."""
        rows = max(len(self.tokens) + self.extra_rows, 1 + self.num_speculative_tokens)
        longest = max((prefix + count for prefix, count, *_ in self.requests), default=0)
        limits = Limits(max(len(self.requests), 1), rows, max(longest, 1), self.num_speculative_tokens)
        block = max((count for _, count, *_ in self.requests[: self.num_decodes]), default=0)
        return attrs.evolve(
            limits,
            decode_window_columns=0 if self.causal else self.layer.window + block + MORE,
            prefill_window_columns=self.layer.window + self.ahead + MORE if self.ahead else 0,
        )

    @cached_property
    def pages(self) -> tuple[Pages, Pages]:
        """Pages of the window cache, where only records within reach of a window are alive, and compressed pages."""
        if self.pages_of is not None:
            return self.pages_of.pages
        reach, ratio = self.layer.window - self.causal, self.layer.compress_ratio
        windows = [(max(prefix - reach, 0), prefix + count) for prefix, count, *_ in self.requests]
        entries = [(0, self.ownership.count((prefix + count) // ratio)) for prefix, count, *_ in self.requests]
        options = {"spare": self.spare_pages, "dead": self.dead_block}
        return (
            Pages(windows, self.swa_block_size, key=(self.seed, self.pages_seed, 0), **options),
            Pages(entries, self.compressed_block_tokens // ratio, key=(self.seed, self.pages_seed, 1), **options),
        )

    def allocate(self) -> LayerCaches:
        """Caches of zeros."""
        caches = []
        for cache_layout, pages in zip(self.named_layouts(), self.pages, strict=False):
            placement = PagePlacement(pages.block_size, self.page_padding)
            caches.append(placement.memory(cache_layout, pages.count, self.device, fill=0))
        return LayerCaches(*caches)

    def history(self, backend: Backend, caches: LayerCaches) -> LayerCaches:
        """Insert the records from before this step that are still alive."""
        swa, compressed = self.pages
        for i, (prefix, *_) in enumerate(self.requests):
            if not prefix:
                continue
            positions = range(swa.live[i][0] // swa.block_size * swa.block_size, prefix)
            q = np.zeros((len(positions), self.layer.num_heads, self.layer.head_dim))
            slots = self.tensor(swa.slots(i, positions))
            self._insert(backend, caches, [q], [self.key_rows(i, positions)], slots, [*positions])
            if caches.compressed is not None:
                entries = self._owned(self._past_entries(i, prefix // self.layer.compress_ratio))
                rows = self.tensor(self.entry_rows(i, entries), self.layout.row_dtype)
                slots = self.tensor(compressed.slots(i, map(self.ownership.local, entries)))
                backend.quantize_and_insert_k_cache(rows, caches.compressed, slots)
        return caches

    def _past_entries(self, request: int, complete: int) -> Sequence[int]:
        """Entries of a request to insert: all complete ones, or with `distinct` only those that a query names."""
        if self.kind is not LayerKind.CSA or self.distinct is None:
            return range(complete)
        of_rows = (self.visible(row)[1] for row, token in enumerate(self.tokens) if token.request == request)
        return sorted({entry for entries in of_rows for entry in entries if entry < complete})

    def problem(self, backend: Backend, caches: LayerCaches | None = None, limits: Limits | None = None) -> ForwardArgs:
        """Insert the keys of this step; its history too, unless `caches` come from an earlier step."""
        caches = self.history(backend, self.allocate()) if caches is None else caches
        limits, batch, spans = limits or self.limits, self.batch(), list(enumerate(self.spans))
        divided = self.ownership.size > 1
        builder = (partial(OwnedMetadataBuilder, self.ownership) if divided else MetadataBuilder)(
            self.geometry,
            limits,
            swa_block_size=self.swa_block_size,
            compressed_block_tokens=self.compressed_block_tokens,
            device=self.device,
            num_swa_blocks=caches.swa.num_blocks,
            num_compressed_blocks=caches.compressed.num_blocks if caches.compressed else None,
            short_prefills=self.short_prefills,
            backend=backend,
        )
        metadata = self._widened(builder.build_for(batch, [self.kind])[self.kind])
        extra = np.ones((self.extra_rows, self.layer.num_heads, self.layer.head_dim))
        queries = [*(self.q_rows(i, span) for i, span in spans), extra]
        keys = [*(self.key_rows(i, span) for i, span in spans), extra[:, 0]]
        positions = [*chain(*self.spans), *[0] * self.extra_rows]
        q, raw = self._insert(backend, caches, queries, keys, batch.slot_mapping, positions, (metadata, limits))
        if caches.compressed is not None and metadata.compressed is not None:
            ratio = self.layer.compress_ratio
            entries = [*(self.entry_rows(i, [p // ratio for p in span]) for i, span in spans), extra[:, 0]]
            rows = self.tensor(np.concatenate(entries), self.layout.row_dtype)
            backend.quantize_and_insert_k_cache(rows, caches.compressed, metadata.compressed.slot_mapping)
        if self.poison is not None:
            self._poison(q, caches, self.poison)
        sink = None if self.sink_values is None else self.tensor(self.sink_values, torch.float32)
        topk = None
        if self.kind is LayerKind.CSA:
            topk = self.tensor(self.topk_rows)
            topk = StridedTensors(self.strided)("topk_indices", self.ownership.local_numbers(topk) if divided else topk)
        return ForwardArgs(self.layer, limits, q, caches, metadata, sink, topk, self.strided, raw)

    def _widened(self, metadata: AttentionMetadata) -> AttentionMetadata:
        """The metadata, with windows of prefill tokens that go on past the tokens."""
        swa = metadata.swa
        if not (self.ahead and swa.num_prefill_tokens):
            return metadata
        first, width = swa.num_decode_tokens, self.limits.prefill_window_columns
        rows = np.full((swa.num_prefill_tokens, 1, width), -1, dtype=np.int32)
        lens = np.zeros(swa.num_prefill_tokens, dtype=np.int32)
        for i in range(swa.num_prefill_tokens):
            positions = self.visible(first + i)[0]
            places = np.random.default_rng((self.seed, i)).permutation(width)[: len(positions)]
            rows[i, 0, places] = self.pages[0].slots(self.tokens[first + i].request, positions)
            lens[i] = places.max(initial=-1) + 1
        wide = attrs.evolve(
            swa, prefill_swa_indices=self.tensor(rows), prefill_swa_lens=self.tensor(lens), prefill_requests=None
        )
        return attrs.evolve(metadata, swa=wide)

    def batch(self) -> Batch:
        """The step as a scheduler describes it."""
        (swa, compressed), strided = self.pages, StridedTensors(self.strided)
        slots = [int(swa.slots(t.request, [t.position])[0]) if t.valid else -1 for t in self.tokens]
        starts = torch.tensor([0, *accumulate(r[1] for r in self.requests)], dtype=torch.int32, device="cpu")
        seq_lens = torch.tensor([r[0] + r[1] for r in self.requests], dtype=torch.int32, device="cpu")
        return Batch(
            num_reqs=len(self.requests),
            query_start_loc=starts.to(self.device),
            query_start_loc_cpu=starts,
            seq_lens=seq_lens.to(self.device),
            seq_lens_cpu=seq_lens,
            slot_mapping=torch.tensor([*slots, *[-1] * (self.extra_rows // 2)], device=self.device, dtype=torch.int64),
            block_table=strided("block_table", self.tensor(swa.table)),
            compressed_block_table=None
            if self.kind is LayerKind.SWA
            else strided("block_table", self.tensor(compressed.table)),
            replay_start=self.tensor(np.array(self.replay, dtype=np.int32)) if self.replay else None,
            num_cached_tokens=self.tensor(np.array(self.replay, dtype=np.int32)) if self.replay else None,
            causal=self.causal,
        )

    def _insert(
        self,
        backend: Backend,
        caches: LayerCaches,
        q: list[F64],
        kv: list[F64],
        slots: Tensor,
        positions: list[int],
        step: tuple[AttentionMetadata, Limits] | None = None,
    ) -> tuple[Tensor, RawQuery | None]:
        """Insert keys. Returns the queries, normalised and rotated, unless prefill of this step takes them raw."""
        strided, places = StridedTensors(self.strided), self.tensor(np.asarray(positions, dtype=np.int64))
        queries = strided("q", self.tensor(np.concatenate(q), self.q_dtype))
        keys = strided("kv", self.tensor(np.concatenate(kv), self.q_dtype))  # kv has q's dtype
        table = strided("cos_sin_cache", self._cos_sin)
        arguments, eps, raw = (queries, keys, caches.swa, slots), self.layer.q_eps, None
        if self.raw_q and step is not None and eps is not None:
            (metadata, limits), space = step, WorkspaceManager(queries.device)
            call = ForwardCall(queries, caches, metadata, backend, space, queries, self.layer, limits, None)
            if prefill_takes_raw_q(call):
                raw = RawQuery(places, table, eps)
                insert_with_raw_q(backend, *arguments, raw, metadata.swa.num_decode_tokens)
        if raw is None:
            backend.qnorm_rope_kv_insert(*arguments, places, table, eps)
        strided.check()
        return queries, raw

    def _poison(self, q: Tensor, caches: LayerCaches, byte: int) -> None:
        padding = [row for row, token in enumerate(self.tokens) if not token.valid]
        q[[*padding, *range(len(self.tokens), q.shape[0])]] = math.nan
        for part, (paged, pages) in enumerate(zip(caches.segments(self.layer), self.pages, strict=False)):
            number = self.ownership.local if part else int
            named = [pages.slots(t.request, map(number, self.visible(row)[part])) for row, t in enumerate(self.tokens)]
            poison(paged, np.concatenate([np.zeros(0, np.int64), *named]), byte)

    @cached_property
    def _cos_sin(self) -> Tensor:
        return cos_sin_cache(self.layer.rope, self.limits.max_model_len, self.device)


def step(
    kind: str,
    *requests: tuple[int, ...],
    heads: int = HEADS,
    select: int = 512,
    cache: str = "ocp",
    compressed: str | None = None,
    pages: tuple[int, int] = (64, 256),
    ratio: int = 0,
    **changes: Any,  # noqa: ANN401 - fields of a StepFixture
) -> StepFixture:
    """One step of a batch. pages: records of a window page, tokens of a compressed one."""
    geometry = changes.pop("geometry", None) or flash(kind, heads, select, ratio)
    fields: dict[str, Any] = {
        "kind": kind,
        "requests": requests,
        "geometry": geometry,
        "layout": layout(cache, geometry),
        "compressed_layout": layout(compressed, geometry) if compressed else None,
        "swa_block_size": pages[0],
        "compressed_block_tokens": pages[1],
    }
    return StepFixture(**{**fields, **changes})

"""A complete one-layer step from a short description: memory, metadata, a run on any backend, the oracle's answer.

    scenario = StepFixture(kind="c4a", requests=[(1000, 1), (0, 40)], poison=0xFF)
    out, lse = scenario.check(backend)

A prompt in chunks, or a verify step token by token, is one step in several steps (`at`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property, partial
from itertools import accumulate, chain
from typing import Any

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
from dsv4attn.core.model.geometry import LayerGeometry, LayerKind
from dsv4attn.core.model.rope import cos_sin_cache
from dsv4attn.testing import oracle
from dsv4attn.testing.case import dtype_name
from dsv4attn.testing.pages import Pages, allocate, poison
from dsv4attn.testing.random_step import RandomStep
from dsv4attn.testing.strided import StridedTensors
from dsv4attn.testing.tolerances import F64

__all__ = ["ForwardArgs", "StepFixture"]

MORE = 19
"""Columns of rows wider than the window that hold -1, beside those that hold slots."""

WHOLE = Ownership(0, 1)
"""Of a rank that has all entries."""


@attrs.frozen(eq=False)
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


@attrs.frozen(kw_only=True, eq=False, slots=False)
class StepFixture(RandomStep):
    """A step in memory: pages, tables, metadata. It has the fields of `RandomStep`, and these.

    swa_block_size: records of a page of the window cache.
    compressed_block_tokens: tokens of a page of the compressed cache.
    page_padding: bytes between pages, in addition to the page stride of the layout; rounded up as in `page_step`.
    spare_pages: pages of each cache that belong to no request.
    pages_seed: seed of the order of the pages; it changes nothing else.
    dead_block: entry of block tables where no block is alive.
    num_speculative_tokens: as in `Limits`.
    short_prefills: as in `MetadataBuilder`.
    poison: byte written over all bytes of the caches that no query names, or None. With it, padding rows of q are NaN.
    strided: arguments (q, kv, out, lse, topk_indices, block_table, cos_sin_cache) whose rows lie apart, or "all".
    device: torch device.
    pages_of: scenario whose pages this step shares, or None.
    causal: as in `Batch`.
    replay: first position of each request that a window may have; () is 0 for all.
    ahead: positions behind its own, up to the last of its request, that a prefill token sees; their metadata are then
       made as an engine makes them, with slots in any order and -1 among them.
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
    strided: str = ""
    device: str = "cpu"
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
        other: dict[str, Any] = {"earliest": self.replay[request] if self.replay else 0}
        if decode and not self.causal:
            other["block"] = span
        if self.ahead and not decode:
            other["last"] = min(position + self.ahead, span[-1])
        return oracle.visible_keys(position, window, None, None, **other)[0] if valid else [], entries

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
            compressed = problem.CacheFacts.of(self.compressed_layout or self.layout, page)
            entries = max((before + count for before, count, *_ in self.requests), default=0) // layer.compress_ratio
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

    def named_layouts(self) -> list[KVCacheLayout]:
        """Layouts of all caches."""
        return [self.layout] if self.kind is LayerKind.SWA else [self.layout, self.compressed_layout or self.layout]

    def at(self, *requests: tuple[int, ...]) -> StepFixture:
        """Another step of the same requests, on the same pages. A request without tokens takes no part in the step."""
        return attrs.evolve(self, requests=requests, pages_of=self.pages_of or self)

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
        longest = max((before + count for before, count, *_ in self.requests), default=0)
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
        windows = [(max(before - reach, 0), before + count) for before, count, *_ in self.requests]
        entries = [(0, self.ownership.count((before + count) // ratio)) for before, count, *_ in self.requests]
        more = {"spare": self.spare_pages, "dead": self.dead_block}
        return (
            Pages(windows, self.swa_block_size, key=(self.seed, self.pages_seed, 0), **more),
            Pages(entries, self.compressed_block_tokens // ratio, key=(self.seed, self.pages_seed, 1), **more),
        )

    def allocate(self) -> LayerCaches:
        """Caches of zeros."""
        layouts = self.layout, self.compressed_layout or self.layout
        made = [
            allocate(layout, p.count, p.block_size, self.page_padding, self.device)
            for layout, p in zip(layouts[: 1 + (self.kind is not LayerKind.SWA)], self.pages, strict=False)
        ]
        return LayerCaches(*made)

    def history(self, backend: Backend, caches: LayerCaches) -> LayerCaches:
        """Insert the records from before this step that are still alive."""
        swa, compressed = self.pages
        for i, (before, *_) in enumerate(self.requests):
            if not before:
                continue
            positions = range(swa.live[i][0] // swa.block_size * swa.block_size, before)
            q = np.zeros((len(positions), self.layer.num_heads, self.layer.head_dim))
            slots = self._tensor(swa.slots(i, positions))
            self._insert(backend, caches, [q], [self.key_rows(i, positions)], slots, [*positions])
            if caches.compressed is not None:
                entries = self._owned(self._past_entries(i, before // self.layer.compress_ratio))
                rows = self._tensor(self.entry_rows(i, entries), self.layout.row_dtype)
                slots = self._tensor(compressed.slots(i, map(self.ownership.local, entries)))
                backend.quantize_and_insert_k_cache(rows, caches.compressed, slots)
        return caches

    def _past_entries(self, request: int, complete: int) -> Sequence[int]:
        """Entries of a request to insert: all complete ones, or with `distinct` only those that a query names."""
        if self.kind is not LayerKind.C4A or self.distinct is None:
            return range(complete)
        mine = (self.visible(row)[1] for row, token in enumerate(self.tokens) if token.request == request)
        return sorted({entry for entries in mine for entry in entries if entry < complete})

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
            rows = self._tensor(np.concatenate(entries), self.layout.row_dtype)
            backend.quantize_and_insert_k_cache(rows, caches.compressed, metadata.compressed.slot_mapping)
        if self.poison is not None:
            self._poison(q, caches, self.poison)
        sink = None if self.sink_values is None else self._tensor(self.sink_values, torch.float32)
        topk = None
        if self.kind is LayerKind.C4A:
            topk = self._tensor(self.topk_rows)
            topk = StridedTensors(self.strided)("topk_indices", self.ownership.local_numbers(topk) if divided else topk)
        return ForwardArgs(self.layer, limits, q, caches, metadata, sink, topk, self.strided, raw)

    def _widened(self, metadata: AttentionMetadata) -> AttentionMetadata:
        """The metadata, with windows of prefill tokens that go on behind the tokens."""
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
        wide = attrs.evolve(swa, prefill_swa_indices=self._tensor(rows), prefill_swa_lens=self._tensor(lens))
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
            block_table=strided("block_table", self._tensor(swa.table)),
            compressed_block_table=None
            if self.kind is LayerKind.SWA
            else strided("block_table", self._tensor(compressed.table)),
            replay_start=self._tensor(np.array(self.replay, dtype=np.int32)) if self.replay else None,
            num_cached_tokens=self._tensor(np.array(self.replay, dtype=np.int32)) if self.replay else None,
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
        strided, places = StridedTensors(self.strided), self._tensor(np.asarray(positions, dtype=np.int64))
        queries = strided("q", self._tensor(np.concatenate(q), self.q_dtype))
        keys = strided("kv", self._tensor(np.concatenate(kv), self.q_dtype))  # kv has q's dtype
        table = strided("cos_sin_cache", self._cos_sin)
        given, eps, raw = (queries, keys, caches.swa, slots), self.layer.q_eps, None
        if self.raw_q and step is not None and eps is not None:
            (metadata, limits), space = step, WorkspaceManager(queries.device)
            call = ForwardCall(queries, caches, metadata, backend, space, queries, self.layer, limits, None)  # type: ignore[arg-type]
            if prefill_takes_raw_q(call):
                raw = RawQuery(places, table, eps)
                insert_with_raw_q(backend, *given, raw, metadata.swa.num_decode_tokens)
        if raw is None:
            backend.qnorm_rope_kv_insert(*given, places, table, eps)
        strided.check()
        return queries, raw

    def _poison(self, q: Tensor, caches: LayerCaches, byte: int) -> None:
        padding = [row for row, token in enumerate(self.tokens) if not token.valid]
        q[[*padding, *range(len(self.tokens), q.shape[0])]] = math.nan
        for part, (cache, pages) in enumerate(zip(caches.segments(self.layer), self.pages, strict=False)):
            number = self.ownership.local if part else int
            named = [pages.slots(t.request, map(number, self.visible(row)[part])) for row, t in enumerate(self.tokens)]
            poison(cache, np.concatenate([np.zeros(0, np.int64), *named]), byte)

    @cached_property
    def _cos_sin(self) -> Tensor:
        return cos_sin_cache(self.layer.rope, self.limits.max_model_len, self.device)

    def _tensor(self, values: NDArray[Any], dtype: torch.dtype | None = None) -> Tensor:
        return torch.from_numpy(values).to(self.device, dtype)

"""`Step`, the arguments of one `forward_mqa`, and `BackendCall`, the base of the calls that it makes of a backend."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import TypeAlias

import torch
from attrs import evolve, frozen
from torch import Tensor

from dsv4attn.core.cache.layer_caches import LayerCaches
from dsv4attn.core.cache.layout import PagedKVCache
from dsv4attn.core.cache.selected_keys import DenseIndices, GatheredKeys, PagedKeys, RaggedIndices
from dsv4attn.core.contract.backend import AttentionCall, CompleteBackend, Extras, Phase, RawQuery, Run
from dsv4attn.core.contract.limits import Limits
from dsv4attn.core.memory.chunking import PrefillChunk, cut_chunk, plan_prefill_chunks, plan_row_chunks
from dsv4attn.core.memory.plan import gathers_keys, prefill_bounds
from dsv4attn.core.memory.workspace import WorkspaceManager
from dsv4attn.core.metadata.metadata import AttentionMetadata
from dsv4attn.core.model.geometry import LayerGeometry, LayerKind
from dsv4attn.core.tensorspec import BufferSpec

__all__ = ["INT", "BackendCall", "Rows", "Step"]

INT = torch.int32
Rows: TypeAlias = DenseIndices | RaggedIndices
"""The keys of each token of a call."""


@frozen(eq=False, slots=False)
class Step:
    """The arguments of a `forward_mqa`, checked.

    chunk_tokens: most tokens of a prefill chunk; 0: any number. phase: the only one that runs; None: both. ranges:
    (first token, the one behind the last) of the prefill tokens that are attended to; None: all of them. raw_q: given
    if q of prefill tokens is neither normalised nor rotated.
    """

    q: Tensor
    caches: LayerCaches
    metadata: AttentionMetadata
    backend: CompleteBackend
    workspace: WorkspaceManager
    out: Tensor
    layer: LayerGeometry
    limits: Limits
    attn_sink: Tensor | None
    topk_indices: Tensor | None
    lse: Tensor | None
    chunk_tokens: int = 0
    phase: Phase | None = None
    ranges: Sequence[tuple[int, int]] | None = None
    raw_q: RawQuery | None = None

    @cached_property
    def segments(self) -> Sequence[PagedKVCache]:
        """The caches that this kind of layer reads."""
        return self.caches.segments(self.layer)

    @cached_property
    def gathers(self) -> bool:
        """Whether the keys of prefill requests are gathered: windows wider than the layer's are read on pages."""
        columns = self.metadata.swa.prefill_swa_indices.shape[2]
        return gathers_keys(self.layer, self.backend) and columns <= self.layer.window

    def takes_raw_q(self, chunks: Sequence[PrefillChunk] = ()) -> bool:
        """Whether the backend takes raw q of prefill tokens; with chunks, all of them: and is faster so."""
        costs = [(self.requests_of(chunk), _rows_of(chunk)) for chunk in chunks]
        row_dtype, asked = self.caches.swa.layout.row_dtype, self.backend.takes_raw_q
        return self.gathers and all(asked(self.layer, one, row_dtype, costs) for one in (self.q, self.out))

    @property
    def prefill_phase(self) -> Phase:
        """The phase of the calls for prefill requests: every backend reads pages in decode, not all in prefill."""
        paged = not gathers_keys(self.layer, self.backend)
        return Phase.PREFILL if paged or self.gathers else Phase.DECODE

    def chunks(self) -> Sequence[PrefillChunk]:
        """The prefill part, or the ranges of it, cut so that no chunk needs more memory than planned."""
        swa = self.metadata.swa
        if not swa.num_prefill_tokens or self.phase is Phase.DECODE:
            return ()
        chunks = [chunk for chunk in self._all_chunks() if chunk.num_tokens]
        if self.ranges is None:
            return chunks
        lens, found = swa.prefill_query_lens_cpu.tolist(), list[PrefillChunk]()
        for first, last in self.ranges:
            for chunk in chunks:
                start, stop = max(first, chunk.token_start), min(last, chunk.token_end)
                if start >= stop:
                    continue
                if self.gathers:
                    found += cut_chunk(chunk, start, stop, lens, self.layer)
                else:  # rows of pages need no other token's
                    found.append(evolve(chunk, token_start=start, token_end=stop))
        return found

    def _all_chunks(self) -> Iterable[PrefillChunk]:
        swa = self.metadata.swa
        seq_lens, query_lens = swa.prefill_seq_lens_cpu.tolist(), swa.prefill_query_lens_cpu.tolist()
        if self.prefill_phase is Phase.DECODE:
            most = min(self.limits.max_decode_tokens, self.chunk_tokens or swa.num_prefill_tokens)
            return plan_row_chunks(seq_lens, swa.num_prefill_tokens, self.layer, most)
        bounds = prefill_bounds(self.layer, self.limits, self.backend, self.caches.swa.layout)
        if not self.gathers:
            bounds = evolve(bounds, window=swa.prefill_swa_indices.shape[2])
        if self.chunk_tokens:
            bounds = evolve(bounds, tokens=self.chunk_tokens)
        return plan_prefill_chunks(seq_lens, query_lens, self.layer, bounds)

    def local_entries(self, chunk: PrefillChunk) -> Tensor | None:
        """Entry numbers of a chunk's tokens: the indexer's on c4a, all on c128a, None on window-only layers."""
        compressed, tokens = self.metadata.compressed, self.prefill_tokens(chunk)
        if self.layer.kind is LayerKind.C4A and self.topk_indices is not None:
            return self.topk_indices[tokens]
        if self.layer.kind is LayerKind.C128A and compressed is not None:
            numbers = compressed.c128a_prefill_topk_indices
            width = max(chunk.topk, 1)
            return None if numbers is None else numbers[chunk.token_start : chunk.token_end, :width]
        return None

    def requests_of(self, chunk: PrefillChunk) -> Sequence[tuple[int, int]]:
        """Tokens before a chunk, and of it, of each of its requests, as the host knows them."""
        swa, own = self.metadata.swa, slice(chunk.request_start, chunk.request_end)
        seq_lens = swa.prefill_seq_lens_cpu[own].tolist()
        counts = [chunk.num_tokens] if chunk.is_slice else swa.prefill_query_lens_cpu[own].tolist()
        return [(n - chunk.tail - count, count) for n, count in zip(seq_lens, counts, strict=True)]

    def takes_rows(self, chunk: PrefillChunk) -> bool:
        """Whether a chunk's keys are gathered: the only place that decides it.

        The workspace plan of a backend that gathers has memory for rows, and that is enough for pages.
        """
        if not self.gathers or self.raw_q is not None:
            return self.gathers
        return not self.backend.prefers_pages(self.layer, self.requests_of(chunk), _rows_of(chunk))

    def prefill_tokens(self, chunk: PrefillChunk) -> slice:
        """A chunk's tokens among those of the batch."""
        first = self.metadata.swa.num_decode_tokens
        return slice(first + chunk.token_start, first + chunk.token_end)


def _rows_of(chunk: PrefillChunk) -> int:
    """Rows that are gathered for a chunk."""
    return chunk.num_requests * (chunk.entries + chunk.gather)


class BackendCall:
    """One call of a backend in a step.

    tokens: those of the batch that the call computes. specs: views of the workspace before the backend's own scratch.
    width: index columns of a token. name: the call's name in profiles.
    """

    def __init__(self, step: Step, phase: Phase, tokens: slice, specs: Sequence[BufferSpec], width: int) -> None:
        self.step, self.phase, self.tokens = step, phase, tokens
        scratch = step.backend.scratch(phase, step.layer, tokens.stop - tokens.start, width)
        self._specs, self._caller = [*specs, *scratch], f"{step.backend.name}.{phase.value}"
        self.name = f"dsv4attn::{phase.value}[{step.layer.kind.value}]"

    def require(self) -> None:
        """Raise WorkspaceError unless the views will fit."""
        self.step.workspace.require(*self._specs, lane=self.phase.value, caller=self._caller)

    def views(self) -> list[Tensor]:
        """The views of `specs`, then the backend's scratch."""
        return self.step.workspace.get_simultaneous(*self._specs, lane=self.phase.value, caller=self._caller)

    def attention(self, keys: Sequence[PagedKeys] | GatheredKeys, scratch: Sequence[Tensor]) -> Run:
        """The backend's attention, prepared."""
        return self.step.backend.prepare(self.phase, self.call(keys, scratch))

    def call(self, keys: Sequence[PagedKeys] | GatheredKeys, scratch: Sequence[Tensor]) -> AttentionCall:
        """The arguments of the backend's attention."""
        step, tokens = self.step, self.tokens
        lse = None if step.lse is None else step.lse[tokens]
        given = step.layer, step.q[tokens], keys, step.attn_sink, step.out[tokens], lse, scratch
        raw = step.raw_q if self.phase is Phase.PREFILL else None
        return AttentionCall(*given) if raw is None else AttentionCall(*given, Extras(raw_q=raw.of(tokens)))

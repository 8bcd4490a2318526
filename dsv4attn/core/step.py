"""The phases of `forward_mqa`: what core prepares before a backend is called."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import define, field
from torch import Tensor

from dsv4attn.core.caches import LayerCaches
from dsv4attn.core.chunking import PrefillChunk, plan_prefill_chunks, round_up
from dsv4attn.core.contract import (
    AttentionCall,
    Backend,
    DenseIndices,
    GatheredKeys,
    IndexForm,
    KeyForm,
    PagedKeys,
    PageTable,
    Phase,
    RaggedIndices,
)
from dsv4attn.core.geometry import LayerGeometry, LayerKind
from dsv4attn.core.layout import PagedKVCache
from dsv4attn.core.limits import Limits
from dsv4attn.core.metadata import AttentionMetadata
from dsv4attn.core.plan import prefill_bounds, ragged_specs
from dsv4attn.core.workspace import BufferSpec, WorkspaceManager

__all__ = ["Step"]

_INT = torch.int32


@define(eq=False)  # not frozen: a frozen class takes twice as long to make, and one is made in every call
class Step:
    """The arguments of one `forward_mqa`, so that its phases read like sentences."""

    q: Tensor
    caches: LayerCaches
    metadata: AttentionMetadata
    backend: Backend
    workspace: WorkspaceManager
    out: Tensor
    layer: LayerGeometry
    limits: Limits
    attn_sink: Tensor | None
    topk_indices: Tensor | None
    lse: Tensor | None
    chunks: Sequence[PrefillChunk] = field(init=False)
    """The prefill part, cut so that no chunk needs more memory than planned."""

    @chunks.default
    def _cut(self) -> Sequence[PrefillChunk]:
        swa = self.metadata.swa
        if not swa.num_prefill_tokens:
            return ()
        bounds = prefill_bounds(self.layer, self.limits, self.backend, self.caches.swa.layout)
        lens = swa.prefill_seq_lens_cpu.tolist(), swa.prefill_query_lens_cpu.tolist()
        return tuple(plan_prefill_chunks(*lens, self.layer, bounds))

    def require(self) -> None:
        """Ask for the memory of every call to come, so that a workspace too small refuses before the first write."""
        forms, n = self.backend.forms, self.metadata.swa.num_decode_tokens
        if len(self.chunks) + bool(n) == 1:
            return  # a single call asks before it writes anyway
        for chunk in self.chunks:
            if forms.prefill_keys is KeyForm.GATHERED:
                specs, tokens, width = self._gathered_specs(chunk)
            else:
                columns, tokens = self._columns(self._local(chunk)), chunk.num_tokens
                specs, width = self._paged_specs(tokens, columns, forms.prefill_indices), self.layer.window + columns
            self._require(Phase.PREFILL, specs, tokens, width)
        if n:
            ready = self._ready()
            columns = self._columns(ready.indices if ready else self.topk_indices)
            specs = self._paged_specs(n, columns, forms.decode_indices, translated=ready is not None)
            self._require(Phase.DECODE, specs, n, self.layer.window + columns)

    def decode(self) -> None:
        """All decode tokens in one call, straight on pages."""
        swa = self.metadata.swa
        n = swa.num_decode_tokens
        if not n:
            return
        window = DenseIndices(swa.decode_swa_indices[:, 0], swa.decode_swa_lens)
        local = self.topk_indices[:n] if self.topk_indices is not None else None
        self._paged(Phase.DECODE, slice(0, n), window, local, self._ready(), self.backend.forms.decode_indices)

    def prefill(self) -> None:
        """Prefill tokens, chunk by chunk."""
        swa, forms = self.metadata.swa, self.backend.forms
        for chunk in self.chunks:
            if forms.prefill_keys is KeyForm.GATHERED:
                self._gathered(chunk)
            else:
                rows = slice(chunk.token_start, chunk.token_end)
                window = DenseIndices(swa.prefill_swa_indices[rows, 0], swa.prefill_swa_lens[rows])
                tokens = slice(swa.num_decode_tokens + rows.start, swa.num_decode_tokens + rows.stop)
                self._paged(Phase.PREFILL, tokens, window, self._local(chunk), None, forms.prefill_indices)

    def _ready(self) -> DenseIndices | None:
        """Slots of a decode step's compressed entries, where metadata holds them already."""
        compressed = self.metadata.compressed
        if self.layer.kind is not LayerKind.C128A or compressed is None:
            return None
        slots, lens = compressed.c128a_global_decode_topk_indices, compressed.c128a_decode_topk_lens
        return None if slots is None or lens is None else DenseIndices(slots[:, 0], lens)

    def _columns(self, indices: Tensor | None) -> int:
        """Columns of a compressed segment."""
        return 0 if indices is None or self.layer.kind is LayerKind.SWA else indices.shape[1]

    def _paged_specs(self, n: int, columns: int, form: IndexForm, *, translated: bool = False) -> list[BufferSpec]:
        """Views of a call on pages: translated slots, and the ragged form of each segment."""
        specs: list[BufferSpec] = []
        compressed = self.layer.kind is not LayerKind.SWA
        if compressed and not translated:
            specs += [((n, columns), _INT), ((n,), _INT)]
        if form is IndexForm.RAGGED:
            for width in (self.layer.window, columns)[: 1 + compressed]:
                specs += ragged_specs(n, width)
        return specs

    def _gathered_specs(self, chunk: PrefillChunk) -> tuple[list[BufferSpec], int, int]:
        """Views of a call on gathered rows, its query tokens and its index columns."""
        n, t, forms = chunk.num_requests, chunk.num_tokens, self.backend.forms
        width = round_up(chunk.topk + self.layer.window, forms.index_alignment)
        specs: list[BufferSpec] = [
            ((n, chunk.entries + chunk.gather, self.layer.head_dim), self.caches.swa.layout.row_dtype),
            ((t, width), _INT),
            ((t,), _INT),
            ((3, n), _INT),
            ((n + 1,), _INT),
        ]
        return specs + (ragged_specs(t, width) if forms.prefill_indices is IndexForm.RAGGED else []), t, width

    def _local(self, chunk: PrefillChunk) -> Tensor | None:
        """Entry numbers of a chunk's tokens: what the indexer left, or simply all of them."""
        first, compressed = self.metadata.swa.num_decode_tokens, self.metadata.compressed
        if self.layer.kind is LayerKind.C4A and self.topk_indices is not None:
            return self.topk_indices[first + chunk.token_start : first + chunk.token_end]
        if self.layer.kind is LayerKind.C128A and compressed is not None:
            numbers = compressed.c128a_prefill_topk_indices
            return None if numbers is None else numbers[chunk.token_start : chunk.token_end, : max(chunk.topk, 1)]
        return None

    def _paged(
        self,
        phase: Phase,
        tokens: slice,
        window: DenseIndices,
        local: Tensor | None,
        ready: DenseIndices | None,
        form: IndexForm,
    ) -> None:
        """Attend over pages: the window and, translated to slots unless `ready`, the selected entries."""
        n, columns, selected = tokens.stop - tokens.start, self._columns(ready.indices if ready else local), ready
        specs = self._paged_specs(n, columns, form, translated=ready is not None)
        views = self._views(phase, specs, n, self.layer.window + columns)
        segments = self.caches.segments(self.layer)
        if len(segments) == 2 and ready is None:
            selected = DenseIndices(views.pop(0), views.pop(0))
            self._translate(local, tokens, selected)
        rows = [window] if len(segments) == 1 or selected is None else [window, selected]
        keys = tuple(
            PagedKeys(cache, self._formed(dense, form, cache.capacity, views))
            for cache, dense in zip(segments, rows, strict=True)
        )
        self._attend(phase, tokens, keys, views)

    def _translate(self, local: Tensor | None, tokens: slice, selected: DenseIndices) -> None:
        compressed = self.metadata.compressed
        assert compressed is not None
        assert local is not None
        self.backend.steps.compute_global_topk_indices_and_lens(
            local,
            compressed.compressed_lens[tokens],
            compressed.req_id_per_token[tokens],
            compressed.block_table,
            compressed.records_per_block,
            out=(selected.indices, selected.lens),
        )

    def _gathered(self, chunk: PrefillChunk) -> None:
        """Make a chunk's keys contiguous, then attend over rows."""
        swa, compressed, layer = self.metadata.swa, self.metadata.compressed, self.layer
        n, rows, forms = chunk.num_requests, chunk.entries + chunk.gather, self.backend.forms
        specs, t, width = self._gathered_specs(chunk)
        if not t:
            return
        kv, combined, lens, per_request, starts, *views = self._views(Phase.PREFILL, specs, t, width)
        requests = slice(chunk.request_start, chunk.request_end)
        seq_lens, gather_lens, entry_lens = per_request.unbind(0)
        torch.sub(swa.prefill_seq_lens[requests], chunk.tail, out=seq_lens)
        gather_lens.copy_(swa.prefill_gather_lens[requests])
        starts.copy_(swa.query_start_loc[swa.num_decodes :][chunk.request_start : chunk.request_end + 1])
        if chunk.is_slice:
            # from the lengths on the device: those on the host may be upper bounds
            torch.clamp(seq_lens, max=t + layer.window - 1, out=gather_lens)
            starts[1:].copy_(starts[:1]).add_(t)
        window, entries = self._page_table(self.caches.swa, swa.block_table, requests), None
        if layer.kind is not LayerKind.SWA and compressed is not None and self.caches.compressed is not None:
            torch.div(seq_lens, layer.compress_ratio, rounding_mode="floor", out=entry_lens)
            entries = self._page_table(self.caches.compressed, compressed.block_table, requests)
            table = entries.block_table
            self.backend.dequantize_and_gather_k_cache(kv, self.caches.compressed, entry_lens, None, table, 0)
        self.backend.dequantize_and_gather_k_cache(
            kv, self.caches.swa, seq_lens, gather_lens, window.block_table, chunk.entries
        )
        tokens = slice(swa.num_decode_tokens + chunk.token_start, swa.num_decode_tokens + chunk.token_end)
        self.backend.steps.combine_topk_swa_indices(
            self._local(chunk),
            compressed.compressed_lens[tokens] if compressed is not None else None,
            swa.is_valid_token[tokens],
            starts,
            seq_lens,
            gather_lens,
            layer.window,
            chunk.topk,
            rows,
            chunk.entries,
            out=(combined, lens),
            swa=window,
            compressed=entries,
        )
        dense = DenseIndices(combined, lens)
        flat = kv.view(n * rows, layer.head_dim)
        keys = GatheredKeys(flat, self._formed(dense, forms.prefill_indices, n * rows, views))
        self._attend(Phase.PREFILL, tokens, keys, views)

    def _page_table(self, cache: PagedKVCache, table: Tensor, requests: slice) -> PageTable:
        """Pages of some prefill requests."""
        return PageTable(table[self.metadata.swa.num_decodes :][requests], cache.block_size, cache.num_blocks)

    def _views(self, phase: Phase, specs: list[BufferSpec], tokens: int, width: int) -> list[Tensor]:
        specs = [*specs, *self.backend.scratch(phase, self.layer, tokens, width)]
        return self.workspace.get_simultaneous(*specs, lane=phase.value, caller=f"{self.backend.name}.{phase.value}")

    def _require(self, phase: Phase, specs: list[BufferSpec], tokens: int, width: int) -> None:
        specs = [*specs, *self.backend.scratch(phase, self.layer, tokens, width)]
        self.workspace.require(*specs, lane=phase.value, caller=f"{self.backend.name}.{phase.value}")

    def _formed(
        self, dense: DenseIndices, form: IndexForm, num_slots: int, views: list[Tensor]
    ) -> DenseIndices | RaggedIndices:
        if form is IndexForm.DENSE:
            return dense
        ragged = RaggedIndices(views.pop(0), views.pop(0), dense.indices.shape[1])
        self.backend.steps.build_ragged_indices_from_dense(
            dense.indices, dense.lens, num_slots, out=(ragged.indices, ragged.indptr)
        )
        return ragged

    def _attend(
        self, phase: Phase, tokens: slice, keys: Sequence[PagedKeys] | GatheredKeys, scratch: list[Tensor]
    ) -> None:
        lse = None if self.lse is None else self.lse[tokens]
        call = AttentionCall(self.layer, self.q[tokens], keys, self.attn_sink, self.out[tokens], lse, scratch)
        (self.backend.decode if phase is Phase.DECODE else self.backend.prefill)(call)

"""The phases of `forward_mqa`: what core prepares before a backend is called."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import frozen
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
    Phase,
    RaggedIndices,
)
from dsv4attn.core.geometry import LayerGeometry, LayerKind
from dsv4attn.core.limits import Limits
from dsv4attn.core.metadata import AttentionMetadata
from dsv4attn.core.plan import prefill_bounds, ragged_specs
from dsv4attn.core.workspace import BufferSpec, WorkspaceManager

__all__ = ["Step"]

_INT = torch.int32


@frozen(eq=False)
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

    def decode(self) -> None:
        """All decode tokens in one call, straight on pages."""
        swa, compressed = self.metadata.swa, self.metadata.compressed
        n = swa.num_decode_tokens
        if not n:
            return
        topk = compressed.c128a_global_decode_topk_indices if compressed else None
        ready = None
        if compressed is not None and topk is not None and compressed.c128a_decode_topk_lens is not None:
            ready = DenseIndices(topk[:, 0], compressed.c128a_decode_topk_lens)
        window = DenseIndices(swa.decode_swa_indices[:, 0], swa.decode_swa_lens)
        local = self.topk_indices[:n] if self.topk_indices is not None else None
        self._paged(Phase.DECODE, slice(0, n), window, local, ready, self.backend.forms.decode_indices)

    def prefill(self) -> None:
        """Prefill tokens, chunk by chunk."""
        swa, forms = self.metadata.swa, self.backend.forms
        if not swa.num_prefill_tokens:
            return
        bounds = prefill_bounds(self.layer, self.limits, self.backend, self.caches.swa.layout)
        lens = swa.prefill_seq_lens_cpu.tolist(), swa.prefill_query_lens_cpu.tolist()
        for chunk in plan_prefill_chunks(*lens, self.layer, bounds):
            if forms.prefill_keys is KeyForm.GATHERED:
                self._gathered(chunk)
            else:
                rows = slice(chunk.token_start, chunk.token_end)
                window = DenseIndices(swa.prefill_swa_indices[rows, 0], swa.prefill_swa_lens[rows])
                tokens = slice(swa.num_decode_tokens + rows.start, swa.num_decode_tokens + rows.stop)
                self._paged(Phase.PREFILL, tokens, window, self._local(chunk), None, forms.prefill_indices)

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
        n, width = tokens.stop - tokens.start, window.indices.shape[1]
        selected = ready
        specs: list[BufferSpec] = []
        if self.layer.kind is not LayerKind.SWA:
            columns = ready.indices.shape[1] if ready else local.shape[1] if local is not None else 0
            width += columns
            specs = [] if ready else [((n, columns), _INT), ((n,), _INT)]
        segments = self.caches.segments(self.layer)
        if form is IndexForm.RAGGED:
            widths = [window.indices.shape[1], width - window.indices.shape[1]][: len(segments)]
            specs += [spec for w in widths for spec in ragged_specs(n, w)]
        views = self._views(phase, specs, n, width)
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
        n, t, forms = chunk.num_requests, chunk.num_tokens, self.backend.forms
        if not t:
            return
        rows = chunk.entries + chunk.gather
        width = round_up(chunk.topk + layer.window, forms.index_alignment)
        specs: list[BufferSpec] = [
            ((n, rows, layer.head_dim), self.caches.swa.layout.row_dtype),
            ((t, width), _INT),
            ((t,), _INT),
            ((3, n), _INT),
            ((n + 1,), _INT),
        ]
        if forms.prefill_indices is IndexForm.RAGGED:
            specs += ragged_specs(t, width)
        kv, combined, lens, per_request, starts, *views = self._views(Phase.PREFILL, specs, t, width)
        requests = slice(chunk.request_start, chunk.request_end)
        seq_lens, gather_lens, entry_lens = per_request.unbind(0)
        torch.sub(swa.prefill_seq_lens[requests], chunk.tail, out=seq_lens)
        gather_lens.copy_(swa.prefill_gather_lens[requests])
        starts.copy_(swa.query_start_loc[swa.num_decodes :][chunk.request_start : chunk.request_end + 1])
        if chunk.is_slice:
            gather_lens.fill_(chunk.gather)
            starts[1:].copy_(starts[:1]).add_(t)
        block_table = swa.block_table[swa.num_decodes :][requests]
        if layer.kind is not LayerKind.SWA and compressed is not None and self.caches.compressed is not None:
            torch.div(seq_lens, layer.compress_ratio, rounding_mode="floor", out=entry_lens)
            table = compressed.block_table[swa.num_decodes :][requests]
            self.backend.dequantize_and_gather_k_cache(kv, self.caches.compressed, entry_lens, None, table, 0)
        self.backend.dequantize_and_gather_k_cache(
            kv, self.caches.swa, seq_lens, gather_lens, block_table, chunk.entries
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
        )
        dense = DenseIndices(combined, lens)
        flat = kv.view(n * rows, layer.head_dim)
        keys = GatheredKeys(flat, self._formed(dense, forms.prefill_indices, n * rows, views))
        self._attend(Phase.PREFILL, tokens, keys, views)

    def _views(self, phase: Phase, specs: list[BufferSpec], tokens: int, width: int) -> list[Tensor]:
        scratch = list(self.backend.scratch(phase, self.layer, tokens, width))
        return self.workspace.get_simultaneous(
            *specs, *scratch, lane=phase.value, caller=f"{self.backend.name}.{phase.value}"
        )

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

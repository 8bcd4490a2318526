"""`GatheredCall`: a prefill chunk's keys are copied to contiguous rows, on which the backend's attention runs."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4attn.core.caches import LayerCaches
from dsv4attn.core.chunking import PrefillChunk, round_up
from dsv4attn.core.contract import IndexForm, Phase
from dsv4attn.core.geometry import LayerKind
from dsv4attn.core.index_ops import prepare_index_step
from dsv4attn.core.keys import DenseIndices, GatheredKeys, PageTable, RaggedIndices
from dsv4attn.core.layout import PagedKVCache
from dsv4attn.core.prepared import Part
from dsv4attn.core.step import INT, BackendCall, Rows, Step
from dsv4attn.core.workspace import BufferSpec
from dsv4attn.core.workspace_plan import ragged_specs

__all__ = ["GatheredCall"]


class GatheredCall(BackendCall):
    """Attention of a prefill chunk over rows [requests * (entries + window rows), D] in the workspace."""

    def __init__(self, step: Step, chunk: PrefillChunk) -> None:
        """Plan the views: rows, combined indices and lengths, three lengths of each request, starts of queries."""
        n, t, forms = chunk.num_requests, chunk.num_tokens, step.backend.forms
        width = round_up(chunk.topk + step.layer.window, forms.index_alignment)
        self._chunk, self._ragged = chunk, forms.prefill_indices is IndexForm.RAGGED
        specs: list[BufferSpec] = [
            ((n, chunk.entries + chunk.gather, step.layer.head_dim), step.caches.swa.layout.row_dtype),
            ((t, width), INT),
            ((t,), INT),
            ((3, n), INT),
            ((n + 1,), INT),
        ]
        specs += ragged_specs(t, width) if self._ragged else []
        super().__init__(step, Phase.PREFILL, step.prefill_tokens(chunk), specs, width)

    def prepare(self) -> Part:
        """Bind everything but the addresses that differ between layers."""
        step, chunk, layer, tokens = self.step, self._chunk, self.step.layer, self.tokens
        swa, compressed, backend = step.metadata.swa, step.metadata.compressed, step.backend
        kv, combined, lens, per_request, own_starts, *views = self.views()
        n, rows = chunk.num_requests, chunk.entries + chunk.gather
        requests, first = slice(chunk.request_start, chunk.request_end), swa.num_decodes + chunk.request_start
        seq_lens, gather_lens = swa.prefill_seq_lens[requests], swa.prefill_gather_lens[requests]
        starts, valid = swa.query_start_loc[first : first + n + 1], swa.is_valid_token[tokens]
        whole, entry_lens = (seq_lens, gather_lens, starts), per_request[2]
        if chunk.is_slice:
            seq_lens, gather_lens, starts = per_request[0], per_request[1], own_starts
        window, entries = _page_table(step.caches.swa, swa.block_table[first : first + n]), None
        if layer.kind is not LayerKind.SWA and compressed is not None and step.caches.compressed is not None:
            entries = _page_table(step.caches.compressed, compressed.block_table[first : first + n])
        visible = None if compressed is None else compressed.compressed_lens[tokens]
        numbers = step.local_entries(chunk)
        indexer = layer.kind is LayerKind.C4A
        keys: Rows = DenseIndices(combined, lens)
        pack = None
        if self._ragged:
            flat, indptr = views.pop(0), views.pop(0)
            build = backend.steps.build_ragged_indices_from_dense
            pack = prepare_index_step(build, combined, lens, n * rows, out=(flat, indptr))
            keys = RaggedIndices(flat, indptr, keys.width)
        attend = self.attention(GatheredKeys(kv.view(n * rows, layer.head_dim), keys), views)

        def run(
            q: Tensor,
            out: Tensor,
            lse: Tensor | None,
            attn_sink: Tensor | None,
            topk_indices: Tensor | None,
            caches: LayerCaches,
        ) -> None:
            if chunk.is_slice:
                _cut(whole, (seq_lens, gather_lens, starts), chunk, layer.window)
            if entries is not None:
                torch.div(seq_lens, layer.compress_ratio, rounding_mode="floor", out=entry_lens)
            gather = backend.dequantize_and_gather_k_cache
            if entries is not None and caches.compressed is not None:
                gather(kv, caches.compressed, entry_lens, None, entries.block_table, 0)
            gather(kv, caches.swa, seq_lens, gather_lens, window.block_table, chunk.entries)
            chosen = topk_indices[tokens] if indexer and topk_indices is not None else numbers
            sizes = layer.window, chunk.topk, rows, chunk.entries
            lengths = visible, valid, starts, seq_lens, gather_lens
            combine, to = backend.steps.combine_topk_swa_indices, (combined, lens)
            combine(chosen, *lengths, *sizes, out=to, swa=window, compressed=entries)
            if pack is not None:
                pack(combined)
            if tokens.start:
                q, out, lse = q[tokens], out[tokens], None if lse is None else lse[tokens]
            attend(q, out, lse, attn_sink, ())

        return Part(self.name, run)


def _cut(
    whole: tuple[Tensor, Tensor, Tensor], own: tuple[Tensor, Tensor, Tensor], chunk: PrefillChunk, window: int
) -> None:
    """Lengths, window rows and query starts of a slice of one request, from those of the whole one.

    Computed on the device: the host may have upper bounds.
    """
    (seq_lens, gather_lens, starts), (to_lens, to_rows, to_starts) = whole, own
    torch.sub(seq_lens, chunk.tail, out=to_lens)
    # no earlier than the request's own first row
    torch.sub(gather_lens, chunk.tail, out=to_rows).clamp_(0, chunk.num_tokens + window - 1)
    to_starts.copy_(starts)
    to_starts[1:].copy_(to_starts[:1]).add_(chunk.num_tokens)


def _page_table(cache: PagedKVCache, table: Tensor) -> PageTable:
    return PageTable(table, cache.block_size, cache.num_blocks)

"""`GatheredCall`: a prefill chunk's keys are copied to contiguous rows, on which the backend's attention runs.

`fill_by_ops` is the definition of `Backend.prepare_rows`, and what runs for backends without it.
"""

from __future__ import annotations

from functools import partial

import torch
from attrs import evolve
from torch import Tensor

from dsv4attn.core.argument_checks import round_up
from dsv4attn.core.attention.call import INT, ForwardCall, PhaseCall, PreparedCall
from dsv4attn.core.cache.layout import PagedKVCache
from dsv4attn.core.cache.selected_keys import (
    ChunkRows,
    ChunkTokens,
    DenseIndices,
    GatheredKeys,
    PageTable,
    RaggedIndices,
)
from dsv4attn.core.contract.backend import AttentionTensors, Backend, FillRows, IndexForm, Phase
from dsv4attn.core.memory.chunking import PrefillChunk
from dsv4attn.core.memory.plan import ragged_specs
from dsv4attn.core.model.geometry import LayerKind
from dsv4attn.core.tensorspec import BufferSpec

__all__ = ["GatheredCall", "fill_by_ops"]


class GatheredCall(PhaseCall):
    """Attention of a prefill chunk over rows [requests * (entries + window rows), D] in the workspace."""

    def __init__(self, forward: ForwardCall, chunk: PrefillChunk) -> None:
        """Plan the views: rows, combined indices and lengths, three lengths of each request, starts of queries."""
        n, t, capabilities = chunk.num_requests, chunk.num_tokens, forward.backend.capabilities
        width = round_up(chunk.topk + forward.layer.window, capabilities.index_alignment)
        self._chunk, self._ragged = chunk, capabilities.prefill_indices is IndexForm.RAGGED
        specs: list[BufferSpec] = [
            ((n, chunk.entries + chunk.gather, forward.layer.head_dim), forward.caches.swa.layout.row_dtype),
            ((t, width), INT),
            ((t,), INT),
            ((3, n), INT),
            ((n + 1,), INT),
        ]
        specs += ragged_specs(t, width) if self._ragged else []
        super().__init__(forward, Phase.PREFILL, forward.prefill_tokens(chunk), specs, width)

    def prepare(self) -> PreparedCall:
        """Bind everything but the tensors that differ between layers."""
        forward, chunk, layer, tokens = self.forward, self._chunk, self.forward.layer, self.tokens
        metadata, compressed_metadata = forward.window_metadata, forward.compressed_metadata
        window, compressed = forward.caches.swa, forward.caches.compressed
        kv, combined, lens, lengths, starts, *views = self.views()
        n, rows = chunk.num_requests, chunk.entries + chunk.gather
        requests, first = slice(chunk.request_start, chunk.request_end), metadata.num_decodes + chunk.request_start
        compressed_pages = None
        if layer.kind is not LayerKind.SWA and compressed_metadata is not None and compressed is not None:
            compressed_pages = _page_table(compressed, compressed_metadata.block_table[first : first + n])
        dense = DenseIndices(combined, lens)
        ragged = RaggedIndices(views.pop(0), views.pop(0), dense.width) if self._ragged else None
        chunk_tokens = ChunkTokens(
            seq_lens=metadata.prefill_seq_lens[requests],
            gather_lens=metadata.prefill_gather_lens[requests],
            query_start_loc=metadata.query_start_loc[first : first + n + 1],
            visible_lens=None if compressed_metadata is None else compressed_metadata.compressed_lens[tokens],
            is_valid=metadata.is_valid_token[tokens],
            window=layer.window,
            topk=chunk.topk,
            rows=rows,
            offset=chunk.entries,
        )
        gathered = ChunkRows(
            tokens=chunk_tokens,
            kv=kv,
            combined=dense,
            ragged=ragged,
            tail=chunk.tail if chunk.is_slice else None,
            swa=_page_table(window, metadata.block_table[first : first + n]),
            compressed=compressed_pages,
            ratio=layer.compress_ratio,
            lengths=lengths,
            starts=starts,
        )
        # entries of the indexer are read anew in every run
        has_indexer, chunk_topk_indices = layer.kind is LayerKind.CSA, forward.chunk_topk_indices(chunk)
        prepare_rows = forward.backend.prepare_rows or partial(fill_by_ops, forward.backend)
        fill = prepare_rows(gathered, chunk_topk_indices, window, compressed)
        attend = self.prepare_attention(GatheredKeys(kv.view(n * rows, layer.head_dim), ragged or dense), views)

        def run(tensors: AttentionTensors) -> None:
            topk_indices = chunk_topk_indices
            if has_indexer and tensors.topk_indices is not None:
                topk_indices = tensors.topk_indices[tokens]
            fill(topk_indices, tensors.window, tensors.compressed)
            attend(tensors.of_tokens(tokens) if tokens.start else tensors)

        return PreparedCall(self.name, tokens, run)


def fill_by_ops(
    backend: Backend,
    chunk: ChunkRows,
    topk_indices: Tensor | None,
    window: PagedKVCache,
    compressed: PagedKVCache | None,
) -> FillRows:
    """Fill a chunk's rows and lists by the backend's gather and index ops, one after the other.

    Arguments as those of `Backend.prepare_rows`.
    """
    request_tokens = tokens = chunk.tokens
    slice_seq_lens, slice_gather_lens, entry_lens = chunk.lengths
    if chunk.tail is not None:
        tokens = evolve(tokens, seq_lens=slice_seq_lens, gather_lens=slice_gather_lens, query_start_loc=chunk.starts)
    gather, index_ops = backend.dequantize_and_gather_k_cache, backend.index_ops
    combined, ragged, pack = chunk.combined, chunk.ragged, None
    if ragged is not None:
        out, num_rows = (ragged.indices, ragged.indptr), chunk.kv.shape[0] * tokens.rows
        build = index_ops.build_ragged_indices_from_dense
        pack = build.prepare(combined.indices, combined.lens, num_rows, out=out)
    combine = index_ops.combine_topk_swa_indices.prepare(
        topk_indices, tokens, out=(combined.indices, combined.lens), swa=chunk.swa, compressed=chunk.compressed
    )

    def fill(topk_indices: Tensor | None, window: PagedKVCache, compressed: PagedKVCache | None) -> None:
        if chunk.tail is not None:
            _cut(request_tokens, tokens, chunk.tail, combined.lens.shape[0])
        if chunk.compressed is not None and compressed is not None:
            torch.div(tokens.seq_lens, chunk.ratio, rounding_mode="floor", out=entry_lens)
            gather(chunk.kv, compressed, entry_lens, None, chunk.compressed.block_table, 0)
        gather(chunk.kv, window, tokens.seq_lens, tokens.gather_lens, chunk.swa.block_table, tokens.offset)
        combine(topk_indices)
        if pack is not None:
            pack(combined.indices)

    return fill


def _cut(request: ChunkTokens, part: ChunkTokens, tail: int, num_tokens: int) -> None:
    """Write lengths, window rows and query starts of a slice of one request, from those of the whole request.

    Computed on the device: the host may have upper bounds.
    """
    torch.sub(request.seq_lens, tail, out=part.seq_lens)
    # no earlier than the request's own first row
    torch.sub(request.gather_lens, tail, out=part.gather_lens).clamp_(0, num_tokens + request.window - 1)
    part.query_start_loc.copy_(request.query_start_loc)
    part.query_start_loc[1:].copy_(part.query_start_loc[:1]).add_(num_tokens)


def _page_table(cache: PagedKVCache, table: Tensor) -> PageTable:
    return PageTable(table, cache.block_size, cache.num_blocks)

"""`GatheredCall`: a prefill chunk's keys are copied to contiguous rows, on which the backend's attention runs.

`fill_by_steps` is the definition of `BackendDefaults.prepare_rows`, and what runs for backends without it.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from dsv4attn.core.attention.call import INT, BackendCall, Step
from dsv4attn.core.attention.prepared import Part
from dsv4attn.core.cache.layer_caches import LayerCaches
from dsv4attn.core.cache.layout import PagedKVCache
from dsv4attn.core.cache.selected_keys import ChunkRows, DenseIndices, GatheredKeys, PageTable, RaggedIndices
from dsv4attn.core.contract.backend import Backend, FillRows, IndexForm, Phase
from dsv4attn.core.contract.index_ops import prepare_index_step
from dsv4attn.core.memory.chunking import PrefillChunk, round_up
from dsv4attn.core.memory.plan import ragged_specs
from dsv4attn.core.model.geometry import LayerKind
from dsv4attn.core.tensorspec import BufferSpec

__all__ = ["GatheredCall", "fill_by_steps"]


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
        kv, combined, lens, lengths, own_starts, *views = self.views()
        n, rows = chunk.num_requests, chunk.entries + chunk.gather
        requests, first = slice(chunk.request_start, chunk.request_end), swa.num_decodes + chunk.request_start
        entries = None
        if layer.kind is not LayerKind.SWA and compressed is not None and step.caches.compressed is not None:
            entries = _page_table(step.caches.compressed, compressed.block_table[first : first + n])
        dense = DenseIndices(combined, lens)
        ragged = RaggedIndices(views.pop(0), views.pop(0), dense.width) if self._ragged else None
        gathered = ChunkRows(
            kv=kv,
            combined=dense,
            ragged=ragged,
            seq_lens=swa.prefill_seq_lens[requests],
            gather_lens=swa.prefill_gather_lens[requests],
            query_start_loc=swa.query_start_loc[first : first + n + 1],
            tail=chunk.tail if chunk.is_slice else None,
            visible_lens=None if compressed is None else compressed.compressed_lens[tokens],
            is_valid=swa.is_valid_token[tokens],
            swa=_page_table(step.caches.swa, swa.block_table[first : first + n]),
            compressed=entries,
            window=layer.window,
            ratio=layer.compress_ratio,
            topk=chunk.topk,
            offset=chunk.entries,
            lengths=lengths,
            starts=own_starts,
        )
        numbers, indexer = step.local_entries(chunk), layer.kind is LayerKind.C4A
        prepare = backend.prepare_rows or partial(fill_by_steps, backend)
        fill = prepare(gathered, numbers, step.caches)
        attend = self.attention(GatheredKeys(kv.view(n * rows, layer.head_dim), ragged or dense), views)

        def run(
            q: Tensor,
            out: Tensor,
            lse: Tensor | None,
            attn_sink: Tensor | None,
            topk_indices: Tensor | None,
            caches: LayerCaches,
        ) -> None:
            fill(topk_indices[tokens] if indexer and topk_indices is not None else numbers, caches)
            if tokens.start:
                q, out, lse = q[tokens], out[tokens], None if lse is None else lse[tokens]
            attend(q, out, lse, attn_sink, ())

        return Part(self.name, self.tokens, run)


def fill_by_steps(backend: Backend, chunk: ChunkRows, topk_indices: Tensor | None, caches: LayerCaches) -> FillRows:
    """Fill a chunk's rows and lists by the backend's gather and index steps, one after the other.

    Arguments as those of `BackendDefaults.prepare_rows`.
    """
    seq_lens, gather_lens, starts = whole = chunk.seq_lens, chunk.gather_lens, chunk.query_start_loc
    own_seq_lens, own_gather_lens, entry_lens = chunk.lengths
    if chunk.tail is not None:
        seq_lens, gather_lens, starts = own_seq_lens, own_gather_lens, chunk.starts
    combined, swa, compressed, ragged = chunk.combined, chunk.swa, chunk.compressed, chunk.ragged
    n, rows, _ = chunk.kv.shape
    pack = None
    if ragged is not None:
        out = ragged.indices, ragged.indptr
        build = backend.steps.build_ragged_indices_from_dense
        pack = prepare_index_step(build, combined.indices, combined.lens, n * rows, out=out)
    lengths = chunk.visible_lens, chunk.is_valid, starts, seq_lens, gather_lens
    sizes = chunk.window, chunk.topk, rows, chunk.offset

    def fill(topk_indices: Tensor | None, caches: LayerCaches) -> None:
        if chunk.tail is not None:
            most = combined.lens.shape[0] + chunk.window - 1
            _cut(whole, (seq_lens, gather_lens, starts), chunk.tail, combined.lens.shape[0], most)
        gather = backend.dequantize_and_gather_k_cache
        if compressed is not None and caches.compressed is not None:
            torch.div(seq_lens, chunk.ratio, rounding_mode="floor", out=entry_lens)
            gather(chunk.kv, caches.compressed, entry_lens, None, compressed.block_table, 0)
        gather(chunk.kv, caches.swa, seq_lens, gather_lens, swa.block_table, chunk.offset)
        combine, to = backend.steps.combine_topk_swa_indices, (combined.indices, combined.lens)
        combine(topk_indices, *lengths, *sizes, out=to, swa=swa, compressed=compressed)
        if pack is not None:
            pack(combined.indices)

    return fill


def _cut(
    whole: tuple[Tensor, Tensor, Tensor], own: tuple[Tensor, Tensor, Tensor], tail: int, tokens: int, most: int
) -> None:
    """Lengths, window rows and query starts of a slice of one request, from those of the whole one.

    Computed on the device: the host may have upper bounds.
    """
    (seq_lens, gather_lens, starts), (to_lens, to_rows, to_starts) = whole, own
    torch.sub(seq_lens, tail, out=to_lens)
    # no earlier than the request's own first row
    torch.sub(gather_lens, tail, out=to_rows).clamp_(0, most)
    to_starts.copy_(starts)
    to_starts[1:].copy_(to_starts[:1]).add_(tokens)


def _page_table(cache: PagedKVCache, table: Tensor) -> PageTable:
    return PageTable(table, cache.block_size, cache.num_blocks)

"""`PagedCall`: the backend's attention runs on pages, with selected entries as slots of the compressed cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from attrs import evolve
from torch import Tensor

from dsv4attn.core.attention.call import INT, ForwardCall, IndexRows, PhaseCall, PreparedCall
from dsv4attn.core.cache.layout import PagedKVCache
from dsv4attn.core.cache.selected_keys import (
    DenseIndices,
    EntryIndices,
    PagedKeys,
    PageTable,
    RaggedIndices,
    RequestRows,
)
from dsv4attn.core.contract.backend import AttentionTensors, IndexForm, Phase, Run
from dsv4attn.core.contract.index_ops import IndexOp
from dsv4attn.core.memory.chunking import PrefillChunk
from dsv4attn.core.memory.plan import ragged_specs
from dsv4attn.core.model.geometry import LayerKind
from dsv4attn.core.tensorspec import BufferSpec
from dsv4attn.core.torch_ops.request_rows import check_request_rows

__all__ = ["PagedCall"]


class PagedCall(PhaseCall):
    """Attention over pages.

    window: slots of each token's window.
    compressed: numbers of each token's compressed entries [T, K], which are translated to slots, or the slots; None on
       window-only layers.
    """

    def __init__(
        self,
        forward: ForwardCall,
        phase: Phase,
        tokens: slice,
        window: IndexRows,
        compressed: Tensor | IndexRows | None,
    ) -> None:
        """Plan the views that the rows need, in the form the backend takes."""
        capabilities = forward.backend.capabilities
        decode = phase is Phase.DECODE
        form = capabilities.decode_indices if decode else capabilities.prefill_indices
        self._ragged = form is IndexForm.RAGGED
        self._rows: list[Tensor | IndexRows] = [window] if compressed is None else [window, compressed]
        self._prepare_translation: Callable[[], Callable[[Tensor], None]] | None = None
        self._index_fills: list[Callable[[], None]] = []
        n, specs = tokens.stop - tokens.start, list[BufferSpec]()
        for rows in self._rows:
            if self._needs_slots(rows, forward):
                specs += [((n, _width(rows)), INT), ((n,), INT)]
            if self._needs_list(rows):
                specs += ragged_specs(n, _width(rows))
        super().__init__(forward, phase, tokens, specs, sum(map(_width, self._rows)))

    @classmethod
    def of_decode(cls, forward: ForwardCall) -> PagedCall:
        """All decode tokens of a call."""
        metadata, compressed_metadata = forward.window_metadata, forward.compressed_metadata
        n, ragged = metadata.num_decode_tokens, forward.backend.capabilities.decode_indices is IndexForm.RAGGED
        window: IndexRows = DenseIndices(metadata.decode_swa_indices.select(1, 0), metadata.decode_swa_lens)
        if ragged:
            window = metadata.decode_swa_ragged or window
        compressed: Tensor | IndexRows | None = None
        if forward.layer.kind is LayerKind.CSA and forward.topk_indices is not None:
            compressed = forward.topk_indices[:n]
        elif forward.layer.kind is LayerKind.HCA and compressed_metadata is not None:
            slots = compressed_metadata.c128a_global_decode_topk_indices
            lens = compressed_metadata.c128a_decode_topk_lens
            if slots is not None and lens is not None:
                dense = DenseIndices(slots.select(1, 0), lens)
                compressed = (ragged and compressed_metadata.c128a_decode_ragged) or dense
        call = cls(forward, Phase.DECODE, slice(0, n), window, compressed)
        call.request_rows = _request_rows(forward)
        return call

    @classmethod
    def of_chunk(cls, forward: ForwardCall, chunk: PrefillChunk) -> PagedCall:
        """The tokens of a prefill chunk."""
        metadata, rows = forward.window_metadata, slice(chunk.token_start, chunk.token_end)
        window = DenseIndices(metadata.prefill_swa_indices[rows, 0], metadata.prefill_swa_lens[rows])
        tokens, compressed = forward.prefill_tokens(chunk), forward.chunk_topk_indices(chunk)
        call = cls(forward, forward.prefill_phase, tokens, window, compressed)
        if metadata.prefill_requests is not None and window.width <= forward.layer.window:
            longest = max(count for _, count in forward.requests_of(chunk))
            call.request_rows = evolve(
                metadata.prefill_requests,
                token_to_req=metadata.prefill_requests.token_to_req[rows],
                max_tokens=longest,
                num_requests=chunk.num_requests,
            )
            if forward.workspace.debug:
                check_request_rows(call.request_rows, window)
        return call

    def prepare(self) -> PreparedCall:
        """Bind everything but the tensors that differ between layers."""
        views, tokens = self.views(), self.tokens
        pairs = zip(self.forward.segments, self._rows, strict=True)
        # `_formed` takes the views of index rows off the front. What is left then is the scratch of the backend
        keys = [PagedKeys(cache, self._formed(rows, cache, views)) for cache, rows in pairs]
        direct = self._prepare_entries(keys, views)
        if direct is not None:
            return PreparedCall(self.name, tokens, direct)
        attend, index_fills = self.prepare_attention(keys, views), self._index_fills
        translate = None if self._prepare_translation is None else self._prepare_translation()
        if translate is None and not index_fills and not tokens.start:
            return PreparedCall(self.name, tokens, attend)
        start = tokens.start

        def run(tensors: AttentionTensors) -> None:
            if translate is not None and tensors.topk_indices is not None:
                translate(tensors.topk_indices[start:] if start else tensors.topk_indices)
            for fill_indices in index_fills:
                fill_indices()
            attend(tensors.of_tokens(tokens) if start else tensors)

        return PreparedCall(self.name, tokens, run)

    def _prepare_entries(self, keys: Sequence[PagedKeys], scratch: Sequence[Tensor]) -> Run | None:
        """The backend's attention where it reads the indexer's entries itself."""
        topk_indices = self._rows[-1]
        if not isinstance(topk_indices, Tensor) or self.forward.layer.kind is not LayerKind.CSA:
            return None
        if self._ragged or self.phase is not Phase.DECODE or self.tokens.start:
            return None
        entries = self._entries(topk_indices, keys[-1].cache)
        return self.forward.backend.prepare_entries(self.attention_call(keys, scratch), entries)

    def _entries(self, topk_indices: Tensor, cache: PagedKVCache) -> EntryIndices:
        """Entry numbers of the call's tokens, with what turns them into slots."""
        metadata, tokens = self.forward.compressed_metadata, self.tokens
        assert metadata is not None
        pages = PageTable(metadata.block_table, metadata.records_per_block, cache.num_blocks)
        return EntryIndices(topk_indices, metadata.compressed_lens[tokens], metadata.req_id_per_token[tokens], pages)

    def _needs_slots(self, rows: Tensor | IndexRows, forward: ForwardCall) -> bool:
        """Whether entry numbers are translated to dense slots in the workspace."""
        return isinstance(rows, Tensor) and not (self._ragged and _ragged_translation(forward))

    def _needs_list(self, rows: Tensor | IndexRows) -> bool:
        """Whether a ragged list is built in the workspace."""
        return self._ragged and not isinstance(rows, RaggedIndices)

    def _formed(self, rows: Tensor | IndexRows, cache: PagedKVCache, views: list[Tensor]) -> IndexRows:
        """Slots in the form the backend takes, and the ops that write them."""
        if isinstance(rows, Tensor):
            if not self._needs_slots(rows, self.forward):
                ragged_rows = RaggedIndices(views.pop(0), views.pop(0), _width(rows))
                self._plan_translation(self._entries(rows, cache), (ragged_rows.indices, ragged_rows.indptr))
                return ragged_rows
            slots = DenseIndices(views.pop(0), views.pop(0))
            self._plan_translation(self._entries(rows, cache), (slots.indices, slots.lens))
            rows = slots
        if not self._needs_list(rows):
            return rows
        assert isinstance(rows, DenseIndices)
        ragged_rows = RaggedIndices(views.pop(0), views.pop(0), rows.width)
        build = self.forward.backend.index_ops.build_ragged_indices_from_dense
        out = ragged_rows.indices, ragged_rows.indptr
        pack = build.prepare(rows.indices, rows.lens, cache.capacity, out=out)
        self._index_fills.append(partial(pack, rows.indices))
        return ragged_rows

    def _plan_translation(self, entries: EntryIndices, out: tuple[Tensor, Tensor]) -> None:
        """Plan the op that translates entries to slots; to ragged slots, where the backend has an op for them.

        The indexer's entries are an argument of each run, as their tensor may move; those of the metadata are bound.
        """
        pages, topk_indices = entries.pages, entries.indices
        is_dense = self._needs_slots(topk_indices, self.forward)
        to_slots = self.forward.backend.index_ops.compute_global_topk_indices_and_lens
        translate = to_slots if is_dense else _ragged_translation(self.forward)
        assert translate is not None
        prepare = partial(
            translate.prepare,
            topk_indices,
            entries.visible_lens,
            entries.token_to_req,
            pages.block_table,
            pages.block_size,
            out=out,
        )
        if self.forward.layer.kind is LayerKind.CSA:
            # prepared later, as a backend that reads entries itself needs no translation
            self._prepare_translation = prepare
        else:
            self._index_fills.append(partial(prepare(), topk_indices))


def _request_rows(forward: ForwardCall) -> RequestRows | None:
    """What a decode's rows share, if the metadata of every segment say so. In debug mode it is checked.

    Rows with more columns than the window promise nothing: tokens of a draft block, or of an image, see each other.
    """
    metadata, compressed = forward.window_metadata, forward.compressed_metadata
    request_rows, is_hca = metadata.decode_requests, forward.layer.kind is LayerKind.HCA
    if request_rows is None or (is_hca and (compressed is None or compressed.decode_requests is None)):
        return None
    if metadata.decode_swa_indices.shape[2] > forward.layer.window:
        return None
    if forward.workspace.debug:
        window = DenseIndices(metadata.decode_swa_indices.select(1, 0), metadata.decode_swa_lens)
        slots = compressed.c128a_global_decode_topk_indices if is_hca and compressed else None
        lens = compressed.c128a_decode_topk_lens if is_hca and compressed else None
        entries = None if slots is None or lens is None else DenseIndices(slots.select(1, 0), lens)
        check_request_rows(request_rows, window, entries)
    return request_rows


def _ragged_translation(forward: ForwardCall) -> IndexOp | None:
    return forward.backend.index_ops.compute_global_topk_ragged_indices_and_indptr


def _width(rows: Tensor | IndexRows) -> int:
    """Most keys of a row."""
    return rows.shape[1] if isinstance(rows, Tensor) else rows.width

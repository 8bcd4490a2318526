"""The phases of `forward_mqa`: what core prepares before a backend is called."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from attrs import define, field
from torch import Tensor

from dsv4attn.core.caches import LayerCaches
from dsv4attn.core.chunking import PrefillChunk, plan_prefill_chunks, round_up
from dsv4attn.core.contract import AttentionCall, Backend, IndexForm, KeyForm, Phase
from dsv4attn.core.geometry import LayerGeometry, LayerKind
from dsv4attn.core.keys import DenseIndices, GatheredKeys, PagedKeys, PageTable, RaggedIndices
from dsv4attn.core.layout import PagedKVCache
from dsv4attn.core.limits import Limits
from dsv4attn.core.metadata import AttentionMetadata
from dsv4attn.core.prepared import Known, PagedCall, Room, Rows, Work
from dsv4attn.core.tensorspec import tell
from dsv4attn.core.workspace import BufferSpec, WorkspaceManager
from dsv4attn.core.workspace_plan import prefill_bounds, ragged_specs

__all__ = ["Step"]

_INT = torch.int32
_DECODE = Phase.DECODE.value


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
    chunks: Sequence[PrefillChunk] = field(init=False, default=())
    """The prefill part, cut so that no chunk needs more memory than planned."""
    known: PagedCall | None = field(init=False, default=None)
    """The decode part, if it was known before."""

    def is_known(self) -> bool:
        """Whether all but addresses is as in a step that was checked. Then its decode call serves this one too."""
        known: Known | None = self.workspace.recall((id(self.backend), id(self.layer)), _DECODE)
        if known is None or not known.serves(
            self.metadata, self.topk_indices, self.limits, self.caches, self._tensors()
        ):
            return False
        self.known = known.call
        return True

    def _tensors(self) -> Sequence[Tensor | None]:
        return self.q, self.out, self.attn_sink, self.lse, self.topk_indices

    def _cut(self) -> Sequence[PrefillChunk]:
        """The prefill part in chunks."""
        swa = self.metadata.swa
        if not swa.num_prefill_tokens:
            return ()
        bounds = prefill_bounds(self.layer, self.limits, self.backend, self.caches.swa.layout)
        lens = swa.prefill_seq_lens_cpu.tolist(), swa.prefill_query_lens_cpu.tolist()
        return tuple(plan_prefill_chunks(*lens, self.layer, bounds))

    def require(self) -> None:
        """Cut the prefill part, and ask for the memory of every call to come.

        So a workspace too small refuses before the first write.
        """
        forms, n = self.backend.forms, self.metadata.swa.num_decode_tokens
        self.chunks = self._cut()
        if len(self.chunks) + bool(n) == 1:
            return  # a single call asks before it writes anyway
        for chunk in self.chunks:
            if forms.prefill_keys is KeyForm.GATHERED:
                specs, tokens, width = self._gathered_specs(chunk)
            else:
                tokens, window = chunk.num_tokens, self._prefill_window(chunk)
                specs, width = self._paged_specs(tokens, window, self._local(chunk), forms.prefill_indices)
            self._require(Phase.PREFILL, specs, tokens, width)
        if n:
            specs, width = self._paged_specs(n, self._decode_window(), self._decode_entries(n), forms.decode_indices)
            self._require(Phase.DECODE, specs, n, width)

    def decode(self) -> None:
        """All decode tokens in one call, straight on pages."""
        swa, compressed, form = self.metadata.swa, self.metadata.compressed, self.backend.forms.decode_indices
        n = swa.num_decode_tokens
        if not n:
            return
        call = self.known
        if call is None:
            call = self._paged(Phase.DECODE, slice(0, n), self._decode_window(), self._decode_entries(n), form)
            seen = self.caches.told, tell(*self._tensors())
            topk = None if self.topk_indices is None else self.topk_indices.detach()
            known = Known(swa, compressed, topk, self.limits, *seen, call)
            self.workspace.keep((id(self.backend), id(self.layer)), _DECODE, known)
        self._run(Phase.DECODE, call)

    def prefill(self) -> None:
        """Prefill tokens, chunk by chunk."""
        swa, forms = self.metadata.swa, self.backend.forms
        for chunk in self.chunks:
            if forms.prefill_keys is KeyForm.GATHERED:
                self._gathered(chunk)
            else:
                first, window = swa.num_decode_tokens, self._prefill_window(chunk)
                tokens = slice(first + chunk.token_start, first + chunk.token_end)
                call = self._paged(Phase.PREFILL, tokens, window, self._local(chunk), forms.prefill_indices)
                self._run(Phase.PREFILL, call)

    def _prefill_window(self, chunk: PrefillChunk) -> Rows:
        swa, rows = self.metadata.swa, slice(chunk.token_start, chunk.token_end)
        return DenseIndices(swa.prefill_swa_indices[rows, 0], swa.prefill_swa_lens[rows])

    def _decode_window(self) -> Rows:
        """Windows of decode tokens, in the form the backend takes if its metadata has it."""
        swa = self.metadata.swa
        ragged = swa.decode_swa_ragged if self.backend.forms.decode_indices is IndexForm.RAGGED else None
        return ragged or DenseIndices(swa.decode_swa_indices.select(1, 0), swa.decode_swa_lens)

    def _decode_entries(self, n: int) -> Tensor | Rows | None:
        """Compressed entries of decode tokens: numbers to be translated, or slots where metadata holds them already."""
        kind, compressed = self.layer.kind, self.metadata.compressed
        if kind is LayerKind.SWA or compressed is None:
            return None
        if kind is LayerKind.C4A:
            return None if self.topk_indices is None else self.topk_indices[:n]
        if self.backend.forms.decode_indices is IndexForm.RAGGED and compressed.c128a_decode_ragged is not None:
            return compressed.c128a_decode_ragged
        slots, lens = compressed.c128a_global_decode_topk_indices, compressed.c128a_decode_topk_lens
        return None if slots is None or lens is None else DenseIndices(slots.select(1, 0), lens)

    def _paged_specs(
        self, n: int, window: Rows, entries: Tensor | Rows | None, form: IndexForm
    ) -> tuple[list[BufferSpec], int]:
        """Views of a call on pages (translated slots, and what is not in the form asked for), and its index columns."""
        specs: list[BufferSpec] = []
        rows = [window] if entries is None else [window, entries]
        for each in rows:
            translated, listed = self._wanted(each, form)
            if translated:
                specs += [((n, _width_of(each)), _INT), ((n,), _INT)]
            if listed:
                specs += ragged_specs(n, _width_of(each))
        return specs, sum(map(_width_of, rows))

    def _wanted(self, rows: Tensor | Rows, form: IndexForm) -> tuple[bool, bool]:
        """Whether rows become slots, and whether a ragged list, in memory of the workspace."""
        translated = isinstance(rows, Tensor) and (form is IndexForm.DENSE or self._ragged_slots() is None)
        return translated, form is IndexForm.RAGGED and not isinstance(rows, RaggedIndices)

    def _ragged_slots(self) -> Callable[..., None] | None:
        """The step that translates to ragged rows in one go; not every backend brings it."""
        return getattr(self.backend.steps, "compute_global_topk_ragged_indices_and_indptr", None)

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
        window: Rows,
        entries: Tensor | Rows | None,
        form: IndexForm,
    ) -> PagedCall:
        """Attention over pages: the window and, as slots of the compressed cache, the selected entries."""
        segments, given = self.caches.segments(self.layer), (window, entries)
        room = self._room(phase, tokens.stop - tokens.start, window, entries, form)
        work: list[Work] = []
        rows = []
        for i, (cache, each) in enumerate(zip(segments, given, strict=False)):
            assert each is not None
            rows.append(self._formed(each, cache, tokens, room, i, work))
        return PagedCall(tokens, tuple(rows), work, room, {})

    def _run(self, phase: Phase, call: PagedCall) -> None:
        """Write what is to be written, and attend."""
        for i, work in enumerate(call.work):
            again = work()
            if again is not None:
                call.work[i] = again
        keys = tuple(map(PagedKeys, self.caches.segments(self.layer), call.rows))
        self._attend(phase, call.tokens, keys, call.room.scratch, call.found)

    def _room(self, phase: Phase, n: int, window: Rows, entries: Tensor | Rows | None, form: IndexForm) -> Room:
        """Memory of a call, which is the same in every layer of a kind.

        Its key, in the lane of its phase: who asks, for a backend's scratch is its own and follows from the layer too,
        and all else that the views follow from: the rows, and of each segment its width and the form in which it comes.
        The form asked for is the backend's.
        """
        of = entries.shape[1] if isinstance(entries, Tensor) else entries and (type(entries), entries.width)
        key = id(self.backend), id(self.layer), n, type(window), window.width, of
        lane = phase.value
        room: Room | None = self.workspace.recall(key, lane)
        if room is None:
            specs, width = self._paged_specs(n, window, entries, form)
            views = self._views(phase, specs, n, width)
            slots: list[DenseIndices | None] = []
            ragged: list[RaggedIndices | None] = []
            for each in (window,) if entries is None else (window, entries):
                translated, listed = self._wanted(each, form)
                slots.append(DenseIndices(views.pop(0), views.pop(0)) if translated else None)
                ragged.append(RaggedIndices(views.pop(0), views.pop(0), _width_of(each)) if listed else None)
            room = Room(tuple(slots), tuple(ragged), tuple(views), (self.backend, self.layer))
            self.workspace.keep(key, lane, room)
        return room

    def _formed(
        self,
        rows: Tensor | Rows,
        cache: PagedKVCache,
        tokens: slice,
        room: Room,
        i: int,
        work: list[Work],
    ) -> Rows:
        """Entry numbers, or slots in any form, as slots in the form asked for.

        What is new stands in the workspace; `work` gets the steps that write it.
        """
        slots, ragged, steps = room.slots[i], room.ragged[i], self.backend.steps
        if isinstance(rows, Tensor):
            told = self._to_translate(rows, tokens)
            if slots is None:
                translate = self._ragged_slots()
                assert ragged is not None
                assert translate is not None
                work.append(partial(translate, *told, out=(ragged.indices, ragged.indptr)))
                return ragged
            out = slots.indices, slots.lens
            work.append(partial(steps.compute_global_topk_indices_and_lens, *told, out=out))
            rows = slots
        if ragged is None:
            return rows
        assert isinstance(rows, DenseIndices)
        out = ragged.indices, ragged.indptr
        work.append(partial(steps.build_ragged_indices_from_dense, rows.indices, rows.lens, cache.capacity, out=out))
        return ragged

    def _to_translate(self, entries: Tensor, tokens: slice) -> tuple[Tensor, Tensor, Tensor, Tensor, int]:
        """Arguments of a translation of the entries of some tokens."""
        compressed = self.metadata.compressed
        assert compressed is not None
        visible, request = compressed.compressed_lens, compressed.req_id_per_token
        if tokens.stop - tokens.start < compressed.num_actual_tokens:
            visible, request = visible[tokens], request[tokens]
        return entries, visible, request, compressed.block_table, compressed.records_per_block

    def _gathered(self, chunk: PrefillChunk) -> None:
        """Make a chunk's keys contiguous, then attend over rows."""
        swa, compressed, layer = self.metadata.swa, self.metadata.compressed, self.layer
        n, rows, forms = chunk.num_requests, chunk.entries + chunk.gather, self.backend.forms
        specs, t, width = self._gathered_specs(chunk)
        if not t:
            return
        kv, combined, lens, per_request, starts, *views = self._views(Phase.PREFILL, specs, t, width)
        requests, first = slice(chunk.request_start, chunk.request_end), swa.num_decodes + chunk.request_start
        seq_lens, gather_lens, entry_lens = per_request.unbind(0)
        torch.sub(swa.prefill_seq_lens[requests], chunk.tail, out=seq_lens)
        gather_lens.copy_(swa.prefill_gather_lens[requests])
        starts.copy_(swa.query_start_loc[first : first + n + 1])
        if chunk.is_slice:
            # from the lengths on the device: those on the host may be upper bounds
            torch.clamp(seq_lens, max=t + layer.window - 1, out=gather_lens)
            starts[1:].copy_(starts[:1]).add_(t)
        window, entries = _page_table(self.caches.swa, swa.block_table[first : first + n]), None
        if layer.kind is not LayerKind.SWA and compressed is not None and self.caches.compressed is not None:
            torch.div(seq_lens, layer.compress_ratio, rounding_mode="floor", out=entry_lens)
            entries = _page_table(self.caches.compressed, compressed.block_table[first : first + n])
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
        ragged = forms.prefill_indices is IndexForm.RAGGED
        keys = GatheredKeys(
            kv.view(n * rows, layer.head_dim), self._ragged(dense, n * rows, views) if ragged else dense
        )
        self._attend(Phase.PREFILL, tokens, keys, views)

    def _views(self, phase: Phase, specs: list[BufferSpec], tokens: int, width: int) -> list[Tensor]:
        scratch, lane = self.backend.scratch(phase, self.layer, tokens, width), phase.value
        return self.workspace.get_simultaneous(*specs, *scratch, lane=lane, caller=f"{self.backend.name}.{lane}")

    def _require(self, phase: Phase, specs: list[BufferSpec], tokens: int, width: int) -> None:
        scratch, lane = self.backend.scratch(phase, self.layer, tokens, width), phase.value
        self.workspace.require(*specs, *scratch, lane=lane, caller=f"{self.backend.name}.{lane}")

    def _ragged(self, dense: DenseIndices, num_slots: int, views: list[Tensor]) -> RaggedIndices:
        ragged = RaggedIndices(views.pop(0), views.pop(0), dense.indices.shape[1])
        self.backend.steps.build_ragged_indices_from_dense(
            dense.indices, dense.lens, num_slots, out=(ragged.indices, ragged.indptr)
        )
        return ragged

    def _attend(
        self,
        phase: Phase,
        tokens: slice,
        keys: Sequence[PagedKeys] | GatheredKeys,
        scratch: Sequence[Tensor],
        kept: dict[object, Any] | None = None,
    ) -> None:
        q, out, lse = self.q, self.out, self.lse
        if tokens.stop - tokens.start < q.shape[0]:  # a slice of all rows would be waste
            q, out, lse = q[tokens], out[tokens], None if lse is None else lse[tokens]
        call = AttentionCall(self.layer, q, keys, self.attn_sink, out, lse, scratch, kept=kept)
        (self.backend.decode if phase is Phase.DECODE else self.backend.prefill)(call)


def _width_of(rows: Tensor | Rows) -> int:
    """Most entries of a row."""
    return rows.shape[1] if isinstance(rows, Tensor) else rows.width


def _page_table(cache: PagedKVCache, table: Tensor) -> PageTable:
    return PageTable(table, cache.block_size, cache.num_blocks)

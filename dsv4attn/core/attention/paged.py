"""`PagedCall`: the backend's attention runs on pages, with selected entries as slots of the compressed cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from dsv4attn.core.attention.call import INT, BackendCall, Rows, Step
from dsv4attn.core.attention.prepared import Part
from dsv4attn.core.cache.layer_caches import LayerCaches
from dsv4attn.core.cache.layout import PagedKVCache
from dsv4attn.core.cache.selected_keys import DenseIndices, EntryIndices, PagedKeys, PageTable, RaggedIndices
from dsv4attn.core.contract.backend import IndexForm, Phase, RunEntries
from dsv4attn.core.contract.index_ops import prepare_index_step
from dsv4attn.core.memory.chunking import PrefillChunk
from dsv4attn.core.memory.plan import ragged_specs
from dsv4attn.core.model.geometry import LayerKind
from dsv4attn.core.tensorspec import BufferSpec

__all__ = ["PagedCall"]


class PagedCall(BackendCall):
    """Attention over pages.

    window: slots of each token's window. entries: numbers of each token's compressed entries [T, K], which are
    translated to slots, or the slots; None on window-only layers.
    """

    def __init__(self, step: Step, phase: Phase, tokens: slice, window: Rows, entries: Tensor | Rows | None) -> None:
        """Plan the views that the rows need, in the form the backend takes."""
        forms = step.backend.forms
        self._ragged = IndexForm.RAGGED is (forms.decode_indices if phase is Phase.DECODE else forms.prefill_indices)
        self._rows: list[Tensor | Rows] = [window] if entries is None else [window, entries]
        self._prepare_translate: Callable[[], Callable[[Tensor], None]] | None = None
        self._fixed: list[Callable[[], None]] = []
        n, specs = tokens.stop - tokens.start, list[BufferSpec]()
        for rows in self._rows:
            if self._needs_slots(rows, step):
                specs += [((n, _width(rows)), INT), ((n,), INT)]
            if self._needs_list(rows):
                specs += ragged_specs(n, _width(rows))
        super().__init__(step, phase, tokens, specs, sum(map(_width, self._rows)))

    @classmethod
    def of_decode(cls, step: Step) -> PagedCall:
        """All decode tokens of a step."""
        swa, compressed, kind = step.metadata.swa, step.metadata.compressed, step.layer.kind
        n, ragged = swa.num_decode_tokens, step.backend.forms.decode_indices is IndexForm.RAGGED
        window: Rows = DenseIndices(swa.decode_swa_indices.select(1, 0), swa.decode_swa_lens)
        if ragged:
            window = swa.decode_swa_ragged or window
        entries: Tensor | Rows | None = None
        if kind is LayerKind.C4A and step.topk_indices is not None:
            entries = step.topk_indices[:n]
        elif kind is LayerKind.C128A and compressed is not None:
            slots, lens = compressed.c128a_global_decode_topk_indices, compressed.c128a_decode_topk_lens
            if slots is not None and lens is not None:
                entries = (ragged and compressed.c128a_decode_ragged) or DenseIndices(slots.select(1, 0), lens)
        return cls(step, Phase.DECODE, slice(0, n), window, entries)

    @classmethod
    def of_chunk(cls, step: Step, chunk: PrefillChunk) -> PagedCall:
        """The tokens of a prefill chunk."""
        swa, rows = step.metadata.swa, slice(chunk.token_start, chunk.token_end)
        window = DenseIndices(swa.prefill_swa_indices[rows, 0], swa.prefill_swa_lens[rows])
        return cls(step, step.prefill_phase, step.prefill_tokens(chunk), window, step.local_entries(chunk))

    def prepare(self) -> Part:
        """Bind everything but the addresses that differ between layers."""
        views = self.views()
        pairs = zip(self.step.segments, self._rows, strict=True)
        keys = [PagedKeys(cache, self._formed(rows, cache, views)) for cache, rows in pairs]
        straight = self._prepare_entries(keys, views)
        if straight is not None:
            return Part(self.name, self.tokens, partial(_run_straight, straight))
        attend, first, stop = self.attention(keys, views), self.tokens.start, self.tokens.stop
        translate = self._prepare_translate() if self._prepare_translate is not None else None
        fixed, window_only = self._fixed, len(keys) == 1

        def run(
            q: Tensor,
            out: Tensor,
            lse: Tensor | None,
            attn_sink: Tensor | None,
            topk_indices: Tensor | None,
            caches: LayerCaches,
        ) -> None:
            if translate is not None and topk_indices is not None:
                translate(topk_indices[first:] if first else topk_indices)
            for step in fixed:
                step()
            if first:
                q, out, lse = q[first:stop], out[first:stop], None if lse is None else lse[first:stop]
            second = None if window_only else caches.compressed
            attend(q, out, lse, attn_sink, (caches.swa,) if second is None else (caches.swa, second))

        return Part(self.name, self.tokens, run)

    def _prepare_entries(self, keys: Sequence[PagedKeys], scratch: Sequence[Tensor]) -> RunEntries | None:
        """The backend's attention where it reads the indexer's entries itself."""
        entries = self._rows[-1]
        if not isinstance(entries, Tensor) or self.step.layer.kind is not LayerKind.C4A:
            return None
        if self._ragged or self.phase is not Phase.DECODE or self.tokens.start:
            return None
        return self.step.backend.prepare_entries(self.call(keys, scratch), self._entries(entries, keys[-1].cache))

    def _entries(self, entries: Tensor, cache: PagedKVCache) -> EntryIndices:
        """Entry numbers of the call's tokens, with what turns them into slots."""
        compressed, tokens = self.step.metadata.compressed, self.tokens
        assert compressed is not None
        pages = PageTable(compressed.block_table, compressed.records_per_block, cache.num_blocks)
        return EntryIndices(entries, compressed.compressed_lens[tokens], compressed.req_id_per_token[tokens], pages)

    def _needs_slots(self, rows: Tensor | Rows, step: Step) -> bool:
        """Whether entry numbers are translated to dense slots in the workspace."""
        return isinstance(rows, Tensor) and not (self._ragged and step.backend.translate_to_ragged)

    def _needs_list(self, rows: Tensor | Rows) -> bool:
        """Whether a ragged list is built in the workspace."""
        return self._ragged and not isinstance(rows, RaggedIndices)

    def _formed(self, rows: Tensor | Rows, cache: PagedKVCache, views: list[Tensor]) -> Rows:
        """Slots in the form the backend takes, and the steps that write them."""
        steps, slots = self.step.backend.steps, None
        if isinstance(rows, Tensor):
            if not self._needs_slots(rows, self.step):
                listed = RaggedIndices(views.pop(0), views.pop(0), _width(rows))
                self._plan_translation(self._entries(rows, cache), (listed.indices, listed.indptr))
                return listed
            slots = DenseIndices(views.pop(0), views.pop(0))
            self._plan_translation(self._entries(rows, cache), (slots.indices, slots.lens))
            rows = slots
        if not self._needs_list(rows):
            return rows
        assert isinstance(rows, DenseIndices)
        listed, build = RaggedIndices(views.pop(0), views.pop(0), rows.width), steps.build_ragged_indices_from_dense
        out = listed.indices, listed.indptr
        pack = prepare_index_step(build, rows.indices, rows.lens, cache.capacity, out=out)
        self._fixed.append(partial(pack, rows.indices))
        return listed

    def _plan_translation(self, entries: EntryIndices, out: tuple[Tensor, Tensor]) -> None:
        """The step that translates entries to slots; to ragged slots, where the backend has a step for it.

        The indexer's entries are an argument of each run, as their tensor may move; those of the metadata are bound.
        """
        backend, pages, numbers = self.step.backend, entries.pages, entries.indices
        dense = self._needs_slots(numbers, self.step)
        step = backend.steps.compute_global_topk_indices_and_lens if dense else backend.translate_to_ragged
        assert step is not None
        given = entries.visible_lens, entries.token_to_req, pages.block_table, pages.block_size
        prepare = partial(prepare_index_step, step, numbers, *given, out=out)
        if self.step.layer.kind is LayerKind.C4A:
            # later, as a backend that reads entries itself needs none
            self._prepare_translate = prepare
        else:
            self._fixed.append(partial(prepare(), numbers))


def _run_straight(
    attend: RunEntries,
    q: Tensor,
    out: Tensor,
    lse: Tensor | None,
    attn_sink: Tensor | None,
    topk_indices: Tensor | None,
    caches: LayerCaches,
) -> None:
    """`Part.run` of a backend that reads entries itself."""
    assert topk_indices is not None
    assert caches.compressed is not None
    attend(q, out, lse, attn_sink, (caches.swa, caches.compressed), topk_indices)


def _width(rows: Tensor | Rows) -> int:
    """Most keys of a row."""
    return rows.shape[1] if isinstance(rows, Tensor) else rows.width

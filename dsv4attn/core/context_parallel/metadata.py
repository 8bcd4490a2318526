"""`OwnedMetadataBuilder`: metadata of a batch on one rank of several that share the compressed entries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from attrs import fields

from dsv4attn.core.cache.ownership import Ownership
from dsv4attn.core.cache.selected_keys import PageTable
from dsv4attn.core.context_parallel.exchange import RankExchange
from dsv4attn.core.contract.limits import Limits
from dsv4attn.core.memory.rank_buffers import PAGE_TOKENS, key_tokens, keys_are_less
from dsv4attn.core.metadata.builder import MetadataBuilder
from dsv4attn.core.metadata.metadata import AttentionMetadata, Batch, CompressedMetadata, WholePrefill, WindowMetadata
from dsv4attn.core.model.geometry import LayerGeometry, ModelGeometry
from dsv4attn.errors import ArgumentError

__all__ = ["OwnedMetadataBuilder", "metadata_builder", "on_rank"]


def on_rank(context: RankExchange | None) -> tuple[int, str]:
    """How many ranks share compressed entries, and what names this one in errors."""
    return (1, "") if context is None else (context.ownership.size, f" on {context.label}")


def metadata_builder(context: RankExchange | None) -> Callable[..., MetadataBuilder]:
    """What makes the metadata builder of one rank; without a context it is `MetadataBuilder`."""
    if context is None:
        return MetadataBuilder
    keys, heads = context.prefill_keys, context.divides_heads
    return partial(OwnedMetadataBuilder, context.ownership, prefill_keys=keys, divides_heads=heads)


class OwnedMetadataBuilder(MetadataBuilder):
    """Builds the metadata of one rank: `compressed_lens`, slots and tables are of its own entries.

    `Batch.compressed_block_table` has the pages of this rank: as a page holds every size-th run of entries, position p
    is in column p // (compressed_block_tokens * ranks). `max_seq_len` stays that of the whole sequence. Layers with a
    compressed cache see their windows on rank 0 alone, so that ranks attend to disjoint keys; all ranks write windows.

    ownership: of this rank.
    geometry, limits: of `MetadataBuilder`. options: its other arguments.
    prefill_keys, divides_heads: of `ContextParallel`; with the first, metadata of a step whose prefill sends less that
    way have a `WholePrefill`.
    Raises ArgumentError for a geometry of DeepSeek-V4.1, and for an interleave that does not divide the records in a
    page.
    """

    def __init__(
        self,
        ownership: Ownership,
        geometry: ModelGeometry,
        limits: Limits,
        *,
        prefill_keys: bool = False,
        divides_heads: bool = False,
        **options: Any,  # noqa: ANN401 - of the base class
    ) -> None:
        if geometry.shared_latent:
            hint = "layers of V4.1 share caches and selections, which ranks cannot divide yet"
            raise ArgumentError("geometry", expected="a geometry of DeepSeek-V4", actual=geometry.name, hint=hint)
        super().__init__(geometry, limits, **options)
        self.ownership, self._of_rank = ownership, f" of rank {ownership.rank}"
        for layer in geometry.distinct_layers:
            if layer.has_entries:
                records = self.compressed_block_tokens // layer.compress_ratio
                ownership.check_page(records, f"{layer.kind.value} layers")
        # never written again
        decodes, prefills = self._decode_swa[0], self._prefill_swa[0]
        self._no_windows = tuple(self._buffer(*rows.shape).fill_(-1) for rows in (decodes, prefills))
        self._no_lens = self._buffer(max(limits.max_num_batched_tokens, limits.max_num_reqs))
        self.prefill_keys = prefill_keys and ownership.size > 1 and self.compressed_block_tokens <= PAGE_TOKENS
        self._divides_heads = divides_heads
        if self.prefill_keys:
            tokens, most = limits.max_num_batched_tokens, key_tokens(ownership.size, limits.max_model_len)
            self._columns = most // (self.compressed_block_tokens * ownership.size)
            self._pages = self._buffer(self._columns)
            self._whole_table = self._buffer(limits.max_num_reqs * self._columns * ownership.size)
            keys = self._slots.keys()
            self._whole_slots = self._buffer(tokens, dtype=torch.int64)
            self._whole_lens = {key: self._buffer(tokens) for key in keys}

    @property
    def _map_entries(self) -> Callable[..., None]:
        return partial(self.builder_ops.build_owned_slot_mapping, self.ownership)

    def _build(
        self,
        batch: Batch,
        layers: Sequence[LayerGeometry],
        full_width: bool,  # noqa: FBT001 - as in the base class
    ) -> list[AttentionMetadata]:
        of_layers = super()._build(batch, layers, full_width)
        for layer, metadata in zip(layers, of_layers, strict=True):
            metadata.ownership = self.ownership
            if metadata.compressed is not None:
                metadata.whole = self._whole(batch, metadata.swa, layer, metadata.compressed)
        if self.ownership.rank and of_layers:
            empty = self.without_windows(of_layers[0].swa)
            for layer, metadata in zip(layers, of_layers, strict=True):
                if layer.has_entries:
                    metadata.swa = empty
        return of_layers

    def _whole(
        self, batch: Batch, swa: WindowMetadata, layer: LayerGeometry, compressed: CompressedMetadata
    ) -> WholePrefill | None:
        """Metadata of prefill over the keys of all ranks; None where it sends more, or needs more pages than planned.

        All ranks decide alike: by numbers of the batch, which are the same on each.
        """
        requests, tokens, ranks = swa.num_prefills, swa.num_prefill_tokens, self.ownership.size
        if not (self.prefill_keys and tokens):
            return None
        longest = int(swa.prefill_seq_lens_cpu.max())
        columns = max(-(-longest // (self.compressed_block_tokens * ranks)), 1)
        records = self.compressed_block_tokens // layer.compress_ratio
        entries = requests * columns * ranks * records
        sizes = ranks, tokens, layer.num_heads, entries
        if requests * columns > self._columns or not keys_are_less(*sizes, divides_heads=self._divides_heads):
            return None
        pages, table = self._pages[: requests * columns].view(requests, columns), compressed.block_table
        rank_table = table[swa.num_decodes : swa.num_decodes + requests, :columns]
        pages.fill_(-1)
        pages[:, : rank_table.shape[1]] = rank_table
        # decode requests have no pages there: their numbers are negative
        width, first = columns * ranks, swa.num_decodes
        whole = self._whole_table[: batch.num_reqs * width]
        numbers = -first * width, (batch.num_reqs - first) * width
        torch.arange(*numbers, dtype=torch.int32, device=whole.device, out=whole)
        lens, slots = self._whole_lens[layer.key], self._whole_slots
        whole = whole.view(batch.num_reqs, width)
        build = self.builder_ops.build_compressed_slot_mapping
        build(swa.step_tokens, PageTable(whole, records), layer.compress_ratio, out=(slots, lens))
        kept = {attribute.name: getattr(compressed, attribute.name) for attribute in fields(CompressedMetadata)}
        # without fields of a backend's own, which are of this rank's entries
        part = CompressedMetadata(**{**kept, "block_table": whole, "compressed_lens": lens[: swa.num_actual_tokens]})
        return WholePrefill(AttentionMetadata(swa, part), pages)

    def without_windows(self, swa: WindowMetadata) -> WindowMetadata:
        """The same batch, whose tokens see no window, without fields of a backend's own.

        swa: what `build` returned.
        """
        kept = {attribute.name: getattr(swa, attribute.name) for attribute in fields(WindowMetadata)}
        decodes, prefills = swa.num_decode_tokens, swa.num_prefill_tokens
        empty = {
            "decode_swa_indices": self._no_windows[0][:decodes, :, : swa.decode_swa_indices.shape[2]],
            "decode_swa_lens": self._no_lens[:decodes],
            "prefill_swa_indices": self._no_windows[1][:prefills],
            "prefill_swa_lens": self._no_lens[:prefills],
            "prefill_gather_lens": self._no_lens[: swa.num_prefills],
        }
        return WindowMetadata(**{**kept, **empty})

    def _check_limit(self, argument: str, limit: str, value: int) -> None:
        super()._check_limit(f"{argument} on rank {self.ownership.rank} of {self.ownership.size}", limit, value)

    def _own_entries(self, count: int) -> int:
        return self.ownership.count(count)

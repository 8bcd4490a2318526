"""`MetadataBuilder`: the metadata of a batch, in buffers whose addresses never change."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from dsv4attn.core import indices
from dsv4attn.core.contract import Backend, BuilderSteps, MetadataExtension, complete
from dsv4attn.core.geometry import TABLE_COLUMNS, LayerGeometry, LayerKind, ModelGeometry
from dsv4attn.core.limits import Limits
from dsv4attn.core.metadata import (
    AttentionMetadata,
    Batch,
    CompressorMetadata,
    DeepseekSparseSWAMetadata,
    FlashMLASparseMetadata,
)
from dsv4attn.errors import ArgumentError

__all__ = ["STATE_BLOCK_SIZES", "MetadataBuilder", "c128a_columns", "split_decodes_and_prefills"]

STATE_BLOCK_SIZES: Mapping[LayerKind, int] = {LayerKind.C4A: 4, LayerKind.C128A: 8}
"""Records in a page of compressor states, as vLLM has them."""


def c128a_columns(geometry: ModelGeometry, limits: Limits) -> int:
    """See `LayerGeometry.table_columns`."""
    return geometry.layer_of_kind(LayerKind.C128A).table_columns(limits.max_model_len)


def split_decodes_and_prefills(
    query_lens: Sequence[int], threshold: int, *, short_prefills: bool = False
) -> tuple[int, int, int, int]:
    """(num_decodes, num_prefills, num_decode_tokens, num_prefill_tokens) of a batch.

    Requests with at most `threshold` query tokens are decodes, a fresh one-token prompt too, and come first. The
    first longer one begins the prefill part. A short request behind it is an error, or with `short_prefills` a prefill,
    as in vLLM. Requests without tokens (padding) may be anywhere.
    """
    num_decodes = next((i for i, n in enumerate(query_lens) if n > threshold), len(query_lens))
    for i in range(num_decodes, len(query_lens)):
        if 0 < query_lens[i] <= threshold and not short_prefills:
            expected = f"decode requests (at most {threshold} query tokens) before prefill requests"
            actual = f"request {i} with {query_lens[i]} after request {num_decodes} with {query_lens[num_decodes]}"
            hint = "order the batch by phase, or build with short_prefills=True to run it as a prefill"
            raise ArgumentError("query_start_loc", expected=expected, actual=actual, hint=hint)
    decode_tokens = sum(query_lens[:num_decodes])
    return num_decodes, len(query_lens) - num_decodes, decode_tokens, sum(query_lens) - decode_tokens


class MetadataBuilder:
    """Builds the metadata of one step at a time; the next `build` overwrites the tensors of the last.

    geometry, limits: of all batches. swa_block_size: records per block of the window cache. compressed_block_tokens:
    tokens whose entries share a block of a compressed cache. num_swa_blocks, num_compressed_blocks: sizes of the
    caches; without them only negative blocks are errors, and blocks past a cache are absent.
    validate: read and check tensor values; by default on the CPU only, where that costs no synchronisation.
    short_prefills: see `split_decodes_and_prefills`. backend: its index kernels, if it has any, compute the metadata
    without an allocation on the device, and its metadata extension is applied. steps: replaces those kernels.
    state_block_sizes: records per block of the state caches of each kind. num_state_blocks: sizes of these caches.
    """

    def __init__(
        self,
        geometry: ModelGeometry,
        limits: Limits,
        *,
        swa_block_size: int = 64,
        compressed_block_tokens: int = 256,
        device: torch.device | str = "cpu",
        num_swa_blocks: int | None = None,
        num_compressed_blocks: int | None = None,
        validate: bool | None = None,
        short_prefills: bool = False,
        backend: Backend | None = None,
        steps: BuilderSteps | None = None,
        state_block_sizes: Mapping[LayerKind, int] = STATE_BLOCK_SIZES,
        num_state_blocks: Mapping[LayerKind, int] | None = None,
    ) -> None:
        self.geometry, self.limits, self.device = geometry, limits, torch.device(device)
        self.swa_block_size, self.compressed_block_tokens = swa_block_size, compressed_block_tokens
        self.num_swa_blocks, self.num_compressed_blocks = num_swa_blocks, num_compressed_blocks
        self.validate = self.device.type == "cpu" if validate is None else validate
        self.short_prefills = short_prefills
        self.state_block_sizes, self.num_state_blocks = state_block_sizes, num_state_blocks or {}
        whole = None if backend is None else complete(backend)
        self.steps: BuilderSteps = steps or (whole and whole.builder_steps) or indices
        with torch.inference_mode(False):  # as `_buffer`
            extension = whole.metadata_extension(geometry, limits, self.device) if whole else None
        self._extension: MetadataExtension | None = extension
        for _, ratio in geometry.layers:
            if compressed_block_tokens % ratio:
                expected = f"a multiple of ratio {ratio}"
                raise ArgumentError("compressed_block_tokens", expected=expected, actual=compressed_block_tokens)
        tokens, decodes, window = limits.max_num_batched_tokens, limits.max_decode_tokens, geometry.window
        self._token_to_req = self._buffer(tokens)
        self._is_valid = self._buffer(tokens, dtype=torch.bool)
        self._decode_swa = self._buffer(decodes, 1, window), self._buffer(decodes)
        self._prefill_swa = self._buffer(tokens, 1, window), self._buffer(tokens)
        self._gather_lens = self._buffer(limits.max_num_reqs)
        self._slots = {kind: self._buffer(tokens, dtype=torch.int64) for kind in geometry.kinds}
        self._entries = {kind: self._buffer(tokens) for kind in geometry.kinds}
        self._state_slots = {kind: self._buffer(tokens, dtype=torch.int64) for kind in geometry.kinds}
        self._state_lens = self._buffer(tokens)
        self._c128a: tuple[Tensor, Tensor] | None = None
        if LayerKind.C128A in geometry.kinds:
            self._c128a_max = c128a_columns(geometry, limits)
            self._c128a = self._buffer(decodes, 1, self._c128a_max), self._buffer(decodes)
            self._entry_numbers = self._buffer(self._c128a_max)
            torch.arange(self._c128a_max, out=self._entry_numbers)

    def _buffer(self, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        with torch.inference_mode(False):  # written outside of the mode that it may be made in
            return torch.zeros(shape, dtype=dtype, device=self.device)

    def build(self, batch: Batch) -> DeepseekSparseSWAMetadata:
        """Window metadata of a batch. Raises ArgumentError before it writes anything."""
        query_lens, seq_lens = self._host_lens(batch)
        split = split_decodes_and_prefills(query_lens, self.limits.decode_threshold, short_prefills=self.short_prefills)
        num_decodes, num_prefills, num_decode_tokens, num_prefill_tokens = split
        tokens, window = num_decode_tokens + num_prefill_tokens, self.geometry.window
        self._check_table("block_table", batch.block_table, query_lens, seq_lens, self.swa_block_size)
        if self.validate:
            self._check_copies(batch, query_lens)
            self._check_slots(batch, tokens)

        starts, lens, blocks = batch.query_start_loc, batch.seq_lens, (batch.block_table, self.swa_block_size)
        request, valid = self._token_to_req[:tokens], self._is_valid[:tokens]
        self.steps.build_token_maps(starts, batch.slot_mapping, out=(request, valid))
        phases = (0, num_decode_tokens, self._decode_swa), (num_decode_tokens, tokens, self._prefill_swa)
        for first, end, (rows, counts) in phases:
            maps, out = (request[first:end], valid[first:end], first), (rows[: end - first, 0], counts)
            self.steps.build_window_indices(starts, lens, *maps, *blocks, window, out=out)
        prefill_seq_lens, gather_lens = lens[num_decodes:], self._gather_lens[:num_prefills]
        self.steps.build_gather_lens(starts[num_decodes:], prefill_seq_lens, window, out=gather_lens)
        metadata = DeepseekSparseSWAMetadata(
            num_decodes=num_decodes,
            num_prefills=num_prefills,
            num_decode_tokens=num_decode_tokens,
            num_prefill_tokens=num_prefill_tokens,
            block_size=self.swa_block_size,
            window_size=window,
            max_query_len=max(query_lens, default=0),
            max_seq_len=max(seq_lens, default=0),
            block_table=batch.block_table,
            slot_mapping=batch.slot_mapping,
            seq_lens=batch.seq_lens,
            query_start_loc=batch.query_start_loc,
            query_start_loc_cpu=batch.query_start_loc_cpu,
            is_valid_token=valid,
            token_to_req_indices=request,
            decode_swa_indices=self._decode_swa[0][:num_decode_tokens],
            decode_swa_lens=self._decode_swa[1][:num_decode_tokens],
            prefill_swa_indices=self._prefill_swa[0][:num_prefill_tokens],
            prefill_swa_lens=self._prefill_swa[1][:num_prefill_tokens],
            prefill_seq_lens=prefill_seq_lens,
            prefill_gather_lens=gather_lens,
            prefill_seq_lens_cpu=batch.seq_lens_cpu[num_decodes:],
            prefill_query_lens_cpu=batch.query_start_loc_cpu[num_decodes:].diff(),
        )
        return self._extension.extend_swa(metadata) if self._extension else metadata

    def build_compressed(
        self, batch: Batch, swa: DeepseekSparseSWAMetadata, kind: LayerKind, *, full_width: bool = False
    ) -> FlashMLASparseMetadata:
        """Compressed metadata of a batch for all layers of a kind; `swa` is what `build` made of the same batch.

        full_width: give the C128A table the width of `max_model_len` in every step, as a captured graph requires.
        """
        layer = self.geometry.layer_of_kind(kind)
        kind = layer.kind
        ratio, tokens, decodes = layer.compress_ratio, swa.num_actual_tokens, swa.num_decode_tokens
        table, entries = self._checked_entries(batch, kind, ratio)
        records = self.compressed_block_tokens // ratio

        slots, lens, maps = self._slots[kind], self._entries[kind], (swa.token_to_req_indices, swa.is_valid_token)
        map_slots = self.steps.build_compressed_slot_mapping
        map_slots(batch.query_start_loc, batch.seq_lens, *maps, table, records, ratio, out=(slots, lens))
        width = self._c128a_width(max(entries, default=0), full_width=full_width) if kind is LayerKind.C128A else 0
        decode_table, decode_lens = self._c128a_decode(table, lens[:decodes], swa.token_to_req_indices, width, records)
        metadata = FlashMLASparseMetadata(
            kind=kind,
            compress_ratio=ratio,
            num_reqs=batch.num_reqs,
            num_actual_tokens=tokens,
            max_query_len=swa.max_query_len,
            max_seq_len=swa.max_seq_len,
            block_size=self.compressed_block_tokens,
            topk_tokens=layer.topk,
            query_start_loc=batch.query_start_loc,
            slot_mapping=slots[: max(tokens, batch.slot_mapping.shape[0])],
            block_table=table,
            req_id_per_token=swa.token_to_req_indices,
            compressed_lens=lens[:tokens],
            c128a_global_decode_topk_indices=decode_table,
            c128a_decode_topk_lens=decode_lens,
            c128a_prefill_topk_indices=self._entry_numbers[:width].expand(tokens - decodes, width) if width else None,
        )
        return self._extension.extend_compressed(metadata) if self._extension else metadata

    def build_for(
        self, batch: Batch, kinds: Iterable[LayerKind | str], *, full_width: bool = False
    ) -> dict[LayerKind, AttentionMetadata]:
        """Metadata of a batch for several kinds of layers that share its block tables.

        kinds: several of them, also by name, "c4a". full_width: see `build_compressed`.
        """
        if isinstance(kinds, str) or not isinstance(kinds, Iterable):
            raise ArgumentError("kinds", expected="a list of kinds", actual=repr(kinds), hint="pass a list, ['c4a']")
        layers = [self.geometry.layer_of_kind(kind) for kind in kinds]
        compressed = [layer for layer in layers if layer.kind is not LayerKind.SWA]
        for layer in compressed:  # all checks before the first write
            self._checked_entries(batch, layer.kind, layer.compress_ratio)
            self._checked_states(batch, layer)
        swa = self.build(batch)
        made = {layer.kind: AttentionMetadata(swa) for layer in layers}
        for kind in (layer.kind for layer in compressed):
            made[kind].compressed = self.build_compressed(batch, swa, kind, full_width=full_width)
            made[kind].state = self.build_state(batch, swa, kind)
        return made

    def build_state(self, batch: Batch, swa: DeepseekSparseSWAMetadata, kind: LayerKind) -> CompressorMetadata | None:
        """Compressor metadata of a batch for all layers of a kind, or None without a table of states."""
        layer = self.geometry.layer_of_kind(kind)
        table = self._checked_states(batch, layer)
        if table is None:
            return None
        slots, size = self._state_slots[layer.kind], self.state_block_sizes[layer.kind]
        maps = batch.query_start_loc, batch.seq_lens, swa.token_to_req_indices, swa.is_valid_token
        # every token completes an entry of ratio 1: its own state
        self.steps.build_compressed_slot_mapping(*maps, table, size, 1, out=(slots, self._state_lens))
        rows = slots[: max(swa.num_actual_tokens, batch.slot_mapping.shape[0])]
        return CompressorMetadata(block_size=size, block_table=table, slot_mapping=rows)

    def _checked_states(self, batch: Batch, layer: LayerGeometry) -> Tensor | None:
        """Block table of the states of a kind, after a check that every block exists that this step reads or writes."""
        name = f"{layer.kind.value}_state_block_table"
        table: Tensor | None = getattr(batch, name)
        if table is None:
            return None
        query_lens, seq_lens = self._host_lens(batch)
        size, bound = self.state_block_sizes[layer.kind], self.num_state_blocks.get(layer.kind)
        self._check_table(f"Batch.{name}", table, query_lens, seq_lens, size)
        for i, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
            if not (self.validate and query_len):
                continue
            first = layer.first_state(seq_len - query_len) // size
            wrong = _outside(table[i, first : -(-seq_len // size)], bound)
            if bool(wrong.any()):
                j = first + int(wrong.nonzero()[0])
                expected = f"a block in [0, {_bound(bound)}) for the states of positions {j * size} and on"
                raise ArgumentError(f"{name}[{i}, {j}]", expected=expected, actual=int(table[i, j]))
        return table

    def _checked_entries(self, batch: Batch, kind: LayerKind, ratio: int) -> tuple[Tensor, list[int]]:
        """Block table of a compressed cache, and how many entries each request has."""
        table, records = batch.compressed_block_table, self.compressed_block_tokens // ratio
        if ratio == 1:
            raise ArgumentError("kind", expected="a layer kind with a compressed cache", actual=kind.value)
        if table is None:
            expected = f"a table for {kind.value} layers"
            raise ArgumentError("Batch.compressed_block_table", expected=expected, actual=None)
        query_lens, seq_lens = self._host_lens(batch)
        entries = [n // ratio for n in seq_lens]
        self._check_table("compressed_block_table", table, query_lens, entries, records)
        if self.validate:
            self._check_blocks(table, query_lens, entries, records)
        return table, entries

    def _c128a_width(self, entries: int, *, full_width: bool) -> int:
        """Columns of this step's table: a power of two, so that few widths ever occur."""
        if full_width:
            return self._c128a_max
        return min(max(1 << max(entries - 1, 0).bit_length(), TABLE_COLUMNS), self._c128a_max)

    def _c128a_decode(
        self, table: Tensor, visible: Tensor, request: Tensor, width: int, records: int
    ) -> tuple[Tensor | None, Tensor | None]:
        if not width or self._c128a is None:
            return None, None
        n = visible.shape[0]
        rows, lens = self._c128a[0][:n, :, :width], self._c128a[1]
        numbers, out = self._entry_numbers[:width].expand(n, width), (rows[:, 0], lens[:n])
        self.steps.compute_global_topk_indices_and_lens(numbers, visible, request[:n], table, records, out=out)
        lens[n:].zero_()
        return rows, lens[:n]

    def _host_lens(self, batch: Batch) -> tuple[list[int], list[int]]:
        """Query and sequence lengths on the host, checked against each other, `slot_mapping` and the limits."""
        starts, seq_lens = batch.query_start_loc_cpu.tolist(), batch.seq_lens_cpu.tolist()
        query_lens = [b - a for a, b in pairwise(starts)]
        if starts[0] != 0 or min(query_lens, default=0) < 0:
            raise ArgumentError("query_start_loc", expected="ascending values that begin with 0", actual=starts)
        for i, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
            if seq_len < query_len:
                expected = f"at least the {query_len} query tokens of this step"
                hint = "seq_lens counts tokens after this step: prefix plus query"
                raise ArgumentError(f"seq_lens[{i}]", expected=expected, actual=seq_len, hint=hint)
            if seq_len > self.limits.max_model_len:
                self._check_limit(f"seq_lens[{i}]", "max_model_len", seq_len)
        self._check_limit("batch requests", "max_num_reqs", batch.num_reqs)
        self._check_limit("batch tokens", "max_num_batched_tokens", starts[-1])
        if batch.slot_mapping.shape[0] < starts[-1]:
            expected = f"at least {starts[-1]} elements, one for each token of the batch"
            actual = f"{batch.slot_mapping.shape[0]} elements"
            hint = "give a slot for each token, -1 for those of padding"
            raise ArgumentError("slot_mapping", expected=expected, actual=actual, hint=hint)
        return query_lens, seq_lens

    def _check_limit(self, argument: str, limit: str, value: int) -> None:
        bound = getattr(self.limits, limit)
        if value > bound:
            raise ArgumentError(argument, expected=f"at most {bound}", actual=value, hint=f"raise Limits.{limit}")

    @staticmethod
    def _check_table(name: str, table: Tensor, query_lens: list[int], records: list[int], per_block: int) -> None:
        for i, (query_len, count) in enumerate(zip(query_lens, records, strict=True)):
            if query_len and count > table.shape[1] * per_block:
                expected = f"at least {-(-count // per_block)} columns for the {count} records of request {i}"
                actual = f"{table.shape[1]} columns of {per_block} records"
                raise ArgumentError(name, expected=expected, actual=actual, hint="widen the block table")

    @staticmethod
    def _check_copies(batch: Batch, query_lens: list[int]) -> None:
        """Find lengths on the device that differ from their copies on the host."""
        starts, copy = batch.query_start_loc.tolist(), batch.query_start_loc_cpu.tolist()
        if starts != copy:
            raise ArgumentError("query_start_loc", expected=f"what query_start_loc_cpu holds, {copy}", actual=starts)
        lens, bounds = batch.seq_lens.tolist(), batch.seq_lens_cpu.tolist()
        for i, (query_len, seq_len, bound) in enumerate(zip(query_lens, lens, bounds, strict=True)):
            if not query_len <= seq_len <= bound:
                expected = f"{query_len} (its query tokens) to {bound} (seq_lens_cpu)"
                raise ArgumentError(f"seq_lens[{i}]", expected=expected, actual=seq_len)

    def _check_slots(self, batch: Batch, tokens: int) -> None:
        """Find dead blocks under a window and slots outside the cache."""
        request = indices.token_to_req_indices(batch.query_start_loc, tokens)
        position = indices.positions_of(batch.query_start_loc, batch.seq_lens, request)
        valid = torch.zeros(tokens, dtype=torch.bool, device=self.device)
        valid[:] = batch.slot_mapping[:tokens] >= 0
        table, size = batch.block_table, self.swa_block_size
        slots, lens = indices.window_indices(position, valid, request, table, size, self.geometry.window)
        capacity = None if self.num_swa_blocks is None else self.num_swa_blocks * size
        wrong = _outside(slots, capacity) & (torch.arange(slots.shape[1], device=slots.device) < lens[:, None])
        if bool(wrong.any()):
            token, column = wrong.nonzero()[0].tolist()
            i, place = int(request[token]), int(position[token] + 1 - lens[token]) + column
            expected = f"a block in [0, {_bound(self.num_swa_blocks)}) for position {place}, which a query can see"
            actual = int(table[i, place // size])
            raise ArgumentError(f"block_table[{i}, {place // size}]", expected=expected, actual=actual)
        if capacity is not None and bool((batch.slot_mapping >= capacity).any()):
            t = int((batch.slot_mapping >= capacity).nonzero()[0])
            expected = f"below the {capacity} slots of the window cache, or negative for padding"
            raise ArgumentError(f"slot_mapping[{t}]", expected=expected, actual=int(batch.slot_mapping[t]))
        stale = batch.slot_mapping[tokens:] >= 0
        if bool(stale.any()):
            t = tokens + int(stale.nonzero()[0])
            expected = f"a negative slot behind the {tokens} tokens of the batch"
            hint = "fill what pads the batch with -1, or a key of padding is written to this slot"
            raise ArgumentError(f"slot_mapping[{t}]", expected=expected, actual=int(batch.slot_mapping[t]), hint=hint)

    def _check_blocks(self, table: Tensor, query_lens: list[int], entries: list[int], records: int) -> None:
        """Find blocks outside a compressed cache among those that hold visible entries."""
        for i, (query_len, count) in enumerate(zip(query_lens, entries, strict=True)):
            used = table[i, : -(-count // records)] if query_len else table[i, :0]
            wrong = _outside(used, self.num_compressed_blocks)
            if bool(wrong.any()):
                j, bound = int(wrong.nonzero()[0]), _bound(self.num_compressed_blocks)
                expected = f"a block in [0, {bound}) for entries {j * records} and on"
                raise ArgumentError(f"compressed_block_table[{i}, {j}]", expected=expected, actual=int(used[j]))


def _outside(values: Tensor, bound: int | None) -> Tensor:
    """Which values are not in [0, bound); without a bound, which are negative."""
    return (values < 0) if bound is None else (values < 0) | (values >= bound)


def _bound(num_blocks: int | None) -> int | str:
    return "num_blocks" if num_blocks is None else num_blocks

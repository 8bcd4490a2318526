"""`MetadataBuilder`: the metadata of a batch, in buffers whose addresses never change."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, cast
from weakref import ref

import torch
from torch import Tensor

from dsv4attn.core.cache.selected_keys import PageTable, RequestRows, StepTokens
from dsv4attn.core.contract.backend import Backend, MetadataExtension, check_is_backend
from dsv4attn.core.contract.builder_ops import BuilderOps
from dsv4attn.core.contract.limits import Limits
from dsv4attn.core.metadata.batch_checks import (
    check_batch,
    check_blocks,
    check_slots,
    check_slots_in_blocks,
    check_states,
    check_table,
    check_windows,
    check_written_once,
    planned,
    real_lens,
    record_slots,
    stored_positions,
)
from dsv4attn.core.metadata.metadata import (
    AttentionMetadata,
    Batch,
    BuildState,
    CompressedMetadata,
    CompressorMetadata,
    LayerKey,
    WindowMetadata,
)
from dsv4attn.core.metadata.prefix_hits import PrefixHits, check_hits, hits_of
from dsv4attn.core.model.geometry import TABLE_COLUMNS, LayerGeometry, LayerKind, ModelGeometry
from dsv4attn.core.reprs import limits_text, one_line
from dsv4attn.errors import ArgumentError

__all__ = ["STATE_BLOCK_SIZES", "MetadataBuilder", "c128a_columns", "split_decodes_and_prefills"]

STATE_BLOCK_SIZES: Mapping[LayerKind, int] = {LayerKind.CSA: 4, LayerKind.HCA: 8}
"""Records in a page of compressor states, as vLLM has them."""


def c128a_columns(geometry: ModelGeometry, limits: Limits) -> int:
    """See `LayerGeometry.table_columns`."""
    return geometry.layer_of_kind(LayerKind.HCA).table_columns(limits.max_model_len)


def split_decodes_and_prefills(
    query_lens: Sequence[int], threshold: int, *, short_prefills: bool = False
) -> tuple[int, int, int, int]:
    """(num_decodes, num_prefills, num_decode_tokens, num_prefill_tokens) of a batch.

    Requests with at most `threshold` query tokens are decodes, a fresh one-token prompt too, and come first. The
    first longer one begins the prefill part. A short request after it is an error, or with `short_prefills` a prefill,
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
    without an allocation on the device, and its metadata extension is applied. builder_ops: replaces those kernels.
    state_block_sizes: records per block of the state caches of each kind. num_state_blocks: sizes of these caches.
    device: where the metadata lie.
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
        builder_ops: BuilderOps | None = None,
        state_block_sizes: Mapping[LayerKind, int] = STATE_BLOCK_SIZES,
        num_state_blocks: Mapping[LayerKind, int] | None = None,
    ) -> None:
        self.geometry, self.limits, self.device = planned(geometry, limits, device)
        self.swa_block_size, self.compressed_block_tokens = swa_block_size, compressed_block_tokens
        self.num_swa_blocks, self.num_compressed_blocks = num_swa_blocks, num_compressed_blocks
        self.validate = self.device.type == "cpu" if validate is None else validate
        self.short_prefills = short_prefills
        self.state_block_sizes, self.num_state_blocks = state_block_sizes, num_state_blocks or {}
        if backend is not None:
            check_is_backend(backend)
        self.builder_ops = builder_ops or (backend and backend.builder_ops) or BuilderOps()
        if not isinstance(cast("object", self.builder_ops), BuilderOps):
            hint = "pass evolve(BuilderOps(), ...), or None"
            raise ArgumentError("builder_ops", expected="BuilderOps", actual=type(self.builder_ops).__name__, hint=hint)
        with torch.inference_mode(False):  # as `_buffer`
            extension = backend.metadata_extension(geometry, limits, self.device) if backend else None
        self._extension: MetadataExtension[WindowMetadata, CompressedMetadata] | None = extension
        for ratio in (layer.compress_ratio for layer in geometry.distinct_layers):
            if compressed_block_tokens % ratio:
                expected = f"a multiple of ratio {ratio}"
                raise ArgumentError("compressed_block_tokens", expected=expected, actual=compressed_block_tokens)
        tokens, decodes, window = limits.max_num_batched_tokens, limits.max_decode_tokens, geometry.window
        self._token_to_req = self._buffer(tokens)
        self._is_valid = self._buffer(tokens, dtype=torch.bool)
        self._decode_swa = self._buffer(decodes, 1, max(window, limits.decode_window_columns)), self._buffer(decodes)
        self._prefill_swa = self._buffer(tokens, 1, window), self._buffer(tokens)
        self._gather_lens = self._buffer(limits.max_num_reqs)
        compressed = [layer.key for layer in geometry.distinct_layers if layer.has_entries]
        self._slots = {key: self._buffer(tokens, dtype=torch.int64) for key in compressed}
        self._entries = {key: self._buffer(tokens) for key in compressed}
        self._state_slots = {key: self._buffer(tokens, dtype=torch.int64) for key in compressed}
        self._state_lens = self._buffer(tokens)
        self._hits = PrefixHits(
            self.builder_ops, geometry.distinct_layers, lambda dtype: self._buffer(tokens, dtype=dtype)
        )
        self._of_rank = ""
        self._build_state = BuildState()
        self._batch: ref[Batch] | None = None
        self._c128a: tuple[Tensor, Tensor] | None = None
        if LayerKind.HCA in geometry.kinds:
            self._c128a_max = c128a_columns(geometry, limits)
            self._c128a = self._buffer(decodes, 1, self._c128a_max), self._buffer(decodes)
            self._entry_numbers = self._buffer(self._c128a_max)
            torch.arange(self._c128a_max, device=self.device, out=self._entry_numbers)

    @one_line
    def __repr__(self) -> Iterator[str]:
        """Model, limits, pages and device."""
        yield self.geometry.name
        yield limits_text(self.limits)
        yield f"window pages of {self.swa_block_size} tokens"
        yield f"compressed pages of {self.compressed_block_tokens} tokens"
        yield f"on {self.device}"

    def __getstate__(self) -> dict[str, Any]:
        """A copy has built nothing yet: a weak reference cannot be pickled."""
        return {**self.__dict__, "_batch": None}

    def _buffer(self, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        with torch.inference_mode(False):  # written outside of the mode that it may be made in
            return torch.zeros(shape, dtype=dtype, device=self.device)

    def build(self, batch: Batch) -> WindowMetadata:
        """Window metadata of a batch. Raises ArgumentError before it writes anything.

        batch: the requests of the step, with their block tables and lengths.
        """
        query_lens, seq_lens = self._host_lens(batch)
        split = split_decodes_and_prefills(query_lens, self.limits.decode_threshold, short_prefills=self.short_prefills)
        num_decodes, num_prefills, num_decode_tokens, num_prefill_tokens = split
        tokens, window = num_decode_tokens + num_prefill_tokens, self.geometry.window
        decode_swa = self._decode_rows(batch, query_lens[:num_decodes])
        phases = (slice(0, num_decode_tokens), batch.causal), (slice(num_decode_tokens, tokens), True)
        if self.validate:
            size, blocks = self.swa_block_size, self.num_swa_blocks
            check_table("block_table", batch.block_table, *real_lens(batch, query_lens), size)
            check_windows(batch, phases, window, size, blocks)
            check_slots(batch, tokens, None if blocks is None else blocks * size)
            check_slots_in_blocks(batch, tokens, size)
            written = batch.slot_mapping.tolist()
            starts_cpu = batch.query_start_loc_cpu.tolist()
            check_written_once("slot_mapping", "key", (written[a:b] for a, b in pairwise(starts_cpu)))

        if self._batch is None or self._batch() is not batch:  # a further build of the same batch writes the same
            self._build_state.is_last = False
            self._build_state, self._batch = BuildState(), ref(batch)
        starts, lens, replay = batch.query_start_loc, batch.seq_lens, batch.replay_start
        # all rows: a captured graph may read rows that are not those of a token of this batch
        self.builder_ops.build_token_maps(starts, batch.slot_mapping, out=(self._token_to_req, self._is_valid))
        request, valid = self._token_to_req[:tokens], self._is_valid[:tokens]
        for (part, causal), (rows, counts) in zip(phases, (decode_swa, self._prefill_swa), strict=True):
            run = StepTokens(starts, lens, request[part], valid[part], part.start)
            pages, out = PageTable(batch.block_table, self.swa_block_size), (rows[: part.stop - part.start, 0], counts)
            self.builder_ops.build_window_indices(run, pages, window, out=out, replay_start=replay, causal=causal)
        prefill_seq_lens, gather_lens = lens[num_decodes:], self._gather_lens[:num_prefills]
        first = None if replay is None else replay[num_decodes:]
        self.builder_ops.build_gather_lens(
            starts[num_decodes:], prefill_seq_lens, window, out=gather_lens, replay_start=first
        )
        metadata = WindowMetadata(
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
            decode_swa_indices=decode_swa[0][:num_decode_tokens],
            decode_swa_lens=decode_swa[1][:num_decode_tokens],
            prefill_swa_indices=self._prefill_swa[0][:num_prefill_tokens],
            prefill_swa_lens=self._prefill_swa[1][:num_prefill_tokens],
            prefill_seq_lens=prefill_seq_lens,
            prefill_gather_lens=gather_lens,
            prefill_seq_lens_cpu=batch.seq_lens_cpu[num_decodes:],
            prefill_query_lens_cpu=batch.query_start_loc_cpu[num_decodes:].diff(),
            decode_requests=self._decode_requests(batch, request[:num_decode_tokens], num_decodes),
            prefill_requests=RequestRows(
                request[num_decode_tokens:], starts, max(query_lens[num_decodes:], default=0), num_prefills
            ),
            build_state=self._build_state,
        )
        return self._extension.extend_swa(metadata) if self._extension else metadata

    def _decode_requests(self, batch: Batch, request: Tensor, num_decodes: int) -> RequestRows | None:
        """What `RequestRows` promises, where a request may have several tokens; tokens of a draft block see all of it.

        `build_window_indices` and `compute_global_topk_indices_and_lens` list keys in the order that it promises.
        """
        starts, most = batch.query_start_loc[: num_decodes + 1], self.limits.decode_threshold
        return RequestRows(request, starts, most) if batch.causal and most > 1 else None

    def _decode_rows(self, batch: Batch, query_lens: list[int]) -> tuple[Tensor, Tensor]:
        """Buffers of the decode windows: as wide as the window, or as the limits say if the batch is not causal."""
        rows, lens = self._decode_swa
        window, columns = self.geometry.window, rows.shape[2]
        if batch.causal:
            return rows if columns == window else rows[..., :window], lens
        longest = max(query_lens, default=0)
        if window + longest > columns:
            expected = f"at most {columns - window} query tokens of a decode request that is not causal"
            hint = f"raise Limits.decode_window_columns to {window + longest}: the window, and the tokens"
            raise ArgumentError("query_start_loc", expected=expected, actual=longest, hint=hint)
        return rows, lens

    def build_compressed(
        self,
        batch: Batch,
        swa: WindowMetadata,
        kind: LayerKind,
        *,
        compress_ratio: int | None = None,
        full_width: bool = False,
    ) -> CompressedMetadata:
        """Compressed metadata of a batch for all layers of a kind; `swa` is what `build` made of the same batch.

        batch: the requests of the step.
        swa: what `build` made of the same batch.
        kind: the kind of the layers.
        compress_ratio: of the layers, where the kind has several. full_width: give the C128A table the width of
        `max_model_len` in every step, as a captured graph requires.
        """
        layer = self.geometry.layer_of_kind(kind, compress_ratio)
        kind = layer.kind
        check_hits(batch, layer, validate=self.validate)
        ratio, tokens, decodes = layer.compress_ratio, swa.num_actual_tokens, swa.num_decode_tokens
        table, entries = self._checked_entries(batch, kind, ratio)
        records = self.compressed_block_tokens // ratio

        slots, lens = self._slots[layer.key], self._entries[layer.key]
        self._map_entries(swa.step_tokens, PageTable(table, records), ratio, out=(slots, lens))
        self._hits.hide_entries(batch, swa, slots)
        width = self._c128a_width(max(entries, default=0), full_width=full_width) if kind is LayerKind.HCA else 0
        decode_table, decode_lens = self._c128a_decode(table, lens[:decodes], swa.token_to_req_indices, width, records)
        metadata = CompressedMetadata(
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
            decode_requests=swa.decode_requests if width else None,
        )
        return self._extension.extend_compressed(metadata) if self._extension else metadata

    @property
    def _map_entries(self) -> Callable[..., None]:
        return self.builder_ops.build_compressed_slot_mapping

    def build_for(
        self, batch: Batch, kinds: Iterable[LayerKind | str], *, full_width: bool = False
    ) -> dict[LayerKind, AttentionMetadata]:
        """Metadata of a batch for several kinds of layers that share its block tables.

        batch: the requests of the step.
        kinds: several of them, also by name, "c4a". full_width: see `build_compressed`. Raises ArgumentError for a
        kind that the model has with several ratios: `build_all` builds these.
        """
        if isinstance(kinds, str) or not isinstance(kinds, Iterable):
            actual = repr(kinds.value if isinstance(kinds, LayerKind) else kinds)
            raise ArgumentError("kinds", expected="a list of kinds", actual=actual, hint="pass a list, ['c4a']")
        layers = [self.geometry.layer_of_kind(kind) for kind in kinds]
        return {
            layer.kind: metadata for layer, metadata in zip(layers, self._build(batch, layers, full_width), strict=True)
        }

    def build_all(self, batch: Batch, *, full_width: bool = False) -> dict[LayerKey, AttentionMetadata]:
        """Metadata of a batch for all layers of the model, by (kind, compress ratio), as `LayerGeometry.key` has it.

        A kind that has one ratio is a key too. full_width: see `build_compressed`.
        batch: the requests of the step.
        """
        layers = self.geometry.distinct_layers
        in_order = self._build(batch, layers, full_width)
        by_name: dict[LayerKey, AttentionMetadata] = {}
        for layer, metadata in zip(layers, in_order, strict=True):
            by_name[layer.key] = metadata
            if sum(other.kind is layer.kind for other in layers) == 1:
                by_name[layer.kind] = metadata
        return by_name

    def _build(
        self,
        batch: Batch,
        layers: Sequence[LayerGeometry],
        full_width: bool,  # noqa: FBT001 - of `build_compressed`
    ) -> list[AttentionMetadata]:
        """Metadata for each of the layers."""
        check_batch(batch)
        compressed = [layer for layer in layers if layer.kind is not LayerKind.SWA]
        for layer in compressed:  # all checks before the first write
            check_hits(batch, layer, validate=self.validate)
            self._checked_entries(batch, layer.kind, layer.compress_ratio)
            self._checked_states(batch, layer)
        swa = self.build(batch)
        if full_width:
            # a graph, and who runs its step again without it, reads the metadata of the capture after other builds
            self._build_state, self._batch = BuildState(), None
        by_key = {layer.key: AttentionMetadata(swa) for layer in layers}
        for kind, ratio in (layer.key for layer in compressed):
            part = self.build_compressed(batch, swa, kind, compress_ratio=ratio, full_width=full_width)
            by_key[kind, ratio].compressed = part
            by_key[kind, ratio].state = self.build_state(batch, swa, kind, compress_ratio=ratio)
        return [by_key[layer.key] for layer in layers]

    def build_state(
        self, batch: Batch, swa: WindowMetadata, kind: LayerKind, *, compress_ratio: int | None = None
    ) -> CompressorMetadata | None:
        """Compressor metadata of a batch for all layers of a kind; None without a table of states, or without states.

        batch: the requests of the step.
        swa: what `build` made of the same batch.
        kind: the kind of the layers.
        compress_ratio: see `build_compressed`.
        """
        layer = self.geometry.layer_of_kind(kind, compress_ratio)
        table = self._checked_states(batch, layer)
        if table is None:
            return None
        slots, size = self._state_slots[layer.key], self.state_block_sizes[layer.kind]
        if self.geometry.shared_latent:
            ring = self._hits.requests_of_ring(batch, swa, layer)
            return CompressorMetadata(block_size=size, block_table=table, req_id_per_token=ring)
        # every token completes an entry of ratio 1: its own state
        build, pages = self.builder_ops.build_compressed_slot_mapping, PageTable(table, size)
        build(swa.step_tokens, pages, 1, out=(slots, self._state_lens))
        self._hits.hide_states(batch, swa, slots)
        rows = slots[: max(swa.num_actual_tokens, batch.slot_mapping.shape[0])]
        return CompressorMetadata(block_size=size, block_table=table, slot_mapping=rows)

    def _checked_states(self, batch: Batch, layer: LayerGeometry) -> Tensor | None:
        """Block table of the states of a kind, after a check that every block exists that this step reads or writes."""
        name = f"{layer.kind.value}_state_block_table"
        table: Tensor | None = getattr(batch, name)
        if table is None or not layer.has_states:
            return None
        query_lens, _ = self._host_lens(batch)
        if self.validate:
            hits = hits_of(batch)
            lens, size = real_lens(batch, query_lens), self.state_block_sizes[layer.kind]
            # rows of a ring are written again, but not before no token of a step, drafts among them, reads them
            ring = layer.compress_ratio + self.limits.num_speculative_tokens if self.geometry.shared_latent else None
            rows = lens[1] if ring is None else [min(n, ring) for n in lens[1]]
            check_table(f"Batch.{name}", table, lens[0], rows, size)
            check_states(name, table, *lens, layer, size, self.num_state_blocks.get(layer.kind), hits)
            positions = zip(stored_positions(batch), hits, strict=True)
            written = ([p for p in stored if p >= cached] for stored, (_, cached) in positions)
            check_written_once(f"Batch.{name}", "state", record_slots(table, written, size))
        return table

    def _checked_entries(self, batch: Batch, kind: LayerKind, ratio: int) -> tuple[Tensor, list[int]]:
        """Block table of a compressed cache, and a bound of each request's entries."""
        table, records = batch.compressed_block_table, self.compressed_block_tokens // ratio
        if kind is LayerKind.SWA:
            raise ArgumentError("kind", expected="a layer kind with a compressed cache", actual=kind.value)
        if table is None:
            expected = f"a table for {kind.value} layers"
            raise ArgumentError("Batch.compressed_block_table", expected=expected, actual=None)
        query_lens, seq_lens = self._host_lens(batch)
        if self.validate:
            query_lens, true_lens = real_lens(batch, query_lens)
            own, name = self._own_entries, f"compressed_block_table{self._of_rank}"
            entries = [own(n // ratio) for n in true_lens]
            check_table(name, table, query_lens, entries, records)
            check_blocks(table, query_lens, entries, records, self.num_compressed_blocks)
            positions = zip(stored_positions(batch), hits_of(batch), strict=True)
            completed = (
                [p // ratio for p in stored if p >= hit and (p + 1) % ratio == 0] for stored, (hit, _) in positions
            )
            written = ([own(e) for e in of_request if own(e + 1) > own(e)] for of_request in completed)
            check_written_once(name, "entry", record_slots(table, written, records))
        return table, [n // ratio for n in seq_lens]

    def _own_entries(self, count: int) -> int:
        """How many of the first `count` entries of a sequence are in the cache of this rank."""
        return count

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
        self.builder_ops.compute_global_topk_indices_and_lens(numbers, visible, request[:n], table, records, out=out)
        lens[n:].zero_()
        return rows, lens[:n]

    def _host_lens(self, batch: Batch) -> tuple[list[int], list[int]]:
        """Query and sequence lengths on the host, checked against each other, `slot_mapping` and the limits."""
        check_batch(batch)
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

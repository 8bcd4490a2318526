"""Checks of a batch by `MetadataBuilder` that read tables and slots; a builder that does not validate skips most."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from dsv4attn.core.argument_checks import check_count, check_type
from dsv4attn.core.cache.layout import KVCacheLayout
from dsv4attn.core.cache.selected_keys import PageTable
from dsv4attn.core.contract.limits import Limits
from dsv4attn.core.metadata.metadata import Batch
from dsv4attn.core.model.geometry import ModelGeometry
from dsv4attn.core.model.layer_geometry import LayerGeometry
from dsv4attn.core.tensorspec import usable_device
from dsv4attn.core.torch_ops import index_ops as indices
from dsv4attn.errors import ArgumentError

__all__ = [
    "check_batch",
    "check_blocks",
    "check_copies",
    "check_slots",
    "check_slots_in_blocks",
    "check_states",
    "check_table",
    "check_windows",
    "check_written_once",
    "count_tokens",
    "planned",
    "real_lens",
    "record_slots",
    "stored_positions",
]


def planned(
    geometry: ModelGeometry, limits: Limits, device: torch.device | str, layout: KVCacheLayout | None = None
) -> tuple[ModelGeometry, Limits, torch.device]:
    """What memory is planned for, with torch's device. Raises ArgumentError for arguments of another type."""
    check_type("geometry", geometry, ModelGeometry, cure="pass ModelGeometry.preset('flash') or .from_config(path)")
    check_type("limits", limits, Limits, cure="pass Limits(max_num_reqs, max_num_batched_tokens, max_model_len)")
    if layout is not None:
        check_type("kv_layout", layout, KVCacheLayout, cure="pass KVCacheLayout.fp8_ds_mla() or .rows(...)")
    return geometry, limits, usable_device(device)


def check_batch(batch: object) -> None:
    """Raise ArgumentError unless that is a batch."""
    check_type("batch", batch, Batch, cure="pass Batch(...), or what CacheManager.batch(requests) returns")


def count_tokens(requests: Any) -> int:  # noqa: ANN401 - what a caller passes, not checked yet
    """Tokens of all requests. Raises ArgumentError unless they are pairs of a sequence and a number of tokens."""
    several = isinstance(requests, Sequence) and not isinstance(requests, str)
    if not several or not all(isinstance(r, Sequence) and len(r) == 2 for r in requests):
        shown = [type(r).__name__ for r in requests] if several else repr(requests)
        raise ArgumentError("requests", expected="a list of (sequence, number of tokens)", actual=shown)
    return sum(check_count("tokens of a sequence", count, 0) for _, count in requests)


def real_lens(batch: Batch, query_lens: list[int]) -> tuple[list[int], list[int]]:
    """Query tokens of each request up to its last real one, and its length with these: what the step reads and writes.

    Values of the device, as `seq_lens_cpu` may be an upper bound, checked by `check_copies`. A request of padding alone
    has no query tokens.
    """
    check_copies(batch, query_lens)
    seq_lens, padding = batch.seq_lens.tolist(), batch.slot_mapping[: sum(query_lens)] < 0
    if not bool(padding.any()):
        return query_lens, seq_lens
    counts, lens = list[int](), list[int]()
    for query_len, seq_len, part in zip(query_lens, seq_lens, padding.split(query_lens), strict=True):
        real = (~part).nonzero()
        counts.append(int(real[-1]) + 1 if len(real) else 0)
        lens.append(seq_len - query_len + counts[-1])
    return counts, lens


def check_table(name: str, table: Tensor, query_lens: list[int], records: list[int], per_block: int) -> None:
    """Check that a block table has a column for each record of every request that takes part."""
    for i, (query_len, count) in enumerate(zip(query_lens, records, strict=True)):
        if query_len and count > table.shape[1] * per_block:
            expected = f"at least {-(-count // per_block)} columns for the {count} records of request {i}"
            actual = f"{table.shape[1]} columns of {per_block} records"
            raise ArgumentError(name, expected=expected, actual=actual, hint="widen the block table")


def check_copies(batch: Batch, query_lens: list[int]) -> None:
    """Find lengths on the device that differ from their copies on the host."""
    starts, copy = batch.query_start_loc.tolist(), batch.query_start_loc_cpu.tolist()
    if starts != copy:
        raise ArgumentError("query_start_loc", expected=f"what query_start_loc_cpu holds, {copy}", actual=starts)
    lens, bounds = batch.seq_lens.tolist(), batch.seq_lens_cpu.tolist()
    for i, (query_len, seq_len, bound) in enumerate(zip(query_lens, lens, bounds, strict=True)):
        if not query_len <= seq_len <= bound:
            expected = f"{query_len} (its query tokens) to {bound} (seq_lens_cpu)"
            raise ArgumentError(f"seq_lens[{i}]", expected=expected, actual=seq_len)


def check_windows(
    batch: Batch, phases: Iterable[tuple[slice, bool]], window: int, block_size: int, num_blocks: int | None
) -> None:
    """Find blocks under a window that do not exist.

    phases: the tokens of each phase, and whether their windows are causal. num_blocks: of the window cache, or None.
    """
    table, capacity = batch.block_table, None if num_blocks is None else num_blocks * block_size
    for part, causal in phases:
        request = indices.token_to_req_indices(batch.query_start_loc, part.stop)[part]
        valid = torch.zeros(request.shape, dtype=torch.bool, device=request.device)
        valid[:] = batch.slot_mapping[part] >= 0
        lengths = batch.query_start_loc, batch.seq_lens, request, part.start, window
        start, end = indices.window_spans(*lengths, replay_start=batch.replay_start, causal=causal)
        width = max(int((end - start).max()), 0) if request.numel() else 0
        slots, lens = indices.window_indices(start, end, valid, request, PageTable(table, block_size), width)
        wrong = outside(slots, capacity) & (torch.arange(width, device=slots.device) < lens[:, None])
        if bool(wrong.any()):
            token, column = wrong.nonzero()[0].tolist()
            i, place = int(request[token]), int(start[token]) + column
            expected = f"a block in [0, {bound_of(num_blocks)}) for position {place}, which a query can see"
            column = place // block_size
            actual = int(table[i, column]) if column < table.shape[1] else f"{table.shape[1]} columns"
            raise ArgumentError(f"block_table[{i}, {column}]", expected=expected, actual=actual)


def check_slots(batch: Batch, tokens: int, capacity: int | None) -> None:
    """Find slots outside the window cache, and slots of padding past the tokens of the batch."""
    if capacity is not None and bool((batch.slot_mapping >= capacity).any()):
        t = int((batch.slot_mapping >= capacity).nonzero()[0])
        expected = f"below the {capacity} slots of the window cache, or negative for padding"
        raise ArgumentError(f"slot_mapping[{t}]", expected=expected, actual=int(batch.slot_mapping[t]))
    stale = batch.slot_mapping[tokens:] >= 0
    if bool(stale.any()):
        t = tokens + int(stale.nonzero()[0])
        expected = f"a negative slot past the {tokens} tokens of the batch"
        hint = "fill what pads the batch with -1, or a key of padding is written to this slot"
        raise ArgumentError(f"slot_mapping[{t}]", expected=expected, actual=int(batch.slot_mapping[t]), hint=hint)


def check_slots_in_blocks(batch: Batch, tokens: int, block_size: int) -> None:
    """Find slots of real tokens that are not those of their positions in the blocks of the window table."""
    starts, slots = batch.query_start_loc, batch.slot_mapping[:tokens].long()
    request = indices.token_to_req_indices(starts, tokens)
    positions = indices.positions_of(starts, batch.seq_lens, request)
    columns = (positions // block_size).clamp(0, max(batch.block_table.shape[1] - 1, 0))
    blocks = batch.block_table[request, columns].long() if batch.block_table.shape[1] else torch.full_like(slots, -1)
    wrong = (slots >= 0) & (slots != blocks * block_size + positions % block_size)
    if bool(wrong.any()):
        t = int(wrong.nonzero()[0])
        i, place, block = int(request[t]), int(positions[t]), int(blocks[t])
        slot, column = block * block_size + place % block_size, place // block_size
        expected = f"{slot}, the slot of position {place} of request {i} in block {block} of block_table[{i}, {column}]"
        if block < 0:
            expected = f"a block in block_table[{i}, {column}] for position {place} of request {i}, which is {block}"
        hint = "a slot is block * block size + position % block size; -1 for a token that is not stored"
        raise ArgumentError(f"slot_mapping[{t}]", expected=expected, actual=int(slots[t]), hint=hint)


def check_written_once(name: str, what: str, slots: Iterable[Iterable[int]]) -> None:
    """Find a slot that two requests write. Negative slots are not written.

    name: of the argument that says where they write. what: what the slots hold. slots: those of each request.
    """
    writers: dict[int, int] = {}
    for i, of_request in enumerate(slots):
        for slot in of_request:
            if slot >= 0 and (writer := writers.setdefault(slot, i)) != i:
                expected = f"each {what} of this step in a slot of its own"
                actual = f"slot {slot} for requests {writer} and {i}"
                hint = "requests may share pages that the step only reads; each writes to pages of its own"
                raise ArgumentError(name, expected=expected, actual=actual, hint=hint)


def stored_positions(batch: Batch) -> list[list[int]]:
    """Positions of the tokens of each request that are stored: those that are not padding."""
    slots, starts, seq_lens = batch.slot_mapping.tolist(), batch.query_start_loc_cpu.tolist(), batch.seq_lens.tolist()
    return [
        [seq_len - end + t for t in range(start, end) if slots[t] >= 0]
        for (start, end), seq_len in zip(pairwise(starts), seq_lens, strict=True)
    ]


def record_slots(table: Tensor, numbers: Iterable[list[int]], size: int) -> Iterator[list[int]]:
    """Slots of the records with these numbers of each request, whose pages of `size` records a table names.

    A table with fewer columns than a request has pages is a ring.
    """
    for row, of_request in zip(table, numbers, strict=True):
        records = torch.tensor(of_request, dtype=torch.int64, device=table.device)
        yield (row[records // size % max(len(row), 1)].long() * size + records % size).tolist()


def check_blocks(
    table: Tensor, query_lens: list[int], entries: list[int], records: int, num_blocks: int | None
) -> None:
    """Find blocks outside a compressed cache among those that hold visible entries."""
    for i, (query_len, count) in enumerate(zip(query_lens, entries, strict=True)):
        used = table[i, : -(-count // records)] if query_len else table[i, :0]
        wrong = outside(used, num_blocks)
        if bool(wrong.any()):
            j, bound = int(wrong.nonzero()[0]), bound_of(num_blocks)
            expected = f"a block in [0, {bound}) for entries {j * records} and on"
            raise ArgumentError(f"compressed_block_table[{i}, {j}]", expected=expected, actual=int(used[j]))


def check_states(
    name: str,
    table: Tensor,
    query_lens: list[int],
    seq_lens: list[int],
    layer: LayerGeometry,
    size: int,
    bound: int | None,
    hits: list[tuple[int, int]],
) -> None:
    """Check that every block of compressor states exists that this step reads or writes.

    size: states in a block. hits: ends of the prefix hit of each request, and of its states: entries and states of
    tokens below them are not written, so that their blocks need not exist.
    """
    for i, (query_len, seq_len, (hit, cached)) in enumerate(zip(query_lens, seq_lens, hits, strict=True)):
        start = seq_len - query_len
        # the first state that an entry reads that is stored, and the first one that is written
        used = [layer.first_state(max(start, hit))] if seq_len > hit else []
        used += [max(start, cached)] if seq_len > cached else []
        if not query_len or not used:
            continue
        first, end, columns = min(used) // size, -(-seq_len // size), table.shape[1]
        # only a ring has fewer columns than a request has blocks
        blocks = table[i, first:end] if end <= columns else table[i].roll(-(first % columns))[: end - first]
        wrong = outside(blocks, bound)
        if bool(wrong.any()):
            j = first + int(wrong.nonzero()[0])
            expected = f"a block in [0, {bound_of(bound)}) for the states of positions {j * size} and on"
            place, hint = j % columns, ""
            if j * size < hit:
                hint = "an entry after the prefix hit reads them; if they are lost, see Batch.num_cached_states"
            raise ArgumentError(f"{name}[{i}, {place}]", expected=expected, actual=int(table[i, place]), hint=hint)


def outside(values: Tensor, bound: int | None) -> Tensor:
    """Which values are not in [0, bound); without a bound, which are negative."""
    # in 64 bits: torch compares int32 with what is left of a bound in 32 bits
    return (values < 0) if bound is None else (values < 0) | (values.long() >= bound)


def bound_of(num_blocks: int | None) -> int | str:
    """A number of blocks, for errors; its name if it is not known."""
    return "num_blocks" if num_blocks is None else num_blocks

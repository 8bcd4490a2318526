"""Kernels of the metadata builder, once a step: maps of tokens, windows, lengths, and slots of new entries."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from dsv4attn.backends._triton.index_ops.kernels_common import request_of, slots_of
from dsv4attn.backends._triton.launching.runtime import stable_kernel


@stable_kernel
def token_maps_kernel(
    token_to_req,  # [num_tokens] int32
    is_valid,  # [num_tokens] bool
    starts,  # [num_reqs + 1] int32
    slot_mapping,  # [num_slots] int64
    num_tokens: tl.int32, num_slots: tl.int32, starts_stride: tl.int64,
    slot_stride: tl.int64, num_reqs: tl.int32, depth: tl.int32,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: (T / BLOCK,). Request of each real token, -1 for others: those of no request, and those without a slot."""
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    request = request_of(token, starts, starts_stride, 0, num_reqs, depth)
    slot = tl.load(slot_mapping + token.to(tl.int64) * slot_stride, mask=token < num_slots, other=-1)
    request = tl.where(slot >= 0, request, -1)
    tl.store(token_to_req + token, request, mask=token < num_tokens)
    tl.store(is_valid + token, request >= 0, mask=token < num_tokens)


@triton.jit
def positions_of(token, request, starts, starts_stride, seq_lens, seq_stride, num_reqs):
    """Absolute position (int64) of tokens, of any shape; the token number itself if there is no such request.

    starts: [num_reqs + 1] int32. seq_lens: [num_reqs] int32.
    """
    known = (request >= 0) & (request < num_reqs)
    end = tl.load(starts + (request + 1).to(tl.int64) * starts_stride, mask=known, other=0)
    seq_len = tl.load(seq_lens + request.to(tl.int64) * seq_stride, mask=known, other=0)
    return token.to(tl.int64) + (seq_len - end)


@stable_kernel
def window_kernel(
    rows,  # [num_rows, width] int32
    lens,  # [num_lens] int32
    token_to_req,  # [num_rows] int32
    is_valid,  # [num_rows] bool
    starts,  # [num_reqs + 1] int32
    seq_lens,  # [num_reqs] int32
    table,  # [num_reqs, num_columns] int32
    replay_start,  # [num_reqs] int32, or None
    rows_stride: tl.int64, num_rows: tl.int32, width: tl.int32, num_lens: tl.int32, first: tl.int32,
    starts_stride: tl.int64, seq_stride: tl.int64, table_stride: tl.int64, table_column_stride: tl.int64,
    num_reqs: tl.int32, num_columns: tl.int32, block_size: tl.int32, window: tl.int32, causal: tl.int32,
    TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Grid: (lens / TOKENS,). Windows of TOKENS rows; row 0 is token `first`. Lengths past the last row are 0.

    causal: 1, or 0 for windows of `window` positions before the request's query tokens, and these.
    """
    row = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    inside = row < num_rows
    request = tl.load(token_to_req + row, mask=inside, other=-1)
    end = positions_of(first + row, request, starts, starts_stride, seq_lens, seq_stride, num_reqs) + 1
    start = end - window
    known = inside & (request >= 0) & (request < num_reqs)
    if causal == 0:
        begin = starts + request.to(tl.int64) * starts_stride
        length = tl.load(seq_lens + request.to(tl.int64) * seq_stride, mask=known, other=0)
        queries = tl.load(begin + starts_stride, mask=known, other=0) - tl.load(begin, mask=known, other=0)
        end = length.to(tl.int64)
        start = end - queries - window
    if replay_start is not None:
        start = tl.maximum(start, tl.load(replay_start + request, mask=known, other=0))
    start = tl.maximum(start, 0)
    valid = tl.load(is_valid + row, mask=inside, other=0)
    count = tl.where(known & (valid != 0), tl.minimum(tl.maximum(end - start, 0), width), 0)
    tl.store(lens + row, count.to(tl.int32), mask=row < num_lens)
    blocks = table + request.to(tl.int64)[:, None] * table_stride
    for column0 in range(0, width, COLUMNS):
        # [TOKENS, COLUMNS]
        column = column0 + tl.arange(0, COLUMNS)[None, :]
        visible = column < count[:, None]
        slot = slots_of(start[:, None] + column, visible, blocks, table_column_stride, num_columns, block_size)
        place = rows + row.to(tl.int64)[:, None] * rows_stride + column
        tl.store(place, slot.to(tl.int32), mask=inside[:, None] & (column < width))


@stable_kernel
def gather_lens_kernel(
    lens,  # [num_reqs] int32
    starts,  # [num_reqs + 1] int32
    seq_lens,  # [num_reqs] int32
    replay_start,  # [num_reqs] int32, or None
    num_reqs: tl.int32, starts_stride: tl.int64, seq_stride: tl.int64, window: tl.int32,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: (n / BLOCK,). Window rows of each request."""
    request = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = request < num_reqs
    start = starts + request.to(tl.int64) * starts_stride
    query_len = tl.load(start + starts_stride, mask=inside, other=0) - tl.load(start, mask=inside, other=0)
    prefix = tl.load(seq_lens + request.to(tl.int64) * seq_stride, mask=inside, other=0) - query_len
    if replay_start is not None:
        prefix = tl.maximum(prefix - tl.load(replay_start + request, mask=inside, other=0), 0)
    seen = tl.minimum(prefix, window - 1) + query_len
    tl.store(lens + request, tl.where(query_len == 0, 0, seen), mask=inside)


@stable_kernel
def cached_kernel(
    is_cached,  # [num_tokens] bool
    token_to_req,  # [num_tokens] int32
    starts,  # [num_reqs + 1] int32
    seq_lens,  # [num_reqs] int32
    num_cached,  # [num_reqs] int32
    num_tokens: tl.int32, starts_stride: tl.int64, seq_stride: tl.int64, cached_stride: tl.int64, num_reqs: tl.int32,
    ratio: tl.int32,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: (T / BLOCK,). Whether each token is below the end of what its request has in a cache."""
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = token < num_tokens
    request = tl.load(token_to_req + token, mask=inside, other=-1)
    known = inside & (request >= 0) & (request < num_reqs)
    position = positions_of(token, request, starts, starts_stride, seq_lens, seq_stride, num_reqs)
    end = tl.load(num_cached + request.to(tl.int64) * cached_stride, mask=known, other=0)
    end = tl.maximum(end, 0) // ratio * ratio
    tl.store(is_cached + token, known & (position < end), mask=inside)


@stable_kernel
def compressed_kernel(
    slots,  # [num_slots] int64
    lens,  # [num_lens] int32
    token_to_req,  # [num_tokens] int32
    is_valid,  # [num_tokens] bool
    starts,  # [num_reqs + 1] int32
    seq_lens,  # [num_reqs] int32
    table,  # [num_reqs, num_columns] int32
    num_tokens: tl.int32, num_slots: tl.int32, num_lens: tl.int32, starts_stride: tl.int64,
    seq_stride: tl.int64, table_stride: tl.int64, table_column_stride: tl.int64,
    num_reqs: tl.int32, num_columns: tl.int32, block_size: tl.int32, ratio: tl.int32,
    rank: tl.int32, size: tl.int32, interleave: tl.int32,
    BLOCK: tl.constexpr, OWNED: tl.constexpr,
):  # fmt: skip
    """Grid: (slots / BLOCK,). Entry that each token completes, and how many it sees; nothing past the last token.

    OWNED: of one rank, which owns entry e if rank = e // interleave % size. Slots of other ranks' entries are -1 then,
    lengths count this rank's entries, and the table has its pages.
    """
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = token < num_tokens
    request = tl.load(token_to_req + token, mask=inside, other=-1)
    position = positions_of(token, request, starts, starts_stride, seq_lens, seq_stride, num_reqs)
    valid = tl.load(is_valid + token, mask=inside, other=0)
    known = (request >= 0) & (request < num_reqs)
    seen = tl.where(known & (valid != 0) & (position >= 0), position + 1, 0)
    completes = (seen > 0) & (seen % ratio == 0)
    # the entry that a token completes, and how many it sees
    entry, count = position // ratio, seen // ratio
    if OWNED:
        cycle = interleave * size
        # entries of whole cycles, and those of the last one that are of this rank's run
        rest = tl.minimum(tl.maximum(count % cycle - rank * interleave, 0), interleave)
        # the entry that is completed is the last one seen; if it is this rank's, it has the last of its numbers
        completes &= (count - 1) // interleave % size == rank
        count = count // cycle * interleave + rest
        entry = count - 1
    blocks = table + request.to(tl.int64) * table_stride
    slot = slots_of(entry, completes, blocks, table_column_stride, num_columns, block_size)
    tl.store(slots + token, slot, mask=token < num_slots)
    tl.store(lens + token, count.to(tl.int32), mask=token < num_lens)

"""Functions that several index kernels call: requests of tokens, slots of records, lengths of a part of a request."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def request_of(token, starts, stride, base, num_reqs, depth):
    """Request (int32) of tokens (int32, any shape): the last that starts at or before it; -1 for tokens of none.

    starts: [num_reqs + 1] int32 token numbers, `stride` apart, ascending; `base` is taken off each. A search by
    halving: the request looked for is in [low, high), whatever the numbers are.
    """
    low = token * 0
    high = low + num_reqs
    for _ in range(depth):
        middle = (low + high) // 2
        reached = tl.load(starts + middle.to(tl.int64) * stride) - base <= token
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle)
    begin, end = tl.load(starts) - base, tl.load(starts + num_reqs.to(tl.int64) * stride) - base
    return tl.where((token >= begin) & (token < end), low, -1)


@triton.jit
def slots_of(records, visible, blocks, stride, num_columns, block_size):
    """Slots (int64) of record numbers (any shape); -1 where not visible, past the table, or where the block is gone.

    visible implies records >= 0. blocks: pointers, of the records' shape or one for all, to the [num_columns] int32
    blocks of each record's request, `stride` apart.
    """
    # a record past 2^31 - 1 is past every table, and 32 bits divide much faster
    visible = visible & (records <= 0x7FFFFFFF)
    record = tl.where(visible, records, 0).to(tl.int32)
    column = record // block_size
    block = tl.load(blocks + column.to(tl.int64) * stride, mask=visible & (column < num_columns), other=-1)
    # in 64 bits: a garbage block times the block size may wrap around to a slot that exists
    slot = block.to(tl.int64) * block_size + record % block_size
    return tl.where((block >= 0) & (slot <= 0x7FFFFFFF), slot, -1)


@triton.jit
def cut_lengths(seq_len, gather_len, tail, slice_tokens, window):
    """(seq_len, gather_len) of a request (int32) as far as a chunk has it, see `keys.ChunkRows`.

    slice_tokens: query tokens of a part of the request, `tail` of them come after it; -1 with tail 0 for all of it.
    """
    cut = tl.minimum(tl.maximum(gather_len - tail, 0), slice_tokens + window - 1)
    return seq_len - tail, tl.where(slice_tokens >= 0, cut, gather_len)

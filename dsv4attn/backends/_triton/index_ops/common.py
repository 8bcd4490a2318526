"""What index kernels have in common: whose a token is, where a record stands, and the forms of such a kernel."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import triton
import triton.language as tl

from dsv4attn.backends._triton.compiling.variant import Variant

__all__ = ["BLOCK", "depth_of", "request_of", "slots_of", "variant_of"]

BLOCK = 1024
"""Columns a program looks at together; wider rows take several rounds."""

_INTEGERS = {"tl.int32", "tl.int64"}


def variant_of(kernel: Any, constants: Mapping[str, Any], *absent: str, num_warps: int = 4, **pointers: str) -> Variant:
    """Form of an index kernel. absent: pointers that are None. pointers: types of those that are not to int32."""
    types = {
        p.name: "int" if p.annotation in _INTEGERS else "none" if p.name in absent else pointers.get(p.name, "*i32")
        for p in inspect.signature(kernel.fn).parameters.values()
        if p.name not in constants
    }
    return Variant(kernel, types, constants, num_warps=num_warps)


def depth_of(num_reqs: int) -> int:
    """Halvings after which `request_of` has one request left."""
    return max(num_reqs - 1, 0).bit_length()


@triton.jit
def request_of(token, starts, stride, base, num_reqs, depth):
    """Request (int32) of tokens (int32, any shape): the last that starts at or before it; 0 behind the last request.

    starts: num_reqs + 1 token numbers, `stride` apart, ascending; `base` is taken off each. A search by halving: the
    request looked for is in [low, high), whatever the numbers are.
    """
    low = token * 0
    high = low + num_reqs
    for _ in range(depth):
        middle = (low + high) // 2
        reached = tl.load(starts + middle.to(tl.int64) * stride) - base <= token
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle)
    end = tl.load(starts + num_reqs.to(tl.int64) * stride) - base
    return tl.where(token < end, low, 0)


@triton.jit
def slots_of(records, visible, blocks, stride, num_columns, block_size):
    """Slots (int64) of record numbers (any shape); -1 where not visible, past the table, or where the block is gone.

    visible implies records >= 0. blocks: pointer to block 0 of each record's request; `stride` leads to the next.
    """
    # a record past 2^31 - 1 is past every table, and 32 bits divide much faster
    visible = visible & (records <= 0x7FFFFFFF)
    record = tl.where(visible, records, 0).to(tl.int32)
    column = record // block_size
    block = tl.load(blocks + column.to(tl.int64) * stride, mask=visible & (column < num_columns), other=-1)
    # in 64 bits: a garbage block times the block size may wrap around to a slot that exists
    slot = block.to(tl.int64) * block_size + record % block_size
    return tl.where((block >= 0) & (slot <= 0x7FFFFFFF), slot, -1)

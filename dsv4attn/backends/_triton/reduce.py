"""What follows attention where several programs shared a row: its parts are added up.

Always in their order, so that the same cut gives the same bits.
"""

from __future__ import annotations

import triton.language as tl

from dsv4attn.backends._triton import lang
from dsv4attn.backends._triton.attention import LN2, LOG2E, NOTHING
from dsv4attn.backends._triton.insert import angles_of, rotate
from dsv4attn.backends._triton.runtime import stable_kernel


@stable_kernel
def reduce(
    part,
    part_lse,
    part_max,
    out,
    lse,
    max_logits,
    sink,
    positions,
    table,
    out_token: tl.int64,
    out_head: tl.int64,
    lse_token: tl.int64,
    lse_head: tl.int64,
    max_token: tl.int64,
    max_head: tl.int64,
    splits: tl.int32,
    table_stride: tl.int64,
    num_positions: tl.int64,
    empty_lse: tl.float32,
    H: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    ROPE: tl.constexpr,
    UNIT: tl.constexpr,
    EXACT_CASTS: tl.constexpr,
):
    """Grid: (tokens x H,). Adds the parts of a row up, split after split, and applies the sink.

    positions, table: [tokens] int64 and cosines and sines [num_positions, ROPE], to undo the rotation too; else None.
    """
    PART: tl.constexpr = 16 if D % 4 == 0 else 4  # bytes to which parts are aligned
    WIDE: tl.constexpr = UNIT * (out.dtype.element_ty.primitive_bitwidth // 8)
    pid = tl.program_id(0).to(tl.int64)
    token, head = pid // H, pid % H
    column = tl.arange(0, DP)
    largest = tl.full((), NOTHING, tl.float32)
    acc, total = tl.zeros([DP], tl.float32), tl.zeros((), tl.float32)
    for split in range(splits):
        row = (token * splits + split) * H + head
        its_lse = tl.load(part_lse + row)
        # a part without keys was never written
        there = column < tl.where(its_lse > -float("inf"), D, 0)
        values = tl.load(tl.multiple_of(part + row * D, PART) + column, mask=there, other=0.0)
        grown = tl.maximum(largest, its_lse)
        shrink, weight = tl.exp2(largest - grown), tl.exp2(its_lse - grown)
        acc = acc * shrink + values * weight
        total = total * shrink + weight
        largest = grown
    empty = total == 0.0
    factor = 1.0 / total
    if sink is not None:
        factor = 1.0 / (total + tl.exp2(tl.load(sink + head) * LOG2E - largest))
    at = token * lse_token + head * lse_head
    if lse is not None:
        tl.store(lse + at, tl.where(empty, empty_lse, (largest + tl.log2(total)) * LN2))
    if max_logits is not None:
        top = tl.full((), -float("inf"), tl.float32)
        for split in range(splits):
            top = tl.maximum(top, tl.load(part_max + (token * splits + split) * H + head))
        tl.store(max_logits + (token * max_token + head * max_head), top * LN2)
    acc *= tl.where(empty, 0.0, factor)
    if table is not None:
        # rounded before it is rotated, as it would be if another kernel did it
        acc = lang.round_to(acc, out.dtype.element_ty, EXACT_CASTS).to(tl.float32)
        even, odd = tl.split(tl.reshape(acc, [DP // 2, 2]))
        pair = tl.arange(0, DP // 2) - (D - ROPE) // 2
        angle, turns = angles_of(positions + token, table, table_stride, num_positions) + pair, pair >= 0
        turns &= pair < ROPE // 2
        cos = tl.load(angle, mask=turns, other=1.0)
        sin = tl.load(angle + ROPE // 2, mask=turns, other=0.0)
        even, odd = rotate(even, odd, cos, -sin)
        acc = tl.reshape(tl.join(even, odd), [DP])
    result = lang.round_to(acc, out.dtype.element_ty, EXACT_CASTS)
    to = tl.multiple_of(out + (token * out_token * UNIT + head * out_head * UNIT), WIDE)
    tl.store(to + column, result, mask=column < D)

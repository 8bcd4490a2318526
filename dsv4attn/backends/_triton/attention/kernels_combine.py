"""The kernel that combines splits, where several programs of `attention` shared a row.

Splits are combined a few at a time, always the same ones together, so that the same split gives the same bits. Splits
without keys count as zeros, and a result's bits do not depend on how many of them follow the last split with keys.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton.language as tl

from dsv4attn.backends._triton import numerics
from dsv4attn.backends._triton.launching.kernels_pdl import wait_then_launch_dependents
from dsv4attn.backends._triton.launching.runtime import stable_kernel
from dsv4attn.backends._triton.numerics import LN2, LOG2E, NOTHING, angles_of, rotate


@stable_kernel
def reduce(
    part,  # [T, splits, H, D] fp32
    part_lse,  # [T, splits, H] fp32, base 2
    part_max,  # [T, splits, H] fp32, base 2; None where max_logits is
    counts,  # [T] int32, or None
    out,  # [T, H, D]
    lse,  # [T, H] fp32, or None
    max_logits,  # [T, H] fp32, or None
    sink,  # [H] fp32, or None
    positions,  # [T] int64, or None
    table,  # [num_positions, ROPE] fp32, cosines before sines, or None
    out_token: tl.int64, out_head: tl.int64, lse_token: tl.int64, lse_head: tl.int64,
    max_token: tl.int64, max_head: tl.int64, splits: tl.int32,
    table_stride: tl.int64, num_positions: tl.int64, empty_lse: tl.float32,
    H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, ROPE: tl.constexpr,
    UNIT: tl.constexpr, N: tl.constexpr, EXACT_CASTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (T x H,). Combines the splits of a row, N at a time, and applies the sink.

    counts: how many splits each row has. A row of one split is left as `attention` wrote it.
    out_token, out_head: in UNITs. positions, table: given to undo the rotation too.
    N: splits that are loaded together, a power of two: one after the other, each would wait for the one before it.
    """
    PART: tl.constexpr = 16 if D % 4 == 0 else 4  # bytes to which parts are aligned
    WIDE: tl.constexpr = UNIT * (out.dtype.element_ty.primitive_bitwidth // 8)
    pid = tl.program_id(0).to(tl.int64)
    token, head = pid // H, pid % H
    if sink is not None:
        bias = tl.load(sink + head) * LOG2E
    wait_then_launch_dependents(PDL)
    count = splits
    if counts is not None:
        count = tl.load(counts + token)
        if count <= 1:
            return
    column = tl.arange(0, DP)
    largest, top = tl.full((), NOTHING, tl.float32), tl.full((), -float("inf"), tl.float32)
    acc, total = tl.zeros([DP], tl.float32), tl.zeros((), tl.float32)
    for begin in range(0, count, N):
        split = begin + tl.arange(0, N)
        row = (token * splits + split) * H + head
        its_lse = tl.load(part_lse + row, mask=split < count, other=-float("inf"))
        if max_logits is not None:
            top = tl.maximum(top, tl.max(tl.load(part_max + row, mask=split < count, other=-float("inf")), 0))
        # a part without keys was never written
        there = (its_lse > -float("inf"))[:, None] & (column < D)[None, :]
        values = tl.load(tl.multiple_of(part + row * D, PART)[:, None] + column[None, :], mask=there, other=0.0)
        grown = tl.maximum(largest, tl.max(its_lse, 0))
        shrink, weight = tl.exp2(largest - grown), tl.exp2(its_lse - grown)
        acc = acc * shrink + tl.sum(values * weight[:, None], 0)
        total = total * shrink + tl.sum(weight, 0)
        largest = grown
    empty = total == 0.0
    factor = 1.0 / total
    if sink is not None:
        factor = 1.0 / (total + tl.exp2(bias - largest))
    at = token * lse_token + head * lse_head
    if lse is not None:
        tl.store(lse + at, tl.where(empty, empty_lse, (largest + tl.log2(total)) * LN2))
    if max_logits is not None:
        tl.store(max_logits + (token * max_token + head * max_head), numerics.or_nan(top, total) * LN2)
    acc *= tl.where(empty, 0.0, factor)
    if table is not None:
        # rounded before it is rotated, as it would be if another kernel did it
        acc = numerics.round_to(acc, out.dtype.element_ty, EXACT_CASTS).to(tl.float32)
        even, odd = tl.split(tl.reshape(acc, [DP // 2, 2]))
        pair = tl.arange(0, DP // 2) - (D - ROPE) // 2
        angle, turns = angles_of(positions + token, table, table_stride, num_positions) + pair, pair >= 0
        turns &= pair < ROPE // 2
        cos = tl.load(angle, mask=turns, other=1.0)
        sin = tl.load(angle + ROPE // 2, mask=turns, other=0.0)
        even, odd = rotate(even, odd, cos, -sin)
        acc = tl.reshape(tl.join(even, odd), [DP])
    result = numerics.round_to(acc, out.dtype.element_ty, EXACT_CASTS)
    to = tl.multiple_of(out + (token * out_token * UNIT + head * out_head * UNIT), WIDE)
    tl.store(to + column, result, mask=column < D)

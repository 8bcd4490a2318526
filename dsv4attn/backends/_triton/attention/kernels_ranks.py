"""Kernels of attention over ranks: what a rank sends is packed, and what all ranks sent is merged."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton.language as tl

from dsv4attn.backends._triton import numerics
from dsv4attn.backends._triton.launching.runtime import stable_kernel


@stable_kernel
def pack_part_kernel(
    out,  # [T, H, D]
    lse,  # [T, H] fp32
    sent,  # [T, H, D] like out, contiguous
    sent_lse,  # [T, H] fp32, contiguous
    out_token: tl.int64, out_head: tl.int64, lse_token: tl.int64, lse_head: tl.int64,
    H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Grid: (T x H,). Copies a row of out, and its lse. out_token, out_head: in UNITs."""
    WIDE: tl.constexpr = UNIT * (out.dtype.element_ty.primitive_bitwidth // 8)
    row = tl.program_id(0).to(tl.int64)
    token, head = row // H, row % H
    column = tl.arange(0, DP)
    source = tl.multiple_of(out + (token * out_token * UNIT + head * out_head * UNIT), WIDE)
    target = tl.multiple_of(sent + row * D, WIDE)
    tl.store(target + column, tl.load(source + column, mask=column < D), mask=column < D)
    tl.store(sent_lse + row, tl.load(lse + (token * lse_token + head * lse_head)))


@stable_kernel
def merge_parts_kernel(
    parts,  # [R, T, H, D], contiguous but for the first dimension
    part_lse,  # [R, T, H] fp32, likewise
    out,  # [T, H, D] like parts
    lse,  # [T, H] fp32
    sink,  # [H] fp32, or None
    part_rank: tl.int64, lse_rank: tl.int64, out_token: tl.int64, out_head: tl.int64,
    lse_token: tl.int64, lse_head: tl.int64, sink_head: tl.int64, ranks: tl.int32,
    H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, UNIT: tl.constexpr, N: tl.constexpr,
    EXACT_CASTS: tl.constexpr,
):  # fmt: skip
    """Grid: (T x H,). Sums a row of all ranks in their order, then applies the sink.

    part_rank, out_token, out_head: in UNITs. N: ranks that are loaded before the first of them is added.
    """
    WIDE: tl.constexpr = UNIT * (out.dtype.element_ty.primitive_bitwidth // 8)
    row = tl.program_id(0).to(tl.int64)
    token, head = row // H, row % H
    column = tl.arange(0, DP)
    top = tl.full((), -float("inf"), tl.float32)
    for begin in range(0, ranks, N):
        rank = begin + tl.arange(0, N)
        its = tl.load(part_lse + rank * lse_rank + row, mask=rank < ranks, other=-float("inf"))
        top = tl.maximum(top, tl.max(its, 0))
    # where no rank had a key the difference would be inf - inf
    top = tl.where(top == -float("inf"), 0.0, top)
    acc, total = tl.zeros([DP], tl.float32), tl.zeros((), tl.float32)
    for begin in range(0, ranks, N):
        for i in tl.static_range(N):
            rank = begin + i
            its = tl.load(part_lse + rank * lse_rank + row, mask=rank < ranks, other=-float("inf"))
            weight = tl.exp(its - top)
            # a part of weight zero may hold NaN, and is not read
            counts = column < tl.where(weight == 0.0, 0, D)
            part = tl.multiple_of(parts + (rank * part_rank * UNIT + row * D), WIDE)
            acc += tl.load(part + column, mask=counts, other=0.0).to(tl.float32) * weight
            total += weight
    empty = total == 0.0
    merged = tl.where(empty, 0.0, acc / total)
    whole = tl.log(total) + top
    tl.store(lse + (token * lse_token + head * lse_head), tl.where(empty, -float("inf"), whole))
    if sink is not None:
        share = 1.0 / (1.0 + tl.exp(tl.load(sink + head * sink_head) - whole))
        merged *= tl.where(empty, 0.0, share)
    result = numerics.round_to(merged, out.dtype.element_ty, EXACT_CASTS)
    target = tl.multiple_of(out + (token * out_token * UNIT + head * out_head * UNIT), WIDE)
    tl.store(target + column, result, mask=column < D)

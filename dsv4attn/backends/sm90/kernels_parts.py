"""The kernel that combines the parts of a row in the order of their programs."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="assignment,unreachable,attr-defined"

from __future__ import annotations

import triton.language as tl

from dsv4attn.backends._triton import numerics
from dsv4attn.backends._triton.launching.kernels_dependent import take_over
from dsv4attn.backends._triton.launching.runtime import stable_kernel
from dsv4attn.backends._triton.numerics import LN2, LOG2E, NOTHING


@stable_kernel
def combine_parts(
    part,  # [programs, 2, 64, 512] fp16, in the order of `place_in_part`
    part_scale,  # [programs, 2, 64, 2] bf16
    part_lse,  # [programs, 2, 64] fp32
    part_max,  # [programs, 2, 64] fp32, or None
    table,  # [lines, 2] int32
    out,  # [T, H, 512] bf16
    lse,  # [T, H] fp32, or None
    max_logits,  # [T, H] fp32, or None
    sink,  # [H] fp32, or None
    out_token: tl.int64, out_head: tl.int64,
    lse_token: tl.int64, lse_head: tl.int64, max_token: tl.int64, max_head: tl.int64,
    empty_lse: tl.float32, by_program: tl.int32, first_columns: tl.int32,
    H: tl.constexpr, R: tl.constexpr, N: tl.constexpr, EXACT_CASTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (lines of table x sixteens of heads x 16 / R,). Rows that are whole are left as their attention wrote them.

    Arguments are as the fields of `Results` have them. The first part of a row is side 1 of its first program, and all
    others are side 0 of theirs. by_program: whether programs of attention have a line of table each, or rows; see
    `store_split`. first_columns: of the first scales. R: heads of a program, 2 to 16: of 16 in a row, R / 2 of the
    first eight, and those that lie beside them in a part. N: parts that are loaded together.
    """
    tl.static_assert((R > 1) & (16 % R == 0))
    BLOCKS: tl.constexpr = (H + 63) // 64
    PIECES: tl.constexpr = 16 // R
    EACH: tl.constexpr = (H + 15) // 16 * PIECES
    pid = tl.program_id(0)
    line, sixteen, piece = pid // EACH, pid % EACH // PIECES, pid % PIECES
    # of each 8 columns, what lies in a row in a part: of R / 2 pairs of heads, 16 numbers each
    group, beside = tl.arange(0, 64), tl.arange(0, 8 * R)
    first_head = sixteen * 16 + piece * (R // 2)
    head = first_head + beside // 16 + beside // 2 % 2 * 8
    live, of_first = head < H, group * 8 < first_columns
    if sink is not None:
        bias = tl.load(sink + head, mask=live, other=0.0) * LOG2E
    take_over(PDL)
    other, count = tl.load(table + line * 2), tl.load(table + line * 2 + 1)
    # of a program's heads the first is the lowest: if it is beyond the last, all are
    if (count > 1) & (first_head < H):
        first, token = tl.where(by_program != 0, line, other), tl.where(by_program != 0, other, line).to(tl.int64)
        largest, top = tl.full([8 * R], NOTHING, tl.float32), tl.full([8 * R], -float("inf"), tl.float32)
        acc, total = tl.zeros([64, 8 * R], tl.float32), tl.zeros([8 * R], tl.float32)
        own = sixteen % 4 * 8192 + piece * (8 * R) + group[:, None] * 128 + beside[None, :]
        for i in range(0, count, N):
            # sums are added up behind all loads, so that many are in flight
            values, scales, lses, grown = (), (), (), largest
            for u in tl.static_range(N):
                program = (first + i + u) * BLOCKS + sixteen // 4
                side = (program * 2 + tl.where(i + u == 0, 1, 0)).to(tl.int64)
                at = tl.multiple_of(part + side * (64 * 512), 16) + own
                exists = beside < tl.where(i + u < count, 8 * R, 0)
                values += (tl.load(at, mask=exists[None, :] & (group < 64)[:, None], other=0.0),)
                row, there = side * 64 + head % 64, exists & live
                scales += (tl.load(part_scale.to(tl.pointer_type(tl.int32)) + row, mask=there, other=0),)
                its_lse = tl.load(part_lse + row, mask=there, other=-float("inf"))
                lses += (its_lse,)
                grown = tl.maximum(grown, its_lse)
            shrink = tl.exp2(largest - grown)
            acc, total = acc * shrink[None, :], total * shrink
            for u in tl.static_range(N):
                weight = tl.exp2(lses[u] - grown)
                scale0 = (scales[u] << 16).to(tl.float32, bitcast=True) * weight
                scale1 = (scales[u] & -0x10000).to(tl.float32, bitcast=True) * weight
                acc += values[u].to(tl.float32) * tl.where(of_first[:, None], scale0[None, :], scale1[None, :])
                total += weight
            largest = grown
        # apart, as the loop above has no register for it
        if max_logits is not None:
            for i in range(count):
                side = ((first + i) * BLOCKS + sixteen // 4) * 2 + tl.where(i == 0, 1, 0)
                top = tl.maximum(top, tl.load(part_max + side * 64 + head % 64, mask=live, other=-float("inf")))
        empty = total == 0.0
        factor = 1.0 / total
        if sink is not None:
            factor = 1.0 / (total + tl.exp2(bias - largest))
        acc *= tl.where(empty, 0.0, factor)[None, :]
        once = live & (beside % 16 // 4 * 2 + beside % 2 == 0)
        if lse is not None:
            at = token * lse_token + head.to(tl.int64) * lse_head
            tl.store(lse + at, tl.where(empty, empty_lse, (largest + tl.log2(total)) * LN2), mask=once)
        if max_logits is not None:
            at = token * max_token + head.to(tl.int64) * max_head
            tl.store(max_logits + at, numerics.or_nan(top, total) * LN2, mask=once)
        # heads before columns
        acc = tl.permute(tl.reshape(acc, (64, R // 2, 4, 2, 2)), (3, 1, 0, 2, 4))
        result = numerics.round_to(tl.reshape(acc, (R, 512)), out.dtype.element_ty, EXACT_CASTS)
        r, column = tl.arange(0, R), tl.arange(0, 512)
        row_head = first_head + r % (R // 2) + r // (R // 2) * 8
        to = tl.multiple_of(out + (token * out_token + row_head.to(tl.int64) * out_head), 16)
        tl.store(to[:, None] + column[None, :], result, mask=(row_head < H)[:, None] & (column < 512)[None, :])

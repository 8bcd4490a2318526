"""The kernel that combines the parts of a row in the order of their programs."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="assignment,unreachable,attr-defined"

from __future__ import annotations

import triton.language as tl

from dsv4attn.backends._triton import numerics
from dsv4attn.backends._triton.launching.kernels_pdl import wait_then_launch_dependents
from dsv4attn.backends._triton.launching.runtime import stable_kernel
from dsv4attn.backends._triton.numerics import LN2, LOG2E, NOTHING


@stable_kernel
def combine_parts(
    part,  # [programs, 2, 64, 512] fp16, in the order of `place_in_part`
    part_powers,  # [programs, 2, 8192] uint8
    part_lse,  # [programs, 2, 64] fp32
    part_max,  # [programs, 2, 64] fp32, or None
    table,  # [lines, 2] int32
    out,  # [T, H, 512] bf16
    lse,  # [T, H] fp32, or None
    max_logits,  # [T, H] fp32, or None
    sink,  # [H] fp32, or None
    groups,  # [T + 1, 4] int32 of `list_groups`, or None
    out_token: tl.int64, out_head: tl.int64,
    lse_token: tl.int64, lse_head: tl.int64, max_token: tl.int64, max_head: tl.int64,
    empty_lse: tl.float32, tokens: tl.int32, programs: tl.int32,
    H: tl.constexpr, R: tl.constexpr, N: tl.constexpr, EXACT_CASTS: tl.constexpr, PDL: tl.constexpr,
    GROUP: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Grid: (lines of table x sixteens of heads x 16 / R,). Rows that are whole are left as their attention wrote them.

    Arguments are as the fields of `Results` have them. The first part of a row is side 1 of its first program, and all
    others are side 0 of theirs. programs: of attention, for each block of heads; if they are fewer than rows, they have
    a line of table each, see `store_split`. R: heads of a program, 2 to 16: of 16 in a row, R / 2 of the first eight,
    and those that lie next to them in a part. N: parts that are loaded together. GROUP: above 1 a row is a group of up
    to so many rows of the call, with HEADS heads of each.
    """
    tl.static_assert((R > 1) & (16 % R == 0))
    ALL: tl.constexpr = H if GROUP == 1 else GROUP * HEADS
    BLOCKS: tl.constexpr = (ALL + 63) // 64
    PIECES: tl.constexpr = 16 // R
    EACH: tl.constexpr = (ALL + 15) // 16 * PIECES
    pid = tl.program_id(0)
    line, sixteen, piece = pid // EACH, pid % EACH // PIECES, pid % PIECES
    # of each 16 columns and pair of heads, four eights of numbers in a row, of both heads
    eight, number = tl.arange(0, 64 * R), tl.arange(0, 8)
    first_head = sixteen * 16 + piece * (R // 2)
    head0 = first_head + eight % (2 * R) // 4
    head1 = head0 + 8
    live0, live1, of_first = head0 < ALL, head1 < ALL, (number // 2 % 2 == 0)[None, :]
    if GROUP > 1:
        live0, live1 = live0 & (head0 % HEADS < H), live1 & (head1 % HEADS < H)
    if sink is not None:
        bias0 = tl.load(sink + head0 % HEADS, mask=live0, other=0.0) * LOG2E
        bias1 = tl.load(sink + head1 % HEADS, mask=live1, other=0.0) * LOG2E
    wait_then_launch_dependents(PDL)
    if groups is not None:
        tokens = tl.load(groups + tokens * 4)
    other, count = tl.load(table + line * 2), tl.load(table + line * 2 + 1)
    by_program = tokens > programs
    if groups is not None:
        count = tl.where(by_program | (line < tokens), count, 0)
    # of a program's heads the first is the lowest: if it is beyond the last, all are
    if (count > 1) & (first_head < ALL):
        first, token = tl.where(by_program, line, other), tl.where(by_program, other, line).to(tl.int64)
        largest0 = tl.full([64 * R], NOTHING, tl.float32)
        total0 = tl.zeros([64 * R], tl.float32)
        largest1, total1, acc = largest0, total0, tl.zeros([64 * R, 8], tl.float32)
        own = sixteen % 4 * 1024 + piece * (2 * R) + eight // (2 * R) * 32 + eight % (2 * R)
        # not known to lie in a row: each thread is to load those of its own numbers
        spread = tl.max_contiguous(own, [1])
        for i in range(0, count, N):
            # sums are added up after all loads, so that many are in flight
            values, powers0, powers1, lses0, lses1, grown0, grown1 = (), (), (), (), (), largest0, largest1
            for u in tl.static_range(N):
                program = (first + i + u) * BLOCKS + sixteen // 4
                side = (program * 2 + tl.where(i + u == 0, 1, 0)).to(tl.int64)
                exists = eight < tl.where(i + u < count, 64 * R, 0)
                at = tl.multiple_of(part + side * (64 * 512), 16) + (own * 8)[:, None] + number[None, :]
                values += (tl.load(at, mask=exists[:, None] & (number < 8)[None, :], other=0.0),)
                at = part_powers.to(tl.pointer_type(tl.int16)) + side * (32 * 128) + spread
                both = tl.load(at, mask=exists & live0, other=0).to(tl.int32)
                powers0 += ((both & 0xFF) << 23,)
                powers1 += ((both >> 8 & 0xFF) << 23,)
                at = part_lse + side * 64
                lses0 += (tl.load(at + head0 % 64, mask=exists & live0, other=-float("inf")),)
                lses1 += (tl.load(at + head1 % 64, mask=exists & live1, other=-float("inf")),)
                grown0, grown1 = tl.maximum(grown0, lses0[u]), tl.maximum(grown1, lses1[u])
            shrink0, shrink1 = tl.exp2(largest0 - grown0), tl.exp2(largest1 - grown1)
            acc *= tl.where(of_first, shrink0[:, None], shrink1[:, None])
            total0, total1 = total0 * shrink0, total1 * shrink1
            for u in tl.static_range(N):
                weight0, weight1 = tl.exp2(lses0[u] - grown0), tl.exp2(lses1[u] - grown1)
                scale0 = powers0[u].to(tl.float32, bitcast=True) * weight0
                scale1 = powers1[u].to(tl.float32, bitcast=True) * weight1
                acc += values[u].to(tl.float32) * tl.where(of_first, scale0[:, None], scale1[:, None])
                total0, total1 = total0 + weight0, total1 + weight1
            largest0, largest1 = grown0, grown1
        top0, top1 = tl.full([64 * R], -float("inf"), tl.float32), tl.full([64 * R], -float("inf"), tl.float32)
        # apart, as the loop above has no register for it
        if max_logits is not None:
            for i in range(count):
                at = part_max + (((first + i) * BLOCKS + sixteen // 4) * 2 + tl.where(i == 0, 1, 0)) * 64
                top0 = tl.maximum(top0, tl.load(at + head0 % 64, mask=live0, other=-float("inf")))
                top1 = tl.maximum(top1, tl.load(at + head1 % 64, mask=live1, other=-float("inf")))
        whole0, whole1 = total0, total1
        if sink is not None:
            whole0, whole1 = total0 + tl.exp2(bias0 - largest0), total1 + tl.exp2(bias1 - largest1)
        factor0, factor1 = tl.where(total0 == 0.0, 0.0, 1.0 / whole0), tl.where(total1 == 0.0, 0.0, 1.0 / whole1)
        acc *= tl.where(of_first, factor0[:, None], factor1[:, None])
        once = (eight < 2 * R) & (eight % 4 == 0)
        store0, store1, row0, row1 = once & live0, once & live1, token, token
        if groups is not None:
            end = tl.load(groups + token * 4 + 3) & 7
            token = tl.load(groups + token * 4).to(tl.int64)
            store0, store1 = store0 & (head0 // HEADS <= end), store1 & (head1 // HEADS <= end)
            row0, row1 = token + head0 // HEADS, token + head1 // HEADS
            head0, head1 = head0 % HEADS, head1 % HEADS
        if lse is not None:
            end0 = tl.where(total0 == 0.0, empty_lse, (largest0 + tl.log2(total0)) * LN2)
            end1 = tl.where(total1 == 0.0, empty_lse, (largest1 + tl.log2(total1)) * LN2)
            tl.store(lse + row0 * lse_token + head0.to(tl.int64) * lse_head, end0, mask=store0)
            tl.store(lse + row1 * lse_token + head1.to(tl.int64) * lse_head, end1, mask=store1)
        if max_logits is not None:
            at0 = max_logits + row0 * max_token + head0.to(tl.int64) * max_head
            at1 = max_logits + row1 * max_token + head1.to(tl.int64) * max_head
            tl.store(at0, numerics.or_nan(top0, total0) * LN2, mask=store0)
            tl.store(at1, numerics.or_nan(top1, total1) * LN2, mask=store1)
        # heads before columns
        acc = tl.permute(tl.reshape(acc, (32, R // 2, 4, 2, 2, 2)), (4, 1, 0, 3, 2, 5))
        result = numerics.round_to(tl.reshape(acc, (R, 512)), out.dtype.element_ty, EXACT_CASTS)
        r, column = tl.arange(0, R), tl.arange(0, 512)
        row_head = first_head + r % (R // 2) + r // (R // 2) * 8
        live, row = row_head < ALL, token
        if groups is not None:
            live = live & (row_head % HEADS < H) & (row_head // HEADS <= end)
            row, row_head = token + row_head // HEADS, row_head % HEADS
        to = tl.multiple_of(out + (row * out_token + row_head.to(tl.int64) * out_head), 16)
        tl.store(to[:, None] + column[None, :], result, mask=live[:, None] & (column < 512)[None, :])

"""`kernels_few_heads` in Triton, for its interpreter, which runs no Gluon: same arguments, programs and results."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton.language as tl

from dsv4attn.backends._triton import numerics
from dsv4attn.backends._triton.attention.keys import widen
from dsv4attn.backends._triton.launching.runtime import stable_kernel
from dsv4attn.backends._triton.numerics import LN2, LOG2E, NOTHING
from dsv4attn.backends.sm90.attention.kernels_schedule import Keys, Segment, lengths, page_of, powers_of
from dsv4attn.backends.sm90.interpreted.kernels import read_page
from dsv4attn.backends.sm90.interpreted.kernels_small_decode import place


@stable_kernel
def attend_few_heads(
    q,  # [T, H, 512] bf16
    out,  # [T, H, 512] bf16
    lse,  # [T, H] fp32, or None
    max_logits,  # [T, H] fp32, or None
    sink,  # [H] fp32, or None
    part,  # [programs, 512, BH] fp16, in the order of `place`
    part_sums,  # [programs, 2 BH + 8] fp32: largest logits, base 2; totals of weights relative to these; powers
    window_keys,  # [pages, page bytes] uint8
    window_rows,  # [T, width0] int32
    window_lens,  # [T] int32
    compressed_keys,  # [pages, page bytes] uint8
    compressed_rows,  # [T, width1] int32
    compressed_lens,  # [T] int32
    q_token: tl.int64, q_head: tl.int64, out_token: tl.int64, out_head: tl.int64,
    lse_token: tl.int64, lse_head: tl.int64, max_token: tl.int64, max_head: tl.int64,
    width0: tl.int32, stride0: tl.int64, size0: tl.int32,
    factor0: tl.int32, log0: tl.int32, pitch0: tl.int32, last_slot0: tl.int32,
    width1: tl.int32, stride1: tl.int64, size1: tl.int32,
    factor1: tl.int32, log1: tl.int32, pitch1: tl.int32, last_slot1: tl.int32,
    parts: tl.int32, most: tl.int32, shift: tl.int32, scale: tl.float32, empty_lse: tl.float32,
    SEGMENTS: tl.constexpr, H: tl.constexpr, BH: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """See `kernels_few_heads.attend_few_heads`."""
    BLOCKS: tl.constexpr = (H + BH - 1) // BH
    program = tl.program_id(0)
    within, column, row = tl.arange(0, BH), tl.arange(0, 512), tl.arange(0, 64)
    head = (program % BLOCKS) * BH + within
    live = head < H
    row_part = program // BLOCKS
    t = row_part // parts
    first = Segment(window_keys, window_rows, window_lens, width0, stride0, size0, factor0, log0, pitch0, last_slot0)
    second = None
    if SEGMENTS == 2:
        second = Segment(
            compressed_keys, compressed_rows, compressed_lens, width1, stride1, size1, factor1, log1, pitch1, last_slot1
        )
    keys = Keys(first, second, False)
    n0, n1 = lengths(keys, t, t >= 0)
    tiles0, tiles1 = (n0 + 63) >> 6, (n1 + 63) >> 6
    begin, edge, count = t * 0, tiles0, tiles0 + tiles1
    if not WHOLE:
        index = row_part % parts
        before = (((width0 + 63) >> 6) + most - 1) // most
        inside = (index < before).to(tl.int32)
        begin = tl.where(inside != 0, index, index - before) * most
        count = tl.minimum(tl.maximum(tl.where(inside != 0, tiles0, tiles1) - begin, 0), most)
        edge = count * inside
    q_row = q + t.to(tl.int64) * q_token + head.to(tl.int64)[:, None] * q_head + column[None, :]
    query = widen(tl.load(q_row, mask=live[:, None], other=0.0), tl.float32)
    largest, total = tl.full([BH], NOTHING, tl.float32), tl.zeros([BH], tl.float32)
    acc = tl.zeros([BH, 512], tl.float32)
    group = tl.arange(0, 8)
    scales = tl.full([8], 1, tl.int32)
    for k in range(count):
        in_window = (k < edge).to(tl.int32)
        at = first.rows + t.to(tl.int64) * first.stride
        key, end = (begin + k) * 64 + row, n0
        if second is not None:  # noqa: SIM102 - a constant, and a value
            if in_window == 0:
                at = second.rows + t.to(tl.int64) * second.stride
                key, end = (begin + k - edge) * 64 + row, n1
        slot = tl.load(at + key, mask=key < end, other=-1)
        ok, data, places = page_of(keys, slot, in_window)
        values = read_page(data, places, ok)
        coded = ok[:, None] & (group < 7)[None, :]
        byte = tl.load(places.to(tl.pointer_type(tl.uint8))[:, None] + group[None, :], mask=coded, other=0)
        scales = tl.maximum(scales, tl.max(byte.to(tl.int32), 0))
        z = tl.dot(query, tl.trans(values), input_precision="ieee") * (scale * LOG2E)
        # chosen, not added: q may be NaN
        z = tl.where(ok[None, :], z, -float("inf"))
        grown = tl.maximum(largest, tl.max(z, 1))
        shrink, p = tl.exp2(largest - grown), tl.exp2(z - grown[:, None])
        acc = tl.dot(p, values, acc * shrink[:, None], input_precision="ieee")
        total = total * shrink + tl.sum(p, 1)
        largest = grown
    if WHOLE:
        empty = total == 0.0
        whole = total
        if sink is not None:
            whole += tl.exp2(tl.load(sink + head, mask=live, other=0.0) * LOG2E - largest)
        result = acc * tl.where(empty, 0.0, 1.0 / whole)[:, None]
        to = out + t.to(tl.int64) * out_token + head.to(tl.int64)[:, None] * out_head + column[None, :]
        tl.store(to, numerics.round_to(result, out.dtype.element_ty, False), mask=live[:, None])
        if lse is not None:
            at = lse + t.to(tl.int64) * lse_token + head.to(tl.int64) * lse_head
            tl.store(at, tl.where(empty, empty_lse, (largest + tl.log2(total)) * LN2), mask=live)
        if max_logits is not None:
            at = max_logits + t.to(tl.int64) * max_token + head.to(tl.int64) * max_head
            tl.store(at, tl.where(empty, -float("inf"), largest * LN2 + total * 0.0), mask=live)
    elif count > 0:
        rope = tl.max(tl.max(tl.where(column[None, :] >= 448, tl.abs(acc), 0.0), 1), 0)
        exponent, _ = powers_of(rope)
        exponent = tl.where(group == 7, exponent, tl.minimum(scales + shift, 254))
        sums = part_sums + program * (2 * BH + 8)
        tl.store(sums + 2 * BH + group, (exponent << 23).to(tl.float32, bitcast=True))
        # of exponent 254 the subnormal 2^-127
        inverse = tl.where(exponent == 254, 0x400000, (254 - exponent) << 23).to(tl.float32, bitcast=True)
        inverse = tl.reshape(tl.broadcast_to(inverse[:, None], (8, 64)), (1, 512))
        to = part + program.to(tl.int64) * (512 * BH) + place(column[None, :], within[:, None], BH)
        tl.store(to, (acc * inverse).to(tl.float16))
        tl.store(sums + within, largest)
        tl.store(sums + BH + within, total)

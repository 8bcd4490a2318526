"""The twin of both Gluon kernels, for Triton's interpreter, which runs no Gluon: same arguments, schedule and results.

On pages it walks over a chunk in two ways at once, as the roles of `kernels_pages` do: over rows as `scores`, over
tiles as `fetch`. Keys come from the walk over tiles, so the two have to agree. The roles of `kernels_rows` walk over
rows, and attend pairs of tiles, one tile after the other.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from dsv4attn.backends._triton import numerics
from dsv4attn.backends._triton.attention.keys import widen
from dsv4attn.backends._triton.launching.runtime import stable_kernel
from dsv4attn.backends._triton.numerics import LOG2E, NOTHING
from dsv4attn.backends.sm90.attention.kernels_schedule import (
    BF16_ROWS,
    CODE_PAGES,
    FP8_PAGES,
    NIBBLE_PAGES,
    SHORT,
    TOLERANCE,
    Keys,
    Results,
    Segment,
    advance,
    begin,
    clear_split,
    coded_page_of,
    differs,
    enter,
    exists,
    group_at,
    page_of,
    pairs_of,
    part_of,
    place_in_part,
    power_of_part,
    powers_of,
    room_of,
    row_of,
    row_slots,
    seen_by,
    share,
    slots,
    store_split,
    tiles_of,
    visible,
    write_sums,
)


@triton.jit
def read_page(data, scale, ok):
    """[64, 512] fp32 of records; zeros where not ok."""
    column = tl.arange(0, 512)[None, :]
    is_code, is_rope = ok[:, None] & (column < 448), ok[:, None] & (column >= 448)
    code = tl.load(data.to(tl.pointer_type(tl.uint8))[:, None] + column, mask=is_code, other=0)
    byte = tl.load(scale.to(tl.pointer_type(tl.uint8))[:, None] + column // 64, mask=is_code, other=127)
    rope = tl.load(data.to(tl.pointer_type(tl.bfloat16))[:, None] + (column - 224), mask=is_rope, other=0.0)
    value = numerics.dequantize(code.to(tl.int32), byte.to(tl.int32), False)
    return tl.where(is_code, value, widen(rope, tl.float32))


@triton.jit
def read_page_of_nibbles(data, scale, ok):
    """[64, 512] fp32 of V4's records of 448 nibbles; zeros where not ok."""
    column = tl.arange(0, 512)[None, :]
    is_code, is_rope = ok[:, None] & (column < 448), ok[:, None] & (column >= 448)
    code = tl.load(data.to(tl.pointer_type(tl.uint8))[:, None] + column // 2, mask=is_code, other=0)
    byte = tl.load(scale.to(tl.pointer_type(tl.uint8))[:, None] + column // 16, mask=is_code, other=0)
    # 224 bytes of codes, which take the room of 112 bf16 values, come before column 448
    at = data.to(tl.pointer_type(tl.bfloat16))[:, None] + (column - 448 + 112)
    rope = tl.load(at, mask=is_rope, other=0.0)
    value = numerics.decode_e2m1((code.to(tl.int32) >> (column % 2 * 4)) & 15, byte.to(tl.int32), numerics.NVFP4)
    return tl.where(is_code, value, widen(rope, tl.float32))


@triton.jit
def read_coded_page(data, scale, ok, inside, KIND: tl.constexpr):
    """[64, 512] fp32 of V4.1's records; zeros where not ok."""
    column = tl.arange(0, 512)[None, :]
    data, scale = data.to(tl.pointer_type(tl.uint8))[:, None], scale.to(tl.pointer_type(tl.uint8))[:, None]
    there = ok[:, None] & (column < 512)
    if (KIND == NIBBLE_PAGES) & (inside == 0):
        code = tl.load(data + column // 2, mask=there, other=0).to(tl.int32) >> (column % 2 * 4)
        byte = tl.load(scale + column // 16, mask=there, other=0)
        value = numerics.decode_e2m1(code & 15, byte.to(tl.int32), numerics.NVFP4)
    else:
        code = tl.load(data + column, mask=there, other=0)
        byte = tl.load(scale + column // 32, mask=there, other=127)
        value = numerics.dequantize(code.to(tl.int32), byte.to(tl.int32), False)
    return value


@triton.jit
def read_row(key, ok):
    """[64, 512] fp32 of rows; zeros where not ok."""
    return widen(tl.load(key[:, None] + tl.arange(0, 512)[None, :], mask=ok[:, None], other=0.0), tl.float32)


@triton.jit
def rotated(x, angles, DTYPE: tl.constexpr):
    """[64, 512] fp32, whose last 64 columns are turned by the angles and rounded to DTYPE."""
    even, odd = tl.split(tl.reshape(x, (64, 256, 2)))
    pair = tl.arange(0, 256) - 224
    turns = pair >= 0
    cos = tl.load(angles + pair, mask=turns, other=1.0)[None, :]
    sin = tl.load(angles + 32 + pair, mask=turns, other=0.0)[None, :]
    turned_even, turned_odd = numerics.rotate(even, odd, cos, sin)
    even = tl.where(turns[None, :], widen(numerics.round_to(turned_even, DTYPE, False), tl.float32), even)
    odd = tl.where(turns[None, :], widen(numerics.round_to(turned_odd, DTYPE, False), tl.float32), odd)
    return tl.reshape(tl.join(even, odd), (64, 512))


@stable_kernel
def attention(
    q,  # [T, H, 512] bf16
    out,  # [T, H, 512] bf16
    lse,  # [T, H] fp32, or None
    max_logits,  # [T, H] fp32, or None
    sink,  # [H] fp32, or None
    part,  # [programs, 2, 64, 512] fp16, in the order of `place_in_part`
    part_powers,  # [programs, 2, 8192] uint8
    part_lse,  # [programs, 2, 64] fp32
    part_max,  # [programs, 2, 64] fp32, or None
    table,  # [lines, 2] int32
    window_keys,  # [pages, page bytes] uint8, or [N, 512] bf16
    window_rows,  # [T, width0] int32
    window_lens,  # [T] int32
    compressed_keys,  # [pages, page bytes] uint8, or [N, 512] bf16
    compressed_rows,  # [T, width1] int32
    compressed_lens,  # [T] int32
    positions,  # [T] int64, if q is neither normalised nor rotated; else None
    angles,  # [num_positions, 64] fp32, cosines before sines; or None
    groups,  # [T + 1, 4] int32 of `list_groups`, or None
    q_token: tl.int64, q_head: tl.int64, out_token: tl.int64, out_head: tl.int64,
    lse_token: tl.int64, lse_head: tl.int64, max_token: tl.int64, max_head: tl.int64,
    width0: tl.int32, stride0: tl.int64, size0: tl.int32,
    factor0: tl.int32, log0: tl.int32, pitch0: tl.int32, last_slot0: tl.int32,
    width1: tl.int32, stride1: tl.int64, size1: tl.int32,
    factor1: tl.int32, log1: tl.int32, pitch1: tl.int32, last_slot1: tl.int32,
    angles_stride: tl.int64, num_positions: tl.int64, eps: tl.float32,
    tokens: tl.int32, least: tl.int32, scale: tl.float32, empty_lse: tl.float32,
    SEGMENTS: tl.constexpr, KIND: tl.constexpr, INTERLEAVED: tl.constexpr, H: tl.constexpr, BT: tl.constexpr,
    WHOLE_ROWS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """See `kernels.attention`."""
    BLOCKS: tl.constexpr = (H + 63) // 64
    program = tl.program_id(0)
    within = tl.arange(0, 64)
    head0 = (program % BLOCKS) * 64
    head = head0 + within
    live, column = head < H, tl.arange(0, 512)
    first = Segment(window_keys, window_rows, window_lens, width0, stride0, size0, factor0, log0, pitch0, last_slot0)
    second = None
    if SEGMENTS == 2:
        second = Segment(
            compressed_keys, compressed_rows, compressed_lens, width1, stride1, size1, factor1, log1, pitch1, last_slot1
        )
    keys = Keys(first, second, KIND == BF16_ROWS, groups)
    if groups is not None:
        tokens = tl.load(groups + tokens * 4)
    results = Results(
        out, lse, max_logits, sink, part, part_powers, part_lse, part_max, table,
        out_token, out_head, lse_token, lse_head, max_token, max_head, empty_lse,
    )  # fmt: skip
    at = tl.arange(0, BT)
    ONCE: tl.constexpr = BT == SHORT
    line_program, line_programs = program // BLOCKS, tl.num_programs(0) // BLOCKS
    chunk, t, pos, count = share(keys, tokens, line_program, line_programs, least, at, BT, ONCE, WHOLE_ROWS)
    clear_split(table, chunk)
    # as the producer
    walk = begin(keys, chunk, t, pos)
    done = count * 0
    while (pos < chunk.hi) & (t < tokens):
        n0, n1, first_tile, last = enter(keys, chunk, t, pos)
        n = tiles_of(keys, n0, n1)
        group = group_at(keys, t, t < tokens)
        token = group.row.to(tl.int64)
        seen = None
        if groups is not None:
            live = exists(group, within, H, HEADS)
            sees, entries, begun, least_entries = seen_by(keys, group, n0, within, H, HEADS)
            seen, token, head = live, (group.row + within // HEADS).to(tl.int64)[:, None], within % HEADS
        q_row = q + token * q_token + head.to(tl.int64)[:, None] * q_head + column[None, :]
        query = widen(tl.load(q_row, mask=live[:, None], other=0.0), tl.float32)
        factor = tl.full([64], 1.0, tl.float32)
        if positions is not None:
            factor = tl.rsqrt(tl.sum(query * query, 1) / 512.0 + eps)
            table_row = numerics.angles_of(positions + token, angles, angles_stride, num_positions)
            query = rotated(query, table_row, q.dtype.element_ty)
        largest, total = tl.full([64], NOTHING, tl.float32), tl.zeros([64], tl.float32)
        reference = largest
        acc = tl.zeros([64, 512], tl.float32)
        for k in range(first_tile, first_tile + pairs_of(first_tile, last) * 2 if KIND == BF16_ROWS else last):
            if KIND == BF16_ROWS:
                ok, key = row_of(first, row_slots(first, t, n0, k, within))
                values = read_row(key, ok)
            else:
                slot, inside = slots(keys, chunk, walk, within)
                # a tile that the producer never reaches has no keys
                slot = tl.where(done < count, slot, -1)
                if KIND == FP8_PAGES:
                    ok, data, scales = page_of(keys, slot, inside)
                    values = read_page(data, scales, ok)
                elif (KIND == CODE_PAGES) | (KIND == NIBBLE_PAGES):
                    ok, data, scales = coded_page_of(keys, slot, inside, KIND, INTERLEAVED)
                    values = read_coded_page(data, scales, ok, inside, KIND)
                else:
                    ok, data, scales = page_of(keys, slot, inside, KIND)
                    values = read_page_of_nibbles(data, scales, ok)
            z = tl.dot(query, tl.trans(values), input_precision="ieee") * (scale * LOG2E)
            z *= factor[:, None]
            # as the roles do: a NaN in q reaches a row of pages whose keys are all absent, and no row of gathered keys
            if KIND == BF16_ROWS:
                z = tl.where(ok[None, :], z, -float("inf"))
            else:
                z += tl.where(ok, 0.0, -float("inf"))[None, :]
            if groups is not None:  # noqa: SIM102 - a constant, and a value
                if differs(k, n0, group, begun, least_entries):
                    seeing = visible(within, k, n0, group, within, sees, entries, HEADS)
                    z = tl.where(seeing, z, -float("inf"))
            most = tl.max(z, 1)
            largest = tl.maximum(largest, most)
            moved = tl.where(most > reference + TOLERANCE, most, reference)
            shrink = tl.exp2(reference - moved)
            p = tl.exp2(z - moved[:, None])
            reference = moved
            total = total * shrink + tl.sum(p, 1)
            acc = tl.dot(p, values, acc * shrink[:, None], input_precision="ieee")
            done += 1
            walk = advance(keys, chunk, walk)
        whole = (first_tile == 0) & (last == n)
        side = part_of(chunk, program, pos)
        inverse = 1.0 / total
        if whole:  # noqa: SIM102 - a value, and a constant
            if sink is not None:
                inverse = 1.0 / (total + tl.exp2(tl.load(sink + head, mask=live, other=0.0) * LOG2E - reference))
        result = acc * tl.where(total == 0.0, 0.0, inverse)[:, None]
        if whole:
            to = out + token * out_token + head.to(tl.int64)[:, None] * out_head + column[None, :]
            tl.store(to, numerics.round_to(result, out.dtype.element_ty, False), mask=live[:, None])
        else:
            # heads, groups of 16 columns, halves, pairs of columns, columns: a thread's four numbers share a power
            fours = tl.permute(tl.reshape(result, (64, 32, 2, 4, 2)), (0, 1, 3, 2, 4))
            exponent, inverse = powers_of(tl.max(tl.abs(tl.reshape(fours, (64, 32, 4, 4))), 3))
            fours = fours * tl.reshape(inverse, (64, 32, 4, 1, 1))
            result = tl.reshape(tl.permute(fours, (0, 1, 3, 2, 4)), (64, 512))
            at = part + (side * (64 * 512) + place_in_part(within[:, None], column[None, :]))
            tl.store(at, result.to(tl.float16))
            of = tl.arange(0, 128) // 4 * 16 + tl.arange(0, 128) % 4 * 2
            at = part_powers + (side * (64 * 128) + power_of_part(within[:, None], of[None, :]))
            tl.store(at, tl.reshape(exponent, (64, 128)).to(tl.uint8))
        write_sums(results, group.row, whole, side, total, reference, largest, head0, within, H, HEADS, seen)
        if first_tile == 0:
            store_split(table, chunk, t, pos, n)
        pos += room_of(keys, n) + chunk.extra
        t += 1

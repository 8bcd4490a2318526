"""`kernels_small_decode` in Triton, for its interpreter, which runs no Gluon: same arguments, programs and results."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from dsv4attn.backends._triton import numerics
from dsv4attn.backends._triton.attention.keys import widen
from dsv4attn.backends._triton.launching.runtime import stable_kernel
from dsv4attn.backends._triton.numerics import LN2, LOG2E, NOTHING
from dsv4attn.backends.sm90.attention.kernels_schedule import (
    FP8_PAGES,
    NIBBLE_PAGES,
    Entries,
    Keys,
    Segment,
    cdiv,
    coded_page_of,
    entry_slots,
    own_tile,
    page_of,
    tile_with_keys,
)
from dsv4attn.backends.sm90.interpreted.kernels import read_coded_page, read_page


@triton.jit
def bounds_of(values, scale, ok):
    """As `kernels_small_decode` has them. values: [N, 512] fp32. scale: of addresses of scale bytes."""
    of = tl.arange(0, 8)[None, :]
    coded = ok[:, None] & (of < 7)
    byte = tl.load(scale.to(tl.pointer_type(tl.uint8))[:, None] + of, mask=coded, other=0).to(tl.int32)
    exponent = (values.to(tl.int32, bitcast=True) >> 23) & 255
    rope = tl.max(tl.where(tl.arange(0, 512)[None, :] >= 448, exponent, 0), 1)
    return tl.where(of == 7, rope[:, None] - 7, byte)


@triton.jit
def coded_bounds_of(scale, ok, inside, KIND: tl.constexpr):
    """[N, 16], as `code_bounds` and `nibble_bounds` of `kernels_small_decode`, in the order of columns."""
    scale = scale.to(tl.pointer_type(tl.uint8))[:, None]
    of = tl.arange(0, 16)[None, :]
    there = ok[:, None] & (of < 16)
    if (KIND == NIBBLE_PAGES) & (inside == 0):
        byte = tl.load(scale + 2 * of, mask=there, other=0).to(tl.int32)
        other = tl.load(scale + 2 * of + 1, mask=there, other=0).to(tl.int32)
        bounds = tl.maximum((byte >> 3) & 15, (other >> 3) & 15) + (127 - 9 - 3)
    else:
        bounds = tl.load(scale + of, mask=there, other=0).to(tl.int32)
    return bounds


@triton.jit
def place(column, head, block):
    """Offset of (column, head) inside a program's partial result."""
    row, eighth = column % 16 // 8, column % 8
    cell = column % 128 // 16 * 32 + eighth * 4 + head % 8 // 2
    return column // 128 * (128 * block) + head // 8 * 1024 + cell * 4 + row * 2 + head % 2


@stable_kernel
def attend_tile(
    q,  # [T, H, 512] bf16
    part,  # [programs, 512, BH] fp16, in the order of `place`
    part_sums,  # [programs, 2 BH + POWERS] fp32: largest logits, base 2; totals of weights relative to these; powers
    window_keys,  # [pages, page bytes] uint8
    window_rows,  # [T, width0] int32
    window_lens,  # [T] int32
    compressed_keys,  # [pages, page bytes] uint8
    compressed_rows,  # [T, width1] int32, slots; or entries, if least1 is width1, and not 0
    compressed_lens,  # [T] int32; of entries, how many a row may see
    requests,  # as the field of `Entries`; not read where rows are slots
    table,  # the same
    q_token: tl.int64, q_head: tl.int64,
    width0: tl.int32, stride0: tl.int64, size0: tl.int32,
    factor0: tl.int32, log0: tl.int32, pitch0: tl.int32, last_slot0: tl.int32,
    width1: tl.int32, stride1: tl.int64, size1: tl.int32,
    factor1: tl.int32, log1: tl.int32, pitch1: tl.int32, last_slot1: tl.int32,
    table_stride: tl.int64, known: tl.int32, columns: tl.int32, least1: tl.int32,
    tiles: tl.int32, scale: tl.float32,
    SEGMENTS: tl.constexpr, KIND: tl.constexpr, INTERLEAVED: tl.constexpr, POWERS: tl.constexpr,
    H: tl.constexpr, BH: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """See `kernels_small_decode.attend_tile`."""
    BLOCKS: tl.constexpr = (H + BH - 1) // BH
    program = tl.program_id(0)
    within, column = tl.arange(0, BH), tl.arange(0, 512)
    head = (program % BLOCKS) * BH + within
    tile = (program // BLOCKS) % tiles
    t = program // (BLOCKS * tiles)
    first = Segment(window_keys, window_rows, window_lens, width0, stride0, size0, factor0, log0, pitch0, last_slot0)
    second = None
    if SEGMENTS == 2:
        second = Segment(
            compressed_keys, compressed_rows, compressed_lens, width1, stride1, size1, factor1, log1, pitch1, last_slot1
        )
    keys = Keys(first, second, False)
    inside, begin, n, width, at = own_tile(keys, t, tile, least1, N)
    key = begin + tl.arange(0, N)
    slot = tl.load(at + key, mask=key < width, other=-1)
    if SEGMENTS == 2:  # noqa: SIM102 - a constant, and a value
        if (inside == 0) & (least1 > 0):
            entries = Entries(requests, table, table_stride, known, columns)
            slot = entry_slots(entries, second, t, slot)
    slot = tl.where(key < n, slot, -1)
    if begin < n:
        if KIND == FP8_PAGES:
            ok, data, scales = page_of(keys, slot, inside)
            values = read_page(data, scales, ok)
            bounds = bounds_of(values, scales, ok)
        else:
            ok, data, scales = coded_page_of(keys, slot, inside, KIND, INTERLEAVED)
            values = read_coded_page(data, scales, ok, inside, KIND)
            bounds = coded_bounds_of(scales, ok, inside, KIND)
        q_row = q + t.to(tl.int64) * q_token + head.to(tl.int64)[:, None] * q_head + column[None, :]
        query = widen(tl.load(q_row, mask=(head < H)[:, None], other=0.0), tl.float32)
        z = tl.dot(query, tl.trans(values), input_precision="ieee") * (scale * LOG2E)
        z = tl.where(ok[None, :], z, -float("inf"))
        largest = tl.maximum(tl.max(z, 1), NOTHING)
        p = tl.exp2(z - largest[:, None])
        acc = tl.dot(p, values, input_precision="ieee")
        power = tl.minimum(tl.maximum(tl.max(bounds, 0), 1), 253)
        sums = part_sums + program * (2 * BH + POWERS)
        tl.store(sums + 2 * BH + tl.arange(0, POWERS), (power << 23).to(tl.float32, bitcast=True))
        inverse = ((254 - power) << 23).to(tl.float32, bitcast=True)
        inverse = tl.reshape(tl.broadcast_to(inverse[:, None], (POWERS, 512 // POWERS)), (1, 512))
        to = part + program.to(tl.int64) * (512 * BH) + place(column[None, :], within[:, None], BH)
        tl.store(to, (acc * inverse).to(tl.float16))
        tl.store(sums + within, largest)
        tl.store(sums + BH + within, tl.sum(p, 1))


@stable_kernel
def combine_tiles(
    part,  # as `attend_tile` has them
    part_sums,
    out,  # [T, H, 512] bf16
    lse,  # [T, H] fp32, or None
    max_logits,  # [T, H] fp32, or None
    sink,  # [H] fp32, or None
    window_lens,  # [T] int32
    compressed_lens,  # [T] int32
    out_token: tl.int64, out_head: tl.int64, lse_token: tl.int64, lse_head: tl.int64,
    max_token: tl.int64, max_head: tl.int64,
    heads: tl.int32, block: tl.int32, size: tl.int32, tiles: tl.int32, width0: tl.int32, width1: tl.int32,
    least1: tl.int32, empty_lse: tl.float32, U: tl.constexpr, P: tl.constexpr, POWERS: tl.constexpr,
):  # fmt: skip
    """See `kernels_small_decode.combine_tiles`. Tiles are added one after the other."""
    program = tl.program_id(0)
    first = program % (8 // P) * P
    eights = cdiv(heads, 8)
    eight = (program // (8 // P)) % eights
    t = program // (8 // P * eights)
    head, column = eight * 8 + tl.arange(0, 8), first * 64 + tl.arange(0, 64 * P)
    live = head < heads
    before = cdiv(width0, size)
    of_first = cdiv(tl.minimum(tl.maximum(tl.load(window_lens + t), 0), width0), size)
    there = of_first + cdiv(tl.minimum(tl.maximum(tl.load(compressed_lens + t), least1), width1), size)
    blocks = cdiv(heads, block)
    within = head % block
    largest, total = tl.full([8], NOTHING, tl.float32), tl.zeros([8], tl.float32)
    acc = tl.zeros([8, 64 * P], tl.float32)
    for i in range(there):
        row = (t * tiles + tile_with_keys(i, of_first, before)) * blocks + eight // (block // 8)
        sums = part_sums + row * (2 * block + POWERS)
        m = tl.load(sums + within, mask=live, other=NOTHING)
        values = part + row.to(tl.int64) * (512 * block) + place(column[None, :], within[:, None], block)
        top = tl.maximum(largest, m)
        shrink, weight = tl.exp2(largest - top), tl.exp2(m - top)
        power = tl.load(sums + 2 * block + column // (512 // POWERS))
        value = tl.load(values, mask=live[:, None], other=0.0).to(tl.float32)
        acc = acc * shrink[:, None] + value * (power[None, :] * weight[:, None])
        total = total * shrink + tl.load(sums + block + within, mask=live, other=0.0) * weight
        largest = top
    empty = total == 0.0
    whole = total
    if sink is not None:
        whole += tl.exp2(tl.load(sink + head, mask=live, other=0.0) * LOG2E - largest)
    result = acc * tl.where(empty, 0.0, 1.0 / whole)[:, None]
    to = out + t.to(tl.int64) * out_token + head.to(tl.int64)[:, None] * out_head + column[None, :]
    tl.store(to, numerics.round_to(result, out.dtype.element_ty, False), mask=live[:, None])
    if first == 0:
        if lse is not None:
            at = lse + t.to(tl.int64) * lse_token + head.to(tl.int64) * lse_head
            tl.store(at, tl.where(empty, empty_lse, (largest + tl.log2(total)) * LN2), mask=live)
        if max_logits is not None:
            at = max_logits + t.to(tl.int64) * max_token + head.to(tl.int64) * max_head
            tl.store(at, tl.where(empty, -float("inf"), largest * LN2 + total * 0.0), mask=live)

"""Kernels that write keys to a cache: rotated, rounded, quantised and stored; and q, normalised and rotated.

Everything happens in one kernel and in registers, so no copy of the keys is ever in memory. Quantisation is integer
arithmetic on the bits of fp32 numbers: every device writes the same bytes, and so does the interpreter.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from dsv4attn.backends._triton.cache.forms import PageNumbers
from dsv4attn.backends._triton.launching.kernels_pdl import wait_then_launch_dependents
from dsv4attn.backends._triton.launching.runtime import stable_kernel
from dsv4attn.backends._triton.numerics import (
    FP8,
    MXFP4,
    NVFP4,
    angles_of,
    cast,
    dequantize,
    rotate,
    round_to,
    scale_of_byte,
)
from dsv4attn.backends._triton.sizes import cdiv, next_power_of_2


@triton.jit
def encode_e4m3(x, FNUZ: tl.constexpr, LARGEST: tl.constexpr):
    """Codes, int32, of fp32 x: nearest even, subnormals too, at most LARGEST, given by its bits. NaN stays NaN.

    x times 2^-120 (2^-119 in FNUZ) has the code's exponent in the exponent field, and is subnormal in fp32 where the
    code is: its upper bits, rounded, are the code. x is to have at most 16 significant bits, as a bf16 number does:
    the product loses none that counts.
    """
    shift: tl.constexpr = 119 if FNUZ else 120
    unit = tl.full((), (127 - shift) << 23, tl.int32).to(tl.float32, bitcast=True)
    size = tl.minimum((x * unit).to(tl.int32, bitcast=True) & 0x7FFFFFFF, LARGEST - (shift << 23))
    code = (size + 0x7FFFF + ((size >> 20) & 1)) >> 20
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    is_number = x == x  # noqa: PLR0124 - NaN is not
    if FNUZ:
        # 0x80 is NaN, not a zero
        return tl.where(is_number, tl.where(code == 0, 0, code | sign), 0x80)
    return tl.where(is_number, code, 0x7F) | sign


@triton.jit
def encode_e2m1(x):
    """Codes, int32, of fp32 x: nearest even, at most 6. A negative number that becomes zero keeps its sign; NaN is 0.

    As `encode_e4m3`, with the exponent of 2^-126 x.
    """
    unit = tl.full((), 1 << 23, tl.int32).to(tl.float32, bitcast=True)
    size = tl.minimum((x * unit).to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0x01C00000)
    code = (size + 0x1FFFFF + ((size >> 22) & 1)) >> 22
    is_number = x == x  # noqa: PLR0124 - NaN is not
    return tl.where(is_number, code, 0) | tl.where(x < 0, 8, 0)


@triton.jit
def size_bits(x):
    """Bits, int32, of the magnitude of fp32 x: ordered like the magnitudes, infinity and then NaN above all numbers."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def scale_byte(amax, LARGEST: tl.constexpr, FLOOR: tl.constexpr):
    """Scale bytes, int32, of groups whose largest `size_bits` are amax: of the smallest 2^e with amax / 2^e <= LARGEST.

    Found by comparing exponents and mantissas: no division, no logarithm. Infinity and NaN get 254, the last byte that
    is a number.
    """
    amax = tl.maximum(amax, FLOOR)
    larger = ((amax & 0x7FFFFF) > (LARGEST & 0x7FFFFF)).to(tl.int32)
    return tl.where(amax >= 0x7F800000, 254, (amax >> 23) - (LARGEST >> 23) + 127 + larger)


@triton.jit
def quantize(x, FNUZ: tl.constexpr, LARGEST: tl.constexpr, FLOOR: tl.constexpr):
    """Codes [G, S] and scale bytes [G], int32, of groups x [G, S] fp32 that are bf16 values."""
    byte = scale_byte(tl.max(size_bits(x), 1), LARGEST, FLOOR)
    return encode_e4m3(x * scale_of_byte(254 - byte)[:, None], FNUZ, LARGEST), byte


@triton.jit
def quantize_e2m1(x, LARGEST: tl.constexpr, FLOOR: tl.constexpr):
    """As `quantize`, to e2m1 codes. These have no NaN: a group that holds one gets the byte 255, which is NaN."""
    amax = tl.max(size_bits(x), 1)
    byte = scale_byte(amax, LARGEST, FLOOR)
    return encode_e2m1(x * scale_of_byte(254 - byte)[:, None]), tl.where(amax > 0x7F800000, 255, byte)


@triton.jit
def quantize_fp4(x):
    """Codes [G, S] and scale bytes [G] in e4m3fn, int32, of groups x [G, S] fp32 that are bf16 values.

    The scale is amax / 6, at least 2^-9. A code is found by comparing with midpoints times the scale, which are exact:
    a quotient would have to be rounded. A group that holds a NaN gets a NaN for a scale, and codes of zero.
    """
    amax = tl.max(size_bits(x), 1)
    sixth = tl.full((), 0x3E2AAAAB, tl.int32).to(tl.float32, bitcast=True)
    least = tl.full((), 118 << 23, tl.int32)  # 2^-9
    wanted = amax.to(tl.float32, bitcast=True) * sixth
    wanted = tl.maximum(wanted.to(tl.int32, bitcast=True), least).to(tl.float32, bitcast=True)
    byte = encode_e4m3(wanted, False, 0x43E00000) & 0x7F
    unit = dequantize(byte, 127 + tl.zeros_like(byte), False)[:, None]
    size = size_bits(x).to(tl.float32, bitcast=True)
    code = (size > 0.25 * unit).to(tl.int32) + (size >= 0.75 * unit).to(tl.int32) + (size > 1.25 * unit).to(tl.int32)
    code += (size >= 1.75 * unit).to(tl.int32) + (size > 2.5 * unit).to(tl.int32) + (size >= 3.5 * unit).to(tl.int32)
    code += (size > 5.0 * unit).to(tl.int32)
    code |= (x.to(tl.int32, bitcast=True) >> 28) & 8
    return tl.where((byte == 0x7F)[:, None], 0, code), byte


@triton.jit
def encode(x, WRITER: tl.constexpr):
    """Codes [G, S] and scale bytes [G], int32, of groups x [G, S] fp32 that are bf16 values. WRITER: a `WriterForm`."""
    if WRITER.coding == NVFP4:
        codes, byte = quantize_fp4(x)
    elif WRITER.coding == MXFP4:
        codes, byte = quantize_e2m1(x, WRITER.largest, WRITER.floor)
    else:
        codes, byte = quantize(x, WRITER.fnuz, WRITER.largest, WRITER.floor)
    return codes, byte


@triton.jit
def turned(x, key, angles, column, live, NOPE: tl.constexpr, ROPE: tl.constexpr, EXACT_CASTS: tl.constexpr):
    """Values x of a key's columns, rotated from NOPE on, rounded to their own type. Arguments as in `insert_key`."""
    place = column - NOPE
    rotates = live & (place >= 0)
    is_even = place % 2 == 0
    other = tl.load(key + NOPE + (place ^ 1), mask=rotates, other=0.0).to(tl.float32)
    cos = tl.load(angles + place // 2, mask=rotates, other=1.0)
    sin = tl.load(angles + ROPE // 2 + place // 2, mask=rotates, other=0.0)
    own = x.to(tl.float32)
    even, odd = rotate(tl.where(is_even, own, other), tl.where(is_even, other, own), cos, sin)
    return tl.where(rotates, round_to(tl.where(is_even, even, odd), x.dtype, EXACT_CASTS), x)


@triton.jit
def pack_pairs(code, ROWS: tl.constexpr, BYTES: tl.constexpr):
    """Bytes [ROWS, BYTES], int32, of 4-bit codes, as many pairs: the even one in the low half."""
    low, high = tl.split(tl.reshape(code, (ROWS, BYTES, 2)))
    return low | (high << 4)


@triton.jit
def insert_key(key, angles, CACHE, slot, pages, WRITER: tl.constexpr):
    """Write the key at `key` to its slot, if there is such a slot.

    key: pointer to [nope + rope], bf16 or fp32. angles: pointer to [rope] fp32, its cosines before its sines; None if
    it is rotated. CACHE: pages: uint8, or bf16 or fp32 where keys are plain rows. pages: `PageNumbers`. WRITER: a
    `WriterForm`.
    """
    ALIGNED: tl.constexpr = WRITER.aligned
    NOPE: tl.constexpr = WRITER.nope
    ROPE: tl.constexpr = WRITER.rope
    CODED: tl.constexpr = WRITER.coded
    GROUP: tl.constexpr = WRITER.group
    CODING: tl.constexpr = WRITER.coding
    EXACT_CASTS: tl.constexpr = WRITER.exact_casts
    block, row = slot // pages.block_size, slot % pages.block_size
    if (slot >= 0) & (block < pages.num_blocks):
        page = CACHE + block * pages.page_stride
        record = tl.multiple_of(page + row * pages.data_stride, ALIGNED)
        if GROUP > 0:
            groups: tl.constexpr = cdiv(CODED, GROUP)
            scales: tl.constexpr = WRITER.scales
            size: tl.constexpr = next_power_of_2(GROUP)
            # [G, S]
            group, member = tl.arange(0, next_power_of_2(scales)), tl.arange(0, size)
            column = group[:, None] * GROUP + member[None, :]
            live = (member < GROUP)[None, :] & (column < CODED)
            x = tl.load(key + column, mask=live, other=0.0)
            if CODED > NOPE and angles is not None:
                x = turned(x, key, angles, column, live, NOPE, ROPE, EXACT_CASTS)
            x = cast(x, tl.bfloat16, EXACT_CASTS).to(tl.float32)
            codes, byte = encode(x, WRITER)
            if CODING != FP8:
                codes = pack_pairs(codes, next_power_of_2(scales), size // 2)
                # [G, S / 2]
                column = group[:, None] * (GROUP // 2) + tl.arange(0, size // 2)[None, :]
                live = column < CODED // 2
            tl.store(record + column, codes.to(tl.uint8), mask=live)
            byte = tl.where(group < groups, byte, 0).to(tl.uint8)
            tl.store(page + pages.scale_offset + row * pages.scale_stride + group, byte, mask=group < scales)
            # the bf16 values begin right after the codes
            tail = (record + (CODED if CODING == FP8 else CODED // 2)).to(tl.pointer_type(tl.bfloat16))
        else:
            # [D]
            column = tl.arange(0, next_power_of_2(NOPE))
            x = tl.load(key + column, mask=column < NOPE, other=0.0)
            tl.store(record + column, cast(x, CACHE.dtype.element_ty, EXACT_CASTS), mask=column < NOPE)
            tail = record + NOPE

        if ROPE > 0 and (GROUP == 0 or CODED == NOPE):
            # [ROPE / 2] pairs; the last pair of an odd ROPE, which is never rotated, has one half
            pair = tl.arange(0, next_power_of_2(cdiv(ROPE, 2)))
            first, second = 2 * pair < ROPE, 2 * pair + 1 < ROPE
            even = tl.load(key + NOPE + 2 * pair, mask=first, other=0.0)
            odd = tl.load(key + NOPE + 2 * pair + 1, mask=second, other=0.0)
            if angles is not None:
                cos = tl.load(angles + pair, mask=second, other=1.0)
                sin = tl.load(angles + ROPE // 2 + pair, mask=second, other=0.0)
                # a rotated key is rounded to its own type before the cache's
                even, odd = rotate(even.to(tl.float32), odd.to(tl.float32), cos, sin)
                even = round_to(even, key.dtype.element_ty, EXACT_CASTS)
                odd = round_to(odd, key.dtype.element_ty, EXACT_CASTS)
            tl.store(tail + 2 * pair, cast(even, tail.dtype.element_ty, EXACT_CASTS), mask=first)
            tl.store(tail + 2 * pair + 1, cast(odd, tail.dtype.element_ty, EXACT_CASTS), mask=second)


@stable_kernel
def insert_kernel(
    K,  # [n, nope + rope], bf16 or fp32
    CACHE,  # pages: uint8, or bf16 or fp32 where keys are plain rows
    SLOTS,  # [n] int64
    k_stride: tl.int64, pages: PageNumbers, ROW_ALIGNED: tl.constexpr, WRITER: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (n,): each program writes one key. ROW_ALIGNED: bytes that divide the address of every row of K."""
    wait_then_launch_dependents(PDL)
    token = tl.program_id(0).to(tl.int64)
    key = tl.multiple_of(K + token * k_stride, ROW_ALIGNED)
    insert_key(key, None, CACHE, tl.load(SLOTS + token).to(tl.int64), pages, WRITER)


@stable_kernel
def qnorm_rope_kv_insert_kernel(
    Q,  # [T, HEADS, nope + rope], overwritten
    KV,  # [T, nope + rope]
    CACHE,  # pages: uint8, or bf16 or fp32 where keys are plain rows
    SLOTS,  # [num_slots] int64; tokens past them are not inserted
    POSITIONS,  # [T] int64
    TABLE,  # [num_positions, rope] fp32, cosines before sines
    q_stride: tl.int64, head_stride: tl.int64, kv_stride: tl.int64, table_stride: tl.int64,
    num_positions: tl.int64, num_slots: tl.int64, eps: tl.float32, pages: PageNumbers,
    HEADS: tl.constexpr, BLOCK_H: tl.constexpr, NORM: tl.constexpr, ROW_ALIGNED: tl.constexpr, WRITER: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (T * parts,): of each token, the first program writes its key, the others take BLOCK_H heads each.

    NORM: whether q is normalised before it is rotated; without it eps is not read.
    """
    wait_then_launch_dependents(PDL)
    parts: tl.constexpr = cdiv(HEADS, BLOCK_H) + 1
    token = (tl.program_id(0) // parts).to(tl.int64)
    part = tl.program_id(0) % parts
    if part == 0:
        if token < num_slots:
            angles = angles_of(POSITIONS + token, TABLE, table_stride, num_positions)
            key = tl.multiple_of(KV + token * kv_stride, ROW_ALIGNED)
            insert_key(key, angles, CACHE, tl.load(SLOTS + token).to(tl.int64), pages, WRITER)
    else:
        NOPE: tl.constexpr = WRITER.nope
        ROPE: tl.constexpr = WRITER.rope
        # an odd number of dims before the rotated ones: the tile begins one column early, so that pairs are pairs
        early: tl.constexpr = NOPE % 2
        block: tl.constexpr = next_power_of_2(NOPE + ROPE + early)
        head = (part - 1) * BLOCK_H + tl.arange(0, BLOCK_H)
        column = tl.arange(0, block) - early
        live = (head < HEADS)[:, None] & (column < NOPE + ROPE)[None, :]
        if early:
            live &= (column >= 0)[None, :]
        # [BLOCK_H, D]
        row = tl.multiple_of(Q + token * q_stride + head * head_stride, ROW_ALIGNED)
        x = tl.load(row[:, None] + column[None, :], mask=live, other=0.0).to(tl.float32)
        # only now, so that x is on its way while a position and its angles are fetched
        angles = angles_of(POSITIONS + token, TABLE, table_stride, num_positions)
        pair = tl.arange(0, block // 2) - (NOPE + early) // 2
        turned = (pair >= 0) & (pair < ROPE // 2)
        cos = tl.load(angles + pair, mask=turned, other=1.0)
        sin = tl.load(angles + ROPE // 2 + pair, mask=turned, other=0.0)
        if NORM:
            x *= tl.rsqrt(tl.sum(x * x, 1) / (NOPE + ROPE) + eps)[:, None]
        # [BLOCK_H, D / 2] twice
        even, odd = tl.split(tl.reshape(x, (BLOCK_H, block // 2, 2)))
        turned_even, turned_odd = rotate(even, odd, cos[None, :], sin[None, :])
        even, odd = tl.where(turned[None, :], turned_even, even), tl.where(turned[None, :], turned_odd, odd)
        x = tl.reshape(tl.join(even, odd), (BLOCK_H, block))
        tl.store(row[:, None] + column[None, :], round_to(x, Q.dtype.element_ty, WRITER.exact_casts), mask=live)

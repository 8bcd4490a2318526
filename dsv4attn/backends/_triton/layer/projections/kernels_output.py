"""Kernels of the output projection in fp8: outputs turned back and quantised, and the product of codes with codes.

Quantisation is integer and fp32 arithmetic, so that every device writes the same codes, and so does the interpreter.
Codes are multiplied as fp8 where the device does that, and else as fp16, which holds every code exactly.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from dsv4attn.backends._triton.launching.kernels_pdl import wait_then_launch_dependents
from dsv4attn.backends._triton.launching.runtime import stable_kernel
from dsv4attn.backends._triton.numerics import angles_of, rotate, round_to, scale_of_byte
from dsv4attn.backends._triton.sizes import cdiv


@triton.jit
def nearest_codes(x, FNUZ: tl.constexpr):
    """Codes, int32, of fp32 x that are at most the largest code: nearest even, subnormals too. The rest is NaN.

    Adding 1.5 * 2^(e + 20) to a number of exponent e leaves three bits of its mantissa, and below the smallest normal
    code the steps of that. 2^-120 (2^-119 in FNUZ) puts exponent and mantissa of the result where a code has them.
    """
    least: tl.constexpr = 120 if FNUZ else 121
    exponent = tl.maximum(x.to(tl.int32, bitcast=True) & 0x7F800000, least << 23)
    anchor = (exponent + ((20 << 23) | 0x400000)).to(tl.float32, bitcast=True)
    unit: tl.constexpr = 0x04000000 if FNUZ else 0x03800000
    rounded = (x + anchor - anchor) * tl.full((), unit, tl.int32).to(tl.float32, bitcast=True)
    bits = rounded.to(tl.int32, bitcast=True)
    size, sign = bits & 0x7FFFFFFF, (bits >> 24) & 0x80
    # what is no number has larger bits than any code; what rounds to zero has no sign, as 0x80 of FNUZ is NaN
    if FNUZ:
        return tl.where(size < 0x08000000, (size >> 20) | sign, 0x80)
    return (tl.minimum(size, 0x07F00000) >> 20) | sign


@stable_kernel
def quantize_output_kernel(
    O,  # [tokens, HEADS, DIM] # noqa: E741
    POSITIONS,  # [tokens] int64
    TABLE,  # [num_positions, ROPE] fp32, cosines before sines
    CODES,  # [tokens, HEADS, DIM] uint8, dense
    SCALES,  # [tokens, HEADS, DIM / GROUP] fp32, or uint8 exponents; dense
    o_stride: tl.int64, head_stride: tl.int64, table_stride: tl.int64, num_positions: tl.int64,
    HEADS: tl.constexpr, BLOCK_H: tl.constexpr, DIM: tl.constexpr, ROPE: tl.constexpr,
    GROUP: tl.constexpr, ALIGNED: tl.constexpr, FNUZ: tl.constexpr, LARGEST: tl.constexpr, FLOOR: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (tokens * parts * DIM / GROUP,): of each token, BLOCK_H heads, the GROUP columns of each under one scale.

    ALIGNED: bytes that divide the address of every row of O. LARGEST, FLOOR: the largest code, and the smallest maximum
    of a group, by the bits of their values in fp32.
    """
    wait_then_launch_dependents(PDL)
    nope: tl.constexpr = DIM - ROPE
    groups: tl.constexpr = DIM // GROUP
    parts: tl.constexpr = cdiv(HEADS, BLOCK_H) * groups
    token = (tl.program_id(0) // parts).to(tl.int64)
    group = tl.program_id(0) % groups
    head = tl.program_id(0) % parts // groups * BLOCK_H + tl.arange(0, BLOCK_H)
    column = group * GROUP + tl.arange(0, GROUP)
    # [BLOCK_H, GROUP]
    row = tl.multiple_of(O + (token * o_stride + head * head_stride), ALIGNED)
    if HEADS % BLOCK_H:
        x = tl.load(row[:, None] + column[None, :], mask=(head < HEADS)[:, None], other=0.0).to(tl.float32)
    else:
        x = tl.load(row[:, None] + column[None, :]).to(tl.float32)
    if group >= nope // GROUP:
        angles = angles_of(POSITIONS + token, TABLE, table_stride, num_positions)
        pair = group * (GROUP // 2) + tl.arange(0, GROUP // 2) - nope // 2
        cos = tl.load(angles + pair, mask=pair >= 0, other=1.0)
        sin = tl.load(angles + ROPE // 2 + pair, mask=pair >= 0, other=0.0)
        even, odd = tl.split(tl.reshape(x, (BLOCK_H, GROUP // 2, 2)))
        turned_even, turned_odd = rotate(even, odd, cos[None, :], -sin[None, :])
        # a NaN times a sine of 0 would reach its neighbour
        turned = (pair >= 0)[None, :]
        even, odd = tl.where(turned, turned_even, even), tl.where(turned, turned_odd, odd)
        x = tl.reshape(tl.join(even, odd), (BLOCK_H, GROUP))

    # the smallest power of two with amax / 2^e <= largest, found by comparing exponents and mantissas
    amax = tl.maximum(tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1), FLOOR)
    larger = ((amax & 0x7FFFFF) > (LARGEST & 0x7FFFFF)).to(tl.int32)
    byte = tl.where(amax >= 0x7F800000, 254, (amax >> 23) - (LARGEST >> 23) + 127 + larger)
    codes = nearest_codes(x * scale_of_byte(254 - byte)[:, None], FNUZ)

    out = tl.multiple_of(CODES + (token * HEADS + head) * DIM, 16)
    scales = SCALES + (token * HEADS + head) * groups + group
    scale = byte.to(tl.uint8) if SCALES.dtype.element_ty == tl.uint8 else scale_of_byte(byte)
    if HEADS % BLOCK_H:
        tl.store(out[:, None] + column[None, :], codes.to(tl.uint8), mask=(head < HEADS)[:, None])
        tl.store(scales, scale, mask=head < HEADS)
    else:
        tl.store(out[:, None] + column[None, :], codes.to(tl.uint8))
        tl.store(scales, scale)


@triton.jit
def _pairs(words, ROWS: tl.constexpr, DT: tl.constexpr):
    """Numbers [ROWS, 2 n] of words [ROWS, n], int32, each of which is two fp16."""
    low, high = words.to(tl.int16).to(tl.float16, bitcast=True), (words >> 16).to(tl.int16).to(tl.float16, bitcast=True)
    return tl.reshape(tl.join(low, high), (ROWS, 2 * words.shape[1])).to(DT)


@triton.jit
def decode(words, ROWS: tl.constexpr, DT: tl.constexpr):
    """Values of the e4m3 codes in words [ROWS, n], int32: of codes 0 and 2 of every word, and of codes 1 and 3.

    They are times 2^-8 (2^-7 in FNUZ), and exact: fp16 has a code's seven low bits where its own exponent and mantissa
    begin, subnormals included. A NaN becomes some number, see `nan_bits`.
    """
    even = ((words << 7) & 0x3F803F80) | ((words << 8) & -0x7FFF8000)
    odd = ((words >> 1) & 0x3F803F80) | (words & -0x7FFF8000)
    return _pairs(even, ROWS, DT), _pairs(odd, ROWS, DT)


@triton.jit
def nan_bits(words, FNUZ: tl.constexpr, ROWS: tl.constexpr):
    """Int32 [ROWS, n / 4] of words [ROWS, n] of codes; bits of 0x80808080 are set if one of four words has a NaN."""
    if FNUZ:
        # subtracting 1 borrows from the next byte only at a zero, which 0x80 becomes
        words ^= -0x7F7F7F80
        found = (words - 0x01010101) & ~words
    else:
        found = (words & 0x7F7F7F7F) + 0x01010101
    first, second = tl.split(tl.reshape(found, (ROWS, words.shape[1] // 4, 2, 2)))
    first, second = tl.split(first | second)
    return first | second


@triton.jit
def has_nan_bits(bits):
    """Whether there is a NaN in a row, of `nan_bits` of all its words."""
    return tl.max(((bits & -0x7F7F7F80) != 0).to(tl.int32), 1) != 0


@triton.jit
def factors(scales):
    """fp32 factors of scales, which are fp32 or uint8 exponents."""
    return scale_of_byte(scales.to(tl.int32)) if scales.dtype == tl.uint8 else scales


@stable_kernel
def project_codes_kernel(
    CODES,  # [tokens, groups, K] uint8
    SCALES,  # [tokens, groups, K / GROUP] fp32, or uint8 exponents
    W,  # [groups * RANK, K] uint8
    W_SCALES,  # [ceil(groups * RANK / GROUP), K / GROUP] fp32, or uint8 exponents: blocks of GROUP x GROUP
    OUT,  # [tokens, groups, RANK]
    tokens: tl.int32, token_stride: tl.int64, group_stride: tl.int64, scale_stride: tl.int64,
    scale_group_stride: tl.int64, w_stride: tl.int64, w_scale_stride: tl.int64, w_scale_step: tl.int64,
    out_stride: tl.int64, out_group_stride: tl.int64,
    RANK: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SWAPPED: tl.constexpr, NATIVE: tl.constexpr, OUT_ALIGNED: tl.constexpr,
    FNUZ: tl.constexpr, DT: tl.constexpr, EXACT_CASTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (groups * token tiles * rank tiles,), neighbours share tokens: a tile of one group's product.

    Sums of GROUP columns, times both factors, are added in fp32, one after the other. Rows of CODES and W begin at
    multiples of 16 bytes. NATIVE: codes are multiplied as fp8, and otherwise as DT. SWAPPED: weights are the left
    operand, for tiles of few tokens. OUT_ALIGNED: bytes that divide the address of every row of OUT.
    """
    wait_then_launch_dependents(PDL)
    rank_tiles: tl.constexpr = cdiv(RANK, BLOCK_N)
    token_tiles = tl.cdiv(tokens, BLOCK_M)
    tile = tl.program_id(0) // rank_tiles
    group = (tile // token_tiles).to(tl.int64)
    m = (tile % token_tiles) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = (tl.program_id(0) % rank_tiles) * BLOCK_N + tl.arange(0, BLOCK_N)
    # tokens and ranks past the end read the last row again, which costs less than a mask
    token, rank = tl.minimum(m, tokens - 1).to(tl.int64), group * RANK + tl.minimum(n, RANK - 1)
    # codes are read as what they are multiplied as, or four in a word
    in_word: tl.constexpr = 1 if NATIVE else 4
    element: tl.constexpr = tl.float8e4nv if NATIVE else tl.int32
    k = tl.arange(0, GROUP // in_word)
    row = tl.multiple_of(CODES + (token * token_stride + group * group_stride), 16).to(tl.pointer_type(element))
    column = tl.multiple_of(W + rank * w_stride, 16).to(tl.pointer_type(element))
    scale = SCALES + (token * scale_stride + group * scale_group_stride)
    # no tile reaches into a second block of weights
    one_scale: tl.constexpr = RANK % GROUP == 0 and GROUP % BLOCK_N == 0
    if one_scale:
        w_scale = W_SCALES + ((group * RANK + (tl.program_id(0) % rank_tiles) * BLOCK_N) // GROUP) * w_scale_stride
    else:
        w_scale = W_SCALES + (rank // GROUP) * w_scale_stride
    # 2^8 (2^7 in FNUZ) of each operand
    unit: tl.constexpr = 1.0 if NATIVE else (16384.0 if FNUZ else 65536.0)
    acc = tl.zeros([BLOCK_N, BLOCK_M] if SWAPPED else [BLOCK_M, BLOCK_N], tl.float32)
    if not NATIVE:
        a_nan, b_nan = tl.zeros([BLOCK_M, GROUP // 16], tl.int32), tl.zeros([BLOCK_N, GROUP // 16], tl.int32)
    a_next, b_next = factors(tl.load(scale)), factors(tl.load(w_scale)) * unit
    for step in range(K // GROUP):
        a_factor, b_factor = a_next, b_next
        # [M, K], [N, K]
        a = tl.load(row[:, None] + (step * (GROUP // in_word) + k)[None, :])
        b = tl.load(column[:, None] + (step * (GROUP // in_word) + k)[None, :])
        # a step ahead, so that no product waits for them
        following = tl.minimum(step + 1, K // GROUP - 1)
        a_next = factors(tl.load(scale + following))
        b_next = factors(tl.load(w_scale + following * w_scale_step)) * unit
        if NATIVE:
            sums = tl.dot(b, tl.trans(a)) if SWAPPED else tl.dot(a, tl.trans(b))
        else:
            a_nan |= nan_bits(a, FNUZ, BLOCK_M)
            b_nan |= nan_bits(b, FNUZ, BLOCK_N)
            a_even, a_odd = decode(a, BLOCK_M, DT)
            b_even, b_odd = decode(b, BLOCK_N, DT)
            if SWAPPED:
                sums = tl.dot(b_even, tl.trans(a_even), input_precision="ieee")
                sums = tl.dot(b_odd, tl.trans(a_odd), sums, input_precision="ieee")
            else:
                sums = tl.dot(a_even, tl.trans(b_even), input_precision="ieee")
                sums = tl.dot(a_odd, tl.trans(b_odd), sums, input_precision="ieee")
        if one_scale:
            both = a_factor * b_factor
            acc += sums * (both[None, :] if SWAPPED else both[:, None])
        elif SWAPPED:
            acc += sums * b_factor[:, None] * a_factor[None, :]
        else:
            acc += sums * a_factor[:, None] * b_factor[None, :]

    # [M, N]
    if SWAPPED:
        acc = tl.trans(acc)
    if not NATIVE:
        acc = tl.where(has_nan_bits(a_nan)[:, None] | has_nan_bits(b_nan)[None, :], float("nan"), acc)
    out = tl.multiple_of(OUT + (m.to(tl.int64) * out_stride + group * out_group_stride), OUT_ALIGNED)
    live = (m < tokens)[:, None] & (n < RANK)[None, :]
    tl.store(out[:, None] + n[None, :], round_to(acc, OUT.dtype.element_ty, EXACT_CASTS), mask=live)

"""The kernel of the indexer's query: RoPE, rounding and quantisation of each head, and weights with all factors.

A head is computed by itself, so that its bits depend on nothing else.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from dsv4attn.backends._triton.cache.kernels_insert import encode_e4m3, pack_pairs, quantize_e2m1, scale_byte, size_bits
from dsv4attn.backends._triton.launching.kernels_pdl import wait_then_launch_dependents
from dsv4attn.backends._triton.launching.runtime import stable_kernel
from dsv4attn.backends._triton.numerics import angles_of, cast, rotate, round_to, scale_of_byte
from dsv4attn.backends._triton.sizes import cdiv, next_power_of_2


@triton.jit
def turned_tail(
    row, live, angles, BLOCK_H: tl.constexpr, FIRST: tl.constexpr, D: tl.constexpr, ROPE: tl.constexpr
):  # fmt: skip
    """Dims FIRST .. D - 1 of heads, fp32, with the last ROPE of them rotated: [BLOCK_H, next power of two].

    row: [BLOCK_H] pointers to heads. angles: pointer to the cosines of a position, then its sines. An even
    number of dims comes before the rotated ones.
    """
    block: tl.constexpr = next_power_of_2(D - FIRST)
    before: tl.constexpr = (D - ROPE - FIRST) // 2
    dim = tl.arange(0, block)
    pair = tl.arange(0, block // 2) - before
    turned = (pair >= 0) & (pair < ROPE // 2)
    x = tl.load(row[:, None] + (FIRST + dim)[None, :], mask=live[:, None] & (dim < D - FIRST)[None, :], other=0.0)
    cos = tl.load(angles + pair, mask=turned, other=1.0)
    sin = tl.load(angles + ROPE // 2 + pair, mask=turned, other=0.0)
    even, odd = tl.split(tl.reshape(x.to(tl.float32), (BLOCK_H, block // 2, 2)))
    turned_even, turned_odd = rotate(even, odd, cos[None, :], sin[None, :])
    if before > 0:
        turned_even = tl.where(turned[None, :], turned_even, even)
        turned_odd = tl.where(turned[None, :], turned_odd, odd)
    return tl.reshape(tl.join(turned_even, turned_odd), (BLOCK_H, block))


@triton.jit
def encode(x, WRITER: tl.constexpr, NATIVE: tl.constexpr):
    """Bytes of `encode_e4m3`. NATIVE: the device converts to e4m3fn itself, with the same codes.

    x is a bf16 number times a power of two. So its 8 bits fit into fp16, by way of which Triton 3.6 converts on sm_89,
    and only one step rounds. fp16 cuts bits off below 2^-17 alone, where codes are 0.
    """
    if NATIVE:
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    return encode_e4m3(x, WRITER.fnuz, WRITER.largest).to(tl.uint8)


@triton.jit
def store_e2m1(
    x, codes, scales, live, COUNT: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK: tl.constexpr, WRITER: tl.constexpr
):  # fmt: skip
    """Write the codes and scale bytes of heads x [BLOCK_H, BLOCK] fp32, of which the first COUNT dims exist.

    codes, scales: [BLOCK_H] pointers to bytes.
    """
    GROUP: tl.constexpr = WRITER.group
    groups: tl.constexpr = BLOCK // GROUP
    values, byte = quantize_e2m1(tl.reshape(x, (BLOCK_H * groups, GROUP)), WRITER.largest, WRITER.floor)
    place, group = tl.arange(0, BLOCK // 2), tl.arange(0, groups)
    packed = pack_pairs(tl.reshape(values, (BLOCK_H, BLOCK)), BLOCK_H, BLOCK // 2)
    mask = live[:, None] & (place < COUNT // 2)[None, :]
    tl.store(codes[:, None] + place[None, :], packed.to(tl.uint8), mask=mask)
    byte = tl.reshape(byte, (BLOCK_H, groups)).to(tl.uint8)
    tl.store(scales[:, None] + group[None, :], byte, mask=live[:, None] & (group < COUNT // GROUP)[None, :])


@stable_kernel
def index_query_kernel(
    Q,  # [T, HEADS, D]
    WEIGHTS,  # [T, HEADS]
    POSITIONS,  # [T] int64
    TABLE,  # [num_positions, ROPE] fp32, cosines before sines
    VALUES,  # [T, HEADS, D] uint8, bf16 or fp32; [T, HEADS, D / 2] uint8 of e2m1
    SCALES,  # [T, HEADS, D / GROUP] uint8, of e2m1
    FOLDED,  # [T, HEADS] fp32
    q_stride: tl.int64, head_stride: tl.int64, weight_stride: tl.int64, num_positions: tl.int64,
    table_stride: tl.int64, factor: tl.float32,
    HEADS: tl.constexpr, BLOCK_H: tl.constexpr, ROW_ALIGNED: tl.constexpr, VALUES_ALIGNED: tl.constexpr,
    D: tl.constexpr, ROPE: tl.constexpr, CODE_BITS: tl.constexpr, NATIVE: tl.constexpr, WRITER: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (T * parts,): each program takes BLOCK_H heads of a token.

    ROW_ALIGNED, VALUES_ALIGNED: bytes that divide the address of every head of Q and row of TABLE, and of every head of
    VALUES. CODE_BITS: 8 of e4m3, with one scale a head, which is folded into its weight; 4 of e2m1; 0 of plain values.
    factor: of every weight.
    """
    wait_then_launch_dependents(PDL)
    EXACT_CASTS: tl.constexpr = WRITER.exact_casts
    GROUP: tl.constexpr = WRITER.group
    parts: tl.constexpr = cdiv(HEADS, BLOCK_H)
    # dims before `first` are not rotated; of e2m1 these are whole groups
    first: tl.constexpr = (D - ROPE) // GROUP * GROUP if CODE_BITS == 4 else D - ROPE
    token = (tl.program_id(0) // parts).to(tl.int64)
    head = tl.program_id(0) % parts * BLOCK_H + tl.arange(0, BLOCK_H)
    live = head < HEADS
    row = tl.multiple_of(Q + token * q_stride + head * head_stride, ROW_ALIGNED)
    place = token * HEADS + head
    columns: tl.constexpr = D // 2 if CODE_BITS == 4 else D
    values = tl.multiple_of(VALUES + place * columns, VALUES_ALIGNED)
    if first > 0:
        # [BLOCK_H, first], on its way while a position and its angles are fetched
        dim = tl.arange(0, next_power_of_2(first))
        mask = live[:, None] & (dim < first)[None, :]
        x = tl.load(row[:, None] + dim[None, :], mask=mask, other=0.0)
    weight = tl.load(WEIGHTS + token * weight_stride + head, mask=live, other=0.0).to(tl.float32) * factor
    angles = angles_of(POSITIONS + token, TABLE, table_stride, num_positions, ROW_ALIGNED)
    # [BLOCK_H, D - first]
    tail = turned_tail(row, live, angles, BLOCK_H, first, D, ROPE)
    tail_dim = tl.arange(0, next_power_of_2(D - first))
    tail_mask = live[:, None] & (tail_dim < D - first)[None, :]

    if CODE_BITS == 0:
        if first > 0:
            tl.store(values[:, None] + dim[None, :], cast(x, VALUES.dtype.element_ty, EXACT_CASTS), mask=mask)
        tail = round_to(tail, VALUES.dtype.element_ty, EXACT_CASTS)
        tl.store(values[:, None] + (first + tail_dim)[None, :], tail, mask=tail_mask)
    else:
        tail = round_to(tail, tl.bfloat16, EXACT_CASTS).to(tl.float32)
        if first > 0:
            x = cast(x, tl.bfloat16, EXACT_CASTS).to(tl.float32)
        if CODE_BITS == 4:
            scales = SCALES + place * (D // GROUP)
            if first > 0:
                store_e2m1(x, values, scales, live, first, BLOCK_H, next_power_of_2(first), WRITER)
            values, scales = values + first // 2, scales + first // GROUP
            store_e2m1(tail, values, scales, live, D - first, BLOCK_H, next_power_of_2(D - first), WRITER)
        else:
            amax = tl.max(size_bits(tail), 1)
            if first > 0:
                amax = tl.maximum(amax, tl.max(size_bits(x), 1))
            byte = scale_byte(amax, WRITER.largest, WRITER.floor)
            weight *= scale_of_byte(byte)
            shrink = scale_of_byte(254 - byte)[:, None]
            if first > 0:
                code = encode(x * shrink, WRITER, NATIVE)
                tl.store(values[:, None] + dim[None, :], code, mask=mask)
            code = encode(tail * shrink, WRITER, NATIVE)
            tl.store(values[:, None] + (first + tail_dim)[None, :], code, mask=tail_mask)
    tl.store(FOLDED + place, weight, mask=live)

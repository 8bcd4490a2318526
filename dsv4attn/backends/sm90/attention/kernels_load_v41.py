"""The role that loads and decodes V4.1's records: from slots to tiles of bf16 in shared memory.

`kernels_small_decode` decodes tiles with the same functions.

A record of codes has eight pieces of 64, of which five are copied to shared memory and three wait in registers. A
record of nibbles, which has four pieces of 128, is copied as a whole.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier

from dsv4attn.backends.sm90.attention.kernels_load_v4 import (
    OPERANDS,
    SPOIL_OPERANDS,
    WORDS_L,
    decoded_nibbles,
    load_codes,
    spoilt,
    store_words,
    words_of,
)
from dsv4attn.backends.sm90.attention.kernels_schedule import NIBBLE_PAGES, advance, begin, coded_page_of, slots
from dsv4attn.backends.sm90.attention.ptx import codes, nibbles
from dsv4attn.backends.sm90.compat import copy_async

CODES_0, CODES_1 = gl.constexpr(codes(scale=12)), gl.constexpr(codes(scale=13))
CODES_2, CODES_3 = gl.constexpr(codes(scale=14)), gl.constexpr(codes(scale=15))
"""A thread has all 16 scale bytes of its key, in four words: $12 to $15."""
SPOIL_3 = gl.constexpr(codes(spoils=True, scale=15))
SEEN = gl.constexpr(
    """{
.reg .b32 t;
or.b32 t, $4, $5;
or.b32 t, t, $6;
or.b32 t, t, $7;
and.b32 t, t, 0x80808080;
mov.b32 $0, t;
mov.b32 $1, t;
mov.b32 $2, t;
mov.b32 $3, t;
}
"""
)
"""All four operands are not 0 if one of four words has a bit of 0x80808080."""

NIBBLES_0 = gl.constexpr(nibbles(0))
NIBBLES_1 = gl.constexpr(nibbles(1))
NIBBLES_2 = gl.constexpr(nibbles(2))
NIBBLES_3 = gl.constexpr(nibbles(3))
PIECES_L = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2]],
        lane_bases=[[1, 0], [2, 0], [4, 0], [0, 4], [0, 8]],
        warp_bases=[[8, 0], [16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 16],
    )
)
"""As WORDS_L, with lanes in another order: eight lanes in a row hold eight keys.

A thread's word of nibbles is 16 bytes of a tile. In WORDS_L's order, where four of eight lanes hold the same key, lanes
store to the same banks, and take two turns.
"""
RAW_NIBBLES_S = gl.constexpr(gl.SwizzledSharedLayout(4, 2, 4, [1, 0]))
"""As RAW_S, for eight lanes that hold eight keys."""
PIECES_128_L = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [64, 0]],
        lane_bases=[[1, 0], [2, 0], [4, 0], [0, 4], [0, 8]],
        warp_bases=[[8, 0], [16, 0], [32, 0]],
        block_bases=[],
        shape=[128, 16],
    )
)
"""The same for 128 keys."""


@gluon.jit
def decoded(words, scales, none, PIECE: gl.constexpr, TEXT: gl.constexpr):
    """[N, 16] words of codes, the piece PIECE of each record, as [N, 32] words of two bf16 values.

    scales: [N, 16], in each thread the four words of its key's scales. none: [N, 16], values are NaN where it is not 0;
    or None.
    """
    of = gl.arange(0, 16, layout=gl.SliceLayout(0, words.type.layout))
    pick = 0x4040 + 0x0202 * (PIECE % 2) + 0x0101 * (of >> 3)
    pick = gl.expand_dims(pick, 0) + gl.zeros_like(words)
    if none is None:
        first, second = gl.inline_asm_elementwise(
            TEXT, OPERANDS, [words, scales, pick], dtype=(gl.int32, gl.int32), is_pure=True, pack=4
        )
    else:
        first, second = gl.inline_asm_elementwise(
            TEXT, SPOIL_OPERANDS, [words, scales, pick, none], dtype=(gl.int32, gl.int32), is_pure=True, pack=4
        )
    return gl.reshape(gl.join(first, second), [words.shape[0], 32])


@gluon.jit
def store_nibbles(stages, b, words, scales, TEXT: gl.constexpr):
    """Write [N, 16] words of nibbles, a piece of each record, as 128 columns of tile b. scales: of `copy_pieces`."""
    of = gl.arange(0, 16, layout=gl.SliceLayout(0, words.type.layout))
    pick = 0x4040 + 0x0202 * ((of >> 2) & 1)
    values = decoded_nibbles(words, scales, pick, TEXT)
    words_of(stages, b).store(values)


@gluon.jit
def load_scales(data, scale, ok, inside, KIND: gl.constexpr, INTERLEAVED: gl.constexpr, LAYOUT: gl.constexpr):
    """[N, 16] words of scales, in each thread all four of its key's record of codes."""
    of = gl.arange(0, 16, layout=gl.SliceLayout(0, LAYOUT))
    if INTERLEAVED:
        # not carried from tile to tile: it takes registers that keys need
        scale = data + 128
    if KIND == NIBBLE_PAGES:
        ok = ok & (inside != 0)
    p = gl.multiple_of(gl.expand_dims(scale, 1) + gl.expand_dims(of % 4, 0), [1, 16])
    return gl.load(p, mask=gl.expand_dims(ok, 1) & (gl.expand_dims(of, 0) < 16), other=0)


@gluon.jit
def load_nibble_scales(scale, ok, LAYOUT: gl.constexpr):
    """[N, 16] words of scales of records of nibbles, as `copy_pieces` copies them."""
    of = gl.arange(0, 16, layout=gl.SliceLayout(0, LAYOUT))
    place = 2 * (of % 4) + (of >> 3)
    mask = gl.expand_dims(ok, 1) & (gl.expand_dims(of, 0) < 16)
    return gl.load(gl.expand_dims(scale, 1) + gl.expand_dims(place, 0), mask=mask, other=0)


@gluon.jit
def copy_pieces(raw_s, data, scale, ok, inside, KIND: gl.constexpr, INTERLEAVED: gl.constexpr, LAYOUT: gl.constexpr):
    """Start to copy five pieces of each key to shared memory, or the four that a record of nibbles has, and its scales.

    A thread decodes a quarter of each piece of nibbles, which has two scales: half a word of each of four.
    """
    of = gl.arange(0, 16, layout=gl.SliceLayout(0, LAYOUT))
    p = gl.multiple_of(gl.expand_dims(data, 1) + gl.expand_dims(of, 0), [1, 16])
    mask = gl.expand_dims(ok, 1) & (gl.expand_dims(of, 0) < 16)
    for g in gl.static_range(4):
        copy_async(raw_s[g], p + 16 * g, mask=mask)
    if KIND != NIBBLE_PAGES:  # noqa: SIM114 - Triton 3.6 takes no `or` of a constant and a value
        copy_async(raw_s[4], p + 64, mask=mask)
    elif inside != 0:
        copy_async(raw_s[4], p + 64, mask=mask)
    else:
        if INTERLEAVED:
            scale = data + 64
        place = 2 * (of % 4) + (of >> 3)
        copy_async(raw_s[4], gl.expand_dims(scale, 1) + gl.expand_dims(place, 0), mask=mask)
    async_copy.commit_group()


@gluon.jit
def load_rest(data, ok, inside, KIND: gl.constexpr, LAYOUT: gl.constexpr):
    """The other three pieces of a record of codes."""
    if KIND == NIBBLE_PAGES:
        ok = ok & (inside != 0)
    return load_codes(data, ok, 80, LAYOUT), load_codes(data, ok, 96, LAYOUT), load_codes(data, ok, 112, LAYOUT)


@gluon.jit
def first_half(smem, b, x4, x5, x6, x7, scales):
    """Write the last 256 columns of tile b, of which 64 are NaN if one of the scales is."""
    none = spoilt(scales)
    none = gl.inline_asm_elementwise(SEEN, "=r,=r,=r,=r,r,r,r,r", [none], dtype=gl.int32, is_pure=True, pack=4)
    y = decoded(x6, scales, none, 6, SPOIL_3)
    store_words(smem.k3, b, y, decoded(x7, scales, None, 7, CODES_3))
    y = decoded(x4, scales, None, 4, CODES_2)
    store_words(smem.k2, b, y, decoded(x5, scales, None, 5, CODES_2))


@gluon.jit
def second_half(smem, b, x0, x1, x2, x3, scales):
    """Write the first 256 columns of tile b."""
    y = decoded(x0, scales, None, 0, CODES_0)
    store_words(smem.k0, b, y, decoded(x1, scales, None, 1, CODES_0))
    y = decoded(x2, scales, None, 2, CODES_1)
    store_words(smem.k1, b, y, decoded(x3, scales, None, 3, CODES_1))


@gluon.jit
def produce_coded(keys, chunk, t, pos, count, smem, KIND: gl.constexpr, INTERLEAVED: gl.constexpr):
    """Fill stages of keys with the count tiles of a chunk, one after the other, and store which keys are there.

    While a tile is decoded, the next one's first pieces are being copied, and the slots of the one after that are
    loaded: a loop's first branch waits for all loads that were in flight from the turn before. KIND: CODE_PAGES or
    NIBBLE_PAGES.
    """
    LAYOUT: gl.constexpr = PIECES_L if KIND == NIBBLE_PAGES else WORDS_L
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
    walk = begin(keys, chunk, t, pos)
    slot, inside = slots(keys, chunk, walk, row)
    ok, data, scale = coded_page_of(keys, slot, inside, KIND, INTERLEAVED)
    copy_pieces(smem.raw, data, scale, ok, inside, KIND, INTERLEAVED, LAYOUT)
    x5, x6, x7 = load_rest(data, ok, inside, KIND, LAYOUT)
    scales = load_scales(data, scale, ok, inside, KIND, INTERLEAVED, LAYOUT)
    walk = advance(keys, chunk, walk)
    next_slot, next_inside = slots(keys, chunk, walk, row)
    walk = advance(keys, chunk, walk)
    slot, behind = slots(keys, chunk, walk, row)
    next_ok, data, scale = coded_page_of(keys, next_slot, next_inside, KIND, INTERLEAVED)
    for i in range(count):
        b = i % 2
        async_copy.wait_group(0)
        x0 = smem.raw[0].load(LAYOUT)
        x1 = smem.raw[1].load(LAYOUT)
        x2 = smem.raw[2].load(LAYOUT)
        x3 = smem.raw[3].load(LAYOUT)
        x4 = smem.raw[4].load(LAYOUT)
        copy_pieces(smem.raw, data, scale, next_ok, next_inside, KIND, INTERLEAVED, LAYOUT)
        mbarrier.wait(smem.k_empty.index(b), ((i // 2) & 1) ^ 1)
        coded = (inside != 0) if KIND == NIBBLE_PAGES else True
        if coded:
            first_half(smem, b, x4, x5, x6, x7, scales)
        else:
            store_nibbles(smem.k3, b, x3, x4, NIBBLES_3)
            store_nibbles(smem.k2, b, x2, x4, NIBBLES_2)
        next_scales = load_scales(data, scale, next_ok, next_inside, KIND, INTERLEAVED, LAYOUT)
        x5, x6, x7 = load_rest(data, next_ok, next_inside, KIND, LAYOUT)
        if coded:
            second_half(smem, b, x0, x1, x2, x3, scales)
        else:
            store_nibbles(smem.k1, b, x1, x4, NIBBLES_1)
            store_nibbles(smem.k0, b, x0, x4, NIBBLES_0)
        smem.bias.index(b).store(gl.where(ok, 0.0, -float("inf")))
        fence_async_shared()
        mbarrier.arrive(smem.k_full.index(b), count=1)
        ok = next_ok
        scales = next_scales
        if KIND == NIBBLE_PAGES:
            inside = next_inside
            next_inside = behind
        next_ok, data, scale = coded_page_of(keys, slot, behind, KIND, INTERLEAVED)
        walk = advance(keys, chunk, walk)
        slot, behind = slots(keys, chunk, walk, row)

"""The role that loads and decodes keys in fp8 pages: from slots to tiles of bf16 in shared memory."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier

from dsv4attn.backends.sm90.compat import copy_async, reinterpret
from dsv4attn.backends.sm90.kernels_schedule import advance, begin, page_of, slots
from dsv4attn.backends.sm90.ptx import codes

WORDS_L = gl.constexpr(gl.BlockedLayout([1, 4], [8, 4], [8, 1], [1, 0]))
"""64 codes of each key of a tile, as words: four threads hold a key, eight warps a tile."""
ROPE_L = gl.constexpr(gl.BlockedLayout([1, 8], [8, 4], [8, 1], [1, 0]))
KEY_WORDS_S = gl.constexpr(gl.NVMMASharedLayout(128, 32, 2))
"""The same bytes as KEYS_S, two values in a word."""
RAW_S = gl.constexpr(gl.SwizzledSharedLayout(4, 1, 1, [1, 0]))


DECODE, SPOIL = gl.constexpr(codes()), gl.constexpr(codes(spoils=True))
OPERANDS = gl.constexpr(",".join(["=&r"] * 8 + ["r"] * 12))
SPOIL_OPERANDS = gl.constexpr(",".join(["=&r"] * 8 + ["r"] * 16))


@gluon.jit
def decoded(words, scales, none, BYTE: gl.constexpr):
    """[N, 16] words of codes as [N, 32] words of two bf16 values, under the scale byte BYTE of [N].

    none: [N], values of keys where it is not 0 are NaN; or None.
    """
    zeros = gl.zeros_like(words)
    scales = gl.expand_dims(scales, 1) + zeros
    pick = zeros + (0x4040 + 0x0101 * BYTE)
    if none is None:
        first, second = gl.inline_asm_elementwise(
            DECODE, OPERANDS, [words, scales, pick], dtype=(gl.int32, gl.int32), is_pure=True, pack=4
        )
    else:
        none = gl.expand_dims(none, 1) + zeros
        first, second = gl.inline_asm_elementwise(
            SPOIL, SPOIL_OPERANDS, [words, scales, pick, none], dtype=(gl.int32, gl.int32), is_pure=True, pack=4
        )
    return gl.reshape(gl.join(first, second), [words.shape[0], 32])


@gluon.jit
def spoilt(scales):
    """int32 words of four scale bytes each; the upper bit of a byte is set if that scale byte is 255, and so NaN."""
    return (~scales - 0x01010101) & scales


@gluon.jit
def without_scale(low, high):
    """Not 0 where one of a record's seven scale bytes is NaN; the eighth is padding."""
    return (spoilt(low) | spoilt(high & 0xFFFFFF)) & -0x7F7F7F80


@gluon.jit
def store_words(stages, b, first, second):
    """Write [N, 32] and [N, 32] words as 128 columns of tile b of N keys."""
    N: gl.constexpr = first.shape[0]
    words = gl.reshape(gl.permute(gl.join(first, second), (0, 2, 1)), [N, 64])
    reinterpret(stages.index(b), gl.int32, [N, 64], KEY_WORDS_S).store(words)


@gluon.jit
def load_codes(data, ok, FIRST: gl.constexpr, LAYOUT: gl.constexpr):
    """64 codes of each key, from word FIRST on; zeros where not ok."""
    # the first word is added to the others' numbers: a sum of pointers and 0 is dropped, and with it the hint
    of = gl.arange(0, 16, layout=gl.SliceLayout(0, LAYOUT))
    p = gl.multiple_of(gl.expand_dims(data, 1) + gl.expand_dims(of + FIRST, 0), [1, 16])
    # a mask of both dimensions: with a mask of one, the compiler loads word by word
    return gl.load(p, mask=gl.expand_dims(ok, 1) & (gl.expand_dims(of, 0) < 16), other=0)


@gluon.jit
def load_rope(data, ok):
    """The 32 words of each key's 64 bf16 values."""
    of = gl.arange(0, 32, layout=gl.SliceLayout(0, ROPE_L))
    data = gl.convert_layout(data, gl.SliceLayout(1, ROPE_L), assert_trivial=True)
    ok = gl.convert_layout(ok, gl.SliceLayout(1, ROPE_L), assert_trivial=True)
    p = gl.multiple_of(gl.expand_dims(data, 1) + gl.expand_dims(of, 0) + 112, [1, 16])
    return gl.load(p, mask=gl.expand_dims(ok, 1) & (gl.expand_dims(of, 0) < 32), other=0)


@gluon.jit
def allocate_codes(LAYOUT: gl.constexpr):
    """Shared memory of 64 codes of each key."""
    return gl.allocate_shared_memory(gl.int32, [64, 16], LAYOUT)


@gluon.jit
def copy_codes(raw_s, data, ok):
    """Start to copy the first 320 codes of each key to shared memory, which is too small for the other 128."""
    of = gl.arange(0, 16, layout=gl.SliceLayout(0, WORDS_L))
    p = gl.multiple_of(gl.expand_dims(data, 1) + gl.expand_dims(of, 0), [1, 16])
    mask = gl.expand_dims(ok, 1) & (gl.expand_dims(of, 0) < 16)
    for g in gl.static_range(5):
        copy_async(raw_s[g], p + 16 * g, mask=mask)
    async_copy.commit_group()


@gluon.jit
def produce(keys, chunk, t, pos, count, smem):
    """Fill stages of keys with the count tiles of a chunk, one after the other, and store which keys are there.

    While a tile is decoded, the next one's first codes are being copied. Its own last codes are loaded where a turn of
    the loop begins and used where it ends, and the slots of the tile behind the next one are: a loop's first branch
    waits for all loads that were in flight from the turn before.
    """
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, WORDS_L))
    walk = begin(keys, chunk, t, pos)
    behind = advance(keys, chunk, walk)
    slot, inside = slots(keys, chunk, walk, row)
    next_slot, next_inside = slots(keys, chunk, behind, row)
    walk = advance(keys, chunk, behind)
    ok, data, scale = page_of(keys, slot, inside)
    copy_codes(smem.raw, data, ok)
    scales = gl.load(scale, mask=ok, other=0)
    next_ok, next_data, scale = page_of(keys, next_slot, next_inside)
    for i in range(count):
        b = i % 2
        x5 = load_codes(data, ok, 80, WORDS_L)
        x6 = load_codes(data, ok, 96, WORDS_L)
        rope = load_rope(data, ok)
        next_scales = gl.load(scale, mask=next_ok, other=0)
        slot, inside = slots(keys, chunk, walk, row)
        low = scales.to(gl.int32)
        high = (scales >> 32).to(gl.int32)
        async_copy.wait_group(0)
        x0 = smem.raw[0].load(WORDS_L)
        x1 = smem.raw[1].load(WORDS_L)
        x2 = smem.raw[2].load(WORDS_L)
        x3 = smem.raw[3].load(WORDS_L)
        x4 = smem.raw[4].load(WORDS_L)
        copy_codes(smem.raw, next_data, next_ok)
        mbarrier.wait(smem.k_empty.index(b), ((i // 2) & 1) ^ 1)
        store_words(smem.k0, b, decoded(x0, low, None, 0), decoded(x1, low, None, 1))
        store_words(smem.k1, b, decoded(x2, low, None, 2), decoded(x3, low, None, 3))
        then_ok, then_data, then_scale = page_of(keys, slot, inside)
        store_words(smem.k2, b, decoded(x4, high, None, 0), decoded(x5, high, None, 1))
        # a key of which one scale is NaN has NaN in 64 columns: that is enough
        store_words(smem.k3, b, decoded(x6, high, without_scale(low, high), 2), rope)
        smem.bias.index(b).store(gl.where(ok, 0.0, -float("inf")))
        fence_async_shared()
        mbarrier.arrive(smem.k_full.index(b), count=1)
        ok, data, scales = next_ok, next_data, next_scales
        next_ok, next_data, scale = then_ok, then_data, then_scale
        walk = advance(keys, chunk, walk)

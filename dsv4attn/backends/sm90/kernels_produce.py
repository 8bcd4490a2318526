"""The role that brings keys in fp8 pages: from slots to tiles of bf16 in shared memory."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier

from dsv4attn.backends._triton.keys import DECODE
from dsv4attn.backends._triton.lang import has_nan
from dsv4attn.backends.sm90.compat import copy_async, reinterpret
from dsv4attn.backends.sm90.kernels_schedule import advance, enter, page_of, settle, slots

WORDS_L = gl.constexpr(gl.BlockedLayout([1, 4], [8, 4], [8, 1], [1, 0]))
"""Of 64 codes of each key, as words: four threads have a key's, eight warps a tile."""
ROPE_L = gl.constexpr(gl.BlockedLayout([1, 8], [8, 4], [8, 1], [1, 0]))
KEY_WORDS_S = gl.constexpr(gl.NVMMASharedLayout(128, 32, 2))
"""The same bytes as KEYS_S, two values in a word."""
RAW_S = gl.constexpr(gl.SwizzledSharedLayout(4, 1, 1, [1, 0]))


@gluon.jit
def decode(words, scale, nan):
    """[64, 16] words of four e4m3 codes, times scales of two equal bf16, as two words each of two bf16 values.

    A code's bits, put where bf16 has exponent and mantissa, are its value times 2^-120. Two multiplications put it
    right, and are exact for all codes and scales; one with the product of both powers overflows above byte 134.
    nan: [64, 16] - words whose values are NaN; None: no word's, and what NaN codes give is undefined.
    """
    unit = gl.full_like(words, 0x7B807B80)
    if nan is not None:
        unit = gl.where(nan, 0x7FC07FC0, unit)
    return gl.inline_asm_elementwise(
        DECODE,
        "=r,=r,r,r,r",
        [words, scale, unit],
        dtype=(gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def decoded(words, scales, SHIFT: gl.constexpr, nan=None):
    """[64, 16] words of codes as [64, 32] words of two values, under the scale byte that SHIFT tells."""
    byte = (scales >> SHIFT) & 255
    half = gl.where(byte == 0, 0x40, gl.where(byte == 255, 0x7FC0, byte << 7))
    first, second = decode(words, gl.expand_dims(half * 0x10001, 1) + gl.zeros_like(words), nan)
    return gl.reshape(gl.join(first, second), [64, 32])


@gluon.jit
def beside(a, b):
    """[64, 32] and [64, 32] as [64, 64]."""
    return gl.reshape(gl.permute(gl.join(a, b), (0, 2, 1)), [64, 64])


@gluon.jit
def load_words(data, ok, FIRST: gl.constexpr):
    """64 codes of each key, from word FIRST on; zeros of one that is not there."""
    of = gl.arange(0, 16, layout=gl.SliceLayout(0, WORDS_L))
    p = gl.multiple_of(gl.expand_dims(data, 1) + gl.expand_dims(of, 0) + FIRST, [1, 16])
    # a mask of both dimensions: of one alone, the compiler loads word by word
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
def fetch(raw_s, data, ok):
    """Start to copy the first 320 codes of each key; the rest, for which there is no room, waits in registers."""
    of = gl.arange(0, 16, layout=gl.SliceLayout(0, WORDS_L))
    p = gl.multiple_of(gl.expand_dims(data, 1) + gl.expand_dims(of, 0), [1, 16])
    mask = gl.expand_dims(ok, 1) & (gl.expand_dims(of, 0) < 16)
    for g in gl.static_range(5):
        copy_async(raw_s[g], p + 16 * g, mask=mask)
    async_copy.commit_group()


@gluon.jit
def produce(
    keys_s, raw_s, bias_s, k_full, k_empty, caches, rows, lens, strides, paging, line, count, SEGMENTS: gl.constexpr
):
    """Fill places of keys with the tiles of a chunk, one after the other, and say which keys are there.

    While a tile is decoded, the next one's codes are on their way, and the slots of the one behind it are known.
    """
    kA, kB, kC, kD = keys_s
    tokens, width0, width1, lo, hi, _chunk, extra, t, pos = line
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, WORDS_L))
    n0, n1, k, last = enter(lens[0], lens[1], t, pos, lo, hi, tokens, width0, width1, SEGMENTS)
    t, pos, n0, n1, k, last = settle(
        lens[0], lens[1], t, pos, lo, hi, extra, tokens, width0, width1, n0, n1, k, last, SEGMENTS
    )
    slot, inside = slots(rows[0], rows[1], strides[0], strides[1], t, tokens, k, n0, n1, row, SEGMENTS)
    ok, data, scale = page_of(slot, inside, caches[0], caches[1], paging, SEGMENTS)
    fetch(raw_s, data, ok)
    x5 = load_words(data, ok, 80)
    x6 = load_words(data, ok, 96)
    rope = load_rope(data, ok)
    scales = gl.load(scale, mask=ok, other=0)
    t, pos, n0, n1, k, last = advance(
        lens[0], lens[1], t, pos, lo, hi, extra, tokens, width0, width1, n0, n1, k, last, SEGMENTS
    )
    slot, inside = slots(rows[0], rows[1], strides[0], strides[1], t, tokens, k, n0, n1, row, SEGMENTS)
    next_slot, next_inside = slot, inside
    t, pos, n0, n1, k, last = advance(
        lens[0], lens[1], t, pos, lo, hi, extra, tokens, width0, width1, n0, n1, k, last, SEGMENTS
    )
    slot, inside = slots(rows[0], rows[1], strides[0], strides[1], t, tokens, k, n0, n1, row, SEGMENTS)
    next_ok, data, scale = page_of(next_slot, next_inside, caches[0], caches[1], paging, SEGMENTS)
    for i in range(count):
        b = i % 2
        next_scales = gl.load(scale, mask=next_ok, other=0)
        low = scales.to(gl.int32)
        high = (scales >> 32).to(gl.int32)
        async_copy.wait_group(0)
        x0 = raw_s[0].load(WORDS_L)
        x1 = raw_s[1].load(WORDS_L)
        x2 = raw_s[2].load(WORDS_L)
        x3 = raw_s[3].load(WORDS_L)
        x4 = raw_s[4].load(WORDS_L)
        fetch(raw_s, data, next_ok)
        mbarrier.wait(k_empty.index(b), ((i // 2) & 1) ^ 1)
        # where one of seven words has a NaN code, the last one's values are NaN: asking once is cheaper
        nan = has_nan(x6, False)
        y = beside(decoded(x6, high, 16), rope)
        reinterpret(kD.index(b), gl.int32, [64, 64], KEY_WORDS_S).store(y)
        nan |= has_nan(x4, False) | has_nan(x5, False)
        y = beside(decoded(x4, high, 0), decoded(x5, high, 8))
        reinterpret(kC.index(b), gl.int32, [64, 64], KEY_WORDS_S).store(y)
        x5 = load_words(data, next_ok, 80)
        x6 = load_words(data, next_ok, 96)
        rope = load_rope(data, next_ok)
        nan |= has_nan(x0, False) | has_nan(x1, False)
        y = beside(decoded(x0, low, 0), decoded(x1, low, 8))
        reinterpret(kA.index(b), gl.int32, [64, 64], KEY_WORDS_S).store(y)
        nan |= has_nan(x2, False) | has_nan(x3, False)
        y = beside(decoded(x2, low, 16), decoded(x3, low, 24, nan))
        reinterpret(kB.index(b), gl.int32, [64, 64], KEY_WORDS_S).store(y)
        # so late because earlier it takes a register that is not there
        bias_s.index(b).store(gl.where(ok, 0.0, -float("inf")))
        fence_async_shared()
        mbarrier.arrive(k_full.index(b), count=1)
        ok = next_ok
        scales = next_scales
        next_ok, data, scale = page_of(slot, inside, caches[0], caches[1], paging, SEGMENTS)
        t, pos, n0, n1, k, last = advance(
            lens[0], lens[1], t, pos, lo, hi, extra, tokens, width0, width1, n0, n1, k, last, SEGMENTS
        )
        slot, inside = slots(rows[0], rows[1], strides[0], strides[1], t, tokens, k, n0, n1, row, SEGMENTS)

"""The role that loads and decodes keys in fp8 pages: from slots to tiles of bf16 in shared memory."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier

from dsv4attn.backends.sm90.compat import ROPE_FIRST, copy_async, reinterpret
from dsv4attn.backends.sm90.kernels_schedule import advance, begin, page_of, slots

WORDS_L = gl.constexpr(gl.BlockedLayout([1, 4], [8, 4], [8, 1], [1, 0]))
"""64 codes of each key of a tile, as words: four threads hold a key, eight warps a tile."""
ROPE_L = gl.constexpr(gl.BlockedLayout([1, 8], [8, 4], [8, 1], [1, 0]))
KEY_WORDS_S = gl.constexpr(gl.NVMMASharedLayout(128, 32, 2))
"""The same bytes as KEYS_S, two values in a word."""
RAW_S = gl.constexpr(gl.SwizzledSharedLayout(4, 1, 1, [1, 0]))


def _decoder(*, last: bool, scale: int = 16) -> str:
    """PTX that decodes four words of e4m3 codes, as `keys.DECODE` does one.

    $0..$7: of each word its first two values, then of each its last two. $8: the largest code so far, twice, at least
    $20: without its sign, where bf16 has exponent and mantissa. $12..$15: words. $16: four scale bytes, of which $24
    picks one. What would be equal in all four operands is read from the first.
    last: whether the values of the last word are NaN if the largest code is. scale: the operand read instead of $16.
    """
    lines = [
        ".reg .b32 scale, unit, zero, seen, t;",
        ".reg .b32 low<4>, high<4>, a<4>, b<4>;",
        ".reg .pred p;",
        "mov.b32 zero, 0x80008000;",
        "mov.b32 unit, 0x7b807b80;",
        # a bf16 power of two, twice; of byte 0 the subnormal 2^-127
        f"prmt.b32 scale, ${scale}, 0, $24;",
        "shl.b32 scale, scale, 7;",
        "max.u32 scale, scale, 0x00400040;",
        "mov.b32 seen, $20;",
    ]
    for i in range(4):
        lines += [
            # this half first: with Triton 3.9, the other order spills
            f"shl.b32 low{i}, ${12 + i}, 4;",
            f"and.b32 low{i}, low{i}, 0xf0f0f0f0;",
            f"shr.u32 high{i}, ${12 + i}, 4;",
            f"and.b32 high{i}, high{i}, 0x07070707;",
            f"lop3.b32 high{i}, ${12 + i}, 0x80808080, high{i}, 0xea;",
            f"prmt.b32 a{i}, low{i}, high{i}, 0x5140;",
            f"prmt.b32 b{i}, low{i}, high{i}, 0x7362;",
            # bits of bf16 are ordered like those of f16: one instruction on Hopper
            f"abs.f16x2 low{i}, a{i};",
            f"abs.f16x2 high{i}, b{i};",
            f"max.f16x2 low{i}, low{i}, high{i};",
            f"max.f16x2 seen, seen, low{i};",
            f"fma.rn.bf16x2 a{i}, a{i}, unit, zero;",
            f"fma.rn.bf16x2 b{i}, b{i}, unit, zero;",
        ]
        if last and i == 3:
            lines += [
                "add.u32 t, seen, 0x00100010;",
                "and.b32 t, t, 0x08000800;",
                "setp.ne.u32 p, t, 0;",
                "selp.b32 scale, 0x7fc07fc0, scale, p;",
            ]
        lines += [f"fma.rn.bf16x2 ${i}, a{i}, scale, zero;", f"fma.rn.bf16x2 ${4 + i}, b{i}, scale, zero;"]
    lines += [f"mov.b32 ${8 + i}, seen;" for i in range(4)]
    return "{\n" + "\n".join(lines) + "\n}\n"


DECODE = gl.constexpr(_decoder(last=False))
LAST = gl.constexpr(_decoder(last=True))
_OPERANDS = gl.constexpr(",".join(["=&r"] * 12 + ["r"] * 16))


@gluon.jit
def decoded(words, scales, seen, BYTE: gl.constexpr, TEXT: gl.constexpr):
    """[64, 16] words of codes as [64, 32] words of two bf16 values, under the scale byte BYTE of [64]; and `seen`.

    A code's bits, put where bf16 has exponent and mantissa, are its value times 2^-120. Two multiplications put it
    right, and are exact for all codes and scales; one with the product of both powers overflows above byte 134.
    seen: [64, 16], the largest code so far as TEXT has it, 0x07F0 in either half if one was NaN; alike in all of a
    thread, whose words are of one key.
    """
    zeros = gl.zeros_like(words)
    first, second, seen = gl.inline_asm_elementwise(
        TEXT,
        _OPERANDS,
        [words, gl.expand_dims(scales, 1) + zeros, seen, zeros + (0x4040 + 0x0101 * BYTE)],
        dtype=(gl.int32, gl.int32, gl.int32),
        is_pure=True,
        pack=4,
    )
    return gl.reshape(gl.join(first, second), [64, 32]), seen


@gluon.jit
def spoilt(scales):
    """int32 words of four scale bytes each; the upper bit of a byte is set if that scale byte is 255, and so NaN."""
    return (~scales - 0x01010101) & scales


@gluon.jit
def store_words(stages, b, first, second):
    """Write [64, 32] and [64, 32] words as 128 columns of tile b."""
    words = gl.reshape(gl.permute(gl.join(first, second), (0, 2, 1)), [64, 64])
    reinterpret(stages.index(b), gl.int32, [64, 64], KEY_WORDS_S).store(words)


@gluon.jit
def load_codes(data, ok, FIRST: gl.constexpr):
    """64 codes of each key, from word FIRST on; zeros where not ok."""
    of = gl.arange(0, 16, layout=gl.SliceLayout(0, WORDS_L))
    p = gl.multiple_of(gl.expand_dims(data, 1) + gl.expand_dims(of, 0) + FIRST, [1, 16])
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
def allocate_codes():
    """Shared memory of 64 codes of each key."""
    return gl.allocate_shared_memory(gl.int32, [64, 16], RAW_S)


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

    While a tile is decoded, the next one's codes are being copied, and the slots of the one behind it are loaded.
    """
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, WORDS_L))
    walk = begin(keys, chunk, t, pos)
    slot, inside = slots(keys, chunk, walk, row)
    ok, data, scale = page_of(keys, slot, inside)
    copy_codes(smem.raw, data, ok)
    x5 = load_codes(data, ok, 80)
    x6 = load_codes(data, ok, 96)
    rope = load_rope(data, ok)
    scales = gl.load(scale, mask=ok, other=0)
    walk = advance(keys, chunk, walk)
    next_slot, next_inside = slots(keys, chunk, walk, row)
    walk = advance(keys, chunk, walk)
    slot, inside = slots(keys, chunk, walk, row)
    next_ok, data, scale = page_of(keys, next_slot, next_inside)
    for i in range(count):
        b = i % 2
        next_scales = gl.load(scale, mask=next_ok, other=0)
        low = scales.to(gl.int32)
        high = (scales >> 32).to(gl.int32)
        async_copy.wait_group(0)
        x0 = smem.raw[0].load(WORDS_L)
        x1 = smem.raw[1].load(WORDS_L)
        x2 = smem.raw[2].load(WORDS_L)
        x3 = smem.raw[3].load(WORDS_L)
        x4 = smem.raw[4].load(WORDS_L)
        copy_codes(smem.raw, data, next_ok)
        mbarrier.wait(smem.k_empty.index(b), ((i // 2) & 1) ^ 1)
        # where one of seven words has a NaN code, the last one's values are NaN: one test is cheaper. The last of the
        # eight scale bytes is padding
        none = (spoilt(low) | spoilt(high & 0xFFFFFF)) & -0x7F7F7F80
        seen = gl.expand_dims(gl.where(none != 0, 0x07F007F0, 0), 1) + gl.zeros_like(x6)
        y, seen = decoded(x6, high, seen, 2, DECODE)
        store_words(smem.k3, b, y, rope)
        y, seen = decoded(x4, high, seen, 0, DECODE)
        z, seen = decoded(x5, high, seen, 1, DECODE)
        store_words(smem.k2, b, y, z)
        if ROPE_FIRST:
            rope = load_rope(data, next_ok)
        x5 = load_codes(data, next_ok, 80)
        x6 = load_codes(data, next_ok, 96)
        if not ROPE_FIRST:
            rope = load_rope(data, next_ok)
        y, seen = decoded(x0, low, seen, 0, DECODE)
        z, seen = decoded(x1, low, seen, 1, DECODE)
        store_words(smem.k0, b, y, z)
        y, seen = decoded(x2, low, seen, 2, DECODE)
        z, seen = decoded(x3, low, seen, 3, LAST)
        store_words(smem.k1, b, y, z)
        # stored late: an earlier store takes one register more than the role has
        smem.bias.index(b).store(gl.where(ok, 0.0, -float("inf")))
        fence_async_shared()
        mbarrier.arrive(smem.k_full.index(b), count=1)
        ok = next_ok
        scales = next_scales
        next_ok, data, scale = page_of(keys, slot, inside)
        walk = advance(keys, chunk, walk)
        slot, inside = slots(keys, chunk, walk, row)

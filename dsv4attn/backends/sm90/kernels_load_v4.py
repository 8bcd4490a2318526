"""The roles that fetch and decode keys in fp8 pages: from slots to tiles of bf16 in shared memory.

`fetch`, four warps, copies records to shared memory, and waits for no copy but that of the next indices: a warp that
read memory and decoded besides would be held up by either. `decode`, four warps, turns 448 codes of each key into
values. The first 320 are fetched one tile ahead, into memory of their own. The other 128 wait for the tile's stage, and
lie where values will. The 64 values that are bf16 already are copied straight to their place.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier

from dsv4attn.backends.sm90.compat import copy_async, reinterpret
from dsv4attn.backends.sm90.kernels_common import FLAT_S, ONE_L
from dsv4attn.backends.sm90.kernels_schedule import advance, begin, columns, page_of
from dsv4attn.backends.sm90.ptx import codes

WORDS_L = gl.constexpr(gl.BlockedLayout([1, 4], [8, 4], [8, 1], [1, 0]))
"""64 codes of each key of a tile, as words: four threads hold a key, eight warps a tile."""
ROPE_L = gl.constexpr(gl.BlockedLayout([1, 8], [8, 4], [8, 1], [1, 0]))
KEY_WORDS_S = gl.constexpr(gl.NVMMASharedLayout(128, 32, 2))
"""The same bytes as KEYS_S, two values in a word."""
RAW_S = gl.constexpr(gl.SwizzledSharedLayout(4, 1, 1, [1, 0]))
LINES_L = gl.constexpr(gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0]))
"""Eight threads ask for 128 bytes of a key at once, in one or two lines of memory."""
HELD_L = gl.constexpr(gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0]))
"""As WORDS_L, of four warps."""
PAIRS_S = gl.constexpr(
    gl.SharedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 8], [0, 16], [1, 16], [2, 0], [4, 0], [8, 0], [16, 0], [32, 0]], alignment=128
    )
)
"""128 codes of each key, in every other one the last 64 first: HELD_L reads 64 of two keys at once, from all banks."""
FETCHING = gl.constexpr(4)
"""Warps of `fetch`, whose threads arrive at a barrier one by one, as their copies do."""


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
def words_of(stages, b):
    """128 columns of tile b of N keys, as [N, 64] words."""
    N: gl.constexpr = stages.shape[1]
    return reinterpret(stages.index(b), gl.int32, [N, 64], KEY_WORDS_S)


@gluon.jit
def store_words(stages, b, first, second):
    """Write [N, 32] and [N, 32] words as 128 columns of tile b of N keys."""
    N: gl.constexpr = first.shape[0]
    words_of(stages, b).store(gl.reshape(gl.permute(gl.join(first, second), (0, 2, 1)), [N, 64]))


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
def allocate_fetched():
    """Shared memory of what `fetch` copies one tile ahead: 320 codes of each key, scales, and indices of two tiles.

    After them come the addresses of one tile's records, 0 where there is none.
    """
    raw = (
        gl.allocate_shared_memory(gl.int32, [64, 32], PAIRS_S),
        gl.allocate_shared_memory(gl.int32, [64, 32], PAIRS_S),
        allocate_codes(RAW_S),
    )
    scales = gl.allocate_shared_memory(gl.int64, [64], FLAT_S)
    indices = gl.allocate_shared_memory(gl.int32, [2, 64], FLAT_S)
    return raw, scales, indices, gl.allocate_shared_memory(gl.int64, [64], FLAT_S)


@gluon.jit
def copy_words(to, addresses, FIRST: gl.constexpr):
    """Start to copy words of each key's record, from FIRST on, as many as `to` has columns; zeros without a record."""
    WORDS: gl.constexpr = to.shape[1]
    start = addresses.load(gl.SliceLayout(1, LINES_L))
    of = gl.arange(0, WORDS, layout=gl.SliceLayout(0, LINES_L))
    p = gl.expand_dims(start.to(gl.pointer_type(gl.int32)), 1) + gl.expand_dims(of + FIRST, 0)
    mask = gl.expand_dims(start != 0, 1) & (gl.expand_dims(of, 0) < WORDS)
    copy_async(to, gl.multiple_of(p, [1, 16]), mask=mask)


@gluon.jit
def copy_indices(keys, chunk, walk, to):
    """Start to copy indices of a walk's tile. Returns (own, inside): how many count, and `inside` of `columns`.

    own: 64 or more if all count, 0 or less if none does.
    """
    at, begins, end, inside = columns(keys, chunk, walk)
    column = begins + gl.arange(0, 64, layout=ONE_L)
    copy_async(to, at + column, mask=column < end)
    async_copy.commit_group()
    return end - begins, inside


@gluon.jit
def locate(keys, smem, b, own, inside):
    """Store addresses of the records of a tile whose indices are in place b. Returns (which exist, their scales)."""
    slot = smem.indices.index(b).load(ONE_L)
    slot = gl.where(gl.arange(0, 64, layout=ONE_L) < own, slot, -1)
    ok, data, scale = page_of(keys, slot, inside)
    smem.addresses.store(gl.where(ok, data.to(gl.int64), 0))
    return ok, scale


@gluon.jit
def copy_ahead(smem, ok, scale):
    """Start to copy the first 320 codes of each key, and its scales."""
    copy_words(smem.raw[0], smem.addresses, 0)
    copy_words(smem.raw[1], smem.addresses, 32)
    copy_words(smem.raw[2], smem.addresses, 64)
    copy_async(smem.scales, scale, mask=ok)
    async_copy.mbarrier_arrive(smem.raw_full.index(0), increment_count=False)
    async_copy.commit_group()


@gluon.jit
def fetch(keys, chunk, t, pos, count, smem):
    """Copy the records of the count tiles of a chunk, one after the other, and store which keys are there."""
    walk = begin(keys, chunk, t, pos)
    own, inside = copy_indices(keys, chunk, walk, smem.indices.index(0))
    walk = advance(keys, chunk, walk)
    next_own, next_inside = copy_indices(keys, chunk, walk, smem.indices.index(1))
    async_copy.wait_group(1)
    ok, scale = locate(keys, smem, 0, own, inside)
    copy_ahead(smem, ok, scale)
    for i in range(count):
        b = i % 2
        mbarrier.wait(smem.k_empty.index(b), ((i // 2) & 1) ^ 1)
        copy_words(words_of(smem.k2, b).slice(32, 32, dim=1), smem.addresses, 80)
        copy_words(words_of(smem.k3, b).slice(32, 32, dim=1), smem.addresses, 112)
        async_copy.mbarrier_arrive(smem.rest_full.index(b), increment_count=False)
        async_copy.commit_group()
        smem.bias.index(b).store(gl.where(ok, 0.0, -float("inf")))
        mbarrier.arrive(smem.rest_full.index(b), count=1)
        # two groups of copies were begun after the next indices, and are not waited for
        async_copy.wait_group(2)
        ok, scale = locate(keys, smem, 1 - b, next_own, next_inside)
        walk = advance(keys, chunk, walk)
        next_own, next_inside = copy_indices(keys, chunk, walk, smem.indices.index(b))
        mbarrier.wait(smem.raw_empty.index(0), i & 1)
        copy_ahead(smem, ok, scale)
    async_copy.wait_group(0)


@gluon.jit
def halves(words):
    """[64, 32] words as two of [64, 16], in HELD_L."""
    first, second = gl.split(gl.permute(gl.reshape(words, [64, 2, 16]), (0, 2, 1)))
    first = gl.convert_layout(first, HELD_L, assert_trivial=True)
    return first, gl.convert_layout(second, HELD_L, assert_trivial=True)


@gluon.jit
def decode(count, smem):
    """Fill stages of keys with values of the count tiles that `fetch` copies.

    The fence is for what `fetch` has copied, too: the matrix unit reads it next.
    """
    for i in range(count):
        b = i % 2
        mbarrier.wait(smem.k_empty.index(b), ((i // 2) & 1) ^ 1)
        mbarrier.wait(smem.raw_full.index(0), i & 1)
        scales = smem.scales.load(gl.SliceLayout(1, HELD_L))
        low = scales.to(gl.int32)
        high = (scales >> 32).to(gl.int32)
        x0, x1 = halves(smem.raw[0].load(HELD_L))
        x2, x3 = halves(smem.raw[1].load(HELD_L))
        x4 = smem.raw[2].load(HELD_L)
        store_words(smem.k0, b, decoded(x0, low, None, 0), decoded(x1, low, None, 1))
        # after the first stores, as at an arrival all threads wait until each has its codes
        mbarrier.arrive(smem.raw_empty.index(0), count=1)
        store_words(smem.k1, b, decoded(x2, low, None, 2), decoded(x3, low, None, 3))
        mbarrier.wait(smem.rest_full.index(b), (i // 2) & 1)
        x5, x6 = halves(words_of(smem.k2, b).slice(32, 32, dim=1).load(HELD_L))
        store_words(smem.k2, b, decoded(x4, high, None, 0), decoded(x5, high, None, 1))
        # a key of which one scale is NaN has NaN in 64 columns: that is enough
        words_of(smem.k3, b).slice(0, 32, dim=1).store(decoded(x6, high, without_scale(low, high), 2))
        fence_async_shared()
        mbarrier.arrive(smem.k_full.index(b), count=1)

"""The roles that fetch and decode keys in pages of V4's records: from slots to tiles of bf16 in shared memory.

`fetch`, four warps, copies records to shared memory, and waits for no copy but that of the next indices: a warp that
read memory and decoded besides would be held up by either. `decode`, four warps, turns 448 codes of each key into
values. The first 320 are fetched one tile ahead, into memory of their own. The other 128 wait for the tile's stage, and
lie where values will. Of records with nibbles for codes, all codes are fetched one tile ahead. The
64 values that are bf16 already are copied straight to their place.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier

from dsv4attn.backends.sm90.attention.kernels_common import FLAT_S, ONE_L, halve
from dsv4attn.backends.sm90.attention.kernels_schedule import FP8_PAGES, advance, begin, columns, page_of, spread_over
from dsv4attn.backends.sm90.attention.ptx import codes, nibbles
from dsv4attn.backends.sm90.compat import copy_async, reinterpret

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
NIBBLES_L = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2]],
        lane_bases=[[1, 0], [2, 0], [4, 0], [0, 4], [8, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 8],
    )
)
"""64 nibbles of each key, as words: two threads of four warps hold a key, and eight lanes in a row eight keys.

A thread's words are 64 bytes of a tile, which such lanes store to all banks.
"""
NIBBLES_2L = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 8]],
        lane_bases=[[1, 0], [2, 0], [4, 0], [0, 4], [8, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 16],
    )
)
NIBBLES_4L = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 8], [0, 16]],
        lane_bases=[[1, 0], [2, 0], [4, 0], [0, 4], [8, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 32],
    )
)
NIBBLES_S = gl.constexpr(gl.SwizzledSharedLayout(4, 4, 2, [1, 0]))
"""64 nibbles of each key: NIBBLES_L reads from all banks, and so it is with two and four times as many."""
NIBBLES_2S = gl.constexpr(gl.SwizzledSharedLayout(4, 2, 4, [1, 0]))
NIBBLES_4S = gl.constexpr(gl.SwizzledSharedLayout(4, 1, 8, [1, 0]))
FETCHING = gl.constexpr(4)
"""Warps of `fetch`, whose threads arrive at a barrier one by one, as their copies do."""


DECODE, SPOIL = gl.constexpr(codes()), gl.constexpr(codes(spoils=True))
OPERANDS = gl.constexpr(",".join(["=&r"] * 8 + ["r"] * 12))
SPOIL_OPERANDS = gl.constexpr(",".join(["=&r"] * 8 + ["r"] * 16))
NVFP4 = gl.constexpr(nibbles(0))
NIBBLE_OPERANDS = gl.constexpr(",".join(["=&r"] * 16 + ["r"] * 12))


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
def decoded_nibbles(words, scales, pick, TEXT: gl.constexpr):
    """[K, N] words of nibbles as [K, 4 N] words of two bf16 values. scales: [K, N]; pick: [N]; see `ptx.nibbles`."""
    y0, y1, y2, y3 = gl.inline_asm_elementwise(
        TEXT,
        NIBBLE_OPERANDS,
        [words, scales, gl.expand_dims(pick, 0) + gl.zeros_like(words)],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=True,
        pack=4,
    )
    return gl.reshape(gl.join(gl.join(y0, y2), gl.join(y1, y3)), [words.shape[0], 4 * words.shape[1]])


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
def allocate_fetched(KIND: gl.constexpr):
    """Shared memory of what `fetch` copies one tile ahead: codes of each key, scales, and indices of two tiles.

    After them come the addresses of one tile's records, 0 where there is none. Codes: 320, or 448 nibbles.
    """
    if KIND == FP8_PAGES:
        raw = (
            gl.allocate_shared_memory(gl.int32, [64, 32], PAIRS_S),
            gl.allocate_shared_memory(gl.int32, [64, 32], PAIRS_S),
            allocate_codes(RAW_S),
        )
        scales = gl.allocate_shared_memory(gl.int64, [64], FLAT_S)
    else:
        raw = (
            gl.allocate_shared_memory(gl.int32, [64, 32], NIBBLES_4S),
            gl.allocate_shared_memory(gl.int32, [64, 16], NIBBLES_2S),
            gl.allocate_shared_memory(gl.int32, [64, 8], NIBBLES_S),
        )
        # buffers of their own: the compiler makes copies to parts of one buffer wait for each other
        scales = (
            gl.allocate_shared_memory(gl.int64, [64], FLAT_S),
            gl.allocate_shared_memory(gl.int64, [64], FLAT_S),
            gl.allocate_shared_memory(gl.int64, [64], FLAT_S),
            gl.allocate_shared_memory(gl.int64, [64], FLAT_S),
        )
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
    at, begins, end, inside, own, skipped = columns(keys, chunk, walk)
    column = begins + gl.arange(0, 64, layout=ONE_L)
    copy_async(to, spread_over(keys, at, column, own, skipped), mask=column < end)
    async_copy.commit_group()
    return end - begins, inside


@gluon.jit
def locate(keys, smem, b, own, inside, KIND: gl.constexpr):
    """Store addresses of the records of a tile whose indices are in place b. Returns (which exist, their scales)."""
    slot = smem.indices.index(b).load(ONE_L)
    slot = gl.where(gl.arange(0, 64, layout=ONE_L) < own, slot, -1)
    ok, data, scale = page_of(keys, slot, inside, KIND)
    smem.addresses.store(gl.where(ok, data.to(gl.int64), 0))
    return ok, scale


@gluon.jit
def copy_ahead(smem, ok, scale, KIND: gl.constexpr):
    """Start to copy the first 320 codes of each key, or all nibbles, and its scales."""
    copy_words(smem.raw[0], smem.addresses, 0)
    copy_words(smem.raw[1], smem.addresses, 32)
    if KIND == FP8_PAGES:
        copy_words(smem.raw[2], smem.addresses, 64)
        copy_async(smem.scales, scale, mask=ok)
    else:
        copy_words(smem.raw[2], smem.addresses, 48)
        for of in gl.static_range(4):
            copy_async(smem.scales[of], scale + of, mask=ok)
    async_copy.mbarrier_arrive(smem.raw_full.index(0), increment_count=False)
    async_copy.commit_group()


@gluon.jit
def copy_to_stage(smem, b, KIND: gl.constexpr):
    """Start to copy what is left of each key's record to its places in stage b: bf16 values, and the last 128 codes."""
    if KIND == FP8_PAGES:
        copy_words(words_of(smem.k2, b).slice(32, 32, dim=1), smem.addresses, 80)
    values = words_of(smem.k3, b).slice(32, 32, dim=1)
    copy_words(values, smem.addresses, 112 if KIND == FP8_PAGES else 56)
    async_copy.mbarrier_arrive(smem.rest_full.index(b), increment_count=False)
    async_copy.commit_group()


@gluon.jit
def fetch(keys, chunk, t, pos, count, smem, KIND: gl.constexpr):
    """Copy the records of the count tiles of a chunk, one after the other, and store which keys are there."""
    walk = begin(keys, chunk, t, pos)
    own, inside = copy_indices(keys, chunk, walk, smem.indices.index(0))
    walk = advance(keys, chunk, walk)
    next_own, next_inside = copy_indices(keys, chunk, walk, smem.indices.index(1))
    async_copy.wait_group(1)
    ok, scale = locate(keys, smem, 0, own, inside, KIND)
    copy_ahead(smem, ok, scale, KIND)
    for i in range(count):
        b = i % 2
        mbarrier.wait(smem.k_empty.index(b), ((i // 2) & 1) ^ 1)
        copy_to_stage(smem, b, KIND)
        smem.bias.index(b).store(gl.where(ok, 0.0, -float("inf")))
        mbarrier.arrive(smem.rest_full.index(b), count=1)
        # two groups of copies were begun after the next indices, and are not waited for
        async_copy.wait_group(2)
        ok, scale = locate(keys, smem, 1 - b, next_own, next_inside, KIND)
        walk = advance(keys, chunk, walk)
        next_own, next_inside = copy_indices(keys, chunk, walk, smem.indices.index(b))
        mbarrier.wait(smem.raw_empty.index(0), i & 1)
        copy_ahead(smem, ok, scale, KIND)
    async_copy.wait_group(0)


@gluon.jit
def halves(words):
    """[64, 32] words as two of [64, 16], in HELD_L."""
    first, second = gl.split(gl.permute(gl.reshape(words, [64, 2, 16]), (0, 2, 1)))
    first = gl.convert_layout(first, HELD_L, assert_trivial=True)
    return first, gl.convert_layout(second, HELD_L, assert_trivial=True)


@gluon.jit
def decode_codes(count, smem):
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


@gluon.jit
def halves_of_nibbles(words, LAYOUT: gl.constexpr):
    """[64, N] words as two of [64, N // 2], in LAYOUT."""
    first, second = halve(words, words.shape[1])
    first = gl.convert_layout(first, LAYOUT, assert_trivial=True)
    return first, gl.convert_layout(second, LAYOUT, assert_trivial=True)


@gluon.jit
def scales_of(smem, PIECE: gl.constexpr):
    """[64] words with the four scale bytes of the piece PIECE of 64 nibbles."""
    eight = smem.scales[PIECE // 2].load(gl.SliceLayout(1, NIBBLES_L))
    return (eight >> (32 * (PIECE % 2))).to(gl.int32)


@gluon.jit
def store_piece(stages, b, words, scales, PIECE: gl.constexpr):
    """Write [64, 8] words of nibbles, the piece PIECE of each record, as 64 columns of tile b. scales: [64]."""
    half = gl.arange(0, 8, layout=gl.SliceLayout(0, NIBBLES_L)) >> 2
    values = decoded_nibbles(words, gl.expand_dims(scales, 1) + gl.zeros_like(words), 0x4040 + 0x0202 * half, NVFP4)
    words_of(stages, b).slice(32 * (PIECE % 2), 32, dim=1).store(values)


@gluon.jit
def decode_nibbles(count, smem):
    """As `decode_codes`, of nibbles. A scale that is NaN makes its codes NaN, and so the key's logits."""
    for i in range(count):
        b = i % 2
        mbarrier.wait(smem.k_empty.index(b), ((i // 2) & 1) ^ 1)
        mbarrier.wait(smem.raw_full.index(0), i & 1)
        x01, x23 = halves_of_nibbles(smem.raw[0].load(NIBBLES_4L), NIBBLES_2L)
        x0, x1 = halves_of_nibbles(x01, NIBBLES_L)
        x2, x3 = halves_of_nibbles(x23, NIBBLES_L)
        s2, s3 = scales_of(smem, 2), scales_of(smem, 3)
        store_piece(smem.k0, b, x0, scales_of(smem, 0), 0)
        store_piece(smem.k0, b, x1, scales_of(smem, 1), 1)
        x4, x5 = halves_of_nibbles(smem.raw[1].load(NIBBLES_2L), NIBBLES_L)
        x6 = smem.raw[2].load(NIBBLES_L)
        s4, s5, s6 = scales_of(smem, 4), scales_of(smem, 5), scales_of(smem, 6)
        store_piece(smem.k1, b, x2, s2, 2)
        # as in `decode_codes`
        mbarrier.arrive(smem.raw_empty.index(0), count=1)
        store_piece(smem.k1, b, x3, s3, 3)
        store_piece(smem.k2, b, x4, s4, 4)
        store_piece(smem.k2, b, x5, s5, 5)
        store_piece(smem.k3, b, x6, s6, 6)
        mbarrier.wait(smem.rest_full.index(b), (i // 2) & 1)
        fence_async_shared()
        mbarrier.arrive(smem.k_full.index(b), count=1)


@gluon.jit
def decode(count, smem, KIND: gl.constexpr):
    """Fill stages of keys. KIND: FP8_PAGES or NVFP4_PAGES."""
    if KIND == FP8_PAGES:
        decode_codes(count, smem)
    else:
        decode_nibbles(count, smem)

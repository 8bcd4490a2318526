"""The roles of the kernel for keys that are bf16 rows: two roles take turns, and a third copies what they multiply.

`left` and `right`, four warps each, own half of the output's columns. `left` multiplies q with the even tiles of a row
and computes their softmax, `right` with the odd ones. Each writes its weights, and their reference, to shared memory,
and both accumulate both tiles' weighted keys in their half. While one computes a softmax, the other's products run.
`produce`, four warps, copies q of each row, and keys to two stages, of an even tile and of an odd one. Each half of a
tile's columns has barriers of its own, since the role that reads only that half releases it early.

Tiles come in pairs: the last of an odd number has a tile without keys next to it, and a row without keys is a pair of
such. Which rows a block attends, and how barriers count, is as in `kernels_pages`.

Weights are relative to a reference that moves only where a maximum exceeds it by more than TOLERANCE, so that sums
seldom shrink. Powers of two up to there are as exact in bf16 and fp32 as those below 1.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# ruff: noqa: PYI024 - fields have no types of Python's

from __future__ import annotations

from collections import namedtuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import allocate_shared_memory as allocate
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from dsv4attn.backends._triton.numerics import LOG2E, NOTHING
from dsv4attn.backends.sm90.attention.kernels_common import (
    FLAT_S,
    KEYS_S,
    SCORES_L,
    WIDE_L,
    barriers,
    halve,
    here,
    normalized,
    rescaled,
    scalar,
    single,
    store_sink,
    write_part,
)
from dsv4attn.backends.sm90.attention.kernels_schedule import (
    TOLERANCE,
    clear_split,
    enter,
    pairs_of,
    part_of,
    room_of,
    row_of,
    row_slots,
    store_split,
    tiles_of,
    write_sums,
)
from dsv4attn.backends.sm90.compat import copy_async

HALF_L = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))
"""Half of the output's columns."""
PAIRS_L = gl.constexpr(gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0]))
"""Pairs of 64 rotated dims, which a thread has in WIDE_L as neighbours."""
LEFT, RIGHT = gl.constexpr(0), gl.constexpr(1)
"""The roles that multiply, and the index of their tiles, their weights, and what else the other one reads."""

Shared = namedtuple(
    "Shared",
    "q k_left k_right bias every p reference total largest pairs row side sink "
    "factors f_full q_full q_empty l_full l_empty r_full r_empty p_full s_full n_full n_empty go",
)
"""Shared memory of a block. Barriers: *_full ends when a stage is written, *_empty when all its readers are done.

q: [2, 64, 256] bf16, halves. k_left, k_right: [2, 64, 256] bf16, halves of both tiles; bias: [2, 64] fp32, 0 or -inf
for each key; every: [2, 1] int32, whether a tile has all keys. p, reference: [2, 64, 64] bf16 and [2, 64] fp32, weights
of both tiles, and their references. total, largest: [2, 64] fp32, of both roles at a row's end. pairs, row, side:
[2, 1] int32, of two rows in turn: pairs of tiles, or -1 after the last row; the row; its part, or -1 if whole. sink:
[64] fp32. q, l, r, p, s, n: barriers of q, of halves of keys, of weights, of sums, and of pairs, row and side. go:
holds the product of `right` back until that of `left` has begun.
"""


@gluon.jit
def copy_columns(to, rows, ok, FIRST: gl.constexpr, N: gl.constexpr):
    """Start to copy N columns of 64 rows, from FIRST on; zeros where not ok."""
    of = FIRST + gl.arange(0, N, layout=gl.SliceLayout(0, WIDE_L))
    p = gl.multiple_of(gl.expand_dims(rows, 1) + gl.expand_dims(of, 0), [1, 16])
    copy_async(to, p, mask=gl.expand_dims(ok, 1) & (gl.expand_dims(of, 0) < 512))


@gluon.jit
def load_rotated(query, rows, ok, position):
    """The last 64 columns of raw q, zeros where not ok, and cosines and sines of a position."""
    angles = query.table + gl.minimum(gl.maximum(position, 0), query.count - 1) * query.stride
    of = gl.arange(0, 64, layout=gl.SliceLayout(0, WIDE_L))
    p = gl.multiple_of(gl.expand_dims(rows, 1) + gl.expand_dims(of + 448, 0), [1, 16])
    x = gl.load(p, mask=gl.expand_dims(ok, 1) & (gl.expand_dims(of, 0) < 64), other=0.0)
    pair = gl.arange(0, 32, layout=gl.SliceLayout(0, PAIRS_L))
    return x, gl.load(angles + pair), gl.load(angles + 32 + pair)


@gluon.jit
def rotated(x, cos, sin):
    """[64, 64] bf16: each pair turned by its angle."""
    even, odd = gl.split(gl.reshape(x.to(gl.float32), [64, 32, 2]))
    even, odd = gl.convert_layout(even, PAIRS_L), gl.convert_layout(odd, PAIRS_L)
    cos, sin = gl.expand_dims(cos, 0), gl.expand_dims(sin, 0)
    whole = gl.join(even * cos - odd * sin, odd * cos + even * sin)
    return gl.convert_layout(gl.reshape(whole, [64, 64]).to(gl.bfloat16), WIDE_L)


@gluon.jit
def store_factors(query, smem, j):
    """Store by what logits of raw q are multiplied, for both roles: with its norm, in base 2. Rotation keeps a norm."""
    squares = gl.zeros([64, 64], gl.float32, layout=WIDE_L)
    for c in gl.static_range(8):
        x = smem.q.index(c // 4).slice(c % 4 * 64, 64, dim=1).load(WIDE_L).to(gl.float32)
        squares += x * x
    factor = gl.rsqrt(gl.sum(squares, 1) / 512.0 + query.eps)
    smem.factors.index(j % 2).store(factor * (query.scale * LOG2E))
    mbarrier.arrive(smem.f_full.index(0), count=1)


@gluon.jit
def load_factors(smem, j):
    """[64, 1] fp32: see `store_factors`."""
    return gl.expand_dims(smem.factors.index(j % 2).load(gl.SliceLayout(1, SCORES_L)), 1)


@gluon.jit
def arrive_behind(bar, LATER: gl.constexpr, pred=True):
    """Arrive once all groups of copies but the LATER last ones are done, with a fence: the matrix unit reads them next.

    Copies write as ordinary stores do. By PTX's memory model the matrix unit sees such a write only after a fence
    between both kinds of accesses. In this role, which waits anyway, it costs 0 to 2.4 % on an H200, in the roles that
    multiply up to 3 %. Without one, as in CUTLASS's pipelines of such copies, no result was ever seen to be wrong.
    """
    async_copy.wait_group(LATER)
    fence_async_shared()
    mbarrier.arrive(bar, count=1, pred=pred)


@gluon.jit
def store_mask(smem, ok, TILE: gl.constexpr):
    """Store which keys of a tile exist, and whether all do; if all do, no role reads the mask."""
    smem.bias.index(TILE).store(gl.where(ok, 0.0, -float("inf")))
    smem.every.index(TILE).store(single(gl.min(ok.to(gl.int32), 0), gl.int32))


@gluon.jit
def produce(query, keys, results, chunk, t, pos, smem, H: gl.constexpr):
    """Store each row's number, side and pairs, and fill stages with its q and tiles, one pair of slots ahead."""
    segment = keys.first
    program = gl.program_id(0)
    clear_split(results.table, chunk)
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, WIDE_L))
    j = gl.to_tensor(0)
    i = gl.to_tensor(0)
    if query.positions is not None:
        position = gl.load(query.positions + gl.minimum(t, chunk.tokens - 1))
    while (pos < chunk.hi) & (t < chunk.tokens):
        head = query.head0 + here(row)
        q_row = query.q + t.to(gl.int64) * query.token + head.to(gl.int64) * query.head
        if query.positions is not None:
            x, cos, sin = load_rotated(query, q_row, head < H, position)
        n0, n1, first, last = enter(keys, chunk, t, pos)
        n = tiles_of(keys, n0, n1)
        slot_a = row_slots(segment, t, n0, first, row)
        slot_b = row_slots(segment, t, n0, first + 1, row)
        b = j % 2
        mbarrier.wait(smem.n_empty.index(b), ((j // 2) & 1) ^ 1)
        side = part_of(chunk, program, pos)
        if (first == 0) & (last == n):
            side = side * 0 - 1
        smem.pairs.index(b).store(single(pairs_of(first, last), gl.int32))
        smem.row.index(b).store(single(t, gl.int32))
        smem.side.index(b).store(single(side, gl.int32))
        mbarrier.arrive(smem.n_full.index(b), count=1)
        if first == 0:
            store_split(results.table, chunk, t, pos, n)
        if query.positions is not None:
            x = rotated(x, cos, sin)
            position = gl.load(query.positions + gl.minimum(t + 1, chunk.tokens - 1))
        mbarrier.wait(smem.q_empty.index(0), (j & 1) ^ 1)
        copy_columns(smem.q.index(0), q_row, head < H, 0, 256)
        if query.positions is None:
            copy_columns(smem.q.index(1), q_row, head < H, 256, 256)
        else:
            # a shared slice begins at a multiple of its columns
            copy_columns(smem.q.index(1).slice(0, 128, dim=1), q_row, head < H, 256, 128)
            copy_columns(smem.q.index(1).slice(128, 64, dim=1), q_row, head < H, 384, 64)
            smem.q.index(1).slice(192, 64, dim=1).store(x)
        async_copy.commit_group()
        for k in range(first, first + 2 * pairs_of(first, last), 2):
            ok_a, key_a = row_of(segment, slot_a)
            ok_b, key_b = row_of(segment, slot_b)
            slot_a = row_slots(segment, t, n0, k + 2, row)
            slot_b = row_slots(segment, t, n0, k + 3, row)
            # halves in the order of their products, each announced once the next one is on its way, but the last. A
            # mask is stored with the half that only its reader releases
            mbarrier.wait(smem.l_empty.index(0), (i & 1) ^ 1)
            copy_columns(smem.k_left.index(0), key_a, ok_a, 0, 256)
            store_mask(smem, ok_a, 0)
            async_copy.commit_group()
            arrive_behind(smem.q_full.index(0), 1, pred=k == first)
            mbarrier.wait(smem.r_empty.index(0), (i & 1) ^ 1)
            copy_columns(smem.k_right.index(0), key_a, ok_a, 256, 256)
            async_copy.commit_group()
            arrive_behind(smem.l_full.index(0), 1)
            mbarrier.wait(smem.r_empty.index(1), (i & 1) ^ 1)
            copy_columns(smem.k_right.index(1), key_b, ok_b, 256, 256)
            store_mask(smem, ok_b, 1)
            async_copy.commit_group()
            arrive_behind(smem.r_full.index(0), 1)
            mbarrier.wait(smem.l_empty.index(1), (i & 1) ^ 1)
            copy_columns(smem.k_left.index(1), key_b, ok_b, 0, 256)
            async_copy.commit_group()
            arrive_behind(smem.r_full.index(1), 1)
            arrive_behind(smem.l_full.index(1), 0)
            i += 1
        pos += room_of(keys, n) + chunk.extra
        t += 1
        j += 1
    mbarrier.wait(smem.n_empty.index(j % 2), ((j // 2) & 1) ^ 1)
    smem.pairs.index(j % 2).store(single(-1, gl.int32))
    mbarrier.arrive(smem.n_full.index(j % 2), count=1)
    # `left` begins one product more than there are; its operands may be anything
    mbarrier.wait(smem.q_empty.index(0), (j & 1) ^ 1)
    mbarrier.arrive(smem.q_full.index(0), count=1)
    mbarrier.wait(smem.l_empty.index(0), (i & 1) ^ 1)
    mbarrier.arrive(smem.l_full.index(0), count=1)
    mbarrier.wait(smem.r_empty.index(0), (i & 1) ^ 1)
    mbarrier.arrive(smem.r_full.index(0), count=1)


@gluon.jit
def start_qk(smem, phase, MINE: gl.constexpr):
    """Begin the product of q and the own tile, whose halves arrive in different order."""
    zero = here(gl.to_tensor(0))
    s = gl.zeros([64, 64], gl.float32, layout=SCORES_L)
    if MINE == LEFT:
        mbarrier.wait(smem.l_full.index(0), phase)
        s = warpgroup_mma(smem.q.index(zero), smem.k_left.index(zero).permute((1, 0)), s, use_acc=False, is_async=True)
        mbarrier.wait(smem.r_full.index(0), phase)
        s = warpgroup_mma(smem.q.index(zero + 1), smem.k_right.index(zero).permute((1, 0)), s, is_async=True)
    else:
        mbarrier.wait(smem.r_full.index(1), phase)
        key = smem.k_right.index(zero + 1).permute((1, 0))
        s = warpgroup_mma(smem.q.index(zero + 1), key, s, use_acc=False, is_async=True)
        mbarrier.wait(smem.l_full.index(1), phase)
        s = warpgroup_mma(smem.q.index(zero), smem.k_left.index(zero + 1).permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def start_pv(acc, half, p, shrink, TILE: gl.constexpr):
    """Begin to accumulate a tile's weighted keys in the own half, once that has shrunk.

    Own weights come from shared memory too: from registers, of which there are too few, products would not overlap.
    """
    tile = here(gl.to_tensor(0)) + TILE
    return warpgroup_mma(p.index(tile), half.index(tile), rescaled(acc, shrink), is_async=True)


@gluon.jit
def softmax(s, every, smem, reference, scale, MINE: gl.constexpr):
    """Write the own tile's weights: (their sum, their reference, factors of the sums so far, its largest logits)."""
    z = s * scale
    if every == 0:
        # chosen, not added: a padding row's q may be NaN, and so are its products with keys that are not there
        bias = gl.expand_dims(smem.bias.index(MINE).load(gl.SliceLayout(0, SCORES_L)), 0)
        z = gl.where(bias == 0.0, z, -float("inf"))
    most = gl.max(z, 1)
    moved = gl.where(most > reference + TOLERANCE, most, reference)
    p = gl.exp2(z - gl.expand_dims(moved, 1))
    smem.p.index(MINE).store(p.to(gl.bfloat16))
    smem.reference.index(MINE).store(moved)
    fence_async_shared()
    mbarrier.arrive(smem.p_full.index(MINE), count=1)
    return gl.sum(p, 1), moved, gl.exp2(reference - moved), most


@gluon.jit
def other_softmax(smem, phase, reference, total, OTHER: gl.constexpr):
    """Wait for the other role's weights: (their reference, factors of the sums so far, the total then)."""
    mbarrier.wait(smem.p_full.index(OTHER), phase)
    moved = smem.reference.index(OTHER).load(gl.SliceLayout(1, SCORES_L))
    shrink = gl.exp2(reference - moved)
    return moved, shrink, total * shrink


@gluon.jit
def initial_sums():
    """At a row's begin: the reference of its weights, their total, and the largest logit."""
    none = gl.full([64], NOTHING, gl.float32, layout=gl.SliceLayout(1, SCORES_L))
    return none, gl.zeros([64], gl.float32, layout=gl.SliceLayout(1, SCORES_L)), none


@gluon.jit
def store_sums(smem, total, largest, max_logits, MINE: gl.constexpr):
    """Write what the other role needs at its row's end.

    One stage each is enough: the role that ends the next row waits for weights that the other writes after its read.
    """
    smem.total.index(MINE).store(total)
    if max_logits is not None:
        smem.largest.index(MINE).store(largest)
    mbarrier.arrive(smem.s_full.index(MINE), count=1)


@gluon.jit
def left(query, results, smem, H: gl.constexpr):
    """Even tiles, and the left half of the output."""
    max_logits = results.max_logits
    i = gl.to_tensor(0)
    j = gl.to_tensor(0)
    k = gl.to_tensor(0)
    mbarrier.wait(smem.n_full.index(0), 0)
    pairs = scalar(smem.pairs.index(0))
    mbarrier.wait(smem.q_full.index(0), 0)
    s = start_qk(smem, 0, LEFT)
    reference, total, largest = initial_sums()
    scale = query.scale * LOG2E
    if query.positions is not None:
        scale = gl.expand_dims(reference, 1)
    done = gl.zeros([64, 256], gl.float32, layout=HALF_L)
    # rows in one loop of pairs: a product begun before its end crosses from row to row
    while pairs > 0:
        every = scalar(smem.every.index(0))
        mbarrier.arrive(smem.go.index(0), count=1)
        s = warpgroup_mma_wait(0, [s])
        k += 1
        if query.positions is not None:  # noqa: SIM102
            if k == 1:
                mbarrier.wait(smem.f_full.index(0), j & 1)
                scale = load_factors(smem, j)
        mbarrier.arrive(smem.q_empty.index(0), count=1, pred=k == pairs)
        more, reference, shrink, most = softmax(s, every, smem, reference, scale, LEFT)
        total = total * shrink + more
        if max_logits is not None:
            largest = gl.maximum(largest, most)
        acc = start_pv(done, smem.k_left, smem.p, shrink, LEFT)
        reference, shrink, total = other_softmax(smem, i & 1, reference, total, RIGHT)
        done = warpgroup_mma_wait(0, [acc])
        mbarrier.arrive(smem.l_empty.index(LEFT), count=1)
        acc = start_pv(done, smem.k_left, smem.p, shrink, RIGHT)
        of_row = pairs
        if k == of_row:
            store_sums(smem, total, largest, max_logits, LEFT)
            mbarrier.wait(smem.n_full.index((j + 1) % 2), ((j + 1) // 2) & 1)
            pairs = scalar(smem.pairs.index((j + 1) % 2))
            mbarrier.wait(smem.q_full.index(0), (j + 1) & 1)
        done = warpgroup_mma_wait(0, [acc])
        mbarrier.arrive(smem.l_empty.index(RIGHT), count=1)
        # the next row's as well: it runs while this one is written
        s = start_qk(smem, (i + 1) & 1, LEFT)
        if k == of_row:
            # through the memory of the own weights: `right` has read them, since it has released the keys of that
            # product, in whose place the next keys have arrived
            finish(query, results, smem, done, total, reference, largest, j, H, LEFT)
            done = gl.zeros([64, 256], gl.float32, layout=HALF_L)
            reference, total, largest = initial_sums()
            k = k * 0
            j += 1
        i += 1
    s = warpgroup_mma_wait(0, [s])


@gluon.jit
def right(query, results, smem, H: gl.constexpr):
    """Odd tiles, and the right half of the output. Its product of q runs while `left` computes a softmax."""
    max_logits = results.max_logits
    i = gl.to_tensor(0)
    j = gl.to_tensor(0)
    mbarrier.wait(smem.n_full.index(0), 0)
    pairs = scalar(smem.pairs.index(0))
    while pairs > 0:
        mbarrier.wait(smem.q_full.index(0), j & 1)
        if query.positions is not None:
            store_factors(query, smem, j)
            scale = load_factors(smem, j)
        else:
            scale = query.scale * LOG2E
        reference, total, largest = initial_sums()
        acc = warpgroup_mma_init(gl.zeros([64, 256], gl.float32, layout=HALF_L))
        for k in range(pairs):
            done = warpgroup_mma_wait(0, [acc])
            mbarrier.arrive(smem.r_empty.index(RIGHT), count=1, pred=k > 0)
            mbarrier.wait(smem.go.index(0), i & 1)
            s = start_qk(smem, i & 1, RIGHT)
            every = scalar(smem.every.index(1))
            reference, shrink, total = other_softmax(smem, i & 1, reference, total, LEFT)
            s = warpgroup_mma_wait(0, [s])
            mbarrier.arrive(smem.q_empty.index(0), count=1, pred=k + 1 == pairs)
            acc = start_pv(done, smem.k_right, smem.p, shrink, LEFT)
            more, reference, shrink, most = softmax(s, every, smem, reference, scale, RIGHT)
            total = total * shrink + more
            if max_logits is not None:
                largest = gl.maximum(largest, most)
            done = warpgroup_mma_wait(0, [acc])
            mbarrier.arrive(smem.r_empty.index(LEFT), count=1)
            acc = start_pv(done, smem.k_right, smem.p, shrink, RIGHT)
            i += 1
        store_sums(smem, total, largest, max_logits, RIGHT)
        done = warpgroup_mma_wait(0, [acc])
        mbarrier.arrive(smem.r_empty.index(RIGHT), count=1)
        # once `left` has multiplied with the own weights, their memory is free for results
        mbarrier.wait(smem.l_empty.index(RIGHT), (i - 1) & 1)
        finish(query, results, smem, done, total, reference, largest, j, H, RIGHT)
        j += 1
        mbarrier.wait(smem.n_full.index(j % 2), (j // 2) & 1)
        pairs = scalar(smem.pairs.index(j % 2))


@gluon.jit
def finish(query, results, smem, acc, total, reference, largest, j, H: gl.constexpr, MINE: gl.constexpr):
    """Write half of a row; `right` writes its sums."""
    OTHER: gl.constexpr = 1 - MINE
    t = scalar(smem.row.index(j % 2))
    side = scalar(smem.side.index(j % 2))
    mbarrier.wait(smem.s_full.index(OTHER), j & 1)
    total = total + smem.total.index(OTHER).load(gl.SliceLayout(1, SCORES_L))
    mbarrier.arrive(smem.n_empty.index(j % 2), count=1)
    factor = normalized(results.sink, smem.sink, total, reference, side < 0)
    result = acc * gl.expand_dims(gl.convert_layout(factor, gl.SliceLayout(1, HALF_L)), 1)
    write_half(query, results, result, smem.p.index(MINE), t, side, 256 * MINE, H)
    if MINE == RIGHT:
        if results.max_logits is not None:
            largest = gl.maximum(largest, smem.largest.index(OTHER).load(gl.SliceLayout(1, SCORES_L)))
        within = here(gl.arange(0, 64, layout=gl.SliceLayout(1, SCORES_L)))
        write_sums(results, t, side < 0, side, total, reference, largest, query.head0, within, H)


@gluon.jit
def write_half(query, results, result, stage, t, side, FIRST: gl.constexpr, H: gl.constexpr):
    """256 columns of row t of 64 heads, from FIRST on, or, side >= 0, of that part."""
    if side < 0:
        x, y = halve(result.to(results.out.dtype.element_ty), 256)
        x0, x1 = halve(x, 128)
        y0, y1 = halve(y, 128)
        write_quarter(query, results, x0, stage, t, FIRST, H)
        write_quarter(query, results, x1, stage, t, FIRST + 64, H)
        write_quarter(query, results, y0, stage, t, FIRST + 128, H)
        write_quarter(query, results, y1, stage, t, FIRST + 192, H)
    else:
        write_part(results, result, side.to(gl.int64) * (64 * 512), FIRST, 256)


@gluon.jit
def write_quarter(query, results, x, stage, t, FIRST: gl.constexpr, H: gl.constexpr):
    """64 columns through shared memory, so that each thread writes sixteen bytes, and eight threads a line."""
    stage.store(x)
    row = here(gl.arange(0, 64, layout=gl.SliceLayout(1, WIDE_L)))
    column = FIRST + gl.arange(0, 64, layout=gl.SliceLayout(0, WIDE_L))
    p = results.out + t.to(gl.int64) * results.out_token + (query.head0 + row) * results.out_head
    p = gl.multiple_of(p, [16])
    mask = gl.expand_dims(query.head0 + row < H, 1) & (gl.expand_dims(column, 0) < 512)
    gl.store(gl.expand_dims(p, 1) + gl.expand_dims(column, 0), stage.load(WIDE_L), mask=mask)


@gluon.jit
def attend_rows(
    query, keys, results, bias, chunk, t, pos, H: gl.constexpr, VALUES: gl.constexpr, PRODUCE: gl.constexpr
):  # fmt: skip
    """Attend a chunk whose first row is t, at pos of the line. bias: of `load_sink`.

    VALUES, PRODUCE: registers of `right` and `produce`.
    """
    gl.static_assert(keys.second is None, "rows have one segment")
    smem = Shared(
        factors=allocate(gl.float32, [2, 64], FLAT_S), f_full=barriers(1, 1),
        q=allocate(gl.bfloat16, [2, 64, 256], KEYS_S), q_full=barriers(1, 1), q_empty=barriers(1, 2),
        k_left=allocate(gl.bfloat16, [2, 64, 256], KEYS_S), k_right=allocate(gl.bfloat16, [2, 64, 256], KEYS_S),
        bias=allocate(gl.float32, [2, 64], FLAT_S), every=allocate(gl.int32, [2, 1], FLAT_S),
        l_full=barriers(2, 1), l_empty=barriers(2, 1), r_full=barriers(2, 1), r_empty=barriers(2, 1),
        p=allocate(gl.bfloat16, [2, 64, 64], KEYS_S), reference=allocate(gl.float32, [2, 64], FLAT_S),
        p_full=barriers(2, 1),
        total=allocate(gl.float32, [2, 64], FLAT_S), largest=allocate(gl.float32, [2, 64], FLAT_S),
        s_full=barriers(2, 1),
        # two stages: the next row's are written while this row is still being written
        pairs=allocate(gl.int32, [2, 1], FLAT_S), row=allocate(gl.int32, [2, 1], FLAT_S),
        side=allocate(gl.int32, [2, 1], FLAT_S), n_full=barriers(2, 1), n_empty=barriers(2, 2),
        sink=store_sink(bias), go=barriers(1, 1),
    )  # fmt: skip
    fence_async_shared()
    gl.warp_specialize(
        [
            (left, (query, results, smem, H)),
            (right, (query, results, smem, H)),
            (produce, (query, keys, results, chunk, t, pos, smem, H)),
        ],
        worker_num_warps=[4, 4],
        worker_num_regs=[VALUES, PRODUCE],
    )

"""The Gluon kernel of Hopper for keys that are bf16 rows: two roles take turns, and a third brings what they multiply.

`left` and `right`, four warps each, own half of the output's columns. `left` multiplies q with the even tiles of a row
and works out their softmax, `right` with the odd ones. Each puts its weights, and what they are relative to, into
shared memory, and both add both tiles' weighted keys to their half. While one works out a softmax, the other's products
run. `produce`, four warps, copies q of each row, and keys to two places, of an even tile and of an odd one. Each half
of a tile's columns has barriers of its own, since who adds up only that half gives it back early.

Tiles come in pairs: the last of an odd number has a tile without keys beside it, and a row without keys is a pair of
such. Which rows a block attends, and how barriers count, is as in `kernels`. Of barriers, `q` are of the query, `l` and
`r` of left and right halves of keys, `n` of what a row is: its pairs, its number and its place among parts; `p` are
weights, `s` sums, and `go` holds the product of `right` back until that of `left` is on its way.

Weights are relative to a reference that moves only where a maximum exceeds it by more than TOLERANCE, so that sums
seldom shrink. Powers of two up to there are as exact in bf16 and fp32 as those below 1.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from dsv4attn.backends._triton.launching.runtime import stable_gluon
from dsv4attn.backends.sm90.compat import copy_async
from dsv4attn.backends.sm90.kernels_common import (
    FLAT_S,
    KEYS_S,
    LINE_L,
    LOG2E,
    NOTHING,
    SCORES_L,
    WIDE_L,
    barriers,
    here,
    load_sink,
    scalar,
    single,
    write_sums,
)
from dsv4attn.backends.sm90.kernels_schedule import (
    TOLERANCE,
    enter,
    pairs_of,
    part_of,
    row_of,
    row_slots,
    share,
    tiles_of,
    told,
)

HALF_L = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))
"""Of half of the output's columns."""
LEFT, RIGHT = gl.constexpr(0), gl.constexpr(1)
"""The roles that multiply, and where their tiles stand, their weights, and what else the other one reads."""


def _unless_all_are_one(n: int) -> str:
    """Instructions that multiply n numbers by n more, of which two in turns belong to either row of a thread.

    A warp in which no row shrinks skips the products.
    """
    outs, ins, by = ([f"${n * i + k}" for k in range(n)] for i in range(3))
    vote = [
        f"setp.neu.f32 p, {by[0]}, 0f3F800000;",
        f"setp.neu.f32 r, {by[2]}, 0f3F800000;",
        "or.pred p, p, r;",
        "vote.sync.any.pred p, p, 0xffffffff;",
    ]
    moves = [f"mov.f32 {o}, {i};" for o, i in zip(outs, ins, strict=True)]
    products = [f"mul.f32 {o}, {o}, {b};" for o, b in zip(outs, by, strict=True)]
    return "\n".join(["{", ".reg .pred p, r;", *vote, *moves, "@!p bra.uni DONE;", *products, "DONE:", "}"])


_PACK = 64
PACK = gl.constexpr(_PACK)
"""Numbers of a thread that one block of instructions multiplies: half of all."""
SHRINK = gl.constexpr(_unless_all_are_one(_PACK))
SHRINK_REGISTERS = gl.constexpr(",".join(["=&f"] * _PACK + ["f"] * 2 * _PACK))


@gluon.jit
def shrunk(acc, shrink):
    """[64, 256] times [64], which mostly is 1. Instructions, since Gluon has no branch that one warp takes alone."""
    by = gl.expand_dims(gl.convert_layout(shrink, gl.SliceLayout(1, HALF_L)), 1) + gl.zeros_like(acc)
    return gl.inline_asm_elementwise(SHRINK, SHRINK_REGISTERS, [acc, by], dtype=gl.float32, is_pure=False, pack=PACK)


@gluon.jit
def copy_half(to, rows, ok, FIRST: gl.constexpr):
    """Start to copy 256 columns of 64 rows, from FIRST on; zeros where not ok."""
    of = FIRST + gl.arange(0, 256, layout=gl.SliceLayout(0, WIDE_L))
    p = gl.multiple_of(gl.expand_dims(rows, 1) + gl.expand_dims(of, 0), [1, 16])
    copy_async(to, p, mask=gl.expand_dims(ok, 1) & (gl.expand_dims(of, 0) < 512))


@gluon.jit
def arrive_copied(bar):
    """Arrive once all that this role has begun to copy is there. Nobody waits for it here.

    The matrix unit may read it then without a fence, as in CUTLASS's pipelines of cp.async; a fence after each wait for
    keys costs up to 3 % on an H200.
    """
    async_copy.mbarrier_arrive(bar, increment_count=True)
    mbarrier.arrive(bar, count=1)


@gluon.jit
def mark(bias_s, every_s, ok, PLACE: gl.constexpr):
    """Say which keys of a tile are there, and whether all are: then nobody reads the first."""
    bias_s.index(PLACE).store(gl.where(ok, 0.0, -float("inf")))
    every_s.index(PLACE).store(single(gl.min(ok.to(gl.int32), 0), gl.int32))


@gluon.jit
def produce(
    q, table, cache, rows, lens, stride, pitch, slots_there, width, line, q_token, q_head, head0, query, tiles, notes,
    SEGMENTS: gl.constexpr, H: gl.constexpr,
):  # fmt: skip
    """Say what each row is, and fill places with its q and its tiles. The next pair's slots are loaded meanwhile."""
    q_s, q_full, q_empty = query
    kL, kR, bias_s, every_s, l_full, l_empty, r_full, r_empty = tiles
    pairs_s, t_s, side_s, n_full, n_empty = notes
    tokens, lo, hi, chunk, extra, t, pos = line
    program = gl.program_id(0)
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, WIDE_L))
    j = gl.to_tensor(0)
    i = gl.to_tensor(0)
    while (pos < hi) & (t < tokens):
        n0, n1, first, last = enter(lens, lens, t, pos, lo, hi, tokens, width, width, SEGMENTS)
        n = tiles_of(n0, n1)
        slot_a = row_slots(rows, stride, t, n0, last, first, row)
        slot_b = row_slots(rows, stride, t, n0, last, first + 1, row)
        b = j % 2
        mbarrier.wait(n_empty.index(b), ((j // 2) & 1) ^ 1)
        side = part_of(program, pos, lo)
        if (first == 0) & (last == n):
            side = side * 0 - 1
        pairs_s.index(b).store(single(pairs_of(first, last), gl.int32))
        t_s.index(b).store(single(t, gl.int32))
        side_s.index(b).store(single(side, gl.int32))
        mbarrier.arrive(n_full.index(b), count=1)
        if first == 0:
            told(table, t, pos, n, lo, chunk)
        mbarrier.wait(q_empty.index(0), (j & 1) ^ 1)
        head = head0 + here(row)
        q_row = q + t.to(gl.int64) * q_token + head.to(gl.int64) * q_head
        copy_half(q_s.index(0), q_row, head < H, 0)
        copy_half(q_s.index(1), q_row, head < H, 256)
        arrive_copied(q_full.index(0))
        for k in range(first, first + 2 * pairs_of(first, last), 2):
            ok_a, key_a = row_of(slot_a, cache, pitch, slots_there)
            ok_b, key_b = row_of(slot_b, cache, pitch, slots_there)
            slot_a = row_slots(rows, stride, t, n0, last, k + 2, row)
            slot_b = row_slots(rows, stride, t, n0, last, k + 3, row)
            # halves in the order in which they are multiplied. Marks go with the half that only their reader gives back
            mbarrier.wait(l_empty.index(0), (i & 1) ^ 1)
            copy_half(kL.index(0), key_a, ok_a, 0)
            mark(bias_s, every_s, ok_a, 0)
            arrive_copied(l_full.index(0))
            mbarrier.wait(r_empty.index(0), (i & 1) ^ 1)
            copy_half(kR.index(0), key_a, ok_a, 256)
            arrive_copied(r_full.index(0))
            mbarrier.wait(r_empty.index(1), (i & 1) ^ 1)
            copy_half(kR.index(1), key_b, ok_b, 256)
            mark(bias_s, every_s, ok_b, 1)
            arrive_copied(r_full.index(1))
            mbarrier.wait(l_empty.index(1), (i & 1) ^ 1)
            copy_half(kL.index(1), key_b, ok_b, 0)
            arrive_copied(l_full.index(1))
            i += 1
        pos += gl.maximum(n, 1) + extra
        t += 1
        j += 1
    mbarrier.wait(n_empty.index(j % 2), ((j // 2) & 1) ^ 1)
    pairs_s.index(j % 2).store(single(-1, gl.int32))
    mbarrier.arrive(n_full.index(j % 2), count=1)
    # `left` begins one product more than there are; what it multiplies belongs to nobody
    mbarrier.wait(q_empty.index(0), (j & 1) ^ 1)
    mbarrier.arrive(q_full.index(0), count=1)
    mbarrier.wait(l_empty.index(0), (i & 1) ^ 1)
    mbarrier.arrive(l_full.index(0), count=1)
    mbarrier.wait(r_empty.index(0), (i & 1) ^ 1)
    mbarrier.arrive(r_full.index(0), count=1)


@gluon.jit
def multiplied(query, tiles, phase, MINE: gl.constexpr):
    """Begin the product of q and the own tile, whose halves come in different order."""
    q_s, _q_full, _q_empty = query
    kL, kR, _bias_s, _every_s, l_full, _l_empty, r_full, _r_empty = tiles
    zero = here(gl.to_tensor(0))
    s = gl.zeros([64, 64], gl.float32, layout=SCORES_L)
    if MINE == LEFT:
        mbarrier.wait(l_full.index(0), phase)
        s = warpgroup_mma(q_s.index(zero), kL.index(zero).permute((1, 0)), s, use_acc=False, is_async=True)
        mbarrier.wait(r_full.index(0), phase)
        s = warpgroup_mma(q_s.index(zero + 1), kR.index(zero).permute((1, 0)), s, is_async=True)
    else:
        mbarrier.wait(r_full.index(1), phase)
        s = warpgroup_mma(q_s.index(zero + 1), kR.index(zero + 1).permute((1, 0)), s, use_acc=False, is_async=True)
        mbarrier.wait(l_full.index(1), phase)
        s = warpgroup_mma(q_s.index(zero), kL.index(zero + 1).permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def added(acc, half_s, p_s, shrink, WHOSE: gl.constexpr):
    """Begin to add a tile's weighted keys to the own half, once that has shrunk.

    Own weights come from shared memory too: from registers, of which there are too few, products would not overlap.
    """
    place = here(gl.to_tensor(0)) + WHOSE
    return warpgroup_mma(p_s.index(place), half_s.index(place), shrunk(acc, shrink), is_async=True)


@gluon.jit
def weighed(s, every, bias_s, weights, reference, scale, MINE: gl.constexpr):
    """Tell the own tile's weights: (their sum, their reference, what sums so far shrink by, its largest logits)."""
    p_s, reference_s, p_full = weights
    z = s * (scale * LOG2E)
    if every == 0:
        # chosen, not added: a padding row's q may be NaN, and so are its products with keys that are not there
        bias = gl.expand_dims(bias_s.index(MINE).load(gl.SliceLayout(0, SCORES_L)), 0)
        z = gl.where(bias == 0.0, z, -float("inf"))
    most = gl.max(z, 1)
    moved = gl.where(most > reference + TOLERANCE, most, reference)
    p = gl.exp2(z - gl.expand_dims(moved, 1))
    p_s.index(MINE).store(p.to(gl.bfloat16))
    reference_s.index(MINE).store(moved)
    fence_async_shared()
    mbarrier.arrive(p_full.index(MINE), count=1)
    return gl.sum(p, 1), moved, gl.exp2(reference - moved), most


@gluon.jit
def taken_over(weights, phase, reference, total, OTHER: gl.constexpr):
    """Once the other's weights are told: (their reference, what sums so far shrink by, the total then)."""
    _p_s, reference_s, p_full = weights
    mbarrier.wait(p_full.index(OTHER), phase)
    moved = reference_s.index(OTHER).load(gl.SliceLayout(1, SCORES_L))
    shrink = gl.exp2(reference - moved)
    return moved, shrink, total * shrink


@gluon.jit
def nothing():
    """Of a row's beginning: what weights are relative to, their total, and the largest logit."""
    none = gl.full([64], NOTHING, gl.float32, layout=gl.SliceLayout(1, SCORES_L))
    return none, gl.zeros([64], gl.float32, layout=gl.SliceLayout(1, SCORES_L)), none


@gluon.jit
def tell_sums(sums, total, largest, max_logits, MINE: gl.constexpr):
    """Tell the other role what its row's end needs.

    One place each is enough. Who ends the next row has met the other's weights of it, told after that read this one.
    """
    total_s, largest_s, s_full = sums
    total_s.index(MINE).store(total)
    if max_logits is not None:
        largest_s.index(MINE).store(largest)
    mbarrier.arrive(s_full.index(MINE), count=1)


@gluon.jit
def left(
    results, to, query, tiles, weights, sums, notes, sink_s, go, scale, empty_lse, head0, H: gl.constexpr
):  # fmt: skip
    """Even tiles, and the left half of the output."""
    max_logits, p_s = results[2], weights[0]
    _q_s, q_full, q_empty = query
    kL, _kR, bias_s, every_s, _l_full, l_empty, _r_full, _r_empty = tiles
    pairs_s, _t_s, _side_s, n_full, _n_empty = notes
    i = gl.to_tensor(0)
    j = gl.to_tensor(0)
    k = gl.to_tensor(0)
    mbarrier.wait(n_full.index(0), 0)
    pairs = scalar(pairs_s.index(0))
    mbarrier.wait(q_full.index(0), 0)
    s = multiplied(query, tiles, 0, LEFT)
    reference, total, largest = nothing()
    done = gl.zeros([64, 256], gl.float32, layout=HALF_L)
    # rows in one loop of pairs: a product begun before its end crosses from row to row
    while pairs > 0:
        every = scalar(every_s.index(0))
        mbarrier.arrive(go.index(0), count=1)
        s = warpgroup_mma_wait(0, [s])
        k += 1
        mbarrier.arrive(q_empty.index(0), count=1, pred=k == pairs)
        more, reference, shrink, most = weighed(s, every, bias_s, weights, reference, scale, LEFT)
        total = total * shrink + more
        if max_logits is not None:
            largest = gl.maximum(largest, most)
        acc = added(done, kL, p_s, shrink, LEFT)
        reference, shrink, total = taken_over(weights, i & 1, reference, total, RIGHT)
        done = warpgroup_mma_wait(0, [acc])
        mbarrier.arrive(l_empty.index(LEFT), count=1)
        acc = added(done, kL, p_s, shrink, RIGHT)
        of_row = pairs
        if k == of_row:
            tell_sums(sums, total, largest, max_logits, LEFT)
            mbarrier.wait(n_full.index((j + 1) % 2), ((j + 1) // 2) & 1)
            pairs = scalar(pairs_s.index((j + 1) % 2))
            mbarrier.wait(q_full.index(0), (j + 1) & 1)
        done = warpgroup_mma_wait(0, [acc])
        mbarrier.arrive(l_empty.index(RIGHT), count=1)
        # the next row's as well: it runs while this one is written
        s = multiplied(query, tiles, (i + 1) & 1, LEFT)
        if k == of_row:
            # through the place of the own weights: `right` has used them, since it gave back the keys of that product,
            # and others are there already
            finish(done, total, reference, largest, j, results, to, p_s, sums, notes, sink_s, empty_lse, head0, H, LEFT)
            done = gl.zeros([64, 256], gl.float32, layout=HALF_L)
            reference, total, largest = nothing()
            k = k * 0
            j += 1
        i += 1
    s = warpgroup_mma_wait(0, [s])


@gluon.jit
def right(
    results, to, query, tiles, weights, sums, notes, sink_s, go, scale, empty_lse, head0, H: gl.constexpr
):  # fmt: skip
    """Odd tiles, and the right half of the output. Its product of q runs while `left` works out a softmax."""
    max_logits, p_s = results[2], weights[0]
    _q_s, q_full, q_empty = query
    _kL, kR, bias_s, every_s, _l_full, l_empty, _r_full, r_empty = tiles
    pairs_s, _t_s, _side_s, n_full, _n_empty = notes
    i = gl.to_tensor(0)
    j = gl.to_tensor(0)
    mbarrier.wait(n_full.index(0), 0)
    pairs = scalar(pairs_s.index(0))
    while pairs > 0:
        reference, total, largest = nothing()
        acc = warpgroup_mma_init(gl.zeros([64, 256], gl.float32, layout=HALF_L))
        mbarrier.wait(q_full.index(0), j & 1)
        for k in range(pairs):
            done = warpgroup_mma_wait(0, [acc])
            mbarrier.arrive(r_empty.index(RIGHT), count=1, pred=k > 0)
            mbarrier.wait(go.index(0), i & 1)
            s = multiplied(query, tiles, i & 1, RIGHT)
            every = scalar(every_s.index(1))
            reference, shrink, total = taken_over(weights, i & 1, reference, total, LEFT)
            s = warpgroup_mma_wait(0, [s])
            mbarrier.arrive(q_empty.index(0), count=1, pred=k + 1 == pairs)
            acc = added(done, kR, p_s, shrink, LEFT)
            more, reference, shrink, most = weighed(s, every, bias_s, weights, reference, scale, RIGHT)
            total = total * shrink + more
            if max_logits is not None:
                largest = gl.maximum(largest, most)
            done = warpgroup_mma_wait(0, [acc])
            mbarrier.arrive(r_empty.index(LEFT), count=1)
            acc = added(done, kR, p_s, shrink, RIGHT)
            i += 1
        tell_sums(sums, total, largest, max_logits, RIGHT)
        done = warpgroup_mma_wait(0, [acc])
        mbarrier.arrive(r_empty.index(RIGHT), count=1)
        # once `left` has multiplied with the own weights, their place is free for results
        mbarrier.wait(l_empty.index(RIGHT), (i - 1) & 1)
        finish(done, total, reference, largest, j, results, to, p_s, sums, notes, sink_s, empty_lse, head0, H, RIGHT)
        j += 1
        mbarrier.wait(n_full.index(j % 2), (j // 2) & 1)
        pairs = scalar(pairs_s.index(j % 2))


@gluon.jit
def finish(
    acc, total, reference, largest, j, results, to, p_s, sums, notes, sink_s, empty_lse, head0,
    H: gl.constexpr, MINE: gl.constexpr,
):  # fmt: skip
    """Write half of a row; `right` writes what it sums to."""
    OTHER: gl.constexpr = 1 - MINE
    out, lse, max_logits, sink, part, part_lse, part_max = results
    total_s, largest_s, s_full = sums
    _pairs_s, t_s, side_s, _n_full, n_empty = notes
    t = scalar(t_s.index(j % 2))
    side = scalar(side_s.index(j % 2))
    mbarrier.wait(s_full.index(OTHER), j & 1)
    total = total + total_s.index(OTHER).load(gl.SliceLayout(1, SCORES_L))
    mbarrier.arrive(n_empty.index(j % 2), count=1)
    factor = 1.0 / total
    if side < 0:  # noqa: SIM102 - a value, and a constant
        if sink is not None:
            # one more logit of value zero; a sink of +inf leaves nothing
            factor = 1.0 / (total + gl.exp2(sink_s.load(gl.SliceLayout(1, SCORES_L)) - reference))
    factor = gl.where(total == 0.0, 0.0, factor)
    result = acc * gl.expand_dims(gl.convert_layout(factor, gl.SliceLayout(1, HALF_L)), 1)
    write(out, part, result, p_s.index(MINE), t, side, to, head0, 256 * MINE, H)
    if MINE == RIGHT:
        if max_logits is not None:
            largest = gl.maximum(largest, largest_s.index(OTHER).load(gl.SliceLayout(1, SCORES_L)))
        write_sums(
            lse, max_logits, part_lse, part_max, to, t, side < 0, side, total, reference, largest, empty_lse, head0, H
        )


@gluon.jit
def write(out, part, result, stage, t, side, to, head0, FIRST: gl.constexpr, H: gl.constexpr):
    """256 columns of row t of 64 heads, from FIRST on, or, side >= 0, of that place of parts."""
    if side < 0:
        x, y = halves(result.to(out.dtype.element_ty), 256)
        x0, x1 = halves(x, 128)
        y0, y1 = halves(y, 128)
        write_quarter(out, x0, stage, t, to, head0, FIRST, H)
        write_quarter(out, x1, stage, t, to, head0, FIRST + 64, H)
        write_quarter(out, y0, stage, t, to, head0, FIRST + 128, H)
        write_quarter(out, y1, stage, t, to, head0, FIRST + 192, H)
    else:
        line = here(gl.arange(0, 64, layout=gl.SliceLayout(1, HALF_L)))
        across = FIRST + gl.arange(0, 256, layout=gl.SliceLayout(0, HALF_L))
        aside = gl.multiple_of(part + side.to(gl.int64) * (64 * 512) + line * 512, [16])
        gl.store(gl.expand_dims(aside, 1) + gl.expand_dims(across, 0), result)


@gluon.jit
def halves(x, N: gl.constexpr):
    """[64, N] as two of [64, N // 2]."""
    return gl.split(gl.permute(gl.reshape(x, [64, 2, N // 2]), (0, 2, 1)))


@gluon.jit
def write_quarter(out, x, stage, t, to, head0, FIRST: gl.constexpr, H: gl.constexpr):
    """64 columns through shared memory, so that each thread writes sixteen bytes, and eight threads a line."""
    out_token, out_head, _lse_token, _lse_head, _max_token, _max_head = to
    stage.store(x)
    row = here(gl.arange(0, 64, layout=gl.SliceLayout(1, WIDE_L)))
    column = FIRST + gl.arange(0, 64, layout=gl.SliceLayout(0, WIDE_L))
    p = gl.multiple_of(out + t.to(gl.int64) * out_token + (head0 + row) * out_head, [16])
    mask = gl.expand_dims(head0 + row < H, 1) & (gl.expand_dims(column, 0) < 512)
    gl.store(gl.expand_dims(p, 1) + gl.expand_dims(column, 0), stage.load(WIDE_L), mask=mask)


@stable_gluon
def attention(
    q,
    out,
    lse,
    max_logits,
    sink,
    part,
    part_lse,
    part_max,
    table,
    cache0,
    rows0,
    lens0,
    cache1,
    rows1,
    lens1,
    q_token: tl.int64,
    q_head: tl.int64,
    out_token: tl.int64,
    out_head: tl.int64,
    lse_token: tl.int64,
    lse_head: tl.int64,
    max_token: tl.int64,
    max_head: tl.int64,
    width0: tl.int32,
    stride0: tl.int64,
    size0: tl.int32,
    factor0: tl.int32,
    log0: tl.int32,
    pitch0: tl.int32,
    count0: tl.int32,
    width1: tl.int32,
    stride1: tl.int64,
    size1: tl.int32,
    factor1: tl.int32,
    log1: tl.int32,
    pitch1: tl.int32,
    count1: tl.int32,
    tokens: tl.int32,
    least: tl.int32,
    scale: tl.float32,
    empty_lse: tl.float32,
    SEGMENTS: gl.constexpr,
    H: gl.constexpr,
    BT: gl.constexpr,
    VALUES: gl.constexpr,
    PRODUCE: gl.constexpr,
):
    """Arguments are those of `kernels.attention`, but keys: cache0 is rows [count0, 512] bf16, pitch0 eighths apart.

    They begin at multiples of 16 bytes. SEGMENTS is 1: nothing of a second one, nor of pages, is read. VALUES, PRODUCE:
    registers of `right` and of `produce`; `left` has what they leave.
    """
    gl.static_assert(SEGMENTS == 1, "rows have one segment")
    BLOCKS: gl.constexpr = (H + 63) // 64
    program = gl.program_id(0)
    head0 = (program % BLOCKS) * 64
    at = gl.arange(0, BT, layout=LINE_L)
    lo, hi, chunk, extra, t, pos, _count = share(
        lens0, lens0, tokens, width0, width0, program // BLOCKS, gl.num_programs(0) // BLOCKS, least, at, SEGMENTS, BT
    )
    line = (tokens, lo, hi, chunk, extra, t, pos)
    results = (out, lse, max_logits, sink, part, part_lse, part_max)
    to = (out_token, out_head, lse_token, lse_head, max_token, max_head)
    q_s = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 256], KEYS_S)
    query = (q_s, barriers(1, 1), barriers(1, 2))
    kL = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 256], KEYS_S)
    kR = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 256], KEYS_S)
    bias_s = gl.allocate_shared_memory(gl.float32, [2, 64], FLAT_S)
    every_s = gl.allocate_shared_memory(gl.int32, [2, 1], FLAT_S)
    tiles = (kL, kR, bias_s, every_s, barriers(2, 1), barriers(2, 1), barriers(2, 1), barriers(2, 1))
    p_s = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 64], KEYS_S)
    reference_s = gl.allocate_shared_memory(gl.float32, [2, 64], FLAT_S)
    weights = (p_s, reference_s, barriers(2, 1))
    total_s = gl.allocate_shared_memory(gl.float32, [2, 64], FLAT_S)
    largest_s = gl.allocate_shared_memory(gl.float32, [2, 64], FLAT_S)
    sums = (total_s, largest_s, barriers(2, 1))
    # two of each: what the next row is, is said while this one is still being written
    pairs_s = gl.allocate_shared_memory(gl.int32, [2, 1], FLAT_S)
    t_s = gl.allocate_shared_memory(gl.int32, [2, 1], FLAT_S)
    side_s = gl.allocate_shared_memory(gl.int32, [2, 1], FLAT_S)
    notes = (pairs_s, t_s, side_s, barriers(2, 1), barriers(2, 2))
    sink_s = load_sink(sink, head0, H)
    go = barriers(1, 1)
    fence_async_shared()
    attending = (results, to, query, tiles, weights, sums, notes, sink_s, go, scale, empty_lse, head0, H)
    gl.warp_specialize(
        [
            (left, attending),
            (right, attending),
            (
                produce,
                (
                    q, table, cache0, rows0, lens0, stride0, pitch0, count0, width0, line, q_token, q_head, head0,
                    query, tiles, notes, SEGMENTS, H,
                ),
            ),
        ],
        worker_num_warps=[4, 4],
        worker_num_regs=[VALUES, PRODUCE],
    )  # fmt: skip

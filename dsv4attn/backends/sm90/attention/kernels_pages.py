"""The kernel for keys in pages of records: four roles, four warps each, work on tiles of 64 keys at the same time.

`fetch` copies records to shared memory, and `decode` turns them into tiles, in one of two stages: `kernels_load_v4`.
On V4.1's records one role of eight warps does both, `produce_coded`. `scores` multiplies q with a tile, computes each
row's softmax, and accumulates the first 128 columns of the output. `values` accumulates the other 384, with the weights
and the factors that `scores` writes to shared memory. Blocks are as many as the device has multiprocessors, and each
attends a chunk of all rows: `kernels_schedule`. The next row's q and its first tiles arrive while a row is still being
written.

Weights are relative to a reference that moves seldom, as in `kernels_rows`.

A barrier of shared memory counts roles, and threads only where their copies arrive. It has phases: the role that fills
a stage waits for the phase before the one that its readers wait for.
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

from dsv4attn.backends._triton.launching.kernels_pdl import launch_dependents
from dsv4attn.backends._triton.numerics import LOG2E, NOTHING
from dsv4attn.backends.sm90.attention.kernels_common import (
    FLAT_S,
    KEYS_S,
    SCORES_L,
    WIDE_L,
    barriers,
    here,
    normalized,
    rescaled,
    scalar,
    single,
    store_sink,
    write_part,
)
from dsv4attn.backends.sm90.attention.kernels_load_v4 import (
    FETCHING,
    RAW_S,
    allocate_codes,
    allocate_fetched,
    decode,
    fetch,
)
from dsv4attn.backends.sm90.attention.kernels_load_v41 import RAW_NIBBLES_S, produce_coded
from dsv4attn.backends.sm90.attention.kernels_schedule import (
    CODE_PAGES,
    NIBBLE_PAGES,
    TOLERANCE,
    clear_split,
    differs,
    enter,
    exists,
    group_at,
    part_of,
    seen_by,
    store_split,
    tiles_of,
    visible,
    write_sums,
)
from dsv4attn.backends.sm90.compat import copy_async

OUT_L = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
"""128 columns of the output."""
WEIGHTS_L = gl.constexpr(gl.DotOperandLayout(0, OUT_L.value, 2))
STORE_L = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [8, 0], [0, 32], [0, 64]],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 128],
    )
)
"""Sixteen bytes of bf16 in each thread, and in the warp that has them in OUT_L already."""


Shared = namedtuple(
    "Shared",
    "q k0 k1 k2 k3 raw scales indices addresses p alpha bias factor note where sink "
    "k_full k_empty p_full p_empty f_full f_empty n_full n_empty raw_full raw_empty rest_full",
)
"""Shared memory of a block. Barriers: *_full ends when a stage is written, *_empty when all its readers are done.

q: [4, 64, 128] bf16. k0 to k3: [2, 64, 128] bf16, columns of two tiles; bias: [2, 64] fp32, 0 or -inf for each key.
raw, scales, indices, addresses: of `allocate_fetched`; on V4.1's records raw is five of [64, 16] int32, codes, and
the others are None. p, alpha: [1, 64, 64] bf16 and [1, 64] fp32, a tile's weights, and factors of the sums so far.
factor: [64] fp32, of a row's sums; where: int64, its place in the output, or -1 minus that of its part; sink: [64]
fp32. note: int32, tiles of the next row, or -1. k, p, f, n: barriers of keys, of p and alpha, of factor and where,
and of note. raw, rest: of what `fetch` copies ahead, and of what it copies to a stage, with that stage's bias; no
role of V4.1's records waits for them.
"""


@gluon.jit
def load_q(query, keys, q_s, group, there, H: gl.constexpr, HEADS: gl.constexpr):
    """Start to copy q of a row or group, zeros for heads and rows that are not there."""
    column = gl.arange(0, 128, layout=gl.SliceLayout(0, WIDE_L))
    within = here(gl.arange(0, 64, layout=gl.SliceLayout(1, WIDE_L)))
    if keys.groups is not None:
        head = within % HEADS
        at = group.row + within // HEADS
        live = exists(group, within, H, HEADS) & there
        p = gl.expand_dims(query.q + at.to(gl.int64) * query.token + head.to(gl.int64) * query.head, 1)
        p = p + gl.expand_dims(column, 0)
    else:
        head = query.head0 + within
        live = (head < H) & there
        row = query.q + group.row.to(gl.int64) * query.token
        p = row + gl.expand_dims(head.to(gl.int64) * query.head, 1) + gl.expand_dims(column, 0)
    p = gl.multiple_of(p, [1, 16])
    mask = gl.expand_dims(live, 1) & (gl.expand_dims(column, 0) < 128)
    for g in gl.static_range(4):
        copy_async(q_s.index(g), p + 128 * g, mask=mask)
    async_copy.commit_group()


@gluon.jit
def sums_of(p):
    """Sums of each row of [64, 64] over the columns that one thread has: [64, 4], added up after a row's last tile."""
    return gl.sum(gl.sum(gl.reshape(p, [64, 8, 4, 2]), 3), 1)


@gluon.jit
def scores(query, keys, results, chunk, t, pos, smem, H: gl.constexpr, HEADS: gl.constexpr):
    """Products of q and keys, the softmax of each row, and the first 128 columns of its output."""
    program = gl.program_id(0)
    group = group_at(keys, t, t < chunk.tokens)
    load_q(query, keys, smem.q, group, t < chunk.tokens, H, HEADS)
    clear_split(results.table, chunk)
    i = gl.to_tensor(0)
    j = gl.to_tensor(0)
    while (pos < chunk.hi) & (t < chunk.tokens):
        n0, n1, first, last = enter(keys, chunk, t, pos)
        n = tiles_of(keys, n0, n1)
        mbarrier.wait(smem.n_empty.index(0), (j & 1) ^ 1)
        smem.note.store(single(last - first, gl.int32))
        async_copy.wait_group(0)
        fence_async_shared()
        mbarrier.arrive(smem.n_full.index(0), count=1)
        if keys.groups is not None:
            line = gl.arange(0, 64, layout=gl.SliceLayout(1, SCORES_L))
            sees, entries, begun, least = seen_by(keys, group, n0, line, H, HEADS)
        largest = gl.full([64], NOTHING, gl.float32, layout=gl.SliceLayout(1, SCORES_L))
        reference = largest
        sums = sums_of(gl.zeros([64, 64], gl.float32, layout=SCORES_L))
        acc = warpgroup_mma_init(gl.zeros([64, 128], gl.float32, layout=OUT_L))
        for k in range(first, last):
            b = i % 2
            zero = here(gl.to_tensor(0))
            # at once, whether or not the next tile is there: the stage is filled meanwhile
            done = warpgroup_mma_wait(0, [acc])
            mbarrier.arrive(smem.k_empty.index(1 - b), count=1, pred=k > first)
            mbarrier.wait(smem.k_full.index(b), (i // 2) & 1)
            bias = smem.bias.index(b).load(gl.SliceLayout(0, SCORES_L))
            s = gl.zeros([64, 64], gl.float32, layout=SCORES_L)
            s = warpgroup_mma(smem.q.index(zero + 0), smem.k0.index(b).permute((1, 0)), s, use_acc=False, is_async=True)
            s = warpgroup_mma(smem.q.index(zero + 1), smem.k1.index(b).permute((1, 0)), s, is_async=True)
            s = warpgroup_mma(smem.q.index(zero + 2), smem.k2.index(b).permute((1, 0)), s, is_async=True)
            s = warpgroup_mma(smem.q.index(zero + 3), smem.k3.index(b).permute((1, 0)), s, is_async=True)
            s = warpgroup_mma_wait(0, [s])
            z = s * (query.scale * LOG2E) + gl.expand_dims(bias, 0)
            if keys.groups is not None:  # noqa: SIM102 - a constant, and a value
                if differs(k, n0, group, begun, least):
                    column = gl.arange(0, 64, layout=gl.SliceLayout(0, SCORES_L))
                    line = here(gl.arange(0, 64, layout=gl.SliceLayout(1, SCORES_L)))
                    z = gl.where(visible(column, k, n0, group, line, sees, entries, HEADS), z, -float("inf"))
            most = gl.max(z, 1)
            moved = gl.where(most > reference + TOLERANCE, most, reference)
            shrink = gl.exp2(reference - moved)
            p = gl.exp2(z - gl.expand_dims(moved, 1))
            reference = moved
            if results.max_logits is not None:
                largest = gl.maximum(largest, most)
            w = p.to(gl.bfloat16)
            mbarrier.wait(smem.p_empty.index(0), (i & 1) ^ 1)
            smem.p.index(0).store(w)
            smem.alpha.index(0).store(shrink)
            fence_async_shared()
            mbarrier.arrive(smem.p_full.index(0), count=1)
            sums = sums * gl.expand_dims(gl.convert_layout(shrink, gl.SliceLayout(1, sums.type.layout)), 1) + sums_of(p)
            done = rescaled(done, shrink)
            acc = warpgroup_mma(gl.convert_layout(w, WEIGHTS_L), smem.k0.index(b), done, is_async=True)
            i += 1
        acc = warpgroup_mma_wait(0, [acc])
        mbarrier.arrive(smem.k_empty.index((i - 1) % 2), count=1, pred=last > first)
        total = gl.convert_layout(gl.sum(sums, 1), gl.SliceLayout(1, SCORES_L))
        whole = (first == 0) & (last == n)
        side = part_of(chunk, program, pos)
        factor = normalized(results.sink, smem.sink, total, reference, whole)
        within, live = here(gl.arange(0, 64, layout=gl.SliceLayout(1, SCORES_L))), None
        if keys.groups is not None:
            # the sign says that a row is not of the group, and nothing is to be written
            live = exists(group, within, H, HEADS)
            factor = gl.where(live, factor, -1.0)
        mbarrier.wait(smem.f_empty.index(0), (j & 1) ^ 1)
        smem.factor.store(factor)
        row = group.row
        place = row.to(gl.int64) * results.out_token + query.head0 * results.out_head
        if whole == 0:
            place = -1 - side.to(gl.int64) * (64 * 512)
        smem.where.store(single(place, gl.int64))
        mbarrier.arrive(smem.f_full.index(0), count=1)
        following = t + 1
        group = group_at(keys, following, following < chunk.tokens)
        load_q(query, keys, smem.q, group, following < chunk.tokens, H, HEADS)
        result = acc * gl.expand_dims(gl.convert_layout(factor, gl.SliceLayout(1, OUT_L)), 1)
        kept = None
        if keys.groups is not None:
            kept = gl.convert_layout(factor, gl.SliceLayout(1, STORE_L))
        write_columns(results, result, place, 0, H, HEADS, kept)
        write_sums(results, row, whole, side, total, reference, largest, query.head0, within, H, HEADS, live)
        if first == 0:
            store_split(results.table, chunk, t, pos, n)
        pos += gl.maximum(n, 1) + chunk.extra
        t = following
        j += 1
    launch_dependents(True)
    async_copy.wait_group(0)
    mbarrier.wait(smem.n_empty.index(0), (j & 1) ^ 1)
    smem.note.store(single(-1, gl.int32))
    mbarrier.arrive(smem.n_full.index(0), count=1)


@gluon.jit
def write_columns(results, result, place, FIRST: gl.constexpr, H: gl.constexpr, HEADS: gl.constexpr, kept):
    """128 columns of 64 heads, from FIRST on. place: of the first head in out, or -1 minus its offset in part.

    kept: None; or, of a group, [64], negative for rows of products that are not written. Each HEADS of them are a row.
    """
    out = results.out
    if place >= 0:
        row = here(gl.arange(0, 64, layout=gl.SliceLayout(1, STORE_L)))
        column = FIRST + gl.arange(0, 128, layout=gl.SliceLayout(0, STORE_L))
        head0 = 0 if H <= 64 else (gl.program_id(0) % ((H + 63) // 64)) * 64
        live = head0 + row < H
        offset = row * results.out_head
        if kept is not None:
            live = (kept < 0) == 0
            offset = row % HEADS * results.out_head + row // HEADS * results.out_token
        to = gl.multiple_of(out + place + offset, [16])
        wide = gl.convert_layout(result.to(out.dtype.element_ty), STORE_L)
        mask = gl.expand_dims(live, 1) & (gl.expand_dims(column, 0) < 512)
        gl.store(gl.expand_dims(to, 1) + gl.expand_dims(column, 0), wide, mask=mask)
    else:
        write_part(results, result, -1 - place, FIRST, 128)


@gluon.jit
def values(results, smem, H: gl.constexpr, HEADS: gl.constexpr, GROUPED: gl.constexpr):
    """The last 384 columns of the output."""
    i = gl.to_tensor(0)
    j = gl.to_tensor(0)
    mbarrier.wait(smem.n_full.index(0), 0)
    count = scalar(smem.note)
    mbarrier.arrive(smem.n_empty.index(0), count=1)
    while count >= 0:
        b_acc = gl.zeros([64, 128], gl.float32, layout=OUT_L)
        c_acc = gl.zeros([64, 128], gl.float32, layout=OUT_L)
        d_acc = gl.zeros([64, 128], gl.float32, layout=OUT_L)
        for _ in range(count):
            b = i % 2
            mbarrier.wait(smem.p_full.index(0), i & 1)
            p = smem.p.index(0)
            shrink = smem.alpha.index(0).load(gl.SliceLayout(1, OUT_L))
            b_acc = rescaled(b_acc, shrink)
            c_acc = rescaled(c_acc, shrink)
            d_acc = rescaled(d_acc, shrink)
            b_acc = warpgroup_mma(p, smem.k1.index(b), b_acc, is_async=True)
            c_acc = warpgroup_mma(p, smem.k2.index(b), c_acc, is_async=True)
            d_acc = warpgroup_mma(p, smem.k3.index(b), d_acc, is_async=True)
            b_acc, c_acc, d_acc = warpgroup_mma_wait(0, [b_acc, c_acc, d_acc])
            mbarrier.arrive(smem.k_empty.index(b), count=1)
            mbarrier.arrive(smem.p_empty.index(0), count=1)
            i += 1
        mbarrier.wait(smem.f_full.index(0), j & 1)
        factor = smem.factor.load(gl.SliceLayout(1, OUT_L))
        place = scalar(smem.where)
        kept = None
        if GROUPED:
            kept = smem.factor.load(gl.SliceLayout(1, STORE_L))
        mbarrier.arrive(smem.f_empty.index(0), count=1)
        by = gl.expand_dims(factor, 1)
        write_columns(results, b_acc * by, place, 128, H, HEADS, kept)
        write_columns(results, c_acc * by, place, 256, H, HEADS, kept)
        write_columns(results, d_acc * by, place, 384, H, HEADS, kept)
        j += 1
        mbarrier.wait(smem.n_full.index(0), j & 1)
        count = scalar(smem.note)
        mbarrier.arrive(smem.n_empty.index(0), count=1)


@gluon.jit
def attend_pages(
    query, keys, results, bias, chunk, t, pos, count, KIND: gl.constexpr, INTERLEAVED: gl.constexpr,
    H: gl.constexpr, HEADS: gl.constexpr, VALUES: gl.constexpr, PRODUCE: gl.constexpr, FETCH: gl.constexpr,
):  # fmt: skip
    """Attend a chunk of count tiles, whose first row is t, at pos of the line. bias: of `load_sink`.

    VALUES, PRODUCE, FETCH: registers of roles.
    """
    GROUPED: gl.constexpr = keys.groups is not None
    CODED: gl.constexpr = (KIND == CODE_PAGES) | (KIND == NIBBLE_PAGES)
    if not CODED:
        raw, scales, indices, addresses = allocate_fetched(KIND)
    else:
        RAW: gl.constexpr = RAW_NIBBLES_S if KIND == NIBBLE_PAGES else RAW_S
        raw = allocate_codes(RAW), allocate_codes(RAW), allocate_codes(RAW), allocate_codes(RAW), allocate_codes(RAW)
        scales, indices, addresses = None, None, None
    smem = Shared(
        q=allocate(gl.bfloat16, [4, 64, 128], KEYS_S),
        # a buffer for each 128 columns: the compiler confuses parts of one buffer
        k0=allocate(gl.bfloat16, [2, 64, 128], KEYS_S), k1=allocate(gl.bfloat16, [2, 64, 128], KEYS_S),
        k2=allocate(gl.bfloat16, [2, 64, 128], KEYS_S), k3=allocate(gl.bfloat16, [2, 64, 128], KEYS_S),
        raw=raw, scales=scales, indices=indices, addresses=addresses,
        p=allocate(gl.bfloat16, [1, 64, 64], KEYS_S), alpha=allocate(gl.float32, [1, 64], FLAT_S),
        bias=allocate(gl.float32, [2, 64], FLAT_S), factor=allocate(gl.float32, [64], FLAT_S),
        note=allocate(gl.int32, [1], FLAT_S), where=allocate(gl.int64, [1], FLAT_S),
        sink=store_sink(bias),
        k_full=barriers(2, 1), k_empty=barriers(2, 2),
        p_full=barriers(1, 1), p_empty=barriers(1, 1), f_full=barriers(1, 1), f_empty=barriers(1, 1),
        n_full=barriers(1, 1), n_empty=barriers(1, 1),
        raw_full=barriers(1, 32 * FETCHING), raw_empty=barriers(1, 1), rest_full=barriers(2, 32 * FETCHING + 1),
    )  # fmt: skip
    fence_async_shared()
    if not CODED:
        gl.warp_specialize(
            [
                (scores, (query, keys, results, chunk, t, pos, smem, H, HEADS)),
                (values, (results, smem, H, HEADS, GROUPED)),
                (decode, (count, smem, KIND)),
                (fetch, (keys, chunk, t, pos, count, smem, KIND)),
            ],
            worker_num_warps=[4, 4, FETCHING],
            worker_num_regs=[VALUES, PRODUCE, FETCH],
        )
    else:
        gl.warp_specialize(
            [
                (scores, (query, keys, results, chunk, t, pos, smem, H, HEADS)),
                (values, (results, smem, H, HEADS, GROUPED)),
                (produce_coded, (keys, chunk, t, pos, count, smem, KIND, INTERLEAVED)),
            ],
            worker_num_warps=[4, 8],
            worker_num_regs=[VALUES, PRODUCE],
        )

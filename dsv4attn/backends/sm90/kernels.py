"""The Gluon kernel of Hopper for keys in fp8 pages: three roles of one block work on tiles of 64 keys at the same time.

`produce`, eight warps, reads keys, decodes them and puts tiles into one of two places of shared memory. `scores`, four
warps, multiplies q with a tile, keeps each row's softmax, and adds up the first 128 columns of the output. `values`,
four warps, adds up the other 384, with the weights and the factors that `scores` leaves in shared memory. Blocks are
as many as the device has multiprocessors, and each attends a chunk of all rows: `kernels_schedule`. The next row's q
and its first tiles arrive while a row is still being written.

A barrier of shared memory counts roles, not threads, and has phases: whoever fills a place waits for the phase before
the one that its readers wait for. What `k_full` says of a place of keys, `k_empty` takes back; `p` are weights and how
much the sums so far shrink, `n` is the number of tiles of a row, `f` what a row is multiplied with and where it goes.
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
from dsv4attn.backends.sm90.kernels_produce import RAW_S, produce
from dsv4attn.backends.sm90.kernels_schedule import enter, part_of, share, tiles_of, told

OUT_L = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
"""Of 128 columns of the output."""
WEIGHTS_L = gl.constexpr(gl.DotOperandLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]), 2))
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


@gluon.jit
def load_q(q, q_s, t, tokens, q_token, q_head, head0, H: gl.constexpr):
    """Start to copy q of row t, zeros for heads and rows that are not there."""
    head = head0 + here(gl.arange(0, 64, layout=gl.SliceLayout(1, WIDE_L)))
    column = gl.arange(0, 128, layout=gl.SliceLayout(0, WIDE_L))
    p = q + t.to(gl.int64) * q_token + gl.expand_dims(head.to(gl.int64) * q_head, 1) + gl.expand_dims(column, 0)
    p = gl.multiple_of(p, [1, 16])
    mask = gl.expand_dims((head < H) & (t < tokens), 1) & (gl.expand_dims(column, 0) < 128)
    copy_async(q_s.index(0), p, mask=mask)
    copy_async(q_s.index(1), p + 128, mask=mask)
    copy_async(q_s.index(2), p + 256, mask=mask)
    copy_async(q_s.index(3), p + 384, mask=mask)
    async_copy.commit_group()


@gluon.jit
def scores(
    q, out, lse, max_logits, sink, part, part_lse, part_max, table, lens, to, line,
    q_s, keys_s, bias_s, p_s, alpha_s, factor_s, note_s, where_s, sink_s, go,
    k_full, k_empty, p_full, p_empty, f_full, f_empty, n_full, n_empty,
    q_token, q_head, scale, empty_lse, head0, SEGMENTS: gl.constexpr, H: gl.constexpr,
):  # fmt: skip
    """Products of q and keys, the softmax of each row, and the first 128 columns of its output."""
    kA, kB, kC, kD = keys_s
    tokens, width0, width1, lo, hi, chunk, extra, t, pos = line
    out_token, out_head, _lse_token, _lse_head, _max_token, _max_head = to
    program = gl.program_id(0)
    load_q(q, q_s, t, tokens, q_token, q_head, head0, H)
    i = gl.to_tensor(0)
    j = gl.to_tensor(0)
    while (pos < hi) & (t < tokens):
        n0, n1, first, last = enter(lens[0], lens[1], t, pos, lo, hi, tokens, width0, width1, SEGMENTS)
        n = tiles_of(n0, n1)
        mbarrier.wait(n_empty.index(0), (j & 1) ^ 1)
        note_s.store(single(last - first, gl.int32))
        async_copy.wait_group(0)
        fence_async_shared()
        mbarrier.arrive(n_full.index(0), count=1)
        largest = gl.full([64], NOTHING, gl.float32, layout=gl.SliceLayout(1, SCORES_L))
        total = gl.zeros([64], gl.float32, layout=gl.SliceLayout(1, SCORES_L))
        acc = warpgroup_mma_init(gl.zeros([64, 128], gl.float32, layout=OUT_L))
        for k in range(first, last):
            b = i % 2
            zero = here(gl.to_tensor(0))
            mbarrier.wait(k_full.index(b), (i // 2) & 1)
            s = gl.zeros([64, 64], gl.float32, layout=SCORES_L)
            s = warpgroup_mma(q_s.index(zero + 0), kA.index(b).permute((1, 0)), s, use_acc=False, is_async=True)
            s = warpgroup_mma(q_s.index(zero + 1), kB.index(b).permute((1, 0)), s, is_async=True)
            # these come first: `values` multiplies the tile before while the softmax of this one is worked out
            mbarrier.arrive(go.index(0), count=1, pred=k > first)
            s = warpgroup_mma(q_s.index(zero + 2), kC.index(b).permute((1, 0)), s, is_async=True)
            s = warpgroup_mma(q_s.index(zero + 3), kD.index(b).permute((1, 0)), s, is_async=True)
            s, done = warpgroup_mma_wait(0, [s, acc])
            mbarrier.arrive(k_empty.index(1 - b), count=1, pred=k > first)
            bias = bias_s.index(b).load(gl.SliceLayout(0, SCORES_L))
            z = s * (scale * LOG2E) + gl.expand_dims(bias, 0)
            grown = gl.maximum(largest, gl.max(z, 1))
            shrink = gl.exp2(largest - grown)
            p = gl.exp2(z - gl.expand_dims(grown, 1))
            largest = grown
            w = p.to(gl.bfloat16)
            mbarrier.wait(p_empty.index(0), (i & 1) ^ 1)
            p_s.index(0).store(w)
            alpha_s.index(0).store(shrink)
            fence_async_shared()
            mbarrier.arrive(p_full.index(0), count=1)
            total = total * shrink + gl.sum(p, 1)
            done = done * gl.expand_dims(gl.convert_layout(shrink, gl.SliceLayout(1, OUT_L)), 1)
            acc = warpgroup_mma(gl.convert_layout(w, WEIGHTS_L), kA.index(b), done, is_async=True)
            i += 1
        acc = warpgroup_mma_wait(0, [acc])
        mbarrier.arrive(go.index(0), count=1, pred=last > first)
        mbarrier.arrive(k_empty.index((i - 1) % 2), count=1, pred=last > first)
        whole = (first == 0) & (last == n)
        side = part_of(program, pos, lo)
        factor = 1.0 / total
        if whole:  # noqa: SIM102 - a value, and a constant
            if sink is not None:
                # one more logit of value zero; a sink of +inf leaves nothing
                factor = 1.0 / (total + gl.exp2(sink_s.load(gl.SliceLayout(1, SCORES_L)) - largest))
        factor = gl.where(total == 0.0, 0.0, factor)
        mbarrier.wait(f_empty.index(0), (j & 1) ^ 1)
        factor_s.store(factor)
        place = t.to(gl.int64) * out_token + head0 * out_head
        if whole == 0:
            place = -1 - side.to(gl.int64) * (64 * 512)
        where_s.store(single(place, gl.int64))
        mbarrier.arrive(f_full.index(0), count=1)
        load_q(q, q_s, t + 1, tokens, q_token, q_head, head0, H)
        result = acc * gl.expand_dims(gl.convert_layout(factor, gl.SliceLayout(1, OUT_L)), 1)
        write(out, part, result, place, out_head, 0, H)
        write_sums(
            lse, max_logits, part_lse, part_max, to, t, whole, side, total, largest, largest, empty_lse, head0, H
        )
        if first == 0:
            told(table, t, pos, n, lo, chunk)
        pos += gl.maximum(n, 1) + extra
        t += 1
        j += 1
    async_copy.wait_group(0)
    mbarrier.wait(n_empty.index(0), (j & 1) ^ 1)
    note_s.store(single(-1, gl.int32))
    mbarrier.arrive(n_full.index(0), count=1)


@gluon.jit
def write(out, part, result, place, out_head, FIRST: gl.constexpr, H: gl.constexpr):
    """128 columns of 64 heads, from FIRST on. place: of the first head in out, or -1 minus its offset in part."""
    if place >= 0:
        row = here(gl.arange(0, 64, layout=gl.SliceLayout(1, STORE_L)))
        column = FIRST + gl.arange(0, 128, layout=gl.SliceLayout(0, STORE_L))
        head0 = 0 if H <= 64 else (gl.program_id(0) % ((H + 63) // 64)) * 64
        to = gl.multiple_of(out + place + row * out_head, [16])
        wide = gl.convert_layout(result.to(out.dtype.element_ty), STORE_L)
        mask = gl.expand_dims(head0 + row < H, 1) & (gl.expand_dims(column, 0) < 512)
        gl.store(gl.expand_dims(to, 1) + gl.expand_dims(column, 0), wide, mask=mask)
    else:
        line = here(gl.arange(0, 64, layout=gl.SliceLayout(1, OUT_L)))
        across = FIRST + gl.arange(0, 128, layout=gl.SliceLayout(0, OUT_L))
        aside = gl.multiple_of(part + (-1 - place) + line * 512, [16])
        gl.store(gl.expand_dims(aside, 1) + gl.expand_dims(across, 0), result)


@gluon.jit
def values(
    out, part, keys_s, p_s, alpha_s, factor_s, note_s, where_s, go,
    k_empty, p_full, p_empty, f_full, f_empty, n_full, n_empty, out_head, H: gl.constexpr,
):  # fmt: skip
    """The last 384 columns of the output."""
    _kA, kB, kC, kD = keys_s
    i = gl.to_tensor(0)
    j = gl.to_tensor(0)
    mbarrier.wait(n_full.index(0), 0)
    count = scalar(note_s)
    mbarrier.arrive(n_empty.index(0), count=1)
    while count >= 0:
        b_acc = gl.zeros([64, 128], gl.float32, layout=OUT_L)
        c_acc = gl.zeros([64, 128], gl.float32, layout=OUT_L)
        d_acc = gl.zeros([64, 128], gl.float32, layout=OUT_L)
        for _ in range(count):
            b = i % 2
            mbarrier.wait(p_full.index(0), i & 1)
            p = p_s.index(0)
            shrink = gl.expand_dims(alpha_s.index(0).load(gl.SliceLayout(1, OUT_L)), 1)
            b_acc = b_acc * shrink
            c_acc = c_acc * shrink
            d_acc = d_acc * shrink
            # after the next products of q, so that `scores` never waits for these
            mbarrier.wait(go.index(0), i & 1)
            b_acc = warpgroup_mma(p, kB.index(b), b_acc, is_async=True)
            c_acc = warpgroup_mma(p, kC.index(b), c_acc, is_async=True)
            d_acc = warpgroup_mma(p, kD.index(b), d_acc, is_async=True)
            b_acc, c_acc, d_acc = warpgroup_mma_wait(0, [b_acc, c_acc, d_acc])
            mbarrier.arrive(k_empty.index(b), count=1)
            mbarrier.arrive(p_empty.index(0), count=1)
            i += 1
        mbarrier.wait(f_full.index(0), j & 1)
        factor = gl.expand_dims(factor_s.load(gl.SliceLayout(1, OUT_L)), 1)
        place = scalar(where_s)
        mbarrier.arrive(f_empty.index(0), count=1)
        write(out, part, b_acc * factor, place, out_head, 128, H)
        write(out, part, c_acc * factor, place, out_head, 256, H)
        write(out, part, d_acc * factor, place, out_head, 384, H)
        j += 1
        mbarrier.wait(n_full.index(0), j & 1)
        count = scalar(note_s)
        mbarrier.arrive(n_empty.index(0), count=1)


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
    """Grid: (programs x blocks of 64 heads,), heads fastest, so that programs that share keys run together.

    q, out: [T, H, 512] bf16; their rows, and pages, begin at multiples of 16 bytes. cache0: pages of the window;
    cache1, rows1, lens1: the second segment's, which is read if SEGMENTS is 2.
    part [programs, 2, 64, 512] fp32, part_lse, part_max [programs, 2, 64] fp32 (base 2): rows that are not whole.
    table: [T, 2] int32, see `told`. least: tiles of the shortest chunk. VALUES, PRODUCE: registers of those roles.
    """
    BLOCKS: gl.constexpr = (H + 63) // 64
    program = gl.program_id(0)
    head0 = (program % BLOCKS) * 64
    at = gl.arange(0, BT, layout=LINE_L)
    lo, hi, chunk, extra, t, pos, count = share(
        lens0, lens1, tokens, width0, width1, program // BLOCKS, gl.num_programs(0) // BLOCKS, least, at, SEGMENTS, BT
    )
    line = (tokens, width0, width1, lo, hi, chunk, extra, t, pos)
    paging = (size0, factor0, log0, pitch0, count0, size1, factor1, log1, pitch1, count1)
    to = (out_token, out_head, lse_token, lse_head, max_token, max_head)
    lens = (lens0, lens1)
    q_s = gl.allocate_shared_memory(gl.bfloat16, [4, 64, 128], KEYS_S)
    # one memory for each 128 columns: the compiler takes parts of one for each other's
    kA = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 128], KEYS_S)
    kB = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 128], KEYS_S)
    kC = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 128], KEYS_S)
    kD = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 128], KEYS_S)
    keys_s = (kA, kB, kC, kD)
    raw0 = gl.allocate_shared_memory(gl.int32, [64, 16], RAW_S)
    raw1 = gl.allocate_shared_memory(gl.int32, [64, 16], RAW_S)
    raw2 = gl.allocate_shared_memory(gl.int32, [64, 16], RAW_S)
    raw3 = gl.allocate_shared_memory(gl.int32, [64, 16], RAW_S)
    raw4 = gl.allocate_shared_memory(gl.int32, [64, 16], RAW_S)
    p_s = gl.allocate_shared_memory(gl.bfloat16, [1, 64, 64], KEYS_S)
    alpha_s = gl.allocate_shared_memory(gl.float32, [1, 64], FLAT_S)
    bias_s = gl.allocate_shared_memory(gl.float32, [2, 64], FLAT_S)
    factor_s = gl.allocate_shared_memory(gl.float32, [64], FLAT_S)
    note_s = gl.allocate_shared_memory(gl.int32, [1], FLAT_S)
    where_s = gl.allocate_shared_memory(gl.int64, [1], FLAT_S)
    sink_s = load_sink(sink, head0, H)
    k_full, k_empty = barriers(2, 1), barriers(2, 2)
    go, p_full, p_empty = barriers(1, 1), barriers(1, 1), barriers(1, 1)
    f_full, f_empty, n_full, n_empty = barriers(1, 1), barriers(1, 1), barriers(1, 1), barriers(1, 1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                scores,
                (
                    q, out, lse, max_logits, sink, part, part_lse, part_max, table, lens, to, line,
                    q_s, keys_s, bias_s, p_s, alpha_s, factor_s, note_s, where_s, sink_s, go,
                    k_full, k_empty, p_full, p_empty, f_full, f_empty, n_full, n_empty,
                    q_token, q_head, scale, empty_lse, head0, SEGMENTS, H,
                ),
            ),
            (
                values,
                (
                    out, part, keys_s, p_s, alpha_s, factor_s, note_s, where_s, go,
                    k_empty, p_full, p_empty, f_full, f_empty, n_full, n_empty, out_head, H,
                ),
            ),
            (
                produce,
                (
                    keys_s, (raw0, raw1, raw2, raw3, raw4), bias_s, k_full, k_empty, (cache0, cache1), (rows0, rows1),
                    lens, (stride0, stride1), paging, line, count, SEGMENTS,
                ),
            ),
        ],
        worker_num_warps=[4, 8],
        worker_num_regs=[VALUES, PRODUCE],
    )  # fmt: skip

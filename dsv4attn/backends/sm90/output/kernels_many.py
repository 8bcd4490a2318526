"""Hopper's kernel of the output projection in fp8 for many tokens: one role copies, two roles multiply.

Each role that multiplies is one warp group with its own tokens of a tile. While one adds its sums, times their factors,
to the result, the matrix unit works for the other. With 64 tokens, a role also begins two products, and adds the sums
of the first while the second runs. Programs take tile after tile, and copies of a tile begin while the one before it is
multiplied.
Sums have the order of `_triton.layer.projections.kernels_output`, and so the bits of a row are those of its kernel.

Barriers: a phase of `full` ends when a stage's codes are there, a phase of `empty` when both roles have multiplied it.
The role that copies begins LATER copies after the one that it announces. A role that multiplies may hold one stage
while it waits for the next one. So LATER is at most STAGES - 2: these copies then have free stages.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="assignment,unreachable,var-annotated"
# ruff: noqa: PYI024 - fields have no types of Python's

from __future__ import annotations

from collections import namedtuple

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from dsv4attn.backends._triton.launching.kernels_pdl import launch_dependents, wait_prior_grid
from dsv4attn.backends._triton.launching.runtime import stable_gluon
from dsv4attn.backends._triton.layer.projections.kernels_output import factors
from dsv4attn.backends.sm90.attention.kernels_common import barriers, here
from dsv4attn.backends.sm90.compat import barrier, copy_async

CODES_S = gl.constexpr(gl.NVMMASharedLayout(128, 8, 2))
COPIED = gl.constexpr(gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0]))
"""Codes as they are copied: sixteen in a thread, eight threads to a row."""
STEP = gl.constexpr(128)
"""Columns under one factor, which are summed before they are multiplied by it; and ranks of a tile."""
SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32]))
"""Sums of 64 tokens and the ranks of a tile."""

Operands = namedtuple(
    "Operands",
    "x w scales w_scales out tokens x_stride x_step w_row scale_stride scale_step w_stride w_step out_stride out_step",
)
"""x_stride, x_step: bytes from one token, and from one group, to the next; w_row: from one rank to the next."""
Smem = namedtuple("Smem", "x w full empty")
"""Of each stage: codes of a tile's tokens, and of its ranks, and barriers."""


@gluon.jit
def place_of(tile, operands, BLOCK_M: gl.constexpr, RANK: gl.constexpr):
    """Group, first token and first rank of a tile. Neighbours share tokens."""
    rank_tiles: gl.constexpr = RANK // STEP
    of_group = rank_tiles * ((operands.tokens + BLOCK_M - 1) // BLOCK_M)
    within = tile % of_group
    return tile // of_group, within // rank_tiles * BLOCK_M, within % rank_tiles * STEP


@gluon.jit
def following(stage, phase, STAGES: gl.constexpr):
    """The stage after a stage, and its phase."""
    after = stage + 1
    wraps = after == STAGES
    return gl.where(wraps, 0, after), gl.where(wraps, phase ^ 1, phase)


@gluon.jit
def copy_rows(to, base, offsets):
    """Start to copy 128 bytes of each of some rows, which begin at offsets from a base."""
    column = gl.arange(0, STEP, layout=gl.SliceLayout(0, COPIED))
    p = base + (gl.expand_dims(offsets, 1) + gl.expand_dims(column, 0))
    copy_async(to, gl.multiple_of(p, [1, 16]).to(gl.pointer_type(gl.float8e4nv), bitcast=True))


@gluon.jit
def announce(full, LATER: gl.constexpr, pred=True):
    """Arrive once all groups of copies but the LATER last ones are done, with a fence: the matrix unit reads them."""
    async_copy.wait_group(LATER)
    fence_async_shared()
    mbarrier.arrive(full, count=1, pred=pred)


@gluon.jit
def copy_tiles(
    operands, tiles, smem, RANK: gl.constexpr, K: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr,
    LATER: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The role that copies, by asynchronous copies of its threads."""
    row = gl.arange(0, STEP, layout=gl.SliceLayout(1, COPIED))
    wait_prior_grid(PDL)
    i = gl.to_tensor(0)
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    announced = gl.to_tensor(0)
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        group, m, n = place_of(tile, operands, BLOCK_M, RANK)
        w = operands.w + (group * RANK + n).to(gl.int64) * operands.w_row
        x = operands.x + (m.to(gl.int64) * operands.x_stride + group.to(gl.int64) * operands.x_step)
        # tokens past the end are the last one again
        last = operands.tokens - 1 - m
        for _step in range(K // STEP):
            mbarrier.wait(smem.empty.index(stage), phase ^ 1)
            for first in gl.static_range(0, BLOCK_M, STEP):
                # computed at each step: offsets of all rows take more registers than there are
                token = gl.minimum(here(row) + first, last)
                to = smem.x.index(stage).slice(first, STEP, dim=0)
                copy_rows(to, x, token * operands.x_stride.to(gl.int32))
            copy_rows(smem.w.index(stage), w, here(row) * operands.w_row)
            async_copy.commit_group()
            x += STEP
            w += STEP
            announce(smem.full.index(announced), LATER, i >= LATER)
            if i >= LATER:
                announced = gl.where(announced + 1 == STAGES, 0, announced + 1)
            stage, phase = following(stage, phase, STAGES)
            i += 1
    for k in gl.static_range(LATER):
        announce(smem.full.index(announced), LATER - 1 - k)
        announced = gl.where(announced + 1 == STAGES, 0, announced + 1)


@gluon.jit
def scale_places(operands, group, m):
    """Places of the first scales of 64 tokens; tokens past the end have the last one's."""
    token = gl.minimum(m + gl.arange(0, 64, layout=gl.SliceLayout(1, SUMS)), operands.tokens - 1)
    return token * operands.scale_stride + group * operands.scale_step


@gluon.jit
def load_scales(operands, place, w_place, step):
    """Scales of a step of 64 tokens, and of its weights."""
    return gl.load(operands.scales + step + place), gl.load(operands.w_scales + (w_place + step * operands.w_step))


@gluon.jit
def factor(scales):
    """[64, 1] fp32: by what the sums of a step are multiplied."""
    return gl.expand_dims(factors(scales[0]) * factors(scales[1]), 1)


@gluon.jit
def start(sums, smem, first: gl.constexpr, stage):
    """Begin the product of 64 tokens, from `first` on, of a stage that is full, in the registers of `sums`."""
    w = smem.w.index(stage).permute((1, 0))
    return warpgroup_mma(smem.x.index(stage).slice(first, 64, dim=0), w, sums, use_acc=False, is_async=True)


@gluon.jit
def release(smem, stage):
    """Arrive at a stage's `empty`, once every warp has multiplied it."""
    barrier()
    mbarrier.arrive(smem.empty.index(stage), count=1)


@gluon.jit
def store_part(operands, acc, group, m, n):
    """Write 64 tokens, each thread sixteen bytes or more."""
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    x = gl.convert_layout(acc.to(operands.out.dtype.element_ty), WIDE)
    row = m + gl.arange(0, 64, layout=gl.SliceLayout(1, WIDE))
    column = n + gl.arange(0, STEP, layout=gl.SliceLayout(0, WIDE))
    to = operands.out + (row.to(gl.int64) * operands.out_stride + group.to(gl.int64) * operands.out_step)
    to = gl.multiple_of(gl.expand_dims(gl.multiple_of(to, [16]), 1) + gl.expand_dims(column, 0), [1, 16])
    gl.store(to, x, mask=gl.expand_dims(row < operands.tokens, 1) & (gl.expand_dims(column, 0) >= 0))


@gluon.jit
def multiply_by_pairs(
    operands, smem, group, m, n, stage, phase, PART: gl.constexpr, RANK: gl.constexpr, K: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """64 tokens of a tile, the products of two steps at a time. Returns the stage and phase after it."""
    steps: gl.constexpr = K // STEP
    place = scale_places(operands, group, m)
    w_place = ((group * RANK + n) // STEP).to(gl.int64) * operands.w_stride
    acc = gl.zeros([64, STEP], gl.float32, layout=SUMS)
    sums0 = gl.zeros([64, STEP], gl.float32, layout=SUMS)
    sums1 = gl.zeros([64, STEP], gl.float32, layout=SUMS)
    next0, next1 = load_scales(operands, place, w_place, 0), load_scales(operands, place, w_place, 1)
    for step in range(0, steps, 2):
        scales0, scales1 = next0, next1
        next0 = load_scales(operands, place, w_place, gl.minimum(step + 2, steps - 1))
        next1 = load_scales(operands, place, w_place, gl.minimum(step + 3, steps - 1))
        mbarrier.wait(smem.full.index(stage), phase)
        first = start(sums0, smem, PART * 64, stage)
        after, phase = following(stage, phase, STAGES)
        mbarrier.wait(smem.full.index(after), phase)
        second = start(sums1, smem, PART * 64, after)
        sums0 = warpgroup_mma_wait(1, deps=[first])
        release(smem, stage)
        acc += sums0 * factor(scales0)
        sums1 = warpgroup_mma_wait(0, deps=[second])
        release(smem, after)
        acc += sums1 * factor(scales1)
        stage, phase = following(after, phase, STAGES)
    store_part(operands, acc, group, m, n)
    return stage, phase


@gluon.jit
def multiply_halves(
    operands, smem, group, m, n, stage, phase, PART: gl.constexpr, RANK: gl.constexpr, K: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """128 tokens of a tile, one product of 64 at a time. Returns the stage and phase after it."""
    steps: gl.constexpr = K // STEP
    place0, place1 = scale_places(operands, group, m), scale_places(operands, group, m + 64)
    w_place = ((group * RANK + n) // STEP).to(gl.int64) * operands.w_stride
    acc0 = gl.zeros([64, STEP], gl.float32, layout=SUMS)
    acc1 = gl.zeros([64, STEP], gl.float32, layout=SUMS)
    sums = gl.zeros([64, STEP], gl.float32, layout=SUMS)
    next0, next1 = load_scales(operands, place0, w_place, 0), load_scales(operands, place1, w_place, 0)
    for step in range(steps):
        scales0, scales1 = next0, next1
        after = gl.minimum(step + 1, steps - 1)
        next0, next1 = load_scales(operands, place0, w_place, after), load_scales(operands, place1, w_place, after)
        mbarrier.wait(smem.full.index(stage), phase)
        sums = warpgroup_mma_wait(0, deps=[start(sums, smem, PART * 128, stage)])
        acc0 += sums * factor(scales0)
        sums = warpgroup_mma_wait(0, deps=[start(sums, smem, PART * 128 + 64, stage)])
        release(smem, stage)
        acc1 += sums * factor(scales1)
        stage, phase = following(stage, phase, STAGES)
    store_part(operands, acc0, group, m, n)
    store_part(operands, acc1, group, m + 64, n)
    return stage, phase


@gluon.jit
def multiply_tiles(
    operands, tiles, smem, PART: gl.constexpr, RANK: gl.constexpr, K: gl.constexpr, BLOCK_M: gl.constexpr,
    STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """A role that multiplies its 64 or 128 tokens of each tile."""
    wait_prior_grid(PDL)
    if PART == 0:
        launch_dependents(PDL)
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        group, m, n = place_of(tile, operands, BLOCK_M, RANK)
        m += PART * (BLOCK_M // 2)
        if BLOCK_M == 128:
            stage, phase = multiply_by_pairs(operands, smem, group, m, n, stage, phase, PART, RANK, K, STAGES)
        else:
            stage, phase = multiply_halves(operands, smem, group, m, n, stage, phase, PART, RANK, K, STAGES)


@stable_gluon
def project_many_kernel(
    CODES,  # [tokens, groups, K] uint8, rows at multiples of 16 bytes
    SCALES,  # [tokens, groups, K / 128] fp32, or uint8 exponents
    W,  # [groups * RANK, K] uint8, rows at multiples of 16 bytes
    W_SCALES,  # [groups * RANK / 128, K / 128] fp32, or uint8 exponents
    OUT,  # [tokens, groups, RANK], rows at multiples of 16 bytes
    tokens: tl.int32, tiles: tl.int32, token_stride: tl.int64, group_stride: tl.int64, scale_stride: tl.int32,
    scale_group_stride: tl.int32, w_stride: tl.int32, w_scale_stride: tl.int64, w_scale_step: tl.int64,
    out_stride: tl.int64, out_group_stride: tl.int64,
    RANK: gl.constexpr, K: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr, LATER: gl.constexpr,
    REGS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Grid: any number of programs, which share the tiles: products of each group, as of `project_codes_kernel`.

    tiles: of all groups; a tile is BLOCK_M tokens, 128 or 256, and 128 ranks. With 128, K has an even number of steps.
    REGS: registers of a thread of both roles that multiply.
    """
    operands = Operands(
        x=CODES, w=W, scales=SCALES, w_scales=W_SCALES, out=OUT, tokens=tokens, x_stride=token_stride,
        x_step=group_stride, w_row=w_stride, scale_stride=scale_stride, scale_step=scale_group_stride,
        w_stride=w_scale_stride, w_step=w_scale_step, out_stride=out_stride, out_step=out_group_stride,
    )  # fmt: skip
    smem = Smem(
        x=gl.allocate_shared_memory(gl.float8e4nv, [STAGES, BLOCK_M, STEP], CODES_S),
        w=gl.allocate_shared_memory(gl.float8e4nv, [STAGES, STEP, STEP], CODES_S),
        full=barriers(STAGES, 1), empty=barriers(STAGES, 2),
    )  # fmt: skip
    fence_async_shared()
    gl.warp_specialize(
        [
            (multiply_tiles, (operands, tiles, smem, 0, RANK, K, BLOCK_M, STAGES, PDL)),
            (multiply_tiles, (operands, tiles, smem, 1, RANK, K, BLOCK_M, STAGES, PDL)),
            (copy_tiles, (operands, tiles, smem, RANK, K, BLOCK_M, STAGES, LATER, PDL)),
        ],
        worker_num_warps=[4, 4],
        worker_num_regs=[REGS, 504 - 2 * REGS],
    )

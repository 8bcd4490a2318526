"""Hopper's kernel of the output projection in fp8 for few tokens: weights are copied before their codes exist.

A program has some tokens and some ranks of a group. One role copies weights, one role copies codes, and one multiplies.
No kernel of a step writes weights. So as many as fit in shared memory are copied while the codes of outputs are still
computed. A product of 128 columns runs while the sums of the columns before it are multiplied by their factors and
added. Sums have the order of `layer.projections.kernels_output`, and so the bits of a row are those of its kernel.
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
from dsv4attn.backends.sm90.attention.kernels_common import FLAT_S, barriers, here
from dsv4attn.backends.sm90.compat import barrier, copy_async, reinterpret

CODES_S = gl.constexpr(gl.NVMMASharedLayout(128, 8, 2))
TABLE_S = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
STEP = gl.constexpr(128)
"""Columns under one factor, which are summed before they are multiplied by it."""
UNROLL = gl.constexpr(8)
"""Steps whose products overlap."""
COPY_WARPS = gl.constexpr(4)
"""Warps of each role that copies."""
COPIED = gl.constexpr(gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0]))
"""Codes as they are copied: sixteen in a thread, eight threads to a row."""

Operands = namedtuple("Operands", "codes w scales w_scales first tokens token_stride scale_stride w_stride w_step")
"""Pointers are to the first element of a program's group, or of its first rank. first: token of the program."""
Result = namedtuple("Result", "out stride")
Smem = namedtuple("Smem", "w codes both w_full codes_full multiplied")
"""Of each stage: weights, codes, and barriers. both: [steps, tokens] fp32, products of factors."""


@gluon.jit
def copy_rows(to, base, offsets):
    """Start to copy 128 codes of each of some rows, which begin at offsets from a base."""
    column = gl.arange(0, STEP, layout=gl.SliceLayout(0, COPIED))
    copy_async(to, gl.multiple_of(base + (gl.expand_dims(offsets, 1) + gl.expand_dims(column, 0)), [1, 16]))


@gluon.jit
def copy_weights(operands, smem, RANKS: gl.constexpr, STEPS: gl.constexpr, W_STAGES: gl.constexpr):
    """The role that copies weights, as far ahead as there are stages."""
    # computed here, not before the role begins
    row = gl.arange(0, RANKS, layout=gl.SliceLayout(1, COPIED)) + here(gl.to_tensor(0))
    offsets = row.to(gl.int64) * operands.w_stride
    for step in range(here(gl.to_tensor(min(W_STAGES, STEPS)))):
        copy_rows(smem.w.index(step), operands.w + step * STEP, offsets)
        async_copy.mbarrier_arrive(smem.w_full.index(step), increment_count=False)
    for step in range(W_STAGES, STEPS):
        wait_multiplied(smem, step - W_STAGES, W_STAGES)
        copy_rows(smem.w.index(step % W_STAGES), operands.w + step * STEP, offsets)
        async_copy.mbarrier_arrive(smem.w_full.index(step % W_STAGES), increment_count=False)


@gluon.jit
def copy_codes(
    operands, smem, STEPS: gl.constexpr, W_STAGES: gl.constexpr, STAGES: gl.constexpr, TOKENS: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """The role that copies codes: other warps than those of weights, as a warp's copies end in their order."""
    row = operands.first + gl.arange(0, TOKENS, layout=gl.SliceLayout(1, COPIED)) + here(gl.to_tensor(0))
    # tokens past the end are the last one again
    offsets = gl.minimum(row, operands.tokens - 1).to(gl.int64) * operands.token_stride
    wait_prior_grid(PDL)
    for step in range(here(gl.to_tensor(min(STAGES, STEPS)))):
        copy_rows(smem.codes.index(step), operands.codes + step * STEP, offsets)
        async_copy.mbarrier_arrive(smem.codes_full.index(step), increment_count=False)
    for step in range(STAGES, STEPS):
        wait_multiplied(smem, step - STAGES, W_STAGES)
        copy_rows(smem.codes.index(step % STAGES), operands.codes + step * STEP, offsets)
        async_copy.mbarrier_arrive(smem.codes_full.index(step % STAGES), increment_count=False)


@gluon.jit
def wait_multiplied(smem, step, W_STAGES: gl.constexpr):
    """Wait until a step is multiplied."""
    mbarrier.wait(smem.multiplied.index(step % W_STAGES), step // W_STAGES & 1)


@gluon.jit
def load_weight_factors(operands, STEPS: gl.constexpr, LINE: gl.constexpr, PADDED: gl.constexpr):
    """[PADDED] fp32, of which STEPS are a program's factors of weights."""
    step = gl.arange(0, PADDED, layout=LINE)
    return factors(gl.load(operands.w_scales + step * operands.w_step, mask=step < STEPS, other=0))


@gluon.jit
def hold_factors(
    operands, both, by_weight, STEPS: gl.constexpr, TOKENS: gl.constexpr, TABLE: gl.constexpr, PADDED: gl.constexpr
):  # fmt: skip
    """Products of both factors of every step and token, in shared memory."""
    row = operands.first + gl.arange(0, TOKENS, layout=gl.SliceLayout(1, TABLE))
    token = gl.minimum(row, operands.tokens - 1).to(gl.int64)
    step = gl.expand_dims(gl.arange(0, PADDED, layout=gl.SliceLayout(0, TABLE)), 0)
    place = gl.expand_dims(token * operands.scale_stride, 1) + step
    live = step + gl.expand_dims(token * 0, 1) < STEPS
    table = factors(gl.load(operands.scales + place, mask=live, other=0)) * gl.expand_dims(by_weight, 0)
    both.permute((1, 0)).store(table)


@gluon.jit
def begin_product(smem, step, sums, W_STAGES: gl.constexpr, STAGES: gl.constexpr, SWAPPED: gl.constexpr):
    """Start to sum a step's 128 columns in registers of `sums`, once its codes and weights are there."""
    mbarrier.wait(smem.w_full.index(step % W_STAGES), step // W_STAGES & 1)
    mbarrier.wait(smem.codes_full.index(step % STAGES), step // STAGES & 1)
    fence_async_shared()
    w, x = smem.w.index(step % W_STAGES), smem.codes.index(step % STAGES)
    if SWAPPED:
        result = warpgroup_mma(w, x.permute((1, 0)), sums, use_acc=False, is_async=True)
    else:
        result = warpgroup_mma(x, w.permute((1, 0)), sums, use_acc=False, is_async=True)
    return result


@gluon.jit
def factors_of(smem, step, SUMS: gl.constexpr, SWAPPED: gl.constexpr):
    """Factors of a step's sums, as a row or column."""
    if SWAPPED:
        result = gl.expand_dims(smem.both.index(step).load(gl.SliceLayout(0, SUMS)), 0)
    else:
        result = gl.expand_dims(smem.both.index(step).load(gl.SliceLayout(1, SUMS)), 1)
    return result


@gluon.jit
def added(acc, sums, both):
    """Acc + sums * both, computed here: later, the next sums would take other registers, and wait for the copies."""
    both = both + gl.zeros_like(acc)
    return gl.inline_asm_elementwise(
        "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,0", [sums, both, acc], dtype=gl.float32, is_pure=False, pack=1
    )


@gluon.jit
def release(smem, step, W_STAGES: gl.constexpr):
    """Let what a step has multiplied be replaced."""
    mbarrier.arrive(smem.multiplied.index(step % W_STAGES), count=1)


@gluon.jit
def multiply_steps(
    smem, acc, even, odd, first, COUNT: gl.constexpr, W_STAGES: gl.constexpr, STAGES: gl.constexpr,
    SWAPPED: gl.constexpr
):  # fmt: skip
    """Add COUNT steps' products to acc; `even` and `odd`, whose values do not matter, are the registers of their sums.

    Sums of even and odd steps have registers of their own: the product of one runs while the other's are added. None
    runs from one call to the next: the assembler serialises products that are in flight at the end of a loop.
    """
    SUMS: gl.constexpr = acc.type.layout
    begun = begin_product(smem, first, even, W_STAGES, STAGES, SWAPPED)
    for i in gl.static_range(COUNT):
        step = first + i
        if i + 1 < COUNT:
            following = begin_product(smem, step + 1, odd, W_STAGES, STAGES, SWAPPED)
        both = factors_of(smem, step, SUMS, SWAPPED)
        even = warpgroup_mma_wait(1 if i + 1 < COUNT else 0, deps=[begun])
        release(smem, step, W_STAGES)
        acc = added(acc, even, both)
        if i + 1 < COUNT:
            odd, begun = even, following
    return acc, even, odd


@gluon.jit
def multiply(
    operands, result, smem, STEPS: gl.constexpr, W_STAGES: gl.constexpr, STAGES: gl.constexpr, TOKENS: gl.constexpr,
    WARPS: gl.constexpr, SWAPPED: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The role that multiplies, adds and stores."""
    RANKS: gl.constexpr = smem.w.type.shape[1]
    ROWS: gl.constexpr = RANKS if SWAPPED else TOKENS
    COLUMNS: gl.constexpr = TOKENS if SWAPPED else RANKS
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, COLUMNS, 32])
    TABLE: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [1, WARPS], [1, 0])
    PADDED: gl.constexpr = smem.both.type.shape[0]
    by_weight = load_weight_factors(operands, STEPS, gl.SliceLayout(0, TABLE), PADDED)
    wait_prior_grid(PDL)
    launch_dependents(PDL)
    table = reinterpret(smem.both, gl.float32, [PADDED, TOKENS], TABLE_S)
    hold_factors(operands, table, by_weight, STEPS, TOKENS, TABLE, PADDED)
    barrier()

    acc = gl.zeros([ROWS, COLUMNS], gl.float32, layout=SUMS)
    even = gl.zeros([ROWS, COLUMNS], gl.float32, layout=SUMS)
    odd = gl.zeros([ROWS, COLUMNS], gl.float32, layout=SUMS)
    for i in range(STEPS // UNROLL):
        acc, even, odd = multiply_steps(smem, acc, even, odd, i * UNROLL, UNROLL, W_STAGES, STAGES, SWAPPED)
    if STEPS % UNROLL:
        last: gl.constexpr = STEPS // UNROLL * UNROLL
        acc, even, odd = multiply_steps(smem, acc, even, odd, last, STEPS % UNROLL, W_STAGES, STAGES, SWAPPED)
    if SWAPPED:
        acc = gl.permute(acc, (1, 0))
    store(operands, result, acc, WARPS)


@gluon.jit
def store(operands, result, acc, WARPS: gl.constexpr):
    """Write the products, each thread sixteen bytes of a row."""
    RANKS: gl.constexpr = acc.type.shape[1]
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // RANKS, RANKS // 8], [WARPS, 1], [1, 0])
    x = gl.convert_layout(acc.to(result.out.dtype.element_ty), WIDE)
    row = gl.arange(0, acc.type.shape[0], layout=gl.SliceLayout(1, WIDE))
    column = gl.arange(0, RANKS, layout=gl.SliceLayout(0, WIDE))
    token = operands.first + row
    place = gl.expand_dims(token.to(gl.int64) * result.stride, 1) + gl.expand_dims(column, 0)
    to = gl.multiple_of(result.out + place, [1, 16])
    gl.store(to, x, mask=gl.expand_dims(token < operands.tokens, 1) & (gl.expand_dims(column, 0) >= 0))


@stable_gluon
def project_few_kernel(
    CODES,  # [tokens, groups, K] uint8
    SCALES,  # [tokens, groups, K / 128] fp32, or uint8 exponents
    W,  # [groups * RANK, K] uint8
    W_SCALES,  # [groups * RANK / 128, K / 128] fp32, or uint8 exponents
    OUT,  # [tokens, groups, RANK], rows at multiples of 16 bytes
    tokens: tl.int32, token_stride: tl.int64, group_stride: tl.int64, scale_stride: tl.int64,
    scale_group_stride: tl.int64, w_stride: tl.int64, w_scale_stride: tl.int64, w_scale_step: tl.int64,
    out_stride: tl.int64, out_group_stride: tl.int64,
    RANK: gl.constexpr, K: gl.constexpr, TOKENS: gl.constexpr, RANKS: gl.constexpr, W_STAGES: gl.constexpr,
    STAGES: gl.constexpr, WARPS: gl.constexpr, SWAPPED: gl.constexpr, COPY: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Grid: (groups * ceil(tokens / TOKENS) * RANK / RANKS,): a tile of one group's product, as `project_codes_kernel`.

    W_STAGES, STAGES: steps of weights and of codes in shared memory; at most as many of codes. WARPS multiply. SWAPPED:
    weights are the left operand, which has 64 rows or more. COPY: registers of a thread that copies.
    Weights are read before the kernels before this one have ended. So the kernel directly before this one must wait for
    those before it before it lets this one begin, as quantisation does: whatever wrote the weights has ended then.
    """
    STEPS: gl.constexpr = K // STEP
    PADDED: gl.constexpr = tl.constexpr(1 << (K // 128 - 1).bit_length())
    rank_tiles: gl.constexpr = RANK // RANKS
    token_tiles = gl.cdiv(tokens, TOKENS)
    tile = gl.program_id(0) // rank_tiles
    group = (tile // token_tiles).to(gl.int64)
    first = gl.program_id(0) % rank_tiles * RANKS
    row = group * RANK + first
    code = gl.pointer_type(gl.float8e4nv)
    operands = Operands(
        codes=(CODES + group * group_stride).to(code, bitcast=True), w=(W + row * w_stride).to(code, bitcast=True),
        scales=SCALES + group * scale_group_stride, w_scales=W_SCALES + row // STEP * w_scale_stride,
        first=tile % token_tiles * TOKENS, tokens=tokens, token_stride=token_stride, scale_stride=scale_stride,
        w_stride=w_stride, w_step=w_scale_step,
    )  # fmt: skip
    result = Result(out=OUT + group * out_group_stride + first, stride=out_stride)
    smem = Smem(
        w=gl.allocate_shared_memory(gl.float8e4nv, [W_STAGES, RANKS, STEP], CODES_S),
        codes=gl.allocate_shared_memory(gl.float8e4nv, [STAGES, TOKENS, STEP], CODES_S),
        both=gl.allocate_shared_memory(gl.float32, [PADDED, TOKENS], FLAT_S),
        w_full=barriers(W_STAGES, 32 * COPY_WARPS), codes_full=barriers(STAGES, 32 * COPY_WARPS),
        multiplied=barriers(W_STAGES, 1),
    )  # fmt: skip
    fence_async_shared()
    gl.warp_specialize(
        [
            (multiply, (operands, result, smem, STEPS, W_STAGES, STAGES, TOKENS, WARPS, SWAPPED, PDL)),
            (copy_weights, (operands, smem, RANKS, STEPS, W_STAGES)),
            (copy_codes, (operands, smem, STEPS, W_STAGES, STAGES, TOKENS, PDL)),
        ],
        worker_num_warps=[COPY_WARPS, COPY_WARPS],
        worker_num_regs=[COPY, COPY],
    )

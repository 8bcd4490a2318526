"""Output projection in fp8 on Hopper: the launchers of `kernels_few` and `kernels_many`.

The shared kernel of `_triton.layer.projections.output` serves every other call, with the same bits.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from dsv4attn.backends._triton.cache.records import alignment_of_rows
from dsv4attn.backends._triton.compiling.variant import WIDE
from dsv4attn.backends._triton.interpreted import INTERPRETED
from dsv4attn.backends._triton.launching.pdl import uses_pdl
from dsv4attn.backends._triton.launching.recorded import meta_rows, recorded
from dsv4attn.backends._triton.launching.runtime import architecture, launch, multiprocessors
from dsv4attn.backends._triton.layer.projections import output
from dsv4attn.backends._triton.sizes import cdiv
from dsv4attn.backends._triton.untyped import Kernel
from dsv4attn.core.contract.warmup import WarmupSpec
from dsv4attn.core.model.geometry import LayerGeometry
from dsv4attn.core.model.quantized_weight import BlockScaledWeight

STEP = 128
"""Columns, and ranks, that have one scale."""


@frozen
class Few:
    """How few tokens are multiplied: `tokens` and `ranks` in a tile.

    w_stages, stages: steps of weights and of codes that a program has in shared memory. swapped: whether weights are
    the left operand. registers: of a thread when the program begins, few enough that it begins while the kernel before
    it still runs. copying: registers of a thread that copies.
    """

    tokens: int
    ranks: int
    w_stages: int
    stages: int
    registers: int
    swapped: bool = False
    copying: int = 72

    @property
    def warps(self) -> int:
        """Warps that multiply."""
        return (self.ranks if self.swapped else self.tokens) // 16


@frozen
class Many:
    """How many tokens are multiplied: 128 or 256 in a tile.

    stages: steps of a program that are in shared memory. registers: of a thread of both roles that multiply; the third
    has the rest of 504.
    """

    tokens: int
    stages: int
    registers: int = 224
    ranks: int = STEP

    @property
    def later(self) -> int:
        """LATER of the kernel. In tiles of 128 tokens a role begins two products at a time, and holds two stages."""
        return self.stages - (3 if self.tokens == 128 else 2)


FEW = (
    Few(16, 64, 20, 16, registers=72, swapped=True),
    Few(16, 128, 12, 8, registers=72, swapped=True),
    Few(32, 64, 20, 12, registers=80, swapped=True),
    Few(64, 64, 16, 8, registers=96),
    Few(64, 128, 8, 8, registers=128),
)
"""By ranks of all groups: the first up to 4,096, the second for more, the third beyond 2,048, the others for all."""
FEWEST_RANKS, WIDEST = 1024, 8192
"""For products of fewer ranks of all groups, or of more columns, the kernel for few tokens was not measured."""
ROUND = 8 * STEP
"""Columns whose products overlap in the kernel for few tokens."""
MANY = Many(128, 6), Many(256, 4)
FEWEST = 193 * 8192
"""Tokens times ranks that the kernel for many tokens multiplies, at least; half of it up to 128 tokens and from 384 on.

Measured by groups and tokens: docs/kernel-notes.md, "Output projection with fp8 codes".
"""


def form_of(tokens: int, ranks: int, width: int, programs: int) -> Few | Many | None:
    """How a product is multiplied; None: by the shared kernel.

    ranks: of all groups. width: columns of a group. programs: that run at once.
    """
    for few in _few(ranks, width):
        if _tiles(tokens, ranks, few) <= programs and (tokens <= few.tokens or not few.swapped or ranks <= 2048):
            return few
    small, large = MANY
    fewest = FEWEST if small.tokens < tokens < 384 else FEWEST // 2
    if tokens * ranks < fewest or width < STEP * small.stages:
        return None
    # most tiles of a program; a small tile takes a little more than half as long
    rounds, large_rounds = (-(-_tiles(tokens, ranks, form) // programs) for form in (small, large))
    return small if 2 * rounds <= 3 * large_rounds and width % (2 * STEP) == 0 else large


def _few(ranks: int, width: int) -> tuple[Few, ...]:
    """Forms for few tokens. The first is taken of which each tile has a multiprocessor of its own."""
    # a rest after whole rounds: registers spill, or the assembler serialises products
    if ranks < FEWEST_RANKS or width > WIDEST or (width > ROUND and width % ROUND):
        return ()
    first, second, *others = FEW
    return (first if ranks <= 4096 else second, *(others if ranks > 2048 else others[1:]))


def _tiles(tokens: int, ranks: int, form: Few | Many) -> int:
    return -(-tokens // form.tokens) * (ranks // form.ranks)


def multiply_codes(
    codes: Tensor, scales: Tensor, wo_a: BlockScaledWeight, out: Tensor, *, deterministic: bool = False
) -> None:
    """See `_triton.layer.projections.output.multiply_codes`. Only directly after `inv_rope_fp8_quant`.

    Its launch waits for the kernels before it, and only then lets this one begin, which reads weights at once. Bits are
    those of the shared kernel, also of deterministic calls, for any number of tokens.
    """
    (tokens, _, width), ranks = codes.shape, wo_a.weight.shape[0]
    form = form_of(tokens, ranks, width, multiprocessors()) if serves(codes, scales, wo_a, out) else None
    if form is None:
        output.multiply_codes(codes, scales, wo_a, out, deterministic=deterministic)
    else:
        _multiply(form, codes, scales, wo_a, out)


def _multiply(form: Few | Many, codes: Tensor, scales: Tensor, wo_a: BlockScaledWeight, out: Tensor) -> None:
    (tokens, groups, width), ranks = codes.shape, wo_a.weight.shape[0]
    weight, w_scales = wo_a.weight.view(torch.uint8), output.as_numbers(wo_a.scale)
    tiles = _tiles(tokens, ranks, form)
    numbers = (tokens, tiles) if isinstance(form, Many) else (tokens,)
    launch(
        kernel_of(form),
        (min(tiles, multiprocessors()) if isinstance(form, Many) else tiles,),
        (
            codes.view(torch.uint8), scales, weight, w_scales, out, *numbers,
            codes.stride(0), codes.stride(1), scales.stride(0), scales.stride(1), weight.stride(0),
            w_scales.stride(0), w_scales.stride(1), out.stride(0), out.stride(1),
        ),
        constants_of(form, ranks // groups, width),
        **options_of(form),
    )  # fmt: skip


def serves(codes: Tensor, scales: Tensor, wo_a: BlockScaledWeight, out: Tensor) -> bool:
    """Whether the kernels read and write tensors of these shapes, dtypes and strides."""
    weight, (tokens, groups, rank) = wo_a.weight, out.shape
    if INTERPRETED or not tokens or architecture() != "sm_90" or tuple(wo_a.block_size) != (STEP, STEP):
        return False
    if codes.dtype != torch.float8_e4m3fn or out.dtype != torch.bfloat16 or rank % STEP or codes.shape[2] % STEP:
        return False
    # offsets within a tile, and of all scales, have 32 bits
    of_scales = scales.stride(0) * tokens + scales.stride(1) * groups
    small = max(codes.stride(0), weight.stride(0)) < 2**22 and of_scales < 2**31
    return small and alignment_of_rows(codes) == alignment_of_rows(weight) == alignment_of_rows(out) == WIDE


def kernel_of(form: Few | Many) -> Kernel:
    """The kernel of a form."""
    if isinstance(form, Few):
        from dsv4attn.backends.sm90.output.kernels_few import project_few_kernel  # not where kernels are interpreted

        return project_few_kernel
    from dsv4attn.backends.sm90.output.kernels_many import project_many_kernel

    return project_many_kernel


@cache
def constants_of(form: Few | Many, rank: int, width: int) -> dict[str, Any]:
    """Constants of the kernel of a form."""
    shape = {"RANK": rank, "K": width, "STAGES": form.stages, "PDL": uses_pdl("sm_90")}
    if isinstance(form, Many):
        return {**shape, "BLOCK_M": form.tokens, "LATER": form.later, "REGS": form.registers}
    roles = {"WARPS": form.warps, "SWAPPED": form.swapped, "COPY": form.copying}
    return {**shape, **roles, "TOKENS": form.tokens, "RANKS": form.ranks, "W_STAGES": form.w_stages}


def options_of(form: Few | Many) -> dict[str, Any]:
    """Options of the compiler."""
    return {"num_warps": 4} if isinstance(form, Many) else {"num_warps": form.warps, "maxnreg": form.registers}


@recorded
def variants(bounds: WarmupSpec, layer: LayerGeometry) -> None:
    """Every variant that `multiply_codes` can need in addition to the variants of the shared kernel."""
    rank, groups, width = bounds.o_lora_rank, bounds.num_groups, layer.num_heads // bounds.num_groups * layer.head_dim
    if STEP not in bounds.wo_a_blocks or layer.head_dim % STEP:
        return
    if serves(*_meta_operands(groups, rank, width, bounds.q_dtype)):
        for form in forms(rank * groups, width, multiprocessors()):
            variants_of(form, groups, rank, width)


@recorded
def variants_of(form: Few | Many, groups: int, rank: int, width: int) -> None:
    """Every variant of a form. width: columns of a group."""
    for dtype in (torch.float32, torch.uint8):
        _multiply(form, *_meta_operands(groups, rank, width, scale_dtype=dtype))


def _meta_operands(
    groups: int,
    rank: int,
    width: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    scale_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, BlockScaledWeight, Tensor]:
    """Arguments of `multiply_codes` without memory. dtype: of the result. scale_dtype: of the weight's scales."""
    codes, weight = (meta_rows(*shape, width, dtype=torch.float8_e4m3fn) for shape in ((2, groups), (groups * rank,)))
    scales, out = meta_rows(2, groups, cdiv(width, STEP), dtype=torch.float32), meta_rows(2, groups, rank, dtype=dtype)
    factors = meta_rows(cdiv(groups * rank, STEP), cdiv(width, STEP), dtype=scale_dtype)
    return codes, scales, BlockScaledWeight(weight, factors, block_size=(STEP, STEP)), out


def forms(ranks: int, width: int, programs: int) -> list[Few | Many]:
    """All forms that products of so many ranks of all groups can have."""
    few = [form for form in _few(ranks, width) if _tiles(1, ranks, form) <= programs]
    many = [form for form in MANY if width >= STEP * MANY[0].stages and (form is MANY[1] or width % (2 * STEP) == 0)]
    return [*few, *many]

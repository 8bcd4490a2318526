"""Conversions of block-scaled fp8 weights and keys with one thing wrong each: core's own functions, to be patched.

A backend receives converted weights, so no backend can have these bugs; the kit must find them where they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dsv4attn.core.cache.key_codecs import power_of_two as true_powers
from dsv4attn.core.model import quantized_weight as weights
from dsv4attn.core.model.weight_scales import factors_of, product

true_factors, true_product = factors_of, product


def unscaled(scale: Tensor) -> Tensor:
    """Scales are not applied."""
    return torch.ones_like(true_factors(scale))


def inverted(scale: Tensor) -> Tensor:
    """Codes are divided by their scale, as the name `weight_scale_inv` may suggest."""
    return 1 / true_factors(scale)


def byte_0_as_0(byte: Tensor) -> Tensor:
    """The scale of a key is 0 where its byte is 0, not 2^-127."""
    return true_powers(byte).masked_fill(byte == 0, 0.0)


def byte_255_as_a_number(byte: Tensor) -> Tensor:
    """The scale of a key is large where its byte is 255, not NaN."""
    return true_powers(byte).masked_fill(byte == 255, 2.0**127)


def of_transposed_blocks(scale: Tensor) -> Tensor:
    """The scales of row blocks are taken to be those of column blocks."""
    return true_factors(scale).t().reshape(scale.shape)


def bytes_as_numbers(scale: Tensor) -> Tensor:
    """An E8M0 byte is used as a plain number."""
    return scale if scale.dtype == torch.float32 else scale.view(torch.uint8).float()


def exponent_off_by_one(scale: Tensor) -> Tensor:
    """The bias of E8M0 is taken to be 128."""
    return true_factors(scale) / (1 if scale.dtype == torch.float32 else 2)


def whole_blocks_only(weight: Tensor, factors: Tensor, block: tuple[int, int], out: Tensor | None) -> Tensor:
    """Short blocks at the end stay zero."""
    result = true_product(weight, factors, block, out)
    rows, columns = (n // size * size for n, size in zip(weight.shape, block, strict=True))
    result[rows:] = 0
    result[:, columns:] = 0
    return result


def last_scale_for_all_after(weight: Tensor, factors: Tensor, block: tuple[int, int], out: Tensor | None) -> Tensor:
    """A short block at the end gets the scale of the block before it."""
    short = factors.clone()
    if weight.shape[0] % block[0] and len(factors) > 1:
        short[-1] = short[-2]
    return true_product(weight, short, block, out)


def blocks_of_v4(weight: Tensor, factors: Tensor, block: tuple[int, int], out: Tensor | None) -> Tensor:
    """Every block is taken to be of 128 x 128."""
    del block
    grid = [-(-n // 128) for n in weight.shape]
    return true_product(weight, factors[: grid[0], : grid[1]], (128, 128), out)


def always_ocp(weight: Tensor, factors: Tensor, block: tuple[int, int], out: Tensor | None) -> Tensor:
    """The dialect of the codes is ignored."""
    return true_product(weight.view(torch.uint8).view(torch.float8_e4m3fn), factors, block, out)


def wo_b_as_codes(value: Any, name: str = "wo_a") -> Tensor:
    """The scales of wo_b are forgotten."""
    return weights.dense_weight(value, name) if name == "wo_a" else value.weight.bfloat16()


FP8 = "project-fp8-ocp-fp32,project-fp8-ocp-e8m0,project-fp8-ocp-bytes"
FNUZ = FP8.replace("ocp", "fnuz")
EXPONENTS = "project-fp8-ocp-e8m0,project-fp8-fnuz-e8m0,project-fp8-ocp-bytes,project-fp8-fnuz-bytes"
MORE = "project-fp8-mixed,apart-project-fp8,dims-project-fp8,output-fp8"

SLIPS: dict[str, tuple[str, Callable[..., Any], str]] = {
    "scales not applied": ("model.quantized_weight._factors", unscaled, f"{FP8},{FNUZ},{MORE}"),
    "scales inverted": ("model.quantized_weight._factors", inverted, f"{FP8},{FNUZ},{MORE}"),
    "scales of transposed blocks": ("model.quantized_weight._factors", of_transposed_blocks, f"{FP8},{FNUZ},{MORE}"),
    "E8M0 byte used as a number": (
        "model.quantized_weight._factors",
        bytes_as_numbers,
        f"{EXPONENTS},apart-project-fp8,output-fp8",
    ),
    "E8M0 bias of 128": (
        "model.quantized_weight._factors",
        exponent_off_by_one,
        f"{EXPONENTS},apart-project-fp8,output-fp8",
    ),
    "short last block dropped": ("model.quantized_weight._product", whole_blocks_only, f"{FP8},{FNUZ},{MORE}"),
    "short last block scaled as the one before": (
        "model.quantized_weight._product",
        last_scale_for_all_after,
        f"{FP8},{FNUZ},{MORE}",
    ),
    "blocks always of 128 x 128": ("model.quantized_weight._product", blocks_of_v4, "project-fp8-blocks-32"),
    "codes always OCP": ("model.quantized_weight._product", always_ocp, FNUZ),
    "scale byte 0 of a key taken to be 0": (
        "cache.key_codecs.power_of_two",
        byte_0_as_0,
        "codes-ocp-smallest-decode,codes-v41-smallest-decode,codes-ocp-smallest-gather,codes-v41-smallest-gather",
    ),
    "scale byte 255 of a key taken to be a number": (
        "cache.key_codecs.power_of_two",
        byte_255_as_a_number,
        "nan-ocp-decode,nan-v41-decode,nan-ocp-gather,nan-v41-gather",
    ),
    "scales of wo_b forgotten": ("attention.projection.dense_weight", wo_b_as_codes, "output-fp8"),
}
"""What is patched in `dsv4attn.core`, by what, and the cases of which each must fail."""

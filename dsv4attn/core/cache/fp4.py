"""Values as e2m1 codes, two to a byte, in torch. `quantize`: groups of 16 under a scale in e4m3fn, as in `v41_fp4`.

Values: 0, 0.5, 1, 1.5, 2, 3, 4 and 6 by code, bit 3 is the sign. The scale has no second level above it.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import pad

__all__ = ["ENDS", "GROUP", "codes_of", "decode", "dequantize", "pack", "quantize"]

GROUP = 16
"""Values under one scale."""
_LEAST_SCALE, _LARGEST_SCALE, _NAN_SCALE = 2.0**-9, 448.0, 0x7F
_LARGEST_CODE = 6.0
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Of the codes whose sign is not set."""
ENDS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""Midpoints between the values. Ties go to the even code: up from every second one."""


def quantize(values: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [..., D], D even, to packed codes [..., D / 2] uint8, the even dim low, and scale bytes [..., groups] uint8.

    Values are rounded to bf16 first. The scale is amax / 6, within 2^-9 .. 448, rounded to e4m3fn, to the nearest even;
    a code is value / scale, rounded likewise, at most 6. Rounded down, a scale leaves the largest value beyond 6. A
    group that holds a NaN has a NaN for a scale, and codes of zero. The last group may be short.
    """
    dim = values.shape[-1]
    groups = pad(values.bfloat16().float(), (0, -dim % GROUP)).unflatten(-1, (-1, GROUP))
    amax = groups.abs().amax(-1)
    scale = (amax.nan_to_num(posinf=torch.inf) / _LARGEST_CODE).clamp(_LEAST_SCALE, _LARGEST_SCALE)
    byte = scale.to(torch.float8_e4m3fn)
    is_number = ~amax.isnan()
    code = codes_of(groups.abs(), byte.float()[..., None]) | groups.signbit().to(torch.uint8) << 3
    code.masked_fill_(~is_number[..., None], 0)
    return pack(code.flatten(-2)[..., :dim]), byte.view(torch.uint8).masked_fill(~is_number, _NAN_SCALE)


def codes_of(sizes: Tensor, unit: Tensor | float = 1.0) -> Tensor:
    """uint8 codes, without a sign, of sizes fp32 in a unit: to the nearest, ties to the even code, at most 6."""
    code = torch.zeros_like(sizes, dtype=torch.uint8)
    for i, end in enumerate(ENDS):
        # exact: a midpoint has three significant bits, and a scale four; a division would have to be rounded
        code += (sizes > end * unit) if i % 2 == 0 else (sizes >= end * unit)
    return code


def pack(codes: Tensor) -> Tensor:
    """Codes [..., D] uint8, D even, two to a byte, the even dim low: [..., D / 2] uint8."""
    low, high = codes.unflatten(-1, (-1, 2)).unbind(-1)
    packed: Tensor = low | high << 4
    return packed


def dequantize(codes: Tensor, scales: Tensor) -> Tensor:
    """[..., D] fp32 of packed codes [..., D / 2] uint8 and scale bytes [..., groups] uint8: code times scale, exact."""
    groups = -(-2 * codes.shape[-1] // GROUP)
    return decode(codes, scales[..., :groups].view(torch.float8_e4m3fn).float(), GROUP)


def decode(codes: Tensor, scales: Tensor, group: int) -> Tensor:
    """[..., D] fp32 of packed codes [..., D / 2] uint8 under scales [..., groups] fp32 of `group` codes each."""
    values, dim = _pairs(codes.device)[codes.int()].flatten(-2), 2 * codes.shape[-1]
    groups = pad(values, (0, -dim % group)).unflatten(-1, (-1, group))
    scaled: Tensor = (groups * scales[..., None]).flatten(-2)
    return scaled[..., :dim]


@cache
@torch.inference_mode(mode=False)  # read in and out of the mode
def _pairs(device: torch.device) -> Tensor:
    """[256, 2] fp32: the values of both codes of a byte."""
    values = torch.tensor([*VALUES, *(-value for value in VALUES)], dtype=torch.float32, device="cpu")
    byte = torch.arange(256, device="cpu")
    return torch.stack([values[byte & 15], values[byte >> 4]], -1).to(device)

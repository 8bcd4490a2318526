"""Rotary embedding: its table of cosines and sines, and the rotation."""

from __future__ import annotations

import math
from collections.abc import MutableMapping

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from dsv4attn.core.argument_checks import check_count, check_type
from dsv4attn.core.model.geometry import Rope
from dsv4attn.core.tensorspec import device_of
from dsv4attn.core.torch_modes import without_modes

__all__ = ["angles_at", "apply_rope", "cos_sin_cache", "is_rotation"]

_ROWS = 65536
_rotations: MutableMapping[Tensor, bool] = WeakTensorKeyDictionary()
"""Answers of `is_rotation`, as long as their tables live."""


def inverse_frequencies(rope: Rope, device: torch.device | str = "cpu") -> Tensor:
    """[dim / 2] fp32: theta ** (-2i / dim), blended with its `factor`-th part over the YaRN ramp."""
    half = rope.dim // 2
    inv = 1.0 / rope.theta ** (torch.arange(0, rope.dim, 2, dtype=torch.float32, device=device) / rope.dim)
    if rope.yarn is None:
        return inv
    yarn = rope.yarn

    def pair_of(rotations: float) -> float:
        """Pair index that turns `rotations` times over the original context."""
        turns = yarn.original_max_position / (2 * math.pi * rotations)
        return rope.dim * math.log(turns) / (2 * math.log(rope.theta))

    low = max(math.floor(pair_of(yarn.beta_fast)), 0)
    high = min(math.ceil(pair_of(yarn.beta_slow)), rope.dim - 1)
    ramp = (torch.arange(half, dtype=torch.float32, device=device) - low) / max(high - low, 1e-3)
    ramp = ramp.clamp(0, 1)
    return inv / yarn.factor * ramp + inv * (1 - ramp)


@without_modes
def cos_sin_cache(rope: Rope, max_position: int, device: torch.device | str = "cpu") -> Tensor:
    """[max_position, dim] fp32: cosines of the dim/2 pairs, then their sines; row = position.

    rope: frequencies of a kind of layers, `LayerGeometry.rope`.
    max_position: rows of the table.
    device: where the table is made.

    Angles are the fp32 product of position and frequency: near position 1M an fp64 angle differs visibly
    from what every engine computes.
    """
    check_type("rope", rope, Rope, cure="pass geometry.layer(i).rope")
    max_position, device = check_count("max_position", max_position, 0), device_of(device)
    with torch.inference_mode(False), torch.no_grad():  # used in and out of the mode that it may be made in
        positions = torch.arange(max_position, dtype=torch.float32, device=device)
        angles = positions[:, None] * inverse_frequencies(rope, device)
        return torch.cat([angles.cos(), angles.sin()], dim=-1)


def angles_at(cos_sin_cache: Tensor, positions: Tensor) -> Tensor:
    """Rows [..., dim] of a table [P, dim] at positions [...] int64, the nearest row for a position that it lacks.

    Only a token that is not real has such a position: a padding row may hold any number, and must not fault.
    """
    return cos_sin_cache[positions.clamp(0, cos_sin_cache.shape[0] - 1)]


def is_rotation(table: Tensor) -> bool:
    """Whether a `cos_sin_cache` turns pairs without changing their length, as all of DeepSeek-V4's do: no YaRN mscale.

    Reads the table once, which makes the host wait for its device; False for tables without values.
    """
    is_valid = _rotations.get(table)
    if is_valid is None:
        is_valid = table.device.type != "meta" and bool(table.numel()) and all(map(_is_rotation, table.split(_ROWS)))
        _rotations[table] = is_valid
    return is_valid


def _is_rotation(rows: Tensor) -> bool:
    cos, sin = rows.chunk(2, dim=-1)
    return bool(((cos * cos + sin * sin - 1).abs() < 1e-3).all())


def apply_rope(x: Tensor, cos_sin: Tensor, *, inverse: bool = False) -> Tensor:
    """Rotate interleaved pairs.

    x: [..., dim] any float dtype - only the rotated part of a head. cos_sin: [..., dim] fp32, broadcastable rows
    of a `cos_sin_cache`. Returns [..., dim] fp32.
    """
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos_sin.chunk(2, dim=-1)
    sin = -sin if inverse else sin
    return torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1).flatten(-2)

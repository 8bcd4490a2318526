"""Converts block-scaled fp8 weights of the output projection to bf16, and caches the copies.

A copy is cached for the lifetime of its weight. When the weight or its scale was replaced or written, the copy is
computed again, in the same memory.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from dsv4attn.core.tensorspec import check_tensor
from dsv4attn.errors import ArgumentError

__all__ = ["dequantized", "forget", "weight_of"]

BLOCK = 128
"""Rows and columns under one scale; the last block of either may be shorter."""
_WIDE = (torch.bfloat16, torch.float16, torch.float32)
_FP8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
# the oldest supported torch lacks this type
_E8M0 = getattr(torch, "float8_e8m0fnu", torch.uint8)
_SCALES = ("weight_scale_inv", "weight_scale")


def weight_of(wo_a: object) -> tuple[str, Tensor]:
    """Name of a weight in messages, and the weight: `wo_a.weight`, or a plain tensor itself.

    Raises ArgumentError unless it is a matrix of a float dtype, or of one of the two dialects of fp8.
    """
    name, weight = ("wo_a", wo_a) if isinstance(wo_a, Tensor) else ("wo_a.weight", getattr(wo_a, "weight", None))
    if not isinstance(weight, Tensor):
        raise ArgumentError("wo_a", expected="a module with a weight, or a tensor", actual=type(wo_a).__name__)
    if weight.dtype in (torch.uint8, torch.int8):
        dialects = " or ".join(f".view({dtype})" for dtype in _FP8)
        raise ArgumentError(
            name,
            expected="a dtype that says what its bytes mean",
            actual=str(weight.dtype).removeprefix("torch."),
            hint=f"view them as what they are: {dialects}; a code means half as much in the second",
        )
    check_tensor(name, weight, "_ _", (*_WIDE, *_FP8), {}, any_strides=True)
    return name, weight


def dequantized(wo_a: object) -> Tensor:
    """The weight as bf16 [rows, columns] if it is fp8, and unchanged if it is not.

    wo_a: a module with `weight` [rows, columns] and, if that is fp8, `weight_scale_inv` or `weight_scale`
    [ceil(rows / 128), ceil(columns / 128)]: fp32, E8M0, or raw exponent bytes, uint8. A weight of two bytes or more an
    element is never scaled, even with a scale beside it. Products are fp32, then rounded to bf16.
    The first call computes the copy, so make it before the capture of a graph; later calls return the cached copy.
    Writes that torch does not count, to `weight.data` or in inference mode, are not noticed: call `forget` after them.
    Raises ArgumentError before anything is computed.
    """
    name, weight = weight_of(wo_a)
    if weight.element_size() > 1:
        _copies.pop(id(weight), None)
        return weight
    scales = {s: scale for s in _SCALES if (scale := getattr(wo_a, s, None)) is not None}
    cached = _copies.get(id(weight))
    if cached is not None and cached.is_of(weight, scales):
        return cached.copy
    # outside inference mode, so that the copy can be written again inside or outside of it
    with torch.inference_mode(mode=False), torch.no_grad():
        factors = _factors(name, weight, scales)
        old = None if cached is None or cached.weight() is not weight else cached.copy
        copy = _product(weight, factors, old)
    _copies[id(weight)] = _Copy.of(weight, scales, copy)
    return copy


def forget(wo_a: object) -> None:
    """Drop the cached copy of a weight; the next call of `dequantized` makes another."""
    _copies.pop(id(weight_of(wo_a)[1]), None)


@frozen(eq=False)
class _Copy:
    """A cached copy with weak references to its weight and scales, and their states when it was made."""

    weight: weakref.ref[Tensor]
    scales: dict[str, weakref.ref[Tensor]]
    states: tuple[Any, ...]
    copy: Tensor

    @classmethod
    def of(cls, weight: Tensor, scales: dict[str, Tensor], copy: Tensor) -> _Copy:
        """Record the sources of a new copy."""
        ref = weakref.ref(weight, partial(_drop, id(weight)))
        return cls(ref, {s: weakref.ref(scale) for s, scale in scales.items()}, _states(weight, scales), copy)

    def is_of(self, weight: Tensor, scales: dict[str, Tensor]) -> bool:
        """Whether these are the same tensors and torch has counted no write to them."""
        return (
            self.weight() is weight
            and self.scales.keys() == scales.keys()
            and all(ref() is scales[s] for s, ref in self.scales.items())
            and self.states == _states(weight, scales)
        )


_copies: dict[int, _Copy] = {}
"""Cached copies by `id` of their weight."""


def _drop(key: int, ref: weakref.ref[Tensor]) -> None:
    """Drop the copy of a weight that was deleted, unless another weight has its `id` already."""
    cached = _copies.get(key)
    if cached is not None and cached.weight is ref:
        del _copies[key]


def _states(weight: Tensor, scales: dict[str, Tensor]) -> tuple[Any, ...]:
    """A value that changes when the weight or a scale is written or its memory replaced."""
    return tuple(
        (t.data_ptr(), None if t.is_inference() else t._version, t.dtype, t.shape, t.stride())  # noqa: SLF001
        for t in (weight, *scales.values())
    )


def _factors(name: str, weight: Tensor, scales: dict[str, Tensor]) -> Tensor:
    """fp32 factor of each block of an fp8 weight."""
    if not scales:
        dtype = str(weight.dtype).removeprefix("torch.")
        raise ArgumentError(
            name,
            expected=f"{' or '.join(_SCALES)} beside a weight in {dtype}",
            actual="neither",
            hint="pass the module that has both" if name == "wo_a" else "a weight without blocks goes in as bf16",
        )
    rows, columns = (-(-size // BLOCK) for size in weight.shape)
    found: list[Tensor] = []
    for s, scale in scales.items():
        dtypes = (torch.float32, _E8M0, torch.uint8)
        check_tensor(f"wo_a.{s}", scale, f"{rows} {columns}", tuple(dict.fromkeys(dtypes)), {}, any_strides=True)
        if scale.device != weight.device:
            expected = f"a tensor on {weight.device}, like {name}"
            raise ArgumentError(f"wo_a.{s}", expected=expected, actual=f"one on {scale.device}")
        found.append(scale if scale.dtype == torch.float32 else _powers_of_two(scale.view(torch.uint8)))
    if len(found) > 1 and not torch.equal(*(factors.view(torch.int32) for factors in found)):
        raise ArgumentError(
            f"wo_a.{_SCALES[1]}",
            expected=f"the values of wo_a.{_SCALES[0]}, or no such attribute",
            actual="other values",
            hint="remove the one that does not belong to the weight",
        )
    return found[0]


def _powers_of_two(byte: Tensor) -> Tensor:
    """2^(byte - 127) as fp32: the byte is the exponent field. 0 is the subnormal 2^-127 and 255 is NaN."""
    bits = (byte.int() << 23).masked_fill(byte == 0, 0x00400000).masked_fill(byte == 255, 0x7FC00000)
    return bits.view(torch.float32)


def _product(weight: Tensor, factors: Tensor, out: Tensor | None) -> Tensor:
    """Each block times its factor as bf16, a row of blocks at a time; into `out` if that fits.

    The memory stays the same then, and a captured graph reads the new values.
    """
    if out is None or (out.shape, out.device) != (weight.shape, weight.device):
        out = torch.empty(weight.shape, dtype=torch.bfloat16, device=weight.device)
    for i, row in enumerate(factors):
        part = slice(i * BLOCK, (i + 1) * BLOCK)
        out[part] = weight[part].float() * row.repeat_interleave(BLOCK)[: weight.shape[1]]
    return out

"""Error budgets of the steps around attention, and comparisons within them.

All steps compute in fp32 or better, from inputs that fp32 holds exactly. A budget is the largest error of fp32
arithmetic: UNIT of the result of every operation, two of them for an exponential. Each of the m additions of a sum
rounds a partial sum; independent errors add up in squares, and twice that is left for those that are not: `summed`.

Where a result is rounded to fewer bits, to a code or to bf16, it must be the rounded true value. Its neighbour is right
too if the true value is within the budget of the midpoint between both: in fp32 it may lie on the other side.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import attrs
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dsv4attn.core.cache.layout import Fp8Format, KVCacheLayout
from dsv4attn.testing import oracle, oracle_layer
from dsv4attn.testing.case import Measure, Wrong
from dsv4attn.testing.tolerances import F64, U8, floats

__all__ = ["UNIT", "CodeRule", "Formula", "hold_record", "hold_values", "summed"]

UNIT = 2.0**-24
"""Largest relative error of one rounding to fp32."""
TINY = 2.0**-126
"""Below it fp32 loses bits, or is 0 where subnormal numbers are flushed."""


def summed(terms: int) -> float:
    """Error of a sum, relative to its largest partial sum."""
    return 2 * math.sqrt(terms) * UNIT


@attrs.frozen(eq=False)
class Formula:
    """Values by a formula in float64, and how far fp32 may be from them.

    value: any shape.
    error: the same shape.
    """

    value: F64
    error: F64

    @classmethod
    def exact(cls, value: F64) -> Formula:
        """Values that fp32 holds."""
        return cls(value, np.zeros(value.shape))

    def pooled(self, scores: F64) -> Formula:
        """The mean [d] of rows [m, d], weighted by a softmax of scores [m, d] over the first dimension.

        An exponent z = score - maximum is rounded twice, in the difference and in the factor log2(e): 2 |z|. The
        exponential, the product with the value and the division add 6.
        """
        weights = oracle_layer.softmax(scores)
        value = (weights * self.value).sum(0)
        unit = (2 * np.abs(scores - scores.max(0)) + 6) * UNIT + summed(len(scores))
        return Formula(value, (weights * unit * (np.abs(self.value) + np.abs(value))).sum(0))

    def normed(self, weight: F64 | None, eps: float) -> Formula:
        """`oracle_layer.rms_norm` of a row [d]."""
        value = oracle_layer.rms_norm(self.value, weight, eps)
        root = math.sqrt(float(np.mean(self.value**2)) + eps)
        mean = float(np.abs(self.value) @ self.error) / len(self.value) / root**2  # of the error on the root, relative
        error = self.error / root * (1.0 if weight is None else np.abs(weight))
        return Formula(value, error + np.abs(value) * (mean + summed(len(self.value)) / 2 + 5 * UNIT))

    def turned(self, cos: F64, sin: F64) -> Formula:
        """The row [..., d], rotated on its trailing dims."""
        rope = 2 * cos.shape[-1]
        value = oracle.apply_rope(self.value, cos, sin, rope)
        error = self.error.copy()
        pairs = error[..., -rope::2] + error[..., 1 - rope :: 2]
        sizes = np.hypot(self.value[..., -rope::2], self.value[..., 1 - rope :: 2])
        error[..., -rope:] = np.repeat(pairs + 3 * UNIT * sizes, 2, axis=-1)
        return Formula(value, error)

    @property
    def ends(self) -> tuple[F64, F64]:
        """The lowest and the highest value that fp32 may have."""
        error = self.error + UNIT * np.abs(self.value) + TINY
        return self.value - error, self.value + error


def hold_values(
    found: Tensor | F64, formula: Formula, dtype: torch.dtype, where: Callable[[tuple[int, ...]], str]
) -> Measure:
    """Compare values with those of a formula, rounded to a dtype. Raises Wrong, naming the worst value.

    Returns the smallest error before the rounding that explains the value found, relative to the budget.
    """
    values = found.double().cpu().numpy() if isinstance(found, Tensor) else np.asarray(found)
    if values.shape != formula.value.shape:
        raise Wrong(f"{where(())}: shape {list(values.shape)}, expected {list(formula.value.shape)}")
    wanted, budget = formula.value, formula.error + UNIT * np.abs(formula.value) + TINY
    distance = np.abs(values - wanted)
    if dtype == torch.bfloat16:
        _, exponents = np.frexp(values)
        exponents = np.where(values == 0, oracle.BF16_MIN_EXPONENT, exponents - oracle.BF16_BITS)
        gap = np.ldexp(1.0, np.maximum(exponents, oracle.BF16_MIN_EXPONENT))
        # towards zero, the neighbour of a power of two is half as far
        inward = (np.abs(wanted) < np.abs(values)) & (np.abs(np.frexp(values)[0]) == 0.5)
        distance = np.maximum(distance - np.where(inward, gap / 2, gap) / 2, 0.0)
    errors = distance / budget
    errors = np.where(np.isnan(errors), math.inf, errors)
    if not errors.size:
        return Measure(0.0, 1.0)
    place = tuple(int(i) for i in np.unravel_index(errors.argmax(), errors.shape))
    said = f"{where(place)}: {values[place]:.8g}, expected {wanted[place]:.8g}, "
    return Measure(float(errors.max()), 1.0).hold(f"{said}{errors.max():.3g} budgets off")


@attrs.frozen
class CodeRule:
    """How values become codes under a power-of-two scale.

    group: values under a scale.
    floor: smallest magnitude that a group is taken to have.
    largest: magnitude of the largest code.
    fp8: dialect of e4m3 codes, or None for e2m1.
    """

    group: int
    floor: float
    largest: float
    fp8: Fp8Format | None

    @classmethod
    def of(cls, layout: KVCacheLayout) -> CodeRule:
        """Those of a layout."""
        floor = oracle.MIN_AMAX if layout.fp8_format else oracle_layer.E2M1_FLOOR
        return cls(layout.group_size, floor, layout.fp8_max, layout.fp8_format)

    def decode(self, codes: U8) -> F64:
        """Values of codes, one to a byte."""
        if self.fp8 is None:
            return oracle_layer.decode_e2m1(codes)
        return oracle.decode_e4m3(codes, self.fp8 is Fp8Format.FNUZ)

    def rounded(self, values: F64) -> F64:
        """Scaled values as codes hold them."""
        if self.fp8 is None:
            return oracle_layer.decode_e2m1(oracle_layer.encode_e2m1(values))
        limited = np.clip(values, -self.largest, self.largest)
        return self.decode(oracle.encode_e4m3(limited, self.fp8 is Fp8Format.FNUZ))

    def exponents(self, formula: Formula) -> list[range]:
        """Exponents that the scale of each group of a row may have."""
        low, high = (oracle.round_bf16(end) for end in formula.ends)
        sizes = np.maximum(np.abs(low), np.abs(high))
        least = np.where(low * high <= 0, 0.0, np.minimum(np.abs(low), np.abs(high)))
        found = []
        for start in range(0, len(sizes), self.group):
            part = slice(start, start + self.group)
            first, last = (
                oracle_layer.scale_exponent(float(s[part].max()), self.floor, self.largest) for s in (least, sizes)
            )
            found.append(range(first, last + 1))
        return found

    def error(self, formula: Formula, codes: U8, exponents: NDArray[np.int64]) -> str:
        """What is wrong with the codes of a row and the exponents of its groups; "" if nothing is.

        The row is rounded to bf16 first. Codes of equal value are equal: +0 and -0.
        """
        for g, allowed in enumerate(self.exponents(formula)):
            if exponents[g] not in allowed:
                return f"scale of group {g} is 2^{exponents[g]}, expected 2^{allowed[0]}"
        shift = -np.repeat(exponents, self.group)[: len(codes)]
        low, high = (self.rounded(np.ldexp(oracle.round_bf16(end), shift)) for end in formula.ends)
        values = self.decode(codes)
        wrong = ~((low <= values) & (values <= high))  # NaN is wrong
        if not wrong.any():
            return ""
        dim = int(wrong.argmax())
        said = f"{int(wrong.sum())} codes are wrong, first of dim {dim}: {values[dim]:g}, expected {low[dim]:g}"
        return f"{said} under the scale 2^{exponents[dim // self.group]}"


def hold_record(record: U8, formula: Formula, layout: KVCacheLayout, where: str) -> Measure:
    """Compare the bytes of a record, data and then scales, with the row that it is to hold. Raises Wrong."""
    if not layout.is_quantised:
        return _hold_rounded(floats(record, layout.dtype), formula, layout.dtype, where)
    nope, packed, scales = layout.nope_dim, layout.nope_dim * layout.code_bits // 8, record[layout.data_bytes :]
    codes = record[:packed] if layout.fp8_format else oracle_layer.unpack_e2m1(record[:packed])
    if layout.scale_dtype == torch.float32:
        mantissas, exponents = np.frexp(np.ascontiguousarray(scales).view("<f4").astype(np.float64))
        if (mantissas != 0.5).any():
            raise Wrong(f"{where}: the scale is no power of two")
        exponents = exponents.astype(np.int64) - 1
    else:
        exponents = scales[: layout.num_groups].astype(np.int64) - oracle.E8M0_BIAS
        if (scales[layout.num_groups :] != 0).any():
            raise Wrong(f"{where}: a pad byte behind the scales is not 0")
    if error := CodeRule.of(layout).error(Formula(formula.value[:nope], formula.error[:nope]), codes, exponents):
        raise Wrong(f"{where}: {error}")
    if not layout.rope_dim:
        return Measure()
    tail = Formula(formula.value[nope:], formula.error[nope:])
    return _hold_rounded(floats(record[packed : layout.data_bytes], torch.bfloat16), tail, torch.bfloat16, where)


def _hold_rounded(found: F64, formula: Formula, dtype: torch.dtype, where: str) -> Measure:
    return hold_values(found, formula, dtype, lambda place: f"{where}, value {place[0] if place else 0}")

"""Expected values and tolerances: rows as a cache stores them, the oracle's answers, and error budgets of every op.

Ops around attention compute in fp32 or better, from inputs that fp32 holds exactly. A budget is the largest error of
fp32 arithmetic: UNIT of the result of every operation, two of them for an exponential. Each of the m additions of a sum
rounds a partial sum; independent errors add up in squares, and twice that is left for those that are not: `summed`.

Where a result is rounded to fewer bits, to a code or to bf16, it must be the rounded true value. Its neighbour is right
too if the true value is within the budget of the midpoint between both: in fp32 it may lie on the other side.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, lru_cache, partial
from typing import Any

import attrs
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dsv4attn.core.cache.layout import Fp8Format, KVCacheLayout
from dsv4attn.core.contract.backend import Products
from dsv4attn.core.torch_ops.indexer import IndexQuery
from dsv4attn.testing.case import Measure, Wrong
from dsv4attn.testing.kit.causes import factor_of_two, likely_cause
from dsv4attn.testing.oracle import attention as oracle
from dsv4attn.testing.oracle import layer as oracle_layer

F64 = NDArray[np.float64]
U8 = NDArray[np.uint8]
LEAST_MASS = 1e-30
"""Added to a key mass, so that a row whose sink leaves nothing is judged by its absolute size."""


_products: ContextVar[Products] = ContextVar("products", default=Products.BF16)


@contextmanager
def multiplying_in(products: Products) -> Iterator[None]:
    """Judge a backend that rounds the operands of its matrix products to this type."""
    token = _products.set(products)
    try:
        yield
    finally:
        _products.reset(token)


def tolerance(layout: KVCacheLayout, q_dtype: torch.dtype) -> float:
    """Largest error of an output row, relative to its key mass sum_j p_j |k_j| (2-norms); of an lse, absolute.

    Outputs are weighted means of keys. Rounding to bf16 costs a value up to 2^-8 of itself, and a vector about 2^-9 of
    its 2-norm: the mean square of a value spread evenly between two neighbours. So rounding out costs 2^-9 of the
    mass, and rounding the weights another 2^-9. Reading fp8 is exact: 4 significand bits times a power of two fit
    bf16. A value of q or of a key's RoPE part may round to another neighbour in fp32 than in float64: 2^-8 of it,
    times its share of a logit, which is of order 1. With q in fp32 only keys are rounded. With fp32 keys too, only
    fp32 sums are left: 2^-24 a step, over about 2^7 steps of keys and dims.
    Products in fp8, which has 3 mantissa bits where bf16 has 7, cost 16 times as much: 2^-5 of the mass for the
    weights, 2^-4 for q; out is rounded as before.
    """
    if _products.get() is Products.FP8:
        return 2.0**-9 + 2.0**-5 + 2.0**-4
    if q_dtype == torch.bfloat16:
        return 2.0**-9 + 2.0**-9 + 2.0**-8
    return 2.0**-8 if layout.row_dtype == torch.bfloat16 else 2.0**-17


def rounded(values: F64, dtype: torch.dtype) -> F64:
    """The values that a tensor of this dtype would hold."""
    return oracle.round_bf16(values) if dtype == torch.bfloat16 else values.astype(np.float32).astype(np.float64)


def stored(row: F64, layout: KVCacheLayout) -> F64:
    """Row [D] as a cache returns it after it was written."""
    return read_row(written(row, layout), layout)


def written(row: F64, layout: KVCacheLayout) -> U8:
    """Bytes of the record that holds this row [D]: its data, then its scales. Not to be changed."""
    return _written(np.asarray(row, dtype=np.float64).tobytes(), layout)


@lru_cache(maxsize=2**13)
def _written(row: bytes, layout: KVCacheLayout) -> U8:
    """As `written`, from the bytes of a row. Cached, because rows repeat from case to case and the oracle is slow."""
    values = np.frombuffer(row)
    if layout.is_quantised:
        write, _ = _quantised(layout)
        record = write(values)
    elif layout.dtype == torch.bfloat16:
        record = oracle.bf16_bytes(oracle.round_bf16(values))
    else:
        record = values.astype("<f4").view(np.uint8)
    record.flags.writeable = False
    return record


def read_row(record: U8, layout: KVCacheLayout) -> F64:
    """Row [D] that a reader finds in the bytes of a record."""
    if not layout.is_quantised:
        return floats(record, layout.dtype)
    _, read = _quantised(layout)
    return read(record)


@cache
def _quantised(layout: KVCacheLayout) -> tuple[Callable[[F64], U8], Callable[[U8], F64]]:
    """The oracle's writer and reader of a layout of codes."""
    fnuz, nope, dim = layout.fp8_format is Fp8Format.FNUZ, layout.nope_dim, layout.head_dim
    index = partial(oracle_layer.index_record_fp8, fnuz=fnuz, floor=oracle.MIN_AMAX, largest=layout.fp8_max)
    dims: dict[str, Any] = {"nope_dim": nope, "rope_dim": layout.rope_dim}
    sizes = {**dims, "group_size": layout.group_size, "scale_bytes": layout.scale_bytes, "fnuz": fnuz}
    functions: dict[str, tuple[Callable[[F64], U8], Callable[[U8], F64]]] = {
        "index_fp8": (index, partial(oracle_layer.read_index_fp8, fnuz=fnuz)),
        "index_mxfp4": (oracle_layer.index_record_fp4, oracle_layer.read_index_fp4),
        "v41_fp8": (partial(oracle.record_fp8, scale_floor=layout.scale_floor), partial(oracle.read_fp8, dim=dim)),
        "v41_fp4": (oracle.record_fp4, partial(oracle.read_fp4, dim=dim)),
        "v4_nvfp4": (partial(oracle.record_nvfp4, nope_dim=nope), partial(oracle.read_nvfp4, **dims)),
        "fp8_ds_mla": (partial(oracle.quantize_record, **sizes), partial(oracle.dequantize_record, **sizes)),
    }
    return functions[layout.name]


def as_f64(tensor: Tensor) -> F64:
    """Values of a tensor on the host."""
    return np.asarray(tensor.double().cpu().numpy())


def query_values(query: IndexQuery, token: int, layout: KVCacheLayout) -> F64:
    """[Hi, Di] values of a token's query, as its codes and scale bytes have them."""
    if not layout.is_quantised:
        return as_f64(query.values[token])
    raw = query.values[token].view(torch.uint8).cpu().numpy()
    if query.scales is not None:
        return oracle_layer.scaled_e2m1(oracle.unpack_e2m1(raw), query.scales[token].cpu().numpy())
    return oracle.decode_e4m3(raw, layout.fp8_format is Fp8Format.FNUZ)


def floats(data: U8, dtype: torch.dtype) -> F64:
    """Little-endian bf16 or fp32 values of some bytes."""
    return (
        oracle.read_bf16(data) if dtype == torch.bfloat16 else np.ascontiguousarray(data).view("<f4").astype(np.float64)
    )


@attrs.frozen(eq=False)
class Expected:
    """The oracle's answer, float64.

    out: [T', H, D], the output.
    lse: [T', H], natural, without the sink.
    mass: [T', H], sum_j p_j |k_j| times the sink's factor.
    """

    out: F64
    lse: F64
    mass: F64

    @classmethod
    def empty(cls, rows: int, heads: int, dim: int) -> Expected:
        """The answer for rows that see nothing."""
        return cls(np.zeros((rows, heads, dim)), np.full((rows, heads), -np.inf), np.zeros((rows, heads)))

    def judge(self, row: int, q: F64, records: list[F64], sink: F64 | None, scale: float) -> None:
        """Fill in a row that sees these records."""
        if not records:
            return
        keys = np.stack(records)
        self.out[row], lse = oracle.attend_row(q, keys, sink, scale)
        weights = np.exp(scale * q @ keys.T - lse[:, None])
        mass = weights @ np.linalg.norm(keys, axis=-1)
        self.mass[row] = oracle.apply_sink(mass[:, None], lse, sink)[:, 0]
        self.lse[row] = lse

    def errors(self, out: Tensor, lse: Tensor | None) -> F64:
        """[T', H] errors in the units of `tolerance`; infinite where NaN, or where only one side has no keys.

        lse: None judges the outputs alone.
        """
        distance, shift = self._parts(out, lse)
        errors = np.maximum(distance, shift)
        return np.where(np.isnan(errors), np.inf, errors)

    def _described(self, out: Tensor, lse: Tensor | None, row: int, head: int, budget: float) -> str:
        """How out and lse of a row and head differ from the expected ones: the worst dim, and errors in budgets."""
        values, expected = as_f64(out[row, head]), self.out[row, head]
        lse_text = "not asked for" if lse is None else shown(lse[row, head].item(), 7)
        alone = Expected(self.out[[row]], self.lse[[row]], self.mass[[row]])
        parts = alone._parts(out[row : row + 1], None if lse is None else lse[row : row + 1])
        distance, shift = (float(part[0, head]) for part in parts)
        if nans := int(np.isnan(values).sum()):
            said = f"{nans} of {values.size} values of out are NaN"
        elif np.isnan(shift):
            said = "lse is NaN"
        else:
            said = f"error of {max(distance, shift) / budget:.3g} budgets"
            said += " in lse" if shift > distance else ""
        _, (dim,) = worst_error(np.abs(values - expected))
        return (
            f"{said}; out of dim {dim} is {shown(values[dim], 6)}, expected {expected[dim]:.6g}; "
            f"lse {lse_text}, expected {self.lse[row, head]:.7g}"
        )

    def verdict(
        self,
        out: Tensor,
        lse: Tensor | None,
        budget: float,
        layout: KVCacheLayout,
        place: Callable[[int, int], str],
        starts: Collection[int] = (),
    ) -> tuple[float, str]:
        """The largest error, and a sentence about the row that has it.

        budget: of `errors`.
        layout: of the keys.
        place: names a row and head.
        starts: see `likely_cause`.
        """
        errors = self.errors(out, lse)
        if not errors.size:
            return 0.0, "no rows"
        row, head = (int(i) for i in np.unravel_index(errors.argmax(), errors.shape))
        wrong = errors > budget
        said = f"{place(row, head)}: {self._described(out, lse, row, head, budget)}"
        said += f"; {wrong.any(1).sum()} of {len(errors)} rows are wrong"
        if wrong.any():
            alone = Expected(self.out, self.lse, np.full_like(self.mass, np.inf))  # errors of the lse only
            right = lse is not None and bool((alone.errors(out.nan_to_num(), lse) <= budget).all())
            coded = layout.nope_dim if layout.fp8_format and layout.plain_dims else 0
            cause = likely_cause(as_f64(out), self.out, wrong, lse_is_right=right, starts=starts, coded_dims=coded)
            said += cause and f"; {cause}"
        return float(errors.max()), said

    def _parts(self, out: Tensor, lse: Tensor | None) -> tuple[F64, F64]:
        """[T', H] errors of out and of lse, as in `errors`, but with NaN."""
        with np.errstate(invalid="ignore"):
            distance = np.linalg.norm(as_f64(out) - self.out, axis=-1) / (self.mass + LEAST_MASS)
            lses = self.lse if lse is None else as_f64(lse)
            shift = np.abs(lses - self.lse)
        both_empty = np.isneginf(self.lse) & np.isneginf(lses)
        return distance, np.where(both_empty, 0.0, shift)


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
        """`oracle.layer.rms_norm` of a row [d]."""
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

    def __getitem__(self, index: Any) -> Formula:  # noqa: ANN401 - as of numpy
        return Formula(self.value[index], self.error[index])

    @property
    def ends(self) -> tuple[F64, F64]:
        """The lowest and the highest value that fp32 may have."""
        error = self.error + UNIT * np.abs(self.value) + TINY
        return self.value - error, self.value + error


def shown(value: float, digits: int) -> str:
    """A number as messages print it."""
    return "NaN" if math.isnan(value) else f"{value:.{digits}g}"


def worst_error(errors: F64) -> tuple[float, tuple[int, ...]]:
    """The largest of some errors, and its place. NaN counts as infinity."""
    sizes = np.where(np.isnan(errors), math.inf, errors)
    place = tuple(int(i) for i in np.unravel_index(sizes.argmax(), sizes.shape))
    return float(sizes[place]), place


def hold_shape(result: Tensor, shape: Sequence[int], dtype: torch.dtype, what: str) -> None:
    """Raise Wrong unless a result has this shape and dtype. what: its name in the message."""
    if (tuple(result.shape), result.dtype) != (tuple(shape), dtype):
        raise Wrong(f"{what} {list(result.shape)} {result.dtype}, expected {list(shape)} {dtype}")


def first_difference(now: U8, expected: U8) -> tuple[int, int, int]:
    """(number of bytes of pages that differ, page and byte of the first of them); (0, -1, -1) for equal bytes."""
    differs = now != expected
    if not differs.any():
        return 0, -1, -1
    page, byte = (int(axis[0]) for axis in np.nonzero(differs))
    return int(differs.sum()), page, byte


def hold_equal(values: Tensor, expected: F64, where: Callable[[tuple[int, ...]], str]) -> Measure:
    """Compare values with expected ones, bit for bit but for NaN and the sign of 0. Raises Wrong, naming the first."""
    actual = as_f64(values)
    same = (actual == expected) | (np.isnan(actual) & np.isnan(expected))
    if not same.all():
        place = tuple(int(axis[0]) for axis in (~same).nonzero())
        said = factor_of_two(actual, expected)
        said = f"{shown(actual[place], 6)}, expected {shown(expected[place], 6)}{said and f'; {said}'}"
        raise Wrong(f"{where(place)}: {said}")
    return Measure()


def hold_values(result: Tensor | F64, formula: Formula, dtype: torch.dtype, what: str) -> Measure:
    """Compare an op's values with the exact values of a formula, which the op may round to its dtype.

    what: the name of the values in messages. Raises Wrong with the place of the value that is furthest off.
    Returns the smallest error before the rounding that explains the value found, relative to the budget.
    """
    values = as_f64(result) if isinstance(result, Tensor) else np.asarray(result)
    if values.shape != formula.value.shape:
        raise Wrong(f"{what}: shape {list(values.shape)}, expected {list(formula.value.shape)}")
    expected, budget = formula.value, formula.error + UNIT * np.abs(formula.value) + TINY
    distance = np.abs(values - expected)
    if dtype == torch.bfloat16:
        _, exponents = np.frexp(values)
        exponents = np.where(values == 0, oracle.BF16_MIN_EXPONENT, exponents - oracle.BF16_BITS)
        gap = np.ldexp(1.0, np.maximum(exponents, oracle.BF16_MIN_EXPONENT))
        # towards zero, the neighbour of a power of two is half as far
        inward = (np.abs(expected) < np.abs(values)) & (np.abs(np.frexp(values)[0]) == 0.5)
        distance = np.maximum(distance - np.where(inward, gap / 2, gap) / 2, 0.0)
    if not distance.size:
        return Measure(0.0, 1.0)
    error, place = worst_error(distance / budget)
    said = f"{what}, {list(place)}: {shown(values[place], 8)}, expected {expected[place]:.8g}"
    said += "" if np.isnan(values[place]) else f", {error:.3g} budgets off"
    return Measure(error, 1.0).hold(said)


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
            return oracle.decode_e2m1(codes)
        return oracle.decode_e4m3(codes, self.fp8 is Fp8Format.FNUZ)

    def rounded(self, values: F64) -> F64:
        """Scaled values as codes hold them."""
        if self.fp8 is None:
            return oracle.decode_e2m1(oracle.encode_e2m1(values))
        limited = np.clip(values, -self.largest, self.largest)
        return self.decode(oracle.encode_e4m3(limited, self.fp8 is Fp8Format.FNUZ))

    def exponents(self, formula: Formula) -> list[range]:
        """Exponents that the scale of each group of a row may have."""
        low, high = (oracle.round_bf16(end) for end in formula.ends)
        sizes = np.maximum(np.abs(low), np.abs(high))
        least = np.where(low * high <= 0, 0.0, np.minimum(np.abs(low), np.abs(high)))
        ranges = []
        for start in range(0, len(sizes), self.group):
            part = slice(start, start + self.group)
            first, last = (
                oracle.scale_exponent(float(s[part].max()), self.largest, self.floor) for s in (least, sizes)
            )
            ranges.append(range(first, last + 1))
        return ranges

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
        return hold_values(floats(record, layout.dtype), formula, layout.dtype, where)
    nope, packed, scales = layout.nope_dim, layout.nope_dim * layout.code_bits // 8, record[layout.data_bytes :]
    codes = record[:packed] if layout.fp8_format else oracle.unpack_e2m1(record[:packed])
    if layout.scale_dtype == torch.float32:
        mantissas, exponents = np.frexp(np.ascontiguousarray(scales).view("<f4").astype(np.float64))
        if (mantissas != 0.5).any():
            raise Wrong(f"{where}: the scale is no power of two")
        exponents = exponents.astype(np.int64) - 1
    else:
        exponents = scales[: layout.num_groups].astype(np.int64) - oracle.E8M0_BIAS
        if (scales[layout.num_groups :] != 0).any():
            raise Wrong(f"{where}: a pad byte after the scales is not 0")
    if error := CodeRule.of(layout).error(formula[:nope], codes, exponents):
        raise Wrong(f"{where}: {error}")
    if not layout.rope_dim:
        return Measure()
    tail = floats(record[packed : layout.data_bytes], torch.bfloat16)
    return hold_values(tail, formula[nope:], torch.bfloat16, where)

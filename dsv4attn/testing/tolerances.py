"""Expected values and tolerances: rows as a cache stores them, the oracle's answer for a query, and error limits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import Any

import attrs
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dsv4attn.core.cache.layout import Fp8Format, KVCacheLayout
from dsv4attn.core.contract.backend import Products
from dsv4attn.testing import oracle, oracle_layer, oracle_records

__all__ = ["Expected", "floats", "found", "multiplying_in", "rounded", "stored", "tolerance", "written"]

F64 = NDArray[np.float64]
U8 = NDArray[np.uint8]
TINY = 1e-30
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
    Products in fp8, which has 3 bits behind the point where bf16 has 7, cost 16 times as much: 2^-5 of the mass for the
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
    return found(written(row, layout), layout) if layout.is_quantised else rounded(row, layout.dtype)


def written(row: F64, layout: KVCacheLayout) -> U8:
    """Bytes of the record that holds this row [D]: its data, then its scales. Not to be changed."""
    return _written(np.asarray(row, dtype=np.float64).tobytes(), layout)


@lru_cache(maxsize=2**13)
def _written(row: bytes, layout: KVCacheLayout) -> U8:
    """The same of the bytes of a row. Cached, because rows repeat from case to case, and the oracle takes its time."""
    record = _record(np.frombuffer(row), layout)
    record.flags.writeable = False
    return record


def _record(row: F64, layout: KVCacheLayout) -> U8:
    if layout.name == "index_fp8":
        fnuz = layout.fp8_format is Fp8Format.FNUZ
        return oracle_layer.index_record_fp8(row, fnuz=fnuz, floor=oracle.MIN_AMAX, largest=layout.fp8_max)
    if layout.name == "index_mxfp4":
        return oracle_layer.index_record_fp4(row)
    if layout.name == "v41_fp8":
        return oracle_records.record_fp8(row, layout.scale_floor)
    if layout.name == "v41_fp4":
        return oracle_records.record_fp4(row)
    if layout.is_quantised:
        return oracle.quantize_record(row, **_sizes(layout))
    values = rounded(row, layout.dtype).astype(np.float32).view(np.uint32)
    halves = (values >> 16).astype("<u2") if layout.dtype == torch.bfloat16 else values.astype("<u4")
    return halves.view(np.uint8)


def found(record: U8, layout: KVCacheLayout) -> F64:
    """Row [D] that a reader finds in the bytes of a record."""
    if layout.name == "index_fp8":
        return oracle_layer.read_index_fp8(record, fnuz=layout.fp8_format is Fp8Format.FNUZ)
    if layout.name == "index_mxfp4":
        return oracle_layer.read_index_fp4(record)
    if layout.name in ("v41_fp8", "v41_fp4"):
        return (oracle_records.read_fp8 if layout.fp8_format else oracle_records.read_fp4)(record, layout.head_dim)
    if not layout.is_quantised:
        return floats(record, layout.dtype)
    return oracle.dequantize_record(record, **_sizes(layout))


def floats(data: U8, dtype: torch.dtype) -> F64:
    """Little-endian bf16 or fp32 values of some bytes."""
    data = np.ascontiguousarray(data)
    if dtype == torch.bfloat16:
        return (data.view("<u2").astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return data.view("<f4").astype(np.float64)


def _sizes(layout: KVCacheLayout) -> dict[str, Any]:
    sizes = ("nope_dim", "rope_dim", "group_size", "scale_bytes")
    return {"fnuz": layout.fp8_format is Fp8Format.FNUZ, **{name: getattr(layout, name) for name in sizes}}


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
        with np.errstate(invalid="ignore"):
            distance = np.linalg.norm(out.double().cpu().numpy() - self.out, axis=-1) / (self.mass + TINY)
            lses = self.lse if lse is None else lse.double().cpu().numpy()
            shift = np.abs(lses - self.lse)
        both_empty = np.isneginf(self.lse) & np.isneginf(lses)
        errors = np.maximum(distance, np.where(both_empty, 0.0, shift))
        return np.where(np.isnan(errors), np.inf, errors)

"""The backend whose results are expected, and the error of a result."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import isnan

import torch
from attrs import frozen
from torch import Tensor

from dsv4attn.core.contract.backend import Backend, Products
from dsv4attn.selection import load_backend


@frozen
class Error:
    """Relative error of a result, in 2-norms.

    total: norm of the difference over the norm of the expected output.
    worst: the same of the worst row.
    """

    total: float
    worst: float

    def within(self, limit: float) -> bool:
        """Whether a result is right. A single row may have a larger error than the whole output. NaN is never right."""
        return self.total <= limit and self.worst <= 5 * limit


@cache
def reference() -> Backend:
    """The reference backend. It computes in fp32, and the conformance kit proves it against a float64 oracle."""
    return load_backend("reference", prefill_keys="paged")


def limit(products: Products) -> float:
    """Largest error of a right result. bf16 products typically give 2e-3, fp8 products up to 16 times as much."""
    return 1e-2 if products is Products.BF16 else 1e-1


def error(pairs: Sequence[tuple[Tensor, Tensor]]) -> Error:
    """Largest error of several (result, expected) pairs. Each is [..., D]; a row is the last dim."""
    totals, worsts = [], []
    for got, expected in pairs:
        tiles = (tensor.flatten(0, -2).split(65536) for tensor in (got, expected))
        away, size = [], []
        for part, expected_part in zip(*tiles, strict=True):
            away.append((part.float() - expected_part.float()).square().sum(-1))
            size.append(expected_part.float().square().sum(-1))
        off, all_ = torch.cat(away).double(), torch.cat(size).double()
        # a row that should be zero is judged by the size of the others
        mean = all_.mean().clamp_min(1e-30)
        totals.append(float((off.sum() / all_.sum().clamp_min(1e-30)).sqrt()))
        worsts.append(float((off / torch.where(all_ > 1e-6 * mean, all_, mean)).max().sqrt()))
    return Error(largest(totals), largest(worsts))


def largest(values: Sequence[float]) -> float:
    """The largest of some numbers, or NaN if one is. `max` would drop a NaN that is not the first value."""
    return next(filter(isnan, values), max(values))

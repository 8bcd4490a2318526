"""What the caches of a layer hold, read by the oracle from raw bytes, and how far rounding may take it from the truth.

A window key is rounded to the dtype of hidden states before its rotation, and after it; an entry is rounded once, when
it is stored. With u = 2^-8, the largest relative error of bf16, a stored element differs from v, its value before all
rounding, by at most

    bf16                (u + u) r      r: |v|, or where a pair is rotated the length of the pair
    e4m3 under a scale  (2^-4 + u + u) |v| + s 2^-10, half of its smallest step, which is twice as large if the largest
                        value of its group lies on the edge of two scales
    fp32 sums           2^-15 of the root mean square of the vector: four deviations of a sum of 8,192 products, each
                        2^-24 of its size

A difference as a share of this bound is at most 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dsv4attn.core.cache.layout import Fp8Format, KVCacheLayout, PagedKVCache
from dsv4attn.testing.kit.oracle_cache import place_of
from dsv4attn.testing.kit.tolerances import read_row
from dsv4attn.testing.oracle import attention as oracle
from dsv4attn.testing.oracle.attention import F64

BF16 = 2.0**-8
"""Largest relative error of a value that is rounded to bf16."""
SUMS = 2.0**-15
"""Largest error of an fp32 sum, relative to the root mean square of the vector that the sums make."""
_E4M3, _E4M3_SMALLEST = 2.0**-4, 2.0**-10
"""Half a step of e4m3, relative, and of its smallest values."""


class KeyReader:
    """Keys, or index keys, of one cache, in float64."""

    def __init__(self, cache: PagedKVCache) -> None:
        """Look at the memory of a cache; a page is copied when it is read, if it is not on the CPU."""
        self._layout, self._size, self._pages = cache.layout, cache.block_size, cache.tensor
        if cache.layout.is_quantised:
            # [B, bytes] uint8, without the padding between pages
            size = cache.num_blocks, cache.layout.page_bytes(cache.block_size)
            self._pages = torch.as_strided(cache.tensor, size, (cache.page_stride, 1), cache.tensor.storage_offset())

    def read(self, blocks: Sequence[int], numbers: Sequence[int]) -> F64:
        """[n, D] records `numbers` of a request with these blocks."""
        pages = {column: self._page(blocks[column]) for column in {n // self._size for n in numbers}}
        rows = [self._record(pages[n // self._size], n % self._size) for n in numbers]
        return np.array(rows, np.float64).reshape(len(numbers), self._layout.head_dim)

    def _page(self, block: int) -> NDArray[Any]:
        page = self._pages[block]
        return np.asarray((page if self._layout.is_quantised else page.double()).cpu().numpy())

    def _record(self, page: NDArray[Any], place: int) -> F64:
        layout = self._layout
        if not layout.is_quantised:
            return np.asarray(page[place])
        return read_row(page[place_of(layout, place, self._size)], layout)


def rounding_bound(exact: F64, layout: KVCacheLayout, rope_dim: int) -> F64:
    """[D] bound on the difference of each stored element from `exact` [D], a rotated key; see the module.

    rope_dim: elements that were rotated, the trailing ones, whatever part of them the layout stores in bf16.
    """
    sums = SUMS * rms(exact)
    if layout.dtype == torch.float32:
        return np.full(exact.shape, sums)
    size = np.abs(exact)
    start = exact.shape[0] - rope_dim
    pairs = np.hypot(exact[start::2], exact[start + 1 :: 2]).repeat(2)
    bound: F64 = 2 * BF16 * np.concatenate([size[:start], pairs]) + sums
    if layout.is_quantised:
        largest = oracle.decode_e4m3(np.arange(256, dtype=np.uint8), layout.fp8_format is Fp8Format.FNUZ)
        for first in range(0, layout.nope_dim, layout.group_size):
            part = slice(first, min(first + layout.group_size, layout.nope_dim))
            exponent = oracle.scale_exponent(float(size[part].max()), float(np.nanmax(largest)))
            bound[part] += _E4M3 * size[part] + 2 * math.ldexp(_E4M3_SMALLEST, exponent)
    return bound


def share_of_bound(stored: F64, exact: F64, bound: F64) -> float:
    """The largest difference as a share of its bound; infinity when one is not a number."""
    shares = np.abs(stored - exact) / bound
    return math.inf if np.isnan(shares).any() else float(shares.max())


def rms(values: F64) -> float:
    """The root mean square of some values."""
    return math.sqrt(float(np.mean(values**2)))

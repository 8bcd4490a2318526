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

import numpy as np
import torch
from torch import Tensor

from dsv4attn.core.cache.layout import Fp8Format, KVCacheLayout, PagedKVCache
from dsv4attn.testing.oracle import attention as oracle
from dsv4attn.testing.oracle.attention import F64

BF16 = 2.0**-8
"""Largest relative error of a value that is rounded to bf16."""
SUMS = 2.0**-15
"""Largest error of an fp32 sum, relative to the root mean square of the vector that the sums make."""
_E4M3, _E4M3_SMALLEST = 2.0**-4, 2.0**-10
"""Half a step of e4m3, relative, and of its smallest values."""


class _Reader:
    def __init__(self, cache: PagedKVCache) -> None:
        """Look at the memory of a cache; a page is copied when it is read, if it is not on the CPU."""
        self._layout, self._size = cache.layout, cache.block_size
        self._pages = _raw_pages(cache) if cache.layout.is_quantised else None
        self._rows = cache.tensor


class KeyReader(_Reader):
    """Keys of one cache, in float64."""

    def read(self, blocks: list[int], numbers: list[int]) -> F64:
        """[n, D] records `numbers` of a request with these blocks."""
        return np.stack([self._record(blocks[n // self._size], n % self._size) for n in numbers])

    def _record(self, block: int, place: int) -> F64:
        if self._pages is None:
            return self._rows[block, place].double().cpu().numpy()
        layout = self._layout
        return oracle.read_record(
            self._pages[block].cpu().numpy(),
            place,
            block_size=self._size,
            nope_dim=layout.nope_dim,
            rope_dim=layout.rope_dim,
            group_size=layout.group_size,
            fnuz=layout.fp8_format is Fp8Format.FNUZ,
            scale_bytes=layout.scale_bytes,
            split=layout.arrangement.value == "split",
        )


class IndexKeyReader(_Reader):
    """Index keys of one cache, in float64.

    A page holds rows, or the codes of all its keys and then an fp32 scale of each key.
    """

    def read(self, blocks: list[int], count: int) -> F64:
        """[count, Di] the first keys of a request with these blocks."""
        if not count:
            return np.zeros((0, self._layout.head_dim))
        pages = [self._page(block) for block in blocks[: -(-count // self._size)]]
        return np.concatenate(pages)[:count]

    def _page(self, block: int) -> F64:
        if self._pages is None:
            return self._rows[block].double().cpu().numpy()
        dim, fnuz = self._layout.head_dim, self._layout.fp8_format is Fp8Format.FNUZ
        page, codes = self._pages[block].cpu().numpy(), self._size * self._layout.head_dim
        scales = np.ascontiguousarray(page[codes : codes + 4 * self._size]).view("<f4").astype(np.float64)
        return oracle.decode_e4m3(page[:codes], fnuz).reshape(self._size, dim) * scales[:, None]


def _raw_pages(cache: PagedKVCache) -> Tensor:
    """[B, bytes] uint8 of a quantised cache, without the padding between pages."""
    size = cache.num_blocks, cache.layout.page_bytes(cache.block_size)
    return torch.as_strided(cache.tensor, size, (cache.page_stride, 1), cache.tensor.storage_offset())


def rounding_bound(exact: F64, layout: KVCacheLayout, rope_dim: int) -> F64:
    """[D] bound on the difference of each stored element from `exact` [D], a rotated key; see the module.

    rope_dim: elements that were rotated, the trailing ones, whatever part of them the layout stores in bf16.
    """
    sums = SUMS * _rms(exact)
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


def _rms(values: F64) -> float:
    return math.sqrt(float(np.mean(values**2)))

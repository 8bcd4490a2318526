"""Types of selected keys: dense or ragged indices, page tables, keys in pages or in gathered rows."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from attrs import frozen

if TYPE_CHECKING:
    # descriptors must load where torch is not wanted yet
    from torch import Tensor

    from dsv4attn.core.layout import PagedKVCache

__all__ = ["DenseIndices", "GatheredKeys", "PageTable", "PagedKeys", "RaggedIndices"]

# no slots in classes with an instance a call: construction of frozen classes with slots takes twice as long


@frozen(slots=False)
class DenseIndices:
    """Selected keys as a matrix.

    indices: [T, K] int32, any row stride - in any order; -1, or anything outside the cache, is no key.
    lens: [T] int32 - leading columns that are read.
    """

    indices: Tensor
    lens: Tensor

    @cached_property
    def width(self) -> int:
        """K."""
        return self.indices.shape[1]


@frozen(slots=False)
class RaggedIndices:
    """Selected keys as one list: row i is indices[indptr[i] : indptr[i + 1]].

    indices: [capacity] int32, undefined from indptr[-1] on - in any order; -1, or outside the cache, is no key.
    indptr: [T + 1] int32 - where rows begin and end, ascending from 0.
    width: most entries that a row can have, on the host.
    """

    indices: Tensor
    indptr: Tensor
    width: int


@frozen
class PageTable:
    """The blocks of some requests.

    block_table: [n, N] int32 - record j of request i is in block_table[i, j // block_size]; blocks outside
       [0, num_blocks) do not exist.
    block_size: records of a block.
    num_blocks: blocks of the cache.
    """

    block_table: Tensor
    block_size: int
    num_blocks: int


@frozen(slots=False)
class PagedKeys:
    """A segment of keys in pages.

    cache: the cache that holds the keys.
    rows: the keys of each token: global slots, block * block_size + offset, of this cache.
    """

    cache: PagedKVCache
    rows: DenseIndices | RaggedIndices


@frozen(slots=False)
class GatheredKeys:
    """Keys in contiguous rows.

    kv: [S, D] in the layout's row dtype; rows without an index that names them are uninitialised.
    rows: the keys of each token: row numbers of kv.
    """

    kv: Tensor
    rows: DenseIndices | RaggedIndices

"""Types of selected keys: dense or ragged slots, entries, page tables, keys in pages or in rows, rows to gather."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from attrs import frozen

if TYPE_CHECKING:
    # descriptors must load where torch is not wanted yet
    from torch import Tensor

    from dsv4attn.core.cache.layout import PagedKVCache

__all__ = ["ChunkRows", "DenseIndices", "EntryIndices", "GatheredKeys", "PageTable", "PagedKeys", "RaggedIndices"]

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
class EntryIndices:
    """Selected keys as entry numbers of each token's request.

    Slots of `indices.compute_global_topk_indices_and_lens` are the definition.

    indices: [T, K] int32, any row stride - in any order, and at any place of a row.
    visible_lens: [T] int32 - entries that each token may see; other numbers are absent.
    token_to_req: [T] int32 - the request of each token; one that the table lacks has no entries.
    pages: the blocks of the compressed cache.
    """

    indices: Tensor
    visible_lens: Tensor
    token_to_req: Tensor
    pages: PageTable


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


@frozen(slots=False, eq=False)
class ChunkRows:
    """The rows that a prefill chunk of n requests and t query tokens gathers, and the lists that name them.

    kv: [n, M, D] in the layout's row dtype - receives the rows of request i in kv[i]: its compressed entries from row 0
       on, then its window records from row `offset` on. A row of an absent record, or of none, is not written.
    combined: indices [t, >= topk + window] and lens [t] - receive the list of each token: rows of kv, counted through
       all requests, as `indices.combine_topk_swa_indices` makes them.
    ragged: None, or the same lists once more, as `indices.build_ragged_indices_from_dense` makes them.
    seq_lens: [n] int32 - tokens of each request after the step.
    gather_lens: [n] int32 - trailing tokens of each request that its queries see through the window.
    query_start_loc: [n + 1] int32 - where the query tokens of each request begin, from any base.
    tail: None; or the chunk is a part of one request's query tokens, and `tail` of them come after it. The request
       then ends that much earlier, has t query tokens, and gathers gather_lens - tail window records, at least 0 and
       at most t + window - 1.
    visible_lens: [t] int32 - entries that each token sees; None on window-only layers.
    is_valid: [t] bool - other tokens have empty lists.
    swa: the blocks of the window cache.
    compressed: the blocks of the compressed cache, of which a request gathers seq_len // ratio entries; None on
       window-only layers.
    window: W - most window records of a token.
    ratio: tokens per entry.
    topk: columns of the lists that are set aside for entries.
    offset: N - rows of a request before its window.
    lengths: [3, n] int32 - scratch of any content.
    starts: [n + 1] int32 - scratch of any content.
    """

    kv: Tensor
    combined: DenseIndices
    ragged: RaggedIndices | None
    seq_lens: Tensor
    gather_lens: Tensor
    query_start_loc: Tensor
    tail: int | None
    visible_lens: Tensor | None
    is_valid: Tensor
    swa: PageTable
    compressed: PageTable | None
    window: int
    ratio: int
    topk: int
    offset: int
    lengths: Tensor
    starts: Tensor

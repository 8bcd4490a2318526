"""Types of selected keys: dense or ragged slots, entries, page tables, keys in pages or in rows, rows to gather.

`StepTokens` and `ChunkTokens` say which keys each token sees, for the index ops that select them.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from dsv4attn.core.reprs import frozen

if TYPE_CHECKING:
    # descriptors must load where torch is not wanted yet
    from torch import Tensor

    from dsv4attn.core.cache.layout import PagedKVCache

__all__ = [
    "ChunkRows",
    "ChunkTokens",
    "DenseIndices",
    "EntryIndices",
    "GatheredKeys",
    "PageTable",
    "PagedKeys",
    "RaggedIndices",
    "RequestRows",
    "StepTokens",
]

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

    Slots of `index_ops.compute_global_topk_indices_and_lens` are the definition.

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
class RequestRows:
    """Which rows of a call belong to one request, so that a backend may read the keys that they share once.

    Who gives it promises of every pair of rows t < u with one request, `token_to_req[t] == token_to_req[u] >= 0`, that
    token u of the sequence comes u - t positions after token t, and:

    - Window: both rows list the slots of their keys in ascending position, without gaps, up to the token itself. So
      column n_u - 1 - (u - t) - m of row u is column n_t - 1 - m of row t, for all m of 0 or more that both rows have;
      n_t and n_u are their lengths. Row u does not begin at an earlier position than row t.
    - Entries of c128a layers: row t is the beginning of row u.

    Of a row with a window and one without nothing is promised, and on c4a layers nothing about the selected entries.
    Which rows share is decided by `token_to_req` alone; the other fields say where groups of rows best begin, and any
    values give right results. `core.torch_ops.request_rows` has the definition of groups, and checks the promise.

    token_to_req: [T] int32 - request of each row, negative for a token that is not real.
    query_start_loc: [R + 1] int32 - row with which each request begins. Rows of a prompt may be counted from an earlier
       row, such as the first of the batch: groups need differences only. R is the number of requests, but a captured
       graph of a decode may be replayed with more of them.
    max_tokens: most rows of a request, on the host, also in replays of a captured graph.
    num_requests: requests that have rows, on the host; None: R.
    """

    token_to_req: Tensor
    query_start_loc: Tensor
    max_tokens: int
    num_requests: int | None = None

    @property
    def requests(self) -> int:
        """Requests that have rows, as far as the host knows."""
        return self.query_start_loc.shape[0] - 1 if self.num_requests is None else self.num_requests

    @property
    def are_several(self) -> bool:
        """Whether requests have more than one row on the average, as far as the host knows."""
        return self.max_tokens > 1 and self.token_to_req.shape[0] > self.requests


@frozen
class PageTable:
    """The blocks of some requests.

    block_table: [n, N] int32 - record j of request i is in block_table[i, j // block_size]; blocks outside
       [0, num_blocks) do not exist.
    block_size: records of a block.
    num_blocks: blocks of the cache. By default every block exists that is not negative.
    """

    block_table: Tensor
    block_size: int
    num_blocks: int = 2**31 - 1


@frozen
class StepTokens:
    """A run of consecutive tokens of a step of R requests, as index ops of the metadata builder take them.

    query_start_loc: [R + 1] int32 - where the query tokens of each request begin in the step.
    seq_lens: [R] int32 - tokens of each request after the step.
    token_to_req: [n] int32 - the request of each token of the run, -1 for tokens that are not real.
    is_valid: [n] bool - whether each token is real, the same fact.
    first: number of the run's first token in the step; other than 0 for `build_window_indices` alone.
    """

    query_start_loc: Tensor
    seq_lens: Tensor
    token_to_req: Tensor
    is_valid: Tensor
    first: int = 0


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
class ChunkTokens:
    """The t query tokens of a prefill chunk of n requests: what they see, and the rows where gathered keys stand.

    seq_lens: [n] int32 - tokens of each request after the step.
    gather_lens: [n] int32 - trailing tokens of each request that its queries see through the window. A window has no
       position before the first one that is gathered.
    query_start_loc: [n + 1] int32 - where the query tokens of each request begin, from any base.
    visible_lens: [t] int32 - entries that each token sees; None on window-only layers.
    is_valid: [t] bool - other tokens have empty lists.
    window: W - most window records of a token.
    topk: columns of the lists that are set aside for entries.
    rows: M - rows of each request.
    offset: N - rows of a request before its window.
    """

    seq_lens: Tensor
    gather_lens: Tensor
    query_start_loc: Tensor
    visible_lens: Tensor | None
    is_valid: Tensor
    window: int
    topk: int
    rows: int
    offset: int


@frozen(slots=False, eq=False)
class ChunkRows:
    """The rows that a prefill chunk of n requests and t query tokens gathers, and the lists that name them.

    tokens: the chunk's tokens, and where their keys stand in kv. Of a slice of a request, see `tail`, the lengths and
       starts are those of the whole request.
    kv: [n, M, D] in the layout's row dtype - receives the rows of request i in kv[i]: its compressed entries from row 0
       on, then its window records from row `offset` on. A row of an absent record, or of none, is not written.
    combined: indices [t, >= topk + window] and lens [t] - receive the list of each token: rows of kv, counted through
       all requests, as `index_ops.combine_topk_swa_indices` makes them.
    ragged: None, or the same lists once more, as `index_ops.build_ragged_indices_from_dense` makes them.
    tail: None; or the chunk is a slice of one request's query tokens, and `tail` of them come after it. The request
       then ends that much earlier, has t query tokens, and gathers gather_lens - tail window records, at least 0 and
       at most t + window - 1.
    swa: the blocks of the window cache.
    compressed: the blocks of the compressed cache, of which a request gathers seq_len // ratio entries; None on
       window-only layers.
    ratio: tokens per entry.
    lengths: [3, n] int32 - scratch of any content.
    starts: [n + 1] int32 - scratch of any content.
    """

    tokens: ChunkTokens
    kv: Tensor
    combined: DenseIndices
    ragged: RaggedIndices | None
    tail: int | None
    swa: PageTable
    compressed: PageTable | None
    ratio: int
    lengths: Tensor
    starts: Tensor

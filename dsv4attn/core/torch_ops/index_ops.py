"""Index arithmetic in plain torch, under the field's names: the default ops of every backend, and their definition.

A backend may replace ops that run once a layer (`contract.IndexOps`), and ops that run once a step
(`contract.BuilderOps`). They write into `out`, so that addresses stay fixed. None of
them reads a tensor value on the host or loops over tokens. An index that names no visible entry becomes -1 in its
column.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4attn.core.cache.ownership import Ownership
from dsv4attn.core.cache.selected_keys import ChunkTokens, PageTable, StepTokens

__all__ = [
    "build_cached_mask",
    "build_compressed_slot_mapping",
    "build_gather_lens",
    "build_owned_slot_mapping",
    "build_ragged_indices_from_dense",
    "build_token_maps",
    "build_window_indices",
    "combine_topk_swa_indices",
    "compute_global_topk_indices_and_lens",
    "compute_global_topk_ragged_indices_and_indptr",
    "get_compressed_slot_mapping",
    "positions_of",
    "token_to_req_indices",
    "transient_bytes",
    "visible_entries",
    "window_indices",
    "window_spans",
]

_LARGEST_SLOT = torch.iinfo(torch.int32).max
"""Slots are handed on as int32."""
_ALL = Ownership(0, 1)
"""Of a rank that has all entries."""


def token_to_req_indices(query_start_loc: Tensor, num_tokens: int) -> Tensor:
    """[T] int64 request of each token, -1 for tokens of no request: those before the first and after the last one.

    query_start_loc: [R+1] int32. Requests without tokens are skipped.
    """
    tokens = torch.arange(num_tokens, device=query_start_loc.device, dtype=torch.int32)
    request = torch.searchsorted(query_start_loc.contiguous(), tokens, right=True) - 1
    return request.masked_fill_(tokens >= query_start_loc[-1], -1)


def _rows(token_to_req: Tensor) -> Tensor:
    """Rows to read for each token; row 0 for a token that is not real, whose values are masked afterwards."""
    return token_to_req.clamp(min=0)


def positions_of(query_start_loc: Tensor, seq_lens: Tensor, token_to_req: Tensor, first: int = 0) -> Tensor:
    """[T] int64 absolute position of each token: seq_len - query_len + its index in the request.

    first: number of the token that element 0 of `token_to_req` [T] int64 is about. A token that is not real, -1, has
    any position.
    """
    tokens = torch.arange(first, first + token_to_req.shape[0], device=seq_lens.device)
    # position minus token number is the same for all tokens of a request: seq_len - query_end
    return tokens + (seq_lens - query_start_loc[1:]).long()[_rows(token_to_req)]


def _translate(local: Tensor, visible: Tensor, pages: PageTable, request: Tensor) -> Tensor:
    """Slots of record numbers `local` [T, K] of each token's request; -1 where not visible or without a block.

    A token that is not real (request -1) has no block, and no column past the table has one.
    """
    table, block_size = pages.block_table, pages.block_size
    column = torch.div(local, block_size, rounding_mode="floor")
    visible = visible & (column < table.shape[1]) & (request >= 0)[:, None]
    if not table.numel():
        return torch.full_like(local, -1)
    # in 64 bits: a garbage block times the block size may wrap around to a slot that exists
    block = table[_rows(request)[:, None], column.clamp(0, table.shape[1] - 1)].long()
    slots = block * block_size + local % block_size
    return slots.masked_fill_(~visible | (block < 0) | (slots > _LARGEST_SLOT), -1)


def _exists(records: Tensor, visible: Tensor, pages: PageTable, request: Tensor) -> Tensor:
    """Which visible records [T, K] are in a block that exists."""
    slots = _translate(records, visible, pages, request)
    return (slots >= 0) & (slots < pages.num_blocks * pages.block_size)


def _compact(values: Tensor, selected: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Move the selected values of each row to its front, in order: ([T, width], count [T]). The rest is undefined."""
    column = selected.cumsum(1) - 1
    # the other values go to one more column after all others
    packed = values.new_empty(values.shape[0], width + 1)
    packed.scatter_(1, column.masked_fill_(~selected, width).clamp_(max=width), values)
    return packed[:, :width], selected.sum(1).clamp_(max=width)


def window_spans(
    query_start_loc: Tensor,
    seq_lens: Tensor,
    token_to_req: Tensor,
    first: int,
    window: int,
    *,
    replay_start: Tensor | None = None,
    causal: bool = True,
) -> tuple[Tensor, Tensor]:
    """([T] int64, [T] int64) the first position of each token's window, and the position after its last.

    token_to_req: [T] int64, -1 for tokens that are not real: these have any span. first: as in `positions_of`.
    replay_start: [>= R] int32 - no window of a request has a
    position before it; None is 0. causal: the `window` positions up to the token's own; else the `window` positions
    before the query tokens of its request, and all of these.
    """
    if causal:
        end = positions_of(query_start_loc, seq_lens, token_to_req, first) + 1
        start = end - window
    else:
        end = seq_lens.long()[_rows(token_to_req)]
        start = end - query_start_loc.diff().long()[_rows(token_to_req)] - window
    if replay_start is not None:
        start = torch.maximum(start, replay_start.long()[_rows(token_to_req)])
    return start.clamp_(min=0), end


def window_indices(
    start: Tensor, end: Tensor, is_valid: Tensor, token_to_req: Tensor, pages: PageTable, width: int
) -> tuple[Tensor, Tensor]:
    """Slots of each token's window: positions start .. end - 1, ascending, at most `width`, then -1.

    start, end, token_to_req: [T] int64. is_valid: [T] bool - other rows are empty, as those of a token_to_req of -1.
    Returns ([T, width] int64, lens [T] int64).
    """
    lens = (end - start).clamp_(0, width).masked_fill_(~is_valid | (token_to_req < 0), 0)
    columns = torch.arange(width, device=start.device)
    visible = columns < lens[:, None]
    return _translate(start[:, None] + columns, visible, pages, token_to_req), lens


def compute_global_topk_indices_and_lens(
    topk_indices: Tensor,
    visible_lens: Tensor,
    token_to_req: Tensor,
    block_table: Tensor,
    block_size: int,
    out: tuple[Tensor, Tensor],
) -> None:
    """Turn request-local entry numbers into slots of the compressed cache.

    topk_indices: [T, K] int32, any row stride. visible_lens: [T] int32 - entries each token may see, 0 for padding;
    numbers at or past it count as absent. token_to_req: [T] int32; a request the table lacks has no entries.
    block_table: [R, N] int32.
    out: ([T, K] int32 slots in the same columns, [T] int32 lens). A length counts the columns up to the last visible
    entry, with absent ones between.
    """
    indices, lens = out
    request = token_to_req.long()
    unknown = (request < 0) | (request >= block_table.shape[0])
    visible = (topk_indices >= 0) & (topk_indices < visible_lens.masked_fill(unknown, 0)[:, None])
    pages = PageTable(block_table, block_size)
    slots = _translate(topk_indices, visible, pages, request.masked_fill(unknown, 0))
    indices.copy_(slots)
    ends = torch.arange(1, topk_indices.shape[1] + 1, device=slots.device, dtype=torch.int32)
    lens.copy_(torch.where(visible, ends, 0).amax(1) if slots.shape[1] else torch.zeros_like(lens))


def combine_topk_swa_indices(
    topk_indices: Tensor | None,
    tokens: ChunkTokens,
    out: tuple[Tensor, Tensor],
    *,
    swa: PageTable | None = None,
    compressed: PageTable | None = None,
) -> None:
    """One index list per query into the gathered rows of a chunk: selected entries, then its window, then -1.

    topk_indices: [t, >=1] int32 entry numbers, or None on window-only layers.
    out: ([t, >=topk+window] int32, [t] int32). Entry numbers that are negative or not visible are left out, and the
    visible ones move together, so that the window follows them directly. Entry numbers of a row are distinct, as an
    indexer makes them; of repeated ones at most `topk` are used.
    swa, compressed: the tables that the rows were gathered with. A record without a block was not gathered, so it is
    absent here too; without a table every block is assumed to exist.
    """
    (indices, lens), visible_lens, topk = out, tokens.visible_lens, tokens.topk
    start = tokens.query_start_loc - tokens.query_start_loc[0]
    request = token_to_req_indices(start, indices.shape[0])
    is_valid, request = tokens.is_valid & (request >= 0), _rows(request)
    position = positions_of(start, tokens.seq_lens, request)
    gathered = (tokens.seq_lens - tokens.gather_lens)[request]
    first = torch.maximum(position - (tokens.window - 1), gathered).clamp_(min=0)
    count = (position + 1 - first).clamp_(min=0).masked_fill_(~is_valid, 0)
    base = request * tokens.rows
    columns = torch.arange(indices.shape[1], device=indices.device)
    entries, num_selected = None, torch.zeros_like(count)
    if topk_indices is not None and visible_lens is not None and topk:
        visible = (topk_indices >= 0) & (topk_indices < visible_lens[:, None]) & is_valid[:, None]
        if compressed is not None:
            visible &= _exists(topk_indices, visible, compressed, request)
        entries, num_selected = _compact(topk_indices, visible, topk)
    in_window = (columns >= num_selected[:, None]) & (columns < (num_selected + count)[:, None])
    position = (first - num_selected)[:, None] + columns
    row = position + (base + tokens.offset - gathered)[:, None]
    if swa is not None:
        in_window &= _exists(position, in_window, swa, request)
    indices.copy_(row.masked_fill_(~in_window, -1))
    if entries is not None:
        is_entry = columns[:topk] < num_selected[:, None]
        indices[:, :topk] = torch.where(is_entry, (entries + base[:, None]).int(), indices[:, :topk])
    lens.copy_(num_selected + count)


def build_ragged_indices_from_dense(indices: Tensor, lens: Tensor, num_slots: int, out: tuple[Tensor, Tensor]) -> None:
    """Dense rows in CSR form: the first `lens` columns of each, with -1 for values outside [0, num_slots).

    indices: [T, K] int32. lens: [T] int32. out: (flat [>= T*K] int32, indptr [T+1] int32). Entries of `flat` at or
    after indptr[-1] are undefined. The capacity comes from the shapes, so nothing is read back; where rows begin
    comes from lengths alone.
    """
    # not `< num_slots`: torch truncates that to 32 bits
    exists = (indices >= 0) & (indices <= min(num_slots - 1, _LARGEST_SLOT))
    _pack(indices.masked_fill(~exists, -1), lens, out)


def compute_global_topk_ragged_indices_and_indptr(
    topk_indices: Tensor,
    visible_lens: Tensor,
    token_to_req: Tensor,
    block_table: Tensor,
    block_size: int,
    out: tuple[Tensor, Tensor],
    row_lens: Tensor | None = None,
) -> None:
    """Turn request-local entry numbers into ragged rows of slots of the compressed cache.

    Arguments are those of `compute_global_topk_indices_and_lens`. out: (flat [>= T*K] int32, indptr [T+1] int32).
    A row has min(visible_lens, K) places: first the slots of its visible entries in their order, then -1. Entry
    numbers are distinct, as an indexer makes them. row_lens: [T] int32 - places of each row instead.
    """
    slots = torch.empty_like(topk_indices, memory_format=torch.contiguous_format)
    dense = slots, torch.empty_like(visible_lens)
    compute_global_topk_indices_and_lens(topk_indices, visible_lens, token_to_req, block_table, block_size, out=dense)
    present, count = _compact(slots, slots >= 0, slots.shape[1])
    is_past = torch.arange(slots.shape[1], device=slots.device) >= count[:, None]
    _pack(present.masked_fill(is_past, -1), visible_lens if row_lens is None else row_lens, out)


def _pack(rows: Tensor, lens: Tensor, out: tuple[Tensor, Tensor]) -> None:
    """The first `lens` of each row [T, K], one row after the other, and the start of each."""
    flat, indptr = out
    inside = torch.arange(rows.shape[1], device=rows.device) < lens[:, None]
    packed, _ = _compact(rows.reshape(1, -1), inside.reshape(1, -1), rows.numel())
    flat[: rows.numel()].copy_(packed[0])
    indptr[:1].zero_()
    indptr[1:].copy_(inside.sum(1).cumsum(0))


def get_compressed_slot_mapping(
    positions: Tensor, is_valid: Tensor, token_to_req: Tensor, block_table: Tensor, block_size: int, ratio: int
) -> Tensor:
    """[T] int64 slot of the entry that a token completes, -1 for tokens that complete none and for padding.

    A token completes entry pos // ratio when (pos + 1) is a multiple of ratio. block_size: records per block.
    """
    completes = is_valid & (token_to_req >= 0) & (positions >= 0) & ((positions + 1) % ratio == 0)
    pages = PageTable(block_table, block_size)
    return _translate((positions // ratio)[:, None], completes[:, None], pages, token_to_req)[:, 0]


def visible_entries(positions: Tensor, is_valid: Tensor, ratio: int, out: Tensor | None = None) -> Tensor:
    """[T] int32 entries that each token sees, (position + 1) // ratio: `compressed_lens` from positions alone.

    For engines that fill metadata themselves; nothing is read on the host. positions: [T] int64. is_valid: [T] bool -
    other tokens see none. out: [T] int32, written and returned; None: a new tensor.
    """
    seen = torch.div(positions + 1, ratio, rounding_mode="floor").clamp_(min=0).masked_fill_(~is_valid, 0)
    return seen.int() if out is None else out.copy_(seen)


def build_token_maps(query_start_loc: Tensor, slot_mapping: Tensor, out: tuple[Tensor, Tensor]) -> None:
    """The request of each real token, -1 for all other tokens: the one place where the validity of a token is decided.

    A token is real if a request has it and its window slot is not negative; tokens at or after S have no slot. Every
    other op takes a token of -1 as absent: nothing of it is read, it sees nothing, and nothing of it is stored.

    query_start_loc: [R+1] int32. slot_mapping: [S] int64. out: ([>= T] int32 request, [>= T] bool - whether the token
    is real, the same fact); all rows are written.
    """
    token_to_req, is_valid = out
    mapped = min(is_valid.shape[0], slot_mapping.shape[0])
    request = token_to_req_indices(query_start_loc, token_to_req.shape[0])
    request[:mapped].masked_fill_(slot_mapping[:mapped] < 0, -1)
    request[mapped:].fill_(-1)
    token_to_req.copy_(request)
    torch.ge(request, 0, out=is_valid)


def build_window_indices(
    tokens: StepTokens,
    pages: PageTable,
    window: int,
    out: tuple[Tensor, Tensor],
    *,
    replay_start: Tensor | None = None,
    causal: bool = True,
) -> None:
    """Windows of a run of tokens; see `window_spans` and `window_indices`.

    pages: of the window cache. out: ([n, width] int32 slots, [>= n] int32 lens, 0 from n on).
    """
    rows, lens = out
    n, request = rows.shape[0], tokens.token_to_req.long()
    start, end = window_spans(
        tokens.query_start_loc, tokens.seq_lens, request, tokens.first, window, replay_start=replay_start, causal=causal
    )
    slots, counts = window_indices(start, end, tokens.is_valid, request, pages, rows.shape[1])
    rows.copy_(slots)
    lens[:n].copy_(counts)
    lens[n:].zero_()


def build_gather_lens(
    query_start_loc: Tensor, seq_lens: Tensor, window: int, out: Tensor, *, replay_start: Tensor | None = None
) -> None:
    """Trailing tokens of each request that its queries can see through the window; 0 for requests without tokens.

    query_start_loc: [n+1] int32, any base. seq_lens: [n] int32. out: [n] int32. replay_start: [>= n] int32 or None, as
    in `window_spans`.
    """
    query_lens = query_start_loc.diff()
    context = seq_lens - query_lens
    if replay_start is not None:
        context = torch.clamp(context - replay_start[: context.shape[0]], min=0)
    seen = context.clamp_(max=window - 1) + query_lens
    out.copy_(seen.masked_fill_(query_lens == 0, 0))


def build_cached_mask(tokens: StepTokens, num_cached: Tensor, ratio: int, out: Tensor) -> None:
    """Whether each token is below the end of what its request has in a cache: that a step must not write again.

    num_cached: [>= R] int32 - tokens that each request has there; tokens that are not real are not cached. ratio: the
    end is rounded down to a multiple of it. out: [T] bool.
    """
    known, request = tokens.token_to_req >= 0, tokens.token_to_req.long().clamp_(min=0)
    if not tokens.seq_lens.shape[0]:
        out.zero_()
        return
    end = num_cached.long().clamp(min=0)[request]
    end -= end % ratio
    position = positions_of(tokens.query_start_loc, tokens.seq_lens, request)
    torch.logical_and(position < end, known, out=out)


def build_compressed_slot_mapping(tokens: StepTokens, pages: PageTable, ratio: int, out: tuple[Tensor, Tensor]) -> None:
    """Slot of the entry each token completes, see `get_compressed_slot_mapping`, and how many entries it can see.

    pages: of the compressed cache. out: ([>= n] int64 slots, -1 from n on; [>= n] int32 lens, 0 from n on).
    """
    build_owned_slot_mapping(_ALL, tokens, pages, ratio, out)


def build_owned_slot_mapping(
    ownership: Ownership, tokens: StepTokens, pages: PageTable, ratio: int, out: tuple[Tensor, Tensor]
) -> None:
    """`build_compressed_slot_mapping` of one rank: slots of its entries, and how many of them a token sees.

    pages: of this rank: its entry number e is in column e // block_size. out: ([>= n] int64 slots, -1 for tokens that
    complete no entry or another rank's; [>= n] int32 counts of entries of this rank).
    """
    slots, lens = out
    n, request = tokens.token_to_req.shape[0], tokens.token_to_req.long()
    position = positions_of(tokens.query_start_loc, tokens.seq_lens, request)
    entry, is_valid = torch.div(position, ratio, rounding_mode="floor"), tokens.is_valid & (request >= 0)
    is_owned = is_valid & (ownership.owner(entry) == ownership.rank)
    # the position that the token would have if this rank's entries were all there are
    local = ownership.local(entry) * ratio + position % ratio
    slots[:n] = get_compressed_slot_mapping(local, is_owned, request, pages.block_table, pages.block_size, ratio)
    slots[n:].fill_(-1)
    lens[:n] = ownership.counts(visible_entries(position, is_valid, ratio))
    lens[n:].zero_()


def transient_bytes(max_elements: int, max_tokens: int) -> int:
    """Upper bound, in bytes, of the temporaries of any op above: int64 columns that exist at the same time."""
    return 64 * max_elements + 256 * (max_tokens + 1)

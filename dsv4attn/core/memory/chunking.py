"""Cuts the prefill part of a batch into chunks that fit the workspace. Integers only, no tensors.

A chunk is a run of whole requests, or a run of one request's query tokens when that request alone is too large. Two
areas are bounded: rows gathered (requests x the longest one's rows) and elements of the index matrix (tokens x
columns). The number of requests is not: many short prompts share one launch, and one long prompt takes the memory of
one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from attrs import evolve, frozen

from dsv4attn.core.argument_checks import round_up
from dsv4attn.core.contract.limits import Limits
from dsv4attn.core.memory.workspace import ALIGNMENT
from dsv4attn.core.model.geometry import LayerGeometry
from dsv4attn.errors import ArgumentError

__all__ = ["ChunkBounds", "PrefillChunk", "cut_chunk", "plan_prefill_chunks", "plan_row_chunks"]


@frozen
class ChunkBounds:
    """Upper bounds of a chunk's memory on one layer.

    rows: gathered rows; 0 for backends that read pages and gather nothing.
    index_elements: elements of the index matrix, tokens x columns.
    alignment: columns of the index matrix are rounded up to a multiple of this.
    tokens: query tokens; 0: any number.
    window: columns of the index matrix for the window; 0 is the layer's own.
    """

    rows: int
    index_elements: int
    alignment: int
    window: int = 0
    tokens: int = 0

    @classmethod
    def of(
        cls,
        layer: LayerGeometry,
        limits: Limits,
        *,
        gathered: bool,
        alignment: int,
        row_bytes: int,
        index_copies: int = 1,
        scratch_bytes: int = 0,
    ) -> ChunkBounds:
        """Bounds within `limits`.

        Without `limits.max_workspace_bytes` a chunk may gather one worst-case request. That cap lowers the bounds, at
        most to the needs of a single query token at full context.
        scratch_bytes: the backend's scratch in the same arena.
        """
        widest = widest_columns(layer, limits, alignment, gathered=gathered)
        elements = max(min(limits.max_index_elements, limits.max_num_batched_tokens * widest), widest)
        entries = layer.entries(limits.max_model_len)
        rows = entries + layer.window - 1 + limits.max_num_batched_tokens if gathered else 0
        least = entries + layer.window if gathered else 0
        if limits.max_workspace_bytes is None:
            return cls(rows, elements, alignment)
        # half of what the cap leaves after one worst-case token goes to the index matrix, the rest to rows
        small, element = small_bytes(limits), 4 * index_copies
        cap = (limits.max_workspace_bytes - scratch_bytes) // ALIGNMENT * ALIGNMENT
        floor = least * row_bytes + widest * element + small
        if cap < floor:
            least_cap = round_up(floor, ALIGNMENT) + scratch_bytes
            expected = f"at least {least_cap}, the cost of one query token at max_model_len={limits.max_model_len}"
            hint = "raise the cap, lower max_model_len, or use a backend that reads pages in prefill"
            actual = limits.max_workspace_bytes
            raise ArgumentError("max_workspace_bytes", expected=expected, actual=actual, hint=hint)
        share = 2 if gathered else 1
        elements = min(elements, widest + (cap - floor) // (share * element))
        rows = min(rows, (cap - small - element * elements) // row_bytes)
        return cls(rows, elements, alignment)


def small_bytes(limits: Limits) -> int:
    """Bytes of a chunk without rows and index columns: lengths, offsets, per-request vectors, alignment."""
    return 8 * (limits.max_num_batched_tokens + 1) + 16 * (limits.max_num_reqs + 1) + 8 * ALIGNMENT


def widest_topk(layer: LayerGeometry, limits: Limits) -> int:
    """Most compressed columns of a query within limits."""
    return _columns(layer, limits.max_model_len)


def _columns(layer: LayerGeometry, seq_len: int) -> int:
    """Compressed columns of a query: at least one on a layer with a compressed cache, for a -1."""
    return layer.topk or max(layer.entries(seq_len), 1) if layer.has_entries else 0


def widest_columns(layer: LayerGeometry, limits: Limits, alignment: int, *, gathered: bool) -> int:
    """Most columns of the index matrix of a prefill chunk. Wider windows than the layer's are never gathered."""
    window = layer.window if gathered else max(layer.window, limits.prefill_window_columns)
    return round_up(widest_topk(layer, limits) + window, alignment)


@frozen
class PrefillChunk:
    """One chunk: requests and tokens are numbered within the prefill part.

    request_start, request_end: first request, and the end: the number after the last one.
    token_start, token_end: first query token, and the end.
    tail: query tokens of a sliced request after this chunk. The chunk sees a sequence that is `tail` tokens shorter.
    entries: N - compressed rows of each request in the workspace, the most that any of them has.
    gather: window rows of each request in the workspace; M = entries + gather are all rows of a request.
    topk: compressed columns of the index matrix, the most entries that a query of the chunk can select.
    is_slice: whether this is a part of one request's query tokens.
    """

    request_start: int
    request_end: int
    token_start: int
    token_end: int
    tail: int
    entries: int
    gather: int
    topk: int
    is_slice: bool = False

    @property
    def num_requests(self) -> int:
        """Requests in the chunk."""
        return self.request_end - self.request_start

    @property
    def num_tokens(self) -> int:
        """Query tokens in the chunk."""
        return self.token_end - self.token_start


def plan_prefill_chunks(
    seq_lens: Sequence[int], query_lens: Sequence[int], layer: LayerGeometry, bounds: ChunkBounds
) -> Iterator[PrefillChunk]:
    """Cut the prefill part into chunks that respect `bounds`; every token is in exactly one.

    seq_lens, query_lens: host values of the prefill requests, seq_len counting this step's tokens.
    """
    request, token = 0, 0
    while request < len(seq_lens):
        end, tokens, entries, gather, topk = request, 0, 0, 0, 0
        while end < len(seq_lens):
            cost = _cost(seq_lens[end], query_lens[end], layer, bounds)
            grown = (max(entries, cost[0]), max(gather, cost[1]), max(topk, cost[2]))
            if not _fits(end + 1 - request, tokens + query_lens[end], *grown, layer, bounds):
                break
            end, tokens, (entries, gather, topk) = end + 1, tokens + query_lens[end], grown
        if end > request:
            yield PrefillChunk(request, end, token, token + tokens, 0, entries, gather, topk)
        else:
            yield from _slices(request, token, seq_lens[request], query_lens[request], layer, bounds)
            end, tokens = request + 1, query_lens[request]
        request, token = end, token + tokens


def plan_row_chunks(
    seq_lens: Sequence[int], num_tokens: int, layer: LayerGeometry, most: int
) -> Iterator[PrefillChunk]:
    """Cut the prefill part into chunks of at most `most` tokens, whose rows name pages and need no other token's."""
    longest = max(seq_lens, default=0)
    entries, topk = layer.entries(longest), _columns(layer, longest)
    for start in range(0, num_tokens, most):
        yield PrefillChunk(0, len(seq_lens), start, min(start + most, num_tokens), 0, entries, 0, topk)


def cut_chunk(
    chunk: PrefillChunk, start: int, stop: int, query_lens: Sequence[int], layer: LayerGeometry
) -> Iterator[PrefillChunk]:
    """The tokens of a chunk from `start` to `stop`, cut into whole requests and parts of requests.

    query_lens: of all prefill requests. A part of a request is a slice; it needs no more memory than the chunk.
    """
    first = chunk.token_start
    run = []  # whole requests, which stay together
    for request in range(chunk.request_start, chunk.request_end):
        end = chunk.token_end if chunk.is_slice else first + query_lens[request]
        low, high = max(first, start), min(end, stop)
        if (low, high) == (first, end):
            run.append((request, first, end))
        elif low < high:
            if run:
                yield _joined(chunk, run)
                run = []
            yield evolve(
                chunk,
                request_start=request,
                request_end=request + 1,
                token_start=low,
                token_end=high,
                tail=chunk.tail + end - high,
                gather=min(chunk.gather, high - low + layer.window - 1),
                is_slice=True,
            )
        first = end
    if run:
        yield _joined(chunk, run)


def _joined(chunk: PrefillChunk, run: Sequence[tuple[int, int, int]]) -> PrefillChunk:
    """A part of a chunk that is whole requests, each given as (request, first token, end)."""
    (first, token, _), (last, _, end) = run[0], run[-1]
    return evolve(chunk, request_start=first, request_end=last + 1, token_start=token, token_end=end)


def _cost(seq_len: int, query_len: int, layer: LayerGeometry, bounds: ChunkBounds) -> tuple[int, int, int]:
    """(compressed entries, window rows, index columns for entries) of a request."""
    gather = query_len + min(seq_len - query_len, layer.window - 1) if query_len else 0
    if not layer.has_entries:
        return 0, gather, 0
    entries = layer.entries(seq_len)
    # combining moves visible entries together, so a short context needs few columns; translation needs all of them
    selected = (min(entries, layer.topk) if bounds.rows else layer.topk) if layer.topk else max(entries, 1)
    return entries, gather, selected


def _fits(
    requests: int, tokens: int, entries: int, gather: int, topk: int, layer: LayerGeometry, bounds: ChunkBounds
) -> bool:
    width = round_up(topk + (bounds.window or layer.window), bounds.alignment)
    rows_fit = bounds.rows == 0 or requests * (entries + gather) <= bounds.rows
    tokens_fit = bounds.tokens == 0 or tokens <= bounds.tokens
    return rows_fit and tokens_fit and tokens * width <= bounds.index_elements


def _slices(
    request: int, token: int, seq_len: int, query_len: int, layer: LayerGeometry, bounds: ChunkBounds
) -> Iterator[PrefillChunk]:
    """Cut one request along its query tokens."""
    prefix, done = seq_len - query_len, 0
    while done < query_len:
        low, high = 1, query_len - done
        while low < high:  # most tokens that fit: the cost only grows with them
            middle = (low + high + 1) // 2
            cost = _cost(prefix + done + middle, middle, layer, bounds)
            low, high = (middle, high) if _fits(1, middle, *cost, layer, bounds) else (low, middle - 1)
        cost = _cost(prefix + done + low, low, layer, bounds)
        tail = query_len - done - low
        yield PrefillChunk(request, request + 1, token + done, token + done + low, tail, *cost, is_slice=True)
        done += low

"""Sizes of what ranks exchange and merge: bytes of a token, rows of a piece, views of the workspace.

They are functions of shapes alone, and part of the plan of the workspace, so they stand here and not with the code that
exchanges.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from attrs import evolve

from dsv4attn.core.argument_checks import round_up
from dsv4attn.core.cache.layout import KVCacheLayout
from dsv4attn.core.contract.limits import Limits
from dsv4attn.core.contract.rank_ops import MergeScratch
from dsv4attn.core.memory.workspace import ALIGNMENT, simultaneous_bytes
from dsv4attn.core.model.geometry import LayerGeometry
from dsv4attn.core.tensorspec import BufferSpec
from dsv4attn.core.torch_ops import merge

__all__ = [
    "ALL_HEADS_VIEWS",
    "ARENA",
    "KEYS_ARENA",
    "MOST_SHARES",
    "PAGE_TOKENS",
    "PART_TOKENS",
    "PIECE_BYTES",
    "all_heads",
    "attention_bytes",
    "candidate_bytes",
    "key_bytes",
    "key_specs",
    "key_tokens",
    "keys_are_less",
    "merge_bytes",
    "merge_specs",
    "part_tokens",
    "piece_bytes",
    "piece_rows",
    "selection_transient_bytes",
    "share_pieces",
]

ARENA = "ranks"
"""The arena of the workspace for attention over ranks. Its views live through the calls of the other arenas."""
KEYS_ARENA = "keys"
"""The arena of the workspace for the keys of all ranks that prefill attends to."""
PAGE_TOKENS = 256
"""Most tokens of a compressed page whose keys are gathered, so that the plan needs no page size."""
PIECE_BYTES = 16 * 2**20
"""Most bytes that a rank receives in one exchange, unless one token needs more. Two are under way at a time."""
PART_TOKENS = 512
"""Least tokens of a prefill chunk that is cut off, so that its exchange overlaps the attention of the next chunk."""
MOST_SHARES = 4
"""Most pieces of a rank's share of a prefill."""
ALL_HEADS_VIEWS = 3
"""The last views of `merge_specs` where ranks divide heads: q, out and lse of all heads."""
_FP32 = torch.float32
_SORTING = 64
"""Bytes for each candidate of all ranks while the best are found: numbers, scores, and their orders in 64 bits."""


def attention_bytes(heads: int, dim: int, element_bytes: int) -> int:
    """Bytes that a rank sends for one token of one layer: out and lse of all heads. It receives as much of each other.

    element_bytes: of q.
    """
    return heads * (dim * element_bytes + 4)


def candidate_bytes(topk: int) -> int:
    """Bytes that a rank sends for one token of a layer that selects: score and number of each candidate."""
    return 8 * topk


def piece_rows(ranks: int, row_bytes: int) -> int:
    """Most tokens of one exchange. row_bytes: that a rank sends for a token."""
    return max(PIECE_BYTES // (row_bytes * ranks), 1)


def piece_bytes(rows: int, heads: int, dim: int, element_bytes: int) -> tuple[int, int]:
    """(bytes of out, bytes of out and lse) that a rank sends for some tokens; out is filled up to whole fp32."""
    out = round_up(rows * heads * dim * element_bytes, 4)
    return out, out + 4 * rows * heads


def share_pieces(tokens: int) -> int:
    """Number of pieces a rank splits its prefill share into, so that sending one overlaps computing the next."""
    return min(max(tokens // PART_TOKENS, 1), MOST_SHARES, tokens)


def part_tokens(ranks: int, row_bytes: int) -> int:
    """Most tokens of a prefill chunk of attention over ranks."""
    return max(piece_rows(ranks, row_bytes), PART_TOKENS)


def merge_specs(
    ranks: int,
    tokens: int,
    heads: int,
    dim: int,
    dtype: torch.dtype,
    *,
    divides_heads: bool = False,
    merge_scratch: MergeScratch = merge.merge_scratch,
) -> tuple[BufferSpec, ...]:
    """Views of attention over ranks: of all tokens, lse; of a piece, what is sent and received, and merge scratch.

    heads, dim, dtype: of q on one rank. Where tokens are more than a piece, what is sent and received has a second
    place, for the next piece. divides_heads: what is sent has a part for each rank then, queries are gathered where
    parts are received later, and the last views are q, out and lse of all heads. merge_scratch: of `RankOps`.
    """
    size = dtype.itemsize
    rows = min(piece_rows(ranks, attention_bytes(heads, dim, size)), tokens)
    _, sent = piece_bytes(rows, heads, dim, size)
    places, every = 2 if rows < tokens else 1, (tokens, ranks * heads)
    of_all_heads = ((*every, dim), dtype), ((*every, dim), dtype), (every, _FP32)
    return (
        ((tokens, heads), _FP32),
        ((places, ranks * sent if divides_heads else sent), torch.uint8),
        ((places, ranks * sent), torch.uint8),
        *merge_scratch(rows, heads, dim),
        *(of_all_heads if divides_heads else ()),
    )


def merge_bytes(
    ranks: int,
    layer: LayerGeometry,
    limits: Limits,
    q_dtype: torch.dtype | None = None,
    *,
    divides_heads: bool = False,
    merge_scratch: MergeScratch = merge.merge_scratch,
) -> int:
    """Bytes of ARENA for any step within limits.

    layer: with entries, and the heads of one rank. q_dtype: of q; None: bf16 or fp32. divides_heads, merge_scratch: as
    in `merge_specs`.
    """
    sizes = ranks, limits.max_num_batched_tokens, layer.num_heads, layer.head_dim
    dtypes = (torch.bfloat16, _FP32) if q_dtype is None else (q_dtype,)
    views = (merge_specs(*sizes, t, divides_heads=divides_heads, merge_scratch=merge_scratch) for t in dtypes)
    return max(map(simultaneous_bytes, views))


def selection_transient_bytes(ranks: int, layer: LayerGeometry, max_tokens: int) -> int:
    """Temporaries of a selection over ranks, without those of a tile: all ranks' candidates for the tokens of a piece.

    layer: one that selects.
    """
    rows = min(piece_rows(ranks, candidate_bytes(layer.topk)), max_tokens)
    return _SORTING * rows * layer.topk * (ranks + 1)


def keys_are_less(ranks: int, tokens: int, heads: int, entries: int, *, divides_heads: bool) -> bool:
    """Whether prefill sends less if keys are gathered than if parts are: counted in rows of head_dim values.

    tokens: of prefill. heads: of a rank. entries: places of all ranks' entries that are sent. A quantised entry is half
    of such a row, which is left out: gathered keys are written once more, too.
    """
    parts, own_share_rows = (2 * tokens * heads, 0) if divides_heads else (tokens * heads, -(-tokens // ranks) * heads)
    return ranks > 1 and entries // ranks + own_share_rows < parts


def key_tokens(ranks: int, max_model_len: int) -> int:
    """Most tokens whose entries are gathered for a step: those of one longest sequence, in whole pages of each rank."""
    return round_up(max_model_len, PAGE_TOKENS * ranks)


def key_specs(ranks: int, pages: int, page_bytes: int) -> tuple[BufferSpec, ...]:
    """Views of gathered keys: page numbers of a rank; pages of all ranks; of a piece, what is sent and received.

    pages: of one rank. page_bytes: without padding. What is sent and received has a second place where pages are more
    than a piece.
    """
    piece = min(piece_rows(ranks, page_bytes), pages)
    places = 2 if piece < pages else 1
    return (
        ((pages,), torch.int32),
        ((ranks * pages, page_bytes), torch.uint8),
        ((places, piece, page_bytes), torch.uint8),
        ((places, ranks * piece, page_bytes), torch.uint8),
    )


def key_bytes(ranks: int, layer: LayerGeometry, limits: Limits, layout: KVCacheLayout) -> int:
    """Bytes of KEYS_ARENA for any step within limits. layout: of the compressed cache."""
    entries = layer.entries(key_tokens(ranks, limits.max_model_len))
    whole, page = entries * layout.record_bytes, layer.entries(PAGE_TOKENS) * layout.record_bytes
    # pages may be one record each; where all is not one piece there are two, of a page of every rank at least
    pieces = whole if whole <= PIECE_BYTES else 2 * min(whole, max(PIECE_BYTES, ranks * page))
    sizes = 4 * -(-entries // ranks), whole, -(-pieces // ranks), pieces
    return sum(round_up(size, ALIGNMENT) for size in sizes)


@lru_cache(maxsize=256)
def all_heads(layer: LayerGeometry, ranks: int) -> LayerGeometry:
    """A layer with the heads of all ranks; the same object for equal layers, as prepared steps are keyed by it.

    layer: with the heads of one rank. Every rank has as many.
    """
    return evolve(layer, num_heads=layer.num_heads * ranks)

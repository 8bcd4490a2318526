"""Calls of attention on tensors without memory, for recordings of what their launches compile."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

import torch

from dsv4attn.backends._triton.compiling.variant import WIDE
from dsv4attn.backends._triton.launching.recorded import meta_rows
from dsv4attn.core.cache.layout import KVCacheLayout, PagedKVCache
from dsv4attn.core.cache.selected_keys import DenseIndices, GatheredKeys, PagedKeys, RaggedIndices, RequestRows
from dsv4attn.core.contract.attention_call import AttentionCall, AttentionOptions
from dsv4attn.core.contract.raw_query import RawQuery
from dsv4attn.core.model.geometry import LayerGeometry


def meta_calls(
    layer: LayerGeometry,
    keys: Sequence[PagedKeys] | GatheredKeys,
    dtype: torch.dtype,
    *,
    sinks: Sequence[bool],
    lses: Sequence[bool],
    alignment: int = WIDE,
    raw: bool = False,
) -> Iterator[AttentionCall]:
    """Calls without scratch, one for each of `sinks` and `lses`. `forward_mqa` never asks for the largest logits.

    dtype: of q and out. sinks, lses: whether heads have sinks, and whether the log-sum-exp is an output. alignment: of
    the rows of q and out, see `meta_rows`. raw: whether q is raw.
    """
    rows = keys.rows if isinstance(keys, GatheredKeys) else keys[0].rows
    tokens, heads = len(rows.indptr) - 1 if isinstance(rows, RaggedIndices) else len(rows.lens), layer.num_heads
    q = meta_rows(tokens, heads, layer.head_dim, dtype=dtype, alignment=alignment)
    attn_sink, log_sums = (meta_rows(*shape, dtype=torch.float32) for shape in ((heads,), (tokens, heads)))
    table = meta_rows(2, layer.rope_dim, dtype=torch.float32)
    raw_q = RawQuery(meta_rows(tokens, dtype=torch.int64), table, 0.0) if raw else None
    for sink, lse in product(sinks, lses):
        given = attn_sink if sink else None, q, log_sums if lse else None
        yield AttentionCall(layer, q, keys, *given, options=AttentionOptions(raw_q=raw_q))


def meta_pages(
    caches: Sequence[PagedKVCache], *, tokens: int = 2, width: int = 2, ragged: bool = False
) -> list[PagedKeys]:
    """Keys in caches, `width` of each for a token."""
    if ragged:
        rows = RaggedIndices(meta_rows(tokens * width), meta_rows(tokens + 1), width)
        return [PagedKeys(cache, rows) for cache in caches]
    return [PagedKeys(cache, DenseIndices(meta_rows(tokens, width), meta_rows(tokens))) for cache in caches]


def meta_gathered(layout: KVCacheLayout, *, tokens: int = 2, ragged: bool = False) -> GatheredKeys:
    """Keys in rows of the workspace, where all views begin at multiples of 16 bytes, and rows have no gaps."""
    kv = torch.empty(2, layout.head_dim, dtype=layout.row_dtype, device="meta")
    indices = RaggedIndices(meta_rows(tokens), meta_rows(tokens + 1), 1) if ragged else None
    return GatheredKeys(kv, indices or DenseIndices(meta_rows(tokens, 1), meta_rows(tokens)))


def meta_request(call: AttentionCall, max_tokens: int) -> RequestRows:
    """The rows of a call as those of one request, in a step whose requests have at most `max_tokens` rows."""
    return RequestRows(meta_rows(call.q.shape[0]), meta_rows(2), max_tokens)

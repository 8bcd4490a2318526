"""Scores of index keys on Hopper: the launcher of `kernels`, for requests of several tokens with 64 heads.

A function returns False or None for a call that it does not serve. The shared functions of `_triton.layer.indexer`
serve every call and give results of the same meaning.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4attn.backends._triton.attention.launch import divider
from dsv4attn.backends._triton.compiling.variant import WIDE
from dsv4attn.backends._triton.interpreted import INTERPRETED
from dsv4attn.backends._triton.launching.pdl import uses_pdl
from dsv4attn.backends._triton.launching.recorded import meta_cache, meta_rows, recorded
from dsv4attn.backends._triton.launching.runtime import launch, multiprocessors
from dsv4attn.backends._triton.sizes import cdiv
from dsv4attn.core.cache.layout import Fp8Format, KVCacheLayout, PagedKVCache
from dsv4attn.core.contract.warmup import WarmupSpec
from dsv4attn.core.model.geometry import LayerKind
from dsv4attn.core.reprs import frozen
from dsv4attn.core.torch_ops.arguments import TokenMap
from dsv4attn.core.torch_ops.indexer import IndexQuery, check_paged_logits, dialect_of

HEADS, DIM, PAGE = 64, 128, 64
"""Heads and dims of a query; entries of a tile, which are all in one page."""
LAYOUT = KVCacheLayout.index_fp8(DIM)
TOKENS = 2
"""Tokens of a block, which share the copied keys. On pages, requests of fewer tokens are not served."""
WARPS, REGISTERS, PROGRAMS = 4, 128, 4
"""Warps of a program, registers of a thread, and programs of a multiprocessor. All registers are used.

H200, torch 2.11, Triton 3.6, 2026-11-23: 2,048 tokens over 8,192 gathered keys take 265 us; with eight warps for four
tokens 274, with three programs of 168 registers 278, with two programs of two accumulators each 280.
"""


def score(
    query: IndexQuery, cache: PagedKVCache, token_map: TokenMap, scores: Tensor, maxima: Tensor | None, run: int
) -> bool:
    """See `index_logits.score`. False if this kernel does not serve the call; nothing is written then."""
    tokens, entries = scores.shape
    paging, run = paging_of(cache), PAGE if maxima is None else run
    table = token_map.block_table
    if paging is None or not serves(query) or tokens < TOKENS * table.shape[0] or run & (run - 1):
        return False
    if tokens and entries:
        keys = _Keys(cache.tensor, paging, block_table=table, token_to_req=token_map.token_to_req)
        _launch(query, keys, token_map.visible_lens, scores, maxima=maxima, run=run)
    return True


def fp8_paged_mqa_logits(
    q: Tensor,
    kv_cache: PagedKVCache | Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    max_model_len: int,
) -> Tensor | None:
    """See `torch_ops.indexer.fp8_paged_mqa_logits`. None if this kernel does not serve the call."""
    cache, lens = check_paged_logits(q, kv_cache, weights, context_lens)
    requests, tokens_per_req, _, _ = q.shape
    query = IndexQuery(q.flatten(0, 1), weights)
    paging = paging_of(cache)
    if tokens_per_req < TOKENS or paging is None or not (serves(query) and block_tables.numel()):
        return None
    logits = torch.empty(requests * tokens_per_req, max_model_len, dtype=torch.float32, device=q.device)
    if logits.numel():
        keys = _Keys(cache.tensor, paging, block_table=block_tables, tokens_per_req=tokens_per_req)
        _launch(query, keys, lens.reshape(-1).contiguous(), logits)
    return logits


def paging_of(cache: PagedKVCache) -> tuple[int, ...] | None:
    """Arguments of the kernel that describe the pages; None if the kernel does not read such pages."""
    page, data, scale_offset, scale = cache.memory.record_strides
    served = (
        cache.layout == LAYOUT
        and (data, scale) == (DIM, 4)
        and not (cache.tensor.data_ptr() % WIDE or page % WIDE or cache.block_size % PAGE or scale_offset % 4)
        and cache.num_blocks > 0
    )
    return (cache.num_blocks, cache.block_size, *divider(cache.block_size), page, scale_offset) if served else None


def fp8_mqa_logits(
    q: Tensor, kv: tuple[Tensor, Tensor], weights: Tensor, cu_seqlen_ks: Tensor, cu_seqlen_ke: Tensor
) -> Tensor | None:
    """See `torch_ops.indexer.fp8_mqa_logits`. None if this kernel does not serve the call."""
    rows, scales = kv
    query = IndexQuery(q, weights)
    dense = rows.shape[1] == DIM and rows.stride() == (DIM, 1) and rows.data_ptr() % WIDE == 0
    same = dialect_of(q) is dialect_of(rows) is Fp8Format.OCP
    if not (serves(query) and dense and same and scales.stride(0) == 1):
        return None
    logits = torch.empty(q.shape[0], rows.shape[0], dtype=torch.float32, device=q.device)
    if logits.numel():
        keys = _Keys(raw(rows), (0, PAGE, *divider(PAGE), 0, 0), scales=scales)
        _launch(query, keys, cu_seqlen_ke, logits, first=cu_seqlen_ks)
    return logits


def serves(query: IndexQuery) -> bool:
    """Whether the kernel of this file serves queries of these shapes, strides and alignments."""
    return not INTERPRETED and reads(query)


def reads(query: IndexQuery) -> bool:
    """Whether kernels for Hopper read queries of these shapes, strides and alignments."""
    values, weights = query.values, query.weights
    step = values.data_ptr() | values.stride(0) | values.stride(1)
    known = values.shape[1:] == (HEADS, DIM) and values.element_size() == 1 and query.scales is None
    return known and step % WIDE == 0 and values.stride(2) == weights.stride(1) == 1


def raw(tensor: Tensor) -> Tensor:
    """Codes as bytes."""
    return tensor.view(torch.uint8)


@frozen(eq=False)
class _Keys:
    """Index keys as arguments of the kernel.

    tensor: pages, or gathered keys.
    paging: arguments that describe the pages, see `paging_of`.
    scales: of gathered keys; None on pages.
    block_table: blocks of each request; None for gathered keys.
    token_to_req: [T] int32 - None: every request has `tokens_per_req` tokens, or keys are gathered.
    """

    tensor: Tensor
    paging: tuple[int, ...]
    scales: Tensor | None = None
    block_table: Tensor | None = None
    token_to_req: Tensor | None = None
    tokens_per_req: int = 0


def _launch(
    query: IndexQuery,
    keys: _Keys,
    lens: Tensor,
    out: Tensor,
    *,
    first: Tensor | None = None,
    maxima: Tensor | None = None,
    run: int = PAGE,
) -> None:
    """Launch the kernel.

    lens, first: [T] int32 - end and start of the keys that a token sees; first None: 0.
    run: entries of one maximum, a power of two.
    """
    from dsv4attn.backends.sm90.indexer.kernels import score_index  # not where kernels are interpreted

    table, values = keys.block_table, raw(query.values)
    (tokens, entries), programs = out.shape, PROGRAMS * multiprocessors()
    blocks, tiles = cdiv(tokens, TOKENS), cdiv(entries, PAGE)
    span = cdiv(tiles, max(programs // blocks, 1)) * PAGE
    if table is None:
        grid, requests, last_column, held = blocks * cdiv(entries, span), 0, 0, entries
    else:
        grid, (requests, columns) = min(programs, blocks * cdiv(entries, run)), table.shape
        last_column, held = columns - 1, min(columns * keys.paging[1], entries)
    launch(
        score_index,
        (grid,),
        (
            values, query.weights, keys.tensor, keys.scales, table, keys.token_to_req, lens, first, out, maxima,
            tokens, requests, keys.tokens_per_req, entries, span, run.bit_length() - 1, held,
            values.stride(0), values.stride(1), query.weights.stride(0),
            0 if table is None else table.stride(0), last_column, *keys.paging, out.stride(0),
            0 if maxima is None else maxima.stride(0),
        ),
        {"FILL": keys.token_to_req is None, "PDL": uses_pdl("sm_90")},
        num_warps=WARPS,
        maxnreg=REGISTERS,
    )  # fmt: skip


def may_serve(bounds: WarmupSpec) -> bool:
    """Whether kernels for Hopper serve some calls of a model within the bounds."""
    model = bounds.model
    if model is None or not {"indexer", "selection"} & set(bounds.parts):
        return False
    if all(layer.kind is not LayerKind.CSA for layer in bounds.layers):
        return False
    return (model.index_n_heads, model.index_head_dim) == (HEADS, DIM) and bounds.index_layout == LAYOUT


@recorded
def variants(*, logits: bool = False) -> None:
    """Every variant that selection can need.

    logits: also the variants of `fp8_paged_mqa_logits` and `fp8_mqa_logits`.
    """
    query, cache, token_map = meta_query(TOKENS)
    scores = meta_rows(TOKENS, PAGE, dtype=torch.float32)
    for maxima in (None, scores):
        score(query, cache, token_map, scores, maxima, PAGE)
    if logits:
        codes, lens = query.values, token_map.visible_lens
        fp8_paged_mqa_logits(codes[None], cache, query.weights, lens[None], token_map.block_table, PAGE)
        # keys without gaps, as many as heads
        fp8_mqa_logits(codes, (codes[0], query.weights[0]), query.weights, lens, lens)


def meta_query(tokens: int) -> tuple[IndexQuery, PagedKVCache, TokenMap]:
    """Queries, index keys and a token map without memory: of one request of so many tokens."""
    values = torch.empty(tokens, HEADS, DIM, dtype=torch.float8_e4m3fn, device="meta")
    weights, lens = meta_rows(tokens, HEADS, dtype=torch.float32), meta_rows(tokens)
    return IndexQuery(values, weights), meta_cache(LAYOUT), TokenMap(meta_rows(1, 2), lens, lens)

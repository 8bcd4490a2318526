"""`dsv4_decode_topk` and `dsv4_prefill_topk` on dsv4attn, over pages as they are: no gathered keys, no plan.

Both are registered as solution "triton". TokenSpeed 0.1.4 passes `block_table_base_offsets` to kernels of the solutions
"triton" and "gluon" alone. A kernel of another solution would select from a compact block table and return numbers that
lack the offset, and nothing would say so. No kernel of `dsv4_plan` is registered, so that TokenSpeed's own kernels, if
one is asked for by name, find the plan that they know.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4attn import IndexQuery, KVCacheLayout, TokenMap
from dsv4attn_tokenspeed.kernels import backend_for, ints, kernel, paged, trait

_DIM = 128
_LAYOUTS = {"mxfp4": KVCacheLayout.index_mxfp4(_DIM), "fp8_scaled": KVCacheLayout.index_fp8(_DIM)}


def decode_topk(
    index_q: tuple[Tensor, Tensor],
    weights: Tensor,
    index_k_cache: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    *,
    page_size: int,
    topk: int,
    max_context_len: int,
    plan: object,
    index_k_format: str,
    block_table_base_offsets: Tensor | None = None,
    out: Tensor | None = None,
    persistent_topk_workspace: Tensor | None = None,
) -> Tensor:
    """See TokenSpeed. Numbers of entries are in ascending order, then -1."""
    query = _query(index_q, weights, index_k_format)
    tokens = query.values.shape[0]
    rows = torch.arange(tokens, dtype=torch.int32, device=block_table.device)
    token_map = TokenMap(ints(block_table, *block_table.shape), rows, ints(context_lens, -1)[:tokens])
    offsets = None if block_table_base_offsets is None else block_table_base_offsets[:tokens] * page_size
    return _select(query, index_k_cache, token_map, topk, max_context_len, index_k_format, page_size, offsets, out)


def prefill_topk(
    index_q: tuple[Tensor, Tensor],
    weights: Tensor,
    index_k_cache: Tensor,
    block_table: Tensor,
    cu_seq_lens: Tensor,
    cu_seqlen_k_start: Tensor,
    cu_seqlen_k_end: Tensor,
    seq_lens: Tensor,
    *,
    page_size: int,
    topk: int,
    max_seqlen_k: int,
    index_k_format: str,
    block_table_base_offsets: Tensor | None = None,
    gathered_k: tuple[Tensor, Tensor] | None = None,
    gather_workspace: tuple[Tensor, Tensor] | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, None]:
    """See TokenSpeed. Candidates of a query must begin with the first entry of its request, or an assertion fails."""
    query = _query(index_q, weights, index_k_format)
    requests = torch.searchsorted(cu_seq_lens[1:], cu_seqlen_k_start, out_int32=True, right=True)
    requests.clamp_(max=block_table.shape[0] - 1)
    visible = torch.minimum(seq_lens, cu_seqlen_k_end - cu_seqlen_k_start).clamp_(min=0)
    at_first = (cu_seqlen_k_start == cu_seq_lens[requests]) | (visible == 0)
    torch._assert_async(at_first.all(), "candidates of a query must begin with the first entry of its request")  # noqa: SLF001
    token_map = TokenMap(ints(block_table, *block_table.shape), requests, ints(visible, -1))
    offsets = None if block_table_base_offsets is None else block_table_base_offsets[requests] * page_size
    return (
        _select(query, index_k_cache, token_map, topk, max_seqlen_k, index_k_format, page_size, offsets, out),
        None,
    )


def _query(index_q: tuple[Tensor, Tensor], weights: Tensor, index_k_format: str) -> IndexQuery:
    """Queries as dsv4attn has them: the four exponents of a head's e2m1 codes are one int32 of TokenSpeed's."""
    values, scales = index_q
    values = values.flatten(0, -3)
    weights = weights.reshape(values.shape[:2])
    if index_k_format == "fp8_scaled":
        return IndexQuery(values, weights)
    return IndexQuery(
        values, weights, scales.reshape(values.shape[:2]).contiguous().view(torch.uint8).unflatten(1, (-1, 4))
    )


def _select(
    query: IndexQuery,
    index_k_cache: Tensor,
    token_map: TokenMap,
    topk: int,
    longest: int,
    index_k_format: str,
    page_size: int,
    offsets: Tensor | None,
    out: Tensor | None,
) -> Tensor:
    """The best entries [T, topk] int32 of each token, with the offset of its row of a compact block table."""
    tokens, heads = query.values.shape[:2]
    selected = query.values.new_empty((tokens, topk), dtype=torch.int32) if out is None else out[:tokens]
    keys, backend = paged(index_k_cache, _LAYOUTS[index_k_format], page_size), backend_for(selected.device, heads, 64)
    backend.layer_ops.select_topk(query, keys, token_map, selected, longest)
    if offsets is not None:
        selected.copy_(torch.where(selected >= 0, selected + offsets[:, None], -1))
    return selected


def register() -> None:
    """Register both kernels. A signature of queries has one format of keys."""
    traits = {"head_dim": trait(_DIM), "index_k_format": trait(*_LAYOUTS)}
    dtypes = {"weights": torch.float32, "index_k_cache": torch.uint8}
    signatures = [{"q": dtype, **dtypes} for dtype in (torch.uint8, torch.float8_e4m3fn)]
    for op, function in (("dsv4_decode_topk", decode_topk), ("dsv4_prefill_topk", prefill_topk)):
        kernel(op, function, signatures, traits, solution="triton")

"""The indexer's scores: queries rotated and quantised, and logits of index keys, gathered or on pages.

Score of entry e for token t: sum over heads h of weight[t, h] * max(0, q[t, h] . k[e]); 1 / sqrt(Di * Hi), and the
scale of a quantised q, are folded into the weights. An entry that a token does not see has -inf.
"""

from __future__ import annotations

from math import inf

import torch
from torch import Tensor

from dsv4attn.core.cache.index_records import quantize_index, read_index_keys, slots_of
from dsv4attn.core.cache.key_codecs import dequantize_keys, power_of_two
from dsv4attn.core.cache.layout import Fp8Format, KVCacheLayout, PagedKVCache, check_layout
from dsv4attn.core.model.rope import angles_at, apply_rope
from dsv4attn.core.reprs import frozen
from dsv4attn.core.torch_modes import without_modes
from dsv4attn.core.torch_ops.tiles import PLAIN, Arithmetic, tiles
from dsv4attn.errors import ArgumentError

__all__ = [
    "IndexQuery",
    "check_paged_logits",
    "dialect_of",
    "fp8_mqa_logits",
    "fp8_paged_mqa_logits",
    "indexer_q_rope_quant",
    "scores",
    "scores_bytes",
]


_QUERY_BYTES = 24
"""Temporaries of a query for each of its elements."""


@frozen(eq=False)
class IndexQuery:
    """Queries of the indexer in the format of its keys.

    values: [T, Hi, Di] fp8, fp32 or bf16; or [T, Hi, Di / 2] uint8, e2m1 codes.
    scales: [T, Hi, Di / 32] uint8 exponents of e2m1 codes, else None: the scale of fp8 is folded into the weights.
    weights: [T, Hi] fp32 - of each head, with all factors of the score.
    """

    values: Tensor
    weights: Tensor
    scales: Tensor | None = None

    def tokens(self, part: slice) -> IndexQuery:
        """The queries of some of the tokens.

        part: rows to keep.
        """
        scales = None if self.scales is None else self.scales[part]
        return IndexQuery(self.values[part], self.weights[part], scales)

    def rows(self, part: slice) -> Tensor:
        """[t, Hi, Di] fp32 values of some tokens.

        part: rows to return.
        """
        if self.scales is None:
            return self.values[part].float()
        layout = KVCacheLayout.index_mxfp4(2 * self.values.shape[-1])
        return dequantize_keys(self.values[part], self.scales[part], layout)


@without_modes
def indexer_q_rope_quant(
    q: Tensor, weights: Tensor, positions: Tensor, cos_sin_cache: Tensor, layout: KVCacheLayout
) -> IndexQuery:
    """Rotate q [T, Hi, Di] on its trailing dims, and quantise it as the layout of the keys asks.

    weights: [T, Hi]. positions: [T] int64. q and weights: bf16 or fp32. layout: of the index keys; `rows` quantises
    nothing.
    """
    rope, (count, heads, dim) = cos_sin_cache.shape[-1], q.shape
    folded = weights.float() * (dim**-0.5 * heads**-0.5)
    values = q.new_empty(count, heads, dim * layout.code_bits // 8, dtype=torch.uint8)
    exponents = q.new_empty(count, heads, layout.num_groups, dtype=torch.uint8)
    if not layout.is_quantised:
        values = q.new_empty(q.shape, dtype=layout.dtype)
    for part in tiles(count, _QUERY_BYTES * heads * dim):
        turned = apply_rope(q[part, :, -rope:], angles_at(cos_sin_cache, positions[part])[:, None])
        turned = torch.cat([q[part, :, :-rope].float(), turned], -1)
        if layout.is_quantised:
            values[part], exponents[part] = quantize_index(turned, layout)
        else:
            values[part] = turned.to(layout.dtype)
    if not layout.is_quantised:
        return IndexQuery(values, folded)
    if layout.fp8_format is None:
        return IndexQuery(values, folded, exponents)
    return IndexQuery(values.view(layout.fp8_format.dtype), folded * power_of_two(exponents).squeeze(-1))


def scores(q: Tensor, weights: Tensor, k: Tensor, arithmetic: Arithmetic = PLAIN) -> Tensor:
    """[t, E] fp32 of q [t, Hi, Di], weights [t, Hi] and each token's own keys k [t, E, Di], all fp32."""
    products = arithmetic.bmm(q, k.mT).relu_()
    return arithmetic.bmm(weights[:, None], products).squeeze(1)


def scores_bytes(heads: int, dim: int, entries: int) -> int:
    """Temporaries of a token that is scored against `entries` entries: its keys and their products."""
    return entries * (16 * dim + 8 * heads + 64)


def check_paged_logits(
    q: Tensor, kv_cache: PagedKVCache | Tensor, weights: Tensor, context_lens: Tensor
) -> tuple[PagedKVCache, Tensor]:
    """The cache, and lengths [B, n], of `fp8_paged_mqa_logits`. Raises ArgumentError unless they fit q and weights."""
    requests, tokens, heads, dim = q.shape
    layout = KVCacheLayout.index_fp8(dim, fp8_format=dialect_of(q))
    if isinstance(kv_cache, Tensor):
        kv_cache = PagedKVCache(kv_cache.squeeze(2) if kv_cache.ndim == 4 else kv_cache, layout)
    check_layout(kv_cache.layout, layout, "kv_cache")
    if context_lens.ndim == 1:
        context_lens = context_lens[:, None]
    if tuple(context_lens.shape) != (requests, tokens):
        expected = f"[{requests}, {tokens}], a length for each token"
        hint = "pass (position + 1) // ratio of each token: it does not follow from the length of the request"
        raise ArgumentError("context_lens", expected=expected, actual=list(context_lens.shape), hint=hint)
    if tuple(weights.shape) != (requests * tokens, heads):
        raise ArgumentError("weights", expected=f"[{requests * tokens}, {heads}]", actual=list(weights.shape))
    return kv_cache, context_lens


@without_modes
def fp8_paged_mqa_logits(
    q: Tensor,
    kv_cache: PagedKVCache | Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    schedule_metadata: object = None,
    max_model_len: int = 0,
) -> Tensor:
    """Logits [B * n, max_model_len] fp32 of index keys on pages; -inf from a token's length on.

    q: [B, n, Hi, Di] fp8, n tokens of each request. kv_cache: pages of `index_fp8` records, or uint8 [blocks, P, (1,)
    132].
    weights: [B * n, Hi] fp32, scales folded. context_lens: [B], [B, 1] or [B, n] int32, in entries; with several tokens
    a request every token has its own length, as an entry covers several tokens. Negative lengths count as 0.
    block_tables: [B, N] int32. schedule_metadata: not read. max_model_len: columns, in entries.
    """
    cache, context_lens = check_paged_logits(q, kv_cache, weights, context_lens)
    requests, tokens, heads, dim = q.shape
    lens, request = context_lens.reshape(-1), torch.arange(requests, device=q.device).repeat_interleave(tokens)
    query = IndexQuery(q.flatten(0, 1), weights)
    logits = torch.full((requests * tokens, max_model_len), -inf, device=q.device, dtype=torch.float32)
    columns = torch.arange(max_model_len, device=q.device)
    for part in tiles(logits.shape[0], scores_bytes(heads, dim, max_model_len)):
        seen = columns < lens[part, None]
        slots = slots_of(columns.expand(seen.shape), block_tables, request[part], cache).masked_fill(~seen, -1)
        part_scores = scores(query.rows(part), weights[part], read_index_keys(cache, slots))
        logits[part] = part_scores.masked_fill(slots < 0, -inf)
    return logits


@without_modes
def fp8_mqa_logits(
    q: Tensor, kv: tuple[Tensor, Tensor], weights: Tensor, cu_seqlen_ks: Tensor, cu_seqlen_ke: Tensor
) -> Tensor:
    """Logits [T, N] fp32 of gathered index keys; -inf outside of a token's rows cu_seqlen_ks .. cu_seqlen_ke - 1.

    q: [T, Hi, Di] fp8. kv: (k [N, Di] fp8, scales [N] fp32). weights: [T, Hi] fp32. cu_seqlen_ks, cu_seqlen_ke: [T]
    int32.
    """
    k, scales = kv
    dialect_of(q)
    keys, columns = k.float() * scales[:, None], torch.arange(k.shape[0], device=q.device)
    logits = q.new_full((q.shape[0], k.shape[0]), -inf, dtype=torch.float32)
    for part in tiles(q.shape[0], 8 * q.shape[1] * k.shape[0] + 64):
        products = (q[part].float() @ keys.T).relu_()
        part_scores = torch.bmm(weights[part][:, None], products).squeeze(1)
        seen = (columns >= cu_seqlen_ks[part, None]) & (columns < cu_seqlen_ke[part, None])
        logits[part] = part_scores.masked_fill(~seen, -inf)
    return logits


def dialect_of(q: Tensor) -> Fp8Format:
    """The dialect of fp8 queries, and so of their keys."""
    dialects = {dialect.dtype: dialect for dialect in Fp8Format}
    if q.dtype not in dialects:
        expected = "torch.float8_e4m3fn or torch.float8_e4m3fnuz"
        raise ArgumentError("q", expected=expected, actual=q.dtype, hint="quantise it with indexer_q_rope_quant")
    return dialects[q.dtype]

"""Protocol of the steps around attention: compressor, indexer, selection, hyper-connections. Part of the contract.

A backend may bring some of them, in `BackendDefaults.layer_steps`; `dsv4attn.core.torch_ops` is the definition of
every step, and the default. Steps of another class may lack those of DeepSeek-V4.1, which are marked so:
`torch_ops.complete_steps` fills them in. Core checks arguments before it calls a step. A token of no request, -1 in
`token_to_req`, is not real: it has no slot and sees no entry. It may have any position and any values, and no step
looks its position up outside of a table or stores anything of it. Letters: Hi heads of the indexer, Di dims of an index
key, n residual streams, d hidden size, w channels of a compressor's kv, r its ratio.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor

    from dsv4attn.core.cache.layout import KVCacheLayout, PagedKVCache
    from dsv4attn.core.cache.ownership import Ownership
    from dsv4attn.core.torch_ops.indexer import IndexQuery

__all__ = ["LAYER_STEPS", "LayerSteps", "Linear", "RankSelection", "takes_bf16_norm"]

Linear: TypeAlias = "Callable[[Tensor, Tensor], Tensor]"
"""`linear(x, weight)`: x [..., K] times weight [N, K] transposed."""

DELAYED = "mhc_pre_delayed", "mhc_fused_post_pre_delayed", "mhc_collapse"
"""Hyper-connections of DeepSeek-V4.1."""
LATENTS = "compress_latents", "norm_rope_store"
"""Compressor of DeepSeek-V4.1."""
CANDIDATES = "select_candidates", "select_topk_of_candidates"
"""Selection in two levels of DeepSeek-V4.1."""
LAYER_STEPS: dict[str, tuple[str, ...]] = {
    "compressor": ("save_partial_states", "compress_norm_rope_store", *LATENTS),
    "indexer": ("indexer_q_rope_quant", "fp8_paged_mqa_logits", "fp8_mqa_logits"),
    "selection": ("select_topk", *CANDIDATES),
    "hyper_connections": ("mhc_pre", "mhc_post", "mhc_fused_post_pre", "hc_head", *DELAYED),
}
"""The parts of the layer around attention by the name that selection shows, with their steps."""


def takes_bf16_norm(steps: object) -> bool:
    """Whether a compressor's norm_weight may be given to the steps in bf16. Steps that do not say so get fp32."""
    return bool(getattr(steps, "bf16_norm", False))


class LayerSteps(Protocol):
    """The steps of the layer around attention.

    sum_bits: bits that sums of products of index codes keep, 24 in fp32. Some matrix units keep fewer of fp8 products.
    bf16_norm: whether `compress_norm_rope_store` takes a norm_weight in bf16 too; see `takes_bf16_norm`.
    """

    sum_bits: int
    bf16_norm: bool

    def save_partial_states(
        self, kv: Tensor, score: Tensor, ape: Tensor, positions: Tensor, cache: PagedKVCache, slot_mapping: Tensor
    ) -> None:
        """Write each token's kv, and its score plus the bias of its place in the window, to its state slot.

        kv, score: [T, w] fp32. ape: [r, w] fp32. positions: [T] int64. cache: `KVCacheLayout.compressor_state(w)`.
        slot_mapping: [S] int64; tokens at or behind S, and slots that do not exist, are skipped.
        """

    def compress_norm_rope_store(
        self,
        states: PagedKVCache,
        state_block_table: Tensor,
        token_to_req: Tensor,
        positions: Tensor,
        slot_mapping: Tensor,
        norm_weight: Tensor,
        eps: float,
        cos_sin_cache: Tensor,
        ratio: int,
        cache: PagedKVCache,
        *,
        overlap: bool,
    ) -> None:
        """Make the entries that the tokens of a step complete, from states that are all saved, and store them.

        Softmax of the scores over the window, RMSNorm, RoPE at the window's first position, quantise. states,
        state_block_table [R, N] int32: the state cache. token_to_req: [T] int32. positions: [T] int64, consecutive
        within a request. slot_mapping: [S] int64 slots of `cache`, negative for tokens that complete no entry.
        norm_weight: [d] fp32, or bf16 with `bf16_norm`. cos_sin_cache: [positions, rope] fp32. cache: of keys, or of
        index keys. overlap: whether an entry covers the window before its own too.
        """

    def indexer_q_rope_quant(
        self, q: Tensor, weights: Tensor, positions: Tensor, cos_sin_cache: Tensor, layout: KVCacheLayout
    ) -> IndexQuery:
        """Rotate q [T, Hi, Di] and quantise it as the layout of the index keys asks; q itself stays.

        weights: [T, Hi]. positions: [T] int64. q and weights: bf16 or fp32. Factors of the score are folded into the
        weights of the result.
        """

    def fp8_paged_mqa_logits(
        self,
        q: Tensor,
        kv_cache: PagedKVCache | Tensor,
        weights: Tensor,
        context_lens: Tensor,
        block_tables: Tensor,
        schedule_metadata: object = None,
        max_model_len: int = 0,
    ) -> Tensor:
        """Logits [B * n, max_model_len] fp32 of index keys on pages; -inf at and behind a token's length.

        For engines that select by themselves: core calls `select_topk` instead. q: [B, n, Hi, Di] fp8, n tokens of each
        request. kv_cache: pages of `index_fp8` records, or uint8 [blocks, P, (1,) 132]. weights: [B * n, Hi] fp32,
        scales folded. context_lens: [B], [B, 1] or [B, n] int32, in entries; negative ones count as 0. block_tables:
        [B, N] int32. schedule_metadata: may be ignored. max_model_len: columns, in entries.
        """

    def fp8_mqa_logits(
        self, q: Tensor, kv: tuple[Tensor, Tensor], weights: Tensor, cu_seqlen_ks: Tensor, cu_seqlen_ke: Tensor
    ) -> Tensor:
        """Logits [T, N] fp32 of gathered index keys; -inf outside of a token's rows cu_seqlen_ks .. cu_seqlen_ke - 1.

        As `fp8_paged_mqa_logits`, core does not call it. q: [T, Hi, Di] fp8. kv: (k [N, Di] fp8, scales [N] fp32).
        weights: [T, Hi] fp32. cu_seqlen_ks, cu_seqlen_ke: [T] int32.
        """

    def select_topk(
        self,
        query: IndexQuery,
        cache: PagedKVCache,
        block_table: Tensor,
        token_to_req: Tensor,
        visible_lens: Tensor,
        out: Tensor,
        max_entries: int,
    ) -> None:
        """Write the K entries with the largest scores of each token to out [T, K] int32, ascending, then -1.

        Exact: of equal scores the lower entry number wins; NaN is never chosen. Logits are never held for a whole
        context. cache: index keys. block_table: [R, N] int32. token_to_req: [T] int32. visible_lens: [T] int32 -
        entries that each token sees. max_entries: bound of `visible_lens`, known on the host.
        """

    def mhc_pre(
        self,
        residual: Tensor,
        fn: Tensor,
        hc_scale: Tensor,
        hc_base: Tensor,
        rms_eps: float,
        hc_pre_eps: float,
        hc_sinkhorn_eps: float,
        hc_post_mult_value: float = 2.0,
        sinkhorn_repeat: int = 20,
        norm_weight: Tensor | None = None,
        norm_eps: float = 1e-6,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(post [T, n, 1] fp32, comb [T, n, n] fp32, layer_input [T, d] like residual) of residual [T, n, d].

        fn: [2 n + n * n, n * d] fp32. hc_scale: [3] fp32 and hc_base: [2 n + n * n] fp32, of pre, post, comb. The first
        of `sinkhorn_repeat` iterations normalises columns only. norm_weight: [d] - of an RMSNorm of layer_input, or
        None.
        """

    def mhc_post(self, x: Tensor, residual: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        """[T, n, d] like residual: post_j * x + sum_i comb_ij * residual_i, summed over the first index of comb.

        x: [T, d] - output of the sublayer. residual: [T, n, d]. post: [T, n, 1] fp32. comb: [T, n, n] fp32.
        """

    def mhc_fused_post_pre(
        self,
        x: Tensor,
        residual: Tensor,
        post: Tensor,
        comb: Tensor,
        fn: Tensor,
        hc_scale: Tensor,
        hc_base: Tensor,
        rms_eps: float,
        hc_pre_eps: float,
        hc_sinkhorn_eps: float,
        hc_post_mult_value: float = 2.0,
        sinkhorn_repeat: int = 20,
        norm_weight: Tensor | None = None,
        norm_eps: float = 1e-6,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(residual, post, comb, layer_input): `mhc_post`, then `mhc_pre` of the new residual."""

    def hc_head(
        self, streams: Tensor, hc_fn: Tensor, hc_scale: Tensor, hc_base: Tensor, rms_eps: float, hc_eps: float
    ) -> Tensor:
        """[T, d] like streams: the sum of streams [T, n, d], each times the sigmoid of its gate plus hc_eps.

        hc_fn: [n, n * d] fp32. hc_scale: [1] fp32. hc_base: [n] fp32.
        """

    def compress_latents(
        self,
        kv: Tensor,
        score: Tensor | None,
        positions: Tensor,
        token_to_req: Tensor,
        norm_weight: Tensor,
        eps: float,
        ratio: int,
        states: PagedKVCache | None = None,
        state_block_table: Tensor | None = None,
    ) -> Tensor:
        """V4.1: latents [T, d] bf16, before RoPE, of the tokens that complete an entry; rows of others are zero.

        Ratio 1: the RMSNorm of kv; score, states and state_block_table are None. Else a softmax of the window's scores,
        channel by channel, weighs the window's kv, and the RMSNorm follows; then kv and scores of the tokens are saved
        as they are. kv, score: [T, d] fp32. positions: [T] int64; a request's tokens follow each other, with
        consecutive positions. token_to_req: [T] int32; a token of no request (-1) saves nothing, and its latent is
        zero. norm_weight: [d]. states: of `KVCacheLayout.compressor_state(d)`. state_block_table: [R, N] int32; the
        ring of a request has N blocks, and the token at position p the row p % (N * P) in it, P tokens to a block.
        Raises ArgumentError if scores or states are missing, or if there are tokens and the ring is smaller than the
        ratio.
        """

    def norm_rope_store(
        self,
        x: Tensor,
        positions: Tensor,
        slot_mapping: Tensor,
        norm_weight: Tensor | None,
        eps: float,
        cos_sin_cache: Tensor,
        ratio: int,
        cache: PagedKVCache,
    ) -> None:
        """V4.1: store keys from latents, or index keys from their projection.

        RMSNorm if it has a weight, rounded to bf16; RoPE on the trailing dims at the window's first position, (p // r)
        * r; quantise. x: [T, d] bf16 or fp32, which stays. positions: [T] int64. slot_mapping: [S] int64 slots of
        `cache`; tokens behind S, tokens that complete no entry, and slots that do not exist are skipped. norm_weight:
        [d], or None for keys. cos_sin_cache: [positions, rope] fp32. cache: of keys, or of index keys.
        """

    def select_candidates(
        self,
        query: IndexQuery,
        cache: PagedKVCache,
        block_table: Tensor,
        token_to_req: Tensor,
        visible_lens: Tensor,
        out: Tensor,
        block_size: int,
        max_entries: int,
    ) -> None:
        """V4.1: write the numbers of the N blocks with the largest scores of each token to out [T, N] int32, then -1.

        A block is block_size consecutive entries of a request, block 0 its first ones; its score is the largest among
        the entries of it that the token sees. The block of the newest of these, (visible_lens - 1) // block_size, is
        always written; of equal ones any, in any order. Other arguments are those of `select_topk`. Raises
        ArgumentError unless block_size is a power of two up to 512.
        """

    def select_topk_of_candidates(
        self,
        query: IndexQuery,
        cache: PagedKVCache,
        block_table: Tensor,
        token_to_req: Tensor,
        visible_lens: Tensor,
        candidates: Tensor,
        block_size: int,
        out: Tensor,
        max_entries: int,
    ) -> None:
        """V4.1: `select_topk` among the entries that are in one of the token's candidates [T, N] int32, and visible.

        candidates: of `select_candidates`, for the same tokens; a number that is negative, or of a block that does not
        exist, is none. Raises ArgumentError unless block_size is a power of two up to 512.
        """

    def mhc_pre_delayed(
        self,
        residual: Tensor,
        previous_pre: Tensor | None,
        fn: Tensor,
        hc_scale: Tensor,
        hc_base: Tensor,
        rms_eps: float,
        hc_pre_eps: float,
        hc_sinkhorn_eps: float,
        hc_post_mult_value: float = 2.0,
        sinkhorn_repeat: int = 20,
        norm_weight: Tensor | None = None,
        norm_eps: float = 1e-6,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """V4.1: (pre [T, n] fp32, post, comb, layer_input) of residual [T, n, d]; post and comb are `mhc_pre`'s.

        layer_input: the streams, each times its weight in `previous_pre` [T, n] fp32, the pre that the sublayer before
        this one returned; without one (None, in the first sublayer) stream 0 as it is. pre: has hc_pre_eps added, and
        is for the next sublayer. norm_weight, norm_eps: of an RMSNorm of layer_input, as in `mhc_pre`.
        """

    def mhc_fused_post_pre_delayed(
        self,
        x: Tensor,
        residual: Tensor,
        post: Tensor,
        comb: Tensor,
        previous_pre: Tensor | None,
        fn: Tensor,
        hc_scale: Tensor,
        hc_base: Tensor,
        rms_eps: float,
        hc_pre_eps: float,
        hc_sinkhorn_eps: float,
        hc_post_mult_value: float = 2.0,
        sinkhorn_repeat: int = 20,
        norm_weight: Tensor | None = None,
        norm_eps: float = 1e-6,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """V4.1: (residual, pre, post, comb, layer_input): `mhc_post`, then `mhc_pre_delayed` of the new residual."""

    def mhc_collapse(self, streams: Tensor, pre: Tensor) -> Tensor:
        """V4.1: [T, d] like streams: the sum of streams [T, n, d], each times its weight in pre [T, n] fp32."""

    def transient_bytes(self, max_tokens: int) -> int:
        """Upper bound on temporaries of the framework's allocator in any one step; 0 for kernels."""


class RankSelection(Protocol):
    """Optional steps of a selection over ranks; torch's where steps lack them. R ranks, T tokens, K entries of each.

    most_over_ranks: the largest K that they take.
    """

    most_over_ranks: int

    def propose_candidates(
        self,
        ownership: Ownership,
        query: IndexQuery,
        cache: PagedKVCache,
        block_table: Tensor,
        token_to_req: Tensor,
        visible_lens: Tensor,
        numbers: Tensor,
        scores: Tensor,
        max_entries: int,
    ) -> None:
        """`LayerSteps.select_topk` of this rank's entries, with the scores that it compared.

        numbers: [T, K] int32 - entry numbers of whole sequences, ascending, then -1. scores: [T, K] fp32 of them, -inf
        for none. max_entries: of this rank.
        """

    def choose_candidates(
        self, ownership: Ownership, numbers: Tensor, scores: Tensor, out: Tensor, max_entries: int
    ) -> None:
        """Write this rank's numbers of the K best candidates of all ranks to out [T, K] int32, ascending, then -1.

        numbers: [R, T, K] int32 and scores: [R, T, K] fp32 with equal strides, as `propose_candidates` wrote them on
        each rank. Of equal scores the lower entry number wins. max_entries: of whole sequences.
        """

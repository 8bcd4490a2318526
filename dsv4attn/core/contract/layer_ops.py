"""`LayerOps`: the ops around attention, one field an op: compressor, indexer, selection, hyper-connections.

Part of the contract. `dsv4attn.core.torch_ops` has the definition of every op, which is the default of its field and
says what the op computes. Arguments that travel together are structs: `TokenMap`, `StatePages`, `EntryNorm`. Core
checks arguments before it calls an op. A token of no request, -1 in `token_to_req`, is
not real: it has no slot and sees no entry. It may have any position and any values, and no op looks its position up
outside of a table or stores anything of it. Letters: Hi heads of the indexer, Di dims of an index key, n residual
streams, d hidden size, w channels of a compressor's kv, r its ratio.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

from attrs import evolve, fields_dict, frozen
from torch import Tensor

from dsv4attn.core.contract.op_names import CANDIDATES, DELAYED, LATENTS, LAYER_OPS
from dsv4attn.core.model.quantized_weight import BlockScaledWeight
from dsv4attn.core.reprs import fields_repr
from dsv4attn.core.torch_ops import candidates, compressor, hyper_connections, indexer, latents, norms, selection
from dsv4attn.core.torch_ops.arguments import EntryNorm, StatePages, TokenMap
from dsv4attn.core.torch_ops.tiles import TILE_BYTES, Arithmetic, arithmetic_of, batch_invariant_linear, linear

__all__ = ["CodedProducts", "EntryNorm", "LayerOps", "StatePages", "TokenMap", "default_layer_ops"]

Op: TypeAlias = Callable[..., Any]


def _torch_bytes(max_tokens: int) -> int:
    """A tile, and what an op makes for each token."""
    return 2 * TILE_BYTES + 256 * max_tokens


@frozen(repr=False)
class CodedProducts:
    """Products of few rows with the codes of fp8 weights, which are half of the bytes of their bf16 copies.

    The bits of a product are those of the backend's deterministic product with the bf16 copy: each code times its
    factor, rounded to bf16.

    rows: `rows(weight)` of a `BlockScaledWeight`: the number of rows up to which a product with its codes takes less
       time than one with its bf16 copy; 0 if it never does, and for weights that have no kernel. A layer asks when it
       takes its weights. The answer may depend on the values of the scales.
    multiply: `multiply(x, weight, out)` writes x [..., K] times weight [N, K] transposed to out [..., N]. x and out are
       bf16. Rows of x may lie apart. Rows of out may too, all at one distance: `out.view(-1, N)` is possible.
    """

    rows: Callable[[BlockScaledWeight], int]
    multiply: Callable[[Tensor, BlockScaledWeight, Tensor], None]

    __repr__ = fields_repr


@frozen
class LayerOps:
    """The ops of the layer around attention. The default of each is torch's definition.

    A backend that brings an op has `evolve(LayerOps(), select_topk=my_select_topk)` as its `layer_ops`. A deterministic
    backend begins with `default_layer_ops(deterministic=True)`. Arguments and results are those of the definition, but
    core never passes `deterministic`. Core calls ops with autocast off and without gradients.

    norm_q_kv: norms between the projections.
    save_partial_states, compress_norm_rope_store: the compressor. compress_latents, norm_rope_store: V4.1's.
    indexer_q_rope_quant: queries of the indexer. fp8_paged_mqa_logits, fp8_mqa_logits: logits for engines that select
       by themselves; core calls `select_topk` instead.
    select_topk: exact selection. select_candidates, select_topk_of_candidates: V4.1's, in two levels.
    mhc_pre, mhc_post, mhc_fused_post_pre, hc_head: hyper-connections. mhc_pre_delayed, mhc_fused_post_pre_delayed,
       mhc_collapse: V4.1's. `MixWeights` has the weights of those that make mixes.
    linear: products of a layer with its weights, see `torch_ops.tiles.Linear`. A table for deterministic layers brings
       one whose row bits do not depend on the number of rows, or leaves torch's, for which
       `batch_invariant_linear` stands in such layers.
    transient_bytes: `transient_bytes(max_tokens)`, an upper bound on temporaries of the framework's allocator in any
       one op; 0 for kernels.
    sum_bits: bits that sums of products of index codes keep, 24 in fp32. Some matrix units keep fewer of fp8 products.
    propose_candidates: `propose_candidates(ownership, query, cache, token_map, numbers, scores, max_entries)` selects
       among the entries of one rank as `select_topk`, with the scores that it compared.
       numbers: [T, K] int32 - entry numbers of whole sequences, ascending, then -1. scores: [T, K] fp32 of them, -inf
       for none. max_entries: of this rank. None: core scores the selected entries again.
    choose_candidates: `choose_candidates(ownership, numbers, scores, out, max_entries)` writes this rank's numbers of
       the K best candidates of all ranks to out [T, K] int32, ascending, then -1. numbers: [R, T, K] int32 and scores:
       [R, T, K] fp32 with equal strides, as `propose_candidates` wrote them on each rank. Of equal scores the lower
       entry number wins. max_entries: of whole sequences. None: torch chooses.
    most_over_ranks: the largest K that both take; 0 without them.
    coded: products with the codes of fp8 weights, which stand for `linear` in steps of few tokens. None: fp8 weights
       are multiplied as their bf16 copies.
    """

    norm_q_kv: Callable[..., tuple[Tensor, Tensor]] = norms.norm_q_kv
    save_partial_states: Op = compressor.save_partial_states
    compress_norm_rope_store: Op = compressor.compress_norm_rope_store
    compress_latents: Callable[..., Tensor] = latents.compress_latents
    norm_rope_store: Op = latents.norm_rope_store
    indexer_q_rope_quant: Callable[..., indexer.IndexQuery] = indexer.indexer_q_rope_quant
    fp8_paged_mqa_logits: Callable[..., Tensor] = indexer.fp8_paged_mqa_logits
    fp8_mqa_logits: Callable[..., Tensor] = indexer.fp8_mqa_logits
    select_topk: Op = selection.select_topk
    select_candidates: Op = candidates.select_candidates
    select_topk_of_candidates: Op = candidates.select_topk_of_candidates
    mhc_pre: Callable[..., tuple[Tensor, Tensor, Tensor]] = hyper_connections.mhc_pre
    mhc_post: Callable[..., Tensor] = hyper_connections.mhc_post
    mhc_fused_post_pre: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]] = hyper_connections.mhc_fused_post_pre
    hc_head: Callable[..., Tensor] = hyper_connections.hc_head
    mhc_pre_delayed: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]] = hyper_connections.mhc_pre_delayed
    mhc_fused_post_pre_delayed: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor, Tensor]] = (
        hyper_connections.mhc_fused_post_pre_delayed
    )
    mhc_collapse: Callable[..., Tensor] = hyper_connections.mhc_collapse
    linear: Callable[..., Tensor] = linear
    transient_bytes: Callable[[int], int] = _torch_bytes
    sum_bits: int = 24
    propose_candidates: Op | None = None
    choose_candidates: Op | None = None
    most_over_ranks: int = 0
    coded: CodedProducts | None = None

    def brings(self, name: str) -> bool:
        """Whether the op of this name is another than torch's.

        name: a field of this table.
        """
        op = getattr(self, name)
        # torch's with an option is a partial of the definition
        return (op.func if isinstance(op, partial) else op) not in (_DEFINITIONS[name], _INVARIANT.get(name))

    def arithmetic(self, *, deterministic: bool) -> Arithmetic:
        """What a layer multiplies with: the product of this table if it brings one, and else torch's.

        deterministic: whether bits of a row depend neither on other rows nor on how many there are.
        """
        arithmetic = arithmetic_of(deterministic)
        return evolve(arithmetic, linear=self.linear) if self.brings("linear") else arithmetic

    def sources(self, name: str) -> dict[str, str]:
        """For each part in `LAYER_OPS` who runs its ops: `name` if one of them is the backend's, else "reference".

        name: name of the backend that has this table.
        """
        return {part: name if any(map(self.brings, ops)) else "reference" for part, ops in LAYER_OPS.items()}

    def v41_sources(self, name: str) -> dict[str, str]:
        """For each op that only DeepSeek-V4.1's layers have, who runs it: `name`, or "reference" for torch.

        name: name of the backend that has this table.
        """
        return {op: name if self.brings(op) else "reference" for op in (*LATENTS, *CANDIDATES, *DELAYED)}


_WITH_OPTION = (
    "norm_q_kv", "compress_norm_rope_store", "compress_latents", "norm_rope_store", "select_topk", *CANDIDATES,
    "mhc_pre", "mhc_fused_post_pre", "hc_head", "mhc_pre_delayed", "mhc_fused_post_pre_delayed",
)  # fmt: skip
"""Ops of torch with an option `deterministic`."""
_DEFINITIONS: dict[str, Any] = {name: field.default for name, field in fields_dict(LayerOps).items()}
_INVARIANT: dict[str, Any] = {
    **{name: partial(_DEFINITIONS[name], deterministic=True) for name in _WITH_OPTION},
    "linear": batch_invariant_linear,
}
_TORCH = LayerOps(), LayerOps(**_INVARIANT)


def default_layer_ops(*, deterministic: bool = False) -> LayerOps:
    """All ops in torch. deterministic: bits of a token depend neither on other tokens nor on how many there are."""
    return _TORCH[deterministic]

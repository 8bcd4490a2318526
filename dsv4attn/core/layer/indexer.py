"""`Indexer`: selects the compressed entries that each token of a c4a layer attends to; `Candidates` of two levels."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dsv4attn.core.attention.checks import check_table
from dsv4attn.core.cache.layout import PagedKVCache
from dsv4attn.core.context_parallel.selection import SelectTopk
from dsv4attn.core.contract.layer_ops import LayerOps
from dsv4attn.core.contract.limits import Limits
from dsv4attn.core.layer.compressor import Compressor, LatentCompressor
from dsv4attn.core.layer.entries import visible_entries
from dsv4attn.core.metadata.forward_context import runs_as_captured
from dsv4attn.core.metadata.metadata import AttentionMetadata
from dsv4attn.core.model.geometry import LayerGeometry, ModelGeometry
from dsv4attn.core.model.weight_copies import WeightCopies
from dsv4attn.core.model.weights import IndexerWeights
from dsv4attn.core.reprs import frozen, one_line
from dsv4attn.core.torch_modes import is_capturing, without_modes
from dsv4attn.core.torch_ops.arguments import EntryNorm
from dsv4attn.core.torch_ops.selection import select_all
from dsv4attn.core.torch_ops.tiles import Linear

__all__ = ["Candidates", "Indexer"]


@frozen(eq=False)
class Candidates:
    """Candidate blocks of the tokens of a step, which one indexer publishes and later ones are restricted to.

    blocks: [max tokens, N] int32 - numbers of the blocks of each token, -1 for none.
    block_size: compressed entries of a block.
    """

    blocks: Tensor
    block_size: int

    def is_void(self, entries: int) -> bool:
        """Whether all blocks of a context of `entries` entries are candidates, so that nothing is restricted."""
        return -(-entries // self.block_size) <= self.blocks.shape[1]


class Indexer:
    """The indexer of one layer.

    shortcut: whether selection is skipped where every token sees at most K entries: all of them are selected then. Not
    for deterministic layers, as it also selects entries whose score is NaN. latents: compressor of the layer, where
    index keys are made of its latents (V4.1). publishes: candidates that this indexer writes. restricts: candidates
    of another indexer that this one selects from. select_topk: instead of that of `ops`. weights: the layer multiplies
    by `wq_b`, `weights_proj` and the matrices of the compressor. copies: of the layer.
    """

    def __init__(
        self,
        geometry: ModelGeometry,
        layer: LayerGeometry,
        limits: Limits,
        weights: IndexerWeights,
        cos_sin_cache: Tensor,
        ops: LayerOps,
        linear: Linear,
        copies: WeightCopies,
        *,
        shortcut: bool = True,
        latents: LatentCompressor | None = None,
        publishes: Candidates | None = None,
        restricts: Candidates | None = None,
        select_topk: SelectTopk | None = None,
    ) -> None:
        check_table(cos_sin_cache, layer, limits)
        self._heads, self._topk, self._ratio = geometry.index_n_heads, layer.topk, layer.compress_ratio
        self._eps = layer.eps
        self._limits, self._table, self._ops, self._linear = limits, cos_sin_cache, ops, linear
        self._shortcut, self._select_topk = shortcut, select_topk
        self._latents, self._publishes, self._restricts = latents, publishes, restricts
        self.compressor = None
        if weights.compressor is not None:
            self.compressor = Compressor(layer, weights.compressor, cos_sin_cache, ops, copies, "indexer.compressor")
        self._copies = copies
        self._load_own(weights)

    @one_line
    def __repr__(self) -> Iterator[str]:
        """Heads, entries that are selected, tokens of an entry, and device."""
        yield f"{self._heads} heads"
        yield f"{self._topk} entries of {self._ratio} tokens"
        yield f"on {self._table.device}"

    def load(self, weights: IndexerWeights) -> None:
        """Take weights with the shapes of those before; copies of them are made in the same memory."""
        self._load_own(weights)
        if self.compressor is not None:
            assert weights.compressor is not None
            self.compressor.load(weights.compressor)

    def _load_own(self, weights: IndexerWeights) -> None:
        """Take all weights but those of the compressor, and those by which the layer multiplies."""
        copies = self._copies
        self._wk = None if weights.wk is None else copies.dense("indexer.wk", weights.wk)
        k_norm = None if weights.k_norm is None else copies.plain("indexer.k_norm", weights.k_norm, torch.float32)
        self._key_norm = EntryNorm(k_norm, self._eps, self._table)

    def needs_queries(self, metadata: AttentionMetadata, entries: Tensor | None) -> bool:
        """Whether a step scores: not if it takes `entries`, nor if every token sees at most K, which are all selected.

        A layer that publishes candidates scores blocks of entries even then.
        """
        if entries is not None:
            return self._levels(metadata)[0] is not None
        return not self._takes_all(metadata)

    def _takes_all(self, metadata: AttentionMetadata) -> bool:
        capturing = self.is_captured()
        longest, (publishes, restricts) = self._longest(metadata), self._levels(metadata)
        return self._shortcut and not capturing and longest <= self._topk and publishes is restricts is None

    @without_modes
    def __call__(
        self,
        q: Tensor | None,
        weights: Tensor,
        kv_and_score: tuple[Tensor, Tensor] | None,
        positions: Tensor,
        metadata: AttentionMetadata,
        states: PagedKVCache | None,
        keys: PagedKVCache,
        topk_indices: Tensor,
        latents: Tensor | None = None,
        candidate_rows: Tensor | None = None,
        candidates: Tensor | None = None,
        entries: Tensor | None = None,
    ) -> None:
        """Store the index keys of a step, and write the selected entries of each token to `topk_indices` [>= T, K].

        q: [T', Hi * Di]; None where `needs_queries` says so. weights: [T', Hi] of the heads. kv_and_score: [T', W] fp32
        each, of the indexer's compressor, if it has one. positions: [T'] int64. states: of the indexer's compressor.
        keys: index keys; an indexer over the keys of another layer stores none. latents: [T, D] of the layer's
        compressor (V4.1). candidate_rows: [T] int64 - rows of the candidates that are those of the step's tokens; None:
        the same rows. candidates: the blocks of the candidates that it publishes, or is restricted to, or a copy of
        them in a compiled graph; None: the blocks themselves. entries: [>= T, K] int32, taken instead of a selection.
        """
        if self.compressor is not None:
            assert kv_and_score is not None
            assert states is not None
            self.compressor(*kv_and_score, positions, metadata, states, keys)
        elif self._latents is not None:
            assert latents is not None
            assert self._wk is not None
            self._latents.store(self._linear(latents, self._wk), positions, metadata, self._key_norm, keys)
        compressed = metadata.compressed
        assert compressed is not None
        tokens, out = metadata.swa.num_actual_tokens, topk_indices[: metadata.swa.num_actual_tokens]
        if entries is not None:
            out.copy_(entries[:tokens])
        elif q is None:
            select_all(visible_entries(metadata), out)
        if q is None:
            return
        longest, (publishes, restricts) = self._longest(metadata), self._levels(metadata)
        q = q[:tokens].unflatten(-1, (self._heads, -1))
        query = self._ops.indexer_q_rope_quant(q, weights[:tokens], positions[:tokens], self._table, keys.layout)
        token_map = compressed.token_map
        if publishes is not None:
            blocks = publishes.blocks if candidates is None else candidates
            self._ops.select_candidates(query, keys, token_map, blocks[:tokens], publishes.block_size, longest)
        if entries is not None:
            return
        if restricts is not None:
            blocks = restricts.blocks if candidates is None else candidates
            blocks = blocks[:tokens] if candidate_rows is None else blocks[candidate_rows[:tokens]]
            self._ops.select_topk_of_candidates(query, keys, token_map, blocks, restricts.block_size, out, longest)
        elif self._select_topk is not None:
            whole_from = None if metadata.whole is None else metadata.swa.num_decode_tokens
            self._select_topk(query, keys, token_map, out, longest, whole_from=whole_from)
        else:
            self._ops.select_topk(query, keys, token_map, out, longest)

    def is_captured(self) -> bool:
        """Whether a graph is being captured, or the step is run as a graph runs it."""
        return runs_as_captured() or is_capturing(self._table.device)

    def _longest(self, metadata: AttentionMetadata) -> int:
        """The most entries that a token of the step sees, or of any step that replays a graph."""
        compressed = metadata.compressed
        assert compressed is not None
        # a graph is replayed with longer contexts
        return (self._limits.max_model_len if self.is_captured() else compressed.max_seq_len) // self._ratio

    def _levels(self, metadata: AttentionMetadata) -> tuple[Candidates | None, Candidates | None]:
        """Candidates that are published in a step, and those that restrict its selection."""
        longest = self._longest(metadata)
        return _restricting(self._publishes, longest), _restricting(self._restricts, longest)


def _restricting(candidates: Candidates | None, entries: int) -> Candidates | None:
    """Candidates, or None if they restrict nothing in a context of `entries` entries."""
    return None if candidates is None or candidates.is_void(entries) else candidates

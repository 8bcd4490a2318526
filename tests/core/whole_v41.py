"""Whole layers of a small network of DeepSeek-V4.1, and the same layers token by token in float64 numpy.

Whose caches and choices a layer reads is written down by hand in `network_v41`; the oracle reads no geometry.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import attrs
import numpy as np
import torch

from dsv4attn.core.cache.layout import KVCacheLayout
from dsv4attn.core.contract.backend import Backend
from dsv4attn.core.contract.limits import Limits
from dsv4attn.selection import load_backend
from dsv4attn.testing import oracle, oracle_layer, oracle_v41
from dsv4attn.testing.judge import F64, stored
from tests.core.network_v41 import INDEX_OF, KV_OF, MODEL, RATIOS, TOPK, WINDOW, Steps
from tests.core.whole import Whole

BLOCKS, SIZE, PUBLISHER = 4, 2, 4
"""Candidate blocks of a token, entries of a block, and the layer that publishes them."""
CONSUMER = 6
SMALL_V41 = attrs.evolve(
    MODEL, head_dim=64, rope_dim=16, hidden_size=48, q_lora_rank=24, index_head_dim=32, num_heads=4, index_n_heads=32
)

FP32 = KVCacheLayout.rows(48, 16, dtype=torch.float32)
LIMITS = Limits(3, 48, 64, num_speculative_tokens=1)


class Exact:
    """A network in float64. weights: of each layer, by name."""

    def __init__(self, whole: Whole, index_layout: KVCacheLayout, seeds: Sequence[int], length: int) -> None:
        sizes = whole.geometry
        self.rope, self.scale, self.index_heads = sizes.rope_dim, sizes.head_dim**-0.5, sizes.index_n_heads
        self.dim, self.index_dim, self.groups = sizes.head_dim, sizes.index_head_dim, sizes.o_groups
        self.layouts = [whole.manager.caches[1].attention.swa.layout, self._entries_of(whole), index_layout]
        self.weights = [
            {name: value.double().numpy() for name, value in whole.weights[i].items()} for i in range(len(RATIOS))
        ]
        self.hidden = [whole.hidden(seed, length).double().numpy() for seed in seeds]
        self._made: dict[Any, F64] = {}

    @staticmethod
    def _entries_of(whole: Whole) -> KVCacheLayout:
        compressed = whole.manager.caches[1].attention.compressed
        assert compressed is not None
        return compressed.layout

    @cached_property
    def tables(self) -> list[Any]:
        """Frequencies of each layer."""
        yarn = oracle.Yarn(16.0, 64, 32.0, 1.0)
        return [oracle.rope_inv_freq(self.rope, 160000.0 if r else 10000.0, yarn if r else None) for r in RATIOS]

    def turned(self, layer: int, rows: F64, position: int, *, back: bool = False) -> F64:
        """Rows, rotated to a position."""
        return oracle.apply_rope(rows, *oracle.rope_cos_sin(position, self.tables[layer]), self.rope, back)

    def latent_of_q(self, layer: int, n: int, position: int) -> F64:
        """[lora] before q and the indexer's q."""
        w = self.weights[layer]
        return oracle_layer.rms_norm(w["wq_a"] @ self.hidden[n][position], w["q_norm"], 1e-20)

    def key(self, layer: int, n: int, position: int) -> F64:
        """[D] of the window, as its cache returns it."""
        at = layer, n, position
        if at not in self._made:
            w = self.weights[layer]
            row = oracle_layer.rms_norm(w["wkv"] @ self.hidden[n][position], w["kv_norm"], 1e-20)
            self._made[at] = stored(self.turned(layer, row, position), self.layouts[0])
        return self._made[at]

    def entry(self, owner: int, n: int, number: int, *, index: bool) -> F64:
        """A compressed entry, or an index key, as its cache returns it."""
        at = "index" if index else "entry", owner, n, number
        if at not in self._made:
            w, ratio = self.weights[owner], RATIOS[owner]
            tokens = self.hidden[n][number * ratio : (number + 1) * ratio]
            pooled = kv = tokens @ w["compressor.wkv"].T
            if ratio > 1:
                pooled = oracle_layer.softmax(tokens @ w["compressor.wgate"].T) * kv
            latent = oracle.round_bf16(oracle_layer.rms_norm(pooled.sum(0), w["compressor.norm"], 1e-20))
            if index:
                latent = oracle_layer.rms_norm(w["indexer.wk"] @ latent, w["indexer.k_norm"], 1e-20)
                latent = oracle.round_bf16(latent)
            row = self.turned(owner, latent, number * ratio)
            self._made[at] = stored(row, self.layouts[2 if index else 1])
        return self._made[at]

    def scores(self, layer: int, n: int, position: int) -> F64:
        """[E] of the entries that a token sees, by the indexer of a layer."""
        owner, w = KV_OF[layer], self.weights[layer]
        assert owner is not None
        q = (w["indexer.wq_b"] @ self.latent_of_q(layer, n, position)).reshape(self.index_heads, -1)
        factors = w["indexer.weights_proj"] @ self.hidden[n][position] / np.sqrt(self.index_dim * self.index_heads)
        count = (position + 1) // RATIOS[owner]
        keys = np.array([self.entry(owner, n, e, index=True) for e in range(count)]).reshape(count, self.index_dim)
        rows = np.stack([stored(row, self.layouts[2]) for row in self.turned(layer, q, position)])
        return oracle_layer.index_scores(rows, factors, keys)

    def candidates(self, n: int, position: int, slack: float) -> tuple[F64, F64]:
        """Entries that surely are in a candidate block, and those that may be, by the publisher's scores."""
        scores = self.scores(PUBLISHER, n, position)
        blocks = oracle_v41.block_scores(scores, SIZE)
        blocks[(len(scores) - 1) // SIZE] = np.inf
        order = np.sort(blocks)[::-1]
        sure = blocks > order[BLOCKS] + slack if len(blocks) > BLOCKS else np.ones(len(blocks), dtype=bool)
        maybe = blocks >= order[min(BLOCKS, len(blocks)) - 1] - slack
        return (np.repeat(each, SIZE)[: len(scores)] for each in (sure, maybe))  # type: ignore[return-value]

    def check_choice(self, layer: int, n: int, position: int, chosen: Sequence[int], slack: float) -> None:
        """Assert that what an indexer selected are the entries with the largest scores."""
        where, scores = (layer, n, position, chosen), self.scores(layer, n, position)
        sure = maybe = np.ones(len(scores), dtype=bool)
        if layer == CONSUMER and len(scores):
            sure, maybe = self.candidates(n, position, slack)
        assert len({*chosen}) == len(chosen) == min(TOPK, len(scores)), where
        assert all(0 <= e < len(scores) and maybe[e] for e in chosen), where
        left = [e for e in range(len(scores)) if sure[e] and e not in chosen]
        if left and chosen:
            assert scores[left].max() <= scores[[*chosen]].min() + slack, where

    def out(self, layer: int, n: int, position: int, chosen: Sequence[int], earliest: int = 0) -> F64:
        """[hidden] of a token. chosen: what the indexer of its source selected."""
        owner = KV_OF[layer]
        positions = range(max(position - WINDOW + 1, earliest, 0), position + 1)
        keys = [self.key(layer, n, p) for p in positions]
        if owner is not None:
            keys += [self.entry(owner, n, e, index=False) for e in chosen]
        return self.out_of(layer, n, position, np.stack(keys))

    def out_of(self, layer: int, n: int, position: int, keys: F64) -> F64:
        """[hidden] of a token that attends to keys [N, D]."""
        w = self.weights[layer]
        q = (w["wq_b"] @ self.latent_of_q(layer, n, position)).reshape(-1, self.dim)
        out, _ = oracle.attend_row(self.turned(layer, q, position), keys, w["attn_sink"], self.scale)
        angles, wo_a = oracle.rope_cos_sin(position, self.tables[layer]), w["wo_a"]
        return oracle.inverse_rope_project(
            out, *angles, self.rope, wo_a.reshape(self.groups, -1, wo_a.shape[1]), w["wo_b"]
        )


def worst(whole: Whole, steps: Steps, *, slack: float = 1e-2) -> float:
    """Run steps, assert every indexer's choice, and return the largest error of an output, relative to its norm.

    slack: difference of scores, which are of order 1, by which an index key near a midpoint of its format may be off.
    """
    seeds = range(1, whole.limits.max_num_reqs + 1)
    index = whole.manager.caches[1].index
    assert index is not None
    exact = Exact(whole, index.layout, seeds, whole.limits.max_model_len)
    sequences, found = [whole.manager.new() for _ in seeds], 0.0
    for step in steps:
        requests = [(sequences[n], count) for n, count in step]
        tokens = [(n, p) for n, count in step for p in range(sequences[n].length, sequences[n].length + count)]
        hidden = torch.cat([whole.hidden(n + 1, 64)[p : p + 1] for n, p in tokens])
        outs = whole.step(requests, hidden)
        for i in range(len(RATIOS)):
            for t, (n, p) in enumerate(tokens):
                chosen, chooser = list[int](), INDEX_OF[i]
                if chooser is not None:
                    row = whole.layers[chooser].topk_indices
                    assert row is not None
                    chosen = [e for e in row[t].tolist() if e != -1]
                    if chooser == i:
                        exact.check_choice(i, n, p, chosen, slack)
                wanted = exact.out(i, n, p, chosen)
                error = np.linalg.norm(outs[i][t].double().numpy() - wanted) / np.linalg.norm(wanted)
                found = max(found, float(np.nan_to_num(error, nan=np.inf)))
    return found


def network(
    layout: KVCacheLayout = FP32, backend: str = "reference", made: Backend | None = None, **options: Any
) -> Whole:
    """Layers whose caches, and buffers that indexers write, hold NaN and garbage at first."""
    given = {"geometry": SMALL_V41, "limits": LIMITS, "swa_block_size": 4, "compressed_block_tokens": 8, **options}
    whole = Whole(made or load_backend(backend), layout, shuffle_seed=3, **given)
    for caches in whole.manager.caches:
        for cache in caches.present.values():
            cache.tensor.fill_(0xFF if cache.tensor.dtype == torch.uint8 else torch.nan)
    for layer in whole.layers:
        if layer.topk_indices is not None:
            layer.topk_indices.fill_(3)
        if layer.candidates is not None:
            layer.candidates.blocks.fill_(0)
    return whole

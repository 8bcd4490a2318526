"""A small network of DeepSeek-V4.1 on a backend, and the oracle's answer for it: what tests of layer roles share.

Whose caches and entries a layer reads is written down here once more, by hand. Compressed entries and the indexers'
choices are random: compressor and indexer of V4.1 are not part of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from torch import Tensor

from dsv4attn.core.attention.mla_attention import DeepseekV4MLAAttention
from dsv4attn.core.cache.layout import KVCacheLayout
from dsv4attn.core.contract.backend import Backend
from dsv4attn.core.contract.limits import Limits
from dsv4attn.core.memory.workspace import WorkspaceManager
from dsv4attn.core.metadata.forward_context import set_forward_context
from dsv4attn.core.model.config import v41_layers
from dsv4attn.core.model.geometry import LayerRole, LayerSharing, ModelGeometry, Yarn
from dsv4attn.core.model.rope import cos_sin_cache
from dsv4attn.serving.cache_manager import CachedSequence, CacheManager
from dsv4attn.testing import oracle
from dsv4attn.testing.judge import F64, Expected, rounded, stored, tolerance
from dsv4attn.testing.world import normal

RATIOS = [0, 2, 2, 2, 1, 1, 1, 1]
KV_OF = [None, 1, 1, 3, 4, 4, 4, 4]
"""Layer whose entries each layer reads."""
INDEX_OF = [None, 1, 1, 3, 4, 4, 6, 6]
"""Layer whose choice each layer attends to."""
TOPK, WINDOW, HEADS, DIM, ROPE = 5, 6, 2, 512, 64
MODEL = ModelGeometry(
    num_heads=HEADS,
    head_dim=DIM,
    rope_dim=ROPE,
    window=WINDOW,
    index_topk=TOPK,
    layers=v41_layers(RATIOS),
    max_position=4096,
    hidden_size=64,
    o_groups=2,
    o_lora_rank=8,
    compress_yarn=Yarn(16.0, 64),
    eps=1e-20,
    index_n_heads=4,
    q_norm=False,
    sharing=LayerSharing((1, 3, 4), (1, 3, 4, 6), 4, 4, 2),
    shared_latent=True,
    name="small V4.1",
)
RECORDS = KVCacheLayout.fp8_ds_mla(DIM - ROPE, ROPE)
LIMITS = Limits(3, 48, 64)
QUERY, KEY, ENTRY, CHOICE, SINK = range(5)
SINKS = [rounded(normal((SINK, layer), np.arange(HEADS), 1)[:, 0], torch.float32) for layer in range(len(RATIOS))]
Steps = Sequence[Sequence[tuple[int, int]]]
"""Of each step, (sequence, tokens) of its requests."""


@cache
def row(stream: int, layer: int, sequence: int, number: int) -> F64:
    """[H, D] queries, or [1, D] key or entry, as bf16 values."""
    heads = np.arange(HEADS if stream == QUERY else 1, dtype=np.int64)
    return rounded(normal((stream, layer, sequence, number), heads, DIM), torch.bfloat16)


def chosen(layer: int, sequence: int, position: int) -> list[int]:
    """What the indexer of a layer selects for a token: some of the entries that there are, among numbers of none."""
    entries = (position + 1) // RATIOS[layer]
    rng = np.random.default_rng((CHOICE, layer, sequence, position))
    made = [*rng.choice(entries, min(entries, TOPK - 1), replace=False).tolist(), -1]
    return [*made, *[-1] * (TOPK - len(made))]


class Network:
    """The layers on caches of a manager, with one buffer of selected entries for all."""

    def __init__(self, backend: Backend, geometry: ModelGeometry = MODEL) -> None:
        self.backend, self.geometry, self.layers = backend, geometry, list[DeepseekV4MLAAttention]()
        sizes = {"swa_block_size": 4, "compressed_block_tokens": 8}
        self.manager = CacheManager(geometry, LIMITS, RECORDS, shuffle_seed=3, backend=backend, **sizes)  # type: ignore[arg-type]
        self.topk = torch.full((LIMITS.max_num_batched_tokens, TOPK), 2**31 - 1, dtype=torch.int32)
        workspace = WorkspaceManager("cpu")
        for i in range(geometry.num_layers):
            layer = geometry.layer(i)
            made = DeepseekV4MLAAttention(
                f"layers.{i}",
                layer,
                LIMITS,
                backend,
                attn_sink=torch.from_numpy(SINKS[i]).float(),
                cos_sin_cache=cos_sin_cache(layer.rope, LIMITS.max_model_len, "cpu"),
                topk_indices_buffer=self.topk,
                workspace=workspace,
            )
            caches = self.manager.caches[i].attention
            made.bind_kv_cache(caches.swa, caches.compressed)
            self.layers.append(made)

    def run(self, steps: Steps) -> dict[tuple[int, int, int], Tensor]:
        """[H, D] output by (layer, sequence, position)."""
        sequences = [self.manager.new() for _ in range(LIMITS.max_num_reqs)]
        found: dict[tuple[int, int, int], Tensor] = {}
        for step in steps:
            requests = [(sequences[number], count) for number, count in step]
            tokens = [(n, p) for n, count in step for p in range(sequences[n].length, sequences[n].length + count)]
            for i, out in enumerate(self._step(requests, tokens)):
                found |= {(i, *token): out[t] for t, token in enumerate(tokens)}
            self.manager.advance(requests)
        return found

    def _step(self, requests: list[tuple[CachedSequence, int]], tokens: list[tuple[int, int]]) -> list[Tensor]:
        batch, positions, outs = self.manager.batch(requests), self.manager.positions(requests), []
        metadata = self.manager.metadata(batch)
        with set_forward_context(metadata):
            for i, layer in enumerate(self.layers):
                sources, caches = self.geometry.sources(i), self.manager.caches[i].attention
                if sources.role is LayerRole.FULL:
                    compressed = metadata[layer.geometry.key].compressed
                    assert compressed is not None
                    assert caches.compressed is not None
                    rows = tensor([row(ENTRY, i, n, p // layer.compress_ratio)[0] for n, p in tokens])
                    self.backend.quantize_and_insert_k_cache(rows, caches.compressed, compressed.slot_mapping)
                if sources.index == i:
                    self.topk[: len(tokens)] = torch.tensor([chosen(i, *token) for token in tokens], dtype=torch.int32)
                q, kv = (tensor([row(what, i, *token) for token in tokens]) for what in (QUERY, KEY))
                layer.fused_qnorm_rope_kv_insert(q, kv[:, 0], positions)
                outs.append(torch.full_like(q, torch.nan))
                layer.forward_mqa(q, kv[:, 0], positions, outs[-1])
        return outs


def tensor(rows: list[F64]) -> Tensor:
    """Rows as bf16."""
    return torch.from_numpy(np.stack(rows)).bfloat16()


@cache
def turn(layer: int, position: int) -> tuple[F64, F64]:
    """Cosines and sines of a layer's table, by the oracle."""
    stretched = oracle.Yarn(16.0, 64, 32.0, 1.0) if RATIOS[layer] else None
    angles = oracle.rope_inv_freq(ROPE, 160000.0 if RATIOS[layer] else 10000.0, stretched)
    cos, sin = oracle.rope_cos_sin(position, angles)
    return cos, sin


@cache
def record(stream: int, layer: int, sequence: int, number: int) -> F64:
    """[D] window key or entry as its cache returns it. Entries are given with their rotation."""
    values = row(stream, layer, sequence, number)[0]
    return stored(oracle.apply_rope(values, *turn(layer, number), ROPE) if stream == KEY else values, RECORDS)


def worst(found: dict[tuple[int, int, int], Tensor]) -> tuple[float, tuple[int, int, int]]:
    """The largest error in tolerances, and where. The oracle's rows follow from positions alone."""
    where, answers = list(found), Expected.empty(len(found), HEADS, DIM)
    for t, (layer, sequence, position) in enumerate(where):
        records = [record(KEY, layer, sequence, p) for p in range(max(position - WINDOW + 1, 0), position + 1)]
        source, index = KV_OF[layer], INDEX_OF[layer]
        if source is not None and index is not None:
            records += [record(ENTRY, source, sequence, e) for e in chosen(index, sequence, position) if e >= 0]
        q = oracle.apply_rope(row(QUERY, layer, sequence, position), *turn(layer, position), ROPE)
        answers.judge(t, rounded(q, torch.bfloat16), records, SINKS[layer], DIM**-0.5)
    errors = answers.errors(torch.stack([found[place] for place in where]), None) / tolerance(RECORDS, torch.bfloat16)
    return float(errors.max()), where[int(errors.max(1).argmax())]

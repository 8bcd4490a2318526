"""Small networks of DeepSeek-V4.1 on a backend, and the answers of the float64 oracle for tests of layer roles.

`KV_OF` and `INDEX_OF` say by hand which caches and selections a layer reads; the oracle reads no geometry.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, cached_property
from typing import Any

import attrs
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
from dsv4attn.selection import load_backend
from dsv4attn.serving.cache_manager import CachedSequence, CacheManager
from dsv4attn.testing.kit.factories import normal
from dsv4attn.testing.kit.tolerances import F64, Expected, rounded, stored, tolerance
from dsv4attn.testing.oracle import attention as oracle
from dsv4attn.testing.oracle import layer as oracle_layer
from tests.harness import FP32, LayerStack

RATIOS = [0, 2, 2, 2, 1, 1, 1, 1]
KV_OF = [None, 1, 1, 3, 4, 4, 4, 4]
"""Layer whose entries each layer reads."""
INDEX_OF = [None, 1, 1, 3, 4, 4, 6, 6]
"""Layer whose choice each layer attends to."""
TOPK, WINDOW, HEADS, DIM, ROPE = 5, 6, 2, 512, 64
ATTENTION_V41 = ModelGeometry(
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
ATTENTION_LIMITS = Limits(3, 48, 64)
QUERY, KEY, ENTRY, CHOICE, SINK = range(5)
SINKS = [rounded(normal((SINK, layer), np.arange(HEADS), 1)[:, 0], torch.float32) for layer in range(len(RATIOS))]
Steps = Sequence[Sequence[tuple[int, int]]]
"""For each step, (number of the sequence, number of tokens) of its requests."""


@cache
def row(stream: int, layer: int, sequence: int, number: int) -> F64:
    """[H, D] queries, or [1, D] key or entry, as bf16 values."""
    heads = np.arange(HEADS if stream == QUERY else 1, dtype=np.int64)
    return rounded(normal((stream, layer, sequence, number), heads, DIM), torch.bfloat16)


def chosen(layer: int, sequence: int, position: int) -> list[int]:
    """The selection of an indexer for a token: some of its visible entries, then -1."""
    entries = (position + 1) // RATIOS[layer]
    rng = np.random.default_rng((CHOICE, layer, sequence, position))
    selected = [*rng.choice(entries, min(entries, TOPK - 1), replace=False).tolist(), -1]
    return [*selected, *[-1] * (TOPK - len(selected))]


class AttentionNetwork:
    """The layers on caches of a manager, with one buffer of selected entries for all."""

    def __init__(self, backend: Backend, geometry: ModelGeometry = ATTENTION_V41) -> None:
        self.backend, self.geometry, self.layers = backend, geometry, list[DeepseekV4MLAAttention]()
        sizes = {"swa_block_size": 4, "compressed_block_tokens": 8}
        self.manager = CacheManager(geometry, ATTENTION_LIMITS, RECORDS, shuffle_seed=3, backend=backend, **sizes)  # type: ignore[arg-type]
        self.topk = torch.full((ATTENTION_LIMITS.max_num_batched_tokens, TOPK), 2**31 - 1, dtype=torch.int32)
        workspace = WorkspaceManager("cpu")
        for i in range(geometry.num_layers):
            one_layer = geometry.layer(i)
            layer = DeepseekV4MLAAttention(
                f"layers.{i}",
                one_layer,
                ATTENTION_LIMITS,
                backend,
                attn_sink=torch.from_numpy(SINKS[i]).float(),
                cos_sin_cache=cos_sin_cache(one_layer.rope, ATTENTION_LIMITS.max_model_len, "cpu"),
                topk_indices_buffer=self.topk,
                workspace=workspace,
            )
            caches = self.manager.caches[i].attention
            layer.bind_kv_cache(caches.swa, caches.compressed)
            self.layers.append(layer)

    def run(self, steps: Steps) -> dict[tuple[int, int, int], Tensor]:
        """[H, D] output by (layer, sequence, position)."""
        sequences = [self.manager.new() for _ in range(ATTENTION_LIMITS.max_num_reqs)]
        outputs: dict[tuple[int, int, int], Tensor] = {}
        for step in steps:
            requests = [(sequences[number], count) for number, count in step]
            tokens = [(n, p) for n, count in step for p in range(sequences[n].length, sequences[n].length + count)]
            for i, out in enumerate(self._step(requests, tokens)):
                outputs |= {(i, *token): out[t] for t, token in enumerate(tokens)}
            self.manager.advance(requests)
        return outputs

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


def worst_attention_error(outputs: dict[tuple[int, int, int], Tensor]) -> tuple[float, tuple[int, int, int]]:
    """The largest error in budgets, and where. The oracle's rows follow from positions alone."""
    places, answers = list(outputs), Expected.empty(len(outputs), HEADS, DIM)
    for t, (layer, sequence, position) in enumerate(places):
        records = [record(KEY, layer, sequence, p) for p in range(max(position - WINDOW + 1, 0), position + 1)]
        source, index = KV_OF[layer], INDEX_OF[layer]
        if source is not None and index is not None:
            records += [record(ENTRY, source, sequence, e) for e in chosen(index, sequence, position) if e >= 0]
        q = oracle.apply_rope(row(QUERY, layer, sequence, position), *turn(layer, position), ROPE)
        answers.judge(t, rounded(q, torch.bfloat16), records, SINKS[layer], DIM**-0.5)
    values = torch.stack([outputs[place] for place in places])
    errors = answers.errors(values, None) / tolerance(RECORDS, torch.bfloat16)
    return float(errors.max()), places[int(errors.max(1).argmax())]


ROUNDED = 2.0**-9
"""Error of an output whose latents are rounded to bf16, where fp32 may round to another neighbour than float64."""
BLOCKS, SIZE, PUBLISHER = 4, 2, 4
"""Candidate blocks of a token, entries of a block, and the layer that publishes them."""
CONSUMER = 6
SMALL_V41 = attrs.evolve(
    ATTENTION_V41,
    head_dim=64,
    rope_dim=16,
    hidden_size=48,
    q_lora_rank=24,
    index_head_dim=32,
    num_heads=4,
    index_n_heads=32,
)

FP32_V41 = KVCacheLayout.rows(48, 16, dtype=torch.float32)
LIMITS_V41 = Limits(3, 48, 64, num_speculative_tokens=1)


class OracleNetwork:
    """A network in float64. weights: of each layer, by name."""

    def __init__(self, whole: LayerStack, index_layout: KVCacheLayout, seeds: Sequence[int], length: int) -> None:
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
    def _entries_of(whole: LayerStack) -> KVCacheLayout:
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
        blocks = oracle_layer.block_scores(scores, SIZE)
        blocks[(len(scores) - 1) // SIZE] = np.inf
        order = np.sort(blocks)[::-1]
        sure = blocks > order[BLOCKS] + slack if len(blocks) > BLOCKS else np.ones(len(blocks), dtype=bool)
        maybe = blocks >= order[min(BLOCKS, len(blocks)) - 1] - slack
        return (np.repeat(flags, SIZE)[: len(scores)] for flags in (sure, maybe))  # type: ignore[return-value]

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


def worst_layer_error(whole: LayerStack, steps: Steps, *, slack: float = 1e-2) -> float:
    """Run steps, assert every indexer's choice, and return the largest error of an output, relative to its norm.

    slack: difference of scores, which are of order 1, by which an index key near a midpoint of its format may be off.
    """
    seeds = range(1, whole.limits.max_num_reqs + 1)
    index = whole.manager.caches[1].index
    assert index is not None
    exact = OracleNetwork(whole, index.layout, seeds, whole.limits.max_model_len)
    sequences, actual = [whole.manager.new() for _ in seeds], 0.0
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
                expected = exact.out(i, n, p, chosen)
                error = np.linalg.norm(outs[i][t].double().numpy() - expected) / np.linalg.norm(expected)
                actual = max(actual, float(np.nan_to_num(error, nan=np.inf)))
    return actual


def v41_stack(
    layout: KVCacheLayout = FP32_V41, backend: str = "reference", loaded: Backend | None = None, **options: Any
) -> LayerStack:
    """Layers whose caches, and buffers that indexers write, hold NaN and garbage at first."""
    sizes = {"swa_block_size": 4, "compressed_block_tokens": 8}
    arguments = {"geometry": SMALL_V41, "limits": LIMITS_V41, **sizes, **options}
    whole = LayerStack(loaded or load_backend(backend), layout, shuffle_seed=3, **arguments)
    whole.poison_caches()
    for layer in whole.layers:
        if layer.topk_indices is not None:
            layer.topk_indices.fill_(3)
        if layer.candidates is not None:
            layer.candidates.blocks.fill_(0)
    return whole


def v4_stack(
    layout: KVCacheLayout = FP32, backend: str = "reference", loaded: Backend | None = None, **options: Any
) -> LayerStack:
    """Layers of the small model of DeepSeek-V4, with the arguments of `v41_stack`."""
    sizes = {"swa_block_size": 4, "compressed_block_tokens": 16}
    return LayerStack(loaded or load_backend(backend), layout, **{**sizes, **options})


STACKS: dict[str, Callable[..., LayerStack]] = {"v4": v4_stack, "v41": v41_stack}
"""Builders of whole layers by model, for tests that both models must pass."""

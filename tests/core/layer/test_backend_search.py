"""Random programs of steps on whole layers of V4, by backends in turn on the same caches, against float64.

A program draws a model (ratios, window, heads, index heads, K), a format of index keys, sizes of pages and drafts. Then
it runs steps of several sequences, with blocks of drafts of 2 to 9 tokens, some of which are rejected. In between it
evicts sequences, whose pages come back in other places, forks them, and writes NaN to all that no later token may read:
pages that are free, and window keys and states that the formulas do not need. Each layer of a step is run by any of the
backends. `SEARCH=100` runs 100 times as many programs, and other ones in every run.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dsv4attn.core.cache.layout import KVCacheLayout
from dsv4attn.core.contract.limits import Limits
from dsv4attn.core.layer.attention_layer import DeepseekV4Attention
from dsv4attn.core.metadata.forward_context import set_forward_context
from dsv4attn.core.model.geometry import LayerKind
from dsv4attn.core.model.weights import AttentionWeights
from dsv4attn.selection import load_backend
from dsv4attn.serving.cache_manager import CachedSequence
from dsv4attn.testing.kit.tolerances import F64, stored
from dsv4attn.testing.oracle import attention as oracle
from dsv4attn.testing.oracle import layer as oracle_layer
from tests.backends.built_in import EVERYWHERE, triton_backends
from tests.core.attention.strategies import search
from tests.core.layer.test_fork_search import STATE_SIZES, first_needed
from tests.harness import FP32, SMALL, LayerStack

pytestmark = pytest.mark.skipif(torch.accelerator.is_available(), reason="caches lie on the CPU; kernels are compiled")

MAX_LEN, MAX_TOKENS, MAX_REQS = 64, 40, 3
INDEX = {
    "rows": KVCacheLayout.rows(24, 8, dtype=torch.float32),
    "fp8": KVCacheLayout.index_fp8(32),
    "mxfp4": KVCacheLayout.index_mxfp4(32),
}
SLACK = {"rows": 1e-4, "fp8": 1e-2, "mxfp4": 1e-2}
"""By how much scores, which are of order 1, may differ: a quantised key near a midpoint of its format may be off."""


class Exact:
    """A model in float64. Nothing is paged, chunked or kept: a token is computed from all tokens before it."""

    def __init__(self, whole: LayerStack, index: KVCacheLayout) -> None:
        self.model, self.index = whole.geometry, index
        self.weights = [
            {name: value.double().numpy() for name, value in whole.weights[i].items()} for i in range(len(whole.layers))
        ]

    def turned(self, layer: int, rows: F64, position: int) -> F64:
        """Rows, rotated to a position."""
        return oracle.apply_rope(rows, *self.angles(layer, position), self.model.rope_dim)

    def angles(self, layer: int, position: int) -> tuple[F64, F64]:
        """Cosines and sines of a position."""
        rope, scaled = self.model.layer(layer).rope, self.model.layer(layer).rope.yarn
        yarn = None
        if scaled is not None:
            yarn = oracle.Yarn(scaled.factor, scaled.original_max_position, scaled.beta_fast, scaled.beta_slow)
        return oracle.rope_cos_sin(position, oracle.rope_inv_freq(rope.dim, rope.theta, yarn))

    def norm(self, row: F64, weight: F64 | None) -> F64:
        """RMSNorm with the eps of the model."""
        return oracle_layer.rms_norm(row, weight, self.model.eps)

    def entries(self, layer: int, tokens: F64, prefix: str) -> F64:
        """Compressed entries [E, d] of a sequence, or its index keys before they are stored."""
        w, (kind, ratio) = self.weights[layer], self.model.layers[layer]
        kv, scores = tokens @ w[f"{prefix}wkv"].T, tokens @ w[f"{prefix}wgate"].T
        ape, overlap = w[f"{prefix}ape"], kind is LayerKind.CSA
        states = {p: np.concatenate([kv[p], scores[p] + ape[p % ratio]]) for p in range(len(tokens))}
        rows = []
        for entry in range(len(tokens) // ratio):
            values, logits = oracle_layer.window_states(states, entry, ratio, overlap=overlap)
            pooled = (oracle_layer.softmax(logits) * values).sum(0)
            rows.append(self.turned(layer, self.norm(pooled, w[f"{prefix}norm"]), entry * ratio))
        return np.stack(rows) if rows else np.zeros((0, 1))

    def scores(self, layer: int, tokens: F64, position: int) -> F64:
        """Scores of the entries that a token sees."""
        w, heads = self.weights[layer], self.model.index_n_heads
        keys = self.entries(layer, tokens[: position + 1], "indexer.compressor.")
        latent = self.norm(w["wq_a"] @ tokens[position], w["q_norm"])
        queries = self.turned(layer, (w["indexer.wq_b"] @ latent).reshape(heads, -1), position)
        factors = w["indexer.weights_proj"] @ tokens[position] / np.sqrt(self.model.index_head_dim * heads)
        if not len(keys):
            return np.zeros(0)
        rows = [np.stack([stored(row, self.index) for row in part]) for part in (queries, keys)]
        return oracle_layer.index_scores(rows[0], factors, rows[1])

    def out(self, layer: int, tokens: F64, position: int, chosen: Sequence[int]) -> F64:
        """[hidden] of a token. chosen: what the indexer selected."""
        w, (kind, ratio) = self.weights[layer], self.model.layers[layer]
        keys = [
            self.turned(layer, self.norm(w["wkv"] @ tokens[p], w["kv_norm"]), p)
            for p in range(max(position - self.model.window + 1, 0), position + 1)
        ]
        if kind is not LayerKind.SWA:
            entries = self.entries(layer, tokens[: position + 1], "compressor.")
            keys += [entries[e] for e in (chosen if kind is LayerKind.CSA else range((position + 1) // ratio))]
        latent = self.norm(w["wq_a"] @ tokens[position], w["q_norm"])
        q = (w["wq_b"] @ latent).reshape(self.model.num_heads, -1)
        q = self.turned(layer, np.stack([self.norm(head, None) for head in q]), position)
        out, _ = oracle.attend_row(q, np.stack(keys), w["attn_sink"], self.model.head_dim**-0.5)
        wo_a = w["wo_a"].reshape(self.model.o_groups, self.model.o_lora_rank, -1)
        return oracle.inverse_rope_project(out, *self.angles(layer, position), self.model.rope_dim, wo_a, w["wo_b"])


@attrs.define(eq=False)
class Held:
    """A sequence, and the rows of `Program.embedding` that are its tokens.

    shortest: to how few tokens it may be cut, where drafts of its last step are rejected.
    pages: while it is evicted, the first token and the contents of its pages, by group.
    """

    sequence: CachedSequence
    tokens: list[int]
    shortest: int = 0
    pages: dict[str, tuple[int, list[Tensor]]] | None = None


class Program:
    """Layers of several backends on the caches of one manager."""

    def __init__(self, backends: Sequence[str], rng: random.Random) -> None:
        self.rng, c4a, c128a = rng, rng.choice([2, 3, 4, 5]), rng.choice([3, 8, 16])
        layers = (LayerKind.SWA, 1), (LayerKind.CSA, c4a), (LayerKind.HCA, c128a)
        model = attrs.evolve(
            SMALL,
            layers=layers,
            window=rng.choice([1, 3, 8, 16]),
            index_topk=rng.choice([1, 3, 8]),
            index_n_heads=rng.choice([1, 2, 16, 64]),
            num_heads=rng.choice([2, 4, 6]),
        )
        self.drafts, name = rng.choice([0, 1, 8]), rng.choice([*INDEX])
        limits = Limits(MAX_REQS, MAX_TOKENS, MAX_LEN, num_speculative_tokens=self.drafts)
        sizes: dict[str, Any] = {
            "swa_block_size": rng.choice([1, 4, 16]),
            "compressed_block_tokens": c4a * c128a * rng.choice([1, 2]),
        }
        self.sizes = {"window": sizes["swa_block_size"], **{f"{kind}_state": n for kind, n in STATE_SIZES.items()}}
        loaded = [load_backend(backend) for backend in backends]
        self.whole = LayerStack(
            rng.choice(loaded), FP32, geometry=model, limits=limits, index_layout=INDEX[name], shuffle_seed=5, **sizes
        )
        self.manager, self.slack = self.whole.manager, SLACK[name]
        self.sets = [self._layers_of(backend) for backend in loaded]
        self.embedding, self.exact = self.whole.hidden(11, 256), Exact(self.whole, INDEX[name])
        self.live: list[Held] = []
        self.what = f"{backends}, {model.layers}, window {model.window}, {name}, drafts {self.drafts}, {sizes}"
        self.whole.poison_caches()

    def _layers_of(self, backend: Any) -> list[DeepseekV4Attention]:
        layers: list[DeepseekV4Attention] = []
        for i, weights in self.whole.weights.items():
            own = AttentionWeights.from_dict(weights, self.whole.geometry, i)
            common: Any = {"workspace": self.whole.workspace, "sources": layers}
            layer = DeepseekV4Attention(
                f"layers.{i}", self.whole.geometry, i, self.whole.limits, backend, own, **common
            )
            layer.bind_kv_cache(self.manager.caches[i])
            layers.append(layer)
        return layers

    def run(self, steps: int) -> None:
        """Run a program of so many operations."""
        self.live = [Held(self.manager.new(), []) for _ in range(2)]
        self.step([(held, self.rng.randint(1, 18)) for held in self.live])
        for _ in range(steps):
            getattr(self, self.rng.choice(["decode", "decode", "chunk", "reject", "evict", "evict", "fork"]))()
            self.poison()
        self.decode()

    def decode(self) -> None:
        """A token of each sequence, or a block of drafts."""
        self.step([(held, self.rng.randint(1, 1 + self.drafts)) for held in self.live])

    def chunk(self) -> None:
        """Further tokens of a prompt, with a token of the others."""
        long = self.rng.choice(self.live)
        self.step([(held, self.rng.randint(2, 20) if held is long else 1) for held in self.live])

    def step(self, wishes: list[tuple[Held, int]]) -> None:
        """Run a step, each layer by any backend, and compare its tokens."""
        wishes = [(held, count) for held, count in wishes if len(held.tokens) + count <= MAX_LEN]
        for held, _ in wishes:
            self.restore(held)
        for held, count in wishes:
            held.tokens += [self.rng.randrange(len(self.embedding)) for _ in range(count)]
        wishes.sort(key=lambda wish: wish[1])
        requests = [(held.sequence, count) for held, count in wishes]
        rows = [n for held, count in wishes for n in held.tokens[len(held.tokens) - count :]]
        metadata, positions = self.manager.metadata(self.manager.batch(requests)), self.manager.positions(requests)
        outs, chosen = [], None
        with torch.no_grad(), set_forward_context(metadata):
            for i in range(len(self.whole.layers)):
                layer = self.rng.choice(self.sets)[i]
                outs.append(layer(self.embedding[rows], positions))
                chosen = layer.topk_indices[: len(rows)].tolist() if layer.topk_indices is not None else chosen
        self.manager.advance(requests)
        for held, _ in wishes:
            held.shortest = max(held.shortest, len(held.tokens) - self.drafts)
        places = [(held, p) for held, n in wishes for p in range(len(held.tokens) - n, len(held.tokens))]
        for t, (held, position) in enumerate(places):
            assert chosen is not None
            self.check(held, position, [out[t] for out in outs], [e for e in chosen[t] if e != -1])

    def check(self, held: Held, position: int, outs: list[Tensor], chosen: list[int]) -> None:
        """Compare the outputs of a token, and what was selected for it."""
        tokens, where = self.embedding[held.tokens].double().numpy(), f"{self.what}, position {position}"
        scores = self.exact.scores(1, tokens, position)
        assert len({*chosen}) == len(chosen) == min(self.whole.geometry.index_topk, len(scores)), (where, chosen)
        left = [score for e, score in enumerate(scores) if e not in chosen]
        assert not left or max(left) <= min(scores[e] for e in chosen) + self.slack, (where, chosen, scores)
        for i, out in enumerate(outs):
            expected = self.exact.out(i, tokens, position, chosen)
            error = np.linalg.norm(out.double().numpy() - expected) / np.linalg.norm(expected)
            assert error < 2e-5, f"{where}: layer {i}: {error}"

    def reject(self) -> None:
        """Forget some of the last drafts."""
        held = self.rng.choice(self.live)
        self.restore(held)
        length = self.rng.randint(held.shortest, len(held.tokens))
        self.manager.truncate(held.sequence, length)
        del held.tokens[length:]

    def fork(self) -> None:
        """Let a fork take the place of another sequence."""
        held = self.rng.choice(self.live)
        self.restore(held)
        if len(self.live) == MAX_REQS:
            gone = self.live.pop(next(i for i, other in enumerate(self.live) if other is not held))
            if gone.pages is None:
                self.manager.free(gone.sequence)
        self.live.append(Held(self.manager.fork(held.sequence), [*held.tokens], held.shortest))

    def evict(self) -> None:
        """Copy the pages of a sequence to the host, and free it."""
        held = self.rng.choice(self.live)
        if held.pages is None:
            held.pages = {}
            for name, table in held.sequence.tables.items():
                blocks = torch.tensor([block for block in table.blocks if block >= 0], dtype=torch.int64)
                contents = [cache.tensor[blocks].clone() for cache in self.manager._of_group(name)]
                held.pages[name] = table.first_token, contents
            self.manager.free(held.sequence)

    def restore(self, held: Held) -> None:
        """Bring an evicted sequence back, in pages that it gets now."""
        if held.pages is None:
            return
        held.sequence = self.manager.new()
        for name, (first, _) in held.pages.items():
            held.sequence.tables[name].skip_before(first)
        self.manager.reserve([(held.sequence, len(held.tokens))])
        for name, (_, contents) in held.pages.items():
            blocks = torch.tensor([b for b in held.sequence.tables[name].blocks if b >= 0], dtype=torch.int64)
            for cache, pages in zip(self.manager._of_group(name), contents, strict=True):
                # a sequence that lost its drafts may have had a page more
                cache.tensor[blocks] = pages[: len(blocks)]
        held.sequence.length, held.pages = len(held.tokens), None

    def poison(self) -> None:
        """Write NaN to all that no later token may read, even if the drafts of the last step are rejected."""
        for name, pool in self.manager._pools.items():
            self._poison(name, torch.tensor(pool._free, dtype=torch.int64))
        for held in self.live:
            if held.pages is None:
                for name, first in first_needed(self.whole.geometry, held.shortest).items():
                    self._poison_slots(name, held.sequence, [*range(held.sequence.tables[name].first_token, first)])
                    self._poison_slots(name, held.sequence, [*range(len(held.tokens), MAX_LEN)])

    def _poison(self, name: str, blocks: Tensor) -> None:
        for cache in self.manager._of_group(name):
            cache.tensor[blocks] = 0xFF if cache.tensor.dtype == torch.uint8 else torch.nan

    def _poison_slots(self, name: str, sequence: CachedSequence, positions: list[int]) -> None:
        """Write NaN to the records of some positions, in pages of one record a token."""
        blocks, size = sequence.tables[name].blocks, self.sizes[name]
        places = [(blocks[p // size], p % size) for p in positions if p // size < len(blocks)]
        places = [(block, row) for block, row in places if block >= 0]
        if places:
            pages, rows = (torch.tensor(part, dtype=torch.int64) for part in zip(*places, strict=True))
            for cache in self.manager._of_group(name):
                cache.region("row")[pages, rows] = torch.nan


DEFINITION = EVERYWHERE[0]
OTHERS = [
    pytest.param((DEFINITION, name), id=name, marks=[pytest.mark.matrix] if name not in EVERYWHERE else [])
    for name in triton_backends()
]


@pytest.mark.parametrize("backends", OTHERS)
@search(2)
@given(st.randoms(use_true_random=False))
def test_any_backends_in_turn_give_what_float64_gives(backends: tuple[str, ...], rng: random.Random) -> None:
    Program(backends, rng).run(6)

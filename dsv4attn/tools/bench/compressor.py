"""Compressor and index queries: inputs and calls.

Letters: R requests, T tokens of the step, d dims of an entry, w channels of a token's kv (2 d where entries overlap), r
tokens of an entry, S tokens of a request whose states count in the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from dsv4attn.core.cache.index_records import read_index_keys
from dsv4attn.core.cache.layout import KVCacheLayout, PagedKVCache
from dsv4attn.core.contract.backend import Backend
from dsv4attn.core.metadata.builder import STATE_BLOCK_SIZES
from dsv4attn.core.model.geometry import LayerGeometry, LayerKind, ModelGeometry
from dsv4attn.core.model.rope import cos_sin_cache
from dsv4attn.core.reprs import frozen
from dsv4attn.core.torch_ops.arguments import EntryNorm, StatePages
from dsv4attn.tools.bench.contenders import Contender, Task, returning
from dsv4attn.tools.bench.inputs import LAYOUT, RandomNumbers, read_records
from dsv4attn.tools.bench.layer_ops import LayerOpCase

_FLASH = ModelGeometry.preset("deepseek-v4-flash")
_BEFORE = 8192
"""Tokens of a request before the step; a multiple of every ratio."""
_RAGGED = 128
"""Decodes are at consecutive positions, which end at a multiple of this number. As in a batch of requests of any
length, every r-th token completes an entry."""


@frozen(eq=False)
class _Parts:
    """A compressor.

    layer: geometry of its layer.
    dim: d - dims of an entry.
    layout: of its entries.
    """

    layer: LayerGeometry
    dim: int
    layout: KVCacheLayout

    @classmethod
    def of(cls, name: str) -> _Parts:
        """c4a, c128a, or index: that of the index keys of c4a layers."""
        if name == "index":
            dim = _FLASH.index_head_dim
            return cls(_FLASH.layer_of_kind(LayerKind.CSA), dim, KVCacheLayout.index_fp8(dim))
        layer = _FLASH.layer_of_kind(LayerKind(name))
        return cls(layer, layer.head_dim, LAYOUT)

    @property
    def width(self) -> int:
        """Channels of a token's kv."""
        return 2 * self.dim if self.layer.overlap else self.dim

    @property
    def span(self) -> int:
        """Tokens whose states an entry is made of."""
        return self.layer.compress_ratio * (2 if self.layer.overlap else 1)


@frozen(eq=False)
class _States:
    """States of a step and their pages.

    kv: [R, S, w] fp32, the tokens of the step last.
    score: [R, S, w] fp32 of the same tokens.
    positions: [T] int64 - of the tokens of the step.
    request: [T] int32 - of each token.
    cache: the state cache, full of NaN.
    table: [R, _] int32 pages of the state cache.
    slots: [R, S] int64 - of all states.
    """

    kv: Tensor
    score: Tensor
    positions: Tensor
    request: Tensor
    cache: PagedKVCache
    table: Tensor
    slots: Tensor


def compressor_task(case: LayerOpCase, device: torch.device) -> Task:
    """States of the tokens (save), entries from states (store), or queries of the indexer (query)."""
    step, name = case.step.split()
    parts, random = _Parts.of(name), RandomNumbers(device, case.seed)
    if step == "query":
        return _query(case, random)
    states = _states(case, parts, random)
    return _save(case, parts, states, random) if step == "save" else _store(case, parts, states, random)


def _save(case: LayerOpCase, parts: _Parts, states: _States, random: RandomNumbers) -> Task:
    cache, new = states.cache, slice(-case.tokens, None)
    ape = random.normal(parts.layer.compress_ratio, parts.width)
    product = torch.cat([states.kv[:, new], states.score[:, new]], -1).flatten(0, 1)
    slots = states.slots[:, new].flatten().contiguous()
    # halves of one product, as a layer makes them
    kv, score = product.split(parts.width, -1)
    row = cache.region("row")

    def contender(name: str, backend: Backend, _: torch.dtype) -> Contender:
        save = partial(backend.layer_ops.save_partial_states, kv, score, ape, states.positions, cache, slots)

        def results() -> Sequence[Tensor]:
            return [row[slots // cache.block_size, slots % cache.block_size]]

        return Contender(name, save, lambda: row.fill_(torch.nan), results)

    biases = min(case.count, ape.shape[0]) * parts.width
    moved = 4 * (2 * product.numel() + biases) + 16 * case.count
    return Task(case, 0, moved, contender, limit=1e-6)


def _store(case: LayerOpCase, parts: _Parts, states: _States, random: RandomNumbers) -> Task:
    device, ratio = states.kv.device, parts.layer.compress_ratio
    weight = 1 + 0.1 * random.normal(parts.dim)
    table = cos_sin_cache(parts.layer.rope, int(states.positions.max()) + 1, device)
    row = states.cache.region("row")
    page = states.slots // states.cache.block_size, states.slots % states.cache.block_size
    row[page] = torch.cat([states.kv, states.score], -1)
    ends = (states.positions + 1) % ratio == 0
    tokens = ends.nonzero()[:, 0]
    block = 256 // ratio
    blocks = -(-len(tokens) // block) + 1
    cache = PagedKVCache.allocate(parts.layout, blocks, block, device)
    slots = random.permutation(cache.capacity)[: len(tokens)]
    mapping = torch.full_like(states.positions, -1)
    mapping[tokens] = slots
    fetch = read_records if parts.layout.name == LAYOUT.name else read_index_keys
    pages, norm = StatePages(states.cache, states.table), EntryNorm(weight, parts.layer.eps, table)

    def contender(name: str, backend: Backend, _: torch.dtype) -> Contender:
        store, step = backend.layer_ops.compress_norm_rope_store, (states.request, states.positions, mapping)
        run = partial(store, pages, *step, norm, ratio, cache, overlap=parts.layer.overlap)
        # 0xFF is NaN as a code, as a bf16, as a scale byte and as an fp32 scale
        return Contender(name, run, lambda: cache.tensor.fill_(0xFF), lambda: [fetch(cache, slots)])

    # with overlap an entry reads half of the channels of its states, and the next one the other half
    moved = len(tokens) * (4 * parts.span * 2 * parts.dim + parts.layout.record_bytes) + 16 * case.count
    return Task(case, 0, moved, contender)


def _query(case: LayerOpCase, random: RandomNumbers) -> Task:
    heads, dim, layer = _FLASH.index_n_heads, _FLASH.index_head_dim, _FLASH.layer_of_kind(LayerKind.CSA)
    device = random.device
    positions = _positions(case, device)
    table = cos_sin_cache(layer.rope, int(positions.max()) + 1, device)
    q = random.normal(case.count, heads, dim).bfloat16()
    weights = random.normal(case.count, heads).bfloat16()
    layout = KVCacheLayout.index_fp8(dim)

    def contender(name: str, backend: Backend, _: torch.dtype) -> Contender:
        quantise = backend.layer_ops.indexer_q_rope_quant

        def call() -> Sequence[Tensor]:
            query = quantise(q, weights, positions, table, layout)
            return query.values, query.weights

        # a score has their product
        return returning(name, call, lambda query: [query[0].float() * query[1][..., None]])

    moved = 3 * q.numel() + 6 * weights.numel() + 8 * case.count
    return Task(case, 0, moved, contender)


def _positions(case: LayerOpCase, device: torch.device) -> Tensor:
    """[T] int64: of one token of each request, or of the tokens of one request."""
    first = _BEFORE + (_RAGGED - case.requests if case.tokens == 1 else 0)
    return torch.arange(first, first + case.count, device=device)


def _states(case: LayerOpCase, parts: _Parts, random: RandomNumbers) -> _States:
    """Random states of all tokens that count in the step, on pages in random order; all other pages are gone."""
    device, requests = random.device, case.requests
    positions, page = _positions(case, device), STATE_BLOCK_SIZES[parts.layer.kind]
    count = parts.span - 1 + case.tokens
    last = positions.view(requests, -1)[:, -1:]
    place = last + torch.arange(1 - count, 1, device=device)
    kv, score = (random.normal(requests, count, parts.width) for _ in range(2))
    column = torch.arange(int(last.max()) // page + 1, device=device)
    alive = (column >= place[:, :1] // page) & (column <= last // page)
    blocks = int(alive.sum())
    table = torch.full(alive.shape, -1, dtype=torch.int32, device=device)
    table[alive] = random.permutation(blocks).int()
    cache = PagedKVCache.allocate(KVCacheLayout.compressor_state(parts.width), blocks, page, device)
    cache.tensor.fill_(torch.nan)
    slots = table.gather(1, place // page).long() * page + place % page
    request = torch.arange(requests, dtype=torch.int32, device=device).repeat_interleave(case.tokens)
    return _States(kv, score, positions, request, cache, table, slots)

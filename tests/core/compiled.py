"""Layers of a small model in one compiled function, step by step: what tests of `torch.compile` share."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from attrs import frozen
from torch import Tensor

from dsv4attn.core.cache.layer_caches import DeepseekV4Caches, LayerCaches
from dsv4attn.core.cache.layout import PagedKVCache
from dsv4attn.core.layer.attention_layer import DeepseekV4Attention
from dsv4attn.core.metadata.forward_context import set_forward_context
from tests.harness import LayerStack

Steps = Sequence[Sequence[tuple[int, int]]]
"""For each step, (number of the sequence, tokens) of its requests."""
PREFILL_DECODE_PREFILL: Steps = ([(0, 20)], [(0, 1)], [(0, 19), (1, 9)])


@frozen
class Ran:
    """outs: of each layer in each step. memory: every cache and buffer, after the last step."""

    outs: list[Tensor]
    memory: list[Tensor]

    def same(self, other: Ran) -> bool:
        """Whether all bits are equal, NaN too."""
        pairs = zip([*self.outs, *self.memory], [*other.outs, *other.memory], strict=True)
        return all(
            torch.equal(one.contiguous().view(torch.uint8), two.contiguous().view(torch.uint8)) for one, two in pairs
        )


def run(whole: LayerStack, backend: str | None, steps: Steps = PREFILL_DECODE_PREFILL) -> Ran:
    """All layers, one after the other in one function, in these steps; compiled, or eager without a backend."""

    def model(hidden: Tensor, positions: Tensor) -> list[Tensor]:
        outs = []
        for layer in whole.layers:
            outs.append(layer(hidden * 1.0, positions))
            hidden = hidden + outs[-1]
        return outs

    torch._dynamo.reset()
    function: Callable[[Tensor, Tensor], list[Tensor]] = model
    if backend is not None:
        function = torch.compile(model, backend=backend, fullgraph=True, dynamic=True)
    sequences = [whole.manager.new() for _ in range(whole.limits.max_num_reqs)]
    outs: list[Tensor] = []
    for number, step in enumerate(steps):
        requests = [(sequences[i], count) for i, count in step]
        positions = whole.manager.positions(requests)
        hidden = whole.hidden(number, positions.shape[0])
        with torch.no_grad(), set_forward_context(whole.manager.metadata(whole.manager.batch(requests))):
            outs += function(hidden, positions)
        whole.manager.advance(requests)
    return Ran(outs, [memory.clone() for layer in whole.layers for memory in memory_of(layer)])


def memory_of(layer: DeepseekV4Attention) -> list[Tensor]:
    """Caches and buffers that a layer writes or reads."""
    assert layer.caches is not None
    buffers = [layer.topk_indices, None if layer.candidates is None else layer.candidates.blocks]
    return [*(cache.tensor for cache in layer.caches.present.values()), *(x for x in buffers if x is not None)]


def put_in_one_allocation(whole: LayerStack) -> None:
    """Give all caches of all layers new memory: pages of one allocation, one cache after the other in each page."""
    present = [cache for caches in whole.manager.caches for cache in caches.present.values()]
    caches = list({id(cache): cache for cache in present}.values())
    sizes = [-(-cache.block_size * cache.layout.record_bytes // 16) * 16 for cache in caches]
    pages = torch.zeros(max(cache.num_blocks for cache in caches), sum(sizes), dtype=torch.uint8)
    moved, start = dict[int, PagedKVCache](), 0
    for cache, size in zip(caches, sizes, strict=True):
        part = pages[: cache.num_blocks, start : start + cache.block_size * cache.layout.record_bytes]
        rows = part.view(cache.layout.dtype).unflatten(1, (cache.block_size, -1))
        moved[id(cache)] = PagedKVCache(rows, cache.layout)
        start += size

    def new(cache: PagedKVCache | None) -> PagedKVCache | None:
        return None if cache is None else moved[id(cache)]

    bound = list[DeepseekV4Caches]()
    for layer, old in zip(whole.layers, whole.manager.caches, strict=True):
        attention = LayerCaches(moved[id(old.attention.swa)], new(old.attention.compressed))
        bound.append(DeepseekV4Caches(attention, new(old.state), new(old.index), new(old.index_state)))
        layer.bind_kv_cache(bound[-1])
    whole.manager.caches = tuple(bound)

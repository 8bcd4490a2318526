"""The step of one layer on one rank with all entries, and the same step over ranks, ready to be run.

Letters: R ranks, T tokens, one of each request, E entries of a request, K entries that a token selects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from attrs import evolve, frozen
from torch import Tensor

from dsv4attn.core.cache.index_records import store_index_keys
from dsv4attn.core.cache.layer_caches import LayerCaches
from dsv4attn.core.cache.layout import PagedKVCache
from dsv4attn.core.cache.ownership import Ownership
from dsv4attn.core.context_parallel.attention import forward_mqa_over_ranks
from dsv4attn.core.context_parallel.context import ContextParallel
from dsv4attn.core.context_parallel.metadata import metadata_builder
from dsv4attn.core.context_parallel.reshard import reshard_cache
from dsv4attn.core.context_parallel.selection import select_topk_over_ranks
from dsv4attn.core.contract.backend import Backend
from dsv4attn.core.memory.plan import plan_workspace
from dsv4attn.core.memory.workspace import WorkspaceManager
from dsv4attn.core.model.geometry import ModelGeometry
from dsv4attn.core.torch_ops.indexer import IndexQuery
from dsv4attn.core.torch_ops.tiles import INVARIANT, PLAIN
from dsv4attn.tools.bench.context_cases import INDEX, ContextCase
from dsv4attn.tools.bench.forward_step import ForwardStep, make_forward_step, scheduled
from dsv4attn.tools.bench.inputs import Inputs, RandomNumbers, make_inputs

_CHUNK = 65536


@frozen(eq=False)
class ContextStep:
    """The step of one layer, on one rank with all entries or over ranks.

    step: arguments of the attention; `topk_indices` is written by the selection.
    context: the ranks; None: one rank with all entries.
    keys: index keys on the pages of the compressed cache; None on layers that select nothing.
    query: index queries of all tokens, with keys.
    entries: E.
    """

    step: ForwardStep
    context: ContextParallel | None
    keys: PagedKVCache | None
    query: IndexQuery | None
    entries: int

    @property
    def calls(self) -> dict[str, Callable[[], None]]:
        """What is timed, by name of the part."""
        if self.keys is None:
            return {"attention, merge": self.attend}
        return {"scores, selection": self.select, "attention, merge": self.attend, "both": self.run}

    def run(self) -> None:
        """The whole step."""
        if self.keys is not None:
            self.select()
        self.attend()

    def select(self) -> None:
        """Scores of all entries, and the numbers of the best."""
        backend, compressed, out = self.step.backend, self.step.compressed_metadata, self.step.topk_indices
        assert compressed is not None
        assert self.query is not None
        assert self.keys is not None
        assert out is not None
        token_map = compressed.token_map
        if self.context is None:
            backend.layer_ops.select_topk(self.query, self.keys, token_map, out, self.entries)
            return
        arithmetic, ops = INVARIANT if backend.deterministic else PLAIN, backend.layer_ops
        select_topk_over_ranks(self.context, ops, arithmetic, self.query, self.keys, token_map, out, self.entries)

    def attend(self) -> None:
        """Attention, and over ranks the merge of all parts."""
        if self.context is None:
            self.step.run()
        else:
            forward_mqa_over_ranks(self.context, self.step)

    def spoil(self) -> None:
        """Overwrite what the step writes."""
        self.step.out.fill_(torch.nan)
        if self.step.topk_indices is not None:
            self.step.topk_indices.fill_(-2)

    @property
    def bytes(self) -> dict[str, int]:
        """Bytes of all pages of the compressed cache and of the index keys."""
        caches = {"entries": self.step.caches.compressed, "index keys": self.keys}
        return {name: cache.num_blocks * cache.page_stride for name, cache in caches.items() if cache is not None}

    def tensors(self) -> Iterator[Tensor]:
        """The regions of all caches."""
        for cache in (self.step.caches.swa, self.step.caches.compressed, self.keys):
            if cache is not None:
                regions = cache.layout.regions(cache.block_size)
                yield from (cache.region(region.name) for region in regions if region.count)


def one_rank(case: ContextCase, backend: Backend, device: torch.device) -> tuple[Inputs, ContextStep]:
    """Inputs of a case, and the step of one rank with all entries."""
    inputs = make_inputs(case.case, device)
    step = make_forward_step(inputs, backend)
    keys = query = None
    if case.selects:
        normal = RandomNumbers(device, case.context).normal
        keys = PagedKVCache.allocate(INDEX, inputs.segments[1].cache.num_blocks, case.preset.page, device)
        for slots in torch.arange(keys.capacity, device=device).split(_CHUNK):
            # keys of different sizes, so that scales differ
            store_index_keys(normal(len(slots), INDEX.head_dim) * torch.exp2(normal(len(slots), 1)), keys, slots)
        heads = ModelGeometry.preset(case.preset.model).index_n_heads
        q = normal(case.requests, heads, INDEX.head_dim).to(torch.float8_e4m3fn)
        query = IndexQuery(q, normal(case.requests, heads))
    return inputs, ContextStep(step, None, keys, query, case.entries)


def over_ranks(inputs: Inputs, single: ContextStep, context: ContextParallel) -> ContextStep:
    """The same step over ranks, with copies of this rank's entries on pages in another order."""
    ownership, device, (window, whole) = context.ownership, inputs.q.device, inputs.segments
    requests, page = len(inputs.case.requests), whole.cache.block_size
    columns = -(-Ownership(0, ownership.size, ownership.interleave).count(single.entries) // page)
    table = RandomNumbers(device, ownership.rank).pages(requests, columns)

    def part_of(source: PagedKVCache) -> PagedKVCache:
        target = PagedKVCache.allocate(source.layout, requests * columns, page, device)
        for pages, to in zip(whole.table, table, strict=True):
            reshard_cache([(source, pages)], (target, to), single.entries, ownership)
        return target

    step = single.step
    layer, limits, batch, builder = scheduled(inputs, metadata_builder(context), step.backend)
    batch = evolve(batch, compressed_block_table=table)
    workspace = WorkspaceManager(device)
    layout, dtype = window.cache.layout, inputs.q.dtype
    plan = plan_workspace(layer, limits, step.backend, layout, ranks=ownership.size, prefill_keys=False, q_dtype=dtype)
    workspace.reserve(plan)
    workspace.lock()
    step = evolve(
        step,
        caches=LayerCaches(window.cache, part_of(whole.cache)),
        metadata=builder.build_for(batch, [layer.kind])[layer.kind],
        workspace=workspace,
        out=torch.empty_like(inputs.q),
        topk_indices=None if step.topk_indices is None else torch.empty_like(step.topk_indices),
    )
    return ContextStep(
        step, context, None if single.keys is None else part_of(single.keys), single.query, single.entries
    )

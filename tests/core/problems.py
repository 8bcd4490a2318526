"""Random limits, and random batches within them, as fast as thousands of calls need: caches of zeros, any slots."""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch
from attrs import evolve, frozen

from dsv4attn.core.cache.layer_caches import LayerCaches
from dsv4attn.core.cache.layout import KVCacheLayout, PagedKVCache
from dsv4attn.core.contract.backend import Backend
from dsv4attn.core.contract.limits import Limits
from dsv4attn.core.memory.plan import plan_workspace
from dsv4attn.core.metadata.builder import MetadataBuilder
from dsv4attn.core.metadata.metadata import Batch
from dsv4attn.core.model.geometry import LayerKind, ModelGeometry
from dsv4attn.errors import ArgumentError
from dsv4attn.testing.scenario import Problem
from dsv4attn.testing.world import tiny_geometry

BLOCKS, SWA_BLOCK = 3, 2
INT = torch.int32


def smallest_cap(
    geometry: ModelGeometry, kind: LayerKind, limits: Limits, backend: Backend, layout: KVCacheLayout
) -> int:
    """The cap that the error for an impossible one names."""
    layer = geometry.layer_of_kind(kind)
    try:
        plan_workspace(layer, evolve(limits, max_workspace_bytes=1), backend, layout)
    except ArgumentError as error:
        return int(error.expected.removeprefix("at least ").partition(",")[0])
    return 1


@frozen
class Case:
    """A model, limits, and all that stays while batches come and go."""

    rng: random.Random
    kind: LayerKind
    geometry: ModelGeometry
    limits: Limits
    builder: MetadataBuilder
    caches: LayerCaches

    @classmethod
    def draw(cls, rng: random.Random, kind: LayerKind, backend: Backend) -> Case:
        """Small sizes, so that rounding and fixed costs matter; index areas and caps from none to very tight."""
        ratios = rng.choice([(2, 8), (4, 16), (3, 5)])
        geometry = tiny_geometry(
            num_heads=1, head_dim=4, rope_dim=2, window=rng.randint(1, 9), topk=rng.randint(1, 9), ratios=ratios
        )
        speculative = rng.choice([0, 0, 1, 3])
        limits = Limits(
            rng.randint(1, 6),
            rng.randint(1 + speculative, 48),
            rng.choice([1, 2, 17, 60, 300]) + speculative,
            speculative,
            max_index_elements=rng.choice([1, 40, 200, 1000, 2**21]),
        )
        layout = rng.choice([KVCacheLayout.fp8_ds_mla(2, 2), KVCacheLayout.rows(2, 2, dtype=torch.float32)])
        if rng.random() < 0.5:
            least = smallest_cap(geometry, kind, limits, backend, layout)
            limits = evolve(limits, max_workspace_bytes=least + rng.choice([0, 1, 4, 100, 3000]))
        tokens = ratios[0] * ratios[1]
        builder = MetadataBuilder(
            geometry, limits, swa_block_size=SWA_BLOCK, compressed_block_tokens=tokens, validate=False
        )
        records = tokens // geometry.layer_of_kind(kind).compress_ratio
        compressed = None if kind is LayerKind.SWA else PagedKVCache.allocate(layout, BLOCKS, records)
        caches = LayerCaches(PagedKVCache.allocate(layout, BLOCKS, SWA_BLOCK), compressed)
        return cls(rng, kind, geometry, limits, builder, caches)

    def lengths(self) -> Iterator[tuple[int, int]]:
        """(prefix, query) of a random batch: up to the very limits, decodes first."""
        rng, limits = self.rng, self.limits
        left, queries = limits.max_num_batched_tokens, []
        for _ in range(rng.randint(1, limits.max_num_reqs)):
            most = min(left, limits.max_model_len)
            queries.append(
                rng.choice([0, min(1, most), most, rng.randint(0, most), min(most, limits.decode_threshold)])
            )
            left -= queries[-1]
        for query in sorted(queries, key=lambda n: n > limits.decode_threshold):
            room = limits.max_model_len - query
            yield rng.choice([0, room, rng.randint(0, room)]), query

    def problem(self) -> Problem:
        """A random batch, ready to run."""
        rng, layer = self.rng, self.geometry.layer_of_kind(self.kind)
        pairs = list(self.lengths())
        starts, total = [0], sum(query for _, query in pairs)
        for _, query in pairs:
            starts.append(starts[-1] + query)
        seq_lens = torch.tensor([before + query for before, query in pairs], dtype=INT)
        table = torch.randint(0, BLOCKS, (len(pairs), -(-self.limits.max_model_len // SWA_BLOCK)), dtype=INT)
        query_start_loc = torch.tensor(starts, dtype=INT)
        batch = Batch(
            num_reqs=len(pairs),
            query_start_loc=query_start_loc,
            query_start_loc_cpu=query_start_loc,
            seq_lens=seq_lens,
            seq_lens_cpu=seq_lens,
            slot_mapping=torch.randint(-1, BLOCKS * SWA_BLOCK, (total,)),
            block_table=table,
            compressed_block_table=None if layer.kind is LayerKind.SWA else table,
        )
        metadata = self.builder.build_for(batch, [self.kind])[self.kind]
        q = torch.zeros(total + rng.randint(0, 2), 1, 4)
        width = rng.choice([layer.topk, rng.randint(1, max(layer.topk, 1))])
        topk = torch.randint(-1, 40, (q.shape[0], width), dtype=INT) if layer.kind is LayerKind.C4A else None
        return Problem(layer, self.limits, q, self.caches, metadata, torch.zeros(1), topk)

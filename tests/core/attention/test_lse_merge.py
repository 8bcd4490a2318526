"""Promise G13: lse has one meaning, so attention over shards of the keys merges to attention over all of them."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from dsv4attn.core.cache.selected_keys import DenseIndices, PagedKeys, RaggedIndices
from dsv4attn.core.contract.backend import AttentionCall
from dsv4attn.core.torch_ops.index_ops import build_ragged_indices_from_dense
from dsv4attn.core.torch_ops.merge import apply_sink, merge_lse
from dsv4attn.testing.kit.factories import layouts, tiny_geometry
from dsv4attn.testing.kit.random_step import ForwardArgs, StepFixture
from tests.core.attention.strategies import searched
from tests.harness import REFERENCE_FORMS

GEOMETRY = tiny_geometry(num_heads=3, head_dim=16, rope_dim=4)
REQUESTS = [(100, 1), (0, 1), (33, 1, 1), (63, 1), (16, 1)]
assert_close = partial(torch.testing.assert_close, rtol=1e-5, atol=2e-6)


def scenario_of(kind: str, seed: int = 0) -> StepFixture:
    layout = layouts(GEOMETRY)["fp32"]
    return StepFixture(kind=kind, requests=REQUESTS, geometry=GEOMETRY, layout=layout, q_dtype=torch.float32, seed=seed)


def rows_of(problem: ForwardArgs) -> list[Tensor]:
    """Slots of every decode row in each cache of the layer, -1 where there is none."""
    swa, compressed = problem.metadata.swa, problem.metadata.compressed
    tables = [swa.decode_swa_indices[:, 0]]
    if compressed is None:
        return tables
    if compressed.c128a_global_decode_topk_indices is not None:
        return [*tables, compressed.c128a_global_decode_topk_indices[:, 0]]
    assert problem.topk_indices is not None
    slots, lens = torch.empty_like(problem.topk_indices), torch.empty(len(REQUESTS), dtype=torch.int32)
    REFERENCE_FORMS["paged-dense"].index_ops.compute_global_topk_indices_and_lens(
        problem.topk_indices,
        compressed.compressed_lens,
        compressed.req_id_per_token,
        compressed.block_table,
        compressed.records_per_block,
        out=(slots, lens),
    )
    return [*tables, slots]


def attend(problem: ForwardArgs, tables: list[Tensor], *, ragged: bool) -> tuple[Tensor, Tensor]:
    """Attend without a sink over the slots of one shard, in either form of indices."""
    segments = []
    for cache, slots in zip(problem.caches.segments(problem.layer), tables, strict=True):
        rows: DenseIndices | RaggedIndices
        rows = DenseIndices(slots, torch.full((slots.shape[0],), slots.shape[1], dtype=torch.int32))
        if ragged:
            flat, indptr = torch.empty(slots.numel(), dtype=torch.int32), torch.empty(len(slots) + 1, dtype=torch.int32)
            build_ragged_indices_from_dense(slots, rows.lens, cache.capacity, out=(flat, indptr))
            rows = RaggedIndices(flat, indptr, slots.shape[1])
        segments.append(PagedKeys(cache, rows))
    out, lse = torch.full_like(problem.q, math.nan), torch.full(problem.q.shape[:2], math.nan)
    REFERENCE_FORMS["paged-dense"].decode(AttentionCall(problem.layer, problem.q, segments, None, out, lse))
    return out, lse


@searched(
    80,
    kind=st.sampled_from(["swa", "c4a", "c128a"]),
    shards=st.integers(1, 8),
    seed=st.integers(0, 2**16),
    skew=st.sampled_from([0, 1, 3]),
)
def test_g13_disjoint_shards_merge_to_the_single_pass(kind: str, shards: int, seed: int, skew: int) -> None:
    """Random shards: some empty, some owning no key of a token; each computed in another form of indices."""
    scenario, rng = scenario_of(kind, seed), torch.Generator().manual_seed(seed)
    problem = scenario.problem(REFERENCE_FORMS["paged-dense"])
    tables = rows_of(problem)
    owners = [torch.randint(max(shards - skew, 1), t.shape, generator=rng) for t in tables]
    parts = [
        attend(problem, [t.where(owner == s, -1) for t, owner in zip(tables, owners, strict=True)], ragged=s % 2 == 1)
        for s in range(shards)
    ]

    out, lse = merge_lse(torch.stack([p[0] for p in parts]), torch.stack([p[1] for p in parts]))

    assert problem.attn_sink is not None
    scenario.compare(apply_sink(out, lse, problem.attn_sink), lse)
    whole, whole_lse = problem.run(REFERENCE_FORMS["paged-dense"])
    assert_close(apply_sink(out, lse, problem.attn_sink), whole)
    assert_close(lse, whole_lse)


def test_g13_the_sink_belongs_to_the_whole_and_is_applied_once() -> None:
    """What goes wrong when each shard applies it: the check that tells the two apart."""
    scenario = scenario_of("c128a")
    problem = scenario.problem(REFERENCE_FORMS["paged-dense"])
    sink = problem.attn_sink
    assert sink is not None
    halves = [[t.where(torch.arange(t.shape[1]) % 2 == s, -1) for t in rows_of(problem)] for s in range(2)]
    parts = [attend(problem, half, ragged=False) for half in halves]
    lses = torch.stack([p[1] for p in parts])
    twice, lse = merge_lse(torch.stack([apply_sink(*p, sink) for p in parts]), lses)

    with pytest.raises(AssertionError, match="budgets"):
        scenario.compare(twice, lse)
    with pytest.raises(AssertionError, match="budgets"):
        scenario.compare(apply_sink(twice, lse, sink), lse)

"""Memory of ranks that divide heads: plans, and gathering and merging that allocate nothing."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch

from dsv4attn.backends.reference.launch import ReferenceBackend
from dsv4attn.core.cache.ownership import Ownership
from dsv4attn.core.context_parallel.attention import _Merging
from dsv4attn.core.context_parallel.heads import by_rank, gather_queries
from dsv4attn.core.contract.limits import Limits
from dsv4attn.core.contract.rank_ops import RankOps
from dsv4attn.core.memory import rank_buffers
from dsv4attn.core.memory.plan import plan_workspace
from dsv4attn.core.memory.rank_buffers import ALL_HEADS_VIEWS, all_heads, merge_specs
from dsv4attn.core.memory.workspace import WorkspaceManager
from dsv4attn.core.model.geometry import LayerKind
from dsv4attn.core.torch_ops.merge import apply_sink, merge_lse
from dsv4attn.testing.checks.memory import _Meter as Meter
from tests.core.context_parallel.test_context_parallel_buffers import C4A, Alone
from tests.harness import FP8, SMALL


def test_the_backend_is_planned_for_the_heads_of_all_ranks() -> None:
    limits, backend = Limits(4, 64, 256), ReferenceBackend()
    divided = plan_workspace(C4A, limits, backend, FP8, ranks=3, divides_heads=True, prefill_keys=False)
    wide = plan_workspace(attrs.evolve(C4A, num_heads=12), limits, backend, FP8)

    assert {**divided.arenas, "ranks": 0} == {**wide.arenas, "ranks": 0}
    assert divided.transient_bytes == wide.transient_bytes
    window = SMALL.layer_of_kind(LayerKind.SWA)
    assert plan_workspace(window, limits, backend, FP8, ranks=3, divides_heads=True) == plan_workspace(
        window, limits, backend, FP8
    )


def test_a_plan_for_one_dtype_of_queries_is_smaller() -> None:
    """Queries and outputs of all heads are most of it."""
    sizes = [
        plan_workspace(C4A, Limits(4, 4096, 8192), ReferenceBackend(), FP8, ranks=2, divides_heads=True, q_dtype=dtype)
        for dtype in (torch.bfloat16, torch.float32, None)
    ]
    narrow, wide, either = (plan.arenas["ranks"] for plan in sizes)

    assert narrow < 0.7 * wide
    assert wide == either


def test_geometries_of_all_heads_are_one_object() -> None:
    """Prepared steps are keyed by its identity."""
    assert all_heads(C4A, 2) is all_heads(attrs.evolve(C4A), 2)
    assert all_heads(C4A, 2) == attrs.evolve(C4A, num_heads=8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gathering_and_merging_allocate_nothing(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_buffers, "PIECE_BYTES", 5000)
    draw, ranks, heads, tokens, dim = torch.Generator().manual_seed(0), 3, 2, 41, 15
    context: Any = Alone(Ownership(0, ranks), divides_heads=True)
    workspace = WorkspaceManager()
    layer = attrs.evolve(C4A, num_heads=heads, head_dim=dim)
    workspace.reserve(
        plan_workspace(layer, Limits(4, tokens, 256), ReferenceBackend(), FP8, ranks=ranks, divides_heads=True)
    )
    workspace.lock()
    lse, *views = workspace.get_simultaneous(
        *merge_specs(ranks, tokens, heads, dim, dtype, divides_heads=True), arena="ranks"
    )
    scratch, (queries, outs, lses) = views[:-ALL_HEADS_VIEWS], views[-ALL_HEADS_VIEWS:]
    q = torch.randn(tokens, heads, dim + 1, generator=draw).to(dtype)[..., :dim]
    outs.copy_(torch.randn(outs.shape, generator=draw))
    lses.copy_(torch.randn(lses.shape, generator=draw))
    sink, out = torch.randn(heads, generator=draw), torch.empty(tokens, heads, dim, dtype=dtype)
    with Meter() as meter:
        gather_queries(context, q, queries, *scratch[:2])
        _Merging(context, out, lse, sink, scratch, 0, RankOps(), by_rank(ranks, outs, lses)).finish()

    assert meter.peak == 0
    assert torch.equal(queries, q.repeat(1, ranks, 1))
    # the context gives back what it is sent: parts of "ranks" are those of heads
    merged, total = merge_lse(*(tensor.unflatten(1, (ranks, heads)).movedim(1, 0) for tensor in (outs, lses)))
    expected = apply_sink(merged, total, sink).to(dtype)
    torch.testing.assert_close(out, expected, rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-6)
    torch.testing.assert_close(lse, total)

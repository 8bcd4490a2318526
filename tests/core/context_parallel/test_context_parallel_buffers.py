"""Memory of attention and selection over ranks: the plan bounds every step, and a step allocates nothing else."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from dsv4attn.backends.reference.launch import ReferenceBackend
from dsv4attn.core.cache.layout import KVCacheLayout, PagedKVCache
from dsv4attn.core.cache.ownership import Ownership
from dsv4attn.core.context_parallel.attention import merge_over_ranks
from dsv4attn.core.context_parallel.metadata import OwnedMetadataBuilder
from dsv4attn.core.context_parallel.selection import select_topk_over_ranks
from dsv4attn.core.contract.layer_ops import LayerOps
from dsv4attn.core.contract.limits import Limits
from dsv4attn.core.memory import rank_buffers
from dsv4attn.core.memory.plan import plan_workspace
from dsv4attn.core.memory.workspace import WorkspaceManager, simultaneous_bytes
from dsv4attn.core.model.geometry import LayerKind
from dsv4attn.core.torch_ops.arguments import TokenMap
from dsv4attn.core.torch_ops.indexer import IndexQuery
from dsv4attn.core.torch_ops.merge import apply_sink, merge_lse
from dsv4attn.core.torch_ops.tiles import PLAIN, TILE_BYTES
from dsv4attn.errors import ArgumentError, OutOfPagesError, WorkspaceError
from dsv4attn.serving.cache_manager import CacheManager
from dsv4attn.testing.checks.memory import _Meter as Meter
from tests.harness import FP8, FP32, SMALL

C4A = SMALL.layer_of_kind(LayerKind.CSA)


@attrs.define
class Alone:
    """A context whose other ranks send what this one sends, with nothing in between."""

    ownership: Ownership
    divides_heads: bool = False

    @property
    def label(self) -> str:
        return f"rank {self.ownership.rank} of {self.ownership.size}"

    def pieces(self, rows: int, row_bytes: int, *, first: int = 0) -> Iterator[slice]:
        step = rank_buffers.piece_rows(self.ownership.size, row_bytes)
        return (slice(start, min(start + step, rows)) for start in range(first, rows, step))

    def start(self, mine: Tensor, what: str, *, out: Tensor | None = None) -> Callable[[], Tensor]:
        return partial(self.gather, mine, what, out=out)

    def start_all_to_all(self, mine: Tensor, what: str, *, out: Tensor) -> Callable[[], Tensor]:
        return lambda: out.view(mine.shape).copy_(mine)

    def gather(self, mine: Tensor, what: str, *, out: Tensor | None = None) -> Tensor:
        ranks = self.ownership.size
        gathered = mine.new_empty(ranks * mine.shape[0], *mine.shape[1:]) if out is None else out
        for part in gathered.view(ranks, *mine.shape):
            part.copy_(mine)
        return gathered.view(ranks, *mine.shape)


def alone(size: int = 2) -> Any:
    return Alone(Ownership(0, size))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("heads", "divides_heads"), [(1, False), (3, False), (4, False), (1, True), (3, True)])
def test_the_plan_holds_every_step_and_is_no_invention(
    heads: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, *, divides_heads: bool
) -> None:
    draw, layer = random.Random(heads), attrs.evolve(C4A, num_heads=heads)
    specs_of = partial(rank_buffers.merge_specs, divides_heads=divides_heads)
    for _ in range(100 if divides_heads else 200):
        monkeypatch.setattr(rank_buffers, "PIECE_BYTES", draw.choice([1, 1000, 20_000, 2**25]))
        limits, ranks = Limits(4, draw.randint(4, 200 if divides_heads else 300), 1024), draw.randint(1, 5)
        plan = plan_workspace(layer, limits, ReferenceBackend(), FP8, ranks=ranks, divides_heads=divides_heads)
        sizes = [
            simultaneous_bytes(specs_of(ranks, tokens, heads, layer.head_dim, dtype))
            for tokens in range(limits.max_num_batched_tokens + 1)
        ]
        # the plan is for fp32 too, whose pieces may have a second place where those of bf16 have one
        planned = plan.arenas["ranks"]
        assert planned / (2 if dtype == torch.float32 else 3) <= max(sizes) <= planned


def test_layers_without_entries_and_plans_without_ranks_have_no_such_arena() -> None:
    limits, backend = Limits(4, 64, 256), ReferenceBackend()
    assert "ranks" not in plan_workspace(SMALL.layer_of_kind(LayerKind.SWA), limits, backend, FP8, ranks=2).arenas
    without = plan_workspace(C4A, limits, backend, FP8)
    sharded = plan_workspace(C4A, limits, backend, FP8, ranks=2)
    assert {**without.arenas, "ranks": sharded.arenas["ranks"], "keys": sharded.arenas["keys"]} == sharded.arenas
    few = plan_workspace(C4A, limits, backend, FP8, ranks=2, prefill_keys=False).arenas
    assert {**few, "keys": sharded.arenas["keys"]} == sharded.arenas


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("heads", [3, 4])
def test_merging_allocates_nothing(heads: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_buffers, "PIECE_BYTES", 5000)
    draw, workspace, context = torch.Generator().manual_seed(0), WorkspaceManager(), alone(3)
    out, lse = torch.randn(41, heads, 15, generator=draw).to(dtype), torch.randn(41, heads, generator=draw)
    lse[7] = lse[9, 0] = -torch.inf
    out[7] = torch.nan
    sink = torch.randn(heads, generator=draw)
    merged, total = merge_lse(out.expand(3, -1, -1, -1), lse.expand(3, -1, -1))
    expected = apply_sink(merged, total, sink).to(dtype)
    limits = Limits(4, 41, 256)
    layer = attrs.evolve(C4A, num_heads=heads, head_dim=15)
    workspace.reserve(plan_workspace(layer, limits, ReferenceBackend(), FP8, ranks=3))
    workspace.lock()
    with Meter() as meter:
        merge_over_ranks(context, out, lse, sink, workspace)

    assert meter.peak == 0
    torch.testing.assert_close(out, expected, rtol=2e-2 if dtype == torch.bfloat16 else 1e-6, atol=1e-6)
    torch.testing.assert_close(lse, total)


def test_a_locked_workspace_that_is_too_small_is_refused_before_anything_is_sent() -> None:
    workspace = WorkspaceManager()
    workspace.lock()
    out, lse = torch.ones(5, 4, 32), torch.zeros(5, 4)
    with pytest.raises(WorkspaceError, match=r"^workspace: attention on rank 0 of 2 needs \d+ bytes in arena 'ranks'"):
        merge_over_ranks(alone(), out, lse, None, workspace)
    assert bool((out == 1).all())


@pytest.mark.parametrize(("tokens", "topk"), [(3, 512), (700, 512), (1500, 64), (64, 2048)])
def test_a_selection_holds_no_more_than_the_plan_says(tokens: int, topk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_buffers, "PIECE_BYTES", 2**21)
    context, layout, heads, entries = alone(), KVCacheLayout.rows(32, 0, dtype=torch.float32), 4, 2 * topk
    cache = PagedKVCache(torch.randn(1, entries, 32), layout)
    query = IndexQuery(torch.randn(tokens, heads, 32), torch.randn(tokens, heads))
    out = torch.full((tokens, topk), -1, dtype=torch.int32)
    table, token_to_req = torch.zeros(1, 1, dtype=torch.int32), torch.zeros(tokens, dtype=torch.int32)
    token_map = TokenMap(table, token_to_req, torch.full((tokens,), entries, dtype=torch.int32))
    layer, backend = attrs.evolve(C4A, topk=topk), ReferenceBackend()
    ops = attrs.evolve(LayerOps(), select_topk=_first_entries)
    with Meter() as meter:
        select_topk_over_ranks(context, ops, PLAIN, query, cache, token_map, out, 2 * entries)
    plan = plan_workspace(layer, Limits(4, tokens, 16384), backend, FP32, layer_parts=True, ranks=2)
    selection_bytes = rank_buffers.selection_transient_bytes(2, layer, tokens)

    assert meter.peak <= TILE_BYTES * 2 + selection_bytes <= plan.transient_bytes
    assert meter.peak >= selection_bytes / 4, "the bound is no invention"


def _first_entries(*arguments: Any) -> None:
    """Select the first entries, without an allocation."""
    out = arguments[3]
    torch.arange(out.shape[1], out=out[0])
    out[1:].copy_(out[:1].expand_as(out[1:]))


def test_contexts_beyond_the_plan_are_refused_with_the_rank_named() -> None:
    limits, ownership = Limits(2, 32, 64), Ownership(1, 2)
    builder = OwnedMetadataBuilder(ownership, SMALL, limits, compressed_block_tokens=64)
    with pytest.raises(ArgumentError, match=r"^seq_lens\[0\] on rank 1 of 2: expected at most 64, got 65"):
        builder._check_limit("seq_lens[0]", "max_model_len", 65)
    manager = CacheManager(SMALL, limits, FP32, num_blocks={"compressed": 0}, compressed_block_tokens=64)
    manager._where = " on rank 1 of 2"
    with pytest.raises(OutOfPagesError, match=r"1 compressed pages needed, 0 of 0 are free on rank 1 of 2 -> "):
        manager.reserve([(manager.new(), 9)])
    with pytest.raises(ArgumentError, match=r"^requests on rank 1 of 2: expected at most 64 tokens in a sequence"):
        manager.reserve([(manager.new(), 65)])

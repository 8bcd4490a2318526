"""Partials of attention over ranks are packed bit for bit, and merged as float64 merges them."""

from __future__ import annotations

from math import inf, nan
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from attrs import frozen
from torch import Tensor

from dsv4attn.backends._triton.attention import kernels_ranks, ranks
from dsv4attn.backends._triton.interpreted import INTERPRETED
from dsv4attn.backends._triton.launching.runtime import observed
from dsv4attn.backends.reference.launch import ReferenceBackend
from dsv4attn.backends.triton.launch import GenericBackend
from dsv4attn.core.context_parallel.attention import merge_over_ranks
from dsv4attn.core.contract.device import DeviceFacts
from dsv4attn.core.contract.limits import Limits
from dsv4attn.core.contract.rank_ops import RankOps
from dsv4attn.core.contract.warmup import WarmupSpec
from dsv4attn.core.memory import rank_buffers
from dsv4attn.core.memory.plan import plan_workspace
from dsv4attn.core.memory.workspace import WorkspaceManager
from dsv4attn.core.model.geometry import ModelGeometry
from dsv4attn.core.torch_ops.merge import apply_sink, merge_lse
from tests.backends._triton.cache.caches import DEVICE
from tests.backends._triton.index_ops.index_trials import planted
from tests.core.context_parallel.test_context_parallel_buffers import C4A, alone
from tests.harness import FP8, same_bits

TOTAL = "            total += weight\n"
SINK = "tl.exp(tl.load(sink + head * sink_head)"
BUGS = {
    "a sink for each rank": (TOTAL, f"            total += weight + {SINK} - top)\n"),
    "NaN of a part without keys": ("tl.where(weight == 0.0, 0, D)", "D"),
    "NaN of a row without keys": ("tl.where(empty, 0.0, acc / total)", "acc / total"),
    "no largest lse": ("its - top)", "its)"),
    "the last rank is left out": ("for i in tl.static_range(N)", "for i in tl.static_range(N - 1)"),
    "lse with the sink": ('tl.where(empty, -float("inf"), whole))', f"whole + {SINK}))"),
}
SINKS = [None, 0.5, -inf, inf, 1e30, -1e30]


@frozen
class Parts:
    """Parts of some ranks: outs [R, T, H, D] and lses [R, T, H]."""

    outs: Tensor
    lses: Tensor

    @classmethod
    def draw(cls, count: int, heads: int, dim: int, dtype: torch.dtype) -> Parts:
        """Of 6 tokens. The first has no key, the second has one on the last rank only, others on some ranks."""
        draw = torch.Generator().manual_seed(count * dim)
        outs = torch.randn(count, 6, heads, dim, generator=draw).to(dtype)
        lses = 20 * torch.randn(count, 6, heads, generator=draw)
        lses[torch.rand(lses.shape, generator=draw) < 0.3] = -inf
        lses[:, 0] = lses[:-1, 1] = -inf
        lses[-1, 1] = 3.0
        outs[lses == -inf] = nan
        return cls(outs.to(DEVICE), lses.to(DEVICE))

    def merged(self, sink: Tensor | None, kernels: ModuleType = ranks) -> tuple[Tensor, Tensor]:
        """What the kernel writes, in rows that lie apart."""
        (_, tokens, heads, dim), like = self.outs.shape, self.outs
        out = like.new_full((heads, tokens + 1, dim + 16), 7.0)
        lse = self.lses.new_full((heads, tokens), 7.0).T
        view = out.transpose(0, 1)[:tokens, :, :dim]
        kernels.merge_partials(self.outs, self.lses, view, lse, sink)
        assert bool((out[:, tokens:] == 7).all())
        assert bool((out[..., dim:] == 7).all())
        return view, lse

    def whole(self, sink: Tensor | None) -> tuple[Tensor, Tensor]:
        """The same in float64, from the softmax over all ranks."""
        weight = self.lses.double().exp()
        terms = torch.where(weight[..., None] > 0, weight[..., None] * self.outs.double(), 0.0).sum(0)
        total = weight.sum(0)
        below = total if sink is None else total + sink.double().exp()
        return torch.where(total[..., None] > 0, terms / below[..., None], 0.0), total.log()

    def judge(self, sink: Tensor | None, kernels: ModuleType = ranks) -> None:
        """Fail unless the kernel agrees with float64, and with torch's definition."""
        out, lse = self.merged(sink, kernels)
        expected, total = self.whole(sink)
        close: dict[str, Any] = {"rtol": 2e-5, "atol": 2e-6}
        rough: dict[str, Any] = {"rtol": 1e-2, "atol": 1e-5} if out.dtype == torch.bfloat16 else close
        torch.testing.assert_close(out.double(), expected, **rough)
        torch.testing.assert_close(lse.double(), total, **close)
        defined, defined_lse = merge_lse(self.outs, self.lses)
        if sink is not None:
            defined = apply_sink(defined, defined_lse, sink)
        torch.testing.assert_close(out, defined.to(out.dtype), **rough)
        assert bool((out[0] == 0).all())
        assert bool((lse[0] == -inf).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("count", "heads", "dim"), [(1, 2, 32), (2, 3, 15), (3, 4, 64), (5, 1, 512), (8, 4, 48)])
def test_parts_are_merged_as_float64_merges_them(count: int, heads: int, dim: int, dtype: torch.dtype) -> None:
    parts = Parts.draw(count, heads, dim, dtype)
    for value in SINKS:
        parts.judge(None if value is None else torch.full((heads,), value, device=DEVICE))


def test_a_nan_of_a_part_with_keys_stays_in_its_row() -> None:
    parts = Parts.draw(3, 2, 32, torch.float32)
    parts.lses[1, 2, 0] = nan
    parts.outs[1, 2, 0] = nan
    parts.lses[1, 3, 1], parts.outs[1, 3, 1] = 1.0, 0.5
    parts.outs[1, 3, 1, 5] = nan
    out, lse = parts.merged(None)

    assert bool(out[2, 0].isnan().all())
    assert bool(lse[2, 0].isnan())
    assert out.isnan().nonzero().tolist()[-1] == [3, 1, 5]
    assert int(out.isnan().sum()) == 32 + 1
    assert int(lse.isnan().sum()) == 1


@pytest.mark.mutation
@pytest.mark.skipif(not INTERPRETED, reason="a compiled kernel cannot be changed from outside")
@pytest.mark.parametrize("bug", BUGS)
def test_mutant_bugs_are_found(bug: str, tmp_path: Path) -> None:
    parts, sink = Parts.draw(4, 2, 32, torch.float32), torch.tensor([0.5, 2.0], device=DEVICE)
    parts.lses[0, 2], parts.outs[0, 2] = 100.0, 0.25  # exp of it is no fp32 number
    parts.judge(sink, planted(ranks, kernels_ranks, tmp_path, "", ""))

    with pytest.raises(AssertionError):
        parts.judge(sink, planted(ranks, kernels_ranks, tmp_path, *BUGS[bug]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("heads", "dim"), [(3, 15), (4, 32)])
def test_a_part_is_packed_bit_for_bit(heads: int, dim: int, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(dim)
    bits = torch.randint(-(2**15), 2**15, (heads, 5, dim * dtype.itemsize // 2), generator=draw).short().to(DEVICE)
    out = bits.view(dtype).transpose(0, 1)
    lse = torch.tensor([[-inf, nan, inf, -0.0, 1.5]], device=DEVICE).expand(heads, 5).T
    sent, sent_lse = torch.zeros(5, heads, dim, dtype=dtype, device=DEVICE), torch.zeros(5, heads, device=DEVICE)
    ranks.pack_partial(out, lse, sent, sent_lse)

    assert same_bits(sent, out.contiguous())
    assert same_bits(sent_lse, lse.contiguous())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("heads", [3, 4])
def test_each_piece_takes_two_launches_and_a_smaller_workspace(
    heads: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_buffers, "PIECE_BYTES", 6000)
    draw, backend, layer = torch.Generator().manual_seed(0), GenericBackend(), C4A
    out = torch.randn(41, heads, layer.head_dim, generator=draw).to(dtype).to(DEVICE)
    lse, sink = torch.randn(41, heads, generator=draw).to(DEVICE), torch.randn(heads, generator=draw).to(DEVICE)
    merged, total = merge_lse(out.expand(3, -1, -1, -1), lse.expand(3, -1, -1))
    expected = apply_sink(merged, total, sink).to(dtype)
    plans = [
        rank_buffers.merge_specs(3, 41, heads, layer.head_dim, dtype, merge_scratch=ops.merge_scratch)
        for ops in (backend.rank_ops, RankOps())
    ]
    workspace, context = WorkspaceManager(DEVICE), alone(3)
    count = len(list(context.pieces(41, rank_buffers.attention_bytes(heads, layer.head_dim, dtype.itemsize))))
    assert count > 2
    with observed() as seen:
        merge_over_ranks(context, out, lse, sink, workspace, backend=backend)

    assert [variant.name for variant in seen].count("pack_part_kernel") == count
    assert [variant.name for variant in seen].count("merge_parts_kernel") == count
    assert len(seen) == 2 * count
    foreseen = set(ranks.variants(heads, layer.head_dim, dtype, sinks=[True]))
    assert set(seen) <= foreseen
    torch.testing.assert_close(out, expected, rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-6)
    torch.testing.assert_close(lse, total)
    assert plans[0] == plans[1][:3]
    launches = [
        plan_workspace(layer, Limits(4, 41, 256), arguments_of, FP8, ranks=3).arenas["ranks"]
        for arguments_of in (backend, ReferenceBackend())
    ]
    assert launches[0] < launches[1]


def test_kernels_over_ranks_are_compiled_where_entries_are_spread_alone() -> None:
    model, limits, device = ModelGeometry.preset("flash"), Limits(4, 64, 4096), DeviceFacts.named("sm_90")
    named = [
        {variant.kernel.__name__ for variant in GenericBackend().kernel_variants(bounds, device)}
        for bounds in (WarmupSpec.of(model, limits, layer_parts=True, over_ranks=spread) for spread in (False, True))
    ]

    merge = {"pack_part_kernel", "merge_parts_kernel"}
    assert named[1] - named[0] == merge | {"place_kernel", "own_kernel", "keep_kernel"}

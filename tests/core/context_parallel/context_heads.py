"""Cases of ranks that divide the heads of a layer as well as its entries, against all heads on one rank."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from math import inf
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from dsv4attn.core.cache.layout import KVCacheLayout
from dsv4attn.core.context_parallel.attention import merge_over_ranks
from dsv4attn.core.context_parallel.context import ContextParallel
from dsv4attn.core.layer.attention_layer import DeepseekV4Attention
from dsv4attn.core.memory import rank_buffers
from dsv4attn.core.memory.workspace import WorkspaceManager
from dsv4attn.core.metadata.forward_context import set_forward_context
from dsv4attn.core.model.geometry import LayerKind
from dsv4attn.core.model.weights import AttentionWeights
from dsv4attn.errors import ArgumentError
from dsv4attn.selection import load_backend
from tests.core.context_parallel.context_attention import attention, exchanges_during_attention, same_everywhere
from tests.harness import FP8, FP32, REFERENCE_FORMS, SMALL, LayerStack, assert_outputs_close

TWELVE = attrs.evolve(SMALL, num_heads=12, o_groups=12)
"""Heads that 2, 3 and 4 ranks can divide."""


class QueriesRolled(ContextParallel):
    """A context that gathers the queries of ranks in another order."""

    def start(self, mine: Tensor, what: str, *, out: Tensor | None = None) -> Callable[[], Tensor]:
        finish = super().start(mine, what, out=out)
        return lambda: finish().roll(1, 0) if what == "queries" else finish()


class PartsRolled(ContextParallel):
    """A context that sends each rank the heads of the rank before it."""

    def start_all_to_all(self, mine: Tensor, what: str, *, out: Tensor) -> Callable[[], Tensor]:
        return super().start_all_to_all(mine.roll(1, 0), what, out=out)


def divided(group: Any, of: type[ContextParallel] = ContextParallel) -> ContextParallel:
    return of(group, 2, divides_heads=True)


def heads_of_tokens(group: Any, kind: LayerKind, form: str, **options: Any) -> None:
    """Two heads on each rank, against float64."""
    attention(group, kind, form, divided(group), **options)


def sinks(group: Any, value: float) -> None:
    """Every other head has the sink, the others have none; -inf: no head has one."""
    sink = torch.full((2 * group.size(),), -inf)
    sink[::2] = value
    attention(group, LayerKind.CSA, "paged-dense", divided(group), sink)


def in_pieces(group: Any) -> None:
    """Queries and parts in pieces of a few tokens."""
    size = rank_buffers.PIECE_BYTES
    rank_buffers.PIECE_BYTES = 7 * group.size() * 2 * (32 * 4 + 4)
    try:
        attention(group, LayerKind.HCA, "gathered-dense", divided(group))
    finally:
        rank_buffers.PIECE_BYTES = size


def during_attention(group: Any) -> None:
    """As `exchanges_during_attention`: parts of a prefill are sent during the attention of later chunks."""
    exchanges_during_attention(group, LayerKind.CSA, "paged-dense", divides_heads=True)


def mutant(group: Any, of: type[ContextParallel]) -> None:
    """The order of ranks matters: a context that changes it fails on every rank."""
    with pytest.raises(AssertionError):
        attention(group, LayerKind.CSA, "paged-dense", divided(group, of))


# whole layers


COMMON: dict[str, Any] = {"geometry": TWELVE, "compressed_block_tokens": 64}


def on_one(layout: KVCacheLayout) -> LayerStack:
    return LayerStack(load_backend("reference"), layout, **COMMON)


def over_ranks(group: Any, layout: KVCacheLayout, context: ContextParallel) -> LayerStack:
    """Heads and entries divided over one group."""
    many = LayerStack(load_backend("reference"), layout, **COMMON, context_parallel=context)
    many.workspace = WorkspaceManager(debug=True)
    many.layers = [on_rank(group, many, i, group.rank(), group.size(), context) for i in range(TWELVE.num_layers)]
    return many


def on_rank(
    group: Any, many: LayerStack, index: int, rank: int, size: int, context: ContextParallel
) -> DeepseekV4Attention:
    """A layer with the heads of a rank, bound to its caches."""
    full = AttentionWeights.from_dict(many.weights[index], TWELVE, TWELVE.layer(index))
    options = {"workspace": many.workspace, "process_group": group, "context_parallel": context}
    arguments = many.limits, load_backend("reference"), full.shard(rank, size)
    layer = DeepseekV4Attention(f"l.{index}", TWELVE.tensor_parallel(size), index, *arguments, **options)
    layer.bind_kv_cache(many.manager.caches[index])
    return layer


def layers(group: Any, layout: Any, *, other_sink: bool = False) -> None:
    """Two sequences, prefills and decodes in one batch: outputs of all layers, which are the same on all ranks.

    other_sink: whether each rank takes the sinks of the next one's heads, which must fail.
    """
    many = over_ranks(group, layout, divided(group))
    for i, layer in enumerate(many.layers if other_sink else ()):
        whole = torch.as_tensor(many.weights[i]["attn_sink"])
        layer.attention.attn_sink = whole.chunk(group.size())[(group.rank() + 1) % group.size()].clone()
    outputs = served(many)
    worst = max(
        float((mine - expected).abs().max() / expected.abs().max())
        for mine, expected in zip(outputs, alone(layout), strict=True)
    )
    assert (worst > 1e-3) if other_sink else (worst <= 3e-6)
    for mine in outputs:
        same_everywhere(group, mine)


def served(model: LayerStack) -> list[Tensor]:
    """What `layers` says of one model: outputs of every layer in every step."""
    a, b = model.manager.new(), model.manager.new()
    outputs = model.step([(a, 40)], model.hidden(1, 40))
    outputs += model.step([(a, 1), (b, 60)], model.hidden(2, 61))
    for seed in range(3):
        outputs += model.step([(a, 1), (b, 1)], model.hidden(3 + seed, 2))
    # a context shorter than an entry of some ranks
    return [*outputs, *model.cut(model.hidden(9, 9), [5, 4])[1]]


@cache
def alone(layout: KVCacheLayout) -> list[Tensor]:
    """Outputs of one rank, for groups of every size: nothing about them depends on the group."""
    return served(on_one(layout))


def padding_and_warm_up(group: Any) -> None:
    """Padding rows give what they give on one rank, and a warm-up reserves what a locked workspace needs."""
    single, many = on_one(FP32), over_ranks(group, FP32, divided(group))
    for model in (single, many):
        with set_forward_context(None), torch.no_grad():
            for layer in model.layers:
                assert torch.isfinite(layer(model.hidden(0, 7), torch.arange(7))).all()
    many.workspace.lock()
    padded = [model.hidden(0, 12) for model in (single, many)]
    outs = [
        model.run([(model.manager.new(), 9)], rows, padding=3)
        for model, rows in zip((single, many), padded, strict=True)
    ]
    assert_outputs_close(outs[1], outs[0], 3e-6)


# refusals


def refused(group: Any) -> None:
    """What ranks that divide heads may not have is refused on every rank, by name."""
    rank, size = group.rank(), group.size()
    context, backend = divided(group), load_backend("reference")
    many = LayerStack(backend, geometry=TWELVE, compressed_block_tokens=64, context_parallel=context)
    but_the_last = ContextParallel(group, 2, divides_heads=rank != size - 1)
    said = rf"l.1: divides_heads: expected True, as rank 0 has, got False on rank {size - 1}"
    with pytest.raises(ArgumentError, match=said):
        on_rank(group, many, 1, rank, size, but_the_last)
    for bound, wrong in ((_Group((rank + 1) % size, size), f"1 of {size}"), (_Group(0, 1), "0 of 1")):
        said = rf"l.1: heads: expected part 0 of {size} on rank 0, .* got part {wrong} -> "
        with pytest.raises(ArgumentError, match=said):
            on_rank(bound, many, 1, rank, size, context)
    with pytest.raises(ArgumentError, match=rf"l.1: heads: .* on rank {size - 1}, .* got all heads"):
        on_rank(None if rank == size - 1 else group, many, 1, rank, size, context)
    with pytest.raises(ArgumentError, match=r"context: expected a context whose ranks have the same heads, got div"):
        merge_over_ranks(context, torch.zeros(2, 3, 4), torch.zeros(2, 3), None, WorkspaceManager())


def queries_of_other_heads(group: Any) -> None:
    """Queries and outputs of all heads, where those of one rank belong, are refused before anything is sent."""
    many = over_ranks(group, FP32, divided(group))
    layer, sequence = many.layers[1].attention, many.manager.new()
    batch = many.manager.batch([(sequence, 5)])
    for heads, said in ((12, "q: expected"), (TWELVE.num_heads // group.size(), "output|out: expected")):
        q, out = torch.zeros(5, heads, 32), torch.full((5, 12, 32), 7.0)
        with set_forward_context(many.manager.metadata(batch)), pytest.raises(ArgumentError, match=said):
            layer.forward_mqa(q, torch.zeros(5, 32), torch.arange(5), out)
        assert bool((out == 7).all())


@attrs.frozen
class _Group:
    """A process group as far as binding looks at it."""

    part: int
    parts: int

    def rank(self) -> int:
        return self.part

    def size(self) -> int:
        return self.parts


HEADS: dict[str, Callable[[Any], None]] = {
    **{
        f"divided-{kind.value}-{form}": partial(heads_of_tokens, kind=kind, form=form)
        for kind in (LayerKind.CSA, LayerKind.HCA)
        for form in REFERENCE_FORMS
    },
    **{
        f"divided-keys-{kind.value}-{form}": partial(heads_of_tokens, kind=kind, form=form, keys_of_all=True)
        for kind in (LayerKind.CSA, LayerKind.HCA)
        for form in REFERENCE_FORMS
    },
    "divided-bf16": partial(heads_of_tokens, kind=LayerKind.CSA, form="gathered-dense", dtype=torch.bfloat16),
    **{f"divided-sink-{value}": partial(sinks, value=value) for value in (40.0, inf, -inf)},
    "divided-pieces": in_pieces,
    "divided-during-attention": during_attention,
    **{f"divided-mutant-{of.__name__}": partial(mutant, of=of) for of in (QueriesRolled, PartsRolled)},
    "divided-layers-fp32": partial(layers, layout=FP32),
    "divided-layers-fp8": partial(layers, layout=FP8),
    "divided-mutant-sink": partial(layers, layout=FP32, other_sink=True),
    "divided-padding": padding_and_warm_up,
    "divided-refused": refused,
    "divided-other-heads": queries_of_other_heads,
}

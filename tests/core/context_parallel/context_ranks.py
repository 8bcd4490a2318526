"""Cases of context parallelism that a pool of ranks runs, each in a process of its own with gloo between them."""

from __future__ import annotations

import datetime as dt
import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from math import inf, isnan, nan
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor, distributed

from dsv4attn.core.cache.layout import KVCacheLayout, PagedKVCache
from dsv4attn.core.context_parallel.attention import merge_over_ranks
from dsv4attn.core.context_parallel.context import ContextParallel
from dsv4attn.core.context_parallel.reshard import reshard_cache
from dsv4attn.core.context_parallel.selection import select_topk_over_ranks
from dsv4attn.core.contract.backend import Backend
from dsv4attn.core.contract.limits import Limits
from dsv4attn.core.layer.attention_layer import DeepseekV4Attention
from dsv4attn.core.memory import rank_buffers
from dsv4attn.core.memory.workspace import WorkspaceManager
from dsv4attn.core.metadata.forward_context import set_forward_context
from dsv4attn.core.model.geometry import LayerKind
from dsv4attn.core.model.weights import AttentionWeights
from dsv4attn.core.torch_ops.arguments import TokenMap
from dsv4attn.core.torch_ops.indexer import IndexQuery
from dsv4attn.core.torch_ops.tiles import PLAIN
from dsv4attn.errors import ArgumentError, ContextParallelError
from dsv4attn.selection import load_backend
from dsv4attn.serving.cache_manager import CachedSequence
from tests.core.context_parallel.context_attention import (
    attention,
    context_over,
    exchanges_during_attention,
    same_everywhere,
)
from tests.core.context_parallel.context_heads import HEADS
from tests.core.context_parallel.context_keys import keys_in_pieces, keys_mutant, keys_refused
from tests.harness import (
    FP8,
    FP32,
    REFERENCE_FORMS,
    SMALL,
    LayerStack,
    assert_outputs_close,
    deterministic,
    random_weights,
)
from tests.ranks import gloo_group
from tests.testing.mutants_rank_ops import Merges
from tests.tools.replay.rank_cases import REPLAYS

SIZES = 2, 3, 4


def serve(rank: int, folder: str, chosen: Mapping[int, Sequence[str]]) -> None:
    """Run cases on groups of several sizes, and write what failed to a file of the rank: {(size, case): text}.

    chosen: names of cases by the size of their group. With a group of 4, "heads" and "gone" are run too.
    """
    torch.set_num_threads(1)
    failed: dict[tuple[int, str], str] = {}
    with gloo_group(rank, max(chosen), folder):
        groups = {size: distributed.new_group(range(size), timeout=dt.timedelta(minutes=10)) for size in chosen}
        for size, group in groups.items():
            cases = {**CASES, **REPLAYS.get(size, {})}
            for name in chosen[size] if rank < size else ():
                failed[size, name] = _said(partial(cases[name], group))
        if 4 in chosen:
            last = distributed.new_group(range(3), timeout=dt.timedelta(seconds=3))
            pairs = [[distributed.new_group(ranks) for ranks in two] for two in (([0, 1], [2, 3]), ([0, 2], [1, 3]))]
            failed[4, "heads"] = _said(partial(heads, pairs[0][rank // 2], pairs[1][rank % 2]))
            distributed.barrier()
            if rank < 3:
                failed[3, "gone"] = _gone(rank, last)
        torch.save(failed, Path(folder, f"{rank}.pt"))
        os._exit(0)  # a group with a rank that has gone cannot be destroyed in order


def _said(case: Callable[[], None]) -> str:
    """How a case failed, for the parent to show; empty if it did not."""
    try:
        case()
    except (Exception, pytest.fail.Exception):  # noqa: BLE001 - a rank that fails goes on with the next case, as the others do
        return traceback.format_exc()
    return ""


def _gone(rank: int, group: Any) -> str:
    """What the other ranks say when rank 2 does not come."""
    if rank == 2:
        return ""
    try:
        ContextParallel(group).gather(torch.zeros(4), "candidates")
    except ContextParallelError as error:
        return str(error)
    return "no error"


# merge


def merge(group: Any, dtype: torch.dtype, tolerance: float) -> None:
    """Random parts against a merge in float64; some ranks have no key of a token, some tokens have none at all."""
    ranks, rank, (tokens, heads, dim) = group.size(), group.rank(), (37, 3, 16)
    draw = torch.Generator().manual_seed(ranks)
    outs = torch.randn(ranks, tokens, heads, dim, generator=draw).to(dtype)
    lses = 20 * torch.randn(ranks, tokens, heads, generator=draw)
    lses[torch.rand(ranks, tokens, heads, generator=draw) < 0.4] = -inf
    lses[:, 5] = -inf
    lses[1:, 6] = -inf
    outs[lses == -inf] = nan  # what a rank without keys leaves must not count
    sink = torch.randn(heads, generator=draw)
    weight = lses.double().exp()
    whole = weight.sum(0)
    terms = torch.where(weight[..., None] > 0, weight[..., None] * outs.double(), 0.0).sum(0)
    for sinks in (None, sink):
        total = whole + (0 if sinks is None else sinks.double().exp())
        expected = torch.where(whole[..., None] > 0, terms / total[..., None], 0.0)
        out, lse = outs[rank].transpose(0, 1).contiguous().transpose(0, 1), lses[rank].clone()
        merge_over_ranks(context_over(group), out, lse, sinks, WorkspaceManager(debug=True))

        assert float((out.double() - expected).abs().max()) < tolerance
        torch.testing.assert_close(lse.double(), whole.log())
        same_everywhere(group, out)


def pieces(group: Any) -> None:
    """Exchanges in pieces of a few tokens change no bit."""
    draw = torch.Generator().manual_seed(group.rank())
    out, lse = torch.randn(23, 2, 8, generator=draw), torch.randn(23, 2, generator=draw)
    other = out.clone(), lse.clone()
    merge_over_ranks(context_over(group), out, lse, None, WorkspaceManager())
    size = rank_buffers.PIECE_BYTES
    rank_buffers.PIECE_BYTES = 500
    try:
        merge_over_ranks(context_over(group), *other, None, WorkspaceManager())
    finally:
        rank_buffers.PIECE_BYTES = size

    assert torch.equal(out, other[0])
    assert torch.equal(lse, other[1])


# selection


def selection(group: Any, interleave: int) -> None:
    """Keys of small integers: many equal scores, all exact. Against a sort by (score, number) in Python."""
    context, draw = context_over(group, interleave), torch.Generator().manual_seed(7 * group.size() + interleave)
    ownership, size, (requests, heads, dim, topk) = context.ownership, 4, (4, 2, 8, 5)
    entries = [0, 3, 40, 61]
    layout = KVCacheLayout.rows(dim, 0, dtype=torch.float32)
    keys = [torch.randint(-1, 2, (n, dim), generator=draw).float() for n in entries]
    keys[2][7], keys[3][11, 2] = nan, nan
    keys[3][20] = keys[3][21] = inf
    token_to_req = torch.tensor([0, 1, 1, 2, 2, 3, 3, 3], dtype=torch.int32)
    visible = torch.tensor([0, 3, 1, 40, 12, 61, 60, 0], dtype=torch.int32)
    q = torch.randint(0, 2, (8, heads, dim), generator=draw).float()
    q[:, :, 2] = 1
    query = IndexQuery(q, torch.ones(8, heads))
    local = [ownership.entry(torch.arange(ownership.count(n))) for n in entries]
    columns = max(-(-len(entries_of_request) // size) for entries_of_request in local)
    order = torch.randperm(requests * columns + 3, generator=torch.Generator().manual_seed(group.rank()))
    table = order[: requests * columns].int().reshape(requests, columns)
    cache = PagedKVCache(torch.full((len(order), size, dim), nan), layout)
    for i, numbers in enumerate(local):
        for n, e in enumerate(numbers.tolist()):
            cache.tensor[table[i, n // size], n % size] = keys[i][e]
    out = torch.full((8, topk + 2), -7, dtype=torch.int32)[:, 1:-1]
    steps = load_backend("reference").layer_ops
    token_map = TokenMap(table, token_to_req, ownership.counts(visible).int())
    select_topk_over_ranks(context, steps, PLAIN, query, cache, token_map, out, max(entries))

    for t, (i, n) in enumerate(zip(token_to_req.tolist(), visible.tolist(), strict=True)):
        score = torch.relu(q[t].double() @ keys[i][:n].double().T).sum(0).tolist()
        best = sorted((-s, e) for e, s in enumerate(score) if not isnan(s))[:topk]
        mine = sorted(ownership.local(e) for _, e in best if ownership.owner(e) == ownership.rank)
        assert out[t].tolist() == mine + [-1] * (topk - len(mine)), (t, best)


# whole layers


def setup(prefill: str) -> tuple[Backend, dict[str, Any]]:
    """A backend, and options of layers. prefill: how a prefill reads keys; empty: decode and prefill are one phase."""
    common: dict[str, Any] = {"compressed_block_tokens": 64, "keep_windows": True}
    if prefill:
        limits = Limits(4, 80, 256, num_speculative_tokens=2)
        return load_backend("reference", prefill_keys=prefill), {"limits": limits, **common}
    return load_backend("reference", deterministic=True), {"limits": deterministic(Limits(4, 80, 256)), **common}


def on_one_rank(layout: KVCacheLayout = FP8, prefill: str = "") -> LayerStack:
    backend, options = setup(prefill)
    return LayerStack(backend, layout, **options)


def over_ranks(
    group: Any, layout: KVCacheLayout = FP8, interleave: int = 1, prefill: str = "", merging: Backend | None = None
) -> LayerStack:
    """The layers of `on_one_rank`, with other pages. merging: a backend that merges over ranks by itself."""
    backend, options = setup(prefill)
    return LayerStack(merging or backend, layout, **options, **both(context_over(group, interleave)), shuffle_seed=5)


def served(model: LayerStack) -> tuple[list[Tensor], list[CachedSequence]]:
    """Several sequences in one batch, chunks, decodes, drafts, a fork: outputs of every layer, and the sequences."""
    a, b, outputs = model.manager.new(), model.manager.new(), []
    outputs += model.step([(a, 40)], model.hidden(1, 40))
    outputs += model.step([(a, 1), (b, 70)], model.hidden(2, 71))
    outputs += model.run([(a, 3), (b, 1)], model.hidden(3, 4))  # drafts, of which one token is accepted
    model.manager.advance([(a, 3), (b, 1)])
    model.manager.truncate(a, 42)
    c = model.manager.fork(b, 33)
    for i in range(3):
        outputs += model.step([(a, 1), (b, 1), (c, 2)], model.hidden(4 + i, 4))
    outputs += model.step([(c, 50)], model.hidden(9, 50))
    return outputs, [a, b, c]


@cache
def served_by_one_rank(layout: KVCacheLayout, prefill: str) -> tuple[LayerStack, list[Tensor], list[CachedSequence]]:
    """The answers for `whole`; a process makes them once for groups of all sizes."""
    model = on_one_rank(layout, prefill)
    return model, *served(model)


def whole(
    group: Any, layout: KVCacheLayout, interleave: int, prefill: str = "", merging: Backend | None = None
) -> None:
    """The steps of `served` over ranks: outputs, and every entry's bytes, are those of one rank."""
    single, answers, sequences = served_by_one_rank(layout, prefill)
    many = over_ranks(group, layout, interleave, prefill, merging)
    outputs, shares = served(many)
    assert_outputs_close(outputs, answers, 3e-6)
    for mine in outputs:
        same_everywhere(group, mine)
    if layout is FP8:
        return  # a key of rounded inputs may be rounded another way
    compare_entries(single, many, sequences, shares)


def compare_entries(single: LayerStack, many: LayerStack, whole_sequences: Any, shares: Any) -> None:
    """Every entry that this rank holds has the bytes that one rank has."""
    ownership = many.manager.builder.ownership  # type: ignore[attr-defined]
    for left, right in zip(whole_sequences, shares, strict=True):
        assert left.length == right.length
        for i in (1, 2):
            ratio = SMALL.layer(i).compress_ratio
            for name in ("compressed", "index"):
                theirs, mine = (m.manager.caches[i].present.get(name) for m in (single, many))
                if theirs is None or mine is None:
                    continue
                pages = [torch.tensor(s.tables["compressed"].blocks) for s in (left, right)]
                blank = PagedKVCache(torch.zeros_like(mine.tensor), mine.layout)
                reshard_cache([(theirs, pages[0])], (blank, pages[1]), left.length // ratio, ownership)
                count = ownership.count(left.length // ratio)
                place = torch.arange(count)
                at = pages[1][place // mine.block_size], place % mine.block_size
                torch.testing.assert_close(mine.tensor[at], blank.tensor[at], rtol=1e-5, atol=1e-5)
                assert count == 0 or bool(mine.tensor[at].any())


def long_shortcut(group: Any) -> None:
    """A short context selects everything on every rank, without an exchange."""
    single, many = on_one_rank(), over_ranks(group)
    hidden = single.hidden(0, 15)
    requests, padded = [(many.manager.new(), 9)], torch.cat([hidden[:9], torch.full_like(hidden[:3], nan)])
    alone = single.run([(single.manager.new(), 9)], hidden[:9])
    assert_outputs_close([out[:9] for out in many.run(requests, padded, padding=3)], alone, 3e-6)
    assert_outputs_close(many.cut(hidden, [10, 5])[1], single.cut(hidden, [10, 5])[1], 3e-6)


def warm_up(group: Any) -> None:
    """A warm-up sends nothing: here the first rank alone runs it."""
    many = over_ranks(group)
    if group.rank() == 0:
        with set_forward_context(None), torch.no_grad():
            for layer in many.layers:
                assert torch.isfinite(layer(many.hidden(0, 7), torch.arange(7))).all()


def heads(context: Any, others: Any) -> None:
    """Entries over one group and heads over another: outputs of all layers, against one rank."""
    size, rank, backend = others.size(), others.rank(), load_backend("reference")
    single, limits = LayerStack(backend, compressed_block_tokens=64), Limits(4, 64, 256)
    many = LayerStack(backend, compressed_block_tokens=64, **both(context_over(context)))
    geometry = SMALL.tensor_parallel(size)
    for i in range(SMALL.num_layers):
        full = AttentionWeights.from_dict(random_weights(SMALL, i), SMALL, SMALL.layer(i))
        options = {"workspace": many.workspace, "process_group": others, "context_parallel": context_over(context)}
        layer = DeepseekV4Attention(f"l.{i}", geometry, i, limits, backend, full.shard(rank, size), **options)
        layer.bind_kv_cache(many.manager.caches[i])
        many.layers[i] = layer
    hidden = single.hidden(0, 62)
    assert_outputs_close(many.cut(hidden, [40, 20, 1, 1])[1], single.cut(hidden, [40, 20, 1, 1])[1], 3e-6)


# bind


def fingerprints(group: Any) -> None:
    """Ranks that disagree are refused on every rank, with the rank that differs."""
    last, context = group.size() - 1, context_over(group)
    mine = group.rank() == last
    limits, wrong = Limits(4, 65 if mine else 64, 256), context_over(group, 2 if mine else 1)
    small = WorkspaceManager()
    if mine:
        small.lock()
    cases: dict[str, dict[str, Any]] = {
        "layout of swa": {"layout": FP8 if mine else FP32, **both(context)},
        "layout of index": {"index_layout": KVCacheLayout.index_mxfp4(32) if mine else None, **both(context)},
        "interleave": both(wrong),
        "limits": {"limits": limits, **both(context)},
        "workspace: expected room for the plan": both(context, workspace=small),
        "pages of the": {"num_blocks": {"compressed": 9 - mine}, **both(context)},
    }
    for said, options in cases.items():
        try:
            LayerStack(load_backend("reference"), **options)
        except ArgumentError as error:
            text = str(error)
            assert all(part in text for part in (said, f"on rank {last}", "as rank 0 has")), text
        else:
            raise AssertionError(f"{said} is not refused")


def half_divided(group: Any) -> None:
    """Caches are divided and layers are not, or the other way round, or in another way: refused before the step."""
    context = context_over(group)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"context_parallel": context}, "expected metadata of all entries"),
        ({"layer_options": {"context_parallel": context}}, "got metadata of all entries"),
        ({"context_parallel": context_over(group, 2), "layer_options": {"context_parallel": context}}, "interleave 2"),
    ]
    for options, said in cases:
        model = LayerStack(load_backend("reference"), compressed_block_tokens=64, **options)
        with pytest.raises(ArgumentError, match=f"^metadata: .*{said}"):
            model.step([(model.manager.new(), 9)], model.hidden(0, 9))


def refusals(group: Any) -> None:
    """What one rank alone refuses, before or while it binds, is refused on all; then the group goes on."""
    last, context = group.size() - 1, context_over(group)
    mine = group.rank() == last
    good = LayerStack(load_backend("reference"), compressed_block_tokens=64, **both(context))
    layer, caches = good.layers[1], good.manager.caches[1]
    assert caches.index is not None
    index_cache, twice = caches.index, 2 * caches.index.block_size
    index = (
        PagedKVCache.allocate(index_cache.layout, index_cache.num_blocks, twice, index_cache.device)
        if mine
        else index_cache
    )
    attempts: list[tuple[str, str, Callable[[], object]]] = [
        (
            "interleave",
            "CacheManager",
            lambda: LayerStack(load_backend("reference"), **both(context_over(group, 3 if mine else 1))),
        ),
        (
            "compressed_block_tokens",
            "CacheManager",
            lambda: LayerStack(load_backend("reference"), compressed_block_tokens=66 if mine else 64, **both(context)),
        ),
        ("caches.index", "caches of layers.1", lambda: layer.bind_kv_cache(attrs.evolve(caches, index=index))),
    ]
    for said, what, attempt in attempts:
        with pytest.raises(ArgumentError) as caught:
            attempt()
        expected = f"{said}: " if mine else f"{what}: expected what every rank of the group accepts, got rank {last} "
        assert str(caught.value).startswith(expected), str(caught.value)
        assert said in str(caught.value)
    layer.bind_kv_cache(caches)
    # a context beyond the limits is refused by each rank itself, before anything is sent
    sequence = good.manager.new()
    for first in range(0, 256, 64):
        good.step([(sequence, 64)], good.hidden(first, 64))
    with pytest.raises(ArgumentError, match=f"rank {group.rank()} of {group.size()}: expected at most 256"):
        good.step([(sequence, 1)], good.hidden(0, 1))
    same_everywhere(group, torch.ones(3))


def heads_of_others(group: Any) -> None:
    """Ranks that hold different heads are refused as ranks of one context, with what differs."""
    backend, limits, rank, size = load_backend("reference"), Limits(4, 64, 256), group.rank(), group.size()
    if size != 2:  # the heads of four are divided by two
        return
    many = LayerStack(backend, compressed_block_tokens=64, **both(context_over(group)))
    full = AttentionWeights.from_dict(random_weights(SMALL, 1), SMALL, SMALL.layer(1))
    options = {"workspace": many.workspace, "process_group": group, "context_parallel": context_over(group)}
    rank_geometry, part = SMALL.tensor_parallel(size), full.shard(rank, size)
    layer = DeepseekV4Attention("l.1", rank_geometry, 1, limits, backend, part, **options)
    with pytest.raises(ArgumentError, match=r"heads: expected \(0, 2\), as rank 0 has, got \(1, 2\) on rank 1"):
        layer.bind_kv_cache(many.manager.caches[1])


def both(context: ContextParallel, **options: Any) -> dict[str, Any]:
    return {"context_parallel": context, "layer_options": {"context_parallel": context, **options}}


CASES: dict[str, Callable[[Any], None]] = {
    "merge-fp32": partial(merge, dtype=torch.float32, tolerance=2e-6),
    "merge-bf16": partial(merge, dtype=torch.bfloat16, tolerance=0.02),
    "pieces": pieces,
    **{f"selection-{n}": partial(selection, interleave=n) for n in (1, 2, 4)},
    **{
        f"{name}-{kind.value}-{form}": partial(attention, kind=kind, form=form, keys_of_all=name == "keys")
        for name in ("attention", "keys")
        for kind in (LayerKind.CSA, LayerKind.HCA)
        for form in REFERENCE_FORMS
    },
    "keys-pieces": keys_in_pieces,
    "keys-mutant": keys_mutant,
    "keys-refused": keys_refused,
    **{
        f"during-attention-{form}": partial(exchanges_during_attention, kind=LayerKind.CSA, form=form)
        for form in REFERENCE_FORMS
    },
    "layers-fp32": partial(whole, layout=FP32, interleave=2),
    "layers-fp8": partial(whole, layout=FP8, interleave=1),
    "layers-prefill": partial(whole, layout=FP32, interleave=4, prefill="gathered"),
    "layers-keys": partial(whole, layout=FP32, interleave=1, prefill="paged"),
    "layers-merged": partial(whole, layout=FP32, interleave=1, prefill="gathered", merging=Merges()),
    "short": long_shortcut,
    "warm-up": warm_up,
    "refusals": refusals,
    "fingerprints": fingerprints,
    "half-divided": half_divided,
    "heads-of-others": heads_of_others,
    **HEADS,
}

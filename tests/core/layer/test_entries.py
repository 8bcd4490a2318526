"""Layers record the entries that they select, and take entries instead of selecting."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from attrs import evolve
from torch import Tensor

from dsv4attn.core.cache.layout import KVCacheLayout
from dsv4attn.core.contract.layer_ops import LayerOps
from dsv4attn.core.contract.limits import Limits
from dsv4attn.core.metadata.forward_context import set_forward_context
from dsv4attn.core.model.geometry import LayerKind, ModelGeometry
from dsv4attn.errors import ArgumentError
from dsv4attn.selection import load_backend
from dsv4attn.serving.cache_manager import CachedSequence
from dsv4attn.serving.entry_records import EntryRecords
from tests.harness import FP32, SMALL, LayerStack, Requests
from tests.harness_v41 import FP32_V41, SMALL_V41

MODELS = pytest.mark.parametrize(("geometry", "layout"), [(SMALL, FP32), (SMALL_V41, FP32_V41)], ids=["v4", "v41"])
LENGTH = 60


def layers(geometry: ModelGeometry, layout: KVCacheLayout, **options: Any) -> LayerStack:
    limits = Limits(4, 64, 256, num_speculative_tokens=3)
    return LayerStack(load_backend("reference"), layout, geometry=geometry, limits=limits, **options)


def step(stack: LayerStack, requests: Requests, hidden: Tensor, **entries: Any) -> list[Tensor]:
    """A step of layers that record or take entries; sequences do not advance."""
    metadata = stack.manager.metadata(stack.manager.batch(requests))
    with torch.no_grad(), set_forward_context(metadata, **entries):
        return [layer(hidden, stack.manager.positions(requests)) for layer in stack.layers]


def recorded(stack: LayerStack, records: EntryRecords, sequence: CachedSequence, hidden: Tensor) -> list[Tensor]:
    outs = step(stack, [(sequence, len(hidden))], hidden, record_entries=records.buffers)
    records.take([(sequence, len(hidden))])
    stack.manager.advance([(sequence, len(hidden))])
    return outs


@MODELS
def test_the_records_of_a_sequence_are_the_same_however_it_was_run(
    geometry: ModelGeometry, layout: KVCacheLayout
) -> None:
    """In one step, and in chunks with drafts that are rejected, a fork, and a beginning that is computed again."""
    stack = layers(geometry, layout)
    manager, records, hidden = stack.manager, EntryRecords(stack.layers), stack.hidden(0, LENGTH)
    whole = manager.new()
    recorded(stack, records, whole, hidden)
    expected = records.of(whole)

    cut = manager.new()
    recorded(stack, records, cut, hidden[:17])
    manager.free(cut)  # preempted
    cut = manager.new()
    for part in (hidden[:17], hidden[17:20], stack.hidden(1, 3)):
        recorded(stack, records, cut, part)
    manager.truncate(cut, 20)
    for index, entries in records.of(cut).items():
        assert torch.equal(entries, expected[index][:20])
    recorded(stack, records, cut, hidden[20:31])
    fork = manager.fork(cut)
    records.fork(cut, fork)
    recorded(stack, records, fork, hidden[31:])

    assert {*expected} == {i for i in range(geometry.num_layers) if stack.layers[i].indexer is not None}
    for index, entries in records.of(fork).items():
        assert torch.equal(entries, expected[index]), index
        assert torch.equal(entries[:31], records.of(cut)[index])
        ratio = geometry.layer(index).compress_ratio
        visible = (torch.arange(LENGTH) + 1).div(ratio, rounding_mode="floor")
        assert torch.equal((entries >= 0).sum(1), visible.clamp(max=entries.shape[1]))
        assert (entries < visible[:, None]).all()


class _Selects:
    """An indexer that writes given entries after it has selected."""

    def __init__(self, indexer: Any, entries: Tensor) -> None:
        self._indexer, self._entries = indexer, entries

    def __getattr__(self, name: str) -> Any:
        return getattr(self._indexer, name)

    def __call__(self, *args: Any, **options: Any) -> None:
        self._indexer(*args, **options)
        args[7][: len(self._entries)].copy_(self._entries)


def any_entries(visible: list[int], topk: int) -> Tensor:
    """[T, K] entries of each token at random, some of all that it sees."""
    drawn = torch.Generator().manual_seed(0)
    rows = torch.full((len(visible), topk), -1, dtype=torch.int32)
    for row, count in zip(rows, visible, strict=True):
        chosen = torch.randperm(count, generator=drawn)[: int(torch.randint(topk + 1, (), generator=drawn))]
        row[: len(chosen)] = chosen.sort().values
    return rows


@MODELS
def test_layers_that_take_entries_select_nothing_and_attend_to_them(
    geometry: ModelGeometry, layout: KVCacheLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an indexer that selects them. They are what is recorded, and later steps select as ever."""
    stack, by_selection = layers(geometry, layout), layers(geometry, layout)
    records, hidden = EntryRecords(stack.layers), stack.hidden(0, LENGTH)
    others: dict[int, Tensor] = {}
    for index, layer in enumerate(by_selection.layers):
        if layer.indexer is not None:
            ratio = geometry.layer(index).compress_ratio
            others[index] = any_entries([(i + 1) // ratio for i in range(LENGTH)], layer.layer.topk)
            layer.indexer = cast("Any", _Selects(layer.indexer, others[index]))
    other, expected = by_selection.cut(hidden, [LENGTH])

    sequence, outs = stack.manager.new(), []
    with monkeypatch.context() as patch:
        for name in ("select_topk", "select_topk_of_candidates"):
            patch.setattr(LayerOps, name, lambda *_: pytest.fail("an indexer selected"))
        for part in hidden.split([13, 1, LENGTH - 14]):
            requests = [(sequence, len(part))]
            inject = records.injected(requests, [others])
            outs.append(step(stack, requests, part, inject_entries=inject, record_entries=records.buffers))
            records.take(requests)
            stack.manager.advance(requests)

    for index, entries in records.of(sequence).items():
        assert torch.equal(entries, others[index])
    for layer_outs, rows in zip(zip(*outs, strict=True), expected, strict=True):
        torch.testing.assert_close(torch.cat(layer_outs), rows, rtol=1e-4, atol=1e-5)
    for layer in by_selection.layers:
        layer.indexer = getattr(layer.indexer, "_indexer", layer.indexer)
    following = stack.hidden(2, 5)
    results = [each.step([(one, 5)], following) for each, one in ((stack, sequence), (by_selection, other))]
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_entries_that_do_not_fit_are_refused_before_anything_is_written() -> None:
    stack = layers(SMALL, FP32)
    stack.poison_caches()
    layer = next(layer for layer in stack.layers if layer.indexer is not None)
    sequence, hidden = stack.manager.new(), stack.hidden(0, 9)
    requests = [(sequence, 9)]
    good = torch.full((9, layer.layer.topk), -1, dtype=torch.int32)
    good[8, :2] = torch.tensor([0, 1])

    def refused(match: str, **entries: Any) -> None:
        with pytest.raises(ArgumentError, match=match):
            step(stack, requests, hidden, **entries)

    changed = {}
    for name, value in (("unseen", [0, 2]), ("twice", [0, 0]), ("gap", [-1, 0]), ("falling", [1, 0]), ("odd", [0, -2])):
        changed[name] = good.clone()
        changed[name][8, :2] = torch.tensor(value)
    before = [cache.tensor.clone() for cache in layer.caches.present.values()]  # type: ignore[union-attr]
    for entries in changed.values():
        refused(r"inject_entries\['layers.1'\]\[8\]: expected ascending", inject_entries={layer.prefix: entries})
    refused(r"expected \[9, 3\], a row for each token, got \[8, 3\]", inject_entries={layer.prefix: good[:8]})
    refused("expected int32 on cpu, got int64", record_entries={layer.prefix: good.long()})
    refused("rows that share no memory", record_entries={layer.prefix: good[:1].expand(9, -1)})
    with torch.inference_mode():
        made = good.clone()
    refused("may be written here, got one made in inference mode", record_entries={layer.prefix: made})
    refused("expected a Tensor, got list", inject_entries={layer.prefix: good.tolist()})
    refused("expected a mapping", record_entries=[good])
    for cache, bytes_before in zip(layer.caches.present.values(), before, strict=True):  # type: ignore[union-attr]
        assert torch.equal(cache.tensor.view(torch.uint8), bytes_before.view(torch.uint8))
    refused("layers that ran in this step .* got 'layers.0'", record_entries={"layers.0": good})
    refused("layers that ran in this step .* got 1", inject_entries={1: good})


def test_tokens_without_records_are_refused() -> None:
    stack = layers(SMALL, FP32)
    records, sequence = EntryRecords(stack.layers), stack.manager.new()
    stack.step([(sequence, 5)], stack.hidden(0, 5))
    with pytest.raises(ArgumentError, match="first 5 tokens are recorded, got one with 0"):
        records.take([(sequence, 1)])
    other = stack.manager.fork(sequence)
    with pytest.raises(ArgumentError, match="records of 5 tokens, got 0"):
        records.fork(sequence, other)
    for nothing in (records.of(sequence), {}):
        with pytest.raises(ArgumentError, match="entries of 6 tokens for layer 1, got 0"):
            records.injected([(sequence, 1)], [nothing])
    with pytest.raises(ArgumentError, match="at most 64 tokens, which is the limit of a step, got 65"):
        records.take([(stack.manager.new(), 65)])


def test_steps_without_tokens_and_records_that_outlive_inference_mode() -> None:
    stack = layers(SMALL, FP32)
    with torch.inference_mode():
        records = EntryRecords(stack.layers)
    sequence, hidden = stack.manager.new(), stack.hidden(0, 5)
    recorded(stack, records, sequence, hidden)
    for requests in ([], [(sequence, 0)]):
        inject = records.injected(requests, [{} for _ in requests])
        step(stack, requests, hidden[:0], record_entries=records.buffers, inject_entries=inject)
        records.take(requests)
    assert [len(entries) for entries in records.of(sequence).values()] == [5]


def test_a_model_without_layers_that_select_has_no_records() -> None:
    stack = layers(evolve(SMALL, layers=((LayerKind.SWA, 1),)), FP32)
    records, sequence = EntryRecords(stack.layers), stack.manager.new()
    for seed in range(2):
        recorded(stack, records, sequence, stack.hidden(seed, 3))
    fork = stack.manager.fork(sequence)
    records.fork(sequence, fork)
    assert records.of(fork) == {}

"""Layers of V4.1 that read caches and selections of a source layer, on all rows of a step or on its last rows."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from dsv4attn.core.cache.layer_caches import DeepseekV4Caches, LayerCaches
from dsv4attn.core.cache.layout import KVCacheLayout, PagedKVCache
from dsv4attn.core.metadata.builder import MetadataBuilder
from dsv4attn.core.metadata.forward_context import set_forward_context
from dsv4attn.core.metadata.metadata import AttentionMetadata, Batch, SourceRows
from dsv4attn.errors import ArgumentError, Dsv4AttnError, LayoutMismatchError
from dsv4attn.serving.cache_manager import CachedSequence
from tests.harness import LayerStack, caches_unchanged
from tests.harness_v41 import KV_OF, v41_stack

READERS = [2, 5, 6, 7]
"""Reuse layers of 1, 4 and 6, and layer 6, which selects among the candidates of 4."""
Step = tuple[list[tuple[CachedSequence, int]], Batch, Tensor, Tensor]


def begun(backend: str = "reference") -> tuple[LayerStack, Step]:
    """A network after a step of 9 tokens; and its next one: one token of that request, and 31 of a new one."""
    whole = v41_stack(backend=backend, keep_windows=True)
    first, second = whole.manager.new(), whole.manager.new()
    whole.step([(first, 9)], whole.hidden(1, 9))
    requests = [(first, 1), (second, 31)]
    hidden = torch.cat([whole.hidden(1, 10)[9:], whole.hidden(2, 31)])
    return whole, (requests, whole.manager.batch(requests), whole.manager.positions(requests), hidden)


def run(whole: LayerStack, layers: Any, metadata: Mapping[Any, Any], hidden: Tensor, positions: Tensor) -> list[Tensor]:
    with torch.no_grad(), set_forward_context(metadata):
        return [whole.layers[i](hidden, positions) for i in layers]


def last_tokens(batch: Batch, rows: Tensor) -> Batch:
    """The one token of the first request, and the last of the second, in a batch of their own."""
    starts = torch.tensor([0, 1, len(rows)], dtype=torch.int32)
    return attrs.evolve(
        batch, query_start_loc=starts, query_start_loc_cpu=starts, slot_mapping=batch.slot_mapping[rows]
    )


def parts(whole: LayerStack, step: Step, count: int) -> tuple[Any, Any, Tensor]:
    """Metadata of the whole step, metadata of the last tokens with their rows, and these rows."""
    _, batch, _, _ = step
    rows = torch.tensor([0, *range(32 - count, 32)])
    full = whole.manager.metadata(batch)
    # a builder of its own, as the next build overwrites tensors of the last
    sizes: dict[str, Any] = {"swa_block_size": 4, "compressed_block_tokens": 8}
    other = MetadataBuilder(whole.geometry, whole.limits, short_prefills=True, **sizes)
    last = other.build_all(last_tokens(batch, rows))
    known = SourceRows(next(iter(full.values())).swa, rows)
    for part in last.values():
        part.source_rows = known
    return full, last, rows


def near(actual: Tensor, right: Tensor) -> bool:
    return float((actual - right).norm() / right.norm()) <= 2.0**-9


@pytest.mark.parametrize("count", [1, 8, 31])
def test_layers_that_read_may_run_on_the_last_rows_of_a_step(count: int) -> None:
    whole, step = begun()
    _, _, positions, hidden = step
    full, last, rows = parts(whole, step, count)
    expected = run(whole, range(8), full, hidden, positions)
    actual = run(whole, READERS, last, hidden[rows], positions[rows])

    for i, out in zip(READERS, actual, strict=True):
        assert near(out, expected[i][rows]), i
    # rows that are not those of the source are others
    swapped = torch.cat([rows[1:], rows[:1]])
    for part in last.values():
        part.source_rows = SourceRows(next(iter(full.values())).swa, swapped)
    run(whole, range(8), full, hidden, positions)
    actual = run(whole, [5], last, hidden[rows], positions[rows])
    assert not near(actual[0], expected[5][rows])


@pytest.mark.matrix
def test_kernels_read_those_rows_too() -> None:
    whole, step = begun("triton")
    _, _, positions, hidden = step
    full, last, rows = parts(whole, step, 8)
    expected = run(whole, range(3), full, hidden, positions)

    assert near(run(whole, [2], last, hidden[rows], positions[rows])[0], expected[2][rows])


# refused


def refused(whole: LayerStack, layer: int, metadata: Any, hidden: Tensor, positions: Tensor, said: str) -> None:
    """Nothing is written before the error."""
    with caches_unchanged(whole), pytest.raises(ArgumentError, match=said):
        run(whole, [layer], metadata, hidden, positions)


@pytest.mark.parametrize("layer", READERS)
def test_fewer_rows_without_their_numbers_are_refused(layer: int) -> None:
    whole, step = begun()
    _, _, positions, hidden = step
    full, last, rows = parts(whole, step, 8)
    run(whole, range(8), full, hidden, positions)
    for part in last.values():
        part.source_rows = None
    said = (
        rf"^attn_metadata of layers.{layer}: expected the metadata with which layer layers.{KV_OF[layer]}, .* ran last "
        r"in this step, got metadata of 9 tokens, but it ran with others, of 32 tokens -> .* give .*source_rows$"
    )
    refused(whole, layer, last, hidden[rows], positions[rows], said)


def test_rows_that_are_not_those_of_the_source_are_refused() -> None:
    whole, step = begun()
    _, batch, positions, hidden = step
    full, last, rows = parts(whole, step, 8)
    run(whole, range(8), full, hidden, positions)
    swa = next(iter(full.values())).swa
    for wrong, said in (
        (rows - 1, r"^rows: expected rows in \[0, 32\), the tokens of the source, got -1 .. 30"),
        (rows + 1, r"^rows: expected rows in \[0, 32\).*, got 1 .. 32"),
        (rows.int(), r"^rows: expected .*int64"),
    ):
        with pytest.raises(ArgumentError, match=said):
            SourceRows(swa, wrong)
    with pytest.raises(ArgumentError, match=r"^source: expected a WindowMetadata"):
        SourceRows(full, rows)
    for part in last.values():
        part.source_rows = SourceRows(swa, rows[:5])
    said = r"^metadata.source_rows.rows: expected a row for each of the 9 tokens, got 5 rows"
    refused(whole, 2, last, hidden[rows], positions[rows], said)
    for part in last.values():
        part.source_rows = SourceRows(next(iter(whole.manager.metadata(batch).values())).swa, rows)
    refused(whole, 2, last, hidden[rows], positions[rows], "but it ran with others, of 32 tokens")


def test_a_reader_whose_source_has_not_run_in_this_step_is_refused() -> None:
    whole, (requests, batch, positions, hidden) = begun()
    metadata = whole.manager.metadata(batch)
    said = r"^attn_metadata of layers.2: .* layer layers.1, .* got metadata of 32 tokens, but it has not run with them"
    refused(whole, 2, metadata, hidden, positions, said)
    right = run(whole, range(8), metadata, hidden, positions)
    whole.manager.advance(requests)
    next_requests = [(requests[0][0], 1)]
    later, place = whole.manager.metadata(whole.manager.batch(next_requests)), whole.manager.positions(next_requests)
    refused(whole, 5, later, hidden[:1], place, "but it ran with others, of 32 tokens")
    # layer 5 takes the choice of layer 4; layer 6 reads its entries and candidates
    run(whole, range(4), later, hidden[:1], place)
    refused(whole, 6, later, hidden[:1], place, "layer layers.4, .* but it ran with others, of 32 tokens")
    assert all(bool(out.isfinite().all()) for out in right)


def test_a_step_may_be_run_again_with_the_same_metadata_or_after_an_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, (_, batch, positions, hidden) = begun()
    metadata = whole.manager.metadata(batch)
    right = run(whole, range(8), metadata, hidden, positions)
    again = run(whole, range(8), metadata, hidden, positions)
    assert all(map(torch.equal, right, again))

    def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError("out of memory")

    fourth = whole.layers[4]
    assert fourth.indexer is not None
    with monkeypatch.context() as patch:
        patch.setattr(fourth.indexer, "_ops", attrs.evolve(fourth.indexer._ops, indexer_q_rope_quant=fails))
        with pytest.raises(RuntimeError, match="out of memory"):
            run(whole, range(8), metadata, hidden, positions)
    refused(whole, 5, metadata, hidden, positions, "but it has not run with them")
    with monkeypatch.context() as patch:
        patch.setattr(fourth.attention, "attend_from", fails)
        with pytest.raises(RuntimeError, match="out of memory"):
            run(whole, range(8), metadata, hidden, positions)
    assert all(map(torch.equal, right, run(whole, range(8), metadata, hidden, positions)))
    assert all(map(torch.equal, right, run(whole, range(8), whole.manager.metadata(batch), hidden, positions)))


def test_objects_of_each_layer_with_the_same_tensors_are_one_step() -> None:
    """As engines have them that make metadata for each group of caches; a copy of layers has selected nothing."""
    whole, (_, batch, positions, hidden) = begun()
    metadata = whole.manager.metadata(batch)
    right = run(whole, range(8), metadata, hidden, positions)
    by_prefix: dict[str, Any] = {}
    for i, layer in enumerate(whole.layers):
        part: AttentionMetadata = metadata[layer.layer.key]
        by_prefix |= {f"layers.{i}.swa_cache": attrs.evolve(part.swa), f"layers.{i}": part.compressed}
        by_prefix[f"layers.{i}.state"] = part.state

    assert all(map(torch.equal, right, run(whole, range(8), by_prefix, hidden, positions)))
    # tensors that are the same in every step do not make one step of two
    refused(whole, 5, by_prefix, hidden, positions, "but it ran with others, of 32 tokens")
    assert copy.copy(whole.layers[1]).selected_in is None
    assert whole.layers[1].selected_in is not None


def test_a_warm_up_asks_for_no_source() -> None:
    whole, (_, _, positions, hidden) = begun()
    with set_forward_context(None):
        assert not bool(whole.layers[2](hidden, positions).any())


# caches that a source gets later


def others(caches: DeepseekV4Caches, *names: str) -> DeepseekV4Caches:
    """The same caches, with these in other memory that holds NaN."""
    present = caches.present
    for name in names:
        old = present[name]
        present[name] = PagedKVCache.allocate(old.layout, old.num_blocks, old.block_size)
        present[name].tensor.fill_(torch.nan)
    attention = LayerCaches(present.pop("swa"), present.pop("compressed"))
    return DeepseekV4Caches(attention, **present)


@pytest.mark.parametrize("names", [["index"], ["compressed"], ["compressed", "index"]])
def test_readers_follow_a_source_that_is_bound_again(names: list[str]) -> None:
    whole, other = v41_stack(), v41_stack()
    whole.step([(whole.manager.new(), 12)], whole.hidden(3, 12))
    for i in (1, 4):
        caches = whole.layers[i].caches
        assert caches is not None
        whole.layers[i].bind_kv_cache(others(caches, *names))
    hidden = whole.hidden(1, 30)
    actual = whole.run([(whole.manager.new(), 30)], hidden)
    expected = other.run([(other.manager.new(), 30)], hidden)

    assert all(map(torch.equal, actual, expected))
    for i in READERS:
        source, reader = whole.layers[KV_OF[i] or 0].caches, whole.layers[i].caches
        assert source is not None
        assert reader is not None
        assert reader.attention.compressed is source.attention.compressed
        assert reader.index is (source.index if i == 6 else None)


def test_a_source_is_not_bound_to_caches_that_do_not_fit() -> None:
    whole = v41_stack()
    layer, caches = whole.layers[4], whole.layers[4].caches
    assert caches is not None
    wrong = PagedKVCache.allocate(KVCacheLayout.rows(24, 8, dtype=torch.float32), 4, 8)
    with pytest.raises((ArgumentError, LayoutMismatchError)):
        layer.bind_kv_cache(attrs.evolve(caches, attention=LayerCaches(caches.attention.swa, wrong)))
    assert layer.caches is caches
    fresh = v41_stack().layers
    fresh[4].caches = None
    requests = [(whole.manager.new(), 3)]
    metadata, positions = whole.manager.metadata(whole.manager.batch(requests)), whole.manager.positions(requests)
    said = r"layer layers.4 has no caches -> bind layers in order: layer 5 reads"
    with pytest.raises(Dsv4AttnError, match=said), set_forward_context(metadata):
        fresh[5](whole.hidden(1, 3), positions)

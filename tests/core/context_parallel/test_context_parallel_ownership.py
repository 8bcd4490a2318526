"""Ownership of entries by ranks: numbering, metadata of each rank, and resharding of caches."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dsv4attn.backends.reference.launch import ReferenceBackend
from dsv4attn.core.attention.forward_mqa import forward_mqa
from dsv4attn.core.cache.layer_caches import LayerCaches
from dsv4attn.core.cache.layout import KVCacheLayout, PagedKVCache
from dsv4attn.core.cache.ownership import Ownership
from dsv4attn.core.cache.selected_keys import RequestRows
from dsv4attn.core.context_parallel.metadata import OwnedMetadataBuilder
from dsv4attn.core.context_parallel.reshard import reshard_cache
from dsv4attn.core.context_parallel.selection import select_among
from dsv4attn.core.contract.limits import Limits
from dsv4attn.core.memory.workspace import WorkspaceManager
from dsv4attn.core.metadata.builder import MetadataBuilder
from dsv4attn.core.metadata.metadata import Batch
from dsv4attn.core.model.geometry import LayerKind
from dsv4attn.errors import ArgumentError, LayoutMismatchError
from dsv4attn.serving.cache_manager import CacheManager
from tests.harness import FP8, FP32, REFERENCE_FORMS, SMALL, batch_of

LIMITS = Limits(5, 64, 256, num_speculative_tokens=1)
KINDS = (LayerKind.CSA, LayerKind.HCA)


@given(size=st.integers(1, 6), interleave=st.integers(1, 5), entries=st.integers(0, 70))
def test_every_entry_has_one_owner_and_one_number(size: int, interleave: int, entries: int) -> None:
    ranks = [Ownership(rank, size, interleave) for rank in range(size)]
    owners = [e // interleave % size for e in range(entries)]
    for ownership in ranks:
        mine = [e for e in range(entries) if owners[e] == ownership.rank]
        every = torch.arange(entries, dtype=torch.int32)

        assert [ownership.local(e) for e in mine] == list(range(len(mine)))
        assert [ownership.entry(n) for n in range(len(mine))] == mine
        assert [ownership.owner(e) for e in range(entries)] == owners == ownership.owner(every).tolist()
        assert ownership.count(entries) == len(mine)
        assert ownership.counts(torch.tensor([entries, 0])).tolist() == [len(mine), 0]
        expected = [mine.index(e) if e in mine else -1 for e in range(entries)]
        assert ownership.local_numbers(torch.cat([every, every.new_tensor([-1])])).tolist() == [*expected, -1]
        assert ownership.entry(torch.arange(len(mine))).tolist() == mine


# metadata


def shuffled_batch(requests: list[tuple[int, int]], columns: int) -> Batch:
    """(tokens after the step, query tokens) of each request; tables of random blocks; one row of padding."""
    draw = torch.Generator().manual_seed(0)
    windows = torch.randperm(16 * len(requests), generator=draw).int().reshape(len(requests), 16)
    slots = [int(windows[i, p // 16]) * 16 + p % 16 for i, (n, c) in enumerate(requests) for p in range(n - c, n)]
    entries = torch.randperm(columns * len(requests), generator=draw).int().reshape(len(requests), columns)
    rows: dict[str, Any] = {"block_table": windows, "compressed_block_table": entries}
    query, seq = [count for _, count in requests], [n for n, _ in requests]
    return batch_of(query, seq, slot_mapping=torch.tensor([*slots, -1]), **rows)


SIZES: dict[str, Any] = {"swa_block_size": 16, "compressed_block_tokens": 32}
REQUESTS = [(70, 1), (16, 2), (255, 2), (40, 33), (7, 7)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("interleave", [1, 2])
@pytest.mark.parametrize("form", ["paged-ragged", "gathered-dense"])
def test_a_rank_has_the_slots_and_counts_of_its_own_entries(ranks: int, interleave: int, form: str) -> None:
    columns, positions = -(-256 // (32 * ranks)), [p for n, c in REQUESTS for p in range(n - c, n)]
    request = [i for i, (_, c) in enumerate(REQUESTS) for _ in range(c)]
    for rank in range(ranks):
        ownership, batch = Ownership(rank, ranks, interleave), shuffled_batch(REQUESTS, columns)
        table = batch.compressed_block_table
        assert table is not None
        builder = OwnedMetadataBuilder(ownership, SMALL, LIMITS, backend=REFERENCE_FORMS[form], **SIZES)
        metadata = builder.build_all(batch)
        for kind in KINDS:
            compressed, ratio = metadata[kind].compressed, SMALL.layer_of_kind(kind).compress_ratio
            assert compressed is not None
            slots, counts = [], []
            for i, p in zip(request, positions, strict=True):
                e, records = p // ratio, 32 // ratio
                mine = [x for x in range((p + 1) // ratio) if x // interleave % ranks == rank]
                counts.append(len(mine))
                local = len(mine) - 1
                stored = (p + 1) % ratio == 0 and e // interleave % ranks == rank
                slots.append(int(table[i, local // records]) * records + local % records if stored else -1)
            assert compressed.slot_mapping.tolist() == [*slots, -1]
            assert compressed.compressed_lens.tolist() == counts
            assert compressed.max_seq_len == 255
            if kind is LayerKind.HCA:
                lens = compressed.c128a_decode_topk_lens
                assert lens is not None
                assert lens.tolist() == counts[:5]


def test_one_rank_has_what_a_builder_without_ranks_makes() -> None:
    for part, other in zip(
        *(b.build_all(shuffled_batch(REQUESTS, 8)).values() for b in (
            MetadataBuilder(SMALL, LIMITS, **SIZES), OwnedMetadataBuilder(Ownership(0, 1, 2), SMALL, LIMITS, **SIZES)
        )),
        strict=True,
    ):  # fmt: skip
        for name in ("swa", "compressed"):
            mine, theirs = getattr(part, name), getattr(other, name)
            for attribute in attrs.fields(type(mine)) if mine is not None else ():
                a, b = getattr(mine, attribute.name), getattr(theirs, attribute.name)
                if isinstance(a, RequestRows):
                    a, b = a.token_to_req, b.token_to_req
                assert torch.equal(a, b) if isinstance(a, Tensor) else a == b, attribute.name


def test_windows_are_seen_on_rank_0_alone_and_written_on_every_rank() -> None:
    for rank in range(3):
        builder = OwnedMetadataBuilder(
            Ownership(rank, 3), SMALL, LIMITS, backend=REFERENCE_FORMS["paged-ragged"], **SIZES
        )
        batch = shuffled_batch(REQUESTS, 3)
        metadata, full = builder.build_all(batch), MetadataBuilder(SMALL, LIMITS, **SIZES).build(batch)
        for kind in LayerKind:
            swa, sees = metadata[kind].swa, rank == 0 or kind is LayerKind.SWA
            assert torch.equal(swa.slot_mapping, batch.slot_mapping)
            for name in ("decode_swa_indices", "prefill_swa_indices"):
                expected = getattr(full, name)
                assert torch.equal(getattr(swa, name), expected if sees else torch.full_like(expected, -1))
            for name in ("decode_swa_lens", "prefill_swa_lens", "prefill_gather_lens"):
                expected = getattr(full, name)
                assert torch.equal(getattr(swa, name), expected if sees else torch.zeros_like(expected))


def test_slices_of_a_prompt_without_windows_gather_no_negative_number_of_rows() -> None:
    class Watching(ReferenceBackend):
        """Keeps the least number of window rows of each gather."""

        def dequantize_and_gather_k_cache(self, *arguments: Any) -> None:
            if arguments[3] is not None:
                least.append(int(arguments[3].min()))
            super().dequantize_and_gather_k_cache(*arguments)

    least: list[int] = []
    layer, limits = SMALL.layer_of_kind(LayerKind.HCA), attrs.evolve(LIMITS, max_index_elements=256)
    backend = Watching(prefill_keys="gathered")
    builder = OwnedMetadataBuilder(Ownership(1, 2), SMALL, limits, **SIZES)
    metadata = builder.build_for(shuffled_batch(REQUESTS, 4), [LayerKind.HCA])[LayerKind.HCA]
    caches = LayerCaches(PagedKVCache.allocate(FP32, 80, 16), PagedKVCache.allocate(FP32, 20, 2))
    q = torch.randn(45, 4, 32)
    options: dict[str, Any] = {"layer": layer, "limits": limits, "attn_sink": None}
    with pytest.raises(
        ArgumentError, match=r"^metadata: expected metadata of all entries, got metadata of the entries of rank "
    ):
        forward_mqa(q, caches, metadata, backend, WorkspaceManager("cpu"), q.clone(), **options)
    assert not least
    # a part for `merge_over_ranks`
    options["lse"] = torch.empty(45, 4)
    forward_mqa(q, caches, metadata, backend, WorkspaceManager("cpu"), q.clone(), **options)

    assert len(least) > 2
    assert set(least) == {0}


def test_a_table_that_does_not_fit_is_refused_with_the_rank_named() -> None:
    builder = OwnedMetadataBuilder(Ownership(1, 2), SMALL, LIMITS, **SIZES)

    with pytest.raises(
        ArgumentError, match=r"^compressed_block_table of rank 1: expected at least 4 columns for the 31"
    ):
        builder.build_all(shuffled_batch(REQUESTS, 3))
    batch = shuffled_batch(REQUESTS, 4)
    assert batch.compressed_block_table is not None
    batch.compressed_block_table[:] = batch.compressed_block_table[0].clone()
    with pytest.raises(ArgumentError, match=r"^compressed_block_table of rank 1: expected each entry .* of its own"):
        builder.build_all(batch)


# selection


def test_equal_scores_are_taken_by_number_and_nothing_is_taken_twice() -> None:
    numbers = torch.tensor([[9, 4, -1, 2, 7, 0], [3, 1, -1, -1, 8, 5]], dtype=torch.int32)
    score = torch.tensor([[1.0, 1.0, 9.0, 0.5, 1.0, float("inf")], [-1.0, float("-inf"), 0.0, 0.0, -1.0, -2.0]])

    assert select_among(numbers, score, 3).tolist() == [[0, 4, 7], [3, 8, 5]]
    assert select_among(numbers, score, 5).tolist() == [[0, 4, 7, 9, 2], [3, 8, 5, -1, -1]]


# re-sharding


LAYOUTS = {"fp32": FP32, "bf16": KVCacheLayout.rows(24, 8), "fp8": FP8, "index": KVCacheLayout.index_fp8(32)}
LAYOUTS |= {"index-fp4": KVCacheLayout.index_mxfp4(32), "v41-fp8": KVCacheLayout.v41_fp8()}


def random_cache(layout: KVCacheLayout, blocks: int, size: int, draw: torch.Generator) -> PagedKVCache:
    cache = PagedKVCache.allocate(layout, blocks, size)
    raw = torch.randint(0, 256, (cache.tensor.untyped_storage().nbytes(),), generator=draw).byte()
    cache.tensor.untyped_storage().copy_(raw.untyped_storage())
    return cache


def read(cache: PagedKVCache, pages: Tensor, ownership: Ownership, entries: int) -> dict[int, list[Tensor]]:
    """Bytes of every entry of a rank, by its number in the sequence."""
    entries_read = {}
    for n in range(ownership.count(entries)):
        place = int(pages[n // cache.block_size]), n % cache.block_size
        entries_read[ownership.entry(n)] = [
            cache.region(r)[place].contiguous().view(torch.uint8) for r in region_names(cache)
        ]
    return entries_read


def region_names(cache: PagedKVCache) -> list[str]:
    regions = cache.layout.regions(cache.block_size) if cache.layout.is_quantised else ()
    return [r.name for r in regions if r.count] or ["row"]


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize(("old", "new"), [((1, 1), (3, 2)), ((3, 2), (2, 4)), ((4, 1), (1, 1)), ((2, 4), (4, 1))])
def test_a_cache_is_divided_another_way_without_loss(name: str, old: tuple[int, int], new: tuple[int, int]) -> None:
    layout, entries, draw = LAYOUTS[name], 53, torch.Generator().manual_seed(0)
    sources = []
    for _ in range(old[0]):
        cache = random_cache(layout, 20, 8, draw)
        sources.append((cache, torch.randperm(20, generator=draw)[: -(-entries // 8)]))
    expected: dict[int, list[Tensor]] = {}
    for rank, source in enumerate(sources):
        expected |= read(*source, Ownership(rank, *old), entries)
    assert sorted(expected) == list(range(entries))
    actual: dict[int, list[Tensor]] = {}
    for rank in range(new[0]):
        ownership, target = Ownership(rank, *new), random_cache(layout, 15, 4, draw)
        pages = torch.randperm(15, generator=draw)
        original = target.tensor.clone()
        reshard_cache(sources, (target, pages), entries, ownership, interleave=old[1])
        actual |= read(target, pages, ownership, entries)
        unused = pages[-(-ownership.count(entries) // 4) :]
        assert torch.equal(target.tensor[unused].view(torch.uint8), original[unused].view(torch.uint8))
    for e in range(entries):
        assert all(torch.equal(a, b) for a, b in zip(actual[e], expected[e], strict=True)), e


def test_a_target_that_cannot_hold_it_is_refused_before_anything_is_written() -> None:
    draw, ownership = torch.Generator().manual_seed(0), Ownership(0, 2)
    source, pages = random_cache(FP8, 4, 8, draw), torch.arange(4)
    for target, mine, said in (
        (PagedKVCache.allocate(FP32, 4, 8), pages, "sources.0.: expected layout rows"),
        (PagedKVCache.allocate(FP8, 4, 8), pages[:1], "target pages: expected 2 pages of 8 records, got 1 pages"),
        (PagedKVCache.allocate(FP8, 1, 8), pages, r"target pages: expected pages in \[0, 1\), got 1"),
        (source, pages, "target: expected memory of its own, got the memory of sources.0."),
    ):
        original = target.tensor.clone()
        with pytest.raises((ArgumentError, LayoutMismatchError), match=f"^{said}"):
            reshard_cache([(source, pages)], (target, mine), 30, ownership)
        assert torch.equal(target.tensor.view(torch.uint8), original.view(torch.uint8))
    with pytest.raises(ArgumentError, match=r"^sources: expected the cache and pages of each rank, got none"):
        reshard_cache([], (PagedKVCache.allocate(FP8, 4, 8), pages), 30, ownership)


def test_a_manager_without_ranks_is_as_before() -> None:
    assert type(CacheManager(SMALL, LIMITS, FP32).builder) is MetadataBuilder

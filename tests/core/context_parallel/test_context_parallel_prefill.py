"""Prefill over the keys of all ranks: placement of entries, shares of tokens, cut chunks, and the plan."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch

from dsv4attn.core.cache.layout import KVCacheLayout, PagedKVCache
from dsv4attn.core.cache.ownership import Ownership
from dsv4attn.core.context_parallel.keys import place_entries
from dsv4attn.core.context_parallel.prefill import Shares
from dsv4attn.core.context_parallel.reshard import reshard_cache
from dsv4attn.core.contract.limits import Limits
from dsv4attn.core.memory import rank_buffers
from dsv4attn.core.memory.chunking import ChunkBounds, PrefillChunk, cut_chunk, plan_prefill_chunks
from dsv4attn.core.memory.workspace import simultaneous_bytes
from dsv4attn.core.model.geometry import LayerKind
from tests.harness import FP8, FP32, SMALL

C4A = SMALL.layer_of_kind(LayerKind.CSA)
LAYOUTS = {"fp8": FP8, "flash": KVCacheLayout.fp8_ds_mla(), "fp32": FP32, "bf16": KVCacheLayout.rows(24, 8)}


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize(("size", "interleave"), [(2, 1), (2, 2), (4, 1), (8, 2), (8, 8), (6, 3)])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_gathered_entries_are_where_one_rank_has_them(
    layout: KVCacheLayout, size: int, interleave: int, ranks: int
) -> None:
    pages, draw = 3, torch.Generator().manual_seed(size)
    sent = torch.randint(0, 256, (ranks, pages, layout.page_bytes(size)), dtype=torch.uint8, generator=draw)

    def cache(raw: torch.Tensor) -> PagedKVCache:
        raw = raw if layout.is_quantised else raw.view(layout.dtype).view(len(raw), size, layout.head_dim)
        return PagedKVCache(raw, layout, block_size=size)

    actual, expected = (torch.zeros(ranks * pages, layout.page_bytes(size), dtype=torch.uint8) for _ in range(2))
    place_entries(Ownership(0, ranks, interleave), sent, actual, layout, size)
    sources = [(cache(part), torch.arange(pages)) for part in sent]
    target = cache(expected), torch.arange(ranks * pages)
    reshard_cache(sources, target, ranks * pages * size, Ownership(0, 1), interleave=interleave)

    assert torch.equal(actual, expected)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("tokens", [1, 2, 7, 24, 1000, 8191])
def test_shares_are_a_division_of_the_tokens(tokens: int, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_buffers, "PART_TOKENS", 100)
    contexts: list[Any] = [SimpleNamespace(ownership=Ownership(r, ranks), divides_heads=False) for r in range(ranks)]
    ranges = [Shares(context, tokens).ranges for context in contexts]
    covered = [t for spans in ranges for first, last in spans for t in range(first, last)]
    rest = tokens % ranks

    assert sorted(covered) == sorted([*range(tokens), *[*range(tokens - rest, tokens)] * (ranks - 1)])
    assert len({sum(last - first for first, last in spans) for spans in ranges}) == 1
    assert all(spans == tuple(sorted(spans)) for spans in ranges)
    divided: Any = SimpleNamespace(ownership=Ownership(0, ranks), divides_heads=True)
    assert Shares(divided, tokens).ranges == ((0, tokens),)


def test_a_chunk_is_cut_to_whole_requests_and_parts_of_them() -> None:
    draw = random.Random(5)
    for _ in range(300):
        query_lens = [draw.randint(0, 30) for _ in range(draw.randint(1, 6))]
        seq_lens = [n + draw.randint(0, 50) for n in query_lens]
        total = sum(query_lens)
        bounds = ChunkBounds(rows=draw.choice([60, 200, 1000]), index_elements=10**6, alignment=1)
        chunks = [c for c in plan_prefill_chunks(seq_lens, query_lens, C4A, bounds) if c.num_tokens]
        first = draw.randint(0, total)
        last = draw.randint(first, total)
        cut = [
            part
            for chunk in chunks
            if max(first, chunk.token_start) < min(last, chunk.token_end)
            for part in cut_chunk(chunk, max(first, chunk.token_start), min(last, chunk.token_end), query_lens, C4A)
        ]
        assert [t for c in cut for t in range(c.token_start, c.token_end)] == [*range(first, last)]
        ends = [sum(query_lens[: i + 1]) for i in range(len(query_lens))]
        for part in cut:
            check_part(part, query_lens, ends)


def check_part(part: PrefillChunk, query_lens: list[int], ends: list[int]) -> None:
    if part.is_slice:
        assert part.num_requests == 1
        request = part.request_start
        assert ends[request] - query_lens[request] <= part.token_start < part.token_end <= ends[request]
        assert part.tail == ends[request] - part.token_end
        assert part.gather >= min(part.num_tokens, C4A.window)
    else:
        requests = range(part.request_start, part.request_end)
        assert sum(query_lens[i] for i in requests) == part.num_tokens
        assert part.token_end == ends[part.request_end - 1]


@pytest.mark.parametrize("layout", [FP8, FP32, KVCacheLayout.fp8_ds_mla()], ids=["fp8", "fp32", "flash"])
def test_the_plan_holds_every_step_that_gathers_keys(layout: KVCacheLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(3)
    for _ in range(300):
        monkeypatch.setattr(rank_buffers, "PIECE_BYTES", draw.choice([1, 3000, 50_000, 2**24]))
        ranks, length, block = draw.randint(2, 8), draw.randint(1, 5000), draw.choice([16, 64, 256])
        layer = attrs.evolve(C4A, compress_ratio=draw.choice([4, 16]))
        plan = rank_buffers.key_bytes(ranks, layer, Limits(4, 64, length), layout)
        most = rank_buffers.key_tokens(ranks, length) // (block * ranks)
        page = layout.page_bytes(block // layer.compress_ratio)
        sizes = [simultaneous_bytes(rank_buffers.key_specs(ranks, n, page)) for n in range(most + 1)]
        assert max(sizes) <= plan
        if block == rank_buffers.PAGE_TOKENS:
            assert plan <= 2 * max(sizes) + 4096


def test_keys_are_gathered_where_less_is_sent() -> None:
    less = rank_buffers.keys_are_less
    # 8,192 tokens of Flash after a million: 262,144 entries
    assert less(2, 8192, 64, 262_144, divides_heads=False)
    assert not less(2, 512, 64, 262_144, divides_heads=False)
    assert less(2, 8192, 32, 262_144, divides_heads=True)
    assert not less(1, 8192, 64, 64, divides_heads=False)
    assert not less(1, 8192, 64, 64, divides_heads=True)

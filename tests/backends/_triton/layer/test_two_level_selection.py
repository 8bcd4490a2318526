"""Selection in two levels: blocks and their entries, judged on scores that are equal, extreme or absent."""

from __future__ import annotations

from math import inf, nan
from unittest import mock

import numpy as np
import pytest
import torch
from attrs import evolve
from torch import Tensor

from dsv4attn.backends._triton.launching.runtime import observed
from dsv4attn.backends._triton.layer import ops
from dsv4attn.backends._triton.layer.indexer import candidates
from dsv4attn.backends._triton.layer.indexer import launch as index_logits
from dsv4attn.backends._triton.layer.selection import launch as select
from dsv4attn.backends._triton.layer.selection import scratch
from dsv4attn.backends.triton.launch import GenericBackend
from dsv4attn.core.cache.layout import KVCacheLayout, PagedKVCache
from dsv4attn.core.torch_ops.arguments import TokenMap
from dsv4attn.core.torch_ops.indexer import IndexQuery
from dsv4attn.errors import ArgumentError
from dsv4attn.testing.case import chosen
from dsv4attn.testing.cases.table import CASES
from dsv4attn.testing.conform import Subject, conform
from tests.backends._triton.cache.caches import DEVICE, seeded
from tests.backends._triton.layer.test_select_topk import KINDS, selected_by_oracle

each_size = pytest.mark.parametrize("size", [1, 8, 64])
each_kind = pytest.mark.parametrize("kind", KINDS)


def drawn(kind: str, rows: int, columns: int) -> Tensor:
    rng = np.random.default_rng(len(kind))
    with np.errstate(over="ignore"):
        scores = np.stack([KINDS[kind](rng, columns) for _ in range(rows)]).astype(np.float32)
    return torch.from_numpy(scores).to(DEVICE)


def published(scores: Tensor, lens: Tensor, most: int, size: int) -> Tensor:
    """Blocks [T, most] as the kernels choose them among entries with these scores [T, E]."""
    query, cache, token_map = rows_with(scores, lens)
    out = torch.full((len(lens), most), 77, dtype=torch.int32, device=DEVICE)
    ops.layer_ops().select_candidates(query, cache, token_map, out, size, scores.shape[1])
    return out.cpu()


def rows_with(scores: Tensor, lens: Tensor, page: int = 24) -> tuple[IndexQuery, PagedKVCache, TokenMap]:
    """A call whose scores are these [T, E], bit for bit: each token has a request, and its pages are shuffled.

    The first dim of a key is the score. One head counts it if it is positive, and another one if it is negative. Where
    it is infinite, a product overflows: infinity times the zeros of a head that only fills a tile would be NaN.
    """
    tokens, entries = scores.shape
    pages = -(-entries // page)
    cache = PagedKVCache.allocate(KVCacheLayout.rows(96, 32, dtype=torch.float32), tokens * pages, page, DEVICE)
    table = torch.randperm(tokens * pages, generator=seeded(pages)).to(DEVICE).view(tokens, pages)
    keys = torch.zeros(tokens, pages * page, 128, device=DEVICE)
    keys[:, :entries, 0] = scores.masked_fill(scores.isinf(), 0.0)
    keys[:, :entries, 1] = torch.where(scores.isinf(), scores.sign() * 3e38, 0.0)
    cache.tensor.view(tokens * pages, page, 128)[table.flatten()] = keys.view(-1, page, 128)
    q = torch.zeros(tokens, 2, 128, device=DEVICE)
    q[:, 0, 0], q[:, 0, 1], q[:, 1, 0], q[:, 1, 1] = 1, 2, -1, -2
    weights = torch.tensor([[1.0, -1.0]], device=DEVICE).repeat(tokens, 1)
    numbers = torch.arange(tokens, dtype=torch.int32, device=DEVICE)
    return IndexQuery(q, weights), cache, TokenMap(table.int(), numbers, lens)


def judge(selected: Tensor, scores: Tensor, lens: Tensor, size: int) -> None:
    """Fail unless blocks of the largest scores were chosen, and the newest one, in ascending order."""
    for row, score, seen in zip(selected.tolist(), scores.cpu().double(), lens.tolist(), strict=True):
        chosen_ones = [block for block in row if block >= 0]
        assert row == sorted(chosen_ones) + [-1] * (len(row) - len(chosen_ones))
        assert len(set(chosen_ones)) == len(chosen_ones)
        blocks = {b: score[b * size : min(b * size + size, seen)] for b in range(-(-seen // size))}
        best = {b: float(values[~values.isnan()].max()) for b, values in blocks.items() if not values.isnan().all()}
        lowest = float(torch.finfo(torch.float32).min)
        best = {b: max(min(value, -lowest), lowest) for b, value in best.items()}
        if seen:
            best[(seen - 1) // size] = inf
        assert set(chosen_ones) <= set(best)
        assert len(chosen_ones) == min(len(row), len(best))
        left = [value for b, value in best.items() if b not in chosen_ones]
        assert min((best[b] for b in chosen_ones), default=inf) >= max(left, default=-inf)


@pytest.mark.in_turn
@each_kind
@each_size
def test_blocks_of_the_largest_scores_are_published(kind: str, size: int) -> None:
    lens = torch.tensor([0, 1, 7, 8, 9, 150, 299, 300], dtype=torch.int32, device=DEVICE)
    scores = drawn(kind, len(lens), 300)
    for row, seen in enumerate(lens.tolist()):
        scores[row, seen:] = inf if row % 2 else nan  # what was never written
    for most in (1, 3, 400 // size):
        judge(published(scores, lens, most, size), scores, lens, size)


def test_a_score_of_a_wrong_block_is_found() -> None:
    lens, size = torch.tensor([64], dtype=torch.int32, device=DEVICE), 8
    scores = torch.zeros(1, 64, device=DEVICE)
    scores[0, 11] = 1.0
    blocks = published(scores, lens, 2, size)
    assert blocks.tolist() == [[1, 7]]
    for wrong in ([[0, 7]], [[1, 6]], [[7, 1]], [[1, -1]]):
        with pytest.raises(AssertionError):
            judge(torch.tensor(wrong), scores, lens, size)


@pytest.mark.in_turn
@each_kind
@each_size
def test_entries_of_candidates_are_selected_and_no_others(kind: str, size: int) -> None:
    """In any order, twice, of no block, all blocks that there are; in a plan for much longer rows, and on odd pages."""
    lens = torch.tensor([0, 5, 64, 150, 299, 300], dtype=torch.int32, device=DEVICE)
    scores, g, most = drawn(kind, len(lens), 300), seeded(size), min(400 // size, 60)
    blocks = torch.randint(-3, 300 // size + 4, (len(lens), most), generator=g).int()
    blocks[1], blocks[2, 1], blocks[5] = -1, blocks[2, 0], torch.arange(most).int()
    for page, planned in ((24, 300), (64, 5000)):
        query, cache, token_map = rows_with(scores, lens, page)
        out = torch.full((len(lens) + 1, 9), 77, dtype=torch.int32, device=DEVICE)
        select = ops.layer_ops().select_topk_of_candidates
        select(query, cache, token_map, blocks.to(DEVICE), size, out[:-1, :7], planned)

        inside = (torch.arange(300) // size)[None, :, None] == blocks[:, None, :]
        masked = scores.cpu().masked_fill(~inside.any(-1), nan).numpy()
        assert (out[:-1, :7].cpu().numpy() == selected_by_oracle(masked, lens.tolist(), 7)).all()
        assert bool((out[-1] == 77).all() and (out[:, 7:] == 77).all())


@pytest.mark.parametrize("name", ["candidates-random", "within-random", "candidates-void", "within-published"])
def test_the_kit_passes_in_parts_of_a_few_tokens(name: str) -> None:
    with mock.patch.object(scratch, "BYTES", 2**15):
        certificate = conform(Subject.of(GenericBackend(), device=DEVICE.type), chosen(CASES, name))

    assert [(o.state, o.message) for o in certificate.outcomes] == [("passed", "")]


def one_token() -> tuple[IndexQuery, PagedKVCache, TokenMap]:
    """A token that sees two entries."""
    cache = PagedKVCache.allocate(KVCacheLayout.rows(96, 32), 1, 64, DEVICE)
    query = IndexQuery(torch.ones(1, 2, 128, dtype=torch.bfloat16, device=DEVICE), torch.ones(1, 2, device=DEVICE))
    table, zero = torch.zeros(1, 1, dtype=torch.int32, device=DEVICE), torch.zeros(1, dtype=torch.int32, device=DEVICE)
    return query, cache, TokenMap(table, zero, zero + 2)


@pytest.mark.parametrize("size", [0, 3, 1024])
def test_blocks_of_another_size_are_refused_before_a_launch(size: int) -> None:
    out = torch.zeros(1, 4, dtype=torch.int32, device=DEVICE)
    layer_ops = ops.layer_ops()
    with observed() as seen:
        with pytest.raises(ArgumentError, match=r"^block_size: expected a power of two up to 512"):
            layer_ops.select_candidates(*one_token(), out, size, 2)
        with pytest.raises(ArgumentError, match=r"^block_size: expected a power of two up to 512"):
            layer_ops.select_topk_of_candidates(*one_token(), out, size, out, 2)

    assert seen == []


def test_without_entries_the_newest_block_is_none_and_nothing_is_selected() -> None:
    query, cache, seeing = one_token()
    token_map = evolve(seeing, visible_lens=seeing.visible_lens * 0)
    out = torch.full((1, 4), 77, dtype=torch.int32, device=DEVICE)
    layer_ops = ops.layer_ops()
    layer_ops.select_candidates(query, cache, token_map, out, 8, 0)
    assert out.tolist() == [[-1] * 4]
    layer_ops.select_topk_of_candidates(query, cache, token_map, out, 8, out.fill_(77), 0)
    assert out.tolist() == [[-1] * 4]


def test_warm_up_foresees_every_form_that_is_launched() -> None:
    """Of scores and of lists, on pages that have whole blocks and on others."""
    scores, lens = drawn("normal", 2, 300), torch.full((2,), 300, dtype=torch.int32, device=DEVICE)
    for page, size in ((24, 8), (64, 8), (24, 64)):
        query, cache, token_map = rows_with(scores, lens, page)
        with observed() as seen:
            out = torch.empty(2, 16, dtype=torch.int32, device=DEVICE)
            ops.layer_ops().select_candidates(query, cache, token_map, out, size, 300)
            ops.layer_ops().select_topk_of_candidates(query, cache, token_map, out, size, out, 300)
        expected = {
            *candidates.variants(size, 16),
            *index_logits.variants(cache.layout, 2, block_size=size, places=16),
            *select.variants(16, 300),
            *select.variants(16, 16 * size, of_blocks=True),
        }
        assert set(seen) <= expected
        assert len({variant.name for variant in seen}) == 4

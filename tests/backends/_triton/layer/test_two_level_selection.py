"""Selection in two levels: blocks and their entries, judged on scores that are equal, extreme or absent."""

from __future__ import annotations

from math import inf, nan
from unittest import mock

import numpy as np
import pytest
import torch
from attrs import evolve
from torch import Tensor

from dsv4attn.backends._triton.launching.runtime import architecture, observed
from dsv4attn.backends._triton.layer import candidates, ops, select
from dsv4attn.backends.triton.launch import GenericBackend
from dsv4attn.core.cache.layout import KVCacheLayout, PagedKVCache
from dsv4attn.core.torch_ops.arguments import TokenMap
from dsv4attn.core.torch_ops.indexer import IndexQuery
from dsv4attn.errors import ArgumentError
from dsv4attn.testing.case import chosen
from dsv4attn.testing.cases import CASES
from dsv4attn.testing.conform import Subject, conform
from tests.backends._triton.cache.caches import DEVICE, seeded
from tests.backends._triton.layer.test_select_topk import KINDS

each_size = pytest.mark.parametrize("size", [1, 8, 64])
each_kind = pytest.mark.parametrize("kind", KINDS)


def drawn(kind: str, rows: int, columns: int) -> Tensor:
    rng = np.random.default_rng(len(kind))
    with np.errstate(over="ignore"):
        scores = np.stack([KINDS[kind](rng, columns) for _ in range(rows)]).astype(np.float32)
    return torch.from_numpy(scores).to(DEVICE)


def published(scores: Tensor, lens: Tensor, most: int, size: int) -> Tensor:
    """Blocks [T, most] as the kernels choose them among scores [T, E]."""
    out = torch.full((len(lens), most), 77, dtype=torch.int32, device=DEVICE)
    blocks = scores.new_full((len(lens), candidates.block_columns(scores.shape[1], size)), nan)
    candidates.select_blocks(scores, blocks, lens, out, size, scores.shape[1])
    return out.cpu()


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


@each_size
def test_scores_of_candidates_are_kept_and_no_others(size: int) -> None:
    entries, g = 301, seeded(size)
    scores = torch.randn(5, 320, generator=g).to(DEVICE)
    blocks = torch.randint(-3, -(-entries // size) + 4, (5, 2 * 9), generator=g).int().to(DEVICE)[:, ::2].contiguous()
    blocks[1], blocks[2, 1] = -1, blocks[2, 0]
    kept = torch.zeros(5, 330, device=DEVICE)[:, :320]
    candidates.keep_candidates(scores, blocks, kept, size, entries)

    inside = (torch.arange(320, device=DEVICE) // size)[None, :, None] == blocks[:, None, :]
    inside = inside.any(-1) & (torch.arange(320, device=DEVICE) < entries)
    assert torch.equal(kept.nan_to_num(7.0), scores.masked_fill(~inside, 7.0))


@pytest.mark.parametrize("name", ["candidates-random", "within-random", "candidates-void", "within-published"])
def test_the_kit_passes_in_parts_of_a_few_tokens(name: str) -> None:
    with mock.patch.object(ops, "SCORES_BYTES", 2**15):
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
    for entries, size, most in ((200, 8, 16), (9000, 1, 600), (40000, 8, 64)):
        scores, lens = drawn("normal", 2, entries), torch.full((2,), entries, dtype=torch.int32, device=DEVICE)
        with observed() as seen:
            blocks = published(scores, lens, most, size).to(DEVICE)
            candidates.keep_candidates(scores, blocks, torch.empty_like(scores), size, entries)
        expected = {
            *candidates.variants(size),
            *select.variants(most, -(-entries // size), architecture(), aligned=False),
        }
        assert set(seen) <= expected
        assert len({variant.name for variant in seen}) >= 3

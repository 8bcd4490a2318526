"""Scores of index keys on Hopper, beside the shared kernel on the same inputs; and when it serves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4attn.backends._triton.launching.runtime import INTERPRETED, architecture, observed
from dsv4attn.backends._triton.layer import index_logits
from dsv4attn.backends.sm90 import index
from dsv4attn.backends.sm90.launch import Sm90Backend
from dsv4attn.core.definitions import IndexQuery
from dsv4attn.core.definitions.records import store_index_keys
from dsv4attn.core.layout import KVCacheLayout, PagedKVCache
from tests.backends._triton.compiling.gates import broken_limits

hopper = [
    pytest.mark.device,
    pytest.mark.skipif(INTERPRETED or architecture() != "sm_90", reason="needs a Hopper GPU"),
]
DEVICE = torch.device("cpu" if INTERPRETED or not torch.cuda.is_available() else "cuda")


def world(tokens: int = 41, page: int = 64, heads: int = 64) -> dict[str, Any]:
    """Tokens of three requests and of one that does not exist, over ragged entries; some blocks are lost."""
    torch.manual_seed(tokens)
    layout = KVCacheLayout.index_fp8(128)
    cache = PagedKVCache.allocate(layout, 60, page, DEVICE)
    store_index_keys(torch.randn(60 * page, 128, device=DEVICE), cache, torch.arange(60 * page, device=DEVICE))
    table = torch.randperm(60)[: 3 * 15].view(3, 15).int().to(DEVICE)
    table[0, 3], table[1, 0], table[2, 5] = -1, 99, -(2**31)
    request = torch.sort(torch.randint(0, 3, (tokens,))).values.int().to(DEVICE)
    request[tokens // 2] = 7
    lens = torch.randint(0, 15 * page + 1, (tokens,), dtype=torch.int32).to(DEVICE)
    lens[::7] = 0
    q = torch.randn(tokens, heads, 128, device=DEVICE).to(torch.float8_e4m3fn)
    query = IndexQuery(q, torch.randn(tokens, heads, device=DEVICE))
    return {"query": query, "cache": cache, "block_table": table, "token_to_req": request, "visible_lens": lens}


def scored(run: int, given: dict[str, Any], score: Any) -> tuple[Tensor, Tensor | None]:
    entries = int(given["block_table"].shape[1]) * given["cache"].block_size
    tokens = given["visible_lens"].shape[0]
    scores = torch.full((tokens, entries), 7.0, device=DEVICE)
    groups = -(-entries // run) * index_logits.LANES if run else 0
    maxima = torch.full((tokens, groups), -torch.inf, device=DEVICE) if run else None
    assert score(**given, scores=scores, maxima=maxima, run=run) in (None, True)
    return scores, maxima


def alike(found: Tensor, wanted: Tensor) -> None:
    assert torch.equal(found.isnan(), wanted.isnan())
    assert torch.allclose(found.nan_to_num(), wanted.nan_to_num(), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("run", [0, 128])
@pytest.mark.parametrize("page", [64, 128])
@pytest.mark.parametrize("tokens", [6, 41, 300])
class TestOnDevice:
    pytestmark = hopper

    def test_scores_and_maxima_are_those_of_the_shared_kernel(self, tokens: int, page: int, run: int) -> None:
        given = world(tokens, page)
        found, own_maxima = scored(run, given, index.score)
        wanted, maxima = scored(run, given, index_logits.score)

        alike(found, wanted)
        if own_maxima is not None and maxima is not None:
            runs = -(-given["visible_lens"] // run) * index_logits.LANES
            seen = torch.arange(maxima.shape[1], device=DEVICE) < runs[:, None]
            alike(own_maxima[seen], maxima[seen])


@pytest.mark.parametrize("tokens", [1, 40, 257])
class TestGathered:
    pytestmark = hopper

    def test_the_fields_function_is_that_of_the_shared_kernel(self, tokens: int) -> None:
        torch.manual_seed(tokens)
        k = torch.randn(700, 128, device=DEVICE).to(torch.float8_e4m3fn)
        q = torch.randn(tokens, 64, 128, device=DEVICE).to(torch.float8_e4m3fn)
        first = torch.randint(0, 600, (tokens,), dtype=torch.int32, device=DEVICE)
        end = (first + torch.randint(0, 300, (tokens,), device=DEVICE).int()).clamp(max=700)
        given = q, (k, torch.rand(700, device=DEVICE)), torch.randn(tokens, 64, device=DEVICE), first, end
        found, wanted = index.fp8_mqa_logits(*given), index_logits.fp8_mqa_logits(*given)
        assert found is not None

        assert torch.equal(found == -torch.inf, wanted == -torch.inf)
        alike(found.clamp(min=-1e30), wanted.clamp(min=-1e30))


@pytest.mark.parametrize("case", ["heads", "page", "few tokens", "interpreted"])
def test_what_it_does_not_serve_is_left_to_the_shared_kernel(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "INTERPRETED", case == "interpreted")
    given = world(2 if case == "few tokens" else 12, 48 if case == "page" else 64, 32 if case == "heads" else 64)
    scores = torch.zeros(given["visible_lens"].shape[0], 720, device=DEVICE)
    with observed() as seen:
        assert not index.score(**given, scores=scores, maxima=None, run=0)

    assert not seen
    assert (scores == 0).all()


def test_a_deterministic_backend_has_one_kernel_for_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> bool:
        raise AssertionError("asked")

    monkeypatch.setattr(index, "score", refuse)
    steps, given = Sm90Backend(deterministic=True).layer_steps, world(6, heads=8)
    out = torch.empty(6, 4, dtype=torch.int32, device=DEVICE)
    maps = given["block_table"], given["token_to_req"], given["visible_lens"].clamp(max=100)
    steps.select_topk(given["query"], given["cache"], *maps, out, 100)

    assert (out[given["visible_lens"] == 0] == -1).all()


def test_its_forms_keep_every_limit() -> None:
    """They are also foreseen: a command that is asked for a kernel that no backend names fails."""
    assert broken_limits("sm90", ["sm_90"], "--kernel", "score_index") == []

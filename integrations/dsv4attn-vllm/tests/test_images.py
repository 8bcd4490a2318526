"""Images in prompts: a token of an image sees the whole image, in rows of vLLM's builder wider than the window."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from dsv4attn_vllm import serving
from dsv4attn_vllm.cuda import CUDAAttention
from engine import Engine, config_of, with_images, world
from torch import Tensor

LARGEST = 160
"""Most tokens of an image; more than the window, so that its first tokens are left of the window of its last."""


@pytest.fixture(params=["reference", "triton", "xpu"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """A model that reads images, on backends that attend prefills on pages and (xpu) on gathered keys."""
    monkeypatch.setenv("DSV4ATTN_BACKEND", request.param)
    serving._serving.cache_clear()
    with world(config := with_images(config_of(), LARGEST)):
        yield Engine(config, CUDAAttention)


def visible(position: int, images: Sequence[tuple[int, int]]) -> range:
    """Positions that a token sees: its window, and all of the image, (first, last), that it belongs to."""
    for first, last in images:
        if first <= position <= last:
            return range(max(min(position - 127, first), 0), last + 1)
    return range(max(position - 127, 0), position + 1)


def check(
    engine: Engine, outs: Sequence[Tensor], requests: Any, images: Any, positions: Sequence[tuple[int, int]]
) -> None:
    """Hold tokens, (request, position), of every layer against the oracle."""
    starts = np.cumsum([0, *(count for _, count in requests)])
    for layer, out in zip(engine.layers, outs, strict=True):
        for index, position in positions:
            row = int(starts[index]) + position - requests[index][0]
            keys = visible(position, images.get(index, ()))
            error = engine.error(layer, out, index, position, row, window_keys=keys)
            assert error < 0.012, (layer.prefix, index, position, error)


def test_tokens_of_an_image_see_all_of_it(engine: Engine) -> None:
    """A decode, the next chunk of a prompt with an image larger than the window, and a fresh prompt with two images."""
    requests, images = [(150, 1), (129, 139), (0, 30)], {1: [(131, 265)], 2: [(3, 10), (11, 20)]}
    work = [(engine.request(tokens), count) for tokens, count in requests]

    outs = engine.step(work, mm_req_doc_ranges=images)

    checked = [(0, 150)]
    checked += [(1, position) for position in (129, 130, 131, 200, 264, 265, 266, 267)]
    checked += [(2, position) for position in (0, 2, 3, 9, 10, 11, 20, 21, 29)]
    check(engine, outs, requests, images, checked)


def test_prompts_without_images_and_decodes_after_one_have_plain_windows(engine: Engine) -> None:
    request, other = engine.request(), engine.request(140)
    engine.step([(request, 30)], mm_req_doc_ranges={0: [(5, 25)]})

    outs = engine.step([(request, 1), (other, 30)])

    check(engine, outs, [(30, 1), (140, 30)], {}, [(0, 30), (1, 140), (1, 169)])


def test_rows_are_as_wide_as_was_planned_for(engine: Engine) -> None:
    layer = engine.layers[0]

    window = engine.describe([(engine.request(), 60)], mm_req_doc_ranges={0: [(5, 50)]})[layer.swa_cache_layer.prefix]

    assert window.dsv4attn.prefill_swa_indices.shape == (60, 1, 128 + LARGEST)
    assert layer._serving.limits.prefill_window_columns == 128 + LARGEST
    assert {problem.window_columns for problem in layer._serving.problems if problem.phase == "prefill"} == {
        128 + LARGEST
    }

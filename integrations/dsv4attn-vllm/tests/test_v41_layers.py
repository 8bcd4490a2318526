"""Layers of DeepSeek-V4.1 of vLLM with dsv4attn in them, against its own builder and the oracle; see v41.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from dsv4attn_vllm.cuda_v41 import CUDAAttention
from engine import world
from v41 import RATIOS, V41Engine, v41_config


@pytest.fixture
def engine(backend: str) -> Iterator[V41Engine]:
    config = v41_config()
    with world(config):
        yield V41Engine(config, CUDAAttention, layers=len(RATIOS))


def check_rows(engine: V41Engine, outs: list[torch.Tensor], before: list[tuple[int, int]], rows: list[int]) -> None:
    """Hold rows of the last step against the oracle. before: tokens in the caches before the step, and new tokens."""
    tokens = [(i, tokens + j) for i, (tokens, count) in enumerate(before) for j in range(count)]
    for layer, out in zip(engine.layers, outs, strict=True):
        for row in rows:
            error = engine.error(layer, out, *tokens[row], row)
            assert error < 0.012, (layer.prefix, row, error)


@pytest.mark.parametrize(
    ("backend", "before", "behind"),
    [
        ("reference", [(150, 1), (40, 1)], 2),  # decodes, and rows that a captured piece has behind them
        ("reference", [(0, 70)], 0),  # a fresh prompt
        ("reference", [(150, 1), (40, 1), (129, 30)], 3),  # two decodes and the next chunk of a prompt
        ("triton", [(131, 1), (40, 1), (13, 7)], 1),
    ],
    ids=["decode", "prefill", "mixed", "triton"],
    indirect=["backend"],
)
def test_a_step_is_what_own_builder_and_oracle_say(
    engine: V41Engine, before: list[tuple[int, int]], behind: int
) -> None:
    work = [(engine.request(tokens), count) for tokens, count in before]
    rows = sum(count for _, count in before)

    outs = engine.step(work, behind=behind)

    for layer, out in zip(engine.layers, outs, strict=True):
        assert torch.equal(engine.of_own_builder(layer, before, rows + behind), out), layer.prefix
        assert not out[rows:].any()
    check_rows(engine, outs, before, [0, rows // 2, rows - 1])

"""Caches with a key in every record, and what float64 says of attention over them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from dsv4attn.core.cache.layout import KVCacheLayout
from dsv4attn.testing.kit.oracle_cache import place_of
from dsv4attn.testing.kit.tolerances import Expected, read_row, tolerance, written

SCALE = 512**-0.5
V4 = KVCacheLayout.fp8_ds_mla()
BUDGET = tolerance(V4, torch.bfloat16)


def pages(layout: KVCacheLayout, count: int, size: int, *, pad: int = 0) -> Tensor:
    """[count, size * record + pad] bytes: the oracle's records, everything else 0xFF, which reads as NaN."""
    rng = np.random.default_rng(count)
    memory = torch.full((count, size * layout.record_bytes + pad), 0xFF, dtype=torch.uint8)
    for page in range(count):
        for place in range(size):
            record = torch.from_numpy(written(rng.standard_normal(512), layout).copy())
            memory[page, torch.from_numpy(place_of(layout, place, size))] = record
    return memory


def keys_of(memory: Tensor, layout: KVCacheLayout, size: int, slots: list[int]) -> list[Any]:
    """The keys in these slots, as float64 reads them. Negative slots and slots that do not exist have none."""
    found = []
    for slot in slots:
        if 0 <= slot < memory.shape[0] * size:
            raw = memory.reshape(memory.shape[0], -1)[slot // size].numpy()
            found.append(read_row(raw[place_of(layout, slot % size, size)], layout))
    return found


def selection(tokens: int, width: int, slots: int) -> tuple[Tensor, Tensor]:
    """Slots [tokens, width] with holes of -1, and lengths [tokens]. The first token has no key."""
    chosen = torch.randint(0, slots, (tokens, width))
    chosen[torch.rand(tokens, width) < 0.2] = -1
    lens = torch.randint(1, width + 1, (tokens,))
    lens[0] = 0
    return chosen, lens


def judge(
    q: Tensor, sink: Tensor | None, segments: list[tuple[Tensor, KVCacheLayout, int, Tensor, Tensor]]
) -> Expected:
    """The answer of float64: of each segment its memory, layout, page size, slots and lengths."""
    tokens, heads = q.shape[:2]
    answer = Expected.empty(tokens, heads, 512)
    for token in range(tokens):
        keys = [
            key
            for memory, layout, size, slots, lens in segments
            for key in keys_of(memory, layout, size, slots[token].flatten()[: int(lens[token])].tolist())
        ]
        logits = None if sink is None else sink[:heads].double().numpy()
        answer.judge(token, q[token].double().numpy(), keys, logits, SCALE)
    return answer

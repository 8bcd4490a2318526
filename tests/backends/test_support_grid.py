"""Any head count, top-k and page size (promise G3): a yes at plan time, and a launch that keeps it."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dsv4attn.config import Settings
from dsv4attn.core.contract import AttentionCall, DenseIndices, GatheredKeys, PagedKeys
from dsv4attn.core.device import DeviceFacts
from dsv4attn.core.geometry import LayerKind, ModelGeometry
from dsv4attn.core.layout import KVCacheLayout, PagedKVCache
from dsv4attn.core.problem import Problem
from dsv4attn.plugins import PluginRegistry
from dsv4attn.selection import explain, load_backend
from dsv4attn.testing import oracle
from tests.core.strategies import examples

FLASH = ModelGeometry.preset("flash")
LAYOUT = KVCacheLayout.fp8_ds_mla()
TOPK = (0, 1, 63, 64, 65, 127, 128, 192, 256, 512, 640, 1024, 1152, 2048)
PAGES = (1, 2, 16, 32, 64, 128, 256)
HEADS = range(1, 129)
DEVICES = ("cpu", "sm80", "sm86", "sm89", "sm90", "sm100", "sm120", "sm121")
OTHERS = ("gfx90a", "gfx942", "gfx950", "gfx1201", "xpu")


@pytest.mark.parametrize("name", [*DEVICES, *OTHERS])
def test_g3_every_point_of_the_grid_is_answered_at_plan_time(name: str) -> None:
    """Today the reference says yes everywhere; where nothing is native it must be asked for by name."""
    device, registry = DeviceFacts.named(name), PluginRegistry.load(entry_points=[])
    native = any(device.matches(one.info.native) for one in registry.backends.values())
    request, settings = "auto" if native else "reference", Settings()
    # every head count, and every pair of the other sizes, though not with each other
    points = [(heads, TOPK[heads % 14], PAGES[heads % 7], PAGES[heads % 5]) for heads in HEADS]
    points += [(64, *sizes) for sizes in product(TOPK, PAGES, PAGES)] if name == "cpu" else []
    for heads, topk, page, other in points:
        problem = Problem.of(FLASH, heads=heads, topk=topk, swa_page_size=page, compressed_page_size=other)
        selection = explain(problem, device=device, backend=request, settings=settings, registry=registry)

        assert selection.chosen is not None, str(selection)


def cache_of(rng: np.random.Generator, records: int, page: int) -> PagedKVCache:
    """A cache with numbers of realistic size in every record, none of them written by a backend."""
    cache = PagedKVCache.allocate(LAYOUT, -(-records // page), page)
    shape = (cache.num_blocks, page)
    codes = rng.integers(0, 127, (*shape, 448)) + 128 * rng.integers(0, 2, (*shape, 448))
    cache.region("nope").copy_(torch.from_numpy(codes.astype(np.uint8)))
    cache.region("rope").copy_(torch.from_numpy(rng.standard_normal((*shape, 64))))
    cache.region("scale").copy_(torch.from_numpy(rng.integers(117, 121, (*shape, 8)).astype(np.uint8)))
    return cache


def keys_of(cache: PagedKVCache, rows: DenseIndices) -> list[np.ndarray[Any, Any]]:
    """Keys that each row names, read by the oracle from the bytes of their pages."""
    raw = torch.empty(0, dtype=torch.uint8).set_(cache.tensor.untyped_storage()).numpy()
    stride, size = cache.tensor.stride(0), cache.block_size
    dims: dict[str, Any] = {"nope_dim": 448, "rope_dim": 64, "group_size": 64, "fnuz": False, "scale_bytes": 8}
    named = [
        [slot for slot in line[:count] if slot >= 0]
        for line, count in zip(rows.indices.tolist(), rows.lens.tolist(), strict=True)
    ]
    keys = {
        slot: oracle.read_record(raw[slot // size * stride :], slot % size, block_size=size, split=True, **dims)
        for slot in {*named[0], *named[1]}
    }
    return [np.array([keys[slot] for slot in line]).reshape(-1, 512) for line in named]


def rows_of(rng: np.random.Generator, width: int, records: int) -> DenseIndices:
    """Two rows of different lengths, with holes; the first ends within its columns."""
    slots = np.stack([rng.permutation(records)[:width] for _ in range(2)]).astype(np.int32)
    slots[rng.random(slots.shape) < 0.1] = -1
    lens = torch.tensor([width - width // 3, width], dtype=torch.int32)
    return DenseIndices(torch.from_numpy(slots), lens)


@examples(40)
@given(
    heads=st.integers(1, 128),
    topk=st.sampled_from(TOPK),
    pages=st.tuples(st.sampled_from(PAGES), st.sampled_from(PAGES)),
    kind=st.sampled_from(["swa", "c4a", "c4a"]),
    phase=st.sampled_from(["decode", "prefill"]),
    sink=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_g3_a_yes_of_the_reference_never_fails_at_launch(
    heads: int, topk: int, pages: tuple[int, int], kind: str, phase: str, sink: bool, seed: int
) -> None:
    sizes: dict[str, Any] = {"topk": topk, "compressed_page_size": pages[1]} if kind == "c4a" else {}
    problem = Problem.of(FLASH, kind, phase, heads=heads, swa_page_size=pages[0], sink=sink, lse=True, **sizes)
    support = PluginRegistry.load(entry_points=[]).backends["reference"].info.support
    assert support(DeviceFacts.here("cpu"), problem) == []

    rng = np.random.default_rng(seed)
    window = cache_of(rng, 150, pages[0])
    segments = [(window, rows_of(rng, 128, 150))]
    if problem.layer.kind is not LayerKind.SWA:
        segments.append((cache_of(rng, topk + 10, pages[1]), rows_of(rng, topk, topk + 10)))
    keys = [np.concatenate(parts) for parts in zip(*(keys_of(c, rows) for c, rows in segments), strict=True)]
    q = torch.from_numpy(rng.standard_normal((2, heads, 512))).bfloat16()
    attn_sink = torch.from_numpy(rng.standard_normal(heads)).float() if sink else None
    out, lse = torch.full_like(q, torch.nan), torch.full((2, heads), torch.nan)

    reference = load_backend("reference")
    if phase == "decode":
        paged = tuple(PagedKeys(c, rows) for c, rows in segments)
        reference.decode(AttentionCall(problem.layer, q, paged, attn_sink, out, lse))
    else:
        flat = gathered(keys)
        reference.prefill(AttentionCall(problem.layer, q, flat, attn_sink, out, lse))

    shown = sorted({0, heads // 2, heads - 1})
    sinks = None if attn_sink is None else attn_sink[shown].double().numpy()
    for i in range(2):
        expected, expected_lse = oracle.attend_row(q[i, shown].double().numpy(), keys[i], sinks, problem.layer.scale)
        largest = float(np.abs(keys[i]).max(initial=1.0))

        assert np.abs(out[i, shown].double().numpy() - expected).max() <= 2.0**-8 * largest
        assert np.abs(lse[i, shown].double().numpy() - expected_lse).max() <= 1e-4
    assert torch.isfinite(out).all()


def gathered(keys: list[np.ndarray[Any, Any]]) -> GatheredKeys:
    """The keys of both rows in contiguous memory, one after the other."""
    counts = [len(rows) for rows in keys]
    width = max(counts)
    indices: Tensor = torch.full((2, width), -1, dtype=torch.int32)
    indices[0, : counts[0]] = torch.arange(counts[0])
    indices[1, : counts[1]] = torch.arange(counts[1]) + counts[0]
    kv = torch.from_numpy(np.concatenate(keys)).bfloat16()
    return GatheredKeys(kv, DenseIndices(indices, torch.tensor(counts, dtype=torch.int32)))

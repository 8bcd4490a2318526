"""Promise G16: long contexts and far pages behave like short prompts. All offsets have 64 bits."""

from __future__ import annotations

import mmap
from functools import cache

import attrs
import pytest
import torch
from torch import Tensor

from dsv4attn.backends.reference import kernels
from dsv4attn.core.cache.layer_caches import LayerCaches
from dsv4attn.core.cache.layout import PagedKVCache
from dsv4attn.core.model.geometry import LayerKind, Rope
from dsv4attn.testing.kit import random_step
from dsv4attn.testing.kit.factories import layouts, tiny_geometry
from dsv4attn.testing.kit.random_step import StepFixture
from tests.harness import FORM_NAMES, REFERENCE_FORMS, all_forms, all_kinds, assert_same_bits

TINY = tiny_geometry(num_heads=2, head_dim=12, rope_dim=4)
REAL_WINDOW = tiny_geometry(num_heads=1, head_dim=8, rope_dim=2, window=128, topk=40, ratios=(4, 128))
LAST = 2**20 - 1
REQUESTS = [(30, 1), (17, 1), (5, 9), (0, 20)]


def untouched(size: int) -> Tensor:
    """Bytes of which only the touched ones cost memory; plain allocations larger than the machine are refused."""
    try:
        # the flag is Linux's MAP_NORESERVE, which Python names from 3.13 on
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)
    except (AttributeError, OSError, ValueError) as error:
        pytest.skip(f"no {size} bytes of address space here: {error}")
    return torch.frombuffer(memory, dtype=torch.uint8)


def far_apart(scenario: StepFixture, gap: int) -> LayerCaches:
    """Caches of zeros with `gap` bytes between pages."""
    caches = []
    for pages in scenario.pages[: 1 + (scenario.kind is not LayerKind.SWA)]:
        layout, element = scenario.layout, scenario.layout.dtype.itemsize
        stride, last = layout.page_stride(pages.block_size) + gap, layout.record_bytes // element
        flat = untouched(pages.count * stride).view(layout.dtype)
        tensor = flat.as_strided((pages.count, pages.block_size, last), (stride // element, last, 1))
        caches.append(PagedKVCache(tensor, layout))
    return LayerCaches(*caches)


def end_of(cache: PagedKVCache) -> int:
    return cache.tensor.stride(0) * cache.tensor.itemsize * (cache.num_blocks - 1)


@pytest.mark.parametrize("form", ["gathered-dense", "paged-ragged"])
@all_kinds
@pytest.mark.parametrize(
    ("past", "layout"), [(2**31, "ocp"), (2**32, "ocp"), (2**34, "fp32")], ids=["2GiB", "4GiB", "2^32_elements"]
)
def test_g16_pages_past_the_reach_of_32_bits_are_read_and_written(
    past: int, layout: str, kind: LayerKind, form: str
) -> None:
    scenario = StepFixture(kind=kind, requests=REQUESTS, geometry=TINY, layout=layouts(TINY)[layout])
    near = scenario.run(REFERENCE_FORMS[form])
    smallest = min(pages.count for pages in scenario.pages[: 1 + (kind is not LayerKind.SWA)])
    caches = far_apart(scenario, past // (smallest - 3) * 2 // 64 * 64)
    assert min(end_of(cache) for cache in caches.segments(scenario.layer)) > past

    problem = scenario.problem(REFERENCE_FORMS[form], scenario.history(REFERENCE_FORMS[form], caches))

    assert_same_bits(problem.run(REFERENCE_FORMS[form]), near)


def test_a_mutant_with_addresses_of_32_bits_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = StepFixture(requests=REQUESTS, geometry=TINY)
    backend = REFERENCE_FORMS["paged-dense"]
    problem = scenario.problem(backend, scenario.history(backend, far_apart(scenario, 2**29)))
    scenario.compare(*problem.run(backend))
    right = kernels.read_records

    def wrapped(cache: PagedKVCache, slots: Tensor) -> Tensor:
        """What a kernel reads whose block * stride wraps around: some other page."""
        stride = cache.tensor.stride(0)
        address = (slots // cache.block_size * stride).to(torch.int32).long()
        block = torch.div(address.clamp(min=0), stride, rounding_mode="floor")
        return right(cache, block * cache.block_size + slots % cache.block_size)

    monkeypatch.setattr(kernels, "read_records", wrapped)
    with pytest.raises(AssertionError, match="budgets"):
        scenario.compare(*problem.run(backend))


LATE = [(LAST, 1), (LAST - 127, 1), (2**20 - 3, 3), (LAST - 20, 21), (LAST - 130, 9)]


@pytest.mark.parametrize(
    ("kind", "requests", "dead"),
    [
        ("swa", LATE, -1),
        ("swa", LATE, 2**30),
        ("swa", LATE, 2**31 - 1),
        pytest.param("c128a", [(2**20 - 3, 3), (LAST - 5, 6)], 2**30, marks=pytest.mark.matrix),
    ],
    ids=["swa_freed", "swa_garbage", "swa_largest", "c128a_garbage"],
)
def test_g16_the_end_of_a_context_of_a_million_tokens_equals_the_oracle(
    kind: str, requests: list[tuple[int, int]], dead: int
) -> None:
    """Decode, a verify step and a prefill at the last positions of the model; only live pages exist."""
    scenario = StepFixture(
        kind=kind,
        requests=requests,
        geometry=REAL_WINDOW,
        num_speculative_tokens=3,
        swa_block_size=64,
        compressed_block_tokens=256,
        dead_block=dead,
        poison=0xFF,
    )
    assert max(token.position for token in scenario.tokens) == 1_048_575
    assert scenario.pages[0].count < 20

    for form in FORM_NAMES:
        scenario.check(REFERENCE_FORMS[form])


@pytest.mark.matrix
@pytest.mark.parametrize(
    "prompt",
    [(70_000, 21), pytest.param((LAST - 20, 21), marks=pytest.mark.slow)],  # as many entries again for the oracle
    ids=["short", "long"],
)
def test_g16_a_selection_from_a_quarter_million_entries_equals_the_oracle(prompt: tuple[int, int]) -> None:
    scenario = StepFixture(
        kind="c4a",
        requests=[(LAST, 1), prompt],
        geometry=REAL_WINDOW,
        swa_block_size=64,
        compressed_block_tokens=256,
        topk="garbage",
    )
    assert scenario.topk_rows.max() > 200_000

    for form in ("gathered-dense", "paged-ragged"):
        scenario.check(REFERENCE_FORMS[form])


@cache
def around_edges(kind: LayerKind) -> StepFixture:
    """Tokens around the edges of pages and windows; the oracle's answer is computed once."""
    edges = [n + d for n in (64, 128, 192, 256, 4096) for d in (-1, 0, 1)]
    requests = [*((p - 1, 1) for p in edges), *((p - 2, 3) for p in edges)]
    return StepFixture(
        kind=kind, requests=requests, geometry=REAL_WINDOW, swa_block_size=64, compressed_block_tokens=256
    )


@pytest.mark.in_turn
@all_forms
@all_kinds
def test_g16_every_position_around_the_edges_of_pages_and_windows_equals_the_oracle(kind: LayerKind, form: str) -> None:
    around_edges(kind).check(REFERENCE_FORMS[form])


def test_g16_angles_near_a_million_are_float32_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """An angle computed in float64 turns a key of the last positions visibly further than every engine does."""
    geometry = tiny_geometry()
    scenario = StepFixture(
        requests=[(LAST, 1)], geometry=geometry, layout=layouts(geometry)["fp32"], q_dtype=torch.float32
    )
    scenario.check(REFERENCE_FORMS["paged-dense"])

    def exact(rope: Rope, rows: int, device: str) -> Tensor:
        """The table with angles in float64."""
        inverse = rope.theta ** -(torch.arange(0, rope.dim, 2, dtype=torch.float64) / rope.dim)
        angles = torch.arange(rows, dtype=torch.float64)[:, None] * inverse
        return torch.cat([angles.cos(), angles.sin()], dim=-1).float()

    monkeypatch.setattr(random_step, "cos_sin_cache", exact)
    with pytest.raises(AssertionError, match="budgets"):
        attrs.evolve(scenario).check(REFERENCE_FORMS["paged-dense"])

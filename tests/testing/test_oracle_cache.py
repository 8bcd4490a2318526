"""The kit's own tools: caches that no backend wrote, calls made by hand, and steps."""

from __future__ import annotations

import attrs
import numpy as np
import pytest
import torch

from dsv4attn.backends.reference.launch import ReferenceBackend
from dsv4attn.core.cache.layout import KVCacheLayout
from dsv4attn.core.contract.backend import Phase
from dsv4attn.testing.case import Bench, SkipCase, Wrong
from dsv4attn.testing.checks.selection import score_errors
from dsv4attn.testing.kit.factories import layout, layouts, normal, tiny_geometry
from dsv4attn.testing.kit.oracle_cache import AFTER_PAGE, UNWRITTEN, OracleCache, PagePlacement, place_of
from dsv4attn.testing.kit.random_step import step
from dsv4attn.testing.kit.single_call import call
from dsv4attn.testing.kit.tolerances import stored

LAYOUTS = {**{f"tiny-{k}": v for k, v in layouts(tiny_geometry()).items()}, "real": layout("ocp")}


@pytest.mark.parametrize("size", [1, 2, 16])
@pytest.mark.parametrize("name", LAYOUTS)
def test_an_oracle_cache_places_bytes_where_the_layout_says(name: str, size: int) -> None:
    """Two descriptions of one format, written apart from each other."""
    cache_layout: KVCacheLayout = LAYOUTS[name]
    for offset in range(size):
        places = [
            region.offset + offset * region.stride + np.arange(region.count * region.dtype.itemsize)
            for region in cache_layout.regions(size)
        ]
        np.testing.assert_array_equal(place_of(cache_layout, offset, size), np.concatenate(places))


@pytest.mark.parametrize("placement", [PagePlacement(4), PagePlacement(4, 64), PagePlacement(4, 64, 256)])
@pytest.mark.parametrize("name", LAYOUTS)
def test_an_oracle_cache_holds_its_rows_and_nan_everywhere_else(name: str, placement: PagePlacement) -> None:
    cache_layout = LAYOUTS[name]
    rows = normal((1,), np.arange(3), cache_layout.head_dim)
    cache = OracleCache.blank(cache_layout, 3, placement, "cpu").write([9, 0, 5], rows)

    for slot, row in zip([9, 0, 5], rows, strict=True):
        np.testing.assert_array_equal(cache.values[slot], stored(row, cache_layout))
    last = "row" if not cache_layout.is_quantised else "rope"
    region = cache.cache.region(last).flatten(0, 1).float()
    assert region[[0, 5, 9]].isfinite().all()
    assert region[[1, 2, 3, 4, 6, 7, 8, 10, 11]].isnan().all()
    assert np.isnan(cache.values[[1, 2, 3, 4, 6, 7, 8, 10, 11]]).all()
    gap = cache.bytes()[:, cache_layout.page_bytes(4) :]
    assert (gap == UNWRITTEN).all()
    assert gap.shape[1] == min(cache_layout.page_stride(4) + placement.gap - cache_layout.page_bytes(4), AFTER_PAGE)
    assert cache.cache.tensor.storage_offset() * cache_layout.dtype.itemsize == placement.bytes_before


def test_memory_that_cannot_be_had_is_a_reason_to_skip(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("not enough memory: you tried to allocate 6 GB")

    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(SkipCase, match=r"0\.0 GiB of memory cannot be had on cpu"):
        OracleCache.blank(layout("ocp"), 3, PagePlacement(64), "cpu")


@pytest.mark.matrix
@pytest.mark.in_turn
@pytest.mark.parametrize("pattern", ["plain", "behind", "holes", "outside", "empty", "one"])
@pytest.mark.parametrize("kind", ["swa", "c4a"])
def test_a_call_is_the_same_in_every_form(kind: str, pattern: str) -> None:
    results = []
    for phase in Phase:
        for indices in ("dense", "ragged"):
            for keys in ("gathered", "paged"):
                backend = ReferenceBackend(decode_indices=indices, prefill_indices=indices, prefill_keys=keys)
                attention = call(phase, pattern, kind, sinks=[0.5] * 8, seed=3)  # type: ignore[arg-type]
                out, lse = attention.run(Bench(backend))
                assert attention.judge(out, lse)[0] <= attention.budget
                results.append(out.float())

    assert torch.stack(results).std(0).max() < 2**-8
    empty = [row for row in range(9) if not attention.named(row)]
    assert bool(empty) is (pattern == "empty")
    assert not results[0][empty].any()


@pytest.mark.parametrize("what", ["q", "window"])
def test_a_call_that_writes_what_is_not_its_own_is_wrong(what: str) -> None:
    backend = ReferenceBackend()
    right = backend.decode

    def decode(attention: object) -> None:
        right(attention)  # type: ignore[arg-type]
        if what == "q":
            attention.q[0, 0, 0] += 1  # type: ignore[attr-defined]
        else:
            attention.keys[0].cache.tensor[0, 0, 0] ^= 1  # type: ignore[attr-defined]

    backend.decode = decode  # type: ignore[assignment, method-assign]
    with pytest.raises(Wrong, match=f"{what} was changed"):
        call(Phase.DECODE, "plain").run(Bench(backend))


def test_caches_of_a_step_may_have_two_layouts() -> None:
    whole_step = step("c4a", (70, 1), (9, 3), cache="fnuz", compressed="ocp")
    backend = ReferenceBackend()
    caches = whole_step.problem(backend).caches

    assert caches.compressed is not None
    assert [c.layout for c in (caches.swa, caches.compressed)] == whole_step.named_layouts()
    assert whole_step.compare(*whole_step.run(backend)) <= 1
    wrong = attrs.evolve(whole_step, compressed_layout=None).run(backend)
    with pytest.raises(AssertionError, match="budgets"):
        attrs.evolve(whole_step, layout=layout("ocp"), outliers=True).compare(*wrong)


@pytest.mark.parametrize(("bits", "unit"), [(8, 2.0**-8), (14, 2.0**-14), (24, 2.0**-20)])
def test_errors_of_scores_are_those_of_sums_that_keep_some_bits(bits: int, unit: float) -> None:
    """Of sums of 128 products in fp32 about 2^-20; heads whose sums are negative add exactly 0."""
    q, keys = (np.abs(normal((seed,), np.arange(count), 128)) for seed, count in ((1, 3), (2, 5)))
    weights = np.array([0.5, -2.0, 1.0])
    errors = score_errors(q, weights, keys, bits)
    sizes = np.linalg.norm(keys, axis=1) * (np.linalg.norm(q, axis=1) @ np.abs(weights))

    assert (0.9 * unit * sizes < errors).all()
    assert (errors < 2 * unit * sizes).all()
    assert not score_errors(-q, weights, keys, bits).any()


def test_a_step_may_select_nothing() -> None:
    whole_step = step("c4a", (70, 1), topk="none")

    assert (whole_step.topk_rows == -1).all()
    assert whole_step.visible(0)[1] == []


def test_a_step_asks_for_each_phase_that_it_has() -> None:
    both = step("c4a", (70, 2), (9, 0), (3, 8), num_speculative_tokens=1).problems(lse=True)

    assert [(p.phase, p.query_len, p.lse, p.topk) for p in both] == [
        ("decode", 2, True, 512),
        ("prefill", 1, True, 512),
    ]
    assert [p.phase for p in step("swa", (70, 1)).problems()] == ["decode"]
    assert [p.topk for p in step("c128a", (70, 1)).problems()] == [128]

"""Recordings of launches: what a warm-up compiles is what launchers launch on tensors without memory."""

from __future__ import annotations

from threading import Thread

import pytest
import torch
from attrs import evolve

from dsv4attn.backends._triton.cache import gather
from dsv4attn.backends._triton.interpreted import INTERPRETED
from dsv4attn.backends._triton.launching.recorded import meta_cache, meta_rows, recorded
from dsv4attn.backends._triton.launching.runtime import architecture, multiprocessors, observed, recording
from dsv4attn.core.cache.layout import KVCacheLayout, PagedKVCache
from dsv4attn.core.contract.device import DeviceFacts
from dsv4attn.core.contract.limits import Limits
from dsv4attn.core.contract.warmup import WarmupSpec
from dsv4attn.core.model.geometry import ModelGeometry
from dsv4attn.errors import ArgumentError
from tests.backends._triton.cache.caches import DEVICE
from tests.backends.built_in import forms, triton_backends

LAYOUT = KVCacheLayout.fp8_ds_mla()


def gather_two(device: torch.device | str) -> torch.Tensor:
    """Rows of the first two records of a cache of zeros, which are zeros; before, they are ones."""
    if device == "meta":
        cache, out, slots = meta_cache(LAYOUT), meta_rows(2, 512, dtype=torch.bfloat16), meta_rows(2)
    else:
        cache = PagedKVCache.allocate(LAYOUT, 2, 64, device)
        out, slots = torch.ones(2, 512, dtype=torch.bfloat16, device=device), torch.arange(2, device=device).int()
    gather.dequant_gather_slots(out, cache, slots)
    return out


def test_a_launch_on_tensors_without_memory_is_recorded_and_others_run() -> None:
    with observed() as launched:
        expected = gather_two(DEVICE)
    with recording() as variants:
        gather_two("meta")
        gather_two("meta")
        assert list(variants) == launched
        assert torch.equal(gather_two(DEVICE), expected)

    assert not expected.any()
    assert list(variants) == launched


@pytest.mark.skipif(INTERPRETED, reason="interpreted kernels take them")
def test_without_a_recording_tensors_without_memory_are_refused() -> None:
    with pytest.raises(ArgumentError, match="meta device"):
        gather_two("meta")


def test_launchers_choose_for_the_device_of_the_innermost_recording() -> None:
    here = architecture(), multiprocessors()
    with recording("sm_90", cores=7):
        assert (architecture(), multiprocessors()) == ("sm_90", 7)
        with recording():
            assert (architecture(), multiprocessors()) == ("sm_90", 7)
        with recording("gfx942"):
            assert architecture() == "gfx942"
        assert architecture() == "sm_90"
    assert (architecture(), multiprocessors()) == here


def test_an_outer_recording_has_the_variants_of_an_inner_one_even_if_that_fails() -> None:
    @recorded
    def launches() -> None:
        gather_two("meta")

    def fails() -> None:
        with recording():
            gather_two("meta")
            raise KeyError

    for inner in (launches, fails):
        with recording() as outer:
            try:
                inner()
            except KeyError:
                assert architecture() == architecture()
        assert [variant.name for variant in outer] == ["gather_slots_kernel"]
    assert launches() == list(outer)


def test_a_recording_is_of_its_thread_alone() -> None:
    """Engines compile in a thread while another one plans the workspace, which depends on the multiprocessors."""
    here, results = (architecture(), multiprocessors()), dict[str, object]()

    def work() -> None:
        results["device"] = architecture(), multiprocessors()
        with recording() as variants:
            gather_two("meta")
        results["variants"] = [variant.name for variant in variants]

    with recording("sm_90", cores=here[1] + 1) as variants:
        other = Thread(target=work)
        other.start()
        other.join()
        assert not variants
    assert results == {"device": here, "variants": ["gather_slots_kernel"]}


def test_a_recording_for_this_machine_has_its_multiprocessors() -> None:
    here = multiprocessors()
    with recording():
        assert multiprocessors() == here
    with recording("gfx942"):
        assert multiprocessors() == 132


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(3, 24), (3, 2, 30), (8,)])
def test_rows_without_memory_begin_where_they_are_asked_to(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    for alignment in (16, 1):
        rows = meta_rows(*shape, dtype=dtype, alignment=alignment)
        begins = {rows.data_ptr() % 16, *(stride * dtype.itemsize % 16 for stride in rows.stride()[:-1])}

        assert rows.shape == shape
        assert rows.stride(-1) == 1
        assert (begins == {0}) is (alignment == 16)


@pytest.mark.parametrize("layout", [LAYOUT, KVCacheLayout.rows(), KVCacheLayout.v41_fp4(), KVCacheLayout.index_fp8()])
def test_caches_without_memory_begin_where_they_are_asked_to(layout: KVCacheLayout) -> None:
    assert meta_cache(layout).memory.alignment == 16
    assert meta_cache(layout, layout.dtype.itemsize).memory.alignment < 8


@pytest.mark.parametrize("name", [*triton_backends(DeviceFacts.named("sm_90")), "sm90 deterministic"])
def test_what_is_recorded_does_not_depend_on_the_number_of_multiprocessors(name: str) -> None:
    """So kernels that are compiled for a described device are those of every device of its architecture."""
    backend, _, deterministic = name.partition(" ")
    model = ModelGeometry.preset("flash").tensor_parallel(8)
    bounds = evolve(WarmupSpec.of(model, Limits(8, 64, 2**18), layer_parts=True), aligned_rows=True, lse=False)
    recordings = []
    for cores in (4, 132, 304):
        with recording("sm_90", cores=cores):
            on = forms()[backend](deterministic=bool(deterministic), projection="fp8")
            recordings.append({*on.kernel_variants(bounds, DeviceFacts.named("sm_90"))})

    assert recordings[0] == recordings[1] == recordings[2]

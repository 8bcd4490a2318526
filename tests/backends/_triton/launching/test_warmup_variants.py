"""What a warm-up promises: within `WarmupSpec`, no step of any backend asks for a kernel that was not named before.

Rows are those of slices of wider memory, at any element; tensors have every dtype that core and contract let through.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from attrs import evolve
from torch import Tensor

from dsv4attn.backends._triton.cache.records import alignment_of_records, record_alignments
from dsv4attn.backends._triton.compiling.variant import Variant
from dsv4attn.backends._triton.interpreted import INTERPRETED
from dsv4attn.backends._triton.launching.runtime import observed
from dsv4attn.backends.rocm.launch import RocmBackend
from dsv4attn.backends.sm90.launch import Sm90Backend
from dsv4attn.backends.triton.launch import GenericBackend
from dsv4attn.core.cache.layout import Arrangement, KVCacheLayout, PagedKVCache
from dsv4attn.core.contract.device import DeviceFacts
from dsv4attn.core.contract.limits import Limits
from dsv4attn.core.contract.phased import PhasedBackend
from dsv4attn.core.contract.warmup import WarmupSpec
from dsv4attn.core.model.geometry import LayerKind, ModelGeometry
from dsv4attn.errors import ArgumentError
from dsv4attn.testing.kit import factories
from dsv4attn.testing.kit.factories import tiny_geometry
from tests.backends._triton.engine import Engine, launching_nothing
from tests.backends.built_in import forms

META = torch.device("meta")
HERE = DeviceFacts.here()
BF16, FP32 = torch.bfloat16, torch.float32
FLASH = ModelGeometry.preset("flash")
LIMITS = Limits(max_num_reqs=5, max_num_batched_tokens=48, max_model_len=1024, num_speculative_tokens=1)
LAYOUTS = {
    "fp8": (KVCacheLayout.fp8_ds_mla(), BF16),
    "bf16": (KVCacheLayout.rows(), BF16),
    "fp32": (KVCacheLayout.rows(dtype=FP32), FP32),
    "interleaved": (KVCacheLayout.fp8_ds_mla(arrangement=Arrangement.INTERLEAVED), FP32),
}
"""Of caches, and the dtype of q."""
BACKENDS: dict[str, Callable[[], Any]] = {
    **forms(),
    # with this tuning rows are cut on a machine of few units, too
    "triton": lambda: GenericBackend(tuning="sm_90"),
    "Hopper with ROCm": lambda: PhasedBackend(Sm90Backend(), RocmBackend()),
}
# on a device `test_hot_path` runs a thousand steps after a warm-up
meta_only = pytest.mark.skipif(not INTERPRETED, reason="torch's meta device stands for the device under test")


def sliced(like: Tensor, rng: Random, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor of the same shape whose rows lie apart in wider memory, at multiples of 16 bytes or not."""
    step, shape = rng.choice([1, 8]), like.shape
    strides, size = [1], shape[-1]
    for length in reversed(shape[:-1]):
        pitch = size + step * rng.randint(0, 2)
        strides.insert(0, pitch)
        size = pitch * max(length, 1)
    first = step * rng.randint(0, 1)
    base = torch.empty(first + size, dtype=dtype or like.dtype, device=like.device)
    return base.as_strided(shape, strides, first)


class Sliced(Engine):
    """An engine whose rows are slices, other ones in every step."""

    def step(self, rng: Random) -> None:
        """All that a step can ask for."""
        requests = self.requests(rng)
        rows = sum(count for _, count in requests)
        self.q, self.kv, self.out = (sliced(tensor, rng) for tensor in (self.q, self.kv, self.out))
        metadata = self.metadata(self.load(requests, rng), full_width=rng.random() < 0.5)
        self.insert(rows, metadata)
        lse = torch.zeros(rows, self.one.num_heads, device=self.device) if rng.random() < 0.3 else None
        out = self.attend(rows, metadata, lse)
        groups, rank = self.geometry.o_groups, self.geometry.o_lora_rank
        wo_a = torch.empty(groups * rank, self.one.num_heads // groups * self.one.head_dim, device=self.device)
        wo_a = sliced(wo_a, rng, rng.choice([BF16, FP32]))
        self.layer.o_proj(out, self.positions[:rows], wo_a, groups)
        self._copies(rows, rng)

    def _copies(self, rows: int, rng: Random) -> None:
        """Write and read compressed keys outside of the layer, as a compressor does."""
        k, lens = sliced(self.kv[:rows], rng, rng.choice([BF16, FP32])), self.seq_lens[:2]
        for cache in filter(None, (self.swa, self.compressed)):
            self.backend.quantize_and_insert_k_cache(k, cache, self.slots[:rows])
            out = sliced(k.new_empty(2, 9, k.shape[1]), rng, cache.layout.row_dtype)
            for gather_lens in (None, lens):
                self.backend.dequantize_and_gather_k_cache(out, cache, lens, gather_lens, self.table[:2], 1)

    def sweep(self, steps: int, seed: int) -> set[Variant]:
        """Variants that this number of random steps launches."""
        rng = Random(seed)
        with launching_nothing(), observed() as seen:
            for _ in range(steps):
                self.step(rng)
        return {*seen}


def foreseen(backend: Any, bounds: WarmupSpec) -> set[Variant]:
    return {*backend.kernel_variants(bounds, HERE)}


def engine(name: str, layout: KVCacheLayout, dtype: torch.dtype, kind: LayerKind, geometry: Any = FLASH) -> Sliced:
    return Sliced(BACKENDS[name](), geometry, LIMITS, kind, META, layout=layout, q_dtype=dtype)


@meta_only
@pytest.mark.in_turn
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", BACKENDS)
def test_g18_slices_and_every_dtype_are_foreseen(name: str, layout: str) -> None:
    seen, (cache, dtype) = set[Variant](), LAYOUTS[layout]
    for seed, kind in enumerate(LayerKind):
        on = engine(name, cache, dtype, kind)
        launched, known = on.sweep(6, seed), foreseen(on.backend, on.bounds())
        seen |= launched

        assert launched <= known, {str(variant) for variant in launched - known}
    # the sweep has met rows of both kinds
    assert {1, 16} == values(seen, "ROW_ALIGNED")
    assert 1 in {row.unit for row in values(seen, "ROW")}
    assert {"project_kernel", "qnorm_rope_kv_insert_kernel", "insert_kernel", "attention"} <= {
        variant.name for variant in seen
    }


def values(variants: set[Variant], name: str) -> set[Any]:
    return {dict(variant.constants)[name] for variant in variants if name in dict(variant.constants)}


ODD = (
    tiny_geometry(num_heads=3, head_dim=12, rope_dim=4, o_groups=3),
    # rows of 32 bytes, records of 20
    tiny_geometry(num_heads=2, head_dim=16, rope_dim=4),
    tiny_geometry(num_heads=5, head_dim=300, rope_dim=4, window=200, topk=9),
)


@meta_only
@pytest.mark.in_turn
@pytest.mark.parametrize("geometry", ODD, ids=lambda geometry: str(geometry.head_dim))
@pytest.mark.parametrize("name", forms())
def test_g18_slices_of_any_dims_are_foreseen(name: str, geometry: ModelGeometry) -> None:
    for seed, (cache, dtype) in enumerate((factories.layouts(geometry)[name], BF16) for name in ("ocp", "bf16")):
        for kind in (LayerKind.SWA, LayerKind.CSA):
            on = engine(name, cache, dtype, kind, geometry)
            launched, known = on.sweep(4, seed), foreseen(on.backend, on.bounds())

            assert launched <= known, {str(variant) for variant in launched - known}


@pytest.mark.parametrize("layout", factories.layouts(ODD[1]).values(), ids=factories.layouts(ODD[1]))
def test_g18_records_out_of_step_on_aligned_pages_are_foreseen(layout: KVCacheLayout) -> None:
    item = layout.dtype.itemsize
    last = layout.record_bytes // item
    memory = torch.zeros(3, 400 // item, dtype=layout.dtype)
    pages = PagedKVCache(memory.as_strided((3, 5, last), (400 // item, last, 1)), layout)

    assert memory.data_ptr() % 16 == pages.page_stride % 16 == 0
    assert alignment_of_records(layout, pages.memory) in record_alignments(layout, aligned=True)


@meta_only
def test_g18_plain_pages_with_gaps_are_foreseen_on_hopper() -> None:
    """Its own kernel reads plain pages that stand one after the other. It launches only what was foreseen."""
    on = engine("sm90", *LAYOUTS["bf16"], LayerKind.SWA)
    blocks, size, dim = on.swa.tensor.shape
    memory = torch.empty(blocks * (size + 1) * dim, dtype=BF16, device=META)
    on.swa = PagedKVCache(memory.as_strided((blocks, size, dim), ((size + 1) * dim, dim, 1)), on.layout)
    on.layer.bind_kv_cache(on.swa)
    launched = on.sweep(6, 1)

    assert on.bounds().aligned
    assert {row.unit for row in values(launched, "ROW")} == {1, 8}, "the shared kernel serves"
    assert launched <= foreseen(on.backend, on.bounds())


@meta_only
@pytest.mark.parametrize(
    ("promise", "kernel"),
    [({"aligned_rows": True}, "attention"), ({"wo_a_dtype": BF16}, "project_kernel")],
    ids=["rows", "matrices"],
)
def test_g18_what_breaks_a_promise_is_not_foreseen(promise: dict[str, Any], kernel: str) -> None:
    on = engine("triton", *LAYOUTS["fp8"], LayerKind.CSA)
    launched, known = on.sweep(6, 0), foreseen(on.backend, evolve(on.bounds(), **promise))

    assert known < foreseen(on.backend, on.bounds())
    assert kernel in {variant.name for variant in launched - known}


@meta_only
@pytest.mark.parametrize("q_dtype", [BF16, FP32])
def test_g18_kv_of_another_dtype_is_refused_before_any_launch(q_dtype: torch.dtype) -> None:
    on = engine("triton", KVCacheLayout.rows(dtype=q_dtype), q_dtype, LayerKind.SWA)
    with launching_nothing():
        metadata = on.metadata(on.load([(9, 1)], Random(0)))
    on.kv = on.kv.to(FP32 if q_dtype == BF16 else BF16)
    with launching_nothing(), observed() as seen, pytest.raises(ArgumentError) as raised:
        on.insert(1, metadata)

    assert raised.value.argument == "kv"
    assert not seen


@pytest.mark.parametrize("name", BACKENDS)
def test_g18_forms_of_a_model_stay_few(name: str) -> None:
    """A warm-up compiles each of them; where rows are promised to be aligned, the smaller number."""
    bounds = WarmupSpec.of(FLASH, Limits(256, 8192, 65536))
    for arch in ("sm_90", "sm_120", "gfx942", "xpu"):
        device = DeviceFacts.named(arch)
        counts = [len(set(BACKENDS[name]().kernel_variants(spec, device))) for spec in (bounds, promised(bounds))]

        # of a pair the forms of both are compiled
        assert counts[0] <= (160 if " with " in name else 105), (arch, counts)
        assert counts[1] <= (95 if " with " in name else 65), (arch, counts)


def promised(bounds: WarmupSpec) -> WarmupSpec:
    return evolve(bounds, aligned_rows=True)

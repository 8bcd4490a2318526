"""Every Triton backend attends to V4.1's records as the oracle does, for each pair of window and compressed layout."""

from __future__ import annotations

from random import Random
from typing import Any

import attrs
import pytest
import torch

from dsv4attn.backends._triton.attention.keys import BYTES, CODE_WORDS, CODES, NIBBLE_WORDS, NIBBLES, WORDS
from dsv4attn.backends._triton.attention.launch import segment_form
from dsv4attn.backends._triton.cache import insert
from dsv4attn.backends._triton.interpreted import INTERPRETED
from dsv4attn.backends._triton.launching.runtime import observed
from dsv4attn.core.cache.layout import Arrangement, KVCacheLayout, PagedKVCache
from dsv4attn.core.contract.device import DeviceFacts
from dsv4attn.core.contract.problem import CacheFacts, Problem, layout_reasons
from dsv4attn.core.contract.warmup import WarmupSpec
from dsv4attn.core.model.geometry import ModelGeometry
from dsv4attn.errors import ArgumentError
from dsv4attn.selection import load_backend
from dsv4attn.testing.kit.factories import layouts, tiny_geometry, v41_layouts
from dsv4attn.testing.kit.random_step import StepFixture
from tests.backends._triton.cache.caches import DEVICE

PAIRS = [("v41", "v41"), ("v41", "v41-fp4"), ("v41-split", "v41-fp4-split"), ("ocp", "v41-fp4"), ("v41", "bf16")]
PAIRS += [("v41", "v41-fp4-split"), ("v41-split", "v41-fp4")]
GEOMETRIES = [tiny_geometry(), tiny_geometry(num_heads=3, head_dim=74, rope_dim=10)]


def step(pair: tuple[str, str], geometry: ModelGeometry, **changes: Any) -> StepFixture:
    """Decode and prefill requests over both caches, among poison and gaps; split pages lie at odd distances."""
    known = {**layouts(geometry), **v41_layouts(geometry)}
    fields = {"kind": "c4a", "requests": [(40, 1), (3, 1), (20, 3), (0, 2)], "geometry": geometry, "topk": "holes"}
    window, compressed = (known[name] for name in pair)
    fields |= {
        "layout": window,
        "compressed_layout": compressed,
        "page_padding": 34,
        "poison": 0xFF,
        "device": DEVICE.type,
    }
    return StepFixture(**{**fields, **changes})


@pytest.mark.pairwise
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=lambda geometry: str(geometry.head_dim))
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("triton", {}),
        ("triton", {"deterministic": True}),
        ("rocm", {}),
        ("xpu", {"decode": "gathered"}),
        ("xpu", {"decode": "fused"}),
        ("sm90", {}),
        ("sm120", {}),
    ],
    ids=lambda one: one if isinstance(one, str) else ",".join(one.values() if one.get("decode") else one),
)
def test_g7_every_backend_reads_each_cache_by_its_own_record(
    name: str, options: dict[str, Any], geometry: ModelGeometry, pair: tuple[str, str]
) -> None:
    step(pair, geometry).check(load_backend(name, **options))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_g7_queries_may_be_fp32(dtype: torch.dtype) -> None:
    step(("v41", "v41-fp4"), GEOMETRIES[0], q_dtype=dtype).check(load_backend("triton"))


@pytest.mark.parametrize("pair", PAIRS[:3], ids="-".join)
def test_g18_every_form_that_is_launched_was_foreseen(pair: tuple[str, str]) -> None:
    geometry, backend = GEOMETRIES[1], load_backend("triton")
    scene = step(pair, geometry)
    with observed() as seen:
        scene.run(backend)
    options: dict[str, Any] = {
        "swa": scene.layout,
        "compressed": scene.compressed_layout,
        "aligned": False,
        "sink": None,
    }
    bounds = WarmupSpec.of(geometry, scene.limits, **options)

    known = set[object](backend.kernel_variants(bounds, DeviceFacts.here()))

    steps = {
        variant
        for variant in seen
        if variant.name in ("attention", "reduce", "insert_kernel", "qnorm_rope_kv_insert_kernel")
    }
    assert {variant.name for variant in steps} >= {"attention", "insert_kernel", "qnorm_rope_kv_insert_kernel"}
    assert steps <= known


def test_the_reader_follows_from_the_name_of_the_record_not_from_its_dims() -> None:
    record = KVCacheLayout.fp8_ds_mla()

    def kind(layout: KVCacheLayout, *, aligned: bool = True) -> int:
        return segment_form(layout, aligned=aligned).kind

    assert kind(record) == WORDS.value
    assert kind(KVCacheLayout.fp8_ds_mla(24, 8)) == BYTES.value
    for arrangement in (Arrangement.SPLIT, Arrangement.INTERLEAVED):
        fp8, fp4 = KVCacheLayout.v41_fp8(arrangement=arrangement), KVCacheLayout.v41_fp4(arrangement=arrangement)
        assert (kind(fp8), kind(fp8, aligned=False)) == (CODE_WORDS.value, CODES.value)
        assert (kind(fp4), kind(fp4, aligned=False)) == (NIBBLE_WORDS.value, NIBBLES.value)
        assert kind(KVCacheLayout.v41_fp8(480, 64, arrangement=arrangement)) == CODES.value
        assert kind(KVCacheLayout.v41_fp4(480, 64, arrangement=arrangement)) == NIBBLES.value
    # words are read at fixed distances, and these scales have other padding
    assert kind(attrs.evolve(record, scale_padding=1)) == BYTES.value
    assert kind(attrs.evolve(KVCacheLayout.of_record("v4_nvfp4"), scale_padding=4)) == BYTES.value
    # dims and groups of V4's record under V4.1's name
    assert kind(attrs.evolve(record, name="v41_fp8")) == CODES.value


def test_a_writer_that_would_round_to_fp4_first_is_refused_before_anything_is_written() -> None:
    layout = KVCacheLayout.v41_fp8(rounds_to_fp4=True)
    facts = CacheFacts.of(layout, 64)
    problem = attrs.evolve(Problem.of(ModelGeometry.preset("flash")), swa=facts)
    # known before anything is launched, and read alike
    assert [reason.actual for reason in layout_reasons(problem)] == ["window cache that rounds to fp4 first"]
    assert [*layout_reasons(problem, rounds_to_fp4=True)] == []
    cache = PagedKVCache.allocate(layout, 1, 4, DEVICE)
    with pytest.raises(ArgumentError, match="cache layout: expected a layout whose writer does not round to fp4 first"):
        insert.quantize_and_insert_k_cache(torch.ones(1, 512, device=DEVICE), cache, torch.zeros(1).long().to(DEVICE))

    assert not cache.tensor.any()


@pytest.mark.matrix
@pytest.mark.skipif(not INTERPRETED, reason="a slow sweep, which needs no device")
def test_the_fp4_scale_of_every_bf16_maximum_is_that_of_the_reference() -> None:
    rng = Random(0)
    tops = (torch.arange(0x7F80, dtype=torch.int32) << 16).view(torch.float32)
    groups = torch.tensor([rng.choice((0.0, 0.25, 0.5, 0.75, 1.0)) for _ in range(tops.numel() * 16)]).view(-1, 16)
    groups[:, 3] = 1
    rows = (groups * tops[:, None]).bfloat16()
    rows = torch.cat([rows, rows.new_zeros(-len(rows) % 32, 16)]).view(-1, 512)
    ours, theirs = (PagedKVCache.allocate(KVCacheLayout.v41_fp4(), len(rows), 1) for _ in range(2))
    load_backend("triton").quantize_and_insert_k_cache(rows, ours, torch.arange(len(rows)))
    load_backend("reference").quantize_and_insert_k_cache(rows, theirs, torch.arange(len(rows)))

    assert torch.equal(ours.tensor, theirs.tensor)

"""`WarmupSpec`: what it takes from a model, and what it refuses."""

from __future__ import annotations

import pytest
import torch

from dsv4attn.core.cache.layout import Fp8Format, KVCacheLayout
from dsv4attn.core.contract.info import LAYER_PARTS
from dsv4attn.core.contract.limits import Limits
from dsv4attn.core.contract.warmup import WarmupSpec
from dsv4attn.core.model.geometry import LayerKind, ModelGeometry
from dsv4attn.errors import ArgumentError

FLASH, PRO = ModelGeometry.preset("flash"), ModelGeometry.preset("pro")
LIMITS = Limits(8, 64, 4096)


@pytest.mark.parametrize("geometry", [FLASH, PRO.tensor_parallel(8)])
def test_a_model_has_a_layer_of_each_kind_and_one_for_drafts(geometry: ModelGeometry) -> None:
    spec = WarmupSpec.of(geometry, LIMITS)

    assert [layer.kind for layer in spec.layers] == list(LayerKind)
    assert {layer.num_heads for layer in spec.layers} == {geometry.num_heads}
    assert (spec.num_groups, spec.o_lora_rank) == (geometry.o_groups, 1024)
    assert spec.swa == spec.compressed == KVCacheLayout.fp8_ds_mla()


def test_pages_of_a_compressed_cache_hold_the_entries_of_256_tokens() -> None:
    spec = WarmupSpec.of(FLASH, LIMITS)

    assert [[size for _, size in spec.caches(layer)] for layer in spec.layers] == [[64], [64, 64], [64, 2]]
    spec = WarmupSpec.of(FLASH, LIMITS, swa_block_size=16, compressed_block_size=8)
    assert [[size for _, size in spec.caches(layer)] for layer in spec.layers] == [[16], [16, 8], [16, 8]]


def test_the_two_caches_may_have_two_layouts() -> None:
    fnuz, rows = KVCacheLayout.fp8_ds_mla(fp8_format=Fp8Format.FNUZ), KVCacheLayout.rows()
    spec = WarmupSpec.of(FLASH, LIMITS, swa=fnuz, compressed=rows)

    assert [[layout.name for layout, _ in spec.caches(layer)] for layer in spec.layers] == [
        ["fp8_ds_mla"],
        ["fp8_ds_mla", "rows"],
        ["fp8_ds_mla", "rows"],
    ]
    assert WarmupSpec.of(FLASH, LIMITS, swa=fnuz).compressed == fnuz


def test_an_option_that_is_none_means_with_and_without() -> None:
    assert WarmupSpec.of(FLASH, LIMITS).with_lse == (False, True)
    assert WarmupSpec.of(FLASH, LIMITS).with_sink == (True,)
    assert WarmupSpec.of(FLASH, LIMITS, lse=False, sink=None).with_lse == (False,)
    assert WarmupSpec.of(FLASH, LIMITS, lse=False, sink=None).with_sink == (False, True)


def test_all_parts_of_the_layer_or_some_run_on_the_backend() -> None:
    assert WarmupSpec.of(FLASH, LIMITS).model is None
    assert WarmupSpec.of(FLASH, LIMITS, layer_parts=True).parts == LAYER_PARTS
    assert WarmupSpec.of(FLASH, LIMITS, layer_parts=True, parts=("indexer",)).parts == ("indexer",)
    with pytest.raises(ValueError, match="'parts' must be in"):
        WarmupSpec.of(FLASH, LIMITS, parts=("mhc",))


def test_by_default_rows_are_not_aligned_and_matrices_may_have_both_dtypes() -> None:
    spec = WarmupSpec.of(FLASH, LIMITS)

    assert not spec.aligned_rows
    assert spec.wo_a_dtypes == (torch.bfloat16, torch.float32)
    assert WarmupSpec.of(FLASH, LIMITS, wo_a_dtype=torch.float32).wo_a_dtypes == (torch.float32,)


def test_specs_are_values() -> None:
    assert WarmupSpec.of(FLASH, LIMITS) == WarmupSpec.of(FLASH, LIMITS)
    assert len({WarmupSpec.of(FLASH, LIMITS), WarmupSpec.of(FLASH, LIMITS, aligned=False)}) == 2


def test_a_cache_of_other_dims_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"bounds\.compressed: expected a layout of 448 \+ 64 dims"):
        WarmupSpec.of(FLASH, LIMITS, compressed=KVCacheLayout.rows(64, 64))
    with pytest.raises(ValueError, match="q_dtype"):
        WarmupSpec.of(FLASH, LIMITS, q_dtype=torch.float16)
    with pytest.raises(ValueError, match="wo_a_dtype"):
        WarmupSpec.of(FLASH, LIMITS, wo_a_dtype=torch.float16)
    with pytest.raises(ValueError, match="layers"):
        WarmupSpec(layers=(), limits=LIMITS, swa=KVCacheLayout.rows(), compressed=KVCacheLayout.rows())

"""One truth for what the Gluon kernels serve: every refusal is one of the launchers and of `explain`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from attrs import evolve

from dsv4attn.backends._triton.attention.meta_calls import meta_calls, meta_pages
from dsv4attn.backends._triton.launching.recorded import meta_cache
from dsv4attn.backends.sm90.explain_notes import notes
from dsv4attn.backends.sm90.launch import Sm90Backend, _key_format_and_numbers
from dsv4attn.backends.sm90.served import against
from dsv4attn.core.cache.layout import Arrangement, Fp8Format, KVCacheLayout
from dsv4attn.core.contract.device import DeviceFacts
from dsv4attn.core.contract.problem import CacheFacts, Problem
from dsv4attn.core.model.geometry import LayerGeometry, LayerKind, ModelGeometry, Rope

FLASH = ModelGeometry.preset("flash")
SWA, HCA = (FLASH.layer_of_kind(kind) for kind in (LayerKind.SWA, LayerKind.HCA))
V4, ROWS = KVCacheLayout.fp8_ds_mla(), KVCacheLayout.rows()
CODES, NIBBLES = KVCacheLayout.v41_fp8(), KVCacheLayout.v41_fp4()
NVFP4 = KVCacheLayout.of_record("v4_nvfp4")
BF16 = torch.bfloat16


def turned(layer: LayerGeometry, rope: int) -> LayerGeometry:
    """The layer with so many dims that rotate."""
    return evolve(layer, rope=Rope(rope, 10000.0))


SERVED: dict[str, tuple[LayerGeometry, torch.dtype, tuple[KVCacheLayout, ...]]] = {
    "V4": (SWA, BF16, (V4,)),
    "V4, two caches, 128 heads": (evolve(HCA, num_heads=128), BF16, (V4, V4)),
    "4 bits": (HCA, BF16, (NVFP4, NVFP4)),
    "V4.1": (HCA, BF16, (CODES, NIBBLES)),
    "V4.1 split": (HCA, BF16, (evolve(CODES, arrangement=Arrangement.SPLIT),) * 2),
    "rows": (SWA, BF16, (ROWS,)),
    "rows of another split": (turned(SWA, 128), BF16, (KVCacheLayout.rows(384, 128),)),
}
REFUSED: dict[str, tuple[str, LayerGeometry, torch.dtype, tuple[KVCacheLayout, ...]]] = {
    "fp32": ("q is float32", SWA, torch.float32, (V4,)),
    "heads": ("129 heads, more than 128", evolve(SWA, num_heads=129), BF16, (V4,)),
    "dims": ("keys of 192 + 64 dims", evolve(SWA, head_dim=256), BF16, (KVCacheLayout.rows(192, 64),)),
    "dims of V4's records": ("keys of 384 + 128", turned(SWA, 128), BF16, (KVCacheLayout.fp8_ds_mla(384, 128),)),
    "dialect": ("caches that are not", SWA, BF16, (KVCacheLayout.fp8_ds_mla(fp8_format=Fp8Format.FNUZ),)),
    "rows of fp32": ("caches that are not", SWA, BF16, (KVCacheLayout.rows(dtype=torch.float32),)),
    "two caches of rows": ("caches that are not", HCA, BF16, (ROWS, ROWS)),
    "mixed": ("caches that are not", HCA, BF16, (V4, NVFP4)),
    "the other way round": ("caches that are not", HCA, BF16, (NIBBLES, CODES)),
    "scales within": ("scales elsewhere", SWA, BF16, (evolve(V4, arrangement=Arrangement.INTERLEAVED),)),
    "scales here and there": (
        "scales elsewhere",
        HCA,
        BF16,
        (evolve(CODES, arrangement=Arrangement.SPLIT), evolve(NIBBLES, arrangement=Arrangement.INTERLEAVED)),
    ),
}


def served_by_launchers(layer: LayerGeometry, dtype: torch.dtype, layouts: Sequence[KVCacheLayout]) -> bool:
    """Whether a call on aligned tensors without memory gets a Gluon kernel."""
    keys = meta_pages([meta_cache(layout) for layout in layouts])
    (call,) = meta_calls(layer, keys, dtype, sinks=(True,), lses=(False,))
    return Sm90Backend()._may_serve(layer) and _key_format_and_numbers(call) is not None


def problem_of(layer: LayerGeometry, dtype: torch.dtype, layouts: Sequence[KVCacheLayout]) -> Problem:
    caches: list[Any] = [CacheFacts.of(layout, 64) for layout in layouts]
    q_dtype = str(dtype).removeprefix("torch.")
    window, compressed, *_ = *caches, None
    topk = 0 if layer.kind is LayerKind.SWA else 128
    return Problem("decode", layer, window, compressed, topk=topk, q_dtype=q_dtype)


@pytest.mark.parametrize("name", SERVED)
def test_what_is_served_is_served_by_launchers_and_in_explain(name: str) -> None:
    problem = problem_of(*SERVED[name])

    assert served_by_launchers(*SERVED[name])
    assert against(problem) == []
    assert notes(DeviceFacts.named("sm_90"), problem)[0].startswith("the Gluon kernel")


@pytest.mark.parametrize("name", REFUSED)
def test_every_refusal_is_one_of_launchers_and_of_explain(name: str) -> None:
    said, layer, dtype, layouts = REFUSED[name]
    problem = problem_of(layer, dtype, layouts)
    (reason,) = against(problem)

    assert said in reason
    assert not served_by_launchers(layer, dtype, layouts)
    assert notes(DeviceFacts.named("sm_90"), problem)[0] == f"the shared Triton kernel: {reason}"

"""What the backend's kernels need on devices that are not here, as JSON.

Run as a program: a process that interprets kernels cannot compile them. Arguments: a target, then numbers that replace
those of its row, as in `keys=128`, then forms; all of them if none is named.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from attrs import asdict, evolve

from dsv4attn.backends._triton import projection
from dsv4attn.backends._triton.attention import launch as attention_launch
from dsv4attn.backends._triton.attention.meta_calls import meta_calls, meta_gathered, meta_pages
from dsv4attn.backends._triton.cache import fill
from dsv4attn.backends._triton.compiling.aot import Resources, cross_compile, threads
from dsv4attn.backends._triton.compiling.targets import TARGETS
from dsv4attn.backends._triton.compiling.variant import Variant
from dsv4attn.backends._triton.index_ops import ragged
from dsv4attn.backends._triton.launching.recorded import meta_cache
from dsv4attn.backends._triton.tuning import Tuning
from dsv4attn.backends.rocm.tuning import TUNING
from dsv4attn.core.cache.layout import Fp8Format, KVCacheLayout
from dsv4attn.core.cache.selected_keys import GatheredKeys, PagedKeys
from dsv4attn.core.contract.backend import Phase
from dsv4attn.core.model.geometry import LayerKind, ModelGeometry

NOPE, ROPE = 448, 64
OCP = meta_cache(KVCacheLayout.fp8_ds_mla(NOPE, ROPE))
FNUZ = meta_cache(KVCacheLayout.fp8_ds_mla(NOPE, ROPE, fp8_format=Fp8Format.FNUZ))
GATHERED = KVCacheLayout.rows(NOPE, ROPE, dtype=torch.bfloat16)
LAYER = ModelGeometry.preset("flash").layer_of_kind(LayerKind.SWA)
SEGMENTS: dict[str, tuple[Phase, Sequence[PagedKeys] | GatheredKeys]] = {
    "decode window": (Phase.DECODE, meta_pages([OCP], ragged=True)),
    "decode both": (Phase.DECODE, meta_pages([OCP, OCP], ragged=True)),
    # a window that another library wrote in the device's own dialect, next to what Triton wrote
    "decode mixed": (Phase.DECODE, meta_pages([FNUZ, OCP], ragged=True)),
    "prefill gathered": (Phase.PREFILL, meta_gathered(GATHERED, ragged=True)),
}
HEADS = (64, 128, 16, 8)


def forms(row: Tuning) -> Iterator[tuple[str, Variant]]:
    """Names and variants of all kernels here: "decode mixed, 64 heads, split", "reduce", "pack_kernel"."""
    for heads in HEADS:
        layer = evolve(LAYER, num_heads=heads)
        for name, (phase, keys) in SEGMENTS.items():
            calls = meta_calls(layer, keys, torch.bfloat16, sinks=[True], lses=[True])
            for variant in attention_launch.variants(calls, row.of(phase)):
                if variant.name == "attention":
                    split = ", split" if dict(variant.constants)["SPLIT"] else ""
                    yield f"{name}, {heads} heads{split}", variant
                elif (heads, name) == (HEADS[0], "decode both"):
                    yield variant.name, variant
    for variant in ragged.variants():
        yield variant.name, variant
    for variant in fill.variants(KVCacheLayout.fp8_ds_mla(), KVCacheLayout.fp8_ds_mla(), ragged=True):
        if variant.name == "fill_kernel":
            yield variant.name, variant
    for variant in projection.variants(64, NOPE, ROPE, 8, 1024, torch.bfloat16, torch.bfloat16):
        yield f"{variant.name}, {dict(variant.constants)['BLOCK_M']} tokens", variant


def needed(variant: Variant, target: str, *, far: bool) -> dict[str, Any]:
    """What one form needs, and the codes of the limits that it breaks."""
    device = TARGETS[target]
    resources = Resources.of(cross_compile(variant, device, far=far), device)
    return {**asdict(resources), "broken": [str(reason) for reason in resources.reasons(device)]}


def main(target: str, *words: str) -> dict[str, Any]:
    """By form; those for tensors beyond 2 GB are asked for by ", far" after the name."""
    pairs = [word.partition("=") for word in words]
    numbers: dict[str, Any] = {name: int(number) for name, _, number in pairs if number}
    names = [word for word in words if "=" not in word]
    variants = dict(forms(evolve(TUNING[target], **numbers)))
    names = names or [name + far for name in variants for far in ("", ", far")]
    with ThreadPoolExecutor(threads()) as executor:
        far = [name.endswith(", far") for name in names]
        results = executor.map(lambda n, f: needed(variants[n.removesuffix(", far")], target, far=f), names, far)
        return dict(zip(names, results, strict=True))


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))

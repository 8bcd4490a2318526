"""What the backend's kernels need on devices that are not here, as JSON.

Run as a program: a process that interprets kernels cannot compile them. Arguments: a target, then numbers that replace
those of its row, as in `keys=128`, then forms; all of them if none is named.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from attrs import asdict, evolve

from dsv4attn.backends._triton import projection
from dsv4attn.backends._triton.attention import launch as attention_launch
from dsv4attn.backends._triton.attention.launch import Segment
from dsv4attn.backends._triton.cache import fill
from dsv4attn.backends._triton.compiling.aot import Resources, cross_compile, threads
from dsv4attn.backends._triton.compiling.targets import TARGETS
from dsv4attn.backends._triton.compiling.variant import Variant
from dsv4attn.backends._triton.index_ops import ragged
from dsv4attn.backends._triton.tuning import Tuning
from dsv4attn.backends.rocm.tuning import TUNING
from dsv4attn.core.cache.layout import Fp8Format, KVCacheLayout
from dsv4attn.core.contract.backend import Phase

NOPE, ROPE = 448, 64
OCP = Segment.of(KVCacheLayout.fp8_ds_mla(NOPE, ROPE), aligned=True)
FNUZ = Segment.of(KVCacheLayout.fp8_ds_mla(NOPE, ROPE, fp8_format=Fp8Format.FNUZ), aligned=True)
GATHERED = Segment.of(KVCacheLayout.rows(NOPE, ROPE, dtype=torch.bfloat16), aligned=True)
SEGMENTS = {
    "decode window": (Phase.DECODE, (OCP,)),
    "decode both": (Phase.DECODE, (OCP, OCP)),
    # a window that another library wrote in the device's own dialect, next to what Triton wrote
    "decode mixed": (Phase.DECODE, (FNUZ, OCP)),
    "prefill gathered": (Phase.PREFILL, (GATHERED,)),
}
HEADS = (64, 128, 16, 8)


def forms(row: Tuning) -> Iterator[tuple[str, Variant]]:
    """Names and variants of all kernels here: "decode mixed, 64 heads, split", "reduce", "pack_kernel"."""
    for heads in HEADS:
        for name, (phase, segments) in SEGMENTS.items():
            shape = attention_launch.Shape(heads, NOPE, ROPE, segments, torch.bfloat16, 8, ragged=True)
            for variant in attention_launch.variants(shape, row.of(phase), sinks=[True], lses=[True]):
                if variant.name == "attention":
                    split = ", split" if dict(variant.constants)["SPLIT"] else ""
                    yield f"{name}, {heads} heads{split}", variant
                elif (heads, name) == (HEADS[0], "decode both"):
                    yield variant.name, variant
    for variant in ragged.variants():
        yield variant.name, variant
    for variant in fill.variants(KVCacheLayout.fp8_ds_mla(), KVCacheLayout.fp8_ds_mla(), ragged=True):
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

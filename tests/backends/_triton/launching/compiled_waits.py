"""Kernels of a step, compiled for sm_90 and sm_80: whether each waits for the one before it, and lets the next begin.

A program of its own, since a process that interprets kernels cannot compile them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import islice

import torch
from attrs import evolve

from dsv4attn.backends._triton.attention import launch as attention_launch
from dsv4attn.backends._triton.attention.meta_calls import meta_calls, meta_pages
from dsv4attn.backends._triton.cache import insert
from dsv4attn.backends._triton.compiling.aot import cross_compile
from dsv4attn.backends._triton.compiling.targets import TARGETS
from dsv4attn.backends._triton.compiling.variant import Variant
from dsv4attn.backends._triton.index_ops import dense
from dsv4attn.backends._triton.launching.recorded import meta_cache
from dsv4attn.backends._triton.layer.compressor import latents
from dsv4attn.backends._triton.layer.compressor import launch as compress
from dsv4attn.backends._triton.layer.hyper_connections import launch as hyper_connections
from dsv4attn.backends._triton.layer.indexer import query
from dsv4attn.backends._triton.layer.projections import norms, output
from dsv4attn.backends._triton.tuning import HOPPER
from dsv4attn.core.cache.layout import KVCacheLayout
from dsv4attn.core.model.geometry import LayerKind, ModelGeometry

WAIT = "griddepcontrol.wait;"
ACCESS = re.compile(r"(?:ld|st|red|atom|cp\.async\S*)\.(?:\w+\.)*global")
BRANCH = re.compile(r"\bbra\b")
"""One before a wait may go around it."""
BF16 = torch.bfloat16


def forms(arch: str) -> Iterator[Variant]:
    """A few forms of each kernel between the projections of q and of the output."""
    record = KVCacheLayout.fp8_ds_mla()
    yield next(form for form in dense.variants(arch=arch) if form.name == "translate_kernel")
    yield from islice(insert.variants(record, 64, BF16, arch=arch), 3)
    for ratio in (4, 33):
        yield from compress.variants(record, ratio, 64, overlap=ratio == 4, arch=arch)
    keys = KVCacheLayout.index_fp8()
    yield from query.variants(keys, 32, 64, BF16, arch=arch)
    yield from norms.variants(1536, 512, BF16, (BF16,), arch=arch)[:1]
    yield from latents.latent_variants(128, 2, norms=(BF16,), arch=arch)
    yield from latents.variants(keys, 2, 64, BF16, (BF16,), arch=arch)
    projections = [*output.variants(64, 512, 64, 8, 1024, BF16, arch=arch)]
    yield from projections[:2]
    layer = evolve(ModelGeometry.preset("flash").layer_of_kind(LayerKind.SWA), num_heads=16)
    calls = meta_calls(layer, meta_pages([meta_cache(record)]), BF16, sinks=(False,), lses=(False,))
    streams = hyper_connections.variants(4, 4096, BF16, BF16, arch=arch)
    # the first forms are those of few tokens; of the first kernel, of streams as they are and of new ones
    for name, x in (("products_kernel", "none"), ("products_kernel", "*bf16"), ("mix_kernel", None)):
        yield next(form for form in streams if form.name == name and dict(form.types).get("X") == x)
    tuning = HOPPER.on(arch)
    yield from attention_launch.variants(calls, tuning, arch=arch)


def waits_of(form: Variant, arch: str) -> dict[str, object]:
    """What is said of a form."""
    kernel = cross_compile(form, TARGETS[arch])
    body = kernel.asm["ptx"].partition(".entry")[2]
    head, waits, rest = body.partition(WAIT)
    return {
        "waits": bool(waits),
        "lets": (rest if waits else body).count("griddepcontrol.launch_dependents;"),
        "early": len(ACCESS.findall(head) + BRANCH.findall(head)) if waits else None,
        "accesses": len(ACCESS.findall(body)),
        "option": bool(kernel.metadata.launch_pdl),
    }


if __name__ == "__main__":
    # where no kernel waits, one form of each kernel says so
    cases = {"sm_90": [*forms("sm_90")], "sm_80": {form.name: form for form in forms("sm_80")}.values()}
    print(json.dumps({f"{a} {i} {f.name}": waits_of(f, a) for a, those in cases.items() for i, f in enumerate(those)}))

"""Hopper's own kernels of the output projection in fp8, compiled: limits that their forms break, as JSON.

With the word "planted", of a form whose roles that multiply have too few registers. A program of its own, since a
process that interprets kernels cannot compile them.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator

from attrs import evolve

from dsv4attn.backends._triton.compiling.aot import Resources, cross_compile
from dsv4attn.backends._triton.compiling.targets import TARGETS
from dsv4attn.backends._triton.compiling.variant import Variant
from dsv4attn.backends.sm90.launch import Sm90Backend
from dsv4attn.backends.sm90.output import launch as output
from dsv4attn.core.contract.device import DeviceFacts
from dsv4attn.tools.cli.common import geometry_of
from dsv4attn.tools.cli.compile import bounds_of

OWN = {"project_few_kernel", "project_many_kernel"}
WAITS_THEN_LETS = re.compile(r"griddepcontrol\.wait;(?:(?!bra|BB\d)[^{}])*griddepcontrol\.launch_dependents;")
"""Without a branch, or the begin of a block, between them."""
COPIES_THEN_WAITS = re.compile(r"cp\.async\S*shared(?:(?!bra|BB\d)[\s\S])*griddepcontrol\.wait;")
SIZE = {"project_few_kernel": "TOKENS", "project_many_kernel": "BLOCK_M"}


def foreseen(model: str) -> Iterator[Variant]:
    """The kernels' own forms among those that are compiled before the first step, plain and deterministic."""
    bounds, facts = bounds_of(geometry_of(model), "e4m3fn"), DeviceFacts.named("sm_90")
    for deterministic in (False, True):
        backend = Sm90Backend(projection="fp8", deterministic=deterministic)
        yield from (form for form in backend.kernel_variants(bounds, facts) if form.name in OWN)


def narrow() -> Iterator[Variant]:
    """Forms for few columns, an odd number of steps, and as many columns as there may be."""
    widths = {128: output.FEW, 896: output.FEW, 1152: output.MANY[1:], output.WIDEST: output.FEW}
    for width, forms in widths.items():
        for form in forms:
            yield output.variants_of(form, 1, 128, width)[0]


def planted() -> Iterator[Variant]:
    """A form whose roles that multiply have too few registers."""
    yield output.variants_of(evolve(output.MANY[1], registers=200), 8, 1024, 4096)[0]


def early_releases(text: str) -> int:
    """Arrivals at a barrier before a wait for products, or after one, that do not wait for the other warps' products.

    `release` of the kernel for few tokens has no barrier of its own: Triton 3.6 and 3.9 put one before each arrival.
    """
    head, *rest = text.split("wgmma.wait_group")
    parts = [part.partition("mbarrier.arrive.shared") for part in rest]
    after = sum(bool(arrival) and "bar.sync" not in before for before, arrival, _ in parts)
    return after + head.count("mbarrier.arrive.shared")


def read(form: Variant) -> dict[str, object]:
    """What a form is, breaks and does."""
    kernel, constants, target = cross_compile(form, TARGETS["sm_90"]), dict(form.constants), TARGETS["sm_90"]
    text = kernel.asm["ptx"]
    return {
        "name": form.name,
        "tokens": constants[SIZE[form.name]],
        "width": constants["K"],
        "w_scales": dict(form.types)["W_SCALES"],
        "reasons": [reason.code for reason in Resources.of(kernel, target).reasons(target)],
        "waits": text.count("griddepcontrol.wait;"),
        "lets": text.count("griddepcontrol.launch_dependents;"),
        "lets_before_it_waits": not re.search(WAITS_THEN_LETS, text),
        "copies_before_it_waits": bool(re.search(COPIES_THEN_WAITS, text)),
        "early_releases": early_releases(text),
        # a planted bug
        "without_barriers": early_releases(text.replace("bar.sync", "")),
    }


if __name__ == "__main__":
    every = (*foreseen("flash"), *foreseen("pro"), *narrow())
    print(json.dumps([read(form) for form in (planted() if "planted" in sys.argv else dict.fromkeys(every))]))

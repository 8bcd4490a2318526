"""Hopper's own kernel of hyper-connections, compiled: limits that its variants break, as JSON.

And the fullest variant of the shared kernels that only deterministic calls have. A program of its own, since a process
that interprets kernels cannot compile them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from dsv4attn.backends._triton.compiling.aot import compile_all
from dsv4attn.backends._triton.compiling.targets import TARGETS
from dsv4attn.backends._triton.compiling.variant import Variant
from dsv4attn.backends.sm90.launch import Sm90Backend
from dsv4attn.core.contract.device import DeviceFacts
from dsv4attn.tools.cli.common import geometry_of
from dsv4attn.tools.cli.compile import bounds_of

OWN, PRODUCTS = "post_products_tiles", "products_kernel"


def forms() -> Iterator[Variant]:
    """The kernel's own, of plain and of deterministic calls; and the products of all mixes, of deterministic calls."""
    bounds, facts = bounds_of(geometry_of("flash"), "e4m3fn"), DeviceFacts.named("sm_90")
    for deterministic in (False, True):
        for form in dict.fromkeys(Sm90Backend(deterministic=deterministic).kernel_variants(bounds, facts)):
            of_all = form.name == PRODUCTS and dict(form.types)["X"] == "none" and dict(form.constants)["MIXES"] == 24
            if form.name == OWN or (deterministic and of_all):
                yield form


if __name__ == "__main__":
    outcomes = compile_all(forms(), TARGETS["sm_90"])
    print(json.dumps([[outcome.variant.name, *map(str, outcome.reasons)] for outcome in outcomes]))

"""What is wrong with the largest tiles of the output projection in fp8 on targets, as JSON. Run as a program.

A process that interprets kernels cannot compile them.
"""

from __future__ import annotations

import json
import sys

import torch

from dsv4attn.backends._triton.compiling.aot import compile_near
from dsv4attn.backends._triton.compiling.targets import Target
from dsv4attn.backends._triton.layer import output
from dsv4attn.core.layout import Fp8Format


def fullest(arch: str) -> dict[str, object]:
    """Reasons against the form of the largest tile, by fp8 dialect."""
    found: dict[str, object] = {}
    forms = [*output.variants(64, 512, 64, 8, 1024, torch.bfloat16, arch=arch)]
    for fp8_format in Fp8Format:
        large, fnuz = output.tiles_for(fp8_format, arch)[2], fp8_format is Fp8Format.FNUZ
        wanted = {"BLOCK_M": large.tokens, "BLOCK_N": large.ranks, "FNUZ": fnuz}
        (variant, *_) = [v for v in forms if wanted.items() <= dict(v.constants).items()]
        outcome = compile_near(variant, Target.named(arch))
        matrix = outcome.resources.matrix if outcome.resources else 0
        found[fp8_format.value] = [*map(str, outcome.reasons), *([] if matrix else ["no matrix instructions"])]
    return found


if __name__ == "__main__":
    print(json.dumps({arch: fullest(arch) for arch in sys.argv[1:]}))

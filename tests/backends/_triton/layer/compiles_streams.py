"""What is wrong with the tiles of the hyper-connections for many tokens on targets, as JSON. Run as a program.

A process that interprets kernels cannot compile them.
"""

from __future__ import annotations

import json
import sys

import torch

from dsv4attn.backends._triton.compiling.aot import compile_near
from dsv4attn.backends._triton.compiling.targets import Target
from dsv4attn.backends._triton.layer import hyper_connections as hc
from dsv4attn.backends._triton.layer.hyper_connections_tuning import FEW, tile_of, tuning_for


def largest(arch: str) -> list[str]:
    """Reasons against the forms of the first launch for many tokens, and against the second with a norm."""
    tuning, found = tuning_for(arch), []
    for variant in dict.fromkeys(hc.variants(4, 7168, torch.bfloat16, torch.bfloat16, arch=arch)):
        constants = dict(variant.constants)
        fused = "OUT_ALIGNED" in constants
        tile = tile_of(tuning, FEW + 1, 4, torch.bfloat16, 16, fused=fused)
        wanted = {"BLOCK_M": tile.tokens, "BLOCK_K": tile.columns, "MIXES": 24}
        if wanted.items() <= constants.items() or dict(variant.types).get("NORM") == "*bf16":
            outcome = compile_near(variant, Target.named(arch))
            found += [f"{variant.name}: {reason}" for reason in outcome.reasons]
    return found


if __name__ == "__main__":
    print(json.dumps({arch: largest(arch) for arch in sys.argv[1:]}))

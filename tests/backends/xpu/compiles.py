"""Limits that the backend's own kernels, and its fill of a chunk, break on devices that are not here, as JSON.

Run as a program: a process that interprets kernels cannot compile them.
"""

from __future__ import annotations

import json
import sys

import torch

from dsv4attn.backends._triton.cache import fill
from dsv4attn.backends._triton.compiling.aot import compile_all
from dsv4attn.backends._triton.compiling.targets import TARGETS
from dsv4attn.backends.xpu import launch, leading_values
from dsv4attn.core.cache.layout import KVCacheLayout


def outcomes(target: str) -> list[list[str]]:
    """For each kernel, the limits that it breaks."""
    *_, gathering = launch.variants([KVCacheLayout.fp8_ds_mla()] * 2)
    *_, attending = leading_values.variants(128, 512, 576, torch.bfloat16)
    *_, filling = fill.variants(KVCacheLayout.v41_fp8(), KVCacheLayout.v41_fp4(), ragged=False)
    compiled = compile_all([gathering, attending, filling], TARGETS[target])
    return [[outcome.variant.name, *map(str, outcome.reasons)] for outcome in compiled]


if __name__ == "__main__":
    print(json.dumps({target: outcomes(target) for target in sys.argv[1:]}))

"""Layers on Triton's kernels over two ranks, each in a process of its own with gloo between them, against one rank."""

from __future__ import annotations

import os
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from dsv4attn.backends._triton.compiling.variant import Variant
from dsv4attn.backends._triton.interpreted import INTERPRETED
from dsv4attn.backends._triton.launching.runtime import observed
from dsv4attn.backends.triton.launch import GenericBackend
from dsv4attn.core.context_parallel.context import ContextParallel
from tests.fast_interpreter.patches import patch_interpreter
from tests.harness import FP8, LayerStack
from tests.ranks import gloo_group, run_ranks

RANKS = 2


@pytest.mark.matrix
@pytest.mark.skipif(not INTERPRETED, reason="both ranks are on the CPU, where kernels run interpreted alone")
def test_two_ranks_of_kernels_are_one(tmp_path: Path) -> None:
    run_ranks(serve, str(tmp_path), size=RANKS)

    assert [Path(tmp_path, str(rank)).read_text(encoding="utf-8") for rank in range(RANKS)] == ["", ""]


def serve(rank: int, folder: str) -> None:
    """One rank; what failed is written to its file. A process of its own has not read `conftest.py`."""
    patch_interpreter()
    torch.set_num_threads(1)
    with gloo_group(rank, RANKS, folder) as group:
        said = ""
        try:
            compare(group)
        except Exception:  # noqa: BLE001 - reported by the parent
            said = traceback.format_exc()
        Path(folder, str(rank)).write_text(said, encoding="utf-8")
        os._exit(0)  # a group with a rank that has failed cannot be destroyed in order


def name_of(variant: Variant) -> str:
    """The name of a kernel, and whether it is for the entries of one rank."""
    return f"{variant.name} of one rank" if dict(variant.constants).get("OWNED") else variant.name


def compare(group: distributed.ProcessGroup) -> None:
    """A prompt in two chunks, longer than the top-k, and a decode: all layers, and launches of the decode.

    In addition to those of one rank there are a merge, and on c4a layers the choice among candidates.
    """
    context = ContextParallel(group)
    options: dict[str, Any] = {"context_parallel": context, "layer_options": {"context_parallel": context}}
    single = LayerStack(GenericBackend(), FP8, compressed_block_tokens=64)
    many = LayerStack(GenericBackend(), FP8, compressed_block_tokens=64, **options)
    hidden = single.hidden(0, 41)
    sequences = single.manager.new(), many.manager.new()
    for first, count in ((0, 30), (30, 10), (40, 1)):
        with observed() as alone_seen:
            alone = single.step([(sequences[0], count)], hidden[first : first + count])
        with observed() as seen:
            mine = many.step([(sequences[1], count)], hidden[first : first + count])
        for got, expected in zip(mine, alone, strict=True):
            assert float((got - expected).norm()) <= 4e-3 * float(expected.norm()), (first, count)
    launches, alone_launches = (Counter(map(name_of, variants)) for variants in (seen, alone_seen))
    kinds = Counter(layer.layer.kind.value for layer in many.layers)
    entries = kinds["c4a"] + kinds["c128a"]
    further_launches = {
        "compressed_kernel of one rank": entries,
        "merge_parts_kernel": entries,
        "keep_kernel": kinds["c4a"],
    }
    assert (launches - alone_launches, alone_launches - launches) == (further_launches, {"compressed_kernel": entries})

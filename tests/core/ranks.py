"""Ranks of a tensor-parallel output projection, each in a process of its own, with gloo between them."""

from __future__ import annotations

import datetime as dt
import os
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor, distributed

from dsv4attn.backends.reference.launch import ReferenceBackend
from dsv4attn.core.attention.projection import output_projection
from tests.core.projections import GROUPS, LAYER, Given, share

__all__ = ["project", "project_share"]


def project(rank: int, world: int, folder: str) -> None:
    """Project the heads of one rank, sum over all ranks, and write the result to a file of the rank."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store: dict[str, Any] = {"init_method": f"file://{folder}/store", "rank": rank, "world_size": world}
    distributed.init_process_group("gloo", timeout=dt.timedelta(seconds=60), **store)
    try:
        for dtype in (torch.float32, torch.bfloat16):
            y = project_share(Given.draw(dtype), rank, world, distributed.group.WORLD)
            torch.save(y, Path(folder, f"{dtype}-{rank}.pt"))
    finally:
        distributed.destroy_process_group()


def project_share(given: Given, rank: int, world: int, group: Any = None) -> Tensor:
    """The output projection of one rank's heads, groups and columns, summed over a process group if there is one."""
    part, layer = share(given, rank, world), attrs.evolve(LAYER, num_heads=LAYER.num_heads // world)
    weights = part.wo_a, part.wo_b, GROUPS // world
    return output_projection(
        ReferenceBackend(), part.o, part.positions, part.table, *weights, layer=layer, process_group=group
    )

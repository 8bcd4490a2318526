"""Arguments of an output projection, its float64 answer, the share of one rank, and ranks as processes with gloo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch
from torch import Tensor

from dsv4attn.backends.reference.launch import ReferenceBackend
from dsv4attn.core.attention.projection import output_projection
from dsv4attn.core.attention.rank_sum import sum_over_ranks
from dsv4attn.core.model.geometry import LayerGeometry
from dsv4attn.testing.kit.tolerances import F64
from dsv4attn.testing.oracle import attention as oracle
from tests.harness import SMALL, SWA
from tests.ranks import gloo_group


def project(rank: int, world: int, folder: str) -> None:
    """Project the heads of one rank, sum over all ranks, and write the result to a file of the rank."""
    with gloo_group(rank, world, folder) as group:
        for dtype in (torch.float32, torch.bfloat16):
            y = project_share(ProjectionArgs.draw(dtype), rank, world, group)
            torch.save(y, Path(folder, f"{dtype}-{rank}.pt"))


def add_rows(rank: int, world: int, folder: str) -> None:
    """Add random rows over the ranks, some rows at a time and all at once, and write both to a file of the rank."""
    results = {}
    with gloo_group(rank, world, folder) as group:
        for dtype in (torch.float32, torch.bfloat16):
            # every second row of a wider tensor; gradients are not recorded
            rows = rows_of_rank(rank).to(dtype).repeat_interleave(2, 0)[::2].requires_grad_(dtype == torch.float32)
            parts = [sum_over_ranks(part, group) for part in rows.split([0, 1, 3, 60])]
            results[dtype] = sum_over_ranks(rows, group), torch.cat(parts)
    torch.save(results, Path(folder, f"sum-{rank}.pt"))


def rows_of_rank(rank: int) -> Tensor:
    """[64, 33] fp32 of many magnitudes."""
    g = torch.Generator().manual_seed(rank)
    return torch.randn(64, 33, generator=g) * torch.exp2(torch.randint(-9, 9, (64, 33), generator=g).float())


def project_share(args: ProjectionArgs, rank: int, world: int, group: Any = None) -> Tensor:
    """The output projection of one rank's heads, groups and columns, summed over a process group if there is one."""
    part, layer = share(args, rank, world), attrs.evolve(LAYER, num_heads=LAYER.num_heads // world)
    weights = part.wo_a, part.wo_b, GROUPS // world
    return output_projection(
        ReferenceBackend(), part.o, part.positions, part.table, *weights, layer=layer, process_group=group
    )


HEADS, DIM, ROPE, GROUPS, RANK, HIDDEN, POSITIONS, TOKENS = 8, 80, 8, 2, 70, 50, 23, 6
LAYER: LayerGeometry = attrs.evolve(SMALL, num_heads=HEADS, head_dim=DIM, rope_dim=ROPE).layer_of_kind(SWA)
WO_A, WO_B = (GROUPS * RANK, HEADS // GROUPS * DIM), (HIDDEN, GROUPS * RANK)
"""Shapes with shorter blocks at the end of either dim."""


@attrs.frozen(eq=False)
class ProjectionArgs:
    """Arguments of `output_projection`, on the CPU. Weights are tensors, or any other `weights.Weight`."""

    o: Tensor
    positions: Tensor
    table: Tensor
    wo_a: Any
    wo_b: Any

    @classmethod
    def draw(cls, dtype: torch.dtype, seed: int = 0, tokens: int = TOKENS) -> ProjectionArgs:
        """Random ones, all in this dtype; the table is of no model."""
        g = torch.Generator().manual_seed(seed)
        o, table = torch.randn(tokens, HEADS, DIM, generator=g), torch.randn(POSITIONS, ROPE, generator=g)
        table[1] /= 100  # too short for the angles that a layer compares with its own
        positions = torch.randint(0, POSITIONS, (tokens,), generator=g)
        wo_a, wo_b = torch.randn(WO_A, generator=g) / 16, torch.randn(WO_B, generator=g) / 16
        return cls(o.to(dtype), positions, table, wo_a.to(dtype), wo_b.to(dtype))

    def answer(self, wo_a: F64 | None = None, wo_b: F64 | None = None) -> F64:
        """[T, hidden] float64. wo_a, wo_b: what the weights are worth, if they are not plain tensors."""
        wo_a = self.wo_a.double().numpy() if wo_a is None else wo_a
        wo_b = self.wo_b.double().numpy() if wo_b is None else wo_b
        matrices = wo_a.reshape(GROUPS, RANK, -1)
        rows = []
        for row, position in zip(self.o.double().numpy(), self.positions.tolist(), strict=True):
            cos, sin = np.split(self.table[position].double().numpy(), 2)
            rows.append(oracle.inverse_rope_project(row, cos, sin, ROPE, matrices, wo_b))
        return np.stack(rows)


def share(args: ProjectionArgs, rank: int, world: int) -> ProjectionArgs:
    """The heads, groups and columns of one rank, all of them tensors."""
    heads, ranks = HEADS // world, GROUPS * RANK // world
    part, columns = slice(rank * heads, (rank + 1) * heads), slice(rank * ranks, (rank + 1) * ranks)
    return attrs.evolve(args, o=args.o[:, part], wo_a=args.wo_a[columns], wo_b=args.wo_b[:, columns])

"""Cases of the output projection: grouped matrices in every format, then wo_b, of one device or of several."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from dsv4attn.testing.case import Area, Case, CaseInput, Check
from dsv4attn.testing.check_insert import FAR_POSITIONS
from dsv4attn.testing.check_projection import outputs, projects, projects_without_positions_of_padding
from dsv4attn.testing.factories import layout, rows
from dsv4attn.testing.random_step import tiny_geometry
from dsv4attn.testing.strided import each_strided

__all__ = ["projection_cases"]

FP8 = {"fp32": (2, 80), "e8m0": (1, 129), "bytes": (8, 24)}
"""Groups and ranks by format of the scales: the last block of rows has 32, 1 and 64 of 128."""


def projection_cases() -> Iterator[Case]:
    """All cases of the output projection."""
    for name, dtype, cache in (("bf16", torch.bfloat16, "ocp"), ("fp32", torch.float32, "fp32")):
        says = f"{name} outputs are turned back at the query's position and projected group by group"
        for groups in (1, 2, 8):
            yield _case(f"project-{groups}-{name}", "P1 P2", says, rows(cache, dtype=dtype, groups=groups, count=9))
    says = "1,031 outputs are turned back and projected in one step"
    yield _case("project-1031", "P1 P2 F7", says, rows(count=1031, groups=8))
    says = "rows of o, of the table of angles, or of the weights lie apart, and the projection is the same"
    check = each_strided("o cos_sin_cache wo_a all", projects)
    yield _case("apart-project", "A7 P1", says, rows(count=9), check)
    says = "outputs are turned back at positions beyond 65,536"
    yield _case("project-positions", "P1 P2", says, rows(count=9, table_rows=FAR_POSITIONS))
    says = "no position of padding is looked up, and its rows stay zero"
    inputs = rows(count=17, groups=2)
    yield _case("no-token-project", "B5", says, inputs, projects_without_positions_of_padding)
    says = "bf16 outputs are projected by fp32 matrices"
    yield _case("project-mixed", "P1 P2", says, rows(count=9, weight_dtype=torch.float32))
    yield from _fp8()
    yield from _outputs()


def _fp8() -> Iterator[Case]:
    """Block-scaled fp8 matrices, which core converts."""
    for scale, (groups, rank) in FP8.items():
        for dialect in ("ocp", "fnuz"):
            says = (
                f"matrices in {dialect} fp8 with {scale} scales of blocks, the last one short, are what they stand for"
            )
            inputs = rows(count=5, groups=groups, rank=rank, scale=scale, fnuz=dialect == "fnuz")
            yield _case(f"project-fp8-{dialect}-{scale}", "P1 P2 P3", says, inputs)
    says = "matrices in fp8 with exponents of blocks of 32 x 32, the last ones short, are what they stand for"
    inputs = rows(count=5, groups=2, rank=72, scale="bytes", block=32)
    yield _case("project-fp8-blocks-32", "P1 P2 P3", says, inputs)
    says = "fp32 outputs are projected by fp8 matrices"
    inputs = rows("fp32", dtype=torch.float32, count=5, rank=80, scale="fp32")
    yield _case("project-fp8-mixed", "P1 P2 P3", says, inputs)
    says = "rows of an fp8 matrix lie apart, and the projection is the same"
    yield _case("apart-project-fp8", "A7 P3", says, rows(count=5, rank=80, scale="bytes", strided="wo_a"))
    says = "fp8 matrices whose last blocks are short in both directions are what they stand for"
    odd = tiny_geometry(num_heads=6, head_dim=40, rope_dim=6)
    inputs = rows(geometry=odd, layout=layout("ocp", odd), count=5, groups=1, rank=130, scale="fp32")
    yield _case("dims-project-fp8", "F5 P3", says, inputs)


def _outputs() -> Iterator[Case]:
    """The whole projection, through wo_b."""
    for name, dtype, cache in (("bf16", torch.bfloat16, "ocp"), ("fp32", torch.float32, "fp32")):
        says = f"{name} outputs are turned back, projected group by group, and then by wo_b"
        yield _case(f"output-{name}", "P4", says, rows(cache, dtype=dtype, count=9, rank=40, hidden=96), outputs)
    says = "bf16 outputs are projected by fp32 matrices, and by an fp32 wo_b"
    yield _case("output-mixed", "P4", says, rows(count=9, weight_dtype=torch.float32, hidden=96), outputs)
    says = "outputs are projected by fp8 matrices, and by an fp8 wo_b whose last blocks are short"
    yield _case("output-fp8", "P4", says, rows(count=5, rank=80, hidden=140, scale="e8m0"), outputs)
    says = "devices that each have some of the groups add up to the whole projection"
    yield _case("output-ranks", "P4", says, rows(count=9, groups=4, rank=40, hidden=96, ranks=2), outputs)


def _case(name: str, clauses: str, says: str, inputs: CaseInput, check: Check = projects) -> Case:
    return Case(name=name, area=Area.CACHE, clauses=clauses, says=says, inputs=inputs, check=check)

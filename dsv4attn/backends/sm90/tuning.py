"""Numbers of the Hopper room: of its own kernel, and of the shared one."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import frozen

from dsv4attn.backends._triton.tuning import DEFAULT, HOPPER, INTERPRETER, Tuning

__all__ = ["PAGED", "ROWED", "ROWS", "Roles"]


@frozen
class Roles:
    """Numbers of the Gluon kernel for one kind of keys.

    values, produce: registers of a thread in these roles, of four and of eight warps; `scores`, of four, has what they
    leave of 65,536. least: tiles of the shortest chunk. few: up to so many heads of all tokens, a program adds up one
    head, whose parts are many, and loads `parts` together; beyond them it adds up `heads` heads, two parts at a time.
    warps: of either.
    """

    values: int = 224
    produce: int = 64
    least: int = 1
    few: int = 2048
    parts: int = 8
    heads: int = 4
    warps: int = 4

    measured: str = "not measured"

    @property
    def scores(self) -> int:
        """Registers of a thread of the third role."""
        return (65536 // 32 - 4 * self.values - 8 * self.produce) // 4 // 8 * 8

    @property
    def adding(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Heads of a program that adds up, and parts that it loads together: where heads are few, and else."""
        return (1, self.parts), (self.heads, 2)


_MEASURED = "H200, torch 2.11, Triton 3.6, 2026-11-20"

PAGED = Roles(measured=_MEASURED)
"""Keys in fp8 pages."""
ROWED = Roles(measured=_MEASURED)
"""Keys in bf16 rows."""

ROWS: Mapping[str, Tuning] = {DEFAULT: HOPPER, "cpu": INTERPRETER, "sm_90": HOPPER}
"""Numbers of the shared kernel, for the calls that it serves here."""

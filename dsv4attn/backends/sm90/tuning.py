"""Numbers of the Hopper room: of its own kernels, and of the shared one."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import frozen

from dsv4attn.backends._triton.tuning import DEFAULT, HOPPER, INTERPRETER, Tuning

__all__ = ["PAGED", "ROWED", "ROWS", "Roles"]


@frozen
class Roles:
    """Numbers of the Gluon kernel for one kind of keys. Three roles share the 65,536 registers of a multiprocessor.

    values, produce: registers of a thread in the second role, of four warps, which adds up values, and in `produce`, of
    `producers` warps; the first, of four, has what they leave. least: tiles of the shortest chunk. few: up to so many
    heads of all tokens, a program adds up one head, whose parts are many, and loads `parts` together; beyond them it
    adds up `heads` heads, two parts at a time. warps: of either.
    """

    values: int = 224
    produce: int = 64
    producers: int = 8
    least: int = 1
    few: int = 2048
    parts: int = 8
    heads: int = 4
    warps: int = 4

    measured: str = "not measured"

    @property
    def block(self) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
        """Warps of each role, and registers of each of their threads, which come in eights."""
        warps = 4 + 4 + self.producers
        there = 65536 // (32 * warps) // 8 * 8 * warps
        left = (there - 4 * self.values - self.producers * self.produce) // 4 // 8 * 8
        return (4, left), (4, self.values), (self.producers, self.produce)

    @property
    def adding(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Heads of a program that adds up, and parts that it loads together: where heads are few, and else."""
        return (1, self.parts), (self.heads, 2)


_ON = "H200, torch 2.11, Triton 3.6, 2026-11-22: dsv4attn bench"

PAGED = Roles(measured=f"{_ON} decode prefill")
"""Keys in fp8 pages."""
ROWED = Roles(values=216, produce=72, producers=4, measured=f"{_ON} prefill-rows")
"""Keys in bf16 rows."""

ROWS: Mapping[str, Tuning] = {DEFAULT: HOPPER, "cpu": INTERPRETER, "sm_90": HOPPER}
"""Numbers of the shared kernel, for the calls that it serves here."""

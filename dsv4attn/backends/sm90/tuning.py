"""Numbers of the Hopper backend: of its Gluon kernels, and of the shared kernel."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import frozen

from dsv4attn.backends._triton.tuning import DEFAULT, HOPPER, INTERPRETER, Tuning

__all__ = ["PAGED", "ROWED", "TUNING", "Roles"]


@frozen
class Roles:
    """Numbers of the Gluon kernel for one kind of keys. Three roles share the 65,536 registers of a multiprocessor.

    values, produce: registers of a thread in the second role, of four warps, and in `produce`, of `producers` warps.
    The first role, of four warps, has the other registers. least: tiles of the shortest chunk.
    few: most heads of all tokens for which a program of `combine_parts` takes one head, `parts` parts at a time; with
    more heads it takes `heads` heads, two parts at a time. warps: of a program of `combine_parts`.
    measured: as of `Tuning`.
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
    def combining(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Heads of a program of `combine_parts`, and parts that it loads together: for few heads, and for many."""
        return (1, self.parts), (self.heads, 2)


_ON = "H200, torch 2.11, Triton 3.6, 2026-11-22: dsv4attn bench"

PAGED = Roles(measured=f"{_ON} decode prefill")
"""Keys in fp8 pages."""
ROWED = Roles(values=216, produce=72, producers=4, measured=f"{_ON} prefill-rows")
"""Keys in bf16 rows."""

TUNING: Mapping[str, Tuning] = {DEFAULT: HOPPER, "cpu": INTERPRETER, "sm_90": HOPPER}
"""Tuning of the shared kernel."""

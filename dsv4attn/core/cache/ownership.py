"""`Ownership`: which rank holds a compressed entry, and under which number. Arithmetic only: no group, no memory."""

from __future__ import annotations

from typing import TypeVar

from attrs import frozen
from torch import Tensor

from dsv4attn.core.argument_checks import check_count
from dsv4attn.errors import ArgumentError

__all__ = ["Ownership"]

_Number = TypeVar("_Number", int, Tensor)


@frozen
class Ownership:
    """Entries of one rank: those in every size-th run of `interleave` entries.

    Entry e belongs to rank (e // interleave) mod size. Its owners number their entries 0, 1, 2, ... in the order of e.

    rank: of the owner, 0 .. size - 1.
    size: ranks that share a compressed cache.
    interleave: consecutive entries of one rank.
    """

    rank: int
    size: int
    interleave: int = 1

    def __attrs_post_init__(self) -> None:
        check_count("size", self.size, 1)
        check_count("interleave", self.interleave, 1)
        if check_count("rank", self.rank, 0) >= self.size:
            raise ArgumentError("rank", expected=f"a rank in [0, {self.size})", actual=self.rank)

    def __str__(self) -> str:
        """The entries in messages."""
        return f"the entries of rank {self.rank} of {self.size}, interleave {self.interleave}"

    def owner(self, entry: _Number) -> _Number:
        """The rank that holds an entry; entry numbers are not negative, here and below.

        entry: number of an entry in the sequence, an int or a tensor.
        """
        return entry // self.interleave % self.size

    def local(self, entry: _Number) -> _Number:
        """The number that its owner gives an entry.

        entry: number of an entry in the sequence, an int or a tensor.
        """
        return entry // (self.interleave * self.size) * self.interleave + entry % self.interleave

    def entry(self, local: _Number) -> _Number:
        """The entry that has a number of this rank.

        local: number that this rank gives the entry, an int or a tensor.
        """
        run = local // self.interleave * self.size + self.rank
        return run * self.interleave + local % self.interleave

    def count(self, entries: int) -> int:
        """How many of the first `entries` entries this rank holds.

        entries: number of entries of the sequence.
        """
        runs, rest = divmod(entries, self.interleave * self.size)
        return runs * self.interleave + min(max(rest - self.rank * self.interleave, 0), self.interleave)

    def counts(self, entries: Tensor) -> Tensor:
        """`count` of each element.

        entries: numbers of entries, an integer tensor of any shape.
        """
        cycle = self.interleave * self.size
        rest = (entries % cycle - self.rank * self.interleave).clamp_(0, self.interleave)
        return entries // cycle * self.interleave + rest

    def local_numbers(self, entries: Tensor) -> Tensor:
        """Numbers of this rank for entry numbers of any shape; -1 for entries of other ranks, and for -1.

        entries: entry numbers of the sequence, an integer tensor of any shape.
        """
        is_own = (entries >= 0) & (self.owner(entries) == self.rank)
        return self.local(entries).masked_fill_(~is_own, -1)

    def check_page(self, records: int, what: str) -> None:
        """Raise ArgumentError unless whole runs fill a page, so that a page is the same tokens on every rank.

        records: records of a page.
        what: the name of the cache in the error.
        """
        if records % self.interleave:
            expected = f"a divisor of {records}, the records in a page of {what}"
            raise ArgumentError("interleave", expected=expected, actual=self.interleave)

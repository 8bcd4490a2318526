"""Formats of the keys that the Gluon kernels read."""

from __future__ import annotations

from typing import NamedTuple

from dsv4attn.backends.sm90.kernels_schedule import BF16_ROWS, FP8_PAGES

__all__ = ["PAGES", "ROWS", "KeyFormat"]


class KeyFormat(NamedTuple):
    """Format of the keys that a Gluon kernel reads.

    number: FP8_PAGES, BF16_ROWS, CODE_PAGES or NIBBLE_PAGES of `kernels_schedule`.
    interleaved: whether the scales of a record follow its data.
    """

    number: int
    interleaved: bool = False

    @property
    def is_paged(self) -> bool:
        """Whether keys are records."""
        return self.number != int(BF16_ROWS.value)


PAGES, ROWS = KeyFormat(FP8_PAGES.value), KeyFormat(BF16_ROWS.value)

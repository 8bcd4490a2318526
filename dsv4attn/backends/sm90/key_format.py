"""Formats of the keys that the Gluon kernels read."""

from __future__ import annotations

from typing import NamedTuple

from dsv4attn.backends.sm90.kernels_schedule import (
    BF16_ROWS,
    CODE_PAGES,
    FP8_PAGES,
    NIBBLE_PAGES,
    NVFP4_PAGES,
)
from dsv4attn.core.cache.layout import Arrangement

__all__ = ["PAGES", "ROWS", "V4_RECORDS", "KeyFormat"]


class KeyFormat(NamedTuple):
    """Format of the keys that a Gluon kernel reads.

    number: FP8_PAGES, BF16_ROWS or another number of `kernels_schedule`.
    interleaved: whether the scales of a record follow its data.
    """

    number: int
    interleaved: bool = False

    @property
    def is_paged(self) -> bool:
        """Whether keys are records."""
        return self.number != int(BF16_ROWS.value)

    @property
    def has_tiles(self) -> bool:
        """Whether `kernels_small_decode` reads the keys."""
        return self.number in (FP8_PAGES.value, CODE_PAGES.value, NIBBLE_PAGES.value)


PAGES, ROWS = KeyFormat(FP8_PAGES.value), KeyFormat(BF16_ROWS.value)
V4_RECORDS = {
    ("fp8_ds_mla", Arrangement.SPLIT, 64, 8): PAGES,
    ("v4_nvfp4", Arrangement.SPLIT, 16, 32): KeyFormat(NVFP4_PAGES.value),
}
"""Records of 448 codes and 64 bf16 values, by name, arrangement, codes under a scale, and bytes of scales."""

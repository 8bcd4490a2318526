"""Formats of the keys that the Gluon kernels read."""

from __future__ import annotations

from typing import NamedTuple

from dsv4attn.backends.sm90.attention.kernels_schedule import (
    BF16_ROWS,
    CODE_PAGES,
    FP8_PAGES,
    NIBBLE_PAGES,
    NVFP4_PAGES,
)
from dsv4attn.backends.sm90.served import KeyKind, Keys


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


FP8_RECORDS, ROWS = KeyFormat(FP8_PAGES.value), KeyFormat(BF16_ROWS.value)
"""V4's fp8 records, and rows of bf16."""
V4_RECORDS = {
    KeyKind.FP8: FP8_RECORDS,
    KeyKind.NVFP4: KeyFormat(NVFP4_PAGES.value),
}
"""Records of 448 codes and 64 bf16 values."""
_NUMBERS = {
    KeyKind.CODES: CODE_PAGES.value,
    KeyKind.NIBBLES: NIBBLE_PAGES.value,
    KeyKind.ROWS: BF16_ROWS.value,
    **{kind: key_format.number for kind, key_format in V4_RECORDS.items()},
}


def format_of(keys: Keys) -> KeyFormat:
    """The format of the keys that `served` says are read."""
    return KeyFormat(_NUMBERS[keys.kind], keys.interleaved)

"""The table of quantised records of keys, `KEY_RECORDS`, and how their values are coded, `CODINGS`.

A new record is one row here if its codes and its scale are a pair of `CODINGS`. Another pair needs code in several
places first. docs/records.md lists them.

A row says what a record is made of. Its bytes are those of `KVCacheLayout.of_record(name)`.

This file imports no torch: problems, which are descriptions without tensors, name records too.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from attrs import field, frozen

__all__ = ["CODINGS", "DATA", "KEY_RECORDS", "RECORD", "Coding", "KeyRecord"]

DATA, RECORD = "data", "record"
"""Page alignments that follow from the dims: of the data of a record, without its scales, and of a whole record."""


class Coding(str, Enum):
    """How a group of values becomes codes under a scale; see `core.cache.key_codecs`.

    FP8: fp8 codes under a power of two. NVFP4: e2m1 codes under a scale in e4m3fn. MXFP4: e2m1 codes under a power of
    two.
    """

    FP8 = "fp8"
    NVFP4 = "nvfp4"
    MXFP4 = "mxfp4"


CODINGS: Mapping[tuple[str, str], Coding] = {
    ("e4m3fn", "ue8m0"): Coding.FP8,
    ("e4m3fnuz", "ue8m0"): Coding.FP8,
    ("e2m1", "e4m3fn"): Coding.NVFP4,
    ("e2m1", "ue8m0"): Coding.MXFP4,
    # index keys, whose power of two is an fp32 number
    ("e4m3fn", "float32"): Coding.FP8,
    ("e4m3fnuz", "float32"): Coding.FP8,
}
"""The coding of each type of codes under each type of scale."""


@frozen
class KeyRecord:
    """What a record is made of.

    codes: types of its codes; the first is the default. Codes of e2m1 are two to a byte, the even dim in the low half.
    group_size: codes under a scale.
    scale: "ue8m0", an exponent biased by 127, or "e4m3fn", the scale itself.
    pages: the arrangements that it has, each with the bytes to which pages are aligned, or DATA or RECORD; the first is
       the default. Pages aligned to RECORD are read as one list of records, and no other page stride is accepted.
    scale_padding: bytes to which the scales of a record round up.
    codes_rope: whether dims with RoPE are codes too; otherwise they are bf16 values.
    window_record: the record of the window next to a compressed cache of this one, if windows never have this one.
    """

    codes: tuple[str, ...]
    group_size: int
    scale: str
    pages: Mapping[str, int | str] = field(hash=False)
    scale_padding: int = 8
    codes_rope: bool = False
    window_record: str = ""


KEY_RECORDS: Mapping[str, KeyRecord] = {
    "fp8_ds_mla": KeyRecord(("e4m3fn", "e4m3fnuz"), 64, "ue8m0", {"split": DATA, "interleaved": DATA}),
    # kernels view a cache of V4.1's interleaved records as rows
    "v41_fp8": KeyRecord(("e4m3fn",), 32, "ue8m0", {"interleaved": RECORD, "split": 512}, 1, codes_rope=True),
    "v41_fp4": KeyRecord(
        ("e2m1",), 16, "e4m3fn", {"interleaved": RECORD, "split": 256}, 1, codes_rope=True, window_record="v41_fp8"
    ),
    # FlashInfer's kernels ask for pages at multiples of 16 bytes
    "v4_nvfp4": KeyRecord(("e2m1",), 16, "e4m3fn", {"split": 16}),
}
"""Every quantised record of keys, by its name. Other quantised records are those of index keys."""

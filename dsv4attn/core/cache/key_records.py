"""The table of quantised records of keys: `KEY_RECORDS`. A new record is one row here; see docs/records.md.

A row says what a record is made of. Its bytes are those of `KVCacheLayout.of_record(name)`. Codes under scales are
written and read by the coding that follows from the two; see `core.cache.key_codecs`.

This file imports no torch: problems, which are descriptions without tensors, name records too.
"""

from __future__ import annotations

from collections.abc import Mapping

from attrs import field, frozen

__all__ = ["DATA", "KEY_RECORDS", "RECORD", "KeyRecord"]

DATA, RECORD = "data", "record"
"""Page alignments that follow from the dims: of the data of a record, without its scales, and of a whole record."""


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

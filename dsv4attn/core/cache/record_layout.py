"""`KVCacheLayout`, the meaning of the bytes of a record in a cache: fields, groups, scales, place in a page.

A layout is a value, never guessed from a size: several different records have equal byte counts. Writer and reader
compare fingerprints, and a difference raises before any launch.
"""

from __future__ import annotations

from enum import Enum
from math import gcd

import torch
from attrs import asdict, evolve, field, frozen, validators

from dsv4attn.core.argument_checks import at_least, check_count, round_up
from dsv4attn.core.cache.key_records import CODINGS, DATA, KEY_RECORDS, RECORD, Coding, KeyRecord
from dsv4attn.errors import ArgumentError, LayoutMismatchError, UnknownNameError

__all__ = ["Arrangement", "Coding", "Fp8Format", "KVCacheLayout", "Region", "check_layout", "check_window"]

_E2M1_MAX = 6.0
_SCALE_DTYPES = {"ue8m0": torch.uint8, "float32": torch.float32, "e4m3fn": torch.float8_e4m3fn}
_SCALE_NAMES = {dtype: name for name, dtype in _SCALE_DTYPES.items()}
_INDEX_ALIGNMENT = 576
"""Bytes to which vLLM rounds the pages of index keys and of states up, as those of fp8_ds_mla."""


class Fp8Format(str, Enum):
    """The two e4m3 dialects. A finite code means exactly twice as much in OCP as in FNUZ.

    OCP: bias 7, largest 448, NaN 0x7F and 0xFF. FNUZ: bias 8, largest 240, NaN 0x80, no negative zero (gfx942).
    """

    OCP = "e4m3fn"
    FNUZ = "e4m3fnuz"

    @property
    def dtype(self) -> torch.dtype:
        """The torch type that reads these codes."""
        return torch.float8_e4m3fn if self is Fp8Format.OCP else torch.float8_e4m3fnuz

    @property
    def max(self) -> float:
        """Largest finite value."""
        return 448.0 if self is Fp8Format.OCP else 240.0


class Arrangement(str, Enum):
    """The place of the scales of a quantised record.

    SPLIT: all token data of the page first, then all scales. INTERLEAVED: each token's scales directly after its data.
    """

    SPLIT = "split"
    INTERLEAVED = "interleaved"


@frozen
class Region:
    """One field of a record: `count` elements of `dtype`; token i of a page has them at `offset + i * stride` bytes."""

    name: str
    dtype: torch.dtype
    count: int
    offset: int
    stride: int


@frozen
class KVCacheLayout:
    """Bytes of one record and their place in a page. Build it with one of the class methods.

    Keys: `of_record` for every record of the table `KEY_RECORDS`, among these `fp8_ds_mla`, `v41_fp8` and `v41_fp4`,
    which have class methods with more arguments; and `rows`. Keys of the indexer: `index_fp8`, `index_mxfp4`, `rows`.
    States of a compressor: `compressor_state`.

    `fp8_ds_mla` (448 + 64 dims): 448 fp8 codes and 64 little-endian bf16 RoPE values, 576 bytes of data, then 8 scale
    bytes: one power-of-two exponent (biased by 127) per group of 64 codes and a pad byte. `rows`: plain bf16 or fp32.
    A NaN code, scale byte 255 of a group in use, or a NaN RoPE value makes the key NaN for every reader.

    V4.1's records hold codes of all 512 dims, those with RoPE too, which are rotated before they are quantised.
    `v41_fp8` (528 bytes): fp8 codes, then an exponent byte per group of 32. `v41_fp4` (288 bytes; compressed caches
    only): e2m1 codes, two to a byte, the even dim in the low half, then a scale in e4m3fn per group of 16. A scale that
    is NaN makes the key NaN.

    V4's record of 4 bits, `v4_nvfp4` (384 bytes; FlashInfer's "nvfp4"): 448 e2m1 codes, two to a byte, the even dim in
    the low half, and 64 bf16 RoPE values. After all of these of a page come the scales of each record: 28 in e4m3fn, of
    16 codes each, and 4 bytes of padding. A scale that is NaN makes the key NaN, and so does a NaN RoPE value.

    `index_fp8` (132 bytes for 128 dims): a code for each dim, then one fp32 scale, a power of two. `index_mxfp4` (68
    bytes): e2m1 codes, two to a byte, the even dim in the low half, then a scale byte for each group of 32.

    name: of a row of `KEY_RECORDS`, or "rows", "index_fp8", "index_mxfp4" or "compressor_state".
    nope_dim: elements of a key without a position, the leading ones.
    rope_dim: elements of a key with RoPE, the trailing ones; bf16 in V4's records, codes in V4.1's.
    dtype: element type of the cache tensor: uint8 for quantised records.
    fp8_format: dialect of fp8 codes; None for others.
    fp8_max: largest magnitude the writer emits: 448 (OCP), 240 (FNUZ), or the 224 that vLLM writes on gfx942. Readers
       do not depend on it, so it is not part of the fingerprint.
    group_size: codes that share a scale; 0 for rows.
    arrangement: place of the scales.
    page_alignment: bytes to which `page_stride` rounds up when a page is allocated. Readers follow the tensor's own
       stride.
    scale_dtype: uint8, an exponent biased by 127; float32 or float8_e4m3fn, the scale itself.
    scale_padding: bytes to which the scales of a record round up.
    scale_floor: smallest scale that a writer of fp8 codes emits, rounded up to a power of two; 0 is vLLM's rule. Not
       part of the fingerprint.
    rounds_to_fp4: whether a writer first rounds a key to the values that `v41_fp4` can hold. Not part of the
       fingerprint.
    """

    name: str
    nope_dim: int = field(validator=at_least(0))
    rope_dim: int = field(validator=at_least(0))
    dtype: torch.dtype
    fp8_format: Fp8Format | None = None
    fp8_max: float = 0.0
    group_size: int = 0
    arrangement: Arrangement = Arrangement.SPLIT
    page_alignment: int = 1
    scale_dtype: torch.dtype = torch.uint8
    scale_padding: int = 8
    scale_floor: float = field(default=0.0, validator=validators.ge(0.0))
    rounds_to_fp4: bool = False

    def __attrs_post_init__(self) -> None:
        """Check that a writer stays within its dialect, as 448 written as FNUZ is NaN, and a record within its row."""
        record = self.key_record
        if record is not None:
            codes = self._codes
            if codes not in record.codes:
                expected = f"{' or '.join(record.codes)}, as {self.name} has it"
                raise ArgumentError("fp8_format", expected=expected, actual=codes)
            if self.arrangement.value not in record.pages:
                expected = f"{' or '.join(record.pages)}, as {self.name} has it"
                raise ArgumentError("arrangement", expected=expected, actual=self.arrangement.value)
        plain = (_E2M1_MAX,) if self.group_size else (0.0,)
        allowed = {Fp8Format.OCP: (448.0,), Fp8Format.FNUZ: (240.0, 224.0), None: plain}[self.fp8_format]
        if self.fp8_max not in allowed:
            dialect = self.fp8_format.value if self.fp8_format else "rows"
            raise ArgumentError("fp8_max", expected=f"one of {allowed} for {dialect}", actual=self.fp8_max)

    @classmethod
    def of_record(
        cls,
        name: str,
        nope_dim: int = 448,
        rope_dim: int = 64,
        *,
        arrangement: Arrangement | None = None,
        fp8_format: Fp8Format | None = None,
    ) -> KVCacheLayout:
        """Layout of a record of the table `KEY_RECORDS`, for any dims that it can hold.

        name: of its row.
        nope_dim: dims without RoPE, stored as codes.
        rope_dim: dims with RoPE; the row says whether they are codes or bf16 values.
        arrangement: where the scales of a page lie; None: the row's first.
        fp8_format: dialect of fp8 codes; None: the row's first. Raises UnknownNameError for a name that is no row.
        """
        if name not in KEY_RECORDS:
            raise UnknownNameError("record", name, tuple(KEY_RECORDS))
        record = KEY_RECORDS[name]
        check_count("nope_dim", nope_dim, 1)
        check_count("rope_dim", rope_dim, 0)
        packed, codes = record.codes[0] == "e2m1", nope_dim + rope_dim if record.codes_rope else nope_dim
        unit = (2 if packed else 1) * (1 if record.codes_rope else 2)
        if codes % unit:
            expected = f"a multiple of {unit}, so that the bf16 part is aligned"
            if record.codes_rope:
                expected = "an even number of dims, two to a byte"
            elif unit == 2:
                expected = "an even number, so that the bf16 part is aligned"
            raise ArgumentError("nope_dim", expected=expected, actual=codes)
        if not packed:
            fp8_format = Fp8Format(record.codes[0]) if fp8_format is None else fp8_format
        largest = _E2M1_MAX if fp8_format is None else fp8_format.max
        scales = _SCALE_DTYPES[record.scale], record.scale_padding
        arrangement = Arrangement(next(iter(record.pages))) if arrangement is None else arrangement
        quantised = torch.uint8, fp8_format, largest, record.group_size, arrangement, 1
        layout = cls(name, nope_dim, rope_dim, *quantised, *scales)
        alignment = record.pages[arrangement.value]
        if not isinstance(alignment, int):
            alignment = {DATA: layout.data_bytes, RECORD: layout.record_bytes}[alignment]
        return evolve(layout, page_alignment=alignment)

    @classmethod
    def fp8_ds_mla(
        cls,
        nope_dim: int = 448,
        rope_dim: int = 64,
        *,
        fp8_format: Fp8Format = Fp8Format.OCP,
        fp8_max: float | None = None,
        group_size: int = 64,
        arrangement: Arrangement = Arrangement.SPLIT,
    ) -> KVCacheLayout:
        """Layout of the 584-byte record (FlashMLA's MODEL1), for any dims; pages are aligned to the data size.

        nope_dim: dims without RoPE, stored as fp8 codes.
        rope_dim: dims with RoPE, stored as bf16.
        fp8_format: dialect of the codes.
        fp8_max: largest magnitude of a code; None: the largest of the dialect.
        group_size: dims that share a scale.
        arrangement: where the scales of a page lie.
        """
        if group_size < 1:
            raise ArgumentError("group_size", expected="at least 1", actual=group_size)
        layout = cls.of_record("fp8_ds_mla", nope_dim, rope_dim, arrangement=arrangement, fp8_format=fp8_format)
        return evolve(layout, fp8_max=fp8_format.max if fp8_max is None else fp8_max, group_size=group_size)

    @classmethod
    def v41_fp8(
        cls,
        nope_dim: int = 448,
        rope_dim: int = 64,
        *,
        arrangement: Arrangement = Arrangement.INTERLEAVED,
        scale_floor: float = 0.0,
        rounds_to_fp4: bool = False,
    ) -> KVCacheLayout:
        """Layout of V4.1's 528-byte record: e4m3fn codes of all dims, groups of 32.

        nope_dim: dims without RoPE.
        rope_dim: dims with RoPE. All dims are fp8 codes.
        arrangement: INTERLEAVED is what engines write now. Its pages are whole records, since kernels read a cache as
        one list of records. SPLIT is that of the first releases; its pages are aligned to 512 bytes.
        scale_floor: 0 is vLLM's rule, which puts a floor of 1e-4 under the maximum of a group. 1e-4 is FlashMLA's and
        SGLang's, which puts it under the scale. Bytes differ for groups below 0.0274 only; readers do not care.
        rounds_to_fp4: see `KVCacheLayout`. SGLang does so in compressed caches, as the published model does; vLLM does
        not. The window is never rounded.
        """
        layout = cls.of_record("v41_fp8", nope_dim, rope_dim, arrangement=arrangement)
        return evolve(layout, scale_floor=scale_floor, rounds_to_fp4=rounds_to_fp4)

    @classmethod
    def v41_fp4(
        cls, nope_dim: int = 448, rope_dim: int = 64, *, arrangement: Arrangement = Arrangement.INTERLEAVED
    ) -> KVCacheLayout:
        """Layout of V4.1's 288-byte record: e2m1 codes of all dims, groups of 16 under a scale in e4m3fn.

        For compressed caches only. FlashMLA and vLLM put a window of `v41_fp8` of the same arrangement next to it. The
        backends here read each cache by its own layout, so another arrangement or record of the window works too.
        nope_dim: dims without RoPE.
        rope_dim: dims with RoPE. All dims are fp4 codes.
        arrangement: as in `v41_fp8`; pages of SPLIT are aligned to 256 bytes.
        """
        return cls.of_record("v41_fp4", nope_dim, rope_dim, arrangement=arrangement)

    @classmethod
    def rows(cls, nope_dim: int = 448, rope_dim: int = 64, *, dtype: torch.dtype = torch.bfloat16) -> KVCacheLayout:
        """Layout of unquantised rows.

        nope_dim: dims without RoPE. It may be 0, because all dims of an indexer's keys may have RoPE.
        rope_dim: dims with RoPE.
        dtype: dtype of the rows, bf16 or fp32.
        """
        check_count("nope_dim", nope_dim, 0)
        check_count("rope_dim", rope_dim, 0 if nope_dim else 1)
        if dtype not in (torch.bfloat16, torch.float32):
            raise ArgumentError("dtype", expected="torch.bfloat16 or torch.float32", actual=dtype)
        return cls("rows", nope_dim, rope_dim, dtype)

    @classmethod
    def index_fp8(cls, head_dim: int = 128, *, fp8_format: Fp8Format = Fp8Format.OCP) -> KVCacheLayout:
        """Layout of the indexer's 132-byte record: fp8 codes under one fp32 scale.

        Scales lie after all codes of a page, at a multiple of 4 bytes. So head_dim times the records of a page must be
        one.
        head_dim: dims of an index key.
        fp8_format: dialect of the codes.
        """
        check_count("head_dim", head_dim, 1)
        quantised = torch.uint8, fp8_format, fp8_format.max, head_dim, Arrangement.SPLIT
        return cls("index_fp8", head_dim, 0, *quantised, _INDEX_ALIGNMENT, torch.float32, scale_padding=4)

    @classmethod
    def index_mxfp4(cls, head_dim: int = 128) -> KVCacheLayout:
        """Layout of the indexer's 68-byte record: e2m1 codes, groups of 32.

        head_dim: dims of an index key.
        """
        if check_count("head_dim", head_dim, 1) % 32:
            raise ArgumentError("head_dim", expected="a multiple of 32, the dims under a scale", actual=head_dim)
        quantised = torch.uint8, None, _E2M1_MAX, 32, Arrangement.SPLIT
        return cls("index_mxfp4", head_dim, 0, *quantised, _INDEX_ALIGNMENT, scale_padding=4)

    @classmethod
    def compressor_state(cls, width: int) -> KVCacheLayout:
        """Layout of a token's state in a compressor: `width` fp32 values of kv, then as many scores.

        width: fp32 values of kv in a state.
        """
        check_count("width", width, 1)
        return cls("compressor_state", 2 * width, 0, torch.float32, page_alignment=_INDEX_ALIGNMENT)

    @property
    def key_record(self) -> KeyRecord | None:
        """The row of `KEY_RECORDS` with this name; None for rows, index keys and states."""
        return KEY_RECORDS.get(self.name)

    @property
    def coding(self) -> Coding:
        """How groups become codes under scales; of a quantised record."""
        return CODINGS[self._codes, _SCALE_NAMES[self.scale_dtype]]

    @property
    def _codes(self) -> str:
        """The type of the codes of a quantised record."""
        return self.fp8_format.value if self.fp8_format else "e2m1"

    @property
    def has_whole_record_pages(self) -> bool:
        """Whether kernels read pages as one list of records, so that the page stride is a multiple of a record."""
        return self.key_record is not None and self.key_record.pages[self.arrangement.value] == RECORD

    @property
    def amax_floor(self) -> float:
        """Smallest group maximum a writer assumes, so that a group of zeros has a scale. This is vLLM's rule.

        FlashMLA's tests put a floor under the scale instead, see `scale_floor`: other bytes below 0.027.
        """
        if self.scale_floor:
            return self.scale_floor * self.fp8_max
        return 1e-4 if self.fp8_format else _E2M1_MAX * 2.0**-126

    @property
    def code_bits(self) -> int:
        """Bits of a code: 8 of fp8, 4 of e2m1."""
        return 8 if self.fp8_format else 4

    @property
    def head_dim(self) -> int:
        """Elements of a key once read."""
        return self.nope_dim + self.rope_dim

    @property
    def coded_dims(self) -> int:
        """Leading elements of a key that a quantised record holds as codes; 0 for rows."""
        if not self.is_quantised:
            return 0
        return self.head_dim if self.key_record is not None and self.key_record.codes_rope else self.nope_dim

    @property
    def plain_dims(self) -> int:
        """Trailing elements of a key that a quantised record holds in bf16; 0 for rows."""
        return self.head_dim - self.coded_dims if self.is_quantised else 0

    @property
    def is_quantised(self) -> bool:
        """Whether records hold codes and scales."""
        return self.group_size > 0

    @property
    def row_dtype(self) -> torch.dtype:
        """Smallest type that holds every dequantised key exactly: 4 significand bits times a power of two fit bf16."""
        return torch.bfloat16 if self.is_quantised else self.dtype

    @property
    def num_groups(self) -> int:
        """Scales per record; the last group may be short."""
        return -(-self.coded_dims // self.group_size) if self.is_quantised else 0

    @property
    def code_bytes(self) -> int:
        """Bytes of codes of one record; 0 for rows."""
        return self.coded_dims * self.code_bits // 8

    @property
    def data_bytes(self) -> int:
        """Bytes of codes and bf16 values of one record."""
        if not self.is_quantised:
            return self.head_dim * self.dtype.itemsize
        return self.code_bytes + 2 * self.plain_dims

    @property
    def scale_bytes(self) -> int:
        """Bytes of scales of one record, with padding."""
        return round_up(self.num_groups * self.scale_dtype.itemsize, self.scale_padding) if self.is_quantised else 0

    @property
    def record_bytes(self) -> int:
        """Bytes of one record."""
        return self.data_bytes + self.scale_bytes

    def page_bytes(self, block_size: int) -> int:
        """Bytes of a page of `block_size` records, without padding.

        block_size: records of a page.
        """
        return block_size * self.record_bytes

    def page_stride(self, block_size: int) -> int:
        """Bytes from one page to the next in a cache of our own.

        block_size: records of a page.
        """
        return round_up(self.page_bytes(block_size), self.page_alignment)

    def check_block_size(self, block_size: int) -> None:
        """Raise ArgumentError unless the scales of a page of `block_size` records are aligned to their size.

        block_size: records of a page.
        """
        size = self.scale_dtype.itemsize if self.is_quantised and self.arrangement is Arrangement.SPLIT else 1
        if block_size * self.data_bytes % size:
            count = size // gcd(self.data_bytes, size)
            expected = (
                f"a multiple of {count} records, so that scales after codes of {self.data_bytes} bytes are aligned"
            )
            raise ArgumentError("block_size", expected=expected, actual=block_size)

    def regions(self, block_size: int) -> tuple[Region, ...]:
        """The fields of a record and their offsets in a page of `block_size` records.

        "nope": bytes of codes, of all dims in V4.1's records. "rope": bf16 values, which may be none. "scale".
        block_size: records of a page.
        """
        if not self.is_quantised:
            return (Region("row", self.dtype, self.head_dim, 0, self.data_bytes),)
        split, codes = self.arrangement is Arrangement.SPLIT, self.code_bytes
        stride, scales = (
            (self.data_bytes, block_size * self.data_bytes) if split else (self.record_bytes, self.data_bytes)
        )
        # scales of a byte are bytes: not every device indexes fp8
        scale = torch.uint8 if self.scale_dtype.itemsize == 1 else self.scale_dtype
        return (
            Region("nope", torch.uint8, codes, 0, stride),
            Region("rope", torch.bfloat16, self.plain_dims, codes, stride),
            Region("scale", scale, self.scale_bytes // scale.itemsize, scales, self.scale_bytes if split else stride),
        )

    @property
    def fingerprint(self) -> str:
        """Stable string that is equal exactly when a reader of one layout understands the other's bytes.

        The same in every process, on every device and in every release; engines may store it or send it.
        """
        dims = f"nope{self.nope_dim}:rope{self.rope_dim}"
        if not self.is_quantised:
            return f"{self.name}/1:{str(self.dtype).removeprefix('torch.')}:{dims}"
        codes, scale = self._codes, _SCALE_NAMES[self.scale_dtype]
        if self.key_record is None:
            return f"{self.name}/1:{codes}:dim{self.nope_dim}:{scale}x{self.group_size}:{self.arrangement.value}"
        rope = "coded" if self.key_record.codes_rope else "bf16"
        scales = f"{scale}x{self.group_size}:scales{self.scale_bytes}:{self.arrangement.value}"
        return f"{self.name}/1:{codes}:{dims}:{rope}:{scales}"


def check_window(layout: KVCacheLayout, argument: str) -> None:
    """Raise `LayoutMismatchError` for a layout that window caches never have."""
    record = layout.key_record
    if record is not None and record.window_record:
        hint = f"keep the window in {record.window_record} of the same arrangement: "
        hint += f"{layout.name} is for compressed caches only"
        raise LayoutMismatchError(argument, expected="a layout of window caches", actual=layout.fingerprint, hint=hint)


def _plain(value: object) -> object:
    """A field's value for messages: the text of an enum's member."""
    return value.value if isinstance(value, Enum) else value


def check_layout(actual: KVCacheLayout, expected: KVCacheLayout, argument: str) -> None:
    """Raise `LayoutMismatchError` naming every differing field unless both mean the same bytes."""
    if actual.fingerprint == expected.fingerprint:
        return
    expected_fields, actual_fields = asdict(expected), asdict(actual)
    ignored = {"fp8_max", "page_alignment", "scale_floor", "rounds_to_fp4"}
    fields = ", ".join(
        f"{k}={_plain(actual_fields[k])!r} not {_plain(expected_fields[k])!r}"
        for k in expected_fields
        if expected_fields[k] != actual_fields[k] and k not in ignored
    )
    alike = actual.record_bytes == expected.record_bytes
    same = " (the records are equally long, but mean different things)" if alike else ""
    shown_expected, shown_actual = f"layout {expected.fingerprint}", f"{actual.fingerprint}{same}: {fields}"
    hint = "allocate and write the cache with the layout its reader expects"
    raise LayoutMismatchError(argument, expected=shown_expected, actual=shown_actual, hint=hint)

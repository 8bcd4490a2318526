"""`KVCacheLayout`, the meaning of the bytes of a KV cache, and `PagedKVCache`, a tensor with its layout.

A layout is a value, never guessed from a size: several different records have equal byte counts. Writer and reader
compare fingerprints, and a difference raises before any launch.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum

import torch
from attrs import asdict, evolve, field, frozen, validators
from torch import Tensor

from dsv4attn.core.tensorspec import has_dense_rows
from dsv4attn.core.values import check_count, check_type, round_up
from dsv4attn.errors import ArgumentError, LayoutMismatchError

__all__ = ["Arrangement", "Fp8Format", "KVCacheLayout", "PagedKVCache", "Region", "check_layout"]

_LAYOUTS = "pass KVCacheLayout.fp8_ds_mla() or KVCacheLayout.rows()"
_E2M1_MAX = 6.0
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

    SPLIT: all token data of the page first, then all scales. INTERLEAVED: each token's scales directly behind its data.
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

    Keys: `fp8_ds_mla`, `rows`. Keys of the indexer: `index_fp8`, `index_mxfp4`, `rows`. States of a compressor:
    `compressor_state`.

    `fp8_ds_mla` (448 + 64 dims): 448 fp8 codes and 64 little-endian bf16 RoPE values, 576 bytes of data, then 8 scale
    bytes: one power-of-two exponent (biased by 127) per group of 64 codes and a pad byte. `rows`: plain bf16 or fp32.
    A NaN code, scale byte 255 of a group in use, or a NaN RoPE value makes the key NaN for every reader.

    `index_fp8` (132 bytes for 128 dims): a code for each dim, then one fp32 scale, a power of two. `index_mxfp4` (68
    bytes): e2m1 codes, two to a byte, the even dim in the low half, then a scale byte for each group of 32.

    name: "fp8_ds_mla", "rows", "index_fp8", "index_mxfp4" or "compressor_state".
    nope_dim: elements of a key without a position, the leading ones.
    rope_dim: elements of a key with RoPE, the trailing ones; bf16 in quantised records.
    dtype: element type of the cache tensor: uint8 for quantised records.
    fp8_format: dialect of fp8 codes; None for others.
    fp8_max: largest magnitude the writer emits: 448 (OCP), 240 (FNUZ), or the 224 that vLLM writes on gfx942. Readers
       do not depend on it, so it is not part of the fingerprint.
    group_size: codes that share a scale; 0 for rows.
    arrangement: place of the scales.
    page_alignment: bytes to which `page_stride` rounds up when a page is allocated. Readers follow the tensor's own
       stride.
    scale_dtype: uint8, an exponent biased by 127, or float32, the scale itself.
    scale_padding: bytes to which the scales of a record round up.
    """

    name: str
    nope_dim: int = field(validator=validators.ge(1))
    rope_dim: int = field(validator=validators.ge(0))
    dtype: torch.dtype
    fp8_format: Fp8Format | None = None
    fp8_max: float = 0.0
    group_size: int = 0
    arrangement: Arrangement = Arrangement.SPLIT
    page_alignment: int = 1
    scale_dtype: torch.dtype = torch.uint8
    scale_padding: int = 8

    def __attrs_post_init__(self) -> None:
        """Check that a writer stays within its dialect: 448 written as FNUZ is NaN."""
        plain = (_E2M1_MAX,) if self.group_size else (0.0,)
        allowed = {Fp8Format.OCP: (448.0,), Fp8Format.FNUZ: (240.0, 224.0), None: plain}[self.fp8_format]
        if self.fp8_max not in allowed:
            dialect = self.fp8_format.value if self.fp8_format else "rows"
            raise ArgumentError("fp8_max", expected=f"one of {allowed} for {dialect}", actual=self.fp8_max)

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
        """Layout of the 584-byte record (FlashMLA's MODEL1), for any dims; pages are aligned to the data size."""
        fp8_max = fp8_format.max if fp8_max is None else fp8_max
        if group_size < 1:
            raise ArgumentError("group_size", expected="at least 1", actual=group_size)
        if nope_dim % 2:
            expected = "an even number, so that the bf16 part is aligned"
            raise ArgumentError("nope_dim", expected=expected, actual=nope_dim)
        quantised = fp8_format, fp8_max, group_size, arrangement, nope_dim + 2 * rope_dim
        return cls("fp8_ds_mla", nope_dim, rope_dim, torch.uint8, *quantised)

    @classmethod
    def rows(cls, nope_dim: int = 448, rope_dim: int = 64, *, dtype: torch.dtype = torch.bfloat16) -> KVCacheLayout:
        """Layout of unquantised rows."""
        check_count("nope_dim", nope_dim, 1)
        check_count("rope_dim", rope_dim, 0)
        if dtype not in (torch.bfloat16, torch.float32):
            raise ArgumentError("dtype", expected="torch.bfloat16 or torch.float32", actual=dtype)
        return cls("rows", nope_dim, rope_dim, dtype)

    @classmethod
    def index_fp8(cls, head_dim: int = 128, *, fp8_format: Fp8Format = Fp8Format.OCP) -> KVCacheLayout:
        """Layout of the indexer's 132-byte record: fp8 codes under one fp32 scale."""
        quantised = torch.uint8, fp8_format, fp8_format.max, head_dim, Arrangement.SPLIT
        return cls("index_fp8", head_dim, 0, *quantised, _INDEX_ALIGNMENT, torch.float32, scale_padding=4)

    @classmethod
    def index_mxfp4(cls, head_dim: int = 128) -> KVCacheLayout:
        """Layout of the indexer's 68-byte record: e2m1 codes, groups of 32."""
        if head_dim % 32:
            raise ArgumentError("head_dim", expected="a multiple of 32, the dims under a scale", actual=head_dim)
        quantised = torch.uint8, None, _E2M1_MAX, 32, Arrangement.SPLIT
        return cls("index_mxfp4", head_dim, 0, *quantised, _INDEX_ALIGNMENT, scale_padding=4)

    @classmethod
    def compressor_state(cls, width: int) -> KVCacheLayout:
        """Layout of a token's state in a compressor: `width` fp32 values of kv, then as many scores."""
        return cls("compressor_state", 2 * width, 0, torch.float32, page_alignment=_INDEX_ALIGNMENT)

    @property
    def amax_floor(self) -> float:
        """Smallest group maximum a writer assumes, so that a group of zeros has a scale. This is vLLM's rule.

        FlashMLA's tests put a floor under the scale instead: other bytes below 0.027, with equal values when read.
        """
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
        return -(-self.nope_dim // self.group_size) if self.is_quantised else 0

    @property
    def data_bytes(self) -> int:
        """Bytes of codes and RoPE values of one record."""
        if not self.is_quantised:
            return self.head_dim * self.dtype.itemsize
        return self.nope_dim * self.code_bits // 8 + 2 * self.rope_dim

    @property
    def scale_bytes(self) -> int:
        """Bytes of scales of one record, with padding."""
        return round_up(self.num_groups * self.scale_dtype.itemsize, self.scale_padding) if self.is_quantised else 0

    @property
    def record_bytes(self) -> int:
        """Bytes of one record."""
        return self.data_bytes + self.scale_bytes

    def page_bytes(self, block_size: int) -> int:
        """Bytes of a page of `block_size` records, without padding."""
        return block_size * self.record_bytes

    def page_stride(self, block_size: int) -> int:
        """Bytes from one page to the next in a cache of our own."""
        return round_up(self.page_bytes(block_size), self.page_alignment)

    def regions(self, block_size: int) -> tuple[Region, ...]:
        """The fields of a record and their offsets in a page of `block_size` records."""
        if not self.is_quantised:
            return (Region("row", self.dtype, self.head_dim, 0, self.data_bytes),)
        split = self.arrangement is Arrangement.SPLIT
        stride = self.data_bytes if split else self.record_bytes
        scales = block_size * self.data_bytes if split else self.data_bytes
        codes = self.nope_dim * self.code_bits // 8
        return (
            Region("nope", torch.uint8, codes, 0, stride),
            Region("rope", torch.bfloat16, self.rope_dim, codes, stride),
            Region(
                "scale",
                self.scale_dtype,
                self.scale_bytes // self.scale_dtype.itemsize,
                scales,
                self.scale_bytes if split else stride,
            ),
        )

    @property
    def fingerprint(self) -> str:
        """Stable string that is equal exactly when a reader of one layout understands the other's bytes.

        The same in every process, on every device and in every release; engines may store it or send it.
        """
        dims = f"nope{self.nope_dim}:rope{self.rope_dim}"
        if not self.is_quantised:
            return f"{self.name}/1:{str(self.dtype).removeprefix('torch.')}:{dims}"
        if self.name != "fp8_ds_mla":
            codes = self.fp8_format.value if self.fp8_format else "e2m1"
            scale = "ue8m0" if self.scale_dtype == torch.uint8 else "float32"
            return f"{self.name}/1:{codes}:dim{self.nope_dim}:{scale}x{self.group_size}:{self.arrangement.value}"
        assert self.fp8_format is not None
        scales = f"ue8m0x{self.group_size}:scales{self.scale_bytes}:{self.arrangement.value}"
        return f"{self.name}/1:{self.fp8_format.value}:{dims}:bf16:{scales}"


def check_layout(actual: KVCacheLayout, expected: KVCacheLayout, argument: str) -> None:
    """Raise `LayoutMismatchError` naming every differing field unless both mean the same bytes."""
    if actual.fingerprint == expected.fingerprint:
        return
    mine, theirs = asdict(expected), asdict(actual)
    ignored = {"fp8_max", "page_alignment"}
    fields = ", ".join(f"{k}={theirs[k]!r} not {mine[k]!r}" for k in mine if mine[k] != theirs[k] and k not in ignored)
    alike = actual.record_bytes == expected.record_bytes
    same = " (the records are equally long, but mean different things)" if alike else ""
    wanted, found = f"layout {expected.fingerprint}", f"{actual.fingerprint}{same}: {fields}"
    hint = "allocate and write the cache with the layout its reader expects"
    raise LayoutMismatchError(argument, expected=wanted, actual=found, hint=hint)


class PagedKVCache:
    """A paged cache: a tensor, and the layout of its bytes. Any page stride is respected; nothing is copied.

    tensor: quantised records: uint8 [B, P, record_bytes] or [B, 1, P, record_bytes]; pages begin at
            multiples of stride(0), in bytes (token i is not at i * record_bytes). Or [B, bytes], block_size given.
            Rows: bf16 or fp32 [B, P, D] or [B, 1, P, D] with unit stride on the last dimension.
    layout: the meaning of the bytes.
    Raises ArgumentError if the tensor cannot be such a cache.
    """

    __slots__ = ("_regions", "block_size", "layout", "num_blocks", "page_stride", "tensor")

    def __init__(self, tensor: Tensor, layout: KVCacheLayout, *, block_size: int | None = None) -> None:
        check_type("cache tensor", tensor, Tensor, cure="pass memory as a tensor, or PagedKVCache.allocate(...)")
        check_type("layout", layout, KVCacheLayout, cure=_LAYOUTS)
        if tensor.dtype != layout.dtype:
            raise ArgumentError("cache tensor", expected=f"dtype {layout.dtype} for {layout.name}", actual=tensor.dtype)
        last = layout.record_bytes if layout.is_quantised else layout.head_dim
        if tensor.ndim == 4 and tensor.shape[1] == 1:
            tensor = tensor.squeeze(1)
        if tensor.ndim == 3 and tensor.shape[2] == last and (block_size or tensor.shape[1]) == tensor.shape[1]:
            block_size = tensor.shape[1]
        elif not (tensor.ndim == 2 and layout.is_quantised and block_size):
            expected = f"shape [blocks, block_size, {last}] for layout {layout.fingerprint}"
            hint = "pass block_size with a 2-D byte tensor"
            raise ArgumentError("cache tensor", expected=expected, actual=list(tensor.shape), hint=hint)
        self.tensor, self.layout = tensor, layout
        self.num_blocks, self.block_size = tensor.shape[0], block_size
        self.page_stride = self._checked_stride()
        """Bytes from one page to the next."""
        self._regions: dict[str, Tensor] = {}

    @classmethod
    def allocate(
        cls, layout: KVCacheLayout, num_blocks: int, block_size: int, device: torch.device | str = "cpu"
    ) -> PagedKVCache:
        """A zeroed cache of our own, with the layout's page stride."""
        check_type("layout", layout, KVCacheLayout, cure=_LAYOUTS)
        check_count("num_blocks", num_blocks, 0)
        check_count("block_size", block_size, 1)
        stride, element = layout.page_stride(block_size), layout.dtype.itemsize
        last = layout.record_bytes // element
        with torch.inference_mode(False):  # written outside of the mode that it may be made in
            flat = torch.zeros(num_blocks * stride // element, dtype=layout.dtype, device=device)
        return cls(flat.as_strided((num_blocks, block_size, last), (stride // element, last, 1)), layout)

    def _checked_stride(self) -> int:
        tensor, layout = self.tensor, self.layout
        if not layout.is_quantised:
            if tensor.numel() and tensor.stride(2) != 1:
                raise ArgumentError("cache tensor", expected="unit stride on the last dim", actual=tensor.stride())
            if not has_dense_rows(tensor, written=True):
                expected = "rows that share no memory: they are written"
                raise ArgumentError("cache tensor", expected=expected, actual=f"strides {list(tensor.stride())}")
            return tensor.stride(0) * tensor.element_size()
        page = layout.page_bytes(self.block_size)
        # the shape names bytes that the regions do not follow, so it must mean the same contiguous page
        packed = (layout.record_bytes, 1)[3 - tensor.ndim :]
        inner = zip(tensor.shape[1:], tensor.stride()[1:], packed, strict=True)
        if tensor.numel() and any(n > 1 and stride != wanted for n, stride, wanted in inner):
            raise ArgumentError("cache tensor", expected=f"pages with strides {packed}", actual=tensor.stride()[1:])
        if tensor.ndim == 2 and self.num_blocks and tensor.shape[1] < page:
            raise ArgumentError("cache tensor", expected=f"at least {page} bytes in a page", actual=tensor.shape[1])
        # the stride of a dimension of size one means nothing
        stride = tensor.stride(0) if self.num_blocks > 1 else round_up(page, 4)
        if stride < page:
            raise ArgumentError("cache tensor", expected=f"a page stride of at least {page} bytes", actual=stride)
        unit = max(2, layout.scale_dtype.itemsize)
        if tensor.storage_offset() % unit or stride % unit:
            where = "even bytes" if unit == 2 else f"multiples of {unit} bytes"
            expected = f"pages that begin at {where}, so that the wider parts are aligned"
            actual = f"first page at byte {tensor.storage_offset()}, page stride {stride}"
            raise ArgumentError("cache tensor", expected=expected, actual=actual)
        return stride

    def region(self, name: str) -> Tensor:
        """[B, P, count] strided, typed view of one field of every record: "nope", "rope", "scale", or "row"."""
        if not self._regions:
            with torch.inference_mode(False):  # as `allocate`
                self._regions = dict(self._views())
        return self._regions[name]

    def _views(self) -> Iterator[tuple[str, Tensor]]:
        if not self.layout.is_quantised:
            yield "row", self.tensor
            return
        for region in self.layout.regions(self.block_size):
            size = (self.num_blocks, self.block_size, region.count * region.dtype.itemsize)
            start = self.tensor.storage_offset() + region.offset
            raw = self.tensor.as_strided(size, (self.page_stride, region.stride, 1), start)
            yield region.name, raw.view(region.dtype)

    @property
    def capacity(self) -> int:
        """Slots of the cache: global slot ids 0 .. capacity - 1 exist, all others are absent."""
        return self.num_blocks * self.block_size

    @property
    def device(self) -> torch.device:
        """Device of the tensor."""
        return self.tensor.device

    def with_layout(self, **changes: object) -> PagedKVCache:
        """The same bytes read another way, e.g. `fp8_format=Fp8Format.FNUZ`; an explicit act, never inferred."""
        dialect = changes.get("fp8_format")
        if isinstance(dialect, Fp8Format):
            changes.setdefault("fp8_max", dialect.max)
        return PagedKVCache(self.tensor, evolve(self.layout, **changes), block_size=self.block_size)  # type: ignore[arg-type]

    def __repr__(self) -> str:
        return f"PagedKVCache({self.layout.fingerprint}, blocks={self.num_blocks}, block_size={self.block_size})"

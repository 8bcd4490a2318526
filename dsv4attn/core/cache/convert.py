"""KV caches between processes, devices and vendors: `check_compatible` and `convert_cache` (promise G20).

Both are exact, not fast: they are the reference that transfers and offloads are checked against.
"""

from __future__ import annotations

from functools import cache
from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from dsv4attn.core.argument_checks import check_type, shown
from dsv4attn.core.cache.key_codecs import LARGEST_EXPONENT, NAN_EXPONENT, dequantize_keys
from dsv4attn.core.cache.layout import Fp8Format, KVCacheLayout, PagedKVCache
from dsv4attn.core.tensorspec import check_tensor
from dsv4attn.core.torch_modes import without_modes
from dsv4attn.errors import ArgumentError, LayoutMismatchError

__all__ = ["check_compatible", "convert_cache"]

TILE_SLOTS = 4096
"""Records converted at a time."""


def check_compatible(writer: KVCacheLayout | str, reader: KVCacheLayout | str) -> None:
    """Raise `LayoutMismatchError` unless a reader understands what a writer wrote.

    writer, reader: layouts, or their fingerprints, as engines send them in a handshake. Records per page and the
    distance of pages are not part of a layout: both sides must agree on them separately.
    """
    for name, given in (("writer", cast("object", writer)), ("reader", cast("object", reader))):
        if not isinstance(given, str | KVCacheLayout):
            hint = "pass cache.layout, or its fingerprint"
            raise ArgumentError(name, expected="a KVCacheLayout or a str", actual=shown(given), hint=hint)
    written, expected = (layout if isinstance(layout, str) else layout.fingerprint for layout in (writer, reader))
    if written == expected:
        return
    written_fields, expected_fields = (text.split(":") for text in (written, expected))
    only = [
        ", ".join(part for part in a if part not in b)
        for a, b in ((written_fields, expected_fields), (expected_fields, written_fields))
    ]
    actual = f"{written}: {only[0] or 'nothing'} instead of {only[1] or 'nothing'}"
    hint = "write the reader's layout, or move the keys with convert_cache"
    raise LayoutMismatchError("cache", expected=f"layout {expected}", actual=actual, hint=hint)


@without_modes
def convert_cache(source: PagedKVCache, target: PagedKVCache, slots: Tensor | None = None) -> None:
    """Copy keys to the same slots of another cache, in its layout, so that every key reads the same.

    source, target: of equal dims, in memory of their own (`PagedKVCache.overlaps`); devices, records per page and page
       strides may differ.
    slots: [n] int - those to copy, in both caches; by default every slot of source. Nothing else is written.

    Quantised records, of keys and of index keys, move between arrangements byte by byte, and become rows with the
    values that backends read. Other conversions depend on the values: between dialects a group of codes may need a
    scale that does not exist (OCP to FNUZ always works for scale bytes up to 253, and for fp32 scales below 2^127; -0
    becomes 0, which is all FNUZ has), and fp32 rows become bf16 rows if they hold nothing finer. Rows never become
    quantised records: that is for a backend to do, and loses bits.

    Records of two rows of `KEY_RECORDS` never become one another: groups, codes or coded dims differ, and a second
    rounding changes keys. Gather the keys and insert them with a backend where that is wanted.

    Raises LayoutMismatchError, before anything is written, if a key would change; ArgumentError for slots or memory.
    """
    for name, given in (("source", source), ("target", target)):
        check_type(name, given, PagedKVCache, cure="pass PagedKVCache(tensor, layout), or PagedKVCache.allocate(...)")
    if slots is not None:
        dtypes = (torch.int64, torch.int32)
        check_tensor("slots", slots, "_", dtypes, {}, any_strides=True)
    _check_pair(source.layout, target.layout)
    if target.overlaps(source):
        raise ArgumentError("target", expected="memory of its own", actual="the memory of source")
    if slots is None:
        slots = torch.arange(source.capacity, device=source.device)
    exist = min(source.capacity, target.capacity)
    if slots.numel() and not 0 <= int(slots.min()) <= int(slots.max()) < exist:
        actual = f"{int(slots.min())} .. {int(slots.max())}"
        raise ArgumentError("slots", expected=f"slots of both caches, 0 .. {exist - 1}", actual=actual)
    parts = slots.to(source.device, torch.int64).split(TILE_SLOTS)
    for part in parts:  # once to see that nothing is lost
        _converted(source, target.layout, part)
    for part in parts:
        place = part.to(target.device)
        for name, values in _converted(source, target.layout, part).items():
            region = target.region(name)
            region[place // target.block_size, place % target.block_size] = values.to(target.device)


def _check_pair(source: KVCacheLayout, target: KVCacheLayout) -> None:
    """Check that dims and groups of two layouts allow a conversion at all."""
    same = (source.nope_dim, source.rope_dim) == (target.nope_dim, target.rope_dim)
    if target.is_quantised:
        same = same and (source.name, source.group_size) == (target.name, target.group_size)
    if not same:
        expected = f"a layout that holds keys of {source.fingerprint} without loss"
        hint = "only records of the same kind, dims and groups, or rows of equal dims, do"
        raise LayoutMismatchError("target", expected=expected, actual=target.fingerprint, hint=hint)


def _converted(source: PagedKVCache, layout: KVCacheLayout, slots: Tensor) -> dict[str, Tensor]:
    """Fields of the records in `slots` [n], by the names of their regions in the other layout."""
    mine, place = source.layout, (slots // source.block_size, slots % source.block_size)
    if not mine.is_quantised:
        return {"row": _rows(source.region("row")[place], layout, slots)}
    names = ("nope", "rope", "scale") if mine.plain_dims else ("nope", "scale")
    fields = {name: source.region(name)[place] for name in names}
    if not layout.is_quantised:
        values = dequantize_keys(fields["nope"], fields["scale"], mine)
        _check_exact(~values.isinf().any(-1), layout, slots)  # no code is infinite: it is beyond fp32
        if mine.plain_dims:
            values = torch.cat([values, fields["rope"].float()], dim=-1)
        return {"row": _rows(values, layout, slots)}
    if mine.fp8_format is not layout.fp8_format:
        fields["nope"], fields["scale"] = _recoded(fields["nope"], fields["scale"], mine, layout, slots)
    return fields


def _rows(values: Tensor, layout: KVCacheLayout, slots: Tensor) -> Tensor:
    rows = values.to(layout.dtype)
    _check_exact(((rows.float() == values.float()) | values.isnan()).all(-1), layout, slots)
    return rows


def _recoded(
    codes: Tensor, scales: Tensor, source: KVCacheLayout, target: KVCacheLayout, slots: Tensor
) -> tuple[Tensor, Tensor]:
    """Codes [n, nope] and scales [n, groups and padding] of the same values in the other dialect."""
    assert source.fp8_format is not None
    assert target.fp8_format is not None
    groups = pad(codes, (0, source.num_groups * source.group_size - source.coded_dims))
    groups = groups.unflatten(-1, (source.num_groups, source.group_size))
    held = scales[:, : source.num_groups]
    # exponents of bytes are added to, scales in fp32 multiplied
    is_byte = source.scale_dtype == torch.uint8
    scale = held.short() if is_byte else held
    # a scale that is NaN makes any code NaN
    new, new_scale, done = groups, scale, (scale == NAN_EXPONENT) if is_byte else scale.isnan()
    # equal codes mean twice as much in OCP. Where that does not do, the scale stays and codes change
    for shift in (1 if source.fp8_format is Fp8Format.OCP else -1, 0):
        code = _codes(source.fp8_format, target.fp8_format, shift).to(codes.device)[groups.long()]
        if is_byte:
            moved = scale + shift
            exists = (moved >= 0) & (moved <= LARGEST_EXPONENT)
        else:
            moved = scale * 2.0**shift
            exists = moved * 2.0**-shift == scale  # not where it overflows, or loses its last bit
        fits = ~done & (code >= 0).all(-1) & exists
        new, new_scale = torch.where(fits[..., None], code.to(torch.uint8), new), torch.where(fits, moved, new_scale)
        done = done | fits
    _check_exact(done.all(-1), target, slots)
    scales = torch.cat([new_scale.to(scales.dtype), scales[:, source.num_groups :]], dim=-1)
    return new.flatten(-2)[:, : source.coded_dims], scales


@cache
def _codes(source: Fp8Format, target: Fp8Format, shift: int) -> Tensor:
    """[256] int16: by source code, the target code whose value is 2^-shift times as large; -1 where there is none."""
    values = torch.arange(256, dtype=torch.uint8, device="cpu").view(source.dtype).float() * 2.0**-shift
    nearest = values.to(target.dtype)
    exact = (nearest.float() == values) | values.isnan()
    return nearest.view(torch.uint8).short().masked_fill(~exact, -1)


def _check_exact(exact: Tensor, layout: KVCacheLayout, slots: Tensor) -> None:
    """exact: [n], whether the record in each slot is the same key in the other layout."""
    if not bool(exact.all()):
        expected = "a layout that holds every key without loss"
        actual = f"{layout.fingerprint}, which cannot hold slot {int(slots[~exact][0])}"
        hint = "keep the cache as it is and read it with its own layout, or convert only the slots in use"
        raise LayoutMismatchError("target", expected=expected, actual=actual, hint=hint)

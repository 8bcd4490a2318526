"""Calls whose records have chosen bytes: every code under every scale byte (promise G5), and NaN keys.

A row that selects a NaN key is NaN throughout, and no other row changes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import attrs
import numpy as np
import torch
from torch import Tensor

from dsv4attn.core.cache.layout import Fp8Format, KVCacheLayout
from dsv4attn.core.contract.backend import KeyForm, Phase
from dsv4attn.testing.case import Bench, Measure, SkipCase, Wrong
from dsv4attn.testing.checks.attention import judged
from dsv4attn.testing.kit.factories import flash, layout, normal
from dsv4attn.testing.kit.oracle_cache import OracleCache
from dsv4attn.testing.kit.single_call import IndexLists, SingleCall
from dsv4attn.testing.kit.strided import bits
from dsv4attn.testing.kit.tolerances import F64, U8, as_f64, hold_equal, worst_error, written
from dsv4attn.testing.oracle.attention import pack_e2m1

SCALES = range(10, 246)
"""Scale bytes under which every fp8 code is a normal bf16 number. A writer emits 105 to 254."""
SMALLEST_SCALES = range(10)
"""Scale bytes under which some codes are smaller than that. Other writers emit them: 0 for a block of zeros."""
LEAST = 2.0**-126
"""The smallest normal number of bf16 and fp32."""
E2M1_SCALES = (*range(0x7F), *range(0x80, 0xFF))
"""Scale bytes of e2m1 codes: all e4m3fn numbers, subnormal ones and negative ones too, which no writer emits."""


@attrs.frozen(kw_only=True, eq=False, slots=False)
class EveryCode(SingleCall):
    """A call with one key a row and q = 0, so that the output is the key.

    Row t of fp8 has scale byte t of `scales` over all 256 codes, and other scale bytes over the rest of its codes.
    Groups of e2m1 have all 16 codes each, and the scale bytes of E2M1_SCALES in turn.

    copies: more than one is how often a row lists its key at most, so that some rows are long enough to be split. Then
    every group has a scale byte of its own, far from those of its neighbours, and RoPE values of a row differ in size
    by up to 2^24. scales: scale bytes of fp8. Other fields are those of `SingleCall`.
    """

    copies: int = 1
    scales: Sequence[int] = SCALES

    @classmethod
    def of(cls, phase: Phase, cache: str, scales: Sequence[int] = SCALES, **changes: Any) -> EveryCode:  # noqa: ANN401 - fields
        """A window-only call with a row for each scale byte, or of e2m1 with a group for each."""
        records = layout(cache)
        rows = len(scales) if records.fp8_format else -(-len(E2M1_SCALES) // records.num_groups)
        fields = {"layout": records, "kind": "swa", "pattern": "one", "scales": scales, "rows": rows, **changes}
        return cls(phase=phase, geometry=flash("swa"), **fields)

    @classmethod
    def repeated(cls, phase: Phase, cache: str, rows: int, copies: int) -> EveryCode:
        """A window-only call whose rows list one key up to `copies` times."""
        return cls.of(phase, cache, rows=rows, copies=copies, window_columns=copies)

    def label(self, row: int) -> str:
        """A row, for messages."""
        return f"scale byte {self.scales[row]}" if self.layout.fp8_format else f"row {row}"

    @cached_property
    def records(self) -> list[U8]:
        """Bytes of each record, without NaN codes, which `NanKeys` tests."""
        random, shape = np.random.default_rng((self.seed, 30)), (self.rows, self.layout.plain_dims)
        if self.copies == 1:
            rope = random.integers(0x3F00, 0x4200, shape)
        else:
            # one octave of bf16 values, times powers of two: the exponent of bf16 begins at bit 7
            rope = random.integers(0x3F00, 0x3F80, shape) - (random.choice([0, 8, 16, 23], shape) << 7)
        codes, of_groups = self._fp8_codes() if self.layout.fp8_format else self._e2m1_codes(random)
        scales = np.zeros((self.rows, self.layout.scale_bytes), dtype=np.uint8)
        scales[:, : self.layout.num_groups] = of_groups
        return [*np.concatenate([codes, rope.astype("<u2").view(np.uint8), scales], 1)]

    def _fp8_codes(self) -> tuple[U8, U8]:
        """Codes [rows, dims], a byte for each coded dim, and scale bytes [rows, groups]."""
        nans = (0x80,) if self.layout.fp8_format is Fp8Format.FNUZ else (0x7F, 0xFF)
        codes = np.arange(self.layout.coded_dims, dtype=np.int64) % 256
        codes[np.isin(codes, nans)] = 0
        groups = np.arange(self.layout.num_groups) // (4 if self.copies == 1 else 1)
        numbers = (np.arange(self.rows)[:, None] + 29 * groups) % len(self.scales)
        return np.tile(codes.astype(np.uint8), (self.rows, 1)), np.array(self.scales, dtype=np.uint8)[numbers]

    def _e2m1_codes(self, random: np.random.Generator) -> tuple[U8, U8]:
        """As `_fp8_codes`, with two codes of 4 bits in a byte [rows, dims / 2]."""
        groups = np.arange(self.rows * self.layout.num_groups).reshape(self.rows, -1)
        codes = np.stack([random.permutation(np.arange(self.layout.group_size) % 16) for _ in groups.flat])
        packed = pack_e2m1(codes.astype(np.uint8).reshape(self.rows, -1))
        return packed, np.array(E2M1_SCALES, dtype=np.uint8)[groups % len(E2M1_SCALES)]

    @cached_property
    def oracle_caches(self) -> list[OracleCache]:
        """One cache, with a record for each row."""
        placement = self.placements[0]
        blocks = -(-self.rows // placement.block_size)
        oracle_cache = OracleCache.blank(self.layout, blocks, placement, self.device)
        return [oracle_cache.write_records(range(self.rows), self.records)]

    @cached_property
    def q(self) -> F64:
        """Zeros, so that no logit overflows."""
        return np.zeros((self.rows, self.layer.num_heads, self.layer.head_dim))

    @cached_property
    def index_lists(self) -> list[IndexLists]:
        """Row t names slot t."""
        slots = np.full((self.rows, max(self.copies, self.layer.window)), -1)
        slots[:, : self.copies] = np.arange(self.rows)[:, None]
        return [IndexLists(slots, 1 + np.arange(self.rows) * 271 % self.copies)]


def reads_every_code(bench: Bench, codes: EveryCode) -> Measure:
    """Attention over one key, or copies of it, returns the key: judged value by value, relative to its own size.

    A value below the smallest normal number may read as 0.
    """
    if codes.phase is Phase.PREFILL and bench.backend.capabilities.prefill_keys is KeyForm.GATHERED:
        raise SkipCase("does not apply: this backend reads gathered rows in prefill")
    out, _ = codes.run(attrs.evolve(bench, lse=False))
    read = as_f64(out)
    written_values = codes.oracle_caches[0].values[: codes.rows, None]
    sizes = np.abs(written_values)
    with np.errstate(invalid="ignore"):
        error, (row, head, dim) = worst_error(
            np.abs(read - written_values) / np.where(sizes < LEAST, 2.0**9 * LEAST, sizes)
        )
    where = f"{codes.label(row)}, dim {dim}: read {read[row, head, dim]:.6g}"
    return Measure(error, 2.0**-9).hold(f"{where}, wrote {written_values[row, 0, dim]:.6g}")


def gathers_every_code(bench: Bench, codes: EveryCode) -> Measure:
    """A gathered row has the bits of the key. A value below the smallest normal number may read as 0."""
    return _gathers(bench, codes.oracle_caches[0], codes.rows, codes.label)


def _gathers(bench: Bench, oracle_cache: OracleCache, count: int, where: Callable[[int], str]) -> Measure:
    """Gather the first records of a cache, and compare them with what the oracle reads. where: names a row."""
    bench.require_gathering()
    cache = oracle_cache.cache
    # other numbers than any record has, NaN included
    out = torch.full((1, count, cache.layout.head_dim), -math.inf, dtype=cache.layout.row_dtype, device=cache.device)
    table = torch.arange(cache.num_blocks, dtype=torch.int32, device=cache.device)[None]
    lens = torch.tensor([count], dtype=torch.int32, device=cache.device)
    bench.backend.dequantize_and_gather_k_cache(out, cache, lens, None, table, 0)
    read, expected = out[0].double().cpu(), oracle_cache.values[:count]
    right = torch.from_numpy(expected)
    is_small = (right.abs() < LEAST) & ((read - right).abs() <= LEAST)
    return hold_equal(torch.where(is_small, right, read), expected, lambda place: f"{where(place[0])}, dim {place[1]}")


CLEAN = 16
"""Slots of each cache that are never spoiled; row t has slot CLEAN + t for itself."""
Spoil = tuple[str, int, bytes]
"""The part of a record that is NaN, the offset of its first byte, and the bytes that make it NaN."""
ZEROS = ", over codes of 0"
"""How the name of a part ends whose record has codes of zeros only, as another packer writes a block of tiny values."""


def spoils(layout: KVCacheLayout) -> list[Spoil]:
    """A NaN code in each group and at each place of a word, NaN scales of some groups, and NaN RoPE values.

    Codes of e2m1 have no NaN: NaN scales of all groups, then.
    """
    if not layout.is_quantised:
        size = layout.dtype.itemsize
        nan = b"\xc0\x7f" if size == 2 else b"\x00\x00\xc0\x7f"
        return [(f"value of dim {dim}", dim * size, nan) for dim in (0, layout.nope_dim, layout.head_dim - 1)]
    scale = b"\xff" if layout.fp8_format else b"\x7f"
    # some records hold RoPE values as codes
    tail = [(0, b"\xc1\xff"), (layout.plain_dims - 1, b"\x81\x7f")] if layout.plain_dims else []
    groups = layout.num_groups
    ropes = [(f"RoPE value {i}", layout.code_bytes + 2 * i, nan) for i, nan in tail]
    ropes += [(f"scale of group {g}{ZEROS}", layout.data_bytes + g, scale) for g in (0, groups - 1)]
    if layout.fp8_format is None:
        return [(f"scale of group {g}", layout.data_bytes + g, scale) for g in range(groups)] + ropes
    codes = (0x80, 0x80) if layout.fp8_format is Fp8Format.FNUZ else (0x7F, 0xFF)
    last = layout.coded_dims - 1
    dims = [min(g * layout.group_size + 5 * g % 4, last) for g in range(groups)] + [last]
    parts = [(f"code 0x{codes[i % 2]:02X} of dim {dim}", dim, bytes([codes[i % 2]])) for i, dim in enumerate(dims)]
    parts += [(f"scale of group {g}", layout.data_bytes + g, scale) for g in (0, groups // 2, groups - 1)]
    return parts + ropes


@attrs.frozen(kw_only=True, eq=False, slots=False)
class NanKeys(SingleCall):
    """Rows with one key of their own each, among clean keys. Three rows of four name it, the fourth does not.

    spoil: whether the rows' own keys are spoiled. Other fields are those of `SingleCall`.
    """

    spoil: bool = False

    @classmethod
    def of(cls, phase: Phase, cache: str, kind: str) -> NanKeys:
        """A call on caches of one layout."""
        records_layout = layout(cache)
        rows = len(spoils(records_layout)) * 4 // 3 + 1
        return cls(
            phase=phase, geometry=flash(kind), layout=records_layout, kind=kind, columns=8, rows=rows, sinks=[0.5] * 8
        )

    def owner(self, row: int) -> int:
        """Segment that has the row's own key."""
        return row % len(self.widths)

    def named_own(self, row: int) -> bool:
        """Whether the row attends its own key."""
        return row % 4 != 3

    def what(self, row: int) -> Spoil:
        """The NaN of the row's own key."""
        parts = spoils(self.layout)
        return parts[(row - row // 4) % len(parts)]

    @cached_property
    def keys(self) -> list[F64]:
        """[CLEAN + rows, D] keys of each cache."""
        slots = np.arange(CLEAN + self.rows)
        return [normal((self.seed, 40, i), slots, self.layer.head_dim) for i in range(len(self.widths))]

    @cached_property
    def oracle_caches(self) -> list[OracleCache]:
        """The caches."""
        caches = []
        for i, (placement, keys) in enumerate(zip(self.placements, self.keys, strict=False)):
            oracle_cache = OracleCache.blank(self.layout, -(-len(keys) // placement.block_size), placement, self.device)
            oracle_cache.write(range(len(keys)), keys)
            for row in range(self.rows if self.spoil else 0):
                if self.owner(row) == i:
                    self._spoil(oracle_cache, row, keys[CLEAN + row])
            caches.append(oracle_cache)
        return caches

    def _spoil(self, oracle_cache: OracleCache, row: int, key: F64) -> None:
        name, at, nan = self.what(row)
        if not self.layout.is_quantised:
            key = key.copy()
            key[at // self.layout.dtype.itemsize] = np.nan
            oracle_cache.write([CLEAN + row], key[None])
            return
        record: U8 = written(np.zeros_like(key) if name.endswith(ZEROS) else key, self.layout).copy()
        record[at : at + len(nan)] = np.frombuffer(nan, dtype=np.uint8)
        with np.errstate(invalid="ignore"):
            # converting a signalling NaN warns
            oracle_cache.write_records([CLEAN + row], [record])

    @cached_property
    def index_lists(self) -> list[IndexLists]:
        """Row t has one to five clean keys a segment. One segment has its own key, among them or past the length."""
        rng = np.random.default_rng((self.seed, 41))
        lists = []
        for i, width in enumerate(self.widths):
            slots, lens = np.full((self.rows, width), -1), np.zeros(self.rows, dtype=np.int64)
            for row in range(self.rows):
                n = 1 + row % 5
                listed = list(rng.choice(CLEAN, n, replace=False))
                is_owner = self.owner(row) == i
                at = rng.integers(0, n + 1) if self.named_own(row) else n
                slots[row, : n + is_owner] = listed[:at] + [CLEAN + row] * is_owner + listed[at:]
                lens[row] = n + (is_owner and self.named_own(row))
            lists.append(IndexLists(slots, lens))
        return lists


def shows_nan(bench: Bench, call: NanKeys) -> Measure:
    """Rows that name a spoiled key are NaN throughout; all others have the bits that they have without it."""
    clean = _run(bench, call)
    spoilt = _run(bench, attrs.evolve(call, spoil=True))
    _compare(call, clean, spoilt, [call.what(row)[0] for row in range(call.rows)])
    return judged(call, (clean["out"], clean.get("lse")))


def _run(bench: Bench, call: NanKeys) -> dict[str, Tensor]:
    """Results of a call by their names."""
    top = None
    if bench.backend.capabilities.max_logits:
        top = torch.zeros(call.rows, call.layer.num_heads, dtype=torch.float32, device=call.device)
    out, lse = call.run(bench, max_logits=top)
    named = {"out": out, "lse": lse, "max_logits": top}
    return {name: tensor for name, tensor in named.items() if tensor is not None}


def _compare(call: NanKeys, clean: dict[str, Tensor], spoilt: dict[str, Tensor], what: Sequence[str]) -> None:
    """what: the NaN part of each row's own key."""
    for name, tensor in spoilt.items():
        for row in range(call.rows):
            numbers = tensor[row][~tensor[row].isnan()]
            if not call.named_own(row):
                if not torch.equal(bits(tensor[row]), bits(clean[name][row])):
                    raise Wrong(f"{name} of row {row} changed with a key past its length, whose {what[row]} is NaN")
            elif numbers.numel():
                got = f"{float(numbers[0]):.6g}, expected NaN"
                raise Wrong(f"{name} of row {row}, which names a key whose {what[row]} is NaN: {got}")


def gathers_nan(bench: Bench, call: NanKeys) -> Measure:
    """Gathered rows are NaN where their records are, and nowhere else."""
    return _gathers(bench, attrs.evolve(call, spoil=True).oracle_caches[0], len(call.keys[0]), "slot {}".format)


def inserts_nan(fused: bool, bench: Bench, call: NanKeys) -> Measure:  # noqa: FBT001
    """Keys that hold a NaN are written so that they read as NaN, and other keys are not harmed."""
    clean, spoiled = _run(bench, call), attrs.evolve(call)
    rope, dim = call.layer.rope_dim, call.layer.head_dim
    dims = [row * 37 % dim for row in range(call.rows)]
    for i, (oracle_cache, keys) in enumerate(zip(spoiled.oracle_caches, call.keys, strict=True)):
        rows = [row for row in range(call.rows) if call.owner(row) == i]
        values = keys[[CLEAN + row for row in rows]].copy()
        values[np.arange(len(rows)), [dims[row] for row in rows]] = np.nan
        k = torch.from_numpy(values).to(call.device, torch.bfloat16)
        slots = torch.tensor([CLEAN + row for row in rows], device=call.device, dtype=torch.int64)
        if fused:
            q = torch.zeros(len(rows), call.layer.num_heads, dim, dtype=torch.bfloat16, device=call.device)
            # of position 0, where nothing is turned
            table = torch.tensor([[1.0] * (rope // 2) + [0.0] * (rope // 2)], device=call.device, dtype=torch.float32)
            positions = torch.zeros(len(rows), dtype=torch.int64, device=call.device)
            bench.backend.qnorm_rope_kv_insert(q, k, oracle_cache.cache, slots, positions, table, call.layer.q_eps)
        else:
            bench.backend.quantize_and_insert_k_cache(k, oracle_cache.cache, slots)
    _compare(call, clean, _run(bench, spoiled), [f"dim {dims[row]}" for row in range(call.rows)])
    return judged(call, (clean["out"], clean.get("lse")))

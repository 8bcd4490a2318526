"""Cases of NaN keys: a row that selects a NaN key is NaN throughout, on every path, and no other row changes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property, partial

import attrs
import numpy as np
import torch
from torch import Tensor

from dsv4attn.core.cache.layout import Fp8Format, KVCacheLayout
from dsv4attn.core.contract.backend import KeyForm, Phase
from dsv4attn.testing.case import Area, Bench, Case, Check, Measure, SkipCase, Wrong
from dsv4attn.testing.check_attention import bits, judged
from dsv4attn.testing.factories import flash, layout
from dsv4attn.testing.oracle_cache import OracleCache
from dsv4attn.testing.random_step import normal
from dsv4attn.testing.single_call import IndexLists, SingleCall
from dsv4attn.testing.tolerances import F64, U8, written

__all__ = ["NanKeys", "gathers_nan", "inserts_nan", "nan_cases", "shows_nan"]

CLEAN = 16
"""Slots of each cache that are never spoiled; row t has slot CLEAN + t for itself."""
Spoil = tuple[str, int, bytes]
"""The part of a record that is NaN, the offset of its first byte, and the bytes that make it NaN."""


def spoils(layout: KVCacheLayout) -> list[Spoil]:
    """A NaN code in each group and at each place of a word, NaN scales of some groups, and NaN RoPE values."""
    if not layout.is_quantised:
        size = layout.dtype.itemsize
        nan = b"\xc0\x7f" if size == 2 else b"\x00\x00\xc0\x7f"
        return [(f"value of dim {dim}", dim * size, nan) for dim in (0, layout.nope_dim, layout.head_dim - 1)]
    codes = (0x80, 0x80) if layout.fp8_format is Fp8Format.FNUZ else (0x7F, 0xFF)
    groups, last = layout.num_groups, layout.nope_dim - 1
    dims = [min(g * layout.group_size + 5 * g % 4, last) for g in range(groups)] + [last]
    found = [(f"code 0x{codes[i % 2]:02X} of dim {dim}", dim, bytes([codes[i % 2]])) for i, dim in enumerate(dims)]
    found += [(f"scale of group {g}", layout.data_bytes + g, b"\xff") for g in (0, groups // 2, groups - 1)]
    tail = [(0, b"\xc1\xff"), (layout.rope_dim - 1, b"\x81\x7f")]
    return found + [(f"RoPE value {i}", layout.nope_dim + 2 * i, nan) for i, nan in tail]


@attrs.frozen(kw_only=True, eq=False, slots=False)
class NanKeys(SingleCall):
    """Rows with one key of their own each, among clean keys. Three rows of four name it, the fourth does not.

    spoil: whether the rows' own keys are spoiled. Other fields are those of `SingleCall`.
    """

    spoil: bool = False

    @classmethod
    def of(cls, phase: Phase, cache: str, kind: str) -> NanKeys:
        """A call on caches of one layout."""
        made = layout(cache)
        rows = len(spoils(made)) * 4 // 3 + 1
        return cls(phase=phase, geometry=flash(kind), layout=made, kind=kind, columns=8, rows=rows, sinks=[0.5] * 8)

    def owner(self, row: int) -> int:
        """Segment that has the row's own key."""
        return row % len(self.widths)

    def named_own(self, row: int) -> bool:
        """Whether the row attends its own key."""
        return row % 4 != 3

    def what(self, row: int) -> Spoil:
        """The NaN of the row's own key."""
        found = spoils(self.layout)
        return found[(row - row // 4) % len(found)]

    @cached_property
    def keys(self) -> list[F64]:
        """[CLEAN + rows, D] keys of each cache."""
        slots = np.arange(CLEAN + self.rows)
        return [normal((self.seed, 40, i), slots, self.layer.head_dim) for i in range(len(self.widths))]

    @cached_property
    def oracle_caches(self) -> list[OracleCache]:
        """The caches."""
        made = []
        for i, (placement, keys) in enumerate(zip(self.placements, self.keys, strict=False)):
            oracle_cache = OracleCache.blank(self.layout, -(-len(keys) // placement.block_size), placement, self.device)
            oracle_cache.write(range(len(keys)), keys)
            for row in range(self.rows if self.spoil else 0):
                if self.owner(row) == i:
                    self._spoil(oracle_cache, row, keys[CLEAN + row])
            made.append(oracle_cache)
        return made

    def _spoil(self, oracle_cache: OracleCache, row: int, key: F64) -> None:
        _, at, nan = self.what(row)
        if not self.layout.is_quantised:
            key = key.copy()
            key[at // self.layout.dtype.itemsize] = np.nan
            oracle_cache.write([CLEAN + row], key[None])
            return
        record: U8 = written(key, self.layout).copy()
        record[at : at + len(nan)] = np.frombuffer(nan, dtype=np.uint8)
        with np.errstate(invalid="ignore"):
            # converting a signalling NaN warns
            oracle_cache.write_records([CLEAN + row], [record])

    @cached_property
    def index_lists(self) -> list[IndexLists]:
        """Row t has one to five clean keys in each segment, and its own in one: somewhere among them, or behind."""
        rng = np.random.default_rng((self.seed, 41))
        made = []
        for i, width in enumerate(self.widths):
            slots, lens = np.full((self.rows, width), -1), np.zeros(self.rows, dtype=np.int64)
            for row in range(self.rows):
                n = 1 + row % 5
                listed = list(rng.choice(CLEAN, n, replace=False))
                own = self.owner(row) == i
                at = rng.integers(0, n + 1) if self.named_own(row) else n
                slots[row, : n + own] = listed[:at] + [CLEAN + row] * own + listed[at:]
                lens[row] = n + (own and self.named_own(row))
            made.append(IndexLists(slots, lens))
        return made


def shows_nan(bench: Bench, call: NanKeys) -> Measure:
    """Rows that name a spoiled key are NaN throughout; all others have the bits that they have without it."""
    clean = _run(bench, call)
    found = _run(bench, attrs.evolve(call, spoil=True))
    _compare(call, clean, found, [call.what(row)[0] for row in range(call.rows)])
    return judged(call, (clean["out"], clean.get("lse")))


def _run(bench: Bench, call: NanKeys) -> dict[str, Tensor]:
    """Results of a call by their names."""
    top = None
    if bench.backend.forms.max_logits:
        top = torch.zeros(call.rows, call.layer.num_heads, dtype=torch.float32, device=call.device)
    out, lse = call.run(bench, max_logits=top)
    named = {"out": out, "lse": lse, "max_logits": top}
    return {name: tensor for name, tensor in named.items() if tensor is not None}


def _compare(call: NanKeys, clean: dict[str, Tensor], found: dict[str, Tensor], what: Sequence[str]) -> None:
    """what: the NaN part of each row's own key."""
    for name, tensor in found.items():
        for row in range(call.rows):
            numbers = tensor[row][~tensor[row].isnan()]
            if not call.named_own(row):
                if not torch.equal(bits(tensor[row]), bits(clean[name][row])):
                    raise Wrong(f"{name} of row {row} changed with a key behind its length, whose {what[row]} is NaN")
            elif numbers.numel():
                got = f"{float(numbers[0]):.6g}, expected NaN"
                raise Wrong(f"{name} of row {row}, which names a key whose {what[row]} is NaN: {got}")


def gathers_nan(bench: Bench, call: NanKeys) -> Measure:
    """Gathered rows are NaN where their records are, and nowhere else."""
    if bench.backend.forms.prefill_keys is not KeyForm.GATHERED:
        raise SkipCase("does not apply: this backend reads pages in prefill and gathers nothing")
    oracle_cache, count = attrs.evolve(call, spoil=True).oracle_caches[0], len(call.keys[0])
    out = torch.zeros(1, count, call.layer.head_dim, dtype=call.layout.row_dtype, device=call.device)
    table = torch.arange(oracle_cache.cache.num_blocks, dtype=torch.int32, device=call.device)[None]
    lens = torch.tensor([count], dtype=torch.int32, device=call.device)
    bench.backend.dequantize_and_gather_k_cache(out, oracle_cache.cache, lens, None, table, 0)
    found, wanted = out[0].double().cpu().numpy(), oracle_cache.values[:count]
    same = (found == wanted) | (np.isnan(found) & np.isnan(wanted))
    if not same.all():
        slot, dim = (int(axis[0]) for axis in (~same).nonzero())
        raise Wrong(f"slot {slot}, dim {dim}: read {found[slot, dim]:.6g}, wrote {wanted[slot, dim]:.6g}")
    return Measure()


def inserts_nan(fused: bool, bench: Bench, call: NanKeys) -> Measure:  # noqa: FBT001
    """Keys that hold a NaN are written so that they read as NaN; keys written beside them are not harmed."""
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


def nan_cases() -> Iterator[Case]:
    """All cases of NaN keys."""
    for phase in Phase:
        for cache in ("ocp", "fnuz", "interleaved", "bf16"):
            says = f"{phase.value} of {cache} keys: a NaN in a selected key makes its rows NaN, and harms no other row"
            yield Case(
                name=f"nan-{cache}-{phase.value}",
                area=Area(phase.value),
                clauses="C8 C6",
                says=says,
                # one kind with two segments is enough, since all kinds are read in the same way
                inputs=NanKeys.of(phase, cache, "c4a" if cache == "ocp" else "swa"),
                check=shows_nan,
            )
    for cache in ("ocp", "fnuz", "interleaved"):
        says = f"NaN codes, scales and RoPE values of {cache} records are gathered as NaN"
        inputs = NanKeys.of(Phase.PREFILL, cache, "swa")
        yield _cache(f"nan-{cache}-gather", "C8 R1", says, inputs, gathers_nan)
    for cache in ("ocp", "fnuz", "bf16"):
        for name, fused in (("quantise", False), ("insert", True)):
            says = f"keys that hold a NaN are written to {cache} records that read as NaN, and the others as they are"
            inputs = attrs.evolve(NanKeys.of(Phase.DECODE, cache, "swa"), rows=5)
            yield _cache(f"nan-{cache}-{name}", "C8", says, inputs, partial(inserts_nan, fused))


def _cache(name: str, clauses: str, says: str, inputs: NanKeys, check: Check) -> Case:
    return Case(name=name, area=Area.CACHE, clauses=clauses, says=says, inputs=inputs, check=check)

"""Every fp8 code under every scale byte, read by attention and by gathering (promise G5)."""

from __future__ import annotations

import math
from functools import cached_property

import attrs
import numpy as np
import torch

from dsv4attn.core.cache.layout import Fp8Format
from dsv4attn.core.contract.backend import KeyForm, Phase
from dsv4attn.testing.case import Bench, Measure, SkipCase, Wrong
from dsv4attn.testing.oracle_cache import OracleCache
from dsv4attn.testing.single_call import IndexLists, SingleCall
from dsv4attn.testing.tolerances import F64, U8

__all__ = ["SCALES", "Fp8Codes", "gathers_every_code", "reads_every_code"]

SCALES = range(10, 246)
"""Scale bytes under which every code is a normal bf16 number. A writer emits 105 to 254."""


@attrs.frozen(kw_only=True, eq=False, slots=False)
class Fp8Codes(SingleCall):
    """A call with one key a row and q = 0, so that the output is the key.

    Row t has the scale byte SCALES[t] over all 256 codes, and other scale bytes over the rest of its codes.

    copies: more than one is how often a row lists its key at most, so that some rows are long enough to be split. Then
    every group has a scale byte of its own, far from those of its neighbours, and RoPE values of a row differ in size
    by up to 2^24. Other fields are those of `SingleCall`.
    """

    copies: int = 1

    @classmethod
    def of(cls, **fields: object) -> Fp8Codes:
        """A window-only call with a row for each scale byte."""
        return cls(kind="swa", pattern="one", rows=len(SCALES), **fields)  # type: ignore[arg-type]

    @classmethod
    def repeated(cls, rows: int, copies: int, **fields: object) -> Fp8Codes:
        """A window-only call whose rows list one key up to `copies` times."""
        return cls(kind="swa", pattern="one", rows=rows, copies=copies, window_columns=copies, **fields)  # type: ignore[arg-type]

    @cached_property
    def records(self) -> list[U8]:
        """Bytes of each record, without NaN codes; `cases_nan` tests those."""
        layout = self.layout
        nans = (0x80,) if layout.fp8_format is Fp8Format.FNUZ else (0x7F, 0xFF)
        codes = np.arange(layout.coded_dims, dtype=np.int64) % 256
        codes[np.isin(codes, nans)] = 0
        random, shape = np.random.default_rng((self.seed, 30)), (self.rows, layout.plain_dims)
        if self.copies == 1:
            rope = random.integers(0x3F00, 0x4200, shape)
        else:
            # one octave of bf16 values, times powers of two: the exponent of bf16 begins at bit 7
            rope = random.integers(0x3F00, 0x3F80, shape) - (random.choice([0, 8, 16, 23], shape) << 7)
        made = []
        same = 4 if self.copies == 1 else 1
        for row in range(self.rows):
            scales = np.zeros(layout.scale_bytes, dtype=np.uint8)
            for group in range(layout.num_groups):
                scales[group] = SCALES[(row + 29 * (group // same)) % len(SCALES)]
            data = [codes.astype(np.uint8), rope[row].astype("<u2").view(np.uint8), scales]
            made.append(np.concatenate(data))
        return made

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


def reads_every_code(bench: Bench, codes: Fp8Codes) -> Measure:
    """Attention over one key, or copies of it, returns the key: judged value by value, relative to its own size."""
    if codes.phase is Phase.PREFILL and bench.backend.forms.prefill_keys is KeyForm.GATHERED:
        raise SkipCase("does not apply: this backend reads gathered rows in prefill")
    out, _ = codes.run(attrs.evolve(bench, lse=False))
    found = out.double().cpu().numpy()
    wanted = codes.oracle_caches[0].values[: codes.rows, None]
    with np.errstate(invalid="ignore"):
        errors = np.abs(found - wanted) / np.maximum(np.abs(wanted), 2.0**-126)
    errors = np.where(np.isnan(errors), math.inf, errors)
    row, head, dim = np.unravel_index(errors.argmax(), errors.shape)
    where = f"scale byte {SCALES[row]}, dim {dim}: read {found[row, head, dim]:.6g}, wrote {wanted[row, 0, dim]:.6g}"
    return Measure(float(errors.max()), 2.0**-9).hold(where)


def gathers_every_code(bench: Bench, codes: Fp8Codes) -> Measure:
    """A gathered row has the bits of the key."""
    if bench.backend.forms.prefill_keys is not KeyForm.GATHERED:
        raise SkipCase("does not apply: this backend reads pages in prefill and gathers nothing")
    oracle_cache = codes.oracle_caches[0]
    device = oracle_cache.cache.device
    out = torch.full((1, codes.rows, codes.layer.head_dim), math.nan, dtype=torch.bfloat16, device=device)
    table = torch.arange(oracle_cache.cache.num_blocks, dtype=torch.int32, device=device)[None]
    lens = torch.tensor([codes.rows], dtype=torch.int32, device=device)
    bench.backend.dequantize_and_gather_k_cache(out, oracle_cache.cache, lens, None, table, 0)
    found, wanted = out[0].double().cpu().numpy(), oracle_cache.values[: codes.rows]
    if not np.array_equal(found, wanted):
        row, dim = (int(axis[0]) for axis in (found != wanted).nonzero())
        raise Wrong(f"scale byte {SCALES[row]}, dim {dim}: read {found[row, dim]:.6g}, wrote {wanted[row, dim]:.6g}")
    return Measure()

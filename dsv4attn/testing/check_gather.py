"""Checks of the cases of `dequantize_and_gather_k_cache`: gathered rows against the oracle's records."""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dsv4attn.core.contract.backend import KeyForm
from dsv4attn.testing.case import Bench, Measure, SkipCase, Wrong
from dsv4attn.testing.check_insert import CacheRows
from dsv4attn.testing.oracle_cache import OracleCache
from dsv4attn.testing.random_step import normal
from dsv4attn.testing.tolerances import F64

__all__ = ["gathers", "gathers_long"]

LONG = 2**14
"""Columns of a long block table: with pages of 64 records, a sequence of 2^20."""


def gathers(bench: Bench, rows: CacheRows) -> Measure:
    """`dequantize_and_gather_k_cache` makes rows of records bit for bit, and touches no other row."""
    if bench.backend.forms.prefill_keys is not KeyForm.GATHERED:
        raise SkipCase("does not apply: this backend reads pages in prefill and gathers nothing")
    size = rows.placement.block_size
    oracle_cache = rows.blank().write(np.arange(rows.blocks * size), _book_rows(rows))
    rng = np.random.default_rng((rows.seed, 26))
    seq_lens, takes = 1 + np.arange(rows.requests) % 3, np.ones(rows.requests, dtype=np.int64)
    seq_lens[:5], takes[:5] = [2 * size, 1, 0, size + 1, 3 * size // 2], [size + 1, 1, 0, 2, 0]
    # as in engines: a column slice of a wider table, with -1 and garbage where there is no block
    tables = np.stack([rng.permutation(rows.blocks) for _ in seq_lens])[:, :3]
    table = rows.tensor(np.concatenate([tables, np.full((len(tables), 4), 2**30)], 1)).int()[:, : tables.shape[1] + 1]
    for lens, offset in ((None, 0), (takes, 5)):
        _gather(bench, rows, oracle_cache, tables, table, seq_lens, lens, offset)
    return Measure()


def gathers_long(bench: Bench, rows: CacheRows) -> Measure:
    """More than 1,024 records of a request, and the last ones of sequences whose block table is long."""
    if bench.backend.forms.prefill_keys is not KeyForm.GATHERED:
        raise SkipCase("does not apply: this backend reads pages in prefill and gathers nothing")
    size = rows.placement.block_size
    oracle_cache = rows.blank().write(np.arange(rows.blocks * size), _book_rows(rows))
    seq_lens, takes = np.array([LONG * size, 1031 * size - 3, 70]), np.array([3, 1031, 70])
    tables = np.random.default_rng((rows.seed, 29)).integers(0, rows.blocks, (3, LONG))
    _gather(bench, rows, oracle_cache, tables, rows.tensor(tables).int(), seq_lens, takes, 2)
    return Measure()


def _gather(
    bench: Bench,
    rows: CacheRows,
    oracle_cache: OracleCache,
    tables: NDArray[np.int64],
    table: Tensor,
    seq_lens: NDArray[np.int64],
    lens: NDArray[np.int64] | None,
    offset: int,
) -> None:
    """Gather, and compare every row with the oracle cache."""
    size, taken = rows.placement.block_size, seq_lens if lens is None else lens
    shape = len(seq_lens), offset + int(taken.max()) + 4, rows.layer.head_dim
    out = torch.full(shape, math.nan, dtype=rows.layout.row_dtype, device=rows.device)
    wanted = out.double().cpu().numpy()
    gather = None if lens is None else rows.tensor(lens).int()
    bench.backend.dequantize_and_gather_k_cache(
        out, oracle_cache.cache, rows.tensor(seq_lens).int(), gather, table, offset
    )
    for i, (length, count) in enumerate(zip(seq_lens, taken, strict=True)):
        for j in range(count):
            position = length - count + j
            wanted[i, offset + j] = oracle_cache.values[tables[i, position // size] * size + position % size]
    found = out.double().cpu().numpy()
    same = (found == wanted) | (np.isnan(found) & np.isnan(wanted))
    if not same.all():
        request, row, column = (int(axis[0]) for axis in (~same).nonzero())
        got, want = found[request, row, column], wanted[request, row, column]
        raise Wrong(f"request {request}, row {row}, column {column}: {got:.6g}, expected {want:.6g}")


def _book_rows(rows: CacheRows) -> F64:
    return normal((rows.seed, 27), np.arange(rows.blocks * rows.placement.block_size), rows.layer.head_dim)

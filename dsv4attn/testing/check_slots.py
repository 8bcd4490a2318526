"""Checks of inserts with slots that are negative, do not exist, or become other slots in 32 bits: all are skipped."""

from __future__ import annotations

import attrs
import numpy as np
import torch
from numpy.typing import NDArray

from dsv4attn.core.cache.layout import PagedKVCache
from dsv4attn.testing.case import Bench, Measure, Wrong
from dsv4attn.testing.check_insert import CacheRows, insert, judge_queries, judge_records, same_pages
from dsv4attn.testing.oracle_cache import OracleCache, place_of
from dsv4attn.testing.random_step import STALE_POSITIONS

__all__ = [
    "far_inserts",
    "far_rotated",
    "inserts_only_its_slots",
    "inserts_without_positions_of_padding",
    "stale_rows",
    "writes_only_its_slots",
]

I64 = NDArray[np.int64]


def _wild(rows: CacheRows) -> I64:
    """Slots of all rows but the last five. Some do not exist, and truncation to 32 bits would make them free slots."""
    capacity = rows.blocks * rows.placement.block_size
    free = np.setdiff1d(np.arange(capacity), rows.slots)
    slots: I64 = rows.slots[: rows.count - 5].copy()
    slots[[0, 3, 4, 9, 12]] = [-1, -7, capacity, 2**40, -(2**40)]
    slots[[15, 16, 20, 21]] = [2**32 + free[0], -(2**32) + free[1], capacity + 3, -(2**63)]
    return slots


def _with_a_page_behind(rows: CacheRows) -> tuple[OracleCache, PagedKVCache]:
    """A cache inside a larger one, whose last page is not the cache's."""
    oracle_cache = attrs.evolve(rows, blocks=rows.blocks + 1).blank()
    return oracle_cache, PagedKVCache(oracle_cache.cache.tensor[:-1], rows.layout)


def writes_only_its_slots(bench: Bench, rows: CacheRows) -> Measure:
    """Slots that are negative or do not exist, and rows behind the slots, write nothing."""
    slots = _wild(rows)
    live = _live(rows, slots)
    (wanted, _), (oracle_cache, cache) = _with_a_page_behind(rows), _with_a_page_behind(rows)
    wanted.write(slots[live], rows.keys[live])
    bench.backend.quantize_and_insert_k_cache(
        rows.tensor(rows.keys, rows.dtype)[: len(slots)], cache, rows.tensor(slots)
    )
    return same_pages(rows, oracle_cache.bytes(), wanted.bytes())


def inserts_only_its_slots(bench: Bench, rows: CacheRows) -> Measure:
    """In the fused step all queries are processed, keys with real slots are written, and nothing else is."""
    slots = _wild(rows)
    oracle_cache, cache = _with_a_page_behind(rows)
    before = oracle_cache.bytes()
    measure = judge_queries(rows, insert(bench, rows, cache, slots))
    size = rows.placement.block_size
    allowed = np.zeros(before.shape, dtype=bool)
    for slot in slots[_live(rows, slots)]:
        allowed[int(slot) // size, place_of(rows.layout, int(slot) % size, size)] = True
    wrong = np.argwhere((oracle_cache.bytes() != before) & ~allowed)
    if len(wrong):
        page, byte = wrong[0].tolist()
        raise Wrong(f"{len(wrong)} bytes were written that belong to no slot of the step, first {byte} of page {page}")
    return max(measure, judge_records(rows, oracle_cache, slots), key=lambda m: m.fraction)


def stale_rows(rows: int, positions: I64) -> tuple[NDArray[np.bool_], I64]:
    """(which of some rows are padding: every third and the last five; positions, stale in these)."""
    number = np.arange(rows)
    padding = (number % 3 == 1) | (number >= rows - 5)
    return padding, np.where(padding, np.resize(STALE_POSITIONS, rows), positions)


def inserts_without_positions_of_padding(bench: Bench, rows: CacheRows) -> Measure:
    """Positions of padding change no other row of q, and no byte of the cache."""
    padding, positions = stale_rows(rows.count, rows.positions)
    slots = np.where(padding, -1, rows.slots)
    oracle_cache, other = rows.blank(), rows.blank()
    q, wanted = insert(bench, rows, oracle_cache.cache, slots, positions), insert(bench, rows, other.cache, slots)
    live = rows.tensor(np.flatnonzero(~padding))
    if not torch.equal(q[live], wanted[live]):
        raise Wrong("a position of padding changed q of another row")
    return same_pages(rows, oracle_cache.bytes(), other.bytes())


def _live(rows: CacheRows, slots: I64) -> I64:
    return np.flatnonzero((slots >= 0) & (slots < rows.blocks * rows.placement.block_size))


def far_inserts(bench: Bench, rows: CacheRows) -> Measure:
    """Records are written to pages behind 2^31 and 2^32 bytes."""
    wanted = rows.blank().write(rows.slots, rows.keys).bytes()
    oracle_cache = rows.blank()
    bench.backend.quantize_and_insert_k_cache(
        rows.tensor(rows.keys, rows.dtype), oracle_cache.cache, rows.tensor(rows.slots)
    )
    return same_pages(rows, oracle_cache.bytes(), wanted)


def far_rotated(bench: Bench, rows: CacheRows) -> Measure:
    """The fused step writes records to pages behind 2^31 and 2^32 bytes."""
    oracle_cache = rows.blank()
    insert(bench, rows, oracle_cache.cache, rows.slots)
    return judge_records(rows, oracle_cache, rows.slots)

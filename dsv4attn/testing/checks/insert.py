"""Checks of the ops that write records: insert, quantise, norm and rotation, with slots that exist or do not."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import attrs
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dsv4attn.core.cache.layout import PagedKVCache
from dsv4attn.core.contract.problem import CacheFacts, Problem
from dsv4attn.core.model.geometry import LayerGeometry, LayerKind
from dsv4attn.testing.case import Bench, Measure, Wrong, dtype_name, worst_of
from dsv4attn.testing.kit.factories import HEADS, CaseInput, cos_sin_table, flash, layout, normal, window_of
from dsv4attn.testing.kit.oracle_cache import OracleCache, PagePlacement, place_of
from dsv4attn.testing.kit.random_step import STALE_POSITIONS
from dsv4attn.testing.kit.strided import StridedTensors, unchanged
from dsv4attn.testing.kit.tolerances import F64, as_f64, first_difference, floats, rounded, worst_error
from dsv4attn.testing.oracle import attention as oracle

BF16, FP32_STEPS = 2.0**-8, 2.0**-20
"""Largest relative error of one rounding to bf16, and of the few fp32 operations before it."""
POSITIONS, FAR_POSITIONS = 64, 70_000
"""Rows of the table of cosines and sines, in most cases and in those whose positions need more than 16 bits. Its angles
are random, so that only a backend that reads it is right."""


@attrs.frozen(kw_only=True, eq=False, slots=False)
class CacheRows(CaseInput):
    """Rows to write, read, rotate or project; the check gives them their meaning.

    layout: layout of the cache.
    kind: kind of the layer.
    placement: placement of the pages.
    blocks: pages of the cache.
    count: number of rows.
    dtype: type of queries, keys and outputs.
    groups: groups of heads in the output projection.
    size: scale of the queries; with small ones eps matters.
    requests: requests of a gather.
    table_rows: rows of the table of cosines and sines; positions are below it.
    weight_dtype: type of the weights of the output projection; None means that of its input.
    rank: elements that the output projection makes of each group.
    hidden: elements of the projection's result; 0 leaves out wo_b.
    scale: type of block scales (fp32, e8m0, bytes), and weights are fp8; "" means that they are not.
    block: rows and columns under one of these scales.
    fnuz: whether those codes are FNUZ rather than OCP.
    ranks: devices that each project some of the groups of heads.
    """

    kind: LayerKind = attrs.field(default=LayerKind.SWA, converter=LayerKind)
    placement: PagePlacement = attrs.Factory(lambda: PagePlacement(64))
    blocks: int = 3
    count: int = 40
    dtype: torch.dtype = torch.bfloat16
    groups: int = 2
    size: float = 1.0
    requests: int = 5
    table_rows: int = POSITIONS
    weight_dtype: torch.dtype | None = None
    rank: int = 16
    hidden: int = 0
    scale: str = ""
    block: int = 128
    fnuz: bool = False
    ranks: int = 1

    @property
    def layer_of_rank(self) -> LayerGeometry:
        """The layer of one of `ranks` devices."""
        return attrs.evolve(self.layer, num_heads=self.layer.num_heads // self.ranks)

    def problems(self, *, lse: bool = True) -> list[Problem]:
        """A decode step on this cache: a backend takes both or neither."""
        facts, layer = CacheFacts.of(self.layout, self.placement.block_size), self.layer_of_rank
        if self.kind is LayerKind.SWA:
            return [Problem("decode", layer, facts, q_dtype=dtype_name(self.dtype), lse=lse)]
        window = window_of(self.layout)
        swa = CacheFacts.of(window, self.placement.block_size)
        return [Problem("decode", layer, swa, facts, 128, dtype_name(self.dtype), lse=lse)]

    @cached_property
    def slots(self) -> NDArray[np.int64]:
        """A slot for each row, no two alike."""
        return np.random.default_rng((self.seed, 20)).permutation(self.blocks * self.placement.block_size)[: self.count]

    @cached_property
    def keys(self) -> F64:
        """[n, D] keys: groups of any magnitude, and some whose largest value is just around a step of the scale."""
        rows = normal((self.seed, 21), np.arange(self.count, dtype=np.int64), self.layer.head_dim)
        rng, size = np.random.default_rng((self.seed, 22)), self.layout.group_size or 64
        tops = [448.0, 450.0, 446.0, 1.75, 1.7578125, 1e-4, 2.0**-14, 240.0, 241.0, 3e4]
        for row in rows:
            for start in range(0, self.layer.nope_dim, size):
                part = row[start : min(start + size, self.layer.nope_dim)]
                part *= rng.choice([0.0, 1e-6, 1e-3, 0.1, 1.0, 1.0, 30.0, 1e4])
                if rng.random() < 0.3:
                    part *= 0.01
                    part[rng.integers(len(part))] = rng.choice(tops) * rng.choice([-1, 1])
        return rounded(rows, self.dtype)

    @cached_property
    def queries(self) -> F64:
        """[n, H, D] queries, or outputs to project; heads differ in size."""
        numbers = np.arange(self.count * self.layer.num_heads).reshape(self.count, self.layer.num_heads)
        sizes = self.size * 2.0 ** (np.arange(self.layer.num_heads) % 9 - 4)
        return rounded(normal((self.seed, 23), numbers, self.layer.head_dim) * sizes[:, None], self.dtype)

    @cached_property
    def angles(self) -> F64:
        """[positions, pairs] angles of the table."""
        return rounded(self.drawn_angles(24, self.table_rows, self.layer.rope_dim // 2), torch.float32)

    @cached_property
    def positions(self) -> NDArray[np.int64]:
        """[n] positions, the first and the last one among them."""
        return self.drawn_positions(25, self.table_rows, self.count)

    @cached_property
    def table(self) -> F64:
        """[positions, rope] cosines, then sines."""
        return cos_sin_table(self.angles)

    def turn(self, row: int) -> tuple[F64, F64]:
        """Cosines and sines of a row."""
        cos, sin = np.split(self.table[self.positions[row]], 2)
        return cos, sin

    def blank(self) -> OracleCache:
        """A cache without records."""
        return OracleCache.blank(self.layout, self.blocks, self.placement, self.device)


def quantises(bench: Bench, rows: CacheRows) -> Measure:
    """`quantize_and_insert_k_cache` writes the bytes of the format, and nothing else."""
    # only its bytes, so that gigabytes of a cache whose pages lie far apart are freed before the other one
    expected = rows.blank().write(rows.slots, rows.keys).bytes()
    cache, strided = rows.blank(), StridedTensors(rows.strided)
    keys = strided("k", rows.tensor(rows.keys, rows.dtype))
    with unchanged(k=keys):
        bench.backend.quantize_and_insert_k_cache(keys, cache.cache, rows.tensor(rows.slots))
    strided.check()
    return same_pages(rows, cache.bytes(), expected)


def same_pages(rows: CacheRows, actual: NDArray[np.uint8], expected: NDArray[np.uint8]) -> Measure:
    """Pages, and the gaps after them, hold the expected bytes."""
    count, page, byte = first_difference(actual, expected)
    if not count:
        return Measure()
    size = rows.placement.block_size
    owner = [o for o in range(size) if byte in place_of(rows.layout, o, size)]
    what = f"slot {page * size + owner[0]}" if owner else "no slot at all"
    message = f"{count} bytes differ, first byte {byte} of page {page} ({what}): "
    raise Wrong(f"{message}{int(actual[page, byte])}, expected {int(expected[page, byte])}")


def insert(
    bench: Bench,
    rows: CacheRows,
    cache: PagedKVCache,
    slots: NDArray[np.int64],
    positions: NDArray[np.int64] | None = None,
) -> Tensor:
    """Run the fused step; returns q. Raises Wrong if kv was changed. positions: other than those of the rows."""
    strided, places = StridedTensors(rows.strided), rows.tensor(rows.positions if positions is None else positions)
    q, kv = strided("q", rows.tensor(rows.queries, rows.dtype)), strided("kv", rows.tensor(rows.keys, rows.dtype))
    table = strided("cos_sin_cache", rows.tensor(rows.table, torch.float32))
    with unchanged(kv=kv):
        bench.backend.qnorm_rope_kv_insert(q, kv, cache, rows.tensor(slots), places, table, rows.layer.q_eps)
    strided.check()
    return q


def judge_queries(rows: CacheRows, q: Tensor) -> Measure:
    """Norm and rotation in fp32, rounded to q's dtype: at most twice, once for each."""
    unit = 2 * BF16 if rows.dtype == torch.bfloat16 else FP32_STEPS
    worst, actual = Measure(0.0, unit), as_f64(q)
    for i in range(rows.count):
        expected = oracle.q_norm_rope(rows.queries[i], *rows.turn(i), rows.layer.rope_dim, rows.layer.q_eps)
        errors = np.abs(actual[i] - expected) / (_magnitudes(expected, rows.layer.rope_dim) + 2.0**-126)
        error, (head, dim) = worst_error(errors)
        got, want = actual[i, head, dim], expected[head, dim]
        where = f"q of row {i}, head {head}, dim {dim}: {got:.6g}, expected {want:.6g}"
        worst = worst_of(worst, Measure(error, unit).hold(where))
    return worst


def _magnitudes(values: F64, rope_dim: int) -> F64:
    """Magnitude of each value. A rotated value has that of its pair, on which its rounding error depends."""
    sizes = np.abs(values)
    pairs = np.hypot(values[..., -rope_dim::2], values[..., -rope_dim + 1 :: 2])
    sizes[..., -rope_dim:] = np.repeat(pairs, 2, axis=-1)
    return sizes


def normalises_queries(bench: Bench, rows: CacheRows) -> Measure:
    """The queries are normalised and rotated in place."""
    return judge_queries(rows, insert(bench, rows, rows.blank().cache, rows.slots))


def inserts_rotated(bench: Bench, rows: CacheRows) -> Measure:
    """A rotated copy of kv is written: codes and scales byte for byte, RoPE values as rounded or the neighbour."""
    oracle_cache = rows.blank()
    insert(bench, rows, oracle_cache.cache, rows.slots)
    return judge_records(rows, oracle_cache, rows.slots)


def inserts_both(bench: Bench, rows: CacheRows) -> Measure:
    """The fused step in full: queries in place, and keys as records."""
    oracle_cache = rows.blank()
    q = insert(bench, rows, oracle_cache.cache, rows.slots)
    return worst_of(judge_queries(rows, q), judge_records(rows, oracle_cache, rows.slots))


def inserts_nothing(bench: Bench, rows: CacheRows) -> Measure:
    """An insert of no rows, and one of queries without slots, leave the cache as it is."""
    oracle_cache = rows.blank().write(rows.slots, rows.keys)
    old_pages, none = oracle_cache.bytes(), attrs.evolve(rows, count=0)
    insert(bench, none, oracle_cache.cache, none.slots)
    q = insert(bench, rows, oracle_cache.cache, none.slots)
    same_pages(rows, oracle_cache.bytes(), old_pages)
    return judge_queries(rows, q)


def quantises_nothing(bench: Bench, rows: CacheRows) -> Measure:
    """No keys, and keys without slots, leave the cache as it is."""
    oracle_cache = rows.blank().write(rows.slots, rows.keys)
    old_pages = oracle_cache.bytes()
    none = rows.tensor(rows.slots[:0])
    for count in (0, rows.count):
        bench.backend.quantize_and_insert_k_cache(rows.tensor(rows.keys[:count], rows.dtype), oracle_cache.cache, none)
    return same_pages(rows, oracle_cache.bytes(), old_pages)


def judge_records(rows: CacheRows, oracle_cache: OracleCache, slots: NDArray[np.int64]) -> Measure:
    """Records are the rotated keys of their rows. slots: the slot mapping of the call; slots of rows are judged."""
    nope, rope = rows.layer.nope_dim, rows.layer.rope_dim
    turned = np.stack([oracle.apply_rope(row, *rows.turn(i), rope) for i, row in enumerate(rows.keys)])
    expected = rows.blank().write(rows.slots, turned)
    unit = FP32_STEPS if rows.layout.dtype == torch.float32 else 2 * BF16
    codes = rows.layout.code_bytes if rows.layout.is_quantised else nope * rows.layout.dtype.itemsize
    tail = slice(codes, rows.layout.data_bytes)
    rope_dtype = torch.bfloat16 if rows.layout.is_quantised else rows.layout.dtype
    worst = Measure(0.0, unit)
    got_pages, want_pages = oracle_cache.bytes(), expected.bytes()
    for i, slot in enumerate(slots):
        if slot != rows.slots[i]:
            continue  # no slot at all
        place = oracle_cache.place(slot)
        got, want = got_pages[place], want_pages[place]
        if not np.array_equal(np.delete(got, tail), np.delete(want, tail)):
            raise Wrong(f"row {i}, slot {slot}: codes or scales are not those of the format")
        values, wants = (floats(record[tail], rope_dtype) for record in (got, want))
        errors = np.abs(values - wants) / (_magnitudes(turned[i], rope)[nope:] + 2.0**-126)
        where = f"row {i}, slot {slot}: RoPE values differ from the rotated ones"
        worst = worst_of(worst, Measure(worst_error(errors)[0], unit).hold(where))
    return worst


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
    """Slots that are negative or do not exist, and rows without a slot, write nothing."""
    slots = _wild(rows)
    live = _live(rows, slots)
    (expected, _), (oracle_cache, cache) = _with_a_page_behind(rows), _with_a_page_behind(rows)
    expected.write(slots[live], rows.keys[live])
    bench.backend.quantize_and_insert_k_cache(
        rows.tensor(rows.keys, rows.dtype)[: len(slots)], cache, rows.tensor(slots)
    )
    return same_pages(rows, oracle_cache.bytes(), expected.bytes())


def inserts_only_its_slots(bench: Bench, rows: CacheRows) -> Measure:
    """In the fused step all queries are processed, keys with real slots are written, and nothing else is."""
    slots = _wild(rows)
    oracle_cache, cache = _with_a_page_behind(rows)
    old_pages = oracle_cache.bytes()
    measure = judge_queries(rows, insert(bench, rows, cache, slots))
    allowed = np.zeros(old_pages.shape, dtype=bool)
    for slot in slots[_live(rows, slots)]:
        allowed[oracle_cache.place(slot)] = True
    wrong = np.argwhere((oracle_cache.bytes() != old_pages) & ~allowed)
    if len(wrong):
        page, byte = wrong[0].tolist()
        raise Wrong(f"{len(wrong)} bytes were written that belong to no slot of the step, first {byte} of page {page}")
    return worst_of(measure, judge_records(rows, oracle_cache, slots))


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
    q, expected = insert(bench, rows, oracle_cache.cache, slots, positions), insert(bench, rows, other.cache, slots)
    live = rows.tensor(np.flatnonzero(~padding))
    if not torch.equal(q[live], expected[live]):
        raise Wrong("a position of padding changed q of another row")
    return same_pages(rows, oracle_cache.bytes(), other.bytes())


def _live(rows: CacheRows, slots: I64) -> I64:
    return np.flatnonzero((slots >= 0) & (slots < rows.blocks * rows.placement.block_size))


def rows(cache: str = "ocp", *, heads: int = HEADS, page: int = 64, **fields: Any) -> CacheRows:  # noqa: ANN401 - fields of Rows
    """Rows for an op around attention."""
    return CacheRows(
        **{"geometry": flash("swa", heads), "layout": layout(cache), "placement": PagePlacement(page), **fields}
    )

"""Checks of gathering: rows and index lists of a gathered chunk against the oracle's records, within all limits."""

from __future__ import annotations

import math
from functools import partial

import attrs
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dsv4attn.core.attention.gathered import fill_by_ops
from dsv4attn.core.cache.layer_caches import LayerCaches
from dsv4attn.core.cache.selected_keys import ChunkRows, ChunkTokens, DenseIndices, PageTable, RaggedIndices
from dsv4attn.core.contract.backend import IndexForm
from dsv4attn.core.torch_ops import index_ops as indices
from dsv4attn.testing.case import Bench, Measure, Wrong
from dsv4attn.testing.checks.insert import CacheRows
from dsv4attn.testing.kit.factories import normal, window_of
from dsv4attn.testing.kit.oracle_cache import OracleCache
from dsv4attn.testing.kit.tolerances import as_f64, hold_equal

LONG = 2**14
"""Columns of a long block table: with pages of 64 records, a sequence of 2^20."""


def gathers(bench: Bench, rows: CacheRows) -> Measure:
    """`dequantize_and_gather_k_cache` makes rows of records bit for bit, and touches no other row."""
    bench.require_gathering()
    size = rows.placement.block_size
    oracle_cache = _full_cache(rows, 27)
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
    bench.require_gathering()
    size = rows.placement.block_size
    oracle_cache = _full_cache(rows, 27)
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
    size, counts = rows.placement.block_size, seq_lens if lens is None else lens
    shape = len(seq_lens), offset + int(counts.max()) + 4, rows.layer.head_dim
    out = torch.full(shape, math.nan, dtype=rows.layout.row_dtype, device=rows.device)
    expected = as_f64(out)
    gather = None if lens is None else rows.tensor(lens).int()
    bench.backend.dequantize_and_gather_k_cache(
        out, oracle_cache.cache, rows.tensor(seq_lens).int(), gather, table, offset
    )
    for i, (length, count) in enumerate(zip(seq_lens, counts, strict=True)):
        for j in range(count):
            position = length - count + j
            expected[i, offset + j] = oracle_cache.values[tables[i, position // size] * size + position % size]
    hold_equal(out, expected, _place)


def _place(place: tuple[int, ...]) -> str:
    return "request {}, row {}, column {}".format(*place)


def _full_cache(rows: CacheRows, stream: int) -> OracleCache:
    """A cache with a random record in each slot."""
    slots = np.arange(rows.blocks * rows.placement.block_size)
    return rows.blank().write(slots, normal((rows.seed, stream), slots, rows.layer.head_dim))


MOST = 2**31 - 1
SEQ_LENS = (9, 40, 3, 5, 0, MOST, -3, -MOST - 1, 6, 2)
GATHER_LENS = (9, 30, 8, MOST, MOST, 4, 7, MOST, -2, 0)
"""Lengths of each request: all records, past the table, before the first position, past the output, and lengths that no
request has."""
ROWS = 12
"""Rows of the output that a request has."""
UNTOUCHED = -3.0


def gathers_within(bench: Bench, rows: CacheRows) -> Measure:
    """Records that exist go to rows that exist; every other row, and the memory around the output, stays as it is."""
    bench.require_gathering()
    size, dim = rows.placement.block_size, rows.layer.head_dim
    oracle_cache = _full_cache(rows, 45)
    # columns past the table hold blocks that exist; a gather must not read them
    blocks = np.random.default_rng((rows.seed, 46)).integers(0, rows.blocks, (len(SEQ_LENS), 5))
    table = rows.tensor(blocks).int()[:, :3]
    seq_lens = torch.tensor(SEQ_LENS, dtype=torch.int32, device=rows.device)
    gather_lens = torch.tensor(GATHER_LENS, dtype=torch.int32, device=rows.device)
    shape = len(SEQ_LENS) + 2, ROWS + 2, dim
    for lens, offset in ((None, 0), (gather_lens, 0), (gather_lens, 4), (None, ROWS), (gather_lens, ROWS + 1)):
        memory = torch.full(shape, UNTOUCHED, dtype=rows.layout.row_dtype, device=rows.device)
        expected = as_f64(memory)
        bench.backend.dequantize_and_gather_k_cache(
            memory[1:-1, 1:-1], oracle_cache.cache, seq_lens, lens, table, offset
        )
        for i, seq_len in enumerate(SEQ_LENS):
            count = max(seq_len, 0) if lens is None else GATHER_LENS[i]
            for j in range(ROWS - offset):
                position = max(seq_len, 0) - count + j
                if j < count and 0 <= position < table.shape[1] * size:
                    expected[1 + i, 1 + offset + j] = oracle_cache.values[
                        blocks[i, position // size] * size + position % size
                    ]
        actual = as_f64(memory)
        if not np.array_equal(actual, expected):
            i, row = (int(axis[0]) for axis in (actual != expected).any(-1).nonzero())
            lengths = f"seq_len {SEQ_LENS[i - 1]}, gather_len {GATHER_LENS[i - 1] if lens is not None else None}"
            where = (
                f"request {i - 1} of {len(SEQ_LENS)}, row {row - 1} of {ROWS}"
                if 0 < i <= len(SEQ_LENS)
                else "memory around"
            )
            raise Wrong(f"{where}, offset {offset} ({lengths}) is not what it should be")
    return Measure()


WINDOW, TOPK, RATIO = 5, 4, 4
NONE = np.array([-1, -9, 2**31 - 1, -(2**31)])
"""Entry numbers that are none."""


def fills(bench: Bench, rows: CacheRows) -> Measure:
    """Rows and lists of chunks of whole requests, and of a part of one, for two layers that share them."""
    bench.require_gathering()
    window = window_of(rows.layout)
    size = rows.placement.block_size
    oracle_caches = [
        _full_cache(attrs.evolve(rows, seed=rows.seed + i, layout=cache_layout), 42)
        for i, cache_layout in enumerate((window, rows.layout))
    ]
    # tokens before the step, tokens of the chunk, and later tokens of the step
    whole = [(0, 3, 0), (17, 6, 0), (2 * size, 1, 0), (9, 0, 0), (1, 2, 0)]
    for number, requests in enumerate((whole, [(0, 4, 5)], [(size + 3, 4, 3)], [(2, 2, 0)])):
        _Chunk(bench, rows, oracle_caches, np.array(requests), number).check()
    return Measure()


@attrs.frozen(eq=False)
class _Chunk:
    """A chunk. requests: [n, 3] tokens before the step, query tokens in the chunk, and later tokens of the step."""

    bench: Bench
    rows: CacheRows
    oracle_caches: list[OracleCache]
    requests: NDArray[np.int64]
    number: int

    def check(self) -> None:
        """Fill, and compare rows and lists. Raises Wrong."""
        prefixes, counts, tails = self.requests.T
        rng, ends = np.random.default_rng((self.rows.seed, 41, self.number)), prefixes + counts
        gathers = np.where(counts > 0, counts + np.minimum(prefixes, WINDOW - 1), 0)
        tokens, entries = int(counts.sum()), ends // RATIO
        # a row more than the host knows of
        offset, total = int(entries.max()) + 1, int(entries.max()) + 2 + int(gathers.max())
        tables = [self._table(rng, i, int(ends.max()) // (1, RATIO)[i]) for i in range(2)]
        pages = [
            PageTable(self._ints(table)[:, :-1], self.rows.placement.block_size, self.rows.blocks) for table in tables
        ]
        seen = np.concatenate([(b + 1 + np.arange(n)) // RATIO for b, n in zip(prefixes, counts, strict=True)])
        starts = 3 + np.concatenate([[0], np.cumsum(counts + tails)])
        shape = len(counts), total, self.rows.layer.head_dim
        kv = torch.full(shape, math.nan, dtype=self.rows.layout.row_dtype, device=self.rows.device)
        width = TOPK + WINDOW + 2
        lists = DenseIndices(*(self._ints(np.full(shape, 7)) for shape in ((tokens, width), (tokens,))))
        flat = None
        if self.bench.backend.capabilities.prefill_indices is IndexForm.RAGGED:
            flat = RaggedIndices(self._ints(np.full(tokens * width, 7)), self._ints(np.full(tokens + 1, 7)), width)
        chunk_tokens = ChunkTokens(
            seq_lens=self._ints(ends + tails),
            gather_lens=self._ints(np.where(counts > 0, counts + tails + np.minimum(prefixes, WINDOW - 1), 0)),
            query_start_loc=self._ints(starts),
            visible_lens=self._ints(seen),
            is_valid=self.rows.tensor(np.arange(tokens) % 4 != 2),
            window=WINDOW,
            topk=TOPK,
            rows=total,
            offset=offset,
        )
        chunk = ChunkRows(
            tokens=chunk_tokens,
            kv=kv,
            combined=lists,
            ragged=flat,
            tail=int(tails[0]) if self.number else None,
            swa=pages[0],
            compressed=pages[1],
            ratio=RATIO,
            lengths=self._ints(np.full((3, len(counts)), 7)),
            starts=self._ints(np.full(len(counts) + 1, 7)),
        )
        caches = LayerCaches(*(oracle_cache.cache for oracle_cache in self.oracle_caches))
        backend = self.bench.backend
        numbers = [self._ints(self._numbers(rng, seen)) for _ in range(2)]
        prepare = backend.prepare_rows or partial(fill_by_ops, backend)
        fill = prepare(chunk, numbers[0], caches.swa, caches.compressed)
        own_tokens = attrs.evolve(
            chunk_tokens,
            seq_lens=self._ints(ends),
            gather_lens=self._ints(gathers),
            query_start_loc=self._ints(np.concatenate([[0], np.cumsum(counts)])),
        )
        for topk in numbers:
            fill(topk, caches.swa, caches.compressed)
            self._judge_lists(chunk, topk, own_tokens)
        self._judge_rows(chunk, tables, ends, gathers)

    def _ints(self, values: NDArray[np.int64]) -> Tensor:
        return self.rows.tensor(values, torch.int32)

    def _table(self, rng: np.random.Generator, cache: int, records: int) -> NDArray[np.int64]:
        """Blocks of every request: alive, dead, or of no cache. The last column is not part of the table."""
        columns = records // self.rows.placement.block_size + 2
        table = rng.integers(0, self.rows.blocks, (len(self.requests), columns))
        dead = rng.random(table.shape) < 0.2
        return np.where(dead, rng.choice([-1, self.rows.blocks, 2**30], table.shape), table)

    def _numbers(self, rng: np.random.Generator, seen: NDArray[np.int64]) -> NDArray[np.int64]:
        """Distinct entry numbers of each token. Some lie past what the token sees, and some name no entry."""
        numbers = np.stack([rng.permutation(int(seen.max()) + TOPK + 3)[: TOPK + 2] for _ in seen])
        return np.where(rng.random(numbers.shape) < 0.3, rng.choice(NONE, numbers.shape), numbers)

    def _judge_lists(self, chunk: ChunkRows, topk: Tensor, tokens: ChunkTokens) -> None:
        """Lists are those of `core.torch_ops.index_ops`."""
        rows, dense = tokens.rows, chunk.combined
        expected = torch.full_like(dense.indices, 7), torch.full_like(dense.lens, 7)
        indices.combine_topk_swa_indices(topk, tokens, out=expected, swa=chunk.swa, compressed=chunk.compressed)
        pairs = {"lists": (dense.indices, expected[0]), "lengths of lists": (dense.lens, expected[1])}
        if chunk.ragged is not None:
            flat = torch.full_like(chunk.ragged.indices, 7), torch.full_like(chunk.ragged.indptr, 7)
            indices.build_ragged_indices_from_dense(*expected, chunk.kv.shape[0] * rows, out=flat)
            end = int(flat[1][-1])
            pairs |= {"ragged lists": (chunk.ragged.indices[:end], flat[0][:end])}
            pairs |= {"starts of ragged lists": (chunk.ragged.indptr, flat[1])}
        for what, (actual, right) in pairs.items():
            if not torch.equal(actual, right):
                place = tuple(int(axis[0]) for axis in (actual != right).nonzero(as_tuple=True))
                got, want = int(actual[place]), int(right[place])
                raise Wrong(f"chunk {self.number}, {what}, place {place}: {got}, expected {want}")

    def _judge_rows(
        self,
        chunk: ChunkRows,
        tables: list[NDArray[np.int64]],
        ends: NDArray[np.int64],
        gathers: NDArray[np.int64],
    ) -> None:
        """Rows are the records of both caches, and NaN, which was there before, where no record is."""
        expected = np.full(tuple(chunk.kv.shape), math.nan)
        for i, (end, count) in enumerate(zip(ends, gathers, strict=True)):
            places = [(1, j, j) for j in range(end // RATIO)]
            places += [(0, end - count + j, chunk.tokens.offset + j) for j in range(count)]
            for cache, record, row in places:
                column, offset = divmod(record, self.rows.placement.block_size)
                block = tables[cache][i, column] if column < tables[cache].shape[1] - 1 else -1
                if 0 <= block < self.rows.blocks:
                    expected[i, row] = self.oracle_caches[cache].values[block * self.rows.placement.block_size + offset]
        hold_equal(chunk.kv, expected, lambda place: f"chunk {self.number}, {_place(place)}")

"""Selection by the indexer: index keys that the oracle wrote, queries, and the comparison of what was selected."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise

import attrs
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dsv4attn.core.cache.layout import Fp8Format, KVCacheLayout
from dsv4attn.core.contract.backend import complete
from dsv4attn.core.contract.problem import Problem
from dsv4attn.core.model.geometry import LayerGeometry, LayerKind, ModelGeometry
from dsv4attn.core.torch_ops.indexer import IndexQuery
from dsv4attn.testing import oracle, oracle_layer
from dsv4attn.testing.case import Bench, Measure, Wrong
from dsv4attn.testing.check_compressor import attention_problems
from dsv4attn.testing.layer_tolerances import TINY, UNIT, summed
from dsv4attn.testing.oracle_cache import OracleCache, PagePlacement
from dsv4attn.testing.pages import Pages
from dsv4attn.testing.random_step import normal
from dsv4attn.testing.tolerances import F64, U8, rounded, written

__all__ = [
    "IndexSelection",
    "judge_row",
    "judge_selection",
    "run_selection",
    "score_errors",
    "select_entries",
    "sum_bits",
]

Q, WEIGHTS, KEYS, PAGES, NAN = range(80, 85)
"""Streams of random numbers."""
BEHIND = 9
"""Entries of each request behind those that its last token sees: of drafts that were taken back."""
GARBAGE, BESIDE = 0x5A5A5A5A, 12
"""What `out` holds before, and columns beside its rows if they lie apart."""


@attrs.frozen(kw_only=True, eq=False, slots=False)
class IndexSelection:
    """One selection: tokens of some requests, and index keys on pages.

    geometry: the model.
    layout: layout of the index keys.
    requests: (tokens before, tokens of this step) of each; token at position p sees (p + 1) // r entries.
    topk: entries to select.
    heads: heads of the indexer.
    whole: whether q and keys are small whole numbers, so that every sum in fp32 is exact in any order, and scores that
    are equal are equal exactly.
    nan: whether some keys and the query of the last token hold a NaN.
    dead: whether some blocks of the table are -1 or do not exist.
    padding: tokens of no request (-1) after the batch, which see nothing.
    more_entries: how far `max_entries` is above the largest count of visible entries.
    gap: bytes between pages, in addition to those that the layout asks for.
    strided: whether rows of `out`, of the table and of the weights lie apart.
    unused: value of bytes of pages that belong to no key.
    seed: seed of all random numbers.
    device: torch device.
    """

    geometry: ModelGeometry
    layout: KVCacheLayout
    requests: Sequence[tuple[int, int]] = ((900, 1), (130, 3), (0, 6), (2100, 2))
    topk: int = 64
    heads: int = 8
    whole: bool = True
    nan: bool = False
    dead: bool = False
    padding: int = 0
    more_entries: int = 0
    gap: int = 0
    strided: bool = False
    unused: int = 0xFF
    seed: int = 0
    device: str = "cpu"

    @property
    def layer(self) -> LayerGeometry:
        """The layer's geometry."""
        return self.geometry.layer_of_kind(LayerKind.C4A)

    def named_layouts(self) -> list[KVCacheLayout]:
        """The layout of the keys."""
        return [self.layout]

    def problems(self, *, lse: bool = True) -> list[Problem]:
        """Decode on the layer of the indexer."""
        return attention_problems(self.layer, self.layout, lse=lse)

    @cached_property
    def tokens(self) -> list[tuple[int, int]]:
        """(request, visible entries) of each token."""
        ratio = self.layer.compress_ratio
        found = [
            (i, (before + j + 1) // ratio) for i, (before, count) in enumerate(self.requests) for j in range(count)
        ]
        return found + [(-1, 0)] * self.padding

    def entries(self, request: int) -> int:
        """Entries that the last token of a request sees."""
        return sum(self.requests[request]) // self.layer.compress_ratio

    # queries

    @cached_property
    def q(self) -> F64:
        """[T, Hi, Di] values of the queries, as their codes hold them."""
        shape = len(self.tokens), self.heads, self.layout.head_dim
        if self.whole:
            drawn = np.random.default_rng((self.seed, Q)).choice([-1.0, 0.0, 0.0, 1.0], shape)
            drawn[:1] = -1.0  # its products with zeros are -0
        else:
            drawn = normal((self.seed, Q), np.arange(shape[0] * shape[1]), shape[2]).reshape(shape)
        return self._codes(drawn)[0]

    def _codes(self, values: F64) -> tuple[F64, U8]:
        """Values under the scale 1 as codes hold them, and the codes."""
        if not self.layout.is_quantised:
            return rounded(values, self.layout.dtype), np.zeros(0, dtype=np.uint8)
        if self.layout.fp8_format is None:
            codes = oracle_layer.encode_e2m1(values)
            return oracle_layer.decode_e2m1(codes), oracle_layer.pack_e2m1(codes)
        fnuz = self.layout.fp8_format is Fp8Format.FNUZ
        codes = oracle.encode_e4m3(values, fnuz)
        return oracle.decode_e4m3(codes, fnuz), codes

    @cached_property
    def weights(self) -> F64:
        """[T, Hi] weights of the heads; those of the first token are negative."""
        shape = len(self.tokens), self.heads
        if self.whole:
            drawn = np.random.default_rng((self.seed, WEIGHTS)).choice([-1.0, -0.5, 0.5, 1.0, 2.0], shape)
            drawn[:1] = -np.abs(drawn[:1])
            return drawn
        return rounded(normal((self.seed, WEIGHTS), np.arange(shape[0]), shape[1]), torch.float32)

    def query(self) -> IndexQuery:
        """The queries as tensors."""
        q = self.q.copy()
        weights, scales = self.tensor(self.weights, torch.float32), None
        if self.strided:
            weights = torch.cat([weights, torch.full_like(weights, torch.nan)], 1)[:, : self.heads]
        if not self.layout.is_quantised:
            values = self.tensor(q, self.layout.dtype)
        else:
            values = self.tensor(self._codes(q)[1])
            if self.layout.fp8_format:
                values = values.view(self.layout.fp8_format.dtype)
            else:
                shape = (*q.shape[:2], self.layout.num_groups)
                scales = torch.full(shape, oracle.E8M0_BIAS, dtype=torch.uint8, device=self.device)
        if self.nan and q.size:
            if scales is not None:
                scales[-1, 0, 0] = oracle.E8M0_NAN
            else:
                values[-1, 0, 3] = torch.nan
        return IndexQuery(values, weights, scales)

    # keys

    @cached_property
    def pages(self) -> Pages:
        """Pages of the keys."""
        live = [(0, self.entries(i) + BEHIND) for i in range(len(self.requests))]
        return Pages(live, 64, spare=2, dead=-1, key=(self.seed, PAGES))

    def key_rows(self, request: int) -> F64:
        """[E, Di] keys of a request, before they are stored. Those behind the visible ones have large scores."""
        count, dim = self.entries(request) + BEHIND, self.layout.head_dim
        rng = np.random.default_rng((self.seed, KEYS, request))
        if self.whole:
            rows = rng.choice([-1.0, 0.0, 0.0, 1.0, 2.0], (count, dim))
            rows[rng.random(count) < 0.2] = 0.0
            rows[1::7] = -np.abs(rows[1::7])
        else:
            rows = normal((self.seed, KEYS, request), np.arange(count), dim) * rng.choice(
                [0.1, 1.0, 1.0, 30.0], (count, 1)
            )
        own = [t for t, (owner, seen) in enumerate(self.tokens) if owner == request and seen]
        rows[-BEHIND:] = 2 * np.sign(self.q[own[-1], 0]) if own else 1.0
        return rows

    @cached_property
    def oracle_cache(self) -> OracleCache:
        """The cache."""
        oracle_cache = OracleCache.blank(self.layout, self.pages.count, PagePlacement(64, self.gap), self.device)
        oracle_cache.placement.pages(oracle_cache.cache, 4096).fill_(self.unused)
        for request in range(len(self.requests)):
            rows = self.key_rows(request)
            oracle_cache.write(self.pages.slots(request, range(len(rows))), rows)
            for entry in self.nan_entries(request):
                self._spoil(oracle_cache, int(self.pages.slots(request, [entry])[0]), rows[entry], entry)
        return oracle_cache

    def nan_entries(self, request: int) -> list[int]:
        """Entries of a request whose keys hold a NaN."""
        rng = np.random.default_rng((self.seed, NAN, request))
        return [e for e in range(self.entries(request)) if rng.random() < 0.3] if self.nan else []

    def _spoil(self, oracle_cache: OracleCache, slot: int, row: F64, entry: int) -> None:
        if not self.layout.is_quantised:
            spoiled = row.copy()
            spoiled[entry % len(row)] = math.nan
            oracle_cache.write([slot], spoiled[None])
            return
        record = written(row, self.layout).copy()
        if self.layout.fp8_format is None:
            record[self.layout.data_bytes + entry % self.layout.num_groups] = oracle.E8M0_NAN
        elif entry % 3:
            record[entry % self.layout.head_dim] = 0x80 if self.layout.fp8_format is Fp8Format.FNUZ else 0x7F
        else:
            record[self.layout.data_bytes :] = np.array([math.nan], dtype="<f4").view(np.uint8)
        oracle_cache.write_records([slot], [record])

    @cached_property
    def table(self) -> NDArray[np.int32]:
        """[R, N] block table, some blocks of which may not exist."""
        table: NDArray[np.int32] = self.pages.table.copy()
        if self.dead:
            for row, bad in zip(table, (-1, self.pages.count, 2**31 - 1, -(2**31)), strict=False):
                row[1:-2:3] = bad
        return table

    # scores

    def scores(self, token: int, query: IndexQuery | None = None, bits: int = 24) -> tuple[F64, F64]:
        """Scores of the entries that a token sees, NaN for absent ones, and the largest error of each.

        bits: of the sums of products, see `LayerOps.sum_bits`.
        """
        request, count = self.tokens[token]
        if not count:
            return np.zeros(0), np.zeros(0)
        q, weights = self.q[token], self.weights[token]
        if query is not None:
            q, weights = query_values(query, token, self.layout), query.weights[token].double().cpu().numpy()
        entries = np.arange(count)
        block = self.table[request, entries // 64].astype(np.int64)
        exists = (block >= 0) & (block < self.pages.count)
        keys = np.full((count, self.layout.head_dim), math.nan)
        keys[exists] = self.oracle_cache.values[(block * 64 + entries % 64)[exists]]
        scores = oracle_layer.index_scores(q, weights, keys)
        if self.nan and token == len(self.tokens) - 1:
            scores[:] = math.nan
        if self.whole and query is None:
            return scores, np.zeros(count)
        return scores, score_errors(q, weights, keys, bits)

    def tensor(self, values: NDArray[np.generic], dtype: torch.dtype | None = None) -> Tensor:
        """Values on the device."""
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.device, dtype)


def query_values(query: IndexQuery, token: int, layout: KVCacheLayout) -> F64:
    """[Hi, Di] values of a token's query."""
    if not layout.is_quantised:
        return query.values[token].double().cpu().numpy().astype(np.float64)
    raw = query.values[token].view(torch.uint8).cpu().numpy()
    if query.scales is not None:
        return oracle_layer.scaled_e2m1(oracle_layer.unpack_e2m1(raw), query.scales[token].cpu().numpy())
    return oracle.decode_e4m3(raw, layout.fp8_format is Fp8Format.FNUZ)


def score_errors(q: F64, weights: F64, keys: F64, bits: int = 24) -> F64:
    """Largest errors of scores in fp32, or with sums of products q . k that keep fewer bits.

    The partial sums of a product q . k are at most |q| |k|. A head whose product is negative beyond its error adds
    exactly 0. The products with the weights, and their sum over the heads, are rounded too.
    """
    products = keys @ q.T
    error = (
        (summed(q.shape[1]) + UNIT + (2.0**-bits if bits < 24 else 0.0))
        * np.linalg.norm(keys, axis=1)[:, None]
        * np.linalg.norm(q, axis=1)
    )
    counts = (products > -error) & (error > 0)
    sizes = np.maximum(products, 0) @ np.abs(weights)
    return np.asarray((counts * (error + TINY)) @ np.abs(weights) + (summed(len(weights)) + 2 * UNIT) * sizes)


def sum_bits(bench: Bench) -> int:
    """Bits that sums of products of the backend's index codes keep."""
    return complete(bench.backend).layer_ops.sum_bits


def run_selection(bench: Bench, inputs: IndexSelection, query: IndexQuery) -> NDArray[np.int64]:
    """Select; returns the rows [T, K]. Raises Wrong if something beside them was written."""
    count, beside = len(inputs.tokens), BESIDE if inputs.strided else 0
    whole = torch.full((count, inputs.topk + beside), GARBAGE, dtype=torch.int32, device=inputs.device)
    table = inputs.tensor(inputs.table)
    visible = np.array([seen for _, seen in inputs.tokens], dtype=np.int32)
    before = inputs.oracle_cache.bytes()
    complete(bench.backend).layer_ops.select_topk(
        query,
        inputs.oracle_cache.cache,
        table[:, :-1] if inputs.strided else table,
        inputs.tensor(np.array([owner for owner, _ in inputs.tokens], dtype=np.int32)),
        inputs.tensor(visible),
        whole[:, : inputs.topk],
        int(visible.max(initial=0)) + inputs.more_entries,
    )
    if not np.array_equal(before, inputs.oracle_cache.bytes()):
        raise Wrong("the cache was written")
    if (whole[:, inputs.topk :] != GARBAGE).any():
        raise Wrong("columns beside the rows of out were written")
    return whole[:, : inputs.topk].cpu().numpy().astype(np.int64)


def judge_selection(
    inputs: IndexSelection, found: NDArray[np.int64], query: IndexQuery | None = None, bits: int = 24
) -> Measure:
    """Compare what was selected, by its scores.

    query: the backend's own query; None means that of the case input.
    bits: bits that the backend's sums of products keep.
    """
    worst = Measure() if inputs.whole and query is None else Measure(0.0, 1.0)
    for token, row in enumerate(found):
        scores, errors = inputs.scores(token, query, bits)
        measure = judge_row(row, scores, errors, f"token {token}, which sees {len(scores)} entries")
        worst = max(worst, measure, key=lambda m: m.fraction)
    return worst


def judge_row(row: NDArray[np.int64], scores: F64, errors: F64, where: str) -> Measure:
    """Compare the entries of a row with the scores [E]; NaN is absent. Raises Wrong."""
    wanted = oracle_layer.select(scores, len(row))
    number = int((row != -1).sum())
    chosen = [int(entry) for entry in row[:number]]
    if -1 in chosen:
        raise Wrong(f"{where}: -1 stands before an entry")
    if strange := [e for e in chosen if not 0 <= e < len(scores)]:
        raise Wrong(f"{where}: entry {strange[0]} was selected")
    if spoiled := [e for e in chosen if math.isnan(scores[e])]:
        raise Wrong(f"{where}: entry {spoiled[0]} was selected, whose score is NaN, or which is absent")
    if len(chosen) != len(wanted):
        raise Wrong(f"{where}: {len(chosen)} entries were selected, expected {len(wanted)}")
    if any(left >= right for left, right in pairwise(chosen)):
        raise Wrong(f"{where}: entries are not in ascending order, or one stands twice")
    added, missed = sorted({*chosen} - {*wanted}), sorted({*wanted} - {*chosen})
    if not added:
        return Measure()
    last = min(scores[wanted])
    budgets = [(e, float(errors[e] + errors[missed].max())) for e in added]
    budgets += [(e, float(errors[e] + errors[added].max())) for e in missed]
    entry, off, budget = max(
        ((e, abs(float(scores[e]) - last), budget) for e, budget in budgets),
        key=lambda one: one[1] / (one[2] or 1e-300),
    )
    fraction = off / budget if budget else math.inf
    what = "was selected" if entry in added else "was not selected"
    said = f"{where}: entry {entry} with score {scores[entry]:.7g} {what}, the last score selected is {last:.7g}"
    return Measure(fraction, 1.0).hold(said)


def select_entries(bench: Bench, inputs: IndexSelection) -> Measure:
    """The entries with the largest scores are selected."""
    return judge_selection(inputs, run_selection(bench, inputs, inputs.query()), bits=sum_bits(bench))

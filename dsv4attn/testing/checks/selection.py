"""The indexer: its queries, the entries that it selects, on one rank or several, and candidate blocks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import pairwise

import attrs
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dsv4attn.core.cache.layout import Fp8Format, KVCacheLayout
from dsv4attn.core.cache.ownership import Ownership
from dsv4attn.core.context_parallel.selection import score_selected, select_among
from dsv4attn.core.contract.layer_ops import LayerOps
from dsv4attn.core.torch_ops.arguments import TokenMap
from dsv4attn.core.torch_ops.indexer import IndexQuery
from dsv4attn.testing.case import Bench, Measure, Wrong, worst_of
from dsv4attn.testing.checks.insert import stale_rows
from dsv4attn.testing.kit.factories import CaseInput, cos_sin_table, normal
from dsv4attn.testing.kit.oracle_cache import AFTER_PAGE, OracleCache, PagePlacement, Pages
from dsv4attn.testing.kit.strided import StridedTensors, unchanged
from dsv4attn.testing.kit.tolerances import (
    F64,
    TINY,
    U8,
    UNIT,
    CodeRule,
    Formula,
    as_f64,
    hold_values,
    query_values,
    rounded,
    summed,
    written,
)
from dsv4attn.testing.oracle import attention as oracle
from dsv4attn.testing.oracle import layer as oracle_layer

I64 = NDArray[np.int64]
QUERIES, QUERY_WEIGHTS, ANGLES, POSITIONS = range(70, 74)
"""Streams of random numbers."""
SIZES = (1.0, 1e-3, 30.0, 0.0)
"""Scales of q for every 32 dims, so that groups have different scales, and one has only zeros."""
SMALL = 1e-6
"""Scale of every seventh q: below the floor of a scale."""
FOLDED = 4 * UNIT
"""Budget of a weight: the factor of the score is rounded, and multiplied; so is the scale, which is a power of two."""


@attrs.frozen(kw_only=True, eq=False, slots=False)
class IndexQueries(CaseInput):
    """Queries of the indexer.

    layout: layout of the index keys.
    heads: heads of the indexer.
    count: tokens.
    dtype: type of q.
    weight_dtype: type of the weights.
    table_rows: rows of the table of cosines and sines; positions are below it.
    """

    heads: int = 8
    count: int = 9
    dtype: torch.dtype = torch.bfloat16
    weight_dtype: torch.dtype = torch.bfloat16
    table_rows: int = 64

    @cached_property
    def q(self) -> F64:
        """[T, Hi, Di] queries before rotation; heads differ in size."""
        dim, numbers = self.layout.head_dim, np.arange(self.count * self.heads)
        sizes = 2.0 ** (numbers % 9 - 4) * np.where(numbers % 7 == 3, SMALL, 1.0)
        blocks = np.resize(SIZES, dim // 32 + 1)[np.arange(dim) // 32]
        drawn = normal((self.seed, QUERIES), numbers, dim) * sizes[:, None]
        drawn[numbers % 2 == 1] *= blocks
        return rounded(drawn.reshape(self.count, self.heads, dim), self.dtype)

    @cached_property
    def weights(self) -> F64:
        """[T, Hi] weights of the heads, none of them zero."""
        drawn = self.drawn(QUERY_WEIGHTS, self.count, self.heads)
        return rounded(np.where(np.abs(drawn) < 0.01, 0.5, drawn), self.weight_dtype)

    @cached_property
    def table(self) -> F64:
        """[positions, rope] cosines, then sines, of random angles."""
        return cos_sin_table(self.drawn_angles(ANGLES, self.table_rows, self.layer.rope_dim // 2))

    @cached_property
    def positions(self) -> NDArray[np.int64]:
        """[T] positions, the first and the last of the table among them."""
        return self.drawn_positions(POSITIONS, self.table_rows, self.count)

    def turned(self, token: int) -> Formula:
        """[Hi, Di] rotated queries of a token."""
        cos, sin = np.split(self.table[self.positions[token]], 2)
        return Formula.exact(self.q[token]).turned(cos, sin)


def run_queries(bench: Bench, inputs: IndexQueries, positions: NDArray[np.int64] | None = None) -> IndexQuery:
    """Rotate and quantise. Raises Wrong if q or the weights were changed.

    positions: [T], instead of the positions of the case input.
    """
    strided = StridedTensors(inputs.strided)
    q = strided("q", inputs.tensor(inputs.q, inputs.dtype))
    weights = strided("weights", inputs.tensor(inputs.weights, inputs.weight_dtype))
    table = strided("cos_sin_cache", inputs.tensor(inputs.table, torch.float32))
    places = inputs.tensor(inputs.positions if positions is None else positions)
    with unchanged(q=q, weights=weights):
        query = bench.layer_ops.indexer_q_rope_quant(q, weights, places, table, inputs.layout)
    strided.check()
    return query


def shape_error(query: IndexQuery, layout: KVCacheLayout, tokens: int, heads: int) -> str:
    """What is wrong with shapes and types of a query; "" if nothing is."""
    dim = layout.head_dim
    values: tuple[tuple[int, ...], torch.dtype] = (tokens, heads, dim), layout.dtype
    scales = None
    if layout.fp8_format:
        values = (tokens, heads, dim), layout.fp8_format.dtype
    elif layout.is_quantised:
        values, scales = ((tokens, heads, dim // 2), torch.uint8), ((tokens, heads, layout.num_groups), torch.uint8)
    for name, expected in (("values", values), ("weights", ((tokens, heads), torch.float32)), ("scales", scales)):
        tensor: Tensor | None = getattr(query, name)
        actual = None if tensor is None else (tuple(tensor.shape), tensor.dtype)
        if actual != expected:
            return f"{name} of the query: {actual}, expected {expected}"
    return ""


def quantises_queries(bench: Bench, inputs: IndexQueries) -> Measure:
    """Codes, or values, are those of the rotated q, and weights have all factors of the score."""
    query, layout, worst = run_queries(bench, inputs), inputs.layout, Measure()
    if error := shape_error(query, layout, inputs.count, inputs.heads):
        raise Wrong(error)
    weights = as_f64(query.weights)
    for token in range(inputs.count):
        shifts, where = np.zeros(inputs.heads), f"token {token}"
        if layout.is_quantised:
            shifts = _judge_codes(inputs, query, token, weights[token])
        else:
            measure = hold_values(query.values[token], inputs.turned(token), layout.dtype, f"q of {where}")
            worst = worst_of(worst, measure)
        folded = oracle_layer.fold_weights(inputs.weights[token], layout.head_dim, shifts)
        formula = Formula(folded, FOLDED * np.abs(folded))
        worst = worst_of(worst, hold_values(weights[token], formula, torch.float32, f"weights of {where}"))
    return worst


def quantises_without_positions_of_padding(bench: Bench, inputs: IndexQueries) -> Measure:
    """Positions of padding change no other query."""
    padding, positions = stale_rows(inputs.count, inputs.positions)
    changed, usual = run_queries(bench, inputs, positions), run_queries(bench, inputs)
    live = inputs.tensor(np.flatnonzero(~padding))
    for name in ("values", "weights", "scales"):
        pair = getattr(changed, name), getattr(usual, name)
        if pair[0] is not None and not torch.equal(*(tensor[live].view(torch.uint8) for tensor in pair)):
            raise Wrong(f"a position of padding changed {name} of another query")
    return Measure()


def _judge_codes(inputs: IndexQueries, query: IndexQuery, token: int, weights: F64) -> F64:
    """Exponents [Hi] of the scales that are folded into the weights. Raises Wrong if a code or a scale is wrong."""
    codes = query.values[token].view(torch.uint8).cpu().numpy()
    scales = None if query.scales is None else query.scales[token].cpu().numpy().astype(np.int64) - oracle.E8M0_BIAS
    turned, shifts = inputs.turned(token), np.zeros(inputs.heads)
    for head in range(inputs.heads):
        if scales is None:
            shifts[head] = _shift(weights[head], inputs.weights[token], head, inputs.layout.head_dim)
            exponents, row = np.array([int(shifts[head])]), codes[head]
        else:
            exponents, row = scales[head], oracle.unpack_e2m1(codes[head])
        if error := CodeRule.of(inputs.layout).error(turned[head], row, exponents):
            raise Wrong(f"token {token}, head {head}: {error}")
    return shifts


def _shift(weight: float, weights: F64, head: int, dim: int) -> int:
    """Exponent of the scale that was folded into the weight of a head."""
    folded = abs(weight / oracle_layer.fold_weights(weights, dim, 0)[head])
    return round(math.log2(folded)) if 0 < folded < math.inf else 999


def makes_no_queries(bench: Bench, inputs: IndexQueries) -> Measure:
    """No tokens make no queries."""
    none = attrs.evolve(inputs, count=0)
    if error := shape_error(run_queries(bench, none), none.layout, 0, none.heads):
        raise Wrong(error)
    return Measure()


Q, WEIGHTS, KEYS, PAGES, NAN = range(80, 85)
"""Streams of random numbers."""
UNSEEN = 9
"""Entries of each request after those that its last token sees: of drafts that were taken back."""
GARBAGE, GAP = 0x5A5A5A5A, 12
"""What `out` holds before, and columns between its rows if they lie apart."""


@attrs.frozen(kw_only=True, eq=False, slots=False)
class IndexSelection(CaseInput):
    """One selection: tokens of some requests, and index keys on pages.

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
    unused: value of bytes of pages that belong to no key.
    page: index keys of a page.
    """

    requests: Sequence[tuple[int, int]] = ((900, 1), (130, 3), (0, 6), (2100, 2))
    topk: int = 64
    heads: int = 8
    whole: bool = True
    nan: bool = False
    dead: bool = False
    padding: int = 0
    more_entries: int = 0
    gap: int = 0
    unused: int = 0xFF
    page: int = 64

    @property
    def index_page(self) -> int:
        """Index keys of a page."""
        return self.page

    @cached_property
    def tokens(self) -> list[tuple[int, int]]:
        """(request, visible entries) of each token."""
        ratio = self.layer.compress_ratio
        tokens = [
            (i, (context + j + 1) // ratio) for i, (context, count) in enumerate(self.requests) for j in range(count)
        ]
        return tokens + [(-1, 0)] * self.padding

    @property
    def max_entries(self) -> int:
        """A bound of the visible entries of a token."""
        return max((seen for _, seen in self.tokens), default=0) + self.more_entries

    def token_map(self) -> TokenMap:
        """Block table, requests and visible entries of the tokens, as tensors."""
        requests, seen = (self.tensor(np.array([token[i] for token in self.tokens], dtype=np.int32)) for i in range(2))
        return TokenMap(self.tensor(self.table), requests, seen)

    def token_map_of_rank(self, owner: Ownership) -> TokenMap:
        """The same on a rank that has some of the entries."""
        whole = self.token_map()
        table = self.tensor(self.table[:, owner.rank :: owner.size])
        return TokenMap(table, whole.token_to_req, owner.counts(whole.visible_lens).int())

    def unwritten(self, columns: int) -> Tensor:
        """[T, columns] int32 for the result of an op."""
        return torch.full((len(self.tokens), columns), GARBAGE, dtype=torch.int32, device=self.device)

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
            drawn = self.drawn(Q, *shape)
        return self._codes(drawn)[0]

    def _codes(self, values: F64) -> tuple[F64, U8]:
        """Values under the scale 1 as codes hold them, and the codes."""
        if not self.layout.is_quantised:
            return rounded(values, self.layout.dtype), np.zeros(0, dtype=np.uint8)
        if self.layout.fp8_format is None:
            codes = oracle.encode_e2m1(values)
            return oracle.decode_e2m1(codes), oracle.pack_e2m1(codes)
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
        return rounded(self.drawn(WEIGHTS, *shape), torch.float32)

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
        live = [(0, self.entries(i) + UNSEEN) for i in range(len(self.requests))]
        return Pages(live, self.page, spare=2, dead=-1, key=(self.seed, PAGES))

    def key_rows(self, request: int) -> F64:
        """[E, Di] keys of a request, before they are stored. Those after the visible ones have large scores."""
        count, dim = self.entries(request) + UNSEEN, self.layout.head_dim
        rng = np.random.default_rng((self.seed, KEYS, request))
        if self.whole:
            rows = rng.choice([-1.0, 0.0, 0.0, 1.0, 2.0], (count, dim))
            rows[rng.random(count) < 0.2] = 0.0
            rows[1::7] = -np.abs(rows[1::7])
        else:
            rows = normal((self.seed, KEYS, request), np.arange(count), dim) * rng.choice(
                [0.1, 1.0, 1.0, 30.0], (count, 1)
            )
        tokens = [t for t, (owner, seen) in enumerate(self.tokens) if owner == request and seen]
        rows[-UNSEEN:] = 2 * np.sign(self.q[tokens[-1], 0]) if tokens else 1.0
        return rows

    @cached_property
    def oracle_cache(self) -> OracleCache:
        """The cache."""
        placement = PagePlacement(self.page, self.gap)
        oracle_cache = OracleCache.blank(self.layout, self.pages.count, placement, self.device, self.unused)
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
            q, weights = query_values(query, token, self.layout), as_f64(query.weights[token])
        entries = np.arange(count)
        block = self.table[request, entries // self.page].astype(np.int64)
        exists = (block >= 0) & (block < self.pages.count)
        keys = np.full((count, self.layout.head_dim), math.nan)
        keys[exists] = self.oracle_cache.values[(block * self.page + entries % self.page)[exists]]
        scores = oracle_layer.index_scores(q, weights, keys)
        if self.nan and token == len(self.tokens) - 1:
            scores[:] = math.nan
        if self.whole and query is None:
            return scores, np.zeros(count)
        return scores, score_errors(q, weights, keys, bits)


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


def run_selection(bench: Bench, inputs: IndexSelection, query: IndexQuery) -> I64:
    """Select; returns the rows [T, K]. Raises Wrong if anything else was written."""
    out = inputs.unwritten(inputs.topk + (GAP if inputs.strided else 0))
    token_map = inputs.token_map()
    if inputs.strided:
        token_map = attrs.evolve(token_map, block_table=token_map.block_table[:, :-1])
    cache, pages = inputs.oracle_cache.cache, inputs.oracle_cache.pages(AFTER_PAGE)
    with unchanged(cache=pages):
        bench.layer_ops.select_topk(query, cache, token_map, out[:, : inputs.topk], inputs.max_entries)
    if (out[:, inputs.topk :] != GARBAGE).any():
        raise Wrong("columns next to the rows of out were written")
    return numbers_of(out[:, : inputs.topk])


def numbers_of(out: Tensor) -> I64:
    """The result of an op on the host."""
    return out.cpu().numpy().astype(np.int64)


def judge_selection(inputs: IndexSelection, rows: I64, query: IndexQuery | None = None, bits: int = 24) -> Measure:
    """Compare rows [T, K] that were selected, by the scores of their entries.

    query: the backend's own query; None means that of the case input.
    bits: bits that the backend's sums of products keep.
    """
    measures = [Measure() if inputs.whole and query is None else Measure(0.0, 1.0)]
    for token, row in enumerate(rows):
        scores, errors = inputs.scores(token, query, bits)
        measures.append(judge_row(row, scores, errors, f"token {token}, which sees {len(scores)} entries"))
    return worst_of(*measures)


def numbers_in(row: I64, count: int, where: str, *, blocks: bool = False) -> list[int]:
    """Numbers of entries, or of blocks, that a row names before -1. Raises Wrong unless they are below `count`."""
    article, noun, verb = ("a", "block", "written") if blocks else ("an", "entry", "selected")
    numbers = [int(number) for number in row[: int((row != -1).sum())]]
    if -1 in numbers:
        raise Wrong(f"{where}: -1 stands before {article} {noun}")
    if outside := [number for number in numbers if not 0 <= number < count]:
        raise Wrong(f"{where}: {noun} {outside[0]} was {verb}")
    return numbers


def judge_row(row: I64, scores: F64, errors: F64, where: str) -> Measure:
    """Compare the entries of a row with the scores [E]; NaN is absent. Raises Wrong."""
    expected, chosen = oracle_layer.select(scores, len(row)), numbers_in(row, len(scores), where)
    if spoiled := [e for e in chosen if math.isnan(scores[e])]:
        raise Wrong(f"{where}: entry {spoiled[0]} was selected, whose score is NaN, or which is absent")
    if len(chosen) != len(expected):
        raise Wrong(f"{where}: {len(chosen)} entries were selected, expected {len(expected)}")
    if any(left >= right for left, right in pairwise(chosen)):
        raise Wrong(f"{where}: entries are not in ascending order, or one stands twice")
    added, missed = sorted({*chosen} - {*expected}), sorted({*expected} - {*chosen})
    if not added:
        return Measure()
    last = min(scores[expected])
    budgets = [(e, float(errors[e] + errors[missed].max())) for e in added]
    budgets += [(e, float(errors[e] + errors[added].max())) for e in missed]
    errors_of = [(e, abs(float(scores[e]) - last), budget) for e, budget in budgets]
    entry, off, budget = max(errors_of, key=lambda error: error[1] / (error[2] or 1e-300))
    fraction = off / budget if budget else math.inf
    what = "was selected" if entry in added else "was not selected"
    said = f"{where}: entry {entry} with score {scores[entry]:.7g} {what}, the last score selected is {last:.7g}"
    return Measure(fraction, 1.0).hold(said)


def select_entries(bench: Bench, inputs: IndexSelection) -> Measure:
    """The entries with the largest scores are selected."""
    return judge_selection(inputs, run_selection(bench, inputs, inputs.query()), bits=bench.layer_ops.sum_bits)


def scores_through(bench: Bench, inputs: IndexSelection) -> Measure:
    """The backend quantises the queries, and selects by its own codes and weights."""
    fields = {"geometry": inputs.geometry, "layout": inputs.layout, "heads": inputs.heads, "device": inputs.device}
    query = run_queries(bench, IndexQueries(count=len(inputs.tokens), table_rows=4096, **fields))  # type: ignore[arg-type]
    if error := shape_error(query, inputs.layout, len(inputs.tokens), inputs.heads):
        raise Wrong(error)
    return judge_selection(inputs, run_selection(bench, inputs, query), query, bench.layer_ops.sum_bits)


PAGE = 64
"""Entries of a page, and of a run: so page j of a rank is page j * ranks + rank of the case input."""


def selects_over_ranks(ranks: int) -> Callable[[Bench, IndexSelection], Measure]:
    """Check that the candidates of all ranks, merged by score and then by number, are the selection of one rank."""

    def check(bench: Bench, inputs: IndexSelection) -> Measure:
        ops, query, cache = bench.layer_ops, inputs.query(), inputs.oracle_cache.cache
        if inputs.topk <= ops.most_over_ranks:
            rows = _ascending(_by_kernels(ops, inputs, ranks))
            if (rows[:, inputs.topk :] >= 0).any():
                raise Wrong(f"ranks hold more than the {inputs.topk} entries of a token together")
            return judge_selection(inputs, rows[:, : inputs.topk], bits=bench.layer_ops.sum_bits)
        numbers, scores = list[Tensor](), list[Tensor]()
        for rank in range(ranks):
            owner, local = Ownership(rank, ranks, PAGE), inputs.unwritten(inputs.topk)
            token_map = inputs.token_map_of_rank(owner)
            ops.select_topk(query, cache, token_map, local, owner.count(inputs.max_entries))
            scores.append(score_selected(query, cache, token_map, local))
            numbers.append(owner.entry(local).masked_fill_(local < 0, -1))
        rows = numbers_of(select_among(torch.cat(numbers, 1), torch.cat(scores, 1), inputs.topk))
        return judge_selection(inputs, _ascending(rows), bits=bench.layer_ops.sum_bits)

    return check


def _by_kernels(ops: LayerOps, inputs: IndexSelection, ranks: int) -> I64:
    """[T, ranks * K] entry numbers that ranks hold of the best candidates, by the backend's ops."""
    propose, choose = ops.propose_candidates, ops.choose_candidates
    assert propose is not None
    assert choose is not None
    query, cache = inputs.query(), inputs.oracle_cache.cache
    numbers = torch.stack([inputs.unwritten(inputs.topk)] * ranks)
    scores = torch.full(numbers.shape, torch.nan, device=inputs.device, dtype=torch.float32)
    owners = [Ownership(rank, ranks, PAGE) for rank in range(ranks)]
    for rank, owner in enumerate(owners):
        token_map, entries = inputs.token_map_of_rank(owner), owner.count(inputs.max_entries)
        propose(owner, query, cache, token_map, numbers[rank], scores[rank], entries)
    chosen = []
    for owner in owners:
        local = inputs.unwritten(inputs.topk)
        choose(owner, numbers, scores, local, inputs.max_entries)
        chosen.append(owner.entry(local).masked_fill_(local < 0, -1))
    return numbers_of(torch.cat(chosen, 1))


def _ascending(rows: I64) -> I64:
    """Rows in ascending order, then -1."""
    last = np.iinfo(np.int64).max
    rows = np.sort(np.where(rows < 0, last, rows), 1)
    return np.where(rows == last, -1, rows)


BLOCKS = 110
"""Stream of random numbers."""
STRANGE = (-1, -5, 2**31 - 1, -(2**31), 2**20)
"""Numbers of blocks that do not exist."""


@attrs.frozen(kw_only=True, eq=False, slots=False)
class CandidateSelection(IndexSelection):
    """A selection with candidate blocks.

    blocks: N, candidates of a token.
    block_size: entries of a block.
    """

    blocks: int = 12
    block_size: int = 8

    @cached_property
    def candidates(self) -> NDArray[np.int32]:
        """[T, N] blocks of each token in any order, among them some that do not exist, and -1 between others."""
        rng = np.random.default_rng((self.seed, BLOCKS))
        rows = np.full((len(self.tokens), self.blocks), -1, dtype=np.int32)
        for row, (_, seen) in zip(rows, self.tokens, strict=True):
            numbers = rng.permutation(-(-seen // self.block_size) + 2)[: self.blocks]  # some after the visible ones
            row[: len(numbers)] = numbers
            row[rng.random(self.blocks) < 0.2] = rng.choice(STRANGE)
            rng.shuffle(row)
        return rows


def _published(bench: Bench, inputs: CandidateSelection) -> torch.Tensor:
    out = inputs.unwritten(inputs.blocks)
    query, cache, token_map = inputs.query(), inputs.oracle_cache.cache, inputs.token_map()
    bench.layer_ops.select_candidates(query, cache, token_map, out, inputs.block_size, inputs.max_entries)
    return out


def publishes(bench: Bench, inputs: CandidateSelection) -> Measure:
    """The blocks with the largest scores are written, the newest one among them."""
    rows, bits = numbers_of(_published(bench, inputs)), bench.layer_ops.sum_bits
    return worst_of(*(_judge_blocks(inputs, token, row, bits) for token, row in enumerate(rows)))


def _judge_blocks(inputs: CandidateSelection, token: int, row: I64, bits: int) -> Measure:
    scores, errors = inputs.scores(token, bits=bits)
    where = f"token {token}, which sees {len(scores)} entries"
    largest = oracle_layer.block_scores(scores, inputs.block_size)
    chosen = numbers_in(row, len(largest), where, blocks=True)
    if len({*chosen}) != len(chosen):
        raise Wrong(f"{where}: a block stands twice")
    if not len(largest):
        return Measure(0.0, 1.0)
    newest, possible = len(largest) - 1, {b for b, score in enumerate(largest) if score > -math.inf}
    if newest not in chosen:
        raise Wrong(f"{where}: the newest block, {newest}, was not written")
    if spoiled := {*chosen} - possible - {newest}:
        raise Wrong(f"{where}: block {min(spoiled)} was written, and all of its entries are absent")
    expected = min(len(possible | {newest}), inputs.blocks)
    if len(chosen) != expected:
        raise Wrong(f"{where}: {len(chosen)} blocks were written, expected {expected}")
    missed, others = possible - {*chosen}, {*chosen} - {newest}
    if not missed or not others:
        return Measure(0.0, 1.0)
    best, last = max(missed, key=lambda b: largest[b]), min(others, key=lambda b: largest[b])
    off, budget = max(float(largest[best] - largest[last]), 0.0), 2 * float(errors[~np.isnan(scores)].max())
    fraction = off / budget if budget else (math.inf if off else 0.0)
    said = f"{where}: block {best} of score {largest[best]:.7g} was not written, {last} of {largest[last]:.7g} was"
    return Measure(fraction, 1.0).hold(said)


def _selected(bench: Bench, inputs: CandidateSelection, candidates: torch.Tensor) -> Measure:
    """Select among candidates [T, N], and compare with the scores of their entries."""
    out, query, cache = inputs.unwritten(inputs.topk), inputs.query(), inputs.oracle_cache.cache
    with unchanged(candidates=candidates):
        bench.layer_ops.select_topk_of_candidates(
            query, cache, inputs.token_map(), candidates, inputs.block_size, out, inputs.max_entries
        )
    measures = [Measure(0.0, 1.0)]
    for token, row in enumerate(numbers_of(out)):
        scores, errors = inputs.scores(token, bits=bench.layer_ops.sum_bits)
        inside = oracle_layer.inside_blocks(candidates[token].tolist(), inputs.block_size, len(scores))
        where = f"token {token}, which sees {len(scores)} entries, {int(inside.sum())} of them in its blocks"
        measures.append(judge_row(row, np.where(inside, scores, math.nan), errors, where))
    return worst_of(*measures)


def selects_within(bench: Bench, inputs: CandidateSelection) -> Measure:
    """Entries of the candidates of the case input are selected, and no others."""
    return _selected(bench, inputs, inputs.tensor(inputs.candidates))


def selects_within_published(bench: Bench, inputs: CandidateSelection) -> Measure:
    """Entries of the blocks that the backend published for the same queries are selected."""
    return _selected(bench, inputs, _published(bench, inputs))

"""Checks rows of whole layers in a running replay, stage by stage, each against float64 numpy.

A stage is judged by raw inputs, or by the bytes that the stage before it left, so that an error is named where it
arises and roundings do not add up. For a row of a step:

- key: its window key in the cache, against the one made of its hidden state (bound of each element:
  `read_back.rounding_bound`);
- query: its q, normalised and rotated, against the one made of its hidden state; bounded as a key that is stored in the
  dtype of hidden states, and the rounding of the latent is added;
- entry, index_key: the newest entry that it sees, and one at random, against entries made of the hidden states of their
  tokens; bounded as keys. V4.1 rounds latents to bf16, which adds a rounding to entries and that of a latent to keys;
- index_query: the indexer's quantised queries times the weights of their heads, against those made of its hidden state;
  bounded as an index key, and the rounding of the latent is added;
- selection: scores of all entries that it sees, in float64, from the quantised queries and the index keys in the cache.
  Exactly min(n, K) different entries must be selected, and none that was left out may beat one that was not by more
  than fp32 sums of Di products and Hi heads allow: (Di + Hi) 2^-24 of the sum of magnitudes, for each of both scores.
  In a step where no token sees more than K entries there are no scores: rows that select all are not compared;
- out, lse: attention of its q over the keys in the caches, of the window and of the selection;
- projection: 64 elements of the output of the layer, made of that attention.

The rounding of the latent to bf16 adds u / sqrt(3) in root mean square, with u = 2^-8 the largest relative error of
bf16, to every element that is projected from it; five deviations are allowed, because millions are compared. The last
three are norms of differences (of lse: the largest difference over heads), with these limits:

    out <= u sqrt(2)             (5.5e-3: out is rounded, and the weights of the softmax where matrix units need it)
    lse <= 4 w 2^-15             (1.5e-4 for w = 1.25: fp32 sums of q k, where keys have a root mean square of w)
    projection <= twice out      (out, the inverse rotation, z and the result are rounded; 64 samples scatter)

With fp32 hidden states and rows nothing is rounded but fp32 sums, 1e-5 for the last three.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from dsv4attn.core.cache.layer_caches import DeepseekV4Caches
from dsv4attn.core.cache.layout import KVCacheLayout
from dsv4attn.core.context_parallel.context import ContextParallel
from dsv4attn.core.metadata.metadata import AttentionMetadata
from dsv4attn.core.model.geometry import LayerGeometry, LayerKind
from dsv4attn.core.reprs import frozen
from dsv4attn.testing.kit.tolerances import as_f64, query_values
from dsv4attn.testing.oracle import attention as oracle
from dsv4attn.testing.oracle.attention import F64
from dsv4attn.tools.replay.oracle_layer import OracleLayer
from dsv4attn.tools.replay.over_ranks import KeyReaderOverRanks, selected_over_ranks
from dsv4attn.tools.replay.read_back import BF16, SUMS, KeyReader, rms, rounding_bound, share_of_bound
from dsv4attn.tools.replay.recorder import RecordingBackend
from dsv4attn.tools.replay.results import CheckResult, Errors
from dsv4attn.tools.replay.workload import I64, Tokens, Workload

_SAMPLED = 64
"""Elements of an output that are compared."""
_PROJECTED = 5 * BF16 / math.sqrt(3)
"""Bound on what the rounding of a row to bf16 adds to a projection of it, relative to its root mean square."""
_HELD = 2048
"""Recomputed entries that are held: consecutive decode steps see the same newest entry."""


def tolerance_of(dtype: torch.dtype, key_rms: float) -> Errors:
    """Largest errors that the formats explain; see the module. key_rms: largest root mean square of a key."""
    shares = (1.0,) * 6
    if dtype == torch.float32:
        return Errors(1e-5, 1e-5, 1e-5, *shares)
    out = BF16 * math.sqrt(2)
    return Errors(out, 4 * key_rms * SUMS, 2 * out, *shares)


def selecting_tokens(layer: LayerGeometry) -> int:
    """Fewest tokens of a c4a layer whose last one sees more entries than its indexer selects."""
    return layer.compress_ratio * (layer.topk + 1)


def choose_rows(tokens: Tokens, layer: LayerGeometry, count: int, random: np.random.Generator) -> I64:
    """Up to `count` different rows of a step: half of them, rounded up, at edges if there are any, the rest random.

    Edges, most important first: positions where the window fills up or begins to slide, the first of a sequence, and
    the first whose indexer leaves an entry out; the first and last token of a chunk; tokens that complete an entry.
    Among equal ones the choice is random.
    """
    position, row = tokens.positions, tokens.rows
    new_request = row[1:] != row[:-1]
    chunk_edge = np.concatenate([[True], new_request]) | np.concatenate([new_request, [True]])
    select_edge = (selecting_tokens(layer) - 1,) if layer.kind is LayerKind.CSA else ()
    window_edge = np.isin(position, (0, layer.window - 1, layer.window, *select_edge))
    completes = (position + 1) % layer.compress_ratio == 0 if layer.has_entries else np.zeros_like(window_edge)
    rank = 4 * window_edge + 2 * chunk_edge + completes
    by_rank = np.argsort(-(rank + random.random(len(tokens))))
    edges = by_rank[: min(-(-count // 2), int((rank > 0).sum()))]
    rest = random.permutation(np.setdiff1d(np.arange(len(tokens)), edges))
    return np.concatenate([edges, rest[: count - len(edges)]])


@frozen(eq=False)
class CheckedStep:
    """One step of one layer.

    number: of the step.
    tokens: its tokens.
    metadata: its metadata.
    selected: [>= T, K] int32 entries that the indexer selected, -1 for none; over ranks the numbers that this rank
    gives its own; None on other layers than c4a.
    output: [T, hidden] of the layer.
    """

    number: int
    tokens: Tokens
    metadata: AttentionMetadata
    selected: Tensor | None
    output: Tensor


class LayerChecker:
    """Checks rows of one layer and records the largest errors."""

    def __init__(
        self,
        layer: LayerGeometry,
        exact: OracleLayer,
        caches: DeepseekV4Caches,
        recorder: RecordingBackend,
        workload: Workload,
        tolerance: Errors,
        context: ContextParallel | None = None,
    ) -> None:
        """Take the sources of the rows. recorder: has what attention and the indexer left in a step.

        context: ranks that share the compressed entries; all of them check the same rows at the same time.
        """
        self._layer, self._exact, self._recorder, self._workload = layer, exact, recorder, workload
        self._caches, attention = caches, caches.attention
        self._window = KeyReader(attention.swa)
        self._entries = None if attention.compressed is None else KeyReader(attention.compressed)
        self._index = None if caches.index is None else KeyReader(caches.index)
        self._context = context
        if context is not None and self._entries is not None:
            self._entries = KeyReaderOverRanks(context, self._entries)
        if context is not None and self._index is not None:
            self._index = KeyReaderOverRanks(context, self._index)
        self._made: dict[tuple[int, int, bool], F64] = {}
        self.result = CheckResult(tolerance=tolerance)

    def check(self, step: CheckedStep, chosen: I64, random: np.random.Generator) -> None:
        """Compare the chosen rows of a step."""
        for i in chosen.tolist():
            row, position = int(step.tokens.rows[i]), int(step.tokens.positions[i])
            where = f"request {self._workload.requests[row].index}, position {position}"
            errors = self._errors(step, i, row, position, random)
            selecting = errors.selection is not None and position + 1 >= selecting_tokens(self._layer)
            self.result.add(errors, f"step {step.number}, {where}", selecting=selecting)

    def _errors(self, step: CheckedStep, i: int, row: int, position: int, random: np.random.Generator) -> Errors:
        layer, exact, recorder, metadata = self._layer, self._exact, self._recorder, step.metadata
        hidden = self._hidden(row, [position])[0]
        latent = exact.latent(hidden)
        request = int(np.searchsorted(metadata.swa.query_start_loc_cpu.numpy(), i, "right")) - 1
        blocks = metadata.swa.block_table[request].tolist()
        (key,) = self._window.read(blocks, [position])
        expected = exact.key(hidden, position)
        bound = rounding_bound(expected, self._caches.attention.swa.layout, layer.rope_dim)
        stages = {"key": share_of_bound(key, expected, bound)}
        whole = metadata.whole is not None and i >= metadata.swa.num_decode_tokens
        selected = None
        if metadata.compressed is not None and self._entries is not None:
            pages = metadata.compressed.block_table[request].tolist()
            stages |= self._compressed(row, position, pages, random)
            if step.selected is not None:
                selected = self._selected(step.selected[i], whole=whole)
                stages |= self._selection(i, position, selected, pages, latent, hidden)
        ratio = layer.compress_ratio if layer.has_entries else None
        positions, entries = oracle.visible_keys(position, layer.window, ratio, selected)
        keys = self._window.read(blocks, positions)
        if entries and self._entries is not None:
            keys = np.concatenate([keys, self._entries.read(pages, entries)])
        q = as_f64(recorder.q[i])
        stages["query"] = self._query_error(q, *exact.query(latent, position))
        out, lse = oracle.attend_row(q, keys, exact.sink, layer.scale)
        # the rank that attends to the row checks its lse
        sent = whole and not recorder.has_attended(i)
        dims = random.permutation(step.output.shape[1])[:_SAMPLED].tolist()
        return Errors(
            out=_relative(as_f64(recorder.out[i]), out),
            lse=0.0 if sent else _largest(np.abs(as_f64(recorder.lse[i]) - lse)),
            projection=_relative(as_f64(step.output[i, dims]), exact.output(out, position, dims)),
            **stages,
        )

    def _selected(self, row: Tensor, *, whole: bool) -> list[int]:
        """Entries of a row. whole: its numbers are those of the sequence, on every rank."""
        if self._context is not None and not whole:
            return selected_over_ranks(self._context, row)
        return [e for e in row.tolist() if e != -1]

    def _compressed(self, row: int, position: int, pages: list[int], random: np.random.Generator) -> dict[str, float]:
        """Errors of the newest entry that a row sees, and of one at random, and of their index keys."""
        count = (position + 1) // self._layer.compress_ratio
        if not count:
            return {}
        entries, layer, caches = [count - 1, int(random.integers(count))], self._layer, self._caches
        assert self._entries is not None
        assert caches.attention.compressed is not None
        sources = [("entry", self._entries.read(pages, entries), caches.attention.compressed.layout)]
        if self._index is not None and caches.index is not None:
            sources.append(("index_key", self._index.read(pages, entries), caches.index.layout))
        errors = {}
        for name, stored, layout in sources:
            exact = [self._entry(row, e, index=name == "index_key") for e in entries]
            pairs = zip(stored, exact, strict=True)
            bounds = [rounding_bound(v, layout, layer.rope_dim) + self._of_entry_latent(v, name) for v in exact]
            errors[name] = max(share_of_bound(s, v, bound) for (s, v), bound in zip(pairs, bounds, strict=True))
        return errors

    def _of_entry_latent(self, exact: F64, name: str) -> F64 | float:
        """Bound on what roundings of V4.1's latents to bf16, and of rows before they are rotated, add to an entry."""
        if not self._exact.rounds_latents:
            return 0.0
        rope = self._layer.rope_dim
        bound = rounding_bound(exact, KVCacheLayout.rows(len(exact) - rope, rope), rope)
        return bound + (_PROJECTED * rms(exact) if name == "index_key" else 0.0)

    def _entry(self, row: int, entry: int, *, index: bool) -> F64:
        key = row, entry, index
        if key not in self._made:
            if len(self._made) >= _HELD:
                self._made.clear()
            hidden = self._hidden(row, self._exact.entry_tokens(entry))
            self._made[key] = self._exact.entry(hidden, entry, index=index)
        return self._made[key]

    def _selection(
        self, i: int, position: int, selected: list[int], pages: list[int], latent: F64, hidden: F64
    ) -> dict[str, float]:
        """Errors of the indexer's queries of a row and of its selection."""
        query, topk = self._recorder.query, self._layer.topk
        count = (position + 1) // self._layer.compress_ratio
        proper = len(set(selected)) == len(selected) == min(count, topk) and all(0 <= e < count for e in selected)
        if query is None:
            # no token of the step sees more entries than are selected: there are no scores to compare
            return {} if proper and count <= topk else {"selection": math.inf}
        values, weights = query_values(query, i, self._index_layout), as_f64(query.weights[i])
        exact = self._exact.index_query(latent, hidden, position)
        errors = {"index_query": self._index_query_error(values, weights, *exact)}
        assert self._index is not None
        keys = self._index.read(pages, range(count))
        scores = weights @ np.maximum(values @ keys.T, 0)
        if not proper or np.isnan(scores).any():
            return {**errors, "selection": math.inf}
        size = np.abs(weights) @ (np.abs(values) @ np.abs(keys).T)
        out = np.setdiff1d(np.arange(count), selected)
        if not len(out):
            return {**errors, "selection": 0.0}
        # the pair that is the first to exceed its bound
        bound = size * (sum(values.shape) * 2.0**-24)
        best = out[np.argmax((scores - bound)[out])]
        worst = selected[int(np.argmin((scores + bound)[selected]))]
        excess = float(scores[best] - scores[worst])
        return {**errors, "selection": excess / float(bound[best] + bound[worst]) if excess > 0 else 0.0}

    def _query_error(self, q: F64, exact: F64, enlarged: F64) -> float:
        """Of q [H, D]. enlarged: [H], see `OracleLayer.query`."""
        layer, dtype = self._layer, self._workload.dtype
        rows = KVCacheLayout.rows(layer.nope_dim, layer.rope_dim, dtype=dtype)
        bound = np.stack([rounding_bound(row, rows, layer.rope_dim) for row in exact])
        return share_of_bound(q, exact, bound + self._of_latent * enlarged[:, None])

    def _index_query_error(self, values: F64, weights: F64, exact: F64, factors: F64) -> float:
        """Of queries times weights: the scale of a quantised query is part of its weight."""
        layout, rope_dim = self._index_layout, self._layer.rope_dim
        bound = np.stack([rounding_bound(row, layout, rope_dim) for row in exact]) + self._of_latent * rms(exact)
        bound = bound * np.abs(factors)[:, None] + np.abs(exact) * SUMS * rms(factors)
        return share_of_bound(values * weights[:, None], exact * factors[:, None], bound)

    @property
    def _of_latent(self) -> float:
        """Bound on what the rounding of the latent adds to a projection of it, relative to its root mean square."""
        return 0.0 if self._workload.dtype == torch.float32 else _PROJECTED

    @property
    def _index_layout(self) -> KVCacheLayout:
        assert self._caches.index is not None
        return self._caches.index.layout

    def _hidden(self, row: int, positions: list[int]) -> F64:
        """[n, hidden] hidden states of a request."""
        rows = np.full(len(positions), row, np.int64)
        tokens = self._workload.tokens(rows, np.array(positions, np.int64))
        return as_f64(self._workload.hidden_states(self._layer.kind, tokens))


def _relative(actual: F64, expected: F64) -> float:
    """Norm of the difference over the norm of the expected vector, the largest over rows."""
    error, size = np.linalg.norm(actual - expected, axis=-1), np.linalg.norm(expected, axis=-1)
    with np.errstate(divide="ignore", invalid="ignore"):
        return _largest(np.where(error == 0, 0.0, error / size))


def _largest(errors: F64) -> float:
    """The largest, or infinity when one is not a number."""
    return math.inf if np.isnan(errors).any() else float(errors.max())

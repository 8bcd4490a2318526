"""Checks rows of a running replay: the float64 oracle computes them again from raw inputs.

The backend's tensors are not used: raw q and keys come from the workload again, are normalised, rotated, quantised and
read back by the oracle's own functions, and attended with the sink. Compared are:

- out: per head, the norm of the difference divided by the norm of the oracle's row; the largest over heads;
- lse: the largest absolute difference over heads;
- projection: as out, over a seeded sample of the projected values of all groups together.

Tolerances follow from the formats. A value rounded to bf16 is off by at most u = 2^-8 of itself, and over a vector by
at most u / sqrt(3) in root mean square. Two such roundings happen to a row of out: its own, and that of the softmax
weights where matrix units need bf16 (the reference uses fp32); they are independent and add up to u sqrt(2/3). The
inputs are the same bits on both sides except where fp32 and fp64 disagree about a tie: then an element of q or of a
rotated key is one bf16 step off. One such step of a q in [2, 4), 2^-6, on the loudest channel w moves the logits by
2^-6 w / sqrt(D) in root mean square, and out by the same relative amount. So

    out <= hypot(u sqrt(2/3), 2^-6 w / sqrt(D))      (3.8e-3 for D = 512)
    lse <= 2^-6 * 4 w / sqrt(D)                      (8.3e-3; |k| is four deviations there, and nothing is averaged)
    projection <= twice that of out                  (out, the inverse rotation and z rounded; 64 samples scatter)

With fp32 rows no format rounds anything, and fp32 sums of a few thousand terms bound all three at 1e-5.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from dsv4attn.core.cache.layout import KVCacheLayout
from dsv4attn.core.model.geometry import LayerGeometry, LayerKind
from dsv4attn.testing import oracle
from dsv4attn.testing.factories import frequencies
from dsv4attn.testing.oracle import F64
from dsv4attn.testing.tolerances import rounded, stored
from dsv4attn.tools.replay.random_weights import LOUDEST
from dsv4attn.tools.replay.results import CheckResult, Errors
from dsv4attn.tools.replay.workload import I64, Tokens, Workload

__all__ = ["AttentionChecker", "choose_rows", "largest", "relative", "selecting_tokens", "tolerance_of"]

_SAMPLED_RANKS = 8
"""Projected values compared in each group."""
_CACHED_KEYS = 8192
"""Keys cached between rows; consecutive decode steps use nearly the same keys."""


def tolerance_of(layer: LayerGeometry, dtype: torch.dtype) -> Errors:
    """Largest errors that the formats explain; see the module for the derivation."""
    if dtype == torch.float32:
        return Errors(1e-5, 1e-5, 1e-5)
    step = 2.0**-6 * LOUDEST / math.sqrt(layer.head_dim)
    out = math.hypot(2.0**-8 * math.sqrt(2 / 3), step)
    return Errors(out, 4 * step, 2 * out)


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


class AttentionChecker:
    """Checks rows of one layer type and records the largest errors."""

    def __init__(self, layer: LayerGeometry, layout: KVCacheLayout, workload: Workload, wo_a: Tensor) -> None:
        """Take the sources of the rows. wo_a: [G * rank, H / G * D]."""
        self._layer, self._layout, self._workload = layer, layout, workload
        self._inv_freq = frequencies(layer.rope)
        self._sink = workload.sink(layer.kind).double().cpu().numpy()
        self._wo_a = wo_a.unflatten(0, (workload.geometry.o_groups, -1)).cpu().numpy()
        self._window_keys: dict[tuple[int, int], F64] = {}
        self._entries: dict[int, F64] = {}
        self.result = CheckResult(tolerance=tolerance_of(layer, workload.dtype))

    def check(
        self, step: int, tokens: Tokens, chosen: I64, out: Tensor, lse: Tensor, z: Tensor, random: np.random.Generator
    ) -> None:
        """Compare the chosen rows of a step. out: [T, H, D]. lse: [T, H]. z: [T, G, rank]."""
        rank = self._wo_a.shape[1]
        for i in chosen.tolist():
            row, position = int(tokens.rows[i]), int(tokens.positions[i])
            cos, sin = oracle.rope_cos_sin(position, self._inv_freq)
            expected, expected_lse = self._attended(row, position, cos, sin)
            ranks = random.permutation(rank)[:_SAMPLED_RANKS]
            weight = self._wo_a[:, ranks].astype(np.float64)
            projected = oracle.inverse_rope_project(expected, cos, sin, self._layer.rope_dim, weight, None)
            errors = Errors(
                out=relative(out[i].double().cpu().numpy(), expected),
                lse=largest(np.abs(lse[i].double().cpu().numpy() - expected_lse)),
                projection=relative(z[i].double().cpu().numpy()[:, ranks].ravel(), projected.ravel()),
            )
            self.result.add(errors, f"step {step}, request {self._workload.requests[row].index}, position {position}")

    def _attended(self, row: int, position: int, cos: F64, sin: F64) -> tuple[F64, F64]:
        """The oracle's row: (out [H, D], lse [H])."""
        layer, workload = self._layer, self._workload
        token = _tokens(workload, row, [position])
        raw = workload.q_rows(workload.q_numbers(layer.kind, token))[0].double().cpu().numpy()
        q = rounded(oracle.q_norm_rope(raw, cos, sin, layer.rope_dim, layer.q_eps), workload.dtype)
        selected = None
        if layer.kind is LayerKind.CSA:
            selected = [e for e in workload.topk(layer.kind, token)[0].tolist() if e != -1]
        ratio = layer.compress_ratio if layer.has_entries else None
        positions, entries = oracle.visible_keys(position, layer.window, ratio, selected)
        keys = [*self._keys_at(row, positions), *self._entries_at(row, entries)]
        return oracle.attend_row(q, np.stack(keys), self._sink, layer.scale)

    def _keys_at(self, row: int, positions: Sequence[int]) -> list[F64]:
        """Window keys as a reader of the cache sees them."""
        tokens = _tokens(self._workload, row, positions)
        numbers = list(zip(self._workload.kv_numbers(self._layer.kind, tokens).tolist(), positions, strict=True))
        if len(self._window_keys) > _CACHED_KEYS:
            self._window_keys.clear()
        for number, position in numbers:
            if (number, position) not in self._window_keys:
                cos, sin = oracle.rope_cos_sin(position, self._inv_freq)
                raw = self._workload.key_rows(np.array([number]))[0].double().cpu().numpy()
                rotated = rounded(oracle.apply_rope(raw, cos, sin, self._layer.rope_dim), self._workload.dtype)
                self._window_keys[number, position] = stored(rotated, self._layout)
        return [self._window_keys[key] for key in numbers]

    def _entries_at(self, row: int, entries: Sequence[int]) -> list[F64]:
        """Compressed entries as a reader of the cache sees them. Their raw rows are rotated already."""
        ratio = self._layer.compress_ratio
        tokens = _tokens(self._workload, row, [e * ratio + ratio - 1 for e in entries])
        numbers = self._workload.entry_numbers(self._layer.kind, tokens).tolist()
        if len(self._entries) > _CACHED_KEYS:
            self._entries.clear()
        for number in numbers:
            if number not in self._entries:
                entry = self._workload.key_rows(np.array([number]))[0].double().cpu().numpy()
                self._entries[number] = stored(entry, self._layout)
        return [self._entries[number] for number in numbers]


def _tokens(workload: Workload, row: int, positions: Sequence[int]) -> Tokens:
    return workload.tokens(np.full(len(positions), row, np.int64), np.array(positions, np.int64))


def relative(actual: F64, expected: F64) -> float:
    """Norm of the difference over the norm of the expected vector, the largest over rows."""
    error, size = np.linalg.norm(actual - expected, axis=-1), np.linalg.norm(expected, axis=-1)
    with np.errstate(divide="ignore", invalid="ignore"):
        return largest(np.where(error == 0, 0.0, error / size))


def largest(errors: F64) -> float:
    """The largest, or infinity when one is not a number."""
    return math.inf if np.isnan(errors).any() else float(errors.max())

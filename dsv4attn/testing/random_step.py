"""Requests and their random numbers, without pages or tensors: the inputs of the oracle.

Every number is a function of the seed, the request and the position, so steps that share a position share its rows,
whatever else is in the batch, and position 1,048,575 costs no more than position 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, cached_property, lru_cache
from typing import Literal, NamedTuple

import attrs
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dsv4attn.core.cache.layout import Arrangement, Fp8Format, KVCacheLayout
from dsv4attn.core.model.geometry import LayerGeometry, LayerKind, ModelGeometry, Rope, Yarn
from dsv4attn.testing import oracle
from dsv4attn.testing.tolerances import F64, Expected, rounded, stored, tolerance

__all__ = ["RandomStep", "Token", "layouts", "tiny_geometry", "v41_layouts"]

Q, KV, ENTRY, SINK, TOPK = range(5)  # streams of random numbers
HEADS = 2**12  # more heads than any model has
ABSENT = (-1, -7, 2**31 - 1, 0x7FC00000, -(2**31))  # entry numbers that name nothing; the fourth is a NaN's bits


def tiny_geometry(
    *,
    num_heads: int = 4,
    head_dim: int = 32,
    rope_dim: int = 8,
    window: int = 8,
    topk: int = 6,
    ratios: tuple[int, int] = (4, 16),
    o_groups: int = 1,
) -> ModelGeometry:
    """A model with one layer of each kind, so small that every row can be judged."""
    return ModelGeometry(
        num_heads=num_heads,
        head_dim=head_dim,
        rope_dim=rope_dim,
        window=window,
        index_topk=topk,
        layers=tuple(zip(LayerKind, (1, *ratios), strict=True)),
        max_position=2**20,
        hidden_size=64,
        o_groups=o_groups,
        o_lora_rank=8,
        compress_yarn=Yarn(16.0, 256),
        name="tiny",
    )


def layouts(geometry: ModelGeometry, group_size: int = 16) -> dict[str, KVCacheLayout]:
    """Every built-in layout for the dims of a model, by a short name."""
    dims = geometry.head_dim - geometry.rope_dim, geometry.rope_dim
    ocp = KVCacheLayout.fp8_ds_mla(*dims, group_size=group_size)
    return {
        "ocp": ocp,
        "fnuz": attrs.evolve(ocp, fp8_format=Fp8Format.FNUZ, fp8_max=Fp8Format.FNUZ.max),
        "interleaved": attrs.evolve(ocp, arrangement=Arrangement.INTERLEAVED),
        "bf16": KVCacheLayout.rows(*dims),
        "fp32": KVCacheLayout.rows(*dims, dtype=torch.float32),
    }


def v41_layouts(geometry: ModelGeometry) -> dict[str, KVCacheLayout]:
    """V4.1's records for the dims of a model, by a short name. Those of fp4 are for compressed caches."""
    dims, split = (geometry.head_dim - geometry.rope_dim, geometry.rope_dim), Arrangement.SPLIT
    return {
        "v41": KVCacheLayout.v41_fp8(*dims),
        "v41-split": KVCacheLayout.v41_fp8(*dims, arrangement=split),
        "v41-fp4": KVCacheLayout.v41_fp4(*dims),
        "v41-fp4-split": KVCacheLayout.v41_fp4(*dims, arrangement=split),
    }


STALE_POSITIONS = (0, 2**40, -5, 1, 2**31 - 1, -(2**62))
"""Positions of rows of padding: what earlier steps left there."""


class Token(NamedTuple):
    """A query row of the batch: number of its request, its position, and whether it is a token or padding."""

    request: int
    position: int
    valid: bool


@attrs.frozen(kw_only=True, eq=False, slots=False)
class RandomStep:
    """One step of one layer.

    kind: kind of the layer.
    requests: (tokens before, tokens of this step[, padding at its end]) of each, decodes first.
    geometry: the model.
    layout: layout of the window cache.
    compressed_layout: layout of the compressed cache, or None for that of the window cache; both must read as the same
    type.
    q_dtype: type of q and kv.
    sinks: one for each head, "random", or None for no sinks.
    topk: rows of the indexer. "clean": valid numbers, then -1. "holes": valid numbers anywhere among -1. "garbage":
    valid numbers anywhere among numbers that name no entry. "none": no valid number.
    extra_rows: rows of q behind the batch.
    outliers: whether every ninth NoPE channel of a key is 20 times as large as the others.
    first_head: number of this rank's first head; a rank has the rows and sinks of its own heads.
    distinct: entries whose numbers differ by a multiple of this have equal rows; None means that all rows differ. It
    limits the rows that are judged for a million tokens.
    seed: seed of all random numbers.
    """

    kind: LayerKind = attrs.field(default=LayerKind.SWA, converter=LayerKind)
    requests: Sequence[tuple[int, ...]]
    geometry: ModelGeometry = attrs.field(factory=tiny_geometry)
    layout: KVCacheLayout = attrs.Factory(lambda self: layouts(self.geometry)["ocp"], takes_self=True)
    compressed_layout: KVCacheLayout | None = None
    q_dtype: torch.dtype = torch.bfloat16
    sinks: Sequence[float] | Literal["random"] | None = "random"
    topk: Literal["clean", "holes", "garbage", "none"] = "clean"
    extra_rows: int = 0
    outliers: bool = False
    first_head: int = 0
    distinct: int | None = None
    seed: int = 0

    @cached_property
    def layer(self) -> LayerGeometry:
        """The layer's geometry."""
        return self.geometry.layer_of_kind(self.kind)

    @property
    def spans(self) -> list[range]:
        """Positions of this step, for each request."""
        return [range(before, before + count) for before, count, *_ in self.requests]

    @cached_property
    def tokens(self) -> list[Token]:
        """The rows of the batch, without the extra ones."""
        rows = []
        for i, (before, count, *padding) in enumerate(self.requests):
            rows += [Token(i, before + j, j < count - sum(padding)) for j in range(count)]
        return rows

    @property
    def _heads(self) -> NDArray[np.int64]:
        return np.arange(self.first_head, self.first_head + self.layer.num_heads, dtype=np.int64)

    def q_rows(self, request: int, positions: Sequence[int]) -> F64:
        """[n, H, D] queries before norm and rotation."""
        numbers = np.asarray(positions, dtype=np.int64)[:, None] * HEADS + self._heads
        return rounded(normal((self.seed, Q, request), numbers, self.layer.head_dim), self.q_dtype)

    def key_rows(self, request: int, positions: Sequence[int]) -> F64:
        """[n, D] keys before rotation."""
        return self._rows(KV, request, positions)

    def entry_rows(self, request: int, numbers: Sequence[int]) -> F64:
        """[n, D] compressed entries as they are stored, rotation included."""
        return self._rows(ENTRY, request, self._alike(numbers))

    def _alike(self, numbers: Sequence[int]) -> Sequence[int]:
        return [n % self.distinct for n in numbers] if self.distinct else numbers

    def _rows(self, stream: int, request: int, numbers: Sequence[int]) -> F64:
        return self._library.rows(stream, request, numbers)

    @cached_property
    def _library(self) -> _Library:
        layer, compressed = self.layer, self.compressed_layout or self.layout
        dtype = torch.bfloat16 if self.q_dtype == torch.bfloat16 else self.layout.row_dtype
        return _library(self.seed, layer.nope_dim, layer.rope, self.layout, compressed, self.outliers, dtype)

    @cached_property
    def sink_values(self) -> F64 | None:
        """[H] sinks, or None."""
        given = 2 * normal((self.seed, SINK), self._heads, 1)[:, 0] if isinstance(self.sinks, str) else self.sinks
        return None if given is None else rounded(np.asarray(given, dtype=np.float64), torch.float32)

    @cached_property
    def topk_rows(self) -> NDArray[np.int32]:
        """[T', K] output of the indexer; rows behind the batch hold garbage."""
        width = max(self.layer.topk, 1)
        rows = np.full((len(self.tokens) + self.extra_rows, width), 0x7FC00000, dtype=np.int32)
        for row, token in zip(rows, self.tokens, strict=False):
            rng = np.random.default_rng((self.seed, TOPK, token.request, token.position))
            complete = (token.position + 1) // self.layer.compress_ratio
            chosen, places = rng.choice(complete, min(complete, width), replace=False), np.arange(width)
            if self.topk == "none":
                chosen = chosen[:0]
            elif self.topk != "clean":
                chosen, places = chosen[: rng.integers(len(chosen) + 1)], rng.permutation(width)
            row[:] = rng.choice([*ABSENT, complete, complete + 1], width) if self.topk == "garbage" else -1
            row[places[: len(chosen)]] = chosen
        return rows

    def visible(self, row: int) -> tuple[list[int], list[int]]:
        """Window positions and compressed entries that a row of the batch may see."""
        token, ratio = self.tokens[row], None if self.kind is LayerKind.SWA else self.layer.compress_ratio
        if not token.valid:
            return [], []
        selected = self.topk_rows[row].tolist() if self.kind is LayerKind.C4A else None
        return oracle.visible_keys(token.position, self.layer.window, ratio, selected)

    def expected(self) -> tuple[F64, F64]:
        """Return (out [T', H, D], lse [T', H]) by the oracle alone: rows by position, no pages, no tables."""
        return self._expected.out, self._expected.lse

    @cached_property
    def _expected(self) -> Expected:
        layer, rope, library = self.layer, self.layer.rope, self._library
        answers = Expected.empty(len(self.tokens) + self.extra_rows, layer.num_heads, layer.head_dim)
        for t, token in enumerate(self.tokens):
            positions, entries = self.visible(t)
            records = [_record(library, KV, token.request, p) for p in positions]
            records += [_record(library, ENTRY, token.request, e) for e in self._alike(entries)]
            turn = oracle.rope_cos_sin(token.position, frequencies(rope))
            q = oracle.q_norm_rope(self.q_rows(token.request, [token.position])[0], *turn, rope.dim, layer.q_eps)
            answers.judge(t, rounded(q, self.q_dtype), records, self.sink_values, layer.scale)
        return answers

    def compare(self, out: Tensor, lse: Tensor) -> float:
        """Return the largest error in tolerances, at most 1. Raises AssertionError naming the worst row."""
        error, where = self.judge(out, lse)
        assert error <= 1, where
        return error

    def judge(self, out: Tensor, lse: Tensor | None) -> tuple[float, str]:
        """Return the largest error in tolerances, of any size, and a sentence about its row."""
        errors = self._expected.errors(out, lse) / tolerance(self.layout, self.q_dtype)
        if not errors.size:
            return 0.0, "no rows"
        row, head = np.unravel_index(errors.argmax(), errors.shape)
        token = self.tokens[row] if row < len(self.tokens) else "behind the batch"
        found = "not asked for" if lse is None else f"{lse[row, head].item():.7g}"
        return float(errors.max()), (
            f"{self.kind.value} row {row} ({token}), head {head}: error of {errors.max():.3g} tolerances, "
            f"lse {found}, expected {self._expected.lse[row, head]:.7g}; "
            f"{(errors > 1).any(1).sum()} of {len(errors)} rows are wrong"
        )


@attrs.frozen(cache_hash=True)
class _Library:
    """Parameters of the keys of a step. Steps with equal parameters share their keys.

    dtype: rows are drawn with values of this type, which q and the cache can hold.
    """

    seed: int
    nope_dim: int
    rope: Rope
    layout: KVCacheLayout
    compressed_layout: KVCacheLayout
    outliers: bool
    dtype: torch.dtype

    def rows(self, stream: int, request: int, numbers: Sequence[int]) -> F64:
        """[n, D] rows of a stream, before rotation."""
        numbers = [int(number) for number in numbers]
        if len(numbers) > _MOST_ROWS:
            return self._drawn(stream, request, numbers)
        # of its own, as another thread may clear the common ones
        found = {n: row for n in numbers if (row := _ROWS.get((self, stream, request, n))) is not None}
        missing = [number for number in dict.fromkeys(numbers) if number not in found]
        if missing:
            found.update(zip(missing, self._drawn(stream, request, missing), strict=True))
            if len(_ROWS) + len(missing) > _MOST_ROWS:
                _ROWS.clear()
            _ROWS.update(((self, stream, request, number), found[number]) for number in missing)
        width = self.nope_dim + self.rope.dim
        return np.array([found[number] for number in numbers]).reshape(len(numbers), width)

    def _drawn(self, stream: int, request: int, numbers: Sequence[int]) -> F64:
        """As `rows`, all at once."""
        rows = normal((self.seed, stream, request), np.array(numbers, dtype=np.int64), self.nope_dim + self.rope.dim)
        rows[:, 1 : self.nope_dim : 9] *= 20 if self.outliers else 1
        return rounded(rows, self.dtype)


_MOST_ROWS = 2**14
_ROWS: dict[tuple[_Library, int, int, int], F64] = {}
"""Rows before rotation, by library, stream, request and number: most steps begin with keys that others had too."""

_library = cache(_Library)
"""One object of equal parameters, so that those that are cached by it are found by its identity."""


@lru_cache(maxsize=2**14)
def _record(library: _Library, stream: int, request: int, number: int) -> F64:
    """[D] row as a cache returns it. Cached, because many steps use the same few thousand rows."""
    row = library.rows(stream, request, [number])[0]
    if stream == KV:
        turn = oracle.rope_cos_sin(number, frequencies(library.rope))
        row = oracle.apply_rope(row, *turn, library.rope.dim)
    return stored(row, library.layout if stream == KV else library.compressed_layout)


@cache
def frequencies(rope: Rope) -> oracle.F32:
    """Frequencies of a layer's rotation."""
    yarn = oracle.Yarn(**attrs.asdict(rope.yarn)) if rope.yarn else None
    return oracle.rope_inv_freq(rope.dim, rope.theta, yarn)


@cache
def _start(key: tuple[int, ...]) -> np.uint64:
    """Where the numbers of a key begin."""
    start: np.uint64 = np.random.SeedSequence(key).generate_state(1, np.uint64)[0]
    return start


def normal(key: tuple[int, ...], rows: NDArray[np.int64], width: int) -> F64:
    """Standard normal numbers [*rows.shape, width] that depend on the key, the row number and the column only."""
    x = rows.astype(np.uint64)[..., None] * np.uint64(width) + np.arange(width, dtype=np.uint64)
    x *= np.uint64(0x9E3779B97F4A7C15)
    x += _start(key)
    x ^= x >> np.uint64(30)  # the finaliser of splitmix64
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    first, second = ((x >> np.uint64(32)) + np.uint64(1)) / 2.0**32, (x & np.uint64(0xFFFFFFFF)) / 2.0**32
    return np.asarray(np.sqrt(-2 * np.log(first)) * np.cos(2 * np.pi * second))

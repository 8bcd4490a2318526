"""Checks of the output projection against the oracle, with weights in every format."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import attrs
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dsv4attn.core.attention.projection import o_proj, output_projection
from dsv4attn.core.model.quantized_weight import BlockScaledWeight
from dsv4attn.errors import ArgumentError
from dsv4attn.testing.case import Bench, Measure, SkipCase, Wrong
from dsv4attn.testing.checks.insert import BF16, FP32_STEPS, CacheRows, stale_rows
from dsv4attn.testing.kit.factories import normal
from dsv4attn.testing.kit.strided import StridedTensors, unchanged
from dsv4attn.testing.kit.tolerances import F64, as_f64, hold_shape, rounded, shown, worst_error
from dsv4attn.testing.oracle import attention as oracle

WO_A, WO_B = 28, 29
"""Streams of random numbers."""
EXPONENTS = 117, 121
"""Bytes of E8M0 scales that are drawn. They are close together, so that rotated dims, whose rounding makes most of
the budget, are not lost among larger values."""
SUMS_OF_CODES = 2.0**-12
"""Largest error of a sum of codes, relative to the magnitudes that are summed: some matrix units keep 14 bits."""
TURNED = 2.0**-22
"""Largest error of a value that is turned back in fp32, relative to both values of its pair."""


@attrs.frozen(eq=False)
class _Matrix:
    """A weight.

    forms: as callers pass it, on the device; several forms of one matrix if it is fp8.
    values: [rows, columns] float64 - what it stands for.
    """

    forms: tuple[Any, ...]
    values: F64


def _matrix(
    rows: CacheRows, stream: int, shape: tuple[int, int], strided: StridedTensors, *, as_codes: bool = False
) -> _Matrix:
    """A random weight in the case input's format, with rows apart if the case input says so of `wo_a`.

    as_codes: fp8 stands for codes times scales, not rounded to bf16.
    """
    if rows.scale:
        return _scaled(rows, stream, shape, strided, as_codes=as_codes)
    dtype = rows.weight_dtype or rows.dtype
    values = rounded(normal((rows.seed, stream), np.arange(shape[0]), shape[1]), dtype)
    tensor = rows.tensor(values, dtype)
    return _Matrix((strided("wo_a", tensor) if stream == WO_A else tensor,), values)


def _scaled(
    rows: CacheRows, stream: int, shape: tuple[int, int], strided: StridedTensors, *, as_codes: bool
) -> _Matrix:
    """Random finite codes and random scales of their blocks."""
    e8m0 = getattr(torch, "float8_e8m0fnu", None)
    if rows.scale == "e8m0" and e8m0 is None:
        raise SkipCase("this torch has no float8_e8m0fnu")
    draw = np.random.default_rng((rows.seed, stream))
    codes = draw.integers(0, 256, shape).astype(np.uint8)
    codes[np.isnan(oracle.decode_e4m3(codes, rows.fnuz))] = 1
    grid = -(-shape[0] // rows.block), -(-shape[1] // rows.block)
    exponents = draw.integers(*EXPONENTS, grid).astype(np.uint8)
    factors = (draw.uniform(1, 2, grid) * 2.0 ** draw.integers(-10, -6, grid)).astype(np.float32)
    scale: NDArray[Any] = factors if rows.scale == "fp32" else exponents
    fp8 = torch.float8_e4m3fnuz if rows.fnuz else torch.float8_e4m3fn
    forms: list[Any] = []
    for name in ("", "weight_scale_inv", "weight_scale", "scale"):
        # each form in memory of its own, so that each is converted
        weight, ours = rows.tensor(codes.copy()).view(fp8), rows.tensor(scale.copy())
        ours = ours.view(e8m0) if e8m0 is not None and rows.scale == "e8m0" else ours
        weight = strided("wo_a", weight) if stream == WO_A else weight
        forms.append(SimpleNamespace(**{"weight": weight, name: ours}) if name else BlockScaledWeight(weight, ours))
    known = factors.astype(np.float64) if rows.scale == "fp32" else exponents
    return _Matrix(tuple(forms), oracle.dequantize_blocks(codes, known, rows.fnuz, rows.block, exact=as_codes))


def projects(bench: Bench, rows: CacheRows) -> Measure:
    """Outputs are turned back at the query's position and projected group by group; o itself stays.

    A backend may round the turned values to o's dtype, and the result; sums are fp32. Matrices in fp8 go through core,
    which converts them, unless the backend multiplies codes: every form of one gives the same bits. A backend that
    multiplies codes may refuse rows of codes that lie apart and heads without whole runs.
    """
    strided, shape = StridedTensors(rows.strided), (rows.count, rows.groups, rows.rank)
    as_codes = _as_codes(bench, rows)
    wo_a = _matrix(rows, WO_A, (rows.groups * rows.rank, _width(rows)), strided, as_codes=as_codes)
    o, table = _inputs(rows, strided)
    projected = list[Tensor]()
    for form in wo_a.forms:
        rest = o, rows.tensor(rows.positions), table, form, rows.groups
        try:
            with unchanged(o=o):
                z = (
                    o_proj(bench.backend, *rest, layer=rows.layer)
                    if rows.scale
                    else bench.backend.inv_rope_o_proj(*rest)
                )
        except ArgumentError as refusal:
            if as_codes and (rows.strided or rows.layer.head_dim % rows.block):
                raise SkipCase(f"products of codes are not for these: {refusal}") from refusal
            raise
        strided.check()
        hold_shape(z, shape, o.dtype, "returned")
        if projected and not torch.equal(z, projected[0]):
            raise Wrong("a module with the weight and its scales gives another result than a BlockScaledWeight")
        projected.append(z)
    expected, budget = _expected(rows, wo_a.values, as_codes=as_codes)
    return _judge(projected[0], expected, budget)


def projects_without_positions_of_padding(bench: Bench, rows: CacheRows) -> Measure:
    """Rows of padding, which attention leaves zero, stay zero at any position, and change no other row."""
    strided = StridedTensors(rows.strided)
    wo_a = _matrix(rows, WO_A, (rows.groups * rows.rank, _width(rows)), strided).forms[0]
    o, table = _inputs(rows, strided)
    padding, positions = stale_rows(rows.count, rows.positions)
    live, missing = (rows.tensor(np.flatnonzero(which)) for which in (~padding, padding))
    o[missing] = 0
    project = bench.backend.inv_rope_o_proj
    expected, with_padding = (project(o, rows.tensor(p), table, wo_a, rows.groups) for p in (rows.positions, positions))
    if not torch.equal(with_padding[live], expected[live]):
        raise Wrong("a position of padding changed another row")
    if with_padding[missing].any():
        raise Wrong("rows of padding: not zero")
    return Measure()


def outputs(bench: Bench, rows: CacheRows) -> Measure:
    """Outputs are turned back, projected group by group and then by wo_b; devices with some of the heads add up.

    The result of wo_a is rounded to o's dtype, and so is that of wo_b of each device. An error of z moves a result by
    at most as much times the magnitudes of wo_b.
    """
    strided = StridedTensors(rows.strided)
    as_codes = _as_codes(bench, rows)
    first = _matrix(rows, WO_A, (rows.groups * rows.rank, _width(rows)), strided, as_codes=as_codes)
    second = _matrix(rows, WO_B, (rows.hidden, rows.groups * rows.rank), strided)
    o, table = _inputs(rows, strided)
    positions, unit = rows.tensor(rows.positions), _unit(rows)
    wanted_z, budget_z = _expected(rows, first.values, as_codes=as_codes)
    results, expected, budget = np.zeros((3, rows.count, rows.hidden))
    heads, width = o.shape[1] // rows.ranks, rows.groups * rows.rank // rows.ranks
    for rank in range(rows.ranks):
        of_rank, columns = slice(rank * heads, (rank + 1) * heads), slice(rank * width, (rank + 1) * width)
        wo_a, wo_b = first.forms[0], second.forms[-1]
        if rows.ranks > 1:
            wo_a, wo_b = wo_a[columns], wo_b[:, columns]
        y = output_projection(
            bench.backend,
            o[:, of_rank],
            positions,
            table,
            wo_a,
            wo_b,
            rows.groups // rows.ranks,
            layer=rows.layer_of_rank,
        )
        strided.check()
        hold_shape(y, (rows.count, rows.hidden), o.dtype, "returned")
        matrix = second.values[:, columns]
        z, moved = (part.reshape(rows.count, -1)[:, columns] for part in (wanted_z, budget_z))
        results += as_f64(y)
        expected += z @ matrix.T
        moved = (moved + FP32_STEPS * np.abs(z)) @ np.abs(matrix).T
        budget += (1 + unit) * moved + unit * np.abs(z @ matrix.T)
    return _judge(torch.from_numpy(results), expected, budget)


def _as_codes(bench: Bench, rows: CacheRows) -> bool:
    """Whether the backend rounds outputs to fp8, and multiplies codes."""
    return bool(rows.scale) and bench.backend.projects_fp8


def _width(rows: CacheRows) -> int:
    """Elements of a group's heads."""
    return rows.layer.num_heads // rows.groups * rows.layer.head_dim


def _unit(rows: CacheRows) -> float:
    """Largest relative error of one rounding to o's dtype."""
    return BF16 if rows.dtype == torch.bfloat16 else 2.0**-24


def _inputs(rows: CacheRows, strided: StridedTensors) -> tuple[Tensor, Tensor]:
    """O [n, H, D] and the table of angles, on the device."""
    o = strided("o", rows.tensor(rows.queries, rows.dtype))
    return o, strided("cos_sin_cache", rows.tensor(rows.table, torch.float32))


def _expected(rows: CacheRows, weight: F64, *, as_codes: bool) -> tuple[F64, F64]:
    """[n, G, rank] float64: the oracle's z and the budget of each element."""
    if as_codes:
        return _expected_of_codes(rows, weight)
    heads, dim, rope, inner = rows.layer.num_heads, rows.layer.head_dim, rows.layer.rope_dim, _width(rows)
    grouped, unit = weight.reshape(rows.groups, rows.rank, inner), _unit(rows)
    turned_part = np.zeros((heads // rows.groups, dim), dtype=bool)
    turned_part[:, -rope:] = True
    parts = turned_part.reshape(-1), np.ones(inner, dtype=bool)
    weights = [np.linalg.norm(grouped[..., p], axis=2) for p in parts]
    values, budget = np.zeros((2, rows.count, rows.groups, rows.rank))
    for i in range(rows.count):
        values[i] = oracle.inverse_rope_project(rows.queries[i], *rows.turn(i), rope, grouped, None)
        x = rows.queries[i].reshape(rows.groups, inner)
        norms = [np.linalg.norm(x[:, p], axis=1)[:, None] * w for p, w in zip(parts, weights, strict=True)]
        budget[i] = unit * (norms[0] + np.abs(values[i])) + FP32_STEPS * norms[1]
    return values, budget


def _expected_of_codes(rows: CacheRows, weight: F64) -> tuple[F64, F64]:
    """The same of outputs that are rounded to codes. A value that fp32 moves past a tie may have either code."""
    rope, grouped = rows.layer.rope_dim, weight.reshape(rows.groups, rows.rank, -1)
    values, budget = np.zeros((2, rows.count, rows.groups, rows.rank))
    for i, o in enumerate(rows.queries):
        turned, moved = oracle.apply_rope(o, *rows.turn(i), rope, inverse=True), np.zeros_like(o)
        pairs = np.abs(o[:, -rope:]).reshape(len(o), -1, 2).sum(2)
        moved[:, -rope:] = TURNED * np.repeat(pairs, 2, 1)
        x, *others = (
            oracle.round_runs(near, rows.block, rows.fnuz).reshape(rows.groups, -1, 1)
            for near in (turned, turned - moved, turned + moved)
        )
        either = np.maximum(*(np.abs(other - x) for other in others))
        values[i] = (grouped @ x)[..., 0]
        errors = SUMS_OF_CODES * np.abs(x) + either
        budget[i] = (np.abs(grouped) @ errors)[..., 0] + _unit(rows) * np.abs(values[i])
    return values, budget


def _judge(result: Tensor, expected: F64, budget: F64) -> Measure:
    """The largest error in budgets of its element. Raises Wrong if it is above 1, or NaN."""
    with np.errstate(invalid="ignore", divide="ignore"):
        values = as_f64(result)
        error, place = worst_error(np.abs(values - expected) / budget)
    where = f"row {place[0]}: projected value {list(place[1:])}"
    said = f"{where} is {shown(values[place], 6)}, expected {expected[place]:.6g}"
    return Measure(error, 1.0).hold(said if np.isnan(values[place]) else f"{said}, {error:.3g} budgets off")

"""The oracle of the layer around attention, judged by hand-computed rows, by exhaustion and by torch's primitives."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from dsv4attn.core.cache.layout import KVCacheLayout
from dsv4attn.testing.case import Wrong
from dsv4attn.testing.kit.tolerances import UNIT, CodeRule, Formula, hold_record, hold_values
from dsv4attn.testing.oracle import attention as oracle
from dsv4attn.testing.oracle import layer as oracle_layer
from tests.testing.arrays import rng

NAN = math.nan


# compressor


def test_a_state_is_kv_and_the_score_with_the_bias_of_its_place() -> None:
    ape = np.arange(8.0).reshape(4, 2)

    state = oracle_layer.state_row(np.array([1.0, 2.0]), np.array([10.0, 20.0]), ape, 65_538)

    assert state.tolist() == [1, 2, 14, 25]
    third = oracle_layer.state_row(np.zeros(1), np.array([1.0]), np.array([[2.0**-25]]), 0)
    assert third.tolist() == [0, 1], "the sum is one float32 addition"


def test_windows_are_those_of_hand() -> None:
    window = oracle_layer.entry_window

    assert window(2, 4, overlap=False) == [(p, 0) for p in range(8, 12)]
    assert window(0, 4, overlap=True) == [(p, 1) for p in range(4)]
    assert window(2, 4, overlap=True) == [(p, 0) for p in range(4, 8)] + [(p, 1) for p in range(8, 12)]


def test_halves_of_the_channels_belong_to_two_windows() -> None:
    states = {p: np.array([p, p + 0.5, 100 + p, 100.5 + p]) for p in range(4)}

    kv, score = oracle_layer.window_states(states, 1, 2, overlap=True)

    assert kv.tolist() == [[0], [1], [2.5], [3.5]]
    assert score.tolist() == [[100], [101], [102.5], [103.5]]


def test_softmax_and_norm_are_those_of_torch() -> None:
    x = rng().normal(size=(8, 5)) * 50
    weight = rng(1).normal(size=5)

    result = oracle_layer.softmax(x)
    normed = oracle_layer.rms_norm(x[0], weight, 0.1)

    np.testing.assert_allclose(result, torch.from_numpy(x).softmax(0).numpy(), rtol=1e-13)
    expected = torch.nn.functional.rms_norm(torch.from_numpy(x[0]), (5,), torch.from_numpy(weight), 0.1)
    np.testing.assert_allclose(normed, expected.numpy(), rtol=1e-13)


# index keys


def test_e2m1_values_are_those_of_the_ocp_table() -> None:
    codes = np.arange(16, dtype=np.uint8)

    assert np.abs(oracle.decode_e2m1(codes)).tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6] * 2
    assert (oracle.encode_e2m1(oracle.decode_e2m1(codes)) == codes).all()


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (0.25, 0),
        (0.75, 2),
        (1.25, 2),
        (1.75, 4),
        (2.5, 4),
        (3.5, 6),
        (5.0, 6),
        (5.01, 7),
        (6.5, 7),
        (1e30, 7),
        (0.26, 1),
    ],
)
def test_e2m1_rounds_ties_to_even_codes_and_saturates(value: float, code: int) -> None:
    assert oracle.encode_e2m1(np.array([value, -value])).tolist() == [code, code | 8]


def test_e2m1_is_the_nearest_value() -> None:
    values = rng().uniform(-7, 7, 2000)

    result = oracle.decode_e2m1(oracle.encode_e2m1(values))

    distances = np.abs(np.clip(values, -6, 6)[:, None] - oracle.decode_e2m1(np.arange(16, dtype=np.uint8)))
    np.testing.assert_allclose(np.abs(result - np.clip(values, -6, 6)), distances.min(1), rtol=1e-12, atol=1e-15)


def test_the_even_element_is_in_the_low_half_of_a_byte() -> None:
    codes = np.array([1, 2, 15, 0], dtype=np.uint8)

    assert oracle.pack_e2m1(codes).tolist() == [0x21, 0x0F]
    assert oracle.unpack_e2m1(oracle.pack_e2m1(codes)).tolist() == codes.tolist()


@pytest.mark.parametrize(
    ("amax", "exponent"), [(6.0, 0), (6.03, 1), (3.0, -1), (0.0, -126), (1e38, 124), (math.inf, 127)]
)
def test_exponents_are_the_smallest_that_fit(amax: float, exponent: int) -> None:
    assert oracle.scale_exponent(amax, 6.0, oracle_layer.E2M1_FLOOR) == exponent


def test_an_fp8_index_record_is_codes_and_one_scale() -> None:
    row = np.array([1.0, -0.5, 448.0, 0.0])

    record = oracle_layer.index_record_fp8(row, fnuz=False, floor=1e-4, largest=448.0)

    assert len(record) == 8
    assert record[4:].view("<f4").tolist() == [1.0]
    assert oracle_layer.read_index_fp8(record, fnuz=False).tolist() == row.tolist()
    spoiled = oracle_layer.index_record_fp8(np.array([NAN, 1.0]), fnuz=False, floor=1e-4, largest=448.0)
    assert np.isnan(oracle_layer.read_index_fp8(spoiled, fnuz=False)).tolist() == [True, False]
    zeros = oracle_layer.index_record_fp8(np.zeros(4), fnuz=True, floor=1e-4, largest=240.0)
    assert zeros[4:].view("<f4").tolist() == [2.0**-21], "1e-4 / 240 lies between 2^-22 and 2^-21"


def test_an_mxfp4_index_record_has_a_scale_for_32_dims() -> None:
    row = np.concatenate([np.full(32, 3.0), np.full(32, -0.25), np.zeros(32), np.full(32, NAN)])

    record = oracle_layer.index_record_fp4(row)

    assert len(record) == 68
    assert record[64:].tolist() == [126, 123, 1, 255]
    result = oracle_layer.read_index_fp4(record)
    assert result[:96].tolist() == row[:96].tolist()
    assert np.isnan(result[96:]).all()


# scores and selection


def test_scores_are_those_of_hand() -> None:
    q, weights = np.array([[1.0, 0.0], [0.0, 2.0]]), np.array([0.5, -1.0])
    keys = np.array([[2.0, 3.0], [-2.0, -1.0], [4.0, -1.0], [NAN, 0.0]])

    assert oracle_layer.index_scores(q, weights, keys)[:3].tolist() == [-5, 0, 2]
    assert np.isnan(oracle_layer.index_scores(q, weights, keys)[3])
    assert oracle_layer.fold_weights(weights, 8, 3).tolist() == [1.0, -2.0]


@pytest.mark.parametrize(
    ("scores", "count", "chosen"),
    [
        ([1.0, 3.0, 2.0], 2, [1, 2]),
        ([0.0, -0.0, 0.0], 2, [0, 1]),
        ([-0.0, 0.0, 1.0], 2, [0, 2]),
        ([NAN, -5.0, NAN], 2, [1]),
        ([NAN, 1.0, 1.0, 1.0], 2, [1, 2]),
        ([], 3, []),
        ([-math.inf, 2.0], 2, [0, 1]),
    ],
)
def test_selection_is_by_score_then_by_number_and_never_of_nan(scores: Any, count: int, chosen: list[int]) -> None:
    assert oracle_layer.select(np.array(scores), count) == chosen


# hyper-connections


def test_sinkhorn_ends_with_columns_that_sum_to_one() -> None:
    logits = rng().normal(size=(7, 4, 4))

    one, many = oracle_layer.sinkhorn(logits, 0.0, 1), oracle_layer.sinkhorn(logits, 0.0, 60)

    np.testing.assert_allclose(one.sum(-2), 1, rtol=1e-12)
    assert np.abs(one.sum(-1) - 1).max() > 0.05, "rows are not yet normalised"
    np.testing.assert_allclose(many.sum(-1), 1, rtol=1e-4)
    by_hand = torch.from_numpy(logits).softmax(-1) + 0.1
    by_hand = by_hand / (by_hand.sum(-2, keepdim=True) + 0.1)
    np.testing.assert_allclose(oracle_layer.sinkhorn(logits, 0.1, 1), by_hand.numpy(), rtol=1e-12)


def test_post_sums_over_the_first_index() -> None:
    comb = np.array([[1.0, 10.0], [100.0, 1000.0]])

    result = oracle_layer.hc_post(np.array([1.0]), np.array([[2.0], [3.0]]), np.array([0.5, 0.25]), comb)

    assert result.tolist() == [[0.5 + 2 + 300], [0.25 + 20 + 3000]]


def test_mixes_are_divided_by_the_size_of_all_streams() -> None:
    streams = np.array([[3.0, 0.0], [0.0, 4.0]])

    result = oracle_layer.hc_mixes(streams, np.eye(4), 0.0)

    np.testing.assert_allclose(result, np.array([3, 0, 0, 4]) / 2.5)
    assert [
        part.tolist() for part in oracle_layer.hc_logits(np.ones(4), np.array([2.0, 3.0]), np.arange(4.0), [1, 3])
    ] == [
        [2.0],
        [4.0, 5.0, 6.0],
    ]
    np.testing.assert_allclose(oracle_layer.sigmoid(np.array([-800.0, 0.0, 800.0])), [0, 0.5, 1])


# budgets


@pytest.mark.parametrize(
    ("value", "result", "right"),
    [
        (1.0 + 2.0**-9, 1.0, True),
        (1.0 + 2.0**-9, 1.0 + 2.0**-7, False),
        (1.0 + 2.0**-8 * (1 + 2.0**-22), 1.0, True),  # just behind the midpoint, where fp32 may be in front of it
        (1.0 + 2.0**-8 * (1 + 2.0**-10), 1.0, False),
        (1.0 - 2.0**-9, 1.0, True),
        (1.0 - 2.0**-8, 1.0, False),  # below a power of two, neighbours are half as far
        (0.0, 0.0, True),
        (0.0, 2.0**-100, False),
        (1e-4, 0.0, False),
    ],
)
def test_a_bf16_value_is_the_nearest_or_explained_by_the_error_of_fp32(
    value: float, result: float, right: bool
) -> None:
    formula = Formula(np.array([value]), np.array([UNIT * abs(value)]))

    if right:
        hold_values(np.array([result]), formula, torch.bfloat16, "value")
        return
    with pytest.raises(Wrong):
        hold_values(np.array([result]), formula, torch.bfloat16, "value")


def test_nan_and_other_shapes_are_wrong() -> None:
    formula = Formula.exact(np.ones(2))

    for result in (np.array([1.0, NAN]), np.ones(3)):
        with pytest.raises(Wrong):
            hold_values(result, formula, torch.float32, "value")


@pytest.mark.parametrize("layout", [KVCacheLayout.index_fp8(), KVCacheLayout.index_mxfp4()], ids=lambda made: made.name)
def test_a_code_may_be_its_neighbour_only_at_a_midpoint(layout: KVCacheLayout) -> None:
    row = np.full(128, 4.0)
    row[1] = 1.5 + 2.0**-9  # its bf16 is 1.5 up to the midpoint at 1.5 + 2^-8

    def write(values: Any) -> Any:
        if layout.fp8_format is None:
            return oracle_layer.index_record_fp4(values)
        return oracle_layer.index_record_fp8(values, fnuz=False, floor=1e-4, largest=448.0)

    record = write(row)

    hold_record(record, Formula(row, UNIT * row), layout, "it")
    other = row.copy()
    other[1] = 2.0
    with pytest.raises(Wrong, match="1 codes are wrong, first of dim 1"):
        hold_record(write(other), Formula(row, UNIT * row), layout, "it")
    hold_record(write(other), Formula(row, np.where(np.arange(128) == 1, 0.5, 0.0)), layout, "it")
    with pytest.raises(Wrong, match="scale of group 0"):
        hold_record(write(2 * row), Formula(row, UNIT * row), layout, "it")


def test_either_scale_is_right_where_the_largest_value_is_at_a_step() -> None:
    codes = CodeRule.of(KVCacheLayout.index_fp8())
    step = np.zeros(128)
    step[0] = 449.0  # bf16 has 448 and 450: the midpoint

    assert codes.exponents(Formula(step, UNIT * step)) == [range(2)]
    assert codes.exponents(Formula(step - 1, UNIT * step)) == [range(1)]


def test_budgets_cover_what_torch_does_in_fp32() -> None:
    kv, score = rng(1).normal(size=(128, 64)), 4 * rng(2).normal(size=(128, 64)) + 100
    kv, score = (x.astype(np.float32).astype(np.float64) for x in (kv, score))
    weight, angles = rng(3).normal(size=64).astype(np.float32), rng(4).uniform(size=8)
    formula = Formula.exact(kv).pooled(score).normed(weight.astype(np.float64), 1e-3)

    made = (torch.from_numpy(score).float().softmax(0) * torch.from_numpy(kv).float()).sum(0)
    made = torch.nn.functional.rms_norm(made, (64,), torch.from_numpy(weight), 1e-3)

    measure = hold_values(made, formula, torch.float32, "value")
    assert 0.001 < measure.fraction < 0.5
    turned = formula.turned(np.cos(angles), np.sin(angles))
    assert (turned.error[-16:] > formula.error[-16:]).all()
    np.testing.assert_allclose(turned.value, oracle.apply_rope(formula.value, np.cos(angles), np.sin(angles), 16))

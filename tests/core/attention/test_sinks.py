"""Promise G12: attention sinks are never dropped, applied twice, or given to the wrong head."""

from __future__ import annotations

import math

import attrs
import numpy as np
import pytest
import torch

from dsv4attn.core.model.geometry import LayerKind
from dsv4attn.testing.kit.factories import layouts, tiny_geometry
from dsv4attn.testing.kit.random_step import StepFixture
from tests.harness import FORM_NAMES, REFERENCE_FORMS, all_forms, all_kinds, assert_same_bits

GEOMETRY = tiny_geometry(o_groups=4)
MIXED = [(100, 1), (0, 1), (17, 20), (0, 9, 2)]


def scenario_of(kind: LayerKind, sinks: list[float] | None, dtype: torch.dtype = torch.float32) -> StepFixture:
    layout = layouts(GEOMETRY)["fp32"]
    return StepFixture(kind=kind, requests=MIXED, geometry=GEOMETRY, layout=layout, sinks=sinks, q_dtype=dtype, seed=4)


@pytest.mark.pairwise
@all_forms
@all_kinds
@pytest.mark.parametrize(
    "sinks",
    [[-math.inf] * 4, [0.0] * 4, [20.0] * 4, [-20.0] * 4, [1e4] * 4, [-1e4] * 4, [math.inf, -math.inf, 3.0, -80.0]],
    ids=["minus_inf", "zero", "20", "-20", "1e4", "-1e4", "each_its_own"],
)
def test_g12_any_sink_equals_the_oracle(sinks: list[float], kind: LayerKind, form: str) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        scenario_of(kind, sinks, dtype).check(REFERENCE_FORMS[form])


@pytest.mark.pairwise
@all_forms
@all_kinds
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_g12_a_sink_of_minus_infinity_is_no_sink_bit_for_bit(dtype: torch.dtype, kind: LayerKind, form: str) -> None:
    without = scenario_of(kind, None, dtype).run(REFERENCE_FORMS[form])

    assert_same_bits(scenario_of(kind, [-math.inf] * 4, dtype).run(REFERENCE_FORMS[form]), without)


@all_forms
@all_kinds
def test_g12_a_sink_of_plus_infinity_or_of_1e4_leaves_exactly_zero(kind: LayerKind, form: str) -> None:
    for sink in (math.inf, 1e4):
        out, lse = scenario_of(kind, [sink] * 4).run(REFERENCE_FORMS[form])
        assert not out.any()
        assert lse[:-2].isfinite().all(), "the lse leaves the sink out"


@all_kinds
@pytest.mark.parametrize("size", [2, 4])
def test_g12_the_ranks_of_a_tensor_parallel_group_carry_their_own_sinks(size: int, kind: LayerKind) -> None:
    whole = attrs.evolve(scenario_of(kind, None), sinks="random")
    expected, _ = whole.expected()
    heads = 4 // size
    ranks = [
        attrs.evolve(whole, geometry=GEOMETRY.tensor_parallel(size), first_head=rank * heads) for rank in range(size)
    ]

    for name in FORM_NAMES:
        parts = [rank.check(REFERENCE_FORMS[name])[0] for rank in ranks]
        assert all(part.shape[1] == heads for part in parts)
        np.testing.assert_allclose(torch.cat(parts, dim=1), expected, atol=1e-5)
    sinks = [rank.sink_values for rank in ranks]
    assert whole.sink_values is not None
    assert np.concatenate([s for s in sinks if s is not None]).tolist() == whole.sink_values.tolist()

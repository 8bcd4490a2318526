"""Every built-in backend takes block-scaled fp8 weights of the projection when it is called without core, too."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dsv4attn.core import weights
from dsv4attn.core.contract import Rank
from dsv4attn.core.weights import dense_weight
from dsv4attn.errors import ArgumentError
from tests.backends.built_in import class_of, infos, of_rank
from tests.core.projections import GROUPS, WO_A, Given
from tests.core.scaled import CPU, DEVICE, OCP, Scaled, each_dialect

each_backend = pytest.mark.parametrize("name", infos())


def device_of(name: str) -> torch.device:
    return CPU if name in of_rank(Rank.REFERENCE) else DEVICE


def arguments(name: str, wo_a: Any, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    given, device = Given.draw(dtype), device_of(name)
    rest = {"positions": given.positions, "cos_sin_cache": given.table, "o": given.o}
    return {**{key: value.to(device) for key, value in rest.items()}, "wo_a": wo_a, "num_groups": GROUPS}


@each_backend
@each_dialect
def test_it_projects_with_the_converted_copy(name: str, dialect: torch.dtype) -> None:
    scaled = Scaled.draw(41, *WO_A, dialect, "bytes", device_of(name))
    backend, pair, module = class_of(name)(), scaled.pair(), scaled.module("weight_scale")
    for wo_a in (pair, module):
        z = backend.inv_rope_o_proj(**arguments(name, wo_a))

        assert torch.equal(z, backend.inv_rope_o_proj(**arguments(name, dense_weight(wo_a))))
        assert bool(z.any())


@each_backend
def test_bad_arguments_are_refused_before_the_conversion(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scaled = Scaled.draw(42, *WO_A, OCP, "fp32", device_of(name))
    backend, good = class_of(name)(), arguments(name, scaled.pair())
    monkeypatch.setattr(weights, "_product", lambda *_: pytest.fail("converted"))
    wrong: dict[str, tuple[str, Any]] = {
        "o": ("o", good["o"].repeat(1, 1, 2)[..., ::2]),
        "positions": ("positions", good["positions"].repeat(2)[::2]),
        "wo_a": ("wo_a", good["wo_a"].weight),
        "wo_a.weight": ("wo_a", scaled.module(weight=scaled.codes)),
        "wo_a.weight_scale_inv": ("wo_a", scaled.module(weight_scale_inv=scaled.scale[:1, :1])),
    }
    for said, (argument, value) in wrong.items():
        with pytest.raises(ArgumentError, match=f"^{said}: expected"):
            backend.inv_rope_o_proj(**{**good, argument: value})

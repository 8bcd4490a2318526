"""Every built-in backend takes block-scaled fp8 weights of the projection when it is called without core, too."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dsv4attn.core.contract.backend import Rank
from dsv4attn.core.contract.device import DeviceFacts
from dsv4attn.core.contract.limits import Limits
from dsv4attn.core.contract.warmup import WarmupSpec
from dsv4attn.core.model import quantized_weight as weights
from dsv4attn.core.model.geometry import ModelGeometry
from dsv4attn.core.model.quantized_weight import dense_weight
from dsv4attn.errors import ArgumentError
from tests.backends.built_in import class_of, infos, of_rank, triton_backends
from tests.core.attention.projections import GROUPS, WO_A, ProjectionArgs
from tests.core.model.scaled import CPU, DEVICE, OCP, Scaled, each_dialect

each_backend = pytest.mark.parametrize("name", infos())


def device_of(name: str) -> torch.device:
    return CPU if name in of_rank(Rank.REFERENCE) else DEVICE


def arguments(name: str, wo_a: Any, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    drawn, device = ProjectionArgs.draw(dtype), device_of(name)
    rest = {"positions": drawn.positions, "cos_sin_cache": drawn.table, "o": drawn.o}
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


HEADS, RANK, BATCH = 4, 136, 5
each_triton = pytest.mark.parametrize("name", triton_backends())


def wide(name: str, dialect: torch.dtype, dtype: torch.dtype = torch.bfloat16) -> tuple[dict[str, Any], Scaled]:
    """Arguments with heads of 128 dims, and their weight."""
    g, device = torch.Generator().manual_seed(43), device_of(name)
    angle = torch.rand(9, 32, generator=g) * 7
    tensors = {
        "o": torch.randn(BATCH, HEADS, 128, generator=g).to(dtype),
        "positions": torch.randint(0, 9, (BATCH,), generator=g),
        "cos_sin_cache": torch.cat([angle.cos(), angle.sin()], 1),
    }
    scaled = Scaled.draw(44, 2 * RANK, HEADS // 2 * 128, dialect, "fp32", device)
    return {**{key: value.to(device) for key, value in tensors.items()}, "num_groups": 2}, scaled


@each_triton
@each_dialect
def test_with_option_fp8_codes_are_multiplied_and_the_result_differs_by_their_noise(
    name: str, dialect: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments, scaled = wide(name, dialect)
    z = class_of(name)().inv_rope_o_proj(**arguments, wo_a=scaled.pair())
    monkeypatch.setattr(weights, "_product", lambda *_: pytest.fail("converted"))
    backend = class_of(name)(projection="fp8")
    results = [
        backend.inv_rope_o_proj(**arguments, wo_a=wo_a) for wo_a in (scaled.pair(), scaled.module("weight_scale"))
    ]

    assert torch.equal(*results)
    assert results[0].shape == (BATCH, 2, RANK)
    assert results[0].dtype == torch.bfloat16
    assert 0.005 < float((results[0].float() - z.float()).norm() / z.float().norm()) < 0.04


@each_triton
def test_with_option_fp8_other_matrices_are_multiplied_as_before(name: str) -> None:
    arguments, scaled = wide(name, OCP)
    wo_a = dense_weight(scaled.pair())
    z, actual = (
        class_of(name)(**options).inv_rope_o_proj(**arguments, wo_a=wo_a) for options in ({}, {"projection": "fp8"})
    )

    assert torch.equal(z, actual)


@each_triton
def test_option_fp8_needs_heads_of_whole_groups(name: str) -> None:
    scaled = Scaled.draw(45, *WO_A, OCP, "fp32", device_of(name))
    with pytest.raises(ArgumentError, match=r"^o: expected a head dim that is a multiple of 128.* got 80 -> .*=bf16"):
        class_of(name)(projection="fp8").inv_rope_o_proj(**arguments(name, scaled.pair()))
    with pytest.raises(ArgumentError, match=r"^projection: expected 'bf16' or 'fp8', got 'fp4'"):
        class_of(name)(projection="fp4")


@each_triton
def test_only_with_option_fp8_its_kernels_are_compiled_ahead(name: str) -> None:
    bounds, device = WarmupSpec.of(ModelGeometry.preset("flash"), Limits(8, 64, 4096)), DeviceFacts.named("sm_90")
    plain, with_fp8 = ({*class_of(name)(**o).kernel_variants(bounds, device)} for o in ({}, {"projection": "fp8"}))

    assert plain < with_fp8
    assert {variant.name for variant in with_fp8 - plain} == {"quantize_output_kernel", "project_codes_kernel"}

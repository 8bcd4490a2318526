"""Weights that are refused, by name and with a cure, before anything is computed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsv4attn.core.model import quantized_weight as weights
from dsv4attn.core.model.quantized_weight import BlockScaledWeight, dense_weight
from dsv4attn.errors import ArgumentError
from tests.core.scaled import DEVICE, OCP, Scaled

META = torch.device("meta")
FP8 = Scaled.draw(13, 130, 260, OCP, "fp32")
BAD: dict[str, tuple[Any, str, str]] = {
    "no weight": (SimpleNamespace(), "wo_a", "a module with a weight"),
    "nothing": (None, "wo_a", "NoneType"),
    "no scale": (SimpleNamespace(weight=FP8.weight()), "wo_a.weight", "got none of them -> a weight without"),
    "scales of None": (FP8.module(weight_scale_inv=None), "wo_a.weight", "got none of them"),
    "a plain fp8 tensor": (FP8.weight(), "wo_a", "got none of them -> pass the module"),
    "raw codes": (FP8.module(weight=FP8.codes), "wo_a.weight", r"got uint8 -> view .*\.view\(torch.float8_e4m3fn\)"),
    "signed codes": (FP8.module(weight=FP8.codes.view(torch.int8)), "wo_a.weight", "got int8"),
    "raw codes alone": (FP8.codes, "wo_a", "got uint8"),
    "another fp8": (FP8.module(weight=FP8.codes.view(torch.float8_e5m2)), "wo_a.weight", "float8_e5m2"),
    "integers": (torch.ones(2, 2, dtype=torch.int32), "wo_a", "int32"),
    "a weight for each group": (FP8.module(weight=FP8.weight()[None]), "wo_a.weight", r"\[1, 130, 260\]"),
    "one scale": (FP8.module(weight_scale_inv=torch.ones(())), "wo_a.weight_scale_inv", r"\[2, 3\].*, got \[\]"),
    "scales turned round": (FP8.module(weight_scale_inv=torch.ones(3, 2)), "wo_a.weight_scale_inv", r"got \[3, 2\]"),
    "whole blocks only": (FP8.module(weight_scale_inv=torch.ones(1, 2)), "wo_a.weight_scale_inv", r"got \[1, 2\]"),
    "scales in bf16": (FP8.module(weight_scale_inv=FP8.scale.bfloat16()), "wo_a.weight_scale_inv", "bfloat16"),
    "scales in int32": (FP8.module("weight_scale", weight_scale=FP8.scale.int()), "wo_a.weight_scale", "int32"),
    "a scale that is a number": (FP8.module(weight_scale_inv=0.5), "wo_a.weight_scale_inv", "float"),
    "scales elsewhere": (FP8.module(weight_scale_inv=FP8.scale.to(META)), "wo_a.weight_scale_inv", "one on meta"),
    "two scales": (FP8.module(weight_scale=2 * FP8.scale.to(DEVICE)), "wo_a.weight_scale", "other values"),
    "a wrong second scale": (FP8.module(weight_scale=torch.ones(1)), "wo_a.weight_scale", r"got \[1\]"),
}


PAIRS: dict[str, tuple[Any, Any, str]] = {
    "no codes": (None, FP8.scale, r"weight: expected a tensor \[_, _\] float8_e4m3fn or .*, got NoneType"),
    "raw codes": (FP8.codes, FP8.scale, "weight: expected a dtype that says .*, got uint8 -> view them"),
    "bf16": (torch.ones(2, 2).bfloat16(), FP8.scale, "weight: expected fp8 codes, got bfloat16 -> .* pass the tensor"),
    "a weight for each group": (FP8.codes[None].view(OCP), FP8.scale, r"weight: .*, got \[1, 130, 260\]"),
    "no scale": (
        FP8.codes.view(OCP),
        None,
        r"scale: expected \[2, 3\] or \[5, 9\] float32 or .*, got NoneType -> every block of 128",
    ),
    "scales turned round": (
        FP8.codes.view(OCP),
        FP8.scale.t(),
        r"scale: expected \[2, 3\] .*, got \[3, 2\] .* -> every",
    ),
    "whole blocks only": (FP8.codes.view(OCP), FP8.scale[:1, :2], r"scale: expected \[2, 3\] .*, got \[1, 2\]"),
    "a scale for each row": (FP8.codes.view(OCP), torch.ones(130, 1), r"scale: expected \[2, 3\] .*, got \[130, 1\]"),
    "scales in bf16": (FP8.codes.view(OCP), FP8.scale.bfloat16(), r"scale: .*bfloat16 -> pass scale.to\(torch.float32"),
    "scales elsewhere": (
        FP8.codes.view(OCP),
        FP8.scale.to(META),
        r"scale: expected a tensor on cpu, like weight, got .*",
    ),
}


@pytest.mark.parametrize("case", PAIRS.values(), ids=PAIRS)
def test_a_block_scaled_weight_that_is_none_is_refused_where_it_is_made(case: tuple[Any, Any, str]) -> None:
    weight, scale, said = case
    with pytest.raises(ArgumentError, match=f"^{said}"):
        BlockScaledWeight(weight, scale)


def test_a_module_without_fp8_codes_or_their_scale_is_no_block_scaled_weight() -> None:
    for module, said in (
        (SimpleNamespace(weight=torch.ones(2, 2), weight_scale=torch.ones(1, 1)), r"wo_b\.weight: expected fp8 codes"),
        (
            SimpleNamespace(weight=FP8.weight()),
            r"wo_b\.weight: expected weight_scale_inv, weight_scale or scale beside .* none",
        ),
        (FP8.codes, "wo_b: expected a dtype that says"),
        (None, "wo_b: expected a tensor, a BlockScaledWeight, or a module"),
    ):
        with pytest.raises(ArgumentError, match=f"^{said}"):
            BlockScaledWeight.of(module, "wo_b")


@pytest.mark.parametrize("case", BAD.values(), ids=BAD)
def test_a_bad_weight_is_an_error_before_anything_is_computed(
    case: tuple[Any, str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    wo_a, argument, said = case
    monkeypatch.setattr(weights, "_product", lambda *_: pytest.fail("computed"))
    with pytest.raises(ArgumentError, match=rf"^{argument}: expected .*{said}"):
        dense_weight(wo_a)


def test_a_scale_that_went_bad_is_an_error_even_if_a_copy_is_kept() -> None:
    module = Scaled.draw(14, 40, 50, OCP, "fp32").module()
    dense_weight(module)
    module.weight_scale_inv = None
    with pytest.raises(ArgumentError, match="got none of them"):
        dense_weight(module)

"""Block-scaled fp8 weights as bf16: exact values, computed once, in memory that is freed with the weight."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dsv4attn.core.model import quantized_weight as weights
from dsv4attn.core.model.quantized_weight import BlockScaledWeight, check_weight, dense_weight, forget
from dsv4attn.errors import ArgumentError
from dsv4attn.testing.oracle import attention as oracle
from tests.core.model.scaled import (
    DEVICE,
    E8M0,
    FNUZ,
    OCP,
    Scaled,
    each_dialect,
    each_form,
    each_name,
    operations,
    powers_of,
)

SHAPES = [(1, 1), (128, 128), (127, 129), (130, 257), (256, 40), (5, 384)]


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    count = copies()
    yield
    if copies() > count:
        gc.collect()

    assert copies() == count


def copies() -> int:
    """Copies that are cached."""
    return sum(map(len, weights._copies.values()))


def assert_worth(actual: Tensor, expected: oracle.F64) -> None:
    """Fail unless every value is right, and NaN is where it should be."""
    assert actual.dtype == torch.bfloat16
    assert np.array_equal(actual.double().cpu().numpy(), expected, equal_nan=True)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@each_dialect
@each_form
@each_name
def test_each_block_is_multiplied_by_its_own_scale(
    shape: tuple[int, int], dialect: torch.dtype, form: str, name: str
) -> None:
    drawn = Scaled.draw(sum(shape), *shape, dialect, form)

    assert_worth(dense_weight(drawn.module(name)), drawn.values)
    assert_worth(dense_weight(drawn.pair()), drawn.values)
    assert_worth(dense_weight(BlockScaledWeight.of(drawn.module(name))), drawn.values)


@each_dialect
@pytest.mark.parametrize("form", ["e8m0", "bytes"])
def test_every_code_under_every_exponent(dialect: torch.dtype, form: str) -> None:
    """A block is one row of a partial block: the codes of all of them, under byte after byte."""
    codes = torch.arange(256, dtype=torch.uint8).view(2, 128).repeat(1, 256)
    exponents = torch.arange(256, dtype=torch.uint8)[None]
    if form == "e8m0":
        if not hasattr(torch, "float8_e8m0fnu"):
            pytest.skip("this torch has no such dtype")
        exponents = exponents.view(torch.float8_e8m0fnu)
    actual = dense_weight(Scaled(codes, exponents, dialect).module()).double().cpu().numpy()
    code = oracle.decode_e4m3(codes.numpy(), dialect == FNUZ)
    expected = oracle.round_bf16(code * np.repeat(powers_of(torch.arange(256)), 128))

    assert np.array_equal(actual, expected, equal_nan=True)
    assert np.isnan(actual[:, -128:]).all()
    assert np.isfinite(actual[:, :128]).sum() == 256 - np.isnan(code[:, :128]).sum()


def test_a_code_is_worth_half_in_the_other_dialect() -> None:
    ocp = Scaled.draw(1, 130, 140, OCP, "fp32")
    twin = Scaled(ocp.codes.masked_fill(ocp.codes == 0x80, 0), ocp.scale, OCP)
    halved = Scaled(twin.codes, 2 * ocp.scale, FNUZ)

    assert torch.equal(dense_weight(twin.module()), dense_weight(halved.module()))


def test_a_weight_may_lie_in_memory_in_any_way() -> None:
    drawn = Scaled.draw(2, 140, 150, OCP, "fp32")
    module = drawn.module()
    module.weight = module.weight.view(torch.uint8).t().contiguous().t().view(OCP)
    module.weight_scale_inv = module.weight_scale_inv.t().contiguous().t()

    assert_worth(dense_weight(module), drawn.values)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@each_name
def test_a_weight_that_is_not_fp8_is_never_scaled(dtype: torch.dtype, name: str) -> None:
    weight = torch.randn(3, 4, dtype=dtype, device=DEVICE)
    for scale in (torch.full((1, 1), torch.nan), torch.ones(7), "none"):
        module = SimpleNamespace(**{"weight": weight, name: scale})
        with operations() as ran:
            assert dense_weight(module) is weight
            assert dense_weight(weight) is weight

        assert not ran


def test_a_weight_that_an_engine_has_made_bf16_is_not_scaled_again() -> None:
    module = Scaled.draw(3, 40, 50, OCP, "fp32").module()
    once = dense_weight(module)
    module.weight = once

    assert dense_weight(module) is once

    module = Scaled.draw(3, 40, 50, OCP, "fp32").module()
    kept = weakref.ref(dense_weight(module))
    module.weight.data = once

    assert torch.equal(dense_weight(module), once)
    assert kept() is None


def test_both_names_may_say_the_same() -> None:
    drawn = Scaled.draw(4, 200, 50, FNUZ, "bytes")
    factors = torch.tensor(drawn.factors, dtype=torch.float32, device=DEVICE)

    assert_worth(dense_weight(drawn.module("weight_scale", weight_scale_inv=factors)), drawn.values)


# what is cached


def test_two_weights_do_not_get_each_others_copy() -> None:
    all_drawn = [Scaled.draw(seed, 40, 50, OCP, "fp32") for seed in (6, 7)]
    modules = [drawn.module() for drawn in all_drawn]
    for _ in range(2):
        for drawn, module in zip(all_drawn, modules, strict=True):
            assert_worth(dense_weight(module), drawn.values)


Change = Callable[[Any, Scaled], None]


def replaces_the_scale_by_one_in_its_memory(module: Any, other: Scaled) -> None:
    module.weight_scale_inv.data.copy_(other.scale)
    module.weight_scale_inv = module.weight_scale_inv.data


def renames_the_scale(module: Any, other: Scaled) -> None:
    del module.weight_scale_inv
    module.weight_scale = other.scale.to(DEVICE)


def renames_the_scale_and_keeps_its_memory(module: Any, other: Scaled) -> None:
    module.weight_scale_inv.data.copy_(other.scale)
    module.weight_scale = module.weight_scale_inv.data
    del module.weight_scale_inv


def forgets_what_torch_does_not_see(module: Any, other: Scaled) -> None:
    module.weight.data.copy_(other.weight())
    module.weight_scale_inv.data.copy_(other.scale)
    forget(module)


CHANGES: dict[str, Change] = {
    "the weight is written": lambda module, other: module.weight.copy_(other.weight()),
    "the scale is written": lambda module, other: module.weight_scale_inv.copy_(other.scale),
    "the weight has moved": lambda module, other: setattr(module.weight, "data", other.weight()),
    "the scale has moved": lambda module, other: setattr(module.weight_scale_inv, "data", other.scale.to(DEVICE)),
    "another weight": lambda module, other: setattr(module, "weight", other.weight()),
    "another scale": lambda module, other: setattr(module, "weight_scale_inv", other.scale.to(DEVICE)),
    "another scale in the same memory": replaces_the_scale_by_one_in_its_memory,
    "another name of the scale": renames_the_scale,
    "another name of the scale, the same memory": renames_the_scale_and_keeps_its_memory,
    "what torch does not see, and forgotten": forgets_what_torch_does_not_see,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_it_is_computed_again_when_something_changed(change: Change) -> None:
    first, second = (Scaled.draw(seed, 140, 50, OCP, "fp32") for seed in (8, 9))
    module = first.module()
    assert_worth(dense_weight(module), first.values)
    change(module, second)
    now = Scaled(module.weight.view(torch.uint8).cpu(), _scale_of(module).cpu(), OCP)
    assert not np.array_equal(now.values, first.values)

    assert_worth(dense_weight(module), now.values)
    with operations() as ran:
        dense_weight(module)
    assert not ran


def _scale_of(module: Any) -> Tensor:
    scale_inv = getattr(module, "weight_scale_inv", None)
    scale = module.weight_scale if scale_inv is None else scale_inv
    assert isinstance(scale, Tensor)
    return scale


def test_new_numbers_appear_where_a_captured_graph_reads_them() -> None:
    first, second = (Scaled.draw(seed, 140, 50, OCP, "fp32") for seed in (8, 9))
    module = first.module()
    copy = dense_weight(module)
    address = copy.data_ptr()
    module.weight.copy_(second.weight())

    assert dense_weight(module).data_ptr() == address
    assert_worth(copy, Scaled(second.codes, first.scale, OCP).values)


def test_a_write_that_torch_does_not_count_is_read_when_that_is_asked_for() -> None:
    """What engines do to load weights again: under graphs that were captured with the copy."""
    first, second = (Scaled.draw(seed, 140, 50, OCP, "fp32") for seed in (8, 9))
    module = first.module()
    copy = dense_weight(module)
    module.weight.data.copy_(second.weight())
    module.weight_scale_inv.data.copy_(second.scale)
    assert_worth(dense_weight(module), first.values)

    now = dense_weight(module, recompute=True)

    assert now.data_ptr() == copy.data_ptr()
    assert_worth(copy, second.values)
    assert dense_weight(module) is now
    module.weight_scale_inv = None
    with pytest.raises(ArgumentError, match=r"wo_a\.weight"):
        dense_weight(module, recompute=True)


def test_another_shape_gets_other_memory() -> None:
    first, second = Scaled.draw(8, 140, 50, OCP, "fp32"), Scaled.draw(9, 50, 140, OCP, "fp32")
    module = first.module()
    copy = dense_weight(module)
    module.weight.data, module.weight_scale_inv = second.weight(), second.scale.to(DEVICE)

    assert_worth(dense_weight(module), second.values)
    assert_worth(copy, first.values)


@pytest.mark.usefixtures("few_objects")
def test_a_copy_dies_with_its_weight() -> None:
    module = Scaled.draw(10, 40, 50, OCP, "fp32").module()
    copy, scale = weakref.ref(dense_weight(module)), weakref.ref(module.weight_scale_inv)
    key = id(module.weight)
    assert key in weights._copies
    module.weight_scale_inv = None
    gc.collect()
    assert scale() is None, "a scale is not kept alive"
    assert copy() is not None
    del module
    gc.collect()

    assert copy() is None
    assert key not in weights._copies


def test_parameters_of_a_module_serve_in_and_out_of_inference_mode() -> None:
    first, second = (Scaled.draw(seed, 40, 50, FNUZ, "fp32") for seed in (11, 12))
    module = nn.Module()
    module.weight = nn.Parameter(first.weight(), requires_grad=False)
    module.weight_scale = nn.Parameter(first.scale.to(DEVICE))
    with torch.inference_mode():
        copy = dense_weight(module)
    assert_worth(copy, first.values)
    assert not copy.requires_grad
    with torch.no_grad():
        module.weight.copy_(second.weight())
        module.weight_scale.copy_(second.scale)

    assert_worth(dense_weight(module), second.values)

    with torch.inference_mode():
        unversioned = second.module()
        assert_worth(dense_weight(unversioned), second.values)
    with operations() as ran:
        dense_weight(unversioned)
    assert not ran


# the class


def test_weights_made_anew_of_the_same_tensors_share_one_copy() -> None:
    module = Scaled.draw(20, 40, 50, OCP, "fp32").module()
    first = dense_weight(BlockScaledWeight(module.weight, module.weight_scale_inv))
    with operations() as ran:
        assert dense_weight(BlockScaledWeight(module.weight, module.weight_scale_inv)) is first
        assert dense_weight(module) is first
    assert not ran
    module.weight_scale_inv.mul_(2)
    twice = 2 * first.float()

    assert torch.equal(dense_weight(BlockScaledWeight.of(module)).float(), twice)


def test_inside_and_outside_of_inference_mode_it_is_one_copy() -> None:
    pair = Scaled.draw(21, 40, 50, OCP, "bytes").pair()
    with torch.inference_mode():
        first = dense_weight(pair)

    assert not first.is_inference()
    assert dense_weight(pair) is first
    pair.scale.add_(1)
    with torch.inference_mode():
        assert dense_weight(pair) is first


def test_a_check_computes_nothing_and_names_the_matrix() -> None:
    drawn, plain = Scaled.draw(22, 140, 50, OCP, "e8m0" if E8M0 else "bytes"), torch.zeros(3, 4, device=DEVICE)
    pair, module = drawn.pair(), drawn.module()
    with operations() as ran:
        assert check_weight("wo_b", plain) == ("wo_b", plain)
        assert check_weight("wo_b", pair) == ("wo_b.weight", pair.weight)
        assert check_weight("wo_b", module) == ("wo_b.weight", module.weight)
    assert not ran
    assert not {id(pair.weight), id(module.weight)} & {*weights._copies}


def test_while_a_graph_is_captured_nothing_is_converted(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = Scaled.draw(23, 140, 50, OCP, "fp32")
    pair, late = drawn.pair(), drawn.pair()
    copy = dense_weight(pair)
    monkeypatch.setattr(weights, "is_capturing", lambda device: device == pair.weight.device)

    assert dense_weight(pair) is copy
    said = (
        r"^wo_a\.weight: expected .* before the capture of the graph, got one .* -> run the step once, or call dense_"
    )
    with pytest.raises(ArgumentError, match=said):
        dense_weight(late)
    pair.weight.copy_(late.weight.view(torch.uint8).roll(1, 0).view(OCP))
    with pytest.raises(ArgumentError, match=said):
        dense_weight(pair)

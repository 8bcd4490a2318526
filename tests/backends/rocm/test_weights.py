"""fp8 weights of the output projection as bf16: the right numbers, once, and no longer than they are needed."""

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

from dsv4attn.backends.rocm import weights
from dsv4attn.backends.rocm.weights import dequantized, forget
from dsv4attn.errors import ArgumentError
from dsv4attn.testing import oracle
from tests.backends._triton.cache.caches import DEVICE
from tests.backends._triton.index_ops.trials import operations
from tests.backends.rocm.scaled import FNUZ, OCP, Scaled, each_dialect, each_form, each_name, powers_of

SHAPES = [(1, 1), (128, 128), (127, 129), (130, 257), (256, 40), (5, 384)]
META = torch.device("meta")


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    before = len(weights._copies)
    yield
    if len(weights._copies) > before:
        gc.collect()

    assert len(weights._copies) == before


def assert_worth(found: Tensor, wanted: oracle.F64) -> None:
    """Fail unless all of it is what it should be, NaN where it should be."""
    assert found.dtype == torch.bfloat16
    assert np.array_equal(found.double().cpu().numpy(), wanted, equal_nan=True)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@each_dialect
@each_form
@each_name
def test_each_block_is_multiplied_by_its_own_scale(
    shape: tuple[int, int], dialect: torch.dtype, form: str, name: str
) -> None:
    given = Scaled.draw(sum(shape), *shape, dialect, form)

    assert_worth(dequantized(given.module(name)), given.values)


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
    found = dequantized(Scaled(codes, exponents, dialect).module()).double().cpu().numpy()
    code = oracle.decode_e4m3(codes.numpy(), dialect == FNUZ)
    wanted = oracle.round_bf16(code * np.repeat(powers_of(torch.arange(256)), 128))

    assert np.array_equal(found, wanted, equal_nan=True)
    assert np.isnan(found[:, -128:]).all()
    assert np.isfinite(found[:, :128]).sum() == 256 - np.isnan(code[:, :128]).sum()


def test_a_code_is_worth_half_in_the_other_dialect() -> None:
    ocp = Scaled.draw(1, 130, 140, OCP, "fp32")
    twin = Scaled(ocp.codes.masked_fill(ocp.codes == 0x80, 0), ocp.scale, OCP)
    halved = Scaled(twin.codes, 2 * ocp.scale, FNUZ)

    assert torch.equal(dequantized(twin.module()), dequantized(halved.module()))


def test_a_weight_may_lie_in_memory_in_any_way() -> None:
    given = Scaled.draw(2, 140, 150, OCP, "fp32")
    module = given.module()
    module.weight = module.weight.view(torch.uint8).t().contiguous().t().view(OCP)
    module.weight_scale_inv = module.weight_scale_inv.t().contiguous().t()

    assert_worth(dequantized(module), given.values)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@each_name
def test_a_weight_that_is_not_fp8_is_never_scaled(dtype: torch.dtype, name: str) -> None:
    weight = torch.randn(3, 4, dtype=dtype, device=DEVICE)
    for scale in (torch.full((1, 1), torch.nan), torch.ones(7), "none"):
        module = SimpleNamespace(**{"weight": weight, name: scale})
        with operations() as ran:
            assert dequantized(module) is weight
            assert dequantized(weight) is weight

        assert not ran


def test_a_weight_that_an_engine_has_made_bf16_is_not_scaled_again() -> None:
    module = Scaled.draw(3, 40, 50, OCP, "fp32").module()
    once = dequantized(module)
    module.weight = once

    assert dequantized(module) is once

    module = Scaled.draw(3, 40, 50, OCP, "fp32").module()
    kept = weakref.ref(dequantized(module))
    module.weight.data = once

    assert torch.equal(dequantized(module), once)
    assert kept() is None


def test_both_names_may_say_the_same() -> None:
    given = Scaled.draw(4, 200, 50, FNUZ, "bytes")
    factors = torch.tensor(given.factors, dtype=torch.float32, device=DEVICE)

    assert_worth(dequantized(given.module("weight_scale", weight_scale_inv=factors)), given.values)


# what is kept


def test_it_is_computed_once() -> None:
    module = Scaled.draw(5, 40, 50, OCP, "fp32").module()
    first = dequantized(module)
    with operations() as ran:
        again = dequantized(module)

    assert again is first
    assert not ran


def test_two_weights_do_not_get_each_others_copy() -> None:
    given = [Scaled.draw(seed, 40, 50, OCP, "fp32") for seed in (6, 7)]
    modules = [each.module() for each in given]
    for _ in range(2):
        for each, module in zip(given, modules, strict=True):
            assert_worth(dequantized(module), each.values)


Change = Callable[[Any, Scaled], None]


def writes_the_weight(module: Any, other: Scaled) -> None:
    module.weight.copy_(other.weight())


def writes_the_scale(module: Any, other: Scaled) -> None:
    module.weight_scale_inv.copy_(other.scale)


def gives_the_weight_other_memory(module: Any, other: Scaled) -> None:
    module.weight.data = other.weight()


def gives_the_scale_other_memory(module: Any, other: Scaled) -> None:
    module.weight_scale_inv.data = other.scale.to(DEVICE)


def replaces_the_weight(module: Any, other: Scaled) -> None:
    module.weight = other.weight()


def replaces_the_scale(module: Any, other: Scaled) -> None:
    module.weight_scale_inv = other.scale.to(DEVICE)


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


CHANGES = [
    writes_the_weight, writes_the_scale, gives_the_weight_other_memory, gives_the_scale_other_memory,
    replaces_the_weight, replaces_the_scale, replaces_the_scale_by_one_in_its_memory, renames_the_scale,
    renames_the_scale_and_keeps_its_memory, forgets_what_torch_does_not_see,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_it_is_computed_again_when_something_changed(change: Change) -> None:
    first, second = (Scaled.draw(seed, 140, 50, OCP, "fp32") for seed in (8, 9))
    module = first.module()
    assert_worth(dequantized(module), first.values)
    change(module, second)
    now = Scaled(module.weight.view(torch.uint8).cpu(), _scale_of(module).cpu(), OCP)
    assert not np.array_equal(now.values, first.values)

    assert_worth(dequantized(module), now.values)
    with operations() as ran:
        dequantized(module)
    assert not ran


def _scale_of(module: Any) -> Tensor:
    found = getattr(module, "weight_scale_inv", None)
    scale = module.weight_scale if found is None else found
    assert isinstance(scale, Tensor)
    return scale


def test_new_numbers_appear_where_a_captured_graph_reads_them() -> None:
    first, second = (Scaled.draw(seed, 140, 50, OCP, "fp32") for seed in (8, 9))
    module = first.module()
    copy = dequantized(module)
    address = copy.data_ptr()
    writes_the_weight(module, second)

    assert dequantized(module).data_ptr() == address
    assert_worth(copy, Scaled(second.codes, first.scale, OCP).values)


def test_another_shape_gets_other_memory() -> None:
    first, second = Scaled.draw(8, 140, 50, OCP, "fp32"), Scaled.draw(9, 50, 140, OCP, "fp32")
    module = first.module()
    copy = dequantized(module)
    module.weight.data, module.weight_scale_inv = second.weight(), second.scale.to(DEVICE)

    assert_worth(dequantized(module), second.values)
    assert_worth(copy, first.values)


def test_a_copy_dies_with_its_weight() -> None:
    module = Scaled.draw(10, 40, 50, OCP, "fp32").module()
    copy, scale = weakref.ref(dequantized(module)), weakref.ref(module.weight_scale_inv)
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


def test_the_end_of_one_weight_leaves_one_that_took_its_place() -> None:
    module = Scaled.draw(10, 40, 50, OCP, "fp32").module()
    dequantized(module)
    stale = weakref.ref(torch.ones(1))
    weights._drop(id(module.weight), stale)

    assert id(module.weight) in weights._copies


def test_parameters_of_a_module_serve_in_and_out_of_inference_mode() -> None:
    first, second = (Scaled.draw(seed, 40, 50, FNUZ, "fp32") for seed in (11, 12))
    module = nn.Module()
    module.weight = nn.Parameter(first.weight(), requires_grad=False)
    module.weight_scale = nn.Parameter(first.scale.to(DEVICE))
    with torch.inference_mode():
        copy = dequantized(module)
    assert_worth(copy, first.values)
    assert not copy.requires_grad
    with torch.no_grad():
        module.weight.copy_(second.weight())
        module.weight_scale.copy_(second.scale)

    assert_worth(dequantized(module), second.values)

    with torch.inference_mode():
        unversioned = second.module()
        assert_worth(dequantized(unversioned), second.values)
    with operations() as ran:
        dequantized(unversioned)
    assert not ran


# what is refused


FP8 = Scaled.draw(13, 130, 260, OCP, "fp32")
BAD: dict[str, tuple[Any, str, str]] = {
    "no weight": (SimpleNamespace(), "wo_a", "a module with a weight"),
    "nothing": (None, "wo_a", "NoneType"),
    "no scale": (SimpleNamespace(weight=FP8.weight()), "wo_a.weight", "got neither -> a weight without"),
    "scales of None": (FP8.module(weight_scale_inv=None), "wo_a.weight", "got neither"),
    "a plain fp8 tensor": (FP8.weight(), "wo_a", "got neither -> pass the module"),
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


@pytest.mark.parametrize("case", BAD.values(), ids=BAD)
def test_a_bad_weight_is_an_error_before_anything_is_computed(
    case: tuple[Any, str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    wo_a, argument, said = case
    monkeypatch.setattr(weights, "_product", lambda *_: pytest.fail("computed"))
    with pytest.raises(ArgumentError, match=rf"^{argument}: expected .*{said}"):
        dequantized(wo_a)


def test_a_scale_that_went_bad_is_an_error_even_if_a_copy_is_kept() -> None:
    module = Scaled.draw(14, 40, 50, OCP, "fp32").module()
    dequantized(module)
    module.weight_scale_inv = None
    with pytest.raises(ArgumentError, match="got neither"):
        dequantized(module)

"""The replaced steps of the interpreter give the bits, shapes and types of the original steps, for any operands."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from tests.fast_interpreter import kernels, replay, steps

pytestmark = pytest.mark.skipif(
    not steps.REPLACED or replay.RECORDINGS is None,
    reason="kernels are not interpreted here, or this Triton's interpreter is another one",
)
KINDS = (
    "int1", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "bfloat16", "float32",
    "float64", "float8e4nv",
)  # fmt: skip
SHAPES = ((1,), (4,), (2, 1), (2, 4))
BITS = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0x7F80_0000, 0xFFC0_0000, 2**31 - 1, 2**31, 2**63 - 1, 2**63, 2**64 - 1)


OTHERS = "__init__", "create_select", "create_addptr", "create_expand_dims", "create_broadcast", "create_splat"
"""Replaced steps of other operands than two blocks of numbers."""


def blocks(kind: str, shape: tuple[int, ...], seed: int = 0) -> Iterator[Any]:
    """Two handles of random bit patterns from BITS: one with a scalar type, one with the type of a block."""
    import triton.language as tl
    from triton.runtime import interpreter

    scalar = getattr(tl, kind)
    dtype = interpreter._get_np_dtype(scalar)
    drawn = np.random.default_rng(seed).choice(np.array(BITS, dtype=np.uint64), shape)
    data = (drawn & 1).astype(bool) if kind == "int1" else drawn.astype(f"u{dtype.itemsize}").view(dtype)
    yield interpreter.TensorHandle(data, scalar)
    yield interpreter.TensorHandle(data, tl.block_type(scalar, [*shape]))


def pointers(kind: str, shape: tuple[int, ...]) -> Any:
    import triton.language as tl
    from triton.runtime import interpreter

    return interpreter.TensorHandle(np.full(shape, 2**40, dtype=np.uint64), tl.pointer_type(getattr(tl, kind)))


def answer(step: Any, *args: Any) -> Any:
    """Everything observable of the result of a step, or the type of its error."""
    from triton.runtime import interpreter

    with np.errstate(all="ignore"):
        try:
            tensor = step(interpreter.interpreter_builder, *args)
        except (TypeError, ValueError) as error:
            return type(error)
    return tensor.dtype, tensor.attr, tensor.data.dtype, np.shape(tensor.data), tensor.data.tobytes()


def assert_same(name: str, *args: Any) -> None:
    from triton.runtime import interpreter

    original, ours = steps.REPLACED[name], vars(interpreter.InterpreterBuilder)[name]

    assert ours is not original
    assert answer(ours, *args) == answer(original, *args), (
        name,
        args,
    )


def names() -> list[str]:
    """Names of the replaced steps that take two blocks of numbers."""
    return [name for name in steps.REPLACED if name not in OTHERS]


def test_most_steps_on_two_blocks_are_replaced() -> None:
    """Otherwise a new Triton release has written its steps in another way, and tests run slower."""
    assert {"create_add", "create_mul", "create_fadd", "create_and", "create_shl", "create_icmpSLT"} <= {*names()}
    assert {*OTHERS} <= {*steps.REPLACED}


@pytest.mark.parametrize("left", KINDS)
def test_two_blocks_give_the_bits_of_the_interpreter_s_own_step(left: str) -> None:
    for name, right in product(names(), {left, "int1", "int32", "float32"}):
        for a, b in product(blocks(left, (2, 4)), blocks(right, (2, 4), seed=1)):
            assert_same(name, a, b)
    for name, shape, other in product(names(), SHAPES, SHAPES):
        for a, b in zip(blocks(left, shape), blocks(left, other, seed=1), strict=True):
            assert_same(name, a, b)


@pytest.mark.parametrize("kind", KINDS)
def test_choices_addresses_and_new_axes_are_the_interpreter_s(kind: str) -> None:
    for shape, other in product(SHAPES, SHAPES):
        for cond, a, b in product(blocks("int1", shape), blocks(kind, other), blocks(kind, shape, seed=1)):
            assert_same("create_select", cond, a, b)
    for a, b in product(blocks("int64", (4,)), blocks(kind, (4,))):
        assert_same("create_select", next(blocks("int1", (4,))), a, b)  # made wider than its type, and cut
    for shape, offset in product(SHAPES, ("int32", "int64", "uint32", "int1")):
        for by in blocks(offset, shape):
            assert_same("create_addptr", pointers(kind, (1,)), by)
            assert_same("create_icmpEQ", pointers(kind, (1,)), pointers(kind, shape))
    for shape in SHAPES:
        for block, axis in product(blocks(kind, shape), range(-3, 3)):
            assert_same("create_expand_dims", block, axis)


@pytest.mark.parametrize("kind", KINDS)
def test_one_number_or_row_for_a_whole_block_is_the_interpreter_s(kind: str) -> None:
    import triton.language as tl

    for shape, wide in product((*SHAPES, (1, 4)), (*SHAPES, (3, 2, 4), (64, 128), (1, 8192))):
        for block in blocks(kind, shape):
            assert_same("create_broadcast", block, wide)
    for shape, wide in product(((1,), (4,)), (*SHAPES, (64, 128))):
        for block in blocks(kind, shape):
            assert_same("create_splat", tl.block_type(getattr(tl, kind), [*wide]), block)
    assert_same("create_splat", tl.block_type(tl.pointer_type(getattr(tl, kind)), [2, 4]), pointers(kind, (1,)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_kernel_gives_what_the_interpreter_s_own_steps_give(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton.runtime import interpreter

    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(1)).to(dtype)
    x[0, 0], x[1, 1] = torch.inf, torch.nan
    output = kernels.mixed(x)
    with monkeypatch.context() as patch:
        patch.setattr(replay.RECORDINGS, "disabled", True)
        for name, original in steps.REPLACED.items():
            patch.setattr(
                interpreter.TensorHandle if name == "__init__" else interpreter.InterpreterBuilder, name, original
            )
        expected = kernels.mixed(x)

    torch.testing.assert_close(output, expected, rtol=0, atol=0, equal_nan=True)


def test_a_kernel_makes_infinities_in_silence() -> None:
    zero = torch.tensor([0.0, 1.0])

    assert kernels.quotients(zero, torch.zeros(2)).isnan().tolist() == [True, False]

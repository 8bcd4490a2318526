"""Tensors whose rows lie apart: what they hold, how far apart they are, and that writes beside them are found."""

from __future__ import annotations

import pytest
import torch

from dsv4attn.backends.reference.launch import ReferenceBackend
from dsv4attn.testing.case import Bench, Measure, Wrong
from dsv4attn.testing.checks.insert import rows
from dsv4attn.testing.kit.strided import NAMES, StridedTensors, each_strided


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int32])
@pytest.mark.parametrize("shape", [(5, 8, 512), (5, 512), (5, 8), (0, 8), (1, 8)])
def test_g21_rows_lie_apart_and_hold_the_values(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    values = torch.arange(torch.tensor(shape).prod().item()).view(shape).to(dtype)
    strided = StridedTensors("q")
    made = strided("q", values)

    assert torch.equal(made, values)
    assert made.stride(-1) == 1
    assert all(stride > n for stride, n in zip(made.stride(), shape[1:], strict=False))
    assert made.stride(0) > values.stride(0)
    assert made.data_ptr() % 16 == 0
    assert made.stride(0) * made.itemsize % 16 == 0
    made.fill_(3)
    strided.check()
    for other in (StridedTensors(""), StridedTensors("kv")):
        assert other("q", values) is values
    assert StridedTensors("all")("q", values).stride(0) > values.stride(0)


def test_g21_no_two_arguments_have_the_same_strides() -> None:
    strided = StridedTensors("all")

    assert len({strided(name, torch.zeros(3, 8)).stride(0) for name in NAMES}) == len(NAMES)
    with pytest.raises(ValueError, match="not in tuple"):
        strided("mapping", torch.zeros(3, 8))


@pytest.mark.parametrize("offset", [-1, 8])
def test_g21_a_write_between_the_rows_is_found(offset: int) -> None:
    strided = StridedTensors("out lse")
    strided("out", torch.zeros(3, 8))
    lse = strided("lse", torch.zeros(3, 8))
    lse.as_strided((1,), (1,), lse.storage_offset() + lse.stride(0) + offset).fill_(0)

    with pytest.raises(Wrong, match=r"^4 bytes next to the rows of lse were written$"):
        strided.check()


def test_g21_a_failure_names_the_argument_whose_rows_lie_apart() -> None:
    seen = []

    def check(_: Bench, inputs: object) -> Measure:
        seen.append(inputs.strided)  # type: ignore[attr-defined]
        if seen[-1] in ("kv", "all"):
            raise Wrong("so", Measure(2.0, 1.0))
        return Measure(0.5, 1.0)

    bench = Bench(ReferenceBackend(), lse=False)
    assert each_strided("q lse k", check)(bench, rows(count=1)).error == 0.5
    assert seen == ["q", "k"], "an lse is not asked of a backend that gives none"
    with pytest.raises(Wrong, match=r"^rows of kv apart: so$") as result:
        each_strided("q kv all", check)(bench, rows(count=1))
    assert result.value.measure == Measure(2.0, 1.0)
    with pytest.raises(Wrong, match=r"^rows of all tensors apart: so$"):
        each_strided("all", check)(bench, rows(count=1))

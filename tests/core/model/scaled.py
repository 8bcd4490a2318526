"""Block-scaled fp8 weights for tests, and what they are worth in float64."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from attrs import frozen
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dsv4attn.core.model.quantized_weight import BlockScaledWeight
from dsv4attn.testing.kit.tolerances import F64
from dsv4attn.testing.oracle import attention as oracle

CPU = torch.device("cpu")
# as in tests of kernels, which run on the CPU if they are interpreted
DEVICE = CPU if os.environ.get("TRITON_INTERPRET") == "1" else torch.accelerator.current_accelerator() or CPU
BLOCK = 128
OCP, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz
E8M0 = getattr(torch, "float8_e8m0fnu", None)
FORMS = ["fp32", "e8m0", "bytes"] if E8M0 else ["fp32", "bytes"]
each_dialect = pytest.mark.parametrize("dialect", [OCP, FNUZ], ids=["ocp", "fnuz"])
each_form = pytest.mark.parametrize("form", FORMS)
each_name = pytest.mark.parametrize("name", ["weight_scale_inv", "weight_scale"])


class _Recorder(TorchDispatchMode):
    """Lists the operations that torch runs."""

    def __init__(self, ran: list[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ran = ran

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._ran.append(str(func))
        return func(*args, **(kwargs or {}))


@contextmanager
def operations() -> Iterator[list[str]]:
    """Names of what torch runs meanwhile, views too."""
    ran: list[str] = []
    with _Recorder(ran):
        yield ran


def powers_of(scale_bytes: Tensor) -> F64:
    """2^(byte - 127), and NaN for 255."""
    exponents = scale_bytes.long().numpy()
    return np.where(exponents == 255, np.nan, np.ldexp(1.0, exponents - 127))


@frozen(eq=False)
class Scaled:
    """Codes [rows, columns] and the scale of each block, on the CPU. The scale is as an engine has it.

    device: where weights made of them are. block: rows and columns under one scale.
    """

    codes: Tensor
    scale: Tensor
    dialect: torch.dtype
    device: torch.device = DEVICE
    block: tuple[int, int] = (BLOCK, BLOCK)

    @classmethod
    def draw(
        cls,
        seed: int,
        rows: int,
        columns: int,
        dialect: torch.dtype,
        form: str,
        device: torch.device = DEVICE,
        block: tuple[int, int] = (BLOCK, BLOCK),
    ) -> Scaled:
        """Random finite codes; scales around 2^-7, which is no power of two if they are fp32."""
        g = torch.Generator().manual_seed(seed)
        codes = torch.randint(0, 256, (rows, columns), generator=g, dtype=torch.uint8)
        codes[codes & 0x7F == (0x7F if dialect == OCP else 0)] = 1
        shape = -(-rows // block[0]), -(-columns // block[1])
        exponents = torch.randint(115, 125, shape, generator=g, dtype=torch.uint8)
        if form == "fp32":
            return cls(codes, torch.rand(shape, generator=g) * 2.0**-6, dialect, device, block)
        return cls(codes, exponents.view(E8M0) if form == "e8m0" and E8M0 else exponents, dialect, device, block)

    @property
    def factors(self) -> F64:
        """Of each block."""
        if self.scale.dtype == torch.float32:
            return np.asarray(self.scale.double().numpy())
        return powers_of(self.scale.view(torch.uint8))

    @property
    def values(self) -> F64:
        """[rows, columns]: code times factor, rounded to fp32 and then to bf16."""
        rows, columns = self.codes.shape
        factors = np.kron(self.factors, np.ones(self.block))[:rows, :columns]
        with np.errstate(over="ignore", invalid="ignore"):
            product = oracle.decode_e4m3(self.codes.numpy(), self.dialect == FNUZ) * factors
            return oracle.round_bf16(product.astype(np.float32))

    def weight(self) -> Tensor:
        """The codes in their dialect, in memory of their own on the device."""
        return self.codes.view(self.dialect).to(self.device, copy=True)

    def pair(self, **options: Any) -> BlockScaledWeight:
        """The weight and its scale, in memory of their own on the device."""
        return BlockScaledWeight(self.weight(), self.scale.to(self.device, copy=True), **options)

    def module(self, name: str = "weight_scale_inv", **attributes: Any) -> Any:
        """What an engine passes: the weight, and its scale under this name."""
        return SimpleNamespace(**{"weight": self.weight(), name: self.scale.to(self.device, copy=True), **attributes})

"""The roofline of this machine: its copy bandwidth and matrix-product rate, measured in the same run as the cases."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from attrs import frozen

from dsv4attn.tools.bench.clock import Clock

_ROUNDS = 10


@frozen
class Roofline:
    """Peak rates of a machine.

    bytes_s: bytes per second, read and written, of a large copy.
    flops_s: operations per second of a large matrix product.
    dtype: type of that product.
    fp8_flops_s: operations per second of an e4m3 product; None where torch has none.
    """

    bytes_s: float
    flops_s: float
    dtype: str
    fp8_flops_s: float | None = None

    @classmethod
    def measure(cls, clock: Clock) -> Roofline:
        """The fastest of some rounds each: products of 8192 ** 3 and a copy of 1 GiB, less and fp32 on a CPU."""
        on_cpu = clock.device.type == "cpu"
        side, dtype, size = (1024, torch.float32, 2**26) if on_cpu else (8192, torch.bfloat16, 2**30)
        source = torch.ones(size, dtype=torch.uint8, device=clock.device)
        target = torch.empty_like(source)
        left = torch.randn(side, side, device=clock.device, dtype=torch.float32).to(dtype)
        multiply = partial(torch.matmul, left, torch.randn_like(left), out=torch.empty_like(left))

        def fastest(call: Callable[[], object]) -> float:
            return clock.times([call], _ROUNDS)[0].p10

        multiply_fp8 = None if on_cpu else _fp8_product(side, clock.device)
        fp8 = None if multiply_fp8 is None else 2 * side**3 / fastest(multiply_fp8)
        rates = 2 * size / fastest(partial(target.copy_, source)), 2 * side**3 / fastest(multiply)
        return cls(*rates, str(dtype).removeprefix("torch."), fp8)

    def best(self, other: Roofline) -> Roofline:
        """The higher rates of two measurements: other processes can only lower them."""
        fp8 = max(self.fp8_flops_s or 0.0, other.fp8_flops_s or 0.0) or None
        return Roofline(max(self.bytes_s, other.bytes_s), max(self.flops_s, other.flops_s), self.dtype, fp8)

    def seconds(self, flops: float, moved: float, *, fp8: bool = False) -> float:
        """Least seconds of some work: the larger of its product time and its copy time.

        fp8: whether operands of the products are fp8, so that the device's fp8 product counts, if it has one.
        """
        rate = (self.fp8_flops_s if fp8 else None) or self.flops_s
        return max(flops / rate, moved / self.bytes_s)


def _fp8_product(side: int, device: torch.device) -> Callable[[], object] | None:
    """A product of square e4m3 matrices in the device's dialect, or None where torch has no such product."""
    scale = torch.ones((), device=device, dtype=torch.float32)
    for dtype in (torch.float8_e4m3fn, torch.float8_e4m3fnuz):
        left, right = (torch.randn(side, side, device=device, dtype=torch.float32).to(dtype) for _ in range(2))
        options: dict[str, Any] = {"out_dtype": torch.bfloat16, "use_fast_accum": True}
        try:
            multiply = partial(torch._scaled_mm, left, right.T, scale, scale, **options)  # noqa: SLF001 - no public name
            multiply()
        except (RuntimeError, AttributeError):
            continue
        return multiply
    return None

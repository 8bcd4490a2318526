"""The roofline of this machine: its copy bandwidth and matrix-product rate, measured in the same run as the cases."""

from __future__ import annotations

import torch
from attrs import frozen

from dsv4attn.tools.bench.clock import Clock

__all__ = ["Roofline"]

_ROUNDS = 10


@frozen
class Roofline:
    """Peak rates of a machine.

    bytes_s: bytes per second, read and written, of a large copy.
    flops_s: operations per second of a large matrix product.
    dtype: type of that product.
    """

    bytes_s: float
    flops_s: float
    dtype: str

    @classmethod
    def measure(cls, clock: Clock) -> Roofline:
        """The fastest of some rounds each: a bf16 product of 8192 ** 3 and a copy of 1 GiB, less and fp32 on a CPU."""
        on_cpu = clock.device.type == "cpu"
        side, dtype, size = (1024, torch.float32, 2**26) if on_cpu else (8192, torch.bfloat16, 2**30)
        source = torch.ones(size, dtype=torch.uint8, device=clock.device)
        target = torch.empty_like(source)
        left = torch.randn(side, side, device=clock.device).to(dtype)
        right, product = torch.randn_like(left), torch.empty_like(left)

        def multiply() -> None:
            torch.matmul(left, right, out=product)

        def copy() -> None:
            target.copy_(source)

        multiplied, copied = (clock.times([call], _ROUNDS)[0].p10 for call in (multiply, copy))
        return cls(2 * size / copied, 2 * side**3 / multiplied, str(dtype).removeprefix("torch."))

    def best(self, other: Roofline) -> Roofline:
        """The higher rates of two measurements: other processes can only lower them."""
        return Roofline(max(self.bytes_s, other.bytes_s), max(self.flops_s, other.flops_s), self.dtype)

    def seconds(self, flops: float, moved: float) -> float:
        """Least seconds of some work: the larger of its product time and its copy time."""
        return max(flops / self.flops_s, moved / self.bytes_s)

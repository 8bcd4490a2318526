"""Variants of the small kernels, arguments for them, and drivers of devices that are not here."""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from triton.backends.compiler import GPUTarget

from dsv4attn.backends._triton.compiling.variant import Variant
from tests.backends._triton.launching.kernels_small import attend, rows


def rows_of(**types: str) -> Variant:
    """A variant of `rows`."""
    plain = {"x": "*bf16", "idx": "*i32", "scale": "none", "out": "*bf16", "n": "i32", "stride": "i64", "eps": "fp32"}
    return Variant(rows, {**plain, **types}, {"DT": tl.bfloat16, "BLOCK": 64})


def attend_of(heads: int, keys: int, num_warps: int, dims: int = 512) -> Variant:
    """A variant of `attend`."""
    types = {"q": "*bf16", "k": "*bf16", "out": "*fp32", "n": "int"}
    return Variant(attend, types, {"H": heads, "D": dims, "R": keys}, num_warps)


class FakeDriver:
    """What Triton asks of a driver, without a device: loading remembers names, launching remembers arguments."""

    def __init__(self, target: GPUTarget) -> None:
        self.target, self.utils = target, self
        self.loaded: list[str] = []
        self.launched: list[tuple[Any, ...]] = []

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 2**20}

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[object, object, int, int, int]:
        self.loaded.append(name)
        return object(), object(), 32, 0, 1024

    def unload_module(self, module: object) -> None:
        pass

    def launcher_cls(self, source: object, metadata: object) -> Any:
        return lambda *args: self.launched.append(args)


def cpu_args(*, unaligned: bool = False) -> list[Any]:
    """Arguments of `rows` that compile to `rows_of()`, or to the form with an unaligned `x`."""
    storage = torch.zeros(130, dtype=torch.bfloat16)
    x = storage[1:129] if unaligned else storage[:128]
    return [x, torch.zeros(2, dtype=torch.int32), None, torch.zeros(128, dtype=torch.bfloat16), 64, 64, 1e-6]

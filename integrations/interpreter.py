"""Triton's interpreter on a CPU, for the kernels of engines that the tests of adapters run."""

# ruff: noqa: ANN401, SLF001 - a function of Triton's interpreter is replaced, which has no types

from __future__ import annotations

from typing import Any


def round_as_torch(*types: str) -> None:
    """Make Triton's interpreter cast fp32 to these types as torch and GPUs do. types: "fp8e4nv", "bf16".

    A mantissa that the interpreter rounds up to the next power of two loses its carry.
    """
    import numpy as np
    import torch
    from triton.runtime import interpreter

    convert = interpreter._convert_float
    known = {"fp8e4nv": (torch.float8_e4m3fn, torch.uint8), "bf16": (torch.bfloat16, torch.uint16)}
    dtypes = {name: known[name] for name in types}

    def cast(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if source.name != "fp32" or target.name not in dtypes:
            return convert(data, source, target, rounding)
        values = torch.from_numpy(np.ascontiguousarray(data).view(np.float32).copy())
        dtype, bits = dtypes[target.name]
        return values.to(dtype).view(bits).numpy()

    interpreter._convert_float = cast

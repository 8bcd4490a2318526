"""Products of a layer with its weights, as deterministic layers of a backend multiply; and torch's as a peer."""

from __future__ import annotations

from functools import partial

import torch
from torch.nn import functional

from dsv4attn.core.contract.backend import Backend
from dsv4attn.core.torch_ops.tiles import Linear
from dsv4attn.errors import UnsupportedError
from dsv4attn.selection import load_backend, registered
from dsv4attn.tools.bench.contenders import Contender, Task, returning
from dsv4attn.tools.bench.inputs import RandomNumbers
from dsv4attn.tools.bench.layer_ops import LayerOpCase


def products_task(case: LayerOpCase, device: torch.device) -> Task:
    """X times a weight transposed, in bf16, with bits of a row that do not depend on the other rows."""
    normal, (tokens, columns, depth) = RandomNumbers(device, case.seed).normal, (case.count, case.columns, case.hidden)
    x, weight = normal(tokens, depth).bfloat16(), (normal(columns, depth) * depth**-0.5).bfloat16()

    def contender(name: str, backend: Backend, dtype: torch.dtype) -> Contender:
        left, right = x.to(dtype), weight.to(dtype)
        multiply = functional.linear if dtype == torch.float32 else _deterministic(name, backend)
        return returning(name, lambda: [multiply(left, right)])

    moved = 2 * (x.numel() + weight.numel() + tokens * columns)
    # the product of torch's library, whose bits may depend on the number of rows
    torchs = partial(returning, "torch", lambda: [functional.linear(x, weight)])
    return Task(case, 2 * tokens * columns * depth, moved, contender, beside={"torch": torchs})


def _deterministic(name: str, backend: Backend) -> Linear:
    """The product of a deterministic backend of this name, or that which the backend brings."""
    if not (backend.deterministic or backend.layer_ops.brings("linear")):
        if "deterministic" not in registered(name).info.options:
            raise UnsupportedError("deterministic", expected="a backend with this option", actual=name)
        backend = load_backend(name, deterministic=True)
    return backend.layer_ops.arithmetic(deterministic=backend.deterministic).linear

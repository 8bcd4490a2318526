"""`token_by_token`: the layers of a model of transformers around its attention, one token at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class _Products(TorchFunctionMode):
    """Products of small matrices as sums in one order; the hyper-connections of a layer have one."""

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.matmul:
            first, second = args
            return sum(first[..., i, None] * second[..., None, i, :] for i in range(first.shape[-1]))
        return func(*args, **(kwargs or {}))


@contextmanager
def token_by_token(model: Any) -> Iterator[None]:
    """Within the block, a token gets the same bits in any batch from everything but its attention.

    Libraries order the sums of a product, and round vectors and their ends, by the shape of a call. So bits of a model
    on a CPU depend on the batch, whatever attention does.
    """
    inner = model.model
    parts = [inner.hc_head, inner.norm, model.lm_head]
    for layer in inner.layers:
        parts += [layer.attn_hc, layer.ffn_hc, layer.input_layernorm, layer.post_attention_layernorm, layer.mlp]
    experts = model.config._experts_implementation
    model.set_experts_implementation("eager")
    try:
        for part in parts:
            part.forward = _alone(part.forward)
        with _Products():
            yield
    finally:
        for part in parts:
            part.__dict__.pop("forward", None)
        model.set_experts_implementation(experts)


def _alone(forward: Callable[..., Any]) -> Callable[..., Any]:
    def each(x: Tensor, input_ids: Tensor | None = None) -> Any:
        rows = []
        for n in range(x.shape[0]):
            outputs = []
            for s in range(x.shape[1]):
                ids = {} if input_ids is None else {"input_ids": input_ids[n : n + 1, s : s + 1]}
                outputs.append(forward(x[n : n + 1, s : s + 1].clone(), **ids))
            rows.append(_joined(outputs, 1))
        return _joined(rows, 0)

    return each


def _joined(parts: list[Any], dim: int) -> Any:
    if isinstance(parts[0], Tensor):
        return torch.cat(parts, dim)
    return tuple(torch.cat(column, dim) for column in zip(*parts, strict=True))

"""`WeightCopies`: what a layer computes from its weights once, and how it notices that a weight has changed.

One rule for every weight. A weight that has the form in which it is multiplied is read as it is, in every step. Of
others there are copies: bf16 of fp8, fp32 of bf16, matrices put together. Every copy is registered with the tensors
that it was made of. Before a step the layer asks `changed`, and if a tensor has changed it makes all copies again, in
the same memory, which captured graphs read. `TensorState` says what is seen; after any other write `refresh` of the
layer does the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dsv4attn.core.model.quantized_weight import Weight, converted, scaled_weight, tensors_of
from dsv4attn.core.model.tensor_state import TensorState
from dsv4attn.core.torch_modes import is_capturing
from dsv4attn.errors import ArgumentError

__all__ = ["WeightCopies", "check_not_captured"]


class WeightCopies:
    """Copies of the weights of one part of a layer, by name, in memory that stays.

    Making a copy again under its name writes the same memory, if shape, dtype and device are the same.
    """

    def __init__(self) -> None:
        self._made: dict[str, Tensor] = {}
        self._sources: dict[str, list[tuple[Any, str, Tensor, TensorState]]] = {}

    def changed(self) -> bool:
        """Whether a tensor that a copy was made of has changed, or a module has another tensor. Reads no device."""
        for sources in self._sources.values():
            for owner, name, tensor, state in sources:
                if owner is not None:
                    current = owner.get(name) if type(owner) is dict else getattr(owner, name, None)
                    if current is not tensor:
                        return True
                if not state.holds(tensor):
                    return True
        return False

    def dense(self, name: str, value: Weight) -> Tensor:
        """A matrix as bf16 if it is fp8, and as it is otherwise. value: see `weights.dense_weight`."""
        if isinstance(value, Tensor) and value.element_size() > 1:
            self._sources.pop(name, None)
            return converted(value, name)
        # states first: what is written meanwhile is seen later
        sources = self._states({"": value})
        converted_weight = converted(value, name, self._made.get(name))
        self._sources[name] = sources
        if any(converted_weight is tensor for _, _, tensor, _ in sources):
            self._made.pop(name, None)
        else:
            self._made[name] = converted_weight
        return converted_weight

    def scaled(self, name: str, value: Weight) -> Weight:
        """The codes and scales of a matrix that is fp8, as they are; `dense` of any other."""
        block_scaled = scaled_weight(value, name)
        if block_scaled is None:
            return self.dense(name, value)
        self._made.pop(name, None)
        self._sources[name] = self._states({"": value})
        return block_scaled

    def plain(self, name: str, value: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """A tensor in a dtype, without gaps between its elements; itself if it is so. dtype: default: its own."""
        dtype = value.dtype if dtype is None else dtype
        if value.dtype == dtype and value.is_contiguous():
            self._made.pop(name, None)
            self._sources.pop(name, None)
            return value
        self._sources[name] = self._states({"": value})
        out = self._memory(name, value.shape, dtype, value.device)
        return out.copy_(value)

    def merged(self, name: str, values: Mapping[str, Weight]) -> Tensor:
        """Matrices with as many columns, fp32, one after the other."""
        sources = self._states(values)
        parts = [converted(value, part) for part, value in values.items()]
        shape = torch.Size((sum(part.shape[0] for part in parts), parts[0].shape[1]))
        out = self._memory(name, shape, torch.float32, parts[0].device)
        for target, part in zip(out.split([part.shape[0] for part in parts]), parts, strict=True):
            target.copy_(part)
        self._sources[name] = sources
        return out

    def alias(self, name: str, value: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """`plain` without gradients. What shares the memory of a weight is made again when that has other memory."""
        copy = self.plain(name, value, dtype)
        if copy is not value:
            return copy
        self._sources[name] = self._states({"": value})
        return value.detach()

    def _memory(self, name: str, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The memory of a copy: that which it has, if it fits."""
        memory = self._made.get(name)
        if memory is None or (memory.shape, memory.dtype, memory.device) != (shape, dtype, device):
            memory = self._made[name] = torch.empty(shape, dtype=dtype, device=device)
        return memory

    @staticmethod
    def _states(values: Mapping[str, Weight]) -> list[tuple[Any, str, Tensor, TensorState]]:
        """The tensors of weights, with the places where modules have them, and their states."""
        return [
            (owner, attribute, tensor, TensorState(tensor))
            for value in values.values()
            for owner, attribute, tensor in tensors_of(value)
        ]


def check_not_captured(device: torch.device, name: str) -> None:
    """Raise ArgumentError while a graph is captured: copies of weights would be computed in every replay.

    name: of the layer.
    """
    if is_capturing(device):
        expected, hint = "weights that have not changed since the last step", "call refresh() before the capture"
        raise ArgumentError(f"weights of {name}", expected=expected, actual="changed ones", hint=hint)

"""The ways to change the weights of a layer, and helpers of tests that apply them."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn


def changed(tensor: Tensor, seed: int = 5) -> Tensor:
    """Other values for a tensor, of similar size."""
    noise = torch.rand(tensor.shape, generator=torch.Generator().manual_seed(seed))
    factor = 0.5 + noise if tensor.dim() < 2 or tensor.shape[0] < 4 else torch.where(noise < 0.5, -0.7, 1.3)
    return (tensor.detach().float() * factor).to(tensor.dtype)


def in_place(tensor: Tensor, new: Tensor, *_: Any) -> None:
    """Counted by torch, as `load_state_dict` and optimizers write."""
    with torch.no_grad():
        tensor.copy_(new)


def through_data(tensor: Tensor, new: Tensor, *_: Any) -> None:
    """Not counted by torch."""
    tensor.data.copy_(new)


def other_memory(tensor: Tensor, new: Tensor, *_: Any) -> None:
    """As offloading does: the memory is given back, and may come again at the same address."""
    tensor.data = torch.empty(0, dtype=tensor.dtype)
    tensor.data = new.clone()


def rebound(tensor: Tensor, new: Tensor, module: Any, name: str) -> None:
    """Another parameter, where a module has it."""
    if module is None:
        return in_place(tensor, new)
    setattr(module, name, nn.Parameter(new, requires_grad=False))
    return None


def state_dict(tensor: Tensor, new: Tensor, module: Any, name: str) -> None:
    """Loaded into a module."""
    if module is None:
        module, name = nn.ParameterDict({"own": tensor}), "own"
    module.load_state_dict({name: new}, strict=False)


def state_dict_assigned(tensor: Tensor, new: Tensor, module: Any, name: str) -> None:
    """Loaded into a module, whose parameters are replaced."""
    if module is None:
        return in_place(tensor, new)
    module.load_state_dict({name: new}, strict=False, assign=True)
    return None


CHANGES = (in_place, through_data, other_memory, rebound, state_dict, state_dict_assigned)


def differ(left: list[Tensor], right: list[Tensor]) -> bool:
    return not all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def plain(weight: Any) -> Any:
    """A weight in memory of its own, and not watched by anything."""
    return copy.deepcopy(weight)

"""The ways to change the weights of a layer, by the rows of the table in docs/layer.md, and helpers that apply them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


def changed(tensor: Tensor, seed: int = 5) -> Tensor:
    """Other values for a tensor, of similar size."""
    noise = torch.rand(tensor.shape, generator=torch.Generator().manual_seed(seed))
    factor = 0.5 + noise if tensor.dim() < 2 or tensor.shape[0] < 4 else torch.where(noise < 0.5, -0.7, 1.3)
    return (tensor.detach().float() * factor).to(tensor.dtype)


def in_place(tensor: Tensor, new: Tensor, *_: Any) -> None:
    with torch.no_grad():
        tensor.copy_(new)


def step(tensor: Tensor, new: Tensor, *_: Any, fused: bool = False) -> None:
    """A step of an optimizer. Codes and scales have no gradients, and are written as the step writes."""
    if tensor.element_size() == 1:
        return tensor.data.copy_(new) if fused else in_place(tensor, new)  # type: ignore[return-value]
    tensor.grad = tensor.detach() - new
    torch.optim.SGD([tensor], lr=1.0, fused=fused).step()
    tensor.grad = None
    return None


def state_dict(tensor: Tensor, new: Tensor, module: Any, name: str) -> None:
    if module is None:
        module, name = nn.ParameterDict({"own": tensor}), "own"
    module.load_state_dict({name: new}, strict=False)


def other_memory(tensor: Tensor, new: Tensor, *_: Any) -> None:
    tensor.data = new.clone()


def other_strides(tensor: Tensor, new: Tensor, *_: Any) -> None:
    """Rows, or elements of a vector, lie apart from now on."""
    new = new.detach()
    wide = torch.cat([new, new], -1) if new.dim() > 1 else torch.stack([new, new], 1)
    tensor.data = wide[:, : new.shape[1]] if new.dim() > 1 else wide[:, 0]


def rebound(tensor: Tensor, new: Tensor, module: Any, name: str) -> None:
    if module is None:
        return in_place(tensor, new)
    setattr(module, name, nn.Parameter(new, requires_grad=False))
    return None


def assigned(tensor: Tensor, new: Tensor, module: Any, name: str) -> None:
    """A state dict whose tensors become the parameters."""
    if module is None:
        return in_place(tensor, new)
    module.load_state_dict({name: new}, strict=False, assign=True)
    return None


def through_data(tensor: Tensor, new: Tensor, *_: Any) -> None:
    tensor.data.copy_(new)


def at_the_old_address(tensor: Tensor, new: Tensor, *_: Any) -> None:
    """As memory that was given back and is taken again: another storage over the same bytes."""
    tensor.data.copy_(new)
    flat = tensor.data.as_strided((tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)
    other = torch.from_numpy(flat.view(torch.uint8).numpy()).view(tensor.dtype)
    tensor.data = other.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


Change = Callable[[Tensor, Tensor, Any, str], None]
fused_step: Change = partial(step, fused=True)

SEEN: dict[str, tuple[Change, ...]] = {
    "a write that torch counts": (in_place, step, state_dict),
    "other memory": (other_memory, other_strides),
    "another parameter in a module": (rebound, assigned),
}
AFTER_REFRESH: dict[str, tuple[Change, ...]] = {
    "a write that torch does not count": (through_data,),
    "a step of a fused optimizer": (fused_step,),
    "other memory at the old address": (at_the_old_address,),
}
"""Ways to change a weight, by the beginnings of rows in docs/layer.md."""
CHANGES = tuple(change for changes in SEEN.values() for change in changes)
UNSEEN = tuple(change for changes in AFTER_REFRESH.values() for change in changes)


def differ(left: list[Tensor], right: list[Tensor]) -> bool:
    return not all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def plain(weight: Any) -> Any:
    """A weight in memory of its own, and not watched by anything."""
    return copy.deepcopy(weight)

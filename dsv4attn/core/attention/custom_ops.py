"""`define_op`: a custom op of torch, `torch.ops.dsv4attn.<name>`; `Handles`: how such an op finds its layer."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, Generic, TypeVar
from weakref import WeakValueDictionary

import torch

from dsv4attn.errors import Dsv4AttnError

__all__ = ["Handles", "define_op"]

T = TypeVar("T")

# defined by hand: torch.library.custom_op costs tens of microseconds more in every call
_library = torch.library.Library("dsv4attn", "DEF")


def define_op(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """The overload of a new op.

    schema: its name, the tensors that it reads, those that it writes with an alias, e.g. `Tensor(a!)`, and its results.
    Compilers order ops by it, so it must name every tensor that other code can write or read in the same graph.
    run: computes. It uses the tensors that it is given: a compiler may give it copies of those that a caller named.
    fake: makes results of the right shapes, strides and dtypes, and computes nothing.
    """
    name = schema.partition("(")[0]
    _library.define(schema, tags=(torch.Tag.needs_fixed_stride_order,))
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"dsv4attn::{name}", fake, lib=_library)
    overload: Callable[..., Any] = getattr(torch.ops.dsv4attn, name).default
    return overload


class Handles(Generic[T]):
    """Layers by the handle that a compiled graph holds. Handles are unique, also if two models have equal prefixes."""

    def __init__(self) -> None:
        self._layers: WeakValueDictionary[str, T] = WeakValueDictionary()
        self._count = itertools.count()

    def give(self, layer: T, prefix: str) -> str:
        """A new handle of a layer. prefix: its name."""
        handle = f"{prefix}#{next(self._count)}"
        self._layers[handle] = layer
        return handle

    def layer(self, handle: str) -> T:
        """The layer of a handle. Raises Dsv4AttnError if it no longer exists."""
        layer = self._layers.get(handle)
        if layer is None:
            cure = "keep the layer alive as long as graphs that call it"
            raise Dsv4AttnError(f"layer {handle} no longer exists -> {cure}")
        return layer

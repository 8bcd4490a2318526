"""`define_op`: a custom op of torch, `torch.ops.dsv4attn.<name>`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["define_op"]

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

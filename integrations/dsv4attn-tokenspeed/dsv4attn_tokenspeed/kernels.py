"""What the modules of ops share: registration, tensors as dsv4attn takes them, and the choice of a backend."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from tokenspeed_kernel.registry import Priority, register_kernel
from tokenspeed_kernel.signature import dense_tensor_format, format_signature
from torch import Tensor

from dsv4attn import Backend, KVCacheLayout, PagedKVCache
from dsv4attn.compat.direct import CallKind, plan
from dsv4attn.core.contract.backend import Phase

__all__ = ["SOLUTION", "backend_for", "ints", "kernel", "paged", "trait"]

SOLUTION = "dsv4attn"
_WINDOW = 128
"""Columns of the window in the call that `backend_for` asks about. The backend that attends inserts and selects too."""


def kernel(
    op: str,
    function: Callable[..., Any],
    signatures: Iterable[Mapping[str, torch.dtype]],
    traits: Mapping[str, frozenset[Any]],
    solution: str = SOLUTION,
) -> None:
    """Register a kernel of an op, on any platform.

    signatures: dtypes of the tensors by their role in the op. traits: what it takes, as the op asks for it.
    """
    formats = [
        format_signature(**{role: dense_tensor_format(dtype) for role, dtype in roles.items()}) for roles in signatures
    ]
    register_kernel(
        "attention",
        op,
        name=f"dsv4attn_{op}",
        solution=solution,
        signatures=frozenset(formats),
        traits=dict(traits),
        priority=Priority.PLUGIN,
    )(function)


def trait(*values: object) -> frozenset[object]:
    """Values of a trait that a kernel takes."""
    return frozenset(values)


def ints(tensor: Tensor, *shape: int) -> Tensor:
    """Slots, blocks or lengths, int32 or int64 of any shape, as contiguous int32 of this shape.

    No cache has as many slots as int32 has numbers. An int64 below -1 becomes -1, and one that int32 lacks the largest
    int32: neither is a slot or a block, so dsv4attn skips them, and that length is longer than every sequence.
    """
    if tensor.dtype == torch.int64:
        tensor = tensor.clamp(-1, torch.iinfo(torch.int32).max)
    return tensor.reshape(shape).to(torch.int32).contiguous()


def paged(cache: Tensor, layout: KVCacheLayout, page_size: int) -> PagedKVCache:
    """A cache [pages, bytes] of TokenSpeed's, whose rows may be longer than a page."""
    return PagedKVCache(cache.flatten(1) if cache.ndim > 2 else cache, layout, block_size=page_size)


def backend_for(device: torch.device, heads: int, page_size: int) -> Backend:
    """The backend that attends in decode, by dsv4attn's selection. The choice is cached.

    heads: query heads. page_size: records of a page.
    """
    kind = CallKind(Phase.DECODE, heads, torch.bfloat16, 512**-0.5, True, 1, ((_WINDOW, page_size),))
    return plan(kind, device, None)[0]

"""What the front doors under vLLM's and FlashInfer's names share: engines call them without a step's metadata.

All checks raise ArgumentError with the caller's names of its arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from dsv4attn.core.attention.checks import check_same_device
from dsv4attn.core.contract.backend import Backend, Phase
from dsv4attn.core.memory.workspace import WorkspaceManager
from dsv4attn.core.model.geometry import LayerGeometry, LayerKind, Rope
from dsv4attn.core.tensorspec import check_tensor
from dsv4attn.errors import ArgumentError

FLOATS = (torch.bfloat16, torch.float32)


@lru_cache(maxsize=256)
def layer_of(heads: int, head_dim: int, rope_dim: int, scale: float) -> LayerGeometry:
    """A layer of these dims. Kernels read neither its kind nor its angles and window."""
    rope = Rope(rope_dim, 10000.0)
    return LayerGeometry(LayerKind.SWA, 1, heads, head_dim, rope, window=1, topk=0, softmax_scale=scale)


def as_rows(indices: Tensor | None) -> Tensor | None:
    """[T, 1, K] as [T, K]; other values are returned as they are, for a check to refuse."""
    return indices.squeeze(1) if isinstance(indices, Tensor) and indices.ndim == 3 else indices


def check_rows(
    q: Tensor, names: tuple[str, str], indices: Tensor | None, lens: Tensor | None, *, optional: bool = False
) -> Tensor:
    """Check index rows [T, 1, K] or [T, K] int32 and their lengths [T] int32 for q [T, ...]; return the rows [T, K].

    names: of both arguments. optional: whether lens may be None.
    """
    rows, letters = as_rows(indices), {"T": q.shape[0]}
    check_tensor(names[0], rows, "T K", torch.int32, letters)
    if lens is not None or not optional:
        check_tensor(names[1], lens, "T", torch.int32, letters)
    check_same_device(q, **dict(zip(names, (rows, lens), strict=True)))
    assert rows is not None
    return rows


def check_head_dims(head_dim: int, nope_dim: int, rope_dim: int) -> None:
    """Raise ArgumentError unless both parts of a head have dims, and all of its dims together."""
    if (nope_dim + rope_dim, nope_dim > 0, rope_dim > 0) != (head_dim, True, True):
        parts = f"{nope_dim} + {rope_dim}"
        raise ArgumentError("head_dim", expected=f"nope_head_dim + rope_head_dim = {parts}", actual=head_dim)


def check_optional(name: str, tensor: Tensor | None, shape: str, dtype: torch.dtype, letters: dict[str, int]) -> None:
    """`check_tensor` of a tensor that may be None."""
    if tensor is not None:
        check_tensor(name, tensor, shape, dtype, letters)


def check_at_least(name: str, tensor: Tensor, count: int, what: str = "elements") -> None:
    """Raise ArgumentError if the first dim of a tensor is too short."""
    if tensor.shape[0] < count:
        raise ArgumentError(name, expected=f"at least {count} {what}", actual=tensor.shape[0])


def check_numbers(least: int, **numbers: int) -> None:
    """Raise ArgumentError for the first of these numbers that is too small."""
    for name, number in numbers.items():
        if number < least:
            raise ArgumentError(name, expected=f"at least {least}", actual=number)


def scratch_of(
    workspace: WorkspaceManager | None,
    backend: Backend,
    phase: Phase,
    layer: LayerGeometry,
    rows: tuple[int, int],
    caller: str,
) -> Sequence[Tensor]:
    """Scratch memory of a call in the caller's workspace; none without one, and no row is then split.

    rows: number of rows of q, and most columns of a row.
    """
    if workspace is None:
        return ()
    specs = backend.scratch(phase, layer, *rows)
    return workspace.get_simultaneous(*specs, arena=phase.value, caller=caller)

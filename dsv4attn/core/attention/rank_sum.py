"""Sums over the ranks of a process group whose order is that of the ranks.

The order in which a communication library adds depends on the size of a message, and so on the other tokens of a step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, distributed

from dsv4attn.core.argument_checks import shown
from dsv4attn.core.torch_modes import without_modes
from dsv4attn.core.torch_ops.tiles import tiles
from dsv4attn.errors import ArgumentError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["check_group", "start_all_gather", "sum_in_order", "sum_over_ranks"]


def check_group(argument: str, group: object, *, or_none: str = "") -> None:
    """Raise ArgumentError unless this is a group of torch.distributed that this rank belongs to.

    or_none: what the error adds to what is expected.
    """
    if not (distributed.is_available() and isinstance(group, distributed.ProcessGroup)):
        expected = f"a ProcessGroup of torch.distributed that has this rank{or_none}"
        hint = "pass torch.distributed.group.WORLD, or what new_group() returned on a rank of the group"
        raise ArgumentError(argument, expected=expected, actual=shown(group), hint=hint)


def start_all_gather(*tensors: Tensor, group: ProcessGroup) -> distributed.Work:
    """Begin to gather one tensor of every rank in another, by torch's name for it; newer releases call the first so."""
    name = "all_gather_single" if hasattr(distributed, "all_gather_single") else "all_gather_into_tensor"
    work: distributed.Work = getattr(distributed, name)(*tensors, group=group, async_op=True)
    return work


@without_modes
def sum_over_ranks(x: Tensor, group: ProcessGroup) -> Tensor:
    """The sum of x [T, d] over the ranks of a group, in the order of ranks: the same bits on all ranks.

    x: of the same shape and dtype on all ranks; it is not changed, and no gradients are recorded. The bits of a row
    depend on that row of the ranks alone. Sums are fp32, and rounded to the dtype of x once. Every rank receives the
    tensors of all ranks, TILE_BYTES at a time: the price is as many bytes as there are ranks, where a library sends
    about two.
    """
    ranks = group.size()
    if ranks == 1:
        return x
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    for rows in tiles(x.shape[0], ranks * x.shape[1] * x.element_size()):
        mine = x[rows].contiguous()
        gathered = mine.new_empty(ranks * mine.shape[0], mine.shape[1])
        start_all_gather(gathered, mine, group=group).wait()
        out[rows] = sum_in_order(gathered.view(ranks, *mine.shape))
    return out


def sum_in_order(parts: Tensor) -> Tensor:
    """The sum of parts [ranks, T, d] over the first dimension, one after another, in fp32 or a wider dtype: [T, d].

    parts: what each rank has.
    """
    first, *others = parts
    total: Tensor = first.to(torch.promote_types(parts.dtype, torch.float32), copy=True)
    for other in others:
        total += other
    return total

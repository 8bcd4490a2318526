"""The output projection of a layer: inverse RoPE and grouped `wo_a` on a backend, then `wo_b` and the sum over ranks.

The only place where core calls `Backend.inv_rope_o_proj`. Block-scaled fp8 weights are converted here, so that a
backend receives bf16 or fp32, unless it says that it `projects_fp8`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from dsv4attn.core.attention.checks import check_backend, check_output, check_projection
from dsv4attn.core.attention.rank_sum import check_group, sum_over_ranks
from dsv4attn.core.contract.backend import Backend
from dsv4attn.core.model.geometry import LayerGeometry
from dsv4attn.core.model.quantized_weight import CodedMatrix, Weight, dense_weight, scaled_weight
from dsv4attn.core.torch_modes import without_modes
from dsv4attn.core.torch_ops.tiles import Linear
from dsv4attn.core.torch_ops.tiles import linear as torch_linear

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed import ProcessGroup

__all__ = ["o_proj", "output_projection"]


@without_modes
def o_proj(
    backend: Backend,
    o: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    wo_a: Weight,
    num_groups: int,
    *,
    layer: LayerGeometry,
) -> Tensor:
    """Undo the rotation of o at the query's position, then project each group of heads by its own matrix.

    o: [T, H, D] bf16 or fp32; it is not changed. positions: [T] int64, rows of the table; padding rows may have any.
    cos_sin_cache: [positions, rope_dim] fp32. wo_a: [G * rank, H / G * D], bf16 or fp32, a `BlockScaledWeight`, or a
    module with an fp8 weight and its scales. fp8 is converted to bf16 in the first call, see
    `quantized_weight.dense_weight`; a backend that `projects_fp8` gets its codes and scales instead, and rounds o to
    fp8.
    Returns z [T, G, rank] in the dtype of o, with fp32 sums.
    Raises ArgumentError before anything is converted or launched.
    """
    check_backend(backend, layer)
    converts = not backend.projects_fp8
    check_projection(o, positions, cos_sin_cache, wo_a, num_groups, layer, converts=converts)
    return backend.inv_rope_o_proj(o, positions, cos_sin_cache, _given(wo_a, converts=converts), num_groups)


@without_modes
def output_projection(
    backend: Backend,
    o: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    wo_a: Weight,
    wo_b: Weight,
    num_groups: int,
    *,
    layer: LayerGeometry,
    process_group: ProcessGroup | None = None,
    linear: Linear = torch_linear,
) -> Tensor:
    """The whole output projection: z of `o_proj`, y = z wo_b^T, and the sum of y over the ranks of a process group.

    backend: runs the inverse RoPE and `wo_a`. layer: geometry of the layer.
    o, positions, cos_sin_cache, wo_a, num_groups: see `o_proj`; of a rank that has some of the heads, its own.
    wo_b: [hidden, G * rank], in the forms of wo_a; of such a rank, the columns of its groups. If its dtype differs from
    o's, both are multiplied in fp32. process_group: ranks over which y is summed, in o's dtype, on a deterministic
    backend by `sum_over_ranks`; None: y is returned as it is. linear: the product with wo_b; it gets both operands in
    one dtype, and a `CodedMatrix` as it is.
    Returns y [T, hidden] in the dtype of o.
    Raises ArgumentError before anything is converted, launched or sent.
    """
    check_backend(backend, layer)
    converts = not backend.projects_fp8
    check_projection(o, positions, cos_sin_cache, wo_a, num_groups, layer, converts=converts)
    check_output(o, wo_a, wo_b, converts=converts)
    if process_group is not None:
        check_group("process_group", process_group, or_none=", or None")
    first = _given(wo_a, converts=converts)
    z = backend.inv_rope_o_proj(o, positions, cos_sin_cache, first, num_groups).flatten(1)
    if isinstance(wo_b, CodedMatrix) and z.dtype == torch.bfloat16:
        y = cast("Callable[[Tensor, CodedMatrix], Tensor]", linear)(z, wo_b)
    else:
        second = dense_weight(wo_b, "wo_b")
        dtype = torch.promote_types(z.dtype, second.dtype)
        y = linear(z.to(dtype), second.to(dtype)).to(o.dtype)
    if process_group is not None:
        if backend.deterministic:
            return sum_over_ranks(y, process_group)
        y = y.contiguous()
        torch.distributed.all_reduce(y, group=process_group)
    return y


def _given(wo_a: Weight, *, converts: bool) -> Tensor:
    """What a backend gets as wo_a: a tensor, or a `BlockScaledWeight` if it is fp8 and the backend takes that."""
    scaled = None if converts else scaled_weight(wo_a)
    return dense_weight(wo_a) if scaled is None else cast("Tensor", scaled)

"""vLLM's function of the output projection on AMD GPUs, on the projection kernel of the ROCm backend."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4attn.compat.arguments import FLOATS, check_numbers
from dsv4attn.compat.direct import device_backend
from dsv4attn.core.attention.checks import check_same_device
from dsv4attn.core.model.quantized_weight import Weight, check_weight
from dsv4attn.core.tensorspec import check_tensor
from dsv4attn.errors import ArgumentError

__all__ = ["rocm_inv_rope_einsum"]


def rocm_inv_rope_einsum(
    rotary_emb: object,
    o: Tensor,
    positions: Tensor,
    rope_head_dim: int,
    n_local_groups: int,
    o_lora_rank: int,
    wo_a: Weight,
    *,
    turned_rows: int = 0,
) -> Tensor:
    """Undo the rotation of o at the query's position and project each group of heads; [T, G, o_lora_rank] like o.

    rotary_emb: has `cos_sin_cache`, [positions, rope_head_dim] fp32, cosines then sines. o: [T, H, D] bf16 or fp32, any
    strides but that of the last dimension; it stays as it is. positions: [T] int64; those of padding rows may be
    anything. wo_a: [G * o_lora_rank, H / G * D], see `core.model.quantized_weight.dense_weight`.
    Beyond the original: `turned_rows`.
    rope_head_dim: dims that have RoPE.
    n_local_groups: G, groups of heads on this rank.
    o_lora_rank: outputs of a group.
    turned_rows: number of leading rows of o whose rotation the attention call has undone already. Their positions
    are not read.
    Raises ArgumentError before any launch.
    """
    table = _table_of(rotary_emb, rope_head_dim)
    letters: dict[str, int] = {}
    check_tensor("o", o, "T H D", FLOATS, letters)
    check_tensor("positions", positions, "T", torch.int64, letters)
    tokens, heads, dim = o.shape
    if not 0 < rope_head_dim < dim or rope_head_dim % 2:
        expected = f"an even number of the {dim} dims of a head, and not all of them"
        raise ArgumentError("rope_head_dim", expected=expected, actual=rope_head_dim)
    if n_local_groups < 1 or not heads or heads % n_local_groups:
        raise ArgumentError("n_local_groups", expected=f"a divisor of {heads} heads", actual=n_local_groups)
    check_numbers(1, o_lora_rank=o_lora_rank)
    if not 0 <= turned_rows <= tokens:
        raise ArgumentError("turned_rows", expected=f"0 .. {tokens}, the rows of o", actual=turned_rows)
    name, weight = check_weight("wo_a", wo_a)
    width = heads // n_local_groups * dim
    # an fp8 weight may have any strides: the product uses its bf16 copy
    shape, is_fp8 = f"{n_local_groups * o_lora_rank} {width}", weight.element_size() == 1
    check_tensor(name, weight, shape, weight.dtype, {}, any_strides=is_fp8)
    tensors = {"positions": positions, "rotary_emb.cos_sin_cache": table, name: weight}
    check_same_device(o, **tensors)
    projected: Tensor = device_backend("rocm").inv_rope_o_proj(
        o, positions, table, wo_a, n_local_groups, turned_rows=turned_rows
    )
    return projected


def _table_of(rotary_emb: object, rope_head_dim: int) -> Tensor:
    """Cosines and sines of an engine's module."""
    name, table = "rotary_emb.cos_sin_cache", getattr(rotary_emb, "cos_sin_cache", None)
    if isinstance(table, Tensor) and table.dtype in (torch.bfloat16, torch.float16):
        raise ArgumentError(
            name,
            expected="float32",
            actual=str(table.dtype).removeprefix("torch."),
            hint="build the table in fp32: what rounding took from its angles, no conversion brings back",
        )
    check_tensor(name, table, f"_ {rope_head_dim}", torch.float32, {})
    assert isinstance(table, Tensor)
    if not table.shape[0]:
        raise ArgumentError(name, expected="at least one position", actual="none")
    return table

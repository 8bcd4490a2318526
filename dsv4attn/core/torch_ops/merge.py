"""Attention over disjoint sets of keys, combined (context parallelism, prefixes).

`merge_lse` and `apply_sink` allocate. `pack_partial` and `merge_partials` do not: they are the definitions of
`contract.RankOps`. Letters: R ranks, t tokens of a piece, H heads, D dims.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import torch
from torch import Tensor

from dsv4attn.core.tensorspec import BufferSpec, check_tensor
from dsv4attn.core.torch_modes import without_modes
from dsv4attn.core.torch_ops.tiles import sigmoid
from dsv4attn.errors import ArgumentError

__all__ = ["apply_sink", "merge_lse", "merge_partials", "merge_scratch", "pack_partial"]

_FLOATS = (torch.bfloat16, torch.float32, torch.float16, torch.float64)


@without_modes
def merge_lse(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the union of shards, from attention over each.

    outs: [S, T, H, D] any float dtype, computed without a sink. lses: [S, T, H] fp32, natural log, -inf where a shard
    had no key. Returns ([T, H, D] fp32, [T, H] fp32), without the sink: it belongs to the whole, so apply it once,
    after the last merge. The shards may come from different backends. Raises ArgumentError for other shapes and dtypes.
    """
    letters: dict[str, int] = {}
    check_tensor("outs", outs, "S T H D", _FLOATS, letters, any_strides=True)
    check_tensor("lses", lses, "S T H", torch.float32, letters, any_strides=True)
    if not letters["S"]:
        raise ArgumentError("outs", expected="at least one shard", actual=list(outs.shape))
    top = lses.amax(0)
    # where no shard had a key the difference would be inf - inf
    weights = torch.exp(lses - top.masked_fill(top == -torch.inf, 0))
    total = weights.sum(0)
    # a shard of weight zero may hold NaN
    terms = (outs.float() * weights[..., None]).masked_fill((weights == 0)[..., None], 0)
    out = (terms.sum(0) / total[..., None]).masked_fill((total == 0)[..., None], 0)
    return out, top + total.log()


@without_modes
def apply_sink(out: Tensor, lse: Tensor, attn_sink: Tensor) -> Tensor:
    """Attention with the sink, from attention without: one more logit whose value is zero.

    out: [T, H, D]. lse: [T, H] fp32, natural log, without the sink. attn_sink: [H] fp32. Returns [T, H, D] fp32.
    Raises ArgumentError for other shapes and dtypes.
    """
    letters: dict[str, int] = {}
    check_tensor("out", out, "T H D", _FLOATS, letters, any_strides=True)
    check_tensor("lse", lse, "T H", torch.float32, letters, any_strides=True)
    check_tensor("attn_sink", attn_sink, "H", torch.float32, letters, any_strides=True)
    weight = sigmoid(lse - attn_sink).masked_fill(lse == -torch.inf, 0)
    return out.float() * weight[..., None]


def pack_partial(out: Tensor, lse: Tensor, sent: Tensor, sent_lse: Tensor) -> None:
    """Copy out [t, H, D] and lse [t, H] fp32, of any strides, to contiguous tensors of the same dtypes."""
    sent.copy_(out)
    sent_lse.copy_(lse)


def merge_scratch(tokens: int, heads: int, dim: int) -> tuple[BufferSpec, ...]:
    """Views for the fp32 sums of `merge_partials`."""
    numbers: list[BufferSpec] = [((tokens, heads), torch.float32)] * 3
    rows: list[BufferSpec] = [((tokens, heads, dim), torch.float32)] * 2
    return (*numbers, ((tokens, heads), torch.bool), *rows)


def merge_partials(
    outs: Tensor, lses: Tensor, out: Tensor, lse: Tensor, attn_sink: Tensor | None, scratch: Sequence[Tensor]
) -> None:
    """Write the attention over the keys of all ranks to out [t, H, D] and lse [t, H] fp32, of any strides.

    outs: [R, t, H, D] like out, and lses: [R, t, H] fp32, natural log: contiguous but for the first dimension. They
    are summed in fp32 in the order of ranks, so that all ranks have the same bits. A partial of weight zero may hold
    NaN. attn_sink: [H] fp32 or None - applied once, to the whole; lse stays without it. scratch: views of
    `merge_scratch`, of t tokens.
    """
    top, weight, total, mask, merged, term = scratch
    torch.amax(lses, 0, out=top)
    # where no rank had a key the difference would be inf - inf
    top.masked_fill_(torch.eq(top, -inf, out=mask), 0)
    total.zero_()
    merged.zero_()
    for rank_out, rank_lse in zip(outs, lses, strict=True):
        torch.sub(rank_lse, top, out=weight).exp_()
        # a partial of weight zero may hold NaN
        torch.eq(weight, 0, out=mask)
        merged.add_(term.copy_(rank_out).mul_(weight[..., None]).masked_fill_(mask[..., None], 0))
        total.add_(weight)
    torch.eq(total, 0, out=mask)
    merged.div_(total[..., None]).masked_fill_(mask[..., None], 0)
    lse.copy_(total.log_().add_(top))
    if attn_sink is not None:
        torch.eq(lse, -inf, out=mask)
        torch.sub(attn_sink, lse, out=weight).exp_().add_(1).reciprocal_().masked_fill_(mask, 0)
        merged.mul_(weight[..., None])
    out.copy_(merged)

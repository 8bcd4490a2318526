"""`merge_lse` and `apply_sink`: attention over disjoint sets of keys, combined (context parallelism, prefixes)."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4attn.core.torch_modes import without_modes

__all__ = ["apply_sink", "merge_lse"]


@without_modes
def merge_lse(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the union of shards, from attention over each.

    outs: [S, T, H, D] any float dtype, computed without a sink. lses: [S, T, H] fp32, natural log, -inf where a shard
    had no key. Returns ([T, H, D] fp32, [T, H] fp32), without the sink: it belongs to the whole, so apply it once,
    after the last merge. The shards may come from different backends.
    """
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
    """
    weight = torch.sigmoid(lse - attn_sink).masked_fill(lse == -torch.inf, 0)
    return out.float() * weight[..., None]

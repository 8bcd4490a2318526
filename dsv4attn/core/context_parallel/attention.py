"""Attention over the keys of all ranks: each attends to its own, and every rank merges the parts."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4attn.core.caches import LayerCaches
from dsv4attn.core.context_parallel.exchange import ContextParallel
from dsv4attn.core.contract import Backend
from dsv4attn.core.forward import forward_mqa
from dsv4attn.core.geometry import LayerGeometry
from dsv4attn.core.limits import Limits
from dsv4attn.core.merge import apply_sink, merge_lse
from dsv4attn.core.metadata import AttentionMetadata
from dsv4attn.core.workspace import WorkspaceManager

__all__ = ["attention_bytes", "forward_mqa_over_ranks", "merge_over_ranks"]


def attention_bytes(heads: int, dim: int, element_bytes: int) -> int:
    """Bytes that a rank sends for one token of one layer: out and lse of all heads. It receives as much of each other.

    element_bytes: of q.
    """
    return heads * (dim * element_bytes + 4)


def forward_mqa_over_ranks(
    context: ContextParallel,
    q: Tensor,
    caches: LayerCaches,
    metadata: AttentionMetadata | None,
    backend: Backend,
    workspace: WorkspaceManager,
    out: Tensor,
    *,
    layer: LayerGeometry,
    limits: Limits,
    attn_sink: Tensor | None,
    topk_indices: Tensor | None = None,
    lse: Tensor | None = None,
) -> None:
    """`forward_mqa` over the entries of all ranks, the same bits on each of them.

    Arguments are those of `forward_mqa`, with metadata of an `OwnedMetadataBuilder`, and entry numbers of this rank in
    `topk_indices`. In a warm-up nothing is sent.
    """
    part = q.new_empty(q.shape[:2], dtype=torch.float32) if lse is None else lse
    sizes = {"layer": layer, "limits": limits}
    forward_mqa(
        q, caches, metadata, backend, workspace, out, **sizes, attn_sink=None, topk_indices=topk_indices, lse=part  # type: ignore[arg-type]
    )  # fmt: skip
    if metadata is not None:
        merge_over_ranks(context, out, part, attn_sink)


def merge_over_ranks(context: ContextParallel, out: Tensor, lse: Tensor, attn_sink: Tensor | None) -> None:
    """Replace the attention of one rank's keys by that of all ranks' keys, in place.

    out: [T, H, D] bf16 or fp32, and lse: [T, H] fp32, natural log, both without the sink. attn_sink: [H] fp32 - applied
    once, to the whole; None: none. lse stays without it. Every rank sends a token's out and lse in one exchange, and
    merges all parts in the order of ranks: so all ranks have the same bits.
    """
    tokens, heads, dim = out.shape
    size = dim * out.element_size()
    for piece in context.pieces(tokens, attention_bytes(heads, dim, out.element_size())):
        mine = out[piece].contiguous().view(torch.uint8), lse[piece].contiguous()[..., None].view(torch.uint8)
        parts = context.gather(torch.cat(mine, -1), "attention")
        outs = parts[..., :size].contiguous().view(out.dtype)
        lses = parts[..., size:].contiguous().view(torch.float32).squeeze(-1)
        merged, total = merge_lse(outs, lses)
        lse[piece] = total
        out[piece] = merged if attn_sink is None else apply_sink(merged, total, attn_sink)

"""Attention over the keys of all ranks: each attends to its own, and every rank merges the parts."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import torch
from torch import Tensor

from dsv4attn.core.caches import LayerCaches
from dsv4attn.core.context_parallel.exchange import ContextParallel
from dsv4attn.core.contract import Backend
from dsv4attn.core.forward import forward_mqa
from dsv4attn.core.geometry import LayerGeometry
from dsv4attn.core.limits import Limits
from dsv4attn.core.metadata import AttentionMetadata
from dsv4attn.core.rank_buffers import LANE, attention_bytes, merge_specs, piece_bytes
from dsv4attn.core.workspace import WorkspaceManager
from dsv4attn.core.workspace_plan import plan_workspace

__all__ = ["forward_mqa_over_ranks", "merge_over_ranks"]


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
    `topk_indices`. What is sent, received and merged lies in `workspace`. A warm-up reserves it, and sends nothing.
    """
    given = {"layer": layer, "limits": limits, "attn_sink": None, "topk_indices": topk_indices}
    if metadata is None:
        forward_mqa(q, caches, metadata, backend, workspace, out, **given, lse=lse)  # type: ignore[arg-type]
        plan = plan_workspace(layer, limits, backend, caches.swa.layout, ranks=context.ownership.size)
        workspace.reserve(plan, caller=f"warm-up on {context.label}")
        return
    part, *scratch = _views(context, out, workspace)
    part = part if lse is None else lse
    forward_mqa(q, caches, metadata, backend, workspace, out, **given, lse=part)  # type: ignore[arg-type]
    _merge(context, out, part, attn_sink, scratch)


def merge_over_ranks(
    context: ContextParallel, out: Tensor, lse: Tensor, attn_sink: Tensor | None, workspace: WorkspaceManager
) -> None:
    """Replace the attention of one rank's keys by that of all ranks' keys, in place.

    out: [T, H, D] bf16 or fp32, and lse: [T, H] fp32, natural log, both without the sink. attn_sink: [H] fp32 - applied
    once, to the whole; None: none. lse stays without it. workspace: of the views of `merge_specs`. Every rank sends a
    token's out and lse in one exchange, and merges all parts in the order of ranks: so all ranks have the same bits.
    """
    _, *scratch = _views(context, out, workspace)
    _merge(context, out, lse, attn_sink, scratch)


def _views(context: ContextParallel, out: Tensor, workspace: WorkspaceManager) -> list[Tensor]:
    tokens, heads, dim = out.shape
    specs = merge_specs(context.ownership.size, tokens, heads, dim, out.dtype)
    return workspace.get_simultaneous(*specs, lane=LANE, caller=f"attention on {context.label}")


def _merge(
    context: ContextParallel, out: Tensor, lse: Tensor, attn_sink: Tensor | None, scratch: Sequence[Tensor]
) -> None:
    """`merge_over_ranks` in these views, those of `merge_specs` but the first. Nothing is allocated."""
    (tokens, heads, dim), ranks, size = out.shape, context.ownership.size, out.element_size()
    sent, received, *working = scratch
    for piece in context.pieces(tokens, attention_bytes(heads, dim, size)):
        rows = piece.stop - piece.start
        before, whole = piece_bytes(rows, heads, dim, size)
        mine, found = sent[:whole], received[: ranks * whole]
        _parts(mine[None], before, out[piece])[0][0].copy_(out[piece])
        _parts(mine[None], before, out[piece])[1][0].copy_(lse[piece])
        context.gather(mine, "attention", out=found)
        parts = _parts(found.view(ranks, whole), before, out[piece])
        merged = _merge_parts(*parts, lse[piece], attn_sink, [view[:rows] for view in working])
        out[piece].copy_(merged)


def _parts(sent: Tensor, before: int, out: Tensor) -> tuple[Tensor, Tensor]:
    """([R, t, H, D] out, [R, t, H] lse) of each rank in its bytes [R, n]. before: bytes of out, and behind it."""
    outs = sent[:, : out.numel() * out.element_size()].view(out.dtype)
    return outs.unflatten(1, out.shape), sent[:, before:].view(torch.float32).unflatten(1, out.shape[:2])


def _merge_parts(
    outs: Tensor, lses: Tensor, lse: Tensor, attn_sink: Tensor | None, working: Sequence[Tensor]
) -> Tensor:
    """`merge_lse` and `apply_sink` without an allocation, part by part: [t, H, D] fp32, and lse without the sink."""
    top, weight, total, mask, merged, term = working
    torch.amax(lses, 0, out=top)
    # where no rank had a key the difference would be inf - inf
    top.masked_fill_(torch.eq(top, -inf, out=mask), 0)
    total.zero_()
    merged.zero_()
    for part, its in zip(outs, lses, strict=True):
        torch.sub(its, top, out=weight).exp_()
        # a part of weight zero may hold NaN
        torch.eq(weight, 0, out=mask)
        merged.add_(term.copy_(part).mul_(weight[..., None]).masked_fill_(mask[..., None], 0))
        total.add_(weight)
    torch.eq(total, 0, out=mask)
    merged.div_(total[..., None]).masked_fill_(mask[..., None], 0)
    lse.copy_(total.log_().add_(top))
    if attn_sink is not None:
        torch.eq(lse, -inf, out=mask)
        torch.sub(lse, attn_sink, out=weight).sigmoid_().masked_fill_(mask, 0)
        merged.mul_(weight[..., None])
    return merged

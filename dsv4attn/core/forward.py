"""`forward_mqa`: one attention layer over one batch, on any backend."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.profiler import record_function

from dsv4attn.core.caches import LayerCaches
from dsv4attn.core.checks import check_call, check_parts
from dsv4attn.core.contract import Backend
from dsv4attn.core.geometry import LayerGeometry
from dsv4attn.core.limits import Limits
from dsv4attn.core.metadata import AttentionMetadata
from dsv4attn.core.run import Step
from dsv4attn.core.workspace import WorkspaceManager
from dsv4attn.core.workspace_plan import plan_workspace

__all__ = ["forward_mqa"]


def forward_mqa(
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
    """Attention of one layer for all tokens of a step, decode and prefill; k of this step is in the caches already.

    q: [T', H, D] bf16 or fp32, normalised and rotated; T' is at least the tokens of the batch, rows past them are
       padding and give exactly 0. out: like q, written in full. lse: [T', H] fp32 or None - natural log, without the
       sink, -inf for rows without keys.
    metadata: None is the warm-up run: reserve the plan for `limits`, zero `out`, launch nothing, touch no cache.
    attn_sink: [H] fp32; None says there is none. topk_indices: [>= T, K] int32, read on c4a layers only: entry
       numbers of each token, distinct, in any order, -1 for none.
    Raises, before any launch or write, ArgumentError or LayoutMismatchError, and WorkspaceError when `workspace` is
    locked and too small.
    """
    if metadata is None:
        check_parts(backend, workspace, layer, limits)
        check_call(q, caches, None, out, layer, limits, attn_sink, topk_indices, lse)
        workspace.reserve(plan_workspace(layer, limits, backend, caches.swa.layout), caller="warm-up")
        out.zero_()
        return
    step = Step(q, caches, metadata, backend, workspace, out, layer, limits, attn_sink, topk_indices, lse)
    try:
        known = step.is_known()
    except AttributeError:
        check_parts(backend, workspace, layer, limits)  # a workspace that is none remembers no step
        raise
    if not known:
        check_parts(backend, workspace, layer, limits)
        check_call(q, caches, metadata, out, layer, limits, attn_sink, topk_indices, lse)
    step.require()
    # named ranges for whoever profiles, and nothing for everybody else
    if torch.autograd._profiler_enabled():  # type: ignore[attr-defined]  # noqa: SLF001 - no public name says it
        _run_named(step)
    else:
        step.prefill()
        step.decode()
    tokens = metadata.swa.num_actual_tokens
    if tokens < q.shape[0]:
        out[tokens:].zero_()
        if lse is not None:
            lse[tokens:].fill_(float("-inf"))


def _run_named(step: Step) -> None:
    """Run both phases, each in a range of its own in the profile."""
    kind, swa = step.layer.kind.value, step.metadata.swa
    if swa.num_prefill_tokens:
        with record_function(f"dsv4attn::prefill[{kind}]"):
            step.prefill()
    if swa.num_decode_tokens:
        with record_function(f"dsv4attn::decode[{kind}]"):
            step.decode()

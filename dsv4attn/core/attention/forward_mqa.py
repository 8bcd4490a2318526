"""`forward_mqa`: one attention layer over one batch, on any backend."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import inf

from torch import Tensor, is_inference_mode_enabled
from torch.autograd import _profiler_enabled  # type: ignore[attr-defined] # no public name
from torch.profiler import record_function

from dsv4attn.core.attention.call import Step
from dsv4attn.core.attention.checks import check_call, check_is_raw_q, check_raw_q
from dsv4attn.core.attention.gathered import GatheredCall
from dsv4attn.core.attention.overlap import check_apart, span
from dsv4attn.core.attention.paged import PagedCall
from dsv4attn.core.attention.prepared import MOST_STEPS, Part, PreparedStep
from dsv4attn.core.cache.layer_caches import LayerCaches
from dsv4attn.core.contract.backend import Backend, Phase, RawQuery, complete
from dsv4attn.core.contract.limits import Limits
from dsv4attn.core.memory.chunking import PrefillChunk
from dsv4attn.core.memory.plan import plan_workspace
from dsv4attn.core.memory.workspace import WorkspaceManager
from dsv4attn.core.metadata.metadata import AttentionMetadata
from dsv4attn.core.model.geometry import LayerGeometry
from dsv4attn.core.tensorspec import signature
from dsv4attn.core.torch_modes import without_modes

__all__ = ["forward_in_parts", "forward_mqa"]


@without_modes
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
    raw_q: RawQuery | None = None,
) -> None:
    """Attention of one layer for all tokens of a step, decode and prefill; k of this step is in the caches already.

    q: [T', H, D] bf16 or fp32, normalised and rotated; T' is at least the tokens of the batch, rows past them are
       padding and give exactly 0.
    out: like q, written in full; it shares no memory with q or another argument.
    lse: [T', H] fp32 or None - natural log, without the sink, -inf for rows without keys; shares no memory either.
    metadata: None is the warm-up run: reserve the plan for `limits`, zero `out`, launch nothing, touch no cache.
    attn_sink: [H] fp32, or None. topk_indices: [>= T, K] int32, read on c4a layers only: entry
       numbers of each token, distinct, in any order, -1 for none.
    raw_q: given if q of prefill tokens is neither normalised nor rotated, for which `prefill_takes_raw_q` must be true.
    Raises, before any launch or write, ArgumentError or LayoutMismatchError, and WorkspaceError when `workspace` is
    locked and too small.
    """
    # one rank's part of a row, for `merge_over_ranks`, has an lse and no sink
    is_part = lse is not None and attn_sink is None
    if getattr(metadata, "ownership", None) is not None and layer.has_entries and not is_part:
        metadata.check_owner(None)  # type: ignore[union-attr]
    for _ in forward_in_parts(
        q,
        caches,
        metadata,
        backend,
        workspace,
        out,
        layer=layer,
        limits=limits,
        attn_sink=attn_sink,
        topk_indices=topk_indices,
        lse=lse,
        raw_q=raw_q,
    ):
        pass


def forward_in_parts(  # noqa: C901 - no frame more on the hot path
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
    chunk_tokens: int = 0,
    phase: Phase | None = None,
    ranges: tuple[tuple[int, int], ...] | None = None,
    raw_q: RawQuery | None = None,
    written: tuple[Tensor, Tensor] | None = None,
) -> Iterator[slice]:
    """`forward_mqa`, call by call of the backend: after each, its rows of out and lse; prefill in order, then decode.

    chunk_tokens: most tokens of a prefill chunk; 0: as many as the workspace allows. phase, ranges: what is attended
    to, see `Step`; other rows are not written. Padding is written at the end. written: contiguous tensors that are
    written in place of out and lse, which are only checked; their shapes and dtypes are the same. None: out and lse.
    Other arguments as those of `forward_mqa`.
    """
    if metadata is None:
        check_call(q, caches, None, backend, workspace, out, layer, limits, attn_sink, topk_indices, lse)
        workspace.reserve(plan_workspace(layer, limits, backend, caches.swa.layout), caller="warm-up")
        out.zero_()
        return
    try:
        prepared = metadata.swa.prepared
        owners = backend, layer, limits, workspace, metadata.compressed, caches.signature
        mode = workspace.debug, is_inference_mode_enabled()
        raw = None if raw_q is None else raw_q.key
        form = signature(q, out, attn_sink, lse, topk_indices, *(written or ()))
        key = *map(id, owners), mode, chunk_tokens, phase, ranges, raw, form
    except AttributeError:
        check_call(q, caches, metadata, backend, workspace, out, layer, limits, attn_sink, topk_indices, lse)
        check_is_raw_q(raw_q)
        raise
    step: PreparedStep | None = prepared.get(key)
    if step is None or step.parts is None:
        check_call(q, caches, metadata, backend, workspace, out, layer, limits, attn_sink, topk_indices, lse)
        whole, (to, lses) = complete(backend), written or (out, lse)
        tensors = to, layer, limits, attn_sink, topk_indices, lses
        given = Step(q, caches, metadata, whole, workspace, *tensors, chunk_tokens, phase, ranges, raw_q)
        if raw_q is not None:
            check_raw_q(q, raw_q, layer, metadata.swa.slot_mapping, taken=given.takes_raw_q())
        step = PreparedStep(metadata.swa.num_actual_tokens, _prepare(given), owners, span(q), span(out))
        if workspace.reusable:
            if len(prepared) >= MOST_STEPS:
                prepared.clear()
            prepared[key] = step
            workspace.release_on_growth(step)
    elif -step.out_bytes < out.data_ptr() - q.data_ptr() < step.q_bytes:  # addresses are not in the key
        check_apart("out", out, q=q)
    out, lse = written or (out, lse)
    profiled = _profiler_enabled()
    for part in step.parts or ():
        run = record_function(part.name)(part.run) if profiled else part.run
        run(q, out, lse, attn_sink, topk_indices, caches)
        yield part.rows
    if step.tokens < q.shape[0]:
        out[step.tokens :].zero_()
        if lse is not None:
            lse[step.tokens :].fill_(-inf)


def _prepare(step: Step) -> Iterable[Part]:
    """The calls of a step: prefill chunk by chunk, on gathered rows or on pages, then all decode tokens on pages.

    Memory is required for all of them first, so that a workspace that is too small raises before the first write. Where
    views are not reusable, a call is prepared just before it runs.
    """
    calls = [_call_of(step, chunk) for chunk in step.chunks()]
    if step.metadata.swa.num_decode_tokens and step.phase is not Phase.PREFILL:
        calls.append(PagedCall.of_decode(step))
    for call in calls if len(calls) > 1 else ():
        call.require()
    parts = (call.prepare() for call in calls)
    return [*parts] if step.workspace.reusable else parts


def _call_of(step: Step, chunk: PrefillChunk) -> GatheredCall | PagedCall:
    """The call of a chunk, on rows or on pages."""
    return GatheredCall(step, chunk) if step.takes_rows(chunk) else PagedCall.of_chunk(step, chunk)

"""`forward_mqa`: one attention layer over one batch, on any backend."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import inf

from torch import Tensor, is_inference_mode_enabled
from torch.autograd import _profiler_enabled  # type: ignore[attr-defined] # no public name
from torch.profiler import record_function

from dsv4attn.core.attention.call import MAX_PREPARED, ForwardCall, PreparedCall, PreparedForward
from dsv4attn.core.attention.checks import check_forward_call, check_is_raw_q, check_raw_q
from dsv4attn.core.attention.gathered import GatheredCall
from dsv4attn.core.attention.overlap import check_apart, span
from dsv4attn.core.attention.paged import PagedCall
from dsv4attn.core.cache.layer_caches import LayerCaches
from dsv4attn.core.contract.backend import AttentionTensors, Backend, Phase, RawQuery
from dsv4attn.core.contract.limits import Limits
from dsv4attn.core.memory.chunking import PrefillChunk
from dsv4attn.core.memory.plan import plan_workspace
from dsv4attn.core.memory.workspace import WorkspaceManager
from dsv4attn.core.metadata.metadata import AttentionMetadata
from dsv4attn.core.model.geometry import LayerGeometry
from dsv4attn.core.tensorspec import signature
from dsv4attn.core.torch_modes import without_modes

__all__ = ["attend", "forward_mqa", "phase_call_of"]


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
    caches: of the layer, with its compressed cache on layers that have one.
    metadata: None is the warm-up run: reserve the plan for `limits`, zero `out`, launch nothing, touch no cache.
    attn_sink: [H] fp32, or None. topk_indices: [>= T, K] int32, read on c4a layers only: entry
       numbers of each token, distinct, in any order, -1 for none.
    raw_q: given if q of prefill tokens is neither normalised nor rotated, for which `prefill_takes_raw_q` must be true.
    backend: what `select_backend` or `load_backend` returned. workspace: memory for the call, reserved for `limits`.
    layer: geometry of the layer.
    limits: of every batch; the workspace has a plan for them.

    Raises, before any launch or write, ArgumentError or LayoutMismatchError, and WorkspaceError when `workspace` is
    locked and too small.
    """
    attend(
        ForwardCall(q, caches, metadata, backend, workspace, out, layer, limits, attn_sink, topk_indices, lse, raw_q)
    )


def attend(  # noqa: C901, PLR0912, PLR0915 - every function more is a frame more for every layer
    call: ForwardCall, *, after_each: Callable[[slice], None] | None = None
) -> None:
    """`forward_mqa` of a call object: its phase calls in order, prefill first. Padding is written at the end.

    The caller leaves autocast and gradients. Raises as `forward_mqa` does.
    after_each: gets the rows of out and lse that a phase call has just written.
    """
    metadata, workspace, caches = call.metadata, call.workspace, call.caches
    q, out, attn_sink, topk_indices, lse = call.q, call.out, call.attn_sink, call.topk_indices, call.lse
    if metadata is None:
        check_forward_call(call)
        plan = plan_workspace(call.layer, call.limits, call.backend, caches.swa.layout)
        workspace.reserve(plan, caller="warm-up")
        out.zero_()
        return
    # attention to one rank's own entries, for `merge_over_ranks`, has an lse and no sink
    is_rank_share = lse is not None and attn_sink is None
    if getattr(metadata, "ownership", None) is not None and call.layer.has_entries and not is_rank_share:
        metadata.check_owner(None)
    try:
        prepared = metadata.swa.prepared
        signed = caches.signed
        for tensor, address, strides, size in caches.places:  # `caches.signature`, without a frame
            if tensor.data_ptr() != address or tensor.stride() != strides or tensor.untyped_storage().nbytes() != size:
                signed = None
        owners = call.backend, call.layer, call.limits, workspace, metadata.compressed, signed or caches.signature
        modes = workspace.debug, is_inference_mode_enabled()
        raw_q = None if call.raw_q is None else call.raw_q.key
        tensors_key = signature(q, out, attn_sink, lse, topk_indices)
        buffers_key = None if call.result_buffers is None else signature(*call.result_buffers)
        cut = call.chunk_tokens, call.phase, call.token_ranges
        key = *map(id, owners), modes, cut, raw_q, tensors_key, buffers_key
    except AttributeError:
        check_forward_call(call)
        check_is_raw_q(call.raw_q)
        raise
    forward: PreparedForward | None = prepared.get(key)
    if forward is None or forward.calls is None:
        check_forward_call(call)
        if call.raw_q is not None:
            check_raw_q(call, is_supported=call.takes_raw_q())
        spans = (0 if tensor is None else span(tensor) for tensor in (q, out, lse))
        forward = PreparedForward(metadata.swa.num_actual_tokens, _prepare(call), owners, *spans)
        if workspace.reusable:
            if len(prepared) >= MAX_PREPARED:
                prepared.clear()
            prepared[key] = forward
            workspace.release_on_growth(forward)
    elif -forward.out_bytes < out.data_ptr() - q.data_ptr() < forward.q_bytes:  # addresses are not in the key
        check_apart("out", out, q=q)
        check_apart("lse", lse, q=q, out=out)
    elif lse is not None and (
        -forward.lse_bytes < lse.data_ptr() - out.data_ptr() < forward.out_bytes
        or -forward.lse_bytes < lse.data_ptr() - q.data_ptr() < forward.q_bytes
    ):
        check_apart("lse", lse, q=q, out=out)
    if call.result_buffers is not None:
        out, lse = call.result_buffers
    tensors = AttentionTensors(q, out, lse, attn_sink, topk_indices, caches.swa, caches.compressed)
    profiled = _profiler_enabled()
    for prepared_call in forward.calls or ():
        if profiled:
            with record_function(prepared_call.name):
                prepared_call.run(tensors)
        else:
            prepared_call.run(tensors)
        if after_each is not None:
            after_each(prepared_call.tokens)
    if forward.num_tokens < q.shape[0]:
        out[forward.num_tokens :].zero_()
        if lse is not None:
            lse[forward.num_tokens :].fill_(-inf)


def _prepare(call: ForwardCall) -> Iterable[PreparedCall]:
    """Prepare prefill chunk by chunk, on gathered rows or on pages, then all decode tokens on pages.

    Memory is required for all of them first, so that a workspace that is too small raises before the first write. Where
    views are not reusable, a call is prepared just before it runs.
    """
    phase_calls = [phase_call_of(call, chunk) for chunk in call.chunks()]
    if call.window_metadata.num_decode_tokens and call.phase is not Phase.PREFILL:
        phase_calls.append(PagedCall.of_decode(call))
    for phase_call in phase_calls if len(phase_calls) > 1 else ():
        phase_call.require()
    # A list is kept for later layers. Views that are not reusable become garbage when another phase call takes its own:
    # a generator prepares each call after the call before it has run
    prepared_calls = (phase_call.prepare() for phase_call in phase_calls)
    return [*prepared_calls] if call.workspace.reusable else prepared_calls


def phase_call_of(call: ForwardCall, chunk: PrefillChunk) -> GatheredCall | PagedCall:
    """The phase call of a chunk, on gathered rows or on pages."""
    return GatheredCall(call, chunk) if call.gathers_chunk(chunk) else PagedCall.of_chunk(call, chunk)

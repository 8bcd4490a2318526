"""`DeepseekV4MLAAttention`: the attention layer that an engine binds once and calls in every step.

Its two entry points are torch custom ops (`torch.ops.dsv4attn.*`), opaque to the compiler: a module around them
compiles with `fullgraph=True`, and the metadata of the step is looked up when the op runs, never when it is traced.
The schema of an op names every tensor of the layer that it reads, and which of them it writes: caches, the top-k
buffer, the sink and the table of angles. So a compiler keeps the order of these ops and of other ops on the same
tensors. An op works on the tensors that it is given, which are copies where a compiler replaces writes by copies.
Eager calls go past torch's dispatcher, which takes a third of what core takes in a call.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from functools import lru_cache
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor, is_grad_enabled, no_grad
from torch._C import _functorch, _get_tracing_state, _is_torch_function_mode_enabled, _len_torch_dispatch_stack
from torch.autograd import _profiler_enabled, profiler  # type: ignore[attr-defined] # no public name
from torch.autograd.graph import increment_version

from dsv4attn.core.argument_checks import check_type, shown
from dsv4attn.core.attention.call import ForwardCall
from dsv4attn.core.attention.checks import check_bound, check_cache, check_compressed, check_insert
from dsv4attn.core.attention.custom_ops import Handles, define_op
from dsv4attn.core.attention.exchange import ONE_RANK, Exchange
from dsv4attn.core.attention.overlap import span
from dsv4attn.core.attention.projection import o_proj
from dsv4attn.core.attention.raw_q import RawQSteps
from dsv4attn.core.cache.layer_caches import LayerCaches, caches_of, check_op_tensors, have_moved, op_tensor
from dsv4attn.core.cache.layout import KVCacheLayout, PagedKVCache, check_layout
from dsv4attn.core.contract.backend import Backend, KeyForm, RawQuery
from dsv4attn.core.contract.limits import Limits
from dsv4attn.core.memory.workspace import WorkspaceManager, current_workspace_manager
from dsv4attn.core.metadata.forward_context import get_forward_context
from dsv4attn.core.metadata.metadata import AttentionMetadata
from dsv4attn.core.model.geometry import LayerGeometry, LayerKind
from dsv4attn.core.model.quantized_weight import Weight
from dsv4attn.core.model.rope import is_rotation
from dsv4attn.core.reprs import layer_text, one_line
from dsv4attn.core.tensorspec import signature
from dsv4attn.core.torch_modes import is_autocast_on, no_autocast, without_modes
from dsv4attn.errors import ArgumentError, Dsv4AttnError

__all__ = ["DeepseekV4MLAAttention"]

_handles: Handles[DeepseekV4MLAAttention] = Handles()
_TENSOR = frozenset({Tensor})

_NO_CHANGE = nullcontext()


class DeepseekV4MLAAttention:
    """One layer's attention, with everything that does not change between steps.

    prefix: name of the layer in the model, the key of its compressed metadata where metadata come by prefix.
    swa_prefix: key of its window metadata, by default `prefix + ".swa_cache"`. attn_sink: [H] fp32, or None for none.
    cos_sin_cache: [positions, rope_dim] fp32 of this layer's own table (`core.model.rope.cos_sin_cache`).
    topk_indices_buffer: [max tokens, K] int32, filled by the indexer before each call; c4a layers only. swa_layout,
    compressed_layout: required layouts of the caches; None: any. workspace: default: the context's manager.
    context_parallel: ranks that share the compressed cache, with metadata of an `OwnedMetadataBuilder`; None: one has
    it all. raw_q: whether `fused_qnorm_rope_kv_insert` may leave q of prefill tokens as it is, and `forward_mqa`
    normalises and rotates it while it reads it: where the backend does, and its measured costs say that it is faster.
    geometry: of the layer, on this rank.
    limits: of every batch.
    backend: runs attention, inserts and projection.
    Raises ArgumentError unless the arguments fit the layer.
    """

    def __init__(
        self,
        prefix: str,
        geometry: LayerGeometry,
        limits: Limits,
        backend: Backend,
        *,
        attn_sink: Tensor | None,
        cos_sin_cache: Tensor,
        topk_indices_buffer: Tensor | None = None,
        swa_prefix: str | None = None,
        swa_layout: KVCacheLayout | None = None,
        compressed_layout: KVCacheLayout | None = None,
        workspace: WorkspaceManager | None = None,
        context_parallel: Exchange | None = None,
        raw_q: bool = False,
    ) -> None:
        """Hold everything, run nothing."""
        check_bound(backend, geometry, limits, attn_sink, cos_sin_cache, topk_indices_buffer)
        if workspace is not None:
            cure = "pass a WorkspaceManager, or None for the context's"
            check_type("workspace", workspace, WorkspaceManager, cure=cure)
        self.prefix, self.swa_prefix = prefix, swa_prefix or f"{prefix}.swa_cache"
        self.geometry, self.limits, self.backend = _interned(geometry), limits, backend
        self.attn_sink, self.cos_sin_cache, self.topk_indices_buffer = attn_sink, cos_sin_cache, topk_indices_buffer
        self.swa_layout, self.compressed_layout, self.workspace = swa_layout, compressed_layout, workspace
        exchange: object = context_parallel
        if not isinstance(exchange, Exchange | None):
            expected, hint = "a ContextParallel", "pass a ContextParallel(group), or None"
            raise ArgumentError("context_parallel", expected=expected, actual=shown(exchange), hint=hint)
        self.exchange = context_parallel if context_parallel is not None and self.geometry.has_entries else ONE_RANK
        self.caches: LayerCaches | None = None
        self._op_tensors: tuple[Tensor | None, ...] = (None, None)
        gathers = backend.capabilities.prefill_keys is KeyForm.GATHERED
        self._takes_raw_q = raw_q and gathers and is_rotation(cos_sin_cache)
        self._raw_q_steps = RawQSteps()
        self._register()

    @one_line
    def __repr__(self) -> Iterator[str]:
        """Prefix, kind, heads, backend, device and whether caches are bound."""
        yield self.prefix
        yield layer_text(self.geometry)
        yield f"{self.geometry.num_heads} heads"
        yield f"backend {self.backend.name}"
        yield f"on {self.cos_sin_cache.device}"
        yield "no caches" if self.caches is None else "caches bound"

    def _register(self) -> None:
        """Take a handle of its own."""
        self.handle = _handles.give(self, self.prefix)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy is a layer of its own, for ops too."""
        self.__dict__.update(state)
        if self.caches is not None:
            self._op_tensors = op_tensor(self.caches.swa), op_tensor(self.caches.compressed)
        self._raw_q_steps = RawQSteps()
        self._register()

    @property
    def compress_ratio(self) -> int:
        """Tokens per compressed entry, 1 on window-only layers."""
        return self.geometry.compress_ratio

    @property
    def scale(self) -> float:
        """Softmax scale."""
        return self.geometry.scale

    def bind_kv_cache(self, swa: PagedKVCache, compressed: PagedKVCache | None = None) -> None:
        """Bind the caches. Raises LayoutMismatchError unless they have the dims and layouts of the layer.

        With `context_parallel` all ranks must bind at the same time: each raises ArgumentError, with the rank that
        differs, unless all ranks have the same geometry, limits, layouts, page sizes and numbers of compressed pages,
        and a workspace that can hold its plan. If one rank refuses, all do.
        swa: the window cache.
        compressed: the compressed cache; None on window-only layers.
        """
        caches = LayerCaches(swa, compressed)
        exchange, has_sink = self.exchange, self.attn_sink is not None
        exchange.check_layer(
            self.prefix, self.geometry, self.limits, self.backend, caches, self.workspace, has_sink=has_sink
        )
        with exchange.together(f"caches of {self.prefix}"):
            check_cache("swa cache", swa, self.geometry)
            check_layout(swa.layout, self.swa_layout or swa.layout, f"swa cache of {self.prefix}")
            if self.geometry.kind is not LayerKind.SWA:
                check_compressed(caches, self.geometry)
            if compressed is not None:
                required_layout = self.compressed_layout or compressed.layout
                check_layout(compressed.layout, required_layout, f"compressed cache of {self.prefix}")
        self.caches = caches
        self._op_tensors = op_tensor(swa), op_tensor(compressed)

    def raw_query(self, positions: Tensor, cos_sin_cache: Tensor) -> RawQuery | None:
        """What attention needs to normalise and rotate q of these positions; None if the insert always does it.

        positions: [T'] int64 position of each row of q.
        cos_sin_cache: the layer's own table. A compiled graph passes its copy of that table.
        """
        eps = self.geometry.q_eps
        if not self._takes_raw_q or eps is None or self.exchange.ownership is not None:
            return None
        return RawQuery(positions, cos_sin_cache, eps)

    def fused_qnorm_rope_kv_insert(self, q: Tensor, kv: Tensor, positions: Tensor) -> None:
        """Normalise and rotate q [T', H, D] in place; rotate a copy of kv [T', D] and write it to the window cache.

        Where the geometry says that queries have no norm (`q_norm`), q is rotated only. With `raw_q` rows of prefill
        tokens may keep their q, which is then for `forward_mqa` of the same step alone.
        q: [T', H, D] bf16 or fp32, changed in place; it shares no memory with kv.
        kv: [T', D] of q's dtype; it stays as it is.
        positions: [T'] int64; padding rows may have any. Call it for all tokens before `forward_mqa`. In a
        warm-up it does nothing. Autocast is off, and no gradients are recorded: the write to a q that requires grad is
        one of `torch.no_grad()`.
        """
        if is_grad_enabled() or is_autocast_on() or _needs_dispatcher(q, kv, positions):
            self.insert_into(self.caches, q, kv, positions)
        else:
            _insert(self, self.caches, q, kv, positions, self.cos_sin_cache)

    def forward_mqa(self, q: Tensor, kv: Tensor, positions: Tensor, output: Tensor) -> None:
        """Attention of the current step into `output`.

        q: [T', H, D] after `fused_qnorm_rope_kv_insert`. output: like q. kv: not read, as keys are in the caches.
        positions: those of the insert, read with `raw_q` alone, as others follow from the metadata of
        `set_forward_context`. Autocast is off, and no gradients are recorded.
        """
        topk_indices = self.topk_indices_buffer
        if is_grad_enabled() or is_autocast_on() or _needs_dispatcher(q, kv, positions, output):
            self.attend_from(self.caches, topk_indices, q, kv, positions, output)
        else:
            _forward(self, self.caches, topk_indices, self.attn_sink, self.cos_sin_cache, q, positions, output)

    def insert_into(self, caches: LayerCaches | None, q: Tensor, kv: Tensor, positions: Tensor) -> None:
        """`fused_qnorm_rope_kv_insert` into caches that are the bound ones, or copies of them in a compiled graph.

        caches: copies of the bound caches in a compiled graph; None: the bound caches.
        q: [T', H, D] bf16 or fp32, changed in place.
        kv: [T', D] of q's dtype; it stays as it is.
        positions: [T'] int64.
        """
        if is_grad_enabled():
            if getattr(q, "requires_grad", False) and not torch.compiler.is_compiling():
                increment_version(q)  # a kernel's write is one that torch does not count
            with no_grad():
                self.insert_into(caches, q, kv, positions)
        elif _needs_dispatcher(q, kv, positions):
            swa, _ = self._tensors(caches)
            _op_insert(q, kv, positions, self.cos_sin_cache, swa, self.handle)
        else:
            with no_autocast() if is_autocast_on() else _NO_CHANGE:
                _insert(self, caches, q, kv, positions, self.cos_sin_cache)

    def attend_from(
        self,
        caches: LayerCaches | None,
        topk_indices: Tensor | None,
        q: Tensor,
        kv: Tensor,
        positions: Tensor,
        output: Tensor,
    ) -> None:
        """`forward_mqa` over caches and top-k indices that are the bound ones, or copies in a compiled graph.

        caches: copies of the bound caches in a compiled graph; None: the bound caches.
        topk_indices: [max tokens, K] int32; None on layers without an indexer.
        q: [T', H, D] bf16 or fp32, as the insert left it.
        kv: not read; as in `forward_mqa`.
        positions: [T'] int64.
        output: [T', H, D] like q, written in full.
        """
        if is_grad_enabled():
            if getattr(output, "requires_grad", False) and not torch.compiler.is_compiling():
                increment_version(output)
            with no_grad():
                self.attend_from(caches, topk_indices, q, kv, positions, output)
        elif _needs_dispatcher(q, kv, positions, output):
            swa, compressed = self._tensors(caches)
            sink, table = self.attn_sink, self.cos_sin_cache
            _op_forward(q, kv, positions, output, swa, compressed, topk_indices, sink, table, self.handle)
        else:
            with no_autocast() if is_autocast_on() else _NO_CHANGE:
                _forward(self, caches, topk_indices, self.attn_sink, self.cos_sin_cache, q, positions, output)

    def insert_step(
        self,
        metadata: AttentionMetadata | None,
        caches: LayerCaches,
        workspace: WorkspaceManager | None,
        slot_mapping: Tensor,
        q: Tensor,
        kv: Tensor,
        positions: Tensor,
        cos_sin_cache: Tensor | None = None,
    ) -> None:
        """`fused_qnorm_rope_kv_insert` for an engine that has the metadata of its steps itself.

        Nothing is looked up: the engine gives each call what may differ between steps. The call is no op of torch, and
        leaves autocast and gradients as they are.
        metadata: of the attention that follows. None: the insert prepares every row of q, as in a step of decodes.
        caches: the bound ones.
        workspace: of the step, read with metadata alone; None: the context's.
        slot_mapping: [>= T] int64, negative for padding.
        q: [T', H, D] bf16 or fp32, changed in place.
        kv: [T', D] of q's dtype.
        positions: [T'] int64.
        cos_sin_cache: [positions, rope_dim] fp32, in place of the layer's table; None: that table.
        Raises ArgumentError before anything is written. On a GPU arguments are checked once for each signature.
        """
        table = self.cos_sin_cache if cos_sin_cache is None else cos_sin_cache
        _check_insert(q, kv, positions, slot_mapping, table, caches, self.geometry)
        raw_q = None if metadata is None else self.raw_query(positions, table)
        if raw_q is not None:
            space, sink = workspace or current_workspace_manager(), self.attn_sink
            call = ForwardCall(q, caches, metadata, self.backend, space, q, self.geometry, self.limits, sink)
            if self._raw_q_steps.insert(call, kv, raw_q):
                return
        self.backend.qnorm_rope_kv_insert(q, kv, caches.swa, slot_mapping, positions, table, self.geometry.q_eps)

    def attend_step(
        self,
        metadata: AttentionMetadata | None,
        caches: LayerCaches,
        workspace: WorkspaceManager | None,
        topk_indices: Tensor | None,
        attn_sink: Tensor | None,
        q: Tensor,
        positions: Tensor,
        output: Tensor,
        cos_sin_cache: Tensor | None = None,
    ) -> None:
        """`forward_mqa` for an engine that has the metadata of its steps itself; see `insert_step`.

        metadata: of the step. None is the warm-up.
        caches: the bound ones.
        workspace: of the step; None: the context's.
        topk_indices: [>= T, K] int32, read on c4a layers alone.
        attn_sink: [H] fp32, or None.
        q: [T', H, D] as `insert_step` left it.
        positions: those of the insert.
        output: like q.
        cos_sin_cache: as in `insert_step`.
        """
        table = self.cos_sin_cache if cos_sin_cache is None else cos_sin_cache
        _forward(self, caches, topk_indices, attn_sink, table, q, positions, output, metadata, workspace)

    def _tensors(self, caches: LayerCaches | None) -> tuple[Tensor | None, ...]:
        """What the ops are given for caches."""
        if caches is None or caches is self.caches:
            if not torch.compiler.is_compiling() and self.caches is not None:
                both = self.caches.swa, self.caches.compressed
                if have_moved(both, self._op_tensors):
                    self._op_tensors = op_tensor(both[0]), op_tensor(both[1])
            return self._op_tensors
        return caches.swa.tensor, None if caches.compressed is None else caches.compressed.tensor

    def o_proj(self, o: Tensor, positions: Tensor, wo_a: Weight, num_groups: int) -> Tensor:
        """Undo the rotation of o at the query's position and project each group of heads; see `projection.o_proj`.

        o: [T', H, D] bf16 or fp32. positions: [T'] int64; padding rows may have any. wo_a: [G * rank, H / G * D],
        bf16 or fp32, a `BlockScaledWeight`, or a module with an fp8 weight and its scales. Returns [T', G, rank] in
        the dtype of o. Raises ArgumentError before anything is converted or launched.
        num_groups: G, which divides the heads.
        """
        table, layer = self.cos_sin_cache, self.geometry
        return o_proj(self.backend, o, positions, table, wo_a, num_groups, layer=layer)


@lru_cache(maxsize=256)
def _interned(geometry: LayerGeometry) -> LayerGeometry:
    """The first of equal geometries: prepared calls are keyed by its identity, and layers of a kind share them."""
    return geometry


def _needs_dispatcher(*tensors: Tensor) -> bool:
    """Whether a call goes through torch's dispatcher, as an op.

    A compiler, tracer, mode, transform, profiler or subclass of Tensor looks for ops there.

    Torch 2.6, 2.8, 2.10, 2.11 and 2.13 have these private names. The public equivalents do not exist, are
    process-wide, or are several times slower.
    """
    return (
        torch.compiler.is_compiling()
        # default devices are such modes too: within an op torch leaves them out
        or _is_torch_function_mode_enabled()
        or _len_torch_dispatch_stack() > 0
        or _get_tracing_state() is not None
        or _functorch.maybe_current_level() is not None
        or _profiler_enabled()
        or profiler._is_profiler_enabled  # noqa: SLF001 - of any thread
        or (not _TENSOR.issuperset(map(type, tensors)) and all(isinstance(tensor, Tensor) for tensor in tensors))
    )


def _no_caches(layer: DeepseekV4MLAAttention) -> Dsv4AttnError:
    return Dsv4AttnError(f"layer {layer.prefix} has no caches -> call bind_kv_cache first")


_MOST_CHECKED = 64
"""Most signatures of inserts that are remembered: sizes of the last steps, for each geometry."""
_checked: dict[tuple[object, ...], tuple[LayerGeometry, int, int]] = {}
"""Signatures of inserts whose arguments fitted: the geometry, which keeps its identity, and bytes of q and of kv."""


def _check_insert(
    q: Tensor,
    kv: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    cos_sin_cache: Tensor,
    caches: LayerCaches,
    layer: LayerGeometry,
) -> None:
    """`check_insert`, on a GPU once for each signature. On a CPU values are checked too, in every call."""
    if getattr(q, "is_cpu", True):  # what is no tensor is refused
        check_insert(q, kv, positions, slot_mapping, cos_sin_cache, caches.swa, layer)
        return
    owners = id(layer), id(caches.signed or caches.signature)
    key = *owners, signature(q, kv, positions, slot_mapping, cos_sin_cache)
    known = _checked.get(key)
    if known is None or -known[2] < kv.data_ptr() - q.data_ptr() < known[1]:  # addresses are not in the signature
        check_insert(q, kv, positions, slot_mapping, cos_sin_cache, caches.swa, layer)
        if len(_checked) >= _MOST_CHECKED:
            _checked.clear()
        _checked[key] = layer, span(q), span(kv)


def _insert(
    bound: DeepseekV4MLAAttention, caches: LayerCaches | None, q: Tensor, kv: Tensor, positions: Tensor, table: Tensor
) -> None:
    if caches is None:
        raise _no_caches(bound)
    geometry, context = bound.geometry, get_forward_context()
    metadata = context.for_layer(bound.prefix, bound.swa_prefix, geometry.kind, geometry.compress_ratio)
    if metadata is not None:
        of_prefill = metadata if metadata.swa.num_prefill_tokens else None
        bound.insert_step(of_prefill, caches, bound.workspace, metadata.swa.slot_mapping, q, kv, positions, table)


def _forward(
    bound: DeepseekV4MLAAttention,
    caches: LayerCaches | None,
    topk_indices: Tensor | None,
    attn_sink: Tensor | None,
    table: Tensor,
    q: Tensor,
    positions: Tensor,
    output: Tensor,
    metadata: AttentionMetadata | EllipsisType | None = ...,
    workspace: WorkspaceManager | None = None,
) -> None:
    """`attend_step`. Metadata are looked up here, as a function more is a frame more for every layer."""
    if caches is None:
        raise _no_caches(bound)
    geometry, raw_q = bound.geometry, None
    if metadata is ...:
        context, workspace = get_forward_context(), bound.workspace
        metadata = context.for_layer(bound.prefix, bound.swa_prefix, geometry.kind, geometry.compress_ratio)
        if metadata is not None and metadata.source_rows is not None:
            topk_indices = metadata.source_rows.selected.get(bound, topk_indices)
    if metadata is not None and bound._takes_raw_q and metadata in bound._raw_q_steps:  # noqa: SLF001 - of the layer of this module
        raw_q = bound.raw_query(positions, table)
    call = ForwardCall(
        q,
        caches,
        metadata,
        bound.backend,
        workspace or current_workspace_manager(),
        output,
        geometry,
        bound.limits,
        attn_sink,
        topk_indices,
        raw_q=raw_q,
    )
    bound.exchange.attend(call)


def _bound_layer(handle: str) -> DeepseekV4MLAAttention:
    """The layer of an op, whose caches have the memory that the op was given."""
    layer = _handles.layer(handle)
    if layer.caches is not None:
        caches = layer.caches.swa, layer.caches.compressed
        check_op_tensors(layer.prefix, caches, layer._op_tensors)  # noqa: SLF001 - of the layer of this module
    return layer


@without_modes
def _run_insert(
    q: Tensor, kv: Tensor, positions: Tensor, cos_sin_cache: Tensor, swa: Tensor | None, layer: str
) -> None:
    bound = _bound_layer(layer)
    _insert(bound, caches_of(bound.caches, swa), q, kv, positions, cos_sin_cache)


@without_modes
def _run_forward(
    q: Tensor,
    kv: Tensor,
    positions: Tensor,
    output: Tensor,
    swa: Tensor | None,
    compressed: Tensor | None,
    topk_indices: Tensor | None,
    attn_sink: Tensor | None,
    cos_sin_cache: Tensor,
    layer: str,
) -> None:
    bound = _bound_layer(layer)
    caches = caches_of(bound.caches, swa, compressed)
    _forward(bound, caches, topk_indices, attn_sink, cos_sin_cache, q, positions, output)


def _nothing(*_: object) -> None:
    """The fake of both ops for the compiler: no result; the schema declares the mutation."""


# the overloads, as their look-up in each call costs as much as the rest of the dispatcher
_op_insert = define_op(
    "qnorm_rope_kv_insert(Tensor(a!) q, Tensor kv, Tensor positions, Tensor cos_sin_cache, Tensor(b!)? swa, "
    "str layer) -> ()",
    _run_insert,
    _nothing,
)
_op_forward = define_op(
    "forward_mqa(Tensor q, Tensor kv, Tensor positions, Tensor(a!) output, Tensor? swa, Tensor? compressed, "
    "Tensor? topk_indices, Tensor? attn_sink, Tensor cos_sin_cache, str layer) -> ()",
    _run_forward,
    _nothing,
)

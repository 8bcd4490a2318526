"""`plan_workspace`: bytes of the workspace that a layer can need within limits, a pure function of shapes."""

from __future__ import annotations

import torch

from dsv4attn.core.argument_checks import check_type, round_up
from dsv4attn.core.cache.layout import KVCacheLayout
from dsv4attn.core.contract.backend import Backend, IndexForm, KeyForm, Phase, check_is_backend
from dsv4attn.core.contract.limits import Limits
from dsv4attn.core.memory.chunking import ChunkBounds, small_bytes, widest_columns, widest_topk
from dsv4attn.core.memory.rank_buffers import ARENA as RANKS
from dsv4attn.core.memory.rank_buffers import KEYS_ARENA, all_heads, key_bytes, merge_bytes, selection_transient_bytes
from dsv4attn.core.memory.workspace import ALIGNMENT, WorkspacePlan, simultaneous_bytes
from dsv4attn.core.model.geometry import LayerGeometry, LayerKind
from dsv4attn.core.tensorspec import BufferSpec
from dsv4attn.core.torch_ops.tiles import TILE_BYTES

__all__ = ["gathers_keys", "plan_workspace", "prefill_bounds", "ragged_specs", "window_columns"]

_INT = torch.int32


def ragged_specs(tokens: int, width: int) -> list[BufferSpec]:
    """Views of a ragged index list: capacity from shapes, never from contents."""
    return [((tokens * width,), _INT), ((tokens + 1,), _INT)]


def gathers_keys(layer: LayerGeometry, backend: Backend) -> bool:
    """Whether prefill of such layers has its keys gathered."""
    capabilities = backend.capabilities
    on_pages = capabilities.prefill_pages and layer.has_entries and layer.compress_ratio == 1
    return capabilities.prefill_keys is KeyForm.GATHERED and not on_pages


def prefill_bounds(layer: LayerGeometry, limits: Limits, backend: Backend, layout: KVCacheLayout) -> ChunkBounds:
    """Bounds of this layer's prefill chunks on this backend."""
    capabilities = backend.capabilities
    return ChunkBounds.of(
        layer,
        limits,
        gathered=gathers_keys(layer, backend),
        alignment=capabilities.index_alignment,
        row_bytes=layer.head_dim * layout.row_dtype.itemsize,
        index_copies=2 if capabilities.prefill_indices is IndexForm.RAGGED else 1,
        scratch_bytes=_prefill_scratch(layer, limits, backend),
    )


def plan_workspace(
    layer: LayerGeometry,
    limits: Limits,
    backend: Backend,
    layout: KVCacheLayout,
    *,
    layer_parts: bool = False,
    ranks: int | None = None,
    divides_heads: bool = False,
    prefill_keys: bool = True,
    q_dtype: torch.dtype | None = None,
) -> WorkspacePlan:
    """Bytes of the workspace that are enough for every batch within `limits`, for layers like this one.

    layer: geometry of the layer. limits: of every batch. backend: what will run the layer.
    layout: of the window cache; the compressed cache has the same row dtype. layer_parts: whether the parts around
    attention run too. ranks: those that share the compressed entries; None: no context parallelism. divides_heads:
    whether these ranks divide heads, and the layer has those of one (`ContextParallel.divides_heads`). prefill_keys:
    whether these ranks may gather keys for prefill (`ContextParallel.prefill_keys`), from a compressed cache with the
    layout of the window. q_dtype: of what ranks exchange; None: bf16 or fp32. Take the `union` over a model's layers.
    Raises ArgumentError for arguments of other types.
    """
    check_type("layer", layer, LayerGeometry, cure="pass geometry.layer(i) or geometry.layer_of_kind(kind)")
    check_type("limits", limits, Limits, cure="pass Limits(max_num_reqs, max_num_batched_tokens, max_model_len)")
    check_is_backend(backend)
    check_type("layout", layout, KVCacheLayout, cure="pass KVCacheLayout.fp8_ds_mla() or .rows(...)")
    exchanged = 0
    if ranks is not None and layer.has_entries:
        merge_scratch = backend.rank_ops.merge_scratch
        exchanged = merge_bytes(ranks, layer, limits, q_dtype, divides_heads=divides_heads, merge_scratch=merge_scratch)
        # the backend attends with the heads of all ranks
        layer = all_heads(layer, ranks) if divides_heads else layer
    bounds = prefill_bounds(layer, limits, backend, layout)
    prefill = _prefill_bytes(layer, limits, backend, layout, bounds)
    arenas = {Phase.DECODE.value: _decode_bytes(layer, limits, backend), Phase.PREFILL.value: prefill}
    tokens = limits.max_num_batched_tokens
    windows = (window_columns(layer, limits, phase) for phase in Phase)
    width = round_up(decode_columns(layer, limits) + max(windows), bounds.alignment)
    transient = max(
        backend.transient_bytes(layer, tokens, width, max(bounds.rows, tokens)),
        backend.index_ops.transient_bytes(max(bounds.index_elements, limits.max_decode_tokens * width), tokens),
    )
    if layer_parts:
        transient = max(transient, backend.layer_ops.transient_bytes(tokens))
    if ranks is not None and layer.has_entries:
        arenas[RANKS] = exchanged
        if prefill_keys and ranks > 1 and not limits.single_phase:
            arenas[KEYS_ARENA] = key_bytes(ranks, layer, limits, layout)
        if layer_parts and layer.topk:
            transient = max(transient, 2 * TILE_BYTES) + selection_transient_bytes(ranks, layer, tokens)
    return WorkspacePlan(arenas, transient)


def decode_columns(layer: LayerGeometry, limits: Limits) -> int:
    """Most columns of a decode row's compressed segment."""
    c128a = layer.kind is LayerKind.HCA
    return layer.table_columns(limits.max_model_len) if c128a else widest_topk(layer, limits)


def window_columns(layer: LayerGeometry, limits: Limits, phase: Phase) -> int:
    """Most columns of a row's window in a phase."""
    decode = phase is Phase.DECODE
    return max(layer.window, limits.decode_window_columns if decode else limits.prefill_window_columns)


def _decode_bytes(layer: LayerGeometry, limits: Limits, backend: Backend) -> int:
    columns, window = decode_columns(layer, limits), window_columns(layer, limits, Phase.DECODE)
    translated = layer.kind is LayerKind.CSA
    wide = window_columns(layer, limits, Phase.PREFILL)
    if gathers_keys(layer, backend) and wide > layer.window:
        # such prefill rows run as decode calls, with the entries of a c128a layer by their numbers
        window, translated = max(window, wide), columns > 0
    tokens, specs = limits.max_decode_tokens, list[BufferSpec]()
    if translated:
        specs += [((tokens, columns), _INT), ((tokens,), _INT)]
    if backend.capabilities.decode_indices is IndexForm.RAGGED:
        specs += ragged_specs(tokens, window) + (ragged_specs(tokens, columns) if columns else [])
    width = columns + window
    return simultaneous_bytes(specs) + _scratch_bound(Phase.DECODE, layer, tokens, width, backend)


def _prefill_bytes(
    layer: LayerGeometry, limits: Limits, backend: Backend, layout: KVCacheLayout, bounds: ChunkBounds
) -> int:
    ragged = backend.capabilities.prefill_indices is IndexForm.RAGGED
    index_bytes = 4 * bounds.index_elements * (2 if ragged else 1)
    row_bytes = bounds.rows * layer.head_dim * layout.row_dtype.itemsize
    chunk = round_up(row_bytes + index_bytes + small_bytes(limits), ALIGNMENT)
    return chunk + _prefill_scratch(layer, limits, backend)


def _prefill_scratch(layer: LayerGeometry, limits: Limits, backend: Backend) -> int:
    capabilities = backend.capabilities
    gathered = gathers_keys(layer, backend)
    width = widest_columns(layer, limits, capabilities.index_alignment, gathered=gathered)
    return _scratch_bound(Phase.PREFILL, layer, limits.max_num_batched_tokens, width, backend)


def _scratch_bound(phase: Phase, layer: LayerGeometry, tokens: int, width: int, backend: Backend) -> int:
    """The backend's bound, in bytes, rounded up to the alignment of views."""
    return round_up(backend.scratch_bound(phase, layer, tokens, width), ALIGNMENT)

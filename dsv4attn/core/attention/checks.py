"""Argument checks of `forward_mqa` and of a bound layer: on host values only, before the first launch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dsv4attn.core.argument_checks import check_type
from dsv4attn.core.attention.call import ForwardCall
from dsv4attn.core.attention.overlap import check_results_apart
from dsv4attn.core.cache.layer_caches import LayerCaches
from dsv4attn.core.cache.layout import PagedKVCache
from dsv4attn.core.cache.record_layout import check_window
from dsv4attn.core.cache.selected_keys import GatheredKeys, RaggedIndices
from dsv4attn.core.contract.backend import AttentionCall, Phase, RawQuery, check_is_backend
from dsv4attn.core.contract.limits import Limits
from dsv4attn.core.memory.plan import window_columns
from dsv4attn.core.memory.workspace import WorkspaceManager
from dsv4attn.core.metadata.metadata import AttentionMetadata, CompressedMetadata, WindowMetadata
from dsv4attn.core.model.geometry import LayerGeometry, LayerKind
from dsv4attn.core.model.quantized_weight import Weight, check_weight
from dsv4attn.core.model.rope import inverse_frequencies, is_rotation
from dsv4attn.core.tensorspec import check_strides, check_tensor
from dsv4attn.core.torch_modes import without_modes
from dsv4attn.errors import ArgumentError, LayoutMismatchError

__all__ = [
    "check_attention_strides",
    "check_backend",
    "check_bound",
    "check_cache",
    "check_compressed",
    "check_forward_call",
    "check_insert",
    "check_keys",
    "check_metadata",
    "check_output",
    "check_projection",
    "check_same_device",
    "check_table",
    "check_topk",
]

_Q_DTYPES = (torch.bfloat16, torch.float32)


def check_backend(backend: object, layer: object, *, layer_name: str = "layer") -> None:
    """Raise ArgumentError unless these are a backend and the geometry of a layer."""
    check_is_backend(backend)
    check_type(layer_name, layer, LayerGeometry, cure="pass geometry.layer(i) or geometry.layer_of_kind(kind)")


def _check_owner(backend: object, layer: object, limits: object, *, layer_name: str = "layer") -> None:
    check_backend(backend, layer, layer_name=layer_name)
    check_type("limits", limits, Limits, cure="pass the Limits that the workspace is planned for")


def check_forward_call(call: ForwardCall) -> None:
    """Raise ArgumentError or LayoutMismatchError unless the arguments of `forward_mqa` fit each other."""
    q, caches, metadata, out, layer = call.q, call.caches, call.metadata, call.out, call.layer
    attn_sink, topk_indices, lse = call.attn_sink, call.topk_indices, call.lse
    _check_owner(call.backend, layer, call.limits)
    check_type(
        "workspace", call.workspace, WorkspaceManager, cure="pass a WorkspaceManager(device), one for all layers"
    )
    for name, value, cls in (("caches", caches, LayerCaches), ("metadata", metadata, AttentionMetadata)):
        if not isinstance(value, cls) and (value is not None or name != "metadata"):
            raise ArgumentError(name, expected=cls.__name__, actual=type(value).__name__)
    letters = {"H": layer.num_heads, "D": layer.head_dim}
    check_tensor("q", q, "T H D", _Q_DTYPES, letters)
    check_tensor("out", out, "T H D", q.dtype, letters, written=True, like="q")
    if attn_sink is not None:
        check_tensor("attn_sink", attn_sink, "H", torch.float32, letters)
    if lse is not None:
        check_tensor("lse", lse, "T H", torch.float32, letters, written=True)
    check_cache("caches.swa", caches.swa, layer)
    if layer.kind is not LayerKind.SWA:
        check_compressed(caches, layer)
    compressed = None if caches.compressed is None else caches.compressed.tensor
    check_same_device(q, out=out, attn_sink=attn_sink, lse=lse, topk_indices=topk_indices)
    read = {"caches.swa": caches.swa.tensor, "caches.compressed": compressed}
    check_same_device(q, **read)
    check_results_apart({"out": out, "lse": lse}, q=q, attn_sink=attn_sink, topk_indices=topk_indices, **read)
    if metadata is None:
        return
    compressed_table = None if metadata.compressed is None else metadata.compressed.block_table
    check_same_device(q, **{"metadata.swa": metadata.swa.block_table, "metadata.compressed": compressed_table})
    check_metadata(metadata, caches, layer, call.limits, q.shape[0])
    if layer.kind is LayerKind.CSA:
        check_topk("topk_indices", topk_indices, layer)
        assert topk_indices is not None
        rows, columns = topk_indices.shape
        tokens = metadata.swa.num_actual_tokens
        if rows < tokens or columns > layer.topk:
            expected = f"a row for each of {tokens} tokens, at most {layer.topk} columns"
            raise ArgumentError("topk_indices", expected=expected, actual=[rows, columns])


def check_table(cos_sin_cache: Tensor, layer: LayerGeometry, limits: Limits) -> None:
    """Raise ArgumentError unless a table has the angles of a layer, and a row for every position within the limits.

    Kernels take the last row for positions past the table, so a table that is too short would give wrong numbers. The
    angles of position 1 are read: once for each layer that is made, which waits for the table's device.
    """
    check_tensor("cos_sin_cache", cos_sin_cache, f"_ {layer.rope_dim}", torch.float32, {})
    if cos_sin_cache.shape[0] < limits.max_model_len:
        expected = f"at least {limits.max_model_len} rows, the max_model_len of the limits"
        hint = "make it with cos_sin_cache(layer.rope, limits.max_model_len, device), or lower max_model_len"
        raise ArgumentError("cos_sin_cache", expected=expected, actual=list(cos_sin_cache.shape), hint=hint)
    if type(cos_sin_cache) is Tensor and cos_sin_cache.device.type != "meta" and cos_sin_cache.shape[0] > 1:
        _check_angles(cos_sin_cache, layer)


_LEAST_LENGTH = 0.1
"""Least squared length of a pair that is taken for the cosine and the sine of an angle."""
_ANGLE_ERROR = 0.01
"""Radians that an angle of position 1 may be off. Other bases or another YaRN differ by more in some pair."""


@without_modes
def _check_angles(cos_sin_cache: Tensor, layer: LayerGeometry) -> None:
    """Raise ArgumentError if a table holds the angles of another kind of layer. An mscale does not change angles.

    A table of zeros is one that its owner fills later, and a table without sines turns nothing, as its owner wishes.
    """
    cos, sin = cos_sin_cache[1].to("cpu", torch.float32).chunk(2)
    if not bool((cos * cos + sin * sin > _LEAST_LENGTH).all() and sin.any()):
        return
    actual, expected = torch.atan2(sin, cos), inverse_frequencies(layer.rope)
    wrong = ((actual - expected) / 2).sin().abs() > _ANGLE_ERROR / 2  # whole turns do not count
    if bool(wrong.any()):
        pair = int(wrong.nonzero()[0])
        raise ArgumentError(
            "cos_sin_cache",
            expected=f"angles of {layer.kind.value} layers: pair {pair} turns by {expected[pair]:.4g} at position 1",
            actual=f"a table that turns it by {actual[pair]:.4g}",
            hint="make it with cos_sin_cache(layer.rope, ...): the kinds of layers have tables of their own",
        )


def check_bound(
    backend: object,
    geometry: LayerGeometry,
    limits: object,
    attn_sink: Tensor | None,
    cos_sin_cache: Tensor,
    topk_indices_buffer: Tensor | None,
) -> None:
    """Raise ArgumentError unless the arguments of a bound layer fit each other.

    Other layers than c4a never look at the buffer.
    """
    _check_owner(backend, geometry, limits, layer_name="geometry")
    if attn_sink is not None:
        check_tensor("attn_sink", attn_sink, "H", torch.float32, {"H": geometry.num_heads})
    assert isinstance(limits, Limits)
    check_table(cos_sin_cache, geometry, limits)
    if geometry.kind is LayerKind.CSA:
        _check_topk_buffer("topk_indices_buffer", topk_indices_buffer, geometry, limits)


def _check_topk_buffer(name: str, buffer: Tensor | None, layer: LayerGeometry, limits: Limits) -> None:
    """Raise ArgumentError unless a buffer has room for the selected entries of every token of a step."""
    rows, columns = limits.max_num_batched_tokens, layer.topk
    hint = f"allocate it as [{rows}, {columns}] torch.int32"
    if buffer is None:
        raise ArgumentError(name, expected="the buffer that the indexer writes, on a c4a layer", actual=None, hint=hint)
    check_topk(name, buffer, layer, written=True)
    least = min(columns, max(layer.entries(limits.max_model_len), 1))
    if buffer.shape[1] > columns:
        raise ArgumentError(name, expected=f"at most {columns} columns", actual=list(buffer.shape), hint=hint)
    if buffer.shape[0] < rows or buffer.shape[1] < least:
        expected = f"at least {rows} rows, the tokens of a step, and {least} columns"
        raise ArgumentError(name, expected=expected, actual=list(buffer.shape), hint=hint)


def check_cache(argument: str, cache: PagedKVCache, layer: LayerGeometry) -> None:
    """Check that a cache holds keys of this layer's dims."""
    layout = cache.layout
    if (layout.nope_dim, layout.rope_dim) != (layer.nope_dim, layer.rope_dim):
        expected = f"a layout of {layer.nope_dim} + {layer.rope_dim} dims, as the model has"
        hint = "make the layout from the model's geometry"
        raise LayoutMismatchError(argument, expected=expected, actual=layout.fingerprint, hint=hint)


def check_compressed(caches: LayerCaches, layer: LayerGeometry) -> None:
    """Check the compressed cache of a layer that has one."""
    cache, name = caches.compressed, "caches.compressed"
    if cache is None:
        raise ArgumentError(name, expected=f"the compressed cache of a {layer.kind.value} layer", actual=None)
    check_cache(name, cache, layer)
    if cache.layout.row_dtype != caches.swa.layout.row_dtype:
        expected = f"rows that read as {caches.swa.layout.row_dtype}, like the window cache"
        raise LayoutMismatchError(name, expected=expected, actual=cache.layout.fingerprint)


def check_topk(argument: str, value: object, layer: LayerGeometry, *, written: bool = False) -> None:
    """Check the entry numbers that an indexer writes for a c4a layer, except how many rows and columns there are."""
    columns = value.shape[1] if isinstance(value, Tensor) and value.ndim == 2 else layer.topk
    check_tensor(argument, value, "_ K", torch.int32, {"K": columns}, written=written)


def check_same_device(q: Tensor, like: str = "q", /, **others: Tensor | None) -> None:
    """Check that all tensors are on the device of q. like: what the error calls q."""
    for name, tensor in others.items():
        if tensor is not None and tensor.device != q.device:
            raise ArgumentError(name, expected=f"a tensor on {q.device}, like {like}", actual=f"one on {tensor.device}")


def check_metadata(
    metadata: AttentionMetadata, caches: LayerCaches, layer: LayerGeometry, limits: Limits, rows: int
) -> None:
    """Check that metadata was built for this layer, these caches and these limits."""
    swa, compressed = metadata.swa, metadata.compressed
    records = "records per block of the"
    facts = [
        ("swa.block_size", caches.swa.block_size, swa.block_size, f"{records} window cache"),
        ("swa.window_size", layer.window, swa.window_size, "the model's window"),
    ]
    if layer.kind is not LayerKind.SWA:
        if not isinstance(compressed, CompressedMetadata):
            expected = f"metadata of {layer.kind.value} layers"
            raise ArgumentError("metadata.compressed", expected=expected, actual=compressed)
        assert caches.compressed is not None
        size, ours = caches.compressed.block_size, compressed.records_per_block
        facts += [
            ("compressed.compress_ratio", layer.compress_ratio, compressed.compress_ratio, "the layer's ratio"),
            ("compressed.block_size // compress_ratio", size, ours, f"{records} compressed cache"),
            ("compressed.num_actual_tokens", swa.num_actual_tokens, compressed.num_actual_tokens, "the batch"),
        ]
    for name, required, actual, what in facts:
        if required != actual:
            raise ArgumentError(f"metadata.{name}", expected=f"{required} ({what})", actual=actual)
    if layer.kind is LayerKind.HCA and compressed is not None:
        _check_tables(swa, compressed)
    for name, actual, bound, where in (
        ("tokens", swa.num_actual_tokens, rows, "the rows of q"),
        ("tokens", swa.num_actual_tokens, limits.max_num_batched_tokens, "limits"),
        ("decode tokens", swa.num_decode_tokens, limits.max_decode_tokens, "limits"),
        ("requests", swa.num_decodes + swa.num_prefills, limits.max_num_reqs, "limits"),
        ("max_seq_len", swa.max_seq_len, limits.max_model_len, "limits"),
        *(
            (f"{phase.value} window columns", rows.shape[2], window_columns(layer, limits, phase), limit)
            for phase, rows, limit in (
                (Phase.DECODE, swa.decode_swa_indices, "decode_window_columns"),
                (Phase.PREFILL, swa.prefill_swa_indices, "prefill_window_columns"),
            )
        ),
    ):
        if actual > bound:
            raise ArgumentError(f"metadata: {name}", expected=f"at most {bound} ({where})", actual=actual)


def _check_tables(swa: WindowMetadata, compressed: CompressedMetadata) -> None:
    """Check that metadata of c128a layers have the tables of each phase that has tokens."""
    counts = {
        "c128a_global_decode_topk_indices": swa.num_decode_tokens,
        "c128a_decode_topk_lens": swa.num_decode_tokens,
    }
    counts["c128a_prefill_topk_indices"] = swa.num_prefill_tokens
    for name, tokens in counts.items():
        if tokens and getattr(compressed, name) is None:
            raise ArgumentError(f"metadata.compressed.{name}", expected=f"rows for {tokens} tokens", actual=None)


def check_attention_strides(call: AttentionCall) -> None:
    """Check the strides of a call that does not come from `forward_mqa`; once for each signature."""
    tensors = {"q": call.q, "out": call.out, "lse": call.lse, "max_logits": call.max_logits}
    check_strides(written=("out", "lse", "max_logits"), attn_sink=call.attn_sink, **tensors)
    for segment in (call.keys,) if isinstance(call.keys, GatheredKeys) else call.keys:
        rows = segment.rows
        ends = {"indptr": rows.indptr} if isinstance(rows, RaggedIndices) else {"lens": rows.lens}
        check_strides(indices=rows.indices, **ends)
        if isinstance(segment, GatheredKeys):
            check_strides(kv=segment.kv)


def check_keys(k: Tensor, cache: PagedKVCache, slot_mapping: Tensor) -> None:
    """Check rotated keys that are inserted without a layer."""
    check_tensor("k", k, f"_ {cache.layout.head_dim}", _Q_DTYPES, {})
    check_tensor("slot_mapping", slot_mapping, "_", torch.int64, {})
    check_same_device(k, slot_mapping=slot_mapping, cache=cache.tensor)


def check_insert(
    q: Tensor | None,
    kv: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    cos_sin_cache: Tensor,
    cache: PagedKVCache,
    layer: LayerGeometry,
) -> None:
    """Raise ArgumentError unless the arguments of the q-norm + RoPE + KV insert fit each other.

    q: None if there are keys alone.
    """
    letters = {"H": layer.num_heads, "D": layer.head_dim}
    if q is not None:
        check_tensor("q", q, "T H D", _Q_DTYPES, letters, written=True)
    check_tensor("kv", kv, "T D", _Q_DTYPES if q is None else q.dtype, letters, like="" if q is None else "q")
    check_tensor("positions", positions, "T", torch.int64, letters)
    check_tensor("slot_mapping", slot_mapping, "_", torch.int64, letters)
    check_tensor("cos_sin_cache", cos_sin_cache, f"_ {layer.rope_dim}", torch.float32, {})
    check_cache("cache", cache, layer)
    check_window(cache.layout, "cache")
    tensors = {"kv": kv, "positions": positions, "slot_mapping": slot_mapping, "cos_sin_cache": cos_sin_cache}
    first = (kv, "kv") if q is None else (q, "q")
    check_same_device(*first, **tensors, cache=cache.tensor)
    if q is not None and _lie_close(q, kv):  # the full comparison costs more than all other checks together
        check_results_apart({"q": q}, kv=kv)
    # values are read on the CPU only: on a device that would synchronise, and kernels skip such slots
    _check_positions(positions, cos_sin_cache, lambda: _have_slots(slot_mapping, positions.shape[0]))
    largest = int(slot_mapping.max()) if slot_mapping.device.type == "cpu" and slot_mapping.numel() else -1
    if largest >= cache.capacity:
        expected = f"slots below the cache's {cache.capacity}, negative for padding"
        raise ArgumentError("slot_mapping", expected=expected, actual=largest)


def _lie_close(q: Tensor, kv: Tensor) -> bool:
    """Whether the ranges of addresses of q [T, H, D] and kv [T, D], of one dtype, may overlap."""
    gap, (tokens, heads, dims) = (kv.data_ptr() - q.data_ptr()) // q.element_size(), q.shape
    return -(tokens * kv.stride(0) + dims) < gap < tokens * q.stride(0) + heads * q.stride(1) + dims


def check_is_raw_q(raw_q: RawQuery | None) -> None:
    """Raise ArgumentError unless that is a RawQuery or None."""
    if raw_q is not None:
        check_type("raw_q", raw_q, RawQuery, cure="pass a RawQuery(positions, cos_sin_cache, eps), or None")


def check_raw_q(call: ForwardCall, *, is_supported: bool) -> None:
    """Raise ArgumentError unless q of a call's prefill tokens can be read raw.

    is_supported: whether the backend takes raw q in this call.
    """
    q, raw_q, layer, slot_mapping = call.q, call.raw_q, call.layer, call.window_metadata.slot_mapping
    assert raw_q is not None
    check_tensor("raw_q.positions", raw_q.positions, "T", torch.int64, {"T": q.shape[0]})
    check_tensor("raw_q.cos_sin_cache", raw_q.cos_sin_cache, f"_ {layer.rope_dim}", torch.float32, {})
    check_same_device(q, **{"raw_q.positions": raw_q.positions, "raw_q.cos_sin_cache": raw_q.cos_sin_cache})
    _check_positions(raw_q.positions, raw_q.cos_sin_cache, lambda: _have_slots(slot_mapping, q.shape[0]))
    if raw_q.cos_sin_cache.device.type == "cpu" and not is_rotation(raw_q.cos_sin_cache):
        expected, hint = "cosines and sines of angles", "with other tables normalise and rotate q before"
        raise ArgumentError("raw_q.cos_sin_cache", expected=expected, actual="pairs of other lengths", hint=hint)
    if not is_supported or raw_q.eps != layer.q_eps:
        expected = "None" if not is_supported else f"eps {layer.q_eps}, as the geometry has"
        hint = "normalise and rotate q before, unless prefill_takes_raw_q says that it may be raw"
        raise ArgumentError("raw_q", expected=expected, actual=f"eps {raw_q.eps}", hint=hint)


def _check_positions(positions: Tensor, cos_sin_cache: Tensor, real: Callable[[], Tensor]) -> None:
    """Check positions of real tokens on the CPU against the table; a graph that is being compiled has no values yet.

    real: returns which rows [T] are those of real tokens. It is called if there is a position outside of the table.
    """
    if positions.device.type != "cpu" or torch.compiler.is_compiling() or not positions.numel():
        return
    low, high = (int(bound) for bound in positions.aminmax())
    if low >= 0 and high < cos_sin_cache.shape[0]:
        return
    wrong = positions[real() & ((positions < 0) | (positions >= cos_sin_cache.shape[0]))]
    if wrong.numel():
        expected = (
            f"values in [0, {cos_sin_cache.shape[0]}), the rows of cos_sin_cache, for tokens that are not padding"
        )
        raise ArgumentError("positions", expected=expected, actual=int(wrong[0]))


def _have_slots(slot_mapping: Tensor, rows: int) -> Tensor:
    """[rows] bool: whether each row has a slot; rows after the slot mapping have none."""
    have_slots = torch.zeros(rows, dtype=torch.bool, device=slot_mapping.device)
    mapped = slot_mapping[:rows]
    have_slots[: mapped.shape[0]] = mapped >= 0
    return have_slots


def check_projection(
    o: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    wo_a: Weight,
    num_groups: int,
    layer: LayerGeometry,
    *,
    converts: bool,
) -> None:
    """Raise ArgumentError unless the arguments of the grouped projection fit each other; nothing is converted.

    converts: whether an fp8 wo_a is to be converted.
    """
    letters = {"H": layer.num_heads, "D": layer.head_dim}
    check_tensor("o", o, "T H D", _Q_DTYPES, letters)
    check_tensor("positions", positions, "T", torch.int64, letters)
    if num_groups < 1 or layer.num_heads % num_groups:
        raise ArgumentError("num_groups", expected=f"a divisor of {layer.num_heads} heads", actual=num_groups)
    width = layer.num_heads // num_groups * layer.head_dim
    name, matrix = check_weight("wo_a", wo_a, converts=converts)
    if matrix.shape[0] % num_groups or matrix.shape[1] != width:
        expected = f"[{num_groups} * rank, {width}], a matrix for each group of heads"
        raise ArgumentError(name, expected=expected, actual=list(matrix.shape))
    _check_dense(name, matrix)
    check_tensor("cos_sin_cache", cos_sin_cache, f"_ {layer.rope_dim}", torch.float32, {})
    check_same_device(o, positions=positions, cos_sin_cache=cos_sin_cache, **{name: matrix})
    # attention gives zeros to padding, and zeros stay zeros at any position
    _check_positions(positions, cos_sin_cache, lambda: (o != 0).flatten(1).any(1))


def check_output(o: Tensor, wo_a: Weight, wo_b: Weight, *, converts: bool) -> None:
    """Raise ArgumentError unless wo_b [hidden, G * rank] follows wo_a [G * rank, H / G * D]; nothing is converted.

    o, wo_a, converts: of `check_projection`, which checked them. An fp8 wo_b is to be converted.
    """
    _, first = check_weight("wo_a", wo_a, converts=converts)
    name, matrix = check_weight("wo_b", wo_b)
    if matrix.shape[1] != first.shape[0]:
        expected = f"[hidden, {first.shape[0]}], a column for each row of wo_a"
        raise ArgumentError(name, expected=expected, actual=list(matrix.shape))
    _check_dense(name, matrix)
    if matrix.device != o.device:
        raise ArgumentError(name, expected=f"a tensor on {o.device}, like o", actual=f"one on {matrix.device}")


def _check_dense(name: str, matrix: Tensor) -> None:
    """Check dtype and strides of a matrix that is not converted; fp8 codes may have any strides."""
    if matrix.element_size() > 1:
        check_tensor(name, matrix, "_ _", _Q_DTYPES, {})

"""vLLM's attention functions for AMD GPUs, with the same names and arguments, on the kernels of the ROCm backend.

Engines that use `forward_mqa` do not need them. Different from the originals, an absent entry never reads a neighbour's
row, no present entry is lost because others are absent, and every cache is read in its own dialect.
Functions of index lists are in `vllm_rocm_ragged`, the function of the output projection is in `vllm_rocm_output`.
"""

from __future__ import annotations

from functools import cache, partial

import torch
from attrs import evolve
from torch import Tensor

from dsv4attn.compat.arguments import FLOATS, as_rows, check_at_least, check_head_dims, check_rows, layer_of, scratch_of
from dsv4attn.compat.direct import device_backend
from dsv4attn.compat.vllm_rocm_ragged import INT, INT32_MAX, check_indptr, new_rows
from dsv4attn.core.attention.checks import check_same_device
from dsv4attn.core.attention.overlap import check_results_apart
from dsv4attn.core.cache.layout import Fp8Format, KVCacheLayout, PagedKVCache
from dsv4attn.core.cache.selected_keys import DenseIndices, GatheredKeys, PagedKeys, RaggedIndices
from dsv4attn.core.contract.backend import AttentionCall, Phase
from dsv4attn.core.memory.workspace import WorkspaceManager
from dsv4attn.core.model.geometry import LayerGeometry
from dsv4attn.core.tensorspec import check_tensor
from dsv4attn.errors import ArgumentError

__all__ = ["rocm_sparse_attn_decode", "rocm_sparse_attn_prefill"]


_MOST_HEADS, _WIDEST = 128, 512

_TYPES = {torch.float8_e4m3fn: Fp8Format.OCP, torch.float8_e4m3fnuz: Fp8Format.FNUZ}
_backend = partial(device_backend, "rocm")
_layout = cache(KVCacheLayout.fp8_ds_mla)


def rocm_sparse_attn_decode(
    q: Tensor,
    kv_cache: Tensor | PagedKVCache | None,
    swa_k_cache: Tensor | PagedKVCache,
    swa_only: bool,
    topk_indices: Tensor | None,
    topk_lens: Tensor | None,
    swa_indices: Tensor | None,
    swa_lens: Tensor | None,
    swa_ragged_indices: Tensor | None,
    swa_ragged_indptr: Tensor | None,
    topk_ragged_indices: Tensor | None,
    topk_ragged_indptr: Tensor | None,
    attn_sink: Tensor | None,
    scale: float,
    head_dim: int,
    nope_head_dim: int,
    rope_head_dim: int,
    output: Tensor,
    *,
    swa_fp8_format: Fp8Format | str = Fp8Format.OCP,
    fp8_format: Fp8Format | str = Fp8Format.OCP,
    positions: Tensor | None = None,
    cos_sin_cache: Tensor | None = None,
    workspace: WorkspaceManager | None = None,
) -> int:
    """Attention of each row of q over its slots of the window cache and, unless swa_only, of the compressed one.

    q, output: [T, H, head_dim] bf16 or fp32, H at most 128, head_dim at most 512; output is written in full. attn_sink:
    [>= H] fp32.
    Beyond the original: `positions`, `cos_sin_cache` and `workspace`.
    swa_k_cache, kv_cache: [B, P, bytes of a record] of one-byte type, or PagedKVCache: the window cache and the
    compressed cache. Each has its own page size, stride and capacity.
    swa_only: whether the layer has no compressed cache; kv_cache and the topk arguments are then not read.
    swa_indices, topk_indices: [T, 1, K] or [T, K] int32 slots, read unless there are ragged rows.
    swa_lens, topk_lens: [T] int32, leading columns of the slots that count.
    swa_ragged_indices, topk_ragged_indices: [capacity] int32 slots of all rows, or None.
    swa_ragged_indptr, topk_ragged_indptr: [T + 1] int32 start of each row, or None. Ragged rows have precedence
    if both are there.
    scale: factor of the logits.
    head_dim, nope_head_dim, rope_head_dim: dims of a key; the first is the sum of the others.
    swa_fp8_format, fp8_format: fp8 dialects of the two caches. A tensor of another fp8 type, or a layout of
    another dialect, is refused.
    positions: [T] int64, or None. With cos_sin_cache the launch that combines splits of rows undoes the rotation
    of the output.
    cos_sin_cache: [P, rope_head_dim] fp32, or None.
    workspace: memory with which several programs can share a row, or None.
    Returns the number of leading rows whose rotation was undone: T or 0. Values of indptr are checked on the CPU; on a
    device no value of it makes a kernel read outside the lists. Raises ArgumentError before any launch.
    """
    letters = _check_dims(q, head_dim, nope_head_dim, rope_head_dim)
    check_tensor("output", output, "T H D", q.dtype, letters, written=True)
    sink = _sink_of(attn_sink, q)
    check_same_device(q, output=output, attn_sink=sink)
    dims = nope_head_dim, rope_head_dim
    rows = _rows_of(q, "swa_", swa_indices, swa_lens, swa_ragged_indices, swa_ragged_indptr)
    segments = [PagedKeys(_cache_of("swa_k_cache", swa_k_cache, q, *dims, swa_fp8_format), rows)]
    if not swa_only:
        rows = _rows_of(q, "topk_", topk_indices, topk_lens, topk_ragged_indices, topk_ragged_indptr)
        segments.append(PagedKeys(_cache_of("kv_cache", kv_cache, q, *dims, fp8_format), rows))
    angles = _angles(q, positions, cos_sin_cache, rope_head_dim)
    read = {name: tensor for names in map(_read_by, ("swa_", "topk_"), segments) for name, tensor in names.items()}
    turning = {} if angles is None else {"positions": positions, "cos_sin_cache": cos_sin_cache}
    check_results_apart({"output": output}, q=q, attn_sink=sink, **turning, **read)
    if len({type(segment.rows) for segment in segments}) > 1:
        segments = [evolve(segment, rows=_as_ragged(segment.rows, segment.cache.capacity)) for segment in segments]
    layer = layer_of(q.shape[1], head_dim, rope_head_dim, float(scale))
    return _attend(Phase.DECODE, layer, q, segments, sink, output, workspace, angles)


def rocm_sparse_attn_prefill(
    q: Tensor,
    kv: Tensor,
    indices: Tensor | None,
    topk_length: Tensor | None,
    scale: float,
    head_dim: int,
    nope_head_dim: int,
    rope_head_dim: int,
    attn_sink: Tensor | None,
    output: Tensor,
    ragged_indices: Tensor | None = None,
    ragged_indptr: Tensor | None = None,
    *,
    workspace: WorkspaceManager | None = None,
) -> None:
    """Attention of each row of q over the gathered keys it names.

    q, output: [T, H, head_dim] bf16 or fp32. kv: [S, 1, head_dim] bf16 or fp32.
    Everything else as in `rocm_sparse_attn_decode`.
    indices: [T, 1, K] or [T, K] int32 rows of kv. It may have no columns if there are ragged rows. An absent
    entry is skipped at any position, and no present entry is lost for it.
    topk_length: [T] int32, leading columns of indices that count, or None for all.
    ragged_indices, ragged_indptr: [capacity] and [T + 1] int32, or None. They have precedence over indices.
    attn_sink: [>= H] fp32, or None.
    scale, head_dim, nope_head_dim, rope_head_dim, workspace: as in `rocm_sparse_attn_decode`.
    """
    letters = _check_dims(q, head_dim, nope_head_dim, rope_head_dim)
    check_tensor("kv", kv, "_ 1 D", FLOATS, letters)
    check_tensor("output", output, "T H D", q.dtype, letters, written=True)
    sink = _sink_of(attn_sink, q)
    check_same_device(q, kv=kv, output=output, attn_sink=sink)
    rows = as_rows(indices)
    if topk_length is None and rows is not None and (ragged_indices is None or ragged_indptr is None):
        topk_length = rows.new_full(rows.shape[:1], rows.shape[-1])
    selected = _rows_of(q, "", rows, topk_length, ragged_indices, ragged_indptr, lens_name="topk_length")
    layer = layer_of(q.shape[1], head_dim, rope_head_dim, float(scale))
    check_results_apart({"output": output}, q=q, kv=kv, attn_sink=sink, **_named(selected))
    _attend(Phase.PREFILL, layer, q, GatheredKeys(kv.squeeze(1), selected), sink, output, workspace, None)


# shared by both phases


def _attend(
    phase: Phase,
    layer: LayerGeometry,
    q: Tensor,
    keys: list[PagedKeys] | GatheredKeys,
    sink: Tensor | None,
    out: Tensor,
    workspace: WorkspaceManager | None,
    angles: tuple[Tensor, Tensor] | None,
) -> int:
    """Launch, and return the number of leading rows whose rotation was undone."""
    segments = [keys] if isinstance(keys, GatheredKeys) else keys
    rows, backend = (q.shape[0], sum(segment.rows.width for segment in segments)), _backend()
    scratch = scratch_of(workspace, backend, phase, layer, rows, f"rocm_sparse_attn_{phase.value}")
    rotated_back: int = backend.attend(phase, AttentionCall(layer, q, keys, sink, out, None, scratch), angles)
    return rotated_back


def _check_dims(q: Tensor, head_dim: int, nope: int, rope: int) -> dict[str, int]:
    """Check the dims of q, and return its sizes by letter."""
    check_head_dims(head_dim, nope, rope)
    if head_dim > _WIDEST:
        raise ArgumentError("head_dim", expected=f"at most {_WIDEST}", actual=head_dim)
    letters = {"D": head_dim}
    check_tensor("q", q, "T H D", FLOATS, letters)
    if not 1 <= q.shape[1] <= _MOST_HEADS:
        raise ArgumentError("q", expected=f"1 to {_MOST_HEADS} heads", actual=q.shape[1])
    return letters


def _sink_of(sink: Tensor | None, q: Tensor) -> Tensor | None:
    """The sinks of q's heads. Engines that pad heads may give more."""
    if sink is None:
        return None
    check_tensor("attn_sink", sink, "_", torch.float32, {})
    check_at_least("attn_sink", sink, q.shape[1])
    return sink[: q.shape[1]]


def _cache_of(
    name: str, cache: Tensor | PagedKVCache | None, q: Tensor, nope: int, rope: int, dialect: Fp8Format | str
) -> PagedKVCache:
    """A cache in its dialect, on the device of q."""
    allowed = [known.value for known in Fp8Format]
    if dialect not in (*Fp8Format, *allowed):
        raise ArgumentError("fp8_format", expected=" or ".join(allowed), actual=repr(dialect))
    dialect = Fp8Format(dialect)
    if isinstance(cache, PagedKVCache):
        layout = cache.layout
        if (layout.nope_dim, layout.rope_dim, layout.is_quantised) != (nope, rope, True):
            raise ArgumentError(
                name, expected=f"records of {nope} fp8 and {rope} bf16 values", actual=layout.fingerprint
            )
        if layout.fp8_format is not dialect:
            _refuse_dialect(name, dialect, layout.fingerprint)
        check_same_device(q, **{name: cache.tensor})
        return cache
    layout = _layout(nope, rope, fp8_format=dialect)
    check_tensor(name, cache, f"_ _ {layout.record_bytes}", (torch.uint8, *_TYPES), {})
    assert cache is not None
    if cache.dtype is not torch.uint8:
        if _TYPES[cache.dtype] is not dialect:
            _refuse_dialect(name, dialect, cache.dtype)
        cache = cache.view(torch.uint8)
    check_same_device(q, **{name: cache})
    return PagedKVCache(cache, layout)


def _refuse_dialect(name: str, dialect: Fp8Format, actual: object) -> None:
    hint = "the same byte means half as much in e4m3fnuz: say for each cache who wrote it"
    raise ArgumentError(name, expected=f"fp8 of dialect {dialect.value}, as declared", actual=actual, hint=hint)


def _rows_of(
    q: Tensor,
    name: str,
    indices: Tensor | None,
    lens: Tensor | None,
    flat: Tensor | None,
    indptr: Tensor | None,
    lens_name: str = "lens",
) -> DenseIndices | RaggedIndices:
    """The index rows, ragged if those are given."""
    if flat is not None and indptr is not None:
        names = f"{name}ragged_indices", f"{name}ragged_indptr"
        check_tensor(names[0], flat, "_", INT, {})
        check_tensor(names[1], indptr, "T+1", INT, {"T": q.shape[0]})
        check_same_device(q, **dict(zip(names, (flat, indptr), strict=True)))
        check_indptr(names[1], indptr, flat.shape[0])
        return RaggedIndices(flat, indptr, min(flat.shape[0], INT32_MAX))
    rows = check_rows(q, (f"{name}indices", f"{name}{lens_name}"), indices, lens)
    assert lens is not None
    return DenseIndices(rows, lens)


def _named(rows: DenseIndices | RaggedIndices, prefix: str = "", lens: str = "topk_length") -> dict[str, Tensor]:
    """The tensors of rows, by the names of their arguments."""
    if isinstance(rows, RaggedIndices):
        return {f"{prefix}ragged_indices": rows.indices, f"{prefix}ragged_indptr": rows.indptr}
    return {f"{prefix}indices": rows.indices, f"{prefix}{lens}": rows.lens}


def _read_by(prefix: str, segment: PagedKeys) -> dict[str, Tensor]:
    """The tensors of a cache and of the rows into it, by the names of their arguments."""
    cache = "swa_k_cache" if prefix == "swa_" else "kv_cache"
    return {cache: segment.cache.tensor, **_named(segment.rows, prefix, "lens")}


def _as_ragged(rows: DenseIndices | RaggedIndices, num_slots: int) -> RaggedIndices:
    if isinstance(rows, RaggedIndices):
        return rows
    out = new_rows(rows.indices, *rows.indices.shape)
    _backend().index_ops.build_ragged_indices_from_dense(rows.indices, rows.lens, num_slots, out)
    return RaggedIndices(*out, rows.indices.shape[1])


def _angles(q: Tensor, positions: Tensor | None, table: Tensor | None, rope: int) -> tuple[Tensor, Tensor] | None:
    if positions is None and table is None:
        return None
    check_tensor("positions", positions, "T", torch.int64, {"T": q.shape[0]})
    check_tensor("cos_sin_cache", table, f"_ {rope}", torch.float32, {})
    check_same_device(q, positions=positions, cos_sin_cache=table)
    assert positions is not None
    assert table is not None
    if rope % 2 or not table.shape[0]:
        raise ArgumentError("cos_sin_cache", expected="positions, and an even number of columns", actual=[*table.shape])
    return positions, table

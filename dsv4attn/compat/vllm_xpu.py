"""vLLM's functions for Intel GPUs, with the same names and arguments, on the kernels of the Intel backend.

Engines that use `forward_mqa` do not need them. Different from the originals, sinks count, absent keys do not, and no
call loops over tokens or reads lengths on the host.
"""

from __future__ import annotations

from functools import cache, partial

import torch
from torch import Tensor

from dsv4attn.compat.arguments import FLOATS, as_rows, check_head_dims, check_optional, check_rows, layer_of, scratch_of
from dsv4attn.compat.direct import device_backend
from dsv4attn.core.attention.checks import check_insert, check_same_device
from dsv4attn.core.attention.overlap import check_results_apart
from dsv4attn.core.cache.layout import KVCacheLayout, PagedKVCache
from dsv4attn.core.cache.selected_keys import DenseIndices, GatheredKeys, PagedKeys
from dsv4attn.core.contract.backend import AttentionCall, AttentionOptions, Phase
from dsv4attn.core.memory.workspace import WorkspaceManager
from dsv4attn.core.tensorspec import check_tensor
from dsv4attn.errors import ArgumentError

__all__ = [
    "get_padded_num_q_heads",
    "triton_bf16_mla_sparse_interface",
    "xpu_qnorm_rope_kv_fp8_insert",
    "xpu_sparse_decode_fp8",
]

_ROPE_DIM = 64
_WIDEST, _TAIL = 512, 128
"""Most dims of values, and of the tail of a key after them, in one program."""
_layout = cache(KVCacheLayout.fp8_ds_mla)
_backend = partial(device_backend, "xpu", decode="fused")


def get_padded_num_q_heads(num_heads: int) -> int:
    """Heads that q must have: `num_heads`, without padding.

    num_heads: heads of the model on this rank.
    """
    return num_heads


def triton_bf16_mla_sparse_interface(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    sm_scale: float,
    d_v: int = 512,
    block_dpe: int = 64,
    attn_sink: Tensor | None = None,
    topk_length: Tensor | None = None,
    out: Tensor | None = None,
    max_logits: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention of each row of q over the rows of kv that it names; returns (out, max_logits, lse).

    q: [T, H, Dqk] bf16 or fp32. kv: [S, 1, Dqk]; its first d_v dims are the values. indices: [T, 1, K] or [T, K] int32;
    an index outside 0 .. S - 1 is absent. block_dpe: dims of a key after its values (V3.2: 64 of 576), or 0 if not
    given; V4's values are whole keys, which takes 0.
    Beyond the original: any H, K and d_v up to 512; attn_sink: [H] fp32; topk_length: [T] int32, leading columns that
    count; memory for the results, out: [T, H, d_v] like q, max_logits and lse: [T, H] fp32, contiguous.
    lse is the natural logarithm, without the sink; rows without keys have lse and max_logits -inf, and out 0.
    sm_scale: factor of the logits.
    d_v: dims of the values and of out.
    Raises ArgumentError before any launch.
    """
    rows = as_rows(indices)
    _check_interface(q, kv, rows, d_v, block_dpe, attn_sink, topk_length, out, max_logits, lse)
    assert rows is not None
    out = q.new_empty(*q.shape[:2], d_v) if out is None else out
    max_logits = q.new_empty(q.shape[:2], dtype=torch.float32) if max_logits is None else max_logits
    lse = torch.empty_like(max_logits) if lse is None else lse
    if d_v < q.shape[2]:
        _backend().attend_leading_values(q, kv, rows, topk_length, sm_scale, attn_sink, out, max_logits, lse)
        return out, max_logits, lse
    if topk_length is None:
        topk_length = rows.new_full(rows.shape[:1], rows.shape[1])
    keys = GatheredKeys(kv.squeeze(1), DenseIndices(rows, topk_length))
    layer = layer_of(q.shape[1], d_v, min(_ROPE_DIM, d_v), float(sm_scale))
    _backend().prefill(AttentionCall(layer, q, keys, attn_sink, out, lse, options=AttentionOptions(max_logits)))
    return out, max_logits, lse


def xpu_sparse_decode_fp8(
    q: Tensor,
    kv_cache: Tensor | None,
    swa_kv_cache: Tensor,
    swa_only: bool,
    topk_indices: Tensor | None,
    topk_lens: Tensor | None,
    swa_indices: Tensor,
    swa_lens: Tensor,
    attn_sink: Tensor | None,
    softmax_scale: float,
    head_dim: int,
    nope_head_dim: int,
    rope_head_dim: int,
    out: Tensor,
    *,
    workspace: WorkspaceManager | None = None,
) -> None:
    """Attention of each row of q over its slots of the window cache and, unless swa_only, of the compressed one.

    q, out: [T, H, head_dim] bf16 or fp32; out is written in full. attn_sink: [H] fp32, or None.
    swa_kv_cache, kv_cache: uint8 [B, P, bytes of a record], pages any even number of bytes apart: the window
    cache and the compressed cache.
    swa_only: whether the layer has no compressed cache; kv_cache and the topk arguments are then not read.
    swa_indices, topk_indices: [T, 1, K] or [T, K] int32 slots.
    swa_lens, topk_lens: [T] int32, leading columns that count.
    softmax_scale: factor of the logits.
    head_dim, nope_head_dim, rope_head_dim: dims of a key; the first is the sum of the others.
    workspace: beyond the original: memory with which several programs can share a row; None: no scratch is used.

    Raises ArgumentError before any launch.
    """
    check_head_dims(head_dim, nope_head_dim, rope_head_dim)
    letters = {"D": head_dim}
    check_tensor("q", q, "T H D", FLOATS, letters)
    check_tensor("out", out, "T H D", q.dtype, letters, written=True)
    check_optional("attn_sink", attn_sink, "H", torch.float32, letters)
    check_same_device(q, out=out, attn_sink=attn_sink)
    window = {"swa_kv_cache": swa_kv_cache, "swa_indices": swa_indices, "swa_lens": swa_lens}
    compressed = {} if swa_only else {"kv_cache": kv_cache, "topk_indices": topk_indices, "topk_lens": topk_lens}
    layout = _layout(nope_head_dim, rope_head_dim)
    segments = [_segment(q, layout, ("swa_kv_cache", "swa_"), swa_kv_cache, swa_indices, swa_lens)]
    if not swa_only:
        segments.append(_segment(q, layout, ("kv_cache", "topk_"), kv_cache, topk_indices, topk_lens))
    check_results_apart({"out": out}, q=q, attn_sink=attn_sink, **window, **compressed)
    layer, backend = layer_of(q.shape[1], head_dim, rope_head_dim, float(softmax_scale)), _backend()
    rows = q.shape[0], sum(segment.rows.width for segment in segments)
    scratch = scratch_of(workspace, backend, Phase.DECODE, layer, rows, "xpu_sparse_decode_fp8")
    backend.decode(AttentionCall(layer, q, segments, attn_sink, out, None, scratch))


def xpu_qnorm_rope_kv_fp8_insert(
    q: Tensor,
    kv: Tensor,
    swa_kv_cache: Tensor,
    slot_mapping: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    eps: float,
    block_size: int,
) -> None:
    """Normalise and rotate q in place; rotate a copy of kv and write it to its slots of the window cache.

    q and the cache share no memory with each other or with another argument.
    q: [T, H, D], kv: [T, D], both bf16 or fp32, any row stride. swa_kv_cache: uint8 [B, P, bytes of a record] or
    [B, bytes of a page]. slot_mapping: [<= T] int64, negative for none; rows after it have their q processed only.
    positions: [T] int64. cos_sin_cache: [positions, rope dims] fp32. No copy of kv is made in memory.
    eps: of the norm of q.
    block_size: P, records of a page.
    Raises ArgumentError before any launch.
    """
    letters: dict[str, int] = {}
    check_tensor("q", q, "T H D", FLOATS, letters)
    check_tensor("cos_sin_cache", cos_sin_cache, "_ R", torch.float32, letters)
    heads, head_dim, rope_dim = letters["H"], letters["D"], letters["R"]
    if not 0 < rope_dim < head_dim:
        raise ArgumentError("cos_sin_cache", expected=f"fewer columns than the {head_dim} dims of q", actual=rope_dim)
    cache = PagedKVCache(swa_kv_cache, _layout(head_dim - rope_dim, rope_dim), block_size=block_size)
    layer = layer_of(heads, head_dim, rope_dim, 1.0)
    check_insert(q, kv, positions, slot_mapping, cos_sin_cache, cache, layer)
    read = {"kv": kv, "slot_mapping": slot_mapping, "positions": positions, "cos_sin_cache": cos_sin_cache}
    check_results_apart({"q": q, "swa_kv_cache": swa_kv_cache}, **read)
    _backend().qnorm_rope_kv_insert(q, kv, cache, slot_mapping, positions, cos_sin_cache, eps)


# shared by these functions


def _segment(
    q: Tensor,
    layout: KVCacheLayout,
    names: tuple[str, str],
    cache: Tensor | None,
    indices: Tensor | None,
    lens: Tensor | None,
) -> PagedKeys:
    """One cache and the index rows into it, checked. names: of the cache, and the prefix of the others."""
    rows = check_rows(q, (f"{names[1]}indices", f"{names[1]}lens"), indices, lens)
    check_tensor(names[0], cache, f"_ _ {layout.record_bytes}", torch.uint8, {})
    check_same_device(q, **{names[0]: cache})
    assert cache is not None
    assert lens is not None
    return PagedKeys(PagedKVCache(cache, layout), DenseIndices(rows, lens))


def _check_interface(
    q: Tensor,
    kv: Tensor,
    indices: Tensor | None,
    d_v: int,
    block_dpe: int,
    attn_sink: Tensor | None,
    topk_length: Tensor | None,
    out: Tensor | None,
    max_logits: Tensor | None,
    lse: Tensor | None,
) -> None:
    """Raise ArgumentError unless the arguments of the interface fit each other."""
    letters: dict[str, int] = {}
    check_tensor("q", q, "T H D", FLOATS, letters)
    check_tensor("kv", kv, "_ 1 D", FLOATS, letters)
    check_tensor("indices", indices, "T K", torch.int32, letters)
    check_optional("attn_sink", attn_sink, "H", torch.float32, letters)
    check_optional("topk_length", topk_length, "T", torch.int32, letters)
    dims = q.shape[2]
    if not 0 < d_v <= min(dims, _WIDEST):
        raise ArgumentError("d_v", expected=f"1 .. {min(dims, _WIDEST)}", actual=d_v)
    if dims - d_v > _TAIL:
        raise ArgumentError("q", expected=f"at most {d_v} + {_TAIL} dims for d_v={d_v}", actual=dims)
    if block_dpe not in (0, dims - d_v):
        expected = " or ".join(map(str, sorted({0, dims - d_v})))
        raise ArgumentError("block_dpe", expected=f"{expected}, the dims of q after d_v={d_v}", actual=block_dpe)
    if out is not None:
        check_tensor("out", out, f"T H {d_v}", q.dtype, letters, written=True)
    for name, result in (("max_logits", max_logits), ("lse", lse)):
        check_optional(name, result, "T H", torch.float32, letters)
        if result is not None and not result.is_contiguous():
            raise ArgumentError(name, expected="contiguous memory", actual=list(result.stride()))
    optional = {"attn_sink": attn_sink, "topk_length": topk_length, "out": out}
    check_same_device(q, kv=kv, indices=indices, max_logits=max_logits, lse=lse, **optional)
    read = {"kv": kv, "indices": indices, "attn_sink": attn_sink, "topk_length": topk_length}
    check_results_apart({"out": out, "max_logits": max_logits, "lse": lse}, q=q, **read)

"""Steps of DeepSeek-V4.1's compressor: latents of the tokens of a step, and keys or index keys that are stored of them.

This file launches `kernels_latents`. Bits of a latent and of a record depend on their own tokens alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache as cached
from typing import Any

import torch
from torch import Tensor

from dsv4attn.backends._triton.cache.records import (
    alignment_of_records,
    alignment_of_rows,
    record_alignments,
    record_strides,
    row_alignments,
)
from dsv4attn.backends._triton.compiling.variant import Variant, pointer_type
from dsv4attn.backends._triton.launching.runtime import INTERPRETED, WIDE, launch
from dsv4attn.backends._triton.layer.compress import entry_constants
from dsv4attn.backends._triton.layer.kernels_latents import latent_kernel, ring_kernel, store_kernel
from dsv4attn.core.cache.layout import KVCacheLayout, PagedKVCache
from dsv4attn.core.tensorspec import check_strides
from dsv4attn.core.torch_modes import without_modes
from dsv4attn.core.torch_ops.latents import check_ring

__all__ = ["MOST", "compress_latents", "norm_rope_store", "variants"]

MOST = 8
"""Tokens of a window that a program holds."""
WARP_DIMS = 512
"""Dims of a row that a warp holds: 16 a thread."""


def compress_latents(
    kv: Tensor,
    score: Tensor | None,
    positions: Tensor,
    token_to_req: Tensor,
    norm_weight: Tensor,
    eps: float,
    ratio: int,
    states: PagedKVCache | None = None,
    state_block_table: Tensor | None = None,
) -> Tensor:
    """See `definitions`, compress_latents; ratio is at most MOST."""
    check_ring(ratio, score, states, state_block_table, tokens=kv.shape[0])
    given = {"kv": kv, "positions": positions, "token_to_req": token_to_req, "norm_weight": norm_weight}
    optional = {"score": score, "state_block_table": state_block_table}
    check_strides(**given, **{name: tensor for name, tensor in optional.items() if tensor is not None})
    count, dim = kv.shape
    out = kv.new_empty(count, dim, dtype=torch.bfloat16)
    ring = (0,) * 7
    if states is not None and state_block_table is not None:
        page, row, _, _ = record_strides(states)
        table = *state_block_table.shape, state_block_table.stride(0)
        ring = *table, states.num_blocks, states.block_size, page, row
    strides = kv.stride(0), 0 if score is None else score.stride(0)
    rows = alignment_of_rows(kv) if score is None else alignment_of_rows(kv, score)
    aligned = rows, WIDE if states is None else alignment_of_records(states)
    pages = None if states is None else states.tensor
    warps, tensors = _warps(dim), (kv, score, positions, token_to_req)
    latent = (*tensors, norm_weight, pages, state_block_table, out, *strides, float(eps), *ring)
    launch(latent_kernel, (count,), latent, _latent_constants(dim, ratio, *aligned), num_warps=warps, fp_fusion=False)
    if states is not None:
        # a launch of its own, as a token may take the row of one that another token of this step reads
        saved = *tensors, pages, state_block_table, count, *strides, *ring
        launch(ring_kernel, (count,), saved, _ring_constants(dim, *aligned), num_warps=warps, fp_fusion=False)
    return out


@without_modes
def norm_rope_store(
    x: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    norm_weight: Tensor | None,
    eps: float,
    cos_sin_cache: Tensor,
    ratio: int,
    cache: PagedKVCache,
) -> None:
    """See `definitions`, norm_rope_store."""
    check_strides(x=x, positions=positions, slot_mapping=slot_mapping, cos_sin_cache=cos_sin_cache)
    if norm_weight is not None:
        check_strides(norm_weight=norm_weight)
    launch(
        store_kernel,
        (min(x.shape[0], slot_mapping.shape[0]),),
        (
            x, positions, slot_mapping, norm_weight, cos_sin_cache, cache.tensor, x.stride(0), float(eps),
            cos_sin_cache.shape[0], cos_sin_cache.stride(0), cache.num_blocks, cache.block_size, *record_strides(cache),
        ),
        _store_constants(
            cache.layout, cos_sin_cache.shape[1], ratio, alignment_of_rows(x), alignment_of_records(cache)
        ),
        num_warps=_warps(x.shape[1]),
        fp_fusion=False,
    )  # fmt: skip


def _warps(dim: int) -> int:
    return max(dim // WARP_DIMS, 1)


@cached
def _latent_constants(dim: int, ratio: int, rows: int, states: int) -> dict[str, Any]:
    return {"RATIO": ratio, **_ring_constants(dim, rows, states), "EXACT_CASTS": not INTERPRETED}


@cached
def _ring_constants(dim: int, rows: int, states: int) -> dict[str, Any]:
    return {"D": dim, "ROW_ALIGNED": rows, "STATES_ALIGNED": states}


@cached
def _store_constants(layout: KVCacheLayout, rope: int, ratio: int, rows: int, records: int) -> dict[str, Any]:
    return {**entry_constants(layout, rope), "RATIO": ratio, "ROW_ALIGNED": rows, "ALIGNED": records}


def latent_variants(
    dim: int, ratio: int, *, aligned: bool = True, aligned_rows: bool = True, norms: tuple[torch.dtype, ...]
) -> Iterator[Variant]:
    """Every variant that `compress_latents` can need with entries of `dim` channels.

    aligned, aligned_rows: whether caches are, and rows of kv and scores, to 16 bytes. norms: dtypes of the weight of
    the norm.
    """
    if ratio > MOST:
        return
    types = dict.fromkeys(("KV", "SCORE", "STATES"), "*fp32") | {"POSITIONS": "*i64", "OUT": "*bf16"}
    types |= dict.fromkeys(("REQUESTS", "TABLE"), "*i32")
    if ratio == 1:
        types |= dict.fromkeys(("SCORE", "STATES", "TABLE"), "none")
    layout, warps = KVCacheLayout.compressor_state(dim), _warps(dim)
    for rows in row_alignments(dim, torch.float32, aligned=aligned_rows):
        for states in (WIDE,) if ratio == 1 else record_alignments(layout, aligned=aligned):
            for norm in norms:
                named, constants = types | {"WEIGHT": pointer_type(norm)}, _latent_constants(dim, ratio, rows, states)
                yield Variant.from_types(latent_kernel, named, constants, num_warps=warps, fp_fusion=False)
            if ratio > 1:
                constants = _ring_constants(dim, rows, states)
                yield Variant.from_types(ring_kernel, types, constants, num_warps=warps, fp_fusion=False)


def variants(
    layout: KVCacheLayout,
    ratio: int,
    rope: int,
    dtype: torch.dtype,
    norms: tuple[torch.dtype | None, ...],
    *,
    aligned: bool = True,
    aligned_rows: bool = True,
) -> Iterator[Variant]:
    """Every variant that `norm_rope_store` can need with x of a dtype, and records of a layout.

    norms: dtypes of the weight of the norm, None without one. aligned, aligned_rows: as of `latent_variants`.
    """
    types = {"X": pointer_type(dtype), "POSITIONS": "*i64", "SLOTS": "*i64", "ANGLES": "*fp32"}
    types["CACHE"], dim = pointer_type(layout.dtype), layout.head_dim
    for rows in row_alignments(dim, dtype, aligned=aligned_rows):
        for records in record_alignments(layout, aligned=aligned):
            constants = _store_constants(layout, rope, ratio, rows, records)
            for norm in norms:
                named = types | {"WEIGHT": "none" if norm is None else pointer_type(norm)}
                yield Variant.from_types(store_kernel, named, constants, num_warps=_warps(dim), fp_fusion=False)

"""Ops of DeepSeek-V4.1's compressor: latents of the tokens of a step, and keys or index keys that are stored of them.

This file launches `kernels_latents`. Bits of a latent and of a record depend on their own tokens alone.
"""

from __future__ import annotations

from functools import cache as cached

import torch
from torch import Tensor

from dsv4attn.backends._triton.cache.forms import PageNumbers
from dsv4attn.backends._triton.cache.records import (
    alignment_of_records,
    alignment_of_rows,
    page_numbers,
    record_alignments,
    row_alignments,
    table_numbers,
)
from dsv4attn.backends._triton.compiling.variant import WIDE
from dsv4attn.backends._triton.interpreted import INTERPRETED
from dsv4attn.backends._triton.launching.launch_cache import Constants
from dsv4attn.backends._triton.launching.recorded import meta_cache, meta_rows, recorded
from dsv4attn.backends._triton.launching.runtime import architecture, launch
from dsv4attn.backends._triton.layer.compressor.kernels_latents import latent_kernel, ring_kernel, store_kernel
from dsv4attn.backends._triton.layer.compressor.launch import entry_form, pdl_of, state_numbers
from dsv4attn.core.cache.layout import KVCacheLayout, PagedKVCache
from dsv4attn.core.tensorspec import check_strides
from dsv4attn.core.torch_modes import without_modes
from dsv4attn.core.torch_ops import latents as torch_latents
from dsv4attn.core.torch_ops.arguments import EntryNorm, StatePages
from dsv4attn.core.torch_ops.latents import check_ring

MOST = 8
"""Tokens of a window that a program holds."""
WARP_DIMS = 512
"""Dims of a row that a warp holds: 16 a thread."""
_NOTHING = table_numbers(None), PageNumbers(0, 0, 0, 0, 0, 0)


@without_modes
def compress_latents(
    kv: Tensor,
    score: Tensor | None,
    positions: Tensor,
    token_to_req: Tensor,
    norm_weight: Tensor,
    eps: float,
    ratio: int,
    states: StatePages | None = None,
    *,
    deterministic: bool = False,
) -> Tensor:
    """See `torch_ops.latents`, which pools windows of more than MOST tokens. deterministic: of that op."""
    if ratio > MOST:
        return torch_latents.compress_latents(
            kv, score, positions, token_to_req, norm_weight, eps, ratio, states, deterministic=deterministic
        )
    check_ring(ratio, score, states, tokens=kv.shape[0])
    check_strides(kv=kv, positions=positions, token_to_req=token_to_req, norm_weight=norm_weight)
    count, dim = kv.shape
    out = kv.new_empty(count, dim, dtype=torch.bfloat16)
    rows, records, score_stride, pages, table = alignment_of_rows(kv), WIDE, 0, None, None
    numbers = _NOTHING if states is None else state_numbers(states)
    if score is not None and states is not None:
        pages, table, score_stride = states.cache.tensor, states.block_table, score.stride(0)
        check_strides(score=score, block_table=table)
        rows = alignment_of_rows(kv, score)
        records = alignment_of_records(states.cache.layout, states.cache.memory)
    launch(
        latent_kernel,
        (count,),
        (
            kv, score, positions, token_to_req, norm_weight, pages, table, out, kv.stride(0), score_stride, float(eps),
            *numbers,
        ),
        _latent_constants(dim, ratio, rows, records, architecture()),
        num_warps=_warps(dim),
        fp_fusion=False,
    )  # fmt: skip
    if states is not None:
        # a launch of its own, as a token may take the row of one that another token of this step reads
        launch(
            ring_kernel,
            (count,),
            (kv, score, positions, token_to_req, pages, table, count, kv.stride(0), score_stride, *numbers),
            _ring_constants(dim, rows, records, architecture()),
            num_warps=_warps(dim),
            fp_fusion=False,
        )
    return out


@without_modes
def norm_rope_store(
    x: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    norm: EntryNorm,
    ratio: int,
    cache: PagedKVCache,
) -> None:
    """See `torch_ops.latents`."""
    weight, angles = norm.weight, norm.cos_sin_cache
    check_strides(x=x, positions=positions, slot_mapping=slot_mapping, cos_sin_cache=angles)
    if weight is not None:
        check_strides(norm_weight=weight)
    memory = cache.memory
    records = alignment_of_records(cache.layout, memory)
    launch(
        store_kernel,
        (min(x.shape[0], slot_mapping.shape[0]),),
        (
            x, positions, slot_mapping, weight, angles, cache.tensor, x.stride(0), float(norm.eps),
            angles.shape[0], angles.stride(0), page_numbers(cache, memory),
        ),
        _store_constants(cache.layout, angles.shape[1], ratio, alignment_of_rows(x), records, architecture()),
        num_warps=_warps(x.shape[1]),
        fp_fusion=False,
    )  # fmt: skip


def _warps(dim: int) -> int:
    return max(dim // WARP_DIMS, 1)


@cached
def _latent_constants(dim: int, ratio: int, rows: int, states: int, arch: str) -> Constants:
    return Constants({"RATIO": ratio, **_ring_constants(dim, rows, states, arch), "EXACT_CASTS": not INTERPRETED})


@cached
def _ring_constants(dim: int, rows: int, states: int, arch: str) -> Constants:
    return Constants({"D": dim, "ROW_ALIGNED": rows, "STATES_ALIGNED": states, **pdl_of(arch)})


@cached
def _store_constants(layout: KVCacheLayout, rope: int, ratio: int, rows: int, records: int, arch: str) -> Constants:
    return Constants({"ENTRY": entry_form(layout, rope, ratio, records), "ROW_ALIGNED": rows, **pdl_of(arch)})


@recorded
def latent_variants(
    dim: int, ratio: int, *, aligned: bool = True, aligned_rows: bool = True, norms: tuple[torch.dtype, ...]
) -> None:
    """Every variant that `compress_latents` can need with entries of `dim` channels.

    aligned, aligned_rows: whether caches are, and rows of kv and scores, to 16 bytes. norms: dtypes of the weight of
    the norm.
    """
    if ratio > MOST:
        return
    layout, positions = KVCacheLayout.compressor_state(dim), meta_rows(2, dtype=torch.int64)
    for rows in row_alignments(dim, torch.float32, aligned=aligned_rows):
        kv = meta_rows(2, dim, dtype=torch.float32, alignment=rows)
        for records in (WIDE,) if ratio == 1 else record_alignments(layout, aligned=aligned):
            states = StatePages(meta_cache(layout, records), meta_rows(2, 2))
            score, rings = (None, None) if ratio == 1 else (kv, states)
            for norm in norms:
                compress_latents(kv, score, positions, meta_rows(2), meta_rows(dim, dtype=norm), 0.0, ratio, rings)


@recorded
def variants(
    layout: KVCacheLayout,
    ratio: int,
    rope: int,
    dtype: torch.dtype,
    norms: tuple[torch.dtype | None, ...],
    *,
    aligned: bool = True,
    aligned_rows: bool = True,
) -> None:
    """Every variant that `norm_rope_store` can need with x of a dtype, and records of a layout.

    norms: dtypes of the weight of the norm, None without one. aligned, aligned_rows: as of `latent_variants`.
    """
    dim, angles, slots = layout.head_dim, meta_rows(2, rope, dtype=torch.float32), meta_rows(2, dtype=torch.int64)
    for rows in row_alignments(dim, dtype, aligned=aligned_rows):
        x = meta_rows(2, dim, dtype=dtype, alignment=rows)
        for records in record_alignments(layout, aligned=aligned):
            for norm in norms:
                weight = None if norm is None else meta_rows(dim, dtype=norm)
                norm_rope_store(x, slots, slots, EntryNorm(weight, 0.0, angles), ratio, meta_cache(layout, records))

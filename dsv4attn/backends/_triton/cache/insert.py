"""Insert ops: q normalised and rotated in place; keys rotated, rounded, quantised and stored.

This file launches `kernels_insert`: it chooses tiles, warps and constants.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from dsv4attn.backends._triton.cache.kernels_insert import insert_kernel, qnorm_rope_kv_insert_kernel
from dsv4attn.backends._triton.cache.records import (
    alignment_of_records,
    alignment_of_rows,
    page_numbers,
    record_alignments,
    row_alignments,
    writer_form,
)
from dsv4attn.backends._triton.interpreted import INTERPRETED
from dsv4attn.backends._triton.launching.launch_cache import Constants
from dsv4attn.backends._triton.launching.pdl import uses_pdl
from dsv4attn.backends._triton.launching.recorded import meta_cache, meta_rows, recorded
from dsv4attn.backends._triton.launching.runtime import architecture, launch
from dsv4attn.backends._triton.sizes import cdiv, next_power_of_2
from dsv4attn.core.attention.checks import check_keys
from dsv4attn.core.cache.layout import KVCacheLayout, PagedKVCache
from dsv4attn.core.tensorspec import check_strides

TILE = 4096
"""Values of q that a program takes: eight heads of the model's."""
FUSED_WARPS = 8
"""With 8 warps a thread has two wide loads of q in flight and 40 registers, so that an SM is fully occupied."""
INSERT_WARPS = 1


def quantize_and_insert_k_cache(k: Tensor, cache: PagedKVCache, slot_mapping: Tensor) -> None:
    """Write rotated keys k [n, D], bf16 or fp32, to their slots; see `contract.Backend`."""
    check_keys(k, cache, slot_mapping)
    memory = cache.memory
    launch(
        insert_kernel,
        (min(k.shape[0], slot_mapping.shape[0]),),
        (k, cache.tensor, slot_mapping, k.stride(0), page_numbers(cache, memory)),
        _insert_constants(
            cache.layout, alignment_of_rows(k), alignment_of_records(cache.layout, memory), architecture()
        ),
        num_warps=INSERT_WARPS,
        fp_fusion=False,
    )


def qnorm_rope_kv_insert(
    q: Tensor,
    kv: Tensor,
    cache: PagedKVCache,
    slot_mapping: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    eps: float | None,
) -> None:
    """Normalise and rotate q [T, H, D] in place; rotate a copy of kv [T, D] and insert it; see `contract.Backend`."""
    tensors = {"q": q, "kv": kv, "slot_mapping": slot_mapping, "positions": positions}
    check_strides(written=("q",), cos_sin_cache=cos_sin_cache, **tensors)
    memory = cache.memory
    facts = alignment_of_rows(q, kv), alignment_of_records(cache.layout, memory), architecture()
    constants = _fused_constants(cache.layout, q.shape[1], *facts, norm=eps is not None)
    launch(
        qnorm_rope_kv_insert_kernel,
        (q.shape[0] * (cdiv(q.shape[1], constants["BLOCK_H"]) + 1),),
        (
            q, kv, cache.tensor, slot_mapping, positions, cos_sin_cache,
            q.stride(0), q.stride(1), kv.stride(0), cos_sin_cache.stride(0), cos_sin_cache.shape[0],
            slot_mapping.shape[0], float(eps or 0.0), page_numbers(cache, memory),
        ),
        constants,
        num_warps=FUSED_WARPS,
        fp_fusion=False,
    )  # fmt: skip


@cache
def _insert_constants(layout: KVCacheLayout, rows: int, records: int, arch: str) -> Constants:
    form, overlapped = writer_form(layout, records), uses_pdl(arch) and not INTERPRETED
    return Constants({"ROW_ALIGNED": rows, "WRITER": form, "PDL": overlapped})


@cache
def _fused_constants(layout: KVCacheLayout, heads: int, rows: int, records: int, arch: str, *, norm: bool) -> Constants:
    block = max(TILE // next_power_of_2(layout.head_dim), 1)
    block = min(block, next_power_of_2(max(heads, 1)))
    of_q = {"HEADS": heads, "BLOCK_H": block, "NORM": norm}
    return Constants({**of_q, **_insert_constants(layout, rows, records, arch)})


@recorded
def variants(
    layout: KVCacheLayout,
    heads: int,
    dtype: torch.dtype,
    *,
    aligned: bool = True,
    aligned_rows: bool = True,
    norm: bool = True,
) -> None:
    """Every variant that the ops of this module can need, with q and kv of one dtype and k that is bf16 or fp32.

    aligned, aligned_rows: whether caches are, and rows of q, kv and k, to 16 bytes. norm: whether q is normalised.
    """
    dim, slots, table = layout.head_dim, meta_rows(2, dtype=torch.int64), meta_rows(2, 2, dtype=torch.float32)
    for records in record_alignments(layout, aligned=aligned):
        cache = meta_cache(layout, records)
        for k_dtype in (torch.bfloat16, torch.float32):
            for rows in row_alignments(dim, k_dtype, aligned=aligned_rows):
                quantize_and_insert_k_cache(meta_rows(2, dim, dtype=k_dtype, alignment=rows), cache, slots)
        for rows in row_alignments(dim, dtype, aligned=aligned_rows):
            q, kv = (meta_rows(*shape, dim, dtype=dtype, alignment=rows) for shape in ((2, heads), (2,)))
            qnorm_rope_kv_insert(q, kv, cache, slots, slots, table, 1.0 if norm else None)

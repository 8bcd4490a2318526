"""Ops of the compressor: states of tokens to their slots, entries from the states of their window.

This file launches `kernels`. Bits of a state and of an entry depend on their own tokens alone.
"""

from __future__ import annotations

from functools import cache as cached

import torch
from attrs import frozen
from torch import Tensor

from dsv4attn.backends._triton.cache.forms import PageNumbers, TableNumbers
from dsv4attn.backends._triton.cache.records import (
    alignment_of_records,
    alignment_of_rows,
    page_numbers,
    record_alignments,
    row_alignments,
    table_numbers,
    writer_form,
)
from dsv4attn.backends._triton.compiling.variant import WIDE
from dsv4attn.backends._triton.interpreted import INTERPRETED
from dsv4attn.backends._triton.launching.launch_cache import Constants
from dsv4attn.backends._triton.launching.pdl import uses_pdl
from dsv4attn.backends._triton.launching.recorded import meta_cache, meta_rows, recorded
from dsv4attn.backends._triton.launching.runtime import architecture, launch
from dsv4attn.backends._triton.layer.compressor.forms import EntryForm, PoolForm
from dsv4attn.backends._triton.layer.compressor.kernels import compress_kernel, pool_kernel, save_kernel
from dsv4attn.backends._triton.sizes import cdiv, next_power_of_2
from dsv4attn.core.cache.layout import KVCacheLayout, PagedKVCache
from dsv4attn.core.tensorspec import check_norm_weight, check_strides
from dsv4attn.core.torch_modes import without_modes
from dsv4attn.core.torch_ops.arguments import EntryNorm, StatePages
from dsv4attn.errors import ArgumentError

SAVE_TILE, SAVE_WARPS = 1024, 4
"""Channels that a program saves, and its warps."""
PROGRAMS = 256
"""With fewer tokens a program looks at one of them, with more at several, but not at more than a window has."""
MOST_TOKENS = 128
"""Tokens that a program looks at."""
SPILLS = 16
"""Bytes that a thread of `pool_kernel` stores and loads with Triton 3.6 on sm_90; with Triton 3.9 none."""
FP32_ROW = 128
"""Values of fp32 that a warp of 32 threads reads at once."""
MOST_ALONE = 32
"""Rows of the longest windows that one program pools: as many as it reads at a time. For longer ones `pool_kernel` is
launched first."""
POOL_DIMS = 32
"""Dims that a program of `pool_kernel` pools."""
POOL_TILES = 4
"""Tiles of a window that such a program reads at a time: all of a c128a entry. A thread has one dim of a lane."""
POOL_PROGRAMS = 512
"""With fewer tokens times slices of dims a program of `pool_kernel` looks at one token, with more at several."""
MOST_POOLED = 2**14
"""Tokens whose pooled entries have memory at a time: 32 MB for 512 dims."""


@frozen
class Pool:
    """How a program reads a window: `lanes` times `rows` rows of states at a time, with `warps` warps.

    A thread has all rows of its lane, and four channels, so that a window is read without exchange between threads.
    """

    rows: int
    lanes: int
    warps: int


LONG = Pool(8, 4, 16)
"""For windows of more than eight rows: a program has 128 KB under way, which a core of an H200 needs."""
UNALIGNED = Pool(4, 4, 16)
"""For long windows of states out of step with 16 bytes, whose addresses take more registers."""
SHORT = Pool(8, 1, 16)
"""For short windows, which are read at once."""


def _splits(ratio: int, *, overlap: bool) -> bool:
    """Whether windows are pooled by several programs each; it must not depend on a step, as bits may."""
    return ratio * (2 if overlap else 1) > MOST_ALONE


def pool_for(window: int, block: int, aligned: int, arch: str) -> Pool:
    """How windows of `window` rows are read. block: channels of an entry, a power of two. aligned: of states, bytes."""
    most = SHORT if window <= SHORT.rows * SHORT.lanes else LONG if aligned == WIDE else UNALIGNED
    rows = min(most.rows, next_power_of_2(window))
    lanes = min(most.lanes, next_power_of_2(cdiv(window, rows)))
    wide = 2 if arch.startswith("gfx9") else 1  # a warp has 64 threads
    warps = block * lanes // (FP32_ROW * wide)
    return Pool(rows, lanes, min(max(warps, 1), most.warps // wide))


@without_modes
def save_partial_states(
    kv: Tensor, score: Tensor, ape: Tensor, positions: Tensor, cache: PagedKVCache, slot_mapping: Tensor
) -> None:
    """Write kv, and score plus the bias of its place in the window, to state slots; see `torch_ops.compressor`."""
    check_strides(kv=kv, score=score, ape=ape, positions=positions, slot_mapping=slot_mapping)
    tokens = min(kv.shape[0], slot_mapping.shape[0])
    memory = cache.memory
    facts = alignment_of_rows(kv, score, ape), alignment_of_records(cache.layout, memory), architecture()
    constants = _save_constants(kv.shape[1], *facts)
    launch(
        save_kernel,
        (cdiv(tokens, constants["TOKENS"]),),
        (
            kv, score, ape, positions, cache.tensor, slot_mapping, tokens, ape.shape[0],
            kv.stride(0), score.stride(0), ape.stride(0), page_numbers(cache, memory),
        ),
        constants,
        num_warps=SAVE_WARPS,
        fp_fusion=False,
    )  # fmt: skip


@without_modes
def compress_norm_rope_store(
    states: StatePages,
    token_to_req: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    norm: EntryNorm,
    ratio: int,
    cache: PagedKVCache,
    *,
    overlap: bool,
) -> None:
    """Make the entries that the tokens of a step complete, and store them; see `torch_ops.compressor`."""
    weight, angles, layout = check_norm_weight(norm.weight, cache.layout.head_dim), norm.cos_sin_cache, cache.layout
    check_strides(
        block_table=states.block_table, token_to_req=token_to_req, positions=positions, slot_mapping=slot_mapping,
        norm_weight=weight, cos_sin_cache=angles,
    )  # fmt: skip
    n = min(positions.shape[0], slot_mapping.shape[0])
    splits = _splits(ratio, overlap=overlap)
    if splits and n > MOST_POOLED:
        for first in range(0, n, MOST_POOLED):
            part = slice(first, first + MOST_POOLED)
            requests, places, slots = token_to_req[part], positions[part], slot_mapping[part]
            compress_norm_rope_store(states, requests, places, slots, norm, ratio, cache, overlap=overlap)
        return
    memory, state_memory = cache.memory, states.cache.memory
    records = alignment_of_records(layout, memory)
    aligned, rope = alignment_of_records(states.cache.layout, state_memory), angles.shape[1]
    constants, warps = _compress_constants(layout, ratio, rope, aligned, records, architecture(), overlap=overlap)
    tokens = min(max(cdiv(n, PROGRAMS), 1), constants["TOKENS"])
    pooled = None
    if splits:
        pooled = states.cache.tensor.new_empty(n, layout.head_dim)
        _pool(states, token_to_req, positions, slot_mapping, pooled, cache, ratio, overlap=overlap)
    launch(
        compress_kernel,
        (cdiv(n, tokens),),
        (
            states.cache.tensor, states.block_table, token_to_req, positions, slot_mapping, pooled, weight, angles,
            cache.tensor, n, tokens, float(norm.eps), *state_numbers(states), _inverse(states), angles.shape[0],
            angles.stride(0), page_numbers(cache, memory),
        ),
        constants,
        num_warps=warps,
    )  # fmt: skip


def state_numbers(states: StatePages) -> tuple[TableNumbers, PageNumbers]:
    """Numbers of the block table, and of the pages, of states."""
    return table_numbers(states.block_table), page_numbers(states.cache, states.cache.memory)


def _inverse(states: StatePages) -> int:
    """A number by which kernels divide by the size of a page of states, see `pool_kernel`."""
    return -(-(2**48) // states.cache.block_size)


def _pool(
    states: StatePages,
    token_to_req: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    pooled: Tensor,
    cache: PagedKVCache,
    ratio: int,
    *,
    overlap: bool,
) -> None:
    """Write to pooled [n, D] fp32 the rows of tokens that complete an entry."""
    n, dim = pooled.shape
    constants, warps = _pool_constants(dim, ratio, architecture(), overlap=overlap)
    slices = cdiv(dim, constants["POOL"].block)
    tokens = min(max(cdiv(n * slices, POOL_PROGRAMS), 1), constants["TOKENS"])
    launch(
        pool_kernel,
        (cdiv(n, tokens) * slices,),
        (
            states.cache.tensor, states.block_table, token_to_req, positions, slot_mapping, pooled, n, tokens,
            *state_numbers(states), _inverse(states), page_numbers(cache, cache.memory),
        ),
        constants,
        num_warps=warps,
        spills=SPILLS,
    )  # fmt: skip


def pdl_of(arch: str) -> dict[str, bool]:
    """The constant PDL of a kernel of a step."""
    return {"PDL": uses_pdl(arch) and not INTERPRETED}


@cached
def _save_constants(width: int, rows: int, records: int, arch: str) -> Constants:
    tokens = max(SAVE_TILE // next_power_of_2(width), 1)
    return Constants({"WIDTH": width, "TOKENS": tokens, "ROW_ALIGNED": rows, "ALIGNED": records, **pdl_of(arch)})


@cached
def _compress_constants(
    layout: KVCacheLayout, ratio: int, rope: int, states: int, records: int, arch: str, *, overlap: bool
) -> tuple[Constants, int]:
    """Constants of a launch, and its warps. states, records: alignments."""
    entry = entry_form(layout, rope, ratio, records)
    size, window = entry.groups * entry.size, ratio * (2 if overlap else 1)
    if _splits(ratio, overlap=overlap):  # the kernel reads no states
        window, states = 1, 1
    pool = pool_for(window, size, states, arch)
    form = PoolForm(layout.head_dim, ratio, overlap, pool.rows, pool.lanes, 1, size, states)
    tokens = min(next_power_of_2(ratio), MOST_TOKENS)
    return Constants({"POOL": form, "ENTRY": entry, "TOKENS": tokens, **pdl_of(arch)}), pool.warps


def entry_form(layout: KVCacheLayout, rope: int, ratio: int, records: int) -> EntryForm:
    """The form of entries, or of index keys, for kernels that store them from registers. records: alignment of records.

    Raises ArgumentError for a table of other dims than those that rotate, and for records that are not written here.
    """
    if layout.rope_dim not in (0, rope) and layout.is_quantised:
        raise ArgumentError("cos_sin_cache", expected=f"[_, {layout.rope_dim}]", actual=f"[_, {rope}]")
    writer = writer_form(layout, records)
    if layout.coded_dims > layout.nope_dim and layout.nope_dim % 2:
        expected = "an even number of dims before those that rotate"
        hint = "pairs of them stand in one group then; write with the ops of the reference backend"
        raise ArgumentError("cache layout", expected=expected, actual=layout.fingerprint, hint=hint)
    dim, quantised = layout.head_dim, layout.is_quantised
    nope, group = (layout.coded_dims, layout.group_size) if quantised else (dim, dim)
    float_scale = layout.scale_dtype == torch.float32
    pads = layout.scale_bytes if quantised and not float_scale else 1
    if nope == dim and group >= dim:
        size, rows, in_order = next_power_of_2(dim + (dim - rope) % 2), 1, True
    else:
        size = next_power_of_2(group)
        rows, in_order = layout.num_groups + cdiv(dim - nope, size), size == group and nope % group == 0
    places = next_power_of_2(max(rows, pads)), size, in_order
    return EntryForm(dim, rope, ratio, nope, group, layout.scale_bytes, float_scale, *places, writer)


@cached
def _pool_constants(dim: int, ratio: int, arch: str, *, overlap: bool) -> tuple[Constants, int]:
    """Constants of a launch of `pool_kernel`, and its warps: entries of `dim` channels."""
    window, block = ratio * (2 if overlap else 1), min(next_power_of_2(dim), POOL_DIMS)
    tiles = min(next_power_of_2(cdiv(window, LONG.rows * LONG.lanes)), POOL_TILES)
    threads = 64 if arch.startswith("gfx9") else 32
    form = PoolForm(dim, ratio, overlap, LONG.rows, LONG.lanes, tiles, block, 1)
    constants = Constants({"POOL": form, "TOKENS": min(next_power_of_2(ratio), MOST_TOKENS), **pdl_of(arch)})
    return constants, max(block * LONG.lanes // threads, 1)


@recorded
def variants(
    layout: KVCacheLayout,
    ratio: int,
    rope: int,
    *,
    overlap: bool,
    aligned: bool = True,
    aligned_rows: bool = True,
    norms: tuple[torch.dtype, ...] = (torch.float32,),
) -> None:
    """Every variant that the ops of this module can need, for entries of a layout.

    aligned, aligned_rows: whether caches are, and rows of kv, scores and their bias, to 16 bytes. norms: dtypes of
    the weight of the norm.
    """
    width = layout.head_dim * (2 if overlap else 1)
    state_layout, angles = KVCacheLayout.compressor_state(width), meta_rows(2, rope, dtype=torch.float32)
    requests, slots = meta_rows(2), meta_rows(2, dtype=torch.int64)
    for states in record_alignments(state_layout, aligned=aligned):
        pages = StatePages(meta_cache(state_layout, states), meta_rows(2, 2))
        for rows in row_alignments(width, torch.float32, aligned=aligned_rows):
            kv = meta_rows(2, width, dtype=torch.float32, alignment=rows)
            save_partial_states(kv, kv, kv, slots, pages.cache, slots)
        for records in record_alignments(layout, aligned=aligned):
            cache = meta_cache(layout, records)
            for dtype in norms:
                norm = EntryNorm(meta_rows(layout.head_dim, dtype=dtype), 0.0, angles)
                compress_norm_rope_store(pages, requests, slots, slots, norm, ratio, cache, overlap=overlap)

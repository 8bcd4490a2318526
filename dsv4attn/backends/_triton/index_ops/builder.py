"""Index arithmetic of the metadata builder, once a step: the launcher of `kernels_builder`.

BUILDER_OPS is the `builder_ops` of `MetadataBuilder`. `torch_ops.index_ops` is the definition of every function here,
and the integers are equal. A step of all layer kinds takes eight launches, and one more for each kind that has entries,
and for its states, where requests have a prefix hit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4attn.backends._triton.index_ops.common import depth_of
from dsv4attn.backends._triton.index_ops.dense import compute_global_topk_indices_and_lens
from dsv4attn.backends._triton.index_ops.kernels_builder import (
    cached_kernel,
    compressed_kernel,
    gather_lens_kernel,
    token_maps_kernel,
    window_kernel,
)
from dsv4attn.backends._triton.launching.launch_cache import Constants
from dsv4attn.backends._triton.launching.recorded import meta_rows, recorded
from dsv4attn.backends._triton.launching.runtime import architecture, launch
from dsv4attn.backends._triton.sizes import cdiv, next_power_of_2
from dsv4attn.core.cache.ownership import Ownership
from dsv4attn.core.cache.selected_keys import PageTable, StepTokens
from dsv4attn.core.contract.builder_ops import BuilderOps
from dsv4attn.core.tensorspec import check_strides

BLOCK = 256
"""Tokens, or requests, of a program that writes a number for each."""
_CONSTANTS = Constants({"BLOCK": BLOCK})
_ENTRIES, _OWNED_ENTRIES = (Constants({"BLOCK": BLOCK, "OWNED": owned}) for owned in (False, True))
WINDOW_TILE = 2048
"""Slots that a program writes together."""
WINDOW_WARPS = {"sm_86": 8, "sm_89": 8}
"""By architecture; 4 on all others. There 4 warps spill 8 bytes a thread (compiled with Triton 3.9, 2026-11-22; not
measured)."""


def _tile_of(window: int) -> dict[str, int]:
    """Tokens of a program that writes windows, and columns that it writes together. Wider rows take several rounds."""
    columns = next_power_of_2(window)
    return {"TOKENS": max(WINDOW_TILE // columns, 1), "COLUMNS": columns}


def build_token_maps(query_start_loc: Tensor, slot_mapping: Tensor, out: tuple[Tensor, Tensor]) -> None:
    """See `core.torch_ops.index_ops`."""
    check_strides(token_to_req=out[0], is_valid=out[1])
    tokens, num_reqs = out[0].shape[0], query_start_loc.shape[0] - 1
    strides = query_start_loc.stride(0), slot_mapping.stride(0)
    numbers = tokens, slot_mapping.shape[0], *strides, num_reqs, depth_of(num_reqs)
    pointers = *out, query_start_loc, slot_mapping
    launch(token_maps_kernel, (cdiv(tokens, BLOCK),), (*pointers, *numbers), _CONSTANTS)


def build_window_indices(
    tokens: StepTokens,
    pages: PageTable,
    window: int,
    out: tuple[Tensor, Tensor],
    *,
    replay_start: Tensor | None = None,
    causal: bool = True,
) -> None:
    """See `core.torch_ops.index_ops`."""
    rows, lens = out
    maps = {"token_to_req": tokens.token_to_req, "is_valid": tokens.is_valid, "replay_start": replay_start}
    check_strides(written=("rows",), rows=rows, lens=lens, **maps)
    tile, warps = _tile_of(window), WINDOW_WARPS.get(architecture(), 4)
    pointers = rows, lens, *_pointers_of(tokens), pages.block_table, replay_start
    sizes = rows.stride(0), *rows.shape, lens.shape[0], tokens.first
    numbers = *sizes, *_numbers_of(tokens, pages), window, int(causal)
    grid = (cdiv(lens.shape[0], tile["TOKENS"]),)
    launch(window_kernel, grid, (*pointers, *numbers), tile, num_warps=warps)


def build_gather_lens(
    query_start_loc: Tensor, seq_lens: Tensor, window: int, out: Tensor, *, replay_start: Tensor | None = None
) -> None:
    """See `core.torch_ops.index_ops`."""
    check_strides(out=out, replay_start=replay_start)
    numbers = out.shape[0], query_start_loc.stride(0), seq_lens.stride(0), window
    grid = (cdiv(out.shape[0], BLOCK),)
    launch(gather_lens_kernel, grid, (out, query_start_loc, seq_lens, replay_start, *numbers), _CONSTANTS)


def build_cached_mask(tokens: StepTokens, num_cached: Tensor, ratio: int, out: Tensor) -> None:
    """See `core.torch_ops.index_ops`."""
    check_strides(token_to_req=tokens.token_to_req, out=out)
    query_start_loc, seq_lens = tokens.query_start_loc, tokens.seq_lens
    strides = query_start_loc.stride(0), seq_lens.stride(0), num_cached.stride(0)
    numbers = out.shape[0], *strides, seq_lens.shape[0], ratio
    pointers = out, tokens.token_to_req, query_start_loc, seq_lens, num_cached
    launch(cached_kernel, (cdiv(out.shape[0], BLOCK),), (*pointers, *numbers), _CONSTANTS)


def build_compressed_slot_mapping(tokens: StepTokens, pages: PageTable, ratio: int, out: tuple[Tensor, Tensor]) -> None:
    """See `core.torch_ops.index_ops`."""
    build_owned_slot_mapping(None, tokens, pages, ratio, out)


def build_owned_slot_mapping(
    ownership: Ownership | None, tokens: StepTokens, pages: PageTable, ratio: int, out: tuple[Tensor, Tensor]
) -> None:
    """See `core.torch_ops.index_ops`. ownership: None where all entries are on this rank."""
    slots, lens = out
    check_strides(slots=slots, lens=lens, token_to_req=tokens.token_to_req, is_valid=tokens.is_valid)
    owner = (0, 1, 1) if ownership is None else (ownership.rank, ownership.size, ownership.interleave)
    pointers = slots, lens, *_pointers_of(tokens), pages.block_table
    sizes = tokens.token_to_req.shape[0], slots.shape[0], lens.shape[0]
    numbers = *sizes, *_numbers_of(tokens, pages), ratio, *owner
    grid = (cdiv(max(slots.shape[0], lens.shape[0]), BLOCK),)
    launch(compressed_kernel, grid, (*pointers, *numbers), _ENTRIES if ownership is None else _OWNED_ENTRIES)


def _pointers_of(tokens: StepTokens) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return tokens.token_to_req, tokens.is_valid, tokens.query_start_loc, tokens.seq_lens


def _numbers_of(tokens: StepTokens, pages: PageTable) -> tuple[int, ...]:
    """Strides of lengths per request; strides, shape and block size of a table."""
    table = pages.block_table
    strides = tokens.query_start_loc.stride(0), tokens.seq_lens.stride(0), *table.stride()
    return *strides, *table.shape, pages.block_size


BUILDER_OPS = BuilderOps(
    build_token_maps=build_token_maps,
    build_window_indices=build_window_indices,
    build_gather_lens=build_gather_lens,
    build_cached_mask=build_cached_mask,
    build_compressed_slot_mapping=build_compressed_slot_mapping,
    build_owned_slot_mapping=build_owned_slot_mapping,
    compute_global_topk_indices_and_lens=compute_global_topk_indices_and_lens,
)


@recorded
def variants(window: int) -> None:
    """Every variant that the ops of this module can need, besides those of `dense`. window: of the model."""
    lens, starts, slots, is_valid = (
        meta_rows(2, dtype=dtype) for dtype in (torch.int32, torch.int32, torch.int64, torch.bool)
    )
    tokens, pages = StepTokens(starts, lens, lens, is_valid), PageTable(meta_rows(2, 2), 1)
    build_token_maps(starts, slots, (lens, is_valid))
    build_cached_mask(tokens, lens, 1, is_valid)
    build_compressed_slot_mapping(tokens, pages, 1, (slots, lens))
    build_owned_slot_mapping(Ownership(0, 2), tokens, pages, 1, (slots, lens))
    for replay_start in (None, lens):
        build_gather_lens(starts, lens, window, lens, replay_start=replay_start)
        build_window_indices(tokens, pages, window, (meta_rows(2, window), lens), replay_start=replay_start)

"""Index arithmetic of the metadata builder, once a step. This module is what `MetadataBuilder` takes as `steps`.

`dsv4attn.core.indices` is the definition of every function here: results are equal, integer by integer. A step of all
layer kinds takes eight launches.
"""

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl
from torch import Tensor

from dsv4attn.backends._triton.compiling.variant import Variant
from dsv4attn.backends._triton.index_ops.common import depth_of, request_of, slots_of, variant_of
from dsv4attn.backends._triton.index_ops.dense import compute_global_topk_indices_and_lens
from dsv4attn.backends._triton.launching.runtime import architecture, launch, stable_kernel
from dsv4attn.core.tensorspec import check_strides

__all__ = [
    "build_compressed_slot_mapping",
    "build_gather_lens",
    "build_token_maps",
    "build_window_indices",
    "compute_global_topk_indices_and_lens",
    "variants",
]

BLOCK = 256
"""Tokens, or requests, of a program that writes a number for each."""
WINDOW_TILE = 2048
"""Slots that a program writes when it writes whole windows."""
WINDOW_WARPS = {"sm_86": 8, "sm_89": 8}
"""By architecture; 4 on all others. There 4 warps spill 8 bytes a thread (compiled with Triton 3.9, 2026-11-22; not
measured)."""


def _tile_of(window: int) -> dict[str, int]:
    """Tokens and columns of a program that writes windows."""
    columns = triton.next_power_of_2(window)
    return {"TOKENS": max(WINDOW_TILE // columns, 1), "WINDOW": columns}


def _window_warps(arch: str) -> int:
    return WINDOW_WARPS.get(arch, 4)


def variants(window: int, arch: str = "") -> Iterator[Variant]:
    """Every form that the steps of this module can ask for on an architecture, besides those of `indices`.

    window: of the model. arch: as `DeviceFacts.arch` has it.
    """
    one = {"BLOCK": BLOCK}
    yield variant_of(token_maps_kernel, one, is_valid="*u1", slot_mapping="*i64")
    yield variant_of(window_kernel, _tile_of(window), is_valid="*u1", num_warps=_window_warps(arch))
    yield variant_of(gather_lens_kernel, one)
    yield variant_of(compressed_kernel, one, slots="*i64", is_valid="*u1")


@stable_kernel
def token_maps_kernel(
    token_to_req,
    is_valid,
    starts,
    slot_mapping,
    num_tokens: tl.int32,
    num_slots: tl.int32,
    starts_stride: tl.int64,
    slot_stride: tl.int64,
    num_reqs: tl.int32,
    depth: tl.int32,
    BLOCK: tl.constexpr,
):
    """Grid: (T / BLOCK,). Request of each token, and whether it has a slot."""
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    request = request_of(token, starts, starts_stride, 0, num_reqs, depth)
    slot = tl.load(slot_mapping + token.to(tl.int64) * slot_stride, mask=token < num_slots, other=-1)
    tl.store(token_to_req + token, request, mask=token < num_tokens)
    tl.store(is_valid + token, slot >= 0, mask=token < num_tokens)


def build_token_maps(query_start_loc: Tensor, slot_mapping: Tensor, out: tuple[Tensor, Tensor]) -> None:
    """See `core.indices`."""
    check_strides(token_to_req=out[0], is_valid=out[1])
    tokens, num_reqs = out[0].shape[0], query_start_loc.shape[0] - 1
    strides = query_start_loc.stride(0), slot_mapping.stride(0)
    numbers = tokens, slot_mapping.shape[0], *strides, num_reqs, depth_of(num_reqs)
    launch(
        token_maps_kernel,
        (triton.cdiv(tokens, BLOCK),),
        (*out, query_start_loc, slot_mapping, *numbers),
        {"BLOCK": BLOCK},
    )


@triton.jit
def positions_of(token, request, starts, starts_stride, seq_lens, seq_stride, num_reqs):
    """Absolute position (int64) of tokens, of any shape; the token number itself if there is no such request."""
    known = (request >= 0) & (request < num_reqs)
    end = tl.load(starts + (request + 1).to(tl.int64) * starts_stride, mask=known, other=0)
    seq_len = tl.load(seq_lens + request.to(tl.int64) * seq_stride, mask=known, other=0)
    return token.to(tl.int64) + (seq_len - end)


@stable_kernel
def window_kernel(
    rows,
    lens,
    token_to_req,
    is_valid,
    starts,
    seq_lens,
    table,
    rows_stride: tl.int64,
    num_rows: tl.int32,
    num_lens: tl.int32,
    first: tl.int32,
    starts_stride: tl.int64,
    seq_stride: tl.int64,
    table_stride: tl.int64,
    table_column_stride: tl.int64,
    num_reqs: tl.int32,
    num_columns: tl.int32,
    block_size: tl.int32,
    window: tl.int32,
    TOKENS: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Grid: (lens / TOKENS,). Windows of TOKENS rows; row 0 is token `first`. Lengths behind the last row are 0."""
    row = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    inside = row < num_rows
    request = tl.load(token_to_req + row, mask=inside, other=0)
    position = positions_of(first + row, request, starts, starts_stride, seq_lens, seq_stride, num_reqs)
    valid = tl.load(is_valid + row, mask=inside, other=0)
    start = tl.maximum(position - (window - 1), 0)
    count = tl.where(inside & (valid != 0), tl.maximum(position + 1 - start, 0), 0)
    tl.store(lens + row, count.to(tl.int32), mask=row < num_lens)
    # [TOKENS, WINDOW]
    column = tl.arange(0, WINDOW)[None, :]
    blocks = table + request.to(tl.int64)[:, None] * table_stride
    visible = column < count[:, None]
    slot = slots_of(start[:, None] + column, visible, blocks, table_column_stride, num_columns, block_size)
    place = rows + row.to(tl.int64)[:, None] * rows_stride + column
    tl.store(place, slot.to(tl.int32), mask=inside[:, None] & (column < window))


def build_window_indices(
    query_start_loc: Tensor,
    seq_lens: Tensor,
    token_to_req: Tensor,
    is_valid: Tensor,
    first: int,
    block_table: Tensor,
    block_size: int,
    window: int,
    out: tuple[Tensor, Tensor],
) -> None:
    """See `core.indices`."""
    rows, lens = out
    check_strides(written=("rows",), rows=rows, lens=lens, token_to_req=token_to_req, is_valid=is_valid)
    tile = _tile_of(window)
    strides = query_start_loc.stride(0), seq_lens.stride(0), *block_table.stride()
    sizes = rows.stride(0), rows.shape[0], lens.shape[0], first
    launch(
        window_kernel,
        (triton.cdiv(lens.shape[0], tile["TOKENS"]),),
        (
            *(rows, lens, token_to_req, is_valid, query_start_loc, seq_lens, block_table),
            *(*sizes, *strides, *block_table.shape, block_size, window),
        ),
        tile,
        num_warps=_window_warps(architecture()),
    )


@stable_kernel
def gather_lens_kernel(
    lens,
    starts,
    seq_lens,
    num_reqs: tl.int32,
    starts_stride: tl.int64,
    seq_stride: tl.int64,
    window: tl.int32,
    BLOCK: tl.constexpr,
):
    """Grid: (n / BLOCK,). Window rows of each request."""
    request = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = request < num_reqs
    start = starts + request.to(tl.int64) * starts_stride
    query_len = tl.load(start + starts_stride, mask=inside, other=0) - tl.load(start, mask=inside, other=0)
    prefix = tl.load(seq_lens + request.to(tl.int64) * seq_stride, mask=inside, other=0) - query_len
    seen = tl.minimum(prefix, window - 1) + query_len
    tl.store(lens + request, tl.where(query_len == 0, 0, seen), mask=inside)


def build_gather_lens(query_start_loc: Tensor, seq_lens: Tensor, window: int, out: Tensor) -> None:
    """See `core.indices`."""
    check_strides(out=out)
    numbers = out.shape[0], query_start_loc.stride(0), seq_lens.stride(0), window
    grid = (triton.cdiv(out.shape[0], BLOCK),)
    launch(gather_lens_kernel, grid, (out, query_start_loc, seq_lens, *numbers), {"BLOCK": BLOCK})


@stable_kernel
def compressed_kernel(
    slots,
    lens,
    token_to_req,
    is_valid,
    starts,
    seq_lens,
    table,
    num_tokens: tl.int32,
    num_slots: tl.int32,
    num_lens: tl.int32,
    starts_stride: tl.int64,
    seq_stride: tl.int64,
    table_stride: tl.int64,
    table_column_stride: tl.int64,
    num_reqs: tl.int32,
    num_columns: tl.int32,
    block_size: tl.int32,
    ratio: tl.int32,
    BLOCK: tl.constexpr,
):
    """Grid: (slots / BLOCK,). Entry that each token completes, and how many it sees; nothing behind the last token."""
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = token < num_tokens
    request = tl.load(token_to_req + token, mask=inside, other=0)
    position = positions_of(token, request, starts, starts_stride, seq_lens, seq_stride, num_reqs)
    valid = tl.load(is_valid + token, mask=inside, other=0)
    seen = tl.where(inside & (valid != 0) & (position >= 0), position + 1, 0)
    completes = (seen > 0) & (seen % ratio == 0)
    blocks = table + request.to(tl.int64) * table_stride
    slot = slots_of(position // ratio, completes, blocks, table_column_stride, num_columns, block_size)
    tl.store(slots + token, slot, mask=token < num_slots)
    tl.store(lens + token, (seen // ratio).to(tl.int32), mask=token < num_lens)


def build_compressed_slot_mapping(
    query_start_loc: Tensor,
    seq_lens: Tensor,
    token_to_req: Tensor,
    is_valid: Tensor,
    block_table: Tensor,
    block_size: int,
    ratio: int,
    out: tuple[Tensor, Tensor],
) -> None:
    """See `core.indices`."""
    slots, lens = out
    check_strides(slots=slots, lens=lens, token_to_req=token_to_req, is_valid=is_valid)
    sizes = token_to_req.shape[0], slots.shape[0], lens.shape[0]
    strides = query_start_loc.stride(0), seq_lens.stride(0), *block_table.stride()
    launch(
        compressed_kernel,
        (triton.cdiv(max(slots.shape[0], lens.shape[0]), BLOCK),),
        (
            *(slots, lens, token_to_req, is_valid, query_start_loc, seq_lens, block_table),
            *(*sizes, *strides, *block_table.shape, block_size, ratio),
        ),
        {"BLOCK": BLOCK},
    )

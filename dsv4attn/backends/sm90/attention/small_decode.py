"""The launcher of `kernels_small_decode`, for decodes of so few tokens that each tile of keys has a multiprocessor."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import product

import torch
from attrs import evolve

from dsv4attn.backends._triton.attention import launch as attention_launch
from dsv4attn.backends._triton.interpreted import INTERPRETED
from dsv4attn.backends._triton.launching.launch_cache import Constants
from dsv4attn.backends._triton.launching.pdl import uses_pdl
from dsv4attn.backends._triton.launching.recorded import recorded
from dsv4attn.backends._triton.launching.runtime import Launch
from dsv4attn.backends.sm90.attention.key_format import FP8_RECORDS, KeyFormat
from dsv4attn.backends.sm90.attention.meta_calls import NUMBERS, meta_calls
from dsv4attn.backends.sm90.tuning import TILE_SIZES, TileSizes, combine_rounds_of
from dsv4attn.core.cache.selected_keys import DenseIndices, GatheredKeys, PagedKeys
from dsv4attn.core.contract.backend import AttentionCall, AttentionTensors, EntryIndices, Run

if INTERPRETED:
    from dsv4attn.backends.sm90.interpreted.kernels_small_decode import attend_tile, combine_tiles
else:
    from dsv4attn.backends.sm90.attention.kernels_small_decode import attend_tile, combine_tiles

EIGHT, PIECES = 8, 8
"""Heads of a program of `combine_tiles`; number of pieces of a head's columns."""
WARPS, COMBINING_WARPS = 8, 4
SHAPES = (1, 1), (65, 1), (1, 1024), (64, 1024)
"""Tokens and index columns of a segment with which every one of `tuning.COMBINE_ROUNDS` has its turn."""


def prepare(
    call: AttentionCall,
    kind: KeyFormat,
    numbers: Sequence[int],
    tiles: TileSizes,
    entries: EntryIndices | None = None,
) -> Run:
    """Launches of a decode from records. Parts are in the call's scratch.

    numbers: of both segments, see `sm90.launch`.
    entries: None, or the compressed segment is read by `AttentionTensors.topk_indices` and not by slots.
    """
    q, top, (tokens, heads, _) = call.q, call.max_logits, call.q.shape
    widths = [rows.width for rows in attention_launch.index_rows(call.keys)]
    row_tiles, blocks = tiles.of_rows(widths), -(-heads // tiles.heads)
    constants = _constants(len(widths), kind, heads, tiles)
    shape = heads, tiles.heads, tiles.keys, row_tiles, widths[0], widths[1] if len(widths) == 2 else 0
    window_indices, window_lens, compressed_indices, compressed_lens = attention_launch.index_tensors(call.keys)
    # slots need no block table: the kernel does not read these two tensors then
    token_to_req = block_table = compressed_lens
    table_numbers: tuple[int, ...] = (0, 0, 0, 0)
    if entries is not None:
        token_to_req, block_table = entries.token_to_req, entries.pages.block_table
        table_numbers = block_table.stride(0), *block_table.shape, shape[-1]
    numbers = *q.stride()[:2], *numbers, *table_numbers, row_tiles
    launch = Launch(attend_tile, constants, (*numbers, call.layer.scale), WARPS)
    results = *attention_launch.result_strides(call), *shape, table_numbers[-1], call.empty_lse
    combine, combiners = combining(tokens, heads, row_tiles, results, _powers(kind))
    programs = tokens * row_tiles * blocks
    # other kernels fill this memory with fp32: parts in fp16 need half of it, and their sums less than the rest
    memory = call.scratch[0]
    part, sums = memory.view(torch.float16), memory.view(-1)[memory.numel() // 2 :]

    has_compressed, reads_entries = len(widths) > 1, entries is not None

    def run(tensors: AttentionTensors) -> None:
        q, out, lse, attn_sink, topk_indices, window_cache, compressed_cache = tensors
        # an only segment is passed twice
        window = compressed = window_cache.tensor
        if has_compressed and compressed_cache is not None:
            compressed = compressed_cache.tensor
        launch(
            programs,
            (
                q, part, sums, window, window_indices, window_lens,
                compressed, topk_indices if reads_entries else compressed_indices, compressed_lens,
                token_to_req, block_table,
            ),
        )  # fmt: skip
        combine(combiners, (part, sums, out, lse, top, attn_sink, window_lens, compressed_lens))

    return run


def combining(tokens: int, heads: int, parts: int, numbers: tuple[float, ...], powers: int = 8) -> tuple[Launch, int]:
    """The launch of `combine_tiles` for rows of so many parts, and its number of programs.

    numbers: its arguments from the strides of the output on. powers: of two in a part.
    """
    rounds = combine_rounds_of(tokens, heads, parts)
    launch = Launch(combine_tiles, _combining(*rounds, powers), numbers, COMBINING_WARPS)
    return launch, tokens * -(-heads // EIGHT) * PIECES // rounds[1]


def reads(call: AttentionCall, entries: EntryIndices) -> bool:
    """Whether `attend_tile` reads index tensors of these strides, and a table of the cache's own blocks."""
    assert not isinstance(call.keys, GatheredKeys)
    index_tensors = entries.indices, entries.pages.block_table, entries.visible_lens, entries.token_to_req
    same_blocks = call.keys[-1].cache.block_size == entries.pages.block_size
    return same_blocks and all(tensor.stride(-1) == 1 for tensor in index_tensors)


def with_entries(call: AttentionCall, entries: EntryIndices) -> AttentionCall:
    """The decode `call` with the index rows of `entries` in its second segment."""
    assert not isinstance(call.keys, GatheredKeys)
    window, compressed = call.keys
    rows = DenseIndices(entries.indices, entries.visible_lens)
    return evolve(call, keys=[window, PagedKeys(compressed.cache, rows)])


def _powers(kind: KeyFormat) -> int:
    """Powers of two of a program's sums: for each 64 columns, or each 32 of V4.1's records, as codes have scales."""
    return 8 if kind == FP8_RECORDS else 16


@cache
def _constants(segments: int, kind: KeyFormat, heads: int, tiles: TileSizes) -> Constants:
    chosen = {"SEGMENTS": segments, "KIND": kind.number, "INTERLEAVED": kind.interleaved, "POWERS": _powers(kind)}
    chosen |= {"H": heads, "BH": tiles.heads, "N": tiles.keys}
    return Constants(chosen if INTERPRETED else {**chosen, "PDL": uses_pdl("sm_90")})


@cache
def _combining(together: int, pieces: int, powers: int) -> Constants:
    chosen = {"U": together, "P": pieces, "POWERS": powers}
    return Constants(chosen if INTERPRETED else {**chosen, "PDL": uses_pdl("sm_90")})


@recorded
def variants(segments: int, kind: KeyFormat, heads: int, *, sinks: Sequence[bool], lses: Sequence[bool]) -> None:
    """Every variant of these kernels that `forward_mqa` can need. sinks, lses: see `meta_calls`."""
    for (tokens, width), tiles in product(SHAPES, TILE_SIZES):
        for call in meta_calls(segments, kind, heads, sinks=sinks, lses=lses, tokens=tokens, width=width):
            prepare(call, kind, NUMBERS, tiles)(call.tensors)

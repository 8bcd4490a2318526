"""Scores and selection by groups of entries: the launchers of `kernels_group_select`."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import triton
from attrs import frozen
from torch import Tensor

from dsv4attn.backends._triton.attention.launch import divider
from dsv4attn.backends._triton.cache.records import alignment_of_rows
from dsv4attn.backends._triton.launching.pdl import uses_pdl
from dsv4attn.backends._triton.launching.runtime import INTERPRETED, architecture, launch, multiprocessors
from dsv4attn.backends._triton.layer import kernels_group_select
from dsv4attn.backends._triton.layer.index_logits import (
    Tile,
    constants_of,
    multiplies_codes,
    pages_of,
    raw,
    tiles_for,
)
from dsv4attn.backends._triton.layer.kernels_group_select import choose_groups_kernel, score_groups_kernel
from dsv4attn.core.argument_checks import round_up
from dsv4attn.core.cache.layout import KVCacheLayout, PagedKVCache
from dsv4attn.core.torch_ops.arguments import TokenMap
from dsv4attn.core.torch_ops.indexer import IndexQuery

__all__ = ["MOST", "Form", "choose", "form_of", "score", "select"]

MOST: int = kernels_group_select.MOST.value
"""Entries that can be selected in a row."""
SCORES_BYTES = 128 * 2**20
"""Most bytes of scores and maxima: those of all tokens, or of as many as fit, and of one at least."""

GROUPED = 8, 16
"""Entries of a group, in shorter and in longer rows."""
SHORTEST, SIZES = 2048, (8192, 16384)
"""Entries of a row in registers, at least; and of rows whose groups are chosen first."""
MOST_GROUPS = 16384
"""Groups of a row in registers, at most."""
WARPS = {2048: 4, 4096: 8, 8192: 8, 16384: 16}
"""Warps of a program, by the larger of both numbers."""
ASM = not INTERPRETED and torch.version.hip is None


@frozen
class Form:
    """How rows are selected.

    size: entries in registers. groups: groups in registers; 0 if all entries are. group: entries of a group. slack:
    groups that may be chosen more than entries. probes, sub: see the kernel.
    """

    size: int
    groups: int = 0
    group: int = 8
    slack: int = 0
    warps: int = 8
    probes: int = 2
    sub: int = 4
    tile: int = 8192


def form_of(max_entries: int, topk: int) -> Form | None:
    """How rows of up to max_entries are selected; None if they are too long, or K too large."""
    if topk > MOST:
        return None
    size = max(triton.next_power_of_2(max_entries), SHORTEST)
    if size <= SIZES[0]:
        return Form(size, warps=WARPS[size], probes=2)
    for size in SIZES:
        for group in GROUPED:
            groups, places = triton.next_power_of_2(-(-max_entries // group)), size // group
            if groups <= MOST_GROUPS and places >= topk:
                return Form(size, groups, group, places - topk, WARPS[max(size, groups)])
    return None


def choose(
    scores: Tensor, maxima: Tensor | None, visible_lens: Tensor, out: Tensor, max_entries: int, form: Form
) -> None:
    """Write the K entries with the largest scores of each row to out [T, K] int32, ascending, then -1. Exact.

    The rule is that of `layer.select.select`. scores: [T, >= max_entries rounded up to 4] fp32, rows begin at multiples
    of 16 bytes. maxima: [T, groups] fp32, the largest of each group; None: not known.
    """
    rows, topk = out.shape
    if not rows or not topk:
        return
    lists = out.new_empty(rows, form.size // form.group) if form.groups else out
    tile = form.tile if maxima is None and form.groups else 0
    if maxima is None:
        # columns of a whole number of tiles
        columns = round_up(max_entries, form.tile) // form.group if tile else 0
        maxima = scores.new_empty(rows, columns) if tile else scores
    launch(
        choose_groups_kernel,
        (rows,),
        (
            scores, maxima, visible_lens, lists, out, scores.stride(0), maxima.stride(0), out.stride(0), max_entries,
            topk, form.slack,
        ),
        choose_constants(form, tile, uses_pdl(architecture()) and not INTERPRETED),
        num_warps=form.warps,
        **options_of(form),
    )  # fmt: skip


def options_of(form: Form) -> dict[str, Any]:
    """Further options of the compiler. Without them the assembler of Triton 3.9 takes 128 registers, and spills."""
    return {"maxnreg": 200} if form.groups and form.warps == 8 else {}


@cache
def choose_constants(
    form: Form,
    tile: int,
    pdl: bool,  # noqa: FBT001 - a constant of a launch
) -> dict[str, Any]:
    constants = {"SIZE": form.size, "GROUPS": form.groups, "GROUP": form.group, "TILE": tile, "SUB": form.sub}
    return constants | {"PROBES": form.probes, "ASM": ASM, "PDL": pdl}


def tile_of(layout: KVCacheLayout, arch: str) -> Tile:
    """The tile of index keys on an architecture."""
    return tiles_for(layout, arch).one


def score(
    query: IndexQuery,
    cache: PagedKVCache,
    token_map: TokenMap,
    scores: Tensor,
    maxima: Tensor | None,
    group: int,
    entries: int,
) -> None:
    """Write the score of each entry that a token sees to scores [T, E] fp32; NaN for entries without a block.

    As `index_logits.score`, one token at a time. maxima: [T, groups] fp32 - receives the largest of each group, which
    has `group` entries; None: not wanted.
    """
    tokens = scores.shape[0]
    tile, native = tile_of(cache.layout, architecture()), multiplies_codes(cache.layout, architecture())
    keys, values, scales = pages_of(cache, tile), raw(query.values), query.scales
    table = token_map.block_table
    programs = max(tile.programs * multiprocessors() // tokens, 1)
    tiles = -(-entries // tile.entries)
    span = -(-tiles // programs) * tile.entries
    launch(
        score_groups_kernel,
        (tokens * -(-entries // span),),
        (
            values, scales, query.weights, keys.tensor, table, token_map.token_to_req, token_map.visible_lens, scores,
            maxima, tokens, table.shape[0], entries, span, values.stride(0), values.stride(1),
            0 if scales is None else scales.stride(0), query.weights.stride(0), table.stride(0), table.shape[1],
            keys.num_blocks, keys.page_size, *divider(keys.page_size), *keys.strides, scores.stride(0),
            0 if maxima is None else maxima.stride(0),
        ),
        score_constants(
            cache.layout, values.shape[1], tile, keys.aligned, keys.stride, alignment_of_rows(values), native,
            group, uses_pdl(architecture()) and not INTERPRETED,
        ),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )  # fmt: skip


@cache
def score_constants(
    layout: KVCacheLayout,
    heads: int,
    tile: Tile,
    aligned: int,
    stride: int,
    q_aligned: int,
    native: bool,  # noqa: FBT001 - constants of a launch
    group: int,
    pdl: bool,  # noqa: FBT001 - as above
) -> dict[str, Any]:
    shared = constants_of(layout, heads, tile, aligned, stride, q_aligned, False, native)
    constants = {name: value for name, value in shared.items() if name not in {"TOKENS", "LANES", "FILL"}}
    return constants | {"GROUP": group, "PDL": pdl}


def select(
    query: IndexQuery,
    cache: PagedKVCache,
    token_map: TokenMap,
    out: Tensor,
    max_entries: int,
    form: Form,
    score_rows: Callable[..., Any] | None = None,
) -> None:
    """Write the K entries with the largest scores of each token to out [T, K] int32, ascending, then -1.

    The rule is that of `layer.select.select`. There must be blocks, and a block table that is not empty. score_rows:
    computes scores, with the arguments of `index_logits.score`; None: `score`, which is for requests of one token.
    """
    width = round_up(max_entries, 64)
    groups = width // form.group if form.groups and score_rows is None else 0
    tokens = out.shape[0]
    rows = max(SCORES_BYTES // (4 * (width + groups)), 1)
    for first in range(0, tokens, rows):
        part = slice(first, min(first + rows, tokens))
        memory = out.new_empty(part.stop - first, width + groups, dtype=torch.float32)
        scores, maxima, of_part = memory[:, :width], memory[:, width:] if groups else None, token_map.tokens(part)
        if score_rows is None:
            score(query.tokens(part), cache, of_part, scores, maxima, form.group, max_entries)
        else:
            score_rows(query.tokens(part), cache, of_part, scores, None, 0)
        choose(scores, maxima, of_part.visible_lens, out[part], max_entries, form)

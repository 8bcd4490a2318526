"""Scores and selection by groups of entries on Hopper: the launchers of `kernels_group_select`, and their forms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import triton.language as tl
from attrs import frozen
from torch import Tensor

from dsv4attn.backends._triton.compiling.variant import WIDE
from dsv4attn.backends._triton.interpreted import INTERPRETED
from dsv4attn.backends._triton.launching.pdl import uses_pdl
from dsv4attn.backends._triton.launching.recorded import meta_rows, recorded
from dsv4attn.backends._triton.launching.runtime import launch, multiprocessors
from dsv4attn.backends._triton.layer.indexer.kernels import CODES, NATIVE
from dsv4attn.backends._triton.layer.indexer.launch import Tile, tiles_for
from dsv4attn.backends._triton.layer.selection.launch import (
    SPLITS,
    Plan,
    block_of,
    plan_in_parts,
    slack_of,
    write_lists,
)
from dsv4attn.backends._triton.layer.selection.launch import Tile as Listing
from dsv4attn.backends._triton.layer.selection.scratch import parts
from dsv4attn.backends._triton.sizes import cdiv, next_power_of_2
from dsv4attn.backends.sm90.indexer import launch as index_logits
from dsv4attn.backends.sm90.selection import kernels_group_select
from dsv4attn.backends.sm90.selection.kernels_group_select import choose_groups_kernel, score_groups_kernel
from dsv4attn.backends.sm90.tuning import MOST_BY_GROUPS, by_groups, is_listed
from dsv4attn.core.argument_checks import round_up
from dsv4attn.core.cache.layout import PagedKVCache
from dsv4attn.core.torch_modes import is_capturing
from dsv4attn.core.torch_ops.arguments import TokenMap
from dsv4attn.core.torch_ops.indexer import IndexQuery

MOST: int = kernels_group_select.MOST.value
"""Entries that can be selected in a row."""
SHORTEST, SIZES = 2048, (8192, 16384)
"""Entries of a row in registers, at least; and of rows whose groups are chosen first."""
GROUPED = 8, 16
"""Entries of a group, in shorter and in longer rows."""
MOST_GROUPS = 16384
"""Groups of a row in registers, at most."""
LISTED = Listing(2048, 4, 8)
"""Of rows that were listed in parts."""
READ = 8192
"""Entries that are read together to find the maxima of groups."""
SPILLS = 72
"""Bytes that a thread may store and load in all, if there are more than 8,192 entries in registers: 56 with Triton 3.6.

They are for rows of more than 131,072 entries with K above 512: 64 of 262,144 take 873 us, and 1,002 us in two steps.
"""


@frozen
class Form:
    """How rows are selected.

    size: entries in registers. groups: groups in registers; 0 if all entries are. group: entries of a group. slack:
    groups that may be chosen more than entries. read: entries that are read together to find the maxima of groups; 0 if
    these come with the scores, or there are no groups. short, direct, middle: of rows that are shorter than the
    longest, see `choose_groups_kernel`. block: entries in registers of rows that are listed in parts before; 0: of
    none.
    """

    size: int
    groups: int = 0
    group: int = 8
    slack: int = 0
    read: int = 0
    short: int = 0
    direct: int = 0
    middle: int = 0
    block: int = 0

    @property
    def warps(self) -> int:
        """Warps of a program."""
        if self.block:
            return LISTED.warps
        most = max(self.size, self.groups)
        return 16 if most > 8192 else 4 if self.read or most <= 2048 else 8

    @property
    def coarse(self) -> int:
        """Entries of the longest row whose groups have eight entries where others have 16, if these are known."""
        return self.middle * GROUPED[0] if self.group == GROUPED[1] else 2**31 - 1

    @property
    def alone(self) -> int:
        """Entries of the longest row that is not listed in parts."""
        return self.middle * GROUPED[0]


def form_of(
    max_entries: int, topk: int, *, with_maxima: bool, captured: bool = False, listed: bool = False
) -> Form | None:
    """How rows of up to max_entries are selected; None if they are too long, or K is too large.

    with_maxima: whether the maxima of groups come with the scores. captured: whether rows may be much shorter, as in
    a graph that is replayed. listed: whether the longest are listed in parts, see `is_listed`.
    """
    if topk > MOST:
        return None
    size = max(next_power_of_2(max_entries), SHORTEST)
    if size <= SIZES[0]:
        return Form(size, short=SHORTEST if captured and size > SHORTEST else 0)
    shorter = {"short": SHORTEST, "direct": SIZES[0]} if captured else {}
    middle, longest = SIZES[0] // 2, SIZES[0] * GROUPED[0] // 2
    if listed and max_entries > longest:
        return Form(SIZES[0], middle, 16, slack_of(topk), middle=middle, block=block_of(topk), **shorter)
    for size in SIZES:
        for group in GROUPED:
            groups, places = next_power_of_2(-(-max_entries // group)), size // group
            if groups <= MOST_GROUPS and places >= topk:
                if captured and max_entries > longest:
                    shorter["middle"] = middle
                return Form(size, groups, group, places - topk, 0 if with_maxima else READ, **shorter)
    return None


def columns_of(max_entries: int, form: Form) -> tuple[int, int]:
    """Columns of the maxima of a row, and of the numbers of its groups."""
    if not form.groups:
        return 0, 0
    smallest = GROUPED[0] if form.middle or not form.read else form.group
    return round_up(max_entries, form.read or 64) // smallest, SIZES[0] // GROUPED[0]


def choose(
    scores: Tensor,
    maxima: Tensor | None,
    visible_lens: Tensor,
    out: Tensor,
    max_entries: int,
    form: Form,
    lists: Tensor | None = None,
    plan: Plan | None = None,
) -> None:
    """Write the K entries with the largest scores of each row to out [T, K] int32, ascending, then -1. Exact.

    The rule is that of `layer.select.select`. scores: [T, >= max_entries rounded up to 4] fp32, rows begin at multiples
    of 16 bytes. maxima: [T, groups] fp32, the largest of each group of eight, or memory for them; None if the form has
    no groups. lists: [T, columns] of 4 bytes, memory; None likewise. plan: of rows that are listed in parts.
    """
    rows, topk = out.shape
    if not rows or not topk:
        return
    maxima, lists = scores if maxima is None else maxima, out if lists is None else lists.view(torch.int32)
    pointers, least, parts = (scores, maxima, visible_lens, lists), 1, 1
    if plan is not None:
        least, parts = plan.least, plan.parts
        write_lists(pointers, max_entries, 1, topk, form.group, plan, form.alone, WIDE, lanes=1)
    launch(
        choose_groups_kernel,
        (rows,),
        (
            *pointers, out, scores.stride(0), maxima.stride(0), lists.stride(0), out.stride(0), max_entries,
            topk, form.slack, least, parts,
        ),
        _choose_constants(form),
        num_warps=form.warps,
        spills=SPILLS if form.size > SIZES[0] else 0,
        **_options(form),
    )  # fmt: skip


@cache
def _choose_constants(form: Form) -> dict[str, Any]:
    constants = {"SIZE": form.size, "GROUPS": form.groups, "GROUP": form.group, "READ": form.read}
    constants |= {"SHORT": form.short, "DIRECT": form.direct, "MIDDLE": form.middle, "BLOCK": form.block}
    constants |= {"TILE": LISTED.entries, "UNROLL": LISTED.unroll, "SPLITS": SPLITS if form.block else 1}
    return {**constants, "ASM": not INTERPRETED, "PDL": uses_pdl("sm_90") and not INTERPRETED}


def _options(form: Form) -> dict[str, Any]:
    """Further options of the compiler. Without them the assembler of Triton 3.9 takes 128 registers, and spills."""
    return {"maxnreg": 200} if form.groups and form.warps == 8 else {}


@cache
def _tile() -> Tile:
    return tiles_for(index_logits.LAYOUT, "sm_90").one


def _score(
    query: IndexQuery,
    keys: Tensor,
    paging: Sequence[int],
    token_map: TokenMap,
    scores: Tensor,
    maxima: Tensor | None,
    coarse: int,
) -> None:
    """Write the score of each entry that a token sees to scores [T, E] fp32; NaN for entries without a block.

    As `index_logits.score`, one token at a time. keys, paging: pages, and what `index_logits.paging_of` says of them.
    maxima: [T, groups] fp32 - receives the largest of each eight entries, of 16 in rows of more than coarse; None: not
    wanted.
    """
    (tokens, entries), table, tile = scores.shape, token_map.block_table, _tile()
    values = index_logits.raw(query.values)
    splits = min(max(tile.programs * multiprocessors() // tokens, 1), cdiv(entries, tile.entries))
    launch(
        score_groups_kernel,
        (tokens * splits,),
        (
            values, query.weights, keys, table, token_map.token_to_req, token_map.visible_lens, scores, maxima,
            tokens, table.shape[0], entries, splits, coarse, values.stride(0), values.stride(1),
            query.weights.stride(0), table.stride(0), table.shape[1], *paging, scores.stride(0),
            0 if maxima is None else maxima.stride(0),
        ),
        _score_constants(),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )  # fmt: skip


@cache
def _score_constants() -> dict[str, Any]:
    kind, tile = CODES if INTERPRETED else NATIVE, _tile()
    return {
        "KIND": kind.value,
        "BLOCK": tile.entries,
        "STAGES": tile.stages,
        "DT": tl.float32 if INTERPRETED else tl.float16,
        "ASM": not INTERPRETED,
        "PDL": uses_pdl("sm_90") and not INTERPRETED,
    }


def select(
    query: IndexQuery,
    cache: PagedKVCache,
    token_map: TokenMap,
    out: Tensor,
    max_entries: int,
    *,
    score_rows: Callable[..., Any],
) -> bool:
    """Write the K entries with the largest scores of each token to out [T, K] int32, ascending, then -1.

    The rule is that of `layer.select.select`. False where this is slower than other ways, or does not serve the call;
    nothing is written then. score_rows: computes scores of requests of several tokens, with the arguments of
    `index_logits.score`.
    """
    (tokens, topk), table = out.shape, token_map.block_table
    captured = is_capturing(out.device)
    listed = captured and is_listed(tokens, table.shape[0], max_entries)
    if not (max_entries > 0 and table.numel() and (listed or by_groups(tokens, table.shape[0], max_entries))):
        return False
    of_one_token = tokens <= table.shape[0]
    form = form_of(max_entries, topk, with_maxima=of_one_token, captured=captured, listed=listed)
    paging = index_logits.paging_of(cache)
    if form is None or paging is None or not index_logits.reads(query):
        return False
    groups, lists = columns_of(max_entries, form)
    plan = plan_in_parts(out, max_entries, topk, groups) if form.block else None
    if plan is not None:
        lists = plan.lists
    for part, (scores, maxima, memory) in parts(out, max_entries, groups, lists):
        known, some = maxima if groups else None, token_map.tokens(part)
        if of_one_token:
            _score(query.tokens(part), cache.tensor, paging, some, scores[:, :max_entries], known, form.coarse)
        else:
            score_rows(query.tokens(part), cache, some, scores, None, 0)
        choose(scores, known, some.visible_lens, out[part], max_entries, form, memory if groups else None, plan)
    return True


@recorded
def variants(topk: int, max_entries: int) -> None:
    """Every variant that `select` can need with rows of up to max_entries."""
    lengths = [SHORTEST]
    while lengths[-1] < max_entries:
        lengths.append(2 * lengths[-1])
    decodes = [form_of(entries, topk, with_maxima=True) for entries in lengths]
    prompts = [form_of(entries, topk, with_maxima=False) for entries in lengths if entries <= MOST_BY_GROUPS]
    # a graph has the form of the longest rows
    graphs = [form_of(max_entries, topk, with_maxima=True, captured=True, listed=listed) for listed in (False, True)]
    if max_entries <= MOST_BY_GROUPS:
        graphs.append(form_of(max_entries, topk, with_maxima=False, captured=True))
    forms = [form for form in dict.fromkeys((*decodes, *prompts, *graphs)) if form is not None]
    query, cache, token_map = index_logits.meta_query(1)
    out, paging, lens = meta_rows(1, topk), index_logits.paging_of(cache) or (), token_map.visible_lens
    for form in forms:
        groups, _ = columns_of(max_entries, form)
        plan = plan_in_parts(out, max_entries, topk, groups) if form.block else None
        scores = meta_rows(1, round_up(max_entries, 4), dtype=torch.float32)
        known, memory = (scores, scores) if groups else (None, None)
        choose(scores, known, lens, out, max_entries, form, memory, plan)
        _score(query, cache.tensor, paging, token_map, scores, known, form.coarse)

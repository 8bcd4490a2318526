"""Scores and selection by groups of entries on Hopper: the launchers of `kernels_group_select`, and their forms."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import triton.language as tl
from attrs import evolve, frozen
from torch import Tensor

from dsv4attn.backends._triton.compiling.variant import Variant
from dsv4attn.backends._triton.launching.runtime import INTERPRETED, launch, multiprocessors
from dsv4attn.backends._triton.layer.index_logits import Tile, tiles_for
from dsv4attn.backends._triton.layer.kernels_index_logits import CODES, NATIVE
from dsv4attn.backends._triton.layer.ops import score_memory
from dsv4attn.backends._triton.sizes import cdiv, next_power_of_2
from dsv4attn.backends.sm90 import index_logits, kernels_group_select
from dsv4attn.backends.sm90.kernels_group_select import choose_groups_kernel, score_groups_kernel
from dsv4attn.backends.sm90.tuning import MOST_BY_GROUPS, by_groups
from dsv4attn.core.argument_checks import round_up
from dsv4attn.core.cache.layout import PagedKVCache
from dsv4attn.core.torch_ops.arguments import TokenMap
from dsv4attn.core.torch_ops.indexer import IndexQuery

__all__ = ["MOST", "Form", "choose", "form_of", "scratch_bytes", "select", "variants"]

MOST: int = kernels_group_select.MOST.value
"""Entries that can be selected in a row."""
SHORTEST, SIZES = 2048, (8192, 16384)
"""Entries of a row in registers, at least; and of rows whose groups are chosen first."""
GROUPED = 8, 16
"""Entries of a group, in shorter and in longer rows."""
MOST_GROUPS = 16384
"""Groups of a row in registers, at most."""
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
    these come with the scores, or there are no groups.
    """

    size: int
    groups: int = 0
    group: int = 8
    slack: int = 0
    read: int = 0

    @property
    def warps(self) -> int:
        """Warps of a program."""
        most = max(self.size, self.groups)
        return 16 if most > 8192 else 4 if self.read or most <= 2048 else 8


def form_of(max_entries: int, topk: int, *, with_maxima: bool) -> Form | None:
    """How rows of up to max_entries are selected; None if they are too long, or K is too large.

    with_maxima: whether the maxima of groups come with the scores.
    """
    if topk > MOST:
        return None
    size = max(next_power_of_2(max_entries), SHORTEST)
    if size <= SIZES[0]:
        return Form(size)
    for size in SIZES:
        for group in GROUPED:
            groups, places = next_power_of_2(-(-max_entries // group)), size // group
            if groups <= MOST_GROUPS and places >= topk:
                return Form(size, groups, group, places - topk, 0 if with_maxima else READ)
    return None


def scratch_bytes(rows: int, max_entries: int, form: Form) -> int:
    """Temporaries of `choose`."""
    groups = round_up(max_entries, form.read) // form.group if form.read else 0
    return 4 * rows * (groups + (form.size // form.group if form.groups else 0))


def choose(
    scores: Tensor, maxima: Tensor | None, visible_lens: Tensor, out: Tensor, max_entries: int, form: Form
) -> None:
    """Write the K entries with the largest scores of each row to out [T, K] int32, ascending, then -1. Exact.

    The rule is that of `layer.select.select`. scores: [T, >= max_entries rounded up to 4] fp32, rows begin at multiples
    of 16 bytes. maxima: [T, groups] fp32, the largest of each group; None if the form reads them, or has no groups.
    """
    rows, topk = out.shape
    if not rows or not topk:
        return
    lists = out.new_empty(rows, form.size // form.group) if form.groups else out
    if maxima is None:
        # columns of a whole number of reads
        columns = round_up(max_entries, form.read) // form.group if form.read else 0
        maxima = scores.new_empty(rows, columns) if columns else scores
    launch(
        choose_groups_kernel,
        (rows,),
        (
            scores, maxima, visible_lens, lists, out, scores.stride(0), maxima.stride(0), out.stride(0), max_entries,
            topk, form.slack,
        ),
        _choose_constants(form),
        num_warps=form.warps,
        **_options(form),
    )  # fmt: skip


@cache
def _choose_constants(form: Form) -> dict[str, Any]:
    constants = {"SIZE": form.size, "GROUPS": form.groups, "GROUP": form.group, "READ": form.read}
    return {**constants, "ASM": not INTERPRETED}


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
    group: int,
) -> None:
    """Write the score of each entry that a token sees to scores [T, E] fp32; NaN for entries without a block.

    As `index_logits.score`, one token at a time. keys, paging: pages, and what `index_logits.paging_of` says of them.
    maxima: [T, groups] fp32 - receives the largest of each group, which has `group` entries; None: not wanted.
    """
    (tokens, entries), table, tile = scores.shape, token_map.block_table, _tile()
    values = index_logits.raw(query.values)
    programs = max(tile.programs * multiprocessors() // tokens, 1)
    span = cdiv(cdiv(entries, tile.entries), programs) * tile.entries
    launch(
        score_groups_kernel,
        (tokens * cdiv(entries, span),),
        (
            values, query.weights, keys, table, token_map.token_to_req, token_map.visible_lens, scores, maxima,
            tokens, table.shape[0], entries, span, values.stride(0), values.stride(1), query.weights.stride(0),
            table.stride(0), table.shape[1], *paging, scores.stride(0), 0 if maxima is None else maxima.stride(0),
        ),
        _score_constants(group),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )  # fmt: skip


@cache
def _score_constants(group: int) -> dict[str, Any]:
    kind, tile = CODES if INTERPRETED else NATIVE, _tile()
    return {
        "KIND": kind.value,
        "BLOCK": tile.entries,
        "GROUP": group,
        "STAGES": tile.stages,
        "DT": tl.float32 if INTERPRETED else tl.float16,
        "ASM": not INTERPRETED,
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
    if not (max_entries > 0 and table.numel() and by_groups(tokens, table.shape[0], max_entries)):
        return False
    of_one_token = tokens <= table.shape[0]
    form, paging = form_of(max_entries, topk, with_maxima=of_one_token), index_logits.paging_of(cache)
    if form is None or paging is None or not index_logits.reads(query):
        return False
    width = round_up(max_entries, 64)
    groups = width // form.group if form.groups and of_one_token else 0
    for part, memory in score_memory(out, width + groups):
        scores, maxima, of_part = memory[:, :width], memory[:, width:] if groups else None, token_map.tokens(part)
        if of_one_token:
            _score(query.tokens(part), cache.tensor, paging, of_part, scores[:, :max_entries], maxima, form.group)
        else:
            score_rows(query.tokens(part), cache, of_part, scores, None, 0)
        choose(scores, maxima, of_part.visible_lens, out[part], max_entries, form)
    return True


def variants(topk: int, max_entries: int) -> Iterator[Variant]:
    """Every variant that `select` can need with rows of up to max_entries."""
    lengths = [SHORTEST]
    while lengths[-1] < max_entries:
        lengths.append(2 * lengths[-1])
    decodes = [form_of(entries, topk, with_maxima=True) for entries in lengths]
    prompts = [form_of(entries, topk, with_maxima=False) for entries in lengths if entries <= MOST_BY_GROUPS]
    forms = [form for form in dict.fromkeys((*decodes, *prompts)) if form is not None]
    types = {"SCORES": "*fp32", "MAXIMA": "*fp32"}
    for form in forms:
        constants = _choose_constants(form)
        variant = Variant.from_types(choose_groups_kernel, types, constants, num_warps=form.warps, **_options(form))
        yield evolve(variant, spills=SPILLS if form.size > SIZES[0] else 0)
    tile, types = _tile(), {"Q": "*u8", "W": "*fp32", "KEYS": "*u8", "OUT": "*fp32"}
    for group, maxima in dict.fromkeys((form.group, "*fp32" if form.groups else "none") for form in forms):
        yield Variant.from_types(
            score_groups_kernel, {**types, "MAXIMA": maxima}, _score_constants(group), num_warps=tile.warps,
            num_stages=tile.stages,
        )  # fmt: skip

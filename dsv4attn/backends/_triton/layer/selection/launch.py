"""Selection of the largest scores of each row: the launcher of `kernels`, with tiles by K and length.

A row is selected by one program. Where rows are few and long, several programs list what may be selected before.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from itertools import product

import torch
from attrs import frozen
from torch import Tensor

from dsv4attn.backends._triton.cache.records import alignment_of_rows
from dsv4attn.backends._triton.compiling.variant import WIDE
from dsv4attn.backends._triton.interpreted import INTERPRETED
from dsv4attn.backends._triton.launching.launch_cache import Constants
from dsv4attn.backends._triton.launching.pdl import uses_pdl
from dsv4attn.backends._triton.launching.recorded import meta_rows, recorded
from dsv4attn.backends._triton.launching.runtime import architecture, launch, multiprocessors
from dsv4attn.backends._triton.layer.selection.kernels import choose_kernel, list_kernel
from dsv4attn.backends._triton.layer.selection.scratch import rows_at_once
from dsv4attn.core.argument_checks import round_up
from dsv4attn.core.cache.ownership import Ownership

MOST = 2048
"""Entries that can be selected in a row."""
_ALL = Ownership(0, 1)
"""Of a rank that has all entries."""
LANES = 64
"""Groups of each run of entries."""
SPLITS = 64
"""Parts of a row, at most."""
SHORTEST = 2048
"""Entries of a row that are held in registers, at least."""
RUN = 512
"""Entries of a run, at least."""
WIDEST = 8
"""Largest number of groups of a row, as a multiple of the entries in registers: reading them takes little time."""


@frozen
class Tile:
    """Entries that are listed together, tiles in flight while a row is folded, and warps of a program."""

    entries: int
    unroll: int
    warps: int


@frozen
class Tiles:
    """Tiles of rows without parts that have more entries than there are in registers; by the latter.

    few: for rows that do not fill the device. many: for more.
    """

    few: Mapping[int, Tile]
    many: Mapping[int, Tile]


@frozen
class Plan:
    """How rows are selected. Lengths of rows are read where kernels run: parts are parts of the entries that are there.

    block: entries of a row in registers. parts: of a row, at most; 0 if rows have none. least: entries of a part are a
    multiple of it. lists: columns of int32 for the lists of a row. run: entries of a run of maxima, see `maxima_run`.
    maxima: columns of these maxima. alone: entries of the longest row whose parts are not listed. many: whether there
    are far more rows than multiprocessors.
    """

    block: int
    parts: int = 0
    least: int = 1
    lists: int = 0
    run: int = 0
    maxima: int = 0
    alone: int = 0
    many: bool = False

    @property
    def columns(self) -> int:
        """Columns of the memory of `select`: lists, then maxima."""
        return self.lists + self.maxima


def block_of(topk: int) -> int:
    """Entries of a row in registers: at least 4 K, which bounds how many can be above a bound."""
    return max(SHORTEST, 4 << (topk - 1).bit_length())


def slack_of(topk: int) -> int:
    """Entries more than K that may reach a bound, which is then found sooner."""
    return topk // 8


SHORT = {2048: Tile(2048, 1, 4), 4096: Tile(4096, 1, 8), 8192: Tile(8192, 1, 16)}
"""By the entries in registers, tiles of rows that have no more."""
LONG = {2048: Tile(2048, 4, 8), 4096: Tile(4096, 2, 16), 8192: Tile(4096, 1, 16)}
"""Tiles of longer rows that have parts, and of rows that have none where nothing else is said."""
_MANY = {2048: Tile(1024, 2, 4)}
"""2,048 rows of 8,192 entries take 111 us on an H200, not 138. 128 of 32,768 entries, with their scores, take 135 us,
and 127 us with LONG (Triton 3.6, 2026-11-23)."""
_A100 = {**LONG, 4096: Tile(2048, 2, 16)}
DEFAULT = Tiles(LONG, {**LONG, **_MANY})
TILES: Mapping[str, Tiles] = {
    "sm_80": Tiles(_A100, {**_A100, **_MANY}),
    **dict.fromkeys(("sm_100", "sm_103"), Tiles(LONG, LONG)),
}
"""Tiles by architecture, else DEFAULT, of which one spills 36 or 40 bytes of a thread on these with Triton 3.9.

Compiled with Triton 3.6 and 3.9, 2026-11-22: no spills on any target. Measured on an H200 only.
"""
LISTS = LONG
"""Tiles of parts of a row."""
SPILLS = 72
"""Bytes that a thread may store and load in all: 68 of the form for many rows with Triton 3.9, for lists that are full;
8 of a kernel that lists with Triton 3.6."""

SPLIT_LENGTH = 16384
"""Rows that may be longer are listed in parts, if they are few."""
LONGEST_BLOCKS = 131072
"""The same for K above 1,024. Candidate blocks of a million entries are as many, and a launch that does nothing in
shorter contexts takes more time than it saves there."""
CHUNK = 4096
"""Entries of a part, at least."""
FEWEST = 4
"""Parts of a long row, if rows fill the device too."""
LISTED = 4
"""Places of the list of a row without parts, as a multiple of the entries in registers."""


def plan_of(rows: int, max_entries: int, topk: int, cores: int) -> Plan:
    """How rows are selected on a device with `cores` multiprocessors. Results do not depend on it."""
    block, most = block_of(topk), 3 * cores // 4
    alone = SPLIT_LENGTH if topk <= 1024 else LONGEST_BLOCKS
    if max_entries <= alone or rows > most:
        # a list of a row that fits is never full
        lists = 0 if max_entries <= block else min(LISTED * block, round_up(max_entries, 64))
        return Plan(block, lists=lists, many=rows > 2 * most)
    least = max(CHUNK, LISTS[block].entries)
    parts = min(SPLITS, -(-max_entries // least), max(2 * cores // max(rows, 1), FEWEST))
    lists, run = round_up(2 * SPLITS + 2 + parts * block, 64), maxima_run(max_entries, topk)
    return Plan(block, parts, least, lists, run, WIDEST * block + LANES if run else 0, max(alone, block))


def planned(rows: int, max_entries: int, topk: int) -> Plan:
    """`plan_of` on this device."""
    return plan_of(rows, max_entries, topk, multiprocessors())


def plan_in_parts(out: Tensor, max_entries: int, topk: int, *further: int) -> Plan:
    """The plan of the rows of out [T, K] that are selected together, as their scores and lists fit into `scratch`.

    further: columns of other memory of a row.
    """
    all_rows = planned(out.shape[0], max_entries, topk)
    return planned(rows_at_once(out, max_entries, all_rows.columns, *further), max_entries, topk)


def maxima_run(max_entries: int, topk: int) -> int:
    """Entries of a run whose maxima are worth having for rows of up to max_entries; 0 if none are.

    A run of entries has LANES groups: `maxima[row, e // run * LANES + e % LANES]` is the largest score of the group of
    entry e, without NaN and absent entries, or -inf. Which lane of its run an entry belongs to does not matter. Columns
    past the run of a row's last entry may be anything.
    """
    if max_entries <= 4 * block_of(topk):
        return 0
    fewest = -(-max_entries * LANES // (WIDEST * block_of(topk)))
    return max(RUN, 1 << (fewest - 1).bit_length())


def select(
    scores: Tensor,
    maxima: Tensor | None,
    visible_lens: Tensor,
    out: Tensor,
    max_entries: int,
    *,
    run: int,
    together: int = 0,
    unit: int = 1,
    plan: Plan | None = None,
    memory: Tensor | None = None,
    proposed: tuple[Ownership, Tensor] | None = None,
    blocks: tuple[Tensor, int] | None = None,
) -> None:
    """Write the K entries with the largest scores of each row to out [T, K] int32, ascending, then -1. Exact.

    Of equal scores the lower entry number wins; -0 is 0, and -inf is the lowest finite number. NaN is never chosen.

    scores: [T, >= max_entries] fp32; columns from a row's visible_lens on are not used. maxima: [T, >= columns] fp32
    as of `maxima_run`, or None; they save time, and results do not depend on them. visible_lens: [T] int32, device; a
    negative one is 0, and one above max_entries is max_entries. run: entries of a run of the maxima; a multiple of
    LANES, or 0 for None. together: above 0 if kernels computed how long runs are, for so many tokens together; `run` is
    the least then. K is at most MOST. unit: what a column of scores has the score of, in the unit of
    visible_lens. plan: of at least as many rows. memory: [T, >= plan.columns] of 4 bytes, which may hold the maxima.
    proposed: whose entries these are, and [T, K] fp32 - the scores that were compared are written there, -inf for none,
    and numbers of whole sequences to out; None: neither. blocks: [T, N] int32 numbers, and the size of a block - the
    columns are the entries of these blocks, and the entries' own numbers are written; None: the columns' numbers.
    """
    rows, topk = out.shape
    assert topk <= MOST
    if not rows or not topk:
        return
    plan = planned(rows, max_entries, topk) if plan is None else plan
    if memory is None:
        memory = scores.new_empty(rows, plan.columns)
    aligned, slack, block = _aligned(scores, maxima, max_entries), slack_of(topk), plan.block
    if maxima is None or max_entries <= block:
        maxima, run, together = scores, 0, 0
    lists = memory.view(torch.int32) if plan.lists else out
    split, pointers, groups = plan.parts > 0, (scores, maxima, visible_lens, lists), max(plan.maxima - LANES, 1)
    if split:
        write_lists(pointers, max_entries, unit, topk, run, plan, plan.alone, aligned, together=together)
    constants, warps = _choose_constants(
        block, aligned, architecture(), long=max_entries > block, split=split, many=plan.many
    )
    owner, sent = (_ALL, None) if proposed is None else proposed
    of_blocks, size = (None, 1) if blocks is None else blocks
    launch(
        choose_kernel,
        (rows,),
        (
            *pointers, out, sent, of_blocks, scores.stride(0), maxima.stride(0), lists.stride(0), out.stride(0),
            0 if sent is None else sent.stride(0), 0 if of_blocks is None else of_blocks.stride(0), max_entries, unit,
            topk, slack, run, plan.least, together, groups, max(plan.parts, 1),
            block if split else plan.lists, plan.alone, size, owner.rank, owner.size, owner.interleave,
        ),
        constants,
        num_warps=warps,
        spills=SPILLS if plan.many else 0,
    )  # fmt: skip


def write_lists(
    pointers: tuple[Tensor, ...],
    max_entries: int,
    unit: int,
    topk: int,
    run: int,
    plan: Plan,
    alone: int,
    aligned: int,
    *,
    lanes: int = 0,
    together: int = 0,
) -> None:
    """List what may be selected in the parts of rows of more than `alone` entries.

    pointers: scores, maxima, lengths and lists, see `list_kernel`. run, together: of the maxima. lanes: of a
    run; 0: LANES.
    """
    scores, maxima, lens, lists = pointers
    constants, warps = _list_constants(plan.block, aligned, lanes or LANES, architecture())
    launch(
        list_kernel,
        (lens.shape[0] * plan.parts,),
        (
            *pointers, scores.stride(0), maxima.stride(0), lists.stride(0), max_entries, unit, topk, slack_of(topk),
            run, plan.least, together, max(plan.maxima - LANES, 1), plan.parts, plan.block, alone,
        ),
        constants,
        num_warps=warps,
        spills=SPILLS,
    )  # fmt: skip


def _aligned(scores: Tensor, maxima: Tensor | None, max_entries: int) -> int:
    """Bytes that divide the address of every row, if wide accesses stay inside them; else 1."""
    if scores.shape[1] < -(-max_entries // 4) * 4:
        return 1
    return alignment_of_rows(scores) if maxima is None else alignment_of_rows(scores, maxima)


@cache
def _list_constants(block: int, aligned: int, lanes: int, arch: str) -> tuple[Constants, int]:
    tile = LISTS[block]
    constants = {"LANES": lanes, "BLOCK": block, "TILE": tile.entries, "UNROLL": tile.unroll, "SPLITS": SPLITS}
    return Constants({**constants, "ALIGNED": aligned, "PDL": uses_pdl(arch) and not INTERPRETED}), tile.warps


@cache
def _choose_constants(
    block: int, aligned: int, arch: str, *, long: bool, split: bool, many: bool
) -> tuple[Constants, int]:
    tiles = TILES.get(arch, DEFAULT)
    tile = (SHORT if not long else LONG if split else tiles.many if many else tiles.few)[block]
    constants = {"LANES": LANES, "BLOCK": block, "TILE": tile.entries, "UNROLL": tile.unroll}
    constants |= {"SPLITS": SPLITS if split else 1, "LONG": long, "ALIGNED": aligned}
    return Constants({**constants, "PDL": uses_pdl(arch) and not INTERPRETED}), tile.warps


@recorded
def variants(
    topk: int, max_entries: int, *, aligned: bool = True, proposes: bool = False, of_blocks: bool = False
) -> None:
    """Every variant that `select` can need with rows of up to max_entries.

    aligned: whether rows are, to 16 bytes. proposes: whether entries may be `proposed` too. of_blocks: whether columns
    are of `blocks`.
    """
    cores = multiprocessors()
    lengths = sorted({min(block_of(topk), max_entries), max_entries})
    # rows that are listed in parts where they are long; that are not; and many
    for rows, entries, alignment in product((1, cores, 2 * cores), lengths, (WIDE,) if aligned else (WIDE, 1)):
        scores = meta_rows(rows, round_up(entries, 4), dtype=torch.float32, alignment=alignment)
        out, blocks = meta_rows(rows, topk), (meta_rows(rows, 1), 1) if of_blocks else None
        for sent in (None, scores[:, :topk])[: 1 + proposes]:
            proposed = None if sent is None else (_ALL, sent)
            select(scores, None, out[:, 0], out, entries, run=0, proposed=proposed, blocks=blocks)

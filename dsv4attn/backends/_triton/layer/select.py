"""Selection of the largest scores of each row: the launcher of `kernels_select`, with tiles by K and length.

A row is selected by one program. Where rows are few and long, several programs list what may be selected before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from attrs import frozen
from torch import Tensor

from dsv4attn.backends._triton.cache.records import alignment_of_rows
from dsv4attn.backends._triton.compiling.variant import Variant
from dsv4attn.backends._triton.launching.runtime import WIDE, architecture, launch, multiprocessors
from dsv4attn.backends._triton.layer.kernels_select import choose_kernel, list_kernel, maxima_kernel
from dsv4attn.backends._triton.sizes import next_power_of_2
from dsv4attn.core.cache.ownership import Ownership

__all__ = ["LANES", "MOST", "maxima_columns", "maxima_run", "scratch_bytes", "select", "variants", "wanted_run"]

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
    """How rows are selected.

    block: entries of a row in registers. chunk: entries of a part; 0 if rows have no parts. parts: of the longest row.
    many: whether there are far more rows than multiprocessors.
    """

    block: int
    chunk: int = 0
    parts: int = 1
    many: bool = False


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

SPLIT_LENGTH = 16384
"""Rows that may be longer are listed in parts, if they are few."""
CHUNK = 4096
"""Entries of a part, at least; twice as many if parts fill the device twice."""


def plan_of(rows: int, max_entries: int, topk: int, cores: int) -> Plan:
    """How rows are selected on a device with `cores` multiprocessors. Results do not depend on it."""
    block, most = block_of(topk), 3 * cores // 4
    if max_entries <= SPLIT_LENGTH or rows > most:
        return Plan(block, many=rows > 2 * most)
    least = CHUNK if rows * -(-max_entries // CHUNK) <= 2 * cores else 2 * CHUNK
    chunk = max(least, LISTS[block].entries, next_power_of_2(-(-max_entries // SPLITS)))
    return Plan(block, chunk, -(-max_entries // chunk))


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


def wanted_run(rows: int, max_entries: int, topk: int) -> int:
    """`maxima_run` if maxima save time: only where rows are listed in parts, each of which needs a bound; else 0."""
    return maxima_run(max_entries, topk) if plan_of(rows, max_entries, topk, multiprocessors()).chunk else 0


def maxima_columns(max_entries: int, run: int) -> int:
    """Columns of the maxima of rows of up to max_entries."""
    return -(-max_entries // run) * LANES


def _list_columns(plan: Plan, max_entries: int, topk: int) -> int:
    """int32 numbers of scratch memory for a row."""
    if plan.chunk:
        return max_entries + 2 * SPLITS + 2
    if max_entries <= plan.block:
        return 0
    # of each group above the bound all entries, and K that are tied
    most = (topk + slack_of(topk)) * -(-max_entries // plan.block) + topk
    return min(most, max_entries)


def scratch_bytes(rows: int, max_entries: int, topk: int) -> int:
    """Temporaries of `select`, at most."""
    plan = plan_of(rows, max_entries, topk, multiprocessors())
    columns = _list_columns(plan, max_entries, topk)
    if plan.chunk and (run := maxima_run(max_entries, topk)):
        columns += maxima_columns(max_entries, run)
    return 4 * rows * columns


def select(
    scores: Tensor,
    maxima: Tensor | None,
    visible_lens: Tensor,
    out: Tensor,
    max_entries: int,
    *,
    run: int,
    proposed: tuple[Ownership, Tensor] | None = None,
) -> None:
    """Write the K entries with the largest scores of each row to out [T, K] int32, ascending, then -1. Exact.

    Of equal scores the lower entry number wins; -0 is 0, and -inf is the lowest finite number. NaN is never chosen.

    scores: [T, >= max_entries] fp32; columns from a row's visible_lens on are not used. maxima: [T, >= columns] fp32
    as of `maxima_run`, or None; they save time, and results do not depend on them. visible_lens: [T] int32, device; a
    negative one is 0, and one above max_entries is max_entries. run: entries of a run of the maxima; a multiple of
    LANES, or 0 for None. K is at most MOST. proposed: whose entries these are, and [T, K] fp32 - the scores that were
    compared are written there, -inf for none, and numbers of whole sequences to out; None: neither.
    """
    rows, topk = out.shape
    assert topk <= MOST
    if not rows or not topk:
        return
    plan = plan_of(rows, max_entries, topk, multiprocessors())
    aligned = _aligned(scores, maxima, max_entries)
    slack, block = slack_of(topk), plan.block
    if maxima is None or max_entries <= block:
        maxima, run = scores, 0
    columns = _list_columns(plan, max_entries, topk)
    lists = out.new_empty(rows, columns) if columns else out
    if plan.chunk:
        if not run and (run := maxima_run(max_entries, topk)):
            maxima = _maxima(scores, visible_lens, max_entries, run, aligned)
        constants, warps = _list_constants(block, aligned)
        launch(
            list_kernel,
            (rows * plan.parts,),
            (
                scores, maxima, visible_lens, lists, scores.stride(0), maxima.stride(0), columns,
                max_entries, topk, slack, run, plan.chunk, plan.parts,
            ),
            constants,
            num_warps=warps,
        )  # fmt: skip
    constants, warps = _choose_constants(
        block, max_entries > block, bool(plan.chunk), plan.many, aligned, architecture()
    )
    owner, sent = (_ALL, None) if proposed is None else proposed
    launch(
        choose_kernel,
        (rows,),
        (
            scores, maxima, visible_lens, lists, out, sent, scores.stride(0), maxima.stride(0), columns, out.stride(0),
            0 if sent is None else sent.stride(0), max_entries, topk, slack, run, plan.chunk,
            owner.rank, owner.size, owner.interleave,
        ),
        constants,
        num_warps=warps,
    )  # fmt: skip


def _maxima(scores: Tensor, visible_lens: Tensor, max_entries: int, run: int, aligned: int) -> Tensor:
    """Maxima of scores that came without."""
    constants, warps = _maxima_constants(aligned)
    rows, runs = visible_lens.shape[0], -(-max_entries // run)
    maxima = scores.new_empty(rows, runs * LANES)
    launch(
        maxima_kernel,
        (rows * runs,),
        (scores, visible_lens, maxima, scores.stride(0), runs * LANES, max_entries, run, runs),
        constants,
        num_warps=warps,
    )
    return maxima


def _aligned(scores: Tensor, maxima: Tensor | None, max_entries: int) -> int:
    """Bytes that divide the address of every row, if wide accesses stay inside them; else 1."""
    if scores.shape[1] < -(-max_entries // 4) * 4:
        return 1
    return alignment_of_rows(scores) if maxima is None else alignment_of_rows(scores, maxima)


@cache
def _maxima_constants(aligned: int) -> tuple[dict[str, Any], int]:
    return {"LANES": LANES, "BLOCK": RUN, "ALIGNED": aligned}, 4


@cache
def _list_constants(block: int, aligned: int) -> tuple[dict[str, Any], int]:
    tile = LISTS[block]
    constants = {"LANES": LANES, "BLOCK": block, "TILE": tile.entries, "UNROLL": tile.unroll, "SPLITS": SPLITS}
    return {**constants, "ALIGNED": aligned}, tile.warps


@cache
def _choose_constants(
    block: int,
    long: bool,  # noqa: FBT001 - constants of a launch
    split: bool,  # noqa: FBT001 - as above
    many: bool,  # noqa: FBT001 - as above
    aligned: int,
    arch: str,
) -> tuple[dict[str, Any], int]:
    tiles = TILES.get(arch, DEFAULT)
    tile = (SHORT if not long else LONG if split else tiles.many if many else tiles.few)[block]
    constants = {"LANES": LANES, "BLOCK": block, "TILE": tile.entries, "UNROLL": tile.unroll}
    return {**constants, "SPLITS": SPLITS if split else 1, "LONG": long, "ALIGNED": aligned}, tile.warps


def variants(
    topk: int, max_entries: int, arch: str, *, aligned: bool = True, proposes: bool = False
) -> Iterator[Variant]:
    """Every variant that `select` can need with rows of up to max_entries.

    aligned: whether rows are, to 16 bytes. proposes: whether entries may be `proposed` too.
    """
    block = block_of(topk)
    scores, fp32 = {"SCORES": "*fp32"}, {"SCORES": "*fp32", "MAXIMA": "*fp32"}
    for rows in (WIDE,) if aligned else (WIDE, 1):
        for long in (False, True)[: 1 + (max_entries > block)]:
            for split in (False, True)[: 1 + (max_entries > SPLIT_LENGTH)]:
                for many in (False, True)[: 1 + (long and not split)]:
                    if long or not split:
                        constants, warps = _choose_constants(block, long, split, many, rows, arch)
                        for sent in ("none", "*fp32")[: 1 + proposes]:
                            types = {**fp32, "SENT": sent}
                            yield Variant.from_types(choose_kernel, types, constants, num_warps=warps)
        if max_entries > SPLIT_LENGTH:
            constants, warps = _list_constants(block, rows)
            yield Variant.from_types(list_kernel, fp32, constants, num_warps=warps)
            constants, warps = _maxima_constants(rows)
            yield Variant.from_types(maxima_kernel, scores | {"MAXIMA": "*fp32"}, constants, num_warps=warps)

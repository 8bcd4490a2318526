"""Kernels of DeepSeek-V4.1's selection in two levels: scores of blocks of entries, and scores inside chosen blocks."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton.language as tl

from dsv4attn.backends._triton.launching.runtime import stable_kernel


@stable_kernel
def block_scores_kernel(
    SCORES,  # [n, >= max_entries] fp32, NaN for entries that are absent
    LENS,  # [n] int32: entries that each token sees
    OUT,  # [n, >= max_blocks] fp32
    COUNTS,  # [n] int32: blocks that each token sees
    score_stride: tl.int64, out_stride: tl.int64, max_entries: tl.int32, parts: tl.int32,
    SIZE: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Grid: (n * parts,): the largest score of each of BLOCKS blocks of SIZE entries; NaN of blocks without any.

    The block of the newest entry gets infinity, and no other.
    """
    token, part = (tl.program_id(0) // parts).to(tl.int64), tl.program_id(0) % parts
    seen = tl.minimum(tl.maximum(tl.load(LENS + token), 0), max_entries)
    count = tl.cdiv(seen, SIZE)
    if part == 0:
        tl.store(COUNTS + token, count)
    block = part * BLOCKS + tl.arange(0, BLOCKS)
    if part * BLOCKS < count:
        entry = block[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
        nan = float("nan")
        score = tl.load(SCORES + token * score_stride + entry, mask=entry < seen, other=nan)
        is_number = score == score  # noqa: PLR0124 - NaN is not
        finite = tl.minimum(tl.maximum(score, -3.4028234663852886e38), 3.4028234663852886e38)
        # [BLOCKS]; -inf is no score of an entry
        largest = tl.max(tl.where(is_number, finite, float("-inf")), 1)
        largest = tl.where(largest == float("-inf"), nan, largest)
        largest = tl.where(block == count - 1, float("inf"), largest)
        tl.store(OUT + token * out_stride + block, largest, mask=block < count)


@stable_kernel
def keep_kernel(
    SCORES,  # [n, >= max_entries] fp32
    CANDIDATES,  # [n, num_candidates] int32: numbers of blocks; others are none
    OUT,  # [n, >= max_entries] fp32
    score_stride: tl.int64, candidate_stride: tl.int64, out_stride: tl.int64, num_candidates: tl.int32,
    max_entries: tl.int32, parts: tl.int32,
    SIZE: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Grid: (n * parts,): scores of the entries of BLOCKS candidates are copied to their places."""
    token, part = (tl.program_id(0) // parts).to(tl.int64), tl.program_id(0) % parts
    index = part * BLOCKS + tl.arange(0, BLOCKS)
    block = tl.load(CANDIDATES + token * candidate_stride + index, mask=index < num_candidates, other=-1)
    exists = (block >= 0) & (block < tl.cdiv(max_entries, SIZE))
    entry = tl.where(exists, block, 0)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    live = exists[:, None] & (entry < max_entries)
    score = tl.load(SCORES + token * score_stride + entry, mask=live, other=0.0)
    tl.store(OUT + token * out_stride + entry, score, mask=live)

"""Lists of entries that may be selected, for kernels that score and select in one: compacted, and chosen from.

A member is an int64: its score, which is fp32, in the high half, and its entry in the low one. Members are in ascending
order of their entries. Keys are those of `kernels`. These are functions of plain Triton that Gluon calls too, so
vectors come from the caller, which alone knows their layout.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from dsv4attn.backends._triton.layer.selection.kernels import INFINITE, LOWEST, append, keys_of, kth_largest, score_of


@triton.jit
def kth_listed(LIST, listed, wanted, slack, at):
    """`kth_largest` of the keys of a list's members, `listed` of them. at: 0 and on, all places of a list."""
    live = at < listed
    scores = tl.load(LIST.to(tl.pointer_type(tl.float32)) + (2 * at + 1), mask=live, other=0.0)
    low, high = listed * 0 + LOWEST, listed * 0 + (INFINITE + 1)
    return kth_largest(keys_of(scores, live), low, listed, high, listed * 0, wanted, slack, True)


@triton.jit
def members_of(LIST, listed, at):
    """Members of a list at some places, and their keys, which are ABSENT past the last."""
    live = at < listed
    members = tl.load(LIST + at, mask=live, other=0)
    return members, keys_of((members >> 32).to(tl.int32).to(tl.float32, bitcast=True), live)


@triton.jit
def member_of(score, entry):
    """The member that lists an entry with its score."""
    # neither half has a sign, so they are two registers
    high, low = score.to(tl.uint32, bitcast=True), entry.to(tl.uint32, bitcast=True)
    return ((high.to(tl.uint64) << 32) | low.to(tl.uint64)).to(tl.int64, bitcast=True)


@triton.jit
def compact(LIST, listed, wanted, slack, at, part, SIZE: tl.constexpr, PART: tl.constexpr):
    """Keep the members of a list that may be selected, in their order: `wanted` or up to `slack` more.

    at: 0 .. SIZE - 1, places of the list, of which more than `wanted` are listed. part: 0 .. PART - 1.
    Returns how many are kept, and a key that `wanted` members reach: of higher entries, only those above it can be
    selected.
    """
    key, reached, above = kth_listed(LIST, listed, wanted, slack, at)
    kept = tl.where(reached > wanted + slack, wanted, reached)
    ties = tl.where(reached > wanted + slack, wanted - above, SIZE)
    counted, tied = listed * 0, listed * 0
    for start in range(0, listed, PART):
        members, keys = members_of(LIST, listed, start + part)
        # the list is written where it has been read
        tl.debug_barrier()
        counted, tied = append(keys, members, key, counted, tied, ties, LIST, SIZE)
    return kept, key


@triton.jit
def make_space(
    LIST, count, least, number, wanted, slack, at, part, SIZE: tl.constexpr, PART: tl.constexpr, TOKENS: tl.constexpr
):  # fmt: skip
    """`compact` the lists of some tokens, SIZE places apart, that are more than half full; (count, least) after that.

    count, least, number: [TOKENS] members of each, the score that later members reach, 0 .. TOKENS - 1.
    """
    # members were written by all threads
    tl.debug_barrier()
    for token in range(TOKENS):
        mine = number == token
        listed = tl.sum(tl.where(mine, count, 0), 0)
        if listed > SIZE // 2:
            kept, key = compact(LIST + token * SIZE, listed, wanted, slack, at, part, SIZE, PART)
            count, least = tl.where(mine, kept, count), tl.where(mine, score_of(key + 1), least)
    tl.debug_barrier()
    return count, least


@triton.jit
def choose_listed(LIST, listed, out, wanted, at, half, part, SIZE: tl.constexpr, PART: tl.constexpr):
    """Write the entries, ascending, of the `wanted` members with the largest keys, and -1 after them.

    Of equal keys the first are chosen. at, part: as of `compact`. half: the first half of `at`.
    """
    # most lists are at most half full then
    if listed <= SIZE // 2:
        key, reached, above = kth_listed(LIST, listed, wanted, 0, half)
    else:
        key, reached, above = kth_listed(LIST, listed, wanted, 0, at)
    ties = tl.where(reached > wanted, wanted - above, SIZE)
    counted, tied = listed * 0, listed * 0
    for start in range(0, listed, PART):
        members, keys = members_of(LIST, listed, start + part)
        counted, tied = append(keys, members.to(tl.int32), key, counted, tied, ties, out, wanted)
    for start in range(tl.minimum(reached, wanted) // PART * PART, wanted, PART):
        column = start + part
        tl.store(out + column, -1, mask=(column >= tl.minimum(reached, wanted)) & (column < wanted))

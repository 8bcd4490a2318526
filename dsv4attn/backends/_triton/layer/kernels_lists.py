"""Lists of entries that may be selected, for kernels that score and select in one: compacted, and chosen from.

A member is an int64: its key, see `kernels_select`, in the high half, and its entry in the low one. Members are in
ascending order of their entries. These are functions of plain Triton that Gluon calls too, so vectors come from the
caller, which alone knows their layout.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from dsv4attn.backends._triton.layer.kernels_select import ABSENT, INFINITE, LOWEST, append, kth_largest


@triton.jit
def kth_listed(LIST, listed, wanted, slack, at):
    """`kth_largest` of the keys of a list's members. at: 0 and on, all places of a list."""
    live = at < listed
    high = tl.load(LIST.to(tl.pointer_type(tl.int32)) + (2 * at + 1), mask=live, other=0)
    lowest, infinite = listed * 0 + LOWEST, listed * 0 + (INFINITE + 1)
    return kth_largest(tl.where(live, high, ABSENT), lowest, listed, infinite, listed * 0, wanted, slack)


@triton.jit
def members_of(LIST, listed, at):
    """Members of a list at some places, and their keys, which are ABSENT past the last."""
    live = at < listed
    members = tl.load(LIST + at, mask=live, other=0)
    return members, tl.where(live, (members >> 32).to(tl.int32), ABSENT)


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
    LIST, count, bound, number, wanted, slack, at, part, SIZE: tl.constexpr, PART: tl.constexpr, TOKENS: tl.constexpr
):  # fmt: skip
    """`compact` the lists of some tokens, SIZE places apart, that are more than half full; (count, bound) after that.

    count, bound, number: [TOKENS] members of each, the key that later members are above, 0 .. TOKENS - 1.
    """
    # members were written by all threads
    tl.debug_barrier()
    for token in range(TOKENS):
        mine = number == token
        listed = tl.sum(tl.where(mine, count, 0), 0)
        if listed > SIZE // 2:
            kept, key = compact(LIST + token * SIZE, listed, wanted, slack, at, part, SIZE, PART)
            count, bound = tl.where(mine, kept, count), tl.where(mine, key, bound)
    tl.debug_barrier()
    return count, bound


@triton.jit
def choose_listed(LIST, listed, out, wanted, at, part, SIZE: tl.constexpr, PART: tl.constexpr):
    """Write the entries, ascending, of the `wanted` members with the largest keys, and -1 after them.

    Of equal keys the first are chosen. at, part: as of `compact`.
    """
    key, reached, above = kth_listed(LIST, listed, wanted, 0, at)
    ties = tl.where(reached > wanted, wanted - above, SIZE)
    counted, tied = listed * 0, listed * 0
    for start in range(0, listed, PART):
        members, keys = members_of(LIST, listed, start + part)
        counted, tied = append(keys, members.to(tl.int32), key, counted, tied, ties, out, wanted)
    for start in range(tl.minimum(reached, wanted) // PART * PART, wanted, PART):
        column = start + part
        tl.store(out + column, -1, mask=(column >= tl.minimum(reached, wanted)) & (column < wanted))

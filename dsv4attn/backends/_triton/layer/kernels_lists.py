"""Lists of entries that may be selected, for kernels that score and select in one: compacted, and chosen from.

A member is an int64: its key, see `kernels_select`, in the high half, and its entry in the low one. Members are in
ascending order of their entries. These are functions of plain Triton that Gluon calls too, so vectors come from the
caller, which alone knows their layout.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from dsv4attn.backends._triton.layer.kernels_select import ABSENT, INFINITE, LOWEST, choose, kth_largest


@triton.jit
def members_of(LIST, listed, at):
    """Members of a list, int64 of a key in the high half and an entry in the low; and their keys, ABSENT past the last.

    at: places of the list.
    """
    live = at < listed
    members = tl.load(LIST + at, mask=live, other=0)
    return members, tl.where(live, (members >> 32).to(tl.int32), ABSENT)


@triton.jit
def compact(LIST, listed, wanted, slack, at, SIZE: tl.constexpr):
    """Keep the members of a list that may be selected, in their order: `wanted` or up to `slack` more.

    at: 0 .. SIZE - 1, places of the list, of which more than `wanted` are listed, in ascending order of their entries.
    Returns how many are kept, and the lowest of their keys or a lower one: `wanted` members reach it, so that members
    of higher entries are selected only if they are above it.
    """
    members, keys = members_of(LIST, listed, at)
    lowest, infinite = listed * 0 + LOWEST, listed * 0 + (INFINITE + 1)
    key, reached, above = kth_largest(keys, lowest, listed, infinite, listed * 0, wanted, slack)
    ties = tl.where(reached > wanted + slack, wanted - above, SIZE)
    is_above, is_tied = keys > key, keys == key
    seen = tl.cumsum(is_above.to(tl.int32) + (is_tied.to(tl.int32) << 16), 0)
    tied = seen >> 16
    place = (seen & 0xFFFF) + tl.minimum(tied, ties) - 1
    # the list is written where it has been read
    tl.debug_barrier()
    tl.store(LIST + place, members, mask=is_above | (is_tied & (tied <= ties)))
    return tl.where(reached > wanted + slack, wanted, reached), key


@triton.jit
def make_space(LIST, count, bound, number, wanted, slack, at, SIZE: tl.constexpr, TOKENS: tl.constexpr):
    """`compact` the lists of some tokens, SIZE places apart, that are more than half full; (count, bound) after that.

    count, bound, number: [TOKENS] members of each, the key that later members are above, 0 .. TOKENS - 1. at: 0 ..
    SIZE - 1.
    """
    # members were written by all threads
    tl.debug_barrier()
    for token in range(TOKENS):
        mine = number == token
        listed = tl.sum(tl.where(mine, count, 0), 0)
        if listed > SIZE // 2:
            kept, key = compact(LIST + token * SIZE, listed, wanted, slack, at, SIZE)
            count, bound = tl.where(mine, kept, count), tl.where(mine, key, bound)
    tl.debug_barrier()
    return count, bound


@triton.jit
def choose_listed(LIST, listed, out, wanted, at, SIZE: tl.constexpr):
    """`choose` among the members of a list. at: 0 .. SIZE - 1."""
    members, keys = members_of(LIST, listed, at)
    lowest, infinite = listed * 0 + LOWEST, listed * 0 + (INFINITE + 1)
    choose(keys, members.to(tl.int32), at, lowest, listed, infinite, listed * 0, out, wanted, SIZE)

"""`NewTokens`: the tokens that a call of the model adds to each sequence, read from its mask and position ids."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import frozen
from torch import Tensor

from dsv4attn.errors import ArgumentError, UnsupportedError

_LEFT = (
    "pad prompts on the left (tokenizer.padding_side = 'left'); give generate the attention_mask: without one it takes "
    "every padding id of a prompt for padding"
)
_WHOLE = "pass a mask of all columns so far and the new ones, as generate does"
_TURNS = "; if later turns of a batch have unequal lengths, take one cache for each conversation"


@frozen
class NewTokens:
    """The new tokens of N sequences in S columns, padded on the left.

    counts: new tokens of each sequence: the last columns of its row.
    pads: columns of padding before the first token of each sequence, in all calls so far and this one.
    """

    counts: list[int]
    pads: list[int]

    @classmethod
    def read(
        cls,
        columns: int,
        lengths: Sequence[int],
        pads: Sequence[int],
        past: int,
        attention_mask: object,
        position_ids: Tensor | None,
    ) -> NewTokens:
        """Read the arguments of a call. With one of the two, numbers are read on the host once.

        columns: S. lengths: tokens of each sequence before the call. pads: columns of padding of each. past: columns
        before the call. attention_mask: [N, past + S] - 1 for tokens, 0 for padding; None: no padding among the new
        columns. position_ids: [N or 1, S] - numbers of tokens in their sequences, not read for padding; None: these.

        Raises ArgumentError for other shapes and dtypes and position ids that do not continue the sequences, and
        UnsupportedError for masks of another kind, padding on the right, and holes.
        """
        n, total = len(lengths), past + columns
        turns = _TURNS if past and n > 1 else ""
        mask, ids = _checked_mask(attention_mask, n, past, columns), _checked_ids(position_ids, n, columns)
        if mask is None and ids is None:
            return cls([columns] * n, [*pads])
        rows = _read(mask, ids, lengths, past, columns)
        for row, (count, hole, _) in enumerate(rows):
            if hole:
                expected, actual = "padding, then tokens without a gap", "a 0 after a 1: a hole, or padding at the end"
                raise UnsupportedError(f"attention_mask[{row}]", expected=expected, actual=actual, hint=_LEFT + turns)
            # the padding of a sequence is what it was before
            same = total - count == pads[row] if lengths[row] else count <= columns
            if mask is not None and not same:
                expected = f"{lengths[row]} tokens among the first {past} columns, those in the cache"
                actual = f"{total - count} columns of padding, then {count} tokens"
                raise ArgumentError(f"attention_mask[{row}]", expected=expected, actual=actual, hint=_WHOLE + turns)
        for row, (_, _, wrong) in enumerate(rows):
            if wrong:
                expected = f"ids that continue at {lengths[row]}, the tokens in the cache, without a gap"
                hint = "pass position_ids=None, or a cache that ends where these begin"
                raise ArgumentError(f"position_ids[{row}]", expected=expected, actual="others", hint=hint)
        counts = [count for count, _, _ in rows]
        new = [count - length for count, length in zip(counts, lengths, strict=True)]
        return cls(new, [total - count for count in counts])


def _read(
    mask: Tensor | None, ids: Tensor | None, lengths: Sequence[int], past: int, columns: int
) -> list[tuple[int, bool, bool]]:
    """For each row: tokens with those of this call, whether they have a gap, and whether their ids are wrong."""
    like = ids if mask is None else mask
    assert like is not None
    column = torch.arange(past + columns, device=like.device)
    if mask is None:
        counts = torch.tensor(lengths, device=like.device, dtype=torch.int64) + columns
        holes = torch.zeros_like(counts, dtype=torch.bool)
    else:
        real = mask.to(torch.bool)
        counts = real.sum(1)
        holes = (real != (column >= column.shape[0] - counts[:, None])).any(1)
    wrong = torch.zeros_like(holes)
    if ids is not None:
        place = column - (column.shape[0] - counts[:, None])
        wrong = ((ids.to(like.device) != place[:, past:]) & (place[:, past:] >= 0)).any(1)
    numbers = torch.stack((counts, holes.to(counts.dtype), wrong.to(counts.dtype))).T.tolist()
    return [(count, bool(hole), bool(is_wrong)) for count, hole, is_wrong in numbers]


def _checked_ids(ids: Tensor | None, n: int, columns: int) -> Tensor | None:
    if ids is not None and tuple(ids.shape) not in ((n, columns), (1, columns)):
        expected = f"shape {[n, columns]} or {[1, columns]}"
        raise ArgumentError("position_ids", expected=expected, actual=list(ids.shape))
    return ids


def _checked_mask(mask: object, n: int, past: int, columns: int) -> Tensor | None:
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.ndim != 2 or mask.is_floating_point():
        actual = f"{list(mask.shape)} {mask.dtype}" if isinstance(mask, Tensor) else f"a {type(mask).__name__}"
        expected = f"None, or {[n, past + columns]} integers or bools, 1 for tokens and 0 for padding"
        hint = "the attention of each layer makes its own causal mask from the lengths; other masks are not served"
        raise UnsupportedError("attention_mask", expected=expected, actual=actual, hint=hint)
    if tuple(mask.shape) != (n, past + columns):
        expected = f"shape {[n, past + columns]}: {past} columns in the cache and {columns} new ones"
        raise ArgumentError("attention_mask", expected=expected, actual=list(mask.shape), hint=_WHOLE)
    return mask

"""`DeepseekV4PagedCache`: the sequences of a batch on the pages of a patched model, as a `Cache` of transformers.

Importing this module imports transformers.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from dsv4attn.core.argument_checks import check_count, shown
from dsv4attn.errors import ArgumentError, UnsupportedError
from dsv4attn.integrations.transformers.new_tokens import NewTokens
from dsv4attn.integrations.transformers.pages import Pages
from dsv4attn.serving.cache_manager import CachedSequence

_POSITIVE = (
    "Calling `crop` with a positive value (`{}`) is not supported. "
    "Please use a negative integer to remove that number of tokens from the cache instead."
)
"""What `Cache.crop` of transformers says."""


class DeepseekV4PagedCache(Cache):  # type: ignore[misc] # transformers is untyped here
    """Cache of a batch of sequences, for a patched model and its `generate`.

    Both take it as `cache`, or before transformers 5.24 as `past_key_values`. The first call with it fixes the number
    of sequences. It may be passed again, to continue them. `reset`, or deleting it, gives its pages back. A copy
    (`copy.deepcopy`) is a `fork`.

    model: a model that was given to `patch`, or its `dsv4attn.pages`. Raises ArgumentError for others.
    """

    def __init__(self, model: object) -> None:
        super().__init__(layers=[])
        self.pages = model if isinstance(model, Pages) else Pages.of(model)
        self._sequences: list[CachedSequence] = []
        self._pads: list[int] = []
        self._columns = 0
        self.pages.caches.add(self)
        # pages are given back before the next step: the collector may run in the middle of one
        weakref.finalize(self, self.pages.dropped.append, self._sequences).atexit = False

    @property
    def sequences(self) -> tuple[CachedSequence, ...]:
        """The sequences on pages, in the order of the batch."""
        return tuple(self._sequences)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sequence, without padding."""
        return [sequence.length for sequence in self._sequences]

    @property
    def batch_size(self) -> int:
        """Sequences, or -1 before the first call."""
        return len(self._sequences) or -1

    @property
    def is_initialized(self) -> bool:
        """Whether a call has been completed with it."""
        return bool(self._columns)

    @property
    def is_compileable(self) -> bool:
        """Whether `generate` may compile the model for it: no."""
        return False

    @property
    def is_croppable(self) -> bool:
        """Whether `crop` always works."""
        return self.pages.manager.keep_windows

    @property
    def is_linear(self) -> list[bool]:
        """Whether each layer is one of linear attention: no. `generate` cuts off the columns that are in the cache."""
        return [False] * len(self)

    def __len__(self) -> int:
        return self.pages.geometry.num_layers

    def __repr__(self) -> str:
        return f"{type(self).__name__}(lengths={self.lengths})"

    def __deepcopy__(self, memo: dict[int, Any]) -> DeepseekV4PagedCache:
        return self.fork()

    def __reduce__(self) -> NoReturn:
        hint = "pass the tokens to the model again where it is needed"
        raise UnsupportedError("cache", expected="a cache in this process", actual="one to be pickled", hint=hint)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns of the batch so far, padding included: what a mask of the next call must begin with."""
        return self._columns

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Most tokens of a sequence: the `max_len` of `patch`."""
        return self.pages.limits.max_model_len

    def update(self, *_: object, **__: object) -> NoReturn:
        """Refuse: only the layers of the patched model write to these pages."""
        hint = "pass it to the patched model it was made for; after unpatch, use a DynamicCache"
        raise UnsupportedError("cache", expected="a cache of transformers", actual=repr(self), hint=hint)

    def reset(self) -> None:
        """Give all pages back and become empty, for a batch of any size."""
        self.pages.drain()
        for sequence in self._sequences:
            self.pages.manager.free(sequence)
        self._set([], [], 0)

    def fork(self, length: int | None = None) -> DeepseekV4PagedCache:
        """A copy with pages of its own, of the first `length` columns, all by default: a shared prompt, say.

        Raises ArgumentError if pages that the next token reads were given back (see `keep_windows` of `patch`), and
        OutOfPagesError. After any error, such as that of full memory, nothing is taken.
        """
        columns = self._columns if length is None else self._checked(length)
        self.pages.drain()
        copy, forks = DeepseekV4PagedCache(self.pages), list[CachedSequence]()
        try:
            for sequence, pads in zip(self._sequences, self._pads, strict=True):
                with _cure_of_patch():
                    forks.append(self.pages.manager.fork(sequence, max(columns - pads, 0)))
        except BaseException:
            for sequence in forks:
                self.pages.manager.free(sequence)
            raise
        copy._set(forks, [min(pads, columns) for pads in self._pads], columns)
        return copy

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last columns: `crop(-n)` removes n of them, and `crop(0)` none, as in transformers.

        Raises ArgumentError, with nothing removed, for positive numbers, and as `fork` does.
        """
        if tokens_to_remove > 0:
            expected, hint = "0 or a negative integer", _POSITIVE.format(tokens_to_remove)
            raise ArgumentError("tokens_to_remove", expected=expected, actual=tokens_to_remove, hint=hint)
        columns = self._columns - check_count("-tokens_to_remove", -tokens_to_remove, 0)
        if columns < 0:
            expected = f"{-self._columns} .. 0: there are {self._columns} columns"
            raise ArgumentError("tokens_to_remove", expected=expected, actual=tokens_to_remove)
        lengths = self.lengths
        try:
            for sequence, pads in zip(self._sequences, self._pads, strict=True):
                with _cure_of_patch():
                    self.pages.manager.truncate(sequence, max(columns - pads, 0))
        except BaseException:
            for sequence, length in zip(self._sequences, lengths, strict=True):
                sequence.length = length
            raise
        self._set([*self._sequences], [min(pads, columns) for pads in self._pads], columns)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Go on with these sequences, as beam search does: one that is named twice is forked."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence, as forks."""
        self._select([row for row in range(len(self._sequences)) for _ in range(check_count("repeats", repeats, 1))])

    def batch_select_indices(self, indices: object) -> None:
        """Go on with these sequences, in this order.

        indices: [n] their numbers, or [batch_size] bool, which are to stay, as indices of a tensor.
        """
        if (
            not isinstance(indices, Tensor)
            or indices.ndim != 1
            or indices.is_floating_point()
            or (indices.dtype == torch.bool and len(indices) != len(self._sequences))
        ):
            expected = f"a tensor of numbers of sequences, or of {len(self._sequences)} bools"
            actual = f"{indices.dtype} {list(indices.shape)}" if isinstance(indices, Tensor) else shown(indices)
            raise ArgumentError("indices", expected=expected, actual=actual)
        self._select((indices.nonzero()[:, 0] if indices.dtype == torch.bool else indices).tolist())

    def next_tokens(
        self, rows: int, columns: int, attention_mask: object, position_ids: Tensor | None
    ) -> tuple[list[tuple[CachedSequence, int]], NewTokens]:
        """The sequences of a call [rows, columns] of the model with the new tokens of each.

        The first call makes the sequences; if it fails, `reset` takes them away. Raises what `NewTokens.read` does, and
        ArgumentError for another number of sequences than before, with nothing changed.
        """
        if self._sequences and rows != len(self._sequences):
            expected = f"{len(self._sequences)} sequences, as in the cache"
            hint = "begin with a new cache, or call its batch_select_indices"
            raise ArgumentError("input_ids", expected=expected, actual=f"{rows} rows", hint=hint)
        lengths, pads = (self.lengths, self._pads) if self._sequences else ([0] * rows, [0] * rows)
        new = NewTokens.read(columns, lengths, pads, self._columns, attention_mask, position_ids)
        if not self._sequences:
            self._set([self.pages.manager.new() for _ in range(rows)], pads, 0)
        return [*zip(self._sequences, new.counts, strict=True)], new

    def completed(self, requests: Sequence[tuple[CachedSequence, int]], new: NewTokens, columns: int) -> None:
        """Count the tokens of a call that has run: what `next_tokens` returned, and its columns."""
        self.pages.manager.advance(requests)
        self._pads, self._columns = new.pads, self._columns + columns

    def _select(self, rows: list[int]) -> None:
        self.pages.drain()
        sequences = self.pages.manager.select(self._sequences, rows)
        self._set(sequences, [self._pads[row] for row in rows], self._columns)

    def _checked(self, length: int) -> int:
        if check_count("length", length, 0) > self._columns:
            raise ArgumentError("length", expected=f"at most {self._columns}, the columns there are", actual=length)
        return length

    def _set(self, sequences: Sequence[CachedSequence], pads: list[int], columns: int) -> None:
        self._sequences[:] = sequences  # the list that the finaliser holds
        self._pads, self._columns = pads, columns


@contextmanager
def _cure_of_patch() -> Iterator[None]:
    """Replace the cure of an error about pages that were given back by the one for a patched model."""
    try:
        yield
    except ArgumentError as error:
        if error.argument != "length":
            raise
        hint = "patch(model, ..., keep_windows=True) keeps these pages"
        raise ArgumentError("length", expected=error.expected, actual=error.actual, hint=hint) from error

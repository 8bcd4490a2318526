"""`Pages`: the paged caches of a patched model, and the sequences of all its `DeepseekV4PagedCache` objects."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol
from weakref import WeakSet

from dsv4attn.core.argument_checks import shown
from dsv4attn.core.contract.limits import Limits
from dsv4attn.core.model.geometry import ModelGeometry
from dsv4attn.errors import ArgumentError, OutOfPagesError
from dsv4attn.serving.cache_manager import CachedSequence, CacheManager


class _Sequences(Protocol):
    @property
    def lengths(self) -> list[int]: ...


class Pages:
    """The pages of a patched model.

    manager: of all pages. caches: every cache that is alive. dropped: sequences of caches that are gone, whose pages
    `drain` gives back.
    """

    def __init__(self, manager: CacheManager) -> None:
        self.manager = manager
        self.caches: WeakSet[_Sequences] = WeakSet()
        self.dropped: deque[list[CachedSequence]] = deque()

    @staticmethod
    def of(model: object) -> Pages:
        """The pages of a patched model. Raises ArgumentError for other objects."""
        pages = getattr(getattr(model, "dsv4attn", None), "pages", None)
        if not isinstance(pages, Pages):
            hint = "call patch(model) of dsv4attn.integrations.transformers first"
            raise ArgumentError("model", expected="a patched model", actual=shown(model), hint=hint)
        return pages

    @property
    def geometry(self) -> ModelGeometry:
        """Of the model."""
        return self.manager.geometry

    @property
    def limits(self) -> Limits:
        """Of every call."""
        return self.manager.limits

    def drain(self) -> None:
        """Give back the pages of caches that were deleted."""
        while self.dropped:
            for sequence in self.dropped.popleft():
                self.manager.free(sequence)

    def check(self, requests: Sequence[tuple[CachedSequence, int]]) -> None:
        """Raise ArgumentError, naming the argument of `patch`, for a call that is larger than the limits."""
        limits, tokens = self.limits, sum(count for _, count in requests)
        longest = max((sequence.length + count for sequence, count in requests), default=0)
        for name, bound, actual, unit, cure in (
            ("max_batch", limits.max_num_reqs, len(requests), "sequences in a call", ""),
            ("max_len", limits.max_model_len, longest, "tokens in a sequence", ""),
            ("max_tokens", limits.max_num_batched_tokens, tokens, "new tokens in a call", _CHUNKS),
        ):
            if actual > bound:
                hint = f"{cure}patch the model again with a larger {name}"
                raise ArgumentError(name, expected=f"at most {bound} {unit}", actual=actual, hint=hint)

    def kv_bytes(self) -> dict[str, int]:
        """Bytes of the pages in use, of all layers, by group: window, compressed entries with index keys, states."""
        self.drain()
        return self.manager.kv_bytes

    @property
    def num_sequences(self) -> int:
        """Sequences of all caches that are alive."""
        return sum(len(cache.lengths) for cache in self.caches)


_CHUNKS = "pass the prompt in several calls (prefill_chunk_size of generate), or "


def out_of_pages(error: OutOfPagesError) -> OutOfPagesError:
    """The error with the cures for a patched model."""
    text = str(error).partition(" -> ")[0]
    cure = "delete or reset() caches that are not needed, or patch the model again with a larger max_batch or max_len"
    return OutOfPagesError(f"{text} -> {cure}; no page was taken")

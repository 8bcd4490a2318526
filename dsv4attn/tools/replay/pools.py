"""Pages of a replay: how many each pool of the `CacheManager` gets, and the pages that each request holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attrs import frozen

from dsv4attn.core.cache.layer_caches import DeepseekV4Caches
from dsv4attn.errors import ArgumentError, OutOfPagesError
from dsv4attn.serving.cache_manager import COMPRESSED, WINDOW, CachedSequence, CacheManager
from dsv4attn.serving.request import Request
from dsv4attn.serving.scheduler import Step

COMPRESSED_BLOCK_TOKENS = 256
"""Tokens that a page of a compressed cache stands for; it holds 256 // ratio records."""


@frozen
class PageBytes:
    """Bytes of one page in the caches of one layer type, with the padding between pages.

    window: of the window cache.
    compressed: of the compressed cache, and of index keys, which share its pages; 0 without one.
    state: of the caches of compressor states.
    """

    window: int
    compressed: int
    state: int

    @classmethod
    def of(cls, caches: DeepseekV4Caches) -> PageBytes:
        """Bytes of a page in these caches."""
        strides = {name: cache.page_stride for name, cache in caches.present.items()}
        entries = strides.get("compressed", 0) + strides.get("index", 0)
        return cls(strides["swa"], entries, strides.get("state", 0) + strides.get("index_state", 0))


@frozen
class PageGroup:
    """A group of pages that all layer types take together.

    tokens: tokens of a page.
    span: last tokens of a sequence whose records are needed, the next token included; None: all tokens.
    page_bytes: bytes of one page in the caches of all layer types.
    """

    tokens: int
    span: int | None
    page_bytes: int

    @classmethod
    def of(cls, manager: CacheManager) -> dict[str, PageGroup]:
        """The groups of a manager, by name."""
        spans: dict[str, int | None] = {WINDOW: manager.geometry.window, COMPRESSED: None}
        sizes = dict.fromkeys(manager.tokens_per_block, 0)
        for i, caches in enumerate(manager.caches):
            layer, page = manager.geometry.layer(i), PageBytes.of(caches)
            state = f"{layer.kind.value}_state"
            for name, size in ((WINDOW, page.window), (COMPRESSED, page.compressed), (state, page.state)):
                if size:
                    sizes[name] += size
            if page.state:
                spans[state] = layer.compress_ratio * (2 if layer.overlap else 1)
        return {name: cls(tokens, spans[name], sizes[name]) for name, tokens in manager.tokens_per_block.items()}

    @property
    def pages_per_sequence(self) -> int:
        """Most pages that one idle sequence can hold, of a group that has a span."""
        return ((self.span or 0) - 1) // self.tokens + 2


def plan_pools(
    requests: Sequence[Request],
    groups: Mapping[str, PageGroup],
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_bytes: int,
) -> dict[str, int]:
    """Pages of each group for the `max_num_seqs` longest requests at once, or as many as fit into `max_bytes`.

    Pools of windows and of states never run out. The compressed pool may run out if `max_bytes` binds, and then
    requests are preempted. It always holds the longest request, or this raises ArgumentError.
    """
    pages, needed, all_longest = {}, 0, 0
    for name, group in groups.items():
        whole = sorted((-(-request.attention_tokens // group.tokens) for request in requests), reverse=True)
        most = sum(whole[:max_num_seqs])
        if group.span is None:
            pages[name], all_longest = whole[0], most
        else:
            # live pages of a request overlap the span of its next token and the chunk that is being computed
            idle = group.pages_per_sequence + 1
            pages[name] = min(max_num_seqs * idle + max_num_batched_tokens // group.tokens + 1, most)
        needed += pages[name] * group.page_bytes
    if needed > max_bytes:
        longest = max(requests, key=lambda request: request.attention_tokens)
        raise ArgumentError(
            "max_kv_bytes",
            expected=f"at least {needed}, so that request {longest.index} ({longest.attention_tokens} tokens) fits",
            actual=max_bytes,
            hint="allow more memory for KV pages, shrink the requests, or serve fewer at a time",
        )
    if COMPRESSED in pages:
        spare = (max_bytes - needed) // groups[COMPRESSED].page_bytes
        pages[COMPRESSED] = min(all_longest, pages[COMPRESSED] + spare)
    return pages


class RequestPages:
    """The sequence of each request in a `CacheManager`, and its pages as the scheduler takes and frees them."""

    def __init__(self, manager: CacheManager) -> None:
        """Start without a sequence."""
        self._manager = manager
        self._sequences: dict[int, CachedSequence] = {}
        self.peaks = dict.fromkeys((WINDOW, COMPRESSED, *manager.pages_in_use), 0)
        """Most pages of each group that were in use at once."""

    def reserve(self, request: Request, num_tokens: int) -> bool:
        """See `scheduler.KVBlocks`."""
        sequence = self._sequences.setdefault(request.index, self._manager.new())
        try:
            self._manager.reserve([(sequence, num_tokens - sequence.length)])
        except OutOfPagesError:
            return False
        for name, pages in self._manager.pages_in_use.items():
            self.peaks[name] = max(self.peaks[name], pages)
        return True

    def free(self, request: Request) -> None:
        """See `scheduler.KVBlocks`."""
        self._manager.free(self._sequences.pop(request.index))

    def of_step(self, step: Step) -> list[tuple[CachedSequence, int]]:
        """(sequence, tokens in the step) of each request of a step that has not finished."""
        sequences = [(self._sequences.get(entry.request.index), entry.query_len) for entry in step.scheduled]
        return [(sequence, count) for sequence, count in sequences if sequence is not None]

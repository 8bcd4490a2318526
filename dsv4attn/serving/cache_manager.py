"""`CacheManager`: the caches of all layers, the pages of each sequence, and the batch of a step.

A sequence is a list of pages in up to four groups: window, compressed entries (and index keys), and the compressor
states of c4a and of c128a layers. The groups have block tables of their own, which all layers share. So a fork copies
pages and nothing else, and a step that fails leaves every sequence as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from numbers import Integral
from typing import Any

import torch
from attrs import define, field, frozen
from torch import Tensor

from dsv4attn.core.argument_checks import check_count
from dsv4attn.core.cache.layer_caches import DeepseekV4Caches, LayerCaches
from dsv4attn.core.cache.layout import Fp8Format, KVCacheLayout, PagedKVCache
from dsv4attn.core.context_parallel.context import ContextParallel
from dsv4attn.core.context_parallel.exchange import agreed
from dsv4attn.core.context_parallel.metadata import metadata_builder, on_rank
from dsv4attn.core.contract.backend import Backend
from dsv4attn.core.contract.limits import Limits
from dsv4attn.core.metadata.batch_checks import count_tokens, planned
from dsv4attn.core.metadata.builder import STATE_BLOCK_SIZES
from dsv4attn.core.metadata.metadata import AttentionMetadata, Batch, LayerKey
from dsv4attn.core.model.geometry import LayerGeometry, LayerKind, ModelGeometry
from dsv4attn.core.reprs import limits_text, one_line
from dsv4attn.errors import ArgumentError, OutOfPagesError
from dsv4attn.serving.allocator import BlockAllocator, BlockTable

__all__ = ["CacheManager", "CachedSequence", "KeptPages", "pages_needed"]

WINDOW, COMPRESSED = "window", "compressed"
COPY_BYTES = 2**25
"""Most bytes of a temporary copy of pages, or one page if that is more."""


@define(eq=False)
class CachedSequence:
    """A sequence of a `CacheManager`: tokens 0 .. length - 1 are in its pages.

    length: tokens whose step has been completed.
    tables: block table of each group.
    owner: the manager; None once the sequence is freed.
    """

    tables: dict[str, BlockTable] = field(repr=False)
    length: int = 0
    owner: CacheManager | None = field(default=None, repr=False)


@frozen
class KeptPages:
    """Pages of one group that hold what the next tokens of a sequence read; none where they read nothing of a group.

    caches: every cache of the group; `cache.tensor[blocks]` are the contents to store, [pages, ...].
    blocks: numbers of the pages in these caches, in the order of the sequence's tokens. A list: with a tuple torch
       would index several dimensions.
    """

    caches: tuple[PagedKVCache, ...] = field(repr=False)
    blocks: list[int]


class CacheManager:
    """Paged caches of a model's layers, with a pool of pages for each group.

    Where layers share a compressed cache (`ModelGeometry.sources`), they have the same object; only the layer that owns
    it may write to it.

    geometry, limits: of the model, and of every batch. kv_layout: of window and compressed caches. compressed_layout:
    of compressed caches, if another, such as `v41_fp4` with a window in `v41_fp8`. index_layout: of index keys; by
    default fp8 with `fp8_ds_mla`, and rows of the same dtype with rows. num_blocks: pages of some groups ("window",
    "compressed", "c4a_state", "c128a_state"); by default enough for `max_num_reqs` sequences of `max_model_len` tokens.
    shuffle_seed: hand out pages in a random order. keep_windows: keep pages that no later token of a sequence reads, so
    that it can be forked anywhere. attention_only: no index keys and no compressor states, for callers who make and
    select entries themselves. backend: its index kernels build metadata. context_parallel: ranks that share the
    compressed entries; a compressed page has those of as many tokens more. If one rank's manager fails, all ranks' do.
    device: where all caches lie.
    swa_block_size: records of a page of the window cache.
    compressed_block_tokens: tokens whose entries share a page of a compressed cache.
    """

    @agreed("CacheManager")
    def __init__(
        self,
        geometry: ModelGeometry,
        limits: Limits,
        kv_layout: KVCacheLayout,
        *,
        compressed_layout: KVCacheLayout | None = None,
        index_layout: KVCacheLayout | None = None,
        device: torch.device | str = "cpu",
        num_blocks: dict[str, int] | None = None,
        swa_block_size: int = 64,
        compressed_block_tokens: int = 256,
        shuffle_seed: int | None = None,
        keep_windows: bool = False,
        attention_only: bool = False,
        backend: Backend | None = None,
        context_parallel: ContextParallel | None = None,
    ) -> None:
        self.geometry, self.limits, self.device = planned(geometry, limits, device, kv_layout)
        self.keep_windows, self._entry_tokens = keep_windows, compressed_block_tokens
        compressed = [layer for layer in geometry.distinct_layers if layer.has_entries]
        self._attention_only = attention_only
        self._stateful = [layer for layer in compressed if layer.has_states and not attention_only]
        (ranks, self._where) = on_rank(context_parallel)
        self.tokens_per_block = {WINDOW: swa_block_size}
        """Tokens whose records share a page, for each group."""
        if compressed:
            self.tokens_per_block[COMPRESSED] = compressed_block_tokens * ranks
        self.tokens_per_block |= {_states(layer): STATE_BLOCK_SIZES[layer.kind] for layer in self._stateful}
        for layer in compressed:
            if compressed_block_tokens % layer.compress_ratio:
                expected = f"a multiple of ratio {layer.compress_ratio}"
                raise ArgumentError("compressed_block_tokens", expected=expected, actual=compressed_block_tokens)
        num_blocks_of = num_blocks or {}
        for name in num_blocks_of:
            if name not in self.tokens_per_block:
                raise ArgumentError("num_blocks", expected=f"groups {[*self.tokens_per_block]}", actual=repr(name))
        blocks = {name: num_blocks_of.get(name, self._enough(name)) for name in self.tokens_per_block}
        self._pools = {name: BlockAllocator(n, shuffle_seed=shuffle_seed) for name, n in blocks.items()}
        self.caches: tuple[DeepseekV4Caches, ...] = ()
        index_layout = index_layout or _index_layout(geometry, kv_layout)
        for i in range(geometry.num_layers):
            self.caches += (self._allocate(i, kv_layout, compressed_layout or kv_layout, index_layout, blocks),)
        self.builder = metadata_builder(context_parallel)(
            geometry,
            limits,
            swa_block_size=swa_block_size,
            compressed_block_tokens=compressed_block_tokens,
            device=self.device,
            num_swa_blocks=blocks[WINDOW],
            num_compressed_blocks=blocks.get(COMPRESSED),
            num_state_blocks={layer.kind: blocks[_states(layer)] for layer in self._stateful},
            short_prefills=True,
            backend=backend,
        )

    @one_line
    def __repr__(self) -> Iterator[str]:
        """Model, layers, limits, pages in use of each group, and device."""
        yield self.geometry.name
        yield f"{self.geometry.num_layers} layer{'s' * (self.geometry.num_layers != 1)}"
        yield limits_text(self.limits)
        pools = [f"{name} {pool.num_blocks - pool.num_free} of {pool.num_blocks}" for name, pool in self._pools.items()]
        yield f"pages in use: {', '.join(pools)}"
        yield f"on {self.device}"

    def new(self) -> CachedSequence:
        """A sequence without tokens, and without pages."""
        tables = {name: BlockTable(self._pools[name], n) for name, n in self.tokens_per_block.items()}
        return CachedSequence(tables, owner=self)

    def free(self, sequence: CachedSequence) -> None:
        """Give the pages of a sequence back; it cannot be used again.

        sequence: a sequence of this manager that was not freed.
        """
        self._check(sequence)
        for table in sequence.tables.values():
            table.release()
        sequence.owner, sequence.length = None, 0

    def fork(self, sequence: CachedSequence, length: int | None = None) -> CachedSequence:
        """A new sequence with the first `length` tokens of another, all by default, in pages of its own.

        The fork has every page that its next tokens read. Of earlier pages it has those that a fork of this length may
        still need (for drafts that are rejected, or all with `keep_windows`) and that the source still has.
        sequence: the sequence to copy; it stays as it is.
        length: number of tokens of the fork; None: all.

        Raises ArgumentError if the source does not have pages that the next tokens read (see `keep_windows`), and
        OutOfPagesError if there are not enough. After any error, such as that of full memory, nothing is taken.
        """
        self._check(sequence)
        length = sequence.length if length is None else check_count("length", length, 0)
        if length > sequence.length:
            raise ArgumentError("length", expected=f"at most {sequence.length}, the tokens there are", actual=length)
        self._check_alive(sequence, length, next_token=False)
        fork = self.new()
        try:
            self._begin_fork(fork, sequence, length)
            self._plan_copies([(sequence, fork)])()
        except BaseException:
            self.free(fork)
            raise
        return fork

    def what_to_keep(self, sequence: CachedSequence, length: int | None = None) -> dict[str, KeptPages]:
        """The pages, by group, from which a sequence can be continued after its first `length` tokens.

        They hold the window before `length`, all entries and index keys, and the states of entries that are not
        complete. Store their contents, for instance on the host or for a prefix cache; `restore` has pages for them.
        sequence: the sequence to store; it stays as it is.
        length: number of tokens; None: all.

        Raises ArgumentError if pages that the next token reads were given back (see `keep_windows`).
        """
        self._check(sequence)
        length = sequence.length if length is None else check_count("length", length, 0)
        if length > sequence.length:
            raise ArgumentError("length", expected=f"at most {sequence.length}, the tokens there are", actual=length)
        self._check_alive(sequence, length, next_token=False)
        kept = {}
        for name, first in self._needed(length).items():
            n = self.tokens_per_block[name]
            # where no token is read, the page of the last one may have been given back
            blocks = sequence.tables[name].blocks[first // n : -(-length // n)] if first < length else []
            kept[name] = KeptPages(tuple(self._of_group(name)), blocks)
        return kept

    def restore(self, length: int) -> CachedSequence:
        """A sequence of `length` tokens whose pages are still to be filled with what was stored.

        Write the stored contents, group by group, into the pages that `what_to_keep` names for it. They can come from
        another manager with the same geometry, layouts and tokens of a page.
        length: number of tokens that were stored.

        Raises ArgumentError for more tokens than `max_model_len`, and OutOfPagesError if there are not enough pages;
        nothing is taken then.
        """
        if check_count("length", length, 0) > self.limits.max_model_len:
            expected = f"at most {self.limits.max_model_len}, the max_model_len of the limits"
            raise ArgumentError(f"length{self._where}", expected=expected, actual=length)
        sequence = self.new()
        for name, first in self._needed(length).items():
            sequence.tables[name].skip_before(min(first, length))
        self.reserve([(sequence, length)])
        sequence.length = length
        return sequence

    def _begin_fork(self, fork: CachedSequence, sequence: CachedSequence, length: int) -> None:
        """Give a new sequence the pages of a fork, without their contents."""
        for name, first in self._fork_starts(sequence, length).items():
            fork.tables[name].skip_before(first)
        self.reserve([(fork, length)])
        fork.length = length

    def _plan_copies(self, forks: Sequence[tuple[CachedSequence, CachedSequence]]) -> Callable[[], None]:
        """Take the memory that copies of pages need. Returns what makes the copies, and takes no more memory.

        forks: (source, fork) each.
        Raises ArgumentError if a cache has memory that it was not made for (`PagedKVCache.memory`).
        """
        plans: list[tuple[Tensor, Tensor, Tensor]] = []
        for name in self._pools:
            pairs = [
                pair
                for source, fork in forks
                for pair in zip(source.tables[name].blocks, fork.tables[name].blocks, strict=False)
            ]
            # a page that the source gave back, and the fork has, holds no token before its length that is read
            copied = [(source, target) for source, target in pairs if source >= 0 and target >= 0]
            if not copied:
                continue
            sources, targets = torch.tensor(copied, dtype=torch.int64, device=self.device).T.contiguous()
            for cache in self._of_group(name):
                _ = cache.memory  # a released storage would be read and written past its end
                plans.append((cache.tensor, sources, targets))
        page_bytes = [pages[:1].numel() * pages.element_size() for pages, _, _ in plans]
        sizes = [
            max(min(len(sources) * size, COPY_BYTES), size)
            for (_, sources, _), size in zip(plans, page_bytes, strict=True)
        ]
        buffer = torch.empty(max(sizes, default=0), dtype=torch.uint8, device=self.device)

        parts: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        for (pages, sources, targets), size in zip(plans, page_bytes, strict=True):
            rows = buffer[: buffer.numel() // size * size].view(pages.dtype).view(-1, *pages.shape[1:])
            for source, target in zip(sources.split(len(rows)), targets.split(len(rows)), strict=True):
                parts.append((pages, source, target, rows[: len(source)]))

        def copy() -> None:
            for pages, source, target, rows in parts:
                torch.index_select(pages, 0, source, out=rows)
                pages.index_copy_(0, target, rows)

        return copy

    def select(self, sequences: Sequence[CachedSequence], rows: Sequence[int]) -> list[CachedSequence]:
        """The sequences with these numbers, such as the beams that a search goes on with.

        A sequence that is named is returned the first time and forked for every further time; those that are not named
        are freed. Raises ArgumentError for a sequence that is given twice, and OutOfPagesError if there are not enough
        pages for the forks. Nothing is changed by these errors, nor by full memory: the memory that copies need is
        taken before the pages of a sequence that is freed are written.
        sequences: the sequences to choose from.
        rows: numbers of sequences, in the order of the result; a number may occur several times.
        """
        self._check_selection(sequences, rows)
        again = [sequences[row] for i, row in enumerate(rows) if row in rows[:i]]
        unused = [sequence for row, sequence in enumerate(sequences) if row not in rows]
        self._check_pages(again, unused)
        forks, undo = [self.new() for _ in again], list[Callable[[], None]]()
        try:
            for sequence in unused:
                for table in sequence.tables.values():
                    undo.append(table.release())
            for sequence, fork in zip(again, forks, strict=True):
                self._begin_fork(fork, sequence, sequence.length)
            copy = self._plan_copies([*zip(again, forks, strict=True)])
        except BaseException:
            for fork in forks:
                self.free(fork)
            for restore in undo:
                restore()
            raise
        for sequence in unused:
            sequence.owner, sequence.length = None, 0
        self._fill(forks, copy)
        further = iter(forks)
        return [sequences[row] if row not in rows[:i] else next(further) for i, row in enumerate(rows)]

    def _fill(self, forks: Sequence[CachedSequence], copy: Callable[[], None]) -> None:
        """Copy the pages of forks, or free them all: a device may fail in any launch."""
        try:
            copy()
        except BaseException:
            for fork in forks:
                self.free(fork)
            raise

    def _check_pages(self, forked: Sequence[CachedSequence], freed: Sequence[CachedSequence]) -> None:
        """Raise OutOfPagesError unless there are pages for forks of some sequences once others are freed."""
        for name, pool in self._pools.items():
            needed, given = (
                sum(self._fork_pages(sequence, name) for sequence in forked),
                sum(_held(sequence, name) for sequence in freed),
            )
            if needed > pool.num_free + given:
                have = f"{pool.num_free + given} of {pool.num_blocks} are free or would be freed"
                raise OutOfPagesError(f"{needed} {name} pages needed, {have} -> free sequences; nothing was changed")

    def _check_selection(self, sequences: Sequence[CachedSequence], rows: Sequence[int]) -> None:
        """Check the arguments of `select`."""
        for name, argument in (("sequences", sequences), ("rows", rows)):
            if not isinstance(argument, Sequence):
                raise ArgumentError(name, expected="a list", actual=type(argument).__name__)
        for i, sequence in enumerate(sequences):
            self._check(sequence)
            if any(sequence is other for other in sequences[:i]):
                hint = "name a sequence several times in rows: it is forked"
                raise ArgumentError("sequences", expected="each sequence once", actual="one twice", hint=hint)
        for row in rows:
            number: object = row
            if isinstance(number, bool) or not isinstance(number, Integral) or not 0 <= row < len(sequences):
                expected = f"numbers in 0 .. {len(sequences) - 1}"
                raise ArgumentError("rows", expected=expected, actual=repr(row))

    def truncate(self, sequence: CachedSequence, length: int) -> None:
        """Forget the tokens from `length` on, such as rejected drafts; the next step writes their places again.

        sequence: the sequence to shorten.
        length: number of tokens that stay.
        Raises ArgumentError if pages that the next token reads are gone: see `fork`.
        """
        self._check(sequence)
        if check_count("length", length, 0) > sequence.length:
            raise ArgumentError("length", expected=f"0 .. {sequence.length}, the tokens there are", actual=length)
        self._check_alive(sequence, length, next_token=True)
        sequence.length = length

    def batch(self, requests: Sequence[tuple[CachedSequence, int]], *, padding: int = 0) -> Batch:
        """The step that gives each sequence its next tokens: (sequence, how many).

        Sequences with few tokens run as decodes if they come first. Pages are taken for all of them or, after any
        error, for none. Lengths stay as they are until `advance`, so that a step which fails can be built again.
        padding: rows without a token after the others.
        requests: (sequence, number of its next tokens), in the order of the rows.
        """
        rows = count_tokens(requests) + check_count("padding", padding, 0)
        for what, actual, limit in (
            ("sequences", len(requests), "max_num_reqs"),
            ("tokens in a step, with padding", rows, "max_num_batched_tokens"),
        ):
            most = getattr(self.limits, limit)
            if actual > most:
                expected = f"at most {most} {what}, the {limit} of the limits"
                raise ArgumentError("requests", expected=expected, actual=actual)
        taken = self._take(requests)
        try:
            return self._described(requests, padding)
        except BaseException:
            _give_back(taken)
            raise

    def _described(self, requests: Sequence[tuple[CachedSequence, int]], padding: int) -> Batch:
        """The batch of sequences that have pages for their next tokens."""
        counts = [count for _, count in requests]
        starts = torch.tensor([0, *accumulate(counts)], dtype=torch.int32, device="cpu")
        lens = torch.tensor([sequence.length + count for sequence, count in requests], dtype=torch.int32, device="cpu")
        slots = [slot for sequence, count in requests for slot in self._slots(sequence, count)]
        tables = {name: self._table(name, requests) for name in self.tokens_per_block}
        states: dict[str, Any] = {f"{name}_block_table": tables.get(name) for name in ("c4a_state", "c128a_state")}
        return Batch(
            num_reqs=len(requests),
            query_start_loc=starts.to(self.device),
            query_start_loc_cpu=starts,
            seq_lens=lens.to(self.device),
            seq_lens_cpu=lens,
            slot_mapping=torch.tensor([*slots, *[-1] * padding], dtype=torch.int64, device=self.device),
            block_table=tables[WINDOW],
            compressed_block_table=tables.get(COMPRESSED),
            **states,
        )

    def reserve(self, requests: Sequence[tuple[CachedSequence, int]]) -> None:
        """Take the pages that each sequence needs for that number of further tokens, or take none.

        requests: (sequence, number of further tokens).
        """
        self._take(requests)

    def _take(self, requests: Sequence[tuple[CachedSequence, int]]) -> list[tuple[BlockTable, int]]:
        """`reserve`. Returns the tables of the sequences, each with the blocks that it had, for `_give_back`."""
        self._check_requests(requests)
        for sequence, count in requests:
            if sequence.length + count > self.limits.max_model_len:
                expected = f"at most {self.limits.max_model_len} tokens in a sequence, the max_model_len of the limits"
                raise ArgumentError(f"requests{self._where}", expected=expected, actual=sequence.length + count)
        for name, pool in self._pools.items():
            missing = sum(sequence.tables[name].missing(sequence.length + count) for sequence, count in requests)
            if missing > pool.num_free:
                have = f"{pool.num_free} of {pool.num_blocks} are free{self._where}"
                cure = "free sequences, make the manager with larger num_blocks, or run fewer tokens; no page was taken"
                raise OutOfPagesError(f"{missing} {name} pages needed, {have} -> {cure}")
        before = [(table, len(table.blocks)) for sequence, _ in requests for table in sequence.tables.values()]
        try:
            for sequence, count in requests:
                for table in sequence.tables.values():
                    table.ensure(sequence.length + count)
        except BaseException:
            _give_back(before)
            raise
        return before

    def metadata(self, batch: Batch, *, full_width: bool = False) -> dict[LayerKey, AttentionMetadata]:
        """Metadata of a batch for all layers, see `MetadataBuilder.build_all`.

        batch: what `batch` returned.
        full_width: see `MetadataBuilder.build_compressed`.
        """
        return self.builder.build_all(batch, full_width=full_width)

    def positions(self, requests: Sequence[tuple[CachedSequence, int]], *, padding: int = 0) -> Tensor:
        """[T] int64 position of each token of a step; 0 for padding.

        requests: (sequence, number of its next tokens), as in `batch`.
        padding: rows without a token after the others.
        """
        self._check_requests(requests)
        numbers = [p for sequence, count in requests for p in range(sequence.length, sequence.length + count)]
        return torch.tensor([*numbers, *[0] * padding], dtype=torch.int64, device=self.device)

    def advance(self, requests: Sequence[tuple[CachedSequence, int]]) -> None:
        """Count the tokens of a step that has run, and give back pages that no later token reads.

        requests: (sequence, number of tokens that ran), as in `batch`.
        """
        self._check_requests(requests)
        for sequence, count in requests:
            if any(table.missing(sequence.length + count) for table in sequence.tables.values()):
                expected = f"tokens that a batch gave pages, after the {sequence.length} there are"
                raise ArgumentError("requests", expected=expected, actual=count)
        for sequence, count in requests:
            sequence.length += count
            self._release(sequence)

    @property
    def pages_in_use(self) -> dict[str, int]:
        """Pages that sequences hold, by group."""
        return {name: pool.num_blocks - pool.num_free for name, pool in self._pools.items()}

    @property
    def kv_bytes(self) -> dict[str, int]:
        """Bytes of the pages in use, of all layers, by group."""
        used = self.pages_in_use
        return {name: n * sum(cache.page_stride for cache in self._of_group(name)) for name, n in used.items()}

    def _check(self, sequence: object) -> None:
        owner = sequence.owner if isinstance(sequence, CachedSequence) else self
        if not isinstance(sequence, CachedSequence) or owner is not self:
            actual = "one of another manager" if owner is not None else "one that was freed"
            actual = actual if isinstance(sequence, CachedSequence) else type(sequence).__name__
            hint = "make one with new() or fork() of this manager"
            raise ArgumentError("sequence", expected="a sequence of this manager", actual=actual, hint=hint)

    def _check_requests(self, requests: Sequence[tuple[CachedSequence, int]]) -> None:
        """Check sequences and counts of a step: each sequence is this manager's, and is there once."""
        seen: set[int] = set()
        count_tokens(requests)
        for sequence, _ in requests:
            self._check(sequence)
            if id(sequence) in seen:
                hint = "give it all its tokens in one request"
                raise ArgumentError("requests", expected="each sequence once", actual="one twice", hint=hint)
            seen.add(id(sequence))

    def _check_alive(self, sequence: CachedSequence, length: int, *, next_token: bool) -> None:
        """Check that a sequence has the contents of all tokens before `length` that a later token reads.

        next_token: whether the token at position `length` will be written to a page of this sequence, too.
        """
        for name, first in self._needed(length).items():
            have = sequence.tables[name].first_token
            if first < min(have, length + next_token):
                held = f"the sequence has them from token {have} on"
                expected = f"a length whose {name} pages, from token {first} on ({held}), were not given back"
                hint = "make the manager with keep_windows=True, or plan drafts in Limits.num_speculative_tokens"
                raise ArgumentError("length", expected=expected, actual=length, hint=hint)

    def _fork_starts(self, sequence: CachedSequence, length: int) -> dict[str, int]:
        """For each group, the first token whose contents a fork with `length` tokens takes from a sequence."""
        if self.keep_windows:
            first = dict.fromkeys(sequence.tables, 0)
        else:
            # drafts of the fork may be rejected, like those of the sequence: see `_release`
            first = self._needed(max(length - self.limits.num_speculative_tokens, 0))
        have = {name: table.first_token for name, table in sequence.tables.items()}
        # where the sequence has nothing before `length`, and nothing is needed, the fork begins with pages of its own
        return {name: min(max(first[name], have[name]), length) for name in have}

    def _fork_pages(self, sequence: CachedSequence, group: str) -> int:
        """Pages of a group that a fork of a whole sequence takes."""
        n, length = self.tokens_per_block[group], sequence.length
        return max(-(-length // n) - self._fork_starts(sequence, length)[group] // n, 0)

    def _enough(self, group: str) -> int:
        return pages_needed(self.geometry, self.limits, group, self.tokens_per_block[group], keep=self.keep_windows)

    def _allocate(
        self,
        number: int,
        layout: KVCacheLayout,
        compressed: KVCacheLayout,
        index: KVCacheLayout,
        blocks: dict[str, int],
    ) -> DeepseekV4Caches:
        """Caches of a layer, after those of the layers before it, which may own its compressed cache."""
        device, per_block, layer = self.device, self.tokens_per_block, self.geometry.layer(number)
        owner = self.geometry.sources(number).kv
        window = PagedKVCache.allocate(layout, blocks[WINDOW], per_block[WINDOW], device)
        if owner is None:
            return DeepseekV4Caches(LayerCaches(window))
        if owner != number:
            shared = self.caches[owner]
            return DeepseekV4Caches(LayerCaches(window, shared.attention.compressed), index=shared.index)
        entries = blocks[COMPRESSED], self._entry_tokens // layer.compress_ratio, device
        attention, group = LayerCaches(window, PagedKVCache.allocate(compressed, *entries)), _states(layer)
        if self._attention_only:
            return DeepseekV4Caches(attention)

        def states(dim: int) -> PagedKVCache | None:
            if not layer.has_states:
                return None
            layout = KVCacheLayout.compressor_state(2 * dim if layer.overlap else dim)
            return PagedKVCache.allocate(layout, blocks[group], per_block[group], device)

        if layer.kind is LayerKind.HCA:
            return DeepseekV4Caches(attention, states(layer.head_dim))
        keys = PagedKVCache.allocate(index, *entries)
        # with a shared latent, index keys are made of the entries of the layer's own compressor
        index_states = None if self.geometry.shared_latent else states(self.geometry.index_head_dim)
        return DeepseekV4Caches(attention, states(layer.head_dim), keys, index_states)

    def _of_group(self, group: str) -> Iterator[PagedKVCache]:
        """Every cache whose pages belong to a group, once."""
        for i, caches in enumerate(self.caches):
            state = _states(self.geometry.layer(i))
            shared = self.geometry.sources(i).kv not in (None, i)
            groups = {
                "swa": WINDOW,
                "compressed": COMPRESSED,
                "index": COMPRESSED,
                "state": state,
                "index_state": state,
            }
            present = {"swa": caches.attention.swa} if shared else caches.present
            yield from (cache for name, cache in present.items() if groups[name] == group)

    def _needed(self, length: int) -> dict[str, int]:
        """For each group, the first token whose page a token at position `length` reads."""
        first_tokens = {WINDOW: max(length - self.geometry.window + 1, 0), COMPRESSED: 0}
        for layer in self._stateful:
            first = layer.first_state(length)
            first_tokens[_states(layer)] = min(first_tokens.get(_states(layer), first), first)
        return {name: first for name, first in first_tokens.items() if name in self.tokens_per_block}

    def _release(self, sequence: CachedSequence) -> None:
        if not self.keep_windows:
            # drafts that are verified in a step may be rejected
            least = max(sequence.length - self.limits.num_speculative_tokens, 0)
            for name, first in self._needed(least).items():
                sequence.tables[name].release_before(first)

    def _slots(self, sequence: CachedSequence, count: int) -> Iterator[int]:
        n, blocks = self.tokens_per_block[WINDOW], sequence.tables[WINDOW].blocks
        return (blocks[p // n] * n + p % n for p in range(sequence.length, sequence.length + count))

    def _table(self, group: str, requests: Sequence[tuple[CachedSequence, int]]) -> Tensor:
        rows = [sequence.tables[group].blocks for sequence, _ in requests]
        width = max(map(len, rows), default=0)
        filled = [row + [-1] * (width - len(row)) for row in rows]
        return torch.tensor(filled, dtype=torch.int32, device=self.device).reshape(len(rows), width)


def pages_needed(geometry: ModelGeometry, limits: Limits, group: str, tokens: int, *, keep: bool = False) -> int:
    """Pages of a group for as many sequences as the limits allow, of the greatest length.

    geometry, limits: as of the manager. group: "window", "compressed", "c4a_state" or "c128a_state". tokens: tokens of
    a page. keep: whether pages are kept that no later token reads, as compressed pages always are.
    """
    whole = limits.max_num_reqs * -(-limits.max_model_len // tokens)
    if keep or group == COMPRESSED:
        return whole
    spans = [geometry.window - 1] if group == WINDOW else []
    spans += [
        layer.compress_ratio * (2 if layer.overlap else 1) - 1
        for layer in geometry.distinct_layers
        if layer.has_states and _states(layer) == group
    ]
    span = max(spans) + limits.num_speculative_tokens
    # pages of a sequence between two steps, and those that the tokens of a step add
    return min(whole, limits.max_num_reqs * (span // tokens + 3) + limits.max_num_batched_tokens // tokens + 1)


def _states(layer: LayerGeometry) -> str:
    """The group of the compressor states of a layer."""
    return f"{layer.kind.value}_state"


def _give_back(before: Sequence[tuple[BlockTable, int]]) -> None:
    """Give tables the blocks that they had before `CacheManager._take`."""
    for table, count in before:
        table.shrink(count)


def _held(sequence: CachedSequence, group: str) -> int:
    """Pages of a group that a sequence holds."""
    return sum(block >= 0 for block in sequence.tables[group].blocks)


def _index_layout(geometry: ModelGeometry, layout: KVCacheLayout) -> KVCacheLayout:
    """The layout of index keys that goes with a layout of keys."""
    dim, rope = geometry.index_head_dim, geometry.rope_dim
    if not layout.is_quantised:
        return KVCacheLayout.rows(dim - rope, rope, dtype=layout.dtype)
    # fp4 records name no dialect of fp8
    return KVCacheLayout.index_fp8(dim, fp8_format=layout.fp8_format or Fp8Format.OCP)

"""The scheduler of `dsv4attn run`: admission, chunked prefill, decodes, and preemption."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import pytest
from attrs import define, field
from hypothesis import given
from hypothesis import strategies as st

from dsv4attn.errors import ArgumentError, OutOfPagesError
from dsv4attn.serving.allocator import BlockAllocator, BlockTable
from dsv4attn.serving.request import Request
from dsv4attn.serving.scheduler import Scheduled, Scheduler, Step
from dsv4attn.tools.replay.trace import generated_trace

WINDOW = 8


@define
class PagedBlocks:
    """A full cache, and optionally a sliding-window one that lets go of blocks as the request advances."""

    full: BlockAllocator
    tokens_per_block: int = 4
    windowed: BlockAllocator | None = None
    tables: dict[int, list[BlockTable]] = field(factory=dict)
    freed: list[int] = field(factory=list)

    def _tables(self, request: Request) -> list[BlockTable]:
        if request.index not in self.tables:
            pools = [self.full] if self.windowed is None else [self.full, self.windowed]
            self.tables[request.index] = [BlockTable(pool, self.tokens_per_block) for pool in pools]
        return self.tables[request.index]

    def reserve(self, request: Request, num_tokens: int) -> bool:
        pools = (self.full, self.windowed or self.full)
        tables = self._tables(request)
        if any(table.missing(num_tokens) > pool.num_free for table, pool in zip(tables, pools, strict=False)):
            return False
        for table in tables:
            table.ensure(num_tokens)
        return True

    def free(self, request: Request) -> None:
        self.freed.append(request.index)
        for table in self.tables.pop(request.index):
            table.release()

    def slide(self, step: Step) -> None:
        for entry in step.scheduled:
            if self.windowed is not None and entry.request.index in self.tables:
                self.tables[entry.request.index][1].release_before(max(entry.seq_len - WINDOW + 1, 0))


def requests_of(*lengths: tuple[int, int]) -> list[Request]:
    return [Request(index, float(index), *pair) for index, pair in enumerate(lengths)]


def scheduler_of(
    *lengths: tuple[int, int], budget: int = 16, seqs: int = 4, threshold: int = 1, blocks: PagedBlocks | None = None
) -> Scheduler:
    requests, bounds = requests_of(*lengths), {"max_num_batched_tokens": budget, "max_num_seqs": seqs}
    return Scheduler(requests, **bounds, decode_threshold=threshold, blocks=blocks)


def run(scheduler: Scheduler, blocks: PagedBlocks | None = None) -> list[Step]:
    steps = []
    while (step := scheduler.next_step()) is not None:
        steps.append(step)
        scheduler.step_done(step)
        if blocks is not None:
            blocks.slide(step)
    return steps


def shape(step: Step) -> list[tuple[int, int, int]]:
    return [(entry.request.index, entry.prefix_len, entry.query_len) for entry in step.scheduled]


def next_shape(scheduler: Scheduler) -> list[tuple[int, int, int]]:
    step = scheduler.next_step()
    assert step is not None
    scheduler.step_done(step)
    return shape(step)


def lives_of(steps: Sequence[Step]) -> dict[int, list[list[Scheduled]]]:
    """Return each request's entries, split where it starts again from its first token."""
    lives: dict[int, list[list[Scheduled]]] = defaultdict(list)
    for step in steps:
        for entry in step.scheduled:
            if entry.prefix_len == 0:
                lives[entry.request.index].append([])
            lives[entry.request.index][-1].append(entry)
    return lives


# one request


def test_a_prompt_is_prefilled_in_chunks_and_then_decoded_a_token_at_a_time() -> None:
    assert [shape(step) for step in run(scheduler_of((20, 4), budget=8))] == [
        [(0, 0, 8)],
        [(0, 8, 8)],
        [(0, 16, 4)],
        [(0, 20, 1)],
        [(0, 21, 1)],
        [(0, 22, 1)],
    ]


def test_a_single_output_token_needs_no_decode_step() -> None:
    assert [shape(step) for step in run(scheduler_of((5, 1)))] == [[(0, 0, 5)]]


def test_a_one_token_prompt_is_a_decode_from_its_first_step() -> None:
    (first, second) = run(scheduler_of((1, 2)))

    assert shape(first) == [(0, 0, 1)]
    assert (first.num_decodes, first.num_decode_tokens, first.num_tokens) == (1, 1, 1)
    assert shape(second) == [(0, 1, 1)]


def test_nothing_to_serve_is_done_at_once() -> None:
    assert scheduler_of().next_step() is None


# several requests


def test_decodes_come_first_then_running_prefills_then_new_requests() -> None:
    scheduler = scheduler_of((2, 9), (20, 2), (30, 1), budget=8)

    assert next_shape(scheduler) == [(0, 0, 2), (1, 0, 6)]
    assert next_shape(scheduler) == [(0, 2, 1), (1, 6, 7)]
    assert next_shape(scheduler) == [(0, 3, 1), (1, 13, 7)]
    assert next_shape(scheduler) == [(0, 4, 1), (1, 20, 1), (2, 0, 6)]


def test_a_decode_of_a_later_request_stands_before_a_prefill_of_an_earlier_one() -> None:
    scheduler = scheduler_of((9, 2), (1, 9), budget=8, seqs=2)

    assert next_shape(scheduler) == [(0, 0, 8)]
    assert next_shape(scheduler) == [(0, 8, 1), (1, 0, 1)]

    scheduler = scheduler_of((30, 2), (1, 9), (1, 9), budget=31, seqs=3)
    assert next_shape(scheduler) == [(1, 0, 1), (0, 0, 30)]


def test_a_short_tail_chunk_belongs_to_the_decode_part() -> None:
    scheduler = scheduler_of((11, 3), (30, 1), budget=8, threshold=3)
    assert next_shape(scheduler) == [(0, 0, 8)]

    step = scheduler.next_step()

    assert step is not None
    assert shape(step) == [(0, 8, 3), (1, 0, 5)]
    assert (step.num_decodes, step.num_decode_tokens, step.num_tokens) == (1, 3, 8)


def test_a_chunk_cut_short_by_the_budget_belongs_to_the_decode_part() -> None:
    scheduler = scheduler_of((7, 2), (30, 2), budget=8)

    assert next_shape(scheduler) == [(1, 0, 1), (0, 0, 7)]


def test_decodes_are_never_crowded_out_by_short_chunks() -> None:
    scheduler = scheduler_of((4, 2), (1, 9), (1, 9), budget=3, seqs=3, threshold=3)

    assert next_shape(scheduler) == [(0, 0, 3)]
    assert next_shape(scheduler) == [(0, 3, 1), (1, 0, 1), (2, 0, 1)]
    assert next_shape(scheduler) == [(0, 4, 1), (1, 1, 1), (2, 1, 1)]


def test_arrival_decides_the_order_and_ties_keep_the_order_given() -> None:
    requests = [Request(0, 9.0, 2, 1), Request(1, 0.0, 2, 1), Request(2, 9.0, 2, 1), Request(3, 1.0, 2, 1)]
    scheduler = Scheduler(requests, max_num_batched_tokens=16, max_num_seqs=4)

    assert [index for index, _, _ in next_shape(scheduler)] == [1, 3, 0, 2]


def test_no_more_requests_run_at_once_than_there_are_sequences() -> None:
    scheduler = scheduler_of((2, 3), (2, 1), (2, 1), budget=16, seqs=2)

    assert next_shape(scheduler) == [(0, 0, 2), (1, 0, 2)]
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 1)
    assert next_shape(scheduler) == [(0, 2, 1), (2, 0, 2)]


def test_step_done_returns_what_finished_and_frees_it() -> None:
    blocks = PagedBlocks(BlockAllocator(8))
    scheduler = scheduler_of((4, 1), (4, 2), blocks=blocks)
    step = scheduler.next_step()
    assert step is not None

    assert [request.index for request in scheduler.step_done(step)] == [0]
    assert blocks.freed == [0]
    assert blocks.full.num_free == 7


# memory


def test_a_new_request_waits_until_there_is_memory_for_its_first_chunk() -> None:
    blocks = PagedBlocks(BlockAllocator(4))
    scheduler = scheduler_of((12, 2), (8, 1), budget=32, blocks=blocks)

    assert next_shape(scheduler) == [(0, 0, 12)]
    assert next_shape(scheduler) == [(0, 12, 1)]
    assert next_shape(scheduler) == [(1, 0, 8)]
    assert scheduler.counters.preemptions == 0


def test_a_waiting_request_is_not_overtaken_by_a_smaller_one() -> None:
    blocks = PagedBlocks(BlockAllocator(4))
    scheduler = scheduler_of((12, 2), (8, 1), (1, 1), budget=32, blocks=blocks)

    assert [index for index, _, _ in next_shape(scheduler)] == [0]


def test_when_memory_runs_out_the_newest_is_preempted_and_computed_again() -> None:
    blocks = PagedBlocks(BlockAllocator(4))
    scheduler = scheduler_of((7, 4), (6, 4), budget=32, blocks=blocks)

    assert next_shape(scheduler) == [(0, 0, 7), (1, 0, 6)]
    assert next_shape(scheduler) == [(0, 7, 1), (1, 6, 1)]
    assert next_shape(scheduler) == [(0, 8, 1)]
    assert blocks.freed == [1]
    assert scheduler.counters.recomputed_tokens == 7
    assert next_shape(scheduler) == [(0, 9, 1)]
    # six prompt tokens and the two outputs it had produced
    assert next_shape(scheduler) == [(1, 0, 8)]
    assert next_shape(scheduler) == [(1, 8, 1)]
    assert scheduler.next_step() is None
    assert (scheduler.counters.preemptions, scheduler.counters.finished) == (1, 2)


def test_an_older_prefill_may_preempt_a_decode_that_is_already_in_the_step() -> None:
    blocks = PagedBlocks(BlockAllocator(100), windowed=BlockAllocator(5))
    scheduler = scheduler_of((40, 1), (1, 9), budget=32, blocks=blocks)
    first = scheduler.next_step()
    assert first is not None
    assert shape(first) == [(1, 0, 1), (0, 0, 16)]
    scheduler.step_done(first)
    blocks.slide(first)

    assert next_shape(scheduler) == [(0, 16, 12)]
    assert blocks.freed == [1]
    assert (scheduler.counters.decode_tokens, scheduler.counters.prefill_tokens) == (1, 28)


def test_alone_a_request_makes_do_with_smaller_chunks_before_it_gives_up() -> None:
    blocks = PagedBlocks(BlockAllocator(100), windowed=BlockAllocator(4))
    steps = run(scheduler_of((40, 3), budget=32, blocks=blocks), blocks)

    assert shape(steps[0]) == [(0, 0, 16)]
    assert sum(step.num_tokens for step in steps) == 42


def test_a_request_that_can_never_fit_is_named() -> None:
    blocks = PagedBlocks(BlockAllocator(4))
    scheduler = scheduler_of((3, 1), (40, 6), budget=32, blocks=blocks)
    problem = r"request 1 \(40 prompt \+ 6 output tokens\): no blocks for its first 17 tokens, even running alone -> "

    with pytest.raises(OutOfPagesError, match=problem):
        run(scheduler)

    assert scheduler.counters.finished == 1


def test_no_request_fits_a_cache_without_blocks() -> None:
    with pytest.raises(OutOfPagesError, match=r"request 0 .* no blocks for its first 1 tokens"):
        run(scheduler_of((3, 1), blocks=PagedBlocks(BlockAllocator(0))))


# misuse


def test_a_step_is_planned_only_after_the_last_one_is_done() -> None:
    scheduler = scheduler_of((4, 4))
    step = scheduler.next_step()
    assert step is not None

    with pytest.raises(ArgumentError, match="next_step: expected step_done for the last step first"):
        scheduler.next_step()
    scheduler.step_done(step)
    with pytest.raises(ArgumentError, match="step: expected the step that next_step returned last"):
        scheduler.step_done(step)


# what holds for every trace

LENGTHS = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 12)), max_size=9)


def assert_sound(scheduler: Scheduler, steps: list[Step], requests: Sequence[Request]) -> None:
    for step in steps:
        queries = [entry.query_len for entry in step.scheduled]
        assert 0 < sum(queries) == step.num_tokens <= scheduler.max_num_batched_tokens
        assert min(queries) > 0
        assert len({entry.request.index for entry in step.scheduled}) == len(queries) <= scheduler.max_num_seqs
        decodes, prefills = queries[: step.num_decodes], queries[step.num_decodes :]
        assert sum(decodes) == step.num_decode_tokens
        assert all(query <= scheduler.decode_threshold for query in decodes)
        assert all(query > scheduler.decode_threshold for query in prefills)
    lives = lives_of(steps)
    assert set(lives) == {request.index for request in requests}
    for request in requests:
        for life in lives[request.index]:
            assert [entry.prefix_len for entry in life[1:]] == [entry.seq_len for entry in life[:-1]]
            assert life[-1].seq_len <= request.attention_tokens
        assert lives[request.index][-1][-1].seq_len == request.attention_tokens
    begun = [index for step in steps for index in sorted(entry.request.index for entry in step.scheduled)]
    assert list(dict.fromkeys(begun)) == sorted(lives)
    counters = scheduler.counters
    assert counters.steps == len(steps)
    assert counters.finished == len(requests)
    assert counters.decode_tokens + counters.prefill_tokens == sum(step.num_tokens for step in steps)
    served = sum(request.attention_tokens for request in requests) + counters.recomputed_tokens
    assert counters.decode_tokens + counters.prefill_tokens == served
    assert (scheduler.num_running, scheduler.num_waiting) == (0, 0)


@given(lengths=LENGTHS, seqs=st.integers(1, 5), spare=st.integers(0, 20), threshold=st.integers(1, 4))
def test_with_memory_enough_every_token_is_scheduled_once_and_in_order(
    lengths: list[tuple[int, int]], seqs: int, spare: int, threshold: int
) -> None:
    scheduler = scheduler_of(*lengths, budget=seqs + spare, seqs=seqs, threshold=threshold)
    steps = run(scheduler)

    assert_sound(scheduler, steps, requests_of(*lengths))
    assert all(len(lives) == 1 for lives in lives_of(steps).values())
    assert scheduler.counters.preemptions == 0


@given(
    lengths=LENGTHS,
    seqs=st.integers(1, 5),
    spare=st.integers(0, 40),
    threshold=st.integers(1, 4),
    extra_blocks=st.integers(0, 6),
    window_blocks=st.none() | st.integers(3, 8),
    tokens_per_block=st.integers(1, 6),
)
def test_under_any_memory_that_fits_the_longest_request_all_finish_and_no_block_leaks(
    lengths: list[tuple[int, int]],
    seqs: int,
    spare: int,
    threshold: int,
    extra_blocks: int,
    window_blocks: int | None,
    tokens_per_block: int,
) -> None:
    longest = max((prompt + output - 1 for prompt, output in lengths), default=0)
    full = BlockAllocator(-(-longest // tokens_per_block) + extra_blocks, shuffle_seed=0)
    # a window of W tokens touches at most ceil(W / P) + 1 blocks, and the token to come one more
    need = -(-WINDOW // tokens_per_block) + 2
    windowed = None if window_blocks is None else BlockAllocator(window_blocks - 3 + need)
    blocks = PagedBlocks(full, tokens_per_block, windowed)
    scheduler = scheduler_of(*lengths, budget=seqs + spare, seqs=seqs, threshold=threshold, blocks=blocks)
    steps = run(scheduler, blocks)

    assert_sound(scheduler, steps, requests_of(*lengths))
    assert sum(len(lives) - 1 for lives in lives_of(steps).values()) <= scheduler.counters.preemptions
    assert full.num_free == full.num_blocks
    assert windowed is None or windowed.num_free == windowed.num_blocks
    assert blocks.tables == {}


def test_a_generated_trace_runs_to_its_end_in_tight_memory() -> None:
    requests = generated_trace(3)
    blocks = PagedBlocks(BlockAllocator(24, shuffle_seed=3), tokens_per_block=64)
    scheduler = Scheduler(requests, max_num_batched_tokens=256, max_num_seqs=6, blocks=blocks)

    assert_sound(scheduler, run(scheduler, blocks), requests)
    assert blocks.full.num_free == 24

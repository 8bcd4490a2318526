"""`BlockAllocator` and `BlockTable`: allocation, growth and release of blocks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv4attn.errors import ArgumentError, OutOfPagesError
from dsv4attn.serving.allocator import BlockAllocator, BlockTable


def test_a_fresh_allocator_counts_upwards_and_never_gives_a_block_twice() -> None:
    allocator = BlockAllocator(5)

    assert allocator.allocate(2) == [0, 1]
    assert allocator.allocate(3) == [2, 3, 4]
    assert allocator.num_free == 0


def test_freed_blocks_come_back() -> None:
    allocator = BlockAllocator(4)
    blocks = allocator.allocate(4)

    allocator.free(blocks[1:3])

    assert allocator.num_free == 2
    assert sorted(allocator.allocate(2)) == [1, 2]


def test_too_large_a_request_names_the_counts_and_takes_nothing() -> None:
    allocator = BlockAllocator(4)
    allocator.allocate(1)

    with pytest.raises(OutOfPagesError, match=r"4 blocks needed, 3 of 4 are free -> .*more blocks"):
        allocator.allocate(4)

    assert allocator.num_free == 3


def test_allocating_nothing_is_legal_even_when_nothing_is_free() -> None:
    assert BlockAllocator(0).allocate(0) == []


def test_shuffled_blocks_are_a_permutation_that_the_seed_decides() -> None:
    first = BlockAllocator(64, shuffle_seed=7).allocate(64)

    assert sorted(first) == list(range(64))
    assert first != list(range(64))
    assert first == BlockAllocator(64, shuffle_seed=7).allocate(64)
    assert first != BlockAllocator(64, shuffle_seed=8).allocate(64)


def test_shuffling_also_applies_to_blocks_that_were_freed() -> None:
    allocator = BlockAllocator(64, shuffle_seed=1)
    first = allocator.allocate(64)
    allocator.free(first)

    assert allocator.allocate(64) not in (first, first[::-1])


@pytest.mark.parametrize(
    ("blocks", "problem"),
    [
        ([3], r"blocks: expected blocks that are allocated, got 3, which is free already"),
        ([0, 0], r"blocks: .*got 0 twice -> free each block once"),
        ([0, 4], r"blocks: expected block ids from 0 to 3, got 4"),
        ([0, -1], r"blocks: expected block ids from 0 to 3, got -1"),
        ([0, 1.0], r"blocks: expected block ids from 0 to 3, got 1\.0"),
    ],
)
def test_freeing_what_is_not_out_raises_before_anything_is_freed(blocks: list[int], problem: str) -> None:
    allocator = BlockAllocator(4)
    allocator.allocate(2)

    with pytest.raises(ArgumentError, match=problem):
        allocator.free(blocks)

    assert allocator.num_free == 2


def test_a_table_grows_by_whole_blocks_and_never_shrinks() -> None:
    table = BlockTable(BlockAllocator(8), tokens_per_block=4)

    table.ensure(1)
    assert table.blocks == [0]
    table.ensure(4)
    assert table.blocks == [0]
    table.ensure(9)
    assert table.blocks == [0, 1, 2]
    table.ensure(2)
    assert table.blocks == [0, 1, 2]
    assert table.missing(17) == 2


def test_a_table_that_cannot_grow_far_enough_does_not_grow_at_all() -> None:
    allocator = BlockAllocator(3)
    table = BlockTable(allocator, tokens_per_block=4)
    table.ensure(4)

    with pytest.raises(OutOfPagesError, match="3 blocks needed, 2 of 3 are free"):
        table.ensure(16)

    assert table.blocks == [0]
    assert allocator.num_free == 2


def test_release_before_keeps_every_block_that_overlaps_the_window() -> None:
    allocator = BlockAllocator(4)
    table = BlockTable(allocator, tokens_per_block=4)
    table.ensure(16)

    table.release_before(7)
    assert table.blocks == [-1, 1, 2, 3]
    table.release_before(8)
    assert table.blocks == [-1, -1, 2, 3]
    table.release_before(3)
    assert table.blocks == [-1, -1, 2, 3]
    assert allocator.num_free == 2


def test_a_table_grows_at_its_end_after_its_beginning_was_released() -> None:
    allocator = BlockAllocator(3)
    table = BlockTable(allocator, tokens_per_block=4)
    table.ensure(8)
    table.release_before(100)
    assert table.blocks == [-1, -1]

    table.ensure(16)

    assert table.blocks[:2] == [-1, -1]
    assert -1 not in table.blocks[2:]
    assert len(table.blocks) == 4


def test_release_gives_everything_back_and_the_table_can_be_used_again() -> None:
    allocator = BlockAllocator(4)
    table = BlockTable(allocator, tokens_per_block=4)
    table.ensure(16)
    table.release_before(4)

    table.release()
    table.release()
    assert table.blocks == []
    assert allocator.num_free == 4

    table.ensure(5)
    assert len(table.blocks) == 2


@given(
    num_blocks=st.integers(0, 12),
    seed=st.none() | st.integers(0, 3),
    moves=st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["ensure", "before", "release"]), st.integers(0, 40))),
)
def test_no_block_is_ever_lost_or_held_twice(
    num_blocks: int, seed: int | None, moves: list[tuple[int, str, int]]
) -> None:
    allocator = BlockAllocator(num_blocks, shuffle_seed=seed)
    tables = [BlockTable(allocator, tokens_per_block) for tokens_per_block in (1, 4, 7)]
    for which, move, tokens in moves:
        table = tables[which]
        blocks = list(table.blocks)
        if move == "release":
            table.release()
        elif move == "before":
            table.release_before(tokens)
        else:
            missing, free = table.missing(tokens), allocator.num_free
            try:
                table.ensure(tokens)
            except OutOfPagesError:
                assert missing > free
                assert table.blocks == blocks
            else:
                assert len(table.blocks) * table.tokens_per_block >= tokens
        held = [block for table in tables for block in table.blocks if block != -1]
        assert len(set(held)) == len(held) == num_blocks - allocator.num_free


def test_a_table_knows_the_first_token_that_it_has() -> None:
    table = BlockTable(BlockAllocator(8), tokens_per_block=4)
    assert table.first_token == 0
    table.skip_before(6)
    assert (table.first_token, table.blocks) == (6, [-1])
    table.ensure(12)
    table.release_before(7)
    # token 6 is still there, and tokens 4 and 5 never were
    assert (table.first_token, table.blocks) == (6, [-1, 0, 1])
    table.release_before(9)
    assert (table.first_token, table.blocks) == (8, [-1, -1, 1])
    table.release()
    assert (table.first_token, table.blocks) == (0, [])

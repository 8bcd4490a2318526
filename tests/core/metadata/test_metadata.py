"""Metadata check their tensors, and the builder refuses every wrong batch before it writes a buffer."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from dsv4attn.core.contract.limits import Limits
from dsv4attn.core.metadata.builder import MetadataBuilder, split_decodes_and_prefills
from dsv4attn.core.metadata.metadata import Batch, CompressedMetadata, WindowMetadata
from dsv4attn.core.tensorspec import check_tensor
from dsv4attn.errors import ArgumentError, UnknownNameError
from tests.harness import BUILDER_OPS, C4A, C128A, I32, SMALL, SWA, all_builder_ops, batch_of

I64 = torch.int64
Metadata = WindowMetadata | CompressedMetadata
LIMITS = Limits(max_num_reqs=6, max_num_batched_tokens=64, max_model_len=256, num_speculative_tokens=1)


def builder(limits: Limits = LIMITS, **options: Any) -> MetadataBuilder:
    """Return a builder for caches that are just large enough for six requests."""
    fixed: dict[str, Any] = {"swa_block_size": 4, "compressed_block_tokens": 32}
    sizes: dict[str, Any] = {"num_swa_blocks": 6 * 64, "num_compressed_blocks": 6 * 8}
    return MetadataBuilder(SMALL, limits, **{**fixed, **sizes, **options})


def buffers(value: object) -> list[Tensor]:
    """Return every tensor a builder holds."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        return [t for part in value.values() for t in buffers(part)]
    return [t for part in value for t in buffers(part)] if isinstance(value, tuple) else []


def refused(build: MetadataBuilder, make: Callable[[], Batch], said: str) -> None:
    """Check that a batch is refused with these words for every set of kinds, and that no buffer was written."""
    held = buffers(vars(build))
    assert len(held) >= 10
    for tensor in held:
        tensor.fill_(1 if tensor.dtype is torch.bool else 77)
    with pytest.raises(ArgumentError, match=said):
        build.build_for(make(), [SWA, C4A, C128A])

    assert all(bool((tensor == (1 if tensor.dtype is torch.bool else 77)).all()) for tensor in held)


@all_builder_ops
@pytest.mark.parametrize("query", [[], [0, 0], [0, 1, 0]])
def test_batches_of_nothing_and_of_padding_requests_are_good(query: list[int], builder_ops: str) -> None:
    metadata = builder(builder_ops=BUILDER_OPS[builder_ops]).build_for(
        batch_of(query, [5] * len(query)), [SWA, C4A, C128A]
    )

    assert metadata[SWA].swa.num_actual_tokens == sum(query)
    assert (metadata[SWA].swa.num_decodes, metadata[SWA].swa.num_prefills) == (len(query), 0)


META_BATCH: list[tuple[dict[str, Any], str]] = [
    ({"num_reqs": -1}, r"Batch\.num_reqs: expected a count >= 0, got -1"),
    ({"num_reqs": 3}, r"Batch\.query_start_loc: expected \[R\+1\] int32 with R=3, got \[3\] int32"),
    ({"num_reqs": "2"}, r"Batch\.num_reqs: expected a count >= 0, got '2'"),
    ({"seq_lens": torch.ones(2, dtype=I64)}, r"Batch\.seq_lens: expected \[R\] int32 with R=2, got \[2\] int64"),
    ({"seq_lens": torch.ones(1, 2, dtype=I32)}, r"Batch\.seq_lens: .*got \[1, 2\] int32"),
    ({"seq_lens": [5, 6]}, r"Batch\.seq_lens: expected a tensor \[R\] int32 with R=2, got list"),
    ({"seq_lens": None}, r"Batch\.seq_lens: expected a tensor \[R\] int32 with R=2, got NoneType"),
    ({"slot_mapping": torch.ones(4, dtype=I32)}, r"Batch\.slot_mapping: expected \[S\] int64, got \[4\] int32"),
    (
        {"block_table": torch.ones(3, 64, dtype=I32)},
        r"Batch\.block_table: expected \[R, N\] int32 with R=2.*got \[3, 64\]",
    ),
    ({"block_table": torch.ones(2, dtype=I32)}, r"Batch\.block_table: .*got \[2\] int32"),
    ({"compressed_block_table": torch.ones(1, 8, dtype=I32)}, r"Batch\.compressed_block_table: .*got \[1, 8\]"),
    ({"query_start_loc_cpu": torch.ones(2, dtype=I32)}, r"Batch\.query_start_loc_cpu: .*\[R\+1\].*got \[2\] int32"),
    (
        {"seq_lens_cpu": torch.ones(2, dtype=I32, device="meta")},
        r"Batch\.seq_lens_cpu: expected a tensor on cpu, got one on meta",
    ),
    (
        {"seq_lens": torch.ones(2, dtype=I32, device="meta")},
        r"Batch\.seq_lens: expected a tensor on cpu, got one on meta",
    ),
    ({"block_table": torch.ones(2, 64, dtype=I32, device="meta")}, r"Batch\.block_table: expected a tensor on cpu"),
]


@pytest.mark.parametrize(("changes", "said"), META_BATCH, ids=[said[6:40] for _, said in META_BATCH])
def test_a_batch_checks_each_tensor_it_declares(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        batch_of([1, 3], [5, 6], **changes)


def test_host_tensors_may_live_apart_from_a_device() -> None:
    host_tensors = {
        name: getattr(batch_of([1, 3], [5, 6]), name).to("meta")
        for name in ("query_start_loc", "seq_lens", "slot_mapping", "block_table", "compressed_block_table")
    }

    assert batch_of([1, 3], [5, 6], **host_tensors).seq_lens_cpu.device.type == "cpu"


def test_a_compressed_table_is_optional() -> None:
    assert batch_of([1], [5], compressed_block_table=None).compressed_block_table is None


def fields_of(metadata: Metadata) -> list[str]:
    """Return the names of the fields that hold tensors."""
    return [f.name for f in attrs.fields(type(metadata)) if isinstance(getattr(metadata, f.name), Tensor)]


def wrong_dtype(x: Tensor) -> Tensor:
    return x.to(torch.float64)


def wrong_rank(x: Tensor) -> Tensor:
    return x[None]


def elsewhere(x: Tensor) -> Tensor:
    return x.to("meta")


@pytest.mark.parametrize("part", [WindowMetadata, CompressedMetadata])
@pytest.mark.parametrize("spoil", [wrong_dtype, wrong_rank, elsewhere])
def test_metadata_checks_dtype_rank_and_device_of_every_tensor(part: type, spoil: Callable[[Tensor], Tensor]) -> None:
    metadata = builder().build_for(batch_of([1, 2, 9], [40, 5, 9]), [C128A])[C128A]
    good = metadata.swa if part is WindowMetadata else metadata.compressed
    assert good is not None
    names = fields_of(good)

    assert len(names) >= 8
    for name in names:
        changes: dict[str, Any] = {name: spoil(getattr(good, name))}
        with pytest.raises(ArgumentError) as info:
            attrs.evolve(good, **changes)
        # when the first tensor of an instance moves away, the next one is the odd one out
        if spoil is not elsewhere or name != names[0]:
            assert str(info.value).startswith(f"{part.__name__}.{name}: expected ")


COUNTS = ["num_prefills", "num_decode_tokens", "num_prefill_tokens", "window_size"]


@pytest.mark.parametrize("name", COUNTS)
def test_window_metadata_ties_its_shapes_to_its_counts(name: str) -> None:
    good = builder().build(batch_of([1, 2, 9], [40, 5, 9]))
    with pytest.raises(ArgumentError, match=r"^WindowMetadata\.\w+: expected (\[|at least the 9 columns)"):
        attrs.evolve(good, **{name: getattr(good, name) + 1})


def test_a_letter_is_bound_once() -> None:
    letters: dict[str, int] = {}
    check_tensor("a", torch.zeros(3, 4), "R N", torch.float32, letters)
    check_tensor("b", torch.zeros(4, 5, 9), "R+1 N+1 _", torch.float32, letters)
    check_tensor("c", torch.zeros(2), "2", (torch.float16, torch.float32), letters)

    assert letters == {"R": 3, "N": 4}
    for shape in ("R", "N+1", "2"):
        with pytest.raises(ArgumentError, match=r"^d: expected \[.*got \[7\] float32"):
            check_tensor("d", torch.zeros(7), shape, torch.float32, letters)
    with pytest.raises(ArgumentError, match=r"^e: expected \[2\] float16 or int32, got \[2\] float32"):
        check_tensor("e", torch.zeros(2), "2", (torch.float16, I32), letters)


def spoiled(tensor: Tensor, at: int | tuple[int, int], value: int) -> Tensor:
    """Return a tensor with one element changed."""
    changed = tensor.clone()
    changed[at] = value
    return changed


GOOD = batch_of([1, 2, 9], [40, 5, 29])
BAD_BATCHES: list[tuple[Callable[[], Batch], str]] = [
    (lambda: batch_of([1, 9], [40, 8]), r"seq_lens\[1\]: expected at least the 9 query tokens of this step, got 8 -> "),
    (lambda: batch_of([1, 9], [0, 9]), r"seq_lens\[0\]: expected at least the 1 query tokens of this step, got 0"),
    (
        lambda: batch_of([1, 9], [257, 9]),
        r"seq_lens\[0\]: expected at most 256, got 257 -> raise Limits.max_model_len$",
    ),
    (
        lambda: batch_of([9, 1], [9, 5]),
        "query_start_loc: expected decode requests .at most 2 query tokens. before prefill",
    ),
    (
        lambda: batch_of([1, 9, 0, 2], [5, 9, 0, 5]),
        "got request 3 with 2 after request 1 with 9 -> order the batch by phase",
    ),
    (lambda: batch_of([1] * 7, [5] * 7), "batch requests: expected at most 6, got 7 -> raise Limits.max_num_reqs$"),
    (lambda: batch_of([32, 33], [32, 33]), "batch tokens: expected at most 64, got 65 -> raise Limits.max_num_batched"),
    (lambda: batch_of([3, -1], [9, 9]), "query_start_loc: expected ascending values that begin with 0"),
    (
        lambda: batch_of([1, 2], [9, 9], query_start_loc_cpu=torch.tensor([1, 2, 4], dtype=I32)),
        r"query_start_loc: expected ascending values that begin with 0, got \[1, 2, 4\]",
    ),
    (
        lambda: batch_of([1, 2], [9, 9], query_start_loc=torch.tensor([0, 2, 3], dtype=I32)),
        r"query_start_loc: expected what query_start_loc_cpu holds, \[0, 1, 3\], got \[0, 2, 3\]",
    ),
    (
        lambda: batch_of([1, 2], [9, 9], seq_lens=torch.tensor([9, 10], dtype=I32)),
        r"seq_lens\[1\]: expected 2 \(its query tokens\) to 9 \(seq_lens_cpu\), got 10",
    ),
    (
        lambda: batch_of([1, 2], [9, 9], seq_lens=torch.tensor([9, 1], dtype=I32)),
        r"seq_lens\[1\]: expected 2 \(its query tokens\) to 9 \(seq_lens_cpu\), got 1",
    ),
    (
        lambda: batch_of([1, 9], [40, 9], block_table=GOOD.block_table[:2, :9]),
        "block_table: expected at least 10 columns for the 40 records of request 0, got 9 columns of 4 records",
    ),
    (
        lambda: batch_of([1, 9], [40, 9], compressed_block_table=torch.zeros(2, 0, dtype=I32)),
        "compressed_block_table: expected at least 2 columns for the 10 records of request 0, got 0 columns of 8",
    ),
    (
        lambda: batch_of([1, 9], [40, 64], compressed_block_table=torch.zeros(2, 1, dtype=I32)),
        "compressed_block_table: expected at least 2 columns for the 10 records of request 0",
    ),
    (
        lambda: batch_of([1, 9], [40, 9], compressed_block_table=None),
        r"Batch\.compressed_block_table: expected a table",
    ),
    (
        lambda: batch_of([1, 9], [40, 64], compressed_block_table=torch.tensor([[0, -1], [2, 3]], dtype=I32)),
        r"compressed_block_table\[0, 1\]: expected a block in \[0, 48\) for entries 8 and on, got -1",
    ),
    (
        lambda: batch_of([1, 9], [40, 64], compressed_block_table=torch.tensor([[0, 1], [2, 48]], dtype=I32)),
        r"compressed_block_table\[1, 1\]: expected a block in \[0, 48\) for entries 8 and on, got 48",
    ),
]


@all_builder_ops
@pytest.mark.parametrize(("make", "said"), BAD_BATCHES, ids=[said[:50] for _, said in BAD_BATCHES])
def test_a_batch_that_cannot_be_is_refused_before_any_buffer_is_written(
    make: Callable[[], Batch], said: str, builder_ops: str
) -> None:
    refused(builder(builder_ops=BUILDER_OPS[builder_ops]), make, said)


@all_builder_ops
@pytest.mark.parametrize("at", [(0, 9), (1, 0), (2, 3)], ids=["decode", "short", "first-query-of-a-prefill"])
@pytest.mark.parametrize("block", [-1, 6 * 64, 2**31 - 1, 2**30, 2**26, -(2**31)])
def test_a_block_outside_the_cache_under_a_window_is_refused(at: tuple[int, int], block: int, builder_ops: str) -> None:
    table = spoiled(GOOD.block_table, at, block)
    said = rf"block_table\[{at[0]}, {at[1]}\]: expected a block in \[0, 384\) for position \d+, .*, got {block}$"

    refused(
        builder(builder_ops=BUILDER_OPS[builder_ops]), lambda: batch_of([1, 2, 9], [40, 5, 29], block_table=table), said
    )


@pytest.mark.parametrize("slot", [1536, 2**31, 2**40])
def test_a_slot_outside_the_cache_is_refused(slot: int) -> None:
    slots = spoiled(GOOD.slot_mapping, 4, slot)
    said = rf"slot_mapping\[4\]: expected below the 1536 slots of the window cache.*, got {slot}"

    refused(builder(), lambda: batch_of([1, 2, 9], [40, 5, 29], slot_mapping=slots), said)


@pytest.mark.parametrize(
    ("token", "slot", "expected"),
    [
        (0, 40, "39, the slot of position 39 of request 0 in block 9 of block_table[0, 9]"),
        (2, 4, "260, the slot of position 4 of request 1 in block 65 of block_table[1, 1]"),
        (2, 261, "260, the slot of position 4 of request 1 in block 65 of block_table[1, 1]"),
        (11, 0, "540, the slot of position 28 of request 2 in block 135 of block_table[2, 7]"),
    ],
)
def test_a_slot_that_contradicts_the_block_table_is_refused(token: int, slot: int, expected: str) -> None:
    def batch() -> Batch:
        return batch_of([1, 2, 9], [40, 5, 29], slot_mapping=spoiled(GOOD.slot_mapping, token, slot))

    refused(
        builder(), batch, rf"^slot_mapping\[{token}\]: expected {re.escape(expected)}, got {slot} -> a slot is block"
    )
    assert builder(validate=False).build(batch()).num_actual_tokens == 12


def test_slots_follow_tables_with_blocks_that_were_given_back_and_replayed_tokens() -> None:
    table = torch.arange(192, 0, -1, dtype=I32).view(3, 64)
    table[0, :8], table[2, :3] = -1, -1
    replay = torch.tensor([0, 0, 20], dtype=I32)
    good = batch_of([1, 2, 9], [40, 5, 29], block_table=table, replay_start=replay)
    shared = attrs.evolve(good, block_table=table[[0, 1, 1]], replay_start=None)

    assert builder().build(good).num_actual_tokens == 12
    with pytest.raises(
        ArgumentError, match=r"^slot_mapping\[3\]: expected .* of request 2 in block 123 of block_table\[2, 5\]"
    ):
        builder().build(shared)


@all_builder_ops
def test_blocks_no_window_reaches_may_be_stale(builder_ops: str) -> None:
    table = GOOD.block_table.clone()
    table[0, :8] = -1
    table[0, 10:] = 2**31 - 1
    metadata = builder(builder_ops=BUILDER_OPS[builder_ops]).build(batch_of([1, 2, 9], [40, 5, 29], block_table=table))

    assert metadata.decode_swa_indices[0, 0].tolist() == list(range(32, 40))


@all_builder_ops
def test_padding_rows_may_name_no_block_at_all(builder_ops: str) -> None:
    table = torch.full((2, 64), -1, dtype=I32)
    padding = batch_of([1, 1], [256, 256], slot_mapping=torch.tensor([-1, -7]), block_table=table)
    metadata = builder(builder_ops=BUILDER_OPS[builder_ops]).build(padding)

    assert metadata.decode_swa_lens.tolist() == [0, 0]
    assert bool((metadata.decode_swa_indices == -1).all())
    assert metadata.is_valid_token.tolist() == [False, False]


def test_without_cache_sizes_only_impossible_blocks_are_found() -> None:
    build = builder(num_swa_blocks=None, num_compressed_blocks=None)
    far = spoiled(GOOD.block_table, (0, 9), 10**6)

    assert build.build(batch_of([1, 2, 9], [40, 5, 29], block_table=far)).num_actual_tokens == 12
    gone = spoiled(GOOD.block_table, (0, 9), -1)
    refused(
        build, lambda: batch_of([1, 2, 9], [40, 5, 29], block_table=gone), r"block_table\[0, 9\]: .*\[0, num_blocks\)"
    )


@all_builder_ops
def test_without_validation_a_block_that_cannot_be_becomes_an_absent_slot(builder_ops: str) -> None:
    table = GOOD.block_table.clone()
    table[0, 8:10] = torch.tensor([2**30, -5], dtype=I32)  # 2^30 blocks of 4 would wrap around to slot 0
    metadata = builder(validate=False, builder_ops=BUILDER_OPS[builder_ops]).build(
        batch_of([1, 2, 9], [40, 5, 29], block_table=table)
    )

    assert metadata.decode_swa_indices[0, 0].tolist() == [-1] * 8
    assert metadata.decode_swa_indices[1, 0, :4].tolist() == [256, 257, 258, 259]


@all_builder_ops
def test_a_short_request_after_a_prefill_runs_as_a_prefill_when_asked(builder_ops: str) -> None:
    build = builder(short_prefills=True, builder_ops=BUILDER_OPS[builder_ops])
    metadata = build.build_for(batch_of([1, 9, 0, 2], [5, 9, 0, 7]), [SWA, C4A, C128A])[SWA].swa

    assert (metadata.num_decodes, metadata.num_prefills, metadata.num_decode_tokens, metadata.num_prefill_tokens) == (
        1,
        3,
        1,
        11,
    )
    assert metadata.prefill_swa_lens.tolist()[-2:] == [6, 7]
    assert metadata.prefill_gather_lens.tolist() == [9, 0, 7]


@pytest.mark.parametrize(
    ("query", "threshold", "split"),
    [
        ([], 1, (0, 0, 0, 0)),
        ([1, 1, 1], 1, (3, 0, 3, 0)),
        ([1, 0, 2], 2, (3, 0, 3, 0)),
        ([5, 6], 1, (0, 2, 0, 11)),
        ([1, 0, 5, 0, 9], 1, (2, 3, 1, 14)),
        ([3, 1, 4], 3, (2, 1, 4, 4)),
    ],
)
def test_the_first_long_request_begins_the_prefill_part(
    query: list[int], threshold: int, split: tuple[int, int, int, int]
) -> None:
    assert split_decodes_and_prefills(query, threshold) == split
    assert split_decodes_and_prefills(query, threshold, short_prefills=True) == split


def test_a_kind_without_a_compressed_cache_or_that_the_model_lacks_is_refused() -> None:
    build, step = builder(), batch_of([1], [5])
    swa = build.build(step)
    with pytest.raises(ArgumentError, match="kind: expected a layer kind with a compressed cache, got swa"):
        build.build_compressed(step, swa, SWA)
    window_only = attrs.evolve(SMALL, layers=((SWA, 1),))
    with pytest.raises(UnknownNameError, match="unknown layer kind of custom 'c4a'"):
        MetadataBuilder(window_only, LIMITS, swa_block_size=4).build_compressed(step, swa, C4A)

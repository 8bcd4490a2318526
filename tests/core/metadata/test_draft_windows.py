"""Windows of draft blocks and of replayed requests, against lists written by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import evolve

from dsv4attn.backends.rocm.launch import RocmBackend
from dsv4attn.backends.rocm.metadata import RocmMetadata
from dsv4attn.core.metadata.metadata import Batch
from dsv4attn.core.model.geometry import LayerKind
from dsv4attn.core.torch_ops import index_ops as indices
from dsv4attn.errors import ArgumentError
from tests.core.metadata.test_metadata import GOOD, LIMITS, builder, refused
from tests.harness import BUILDER_OPS, I32, SMALL, all_builder_ops, batch_of

WIDE = evolve(LIMITS, num_speculative_tokens=3, decode_window_columns=8 + 5)


def positions(rows: torch.Tensor, lens: torch.Tensor, slot0: list[int]) -> list[list[int]]:
    """Positions of each row's slots, where request i has its slots in order from slot0[i] on. -1 stands after."""
    assert (rows[:, 0] == -1).logical_not().sum(1).tolist() == lens.tolist()
    return [[s - first for s in row[0, :n].tolist()] for row, n, first in zip(rows, lens.tolist(), slot0, strict=True)]


@all_builder_ops
def test_each_token_of_a_draft_block_sees_the_window_before_it_and_all_of_it(builder_ops: str) -> None:
    """Requests of 3, 4 and 1 tokens after 20, 2 and 8; a prefill of 6, which is causal, after 3."""
    batch = batch_of([3, 4, 1, 6], [23, 6, 9, 9], causal=False)
    swa = builder(WIDE, builder_ops=BUILDER_OPS[builder_ops]).build(batch)
    first = [256 * i for i in (0, 0, 0, 1, 1, 1, 1, 2)]

    places = positions(swa.decode_swa_indices, swa.decode_swa_lens, first)
    assert swa.decode_swa_indices.shape == (8, 1, 13)
    assert places == [[*range(12, 23)]] * 3 + [[*range(6)]] * 4 + [[*range(9)]]
    places = positions(swa.prefill_swa_indices, swa.prefill_swa_lens, [768] * 6)
    assert places == [[*range(max(p - 7, 0), p + 1)] for p in range(3, 9)]


@all_builder_ops
def test_no_window_begins_before_its_first_position(builder_ops: str) -> None:
    bounds = torch.tensor([18, 0, 9, 5, 2**31 - 1], dtype=I32)
    batch = batch_of([1, 2, 6, 12], [20, 3, 20, 12], replay_start=bounds)
    swa = builder(builder_ops=BUILDER_OPS[builder_ops]).build(batch)

    assert positions(swa.decode_swa_indices, swa.decode_swa_lens, [0, 256, 256]) == [[18, 19], [0, 1], [0, 1, 2]]
    places = positions(swa.prefill_swa_indices, swa.prefill_swa_lens, [512] * 6 + [768] * 12)
    assert places[:6] == [[*range(max(p - 7, 9), p + 1)] for p in range(14, 20)]
    assert places[6:] == [[*range(max(p - 7, 5), p + 1)] for p in range(12)]
    assert swa.prefill_gather_lens.tolist() == [6 + 5, 12]
    block = builder(WIDE, builder_ops=BUILDER_OPS[builder_ops]).build(
        evolve(batch_of([2], [20], causal=False), replay_start=bounds)
    )
    assert positions(block.decode_swa_indices, block.decode_swa_lens, [0, 0]) == [[18, 19]] * 2


@all_builder_ops
def test_rows_of_blocks_have_one_width_and_address_and_hide_what_was_there(builder_ops: str) -> None:
    build = builder(WIDE, builder_ops=BUILDER_OPS[builder_ops])
    block = build.build(batch_of([4, 4], [30, 40], causal=False))
    rows, lens = block.decode_swa_indices, block.decode_swa_lens
    causal = build.build(batch_of([4, 4], [30, 40]))
    again = build.build(batch_of([1, 0], [3, 9], causal=False, slot_mapping=torch.tensor([-1])))

    assert causal.decode_swa_indices.shape == (8, 1, 8)
    assert causal.decode_swa_indices.data_ptr() == rows.data_ptr() == again.decode_swa_indices.data_ptr()
    assert causal.decode_swa_indices.stride() == rows.stride()
    assert again.decode_swa_indices.shape == (1, 1, 13)
    assert bool((again.decode_swa_indices == -1).all())
    assert not bool(lens.any()), "lengths past the batch are cleared"


@pytest.mark.parametrize("validate", [True, False])
def test_a_block_that_is_too_long_for_its_rows_is_refused(validate: bool) -> None:
    said = r"^query_start_loc: expected at most 5 query tokens .* not causal, got 6 -> raise .*_columns to 14"
    limits = evolve(WIDE, num_speculative_tokens=5)
    refused(builder(limits, validate=validate), lambda: batch_of([1, 6], [9, 9], causal=False), said)
    said = r"^query_start_loc: expected at most 0 query tokens .* got 2 -> raise Limits.decode_window_columns to 10"
    refused(builder(validate=validate), lambda: batch_of([2], [9], causal=False), said)


@pytest.mark.parametrize(
    ("bounds", "said"),
    [
        (torch.zeros(1, dtype=I32), r"^Batch.replay_start: expected an element for each of the 2 .*, got 1 elements"),
        (torch.zeros(2), r"^Batch.replay_start: expected a?.*int32.*, got \[2\] float32"),
        (torch.zeros(2, 1, dtype=I32), r"^Batch.replay_start: expected \[_\] int32, got \[2, 1\]"),
        ([0, 0], r"^Batch.replay_start: expected a tensor"),
    ],
)
def test_a_wrong_replay_start_is_refused(bounds: Any, said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        batch_of([1, 1], [5, 9], replay_start=bounds)


def test_only_blocks_that_a_window_needs_have_to_be_alive() -> None:
    """Position 20 of a request on pages of 4: a causal window needs pages 3 to 5, a block of two page 2 too."""

    def batch_without(dead: int, **changes: Any) -> Batch:
        batch = batch_of([2], [21], **changes)
        batch.block_table[0, dead] = -1
        return batch

    build, bound = builder(WIDE, validate=True), torch.tensor([16], dtype=I32)
    build.build(batch_without(2))
    build.build(batch_without(3, replay_start=bound))
    build.build(batch_without(3, replay_start=bound, causal=False))
    said = r"^block_table\[0, 2\]: expected a block in \[0, 384\) for position 11, which a query can see, got -1"
    refused(build, lambda: batch_without(2, causal=False), said)
    hit = {"replay_start": bound, "num_cached_tokens": bound}
    refused(build, lambda: batch_without(4, **hit), r"^block_table\[0, 4\]: .* for position 16, ")


def test_visible_entries_follow_from_positions_without_a_look_at_their_values() -> None:
    place, valid = torch.tensor([0, 3, 4, 7, 2**40, -1, 9]), torch.tensor([True] * 6 + [False])
    assert indices.visible_entries(place[:4], valid[:4], 4).tolist() == [0, 1, 1, 2]
    out = torch.full((7,), 77, dtype=I32)
    assert indices.visible_entries(place, valid, 2**20, out=out) is out
    assert out.tolist() == [0, 0, 0, 0, 2**20, 0, 0]
    assert indices.visible_entries(place.to("meta"), valid.to("meta"), 4).dtype == I32
    for kind in (LayerKind.CSA, LayerKind.HCA):
        metadata = builder().build_for(GOOD, [kind])[kind]
        assert metadata.compressed is not None
        place = indices.positions_of(GOOD.query_start_loc, GOOD.seq_lens, metadata.swa.token_to_req_indices.long())
        ratio = metadata.compressed.compress_ratio
        assert torch.equal(
            indices.visible_entries(place, metadata.swa.is_valid_token, ratio), metadata.compressed.compressed_lens
        )


def test_ragged_windows_of_rocm_have_memory_for_all_columns_of_the_limits() -> None:
    batch = batch_of([4, 4], [30, 40], causal=False)
    swa = builder(WIDE, backend=RocmBackend()).build(batch)
    ragged = swa.decode_swa_ragged
    assert ragged is not None
    assert ragged.width == 13
    assert ragged.indptr.tolist() == [12 * i for i in range(9)]
    assert ragged.indices[:96].tolist() == swa.decode_swa_indices[:, 0, :12].flatten().tolist()

    extension = RocmMetadata(SMALL, LIMITS, torch.device("cpu"))
    plain = builder(WIDE).build(batch)
    with pytest.raises(ArgumentError, match=r"^decode rows: expected at most 12 rows of 8 columns, got \[8, 13\] -> "):
        extension.extend_swa(plain)

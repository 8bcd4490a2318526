"""`Batch.seq_lens_cpu` may exceed the true lengths: it only bounds sizes. Tables need no columns beyond the lengths."""

from __future__ import annotations

import pytest
import torch
from attrs import evolve
from torch import Tensor

from dsv4attn.core.contract.limits import Limits
from dsv4attn.core.metadata.builder import MetadataBuilder
from dsv4attn.core.metadata.metadata import Batch
from dsv4attn.errors import ArgumentError
from dsv4attn.selection import load_backend
from tests.backends.built_in import EVERYWHERE
from tests.harness import BLOCK_TABLES, LayerStack
from tests.harness_v41 import STACKS, v4_stack, v41_stack

LIMITS = Limits(3, 48, 64, num_speculative_tokens=1)
STEPS = [[(0, 9), (1, 1)], [(1, 1), (0, 5)], [(0, 1), (1, 2)], [(1, 1), (0, 13)], [(0, 2), (1, 1)]]
"""Requests and tokens of each step; two tokens are a decode."""


def run(whole: LayerStack, excess: int, *, validate: bool) -> list[Tensor]:
    """Outputs of all layers in all steps, whose host lengths are above the true ones."""
    manager, sequences, outputs = whole.manager, [whole.manager.new() for _ in range(2)], []
    manager.builder.validate = validate
    for step in STEPS:
        requests = [(sequences[n], count) for n, count in step]
        parts = [whole.hidden(n, 48)[sequences[n].length :][:count] for n, count in step]
        batch = manager.batch(requests)
        batch.seq_lens_cpu = batch.seq_lens_cpu + excess
        outputs += whole.forward(batch, torch.cat(parts), manager.positions(requests))
        manager.advance(requests)
    return outputs


@pytest.mark.matrix
@pytest.mark.pairwise
@pytest.mark.parametrize("validate", [True, False])
@pytest.mark.parametrize("excess", [1, 3, 30])
@pytest.mark.parametrize("model", STACKS)
def test_bounds_above_the_lengths_change_nothing(model: str, excess: int, *, validate: bool) -> None:
    bounded, exact = (STACKS[model](limits=LIMITS) for _ in range(2))
    outputs, expected = run(bounded, excess, validate=validate), run(exact, 0, validate=True)
    for output, answer in zip(outputs, expected, strict=True):
        torch.testing.assert_close(output, answer, rtol=1e-5, atol=1e-5)


def cut(batch: Batch, name: str) -> Batch:
    """A batch whose table has a column less than the lengths need."""
    return evolve(batch, **{name: getattr(batch, name)[:, :-1]})


@pytest.mark.parametrize("name", BLOCK_TABLES)
def test_a_table_without_a_column_for_a_token_is_refused_where_values_are_checked(name: str) -> None:
    whole = v4_stack(limits=LIMITS)
    manager = whole.manager
    batch = manager.batch([(manager.new(), 20)])
    batch.seq_lens_cpu = batch.seq_lens_cpu + 20
    manager.metadata(batch)

    with pytest.raises(
        ArgumentError, match=rf"{name}: expected at least \d columns for the (20|5) records of request 0"
    ):
        manager.metadata(cut(batch, name))


def test_a_ring_of_v41_without_a_column_for_a_draft_is_refused_where_values_are_checked() -> None:
    whole = v41_stack(limits=Limits(3, 48, 64, num_speculative_tokens=5))
    manager = whole.manager
    batch = manager.batch([(manager.new(), 6)])
    manager.metadata(batch)

    with pytest.raises(ArgumentError, match="c4a_state_block_table: expected at least 2 columns for the 6 records"):
        manager.metadata(cut(batch, "c4a_state_block_table"))
    # true lengths count: of three tokens all are in the first column, whatever the host's bound is
    short = manager.batch([(manager.new(), 3)])
    short.seq_lens_cpu = short.seq_lens_cpu + 20
    assert short.c4a_state_block_table is not None
    manager.metadata(evolve(short, c4a_state_block_table=short.c4a_state_block_table[:, :1]))


@pytest.mark.parametrize("backend", EVERYWHERE)
def test_columns_past_a_table_are_absent_slots(backend: str) -> None:
    whole = v4_stack(limits=LIMITS)
    batch = whole.manager.batch([(whole.manager.new(), 20)])
    options = {"swa_block_size": 4, "compressed_block_tokens": 16, "validate": False, "backend": load_backend(backend)}
    builder = MetadataBuilder(whole.geometry, LIMITS, **options)  # type: ignore[arg-type]
    kept = {key: [slots.clone() for slots in slots_of(part)] for key, part in builder.build_all(batch).items()}

    for name in BLOCK_TABLES:
        gone = 0
        for key, part in builder.build_all(cut(batch, name)).items():
            for slots, whole_rows in zip(slots_of(part), kept[key], strict=True):
                # slots of the table's last block are absent, and no other slot has changed
                assert bool(((slots == whole_rows) | (slots == -1)).all())
                gone += int((slots != whole_rows).sum())
        assert gone


def slots_of(part: object) -> list[Tensor]:
    """Slots that metadata hold."""
    swa, compressed, state = part.swa, part.compressed, part.state  # type: ignore[attr-defined]
    slot_lists = [swa.prefill_swa_indices, swa.decode_swa_indices]
    slot_lists += [] if compressed is None else [compressed.slot_mapping]
    return slot_lists + ([] if state is None or state.slot_mapping is None else [state.slot_mapping])

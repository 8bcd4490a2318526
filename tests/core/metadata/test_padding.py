"""Padding tokens, as metadata mark them, change no result and write nothing, whatever their rows hold."""

from __future__ import annotations

import pytest
import torch

from dsv4attn.core.contract.limits import Limits
from dsv4attn.core.metadata.builder import MetadataBuilder
from dsv4attn.errors import ArgumentError
from dsv4attn.selection import load_backend
from tests.backends.built_in import EVERYWHERE
from tests.harness import (
    BLOCK_TABLES,
    LayerStack,
    all_bytes,
    check_step_without_tokens,
    padded_batch,
    stale_positions,
    with_padding,
)
from tests.harness_v41 import ROUNDED, STACKS, Steps, worst_layer_error

FILLS = -1, 0, 10**6, None
"""What the tables' rows of padding hold; None: blocks of the first request."""
STEPS: Steps = [[(0, 7), (1, 3)], [(0, 1), (1, 2)], [(0, 1)], [(1, 1), (0, 12)], [(0, 2), (1, 1)]]


def stack(model: str) -> LayerStack:
    return STACKS[model](limits=Limits(5, 48, 64, num_speculative_tokens=1))


def outputs(whole: LayerStack) -> list[torch.Tensor]:
    """Outputs of all layers in all steps."""
    sequences, outputs_of_steps = [whole.manager.new() for _ in range(2)], []
    for step in STEPS:
        parts = [whole.hidden(n, 48)[sequences[n].length :][:count] for n, count in step]
        outputs_of_steps += whole.step([(sequences[n], count) for n, count in step], torch.cat(parts))
    return outputs_of_steps


@pytest.mark.pairwise
@pytest.mark.parametrize("validate", [True, False])
@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("model", STACKS)
def test_padding_writes_nothing_and_changes_no_real_token(model: str, fill: int | None, *, validate: bool) -> None:
    padded, alone = with_padding(stack(model), fill, validate=validate), stack(model)

    actual, expected = outputs(padded), outputs(alone)

    # a product of more rows may sum in another order
    for left, right in zip(actual, expected, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-5)
    for left, right in zip(all_bytes(padded), all_bytes(alone), strict=True):
        written = left.view(torch.float32), right.view(torch.float32)
        torch.testing.assert_close(*written, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("fill", [0, None])
def test_padded_steps_of_v41_are_those_of_the_oracle(fill: int | None) -> None:
    assert worst_layer_error(with_padding(stack("v41"), fill), STEPS) <= ROUNDED


@pytest.mark.parametrize("backend", EVERYWHERE)
def test_rows_after_the_tokens_of_a_batch_have_no_request(backend: str) -> None:
    whole = LayerStack(load_backend("reference"), swa_block_size=4)
    builder = MetadataBuilder(whole.geometry, whole.limits, swa_block_size=4, backend=load_backend(backend))
    first, second = (whole.manager.new() for _ in range(2))
    first_build = builder.build(whole.manager.batch([(first, 6), (second, 7)]))
    assert first_build.token_to_req_indices.tolist() == [0] * 6 + [1] * 7

    # a captured graph has the rows of the longer batch
    after = builder.build(whole.manager.batch([(second, 2)]))

    assert after.token_to_req_indices.tolist() == [0] * 2
    assert first_build.token_to_req_indices.tolist() == [0] * 2 + [-1] * 11
    assert first_build.is_valid_token.tolist() == [True] * 2 + [False] * 11


@pytest.mark.parametrize("backend", EVERYWHERE)
def test_a_token_without_a_slot_has_no_request_and_no_entry(backend: str) -> None:
    whole = LayerStack(load_backend("reference"), swa_block_size=4)
    builder = MetadataBuilder(whole.geometry, whole.limits, swa_block_size=4, backend=load_backend(backend))
    batch = padded_batch(whole.manager.batch([(whole.manager.new(), 5)]), None, [4, 4], rows_after=2)
    for name in BLOCK_TABLES:
        if (table := getattr(batch, name)) is not None:
            table[2] = table[0] + 50
    batch.slot_mapping[-3] = int(batch.block_table[2, 0]) * 4 + 3  # of position 3

    metadata_by_kind = builder.build_all(batch)

    for metadata in metadata_by_kind.values():
        request = metadata.swa.token_to_req_indices.tolist()
        assert request == [0] * 5 + [-1] * 7 + [2]
        assert metadata.swa.is_valid_token.tolist() == [i >= 0 for i in request]
        for part, lens in ((metadata.compressed, "compressed_lens"), (metadata.state, None)):
            if part is not None:
                assert part.slot_mapping is not None
                assert (part.slot_mapping[[*range(5, 12), 13, 14]] == -1).all()
                assert lens is None or not getattr(part, lens)[5:12].any()


def test_the_output_projection_takes_any_position_of_padding_and_no_wrong_one_of_a_token() -> None:
    layer, positions = stack("v4").layers[1].attention, stale_positions(8)
    positions[3] = 5
    # attention gives zeros to padding
    values = torch.zeros(8, 4, 32)
    values[3] = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))

    actual = layer.o_proj(values, positions, torch.eye(64), 2)

    assert not actual[[0, 1, 2, 4, 5, 6, 7]].any()
    torch.testing.assert_close(actual[3:4], layer.o_proj(values[3:4], positions[3:4], torch.eye(64), 2))
    values[4] = positions[4] = 64
    with pytest.raises(ArgumentError, match=r"^positions: expected values in \[0, 64\), .* not padding, got 64$"):
        layer.o_proj(values, positions, torch.eye(64), 2)


# steps without tokens


@pytest.mark.parametrize("waiting", [0, 2])
@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("model", STACKS)
def test_a_step_without_tokens_gives_zeros(model: str, padding: int, waiting: int) -> None:
    check_step_without_tokens(stack(model), waiting, padding)


@pytest.mark.parametrize("model", STACKS)
def test_a_request_goes_on_after_steps_without_its_tokens(model: str) -> None:
    whole, other = stack(model), stack(model)
    sequence, twin = whole.manager.new(), other.manager.new()
    for start, count in ((0, 5), (5, 0), (5, 1), (6, 0), (6, 6)):
        part = whole.hidden(1, 12)[start : start + count]
        outs = whole.step([(sequence, count)], part)
        if count:
            for out, expected in zip(outs, other.step([(twin, count)], part), strict=True):
                assert torch.equal(out, expected)

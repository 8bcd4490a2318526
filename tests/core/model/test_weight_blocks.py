"""Block sizes of fp8 weights: derived from the shape of the scales, or given. Scales that fit no block are refused."""

from __future__ import annotations

import pytest
import torch

from dsv4attn.core.model.quantized_weight import BlockScaledWeight, dense_weight
from dsv4attn.core.model.weight_scales import BLOCKS
from dsv4attn.errors import ArgumentError
from tests.core.model.scaled import DEVICE, OCP, Scaled, each_dialect, each_form
from tests.core.model.test_weights import assert_worth

RAGGED = [(64, 96), (33, 31), (32, 33), (70, 130), (5, 384), (128, 128), (1, 1), (1100, 40)]


@pytest.mark.parametrize("shape", RAGGED, ids=str)
@each_dialect
@each_form
def test_blocks_of_32_are_known_by_the_number_of_their_scales(
    shape: tuple[int, int], dialect: torch.dtype, form: str
) -> None:
    """As DeepSeek-V4.1 is published: exponents of blocks of 32 x 32, with short ones at the end."""
    drawn = Scaled.draw(sum(shape), *shape, dialect, form, block=(32, 32))

    for name in ("weight_scale_inv", "weight_scale", "scale"):
        assert_worth(dense_weight(drawn.module(name)), drawn.values)
    pair = drawn.pair()
    assert_worth(dense_weight(pair), drawn.values)
    assert pair.block_size == (32, 32) or max(shape) <= 32
    assert_worth(dense_weight(drawn.pair(block_size=32)), drawn.values)


BLOCK_SIZES = [(64, 64), (16, 128), (1, 32), (48, 7), (1, 96), (1000, 1000), (200, 1)]


@pytest.mark.parametrize("block", BLOCK_SIZES, ids=str)
@each_form
def test_any_block_size_can_be_given(block: tuple[int, int], form: str) -> None:
    """Also a scale for each row, and one scale for the whole matrix."""
    for seed, shape in enumerate([(200, 96), (1030, 130), (3, 2)]):
        drawn = Scaled.draw(seed, *shape, OCP, form, block=block)

        assert_worth(dense_weight(drawn.pair(block_size=block)), drawn.values)
        assert_worth(dense_weight(drawn.module(weight_block_size=[*block])), drawn.values)
        assert_worth(dense_weight(drawn.module("scale", block_size=block)), drawn.values)
        assert BlockScaledWeight.of(drawn.module(block_size=block)).block_size == block


def test_one_size_at_most_fits_the_number_of_scales() -> None:
    """What makes 32 x 32 and 128 x 128 known by their scales: both fit only where one scale is the whole matrix's."""
    for rows in range(1, 300):
        for columns in (1, 31, 32, 33, 127, 128, 129, 257):
            grids = {(-(-rows // n), -(-columns // n)) for n in BLOCKS}
            assert len(grids) == len(BLOCKS) or grids == {(1, 1)}


def test_scales_that_fit_no_known_block_are_refused_by_name() -> None:
    drawn = Scaled.draw(1, 64, 96, OCP, "fp32", block=(32, 32))
    row, whole = r"block_size=\(1, 96\)", r"block_size=\(64, 96\)"
    wrong = {
        (): rf"weight_scale_inv: expected \[1, 1\] or \[2, 3\] float32.* got \[\] float32 -> if it is one.*{whole}",
        (1,): rf"got \[1\] float32 -> if it is one scale for the whole matrix.*{whole}",
        (64,): rf"got \[64\] float32 -> if it is a scale for each row.*{row}",
        (64, 1): rf"got \[64, 1\] float32 -> if it is a scale for each row.*{row}",
        (3, 2): "every block of 128 x 128 or 32 x 32 has one.*for other blocks",
        (4, 6): "every block of 128 x 128 or 32 x 32 has one.*for other blocks",
    }
    for shape, said in wrong.items():
        with pytest.raises(ArgumentError, match=said):
            dense_weight(drawn.module(weight_scale_inv=torch.ones(shape, device=DEVICE)))
    # scales are not those of the size that is said
    with pytest.raises(ArgumentError, match=r"expected \[1, 1\] .* got \[2, 3\]"):
        dense_weight(drawn.module(weight_block_size=[128, 128]))
    for size in (0, -1, (32,), (32, 0), "32", 2.0, True, (1, 2, 3)):
        with pytest.raises(ArgumentError, match=r"^block_size: expected two positive numbers"):
            drawn.pair(block_size=size)

"""Products of few rows, judged by float64 and by the bf16 copy of their weights; and their bits on a device."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dsv4attn.backends._triton import projection
from dsv4attn.backends._triton.interpreted import INTERPRETED
from dsv4attn.backends._triton.launching.runtime import architecture, observed
from dsv4attn.backends._triton.layer.projections import few_rows, products
from dsv4attn.backends._triton.layer.projections.few_rows import Heads, is_served, multiply
from dsv4attn.backends._triton.layer.projections.products import Tile
from dsv4attn.core.model.quantized_weight import BlockScaledWeight, converted
from tests.backends._triton.cache.caches import DEVICE, seeded, strided

BF16, FP32, FP8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
NOPE, ROPE = 448, 64
PLAIN = Tile(16, 64, 128, 4, 4), Tile(64, 128, 64, 8, 3)
OF_HEADS = Tile(16, 64, 64, 4, 6), Tile(64, 64, 128, 4, 3)
each_scale = pytest.mark.parametrize("scales", [FP32, torch.uint8, torch.float8_e8m0fnu], ids=str)


def coded(columns: int, depth: int, seed: int, scales: torch.dtype = FP32) -> BlockScaledWeight:
    """A weight with codes and factors of all sizes."""
    g = seeded(seed)
    codes = torch.randint(0, 256, (columns, depth), generator=g, dtype=torch.uint8)
    codes[(codes & 0x7F) == 0x7F] = 1
    exponents = torch.randint(118, 134, (columns // 128, depth // 128), generator=g, dtype=torch.uint8)
    scale = torch.exp2(exponents.float() - 127) if scales == FP32 else exponents.view(scales)
    # rows lie apart, and what is between them is NaN
    memory = torch.full((columns, depth + 32), 0x7F, dtype=torch.uint8)
    memory[:, :depth] = codes
    return BlockScaledWeight(memory.to(DEVICE)[:, :depth].view(FP8), scale.to(DEVICE))


def rows_of(rows: int, depth: int, seed: int) -> Tensor:
    """X [rows, depth], rows that lie apart with NaN between them, and rows of NaN after them."""
    x = torch.randn(rows + 3, depth, generator=seeded(seed)).to(BF16)
    x[rows:] = torch.nan
    return strided(x, 8)[:rows]


def product_of(
    x: Tensor, weight: Tensor | BlockScaledWeight, tile: Tile, groups: int = 1, heads: Heads | None = None
) -> Tensor:
    """The product in fp32; what lies after it and between its rows stays."""
    columns = (weight if isinstance(weight, Tensor) else weight.weight).shape[0]
    memory = torch.full((len(x) + 1, columns + 16), 77.0, device=DEVICE)
    assert is_served(x, weight, memory[:-1, :columns], tile, groups)
    multiply(x, weight, memory[:-1, :columns], tile, groups, heads)
    assert (memory[-1] == 77).all()
    assert (memory[:, columns:] == 77).all()
    return memory[:-1, :columns]


def is_right(result: Tensor, x: Tensor, weight: Tensor) -> bool:
    """Whether each element is within fp32 sums of the product in float64."""
    left, right = x.double().cpu(), weight.double().cpu()
    size = left.abs() @ right.abs().mT
    return bool(((result.double().cpu() - left @ right.mT).abs() <= 2.0**-20 * size).all())


@pytest.mark.parametrize("tile", PLAIN, ids=str)
@each_scale
def test_codes_multiply_as_their_bf16_copy_does(tile: Tile, scales: torch.dtype) -> None:
    for seed, (rows, columns, depth) in enumerate([(17, 256, 256), *([(70, 128, 512)] if scales == FP32 else [])]):
        x = rows_of(rows, depth, seed)
        weight = coded(columns, depth, seed, scales)
        copy = converted(weight)
        result = product_of(x, weight, tile)
        assert is_right(result, x, copy)
        assert torch.equal(result, product_of(x, copy, tile))


def test_a_factor_of_the_wrong_block_is_seen() -> None:
    """A planted bug."""
    x, weight = rows_of(5, 256, 0), coded(256, 256, 0)
    wrong = BlockScaledWeight(weight.weight, weight.scale.flip(1))
    assert not is_right(product_of(x, wrong, PLAIN[0]), x, converted(weight))


@pytest.mark.parametrize("tile", OF_HEADS, ids=str)
def test_groups_of_heads_with_columns_of_another_tensor(tile: Tile) -> None:
    heads, groups, rank = 4, 2, 64
    for rows in (18,):
        o = rows_of(rows, heads * (NOPE + ROPE), rows)
        turned = torch.randn(rows, heads * ROPE, generator=seeded(rows)).to(BF16).to(DEVICE)
        # the columns in the place of the others are not read
        whole = o.clone().view(rows, heads, -1)
        o.view(rows, heads, -1)[..., NOPE:] = torch.nan
        whole[..., NOPE:] = turned.view(rows, heads, ROPE)
        weight = converted(coded(groups * rank, heads // groups * (NOPE + ROPE), 0))
        inputs = whole.view(rows, groups, -1).transpose(0, 1)
        result = product_of(o, weight, tile, groups, Heads(NOPE, ROPE, turned))
        by_group = result.view(rows, groups, rank).transpose(0, 1)
        assert is_right(by_group, inputs, weight.view(groups, rank, -1))


def test_no_rows_launch_nothing() -> None:
    with observed() as seen:
        assert product_of(rows_of(0, 256, 0), coded(128, 256, 0), PLAIN[0]).shape == (0, 128)
    assert not seen


def test_what_the_kernel_does_not_multiply() -> None:
    x, out, tile = rows_of(3, 256, 0), torch.empty(3, 128, device=DEVICE), PLAIN[0]
    weight = coded(128, 256, 0)
    assert is_served(x, weight, out, tile)
    assert not is_served(x, weight, out, tile, 4)
    assert not is_served(x, weight, out, Tile(16, 64, 512, 4, 3))
    assert not is_served(x, weight, out, Tile(16, 64, 256, 4, 3))
    assert is_served(x, converted(weight), out, Tile(16, 64, 256, 4, 3))
    assert not is_served(x[:, ::2], weight, out, tile)
    assert not is_served(torch.empty(3, 257, dtype=BF16, device=DEVICE)[:, 1:], weight, out, tile)
    small = BlockScaledWeight(weight.weight, torch.ones(4, 8, device=DEVICE))
    assert not is_served(x, small, out, tile)


def test_warm_up_foresees_every_form() -> None:
    depth = NOPE + ROPE
    foreseen = {v for scales in (None, FP32, torch.uint8) for v in few_rows.variants_of(PLAIN[0], FP32, scales)}
    with observed() as seen:
        x = rows_of(2, depth, 0)
        for number, scales in enumerate((FP32, torch.uint8, torch.float8_e8m0fnu)):
            weight = coded(128, depth, number, scales)
            product_of(x, weight, PLAIN[0])
        copy = converted(weight)
        product_of(x, copy, PLAIN[0])
    assert {*seen} == foreseen


@pytest.mark.device
@pytest.mark.skipif(
    INTERPRETED or architecture() not in products.TILES, reason="needs an architecture with several tiles"
)
class TestOnADevice:
    """Bits for all numbers of rows, and NaN codes."""

    @pytest.mark.parametrize("tile", PLAIN, ids=str)
    def test_d2_bits_are_those_of_the_copy_in_other_products(self, tile: Tile) -> None:
        x, weight = rows_of(300, 1024, 0), coded(512, 1024, 0)
        copy, expected = converted(weight), torch.empty(300, 512, device=DEVICE)
        products.product(x, copy, expected, products.base_tile(architecture()))
        for rows in (1, 2, 7, 16, 17, 64, 100, 300):
            assert torch.equal(product_of(x[:rows], weight, tile), expected[:rows])

    @pytest.mark.parametrize("tile", PLAIN, ids=str)
    def test_a_nan_code_reaches_its_column_alone(self, tile: Tile) -> None:
        weight = coded(256, 1024, 0)
        weight.weight.view(torch.uint8)[5, 77] = 0xFF
        result = product_of(rows_of(3, 1024, 0), weight, tile)
        assert result[:, 5].isnan().all()
        assert result.isnan().sum() == 3

    @pytest.mark.parametrize("tile", [*OF_HEADS, *few_rows.HEADS["sm_90"]], ids=str)
    def test_d2_wo_a_has_the_bits_of_other_tiles(self, tile: Tile, monkeypatch: pytest.MonkeyPatch) -> None:
        o, table = torch.randn(100, 64, NOPE + ROPE, device=DEVICE).to(BF16), torch.randn(100, ROPE, device=DEVICE)
        weight, positions = converted(coded(8 * 1024, 4096, 0)), torch.arange(100, device=DEVICE)
        monkeypatch.setattr(few_rows, "HEADS", {})
        expected = projection.inv_rope_o_proj(o, positions, table, weight, 8, deterministic=True).flatten(1)
        turned = projection.turn_back(o, positions, table).flatten(1)
        for rows in (1, 16, 17, 64, 100):
            result = product_of(o[:rows].flatten(1), weight, tile, 8, Heads(NOPE, ROPE, turned[:rows]))
            assert torch.equal(result.to(BF16), expected[:rows])

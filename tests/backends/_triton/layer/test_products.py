"""Products whose row bits do not depend on the number of rows, judged by float64; and their bits, here and on a device.

Interpreted, a product is numpy's of two blocks, whose order depends on their shapes. So bits of different tiles are
compared on a device alone; here the tile of an unknown architecture serves, which is one for all numbers of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from attrs import evolve, frozen
from torch import Tensor

from dsv4attn.backends._triton import projection
from dsv4attn.backends._triton.interpreted import INTERPRETED
from dsv4attn.backends._triton.launching.runtime import architecture, observed
from dsv4attn.backends._triton.layer import ops
from dsv4attn.backends._triton.layer.projections import output, products
from dsv4attn.backends._triton.layer.projections.products import (
    TILES,
    Tile,
    base_tile,
    linear,
    parts_of,
    product,
    tile_for,
)
from dsv4attn.backends._triton.support import ONE_ORDER
from dsv4attn.backends.reference.launch import ReferenceBackend
from dsv4attn.backends.triton.launch import GenericBackend
from dsv4attn.core.contract import LayerOps
from dsv4attn.core.model.quantized_weight import BlockScaledWeight
from dsv4attn.core.torch_ops.tiles import INVARIANT, PLAIN, batch_invariant_linear
from dsv4attn.errors import ArgumentError
from tests.backends._triton.cache.caches import DEVICE, seeded, strided
from tests.harness import LayerStack

BF16, FP32 = torch.bfloat16, torch.float32
ROWS = (0, 1, 15, 16, 17, 63, 64, 65, 200)
OF_HOPPER = TILES["sm_90"]
HOPPER = tuple(dict.fromkeys((*OF_HOPPER.every(BF16), *OF_HOPPER.every(FP32), base_tile("sm_90"))))
each_tile = pytest.mark.parametrize("tile", HOPPER, ids=str)


def widest(tile: Tile) -> torch.dtype:
    """The widest dtype of results for which a multiprocessor has the memory."""
    return BF16 if tile in OF_HOPPER.large and tile not in OF_HOPPER.wide else FP32


def factors(rows: int, columns: int, depth: int, seed: int = 0, pad: int = 0) -> tuple[Tensor, Tensor]:
    """X [rows, depth] and a weight [columns, depth], with values of many sizes. pad: NaN between their rows."""
    g = seeded(seed)
    drawn = [torch.randn(n, depth, generator=g) * torch.exp2(torch.randint(-6, 7, (n, 1), generator=g).float())
             for n in (rows, columns)]  # fmt: skip
    x, weight = (strided(part.to(BF16), pad) for part in drawn)
    return x, weight


SUMS = 2.0**-17 if DEVICE.type == "cuda" else 2.0**-20
"""Error of sums, relative to the sum of magnitudes. Hopper cuts off what an fp32 sum cannot hold."""


def check(x: Tensor, weight: Tensor, result: Tensor) -> None:
    """Fail unless each element is within fp32 sums, and one rounding, of the product in float64."""
    left, right = x.double().cpu(), weight.double().cpu()
    expected, size = left @ right.T, left.abs() @ right.abs().T
    unit = 2.0**-8 if result.dtype == BF16 else 0.0
    assert result.shape == expected.shape
    assert ((result.double().cpu() - expected).abs() <= unit * expected.abs() + SUMS * size).all()


@each_tile
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_every_tile_multiplies_within_fp32_sums(tile: Tile, dtype: torch.dtype) -> None:
    for seed, (columns, depth, pad) in enumerate([(80, 256, 8), (33, 100, 3), (272, 200, 0)]):
        for rows in (1, 17, 130):
            x, weight = factors(rows, columns, depth, seed, pad)
            # what lies after the result, and between its rows, stays
            memory = torch.full((rows + 1, columns + 16), 77.0, dtype=dtype, device=DEVICE)
            product(x, weight, memory[:-1, :columns], tile)

            check(x, weight, memory[:-1, :columns])
            assert (memory[-1] == 77).all()
            assert (memory[:, columns:] == 77).all()


@pytest.mark.parametrize("rows", ROWS)
def test_linear_takes_any_number_of_rows_and_nothing_past_them(rows: int) -> None:
    x, weight = factors(rows + 3, 48, 192, rows, pad=8)
    x[rows:] = torch.nan
    for out_dtype in (None, FP32):
        result = linear(x[:rows], weight, out_dtype)
        assert result.dtype == (out_dtype or BF16)
        check(x[:rows], weight, result)
    out = torch.empty(rows, 64, dtype=FP32, device=DEVICE)[:, 8:56]

    assert linear(x[:rows], weight, out=out) is out
    assert torch.equal(out, linear(x[:rows], weight, FP32))


def test_linear_of_more_dims_and_of_no_columns() -> None:
    x, weight = factors(6, 32, 64)
    whole = linear(x, weight)

    assert torch.equal(linear(x.view(2, 3, 64), weight), whole.view(2, 3, 32))
    assert torch.equal(linear(x[0], weight), whole[0])
    assert linear(x, weight[:0]).shape == (6, 0)
    assert (linear(x[:, :0], weight[:, :0]) == torch.zeros(6, 32, device=DEVICE)).all()
    with pytest.raises(ArgumentError, match="out"):
        linear(x, weight, out=whole[:5])


def test_an_x_that_does_not_fit_the_weight_is_refused_before_a_launch() -> None:
    """Kernels would read past the ends of rows, and of memory."""
    x, weight = torch.ones(3, 16, dtype=BF16, device=DEVICE), torch.ones(5, 16, dtype=BF16, device=DEVICE)
    with observed() as seen:
        for left, right in ((x[:, :8], weight), (x.repeat(1, 2), weight), (x, weight[0]), (x, weight[None])):
            with pytest.raises(
                ArgumentError, match=r"^x: expected \[\.\.\., columns\], with the columns of a matrix weight"
            ):
                products.linear(left, right)
        out = torch.empty(3, 10, device=DEVICE)[:, ::2]
        with pytest.raises(ArgumentError, match=r"^out: .*write to a dense tensor and copy it to out"):
            products.linear(x, weight, out=out)
    assert seen == []


def test_what_the_kernels_do_not_multiply_is_torchs() -> None:
    x, weight = factors(40, 32, 64)
    wide = linear(x.float(), weight.float())
    with observed() as seen:
        assert torch.equal(wide, batch_invariant_linear(x.float(), weight.float()))
        assert torch.equal(linear(x, weight.float()), wide)
        # columns that lie apart
        apart = torch.stack([x, x], -1)[..., 0]
        check(x, weight, linear(apart, weight))
        assert linear(apart, weight, FP32).dtype == FP32
    assert not seen


# bits


Product = Callable[[Tensor, Tensor], Tensor]


def with_other_bits(multiply: Product, x: Tensor, weight: Tensor) -> int:
    """How many elements of rows have other bits than in the product of all rows of x."""
    whole, count = multiply(x, weight), 0
    for rows in (1, 2, 7, 16, 17, 33, 64, 100, len(x)):
        for first in {0, 5, len(x) - rows}:
            if first + rows <= len(x):
                bits = multiply(x[first : first + rows], weight).view(torch.int32)
                count += int((bits != whole[first : first + rows].view(torch.int32)).sum())
    return count


def in_fp32(x: Tensor, weight: Tensor) -> Tensor:
    return linear(x, weight, FP32)


def by_rows(x: Tensor, weight: Tensor) -> Tensor:
    """A planted bug: few rows are summed in two halves of k."""
    if len(x) > 16:
        return in_fp32(x, weight)
    half = x.shape[1] // 2
    return in_fp32(x[:, :half], weight[:, :half]) + in_fp32(x[:, half:], weight[:, half:])


def test_d2_bits_of_a_row_do_not_depend_on_the_rows() -> None:
    for columns, depth, pad in ((48, 256, 8), (33, 100, 3)):
        x, weight = factors(130, columns, depth, pad=pad)
        assert with_other_bits(in_fp32, x, weight) == 0


def test_d2_an_order_of_k_that_follows_the_rows_is_seen() -> None:
    x, weight = factors(130, 48, 256)
    assert with_other_bits(by_rows, x, weight) > 0


def hard_factors(rows: int, columns: int, depth: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Values of one size, and of sizes so different that other orders of sums have other results."""
    for spread in (0, 12):
        g = seeded(spread)
        drawn = []
        for n in (rows, columns):
            sizes = torch.exp2(torch.randint(-spread, spread + 1, (n, depth), generator=g).float())
            drawn.append((torch.randn(n, depth, generator=g) * sizes).to(BF16).to(DEVICE))
        drawn[0][min(7, rows - 1)] = 0
        yield drawn[0], drawn[1]


on_device = [
    pytest.mark.device,
    pytest.mark.skipif(INTERPRETED or architecture() not in TILES, reason="needs an architecture with several tiles"),
]


@pytest.mark.parametrize("number", range(len(HOPPER)), ids=[*map(str, HOPPER)])
@pytest.mark.parametrize("shape", [(1056, 1024), (512, 4096)], ids=str)
class TestOnADevice:
    """Bits of all tiles that stand in for each other."""

    pytestmark = on_device

    def test_d2_all_tiles_of_an_architecture_have_equal_bits(self, number: int, shape: tuple[int, int]) -> None:
        arch = architecture()
        tile, base = HOPPER[number], base_tile(arch)
        for x, weight in hard_factors(2048, *shape):
            expected = torch.empty(2048, shape[0], device=DEVICE)
            product(x, weight, expected, base)
            check(x, weight, expected)
            for rows in (1, 2, 7, 16, 33, 64, 100, 2043):
                for first in (0, 5):
                    out = torch.empty(rows, shape[0], device=DEVICE, dtype=widest(tile))
                    product(x[first : first + rows], weight, out, tile)
                    same = expected[first : first + rows].to(out.dtype)
                    assert torch.equal(out.view(torch.uint8), same.view(torch.uint8)), rows


class TestOtherProductsOnADevice:
    """The projections `wo_a`, whose tiles follow the rows in deterministic layers too."""

    pytestmark = on_device

    def test_d2_linear_has_equal_bits_for_every_number_of_rows(self) -> None:
        for x, weight in hard_factors(2048, 4160, 1024):
            assert with_other_bits(in_fp32, x, weight) == 0

    def test_d2_wo_a_in_bf16_has_equal_bits_for_every_number_of_rows(self) -> None:
        o, wo_a = (torch.randn(*shape, device=DEVICE).to(BF16) for shape in ((300, 64, 512), (8 * 1024, 4096)))
        positions, table = torch.arange(300, device=DEVICE), torch.randn(300, 64, device=DEVICE)
        results = {
            rows: projection.inv_rope_o_proj(o[:rows], positions[:rows], table, wo_a, 8, deterministic=True)
            for rows in (1, 64, 128, 129, 300)
        }
        assert all(torch.equal(result, results[300][:rows]) for rows, result in results.items())

    def test_d2_wo_a_in_fp8_has_equal_bits_for_every_number_of_rows(self) -> None:
        codes, weight = (
            torch.randn(*shape, device=DEVICE).to(torch.float8_e4m3fn) for shape in ((1100, 8, 4096), (8 * 1024, 4096))
        )
        scales = torch.exp2(torch.randint(-9, 10, (1100, 8, 32), device=DEVICE).float())
        wo_a = BlockScaledWeight(weight, torch.rand(64, 32, device=DEVICE) + 0.5)
        results = {
            rows: output.fp8_o_proj(codes[:rows], scales[:rows], wo_a, 8, dtype=FP32, deterministic=True)
            for rows in (1, 16, 17, 64, 65, 128, 129, 300, 1100)
        }
        assert all(torch.equal(result, results[1100][:rows]) for rows, result in results.items())


# tiles and forms


def test_an_architecture_whose_bits_were_not_compared_has_one_tile() -> None:
    for arch in ("sm_80", "sm_100", "sm_120", "gfx942", "xpu", "cpu"):
        assert {tile_for(rows, 4096, arch, FP32) for rows in (1, 16, 64, 65, 8192)} == {base_tile(arch)}
        tiles = {projection.tile_of(rows, BF16, 16, arch, deterministic=True) for rows in (1, 16, 64, 300)}
        assert tiles == {projection.tiles_for(arch)[1]}
    assert {*TILES} == ONE_ORDER


def test_tiles_of_hopper_follow_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "multiprocessors", lambda: 132)
    tile_for.cache_clear()
    chosen = {rows: tile_for(rows, 4096, "sm_90", BF16) for rows in (1, 16, 17, 64, 65, 300, 2048, 8192)}
    slim = tile_for(64, 1024, "sm_90", BF16)
    of_fp32_results = tile_for(8192, 4096, "sm_90", FP32)
    tile_for.cache_clear()

    assert {*chosen.values()} <= {*HOPPER}
    assert [tile.rows <= 64 for tile in chosen.values()] == [True] * 5 + [False] * 3
    assert slim.columns < chosen[64].columns
    assert all(tile.rows >= rows for rows, tile in chosen.items() if rows <= 64)
    assert chosen[8192].rows * chosen[8192].columns == max(tile.rows * tile.columns for tile in HOPPER)
    assert of_fp32_results in OF_HOPPER.wide
    assert chosen[8192] in OF_HOPPER.large
    assert chosen[65] == chosen[64]  # larger tiles leave most multiprocessors without one
    wo_a = [projection.tile_of(rows, BF16, 16, "sm_90", deterministic=True) for rows in (1, 128, 129)]
    assert wo_a == [projection.MIDDLE, projection.MIDDLE, projection.LARGE]


def test_columns_of_a_last_round_have_smaller_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "multiprocessors", lambda: 132)
    for cached in (tile_for, parts_of):
        cached.cache_clear()
    chosen = {rows: parts_of(rows, 4672, "sm_90", FP32) for rows in (512, 2048, 8192)}
    whole = parts_of(2048, 4160, "sm_90", FP32)
    for cached in (tile_for, parts_of):
        cached.cache_clear()

    assert [len(parts) for parts in chosen.values()] == [1, 2, 1]
    assert [columns for _, columns in chosen[2048]] == [4096, 576]
    assert {tile for parts in chosen.values() for tile, _ in parts} <= {*OF_HOPPER.every(FP32)}
    assert [columns for _, columns in whole] == [4160]


def test_parts_of_a_product_are_its_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    base = base_tile(architecture())
    monkeypatch.setattr(products, "parts_of", lambda *_: ((base, 48), (base, 16)))
    x, weight = factors(5, 64, 128)
    check(x, weight, linear(x, weight))
    out = torch.empty(5, 64, dtype=FP32, device=DEVICE)
    check(x, weight, linear(x, weight, out=out))


@each_tile
def test_warm_up_foresees_every_form_that_is_launched(tile: Tile) -> None:
    foreseen = {*products.variants(arch="sm_90"), *products.variants()}
    with observed() as seen:
        for seed, (rows, columns, depth, pad) in enumerate([(1, 16, 128, 8), (300, 32, 128, 0), (5, 33, 100, 3)]):
            x, weight = factors(rows, columns, depth, seed, pad)
            out_dtype = widest(tile) if seed % 2 or tile not in OF_HOPPER.every(BF16) else BF16
            product(x, weight, torch.empty(rows, columns, dtype=out_dtype, device=DEVICE), tile)
    # this machine's architecture is not Hopper, which has one constant of its own
    known = {(v.name, v.types, without_pdl(v), v.num_warps, v.num_stages) for v in foreseen}

    assert {(v.name, v.types, without_pdl(v), v.num_warps, v.num_stages) for v in seen} <= known


def without_pdl(variant: object) -> tuple[tuple[str, object], ...]:
    return tuple(item for item in variant.constants if item[0] != "PDL")  # type: ignore[attr-defined]


# the layer


def test_a_deterministic_layer_multiplies_with_the_op_of_its_backend() -> None:
    plain, deterministic = GenericBackend().layer_ops, GenericBackend(deterministic=True).layer_ops

    assert not plain.brings("linear")
    assert deterministic.brings("linear")
    assert plain.arithmetic(deterministic=False) is PLAIN
    assert deterministic.arithmetic(deterministic=True) == evolve(INVARIANT, linear=linear)
    # a table without a product of its own
    for table in (LayerOps(), ReferenceBackend(deterministic=True).layer_ops):
        assert not table.brings("linear")
        assert table.arithmetic(deterministic=True) is INVARIANT


def test_an_op_that_the_table_leaves_out_is_the_deterministic_one_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    @frozen
    class WithOneMore(LayerOps):
        planted: str = "torch's"

    def defaults(*, deterministic: bool) -> WithOneMore:
        return WithOneMore(planted="deterministic" if deterministic else "torch's")

    monkeypatch.setattr(ops, "default_layer_ops", defaults, raising=False)
    for deterministic in (False, True):
        table: Any = ops.layer_ops(deterministic=deterministic)
        assert table.planted == defaults(deterministic=deterministic).planted


def test_a_layer_calls_the_product_that_a_table_brings() -> None:
    calls: list[tuple[int, ...]] = []

    def counted(x: Tensor, weight: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        calls.append(tuple(weight.shape))
        return PLAIN.linear(x, weight, out_dtype)

    class OneOp(ReferenceBackend):
        layer_ops = evolve(LayerOps(), linear=counted)

    stacks = LayerStack(OneOp()), LayerStack(ReferenceBackend())
    hidden = stacks[0].hidden(0, 40)
    outs = [stack.cut(hidden, [33, 7])[1] for stack in stacks]

    assert all(torch.equal(*pair) for pair in zip(*outs, strict=True))
    # at least the projections of q, of keys and of the output, of two layers in two steps
    assert len(calls) >= 2 * 2 * 4

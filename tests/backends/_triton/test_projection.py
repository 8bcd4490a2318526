"""The projection kernel, judged by the oracle: a rotation undone and rounded, then products summed in fp32."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from attrs import evolve
from torch import Tensor

from dsv4attn.backends._triton import projection
from dsv4attn.backends._triton.compiling.variant import Variant
from dsv4attn.backends._triton.launching.runtime import observed
from dsv4attn.backends._triton.layer.projections import few_rows, products
from dsv4attn.backends._triton.layer.projections.products import Tile
from dsv4attn.testing.oracle import attention as oracle
from tests.backends._triton.cache.caches import DEVICE, draw, each_dtype, seeded, strided

BF16, FP32_STEPS = 2.0**-8, 2.0**-20
DIMS = [(448, 64), (24, 8), (23, 6), (100, 20)]


class Call:
    """One random projection: ragged edges, padded rows, NaN between them."""

    def __init__(
        self,
        dims: tuple[int, int],
        dtype: torch.dtype,
        seed: int,
        *,
        tokens: int | None = None,
        rank: int | None = None,
    ) -> None:
        """Draw one."""
        g = seeded(seed)
        nope, self.rope = dims
        self.groups, self.rank = draw(g, 1, 3), rank or draw(g, 1, 80)
        heads = self.groups * draw(g, 1, 3)
        tokens = draw(g, 1, 40) if tokens is None else tokens
        pad = 8 * draw(g, 0, 2) if seed % 2 else draw(g, 0, 5)
        o = torch.randn(tokens, heads, nope + self.rope, generator=g)
        o *= torch.exp2(torch.randint(-4, 5, (1, heads, 1), generator=g))
        self.o = strided(o.to(dtype), pad)
        weight = torch.randn(self.groups * self.rank, heads // self.groups * (nope + self.rope), generator=g)
        self.wo_a = strided(weight.to(dtype), pad)
        self.table = strided(torch.randn(11, self.rope, generator=g), pad)
        self.positions = torch.randint(0, 11, (tokens,), generator=g).to(DEVICE)

    def run(self, out: Tensor | None = None) -> Tensor:
        """Run the kernel; o must stay."""
        original = self.o.clone()
        z = projection.inv_rope_o_proj(self.o, self.positions, self.table, self.wo_a, self.groups, out)
        assert torch.equal(self.o, original)
        return z

    def check(self, z: Tensor) -> None:
        """Fail unless z is right: one rounding of turned values, fp32 sums, one rounding of the result."""
        assert z.shape == (self.o.shape[0], self.groups, self.rank)
        assert z.dtype == self.o.dtype
        weight = self.wo_a.double().cpu().numpy().reshape(self.groups, self.rank, -1)
        heads, dim = self.o.shape[1] // self.groups, self.o.shape[2]
        turned = np.tile(np.arange(dim) >= dim - self.rope, heads)
        unit = BF16 if z.dtype == torch.bfloat16 else FP32_STEPS
        for t, position in enumerate(self.positions.tolist()):
            o = self.o[t].double().cpu().numpy()
            cos, sin = np.split(self.table[position].double().cpu().numpy(), 2)
            expected = oracle.inverse_rope_project(o, cos, sin, self.rope, weight, None)
            # these tables turn and stretch: the stretch is part of what is rounded
            x = oracle.apply_rope(o, cos, sin, self.rope, inverse=True).reshape(self.groups, -1)
            rounding = np.linalg.norm(x[:, turned], axis=1)[:, None] * np.linalg.norm(weight[..., turned], axis=2)
            summing = np.linalg.norm(x, axis=1)[:, None] * np.linalg.norm(weight, axis=2)
            budget = unit * (rounding + np.abs(expected)) + FP32_STEPS * summing
            assert (np.abs(z[t].double().cpu().numpy() - expected) <= budget).all()


@pytest.mark.parametrize("dims", DIMS, ids=str)
@each_dtype
def test_the_rotation_is_undone_and_each_group_projected(dims: tuple[int, int], dtype: torch.dtype) -> None:
    for seed in range(4):
        call = Call(dims, dtype, seed)
        call.check(call.run())


@pytest.mark.parametrize("tokens", [1, 16, 17, 128, 129])
def test_every_tile_and_its_edges(tokens: int) -> None:
    tile = projection.tile_of(tokens, torch.bfloat16, 16)
    for rank in (tile.columns - 1, tile.columns, tile.columns + 1):
        call = Call((24, 8), torch.bfloat16, 2 * tokens + 1, tokens=tokens, rank=rank)
        with observed() as seen:
            call.check(call.run())
        assert dict(seen[0].constants)["BLOCK_M"] == tile.rows


def test_matrices_may_be_wider_than_outputs() -> None:
    call = Call((24, 8), torch.bfloat16, 3)
    call.wo_a = torch.randn(call.wo_a.shape, generator=seeded()).to(DEVICE)
    call.check(call.run())


def test_a_given_output_is_filled_and_nothing_around_it() -> None:
    call = Call((24, 8), torch.bfloat16, 5)
    whole = torch.full((call.o.shape[0] + 1, call.groups + 2, call.rank + 3), torch.nan, dtype=torch.bfloat16).to(
        DEVICE
    )
    out = whole[:-1, 1:-1, : call.rank]
    assert call.run(out) is out
    call.check(out)
    out.fill_(torch.nan)
    assert whole.isnan().all()


def test_nothing_happens_without_tokens() -> None:
    call = Call((24, 8), torch.bfloat16, 0, tokens=0)
    assert call.run().shape == (0, call.groups, call.rank)


def test_a_row_of_nan_leaves_its_neighbours_alone() -> None:
    call = Call((24, 8), torch.bfloat16, 1, tokens=5)
    z = call.run()
    call.o[2] = torch.nan
    spoilt = projection.inv_rope_o_proj(call.o, call.positions, call.table, call.wo_a, call.groups)

    assert spoilt[2].isnan().all()
    assert torch.equal(spoilt[[0, 1, 3, 4]], z[[0, 1, 3, 4]])


@pytest.mark.parametrize("pad", [0, 1])
def test_a_row_has_the_same_bits_in_every_batch_if_that_is_asked_for(pad: int) -> None:
    """Pad: elements between tokens, with which the last token is aligned, and more tokens are not."""
    call = Call((24, 8), torch.float32, 3, tokens=145)
    call.o, call.wo_a = call.o.bfloat16(), call.wo_a.bfloat16()
    call.o = strided(call.o.flatten(1), pad).unflatten(1, call.o.shape[1:])
    results = []
    with observed() as seen:
        for tokens in (1, 20, 145):
            o, positions = call.o[-tokens:], call.positions[-tokens:]
            z = projection.inv_rope_o_proj(o, positions, call.table, call.wo_a, call.groups, deterministic=True)
            results.append(z[-1])

    assert len(set(seen)) == 1
    assert all(torch.equal(z, results[0]) for z in results)


@each_dtype
def test_warm_up_foresees_every_form_that_is_launched(dtype: torch.dtype) -> None:
    for seed, tokens in enumerate((1, 30, 130, 2, 40, 131)):
        call = Call((24, 8), dtype, seed, tokens=tokens, rank=16 + seed % 2)
        with observed() as seen:
            call.run()
        heads = call.o.shape[1]
        sizes = heads, 24, 8, call.groups, call.rank, dtype, dtype

        assert len(seen) == 1
        assert set(seen) <= set(projection.variants(*sizes, aligned=False))
        assert set(projection.variants(*sizes)) <= set(projection.variants(*sizes, aligned=False))


Change = Callable[[Call], None]


def with_rotation(call: Call) -> None:
    call.table[:, call.rope // 2 :] *= -1


def with_other_positions(call: Call) -> None:
    call.positions = (call.positions + 1) % 11


def with_groups_swapped(call: Call) -> None:
    call.wo_a = call.wo_a.roll(call.rank, 0)


@pytest.mark.mutation
@pytest.mark.parametrize("change", [with_rotation, with_other_positions, with_groups_swapped])
def test_a_mutant_is_found(change: Change) -> None:
    call = Call((24, 8), torch.bfloat16, 6)
    assert call.groups > 1
    wrong = Call((24, 8), torch.bfloat16, 6)
    change(wrong)
    with pytest.raises(AssertionError):
        call.check(wrong.run())


def test_rounding_of_the_turned_values_is_part_of_the_result() -> None:
    call = Call((24, 8), torch.bfloat16, 4)
    rounded = call.run()
    unrounded = Call((24, 8), torch.bfloat16, 4)
    unrounded.o = unrounded.o.float()
    assert not torch.equal(unrounded.run().bfloat16(), rounded)


# the rotation in a launch of its own


TURNED_TILES = [Tile(16, 64, 64, 4, 3, described=True), Tile(32, 64, 32, 4, 3, described=True)]


def turned_product(call: Call, tile: Tile) -> Tensor:
    """The product of `call` with the rotation undone before; what lies after it stays."""
    o, original = call.o, call.o.clone()
    memory = torch.full((len(o) + 1, call.groups, call.rank), 77.0, dtype=o.dtype, device=DEVICE)
    turned = projection.turn_back(o, call.positions, call.table)
    projection.project_turned(o, turned, call.wo_a, memory[:-1], tile)
    assert torch.equal(o, original)
    assert (memory[-1] == 77).all()
    return memory[:-1]


@pytest.mark.parametrize("tile", TURNED_TILES, ids=str)
def test_outputs_that_are_turned_back_before_are_projected_as_the_others(
    tile: Tile, monkeypatch: pytest.MonkeyPatch
) -> None:
    # programs have several tiles
    monkeypatch.setattr(projection, "multiprocessors", lambda: 2)
    for seed, tokens in enumerate((1, 35)):
        call = Call((128, 64), torch.bfloat16, 2 * seed + 1, tokens=tokens, rank=128)
        call.o[:, :, 0] = 0
        z = turned_product(call, tile)
        call.check(z)
        # of one order of sums: interpreted, sums are fp32 in one kernel and fp64 in the other
        assert (z != call.run()).float().mean() < 0.01


def test_a_rotation_of_other_positions_is_seen() -> None:
    """A planted bug."""
    call = Call((128, 64), torch.bfloat16, 1, tokens=5, rank=64)
    call.positions = (call.positions + 1) % 11
    z = turned_product(call, TURNED_TILES[0])
    call.positions = (call.positions - 1) % 11
    with pytest.raises(AssertionError):
        call.check(z)


def test_many_tokens_of_hopper_are_turned_back_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(projection, "architecture", lambda: "sm_90")
    for module in (projection, products):
        monkeypatch.setattr(module, "multiprocessors", lambda: 132)
    monkeypatch.setattr(projection, "MANY", 3)
    monkeypatch.setattr(few_rows, "HEADS", {})
    products.tile_for.cache_clear()
    call = Call((448, 64), torch.bfloat16, 1, tokens=4, rank=256)
    with observed() as seen:
        call.check(call.run())
        call.o = call.o[:3]
        call.run()
    products.tile_for.cache_clear()
    heads = call.o.shape[1]
    foreseen = {*projection.variants(heads, 448, 64, call.groups, 256, *[torch.bfloat16] * 2, arch="sm_90")}

    assert [v.name for v in seen] == ["turn_back_kernel", "project_turned_kernel", "project_kernel"]
    assert {*seen} <= {evolve(v, constants=without_pdl(v)) for v in foreseen}


@pytest.mark.parametrize("tokens", [3, 20])
def test_few_tokens_of_hopper_are_turned_back_before(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(projection, "architecture", lambda: "sm_90")
    call = Call((128, 64), torch.bfloat16, 1, tokens=tokens, rank=64)
    groups, rank, heads = call.groups, call.rank, 2 * call.groups
    call.o = call.o[:, :1].repeat(1, heads, 1) * torch.arange(1, heads + 1, device=DEVICE)[:, None]
    call.wo_a = torch.randn(groups * rank, 2 * 192, generator=seeded(0)).to(DEVICE, torch.bfloat16)
    with observed() as seen:
        call.check(call.run())
        apart = torch.empty(tokens, groups, 2 * rank, dtype=torch.bfloat16, device=DEVICE)[..., :rank]
        call.check(call.run(apart))
    foreseen = {*projection.variants(heads, 128, 64, groups, rank, *[torch.bfloat16] * 2, arch="sm_90")}

    assert [v.name for v in seen] == ["turn_back_kernel", "few_rows_kernel", "project_kernel"]
    assert {*seen[:2]} <= {evolve(v, constants=without_pdl(v)) for v in foreseen}
    assert projection.few_tile(65, heads, groups, rank, 128, 64, "sm_90") is None
    assert projection.few_tile(3, heads, groups, rank, 100, 64, "sm_90") is None
    assert projection.few_tile(3, heads, groups, 40, 128, 64, "sm_90") is None
    assert projection.few_tile(3, heads, heads, rank, 128, 64, "sm_90") is None


def without_pdl(variant: Variant) -> dict[str, object]:
    """Constants as the interpreter has them, which knows no PDL."""
    return {name: False if name == "PDL" else value for name, value in variant.constants}


@pytest.mark.parametrize("arch", ["sm_80", "sm_100", "gfx942"])
def test_architectures_whose_tiles_were_not_compared_have_one_kernel(arch: str) -> None:
    assert projection.turned_tile(2048, 8, 1024, 448, 64, arch) is None
    assert projection.turned_tile(2048, 8, 1000, 448, 64, "sm_90") is None
    assert projection.turned_tile(2048, 8, 1024, 440, 64, "sm_90") is None
    kernels = {v.name for v in projection.variants(64, 448, 64, 8, 1024, *[torch.bfloat16] * 2, arch=arch)}
    assert kernels == {"project_kernel"}


def test_launches_after_a_rotation_are_foreseen_where_no_alignment_is_promised() -> None:
    """As vLLM's plugin warms up: rows may lie anywhere, and most are aligned."""
    sizes = 64, 448, 64, 8, 1024, torch.bfloat16, torch.bfloat16
    promised, other = ({*projection.variants(*sizes, aligned=aligned, arch="sm_90")} for aligned in (True, False))
    assert {v.name for v in promised} >= {"turn_back_kernel", "few_rows_kernel", "project_turned_kernel"}
    assert promised < other
    narrow = projection.variants(2, 28, 4, 1, 64, torch.bfloat16, torch.bfloat16, aligned=False, arch="sm_90")
    assert {v.name for v in narrow} == {"project_kernel"}

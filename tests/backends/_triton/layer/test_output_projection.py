"""The output projection in fp8: codes and scales bit for bit, products against float64, and both together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dsv4attn.backends._triton.launching.runtime import architecture, observed
from dsv4attn.backends._triton.layer.projections import output
from dsv4attn.core.cache.layout import Fp8Format
from dsv4attn.core.model.quantized_weight import BlockScaledWeight
from dsv4attn.errors import ArgumentError
from dsv4attn.testing.oracle import attention as oracle
from tests.backends._triton.cache.caches import DEVICE, each_dtype, strided
from tests.backends._triton.engine import launching_nothing
from tests.backends._triton.layer.fp8_projections import Call
from tests.core.model.scaled import BLOCK, FNUZ, OCP, Scaled, each_dialect, each_form

each_block = pytest.mark.parametrize("block", [128, 32])


@each_dialect
@each_dtype
@each_block
def test_outputs_are_turned_back_and_quantised_in_fp32(dialect: torch.dtype, dtype: torch.dtype, block: int) -> None:
    for seed in range(4):
        call = Call(seed, dtype=dtype, dialect=dialect, block=block)
        call.check_codes(*call.quantise())


def test_exponents_of_scales_can_be_asked_for_four_in_a_word() -> None:
    call = Call(1)
    codes, scales = call.quantise()
    again, exponents = call.quantise(scale_format="ue8m0")

    assert torch.equal(again.view(torch.uint8), codes.view(torch.uint8))
    assert exponents.dtype == torch.uint8
    assert torch.equal(torch.exp2(exponents.float() - 127), scales)
    call.check_codes(again, exponents)


@each_dialect
def test_every_value_between_two_codes_goes_to_the_nearer_one(dialect: torch.dtype) -> None:
    fnuz = dialect == FNUZ
    call = Call(3, dialect=dialect, dtype=torch.float32, tokens=9)
    magnitudes = oracle.decode_e4m3(np.arange(0x80 if fnuz else 0x7F, dtype=np.uint8), fnuz)
    middles = (magnitudes[1:] + magnitudes[:-1]) / 2
    values = np.concatenate([magnitudes, middles, np.nextafter(middles.astype(np.float32), np.float32(1e9)), -middles])
    # the first value of a group is the largest code, so that its scale is 1
    rows = np.full((9, 2, BLOCK), magnitudes[-1])
    rows[..., 1:].reshape(-1)[: len(values)] = 0
    flat = np.resize(values, (9, 2, BLOCK - 1))
    rows[..., 1:] = flat
    call.rope = 2
    call.table = torch.tensor([[1.0, 0.0]], device=DEVICE).repeat(11, 1)
    call.o = torch.from_numpy(rows).float().to(DEVICE)
    call.check_codes(*call.quantise())


@each_dialect
def test_a_nan_is_a_nan_code_and_an_infinity_too(dialect: torch.dtype) -> None:
    for bad in (torch.nan, torch.inf, -torch.inf):
        call = Call(0, dialect=dialect)
        codes, scales = call.quantise()
        call.o[1, 2, 5] = bad
        call.o[2, 1, call.dim - 1] = bad
        actual, rescaled = call.quantise()
        wrong = torch.from_numpy(np.isnan(oracle.decode_e4m3(actual.view(torch.uint8).cpu().numpy(), call.fnuz)))
        place = wrong.view(5, call.heads, call.dim)

        # a rotated pair has two values
        assert place.nonzero().tolist() == [[1, 2, 5], [2, 1, call.dim - 2], [2, 1, call.dim - 1]]
        same = ~wrong.view(5, -1, BLOCK).any(-1).to(DEVICE)
        assert torch.equal(rescaled.view(5, -1)[same], scales.view(5, -1)[same])
        assert torch.equal(
            actual.view(torch.uint8).view(5, -1, BLOCK)[same], codes.view(torch.uint8).view(5, -1, BLOCK)[same]
        )


def test_positions_of_padding_may_be_anything() -> None:
    call = Call(2)
    codes, scales = call.quantise()
    call.positions[1], call.positions[3] = -(2**60), 2**62
    actual, rescaled = call.quantise()

    for row in (0, 2, 4):
        assert torch.equal(actual[row].view(torch.uint8), codes[row].view(torch.uint8))
        assert torch.equal(rescaled[row], scales[row])


@each_dialect
@each_form
@each_block
def test_codes_are_multiplied_and_every_block_has_its_scale(dialect: torch.dtype, form: str, block: int) -> None:
    for seed in range(4):
        call = Call(seed, dialect=dialect, form=form, block=block)
        quantised = call.quantise(scale_format=("float32", "ue8m0")[seed % 2])
        call.check_product(output.fp8_o_proj(*quantised, call.wo_a, call.groups), *quantised)


@pytest.mark.parametrize("tokens", [1, 16, 17, 128, 129])
@each_block
def test_every_tile_and_its_edges(tokens: int, block: int) -> None:
    call = Call(0, tokens=tokens, block=block)
    quantised = call.quantise()
    with observed() as seen:
        z = output.fp8_o_proj(*quantised, call.wo_a, call.groups, dtype=torch.float32)
    call.check_product(z, *quantised)

    expected = output.tile_of(tokens, len(call.wo_a.weight), Fp8Format.OCP, architecture(), one_scale=False)
    assert dict(seen[0].constants)["BLOCK_M"] == expected.tokens


@pytest.mark.parametrize("tile", output.HOPPER_TILES.every(), ids=str)
def test_tiles_of_hopper_give_the_same_product(tile: output.Tile, monkeypatch: pytest.MonkeyPatch) -> None:
    call = Call(0, tokens=130)
    quantised = call.quantise()
    monkeypatch.setattr(output, "tile_of", lambda *_, **__: tile)
    z = output.fp8_o_proj(*quantised, call.wo_a, call.groups, dtype=torch.float32)
    call.check_product(z, *quantised)


def test_a_tile_of_hopper_follows_tokens_ranks_and_multiprocessors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "INTERPRETED", False)
    flash, pro = 8 * 1024, 16 * 1024
    tiles = output.HOPPER_TILES
    alone, alone_128 = tiles.single

    def chosen(tokens: int, ranks: int, arch: str = "sm_90", **facts: bool) -> output.Tile:
        return output.tile_of(tokens, ranks, Fp8Format.OCP, arch, **facts)

    def of_units(units: int, tokens: int, ranks: int) -> output.Tile:
        monkeypatch.setattr(output, "multiprocessors", lambda: units)
        return chosen(tokens, ranks)

    assert of_units(128, 64, flash) == alone
    assert of_units(127, 64, flash) == tiles.middle
    assert of_units(132, 64, flash) == alone
    for steady in (False, True):
        of_flash = [chosen(n, flash, deterministic=steady) for n in (1, 16, 17, 64, 65, 128, 129, 1023, 1024)]
        assert of_flash == [*[tiles.small] * 2, *[alone] * 2, *[alone_128] * 2, *[tiles.large] * 2, tiles.many]
        of_pro = [chosen(n, pro, deterministic=steady) for n in (16, 17, 128, 129, 511, 512)]
        assert of_pro == [tiles.small, *[tiles.middle] * 2, *[tiles.large] * 2, tiles.many]
        assert [chosen(n, flash // 2, deterministic=steady) for n in (64, 65, 128)] == [alone] * 3
        # fewer ranks have as many tiles with more tokens
        assert [chosen(n, 1024, deterministic=steady) for n in (8191, 8192)] == [tiles.large, tiles.many]
        of_others = [chosen(n, flash, one_scale=False, deterministic=steady) for n in (1, 64, 9000)]
        assert of_others == ([tiles.middle] * 3 if steady else [tiles.small, tiles.middle, tiles.large])
    for arch in ("sm_89", "sm_100", "sm_120"):
        assert [chosen(n, flash, arch) for n in (1, 64, 9000)] == [tiles.small, tiles.middle, tiles.large]


def test_warm_up_has_every_tile_of_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "INTERPRETED", False)
    output._project_constants.cache_clear()
    try:
        forms = [*output.variants(64, 512, 64, 8, 1024, torch.bfloat16, arch="sm_90")]
    finally:
        output._project_constants.cache_clear()
    for block, tiles in ((128, output.HOPPER_TILES), (32, output.NATIVE_TILES)):
        found = set()
        for form in forms:
            facts = dict(form.constants)
            if form.name == "project_codes_kernel" and facts["GROUP"] == block and facts["NATIVE"]:
                size = facts["BLOCK_M"], facts["BLOCK_N"], form.num_warps, form.num_stages
                found.add(output.Tile(*size, swapped=facts["SWAPPED"]))
        assert found == {*tiles.every()}


def test_rows_may_lie_apart() -> None:
    call = Call(1)
    codes, scales = call.quantise()
    z = output.fp8_o_proj(codes, scales, call.wo_a, call.groups)
    wide = torch.full((5, call.groups, codes.shape[2] + 16), 0x7F, dtype=torch.uint8, device=DEVICE)
    wide[..., :-16] = codes.view(torch.uint8)
    matrix = torch.full((call.wo_a.weight.shape[0], codes.shape[2] + 32), 0x7F, dtype=torch.uint8, device=DEVICE)
    matrix[:, :-32] = call.wo_a.weight.view(torch.uint8)
    apart = BlockScaledWeight(matrix.view(OCP)[:, :-32], call.wo_a.scale.T.contiguous().T)
    factors = torch.full((5, call.groups, scales.shape[2] + 1), torch.nan, device=DEVICE)
    factors[..., :-1] = scales

    assert torch.equal(output.fp8_o_proj(wide.view(OCP)[..., :-16], factors[..., :-1], apart, call.groups), z)


@each_dialect
@each_block
def test_a_nan_code_reaches_what_it_is_multiplied_into_and_nothing_else(dialect: torch.dtype, block: int) -> None:
    nan = 0x80 if dialect == FNUZ else 0xFF
    for tokens in (4, 20):
        call = Call(0, dialect=dialect, tokens=tokens, block=block)
        codes, scales = call.quantise()
        z = output.fp8_o_proj(codes, scales, call.wo_a, call.groups)
        codes.view(torch.uint8)[2, 1, 77] = nan
        call.wo_a.weight.view(torch.uint8)[3, 130] = nan
        spoilt = output.fp8_o_proj(codes, scales, call.wo_a, call.groups)
        wrong = torch.zeros_like(z, dtype=torch.bool)
        wrong[2, 1], wrong[:, 0, 3] = True, True

        assert torch.equal(spoilt.isnan(), wrong)
        assert torch.equal(spoilt[~wrong], z[~wrong])


def test_a_nan_scale_reaches_its_block() -> None:
    call = Call(1, form="bytes")
    call.wo_a.scale[1, 0] = 255
    codes, scales = call.quantise()
    scales[2, 0, 1] = torch.nan
    z = output.fp8_o_proj(codes, scales, call.wo_a, call.groups)
    wrong = torch.zeros_like(z, dtype=torch.bool)
    wrong[2], wrong[..., BLOCK:] = True, True

    assert torch.equal(z.isnan(), wrong)


@each_dtype
def test_the_whole_is_that_of_values_but_for_the_noise_of_codes(dtype: torch.dtype) -> None:
    for seed in range(4):
        call = Call(seed, dtype=dtype)
        z, x = call.project(), call.turned().astype(np.float64)
        expected = np.einsum("tgk,grk->tgr", x, call.matrices())
        off = np.linalg.norm(z.double().cpu().numpy() - expected) / np.linalg.norm(expected)

        assert z.dtype == dtype
        assert 0.001 < off < 0.04
        quantised = call.quantise()
        assert torch.equal(z, output.fp8_o_proj(*quantised, call.wo_a, call.groups, dtype=dtype))


def test_nothing_happens_without_tokens() -> None:
    call = Call(0, tokens=0)
    codes, scales = call.quantise()

    assert (codes.shape, scales.shape) == ((0, 2, 256), (0, 2, 2))
    assert call.project().shape == (0, 2, 24)


def test_a_row_has_the_same_bits_in_every_batch_if_that_is_asked_for() -> None:
    call = Call(0, tokens=130)
    results = []
    with observed() as seen:
        for tokens in (1, 20, 130):
            o, positions = call.o[-tokens:], call.positions[-tokens:]
            rest = o, positions, call.table, call.wo_a, call.groups
            results.append(output.project_fp8(*rest, deterministic=True)[-1])

    assert len(set(seen)) == 2
    assert all(torch.equal(z, results[0]) for z in results)


@each_dialect
@each_dtype
def test_warm_up_foresees_every_form_that_is_launched(dialect: torch.dtype, dtype: torch.dtype) -> None:
    for seed, tokens in enumerate((1, 30, 130, 2)):
        for form in ("fp32", "bytes"):
            call = Call(seed, dtype=dtype, dialect=dialect, form=form, tokens=tokens, block=(128, 32)[seed % 2])
            if seed == 2:
                call.o = strided(call.o, 3)
            with launching_nothing(), observed() as seen:
                call.project()
            sizes = call.heads, call.dim, call.rope, call.groups, call.rank, dtype
            arch = architecture()

            assert len(seen) == 2
            assert set(seen) <= set(output.variants(*sizes, aligned=seed != 2, arch=arch))
            assert set(output.variants(*sizes, arch=arch)) <= set(output.variants(*sizes, aligned=False, arch=arch))


def test_there_is_no_form_for_heads_without_whole_groups() -> None:
    assert list(output.variants(8, 80, 8, 2, 64, torch.bfloat16)) == []
    some = list(output.variants(8, 96, 8, 2, 64, torch.bfloat16))
    assert {dict(form.constants)["GROUP"] for form in some} == {32}
    variants = output.variants(8, 128, 8, 2, 64, torch.bfloat16, blocks=(128,))
    assert {dict(form.constants)["GROUP"] for form in variants} == {128}


def test_other_blocks_are_refused_before_any_launch() -> None:
    call = Call(0)
    for block in ((64, 64), (1, 128), (1, 256), (48, 256)):
        rows, columns = call.scaled.codes.shape
        call.wo_a = Scaled.draw(0, rows, columns, OCP, "bytes", DEVICE, block).pair(block_size=block)
        said = rf"^wo_a\.block_size: expected blocks of 128 x 128 or 32 x 32 .* got {block[0]} x {block[1]} -> .*=bf16"
        with observed() as seen, pytest.raises(ArgumentError, match=said):
            call.project()
        assert seen == []
    with pytest.raises(ArgumentError, match=r"^columns: expected 128 or 32, got 64"):
        call.quantise(columns=64)


# errors


def test_what_does_not_fit_is_an_error_before_any_launch() -> None:
    call = Call(0)
    codes, scales = call.quantise()
    weight, raw = call.wo_a.weight, call.wo_a.weight.view(torch.uint8)
    shifted = torch.empty(raw.numel() + 1, dtype=torch.uint8, device=DEVICE)[1:].view(OCP).view(weight.shape)
    turned = BlockScaledWeight(raw.T.contiguous().T.view(OCP), call.wo_a.scale)
    wrong: list[tuple[str, Callable[[], Any]]] = [
        ("o: expected a head dim that is a multiple of 128.*projection=bf16", lambda: project_of_width(call, 80)),
        (r"wo_a\.weight: expected rows that begin at multiples of 16 bytes", lambda: projected(call, shifted)),
        (r"wo_a\.weight: expected stride 1 in the last", lambda: output.fp8_o_proj(codes, scales, turned, 2)),
        (r"wo_a\.weight: expected \[5 \* rank, 256\]", lambda: output.fp8_o_proj(codes, scales, call.wo_a, 5)),
        ("codes: .*float8_e4m3fn", lambda: output.fp8_o_proj(codes.view(torch.uint8), scales, call.wo_a, 2)),
        ("codes: .*float8_e4m3fn", lambda: output.fp8_o_proj(codes.view(FNUZ), scales, call.wo_a, 2)),
        ("scales: expected", lambda: output.fp8_o_proj(codes, scales[..., :1], call.wo_a, 2)),
        ("scales: expected", lambda: output.fp8_o_proj(codes, scales.double(), call.wo_a, 2)),
        ("scale_format: expected one of float32, ue8m0", lambda: call.quantise(scale_format="fp32")),
    ]
    with observed() as seen:
        for said, act in wrong:
            with pytest.raises(ArgumentError, match=said):
                act()

    assert seen == []


def project_of_width(call: Call, dim: int) -> Tensor:
    wide = torch.zeros(2, 2, dim, dtype=torch.bfloat16, device=DEVICE)
    return output.project_fp8(wide, call.positions[:2], call.table, call.wo_a, 2)


def projected(call: Call, weight: Tensor) -> Tensor:
    call.wo_a = BlockScaledWeight(weight, call.wo_a.scale)
    return call.project()


# mutants


def with_rotation(call: Call) -> None:
    call.table[:, call.rope // 2 :] *= -1


def without_rotation(call: Call) -> None:
    call.table[:, : call.rope // 2], call.table[:, call.rope // 2 :] = 1, 0


def with_other_positions(call: Call) -> None:
    call.positions = (call.positions + 1) % 11


@pytest.mark.mutation
@pytest.mark.parametrize("change", [with_rotation, without_rotation, with_other_positions])
def test_a_wrong_rotation_is_found(change: Callable[[Call], None]) -> None:
    call, wrong = Call(0), Call(0)
    change(wrong)
    with pytest.raises(AssertionError):
        call.check_codes(*wrong.quantise())


@pytest.mark.parametrize(("name", "value"), [("AMAX_FLOOR", 1e-4), ("AMAX_FLOOR", 1e-12)])
def test_another_floor_is_found(name: str, value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    call = Call(0)
    monkeypatch.setattr(output, name, value)
    output._quantise_constants.cache_clear()
    try:
        with pytest.raises(AssertionError):
            call.check_codes(*call.quantise())
    finally:
        output._quantise_constants.cache_clear()


def with_scales_of_other_rows(wrong: Call) -> None:
    wrong.wo_a = BlockScaledWeight(wrong.wo_a.weight, wrong.wo_a.scale.roll(1, 0))


def with_scales_of_other_columns(wrong: Call) -> None:
    wrong.wo_a = BlockScaledWeight(wrong.wo_a.weight, wrong.wo_a.scale.roll(1, 1))


def with_groups_swapped(wrong: Call) -> None:
    weight = wrong.wo_a.weight.view(torch.uint8).roll(wrong.rank, 0).view(OCP)
    wrong.wo_a = BlockScaledWeight(weight, wrong.wo_a.scale)


@pytest.mark.mutation
@pytest.mark.parametrize(
    ("seed", "change"), [(3, with_scales_of_other_rows), (0, with_scales_of_other_columns), (3, with_groups_swapped)]
)
def test_a_wrong_block_of_weights_is_found(seed: int, change: Callable[[Call], None]) -> None:
    call, wrong = Call(seed), Call(seed)
    quantised = call.quantise()
    change(wrong)
    with pytest.raises(AssertionError):
        call.check_product(output.fp8_o_proj(*quantised, wrong.wo_a, call.groups), *quantised)


def test_scales_of_other_outputs_are_found() -> None:
    call = Call(0)
    codes, scales = call.quantise()
    for wrong in (scales.roll(1, 0), scales.roll(1, 1), scales.roll(1, 2)):
        with pytest.raises(AssertionError):
            call.check_product(output.fp8_o_proj(codes, wrong, call.wo_a, call.groups), codes, scales)

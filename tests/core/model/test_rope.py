"""RoPE: frequencies, YaRN, tables of cosines and sines, and rotations, as the oracle and transformers have them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from dsv4attn.core.model.geometry import ModelGeometry, Rope, Yarn
from dsv4attn.core.model.rope import apply_rope, cos_sin_cache, inverse_frequencies
from dsv4attn.testing.oracle import attention as oracle

MAIN = Rope(64, 10000.0)
COMPRESS = Rope(64, 160000.0, Yarn(16.0, 65536))
TINY = Rope(8, 160000.0, Yarn(16.0, 256))
ROPES = [pytest.param(MAIN, id="main"), pytest.param(COMPRESS, id="compress"), pytest.param(TINY, id="tiny")]


def judged(rope: Rope) -> oracle.F32:
    """Return the oracle's frequencies of a rope."""
    yarn_rope, yarn = rope.yarn, None
    if yarn_rope is not None:
        yarn = oracle.Yarn(yarn_rope.factor, yarn_rope.original_max_position, yarn_rope.beta_fast, yarn_rope.beta_slow)
    return oracle.rope_inv_freq(rope.dim, rope.theta, yarn)


@pytest.mark.parametrize("rope", ROPES)
def test_the_frequencies_are_those_of_the_oracle(rope: Rope) -> None:
    # two float32 powers may differ in the last place
    np.testing.assert_array_max_ulp(inverse_frequencies(rope).numpy(), judged(rope), maxulp=2)


def test_yarn_keeps_the_first_15_pairs_and_divides_those_from_25_on() -> None:
    plain, yarn = inverse_frequencies(Rope(64, 160000.0)), inverse_frequencies(COMPRESS)

    assert torch.equal(yarn[:16], plain[:16])
    assert torch.equal(yarn[25:], plain[25:] / 16)
    assert bool((yarn[16:25] < plain[16:25]).all())
    assert bool((yarn[16:25] > plain[16:25] / 16).all())


def test_a_ramp_of_no_width_does_not_divide_by_zero() -> None:
    frequencies = inverse_frequencies(Rope(4, 160000.0, Yarn(16.0, 64, 1.0, 1.0)))

    assert bool(frequencies.isfinite().all())


@pytest.mark.parametrize("rope", ROPES)
def test_a_table_holds_cosines_then_sines_of_angles_rounded_to_fp32(rope: Rope) -> None:
    table = cos_sin_cache(rope, 5000)
    half, inv = rope.dim // 2, inverse_frequencies(rope).numpy()

    assert table.shape == (5000, rope.dim)
    assert table.dtype == torch.float32
    for position in (0, 1, 127, 128, 4999):
        cos, sin = oracle.rope_cos_sin(position, inv)
        np.testing.assert_allclose(table[position, :half].double(), cos, rtol=0, atol=2**-23)
        np.testing.assert_allclose(table[position, half:].double(), sin, rtol=0, atol=2**-23)


def test_g16_the_last_of_a_million_rows_follows_the_fp32_angle_and_not_the_exact_one() -> None:
    rope = Rope(8, 10000.0)
    table, inv = cos_sin_cache(rope, 2**20), inverse_frequencies(rope)
    position = 2**20 - 3
    cos, sin = oracle.rope_cos_sin(position, inv.numpy())
    exact = [math.cos(position * 10000.0 ** (-2 * i / 8)) for i in range(4)]

    np.testing.assert_allclose(table[position, :4].double(), cos, rtol=0, atol=2**-23)
    np.testing.assert_allclose(table[position, 4:].double(), sin, rtol=0, atol=2**-23)
    assert np.abs(table[position, :4].double().numpy() - exact).max() > 1e-4


def test_no_rows_make_an_empty_table() -> None:
    assert cos_sin_cache(MAIN, 0).shape == (0, 64)


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation_turns_neighbouring_pairs_as_the_oracle_does(inverse: bool, dtype: torch.dtype) -> None:
    x = torch.randn(9, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    table = cos_sin_cache(COMPRESS, 4096)[torch.arange(9) * 400]
    turned = apply_rope(x, table, inverse=inverse)

    assert turned.dtype == torch.float32
    for row, cos_sin, got in zip(x.double().numpy(), table.double().numpy(), turned.double().numpy(), strict=True):
        expected = oracle.apply_rope(row, cos_sin[:32], cos_sin[32:], 64, inverse)
        np.testing.assert_allclose(got, expected, rtol=0, atol=2**-20)


def test_rotation_leaves_its_argument_alone() -> None:
    x = torch.randn(2, 8)
    original = x.clone()
    apply_rope(x, cos_sin_cache(TINY, 2))

    assert torch.equal(x, original)


def test_the_tables_equal_those_of_transformers_bit_for_bit() -> None:
    transformers = pytest.importorskip("transformers")
    modeling = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
    config = transformers.DeepseekV4Config(
        compress_ratios=[0, 0, *[4, 128] * 20, 4],
        rope_parameters={
            "rope_type": "yarn",
            "factor": 16.0,
            "original_max_position_embeddings": 65536,
            "beta_fast": 32,
            "beta_slow": 1,
        },
    )
    theirs = modeling.DeepseekV4RotaryEmbedding(config)
    flash = ModelGeometry.from_config(config)
    positions = torch.arange(4096)[None]

    for kind, label in (("swa", "main"), ("c4a", "compress"), ("c128a", "compress")):
        rope = flash.layer_of_kind(kind).rope
        assert torch.equal(inverse_frequencies(rope), getattr(theirs, f"{label}_inv_freq"))
        cos, sin = theirs(torch.zeros(1), positions, layer_type=label)
        assert torch.equal(cos_sin_cache(rope, 4096), torch.cat([cos[0], sin[0]], dim=-1))


def test_rotation_of_the_trailing_dims_equals_that_of_transformers() -> None:
    pytest.importorskip("transformers")
    modeling = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
    x = torch.randn(1, 2, 6, 32, generator=torch.Generator().manual_seed(2))
    table = cos_sin_cache(TINY, 6)
    cos, sin = table[None].chunk(2, dim=-1)

    theirs = modeling.apply_rotary_pos_emb(x, cos, sin)
    ours = torch.cat([x[..., :-8], apply_rope(x[..., -8:], table)], dim=-1)

    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
    assert torch.equal(ours[..., :24], theirs[..., :24])

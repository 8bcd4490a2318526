"""The oracle's mathematics, judged by hand-computed rows, torch's primitives and the identities of attention."""

from __future__ import annotations

import ast
import math
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dsv4attn.testing.oracle import attention as oracle
from dsv4attn.testing.oracle import layer as oracle_layer
from tests.testing.arrays import quick, rng, same_bits

INF = math.inf
FLASH_YARN = oracle.Yarn(factor=16, original_max_position=65536, beta_fast=32, beta_slow=1)


@pytest.mark.parametrize(
    ("module", "ours"), [(oracle, set[str]()), (oracle_layer, {"dsv4attn.testing.oracle.attention"})]
)
def test_the_oracle_imports_only_numpy_attrs_and_the_standard_library(module: ModuleType, ours: set[str]) -> None:
    tree = ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8"))
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}

    assert {name for name in names if name.startswith("dsv4attn")} == ours
    assert {name.split(".")[0] for name in names - ours} <= {"attrs", "numpy"} | set(sys.stdlib_module_names)


def test_flash_yarn_blends_between_pairs_15_and_25() -> None:
    assert oracle.yarn_bounds(64, 160000.0, FLASH_YARN) == (15, 25)

    plain, blended = oracle.rope_inv_freq(64, 160000.0, None), oracle.rope_inv_freq(64, 160000.0, FLASH_YARN)
    assert blended.dtype == np.float32
    np.testing.assert_array_equal(blended[:16], plain[:16])
    np.testing.assert_array_equal(blended[25:], plain[25:] / 16)
    assert (blended[16:25] < plain[16:25]).all()
    assert (blended[16:25] > plain[16:25] / 16).all()


def test_yarn_bounds_are_kept_inside_the_head_and_may_coincide() -> None:
    assert oracle.yarn_bounds(8, 10000.0, oracle.Yarn(4, 100, 1000, 1e-9)) == (0, 7)

    low, high = oracle.yarn_bounds(8, 10000.0, oracle.Yarn(4, 1_000_000, 1e6, 1e6))
    assert (low, high) == (0, 0)
    plain = oracle.rope_inv_freq(8, 10000.0, None)
    one_step = oracle.rope_inv_freq(8, 10000.0, oracle.Yarn(4, 1_000_000, 1e6, 1e6))
    np.testing.assert_array_equal(one_step, plain / [1, 4, 4, 4])


# the float32 bits of HF's two DeepSeek-V4 tables
MAIN_BITS = """
    3f800000 3f3ff911 3f0ff59a 3ed7e89b 3ea1e89b 3e72d423 3e361887 3e088d77
    3dcccccd 3d99940d 3d6655c2 3d2cba15 3d0186e3 3cc2434f 3c91ad39 3c5a7bf2
    3c23d70a 3bf5b9b0 3bb8449c 3b8a2e77 3b4f3e38 3b1b690d 3ae91528 3aaec98e
    3a83126f 3a44948c 3a136a16 39dd1725 39a5cb60 3978a815 393a7753 390bd472
"""
COMPRESS_BITS = """
    3f800000 3f300a3a 3ef21c1f 3ea67d01 3e64f92e 3e1d7475 3dd88cb4 3d94e963
    3d4ccccd 3d0cd4fb 3cc1b019 3c8530ce 3c372dbf 3bfbed88 3bad3d5e 3b6e4237
    3b147ae1 3ab714e0 3a5ebdb6 3a0530ce 399bb3af 39305978 38be904d 383e9b5f
    37a3d70c 36b443d0 3677eba6 362a7be8 35ea77ff 35a13bdc 355dbf30 35187c4d
"""


@pytest.mark.parametrize(
    ("theta", "yarn", "expected"), [(10000.0, None, MAIN_BITS), (160000.0, FLASH_YARN, COMPRESS_BITS)]
)
def test_frequencies_have_the_bits_of_hf(theta: float, yarn: oracle.Yarn | None, expected: str) -> None:
    result = oracle.rope_inv_freq(64, theta, yarn)

    assert [f"{bits:08x}" for bits in result.view(np.uint32)] == expected.split()


def test_angles_are_rounded_to_float32_before_the_cosine() -> None:
    inv_freq = oracle.rope_inv_freq(64, 10000.0, None)
    cos, sin = oracle.rope_cos_sin(1_000_003, inv_freq)
    angles = [float((torch.tensor(1_000_003.0) * float(f)).float()) for f in inv_freq]

    np.testing.assert_allclose(cos, [math.cos(a) for a in angles], atol=1e-15)
    np.testing.assert_allclose(sin, [math.sin(a) for a in angles], atol=1e-15)
    assert np.abs(cos - np.cos(1_000_003 * inv_freq.astype(np.float64))).max() > 1e-3


def test_a_quarter_turn_moves_neighbours_of_the_tail_and_nothing_else() -> None:
    quarter = (np.array([0.0, 1.0]), np.array([1.0, 0.0]))
    row = np.array([9.0, 8.0, 1.0, 2.0, 3.0, 4.0])

    assert oracle.apply_rope(row, *quarter, rope_dim=4).tolist() == [9, 8, -2, 1, 3, 4]
    assert oracle.apply_rope(row, *quarter, rope_dim=4, inverse=True).tolist() == [9, 8, 2, -1, 3, 4]
    assert row.tolist() == [9, 8, 1, 2, 3, 4]


def test_rope_is_a_complex_product_and_its_inverse_undoes_it() -> None:
    inv_freq = oracle.rope_inv_freq(8, 10000.0, None)
    cos, sin = oracle.rope_cos_sin(77, inv_freq)
    rows = rng().standard_normal((3, 20))
    pairs = torch.view_as_complex(torch.from_numpy(rows[:, 12:]).reshape(3, 4, 2).contiguous())
    turned = torch.view_as_real(pairs * torch.complex(torch.from_numpy(cos), torch.from_numpy(sin))).reshape(3, 8)

    out = oracle.apply_rope(rows, cos, sin, 8)
    np.testing.assert_allclose(out[:, 12:], turned.numpy(), atol=1e-14)
    assert same_bits(out[:, :12], rows[:, :12])
    np.testing.assert_allclose(oracle.apply_rope(out, cos, sin, 8, inverse=True), rows, atol=1e-14)


def test_q_norm_equals_the_rms_norm_of_torch_and_survives_a_zero_head() -> None:
    q = rng().standard_normal((3, 16))
    q[2] = 0
    cos, sin = oracle.rope_cos_sin(5, oracle.rope_inv_freq(4, 10000.0, None))
    normed = torch.nn.functional.rms_norm(torch.from_numpy(q), (16,), eps=0.5).numpy()

    out = oracle.q_norm_rope(q, cos, sin, 4, 0.5)
    np.testing.assert_allclose(oracle.apply_rope(out, cos, sin, 4, inverse=True), normed, atol=1e-14)
    assert not out[2].any()


@pytest.mark.parametrize(
    ("position", "ratio", "first", "entries"),
    [
        (1000, 4, 873, 250),
        (1511, 4, 1384, 378),
        (1509, 4, 1382, 377),
        (1510, 4, 1383, 377),
        (1509, 128, 1382, 11),
        (1511, 128, 1384, 11),
        (0, 4, 0, 0),
        (2, 4, 0, 0),
        (3, 4, 0, 1),
        (126, 128, 0, 0),
        (127, 128, 0, 1),
        (128, None, 1, 0),
        (1511, None, 1384, 0),
        (5, 1, 0, 6),
        (200, 1, 73, 201),
        (200, 2, 73, 100),
    ],
)
def test_visible_keys_of_the_worked_examples(position: int, ratio: int | None, first: int, entries: int) -> None:
    window, compressed = oracle.visible_keys(position, 128, ratio, None)

    assert window == list(range(first, position + 1))
    assert len(window) == min(position + 1, 128)
    assert compressed == list(range(entries))


@quick
@given(position=st.integers(0, 600), ratio=st.sampled_from([1, 2, 4, 16, 128]))
def test_an_entry_is_visible_once_its_last_token_is(position: int, ratio: int) -> None:
    complete = [e for e in range(position + 2) if max(range(e * ratio, e * ratio + ratio)) <= position]

    assert oracle.visible_keys(position, 8, ratio, None)[1] == complete


def test_a_selection_keeps_its_order_and_loses_what_is_not_visible() -> None:
    assert oracle.visible_keys(20, 8, 4, [4, -1, 0, 5, 2, 4]) == (list(range(13, 21)), [4, 0, 2, 4])
    assert oracle.visible_keys(20, 8, 4, []) == (list(range(13, 21)), [])
    assert oracle.visible_keys(20, 8, None, [0, 1])[1] == []
    assert oracle.visible_keys(20, 8, 1, [0, 1, 20, 21])[1] == [0, 1, 20]


def problem(keys: int, heads: int = 3, dim: int = 10) -> tuple[oracle.F64, oracle.F64, oracle.F64]:
    """Return random q [H, D], keys [K, D] and sink [H]."""
    return rng(1).standard_normal((heads, dim)), rng(2).standard_normal((keys, dim)), rng(3).standard_normal(heads)


def test_attention_of_a_hand_computed_row() -> None:
    keys = np.array([[1.0, 0.0], [0.0, 1.0]])
    q = np.array([[2 * math.log(3.0), 0.0], [0.0, 0.0]])  # logits ln 3 and 0, then 0 and 0

    out, lse = oracle.attend_row(q, keys, None, 0.5)
    np.testing.assert_allclose(out, [[0.75, 0.25], [0.5, 0.5]], rtol=1e-15)
    np.testing.assert_allclose(lse, [math.log(4), math.log(2)], rtol=1e-15)
    with_sink, same_lse = oracle.attend_row(q, keys, np.log([4.0, 6.0]), 0.5)
    np.testing.assert_allclose(with_sink, [[0.375, 0.125], [0.125, 0.125]], rtol=1e-15)
    assert same_bits(same_lse, lse)


def test_attention_equals_torch_with_the_sink_as_one_more_logit() -> None:
    q, keys, sink = problem(17)
    logits = torch.from_numpy(q) @ torch.from_numpy(keys).T * 0.3
    weights = torch.softmax(torch.cat([logits, torch.from_numpy(sink)[:, None]], dim=1), dim=1)

    out, lse = oracle.attend_row(q, keys, sink, 0.3)
    np.testing.assert_allclose(out, (weights[:, :-1] @ torch.from_numpy(keys)).numpy(), rtol=1e-12)
    np.testing.assert_allclose(lse, torch.logsumexp(logits, dim=1).numpy(), rtol=1e-12)


def test_the_order_of_keys_does_not_matter() -> None:
    q, keys, sink = problem(9)

    np.testing.assert_allclose(
        oracle.attend_row(q, keys[::-1], sink, 0.3)[0], oracle.attend_row(q, keys, sink, 0.3)[0], rtol=1e-12
    )


def test_sink_identities() -> None:
    q, keys, sink = problem(7)
    plain, lse = oracle.attend_row(q, keys, None, 0.3)

    assert same_bits(oracle.attend_row(q, keys, np.full(3, -INF), 0.3)[0], plain)
    assert same_bits(oracle.attend_row(q, keys, np.full(3, INF), 0.3)[0], np.zeros((3, 10)))
    shifted = torch.from_numpy(plain) * torch.sigmoid(torch.from_numpy(lse - sink))[:, None]
    np.testing.assert_allclose(oracle.attend_row(q, keys, sink, 0.3)[0], shifted.numpy(), rtol=1e-12)
    assert same_bits(oracle.apply_sink(plain, lse, sink), oracle.attend_row(q, keys, sink, 0.3)[0])
    assert same_bits(oracle.apply_sink(plain, lse, None), plain)


@pytest.mark.parametrize("sink", [None, 0.0, INF, -INF])
def test_a_row_without_keys_is_zero(sink: float | None) -> None:
    q, keys, _ = problem(0)

    out, lse = oracle.attend_row(q, keys, None if sink is None else np.full(3, sink), 0.3)
    assert same_bits(out, np.zeros((3, 10)))
    assert lse.tolist() == [-INF] * 3


@pytest.mark.parametrize("size", [1e4, 1e150])
def test_huge_logits_and_huge_sinks_stay_finite(size: float) -> None:
    q, keys = np.array([[size, 0.0], [-size, 0.0]]), np.array([[1.0, 5.0], [-1.0, 7.0]])

    out, lse = oracle.attend_row(q, keys, None, 1.0)
    assert out.tolist() == [[1, 5], [-1, 7]]
    assert lse.tolist() == [size, size]
    assert oracle.attend_row(q, keys, np.array([1e300, -1e300]), 1.0)[0].tolist() == [[0, 0], [-1, 7]]
    np.testing.assert_allclose(oracle.attend_row(q, keys, lse, 1.0)[0], out / 2, rtol=1e-12)


def test_projection_equals_a_block_diagonal_matrix() -> None:
    heads, dim, rope_dim, groups, rank = 6, 8, 4, 3, 5
    o, wo_a = rng(4).standard_normal((heads, dim)), rng(5).standard_normal((groups, rank, heads // groups * dim))
    wo_b = rng(6).standard_normal((7, groups * rank))
    cos, sin = oracle.rope_cos_sin(12, oracle.rope_inv_freq(rope_dim, 10000.0, None))
    turned = torch.from_numpy(oracle.apply_rope(o, cos, -sin, rope_dim)).reshape(-1)
    blocks = torch.zeros(groups, rank, groups, wo_a.shape[2], dtype=torch.float64)
    for g in range(groups):
        blocks[g, :, g] = torch.from_numpy(wo_a[g])
    z = blocks.reshape(groups * rank, -1) @ turned

    result = oracle.inverse_rope_project(o, cos, sin, rope_dim, wo_a, None)
    assert result.shape == (groups, rank)
    np.testing.assert_allclose(result.reshape(-1), z.numpy(), rtol=1e-10)
    y = oracle.inverse_rope_project(o, cos, sin, rope_dim, wo_a, wo_b)
    np.testing.assert_allclose(y, (torch.from_numpy(wo_b) @ z).numpy(), rtol=1e-10)


def test_the_whole_row_depends_on_distances_only() -> None:
    rope_dim, dim, heads = 8, 20, 2
    inv_freq = np.exp2(-np.arange(4)).astype(np.float32)  # exact float32 angles, so that only the rule counts
    q, latents, sink = rng(7).standard_normal((heads, dim)), rng(8).standard_normal((5, dim)), rng(9).standard_normal(2)
    wo_a = rng(10).standard_normal((1, 3, heads * dim))

    def row(offset: int) -> oracle.F64:
        keys = [
            oracle.apply_rope(x, *oracle.rope_cos_sin(offset + i, inv_freq), rope_dim) for i, x in enumerate(latents)
        ]
        cos, sin = oracle.rope_cos_sin(offset + 4, inv_freq)
        turned = oracle.q_norm_rope(q, cos, sin, rope_dim, 1e-6)
        out, _ = oracle.attend_row(turned, np.stack(keys), sink, dim**-0.5)
        return oracle.inverse_rope_project(out, cos, sin, rope_dim, wo_a, None)

    np.testing.assert_allclose(row(1000), row(0), atol=1e-10)

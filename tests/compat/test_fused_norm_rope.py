"""The fused attention of V4.1 as FlashMLA defines it, against its formula in float64, and orders of its weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dsv4attn.compat import fused_norm_rope_attn_rope_cast as fused
from dsv4attn.errors import ArgumentError
from dsv4attn.testing import oracle
from tests.compat.flash_mla_calls import random
from tests.compat.test_flash_mla_v41 import packed

T, H, GROUPS, TOPK = 6, 16, 2, 9
INT = torch.int32
SWITCHES: dict[str, Any] = {
    "is_rope_neox_style": False, "rope_dim": 64, "num_per_channels": 32, "use_tma_aligned_col_major_sf": True,
    "round_sf": True, "use_packed_ue8m0": True,
}  # fmt: skip


def table(positions: int = 40) -> Tensor:
    angles = torch.arange(positions)[:, None] * 10000.0 ** -(torch.arange(32) / 32)
    return torch.cat([angles.cos(), angles.sin()], 1).float()


def common(**changes: Any) -> dict[str, Any]:
    """Arguments of both functions. q is in the order of permuted weights."""
    arguments = {
        "enable_q_norm": False, "rms_norm_eps": 0.25, "token_positions": torch.tensor([0, 39, 5, 7, 31, 2], dtype=INT),
        "cos_sin_cache": table(), "n_wv_group": GROUPS, **SWITCHES, "q": random(T, H, 512), "sm_scale": 512**-0.5,
        "attn_sink": torch.linspace(-1, 3, H).masked_fill(torch.arange(H) == 5, torch.inf),
        "topk_length": torch.tensor([9, 0, 4, 9, 1, 9], dtype=INT),
    }  # fmt: skip
    return {**arguments, **changes}


def plain(q: Tensor) -> Any:
    """[T, H, 512] in float64 of q in the order of permuted weights, dim by dim."""
    h, d = np.indices((H, 512))
    return q.double().flatten(1).numpy()[:, d // 16 * H * 16 + h * 16 + d % 16]


def formula(arguments: dict[str, Any], keys_of: list[Any]) -> tuple[Any, Any, Any]:
    """(o rotated back [T, H, 512], largest logit, lse), by the formula. keys_of: [n, 512] of each query."""
    q, out, top, lse = plain(arguments["q"]), np.zeros((T, H, 512)), np.full((T, H), -np.inf), np.full((T, H), np.inf)
    norm = 1 / np.sqrt((q**2).mean(-1) + arguments["rms_norm_eps"]) if arguments["enable_q_norm"] else np.ones((T, H))
    for t, keys in enumerate(keys_of):
        cos, sin = np.split(arguments["cos_sin_cache"][int(arguments["token_positions"][t])].double().numpy(), 2)
        turned = oracle.round_bf16(turn(q[t], cos, sin))
        if not len(keys):
            continue
        logits = arguments["sm_scale"] * norm[t][:, None] * (turned @ keys.T)
        top[t], sink = logits.max(1), arguments["attn_sink"].double().numpy()
        weights = np.exp(logits - top[t][:, None])
        lse[t] = top[t] + np.log(weights.sum(1))
        with np.errstate(over="ignore"):
            total = weights.sum(1) + np.exp(sink - top[t])
        out[t] = turn((weights / total[:, None]) @ keys, cos, -sin)
    return out, top, lse


def turn(x: Any, cos: Any, sin: Any) -> Any:
    """Rows with their last 64 dims rotated, pair by pair."""
    even, odd, turned = x[..., 448::2], x[..., 449::2], x.copy()
    turned[..., 448::2], turned[..., 449::2] = even * cos - odd * sin, odd * cos + even * sin
    return turned


def decoded(codes: Tensor, scales: Tensor) -> Any:
    """[T, H, 512] in float64 of codes and packed exponents, dim by dim."""
    h, d = np.indices((H, 512))
    group, chunk = h // 8, d // 32 * 8 + h % 8
    byte = (scales.numpy().astype(np.int64)[:, group, chunk // 4] >> 8 * (chunk % 4)) & 255
    return codes.double().numpy()[:, group, chunk * 32 + d % 32] * 2.0 ** (byte - 127)


def check(actual: tuple[Tensor, ...], want: tuple[Any, Any, Any]) -> None:
    """Codes are next to their values, scales the least powers of two that hold them."""
    codes, scales, *_, lse = actual
    out = want[0]
    assert (codes.shape, codes.dtype) == ((T, GROUPS, 8 * 512), torch.float8_e4m3fn)
    assert (scales.shape, scales.dtype) == ((T, GROUPS, 32), INT)
    assert scales.stride() == (1, 8 * 32, 8)
    amax = np.abs(out.reshape(T, H, 16, 32)).max(-1)
    error = np.abs(decoded(codes, scales) - out).reshape(T, H, 16, 32).max(-1)
    assert (error <= 2.0**-4 * amax + 1e-9).all()
    finite = np.isfinite(want[2])
    assert np.array_equal(np.isinf(lse.numpy()), ~finite)
    assert np.abs(lse.double().numpy()[finite] - want[2][finite]).max() < 1e-4


def rows_of(matrix: Any, indices: Tensor, lens: Tensor, slots: int) -> list[Any]:
    named = zip(indices.tolist(), lens.tolist(), strict=True)
    return [matrix[[i for i in row[:n] if 0 <= i < slots]] for row, n in named]


@pytest.mark.parametrize("normed", [False, True])
def test_prefill_is_the_formula(normed: bool) -> None:
    kv, g = random(12, 1, 512, seed=1), torch.Generator().manual_seed(2)
    indices = torch.randint(-2, 15, (T, 1, TOPK), generator=g).int()
    arguments = common(kv=kv, indices=indices, enable_q_norm=normed)
    expected = formula(arguments, rows_of(kv[:, 0].double().numpy(), indices[:, 0], arguments["topk_length"], 12))
    actual = fused.prefill(**arguments)
    check(actual, expected)
    has_keys = np.isfinite(expected[1])
    assert np.array_equal(np.isneginf(actual[2].numpy()), ~has_keys)
    assert np.abs(actual[2].double().numpy()[has_keys] - expected[1][has_keys]).max() < 1e-4


@pytest.mark.parametrize("split", [False, True], ids=["interleaved", "legacy"])
@pytest.mark.parametrize("extra", [None, 528, 288])
def test_decode_is_the_formula(extra: int | None, split: bool) -> None:
    cache, keys = packed(528, 4, 5, split=split)
    indices = (torch.arange(T * TOPK).view(T, TOPK) * 14 % 20).int().masked_fill_(random(T, TOPK) < -1, -1)
    arguments = common(k_cache=cache, indices_in_kvcache=indices, use_legacy=split)
    named = rows_of(keys, indices, arguments["topk_length"], 20)
    if extra is not None:
        cache, keys = packed(extra, 8, 3, split=split)
        indices, lens = torch.where(indices < 0, indices, indices + 4), torch.tensor([3, 9, 0, 1, 2, 5], dtype=INT)
        arguments |= {"extra_k_cache": cache, "extra_indices_in_kvcache": indices, "extra_topk_length": lens}
        named = [np.concatenate(both) for both in zip(named, rows_of(keys, indices, lens, 24), strict=True)]
    check(fused.decode(**arguments), formula(arguments, named))


def test_a_q_that_is_not_permuted_is_found() -> None:
    kv, indices = random(12, 1, 512, seed=1), torch.arange(T * TOPK).view(T, 1, TOPK).int() % 12
    arguments = common(kv=kv, indices=indices)
    expected = formula(arguments, rows_of(kv[:, 0].double().numpy(), indices[:, 0], arguments["topk_length"], 12))
    other = torch.from_numpy(plain(arguments["q"])).bfloat16().contiguous()
    with pytest.raises(AssertionError):
        check(fused.prefill(**{**arguments, "q": other}), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_weights_of_q_are_moved_by_rows(dtype: torch.dtype) -> None:
    weight, scales = random(H * 512, 6).to(dtype), torch.arange(H * 512 * 2, dtype=INT).view(2, -1).T
    permuted, moved = fused.permute_q_b_proj((weight, scales), H, 512)
    assert moved.stride() == scales.stride()
    for h, d in ((0, 0), (3, 17), (15, 511), (7, 16)):
        row = d // 16 * H * 16 + h * 16 + d % 16
        assert torch.equal(permuted[row].float(), weight[h * 512 + d].float())
        assert torch.equal(moved[row], scales[h * 512 + d])
    x = random(3, 6)
    if dtype == torch.bfloat16:
        assert torch.equal((x @ permuted.T).view(3, 32, H, 16).transpose(1, 2).reshape(3, -1), x @ weight.T)


def test_weights_of_the_output_are_moved_by_columns_and_their_scales_by_bytes() -> None:
    weight = random(GROUPS, 5, 8 * 512).to(torch.float8_e4m3fn)
    exponents = torch.randint(0, 256, (GROUPS, 5, 128), generator=torch.Generator().manual_seed(0))
    scales = exponents.to(torch.uint8).view(torch.int32).transpose(1, 2).contiguous().transpose(1, 2)
    permuted, moved = fused.permute_wv_proj((weight, scales), 8, 512)
    assert moved.stride() == scales.stride()
    bytes_of = moved.contiguous().view(torch.uint8)
    for h, d in ((0, 0), (3, 33), (7, 511), (5, 32)):
        column = d // 32 * 8 * 32 + h * 32 + d % 32
        assert torch.equal(permuted[..., column].float(), weight[..., h * 512 + d].float())
        assert torch.equal(bytes_of[..., column // 32], exponents[..., (h * 512 + d) // 32].to(torch.uint8))


BAD: list[tuple[str, dict[str, Any]]] = [
    ("is_rope_neox_style", {"is_rope_neox_style": True}),
    ("rope_dim", {"rope_dim": 32}),
    ("num_per_channels", {"num_per_channels": 128}),
    ("round_sf", {"round_sf": False}),
    ("n_wv_group", {"n_wv_group": 4}),
    ("q", {"q": random(T, H, 512).float()}),
    ("token_positions", {"token_positions": torch.zeros(T, dtype=torch.int64)}),
    ("token_positions", {"token_positions": torch.zeros(T - 1, dtype=INT)}),
    ("cos_sin_cache", {"cos_sin_cache": table()[:, :32]}),
    ("indices", {"indices": torch.zeros(T, TOPK, dtype=INT)}),
]


@pytest.mark.parametrize(("name", "changes"), BAD)
def test_what_does_not_fit_is_refused_by_name(name: str, changes: dict[str, Any]) -> None:
    good = common(kv=random(12, 1, 512), indices=torch.zeros(T, 1, TOPK, dtype=INT))
    with pytest.raises(ArgumentError) as error:
        fused.prefill(**{**good, **changes})
    assert error.value.argument == name


def test_records_of_v4_and_widths_that_are_no_chunks_are_refused() -> None:
    indices = torch.zeros(T, TOPK, dtype=INT)
    with pytest.raises(ArgumentError, match=r"^k_cache: expected records of 528 bytes"):
        fused.decode(**common(k_cache=torch.zeros(5, 4, 1, 584, dtype=torch.uint8), indices_in_kvcache=indices))
    with pytest.raises(ArgumentError, match=r"^d_q: expected a multiple of 16"):
        fused.permute_q_b_proj((torch.zeros(40, 6), torch.zeros(40, 1, dtype=INT)), 2, 20)
    with pytest.raises(ArgumentError, match=r"^wv_sf: expected"):
        fused.permute_wv_proj((torch.zeros(1, 5, 4096), torch.zeros(1, 5, 31, dtype=INT)), 8, 512)

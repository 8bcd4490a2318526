"""FlashMLA's interface: signatures, shapes of results, and refused arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from attrs import evolve

from dsv4attn.compat import direct, flash_mla
from dsv4attn.compat.flash_mla import (
    flash_mla_sparse_fwd,
    flash_mla_with_kvcache,
    get_mla_decoding_metadata,
    get_mla_metadata,
)
from dsv4attn.errors import ArgumentError, UnsupportedError
from dsv4attn.selection import load_backend
from tests.compat.flash_mla_calls import S_Q, TOPK, B, H, cache_of, decode_args, prefill_args, random

INT = torch.int32

DECODE_PARAMETERS = {
    **dict.fromkeys(["q", "k_cache", "block_table", "cache_seqlens", "head_dim_v", "tile_scheduler_metadata"], ...),
    "num_splits": None,
    "softmax_scale": None,
    "causal": False,
    "is_fp8_kvcache": None,
    "indices": None,
    **dict.fromkeys(["attn_sink", "extra_k_cache", "extra_indices_in_kvcache", "topk_length", "extra_topk_length"]),
    "enable_batch_invariant": False,
    "use_legacy": False,
    **dict.fromkeys(["kv_format", "descale_q", "descale_k"]),
}
PREFILL_PARAMETERS = {
    **dict.fromkeys(["q", "kv", "indices", "sm_scale"], ...),
    "d_v": 512,
    "attn_sink": None,
    "topk_length": None,
    "use_legacy": False,
    "return_log2_lse": None,
}
PLAN_PARAMETERS = {
    **dict.fromkeys(["seqlens_k", "num_q_tokens_per_head_k", "h_k"], ...),
    "h_q": None,
    "is_fp8_kvcache": False,
    "topk": None,
    "use_legacy": False,
}


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (flash_mla_with_kvcache, DECODE_PARAMETERS),
        (flash_mla_sparse_fwd, PREFILL_PARAMETERS),
        (get_mla_decoding_metadata, PLAN_PARAMETERS),
    ],
    ids=["decode", "prefill", "plan"],
)
def test_positional_parameters_are_flash_mlas_and_those_of_others_are_by_name(
    function: Callable[..., object], expected: dict[str, object]
) -> None:
    parameters = inspect.signature(function).parameters.values()
    positional = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]

    assert {p.name: ... if p.default is p.empty else p.default for p in positional} == expected
    assert [p.name for p in positional] == [*expected]
    assert {p.kind for p in parameters if p not in positional} <= {inspect.Parameter.KEYWORD_ONLY}


def test_results_have_flash_mlas_shapes_and_strides() -> None:
    out, lse = flash_mla_with_kvcache(**decode_args())
    prefill_out, top, prefill_lse = flash_mla_sparse_fwd(**prefill_args())

    assert (out.shape, out.dtype) == ((B, S_Q, H, 512), torch.bfloat16)
    assert (lse.shape, lse.dtype, lse.stride()) == ((B, H, S_Q), torch.float32, (S_Q * H, 1, H))
    assert (prefill_out.shape, top.shape, prefill_lse.shape) == ((5, H, 512), (5, H), (5, H))
    assert all(t.is_contiguous() for t in (out, prefill_out, top, prefill_lse))
    assert bool((top <= prefill_lse).all())


def test_metadata_takes_any_arguments_and_is_bound_to_the_shapes_of_its_first_call() -> None:
    meta, second = get_mla_metadata(torch.zeros(3), 128, 1, num_heads_q=64)
    assert (second, meta.config, meta.have_initialized) == (None, None, False)
    flash_mla_with_kvcache(**decode_args(tile_scheduler_metadata=meta))
    flash_mla_with_kvcache(**decode_args(tile_scheduler_metadata=meta, k_cache=cache_of(blocks=9)))
    assert meta.have_initialized
    fewer = decode_args(tile_scheduler_metadata=meta, q=random(2, S_Q, H, 512))
    fewer["indices"] = fewer["indices"][:2]

    with pytest.raises(ArgumentError, match=r"tile_scheduler_metadata: .* b=3, got b=2 -> .*get_mla_metadata") as error:
        flash_mla_with_kvcache(**fewer)
    assert error.value.argument == "tile_scheduler_metadata"
    with pytest.raises(ArgumentError, match="page_block_size=4, got page_block_size=3"):
        flash_mla_with_kvcache(**decode_args(tile_scheduler_metadata=meta, k_cache=cache_of(3)))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_records_may_come_as_any_type_of_one_byte(dtype: torch.dtype) -> None:
    out, _ = flash_mla_with_kvcache(**decode_args())
    same, _ = flash_mla_with_kvcache(**decode_args(k_cache=cache_of().view(dtype)))

    assert torch.equal(out, same)


def test_a_second_cache_without_columns_is_no_second_cache() -> None:
    none = torch.zeros((B, S_Q, 0), dtype=torch.int32)
    out, lse = flash_mla_with_kvcache(**decode_args(extra_k_cache=cache_of(7), extra_indices_in_kvcache=none))
    same = flash_mla_with_kvcache(**decode_args())

    assert torch.equal(out, same[0])
    assert torch.equal(lse, same[1])


def test_the_default_scale_is_that_of_the_head_dim() -> None:
    out, lse = flash_mla_with_kvcache(**decode_args())
    same, same_lse = flash_mla_with_kvcache(**decode_args(softmax_scale=512**-0.5))
    _, other = flash_mla_with_kvcache(**decode_args(softmax_scale=0.5))

    assert torch.equal(out, same)
    assert torch.equal(lse, same_lse)
    assert not torch.allclose(lse, other)


def test_out_is_written_where_the_caller_says() -> None:
    expected, _ = flash_mla_with_kvcache(**decode_args())
    whole = torch.full((B + 1, S_Q + 1, H + 1, 512), torch.nan, dtype=torch.bfloat16)
    for view in (whole[:B, :S_Q, :H], torch.empty_like(expected)):
        out, _ = flash_mla_with_kvcache(**decode_args(out=view))
        assert out is view
        assert torch.equal(view, expected)
    assert bool(whole[B].isnan().all())
    into = torch.empty(5, H, 512, dtype=torch.bfloat16)
    assert flash_mla_sparse_fwd(**prefill_args(out=into))[0] is into
    assert torch.equal(into, flash_mla_sparse_fwd(**prefill_args())[0])


def test_nothing_to_do_is_done() -> None:
    empty = torch.zeros((0, S_Q, TOPK), dtype=torch.int32)
    out, lse = flash_mla_with_kvcache(**decode_args(q=random(0, S_Q, H, 512), indices=empty))
    assert (out.shape, lse.shape) == ((0, S_Q, H, 512), (0, H, S_Q))

    for name, none in (("kv", random(0, 1, 512)), ("indices", torch.full((5, 1, TOPK), -1, dtype=torch.int32))):
        out, top, lse = flash_mla_sparse_fwd(**prefill_args(**{name: none}))
        assert not out.any()
        assert bool((top == -torch.inf).all())
        assert bool((lse == torch.inf).all())
    out, top, lse = flash_mla_sparse_fwd(**prefill_args(q=random(0, H, 512), indices=empty[:, :1]))
    assert (out.shape, top.shape, lse.shape) == ((0, H, 512), (0, H), (0, H))


def test_largest_logits_do_not_depend_on_who_computes_them_or_on_tiles_and_can_be_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out, top, lse = flash_mla_sparse_fwd(**prefill_args())
    backend = load_backend("reference")
    monkeypatch.setattr(backend, "capabilities", evolve(backend.capabilities, max_logits=False))
    monkeypatch.setattr(direct, "_backend", lambda _: backend)
    direct.plan.cache_clear()
    all_results = flash_mla_sparse_fwd(**prefill_args())
    monkeypatch.setattr(direct, "TILE_BYTES", 2 * TOPK * (6 * 512 + 4 * H + 16))
    tiled = flash_mla_sparse_fwd(**prefill_args())
    direct.plan.cache_clear()

    torch.testing.assert_close(all_results[1], top, rtol=1e-6, atol=0)
    without = flash_mla_sparse_fwd(**prefill_args(need_max_logits=False))

    torch.testing.assert_close(tiled[1], top, rtol=1e-6, atol=0)
    assert without[1].shape == (0, H)
    assert torch.equal(without[0], out)
    assert torch.equal(without[2], lse)


def test_fp32_queries_give_fp32_results() -> None:
    exact = {"q": random(B, S_Q, H, 512, dtype=torch.float32)}
    out, _ = flash_mla_with_kvcache(**decode_args(**exact))

    assert out.dtype is torch.float32
    torch.testing.assert_close(out, flash_mla_with_kvcache(**decode_args())[0].float(), rtol=0.05, atol=0.01)


DENSE = ("flash_attn_varlen_func", "flash_attn_varlen_kvpacked_func", "flash_attn_varlen_qkvpacked_func")
UNSUPPORTED: list[tuple[str, dict[str, Any]]] = [
    ("indices", {"indices": None}),
    ("is_fp8_kvcache", {"is_fp8_kvcache": False}),
    ("q", {"q": random(B, S_Q, H, 576)}),
    ("k_cache", {"k_cache": torch.zeros(2, 64, 1, 656, dtype=torch.uint8)}),
    ("extra_k_cache", {"extra_k_cache": torch.zeros(2, 64, 1, 656, dtype=torch.uint8)}),
    ("kv_format", {"kv_format": "V32_NO_ROPE"}),
    ("kv_format", {"kv_format": "V41_FP4"}),
    ("descale_q", {"descale_q": torch.ones(1)}),
    ("descale_k", {"descale_k": torch.ones(1)}),
]


@pytest.mark.parametrize(("name", "changes"), UNSUPPORTED)
def test_what_is_not_served_is_refused_by_name_with_a_way_out(name: str, changes: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match=r"expected sparse attention of DeepSeek-V4, got .* -> ") as error:
        flash_mla_with_kvcache(**decode_args(**changes))
    assert error.value.argument == name


def test_dense_functions_exist_and_refuse() -> None:
    with pytest.raises(UnsupportedError, match=r"^topk: .*dense attention"):
        get_mla_decoding_metadata(torch.zeros(3, dtype=INT), 64, 1, 64, is_fp8_kvcache=True)
    with pytest.raises(UnsupportedError, match=r"^is_fp8_kvcache: "):
        get_mla_decoding_metadata(torch.zeros(3, dtype=INT), 64, 1, 64, topk=TOPK)
    for name in DENSE:
        with pytest.raises(UnsupportedError, match=name):
            getattr(flash_mla, name)(1, causal=True)
    with pytest.raises(UnsupportedError, match=r"^q: .*576"):
        flash_mla_sparse_fwd(**prefill_args(q=random(5, H, 576)))


BAD_DECODE: list[tuple[str, dict[str, Any]]] = [
    ("q", {"q": random(B, H, 512)}),
    ("q", {"q": random(B, S_Q, H, 512, dtype=torch.float16)}),
    ("q", {"q": random(B, S_Q, 0, 512)}),
    ("q", {"q": random(B, S_Q, 512, H).mT}),
    ("q", {"q": [1.0]}),
    ("k_cache", {"k_cache": cache_of().float()}),
    ("k_cache", {"k_cache": cache_of()[:, :, 0]}),
    ("k_cache", {"k_cache": cache_of().expand(6, 4, 2, 584)}),
    ("k_cache", {"k_cache": torch.zeros(6, 4, 1, 600, dtype=torch.uint8)[..., :584]}),
    ("k_cache", {"k_cache": torch.zeros(6, 0, 1, 584, dtype=torch.uint8)}),
    ("k_cache", {"k_cache": None}),
    ("head_dim_v", {"head_dim_v": 448}),
    ("tile_scheduler_metadata", {"tile_scheduler_metadata": torch.zeros(3, 8, dtype=INT)}),
    ("num_splits", {"num_splits": torch.zeros(4, dtype=INT)}),
    ("causal", {"causal": True}),
    ("enable_batch_invariant", {"enable_batch_invariant": torch.zeros(B, S_Q, H, 512)}),
    ("enable_batch_invariant", {"enable_batch_invariant": None}),
    ("use_legacy", {"use_legacy": "yes"}),
    ("kv_format", {"kv_format": "v4"}),
    ("tile_scheduler_metadata", {"tile_scheduler_metadata": None}),
    ("indices", {"indices": torch.zeros(B, S_Q, TOPK, dtype=torch.int64)}),
    ("indices", {"indices": torch.zeros(B, S_Q + 1, TOPK, dtype=INT)}),
    ("indices", {"indices": torch.zeros(B, S_Q, 0, dtype=INT)}),
    ("indices", {"indices": torch.zeros(B, TOPK, S_Q, dtype=INT).mT}),
    ("attn_sink", {"attn_sink": torch.zeros(H + 1)}),
    ("attn_sink", {"attn_sink": torch.zeros(H, dtype=torch.bfloat16)}),
    ("topk_length", {"topk_length": torch.zeros(B, S_Q, dtype=INT)}),
    ("topk_length", {"topk_length": torch.zeros(B * S_Q, dtype=INT)}),
    ("topk_length", {"topk_length": torch.tensor([1, -1, 2], dtype=INT)}),
    ("topk_length", {"topk_length": torch.tensor([1, TOPK + 1, 2], dtype=INT)}),
    ("extra_k_cache", {"extra_indices_in_kvcache": torch.zeros(B, S_Q, TOPK, dtype=INT)}),
    ("extra_k_cache", {"extra_topk_length": torch.zeros(B, dtype=INT)}),
    ("extra_indices_in_kvcache", {"extra_k_cache": cache_of()}),
    ("out", {"out": torch.zeros(B, S_Q, H, 512)}),
    ("out", {"out": torch.zeros(B * S_Q, H, 512, dtype=torch.bfloat16)}),
]
BAD_PREFILL: list[tuple[str, dict[str, Any]]] = [
    ("q", {"q": random(1, 5, H, 512)}),
    ("kv", {"kv": random(12, 512)}),
    ("kv", {"kv": random(12, 2, 512)}),
    ("kv", {"kv": random(12, 1, 512, dtype=torch.float32)}),
    ("indices", {"indices": torch.zeros(5, TOPK, dtype=INT)}),
    ("indices", {"indices": torch.zeros(4, 1, TOPK, dtype=INT)}),
    ("d_v", {"d_v": 576}),
    ("use_legacy", {"use_legacy": torch.zeros(5, H, 512)}),
    ("return_log2_lse", {"return_log2_lse": 2}),
    ("topk_length", {"topk_length": torch.zeros(4, dtype=INT)}),
    ("attn_sink", {"attn_sink": torch.zeros(1, H)}),
]


@pytest.mark.parametrize(
    ("function", "good", "name", "changes"),
    [(flash_mla_with_kvcache, decode_args, *bad) for bad in BAD_DECODE]
    + [(flash_mla_sparse_fwd, prefill_args, *bad) for bad in BAD_PREFILL],
)
def test_a_bad_argument_is_named(
    function: Callable[..., object], good: Callable[..., dict[str, Any]], name: str, changes: dict[str, Any]
) -> None:
    with pytest.raises(ArgumentError, match=r"expected .*, got ") as error:
        function(**good(**changes))
    assert error.value.argument == name
    assert not isinstance(error.value, UnsupportedError)

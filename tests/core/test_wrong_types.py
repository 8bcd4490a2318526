"""Arguments of another type than declared are refused by name and with a cure, not by an error of Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch

import dsv4attn as ds
from dsv4attn.core.attention.forward_mqa import forward_mqa
from dsv4attn.core.cache.layer_caches import LayerCaches
from dsv4attn.core.cache.layout import PagedKVCache
from dsv4attn.core.contract.limits import Limits
from dsv4attn.core.model.weights import AttentionWeights
from dsv4attn.errors import ArgumentError
from tests.core.test_bad_input import refused
from tests.harness import LAYOUT, LIMITS, SMALL, SWA, bound_layer, forward_args, metadata_of, random_weights

PARTS: list[tuple[str, Any, str]] = [
    ("workspace", None, "a WorkspaceManager, got None -> pass a WorkspaceManager"),
    ("workspace", torch.zeros(9), "a WorkspaceManager, got Tensor -> "),
    ("backend", "reference", r"a backend, got 'reference' -> pass what load_backend\(name\)"),
    ("backend", None, "a backend, got None -> "),
    ("layer", SMALL, "a LayerGeometry, got ModelGeometry -> pass geometry.layer"),
    ("limits", None, "a Limits, got None -> pass the Limits"),
]


@pytest.mark.parametrize("warm_up", [False, True])
@pytest.mark.parametrize(("argument", "value", "said"), PARTS)
def test_a_call_refuses_them_before_any_write(argument: str, value: object, said: str, warm_up: bool) -> None:
    changes = {argument: value, "metadata": None if warm_up else metadata_of(SWA)}

    refused(SWA, ArgumentError, f"^{argument}: expected {said}", **changes)


@pytest.mark.parametrize(("argument", "value", "said"), PARTS)
def test_a_call_refuses_them_after_steps_that_are_known(argument: str, value: object, said: str) -> None:
    arguments = {**forward_args(SWA), "metadata": metadata_of(SWA, [1, 1], [9, 9])}
    for _ in range(2):
        forward_mqa(**arguments)
    with pytest.raises(ArgumentError, match=f"^{argument}: expected {said}"):
        forward_mqa(**{**arguments, argument: value})


def test_an_error_of_a_workspace_of_ones_own_is_not_hidden() -> None:
    class Broken(ds.WorkspaceManager):
        def require(self, *_: object, **__: object) -> None:
            raise AttributeError("mine")

        get_simultaneous = require  # type: ignore[assignment]

    with pytest.raises(AttributeError, match=r"^mine$"):
        forward_mqa(**{**forward_args(SWA), "workspace": Broken()})


CALLS: list[tuple[Callable[..., Any], tuple[Any, ...], str]] = [
    (LayerCaches, (torch.zeros(9), None), r"swa: expected a PagedKVCache, got Tensor -> pass PagedKVCache\("),
    (PagedKVCache, (torch.zeros(9), "fp8_ds_mla"), "layout: expected a KVCacheLayout, got 'fp8_ds_mla' -> pass KVC"),
    (PagedKVCache, (None, LAYOUT), "cache tensor: expected a Tensor, got None -> pass memory as a tensor"),
    (PagedKVCache.allocate, ("fp8_ds_mla", 1, 64), "layout: expected a KVCacheLayout, got 'fp8_ds_mla' -> pass KVC"),
    (PagedKVCache.allocate, (LAYOUT, -1, 64), "num_blocks: expected an integer of at least 0, got -1"),
    (PagedKVCache.allocate, (LAYOUT, "4", 64), "num_blocks: expected an integer of at least 0, got '4'"),
    (PagedKVCache.allocate, (LAYOUT, 4, 0), "block_size: expected an integer of at least 1, got 0"),
    (PagedKVCache.allocate, (LAYOUT, 4, 64.0), "block_size: expected an integer of at least 1, got 64.0"),
    (ds.load_backend, (None,), "name: expected a str, got None -> pass one of .*reference.* call select_backend"),
    (ds.select_backend, (SMALL.layer(0),), r"problems: expected a Problem, got LayerGeometry -> pass Problem\.of"),
    (ds.select_backend, ([],), "problems: expected a Problem, got list -> "),
    (Limits, (0, 1, 1), "max_num_reqs: expected an integer of at least 1, got 0"),
    (Limits, ("4", 256, 4096), "max_num_reqs: expected an integer of at least 1, got '4'"),
    (Limits, (4.5, 256, 4096), "max_num_reqs: expected an integer of at least 1, got 4.5"),
    (Limits, (True, 256, 4096), "max_num_reqs: expected an integer of at least 1, got True"),
    (Limits, (4, 256, None), "max_model_len: expected an integer of at least 1, got None"),
    (Limits, (4, 256, 4096, -1), "num_speculative_tokens: expected an integer of at least 0, got -1"),
    (Limits, (4, 256, 4096, 0, 2e9), "max_workspace_bytes: expected an integer of at least 0, got 2000000000.0"),
]


@pytest.mark.parametrize(("call", "arguments", "said"), CALLS, ids=[said[:40] for *_, said in CALLS])
def test_they_are_refused_where_they_are_given(call: Callable[..., Any], arguments: tuple[Any, ...], said: str) -> None:
    with pytest.raises(ArgumentError, match=f"^{said}"):
        call(*arguments)


def test_a_bound_layer_refuses_tensors_as_caches_and_keeps_those_it_has() -> None:
    layer = bound_layer(SWA).layer
    had, tensor = layer.caches, torch.zeros(4, 8, 584, dtype=torch.uint8)
    for given, said in (((tensor, tensor), "swa"), ((PagedKVCache.allocate(LAYOUT, 4, 4), tensor), "compressed")):
        with pytest.raises(ArgumentError, match=f"^{said}: expected a PagedKVCache, got Tensor -> pass PagedKVCache"):
            layer.bind_kv_cache(*given)

    assert layer.caches is had
    assert LIMITS.max_workspace_bytes is None


C4A_BUFFER = torch.zeros(64, 3, dtype=torch.int32)
TABLE = torch.zeros(512, 8)
BOUND: list[tuple[str, Any, str]] = [
    ("attn_sink", torch.zeros(8)[::2], r"a dense tensor, of stride 1, got strides \[2\]"),
    ("attn_sink", torch.zeros(5), r"\[H\] float32 with H=4, got \[5\] float32$"),
    ("attn_sink", torch.zeros(4).bfloat16(), r"\[H\] float32 .*bfloat16 -> pass attn_sink.to\(torch.float32\)"),
    (
        "topk_indices_buffer",
        C4A_BUFFER.long(),
        r"\[_, K\] int32 with K=3, .* -> allocate topk_indices_buffer as torch.int32",
    ),
    ("topk_indices_buffer", C4A_BUFFER.repeat(1, 2)[:, ::2], r"stride 1 in the last dimension.* -> write to a dense"),
    ("topk_indices_buffer", torch.zeros(64, 4, dtype=torch.int32), r"at most 3 columns, got \[64, 4\]"),
    ("topk_indices_buffer", C4A_BUFFER[:, :2], r"at least 64 rows, the tokens of a step, and 3 columns, got \[64, 2\]"),
    ("topk_indices_buffer", C4A_BUFFER[:-1], r"at least 64 rows, the tokens of a step, and 3 columns, got \[63, 3\]"),
    (
        "topk_indices_buffer",
        None,
        r"the buffer that the indexer writes, on a c4a layer, got None -> allocate it as \[64, 3",
    ),
    ("topk_indices_buffer", C4A_BUFFER[0], r"\[_, K\] int32 with K=3, got \[3\] int32$"),
    ("cos_sin_cache", TABLE.bfloat16(), r"\[_, 8\] float32, .* -> pass cos_sin_cache.to\(torch.float32\)"),
    ("cos_sin_cache", TABLE[:, :4], r"\[_, 8\] float32, got \[512, 4\] float32$"),
    (
        "cos_sin_cache",
        TABLE[:255],
        r"at least 256 rows, the max_model_len of the limits, got \[255, 8\] -> make it with cos",
    ),
    ("cos_sin_cache", None, r"a tensor \[_, 8\] float32, got NoneType"),
    ("geometry", SMALL, "a LayerGeometry, got ModelGeometry"),
    ("limits", 4096, "a Limits, got int"),
    ("backend", "triton", "a backend, got 'triton'"),
    ("workspace", "cpu", "a WorkspaceManager, got 'cpu' -> pass a WorkspaceManager, or None"),
]


@pytest.mark.parametrize(("argument", "value", "said"), BOUND, ids=[f"{a}: {s[:40]}" for a, _, s in BOUND])
def test_a_layer_checks_what_it_is_bound_to_under_their_own_names(argument: str, value: object, said: str) -> None:
    arguments: dict[str, Any] = {
        "geometry": SMALL.layer_of_kind("c4a"),
        "limits": LIMITS,
        "backend": ds.load_backend("reference"),
        "attn_sink": None,
        "cos_sin_cache": TABLE,
        "topk_indices_buffer": C4A_BUFFER,
    }
    assert ds.DeepseekV4MLAAttention("l", **arguments).topk_indices_buffer is C4A_BUFFER
    with pytest.raises(ArgumentError, match=f"^{argument}: expected {said}"):
        ds.DeepseekV4MLAAttention("l", **{**arguments, argument: value})


@pytest.mark.parametrize("index", range(3))
def test_a_whole_layer_refuses_a_short_table_too(index: int) -> None:
    limits, weights = Limits(4, 64, 256), AttentionWeights.from_dict(random_weights(SMALL, index), SMALL, index)
    given = SMALL, index, limits, ds.load_backend("reference"), weights
    tables = [ds.cos_sin_cache(SMALL.layer(index).rope, rows) for rows in (255, 256)]
    with pytest.raises(ArgumentError, match=r"^cos_sin_cache: expected at least 256 rows, the max_model_len of the"):
        ds.DeepseekV4Attention("l", *given, cos_sin_cache=tables[0])
    ds.DeepseekV4Attention("l", *given, cos_sin_cache=tables[1])


def test_a_buffer_as_wide_as_the_longest_sequence_has_entries_is_wide_enough() -> None:
    """16 tokens have 4 entries of 4 tokens: an indexer that selects 5 never writes the fifth column."""
    layer = attrs.evolve(SMALL.layer_of_kind("c4a"), topk=5)
    given = "l", layer, Limits(4, 8, 16), ds.load_backend("reference")
    for columns in (4, 5):
        buffer = torch.zeros(8, columns, dtype=torch.int32)
        ds.DeepseekV4MLAAttention(*given, attn_sink=None, cos_sin_cache=TABLE, topk_indices_buffer=buffer)
    with pytest.raises(ArgumentError, match=r"at least 8 rows, the tokens of a step, and 4 columns, got \[8, 3\]"):
        ds.DeepseekV4MLAAttention(
            *given, attn_sink=None, cos_sin_cache=TABLE, topk_indices_buffer=buffer[:, :3].contiguous()
        )


def test_layers_without_an_indexer_take_any_buffer() -> None:
    geometry, backend = SMALL.layer_of_kind(SWA), ds.load_backend("reference")
    ds.DeepseekV4MLAAttention(
        "l", geometry, LIMITS, backend, attn_sink=None, cos_sin_cache=TABLE, topk_indices_buffer=TABLE
    )

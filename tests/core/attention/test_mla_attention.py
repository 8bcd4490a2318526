"""The bound layer: forward context, warm-up, two layers and two threads."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4attn.core.attention import mla_attention
from dsv4attn.core.attention.checks import check_insert
from dsv4attn.core.attention.forward_mqa import forward_mqa
from dsv4attn.core.cache.layout import KVCacheLayout, PagedKVCache
from dsv4attn.core.memory.workspace import WorkspaceManager, use_workspace
from dsv4attn.core.metadata.forward_context import get_forward_context, set_forward_context
from dsv4attn.core.metadata.metadata import AttentionMetadata, CompressedMetadata, WindowMetadata
from dsv4attn.core.model.geometry import LayerKind
from dsv4attn.errors import ArgumentError, Dsv4AttnError, LayoutMismatchError, NoForwardContextError
from tests.harness import LAYOUT, LIMITS, bound_layer


@pytest.mark.parametrize(
    ("position", "table", "said"),
    [
        (512, None, r"positions: expected values in \[0, 512\), the rows of cos_sin_cache, .*, got 512"),
        (-1, None, r"positions: expected values in \[0, 512\), .*, got -1"),
        (0, torch.zeros(512, 4), r"cos_sin_cache: expected \[_, 8\] float32, got \[512, 4\] float32"),
        (0, torch.zeros(512, 8).bfloat16(), r"cos_sin_cache: expected \[_, 8\] float32, got \[512, 8\] bfloat16"),
    ],
)
def test_positions_and_tables_that_do_not_fit_are_refused_before_any_write(
    position: int, table: Tensor | None, said: str
) -> None:
    case = bound_layer(LayerKind.SWA)
    case.layer.cos_sin_cache = case.layer.cos_sin_cache if table is None else table
    assert case.layer.caches is not None
    case.positions[-1], q, cache = position, case.q.clone(), case.layer.caches.swa.tensor
    original = cache.clone()
    with set_forward_context(case.metadata), pytest.raises(ArgumentError, match=f"^{said}"):
        case.layer.fused_qnorm_rope_kv_insert(q, case.kv, case.positions)
    assert torch.equal(q, case.q)
    assert torch.equal(cache, original)


@pytest.mark.parametrize("kind", LayerKind)
def test_the_bound_layer_computes_what_the_plain_function_computes(kind: LayerKind) -> None:
    case = bound_layer(kind)
    out = case.run()
    layer, q, expected = case.layer, case.q.clone(), torch.empty_like(case.q)
    swa = case.metadata[layer.swa_prefix]
    assert isinstance(swa, WindowMetadata)
    assert layer.caches is not None
    layer.backend.qnorm_rope_kv_insert(
        q, case.kv, layer.caches.swa, swa.slot_mapping, case.positions, layer.cos_sin_cache, 1e-6
    )
    with set_forward_context(case.metadata) as context:
        metadata = context.for_layer(layer.prefix, layer.swa_prefix, kind)
    forward_mqa(
        q,
        layer.caches,
        metadata,
        layer.backend,
        WorkspaceManager(),
        expected,
        layer=layer.geometry,
        limits=LIMITS,
        attn_sink=layer.attn_sink,
        topk_indices=layer.topk_indices_buffer,
    )
    assert torch.equal(expected, out)
    assert out.float().abs().sum() > 0


@pytest.mark.parametrize("kind", LayerKind)
def test_a_step_of_an_engine_with_metadata_of_its_own_is_that_of_the_ops(kind: LayerKind) -> None:
    case, own = bound_layer(kind), bound_layer(kind)
    expected, layer, q = case.run(), own.layer, own.q.clone()
    with set_forward_context(own.metadata) as context:
        metadata = context.for_layer(layer.prefix, layer.swa_prefix, kind)
    assert metadata is not None
    assert layer.caches is not None
    sink, layer.attn_sink, space, layer.workspace = layer.attn_sink, None, WorkspaceManager(), None
    layer.insert_step(metadata, layer.caches, space, metadata.swa.slot_mapping, q, own.kv, own.positions)
    topk, out = layer.topk_indices_buffer, torch.empty_like(q)
    layer.attend_step(metadata, layer.caches, space, topk, sink, q, own.positions, out)

    assert torch.equal(out, expected)
    assert space.total_bytes


class OnGPU(Tensor):
    """A tensor whose values no check reads."""

    is_cpu = False


def test_on_a_gpu_arguments_of_an_insert_are_checked_once_for_each_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    checks: list[int] = []

    def counted(q: Tensor, *arguments: Any) -> None:
        checks.append(len(q))
        check_insert(q, *arguments)

    monkeypatch.setattr(mla_attention, "check_insert", counted)
    monkeypatch.setattr(mla_attention, "_checked", {})
    # layers with caches of one signature, and one with pages of another number
    layers = [bound_layer(LayerKind.SWA, f"layers.{i}").layer for i in range(3)]
    pages = [PagedKVCache.allocate(LAYOUT, number, 4) for number in (8, 8, 7)]
    for layer, cache in zip(layers, pages, strict=True):
        layer.bind_kv_cache(cache)
    heads, dim = layers[0].geometry.num_heads, layers[0].geometry.head_dim
    queries = torch.randn(2, 100, heads, dim).bfloat16()

    def insert(rows: int, layer: Any, kv: Tensor) -> None:
        q, numbers = queries[0, :rows].as_subclass(OnGPU), torch.arange(rows) % 8
        layer.insert_step(None, layer.caches, None, numbers, q, kv[:rows, 0], numbers)

    for rows in (3, 3, 5, 3):
        for layer in layers[:2]:
            insert(rows, layer, queries[1])
    assert checks == [3, 5]
    insert(3, layers[2], queries[1])
    assert checks == [3, 5, 3]
    # addresses are not in a signature
    with pytest.raises(ArgumentError, match=r"^q: expected memory apart from that of kv"):
        insert(3, layers[0], queries[0])
    with pytest.raises(ArgumentError, match=r"^kv: expected \[T, D\] bfloat16"):
        insert(3, layers[0], queries[1].float())
    for rows in range(10, 90):
        insert(rows, layers[0], queries[1])
    assert len(mla_attention._checked) <= mla_attention._MOST_CHECKED


def test_a_warm_up_reserves_the_plan_zeroes_the_output_and_touches_no_cache() -> None:
    case = bound_layer(LayerKind.CSA)
    layer = case.layer
    empty = PagedKVCache(torch.empty(0, 4, 48, dtype=torch.uint8), KVCacheLayout.fp8_ds_mla(24, 8, group_size=8))
    layer.bind_kv_cache(empty, PagedKVCache.allocate(LAYOUT, 0, 4))
    out = torch.full_like(case.q, torch.nan)
    q = case.q.clone()
    with set_forward_context(None):
        layer.fused_qnorm_rope_kv_insert(q, case.kv, case.positions)
        layer.forward_mqa(q, case.kv, case.positions, out)
    assert torch.equal(case.q, q)
    assert not out.any()
    assert layer.workspace is not None
    assert layer.workspace.size("prefill") > 0
    layer.workspace.lock()
    case.layer.bind_kv_cache(PagedKVCache.allocate(LAYOUT, 8, 4), PagedKVCache.allocate(LAYOUT, 3, 4))
    case.run()


def test_outside_a_context_and_without_its_metadata_a_layer_says_what_is_missing() -> None:
    case = bound_layer(LayerKind.CSA)
    out = torch.empty_like(case.q)
    with pytest.raises(NoForwardContextError, match="set_forward_context"):
        case.layer.forward_mqa(case.q, case.kv, case.positions, out)
    swa_only = {case.layer.swa_prefix: case.metadata[case.layer.swa_prefix]}
    with (
        set_forward_context(swa_only),
        pytest.raises(NoForwardContextError, match=r"attn_metadata\['model.layers.0.attn'\]"),
    ):
        case.layer.forward_mqa(case.q, case.kv, case.positions, out)
    with set_forward_context({}), pytest.raises(NoForwardContextError, match=r"swa_cache.*keys: none"):
        case.layer.forward_mqa(case.q, case.kv, case.positions, out)
    with pytest.raises(NoForwardContextError):
        get_forward_context()


@pytest.mark.parametrize("kind", LayerKind)
def test_a_layer_takes_what_the_builder_returned_for_its_kind(kind: LayerKind) -> None:
    case = bound_layer(kind)
    expected = case.run()
    swa, part = case.metadata[case.layer.swa_prefix], case.metadata.get(case.layer.prefix)
    assert isinstance(swa, WindowMetadata)
    assert part is None or isinstance(part, CompressedMetadata)
    q, out, other = case.q.clone(), torch.empty_like(case.q), LayerKind.SWA if part else LayerKind.CSA
    with set_forward_context({kind: AttentionMetadata(swa, part)}):
        case.layer.fused_qnorm_rope_kv_insert(q, case.kv, case.positions)
        case.layer.forward_mqa(q, case.kv, case.positions, out)
    assert torch.equal(expected, out)
    said = f"expected metadata of {kind.value} layers, got metadata of: {other.value} -> .*build_for"
    with (
        set_forward_context({other: AttentionMetadata(swa, part)}),
        pytest.raises(NoForwardContextError, match=said),
    ):
        case.layer.forward_mqa(case.q, case.kv, case.positions, out)


def test_metadata_of_one_kind_without_its_mapping_are_refused_with_the_cure() -> None:
    case = bound_layer(LayerKind.SWA)
    swa = case.metadata[case.layer.swa_prefix]
    assert isinstance(swa, WindowMetadata)
    with (
        pytest.raises(ArgumentError, match=r"attn_metadata: expected a mapping .* got AttentionMetadata -> .*_for"),
        set_forward_context(AttentionMetadata(swa)),  # type: ignore[arg-type]
    ):
        pytest.fail("a step ran")


def test_a_window_only_layer_ignores_synthetic_compressed_metadata() -> None:
    case, other = bound_layer(LayerKind.SWA), bound_layer(LayerKind.CSA)
    expected = case.run()
    case.metadata[case.layer.prefix] = other.metadata[other.layer.prefix]
    assert torch.equal(expected, case.run())


def test_g2_binding_a_cache_of_another_layout_raises() -> None:
    case = bound_layer(LayerKind.SWA)
    layer = case.layer
    layer.swa_layout = LAYOUT
    rows = KVCacheLayout.rows(24, 8)
    with pytest.raises(LayoutMismatchError, match=r"swa cache of model\.layers\.0\.attn"):
        layer.bind_kv_cache(PagedKVCache.allocate(rows, 8, 4))
    with pytest.raises(LayoutMismatchError, match="24 \\+ 8 dims"):
        layer.bind_kv_cache(PagedKVCache.allocate(KVCacheLayout.rows(16, 16), 8, 4))
    with pytest.raises(ArgumentError, match="compressed"):
        bound_layer(LayerKind.CSA).layer.bind_kv_cache(PagedKVCache.allocate(LAYOUT, 8, 4))


def test_a_slot_outside_the_cache_is_an_error_before_any_write() -> None:
    case = bound_layer(LayerKind.SWA)
    swa = case.metadata[case.layer.swa_prefix]
    assert isinstance(swa, WindowMetadata)
    swa.slot_mapping[3] = 32
    q = case.q.clone()
    assert case.layer.caches is not None
    original = case.layer.caches.swa.tensor.clone()
    with set_forward_context(case.metadata), pytest.raises(ArgumentError, match="slot_mapping"):
        case.layer.fused_qnorm_rope_kv_insert(q, case.kv, case.positions)
    assert torch.equal(case.q, q)
    assert torch.equal(original, case.layer.caches.swa.tensor)


def test_layers_with_equal_prefixes_and_threads_do_not_mix() -> None:
    cases = [bound_layer(LayerKind.HCA, seed=seed) for seed in range(4)]
    expected = [case.run() for case in cases]
    for case in cases:
        case.layer.workspace = None
    outs: list[Tensor | None] = [None] * len(cases)
    start = threading.Barrier(len(cases))

    def work(i: int) -> None:
        with use_workspace(WorkspaceManager()):
            start.wait()
            for _ in range(5):
                outs[i] = cases[i].run()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(cases))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for want, got in zip(expected, outs, strict=True):
        assert got is not None
        assert torch.equal(want, got)


@pytest.mark.usefixtures("few_objects")
def test_a_layer_without_caches_or_workspace_or_owner_says_so() -> None:
    case = bound_layer(LayerKind.SWA)
    case.layer.caches = None
    with pytest.raises(Dsv4AttnError, match="bind_kv_cache"):
        case.run()
    case = bound_layer(LayerKind.SWA)
    case.layer.workspace = None
    with pytest.raises(Dsv4AttnError, match=r"use_workspace.* or .*MLAAttention\(workspace=manager\)"):
        case.run()
    q, kv, positions, handle = case.q, case.kv, case.positions, case.layer.handle
    held = None, None, None, None, case.layer.cos_sin_cache
    del case
    gc.collect()
    with pytest.raises(Dsv4AttnError, match="no longer exists"):
        torch.ops.dsv4attn.forward_mqa(q, kv, positions, torch.empty_like(q), *held, handle)


def test_o_proj_is_the_backends_projection_with_the_layers_table() -> None:
    case = bound_layer(LayerKind.CSA)
    out, weight = case.run(), torch.randn(2 * 16, 64)
    expected = case.layer.backend.inv_rope_o_proj(out, case.positions, case.layer.cos_sin_cache, weight, 2)
    assert torch.equal(expected, case.layer.o_proj(out, case.positions, weight, 2))


def test_q_which_the_insert_writes_is_apart_from_kv() -> None:
    case = bound_layer(LayerKind.SWA)
    assert case.layer.caches is not None
    q, cache = case.q.clone(), case.layer.caches.swa.tensor
    original, alone = cache.clone(), case.q.clone()
    with set_forward_context(case.metadata):
        for kv in (q[:, 0], q[:, -1]):
            with pytest.raises(ArgumentError, match=r"^q: expected memory apart from that of kv, got a tensor that"):
                case.layer.fused_qnorm_rope_kv_insert(q, kv, case.positions)
        assert torch.equal(q, case.q)
        assert torch.equal(cache, original)
        # columns of one buffer, as one product gives them
        both = torch.cat([case.q, case.kv[:, None]], dim=1)
        case.layer.fused_qnorm_rope_kv_insert(both[:, :-1], both[:, -1], case.positions)
        case.layer.fused_qnorm_rope_kv_insert(alone, case.kv, case.positions)
    assert torch.equal(both[:, :-1], alone)
    assert torch.equal(both[:, -1], case.kv)


def test_kv_has_the_dtype_of_q() -> None:
    """Of each dtype a backend compiles one kernel; a mix would be compiled in the first request."""
    case = bound_layer(LayerKind.SWA)
    q, cache = case.q.clone(), case.layer.caches
    assert cache is not None
    original = cache.swa.tensor.clone()
    with (
        set_forward_context(case.metadata),
        pytest.raises(
            ArgumentError, match=r"^kv: expected \[T, D\] bfloat16 like q .*got \[.*\] float32 -> pass kv.to\(torch.bfl"
        ),
    ):
        case.layer.fused_qnorm_rope_kv_insert(q, case.kv.float(), case.positions)

    assert torch.equal(q, case.q)
    assert torch.equal(cache.swa.tensor, original)

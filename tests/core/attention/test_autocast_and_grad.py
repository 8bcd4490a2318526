"""The package computes outside of autocast and of gradient recording, whichever entry point is called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from dsv4attn.backends._triton.interpreted import INTERPRETED
from dsv4attn.backends.reference.launch import ReferenceBackend
from dsv4attn.core.attention.forward_mqa import forward_mqa
from dsv4attn.core.cache.convert import convert_cache
from dsv4attn.core.cache.layer_caches import LayerCaches
from dsv4attn.core.cache.layout import KVCacheLayout, PagedKVCache
from dsv4attn.core.contract.backend import Backend
from dsv4attn.core.contract.layer_ops import LayerOps
from dsv4attn.core.layer.hyper_connections import HyperConnections
from dsv4attn.core.metadata.forward_context import set_forward_context
from dsv4attn.core.metadata.metadata import AttentionMetadata
from dsv4attn.core.model.geometry import LayerKind
from dsv4attn.core.model.rope import cos_sin_cache
from dsv4attn.core.model.weights import HyperConnectionWeights
from dsv4attn.core.torch_ops.arguments import EntryNorm, StatePages
from dsv4attn.core.torch_ops.merge import merge_lse
from dsv4attn.selection import load_backend
from tests.harness import FP32, KINDS_AND_RATIOS, LIMITS, SMALL, LayerStack, bound_layer
from tests.harness_v41 import v41_stack

ROPE = cos_sin_cache(SMALL.layer(0).rope, 64)
STEPS = (13, 1, 6)


def outs(whole: LayerStack, dtype: torch.dtype | None = None) -> list[Tensor]:
    """All layers in some steps, under autocast to a dtype if one is given."""
    sequence, outputs = whole.manager.new(), list[Tensor]()
    for seed, count in enumerate(STEPS):
        hidden = whole.hidden(seed, count)
        with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
            outputs += whole.step([(sequence, count)], hidden)
    return outputs


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("make_stack", [lambda: LayerStack(load_backend("reference")), v41_stack], ids=["V4", "V4.1"])
def test_layers_under_autocast_have_the_bits_that_they_have_without(
    make_stack: Callable[[], LayerStack], dtype: Any
) -> None:
    for expected, actual in zip(outs(make_stack()), outs(make_stack(), dtype), strict=True):
        assert actual.dtype == expected.dtype
        assert torch.equal(actual, expected)


def mixes(seed: int = 0) -> HyperConnections:
    n, generator = SMALL.hc_mult, torch.Generator().manual_seed(seed)
    shapes = (2 * n + n * n, n * SMALL.hidden_size), (2 * n + n * n,), (3,)
    weights = HyperConnectionWeights(*[torch.randn(shape, generator=generator) * 0.3 for shape in shapes])
    return HyperConnections(attrs.evolve(SMALL, hc_sinkhorn_iters=2), weights, ReferenceBackend().layer_ops)


def streams_of(mixes: HyperConnections, streams: Tensor) -> list[Tensor]:
    post, comb, hidden = mixes.pre(streams)
    first, *delayed = mixes.pre_delayed(streams, None)
    after = mixes.after(hidden, streams, post, comb)
    again = mixes.after_delayed(hidden, streams, post, comb, first)
    whole = mixes.post(hidden, streams, post, comb), mixes.collapse(streams, first)
    return [post, comb, hidden, first, *delayed, *after, *again, *whole]


@pytest.mark.matrix
@pytest.mark.parametrize("compiler", [None, "aot_eager"])
def test_hyper_connections_under_autocast_have_the_bits_that_they_have_without(compiler: str | None) -> None:
    torch._dynamo.reset()
    connected, streams = mixes(), torch.randn(5, SMALL.hc_mult, SMALL.hidden_size)
    expected = streams_of(connected, streams)
    run: Callable[[HyperConnections, Tensor], list[Tensor]] = streams_of
    if compiler is not None:
        run = torch.compile(streams_of, backend=compiler, fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16):
        actual = run(connected, streams.requires_grad_())

    for left, right in zip(expected, actual, strict=True):
        assert left.dtype == right.dtype
        assert not right.requires_grad
        assert torch.equal(left, right) if compiler is None else torch.allclose(left, right, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("device", ["cpu", "cuda", "xpu"])
def test_a_backend_never_sees_autocast_or_a_mode_that_records_gradients(device: str) -> None:
    """Autocast of all types of devices: the flag may be set where there is no such device."""
    seen = list[tuple[bool, ...]]()

    def look() -> None:
        on = [torch.is_autocast_enabled(name) for name in ("cpu", "cuda", "xpu")]
        seen.append((torch.is_grad_enabled(), *on))

    class Own(ReferenceBackend):
        def qnorm_rope_kv_insert(self, *args: Any) -> None:
            look()
            super().qnorm_rope_kv_insert(*args)

        def inv_rope_o_proj(self, *args: Any) -> Tensor:
            look()
            return super().inv_rope_o_proj(*args)

        def decode(self, call: Any) -> None:
            look()
            super().decode(call)

    def mhc_post(x: Tensor, *_: Tensor) -> Tensor:
        look()
        return x

    connected = mixes()
    connected._layer_ops = attrs.evolve(LayerOps(), mhc_post=mhc_post)
    backend, case = Own(), bound_layer(LayerKind.CSA)
    case.layer.backend = backend
    torch.set_autocast_enabled(device, True)
    try:
        case.run()
        case.layer.o_proj(torch.empty_like(case.q), case.positions, torch.randn(2 * 16, 64), 2)
        cache, slots = PagedKVCache.allocate(FP32, 4, 4), torch.arange(3)
        arguments = torch.randn(3, 4, 32), torch.randn(3, 32), cache, slots, slots, ROPE, 1e-6
        backend.qnorm_rope_kv_insert(*arguments)
        connected.post(*[torch.ones(2, 2)] * 4)
        assert torch.is_autocast_enabled(device)
        assert torch.is_grad_enabled()
    finally:
        torch.set_autocast_enabled(device, False)

    assert len(seen) == 5
    assert not any(any(modes) for modes in seen)


def test_merging_under_autocast_has_the_bits_that_it_has_without() -> None:
    outs, lses = torch.randn(3, 5, 4, 8), torch.randn(3, 5, 4)
    expected = merge_lse(outs, lses)
    with torch.autocast("cpu", torch.bfloat16):
        actual = merge_lse(outs, lses)
    assert all(torch.equal(*pair) for pair in zip(expected, actual, strict=True))


# gradients


def grads(*shape: int) -> Tensor:
    """A tensor with an autograd graph, as a projection makes it."""
    weight: Tensor = torch.nn.Linear(shape[-1], shape[-1])(torch.randn(shape))
    return weight


def test_a_layers_insert_and_attention_leave_no_graph_in_a_cache_or_an_output() -> None:
    case = bound_layer(LayerKind.CSA)
    caches = case.layer.caches
    assert caches is not None
    rows = KVCacheLayout.rows(24, 8, dtype=torch.float32)
    window = PagedKVCache.allocate(rows, 8, 4)
    compressed = PagedKVCache.allocate(rows, 3, 4)
    case.layer.bind_kv_cache(window, compressed)
    q, kv = grads(*case.q.shape), grads(*case.kv.shape)
    out, lse = torch.empty_like(q), torch.empty(q.shape[:2])
    sink = torch.randn(4, requires_grad=True)
    case.layer.attn_sink = sink
    with set_forward_context(case.metadata):
        case.layer.fused_qnorm_rope_kv_insert(q, kv, case.positions)
        case.layer.forward_mqa(q, kv, case.positions, out)
    bare(window.tensor, compressed.tensor, window.region("row"), out)

    both = attrs.evolve(LayerCaches(window, compressed))
    parts: Any = case.metadata
    metadata = AttentionMetadata(parts[case.layer.swa_prefix], parts[case.layer.prefix])
    workspace = case.layer.workspace
    assert workspace is not None
    topk, layer = case.layer.topk_indices_buffer, SMALL.layer_of_kind(LayerKind.CSA)
    options: dict[str, Any] = {"layer": layer, "limits": LIMITS, "attn_sink": sink, "topk_indices": topk, "lse": lse}
    forward_mqa(q, both, metadata, case.layer.backend, workspace, out, **options)
    bare(window.tensor, compressed.tensor, out, lse)


def bare(*tensors: Tensor) -> None:
    """Assert that autograd knows nothing of tensors."""
    for tensor in tensors:
        assert not tensor.requires_grad
        base = tensor._base
        assert base is None or not base.requires_grad


BACKENDS = ["reference", pytest.param("triton", marks=pytest.mark.skipif(not INTERPRETED, reason="on the CPU"))]


@pytest.mark.parametrize("name", BACKENDS)
def test_methods_and_steps_of_a_backend_leave_no_graph(name: str) -> None:
    backend = load_backend(name)
    steps, slots, cache = backend.layer_ops, torch.arange(6), PagedKVCache.allocate(FP32, 4, 4)
    backend.quantize_and_insert_k_cache(grads(6, 32), cache, slots)
    bare(cache.tensor, cache.region("row"))
    q = grads(6, 4, 32)
    backend.qnorm_rope_kv_insert(q, grads(6, 32), cache, slots, slots, ROPE, 1e-6)
    bare(cache.tensor, cache.region("row"))
    bare(backend.inv_rope_o_proj(q, slots, ROPE, torch.randn(32, 64, requires_grad=True), 2))

    states = PagedKVCache.allocate(KVCacheLayout.compressor_state(64), 4, 4)
    ape = torch.randn(4, 64, requires_grad=True)
    steps.save_partial_states(grads(6, 64), grads(6, 64), ape, slots, states, slots)
    bare(states.tensor, states.region("row"))
    table, request = torch.arange(4, dtype=torch.int32)[None], torch.zeros(6, dtype=torch.int32)
    weight, entries = torch.ones(32, requires_grad=True), torch.full((6,), -1)
    entries[3] = 2
    pages, norm = StatePages(states, table), EntryNorm(weight, 1e-6, ROPE)
    steps.compress_norm_rope_store(pages, request, slots, entries, norm, 4, cache, overlap=True)
    steps.norm_rope_store(grads(6, 32), slots, entries, norm, 1, cache)
    bare(cache.tensor, states.tensor)
    latents = steps.compress_latents(grads(6, 32), None, slots, request, weight, 1e-6, 1)
    bare(latents)


def test_a_whole_layer_in_grad_mode_leaves_no_graph() -> None:
    whole = LayerStack(load_backend("reference"))
    requests = [(whole.manager.new(), 9)]
    hidden = grads(9, SMALL.hidden_size)
    with set_forward_context(whole.manager.metadata(whole.manager.batch(requests))):
        outputs = [layer(hidden, whole.manager.positions(requests)) for layer in whole.layers]
    bare(*outputs, *[cache.tensor for caches in whole.manager.caches for cache in caches.present.values()])


def test_a_converted_cache_has_no_graph() -> None:
    source, target = (PagedKVCache.allocate(FP32, 2, 4) for _ in range(2))
    with_graph = PagedKVCache(grads(2, 4, 32), source.layout)
    convert_cache(with_graph, target)
    bare(target.tensor)
    assert torch.equal(target.tensor, with_graph.tensor)


def test_a_backward_pass_through_a_q_that_was_prepared_in_place_is_refused_by_torch() -> None:
    """The write to q is like one of `torch.no_grad()`: counted, and not recorded."""
    case = bound_layer(LayerKind.SWA)
    q = torch.randn(case.q.shape, requires_grad=True) * 1.0
    norm = q.square().sum()  # saves q
    version = q._version
    with set_forward_context(case.metadata):
        case.layer.fused_qnorm_rope_kv_insert(q, case.kv.float(), case.positions)

    assert q._version > version
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        norm.backward()


def test_a_compiled_layer_in_grad_mode_leaves_no_graph() -> None:
    torch._dynamo.reset()
    geometry = attrs.evolve(SMALL, layers=KINDS_AND_RATIOS[:1])
    first, second = (
        LayerStack(load_backend("reference"), geometry=geometry),
        LayerStack(load_backend("reference"), geometry=geometry),
    )
    hidden = torch.randn(9, SMALL.hidden_size, requires_grad=True)
    outputs = []
    for whole in (first, second):
        layer, requests = whole.layers[0], [(whole.manager.new(), 9)]
        run = layer if whole is first else torch.compile(lambda x, at: layer(x * 1.0, at), backend="aot_eager")  # noqa: B023
        with set_forward_context(whole.manager.metadata(whole.manager.batch(requests))):
            outputs.append(run(hidden, whole.manager.positions(requests)))
        bare(outputs[-1], whole.manager.caches[0].attention.swa.tensor)
    assert torch.equal(*outputs)


def test_a_backend_of_ones_own_is_guarded() -> None:
    class Own(Backend):
        def quantize_and_insert_k_cache(self, k: Tensor, cache: PagedKVCache, slot_mapping: Tensor) -> None:
            """Write rows."""
            cache.tensor.flatten(0, 1)[slot_mapping] = k

    cache = PagedKVCache.allocate(FP32, 2, 4)
    Own().quantize_and_insert_k_cache(grads(3, 32), cache, torch.arange(3))
    bare(cache.tensor)
    assert cache.tensor.any()
    assert Own.quantize_and_insert_k_cache.__doc__ == "Write rows."

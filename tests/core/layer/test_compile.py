"""`torch.compile` of whole layers: compiled equals eager, bit by bit, in all that a step writes.

Backends of a compiler that replace writes by copies (aot_eager, inductor) keep the order of two ops only if schemas say
what both read and write.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Sequence

import attrs
import pytest
import torch
from attrs import frozen
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dsv4attn.core.cache import layer_caches
from dsv4attn.core.cache.layer_caches import DeepseekV4Caches, LayerCaches, all_caches_of, op_tensor
from dsv4attn.core.cache.layout import KVCacheLayout, PagedKVCache
from dsv4attn.core.layer import attention_layer as attention_module
from dsv4attn.core.layer.attention_layer import DeepseekV4Attention
from dsv4attn.core.metadata.forward_context import set_forward_context
from dsv4attn.core.model.geometry import LayerKind
from dsv4attn.errors import ArgumentError, Dsv4AttnError
from dsv4attn.selection import load_backend
from tests.core.attention.strategies import search
from tests.harness import FP8, FP32, KINDS_AND_RATIOS, PROMPT_TOKENS, SMALL, LayerStack, bound_layer
from tests.harness_v41 import v41_stack

Steps = Sequence[Sequence[tuple[int, int]]]
"""For each step, (number of the sequence, tokens) of its requests."""
PREFILL_DECODE_PREFILL: Steps = ([(0, 20)], [(0, 1)], [(0, 19), (1, 9)])
TWO_PREFILLS: Steps = ([(0, 20)], [(0, 19), (1, 9)])
"""Steps of one graph: that of one token is another."""


@frozen
class Ran:
    """outs: outputs of every layer in every step. memory: every cache and buffer after the last step."""

    outs: list[Tensor]
    memory: list[Tensor]

    def same(self, other: Ran) -> bool:
        """Whether all bits are equal, NaN too."""
        pairs = zip([*self.outs, *self.memory], [*other.outs, *other.memory], strict=True)
        return all(
            torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))
            for left, right in pairs
        )


def run(whole: LayerStack, backend: str | None, steps: Steps = PREFILL_DECODE_PREFILL) -> Ran:
    """All layers, one after the other in one function, in these steps; compiled, or eager without a backend."""

    def model(hidden: Tensor, positions: Tensor) -> list[Tensor]:
        outs = []
        for layer in whole.layers:
            outs.append(layer(hidden * 1.0, positions))
            hidden = hidden + outs[-1]
        return outs

    torch._dynamo.reset()
    function: Callable[[Tensor, Tensor], list[Tensor]] = model
    if backend is not None:
        function = torch.compile(model, backend=backend, fullgraph=True, dynamic=True)
    sequences = [whole.manager.new() for _ in range(whole.limits.max_num_reqs)]
    outs: list[Tensor] = []
    for number, step in enumerate(steps):
        requests = [(sequences[i], count) for i, count in step]
        positions = whole.manager.positions(requests)
        hidden = whole.hidden(number, positions.shape[0])
        with torch.no_grad(), set_forward_context(whole.manager.metadata(whole.manager.batch(requests))):
            outs += function(hidden, positions)
        whole.manager.advance(requests)
    return Ran(outs, [memory.clone() for layer in whole.layers for memory in memory_of(layer)])


def memory_of(layer: DeepseekV4Attention) -> list[Tensor]:
    """Caches and buffers that a layer writes or reads."""
    assert layer.caches is not None
    buffers = [layer.topk_indices, None if layer.candidates is None else layer.candidates.blocks]
    return [*(cache.tensor for cache in layer.caches.present.values()), *(x for x in buffers if x is not None)]


def put_in_one_allocation(whole: LayerStack) -> None:
    """Give all caches of all layers new memory: pages of one allocation, one cache after the other in each page."""
    present = [cache for caches in whole.manager.caches for cache in caches.present.values()]
    caches = list({id(cache): cache for cache in present}.values())
    sizes = [-(-cache.block_size * cache.layout.record_bytes // 16) * 16 for cache in caches]
    pages = torch.zeros(max(cache.num_blocks for cache in caches), sum(sizes), dtype=torch.uint8)
    moved, start = dict[int, PagedKVCache](), 0
    for cache, size in zip(caches, sizes, strict=True):
        part = pages[: cache.num_blocks, start : start + cache.block_size * cache.layout.record_bytes]
        rows = part.view(cache.layout.dtype).unflatten(1, (cache.block_size, -1))
        moved[id(cache)] = PagedKVCache(rows, cache.layout)
        start += size

    def new(cache: PagedKVCache | None) -> PagedKVCache | None:
        return None if cache is None else moved[id(cache)]

    bound = list[DeepseekV4Caches]()
    for layer, old in zip(whole.layers, whole.manager.caches, strict=True):
        attention = LayerCaches(moved[id(old.attention.swa)], new(old.attention.compressed))
        bound.append(DeepseekV4Caches(attention, new(old.state), new(old.index), new(old.index_state)))
        layer.bind_kv_cache(bound[-1])
    whole.manager.caches = tuple(bound)


# inductor warns about torch's own use of these when it is imported
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")

NAMES = [kind.value for kind, _ in KINDS_AND_RATIOS]


def whole(*kinds: int, layout: KVCacheLayout = FP32) -> LayerStack:
    """Layers of V4 with these kinds."""
    geometry = attrs.evolve(SMALL, layers=tuple(KINDS_AND_RATIOS[i] for i in kinds or range(3)))
    return LayerStack(load_backend("reference"), layout, geometry=geometry)


@pytest.mark.parametrize("kind", range(3), ids=NAMES)
def test_a_compiled_layer_equals_eager_in_every_step(kind: int) -> None:
    """Inductor: below, all kinds in one graph."""
    assert run(whole(kind), "aot_eager").same(run(whole(kind), None))


@pytest.mark.matrix
def test_layers_of_v41_in_one_graph_equal_eager() -> None:
    """Readers get the entries, selections and candidates that their sources wrote in the same graph."""
    assert run(v41_stack(), "aot_eager").same(run(v41_stack(), None))


@pytest.mark.parametrize(
    ("kind", "compiler"),
    [*((kind, "aot_eager") for kind in LayerKind), pytest.param(LayerKind.CSA, "inductor", marks=pytest.mark.slow)],
)
def test_a_top_k_buffer_may_be_filled_in_the_compiled_function(kind: LayerKind, compiler: str) -> None:
    torch._dynamo.reset()
    first, second = bound_layer(kind), bound_layer(kind)
    scores = torch.randn(PROMPT_TOKENS, 5)

    def model(case: object, q: Tensor, scores: Tensor) -> Tensor:
        layer = case.layer  # type: ignore[attr-defined]
        q, out = q.clone(), torch.empty_like(q)
        layer.fused_qnorm_rope_kv_insert(q, case.kv, case.positions)  # type: ignore[attr-defined]
        layer.topk_indices_buffer[:PROMPT_TOKENS] = scores.topk(3, dim=-1).indices.int()
        layer.forward_mqa(q, case.kv, case.positions, out)  # type: ignore[attr-defined]
        return out

    for case in (first, second):
        assert case.layer.topk_indices_buffer is not None
        case.layer.topk_indices_buffer.fill_(-1)
    compiled = torch.compile(model, backend=compiler, fullgraph=True)
    with torch.no_grad(), set_forward_context(first.metadata):
        expected = model(first, first.q, scores)
    with torch.no_grad(), set_forward_context(second.metadata):
        actual = compiled(second, second.q, scores)

    assert torch.equal(actual, expected)
    for left, right in zip(memory(first.layer), memory(second.layer), strict=True):
        assert torch.equal(left, right)


def memory(layer: object) -> list[Tensor]:
    caches = layer.caches  # type: ignore[attr-defined]
    pages = [cache.tensor for cache in caches.segments(SMALL.layer_of_kind(LayerKind.CSA))]
    return [*pages, layer.topk_indices_buffer]  # type: ignore[attr-defined]


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("together", "compiler", "steps"),
    [
        pytest.param(False, "inductor", PREFILL_DECODE_PREFILL, marks=pytest.mark.slow),
        (True, "aot_eager", PREFILL_DECODE_PREFILL),
        pytest.param(True, "inductor", TWO_PREFILLS, marks=pytest.mark.slow),
        pytest.param(True, "inductor", PREFILL_DECODE_PREFILL, marks=pytest.mark.matrix),
    ],
)
def test_caches_may_be_views_of_one_allocation_and_inductor_copies_none(
    together: bool, compiler: str, steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of another dtype too: states are fp32 in an allocation of bytes."""
    copies, of = list[bool](), all_caches_of

    def look(caches: DeepseekV4Caches, *tensors: Tensor | None) -> DeepseekV4Caches:
        copies.append((result := of(caches, *tensors)) is not caches)
        return result

    first, second = whole(layout=FP8), whole(layout=FP8)
    if together:
        put_in_one_allocation(first)
        put_in_one_allocation(second)
    expected = run(first, None, steps)
    monkeypatch.setattr(attention_module, "all_caches_of", look)

    assert run(second, compiler, steps).same(expected)
    assert len(copies) == 3 * len(steps)
    assert not any(copies) or compiler == "aot_eager"


@pytest.mark.usefixtures("few_objects")
def test_bytes_of_an_allocation_live_as_long_as_a_cache_in_it_is_bound() -> None:
    pages = torch.zeros(4, 2, 8, 32)
    caches = [PagedKVCache(pages[:, i], KVCacheLayout.rows(24, 8, dtype=torch.float32)) for i in range(2)]
    left, right = (op_tensor(cache) for cache in caches)
    assert left is not None
    assert right is not None
    assert left._base is right._base
    assert left.dtype == torch.uint8
    assert (left.data_ptr(), right.data_ptr()) == tuple(cache.tensor.data_ptr() for cache in caches)
    assert left.view(torch.float32).stride() == caches[0].tensor.stride()
    base = left._base
    del left
    gc.collect()
    again = op_tensor(caches[0])
    assert again is not None
    assert again._base is base is right._base


def test_memory_that_comes_back_in_another_allocation_is_not_taken_for_the_old_one() -> None:
    old, new = (torch.zeros(4, 2, 8, 32) for _ in range(2))
    of_old, of_new = (PagedKVCache(pages[:, 0], KVCacheLayout.rows(24, 8, dtype=torch.float32)) for pages in (old, new))
    known = op_tensor(of_old)
    assert known is not None
    assert known._base is not None
    old.untyped_storage().resize_(0)
    # as if the new allocation had the address of the old one
    layer_caches._allocations[new.data_ptr(), new.device] = known._base
    given_to_op = op_tensor(of_new)
    assert given_to_op is not None
    assert given_to_op.data_ptr() == new.data_ptr()


def test_a_cache_may_be_two_arguments_of_an_op() -> None:
    """As a functionalising compiler sees them: one tensor, whose copy both arguments share."""
    torch._dynamo.reset()
    stack, hidden = whole(2), torch.randn(8, SMALL.hidden_size)
    layer, positions = stack.layers[0], torch.arange(8)
    assert layer.caches is not None
    assert layer.caches.state is not None
    state = layer.caches.state.tensor

    def step(hidden: Tensor, positions: Tensor, state: Tensor) -> Tensor:
        arguments = None, None, state, None, state, None, None
        out: Tensor = attention_module._op(hidden * 1.0, positions, *arguments, layer._handle)
        return out

    with torch.no_grad(), set_forward_context(None):
        expected = layer(hidden, positions)
        actual = torch.compile(step, backend="aot_eager", fullgraph=True)(hidden, positions, state)
    assert torch.equal(actual, expected)


def test_the_ops_of_layers_pass_torchs_own_checks() -> None:
    stack = whole(1)
    requests = [(stack.manager.new(), 9)]
    layer, positions = stack.layers[0], stack.manager.positions(requests)
    caches = layer.caches
    assert caches is not None
    tensors = [cache.tensor for cache in caches.present.values()]
    with set_forward_context(stack.manager.metadata(stack.manager.batch(requests))):
        arguments = stack.hidden(0, 9), positions, *tensors, layer.topk_indices, None, layer._handle
        torch.library.opcheck(torch.ops.dsv4attn.attention_layer, arguments)


@pytest.mark.parametrize("made_by", [copy.copy, copy.deepcopy])
def test_a_compiled_copy_of_a_layer_writes_its_own_caches(
    made_by: Callable[[DeepseekV4Attention], DeepseekV4Attention],
) -> None:
    torch._dynamo.reset()
    stack = whole(0)
    layer, requests = stack.layers[0], [(stack.manager.new(), 9)]
    assert layer.caches is not None
    other = made_by(layer)
    fresh = PagedKVCache.allocate(FP32, layer.caches.attention.swa.num_blocks, layer.caches.attention.swa.block_size)
    other.bind_kv_cache(DeepseekV4Caches(attrs.evolve(layer.caches.attention, swa=fresh)))
    with torch.no_grad(), set_forward_context(stack.manager.metadata(stack.manager.batch(requests))):
        compiled = torch.compile(other, backend="aot_eager", fullgraph=True)
        compiled(stack.hidden(0, 9), stack.manager.positions(requests))

    assert fresh.tensor.any()
    assert not layer.caches.attention.swa.tensor.any()


def test_caches_are_bound_again_without_a_new_graph() -> None:
    torch._dynamo.reset()
    stack, count = whole(0), [0]
    layer, requests = stack.layers[0], [(stack.manager.new(), 9)]
    assert layer.caches is not None
    old = layer.caches.attention.swa

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        count[0] += 1
        return graph.forward

    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    fresh = PagedKVCache.allocate(FP32, old.num_blocks, old.block_size)
    with torch.no_grad(), set_forward_context(stack.manager.metadata(stack.manager.batch(requests))):
        compiled(stack.hidden(0, 9), stack.manager.positions(requests))
        layer.bind_kv_cache(DeepseekV4Caches(attrs.evolve(layer.caches.attention, swa=fresh)))
        compiled(stack.hidden(0, 9), stack.manager.positions(requests))

    assert count == [1]
    assert torch.equal(fresh.tensor, old.tensor)


@pytest.mark.usefixtures("few_objects")
def test_a_graph_of_a_layer_that_is_gone_says_so() -> None:
    stack = whole(0)
    handle = stack.layers[0]._handle
    positions = torch.arange(4)
    del stack
    gc.collect()
    with pytest.raises(Dsv4AttnError, match="no longer exists -> keep the layer alive"):
        attention_module._op(torch.zeros(4, SMALL.hidden_size), positions, *[None] * 7, handle)


STEP = st.lists(st.integers(1, 12), min_size=1, max_size=3)


@pytest.mark.matrix
@search(3)
@given(st.lists(STEP, min_size=1, max_size=4), st.sampled_from([(0,), (1,), (2,), (1, 0, 2), (2, 1, 1)]))
def test_compiled_equals_eager_for_any_layers_and_steps(steps: list[list[int]], kinds: tuple[int, ...]) -> None:
    numbered = [list(enumerate(step)) for step in steps]
    compiled, eager = (run(whole(*kinds), compiler, numbered) for compiler in ("aot_eager", None))
    assert compiled.same(eager)


def test_a_compiled_layer_refuses_memory_that_its_graph_does_not_know() -> None:
    """Caches in one allocation are views for the compiler, which stay with the old memory."""
    torch._dynamo.reset()
    whole = LayerStack(load_backend("reference"))
    layer, caches = whole.layers[1], whole.manager.caches[1]
    swa = caches.attention.swa
    larger = torch.zeros(3 * swa.tensor.untyped_storage().nbytes(), dtype=torch.uint8).view(swa.tensor.dtype)
    swa.tensor.data = larger[len(larger) // 3 :].as_strided(swa.tensor.shape, swa.tensor.stride())
    layer.bind_kv_cache(caches)
    hidden, sequence = whole.hidden(0, 20), whole.manager.new()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    positions = whole.manager.positions([(sequence, 20)])
    context = set_forward_context(whole.manager.metadata(whole.manager.batch([(sequence, 20)])))
    with torch.no_grad(), context:
        expected = compiled(hidden, positions)
        swa.tensor.data = torch.zeros_like(larger[: len(larger) // 3]).as_strided(swa.tensor.shape, swa.tensor.stride())
        with pytest.raises(ArgumentError, match=r"^caches of layers\.1: expected the memory .* -> call bind_kv_cache"):
            compiled(hidden, positions)
        assert not swa.tensor.any()
        layer.bind_kv_cache(caches)
        assert torch.equal(compiled(hidden, positions), expected)
    assert swa.tensor.any()

"""What whole layers must bear on an accelerator: long replays, pages far apart, NaN, garbage, thousands of decodes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4attn.core.cache.layer_caches import DeepseekV4Caches, LayerCaches
from dsv4attn.core.cache.layout import PagedKVCache
from dsv4attn.core.contract.limits import Limits
from dsv4attn.core.metadata.forward_context import set_forward_context
from dsv4attn.selection import load_backend
from tests.backends.test_layer_device import FP8, MODEL, NAMES, Graph, whole
from tests.harness import LayerStack, random_weights

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator with graphs"),
]

DEVICE = "cuda"
CSA = 1
"""The layer with an indexer."""
MIB = 2**20
all_backends = pytest.mark.parametrize("name", NAMES)


def stack(name: str, *, longest: int = 4096, num_blocks: dict[str, int] | None = None, **options: bool) -> LayerStack:
    """Layers on random pages, whose caches hold NaN at first. options: of the backend."""
    weights = {i: random_weights(MODEL, i, dtype=torch.bfloat16, device=DEVICE) for i in range(3)}
    sizes: dict[str, Any] = {"geometry": MODEL, "limits": Limits(4, 1024, longest), "num_blocks": num_blocks}
    places: dict[str, Any] = {"dtype": torch.bfloat16, "device": DEVICE, "weights": weights, "shuffle_seed": 5}
    made = LayerStack(load_backend(name, **options), FP8, **sizes, **places)
    made.poison_caches()
    return made


@all_backends
def test_a_graph_captured_with_padding_is_right_for_long_contexts(name: str) -> None:
    eager, captured = (whole(name, DEVICE, FP8, torch.bfloat16, deterministic=True) for _ in range(2))
    prompts = [eager.hidden(seed, n) for seed, n in enumerate((1, 1500, 3000, 4090))]
    sides: list[list[Any]] = []
    for layers in (eager, captured):
        sequences = [layers.manager.new() for _ in prompts]
        for sequence, prompt in zip(sequences, prompts, strict=True):
            for part in prompt.split(1024):
                layers.step([(sequence, part.shape[0])], part)
        sides.append([(sequence, 1) for sequence in sequences])
    graph = Graph(captured)

    for i in range(6):
        hidden = eager.hidden(50 + i, 4)
        outs, expected = graph.step(sides[1], hidden), eager.step(sides[0], hidden)
        # the metadata of the capture, without the graph
        with torch.no_grad(), set_forward_context(graph.metadata, as_captured=True):  # type: ignore[arg-type]
            again = [layer(graph.hidden, graph.positions) for layer in captured.layers]
        for out, want, other in zip(outs, expected, again, strict=True):
            assert torch.equal(out, want), i
            assert torch.equal(out, other), i


def far_apart(cache: PagedKVCache) -> PagedKVCache:
    """A cache of as many pages, one in each MiB, with NaN in the gaps."""
    tensor, stride = cache.tensor, MIB // cache.tensor.element_size()
    flat = torch.empty(cache.num_blocks * stride, dtype=tensor.dtype, device=tensor.device)
    flat.view(torch.uint8).fill_(0xFF)
    return PagedKVCache(flat.as_strided(tensor.shape, (stride, *tensor.stride()[1:])), cache.layout)


@all_backends
def test_pages_a_mebibyte_apart_change_no_bit(name: str) -> None:
    # pages of windows and entries then lie further apart than int32 counts bytes
    pages = {"window": 2304, "compressed": 2304}
    if DEVICE == "cuda" and torch.cuda.mem_get_info()[0] < 24 * 1024 * MIB:
        pytest.skip("needs 24 GiB of free memory")
    dense, apart = stack(name, num_blocks=pages), stack(name, num_blocks=pages)
    for layer, caches in zip(apart.layers, apart.manager.caches, strict=True):
        others = {
            key: None if cache is None else far_apart(cache)
            for key, cache in (("state", caches.state), ("index", caches.index), ("index_state", caches.index_state))
        }
        attention, compressed = caches.attention, caches.attention.compressed
        attention = LayerCaches(far_apart(attention.swa), None if compressed is None else far_apart(compressed))
        layer.bind_kv_cache(DeepseekV4Caches(attention, **others))
    hidden = dense.hidden(0, 1400)
    cuts = [1000, 1, 1, 396, 2]

    for out, want in zip(apart.cut(hidden, cuts)[1], dense.cut(hidden, cuts)[1], strict=True):
        assert torch.isfinite(out).all()
        assert torch.equal(out, want)


@all_backends
@pytest.mark.parametrize("deterministic", [False, True])
def test_entries_whose_score_is_nan_are_never_selected(name: str, *, deterministic: bool) -> None:
    here = stack(name, deterministic=True) if deterministic else stack(name)
    hidden = here.hidden(0, 1200)
    sequence, _ = here.cut(hidden[:1190], [1000, 190])
    index, blocks = here.manager.caches[CSA].index, torch.tensor(sequence.tables["compressed"].blocks, device=DEVICE)
    assert index is not None
    spoiled = torch.arange(0, 297, 3, device=DEVICE)
    index.region("scale")[blocks[spoiled // index.block_size], spoiled % index.block_size] = torch.nan
    for count in (9, 1):
        outs = here.step([(sequence, count)], hidden[sequence.length : sequence.length + count])
        rows = here.layers[CSA].topk_indices
        assert rows is not None
        assert all(torch.isfinite(out).all() for out in outs)
        for row in rows[:count]:
            assert row.unique().shape[0] == MODEL.index_topk
            assert row.min() >= 0
            assert row.max() < 300
            assert not torch.isin(row, spoiled.int()).any()


def outputs_with(name: str, garbage: int | None) -> list[Tensor]:
    """Outputs of steps before which the buffer of selected entries is filled with a number."""
    here = stack(name)
    hidden, sequence, outs = here.hidden(0, 1001), here.manager.new(), []
    for count in (200, 1, 700, 1, 3, 96):
        buffer = here.layers[CSA].topk_indices
        assert buffer is not None
        if garbage is not None:
            buffer.fill_(garbage)
        outs += here.step([(sequence, count)], hidden[sequence.length : sequence.length + count])
    return outs


@all_backends
def test_garbage_in_the_buffer_of_selected_entries_changes_no_bit(name: str) -> None:
    expected = outputs_with(name, None)
    for garbage in (0, 63, 2**31 - 1, 0x7FC00000, -7, -(2**31)):
        for out, want in zip(outputs_with(name, garbage), expected, strict=True):
            assert torch.equal(out, want), garbage


@pytest.mark.slow
@all_backends
def test_8000_deterministic_decodes_give_the_bits_of_one_pass(name: str) -> None:
    tokens = 8000
    here = stack(name, longest=8192, deterministic=True)
    hidden = here.hidden(0, tokens)
    prompt, expected = here.cut(hidden, [1000] * (tokens // 1000))
    here.manager.free(prompt)

    for out, want in zip(here.cut(hidden, [1] * tokens)[1], expected, strict=True):
        differing = (out != want).any(-1).nonzero().flatten()
        assert not differing.numel(), f"first at token {int(differing[0])}, {differing.numel()} in all"

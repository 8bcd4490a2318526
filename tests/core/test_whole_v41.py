"""`DeepseekV4Attention` on a network of DeepSeek-V4.1 in all roles, against float64, in any chunks."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import pytest
import torch

from dsv4attn.core.attention import DeepseekV4Attention
from dsv4attn.core.caches import DeepseekV4Caches, LayerCaches
from dsv4attn.core.compressor import LatentCompressor
from dsv4attn.core.context import set_forward_context
from dsv4attn.core.contract import Backend, complete
from dsv4attn.core.decoder_layer import DeepseekV41DecoderLayer
from dsv4attn.core.definitions import complete_steps
from dsv4attn.core.definitions.tiles import linear
from dsv4attn.core.geometry import LayerKind
from dsv4attn.core.hyper_connections import HyperConnections
from dsv4attn.core.layer_weights import AttentionWeights, HyperConnectionWeights
from dsv4attn.core.layout import KVCacheLayout
from dsv4attn.core.limits import Limits
from dsv4attn.core.metadata import AttentionMetadata, CompressorMetadata
from dsv4attn.errors import ArgumentError, Dsv4AttnError
from dsv4attn.selection import load_backend
from dsv4attn.testing import oracle_layer, oracle_v41
from tests.core.forms import same_bits
from tests.core.network_v41 import INDEX_OF, KV_OF, Steps
from tests.core.whole import Whole, random_weights
from tests.core.whole_v41 import BLOCKS, CONSUMER, PUBLISHER, SIZE, SMALL_V41, Exact, worst

FP32 = KVCacheLayout.rows(48, 16, dtype=torch.float32)
LIMITS = Limits(3, 48, 64, num_speculative_tokens=1)
ROUNDED = 2.0**-9
"""Error of an output whose latents are rounded to bf16, where fp32 may round to another neighbour than float64."""
SCHEDULES: dict[str, Steps] = {
    "whole": [[(0, 30), (1, 11), (2, 1)]],
    "chunks": [[(0, 3), (1, 1)], [(0, 9), (2, 5)], [(0, 14), (1, 22)]],
    "one by one": [[(0, 1)]] * 17,
    "mixed": [[(1, 8)], [(1, 7), (0, 20)], [(0, 1), (1, 1)], [(0, 1), (1, 1)], [(0, 1), (1, 1), (2, 40)]],
}


def network(
    layout: KVCacheLayout = FP32, backend: str = "reference", made: Backend | None = None, **options: Any
) -> Whole:
    """Layers whose caches, and buffers that indexers write, hold NaN and garbage at first."""
    given = {"geometry": SMALL_V41, "limits": LIMITS, "swa_block_size": 4, "compressed_block_tokens": 8, **options}
    whole = Whole(made or load_backend(backend), layout, shuffle_seed=3, **given)
    for caches in whole.manager.caches:
        for cache in caches.present.values():
            cache.tensor.fill_(0xFF if cache.tensor.dtype == torch.uint8 else torch.nan)
    for layer in whole.layers:
        if layer.topk_indices is not None:
            layer.topk_indices.fill_(3)
        if layer.candidates is not None:
            layer.candidates.blocks.fill_(0)
    return whole


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_role_is_right_in_any_chunks(schedule: str) -> None:
    assert worst(network(), SCHEDULES[schedule]) <= ROUNDED


FORMATS = {
    "584": {"layout": KVCacheLayout.fp8_ds_mla(48, 16, group_size=16)},
    "528": {"layout": KVCacheLayout.v41_fp8(48, 16), "index_layout": KVCacheLayout.index_mxfp4(32)},
    "288": {"layout": KVCacheLayout.v41_fp8(48, 16), "compressed_layout": KVCacheLayout.v41_fp4(48, 16)},
}


@pytest.mark.parametrize("form", FORMATS)
def test_every_role_is_right_on_records_of_codes(form: str) -> None:
    # a value that fp32 rounds to another code than float64 is off by up to an eighth, by half of it in fp4
    assert worst(network(**FORMATS[form]), SCHEDULES["mixed"], slack=0.2) <= 2.0**-5


def test_every_role_is_right_on_a_backend_of_kernels() -> None:
    sizes = {"head_dim": 512, "rope_dim": 64, "index_head_dim": 128, "num_heads": 2, "index_n_heads": 4}
    layout = KVCacheLayout.rows(dtype=torch.float32)
    whole = network(layout, "triton", geometry=attrs.evolve(SMALL_V41, **sizes))

    assert worst(whole, [[(1, 5)], [(0, 12), (1, 4)], [(0, 1), (1, 1)]]) <= ROUNDED


def test_layers_say_their_roles_and_their_sources() -> None:
    layers = network().layers

    roles = [layer.role.name for layer in layers]
    assert roles == ["WINDOW_ONLY", "FULL", "REUSE", "FULL", "FULL", "REUSE", "REINDEX", "REUSE"]
    assert [layer.sources.kv for layer in layers] == KV_OF
    assert [layer.sources.candidates for layer in layers] == [None] * CONSUMER + [PUBLISHER, None]
    assert layers[7].topk_indices is layers[6].topk_indices is not layers[4].topk_indices
    assert {i for i, layer in enumerate(layers) if layer.compressor} == {1, 3, 4}
    assert {i for i, layer in enumerate(layers) if layer.indexer} == {1, 3, 4, 6}


def test_one_buffer_of_selected_entries_serves_all_layers() -> None:
    shared = torch.full((48, 5), 9, dtype=torch.int32)
    one, each = network(layer_options={"topk_indices_buffer": shared}), network()
    hidden = each.hidden(1, 40)

    for left, right in zip(one.cut(hidden, [25, 1, 14])[1], each.cut(hidden, [25, 1, 14])[1], strict=True):
        assert torch.equal(left, right)


def test_a_deterministic_network_has_the_same_bits_in_any_chunks() -> None:
    backend = load_backend("reference", deterministic=True)
    found = []
    for cuts in ([48], [7, 1, 40], [23, 25]):
        whole = network(limits=attrs.evolve(LIMITS, single_phase=True), made=backend, keep_windows=True)
        sequence, outs = whole.cut(whole.hidden(1, 48), cuts)
        found.append([*outs, *whole.bytes_of(sequence)])

    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


# candidates


def candidates_matter(length: int) -> bool:
    """Whether outputs differ without candidates."""
    with_them, without = network(), network()
    indexer = without.layers[CONSUMER].indexer
    assert indexer is not None
    indexer._restricts = None
    hidden = with_them.hidden(1, length)
    outs = [whole.cut(hidden, [length])[1][CONSUMER] for whole in (with_them, without)]
    return not torch.equal(*outs)


def test_candidates_are_void_up_to_their_limit_and_effective_above() -> None:
    assert not candidates_matter(BLOCKS * SIZE)
    assert candidates_matter(6 * BLOCKS * SIZE)


# planted bugs


def consumer_inserts(whole: Whole) -> None:
    """Let a reuse layer write entries of its own to its source's cache."""
    reuse, given = whole.layers[2], random_weights(SMALL_V41, 3)
    weights = AttentionWeights.from_dict(given, SMALL_V41, 3).compressor
    assert weights is not None
    table, steps = reuse.attention.cos_sin_cache, complete(reuse.backend).layer_steps
    reuse.compressor = LatentCompressor(attrs.evolve(reuse.layer, compress_ratio=2), weights, table, steps, linear)
    assert reuse.caches is not None
    reuse.caches = attrs.evolve(reuse.caches, state=whole.manager.caches[3].state)


def other_choice(whole: Whole) -> None:
    """Let a reuse layer read the choice of the layer before its source."""
    whole.layers[7].attention.topk_indices_buffer = whole.layers[4].topk_indices


def no_candidates(whole: Whole) -> None:
    """Let a consumer select from all entries."""
    indexer = whole.layers[CONSUMER].indexer
    assert indexer is not None
    indexer._restricts = None


def own_cache(whole: Whole) -> None:
    """Let a reuse layer read the entries of the next owner."""
    swa, entries = (whole.manager.caches[i].attention for i in (2, 3))
    whole.layers[2].attention.bind_kv_cache(swa.swa, entries.compressed)


def queries_are_normalised(whole: Whole) -> None:
    """Normalise heads of q, as V4 does."""
    layer = whole.layers[5].attention
    layer.geometry = attrs.evolve(layer.geometry, q_norm=True)


BUGS = [consumer_inserts, other_choice, no_candidates, own_cache, queries_are_normalised]


@pytest.mark.parametrize("plant", BUGS)
def test_a_planted_bug_is_found(plant: Any) -> None:
    whole = network()
    plant(whole)
    try:
        error = worst(whole, [[(0, 40)], [(0, 3)]])
    except AssertionError:
        return

    assert error > 4 * ROUNDED


# bad input


def build(index: int, sources: Any = (), geometry: Any = SMALL_V41, **options: Any) -> DeepseekV4Attention:
    weights = AttentionWeights.from_dict(random_weights(geometry, index), geometry, index)
    backend = load_backend("reference")
    return DeepseekV4Attention(f"layers.{index}", geometry, index, LIMITS, backend, weights, sources=sources, **options)


def test_a_source_that_is_missing_or_does_not_fit_is_refused() -> None:
    layers = network().layers
    with pytest.raises(ArgumentError, match=r"^sources: expected layer 1, whose compressed entries layer 2 reads, got"):
        build(2)
    with pytest.raises(ArgumentError, match=r"^sources: expected layer 6, whose selected entries layer 7 reads, got"):
        build(7, layers[:6])
    other = attrs.evolve(SMALL_V41, index_topk=6)
    with pytest.raises(ArgumentError, match=r"^sources: layer 1: expected one of the same geometry"):
        build(2, layers[:2], other)
    elsewhere = build(1)
    elsewhere.device = torch.device("meta")
    with pytest.raises(ArgumentError, match=r"^sources: layer 1: expected one on cpu, as the weights of layer 2"):
        build(2, [elsewhere])
    short = build(1)
    short.limits = Limits(1, 8, 64)
    with pytest.raises(ArgumentError, match=r"^sources: layer 1: expected limits of at least 48 tokens in a step"):
        build(2, [short])


def test_a_buffer_of_another_width_or_owner_is_refused() -> None:
    layers, wide = network().layers, torch.zeros(48, 6, dtype=torch.int32)
    with pytest.raises(ArgumentError, match=r"^topk_indices_buffer: expected 5 columns, and at least 48 rows"):
        build(1, topk_indices_buffer=wide)
    with pytest.raises(
        ArgumentError, match=r"^topk_indices_buffer: expected None, or the tensor of the layer's source"
    ):
        build(2, layers[:2], topk_indices_buffer=wide[:, :5].clone())
    with pytest.raises(ArgumentError, match=r"^topk_indices_buffer: expected int32 on cpu, got int64 on cpu"):
        build(1, topk_indices_buffer=wide[:, :5].long())
    with pytest.raises(ArgumentError, match=r"^candidates_buffer: expected 4 columns, and at least 48 rows"):
        build(4, candidates_buffer=wide)
    with pytest.raises(ArgumentError, match=r"^candidates_buffer: expected None on layer 3, which has no candidates"):
        build(3, candidates_buffer=wide)


def test_weights_of_another_role_are_refused() -> None:
    given = random_weights(SMALL_V41, 4)
    for index, said in ((6, "a reindex c4a layer: .*'compressor.wkv'"), (7, "a reuse c4a layer"), (3, "wgate'")):
        with pytest.raises(ArgumentError, match=said):
            AttentionWeights.from_dict(given, SMALL_V41, index)
    with pytest.raises(ArgumentError, match=r"^layer: expected the number of the layer"):
        AttentionWeights.from_dict(given, SMALL_V41, SMALL_V41.layer(4))


def test_caches_of_a_source_are_taken_and_those_of_others_refused() -> None:
    whole = network()
    layers, caches = whole.layers, whole.manager.caches
    window = LayerCaches(caches[2].attention.swa)
    layers[2].bind_kv_cache(DeepseekV4Caches(window))
    assert layers[2].caches is not None
    assert layers[2].caches.attention.compressed is caches[1].attention.compressed
    with pytest.raises(
        ArgumentError, match=r"^caches.compressed: expected the cache of layer 1, the source of layer 2"
    ):
        layers[2].bind_kv_cache(DeepseekV4Caches(LayerCaches(window.swa, caches[3].attention.compressed)))
    with pytest.raises(ArgumentError, match=r"^caches.index: expected the cache of layer 4, the source of layer 6"):
        layers[6].bind_kv_cache(DeepseekV4Caches(caches[6].attention, index=caches[3].index))
    alone = build(2, [build(1)])
    with pytest.raises(Dsv4AttnError, match=r"layer layers.1 has no caches -> bind layers in order"):
        alone.bind_kv_cache(caches[2])


def test_a_step_that_does_not_fit_is_refused_before_anything_is_written() -> None:
    whole = network()
    requests = [(whole.manager.new(), 4)]
    metadata = whole.manager.metadata(whole.manager.batch(requests))
    before = [cache.tensor.clone() for caches in whole.manager.caches for cache in caches.present.values()]
    two, one = metadata[LayerKind.C4A, 2], metadata[LayerKind.C4A, 1]
    cut = CompressorMetadata(block_size=4, block_table=torch.zeros(1, 0, dtype=torch.int32))
    wrong: list[tuple[int, AttentionMetadata, str]] = [
        (3, one, r"^metadata.compressed.compress_ratio: expected 2"),
        (6, two, r"^metadata.compressed.compress_ratio: expected 1"),
        (
            1,
            AttentionMetadata(two.swa, two.compressed),
            r"has no compressor states -> give Batch.c4a_state_block_table",
        ),
        (1, AttentionMetadata(two.swa, two.compressed, cut), r"^metadata.state.block_table: expected blocks for at"),
        (2, AttentionMetadata(two.swa), r"^metadata.compressed: expected metadata of c4a layers"),
    ]
    for index, given, said in wrong:
        with pytest.raises(Dsv4AttnError, match=said), set_forward_context({(LayerKind.C4A, r): given for r in (1, 2)}):
            whole.layers[index](whole.hidden(1, 4), whole.manager.positions(requests))
    whole.layers[1].caches = whole.manager.caches[3]
    with pytest.raises(Dsv4AttnError, match=r"layers.1 got other caches .* bind layers.2 again"):
        with set_forward_context(metadata):
            whole.layers[2](whole.hidden(1, 4), whole.manager.positions(requests))

    after = [cache.tensor for caches in whole.manager.caches for cache in caches.present.values()]
    assert all(same_bits(a, b) for a, b in zip(before, after, strict=True))


# bounded replay


def replayed(first: int, start: int | None) -> tuple[Whole, list[torch.Tensor]]:
    """Tokens `first` .. 39 of a request that has the entries of 28 tokens: neither windows nor states are there."""
    whole, hit, end = network(keep_windows=True), 28, 40
    hidden, sequence = whole.hidden(1, 64), whole.manager.new()
    whole.step([(sequence, hit)], hidden[:hit])
    whole.manager.truncate(sequence, first)
    owned, requests = [whole.manager.caches[i] for i in (1, 3, 4)], [(sequence, end - first)]
    before = first_entries(sequence, owned, hit)
    for caches in whole.manager.caches:
        for cache in (caches.attention.swa, caches.state):
            if cache is not None:
                cache.tensor.fill_(torch.nan)
    batch = whole.manager.batch(requests)
    if start is not None:
        batch = attrs.evolve(batch, replay_start=torch.tensor([start], dtype=torch.int32))
    with set_forward_context(whole.manager.metadata(batch)):
        outs = [layer(hidden[first:end], whole.manager.positions(requests)) for layer in whole.layers]
    after = first_entries(sequence, owned, hit)
    assert start is None or all(torch.allclose(a, b, atol=1e-2) for a, b in zip(before, after, strict=True))
    return whole, outs


def first_entries(sequence: Any, owned: list[DeepseekV4Caches], tokens: int) -> list[torch.Tensor]:
    """Copies of the pages that are full of entries of the first tokens."""
    pages = sequence.tables["compressed"].blocks[: tokens // 8]
    caches = [each.attention.compressed for each in owned]
    return [cache.tensor[page].clone() for cache in caches if cache is not None for page in pages]


@pytest.mark.parametrize("start", [20, 21])
def test_windows_begin_with_the_tokens_that_are_replayed(start: int) -> None:
    whole, outs = replayed(start, start)
    index = whole.manager.caches[1].index
    assert index is not None
    exact = Exact(whole, index.layout, [1], 64)
    for i, out in enumerate(outs):
        topk = whole.layers[INDEX_OF[i] or 0].topk_indices
        for p in (start, start + 3, 28, 39):
            chosen = [] if topk is None or INDEX_OF[i] is None else [e for e in topk[p - start].tolist() if e != -1]
            wanted = exact.out(i, 0, p, chosen, earliest=start)
            assert np.linalg.norm(out[p - start].double().numpy() - wanted) <= ROUNDED * np.linalg.norm(wanted)

    unbounded = replayed(start, None)[1]
    assert all(out[0].isnan().all() for out in unbounded)


# hyper-connections


def test_decoder_layers_hand_the_pre_of_each_sublayer_to_the_next() -> None:
    whole, sizes, n = network(), SMALL_V41, SMALL_V41.hc_mult
    generator, m = torch.Generator().manual_seed(0), 2 * n + n * n
    around = [
        HyperConnectionWeights(
            torch.randn(m, n * sizes.hidden_size, generator=generator) * 0.1,
            torch.randn(m, generator=generator),
            torch.rand(3, generator=generator),
        )
        for _ in range(4)
    ]
    steps = complete_steps(whole.layers[0].backend)
    connected = [HyperConnections(sizes, weights, steps) for weights in around]
    layers = [DeepseekV41DecoderLayer(whole.layers[i], torch.tanh, *connected[2 * i : 2 * i + 2]) for i in (0, 1)]
    first = torch.randn(12, n, sizes.hidden_size, generator=generator)
    requests = [(whole.manager.new(), 12)]
    positions = whole.manager.positions(requests)
    with set_forward_context(whole.manager.metadata(whole.manager.batch(requests))):
        streams, pre = first, None
        for layer in layers:
            streams, pre = layer(streams, positions, pre)
        found = connected[3].collapse(streams, pre)
        wanted = mixed(
            first.double().numpy(), around, [whole.layers[0], torch.tanh, whole.layers[1], torch.tanh], positions
        )

    assert np.abs(found.double().numpy() - wanted).max() <= 1e-4 * np.abs(wanted).max()


def mixed(streams: Any, around: list[HyperConnectionWeights], sublayers: list[Any], positions: torch.Tensor) -> Any:
    """The same by the oracle, sublayer by sublayer. Attention runs on what the oracle made."""
    sizes, n, pre = SMALL_V41, SMALL_V41.hc_mult, None
    for weights, run in zip(around, sublayers, strict=True):
        fn, base, scale = (getattr(weights, name).double().numpy() for name in ("fn", "base", "scale"))
        inputs = [oracle_v41.collapse(x, None if pre is None else pre[t]) for t, x in enumerate(streams)]
        given = torch.from_numpy(np.stack(inputs)).float()
        output = (run(given) if run is torch.tanh else run(given, positions)).double().numpy()
        after, weighed = [], []
        for x, y in zip(streams, output, strict=True):
            logits = oracle_layer.hc_logits(oracle_layer.hc_mixes(x, fn, sizes.eps), scale, base, (n, n, n * n))
            weighed.append(oracle_layer.sigmoid(logits[0]) + sizes.hc_eps)
            comb = oracle_layer.sinkhorn(logits[2].reshape(n, n), sizes.hc_eps, sizes.hc_sinkhorn_iters)
            after.append(oracle_layer.hc_post(y, x, 2 * oracle_layer.sigmoid(logits[1]), comb))
        streams, pre = np.stack(after), np.stack(weighed)
    return np.stack([oracle_v41.collapse(x, weights) for x, weights in zip(streams, pre, strict=True)])


# an engine's own rings of states


def test_rings_of_one_block_are_states_too() -> None:
    whole, pages = network(), network()
    ring = torch.tensor([[2]], dtype=torch.int32)  # one block of 4 tokens: the ratio, and a draft
    hidden, sequence, found = whole.hidden(1, 40), whole.manager.new(), []
    for part in hidden.split([5, 1, 1, 2, 31]):
        requests = [(sequence, part.shape[0])]
        batch = attrs.evolve(whole.manager.batch(requests), c4a_state_block_table=ring)
        with set_forward_context(whole.manager.metadata(batch)):
            found.append([layer(part, whole.manager.positions(requests)) for layer in whole.layers])
        whole.manager.advance(requests)

    wanted = pages.cut(hidden, [5, 1, 1, 2, 31])[1]
    for i, outs in enumerate(zip(*found, strict=True)):
        assert torch.equal(torch.cat(outs), wanted[i])
    batch = attrs.evolve(whole.manager.batch([(sequence, 1)]), c4a_state_block_table=ring - 3)
    with pytest.raises(ArgumentError, match=r"^c4a_state_block_table\[0, 0\]: expected a block in \[0, "):
        whole.manager.metadata(batch)
    none = attrs.evolve(batch, c4a_state_block_table=torch.zeros(1, 0, dtype=torch.int32))
    with pytest.raises(ArgumentError, match=r"^Batch.c4a_state_block_table: expected at least 1 columns"):
        whole.manager.metadata(none)

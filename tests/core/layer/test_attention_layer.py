"""`DeepseekV4Attention` on paged caches: cuts, prefixes, forks, drafts, padding, NaN, memory, errors."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dsv4attn.core.cache.layout import KVCacheLayout
from dsv4attn.core.contract.limits import Limits
from dsv4attn.core.memory.plan import plan_workspace
from dsv4attn.core.metadata.forward_context import set_forward_context
from dsv4attn.core.model.weights import AttentionWeights
from dsv4attn.errors import ArgumentError, Dsv4AttnError, LayoutMismatchError, OutOfPagesError
from dsv4attn.selection import load_backend
from dsv4attn.testing.checks.whole_layer import _fill, _padding_batch
from tests.harness import FP8, FP32, SMALL, LayerStack, assert_outputs_close, random_weights

LIMITS = Limits(4, 64, 256)
LAYOUTS = {"fp32": FP32, "bf16": KVCacheLayout.rows(24, 8), "fp8": FP8}


def invariant(layout: KVCacheLayout = FP32, **options: object) -> LayerStack:
    """Layers whose bits depend on a token's own history alone."""
    backend = load_backend("reference", deterministic=True)
    return LayerStack(backend, layout, limits=LIMITS, keep_windows=True, **options)  # type: ignore[arg-type]


def same(left: list[Tensor], right: list[Tensor]) -> None:
    for a, b in zip(left, right, strict=True):
        assert torch.equal(a, b)


# any cut of tokens into steps


@pytest.mark.parametrize(
    "layout",
    [pytest.param(LAYOUTS[name], id=name, marks=[] if name == "fp8" else pytest.mark.matrix) for name in LAYOUTS],
)
# the kit's cases of clause D2 draw steps too
@settings(max_examples=5)
@given(cuts=st.lists(st.integers(1, 40), min_size=1, max_size=6), seed=st.integers(0, 3))
def test_g23_any_cut_gives_the_same_bytes_and_outputs(layout: KVCacheLayout, cuts: list[int], seed: int) -> None:
    cuts = [*cuts, 1, 1][: next((i for i, _ in enumerate(cuts) if sum(cuts[: i + 1]) > 60), len(cuts))] or [5]
    whole, total = invariant(layout), sum(cuts)
    hidden = whole.hidden(seed, total)

    whole_sequence, outs = whole.cut(hidden, [total])
    other, parts = whole.cut(hidden, cuts)

    same(parts, outs)
    same(whole.bytes_of(other), whole.bytes_of(whole_sequence))


def test_g24_a_token_has_the_same_bits_alone_in_a_batch_and_after_padding() -> None:
    whole = invariant(FP8)
    hidden = [whole.hidden(seed, n) for seed, n in ((1, 30), (2, 7), (3, 1))]
    alone = [invariant(FP8).cut(part, [part.shape[0]])[1] for part in hidden]

    requests = [(whole.manager.new(), part.shape[0]) for part in hidden]
    padded = torch.cat([*hidden, torch.full((5, SMALL.hidden_size), torch.nan)])
    together = whole.run(requests, padded, padding=5)

    for i, out in enumerate(together):
        same(list(out[:38].split([30, 7, 1])), [outs[i] for outs in alone])


# several sequences, drafts, prefixes, forks


def test_g15_rejected_drafts_leave_no_trace() -> None:
    whole = invariant(FP8)
    hidden, drafts = whole.hidden(0, 40), whole.hidden(9, 40)
    expected, outs = whole.cut(hidden, [40])
    sequence, done, parts = whole.manager.new(), 0, []
    for accepted in (17, 1, 2, 1, 3, 4, 12):
        step = torch.cat([hidden[done : done + accepted], drafts[:3]])
        step_outs = whole.step([(sequence, accepted + 3)], step)
        parts.append([out[:accepted] for out in step_outs])
        done += accepted
        whole.manager.truncate(sequence, done)
    # the last drafts are in the caches still: the next tokens overwrite them
    assert done == 40
    same([torch.cat(part) for part in zip(*parts, strict=True)], outs)
    next_hidden = whole.hidden(5, 9)
    same(whole.step([(sequence, 9)], next_hidden), whole.step([(expected, 9)], next_hidden))


def test_windows_slide_and_a_fork_of_the_present_needs_nothing_else() -> None:
    backend = load_backend("reference", deterministic=True)
    whole = LayerStack(backend, FP8, limits=LIMITS, swa_block_size=4, compressed_block_tokens=64)
    hidden = whole.hidden(0, 90)
    sequence, _ = whole.cut(hidden[:80], [64, 16])
    expected = invariant(FP8).cut(hidden, [64, 26])[1]

    assert whole.manager._pools["window"].num_free >= whole.manager._pools["window"].num_blocks - 3
    fork = whole.manager.fork(sequence)
    for branch in (sequence, fork):
        same(whole.step([(branch, 10)], hidden[80:]), [out[80:] for out in expected])
    with pytest.raises(ArgumentError, match=r"^length: expected a length whose \w+ pages, .* -> make the manager"):
        whole.manager.fork(sequence, 40)


# NaN stays where it is


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_unused_bytes_never_reach_an_output(layout: KVCacheLayout) -> None:
    whole = invariant(layout)
    hidden = whole.hidden(0, 50)
    expected = whole.cut(hidden, [50])[1]
    whole.poison_caches()

    same(whole.cut(hidden, [13, 1, 30, 6])[1], expected)


def test_nan_hidden_states_stay_in_their_request() -> None:
    whole = invariant(FP8)
    sick, well = whole.hidden(0, 30), whole.hidden(1, 40)
    sick[11] = torch.nan
    expected = whole.cut(well, [25, 15])[1]
    sick_sequence, well_sequence = whole.manager.new(), whole.manager.new()

    first = whole.step([(sick_sequence, 30), (well_sequence, 25)], torch.cat([sick, well[:25]]))
    second = whole.step([(well_sequence, 15)], well[25:])

    for a, b, want in zip(first, second, expected, strict=True):
        assert torch.equal(torch.cat([a[30:], b]), want)
        assert not a[:11].isnan().any()
        assert a[11].isnan().all()


# memory


def test_a_failed_step_can_be_run_again() -> None:
    whole = invariant(FP8, num_blocks={"compressed": 1})
    hidden = whole.hidden(0, 60)
    first, second = whole.manager.new(), whole.manager.new()
    whole.step([(first, 20)], hidden[:20])
    with pytest.raises(OutOfPagesError, match="1 compressed pages needed, 0 of 1 are free"):
        whole.run([(first, 4), (second, 4)], hidden[20:28])

    assert (first.length, second.length) == (20, 0)
    assert not any(table.blocks for table in second.tables.values())
    again = whole.run([(first, 4)], hidden[20:24])
    same(whole.step([(first, 4)], hidden[20:24]), again)
    whole.manager.free(first)
    whole.step([(second, 4)], hidden[:4])
    with pytest.raises(ArgumentError, match="expected a sequence of this manager, got one that was freed"):
        whole.manager.batch([(first, 1)])


def test_a_warm_up_reserves_the_plan_and_later_steps_fit_it() -> None:
    whole = LayerStack(load_backend("reference"))
    with set_forward_context(None):
        for layer in whole.layers:
            assert not layer(whole.hidden(0, 4), torch.zeros(4, dtype=torch.int64)).any()
    whole.workspace.lock()

    whole.cut(whole.hidden(0, 100), [64, 1, 35])


def test_the_plan_of_a_whole_layer_counts_its_steps() -> None:
    backend, layer = load_backend("triton"), SMALL.layer(1)

    plans = [plan_workspace(layer, LIMITS, backend, FP8, layer_parts=whole) for whole in (False, True)]

    assert plans[0].transient_bytes == 0
    assert plans[1].transient_bytes == backend.layer_ops.transient_bytes(64) > 0


# bad input


def bound(**changes: object) -> None:
    weights: dict[str, object] = dict(random_weights(SMALL, 1))
    weights.update(changes)
    AttentionWeights.from_dict({k: v for k, v in weights.items() if v is not None}, SMALL, SMALL.layer(1))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"wq_c": torch.zeros(1)}, r"^weights: expected names of a c4a layer: wq_a, .*, got 'wq_c'; did you mean"),
        ({"wq_b": None}, r"^weights\['wq_b'\]: expected a weight \(128, 24\), got nothing"),
        ({"wq_b": torch.zeros(127, 24)}, r"^weights.wq_b: expected shape \[128, 24\], got \[127, 24\] -> pass"),
        ({"wq_a": torch.zeros(48, 24)}, r"^weights.wq_a: expected shape \[24, 48\], got \[48, 24\] -> transpose it"),
        ({"wq_a": torch.zeros(24, 48).half()}, r"^weights.wq_a: expected bfloat16 or float32, or fp8 .* got float16"),
        ({"wq_a": torch.zeros(24, 48, dtype=torch.int8)}, r"^weights.wq_a: expected bfloat16 .* got int8"),
        ({"q_norm": torch.nn.Linear(2, 2)}, r"^weights.q_norm: expected a tensor, got Linear -> pass its .weight"),
        ({"layers.1.attn.wq_d.weight": torch.zeros(1)}, r"^weights: expected names .* got 'layers.1.attn.wq_d.weight'"),
        ({"layers.1.indexer.wq_b.weight": torch.zeros(1)}, r"weights: .*; did you mean 'indexer.wq_b'"),
        ({"compressor.ape": torch.zeros(4, 32)}, r"^weights.compressor.ape: expected shape \[4, 64\], got \[4, 32\]"),
        ({"indexer.compressor.norm": torch.zeros(31)}, r"^weights.indexer.compressor.norm: expected shape \[32\], got"),
        ({"wo_a": "a string"}, r"^weights.wo_a: expected a tensor, a BlockScaledWeight, or .*, got str"),
    ],
)
def test_a_weight_of_another_shape_or_name_is_refused(changes: dict[str, object], said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        bound(**changes)


def test_contexts_beyond_the_model_are_refused() -> None:
    with pytest.raises(ArgumentError, match=r"max_model_len: expected at most 4096, the max_position_embeddings"):
        LayerStack(load_backend("reference"), limits=Limits(1, 8, 4097))
    whole = LayerStack(load_backend("reference"), limits=Limits(1, 16, 12))
    with pytest.raises(ArgumentError, match=r"^requests: expected at most 12 tokens in a sequence, .*, got 13"):
        whole.manager.batch([(whole.manager.new(), 13)])


def test_caches_and_calls_that_do_not_fit_are_refused() -> None:
    whole = LayerStack(load_backend("reference"))
    swa, c4a, c128a = whole.manager.caches
    layer = whole.layers[1]
    for caches, said in (
        (attrs.evolve(c4a, state=None), r"^caches.state: expected a cache of states on a c4a layer, got None"),
        (attrs.evolve(c4a, state=c128a.state), r"^caches.state: expected layout KVCacheLayout.compressor_state\(64\)"),
        (attrs.evolve(c4a, index=None), r"^caches.index: expected index keys, got None"),
        (attrs.evolve(c4a, index=c4a.state), r"^caches.index: expected a layout of index keys of 32 dims, got"),
        (attrs.evolve(c4a, attention=swa.attention), r"^caches.compressed: expected the compressed cache of a c4a"),
    ):
        with pytest.raises((ArgumentError, LayoutMismatchError), match=said):
            layer.bind_kv_cache(caches)
    with pytest.raises(ArgumentError, match=r"^caches.index: expected none on a swa layer"):
        whole.layers[0].bind_kv_cache(attrs.evolve(swa, index=c4a.index))
    hidden, positions = whole.hidden(0, 3), torch.arange(3)
    with pytest.raises(ArgumentError, match=r"^hidden_states: expected \[T, 48\] float32"):
        layer(hidden[:, :40], positions)
    with pytest.raises(ArgumentError, match=r"^positions: expected \[T\] int64 with T=3"):
        layer(hidden, positions[:2])
    with pytest.raises(ArgumentError, match=r"^positions: expected a tensor on cpu, like hidden_states, got"):
        layer(hidden, positions.to("meta"))
    with pytest.raises(Dsv4AttnError, match="no step is being run"):
        layer(hidden, positions)


def test_a_rank_holds_its_heads_and_the_sum_of_the_ranks_is_the_layer() -> None:
    whole = LayerStack(load_backend("reference"))
    hidden = whole.hidden(0, 40)
    expected = whole.cut(hidden, [30, 10])[1]
    local, ranks = SMALL.tensor_parallel(2), []
    for rank in range(2):
        parts = {}
        for i in range(3):
            weights = AttentionWeights.from_dict(random_weights(SMALL, i), SMALL, SMALL.layer(i))
            parts[i] = dict(weights.shard(rank, 2).named())
        ranks.append(LayerStack(load_backend("reference"), geometry=local, weights=parts).cut(hidden, [30, 10])[1])

    assert_outputs_close([left + right for left, right in zip(*ranks, strict=True)], expected, 2e-6)


def test_metadata_by_prefix_bring_the_states_of_a_layer() -> None:
    whole, other = invariant(), invariant()
    hidden = whole.hidden(0, 30)
    expected = other.cut(hidden, [30])[1][1]
    requests, layer = [(whole.manager.new(), 30)], whole.layers[1]
    metadata = whole.manager.metadata(whole.manager.batch(requests))[layer.layer.kind]
    named = {"layers.1.swa_cache": metadata.swa, "layers.1": metadata.compressed}

    with set_forward_context({**named, "layers.1.state": metadata.state}):
        assert torch.equal(layer(hidden, whole.manager.positions(requests)), expected)
    with (
        set_forward_context(named),
        pytest.raises(Dsv4AttnError, match=r"layers\.1 has no compressor states -> give Batch\.c4a_state"),
    ):
        layer(hidden, whole.manager.positions(requests))


def test_dead_state_pages_and_narrow_tables_are_refused_before_anything_is_written() -> None:
    whole = invariant()
    sequence, _ = whole.cut(whole.hidden(0, 30), [30])
    batch = whole.manager.batch([(sequence, 5)])
    table = batch.c4a_state_block_table
    assert table is not None
    dead = table.clone()
    dead[0, 7] = -1
    for wrong, said in (
        (dead, r"^c4a_state_block_table\[0, 7\]: expected a block in \[0, \d+\) for the states of positions 28 and on"),
        (table[:, :8], r"^Batch.c4a_state_block_table: expected at least 9 columns for the 35 records of request 0"),
    ):
        with pytest.raises(ArgumentError, match=said):
            whole.manager.metadata(attrs.evolve(batch, c4a_state_block_table=wrong))


def test_a_layer_made_in_inference_mode_runs_out_of_it_and_with_parameters() -> None:
    weights = {i: {k: torch.nn.Parameter(v) for k, v in random_weights(SMALL, i).items()} for i in range(3)}
    with torch.inference_mode():
        whole = LayerStack(load_backend("reference"), weights=weights)
        hidden = whole.hidden(0, 20)
        expected = whole.cut(hidden, [20])[1]
    outs = whole.cut(hidden.clone(), [20])[1]

    same(outs, expected)
    assert not any(out.requires_grad for out in outs)


# selection


def test_short_contexts_select_everything_without_scores_but_never_while_a_graph_is_captured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole, selected_counts = LayerStack(load_backend("reference")), list[int]()
    hidden = whole.hidden(0, 15)  # at most three entries, all of which are selected
    steps = whole.layers[1].backend.layer_ops
    select = steps.select_topk

    def counted(*arguments: object) -> None:
        selected_counts.append(arguments[-1])  # type: ignore[arg-type]
        select(*arguments)

    for layer in whole.layers:
        if layer.indexer is not None:
            layer.indexer._ops = attrs.evolve(steps, select_topk=counted)
    expected = whole.cut(hidden, [10, 5])[1]
    assert not selected_counts
    monkeypatch.setattr("dsv4attn.core.layer.indexer.is_capturing", lambda _: True)
    outs = whole.cut(hidden, [10, 5])[1]

    assert selected_counts == [whole.limits.max_model_len // 4] * 2
    same(outs, expected)


def test_the_metadata_of_a_capture_run_again_as_captured_select_what_a_longer_step_selects() -> None:
    whole = invariant(geometry=attrs.evolve(SMALL, index_topk=2))
    whole.layers[1].indexer._shortcut = True  # type: ignore[union-attr]
    hidden, manager = whole.hidden(0, 61), whole.manager
    sequence, _ = whole.cut(hidden[:60], [60])
    step = [(sequence, 1)]

    def run(metadata: Any, *, as_captured: bool) -> list[Tensor]:
        with torch.no_grad(), set_forward_context(metadata, as_captured=as_captured):
            outs = [layer(hidden[60:], manager.positions(step)) for layer in whole.layers]
        selected = whole.layers[1].topk_indices
        assert selected is not None
        return [selected[:1].clone(), *outs]

    batch = _padding_batch(manager, 1)
    of_capture = manager.metadata(batch, full_width=True)  # the host's lengths are those of padding
    _fill(batch, manager.batch(step))
    expected = run(manager.metadata(batch, full_width=True), as_captured=False)

    same(run(of_capture, as_captured=True), expected)
    selected = run(of_capture, as_captured=False)[0]
    assert selected.tolist() == [[0, 1]]  # as if no token saw more than two entries
    assert not torch.equal(selected, expected[0])


@pytest.mark.parametrize("index", [KVCacheLayout.index_fp8(32), KVCacheLayout.index_mxfp4(32)], ids=["fp8", "mxfp4"])
def test_quantised_index_keys_select_the_same_in_any_cut(index: KVCacheLayout) -> None:
    whole = invariant(FP32, index_layout=index)
    hidden = whole.hidden(0, 70)
    whole_sequence, outs = whole.cut(hidden, [64, 6])
    other, parts = whole.cut(hidden, [3, 40, 1, 26])

    same(parts, outs)
    same(whole.bytes_of(other), whole.bytes_of(whole_sequence))
    exact = invariant(FP32).cut(hidden, [64, 6])[1]
    same([outs[0], outs[2]], [exact[0], exact[2]])
    assert not torch.equal(outs[1], exact[1])  # rounded scores select other entries now and then

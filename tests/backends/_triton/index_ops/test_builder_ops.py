"""The builder's ops in Triton against their definition in plain torch, alone and as a whole build."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import attrs
import pytest
import torch
from attrs import fields
from hypothesis import strategies as st
from torch import Tensor

from dsv4attn.backends._triton.index_ops import builder as kernels
from dsv4attn.backends._triton.index_ops import dense as index_kernels
from dsv4attn.backends._triton.interpreted import INTERPRETED
from dsv4attn.backends._triton.launching.runtime import observed
from dsv4attn.core.cache.ownership import Ownership
from dsv4attn.core.cache.selected_keys import PageTable, StepTokens
from dsv4attn.core.context_parallel.metadata import OwnedMetadataBuilder
from dsv4attn.core.contract.builder_ops import BuilderOps
from dsv4attn.core.contract.limits import Limits
from dsv4attn.core.metadata.builder import MetadataBuilder
from dsv4attn.core.metadata.metadata import AttentionMetadata, Batch
from dsv4attn.core.model.geometry import LayerKind, ModelGeometry
from dsv4attn.testing.kit.random_step import StepFixture
from tests.backends._triton.index_ops.index_trials import (
    BOOL,
    DEVICE,
    INT,
    LONG,
    Trial,
    ascending,
    loose,
    numbers,
    operations,
    small_rounds,
    spoiled,
    table_of,
    to_device,
    with_changed,
)
from tests.core.attention.strategies import other_windows, scenarios, searched
from tests.harness import slots_of

RANDOMS = st.randoms(use_true_random=False)
interpreted = pytest.mark.skipif(not INTERPRETED, reason="a compiled kernel cannot be changed from outside")


def ragged(rng: Random) -> tuple[list[int], Tensor, Tensor]:
    """Query lengths, query_start_loc and seq_lens of some requests, now and then shorter than their queries."""
    counts = [rng.choice([0, 0, 1, 2, 5, 11]) for _ in range(rng.randint(0, 5))]
    lens = [max(n + rng.choice([0, 1, rng.randint(0, 50), -2]), 0) for n in counts]
    return counts, ascending(rng, counts), loose(torch.tensor(lens, dtype=INT), rng)


def token_maps(rng: Random) -> Trial:
    counts, starts, _ = ragged(rng)
    tokens = sum(counts) + rng.choice([0, 0, 3])
    slots = numbers(rng, (max(tokens + rng.randint(-3, 3), 0),), lambda: rng.choice([-1, -(2**40), 0, 5, 2**40]), LONG)
    return Trial("build_token_maps", (starts, slots), (((tokens,), INT), ((tokens,), BOOL)))


def tokens_of(rng: Random, counts: list[int]) -> tuple[Tensor, Tensor]:
    """Request and validity of the tokens of a batch; either says that a token is not real."""
    requests = [i if rng.random() < 0.9 else -1 for i, n in enumerate(counts) for _ in range(n)]
    valid = [rng.random() < 0.8 for _ in requests]
    return torch.tensor(requests, dtype=INT), torch.tensor(valid, dtype=BOOL)


def replayed(rng: Random, counts: list[int]) -> dict[str, Tensor]:
    """Now and then the first position of each request that a window may have, and more elements after them."""
    if rng.random() < 0.5:
        return {}
    bounds = [rng.choice([0, 1, rng.randint(0, 50), 2**31 - 1]) for _ in range(len(counts) + rng.randint(0, 2))]
    return {"replay_start": torch.tensor(bounds, dtype=INT)}


def windows(rng: Random) -> Trial:
    """The windows of a run of tokens, some under blocks that are gone, in rows of their size or wider; and blocks."""
    counts, starts, lens = ragged(rng)
    requests, valid = tokens_of(rng, counts)
    first = rng.randint(0, len(requests))
    last, window = rng.randint(first, len(requests)), rng.choice([1, 3, 8, 11])
    part = slice(first, last)
    tokens = StepTokens(starts, lens, requests[part], valid[part], first)
    args = tokens, PageTable(*table_of(rng, len(counts))), window
    rows, width, replay = last - first, window + rng.choice([0, 0, 5, 30]), replayed(rng, counts)
    options = {**replay, "causal": rng.random() < 0.5} if width > window else replay
    outs = ((rows, width), INT), ((rows + rng.randint(0, 20),), INT)
    return Trial("build_window_indices", args, outs, options)


def gather_lens(rng: Random) -> Trial:
    counts, starts, lens = ragged(rng)
    replay_start = replayed(rng, counts)
    return Trial("build_gather_lens", (starts, lens, rng.choice([1, 3, 8])), [((len(counts),), INT)], replay_start)


def compressed(rng: Random) -> Trial:
    """Slots and lengths of entries, in buffers longer than the batch."""
    counts, starts, lens = ragged(rng)
    requests, valid = tokens_of(rng, counts)
    tokens, pages = StepTokens(starts, lens, requests, valid), PageTable(*table_of(rng, len(counts)))
    args = tokens, pages, rng.choice([1, 2, 4, 5])
    size = len(requests) + rng.randint(0, 20)
    return Trial("build_compressed_slot_mapping", args, (((size,), LONG), ((size,), INT)))


def owned(rng: Random) -> Trial:
    """The same of one rank of several."""
    trial, size = compressed(rng), rng.choice([1, 2, 3, 8])
    ownership = Ownership(rng.randrange(size), size, rng.choice([1, 1, 2, 5, 64]))
    return Trial("build_owned_slot_mapping", (ownership, *trial.args), trial.outs)


def cached(rng: Random) -> Trial:
    """Tokens below the end of a prefix hit, some of them of no request, with more ends than requests."""
    counts, starts, lens = ragged(rng)
    requests, valid = tokens_of(rng, counts)
    ends = [rng.choice([0, -3, 1, rng.randint(0, 60), 2**31 - 1]) for _ in range(len(counts) + rng.randint(0, 2))]
    tokens = StepTokens(starts, lens, requests.masked_fill(~valid, -1), valid)
    args = tokens, loose(torch.tensor(ends, dtype=INT), rng)
    return Trial("build_cached_mask", (*args, rng.choice([1, 1, 2, 4])), [((len(requests),), BOOL)])


OPS = [token_maps, windows, gather_lens, compressed, owned, cached]
all_ops = pytest.mark.parametrize("make", OPS)


@all_ops
@searched(60, rng=RANDOMS)
def test_an_op_equals_its_definition(make: Callable[[Random], Trial], rng: Random) -> None:
    with small_rounds(kernels):
        assert make(rng).agrees(kernels)


@all_ops
def test_an_op_compiles_only_foreseen_forms(make: Callable[[Random], Trial]) -> None:
    with observed() as seen:
        for seed in range(20):
            make(Random(seed)).agrees(kernels)

    foreseen = {variant for window in (1, 3, 8, 11) for variant in kernels.variants(window)}
    # one kernel serves two ops: of all entries, and of those of one rank
    kinds = {(v.name, dict(v.constants).get("OWNED")) for v in seen}
    assert set(seen) == {v for v in foreseen if (v.name, dict(v.constants).get("OWNED")) in kinds}
    assert seen


# whole builds


def built(scenario: StepFixture, ops: BuilderOps, **options: Any) -> AttentionMetadata:
    """Metadata of a scenario's batch on the device under test."""
    builder = MetadataBuilder(
        scenario.geometry,
        scenario.limits,
        swa_block_size=scenario.swa_block_size,
        compressed_block_tokens=scenario.compressed_block_tokens,
        device=DEVICE or "cpu",
        builder_ops=ops,
        **options,
    )
    return builder.build_for(moved(scenario.batch(), to_device), [scenario.kind])[scenario.kind]


def moved(batch: Batch, move: Callable[[Any], Any]) -> Batch:
    """Return a batch whose tensors are elsewhere, but for those of the host."""
    fields: dict[str, Any] = {f.name: getattr(batch, f.name) for f in attrs.fields(Batch)}
    return Batch(**{n: value if n.endswith("_cpu") else move(value) for n, value in fields.items()})


def tensors(metadata: AttentionMetadata) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of both parts, by name."""
    for part in (metadata.swa, metadata.compressed):
        if part is not None:
            for f in attrs.fields(type(part)):
                value = getattr(part, f.name)
                if isinstance(value, Tensor):
                    yield f"{type(part).__name__}.{f.name}", value


@searched(80, scenario=st.one_of(scenarios(), other_windows()), validate=st.booleans())
def test_a_build_with_kernels_equals_one_with_torch(scenario: StepFixture, validate: bool) -> None:
    expected = dict(tensors(built(scenario, BuilderOps(), validate=False)))
    for name, got in tensors(built(scenario, kernels.BUILDER_OPS, validate=validate)):
        # past its width the table of c128a is not cleared: no op reads it there
        assert torch.equal(got, expected[name]), name


def flash() -> tuple[MetadataBuilder, Batch]:
    """Return a builder for a large model and a mixed batch of it."""
    query, seq = [1, 1, 0, 3, 200, 40], [5000, 1, 7, 260, 900, 40]
    lens, starts = torch.tensor(seq, dtype=INT), torch.tensor([0, *query], dtype=INT).cumsum(0).to(INT)
    table = torch.arange(6 * 80, dtype=INT).view(6, 80)
    batch = Batch(
        num_reqs=6,
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=lens,
        seq_lens_cpu=lens,
        slot_mapping=torch.tensor(slots_of(query, seq, table, 64)),
        block_table=table,
        compressed_block_table=table,
    )
    limits = Limits(8, 512, 8192, num_speculative_tokens=2)
    builder = MetadataBuilder(
        ModelGeometry.preset("flash"), limits, device=DEVICE or "cpu", builder_ops=kernels.BUILDER_OPS
    )
    return builder, moved(batch, to_device)


def test_a_build_of_all_kinds_is_a_handful_of_launches_of_foreseen_forms() -> None:
    builder, batch = flash()
    with observed() as seen:
        builder.build_for(batch, list(LayerKind))
        builder.build_for(batch, [LayerKind.SWA])

    assert len(seen) == 7 + 4
    assert set(seen) <= {*kernels.variants(builder.geometry.window), *index_kernels.variants()}


@pytest.mark.parametrize("rank", [0, 1])
def test_a_build_of_one_rank_is_as_many_launches_and_equals_one_with_torch(rank: int) -> None:
    _, batch = flash()
    ownership, builds = Ownership(rank, 2), []
    for ops in (kernels.BUILDER_OPS, BuilderOps()):
        limits = Limits(8, 512, 8192, num_speculative_tokens=2)
        builder = OwnedMetadataBuilder(
            ownership, ModelGeometry.preset("flash"), limits, device=DEVICE or "cpu", builder_ops=ops
        )
        with observed() as seen:
            builds.append(builder.build_for(batch, list(LayerKind)))
        if ops is kernels.BUILDER_OPS:
            assert len(seen) == 7
            assert set(seen) <= {*kernels.variants(builder.geometry.window), *index_kernels.variants()}

    for kind in LayerKind:
        expected = dict(tensors(builds[1][kind]))
        for name, got in tensors(builds[0][kind]):
            assert torch.equal(got, expected[name]), name


def test_the_next_build_stands_where_the_last_one_stood() -> None:
    builder, batch = flash()
    kinds = list(LayerKind)
    addresses = [(name, t.data_ptr()) for kind in kinds for name, t in tensors(builder.build_for(batch, kinds)[kind])]
    again = [(name, t.data_ptr()) for kind in kinds for name, t in tensors(builder.build_for(batch, kinds)[kind])]

    assert [(n, a) for n, a in addresses if "cpu" not in n] == [(n, a) for n, a in again if "cpu" not in n]


class Silent:
    """Steps that only count their calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: self.calls.append(name)


def test_given_ops_the_builder_reads_nothing_from_a_device_and_allocates_nothing_there() -> None:
    """On the meta device, whose tensors have no values to read."""
    _, batch = flash()
    silent = Silent()
    ops = BuilderOps(**{field.name: getattr(silent, field.name) for field in fields(BuilderOps)})
    limits = Limits(8, 512, 8192, num_speculative_tokens=2)
    builder = MetadataBuilder(ModelGeometry.preset("flash"), limits, device="meta", builder_ops=ops)
    elsewhere = moved(batch, lambda value: value.to("meta") if isinstance(value, Tensor) else value)
    with operations() as ran:
        builder.build_for(elsewhere, list(LayerKind))

    assert not builder.validate
    on_device = {name for name, device in ran if device != "cpu"}
    assert on_device == {"expand", "select", "slice", "zero_"}, "views, and a tail cleared in place"
    assert len(silent.calls) == 7
    silent.calls.clear()
    hits = torch.zeros(6, dtype=INT, device="meta")
    with operations() as ran:
        builder.build_for(attrs.evolve(elsewhere, num_cached_tokens=hits, replay_start=hits), list(LayerKind))
    assert {name for name, device in ran if device != "cpu"} == on_device | {"masked_fill_"}
    assert len(silent.calls) == 7 + 2


def test_a_batch_of_nothing_clears_what_the_last_one_left() -> None:
    builder, batch = flash()
    full = builder.build_for(batch, list(LayerKind))
    lens = [full[LayerKind.SWA].swa.decode_swa_lens, full[LayerKind.SWA].swa.prefill_swa_lens]
    entries = full[LayerKind.CSA].compressed
    assert entries is not None
    lens.append(entries.compressed_lens)
    assert all(bool(t.any()) for t in lens)
    nothing = torch.zeros(1, dtype=INT)
    none = torch.zeros(0, dtype=INT)
    table = torch.zeros(0, 0, dtype=INT)
    empty = Batch(
        num_reqs=0,
        query_start_loc=nothing,
        query_start_loc_cpu=nothing,
        seq_lens=none,
        seq_lens_cpu=none,
        slot_mapping=none.long(),
        block_table=table,
        compressed_block_table=table,
    )

    assert builder.build_for(moved(empty, to_device), list(LayerKind))[LayerKind.SWA].swa.num_actual_tokens == 0
    assert not any(bool(t.any()) for t in lens)
    assert bool((entries.slot_mapping == -1).all())


# bugs that must be found


other = attrs.evolve
PLANTED: list[tuple[Callable[[Random], Trial], str, Callable[..., tuple[Any, ...]]]] = [
    (token_maps, "build_token_maps", lambda starts, slots: (starts + 1, slots)),
    (token_maps, "build_token_maps", lambda starts, slots: (starts, slots + 1)),
    (windows, "build_window_indices", lambda *args: (other(args[0], first=args[0].first + 1), *args[1:])),
    (
        windows,
        "build_window_indices",
        lambda run, pages, window: (run, other(pages, block_table=pages.block_table.clamp(min=0)), window),
    ),
    (windows, "build_window_indices", lambda *args: (*args[:2], args[2] + 1)),
    (gather_lens, "build_gather_lens", lambda starts, lens, window: (starts, lens, window + 1)),
    (
        compressed,
        "build_compressed_slot_mapping",
        lambda tokens, *args: (other(tokens, is_valid=torch.ones_like(tokens.is_valid)), *args),
    ),
    (compressed, "build_compressed_slot_mapping", lambda *args: (*args[:2], args[2] + 1)),
    (
        owned,
        "build_owned_slot_mapping",
        lambda ownership, *args: (other(ownership, interleave=ownership.interleave + 1), *args),
    ),
    (owned, "build_owned_slot_mapping", lambda ownership, *args: (other(ownership, size=ownership.size + 1), *args)),
    (owned, "build_owned_slot_mapping", lambda ownership, *args: (other(ownership, rank=0), *args)),
    (cached, "build_cached_mask", lambda tokens, ends, ratio: (tokens, ends + 1, ratio)),
    (cached, "build_cached_mask", lambda tokens, ends, _: (tokens, ends, 1)),
    (
        cached,
        "build_cached_mask",
        lambda tokens, *args: (other(tokens, token_to_req=tokens.token_to_req.clamp(min=0)), *args),
    ),
]


@pytest.mark.mutation
@interpreted
@pytest.mark.parametrize(("make", "name", "bug"), PLANTED, ids=[f"{i}-{p[0].__name__}" for i, p in enumerate(PLANTED)])
def test_a_planted_bug_is_found(make: Any, name: str, bug: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, name, with_changed(getattr(kernels, name), bug))
    with small_rounds(kernels):
        assert not all(make(Random(seed)).agrees(kernels) for seed in range(40))


def test_the_inputs_hold_what_they_should() -> None:
    """Padding, requests without tokens, sequences shorter than their query, dead blocks: none is left out by luck."""
    trials = [windows(Random(seed)) for seed in range(100)]
    blocks = torch.cat([trial.args[1].block_table.flatten() for trial in trials])
    firsts = {trial.args[0].first for trial in trials}

    assert bool((blocks < 0).any())
    assert bool((blocks > 2**27).any())
    assert 0 in firsts
    assert max(firsts) > 0
    assert any(bool((trial.args[0].query_start_loc.diff() > trial.args[0].seq_lens).any()) for trial in trials)
    assert {0, 1} <= {trial.outs[0][0][0] for trial in trials}
    assert {True, False, None} == {trial.keywords.get("causal") for trial in trials}
    assert any("replay_start" in trial.keywords for trial in trials)
    assert spoiled(Random(0), 0, [-1]) == -1

"""Metadata of the rocm backend: its ragged lists hold what the dense tables hold, in memory that never moves."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import attrs
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from dsv4attn.backends._triton.index_ops import dense as kernels
from dsv4attn.backends._triton.interpreted import INTERPRETED
from dsv4attn.backends.rocm.launch import RocmBackend
from dsv4attn.backends.rocm.metadata import RaggedCompressedMetadata, RaggedWindowMetadata
from dsv4attn.backends.triton.launch import GenericBackend
from dsv4attn.core.cache.selected_keys import RaggedIndices, RequestRows
from dsv4attn.core.contract.backend import Backend
from dsv4attn.core.contract.builder_ops import BuilderOps
from dsv4attn.core.contract.index_ops import IndexOp, IndexOps, index_op
from dsv4attn.core.contract.limits import Limits
from dsv4attn.core.contract.phased import PhasedBackend
from dsv4attn.core.metadata.builder import MetadataBuilder
from dsv4attn.core.metadata.metadata import AttentionMetadata, Batch, CompressedMetadata, WindowMetadata
from dsv4attn.core.model.geometry import LayerKind
from dsv4attn.errors import ArgumentError
from dsv4attn.testing.kit.factories import tiny_geometry
from dsv4attn.testing.kit.random_step import StepFixture
from tests.backends._triton.attention.mutants import mutate
from tests.backends._triton.cache.caches import DEVICE
from tests.core.attention.strategies import searched
from tests.harness import all_kinds, assert_same_bits, same_bits

MODEL = tiny_geometry()
LIMITS = Limits(6, 60, 5000, num_speculative_tokens=1)
SWA_BLOCK, TOKENS_OF_BLOCK = 4, 32
INT = torch.int32
C128A = LayerKind.HCA
GONE = [-1, -(2**31), 2**31 - 1]
"""Blocks whose slots do not exist."""
GARBAGE = [0, 3, -1, -7, -(2**31), 2**31 - 1, 0x7FC00000]
"""What may stand after the last row: slots of other requests, and numbers that are none."""


def builder(backend: Backend | None = None, **options: Any) -> MetadataBuilder:
    sizes: dict[str, Any] = {"swa_block_size": SWA_BLOCK, "compressed_block_tokens": TOKENS_OF_BLOCK}
    return MetadataBuilder(MODEL, LIMITS, device=DEVICE, validate=False, backend=backend, **sizes, **options)


def requests_of(rng: Random) -> list[tuple[int, int]]:
    """(prefix, query) of a batch: decodes first, with contexts from none to the longest."""
    longest = LIMITS.max_model_len - 20
    counts = sorted((rng.choice([0, 1, 1, 2, 2, 9]) for _ in range(rng.randint(0, 6))), key=lambda n: n > 2)
    return [(rng.choice([0, 7, 2047, 2048, longest, rng.randint(0, longest)]), count) for count in counts]


def batch_of(requests: list[tuple[int, int]], rng: Random) -> Batch:
    """A batch, now and then with tokens of no request and with blocks that are gone."""
    tokens = sum(count for _, count in requests)
    starts = torch.tensor([0, *(count for _, count in requests)], dtype=INT).cumsum(0).to(INT)
    lens = torch.tensor([context + count for context, count in requests], dtype=INT)
    g = torch.Generator().manual_seed(rng.randrange(2**31))
    columns = -(-LIMITS.max_model_len // SWA_BLOCK)
    table = torch.randint(0, 2**20, (len(requests), columns), generator=g, dtype=INT)
    gone = torch.tensor(GONE, dtype=INT)[torch.randint(0, 3, table.shape, generator=g)]
    table = torch.where(torch.rand(table.shape, generator=g) < rng.choice([0.0, 0.2]), gone, table)
    return Batch(
        num_reqs=len(requests),
        query_start_loc=starts.to(DEVICE),
        query_start_loc_cpu=starts,
        seq_lens=lens.to(DEVICE),
        seq_lens_cpu=lens,
        slot_mapping=torch.tensor([rng.choice([-1, 0, 5, 9]) for _ in range(tokens)], dtype=torch.int64, device=DEVICE),
        block_table=table.to(DEVICE),
        compressed_block_table=table.to(DEVICE),
    )


def rows_of(ragged: RaggedIndices | None) -> list[list[int]]:
    """Rows of a list, each of them within its width."""
    assert ragged is not None
    bounds, flat = ragged.indptr.tolist(), ragged.indices.tolist()
    assert bounds[0] == 0
    assert bounds[-1] <= len(flat)
    assert all(0 <= b - a <= ragged.width for a, b in pairwise(bounds))
    return [flat[a:b] for a, b in pairwise(bounds)]


def leading(indices: Tensor | None, lens: Tensor | None) -> list[list[int]]:
    """Leading columns of dense rows [T, 1, K]."""
    assert indices is not None
    assert lens is not None
    return [row[: min(max(n, 0), len(row))] for row, n in zip(indices[:, 0].tolist(), lens.tolist(), strict=True)]


def extended(metadata: Any) -> tuple[RaggedWindowMetadata, RaggedCompressedMetadata]:
    """Both parts, in the backend's own classes."""
    assert isinstance(metadata.swa, RaggedWindowMetadata)
    assert isinstance(metadata.compressed, RaggedCompressedMetadata)
    return metadata.swa, metadata.compressed


# what the lists hold


@searched(40, rng=st.randoms(use_true_random=False))
def test_every_row_is_what_torch_puts_into_the_dense_table(rng: Random) -> None:
    """Slots in their places, -1 where a block is gone, and no row for a token that sees nothing."""
    requests, seed = requests_of(rng), rng.randrange(2**31)
    kinds = [LayerKind.CSA, C128A]
    metadata = builder(RocmBackend()).build_for(batch_of(requests, Random(seed)), kinds)
    expected = builder(builder_ops=BuilderOps()).build_for(batch_of(requests, Random(seed)), kinds)
    swa, compressed = extended(metadata[C128A])
    plain = expected[C128A].compressed
    assert plain is not None

    dense = expected[C128A].swa
    assert rows_of(swa.decode_swa_ragged) == leading(dense.decode_swa_indices, dense.decode_swa_lens)
    entries = leading(plain.c128a_global_decode_topk_indices, plain.c128a_decode_topk_lens)
    assert rows_of(compressed.c128a_decode_ragged) == entries
    assert extended(metadata[LayerKind.CSA])[1].c128a_decode_ragged is None


def test_the_batches_hold_what_they_should() -> None:
    """Rows of every length, absent blocks inside them, tables of every width, and no decode tokens at all."""
    windows, entries, widths = [], [], set()
    rng = Random(0)
    for _ in range(60):
        metadata = builder(builder_ops=BuilderOps()).build_for(batch_of(requests_of(rng), rng), [C128A])[C128A]
        part = metadata.compressed
        assert part is not None
        assert part.c128a_global_decode_topk_indices is not None
        windows.append(leading(metadata.swa.decode_swa_indices, metadata.swa.decode_swa_lens))
        entries.append(leading(part.c128a_global_decode_topk_indices, part.c128a_decode_topk_lens))
        widths.add(part.c128a_global_decode_topk_indices.shape[2])

    assert {len(row) for rows in windows for row in rows} >= {0, 1, 8}
    lengths = {len(row) for rows in entries for row in rows}
    assert min(lengths) == 0
    assert max(lengths) > 300
    for tables in (windows, entries):
        assert any(-1 in row[:-1] for rows in tables for row in rows)
        assert {0, 1, 2} < {len(rows) for rows in tables}
    assert widths == {128, 256, 384}


def test_a_class_is_the_shared_one_and_more() -> None:
    metadata = builder(RocmBackend()).build_for(batch_of([(30, 1), (9, 2), (0, 20)], Random(0)), [C128A])[C128A]
    swa, compressed = extended(metadata)
    plain = builder(builder_ops=BuilderOps()).build_for(batch_of([(30, 1), (9, 2), (0, 20)], Random(0)), [C128A])[C128A]

    assert isinstance(swa, WindowMetadata)
    assert isinstance(compressed, CompressedMetadata)
    for mine, shared in ((swa, plain.swa), (compressed, plain.compressed)):
        assert shared is not None
        for f in attrs.fields(type(shared)):
            actual, expected = getattr(mine, f.name), getattr(shared, f.name)
            if isinstance(expected, RequestRows):
                actual, expected = actual.token_to_req, expected.token_to_req
            assert torch.equal(actual, expected) if isinstance(expected, Tensor) else actual == expected, f.name
    assert plain.swa.decode_swa_ragged is None
    assert plain.compressed is not None
    assert plain.compressed.c128a_decode_ragged is None


def test_a_model_without_c128a_layers_has_no_list_for_them() -> None:
    model = attrs.evolve(MODEL, layers=tuple(pair for pair in MODEL.layers if pair[0] is not C128A))
    metadata_builder = MetadataBuilder(
        model,
        LIMITS,
        swa_block_size=SWA_BLOCK,
        compressed_block_tokens=TOKENS_OF_BLOCK,
        device=DEVICE,
        validate=False,
        backend=RocmBackend(),
    )
    swa, compressed = extended(
        metadata_builder.build_for(batch_of([(30, 1)], Random(0)), [LayerKind.CSA])[LayerKind.CSA]
    )

    assert len(rows_of(swa.decode_swa_ragged)) == 1
    assert compressed.c128a_decode_ragged is None


# where the lists stand


def lists(metadata: Any) -> list[RaggedIndices]:
    swa, compressed = extended(metadata)
    assert compressed.c128a_decode_ragged is not None
    return [swa.decode_swa_ragged, compressed.c128a_decode_ragged]


def test_addresses_and_sizes_follow_from_the_number_of_rows_alone() -> None:
    metadata_builder, rng = builder(RocmBackend()), Random(1)
    seen: dict[int, Any] = {}
    widths, batches = set[int](), 0
    for _ in range(40):
        batch = batch_of(requests_of(rng), rng)
        metadata = metadata_builder.build_for(batch, [C128A])[C128A]
        rows = metadata.swa.num_decode_tokens
        places = [(t.data_ptr(), t.numel()) for ragged in lists(metadata) for t in (ragged.indices, ragged.indptr)]
        assert seen.setdefault(rows, places) == places
        assert [places[1][1], places[3][1]] == [rows + 1, rows + 1]
        widths.add(lists(metadata)[1].width)
        batches += 1

    assert widths == {128, 256, 384}
    assert 5 < len(seen) < batches
    assert len({tuple(place[0] for place in places) for places in seen.values()}) == 1, "all begin at the same place"


def test_at_full_width_nothing_but_contents_changes() -> None:
    """As a captured graph needs it: one batch of padding, and then any others of as many rows."""
    metadata_builder, rng, addresses = builder(RocmBackend()), Random(2), []
    for requests in ([(0, 1)] * 6, [(4000, 1)] * 6, [(17, 1), (2048, 1), (0, 1)] * 2):
        batch = batch_of(requests, rng)
        swa = metadata_builder.build(batch)
        part = metadata_builder.build_compressed(batch, swa, C128A, full_width=True)
        ragged = lists(AttentionMetadata(swa, part))
        addresses.append([(r.width, r.indices.data_ptr(), r.indices.numel(), r.indptr.data_ptr()) for r in ragged])

    assert addresses[0] == addresses[1] == addresses[2]


def test_a_full_batch_of_full_rows_fits() -> None:
    """As many decode tokens as there can be, each with as many entries as there can be."""
    last = [(LIMITS.max_model_len - 2, 2)] * LIMITS.max_num_reqs
    batch = batch_of(last, Random(3))
    batch.slot_mapping.fill_(0)
    window, entries = lists(builder(RocmBackend()).build_for(batch, [C128A])[C128A])

    rows = LIMITS.max_decode_tokens
    assert window.indptr.tolist() == [8 * i for i in range(rows + 1)]
    assert window.indices.numel() == 8 * rows
    counts = [LIMITS.max_model_len // 16 - (i % 2 == 0) * (LIMITS.max_model_len % 16 == 0) for i in range(rows)]
    assert entries.indptr.diff().tolist() == counts


# what stands after the last row does not matter

DECODES = [(90, 1), (0, 1), (33, 2, 1), (20, 2), (7, 1, 1)]


def decoding(kind: LayerKind) -> StepFixture:
    return StepFixture(
        kind=kind, requests=DECODES, num_speculative_tokens=1, topk="garbage", poison=0xFF, device=DEVICE.type
    )


def poisoned(kind: LayerKind) -> Iterator[bool]:
    """Run a step, and again with other garbage after the last rows: whether the bits are the same."""
    problem = decoding(kind).problem(RocmBackend())
    clean = problem.run(RocmBackend())
    parts = [problem.metadata.swa.decode_swa_ragged]
    if problem.metadata.compressed is not None:
        parts.append(problem.metadata.compressed.c128a_decode_ragged)
    ragged_lists = [ragged for ragged in parts if ragged is not None]
    assert len(ragged_lists) == 1 + (kind is C128A)
    for ragged in ragged_lists:
        tail = ragged.indices[int(ragged.indptr[-1]) :]
        assert tail.numel()
        for offset in (0, 3):
            numbers = torch.tensor(GARBAGE, dtype=INT).roll(offset)
            tail.copy_(numbers.repeat(-(-tail.numel() // len(GARBAGE)))[: tail.numel()])
            yield all(map(same_bits, problem.run(RocmBackend()), clean))


@all_kinds
def test_what_stands_behind_the_last_row_changes_no_bit(kind: LayerKind) -> None:
    decoding(kind).check(RocmBackend())

    assert all(poisoned(kind))


@pytest.mark.mutation
@all_kinds
@pytest.mark.skipif(not INTERPRETED, reason="a compiled kernel cannot be changed from outside")
def test_a_reader_behind_the_last_row_is_found(
    kind: LayerKind, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    last = sum(count for _, count, *_ in DECODES) - 1
    mutate(monkeypatch, tmp_path, "attention", "end - start", f"end - start + tl.where(token == {last}, 3, 0)")

    assert not all(poisoned(kind))


# fields are checked

WRONG: dict[str, tuple[str, Any]] = {
    "numbers of 64 bits": ("decode_swa_ragged_indices", lambda t: t.long()),
    "starts of 64 bits": ("decode_swa_ragged_indptr", lambda t: t.long()),
    "a start too few": ("decode_swa_ragged_indptr", lambda t: t[:-1]),
    "a start too many": ("decode_swa_ragged_indptr", lambda t: torch.cat([t, t[-1:]])),
    "dense rows": ("decode_swa_ragged_indices", lambda t: t[None]),
    "no list": ("decode_swa_ragged_indices", lambda _: None),
    "another device": ("decode_swa_ragged_indptr", lambda t: t.to("meta")),
    "entries of 64 bits": ("c128a_decode_topk_ragged_indices", lambda t: t.long()),
    "starts of entries of 16 bits": ("c128a_decode_topk_ragged_indptr", lambda t: t.short()),
    "starts of fewer tokens": ("c128a_decode_topk_ragged_indptr", lambda t: t[:-1]),
    "floats": ("c128a_decode_topk_ragged_indices", lambda t: t.float()),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_field_that_is_not_what_it_should_be_is_refused(what: str) -> None:
    name, change = WRONG[what]
    metadata = builder(RocmBackend()).build_for(batch_of([(30, 1), (2000, 2)], Random(0)), [C128A])[C128A]
    part: Any = extended(metadata)[name.startswith("c128a")]
    with pytest.raises(ArgumentError, match=rf"^{type(part).__name__}\.{name}: expected"):
        attrs.evolve(part, **{name: change(getattr(part, name))})


# who uses them


def noting(calls: list[str], *missing: str) -> IndexOps:
    """The shared ops, which note each call; a few may be missing."""

    def noted(name: str) -> IndexOp:
        op: IndexOp = getattr(kernels.INDEX_OPS, name)

        def run(*args: Any, **keywords: Any) -> None:
            calls.append(name)
            op(*args, **keywords)

        return index_op(run)

    ops: dict[str, Any] = {name: None if name in missing else noted(name) for name in (PACK, TRANSLATE, RAGGED)}
    return attrs.evolve(kernels.INDEX_OPS, **ops)


PACK, TRANSLATE = "build_ragged_indices_from_dense", "compute_global_topk_indices_and_lens"
RAGGED = "compute_global_topk_ragged_indices_and_indptr"
CALLS = {
    LayerKind.SWA: {"own": [], "shared": [PACK], "few": [PACK]},
    LayerKind.CSA: {"own": [RAGGED], "shared": [PACK, RAGGED], "few": [PACK, TRANSLATE, PACK]},
    C128A: {"own": [], "shared": [PACK, PACK], "few": [PACK, PACK]},
}


@all_kinds
@pytest.mark.parametrize("whose", ["own", "shared", "few"])
def test_a_layer_makes_only_the_lists_that_its_metadata_lacks(kind: LayerKind, whose: str) -> None:
    """own: the metadata of rocm. shared: the shared classes. few: also without an op that makes ragged rows."""
    scenario, backend = decoding(kind), RocmBackend()
    problem = scenario.problem(backend)
    clean = problem.run(backend)
    scenario.compare(*clean)
    if whose != "own":
        plain = MetadataBuilder(
            scenario.geometry,
            scenario.limits,
            swa_block_size=scenario.swa_block_size,
            compressed_block_tokens=scenario.compressed_block_tokens,
            device=DEVICE,
        )
        problem = attrs.evolve(problem, metadata=plain.build_for(scenario.batch(), [kind])[kind])
    calls = list[str]()
    backend.index_ops = noting(calls, *[RAGGED] if whose == "few" else [])

    assert_same_bits(problem.run(backend), clean)
    assert sorted(calls) == sorted(CALLS[kind][whose])


def test_a_pair_has_the_metadata_of_the_backend_that_decodes() -> None:
    batch = batch_of([(30, 1), (0, 20)], Random(0))
    metadata = builder(PhasedBackend(RocmBackend(), GenericBackend())).build_for(batch, [C128A])[C128A]
    other = builder(PhasedBackend(GenericBackend(), RocmBackend())).build_for(batch, [C128A])[C128A]

    assert len(rows_of(extended(metadata)[0].decode_swa_ragged)) == 1
    assert type(other.swa) is WindowMetadata
    assert type(other.compressed) is CompressedMetadata


@all_kinds
@pytest.mark.parametrize("decodes", ["rocm", "triton"])
def test_a_pair_attends_what_its_metadata_says(kind: LayerKind, decodes: str) -> None:
    pair = [RocmBackend(), GenericBackend()]
    backend = PhasedBackend(*(pair if decodes == "rocm" else pair[::-1]))
    requests = [*DECODES, (30, 9)]

    StepFixture(kind=kind, requests=requests, num_speculative_tokens=1, device=DEVICE.type).check(backend)

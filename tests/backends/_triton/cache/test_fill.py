"""Two launches fill the rows and lists of a gathered chunk with the bytes that the separate ops define."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from attrs import evolve, frozen
from torch import Tensor

from dsv4attn.backends._triton.cache import fill, kernels_gather
from dsv4attn.backends._triton.index_ops import dense
from dsv4attn.backends._triton.launching.runtime import observed
from dsv4attn.backends.reference.launch import ReferenceBackend
from dsv4attn.core.attention.gathered import fill_by_ops
from dsv4attn.core.cache.layer_caches import LayerCaches
from dsv4attn.core.cache.layout import KVCacheLayout, PagedKVCache
from dsv4attn.core.cache.selected_keys import ChunkRows, ChunkTokens, DenseIndices, PageTable, RaggedIndices
from dsv4attn.core.contract.backend import KeyForm
from dsv4attn.core.contract.device import DeviceFacts
from dsv4attn.core.model.geometry import LayerKind
from dsv4attn.testing.kit.factories import tiny_geometry, v41_layouts
from dsv4attn.testing.kit.random_step import StepFixture
from tests.backends._triton.cache.caches import DEVICE, LAYOUTS
from tests.backends._triton.cache.test_gather import DEAD, Pages
from tests.backends._triton.engine import launching_nothing
from tests.backends._triton.index_ops.index_trials import (
    BOOL,
    INT,
    NUMBERS,
    ascending,
    numbers,
    operations,
    planted,
    small_rounds,
    spoiled,
    to_device,
)
from tests.backends._triton.triton_backends import bounds_of
from tests.backends.built_in import forms
from tests.harness import bytes_of

GATHERING = {name: make for name, make in forms().items() if make().capabilities.prefill_keys is KeyForm.GATHERED}
PAIRS = [(0, 0), (3, 3), (12, 14), (13, 15), (4, None), (9, 9), (11, 11), (3, None), (16, None)]
"""Window and compressed layouts, by their numbers in LAYOUTS; None on window-only layers."""
FILLED = 7


def table_of(pages: Pages, rng: Random, requests: int, records: int) -> Tensor:
    """Blocks of requests, some of them dead, with believable numbers between the rows of the table."""
    full = [b for b in range(pages.blocks) if all(b * pages.size + i in pages.values for i in range(pages.size))]
    columns = max(-(-records // pages.size) + rng.choice([-1, 0, 1]), 0)
    table = torch.tensor(
        [[rng.choice(full * 3 + DEAD) for _ in range(columns + 2)] for _ in range(requests)], dtype=INT
    )
    return table[:, :columns]


@frozen
class Chunk:
    """A chunk that is filled twice over: what differs between layers comes with each filling."""

    chunk: ChunkRows
    topk: tuple[Tensor | None, Tensor | None]
    caches: LayerCaches

    @classmethod
    def draw(cls, rng: Random, layout: KVCacheLayout, entries: KVCacheLayout | None) -> Chunk:
        """A random chunk, of whole requests or of a part of one."""
        cut, ratio, window = rng.random() < 0.5, rng.choice([1, 2, 4]), rng.choice([1, 3, 8])
        counts = [rng.randint(1, 9)] if cut else [rng.choice([0, 1, 2, 5]) for _ in range(rng.randint(1, 4))]
        tail, n = rng.choice([0, 0, 1, 5]) if cut else 0, len(counts)
        lens = [count + tail + rng.choice([0, 1, rng.randint(0, 20)]) for count in counts]
        own_lens = [length - tail for length in lens]
        tokens, longest = max(sum(counts), 1), max(lens)
        # fewer than a window reaches where a request is computed again from a position on
        contexts = [
            rng.randint(0, min(length - count - tail, window - 1)) for count, length in zip(counts, lens, strict=True)
        ]
        gathers = [count + tail + context for count, context in zip(counts, contexts, strict=True)]
        # the host has upper bounds
        offset = max(max(own_lens) // ratio + rng.choice([0, 0, 3]), 0) if entries else 0
        reach = max(count + min(length - count, window - 1) for count, length in zip(counts, own_lens, strict=True))
        if rng.random() < 0.3:
            lens[-1], gathers[-1] = rng.choice([(0, 0), (-5, 3), (2, 9), (lens[-1], 0), (lens[-1], -4)])
        topk = rng.choice([0, 1, 4]) if entries else 0
        width, windows = topk + window + rng.randint(0, 3), Pages(layout, rng.randrange(100))
        compressed = Pages(entries, rng.randrange(100)) if entries else None
        spare = longest + window
        blocks: PageTable | None = None
        if compressed is not None:
            of = table_of(compressed, rng, n, longest // ratio)
            blocks = PageTable(of, compressed.size, compressed.blocks)
        lists = DenseIndices(torch.zeros(tokens, width, dtype=INT), torch.zeros(tokens, dtype=INT))
        flat = RaggedIndices(torch.zeros(tokens * width, dtype=INT), torch.zeros(tokens + 1, dtype=INT), width)
        starts = counts if not cut else [counts[0] + tail]
        columns = rng.choice([1, topk + 2, 9])
        chosen = [numbers(Random(rng.random()), (tokens, columns), lambda: spoiled(rng, 24, NUMBERS)) for _ in "ab"]
        chosen = [tensor.contiguous() for tensor in chosen]
        rows = max(offset + reach, 1)
        tokens_of_chunk = ChunkTokens(
            seq_lens=torch.tensor(lens, dtype=INT),
            gather_lens=torch.tensor(gathers, dtype=INT),
            query_start_loc=ascending(rng, starts, rng.choice([0, 7])).contiguous(),
            visible_lens=numbers(rng, (tokens,), lambda: rng.randint(0, 24)) if entries else None,
            is_valid=numbers(rng, (tokens,), lambda: rng.random() < 0.8, BOOL),
            window=window,
            topk=topk,
            offset=offset,
            rows=rows,
        )
        chunk = ChunkRows(
            tokens=tokens_of_chunk,
            kv=torch.full((n, rows, layout.head_dim), FILLED, dtype=layout.row_dtype),
            combined=lists,
            ragged=flat if rng.random() < 0.5 else None,
            tail=tail if cut else None,
            swa=PageTable(table_of(windows, rng, n, spare), windows.size, windows.blocks),
            compressed=blocks,
            ratio=ratio,
            lengths=torch.zeros(3, n, dtype=INT),
            starts=torch.zeros(n + 1, dtype=INT),
        )
        both = [pages for pages in (windows, compressed) if pages is not None]
        topks = (chosen[0], chosen[1]) if entries else (None, None)
        caches = LayerCaches(*[pages.cache for pages in both])
        return cls(chunk, topks, caches)

    def agrees(self, prepare: Any) -> bool:
        """Whether a step fills as the definition does, for one layer after another, and writes nothing else."""
        spare = list[Tensor]()
        expected, got = self._inside(self.chunk, []), self._inside(self.chunk, spare)
        topks = [to_device(topk) for topk in self.topk]
        right = fill_by_ops(ReferenceBackend(), expected, topks[0], self.caches.swa, self.caches.compressed)
        prepared = prepare(got, topks[0], self.caches.swa, self.caches.compressed)
        for topk in (*topks, topks[0]):
            right(topk, self.caches.swa, self.caches.compressed)
            prepared(topk, self.caches.swa, self.caches.compressed)
            if not _same(expected, got):
                return False
        for tensor in _outputs_of(got):
            tensor.fill_(torch.nan if tensor.is_floating_point() else 77)
        return all(bool(base.isnan().all() if base.is_floating_point() else (base == 77).all()) for base in spare)

    def _inside(self, chunk: ChunkRows, spare: list[Tensor]) -> ChunkRows:
        """The same chunk on the device, with outputs of their own that stand inside larger memory."""

        def within(value: Tensor) -> Tensor:
            grown = [value.shape[0] + 2, *(n + 16 for n in value.shape[1:])]
            base = torch.full(grown, torch.nan if value.is_floating_point() else 77, device=DEVICE).to(value.dtype)
            part = base[tuple(slice(0, n) for n in value.shape)]
            part.copy_(value)
            spare.append(base)
            return part

        moved = {name: to_device(getattr(chunk, name)) for name in ("tokens", "swa", "compressed")}
        lists = DenseIndices(within(chunk.combined.indices), within(chunk.combined.lens))
        flat = chunk.ragged
        if flat is not None:
            flat = RaggedIndices(within(flat.indices), within(flat.indptr), flat.width)
        lengths, starts = (
            torch.full(tensor.shape, 55, dtype=INT, device=DEVICE) for tensor in (chunk.lengths, chunk.starts)
        )
        kv = within(chunk.kv)
        return evolve(chunk, **moved, kv=kv, combined=lists, ragged=flat, lengths=lengths, starts=starts)


def _outputs_of(chunk: ChunkRows) -> Iterator[Tensor]:
    yield from (chunk.kv, chunk.combined.indices, chunk.combined.lens)
    if chunk.ragged is not None:
        yield from (chunk.ragged.indices, chunk.ragged.indptr)


def _same(expected: ChunkRows, actual: ChunkRows) -> bool:
    pairs = [(bytes_of(a), bytes_of(b)) for a, b in zip(_outputs_of(expected), _outputs_of(actual), strict=True)]
    if expected.ragged is not None:
        end = 4 * int(expected.ragged.indptr[-1])
        pairs[3] = pairs[3][0][:end], pairs[3][1][:end]
    return all(torch.equal(a, b) for a, b in pairs)


def trials(seeds: range, prepare: Any, pairs: list[tuple[int, int | None]] = PAIRS) -> bool:
    """Whether a step agrees with the definition on random chunks of every pair of layouts."""
    with small_rounds(dense, fill), pytest.MonkeyPatch.context() as patch:
        patch.setattr(fill, "PACKERS", 3)
        return all(
            Chunk.draw(Random(seed * 100 + i), LAYOUTS[a], None if b is None else LAYOUTS[b]).agrees(prepare)
            for seed in seeds
            for i, (a, b) in enumerate(pairs)
        )


@pytest.mark.matrix
def test_two_launches_fill_what_the_separate_steps_fill() -> None:
    assert trials(range(3), fill.prepare_rows)


MUTANTS = [
    (kernels_gather, "entries = seq_len // ratio", "entries = tl.cdiv(seq_len, ratio)"),
    (kernels_gather, "tl.load(GATHER_LENS + request), tail, slice", "tl.load(GATHER_LENS + request), 0, slice"),
    (kernels_gather, "(first - entry_tiles) * BLOCK_R, seq_len, gather_len", "first * BLOCK_R, seq_len, gather_len"),
    (kernels_gather, "ENTRY_TABLE + request * entry_stride", "ENTRY_TABLE + request * table_stride"),
    (kernels_gather, "first = tl.program_id(0) * group", "first = tl.program_id(0) * group + 1"),
]


@pytest.mark.mutation
@pytest.mark.parametrize(("kernels", "right", "wrong"), MUTANTS, ids=[str(i) for i in range(len(MUTANTS))])
def test_a_mutant_is_found(kernels: Any, right: str, wrong: str, tmp_path: Path) -> None:
    assert not trials(range(8), planted(fill, kernels, tmp_path, right, wrong).prepare_rows, PAIRS[:4])


def test_a_copy_of_the_launcher_without_a_bug_passes(tmp_path: Path) -> None:
    assert trials(range(8), planted(fill, kernels_gather, tmp_path, "", "").prepare_rows, PAIRS[:1])


@pytest.mark.mutation
@pytest.mark.parametrize("wrong", [{"tail": 0}, {"window": 1}, {"offset": 0}, {"topk": 9}, {"compressed": None}])
def test_each_number_of_a_chunk_matters(wrong: dict[str, Any]) -> None:
    def prepare(chunk: ChunkRows, topk: Tensor | None, window: PagedKVCache, compressed: PagedKVCache | None) -> Any:
        ((name, value),) = wrong.items()
        if hasattr(chunk.tokens, name):
            changed = evolve(chunk, tokens=evolve(chunk.tokens, **wrong))
        else:
            changed = chunk if getattr(chunk, name) is None else evolve(chunk, **{name: value})
        return fill.prepare_rows(changed, topk, window, compressed)

    assert not trials(range(8), prepare, PAIRS[:4])


VIEWS = {"slice", "view", "select", "as_strided"}
STEPS = [(kind, cut) for kind in LayerKind for cut in (False, True)]


@pytest.mark.parametrize(("kind", "cut"), STEPS, ids=[f"{kind.value}-{('whole', 'cut')[cut]}" for kind, cut in STEPS])
@pytest.mark.parametrize("name", GATHERING)
def test_a_chunk_takes_two_launches_and_nothing_of_torchs(name: str, kind: LayerKind, *, cut: bool) -> None:
    backend, requests = GATHERING[name](), [(30, 40)] if cut else [(30, 9), (0, 7)]
    scenario = StepFixture(kind=kind, requests=requests, topk="garbage", device=DEVICE.type)
    problem = scenario.problem(ReferenceBackend())
    if cut:
        width = 15 * (problem.layer.window + (problem.layer.topk or 4))
        problem = evolve(problem, limits=evolve(problem.limits, max_index_elements=width))
    chunks, workspace = list[int](), problem.workspace(backend, debug=False)
    backend.prepare = lambda _, call: lambda *_: chunks.append(call.q.shape[0])
    backend.prefers_pages = lambda *_: False
    with launching_nothing():
        for _ in range(2):
            chunks.clear()
            with observed() as seen, operations() as ran:
                problem.run(backend, workspace)

    assert len(chunks) > 1 if cut else chunks
    assert [variant.name for variant in seen] == ["combine_kernel", "fill_kernel"] * len(chunks)
    # the first two make what the caller gives
    assert {name for name, _ in ran} - VIEWS == {"full"}
    assert {*seen} <= {*backend.kernel_variants(bounds_of(scenario), DeviceFacts.here())}


@pytest.mark.parametrize("attribute", ["dequantize_and_gather_k_cache", "index_ops"])
def test_a_backend_with_a_gather_or_index_ops_of_its_own_has_them_called(attribute: str) -> None:
    for name, make in GATHERING.items():
        built_ops: Any = make()
        assert built_ops.prepare_rows is not None, name
        other: Any = make()
        setattr(other, attribute, getattr(ReferenceBackend(), attribute))
        assert other.prepare_rows is None, name


@pytest.mark.parametrize("ratio", [1, 2])
def test_a_cut_prompt_of_v41_on_gathered_rows_equals_the_oracle(ratio: int) -> None:
    """After a prefix, in chunks as small as the index matrix makes them, on records of two formats."""
    geometry = tiny_geometry(num_heads=2, ratios=(ratio, 16))
    kinds = v41_layouts(geometry)
    scenario = StepFixture(
        kind="c4a",
        geometry=geometry,
        requests=[(11, 9), (0, 3)],
        layout=kinds["v41"],
        compressed_layout=kinds["v41-fp4"],
        topk="garbage",
        poison=0xFF,
        device=DEVICE.type,
    )
    width = 5 * (geometry.window + geometry.index_topk)
    problem = scenario.problem(ReferenceBackend())
    problem = evolve(problem, limits=evolve(problem.limits, max_index_elements=width))
    with small_rounds(dense, fill):
        for make in {make().capabilities.prefill_indices: make for make in GATHERING.values()}.values():
            scenario.compare(*problem.run(make()))

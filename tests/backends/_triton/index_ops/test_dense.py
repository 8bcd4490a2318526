"""Index ops in Triton against their definition in plain torch, integer by integer."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from attrs import evolve
from hypothesis import strategies as st

from dsv4attn.backends._triton.compiling.variant import Variant
from dsv4attn.backends._triton.index_ops import dense as kernels
from dsv4attn.backends._triton.index_ops import kernels_dense, kernels_ragged, ragged
from dsv4attn.backends._triton.interpreted import INTERPRETED
from dsv4attn.backends._triton.launching.runtime import observed
from dsv4attn.core.cache.selected_keys import ChunkTokens, PageTable
from dsv4attn.core.torch_ops import index_ops as indices
from dsv4attn.testing.kit.random_step import StepFixture
from tests.backends._triton.engine import launching_nothing
from tests.backends._triton.index_ops.index_trials import (
    BLOCKS,
    BOOL,
    DEVICE,
    INT,
    NUMBERS,
    Trial,
    ascending,
    loose,
    numbers,
    operations,
    pages,
    small_rounds,
    spoiled,
    table_of,
    to_device,
    with_changed,
)
from tests.backends._triton.index_ops.ragged_trials import pack, translate_ragged
from tests.core.attention.strategies import searched
from tests.harness import FORM_NAMES, assert_same_bits, backend_of

RANDOMS = st.randoms(use_true_random=False)
interpreted = pytest.mark.skipif(not INTERPRETED, reason="a compiled kernel cannot be changed from outside")


def translate(rng: Random) -> Trial:
    """Translation of some rows, a few of them of requests that do not exist."""
    rows, width, requests = rng.randint(0, 5), rng.choice([0, 1, 5, 8, 21]), rng.randint(0, 3)
    table, size = table_of(rng, requests)
    seen = [rng.randint(0, 40) if rng.random() < 0.9 else rng.choice(NUMBERS) for _ in range(rows)]
    topk = numbers(rng, (rows, width), lambda: spoiled(rng, 40, NUMBERS))
    if rows and rng.random() < 0.2:
        topk = loose(torch.arange(width, dtype=INT), rng).expand(rows, width)  # one row for all, as c128a has it
    args = topk, loose(torch.tensor(seen, dtype=INT), rng)
    token_to_req = numbers(rng, (rows,), lambda: spoiled(rng, requests, [-1, requests, 2**31 - 1]))
    outs = ((rows, width), INT), ((rows,), INT)
    return Trial("compute_global_topk_indices_and_lens", (*args, token_to_req, table, size), outs)


def combine(rng: Random) -> Trial:
    """Combination for a ragged chunk, with or without entries and tables, and graph padding after it."""
    counts = [rng.choice([0, 0, 1, 2, 4]) for _ in range(rng.randint(1, 5))]
    lens = [n + rng.choice([0, 1, rng.randint(0, 50)]) for n in counts]
    window, topk = rng.choice([1, 3, 8, 11]), rng.choice([0, 1, 4, 9])
    gathered = [min(total, n + window - 1) if n else 0 for n, total in zip(counts, lens, strict=True)]
    rows, width = sum(counts) + rng.choice([0, 0, 2]), rng.choice([topk, 1, 9, 21])
    chosen = numbers(rng, (rows, max(width, 1)), lambda: spoiled(rng, 24, NUMBERS)) if rng.random() < 0.7 else None
    seen = numbers(rng, (rows,), lambda: rng.randint(0, 24)) if rng.random() < 0.9 else None
    valid = numbers(rng, (rows,), lambda: rng.random() < 0.8, BOOL)
    tables = {name: pages(rng, len(counts)) for name in ("swa", "compressed") if rng.random() < 0.7}
    vectors = [loose(torch.tensor(values, dtype=INT), rng) for values in (lens, gathered)]
    starts = ascending(rng, counts, rng.choice([0, 7]))
    args = chosen, ChunkTokens(vectors[0], vectors[1], starts, seen, valid, window, topk, rows=100, offset=40)
    outs = ((rows, topk + window + rng.randint(0, 3)), INT), ((rows,), INT)
    return Trial("combine_topk_swa_indices", args, outs, tables)


OPS = [translate, combine, pack, translate_ragged]
all_ops = pytest.mark.parametrize("make", OPS)


@all_ops
@searched(60, rng=RANDOMS)
def test_an_op_equals_its_definition(make: Callable[[Random], Trial], rng: Random) -> None:
    with small_rounds(kernels, ragged):
        assert make(rng).agrees(kernels)


def test_a_translation_can_be_done_again_on_the_same_memory() -> None:
    rng = Random(3)
    table, topk = torch.tensor([[4, 0, 2]], dtype=INT, device=DEVICE), torch.zeros(5, 7, dtype=INT, device=DEVICE)
    seen, request = torch.zeros(5, dtype=INT, device=DEVICE), torch.zeros(5, dtype=INT, device=DEVICE)
    outs, expected = ([torch.empty_like(topk), torch.empty_like(seen)] for _ in range(2))
    prepare = kernels.compute_global_topk_indices_and_lens.prepare
    again = prepare(topk, seen, request, table, 8, (outs[0], outs[1]))
    for _ in range(3):
        topk.copy_(to_device(numbers(rng, (5, 7), lambda: rng.randint(-1, 24))))
        seen.copy_(to_device(numbers(rng, (5,), lambda: rng.randint(0, 24))))
        again(topk)
        indices.compute_global_topk_indices_and_lens(topk, seen, request, table, 8, (expected[0], expected[1]))
        assert_same_bits(outs, expected)


@all_ops
def test_an_op_compiles_only_foreseen_forms_and_all_of_them(make: Callable[[Random], Trial]) -> None:
    with observed() as seen:
        for seed in range(60):
            make(Random(seed)).agrees(kernels)

    foreseen = [variant for variant in kernels.variants() if variant.name in {v.name for v in seen}]
    assert set(seen) == set(foreseen)
    assert len(set(foreseen)) == len(foreseen)


def test_the_widest_rows_are_combined_translated_and_packed() -> None:
    """A c128a layer at a context of a million tokens: 8192 entries and a window of 128."""
    rng, width, window = Random(0), 8192, 128
    table = torch.randperm(4096, generator=torch.Generator().manual_seed(0)).to(INT)[None]
    pool = PageTable(table.where(table % 97 != 0, -1), 2, 4096)
    entry_numbers, request = torch.arange(width, dtype=INT).expand(2, width), torch.zeros(2, dtype=INT)
    seen, valid = torch.tensor([width - 1, 5000], dtype=INT), torch.ones(2, dtype=BOOL)
    starts, lens = torch.tensor([0, 2], dtype=INT), torch.tensor([width * 128], dtype=INT)
    swa = PageTable(torch.full((1, width * 2), -1, dtype=INT), 64, 8)
    swa.block_table[0, -3:] = torch.tensor([4, 5, 6])
    tokens = ChunkTokens(lens, lens.clamp(max=129), starts, seen, valid, window, width, width + 129, width)
    chunk = entry_numbers, tokens
    combined = ((2, width + window), INT), ((2,), INT)
    tables = {"swa": swa, "compressed": pool}
    entries = entry_numbers, seen, request, pool.block_table, 2
    translated = ((2, width), INT), ((2,), INT)
    dense = numbers(rng, (3, width), lambda: spoiled(rng, 50, NUMBERS))
    rows = dense, torch.tensor([width, 4097, 8000], dtype=INT), 40
    packed = ((3 * width,), INT), ((4,), INT)
    ragged_rows = ((2 * width,), INT), ((3,), INT)
    last = torch.full((2, width), -1, dtype=INT)
    last[:, -2:] = torch.tensor([4999, 3])
    last_entries = last, *entries[1:]

    assert Trial("combine_topk_swa_indices", chunk, combined, tables).agrees(kernels)
    assert Trial("compute_global_topk_indices_and_lens", entries, translated).agrees(kernels)
    assert Trial("build_ragged_indices_from_dense", rows, packed).agrees(kernels)
    for chosen in (entries, last_entries):
        assert Trial("compute_global_topk_ragged_indices_and_indptr", chosen, ragged_rows).agrees(kernels)


@pytest.mark.skipif(not INTERPRETED, reason="tensors are on the CPU")
def test_ops_neither_allocate_nor_read_a_value() -> None:
    launched: list[Any] = []
    for make in OPS:
        for seed in range(5):
            trial = make(Random(seed))
            outs = [torch.empty(tuple(shape), dtype=dtype) for shape, dtype in trial.outs]
            op: Callable[..., None] = getattr(kernels, trial.op)
            with launching_nothing(), observed() as seen, operations() as ran:
                op(*trial.args, out=tuple(outs), **trial.keywords)
            launched += [variant.kernel for variant in seen]
            assert ran == []

    assert kernels.INDEX_OPS.transient_bytes(10**9, 10**6) == 0
    assert len(set(launched)) == len(OPS), "one launch each"
    assert 4 * len(OPS) < len(launched) <= 5 * len(OPS), "none where there is nothing to do"


@pytest.mark.parametrize("form", FORM_NAMES)
@pytest.mark.parametrize("kind", ["swa", "c4a", "c128a"])
@interpreted
def test_attention_on_indices_of_triton_is_the_same_to_the_bit(kind: str, form: str) -> None:
    requests = [(90, 1), (0, 1), (33, 2, 1), (20, 7), (0, 9, 2)]
    scenario = StepFixture(kind=kind, requests=requests, topk="garbage", num_speculative_tokens=1, extra_rows=2)

    other = backend_of(form)
    other.index_ops = kernels.INDEX_OPS
    assert_same_bits(scenario.run(backend_of(form)), scenario.run(other))


@pytest.mark.device
@pytest.mark.skipif(INTERPRETED, reason="needs a device that Triton drives")
@all_ops
def test_a_captured_op_replays_on_new_contents(make: Callable[[Random], Trial]) -> None:
    first, second = make(Random(3)), make(Random(3))
    outs = [torch.zeros(tuple(shape), dtype=dtype, device=DEVICE) for shape, dtype in first.outs]
    args, keywords = [to_device(arg) for arg in first.args], {k: to_device(v) for k, v in first.keywords.items()}
    op: Callable[..., None] = getattr(kernels, first.op)
    op(*args, out=tuple(outs), **keywords)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        op(*args, out=tuple(outs), **keywords)
    for mine, theirs in zip(args, second.args, strict=True):
        if isinstance(mine, torch.Tensor) and mine.dtype is INT and mine.dim() == 2 and mine.stride(0):
            mine.copy_(theirs.roll(1, 0))
    graph.replay()
    replayed = [out.clone() for out in outs]
    op(*args, out=tuple(outs), **keywords)

    assert all(torch.equal(a, b) for a, b in zip(replayed, outs, strict=True))


# bugs that must be found


def slots_in_32_bits(records: Any, visible: Any, blocks: Any, stride: Any, num_columns: Any, block_size: Any) -> Any:
    record = tl.where(visible, records, 0).to(tl.int32)
    column = record // block_size
    block = tl.load(blocks + column.to(tl.int64) * stride, mask=visible & (column < num_columns), other=-1)
    return tl.where(block >= 0, block * block_size + record % block_size, -1).to(tl.int64)


def request_in_a_hurry(token: Any, starts: Any, stride: Any, base: Any, num_reqs: Any, depth: Any) -> Any:
    low, high = token * 0, token * 0 + num_reqs
    for _ in range(depth - 1):
        middle = (low + high) // 2
        reached = tl.load(starts + middle.to(tl.int64) * stride) - base <= token
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle)
    return low


def one_more_visible(topk: Any, seen: Any, *rest: Any) -> tuple[Any, ...]:
    return topk, (seen.long() + 1).clamp(max=2**31 - 1).to(INT), *rest


def one_more_visible_in_a_chunk(topk: Any, chunk: ChunkTokens) -> tuple[Any, ...]:
    seen = chunk.visible_lens
    return topk, evolve(chunk, visible_lens=None if seen is None else (seen.long() + 1).to(INT))


PLANTED: list[tuple[Callable[[Random], Trial], str, Any]] = [
    (translate, "slots_of", slots_in_32_bits),
    (combine, "slots_of", slots_in_32_bits),
    (combine, "request_of", request_in_a_hurry),
    (translate_ragged, "slots_of", slots_in_32_bits),
    (translate_ragged, "compute_global_topk_ragged_indices_and_indptr", one_more_visible),
    (translate, "compute_global_topk_indices_and_lens", one_more_visible),
    (combine, "combine_topk_swa_indices", one_more_visible_in_a_chunk),
    (combine, "combine_topk_swa_indices", lambda topk, chunk: (topk, evolve(chunk, window=max(chunk.window - 1, 1)))),
    (pack, "build_ragged_indices_from_dense", lambda dense, lens, slots: (dense, lens, slots + 1)),
]


@pytest.mark.mutation
@interpreted
@pytest.mark.parametrize(("make", "name", "bug"), PLANTED, ids=[f"{make.__name__}-{n}" for make, n, _ in PLANTED])
def test_a_planted_bug_is_found(make: Any, name: str, bug: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    is_op = name in {trial.op for trial in (make(Random(0)) for make in OPS)}
    for module in (kernels, ragged, kernels_dense, kernels_ragged):
        if hasattr(module, name):
            monkeypatch.setattr(module, name, with_changed(getattr(kernels, name), bug) if is_op else triton.jit(bug))
    with small_rounds(kernels, ragged):
        assert not all(make(Random(seed)).agrees(kernels) for seed in range(150))


def test_the_inputs_hold_what_they_should() -> None:
    """Garbage of every kind, dead blocks, tokens without requests, rows without entries: none is left out by luck."""
    trials = [translate(Random(seed)) for seed in range(200)]
    chosen = torch.cat([trial.args[0].flatten() for trial in trials]).tolist()
    blocks = torch.cat([trial.args[3].flatten() for trial in trials]).tolist()

    assert {*NUMBERS} <= {*chosen}
    assert {*BLOCKS} <= {*blocks}
    assert {trial.args[0].shape[1] for trial in trials} == {0, 1, 5, 8, 21}
    assert {trial.args[0].shape[0] for trial in trials} >= {0, 1, 5}
    assert {trial.args[3].shape[0] for trial in trials} == {0, 1, 2, 3}


def test_a_form_says_what_its_kernel_is_given() -> None:
    variants: list[Variant] = list(kernels.variants())

    assert len(variants) == len(set(variants)) == 10
    assert {type_ for variant in variants for name, type_ in variant.types if name in {"lens", "indptr"}} == {"*i32"}

"""Latents of V4.1's compressor, their rings, and what is stored of them: those of the definition in torch."""

from __future__ import annotations

from collections.abc import Callable
from math import inf, nan

import attrs
import pytest
import torch
from torch import Tensor

from dsv4attn.backends._triton.interpreted import INTERPRETED
from dsv4attn.backends._triton.launching.runtime import observed
from dsv4attn.backends._triton.layer.compressor import latents
from dsv4attn.backends._triton.layer.ops import layer_ops
from dsv4attn.core.cache.layout import KVCacheLayout, PagedKVCache
from dsv4attn.core.torch_ops.arguments import EntryNorm, StatePages
from dsv4attn.errors import ArgumentError
from tests.backends._triton.cache.caches import DEVICE, LAYOUTS, draw, memory, poisoned, seeded, strided
from tests.backends._triton.layer.test_compress import INDEX_LAYOUTS, ODD_V41, same_entries
from tests.layer_ops import TorchOps

TORCH = TorchOps()
WRITTEN = [layout for layout in [*LAYOUTS, *INDEX_LAYOUTS] if layout not in ODD_V41]
each_layout = pytest.mark.parametrize("layout", WRITTEN, ids=lambda layout: f"{layout.fingerprint}:{layout.fp8_max:g}")
each_ratio = pytest.mark.parametrize("ratio", [1, 2, 3])
NORMS = torch.float32, torch.bfloat16


@attrs.define(eq=False, slots=False)
class Step:
    """Random tokens of some requests, with rings full of NaN but for what a token may read.

    Odd seeds put everything out of step with 16 bytes. The last tokens are of no request.
    """

    ratio: int
    dim: int = 24
    seed: int = 0

    def __attrs_post_init__(self) -> None:
        g, odd = seeded(self.seed), self.seed % 2
        counts = [draw(g, 1, 9) for _ in range(3)]
        begins = [draw(g, 0, 7) for _ in counts]
        spans = [torch.arange(begin, begin + n) for begin, n in zip(begins, counts, strict=True)]
        self.positions = torch.cat([*spans, torch.zeros(2, dtype=torch.int64)]).to(DEVICE)
        request = torch.arange(3, dtype=torch.int32).repeat_interleave(torch.tensor(counts))
        self.request = torch.cat([request, torch.full((2,), -1, dtype=torch.int32)]).to(DEVICE)
        n = len(self.positions)
        self.kv = strided(torch.randn(n, self.dim, generator=g), odd * 3)
        self.score = strided(4 * torch.randn(n, self.dim, generator=g), odd)
        self.weight = (1 + 0.3 * torch.randn(self.dim, generator=g)).to(DEVICE)
        size, columns = draw(g, 1, 4), draw(g, 3, 4)
        self.ring = size * columns
        wide = torch.randperm(3 * columns + 1, generator=g).int()[: 3 * columns].view(3, columns)
        self.table = torch.nn.functional.pad(wide, (0, odd)).to(DEVICE)[:, :columns]
        layout = KVCacheLayout.compressor_state(self.dim)
        self.states = poisoned(layout, 3 * columns + 1, size, gap=4 * odd, start=8 * odd)
        rows = self.states.region("row")
        for number, begin in enumerate(begins):
            for position in range(max(begin - self.ratio + 1, 0), begin):
                place = position % self.ring
                block = int(self.table[number, place // size])
                rows[block, place % size] = torch.randn(2 * self.dim, generator=g).to(DEVICE)

    def run(self, steps: object = None) -> tuple[Tensor, Tensor]:
        """Latents, and all bytes of the rings after them, by the kernels if no steps are given."""
        rings, score = None, None
        if self.ratio > 1:
            like = self.states.tensor
            copy = torch.empty(0, dtype=like.dtype, device=DEVICE).set_(like.untyped_storage().clone())
            copy = copy.as_strided(like.shape, like.stride(), like.storage_offset())
            rings, score = StatePages(PagedKVCache(copy, self.states.layout), self.table), self.score
        compress = getattr(steps, "compress_latents", latents.compress_latents)
        out = compress(self.kv, score, self.positions, self.request, self.weight, 1e-20, self.ratio, rings)
        return out.cpu(), torch.zeros(0) if rings is None else memory(rings.cache)


def near(actual: Tensor, expected: Tensor) -> None:
    """Fail unless bf16 values are equal, or neighbours."""
    assert (actual.dtype, actual.shape) == (torch.bfloat16, expected.shape)
    torch.testing.assert_close(actual.float(), expected.float(), rtol=2.0**-7, atol=1e-6, equal_nan=True)


@each_ratio
@pytest.mark.parametrize("dim", [24, 33, 512])
def test_latents_and_rings_are_the_definition_s(ratio: int, dim: int) -> None:
    for seed in range(6):
        step = Step(ratio, dim, seed)
        (actual, rings), (expected, expected_rings) = step.run(), step.run(TORCH)
        assert not expected[step.request.cpu() >= 0].isnan().any()
        near(actual, expected)
        assert torch.equal(rings, expected_rings)


def test_many_steps_are_one_pass() -> None:
    for cuts in ((1,) * 12, (2, 10), (5, 1, 6), (12,)):
        step = Step(2, 16, 1)
        whole = torch.randn(2, 12, 16, generator=seeded(3)).to(DEVICE)
        table, chunks, begin = step.table[:1], [], 0
        for count in cuts:
            part = slice(begin, begin + count)
            begin += count
            tokens = torch.arange(part.start, part.stop, device=DEVICE)
            request = torch.zeros(count, dtype=torch.int32, device=DEVICE)
            arguments = whole[0, part], whole[1, part], tokens, request, step.weight, 1e-20, 2
            chunks.append(latents.compress_latents(*arguments, StatePages(step.states, table)))
        tokens, request = torch.arange(12, device=DEVICE), torch.zeros(12, dtype=torch.int32, device=DEVICE)
        arguments = whole[0], whole[1], tokens, request, step.weight, 1e-20, 2
        rings = StatePages(Step(2, 16, 1).states, table)
        near(torch.cat(chunks).cpu(), TORCH.compress_latents(*arguments, rings).cpu())


def test_bits_of_a_latent_depend_on_its_own_tokens_alone() -> None:
    for ratio in (1, 3):
        step = Step(ratio, 33, 5)
        together, _ = step.run()
        for token in range(len(step.kv)):
            single = Step(ratio, 33, 5)
            if ratio > 1:
                # what the tokens before it leave in the rings
                before = Step(ratio, 33, 5)
                before.kv, before.score = step.kv[:token], step.score[:token]
                before.positions, before.request = step.positions[:token], step.request[:token]
                latents.compress_latents(
                    before.kv, before.score, before.positions, before.request, step.weight, 1e-20, ratio,
                    StatePages(single.states, single.table),
                )  # fmt: skip
            for name in ("kv", "score", "positions", "request"):
                setattr(single, name, getattr(step, name)[token : token + 1])

            assert torch.equal(single.run()[0].view(torch.int16), together[token : token + 1].view(torch.int16))


def test_blocks_that_do_not_exist_are_neither_read_nor_written() -> None:
    step = Step(2, 24, 2)
    step.table[0], step.table[1, 0] = -1, 1000
    (actual, rings), (expected, expected_rings) = step.run(), step.run(TORCH)
    near(actual, expected)
    assert torch.equal(rings, expected_rings)


@pytest.mark.parametrize("value", [nan, inf, -inf])
def test_what_is_no_number_reaches_its_own_entry(value: float) -> None:
    clean, step = Step(2, 24, 4), Step(2, 24, 4)
    token = int((step.positions % 2 == 0).nonzero()[1])
    step.score[token, 3] = value
    actual, expected = step.run()[0], step.run(TORCH)[0]
    near(actual, expected)
    others = [i for i in range(len(actual)) if i not in (token, token + 1)]
    assert torch.equal(actual[others], clean.run()[0][others])


def test_longer_windows_are_torch_s() -> None:
    step = Step(latents.MOST + 1, 16)
    step.states = PagedKVCache.allocate(KVCacheLayout.compressor_state(16), 12, 4, DEVICE)
    step.table = torch.arange(12, dtype=torch.int32, device=DEVICE).view(3, 4)
    with observed() as seen:
        actual, _ = step.run(layer_ops())

    assert seen == []
    assert torch.equal(actual, step.run(TORCH)[0])


def test_arguments_that_do_not_fit_the_ratio_are_refused_before_a_launch() -> None:
    step = Step(2)
    arguments = step.positions, step.request, step.weight, 1e-20
    narrow = StatePages(step.states, step.table[:, :0])
    with observed() as seen:
        with pytest.raises(ArgumentError, match="score: expected None with ratio 1"):
            latents.compress_latents(step.kv, step.score, *arguments, 1)
        with pytest.raises(ArgumentError, match="states: expected given with ratio 2"):
            latents.compress_latents(step.kv, step.score, *arguments, 2)
        with pytest.raises(ArgumentError, match=r"states\.block_table: expected blocks for at least 2 tokens"):
            latents.compress_latents(step.kv, step.score, *arguments, 2, narrow)

    assert seen == []


@attrs.define(eq=False, slots=False)
class Store:
    """Random rows, and slots for the tokens that complete an entry. allocated: in pages that we allocate."""

    layout: KVCacheLayout
    ratio: int
    dtype: torch.dtype = torch.bfloat16
    norm: torch.dtype | None = None
    seed: int = 0
    allocated: bool = False

    def __attrs_post_init__(self) -> None:
        g, odd, dim = seeded(self.seed), self.seed % 2, self.layout.head_dim
        n = 13
        self.x = strided(torch.randn(n, dim, generator=g).to(self.dtype), odd * 3)
        self.positions = torch.randint(0, 40, (n,), generator=g).to(DEVICE)
        slots = torch.randperm(3 * 7, generator=g)[:n]
        slots[:3] = torch.tensor([-1, 3 * 7, 10**12])
        self.slots = slots.to(DEVICE)[: n - 1]
        turned = self.layout.rope_dim or min(dim // 2 * 2, 8)
        self.angles = strided(torch.randn(40, turned, generator=g), odd)
        self.weight = None
        if self.norm is not None:
            self.weight = (1 + 0.3 * torch.randn(dim, generator=g)).to(self.norm).to(DEVICE)
        step = max(self.layout.dtype.itemsize, 4)
        self.gap, self.start = step * 3 * odd, step * 5 * odd

    def run(self, store: Callable[..., None] = latents.norm_rope_store) -> PagedKVCache:
        """The cache, written by a step."""
        cache = poisoned(self.layout, 3, 7, gap=self.gap, start=self.start)
        if self.allocated:
            cache = PagedKVCache.allocate(self.layout, 3, 7, DEVICE)
        store(self.x, self.positions, self.slots, EntryNorm(self.weight, 1e-20, self.angles), self.ratio, cache)
        return cache


@pytest.mark.in_turn
@each_layout
@each_ratio
def test_rows_without_a_norm_are_stored_as_the_same_bytes(layout: KVCacheLayout, ratio: int) -> None:
    for seed, dtype in enumerate(NORMS):
        step = Store(layout, ratio, dtype, seed=seed + 2 * ratio)
        assert torch.equal(memory(step.run()), memory(step.run(TORCH.norm_rope_store)))


@each_layout
def test_rows_with_a_norm_are_the_definition_s(layout: KVCacheLayout) -> None:
    for seed, norm in enumerate(NORMS):
        step = Store(layout, 2 - seed, norm=norm, seed=seed)
        same_entries(step.run(), step.run(TORCH.norm_rope_store))


def test_records_that_the_kernel_does_not_write_are_refused_before_a_launch() -> None:
    with observed() as seen:
        for layout in (*ODD_V41, KVCacheLayout.v41_fp8(rounds_to_fp4=True)):
            with pytest.raises(ArgumentError, match=r"^cache layout: expected"):
                Store(layout, 1).run()

    assert seen == []


@pytest.mark.parametrize("aligned", [False, True])
def test_warm_up_foresees_every_form_that_is_launched(aligned: bool) -> None:
    for seed in range(4):
        for ratio in (1, 2):
            step = Step(ratio, 32, 2 * seed if aligned else seed)
            if aligned and ratio > 1:
                blocks, size, _ = step.states.tensor.shape
                step.states = PagedKVCache.allocate(step.states.layout, blocks, size, DEVICE)
            layout = [KVCacheLayout.v41_fp8(), KVCacheLayout.v41_fp4(), KVCacheLayout.index_fp8()][seed % 3]
            norm, drawn = NORMS[seed % 2] if seed else None, 2 * seed if aligned else seed
            store = Store(layout, ratio, norm=norm, seed=drawn, allocated=aligned)
            with observed() as seen:
                step.run()
                store.run()
            arguments = layout, ratio, store.angles.shape[1], torch.bfloat16, (None, *NORMS)
            promised = {
                *latents.latent_variants(32, ratio, aligned=aligned, aligned_rows=aligned, norms=NORMS),
                *latents.variants(*arguments, aligned=aligned, aligned_rows=aligned),
            }
            assert set(seen) <= promised


@pytest.mark.device
@pytest.mark.skipif(INTERPRETED or not torch.cuda.is_available(), reason="needs an accelerator with graphs")
def test_launches_that_overlap_give_what_the_definition_gives() -> None:
    """Steps of one token a request in a graph, where each launch reads what the ones before it write."""
    layout, count = KVCacheLayout.v41_fp4(), 20
    dim, norm = layout.head_dim, EntryNorm(None, 0.0, Store(layout, 2).angles)
    weight, request = torch.ones(dim, device=DEVICE), torch.arange(3, dtype=torch.int32, device=DEVICE)
    both = torch.randn(count, 2, 3, dim, generator=seeded(1)).to(DEVICE)
    positions = torch.arange(count, device=DEVICE)[:, None].repeat(1, 3)
    slots = torch.arange(3 * count, device=DEVICE).view(count, 3)
    table = torch.arange(6, dtype=torch.int32, device=DEVICE).view(3, 2)

    def run(compress: Callable[..., Tensor]) -> tuple[list[Tensor], PagedKVCache]:
        states = StatePages(PagedKVCache.allocate(KVCacheLayout.compressor_state(dim), 6, 2, DEVICE), table)
        cache, outs = PagedKVCache.allocate(layout, 3, count, DEVICE), []
        for (kv, score), places, its in zip(both, positions, slots, strict=True):
            outs.append(compress(kv, score, places, request, weight, 1e-20, 2, states))
            latents.norm_rope_store(outs[-1], places, its, norm, 2, cache)
        return outs, cache

    (expected, _), (first, _) = run(TORCH.compress_latents), run(latents.compress_latents)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs, cache = run(latents.compress_latents)
    graph.replay()

    stored = PagedKVCache.allocate(layout, 3, count, DEVICE)
    for out, eager, right, *where in zip(outs, first, expected, positions, slots, strict=True):
        near(out, right)
        assert torch.equal(out, eager)
        TORCH.norm_rope_store(out, *where, norm, 2, stored)
    assert torch.equal(memory(cache), memory(stored))


# mutants


def one_place_off(step: Step) -> None:
    step.positions += 1


def another_request(step: Step) -> None:
    step.table = step.table.roll(1, 0)


def halves_changed(step: Step) -> None:
    step.kv, step.score = step.score, step.kv


@pytest.mark.mutation
@pytest.mark.parametrize("plant", [one_place_off, another_request, halves_changed])
def test_a_planted_bug_is_found(plant: Callable[[Step], None]) -> None:
    step, wrong = Step(2, 24, 4), Step(2, 24, 4)
    plant(wrong)
    (actual, rings), (expected, expected_rings) = wrong.run(), step.run(TORCH)
    assert not torch.equal(rings, expected_rings)
    with pytest.raises(AssertionError):
        near(actual, expected)

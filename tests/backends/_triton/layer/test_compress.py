"""The compressor's entries are those of the definition and of the float64 oracle, whatever stands in the states."""

from __future__ import annotations

from collections.abc import Callable
from math import inf, nan
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from dsv4attn.backends._triton.interpreted import INTERPRETED
from dsv4attn.backends._triton.launching.runtime import observed
from dsv4attn.backends._triton.layer.compressor import launch as compress
from dsv4attn.backends.reference import kernels as reference
from dsv4attn.core.cache import index_records as records
from dsv4attn.core.cache.layout import Fp8Format, KVCacheLayout, PagedKVCache
from dsv4attn.core.torch_ops.arguments import EntryNorm, StatePages
from dsv4attn.errors import ArgumentError
from tests.backends._triton.cache.caches import DEVICE, LAYOUTS, draw, memory, poisoned, seeded, strided
from tests.layer_ops import TorchOps

FNUZ = Fp8Format.FNUZ
INDEX_LAYOUTS = [
    KVCacheLayout.index_fp8(),
    KVCacheLayout.index_fp8(fp8_format=FNUZ),
    KVCacheLayout.index_fp8(20),
    KVCacheLayout.index_mxfp4(),
    KVCacheLayout.index_mxfp4(96),
    KVCacheLayout.index_mxfp4(32),
]
ODD_V41 = [layout for layout in LAYOUTS if layout.name.startswith("v41") and layout.nope_dim % 2]
"""Records that the kernel refuses: pairs of rotated dims stand in two groups."""
WRITTEN = [layout for layout in LAYOUTS if layout not in ODD_V41]
each_layout = pytest.mark.parametrize(
    "layout", [*WRITTEN, *INDEX_LAYOUTS], ids=lambda layout: f"{layout.fingerprint}:{layout.fp8_max:g}"
)
each_overlap = pytest.mark.parametrize("overlap", [False, True], ids=["alone", "overlap"])


@attrs.define(eq=False, slots=False)
class Entries:
    """One random step that makes entries.

    layout: of the entries. ratio, overlap: of the compressor. seed: odd ones put everything out of step with 16 bytes.
    allocated: whether the cache is one that we allocate, with aligned pages.
    """

    layout: KVCacheLayout
    ratio: int
    overlap: bool
    seed: int = 0
    requests: int = 3
    eps: float = 1e-6
    allocated: bool = False

    def __attrs_post_init__(self) -> None:
        g, odd, dim = seeded(self.seed), self.seed % 2, self.layout.head_dim
        self.window, self.width = (self.ratio, dim) if not self.overlap else (2 * self.ratio, 2 * dim)
        self.size = draw(g, 1, 5)
        counts = [draw(g, 1, 2 * self.ratio + 2) for _ in range(self.requests)]
        begins = [draw(g, 0, 3 * self.ratio) for _ in range(self.requests)]
        self.positions = torch.cat([torch.arange(b, b + n) for b, n in zip(begins, counts, strict=True)]).to(DEVICE)
        self.request = torch.arange(self.requests, dtype=torch.int32).repeat_interleave(torch.tensor(counts)).to(DEVICE)
        columns = -(-int(self.positions.max() + 1) // self.size)
        blocks = torch.randperm(self.requests * columns + 2, generator=g).int()[: self.requests * columns]
        self.table = torch.zeros(self.requests, columns + odd, dtype=torch.int32, device=DEVICE)[:, :columns]
        self.table.copy_(blocks.view(self.requests, columns))
        self.states = poisoned(
            KVCacheLayout.compressor_state(self.width),
            int(self.table.numel()) + 2,
            self.size,
            gap=4 * draw(g, 0, 9) * odd,
            start=4 * draw(g, 0, 9) * odd,
        )
        rows = self.states.region("row")
        drawn = torch.randn(*rows.shape, generator=g)
        drawn[..., self.width :] = (
            3 * drawn[..., self.width :] + torch.tensor([0.0, 90.0, -90.0])[torch.arange(self.width) % 3]
        )
        rows.copy_(drawn)
        self.weight = (1 + 0.3 * torch.randn(dim, generator=g)).to(DEVICE)
        turned = self.layout.rope_dim or min(dim // 2 * 2, 8)
        self.angles = strided(torch.randn(int(self.positions.max()) + 1, turned, generator=g), odd)
        self.shape = (len(self.positions) // self.ratio + 2 * self.requests, draw(g, 1, 3))
        ends = (self.positions + 1) % self.ratio == 0
        places = torch.randperm(self.shape[0] * self.shape[1], generator=g)[: int(ends.sum())]
        self.slots = torch.full_like(self.positions, -1).masked_scatter_(ends, places.to(DEVICE))
        step = max(self.layout.dtype.itemsize, 4)
        self.gap, self.start = (step * draw(g, 0, 9), step * draw(g, 0, 9)) if odd else (0, 0)

    def cache(self, device: torch.device = DEVICE) -> PagedKVCache:
        """Return an unwritten cache."""
        if self.allocated:
            return PagedKVCache.allocate(self.layout, *self.shape, device)
        return poisoned(self.layout, *self.shape, gap=self.gap, start=self.start, device=device)

    def run(self, step: Callable[..., None] = compress.compress_norm_rope_store) -> PagedKVCache:
        """The cache, written by a step."""
        cache, original = self.cache(), memory(self.states)
        states, norm = StatePages(self.states, self.table), EntryNorm(self.weight, self.eps, self.angles)
        step(states, self.request, self.positions, self.slots, norm, self.ratio, cache, overlap=self.overlap)
        assert torch.equal(memory(self.states), original)
        return cache

    def expected(self) -> PagedKVCache:
        """The cache as the definition writes it."""
        return self.run(TorchOps().compress_norm_rope_store)

    def check(self) -> PagedKVCache:
        """Fail unless entries are the definition's, and no other byte was written. Returns the cache."""
        actual, expected = self.run(), self.expected()
        same_entries(actual, expected)
        return actual


def values_of(cache: PagedKVCache) -> Tensor:
    """[slots, D] fp32."""
    slots = torch.arange(cache.capacity, device=cache.device)
    if cache.layout.key_record is not None:
        return reference.read_records(cache, slots).cpu()
    return records.read_index_keys(cache, slots).cpu()


def same_entries(actual: PagedKVCache, expected: PagedKVCache) -> None:
    """Entries are equal, but for codes and bf16 values that lie next to each other, of which there are few."""
    now, right = memory(actual), memory(expected)
    if torch.equal(now, right):
        return
    a, b = values_of(actual), values_of(expected)
    codes = 2.0**-3 if actual.layout.fp8_format else 0.5  # distance of neighbours, relative
    step = {torch.float32: 2e-6, torch.bfloat16: 2.0**-7}.get(actual.layout.dtype, 1.01 * codes)
    torch.testing.assert_close(a, b, rtol=step, atol=1e-5, equal_nan=True)
    if actual.layout.dtype != torch.float32:
        assert (now != right).sum() <= max(2, len(now) // 500)


@pytest.mark.in_turn
@each_layout
@each_overlap
def test_entries_are_the_definition_s(layout: KVCacheLayout, overlap: bool) -> None:
    for seed in range(2):
        Entries(layout, 4, overlap, seed).check()


@pytest.mark.parametrize("ratio", [1, 2, 3, 9, 17, 128, 150])
@each_overlap
def test_any_ratio_is_served(ratio: int, overlap: bool) -> None:
    for seed in range(1 if ratio > 100 else 2):
        step = Entries(LAYOUTS[11], ratio, overlap, seed, requests=4)
        step.check()

        assert (step.slots >= 0).any()


@pytest.mark.parametrize("layout", [LAYOUTS[3], LAYOUTS[11], INDEX_LAYOUTS[3]], ids=lambda layout: layout.fingerprint)
def test_a_program_makes_all_entries_of_its_tokens(layout: KVCacheLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Entries(layout, 4, True, 2, requests=9)
    alone = memory(step.run())
    for programs in (1, 2, 7):
        monkeypatch.setattr(compress, "PROGRAMS", programs)

        assert torch.equal(memory(step.run()), alone)


def test_bits_of_an_entry_depend_on_no_other_token() -> None:
    step = Entries(LAYOUTS[11], 5, True, 4, requests=6)
    together, ends = values_of(step.run()), (step.slots >= 0).nonzero().flatten().tolist()
    for token in ends:
        single = attrs.evolve(step)
        for name in ("states", "table", "weight", "angles", "shape", "gap", "start"):
            setattr(single, name, getattr(step, name))
        single.positions, single.request, single.slots = (
            getattr(step, name)[token : token + 1].clone() for name in ("positions", "request", "slots")
        )
        slot = int(single.slots[0])

        assert torch.equal(values_of(single.run())[slot], together[slot])


def test_slots_that_do_not_exist_are_skipped_whatever_the_position() -> None:
    step = Entries(LAYOUTS[3], 4, True, 6, requests=8)
    ends = (step.slots >= 0).nonzero().flatten()
    capacity = step.shape[0] * step.shape[1]
    garbage = torch.tensor([-1, -(2**63), capacity, 2**40, 2**32, 2**63 - 1], device=DEVICE)
    step.slots[ends[: len(garbage)]] = garbage
    wild = torch.tensor([2**62 - 1, -(2**62) - 1, 2**40 + 3, -1, 3, 2**63 - 1], device=DEVICE)
    step.positions[ends[: len(garbage)]] = wild
    cache = step.run()
    live = step.slots.cpu()[(step.slots.cpu() >= 0) & (step.slots.cpu() < capacity)]
    untouched = torch.ones(capacity, dtype=torch.bool)
    untouched[live] = False

    assert len(live)
    codes = cache.region("nope").cpu().flatten(0, 1)
    assert (codes[untouched] == 0xFF).all()
    assert (cache.region("scale").cpu().flatten(0, 1)[untouched] == 0xFF).all()
    assert not (cache.region("scale").cpu().flatten(0, 1)[live] == 0xFF).any()


def test_tokens_that_end_no_window_and_tokens_behind_the_slots_store_nothing() -> None:
    step = Entries(LAYOUTS[3], 4, False, 8)
    step.slots = torch.where((step.positions + 1) % 4 == 0, -1, torch.arange(len(step.slots), device=DEVICE))
    assert (memory(step.run()) == 0xFF).all()

    step.slots = step.slots[:0]
    assert (memory(step.run()) == 0xFF).all()
    step.positions = step.positions[:0]
    assert (memory(step.run()) == 0xFF).all()


def test_states_without_a_block_do_not_count() -> None:
    for seed in range(4):
        step = Entries(LAYOUTS[11], 6, True, 10 + seed)
        g = seeded(seed)
        dead = torch.rand(step.table.shape, generator=g) < 0.4
        values = torch.tensor([-1, step.states.num_blocks, 2**31 - 1, -(2**31)], dtype=torch.int32)
        step.table[dead.to(DEVICE)] = values[torch.arange(int(dead.sum())) % 4].to(DEVICE)
        rows, used = step.states.region("row"), torch.zeros(step.states.num_blocks, dtype=torch.bool)
        used[step.table.cpu()[~dead].long()] = True
        rows[(~used).to(DEVICE)] = nan
        entry_values = values_of(step.check())[step.slots[step.slots >= 0].cpu()]

        assert len(entry_values)
        assert not entry_values.isnan().any()


def test_requests_and_columns_that_do_not_exist_have_no_states() -> None:
    step = Entries(LAYOUTS[11], 4, True, 3, requests=5)
    step.request[step.request == 1] = -1
    step.request[step.request == 3] = 5
    step.table = step.table[:, : step.table.shape[1] - 2]
    step.check()
    step.table = step.table[:, :0]
    values = values_of(step.run())[step.slots[step.slots >= 0].cpu()]

    assert (values == 0).all()


SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "one NaN": lambda s: s[..., :1].fill_(nan),
    "all NaN": lambda s: s.fill_(nan),
    "one +inf": lambda s: s[..., 1:2].fill_(inf),
    "all +inf": lambda s: s.fill_(inf),
    "one -inf": lambda s: s[..., 2:3].fill_(-inf),
    "all -inf": lambda s: s.fill_(-inf),
    "largest": lambda s: s.mul_(1e37),
    "equal": lambda s: s.fill_(7.0),
}


@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize("ratio", [4, 40])
def test_scores_of_any_kind_weigh_as_in_the_definition(scores: str, ratio: int) -> None:
    step = Entries(LAYOUTS[11], ratio, False, 1)
    rows = step.states.region("row")[..., step.width :]
    SCORES[scores](rows[::2])  # every second page
    step.check()
    SCORES[scores](rows)
    step.check()


KVS: dict[str, Callable[[Tensor], Tensor]] = {
    "NaN of no weight": lambda row: row[0, 3].fill_(nan),
    "infinite": lambda row: row[0, 3].fill_(inf),
    "overflowing squares": lambda row: row[0].fill_(1e30),
    "tiny": lambda row: row[0].mul_(1e-30),
}


@pytest.mark.parametrize("kv", KVS)
@pytest.mark.parametrize("layout", [LAYOUTS[11], LAYOUTS[3], INDEX_LAYOUTS[0], INDEX_LAYOUTS[3]], ids=lambda x: x.name)
def test_kv_of_any_kind_counts_as_in_the_definition(kv: str, layout: KVCacheLayout) -> None:
    step = Entries(layout, 4, False, 2)
    rows = step.states.region("row")
    halves = rows.unflatten(-1, (2, step.width)).flatten(0, 1)
    for row in halves[::3]:
        KVS[kv](row)
    if kv == "NaN of no weight":
        halves[::3, 1, 3] = -1e30
    actual, expected = step.run(), step.expected()

    torch.testing.assert_close(values_of(actual), values_of(expected), rtol=0.13, atol=1e-5, equal_nan=True)


def test_eps_is_the_one_that_is_given() -> None:
    step = Entries(LAYOUTS[11], 4, True, 5, eps=0.3)
    step.check()


@pytest.mark.parametrize("ratio", [4, 40])
@pytest.mark.parametrize("layout", [LAYOUTS[11], LAYOUTS[3], INDEX_LAYOUTS[3]], ids=lambda x: x.name)
def test_a_norm_weight_in_bf16_counts_as_its_values_in_fp32(layout: KVCacheLayout, ratio: int) -> None:
    step = Entries(layout, ratio, False, 2)
    step.weight = step.weight.bfloat16()
    actual = memory(step.check())
    step.weight = step.weight.float()

    assert torch.equal(memory(step.run()), actual)


@pytest.mark.parametrize("weight", [torch.ones(32, dtype=torch.float64), torch.ones(31), torch.ones(1, 32)])
def test_another_norm_weight_is_refused_before_a_launch(weight: Tensor) -> None:
    step = Entries(LAYOUTS[3], 4, True)
    step.weight = weight.to(DEVICE)
    steps = TorchOps().compress_norm_rope_store
    for run in (compress.compress_norm_rope_store, steps):
        with pytest.raises(ArgumentError, match=r"norm\.weight: expected \[32\] float32 or bfloat16") as raised:
            step.run(run)
        assert str(weight.dtype).removeprefix("torch.") in str(raised.value)


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        (ODD_V41[0], "an even number of dims before those that rotate"),
        (KVCacheLayout.v41_fp8(rounds_to_fp4=True), "a layout whose writer does not round to fp4 first"),
    ],
    ids=["odd", "rounds"],
)
def test_records_that_the_kernel_does_not_write_are_refused_before_a_launch(
    layout: KVCacheLayout, expected: str
) -> None:
    step = Entries(layout, 4, False)
    with observed() as seen, pytest.raises(ArgumentError, match=expected):
        step.run()

    assert seen == []


def test_a_table_of_other_dims_is_refused_before_a_launch() -> None:
    step = Entries(LAYOUTS[3], 4, True)
    step.angles = torch.zeros(9, 6)
    with pytest.raises(ArgumentError, match="cos_sin_cache"):
        step.run()


@pytest.mark.parametrize("layout", [LAYOUTS[0], LAYOUTS[3], LAYOUTS[9], INDEX_LAYOUTS[3]], ids=lambda x: x.fingerprint)
@pytest.mark.parametrize(("ratio", "overlap"), [(4, False), (4, True), (50, False)])
def test_warm_up_foresees_every_form_that_is_launched(layout: KVCacheLayout, ratio: int, overlap: bool) -> None:
    for seed in range(2):
        step = Entries(layout, ratio, overlap, seed, requests=1, allocated=not seed)
        # two rows, as the stride of one means nothing
        kv = strided(torch.zeros(2, step.width), seed)
        slots, positions = torch.zeros(2, 2, dtype=torch.int64, device=DEVICE)
        with observed() as seen:
            compress.save_partial_states(kv, kv, kv.clone(), positions, step.states, slots)
            step.run()
        rope = step.angles.shape[1]
        known = set(compress.variants(layout, ratio, rope, overlap=overlap, aligned=False, aligned_rows=False))
        usual = set(compress.variants(layout, ratio, rope, overlap=overlap))
        names = ["save_kernel", "compress_kernel"] if ratio == 4 else ["save_kernel", "pool_kernel", "compress_kernel"]

        assert [variant.name for variant in seen] == names
        assert set(seen) <= known
        assert usual <= known
        assert seed or set(seen) <= usual


@pytest.mark.device
@pytest.mark.skipif(INTERPRETED or not torch.cuda.is_available(), reason="needs an accelerator with graphs")
@pytest.mark.parametrize(("ratio", "overlap", "requests"), [(4, True, 1), (4, True, 9), (128, False, 9)])
def test_launches_that_overlap_write_what_launches_one_by_one_write(ratio: int, overlap: bool, requests: int) -> None:
    """Each reads what the one before it writes, and the next one writes what it reads; of few tokens and of many."""
    step, count = Entries(LAYOUTS[3], ratio, overlap, requests=requests), 40
    pages, norm = StatePages(step.states, step.table), EntryNorm(step.weight, step.eps, step.angles)
    slots = step.table[step.request.long(), step.positions // step.size] * step.size + step.positions % step.size
    both = torch.randn(count, 2, len(slots), step.width, generator=seeded(1)).to(DEVICE)
    ape = torch.zeros(ratio, step.width, device=DEVICE)

    def run(caches: list[PagedKVCache], wait: Callable[[], object]) -> None:
        for (kv, score), cache in zip(both.unbind(), caches, strict=True):
            compress.save_partial_states(kv, score, ape, step.positions, step.states, slots)
            wait()
            tables = step.request, step.positions, step.slots
            compress.compress_norm_rope_store(pages, *tables, norm, ratio, cache, overlap=overlap)
            wait()

    expected, caches, graph = [step.cache() for _ in both], [step.cache() for _ in both], torch.cuda.CUDAGraph()
    run(expected, torch.cuda.synchronize)
    with torch.cuda.graph(graph):
        run(caches, lambda: None)
    graph.replay()

    assert all(map(torch.equal, map(memory, caches), map(memory, expected)))
    assert not torch.equal(memory(caches[0]), memory(caches[1]))


def change_constants(monkeypatch: pytest.MonkeyPatch, function: str = "_compress_constants", **changes: Any) -> None:
    """Launch kernels with other fields of the forms that a function of `compress` makes."""
    right = getattr(compress, function)

    def changed(*facts: Any, overlap: bool) -> tuple[dict[str, Any], int]:
        constants, warps = right(*facts, overlap=overlap)
        return {name: with_fields(constant, changes) for name, constant in constants.items()}, warps

    monkeypatch.setattr(compress, function, changed)


def with_fields(form: Any, changes: dict[str, Any]) -> Any:
    """A named tuple, and the one in its field `writer`, with those of the changed fields that it has."""
    if not isinstance(form, tuple):
        return form
    fields: dict[str, Any] = form._asdict()  # type: ignore[attr-defined]
    inner = {name: with_fields(value, changes) for name, value in fields.items()}
    return form._replace(**{**inner, **{name: changes[name] for name in changes.keys() & fields}})  # type: ignore[attr-defined]


ONE_PROGRAM, FINISHES, POOLS = (4, "_compress_constants"), (40, "_compress_constants"), (40, "_pool_constants")
"""Ratio, and whose constants change: of a program that makes an entry alone, and of both kernels of long windows."""
BUGS: dict[str, tuple[tuple[int, str], dict[str, Any]]] = {
    "half a window": (ONE_PROGRAM, {"ratio": 2}),
    "no overlap": (ONE_PROGRAM, {"overlap": False}),
    "RoPE one pair early": (ONE_PROGRAM, {"rope": 10}),
    "the other dialect": (ONE_PROGRAM, {"fnuz": True}),
    "RoPE of a long window one pair early": (FINISHES, {"rope": 10}),
    "half a long window": (POOLS, {"ratio": 20}),
    "a dim is left out": (POOLS, {"dim": LAYOUTS[3].head_dim - 1}),
    "lanes that are no rows": (POOLS, {"lanes": 2, "tiles": 1, "ratio": 39}),
}


@pytest.mark.mutation
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (ratio, function), changes = BUGS[bug]
    Entries(LAYOUTS[3], ratio, ratio == 4, 2).check()
    change_constants(monkeypatch, function, **changes)
    # What a mutant leaves unwritten may be memory in which right values of an earlier check stand. So values are those
    # of no other check, and torch fills new memory with NaN in this mode.
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(AssertionError):
            Entries(LAYOUTS[3], ratio, ratio == 4, 100 + [*BUGS].index(bug)).check()
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(("rows", "lanes"), [(1, 1), (2, 4), (8, 2), (4, 8)])
def test_tiles_change_no_entry(rows: int, lanes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    change_constants(monkeypatch, rows=rows, lanes=lanes)
    Entries(LAYOUTS[11], 19, True, 3).check()

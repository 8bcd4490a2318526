"""One random call of the attention kernel, and its answer in float64 from the bytes that were written.

All memory that must not be read is 0xFF, which is NaN in every type of a cache; lists hold believable numbers after
their ends; outputs stand inside larger memory that must not be written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from random import Random
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from attrs import evolve, frozen
from numpy.typing import NDArray
from torch import Tensor

from dsv4attn.backends._triton.attention import launch as attention_launch
from dsv4attn.backends._triton.interpreted import INTERPRETED
from dsv4attn.backends._triton.tuning import Tuning
from dsv4attn.core.cache.layout import Arrangement, Fp8Format, KVCacheLayout, PagedKVCache
from dsv4attn.core.cache.selected_keys import DenseIndices, GatheredKeys, PagedKeys, RaggedIndices
from dsv4attn.core.contract.backend import AttentionCall, AttentionOptions
from dsv4attn.core.model.geometry import LayerGeometry, LayerKind, Rope
from dsv4attn.testing.kit.oracle_cache import place_of
from dsv4attn.testing.kit.tolerances import F64, Expected, read_row, rounded, tolerance, written
from tests.backends._triton.cache.caches import CPU, DEVICE, memory, poisoned
from tests.core.cache import v41_packer
from tests.harness import same_bits, same_memory_on, storage_of

I64 = NDArray[np.int64]
OCP = KVCacheLayout.fp8_ds_mla()
FNUZ = KVCacheLayout.fp8_ds_mla(fp8_format=Fp8Format.FNUZ)
SPLIT_OCP = evolve(OCP, arrangement=Arrangement.INTERLEAVED)
BF16_ROWS, FP32_ROWS = KVCacheLayout.rows(), KVCacheLayout.rows(dtype=torch.float32)
TINY = KVCacheLayout.fp8_ds_mla(24, 8, group_size=8)
NO_SLOTS = (-1, -1, -1, -7, -(2**31), 2**31 - 1, 0x7FC00000)
SINKS = (-math.inf, math.inf, 0.0, 20.0, -20.0, 1e4, -1e4, 0.7, -1.3)
UNTOUCHED = -7.0
FINITE = {
    Fp8Format.OCP: np.setdiff1d(np.arange(256), [0x7F, 0xFF]),
    Fp8Format.FNUZ: np.setdiff1d(np.arange(256), [0x80]),
}
"""Codes that are numbers."""


class Answer(NamedTuple):
    """What a call gives."""

    out: Tensor
    lse: Tensor | None
    max_logits: Tensor | None

    def equals(self, other: Answer, rows: slice = slice(None)) -> bool:
        """Whether some rows of this answer are another one, byte for byte."""
        pairs = zip(self, other, strict=True)
        return all(same_bits(mine[rows], theirs) for mine, theirs in pairs if mine is not None and theirs is not None)


class Segment(NamedTuple):
    """A cache, the value of every slot [capacity, D], and the lists of all rows: slots [T, width], lens [T]."""

    cache: PagedKVCache
    values: F64
    slots: I64
    lens: I64

    def named(self, row: int) -> F64:
        """[n, D] keys of a row."""
        slots = self.slots[row, : min(max(int(self.lens[row]), 0), self.slots.shape[1])]
        keys: F64 = self.values[slots[(slots >= 0) & (slots < len(self.values))]]
        return keys


@frozen(eq=False, slots=False)
class Trial:
    """A call. layouts, pages, widths: of the window's segment and, if there are two, of the compressed one."""

    layouts: Sequence[KVCacheLayout] = (OCP,)
    pages: Sequence[int] = (64, 64)
    widths: Sequence[int] = (40, 70)
    heads: int = 4
    tokens: int = 3
    q_dtype: torch.dtype = torch.bfloat16
    form: Literal["dense", "ragged", "gathered", "gathered-ragged"] = "dense"
    sink: bool = True
    wants_lse: bool = True
    """Whether lse and the largest logits are asked for."""
    aligned: bool = True
    """Whether pages, rows, queries and outputs begin at multiples of 16 bytes and lie such multiples apart."""
    tuning: Tuning = Tuning(heads=16, keys=32)  # noqa: RUF009 - it is frozen
    splits: int = 0
    """Splits of each row; 0: no splits, the kernel writes the output itself."""
    run: int = 0
    """Tiles of a part; 0: a row's tiles are shared evenly."""
    seed: int = 0
    pages_seed: int = 0
    """Another order of the records, and nothing else."""

    @property
    def layer(self) -> LayerGeometry:
        """A layer with the dims of the layouts."""
        layout, two = self.layouts[0], len(self.layouts) == 2
        kind, ratio, topk = (LayerKind.CSA, 4, max(self.widths[1], 1)) if two else (LayerKind.SWA, 1, 0)
        rope = Rope(max(layout.rope_dim, 1), 1e4)
        return LayerGeometry(kind, ratio, self.heads, layout.head_dim, rope, max(self.widths[0], 1), topk)

    @cached_property
    def segments(self) -> list[Segment]:
        """Caches and lists."""
        return [self._segment(i, layout) for i, layout in enumerate(self.layouts)]

    def _segment(self, number: int, layout: KVCacheLayout) -> Segment:
        rng = np.random.default_rng((self.seed, 1, number))
        page, width = self.pages[number], self.widths[number]
        count = int(rng.integers(1, max(width, 1) + 9))
        blocks = int(rng.integers(1, 4)) + -(-2 * count // page)
        keys = [_record(rng, layout) for _ in range(count)]
        slots = rng.integers(-1, count, (self.tokens, width))
        hit = rng.random(slots.shape) < rng.choice([0.0, 0.3, 1.0], p=[0.4, 0.5, 0.1])
        lens = np.resize(rng.permutation([width, width + 5, -3, 0, *rng.integers(0, width + 1, 3)]), self.tokens)
        place = np.random.default_rng((self.pages_seed, 2, number)).permutation(blocks * page)[:count]
        slots = np.where(slots < 0, -1, place[slots])
        slots[hit] = rng.choice([*NO_SLOTS, blocks * page, blocks * page + 1], int(hit.sum()))
        inside = np.arange(width) < lens[:, None]
        named = np.unique(slots[inside & (slots >= 0) & (slots < blocks * page)])
        cache = self._memory(layout, blocks, page, rng)
        values = np.full((blocks * page, layout.head_dim), np.nan)
        for slot, (record, read) in zip(place, keys, strict=True):
            if slot in named:
                _write(cache, int(slot), record)
                values[slot] = read()
        moved = PagedKVCache(same_memory_on(cache.tensor, DEVICE), layout, block_size=page)
        return Segment(moved, values, slots, lens)

    def _memory(self, layout: KVCacheLayout, blocks: int, page: int, rng: np.random.Generator) -> PagedKVCache:
        if self.aligned:
            gap = -page * layout.record_bytes % 16 + math.lcm(16, layout.record_bytes) * int(rng.integers(0, 3))
            return poisoned(layout, blocks, page, gap=gap if layout.is_quantised else 0, start=4096, device=CPU)
        step = max(layout.dtype.itemsize, 2)
        gap, start = (step * int(n) for n in rng.integers(0, 9, 2))
        return poisoned(layout, blocks, page, gap=gap, start=start + 4096, device=CPU)

    @cached_property
    def q(self) -> F64:
        """[T, H, D] queries."""
        rng = np.random.default_rng((self.seed, 3))
        return rounded(rng.standard_normal((self.tokens, self.heads, self.layer.head_dim)), self.q_dtype)

    @cached_property
    def sinks(self) -> F64 | None:
        """[H] sinks: none at all, without limit, large, small."""
        values = np.random.default_rng((self.seed, 4)).choice(SINKS, self.heads)
        return rounded(values, torch.float32) if self.sink else None

    def rows(self, row: int) -> Trial:
        """The same call with one of its rows alone."""
        alone = evolve(self, tokens=1)
        part = slice(row, row + 1)
        alone.__dict__["segments"] = [s._replace(slots=s.slots[part], lens=s.lens[part]) for s in self.segments]
        alone.__dict__["q"] = self.q[part]
        return alone

    def call(self) -> tuple[AttentionCall, list[Tensor]]:
        """The call, and the memory in which its outputs stand."""
        shape, dtype = (self.tokens, self.heads, self.layer.head_dim), self.q_dtype
        pads = (3, 2, 8) if self.aligned else (1, 1, 3)
        q, _ = _loose(shape, dtype, pads, math.nan)
        q.copy_(torch.from_numpy(self.q))
        out, base = _loose(shape, dtype, (1, 3, 16) if self.aligned else (2, 0, 1), UNTOUCHED)
        bases, maxima = [base], []
        for pad in ((0, 3), (2, 1)):
            figures, base = _loose(shape[:2], torch.float32, pad, UNTOUCHED)
            maxima.append(figures if self.wants_lse else None)
            bases.append(base)
        for result in (out, *maxima):
            if result is not None:
                result.fill_(math.nan)
        sink = None if self.sinks is None else torch.from_numpy(self.sinks).float().to(DEVICE)
        parts: list[Tensor] = []
        if self.splits:
            rows = self.tokens, self.splits, self.heads
            sizes = (*rows, self.layer.head_dim), rows, rows
            parts = [torch.full(size, math.nan, device=DEVICE) for size in sizes]
            if self.run:
                parts.append(torch.full((max(self.tokens, 1),), -1, dtype=torch.int32, device=DEVICE))
        return AttentionCall(
            self.layer, q, self._keys(), sink, out, maxima[0], parts, AttentionOptions(maxima[1])
        ), bases

    def _keys(self) -> Sequence[PagedKeys] | GatheredKeys:
        if not self.form.startswith("gathered"):
            return tuple(PagedKeys(s.cache, self._listed(s.slots, s.lens)) for s in self.segments)
        (segment,) = self.segments
        dtype, dim = self.layouts[0].row_dtype, self.layer.head_dim
        kv, _ = _loose((len(segment.values), dim), dtype, (1, 8 if self.aligned else 3), math.nan)
        kv.copy_(torch.from_numpy(segment.values))
        return GatheredKeys(kv, self._listed(segment.slots, segment.lens))

    def _listed(self, slots: I64, lens: I64) -> DenseIndices | RaggedIndices:
        tokens, width = slots.shape
        if not self.form.endswith("ragged"):
            wide = torch.full((tokens, width + 3), 1, dtype=torch.int32)
            wide[:, :width] = torch.from_numpy(slots)
            return DenseIndices(wide.to(DEVICE)[:, :width], _ints(lens))
        counts = lens.clip(0, width)
        ends = np.concatenate([[0], np.cumsum(counts)])
        flat = np.resize([0, 1, *NO_SLOTS], tokens * width + 2)
        flat[: ends[-1]] = np.concatenate([np.zeros(0, np.int64), *(s[:n] for s, n in zip(slots, counts, strict=True))])
        return RaggedIndices(_ints(flat), _ints(ends), width)

    def run_it(self) -> Answer:
        """Run it, and fail if anything was written but the outputs."""
        call, bases = self.call()
        originals = [memory(s.cache) for s in self.segments], call.q.clone()
        attention_launch.attend(call, self.tuning, tiles_per_split=self.run)
        outs = call.out, call.lse, call.max_logits
        answer = Answer(*(None if result is None else result.clone() for result in outs))  # type: ignore[arg-type]
        for result in outs:
            if result is not None:
                result.fill_(UNTOUCHED)
        assert all(bool((base == UNTOUCHED).all()) for base in bases), "memory next to an output was written"
        assert all(torch.equal(memory(s.cache), old) for s, old in zip(self.segments, originals[0], strict=True))
        assert torch.equal(call.q, originals[1])
        return answer

    @cached_property
    def expected(self) -> tuple[Expected, F64]:
        """The oracle's answer, and the largest logits [T, H]."""
        answers = Expected.empty(self.tokens, self.heads, self.layer.head_dim)
        largest = np.full((self.tokens, self.heads), -np.inf)
        for row in range(self.tokens):
            keys = np.concatenate([segment.named(row) for segment in self.segments])
            if len(keys):
                answers.judge(row, self.q[row], [*keys], self.sinks, self.layer.scale)
                largest[row] = (self.layer.scale * self.q[row] @ keys.T).max(-1)
        return answers, largest

    @property
    def budget(self) -> float:
        """Largest error. Interpreted, everything is fp32 until the output is rounded: 2^-8 of it, or nothing."""
        if INTERPRETED:
            return 2.0**-17 + (2.0**-8 if self.q_dtype == torch.bfloat16 else 0)
        return tolerance(self.layouts[0], self.q_dtype)

    def error(self, answer: Answer) -> float:
        """Error in budgets; at most 1 is right, infinity is NaN or a row whose emptiness was not seen."""
        if not self.tokens:
            return 0.0
        expected, largest = self.expected
        errors = [expected.errors(answer.out, answer.lse).max()]
        if answer.max_logits is not None:
            actual = answer.max_logits.double().cpu().numpy()
            with np.errstate(invalid="ignore"):
                off = np.where(np.isneginf(actual) & np.isneginf(largest), 0.0, np.abs(actual - largest))
            errors.append(np.where(np.isnan(off), np.inf, off).max())
        return float(max(errors)) / self.budget

    def check(self) -> Answer:
        """Run it and compare with the oracle."""
        answer = self.run_it()
        assert self.error(answer) <= 1
        return answer


def _record(rng: np.random.Generator, layout: KVCacheLayout) -> tuple[NDArray[Any], Callable[[], F64]]:
    """What is written to a slot, bytes or a row, and a reader of the key it means. Bytes without a meaning are 0xFF."""
    if not layout.is_quantised:
        row = rounded(rng.standard_normal(layout.head_dim), layout.dtype)
        return row, lambda: row
    if layout.name.startswith("v41"):
        return _record_of_codes(rng, layout)
    if layout.fp8_format is None:
        return _record_of_nvfp4(rng, layout)
    finite = FINITE[layout.fp8_format]
    rope = torch.from_numpy(rng.standard_normal(layout.rope_dim)).bfloat16().view(torch.uint8).numpy()
    scales = np.full(layout.scale_bytes, 0xFF)
    scales[: layout.num_groups] = rng.integers(116, 121, layout.num_groups)
    record = np.concatenate([rng.choice(finite, layout.nope_dim), rope, scales]).astype(np.uint8)
    return record, partial(read_row, record, layout)


def _record_of_codes(rng: np.random.Generator, layout: KVCacheLayout) -> tuple[NDArray[Any], Callable[[], F64]]:
    """`_record` of V4.1, as an independent reader understands its bytes."""
    dim, fp8 = layout.head_dim, layout.name == "v41_fp8"
    if fp8:
        codes = rng.choice(FINITE[Fp8Format.OCP], dim)
        scales = rng.integers(116, 121, layout.scale_bytes)
    else:
        codes = rng.integers(0, 256, dim // 2)
        # positive and negative, subnormal and not
        scales = rng.choice([3, 7, 40, 49, 55, 60, 62, 0x80 + 53], layout.scale_bytes)
    record = np.concatenate([codes, scales]).astype(np.uint8)
    return record, partial(v41_packer.unpack_fp8 if fp8 else v41_packer.unpack_fp4, record, dim)


def _record_of_nvfp4(rng: np.random.Generator, layout: KVCacheLayout) -> tuple[NDArray[Any], Callable[[], F64]]:
    """`_record` of V4's record of 4 bits, as an independent reader understands its bytes."""
    rope, scales = rng.standard_normal(layout.rope_dim), np.full(layout.scale_bytes, 0xFF)
    scales[: layout.num_groups] = rng.choice([3, 7, 40, 49, 55, 60, 62, 0x80 + 53], layout.num_groups)
    codes = rng.integers(0, 256, layout.nope_dim // 2)
    plain = torch.from_numpy(rope).bfloat16().view(torch.uint8).numpy()
    record = np.concatenate([codes, plain, scales]).astype(np.uint8)
    return record, partial(v41_packer.unpack_nvfp4, record, layout.nope_dim, layout.rope_dim)


def _write(cache: PagedKVCache, slot: int, record: NDArray[Any]) -> None:
    """Write to a cache on the CPU, by the byte rule of the format and not by the views of the package."""
    block, offset = divmod(slot, cache.block_size)
    if not cache.layout.is_quantised:
        cache.tensor[block, offset] = torch.from_numpy(record).to(cache.layout.dtype)
        return
    raw = storage_of(cache.tensor).numpy()
    start = cache.tensor.storage_offset() + block * cache.page_stride
    raw[start + place_of(cache.layout, offset, cache.block_size)] = record


def rising(tokens: int, logits: Sequence[float]) -> Trial:
    """A page for each of these logits, whose 64 keys all have that logit; each row lists the pages in another order."""
    trial = Trial(widths=(64 * len(logits),), heads=5, tokens=tokens)
    rng, count = np.random.default_rng(5), 64 * len(logits)
    keys = rng.standard_normal((count, OCP.head_dim))
    # a rope value, which is stored as it is
    keys[:, -1] = np.repeat(logits, 64)
    cache, records = poisoned(OCP, len(logits), 64, start=4096, device=CPU), [written(key, OCP) for key in keys]
    for slot, record in enumerate(records):
        _write(cache, slot, record)
    values = np.stack([read_row(record, OCP) for record in records])
    slots = np.stack([np.roll(np.arange(count), 64 * t) for t in range(tokens)])
    moved = PagedKVCache(same_memory_on(cache.tensor, DEVICE), OCP, block_size=64)
    trial.__dict__["segments"] = [Segment(moved, values, slots, np.full(tokens, count))]
    q = np.zeros((tokens, trial.heads, OCP.head_dim))
    q[..., -1] = np.array([1.0, 0.5, -1.0, 0.0, -0.25]) / trial.layer.scale
    trial.__dict__["q"] = rounded(q, trial.q_dtype)
    return trial


def _loose(shape: Sequence[int], dtype: torch.dtype, pads: Sequence[int], fill: float) -> tuple[Tensor, Tensor]:
    """A view of a larger tensor, and that tensor, full of `fill`; only the last dimension has unit stride."""
    base = torch.full([n + pad for n, pad in zip(shape, pads, strict=True)], fill, dtype=dtype, device=DEVICE)
    return base[tuple(slice(n) for n in shape)], base


def _ints(values: I64) -> Tensor:
    return torch.from_numpy(np.asarray(values, dtype=np.int32)).to(DEVICE)


FULL = [OCP, FNUZ, SPLIT_OCP, BF16_ROWS]
SMALL = [
    TINY,
    evolve(TINY, fp8_format=Fp8Format.FNUZ, fp8_max=240.0),
    evolve(TINY, arrangement=Arrangement.INTERLEAVED),
    evolve(TINY, group_size=5),  # the last group is short
    KVCacheLayout.rows(24, 8),
]
FAMILIES = [FULL, FULL, SMALL, SMALL, [FP32_ROWS], [KVCacheLayout.rows(24, 8, dtype=torch.float32)]]
MOST_TILES = 40
"""Of a call: each takes about 15 ms in the interpreter."""
WIDTHS = [0, 1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 128, 129, 200, 300]


def any_trial(seed: int) -> Trial:
    """Any call at all. A pair of caches must read as the same type, and gathered rows are one segment."""
    rng = Random(seed)
    family = rng.choice(FAMILIES)
    form: Any = rng.choice(["dense", "dense", "dense", "ragged", "gathered", "gathered-ragged"])
    number = 1 if form.startswith("gathered") else rng.choice([1, 2, 2])
    widths = [rng.choice(WIDTHS) for _ in range(number)]
    keys, most = rng.choice([16, 32, 64, 128]), rng.choice([16, 32, 64])
    keys = keys if INTERPRETED else min(keys, 64)  # what the shared memory of a device holds
    run, splits = rng.choice([(0, 0), (0, 0), (0, rng.randint(1, 7)), (rng.randint(1, 3), 0)])
    if run:
        splits = -(-(-(-sum(widths) // keys) + 1) // run) + rng.randint(0, 2)
    heads, tokens = rng.choice([1, 2, 3, 7, 16, 17, 33, 64, 128]), rng.randint(1, 3)
    while INTERPRETED and tokens * -(-heads // most) * (sum(widths) // min(keys, 32) + 1) > MOST_TILES:
        widths, heads, tokens = [w * 2 // 3 for w in widths], -(-heads // 2), max(tokens - 1, 1)
    return Trial(
        layouts=[rng.choice(family) for _ in range(number)],
        pages=[rng.choice([1, 2, 5, 53, 64]) for _ in range(number)],
        widths=widths,
        heads=heads,
        tokens=tokens,
        q_dtype=rng.choice([torch.bfloat16, torch.float32]),
        form=form,
        sink=rng.random() < 0.7,
        wants_lse=rng.random() < 0.7,
        aligned=rng.random() < 0.6,
        tuning=Tuning(heads=most, keys=keys, prefetch=rng.random() < 0.7),
        splits=splits,
        run=run,
        seed=seed,
    )

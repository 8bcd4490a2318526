"""Random cases in the manner of FlashMLA's tests, and attention in float64, one row at a time.

Nothing here comes from the package: records are made of random codes, scales and RoPE values, so that the value of
every key is known without a quantiser, and all bytes that no index names are 0xFF, which is NaN wherever it is read.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import numpy as np
import torch
from attrs import evolve, field, frozen
from torch import Tensor

DIM, NOPE = 512, 448


@frozen
class Scope:
    """One paged cache and its selected entries: mean tokens of a sequence, columns of indices, records of a page."""

    s_kv: int
    topk: int
    page: int
    lengths: bool = False
    gap: int = 0
    """Bytes between pages, besides the padding that rounds a page up to a multiple of 576."""


@frozen
class DecodeCase:
    main: Scope
    extra: Scope | None = None
    batch: int = 4
    s_q: int = 1
    heads: int = 4
    sink: bool = True
    same_lengths: bool = False
    zero_lengths: bool = False
    all_invalid: bool = False
    scale: float = DIM**-0.55

    def __str__(self) -> str:
        scopes = "+".join(
            f"{s.s_kv}.{s.topk}.p{s.page}{'L' if s.lengths else ''}" for s in (self.main, self.extra) if s
        )
        flags = [f for f in ("same_lengths", "zero_lengths", "all_invalid") if getattr(self, f)]
        return "-".join(
            [f"b{self.batch}x{self.s_q}", f"h{self.heads}", scopes, *flags, *([] if self.sink else ["nosink"])]
        )


@frozen
class PrefillCase:
    s_q: int
    s_kv: int
    topk: int
    heads: int = 4
    sink: bool = False
    lengths: bool = False
    some_empty: bool = False
    scale: float = 0.5

    def __str__(self) -> str:
        flags = [f for f in ("sink", "lengths", "some_empty") if getattr(self, f)]
        return "-".join([f"q{self.s_q}", f"kv{self.s_kv}", f"k{self.topk}", f"h{self.heads}", *flags])


SHAPES = [
    Scope(512, 64, 2),
    Scope(512, 64, 64),
    Scope(512, 64, 69),
    Scope(1024, 576, 2),
    Scope(1024, 576, 61),
    Scope(2046, 2048, 2),
    Scope(2046, 2048, 64),
    Scope(2046, 2048, 576),
]
CORNER_SHAPES = [Scope(512, 64, 61), Scope(650, 576, 53)]


def _pairs() -> Iterator[DecodeCase]:
    """Every shape alone, and with another as the second cache; lengths and s_q take turns."""
    for i, shape in enumerate(SHAPES):
        main = evolve(shape, lengths=i % 2 == 0, gap=1152 * (i % 3))
        yield DecodeCase(main, s_q=1 + 2 * (i % 2), batch=1 + i % 4, scale=0.3)
        extra = evolve(SHAPES[(3 * i + 1) % 8], lengths=i % 4 < 2, gap=64 * (i % 2))
        yield DecodeCase(evolve(main, lengths=i % 3 == 0), extra, s_q=3 - 2 * (i % 2), batch=2)


def _corners() -> Iterator[DecodeCase]:
    for i, shape in enumerate(CORNER_SHAPES):
        for extra in (None, CORNER_SHAPES[1 - i]):
            for bits in range(1, 8):
                lengths = bool(bits & 1)
                yield DecodeCase(
                    evolve(shape, lengths=lengths),
                    extra and evolve(extra, lengths=not lengths),
                    batch=3,
                    s_q=3,
                    sink=bool(bits & 1),
                    zero_lengths=bool(bits & 2),
                    all_invalid=bool(bits & 4),
                    scale=0.2,
                )


SMALL_DECODE = [
    *_pairs(),
    *_corners(),
    DecodeCase(SHAPES[2], evolve(SHAPES[0], lengths=True), batch=74),
    DecodeCase(SHAPES[1], SHAPES[2], batch=74, same_lengths=True),
    DecodeCase(evolve(CORNER_SHAPES[0], lengths=True), batch=321, heads=2),
    DecodeCase(CORNER_SHAPES[0], batch=321, s_q=3, heads=2, zero_lengths=True),
    DecodeCase(SHAPES[4], SHAPES[1], batch=2, heads=64, scale=0.3),
    DecodeCase(SHAPES[1], SHAPES[3], batch=2, s_q=3, heads=128),
    DecodeCase(SHAPES[0], batch=3, heads=1),
    DecodeCase(SHAPES[2], batch=3, heads=17, scale=-0.1),
]


def _sample(count: int) -> Iterator[DecodeCase]:
    """From the product that FlashMLA's tests go through: shapes, second shapes, lengths, heads, batches, s_q."""
    rng = np.random.default_rng(20250429)
    while count:
        main, extra = (evolve(SHAPES[rng.integers(8)], lengths=bool(rng.integers(2))) for _ in range(2))
        batch, s_q, heads = int(rng.choice([4, 74, 321])), int(rng.choice([1, 3])), int(rng.choice([64, 128]))
        yield DecodeCase(main, extra if rng.integers(3) else None, batch, s_q, heads, same_lengths=not rng.integers(4))
        count -= 1


BIG_DECODE = [*_sample(20), DecodeCase(SHAPES[6], SHAPES[7], batch=321, s_q=3, heads=128)]

SMALL_PREFILL = [
    *(
        PrefillCase(1 + 61 * (i % 2), s, k)
        for i, (s, k) in enumerate([(128, 128), (592, 128), (1840, 256), (114, 384)])
    ),
    *(
        PrefillCase(62, s, k, 3, sink=bool(i & 1), lengths=bool(i & 2))
        for i, (s, k) in enumerate([(592, 128), (95, 128), (153, 256), (114, 384)])
    ),
    PrefillCase(213, 95, 128, 2, sink=True),
    PrefillCase(4, 256, 256, 64, sink=True, lengths=True, some_empty=True),
    PrefillCase(62, 592, 128, sink=True, lengths=True, some_empty=True),
    PrefillCase(3, 32, 2048, sink=True, lengths=True),
    PrefillCase(5, 1, 64, 128, sink=True),
]
BIG_PREFILL = [
    *(
        PrefillCase(213, s, k, heads, sink=True, lengths=True)
        for heads in (64, 128)
        for s, k in [(1840, 256), (1592, 384), (1521, 512)]
    ),
    PrefillCase(1234, 4321, 4096, 64, sink=True, lengths=True, some_empty=True),
    PrefillCase(1024, 64, 8192, 64, sink=True, lengths=True),
]


class Definition:
    """out [T, H, D], largest logit and lse [T, H]: zeros, -inf and +inf for rows without keys."""

    def __init__(self, q: Tensor, keys_of: list[list[Tensor]], scale: float, sink: Tensor | None) -> None:
        """Compute it. q: [T, H, D]. keys_of: the keys [n, D] of each row, from any number of places."""
        tokens, heads, dim = q.shape
        self.out = torch.zeros(tokens, heads, dim, dtype=torch.float64)
        self.top = torch.full((tokens, heads), -torch.inf, dtype=torch.float64)
        self.lse = torch.full((tokens, heads), torch.inf, dtype=torch.float64)
        for t, places in enumerate(keys_of):
            keys = torch.cat(places).double()
            if not len(keys):
                continue
            logits = scale * (q[t].double() @ keys.T)
            self.top[t], self.lse[t] = logits.amax(1), logits.logsumexp(1)
            weights = (logits - self.lse[t, :, None]).exp()
            if sink is not None:
                weights = weights / (1 + (sink.double() - self.lse[t]).exp())[:, None]
            self.out[t] = weights @ keys


def generator_of(case: object) -> torch.Generator:
    """The same numbers for the same case, whatever ran before."""
    return torch.Generator().manual_seed(zlib.crc32(repr(case).encode()))


def spread(tensor: Tensor) -> Tensor:
    """The same values with gaps in every dimension but the last one's stride of one."""
    shape = [n + 1 for n in tensor.shape[:-1]] + [tensor.shape[-1] + 128]
    wide = torch.empty(shape, dtype=tensor.dtype)
    view = wide[tuple(slice(n) for n in tensor.shape)]
    return view.copy_(tensor)


def sinks(heads: int, g: torch.Generator) -> Tensor:
    """Normal ones, and a third each of -inf and +inf."""
    sink, kind = torch.randn(heads, generator=g), torch.randn(heads, generator=g)
    return sink.masked_fill_(kind > 0.5, torch.inf).masked_fill_(kind < -0.5, -torch.inf)


@frozen(eq=False)
class Paged:
    """cache: [blocks, page, 1, 584] of one-byte type. indices: [b, s_q, topk]. lengths: [b] or None."""

    cache: Tensor
    indices: Tensor
    lengths: Tensor | None
    keys_of: list[Tensor] = field(repr=False)
    """Keys [n, D] of each query, fp64."""

    @classmethod
    def make(cls, scope: Scope, case: DecodeCase, g: torch.Generator) -> Paged:
        """Sequences of random lengths in shuffled pages, of each query a random choice in random columns."""
        batch, page = case.batch, scope.page
        mean = torch.full((batch,), float(scope.s_kv))
        lens = mean if case.same_lengths else torch.normal(mean, scope.s_kv / 2, generator=g)
        lens = lens.clamp(case.s_q, 2 * scope.s_kv).long()
        if case.zero_lengths:
            lens[torch.randn(batch, generator=g) > 0] = 0
        per_sequence = int(lens.max()) // page + 1
        blocks = batch * per_sequence + 1
        table = torch.randperm(blocks, generator=g)[:-1].view(batch, per_sequence)
        nothing = torch.tensor([-1, -1, -1, -(2**31), blocks * page, 2**31 - 1])
        indices = nothing[torch.randint(len(nothing), (batch, case.s_q, scope.topk), generator=g)]
        for b in range(0 if case.all_invalid else batch):
            n = min(int(lens[b]), scope.topk)
            for j in range(case.s_q):
                chosen = torch.randperm(int(lens[b]), generator=g)[:n]
                columns = torch.randperm(scope.topk, generator=g)[:n]
                indices[b, j, columns] = table[b, chosen // page] * page + chosen % page
        lengths = torch.randint(scope.topk + 1, (batch,), generator=g).int() if scope.lengths else None
        ends = torch.full((batch,), scope.topk) if lengths is None else lengths
        named = (torch.arange(scope.topk) < ends[:, None, None]) & (indices >= 0) & (indices < blocks * page)
        slots = indices[named].unique()
        cache, keys = _records(slots, blocks, scope, g)
        rows = zip(indices.flatten(0, 1), named.flatten(0, 1), strict=True)
        keys_of = [keys[torch.searchsorted(slots, row[mask])] for row, mask in rows]
        return cls(cache, spread(indices.int()), lengths, keys_of)


def _records(slots: Tensor, blocks: int, scope: Scope, g: torch.Generator) -> tuple[Tensor, Tensor]:
    """A cache that is 0xFF except for random records in `slots`, and the values [n, D] of those."""
    page, n = scope.page, len(slots)
    stride = -(-page * 584 // 576) * 576 + scope.gap
    raw = torch.full((blocks * stride,), 0xFF, dtype=torch.uint8)
    data = raw.as_strided((blocks, page, 576), (stride, 576, 1))
    scales = raw.as_strided((blocks, page, 8), (stride, 8, 1), page * 576)
    codes = (64 * torch.randn(n, NOPE, generator=g)).clamp_(-448, 448).to(torch.float8_e4m3fn)
    exponents = torch.randint(-11, -7, (n, 7), generator=g)
    rope = (torch.randn(n, DIM - NOPE, generator=g) / 10).bfloat16()
    data[slots // page, slots % page] = torch.cat([codes.view(torch.uint8), rope.view(torch.uint8)], 1)
    scales[slots // page, slots % page, :7] = (exponents + 127).to(torch.uint8)
    values = codes.double() * torch.exp2(exponents.double()).repeat_interleave(64, 1)
    shape = raw.as_strided((blocks, page, 1, 584), (stride, 584, 584, 1))
    return shape.view(torch.float8_e4m3fn), torch.cat([values, rope.double()], 1)


@frozen(eq=False)
class Rows:
    """kv: [s_kv, 1, 512] bf16. indices: [s_q, 1, topk]. lengths: [s_q] or None. keys_of: as in `Paged`."""

    kv: Tensor
    indices: Tensor
    lengths: Tensor | None
    keys_of: list[Tensor] = field(repr=False)

    @classmethod
    def make(cls, case: PrefillCase, g: torch.Generator) -> Rows:
        """A random choice for each query, the rest anything that is not a row; rows that no query names are NaN."""
        s_q, s_kv, topk = case.s_q, case.s_kv, case.topk
        nothing = torch.tensor([-(2**31), -123456, -1, s_kv, 114514, 1919810, 2147480000, 2**31 - 1])
        indices = nothing[torch.randint(len(nothing), (s_q, topk), generator=g)]
        n = min(s_kv, topk)
        for row in indices:
            row[torch.randperm(topk, generator=g)[:n]] = torch.randperm(s_kv, generator=g)[:n]
        if case.some_empty:
            indices[torch.rand(s_q, generator=g) < 0.3] = int(nothing[s_q % len(nothing)])
        lengths = torch.randint(max(topk, 64) + 1, (s_q,), generator=g).clamp_(max=topk) if case.lengths else None
        ends = torch.full((s_q,), topk) if lengths is None else lengths
        named = (torch.arange(topk) < ends[:, None]) & (indices >= 0) & (indices < s_kv)
        shift = float(torch.rand((), generator=g) - 0.5) / 10
        kv = (torch.randn(s_kv, DIM, generator=g) / 10 + shift).bfloat16()
        unused = torch.ones(s_kv, dtype=torch.bool)
        unused[indices[named]] = False
        kv[unused] = torch.nan
        keys_of = [kv[row[mask]].double() for row, mask in zip(indices, named, strict=True)]
        ints = None if lengths is None else lengths.int()
        return cls(spread(kv[:, None]), spread(indices.int()[:, None]), ints, keys_of)

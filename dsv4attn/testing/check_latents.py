"""Latents of DeepSeek-V4.1's compressor: requests cut into steps, rings of states, and records of what is stored."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import attrs
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dsv4attn.core.cache.layout import KVCacheLayout
from dsv4attn.core.contract.backend import complete
from dsv4attn.core.contract.problem import Problem
from dsv4attn.core.model.geometry import LayerKind, ModelGeometry
from dsv4attn.testing import oracle, oracle_v41
from dsv4attn.testing.case import Bench, Measure, Wrong
from dsv4attn.testing.check_compressor import Span, attention_problems
from dsv4attn.testing.layer_tolerances import Formula, hold_record, hold_values
from dsv4attn.testing.oracle_cache import OracleCache, PagePlacement, place_of
from dsv4attn.testing.pages import Pages
from dsv4attn.testing.random_step import STALE_POSITIONS, normal
from dsv4attn.testing.tolerances import F64, rounded

__all__ = ["LatentSteps", "makes_latents", "replaces_drafts", "stores"]

KV, SCORE, WEIGHT, ANGLES, STATES, ENTRIES = range(100, 106)
"""Streams of random numbers."""
OFFSETS = (0.0, 100.0, -100.0, 0.0)
"""Added to the scores of every fourth channel: fp32 has no exponential of the larger ones."""


@attrs.frozen(kw_only=True, eq=False, slots=False)
class LatentSteps:
    """Tokens of some requests from their first one on, and the pages of their rings and entries.

    geometry: the model.
    layout: layout of the cache of entries.
    ratio: tokens of an entry.
    lengths: tokens of each request.
    state_page: tokens of a block of a ring.
    ring_blocks: blocks of a ring.
    size: scale of kv.
    eps: epsilon of the norms.
    seed: seed of all random numbers.
    device: torch device.
    """

    geometry: ModelGeometry
    layout: KVCacheLayout
    ratio: int = 2
    lengths: Sequence[int] = (31, 8, 17)
    state_page: int = 8
    ring_blocks: int = 1
    size: float = 1.0
    eps: float = 1e-20
    seed: int = 0
    device: str = "cpu"

    def named_layouts(self) -> list[KVCacheLayout]:
        """Layouts of both caches."""
        return [KVCacheLayout.compressor_state(self.dim), self.layout]

    def problems(self, *, lse: bool = True) -> list[Problem]:
        """Decode on a layer with a selection."""
        return attention_problems(self.geometry.layer_of_kind(LayerKind.C4A), self.layout, lse=lse)

    @property
    def dim(self) -> int:
        """Dims of an entry."""
        return self.layout.head_dim

    @property
    def ring(self) -> int:
        """Tokens of a ring."""
        return self.state_page * self.ring_blocks

    def rows(self, stream: int, request: int, positions: Sequence[int]) -> F64:
        """[n, d] kv or scores of tokens."""
        drawn = normal((self.seed, stream, request), np.asarray(positions, dtype=np.int64), self.dim)
        if stream == SCORE:
            return rounded(2 * drawn + np.resize(OFFSETS, self.dim), torch.float32)
        return rounded(self.size * drawn, torch.float32)

    def weight(self) -> F64:
        """[d] weight of a norm."""
        return rounded(1 + 0.5 * normal((self.seed, WEIGHT), np.zeros(1, dtype=np.int64), self.dim)[0], torch.float32)

    def latent(self, request: int, number: int) -> Formula:
        """A latent before it is rounded."""
        window = range(number * self.ratio, (number + 1) * self.ratio)
        kv = Formula.exact(self.rows(KV, request, window))
        made = Formula.exact(kv.value[0]) if self.ratio == 1 else kv.pooled(self.rows(SCORE, request, window))
        return made.normed(self.weight(), self.eps)

    def state_pages(self) -> Pages:
        """Pages of the rings."""
        live = [(0, self.ring)] * len(self.lengths)
        return Pages(live, self.state_page, spare=2, dead=-1, key=(STATES,))

    def tensor(self, values: NDArray[np.generic], dtype: torch.dtype | None = None) -> Tensor:
        """Values on the device."""
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.device, dtype)

    def tokens(self, spans: Sequence[Span]) -> tuple[Tensor, Tensor]:
        """Positions [T] int64 and requests [T] int32."""
        pairs = [(request, position) for request, positions in spans for position in positions]
        requests, positions = (np.array([pair[i] for pair in pairs], dtype=np.int64) for i in range(2))
        return self.tensor(positions), self.tensor(requests, torch.int32)

    def values(self, stream: int, spans: Sequence[Span]) -> Tensor:
        """[T, d] kv or scores."""
        rows = [self.rows(stream, request, positions) for request, positions in spans if len(positions)]
        return self.tensor(np.concatenate([np.zeros((0, self.dim)), *rows]), torch.float32)

    def steps(self, sizes: Sequence[int]) -> list[list[Span]]:
        """Steps of all requests, of these sizes again and again; request i begins with the i-th."""
        done, found = [0] * len(self.lengths), list[list[Span]]()
        while any(at < length for at, length in zip(done, self.lengths, strict=True)):
            ends = [min(at + sizes[(len(found) + i) % len(sizes)], self.lengths[i]) for i, at in enumerate(done)]
            found.append([(i, range(at, end)) for i, (at, end) in enumerate(zip(done, ends, strict=True))])
            done = ends
        return found


def _run(
    bench: Bench, inputs: LatentSteps, states: OracleCache | None, spans: Sequence[Span], *, padded: bool = False
) -> Tensor:
    """The latents [T, d] of a step. Raises Wrong if what was given is changed.

    padded: whether rows of padding, with NaN and stale positions, stand between the requests. Their latents, which are
    not returned, must be zeros.
    """
    positions, requests = inputs.tokens(spans)
    kv, score = (inputs.values(stream, spans) for stream in (KV, SCORE))
    rows, live = list(range(len(positions))), torch.arange(len(positions), device="cpu")
    if padded:
        positions, requests, kv, score, live = _with_padding(inputs, spans, positions, requests, kv, score)
        rows = live.tolist()
    before = kv.clone(), score.clone()
    weight = inputs.tensor(inputs.weight(), torch.float32)
    rest = positions, requests, weight, inputs.eps, inputs.ratio
    run = complete(bench.backend).layer_ops.compress_latents
    if states is None:
        found = run(kv, None, *rest)
    else:
        found = run(kv, score, *rest, states.cache, inputs.tensor(inputs.state_pages().table[:, : inputs.ring_blocks]))
    pairs = (kv, before[0]), (score, before[1])
    if not all(torch.equal(one.view(torch.int32), other.view(torch.int32)) for one, other in pairs):
        raise Wrong("kv or scores were changed")
    if found.dtype != torch.bfloat16 or found.shape != kv.shape:
        raise Wrong(f"latents: {list(found.shape)} {found.dtype}, expected {list(kv.shape)} torch.bfloat16")
    for row in sorted({*range(len(found))} - {*rows}):
        if not torch.equal(found[row], torch.zeros_like(found[row])):
            raise Wrong(f"latent of row {row}, which is padding: not zero")
    return found[live.to(found.device)]


def _with_padding(
    inputs: LatentSteps, spans: Sequence[Span], positions: Tensor, requests: Tensor, kv: Tensor, score: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(positions, requests, kv, scores, rows of the tokens), with rows of padding before and after each request.

    Padding has the position after the request's last one, the position of its first one, and stale ones.
    """
    order, extra, token = list[int](), list[int](), 0
    for request, span in [(-1, range(0)), *spans]:
        order += range(token, token + len(span))
        token += len(span)
        last = [span[-1] + 1, span[0]] if len(span) else []
        for position in (*last, STALE_POSITIONS[request], STALE_POSITIONS[request - 1]):
            order.append(len(positions) + len(extra))
            extra.append(position)
    places = torch.tensor(order, dtype=torch.int64, device=inputs.device)
    nothing = kv.new_full((len(extra), inputs.dim), math.nan)
    positions = torch.cat([positions, inputs.tensor(np.array(extra, dtype=np.int64))])[places]
    requests = torch.cat([requests, requests.new_full((len(extra),), -1)])[places]
    kv, score = (torch.cat([values, nothing])[places] for values in (kv, score))
    return positions, requests, kv, score, (places < token).nonzero()[:, 0]


def _place(what: str, at: tuple[int, ...]) -> str:
    return f"{what}, {list(at)}"


def _judge(inputs: LatentSteps, found: Tensor, spans: Sequence[Span]) -> Measure:
    worst, pairs = Measure(0.0, 1.0), [(request, p) for request, positions in spans for p in positions]
    for row, (request, position) in zip(found, pairs, strict=True):
        if (position + 1) % inputs.ratio:
            continue
        where = f"latent {position // inputs.ratio} of request {request}"
        wanted = inputs.latent(request, position // inputs.ratio)
        measure = hold_values(row, wanted, torch.bfloat16, partial(_place, where))
        worst = max(worst, measure, key=lambda m: m.fraction)
    return worst


def _blank(inputs: LatentSteps) -> OracleCache:
    layout = KVCacheLayout.compressor_state(inputs.dim)
    oracle_cache = OracleCache.blank(
        layout, inputs.state_pages().count, PagePlacement(inputs.state_page, 0), inputs.device
    )
    oracle_cache.placement.pages(oracle_cache.cache, 4096).fill_(0xFF)
    return oracle_cache


def _judge_rings(inputs: LatentSteps, states: OracleCache, steps: Sequence[Sequence[Span]]) -> None:
    """The rings hold kv and scores of the last tokens, and no other byte was written. Raises Wrong."""
    wanted, pages = _blank(inputs), inputs.state_pages()
    for request in range(len(inputs.lengths)):
        held = oracle_v41.ring_rows([positions for step in steps for i, positions in step if i == request], inputs.ring)
        rows = np.concatenate([inputs.rows(stream, request, list(held.values())) for stream in (KV, SCORE)], 1)
        wanted.write(pages.slots(request, held), rows)
    now, right = states.bytes(), wanted.bytes()
    if not np.array_equal(now, right):
        page, byte = (int(axis[0]) for axis in np.nonzero(now != right))
        raise Wrong(f"{int((now != right).sum())} bytes of rings differ, first byte {byte} of page {page}")


def makes_latents(*cuts: Sequence[int], padded: bool = False) -> Callable[[Bench, LatentSteps], Measure]:
    """Latents, and rings if the ratio has them, however requests are cut into steps of these sizes.

    padded: whether every step has rows of padding too.
    """

    def check(bench: Bench, inputs: LatentSteps) -> Measure:
        worst = Measure(0.0, 1.0)
        for sizes in ((2**20,), *cuts):
            steps, states = inputs.steps(sizes), _blank(inputs) if inputs.ratio > 1 else None
            for spans in steps:
                measure = _judge(inputs, _run(bench, inputs, states, spans, padded=padded), spans)
                worst = max(worst, measure, key=lambda m: m.fraction)
            if states is not None:
                _judge_rings(inputs, states, steps)
        return worst

    return check


def replaces_drafts(bench: Bench, inputs: LatentSteps) -> Measure:
    """Drafts of another seed are written, and replaced."""
    drafts, states = attrs.evolve(inputs, seed=inputs.seed + 1), _blank(inputs)
    worst, last = Measure(0.0, 1.0), max(inputs.lengths)
    for begin, end, values in ((0, 5, inputs), (5, 8, drafts), (5, 6, inputs), (6, 8, drafts), (6, last, inputs)):
        spans = [(i, range(length)[begin:end]) for i, length in enumerate(inputs.lengths)]
        found = _run(bench, values, states, spans)
        if values is inputs:
            worst = max(worst, _judge(inputs, found, spans), key=lambda m: m.fraction)
    _judge_rings(inputs, states, [[(i, range(length)) for i, length in enumerate(inputs.lengths)]])
    return worst


def stores(*, normed: bool, padded: bool = False) -> Callable[[Bench, LatentSteps], Measure]:
    """Rows are stored for the tokens that complete an entry. normed: whether they go through a norm, as index keys.

    padded: whether rows of padding, with NaN and stale positions, stand before and after the tokens.
    """

    def check(bench: Bench, inputs: LatentSteps) -> Measure:
        spans = [(i, range(length)) for i, length in enumerate(inputs.lengths)]
        live = [(0, -(-length // inputs.ratio)) for length in inputs.lengths]
        pages = Pages(live, 16, spare=2, dead=-1, key=(inputs.seed, ENTRIES))
        oracle_cache = OracleCache.blank(inputs.layout, pages.count, PagePlacement(16, 0), inputs.device)
        (positions, requests), x = inputs.tokens(spans), inputs.values(KV, spans).bfloat16()
        pairs = list(zip(requests.tolist(), positions.tolist(), strict=True))
        # every token has a slot: only those that complete an entry may use it
        slots = np.array([pages.slots(request, [p // inputs.ratio])[0] for request, p in pairs])
        slots[-inputs.ratio :] = [oracle_cache.cache.capacity, -7, -1][: inputs.ratio]
        if padded:
            around, nothing = (
                inputs.tensor(np.array(STALE_POSITIONS)),
                x.new_full((len(STALE_POSITIONS), inputs.dim), math.nan),
            )
            positions, x = torch.cat([around, positions, around]), torch.cat([nothing, x, nothing])
            missing = [(-1, position) for position in STALE_POSITIONS]
            pairs, slots = [*missing, *pairs, *missing], np.pad(slots, len(missing), constant_values=-1)
        angles = np.random.default_rng((inputs.seed, ANGLES)).uniform(-math.pi, math.pi, (max(inputs.lengths), 32))
        table = rounded(np.concatenate([np.cos(angles), np.sin(angles)], 1), torch.float32)
        weight = inputs.tensor(inputs.weight(), torch.float32) if normed else None
        original, before = x.clone(), oracle_cache.bytes()
        norm = weight, inputs.eps, inputs.tensor(table, torch.float32)
        steps = complete(bench.backend).layer_ops
        steps.norm_rope_store(x, positions, inputs.tensor(slots), *norm, inputs.ratio, oracle_cache.cache)
        if not torch.equal(x.view(torch.int16), original.view(torch.int16)):
            raise Wrong("the rows that were given were changed")
        now, untouched, worst = oracle_cache.bytes(), before.copy(), Measure()
        for row, slot, (request, p) in zip(original.double().cpu().numpy(), slots, pairs, strict=True):
            if (p + 1) % inputs.ratio or not 0 <= slot < oracle_cache.cache.capacity:
                continue
            place, where = (slot // 16, place_of(inputs.layout, slot % 16, 16)), f"token {p} of request {request}"
            wanted = Formula.exact(row)
            if normed:
                wanted = _in_bf16(wanted.normed(inputs.weight(), inputs.eps))
            wanted = wanted.turned(*np.split(table[p // inputs.ratio * inputs.ratio], 2))
            measure = hold_record(now[place], wanted, inputs.layout, where)
            worst, untouched[place] = max(worst, measure, key=lambda m: m.fraction), now[place]
        if not np.array_equal(now, untouched):
            raise Wrong("bytes that belong to no entry of the step were written")
        return worst

    return check


def _in_bf16(formula: Formula) -> Formula:
    """Values rounded to bf16; near a midpoint either neighbour is right."""
    value = oracle.round_bf16(formula.value)
    ends = [np.abs(oracle.round_bf16(end) - value) for end in formula.ends]
    return Formula(value, np.maximum(*ends))

"""Selection in two levels: candidate blocks that are published, and selection among their entries."""

from __future__ import annotations

import math
from functools import cached_property

import attrs
import numpy as np
import torch
from numpy.typing import NDArray

from dsv4attn.core.contract.backend import complete
from dsv4attn.testing import oracle_v41
from dsv4attn.testing.case import Bench, Measure, Wrong
from dsv4attn.testing.check_selection import IndexSelection, judge_row, sum_bits

__all__ = ["CandidateSelection", "publishes", "selects_within", "selects_within_published"]

BLOCKS = 110
"""Stream of random numbers."""
GARBAGE = 0x5A5A5A5A
"""What `out` holds before."""
STRANGE = (-1, -5, 2**31 - 1, -(2**31), 2**20)
"""Numbers of blocks that do not exist."""


@attrs.frozen(kw_only=True, eq=False, slots=False)
class CandidateSelection(IndexSelection):
    """A selection with candidate blocks.

    blocks: N, candidates of a token.
    block_size: entries of a block.
    """

    blocks: int = 12
    block_size: int = 8

    @cached_property
    def candidates(self) -> NDArray[np.int32]:
        """[T, N] blocks of each token in any order, among them some that do not exist, and -1 between others."""
        rng = np.random.default_rng((self.seed, BLOCKS))
        rows = np.full((len(self.tokens), self.blocks), -1, dtype=np.int32)
        for row, (_, seen) in zip(rows, self.tokens, strict=True):
            there = rng.permutation(-(-seen // self.block_size) + 2)[: self.blocks]  # some behind the visible ones
            row[: len(there)] = there
            row[rng.random(self.blocks) < 0.2] = rng.choice(STRANGE)
            rng.shuffle(row)
        return rows


def _maps(inputs: CandidateSelection) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Block table, requests and visible entries of the tokens."""
    owners, seen = (np.array([token[i] for token in inputs.tokens], dtype=np.int32) for i in range(2))
    return inputs.tensor(inputs.table), inputs.tensor(owners), inputs.tensor(seen)


def _most(inputs: CandidateSelection) -> int:
    return max((seen for _, seen in inputs.tokens), default=0) + inputs.more_entries


def _published(bench: Bench, inputs: CandidateSelection) -> torch.Tensor:
    out = torch.full((len(inputs.tokens), inputs.blocks), GARBAGE, dtype=torch.int32, device=inputs.device)
    steps, given = complete(bench.backend).layer_ops, (inputs.query(), inputs.oracle_cache.cache, *_maps(inputs))
    steps.select_candidates(*given, out, inputs.block_size, _most(inputs))
    return out


def publishes(bench: Bench, inputs: CandidateSelection) -> Measure:
    """The blocks with the largest scores are written, the newest one among them."""
    worst = Measure(0.0, 1.0)
    for token, row in enumerate(_published(bench, inputs).cpu().numpy().astype(np.int64)):
        measure = _judge_blocks(inputs, token, row, sum_bits(bench))
        worst = max(worst, measure, key=lambda m: m.fraction)
    return worst


def _judge_blocks(inputs: CandidateSelection, token: int, row: NDArray[np.int64], bits: int) -> Measure:
    scores, errors = inputs.scores(token, bits=bits)
    where = f"token {token}, which sees {len(scores)} entries"
    largest = oracle_v41.block_scores(scores, inputs.block_size)
    number = int((row != -1).sum())
    chosen = [int(block) for block in row[:number]]
    if -1 in chosen:
        raise Wrong(f"{where}: -1 stands before a block")
    if strange := [b for b in chosen if not 0 <= b < len(largest)]:
        raise Wrong(f"{where}: block {strange[0]} was written")
    if len({*chosen}) != len(chosen):
        raise Wrong(f"{where}: a block stands twice")
    if not len(largest):
        return Measure(0.0, 1.0)
    newest, possible = len(largest) - 1, {b for b, score in enumerate(largest) if score > -math.inf}
    if newest not in chosen:
        raise Wrong(f"{where}: the newest block, {newest}, was not written")
    if spoiled := {*chosen} - possible - {newest}:
        raise Wrong(f"{where}: block {min(spoiled)} was written, and all of its entries are absent")
    wanted = min(len(possible | {newest}), inputs.blocks)
    if len(chosen) != wanted:
        raise Wrong(f"{where}: {len(chosen)} blocks were written, expected {wanted}")
    missed, others = possible - {*chosen}, {*chosen} - {newest}
    if not missed or not others:
        return Measure(0.0, 1.0)
    best, last = max(missed, key=lambda b: largest[b]), min(others, key=lambda b: largest[b])
    off, budget = max(float(largest[best] - largest[last]), 0.0), 2 * float(errors[~np.isnan(scores)].max())
    fraction = off / budget if budget else (math.inf if off else 0.0)
    said = f"{where}: block {best} of score {largest[best]:.7g} was not written, {last} of {largest[last]:.7g} was"
    return Measure(fraction, 1.0).hold(said)


def _selected(bench: Bench, inputs: CandidateSelection, candidates: torch.Tensor) -> Measure:
    """Select among candidates [T, N], and compare with the scores of their entries."""
    out = torch.full((len(inputs.tokens), inputs.topk), GARBAGE, dtype=torch.int32, device=inputs.device)
    steps, given = complete(bench.backend).layer_ops, (inputs.query(), inputs.oracle_cache.cache, *_maps(inputs))
    before = candidates.clone()
    steps.select_topk_of_candidates(*given, candidates, inputs.block_size, out, _most(inputs))
    if not torch.equal(before, candidates):
        raise Wrong("the candidates were changed")
    worst = Measure(0.0, 1.0)
    for token, row in enumerate(out.cpu().numpy().astype(np.int64)):
        scores, errors = inputs.scores(token, bits=sum_bits(bench))
        inside = oracle_v41.inside_blocks(before[token].tolist(), inputs.block_size, len(scores))
        where = f"token {token}, which sees {len(scores)} entries, {int(inside.sum())} of them in its blocks"
        measure = judge_row(row, np.where(inside, scores, math.nan), errors, where)
        worst = max(worst, measure, key=lambda m: m.fraction)
    return worst


def selects_within(bench: Bench, inputs: CandidateSelection) -> Measure:
    """Entries of the candidates of the case input are selected, and no others."""
    return _selected(bench, inputs, inputs.tensor(inputs.candidates))


def selects_within_published(bench: Bench, inputs: CandidateSelection) -> Measure:
    """Entries of the blocks that the backend published for the same queries are selected."""
    return _selected(bench, inputs, _published(bench, inputs))

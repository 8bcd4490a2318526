"""Checks of decode and prefill: steps and calls against the oracle, cut into steps, over layers and over ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain, repeat
from typing import Any

import attrs
import numpy as np
import torch
from torch import Tensor

from dsv4attn.core.cache.layer_caches import LayerCaches
from dsv4attn.core.cache.ownership import Ownership
from dsv4attn.core.contract import RankOps
from dsv4attn.core.reprs import frozen
from dsv4attn.testing.case import Bench, Measure, SkipCase, Wrong, located, worst_of
from dsv4attn.testing.kit.oracle_cache import body
from dsv4attn.testing.kit.random_step import ForwardArgs, StepFixture
from dsv4attn.testing.kit.single_call import IndexLists, SingleCall
from dsv4attn.testing.kit.strided import bits
from dsv4attn.testing.kit.tolerances import as_f64, shown, worst_error

Result = tuple[Tensor, "Tensor | None"]


def run(bench: Bench, inputs: StepFixture | SingleCall) -> Result:
    """Run a case input; lse is None where the backend gives none."""
    if isinstance(inputs, SingleCall):
        return inputs.run(bench)
    return inputs.problem(bench.backend).answer(bench)


def judged(inputs: StepFixture | SingleCall, result: Result) -> Measure:
    """Compare with the oracle."""
    error, where = inputs.judge(*result)
    return Measure(error, inputs.budget).hold(where)


def require_same_bits(what: str, left: Result, right: Result) -> None:
    """Raise Wrong unless two results are equal byte for byte."""
    for name, a, b in zip(("out", "lse"), left, right, strict=True):
        if a is None or b is None or torch.equal(bits(a), bits(b)):
            continue
        rows = (bits(a) != bits(b)).flatten(1).any(1).nonzero()[:, 0].tolist()
        largest = (a.double() - b.double()).abs().max().item()
        raise Wrong(f"{what}: {name} differs in {len(rows)} rows, first in row {rows[0]}, at most by {largest:.3g}")


def equals_oracle(bench: Bench, inputs: StepFixture | SingleCall) -> Measure:
    """The answer equals the oracle's."""
    return judged(inputs, run(bench, inputs))


def reads_raw_q(bench: Bench, inputs: StepFixture) -> Measure:
    """Prefill of raw q equals the oracle, and the insert without q writes the same bytes of the caches."""
    problem = inputs.problem(bench.backend)
    if problem.raw_q is None:
        raise SkipCase("does not apply: the backend takes no q before its norm for this step")
    plain = attrs.evolve(inputs, raw_q=False).problem(bench.backend)
    pairs = zip(problem.caches.segments(inputs.layer), plain.caches.segments(inputs.layer), strict=True)
    if not all(torch.equal(bits(body(raw)), bits(body(prepared))) for raw, prepared in pairs):
        raise Wrong("an insert of keys alone writes other bytes than one with queries")
    return judged(inputs, problem.answer(bench))


def same_bits(what: str, *variations: dict[str, Any]) -> Callable[[Bench, Any], Measure]:
    """The step equals the oracle, and with each of some variations that must not matter it gives the same bits."""

    def check(bench: Bench, inputs: StepFixture | SingleCall) -> Measure:
        result = run(bench, inputs)
        for changes in variations:
            require_same_bits(what, run(bench, attrs.evolve(inputs, **changes)), result)
        return judged(inputs, result)

    return check


def sink_matters(bench: Bench, inputs: StepFixture) -> Measure:
    """Another sink, another output; the same lse."""
    with_other_sinks = attrs.evolve(inputs, sinks=[3.0 - head % 7 for head in range(inputs.layer.num_heads)])
    (out, lse), (changed, same) = run(bench, inputs), run(bench, with_other_sinks)
    rows = [row for row, token in enumerate(inputs.tokens) if token.valid]
    if not (out[rows] != changed[rows]).flatten(1).any(1).all():
        raise Wrong("changing the sink does not change the output")
    if lse is not None and same is not None and not torch.equal(bits(lse), bits(same)):
        raise Wrong("changing the sink changes the lse")
    return worst_of(judged(inputs, (out, lse)), judged(with_other_sinks, (changed, same)))


def slices_of_heads(bench: Bench, inputs: StepFixture) -> Measure:
    """A rank that holds some of the heads computes those heads."""
    half = inputs.layer.num_heads // 2
    geometry = attrs.evolve(inputs.geometry, num_heads=half, o_groups=1)
    parts = [attrs.evolve(inputs, geometry=geometry, first_head=first) for first in (0, half)]
    return worst_of(judged(inputs, run(bench, inputs)), *(judged(part, run(bench, part)) for part in parts))


def without_lse(bench: Bench, inputs: StepFixture) -> Measure:
    """Not asking for the lse changes nothing."""
    out, lse = run(bench, inputs)
    alone, _ = run(attrs.evolve(bench, lse=False), inputs)
    require_same_bits("without an lse", (alone, None), (out, None))
    return judged(inputs, (out, lse))


def largest_logits(bench: Bench, call: SingleCall) -> Measure:
    """The largest logits equal the oracle's, among many keys and of lone ones; asking changes nothing else."""
    if not bench.backend.capabilities.max_logits:
        raise SkipCase("does not apply: this backend gives no largest logits")
    measures = []
    for variant in (call, attrs.evolve(call, pattern="lone")):
        top = torch.full((variant.rows, variant.layer.num_heads), torch.nan, dtype=torch.float32, device=variant.device)
        result = variant.run(bench, max_logits=top)
        require_same_bits("without max_logits", variant.run(bench), result)
        measures.append(judged(variant, result))
        actual, expected = as_f64(top), variant.largest
        with np.errstate(invalid="ignore"):
            errors = np.where(np.isneginf(actual) & np.isneginf(expected), 0.0, np.abs(actual - expected))
        error, (row, head) = worst_error(errors)
        where = (
            f"max_logits of row {row}, head {head}: {shown(actual[row, head], 6)}, expected {expected[row, head]:.6g}"
        )
        measures.append(Measure(error, variant.budget).hold(where))
    return worst_of(*measures)


def lse_of_empty_rows(bench: Bench, call: SingleCall) -> Measure:
    """Rows without keys have the lse that the call says; saying it changes nothing else."""
    if not bench.backend.capabilities.empty_lse:
        raise SkipCase("does not apply: this backend's rows without keys have lse -inf")
    out, lse = call.run(bench)
    out_again, lse_again = call.run(bench, empty_lse=np.inf)
    assert lse is not None
    assert lse_again is not None
    measure = judged(call, (out, lse))
    require_same_bits("with an empty_lse", (out_again, lse_again), (out, lse.masked_fill(lse == -np.inf, np.inf)))
    return measure


def without_columns(bench: Bench, inputs: StepFixture) -> Measure:
    """An indexer may leave a matrix of no columns. The case input's top-k selects nothing."""
    problem = inputs.problem(bench.backend)
    assert problem.topk_indices is not None
    problem = attrs.evolve(problem, topk_indices=problem.topk_indices[:, :0])
    return judged(inputs, problem.answer(bench))


def step_by_step(*cuts: Sequence[int]) -> Callable[[Bench, StepFixture], Measure]:
    """The case input's requests, cut into steps. Each cut is a list of tokens per step and request.

    Every step equals the oracle, and whatever the cut, the caches end up with the same bytes.
    """

    def check(bench: Bench, inputs: StepFixture) -> Measure:
        measures, ends = [], []
        for cut in cuts:
            # an earlier step's verdict must not depend on a later one's keys, so every cut begins anew
            caches = inputs.history(bench.backend, inputs.allocate())
            steps = inputs.in_steps(cut)
            measures += [judged(step, step.problem(bench.backend, caches).answer(bench)) for step in steps]
            ends.append([body(cache).clone() for cache in caches.segments(inputs.layer)])
        for cut, end in zip(cuts[1:], ends[1:], strict=True):
            if not all(torch.equal(a, b) for a, b in zip(ends[0], end, strict=True)):
                raise Wrong(f"steps of {list(cut)} tokens leave other bytes in the caches than {list(cuts[0])}")
        return worst_of(*measures)

    return check


def merged_by(
    rank_ops: RankOps, outs: Sequence[Tensor], lses: Sequence[Tensor], sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The partials of all shards, merged as ranks do it, and the sinks applied once."""
    sent = torch.empty(len(outs), *outs[0].shape, dtype=outs[0].dtype, device=outs[0].device)
    sent_lse = torch.empty(len(outs), *lses[0].shape, device=sent.device, dtype=torch.float32)
    for partial_out, partial_lse, sent_to, lse_to in zip(outs, lses, sent, sent_lse, strict=True):
        rank_ops.pack_partial(partial_out, partial_lse, sent_to, lse_to)
    specs = rank_ops.merge_scratch(*outs[0].shape)
    scratch = [torch.empty(shape, dtype=dtype, device=sent.device) for shape, dtype in specs]
    out, lse = torch.full_like(outs[0], torch.nan), torch.full_like(lses[0], torch.nan)
    rank_ops.merge_partials(sent, sent_lse, out, lse, sinks, scratch)
    return out, lse


def sharded(count: int) -> Callable[[Bench, SingleCall], Measure]:
    """Keys dealt out to shards, attended without sinks, merged, and the sink applied once: equals the whole.

    The backend's ops over ranks merge.
    """

    def check(bench: Bench, call: SingleCall) -> Measure:
        rng = np.random.default_rng((call.seed, count))
        plain = attrs.evolve(call, sinks=None)
        owner = [rng.integers(0, count - 1, index_lists.slots.shape) for index_lists in call.index_lists]
        owner[0][::2] = 0  # every other row has its whole window in one shard; the last shard has no key at all
        outs, lses = [], []
        for shard in range(count):
            index_lists = [
                IndexLists(np.where(owners == shard, lists.slots, -1), lists.lens)
                for owners, lists in zip(owner, call.index_lists, strict=True)
            ]
            out, lse = plain.run(bench, index_lists)
            assert lse is not None
            outs.append(out)
            lses.append(lse)
        sinks = None if call.sinks is None else torch.tensor(call.sinks, dtype=torch.float32, device=outs[0].device)
        with located(f"{count} shards"):
            return judged(call, merged_by(bench.backend.rank_ops, outs, lses, sinks))

    return check


RowBits = dict[tuple[int, int], Tensor]
"""Bits of out and lse of a row, by request and position."""


@attrs.frozen
class Way:
    """A way to compute the tokens of a step, which must not matter to their bits.

    cut: tokens of every request in each step.
    only: the only request of the steps; None: all requests together.
    single_phase: whether every request is a decode.
    moved: whether the pages of the caches have another order.
    narrow: whether index rows of selected entries have no more columns than they need.
    """

    cut: Sequence[int]
    only: int | None = None
    single_phase: bool = False
    moved: bool = False
    narrow: bool = False

    def __str__(self) -> str:
        """The way, in words."""
        words = ["requests together" if self.only is None else f"request {self.only} alone"]
        words += ["all as decodes"] * self.single_phase
        words += ["other pages"] * self.moved
        words += ["narrow index rows"] * self.narrow
        return f"steps of {list(self.cut)} tokens, {', '.join(words)}"


def any_cut_same_bits(*cuts: Sequence[int], random_cuts: int = 1) -> Callable[[Bench, StepFixture], Measure]:
    """All tokens in one step, and cut into steps; and each request alone, by the last of the cuts.

    A token is then a decode in one way and a part of a prompt in another. The order of pages and the width of index
    rows differ too. Where decode and prefill are of different backends, every request is a decode. The one step equals
    the oracle too.

    cuts: tokens of every request in each step.
    random_cuts: number of further cuts, drawn at random.
    """

    def check(bench: Bench, inputs: StepFixture) -> Measure:
        if not bench.backend.deterministic:
            raise SkipCase("does not apply: the backend was not built with deterministic=true")
        # in a step of a cut, a request of one token may follow a part of a prompt
        inputs = attrs.evolve(inputs, short_prefills=True)
        longest = max(n for _, n in inputs.requests)
        drawn = [_random_cut(longest, inputs.seed + i) for i in range(random_cuts)]
        moved = attrs.evolve(inputs, pages_seed=inputs.pages_seed + 1)
        history, moved_history = (_History.of(bench, fixture) for fixture in (inputs, moved))
        expected, measure = _rows_of(bench, history, Way([longest]))
        ways = [Way(cut) for cut in (*cuts, *drawn)]
        ways += [Way(cuts[-1], only) for only in range(len(inputs.requests))]
        ways += [Way([longest], single_phase=True), Way([longest], narrow=True), Way(cuts[-1], moved=True)]
        for way in ways:
            rows, _ = _rows_of(bench, moved_history if way.moved else history, way, judge=False)
            wrong = [key for key, row in rows.items() if not torch.equal(row, expected[key])]
            if wrong:
                place = "first request {}, position {}".format(*wrong[0])
                raise Wrong(f"{way}: {len(wrong)} rows have other bits, {place}")
        return measure

    return check


def _random_cut(tokens: int, seed: int) -> list[int]:
    """Numbers of tokens, at least one each, that add up to `tokens`."""
    ends = np.flatnonzero(np.random.default_rng((seed, 17)).random(tokens - 1) < 0.5) + 1
    return [int(n) for n in np.diff([0, *ends, tokens])]


@frozen(eq=False)
class _History:
    """A step with the caches that it finds.

    inputs: the step.
    caches: caches of its requests.
    contents: what the caches hold before the step.
    """

    inputs: StepFixture
    caches: LayerCaches
    contents: Sequence[Tensor]

    @classmethod
    def of(cls, bench: Bench, inputs: StepFixture) -> _History:
        """The history of a step, written once."""
        caches = inputs.history(bench.backend, inputs.allocate())
        return cls(inputs, caches, [body(cache).clone() for cache in caches.segments(inputs.layer)])

    def restored(self) -> LayerCaches:
        """The caches, as they were before the step."""
        for cache, content in zip(self.caches.segments(self.inputs.layer), self.contents, strict=True):
            body(cache).copy_(content)
        return self.caches


def _rows_of(bench: Bench, history: _History, way: Way, *, judge: bool = True) -> tuple[RowBits, Measure]:
    """Rows of the requests, computed in a way, and the verdict on its last step."""
    rows, measure = RowBits(), Measure()
    inputs, caches = history.inputs, history.restored()
    limits = attrs.evolve(inputs.limits, single_phase=way.single_phase or not bench.backend.phases_agree)
    for step in inputs.in_steps(way.cut, way.only):
        problem = step.problem(bench.backend, caches, limits)
        if way.narrow and problem.topk_indices is not None:
            columns = (step.topk_rows[: len(step.tokens)] >= 0).any(0).nonzero()[0].max(initial=-1) + 1
            problem = attrs.evolve(problem, topk_indices=problem.topk_indices[:, :columns])
        out, lse = problem.answer(bench)
        if judge:
            measure = judged(step, (out, lse))
        for row, token in enumerate(step.tokens):
            parts = [bits(out[row]).flatten(), *([] if lse is None else [bits(lse[row])])]
            rows[token.request, token.position] = torch.cat(parts)
    return rows, measure


LAYERS = 3


def layers_share(bench: Bench, inputs: StepFixture) -> Measure:
    """Layers of a kind run in turn on one metadata object and one workspace, each twice; each equals the oracle.

    q, sink, out, lse and caches of a layer are tensors of their own; its top-k values stand in a buffer that all share,
    and the second time in one of its own. The workspace is not in debug mode, so prepared calls and index ops are
    used again.
    """
    steps = [attrs.evolve(inputs, seed=inputs.seed + n, pages_of=inputs if n else None) for n in range(LAYERS)]
    problems = [step.problem(bench.backend) for step in steps]
    first = problems[0]
    # the caller's buffer: each layer's indexer writes into it
    buffer = None if first.topk_indices is None else first.topk_indices.clone()
    workspace = first.workspace(bench.backend, debug=False)
    measures, results = [], list[tuple[ForwardArgs, object]]()
    for n, (step, problem) in enumerate(chain.from_iterable(repeat([*zip(steps, problems, strict=True)], 2))):
        if buffer is not None and problem.topk_indices is not None:
            buffer = buffer.copy_(problem.topk_indices) if n < LAYERS else problem.topk_indices.clone()
        layer = attrs.evolve(
            problem, layer=first.layer, limits=first.limits, metadata=first.metadata, topk_indices=buffer
        )
        out, lse = layer.answer(bench, workspace)
        results.append((layer, (out, lse)))  # alive, so that no two layers have one address
        with located(f"layer {n % LAYERS}, time {n // LAYERS + 1}"):
            measures.append(judged(step, (out, lse)))
    return worst_of(*measures)


def over_ranks(*divided: tuple[int, int]) -> Callable[[Bench, StepFixture], Measure]:
    """Each rank attends to its own entries, rank 0 to windows too; the parts are merged as ranks merge them.

    divided: numbers of ranks, each with an interleave. The part of each rank equals the oracle's answer for its keys,
    without the sink. The whole equals the oracle's for all keys, with the sink. Both have the budget of a single call:
    weights of parts add up to 1, and what another rounding of out costs is within it.
    """

    def check(bench: Bench, inputs: StepFixture) -> Measure:
        measures = []
        for size, interleave in divided:
            ranks = [Ownership(rank, size, interleave) for rank in range(size)]
            parts = [_part(bench, attrs.evolve(inputs, sinks=None, ownership=rank)) for rank in ranks]
            of_ranks, outs, lses = zip(*parts, strict=True)
            sinks = None if inputs.sink_values is None else inputs.tensor(inputs.sink_values, torch.float32)
            whole = merged_by(bench.backend.rank_ops, outs, lses, sinks)
            with located(f"{size} ranks, interleave {interleave}, merged"):
                measures += [judged(inputs, whole), *of_ranks]
        return worst_of(*measures)

    return check


def _part(bench: Bench, part: StepFixture) -> tuple[Measure, Tensor, Tensor]:
    """The verdict on what a rank computes, and its out and lse."""
    (out, lse), rank = part.run(bench.backend), part.ownership
    with located(f"rank {rank.rank} of {rank.size}, interleave {rank.interleave}"):
        return judged(part, (out, lse)), out, lse

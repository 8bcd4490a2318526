"""Prefill with raw q (not normalised, not rotated): bound layers, refusals, and mutants that the kit finds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from attrs import evolve
from torch import Tensor

from dsv4attn.backends.reference import kernels
from dsv4attn.backends.reference.launch import ReferenceBackend
from dsv4attn.core.attention import raw_q as raw_insert
from dsv4attn.core.attention.call import ForwardCall
from dsv4attn.core.attention.forward_mqa import forward_mqa
from dsv4attn.core.attention.mla_attention import DeepseekV4MLAAttention
from dsv4attn.core.attention.raw_q import prefill_takes_raw_q
from dsv4attn.core.cache.ownership import Ownership
from dsv4attn.core.contract.backend import AttentionCall, RawQuery
from dsv4attn.core.contract.phased import PhasedBackend
from dsv4attn.core.memory.workspace import WorkspaceManager
from dsv4attn.core.metadata.forward_context import set_forward_context
from dsv4attn.core.model.rope import cos_sin_cache, is_rotation
from dsv4attn.errors import ArgumentError
from dsv4attn.testing.case import Bench, SkipCase, Wrong
from dsv4attn.testing.checks.attention import reads_raw_q
from dsv4attn.testing.kit.random_step import ForwardArgs, StepFixture

MIXED = [(100, 1), (7, 1), (17, 20), (2, 9)]
KINDS = ["swa", "c4a", "c128a"]


class Step:
    """A step of a bound layer: what was inserted, and a q of its own for every run."""

    def __init__(self, kind: str, backend: Any, *, raw_q: bool, requests: Any = MIXED, seed: int = 3) -> None:
        scene = StepFixture(kind=kind, requests=requests, topk="holes", extra_rows=3, seed=seed)
        problem = scene.problem(ReferenceBackend())
        torch.manual_seed(seed)
        rows = problem.q.shape[0]
        self.problem, self.q = problem, torch.randn(problem.q.shape).bfloat16()
        self.kv = torch.randn(rows, problem.q.shape[2]).bfloat16()
        spans = [torch.arange(context, context + count) for context, count in requests]
        self.positions = torch.cat([*spans, torch.zeros(3, dtype=torch.int64)])
        self.layer = DeepseekV4MLAAttention(
            "layers.0",
            problem.layer,
            problem.limits,
            backend,
            attn_sink=problem.attn_sink,
            cos_sin_cache=cos_sin_cache(problem.layer.rope, 512),
            topk_indices_buffer=problem.topk_indices,
            workspace=WorkspaceManager(),
            raw_q=raw_q,
        )
        self.layer.bind_kv_cache(*problem.caches.segments(problem.layer))

    def insert(self) -> Tensor:
        q = self.q.clone()
        with set_forward_context({self.problem.layer.kind: self.problem.metadata}):
            self.layer.fused_qnorm_rope_kv_insert(q, self.kv, self.positions)
        return q

    def attend(self, q: Tensor) -> Tensor:
        out = torch.full_like(q, torch.nan)
        with set_forward_context({self.problem.layer.kind: self.problem.metadata}):
            self.layer.forward_mqa(q, self.kv, self.positions, out)
        return out


def pair(backend: ReferenceBackend) -> Any:
    return PhasedBackend(backend, backend)


@pytest.mark.parametrize("wrap", [lambda one: one, pair], ids=["one", "pair"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_gives_the_same_bits_and_leaves_q_of_prefill_alone(kind: str, wrap: Callable[[Any], Any]) -> None:
    raw, plain = (Step(kind, wrap(ReferenceBackend(raw_q=True)), raw_q=raw) for raw in (True, False))
    decodes = raw.problem.metadata.swa.num_decode_tokens
    q, prepared = raw.insert(), plain.insert()

    assert decodes == 2
    assert torch.equal(q[:decodes], prepared[:decodes])
    assert torch.equal(q[decodes:], raw.q[decodes:])
    assert not torch.equal(prepared[decodes:], raw.q[decodes:])
    pages = [step.layer.caches.swa.tensor for step in (raw, plain) if step.layer.caches]
    assert torch.equal(*pages)
    # twice, as the second finds the prepared step
    assert torch.equal(raw.attend(q), plain.attend(prepared))
    assert torch.equal(raw.attend(q), plain.attend(prepared))


@pytest.mark.parametrize("requests", [[(100, 1), (7, 1)], [(0, 9), (5, 30)]], ids=["decode", "prefill"])
def test_steps_of_one_phase(requests: Any) -> None:
    raw, plain = (Step("c4a", ReferenceBackend(raw_q=True), raw_q=raw, requests=requests) for raw in (True, False))
    q = raw.insert()

    assert torch.equal(q, raw.q) == (requests[0][1] > 1)
    assert torch.equal(raw.attend(q), plain.attend(plain.insert()))


def test_steps_of_a_layer_may_interleave() -> None:
    """As microbatches do, in two threads: each step knows whether its q is raw. All have the same keys and pages."""
    first, second, third = (Step("swa", ReferenceBackend(raw_q=True), raw_q=True) for _ in range(3))
    plain = Step("swa", ReferenceBackend(raw_q=True), raw_q=False)
    second.layer = third.layer = first.layer
    second.q = second.q.flip(0)
    queries = [first.insert(), second.insert()]
    outs = [first.attend(queries[0]), second.attend(queries[1])]

    for step, out in zip((first, second), outs, strict=True):
        plain.q = step.q
        prepared = plain.insert()
        assert torch.equal(out, plain.attend(prepared))
    # attention of metadata that no insert has seen takes q as it is given
    assert torch.equal(third.attend(prepared), outs[1])


def test_an_insert_that_prepares_q_takes_back_one_that_did_not() -> None:
    answers = [True, False]

    class Turning(ReferenceBackend):
        def takes_raw_q(self, *_: Any) -> bool:
            return answers[0]

    step, plain = Step("c4a", Turning(), raw_q=True), Step("c4a", Turning(), raw_q=False)
    assert torch.equal(step.insert()[2:], step.q[2:])
    answers.pop(0)
    step.problem.metadata.swa.takes_raw_q.clear()
    prepared = step.insert()

    assert torch.equal(prepared, plain.insert())
    assert torch.equal(step.attend(prepared), plain.attend(prepared))


@pytest.mark.parametrize(("raw_q", "requests"), [(False, MIXED), (True, [(100, 1), (7, 1)])], ids=["plain", "decode"])
def test_inserts_that_leave_no_q_raw_need_no_workspace(*, raw_q: bool, requests: Any) -> None:
    step = Step("c4a", ReferenceBackend(raw_q=True), raw_q=raw_q, requests=requests)
    plain = Step("c4a", ReferenceBackend(), raw_q=False, requests=requests)
    step.layer.workspace = None

    assert torch.equal(step.insert(), plain.insert())


def test_no_q_stays_raw_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raw_insert, "is_capturing", lambda device: device == torch.device("cpu"))
    raw, plain = (Step("c4a", ReferenceBackend(raw_q=True), raw_q=raw) for raw in (True, False))

    assert torch.equal(raw.insert(), plain.insert())


@pytest.mark.parametrize(
    "backend",
    [ReferenceBackend(), ReferenceBackend(prefill_keys="paged", raw_q=True)],
    ids=["takes none", "gathers nothing"],
)
def test_other_backends_have_all_queries_prepared(backend: ReferenceBackend) -> None:
    raw, plain = (Step("c4a", backend, raw_q=raw) for raw in (True, False))

    assert torch.equal(raw.insert(), plain.insert())


def test_the_backend_is_asked_with_all_chunks_once_for_a_kind_of_layer() -> None:
    questions = []

    class Asked(ReferenceBackend):
        def takes_raw_q(self, layer: Any, q: Tensor, row_dtype: torch.dtype, chunks: Any) -> bool:
            questions.append((tuple(q.shape), row_dtype, [requests for requests, _ in chunks]))
            return False

    step = Step("c4a", Asked(), raw_q=True)
    for _ in range(3):
        step.insert()

    all_requests = [request for requests in questions[0][2] for request in requests]
    assert all_requests == [(17, 20), (2, 9)]
    assert questions == questions[:1] * len(questions)
    assert len(questions) == 1
    assert questions[0][:2] == ((34, 4, 32), torch.bfloat16)


def problem_of(backend: Any, kind: str = "c4a") -> ForwardArgs:
    return StepFixture(kind=kind, requests=MIXED, topk="holes", extra_rows=3, raw_q=True).problem(backend)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda raw: (raw.positions, raw.cos_sin_cache, raw.eps), "raw_q: expected .*RawQuery"),
        (lambda raw: evolve(raw, eps=1e-5), r"raw_q: expected eps 1e-06, as the geometry has, got eps 1e-05"),
        (
            lambda raw: evolve(raw, positions=raw.positions[1:]),
            r"raw_q.positions: expected \[T\] int64 with T=34, got \[33\]",
        ),
        (
            lambda raw: evolve(raw, positions=raw.positions.int()),
            r"raw_q.positions: expected \[T\] int64 with T=34, got .* int32",
        ),
        (lambda raw: evolve(raw, positions=raw.positions - 1000), r"positions: expected values in \[0, "),
        (lambda raw: evolve(raw, cos_sin_cache=raw.cos_sin_cache * 1.1), "expected cosines and sines of angles, got"),
        (lambda raw: evolve(raw, cos_sin_cache=raw.cos_sin_cache[:, :4]), r"raw_q.cos_sin_cache: expected \[_, 8\]"),
        (lambda raw: evolve(raw, cos_sin_cache=raw.cos_sin_cache.half()), "raw_q.cos_sin_cache: expected .* float32"),
    ],
)
def test_a_wrong_raw_q_is_refused_before_anything_is_written(change: Callable[[RawQuery], Any], said: str) -> None:
    problem = problem_of(ReferenceBackend(raw_q=True))
    out, raw = torch.full_like(problem.q, 7.0), problem.raw_q
    assert raw is not None
    with pytest.raises(ArgumentError, match=said):
        run(evolve(problem, raw_q=change(raw)), ReferenceBackend(raw_q=True), out)
    assert bool((out == 7.0).all())


@pytest.mark.parametrize("backend", [ReferenceBackend(), ReferenceBackend(prefill_keys="paged", raw_q=True)])
def test_raw_q_for_a_backend_that_takes_none_is_refused(backend: ReferenceBackend) -> None:
    problem = problem_of(ReferenceBackend(raw_q=True))
    out = torch.full_like(problem.q, 7.0)
    with pytest.raises(ArgumentError, match=r"raw_q: expected None, .* -> normalise and rotate q before"):
        run(problem, backend, out)
    assert bool((out == 7.0).all())


def run(problem: ForwardArgs, backend: Any, out: Tensor) -> None:
    options: dict[str, Any] = {"layer": problem.layer, "limits": problem.limits, "attn_sink": problem.attn_sink}
    options |= {"topk_indices": problem.topk_indices, "raw_q": problem.raw_q}
    space = problem.workspace(backend)
    forward_mqa(problem.q, problem.caches, problem.metadata, backend, space, out, **options)


def test_layers_with_a_table_that_changes_lengths_have_all_queries_prepared() -> None:
    """As with YaRN's mscale, which DeepSeek-V4 does not have: a norm taken after the rotation would be another."""
    problem = Step("swa", ReferenceBackend(raw_q=True), raw_q=True).problem
    layers = []
    for factor in (1.0, 1.1):
        step = Step("swa", ReferenceBackend(raw_q=True), raw_q=True)
        table = factor * step.layer.cos_sin_cache
        options: dict[str, Any] = {"attn_sink": problem.attn_sink, "cos_sin_cache": table, "raw_q": True}
        space = WorkspaceManager()
        attention = DeepseekV4MLAAttention(
            "l", problem.layer, problem.limits, step.layer.backend, workspace=space, **options
        )
        attention.bind_kv_cache(problem.caches.swa)
        step.layer = attention
        layers.append(torch.equal(step.insert()[2:], step.q[2:]))

    assert layers == [True, False]
    assert not is_rotation(torch.empty(9, 64, device="meta"))
    assert not is_rotation(torch.empty(0, 64))


def call_of(problem: ForwardArgs) -> ForwardCall:
    backend, q = ReferenceBackend(raw_q=True), problem.q
    return ForwardCall(
        q, problem.caches, problem.metadata, backend, WorkspaceManager(), q, problem.layer, problem.limits, None
    )


def test_layers_whose_queries_have_no_norm_are_never_raw() -> None:
    problem = problem_of(ReferenceBackend(raw_q=True))
    layer = evolve(problem.layer, q_norm=False)

    assert prefill_takes_raw_q(call_of(problem))
    assert not prefill_takes_raw_q(evolve(call_of(problem), layer=layer))


@pytest.mark.parametrize("kind", KINDS)
def test_layers_whose_entries_are_divided_between_ranks_are_never_raw(kind: str) -> None:
    problem = problem_of(ReferenceBackend(raw_q=True), kind)
    mine = evolve(problem.metadata, ownership=Ownership(0, 2))

    assert prefill_takes_raw_q(evolve(call_of(problem), metadata=mine)) == (kind == "swa")


class Mutant(ReferenceBackend):
    """Takes raw q, and does one thing wrong."""

    def __init__(self, wrong: Callable[[AttentionCall, RawQuery], AttentionCall]) -> None:
        super().__init__(raw_q=True)
        self._wrong = wrong

    def prefill(self, call: AttentionCall) -> None:
        raw = call.raw_q
        super().prefill(call if raw is None else self._wrong(call, raw))


def _evolved(call: AttentionCall, **changes: Any) -> AttentionCall:
    return evolve(call, options=evolve(call.options, **changes))


def rotated_only(call: AttentionCall, raw: RawQuery) -> AttentionCall:
    q = call.q.clone()
    kernels.qnorm_rope(q, raw.positions, raw.cos_sin_cache, None)
    return _evolved(evolve(call, q=q), raw_q=None)


MUTANTS: dict[str, Callable[[AttentionCall, RawQuery], AttentionCall]] = {
    "takes q as it is": lambda call, _: _evolved(call, raw_q=None),
    "forgets the norm": rotated_only,
    "rotates by the next row's position": lambda call, raw: _evolved(
        call, raw_q=evolve(raw, positions=raw.positions.roll(1))
    ),
    "rotates by positions from the batch's begin": lambda call, raw: _evolved(
        call, raw_q=evolve(raw, positions=torch.arange(len(raw.positions)))
    ),
}


@pytest.mark.mutation
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_is_found_by_the_kit(mutant: str) -> None:
    for kind in KINDS:
        scene = StepFixture(kind=kind, requests=MIXED, topk="holes", extra_rows=3, poison=0xFF, raw_q=True)
        reads_raw_q(Bench(ReferenceBackend(raw_q=True)), scene)
        with pytest.raises(Wrong):
            reads_raw_q(Bench(Mutant(MUTANTS[mutant])), scene)


def test_other_bytes_of_keys_are_found_by_the_kit() -> None:
    class Other(ReferenceBackend):
        def qnorm_rope_kv_insert(self, q: Tensor, kv: Tensor, *arguments: Any) -> None:
            super().qnorm_rope_kv_insert(q, kv if q.shape[1] else kv * 2, *arguments)

    scene = StepFixture(kind="swa", requests=MIXED, raw_q=True)
    with pytest.raises(Wrong, match="an insert of keys alone writes other bytes"):
        reads_raw_q(Bench(Other(raw_q=True)), scene)


def test_the_kit_s_cases_do_not_apply_to_a_backend_that_takes_no_raw_q() -> None:
    with pytest.raises(SkipCase, match="takes no q before its norm"):
        reads_raw_q(Bench(ReferenceBackend()), StepFixture(kind="swa", requests=MIXED, raw_q=True))

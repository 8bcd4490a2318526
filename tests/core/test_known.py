"""What a layer's call takes over from another layer of its kind, in the same step: nothing that could differ."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attrs import evolve, exceptions

from dsv4attn.backends.reference.launch import ReferenceBackend
from dsv4attn.core import prepared
from dsv4attn.core.caches import LayerCaches
from dsv4attn.core.contract import AttentionCall
from dsv4attn.core.forward import forward_mqa
from dsv4attn.core.geometry import LayerKind
from dsv4attn.core.layout import Fp8Format, KVCacheLayout, PagedKVCache
from dsv4attn.core.run import Step
from dsv4attn.core.workspace import WorkspaceManager
from dsv4attn.testing.scenario import Problem, Scenario
from tests.core.calls import C4A, F32, I32, KINDS, LAYOUT, good
from tests.core.forms import BACKENDS, all_forms, assert_same_bits
from tests.core.test_checks import CACHES, DRAWS, METADATA, verdict

DECODES, MIXED = [(60, 1), (3, 1), (30, 1)], [(60, 1), (3, 1), (0, 9)]


def fewer(cache: PagedKVCache | None) -> PagedKVCache | None:
    """The same cache without its last pages."""
    return cache and PagedKVCache(cache.tensor[: cache.num_blocks // 2], cache.layout)


def layers_of(problem: Problem, other: Problem) -> list[Problem]:
    """Layers of one step, which share its metadata: with other queries, keys and sinks, and with caches cut short."""
    cut = LayerCaches(*map(fewer, (problem.caches.swa, problem.caches.compressed)))  # type: ignore[arg-type]
    sink = None if problem.attn_sink is None else problem.attn_sink + 1
    second = evolve(problem, q=other.q, caches=other.caches, attn_sink=sink)
    wide = torch.cat([problem.q, problem.q], -1)[..., : problem.q.shape[-1]]
    return [problem, second, evolve(problem, caches=cut), evolve(second, attn_sink=None), evolve(problem, q=wide)]


@all_forms
@pytest.mark.parametrize("requests", [DECODES, MIXED], ids=["decodes", "mixed"])
@pytest.mark.parametrize("kind", KINDS)
def test_layers_that_share_a_step_give_what_each_gives_alone(
    kind: LayerKind, requests: Sequence[tuple[int, int]], form: str
) -> None:
    backend, shared = BACKENDS[form], WorkspaceManager()
    first, other = (Scenario(kind=kind, requests=requests, seed=seed).problem(backend) for seed in (1, 2))
    layers = layers_of(first, other)
    alone = [layer.run(backend) for layer in layers]
    if kind is not LayerKind.SWA:
        assert not torch.equal(alone[0][0], alone[2][0]), "the cut took nothing away"
    for i in (0, 1, 2, 3, 4, 0, 0, 2, 1, 4):
        assert_same_bits(layers[i].run(backend, shared), alone[i])


@all_forms
def test_what_the_indexer_leaves_for_each_layer_is_read_anew(form: str) -> None:
    backend, shared = BACKENDS[form], WorkspaceManager()
    problem = Scenario(kind=C4A, requests=DECODES).problem(backend)
    buffer = problem.topk_indices
    assert buffer is not None
    results = []
    for left in (buffer.clone(), torch.full_like(buffer, -1), torch.zeros_like(buffer)[:, :1].expand_as(buffer)):
        buffer.copy_(left)
        results.append(problem.run(backend, shared)[0])
        assert_same_bits(problem.run(backend), problem.run(backend, shared))

    assert not torch.equal(results[0], results[1])


def step_of(**given: Any) -> Step:
    """The step of a call of `forward_mqa`."""
    order = "q caches metadata backend workspace out layer limits attn_sink topk_indices lse"
    return Step(*(given[name] for name in order.split()))


def waved_through(kind: LayerKind, draws: int = 1500) -> tuple[list[str], int]:
    """What is wrong with calls that are taken for one that was good, and how many were taken for it."""
    rng = random.Random(kind.value)
    whole = {**good(kind), "metadata": METADATA[kind], "caches": CACHES[kind]}
    forward_mqa(**whole)
    wrong, taken = [], 0
    for _ in range(draws):
        arguments = dict(whole)
        for draw in rng.choices(DRAWS, k=rng.choice([1, 1, 2])):
            arguments |= draw(rng, kind)
        if step_of(**arguments).is_known():
            taken += 1
            said = verdict({name: value for name, value in arguments.items() if name not in ("backend", "workspace")})
            wrong += [said] if said != "good" else []
    return wrong, taken


@pytest.mark.parametrize("kind", KINDS)
def test_no_bad_call_is_taken_for_a_good_one(kind: LayerKind) -> None:
    wrong, taken = waved_through(kind)

    assert not wrong
    assert taken > 30, "too few to say anything"


def test_a_look_that_forgets_tensors_or_caches_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(prepared, "tell", lambda *_: [])
        patch.setattr("dsv4attn.core.run.tell", lambda *_: [])
        assert waved_through(C4A)[0]
    monkeypatch.setattr(LayerCaches, "told", property(lambda _: []))
    assert waved_through(C4A)[0]


def test_caches_of_the_same_shape_tell_what_they_hold_and_how_they_lie() -> None:
    memory = torch.zeros(4 * 1024 + 16, dtype=torch.uint8)

    def told(size: int = 8, layout: KVCacheLayout = LAYOUT, shift: int = 0) -> list[object]:
        flat = memory[shift : shift + 4096].view(4, 1024)
        return LayerCaches(PagedKVCache(flat, layout, block_size=size)).told

    others = (
        told(4),
        told(layout=KVCacheLayout.fp8_ds_mla(24, 8, group_size=8, fp8_format=Fp8Format.FNUZ)),
        told(shift=2),
    )
    assert told() == told(shift=16)
    assert told() not in others


@pytest.mark.parametrize(("name", "value"), [("q", None), ("out", 0.0), ("metadata", {}), ("caches", None), ("lse", 0)])
def test_what_is_no_tensor_is_refused_after_a_good_call_too(name: str, value: object) -> None:
    arguments = good(C4A)
    forward_mqa(**arguments)

    assert step_of(**arguments).is_known()
    assert not step_of(**{**arguments, name: value}).is_known()


class Noting(ReferenceBackend):
    """A backend that remembers its calls."""

    def __init__(self) -> None:
        super().__init__(prefill_keys="paged")
        self.calls: list[AttentionCall] = []

    def decode(self, call: AttentionCall) -> None:
        self.calls.append(call)
        super().decode(call)

    def kept_of(self, problem: Problem, workspace: WorkspaceManager, **options: bool) -> dict[object, Any]:
        """Where it may keep what it finds out of a step's decode call."""
        problem.run(self, workspace, **options)
        kept = self.calls[-1].kept
        assert kept is not None
        return kept


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_backend_keeps_is_for_calls_that_differ_in_addresses_alone(kind: LayerKind) -> None:
    backend, shared = Noting(), WorkspaceManager()
    first, other = (Scenario(kind=kind, requests=DECODES, seed=seed).problem(backend) for seed in (1, 2))
    kept = backend.kept_of(first, shared)

    assert backend.kept_of(first, shared) is kept
    assert backend.kept_of(layers_of(first, other)[1], shared) is kept
    # anything else that differs is another call, and so is the first after it
    changes: list[Callable[[], Problem]] = [
        lambda: other,
        *(lambda i=i: layers_of(first, other)[i] for i in (2, 3, 4)),
        lambda: evolve(first, layer=evolve(first.layer)),
        lambda: evolve(first, limits=evolve(first.limits)),
        lambda: evolve(first, metadata=evolve(first.metadata, swa=evolve(first.metadata.swa))),
    ]
    for change in changes:
        before = backend.kept_of(first, shared)
        assert backend.kept_of(change(), shared) is not before
    before = backend.kept_of(first, shared)
    assert backend.kept_of(first, shared, with_lse=False) is not before
    with torch.inference_mode():
        assert backend.kept_of(first, shared) is not backend.kept_of(first, WorkspaceManager(debug=True))


def test_what_a_backend_keeps_goes_with_the_memory_of_the_workspace() -> None:
    backend, shared = Noting(), WorkspaceManager()
    problem = Scenario(kind=C4A, requests=DECODES).problem(backend)
    kept = backend.kept_of(problem, shared)
    shared.get_simultaneous(((2**20,), F32), lane="decode")

    assert backend.kept_of(problem, shared) is not kept


def test_a_step_may_say_how_to_do_the_same_again() -> None:
    backend, shared, did = ReferenceBackend(prefill_keys="paged"), WorkspaceManager(), list[str]()
    right = backend.steps

    def translate(*given: Any, **out: Any) -> Callable[[], None]:
        did.append("first")
        right.compute_global_topk_indices_and_lens(*given, **out)

        def again() -> None:
            did.append("again")
            right.compute_global_topk_indices_and_lens(*given, **out)

        return again

    names = "combine_topk_swa_indices", "build_ragged_indices_from_dense", "transient_bytes"
    same = {name: getattr(right, name) for name in names}
    backend.steps = SimpleNamespace(compute_global_topk_indices_and_lens=translate, **same)
    problem = Scenario(kind=C4A, requests=DECODES).problem(backend)
    alone = problem.run(BACKENDS["paged-dense"])
    did.clear()
    for _ in range(3):
        assert_same_bits(problem.run(backend, shared), alone)
    assert did == ["first", "again", "again"]

    buffer = problem.topk_indices
    assert buffer is not None
    moved = evolve(problem, topk_indices=buffer.clone())
    assert_same_bits(moved.run(backend, shared), alone)
    assert did == ["first", "again", "again", "first"]


def test_the_metadata_of_one_step_is_held_until_the_next() -> None:
    shared, backend = WorkspaceManager(), BACKENDS["paged-dense"]
    first, second = (Scenario(kind=C4A, requests=DECODES, seed=seed).problem(backend) for seed in (1, 2))
    second = evolve(second, layer=first.layer)
    first.run(backend, shared)
    gone = weakref.ref(first.q), weakref.ref(first.metadata.swa.block_table)
    second.run(backend, shared)
    del first
    gc.collect()

    assert [ref() for ref in gone] == [None, None]


def test_metadata_cannot_change_behind_what_is_known_of_them() -> None:
    metadata = METADATA[C4A]
    assert metadata.compressed is not None
    with pytest.raises(exceptions.FrozenInstanceError):
        metadata.swa.num_decode_tokens = 0  # type: ignore[misc]
    with pytest.raises(exceptions.FrozenInstanceError):
        metadata.compressed.block_table = torch.zeros(1, 1, dtype=I32)  # type: ignore[misc]

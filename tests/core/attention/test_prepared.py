"""A layer takes over the prepared call of another layer only if nothing differs that the call depends on."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from attrs import evolve, exceptions

from dsv4attn.backends.reference.launch import ReferenceBackend
from dsv4attn.core.attention.call import PreparedForward
from dsv4attn.core.attention.forward_mqa import forward_mqa
from dsv4attn.core.cache.layer_caches import LayerCaches
from dsv4attn.core.cache.layout import Fp8Format, KVCacheLayout, PagedKVCache
from dsv4attn.core.contract.backend import AttentionCall, Phase, Run
from dsv4attn.core.contract.index_ops import IndexOps, prepared_op
from dsv4attn.core.memory.workspace import WorkspaceManager
from dsv4attn.core.metadata.metadata import AttentionMetadata
from dsv4attn.core.model.geometry import LayerKind
from dsv4attn.errors import ArgumentError
from dsv4attn.selection import load_backend
from dsv4attn.testing.kit.random_step import ForwardArgs, StepFixture
from tests.backends.built_in import EVERYWHERE
from tests.core.attention.test_checks import CACHES, DRAWS, METADATA, verdict
from tests.harness import (
    C4A,
    F32,
    I32,
    KINDS,
    LAYOUT,
    REFERENCE_FORMS,
    all_forms,
    assert_same_bits,
    forward_args,
    metadata_of,
)

DECODES, MIXED = [(60, 1), (3, 1), (30, 1)], [(60, 1), (3, 1), (0, 9)]


def fewer(cache: PagedKVCache | None) -> PagedKVCache | None:
    """The same cache without its last pages."""
    return cache and PagedKVCache(cache.tensor[: cache.num_blocks // 2], cache.layout)


def layers_of(problem: ForwardArgs, other: ForwardArgs) -> list[ForwardArgs]:
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
    backend, shared = REFERENCE_FORMS[form], WorkspaceManager()
    first, other = (StepFixture(kind=kind, requests=requests, seed=seed).problem(backend) for seed in (1, 2))
    layers = layers_of(first, other)
    alone = [layer.run(backend) for layer in layers]
    if kind is not LayerKind.SWA:
        assert not torch.equal(alone[0][0], alone[2][0]), "the cut took nothing away"
    for i in (0, 1, 2, 3, 4, 0, 0, 2, 1, 4):
        assert_same_bits(layers[i].run(backend, shared), alone[i])


@all_forms
def test_what_the_indexer_leaves_for_each_layer_is_read_anew(form: str) -> None:
    backend, shared = REFERENCE_FORMS[form], WorkspaceManager()
    problem = StepFixture(kind=C4A, requests=DECODES).problem(backend)
    buffer = problem.topk_indices
    assert buffer is not None
    results = []
    for left in (buffer.clone(), torch.full_like(buffer, -1), torch.zeros_like(buffer)[:, :1].expand_as(buffer)):
        buffer.copy_(left)
        results.append(problem.run(backend, shared)[0])
        assert_same_bits(problem.run(backend), problem.run(backend, shared))

    assert not torch.equal(results[0], results[1])


class CheckedError(Exception):
    """A call was checked: no prepared step serves it."""


@pytest.fixture
def is_prepared(monkeypatch: pytest.MonkeyPatch) -> Callable[..., bool]:
    """Whether a prepared step serves a call of `forward_mqa`."""

    def is_prepared_call(**arguments: Any) -> bool:
        def checked(*_: object) -> None:
            raise CheckedError

        with monkeypatch.context() as patch:
            patch.setattr("dsv4attn.core.attention.forward_mqa.check_forward_call", checked)
            patch.setattr(PreparedForward, "calls", property(lambda _: (), lambda *_: None))
            try:
                forward_mqa(**arguments)
            except CheckedError:
                return False
            except (AttributeError, TypeError):  # after the calls, rows of padding are looked at
                return True
            return True

    return is_prepared_call


def waved_through(is_prepared: Callable[..., bool], kind: LayerKind) -> tuple[list[str], int]:
    """What is wrong with calls that are taken for one that was good, and how many were taken for it."""
    rng = random.Random(kind.value)
    whole = {**forward_args(kind), "metadata": METADATA[kind], "caches": CACHES[kind]}
    forward_mqa(**whole)
    wrong, accepted = [], 0
    for _ in range(1500):
        arguments = dict(whole)
        for draw in rng.choices(DRAWS, k=rng.choice([1, 1, 2])):
            arguments |= draw(rng, kind)
        if is_prepared(**arguments):
            accepted += 1
            said = verdict(arguments)
            wrong += [said] if said != "good" else []
    return wrong, accepted


@pytest.mark.parametrize("kind", KINDS)
def test_no_bad_call_is_taken_for_a_good_one(kind: LayerKind, is_prepared: Callable[..., bool]) -> None:
    wrong, accepted = waved_through(is_prepared, kind)

    assert not wrong
    assert accepted > 30, "too few to say anything"


@pytest.mark.parametrize("forgotten", ["tensors", "caches"])
def test_a_key_that_forgets_tensors_or_caches_is_found(
    monkeypatch: pytest.MonkeyPatch, is_prepared: Callable[..., bool], forgotten: str
) -> None:
    if forgotten == "tensors":
        monkeypatch.setattr("dsv4attn.core.attention.forward_mqa.signature", lambda *_: ())
    else:
        for name in ("signature", "signed"):
            monkeypatch.setattr(LayerCaches, name, property(lambda _: (), lambda *_: None), raising=False)
    assert waved_through(is_prepared, C4A)[0]


def test_the_signature_of_caches_holds_format_and_alignment() -> None:
    memory = torch.zeros(4 * 1024 + 16, dtype=torch.uint8)

    def of(size: int = 8, layout: KVCacheLayout = LAYOUT, shift: int = 0) -> tuple[object, ...]:
        flat = memory[shift : shift + 4096].view(4, 1024)
        return LayerCaches(PagedKVCache(flat, layout, block_size=size)).signature

    others = (
        of(4),
        of(layout=KVCacheLayout.fp8_ds_mla(24, 8, group_size=8, fp8_format=Fp8Format.FNUZ)),
        of(shift=2),
    )
    assert of() == of(shift=16)
    assert of() not in others


class Noting(ReferenceBackend):
    """A backend that remembers the calls it prepared, and how many it ran."""

    def __init__(self) -> None:
        super().__init__(prefill_keys="paged")
        self.prepared: list[AttentionCall] = []
        self.ran = 0

    def prepare(self, phase: Phase, call: AttentionCall) -> Run:
        self.prepared.append(call)
        return super().prepare(phase, call)

    def decode(self, call: AttentionCall) -> None:
        self.ran += 1
        super().decode(call)

    def prepares(self, problem: ForwardArgs, workspace: WorkspaceManager, **options: bool) -> bool:
        """Whether a step is prepared anew."""
        count, ran = len(self.prepared), self.ran
        problem.run(self, workspace, **options)
        assert self.ran == ran + 1
        return len(self.prepared) > count


@pytest.mark.parametrize("kind", KINDS)
def test_a_prepared_call_serves_calls_that_differ_in_addresses_alone(kind: LayerKind) -> None:
    backend, shared = Noting(), WorkspaceManager()
    first, other = (StepFixture(kind=kind, requests=DECODES, seed=seed).problem(backend) for seed in (1, 2))
    assert backend.prepares(first, shared)
    assert not backend.prepares(first, shared)
    assert not backend.prepares(layers_of(first, other)[1], shared)
    # anything else that differs is another call; the first stays prepared next to it
    metadata = first.metadata
    changes = [
        other,
        *(layers_of(first, other)[i] for i in (2, 3, 4)),
        evolve(first, layer=evolve(first.layer)),
        evolve(first, limits=evolve(first.limits)),
        evolve(first, metadata=evolve(metadata, swa=evolve(metadata.swa))),
        evolve(first, metadata=evolve(metadata, compressed=metadata.compressed and evolve(metadata.compressed))),
    ]
    for change in changes[: len(changes) - (kind is LayerKind.SWA)]:
        assert backend.prepares(change, shared)
        assert not backend.prepares(first, shared)
    assert backend.prepares(first, shared, with_lse=False)
    with torch.inference_mode():
        assert backend.prepares(first, shared)
    assert backend.prepares(first, WorkspaceManager())


def test_nothing_is_prepared_twice_for_views_that_each_call_has_to_ask_for() -> None:
    class Counting(WorkspaceManager):
        def get_simultaneous(self, *specs: Any, **options: Any) -> list[torch.Tensor]:
            return super().get_simultaneous(*specs, **options)

    for workspace in (WorkspaceManager(debug=True), Counting()):
        backend = Noting()
        problem = StepFixture(kind=C4A, requests=DECODES).problem(backend)
        assert [backend.prepares(problem, workspace) for _ in range(3)] == [True] * 3
        assert problem.metadata.swa.prepared == {}


@pytest.mark.usefixtures("few_objects")
def test_a_prepared_step_goes_when_the_memory_of_the_workspace_moves() -> None:
    backend, shared = Noting(), WorkspaceManager()
    problem = StepFixture(kind=C4A, requests=DECODES).problem(backend)
    alone = problem.run(REFERENCE_FORMS["paged-dense"])
    problem.run(backend, shared)
    (old,) = (weakref.ref(view) for view in backend.prepared[0].keys[1].rows.indices[None])  # type: ignore[index]
    shared.lock()
    assert not backend.prepares(problem, shared)
    shared.unlock()
    backend.prepared.clear()
    shared.get_simultaneous(((2**20,), F32), arena="decode")
    gc.collect()

    assert old() is None
    assert backend.prepares(problem, shared)
    assert_same_bits(problem.run(backend, shared), alone)


def test_a_metadata_object_has_only_so_many_prepared_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsv4attn.core.attention.forward_mqa.MAX_PREPARED", 3)
    backend, shared = Noting(), WorkspaceManager()
    problem = StepFixture(kind=C4A, requests=DECODES).problem(backend)
    for _ in range(8):
        assert backend.prepares(evolve(problem, layer=evolve(problem.layer)), shared)
        assert len(problem.metadata.swa.prepared) <= 3


def test_a_prepared_step_serves_other_threads_streams_of_values_and_padding() -> None:
    backend, shared = Noting(), WorkspaceManager()
    problem = StepFixture(kind=C4A, requests=DECODES, extra_rows=2).problem(backend)
    alone = problem.run(REFERENCE_FORMS["paged-dense"])
    with ThreadPoolExecutor(1) as executor:
        for _ in range(2):
            assert_same_bits(executor.submit(problem.run, backend, shared).result(), alone)
    assert_same_bits(problem.run(backend, shared), alone)
    assert len(backend.prepared) == 1


def test_a_prepared_step_reads_what_its_metadata_s_buffers_hold_after_another_build() -> None:
    backend, shared = Noting(), WorkspaceManager()
    scenes = [StepFixture(kind=C4A, requests=requests) for requests in (DECODES, [(12, 1), (40, 1), (5, 1)])]
    problem = scenes[0].problem(backend)
    problem.run(backend, shared)
    swa, compressed = problem.metadata.swa, problem.metadata.compressed
    other = scenes[1].problem(backend).metadata
    assert compressed is not None
    assert other.compressed is not None
    swa.decode_swa_indices.copy_(other.swa.decode_swa_indices)
    swa.decode_swa_lens.copy_(other.swa.decode_swa_lens)
    compressed.compressed_lens.copy_(other.compressed.compressed_lens)
    after = problem.run(backend, shared)

    assert len(backend.prepared) == 1
    fresh = evolve(problem, metadata=AttentionMetadata(evolve(swa), evolve(compressed)))
    assert_same_bits(after, fresh.run(REFERENCE_FORMS["paged-dense"]))


def test_an_index_op_is_prepared_once_and_run_for_every_layer() -> None:
    backend, shared, did = ReferenceBackend(prefill_keys="paged"), WorkspaceManager(), list[str]()
    right = backend.index_ops

    @prepared_op
    def translate(topk: torch.Tensor, *rest: Any, out: Any) -> Callable[[torch.Tensor], None]:
        did.append("prepared")

        def run(topk: torch.Tensor) -> None:
            did.append("ran")
            right.compute_global_topk_indices_and_lens(topk[:rows], *rest, out=out)

        rows = topk.shape[0]
        return run

    backend.index_ops = evolve(IndexOps(), compute_global_topk_indices_and_lens=translate)
    problem = StepFixture(kind=C4A, requests=DECODES).problem(backend)
    alone = problem.run(REFERENCE_FORMS["paged-dense"])
    for _ in range(3):
        assert_same_bits(problem.run(backend, shared), alone)
    assert did == ["prepared", "ran", "ran", "ran"]

    buffer = problem.topk_indices
    assert buffer is not None
    moved = evolve(problem, topk_indices=buffer.clone())
    assert_same_bits(moved.run(backend, shared), alone)
    assert did == ["prepared", "ran", "ran", "ran", "ran"]


@pytest.mark.usefixtures("few_objects")
def test_prepared_steps_go_with_their_metadata() -> None:
    shared, backend = WorkspaceManager(), ReferenceBackend(prefill_keys="paged")
    problem = StepFixture(kind=C4A, requests=DECODES).problem(backend)
    problem.run(backend, shared)
    (step,) = problem.metadata.swa.prepared.values()
    gone = [
        weakref.ref(thing) for thing in (problem.q, problem.metadata.swa, problem.metadata.compressed, step, backend)
    ]
    del problem, step, backend
    gc.collect()

    assert [ref() for ref in gone] == [None] * 5


def test_metadata_are_frozen() -> None:
    metadata = METADATA[C4A]
    assert metadata.compressed is not None
    with pytest.raises(exceptions.FrozenInstanceError):
        metadata.swa.num_decode_tokens = 0  # type: ignore[misc]
    with pytest.raises(exceptions.FrozenInstanceError):
        metadata.compressed.block_table = torch.zeros(1, 1, dtype=I32)  # type: ignore[misc]


@pytest.mark.parametrize("backend", EVERYWHERE)
def test_what_was_prepared_does_not_run_on_pages_that_lie_elsewhere(backend: str) -> None:
    """Gaps between pages are closed, at the same address in the same storage; kernels take strides as numbers."""
    call = {**forward_args(LayerKind.CSA), "metadata": metadata_of(LayerKind.CSA, [1, 1], [9, 5])}
    call |= {"backend": load_backend(backend), "q": call["q"][:2], "out": call["out"][:2], "lse": None}
    forward_mqa(**call)
    call["out"].fill_(7.0)
    for cache in (call["caches"].swa, call["caches"].compressed):
        original, (_, *inner) = cache.tensor.data, cache.tensor.stride()
        closed = (cache.tensor[0].numel(), *inner)
        assert closed != original.stride()
        cache.tensor.data = original.as_strided(original.shape, closed)
        with pytest.raises(ArgumentError, match=r"^cache tensor: expected .* strides"):
            forward_mqa(**call)
        assert (call["out"] == 7.0).all()
        cache.tensor.data = original
    forward_mqa(**call)
    assert not (call["out"] == 7.0).all()

"""Promise G11: the plan bounds every call within the limits, in every form, and nothing is written outside of it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import attrs
import pytest
import torch
from attrs import evolve, frozen
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from dsv4attn.backends.reference import kernels
from dsv4attn.backends.reference.launch import ReferenceBackend
from dsv4attn.core.attention.forward_mqa import forward_mqa
from dsv4attn.core.cache.layer_caches import LayerCaches
from dsv4attn.core.cache.layout import KVCacheLayout, PagedKVCache
from dsv4attn.core.contract.backend import AttentionCall, Backend, Phase
from dsv4attn.core.contract.limits import Limits
from dsv4attn.core.memory.plan import plan_workspace
from dsv4attn.core.memory.workspace import WorkspaceManager, WorkspacePlan, simultaneous_bytes
from dsv4attn.core.metadata.builder import MetadataBuilder
from dsv4attn.core.model.geometry import LayerGeometry, LayerKind, ModelGeometry
from dsv4attn.core.tensorspec import BufferSpec
from dsv4attn.errors import ArgumentError, CanaryError, WorkspaceError
from dsv4attn.testing.kit.factories import tiny_geometry
from dsv4attn.testing.kit.random_step import ForwardArgs, StepFixture
from tests.harness import (
    FORM_NAMES,
    REFERENCE_FORMS,
    all_forms,
    all_kinds,
    assert_same_bits,
    backend_of,
    batch_of,
    slots_of,
)

BLOCKS, SWA_BLOCK = 3, 2
INT = torch.int32


def smallest_cap(
    geometry: ModelGeometry, kind: LayerKind, limits: Limits, backend: Backend, layout: KVCacheLayout
) -> int:
    """The cap that the error for an impossible one names."""
    layer = geometry.layer_of_kind(kind)
    try:
        plan_workspace(layer, evolve(limits, max_workspace_bytes=1), backend, layout)
    except ArgumentError as error:
        return int(error.expected.removeprefix("at least ").partition(",")[0])
    return 1


@frozen
class Case:
    """A model, limits, and all that stays while batches come and go."""

    rng: random.Random
    kind: LayerKind
    geometry: ModelGeometry
    limits: Limits
    builder: MetadataBuilder
    caches: LayerCaches

    @classmethod
    def draw(cls, rng: random.Random, kind: LayerKind, backend: Backend) -> Case:
        """Small sizes, so that rounding and fixed costs matter; index areas and caps from none to very tight."""
        ratios = rng.choice([(2, 8), (4, 16), (3, 5)])
        geometry = tiny_geometry(
            num_heads=1, head_dim=4, rope_dim=2, window=rng.randint(1, 9), topk=rng.randint(1, 9), ratios=ratios
        )
        speculative = rng.choice([0, 0, 1, 3])
        limits = Limits(
            rng.randint(1, 6),
            rng.randint(1 + speculative, 48),
            rng.choice([1, 2, 17, 60, 300]) + speculative,
            speculative,
            max_index_elements=rng.choice([1, 40, 200, 1000, 2**21]),
        )
        layout = rng.choice([KVCacheLayout.fp8_ds_mla(2, 2), KVCacheLayout.rows(2, 2, dtype=torch.float32)])
        if rng.random() < 0.5:
            least = smallest_cap(geometry, kind, limits, backend, layout)
            limits = evolve(limits, max_workspace_bytes=least + rng.choice([0, 1, 4, 100, 3000]))
        tokens = ratios[0] * ratios[1]
        builder = MetadataBuilder(
            geometry, limits, swa_block_size=SWA_BLOCK, compressed_block_tokens=tokens, validate=False
        )
        records = tokens // geometry.layer_of_kind(kind).compress_ratio
        compressed = None if kind is LayerKind.SWA else PagedKVCache.allocate(layout, BLOCKS, records)
        caches = LayerCaches(PagedKVCache.allocate(layout, BLOCKS, SWA_BLOCK), compressed)
        return cls(rng, kind, geometry, limits, builder, caches)

    def lengths(self) -> Iterator[tuple[int, int]]:
        """(prefix, query) of a random batch: up to the very limits, decodes first."""
        rng, limits = self.rng, self.limits
        left, queries = limits.max_num_batched_tokens, []
        for _ in range(rng.randint(1, limits.max_num_reqs)):
            most = min(left, limits.max_model_len)
            queries.append(
                rng.choice([0, min(1, most), most, rng.randint(0, most), min(most, limits.decode_threshold)])
            )
            left -= queries[-1]
        for query in sorted(queries, key=lambda n: n > limits.decode_threshold):
            room = limits.max_model_len - query
            yield rng.choice([0, room, rng.randint(0, room)]), query

    def problem(self) -> ForwardArgs:
        """A random batch, ready to run."""
        rng, layer = self.rng, self.geometry.layer_of_kind(self.kind)
        pairs = list(self.lengths())
        query_lens, total = [query for _, query in pairs], sum(query for _, query in pairs)
        table = torch.randint(0, BLOCKS, (len(pairs), -(-self.limits.max_model_len // SWA_BLOCK)), dtype=INT)
        seq_lens = [before + query for before, query in pairs]
        slots = torch.tensor(slots_of(query_lens, seq_lens, table, SWA_BLOCK), dtype=torch.int64)
        batch = batch_of(
            query_lens,
            seq_lens,
            slot_mapping=torch.where(torch.rand(total) < 0.1, -1, slots),
            block_table=table,
            compressed_block_table=None if layer.kind is LayerKind.SWA else table,
        )
        metadata = self.builder.build_for(batch, [self.kind])[self.kind]
        q = torch.zeros(total + rng.randint(0, 2), 1, 4)
        width = rng.choice([layer.topk, rng.randint(1, max(layer.topk, 1))])
        topk = torch.randint(-1, 40, (q.shape[0], width), dtype=INT) if layer.kind is LayerKind.CSA else None
        return ForwardArgs(layer, self.limits, q, self.caches, metadata, torch.zeros(1), topk)


PROBLEMS, BATCHES = 10_000, 12


class RecordingWorkspace(WorkspaceManager):
    """Locked at exactly the planned bytes, without the slack that canaries take; keeps the most each arena gave out."""

    def __init__(self, plan: WorkspacePlan) -> None:
        super().__init__()
        self.peak: Counter[str] = Counter()
        self.reserve(plan)
        self.lock()

    def get_simultaneous(
        self, *specs: BufferSpec, arena: str = "default", caller: str = "get_simultaneous"
    ) -> list[Tensor]:
        self.peak[arena] = max(self.peak[arena], simultaneous_bytes(specs))
        return super().get_simultaneous(*specs, arena=arena, caller=caller)


class ScratchBackend(ReferenceBackend):
    """A backend that splits keys when there are few rows: most scratch at a small row count, not at the largest."""

    def splits(self, tokens: int) -> int:
        return max(1, 24 // max(tokens, 1))

    def scratch(self, phase: Phase, layer: LayerGeometry, tokens: int, width: int) -> Sequence[BufferSpec]:
        if self.splits(tokens) == 1:
            return ()
        return [((tokens, self.splits(tokens), layer.num_heads, width), torch.float32), ((tokens, 3), torch.uint8)]

    def scratch_bound(self, phase: Phase, layer: LayerGeometry, max_tokens: int, max_width: int) -> int:
        return max(
            simultaneous_bytes(self.scratch(phase, layer, n, max_width)) for n in range(1, min(max_tokens, 24) + 1)
        )

    def decode(self, call: AttentionCall) -> None:
        for view in call.scratch:
            view.fill_(1)  # all of it is its own
        super().decode(call)


def plan_of(problem: ForwardArgs, backend: ReferenceBackend) -> WorkspacePlan:
    return plan_workspace(problem.layer, problem.limits, backend, problem.caches.swa.layout)


@pytest.mark.parametrize(
    "problems",
    [
        PROBLEMS // 20,
        pytest.param(PROBLEMS, marks=pytest.mark.slow),
    ],
)
@all_forms
@all_kinds
def test_g11_the_plan_is_never_exceeded_by_10000_random_problems(kind: LayerKind, form: str, problems: int) -> None:
    """Really run, each in a workspace locked at its plan; a third with a backend whose scratch is not monotone."""
    rng = random.Random(f"{kind.value} {form}")
    share = -(-problems // (len(LayerKind) * len(FORM_NAMES)))
    used, whole = Counter[str](), Counter[str]()
    capabilities = REFERENCE_FORMS[form].capabilities
    scratchy = ScratchBackend(
        decode_indices=capabilities.decode_indices,
        prefill_indices=capabilities.prefill_indices,
        prefill_keys=capabilities.prefill_keys,
    )

    for number in range(0, share, BATCHES):
        backend = scratchy if number % 3 == 0 else REFERENCE_FORMS[form]
        case = Case.draw(rng, kind, backend)
        cap = case.limits.max_workspace_bytes
        for _ in range(min(BATCHES, share - number)):
            problem = case.problem()
            plan = plan_of(problem, backend)
            assert cap is None or plan.arenas["prefill"] <= cap, "a cap holds for the whole arena"
            workspace = RecordingWorkspace(plan)
            out, _ = problem.run(backend, workspace)
            assert not out.isnan().any()
            for arena, most in workspace.peak.items():
                assert most <= plan.arenas[arena]
                used[arena], whole[arena] = max(used[arena], most), max(whole[arena], plan.arenas[arena])

    assert used["decode"] > 0 or (kind is LayerKind.SWA and "dense" in form)
    assert used["prefill"] > whole["prefill"] / 4 or form == "paged-dense", "the bound is no invention"


@all_kinds
@pytest.mark.parametrize("window", [1, 2])
def test_g11_many_short_prompts_before_their_first_entry_fit(window: int, kind: LayerKind) -> None:
    """The narrowest index matrices are where fixed costs a token outweigh the columns."""
    rng = random.Random(0)
    for form in FORM_NAMES:
        case = Case.draw(rng, kind, REFERENCE_FORMS[form])
        geometry = attrs.evolve(case.geometry, window=window, index_topk=1)
        limits = Limits(64, 1200, 2, max_index_elements=1200)
        scenario = StepFixture(kind=kind, geometry=geometry, requests=[(0, 2)] * 60, compressed_block_tokens=240)
        problem = scenario.problem(REFERENCE_FORMS[form], limits=limits)
        workspace = RecordingWorkspace(plan_of(problem, REFERENCE_FORMS[form]))
        scenario.compare(*problem.run(REFERENCE_FORMS[form], workspace))


@pytest.mark.in_turn
@all_forms
@all_kinds
def test_g11_canaries_survive_random_problems(kind: LayerKind, form: str) -> None:
    rng = random.Random(f"canary {kind.value} {form}")
    backend = REFERENCE_FORMS[form]
    for _ in range(8):
        case = Case.draw(rng, kind, backend)
        for _ in range(3):
            problem = case.problem()
            problem.run(backend, problem.workspace(backend, debug=True))


def into(problem: ForwardArgs, backend: Backend, workspace: WorkspaceManager, *, with_lse: bool) -> Callable[[], None]:
    """A call of `forward_mqa` whose results have their memory already."""
    return partial(
        forward_mqa,
        problem.q,
        problem.caches,
        problem.metadata,
        backend,
        workspace,
        torch.empty_like(problem.q),
        layer=problem.layer,
        limits=problem.limits,
        attn_sink=problem.attn_sink,
        topk_indices=problem.topk_indices,
        lse=torch.empty(problem.q.shape[:2]) if with_lse else None,
    )


def peak_temporaries(call: Callable[[], None]) -> int:
    """Most bytes that torch's allocator held at any moment beyond those it held before the call."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        call()
    assert recorded.profiler is not None
    assert recorded.profiler.kineto_results is not None
    events = [e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def test_the_measure_of_temporaries_sees_what_operators_hide() -> None:
    a = torch.zeros(1000, dtype=torch.int32)

    def hidden() -> None:
        a.cumsum(0)  # an int64 copy and an int64 result

    def one_after_another() -> None:
        ((a + 1) + 1).add_(1)  # two of 4,000 bytes at a time, and scalars

    assert peak_temporaries(lambda: None) == 0
    assert peak_temporaries(hidden) >= 8000
    assert 8000 <= peak_temporaries(one_after_another) <= 8064


@pytest.mark.pairwise
@all_forms
@all_kinds
@pytest.mark.parametrize("tile", [1, 20_000])
def test_g11_temporaries_stay_within_the_plan(
    tile: int, kind: LayerKind, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With tiles so small that the plan of a tiny problem means something."""
    monkeypatch.setattr(kernels, "TILE_BYTES", tile)
    rng, backend = random.Random(f"{tile} {kind.value} {form}"), REFERENCE_FORMS[form]
    for _ in range(5):
        case = Case.draw(rng, kind, backend)
        problem = case.problem()
        workspace = problem.workspace(backend, debug=False)
        call = into(problem, backend, workspace, with_lse=True)

        assert peak_temporaries(call) <= plan_of(problem, backend).transient_bytes


@pytest.mark.matrix
@all_kinds
def test_g11_real_dims_stay_within_the_plan(kind: LayerKind) -> None:
    """Eight heads of 512 with real tiles: attention of 600 tokens over a context of 5,000."""
    geometry = attrs.evolve(ModelGeometry.preset("flash"), num_heads=8)
    layout = KVCacheLayout.fp8_ds_mla()
    scenario = StepFixture(
        kind=kind,
        requests=[(4400, 600)],
        geometry=geometry,
        layout=layout,
        swa_block_size=64,
        compressed_block_tokens=256,
    )
    backend = REFERENCE_FORMS["gathered-dense"]
    problem = scenario.problem(backend, limits=Limits(1, 600, 5000))
    plan = plan_of(problem, backend)

    peak = peak_temporaries(into(problem, backend, RecordingWorkspace(plan), with_lse=False))
    assert plan.transient_bytes / 4 < peak <= plan.transient_bytes


@all_forms
@all_kinds
def test_g11_the_plan_grows_with_its_limits(kind: LayerKind, form: str) -> None:
    rng = random.Random(1)
    for _ in range(60):
        case = Case.draw(rng, kind, REFERENCE_FORMS[form])
        limits, layout = attrs.evolve(case.limits, max_workspace_bytes=None), case.caches.swa.layout
        layer = case.geometry.layer_of_kind(kind)
        plan = plan_workspace(layer, limits, REFERENCE_FORMS[form], layout)
        assert plan == plan_workspace(layer, limits, REFERENCE_FORMS[form], layout), "a pure function"
        for name in ("max_num_reqs", "max_num_batched_tokens", "max_model_len"):
            larger = attrs.evolve(limits, **{name: getattr(limits, name) + rng.randint(1, 50)})
            grown = plan_workspace(layer, larger, REFERENCE_FORMS[form], layout)
            assert all(grown.arenas[arena] >= size for arena, size in plan.arenas.items())
            assert grown.transient_bytes >= plan.transient_bytes


@pytest.mark.in_turn
@all_forms
@all_kinds
def test_g11_a_cap_makes_more_chunks_and_never_another_result(kind: LayerKind, form: str) -> None:
    scenario = StepFixture(kind=kind, requests=[(30, 1), (40, 30), (0, 25), (17, 9, 2)], topk="holes")
    backend, free = REFERENCE_FORMS[form], scenario.limits
    least = smallest_cap(scenario.geometry, kind, free, backend, scenario.layout)
    sizes = []

    for cap in (None, least + 5000, least + 500, least):
        limits = attrs.evolve(free, max_workspace_bytes=cap)
        problem = scenario.problem(backend, limits=limits)
        workspace = RecordingWorkspace(plan_of(problem, backend))
        scenario.compare(*problem.run(backend, workspace))
        sizes.append(workspace.size("prefill"))
        assert cap is None or workspace.size("prefill") <= cap

    assert sizes[-1] < sizes[0]


@all_forms
@all_kinds
def test_g11_a_cap_too_small_names_the_smallest_one_that_works(kind: LayerKind, form: str) -> None:
    scenario = StepFixture(kind=kind, requests=[(40, 30)])
    backend, layer = REFERENCE_FORMS[form], scenario.layer
    least = smallest_cap(scenario.geometry, kind, scenario.limits, backend, scenario.layout)

    with pytest.raises(ArgumentError, match=rf"max_workspace_bytes: expected at least {least}, .*, got {least - 1} ->"):
        plan_workspace(layer, attrs.evolve(scenario.limits, max_workspace_bytes=least - 1), backend, scenario.layout)
    plan = plan_workspace(layer, attrs.evolve(scenario.limits, max_workspace_bytes=least), backend, scenario.layout)
    assert plan.arenas["prefill"] <= least


# mutants: backends that write outside of the plan


class Greedy(ScratchBackend):
    """Asks for more than its bound says."""

    def scratch_bound(self, phase: Phase, layer: LayerGeometry, max_tokens: int, max_width: int) -> int:
        return simultaneous_bytes(self.scratch(phase, layer, max_tokens, max_width))  # right only if monotone


class Sloppy(ScratchBackend):
    """Writes one byte after what it was given."""

    def decode(self, call: AttentionCall) -> None:
        view = call.scratch[-1]
        view.as_strided((view.numel() + 1,), (1,)).fill_(1)
        super().decode(call)


def test_g11_a_backend_that_asks_for_more_than_its_bound_is_refused_by_name() -> None:
    scenario = StepFixture(requests=[(30, 1)])
    problem = scenario.problem(Greedy(), limits=Limits(200, 200, 64))
    original = problem.caches.swa.tensor.clone()

    with pytest.raises(WorkspaceError, match=r"reference.decode needs \d+ bytes in arena 'decode', which is locked at"):
        problem.run(Greedy(), RecordingWorkspace(plan_of(problem, Greedy())))
    assert torch.equal(problem.caches.swa.tensor, original)
    scenario.compare(*problem.run(ScratchBackend(), RecordingWorkspace(plan_of(problem, ScratchBackend()))))


@pytest.mark.parametrize("request_", [(30, 1), (0, 5)], ids=["decode", "prefill"])
def test_g11_a_backend_that_writes_after_its_scratch_is_caught(request_: tuple[int, int]) -> None:
    scenario = StepFixture(requests=[request_])

    with pytest.raises(CanaryError, match=r"bytes after \[\d, 3\] torch.uint8 of reference\.\w+ were overwritten"):
        scenario.run(Sloppy())
    scenario.check(ScratchBackend())


@all_kinds
def test_g11_the_warm_up_reserves_the_plan_and_touches_nothing(kind: LayerKind) -> None:
    backend = backend_of("paged-ragged")
    problem = StepFixture(kind=kind, requests=[(30, 1), (0, 9)]).problem(backend)
    workspace, out = WorkspaceManager(), torch.full_like(problem.q, 3.0)

    forward_mqa(
        problem.q,
        problem.caches,
        None,
        backend,
        workspace,
        out,
        layer=problem.layer,
        limits=problem.limits,
        attn_sink=None,
    )
    workspace.lock()

    assert not out.any()
    assert {arena: workspace.size(arena) for arena in ("decode", "prefill")} == plan_of(problem, backend).arenas
    assert_same_bits(problem.run(backend, workspace), problem.run(backend))

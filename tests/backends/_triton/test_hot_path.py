"""What a step of the triton backend never does: read a value on the host, allocate, or launch what was not foreseen.

Tensors on torch's "meta" device have no values: code that reads one on the host fails, on any machine.
"""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch
from attrs import evolve

from dsv4attn.backends._triton.compiling.variant import Variant
from dsv4attn.backends._triton.interpreted import INTERPRETED
from dsv4attn.backends._triton.launching import warmup
from dsv4attn.backends._triton.launching.runtime import FAR_FORMS, observed
from dsv4attn.backends.triton.launch import GenericBackend
from dsv4attn.core.cache.layout import Arrangement, Fp8Format, KVCacheLayout
from dsv4attn.core.cache.selected_keys import DenseIndices, GatheredKeys
from dsv4attn.core.contract.backend import Phase, Run
from dsv4attn.core.contract.device import DeviceFacts
from dsv4attn.core.contract.limits import Limits
from dsv4attn.core.memory.workspace import simultaneous_bytes
from dsv4attn.core.model.geometry import LayerKind, ModelGeometry
from dsv4attn.testing.kit import factories
from dsv4attn.testing.kit.factories import tiny_geometry
from tests.backends._triton.attention.attention_trials import TINY, Answer, Trial
from tests.backends._triton.cache.caches import DEVICE
from tests.backends._triton.engine import Engine, Interpreted, launching_nothing
from tests.backends._triton.index_ops.index_trials import FILLS, VIEWS, operations
from tests.harness import all_kinds, same_bits

META = torch.device("meta")
FLASH = ModelGeometry.preset("flash")
LIMITS = Limits(max_num_reqs=6, max_num_batched_tokens=96, max_model_len=1024, num_speculative_tokens=1)
DECODES = [(300, 1), (999, 2), (0, 1)]


def engine(kind: LayerKind, device: torch.device, tuning: str = "auto", **options: Any) -> Engine:
    return Engine(GenericBackend(tuning=tuning), FLASH, LIMITS, kind, device, **options)


# no value is read, nothing is allocated

meta_only = pytest.mark.skipif(not INTERPRETED, reason="on a device `test_device` shows it with real tensors")


@meta_only
@all_kinds
def test_g11_the_projection_allocates_its_result_and_nothing_else(kind: LayerKind) -> None:
    on = engine(kind, META)
    wo_a = torch.empty(8 * 1024, 8 * 512, dtype=torch.bfloat16, device=META)
    with launching_nothing(), operations() as ran:
        on.layer.o_proj(on.out, on.positions, wo_a, 8)

    allocations = [name for name, _ in ran if name not in VIEWS | {"promote_types"}]
    assert allocations in (["new_empty"], ["empty"])


class Careless(GenericBackend):
    """Does in a step what no step may do."""

    def __init__(self, slip: str) -> None:
        super().__init__()
        self.slip = slip

    def prepare(self, phase: Phase, call: Any) -> Run:
        rows = call.keys[0].rows
        if self.slip == "reads":
            rows.lens.max().item()
        elif self.slip == "lists":
            rows.lens.tolist()
        elif self.slip == "copies":
            rows.lens.cpu()
        else:
            torch.zeros_like(call.out)
        return super().prepare(phase, call)


@meta_only
@pytest.mark.parametrize("slip", ["reads", "lists", "copies", "allocates"])
def test_g11_a_planted_read_or_allocation_is_seen(slip: str) -> None:
    on = Engine(Careless(slip), FLASH, LIMITS, LayerKind.CSA, META)
    batch = on.load(DECODES, Random(0))
    with launching_nothing(), operations() as ran:
        metadata = on.metadata(batch)
        try:
            on.attend(4, metadata)
        except (RuntimeError, NotImplementedError):
            return  # there was nothing to read

    assert {name for name, where in ran if where == "device"} - VIEWS - FILLS


# nothing is compiled that was not foreseen


def layouts() -> dict[str, KVCacheLayout]:
    return {
        "ocp": KVCacheLayout.fp8_ds_mla(),
        "fnuz": KVCacheLayout.fp8_ds_mla(fp8_format=Fp8Format.FNUZ),
        "interleaved": KVCacheLayout.fp8_ds_mla(arrangement=Arrangement.INTERLEAVED),
        "bf16": KVCacheLayout.rows(),
        "fp32": KVCacheLayout.rows(dtype=torch.float32),
    }


def serve(on: Engine, steps: int, rng: Random) -> None:
    """Any steps within the limits."""
    groups, rank = on.geometry.o_groups, on.geometry.o_lora_rank
    width = on.one.num_heads // groups * on.one.head_dim
    wo_a = torch.zeros(groups * rank, width, dtype=on.q_dtype, device=on.device)
    for _ in range(steps):
        requests, extra = on.requests(rng), rng.randint(0, 3)
        rows = sum(count for _, count in requests) + extra
        if rows > on.limits.max_num_batched_tokens:
            rows, extra = rows - extra, 0
        metadata = on.metadata(on.load(requests, rng, extra=extra), full_width=rng.random() < 0.5)
        on.insert(rows, metadata)
        lse = torch.zeros(rows, on.one.num_heads, device=on.device) if rng.random() < 0.3 else None
        out = on.attend(rows, metadata, lse)
        on.layer.o_proj(out, on.positions[:rows], wo_a, groups)


def foreseen(on: Engine) -> set[Variant]:
    return set(on.backend.kernel_variants(on.bounds(), DeviceFacts.here()))


@pytest.mark.in_turn
@pytest.mark.skipif(not INTERPRETED, reason="on a device the kernels run, in the test below")
@pytest.mark.parametrize("layout", layouts().values(), ids=layouts())
@all_kinds
def test_g18_every_launch_within_the_bounds_is_foreseen(kind: LayerKind, layout: KVCacheLayout) -> None:
    q_dtype = torch.float32 if layout.dtype == torch.float32 else torch.bfloat16
    # with this tuning rows are cut on a machine of few units, too
    on = engine(kind, META, "sm_90", layout=layout, q_dtype=q_dtype, sink=layout.is_quantised)
    with launching_nothing(), observed() as seen:
        serve(on, 40, Random(1))

    names = {variant.name for variant in seen}
    assert names >= {"attention", "reduce", "project_kernel", "qnorm_rope_kv_insert_kernel"}
    assert set(seen) <= foreseen(on), {str(variant) for variant in set(seen) - foreseen(on)}


ODD = [
    tiny_geometry(num_heads=3, head_dim=12, rope_dim=4, o_groups=3),
    tiny_geometry(num_heads=1, head_dim=14, rope_dim=6, window=5),
    tiny_geometry(num_heads=5, head_dim=300, rope_dim=4, window=200, topk=9),
]


@pytest.mark.pairwise
@pytest.mark.skipif(not INTERPRETED, reason="on a device the kernels run, in the test below")
@pytest.mark.parametrize("name", layouts())
@pytest.mark.parametrize("geometry", ODD, ids=lambda geometry: str(geometry.head_dim))
@all_kinds
def test_g18_with_any_dims_every_launch_is_foreseen(kind: LayerKind, geometry: ModelGeometry, name: str) -> None:
    layout = factories.layouts(geometry)[name]
    q_dtype = torch.float32 if layout.dtype == torch.float32 else torch.bfloat16
    on = Engine(GenericBackend(), geometry, LIMITS, kind, META, layout=layout, q_dtype=q_dtype)
    with launching_nothing(), observed() as seen:
        serve(on, 10, Random(1))

    assert set(seen) <= foreseen(on), {str(variant) for variant in set(seen) - foreseen(on)}


@pytest.mark.skipif(not INTERPRETED, reason="on a device the kernels run, in the test below")
@pytest.mark.parametrize("page", [1, 2, 3, 64])
def test_g18_a_cache_of_one_page_is_foreseen_too(page: int) -> None:
    limits = Limits(max_num_reqs=1, max_num_batched_tokens=page, max_model_len=page)
    on = Engine(GenericBackend(), FLASH, limits, LayerKind.SWA, META, swa_block=page)
    with launching_nothing(), observed() as seen:
        serve(on, 3, Random(1))

    assert on.swa.num_blocks == 1
    assert set(seen) <= foreseen(on)


@pytest.mark.skipif(not INTERPRETED, reason="on a device the kernels run, in the test below")
def test_g18_a_launch_beyond_the_bounds_is_not_foreseen() -> None:
    """The comparison can fail: an engine that promised no sinks, and has some."""
    on = engine(LayerKind.SWA, META)
    with launching_nothing(), observed() as seen:
        serve(on, 5, Random(1))
    on.sinks = None

    assert not set(seen) <= foreseen(on)


def test_g18_warm_up_says_how_many_there_are() -> None:
    on = engine(LayerKind.CSA, DEVICE)

    assert on.backend.warmup(on.bounds(), DEVICE) == len(foreseen(on)) * (1 + FAR_FORMS)


@pytest.mark.device
@pytest.mark.skipif(INTERPRETED, reason="needs an accelerator")
@all_kinds
def test_g18_after_a_warm_up_a_thousand_steps_compile_nothing(kind: LayerKind) -> None:
    limits = Limits(max_num_reqs=16, max_num_batched_tokens=512, max_model_len=4096, num_speculative_tokens=1)
    on = Engine(GenericBackend(), FLASH, limits, kind, DEVICE)
    on.backend.warmup(on.bounds(), DEVICE)
    with warmup.compiled() as compiled, observed() as seen:
        serve(on, 1000, Random(2))
    torch.accelerator.synchronize()

    assert compiled == []
    assert set(seen) <= foreseen(on)
    assert len(seen) > 3000


# deterministic rows


@pytest.mark.parametrize("sink", [False, True], ids=["no-sink", "sink"])
@pytest.mark.parametrize("columns", [0, 40, 400])
def test_g19_a_wider_table_does_not_show_in_the_bits(columns: int, sink: bool) -> None:
    """Tables are as wide as the longest row of a batch, so a short row may be one part of one or one of many."""
    trial = Trial((TINY,), (64,), (60,), q_dtype=torch.float32, sink=sink, wants_lse=False, seed=3)
    backend, layer = Interpreted(deterministic=True), trial.layer
    call, _ = trial.call()
    assert not isinstance(call.keys, GatheredKeys)
    (segment,) = call.keys
    rows, outs = segment.rows, []
    assert isinstance(rows, DenseIndices)
    for columns_added in (0, columns):
        wide = torch.cat([rows.indices, rows.indices.new_full((trial.tokens, columns_added), -1)], 1)
        specs = backend.scratch(Phase.DECODE, layer, trial.tokens, wide.shape[1])
        scratch = [torch.empty(tuple(shape), dtype=dtype, device=DEVICE) for shape, dtype in specs]
        for memory in scratch:
            memory.fill_(torch.nan if memory.is_floating_point() else -7)
        keys = [evolve(segment, rows=DenseIndices(wide, rows.lens))]
        backend.decode(evolve(call, keys=keys, scratch=scratch))
        outs.append(call.out.clone())

    assert trial.error(Answer(outs[0], None, None)) <= 1
    assert same_bits(*outs)


@pytest.mark.parametrize("phase", Phase)
def test_g19_rows_of_both_phases_are_cut_alike(phase: Phase) -> None:
    backend, window = Interpreted(deterministic=True), Trial((TINY,), (64,), (60,)).layer
    growing = evolve(window, kind=LayerKind.HCA, compress_ratio=128)

    assert [len(backend.scratch(phase, window, 3, width)) for width in (1, 60, 600)] == [0, 0, 4]
    # rows of a layer that grow with the sequence have one kernel, whatever the longest row of a batch is
    assert [backend.scratch(phase, growing, 3, width)[0][0][:2] for width in (1, 60, 600)] == [(1, 1), (1, 1), (3, 3)]
    for layer in (window, growing):
        for tokens in (0, 1, 3, 500):
            for width in (1, 60, 600):
                needs = simultaneous_bytes(list(backend.scratch(phase, layer, tokens, width)))
                assert needs <= backend.scratch_bound(phase, layer, 500, 600)

"""What a step of the sm90 backend never does: read a value on the host, allocate, or launch what was not foreseen.

On torch's "meta" device tensors have no values; on an H200 steps are real, and captured.
"""

from __future__ import annotations

from collections.abc import Iterable
from random import Random
from typing import Any

import pytest
import torch
from attrs import evolve

from dsv4attn.backends._triton.compiling.variant import Variant, type_of
from dsv4attn.backends._triton.interpreted import INTERPRETED
from dsv4attn.backends._triton.launching import warmup
from dsv4attn.backends._triton.launching.runtime import observed
from dsv4attn.backends.sm90.launch import Sm90Backend
from dsv4attn.core.cache.layout import KVCacheLayout
from dsv4attn.core.contract.backend import KeyForm, Phase
from dsv4attn.core.contract.device import DeviceFacts
from dsv4attn.core.contract.limits import Limits
from dsv4attn.core.contract.warmup import WarmupSpec
from dsv4attn.core.model.geometry import LayerKind, ModelGeometry
from tests.backends._triton.attention.attention_trials import BF16_ROWS, FNUZ, OCP, Trial
from tests.backends._triton.engine import Engine, launching_nothing, neither_waiting_nor_allocating
from tests.backends._triton.triton_backends import planned

META = torch.device("meta")
FLASH = ModelGeometry.preset("flash")
LIMITS = Limits(max_num_reqs=6, max_num_batched_tokens=96, max_model_len=1024, num_speculative_tokens=1)
each_form = pytest.mark.parametrize("form", [form.value for form in KeyForm])
all_kinds = pytest.mark.parametrize("kind", list(LayerKind))
meta_only = pytest.mark.skipif(not INTERPRETED, reason="on a device the steps below are real")
on_device = pytest.mark.skipif(
    INTERPRETED or DeviceFacts.here().arch != "sm_90", reason="needs an H200, or another card of sm_90"
)


def engine(kind: LayerKind, device: torch.device = META, prefill: str = "paged", **options: Any) -> Engine:
    return Engine(Sm90Backend(prefill=prefill), FLASH, LIMITS, kind, device, **options)


@meta_only
@each_form
@all_kinds
def test_which_kernels_attend(kind: LayerKind, form: str) -> None:
    decodes, mixed = [(300, 1), (999, 2), (0, 1)], [(300, 1), (9, 2), (0, 30), (900, 5)]
    tiles, gluon = {"attend_tile", "combine_tiles"}, {"attention", "combine_parts"}

    # the interpreter's four programs are enough for the tiles of a window alone
    assert {*engine(kind, prefill=form).recorded_step(decodes).launched} >= (tiles if kind is LayerKind.SWA else gluon)
    assert {*engine(kind, prefill=form).recorded_step(mixed).launched} >= gluon


def read_by(variants: Iterable[Variant]) -> set[str]:
    """What keys are, of kernels that attend."""
    return {dict(variant.types)["window_keys"] for variant in variants if variant.name == "attention"}


def foreseen(on: Engine) -> set[Variant]:
    return set(on.backend.kernel_variants(on.bounds(), DeviceFacts.here()))


@pytest.mark.pairwise
@meta_only
@pytest.mark.parametrize(
    "layout", [OCP, BF16_ROWS, KVCacheLayout.rows(dtype=torch.float32)], ids=["pages", "rows", "fp32"]
)
@each_form
@all_kinds
def test_g18_every_launch_within_the_bounds_is_foreseen(kind: LayerKind, layout: KVCacheLayout, form: str) -> None:
    q_dtype = torch.float32 if layout.dtype == torch.float32 else torch.bfloat16
    on, rng = engine(kind, prefill=form, layout=layout, q_dtype=q_dtype, sink=layout.is_quantised), Random(1)
    with launching_nothing(), observed() as seen:
        for _ in range(12):
            requests = on.requests(rng)
            rows = sum(count for _, count in requests)
            metadata = on.metadata(on.load(requests, rng), full_width=rng.random() < 0.5)
            on.insert(rows, metadata)
            lse = torch.zeros(rows, on.one.num_heads, device=META) if rng.random() < 0.3 else None
            on.attend(rows, metadata, lse)

    assert set(seen) <= foreseen(on), {str(variant) for variant in set(seen) - foreseen(on)}
    # decode reads pages in either form
    dtypes = {layout.dtype, layout.row_dtype} if form == "gathered" else {layout.dtype}
    assert read_by(seen) == {type_of(torch.empty(0, dtype=dtype)) for dtype in dtypes}


@each_form
def test_where_the_gluon_kernel_serves_all_no_shared_form_is_compiled(form: str) -> None:
    backend = Sm90Backend(prefill=form, small="gluon")
    bounds = evolve(engine(LayerKind.CSA).bounds(), aligned=True, aligned_rows=True)
    variants = [*backend.kernel_variants(bounds, DeviceFacts.named("sm_90"))]
    names, forms = [variant.name for variant in variants], 2 if form == "gathered" else 1

    assert "reduce" not in names
    # with and without lse, of a layer with a window alone and of one with two segments; and of rows
    assert 1 <= names.count("attention") <= 4 * forms * len(bounds.layers)
    assert read_by(variants) == ({"*u8", "*bf16"} if form == "gathered" else {"*u8"})


def kernels_by_keys(bounds: WarmupSpec) -> dict[str, set[bool]]:
    """Of prefill on gathered rows: for each kind of keys, whether the Gluon kernel reads them, or the shared kernel."""
    variants: dict[str, set[bool]] = {}
    for variant in Sm90Backend(prefill="gathered").kernel_variants(bounds, DeviceFacts.named("sm_90")):
        if variant.name == "attention":
            # the shared kernel has no such constant
            variants.setdefault(dict(variant.types)["window_keys"], set()).add("BT" in dict(variant.constants))
    return variants


def test_the_gluon_kernel_reads_rows_even_where_it_reads_no_pages() -> None:
    bounds = evolve(engine(LayerKind.SWA, layout=FNUZ).bounds(), aligned=True, aligned_rows=True)

    assert kernels_by_keys(bounds) == {"*u8": {False}, "*bf16": {True}}


def test_where_alignment_is_not_promised_shared_forms_are_foreseen_too() -> None:
    bounds = evolve(engine(LayerKind.CSA).bounds(), aligned=False)

    assert kernels_by_keys(bounds) == {"*u8": {False, True}, "*bf16": {False, True}}


def test_a_prepared_call_launches_the_same_for_other_memory_and_the_shared_kernel_for_other_alignments() -> None:
    backend = Sm90Backend(small="gluon")
    call = planned(backend, Trial(widths=(40, 70), tokens=2, seed=9))
    sink = call.attn_sink
    assert sink is not None
    q = torch.zeros(2, call.q.shape[1], 520, dtype=torch.bfloat16, device=call.q.device)
    call = evolve(call, q=q[..., :512])
    with launching_nothing(), observed() as seen:
        run = backend.prepare(Phase.DECODE, call)
        run(call.tensors)
        run(call.tensors._replace(q=q[..., 8:], attn_sink=sink.clone()))
        backend.decode(evolve(call, q=q[..., 1:513]))

    assert len(seen) >= 5
    assert seen[:2] == seen[2:4]
    assert seen[4].kernel is not seen[0].kernel


@pytest.mark.device
@on_device
@each_form
@all_kinds
def test_a_step_on_the_device_neither_synchronises_nor_allocates_nor_compiles(kind: LayerKind, form: str) -> None:
    device = torch.device("cuda", 0)
    on, rng = engine(kind, device, form), Random(5)
    on.backend.warmup(on.bounds(), device)
    steps = [[(1000, 2), (130, 1), (0, 1)], [(100, 1), (0, 50), (900, 30)]]
    for requests in steps:
        batch = on.load(requests, rng)
        on.insert(batch.slot_mapping.shape[0], on.metadata(batch))
    batch = on.load(steps[1], rng)
    tokens = batch.slot_mapping.shape[0]
    metadata = on.metadata(batch)
    with neither_waiting_nor_allocating(), warmup.compiled() as fresh:
        on.attend(tokens, metadata)

    assert fresh == []


@pytest.mark.device
@on_device
@all_kinds
def test_a_replay_with_changed_metadata_equals_eager_bit_for_bit(kind: LayerKind) -> None:
    on, rng, requests = engine(kind, torch.device("cuda", 0)), Random(3), 6
    metadata = on.metadata(on.load([], rng, reqs=requests), full_width=True)
    on.attend(requests, metadata)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        on.attend(requests, metadata)
    for round_ in range(20):
        steps = [(rng.choice([0, 63, 127, 128, 511, 1000, rng.randint(0, 1000)]), 1) for _ in range(rng.randint(0, 6))]
        batch = on.load(steps, rng, reqs=requests)
        changed = on.metadata(batch, full_width=True)
        on.out.fill_(torch.nan)
        graph.replay()
        replayed = on.out[:requests].clone()
        on.out.fill_(torch.nan)
        again = on.attend(requests, changed)

        assert torch.equal(replayed.view(torch.int16), again.view(torch.int16)), round_
        assert torch.isfinite(replayed).all()
        assert not replayed[len(steps) :].any()

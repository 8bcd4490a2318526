"""Decodes in which each program has one tile: the sizes that use them, and answers against the oracle."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from math import prod

import pytest
import torch
from attrs import evolve

from dsv4attn.backends._triton import backend as shared
from dsv4attn.backends._triton import tuning
from dsv4attn.backends._triton.launching.runtime import observed
from dsv4attn.backends._triton.tuning import DEFAULT, HOPPER, Tuning
from dsv4attn.backends.sm90 import launch
from dsv4attn.backends.sm90.launch import Sm90Backend
from dsv4attn.backends.triton.launch import GenericBackend
from dsv4attn.core.cache.layout import KVCacheLayout
from dsv4attn.core.contract.backend import Phase
from dsv4attn.core.memory.workspace import WorkspaceManager, simultaneous_bytes
from dsv4attn.core.model.geometry import LayerKind
from tests.backends._triton.attention.attention_trials import OCP, Answer, Trial
from tests.backends._triton.launching.test_warmup_variants import (
    FLASH,
    LAYOUTS,
    LIMITS,
    META,
    Sliced,
    foreseen,
    meta_only,
)
from tests.backends.built_in import forms

UNITS = 132
FEW, HEADS, BLOCKS = HOPPER.small


class ObservedBackend(GenericBackend):
    tunings: Mapping[str, Tuning] = {DEFAULT: HOPPER}


@pytest.fixture(autouse=True)
def units(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many programs as an H200 has."""
    for module in (shared, launch):
        monkeypatch.setattr(module, "multiprocessors", lambda: UNITS)


@pytest.mark.parametrize(
    ("tokens", "heads", "width", "chosen"),
    [
        (1, 64, 640, FEW),
        (2, 64, 640, HEADS),
        (3, 64, 640, HEADS),
        (4, 64, 640, BLOCKS),
        (6, 64, 640, BLOCKS),
        (7, 64, 640, HOPPER),
        (1, 128, 1152, BLOCKS),
        (2, 128, 1152, HOPPER),
        (8, 64, 128, FEW),
        (16, 64, 128, HEADS),
        (6, 8, 640, FEW),
        (7, 8, 640, HEADS),
        (1, 64, 32, HOPPER),
        (1, 64, 33, FEW),
        (0, 64, 640, FEW),
        (1, 64, 10**6, HOPPER),
    ],
)
def test_each_tile_has_a_program_to_itself(tokens: int, heads: int, width: int, chosen: Tuning) -> None:
    assert HOPPER.of_call(tokens, heads, width, UNITS) == chosen
    assert chosen.of_call(tokens, heads, width, UNITS) in (chosen, FEW)


def test_an_architecture_s_numbers_hold_for_small_decodes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {tuning.pdl for tuning in (HOPPER, *HOPPER.small)} == {False}
    monkeypatch.setattr(tuning, "uses_pdl", lambda arch: arch == "sm_90")
    on, elsewhere = HOPPER.on("sm_90"), HOPPER.on("sm_80")

    assert [(tuning.pdl, tuning.converts) for tuning in (on, *on.small)] == [(True, True)] * 4
    assert [(tuning.pdl, tuning.converts) for tuning in (elsewhere, *elsewhere.small)] == [(False, False)] * 4
    assert [HOPPER.on(arch).converts for arch in ("sm_89", "sm_120", "gfx942", "xpu", "cpu")] == [True, True] + [
        False
    ] * 3


def answered(backend: GenericBackend, trial: Trial, phase: Phase = Phase.DECODE) -> tuple[float, tuple[int, int]]:
    """Error in budgets, and heads and keys of the programs that attended."""
    call, _ = trial.call()
    specs = list(backend.scratch(phase, trial.layer, trial.tokens, sum(trial.widths[: len(trial.layouts)])))
    scratch = WorkspaceManager(call.q.device).get_simultaneous(*specs) if specs else []
    for view in scratch:
        view.view(torch.uint8).fill_(0xFF)
    call = evolve(call, scratch=scratch)
    with observed() as seen:
        (backend.decode if phase is Phase.DECODE else backend.prefill)(call)
    (form,) = (dict(variant.constants) for variant in seen if variant.name == "attention")
    return trial.error(Answer(call.out, call.lse, call.max_logits)), (form["TILE"].heads, form["TILE"].keys)


CODES, NIBBLES = KVCacheLayout.v41_fp8(), KVCacheLayout.v41_fp4()
TRIALS = {
    "few": (Trial(layouts=(OCP, OCP), widths=(128, 150), tokens=1, heads=40, seed=1), FEW),
    "few, of codes and nibbles": (Trial(layouts=(CODES, NIBBLES), widths=(64, 70), tokens=2, heads=20, seed=2), FEW),
    "of 16 heads": (Trial(layouts=(OCP, OCP), widths=(128, 192), tokens=5, heads=65, seed=3), HEADS),
    "of 32 heads": (Trial(layouts=(OCP,), widths=(65,), tokens=20, heads=50, seed=4), BLOCKS),
    "not aligned": (Trial(layouts=(OCP,), widths=(90,), tokens=3, heads=17, aligned=False, seed=5), FEW),
    "ragged": (Trial(layouts=(OCP,), widths=(90,), tokens=3, heads=17, form="ragged", seed=6), FEW),
    "in fp32": (Trial(layouts=(OCP,), widths=(90,), tokens=2, heads=17, q_dtype=torch.float32, seed=7), FEW),
}


@pytest.mark.parametrize("name", TRIALS)
def test_a_small_decode_is_right(name: str) -> None:
    trial, chosen = TRIALS[name]
    error, blocks = answered(ObservedBackend(), trial)

    assert error <= 1
    assert blocks == (chosen.heads, 32 if "fp32" in name else chosen.keys)


def test_prefill_and_deterministic_calls_take_the_same_numbers_whatever_their_size() -> None:
    trial = Trial(layouts=(OCP,), widths=(90,), tokens=1, heads=40, seed=8)
    sizes = answered(ObservedBackend(), trial, Phase.PREFILL), answered(ObservedBackend(deterministic=True), trial)

    assert all(error <= 1 for error, _ in sizes)
    assert {blocks for _, blocks in sizes} == {(HOPPER.heads, HOPPER.keys)}


@pytest.mark.parametrize("make", [ObservedBackend, Sm90Backend])
def test_scratch_of_small_decodes_keeps_within_its_bound(make: type[GenericBackend]) -> None:
    for heads, tokens, width in product((1, 8, 17, 64, 65, 128), (1, 2, 3, 8, 16, 66, 132), (33, 64, 65, 640, 1152)):
        backend, layer = make(), Trial(heads=heads, widths=(width,)).layer
        specs = list(backend.scratch(Phase.DECODE, layer, tokens, width))

        assert simultaneous_bytes(specs) <= backend.scratch_bound(Phase.DECODE, layer, tokens, width)
        splits = backend._splits(Phase.DECODE, layer, tokens, width)
        if splits > 1:
            # of sm90, whose scratch the shared kernel's parts are laid into, too
            assert tokens * splits * heads * 512 <= prod(specs[0][0])
        assert splits == 1 or tokens * splits <= UNITS


@pytest.mark.in_turn
@meta_only
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", forms())
def test_g18_forms_of_small_decodes_are_foreseen(name: str, layout: str) -> None:
    cache, dtype = LAYOUTS[layout]
    sizes = set[tuple[int, int]]()
    for seed, kind in enumerate(LayerKind):
        on = Sliced(forms()[name](tuning="sm_90"), FLASH, LIMITS, kind, META, layout=cache, q_dtype=dtype)
        launched, known = on.sweep(8, seed), foreseen(on.backend, on.bounds())
        constants = [dict(variant.constants) for variant in launched if variant.name == "attention"]
        sizes |= {(form["TILE"].heads, form["TILE"].keys) for form in constants if "TILE" in form}

        assert launched <= known, {str(variant) for variant in launched - known}
    # fp32 takes one size of tiles
    assert len(sizes) > 1 or dtype == torch.float32

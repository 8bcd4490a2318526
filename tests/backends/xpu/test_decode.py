"""Decode of the xpu backend, on pages and on rows that it gathers: the oracle's answer, whatever memory holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from dsv4attn.backends.xpu import launch
from dsv4attn.backends.xpu.launch import XpuBackend
from dsv4attn.backends.xpu.tuning import RUN_BYTES
from dsv4attn.core.contract.backend import Phase
from dsv4attn.core.memory.workspace import WorkspaceManager, simultaneous_bytes
from dsv4attn.core.model.geometry import LayerGeometry, LayerKind, Rope
from tests.backends._triton.attention.attention_trials import FNUZ, FP32_ROWS, OCP, TINY, Answer, Trial, any_trial
from tests.backends._triton.cache.caches import DEVICE
from tests.backends.xpu.mutants import GATHERING, planted
from tests.core.attention.strategies import examples

FORMS = ["fused", "gathered"]
each_form = pytest.mark.parametrize("form", FORMS)


def decoded(backend: XpuBackend, trial: Trial) -> Answer:
    """Run a trial's call as decode, with scratch memory that is NaN and must not be left."""
    workspace = WorkspaceManager(DEVICE, debug=True)
    specs = backend.scratch(Phase.DECODE, trial.layer, trial.tokens, sum(trial.widths[: len(trial.layouts)]))
    call, _ = trial.call()
    backend.decode(evolve(call, scratch=workspace.get_simultaneous(*specs)))
    workspace.check_canaries()
    return Answer(call.out, call.lse, call.max_logits)


def same(left: Answer, right: Answer) -> bool:
    """Whether two answers are equal, bit for bit."""
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True) if a is not None and b is not None)


def check(backend: XpuBackend, trial: Trial) -> Answer:
    """Decode and compare with the oracle."""
    answer = decoded(backend, trial)
    assert trial.error(answer) <= 1
    return answer


MODEL = Trial(layouts=(OCP, OCP), pages=(64, 2), widths=(128, 40), tokens=2)
NAMED = {
    "64-heads": evolve(MODEL, heads=64),
    "72-heads": evolve(MODEL, heads=72, tokens=1),
    "1-head-fnuz": evolve(MODEL, heads=1, layouts=(FNUZ, OCP)),
    "8-heads-fp32": evolve(MODEL, heads=8, layouts=(FP32_ROWS, FP32_ROWS)),
    "window": evolve(MODEL, layouts=(OCP,), pages=(64,), widths=(128,)),
    "no-entries": evolve(MODEL, widths=(30, 0)),
    "no-columns": evolve(MODEL, widths=(0, 0)),
    "no-tokens": evolve(MODEL, tokens=0),
}
ROWS = ["auto", "xpu", "sm_90"]


@each_form
@pytest.mark.parametrize("name", NAMED)
def test_decode_is_right_in_either_form(form: str, name: str) -> None:
    row = ROWS[list(NAMED).index(name) % len(ROWS)]
    check(XpuBackend(decode=form, tuning=row, deterministic=name.startswith("72")), NAMED[name])


@each_form
@pytest.mark.parametrize("seed", range(12))
def test_any_call_is_right_in_either_form(form: str, seed: int) -> None:
    trial = evolve(any_trial(seed), form="dense")
    check(XpuBackend(decode=form, tuning=ROWS[seed % len(ROWS)], deterministic=seed % 4 == 0), trial)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("layout", [TINY, FP32_ROWS], ids=["fp8", "fp32"])
def test_a_step_that_is_cut_into_runs_gives_what_one_run_gives(
    layout: Any, deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = Trial(layouts=(layout, layout), pages=(5, 2), widths=(20, 30), tokens=5)
    backend = XpuBackend(decode="gathered", tuning="xpu", deterministic=deterministic)
    whole = check(backend, trial)
    row = 64 * 2 * layout.head_dim
    for tokens in (1, 2, 3, 4):
        monkeypatch.setattr(launch, "RUN_BYTES", tokens * row + row // 2)
        cut = check(backend, trial)
        # in parts of equal length the bits are those of one run; shared evenly, they depend on how many programs run
        assert not deterministic or same(whole, cut)


@each_form
def test_a_row_does_not_depend_on_its_batch_when_that_is_asked_for(form: str) -> None:
    trial = Trial(layouts=(TINY, TINY), pages=(5, 2), widths=(100, 300), tokens=3, heads=2)
    backend = XpuBackend(decode=form, tuning="xpu", deterministic=True)
    whole = check(backend, trial)
    for row in range(trial.tokens):
        alone = decoded(backend, trial.rows(row))
        row_results = [None if result is None else result[row : row + 1] for result in whole]

        assert same(Answer(*row_results), alone)  # type: ignore[arg-type]


@each_form
def test_the_order_of_pages_changes_no_bit(form: str) -> None:
    backend, trial = XpuBackend(decode=form), Trial(layouts=(OCP, OCP), pages=(64, 2), widths=(30, 20), seed=5)
    first, second = (decoded(backend, evolve(trial, pages_seed=seed)) for seed in (0, 1))

    assert same(first, second)


SMALL = [Trial(layouts=(TINY, TINY), pages=(5, 2), widths=(9, 11), tokens=7, heads=1, seed=seed) for seed in range(4)]


@pytest.mark.mutation
@pytest.mark.parametrize("bug", [("", ""), *GATHERING.values()], ids=["none", *GATHERING])
def test_a_planted_bug_of_gathering_is_found(
    bug: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "kernels", planted(tmp_path, bug))
    backend = XpuBackend(decode="gathered")

    assert any(trial.error(decoded(backend, trial)) > 1 for trial in SMALL) == (bug != ("", ""))


# memory


def layer_of(head_dim: int, heads: int) -> LayerGeometry:
    return LayerGeometry(LayerKind.SWA, 1, heads, head_dim, Rope(8, 1e4), 128, 0)


SIZES = st.integers(0, 40) | st.sampled_from([255, 256, 512, 8192])


@each_form
@examples(60)
@given(
    tokens=SIZES, more_tokens=SIZES, width=SIZES, more_width=SIZES, heads=st.integers(1, 128),
    head_dim=st.sampled_from([12, 32, 512]), deterministic=st.booleans(), budget=st.sampled_from([1, 10**5, 2**28]),
)  # fmt: skip
def test_the_bound_holds_for_every_smaller_call(
    form: str,
    tokens: int,
    more_tokens: int,
    width: int,
    more_width: int,
    heads: int,
    head_dim: int,
    deterministic: bool,
    budget: int,
) -> None:
    layer, backend = layer_of(head_dim, heads), XpuBackend(decode=form, deterministic=deterministic)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "RUN_BYTES", budget)
        for phase in Phase:
            specs = backend.scratch(phase, layer, tokens, width)
            bound = backend.scratch_bound(phase, layer, tokens + more_tokens, width + more_width)

            assert simultaneous_bytes(specs) <= bound


def test_a_million_tokens_of_context_do_not_need_more_memory_than_a_run_has() -> None:
    layer, backend = layer_of(512, 64), XpuBackend(decode="gathered")
    plain = XpuBackend(decode="fused").scratch_bound(Phase.DECODE, layer, 256, 128 + 8192)
    bound = backend.scratch_bound(Phase.DECODE, layer, 256, 128 + 8192)

    assert bound - plain <= 1.01 * RUN_BYTES
    # 256 tokens at once would take 2 GiB
    assert 7 * RUN_BYTES < 256 * (128 + 8192) * 1024

"""Calls of the sm90 backend with scratch memory full of misleading values; and which kernel served them."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve, frozen

from dsv4attn.backends._triton.attention import launch as attention_launch
from dsv4attn.backends._triton.attention.launch import prepare as shared
from dsv4attn.backends.sm90.launch import Sm90Backend
from dsv4attn.core.contract.backend import AttentionCall, AttentionOptions, Phase
from tests.backends._triton.attention.attention_trials import Answer, Trial
from tests.backends._triton.triton_backends import planned

FIXTURES = Path(__file__).parents[2] / "fixtures"


@frozen
class Result:
    """is_gluon: whether the Gluon kernel served the call. error: in budgets; at most 1 is right."""

    is_gluon: bool
    error: float
    call: AttentionCall


def run(
    trial: Trial,
    phase: Phase = Phase.DECODE,
    backend: Sm90Backend | None = None,
    change: Callable[[AttentionCall], AttentionCall] = lambda call: call,
) -> Result:
    """Run it, and fail if anything was written but the outputs."""
    chosen = backend or Sm90Backend(small="gluon")
    call, fallbacks = change(planned(chosen, trial, phase)), []

    def asking(*args: Any, **keywords: Any) -> Any:
        fallbacks.append(1)
        return shared(*args, **keywords)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_launch, "prepare", asking)
        (chosen.decode if phase is Phase.DECODE else chosen.prefill)(call)
    return Result(not fallbacks, trial.error(Answer(call.out, call.lse, call.max_logits)), call)


def check_rows_without_keys(trial: Trial, backend: Sm90Backend, empty_lse: float) -> Result:
    """Run a trial some of whose rows have no keys: their lse is `empty_lse`, and their output is zero."""
    options = AttentionOptions(empty_lse=empty_lse)
    result = run(trial, backend=backend, change=lambda call: evolve(call, options=options))
    lse, without_keys = result.call.lse, torch.from_numpy(trial.expected[0].lse == -math.inf)
    assert lse is not None
    assert without_keys.any()
    assert (lse.cpu()[without_keys] == empty_lse).all()
    assert not result.call.out.cpu()[without_keys].any()
    return result


def measured_lines(name: str) -> list[list[str]]:
    """Words of each line of a file of measured times, without comments."""
    lines = (FIXTURES / name).read_text(encoding="utf-8").splitlines()
    return [line.split() for line in lines if not line.startswith("#")]

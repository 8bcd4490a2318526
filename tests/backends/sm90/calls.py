"""Calls of the Hopper room, through its Backend, with scratch memory full of what may mislead; and who served them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from attrs import evolve, frozen

from dsv4attn.backends._triton.attention import launch as attention_launch
from dsv4attn.backends._triton.attention.launch import prepare as shared
from dsv4attn.backends.sm90.launch import Sm90Backend
from dsv4attn.core.contract.backend import AttentionCall, Phase
from dsv4attn.core.memory.workspace import WorkspaceManager, simultaneous_bytes
from tests.backends._triton.attention.attention_trials import Answer, Trial

__all__ = ["Result", "planned", "run"]


@frozen
class Result:
    """own: whether the room's own kernel served the call. error: in budgets; at most 1 is right."""

    own: bool
    error: float
    call: AttentionCall


def planned(backend: Sm90Backend, trial: Trial, phase: Phase = Phase.DECODE) -> AttentionCall:
    """A trial's call, with the scratch that the backend asks for."""
    call, _ = trial.call()
    width = sum(trial.widths[: len(trial.layouts)])
    specs = list(backend.scratch(phase, trial.layer, trial.tokens, width))
    assert simultaneous_bytes(specs) <= backend.scratch_bound(phase, trial.layer, trial.tokens, width)
    scratch = WorkspaceManager(call.q.device).get_simultaneous(*specs)
    for view in scratch:
        # NaN; but the table of rows that are split may have lines of an earlier call
        view.fill_(float("nan") if view.dtype.is_floating_point else 2)
    return evolve(call, scratch=scratch)


def run(
    trial: Trial,
    phase: Phase = Phase.DECODE,
    backend: Sm90Backend | None = None,
    change: Callable[[AttentionCall], AttentionCall] = lambda call: call,
) -> Result:
    """Run it, and fail if anything was written but the outputs."""
    one = backend or Sm90Backend(small="gluon")
    call, asked = change(planned(one, trial, phase)), []

    def asking(*args: Any, **keywords: Any) -> Any:
        asked.append(1)
        return shared(*args, **keywords)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_launch, "prepare", asking)
        (one.decode if phase is Phase.DECODE else one.prefill)(call)
    return Result(not asked, trial.error(Answer(call.out, call.lse, call.max_logits)), call)

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
from dsv4attn.backends._triton.launching.runtime import observed
from dsv4attn.backends.sm90.launch import Sm90Backend
from dsv4attn.core.contract.backend import AttentionCall, AttentionOptions, Phase
from dsv4attn.testing.kit.oracle_cache import place_of
from tests.backends._triton.attention.attention_trials import Answer, Trial
from tests.backends._triton.triton_backends import planned
from tests.harness import same_bits, storage_of

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


def check_a_scale_of_nan(trial: Trial, segment: int, group: int, attended: Callable[[Trial], Result]) -> None:
    """Run a trial before and after a scale of a key is NaN: all rows of that key become NaN, and no bit of others."""
    cache, _, slots, lens = trial.segments[segment]
    listed = [row[: max(n, 0)] for row, n in zip(slots, lens, strict=True)]
    slot = next(int(n) for row in listed for n in row if 0 <= n < cache.capacity)
    rows = [slot in row for row in listed]
    clean = attended(trial).call.out.cpu()
    block, offset = divmod(slot, cache.block_size)
    scales = place_of(cache.layout, offset, cache.block_size)[cache.layout.data_bytes :]
    at = cache.tensor.storage_offset() + block * cache.page_stride + int(scales[group])
    storage_of(cache.tensor)[at] = 0x7F if cache.layout.name == "v41_fp4" else 0xFF

    out = attended(trial).call.out.cpu()

    assert any(rows)
    assert not all(rows)
    for row, spoilt in enumerate(rows):
        assert out[row].isnan().all() if spoilt else same_bits(out[row], clean[row])


def served(backend: Sm90Backend, trial: Trial, phase: Phase = Phase.DECODE) -> set[str]:
    """Kernels that a call launches."""
    with observed() as seen:
        run(trial, phase, backend)
    # the Gluon kernel and the shared one have the same name, and other constants
    return {"gluon" if "BT" in dict(variant.constants) else variant.name for variant in seen}


def measured_lines(name: str) -> list[list[str]]:
    """Words of each line of a file of measured times, without comments."""
    lines = (FIXTURES / name).read_text(encoding="utf-8").splitlines()
    return [line.split() for line in lines if not line.startswith("#")]

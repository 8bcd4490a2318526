"""Tables of the backend by shapes: batches bring new ones without end, and the tables have one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import evolve

from dsv4attn.backends._triton.interpreted import INTERPRETED
from dsv4attn.backends.sm120 import flashinfer, probe
from dsv4attn.backends.sm120.flashinfer import FlashInferAttention, remember
from dsv4attn.backends.sm120.launch import Sm120Backend
from dsv4attn.core.contract.backend import Phase
from dsv4attn.core.contract.device import DeviceFacts
from dsv4attn.testing.kit.tolerances import tolerance
from tests.backends.sm120.decode_calls import LAYOUT, Trial, installed_flashinfer
from tests.backends.sm120.fake_flashinfer import RecordingWrapper


def entries(*owners: object) -> dict[str, int]:
    """Entries of every table of some objects, by its name."""
    return {
        name: len(value) for owner in owners for name, value in vars(owner).items() if isinstance(value, (dict, list))
    }


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Sm120Backend:
    """The backend on a card with FlashInfer, whose tables have few entries."""
    monkeypatch.setattr(probe, "find", lambda: installed_flashinfer(RecordingWrapper))
    monkeypatch.setattr(DeviceFacts, "here", lambda *_: DeviceFacts.named("sm_120"))
    monkeypatch.setattr(flashinfer, "MOST_SHAPES", 16)
    return Sm120Backend()


def test_what_is_known_of_shapes_has_an_end(backend: Sm120Backend) -> None:
    trial = Trial(heads=12, tokens=1)
    for i in range(100):
        backend.scratch(Phase.DECODE, trial.layer, 1 + i, 128 + i)
        backend.scratch(Phase.PREFILL, trial.layer, 65 + i, 128)
    vendor: Any = backend.vendor
    for width in range(1, 60):
        narrow = evolve(trial, widths=(width, 0))
        scratch = [torch.empty(shape, dtype=dtype) for shape, dtype in vendor.scratch(narrow.layer, 1, width, 0)]
        assert vendor.fit(evolve(narrow.call(), scratch=scratch))
    sizes = entries(vendor, backend)

    assert sizes["_plans"] == sizes["_forms"] == sizes["_answers"] == 16
    assert max(sizes.values()) == 16, sizes


@pytest.mark.skipif(not INTERPRETED, reason="the recording wrapper runs on the CPU")
def test_shapes_that_were_forgotten_are_served_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashinfer, "MOST_SHAPES", 2)
    subject = FlashInferAttention(installed_flashinfer())
    for tokens in (1, 2, 3, 1, 3):
        trial = Trial(heads=3, tokens=tokens, sinks=(0.5,))
        call = trial.run(subject, trial.call())

        assert trial.expected.errors(call.out, None).max() <= tolerance(LAYOUT, torch.bfloat16)
    assert entries(subject)["_forms"] == 2


def test_the_oldest_entry_goes() -> None:
    table = {i: i for i in range(flashinfer.MOST_SHAPES)}

    assert remember(table, -1, 5) == 5
    assert len(table) == flashinfer.MOST_SHAPES
    assert (0 in table, 1 in table, table[-1]) == (False, True, 5)

"""The sm120 backend: whose kernel serves a call, settled before anything is launched, and right by either."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch
from attrs import evolve

from dsv4attn.backends._triton.interpreted import INTERPRETED
from dsv4attn.backends.reference.launch import ReferenceBackend
from dsv4attn.backends.sm120 import probe
from dsv4attn.backends.sm120.explain_notes import notes
from dsv4attn.backends.sm120.launch import Sm120Backend
from dsv4attn.core.contract.backend import AttentionOptions, KeyForm, Phase, Products
from dsv4attn.core.contract.device import DeviceFacts
from dsv4attn.core.contract.index_ops import IndexOps
from dsv4attn.core.contract.problem import Problem, Reason
from dsv4attn.core.memory.workspace import WorkspaceManager, simultaneous_bytes
from dsv4attn.core.model.geometry import ModelGeometry
from dsv4attn.errors import ArgumentError, UnsupportedError
from dsv4attn.testing.case import chosen
from dsv4attn.testing.cases.table import CASES
from dsv4attn.testing.conform import Subject, conform
from tests.backends._triton.attention.attention_trials import FNUZ, OCP, Answer, Trial
from tests.backends._triton.triton_backends import planned as planned_call
from tests.backends.sm120.decode_calls import installed_flashinfer
from tests.backends.sm120.fake_flashinfer import RecordingWrapper

FLASH = ModelGeometry.preset("flash")
SM120 = DeviceFacts.named("sm_120")


class Counting(RecordingWrapper):
    """The recording wrapper, and how often it ran."""

    ran = 0

    def run(self, *args: Any, **keywords: Any) -> Any:
        type(self).ran += 1
        return super().run(*args, **keywords)


@pytest.fixture
def flashinfer_calls(monkeypatch: pytest.MonkeyPatch) -> type[Counting]:
    """A machine with such a card, as far as the backend can see, and FlashInfer on it."""
    Counting.ran = 0
    monkeypatch.setattr(probe, "find", lambda: installed_flashinfer(Counting))
    monkeypatch.setattr(DeviceFacts, "here", lambda *_: SM120)
    return Counting


def planned(backend: Sm120Backend, trial: Trial, phase: Phase = Phase.DECODE) -> Any:
    """A trial's call on contiguous queries and outputs, with the scratch that the backend asks for."""
    call = planned_call(backend, trial, phase)
    return evolve(call, q=call.q.contiguous(), out=call.out.contiguous(), options=AttentionOptions())


BASE = Trial(layouts=(OCP, OCP), pages=(64, 2), widths=(128, 40), tokens=2, heads=8)


def right(trial: Trial, call: Any) -> bool:
    return trial.error(Answer(call.out, call.lse, None)) <= 1


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"kernel": "cutlass"}, "kernel"),
        ({"in_range": 1}, "in_range"),
        ({"kernel": "flashinfer", "deterministic": True}, "kernel"),
    ],
)
def test_options_are_checked(options: dict[str, Any], argument: str) -> None:
    with pytest.raises(ArgumentError) as raised:
        Sm120Backend(**options)
    assert raised.value.argument == argument


def test_nothing_is_imported_before_it_is_needed_and_nothing_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "find", lambda: pytest.fail("asked for FlashInfer"))
    for options in ({}, {"kernel": "own"}, {"deterministic": True}):
        backend = Sm120Backend(**options)
        assert isinstance(backend.vendor, Reason)
        assert backend.capabilities.products is Products.BF16
        assert backend.capabilities.prefill_keys is KeyForm.PAGED
        assert backend.capabilities.max_logits


def test_on_such_a_card_flashinfer_serves_what_it_can(flashinfer_calls: type[Counting]) -> None:
    backend = Sm120Backend()
    call = planned(backend, BASE)
    backend.decode(call)

    assert backend.capabilities.products is Products.FP8
    assert flashinfer_calls.ran == 2  # for the lse, and for out
    assert right(BASE, call)


@pytest.mark.parametrize(
    "trial",
    [
        evolve(BASE, layouts=(FNUZ, OCP)),
        evolve(BASE, aligned=False, pages=(5, 3)),
        evolve(BASE, q_dtype=torch.float32),
    ],
    ids=["fnuz", "unaligned", "fp32"],
)
def test_what_is_not_its_kind_of_memory_goes_to_our_kernel(trial: Trial, flashinfer_calls: type[Counting]) -> None:
    backend = Sm120Backend()
    call = planned(backend, trial)
    backend.decode(call)

    assert flashinfer_calls.ran == 0
    assert right(trial, call)


def test_the_largest_logits_go_to_our_kernel(flashinfer_calls: type[Counting]) -> None:
    backend = Sm120Backend()
    call = evolve(
        planned(backend, BASE), options=AttentionOptions(torch.full((2, 8), math.nan, device=BASE.call()[0].q.device))
    )
    backend.decode(call)

    assert flashinfer_calls.ran == 0
    assert BASE.error(Answer(call.out, call.lse, call.max_logits)) <= 1


def test_an_order_is_not_changed_into_something_else(
    flashinfer_calls: type[Counting], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = Sm120Backend(kernel="flashinfer")
    with pytest.raises(ArgumentError):
        backend.decode(planned(backend, evolve(BASE, layouts=(FNUZ, OCP))))
    call = planned(backend, BASE)
    with pytest.raises(ArgumentError, match="max_logits"):
        backend.decode(evolve(call, options=AttentionOptions(torch.zeros(2, 8, device=call.q.device))))
    monkeypatch.setattr(probe, "find", lambda: installed_flashinfer(Counting, old=True))
    old = Sm120Backend(kernel="flashinfer")
    call = planned(old, BASE)  # whose second cache has pages of 2
    with pytest.raises(ArgumentError, match="pages of 64 with flashinfer"):
        old.decode(call)
    with pytest.raises(UnsupportedError, match="129"):
        backend.scratch(Phase.DECODE, evolve(FLASH.layer_of_kind("swa"), num_heads=129), 1, 128)
    assert flashinfer_calls.ran == 0
    monkeypatch.setattr(probe, "find", lambda: Reason("FLASHINFER", "OSError: no libcuda", "a driver"))
    with pytest.raises(UnsupportedError, match="OSError: no libcuda"):
        _ = Sm120Backend(kernel="flashinfer").vendor


def test_a_broken_flashinfer_is_a_reason_and_our_kernel_serves(
    flashinfer_calls: type[Counting], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = Reason("FLASHINFER", "ImportError: undefined symbol", "an importable flashinfer.mla")
    monkeypatch.setattr(probe, "find", lambda: broken)
    backend = Sm120Backend()
    call = planned(backend, BASE)
    backend.decode(call)

    assert backend.reasons(Phase.DECODE, BASE.layer, 2) == [broken]
    assert right(BASE, call)
    assert flashinfer_calls.ran == 0


@pytest.mark.usefixtures("flashinfer_calls")
@pytest.mark.parametrize("kind", ["swa", "c4a", "c128a"])
def test_scratch_keeps_within_its_bound(kind: str) -> None:
    for heads in (7, 64):
        layer = evolve(FLASH.layer_of_kind(kind), num_heads=heads)
        for options in ({}, {"in_range": True}, {"kernel": "own"}):
            backend = Sm120Backend(**options)
            for phase in Phase:
                bound = backend.scratch_bound(phase, layer, 200, 640)
                for tokens in (1, 63, 64, 65, 200):
                    for width in (1, 128, 129, 640):
                        assert simultaneous_bytes(list(backend.scratch(phase, layer, tokens, width))) <= bound


def wide(backend: Sm120Backend, trial: Trial) -> Any:
    """A trial's call for a layer with a window of 128, whose rows are wider."""
    narrow = evolve(trial.call()[0].layer, window=128)
    call = evolve(planned(Sm120Backend(kernel="own"), trial), layer=narrow)
    width = sum(trial.widths[: len(trial.layouts)])
    specs = backend.scratch(Phase.DECODE, narrow, trial.tokens, width)
    return evolve(call, scratch=WorkspaceManager(call.q.device).get_simultaneous(*specs))


ALONE = evolve(BASE, layouts=(OCP,), pages=(64,), widths=(192,))
WITH_ENTRIES = evolve(BASE, widths=(192, 40))


@pytest.mark.parametrize("tokens", [2, 66])
def test_flashinfer_serves_wide_windows_of_layers_without_another_cache(
    flashinfer_calls: type[Counting], tokens: int
) -> None:
    for kernel in ("auto", "flashinfer"):
        trial = evolve(ALONE, tokens=tokens, seed=tokens)
        backend = Sm120Backend(kernel=kernel)
        call = wide(backend, trial)
        backend.decode(call)

        assert right(trial, call)
    assert flashinfer_calls.ran == 4


@pytest.mark.parametrize(("trial", "columns"), [(WITH_ENTRIES, 192), (evolve(ALONE, widths=(200,)), 200)])
def test_wide_windows_that_flashinfer_does_not_serve_go_to_our_kernel(
    flashinfer_calls: type[Counting], monkeypatch: pytest.MonkeyPatch, trial: Trial, columns: int
) -> None:
    """With another cache, or of a width that an old release has no kernel for."""
    monkeypatch.setattr(probe, "find", lambda: installed_flashinfer(Counting, old=True))
    trial = evolve(trial, pages=(64,) * len(trial.layouts))
    backend = Sm120Backend()
    call = wide(backend, trial)
    backend.decode(call)

    assert right(trial, call)
    ordered = Sm120Backend(kernel="flashinfer")
    with pytest.raises(UnsupportedError, match=rf"WINDOW: expected .*, got {columns}"):
        ordered.decode(wide(ordered, trial))
    assert flashinfer_calls.ran == 0


@pytest.mark.usefixtures("flashinfer_calls")
def test_scratch_of_wide_windows_keeps_within_its_bound() -> None:
    for in_range, (kind, widest) in product((False, True), (("swa", 250), ("c4a", 640 + 122))):
        backend, layer = Sm120Backend(in_range=in_range), FLASH.layer_of_kind(kind)
        bound = backend.scratch_bound(Phase.DECODE, layer, 200, widest)
        for tokens, width in product((1, 64, 65, 200), (1, 128, 192, 193, widest)):
            assert simultaneous_bytes(list(backend.scratch(Phase.DECODE, layer, tokens, width))) <= bound


THROUGH = "decode-*,prefill-*,mixed-*,sink-*,lse-*,call-empty-*,verify-*,call-holes-*,F9"


@pytest.mark.matrix
@pytest.mark.skipif(not INTERPRETED, reason="tensors are on the CPU")
@pytest.mark.parametrize("in_range", [pytest.param(False, marks=pytest.mark.matrix), True])
def test_the_whole_of_forward_mqa_goes_through_flashinfers_contract(
    flashinfer_calls: type[Counting], *, in_range: bool
) -> None:
    """The recorder checks every argument and multiplies in fp32, so a twelfth of the budget for fp8 is enough."""
    backend: Any = Sm120Backend(in_range=in_range)
    # all but attention in torch, which takes no minutes
    backend.index_ops, backend.builder_ops = IndexOps(), None
    for name in ("quantize_and_insert_k_cache", "qnorm_rope_kv_insert"):
        setattr(backend, name, getattr(ReferenceBackend(), name))
    certificate = conform(Subject.of(backend), chosen(CASES, "decode-*,mixed-*" if in_range else THROUGH))

    assert [(o.case.name, o.message) for o in certificate.of("failed")] == []
    assert flashinfer_calls.ran > 10
    assert certificate.worst is not None
    assert certificate.worst.measure is not None
    assert certificate.worst.measure.fraction < 1 / 12
    assert certificate.as_json()["products"] == "fp8"


def lines(device: str, **changes: Any) -> Sequence[str]:
    return notes(DeviceFacts.named(device), Problem.of(FLASH, **changes))


def test_explain_says_which_kernel_and_why() -> None:
    line, *_ = lines("sm_120")
    assert "multiplies in fp8" in line
    line, *_ = lines("sm_120", heads=24, dtype="e4m3fnuz")
    assert line.startswith("our kernel")
    assert "LAYOUT" in line
    line, *_ = lines("sm_120", deterministic=True)
    assert "DETERMINISTIC" in line
    line, *_ = lines("sm_120", window_columns=192)
    assert "our kernel, in bf16: WINDOW 192, needs 128 columns next to a compressed cache" in line
    line, *_ = lines("sm_120", kind="swa", window_columns=192)
    assert "multiplies in fp8" in line
    line, scores = lines("sm_90")
    assert "not on sm_90" in line
    assert scores.startswith("index scores: e4m3 codes go into the matrix unit")
    assert "decoded to fp16" in lines("sm_80")[1]


def test_explain_knows_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    from dsv4attn.backends.sm120 import explain_notes

    device = evolve(SM120, present=True)
    monkeypatch.setattr(explain_notes, "version_of", lambda _: None)
    assert notes(device, Problem.of(FLASH))[0] == "our kernel: flashinfer-python is not installed"
    monkeypatch.setattr(explain_notes, "version_of", lambda _: "0.6.1")
    line, *_ = notes(device, Problem.of(FLASH))
    assert "flashinfer 0.6.1, needs 0.6.18 or newer" in line

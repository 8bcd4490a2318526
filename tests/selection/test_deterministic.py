"""A deterministic problem is served by a deterministic backend, or the trace has the reason."""

from __future__ import annotations

import pytest

from dsv4attn.config import Settings
from dsv4attn.core.contract.backend import Backend
from dsv4attn.core.contract.device import DeviceFacts
from dsv4attn.core.contract.phased import PhasedBackend
from dsv4attn.core.contract.problem import Problem
from dsv4attn.core.model.geometry import ModelGeometry
from dsv4attn.errors import BrokenBackendError, NoBackendError
from dsv4attn.plugins import BUILT_IN
from dsv4attn.selection import explain, registered, select_backend
from tests.vendor_wheel import VendorWheels, plugin

FLASH = ModelGeometry.preset("flash")
PLAIN = [Problem.of(FLASH, "c4a", phase) for phase in ("decode", "prefill")]
EXACT = [Problem.of(FLASH, "c4a", phase, deterministic=True) for phase in ("decode", "prefill")]
NONE = Settings()

ALWAYS = """

from dsv4attn.backends.reference.launch import ReferenceBackend


class Always(ReferenceBackend):
    def __init__(self):
        super().__init__(deterministic=True)


class Never(ReferenceBackend):
    def __init__(self, deterministic=False):
        super().__init__()
"""


def of_phases(backend: Backend) -> tuple[bool, bool]:
    """Whether decode, and prefill, run on a deterministic backend."""
    if isinstance(backend, PhasedBackend):
        return backend._decode.deterministic, backend._prefill.deterministic
    return (backend.deterministic,) * 2


@pytest.mark.parametrize("name", [None, "auto"])
def test_both_phases(wheels: VendorWheels, name: str | None) -> None:
    assert of_phases(select_backend(*EXACT, backend=name, settings=NONE)) == (True, True)
    assert of_phases(select_backend(*PLAIN, backend=name, settings=NONE)) == (False, False)


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_every_built_in_backend(wheels: VendorWheels, name: str) -> None:
    for request_ in (name, f"decode={name}", f"prefill={name}"):
        backend = select_backend(*EXACT, backend=request_, device="cpu", settings=NONE)
        assert of_phases(backend) == (True, True)


def test_one_phase_alone(wheels: VendorWheels) -> None:
    assert of_phases(select_backend(EXACT[0], settings=NONE))[0]
    assert of_phases(select_backend(EXACT[0], PLAIN[1], settings=NONE)) == (True, False)
    assert of_phases(select_backend(PLAIN[0], EXACT[1], settings=NONE)) == (False, True)
    # one problem of a phase decides for the phase
    assert of_phases(select_backend(PLAIN[0], EXACT[0], settings=NONE))[0]


def test_the_environment_and_the_file(wheels: VendorWheels, monkeypatch: pytest.MonkeyPatch) -> None:
    (wheels.folder / "dsv4attn.toml").write_text('[options.reference]\nprefill_keys = "paged"', encoding="utf-8")
    backend = select_backend(*EXACT)
    assert (of_phases(backend), backend.capabilities.prefill_keys.value) == ((True, True), "paged")
    monkeypatch.setenv("DSV4ATTN_BACKEND", "triton")
    backend = select_backend(*EXACT)
    assert (of_phases(backend), backend.name) == ((True, True), "triton")


@pytest.mark.parametrize("request_", [None, "reference"])
@pytest.mark.parametrize("value", ["false", "'false'"])
def test_an_option_that_contradicts_the_problem(wheels: VendorWheels, request_: str | None, value: str) -> None:
    path = wheels.folder / "dsv4attn.toml"
    path.write_text(f"[options.reference]\ndeterministic = {value}", encoding="utf-8")
    selection = explain(EXACT[0], backend=request_)
    assert selection.chosen is None
    reference = next(candidate for candidate in selection.trace if candidate.name == "reference")
    assert (reference.state, [reason.code for reason in reference.reasons]) == ("refused", ["DETERMINISTIC"])
    with pytest.raises(NoBackendError, match=r"contradict the problem\n(?s:.*)options\.reference in .*dsv4attn\.toml"):
        select_backend(*EXACT, backend=request_)
    assert of_phases(select_backend(*PLAIN, backend=request_)) == (False, False)
    # an option of another backend contradicts nothing
    assert of_phases(select_backend(*EXACT, backend="triton")) == (True, True)


def test_a_backend_without_the_option_is_refused(wheels: VendorWheels) -> None:
    wheels.install("dsv4attn-acme", plugin())
    with pytest.raises(NoBackendError, match=r"acme +DETERMINISTIC  bits that do not depend on the batch, needs a ba"):
        select_backend(*EXACT, backend="acme")
    # the automatic choice does not take it, although it is a vendor's backend
    hopper = DeviceFacts.named("sm_90")
    wheels.install("dsv4attn-bolt", plugin("bolt", options={"deterministic": False}))
    exact = explain(EXACT[0], device=hopper, settings=Settings(deny=("dsv4attn-bolt",)))
    assert exact.require().info.name == "sm90"


def test_a_backend_that_is_always_deterministic(wheels: VendorWheels) -> None:
    wheels.install("dsv4attn-acme", plugin(factory="dsv4attn_acme:Always", options={"deterministic": True}) + ALWAYS)
    assert of_phases(select_backend(*EXACT, backend="acme")) == (True, True)


def test_a_backend_that_says_yes_and_is_not_deterministic(wheels: VendorWheels) -> None:
    wheels.install("dsv4attn-acme", plugin(factory="dsv4attn_acme:Never", options={"deterministic": False}) + ALWAYS)
    with pytest.raises(BrokenBackendError, match="made Never, which is not deterministic, for a deterministic problem"):
        select_backend(*EXACT, backend="acme")
    select_backend(*PLAIN, backend="acme")


def test_the_trace_says_how_the_backend_is_built(wheels: VendorWheels) -> None:
    line = "built with deterministic=true, which the problem asks for"
    for problem in EXACT:
        chosen = next(candidate for candidate in explain(problem, settings=NONE).trace if candidate.state == "chosen")
        assert line in chosen.ways
        assert line in str(explain(problem, settings=NONE))
    assert line not in str(explain(PLAIN[0], settings=NONE))
    assert registered("reference").info.options["deterministic"] is False

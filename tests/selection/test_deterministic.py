"""A deterministic problem is served by a deterministic backend, or the trace has the reason."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dsv4attn.config import Settings
from dsv4attn.core.contract import device
from dsv4attn.core.contract.backend import Backend
from dsv4attn.core.contract.device import DeviceFacts
from dsv4attn.core.contract.phased import PhasedBackend
from dsv4attn.core.contract.problem import Problem
from dsv4attn.core.model.geometry import ModelGeometry
from dsv4attn.errors import BrokenBackendError, NoBackendError
from dsv4attn.plugins import BUILT_IN
from dsv4attn.selection import explain, registered, select_backend
from tests.vendor_wheel import Shelf, plugin

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


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shelf]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(device, "may_have_accelerator", lambda: False)
    with Shelf(tmp_path) as made:
        yield made


def of_phases(backend: Backend) -> tuple[bool, bool]:
    """Whether decode, and prefill, run on a deterministic backend."""
    if isinstance(backend, PhasedBackend):
        return backend._decode.deterministic, backend._prefill.deterministic
    return (backend.deterministic,) * 2


@pytest.mark.parametrize("name", [None, "auto"])
def test_both_phases(shelf: Shelf, name: str | None) -> None:
    assert of_phases(select_backend(*EXACT, backend=name, settings=NONE)) == (True, True)
    assert of_phases(select_backend(*PLAIN, backend=name, settings=NONE)) == (False, False)


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_every_built_in_backend(shelf: Shelf, name: str) -> None:
    for request_ in (name, f"decode={name}", f"prefill={name}"):
        made = select_backend(*EXACT, backend=request_, device="cpu", settings=NONE)
        assert of_phases(made) == (True, True)


def test_one_phase_alone(shelf: Shelf) -> None:
    assert of_phases(select_backend(EXACT[0], settings=NONE))[0]
    assert of_phases(select_backend(EXACT[0], PLAIN[1], settings=NONE)) == (True, False)
    assert of_phases(select_backend(PLAIN[0], EXACT[1], settings=NONE)) == (False, True)
    # one problem of a phase decides for the phase
    assert of_phases(select_backend(PLAIN[0], EXACT[0], settings=NONE))[0]


def test_the_environment_and_the_file(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    (shelf.folder / "dsv4attn.toml").write_text('[options.reference]\nprefill_keys = "paged"', encoding="utf-8")
    made = select_backend(*EXACT)
    assert (of_phases(made), made.capabilities.prefill_keys.value) == ((True, True), "paged")
    monkeypatch.setenv("DSV4ATTN_BACKEND", "triton")
    made = select_backend(*EXACT)
    assert (of_phases(made), made.name) == ((True, True), "triton")


@pytest.mark.parametrize("request_", [None, "reference"])
@pytest.mark.parametrize("value", ["false", "'false'"])
def test_an_option_that_contradicts_the_problem(shelf: Shelf, request_: str | None, value: str) -> None:
    path = shelf.folder / "dsv4attn.toml"
    path.write_text(f"[options.reference]\ndeterministic = {value}", encoding="utf-8")
    selection = explain(EXACT[0], backend=request_)
    assert selection.chosen is None
    said = next(c for c in selection.trace if c.name == "reference")
    assert (said.state, [reason.code for reason in said.reasons]) == ("refused", ["DETERMINISTIC"])
    with pytest.raises(NoBackendError, match=r"contradict the problem\n(?s:.*)options\.reference in .*dsv4attn\.toml"):
        select_backend(*EXACT, backend=request_)
    assert of_phases(select_backend(*PLAIN, backend=request_)) == (False, False)
    # an option of another backend contradicts nothing
    assert of_phases(select_backend(*EXACT, backend="triton")) == (True, True)


def test_a_backend_without_the_option_is_refused(shelf: Shelf) -> None:
    shelf.install("dsv4attn-acme", plugin())
    with pytest.raises(NoBackendError, match=r"acme +DETERMINISTIC  bits that do not depend on the batch, needs a ba"):
        select_backend(*EXACT, backend="acme")
    # the automatic choice passes it by, though it is the vendor's
    hopper = DeviceFacts.named("sm_90")
    shelf.install("dsv4attn-bolt", plugin("bolt", options={"deterministic": False}))
    exact = explain(EXACT[0], device=hopper, settings=Settings(deny=("dsv4attn-bolt",)))
    assert exact.require().info.name == "sm90"


def test_a_backend_that_is_always_deterministic(shelf: Shelf) -> None:
    shelf.install("dsv4attn-acme", plugin(factory="dsv4attn_acme:Always", options={"deterministic": True}) + ALWAYS)
    assert of_phases(select_backend(*EXACT, backend="acme")) == (True, True)


def test_a_backend_that_says_yes_and_is_not_deterministic(shelf: Shelf) -> None:
    shelf.install("dsv4attn-acme", plugin(factory="dsv4attn_acme:Never", options={"deterministic": False}) + ALWAYS)
    with pytest.raises(BrokenBackendError, match="made Never, which is not deterministic, for a deterministic problem"):
        select_backend(*EXACT, backend="acme")
    select_backend(*PLAIN, backend="acme")


def test_the_trace_says_how_the_backend_is_built(shelf: Shelf) -> None:
    line = "built with deterministic=true, which the problem asks for"
    for problem in EXACT:
        chosen = next(c for c in explain(problem, settings=NONE).trace if c.state == "chosen")
        assert line in chosen.ways
        assert line in str(explain(problem, settings=NONE))
    assert line not in str(explain(PLAIN[0], settings=NONE))
    assert registered("reference").info.options["deterministic"] is False

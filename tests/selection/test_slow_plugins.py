"""Plugins that take long to load: they are loaded only if needed, and the log names them (promise G8)."""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest

from dsv4attn import plugins, selection
from dsv4attn.core.contract.device import DeviceFacts
from dsv4attn.core.contract.problem import Problem
from dsv4attn.core.model.geometry import ModelGeometry
from dsv4attn.errors import NoBackendError
from dsv4attn.selection import backend_names, explain, load_backend, registered, resolve, select_backend
from dsv4attn.testing.conform import Subject
from dsv4attn.tools.cli import installation
from tests.tools.cli.machine import Machine, imported
from tests.vendor_wheel import VendorWheels, plugin

FLASH = ModelGeometry.preset("flash")
DECODE, PREFILL = (Problem.of(FLASH, "c4a", phase) for phase in ("decode", "prefill"))
TRAP = "import pathlib\npathlib.Path(__file__).with_name('loaded').touch()\n"
"""A module that leaves a file when it is imported."""


def loaded(wheels: VendorWheels) -> bool:
    """Whether the trap was imported since the last call."""
    mark = wheels.folder / "loaded"
    is_there = mark.exists()
    mark.unlink(missing_ok=True)
    return is_there


# built-in backends need no plugin


def test_a_built_in_backend_asked_for_by_name_loads_no_plugin(
    wheels: VendorWheels, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheels.install("dsv4attn-acme", TRAP + plugin())

    load_backend()
    load_backend("reference", prefill_keys="paged")
    registered("triton")
    resolve(DECODE, backend="reference")
    select_backend(DECODE, PREFILL, backend="reference")
    Subject.named("reference").refusals([DECODE])
    monkeypatch.setenv("DSV4ATTN_BACKEND", "reference")
    assert select_backend(DECODE, PREFILL).name == "reference"
    assert not loaded(wheels)


RUN = "run --max-requests 1 --max-tokens 4"


@pytest.mark.matrix
@pytest.mark.parametrize("command", ["conform reference --filter lse-decode", RUN])
def test_commands_that_name_a_built_in_backend_load_no_plugin(wheels: VendorWheels, command: str) -> None:
    wheels.install("dsv4attn-acme", TRAP + plugin())
    code, _ = Machine(wheels).run(*command.split(), *(["--backend", "reference"] if "run" in command else []))

    assert code == 0
    assert not loaded(wheels)


def test_plugins_are_loaded_where_they_are_needed(wheels: VendorWheels, monkeypatch: pytest.MonkeyPatch) -> None:
    wheels.install("dsv4attn-acme", TRAP + plugin())
    calls: dict[str, Callable[[], object]] = {
        "names": backend_names,
        "another name": lambda: registered("acme"),
        "an automatic choice": lambda: resolve(DECODE),
        "an explanation": lambda: explain(DECODE, backend="reference"),
        "one phase is automatic": lambda: select_backend(DECODE, PREFILL, backend="decode=reference"),
    }
    for name, call in calls.items():
        wheels.refresh()
        sys.modules.pop("dsv4attn_acme", None)
        call()
        assert loaded(wheels), name


def test_an_error_about_a_built_in_backend_shows_every_candidate(wheels: VendorWheels) -> None:
    wheels.install("dsv4attn-acme", plugin())

    with pytest.raises(NoBackendError, match=r"(?s)'triton' cannot run this call.*acme +not asked for; supports this"):
        resolve(DECODE, backend="triton", device=DeviceFacts.named("npu"))


def test_both_phases_chosen_from_different_registries_are_one_backend(wheels: VendorWheels) -> None:
    assert select_backend(DECODE, PREFILL, backend="decode=reference").name == "reference"
    assert type(select_backend(DECODE, PREFILL, backend="decode=reference")) is type(load_backend("reference"))


def test_a_plugin_that_claims_a_built_in_name_is_reported_where_plugins_are_looked_at(
    wheels: VendorWheels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installation, "tried", imported)
    wheels.install("dsv4attn-acme", plugin("reference"))
    claim = "'reference' is the name of a built-in backend"

    assert registered("reference").distribution == "dsv4attn"
    assert claim in str(resolve(DECODE))
    for command in ("backends", "doctor"):
        assert claim in " ".join(" ".join(Machine(wheels).run(command)[1]).split()), command


# slow ones are named and timed


def test_a_slow_plugin_is_named_while_it_loads_and_timed(
    wheels: VendorWheels, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(plugins, "SLOW_S", 0.2)
    wheels.install("dsv4attn-acme", "import time\ntime.sleep(0.5)\n" + plugin())
    wheels.install("dsv4attn-bolt", plugin("bolt"))
    selection.backend_names()
    first, second = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]

    assert first == "dsv4attn: loading plugin acme (dsv4attn-acme 0.2) ..."
    assert re.fullmatch(
        r"dsv4attn: loading plugin acme \(dsv4attn-acme 0.2\) \.\.\. 0\.[5-9] s"
        r" -> if you do not use it, leave it out: DSV4ATTN_PLUGINS_DENY=acme",
        second,
    )


def test_a_slow_plugin_that_fails_is_timed_too(
    wheels: VendorWheels, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(plugins, "SLOW_S", 0.1)
    wheels.install("dsv4attn-acme", "import time\ntime.sleep(0.3)\nraise ImportError('libacme.so')\n")
    selection.backend_names()

    assert [record.getMessage().partition(" ... ")[0] for record in caplog.records][-1].endswith("(dsv4attn-acme 0.2)")


def test_ctrl_c_says_which_plugin_was_being_loaded(wheels: VendorWheels) -> None:
    wheels.install("dsv4attn-acme", "raise KeyboardInterrupt\n")

    with pytest.raises(KeyboardInterrupt, match=r"^while loading plugin acme \(dsv4attn-acme 0.2\)$"):
        backend_names()
    _, answer = Machine(wheels).json("backends")
    assert answer == {"ok": False, "interrupted": True, "during": "while loading plugin acme (dsv4attn-acme 0.2)"}


def test_a_signal_during_a_slow_import_ends_the_command_with_the_name_of_the_plugin(wheels: VendorWheels) -> None:
    wheels.install("dsv4attn-acme", "import time\ntime.sleep(60)\n")
    code = (
        "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from dsv4attn.tools.cli import main\nmain(['backends'])"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(wheels.folder), *filter(None, sys.path)])}
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as running:
        assert running.stderr is not None
        line = running.stderr.readline()
        running.send_signal(signal.SIGINT)
        out, err = running.communicate(timeout=60)

    assert line == "dsv4attn: loading plugin acme (dsv4attn-acme 0.2) ...\n"
    assert running.returncode == 130
    assert "interrupted while loading plugin acme (dsv4attn-acme 0.2)\n" in err
    assert "Traceback" not in err
    assert out == ""

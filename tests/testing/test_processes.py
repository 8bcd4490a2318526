"""Cases that end their process, or do not end: each is a failed case, and the others run on."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import pytest

from dsv4attn.testing import processes
from dsv4attn.testing.case import Bench, Case, Measure, Wrong
from dsv4attn.testing.conform import Certificate, Failures, Outcome, Subject, certificates_of
from dsv4attn.testing.processes import TIME_OUT, UNUSABLE, outcomes_in_processes
from tests.forked_programs import run_forked
from tests.testing.own_cases import case_of, raising

REFERENCE = Subject.named("reference")


def does(action: Callable[[], object]) -> Callable[[Bench, Any], Measure]:
    """A check that does something first, and passes if it is still there."""

    def check(bench: Bench, inputs: object) -> Measure:
        action()
        return Measure()

    return check


PLANTS: dict[str, Callable[[], object]] = {
    "first": lambda: None,
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "abort": os.abort,
    "after": lambda: None,
    "exit": lambda: os._exit(3),
    "hang": lambda: time.sleep(600),
    "last": lambda: None,
}
MESSAGES = {
    "kill": "its process ended with SIGKILL, which the system sends if memory runs out",
    "abort": "its process ended with SIGABRT (in check, test_processes.py:",
    "exit": "its process ended with exit code 3",
    "hang": "did not end within 1 s (in <lambda>, test_processes.py:",
}


@pytest.fixture(autouse=True)
def _no_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cases of our own have no name by which another process could find them: processes are copies of this one."""
    monkeypatch.setattr(processes, "may_have_accelerator", lambda: False)


def certificate_of(cases: list[Case], jobs: int = 1, seconds: float = 60) -> Certificate:
    outcomes = outcomes_in_processes([REFERENCE], cases, jobs, seconds=seconds)
    return certificates_of([REFERENCE], cases, outcomes)[0]


@pytest.mark.matrix
@pytest.mark.parametrize("jobs", [1, 2])
def test_a_case_that_ends_its_process_or_does_not_end_has_failed_and_the_others_run(jobs: int) -> None:
    cases = [case_of(does(action), name=name) for name, action in PLANTS.items()]
    certificate = certificate_of(cases, jobs, seconds=1)
    outcomes = {outcome.case.name: outcome for outcome in certificate.outcomes}

    assert [*outcomes] == [*PLANTS]
    assert {name for name, outcome in outcomes.items() if outcome.state == "failed"} == {*MESSAGES}
    assert all(outcomes[name].message.startswith(said) for name, said in MESSAGES.items())
    ended = {"kill": "SIGKILL", "abort": "SIGABRT", "exit": "exit code 3", "hang": TIME_OUT}
    assert {name: outcome.ended for name, outcome in outcomes.items() if outcome.ended} == ended
    assert 1 <= outcomes["hang"].seconds < 30
    assert "/" not in outcomes["abort"].message, "a certificate is sent to others"
    assert "Fatal Python error: Aborted" in outcomes["abort"].trace

    values = json.loads(json.dumps(certificate.as_json()))
    assert (values["ok"], values["complete"], values["counts"]["failed"]) == (False, True, 4)
    assert values["verdict"].endswith("4 of 7 cases failed, 4 of them with the end of their process")
    assert {case["name"]: case["ended"] for case in values["cases"] if case["ended"]} == ended
    assert len(Failures.grouped(certificate.outcomes)) == 4


def test_one_process_runs_all_cases_until_one_ends_it(tmp_path: Path) -> None:
    def noted(action: Callable[[], object]) -> Callable[[Bench, Any], Measure]:
        def note() -> None:
            with (tmp_path / "pids").open("a", encoding="utf-8") as file:
                file.write(f"{os.getpid()}\n")
            action()

        return does(note)

    cases = [case_of(noted(PLANTS[name]), name=f"{i}") for i, name in enumerate(["first", "kill", "after", "last"])]
    certificate_of(cases)
    first, killed, after, last = (tmp_path / "pids").read_text(encoding="utf-8").split()

    assert first == killed != after == last
    assert str(os.getpid()) not in (first, after)


def test_the_process_is_replaced_if_a_failed_case_leaves_an_unusable_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_is_usable", lambda _: False)
    cases = [case_of(raising(error), name=f"{i}") for i, error in enumerate([Wrong("so"), Wrong("so")])]
    certificate = certificate_of([*cases, case_of(does(lambda: None), name="last")])

    assert [(o.state, o.ended, o.message) for o in certificate.outcomes] == [
        ("failed", UNUSABLE, "so"),
        ("failed", UNUSABLE, "so"),
        ("passed", "", ""),
    ]


def test_processes_that_cannot_begin_are_not_started_for_every_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes._Copy, "made", lambda _: os._exit(4))
    started = create_autospec(processes._Run._started, side_effect=processes._Run._started)
    monkeypatch.setattr(processes._Run, "_started", started)
    certificate = certificate_of([case_of(does(lambda: None), name=f"{i}") for i in range(5)])

    assert {(o.state, o.message) for o in certificate.outcomes} == {
        ("failed", "its process ended with exit code 4 before the case began")
    }
    assert (len(certificate.outcomes), started.call_count) == (5, 2)


def test_a_kill_says_whether_the_system_ran_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = iter([7, 8])
    monkeypatch.setattr(processes, "_kills_for_memory", lambda: next(counts))
    certificate = certificate_of([case_of(does(PLANTS["kill"]))])

    assert certificate.outcomes[0].message == "its process ended with SIGKILL: memory ran out"


def test_an_iterator_that_is_closed_ends_its_processes() -> None:
    outcomes = outcomes_in_processes([REFERENCE], [case_of(does(PLANTS[name])) for name in ("first", "hang")], 2)
    seen: Outcome = next(outcomes)
    began = time.monotonic()
    outcomes.close()

    assert seen.state == "passed"
    assert time.monotonic() - began < 30


def test_a_case_is_repeated_until_a_run_fails_and_keeps_its_largest_error() -> None:
    errors = iter([0.5, 0.25, 0.75, 0.5, 0.25, 3.0])
    case = case_of(lambda *_: Measure(next(errors), 1.0).hold("row 7 is off"))
    passed, failed = (next(outcomes_in_processes([REFERENCE], [case], repeat=n)) for n in (3, 10))

    assert (passed.state, passed.measure) == ("passed", Measure(0.75, 1.0))
    assert (failed.state, failed.measure) == ("failed", Measure(3.0, 1.0))
    assert failed.message == "run 6 of 10, after runs that passed: row 7 is off"


OPENMP = """
import sys; sys.path.insert(0, {root!r})
import torch
from dsv4attn.testing import processes
from dsv4attn.testing.case import Measure
from dsv4attn.testing.conform import Subject
from tests.testing.own_cases import case_of

def computes(*_):
    torch.zeros(1_000_000).add(1)
    return Measure()

processes.may_have_accelerator = lambda: False
torch.set_num_threads(2)
computes()
outcomes = processes.outcomes_in_processes([Subject.named("reference")], [case_of(computes)], seconds=5)
print([outcome.message for outcome in outcomes])
"""


def test_a_copy_of_a_process_with_threads_of_openmp_computes() -> None:
    done = run_forked(["-c", OPENMP.format(root=str(Path(__file__).resolve().parents[2]))])

    assert done.stdout.strip() == "['']", done.stderr

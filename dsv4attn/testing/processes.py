"""Runs cases of the kit in several processes. Outcomes come in the order of the cases, as in one process."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from typing import Any

import attrs
import torch

from dsv4attn.testing.case import Case
from dsv4attn.testing.cases import CASES
from dsv4attn.testing.conform import Outcome, Subject, run_case
from dsv4attn.testing.interpreter_warnings import ignore_interpreter_warnings

__all__ = ["outcomes_in_processes"]


class _Worker:
    """What a process keeps from case to case."""

    subjects: Sequence[Subject]
    cases: Mapping[str, Case]


def _start(trials: Sequence[tuple[str, str, Mapping[str, Any]]], jobs: int) -> None:
    """Make the backends in a new process. The first process alone answers Ctrl-C.

    trials: name, device and options of each.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ignore_interpreter_warnings()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // jobs))
    _Worker.subjects = [Subject.named(name, device=device, options=options) for name, device, options in trials]
    _Worker.cases = {case.name: case for case in CASES}


def _run(subject: int, name: str) -> dict[str, Any]:
    """Outcome of a case without the case itself, whose functions no other process can receive."""
    outcome = run_case(_Worker.subjects[subject], _Worker.cases[name])
    return {field.name: getattr(outcome, field.name) for field in attrs.fields(Outcome) if field.name != "case"}


def outcomes_in_processes(
    trials: Sequence[Subject], cases: Sequence[Case], jobs: int
) -> Generator[Outcome, None, None]:
    """Outcomes of each case on every backend. Each process makes the backends by their names and options.

    If the iterator is closed early, cases that have not begun do not run.
    trials: backends with registered names.
    cases: cases of `CASES`.
    jobs: number of processes.
    """
    pool = ProcessPoolExecutor(
        jobs,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start,
        initargs=([(subject.name, subject.device, dict(subject.options)) for subject in trials], jobs),
    )
    try:
        waiting = [(case, pool.submit(_run, i, case.name)) for case, i in product(cases, range(len(trials)))]
        for case, future in waiting:
            yield Outcome(case, **future.result())
    finally:
        pool.shutdown(wait=True, cancel_futures=True)

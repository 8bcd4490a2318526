"""Runs cases of the kit in several processes. Outcomes come in the order of the cases, as in one process."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import attrs
import torch

from dsv4attn.testing.case import Case
from dsv4attn.testing.cases import CASES
from dsv4attn.testing.conform import Certificate, Outcome, Subject, certificates_of, run_case
from dsv4attn.testing.interpreter_warnings import ignore_interpreter_warnings

__all__ = ["conform_in_processes"]


class _Worker:
    """What a process keeps from case to case."""

    subject: Subject
    cases: Mapping[str, Case]


def _start(name: str, device: str, options: Mapping[str, Any], jobs: int) -> None:
    """Make the backend in a new process. The first process alone answers Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ignore_interpreter_warnings()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // jobs))
    _Worker.subject = Subject.named(name, device=device, options=options)
    _Worker.cases = {case.name: case for case in CASES}


def _run(name: str) -> dict[str, Any]:
    """Outcome of a case without the case itself, whose functions no other process can receive."""
    outcome = run_case(_Worker.subject, _Worker.cases[name])
    return {field.name: getattr(outcome, field.name) for field in attrs.fields(Outcome) if field.name != "case"}


def _outcomes(subject: Subject, cases: Sequence[Case], jobs: int) -> Generator[Outcome, None, None]:
    """Outcomes of cases of `CASES`, which `jobs` processes run. Each process makes the backend by its name and options.

    If the iterator is closed early, cases that have not begun do not run.
    """
    pool = ProcessPoolExecutor(
        jobs,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start,
        initargs=(subject.name, subject.device, dict(subject.options), jobs),
    )
    try:
        waiting = [pool.submit(_run, case.name) for case in cases]
        for case, future in zip(cases, waiting, strict=True):
            yield Outcome(case, **future.result())
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def conform_in_processes(
    subject: Subject,
    cases: Sequence[Case],
    jobs: int,
    *,
    chosen: str | None = None,
    progress: Callable[[Outcome], None] = lambda _: None,
    fail_fast: bool = False,
) -> Certificate:
    """As `conform.conform`, in some processes.

    subject: a backend with a registered name.
    cases: cases of `CASES`.
    jobs: number of processes.
    """
    outcomes = _outcomes(subject, cases, jobs)
    return certificates_of([subject], cases, outcomes, chosen, progress, fail_fast=fail_fast)[0]

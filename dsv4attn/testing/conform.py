"""Runs the conformance kit without pytest and returns a certificate.

A case is passed, failed, refused (the backend's support said no, with reasons), or skipped (this machine, or the form
that the backend takes, leaves nothing to judge). An exception of the backend is a failed case, and the run goes on. A
run that executes no case fails. An interrupted run keeps the outcomes up to then and never passes.
"""

from __future__ import annotations

import datetime as dt
import importlib.metadata
import math
import os
import platform
import re
import time
import traceback
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from functools import cache
from itertools import cycle, product
from pathlib import Path
from typing import Any

import attrs
import torch

import dsv4attn
from dsv4attn.core.contract.backend import API_VERSION, Backend
from dsv4attn.core.contract.device import DeviceFacts, version_of
from dsv4attn.core.contract.op_names import CANDIDATES, DELAYED, LATENTS, LAYER_OPS
from dsv4attn.core.contract.problem import Problem
from dsv4attn.errors import ArgumentError, Dsv4AttnError, UnknownNameError
from dsv4attn.selection import explain, load_backend, registered, registry_of
from dsv4attn.selection.reference_ops import reference_ops_of
from dsv4attn.testing.case import Bench, Case, Measure, SkipCase, Wrong
from dsv4attn.testing.cases.table import CASES, GROUPS
from dsv4attn.testing.kit.tolerances import multiplying_in

__all__ = [
    "SCHEMA", "STATES", "BrokenSupportError", "Certificate", "Failures", "Outcome", "Subject", "certificates_of",
    "conform", "environment", "outcomes_of", "parse_request", "run_case", "versions",
]  # fmt: skip


class BrokenSupportError(Dsv4AttnError):
    """The backend's support raised, or gave an answer of the wrong type."""


def _anything(problems: Sequence[Problem]) -> list[str]:
    return []


@attrs.frozen(eq=False)
class Subject:
    """A backend under test.

    name: name of the backend.
    backend: the backend object.
    device: torch device.
    facts: facts of that device.
    distribution: package of the backend, or "".
    version: version of that package, or "".
    options: options of the backend.
    refusals: takes problems and returns the backend's reasons against them, as text; an empty list means yes.
    """

    name: str
    backend: Backend
    device: str = "cpu"
    facts: DeviceFacts = attrs.field(factory=lambda: DeviceFacts.here("cpu"))
    distribution: str = ""
    version: str = ""
    options: Mapping[str, Any] = attrs.field(factory=dict)
    refusals: Callable[[Sequence[Problem]], list[str]] = attrs.field(default=_anything, repr=False)

    @property
    def label(self) -> str:
        """Name and options, as in a request."""
        return ":".join([self.name, *(f"{key}={value}" for key, value in self.options.items())])

    @classmethod
    def named(cls, name: str, *, device: str | None = None, options: Mapping[str, Any] | None = None) -> Subject:
        """A backend by its name. Raises what `load_backend` raises.

        name: name of a built-in backend or of a plugin's.
        options: options of the backend.
        device: a torch device; by default the first accelerator, if the backend runs there, or the CPU.
        """
        options = dict(options or {})
        registration, backend = registered(name), load_backend(name, **options)
        this_device = DeviceFacts.here()
        place = _place(this_device, registration.info.runs_on + registration.info.native) if device is None else device
        facts = _facts(place)
        version = (
            registration.version
            or version_of(registration.distribution)
            or (dsv4attn.__version__ if registration.distribution == "dsv4attn" else "")
        )
        return cls(name, backend, place, facts, registration.distribution, version, options, _refusals(name, facts))

    @classmethod
    def of(cls, backend: Backend | str, *, device: str | None = None) -> Subject:
        """A backend object, or `NAME[,option=value]`. A backend object without a registered name refuses nothing.

        backend: the backend, or its name with options.
        device: as in `named`.
        """
        if isinstance(backend, str):
            name, options = parse_request(backend)
            return cls.named(name, device=device, options=options)
        facts = _facts(device or "cpu")
        subject = cls(backend.name, backend, device or "cpu", facts)
        try:
            found = registered(backend.name)
        except UnknownNameError:
            return subject
        refusals = _refusals(backend.name, facts)
        return attrs.evolve(subject, distribution=found.distribution, version=found.version, refusals=refusals)


def parse_request(text: str, separator: str = ",") -> tuple[str, dict[str, str]]:
    """`NAME[,option=value]` in parts.

    text: the request, as in `--backend`.
    separator: what stands between name and options.
    """
    name, *rest = (part.strip() for part in text.split(separator))
    for part in rest:
        if "=" not in part:
            raise ArgumentError("backend", expected=f"NAME[{separator}option=value]", actual=repr(text))
    return name, {key.strip(): value.strip() for key, _, value in (part.partition("=") for part in rest)}


def _facts(device: str) -> DeviceFacts:
    facts = DeviceFacts.here(device)
    try:
        torch.empty(0, device=device, dtype=torch.float32)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        said = str(error).splitlines()[0]
        raise ArgumentError("device", expected="a device of this machine", actual=f"{device!r} ({said})") from error
    return facts


def _place(device: DeviceFacts, runs_on: tuple[str, ...]) -> str:
    """Torch device of the first accelerator if the backend runs there, otherwise "cpu"."""
    if device.kind == "cpu" or not device.matches(runs_on):
        return "cpu"
    return {"hip": "cuda"}.get(device.kind, device.kind)


def _refusals(name: str, facts: DeviceFacts) -> Callable[[Sequence[Problem]], list[str]]:
    @cache
    def answer(problems: tuple[Problem, ...]) -> tuple[str, ...]:
        reasons: dict[str, None] = {}
        for phase in dict.fromkeys(problem.phase for problem in problems):
            of_phase = [problem for problem in problems if problem.phase == phase]
            selection = explain(of_phase, backend=name, device=facts, registry=registry_of(name))
            (candidate,) = (c for c in selection.trace if c.name == name)
            if candidate.state == "broken":
                raise BrokenSupportError(candidate.note) from candidate.cause
            reasons.update(dict.fromkeys(f"{reason.code}: {reason.text}" for reason in candidate.reasons))
        return tuple(reasons)

    return lambda problems: list(answer(tuple(problems)))


SCHEMA = 1
"""Version of the certificate's JSON. It changes when a field changes its meaning or is removed."""

STATES = ("passed", "failed", "refused", "skipped")
RELATED = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK", "OMP_NUM_THREADS")
PREFIXES = ("DSV4ATTN_", "TRITON_")
SECRET = ("DSV4ATTN_CONFIG", "DIR", "PATH", "HOME")
"""Variables that hold paths of the machine: a certificate is sent to others."""


@attrs.frozen
class Outcome:
    """Outcome of one case.

    case: the case.
    state: one of STATES.
    measure: its error and budget, or None if nothing was measured.
    message: one line: the failure, or why the case was not run.
    reasons: reasons of a refusal.
    trace: traceback of an exception.
    seconds: duration.
    without_lse: whether the lse was not judged, because the backend returns none.
    ended: how the case ended its process: the name of a signal, "exit code N", "time-out" or "unusable device"; "" if
        the process ran on.
    """

    case: Case
    state: str
    measure: Measure | None = None
    message: str = ""
    reasons: tuple[str, ...] = ()
    trace: str = ""
    seconds: float = 0.0
    without_lse: bool = False
    ended: str = ""

    def as_json(self) -> dict[str, Any]:
        """Everything, for programs. Numbers that are not finite are null here; the message has them."""
        measure = self.measure or Measure(math.nan, math.nan)
        return {
            **self.case.as_json(),
            "state": self.state,
            "error": _finite(measure.error),
            "budget": _finite(measure.budget),
            "fraction": _finite(measure.fraction) if self.measure else None,
            "message": self.message,
            "ended": self.ended,
            "reasons": list(self.reasons),
            "without_lse": self.without_lse,
            "seconds": round(self.seconds, 3),
        }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


NUMBER = re.compile(r"[-+]?(\d[\d.,]*(e[-+]?\d+)?|\b(inf|nan|NaN)\b)")


@attrs.frozen
class Failures:
    """Cases that failed with the same message but for its numbers.

    outcomes: in the order in which they ran.
    """

    outcomes: tuple[Outcome, ...]

    @property
    def first(self) -> Outcome:
        """The case that failed first, whose message stands for all."""
        return self.outcomes[0]

    @classmethod
    def grouped(cls, outcomes: Iterable[Outcome]) -> list[Failures]:
        """Groups in the order of their first cases.

        outcomes: outcomes of a run; those that passed are skipped.
        """
        groups: dict[str, list[Outcome]] = {}
        for outcome in outcomes:
            if outcome.state == "failed":
                groups.setdefault(NUMBER.sub("N", outcome.message), []).append(outcome)
        return [cls(tuple(group)) for group in groups.values()]

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        names = [outcome.case.name for outcome in self.outcomes]
        return {"message": self.first.message, "count": len(names), "first": names[0], "cases": names}


@attrs.frozen
class Certificate:
    """Result of a run of the kit.

    subject: the backend under test.
    outcomes: one for each case that ran, in order.
    date: start of the run, UTC.
    seconds: duration of all cases together.
    chosen: the filter, or None for all cases.
    asked: number of cases of the run.
    interrupted: whether Ctrl-C ended the run.
    repeat: number of runs of each case that passed.
    """

    subject: Subject
    outcomes: tuple[Outcome, ...]
    date: str
    seconds: float
    chosen: str | None = None
    asked: int = attrs.Factory(lambda self: len(self.outcomes), takes_self=True)
    interrupted: bool = False
    repeat: int = 1

    def of(self, state: str) -> list[Outcome]:
        """Outcomes of one state.

        state: one of `STATES`.
        """
        return [outcome for outcome in self.outcomes if outcome.state == state]

    @property
    def executed(self) -> int:
        """Number of cases that passed or failed."""
        return len(self.of("passed")) + len(self.of("failed"))

    @property
    def complete(self) -> bool:
        """Whether all cases of the run were run on the backend alone.

        They were not if Ctrl-C or a first failed case ended the run, or if the reference computed some of the ops.
        """
        return not self.interrupted and len(self.outcomes) == self.asked and not self.reference_ops

    @property
    def reference_ops(self) -> tuple[str, ...]:
        """The ops that the reference computed instead of the backend, by DSV4ATTN_REFERENCE_OPS."""
        return reference_ops_of(self.subject.backend)

    @property
    def _label(self) -> str:
        replaced = f", with {' and '.join(self.reference_ops)} of the reference," if self.reference_ops else ""
        return f"{self.subject.label}{replaced}"

    @property
    def ok(self) -> bool:
        """Whether a case passed, none failed, and the run was not interrupted."""
        return self.executed > 0 and not self.of("failed") and not self.interrupted

    @property
    def verdict(self) -> str:
        """One sentence."""
        failed = len(self.of("failed"))
        if self.interrupted:
            failures = f"{failed} failed" if failed else "none of them failed"
            ran = f"{len(self.outcomes)} of {self.asked} cases ran"
            return f"{self._label}: interrupted, which proves nothing: {ran}, {failures}"
        if not self.executed:
            return f"{self._label} proves nothing: none of {len(self.outcomes)} cases was executed"
        if failed:
            is_whole = len(self.outcomes) == self.asked
            rest = "" if is_whole else f"; the run ended there, after {len(self.outcomes)} of {self.asked} cases"
            ended = sum(bool(outcome.ended) for outcome in self.outcomes)
            processes = f", {ended} of them with the end of their process" if ended else ""
            return f"{self._label} breaks the contract: {failed} of {self.executed} cases failed{processes}{rest}"
        part = f"all {self.executed} cases" if self.executed > 1 else "the only case"
        part += f" of the filter {self.chosen!r}" if self.chosen else ""
        if self.reference_ops:
            return f"{self._label} proves nothing of its own: {part} passed"
        return f"{self.subject.label} keeps the contract: {part} passed"

    @property
    def worst(self) -> Outcome | None:
        """The case nearest to its budget, or farthest beyond."""
        measured = [outcome for outcome in self.outcomes if outcome.measure]
        return max(measured, key=lambda o: o.measure.fraction if o.measure else 0, default=None)

    @property
    def layer_parts(self) -> dict[str, str]:
        """For each part of the layer around attention, whose ops ran: the backend's own, or the reference's."""
        return self._sources("sources", LAYER_OPS)

    @property
    def v41_ops(self) -> dict[str, str]:
        """For each op of DeepSeek-V4.1's layers alone, whose ran: the backend's own, or the reference's."""
        return self._sources("v41_sources", (*LATENTS, *CANDIDATES, *DELAYED))

    def _sources(self, method: str, names: Iterable[str]) -> dict[str, str]:
        backend = self.subject.backend
        try:
            sources: dict[str, str] = getattr(backend.layer_ops, method)(backend.name)
            return sources
        except Exception as error:  # noqa: BLE001 - any backend may raise anything; its cases have failed
            return dict.fromkeys(names, f"raised {type(error).__name__}")

    def as_json(self) -> dict[str, Any]:
        """The certificate."""
        subject, worst = self.subject, self.worst
        passed = [outcome.case.inputs for outcome in self.of("passed")]
        layouts = {layout.fingerprint for inputs in passed for layout in inputs.named_layouts()}
        return {
            "ok": self.ok,
            "verdict": self.verdict,
            "schema": SCHEMA,
            "complete": self.complete,
            "asked": self.asked,
            "repeat": self.repeat,
            "backend": subject.name,
            "options": dict(subject.options),
            "reference_ops": list(self.reference_ops),
            "products": subject.backend.capabilities.products.value,
            "distribution": subject.distribution,
            "version": subject.version,
            "contract": API_VERSION,
            "layer_parts": self.layer_parts,
            "v41_ops": self.v41_ops,
            "device": {**attrs.asdict(subject.facts), "torch_device": subject.device},
            "versions": versions(),
            "environment": environment(),
            "layouts": sorted(layouts),
            "filter": self.chosen,
            "counts": {"executed": self.executed, **{state: len(self.of(state)) for state in STATES}},
            "worst": {"case": worst.case.name, "fraction": _finite(worst.measure.fraction)}
            if worst and worst.measure
            else None,
            "clauses": {clause: dict(counts) for clause, counts in self.by_clause().items()},
            "failures": [failures.as_json() for failures in Failures.grouped(self.outcomes)],
            "cases": [outcome.as_json() for outcome in self.outcomes],
            "date": self.date,
            "seconds": round(self.seconds, 2),
        }

    def by_clause(self) -> Mapping[str, Counter[str]]:
        """Number of cases in each state, by clause."""
        counts: dict[str, Counter[str]] = {}
        for outcome in self.outcomes:
            for clause in outcome.case.clauses:
                counts.setdefault(clause, Counter(dict.fromkeys(STATES, 0)))[outcome.state] += 1
        return dict(sorted(counts.items(), key=lambda item: (list(GROUPS).index(item[0][0]), int(item[0][1:]))))


def versions() -> dict[str, str]:
    """Versions of the packages of the run."""
    packages = {"python": platform.python_version(), "dsv4attn": dsv4attn.__version__}
    for name in ("torch", "triton", "numpy"):
        try:
            packages[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            packages[name] = "missing"
    return packages


def environment() -> dict[str, str]:
    """Environment variables that affect the run."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if (name in RELATED or name.startswith(PREFIXES)) and not name.endswith(SECRET)
    }


def run_case(subject: Subject, case: Case, repeat: int = 1) -> Outcome:
    """Ask the backend's support, then run. An exception of the backend becomes an outcome.

    subject: the backend and its device.
    case: the case to run.
    repeat: number of runs. The first that fails ends them; otherwise the outcome has the largest error.
    """
    start = time.perf_counter()
    outcome = _tried(subject, case)
    for run in range(2, repeat + 1):
        if outcome.state != "passed":
            break
        again = _tried(subject, case)
        if again.state == "failed":
            again = attrs.evolve(again, message=f"run {run} of {repeat}, after runs that passed: {again.message}")
        outcome = max(outcome, again, key=lambda o: (o.state == "failed", o.measure.fraction if o.measure else 0.0))
    return attrs.evolve(outcome, seconds=time.perf_counter() - start)


def _tried(subject: Subject, case: Case) -> Outcome:
    lse = True
    try:
        reasons = subject.refusals(case.inputs.problems(lse=True))
        if reasons and not case.needs_lse:
            lse, reasons = False, subject.refusals(case.inputs.problems(lse=False))
        if reasons:
            return Outcome(case, "refused", message="; ".join(reasons), reasons=tuple(reasons))
        with multiplying_in(subject.backend.capabilities.products):
            measure = case.run(Bench(subject.backend, subject.device, lse))
    except SkipCase as skip:
        return Outcome(case, "skipped", message=str(skip), reasons=(str(skip),))
    except Wrong as wrong:
        return Outcome(case, "failed", wrong.measure, message=str(wrong), without_lse=not lse)
    except BrokenSupportError as error:
        return Outcome(case, "failed", message=str(error), trace=traceback.format_exc())
    except (Exception, SystemExit) as error:  # noqa: BLE001 - any backend may raise anything
        message = f"raised {type(error).__name__}: {error}".splitlines()[0]
        last = traceback.extract_tb(error.__traceback__)[-1]
        message = f"{message} (in {last.name}, {Path(last.filename).name}:{last.lineno})"
        return Outcome(case, "failed", message=message, trace=traceback.format_exc(), without_lse=not lse)
    return Outcome(case, "passed", measure, without_lse=not lse)


def conform(
    subject: Subject,
    cases: Iterable[Case] = CASES,
    *,
    chosen: str | None = None,
    progress: Callable[[Outcome], None] = lambda _: None,
    fail_fast: bool = False,
) -> Certificate:
    """Run cases one after another, and call `progress` after each. Ctrl-C ends the run; outcomes up to then stay.

    subject: the backend and its device.
    cases: the cases; default: all of the kit.
    chosen: the filter that chose the cases, which the certificate names; None: all cases.
    progress: gets each outcome.
    fail_fast: the first failed case ends the run.
    """
    outcomes = outcomes_of([subject], cases := tuple(cases))
    return certificates_of([subject], cases, outcomes, chosen=chosen, progress=progress, fail_fast=fail_fast)[0]


def outcomes_of(trials: Sequence[Subject], cases: Sequence[Case]) -> Generator[Outcome, None, None]:
    """Outcomes of each case on every backend, case by case, so that backends share the oracle's answer.

    trials: the backends and their devices.
    cases: the cases.
    """
    return (run_case(subject, case) for case, subject in product(cases, trials))


def certificates_of(
    trials: Sequence[Subject],
    cases: Sequence[Case],
    outcomes: Generator[Outcome, None, None],
    *,
    chosen: str | None = None,
    progress: Callable[[Outcome], None] = lambda _: None,
    fail_fast: bool = False,
) -> tuple[Certificate, ...]:
    """Certificates of outcomes. Those of all subjects for one case follow each other.

    trials: the subjects.
    cases: the cases that were asked for.
    outcomes: closed in the end, also if Ctrl-C or a first failure ended the run.
    chosen: the filter, or None.
    progress: called after each outcome.
    fail_fast: whether the first failed case ends the run.
    """
    ran: list[list[Outcome]] = [[] for _ in trials]
    interrupted, date = False, dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds")
    try:
        for of_subject, outcome in zip(cycle(ran), outcomes):
            of_subject.append(outcome)
            progress(outcome)
            if fail_fast and outcome.state == "failed":
                break
    except KeyboardInterrupt:
        interrupted = True
    finally:
        outcomes.close()
    return tuple(
        Certificate(subject, tuple(done), date, sum(o.seconds for o in done), chosen, len(cases), interrupted)
        for subject, done in zip(trials, ran, strict=True)
    )

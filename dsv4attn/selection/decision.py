"""`decide`: a pure function from facts of device, backends and problems to a choice and its trace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attrs import evolve, field, frozen

from dsv4attn.config import AUTO, Setting
from dsv4attn.core.contract.device import TRITON_SOURCES, DeviceFacts
from dsv4attn.core.contract.info import BackendInfo
from dsv4attn.core.contract.problem import Problem, Reason
from dsv4attn.core.model.geometry import LayerKind
from dsv4attn.errors import (
    AmbiguousBackendError,
    ArgumentError,
    BrokenBackendError,
    NoBackendError,
    did_you_mean,
    leave_out,
)
from dsv4attn.plugins import PLUGIN_ERRORS, PluginFailure, Registered, first_line

__all__ = ["Candidate", "Selection", "decide", "install_cure"]

_HOME = "dsv4attn"


@frozen
class Candidate:
    """One backend in the trace of a selection.

    name: name of the backend.
    owner: its distribution and version.
    state: chosen, supported, refused, broken, or not native.
    reasons: its reasons against the problems.
    note: one sentence if there are no reasons.
    ways: lines of its notes on how it serves the problems.
    asked: whether the request allows it: automatic, or its name.
    cause: exception of its support, or None.
    """

    name: str
    owner: str
    state: str
    reasons: tuple[Reason, ...] = ()
    note: str = ""
    ways: tuple[str, ...] = ()
    asked: bool = True
    cause: BaseException | None = field(default=None, eq=False, repr=False)

    @property
    def lines(self) -> list[str]:
        """One line for each reason, as traces show them."""
        if self.state == "broken":
            return [f"is broken: {self.note} ({self.owner}) -> {_broken_cure(self.owner)}"]
        wide = max((len(reason.code) for reason in self.reasons), default=0)
        texts = [f"{reason.code:<{wide}}  {reason.text}" for reason in self.reasons]
        said = "" if self.asked else "not asked for; would be refused: "
        return [f"{' ' * len(said) if i else said}{line}" for i, line in enumerate(texts)] or [self.note, *self.ways]


@frozen
class Selection:
    """The choice for some problems of one phase, with its trace.

    problems: the problems.
    device: facts of the device.
    request: requested backend, and the source of the request.
    chosen: the chosen backend, or None.
    trace: one candidate for each backend.
    failures: plugins that cannot be used.
    error: exception class that `require` raises.
    verdict: one sentence.
    ignored: `Settings.ignored`: files of other projects that cannot be read.
    """

    problems: tuple[Problem, ...]
    device: DeviceFacts
    request: Setting
    chosen: Registered | None
    trace: tuple[Candidate, ...]
    failures: tuple[PluginFailure, ...] = ()
    error: type[NoBackendError] = field(default=NoBackendError, repr=False)
    verdict: str = ""
    ignored: tuple[str, ...] = ()

    def require(self) -> Registered:
        """The chosen backend; raises NoBackendError, with the whole trace, if there is none."""
        if self.chosen is None:
            raise self.error(str(self)) from next((c.cause for c in self.trace if c.cause and c.asked), None)
        return self.chosen

    @property
    def layer_steps(self) -> dict[str, str]:
        """Who runs each part of the layer around attention: the chosen backend, or "reference", plain torch.

        Parts that no layer of the problems has are left out. Empty without a chosen backend. "candidates" is the
        selection in two levels that layers of DeepSeek-V4.1 may have.
        """
        if self.chosen is None:
            return {}
        kinds = {problem.layer.kind for problem in self.problems}
        parts = ["compressor"] if kinds - {LayerKind.SWA} else []
        parts += ["indexer", "selection"] if LayerKind.CSA in kinds else []
        parts += ["candidates"] if any(problem.layer.shared_latent for problem in self.problems) else []
        return {part: self._brings(self.chosen.info, part) for part in (*parts, "hyper_connections")}

    def _brings(self, info: BackendInfo, part: str) -> str:
        return info.name if ("selection" if part == "candidates" else part) in info.layer_steps else "reference"

    @property
    def rows(self) -> list[tuple[str, list[str]]]:
        """The rows below the verdict, as the CLI and exceptions print them: a name and its lines."""
        around = self.layer_steps
        wanted = f'"{self.request.value}"' if self.request.value != AUTO else "automatic"
        return [
            ("call", [str(problem) for problem in self.problems]),
            ("device", [str(self.device)]),
            ("request", [f"{wanted}  ({self.request.source})"]),
            *((candidate.name, candidate.lines) for candidate in self.trace),
            *([("layer", [", ".join(f"{part}: {name}" for part, name in around.items())])] if around else []),
            *((failure.plugin, [failure.summary]) for failure in self.failures),
            *([("ignored", list(self.ignored))] if self.ignored else []),
        ]

    def __str__(self) -> str:
        """The whole decision."""
        wide = max(len(name) for name, _ in self.rows) + 2
        lines = [
            f"  {name if i == 0 else '':<{wide}}{line}" for name, texts in self.rows for i, line in enumerate(texts)
        ]
        return "\n".join([self.verdict, *lines])


def decide(
    device: DeviceFacts,
    backends: Mapping[str, Registered],
    problem: Problem | Sequence[Problem],
    request: Setting,
    failures: Sequence[PluginFailure] = (),
    installed: Mapping[str, str | None] | None = None,
) -> Selection:
    """Choose a backend for a problem, or one for several of the same phase. Pure: equal facts give an equal choice.

    installed: versions of packages, None for missing ones; packages that are not in it are taken to be installed.
    """
    problems = (problem,) if isinstance(problem, Problem) else tuple(problem)
    if len({p.phase for p in problems}) != 1:
        raise ArgumentError("problems", expected="one or more, all of one phase", actual=[p.phase for p in problems])
    asked = {name: _ask(one, device, problems, installed or {}) for name, one in sorted(backends.items())}
    if request.value == AUTO:
        name, verdict, error = _automatic(device, backends, asked)
    else:
        name, verdict, error = _explicit(request.value, asked, failures)
    trace = tuple(_traced(c, backends[n], device, request.value, chosen=n == name) for n, c in asked.items())
    chosen = None if name is None else backends[name]
    trace = tuple(evolve(c, ways=_ways(chosen, device, problems)) if chosen and c.name == name else c for c in trace)
    return Selection(problems, device, request, chosen, trace, tuple(failures), error, verdict)


_Verdict = tuple["str | None", str, type[NoBackendError]]


def _explicit(name: str, asked: Mapping[str, Candidate], failures: Sequence[PluginFailure]) -> _Verdict:
    if name not in asked:
        failed = "; ".join(failure.summary for failure in failures if failure.plugin == name)
        why = failed or f"no backend has this name{did_you_mean(name, asked)}"
        return None, f"backend {name!r} cannot be used: {why}", NoBackendError
    state = asked[name].state
    if state == "supported":
        return name, f"{name}: asked for by name", NoBackendError
    if state == "broken":
        return None, f"backend {name!r} is broken", BrokenBackendError
    return None, f"backend {name!r} cannot run this call", NoBackendError


def _automatic(device: DeviceFacts, backends: Mapping[str, Registered], asked: Mapping[str, Candidate]) -> _Verdict:
    able = [name for name, c in asked.items() if c.state == "supported" and device.matches(backends[name].info.native)]
    if not able:
        others = " or ".join(name for name, c in asked.items() if c.state == "supported")
        verdict = f"no backend native to {device.arch} can run this call -> ask for {others} by name"
        return None, verdict if others else "no backend can run this call", NoBackendError
    best = max(backends[name].info.rank for name in able)
    first = [name for name in able if backends[name].info.rank is best]
    if len(first) > 1:
        names = " and ".join(f"{name} ({backends[name].owner})" for name in first)
        owner = next((o for name in reversed(first) if (o := backends[name].distribution) != _HOME), _HOME)
        cure = f"ask for one by name, or take the other and {leave_out(owner)}"
        verdict = f"{names} have equal rank on {device.arch} -> {cure}"
        return None, verdict, AmbiguousBackendError
    why = f"the only backend native to {device.arch} that can run this call"
    if len(able) > 1:
        why = f"the {best.name.lower()} backend of {len(able)} native to {device.arch}"
    return first[0], f"{first[0]}: {why}", NoBackendError


def _ask(
    one: Registered, device: DeviceFacts, problems: Sequence[Problem], installed: Mapping[str, str | None]
) -> Candidate:
    """All reasons of one backend against the problems, independent of the request."""
    info = one.info
    reasons: dict[Reason, None] = {}
    elsewhere = not device.matches(info.runs_on + info.native)
    if elsewhere:
        # messages show sm_12x for the shell pattern sm_12*
        allowed = dict.fromkeys(pattern.replace("*", "x") for pattern in info.runs_on + info.native)
        reasons[Reason("DEVICE", device.arch, " or ".join(allowed))] = None
    for package in info.packages:
        if installed.get(package, "") is None:
            cure = install_cure(package, device)
            reasons[Reason("PACKAGE", f"{package} is not installed", package, cure)] = None
    try:
        for problem in problems:
            # equal reasons of several problems are one line
            said = [*_undeterministic(info, problem), *_said(info.support(device, problem))]
            # the reason DEVICE of such a device is there already
            reasons.update(dict.fromkeys(r for r in said if not (elsewhere and r.code == "DEVICE")))
    except KeyboardInterrupt:
        raise
    except PLUGIN_ERRORS as error:
        note = f"its support raised {first_line(error)}"
        return Candidate(info.name, one.owner, "broken", tuple(reasons), note, cause=error)
    return Candidate(info.name, one.owner, "refused" if reasons else "supported", tuple(reasons))


def _undeterministic(info: BackendInfo, problem: Problem) -> list[Reason]:
    """The reason against a backend without the option `deterministic`, if the problem asks for determinism.

    A backend that is always deterministic lists the option with the default True.
    """
    if not problem.deterministic or "deterministic" in info.options:
        return []
    allowed = "a backend with the option deterministic"
    cure = "leave deterministic out of the problem, or ask for another backend"
    return [Reason("DETERMINISTIC", "bits that do not depend on the batch", allowed, cure)]


def _broken_cure(owner: str) -> str:
    """The cure for a backend whose support gave no valid answer."""
    distribution = owner.partition(" ")[0]
    return "report it to its authors" + ("" if distribution == _HOME else f", or {leave_out(distribution)}")


def install_cure(package: str, device: DeviceFacts) -> str:
    """The command that installs a package; on some devices Triton comes with torch."""
    if package == "triton":
        return TRITON_SOURCES.get(device.kind, TRITON_SOURCES["cpu"])
    return f"pip install {package}"


def _said(answer: object) -> Sequence[Reason]:
    """The answer of a plugin's support, checked. Only a list can mean yes: neither None nor True nor ''."""
    if not isinstance(answer, (list, tuple)):
        raise TypeError(f"support returned {type(answer).__name__}, expected a list of Reason")
    for item in answer:
        if not isinstance(item, Reason):
            raise TypeError(f"support returned a list with {type(item).__name__}, expected Reason")
    return answer


def _ways(one: Registered, device: DeviceFacts, problems: Sequence[Problem]) -> tuple[str, ...]:
    """How a backend is built, and lines of its notes, each once. Notes only inform: an exception becomes a line."""
    notes, switched = one.info.notes, one.info.options.get("deterministic") is False
    built = ("built with deterministic=true, which the problem asks for",)
    lines = built if switched and any(problem.deterministic for problem in problems) else ()
    if notes is None:
        return lines
    try:
        return (*lines, *dict.fromkeys(str(line) for problem in problems for line in notes(device, problem)))
    except KeyboardInterrupt:
        raise
    except PLUGIN_ERRORS as error:
        return (*lines, f"its notes raised {first_line(error)}")


def _traced(c: Candidate, one: Registered, device: DeviceFacts, request: str, *, chosen: bool) -> Candidate:
    """The candidate with its final state and note for the trace."""
    if chosen:
        return evolve(c, state="chosen", note="chosen")
    c = evolve(c, asked=request in (AUTO, c.name))
    if c.state != "supported":
        return c
    if not c.asked:
        return evolve(c, note="not asked for; supports this call")
    if device.matches(one.info.native):
        return evolve(c, note="supports this call")
    note = f"supports this call; never automatic on {device.arch} -> ask for it by name"
    return evolve(c, state="not native", note=note)

"""`decide`: a pure function from facts of device, backends and problems to a choice and its trace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attrs import evolve, field, frozen

from dsv4attn.config import AUTO, Setting
from dsv4attn.core.contract.device import TRITON_SOURCES, DeviceFacts
from dsv4attn.core.contract.info import BackendInfo
from dsv4attn.core.contract.op_names import CANDIDATES, LAYER_OPS, expanded
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

_HOME = "dsv4attn"


@frozen
class Candidate:
    """One backend in the trace of a selection.

    name: name of the backend.
    owner: its distribution and version.
    state: chosen, supported, refused, broken, or not native.
    reasons: its reasons against the problems.
    note: one sentence if it has no reasons.
    ways: how it is built, and what its notes say about serving the problems.
    asked: whether the request allows it, as an automatic choice does, or its name.
    cause: the exception that its support raised, or None.
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
        width = max((len(reason.code) for reason in self.reasons), default=0)
        texts = [f"{reason.code:<{width}}  {reason.text}" for reason in self.reasons]
        prefix = "" if self.asked else "not asked for; would be refused: "
        return [f"{' ' * len(prefix) if i else prefix}{line}" for i, line in enumerate(texts)] or [
            self.note,
            *self.ways,
        ]


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
    reference_ops: `Settings.reference_ops`: ops that the reference computes instead of the chosen backend.
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
    reference_ops: tuple[str, ...] = ()

    def require(self) -> Registered:
        """The chosen backend. Raises NoBackendError, with the whole trace, if no backend was chosen."""
        if self.chosen is None:
            causes = (candidate.cause for candidate in self.trace if candidate.asked)
            raise self.error(str(self)) from next(filter(None, causes), None)
        return self.chosen

    @property
    def layer_parts(self) -> dict[str, str]:
        """Which backend runs each part of the layer around attention: the chosen one, or "reference" for plain torch.

        Parts that no layer of the problems has are left out. Without a chosen backend there are none. "candidates" is
        the selection in two levels that layers of DeepSeek-V4.1 may have.
        """
        if self.chosen is None:
            return {}
        kinds = {problem.layer.kind for problem in self.problems}
        parts = ["compressor"] if kinds - {LayerKind.SWA} else []
        parts += ["indexer", "selection"] if LayerKind.CSA in kinds else []
        parts += ["candidates"] if any(problem.layer.shared_latent for problem in self.problems) else []
        return {part: self._brings(self.chosen.info, part) for part in (*parts, "hyper_connections")}

    def _brings(self, info: BackendInfo, part: str) -> str:
        ops = CANDIDATES if part == "candidates" else LAYER_OPS[part]
        if {*ops} <= {*expanded(self.reference_ops)}:
            return "reference"
        return info.name if ("selection" if part == "candidates" else part) in info.layer_ops else "reference"

    @property
    def replaced(self) -> str:
        """Which ops of the chosen backend the reference computes, and why; "" if it computes none."""
        if not self.reference_ops or self.chosen is None or self.chosen.info.name == "reference":
            return ""
        return f"computes {', '.join(self.reference_ops)}  (environment variable DSV4ATTN_REFERENCE_OPS)"

    @property
    def rows(self) -> list[tuple[str, list[str]]]:
        """The rows below the verdict, as the CLI and exceptions print them: a name and its lines."""
        layer_parts = self.layer_parts
        requested = f'"{self.request.value}"' if self.request.value != AUTO else "automatic"
        return [
            ("call", [str(problem) for problem in self.problems]),
            ("device", [str(self.device)]),
            ("request", [f"{requested}  ({self.request.source})"]),
            *((candidate.name, candidate.lines) for candidate in self.trace),
            *([("layer", [", ".join(f"{part}: {name}" for part, name in layer_parts.items())])] if layer_parts else []),
            *([("reference", [self.replaced])] if self.replaced else []),
            *((failure.plugin, [failure.summary]) for failure in self.failures),
            *([("ignored", list(self.ignored))] if self.ignored else []),
        ]

    def __str__(self) -> str:
        """The whole decision."""
        width = max(len(name) for name, _ in self.rows) + 2
        lines = [
            f"  {name if i == 0 else '':<{width}}{line}" for name, texts in self.rows for i, line in enumerate(texts)
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
    """Choose one backend for one problem, or for several of the same phase. Equal facts give an equal choice.

    installed: versions of packages, None for missing ones. Packages that it does not name are taken to be installed.
    """
    problems = (problem,) if isinstance(problem, Problem) else tuple(problem)
    if len({p.phase for p in problems}) != 1:
        raise ArgumentError("problems", expected="one or more, all of one phase", actual=[p.phase for p in problems])
    candidates = {
        name: _candidate(entry, device, problems, installed or {}) for name, entry in sorted(backends.items())
    }
    if request.value == AUTO:
        chosen_name, verdict, error = _automatic(device, backends, candidates)
    else:
        chosen_name, verdict, error = _explicit(request.value, candidates, failures)
    chosen = None if chosen_name is None else backends[chosen_name]
    ways = () if chosen is None else _ways(chosen, device, problems)
    trace = tuple(
        evolve(candidate, state="chosen", note="chosen", ways=ways)
        if name == chosen_name
        else _traced(candidate, backends[name].info, device, request.value)
        for name, candidate in candidates.items()
    )
    return Selection(problems, device, request, chosen, trace, tuple(failures), error, verdict)


_Verdict = tuple["str | None", str, type[NoBackendError]]


def _explicit(name: str, candidates: Mapping[str, Candidate], failures: Sequence[PluginFailure]) -> _Verdict:
    """The name of the chosen backend or None, one sentence, and the error if None: for a backend asked for by name."""
    if name not in candidates:
        failed = "; ".join(failure.summary for failure in failures if failure.plugin == name)
        why = failed or f"no backend has this name{did_you_mean(name, candidates)}"
        return None, f"backend {name!r} cannot be used: {why}", NoBackendError
    state = candidates[name].state
    if state == "supported":
        return name, f"{name}: asked for by name", NoBackendError
    if state == "broken":
        return None, f"backend {name!r} is broken", BrokenBackendError
    return None, f"backend {name!r} cannot run this call", NoBackendError


def _automatic(
    device: DeviceFacts, backends: Mapping[str, Registered], candidates: Mapping[str, Candidate]
) -> _Verdict:
    """As `_explicit`, for an automatic choice."""
    supported = [name for name, candidate in candidates.items() if candidate.state == "supported"]
    able = [name for name in supported if device.matches(backends[name].info.native)]
    if not able:
        others = " or ".join(supported)
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


def _candidate(
    registered: Registered, device: DeviceFacts, problems: Sequence[Problem], installed: Mapping[str, str | None]
) -> Candidate:
    """A backend with all its reasons against the problems, whatever was requested."""
    info = registered.info
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
            answer = [*_undeterministic(info, problem), *_checked_reasons(info.support(device, problem))]
            # the reason DEVICE of a device elsewhere is there already
            reasons.update(dict.fromkeys(reason for reason in answer if not (elsewhere and reason.code == "DEVICE")))
    except KeyboardInterrupt:
        raise
    except PLUGIN_ERRORS as error:
        note = f"its support raised {first_line(error)}"
        return Candidate(info.name, registered.owner, "broken", tuple(reasons), note, cause=error)
    return Candidate(info.name, registered.owner, "refused" if reasons else "supported", tuple(reasons))


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


def _checked_reasons(answer: object) -> Sequence[Reason]:
    """The answer of a plugin's support, checked. Only a list can mean yes: neither None nor True nor ''."""
    if not isinstance(answer, (list, tuple)):
        raise TypeError(f"support returned {type(answer).__name__}, expected a list of Reason")
    for item in answer:
        if not isinstance(item, Reason):
            raise TypeError(f"support returned a list with {type(item).__name__}, expected Reason")
    return answer


def _ways(registered: Registered, device: DeviceFacts, problems: Sequence[Problem]) -> tuple[str, ...]:
    """How a backend is built, and lines of its notes, each once. Notes only inform: an exception becomes a line."""
    notes, has_switch = registered.info.notes, registered.info.options.get("deterministic") is False
    is_switched = has_switch and any(problem.deterministic for problem in problems)
    lines = ("built with deterministic=true, which the problem asks for",) if is_switched else ()
    if notes is None:
        return lines
    try:
        return (*lines, *dict.fromkeys(str(line) for problem in problems for line in notes(device, problem)))
    except KeyboardInterrupt:
        raise
    except PLUGIN_ERRORS as error:
        return (*lines, f"its notes raised {first_line(error)}")


def _traced(candidate: Candidate, info: BackendInfo, device: DeviceFacts, request: str) -> Candidate:
    """A candidate that was not chosen, with its final state and note for the trace."""
    candidate = evolve(candidate, asked=request in (AUTO, candidate.name))
    if candidate.state != "supported":
        return candidate
    if not candidate.asked:
        return evolve(candidate, note="not asked for; supports this call")
    if device.matches(info.native):
        return evolve(candidate, note="supports this call")
    note = f"supports this call; never automatic on {device.arch} -> ask for it by name"
    return evolve(candidate, state="not native", note=note)

"""The subject of a conformance run: a backend, its device, its options, and the answers of its support."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import attrs
import torch

import dsv4attn
from dsv4attn.core.contract.backend import Backend
from dsv4attn.core.contract.device import DeviceFacts, version_of
from dsv4attn.core.contract.problem import Problem
from dsv4attn.errors import ArgumentError, Dsv4AttnError, UnknownNameError
from dsv4attn.selection import explain, load_backend, registered, registry_of

__all__ = ["BrokenSupportError", "Subject", "parse_request"]


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

        device: a torch device; by default the first accelerator, if the backend runs there, or the CPU.
        """
        options = dict(options or {})
        one, backend = registered(name), load_backend(name, **options)
        here = DeviceFacts.here()
        place = device or _place(here, one.info.runs_on + one.info.native)
        facts = _facts(place)
        version = one.version or version_of(one.distribution) or (dsv4attn.__version__ if _is_ours(one) else "")
        return cls(name, backend, place, facts, one.distribution, version, options, _refusals(name, facts))

    @classmethod
    def of(cls, backend: Backend | str, *, device: str | None = None) -> Subject:
        """A backend object, or `NAME[,option=value]`. A backend object without a registered name refuses nothing."""
        if isinstance(backend, str):
            name, options = parse_request(backend)
            return cls.named(name, device=device, options=options)
        facts = _facts(device or "cpu")
        try:
            one = registered(backend.name)
        except UnknownNameError:
            return cls(backend.name, backend, device or "cpu", facts)
        return cls(
            backend.name, backend, device or "cpu", facts, one.distribution, one.version,
            refusals=_refusals(backend.name, facts),
        )  # fmt: skip


def parse_request(text: str, separator: str = ",") -> tuple[str, dict[str, str]]:
    """`NAME[,option=value]` in parts."""
    name, *rest = (part.strip() for part in text.split(separator))
    for part in rest:
        if "=" not in part:
            raise ArgumentError("backend", expected=f"NAME[{separator}option=value]", actual=repr(text))
    return name, {key.strip(): value.strip() for key, _, value in (part.partition("=") for part in rest)}


def _is_ours(one: object) -> bool:
    return getattr(one, "distribution", "") == "dsv4attn"


def _facts(device: str) -> DeviceFacts:
    try:
        torch.empty(0, device=device, dtype=torch.float32)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        said = str(error).splitlines()[0]
        raise ArgumentError("device", expected="a device of this machine", actual=f"{device!r} ({said})") from error
    return DeviceFacts.here(device)


def _place(here: DeviceFacts, runs_on: tuple[str, ...]) -> str:
    """Torch device of the first accelerator if the backend runs there, otherwise "cpu"."""
    if here.kind == "cpu" or not here.matches(runs_on):
        return "cpu"
    return {"hip": "cuda"}.get(here.kind, here.kind)


def _refusals(name: str, facts: DeviceFacts) -> Callable[[Sequence[Problem]], list[str]]:
    @cache
    def answer(problems: tuple[Problem, ...]) -> tuple[str, ...]:
        reasons: dict[str, None] = {}
        for phase in dict.fromkeys(problem.phase for problem in problems):
            asked = [problem for problem in problems if problem.phase == phase]
            selection = explain(asked, backend=name, device=facts, registry=registry_of(name))
            (candidate,) = (c for c in selection.trace if c.name == name)
            if candidate.state == "broken":
                raise BrokenSupportError(candidate.note) from candidate.cause
            reasons.update(dict.fromkeys(f"{reason.code}: {reason.text}" for reason in candidate.reasons))
        return tuple(reasons)

    return lambda problems: list(answer(tuple(problems)))

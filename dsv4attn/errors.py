"""Every exception of the package.

Each one says which argument or line is wrong, what was expected, what came, and what to do about it.
All derive from `Dsv4AttnError`; those caused by a bad value are also `ValueError`, so that a caller who
knows nothing of this package still catches them by their usual name.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = [
    "AmbiguousBackendError",
    "ArgumentError",
    "BrokenBackendError",
    "CanaryError",
    "ConfigError",
    "Dsv4AttnError",
    "GeometryError",
    "LayoutMismatchError",
    "NoBackendError",
    "NoForwardContextError",
    "OutOfPagesError",
    "TraceError",
    "UnknownNameError",
    "UnsupportedError",
    "WorkspaceError",
    "did_you_mean",
    "leave_out",
]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the names this one begins, or the nearest one, or an empty string."""
    names = {candidate.lower(): candidate for candidate in sorted(known)}
    begun = [candidate for lower, candidate in names.items() if name and lower.startswith(name.lower())]
    close = begun or [names[hit] for hit in difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.5)]
    return f"; did you mean {' or '.join(map(repr, close))}?" if close else ""


def leave_out(plugin: str) -> str:
    """How to do without a plugin, for the end of an error; plugin: its name or that of its distribution."""
    return f"leave it out: DSV4ATTN_PLUGINS_DENY={plugin}"


class Dsv4AttnError(Exception):
    """Base of every error this package raises on purpose."""

    def __reduce__(self) -> tuple[object, ...]:
        """Survive a trip between processes, although `__init__` of most errors does not take the message."""
        return _unpickled, (type(self), self.args), self.__dict__


def _unpickled(kind: type[Dsv4AttnError], args: tuple[object, ...]) -> Dsv4AttnError:
    return kind.__new__(kind, *args)


class ArgumentError(Dsv4AttnError, ValueError):
    """An argument does not satisfy its declaration.

    Raised before any launch and before any write.
    """

    def __init__(self, argument: str, *, expected: str, actual: object, hint: str = "") -> None:
        """Build the message from its four parts: which argument, what was expected, what came, what to do."""
        self.argument, self.expected, self.actual, self.hint = argument, expected, actual, hint
        cure = f" -> {hint}" if hint else ""
        super().__init__(f"{argument}: expected {expected}, got {actual}{cure}")


class LayoutMismatchError(ArgumentError):
    """A writer and a reader disagree about the bytes of a KV cache (promise G2)."""


class UnsupportedError(ArgumentError):
    """The chosen backend cannot serve this problem."""


class GeometryError(Dsv4AttnError, ValueError):
    """A model configuration is missing a field or contradicts itself."""


class UnknownNameError(Dsv4AttnError, ValueError):
    """A backend, model or layer type of this name does not exist."""

    def __init__(
        self,
        kind: str,
        name: str,
        known: Iterable[str],
        others: Iterable[str] = (),
        *,
        near: Iterable[str] | None = None,
    ) -> None:
        """Name the kind of thing asked for, the name given, and the names that exist.

        others: a line for each thing that is left out, and could be the one that is meant. near: the names that may be
        suggested, where those are not all.
        """
        self.kind, self.name, self.known = kind, name, sorted(known)
        meant = did_you_mean(name, self.known if near is None else near)
        first = f"unknown {kind} {name!r}{meant} (known: {', '.join(self.known)})"
        super().__init__("\n  ".join([first, *others]))


class WorkspaceError(Dsv4AttnError, RuntimeError):
    """A locked workspace is too small for a request."""

    def __init__(self, *, needed: int, has: int, caller: str, lane: str) -> None:
        """Say how many bytes were needed, how many there are, and who asked."""
        self.needed, self.has, self.caller, self.lane = needed, has, caller, lane
        super().__init__(
            f"workspace: {caller} needs {needed} bytes in lane {lane!r}, which is locked at {has} bytes "
            f"-> reserve a plan for larger limits before lock(), or call unlock() first"
        )


class CanaryError(Dsv4AttnError, RuntimeError):
    """Someone wrote past the end of a workspace view (debug mode only)."""


class NoForwardContextError(Dsv4AttnError, RuntimeError):
    """A bound layer was called outside `set_forward_context`, or its metadata is missing from it."""


class ConfigError(Dsv4AttnError, ValueError):
    """An environment variable or a configuration file says something that cannot be meant."""

    def __init__(self, where: str, problem: str) -> None:
        """Name the variable or the file, and what is wrong."""
        self.where, self.problem = where, problem
        super().__init__(f"{where}: {problem}")


class NoBackendError(Dsv4AttnError, RuntimeError):
    """No backend can run a call. The message shows the call, the device, the request and every candidate's reasons."""


class AmbiguousBackendError(NoBackendError):
    """Two backends of equal rank could be chosen automatically; registration order never decides."""


class BrokenBackendError(NoBackendError):
    """A backend raised where it should have answered, or cannot be imported although it claims to be available."""


class OutOfPagesError(Dsv4AttnError, RuntimeError):
    """The block allocator has no free block left."""


class TraceError(Dsv4AttnError, ValueError):
    """A request trace cannot be read; nothing of it has been run."""

    def __init__(self, path: str, line: int, problem: str) -> None:
        """Name the file, the 1-based line, or 0 for the file as a whole, and what is wrong with it."""
        self.path, self.line, self.problem = path, line, problem
        super().__init__(f"{path}:{line}: {problem}" if line else f"{path}: {problem}")

"""Every exception of the package.

Each message names the argument or line at fault, the expected and the actual value, and the cure. All derive from
`Dsv4AttnError`. Errors of a bad value are also `ValueError`, so that code without an import of this package can catch
them.
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
    "ContextParallelError",
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


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the names that `name` begins, or the nearest one, or an empty string.

    name: the name that does not exist.
    candidates: the names that there are.
    """
    names = {candidate.lower(): candidate for candidate in sorted(candidates)}
    begun = [candidate for lower, candidate in names.items() if name and lower.startswith(name.lower())]
    close = begun or [names[hit] for hit in difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.5)]
    return f"; did you mean {' or '.join(map(repr, close))}?" if close else ""


def leave_out(plugin: str) -> str:
    """The cure that leaves a plugin out, for the end of an error. plugin: its name or that of its distribution."""
    return f"leave it out: DSV4ATTN_PLUGINS_DENY={plugin}"


class Dsv4AttnError(Exception):
    """Base of every error this package raises on purpose."""

    def __reduce__(self) -> tuple[object, ...]:
        """Support pickling, although `__init__` of most errors does not take the message."""
        return _unpickled, (type(self), self.args), self.__dict__


def _unpickled(kind: type[Dsv4AttnError], args: tuple[object, ...]) -> Dsv4AttnError:
    return kind.__new__(kind, *args)


class ArgumentError(Dsv4AttnError, ValueError):
    """An argument does not satisfy its declaration.

    Raised before any launch and before any write.
    """

    def __init__(self, argument: str, *, expected: str, actual: object, hint: str = "") -> None:
        """Build the message from its four parts: argument, expected value, actual value, cure.

        argument: name of the argument.
        expected: what the argument must be.
        actual: what it is.
        hint: what to do, or "".
        """
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
        shown: str = "",
    ) -> None:
        """Build the message from the kind of name, the given name, and the names that exist.

        kind: what has the name, such as "backend".
        name: the name that does not exist.
        known: the names that exist.
        others: a line for each candidate that is left out and may be the meant one, such as a failed plugin. near: the
        names that may be suggested, or None for all of `known`. shown: what the message has in place of a long list.
        """
        self.kind, self.name, self.known = kind, name, sorted(known)
        meant = did_you_mean(name, self.known if near is None else near)
        first = f"unknown {kind} {name!r}{meant} (known: {shown or ', '.join(self.known)})"
        super().__init__("\n  ".join([first, *others]))


class WorkspaceError(Dsv4AttnError, RuntimeError):
    """A locked workspace is too small for a request."""

    def __init__(self, *, needed: int, has: int, caller: str, arena: str) -> None:
        """Build the message from needed bytes, available bytes, caller and arena.

        needed: bytes that the request needs.
        has: bytes that the arena has.
        caller: name of the caller.
        arena: name of the arena.
        """
        self.needed, self.has, self.caller, self.arena = needed, has, caller, arena
        super().__init__(
            f"workspace: {caller} needs {needed} bytes in arena {arena!r}, which is locked at {has} bytes "
            f"-> reserve a plan for larger limits before lock(), or call unlock() first"
        )


class CanaryError(Dsv4AttnError, RuntimeError):
    """A kernel wrote past the end of a workspace view (debug mode only)."""


class NoForwardContextError(Dsv4AttnError, RuntimeError):
    """A bound layer was called outside `set_forward_context`, or its metadata is missing from it."""


class ConfigError(Dsv4AttnError, ValueError):
    """An environment variable or a configuration file has an invalid value."""

    def __init__(self, where: str, problem: str) -> None:
        """Build the message from the variable or file, and the problem.

        where: the variable, or the file and the key.
        problem: what is wrong with the value.
        """
        self.where, self.problem = where, problem
        super().__init__(f"{where}: {problem}")


class ContextParallelError(Dsv4AttnError, RuntimeError):
    """An exchange between the ranks of a context-parallel group failed."""

    def __init__(self, rank: int, size: int, what: str, reason: str) -> None:
        """Build the message from this rank, the number of ranks, what was exchanged, and torch's reason.

        rank: rank that raises the error.
        size: number of ranks.
        what: the exchange that failed.
        reason: why it failed.
        """
        self.rank, self.size, self.what, self.reason = rank, size, what, reason
        cure = "look at the logs of the other ranks: one has ended, hangs, or runs other steps; then restart the group"
        super().__init__(f"rank {rank} of {size}: the exchange of {what} failed: {reason.strip()} -> {cure}")


class NoBackendError(Dsv4AttnError, RuntimeError):
    """No backend can run a call. The message shows the call, the device, the request and every candidate's reasons."""


class AmbiguousBackendError(NoBackendError):
    """Two backends of equal rank could be chosen automatically; registration order never decides."""


class BrokenBackendError(NoBackendError):
    """A backend's support raised, or the backend cannot be imported or made although its packages are installed."""


class OutOfPagesError(Dsv4AttnError, RuntimeError):
    """The block allocator has no free block left."""


class TraceError(Dsv4AttnError, ValueError):
    """A request trace cannot be read; none of its requests has run."""

    def __init__(self, path: str, line: int, problem: str) -> None:
        """Build the message from the file, the 1-based line, or 0 for the file as a whole, and the problem.

        path: path of the trace.
        line: number of the line, from 1; 0: the whole file.
        problem: what is wrong with the line.
        """
        self.path, self.line, self.problem = path, line, problem
        super().__init__(f"{path}:{line}: {problem}" if line else f"{path}: {problem}")

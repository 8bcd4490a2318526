"""Names of an engine's code that an adapter relies on, and whether the installed engine has them.

None of them is a public interface of the engine, so another version of it may lack one. Without a check the first sign
would be an `AttributeError` in the first request that needs the name. An adapter has one table of such names, and asks
`lacking` about it before it replaces anything.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from attrs import field, frozen

__all__ = [
    "Called",
    "Internal",
    "LackingError",
    "Named",
    "Overridden",
    "Stored",
    "Written",
    "lacking",
    "listed",
    "names_of",
]


class LackingError(Exception):
    """A name that is not there, or is not what this package takes it for. The message is one line."""


def names_of(names: str | Iterable[str]) -> tuple[str, ...]:
    """Names of a table: several, or one text with blanks between them."""
    return tuple(names.split() if isinstance(names, str) else names)


@frozen
class Internal:
    """Names of one module or class of an engine.

    owner: "engine.module", or "engine.module:Class".
    """

    use: ClassVar[str] = "reads"
    """What the adapter does with the names: reads, writes, calls or replaces."""

    owner: str

    def find(self) -> Any:  # noqa: ANN401 - a module or a class of the engine
        """The module or class. Raises LackingError if it is not there, or cannot be imported."""
        return _found(self.owner)

    def lacking(self) -> Iterator[str]:
        """What is not there: one line for each name."""
        raise NotImplementedError

    def names(self) -> tuple[str, ...]:
        """The names, without their owner."""
        raise NotImplementedError


@frozen
class Named(Internal):
    """Attributes of a module or a class: functions, classes, methods that are called, members of an enumeration."""

    attributes: tuple[str, ...] = field(converter=names_of)

    def lacking(self) -> Iterator[str]:
        """See `Internal`."""
        owner = self.find()
        for name in self.attributes:
            if not hasattr(owner, name):
                yield f"{self.owner}.{name} is not there"

    def names(self) -> tuple[str, ...]:
        """See `Internal`."""
        return self.attributes


@frozen
class Called(Internal):
    """A function that the adapter calls.

    function: its name.
    positional: how many arguments are passed by position, without `self`.
    keywords: names of the arguments that are passed by name.
    """

    use = "calls"

    function: str
    positional: int = 0
    keywords: tuple[str, ...] = field(default=(), converter=names_of)

    def lacking(self) -> Iterator[str]:
        """See `Internal`."""
        owner = self.find()
        function = getattr(owner, self.function, None)
        if function is None:
            yield f"{self.owner}.{self.function} is not there"
            return
        signature = inspect.signature(function)
        static = isinstance(inspect.getattr_static(owner, self.function), staticmethod)
        unbound = inspect.isclass(owner) and not inspect.ismethod(function) and not static
        try:
            signature.bind(*[None] * (self.positional + unbound), **dict.fromkeys(self.keywords))
        except TypeError as error:
            yield f"{self.owner}.{self.function}{signature} cannot be called as it is: {error}"

    def names(self) -> tuple[str, ...]:
        """See `Internal`."""
        return (self.function,)


@frozen
class Overridden(Internal):
    """Methods of a class, or functions of a module, that the engine calls and the adapter has others in place of.

    ours: the class of the adapter that overrides them, "module:Class", or the function that replaces `hooks[0]`.
    hooks: their names. The engine must have them, call them, and pass nothing that ours do not take.
    like: the method of the engine's class that says what is passed, where the hook itself takes any arguments.
    callers: modules of the engine that may call them. The modules of the class and of its bases are always looked at.
    """

    use = "replaces"

    ours: str
    hooks: tuple[str, ...] = field(converter=names_of)
    like: str = ""
    callers: tuple[str, ...] = ()

    def lacking(self) -> Iterator[str]:
        """See `Internal`."""
        owner = self.find()
        for hook in self.hooks:
            theirs = inspect.getattr_static(owner, hook, None)
            if theirs is None:
                yield f"{self.owner}.{hook} is not there"
            elif not _is_called(hook, _code_near(owner, self.callers)):
                yield f"{self.owner}.{hook} is there, but nothing calls it"
            elif self.like and not hasattr(owner, self.like):
                yield f"{self.owner}.{self.like} is not there"
            elif difference := self._difference(hook, getattr(owner, self.like or hook)):
                yield f"{self.owner}.{self.like or hook}: {difference}"

    def _difference(self, hook: str, theirs: Any) -> str:  # noqa: ANN401 - a function
        """Why ours cannot be called as the engine calls its own."""
        ours, parameters = _found(self.ours), list(inspect.signature(theirs).parameters.values())
        if inspect.isclass(ours):
            # a static method of ours in place of a method of the engine gets no `self`
            if isinstance(inspect.getattr_static(ours, hook), staticmethod):
                parameters = [one for one in parameters if one.name != "self"]
            ours = getattr(ours, hook)
        by_place = [one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
        by_name = [one.name for one in parameters if one.kind is one.KEYWORD_ONLY]
        # what has a default may be passed by name too
        by_name += [one.name for one in by_place if one.default is not one.empty]
        by_place = [one for one in by_place if one.default is one.empty]
        signature = inspect.signature(ours)
        try:
            signature.bind(*by_place, **dict.fromkeys(by_name))
        except TypeError as error:
            return f"it gets {', '.join(one.name for one in parameters)}; dsv4attn's takes {signature}: {error}"
        return ""

    def names(self) -> tuple[str, ...]:
        """See `Internal`."""
        return self.hooks


@frozen
class Stored(Internal):
    """Attributes that objects of a class have: `self.name` somewhere in the class or its bases, or a declared field."""

    attributes: tuple[str, ...] = field(converter=names_of)

    def lacking(self) -> Iterator[str]:
        """See `Internal`."""
        owner = self.find()
        code = _code_of_bases(owner)
        for name in self.attributes:
            if not hasattr(owner, name) and not re.search(rf"\bself\.{name}\b|^    {name}\s*:", code, re.MULTILINE):
                yield f"{self.owner}: its objects have no {name}"

    def names(self) -> tuple[str, ...]:
        """See `Internal`."""
        return self.attributes


@frozen
class Written(Stored):
    """Attributes of objects of a class that the adapter sets."""

    use = "writes"


def _found(path: str) -> Any:  # noqa: ANN401 - a module, a class or a function
    module, _, name = path.partition(":")
    try:
        found: Any = import_module(module)
    except ImportError as error:
        raise LackingError(f"{module} cannot be imported: {error}") from error
    for part in filter(None, name.split(".")):
        if not hasattr(found, part):
            raise LackingError(f"{module}.{name} is not there")
        found = getattr(found, part)
    return found


def _is_called(name: str, code: str) -> bool:
    """Whether code names a function elsewhere than where it defines it. Code that cannot be read counts as a caller."""
    return not code or re.search(rf"(?<!def )\b{name}\b", code) is not None


@cache
def _code_near(owner: Any, callers: tuple[str, ...]) -> str:  # noqa: ANN401 - a module or a class
    """The code of the module of a class, of those of its bases, and of callers."""
    modules = {owner.__name__} if inspect.ismodule(owner) else {base.__module__ for base in _bases(owner)}
    return "\n".join(_file(module) for module in sorted(modules.union(callers)))


def _bases(owner: type) -> list[type]:
    """A class and those of its bases that are of the same distribution."""
    engine = owner.__module__.partition(".")[0]
    return [base for base in owner.__mro__ if base.__module__.partition(".")[0] == engine]


@cache
def _code_of_bases(owner: type) -> str:
    return "\n".join(map(_code, _bases(owner)))


def _code(of: type) -> str:
    try:
        return inspect.getsource(of)
    except (OSError, TypeError):  # installed without source
        return ""


def _file(module: str) -> str:
    """The code of a module, which is not imported: its platform may be another one."""
    try:
        spec = find_spec(module)
    except ImportError:
        return ""
    path = Path(spec.origin) if spec is not None and spec.origin is not None else None
    return path.read_text(encoding="utf-8") if path is not None and path.suffix == ".py" else ""


def lacking(entries: Iterable[Internal], engine: str) -> list[str]:
    """What the installed engine lacks of a table: one line for each name, in the order of the table.

    A module of the adapter cannot be imported if the engine lacks a name that it imports. That is said only if no name
    of the engine says more. engine: the package that the names are in, as in "vllm".
    """
    found: dict[str, None] = {}
    for one in entries:
        try:
            found.update(dict.fromkeys(one.lacking()))
        except LackingError as error:
            found[str(error)] = None
    return [line for line in found if line.startswith(f"{engine}.")] or list(found)


def listed(table: Mapping[str, Iterable[Internal]]) -> list[dict[str, Any]]:
    """A table of names as `dsv4attn doctor --json` has it: a row for each entry. Nothing of the engine is imported.

    table: entries by the part of the adapter that needs them.
    """
    rows = [(part, entry) for part, entries in table.items() for entry in entries]
    return [{"part": part, "owner": e.owner, "use": e.use, "names": list(e.names())} for part, e in rows]

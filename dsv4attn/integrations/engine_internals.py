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


class LackingError(Exception):
    """A name that the engine does not have. The message is one line."""


def names_of(names: str | Iterable[str]) -> tuple[str, ...]:
    """The names of a table entry: a sequence, or one text with blanks between the names."""
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
        return _look_up(self.owner)

    def lacking(self) -> Iterator[str]:
        """One line for each name that the engine lacks."""
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
    """Methods of a class, or functions of a module, that the engine calls and the adapter replaces.

    replacement: the class of the adapter that overrides them, "module:Class", or the function that replaces `hooks[0]`.
    hooks: their names. The engine must have them and call them. It must pass no argument that the replacement does not
        take.
    like: the method of the engine's class whose parameters are those that are passed, where the hook itself takes any
        arguments.
    callers: modules of the engine that may call them. The modules of the class and of its bases are always looked at.
    """

    use = "replaces"

    replacement: str
    hooks: tuple[str, ...] = field(converter=names_of)
    like: str = ""
    callers: tuple[str, ...] = ()

    def lacking(self) -> Iterator[str]:
        """See `Internal`."""
        owner = self.find()
        for hook in self.hooks:
            function = inspect.getattr_static(owner, hook, None)
            if function is None:
                yield f"{self.owner}.{hook} is not there"
            elif not _is_called(hook, _code_near(owner, self.callers)):
                yield f"{self.owner}.{hook} is there, but nothing calls it"
            elif self.like and not hasattr(owner, self.like):
                yield f"{self.owner}.{self.like} is not there"
            elif difference := self._difference(hook, getattr(owner, self.like or hook)):
                yield f"{self.owner}.{self.like or hook}: {difference}"

    def _difference(self, hook: str, engine_function: Any) -> str:  # noqa: ANN401 - a function
        """Why the replacement cannot be called as the engine calls its own function."""
        replacement = _look_up(self.replacement)
        parameters = list(inspect.signature(engine_function).parameters.values())
        if inspect.isclass(replacement):
            # a static method that replaces a method of the engine gets no `self`
            if isinstance(inspect.getattr_static(replacement, hook), staticmethod):
                parameters = [p for p in parameters if p.name != "self"]
            replacement = getattr(replacement, hook)
        by_place = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        by_name = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
        # what has a default may be passed by name too
        by_name += [p.name for p in by_place if p.default is not p.empty]
        by_place = [p for p in by_place if p.default is p.empty]
        signature = inspect.signature(replacement)
        try:
            signature.bind(*by_place, **dict.fromkeys(by_name))
        except TypeError as error:
            return f"it gets {', '.join(p.name for p in parameters)}; dsv4attn's takes {signature}: {error}"
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
        owner: Any = self.find()
        # of a module every name is an attribute
        code = "" if inspect.ismodule(owner) else _code_of_bases(owner)
        for name in self.attributes:
            if not hasattr(owner, name) and not re.search(rf"\bself\.{name}\b|^    {name}\s*:", code, re.MULTILINE):
                yield f"{self.owner}: its objects have no {name}"

    def names(self) -> tuple[str, ...]:
        """See `Internal`."""
        return self.attributes


@frozen
class Written(Stored):
    """Attributes of objects of a class, or of a module, that the adapter sets."""

    use = "writes"


def _look_up(path: str) -> Any:  # noqa: ANN401 - a module, a class or a function
    module, _, name = path.partition(":")
    try:
        value: Any = import_module(module)
    except ImportError as error:
        raise LackingError(f"{module} cannot be imported: {error}") from error
    for part in filter(None, name.split(".")):
        if not hasattr(value, part):
            raise LackingError(f"{module}.{name} is not there")
        value = getattr(value, part)
    return value


def _is_called(name: str, code: str) -> bool:
    """Whether code names a function outside of its definition. Code that cannot be read counts as a caller."""
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
    """The names of a table that the installed engine lacks: one line for each name, in the order of the table.

    A module of the adapter cannot be imported if the engine lacks a name that the module imports. Such a line is
    returned only if there is no line about a name of the engine.

    engine: the package that the names are in, as in "vllm".
    """
    lines: dict[str, None] = {}
    for entry in entries:
        try:
            lines.update(dict.fromkeys(entry.lacking()))
        except LackingError as error:
            lines[str(error)] = None
    return [line for line in lines if line.startswith(f"{engine}.")] or list(lines)


def listed(table: Mapping[str, Iterable[Internal]]) -> list[dict[str, Any]]:
    """A table of names as `dsv4attn doctor --json` has it: a row for each entry. Nothing of the engine is imported.

    table: entries by the part of the adapter that needs them.
    """
    rows = [(part, entry) for part, entries in table.items() for entry in entries]
    return [{"part": part, "owner": e.owner, "use": e.use, "names": list(e.names())} for part, e in rows]

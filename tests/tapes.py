"""Triton's interpreter without its type checks: what a function does to numbers is written down once and played again.

Interpreted, every `a + b` of a kernel asks anew which types its operands have, what they are promoted to and how they
are broadcast, which takes a hundred times as long as numpy's sum. The answers follow from types and constants alone. So
the first call of a function (a kernel, a device function, an operation of the language) with given types and constants
runs as always, while each step that it asks of the interpreter's builder is written down: a tape. Later calls play the
steps on their own numbers. Where a function asks for the value of a tensor (a branch, a loop to a loaded bound), its
tape forks; an answer that was never seen before makes it run and be written down again, which is safe as long as
nothing has been stored by then.

A tape is made only of what was seen. A function that asks after a store, or uses numbers that came from elsewhere, has
none for these types and runs as always; its parts have tapes of their own. All are forgotten as soon as a name that a
recorded function may read means something else, as when a test plants a bug.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import CodeType, ModuleType
from typing import Any

from tests.tape import UNSEEN, Line, Node, Recorder, UnknownError, Writer, play, replay

_DYNAMIC = object()
"""Instead of a tape: a function that has none for these types."""
_VAIN = 200
"""New tapes of one function after which, none of them played meanwhile, it gets no more."""


class Tapes:
    """All tapes, and the switch between recording, playing and neither."""

    def __init__(self, interpreter: Any, core: Any) -> None:
        self.builder, self.semantic = interpreter.interpreter_builder, interpreter.interpreter_semantic
        self.handle, self.core = interpreter.TensorHandle, core
        self.function = interpreter.InterpretedFunction
        self.recorder: Recorder | None = None
        self._tapes: dict[Any, Any] = {}
        self._types: dict[Any, int] = {}
        self._read: dict[int, tuple[Any, list[tuple[dict[str, Any], str, Any]]]] = {}
        self._vain: dict[Any, int] = {}
        self.off, self.played = False, 0

    # ------------------------------------------------------------ keys

    def _type(self, type_: Any) -> int:
        """The number of a type, the same for equal ones."""
        known = vars(type_).get("_number")
        if known is not None:
            return int(known)
        core = self.core
        if isinstance(type_, core.block_type):
            key: Any = ("block", self._type(type_.element_ty), tuple(type_.shape))
        elif isinstance(type_, core.pointer_type):
            key = ("pointer", self._type(type_.element_ty), type_.address_space, bool(type_.const))
        elif type(type_) is core.dtype:
            key = ("dtype", type_.name)
        else:
            raise UnknownError
        number = self._types.setdefault(key, len(self._types))
        vars(type_)["_number"] = number
        return number

    def _key(self, value: Any, handles: list[Any]) -> Any:  # noqa: PLR0911 - one line a kind
        """What a tape may depend on in an argument; its numbers go to `handles`."""
        core, kind = self.core, type(value)
        if kind is core.tensor:
            handles.append(value.handle)
            return self._type(value.type)
        if kind is int or kind is bool or kind is str or value is None:
            return (kind, value)
        if kind is core.constexpr:
            return (kind, self._key(value.value, handles))
        if kind is float:
            return (kind, value.hex())
        if kind is tuple or kind is list:
            return (kind, *[self._key(one, handles) for one in value])
        if kind is core.tuple and value.type.fields is None:
            return (kind, *[self._key(one, handles) for one in value.values])
        if kind is slice:
            return (kind, *[self._key(one, handles) for one in (value.start, value.stop, value.step)])
        if isinstance(value, core.dtype):
            return (core.dtype, self._type(value))
        if kind is self.function:
            return (kind, id(value))
        raise UnknownError

    # ------------------------------------------------------------ calls

    def call(self, name: Any, function: Callable[..., Any], args: Any, options: Any, watched: Any = None) -> Any:
        """`function(*args, **options)`, played where it can be. name: of the function, for ever. watched: its code."""
        recorder = self.recorder
        if self.off:
            return function(*args, **options)
        if self._vain.get(name, 0) > _VAIN:
            if recorder is not None:
                recorder.broken |= watched is not None
            return function(*args, **options)
        handles: list[Any] = []
        try:
            key = (
                name,
                *[self._key(one, handles) for one in args],
                *[(word, self._key(one, handles)) for word, one in options.items()],
                # a tape of arguments that are one tensor cannot tell them apart
                *_twice(handles),
            )
        except UnknownError:
            return function(*args, **options)
        root = self._tapes.get(key)
        if root is _DYNAMIC:
            return function(*args, **options)
        if root is not None:
            lines: list[Line] = []
            values = handles.copy()
            result = play(root, values) if recorder is None else replay(root, values, lines)
            if result is not UNSEEN:
                self._vain[name] = 0
                self.played += 1
                if recorder is not None:
                    recorder.lines += lines
                return result
        return self._recorded(key, function, args, options, handles, watched)

    def _recorded(self, key: Any, function: Any, args: Any, options: Any, handles: list[Any], watched: Any) -> Any:
        self._vain[key[0]] = self._vain.get(key[0], 0) + 1
        if watched is not None:
            self._watch(watched)
        outer, recorder = self.recorder, Recorder(self.builder, self.handle)
        self.recorder = self.semantic.builder = recorder
        try:
            result = function(*args, **options)
        finally:
            self.recorder, self.semantic.builder = outer, outer or self.builder
        if outer is not None:
            outer.lines += recorder.lines
            outer.broken |= recorder.broken
        if recorder.broken:
            self._tapes[key] = _DYNAMIC
            return result
        try:
            Writer(self.core, self.handle, handles).write(recorder.lines, result, self._tapes.setdefault(key, Node()))
        except UnknownError:
            self._tapes[key] = _DYNAMIC
        return result

    def asked(self, tensor: Any, question: Callable[[Any], Any]) -> None:
        """A tensor's value was asked for."""
        if self.recorder is not None:
            self.recorder.question(tensor.handle, question)

    def printed(self) -> None:
        """A tensor's value was shown."""
        if self.recorder is not None:
            self.recorder.broken = True

    def step(self, function: Callable[[list[Any]], list[Any]], tensors: list[Any]) -> list[Any]:
        """Run a step from tensors to tensors that does not ask the builder; recorded as a whole."""
        recorder = self.recorder
        if recorder is None:
            return function(tensors)
        tensor, types = self.core.tensor, [one.type for one in tensors]

        def again(*handles: Any) -> tuple[Any, ...]:
            given = [tensor(handle, type_) for handle, type_ in zip(handles, types, strict=True)]
            before, self.recorder, self.semantic.builder = self.recorder, None, self.builder
            try:
                return tuple(one.handle for one in function(given))
            finally:
                self.recorder, self.semantic.builder = before, before or self.builder

        self.recorder, self.semantic.builder = None, self.builder
        try:
            made = function(tensors)
        finally:
            self.recorder, self.semantic.builder = recorder, recorder
        handles = tuple(one.handle for one in tensors)
        recorder.lines.append(Line(again, handles, tuple(one.handle for one in made), lasting=True))
        return made

    # ------------------------------------------------------------ what names mean

    def _watch(self, function: Any) -> None:
        """Remember what every name means that a function may read, and those that it calls."""
        if id(function) in self._read:
            return
        read: list[tuple[dict[str, Any], str, Any]] = []
        self._read[id(function)] = function, read
        names, todo = set(), [function.__code__]
        while todo:
            code = todo.pop()
            names.update(code.co_names)
            todo += [one for one in code.co_consts if isinstance(one, CodeType)]
        spaces = [function.__globals__]
        spaces += [
            vars(value)
            for value in map(function.__globals__.get, names)
            if isinstance(value, ModuleType) and not value.__name__.startswith("triton")
        ]
        for space in spaces:
            for name in names & space.keys():
                value = space[name]
                read.append((space, name, value))
                if isinstance(value, self.function):
                    self._watch(value.fn)

    def check_names(self) -> None:
        """Forget everything if a name means something else than when a tape was made."""
        if all(space.get(name) is value for _, read in self._read.values() for space, name, value in read):
            return
        self.forget()

    def forget(self) -> None:
        """Have no tapes."""
        self._tapes.clear()
        self._read.clear()
        self._vain.clear()


def _twice(handles: list[Any]) -> list[int]:
    """For each handle the place where it comes first; nothing if all are different ones."""
    ids = [id(handle) for handle in handles]
    return [] if len({*ids}) == len(ids) else [ids.index(one) for one in ids]


PLAYING: Tapes | None = None
"""What plays now."""


def play_tapes() -> None:
    """Make Triton's interpreter record and play, unless its internals are others than those of the releases we know."""
    global PLAYING  # noqa: PLW0603 - one process has one interpreter
    from triton.language import core
    from triton.runtime import interpreter

    needed = (
        "_LangPatchScope",
        "interpreter_builder",
        "interpreter_semantic",
        "_patch_attr",
        "_patch_lang_tensor",
        "GridExecutor",
    )
    if not all(hasattr(interpreter, name) for name in needed):
        return
    PLAYING = tapes = Tapes(interpreter, core)
    _play_operations(tapes, interpreter)
    _play_functions(tapes, interpreter)
    _play_reductions(tapes, interpreter)


def _play_operations(tapes: Tapes, interpreter: Any) -> None:
    """Operations of the language, and the questions for a tensor's value."""
    made: dict[Any, Any] = {}
    patch_tensor, semantic = interpreter._patch_lang_tensor, interpreter.interpreter_semantic

    def patch_attr(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        if member not in made:

            def plain(*args: Any, **options: Any) -> Any:
                return member(*args, **options, _semantic=semantic)

            def played(*args: Any, **options: Any) -> Any:
                options.pop("_semantic", None)
                return tapes.call(member, plain, args, options)

            made[member] = played
        scope.set_attr(obj, name, made[member])

    def patch_lang_tensor(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        _notice_questions(tapes, tensor, scope)

    interpreter._patch_attr = patch_attr
    interpreter._patch_lang_tensor = patch_lang_tensor


def _notice_questions(tapes: Tapes, tensor: Any, scope: Any) -> None:
    """Note in a tape that a tensor's value was asked for."""
    truth, index = tensor.__bool__, tensor.__index__

    def true(self: Any) -> Any:
        # a block is true whatever is in it
        if self.handle.data.size == 1:
            tapes.asked(self, _truth)
        return truth(self)

    def number(self: Any) -> Any:
        tapes.asked(self, _number)
        return index(self)

    def shown(self: Any) -> str:
        tapes.printed()
        return repr(self.handle.data)

    for name, new in (("__bool__", true), ("__index__", number), ("__repr__", shown), ("__str__", shown)):
        scope.set_attr(tensor, name, new)


def _truth(handle: Any) -> bool:
    return bool(handle.data)


def _number(handle: Any) -> int:
    return int(handle.data.squeeze())


def _play_functions(tapes: Tapes, interpreter: Any) -> None:
    """Device functions and kernels."""
    function, executor = interpreter.InterpretedFunction, interpreter.GridExecutor
    call, start, run = function.__call__, executor.__init__, executor.__call__
    kernels: dict[Any, Any] = {}

    def call_device(self: Any, *args: Any, **options: Any) -> Any:
        return tapes.call(self, functools.partial(call, self), args, options, self.fn)

    def start_grid(self: Any, fn: Any, *args: Any, **options: Any) -> None:
        start(self, fn, *args, **options)
        self.fn = kernels.setdefault(fn, _as_kernel(tapes, fn))

    def run_grid(self: Any, *args: Any, **options: Any) -> None:
        tapes.check_names()
        run(self, *args, **options)

    function.__call__ = call_device
    executor.__init__ = start_grid
    executor.__call__ = run_grid


def _as_kernel(tapes: Tapes, fn: Any) -> Any:
    @functools.wraps(fn)
    def kernel(**args: Any) -> Any:
        return tapes.call(fn, fn, (), args, fn)

    kernel.__signature__ = inspect.signature(fn)  # type: ignore[attr-defined] # read by inspect
    return kernel


def _play_reductions(tapes: Tapes, interpreter: Any) -> None:
    """Reductions and scans, which compute with numpy themselves."""
    of = interpreter.ReduceScanOpInterface
    apply = of.apply

    def applied(self: Any, given: Any) -> Any:
        if not isinstance(given, tuple):
            return applied(self, (given,))[0]
        return tuple(tapes.step(lambda tensors: list(apply(self, tuple(tensors))), list(given)))

    of.apply = applied

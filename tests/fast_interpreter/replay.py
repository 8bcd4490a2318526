"""Triton's interpreter without its type checks: each function is recorded once and replayed afterwards.

For every `a + b` of a kernel the interpreter finds out again which types the operands have, to which type they are
promoted and how they are broadcast. That takes a hundred times as long as numpy's addition. The answers follow from
types and constants alone. So the first call of a function (a kernel, a device function, an operation of the language)
with given types and constants runs as always, and each step that it requests from the interpreter's builder is
recorded. Later calls replay the steps on their own numbers. Where a function reads the value of a tensor (a branch, a
loop to a loaded bound), the recording branches. An answer that was never seen makes the function run and be recorded
again, which is safe as long as nothing has been stored by then.

A recording contains only what was seen. A function that reads a value after a store, or uses numbers that came from
elsewhere, is not recorded for these types and runs as always. The functions that it calls still have recordings. All
recordings are dropped as soon as a name that a recorded function may read means something else, for example when a test
replaces a function by a mutant.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from operator import is_
from types import CodeType, ModuleType
from typing import Any

from tests.fast_interpreter.recording import (
    UNKNOWN_ANSWER,
    RecordedStep,
    RecordingNode,
    RecordingWriter,
    StepRecorder,
    UnknownError,
    replay,
    replay_into,
)

_NOT_RECORDABLE = object()
"""Instead of a recording: the function cannot be recorded for these types."""
_MAX_UNUSED = 200
"""A function that gets this many new recordings in a row without one replay is recorded no more."""


class Recordings:
    """All recordings of this process. It decides per call whether to record, to replay or to run as always.

    disabled: run everything as always. replayed: number of calls that were replayed, for tests.
    """

    def __init__(self, interpreter: Any, core: Any) -> None:
        self.builder, self.semantic = interpreter.interpreter_builder, interpreter.interpreter_semantic
        self.handle, self.core = interpreter.TensorHandle, core
        self.function = interpreter.InterpretedFunction
        self.recorder: StepRecorder | None = None
        self._trees: dict[Any, Any] = {}
        self._types: dict[Any, int] = {}
        self._read: dict[int, Any] = {}
        self._watched: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}
        self._unused: dict[Any, int] = {}
        self._launch: tuple[list[Any], tuple[Any, list[Any]]] | None = None
        self.disabled, self.replayed = False, 0

    # ------------------------------------------------------------ keys

    def _type(self, type_: Any) -> int:
        """Number of a type. Equal types have the same number."""
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

    def _key(self, value: Any, handles: list[Any]) -> Any:  # noqa: PLR0911 - one line per kind
        """The part of an argument that a recording may depend on. Handles of tensors are appended to `handles`."""
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
            return (kind, *[self._key(item, handles) for item in value])
        if kind is core.tuple and value.type.fields is None:
            return (kind, *[self._key(item, handles) for item in value.values])
        if kind is slice:
            return (kind, *[self._key(item, handles) for item in (value.start, value.stop, value.step)])
        if isinstance(value, core.dtype):
            return (core.dtype, self._type(value))
        if kind is self.function:
            return (kind, id(value))
        raise UnknownError

    # ------------------------------------------------------------ calls

    def call(
        self, name: Any, function: Callable[..., Any], args: Any, options: Any, device_function: Any = None
    ) -> Any:
        """Return `function(*args, **options)`, replayed where possible.

        name: identifies the function for the whole process.
        device_function: the Python function whose names are watched; None for operations of the language.
        """
        recorder = self.recorder
        if self.disabled:
            return function(*args, **options)
        if self._unused.get(name, 0) > _MAX_UNUSED:
            if recorder is not None:
                recorder.broken |= device_function is not None
            return function(*args, **options)
        is_program = name is device_function
        key, handles = self._launch_key(name, options) if is_program else self._call_key(name, args, options)
        if key is None:
            return function(*args, **options)
        root = self._trees.get(key)
        if root is _NOT_RECORDABLE:
            return function(*args, **options)
        if root is not None:
            steps: list[RecordedStep] = []
            values = handles.copy()
            result = replay(root, values) if recorder is None else replay_into(root, values, steps)
            if result is not UNKNOWN_ANSWER:
                self._unused[name] = 0
                self.replayed += 1
                if recorder is not None:
                    recorder.steps += steps
                return result
        return self._recorded(key, function, args, options, handles, device_function)

    def _call_key(self, name: Any, args: Any, options: Any) -> tuple[Any, list[Any]]:
        """The key of a call's recording, and the handles of its tensors; a key of None for what cannot be recorded."""
        handles: list[Any] = []
        try:
            key = (
                name,
                *[self._key(item, handles) for item in args],
                *[(word, self._key(item, handles)) for word, item in options.items()],
                # a recording of two arguments that are one tensor cannot tell them apart
                *_repeated_handles(handles),
            )
        except UnknownError:
            return None, handles
        return key, handles

    def _launch_key(self, kernel: Any, options: dict[str, Any]) -> tuple[Any, list[Any]]:
        """`_call_key` of a program, which all programs of a launch share: they have the same arguments."""
        values = [kernel, *options.values()]
        if self._launch is None or len(values) != len(self._launch[0]) or not all(map(is_, values, self._launch[0])):
            self._launch = values, self._call_key(kernel, (), options)
        return self._launch[1]

    def _recorded(
        self, key: Any, function: Any, args: Any, options: Any, handles: list[Any], device_function: Any
    ) -> Any:
        self._unused[key[0]] = self._unused.get(key[0], 0) + 1
        if device_function is not None:
            self._watch_names(device_function)
        outer, recorder = self.recorder, StepRecorder(self.builder, self.handle)
        self.recorder = self.semantic.builder = recorder
        try:
            result = function(*args, **options)
        finally:
            self.recorder, self.semantic.builder = outer, outer or self.builder
        if outer is not None:
            outer.steps += recorder.steps
            outer.broken |= recorder.broken
        if recorder.broken:
            self._trees[key] = _NOT_RECORDABLE
            return result
        try:
            tree = self._trees.setdefault(key, RecordingNode())
            RecordingWriter(self.core, self.handle, handles).write(recorder.steps, result, tree)
        except UnknownError:
            self._trees[key] = _NOT_RECORDABLE
        return result

    def record_question(self, tensor: Any, question: Callable[[Any], Any]) -> None:
        """Record that a function read the value of a tensor."""
        if self.recorder is not None:
            self.recorder.question(tensor.handle, question)

    def record_print(self) -> None:
        """A function printed the value of a tensor: it cannot be recorded."""
        if self.recorder is not None:
            self.recorder.broken = True

    def record_whole(self, function: Callable[[list[Any]], list[Any]], tensors: list[Any]) -> list[Any]:
        """Run a step from tensors to tensors that does not use the builder, and record it as one step."""
        recorder = self.recorder
        if recorder is None:
            return function(tensors)
        tensor, types = self.core.tensor, [item.type for item in tensors]

        def run_whole(*handles: Any) -> tuple[Any, ...]:
            inputs = [tensor(handle, type_) for handle, type_ in zip(handles, types, strict=True)]
            outer, self.recorder, self.semantic.builder = self.recorder, None, self.builder
            try:
                return tuple(item.handle for item in function(inputs))
            finally:
                self.recorder, self.semantic.builder = outer, outer or self.builder

        self.recorder, self.semantic.builder = None, self.builder
        try:
            results = function(tensors)
        finally:
            self.recorder, self.semantic.builder = recorder, recorder
        handles = tuple(item.handle for item in tensors)
        recorder.steps.append(RecordedStep(run_whole, handles, tuple(item.handle for item in results), pure=True))
        return results

    # ------------------------------------------------------------ what names mean

    def _watch_names(self, function: Any) -> None:
        """Remember what every name means that a function, or a function that it calls, may read."""
        if id(function) in self._read:
            return
        self._read[id(function)] = function
        names, todo = set(), [function.__code__]
        while todo:
            code = todo.pop()
            names.update(code.co_names)
            todo += [item for item in code.co_consts if isinstance(item, CodeType)]
        spaces = [function.__globals__]
        spaces += [
            vars(value)
            for value in map(function.__globals__.get, names)
            if isinstance(value, ModuleType) and not value.__name__.startswith("triton")
        ]
        for space in spaces:
            watched = self._watched.setdefault(id(space), (space, {}))[1]
            for name in names & space.keys():
                value = watched.setdefault(name, space[name])
                if isinstance(value, self.function):
                    self._watch_names(value.fn)

    def start_launch(self) -> None:
        """Drop all recordings if a name means something else than when a recording was made."""
        self._launch = None
        if not all(all(map(is_, map(space.get, read), read.values())) for space, read in self._watched.values()):
            self.forget()

    def forget(self) -> None:
        """Drop all recordings."""
        self._trees.clear()
        self._read.clear()
        self._watched.clear()
        self._unused.clear()


def _repeated_handles(handles: list[Any]) -> list[int]:
    """For each handle the index of its first occurrence. An empty list if all handles differ."""
    ids = [id(handle) for handle in handles]
    return [] if len({*ids}) == len(ids) else [ids.index(item) for item in ids]


RECORDINGS: Recordings | None = None
"""The recordings of this process; None where the interpreter is not patched."""


def replay_functions() -> None:
    """Make Triton's interpreter record and replay, unless this release has changed its internals."""
    global RECORDINGS  # noqa: PLW0603 - one process has one interpreter
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
    RECORDINGS = recordings = Recordings(interpreter, core)
    _replay_operations(recordings, interpreter)
    _replay_functions(recordings, interpreter)
    _replay_reductions(recordings, interpreter)


def _replay_operations(recordings: Recordings, interpreter: Any) -> None:
    """Replay operations of the language, and record where the value of a tensor is read."""
    replayed_operations: dict[Any, Any] = {}
    patch_tensor, semantic = interpreter._patch_lang_tensor, interpreter.interpreter_semantic

    def patch_attr(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        if member not in replayed_operations:

            def plain(*args: Any, **options: Any) -> Any:
                return member(*args, **options, _semantic=semantic)

            def replayed(*args: Any, **options: Any) -> Any:
                options.pop("_semantic", None)
                return recordings.call(member, plain, args, options)

            replayed_operations[member] = replayed
        scope.set_attr(obj, name, replayed_operations[member])

    def patch_lang_tensor(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        _notice_questions(recordings, tensor, scope)

    interpreter._patch_attr = patch_attr
    interpreter._patch_lang_tensor = patch_lang_tensor


def _notice_questions(recordings: Recordings, tensor: Any, scope: Any) -> None:
    """Record where the value of a tensor is read."""
    truth, index = tensor.__bool__, tensor.__index__

    def true(self: Any) -> Any:
        # a block is true whatever is in it
        if self.handle.data.size == 1:
            recordings.record_question(self, _truth)
        return truth(self)

    def number(self: Any) -> Any:
        recordings.record_question(self, _number)
        return index(self)

    def shown(self: Any) -> str:
        recordings.record_print()
        return repr(self.handle.data)

    for name, new in (("__bool__", true), ("__index__", number), ("__repr__", shown), ("__str__", shown)):
        scope.set_attr(tensor, name, new)


def _truth(handle: Any) -> bool:
    return bool(handle.data)


def _number(handle: Any) -> int:
    return int(handle.data.squeeze())


def _replay_functions(recordings: Recordings, interpreter: Any) -> None:
    """Replay device functions and kernels."""
    function, executor = interpreter.InterpretedFunction, interpreter.GridExecutor
    call, start, run = function.__call__, executor.__init__, executor.__call__
    kernels: dict[Any, Any] = {}

    def call_device(self: Any, *args: Any, **options: Any) -> Any:
        return recordings.call(self, functools.partial(call, self), args, options, self.fn)

    def start_grid(self: Any, fn: Any, *args: Any, **options: Any) -> None:
        start(self, fn, *args, **options)
        self.fn = kernels.setdefault(fn, _as_kernel(recordings, fn))

    def run_grid(self: Any, *args: Any, **options: Any) -> None:
        recordings.start_launch()
        run(self, *args, **options)

    function.__call__ = call_device
    executor.__init__ = start_grid
    executor.__call__ = run_grid


def _as_kernel(recordings: Recordings, fn: Any) -> Any:
    @functools.wraps(fn)
    def kernel(**args: Any) -> Any:
        return recordings.call(fn, fn, (), args, fn)

    kernel.__signature__ = inspect.signature(fn)  # type: ignore[attr-defined] # read by inspect
    return kernel


def _replay_reductions(recordings: Recordings, interpreter: Any) -> None:
    """Replay reductions and scans, which compute with numpy directly."""
    of = interpreter.ReduceScanOpInterface
    apply = of.apply

    def applied(self: Any, inputs: Any) -> Any:
        if not isinstance(inputs, tuple):
            return applied(self, (inputs,))[0]
        return tuple(recordings.record_whole(lambda tensors: list(apply(self, tuple(tensors))), list(inputs)))

    of.apply = applied

"""Recordings of what a function does to numbers, and how to replay them. `replay.py` says why."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

_CHANGING_STEPS = frozenset({"create_get_program_id", "create_get_num_programs"})
"""Builder steps without operands whose answer changes from call to call."""
_EFFECT_WORDS = ("store", "atomic", "print", "assert", "assume", "scatter")
"""Words in the names of builder steps that have an effect besides their answer."""
_MEMORY_WORDS = ("load", "descriptor")
"""Words in the names of builder steps whose answer depends on memory, not only on operands."""
UNKNOWN_ANSWER = object()
"""Result of a replay that reached an answer which the recording has never seen."""
_MAX_BYTES = 1 << 26
"""Limit of the bytes that one recording may make: all its tensors are alive until its end."""


class UnknownError(Exception):
    """A value that no recording can represent."""


class RecordedStep(NamedTuple):
    """One event: a builder step, a constant (step is None) or a question for the value of a tensor."""

    step: Any
    args: tuple[Any, ...] = ()
    out: Any = None
    pure: bool = False  # its answer follows from its operands
    effect: bool = False  # it has an effect besides its answer
    question: Any = None  # for a question: the function applied to `out`, and its answer
    answer: Any = None


class RecordingNode:
    """The steps up to the next question or up to the end. After a question there is one node per answer."""

    def __init__(self) -> None:
        self.constants: list[Any] = []
        self.steps: list[tuple[Callable[..., Any], Callable[[list[Any]], Sequence[Any]], bool, bool]] = []
        self.ask: tuple[int, Callable[[Any], Any]] | None = None
        self.next: dict[Any, RecordingNode] = {}
        self.result: Callable[[list[Any]], Any] = lambda _: None


def replay(node: RecordingNode | None, values: list[Any]) -> Any:
    """Run the recorded steps on `values`, the handles of a call's arguments. Results are appended to `values`."""
    add = values.append
    while node is not None:
        values += node.constants
        for step, read, _, _ in node.steps:
            add(step(*read(values)))
        if node.ask is None:
            return node.result(values)
        at, question = node.ask
        node = node.next.get(question(values[at]))
    return UNKNOWN_ANSWER


def replay_into(node: RecordingNode | None, values: list[Any], steps: list[RecordedStep]) -> Any:
    """Like `replay`, and append every step to `steps`, for the recording of the caller."""
    while node is not None:
        values += node.constants
        steps += [RecordedStep(None, out=item) for item in node.constants]
        for step, read, pure, effect in node.steps:
            args = tuple(read(values))
            values.append(step(*args))
            if step not in _PICK:
                steps.append(RecordedStep(step, args, values[-1], pure, effect))
        if node.ask is None:
            return node.result(values)
        at, question = node.ask
        answer = question(values[at])
        steps.append(RecordedStep(None, out=values[at], question=question, answer=answer))
        node = node.next.get(answer)
    return UNKNOWN_ANSWER


class StepRecorder:
    """Replaces the interpreter's builder while a function runs, and records every step that is requested."""

    def __init__(self, builder: Any, handle: Any) -> None:
        self._builder, self._handle = builder, handle
        self.steps: list[RecordedStep] = []
        self.broken = False

    def __getattr__(self, name: str) -> Any:
        builder_attribute = getattr(self._builder, name)
        if not name.startswith(("create_", "get_")) or not callable(builder_attribute):
            return builder_attribute
        effect = any(word in name for word in _EFFECT_WORDS)
        pure = not effect and name not in _CHANGING_STEPS and not any(word in name for word in _MEMORY_WORDS)

        def recorded_step(*args: Any, **options: Any) -> Any:
            out = builder_attribute(*args, **options)
            if any(isinstance(item, self._handle) for item in options.values()):
                self.broken = True
            step = functools.partial(builder_attribute, **options) if options else builder_attribute
            self.steps.append(RecordedStep(step, args, out, pure, effect))
            return out

        setattr(self, name, recorded_step)
        return recorded_step

    def question(self, handle: Any, question: Callable[[Any], Any]) -> None:
        """Record that the function read the value of a tensor."""
        self.steps.append(RecordedStep(None, out=handle, question=question, answer=question(handle)))


class RecordingWriter:
    """Turns recorded steps into nodes, in which every value has a number."""

    def __init__(self, core: Any, handle: Any, arguments: list[Any]) -> None:
        self.core, self.handle = core, handle
        self.place: dict[int, int] = {}
        for i, item in enumerate(arguments):
            self.place.setdefault(id(item), i)
        self.made = set(self.place)
        self.constant: dict[int, Any] = {}
        self.count, self.bytes = len(arguments), 0

    def write(self, steps: list[RecordedStep], result: Any, root: RecordingNode) -> None:
        """Add the steps of one run to the tree of earlier runs."""
        nodes, part, stored = [], list[RecordedStep](), False
        for line in steps:
            if line.question is None:
                part.append(line)
                stored |= line.effect
                continue
            if stored:
                raise UnknownError
            nodes.append((self._node(part, line), line))
            part = []
        end = self._node(part, None, result)
        if self.bytes > _MAX_BYTES:
            raise UnknownError
        for node, line in nodes:
            if root.ask is None:
                vars(root).update(vars(node))
            elif root.ask != node.ask or len(root.steps) != len(node.steps):
                raise UnknownError
            root = root.next.setdefault(line.answer, RecordingNode())
        vars(root).update(vars(end))

    def _node(self, recorded: list[RecordedStep], question: RecordedStep | None, result: Any = None) -> RecordingNode:
        node, steps = RecordingNode(), list[RecordedStep]()
        for line in recorded:
            results = line.out if isinstance(line.out, tuple) else (line.out,)
            if line.step is None:
                self.constant[id(line.out)] = line.out
                continue
            known = [self._known(arg) for arg in line.args if isinstance(arg, self.handle)]
            handles = [item for item in results if isinstance(item, self.handle)]
            if not all(arg is None or _is_recordable(arg, self.handle) for arg in line.args):
                raise UnknownError
            if not handles and not line.effect:
                if line.out is not None and known:
                    raise UnknownError
                continue  # a type or a cache policy has no number
            if line.pure and not any(known):
                self.constant.update({id(item): item for item in handles})
                continue
            steps.append(line)
            self.made.update(id(item) for item in handles)
        # Constants come first, one number per read: numbers follow from the steps, not from the identity of objects.
        outputs: list[Any] = []
        shape = self._shape(result, outputs) if question is None else None
        ends = outputs if question is None else [question.out]
        reads = [[self._constant(node, arg) for arg in line.args] for line in steps]
        last = [self._constant(node, item) for item in ends]
        self.count += len(node.constants)
        for line, places in zip(steps, reads, strict=True):
            numbers = tuple(self.place[id(a)] if i is None else i for a, i in zip(line.args, places, strict=True))
            node.steps.append((line.step, _reading(numbers), line.pure, line.effect))
            self._number_outputs(node, line.out)
        end_numbers = [self.place[id(item)] if i is None else i for item, i in zip(ends, last, strict=True)]
        if question is None:
            node.result = self._reader(shape, iter(end_numbers))
        else:
            node.ask = (end_numbers[0], question.question)
        return node

    def _constant(self, node: RecordingNode, value: Any) -> int | None:
        """Number of a constant from now on. None for a value that an argument or a step gives."""
        if isinstance(value, self.handle):
            if id(value) in self.made:
                return None
            if id(value) not in self.constant:
                raise UnknownError
        node.constants.append(value)
        return self.count + len(node.constants) - 1

    def _number_outputs(self, node: RecordingNode, out: Any) -> None:
        at, self.count = self.count, self.count + 1
        if not isinstance(out, tuple):
            if isinstance(out, self.handle):
                self.place.setdefault(id(out), at)
                self.bytes += out.data.nbytes
            return
        for i, item in enumerate(out):
            node.steps.append((_PICK[i], _reading((at,)), False, False))
            self.place.setdefault(id(item), self.count)
            self.bytes += item.data.nbytes
            self.count += 1

    def _known(self, handle: Any) -> bool:
        """Whether a handle is an argument or is computed from one. Otherwise it is a constant."""
        if id(handle) in self.constant:
            return False
        if id(handle) not in self.made:
            raise UnknownError
        return True

    def _shape(self, result: Any, outputs: list[Any]) -> Any:
        """Structure of the result of a call. The handles of its tensors are appended to `outputs`."""
        if type(result) is self.core.tensor and result.handle is not None:
            outputs.append(result.handle)
            return (_TENSOR, result.type)
        if type(result) is tuple or type(result) is list:
            return (type(result), [self._shape(item, outputs) for item in result])
        if type(result) is self.core.tuple and result.type.fields is None:
            return (self.core.tuple, [self._shape(item, outputs) for item in result.values])
        # a store returns a tensor without a handle
        plain = (bool, int, float, str, self.core.constexpr, self.core.dtype, self.core.tensor)
        if result is None or isinstance(result, plain):
            return (_CONSTANT, result)
        raise UnknownError

    def _reader(self, shape: Any, places: Iterator[int]) -> Callable[[list[Any]], Any]:
        tensor = self.core.tensor
        if shape[0] is _TENSOR:
            at, type_ = next(places), shape[1]
            return lambda values: tensor(values[at], type_)
        if shape[0] is _CONSTANT:
            return lambda _: shape[1]
        make, parts = shape[0], [self._reader(item, places) for item in shape[1]]
        return lambda values: make([part(values) for part in parts])


_TENSOR, _CONSTANT = object(), object()
_PICK = [lambda outputs, i=i: outputs[i] for i in range(8)]


def _reading(numbers: tuple[int, ...]) -> Callable[[list[Any]], Sequence[Any]]:
    """A function of C, which takes half of the time of a comprehension, from all values to those with these numbers."""
    if len(numbers) > 1:
        return itemgetter(*numbers)
    return itemgetter(slice(numbers[0], numbers[0] + 1) if numbers else slice(0))


def _is_recordable(value: Any, handle: Any) -> bool:
    """Whether a value is a handle, or contains no handle."""
    if isinstance(value, (list, tuple)):
        return all(_is_recordable(item, handle) and not isinstance(item, handle) for item in value)
    return not hasattr(type(value), "materialize_pointers")

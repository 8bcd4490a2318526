"""What a function does to numbers, written down: see `tests/tapes.py`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

_VOLATILE = frozenset({"create_get_program_id", "create_get_num_programs"})
"""Steps without operands whose answer is another one each time."""
_EFFECTS = ("store", "atomic", "print", "assert", "assume", "scatter")
"""Words in the names of steps that do something."""
_MEMORY = ("load", "descriptor")
"""Words in the names of steps whose answer depends on more than their operands."""
UNSEEN = object()
"""Instead of a result: a tape came to an answer that it does not know."""
_LARGEST = 1 << 26
"""Bytes that the steps of one tape may make, since all of them are alive until its end."""


class UnknownError(Exception):
    """A value that no tape can stand for."""


class Line(NamedTuple):
    """One thing seen: a step, a constant (no step) or a question for a value."""

    step: Any
    args: tuple[Any, ...] = ()
    out: Any = None
    lasting: bool = False  # its answer follows from its operands
    effect: bool = False  # it does something besides answering
    question: Any = None  # instead: what was asked about `out`, and the answer
    answer: Any = None


class Node:
    """Steps up to a question or to the end."""

    def __init__(self) -> None:
        self.constants: list[Any] = []
        self.steps: list[tuple[Callable[..., Any], tuple[int, ...], bool, bool]] = []
        self.ask: tuple[int, Callable[[Any], Any]] | None = None
        self.next: dict[Any, Node] = {}
        self.result: Callable[[list[Any]], Any] = lambda _: None


def play(node: Node | None, values: list[Any]) -> Any:
    """Do the steps on the handles of a call's arguments; what is made is added to `values`."""
    add = values.append
    while node is not None:
        values += node.constants
        for step, reads, _, _ in node.steps:
            add(step(*[values[i] for i in reads]))
        if node.ask is None:
            return node.result(values)
        at, question = node.ask
        node = node.next.get(question(values[at]))
    return UNSEEN


def replay(node: Node | None, values: list[Any], lines: list[Line]) -> Any:
    """The same, and say in `lines` what was done: for the tape of the caller."""
    while node is not None:
        values += node.constants
        lines += [Line(None, out=one) for one in node.constants]
        for step, reads, lasting, effect in node.steps:
            args = tuple(values[i] for i in reads)
            values.append(step(*args))
            if step not in _PICK:
                lines.append(Line(step, args, values[-1], lasting, effect))
        if node.ask is None:
            return node.result(values)
        at, question = node.ask
        answer = question(values[at])
        lines.append(Line(None, out=values[at], question=question, answer=answer))
        node = node.next.get(answer)
    return UNSEEN


class Recorder:
    """Stands for the interpreter's builder while a function runs, and writes down what it is asked for."""

    def __init__(self, builder: Any, handle: Any) -> None:
        self._builder, self._handle = builder, handle
        self.lines: list[Line] = []
        self.broken = False

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._builder, name)
        if not name.startswith(("create_", "get_")) or not callable(found):
            return found
        effect = any(word in name for word in _EFFECTS)
        lasting = not effect and name not in _VOLATILE and not any(word in name for word in _MEMORY)

        def asked(*args: Any, **options: Any) -> Any:
            out = found(*args, **options)
            if any(isinstance(one, self._handle) for one in options.values()):
                self.broken = True
            step = functools.partial(found, **options) if options else found
            self.lines.append(Line(step, args, out, lasting, effect))
            return out

        setattr(self, name, asked)
        return asked

    def question(self, handle: Any, question: Callable[[Any], Any]) -> None:
        """A tensor's value was asked for."""
        self.lines.append(Line(None, out=handle, question=question, answer=question(handle)))


class Writer:
    """Makes nodes of lines: numbers for what they read and make."""

    def __init__(self, core: Any, handle: Any, given: list[Any]) -> None:
        self.core, self.handle = core, handle
        self.place: dict[int, int] = {}
        for i, one in enumerate(given):
            self.place.setdefault(id(one), i)
        self.made = set(self.place)
        self.constant: dict[int, Any] = {}
        self.count, self.bytes = len(given), 0

    def write(self, lines: list[Line], result: Any, root: Node) -> None:
        """Add what was seen to the tree of what was seen before."""
        nodes, part, stored = [], list[Line](), False
        for line in lines:
            if line.question is None:
                part.append(line)
                stored |= line.effect
                continue
            if stored:
                raise UnknownError
            nodes.append((self._node(part, line), line))
            part = []
        end = self._node(part, None, result)
        if self.bytes > _LARGEST:
            raise UnknownError
        for made, line in nodes:
            if root.ask is None:
                vars(root).update(vars(made))
            elif root.ask != made.ask or len(root.steps) != len(made.steps):
                raise UnknownError
            root = root.next.setdefault(line.answer, Node())
        vars(root).update(vars(end))

    def _node(self, lines: list[Line], question: Line | None, result: Any = None) -> Node:
        node, steps = Node(), []
        for line in lines:
            made = line.out if isinstance(line.out, tuple) else (line.out,)
            if line.step is None:
                self.constant[id(line.out)] = line.out
                continue
            known = [self._known(arg) for arg in line.args if isinstance(arg, self.handle)]
            handles = [one for one in made if isinstance(one, self.handle)]
            if not all(arg is None or _plain(arg, self.handle) for arg in line.args):
                raise UnknownError
            if not handles and not line.effect:
                if line.out is not None and known:
                    raise UnknownError
                continue  # a type, a policy of a cache: no number
            if line.lasting and not any(known):
                self.constant.update({id(one): one for one in handles})
                continue
            steps.append(line)
            self.made.update(id(one) for one in handles)
        # constants come first, each as often as it is read: numbers follow from the steps, not from what is one object
        outputs: list[Any] = []
        shape = self._shape(result, outputs) if question is None else None
        ends = outputs if question is None else [question.out]
        reads = [[self._constant(node, arg) for arg in line.args] for line in steps]
        last = [self._constant(node, one) for one in ends]
        self.count += len(node.constants)
        for line, places in zip(steps, reads, strict=True):
            numbers = tuple(self.place[id(a)] if i is None else i for a, i in zip(line.args, places, strict=True))
            node.steps.append((line.step, numbers, line.lasting, line.effect))
            self._made(node, line.out)
        found = [self.place[id(one)] if i is None else i for one, i in zip(ends, last, strict=True)]
        if question is None:
            node.result = self._reader(shape, iter(found))
        else:
            node.ask = (found[0], question.question)
        return node

    def _constant(self, node: Node, value: Any) -> int | None:
        """Where a constant stands from now on; None for what an argument or a step gives."""
        if isinstance(value, self.handle):
            if id(value) in self.made:
                return None
            if id(value) not in self.constant:
                raise UnknownError
        node.constants.append(value)
        return self.count + len(node.constants) - 1

    def _made(self, node: Node, out: Any) -> None:
        at, self.count = self.count, self.count + 1
        if not isinstance(out, tuple):
            if isinstance(out, self.handle):
                self.place.setdefault(id(out), at)
                self.bytes += out.data.nbytes
            return
        for i, one in enumerate(out):
            node.steps.append((_PICK[i], (at,), False, False))
            self.place.setdefault(id(one), self.count)
            self.bytes += one.data.nbytes
            self.count += 1

    def _known(self, handle: Any) -> bool:
        """Whether a handle is an argument or made of one; else it is a constant."""
        if id(handle) in self.constant:
            return False
        if id(handle) not in self.made:
            raise UnknownError
        return True

    def _shape(self, result: Any, outputs: list[Any]) -> Any:
        """What a call gives back, tensors by their handles, which are added to `outputs`."""
        if type(result) is self.core.tensor and result.handle is not None:
            outputs.append(result.handle)
            return (_TENSOR, result.type)
        if type(result) is tuple or type(result) is list:
            return (type(result), [self._shape(one, outputs) for one in result])
        if type(result) is self.core.tuple and result.type.fields is None:
            return (self.core.tuple, [self._shape(one, outputs) for one in result.values])
        # a tensor without a handle is what a store gives back
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
        make, parts = shape[0], [self._reader(one, places) for one in shape[1]]
        return lambda values: make([part(values) for part in parts])


_TENSOR, _CONSTANT = object(), object()
_PICK = [lambda made, i=i: made[i] for i in range(8)]


def _plain(value: Any, handle: Any) -> bool:
    """Whether a value is a handle, or holds none."""
    if isinstance(value, (list, tuple)):
        return all(_plain(one, handle) and not isinstance(one, handle) for one in value)
    return not hasattr(type(value), "materialize_pointers")

"""Launching again what was launched before, for a quarter of what Triton takes to find it.

Triton looks at every argument of every launch. The first launch of a form goes its way; from then on what it compiled
is given just what Triton would give it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from functools import cache
from typing import Any, NamedTuple, TypeAlias

import torch
import triton
from torch import Tensor
from triton.runtime.driver import driver

from dsv4attn.backends._triton.untyped import CompiledKernel, Kernel

__all__ = ["ALIGNMENT", "Bound", "Constants", "Form", "bound", "form_of", "is_plain", "launched", "remember", "watched"]

ALIGNMENT = 16
"""Bytes. A pointer aligned to them compiles to wider loads than one that is not."""
_PLAIN = frozenset({Tensor, torch.nn.Parameter, type(None)})
"""What a pointer may be. Others, such as tensors that stand for tensors, are for Triton to judge."""
_MOST = 1024
"""Forms of a kernel. Nobody has so many at work."""


class Constants(dict[str, Any]):
    """Constants of a kernel that nobody changes: they are known by identity, where a plain dict has to be read."""

    __slots__ = ()
    __hash__ = object.__hash__  # type: ignore[assignment]
    __eq__, __ne__ = object.__eq__, object.__ne__


class _Ready(NamedTuple):
    """A compiled form, and what its launches pass: before the grid, behind the stream, and behind the arguments.

    tail: the constants, which launchers want and skip. together: whether the arguments go as one tuple. home: what
    Triton keeps of the kernel on its device; where that is another one, so is the driver. kept: whoever unloads the
    code when nobody has it any more.
    """

    call: Callable[..., None]
    head: tuple[Any, ...]
    middle: tuple[Any, ...]
    together: bool
    tail: tuple[Any, ...]
    home: Any
    kept: Any

    def launch(self, grid: tuple[int, int, int], index: int, args: Sequence[Any]) -> None:
        stream = driver.active.get_current_stream(index)
        if self.together:
            self.call(*self.head, *grid, stream, *self.middle, (*args, *self.tail))
        else:
            self.call(*self.head, *grid, stream, *self.middle, *args, *self.tail)


class _Kernel:
    """A kernel of which pointers and constants tell the form, and its forms. pointers: how many it has, all first.

    count: of arguments. minded: pointers whose alignment compiles.
    """

    def __init__(self, kernel: Kernel, count: int, pointers: int, minded: Sequence[int]) -> None:
        self.kernel, self.count, self.pointers, self.minded = kernel, count, pointers, minded
        self.ready: dict[tuple[Any, ...], _Ready] = {}


Form: TypeAlias = tuple[_Kernel, int, tuple[Any, ...]]
"""What a launch compiles by: its kernel, the number of its device, and all that tells the kernel's forms apart."""

_kernels: dict[int, _Kernel] = {}
"""By identity, since Triton's own hash of a kernel takes its time; whoever is in here stays."""


def form_of(
    kernel: Kernel, args: Sequence[Any], constants: Mapping[str, Any], index: int, *options: object, **extra: object
) -> Form | None:
    """All that a launch on device `index` compiles by. None: there may be more, which only Triton knows.

    args: in the order of the parameters that are not in `constants`. options, extra: whatever else tells forms apart.
    """
    if torch.compiler.is_dynamo_compiling():
        return None
    known = _kernels.get(id(kernel)) or _known(kernel)
    if known is None or len(args) != known.count:
        return None
    pointers = args[: known.pointers]
    if not is_plain(pointers):
        return None
    told = constants if type(constants) is Constants else _told(constants)
    key = told, index, options, *[None if pointer is None else pointer.dtype for pointer in pointers]
    if extra:
        key = *key, *_told(extra)
    if known.minded:
        key = *key, *[pointers[i] is not None and pointers[i].data_ptr() % ALIGNMENT == 0 for i in known.minded]
    return known, index, key


def _told(items: Mapping[str, Any]) -> tuple[Any, ...]:
    """Names, values, and types of values: 1 and True are equal, and compile to different code."""
    return (*items.items(), *map(type, items.values()))


def _known(kernel: Kernel) -> _Kernel | None:
    """None for a kernel that compiles for values, or whose pointers, numbers and constants stand in another order."""
    if not isinstance(kernel, triton.JITFunction):
        return None
    order, minded = [], []
    for i, parameter in enumerate(kernel.params):
        number = parameter.annotation_type
        if parameter.is_constexpr:
            order.append(2)
        elif not number:
            order.append(0)
            minded += [] if parameter.do_not_specialize_on_alignment else [i]
        elif parameter.do_not_specialize or number.startswith("fp"):
            order.append(1)
        else:
            return None
    if order != sorted(order):
        return None
    first = order.count(0)
    known = _kernels[id(kernel)] = _Kernel(kernel, first + order.count(1), first, minded)
    return known


def launched(form: Form | None, grid: tuple[int, ...], args: Sequence[Any]) -> bool:
    """Launch a form on the current device if that is known how; else say no, and do nothing."""
    if form is None:
        return False
    known, index, key = form
    ready = known.ready.get(key)
    if ready is None or ready.home is not known.kernel.device_caches.get(index) or _watched(known.kernel):
        return False
    x, y, z = (*grid, 1, 1)[:3]
    ready.launch((x, y, z), index, args)
    return True


def is_plain(pointers: Iterable[Any]) -> bool:
    """Whether each is a tensor like any other, or None."""
    return _PLAIN.issuperset(map(type, pointers))


class Bound:
    """Launches of one form by somebody who sees for himself that it is this form: only pointers change.

    numbers: all arguments behind the pointers, the same in every launch.
    """

    __slots__ = ("_index", "_kernel", "_ready")

    def __init__(self, form: Form, ready: _Ready, numbers: Sequence[Any]) -> None:
        """Keep what every launch passes."""
        self._kernel, self._index = form[0].kernel, form[1]
        self._ready = ready._replace(tail=(*numbers, *ready.tail))

    def launch(self, programs: int, pointers: Sequence[Any]) -> bool:
        """Launch so many programs; or say no where that is Triton's to do, or the device is not the current one.

        The caller has seen that nobody traces or watches launches, that pointers are plain, and that devices and
        dtypes, which of them are None, and their alignments where the kernel minds, are those of the form.
        """
        kernel, index = self._kernel, self._index
        call, head, middle, together, tail, home, _ = self._ready
        if home is not kernel.device_caches.get(index) or kernel.pre_run_hooks:
            return False
        if _several() and driver.active.get_current_device() != index:
            return False
        stream = driver.active.get_current_stream(index)
        # as `_Ready.launch`, which would cost a call
        if together:
            call(*head, programs, 1, 1, stream, *middle, (*pointers, *tail))
        else:
            call(*head, programs, 1, 1, stream, *middle, *pointers, *tail)
        return True


@cache
def _several() -> bool:
    return torch.accelerator.device_count() > 1


def bound(form: Form | None, numbers: Sequence[Any]) -> Bound | None:
    """Launches of a form with these numbers, once it has been launched; None if it is not known how."""
    ready = None if form is None else form[0].ready.get(form[2])
    return None if form is None or ready is None else Bound(form, ready, numbers)


def remember(form: Form | None, compiled: CompiledKernel, constants: Mapping[str, Any]) -> None:
    """Know from now on what Triton has compiled and launched for a form."""
    if form is None or not _is_understood(compiled) or _watched(form[0].kernel):
        return
    known, index, key = form
    kernel = known.kernel
    tail = tuple(constants[name] for name in kernel.arg_names[known.count :])
    if len(known.ready) >= _MOST:
        known.ready.clear()
    count = len(kernel.arg_names)
    known.ready[key] = _Ready(*_road(compiled, count), tail, kernel.device_caches[index], compiled)


def _road(compiled: CompiledKernel, count: int) -> tuple[Callable[..., None], tuple[Any, ...], tuple[Any, ...], bool]:
    """How to launch what was compiled with `count` arguments: `call`, `head`, `middle` and `together` of `_Ready`.

    Triton's launcher finds out in every launch that a kernel needs no memory of its own, and hands all to a function
    of the driver. A copy of it, asked with marks for what changes, tells what it would hand over. Whatever looks at a
    mark, say to allocate so much for each program, fails at it; then, and where a launcher is built otherwise, the
    launcher itself is called.
    """
    launcher, own = compiled.run, (compiled.function, compiled.packed_metadata, None, None, None)
    told: list[tuple[Any, ...]] = []
    marks, args = tuple(object() for _ in range(4)), tuple(object() for _ in range(count))
    try:
        function, asked = launcher.launch, copy(launcher)
        asked.launch = lambda *passed: told.append(passed)
        asked(*marks, *own, *args)
        (passed,) = told
        first = passed.index(marks[0])
    except (AttributeError, LookupError, TypeError, ValueError):
        return launcher, (), own, False
    head, rest = passed[:first], passed[first + 4 :]
    if passed[first : first + 4] == marks and rest[-1:] == (args,):
        return function, head, rest[:-1], True
    if passed[first : first + 4] == marks and rest[-count:] == args:
        return function, head, rest[:-count], False
    return launcher, (), own, False


def _is_understood(compiled: CompiledKernel) -> bool:
    """Whether we have read how this Triton launches for this kind of device."""
    if not isinstance(compiled, triton.compiler.CompiledKernel):
        return False
    version = tuple(map(int, triton.__version__.split(".")[:2]))
    return (3, 6) <= version <= (3, 9) and driver.active.get_current_target().backend in ("cuda", "hip")


def _watched(kernel: Kernel) -> bool:
    """Whether somebody, such as a profiler, has asked Triton to tell of launches of a kernel."""
    return bool(kernel.pre_run_hooks) or watched()


def watched() -> bool:
    """Whether somebody has asked Triton to tell of all launches."""
    knobs = triton.knobs.runtime
    enter, leave = knobs.launch_enter_hook, knobs.launch_exit_hook
    return bool(
        (enter is not None and getattr(enter, "calls", True))
        or (leave is not None and getattr(leave, "calls", True))
        or getattr(knobs, "add_stages_inspection_hook", None) is not None
    )

"""Scratch memory with a proven bound: plan -> reserve -> lock -> views.

One growable byte buffer per arena. A call requests all views that it needs at the same time, and they are disjoint; the
next call gets the same memory again. Arenas separate a captured decode from an eager prefill.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import Protocol
from weakref import WeakSet

import torch
from attrs import field, frozen
from torch import Tensor

from dsv4attn.core.argument_checks import round_up
from dsv4attn.core.reprs import bytes_text, one_line
from dsv4attn.core.tensorspec import BufferSpec, device_of
from dsv4attn.errors import ArgumentError, CanaryError, Dsv4AttnError, WorkspaceError

__all__ = [
    "ALIGNMENT",
    "WorkspaceManager",
    "WorkspacePlan",
    "current_workspace_manager",
    "simultaneous_bytes",
    "use_workspace",
]

ALIGNMENT = 256
"""Bytes to which every view is aligned."""

_CANARY = 0xA5
_MOST_MADE = 256


def _hashable(specs: Sequence[BufferSpec]) -> tuple[BufferSpec, ...]:
    return tuple((tuple(shape), dtype) for shape, dtype in specs)


def simultaneous_bytes(specs: Sequence[BufferSpec]) -> int:
    """Bytes that `get_simultaneous` takes for these views. Zero-size views are legal and take nothing."""
    return sum(round_up(math.prod(shape) * dtype.itemsize, ALIGNMENT) for shape, dtype in specs)


@frozen
class _Place:
    """The place of a view in its arena. first, strides: in elements. start, end: in bytes."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    strides: tuple[int, ...]
    first: int
    start: int
    end: int


@lru_cache(maxsize=1024)  # requests repeat in every layer of every step
def _arranged(specs: tuple[BufferSpec, ...], guard: int) -> tuple[int, tuple[_Place, ...]]:
    """Bytes needed for all requests together, and the place of each. guard: unused bytes after every view."""
    places, start = [], 0
    for shape, dtype in specs:
        if any(n < 0 for n in shape):
            raise ArgumentError("workspace shape", expected="no negative size", actual=list(shape))
        size = math.prod(shape) * dtype.itemsize
        strides = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
        places.append(_Place(tuple(shape), dtype, strides, start // dtype.itemsize, start, start + size))
        start += round_up(size, ALIGNMENT) + (guard if size else 0)
    return start, tuple(places)


@frozen
class WorkspacePlan:
    """Upper bounds of the memory of calls within limits, in bytes. Made by `dsv4attn.plan_workspace`.

    arenas: bytes of the workspace, by arena.
    transient_bytes: most bytes of temporaries that a call holds in the framework's allocator at any moment. Zero for
       backends whose kernels write only into the workspace.
    """

    arenas: Mapping[str, int] = field(factory=dict)
    transient_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """Everything together."""
        return sum(self.arenas.values()) + self.transient_bytes

    def union(self, other: WorkspacePlan) -> WorkspacePlan:
        """A plan that covers both: layers run one after another, so the larger counts, not the sum.

        other: the other plan.
        """
        names = {*self.arenas, *other.arenas}
        arenas = {name: max(self.arenas.get(name, 0), other.arenas.get(name, 0)) for name in sorted(names)}
        return WorkspacePlan(arenas, max(self.transient_bytes, other.transient_bytes))


class Holder(Protocol):
    """An owner of views beyond the call that requested them."""

    def release(self) -> None:
        """Drop all views."""


class WorkspaceManager:
    """Views into reusable scratch memory.

    device: where the memory lives. debug: put a canary after every view and fill views with 0xFF (NaN in every
    float type used here) in each request; `check_canaries` then names the view that was overrun.

    A copy, also a pickled one, has as much memory in each arena, of its own.
    """

    def __init__(self, device: torch.device | str = "cpu", *, debug: bool = False) -> None:
        self.device, self.debug = device_of(device), debug
        self._buffers: dict[str, Tensor] = {}
        self._typed: dict[str, dict[tuple[torch.dtype, bool], Tensor]] = {}
        # views of earlier requests, by arena; they are dropped with the buffer, which they hold alive
        self._made: dict[str, dict[tuple[tuple[BufferSpec, ...], bool], tuple[Tensor, ...]]] = {}
        self._holders: WeakSet[Holder] | None = None
        self._canaries: dict[str, list[tuple[int, int, str]]] = {}
        self._locked = False

    def __getstate__(self) -> dict[str, object]:
        """What a copy has: sizes of arenas, and no memory, views or holders of this manager."""
        not_copied = ("_buffers", "_typed", "_made", "_holders", "_canaries")
        kept = {name: value for name, value in vars(self).items() if name not in not_copied}
        return {**kept, "sizes": {arena: buffer.numel() for arena, buffer in self._buffers.items()}}

    def __setstate__(self, state: dict[str, object]) -> None:
        """Make a copy, which has arenas of the same sizes in memory of its own."""
        sizes = state.pop("sizes")
        assert isinstance(sizes, dict)
        vars(self).update(state)
        self._typed, self._made, self._holders, self._canaries = {arena: {} for arena in sizes}, {}, None, {}
        self._buffers = {arena: _aligned_bytes(size, self.device) for arena, size in sizes.items()}

    @one_line
    def __repr__(self) -> Iterator[str]:
        """Bytes and device, and the bytes of each arena."""
        yield f"{bytes_text(self.total_bytes)} on {self.device}"
        arenas = [f"{arena} {bytes_text(buffer.numel())}" for arena, buffer in self._buffers.items()]
        yield f"{len(arenas)} arena{'s' * (len(arenas) != 1)}{': ' * bool(arenas)}{' '.join(arenas)}"
        yield "locked" if self._locked else ""
        yield "debug" if self.debug else ""

    @property
    def locked(self) -> bool:
        """Whether growth is an error."""
        return self._locked

    def lock(self) -> None:
        """Forbid growth from now on; requests that fit still work."""
        self._locked = True

    def unlock(self) -> None:
        """Allow growth again."""
        self._locked = False

    def size(self, arena: str = "default") -> int:
        """Bytes that requests of an arena can use now.

        arena: name of the arena.
        """
        buffer = self._buffers.get(arena)
        return 0 if buffer is None else buffer.numel()

    @property
    def total_bytes(self) -> int:
        """Bytes held in all arenas."""
        return sum(buffer.numel() for buffer in self._buffers.values())

    def reserve(self, plan: WorkspacePlan, *, caller: str = "reserve") -> None:
        """Grow every arena to at least its planned size.

        plan: bytes of each arena, see `plan_workspace`.
        caller: name of the caller in errors.
        """
        for arena, size in plan.arenas.items():
            # canaries are extra: a plan that fits in production must fit in debug too
            self._ensure(size + (64 * ALIGNMENT if self.debug else 0), arena, caller)

    def require(self, *specs: BufferSpec, arena: str = "default", caller: str = "require") -> None:
        """Make sure that a later `get_simultaneous` of these views succeeds, and hand out nothing.

        Views of the arena become garbage. Raises WorkspaceError when the arena is locked and too small.
        arena: name of the arena.
        caller: name of the caller in errors.
        """
        self._fit(specs, arena, caller)

    def get_simultaneous(
        self, *specs: BufferSpec, arena: str = "default", caller: str = "get_simultaneous"
    ) -> list[Tensor]:
        """Return one uninitialised view per (shape, dtype), disjoint, each at a multiple of 256 bytes.

        Earlier views of the arena become garbage. Fetch everything needed at the same time in one call.
        arena: name of the arena.
        caller: name of the caller in errors.
        Raises WorkspaceError, with the caller's name, when a locked arena is too small.
        """
        if not specs and not self._canaries:
            return []
        if self.debug or self._canaries:
            places = self._fit(specs, arena, caller)
            if self.debug:
                self._guard(places, arena, caller)
            else:
                self._canaries.pop(arena, None)
            return [self._view(place, arena) for place in places]
        views_of, key = self._made.get(arena, {}), (specs, torch.is_inference_mode_enabled())
        try:
            views = views_of.get(key)
        except TypeError:  # shapes may be lists, which have no hash
            return self.get_simultaneous(*_hashable(specs), arena=arena, caller=caller)
        if views is None:
            places = self._fit(specs, arena, caller)
            views_of = self._made.setdefault(arena, {})
            if len(views_of) >= _MOST_MADE:
                views_of.clear()
            views = views_of[key] = tuple(self._view(place, arena) for place in places)
        return [*views]

    @property
    def reusable(self) -> bool:
        """Whether views may be used again without another request.

        Not in debug mode, which fills them in each request, nor in a subclass with its own `get_simultaneous`.
        """
        return not self.debug and type(self).get_simultaneous is WorkspaceManager.get_simultaneous

    def release_on_growth(self, holder: Holder) -> None:
        """Call `holder.release()` when memory moves: its views are garbage then, and hold the old memory alive.

        holder: an object with a method `release`. It is held by a weak reference.
        """
        if self._holders is None:
            self._holders = WeakSet()
        self._holders.add(holder)

    def _fit(self, specs: tuple[BufferSpec, ...], arena: str, caller: str) -> tuple[_Place, ...]:
        """Grow the arena as needed, and return the places of the requested views."""
        guard = ALIGNMENT if self.debug else 0
        try:
            size, places = _arranged(specs, guard)
        except TypeError:  # as above
            size, places = _arranged(_hashable(specs), guard)
        if self._canaries:
            self.check_canaries(arena)
        self._ensure(size, arena, caller)
        return places

    def _view(self, place: _Place, arena: str) -> Tensor:
        if place.start == place.end:
            return torch.empty(place.shape, dtype=place.dtype, device=self.device)
        # a view that was made in inference mode cannot be used outside that mode;
        # views of a view that was made outside take twice as long
        key, typed = (place.dtype, torch.is_inference_mode_enabled()), self._typed[arena]
        base = typed.get(key)
        if base is None:
            base = typed[key] = _as_dtype(self._buffers[arena], place.dtype)
        return base.as_strided(place.shape, place.strides, base.storage_offset() + place.first)

    def _guard(self, places: Sequence[_Place], arena: str, caller: str) -> None:
        """Fill views with NaN, and the bytes after them with canaries."""
        canaries = self._canaries[arena] = []
        for place in places:
            if place.start < place.end:
                guarded = round_up(place.end, ALIGNMENT) + ALIGNMENT
                self._buffers[arena][place.start : place.end].fill_(0xFF)
                self._buffers[arena][place.end : guarded].fill_(_CANARY)
                canaries.append((place.end, guarded, f"{list(place.shape)} {place.dtype} of {caller}"))

    def check_canaries(self, arena: str | None = None) -> None:
        """Raise CanaryError if bytes after a view changed since its request. Does nothing outside debug.

        arena: name of the arena; None: all arenas.
        """
        for name, canaries in self._canaries.items():
            if arena in (None, name):
                for start, end, owner in canaries:
                    if not bool((self._buffers[name][start:end] == _CANARY).all()):
                        raise CanaryError(f"workspace arena {name!r}: bytes after {owner} were overwritten")

    def _ensure(self, size: int, arena: str, caller: str) -> None:
        has = self.size(arena)
        if size <= has:
            return
        if self._locked:
            raise WorkspaceError(needed=size, has=has, caller=caller, arena=arena)
        # drop the old buffer first, so that both never exist together
        for by_arena in (self._buffers, self._canaries, self._typed, self._made):
            by_arena.pop(arena, None)
        for holder in self._holders or ():
            holder.release()
        self._holders = None
        self._buffers[arena], self._typed[arena] = _aligned_bytes(size, self.device), {}


def _aligned_bytes(size: int, device: torch.device) -> Tensor:
    """Uninitialised bytes that begin at a multiple of ALIGNMENT: host allocators guarantee less."""
    with torch.inference_mode(False):  # it outlives the mode of the call that made it grow
        raw = torch.empty(size + ALIGNMENT, dtype=torch.uint8, device=device)
        shift = -raw.data_ptr() % ALIGNMENT
        return raw[shift : shift + size]


def _as_dtype(buffer: Tensor, dtype: torch.dtype) -> Tensor:
    """The buffer as elements, up to its last multiple of ALIGNMENT: views end there."""
    return buffer[: buffer.numel() // ALIGNMENT * ALIGNMENT].view(dtype)


_current: ContextVar[WorkspaceManager | None] = ContextVar("dsv4attn_workspace", default=None)


def current_workspace_manager() -> WorkspaceManager:
    """The manager of this context (thread or task), set by `use_workspace`. There is no process-wide one."""
    manager = _current.get()
    if manager is None:
        cure = "run inside `with use_workspace(manager):`, or bind the layer to one"
        raise Dsv4AttnError(
            f"no workspace manager in this context -> {cure}, DeepseekV4MLAAttention(workspace=manager)"
        )
    return manager


@contextmanager
def use_workspace(manager: WorkspaceManager) -> Iterator[WorkspaceManager]:
    """Make a manager the current one for the duration of a `with` block.

    manager: the workspace of layers that were bound without one.
    """
    token = _current.set(manager)
    try:
        yield manager
    finally:
        _current.reset(token)

"""Scratch memory with a proven bound: plan -> reserve -> lock -> views.

One growable byte buffer per lane. A call asks for everything it needs at the same time and gets disjoint views; the
next call, whoever makes it, gets the same memory again. Lanes keep a captured decode and an eager prefill apart.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from attrs import field, frozen
from torch import Tensor

from dsv4attn.errors import ArgumentError, CanaryError, Dsv4AttnError, WorkspaceError

__all__ = [
    "ALIGNMENT",
    "BufferSpec",
    "WorkspaceManager",
    "WorkspacePlan",
    "current_workspace_manager",
    "simultaneous_bytes",
    "use_workspace",
]

ALIGNMENT = 256
"""Bytes to which every view is aligned."""

_CANARY = 0xA5
BufferSpec = tuple[Sequence[int], torch.dtype]
"""Shape and dtype of one requested view."""


def nbytes(spec: BufferSpec) -> int:
    """Bytes of one view, unaligned."""
    shape, dtype = spec
    return math.prod(shape) * dtype.itemsize


def simultaneous_bytes(specs: Sequence[BufferSpec]) -> int:
    """Bytes that `get_simultaneous` takes for these views. Zero-size views are legal and take nothing."""
    return sum(-(-nbytes(spec) // ALIGNMENT) * ALIGNMENT for spec in specs)


@frozen
class WorkspacePlan:
    """How much memory calls within some limits can ever need. Made by `dsv4attn.core.forward.plan_workspace`."""

    lanes: Mapping[str, int] = field(factory=dict)
    """Bytes of the workspace, by lane."""
    transient_bytes: int = 0
    """Bound on what a call may hold in temporaries of the framework's own allocator at any moment. Zero for backends
    whose kernels write only into the workspace."""

    @property
    def total_bytes(self) -> int:
        """Everything together."""
        return sum(self.lanes.values()) + self.transient_bytes

    def union(self, other: WorkspacePlan) -> WorkspacePlan:
        """A plan that covers both: layers run one after another, so the larger counts, not the sum."""
        names = {*self.lanes, *other.lanes}
        lanes = {name: max(self.lanes.get(name, 0), other.lanes.get(name, 0)) for name in sorted(names)}
        return WorkspacePlan(lanes, max(self.transient_bytes, other.transient_bytes))


class WorkspaceManager:
    """Views into reusable scratch memory.

    device: where the memory lives. debug: put a canary behind every view and fill views with 0xFF (NaN in every
    float type used here) before handing them out; `check_canaries` then finds who wrote too far.
    """

    def __init__(self, device: torch.device | str = "cpu", *, debug: bool = False) -> None:
        """Start with no memory at all."""
        self.device, self.debug = torch.device(device), debug
        self._buffers: dict[str, Tensor] = {}
        self._canaries: dict[str, list[tuple[int, int, str]]] = {}
        self._locked = False

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

    def size(self, lane: str = "default") -> int:
        """Bytes that requests of a lane can use now."""
        buffer = self._buffers.get(lane)
        return 0 if buffer is None else buffer.numel()

    @property
    def total_bytes(self) -> int:
        """Bytes held in all lanes."""
        return sum(buffer.numel() for buffer in self._buffers.values())

    def reserve(self, plan: WorkspacePlan, *, caller: str = "reserve") -> None:
        """Grow every lane to at least its planned size."""
        for lane, size in plan.lanes.items():
            # canaries are extra: a plan that fits in production must fit in debug too
            self._ensure(size + (64 * ALIGNMENT if self.debug else 0), lane, caller)

    def require(self, *specs: BufferSpec, lane: str = "default", caller: str = "require") -> None:
        """Make sure that a later `get_simultaneous` of these views succeeds, and hand out nothing.

        Views of the lane become garbage. Raises WorkspaceError when the lane is locked and too small.
        """
        for shape, _ in specs:
            if any(n < 0 for n in shape):
                raise ArgumentError("workspace shape", expected="no negative size", actual=list(shape))
        self.check_canaries(lane)
        self._ensure(simultaneous_bytes(specs) + (ALIGNMENT * len(specs) if self.debug else 0), lane, caller)

    def get_simultaneous(
        self, *specs: BufferSpec, lane: str = "default", caller: str = "get_simultaneous"
    ) -> list[Tensor]:
        """Return one uninitialised view per (shape, dtype), disjoint, each at a multiple of 256 bytes.

        Earlier views of the lane become garbage. Fetch everything needed at the same time in one call.
        Raises WorkspaceError, with the caller's name, when a locked lane is too small.
        """
        guard = ALIGNMENT if self.debug else 0
        self.require(*specs, lane=lane, caller=caller)
        buffer = self._buffers.get(lane)
        views, offset = [], 0
        canaries = self._canaries[lane] = []
        for spec in specs:
            size = nbytes(spec)
            shape, dtype = spec
            if buffer is None or size == 0:
                views.append(torch.empty(tuple(shape), dtype=dtype, device=self.device))
                continue
            raw = buffer[offset : offset + size]
            end = offset + -(-size // ALIGNMENT) * ALIGNMENT
            if self.debug:
                raw.fill_(0xFF)
                buffer[offset + size : end + guard].fill_(_CANARY)
                canaries.append((offset + size, end + guard, f"{list(shape)} {dtype} of {caller}"))
            views.append(raw.view(dtype).view(tuple(shape)))
            offset = end + guard
        return views

    def check_canaries(self, lane: str | None = None) -> None:
        """Raise CanaryError if anyone wrote behind a view since it was handed out. Does nothing outside debug."""
        for name, canaries in self._canaries.items():
            if lane in (None, name):
                for start, end, owner in canaries:
                    if not bool((self._buffers[name][start:end] == _CANARY).all()):
                        raise CanaryError(f"workspace lane {name!r}: bytes behind {owner} were overwritten")

    def _ensure(self, size: int, lane: str, caller: str) -> None:
        has = self.size(lane)
        if size <= has:
            return
        if self._locked:
            raise WorkspaceError(needed=size, has=has, caller=caller, lane=lane)
        # drop the old buffer first, so that both never exist together
        self._buffers.pop(lane, None)
        self._canaries.pop(lane, None)
        self._buffers[lane] = _aligned_bytes(size, self.device)


def _aligned_bytes(size: int, device: torch.device) -> Tensor:
    """Uninitialised bytes that begin at a multiple of ALIGNMENT: host allocators promise less."""
    raw = torch.empty(size + ALIGNMENT, dtype=torch.uint8, device=device)
    shift = -raw.data_ptr() % ALIGNMENT
    return raw[shift : shift + size]


_current: ContextVar[WorkspaceManager | None] = ContextVar("dsv4attn_workspace", default=None)


def current_workspace_manager() -> WorkspaceManager:
    """The manager of this context (thread or task), set by `use_workspace`. There is no process-wide one."""
    manager = _current.get()
    if manager is None:
        raise Dsv4AttnError("no workspace manager in this context -> run inside `with use_workspace(manager):`")
    return manager


@contextmanager
def use_workspace(manager: WorkspaceManager) -> Iterator[WorkspaceManager]:
    """Make a manager the current one for the duration of a `with` block."""
    token = _current.set(manager)
    try:
        yield manager
    finally:
        _current.reset(token)

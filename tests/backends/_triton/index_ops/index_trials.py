"""One call of an index op, run by its definition in plain torch and by Triton, on inputs made to be misread.

Inputs have odd strides and believable numbers between their elements; outputs stand inside larger memory that nobody
may touch. Interpreted, kernels look at few columns together, so that small rows take several rounds.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import pytest
import torch
from attrs import evolve, field, fields, frozen
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dsv4attn.backends._triton.interpreted import INTERPRETED
from dsv4attn.backends._triton.launching.launch_cache import Constants
from dsv4attn.core.cache.selected_keys import ChunkTokens, PageTable, StepTokens
from dsv4attn.core.torch_ops import index_ops as definition
from tests.programs import import_text

DEVICE = torch.device("cpu") if INTERPRETED else torch.accelerator.current_accelerator()
INT, LONG, BOOL = torch.int32, torch.int64, torch.bool
NUMBERS = [-1, -7, 2**31 - 1, 0x7FC00000, -(2**31)]
"""What stands where an entry number should: absent, garbage, the bits of a NaN."""
EIGHT = Constants({"BLOCK": 8})
BLOCKS = [-1, -(2**31), 2**31 - 1, 2**30, 2**28]
"""Dead blocks; 4 * 2^30 and 16 * 2^28 wrap around to 0 in 32 bits."""
_UNTOUCHED = 77
_RAGGED = {"build_ragged_indices_from_dense", "compute_global_topk_ragged_indices_and_indptr"}


@contextmanager
def small_rounds(*modules: ModuleType) -> Iterator[None]:
    """Let every block size of these modules be small. On a device they stay: what is compiled there is what runs."""
    with pytest.MonkeyPatch.context() as patch:
        for module in modules if INTERPRETED else ():
            for name, value in {"BLOCK": 8, "WINDOW_TILE": 16, "CONSTANTS": EIGHT, "_SCAN": EIGHT, "FEW": 12}.items():
                if hasattr(module, name):
                    patch.setattr(module, name, value)
        _forget_constants(modules)
        yield
    _forget_constants(modules)


def _forget_constants(modules: Sequence[ModuleType]) -> None:
    """Clear what the modules cache: constants of a launch follow from the block sizes."""
    for value in [value for module in modules for value in vars(module).values()]:
        if hasattr(value, "cache_clear"):
            value.cache_clear()


def loose(values: Tensor, rng: Random) -> Tensor:
    """Return the same values with other strides, and 3 or true everywhere between and after them."""
    steps = [rng.randint(1, 2) for _ in values.shape]
    base = torch.full([n * s + rng.randint(0, 2) for n, s in zip(values.shape, steps, strict=True)], 3).to(values.dtype)
    view = base[tuple(slice(0, n * s, s) for n, s in zip(values.shape, steps, strict=True))]
    view.copy_(values)
    return view


def numbers(rng: Random, shape: Sequence[int], draw: Callable[[], int], dtype: torch.dtype = INT) -> Tensor:
    """Return a tensor of numbers drawn one by one, laid out by `loose`."""
    count = int(torch.Size(shape).numel())
    return loose(torch.tensor([draw() for _ in range(count)], dtype=LONG).view(*shape).to(dtype), rng)


def spoiled(rng: Random, good: int, bad: Sequence[int]) -> int:
    """Return a number in [0, good), or now and then a bad one."""
    return rng.choice(bad) if rng.random() < 0.3 or not good else rng.randrange(good)


def ascending(rng: Random, counts: Sequence[int], base: int = 0) -> Tensor:
    """Return query_start_loc of requests with these numbers of tokens."""
    return loose(torch.tensor([base + sum(counts[:i]) for i in range(len(counts) + 1)], dtype=INT), rng)


def pages(rng: Random, requests: int) -> PageTable:
    """Return a table whose blocks are alive, dead, or not of this cache."""
    blocks, size = rng.randint(1, 30), rng.choice([1, 3, 4, 16])
    table = numbers(rng, (requests, rng.randint(0, 8)), lambda: spoiled(rng, blocks + 3, BLOCKS))
    return PageTable(table, size, blocks)


def table_of(rng: Random, requests: int) -> tuple[Tensor, int]:
    """Return a block table and its block size."""
    request_pages = pages(rng, requests)
    return request_pages.block_table, request_pages.block_size


@frozen
class Trial:
    """An op, its arguments, and the shape and dtype of each output."""

    op: str
    args: Sequence[Any]
    outs: Sequence[tuple[Sequence[int], torch.dtype]]
    keywords: Mapping[str, Any] = field(factory=dict)

    def agrees(self, module: ModuleType) -> bool:
        """Whether a module computes the same as the definition, and touches nothing else."""
        expected = [torch.full(tuple(shape), _UNTOUCHED, dtype=LONG).to(dtype) for shape, dtype in self.outs]
        self._run(definition, self.args, self.keywords, expected)
        bases = [torch.full([n + 3 for n in shape], _UNTOUCHED, device=DEVICE).to(dtype) for shape, dtype in self.outs]
        actual = [
            base[tuple(slice(1, 1 + n) for n in shape)] for base, (shape, _) in zip(bases, self.outs, strict=True)
        ]
        self._run(
            module, [to_device(arg) for arg in self.args], {k: to_device(v) for k, v in self.keywords.items()}, actual
        )
        same = all(torch.equal(a, b.cpu()) for a, b in zip(self._defined(expected), self._defined(actual), strict=True))
        # undefined, but a kernel that writes there has left its row
        same = same and all(bool((rest == _UNTOUCHED).all()) for rest in self._undefined(actual))
        for view in actual:
            view.fill_(_UNTOUCHED)
        return same and all(bool((base == torch.tensor(_UNTOUCHED).to(base.dtype)).all()) for base in bases)

    def _run(self, module: Any, args: Sequence[Any], keywords: Mapping[str, Any], outs: list[Tensor]) -> None:
        getattr(module, self.op)(*args, out=outs[0] if len(outs) == 1 else tuple(outs), **keywords)

    def _defined(self, outs: list[Tensor]) -> list[Tensor]:
        """Outputs without what is undefined: a ragged list past its last row."""
        return [outs[0][: _end(outs)], outs[1]] if self.op in _RAGGED else outs

    def _undefined(self, outs: list[Tensor]) -> list[Tensor]:
        return [outs[0][_end(outs) :]] if self.op in _RAGGED else []


def _end(outs: list[Tensor]) -> int:
    """Where the last row of a ragged list ends."""
    return max(int(outs[1][-1]), 0)


def planted(launcher: ModuleType, kernels: ModuleType, folder: Path, right: str, wrong: str) -> ModuleType:
    """Return a copy of a launcher, and of its kernels with a bug in place of what is right; empty texts are no bug."""
    text = inspect.getsource(kernels)
    assert not right or text.count(right) == 1, f"the kernels no longer say {right!r} once"
    # names of their own each time, as compilers remember files by their names
    module = import_text(folder / f"planted_kernels_{folder.name}.py", text.replace(right, wrong) if right else text)
    copy = import_text(folder / f"planted_{folder.name}.py", inspect.getsource(launcher))
    launched = [name for name in vars(launcher) if name.endswith("_kernel") and hasattr(kernels, name)]
    assert launched, "the launcher takes no kernel from that file"
    for name in launched:
        setattr(copy, name, getattr(module, name))
    return copy


class _Recorder(TorchDispatchMode):
    def __init__(self, ran: list[tuple[str, str]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ran = ran

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        devices = {value.device.type for value in (*args, result) if isinstance(value, Tensor)}
        self.ran.append((str(func).split(".")[1], "cpu" if devices <= {"cpu"} else "device"))
        return result


VIEWS = {"as_strided", "slice", "select", "view", "expand", "unsqueeze", "squeeze", "alias", "detach", "split", "t"}
"""Operations of torch that neither allocate nor launch."""
FILLS = {"zero_", "fill_"}
"""Operations that a step may launch, for rows that are padding."""


@contextmanager
def operations() -> Iterator[list[tuple[str, str]]]:
    """Collect what torch runs meanwhile, views too: (name, "cpu" or "device")."""
    ran: list[tuple[str, str]] = []
    with _Recorder(ran):
        yield ran


def to_device(value: Any) -> Any:
    """Return a tensor, a table or tokens on the device under test, with the strides that it has here."""
    if isinstance(value, (PageTable, StepTokens, ChunkTokens)):
        return evolve(
            value, **{attribute.name: to_device(getattr(value, attribute.name)) for attribute in fields(type(value))}
        )
    if not isinstance(value, Tensor) or DEVICE is None or DEVICE.type == "cpu":
        return value
    base = torch.empty(0, dtype=value.dtype).set_(value.untyped_storage()).to(DEVICE)
    return base.as_strided(value.shape, value.stride(), value.storage_offset())


def with_changed(op: Callable[..., None], change: Callable[..., tuple[Any, ...]]) -> Callable[..., None]:
    """Return an op that changes its positional arguments before it runs."""

    def wrong(*args: Any, **keywords: Any) -> None:
        op(*change(*args), **keywords)

    return wrong

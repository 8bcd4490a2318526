"""Full memory: what fails after it took pages gives them back. Every call of torch and of the pool fails in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from dsv4attn.core.contract.limits import Limits
from dsv4attn.selection import load_backend
from dsv4attn.serving.allocator import BlockAllocator
from dsv4attn.serving.cache_manager import CachedSequence, CacheManager
from tests.harness import LayerStack

COPIES = (torch.index_select, Tensor.index_copy_)
"""What copies pages takes no memory: its rows are there before."""


class FullMemory(TorchFunctionMode):
    """The call of torch with number `fails` raises, as an allocation in full memory does. calls: their number."""

    def __init__(self, fails: int, *, copies: bool) -> None:
        super().__init__()
        self.fails, self.copies, self.calls = fails, copies, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.copies or func not in COPIES:
            self.fail()
        return func(*args, **(kwargs or {}))

    def fail(self) -> None:
        self.calls += 1
        if self.calls == self.fails:
            raise torch.OutOfMemoryError("out of memory")


def each_failure(monkeypatch: pytest.MonkeyPatch, *, copies: bool = False, every: int = 1) -> Iterator[FullMemory]:
    """Contexts of a call that fails at its first allocation, at its second one, and so on. In the last none fails.

    every: 2 for every second allocation only, and so on.
    """
    allocate, number = BlockAllocator.allocate, 1 - every
    while True:
        number += every
        memory = FullMemory(number, copies=copies)

        def full(pool: BlockAllocator, n: int, memory: FullMemory = memory) -> list[int]:
            memory.fail()
            return allocate(pool, n)

        with monkeypatch.context() as patch:
            patch.setattr(BlockAllocator, "allocate", full)
            yield memory
        if memory.calls < number:
            return


def contents(manager: CacheManager, sequence: CachedSequence) -> dict[str, Any]:
    """Everything that a sequence is: its tables, and the bytes of its pages in every cache."""
    found: dict[str, Any] = {"length": sequence.length, "owner": sequence.owner}
    for name, table in sequence.tables.items():
        pages = [block for block in table.blocks if block >= 0]
        found[name] = [*table.blocks], table.first_token
        found[f"{name} bytes"] = [cache.tensor[pages].clone() for cache in manager._of_group(name)]
    return found


def same(before: dict[str, Any], after: dict[str, Any]) -> bool:
    return all(
        all(map(torch.equal, value, after[name])) if name.endswith("bytes") else value == after[name]
        for name, value in before.items()
    )


def whole() -> LayerStack:
    """Layers of every kind, with pages for three sequences and hardly more."""
    pages: dict[str, Any] = {
        "swa_block_size": 4,
        "compressed_block_tokens": 16,
        "num_blocks": {"compressed": 6},
        "shuffle_seed": 1,
    }
    return LayerStack(load_backend("reference"), limits=Limits(4, 64, 64), **pages)


CALLS: dict[str, Callable[[CacheManager, list[CachedSequence]], Any]] = {
    "fork": lambda manager, beams: manager.fork(beams[1]),
    # the forks need pages of the beam that is not named
    "select": lambda manager, beams: manager.select(beams, [0, 1, 0]),
    "select one": lambda manager, beams: manager.select(beams, [2, 2]),
    "batch": lambda manager, beams: manager.batch([(beams[0], 1), (beams[1], 3)], padding=2),
    "reserve": lambda manager, beams: manager.reserve([(beams[2], 9), (beams[1], 1)]),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_call_that_fails_changes_nothing(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stack = whole()
    manager = stack.manager
    beams = [stack.cut(stack.hidden(seed, length), [length])[0] for seed, length in enumerate((20, 15, 18))]
    before, in_use = [contents(manager, beam) for beam in beams], manager.pages_in_use
    failed = 0
    for memory in each_failure(monkeypatch, copies="fork" in call):
        try:
            with memory:
                result = CALLS[call](manager, beams)
        except torch.OutOfMemoryError:
            failed += 1
            assert manager.pages_in_use == in_use
            assert all(same(old, contents(manager, beam)) for old, beam in zip(before, beams, strict=True))
    assert failed > (1 if call == "reserve" else 3)

    forks = [one for one in (result if isinstance(result, list) else [result]) if isinstance(one, CachedSequence)]
    for fork in forks:
        source = next(beam for beam in beams if beam.length == fork.length)
        for name, table in fork.tables.items():
            pairs = zip(source.tables[name].blocks, table.blocks, strict=True)
            ours = [(theirs, mine) for theirs, mine in pairs if theirs >= 0 and mine >= 0]
            for cache in manager._of_group(name):
                assert all(torch.equal(cache.tensor[theirs], cache.tensor[mine]) for theirs, mine in ours)
    for one in {id(one): one for one in (*beams, *forks)}.values():
        if one.owner is not None:
            manager.free(one)
    assert set(manager.pages_in_use.values()) == {0}

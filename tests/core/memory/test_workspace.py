"""`WorkspaceManager`: views, arenas, locking, canaries, threads, and the manager of a context."""

from __future__ import annotations

import asyncio
import copy
import pickle
import threading
from collections.abc import Callable
from contextlib import suppress
from itertools import combinations
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dsv4attn import load_backend
from dsv4attn.core.memory import workspace
from dsv4attn.core.memory.workspace import (
    ALIGNMENT,
    WorkspaceManager,
    WorkspacePlan,
    current_workspace_manager,
    simultaneous_bytes,
    use_workspace,
)
from dsv4attn.errors import ArgumentError, CanaryError, Dsv4AttnError, WorkspaceError
from tests.backends.built_in import EVERYWHERE
from tests.harness import LayerStack

BF16, F32, I32, U8 = torch.bfloat16, torch.float32, torch.int32, torch.uint8
DTYPES = [U8, BF16, F32, I32, torch.int64, torch.bool]
specs_strategy = st.lists(st.tuples(st.lists(st.integers(0, 9), max_size=3), st.sampled_from(DTYPES)), max_size=6)


def span(view: Tensor) -> range:
    """Return the addresses a view covers."""
    return range(view.data_ptr(), view.data_ptr() + view.numel() * view.element_size())


@given(specs=specs_strategy, debug=st.booleans())
def test_g11_views_are_aligned_disjoint_inside_the_buffer_and_of_the_asked_kind(
    specs: list[tuple[list[int], torch.dtype]], debug: bool
) -> None:
    manager = WorkspaceManager(debug=debug)
    views = manager.get_simultaneous(*specs)
    spans = [span(view) for view in views if view.numel()]

    assert [(list(view.shape), view.dtype) for view in views] == [(shape, dtype) for shape, dtype in specs]
    assert all(view.is_contiguous() for view in views)
    assert all(part.start % ALIGNMENT == 0 for part in spans)
    for left, right in combinations(spans, 2):
        assert left.stop <= right.start or right.stop <= left.start
    if spans:
        assert max(part.stop for part in spans) - min(part.start for part in spans) <= manager.size()
    if not debug:
        assert manager.size() == simultaneous_bytes(specs)


def test_bytes_are_counted_in_units_of_256() -> None:
    assert simultaneous_bytes([]) == 0
    assert simultaneous_bytes([((1,), U8), ((256,), U8), ((257,), U8), ((3, 0), F32), ((), F32)]) == 256 * 5
    assert simultaneous_bytes([((4, 1000, 512), BF16)]) == 4_096_000


def test_the_next_call_gets_the_same_memory_again() -> None:
    manager = WorkspaceManager()
    first = manager.get_simultaneous(((100,), F32), ((7,), I32))
    second = manager.get_simultaneous(((50,), F32))

    assert second[0].data_ptr() == first[0].data_ptr()


def test_a_request_made_before_costs_no_view_and_its_list_belongs_to_the_caller() -> None:
    manager = WorkspaceManager()
    specs = ((3, 4), torch.float32), ((5,), torch.int32)
    first = manager.get_simultaneous(*specs)
    second = manager.get_simultaneous(*specs)

    assert all(left is right for left, right in zip(first, second, strict=True))
    second.clear()
    assert len(manager.get_simultaneous(*specs)) == 2
    listed = manager.get_simultaneous(([3, 4], torch.float32), ([5], torch.int32))
    assert [view.data_ptr() for view in listed] == [view.data_ptr() for view in first]


def test_views_given_out_before_do_not_keep_memory_that_was_outgrown() -> None:
    manager = WorkspaceManager()
    (old,) = manager.get_simultaneous(((4,), torch.float32))
    manager.get_simultaneous(((4096,), torch.float32))
    (new,) = manager.get_simultaneous(((4,), torch.float32))

    assert new.untyped_storage().data_ptr() != old.untyped_storage().data_ptr()
    assert manager.get_simultaneous(((4,), torch.float32), arena="other")[0].data_ptr() != new.data_ptr()


def test_views_of_ever_new_shapes_are_not_kept_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workspace, "_MOST_MADE", 3)
    manager = WorkspaceManager()
    for size in range(9, 0, -1):
        (view,) = manager.get_simultaneous(((size,), torch.float32))
        assert view.shape == (size,)
        assert len(manager._made["default"]) <= 3


def test_the_buffer_grows_to_what_is_needed_and_never_shrinks() -> None:
    manager = WorkspaceManager()
    assert manager.size() == manager.total_bytes == 0
    for want, size in ((1, 256), (1000, 1024), (10, 1024), (1024, 1024), (1025, 1280)):
        manager.get_simultaneous(((want,), U8))
        assert manager.size() == size


def test_views_handed_out_before_the_buffer_grew_keep_their_own_memory() -> None:
    manager = WorkspaceManager()
    (old,) = manager.get_simultaneous(((64,), I32))
    old.fill_(7)
    (new,) = manager.get_simultaneous(((6400,), I32))
    new.zero_()

    assert bool(old.eq(7).all())


def test_g11_a_locked_workspace_says_what_was_needed_what_it_has_and_who_asked() -> None:
    manager = WorkspaceManager()
    manager.get_simultaneous(((512,), U8), arena="decode")
    manager.lock()

    with pytest.raises(WorkspaceError) as info:
        manager.get_simultaneous(((512,), U8), ((1,), U8), arena="decode", caller="reference.decode")

    assert str(info.value).startswith(
        "workspace: reference.decode needs 768 bytes in arena 'decode', which is locked at 512 bytes -> "
    )
    assert (info.value.needed, info.value.has, info.value.caller, info.value.arena) == (
        768,
        512,
        "reference.decode",
        "decode",
    )
    assert isinstance(info.value, RuntimeError)


def test_what_fits_still_works_after_lock_and_unlock_lets_it_grow() -> None:
    manager = WorkspaceManager()
    manager.reserve(WorkspacePlan({"default": 1024}))
    address = manager.get_simultaneous(((1024,), U8))[0].data_ptr()
    manager.lock()

    states = [manager.locked]
    assert manager.get_simultaneous(((4, 64), F32))[0].data_ptr() == address
    with pytest.raises(WorkspaceError):
        manager.get_simultaneous(((1025,), U8))
    assert manager.get_simultaneous(((1024,), U8))[0].data_ptr() == address, "a refused request changed the buffer"
    manager.unlock()
    assert [*states, manager.locked] == [True, False]
    manager.get_simultaneous(((1025,), U8))
    assert manager.size() == 1280


def test_a_locked_arena_that_was_not_reserved_has_no_memory() -> None:
    manager = WorkspaceManager()
    manager.lock()

    assert [v.shape for v in manager.get_simultaneous(((0, 4), F32), arena="new")] == [(0, 4)]
    with pytest.raises(WorkspaceError, match="needs 256 bytes in arena 'new', which is locked at 0 bytes"):
        manager.get_simultaneous(((1,), F32), arena="new")
    with pytest.raises(WorkspaceError, match="warm-up needs 9 bytes in arena 'late'"):
        manager.reserve(WorkspacePlan({"late": 9}), caller="warm-up")


def test_a_negative_size_is_refused_before_anything_is_handed_out() -> None:
    manager = WorkspaceManager()
    with pytest.raises(ArgumentError, match=r"workspace shape: expected no negative size, got \[-2, -3\]"):
        manager.get_simultaneous(((4,), F32), ((-2, -3), F32))

    assert manager.size() == 0


def test_g11_arenas_have_their_own_memory() -> None:
    manager = WorkspaceManager()
    (decode,) = manager.get_simultaneous(((256,), U8), arena="decode")
    (prefill,) = manager.get_simultaneous(((512,), U8), arena="prefill")

    assert {*span(decode)}.isdisjoint(span(prefill))
    assert (manager.size("decode"), manager.size("prefill"), manager.size("none")) == (256, 512, 0)
    assert manager.total_bytes == 768
    manager.get_simultaneous(((4096,), U8), arena="prefill")
    assert manager.get_simultaneous(((256,), U8), arena="decode")[0].data_ptr() == decode.data_ptr()


@given(
    requests=st.lists(st.tuples(specs_strategy, st.sampled_from(["decode", "prefill"])), max_size=8),
    debug=st.booleans(),
)
def test_g11_after_any_history_views_lie_in_the_memory_their_arena_has_now(
    requests: list[tuple[list[tuple[list[int], torch.dtype]], str]], debug: bool
) -> None:
    check_histories(WorkspaceManager(debug=debug), requests)


def check_histories(manager: WorkspaceManager, requests: Any) -> None:
    """Check that the views of each request are apart, hold what was written to them, and are in the present buffer."""
    for specs, arena in requests:
        views = [view for view in manager.get_simultaneous(*specs, arena=arena) if view.numel()]
        for number, view in enumerate(views):
            view.fill_(number % 2)
        buffer = span(manager._buffers[arena]) if views else range(0)
        assert all(buffer.start <= span(view).start and span(view).stop <= buffer.stop for view in views)
        assert all(bool((view == number % 2).all()) for number, view in enumerate(views))
        manager.check_canaries()


def test_a_manager_that_keeps_handing_out_the_memory_it_grew_out_of_is_found() -> None:
    class Forgetful(WorkspaceManager):
        def _ensure(self, size: int, arena: str, caller: str) -> None:
            typed = self._typed.get(arena)
            super()._ensure(size, arena, caller)
            if typed:
                self._typed[arena] = typed

    small: list[Any] = [([((4,), F32)], "decode"), ([((8,), F32)], "decode"), ([((4,), I32)], "prefill")]
    check_histories(Forgetful(), small)
    with pytest.raises((AssertionError, RuntimeError)):
        check_histories(Forgetful(), [*small, ([((400,), F32)], "decode")])


MODES = [torch.inference_mode, torch.no_grad, torch.enable_grad]


@pytest.mark.parametrize("grown", MODES, ids=lambda mode: f"grown_in_{mode.__name__}")
@pytest.mark.parametrize("first", MODES, ids=lambda mode: f"first_in_{mode.__name__}")
@pytest.mark.parametrize("then", MODES, ids=lambda mode: f"then_in_{mode.__name__}")
def test_memory_made_in_one_autograd_mode_can_be_written_in_any_other(grown: Any, first: Any, then: Any) -> None:
    """A warm-up runs in inference mode, and a test of the same manager does not."""
    manager = WorkspaceManager()
    with grown():
        manager.reserve(WorkspacePlan({"default": 1024}))
    for mode in (first, then, first):
        with mode():
            (view,) = manager.get_simultaneous(((4,), F32))
            torch.add(view.fill_(1), 1, out=view)
            assert view.view(2, 2).mul_(3).tolist() == [[6, 6], [6, 6]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_arena_of_any_size_serves_every_dtype(dtype: torch.dtype) -> None:
    manager = WorkspaceManager()
    manager.reserve(WorkspacePlan({"default": 1001}))
    manager.lock()
    (view,) = manager.get_simultaneous(((768 // dtype.itemsize,), dtype))

    assert (len(span(view)), manager.size()) == (768, 1001)
    with pytest.raises(WorkspaceError, match="needs 1024 bytes in arena 'default', which is locked at 1001 bytes"):
        manager.get_simultaneous(((769,), U8))


def test_asking_ahead_does_not_forget_who_wrote_too_far() -> None:
    manager = WorkspaceManager(debug=True)
    (view,) = manager.get_simultaneous(((100,), U8), caller="acme.decode")
    manager.require(((50,), U8))
    view.as_strided((1,), (1,), view.storage_offset() + 100).fill_(1)

    with pytest.raises(CanaryError, match=r"after \[100\] torch.uint8 of acme.decode"):
        manager.get_simultaneous()


@pytest.mark.parametrize(("shape", "dtype"), [((100,), U8), ((256,), U8), ((5, 13), BF16)])
def test_g11_a_write_past_the_end_of_a_view_is_found_and_its_owner_named(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    manager = WorkspaceManager(debug=True)
    (view, other) = manager.get_simultaneous((shape, dtype), ((4,), F32), arena="decode", caller="acme.decode")
    view.zero_()
    other.zero_()
    manager.check_canaries()
    end = view.as_strided((1,), (1,), view.storage_offset() + view.numel())
    end.fill_(1)

    said = rf"arena 'decode': bytes after \[{', '.join(map(str, shape))}\] {dtype} of acme.decode were overwritten"
    with pytest.raises(CanaryError, match=said):
        manager.check_canaries()
    with pytest.raises(CanaryError, match=said):
        manager.check_canaries("decode")
    with pytest.raises(CanaryError, match=said):
        manager.get_simultaneous(((1,), U8), arena="decode")
    manager.check_canaries("prefill")


def test_the_last_byte_before_the_next_view_is_guarded_too() -> None:
    manager = WorkspaceManager(debug=True)
    first, second = manager.get_simultaneous(((256,), U8), ((256,), U8))
    assert span(second).start - span(first).stop == ALIGNMENT
    first.as_strided((1,), (1,), second.storage_offset() - 1).fill_(0)

    with pytest.raises(CanaryError):
        manager.check_canaries()


def test_debug_fills_views_with_nan_and_production_with_nothing() -> None:
    manager = WorkspaceManager(debug=True)
    bf16, f32, i32 = manager.get_simultaneous(((3,), BF16), ((3,), F32), ((3,), I32))
    assert bool(bf16.isnan().all())
    assert bool(f32.isnan().all())
    assert i32.tolist() == [-1, -1, -1]

    plain = WorkspaceManager()
    plain.get_simultaneous(((3,), F32))[0].fill_(7)
    assert plain.get_simultaneous(((3,), F32))[0].tolist() == [7, 7, 7]
    plain.check_canaries()


def test_g11_a_plan_that_fits_in_production_fits_in_debug_too() -> None:
    specs = [((5,), F32)] * 12
    manager = WorkspaceManager(debug=True)
    manager.reserve(WorkspacePlan({"default": simultaneous_bytes(specs)}))
    manager.lock()

    assert len(manager.get_simultaneous(*specs)) == 12


def test_reserving_twice_keeps_the_larger() -> None:
    manager = WorkspaceManager()
    for size, has in ((512, 512), (256, 512), (1024, 1024)):
        manager.reserve(WorkspacePlan({"prefill": size, "decode": 0}))
        assert (manager.size("prefill"), manager.size("decode")) == (has, 0)


def test_the_union_of_plans_is_the_larger_of_each_arena() -> None:
    left = WorkspacePlan({"decode": 10, "prefill": 300}, transient_bytes=5)
    right = WorkspacePlan({"prefill": 200, "extra": 7}, transient_bytes=9)
    both = left.union(right)

    assert both == right.union(left) == WorkspacePlan({"decode": 10, "extra": 7, "prefill": 300}, 9)
    assert both.total_bytes == 326
    assert left.union(WorkspacePlan()) == left
    assert WorkspacePlan().total_bytes == 0


def test_there_is_no_manager_without_being_asked_for() -> None:
    with pytest.raises(Dsv4AttnError, match=r"no workspace manager in this context -> .*use_workspace"):
        current_workspace_manager()


def test_the_current_manager_nests_and_is_given_back_after_an_error() -> None:
    outer, inner = WorkspaceManager(), WorkspaceManager()
    with use_workspace(outer) as manager:
        assert manager is current_workspace_manager() is outer
        with suppress(KeyError), use_workspace(inner):
            assert current_workspace_manager() is inner
            raise KeyError
        assert current_workspace_manager() is outer
    with pytest.raises(Dsv4AttnError):
        current_workspace_manager()


def test_threads_do_not_see_each_other_s_manager() -> None:
    together, seen = threading.Barrier(3), {}

    def work(name: int) -> None:
        manager = WorkspaceManager()
        with use_workspace(manager):
            together.wait(timeout=10)
            seen[name] = current_workspace_manager() is manager
            together.wait(timeout=10)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert seen == {0: True, 1: True, 2: True}
    with pytest.raises(Dsv4AttnError):
        current_workspace_manager()


def test_tasks_of_one_thread_do_not_see_each_other_s_manager() -> None:
    async def work() -> bool:
        manager = WorkspaceManager()
        with use_workspace(manager):
            await asyncio.sleep(0)
            mine = current_workspace_manager() is manager
            await asyncio.sleep(0)
            return mine and current_workspace_manager() is manager

    async def main() -> list[bool]:
        return list(await asyncio.gather(*(work() for _ in range(4))))

    assert asyncio.run(main()) == [True] * 4


COPIES: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda manager: pickle.loads(pickle.dumps(manager)),  # noqa: S301 - its own
}


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("name", COPIES)
def test_a_copy_has_memory_of_its_own_in_lanes_of_the_same_sizes(name: str, debug: bool) -> None:
    manager = WorkspaceManager(debug=debug)
    (decode,), (prefill,) = (manager.get_simultaneous(((9,), F32), arena=arena) for arena in ("decode", "prefill"))
    manager.get_simultaneous(((900,), BF16), arena="prefill")
    manager.lock()
    copied = COPIES[name](manager)

    assert (copied.locked, copied.debug, copied.device) == (True, debug, manager.device)
    assert [copied.size(arena) for arena in ("decode", "prefill", "other")] == [
        manager.size(arena) for arena in ("decode", "prefill", "other")
    ]
    copied.check_canaries()
    (other,) = copied.get_simultaneous(((9,), F32), arena="decode")
    assert other.data_ptr() % ALIGNMENT == 0
    decode.fill_(1)
    other.fill_(2)
    assert bool((decode == 1).all())
    with pytest.raises(WorkspaceError):
        copied.get_simultaneous(((4000,), F32), arena="decode")
    assert prefill.numel() == 9
    manager.check_canaries()
    copied.check_canaries()


@pytest.mark.matrix
@pytest.mark.parametrize("name", COPIES)
@pytest.mark.parametrize("backend", EVERYWHERE)
def test_a_workspace_that_ran_steps_is_copied(backend: str, name: str) -> None:
    whole = LayerStack(load_backend(backend))
    hidden = whole.hidden(0, 24)
    sequence, _ = whole.cut(hidden[:20], [19, 1])
    copied = COPIES[name](whole.workspace)
    _, expected = whole.cut(hidden, [24])
    for layer in whole.layers:
        layer.attention.workspace = copied
    outs = whole.step([(sequence, 4)], hidden[20:])

    for out, rows in zip(outs, expected, strict=True):
        torch.testing.assert_close(out, rows[20:], rtol=1e-3, atol=1e-4)

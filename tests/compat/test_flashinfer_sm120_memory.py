"""Memory of the wrapper: what a captured graph has seen stays where it is, whatever runs later."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from dsv4attn.backends._triton import backend as shared_backend
from dsv4attn.backends._triton.tuning import Tuning
from dsv4attn.backends.sm120.launch import Sm120Backend
from dsv4attn.compat import flashinfer_sm120_memory as memory
from dsv4attn.compat.arguments import layer_of
from dsv4attn.compat.flashinfer_sm120 import SparseMLASm120Wrapper
from dsv4attn.compat.flashinfer_sm120_memory import WrapperMemory
from dsv4attn.core.contract.backend import AttentionCall, Phase
from dsv4attn.core.memory.workspace import simultaneous_bytes
from dsv4attn.errors import ArgumentError
from tests.backends._triton.cache.caches import DEVICE

CACHE = torch.zeros(3, 64, 584, dtype=torch.uint8, device=DEVICE)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[AttentionCall]:
    """Calls that would have been launched, in place of launches; at least two programs share every row."""
    calls: list[AttentionCall] = []
    monkeypatch.setattr(Sm120Backend, "decode", lambda _, call: calls.append(call))
    return calls


def run(wrapper: SparseMLASm120Wrapper, tokens: int, heads: int = 1, width: int = 3000, **changes: Any) -> None:
    q = torch.zeros(tokens, heads, 512, dtype=torch.bfloat16, device=DEVICE)
    indices = torch.zeros(tokens, width, dtype=torch.int32, device=DEVICE)
    wrapper.run(**{"q": q, "kv_cache": CACHE, "indices": indices, "output": q.clone(), "sm_scale": 0.1, **changes})


def used(call: AttentionCall) -> list[Tensor]:
    """What a launch reads or writes of the wrapper's own memory."""
    keys: Any = call.keys
    return [*call.scratch, *[segment.rows.lens for segment in keys]]


def alive(references: list[StorageWeakRef]) -> list[bool]:
    return [not reference.expired() for reference in references]


@pytest.mark.parametrize("maxima", [(8, 4), (None, None)], ids=["maxima", "none"])
def test_a_later_larger_run_frees_nothing_that_a_graph_may_use(
    maxima: tuple[int | None, int | None], launched: list[AttentionCall]
) -> None:
    wrapper = SparseMLASm120Wrapper(*maxima)
    run(wrapper, 1)
    first = used(launched.pop())
    assert len(first) == 4, "two programs share the row, and its length is the wrapper's"
    addresses = [tensor.data_ptr() for tensor in first]
    storages = [StorageWeakRef(tensor.untyped_storage()) for tensor in first]
    del first
    for tokens, heads, width in ((4, 1, 3000), (2, 4, 9000), (8, 4, 100), (200 if maxima[0] is None else 8, 4, 2000)):
        run(wrapper, tokens, heads, width)
        launched.clear()

        assert all(alive(storages)), (tokens, heads, width)
    run(wrapper, 1)
    lens = used(launched[-1])[-1]

    assert [tensor.data_ptr() for tensor in used(launched.pop())[:3]] == addresses[:3]
    assert maxima[0] is None or lens.data_ptr() == addresses[3]


def test_with_maxima_a_run_allocates_nothing(launched: list[AttentionCall]) -> None:
    wrapper = SparseMLASm120Wrapper(70, 128, device=DEVICE)
    assert wrapper._memory is not None
    size, seen = wrapper._memory.nbytes, set[tuple[int, ...]]()
    for tokens, heads, width in product((1, 4, 64, 65, 70), (1, 7, 128), (1, 64, 5000)):
        run(wrapper, tokens, heads, width)
        call = launched.pop()
        seen.add(tuple(tensor.untyped_storage().data_ptr() for tensor in used(call)))

        assert wrapper._memory.nbytes == size
    # with parts and without them
    assert {len(addresses) for addresses in seen} == {1, 4}
    assert len({addresses[-1] for addresses in seen}) == 1


def test_every_width_counts_all_its_columns_by_the_same_lengths(launched: list[AttentionCall]) -> None:
    wrapper = SparseMLASm120Wrapper(4, 8)
    for width in range(1, 300):
        run(wrapper, 2, 8, width)
    lens = [used(call)[-1] for call in launched]

    assert len({lens_tensor.data_ptr() for lens_tensor in lens}) == 1
    assert all(int(lens_tensor.min()) >= 300 for lens_tensor in lens)


@pytest.mark.matrix
def test_memory_without_maxima_grows_to_twice_the_longest_at_most(launched: list[AttentionCall]) -> None:
    wrapper = SparseMLASm120Wrapper()
    run(wrapper, 1)
    assert wrapper._memory is not None
    parts = wrapper._memory._workspace.total_bytes
    for tokens in range(1, 3000, 7):
        run(wrapper, tokens, 1, 1)

    assert wrapper._memory._workspace.total_bytes == parts
    assert wrapper._memory.nbytes - parts <= 2 * 4 * 2 * 3000
    assert launched


@pytest.mark.parametrize("programs", [1, 4, 132, 170])
@pytest.mark.parametrize("block", [16, 64])
def test_reserved_parts_are_enough_for_every_call(block: int, programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Sm120Backend(kernel="own")
    backend.tuning = Tuning(heads=block)
    monkeypatch.setattr(shared_backend, "multiprocessors", lambda: programs)
    for most in (1, 3, 16, 17, 64, 100, 128):
        memory = WrapperMemory(torch.device("cpu"), backend, tokens=9, heads=most)
        reserved = memory._workspace.total_bytes
        for tokens, heads, width in product((1, 2, 5, 16, 33, 64), range(1, most + 1), (1, 65, 4096, 2**20)):
            specs = backend.scratch(Phase.DECODE, layer_of(heads, 512, 64, 1.0), tokens, width)
            assert simultaneous_bytes(list(specs)) <= reserved


def test_with_maxima_the_first_run_may_be_captured_and_without_them_it_is_an_error(
    launched: list[AttentionCall], monkeypatch: pytest.MonkeyPatch
) -> None:
    reserved, eager = SparseMLASm120Wrapper(4, 8), SparseMLASm120Wrapper()
    monkeypatch.setattr(memory, "is_capturing", lambda _: True)
    run(reserved, 1)
    run(reserved, 4, 8)
    assert len(launched) == 2
    with pytest.raises(ArgumentError, match="give max_num_tokens and max_num_heads, or run it eagerly once"):
        run(eager, 1)
    with pytest.raises(ArgumentError, match="before its capture"):
        SparseMLASm120Wrapper(4, 8)
    monkeypatch.setattr(memory, "is_capturing", lambda _: False)
    run(eager, 1)
    monkeypatch.setattr(memory, "is_capturing", lambda _: True)
    run(eager, 2, 128, 9000)
    assert len(launched) == 4
    with pytest.raises(ArgumentError, match="65 rows without lengths"):
        run(eager, 65)
    assert len(launched) == 4


def test_in_a_capture_a_caller_who_brings_all_memory_needs_none_of_the_wrappers(
    launched: list[AttentionCall], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "is_capturing", lambda _: True)
    mid, lse = torch.zeros(4 * 512, device=DEVICE), torch.zeros(4, device=DEVICE)
    lens = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    run(SparseMLASm120Wrapper(), 1, mid_out=mid, mid_lse=lse, topk_length=lens)

    assert [tensor.data_ptr() for tensor in used(launched[0])] == [tensor.data_ptr() for tensor in (mid, lse, lens)]


@pytest.mark.parametrize(
    ("options", "tokens", "heads", "match"),
    [
        ({"max_num_tokens": 3, "max_num_heads": 8}, 4, 8, "q: expected at most max_num_tokens=3 tokens, got 4"),
        ({"max_num_tokens": 4, "max_num_heads": 7}, 4, 8, "q: expected at most max_num_heads=7 heads, got 8"),
    ],
)
def test_a_run_past_the_maxima_is_an_error_before_any_launch(
    options: dict[str, Any], tokens: int, heads: int, match: str, launched: list[AttentionCall]
) -> None:
    wrapper = SparseMLASm120Wrapper(**options)
    with pytest.raises(ArgumentError, match=match):
        run(wrapper, tokens, heads)

    assert not launched


def test_a_run_elsewhere_than_the_memory_is_an_error_before_any_launch(launched: list[AttentionCall]) -> None:
    wrapper = SparseMLASm120Wrapper(4, 8)
    assert wrapper._memory is not None
    wrapper._memory.device = torch.device("meta")
    with pytest.raises(ArgumentError, match="q: expected a tensor on meta, where the wrapper's memory is, got one on"):
        run(wrapper, 1)

    assert not launched


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"max_num_tokens": 4}, "max_num_heads"),
        ({"max_num_heads": 4}, "max_num_tokens"),
        ({"max_num_tokens": 0, "max_num_heads": 4}, "max_num_tokens"),
        ({"max_num_tokens": 4, "max_num_heads": 129}, "max_num_heads"),
        ({"max_num_tokens": 4, "max_num_heads": 8, "device": "cuda:99"}, "device"),
    ],
)
def test_arguments_of_the_constructor_are_checked(options: dict[str, Any], argument: str) -> None:
    with pytest.raises(ArgumentError) as raised:
        SparseMLASm120Wrapper(**options)

    assert raised.value.argument == argument

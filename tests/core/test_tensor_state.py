"""`TensorState` sees every change of a tensor and keeps no tensor alive."""

from __future__ import annotations

import copy
import pickle
import weakref
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dsv4attn.core.model import tensor_state
from dsv4attn.core.model.quantized_weight import BlockScaledWeight, dense_weight, forget
from dsv4attn.core.model.tensor_state import TensorState
from tests.core.model.scaled import operations

DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.uint8)


def tensor_of(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).mul(4).to(dtype)


def adds(t: Tensor) -> None:
    t.view(torch.uint8).add_(1)


def writes_data(t: Tensor) -> None:
    t.data.view(torch.uint8).bitwise_xor_(1)


def writes_a_view(t: Tensor) -> None:
    t[1:].view(torch.uint8).add_(1)


def gives_other_memory(t: Tensor) -> None:
    t.data = t.clone()


def gives_memory_back_and_takes_it(t: Tensor) -> None:
    value = t.clone()
    t.data = torch.empty(0, dtype=t.dtype)
    t.data = value


def turns(t: Tensor) -> None:
    t.data = t.data.T


def cuts(t: Tensor) -> None:
    t.data = t.data[:-1]


def shifts(t: Tensor) -> None:
    t.data = t.data[1:]


def sets(t: Tensor) -> None:
    t.set_(t.clone().untyped_storage(), 0, t.shape, t.stride())


CHANGES = [
    adds,
    writes_data,
    writes_a_view,
    gives_other_memory,
    gives_memory_back_and_takes_it,
    turns,
    cuts,
    shifts,
    sets,
]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [6, 200])
def test_a_change_is_seen(change: Callable[[Tensor], None], dtype: torch.dtype, size: int) -> None:
    tensor = tensor_of((size, size), dtype)
    state = TensorState(tensor)
    assert state.holds(tensor)
    change(tensor)
    assert not state.holds(tensor)
    assert TensorState(tensor).holds(tensor)


@pytest.mark.parametrize("change", [c for c in CHANGES if c not in (writes_data, writes_a_view)])
def test_a_change_is_seen_without_bytes(change: Callable[[Tensor], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU. Writes to a view are counted, but not those to `data`."""
    monkeypatch.setattr(tensor_state, "_view", lambda _: None)
    tensor = tensor_of((8, 8))
    state = TensorState(tensor)
    change(tensor)
    assert not state.holds(tensor)


def test_another_storage_at_the_same_address_is_seen() -> None:
    """Torch may give freed memory to the next tensor. Here both storages lie over the same, unchanged bytes."""
    memory = bytearray(16 * 16 * 4)
    tensor = torch.frombuffer(memory, dtype=torch.float32)
    state, address = TensorState(tensor), tensor.data_ptr()
    tensor.data = torch.frombuffer(memory, dtype=torch.float32)
    assert tensor.data_ptr() == address
    assert not state.holds(tensor)
    assert TensorState(tensor).holds(tensor)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_small_tensor_is_compared_whole_and_a_large_one_by_a_sample(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(DTYPES))
    shape = data.draw(st.tuples(st.integers(1, 90), st.integers(1, 90)))
    tensor = tensor_of(shape, dtype)
    if data.draw(st.booleans()):
        tensor = tensor.view(torch.uint8).T.contiguous().T.view(dtype) if dtype.itemsize == 1 else tensor.T
    state, flat = TensorState(tensor), tensor.data.view(torch.uint8) if dtype.itemsize == 1 else tensor.data
    rows, columns = flat.shape
    row, column = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, columns - 1))
    element = flat[row, column]
    element.copy_(element + 1)
    if tensor.numel() * dtype.itemsize <= 2048:
        assert not state.holds(tensor)
    flat.copy_(flat + 1)
    assert not state.holds(tensor)


def test_inference_tensors_are_compared_by_bytes() -> None:
    with torch.inference_mode():
        tensor = tensor_of((40, 40))
        state = TensorState(tensor)
        assert state.holds(tensor)
        tensor.mul_(2)
        assert not state.holds(tensor)


def test_empty_and_meta_tensors_have_a_state() -> None:
    for tensor in (torch.empty(0, 3), torch.empty(3, 3, device="meta")):
        assert TensorState(tensor).holds(tensor)


def test_nothing_is_kept_alive_and_no_operation_runs() -> None:
    tensor = tensor_of((300, 300))
    storage, alive = tensor.untyped_storage(), weakref.ref(tensor)
    reference = torch.multiprocessing.reductions.StorageWeakRef(storage)
    state = TensorState(tensor)
    with operations() as ran:
        assert state.holds(tensor)
    assert not ran
    del tensor, storage
    assert alive() is None
    assert reference.expired()


def test_a_copied_state_belongs_to_nothing() -> None:
    tensor = tensor_of((4, 4))
    state = TensorState(tensor)
    for other in (copy.copy(state), copy.deepcopy(state), pickle.loads(pickle.dumps(state))):  # noqa: S301 - our own
        assert not other.holds(tensor)
    assert state.holds(tensor)


# copies of `dense_weight`


def codes_of(seed: int) -> Tensor:
    return tensor_of((200, 300), torch.float8_e4m3fn, seed)


def values(codes: Tensor, scale: Tensor) -> Tensor:
    return (codes.float() * scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:200, :300]).bfloat16()


def test_one_matrix_under_two_scales_has_two_copies() -> None:
    codes, scales = codes_of(1), (torch.full((2, 3), 0.5), torch.full((2, 3), 3.0))
    pairs = [BlockScaledWeight(codes, scale) for scale in scales]
    copies = [dense_weight(pair) for pair in pairs]
    assert all(map(torch.equal, copies, (values(codes, scale) for scale in scales)))
    for _ in range(2):
        for pair, copied, scale in zip(pairs, copies, scales, strict=True):
            assert dense_weight(pair) is copied
            assert torch.equal(copied, values(codes, scale))
    codes.copy_(codes_of(2))
    for pair, copied, scale in zip(pairs, copies, scales, strict=True):
        assert dense_weight(pair).data_ptr() == copied.data_ptr()
        assert torch.equal(copied, values(codes, scale))
    forget(pairs[0])


def test_one_matrix_in_blocks_of_two_sizes_has_two_copies() -> None:
    codes, scale = tensor_of((96, 96), torch.float8_e4m3fn), torch.tensor([[1.0, 2, 3], [4, 5, 6], [7, 8, 9]])
    pair, other = BlockScaledWeight(codes, scale), BlockScaledWeight(codes, scale, block_size=40)
    module = SimpleNamespace(weight=codes, scale=scale)
    for n, weight in ((40, other), (32, module), (32, pair), (40, other), (32, module)):
        wide = scale.repeat_interleave(n, 0).repeat_interleave(n, 1)[:96, :96]
        assert torch.equal(dense_weight(weight), (codes.float() * wide).bfloat16())
    assert dense_weight(pair) is dense_weight(module)


def test_memory_that_came_again_at_its_address_is_converted_again() -> None:
    module = SimpleNamespace(weight=codes_of(0), weight_scale_inv=torch.ones(2, 3))
    for seed in range(30):
        new = codes_of(seed)
        dense_weight(module)
        module.weight.data = torch.empty(0, dtype=torch.float8_e4m3fn)
        module.weight.data = new.clone()
        assert torch.equal(dense_weight(module), new.bfloat16())


def test_a_scale_that_is_replaced_again_and_again_takes_no_further_memory() -> None:
    module = SimpleNamespace(weight=codes_of(0), weight_scale_inv=torch.ones(2, 3))
    address = dense_weight(module).data_ptr()
    for n in range(4):
        module.weight_scale_inv = torch.full((2, 3), float(n))
        actual = dense_weight(module)
        assert torch.equal(actual, values(module.weight, module.weight_scale_inv))
        assert actual.data_ptr() == address

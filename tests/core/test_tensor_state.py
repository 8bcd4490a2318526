"""What `TensorState` sees of a tensor that changes; copies of `dense_weight` that are made again."""

from __future__ import annotations

import copy
import pickle
import weakref
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from dsv4attn.core.model.quantized_weight import BlockScaledWeight, dense_weight, forget
from dsv4attn.core.model.tensor_state import TensorState
from tests.core.model.scaled import operations


def tensor_of(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).mul(4).to(dtype)


def written_in_inference_mode(tensor: Tensor) -> None:
    with torch.inference_mode():
        tensor.add_(1)


WRITES: list[Callable[[Tensor], object]] = [
    written_in_inference_mode,
    lambda t: t.add_(1),
    lambda t: t[1:].zero_(),
    lambda t: t.detach().zero_(),
]
MOVES: list[Callable[[Tensor], object]] = [
    lambda t: setattr(t, "data", t.clone()),
    lambda t: setattr(t, "data", t.data.T),
    lambda t: setattr(t, "data", t.data[:-1]),
    lambda t: setattr(t, "data", t.data[1:]),
    lambda t: setattr(t, "data", t.data.view(torch.int32)),
    lambda t: t.set_(t.clone().untyped_storage(), 0, t.shape, t.stride()),
]
UNSEEN: list[Callable[[Tensor], object]] = [
    lambda t: t.data.add_(1),
    lambda t: t.numpy().fill(3),
    lambda t: setattr(t, "data", torch.from_numpy(t.numpy())),
]


@pytest.mark.parametrize("change", [*WRITES, *MOVES, *UNSEEN])
def test_what_is_seen_of_a_tensor(change: Callable[[Tensor], object]) -> None:
    tensor = tensor_of((6, 6))
    state, place = TensorState(tensor), TensorState(tensor, writes=False)
    assert state.holds(tensor)

    change(tensor)

    assert state.holds(tensor) is (change in UNSEEN)
    assert place.holds(tensor) is (change not in MOVES)
    assert TensorState(tensor).holds(tensor)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Adagrad"])
def test_a_step_of_an_optimizer_is_seen_unless_it_is_fused(name: str, fused: bool) -> None:
    parameter = torch.nn.Parameter(tensor_of((4, 4)))
    before, parameter.grad = parameter.detach().clone(), torch.ones(4, 4)
    state = TensorState(parameter)

    getattr(torch.optim, name)([parameter], lr=0.1, fused=fused).step()

    assert not torch.equal(parameter, before)
    assert state.holds(parameter) is fused


def test_only_the_tensor_itself_has_the_state() -> None:
    tensor = tensor_of((4, 4))
    state = TensorState(tensor)
    assert not any(state.holds(other) for other in (tensor.detach(), tensor.clone(), None))
    for other in (copy.copy(state), copy.deepcopy(state), pickle.loads(pickle.dumps(state))):  # noqa: S301 - our own
        assert not other.holds(tensor)
        assert not other.holds(None)
    assert state.holds(tensor)


def test_tensors_without_values_have_a_state() -> None:
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
    assert alive() is state.tensor is None
    assert reference.expired()


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


def test_a_scale_that_is_replaced_again_and_again_takes_no_further_memory() -> None:
    module = SimpleNamespace(weight=codes_of(0), weight_scale_inv=torch.ones(2, 3))
    address = dense_weight(module).data_ptr()
    for n in range(4):
        module.weight_scale_inv = torch.full((2, 3), float(n))
        actual = dense_weight(module)
        assert torch.equal(actual, values(module.weight, module.weight_scale_inv))
        assert actual.data_ptr() == address

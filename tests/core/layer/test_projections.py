"""Weights that multiply the same input share a product, and no weight is held twice."""

from __future__ import annotations

import copy
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from dsv4attn.core.layer import projections
from dsv4attn.core.layer.attention_layer import DeepseekV4Attention
from dsv4attn.core.layer.projections import Projections
from dsv4attn.core.metadata.forward_context import set_forward_context
from dsv4attn.core.model import joined_memory
from dsv4attn.core.model.geometry import LayerKind, LayerRole
from dsv4attn.core.model.weight_copies import WeightCopies
from dsv4attn.core.model.weights import AttentionWeights
from dsv4attn.core.torch_ops import tiles
from dsv4attn.core.torch_ops.tiles import batch_invariant_linear, linear
from dsv4attn.errors import ArgumentError
from dsv4attn.selection import load_backend
from tests.backends.built_in import EVERYWHERE
from tests.core.layer.weight_changes import changed
from tests.harness import FP8, SMALL, LayerStack, deterministic, random_weights
from tests.harness import FP32 as FP32_ROWS
from tests.harness_v41 import SMALL_V41, v41_stack

BF16, FP32, OCP = torch.bfloat16, torch.float32, torch.float8_e4m3fn
C4A_INDEX = next(i for i, (kind, _) in enumerate(SMALL.layers) if kind is LayerKind.CSA)
C4A_ALONE = attrs.evolve(SMALL, layers=(SMALL.layers[C4A_INDEX],))
each_device = pytest.mark.parametrize("gives_fp32", [False, True], ids=["copies in fp32", "results in fp32"])


@pytest.fixture(autouse=True)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU as it is, or as a device that multiplies bf16 into fp32."""
    gives_fp32 = "gives_fp32" in request.fixturenames and request.getfixturevalue("gives_fp32")
    monkeypatch.setattr(projections, "gives_fp32", lambda _: gives_fp32)


class Products(TorchDispatchMode):
    """Counts products with weights, and other operations on weights."""

    def __init__(self, weights: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.of_weights = {weight.untyped_storage().data_ptr() for weight in weights}
        self.products, self.others = list[tuple[int, ...]](), list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        read = [t for t in tensors if t.untyped_storage().data_ptr() in self.of_weights]
        if read and name in ("mm", "addmm", "linear"):
            self.products.append(tuple(read[-1].shape))
        elif read and name in ("_to_copy", "copy_", "cat", "clone"):
            self.others.append(name)
        return func(*args, **(kwargs or {}))


def matrices_of(layer: DeepseekV4Attention) -> list[Tensor]:
    """All that hidden states, latents and outputs are multiplied by."""
    joined = [*layer._of_hidden_states.matrices, *layer._of_latent.matrices]
    wk = getattr(layer.indexer, "_wk", None)
    return [*(each.matrix for each in joined), layer._wo_b, *([] if wk is None else [wk])]


def run(whole: LayerStack, index: int, tokens: int = 17) -> tuple[Tensor, Products]:
    """The output of one layer for a prompt whose tokens see more entries than it selects, and its products."""
    manager, layer = whole.manager, whole.layers[index]
    requests = [(manager.new(), tokens)]
    counted = Products(matrices_of(layer))
    try:
        with torch.no_grad(), set_forward_context(manager.metadata(manager.batch(requests))):
            for source in whole.layers[:index]:
                source(whole.hidden(3, tokens), manager.positions(requests))
            layer._see_weights()
            with counted:
                out = layer(whole.hidden(3, tokens), manager.positions(requests))
    finally:
        manager.free(requests[0][0])
    return out, counted


def held(layer: DeepseekV4Attention) -> int:
    """Bytes of all memory of the weights of a layer, and of what it keeps of them."""
    tensors = [value for _, value in layer._weights.named() if isinstance(value, Tensor)]
    tensors += layer._copies._made.values()
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def own_bytes(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


# products


@each_device
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_each_layer_of_v4_makes_as_few_products_as_it_can(dtype: torch.dtype, gives_fp32: bool) -> None:
    """One of hidden states, one of the latent, one of the output; one more where states want fp32 of bf16."""
    whole = LayerStack(load_backend("reference"), dtype=dtype, layout=attrs.evolve(FP32_ROWS, dtype=dtype))
    more = dtype == BF16 and not gives_fp32
    for index, (kind, _) in enumerate(SMALL.layers):
        _, counted = run(whole, index)
        expected = 3 + (more and kind is not LayerKind.SWA)
        if dtype == BF16 and gives_fp32 and kind is not LayerKind.SWA:
            # this CPU converts the matrix that the device would multiply
            assert counted.others == ["_to_copy"]
            expected -= 1
        else:
            assert not counted.others
        assert len(counted.products) == expected, (kind, counted.products)


@each_device
def test_each_layer_of_v41_makes_as_few_products_as_it_can(gives_fp32: bool) -> None:
    """Layers that own keys multiply latents too."""
    whole = v41_stack()
    roles = set()
    for index in range(SMALL_V41.num_layers):
        layer = whole.layers[index]
        _, counted = run(whole, index)
        owns = layer.role is LayerRole.FULL
        roles.add(layer.role)
        assert len(counted.products) == (4 if owns else 3), (layer.role, counted.products)
        assert not counted.others
    assert roles == set(LayerRole)


def test_queries_of_the_indexer_are_not_made_where_all_entries_are_selected() -> None:
    whole = LayerStack(load_backend("reference"))
    rows = SMALL.num_heads * SMALL.head_dim, SMALL.index_n_heads * SMALL.index_head_dim
    few, many = (run(whole, C4A_INDEX, tokens)[1].products[1] for tokens in (4, 17))
    assert few in {(SMALL.q_lora_rank, rows[0]), (rows[0], SMALL.q_lora_rank)}
    assert many in {(SMALL.q_lora_rank, sum(rows)), (sum(rows), SMALL.q_lora_rank)}


@pytest.mark.parametrize("exact", [False, True], ids=["plain", "deterministic"])
def test_a_layer_of_bf16_is_the_same_with_results_in_fp32(exact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nearer to a layer of fp32 with the same values than with copies in fp32, whose other products are rounded."""
    outs = {}
    backend = load_backend("reference", deterministic=exact)
    limits = deterministic(LayerStack(load_backend("reference")).limits) if exact else None
    weights = {i: random_weights(SMALL, i, dtype=BF16) for i in range(SMALL.num_layers)}
    wide = {i: {n: t.float() for n, t in tensors.items()} for i, tensors in weights.items()}
    for name, values, gives_fp32 in (("fp32", wide, False), ("copies", weights, False), ("results", weights, True)):
        monkeypatch.setattr(projections, "gives_fp32", lambda _, answer=gives_fp32: answer)
        dtype = FP32 if name == "fp32" else BF16
        layout = attrs.evolve(FP32_ROWS, dtype=dtype)
        whole = LayerStack(
            backend,
            layout,
            limits=limits,
            dtype=dtype,
            weights={i: {n: t.clone() for n, t in v.items()} for i, v in values.items()},
        )
        outs[name] = [run(whole, i)[0].float() for i, (kind, _) in enumerate(SMALL.layers) if kind is not LayerKind.SWA]
    for exact_out, copies, results in zip(outs["fp32"], outs["copies"], outs["results"], strict=True):
        errors = [float((out - exact_out).norm() / exact_out.norm()) for out in (copies, results)]
        assert errors[1] < 1.1 * errors[0] < 0.05, errors


@pytest.mark.parametrize("backend", EVERYWHERE)
def test_kernels_take_parts_of_one_product(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of fp32 products lie apart, and so do queries."""
    monkeypatch.setattr(projections, "gives_fp32", lambda _: True)
    outs = []
    for name in ("reference", backend):
        whole = LayerStack(load_backend(name), FP8, geometry=C4A_ALONE, dtype=BF16)
        outs.append(whole.cut(whole.hidden(3, 19), [17, 2])[1][0].float())
        assert [joined.out_dtype for joined in whole.layers[0]._of_hidden_states.matrices] == [FP32]
    assert float((outs[1] - outs[0]).norm() / outs[0].norm()) < 4e-3


@pytest.mark.parametrize("backend", EVERYWHERE)
def test_a_layer_is_the_same_with_weights_whose_elements_lie_apart(backend: str) -> None:
    """Columns of tables, with NaN between their elements: kernels read dense vectors, and the layer makes them."""
    outs = []
    dense = {name: value.bfloat16() for name, value in values_of().items()}
    apart = {}
    for name, value in dense.items():
        table = torch.full((*value.shape, 3), float("nan"), dtype=value.dtype)
        table[..., 1] = value
        apart[name] = value if name in ("wo_a", "wo_b") else table[..., 1]
    for weights in (dense, apart):
        whole = LayerStack(load_backend(backend), FP8, geometry=C4A_ALONE, dtype=BF16, weights={0: weights})
        outs.append(whole.cut(whole.hidden(3, 19), [17, 2])[1][0].float())
    assert float((outs[1] - outs[0]).norm() / outs[0].norm()) < 4e-3
    # these are refused before a step, which would write caches first
    for name in ("wo_a", "wo_b"):
        value = dense[name].t().contiguous().t()
        said = rf"^weights\.{name}: expected stride 1 in the last dimension.* -> pass weights\.{name}\.contiguous\(\)"
        with pytest.raises(ArgumentError, match=said):
            LayerStack(load_backend(backend), FP8, geometry=C4A_ALONE, dtype=BF16, weights={0: dense | {name: value}})
        other = AttentionWeights.from_dict(dense | {name: value}, C4A_ALONE, 0)
        with pytest.raises(ArgumentError, match=said):
            whole.layers[0].refresh(other)


def test_products_in_fp32_are_those_of_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Factors of bf16 have products that fp32 holds, so that only sums round, in any order."""
    g = torch.Generator().manual_seed(1)
    x = torch.randn(33, 512, generator=g).bfloat16()
    weight = (torch.randn(40, 512, generator=g) / 22).bfloat16()
    exact = x.double() @ weight.double().t()
    bound = 2.0**-24 * 24 * (x.double().abs() @ weight.double().abs().t())
    for multiply in (linear, batch_invariant_linear):
        result = multiply(x, weight, FP32)
        assert result.dtype == FP32
        assert ((result.double() - exact).abs() <= bound).all()
        assert ((linear(x.float(), weight.float()).double() - exact).abs() <= bound).all()
        assert multiply(x, weight).dtype == BF16
        assert multiply(x[:0], weight, FP32).shape == (0, 40)
    # what a device is asked for that multiplies so
    asked = []

    def mm(left: Tensor, right: Tensor, *, out_dtype: torch.dtype) -> Tensor:
        asked.append((left.dtype, right.dtype, out_dtype))
        return left.to(out_dtype) @ right.to(out_dtype)

    monkeypatch.setattr(tiles, "gives_fp32", lambda _: True)
    monkeypatch.setattr(torch, "mm", mm)
    assert torch.equal(linear(x.view(3, 11, 512), weight, FP32).flatten(0, 1), x.float() @ weight.float().t())
    assert asked == [(BF16, BF16, FP32)]


def test_a_device_is_asked_once() -> None:
    assert tiles.gives_fp32("cpu") is tiles.gives_fp32("cpu")
    assert tiles.gives_fp32.cache_info().hits
    assert not tiles.gives_fp32.__wrapped__("no such device")


# memory


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_no_weight_is_held_twice(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(projections, "gives_fp32", lambda _: True)
    whole = LayerStack(load_backend("reference"), attrs.evolve(FP32_ROWS, dtype=dtype), dtype=dtype)
    for layer in [*whole.layers, *copy.deepcopy(whole.layers)]:
        layer._see_weights()
        named = [value for _, value in layer._weights.named()]
        # a norm, a bias or a sink of another dtype than the one that is read has a copy
        small = [memory for memory in layer._copies._made.values() if memory.dim() < 2]
        assert held(layer) == own_bytes(named) + own_bytes(small)


class Model(nn.Module):
    """A module that owns the weights of a layer."""

    def __init__(self, values: dict[str, Tensor]) -> None:
        super().__init__()
        for name, value in values.items():
            self.register_parameter(name.replace(".", "_"), nn.Parameter(value.clone(), requires_grad=False))
        self.names = [*values]

    def weights(self) -> dict[str, Any]:
        return {name: getattr(self, name.replace(".", "_")) for name in self.names}


def layer_of(weights: dict[str, Any]) -> LayerStack:
    return LayerStack(load_backend("reference"), geometry=C4A_ALONE, weights={0: weights})


def values_of() -> dict[str, Tensor]:
    return random_weights(SMALL, C4A_INDEX)


def test_a_module_keeps_its_names_and_what_is_loaded_is_seen_without_a_copy() -> None:
    model = Model(values_of())
    names, shapes = [*model.state_dict()], {name: value.shape for name, value in model.state_dict().items()}
    whole = layer_of(model.weights())
    before = run(whole, 0)[0]
    assert [*model.state_dict()] == names
    assert {name: value.shape for name, value in model.state_dict().items()} == shapes
    other = {name: changed(value) for name, value in model.state_dict().items()}
    matrices = [matrix.data_ptr() for matrix in matrices_of(whole.layers[0])]

    model.load_state_dict(other)

    after, counted = run(whole, 0)
    assert not counted.others
    assert not torch.equal(after, before)
    assert torch.equal(after, run(layer_of(Model(dict(zip(model.names, other.values(), strict=True))).weights()), 0)[0])
    assert [matrix.data_ptr() for matrix in matrices_of(whole.layers[0])] == matrices
    assert held(whole.layers[0]) == own_bytes(model.parameters())


def test_a_weight_that_got_other_memory_is_taken_back_into_the_same() -> None:
    """Also a whole module, with `_apply`: no weight is held twice after the next step."""
    model = Model(values_of())
    whole = layer_of(model.weights())
    before = run(whole, 0)[0]
    matrices = [matrix.data_ptr() for matrix in matrices_of(whole.layers[0])[:2]]
    model._apply(lambda tensor: tensor.clone())  # type: ignore[no-untyped-call]
    assert torch.equal(run(whole, 0)[0], before)
    assert [matrix.data_ptr() for matrix in matrices_of(whole.layers[0])[:2]] == matrices
    assert held(whole.layers[0]) == own_bytes(model.parameters())


def test_values_that_a_caller_keeps_are_not_overwritten() -> None:
    """`data` is replaced and put back, as weights that were averaged are for an evaluation."""
    model = Model(values_of())
    whole = layer_of(model.weights())
    before = run(whole, 0)[0]
    kept = {name: parameter.data for name, parameter in model.named_parameters()}
    values = {name: value.clone() for name, value in kept.items()}
    for parameter in model.parameters():
        parameter.data = changed(parameter.data)
    assert not torch.equal(run(whole, 0)[0], before)
    assert all(torch.equal(kept[name], value) for name, value in values.items())
    for name, parameter in model.named_parameters():
        parameter.data = kept[name]
    del kept
    assert torch.equal(run(whole, 0)[0], before)


def test_weights_are_held_once_again_when_who_kept_their_values_is_gone() -> None:
    """Whoever keeps a `state_dict` while one weight gets other memory keeps the memory of all weights."""
    model = Model(values_of())
    whole = layer_of(model.weights())
    before, kept = run(whole, 0)[0], model.state_dict()
    wkv = model.get_parameter("wkv")
    wkv.data = wkv.data.clone()
    assert torch.equal(run(whole, 0)[0], before)
    assert held(whole.layers[0]) > own_bytes(model.parameters())
    del kept
    whole.layers[0].refresh()
    assert held(whole.layers[0]) == own_bytes(model.parameters())
    assert torch.equal(run(whole, 0)[0], before)


def test_tensors_move_together_unless_others_use_their_memory() -> None:
    wide, other = torch.empty(9, 4), torch.randn(2, 4)
    parts = [
        torch.empty(0).set_(wide.untyped_storage(), start * 4, (rows, 4), (4, 1)) for start, rows in ((4, 5), (0, 3))
    ]
    assert joined_memory.movable([*parts, other]) == [False, False, True]
    del wide
    assert joined_memory.movable([*parts, other]) == [True, True, True]
    assert joined_memory.movable(parts[:1]) == [False]
    assert joined_memory.movable([other, other]) == [True, False]
    parts.append(torch.empty(0).set_(parts[0].untyped_storage(), 8, (3, 4), (4, 1)))
    assert joined_memory.movable([*parts, other]) == [False, False, False, True], "two of them overlap"


def test_two_layers_of_the_same_weights_share_their_memory() -> None:
    values = values_of()
    first, second = layer_of(values), layer_of(values)
    assert torch.equal(run(first, 0)[0], run(second, 0)[0])
    pairs = zip(matrices_of(first.layers[0]), matrices_of(second.layers[0]), strict=True)
    assert all(one.data_ptr() == other.data_ptr() for one, other in pairs)
    before = run(first, 0)[0]
    values["wkv"].copy_(changed(values["wkv"]))
    assert not torch.equal(run(first, 0)[0], before)
    assert torch.equal(run(first, 0)[0], run(second, 0)[0])


def aliased(value: Tensor) -> tuple[Tensor, Any]:
    """Another tensor sees the same memory, as the values of `state_dict` do."""
    return value.detach(), value


def part_of_a_larger(value: Tensor) -> tuple[Tensor, Any]:
    wide = torch.cat([value, value])
    return wide[: value.shape[0]], wide[: value.shape[0]]


def of_numpy(value: Tensor) -> tuple[Tensor, Any]:
    array = value.numpy().copy()
    return torch.from_numpy(array), array


def seen_by_numpy(value: Tensor) -> tuple[Tensor, Any]:
    return value, value.numpy()


def of_processes(value: Tensor) -> tuple[Tensor, Any]:
    """Other processes have the memory."""
    return value.share_memory_(), value


@pytest.mark.parametrize("own", [aliased, part_of_a_larger, of_numpy, seen_by_numpy, of_processes])
def test_a_weight_that_others_see_stays_where_it_is(own: Any) -> None:
    """It has a product of its own, and what others write is what is multiplied."""
    values = values_of()
    expected = run(layer_of(dict(values_of())), 0)
    values["wkv"], other = own(values["wkv"])
    place = values["wkv"].data_ptr()
    whole = layer_of(values)
    assert values["wkv"].data_ptr() == place
    out, counted = run(whole, 0)
    torch.testing.assert_close(out, expected[0], rtol=1e-5, atol=1e-6)
    assert len(counted.products) == len(expected[1].products) + 1
    new = changed(values["wkv"])
    if isinstance(other, np.ndarray):
        other[...] = new.numpy()
    else:
        other.copy_(new)
    anew = {**values_of(), "wkv": new.clone()}
    torch.testing.assert_close(run(whole, 0)[0], run(layer_of(anew), 0)[0], rtol=1e-5, atol=1e-6)


def test_parts_of_ranks_stay_parts_of_the_whole() -> None:
    """Queries of a rank are a part of a larger matrix, and have a product of their own."""
    values = values_of()
    weights = AttentionWeights.from_dict(values, C4A_ALONE, 0).shard(1, 2)
    backend, limits = load_backend("reference"), layer_of(values_of()).limits
    layer = DeepseekV4Attention("layer", C4A_ALONE.tensor_parallel(2), 0, limits, backend, weights)
    assert [[*joined.rows] for joined in layer._of_latent.matrices] == [["indexer.wq_b"], ["wq_b"]]
    assert len(layer._of_hidden_states.matrices) == 1
    assert isinstance(weights.wq_b, Tensor)
    matrix = layer._of_latent.matrices[1].matrix
    assert isinstance(matrix, Tensor)
    assert matrix.data_ptr() == weights.wq_b.data_ptr()


# `Projections` and `WeightCopies.joined`


def project(weights: dict[str, Any], x: Tensor, in_fp32: tuple[str, ...] = ()) -> tuple[dict[str, Tensor], int]:
    products = Projections("x", WeightCopies(), linear, in_fp32)
    products.load(weights)
    return products(x), len(products.matrices)


@each_device
def test_weights_of_all_forms(gives_fp32: bool) -> None:
    """bf16 and fp8 share a product; fp32 has one of its own, as it is multiplied in fp32."""
    from dsv4attn.core.model.quantized_weight import BlockScaledWeight, dense_weight

    g = torch.Generator().manual_seed(2)
    x = torch.randn(5, 64, generator=g).bfloat16()
    codes = torch.randn(33, 64, generator=g).to(OCP)
    weights: dict[str, Any] = {
        "a": torch.randn(7, 64, generator=g).bfloat16(),
        "codes": BlockScaledWeight(codes, torch.rand(2, 2, generator=g) + 0.5),
        "wide": torch.randn(3, 64, generator=g),
        "module": nn.Linear(64, 9, bias=False, dtype=BF16),
        "none": None,
        "fp32": torch.randn(4, 64, generator=g).bfloat16(),
    }
    dense = {name: dense_weight(value).detach().clone() for name, value in weights.items() if value is not None}
    products, count = project(weights, x, ("fp32",))
    # "fp32" has a copy in fp32, or shares the product of bf16
    assert count == (2 if gives_fp32 else 3)
    for name, weight in dense.items():
        wide = name in ("wide", "fp32") or gives_fp32
        assert products[name].dtype == (FP32 if wide else BF16), name
        exact = x.double() @ weight.double().t()
        torch.testing.assert_close(products[name].double(), exact, rtol=1e-5 if wide else 2.0**-8, atol=1e-4)
    assert weights["module"].weight.requires_grad


def test_what_is_no_weight_is_refused_by_its_name() -> None:
    for wrong in (
        torch.randn(2, 8, dtype=torch.float64),
        torch.zeros(2, 8, dtype=torch.int8),
        torch.ones(2, 8).to(OCP),
    ):
        with pytest.raises(ArgumentError, match=r"^b: expected"):
            project({"a": torch.randn(2, 8), "b": wrong}, torch.ones(1, 8))
    with pytest.raises(ArgumentError, match=r"^b: expected a tensor"):
        project({"a": torch.randn(2, 8), "b": object()}, torch.ones(1, 8))


def test_one_tensor_under_two_names_is_held_once() -> None:
    tensor, x = torch.randn(4, 8), torch.randn(3, 8)
    products, count = project({"a": tensor, "b": tensor, "c": torch.randn(2, 8)}, x)
    assert torch.equal(products["a"], products["b"])
    assert count == 3


def test_weights_that_follow_each_other_are_read_where_they_are() -> None:
    fused = torch.randn(9, 8)
    parts = dict(zip("abc", fused.split([2, 3, 4]), strict=True))
    products, count = project(parts, torch.ones(1, 8))
    assert count == 1
    assert all(part.untyped_storage().data_ptr() == fused.data_ptr() for part in parts.values())
    torch.testing.assert_close(torch.cat([*products.values()], -1)[0], fused.sum(1))
    assert not joined_memory.follow_each_other([parts["b"], parts["a"]])


def test_modules_that_get_one_weight_later_see_what_is_written_to_it() -> None:
    """The weight lies in the place of one module, and the other has a copy."""
    modules = {name: nn.Linear(8, 4, bias=False).requires_grad_(requires_grad=False) for name in "ab"}
    copies, x = WeightCopies(), torch.randn(3, 8)
    products = Projections("x", copies, linear)
    products.load(modules)
    modules["b"].weight = modules["a"].weight
    for _ in range(2):
        assert copies.changed()
        products.load(modules)
        assert not copies.changed()
        expected = x @ modules["a"].weight.t()
        for product in products(x).values():
            torch.testing.assert_close(product, expected)
        modules["a"].weight.mul_(2)


def test_an_array_whose_rows_were_joined_keeps_its_values() -> None:
    """Torch does not count numpy among the users of memory."""
    array = np.arange(72, dtype=np.float32).reshape(9, 8)
    memory, copies = torch.from_numpy(array).untyped_storage(), WeightCopies()
    weights = {
        "a": torch.empty(0).set_(memory, 0, (4, 8), (8, 1)),
        "b": torch.empty(0).set_(memory, 32, (5, 8), (8, 1)),
    }
    del memory
    products, values = Projections("x", copies, linear), array.copy()
    products.load(weights)
    assert len(products.matrices) == 1
    weights["b"].data = torch.ones(5, 8)
    assert copies.changed()
    products.load(weights)
    assert np.array_equal(array, values)
    torch.testing.assert_close(products(torch.eye(8))["b"], torch.ones(8, 5))


def test_the_stride_of_a_single_row_is_not_that_of_the_weights_after_it() -> None:
    fused = torch.randn(9, 8)
    parts = {"a": fused.as_strided((1, 8), (16, 1)), "b": fused[1:5]}
    size = fused.untyped_storage().nbytes()
    products, count = project(parts, torch.eye(8))
    assert count == 1
    assert all(torch.equal(products[name], part.t()) for name, part in parts.items())
    assert fused.untyped_storage().nbytes() == size


def test_weights_of_inference_mode_are_joined() -> None:
    with torch.inference_mode():
        weights = {"a": torch.randn(2, 8), "b": torch.randn(3, 8)}
        values = {name: value.clone() for name, value in weights.items()}
    # the second layer finds them in one memory
    for _ in range(2):
        products, count = project(weights, torch.eye(8))
        assert count == 1
        assert all(torch.equal(products[name], value.t()) for name, value in values.items())


def test_weights_stay_where_they_are_where_torch_does_not_count_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_storage_Use_Count")  # no public name
    weights = {"a": torch.randn(2, 8), "b": torch.randn(3, 8)}
    places = {name: value.data_ptr() for name, value in weights.items()}

    products, count = project(weights, torch.eye(8))

    assert count == 2
    assert {name: value.data_ptr() for name, value in weights.items()} == places
    assert all(torch.equal(products[name], value.t()) for name, value in weights.items())


def test_wanted_products_end_with_the_last_that_is_wanted() -> None:
    products = Projections("x", WeightCopies(), linear)
    products.load({"a": torch.randn(2, 8), "b": torch.randn(3, 8), "c": torch.randn(4, 8)})
    assert [*products(torch.ones(1, 8), ("a",))] == ["a"]
    assert [*products(torch.ones(1, 8), ("b",))] == ["a", "b"]
    assert not products(torch.ones(1, 8), ())


def test_parts_of_a_matrix_do_not_keep_its_memory() -> None:
    weights, x = {"a": torch.randn(2, 8), "b": torch.randn(3, 8)}, torch.randn(1, 8)
    products = Projections("x", WeightCopies(), linear)
    products.load(weights)
    products(x, ("a",))
    (place,) = (joined.matrix.data_ptr() for joined in products.matrices if isinstance(joined.matrix, Tensor))
    for weight in weights.values():
        weight.data = torch.randn_like(weight)
    products.load(weights)

    assert [joined.matrix.data_ptr() for joined in products.matrices if isinstance(joined.matrix, Tensor)] == [place]
    assert torch.equal(products(x, ("a",))["a"], x @ weights["a"].t())

"""Steps of few tokens multiply the codes of fp8 weights where a backend says so, without another copy of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import define, evolve, field
from torch import Tensor, nn

from dsv4attn.core.contract.layer_ops import CodedProducts
from dsv4attn.core.layer.projections import CodedLinear, Projections
from dsv4attn.core.model.geometry import LayerKind
from dsv4attn.core.model.quantized_weight import BlockScaledWeight, CodedMatrix, codes_of, converted
from dsv4attn.core.model.weight_copies import WeightCopies
from dsv4attn.core.torch_ops.tiles import linear
from dsv4attn.selection import load_backend
from tests.harness import FP8, SMALL, LayerStack, random_weights

BF16, OCP = torch.bfloat16, torch.float8_e4m3fn
MOST = 5


class Codes(nn.Module):
    """A module with an fp8 weight."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        blocks = [-(-size // 32) for size in weight.shape]
        self.weight = nn.Parameter((weight * 64).to(OCP), requires_grad=False)
        self.weight_scale_inv = nn.Buffer(torch.full(blocks, 1 / 64))


@define
class Table:
    """Products with codes by torch. lacking: shapes of weights that it does not multiply."""

    lacking: set[tuple[int, ...]] = field(factory=set)
    seen: list[tuple[int, ...]] = field(factory=list)

    def table(self) -> CodedProducts:
        return CodedProducts(self.rows, self.multiply)

    def rows(self, weight: BlockScaledWeight) -> int:
        return 0 if tuple(weight.weight.shape) in self.lacking else MOST

    def multiply(self, x: Tensor, weight: BlockScaledWeight, out: Tensor) -> None:
        assert x.dtype == out.dtype == BF16
        self.seen.append(tuple(weight.weight.shape))
        out.copy_(linear(x, converted(weight)))


def stack_of(kind: LayerKind, *, coded: bool = True, **options: Any) -> tuple[LayerStack, Table]:
    """A layer of a kind with fp8 weights. coded: whether its backend multiplies codes."""
    geometry = evolve(SMALL, layers=(next(layer for layer in SMALL.layers if layer[0] is kind),))
    backend = load_backend("reference")
    table = Table(**options)
    backend.layer_ops = evolve(backend.layer_ops, coded=table.table() if coded else None)
    low = {"wq_a", "wkv", "wq_b", "indexer.wq_b", "wo_a", "wo_b"}
    weights: dict[str, Any] = {
        name: Codes(value.float()) if name in low else value
        for name, value in random_weights(geometry, 0, dtype=BF16).items()
    }
    return LayerStack(backend, FP8, geometry=geometry, dtype=BF16, weights={0: weights}), table


def run(stack: LayerStack, tokens: int) -> Tensor:
    sequence = stack.manager.new()
    (out,) = stack.run([(sequence, tokens)], stack.hidden(1, tokens))
    stack.manager.free(sequence)
    return out


WO_B, WQ_B, INDEX = (48, 32), (128, 24), (512, 24)
INPUTS = [(24, 48), (32, 48)]


@pytest.mark.parametrize("kind", [LayerKind.SWA, LayerKind.CSA])
def test_few_tokens_read_codes_and_others_the_copies(kind: LayerKind) -> None:
    stack, table = stack_of(kind)
    plain, _ = stack_of(kind, coded=False)
    for tokens in (MOST, MOST + 1):
        table.seen.clear()
        torch.testing.assert_close(run(stack, tokens), run(plain, tokens))
        # hidden states are multiplied by bf16 weights of a compressor too, in one product
        inputs = INPUTS if kind is LayerKind.SWA else []
        assert table.seen == ([] if tokens > MOST else [*inputs, WQ_B, WO_B])


def test_queries_of_the_indexer_have_codes_of_their_own() -> None:
    stack, table = stack_of(LayerKind.CSA)
    latent, both = torch.randn(2, 24).to(BF16), ("wq_b", "indexer.wq_b")
    products = stack.layers[0]._of_latent
    seen = []
    for names in (("wq_b",), both, None, ()):
        table.seen.clear()
        seen.append(([*products(latent, names)], [*table.seen]))
    assert seen == [(["wq_b"], [WQ_B]), *[([*both], [WQ_B, INDEX])] * 2, ([], [])]
    assert products(latent)["indexer.wq_b"].shape == (2, 512)


def test_a_product_has_codes_only_if_all_of_its_weights_do() -> None:
    stack, table = stack_of(LayerKind.CSA, lacking={INDEX})
    run(stack, 3)
    assert table.seen == [WO_B]


def test_codes_are_the_tensors_of_the_caller_and_there_is_no_copy_more() -> None:
    held = []
    for coded in (False, True):
        stack, _ = stack_of(LayerKind.SWA, coded=coded)
        layer = stack.layers[0]
        held.append(sum(memory.untyped_storage().nbytes() for memory in layer._copies._made.values()))
    assert held[0] == held[1]
    of_layer = [layer._wo_b, *(joined.matrix for joined in layer._of_hidden_states.matrices)]
    tensors = [stack.weights[0][name].weight for name in ("wo_b", "wq_a", "wkv")]
    codes = [part.weight for matrix in of_layer if isinstance(matrix, CodedMatrix) for part in matrix.codes]
    assert all(a is b for a, b in zip(codes, tensors, strict=True))


@pytest.mark.parametrize("tokens", [MOST, MOST + 1])
def test_weights_that_change_are_seen(tokens: int) -> None:
    stack, table = stack_of(LayerKind.SWA)
    before, module = run(stack, tokens), stack.weights[0]["wo_b"]
    with torch.no_grad():
        module.weight_scale_inv.mul_(2)
    assert torch.equal(run(stack, tokens), before * 2)
    module.weight = nn.Parameter((module.weight.float() * 2).to(OCP), requires_grad=False)
    assert torch.equal(run(stack, tokens), before * 4)
    # the backend no longer has a kernel for it
    table.lacking.add(WO_B)
    with torch.no_grad():
        module.weight_scale_inv.mul_(0.25)
    table.seen.clear()
    assert torch.equal(run(stack, tokens), before)
    assert WO_B not in table.seen


def test_products_in_fp32_and_of_fp32_read_the_copies() -> None:
    weight = Codes(torch.randn(32, 32))
    table = Table()
    multiply, copies = CodedLinear(linear, table.table()), WeightCopies()
    products = Projections("x", copies, multiply, ["a"], lambda _: MOST)
    products.load({"a": weight})
    assert isinstance(products.matrices[0].matrix, Tensor)
    matrix = copies.coded("b", weight, lambda _: MOST)
    x = torch.randn(2, 2, 32)
    assert isinstance(matrix, CodedMatrix)
    assert multiply(x, matrix).dtype == multiply(x.to(BF16), matrix, torch.float32).dtype == torch.float32
    assert not table.seen
    assert multiply(x.to(BF16), matrix).shape == (2, 2, 32)
    assert multiply(x.to(BF16), matrix.weight).shape == (2, 2, 32)
    assert table.seen == [(32, 32)]


def test_two_equal_scales_are_copied_only() -> None:
    weight = Codes(torch.randn(32, 32))
    assert codes_of(weight) is not None
    weight.register_buffer("weight_scale", torch.full((1, 1), 1 / 64))
    assert codes_of(weight) is None
    assert isinstance(WeightCopies().coded("w", weight, lambda _: MOST), Tensor)

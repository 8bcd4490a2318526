"""Layers that multiply fp8 codes in steps of few tokens: their bits are those of layers that multiply bf16 copies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import evolve
from torch import Tensor

from dsv4attn.backends._triton.launching.runtime import architecture, observed
from dsv4attn.backends._triton.layer.projections import few_rows
from dsv4attn.backends._triton.layer.projections.few_rows import CodedTiles
from dsv4attn.backends._triton.layer.projections.products import Tile
from dsv4attn.core.cache.layout import KVCacheLayout
from dsv4attn.core.contract.device import DeviceFacts
from dsv4attn.core.contract.limits import Limits
from dsv4attn.core.contract.warmup import WarmupSpec
from dsv4attn.core.model.geometry import LayerKind
from dsv4attn.core.model.quantized_weight import BlockScaledWeight, converted
from dsv4attn.selection import load_backend
from tests.backends._triton.cache.caches import DEVICE, seeded, strided
from tests.harness import SMALL, LayerStack, random_weights

BF16, OCP = torch.bfloat16, torch.float8_e4m3fn
ARCH = architecture()
GEOMETRY = evolve(
    SMALL,
    layers=((LayerKind.CSA, 4),),
    head_dim=128,
    rope_dim=64,
    hidden_size=128,
    o_lora_rank=128,
    q_lora_rank=128,
    index_n_heads=2,
    index_head_dim=64,
)
LAYOUT = KVCacheLayout.rows(64, 64, dtype=BF16)
MOST = 32


@pytest.fixture(autouse=True)
def coded_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """An architecture with tiles of codes."""
    tiles = Tile(16, 64, 128, 4, 3), Tile(MOST, 128, 64, 4, 3)
    monkeypatch.setattr(few_rows, "CODED", {ARCH: CodedTiles(tiles, least_columns=128)})


def coded(value: Tensor, seed: int, *, powers: bool = True) -> BlockScaledWeight:
    """A weight in blocks of 128 x 128 with factors of many."""
    exponents = torch.randint(-3, 4, [size // 128 for size in value.shape], generator=seeded(seed)).float()
    factor = torch.exp2(exponents) * (1 if powers else 1.25)
    wide = factor.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return BlockScaledWeight((value.float() / wide).to(OCP).to(DEVICE), factor.to(DEVICE))


def stack_of() -> LayerStack:
    """A deterministic c4a layer with fp8 weights."""
    weights: dict[str, Any] = random_weights(GEOMETRY, 0, dtype=BF16)
    for seed, name in enumerate(("wq_b", "indexer.wq_b", "wo_b")):
        weights[name] = coded(weights[name], seed)
    on_device = {name: value.to(DEVICE) if isinstance(value, Tensor) else value for name, value in weights.items()}
    backend = load_backend("triton", deterministic=True)
    return LayerStack(backend, LAYOUT, geometry=GEOMETRY, dtype=BF16, device=str(DEVICE), weights={0: on_device})


def kernels_of(stack: LayerStack, tokens: int) -> tuple[Tensor, list[str]]:
    """The output of a prompt, and the kernels of its products."""
    sequence = stack.manager.new()
    with observed() as seen:
        (out,) = stack.run([(sequence, tokens)], stack.hidden(1, tokens))
    stack.manager.free(sequence)
    return out, [v.name for v in seen]


@pytest.mark.matrix
def test_bits_do_not_depend_on_what_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    stack, tokens = stack_of(), (3, MOST)
    outs, kernels = zip(*(kernels_of(stack, count) for count in tokens), strict=True)
    assert [names.count("few_rows_kernel") for names in kernels] == [3, 3]
    assert "few_rows_kernel" not in kernels_of(stack, MOST + 1)[1]
    monkeypatch.setattr(few_rows, "CODED", {})
    stack = stack_of()
    for count, out in zip(tokens, outs, strict=True):
        expected, names = kernels_of(stack, count)
        assert torch.equal(out, expected)
        assert "few_rows_kernel" not in names


@pytest.mark.parametrize(("exponent", "rows"), [(-31, 0), (-30, MOST), (30, MOST), (31, 0)])
def test_factors_that_are_very_large_or_small_are_left_to_the_copy(exponent: int, rows: int) -> None:
    weight = coded(torch.randn(256, 128), 0)
    weight.scale[1, 0] = 2.0**exponent

    assert few_rows.most_rows(weight) == rows


def test_factors_that_are_no_powers_of_two_are_left_to_the_copy() -> None:
    value = torch.randn(256, 128)
    assert few_rows.most_rows(coded(value, 0)) == MOST
    assert few_rows.most_rows(coded(value, 0, powers=False)) == 0
    for wrong in (-1.0, 0.0, 2.0**-100, torch.nan, torch.inf):
        weight = coded(value, 0)
        weight.scale[1, 0] = wrong
        assert few_rows.most_rows(weight) == 0


def test_weights_without_a_kernel_have_no_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = coded(torch.randn(256, 256), 0)
    assert few_rows.most_rows(weight) == MOST
    assert few_rows.most_rows(BlockScaledWeight(weight.weight[:, ::2], weight.scale[:, :1])) == 0
    assert few_rows.most_rows(BlockScaledWeight(weight.weight, torch.ones(8, 8, device=DEVICE))) == 0
    assert few_rows.most_rows(BlockScaledWeight(weight.weight.to("meta"), weight.scale.to("meta"))) == 0
    monkeypatch.setattr(few_rows, "CODED", {ARCH: evolve(few_rows.CODED[ARCH], least_columns=257)})
    assert few_rows.most_rows(weight) == 0
    monkeypatch.setattr(few_rows, "CODED", {})
    assert few_rows.most_rows(weight) == 0


def test_inputs_of_all_forms() -> None:
    """Rows that are not aligned, or whose elements lie apart, are copied."""
    weight = coded(torch.randn(256, 128), 0)
    x = torch.randn(3, 2, 128, generator=seeded(0)).to(DEVICE, BF16)
    expected = torch.empty(3, 2, 256, dtype=BF16, device=DEVICE)
    few_rows.multiply_codes(x, weight, expected)
    exact = x.float() @ converted(weight).float().t()
    torch.testing.assert_close(expected.float(), exact, rtol=2.0**-8, atol=1e-5)
    for other in (strided(x, 3), x.transpose(-1, -2).contiguous().transpose(-1, -2)):
        out = torch.full((3, 2, 512), 77.0, dtype=BF16, device=DEVICE)
        few_rows.multiply_codes(other, weight, out[..., 128:384])
        assert torch.equal(out[..., 128:384], expected)
        assert (out[..., :128] == 77).all()
        assert (out[..., 384:] == 77).all()
    # a result that cannot be written where it is wanted is not written elsewhere
    with pytest.raises(RuntimeError, match="view"):
        few_rows.multiply_codes(x, weight, torch.empty(2, 3, 256, dtype=BF16, device=DEVICE).transpose(0, 1))


def test_warm_up_knows_products_of_codes() -> None:
    backend = load_backend("triton")
    spec = WarmupSpec.of(GEOMETRY, Limits(4, 64, 256), swa=LAYOUT, layer_parts=True)
    stack = stack_of()
    with observed() as seen:
        for tokens in (3, MOST):
            kernels_of(stack, tokens)
    compiled = {*backend.kernel_variants(spec, DeviceFacts.here())}
    of_codes = {v for v in seen if v.name == "few_rows_kernel"}
    assert len(of_codes) == 2
    assert of_codes <= compiled
    of_engines = evolve(spec, parts=("indexer",))
    assert of_codes.isdisjoint(backend.kernel_variants(of_engines, DeviceFacts.here()))


def test_the_plan_counts_what_a_projection_makes_of_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = GEOMETRY.layer(0)
    assert load_backend("triton").transient_bytes(layer, 10, 64, 64) == 0
    of_fp8 = load_backend("triton", projection="fp8")
    assert of_fp8.transient_bytes(layer, 10, 64, 64) == 10 * 4 * (128 + 4 * 4)
    monkeypatch.setattr(few_rows, "HEADS", {ARCH: ()})
    assert load_backend("triton").transient_bytes(layer, 10, 64, 64) == 10 * 4 * 64 * 2

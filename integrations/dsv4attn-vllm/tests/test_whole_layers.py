"""Whole layers of vLLM with every step on dsv4attn: against dsv4attn's own layers, caches, builder and pages."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from dsv4attn_vllm.compressor import Compressor
from dsv4attn_vllm.cpu import CPUAttention
from dsv4attn_vllm.cuda import CUDAAttention
from dsv4attn_vllm.indexer import IndexerParts
from dsv4attn_vllm.xpu import XPUAttention
from processes import run_on_rocm
from torch import Tensor
from torch.nn import functional
from vllm.models.deepseek_v4.compressor import DeepseekCompressor
from whole import (
    OwnLayers,
    WholeEngine,
    check_rejected_drafts,
    products_in_fp64,
    projected,
    unequal_layers,
    use_backend,
    whole_engine,
)

from dsv4attn.core.model.quantized_weight import dense_weight

CASES = {"decode": [(45, 1), (38, 1)], "prefill": [(0, 40)], "mixed": [(127, 1), (45, 1), (33, 20)]}


@pytest.fixture(params=["cuda-reference", "cuda-triton", "cpu-reference"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[WholeEngine]:
    """Layers of a platform on a backend."""
    platform, backend = request.param.split("-")
    use_backend(monkeypatch, backend)
    with whole_engine(CPUAttention if platform == "cpu" else CUDAAttention) as engine:
        if platform == "cpu":
            round_as_on_cuda(engine)
        yield engine


def round_as_on_cuda(engine: WholeEngine) -> None:
    """Faked: on a CPU vLLM rounds compressor inputs to bf16, and norms before they are weighted."""
    for layer in engine.layers:
        for compressor in layer._compressors():
            compressor.fused_wkv_wgate.cpu_linear = lambda x, w, _=None: functional.linear(x.float(), w.float())
        layer.q_norm.weight.data.fill_(1.0)
        layer.kv_norm.weight.data.fill_(1.0)


@pytest.mark.parametrize("case", CASES)
def test_outputs_are_bit_for_bit_those_of_own_layers(engine: WholeEngine, case: str) -> None:
    requests = CASES[case]
    steps = [[(i, tokens)] for i, (tokens, _) in enumerate(requests) if tokens]

    assert not unequal_layers(engine, [*steps, [(i, n) for i, (_, n) in enumerate(requests)]], last_alone=True)


def check_platform(layer_class: type) -> None:
    """Hold a mixed step of a platform's layers against dsv4attn's own. Called in another process too."""
    # in the other process no fixture does it
    torch.manual_seed(0)
    with whole_engine(layer_class) as engine:
        assert not unequal_layers(engine, [[(0, 45)], [(0, 1), (1, 20)]], last_alone=True)
        assert isinstance(engine.layers[1].indexer, IndexerParts)


def test_layers_for_intel_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Faked: an event of an Intel GPU is that of a CPU, and there is no cache of an accelerator to empty."""
    monkeypatch.setattr(torch.xpu, "Event", torch.cuda.Event)
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    monkeypatch.setenv("DSV4ATTN_BACKEND", "reference")

    check_platform(XPUAttention)


ROCM = """
import test_whole_layers
from dsv4attn_vllm.rocm import ROCmAttention
test_whole_layers.check_platform(ROCmAttention)
from dsv4attn_vllm import internals
from importlib.metadata import version
lacking = internals.lacking([part for part in internals.parts_of(version("vllm")) if "rocm" in part])
assert lacking == [], lacking
"""


def test_layers_for_rocm(tmp_path: Path) -> None:
    """Faked: what `run_on_rocm` says. One stream, as on no GPU."""
    run_on_rocm(tmp_path, ROCM)


@pytest.mark.parametrize("rows", [{"extra_rows": 2}, {"pad": 2}], ids=["extra rows", "padding"])
def test_rows_of_padding_change_nothing(engine: WholeEngine, rows: dict[str, int]) -> None:
    assert not unequal_layers(engine, [[(0, 45)], [(0, 1), (1, 1)]], last_alone=True, **rows)
    assert (engine.topk[0] >= 0).all()


def test_a_prompt_in_chunks_then_drafts_and_one_rejected(backend: str) -> None:
    speculation = {"method": "mtp", "num_speculative_tokens": 1}
    with whole_engine(CUDAAttention, speculative_config=speculation) as engine:
        # the draft at 49 is rejected
        check_rejected_drafts(engine, [(0, 30), (30, 17), (47, 1), (48, 2), (49, 2)])


def test_index_keys_of_4_bits(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Faked: that this is a Blackwell GPU, which vLLM asks for."""
    from dsv4attn_vllm import serving
    from vllm.models.deepseek_v4 import attention
    from vllm.v1.attention.backends.mla import indexer

    for module in (attention, indexer):
        monkeypatch.setattr(module, "dsa_indexer_uses_fp4", lambda _: True)
    serving._serving.cache_clear()
    with whole_engine(CUDAAttention) as engine:
        assert not unequal_layers(engine, [[(0, 45)], [(0, 1), (1, 20)]], last_alone=True)
        keys = engine.layers[1].indexer.k_cache.kv_cache
    serving._serving.cache_clear()

    assert keys.shape[-1] == 68


def test_a_planted_bug_is_found(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A selection that leaves out the best entry of each token."""
    with whole_engine(CUDAAttention, kinds=("swa", "c4a")) as engine:
        selector, forward = engine.layers[1].indexer.indexer_op, type(engine.layers[1].indexer.indexer_op).forward

        def wrong(*arguments: Any) -> Tensor:
            out = forward(selector, *arguments)
            out[:, 0] = -1
            return out

        monkeypatch.setattr(selector, "forward", wrong)
        assert unequal_layers(engine, [[(0, 60)], [(0, 1)]], last_alone=True) == {1}


# rows 448 to 511 of keys and entries are those of RoPE: the others are rounded to fp8, where one step may vanish
FIRST_ROWS = {
    "fused_wqa_wkv": 0,
    "q_norm": 0,
    "kv_norm": 448,
    "wq_b": 0,
    "wo_b": 0,
    "compressor.fused_wkv_wgate": 448,
}
OURS: dict[str, list[Tensor]] = {}
"""Outputs of dsv4attn's own layers by backend, which no change of vLLM's layer moves: computed once."""


@pytest.mark.parametrize("backend", ["reference"], indirect=True)
@pytest.mark.parametrize("name", FIRST_ROWS)
def test_weights_that_are_one_step_of_bf16_larger_are_found(backend: str, name: str) -> None:
    """The largest of each of 64 rows, of vLLM's layer only: products and norms in fp64 hide nothing."""
    with whole_engine(CUDAAttention, kinds=("swa", "c4a")) as engine:
        work, c4a = [(engine.request(), 45)], engine.layers[1]
        weight = c4a.get_submodule(name).weight
        assert weight.dtype == torch.bfloat16
        moved = weight.detach().clone()
        part = moved[FIRST_ROWS[name] :][:64].view(64, -1)
        part.view(torch.int16).scatter_add_(1, part.abs().argmax(1, True), torch.ones(64, 1, dtype=torch.int16))
        if backend not in OURS:
            hidden = [engine.hidden_states(layer, work, 45) for layer in engine.layers]
            OURS[backend] = OwnLayers(engine).step([(copy.copy(work[0][0]), 45)], hidden)
        weight.data = moved
        of_vllm = engine.step(work)

    assert torch.equal(of_vllm[0], OURS[backend][0])
    assert not torch.equal(of_vllm[1], OURS[backend][1])


def test_products_do_not_depend_on_their_shape() -> None:
    """Nor on the CPU: each is the product in fp64, rounded once."""
    x, weight = torch.randn(37, 256).bfloat16(), torch.randn(192, 256).bfloat16()
    exact = x.double() @ weight.double().T
    with products_in_fp64():
        for rows in (1, 5, 37):
            for columns in (3, 64, 192):
                expected, parts = exact[:rows, :columns], (x[:rows], weight[:columns])
                assert torch.equal(functional.linear(*parts), expected.bfloat16())
                assert torch.equal(functional.linear(parts[0][None], parts[1])[0], expected.bfloat16())
                assert torch.equal(functional.linear(*(part.float() for part in parts)), expected.float())
                assert torch.equal(torch.mm(parts[0], parts[1].T, out_dtype=torch.float32), expected.float())
                assert torch.equal(torch.bmm(parts[0][None], parts[1].T[None])[0], expected.bfloat16())


def blocks_of_fp8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes, and a scale for each block of 128 x 128."""
    rows, columns = weight.shape
    scales = torch.empty(-(-rows // 128), -(-columns // 128), dtype=torch.float32)
    codes = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            part = slice(i * 128, (i + 1) * 128), slice(j * 128, (j + 1) * 128)
            scales[i, j] = 2.0 ** torch.ceil(torch.log2(weight[part].float().abs().max() / 448))
            codes[part] = (weight[part].float() / scales[i, j]).to(torch.float8_e4m3fn)
    return codes, scales


@pytest.mark.parametrize("parts", ["auto", "none"])
def test_an_fp8_wo_a_is_multiplied_as_it_is_or_converted(monkeypatch: pytest.MonkeyPatch, parts: str) -> None:
    from dsv4attn_vllm import serving

    monkeypatch.setenv("DSV4ATTN_BACKEND", "triton")
    monkeypatch.setenv("DSV4ATTN_VLLM_PARTS", parts)
    serving._serving.cache_clear()
    with whole_engine(CUDAAttention) as engine:
        layer = engine.layers[0]
        codes, scales = blocks_of_fp8(layer.wo_a.weight)
        layer.wo_a.weight = torch.nn.Parameter(codes, requires_grad=False)
        layer.wo_a.weight_scale_inv = torch.nn.Parameter(scales, requires_grad=False)
        layer.process_weights_after_loading(torch.bfloat16)
        o, positions = torch.randn(5, 4, 512).bfloat16(), torch.arange(5) * 37

        y = layer._o_proj(o, positions)

        wide = codes.double() * scales.double().repeat_interleave(128, 0)[: codes.shape[0]].repeat_interleave(128, 1)
        expected = projected(layer, o, positions, wide)
        error = (y.double() - expected).norm() / expected.norm()
        assert ("projection" in layer._serving.parts) is (parts == "auto")
        # outputs of attention have 3 bits after the point in fp8, and 7 in bf16
        assert (0.01 < error < 0.05) if parts == "auto" else error < 0.01


@pytest.mark.parametrize("parts", ["auto", "none"])
def test_weights_that_are_loaded_again_are_read_where_graphs_read_them(
    monkeypatch: pytest.MonkeyPatch, parts: str
) -> None:
    """VLLM copies new weights into the old parameters' `.data`, which torch does not count, and processes them."""
    from dsv4attn_vllm import serving

    monkeypatch.setenv("DSV4ATTN_BACKEND", "triton")
    monkeypatch.setenv("DSV4ATTN_VLLM_PARTS", parts)
    serving._serving.cache_clear()
    with whole_engine(CUDAAttention) as engine:
        layer, other = engine.layers[:2]
        wo_a, both = (
            layer.wo_a,
            [blocks_of_fp8(one_layer.wo_a.weight * scale) for one_layer, scale in ((layer, 1), (other, 3))],
        )
        for linear, (codes, scales) in zip((wo_a, other.wo_a), both, strict=True):
            linear.weight = torch.nn.Parameter(codes, requires_grad=False)
            linear.weight_scale_inv = torch.nn.Parameter(scales, requires_grad=False)
        other.wo_b.weight.data.copy_(layer.wo_b.weight)
        for one_layer in (layer, other):
            one_layer.process_weights_after_loading(torch.bfloat16)
        o, positions = torch.randn(5, 4, 512).bfloat16(), torch.zeros(5, dtype=torch.int64)
        old_output, address = layer._o_proj(o, positions), parts == "none" and dense_weight(wo_a).data_ptr()
        for new, parameter in zip(both[1], (wo_a.weight, wo_a.weight_scale_inv), strict=True):
            parameter.data.copy_(new)

        layer.process_weights_after_loading(torch.bfloat16)

        after = layer._o_proj(o, positions)
        assert not torch.equal(old_output, after)
        assert torch.equal(after, other._o_proj(o, positions))
        assert (parts == "none" and dense_weight(wo_a).data_ptr()) == address


def test_outputs_do_not_depend_on_whose_compressor_runs(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same steps with dsv4attn's compressors, and with vLLM's own, in Triton's interpreter."""
    from dsv4attn_vllm import serving

    outs, classes = [], []
    for parts in ("indexer,compressor", "indexer"):
        monkeypatch.setenv("DSV4ATTN_VLLM_PARTS", parts)
        serving._serving.cache_clear()
        torch.manual_seed(0)
        with whole_engine(CUDAAttention) as engine:
            classes.append({type(compressor) for layer in engine.layers for compressor in layer._compressors()})
            outs.append(engine.step([(engine.request(127), 1), (engine.request(37), 1), (engine.request(), 9)]))

    assert classes == [{Compressor}, {DeepseekCompressor}]
    assert all(map(torch.equal, *outs))

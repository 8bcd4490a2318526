"""DeepSeek-V4.1's own records on GPUs for which vLLM widens them: `--kv-cache-dtype nvfp4_ds_mla`; see v41.py.

Faked: that GPU's family. On a CPU the parts that are dsv4attn's by default are those of sm_90 with DeepGEMM: none.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from inspect import getsource
from typing import Any

import pytest
import torch
from dsv4attn_vllm import serving
from dsv4attn_vllm.compressor import V41Compressor, V41Insert
from dsv4attn_vllm.cuda import V41CUDAAttention
from dsv4attn_vllm.guard import GUARD, LOG, RefusedError
from dsv4attn_vllm.records import FP4_CACHE, V41IndexPages
from engine import planned_caches, world
from v41 import CANDIDATES, RATIOS, V41Engine, fake_family, short_run, since_0_33, v41_config, whole_v41_engine
from vllm.config import VllmConfig
from vllm.models.deepseek_v41 import attention, compressor
from vllm.models.deepseek_v41.common.ops import fused_compress_quant_cache
from vllm.platforms import current_platform
from whole import check_rejected_drafts, unequal_layers

from dsv4attn.config import PHASES, Settings
from dsv4attn.core.contract.device import DeviceFacts
from dsv4attn.selection import resolve

ALL, NONE = "all", "none"
STEPS = [[(0, 18)], [(0, 1), (1, 5)], [(0, 2), (1, 1)]]
"""Contexts in which vLLM's indexer selects all entries, for which it needs no scores."""
LONG = [[(0, 42)], [(0, 1), (1, 3)]]


@pytest.fixture(params=[90, 80, 120], ids=["sm_90", "sm_80", "sm_120"])
def family(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    fake_family(monkeypatch, request.param)
    serving._serving.cache_clear()
    return request.param


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_family(monkeypatch, 90)
    serving._serving.cache_clear()


def named_config(**options: Any) -> VllmConfig:
    """The configuration of a command line with this option."""
    return v41_config(kv_cache_dtype=FP4_CACHE, **options)


def layer_of(config: VllmConfig, index: int = 0) -> Any:
    """A new layer; those that others need are there already."""
    rows, columns = config.scheduler_config.max_num_batched_tokens, config.model_config.hf_config.index_topk
    topk = torch.empty(rows, columns, dtype=torch.int32)
    return V41CUDAAttention(config, prefix=f"model.layers.{index}.attn", topk_indices_buffer=topk)


# ---------------------------------------------------------------- what is asked for


@since_0_33
def test_the_option_names_the_records_and_without_it_they_are_vllms(family: int) -> None:
    """The function of vLLM's that widens them stays vLLM's for all other layers of the process."""
    function, tokens = attention._use_v41_mxfp8_kv_record, 64 if family == 90 else 128
    for config, records in ((named_config(), (528, 288)), (v41_config(), (584, 584))):
        with world(config):
            layer = layer_of(config)

        served = layer._serving
        assert (served.swa_layout.record_bytes, served.compressed_layout.record_bytes) == records
        assert (layer.swa_bytes_per_token, layer.compressed_bytes_per_token) == records
        pages = [(problem.swa.page_size, problem.compressed.page_size) for problem in served.problems[1:3]]
        assert pages == [(32, tokens // 2), (32, tokens)]
        assert attention._use_v41_mxfp8_kv_record is function
        assert not function()


@since_0_33
@pytest.mark.usefixtures("hopper")
def test_a_backend_native_to_hopper_takes_the_problems_by_itself() -> None:
    """Decodes and prompts of all kinds of layers, with the pages that vLLM has there."""
    with world(config := named_config()):
        problems = serving.serving_of(config, v41=True).problems

    for phase in PHASES:
        of_phase, device = [problem for problem in problems if problem.phase == phase], DeviceFacts.named("sm_90")
        assert "native to sm_90" in resolve(of_phase, device=device, settings=Settings()).verdict


@since_0_33
@pytest.mark.usefixtures("hopper")
def test_the_log_names_the_records(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(LOG, "info", lambda text, *values: said.append(text % values))
    with world(config := named_config()):
        serving.serving_of(config, v41=True)

    assert "a token has 528 bytes in window caches, an entry 288 in compressed ones" in said


# ---------------------------------------------------------------- memory


@since_0_33
@pytest.mark.usefixtures("hopper")
def test_bytes_of_the_caches_and_tokens_that_fit() -> None:
    """The four compressed caches of the released model with their index keys, and 43 windows; vLLM's own plan."""
    ratios = [0, 0, *[2] * 18, *[1] * 20]
    sizes = {
        "compress_ratios": (*ratios, 0, 0, 0),
        "num_hidden_layers": len(ratios),
        "kv_source_layer_ids": (2, 8, 14, 20),
        "index_source_layer_ids": (2, 8, 14, 20, 24, 28, 32, 36),
    }
    pages, blocks = {}, {}
    for dtype in ("auto", FP4_CACHE):
        config = v41_config(sizes, kv_cache_dtype=dtype)
        with world(config):
            layers = [layer_of(config, i) for i in range(len(ratios))]
            plan = planned_caches(config, pages=None, memory=2**34)
        specs = {name: spec for group in plan.kv_cache_groups for name, spec in specs_of(group)}
        sources = [layers[2].prefix, layers[20].prefix]
        names = [f"{prefix}{part}" for prefix in sources for part in ("", ".indexer.k_cache")]
        pages[dtype] = [specs[name].page_size_bytes for name in (*names, layers[0].swa_cache_layer.prefix)]
        blocks[dtype] = plan.num_blocks
        for tensor in plan.kv_cache_tensors:
            assert dtype == "auto" or tensor.block_stride % 528 == tensor.block_stride % 288 == 0

    # 32 and 64 entries, their index keys, 32 tokens
    assert pages["auto"] == [19008, 4608, 37440, 8640, 19008]
    assert pages[FP4_CACHE] == [9216, 4608, 18432, 8704, 16896]
    assert 1.66 < blocks[FP4_CACHE] / blocks["auto"] < 1.68


def specs_of(group: Any) -> Iterator[tuple[str, Any]]:
    """The caches of a group, and vLLM's description of each one."""
    several = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    for name in group.layer_names:
        yield name, several[name] if several else group.kv_cache_spec


# ---------------------------------------------------------------- steps


whole_engine = partial(whole_v41_engine, kv_cache_dtype=FP4_CACHE)


@since_0_33
@pytest.mark.parametrize("backend", ["reference", "triton"], indirect=True)
@pytest.mark.parametrize("parts", [ALL, NONE])
@pytest.mark.usefixtures("hopper")
def test_whole_layers_are_bit_for_bit_dsv4attns_own(backend: str, parts: str) -> None:
    """Also with vLLM's compressor and indexer, where dsv4attn stores the entries."""
    with whole_engine(parts, CANDIDATES if parts == ALL else None) as engine:
        assert type(engine.layers[1].compressor) is (V41Compressor if parts == ALL else V41Insert)
        assert not unequal_layers(engine, LONG if parts == ALL else STEPS)
        caches = engine.bound()
    widths = [caches[f"model.layers.1.attn{name}"].shape[1:] for name in (".swa_cache", "", ".indexer.k_cache")]
    assert widths == [(32, 528), (32, 288), (32, 132)]
    # what DeepGEMM and the kernels for Hopper read in one piece
    assert not any((cache.storage_offset() | cache.stride(0)) % 16 for cache in caches.values() if cache.itemsize == 1)


@since_0_33
@pytest.mark.usefixtures("hopper")
def test_attention_is_that_of_the_oracle(backend: str) -> None:
    """Of decodes and a prompt, on selections with gaps, from the bytes in the caches; and that of its own builder."""
    with world(config := named_config()):
        engine = V41Engine(config, V41CUDAAttention, layers=len(RATIOS))
        engine.check_step([(40, 1), (20, 9)], [0, 1, 9])

        assert {layer.kv_cache.shape[-1] for layer in engine.layers if layer.is_kv_source} == {288}


@since_0_33
@pytest.mark.usefixtures("hopper")
def test_caches_are_those_of_all_steps_on_dsv4attn(reference: None) -> None:
    """Windows, entries, index keys: next to vLLM's compressor and indexer the same bytes."""
    caches, expected = (short_run(parts, kv_cache_dtype=FP4_CACHE)[1] for parts in (ALL, NONE))

    assert len({cache.shape[-1] for cache in caches.values()}) == 3
    assert [name for name in caches if not torch.equal(caches[name], expected[name])] == []


@since_0_33
@pytest.mark.usefixtures("hopper")
def test_entries_that_are_not_rotated_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted bug in the store of entries, next to vLLM's compressor."""
    monkeypatch.setenv("DSV4ATTN_BACKEND", "reference")
    with whole_engine(NONE) as engine:
        insert = V41Insert.insert_cache

        def insert_unrotated(self: Any, latent: Any, positions: Any, rotary: Any) -> None:
            insert(self, latent, torch.zeros_like(positions), rotary)

        monkeypatch.setattr(V41Insert, "insert_cache", insert_unrotated)
        assert unequal_layers(engine, STEPS[:2]) == {1, 2, 3, 4, 5}


@since_0_33
@pytest.mark.usefixtures("hopper")
def test_rows_of_padding_store_no_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compressor of vLLM makes latents of more rows than a step has tokens."""
    monkeypatch.setenv("DSV4ATTN_BACKEND", "reference")
    with whole_engine(NONE) as engine:
        request = engine.request()
        engine.step([(request, 5)])
        # memory of other groups is next to theirs
        old = {layer.prefix: (layer.kv_cache, layer.kv_cache.clone()) for layer in engine.layers if layer.is_kv_source}
        engine.step([(request, 1)], pad=2, extra_rows=3)
        pages = {name: request.blocks[engine.group_of(name)] for name in old}
        changed = {name: int((new[pages[name]] != was[pages[name]]).any(-1).sum()) for name, (new, was) in old.items()}

    assert changed == {"model.layers.1.attn": 1, "model.layers.3.attn": 1}


@since_0_33
@pytest.mark.usefixtures("hopper")
def test_drafts_that_are_rejected_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of 528 bytes in a model with a draft, whose layers are window-only; vLLM's compressor and its rings."""
    monkeypatch.setenv("DSV4ATTN_BACKEND", "reference")
    with whole_engine(NONE, drafts=5) as engine:
        check_rejected_drafts(engine, [(0, 15), (15, 6), (16, 6), (21, 6), (22, 1), (23, 2)])


# ---------------------------------------------------------------- which parts


@since_0_33
def test_vllms_kernel_for_four_bits_runs_on_sm_100_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """There entries stay vLLM's; elsewhere dsv4attn stores them, and compiles its kernel ahead."""
    monkeypatch.setenv("DSV4ATTN_BACKEND", "triton")
    for number in (100, 90):
        fake_family(monkeypatch, number)
        serving._serving.cache_clear()
        with world(config := named_config()):
            served = serving.serving_of(config, v41=True)
            layers = [layer_of(config, i) for i in range(2)]
        expected = V41Insert if number == 90 else compressor.DeepseekCompressor
        assert type(layers[1].compressor) is expected
        assert served.inserts_entries is (number == 90)
        variants = served.backend.kernel_variants(served.bounds(), DeviceFacts.named("h100"))
        assert ("store_kernel" in {variant.name for variant in variants}) is (number == 90)
        assert type(layers[1].indexer.k_cache) is V41IndexPages
    assert "cvt.rn.satfinite.e2m1x2" in getsource(fused_compress_quant_cache._fp32x2_to_fp4x2.fn)


# ---------------------------------------------------------------- refusals


@pytest.mark.usefixtures("hopper")
def test_records_of_vllm_0_32_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pages are not whole records apart."""
    monkeypatch.setattr(type(GUARD), "installed", lambda _: "0.32.0")
    with world(config := named_config()):
        expected = r"--kv-cache-dtype nvfp4_ds_mla: expected vLLM 0.33 or newer, .* got 0.32.0 -> install"
        with pytest.raises(RefusedError, match=expected):
            layer_of(config)


def test_they_are_refused_on_rocm(monkeypatch: pytest.MonkeyPatch) -> None:
    with world(config := named_config()):
        monkeypatch.setattr(type(current_platform), "is_rocm", lambda _: True)
        expected = "--kv-cache-dtype: expected auto or fp8 or fp8_ds_mla, got nvfp4_ds_mla -> leave"
        with pytest.raises(RefusedError, match=expected):
            serving.serving_of(config, v41=True)

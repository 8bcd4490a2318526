"""Planned memory: the bytes that a `CacheManager` allocates, the weights of the released models, and what fits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from attrs import evolve

from dsv4attn.core.cache.layout import KVCacheLayout
from dsv4attn.core.contract.limits import Limits
from dsv4attn.core.model.geometry import LayerKind, ModelGeometry
from dsv4attn.errors import ArgumentError, GeometryError
from dsv4attn.selection import load_backend
from dsv4attn.serving.cache_manager import CacheManager
from dsv4attn.serving.memory import CACHES, Deployment, ModelSizes
from tests.core.model.test_configurations import OTHER_FIELDS, RELEASED

GIB = 2**30
LIMITS = Limits(8, 8192, 131_072)
RECORDS = {"v41_fp8": ("v41_fp8", None), "v41_fp4": ("v41_fp8", "v41_fp4"), "fp8_ds_mla": ("fp8_ds_mla", None)}


def deployment(model: str, **options: object) -> Deployment:
    geometry = ModelGeometry.preset(model)
    return Deployment(geometry, ModelSizes.of(geometry), load_backend("triton"), **options)  # type: ignore[arg-type]


def allocated(manager: CacheManager) -> dict[str, int]:
    """Bytes of the tensors that a manager has allocated, each once, by cache."""
    tensors = {
        id(cache): (name, cache.tensor.untyped_storage().nbytes())
        for caches in manager.caches
        for name, cache in caches.present.items()
    }
    names = {"windows": ["swa"], "entries": ["compressed"], "index keys": ["index"], "states": ["state", "index_state"]}
    return {cache: sum(size for name, size in tensors.values() if name in names[cache]) for cache in CACHES}


@pytest.mark.parametrize(
    ("model", "record", "limits", "device"),
    [
        ("flash", "fp8_ds_mla", Limits(3, 300, 2000), "cpu"),
        ("flash", "fp8_ds_mla", Limits(64, 8192, 1_048_576, num_speculative_tokens=3), "meta"),
        ("pro", "fp8_ds_mla", Limits(1, 4096, 100), "meta"),
        ("v4.1-flash", "v41_fp8", Limits(5, 512, 10_000), "meta"),
        ("v4.1-flash", "v41_fp4", Limits(2, 300, 700, num_speculative_tokens=1), "cpu"),
    ],
)
def test_caches_have_the_bytes_that_a_manager_allocates(model: str, record: str, limits: Limits, device: str) -> None:
    window, entries = (name and KVCacheLayout.of_record(name) for name in RECORDS[record])
    assert isinstance(window, KVCacheLayout)
    one = deployment(model, kv_layout=window, compressed_layout=entries)
    geometry, drafts = one.geometry, limits.num_speculative_tokens > 0
    layers = geometry.layers + ((LayerKind.SWA, 1),) * one.sizes.mtp_layers * drafts

    manager = CacheManager(
        evolve(geometry, layers=layers), limits, window, compressed_layout=entries or None, device=device
    )
    assert one.plan(limits).caches == pytest.approx(allocated(manager), rel=0.01)


def test_one_more_request_takes_its_bytes_and_shared_tokens_are_kept_once() -> None:
    flash = deployment("flash")
    of_8, of_9 = (flash.plan(evolve(LIMITS, max_num_reqs=n)) for n in (8, 9))

    assert {name: of_9.caches[name] - of_8.caches[name] for name in CACHES} == of_8.request
    shared = evolve(flash, shared_tokens=65_536).plan(LIMITS)
    assert shared.caches["entries"] == of_8.caches["entries"] - 7 * of_8.request["entries"] // 2
    assert (shared.caches["windows"], shared.request) == (of_8.caches["windows"], of_8.request)
    with pytest.raises(ArgumentError, match="shared tokens: expected at most 4096, the max_model_len, got 65536"):
        evolve(flash, shared_tokens=65_536).plan(evolve(LIMITS, max_model_len=4096))


def test_ranks_that_share_entries_divide_them_and_nothing_else() -> None:
    flash = deployment("flash", tensor=4)
    alone, two = flash.plan(LIMITS), evolve(flash, context=2).plan(LIMITS)

    assert two.caches == {
        **alone.caches,
        "entries": alone.caches["entries"] // 2,
        "index keys": alone.caches["index keys"] // 2,
    }
    assert (two.weights, two.workspace > alone.workspace) == (alone.weights, True)
    assert [evolve(flash, context=n).ranks for n in (1, 2, 3)] == [4, 4, 12]


@pytest.mark.parametrize(("model", "block", "blocks"), [("flash", 1_002_240, 1684), ("pro", 1_435_968, 1684)])
def test_caches_of_vllm_have_its_blocks(model: str, block: int, blocks: int) -> None:
    """What vLLM 0.33.0 plans for one request of 4,096 tokens in steps of 2,048: the test in dsv4attn-vllm asks it."""
    caches = deployment(model, vllm=True).plan(Limits(1, 2048, 4096)).caches

    assert caches["entries"] + caches["index keys"] == 16 * block
    assert sum(caches.values()) == pytest.approx(blocks * block, rel=0.01)


def test_stages_have_the_layers_of_the_model_together() -> None:
    whole, parts = deployment("flash", tensor=4).plan(LIMITS), deployment("flash", tensor=4, pipeline=3)
    plans = [stage.plan(LIMITS, parts._workspace(LIMITS)) for stage in parts.stages]

    assert [plan.layers for plan in plans] == [(0, 14), (14, 28), (28, 43)]
    for name, size in whole.weights.items():
        assert sum(plan.weights.get(name, 0) for plan in plans) == pytest.approx(size, abs=3)
    assert {name: sum(plan.caches[name] for plan in plans) for name in CACHES} == whole.caches
    assert parts.plan(LIMITS) == max(plans, key=lambda plan: plan.total)


def test_what_fits_is_the_most_that_fits() -> None:
    flash, budget = deployment("flash", tensor=4), 42 * GIB
    tokens, requests = flash.longest_context(LIMITS, budget), flash.most_requests(LIMITS, budget)

    for limits in (evolve(LIMITS, max_model_len=tokens), evolve(LIMITS, max_num_reqs=requests)):
        assert flash.plan(limits).total <= budget
    for limits in (evolve(LIMITS, max_model_len=tokens + 1), evolve(LIMITS, max_num_reqs=requests + 1)):
        assert flash.plan(limits).total > budget
    assert flash.longest_context(LIMITS, 400 * GIB) == 1_048_576
    assert (flash.longest_context(LIMITS, 9 * GIB), flash.most_requests(LIMITS, 9 * GIB)) == (0, 0)


def test_a_configuration_has_the_weights_of_its_preset(tmp_path: Path) -> None:
    path, flash = tmp_path / "config.json", deployment("flash")
    path.write_text(json.dumps({**RELEASED, **OTHER_FIELDS}), encoding="utf-8")
    assert ModelSizes.of(ModelGeometry.from_config(path), path) == flash.sizes

    # without quantisation every large weight has two bytes
    plain = {name: value for name, value in OTHER_FIELDS.items() if name not in ("quantization_config", "expert_dtype")}
    path.write_text(json.dumps({**RELEASED, **plain}), encoding="utf-8")
    in_bf16 = evolve(flash, sizes=ModelSizes.of(ModelGeometry.from_config(path), tmp_path))
    experts, weights = 43 * 256 * 3 * 4096 * 2048, in_bf16.plan(LIMITS).weights
    assert (weights["routed experts"], weights["shared experts"]) == (2 * experts, 2 * experts // 256)
    del plain["vocab_size"]
    path.write_text(json.dumps({**RELEASED, **plain}), encoding="utf-8")
    with pytest.raises(GeometryError, match="vocab_size: expected a number above 0, got None -> add it to "):
        ModelSizes.of(ModelGeometry.from_config(path), path)


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("flash", {"tensor": 3}, "tensor parallel size"),
        ("flash", {"pipeline": 44}, "pipeline parallel size: expected at most 43"),
        ("v4.1-flash", {"pipeline": 2}, "pipeline parallel size: expected 1 for deepseek-v4.1-flash"),
        ("v4.1-flash", {"context": 2}, "context parallel size: expected 1"),
        ("v4.1-flash", {"vllm": True}, "model: expected one of DeepSeek-V4 with the pages of vLLM"),
        ("flash", {"vllm": True, "context": 2}, "context parallel size: expected 1 with the pages of vLLM"),
    ],
)
def test_ranks_that_do_not_divide_the_model_are_refused(model: str, options: dict[str, int], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        deployment(model, **options)

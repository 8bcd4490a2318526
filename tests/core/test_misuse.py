"""What a newcomer gets wrong: each is answered by an error of the package that names the argument, and a cure."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import dsv4attn as ds
from dsv4attn.config import Settings
from dsv4attn.core.contract.limits import Limits
from dsv4attn.core.contract.problem import CacheFacts, Problem
from dsv4attn.core.metadata.builder import MetadataBuilder
from dsv4attn.core.metadata.forward_context import set_forward_context
from dsv4attn.core.model.geometry import LayerKind
from dsv4attn.errors import ArgumentError, Dsv4AttnError
from dsv4attn.selection import explain, select_backend
from dsv4attn.serving.cache_manager import CacheManager
from tests.harness import FP32, SMALL, bound_layer, random_weights

FLASH = ds.ModelGeometry.preset("flash")
LIMITS = Limits(4, 64, 256)
REFERENCE = ds.load_backend("reference")
PROBLEM = Problem.of(SMALL, "c4a", "decode")
WEIGHTS = random_weights(SMALL, 0)
COUNT = r"expected an integer of at least \d, got"
of: Any = partial(Problem.of, FLASH)
preset, rope = ds.ModelGeometry.preset, FLASH.layer(0).rope


def manager() -> CacheManager:
    return CacheManager(SMALL, LIMITS, FP32)


def layer(*changed: Any) -> Any:
    """A layer of the small model, whose first arguments are these."""
    usual = "l", SMALL, 0, LIMITS, REFERENCE, ds.AttentionWeights.from_dict(WEIGHTS, SMALL, 0)
    return ds.DeepseekV4Attention(*changed, *usual[len(changed) :])


CALLS: list[tuple[Callable[[], Any], str]] = [
    (lambda: preset(None), r"name: expected a str, got None -> pass one of deepseek-v4-flash"),  # type: ignore[arg-type]
    (lambda: FLASH.tensor_parallel("2"), rf"tensor parallel size: {COUNT} '2'"),  # type: ignore[arg-type]
    (lambda: FLASH.tensor_parallel(2.0), rf"tensor parallel size: {COUNT} 2.0"),  # type: ignore[arg-type]
    (lambda: FLASH.tensor_parallel(0), rf"tensor parallel size: {COUNT} 0"),
    (lambda: FLASH.layer("0"), rf"layer index: {COUNT} '0'"),  # type: ignore[arg-type]
    (lambda: of(foo=1), r"Problem.of: expected a keyword of geometry, kind, phase, .*, got 'foo'$"),
    (lambda: of(heds=1), r"Problem.of: expected a keyword of .*, got 'heds'; did you mean 'heads'\?"),
    (lambda: of(query_len=-1), rf"query_len: {COUNT} -1"),
    (lambda: of(query_len="1"), rf"query_len: {COUNT} '1'"),
    (lambda: of(heads=0), rf"num_heads: {COUNT} 0"),
    (lambda: of(topk="5"), rf"topk: {COUNT} '5'"),
    (lambda: of(topk=-1), rf"topk: {COUNT} -1"),
    (lambda: of(swa_page_size=0), rf"page_size: {COUNT} 0"),
    (lambda: of(window_columns=-1), rf"window_columns: {COUNT} -1"),
    (lambda: of(max_model_len="1"), rf"max_model_len: {COUNT} '1'"),
    (lambda: of(deterministic="no"), r"deterministic: expected True or False, got 'no'"),
    (lambda: Problem.of("flash"), r"geometry: expected a ModelGeometry or LayerGeometry, got 'flash' -> pass Model"),  # type: ignore[arg-type]
    (lambda: Problem("decode", None), r"layer: expected a LayerGeometry, got None"),  # type: ignore[arg-type]
    (lambda: CacheFacts(layot="rows"), r"CacheFacts: expected .*, got 'layot'; did you mean 'layout'\?"),  # type: ignore[call-arg]
    (
        lambda: Limits(4, 64, 256, num_speculative_token=1),  # type: ignore[call-arg]
        r"Limits: expected a keyword of max_num_reqs, .*, got 'num_speculative_token'; did you mean 'num_spec",
    ),
    (lambda: Limits(max_reqs=4), r"Limits: expected .*, got 'max_reqs'; did you mean 'max_num_reqs'\?"),  # type: ignore[call-arg]
    (lambda: Limits(4, 64, 256, single_phase="no"), r"single_phase: expected True or False, got 'no'"),  # type: ignore[arg-type]
    (lambda: manager().metadata({}), r"batch: expected a Batch, got dict -> pass Batch\(...\), or what CacheManager"),  # type: ignore[arg-type]
    (lambda: MetadataBuilder(SMALL, LIMITS).build({}), r"batch: expected a Batch, got dict"),  # type: ignore[arg-type]
    (lambda: MetadataBuilder(SMALL, LIMITS, backend="triton"), r"backend: expected a backend, got 'triton'"),  # type: ignore[arg-type]
    (lambda: MetadataBuilder("flash", LIMITS), r"geometry: expected a ModelGeometry, got 'flash' -> pass Model"),  # type: ignore[arg-type]
    (lambda: MetadataBuilder(SMALL, LIMITS, device="gpu"), r"device: expected a torch device, got 'gpu' -> write it"),
    (lambda: manager().batch(None), r"requests: expected a list of \(sequence, number of tokens\), got None"),  # type: ignore[arg-type]
    (lambda: manager().batch([manager().new()]), r"requests: expected a list of .*, got \['CachedSequence'\]"),  # type: ignore[list-item]
    (lambda: manager().batch([(manager().new(), "2")]), rf"tokens of a sequence: {COUNT} '2'"),  # type: ignore[list-item]
    (lambda: CacheManager("flash", LIMITS, FP32), r"geometry: expected a ModelGeometry, got 'flash'"),  # type: ignore[arg-type]
    (lambda: CacheManager(SMALL, {}, FP32), r"limits: expected a Limits, got dict -> pass Limits\("),  # type: ignore[arg-type]
    (lambda: CacheManager(SMALL, LIMITS, "fp8"), r"kv_layout: expected a KVCacheLayout, got 'fp8'"),  # type: ignore[arg-type]
    (lambda: CacheManager(SMALL, LIMITS, FP32, device="gpu"), r"device: expected a torch device, got 'gpu'"),
    (lambda: ds.WorkspaceManager(3.5), r"device: expected a torch device, got 3.5"),  # type: ignore[arg-type]
    (lambda: ds.cos_sin_cache(FLASH, 5), r"rope: expected a Rope, got ModelGeometry -> pass geometry.layer\(i\).rope"),  # type: ignore[arg-type]
    (lambda: ds.cos_sin_cache(rope, "5"), rf"max_position: {COUNT} '5'"),  # type: ignore[arg-type]
    (lambda: ds.cos_sin_cache(rope, -1), rf"max_position: {COUNT} -1"),
    (lambda: ds.KVCacheLayout.fp8_ds_mla("a"), rf"nope_dim: {COUNT} 'a'"),  # type: ignore[arg-type]
    (lambda: ds.AttentionWeights.from_dict(None, SMALL, 0), r"weights: expected a Mapping, got None -> pass a dict"),  # type: ignore[arg-type]
    (lambda: layer("l", SMALL.layer(0)), r"geometry: expected a ModelGeometry, got LayerGeometry"),
    (lambda: layer("l", SMALL, "0"), rf"layer index: {COUNT} '0'"),
    (lambda: layer("l", SMALL, 0, None), r"limits: expected a Limits, got None"),
    (lambda: layer("l", SMALL, 0, LIMITS, "reference"), r"backend: expected a backend, got 'reference'"),
    (lambda: layer("l", SMALL, 0, LIMITS, REFERENCE, WEIGHTS), r"weights: expected a AttentionWeights, got dict -> "),
    (lambda: layer().bind_kv_cache(None), r"caches: expected a DeepseekV4Caches, got None -> pass manager.caches"),
    (lambda: explain(None), r"problem: expected a Problem, got None -> pass Problem.of\("),  # type: ignore[arg-type]
    (lambda: explain(PROBLEM, backend=REFERENCE), r"backend: expected a str, got ReferenceBackend -> pass a name"),  # type: ignore[arg-type]
    (lambda: explain(PROBLEM, settings={}), r"settings: expected a Settings, got dict"),  # type: ignore[arg-type]
    (lambda: select_backend(PROBLEM, settings={}), r"settings: expected a Settings, got dict"),  # type: ignore[arg-type]
    (lambda: Settings(deny="x"), r"Settings.allow or deny: expected a list of names, got 'x' -> pass \['x'\]"),
    (lambda: Settings(allow=[3]), r"Settings.allow or deny: expected a list of names, got \[3\]"),
    (lambda: Settings(denny=[]), r"Settings: expected a keyword of .*, got 'denny'; did you mean 'deny'\?"),  # type: ignore[call-arg]
    (lambda: Settings(options={"reference": 3}), r"Settings.options: expected a dict of options by the name of the"),
    (lambda: Settings(decode=3), r"Settings: expected the name of a backend, or a Setting, got int"),
]


@pytest.mark.parametrize(("call", "said"), CALLS, ids=[said[:50] for _, said in CALLS])
def test_it_is_refused_by_name(call: Callable[[], Any], said: str) -> None:
    with pytest.raises(ArgumentError, match=f"^{said}"):
        call()


@pytest.mark.parametrize("name", ["q", "output", "kv", "positions"])
@pytest.mark.parametrize("wrong", [np.zeros((3, 4, 32), "f"), [1, 2]])
def test_arrays_and_lists_where_a_layer_takes_tensors(name: str, wrong: Any) -> None:
    """forward_mqa reads neither kv nor positions; the insert has no output."""
    case = bound_layer(LayerKind.C4A)
    given = {"q": case.q, "kv": case.kv, "positions": case.positions, "output": torch.zeros_like(case.q), name: wrong}
    q, kv, positions, output = given.values()
    with set_forward_context(case.metadata):
        if name in ("q", "output"):
            with pytest.raises(ArgumentError, match=f"^{'out' if name == 'output' else name}: expected a tensor"):
                case.layer.forward_mqa(q, kv, positions, output)
        if name != "output":
            with pytest.raises(ArgumentError, match=f"^{name}: expected a tensor"):
                case.layer.fused_qnorm_rope_kv_insert(q, kv, positions)


@pytest.mark.parametrize("names", [["x"], ("x",), {"x"}, frozenset("x")])
@pytest.mark.parametrize("key", ["allow", "deny"])
def test_names_in_any_sequence(names: Any, key: str) -> None:
    settings = Settings(**{key: names})
    assert getattr(settings, key) == ("x",)
    assert explain(PROBLEM, device="cpu", settings=settings).require().info.name == "reference"


def test_a_name_is_a_setting() -> None:
    assert explain(PROBLEM, device="cpu", settings=Settings(decode="acme")).request.value == "acme"
    assert explain(PROBLEM, device="cpu", settings=Settings(decode="reference")).require().info.name == "reference"


def test_types_of_torch_are_names_too() -> None:
    pairs = {torch.bfloat16: "bfloat16", torch.float32: "float32", torch.float8_e4m3fn: "e4m3fn"}
    for dtype, name in pairs.items():
        assert Problem.of(FLASH, dtype=dtype) == Problem.of(FLASH, dtype=name)  # type: ignore[arg-type]
    assert Problem.of(FLASH, q_dtype=torch.float32) == Problem.of(FLASH, q_dtype="float32")  # type: ignore[arg-type]


def test_more_requests_than_tokens_are_meant() -> None:
    """Requests without a token in a step count as requests: 9 of them in a step of 4 tokens."""
    limits = Limits(9, 4, 64)
    manager = CacheManager(SMALL, limits, FP32)
    requests = [(manager.new(), int(i % 2)) for i in range(9)]
    metadata = manager.metadata(manager.batch(requests))
    assert {part.swa.num_actual_tokens for part in metadata.values()} == {4}
    assert {part.swa.num_decodes for part in metadata.values()} == {9}
    with pytest.raises(Dsv4AttnError, match="max_num_reqs"):
        manager.batch([(manager.new(), 0) for _ in range(10)])


@pytest.mark.parametrize("requests", [None, 3, ["a"], [(1, 2, 3)]])
def test_requests_that_are_no_pairs(requests: Any) -> None:
    manager = CacheManager(SMALL, Limits(2, 8, 32), FP32)
    for call in (manager.positions, manager.reserve, manager.advance, manager.batch):
        with pytest.raises(ArgumentError, match=r"^requests: expected a list of \(sequence, number of tokens\), got"):
            call(requests)


def test_a_selection_of_no_list() -> None:
    manager = CacheManager(SMALL, Limits(2, 8, 32), FP32)
    wrong: Any = None
    with pytest.raises(ArgumentError, match=r"^sequences: expected a list, got NoneType"):
        manager.select(wrong, [0])
    with pytest.raises(ArgumentError, match=r"^rows: expected a list, got NoneType"):
        manager.select([manager.new()], wrong)

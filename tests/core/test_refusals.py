"""Arguments that are refused: each by an error of the package that names the argument, and says a cure.

`REFUSED` is one table for every function and class that a user calls: the call, and how its error begins. Arguments of
`forward_mqa` are in `test_bad_input.py`, which also checks that nothing is written before the error.
"""

# mypy: disable-error-code="arg-type, call-arg, list-item"

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import attrs
import numpy as np
import pytest
import torch

import dsv4attn as ds
from dsv4attn.config import Settings
from dsv4attn.core.attention.forward_mqa import forward_mqa
from dsv4attn.core.cache.layer_caches import LayerCaches
from dsv4attn.core.cache.layout import Fp8Format, PagedKVCache
from dsv4attn.core.cache.ownership import Ownership
from dsv4attn.core.context_parallel.context import ContextParallel
from dsv4attn.core.context_parallel.metadata import OwnedMetadataBuilder
from dsv4attn.core.contract.limits import Limits
from dsv4attn.core.contract.phased import PhasedBackend
from dsv4attn.core.contract.problem import CacheFacts, Problem
from dsv4attn.core.metadata.builder import MetadataBuilder
from dsv4attn.core.metadata.forward_context import set_forward_context
from dsv4attn.core.model import quantized_weight
from dsv4attn.core.model.geometry import LayerKind
from dsv4attn.core.model.quantized_weight import BlockScaledWeight, dense_weight
from dsv4attn.core.model.weights import AttentionWeights
from dsv4attn.errors import ArgumentError, Dsv4AttnError
from dsv4attn.selection import explain, select_backend
from dsv4attn.serving.allocator import BlockAllocator, BlockTable
from dsv4attn.serving.cache_manager import CacheManager
from dsv4attn.serving.request import Request
from dsv4attn.serving.scheduler import Scheduler
from tests.core.attention.test_bad_input import refused
from tests.core.model.scaled import DEVICE, OCP, Scaled
from tests.harness import (
    FP32,
    LAYOUT,
    LIMITS,
    SMALL,
    SWA,
    LayerStack,
    bound_layer,
    forward_args,
    metadata_of,
    random_weights,
)
from tests.harness_v41 import LIMITS_V41, SMALL_V41, v41_stack

FLASH = ds.ModelGeometry.preset("flash")
REFERENCE = ds.load_backend("reference")
PROBLEM = Problem.of(SMALL, "c4a", "decode")
WEIGHTS = random_weights(SMALL, 0)
COUNT = r"expected an integer of at least \d, got"
META = torch.device("meta")
FP8_WEIGHT = Scaled.draw(13, 130, 260, OCP, "fp32")
PLAN = {"layer": SMALL.layer_of_kind("swa"), "limits": LIMITS, "backend": REFERENCE, "layout": FP32}
CACHE = PagedKVCache.allocate(FP32, 1, 4)
C4A_BUFFER = torch.zeros(64, 3, dtype=torch.int32)
TABLE = torch.zeros(512, 8)
WIDE_BUFFER = torch.zeros(48, 6, dtype=torch.int32)
WIDER_V41 = attrs.evolve(SMALL_V41, index_topk=6)
of: Any = partial(Problem.of, FLASH)
preset, rope = ds.ModelGeometry.preset, FLASH.layer(0).rope


def manager() -> CacheManager:
    return CacheManager(SMALL, LIMITS, FP32)


def layer(*changed: Any) -> Any:
    """A layer of the small model, whose first arguments are these."""
    usual = "l", SMALL, 0, LIMITS, REFERENCE, ds.AttentionWeights.from_dict(WEIGHTS, SMALL, 0)
    return ds.DeepseekV4Attention(*changed, *usual[len(changed) :])


def mla_layer(**changes: Any) -> ds.DeepseekV4MLAAttention:
    """A c4a layer whose arguments fit, but for these."""
    arguments: dict[str, Any] = {
        "geometry": SMALL.layer_of_kind("c4a"),
        "limits": LIMITS,
        "backend": REFERENCE,
        "attn_sink": None,
        "cos_sin_cache": TABLE,
        "topk_indices_buffer": C4A_BUFFER,
    }
    return ds.DeepseekV4MLAAttention("l", **{**arguments, **changes})


def layer_v41(index: int, sources: Any = (), geometry: Any = SMALL_V41, **options: Any) -> ds.DeepseekV4Attention:
    """A layer of the small network of DeepSeek-V4.1 with these sources."""
    weights = ds.AttentionWeights.from_dict(random_weights(geometry, index), geometry, index)
    return ds.DeepseekV4Attention(
        f"layers.{index}", geometry, index, LIMITS_V41, REFERENCE, weights, sources=sources, **options
    )


@functools.cache
def layers_v41() -> list[ds.DeepseekV4Attention]:
    """All layers of the small network of DeepSeek-V4.1."""
    return v41_stack().layers


def source_v41(**attributes: Any) -> ds.DeepseekV4Attention:
    """Layer 1 with other attributes."""
    source = layer_v41(1)
    for name, value in attributes.items():
        setattr(source, name, value)
    return source


def weights_v41(index: Any) -> ds.AttentionWeights:
    """Weights of layer 4 as those of another layer."""
    return ds.AttentionWeights.from_dict(random_weights(SMALL_V41, 4), SMALL_V41, index)


MLA_LAYER: list[tuple[str, Any, str]] = [
    ("attn_sink", torch.zeros(8)[::2], r"a dense tensor, of stride 1, got strides \[2\]"),
    ("attn_sink", torch.zeros(5), r"\[H\] float32 with H=4, got \[5\] float32$"),
    ("attn_sink", torch.zeros(4).bfloat16(), r"\[H\] float32 .*bfloat16 -> pass attn_sink.to\(torch.float32\)"),
    (
        "topk_indices_buffer",
        C4A_BUFFER.long(),
        r"\[_, K\] int32 with K=3, .* -> allocate topk_indices_buffer as torch.int32",
    ),
    ("topk_indices_buffer", C4A_BUFFER.repeat(1, 2)[:, ::2], r"stride 1 in the last dimension.* -> write to a dense"),
    ("topk_indices_buffer", torch.zeros(64, 4, dtype=torch.int32), r"at most 3 columns, got \[64, 4\]"),
    ("topk_indices_buffer", C4A_BUFFER[:, :2], r"at least 64 rows, the tokens of a step, and 3 columns, got \[64, 2\]"),
    ("topk_indices_buffer", C4A_BUFFER[:-1], r"at least 64 rows, the tokens of a step, and 3 columns, got \[63, 3\]"),
    (
        "topk_indices_buffer",
        None,
        r"the buffer that the indexer writes, on a c4a layer, got None -> allocate it as \[64, 3",
    ),
    ("topk_indices_buffer", C4A_BUFFER[0], r"\[_, K\] int32 with K=3, got \[3\] int32$"),
    ("cos_sin_cache", TABLE.bfloat16(), r"\[_, 8\] float32, .* -> pass cos_sin_cache.to\(torch.float32\)"),
    ("cos_sin_cache", TABLE[:, :4], r"\[_, 8\] float32, got \[512, 4\] float32$"),
    (
        "cos_sin_cache",
        TABLE[:255],
        r"at least 256 rows, the max_model_len of the limits, got \[255, 8\] -> make it with cos",
    ),
    ("cos_sin_cache", None, r"a tensor \[_, 8\] float32, got NoneType"),
    ("geometry", SMALL, "a LayerGeometry, got ModelGeometry"),
    ("limits", 4096, "a Limits, got int"),
    ("backend", "triton", "a backend, got 'triton'"),
    ("workspace", "cpu", "a WorkspaceManager, got 'cpu' -> pass a WorkspaceManager, or None"),
]
"""Arguments of a bound attention layer: name, value, and what is said."""
FP8_MODULE, SCALES = FP8_WEIGHT.module, "wo_a.weight_scale_inv"
PROJECTION_WEIGHT: list[tuple[Any, str, str]] = [
    (SimpleNamespace(), "wo_a", "a module with a weight"),
    (None, "wo_a", "NoneType"),
    (SimpleNamespace(weight=FP8_WEIGHT.weight()), "wo_a.weight", "got none of them -> a weight without"),
    (FP8_MODULE(weight_scale_inv=None), "wo_a.weight", "got none of them"),
    (FP8_WEIGHT.weight(), "wo_a", "got none of them -> pass the module"),
    (FP8_MODULE(weight=FP8_WEIGHT.codes), "wo_a.weight", r"got uint8 -> view .*\.view\(torch.float8_e4m3fn\)"),
    (FP8_MODULE(weight=FP8_WEIGHT.codes.view(torch.int8)), "wo_a.weight", "got int8"),
    (FP8_WEIGHT.codes, "wo_a", "got uint8"),
    (FP8_MODULE(weight=FP8_WEIGHT.codes.view(torch.float8_e5m2)), "wo_a.weight", "float8_e5m2"),
    (torch.ones(2, 2, dtype=torch.int32), "wo_a", "int32"),
    (FP8_MODULE(weight=FP8_WEIGHT.weight()[None]), "wo_a.weight", r"\[1, 130, 260\]"),  # a weight for each group
    (FP8_MODULE(weight_scale_inv=torch.ones(())), SCALES, r"\[2, 3\].*, got \[\]"),
    (FP8_MODULE(weight_scale_inv=torch.ones(3, 2)), SCALES, r"got \[3, 2\] .* -> every"),  # turned round
    (FP8_MODULE(weight_scale_inv=torch.ones(1, 2)), SCALES, r"got \[1, 2\]"),  # of whole blocks
    (FP8_MODULE(weight_scale_inv=FP8_WEIGHT.scale.bfloat16()), SCALES, r"bfloat16 -> pass .*to\(torch.float32"),
    (FP8_MODULE("weight_scale", weight_scale=FP8_WEIGHT.scale.int()), "wo_a.weight_scale", "int32"),
    (FP8_MODULE(weight_scale_inv=0.5), SCALES, "float"),
    (FP8_MODULE(weight_scale_inv=FP8_WEIGHT.scale.to(META)), SCALES, "one on meta"),
    (FP8_MODULE(weight_scale=2 * FP8_WEIGHT.scale.to(DEVICE)), "wo_a.weight_scale", "other values"),  # of two scales
    (FP8_MODULE(weight_scale=torch.ones(1)), "wo_a.weight_scale", r"got \[1\]"),  # the second of two
]
"""Weights of the output projection: value, argument that is named, and what is said."""
V4_LAYOUT, V41_LAYOUT = ds.KVCacheLayout.fp8_ds_mla, ds.KVCacheLayout.v41_fp4
LAYOUTS: list[tuple[Callable[[], Any], str]] = [
    (partial(V4_LAYOUT, fp8_max=240.0), "fp8_max: expected"),
    (partial(V4_LAYOUT, fp8_format=Fp8Format.FNUZ, fp8_max=448.0), "fp8_max: expected"),
    (lambda: attrs.evolve(V4_LAYOUT(), fp8_format=Fp8Format.FNUZ), "fp8_max: expected"),
    (partial(V4_LAYOUT, group_size=0), "group_size: expected"),
    (partial(V4_LAYOUT, 447, 64), "nope_dim: expected"),
    (partial(ds.KVCacheLayout.rows, dtype=torch.float16), "dtype: expected"),
    (partial(V41_LAYOUT, 0, 64), "nope_dim"),
    (partial(V41_LAYOUT, 448, -1), "rope_dim"),
    (partial(V41_LAYOUT, 447, 64), "nope_dim: expected an even number of dims, two to a byte, got 511"),
    (
        lambda: PagedKVCache.allocate(ds.KVCacheLayout.v41_fp8(), 1, 4).with_layout(fp8_format=Fp8Format.FNUZ),
        "fp8_format: expected e4m3fn, as v41_fp8 has it",
    ),
    *(
        (partial(ds.KVCacheLayout.index_fp8, dim), "head_dim: expected an integer of at least 1")
        for dim in (0, -4, True, 128.0)
    ),
]
"""Layouts that cannot be."""
SCHEDULER: dict[str, Any] = {"max_num_batched_tokens": 8, "max_num_seqs": 4, "decode_threshold": 1}
SERVING: list[tuple[Callable[[], Any], str]] = [
    *(
        (partial(call, value), f"{name}: expected an integer of at least 0")
        for value in (-1, 2.0, True)
        for name, call in (
            ("num_blocks", BlockAllocator),
            ("n", BlockAllocator(4).allocate),
            ("num_tokens", BlockTable(BlockAllocator(4), 4).ensure),
            ("token", BlockTable(BlockAllocator(4), 4).release_before),
        )
    ),
    (lambda: BlockTable(BlockAllocator(1), 0), "tokens_per_block: expected an integer of at least 1, got 0"),
    *(
        (partial(Scheduler, [], **{**SCHEDULER, name: value}), f"{name}: expected an integer of at least 1, got")
        for name in SCHEDULER
        for value in (0, -1, 1.5, True)
    ),
    (
        partial(Scheduler, [], max_num_batched_tokens=3, max_num_seqs=4),
        r"max_num_batched_tokens: expected at least max_num_seqs \(4\), .* got 3",
    ),
    (
        partial(Scheduler, [Request(3, 0.0, 1, 1), Request(3, 1.0, 1, 1)], **SCHEDULER),
        "requests: expected a different index for each, got .* index 3",
    ),
    *(
        (
            partial(LayerStack, REFERENCE, layer_options={"topk_indices_buffer": torch.zeros(shape).int()}),
            "topk_indices_buffer: expected 3 columns, and at least 64 rows",
        )
        for shape in ((64, 2), (63, 3))
    ),
    (
        lambda: LayerStack(PhasedBackend(*(ds.load_backend("reference", deterministic=True) for _ in range(2)))),
        r"limits: expected Limits\(.*=True\) with one backend in decode and another in prefill.*-> pass such limits",
    ),
    *(
        (
            partial(MetadataBuilder, SMALL, LIMITS, swa_block_size=4, compressed_block_tokens=tokens),
            rf"compressed_block_tokens: expected a multiple of ratio \d+, got {tokens}",
        )
        for tokens in (24, 100, 8)
    ),
    *(
        (partial(FLASH.tensor_parallel, size), f"tensor parallel size: expected {said}")
        for sizes, said in (((-1, 0), "an integer of at least 1"), ((3, 16), "a common divisor of 64 heads and 8"))
        for size in sizes
    ),
]
"""Blocks, schedulers, whole layers, builders and ranks of tensor parallelism."""
RANKS: list[tuple[Callable[[], Any], str]] = [
    (partial(Ownership, 2, 2), r"rank: expected a rank in \[0, 2\), got 2"),
    (partial(Ownership, -1, 2), "rank: expected an integer of at least 0"),
    (partial(Ownership, 0, 0), "size: expected an integer of at least 1"),
    (partial(Ownership, 0, 2, 0), "interleave: expected an integer of at least 1"),
    (
        lambda: OwnedMetadataBuilder(Ownership(0, 2, 4), SMALL, LIMITS, swa_block_size=16, compressed_block_tokens=32),
        "interleave: expected a divisor of 2, the records in a page of c128a",
    ),
    (partial(ContextParallel, None), "group: expected a ProcessGroup of torch.distributed that has this rank"),
]
"""Ranks of context parallelism."""
REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: preset(None), r"name: expected a str, got None -> pass one of deepseek-v4-flash"),
    (lambda: FLASH.tensor_parallel("2"), rf"tensor parallel size: {COUNT} '2'"),
    (lambda: FLASH.tensor_parallel(2.0), rf"tensor parallel size: {COUNT} 2.0"),
    (lambda: FLASH.tensor_parallel(0), rf"tensor parallel size: {COUNT} 0"),
    (lambda: FLASH.layer("0"), rf"layer index: {COUNT} '0'"),
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
    (lambda: Problem.of("flash"), r"geometry: expected a ModelGeometry or LayerGeometry, got 'flash' -> pass Model"),
    (lambda: Problem("decode", None), r"layer: expected a LayerGeometry, got None"),
    (lambda: CacheFacts(layot="rows"), r"CacheFacts: expected .*, got 'layot'; did you mean 'layout'\?"),
    (
        lambda: Limits(4, 64, 256, num_speculative_token=1),
        r"Limits: expected a keyword of max_num_reqs, .*, got 'num_speculative_token'; did you mean 'num_spec",
    ),
    (lambda: Limits(max_reqs=4), r"Limits: expected .*, got 'max_reqs'; did you mean 'max_num_reqs'\?"),
    (lambda: Limits(4, 64, 256, single_phase="no"), r"single_phase: expected True or False, got 'no'"),
    (lambda: manager().metadata({}), r"batch: expected a Batch, got dict -> pass Batch\(...\), or what CacheManager"),
    (lambda: MetadataBuilder(SMALL, LIMITS).build({}), r"batch: expected a Batch, got dict"),
    (lambda: MetadataBuilder(SMALL, LIMITS, backend="triton"), r"backend: expected a backend, got 'triton'"),
    (lambda: MetadataBuilder("flash", LIMITS), r"geometry: expected a ModelGeometry, got 'flash' -> pass Model"),
    (lambda: MetadataBuilder(SMALL, LIMITS, device="gpu"), r"device: expected a torch device, got 'gpu' -> write it"),
    (lambda: ds.merge_lse([1.0], [2.0]), r"outs: expected a tensor \[S, T, H, D\] bfloat16 or float32 .*, got list"),
    (lambda: ds.merge_lse(torch.zeros(2, 3, 4, 8), torch.zeros(2, 5, 4)), r"lses: expected .* with S=2, T=3, H=4, got"),
    (lambda: ds.merge_lse(torch.zeros(0, 3, 4, 8), torch.zeros(0, 3, 4)), r"outs: expected at least one shard, got"),
    (
        lambda: ds.apply_sink(torch.zeros(2, 4, 8), torch.zeros(3), torch.zeros(4)),
        r"lse: expected \[T, H\] float32 .*T=2",
    ),
    (
        lambda: ds.apply_sink(torch.zeros(2, 4, 8), torch.zeros(2, 4), None),
        r"attn_sink: expected a tensor \[H\] float32",
    ),
    *(
        (
            lambda changed=changed: ds.plan_workspace(**{**PLAN, **changed}),
            rf"{name}: expected a {expected}, got None -> pass",
        )
        for name, expected in (("layer", "LayerGeometry"), ("limits", "Limits"), ("layout", "KVCacheLayout"))
        for changed in [{name: None}]
    ),
    (lambda: ds.convert_cache(None, None), r"source: expected a PagedKVCache, got None -> pass PagedKVCache\("),
    (lambda: ds.convert_cache(CACHE, "fp8"), r"target: expected a PagedKVCache, got 'fp8'"),
    (lambda: ds.convert_cache(CACHE, CACHE, [0]), r"slots: expected a tensor \[_\] int64 or int32, got list"),
    (lambda: ds.check_compatible(None, FP32), r"writer: expected a KVCacheLayout or a str, got None -> pass cache.lay"),
    (
        lambda: explain(PROBLEM, device="rtx4090"),
        r"device: .*, got 'rtx4090' -> .*; DeviceFacts.named\('rtx4090'\) describes",
    ),
    (
        lambda: explain(PROBLEM, device="4090"),
        r"device: .*, got '4090' -> .*; did you mean DeviceFacts.named\('rtx4090'\)\?",
    ),
    (
        lambda: mla_layer(cos_sin_cache=ds.cos_sin_cache(SMALL.layer_of_kind("swa").rope, 256)),
        r"cos_sin_cache: expected angles of c4a layers: pair \d turns by .*, got a table that turns it by .* -> make",
    ),
    (lambda: manager().batch(None), r"requests: expected a list of \(sequence, number of tokens\), got None"),
    (lambda: manager().batch([manager().new()]), r"requests: expected a list of .*, got \['CachedSequence'\]"),
    (lambda: manager().batch([(manager().new(), "2")]), rf"tokens of a sequence: {COUNT} '2'"),
    (lambda: CacheManager("flash", LIMITS, FP32), r"geometry: expected a ModelGeometry, got 'flash'"),
    (lambda: CacheManager(SMALL, {}, FP32), r"limits: expected a Limits, got dict -> pass Limits\("),
    (lambda: CacheManager(SMALL, LIMITS, "fp8"), r"kv_layout: expected a KVCacheLayout, got 'fp8'"),
    (lambda: CacheManager(SMALL, LIMITS, FP32, device="gpu"), r"device: expected a torch device, got 'gpu'"),
    (lambda: ds.WorkspaceManager(3.5), r"device: expected a torch device, got 3.5"),
    (lambda: ds.cos_sin_cache(FLASH, 5), r"rope: expected a Rope, got ModelGeometry -> pass geometry.layer\(i\).rope"),
    (lambda: ds.cos_sin_cache(rope, "5"), rf"max_position: {COUNT} '5'"),
    (lambda: ds.cos_sin_cache(rope, -1), rf"max_position: {COUNT} -1"),
    (lambda: ds.KVCacheLayout.fp8_ds_mla("a"), rf"nope_dim: {COUNT} 'a'"),
    (lambda: ds.AttentionWeights.from_dict(None, SMALL, 0), r"weights: expected a Mapping, got None -> pass a dict"),
    (lambda: layer("l", SMALL.layer(0)), r"geometry: expected a ModelGeometry, got LayerGeometry"),
    (lambda: layer("l", SMALL, "0"), rf"layer index: {COUNT} '0'"),
    (lambda: layer("l", SMALL, 0, None), r"limits: expected a Limits, got None"),
    (lambda: layer("l", SMALL, 0, LIMITS, "reference"), r"backend: expected a backend, got 'reference'"),
    (lambda: layer("l", SMALL, 0, LIMITS, REFERENCE, WEIGHTS), r"weights: expected a AttentionWeights, got dict -> "),
    (lambda: layer().bind_kv_cache(None), r"caches: expected a DeepseekV4Caches, got None -> pass manager.caches"),
    (lambda: explain(None), r"problem: expected a Problem, got None -> pass Problem.of\("),
    (lambda: explain(PROBLEM, backend=REFERENCE), r"backend: expected a str, got ReferenceBackend -> pass a name"),
    (lambda: explain(PROBLEM, settings={}), r"settings: expected a Settings, got dict"),
    (lambda: select_backend(PROBLEM, settings={}), r"settings: expected a Settings, got dict"),
    (lambda: Settings(deny="x"), r"Settings.allow or deny: expected a list of names, got 'x' -> pass \['x'\]"),
    (lambda: Settings(allow=[3]), r"Settings.allow or deny: expected a list of names, got \[3\]"),
    (lambda: Settings(denny=[]), r"Settings: expected a keyword of .*, got 'denny'; did you mean 'deny'\?"),
    (lambda: Settings(options={"reference": 3}), r"Settings.options: expected a dict of options by the name of the"),
    (lambda: Settings(decode=3), r"Settings: expected the name of a backend, or a Setting, got int"),
    (partial(LayerCaches, torch.zeros(9), None), r"swa: expected a PagedKVCache, got Tensor -> pass PagedKVCache\("),
    (
        partial(PagedKVCache, torch.zeros(9), "fp8_ds_mla"),
        "layout: expected a KVCacheLayout, got 'fp8_ds_mla' -> pass KVC",
    ),
    (partial(PagedKVCache, None, LAYOUT), "cache tensor: expected a Tensor, got None -> pass memory as a tensor"),
    (
        partial(PagedKVCache.allocate, "fp8_ds_mla", 1, 64),
        "layout: expected a KVCacheLayout, got 'fp8_ds_mla' -> pass KVC",
    ),
    (partial(PagedKVCache.allocate, LAYOUT, -1, 64), "num_blocks: expected an integer of at least 0, got -1"),
    (partial(PagedKVCache.allocate, LAYOUT, "4", 64), "num_blocks: expected an integer of at least 0, got '4'"),
    (partial(PagedKVCache.allocate, LAYOUT, 4, 0), "block_size: expected an integer of at least 1, got 0"),
    (partial(PagedKVCache.allocate, LAYOUT, 4, 64.0), "block_size: expected an integer of at least 1, got 64.0"),
    (partial(ds.load_backend, None), "name: expected a str, got None -> pass one of .*reference.* call select_backend"),
    (
        partial(ds.select_backend, SMALL.layer(0)),
        r"problems: expected a Problem, got LayerGeometry -> pass Problem\.of",
    ),
    (partial(ds.select_backend, []), "problems: expected a Problem, got list -> "),
    (partial(Limits, 0, 1, 1), "max_num_reqs: expected an integer of at least 1, got 0"),
    (partial(Limits, "4", 256, 4096), "max_num_reqs: expected an integer of at least 1, got '4'"),
    (partial(Limits, 4.5, 256, 4096), "max_num_reqs: expected an integer of at least 1, got 4.5"),
    (partial(Limits, True, 256, 4096), "max_num_reqs: expected an integer of at least 1, got True"),
    (partial(Limits, 4, 256, None), "max_model_len: expected an integer of at least 1, got None"),
    (partial(Limits, 4, 256, 4096, -1), "num_speculative_tokens: expected an integer of at least 0, got -1"),
    (partial(Limits, 4, 256, 4096, 0, 2e9), "max_workspace_bytes: expected an integer of at least 0, got 2000000000.0"),
    (
        partial(BlockScaledWeight, None, FP8_WEIGHT.scale),
        r"weight: expected a tensor \[_, _\] float8_e4m3fn or .*, got NoneType",
    ),
    (
        partial(BlockScaledWeight, FP8_WEIGHT.codes, FP8_WEIGHT.scale),
        "weight: expected a dtype that says .*, got uint8 -> view them",
    ),
    (
        partial(BlockScaledWeight, torch.ones(2, 2).bfloat16(), FP8_WEIGHT.scale),
        "weight: expected fp8 codes, got bfloat16 -> .* pass the tensor",
    ),
    (
        partial(BlockScaledWeight, FP8_WEIGHT.codes[None].view(OCP), FP8_WEIGHT.scale),
        r"weight: .*, got \[1, 130, 260\]",
    ),
    (
        partial(BlockScaledWeight, FP8_WEIGHT.codes.view(OCP), None),
        r"scale: expected \[2, 3\] or \[5, 9\] float32 or .*, got NoneType -> every block of 128",
    ),
    (
        partial(BlockScaledWeight, FP8_WEIGHT.codes.view(OCP), torch.ones(130, 1)),
        r"scale: expected \[2, 3\] .*, got \[130, 1\]",
    ),
    (
        partial(BlockScaledWeight, FP8_WEIGHT.codes.view(OCP), FP8_WEIGHT.scale.to(META)),
        r"scale: expected a tensor on cpu, like weight, got .*",
    ),
    (
        partial(BlockScaledWeight.of, SimpleNamespace(weight=torch.ones(2, 2), weight_scale=torch.ones(1, 1)), "wo_b"),
        r"wo_b\.weight: expected fp8 codes",
    ),
    (
        partial(BlockScaledWeight.of, SimpleNamespace(weight=FP8_WEIGHT.weight()), "wo_b"),
        r"wo_b\.weight: expected weight_scale_inv, weight_scale or scale next to .* none",
    ),
    (partial(BlockScaledWeight.of, FP8_WEIGHT.codes, "wo_b"), "wo_b: expected a dtype that says"),
    (partial(BlockScaledWeight.of, None, "wo_b"), "wo_b: expected a tensor, a BlockScaledWeight, or a module"),
    (lambda: layer_v41(2), r"sources: expected layer 1, whose compressed entries layer 2 reads, got"),
    (lambda: layer_v41(7, layers_v41()[:6]), r"sources: expected layer 6, whose selected entries layer 7 reads, got"),
    (lambda: layer_v41(2, layers_v41()[:2], WIDER_V41), r"sources: layer 1: expected one of the same geometry"),
    (
        lambda: layer_v41(2, [source_v41(device=META)]),
        r"sources: layer 1: expected one on cpu, as the weights of layer 2",
    ),
    (
        lambda: layer_v41(2, [source_v41(limits=Limits(1, 8, 64))]),
        r"sources: layer 1: expected limits of at least 48 tokens in a step",
    ),
    (
        lambda: layer_v41(1, topk_indices_buffer=WIDE_BUFFER),
        r"topk_indices_buffer: expected 5 columns, and at least 48 rows",
    ),
    (
        lambda: layer_v41(2, layers_v41()[:2], topk_indices_buffer=WIDE_BUFFER[:, :5].clone()),
        r"topk_indices_buffer: expected None, or the tensor of the layer's source",
    ),
    (
        lambda: layer_v41(1, topk_indices_buffer=WIDE_BUFFER[:, :5].long()),
        r"topk_indices_buffer: expected int32 on cpu, got int64 on cpu",
    ),
    (
        lambda: layer_v41(4, candidates_buffer=WIDE_BUFFER),
        r"candidates_buffer: expected 4 columns, and at least 48 rows",
    ),
    (
        lambda: layer_v41(3, candidates_buffer=WIDE_BUFFER),
        r"candidates_buffer: expected None on layer 3, which has no candidates",
    ),
    (
        lambda: layer_v41(1, context_parallel=object()),
        r"context_parallel: expected None with .*, got ranks -> entries of V4.1",
    ),
    (lambda: weights_v41(6), ".*a reindex c4a layer: .*'compressor.wkv'"),
    (lambda: weights_v41(7), ".*a reuse c4a layer"),
    (lambda: weights_v41(3), ".*wgate'"),
    (lambda: weights_v41(SMALL_V41.layer(4)), r"layer: expected the number of the layer"),
    *((partial(mla_layer, **{name: value}), f"{name}: expected {said}") for name, value, said in MLA_LAYER),
    *((partial(dense_weight, value), f"{name}: expected .*{said}") for value, name, said in PROJECTION_WEIGHT),
    *LAYOUTS,
    *SERVING,
    *RANKS,
]


@pytest.mark.parametrize(("call", "said"), REFUSED, ids=[f"{i} {said[:50]}" for i, (_, said) in enumerate(REFUSED)])
def test_a_bad_argument_is_refused_by_name(call: Callable[[], Any], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized_weight, "_product", lambda *_: pytest.fail("a weight was computed before the error"))
    with pytest.raises(ArgumentError, match=f"^{said}"):
        call()


def test_the_arguments_that_the_table_changes_fit() -> None:
    assert mla_layer().topk_indices_buffer is C4A_BUFFER


FORWARD: list[tuple[str, Any, str]] = [
    ("workspace", None, "a WorkspaceManager, got None -> pass a WorkspaceManager"),
    ("workspace", torch.zeros(9), "a WorkspaceManager, got Tensor -> "),
    ("backend", "reference", r"a backend, got 'reference' -> pass what load_backend\(name\)"),
    ("backend", None, "a backend, got None -> "),
    ("layer", SMALL, "a LayerGeometry, got ModelGeometry -> pass geometry.layer"),
    ("limits", None, "a Limits, got None -> pass the Limits"),
]


@pytest.mark.parametrize("warm_up", [False, True])
@pytest.mark.parametrize(("argument", "value", "said"), FORWARD)
def test_a_call_refuses_them_before_any_write(argument: str, value: object, said: str, warm_up: bool) -> None:
    changes = {argument: value, "metadata": None if warm_up else metadata_of(SWA)}

    refused(SWA, ArgumentError, f"^{argument}: expected {said}", **changes)


@pytest.mark.parametrize(("argument", "value", "said"), FORWARD)
def test_a_call_refuses_them_after_steps_that_are_known(argument: str, value: object, said: str) -> None:
    arguments = {**forward_args(SWA), "metadata": metadata_of(SWA, [1, 1], [9, 9])}
    for _ in range(2):
        forward_mqa(**arguments)
    with pytest.raises(ArgumentError, match=f"^{argument}: expected {said}"):
        forward_mqa(**{**arguments, argument: value})


def test_an_error_of_a_workspace_of_ones_own_is_not_hidden() -> None:
    class Broken(ds.WorkspaceManager):
        def require(self, *_: object, **__: object) -> None:
            raise AttributeError("mine")

        get_simultaneous = require  # type: ignore[assignment]

    with pytest.raises(AttributeError, match=r"^mine$"):
        forward_mqa(**{**forward_args(SWA), "workspace": Broken()})


@pytest.mark.parametrize("name", ["q", "output", "kv", "positions"])
@pytest.mark.parametrize("wrong", [np.zeros((3, 4, 32), "f"), [1, 2]])
def test_arrays_and_lists_where_a_layer_takes_tensors(name: str, wrong: Any) -> None:
    """forward_mqa reads neither kv nor positions; the insert has no output."""
    case = bound_layer(LayerKind.CSA)
    arguments = {
        "q": case.q,
        "kv": case.kv,
        "positions": case.positions,
        "output": torch.zeros_like(case.q),
        name: wrong,
    }
    q, kv, positions, output = arguments.values()
    with set_forward_context(case.metadata):
        if name in ("q", "output"):
            with pytest.raises(ArgumentError, match=f"^{'out' if name == 'output' else name}: expected a tensor"):
                case.layer.forward_mqa(q, kv, positions, output)
        if name != "output":
            with pytest.raises(ArgumentError, match=f"^{name}: expected a tensor"):
                case.layer.fused_qnorm_rope_kv_insert(q, kv, positions)


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


def test_a_bound_layer_refuses_tensors_as_caches_and_keeps_those_it_has() -> None:
    layer = bound_layer(SWA).layer
    had, tensor = layer.caches, torch.zeros(4, 8, 584, dtype=torch.uint8)
    for caches, said in (((tensor, tensor), "swa"), ((PagedKVCache.allocate(LAYOUT, 4, 4), tensor), "compressed")):
        with pytest.raises(ArgumentError, match=f"^{said}: expected a PagedKVCache, got Tensor -> pass PagedKVCache"):
            layer.bind_kv_cache(*caches)

    assert layer.caches is had
    assert LIMITS.max_workspace_bytes is None


@pytest.mark.parametrize("index", range(3))
def test_a_whole_layer_refuses_a_short_table_too(index: int) -> None:
    limits, weights = Limits(4, 64, 256), AttentionWeights.from_dict(random_weights(SMALL, index), SMALL, index)
    arguments = SMALL, index, limits, ds.load_backend("reference"), weights
    tables = [ds.cos_sin_cache(SMALL.layer(index).rope, rows) for rows in (255, 256)]
    with pytest.raises(ArgumentError, match=r"^cos_sin_cache: expected at least 256 rows, the max_model_len of the"):
        ds.DeepseekV4Attention("l", *arguments, cos_sin_cache=tables[0])
    ds.DeepseekV4Attention("l", *arguments, cos_sin_cache=tables[1])


def test_a_buffer_as_wide_as_the_longest_sequence_has_entries_is_wide_enough() -> None:
    """16 tokens have 4 entries of 4 tokens: an indexer that selects 5 never writes the fifth column."""
    layer = attrs.evolve(SMALL.layer_of_kind("c4a"), topk=5)
    arguments = "l", layer, Limits(4, 8, 16), ds.load_backend("reference")
    for columns in (4, 5):
        buffer = torch.zeros(8, columns, dtype=torch.int32)
        ds.DeepseekV4MLAAttention(*arguments, attn_sink=None, cos_sin_cache=TABLE, topk_indices_buffer=buffer)
    with pytest.raises(ArgumentError, match=r"at least 8 rows, the tokens of a step, and 4 columns, got \[8, 3\]"):
        ds.DeepseekV4MLAAttention(
            *arguments, attn_sink=None, cos_sin_cache=TABLE, topk_indices_buffer=buffer[:, :3].contiguous()
        )


def test_layers_without_an_indexer_take_any_buffer() -> None:
    geometry, backend = SMALL.layer_of_kind(SWA), ds.load_backend("reference")
    ds.DeepseekV4MLAAttention(
        "l", geometry, LIMITS, backend, attn_sink=None, cos_sin_cache=TABLE, topk_indices_buffer=TABLE
    )


def test_a_scale_that_went_bad_is_an_error_even_if_a_copy_is_kept() -> None:
    module = Scaled.draw(14, 40, 50, OCP, "fp32").module()
    dense_weight(module)
    module.weight_scale_inv = None
    with pytest.raises(ArgumentError, match="got none of them"):
        dense_weight(module)


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
        assert Problem.of(FLASH, dtype=dtype) == Problem.of(FLASH, dtype=name)
    assert Problem.of(FLASH, q_dtype=torch.float32) == Problem.of(FLASH, q_dtype="float32")


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

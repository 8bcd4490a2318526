"""Memory of a rank that serves a model: weights, caches, workspace, and what fits a budget. Nothing is allocated."""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property, reduce
from itertools import pairwise
from pathlib import Path
from typing import Any

from attrs import define, evolve, field, frozen

from dsv4attn.core.argument_checks import at_least
from dsv4attn.core.cache.layout import KVCacheLayout
from dsv4attn.core.contract.backend import Backend
from dsv4attn.core.contract.limits import Limits
from dsv4attn.core.memory.plan import plan_workspace
from dsv4attn.core.memory.workspace import WorkspacePlan
from dsv4attn.core.model.geometry import LayerKind, ModelGeometry
from dsv4attn.core.model.weights import weight_shapes
from dsv4attn.errors import ArgumentError, GeometryError
from dsv4attn.serving.cache_manager import COMPRESSED, WINDOW, CacheManager, pages_needed

__all__ = ["CACHES", "Deployment", "MemoryPlan", "ModelSizes", "Stage"]

WINDOWS, ENTRIES, INDEX_KEYS, STATES = CACHES = "windows", "entries", "index keys", "states"
"""Caches in the order of reports."""
_CACHE_OF = {"swa": WINDOWS, "compressed": ENTRIES, "index": INDEX_KEYS, "state": STATES, "index_state": STATES}
_FP4_BYTES = 17 / 32
"""Bytes of a value in MXFP4: 32 values have 16 bytes of codes, and a scale of one byte."""
_FP32 = "attn_sink", "ape"
_LINEARS = "wq_a", "wq_b", "wkv", "wo_a", "wo_b", "indexer.wq_b"
"""Weights that released models have in fp8. Others are in bf16, and those of `_FP32` in fp32."""
_MOST_REQUESTS = 2**20
_RELEASED: Mapping[str, Mapping[str, Any]] = {
    "deepseek-v4-flash": {"n_routed_experts": 256, "moe_intermediate_size": 2048},
    "deepseek-v4-pro": {"n_routed_experts": 384, "moe_intermediate_size": 3072},
    "deepseek-v4.1-flash": {
        "n_routed_experts": 384,
        "moe_intermediate_size": 2304,
        "num_nextn_predict_layers": 3,
        "dspark_n_routed_experts": 128,
        "engram_layer_ids": [1, 14],
    },
}
"""Fields of the public config.json files that differ between released models."""
_OF_ALL = {"vocab_size": 129280, "expert_dtype": "fp4", "quantization_config": {"quant_method": "fp8"}}


@frozen
class ModelSizes:
    """Sizes and formats of a model's weights that its attention geometry does not have.

    experts: routed experts of a layer. shared_experts: of a layer. expert_size: middle dim of an expert.
    vocabulary: rows of the embedding, and of the head. mtp_layers: layers that draft. mtp_experts: routed experts of
    such a layer. expert_bytes: of a value of routed experts. linear_bytes: of a value of other large linears.
    left_out: parts of the model whose weights are not counted, for people.
    """

    experts: int
    expert_size: int
    vocabulary: int
    shared_experts: int = 1
    mtp_layers: int = 1
    mtp_experts: int = 0
    expert_bytes: float = _FP4_BYTES
    linear_bytes: float = 1
    left_out: tuple[str, ...] = ()

    @classmethod
    def of(cls, geometry: ModelGeometry, config: str | Path | None = None) -> ModelSizes:
        """Sizes of a released model by the name of its geometry, or those of a configuration.

        config: a config.json, or the folder that holds it; None: a preset.
        Raises GeometryError for a field that is missing or no number above 0.
        """
        if config is None:
            fields = {**_OF_ALL, **_RELEASED[geometry.name]}
        else:
            path = Path(config)
            read = json.loads((path / "config.json" if path.is_dir() else path).read_text(encoding="utf-8"))
            fields = {**read, **read.get("text_config", {})}
        for name in ("n_routed_experts", "moe_intermediate_size", "vocab_size"):
            if type(fields.get(name)) is not int or fields[name] < 1:
                raise GeometryError(
                    f"{name}: expected a number above 0, got {fields.get(name)!r} -> add it to {config}"
                )
        linear = 1 if fields.get("quantization_config") else 2
        experts, left_out = fields["n_routed_experts"], ("engram", "vision")
        return cls(
            experts,
            fields["moe_intermediate_size"],
            fields["vocab_size"],
            fields.get("n_shared_experts", 1),
            fields.get("num_nextn_predict_layers", 1),
            fields.get("dspark_n_routed_experts", experts),
            _FP4_BYTES if fields.get("expert_dtype") == "fp4" else linear,
            linear,
            left_out if fields.get("engram_layer_ids") else (),
        )


@frozen
class MemoryPlan:
    """Bytes of the rank of a stage that needs the most.

    layers: numbers of its first layer and of the one after its last. weights: by part of the model.
    request: bytes of one more request that has all its tokens, by cache.
    caches: bytes of all requests, and of the tokens of a step, by cache.
    workspace: of attention and of the parts around it, temporaries of torch's allocator excluded. temporaries: those.
    """

    layers: tuple[int, int]
    weights: Mapping[str, int]
    request: Mapping[str, int]
    caches: Mapping[str, int]
    workspace: int
    temporaries: int

    @property
    def total(self) -> int:
        """Everything together."""
        return sum(self.weights.values()) + sum(self.caches.values()) + self.workspace + self.temporaries


@define
class Deployment:
    """How a model is served: by how many ranks, from which caches.

    geometry: of the whole model. sizes: of its other weights. backend: plans the workspace. kv_layout,
    compressed_layout: records of the window and of compressed entries, as of `CacheManager`.
    tensor: ranks that divide heads, experts, embedding and head. pipeline: stages that divide the layers. context:
    ranks that share compressed entries. They are some of the `tensor` ranks if `context` divides `tensor`; otherwise
    there are `context` times as many ranks. shared_tokens: first tokens that all requests have in common, whose
    compressed pages are kept once. vllm: whether caches are vLLM's, which has one pool of equal blocks for all groups
    of layers, and schedules one step ahead; for models of DeepSeek-V4, one stage and whole entries.
    Raises ArgumentError for numbers of ranks that do not divide the model.
    """

    geometry: ModelGeometry
    sizes: ModelSizes
    backend: Backend
    kv_layout: KVCacheLayout = field(factory=KVCacheLayout.fp8_ds_mla)
    compressed_layout: KVCacheLayout | None = None
    tensor: int = field(default=1, validator=at_least(1))
    pipeline: int = field(default=1, validator=at_least(1))
    context: int = field(default=1, validator=at_least(1))
    shared_tokens: int = field(default=0, validator=at_least(0))
    vllm: bool = False

    def __attrs_post_init__(self) -> None:
        geometry = self.geometry
        if self.pipeline > geometry.num_layers:
            expected = f"at most {geometry.num_layers}, the layers of {geometry.name}"
            raise ArgumentError("pipeline parallel size", expected=expected, actual=self.pipeline)
        for what, size in (("pipeline", self.pipeline), ("context", self.context)):
            if geometry.sharing is not None and size > 1:
                expected = f"1 for {geometry.name}, whose layers share compressed caches"
                raise ArgumentError(f"{what} parallel size", expected=expected, actual=size)
            if self.vllm and size > 1:
                raise ArgumentError(f"{what} parallel size", expected="1 with the pages of vLLM", actual=size)
        if self.vllm and geometry.sharing is not None:
            raise ArgumentError("model", expected="one of DeepSeek-V4 with the pages of vLLM", actual=geometry.name)
        geometry.tensor_parallel(self.tensor)

    @property
    def ranks(self) -> int:
        """Devices that the model needs."""
        return self.pipeline * self.tensor * (1 if self.divides_heads else self.context)

    @property
    def divides_heads(self) -> bool:
        """Whether ranks that share entries have different heads."""
        return self.tensor % self.context == 0

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """The stages of the pipeline, with layers as equal in number as can be."""
        starts = [i * self.geometry.num_layers // self.pipeline for i in range(self.pipeline + 1)]
        return tuple(Stage(self, start, end) for start, end in pairwise(starts))

    def plan(self, limits: Limits) -> MemoryPlan:
        """The memory of the rank that needs the most.

        limits: of the requests. Each of `max_num_reqs` has `max_model_len` tokens; drafts make the draft layers run.
        Raises ArgumentError for more shared tokens than `max_model_len`.
        """
        if self.shared_tokens > limits.max_model_len:
            expected = f"at most {limits.max_model_len}, the max_model_len"
            raise ArgumentError("shared tokens", expected=expected, actual=self.shared_tokens)
        workspace = self._workspace(limits)
        return max((stage.plan(limits, workspace) for stage in self.stages), key=lambda plan: plan.total)

    def longest_context(self, limits: Limits, budget: int) -> int:
        """Most tokens of each of `max_num_reqs` requests that fit; 0 if none do.

        limits: of the requests. budget: bytes of a rank.
        """
        least = max(self.shared_tokens, 1)

        def fits(extra: int) -> bool:
            return self.plan(evolve(limits, max_model_len=least + extra - 1)).total <= budget

        most = _most(fits, self.geometry.max_position - least + 1)
        return most and least + most - 1

    def most_requests(self, limits: Limits, budget: int) -> int:
        """Most requests of `max_model_len` tokens that fit, up to 1,048,576; 0 if none do.

        limits: of the requests. budget: bytes of a rank.
        """
        return _most(lambda n: self.plan(evolve(limits, max_num_reqs=n)).total <= budget, _MOST_REQUESTS)

    def _workspace(self, limits: Limits) -> WorkspacePlan:
        rank, ranks = self.geometry.tensor_parallel(self.tensor), self.context if self.context > 1 else None
        over_ranks: dict[str, Any] = {"ranks": ranks, "divides_heads": ranks is not None and self.divides_heads}
        plans = (
            plan_workspace(layer, limits, self.backend, self.kv_layout, layer_parts=True, **over_ranks)
            for layer in rank.distinct_layers
        )
        return reduce(WorkspacePlan.union, plans)


@frozen
class _Pages:
    """Tokens of a page by group, and bytes of a page in all layers together by (group, cache)."""

    geometry: ModelGeometry
    tokens: Mapping[str, int]
    sizes: Mapping[tuple[str, str], int]


class Stage:
    """Layers `start` .. `end` - 1 of a deployment, on one rank. The last stage has the head and the draft layers."""

    def __init__(self, of: Deployment, start: int, end: int) -> None:
        self._of, self.layers = of, (start, end)
        self._pages: dict[bool, _Pages] = {}

    def plan(self, limits: Limits, workspace: WorkspacePlan) -> MemoryPlan:
        """The memory of a rank of this stage. limits, workspace: of the deployment."""
        one, two = (self._caches(evolve(limits, max_num_reqs=n)) for n in (1, 2))
        return MemoryPlan(
            layers=self.layers,
            weights=self._weights[limits.num_speculative_tokens > 0],
            request={name: two[name] - one[name] for name in CACHES},
            caches=self._caches(limits, self._of.shared_tokens),
            workspace=workspace.total_bytes - workspace.transient_bytes,
            temporaries=workspace.transient_bytes,
        )

    def _caches(self, limits: Limits, shared_tokens: int = 0) -> dict[str, int]:
        sizes, drafts = dict.fromkeys(CACHES, 0), limits.num_speculative_tokens > 0
        if drafts not in self._pages:
            self._pages[drafts] = self._pages_of(drafts=drafts)
        pages = self._pages[drafts]
        if self._of.vllm:
            return _vllm_caches(pages, limits, shared_tokens)
        for (group, cache), page_bytes in pages.sizes.items():
            tokens = pages.tokens[group] * (self._of.context if group == COMPRESSED else 1)
            count = pages_needed(pages.geometry, limits, group, tokens)
            if group == COMPRESSED:
                count -= (limits.max_num_reqs - 1) * (shared_tokens // tokens)
            sizes[cache] += count * page_bytes
        return sizes

    def _pages_of(self, *, drafts: bool) -> _Pages:
        of, (start, end) = self._of, self.layers
        geometry = of.geometry
        if of.pipeline > 1:
            geometry = geometry.with_own_layers(geometry.layers[start:end])
        if drafts and end == of.geometry.num_layers:
            geometry = evolve(geometry, layers=geometry.layers + ((LayerKind.SWA, 1),) * of.sizes.mtp_layers)
        compressed = of.compressed_layout
        # tensors of "meta" have no memory
        manager = CacheManager(geometry, Limits(1, 1, 1), of.kv_layout, compressed_layout=compressed, device="meta")
        return _Pages(geometry, manager.tokens_per_block, _page_bytes(manager))

    @cached_property
    def _weights(self) -> tuple[dict[str, int], dict[str, int]]:
        """Bytes by part of the model, without and with draft layers."""
        of, (start, end) = self._of, self.layers
        model, sizes = of.geometry.tensor_parallel(of.tensor), of.sizes
        parts: dict[str, float] = dict.fromkeys(("routed experts", "shared experts"), 0)
        for i in range(start, end):
            for name, size in _layer_weights(model, i, sizes, sizes.experts, of.tensor):
                parts[name] = parts.get(name, 0) + size
        is_first, is_last = start == 0, end == of.geometry.num_layers
        table = 2 * sizes.vocabulary * model.hidden_size / of.tensor
        parts["embedding, head"] = table * (is_first + is_last)
        draft = 0.0
        if is_last:
            layer = _layer_weights(model, of.geometry.num_layers, sizes, sizes.mtp_experts, of.tensor)
            # two linears join the embedding of a token and its hidden state
            draft = sum(size for _, size in layer) + 2 * model.hidden_size**2 * sizes.linear_bytes
        with_drafts = {**parts, **({"draft layers": sizes.mtp_layers * draft} if draft else {})}
        without, having = ({name: math.ceil(size) for name, size in p.items()} for p in (parts, with_drafts))
        return without, having


def _vllm_caches(pages: _Pages, limits: Limits, shared_tokens: int) -> dict[str, int]:
    """Bytes of caches in the pool of vLLM 0.33, by cache.

    Layers of one kind of cache are split into groups of about equally many layers. A block of the pool has a page of
    every layer of a group, and is as large as that of the widest group.
    """
    geometry = pages.geometry
    layers = {WINDOW: geometry.num_layers}
    spans = {WINDOW: geometry.window}
    for layer in geometry.distinct_layers:
        if layer.has_entries:
            group = f"{layer.kind.value}_state"
            layers[group] = geometry.count(layer.kind)
            spans[group] = layer.compress_ratio * (2 if layer.overlap else 1)
    widths = {group: sum(size for (of, _), size in pages.sizes.items() if of == group) for group in pages.tokens}
    # what has pages of several sizes is not split, and all others are split to groups about as large
    least = layers.get(f"{LayerKind.CSA.value}_state", 0)
    padding = {n: sum(-count % n for count in layers.values()) for n in range(max(least, 1), max(layers.values()) + 1)}
    most = max(padding, key=lambda n: (-padding[n], n)) if least else max(layers.values())
    groups = {group: -(-count // most) for group, count in layers.items()}
    block = max(widths[COMPRESSED], *(-(-layers[g] // n) * (widths[g] // layers[g]) for g, n in groups.items()))
    index_keys = pages.sizes.get((COMPRESSED, INDEX_KEYS), 0)
    requests, tokens = limits.max_num_reqs, pages.tokens[COMPRESSED]
    whole = requests * -(-limits.max_model_len // tokens) - (requests - 1) * (shared_tokens // tokens)
    sizes = {WINDOWS: 0, ENTRIES: whole * (block - index_keys), INDEX_KEYS: whole * index_keys, STATES: 0}
    for group, n in groups.items():
        size, step = pages.tokens[group], 2 * limits.max_num_batched_tokens
        kept = -(-(spans[group] + limits.num_speculative_tokens) // size) + 1
        longest = -(-limits.max_model_len // size) + 1
        count = min(requests * longest, requests * kept - (-step // size))
        sizes[WINDOWS if group == WINDOW else STATES] += n * count * block
    return sizes


def _layer_weights(
    model: ModelGeometry, number: int, sizes: ModelSizes, experts: int, ranks: int
) -> Iterator[tuple[str, float]]:
    """(part of the model, bytes) of the weights of a layer on one of the ranks that `model` has the heads of."""
    expert, hidden = 3 * model.hidden_size * sizes.expert_size, model.hidden_size
    yield "routed experts", experts * expert * sizes.expert_bytes / ranks
    yield "shared experts", sizes.shared_experts * expert * sizes.linear_bytes / ranks
    for name, shape in weight_shapes(model, number).items():
        size = sizes.linear_bytes if name in _LINEARS else 4 if name.endswith(_FP32) else 2
        part = "attention" if "." not in name else f"{name.partition('.')[0]}s"
        yield part, math.prod(shape) * size
    mixes = model.hc_mult * (2 + model.hc_mult)
    # before attention and before the experts; the gate of the experts is in bf16
    yield "hyper-connections, gates", 2 * 4 * mixes * model.hc_mult * hidden + 2 * experts * hidden


def _page_bytes(manager: CacheManager) -> dict[tuple[str, str], int]:
    """Bytes of a page of a group in all layers together, by (group, cache). Shared caches count once."""
    sizes: dict[tuple[str, str], int] = {}
    for i, caches in enumerate(manager.caches):
        shared = manager.geometry.sources(i).kv not in (None, i)
        for name, cache in caches.present.items():
            if shared and name != "swa":
                continue
            group = {"swa": WINDOW, "compressed": COMPRESSED, "index": COMPRESSED}.get(name)
            key = group or f"{manager.geometry.layer(i).kind.value}_state", _CACHE_OF[name]
            sizes[key] = sizes.get(key, 0) + cache.layout.page_stride(cache.block_size)
    return sizes


def _most(fits: Callable[[int], bool], limit: int) -> int:
    """The largest number from 1 to `limit` that fits, or 0; what is smaller than one that fits also fits."""
    return bisect_left(range(1, limit + 1), x=True, key=lambda n: not fits(n))

"""A whole layer in a replay: from hidden states to hidden states, with random weights and all caches, and checks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import cast

import numpy as np
import torch

from dsv4attn.core.cache.layer_caches import DeepseekV4Caches
from dsv4attn.core.cache.layout import KVCacheLayout
from dsv4attn.core.context_parallel.context import ContextParallel
from dsv4attn.core.contract.backend import Backend
from dsv4attn.core.contract.limits import Limits
from dsv4attn.core.layer.attention_layer import DeepseekV4Attention
from dsv4attn.core.memory.workspace import WorkspacePlan
from dsv4attn.core.metadata.forward_context import set_forward_context
from dsv4attn.core.metadata.metadata import AttentionMetadata, LayerKey
from dsv4attn.core.model.geometry import LayerGeometry, LayerKind, ModelGeometry
from dsv4attn.serving.cache_manager import CacheManager
from dsv4attn.tools.replay.check_attention import choose_rows
from dsv4attn.tools.replay.check_full_layer import FullLayerChecker, Step, tolerance_of
from dsv4attn.tools.replay.layer_runner import PageBytes, RunSettings, timed
from dsv4attn.tools.replay.oracle_full_layer import OracleLayer
from dsv4attn.tools.replay.over_ranks import LayerOnRank, MeteredContext, OutputDigest, Traffic
from dsv4attn.tools.replay.pools import COMPRESSED_BLOCK_TOKENS, PoolSizes, StatePool
from dsv4attn.tools.replay.random_weights import RandomWeights
from dsv4attn.tools.replay.recorder import RecordingBackend
from dsv4attn.tools.replay.results import LayerReport, WholeSeconds
from dsv4attn.tools.replay.workload import Tokens

__all__ = ["LayerRunner", "caches_of", "one_of_each", "pages_of"]


def pages_of(
    geometry: ModelGeometry, layers: Sequence[LayerGeometry], layout: KVCacheLayout, block_size: int
) -> list[PageBytes]:
    """Bytes of a page in the caches of each layer type."""
    # a cache of two pages has the stride of any larger one
    states = {f"{layer.kind.value}_state": 2 for layer in layers if layer.has_states}
    two = PoolSizes(2, 2 if any(layer.has_entries for layer in layers) else 0, states).by_name
    made = _manager(geometry, layers, Limits(1, 1, 1), layout, two, block_size)
    return [_page_bytes(caches) for caches in made.caches]


def caches_of(
    geometry: ModelGeometry,
    layers: Sequence[LayerGeometry],
    limits: Limits,
    layout: KVCacheLayout,
    sizes: PoolSizes,
    block_size: int,
    backend: Backend,
    context: ContextParallel | None = None,
) -> CacheManager:
    """The caches of one layer of each type, with a builder of their metadata; pages come from the replay's pools."""
    return _manager(geometry, layers, limits, layout, sizes.by_name, block_size, backend, context)


def _manager(
    geometry: ModelGeometry,
    layers: Sequence[LayerGeometry],
    limits: Limits,
    layout: KVCacheLayout,
    pages: dict[str, int],
    block_size: int,
    backend: Backend | None = None,
    context: ContextParallel | None = None,
) -> CacheManager:
    return CacheManager(
        one_of_each(geometry, layers),
        limits,
        layout,
        num_blocks=pages,
        swa_block_size=block_size,
        compressed_block_tokens=COMPRESSED_BLOCK_TOKENS,
        backend=backend,
        context_parallel=context,
    )


def one_of_each(geometry: ModelGeometry, layers: Sequence[LayerGeometry]) -> ModelGeometry:
    """The model with these layers only, none of which reads from another."""
    return geometry.with_own_layers([layer.key for layer in layers])


def _page_bytes(caches: DeepseekV4Caches) -> PageBytes:
    strides = {name: cache.page_stride for name, cache in caches.present.items()}
    entries = strides.get("compressed", 0) + strides.get("index", 0)
    return PageBytes(strides["swa"], entries, strides.get("state", 0) + strides.get("index_state", 0))


def name_of(geometry: ModelGeometry, layer: LayerGeometry) -> str:
    """The name of a layer type: its kind, and its ratio where the kind has several."""
    several = sum(other.kind is layer.kind for other in geometry.distinct_layers) > 1
    return f"{layer.kind.value} r={layer.compress_ratio}" if several else layer.kind.value


def owners_of(geometry: ModelGeometry, layer: LayerGeometry) -> int:
    """Layers of a type, without those that read the compressed cache of another."""
    alike = (i for i, key in enumerate(geometry.layers) if key == layer.key)
    return sum(geometry.sources(i).kv in (None, i) for i in alike)


class LayerRunner:
    """A whole layer that stands for all layers of its type."""

    def __init__(
        self,
        index: int,
        setting: RunSettings,
        manager: CacheManager,
        weights: RandomWeights,
        plan: WorkspacePlan,
        context: MeteredContext | None = None,
    ) -> None:
        """Draw the weights and bind the caches. index: of the layer in the manager's geometry."""
        self._setting, geometry, limits = setting, manager.geometry, setting.limits
        self.layer = layer = geometry.layer(index)
        caches = manager.caches[index]
        self.page = _page_bytes(caches)
        recorder = RecordingBackend(setting.backend, limits.max_num_batched_tokens, layer.num_heads)
        self._recorder = recorder
        own = weights.of(layer, setting.workload.sink(layer.kind))
        backend = cast("Backend", recorder)
        self._attention = DeepseekV4Attention(
            f"layers.{index}",
            geometry,
            index,
            limits,
            backend,
            own,
            workspace=setting.workspace,
            context_parallel=context,
        )
        self._attention.bind_kv_cache(caches)
        self._checker: FullLayerChecker | None = None
        if setting.check_rows:
            exact = OracleLayer(geometry, layer, own, weights)
            tolerance = tolerance_of(setting.workload.dtype, weights.key_rms)
            self._checker = FullLayerChecker(layer, exact, caches, recorder, setting.workload, tolerance, context)
        self._peaks: dict[str, int] = {}
        self._context, self._sent, self._digest = context, Counter[str](), OutputDigest()
        states = StatePool(layer, self.page.state) if self.page.state else None
        selects = layer.kind is LayerKind.C4A
        steps_bytes = recorder.layer_steps.transient_bytes(limits.max_num_batched_tokens)
        self.report = LayerReport(
            kind=name_of(setting.workload.geometry, layer),
            layers_in_model=owners_of(setting.workload.geometry, layer),
            kv_bytes_per_token=self.page.compressed / COMPRESSED_BLOCK_TOKENS,
            window_bytes_per_sequence=self.page.window_per_sequence(layer, setting.block_size),
            workspace_bytes_planned=sum(plan.lanes.values()),
            transient_bytes_bound=max(plan.transient_bytes, steps_bytes if states else 0),
            seconds=WholeSeconds(),
            check=self._checker.result if self._checker else None,
            state_bytes_per_sequence=states.page_bytes * states.pages_per_sequence if states else 0,
            topk=layer.topk if selects else None,
            selecting_tokens=layer.compress_ratio * (layer.topk + 1) if selects else None,
        )

    def step(self, number: int, tokens: Tokens, metadata: AttentionMetadata, other_s: dict[str, float]) -> None:
        """Run and check the tokens of a step. Its numbers are counted when all of this is done."""
        setting, kind, attention, recorder = self._setting, self.layer.kind, self._attention, self._recorder
        with timed(other_s, "inputs"):
            hidden = setting.workload.hidden_states(kind, tokens)
            positions = torch.from_numpy(tokens.positions)
            random = np.random.default_rng([setting.seed, number, list(LayerKind).index(kind)])
            chosen = choose_rows(tokens, self.layer, setting.check_rows, random)
            if attention.topk_indices is not None:
                # a row that the indexer does not write must not pass with entries of an earlier step
                attention.topk_indices[chosen] = -1
        setting.workspace.peaks.clear()
        recorder.start(torch.from_numpy(chosen))
        found: dict[LayerKey, AttentionMetadata] = {self.layer.key: metadata}
        with set_forward_context(found):
            output = attention(hidden, positions)
        recorder.watch.lap("project")
        if self._context is not None and self.layer.has_entries:
            self._sent += self._context.sent
            self._context.sent.clear()
            with timed(other_s, "checks"):
                self._digest.add(recorder.out)
        self.report.workspace_bytes_peak = setting.workspace.peak(self._peaks)
        self.report.tokens += len(tokens)
        self.report.seconds.add(recorder.watch.seconds)
        if self._checker is not None:
            with timed(other_s, "checks"):
                self._checker.check(Step(number, tokens, metadata, attention.topk_indices, output), chosen, random)

    def on_rank(self, compressed_bytes: int) -> LayerOnRank:
        """What this rank has of the layer. compressed_bytes: of pages of entries and index keys, at their peak."""
        report, dtype = self.report, self._setting.workload.dtype
        traffic = Traffic.of(self.layer, dtype, self._sent, report.tokens)
        other, checked = report.kv_bytes_peak - compressed_bytes, LayerOnRank.checked(report.check)
        return LayerOnRank(report.kind, compressed_bytes, other, traffic, *checked, digest=str(self._digest))

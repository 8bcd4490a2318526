"""The layers of a replay. One layer, with random weights and all caches, stands for all layers of its type."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager

import numpy as np
import torch
from attrs import evolve, frozen
from torch import Tensor

from dsv4attn.core.contract.backend import Backend
from dsv4attn.core.contract.limits import Limits
from dsv4attn.core.layer.attention_layer import DeepseekV4Attention
from dsv4attn.core.memory.workspace import WorkspaceManager, WorkspacePlan, simultaneous_bytes
from dsv4attn.core.metadata.forward_context import set_forward_context
from dsv4attn.core.metadata.metadata import AttentionMetadata, LayerKey
from dsv4attn.core.model.geometry import LayerGeometry, LayerKind, ModelGeometry
from dsv4attn.core.tensorspec import BufferSpec
from dsv4attn.serving.cache_manager import CacheManager
from dsv4attn.tools.replay.check_layer import CheckedStep, LayerChecker, choose_rows, selecting_tokens, tolerance_of
from dsv4attn.tools.replay.oracle_layer import OracleLayer
from dsv4attn.tools.replay.over_ranks import LayerOnRank, MeteredContext, OutputDigest, Traffic
from dsv4attn.tools.replay.pools import COMPRESSED_BLOCK_TOKENS, PageBytes, PageGroup
from dsv4attn.tools.replay.random_weights import RandomWeights
from dsv4attn.tools.replay.recorder import RecordingBackend, wait_for
from dsv4attn.tools.replay.results import LAYER_OPERATIONS, LayerReport
from dsv4attn.tools.replay.workload import Tokens, Workload


@contextmanager
def timed(seconds: MutableMapping[str, float], name: str, device: torch.device | None = None) -> Iterator[None]:
    """Add the time of a `with` block that does not raise, with the work that it launches on a device."""
    start = time.perf_counter()
    yield
    if device is not None:
        wait_for(device)
    seconds[name] += time.perf_counter() - start


class MeteredWorkspace(WorkspaceManager):
    """A workspace that records the largest request of each of its arenas since `peaks` was last cleared."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        """Start with no memory and no requests."""
        super().__init__(device)
        self.peaks: dict[str, int] = {}

    def get_simultaneous(
        self, *specs: BufferSpec, arena: str = "default", caller: str = "get_simultaneous"
    ) -> list[Tensor]:
        """As the base class does."""
        self.peaks[arena] = max(self.peaks.get(arena, 0), simultaneous_bytes(specs))
        return super().get_simultaneous(*specs, arena=arena, caller=caller)


@frozen(eq=False)
class RunSettings:
    """What the runners of all layer types share. They run one after another.

    backend: the backend.
    limits: limits of all steps.
    manager: caches of one layer of each type.
    workload: source of the inputs.
    workspace: reserved and locked.
    check_rows: rows checked per step.
    seed: seed of the choice of those rows.
    context: ranks that share the compressed entries.
    """

    backend: Backend
    limits: Limits
    manager: CacheManager
    workload: Workload
    workspace: MeteredWorkspace
    check_rows: int
    seed: int
    context: MeteredContext | None = None


class LayerRunner:
    """Runs and checks the steps of one layer type."""

    def __init__(self, index: int, settings: RunSettings, plan: WorkspacePlan, weights: RandomWeights) -> None:
        """Draw the weights, bind the caches and begin a report. index: number of the layer in the manager."""
        manager, limits, workload, context = settings.manager, settings.limits, settings.workload, settings.context
        geometry, caches, layer = manager.geometry, manager.caches[index], manager.geometry.layer(index)
        model = workload.geometry
        self.settings, self.layer, self.caches = settings, layer, caches
        self._recorder = recorder = RecordingBackend(
            settings.backend, limits.max_num_batched_tokens, layer.num_heads, workload.device
        )
        layer_weights = weights.of(layer, workload.sink(layer.kind))
        self._attention = DeepseekV4Attention(
            f"layers.{index}",
            geometry,
            index,
            limits,
            recorder,
            layer_weights,
            workspace=settings.workspace,
            context_parallel=context,
        )
        self._attention.bind_kv_cache(caches)
        self._checker: LayerChecker | None = None
        if settings.check_rows:
            exact = OracleLayer(geometry, layer, layer_weights, weights)
            tolerance = tolerance_of(workload.dtype, weights.key_rms)
            self._checker = LayerChecker(layer, exact, caches, recorder, workload, tolerance, context)
        self._sent, self._digest = Counter[str](), OutputDigest()
        self.page = page = PageBytes.of(caches)
        window = PageGroup(caches.attention.swa.block_size, layer.window, page.window)
        self._peaks: dict[str, int] = {}
        self.report = LayerReport(
            kind=_name_of(model, layer),
            layers_in_model=_owners_of(model, layer),
            kv_bytes_per_token=page.compressed / COMPRESSED_BLOCK_TOKENS,
            window_bytes_per_sequence=window.page_bytes * window.pages_per_sequence,
            workspace_bytes_planned=sum(plan.arenas.values()),
            transient_bytes_bound=plan.transient_bytes,
            seconds=dict.fromkeys(LAYER_OPERATIONS, 0.0),
            check=self._checker.result if self._checker else None,
        )
        if self.page.state:
            states = PageGroup.of(manager)[f"{layer.kind.value}_state"]
            self.report.state_bytes_per_sequence = self.page.state * states.pages_per_sequence
            steps_bytes = recorder.layer_ops.transient_bytes(limits.max_num_batched_tokens)
            self.report.transient_bytes_bound = max(plan.transient_bytes, steps_bytes)
        if layer.kind is LayerKind.CSA:
            self.report.topk, self.report.selecting_tokens = layer.topk, selecting_tokens(layer)

    def step(self, number: int, tokens: Tokens, metadata: AttentionMetadata, other_s: dict[str, float]) -> None:
        """Run and check the tokens of a step."""
        settings, attention, recorder = self.settings, self._attention, self._recorder
        device = settings.workload.device
        with timed(other_s, "inputs", device):
            hidden = settings.workload.hidden_states(self.layer.kind, tokens)
            positions = settings.workload.placed(tokens.positions)
            random = np.random.default_rng([settings.seed, number, list(LayerKind).index(self.layer.kind)])
            chosen = choose_rows(tokens, self.layer, settings.check_rows, random)
            if attention.topk_indices is not None:
                # a row that the indexer does not write must not pass with entries of an earlier step
                attention.topk_indices[settings.workload.placed(chosen)] = -1
        settings.workspace.peaks.clear()
        recorder.start(settings.workload.placed(chosen))
        layers: dict[LayerKey, AttentionMetadata] = {self.layer.key: metadata}
        with set_forward_context(layers):
            output = attention(hidden, positions)
        recorder.watch.lap("project")
        if settings.context is not None and self.layer.has_entries:
            self._sent += settings.context.sent
            settings.context.sent.clear()
            with timed(other_s, "checks", device):
                self._digest.add(recorder.out)
        self._count(len(tokens), recorder.watch.seconds)
        if self._checker is not None:
            with timed(other_s, "checks", device):
                step = CheckedStep(number, tokens, metadata, attention.topk_indices, output)
                self._checker.check(step, chosen, random)

    def on_rank(self, compressed_bytes: int) -> LayerOnRank:
        """What this rank has of the layer. compressed_bytes: of pages of entries and index keys, at their peak."""
        report, dtype = self.report, self.settings.workload.dtype
        traffic = Traffic.of(self.layer, dtype, self._sent, report.tokens)
        rank = LayerOnRank(
            report.kind, compressed_bytes, report.kv_bytes_peak - compressed_bytes, traffic, digest=str(self._digest)
        )
        check = report.check
        if check is None:
            return rank
        return evolve(rank, rows=check.rows, failed=check.failed, failures=tuple(check.failures))

    def _count(self, tokens: int, seconds: Mapping[str, float]) -> None:
        """Count a step that has run."""
        for arena, peak in self.settings.workspace.peaks.items():
            self._peaks[arena] = max(self._peaks.get(arena, 0), peak)
        self.report.workspace_bytes_peak = sum(self._peaks.values())
        self.report.tokens += tokens
        for name, value in seconds.items():
            self.report.seconds[name] += value


def _name_of(geometry: ModelGeometry, layer: LayerGeometry) -> str:
    """The name of a layer type: its kind, and its ratio where the kind has several."""
    several = sum(other.kind is layer.kind for other in geometry.distinct_layers) > 1
    return f"{layer.kind.value} r={layer.compress_ratio}" if several else layer.kind.value


def _owners_of(geometry: ModelGeometry, layer: LayerGeometry) -> int:
    """Layers of a type, without those that read the compressed cache of another."""
    alike = (i for i, key in enumerate(geometry.layers) if key == layer.key)
    return sum(geometry.sources(i).kv in (None, i) for i in alike)

"""The layers of a replay. One layer stands for all layers of its type: a full layer, or attention alone.

A full layer goes from hidden states to hidden states, with random weights and all caches. Attention alone inserts,
attends and projects random q, keys, entries and selections.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from attrs import evolve, frozen
from torch import Tensor

from dsv4attn.core.attention.forward_mqa import forward_mqa
from dsv4attn.core.contract.backend import Backend
from dsv4attn.core.contract.limits import Limits
from dsv4attn.core.layer.attention_layer import DeepseekV4Attention
from dsv4attn.core.memory.workspace import WorkspaceManager, WorkspacePlan, simultaneous_bytes
from dsv4attn.core.metadata.forward_context import set_forward_context
from dsv4attn.core.metadata.metadata import AttentionMetadata, LayerKey
from dsv4attn.core.model.geometry import LayerGeometry, LayerKind, ModelGeometry
from dsv4attn.core.model.rope import cos_sin_cache
from dsv4attn.core.reprs import fields_repr
from dsv4attn.core.tensorspec import BufferSpec
from dsv4attn.serving.cache_manager import CacheManager
from dsv4attn.tools.replay.check_attention import AttentionChecker, choose_rows, selecting_tokens
from dsv4attn.tools.replay.check_full_layer import CheckedStep, FullLayerChecker, tolerance_of
from dsv4attn.tools.replay.oracle_full_layer import OracleLayer
from dsv4attn.tools.replay.over_ranks import LayerOnRank, MeteredContext, OutputDigest, Traffic
from dsv4attn.tools.replay.pools import COMPRESSED_BLOCK_TOKENS, PageBytes, PageGroup
from dsv4attn.tools.replay.random_weights import RandomWeights
from dsv4attn.tools.replay.recorder import RecordingBackend, wait_for
from dsv4attn.tools.replay.results import ATTENTION_OPERATIONS, LAYER_OPERATIONS, CheckResult, LayerReport
from dsv4attn.tools.replay.workload import I64, Tokens, Workload

__all__ = ["AttentionRunner", "Buffers", "FullLayerRunner", "LayerRunner", "MeteredWorkspace", "RunSettings", "timed"]


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


class LayerRunner(ABC):
    """Runs and checks the steps of one layer type."""

    def __init__(
        self,
        index: int,
        settings: RunSettings,
        plan: WorkspacePlan,
        operations: Sequence[str],
        check: CheckResult | None,
    ) -> None:
        """Begin a report. index: number of the layer in the manager's geometry. operations: what is timed."""
        self.settings = settings
        model, manager = settings.workload.geometry, settings.manager
        self.layer, self.caches = manager.geometry.layer(index), manager.caches[index]
        self.page = page = PageBytes.of(self.caches)
        window = PageGroup(self.caches.attention.swa.block_size, self.layer.window, page.window)
        self._peaks: dict[str, int] = {}
        self.report = LayerReport(
            kind=_name_of(model, self.layer),
            layers_in_model=_owners_of(model, self.layer),
            kv_bytes_per_token=page.compressed / COMPRESSED_BLOCK_TOKENS,
            window_bytes_per_sequence=window.page_bytes * window.pages_per_sequence,
            workspace_bytes_planned=sum(plan.arenas.values()),
            transient_bytes_bound=plan.transient_bytes,
            seconds=dict.fromkeys(operations, 0.0),
            check=check,
        )

    @abstractmethod
    def step(self, number: int, tokens: Tokens, metadata: AttentionMetadata, other_s: dict[str, float]) -> None:
        """Run and check the tokens of a step. Its numbers are counted when all of this is done."""

    def _choose_rows(self, number: int, tokens: Tokens) -> tuple[I64, np.random.Generator]:
        """Rows of a step to check, and the source of further random choices."""
        random = np.random.default_rng([self.settings.seed, number, list(LayerKind).index(self.layer.kind)])
        return choose_rows(tokens, self.layer, self.settings.check_rows, random), random

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


@frozen(eq=False)
class Buffers:
    """Tensors of attention alone, for the largest step; all layer types share them.

    wo_a: [G * rank, H / G * D] fp32.
    q: [T, H, D].
    out: [T, H, D] like q.
    lse: [T, H] fp32.
    """

    wo_a: Tensor
    q: Tensor
    out: Tensor
    lse: Tensor

    __repr__ = fields_repr

    @classmethod
    def of(cls, settings: RunSettings) -> Buffers:
        """Allocate the buffers, and draw the projection."""
        workload = settings.workload
        rows = settings.limits.max_num_batched_tokens, workload.geometry.num_heads
        dim, dtype, device = workload.geometry.head_dim, workload.dtype, workload.device
        q, out = (torch.empty(*rows, dim, dtype=dtype, device=device) for _ in range(2))
        return cls(workload.projection(), q, out, torch.empty(rows, dtype=torch.float32, device=device))


class AttentionRunner(LayerRunner):
    """Attention alone, on random inputs."""

    def __init__(self, index: int, settings: RunSettings, plan: WorkspacePlan, buffers: Buffers) -> None:
        """Take the caches of the layer. buffers: shared by all layer types."""
        layer, layout = settings.manager.geometry.layer(index), settings.manager.caches[index].attention.swa.layout
        self._checker: AttentionChecker | None = None
        if settings.check_rows:
            self._checker = AttentionChecker(layer, layout, settings.workload, buffers.wo_a)
        check = self._checker.result if self._checker else None
        super().__init__(index, settings, plan, ATTENTION_OPERATIONS, check)
        self._buffers = buffers
        self._cos_sin = cos_sin_cache(layer.rope, settings.limits.max_model_len, settings.workload.device)

    def step(self, number: int, tokens: Tokens, metadata: AttentionMetadata, other_s: dict[str, float]) -> None:
        """Insert, attend, project and check the tokens of a step."""
        settings, buffers, caches, kind = self.settings, self._buffers, self.caches.attention, self.layer.kind
        backend, workload, compressed = settings.backend, settings.workload, metadata.compressed
        device = workload.device
        q, out, lse = (buffer[: len(tokens)] for buffer in (buffers.q, buffers.out, buffers.lse))
        with timed(other_s, "inputs", device):
            workload.q_rows(workload.q_numbers(kind, tokens), out=q)
            kv = workload.key_rows(workload.kv_numbers(kind, tokens))
            entries = workload.key_rows(workload.entry_numbers(kind, tokens)) if compressed else None
            topk = workload.topk(kind, tokens) if kind is LayerKind.CSA else None
            positions = workload.placed(tokens.positions)
            chosen, random = self._choose_rows(number, tokens)
            # a row that the backend does not write must not pass with values of an earlier step
            rows = workload.placed(chosen)
            out[rows], lse[rows] = torch.nan, torch.nan
        settings.workspace.peaks.clear()
        seconds = dict.fromkeys(ATTENTION_OPERATIONS, 0.0)
        with timed(seconds, "insert", device):
            slots, eps = metadata.swa.slot_mapping, self.layer.q_eps
            backend.qnorm_rope_kv_insert(q, kv, caches.swa, slots, positions, self._cos_sin, eps)
            if entries is not None and compressed is not None and caches.compressed is not None:
                backend.quantize_and_insert_k_cache(entries, caches.compressed, compressed.slot_mapping[: len(tokens)])
        with timed(seconds, "attend", device):
            forward_mqa(
                q,
                caches,
                metadata,
                backend,
                settings.workspace,
                out,
                layer=self.layer,
                limits=settings.limits,
                attn_sink=workload.sink(kind),
                topk_indices=topk,
                lse=lse,
            )
        with timed(seconds, "project", device):
            z = backend.inv_rope_o_proj(out, positions, self._cos_sin, buffers.wo_a, workload.geometry.o_groups)
        self._count(len(tokens), seconds)
        if self._checker is not None:
            with timed(other_s, "checks", device):
                self._checker.check(number, tokens, chosen, out, lse, z, random)


class FullLayerRunner(LayerRunner):
    """A full layer, with random weights."""

    def __init__(self, index: int, settings: RunSettings, plan: WorkspacePlan, weights: RandomWeights) -> None:
        """Draw the weights and bind the caches."""
        manager, limits, workload, context = settings.manager, settings.limits, settings.workload, settings.context
        geometry, caches, layer = manager.geometry, manager.caches[index], manager.geometry.layer(index)
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
        self._checker: FullLayerChecker | None = None
        if settings.check_rows:
            exact = OracleLayer(geometry, layer, layer_weights, weights)
            tolerance = tolerance_of(workload.dtype, weights.key_rms)
            self._checker = FullLayerChecker(layer, exact, caches, recorder, workload, tolerance, context)
        self._sent, self._digest = Counter[str](), OutputDigest()
        super().__init__(index, settings, plan, LAYER_OPERATIONS, self._checker.result if self._checker else None)
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
            chosen, random = self._choose_rows(number, tokens)
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

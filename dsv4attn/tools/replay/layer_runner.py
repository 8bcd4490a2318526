"""Attention alone in a replay: the caches of a layer type, and insert, attention, projection, check of each step."""

from __future__ import annotations

import time
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Protocol

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from dsv4attn.core.attention.forward_mqa import forward_mqa
from dsv4attn.core.cache.layer_caches import LayerCaches
from dsv4attn.core.cache.layout import KVCacheLayout, PagedKVCache
from dsv4attn.core.contract.backend import Backend
from dsv4attn.core.contract.limits import Limits
from dsv4attn.core.memory.workspace import WorkspaceManager, WorkspacePlan, simultaneous_bytes
from dsv4attn.core.metadata.metadata import AttentionMetadata
from dsv4attn.core.model.geometry import LayerGeometry, LayerKind
from dsv4attn.core.model.rope import cos_sin_cache
from dsv4attn.core.tensorspec import BufferSpec
from dsv4attn.tools.replay.check_attention import AttentionChecker, choose_rows
from dsv4attn.tools.replay.pools import COMPRESSED_BLOCK_TOKENS, PoolSizes
from dsv4attn.tools.replay.results import LayerReport
from dsv4attn.tools.replay.workload import Tokens, Workload

__all__ = ["AnyRunner", "AttentionRunner", "Buffers", "MeteredWorkspace", "PageBytes", "RunSettings", "timed"]


@contextmanager
def timed(seconds: MutableMapping[str, float], name: str) -> Iterator[None]:
    """Add the time of a `with` block that does not raise."""
    start = time.perf_counter()
    yield
    seconds[name] += time.perf_counter() - start


@frozen
class PageBytes:
    """Bytes of one page in the caches of one layer type.

    window: of the window cache.
    compressed: of the compressed cache, and of index keys, which share its pages; 0 without one.
    state: of the caches of compressor states.
    """

    window: int
    compressed: int
    state: int = 0

    @classmethod
    def of(cls, layer: LayerGeometry, layout: KVCacheLayout, block_size: int) -> PageBytes:
        """Page strides, padding included."""
        ratio = layer.compress_ratio
        compressed = layout.page_stride(COMPRESSED_BLOCK_TOKENS // ratio) if layer.has_entries else 0
        return cls(layout.page_stride(block_size), compressed)

    def window_per_sequence(self, layer: LayerGeometry, block_size: int) -> int:
        """Bytes of the window pages that one idle sequence can hold."""
        return self.window * ((layer.window - 1) // block_size + 2)


class MeteredWorkspace(WorkspaceManager):
    """A workspace that records the largest request of each of its lanes since `peaks` was last cleared."""

    def __init__(self) -> None:
        """Start with no memory and no requests."""
        super().__init__()
        self.peaks: dict[str, int] = {}

    def get_simultaneous(
        self, *specs: BufferSpec, lane: str = "default", caller: str = "get_simultaneous"
    ) -> list[Tensor]:
        """As the base class does."""
        self.peaks[lane] = max(self.peaks.get(lane, 0), simultaneous_bytes(specs))
        return super().get_simultaneous(*specs, lane=lane, caller=caller)

    def peak(self, before: dict[str, int]) -> int:
        """Raise the peaks of a layer to those recorded, and return the sum over lanes."""
        for lane, peak in self.peaks.items():
            before[lane] = max(before.get(lane, 0), peak)
        return sum(before.values())


@frozen(eq=False)
class RunSettings:
    """What every lane needs, of both kinds of replays.

    backend: the backend.
    limits: limits of all steps.
    layout: layout of the caches of keys.
    block_size: records in a page of the window cache.
    workload: source of the inputs.
    workspace: reserved and locked; lanes share it, because they run one after another.
    check_rows: rows checked per step.
    seed: seed of the choice of those rows.
    """

    backend: Backend
    limits: Limits
    layout: KVCacheLayout
    block_size: int
    workload: Workload
    workspace: MeteredWorkspace
    check_rows: int
    seed: int


@frozen(eq=False)
class Buffers:
    """Objects that all lanes of attention alone share, because they run one after another.

    wo_a: [G * rank, H / G * D] fp32.
    q: [T, H, D].
    out: [T, H, D] like q.
    lse: [T, H] fp32.
    """

    wo_a: Tensor
    q: Tensor
    out: Tensor
    lse: Tensor

    @classmethod
    def of(cls, setting: RunSettings) -> Buffers:
        """Buffers for the largest step."""
        workload = setting.workload
        rows = setting.limits.max_num_batched_tokens, workload.geometry.num_heads
        q, out = (torch.empty(*rows, workload.geometry.head_dim, dtype=workload.dtype, device="cpu") for _ in range(2))
        return cls(workload.projection(), q, out, torch.empty(rows, dtype=torch.float32, device="cpu"))


class AnyRunner(Protocol):
    """A layer type in a replay: attention alone, or a whole layer."""

    layer: LayerGeometry
    page: PageBytes
    report: LayerReport

    def step(self, number: int, tokens: Tokens, metadata: AttentionMetadata, other_s: dict[str, float]) -> None:
        """Run and check the tokens of a step. Its numbers are counted when all of this is done."""


class AttentionRunner:
    """Attention of a layer that stands for all layers of its type, on random inputs."""

    def __init__(
        self, layer: LayerGeometry, setting: RunSettings, shared: Buffers, sizes: PoolSizes, plan: WorkspacePlan
    ) -> None:
        """Allocate the layer's own caches over the shared pools."""
        self.layer, self._setting, self._shared = layer, setting, shared
        layout, block_size, ratio = setting.layout, setting.block_size, layer.compress_ratio
        self.page = PageBytes.of(layer, layout, block_size)
        swa, compressed = PagedKVCache.allocate(layout, sizes.window, block_size), None
        if layer.has_entries:
            compressed = PagedKVCache.allocate(layout, sizes.compressed, COMPRESSED_BLOCK_TOKENS // ratio)
        self._caches = LayerCaches(swa, compressed)
        self._cos_sin = cos_sin_cache(layer.rope, setting.limits.max_model_len)
        self._checker = AttentionChecker(layer, layout, setting.workload, shared.wo_a) if setting.check_rows else None
        self._peaks: dict[str, int] = {}
        self.report = LayerReport(
            kind=layer.kind.value,
            layers_in_model=setting.workload.geometry.count(layer.kind),
            kv_bytes_per_token=self.page.compressed / COMPRESSED_BLOCK_TOKENS,
            window_bytes_per_sequence=self.page.window_per_sequence(layer, block_size),
            workspace_bytes_planned=sum(plan.lanes.values()),
            transient_bytes_bound=plan.transient_bytes,
            check=self._checker.result if self._checker else None,
        )

    def step(self, number: int, tokens: Tokens, metadata: AttentionMetadata, other_s: dict[str, float]) -> None:
        """Insert, attend, project and check the tokens of a step. Its numbers are counted when all of this is done."""
        setting, shared, kind, count = self._setting, self._shared, self.layer.kind, len(tokens)
        backend, workload, compressed = setting.backend, setting.workload, metadata.compressed
        q, out, lse = shared.q[:count], shared.out[:count], shared.lse[:count]
        with timed(other_s, "inputs"):
            workload.q_rows(workload.q_numbers(kind, tokens), out=q)
            kv = workload.key_rows(workload.kv_numbers(kind, tokens))
            entries = workload.key_rows(workload.entry_numbers(kind, tokens)) if compressed else None
            topk = workload.topk(kind, tokens) if kind is LayerKind.C4A else None
            positions = torch.from_numpy(tokens.positions)
            random = np.random.default_rng([setting.seed, number, list(LayerKind).index(kind)])
            chosen = choose_rows(tokens, self.layer, setting.check_rows, random)
            # a row that the backend does not write must not pass with values of an earlier step
            out[chosen], lse[chosen] = torch.nan, torch.nan
        seconds = {"insert": 0.0, "attend": 0.0, "project": 0.0}
        with timed(seconds, "insert"):
            slots, eps = metadata.swa.slot_mapping, self.layer.q_eps
            backend.qnorm_rope_kv_insert(q, kv, self._caches.swa, slots, positions, self._cos_sin, eps)
            if entries is not None and compressed is not None and self._caches.compressed is not None:
                slots = compressed.slot_mapping[:count]
                backend.quantize_and_insert_k_cache(entries, self._caches.compressed, slots)
        with timed(seconds, "attend"):
            self._attend(q, metadata, out, lse, topk)
        with timed(seconds, "project"):
            groups = workload.geometry.o_groups
            z = backend.inv_rope_o_proj(out, positions, self._cos_sin, shared.wo_a, groups)
        self.report.tokens += count
        self.report.seconds.add(seconds)
        if self._checker is not None:
            with timed(other_s, "checks"):
                self._checker.check(number, tokens, chosen, out, lse, z, random)

    def _attend(self, q: Tensor, metadata: AttentionMetadata, out: Tensor, lse: Tensor, topk: Tensor | None) -> None:
        setting = self._setting
        setting.workspace.peaks.clear()
        forward_mqa(
            q,
            self._caches,
            metadata,
            setting.backend,
            setting.workspace,
            out,
            layer=self.layer,
            limits=setting.limits,
            attn_sink=setting.workload.sink(self.layer.kind),
            topk_indices=topk,
            lse=lse,
        )
        self.report.workspace_bytes_peak = setting.workspace.peak(self._peaks)

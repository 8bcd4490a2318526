"""One layer type in a replay: its caches, and insert, attention, projection and check of each step."""

from __future__ import annotations

import time
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from dsv4attn.core.caches import LayerCaches
from dsv4attn.core.contract import Backend
from dsv4attn.core.forward import forward_mqa
from dsv4attn.core.geometry import LayerGeometry, LayerKind
from dsv4attn.core.layout import KVCacheLayout, PagedKVCache
from dsv4attn.core.limits import Limits
from dsv4attn.core.metadata import AttentionMetadata
from dsv4attn.core.rope import cos_sin_cache
from dsv4attn.core.workspace import BufferSpec, WorkspaceManager, WorkspacePlan, simultaneous_bytes
from dsv4attn.tools.replay.check import RowChecker, choose_rows
from dsv4attn.tools.replay.pages import COMPRESSED_BLOCK_TOKENS, PoolSizes
from dsv4attn.tools.replay.report import LayerReport
from dsv4attn.tools.replay.workload import Tokens, Workload

__all__ = ["Lane", "MeteredWorkspace", "PageBytes", "Shared", "timed"]


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
    compressed: of the compressed cache; 0 without one.
    """

    window: int
    compressed: int

    @classmethod
    def of(cls, layer: LayerGeometry, layout: KVCacheLayout, block_size: int) -> PageBytes:
        """Page strides, padding included."""
        ratio = layer.compress_ratio
        compressed = 0 if ratio == 1 else layout.page_stride(COMPRESSED_BLOCK_TOKENS // ratio)
        return cls(layout.page_stride(block_size), compressed)


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


@frozen(eq=False)
class Shared:
    """Objects that all lanes share, because they run one after another.

    backend: the backend.
    limits: limits of all steps.
    layout: layout of all caches.
    block_size: records in a page of the window cache.
    workload: source of the inputs.
    wo_a: [G * rank, H / G * D] fp32.
    workspace: reserved and locked.
    q: [T, H, D].
    out: [T, H, D] like q.
    lse: [T, H] fp32.
    check_rows: rows checked per step.
    seed: seed of the choice of those rows.
    """

    backend: Backend
    limits: Limits
    layout: KVCacheLayout
    block_size: int
    workload: Workload
    wo_a: Tensor
    workspace: MeteredWorkspace
    q: Tensor
    out: Tensor
    lse: Tensor
    check_rows: int
    seed: int

    @classmethod
    def of(
        cls,
        backend: Backend,
        limits: Limits,
        layout: KVCacheLayout,
        block_size: int,
        workload: Workload,
        plan: WorkspacePlan,
        *,
        check_rows: int,
        seed: int,
    ) -> Shared:
        """Buffers for the largest step, and a workspace that is reserved and locked."""
        workspace = MeteredWorkspace()
        workspace.reserve(plan, caller="replay")
        workspace.lock()
        rows = limits.max_num_batched_tokens, workload.geometry.num_heads
        q, out = (torch.empty(*rows, workload.geometry.head_dim, dtype=workload.dtype) for _ in range(2))
        wo_a, lse = workload.projection(), torch.empty(rows)
        return cls(backend, limits, layout, block_size, workload, wo_a, workspace, q, out, lse, check_rows, seed)


class Lane:
    """A layer that stands for all layers of its type."""

    def __init__(self, layer: LayerGeometry, shared: Shared, sizes: PoolSizes, plan: WorkspacePlan) -> None:
        """Allocate the layer's own caches over the shared pools."""
        self.layer, self._shared = layer, shared
        layout, block_size, ratio = shared.layout, shared.block_size, layer.compress_ratio
        self.page = PageBytes.of(layer, layout, block_size)
        swa, compressed = PagedKVCache.allocate(layout, sizes.window, block_size), None
        if ratio > 1:
            compressed = PagedKVCache.allocate(layout, sizes.compressed, COMPRESSED_BLOCK_TOKENS // ratio)
        self._caches = LayerCaches(swa, compressed)
        self._cos_sin = cos_sin_cache(layer.rope, shared.limits.max_model_len)
        self._checker = RowChecker(layer, layout, shared.workload, shared.wo_a) if shared.check_rows else None
        self._peaks: dict[str, int] = {}
        self.report = LayerReport(
            kind=layer.kind.value,
            layers_in_model=shared.workload.geometry.count(layer.kind),
            kv_bytes_per_token=self.page.compressed / COMPRESSED_BLOCK_TOKENS,
            window_bytes_per_sequence=self.page.window * ((layer.window - 1) // block_size + 2),
            workspace_bytes_planned=sum(plan.lanes.values()),
            transient_bytes_bound=plan.transient_bytes,
            check=self._checker.result if self._checker else None,
        )

    def step(self, number: int, tokens: Tokens, metadata: AttentionMetadata, other_s: dict[str, float]) -> None:
        """Insert, attend, project and check the tokens of a step. Its numbers are counted when all of this is done."""
        shared, kind, count = self._shared, self.layer.kind, len(tokens)
        backend, workload, compressed = shared.backend, shared.workload, metadata.compressed
        q, out, lse = shared.q[:count], shared.out[:count], shared.lse[:count]
        with timed(other_s, "inputs"):
            workload.q_rows(workload.q_numbers(kind, tokens), out=q)
            kv = workload.key_rows(workload.kv_numbers(kind, tokens))
            entries = workload.key_rows(workload.entry_numbers(kind, tokens)) if compressed else None
            topk = workload.topk(kind, tokens) if kind is LayerKind.C4A else None
            positions = torch.from_numpy(tokens.positions)
            random = np.random.default_rng([shared.seed, number, list(LayerKind).index(kind)])
            chosen = choose_rows(tokens, self.layer, shared.check_rows, random)
            # a row that the backend does not write must not pass with values of an earlier step
            out[chosen], lse[chosen] = torch.nan, torch.nan
        seconds = {"insert": 0.0, "attend": 0.0, "project": 0.0}
        with timed(seconds, "insert"):
            slots, eps = metadata.swa.slot_mapping, self.layer.eps
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
        self.report.seconds.add(**seconds)
        if self._checker is not None:
            with timed(other_s, "checks"):
                self._checker.check(number, tokens, chosen, out, lse, z, random)

    def _attend(self, q: Tensor, metadata: AttentionMetadata, out: Tensor, lse: Tensor, topk: Tensor | None) -> None:
        shared = self._shared
        shared.workspace.peaks.clear()
        forward_mqa(
            q,
            self._caches,
            metadata,
            shared.backend,
            shared.workspace,
            out,
            layer=self.layer,
            limits=shared.limits,
            attn_sink=shared.workload.sink(self.layer.kind),
            topk_indices=topk,
            lse=lse,
        )
        for lane, peak in shared.workspace.peaks.items():
            self._peaks[lane] = max(self._peaks.get(lane, 0), peak)
        self.report.workspace_bytes_peak = sum(self._peaks.values())

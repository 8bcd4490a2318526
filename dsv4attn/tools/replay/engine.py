"""The replay engine: runs the steps of the scheduler through one layer of each type over paged caches, with checks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import numpy as np
import torch
from attrs import Attribute, field, frozen

from dsv4attn.core.cache.layout import KVCacheLayout
from dsv4attn.core.contract.backend import Backend, complete
from dsv4attn.core.contract.limits import Limits
from dsv4attn.core.memory.plan import plan_workspace
from dsv4attn.core.memory.workspace import WorkspacePlan
from dsv4attn.core.metadata.builder import MetadataBuilder
from dsv4attn.core.metadata.metadata import Batch
from dsv4attn.core.model.geometry import LayerKind, ModelGeometry
from dsv4attn.errors import ArgumentError, UnknownNameError
from dsv4attn.serving.scheduler import Scheduler, Step
from dsv4attn.tools.replay.full_layer import LayerRunner, caches_of, one_of_each, pages_of
from dsv4attn.tools.replay.layer_runner import (
    AnyRunner,
    AttentionRunner,
    Buffers,
    MeteredWorkspace,
    PageBytes,
    RunSettings,
    timed,
)
from dsv4attn.tools.replay.over_ranks import MeteredContext, RanksReport
from dsv4attn.tools.replay.pools import COMPRESSED, COMPRESSED_BLOCK_TOKENS, WINDOW, PagedBlocks, PoolSizes, StatePool
from dsv4attn.tools.replay.random_weights import RandomWeights
from dsv4attn.tools.replay.request import Request, check_count
from dsv4attn.tools.replay.results import Report
from dsv4attn.tools.replay.workload import Tokens, Workload

__all__ = ["CACHES", "INDEXERS", "Progress", "Replay", "ReplayConfig"]

CACHES = ("fp8_ds_mla", "bf16", "fp32")
"""Names of `ReplayConfig.cache`. With `fp32`, hidden states, queries and keys are fp32 too: no format rounds."""
INDEXERS = ("real", "random")
"""Names of `ReplayConfig.indexer`."""


def _at_least(minimum: int) -> Callable[[Any, Attribute[int], int], None]:
    return lambda _, attribute, value: check_count(attribute.name, value, minimum)


@frozen
class ReplayConfig:
    """Settings of a replay.

    kinds: layer types to run; None means all of the model.
    cache: one of CACHES.
    block_size: records in a page of the window cache.
    max_num_batched_tokens: most tokens of a step.
    max_num_seqs: most requests that run at once.
    max_kv_bytes: bytes of all KV pages.
    check_rows: rows checked per step and layer type.
    seed: seed of all random numbers.
    indexer: `real`: whole layers with random weights, from hidden states to hidden states. `random`: attention alone,
       on random q, keys, entries and selections.
    """

    kinds: Sequence[LayerKind] | None = None
    cache: str = "fp8_ds_mla"
    block_size: int = field(default=64, validator=_at_least(1))
    max_num_batched_tokens: int = field(default=1024, validator=_at_least(1))
    max_num_seqs: int = field(default=32, validator=_at_least(1))
    max_kv_bytes: int = field(default=2 * 2**30, validator=_at_least(1))
    check_rows: int = field(default=2, validator=_at_least(0))
    seed: int = field(default=0, validator=_at_least(0))
    indexer: str = "real"


@frozen
class Progress:
    """State in the middle of a step, or at its end.

    tokens: tokens served, without those that a preemption lost. A step counts in parts, layer type by layer type.
    step: number of the step.
    running: requests that have begun.
    waiting: requests that wait.
    """

    tokens: int
    step: int
    running: int
    waiting: int


class Replay:
    """Serves requests through one layer of each type.

    Raises ArgumentError or UnknownNameError on bad input, before anything runs.
    """

    def __init__(
        self,
        geometry: ModelGeometry,
        backend: Backend,
        requests: Sequence[Request],
        config: ReplayConfig,
        context: MeteredContext | None = None,
    ) -> None:
        """Size the pools, allocate caches and buffers, reserve and lock the workspace.

        context: ranks that share the compressed entries; all of them replay the same. Memory is that of one rank.
        """
        self.geometry, self.backend, self.config, self.requests = geometry, backend, config, tuple(requests)
        if config.indexer not in INDEXERS:
            raise UnknownNameError("indexer", config.indexer, INDEXERS)
        whole = config.indexer == "real"
        if geometry.shared_latent and not whole:
            hint = "layers of V4.1 are run whole; leave out --indexer"
            raise ArgumentError("indexer", expected="'real'", actual=repr(config.indexer), hint=hint)
        if context is not None and not whole:
            hint = "ranks share the entries of whole layers; leave out --indexer"
            raise ArgumentError("indexer", expected="'real' over ranks", actual=repr(config.indexer), hint=hint)
        self._context, ranks = context, 1 if context is None else context.ownership.size
        layers = [layer for kind in config.kinds or geometry.kinds for layer in geometry.layers_of_kind(kind)]
        layout, dtype = _layout_of(config.cache, geometry)
        self._limits = limits = _limits_of(self.requests, geometry, config, backend)
        pages = [PageBytes.of(layer, layout, config.block_size) for layer in layers]
        if whole:
            pages = pages_of(geometry, layers, layout, config.block_size)
        self._states = [StatePool(layer, page.state) for layer, page in zip(layers, pages, strict=True) if page.state]
        sizes = PoolSizes.of(
            self.requests,
            window=geometry.window,
            block_size=config.block_size,
            max_num_seqs=limits.max_num_reqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            window_page_bytes=sum(page.window for page in pages),
            compressed_page_bytes=sum(page.compressed for page in pages),
            max_bytes=config.max_kv_bytes,
            states=self._states,
            ranks=ranks,
        )
        self._blocks = PagedBlocks(sizes, config.block_size, geometry.window, config.seed, self._states, ranks)
        self._scheduler = Scheduler(
            self.requests,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_num_seqs=limits.max_num_reqs,
            blocks=self._blocks,
        )
        self._workload = Workload(geometry, self.requests, config.seed, dtype)
        size = None if context is None else ranks
        plans = [plan_workspace(layer, limits, backend, layout, ranks=size) for layer in layers]
        workspace = MeteredWorkspace()
        workspace.reserve(reduce(WorkspacePlan.union, plans), caller="replay")
        workspace.lock()
        setting = RunSettings(
            backend,
            limits,
            layout,
            config.block_size,
            self._workload,
            workspace,
            check_rows=config.check_rows,
            seed=config.seed,
        )
        self._lanes: Sequence[AnyRunner]
        self._whole: Sequence[LayerRunner] = ()
        if whole:
            manager = caches_of(geometry, layers, limits, layout, sizes, config.block_size, backend, context)
            weights = RandomWeights(manager.geometry, config.seed)
            self._builder = manager.builder
            self._whole = [LayerRunner(i, setting, manager, weights, plan, context) for i, plan in enumerate(plans)]
            self._lanes = self._whole
        else:
            self._builder = MetadataBuilder(
                one_of_each(geometry, layers),
                limits,
                swa_block_size=config.block_size,
                compressed_block_tokens=COMPRESSED_BLOCK_TOKENS,
                num_swa_blocks=sizes.window,
                num_compressed_blocks=sizes.compressed,
                backend=backend,
            )
            shared, pairs = Buffers.of(setting), zip(layers, plans, strict=True)
            self._lanes = [AttentionRunner(layer, setting, shared, sizes, plan) for layer, plan in pairs]
        self._other_s = {"inputs": 0.0, "scheduling": 0.0, "checks": 0.0}

    @property
    def total_tokens(self) -> int:
        """Tokens to serve, if nothing is preempted."""
        return sum(request.attention_tokens for request in self.requests)

    def run(self, progress: Callable[[Progress], None] = lambda _: None) -> Report:
        """Serve everything, calling `progress` after each layer type of each step.

        On Ctrl-C the report of what has run until then is returned, marked as interrupted.
        """
        started, interrupted = time.perf_counter(), False
        try:
            with torch.inference_mode():
                while self._run_step(progress):
                    pass
        except KeyboardInterrupt:
            interrupted = True
        return self._report(time.perf_counter() - started, interrupted=interrupted)

    def _run_step(self, progress: Callable[[Progress], None]) -> bool:
        with timed(self._other_s, "scheduling"):
            step = self._scheduler.next_step()
            if step is None:
                return False
            tokens, batch = self._describe(step)
            metadata = self._builder.build_all(batch)
        done, running, waiting = self._scheduler.counters, self._scheduler.num_running, self._scheduler.num_waiting
        number, served = done.steps + 1, done.prefill_tokens + done.decode_tokens - done.recomputed_tokens
        for i, lane in enumerate(self._lanes, 1):
            lane.step(number, tokens, metadata[lane.layer.key], self._other_s)
            progress(Progress(served + step.num_tokens * i // len(self._lanes), number, running, waiting))
        with timed(self._other_s, "scheduling"):
            self._scheduler.step_done(step)
            self._blocks.slide(step)
        return True

    def _describe(self, step: Step) -> tuple[Tokens, Batch]:
        """Describe a step to the workload and to the metadata builder."""
        entries, size = step.scheduled, self.config.block_size
        query_lens = np.array([entry.query_len for entry in entries])
        ends = query_lens.cumsum()
        request = np.repeat(np.arange(len(entries)), query_lens)
        first = np.array([entry.seq_len for entry in entries]) - ends
        positions = np.arange(step.num_tokens) + first[request]
        rows = np.array([self._workload.row_of[entry.request.index] for entry in entries])[request]
        tables = self._blocks.tables(entries)
        slots = tables[WINDOW].numpy()[request, positions // size].astype(np.int64) * size + positions % size
        starts = torch.tensor([0, *ends.tolist()], dtype=torch.int32, device="cpu")
        seq_lens = torch.tensor([entry.seq_len for entry in entries], dtype=torch.int32, device="cpu")
        states: dict[str, Any] = {f"{pool.name}_block_table": tables[pool.name] for pool in self._states}
        batch = Batch(
            num_reqs=len(entries),
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=seq_lens,
            seq_lens_cpu=seq_lens,
            slot_mapping=torch.from_numpy(slots),
            block_table=tables[WINDOW],
            compressed_block_table=tables.get(COMPRESSED),
            **states,
        )
        return self._workload.tokens(rows, positions), batch

    def _report(self, wall_s: float, *, interrupted: bool) -> Report:
        done, config, peaks = self._scheduler.counters, self.config, self._blocks.peaks
        whole = len(self._lanes) >= len(self.geometry.distinct_layers)
        for lane in self._lanes:
            page, states = lane.page, peaks.get(f"{lane.layer.kind.value}_state", 0)
            used = peaks[WINDOW] * page.window + peaks[COMPRESSED] * page.compressed + states * page.state
            lane.report.kv_bytes_peak = used
        ranks = None
        if self._context is not None and not interrupted:
            each = [lane.on_rank(peaks[COMPRESSED] * lane.page.compressed) for lane in self._whole]
            ranks = RanksReport.gather(self._context, each)
        return Report(
            model=self.geometry.name,
            backend=self.backend.name,
            cache=config.cache,
            seed=config.seed,
            block_size=config.block_size,
            max_num_batched_tokens=self._limits.max_num_batched_tokens,
            max_num_seqs=self._limits.max_num_reqs,
            requests=len(self.requests),
            layers=[lane.report for lane in self._lanes],
            finished=done.finished,
            steps=done.steps,
            prefill_tokens=done.prefill_tokens,
            decode_tokens=done.decode_tokens,
            recomputed_tokens=done.recomputed_tokens,
            preemptions=done.preemptions,
            wall_s=wall_s,
            other_s=self._other_s,
            interrupted=interrupted,
            indexer=config.indexer,
            records_per_token=self.geometry.entries_per_token if whole else 0.0,
            readers=sum(self.geometry.sources(i).kv not in (None, i) for i in range(self.geometry.num_layers)),
            longest_request=max(x.input_length + x.output_length for x in self.requests),
            ranks=ranks,
        )


def _layout_of(cache: str, geometry: ModelGeometry) -> tuple[KVCacheLayout, torch.dtype]:
    """Layout of all caches, and the dtype of queries and raw keys."""
    nope, rope = geometry.head_dim - geometry.rope_dim, geometry.rope_dim
    if cache == "fp8_ds_mla":
        return KVCacheLayout.fp8_ds_mla(nope, rope), torch.bfloat16
    if cache not in CACHES:
        raise UnknownNameError("cache", cache, CACHES)
    dtype = torch.bfloat16 if cache == "bf16" else torch.float32
    return KVCacheLayout.rows(nope, rope, dtype=dtype), dtype


def _limits_of(requests: Sequence[Request], geometry: ModelGeometry, config: ReplayConfig, backend: Backend) -> Limits:
    """Limits of all steps. The longest request bounds them, not the model's longest context."""
    if not requests:
        raise ArgumentError("requests", expected="at least one", actual="none")
    longest = max(requests, key=lambda request: request.attention_tokens)
    if longest.attention_tokens > geometry.max_position:
        raise ArgumentError(
            f"request {longest.index}",
            expected=f"at most the {geometry.max_position} positions of {geometry.name}",
            actual=f"{longest.attention_tokens} tokens",
            hint="shrink the requests (--max-tokens)",
        )
    # no step can be larger than all requests together
    tokens = min(config.max_num_batched_tokens, sum(request.attention_tokens for request in requests))
    seqs = min(config.max_num_seqs, tokens, len(requests))
    # whole layers of a deterministic backend demand it
    single_phase = config.indexer == "real" and complete(backend).deterministic
    return Limits(seqs, tokens, longest.attention_tokens, single_phase=single_phase)

"""The replay engine: runs the steps of the scheduler through one layer of each type over paged caches, with checks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial, reduce

import numpy as np
import torch
from attrs import asdict, field, frozen

from dsv4attn.core.argument_checks import at_least
from dsv4attn.core.cache.layout import KVCacheLayout
from dsv4attn.core.contract.backend import Backend
from dsv4attn.core.contract.device import DeviceFacts
from dsv4attn.core.contract.limits import Limits
from dsv4attn.core.memory.plan import plan_workspace
from dsv4attn.core.memory.workspace import WorkspacePlan
from dsv4attn.core.model.geometry import LayerKind, ModelGeometry
from dsv4attn.errors import ArgumentError, UnknownNameError
from dsv4attn.serving.cache_manager import COMPRESSED, WINDOW, CacheManager
from dsv4attn.serving.request import Request
from dsv4attn.serving.scheduler import Scheduler
from dsv4attn.tools.replay import CACHES
from dsv4attn.tools.replay.layer_runner import LayerRunner, MeteredWorkspace, RunSettings, timed
from dsv4attn.tools.replay.over_ranks import MeteredContext, RanksReport
from dsv4attn.tools.replay.pools import COMPRESSED_BLOCK_TOKENS, PageGroup, RequestPages, plan_pools
from dsv4attn.tools.replay.random_weights import RandomWeights
from dsv4attn.tools.replay.results import Report
from dsv4attn.tools.replay.workload import Workload


@frozen
class ReplayConfig:
    """Settings of a replay.

    kinds: layer types to run; None means all of the model.
    cache: one of `CACHES`.
    block_size: records in a page of the window cache.
    max_num_batched_tokens: most tokens of a step.
    max_num_seqs: most requests that run at once.
    max_kv_bytes: bytes of all KV pages.
    check_rows: rows checked per step and layer type.
    seed: seed of all random numbers.
    device: torch device of caches, weights, inputs and kernels. The checks run on the CPU.
    """

    kinds: Sequence[LayerKind] | None = None
    cache: str = "fp8_ds_mla"
    block_size: int = field(default=64, validator=at_least(1))
    max_num_batched_tokens: int = field(default=1024, validator=at_least(1))
    max_num_seqs: int = field(default=32, validator=at_least(1))
    max_kv_bytes: int = field(default=2 * 2**30, validator=at_least(1))
    check_rows: int = field(default=2, validator=at_least(0))
    seed: int = field(default=0, validator=at_least(0))
    device: torch.device = field(default=torch.device("cpu"), converter=torch.device)


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
        self._context = context
        layers = [layer for kind in config.kinds or geometry.kinds for layer in geometry.layers_of_kind(kind)]
        layout, dtype = _layout_of(config.cache, geometry)
        self._limits = limits = _limits_of(self.requests, geometry, config, backend)
        manager_of = partial(
            CacheManager,
            geometry.with_own_layers([layer.key for layer in layers]),
            kv_layout=layout,
            swa_block_size=config.block_size,
            compressed_block_tokens=COMPRESSED_BLOCK_TOKENS,
            context_parallel=context,
            device=config.device,
        )
        # a manager of two sequences of one token has pages as large as any other has
        pages = plan_pools(
            self.requests,
            PageGroup.of(manager_of(limits=Limits(2, 2, 1))),
            max_num_seqs=limits.max_num_reqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_bytes=config.max_kv_bytes,
        )
        # pages come in random order, so that no table is contiguous by luck
        self._manager = manager_of(limits=limits, num_blocks=pages, shuffle_seed=config.seed, backend=backend)
        self._pages = RequestPages(self._manager)
        self._scheduler = Scheduler(
            self.requests,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_num_seqs=limits.max_num_reqs,
            blocks=self._pages,
        )
        self._workload = Workload(geometry, self.requests, config.seed, dtype, config.device)
        ranks = None if context is None else context.ownership.size
        plans = [plan_workspace(layer, limits, backend, layout, ranks=ranks) for layer in layers]
        workspace = MeteredWorkspace(config.device)
        workspace.reserve(reduce(WorkspacePlan.union, plans), caller="replay")
        workspace.lock()
        settings = RunSettings(
            backend,
            limits,
            self._manager,
            self._workload,
            workspace,
            check_rows=config.check_rows,
            seed=config.seed,
            context=context,
        )
        weights = RandomWeights(self._manager.geometry, config.seed, config.device)
        self._runners = [LayerRunner(i, settings, plan, weights) for i, plan in enumerate(plans)]
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
            requests = self._pages.of_step(step)
            metadata = self._manager.metadata(self._manager.batch(requests))
            rows = [self._workload.row_of[entry.request.index] for entry in step.scheduled]
            counts = [entry.query_len for entry in step.scheduled]
            tokens = self._workload.tokens(np.repeat(rows, counts), self._manager.positions(requests).cpu().numpy())
        done, running, waiting = self._scheduler.counters, self._scheduler.num_running, self._scheduler.num_waiting
        number, served = done.steps + 1, done.prefill_tokens + done.decode_tokens - done.recomputed_tokens
        for i, runner in enumerate(self._runners, 1):
            runner.step(number, tokens, metadata[runner.layer.key], self._other_s)
            progress(Progress(served + step.num_tokens * i // len(self._runners), number, running, waiting))
        with timed(self._other_s, "scheduling"):
            self._scheduler.step_done(step)
            self._manager.advance(self._pages.of_step(step))
        return True

    def _report(self, wall_s: float, *, interrupted: bool) -> Report:
        done, config, peaks = self._scheduler.counters, self.config, self._pages.peaks
        all_types = len(self._runners) >= len(self.geometry.distinct_layers)
        for runner in self._runners:
            page, states = runner.page, peaks.get(f"{runner.layer.kind.value}_state", 0)
            bytes_of = peaks[WINDOW] * page.window, peaks[COMPRESSED] * page.compressed, states * page.state
            runner.report.kv_bytes_peak = sum(bytes_of)
        ranks = None
        if self._context is not None and not interrupted:
            reports = [runner.on_rank(peaks[COMPRESSED] * runner.page.compressed) for runner in self._runners]
            ranks = RanksReport.gather(self._context, reports)
        return Report(
            model=self.geometry.name,
            backend=self.backend.name,
            cache=config.cache,
            seed=config.seed,
            block_size=config.block_size,
            max_num_batched_tokens=self._limits.max_num_batched_tokens,
            max_num_seqs=self._limits.max_num_reqs,
            requests=len(self.requests),
            layers=[runner.report for runner in self._runners],
            **asdict(done),
            wall_s=wall_s,
            other_s=self._other_s,
            interrupted=interrupted,
            device=_device_text(config.device),
            records_per_token=self.geometry.entries_per_token if all_types else 0.0,
            readers=sum(self.geometry.sources(i).kv not in (None, i) for i in range(self.geometry.num_layers)),
            longest_request=max(x.input_length + x.output_length for x in self.requests),
            ranks=ranks,
        )


def _device_text(device: torch.device) -> str:
    """A device in words."""
    if device.type == "cpu":
        return "the CPU"
    facts = DeviceFacts.here(device)
    return f"{facts.arch} ({facts.name})"


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
    single_phase = backend.deterministic and not backend.phases_agree
    return Limits(seqs, tokens, longest.attention_tokens, single_phase=single_phase)

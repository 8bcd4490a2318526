"""Host overhead of `forward_mqa` and of a bound layer over the backend's own ops, at one decode token."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from attrs import evolve, field, frozen

from dsv4attn.core.attention.mla_attention import DeepseekV4MLAAttention
from dsv4attn.core.contract.backend import AttentionCall, Backend, EntryIndices, Phase, Run
from dsv4attn.core.contract.index_ops import IndexOp, prepared_op
from dsv4attn.core.contract.wrapped import WrappedBackend
from dsv4attn.core.metadata.forward_context import set_forward_context
from dsv4attn.tools.bench.forward_step import ForwardStep


@frozen
class Overhead:
    """Seconds of single calls, which run in turn.

    layer: name of the layer.
    direct_s: the backend's own ops on prepared arguments.
    plain_s: `forward_mqa` with a backend object.
    bound_s: a call of a bound layer, which looks up backend and metadata.
    idle_s: the same call over ops that do nothing, which leaves core's time on the host.

    Each call follows one that computes, so on a CPU core's code is out of its caches.
    """

    layer: str
    direct_s: Sequence[float] = field(repr=False)
    plain_s: Sequence[float] = field(repr=False)
    bound_s: Sequence[float] = field(repr=False)
    idle_s: Sequence[float] = field(repr=False)

    def us(self, name: str) -> float:
        """Microseconds of one of the four, 10th percentile. Slower calls are disturbed by other processes."""
        return 1e6 * float(statistics.quantiles(getattr(self, f"{name}_s"), n=10, method="inclusive")[0])

    def percent(self, name: str) -> float:
        """Additional time over `direct`, in percent."""
        return 100 * (self.us(name) / self.us("direct") - 1)

    def __str__(self) -> str:
        """One line."""
        direct, plain, bound, idle = (self.us(name) for name in ("direct", "plain", "bound", "idle"))
        return (
            f"one decode token, {self.layer}: {direct:.0f} us in the backend's own ops on arguments made before, "
            f"{plain:.0f} us ({self.percent('plain'):+.1f} %) through forward_mqa, {bound:.0f} us "
            f"({self.percent('bound'):+.1f} %) through a bound layer; {idle:.0f} us through one whose ops do nothing"
        )

    def as_json(self) -> dict[str, object]:
        """Plain values."""
        times = {f"{name}_us": self.us(name) for name in ("direct", "plain", "bound", "idle")}
        return {"layer": self.layer, **times, **{f"{name}_percent": self.percent(name) for name in ("plain", "bound")}}


def overhead(step: ForwardStep, *, rounds: int = 200) -> Overhead:
    """Measure a step of one decode token."""
    bound, idle = _bound(step, step.backend), _bound(step, _Instead(step.backend, _nothing))
    kv, positions = step.q[:, 0], torch.zeros(1, dtype=torch.int64, device=step.q.device)

    def through(layer: DeepseekV4MLAAttention) -> Callable[[], None]:
        return lambda: layer.forward_mqa(step.q, kv, positions, step.out)

    metadata = {bound.prefix: step.compressed_metadata, bound.swa_prefix: step.window_metadata}
    times: tuple[list[float], ...] = ([], [], [], [])
    with torch.inference_mode(), set_forward_context(metadata):
        direct = _own_ops(step)
        calls = direct, step.run, through(bound), through(idle)
        # an idle call enqueues nothing on an accelerator, so there is nothing to wait for
        devices = *[step.q.device] * 3, torch.device("cpu")
        for counted in range(-rounds // 4, rounds):
            for measured, timed, device in zip(times, calls, devices, strict=True):
                took = seconds(timed, device)
                if counted >= 0:
                    measured.append(took)
            direct()  # the first call of the next round, too, shall follow one that computes
    return Overhead(step.layer.kind.value, *times)


def seconds(call: Callable[[], None], device: torch.device) -> float:
    """Seconds of one call as the host sees it, on an accelerator until the device is idle."""
    module = None if device.type == "cpu" else torch.get_device_module(device)
    if module is not None:
        module.synchronize()
    start = time.perf_counter()
    call()
    if module is not None:
        module.synchronize()
    return time.perf_counter() - start


def _bound(step: ForwardStep, backend: Backend) -> DeepseekV4MLAAttention:
    layer = DeepseekV4MLAAttention(
        "layer",
        step.layer,
        step.limits,
        backend,
        attn_sink=step.attn_sink,
        cos_sin_cache=step.q.new_zeros(1, step.layer.rope_dim, dtype=torch.float32).expand(
            step.limits.max_model_len, -1
        ),
        topk_indices_buffer=step.topk_indices,
        workspace=step.workspace,
    )
    layer.bind_kv_cache(step.caches.swa, step.caches.compressed)
    return layer


def _own_ops(step: ForwardStep) -> Callable[[], None]:
    """What core runs of the backend for this step, prepared, with the very arguments, and nothing else."""
    calls: list[Callable[[], Any]] = []

    def noting(run: Callable[..., None]) -> Callable[..., None]:
        return lambda *arguments: calls.append(partial(run, *arguments))

    evolve(step, backend=_Instead(step.backend, noting)).run()

    def run() -> None:
        for call in calls:
            call()

    return run


def _nothing(_: Callable[..., None]) -> Callable[..., None]:
    """In the place of a run, one that does nothing."""
    return lambda *_: None


class _Instead(WrappedBackend):
    """A backend that prepares what another one prepares, and runs something else."""

    def __init__(self, wrapped: Backend, change: Callable[[Callable[..., None]], Callable[..., None]]) -> None:
        super().__init__(wrapped)
        self._change = change

        def changed(op: IndexOp) -> IndexOp:
            return prepared_op(lambda first, *rest, out: change(op.prepare(first, *rest, out=out)))

        ops = wrapped.index_ops
        to_ragged = ops.compute_global_topk_ragged_indices_and_indptr
        self.index_ops = evolve(
            ops,
            compute_global_topk_indices_and_lens=changed(ops.compute_global_topk_indices_and_lens),
            build_ragged_indices_from_dense=changed(ops.build_ragged_indices_from_dense),
            compute_global_topk_ragged_indices_and_indptr=None if to_ragged is None else changed(to_ragged),
        )

    def prepare(self, phase: Phase, call: AttentionCall) -> Run:
        """See `Backend`."""
        return self._change(self.wrapped.prepare(phase, call))

    def prepare_entries(self, call: AttentionCall, entries: EntryIndices) -> Run | None:
        """See `Backend`."""
        run = self.wrapped.prepare_entries(call, entries)
        return None if run is None else self._change(run)

"""What the road from a bound layer to its backend costs the host, at one decode token."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import cast

import torch
from attrs import evolve, field, frozen

from dsv4attn.bench.measure import seconds
from dsv4attn.bench.problem import Problem
from dsv4attn.core.context import set_forward_context
from dsv4attn.core.contract import Backend
from dsv4attn.core.layer import DeepseekV4MLAAttention

__all__ = ["Overhead", "overhead"]


@frozen
class Overhead:
    """Seconds of single calls, taken in turn.

    direct: the backend's own steps on arguments made before. plain: `forward_mqa` with the backend in hand. bound: the
    layer's op, which finds backend and metadata by itself. idle: the same op over steps that do nothing: what is left
    is core's time on the host. Each call follows one that computes, so on a CPU core's code is out of its caches.
    """

    layer: str
    direct_s: Sequence[float] = field(repr=False)
    plain_s: Sequence[float] = field(repr=False)
    bound_s: Sequence[float] = field(repr=False)
    idle_s: Sequence[float] = field(repr=False)

    def us(self, name: str) -> float:
        """Microseconds of one of the four: a tenth of its calls took less. What takes more is disturbed by others."""
        return 1e6 * float(statistics.quantiles(getattr(self, f"{name}_s"), n=10, method="inclusive")[0])

    def percent(self, name: str) -> float:
        """What a road takes more than `direct`, in percent."""
        return 100 * (self.us(name) / self.us("direct") - 1)

    def as_json(self) -> dict[str, object]:
        """Plain values."""
        times = {f"{name}_us": self.us(name) for name in ("direct", "plain", "bound", "idle")}
        return {"layer": self.layer, **times, **{f"{name}_percent": self.percent(name) for name in ("plain", "bound")}}


def overhead(problem: Problem, *, rounds: int = 200) -> Overhead:
    """Measure a problem of one decode token."""
    bound, idle = _bound(problem, problem.backend), _bound(problem, _instead(problem.backend, _nothing))
    kv, positions = problem.q[:, 0], torch.zeros(1, dtype=torch.int64, device=problem.q.device)

    def through(layer: DeepseekV4MLAAttention) -> Callable[[], None]:
        return lambda: layer.forward_mqa(problem.q, kv, positions, problem.out)

    metadata = {bound.prefix: problem.metadata.compressed, bound.swa_prefix: problem.metadata.swa}
    times: tuple[list[float], ...] = ([], [], [], [])
    with torch.inference_mode(), set_forward_context(metadata):
        direct = _own_steps(problem)
        roads = direct, problem.run, through(bound), through(idle)
        # nobody waits for an idle call: it leaves an accelerator nothing to do
        devices = *[problem.q.device] * 3, torch.device("cpu")
        for counted in range(-rounds // 4, rounds):
            for measured, timed, device in zip(times, roads, devices, strict=True):
                took = seconds(timed, device)
                if counted >= 0:
                    measured.append(took)
            direct()  # the first call of the next round, too, shall follow one that computes
    return Overhead(problem.layer.kind.value, *times)


def _bound(problem: Problem, backend: Backend) -> DeepseekV4MLAAttention:
    layer = DeepseekV4MLAAttention(
        "layer",
        problem.layer,
        problem.limits,
        backend,
        attn_sink=problem.attn_sink,
        cos_sin_cache=problem.q.new_zeros(1, problem.layer.rope_dim, dtype=torch.float32),
        topk_indices_buffer=problem.topk_indices,
        workspace=problem.workspace,
    )
    layer.bind_kv_cache(problem.caches.swa, problem.caches.compressed)
    return layer


def _own_steps(problem: Problem) -> Callable[[], None]:
    """What core asks of the backend for this problem, with the very arguments, and nothing else."""
    asked: list[Callable[[], None]] = []

    def note(step: Callable[..., None], *arguments: object, **out: object) -> None:
        asked.append(partial(step, *arguments, **out))

    evolve(problem, backend=_instead(problem.backend, note)).run()

    def run() -> None:
        for step in asked:
            step()

    return run


def _nothing(*_: object, **__: object) -> None:
    """A step that does nothing."""


def _instead(backend: Backend, act: Callable[..., None]) -> Backend:
    """A backend that wants what another wants, but gives each step and its arguments to `act`."""
    names = "compute_global_topk_indices_and_lens", "build_ragged_indices_from_dense"
    steps = SimpleNamespace(**{name: partial(act, getattr(backend.steps, name)) for name in names})
    same = {name: getattr(backend, name) for name in ("name", "forms", "scratch")}
    return cast("Backend", SimpleNamespace(**same, steps=steps, decode=partial(act, backend.decode)))

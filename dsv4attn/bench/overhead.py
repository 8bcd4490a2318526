"""What the road from a bound layer to its backend costs the host, at one decode token."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch
from attrs import evolve, field, frozen

from dsv4attn.bench.measure import seconds
from dsv4attn.bench.problem import Problem
from dsv4attn.core.context import set_forward_context
from dsv4attn.core.contract import AttentionCall, DenseIndices, PagedKeys
from dsv4attn.core.layer import DeepseekV4MLAAttention

__all__ = ["Overhead", "overhead"]


@frozen
class Overhead:
    """Seconds of single calls, taken in turn.

    direct: the backend's own steps on arguments made before. plain: `forward_mqa` with the backend in hand. bound: the
    layer's op, which finds backend and metadata by itself.
    """

    layer: str
    direct_s: Sequence[float] = field(repr=False)
    plain_s: Sequence[float] = field(repr=False)
    bound_s: Sequence[float] = field(repr=False)

    def us(self, name: str) -> float:
        """Median of one of the three, in microseconds."""
        return 1e6 * float(statistics.median(getattr(self, f"{name}_s")))

    def as_json(self) -> dict[str, object]:
        """Plain values."""
        return {"layer": self.layer, **{f"{name}_us": self.us(name) for name in ("direct", "plain", "bound")}}


def overhead(problem: Problem, *, rounds: int = 200) -> Overhead:
    """Measure a problem of one decode token."""
    bound = _bound(problem)
    swa, compressed = problem.metadata.swa, problem.metadata.compressed
    window = PagedKeys(problem.caches.swa, DenseIndices(swa.decode_swa_indices[:, 0], swa.decode_swa_lens))
    call = AttentionCall(problem.layer, problem.q, (window,), problem.attn_sink, problem.out, None)
    topk, slots = problem.topk_indices, None
    if compressed is not None and problem.caches.compressed is not None:
        table, lens = compressed.c128a_global_decode_topk_indices, compressed.c128a_decode_topk_lens
        if table is not None and lens is not None:
            slots = DenseIndices(table[:, 0], lens)
        elif topk is not None:
            slots = DenseIndices(torch.empty_like(topk), torch.empty_like(topk[:, 0]))
        assert slots is not None
        call = evolve(call, keys=(window, PagedKeys(problem.caches.compressed, slots)))

    def direct() -> None:
        if topk is not None and compressed is not None and slots is not None:
            problem.backend.steps.compute_global_topk_indices_and_lens(
                topk,
                compressed.compressed_lens,
                compressed.req_id_per_token,
                compressed.block_table,
                compressed.records_per_block,
                out=(slots.indices, slots.lens),
            )
        problem.backend.decode(call)

    kv, positions = problem.q[:, 0], torch.zeros(1, dtype=torch.int64, device=problem.q.device)
    calls = direct, problem.run, lambda: bound.forward_mqa(problem.q, kv, positions, problem.out)
    times: tuple[list[float], ...] = ([], [], [])
    with torch.inference_mode(), set_forward_context({bound.prefix: compressed, bound.swa_prefix: swa}):
        for counted in range(-rounds // 4, rounds):
            for measured, timed in zip(times, calls, strict=True):
                took = seconds(timed, problem.q.device)
                if counted >= 0:
                    measured.append(took)
    return Overhead(problem.layer.kind.value, *times)


def _bound(problem: Problem) -> DeepseekV4MLAAttention:
    layer = DeepseekV4MLAAttention(
        "layer",
        problem.layer,
        problem.limits,
        problem.backend,
        attn_sink=problem.attn_sink,
        cos_sin_cache=problem.q.new_zeros(1, problem.layer.rope_dim, dtype=torch.float32),
        topk_indices_buffer=problem.topk_indices,
        workspace=problem.workspace,
    )
    layer.bind_kv_cache(problem.caches.swa, problem.caches.compressed)
    return layer

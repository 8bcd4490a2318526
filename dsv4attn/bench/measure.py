"""Time a step beside the matrix products it cannot avoid."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch
from attrs import asdict, field, frozen

from dsv4attn.bench.problem import Problem

__all__ = ["Measurement", "measure", "seconds"]

_TILE = 16


@frozen
class Measurement:
    """Seconds of several rounds; in each round the step and its products ran one right after the other."""

    layer: str
    phase: str
    context: int
    """Tokens before this step, of each request."""
    tokens: int
    keys_per_row: float
    flops: int
    step_s: Sequence[float] = field(repr=False)
    products_s: Sequence[float] = field(repr=False)

    @property
    def step_ms(self) -> float:
        """Median time of the step."""
        return 1e3 * statistics.median(self.step_s)

    @property
    def products_ms(self) -> float:
        """Median time of its matrix products."""
        return 1e3 * statistics.median(self.products_s)

    @property
    def ratio(self) -> float:
        """Median over rounds of step time by product time; 1 would be nothing but the products."""
        return statistics.median(a / b for a, b in zip(self.step_s, self.products_s, strict=True))

    @property
    def gflops(self) -> float:
        """Rate of the step, counting only the products."""
        return self.flops / self.step_ms / 1e6

    def as_json(self) -> dict[str, object]:
        """Plain values."""
        derived = {k: getattr(self, k) for k in ("step_ms", "products_ms", "ratio", "gflops")}
        return {**asdict(self), **derived}


def measure(problem: Problem, *, rounds: int = 5) -> Measurement:
    """Time `problem.run()` and its products in turn, after one round that is not counted."""
    products = _products(problem)
    step_s, products_s = [], []
    with torch.inference_mode():
        for counted in range(rounds + 1):
            times = seconds(problem.run, problem.q.device), seconds(products, problem.q.device)
            if counted:
                step_s.append(times[0])
                products_s.append(times[1])
    swa = problem.metadata.swa
    phase = "decode" if swa.num_decodes else "prefill"
    context, tokens = swa.max_seq_len - swa.max_query_len, swa.num_actual_tokens
    keys = float(problem.keys_per_row.float().mean())
    kind = problem.layer.kind.value
    return Measurement(kind, phase, context, tokens, keys, problem.flops, step_s, products_s)


def _products(problem: Problem) -> Callable[[], None]:
    """Q . k and p . v of every row over as many keys as it has, in fp32, operands at hand and results written in place.

    Rows come in tiles of equal key counts (their mean), the shape in which this machine multiplies fastest.
    """
    layer, device = problem.layer, problem.q.device
    counts = [max(round(float(part.float().mean())), 1) for part in problem.keys_per_row.split(_TILE)]
    rows = min(_TILE, problem.keys_per_row.shape[0])
    q = torch.randn(rows, layer.num_heads, layer.head_dim, device=device)
    k = torch.randn(rows, max(counts), layer.head_dim, device=device)
    p = torch.empty(rows, layer.num_heads, max(counts), device=device)
    o = torch.empty_like(q)

    def run() -> None:
        for count in counts:
            torch.bmm(q, k[:, :count].mT, out=p[..., :count])
            torch.bmm(p[..., :count], k[:, :count], out=o)

    return run


def seconds(call: Callable[[], None], device: torch.device) -> float:
    """Seconds of one call, on an accelerator until the device is idle."""
    module = None if device.type == "cpu" else getattr(torch, device.type)
    if module is not None:
        module.synchronize()
    start = time.perf_counter()
    call()
    if module is not None:
        module.synchronize()
    return time.perf_counter() - start

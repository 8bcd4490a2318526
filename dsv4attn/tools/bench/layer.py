"""Times of whole layers from hidden states to hidden states, and the price of deterministic ones.

A layer of each kind of DeepSeek-V4-Flash, with random weights of its sizes, decodes a token of some sequences, and
takes a part of a prompt. Caches hold zeros: times do not depend on what they hold. Results are not judged here: tests
and the conformance kit do that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from attrs import asdict, evolve, frozen

from dsv4attn.core.attention import DeepseekV4Attention
from dsv4attn.core.cache_manager import CacheManager
from dsv4attn.core.context import set_forward_context
from dsv4attn.core.contract import Backend, complete
from dsv4attn.core.geometry import LayerKind, ModelGeometry
from dsv4attn.core.layer_weights import AttentionWeights, weight_shapes
from dsv4attn.core.layout import KVCacheLayout
from dsv4attn.core.limits import Limits
from dsv4attn.core.workspace import WorkspaceManager
from dsv4attn.tools.bench.clock import Clock

__all__ = ["LayerCase", "LayerTime", "layer_cases", "layer_time"]


@frozen
class LayerCase:
    """A step of one layer.

    kind: kind of the layer.
    requests: sequences of the step.
    tokens: tokens of each.
    context: tokens of each before the step.
    """

    kind: LayerKind
    requests: int
    tokens: int
    context: int

    @property
    def name(self) -> str:
        """Name of the case."""
        sequences = f"{self.requests:,} sequence{'' if self.requests == 1 else 's'}"
        new = f"{self.tokens:,} new token{'' if self.tokens == 1 else 's'}{' each' if self.requests > 1 else ''}"
        return f"layer {self.kind.value}, {sequences}, {new}, {self.context:,} in the cache"


@frozen
class LayerTime:
    """Seconds of a layer: median of the rounds.

    layer: kind of the layer.
    case: name of the case.
    plain_s: everyday.
    deterministic_s: with bits that depend on nothing but a token's own history; None if the backend cannot.
    """

    layer: str
    case: str
    plain_s: float
    deterministic_s: float | None

    def __str__(self) -> str:
        """One line."""
        price = ""
        if self.deterministic_s is not None:
            ratio = self.deterministic_s / self.plain_s
            price = f", deterministic {1e3 * self.deterministic_s:.3g} ms ({ratio:.2f} times as long)"
        return f"{self.case}: {1e3 * self.plain_s:.3g} ms{price}"

    def as_json(self) -> dict[str, object]:
        """Plain values."""
        return asdict(self)


def layer_cases(*, small: bool) -> list[LayerCase]:
    """A decode and a part of a prompt on each kind of layer. small: for a CPU."""
    shapes = ((1, 1, 256), (1, 32, 256)) if small else ((64, 1, 8192), (1, 2048, 8192))
    return [LayerCase(kind, *shape) for kind in LayerKind for shape in shapes]


def layer_time(case: LayerCase, plain: Backend, deterministic: Backend | None, clock: Clock, rounds: int) -> LayerTime:
    """Measure a case on both backends in turn."""
    backends = [plain] if deterministic is None else [plain, deterministic]
    with torch.inference_mode():
        spreads = clock.times([_call(case, backend, clock.device) for backend in backends], rounds)
    times = [spread.median for spread in spreads]
    return LayerTime(case.kind.value, case.name, times[0], times[1] if len(times) > 1 else None)


def _call(case: LayerCase, backend: Backend, device: torch.device) -> Callable[[], None]:
    """The step, ready to be run again and again."""
    flash = ModelGeometry.preset("deepseek-v4-flash")
    index = next(i for i, (kind, _) in enumerate(flash.layers) if kind is case.kind)
    geometry = evolve(flash, layers=(flash.layers[index],))
    longest = case.context + case.tokens
    exact = complete(backend).deterministic
    limits = Limits(case.requests, case.requests * case.tokens, longest, single_phase=exact)
    layout = KVCacheLayout.fp8_ds_mla()
    manager = CacheManager(geometry, limits, layout, device=device, backend=backend, keep_windows=True)
    given = _weights(geometry, torch.float32 if device.type == "cpu" else torch.bfloat16, device)
    weights = AttentionWeights.from_dict(given, geometry, geometry.layer(0))
    layer = DeepseekV4Attention("layer", geometry, 0, limits, backend, weights, workspace=WorkspaceManager(device))
    layer.bind_kv_cache(manager.caches[0])
    sequences = [manager.new() for _ in range(case.requests)]
    before = [(one, case.context) for one in sequences]
    manager.reserve(before)
    manager.advance(before)
    requests = [(one, case.tokens) for one in sequences]
    metadata, positions = manager.metadata(manager.batch(requests)), manager.positions(requests)
    hidden = torch.randn(positions.shape[0], geometry.hidden_size, device=device).to(given["wq_a"].dtype)

    def run() -> None:
        with set_forward_context(metadata):
            layer(hidden, positions)

    return run


def _weights(geometry: ModelGeometry, dtype: torch.dtype, device: torch.device) -> Mapping[str, torch.Tensor]:
    shapes = weight_shapes(geometry, geometry.layer(0))
    return {
        name: torch.randn(shape, device=device).mul_(shape[-1] ** -0.5).to(dtype if len(shape) == 2 else torch.float32)
        for name, shape in shapes.items()
    }

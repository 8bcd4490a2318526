"""Steps in which a room launches all that it has, and the bounds they stay within."""

from __future__ import annotations

from dsv4attn.core.bounds import Bounds
from dsv4attn.core.geometry import LayerKind
from dsv4attn.testing.scenario import Scenario
from dsv4attn.testing.world import layouts, tiny_geometry
from tests.backends._triton.caches import DEVICE

__all__ = ["bounds_of", "problems"]


def problems() -> list[Scenario]:
    """Steps of every kind, with decode and prefill, in several dims and types."""
    geometry = tiny_geometry(num_heads=3, head_dim=32, rope_dim=8, window=8, topk=5, ratios=(4, 16))
    found = [*layouts(geometry, 8).values()]
    return [
        Scenario(
            kind=kind,
            requests=[(20, 1), (3, 1), (40, 7), (0, 2)],
            geometry=geometry,
            layout=found[i % len(found)],
            q_dtype=found[i % len(found)].row_dtype,
            sinks=("random", None)[i % 3 == 0],
            page_padding=(0, 16, 2)[i % 3],
            device=DEVICE.type,
            seed=i,
        )
        for i, kind in enumerate([*LayerKind] * 2)
    ]


def bounds_of(scenario: Scenario) -> Bounds:
    """Bounds that a step stays within."""
    return Bounds.of(
        scenario.geometry, scenario.limits, swa=scenario.layout, q_dtype=scenario.q_dtype, sink=None, aligned=False
    )

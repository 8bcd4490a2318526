"""Steps in which a backend launches all its kernels, the limits of these steps, and backends that start quickly."""

from __future__ import annotations

from typing import Any

from attrs import evolve
from torch import Tensor

from dsv4attn.backends._triton.backend import TritonBackend
from dsv4attn.backends.reference.launch import ReferenceBackend
from dsv4attn.core.cache.layout import PagedKVCache
from dsv4attn.core.contract.backend import AttentionCall, Phase
from dsv4attn.core.contract.warmup import WarmupSpec
from dsv4attn.core.memory.workspace import WorkspaceManager, simultaneous_bytes
from dsv4attn.core.model.geometry import LayerKind
from dsv4attn.testing.kit.factories import layouts, tiny_geometry
from dsv4attn.testing.kit.random_step import StepFixture
from tests.backends._triton.attention.attention_trials import Trial
from tests.backends._triton.cache.caches import DEVICE

MANY = 16
"""Keys; more at once are history, since no step of the kit writes that many."""


class QuickHistory(TritonBackend):
    """A backend, which stands after it among the bases, but for keys written before a step."""

    def quantize_and_insert_k_cache(self, k: Tensor, cache: PagedKVCache, slot_mapping: Tensor) -> None:
        who: Any = ReferenceBackend() if k.shape[0] > MANY else super()
        who.quantize_and_insert_k_cache(k, cache, slot_mapping)

    def qnorm_rope_kv_insert(
        self,
        q: Tensor,
        kv: Tensor,
        cache: PagedKVCache,
        slot_mapping: Tensor,
        positions: Tensor,
        cos_sin_cache: Tensor,
        eps: float | None,
    ) -> None:
        who: Any = ReferenceBackend() if kv.shape[0] > MANY else super()
        who.qnorm_rope_kv_insert(q, kv, cache, slot_mapping, positions, cos_sin_cache, eps)


def problems() -> list[StepFixture]:
    """Steps of every kind, with decode and prefill, in several dims and types."""
    geometry = tiny_geometry(num_heads=3, head_dim=32, rope_dim=8, window=8, topk=5, ratios=(4, 16))
    all_layouts = [*layouts(geometry, 8).values()]
    return [
        StepFixture(
            kind=kind,
            requests=[(20, 1), (3, 1), (40, 7), (0, 2)],
            geometry=geometry,
            layout=all_layouts[i % len(all_layouts)],
            q_dtype=all_layouts[i % len(all_layouts)].row_dtype,
            sinks=("random", None)[i % 3 == 0],
            page_padding=(0, 16, 2)[i % 3],
            device=DEVICE.type,
            seed=i,
        )
        for i, kind in enumerate([*LayerKind] * 2)
    ]


def bounds_of(scenario: StepFixture) -> WarmupSpec:
    """WarmupSpec that a step stays within."""
    return WarmupSpec.of(
        scenario.geometry, scenario.limits, swa=scenario.layout, q_dtype=scenario.q_dtype, sink=None, aligned=False
    )


def planned(backend: TritonBackend, trial: Trial, phase: Phase = Phase.DECODE) -> AttentionCall:
    """A trial's call with the scratch that the backend asks for, which holds what may mislead."""
    call, _ = trial.call()
    width = sum(trial.widths[: len(trial.layouts)])
    specs = list(backend.scratch(phase, trial.layer, trial.tokens, width))
    assert simultaneous_bytes(specs) <= backend.scratch_bound(phase, trial.layer, trial.tokens, width)
    scratch = WorkspaceManager(call.q.device).get_simultaneous(*specs)
    for view in scratch:
        # NaN; but the sm90 backend's table of rows that are split may have lines of an earlier call
        view.fill_(float("nan") if view.dtype.is_floating_point else 2)
    return evolve(call, scratch=scratch)

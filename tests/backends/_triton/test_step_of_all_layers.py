"""A step of all layers of a model: shared parts are made once and captured once, and no bit differs."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch
from attrs import evolve
from torch import Tensor

from dsv4attn.backends._triton.backend import TritonBackend
from dsv4attn.backends._triton.interpreted import INTERPRETED
from dsv4attn.core.attention.mla_attention import DeepseekV4MLAAttention
from dsv4attn.core.contract.device import DeviceFacts
from dsv4attn.core.contract.limits import Limits
from dsv4attn.core.memory.plan import plan_workspace
from dsv4attn.core.memory.workspace import WorkspaceManager, WorkspacePlan
from dsv4attn.core.metadata.forward_context import set_forward_context
from dsv4attn.core.model.geometry import LayerKind, ModelGeometry
from dsv4attn.core.model.rope import cos_sin_cache
from dsv4attn.testing.kit.factories import tiny_geometry
from tests.backends._triton.cache.caches import DEVICE
from tests.backends._triton.engine import Engine, Interpreted, Request
from tests.backends.built_in import class_of, triton_backends
from tests.harness import same_bits

BACKENDS: dict[str, type[TritonBackend]] = {name: class_of(name) for name in triton_backends(DeviceFacts.here())}
REQS = 4 if INTERPRETED else 8
LIMITS = Limits(REQS, 16 if INTERPRETED else 64, 100 if INTERPRETED else 4096)


class Model:
    """All layers of a model, each with caches, sinks and results of its own, over the buffers of one engine."""

    def __init__(self, backend: TritonBackend, geometry: ModelGeometry) -> None:
        sizes: dict[str, Any] = {"swa_block": 4, "tokens_of_block": 32} if INTERPRETED else {}
        self.on = on = Engine(backend, geometry, LIMITS, LayerKind.CSA, DEVICE, **sizes)
        self.workspace, plan, self.layers = WorkspaceManager(DEVICE), WorkspacePlan(), []
        for i in range(geometry.num_layers):
            layer_geometry = geometry.layer(i)
            layer = DeepseekV4MLAAttention(
                f"model.layers.{i}.attn",
                layer_geometry,
                LIMITS,
                backend,
                attn_sink=torch.linspace(-2, 0.1 * i, layer_geometry.num_heads, device=DEVICE),
                cos_sin_cache=cos_sin_cache(layer_geometry.rope, LIMITS.max_model_len, DEVICE),
                topk_indices_buffer=on.topk if layer_geometry.kind is LayerKind.CSA else None,
                workspace=self.workspace,
            )
            records, compressed = on.tokens_of_block // layer_geometry.compress_ratio, None
            if layer_geometry.kind is not LayerKind.SWA:
                compressed = on._cache(REQS * on.pages[1], records)
            layer.bind_kv_cache(on._cache(REQS * on.pages[0], on.swa_block), compressed)
            self.layers.append(layer)
            plan = plan.union(plan_workspace(layer_geometry, LIMITS, backend, on.layout))
        self.workspace.reserve(plan)
        self.workspace.lock()
        shape = (geometry.num_layers, *on.out.shape)
        self.q, self.outs = (torch.zeros(shape, dtype=on.q_dtype, device=DEVICE) for _ in range(2))

    def metadata(self, requests: list[Request], rng: Random) -> dict[str, Any]:
        """Describe a step, with padding up to the most requests, in the buffers that all steps have in common."""
        batch = self.on.load(requests, rng, reqs=REQS)
        swa = self.on.builder.build(batch)
        kinds = {layer.geometry.kind for layer in self.layers} - {LayerKind.SWA}
        parts = {kind: self.on.builder.build_compressed(batch, swa, kind, full_width=True) for kind in kinds}
        by_prefix: dict[str, Any] = {layer.swa_prefix: swa for layer in self.layers}
        return by_prefix | {layer.prefix: parts.get(layer.geometry.kind) for layer in self.layers}

    def run(self, metadata: dict[str, Any]) -> Tensor:
        """Attend, layer after layer, each with queries that are the last one's results; all results [L, T, H, D]."""
        with set_forward_context(metadata):
            for i in range(len(self.layers)):
                self.layer(i)
        return self.outs[:, :REQS]

    def layer(self, i: int) -> None:
        layer, q, source = self.layers[i], self.q[i, :REQS], self.outs[i - 1, :REQS] if i else self.on.q[:REQS]
        kv, positions = self.on.kv[:REQS], self.on.positions[:REQS]
        torch.add(self.on.q[:REQS], source, out=q)
        layer.fused_qnorm_rope_kv_insert(q, kv, positions)
        layer.forward_mqa(q, kv, positions, self.outs[i, :REQS])


def some_requests(rng: Random) -> list[Request]:
    longest = LIMITS.max_model_len - 1
    return [(rng.choice([0, 127, longest, rng.randint(0, longest)]) % longest, 1) for _ in range(rng.randint(0, REQS))]


@pytest.mark.parametrize("name", BACKENDS)
def test_layers_that_share_what_is_made_of_a_step_give_what_each_gives_alone(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    geometry = tiny_geometry(ratios=(2, 4)) if INTERPRETED else ModelGeometry.preset("flash")
    if INTERPRETED:
        monkeypatch.setattr(BACKENDS[name], "tunings", Interpreted.tunings)
        geometry = evolve(geometry, layers=(*geometry.layers, *geometry.layers[1:]))
    model, rng = Model(BACKENDS[name](), geometry), Random(1)
    for _ in range(2 if INTERPRETED else 3):
        requests, seed = some_requests(rng), rng.randint(0, 99)
        model.outs.fill_(torch.nan)
        together = model.run(model.metadata(requests, Random(seed))).clone()
        for i, layer in enumerate(model.layers):
            alone = WorkspaceManager(DEVICE)
            monkeypatch.setattr(layer, "workspace", alone)
            with set_forward_context(model.metadata(requests, Random(seed))):
                model.layer(i)
            monkeypatch.setattr(layer, "workspace", model.workspace)

            assert same_bits(model.outs[i, :REQS], together[i]), i
        assert not together[:, len(requests) :].any()
        assert together[:, : len(requests)].isfinite().all()


@pytest.mark.device
@pytest.mark.skipif(INTERPRETED or not torch.cuda.is_available(), reason="needs an accelerator with graphs")
@pytest.mark.parametrize("name", BACKENDS)
def test_g10_all_43_layers_in_one_graph_give_for_100_steps_what_eager_gives(name: str) -> None:
    model, rng = Model(BACKENDS[name](), ModelGeometry.preset("flash")), Random(2)
    assert len(model.layers) == 43
    padding = model.metadata([], rng)
    model.run(padding)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        model.run(padding)

    for step in range(100):
        requests = some_requests(rng)
        metadata = model.metadata(requests, rng)
        model.outs.fill_(torch.nan)
        graph.replay()
        replayed = model.outs[:, :REQS].clone()
        model.outs.fill_(torch.nan)
        eager = model.run(metadata)

        assert same_bits(replayed, eager), step
        assert replayed.isfinite().all(), step
        assert bool(requests) == bool(replayed.any())
        assert not replayed[:, len(requests) :].any()

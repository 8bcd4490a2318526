"""Layers of ratio 1 have as many entries as tokens. Backends whose prefill takes pages do not gather these entries."""

from __future__ import annotations

from functools import partial
from typing import Any

import attrs
import pytest

from dsv4attn.core.cache.layout import KVCacheLayout
from dsv4attn.core.contract.backend import Backend, Capabilities, KeyForm
from dsv4attn.core.contract.index_ops import IndexOps
from dsv4attn.core.contract.limits import Limits
from dsv4attn.core.memory.plan import plan_workspace, prefill_bounds
from dsv4attn.core.model.geometry import ModelGeometry
from dsv4attn.selection import load_backend
from tests.backends.built_in import forms

V41 = ModelGeometry.preset("deepseek-v4.1-flash")
ENTRIES = next(
    layer for layer in map(V41.layer, range(V41.num_layers)) if layer.compress_ratio == 1 and layer.has_entries
)


class Gathers(Backend):
    """A backend whose prefill takes rows alone."""

    name = "gathers"
    capabilities = Capabilities()

    def scratch_bound(self, *_: object) -> int:
        return 0

    def transient_bytes(self, *_: object) -> int:
        return 0

    index_ops = IndexOps()


BACKENDS: dict[str, Any] = {**forms(), "reference": partial(load_backend, "reference"), "gathers": Gathers}


@pytest.mark.parametrize("name", BACKENDS)
def test_memory_of_prefill_does_not_grow_with_the_context(name: str) -> None:
    backend, layout = BACKENDS[name](), KVCacheLayout.v41_fp8()
    short, long = (Limits(8, 2048, tokens) for tokens in (2**16, 2**20))
    grown = [plan_workspace(ENTRIES, limits, backend, layout).arenas["prefill"] for limits in (short, long)]
    rows = [prefill_bounds(ENTRIES, limits, backend, layout).rows for limits in (short, long)]

    if name == "gathers":
        assert grown[1] - grown[0] >= (2**20 - 2**16) * 1024
        assert 0 < rows[0] < rows[1]
        return
    assert rows == [0, 0]
    assert grown[0] == grown[1]


@pytest.mark.parametrize("name", [name for name in BACKENDS if name not in ("gathers", "reference")])
def test_layers_of_other_ratios_are_gathered_as_before(name: str) -> None:
    backend, limits = BACKENDS[name](), Limits(8, 2048, 2**16)
    layer = attrs.evolve(ENTRIES, compress_ratio=2)

    gathers = backend.capabilities.prefill_keys is KeyForm.GATHERED
    assert (prefill_bounds(layer, limits, backend, KVCacheLayout.v41_fp8()).rows > 0) == gathers

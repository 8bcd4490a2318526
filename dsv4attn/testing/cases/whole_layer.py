"""Cases of whole layers: entries that are recorded and taken, and the bits of a token in whatever way it is run."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from attrs import evolve

from dsv4attn.core.model.config import v41_layers
from dsv4attn.core.model.cross_layer_sharing import LayerSharing
from dsv4attn.core.model.geometry import LayerKind, ModelGeometry
from dsv4attn.testing.case import Area, Case
from dsv4attn.testing.checks.whole_layer import (
    WholeLayers,
    records_and_takes_entries,
    same_bits_in_any_way,
    same_bits_in_graphs,
)
from dsv4attn.testing.kit.factories import HEADS, index_layout, layout

_layer = partial(Case, Area.LAYER)
SIZES: dict[str, Any] = {
    "num_heads": HEADS,
    "o_groups": 2,
    "hidden_size": 256,
    "q_lora_rank": 64,
    "o_lora_rank": 64,
    "index_n_heads": 8,
    "index_topk": 16,
}
"""Sizes around heads of the real dims."""
RATIOS = {LayerKind.SWA: 1, LayerKind.CSA: 4, LayerKind.HCA: 128}


def v4_layers(*kinds: LayerKind, **fields: Any) -> WholeLayers:  # noqa: ANN401 - fields of a case input
    """Layers of V4."""
    layers = tuple((kind, RATIOS[kind]) for kind in kinds)
    geometry = evolve(ModelGeometry.preset("flash"), layers=layers, **SIZES)
    return WholeLayers(**{"geometry": geometry, "layout": layout("ocp"), "kind": kinds[0], **fields})


def v41_network() -> WholeLayers:
    """Layers of V4.1 in all roles: window-only, ratio 2, ratio 1 with candidates, reuse, and reindex of candidates."""
    sharing = LayerSharing((1, 2), (1, 2, 4), 2, 4, 8)
    layers = v41_layers([0, 2, 1, 1, 1])
    geometry = evolve(ModelGeometry.preset("v4.1-flash"), layers=layers, sharing=sharing, **SIZES)
    records: dict[str, Any] = {
        "layout": layout("v41"),
        "compressed_layout": layout("v41-fp4"),
        "index_layout": index_layout("mxfp4"),
    }
    # entries of ratio 1 are many, so contexts are short; the longest has more entries than the candidate blocks
    requests = ((44, 8), (0, 7), (21, 4))
    return WholeLayers(geometry=geometry, kind=LayerKind.SWA, requests=requests, other_context=200, **records)


def whole_layer_cases() -> Iterator[Case]:
    """All of them."""
    says = "a c4a layer records the entries that it selects; given others, it attends to these and selects nothing"
    inputs = v4_layers(LayerKind.CSA, requests=((86, 4), (70, 4)), other_context=0)
    yield _layer("layer-entries", "T8", says, inputs, records_and_takes_entries)
    depends = "bits of a token depend neither on steps, nor on other requests, padding or the order of pages"
    for kind in LayerKind:
        says = f"a whole {kind.value} layer, if deterministic: {depends}"
        yield _layer(f"any-cut-layer-{kind.value}", "D2", says, v4_layers(kind), same_bits_in_any_way)
    says = f"whole layers of all kinds in fp32, if deterministic: {depends}"
    precise = v4_layers(*LayerKind, layout=layout("fp32"), dtype=torch.float32)
    yield _layer("any-cut-layer-fp32", "D2", says, precise, same_bits_in_any_way)
    says = f"whole layers of V4.1 in all roles, if deterministic: {depends}"
    yield _layer("any-cut-layer-v41", "D2", says, v41_network(), same_bits_in_any_way)
    says = f"a whole c4a layer over two tensor-parallel ranks, if deterministic: {depends}"
    yield _layer("any-cut-layer-ranks", "D2", says, v4_layers(LayerKind.CSA, ranks=2), same_bits_in_any_way)
    for name, model, inputs in (("v4", "V4", v4_layers(*LayerKind)), ("v41", "V4.1", v41_network())):
        says = f"whole layers of {model}, if deterministic: decodes in a captured graph have the bits of other steps"
        yield _layer(f"any-cut-layer-graph-{name}", "D2", says, inputs, same_bits_in_graphs)

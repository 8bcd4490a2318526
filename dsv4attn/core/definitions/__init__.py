"""The steps of the layer around attention in plain torch: their definition, and the default of every backend.

`core.layer_ops` has the protocol. No step reads a tensor value on the host or loops over tokens, so that a graph can
capture it; temporaries are cut into tiles of TILE_BYTES.
"""

from __future__ import annotations

from dsv4attn.core.definitions.indexer import IndexQuery, fp8_mqa_logits, fp8_paged_mqa_logits
from dsv4attn.core.definitions.steps import TorchLayerSteps, complete_steps, layer_step_sources, v41_step_sources
from dsv4attn.core.definitions.tiles import INVARIANT, PLAIN, Arithmetic, batch_invariant_linear, linear

__all__ = [
    "INVARIANT",
    "PLAIN",
    "Arithmetic",
    "IndexQuery",
    "TorchLayerSteps",
    "batch_invariant_linear",
    "complete_steps",
    "fp8_mqa_logits",
    "fp8_paged_mqa_logits",
    "layer_step_sources",
    "linear",
    "v41_step_sources",
]

"""A model so small that a replay takes a blink, and what the tests of the replay share."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

from dsv4attn.backends.reference.launch import ReferenceBackend
from dsv4attn.core.contract.backend import Backend
from dsv4attn.core.model.geometry import LayerKind, ModelGeometry
from dsv4attn.serving.request import Request
from dsv4attn.tools.replay.engine import Replay, ReplayConfig
from dsv4attn.tools.replay.results import Report

CONFIG: dict[str, Any] = {
    "num_attention_heads": 4,
    "head_dim": 32,
    "qk_rope_head_dim": 8,
    "sliding_window": 8,
    "index_topk": 6,
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
    "max_position_embeddings": 4096,
    "hidden_size": 64,
    "o_groups": 2,
    "o_lora_rank": 16,
    "q_lora_rank": 32,
    "index_n_heads": 4,
    "index_head_dim": 32,
    "rope_parameters": {"rope_type": "yarn", "factor": 16, "original_max_position_embeddings": 256},
}
GEOMETRY = ModelGeometry.from_config(CONFIG, name="small")
LENGTHS = ((1, 5), (40, 4), (7, 9), (8, 3), (90, 12), (33, 6))
TOKENS = sum(prompt + output - 1 for prompt, output in LENGTHS)
FORMS = [
    {"decode_indices": decode, "prefill_indices": prefill, "prefill_keys": keys}
    for decode, prefill, keys in product(("dense", "ragged"), ("dense", "ragged"), ("gathered", "paged"))
]
"""Options of every form of the reference."""


def requests_of(*lengths: tuple[int, int], hash_ids: Sequence[Sequence[int]] = ()) -> list[Request]:
    ids = [*hash_ids, *[()] * len(lengths)]
    return [Request(i, float(i), *pair, tuple(ids[i])) for i, pair in enumerate(lengths)]


def replay(
    backend: Backend | None = None,
    requests: Sequence[Request] | None = None,
    *,
    geometry: ModelGeometry = GEOMETRY,
    **config: Any,
) -> Replay:
    settings: dict[str, Any] = {
        "max_num_batched_tokens": 32,
        "block_size": 4,
        "check_rows": 2,
    } | config
    requests = requests_of(*LENGTHS) if requests is None else requests
    return Replay(geometry, backend or ReferenceBackend(), requests, ReplayConfig(**settings))


def run(backend: Backend | None = None, requests: Sequence[Request] | None = None, **config: Any) -> Report:
    return replay(backend, requests, **config).run()


def verdicts(report: Report) -> dict[LayerKind, bool]:
    return {LayerKind(layer.kind): layer.check is None or layer.check.ok for layer in report.layers}

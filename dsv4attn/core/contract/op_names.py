"""The names of all ops that a backend may bring, by the names of their groups. Loads without torch.

`DSV4ATTN_REFERENCE_OPS` takes these names. A test compares them with the fields of the tables of ops.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from dsv4attn.core.model.layer_geometry import LayerGeometry, LayerKind

__all__ = ["ALL", "CANDIDATES", "DELAYED", "GROUPS", "LATENTS", "LAYER_OPS", "expanded", "known_names", "lacking"]

DELAYED = "mhc_pre_delayed", "mhc_fused_post_pre_delayed", "mhc_collapse"
"""Hyper-connections of DeepSeek-V4.1."""
LATENTS = "compress_latents", "norm_rope_store"
"""Compressor of DeepSeek-V4.1."""
CANDIDATES = "select_candidates", "select_topk_of_candidates"
"""Selection in two levels of DeepSeek-V4.1."""
LAYER_OPS: dict[str, tuple[str, ...]] = {
    "compressor": ("save_partial_states", "compress_norm_rope_store", *LATENTS),
    "indexer": ("indexer_q_rope_quant", "fp8_paged_mqa_logits", "fp8_mqa_logits"),
    "selection": ("select_topk", *CANDIDATES),
    "hyper_connections": ("mhc_pre", "mhc_post", "mhc_fused_post_pre", "hc_head", *DELAYED),
}
"""The parts of the layer around attention by the name that selection shows, with their ops."""

_OVER_RANKS = "propose_candidates", "choose_candidates"
"""Selection over ranks: ops that only some backends have."""
GROUPS: Mapping[str, tuple[str, ...]] = {
    "attend": ("decode", "prefill"),
    "insert": ("quantize_and_insert_k_cache", "qnorm_rope_kv_insert"),
    "gather": ("dequantize_and_gather_k_cache", "prepare_rows"),
    "projection": ("inv_rope_o_proj",),
    **LAYER_OPS,
    "norms": ("norm_q_kv",),
    "selection": (*LAYER_OPS["selection"], *_OVER_RANKS),
    "products": ("linear",),
    "index_ops": (
        "compute_global_topk_indices_and_lens",
        "combine_topk_swa_indices",
        "build_ragged_indices_from_dense",
        "compute_global_topk_ragged_indices_and_indptr",
    ),
    "builder_ops": (
        "build_token_maps",
        "build_window_indices",
        "build_gather_lens",
        "build_cached_mask",
        "build_compressed_slot_mapping",
        "build_owned_slot_mapping",
    ),
    "rank_ops": ("pack_partial", "merge_partials"),
}
"""Groups of ops with their ops. `compute_global_topk_indices_and_lens` is an op of the builder too."""
ALL = "all"
"""The group of every op."""


def known_names() -> list[str]:
    """Every name that `expanded` takes: all groups, then all ops."""
    return [ALL, *GROUPS, *(op for ops in GROUPS.values() for op in ops)]


def expanded(names: Iterable[str]) -> tuple[str, ...]:
    """The ops of names of groups and ops, each once, in the order of `GROUPS`. The names are known."""
    asked = set(names)
    return tuple(op for group, ops in GROUPS.items() for op in ops if ALL in asked or group in asked or op in asked)


_OF_ENTRIES = {"save_partial_states", "compress_norm_rope_store", "build_compressed_slot_mapping"} | {
    "build_cached_mask", "build_owned_slot_mapping", "compute_global_topk_indices_and_lens", *GROUPS["rank_ops"],
}  # fmt: skip
"""Ops of layers that have a compressed cache."""
_OF_SELECTION = {*GROUPS["indexer"], "select_topk", *_OVER_RANKS, "compute_global_topk_ragged_indices_and_indptr"}
"""Ops of layers that select entries."""


def _has(layer: LayerGeometry, op: str) -> bool:
    """Whether a layer may run an op. A geometry does not say whether there are hyper-connections: true for these."""
    if op in (*LATENTS, *CANDIDATES):
        return layer.shared_latent
    if op in ("save_partial_states", "compress_norm_rope_store") and layer.shared_latent:
        return False
    return layer.has_entries if op in _OF_ENTRIES else op not in _OF_SELECTION or layer.kind is LayerKind.CSA


def lacking(names: Sequence[str], layers: Sequence[LayerGeometry]) -> list[str]:
    """The names of groups and ops of which no layer has an op."""
    return [name for name in names if not any(_has(layer, op) for op in expanded([name]) for layer in layers)]

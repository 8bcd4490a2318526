"""Refuses fields of a configuration that may change attention and that `config` does not read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from dsv4attn.errors import GeometryError, did_you_mean

__all__ = ["refuse_unread"]

_READ_OF_BOTH = (
    *("model_type", "architectures", "text_config", "hidden_size", "num_hidden_layers", "num_attention_heads"),
    *("head_dim", "qk_rope_head_dim", "partial_rotary_factor", "q_lora_rank", "o_lora_rank", "o_groups"),
    *("sliding_window", "max_position_embeddings", "rms_norm_eps", "hc_mult", "hc_sinkhorn_iters", "hc_eps"),
    *("index_n_heads", "index_head_dim", "index_topk", "compress_ratios", "rope_scaling", "rope_parameters"),
    *("rope_theta", "compress_rope_theta"),
)
_READ_OF_V4 = "layer_types", "compress_rates", "compress_rate_csa", "compress_rate_hca"
_READ_OF_V41 = (
    *("kv_source_layer_ids", "index_source_layer_ids", "candidate_source_layer_id", "candidate_topk_blocks"),
    *("candidate_block_size", "q_head_norm"),
)
_HARMLESS = frozenset(
    {
        # routing of experts
        *("norm_topk_prob", "topk_group", "topk_method"),
        # how a framework runs a model, and what it returns. Dropout is for training.
        *("attention_dropout", "attn_implementation", "output_attentions"),
        # sizes of DeepSeek-V3, which SGLang's classes of V4 and V4.1 inherit with V3's values. Nothing in V4 has them.
        *("kv_lora_rank", "qk_nope_head_dim", "qk_head_dim", "v_head_dim"),
        # what vLLM and SGLang add to a configuration that they have loaded
        *("index_share_for_mtp_iteration", "swa_head_dim", "swa_v_head_dim"),
        # counts layers from which index_topk_freq holds, which has to be 1
        "index_skip_topk_offset",
    }
)
"""Fields whose name speaks of attention, and that do not change it."""
_HARMLESS_PREFIXES = "_", "vision_", "image_", "engram_", "dspark_", "mtp_", "mm_", "moe_", "router_"
"""Private attributes of configuration objects, and parts of a model next to the attention of its layers."""
_OBEYED: Mapping[str, Any] = {
    "attention_bias": False,
    "index_topk_freq": 1,
    "num_key_value_heads": 1,
    "rope_interleave": True,
    "use_index_cache": False,
    "use_sliding_window": True,
}
"""Fields that have one value in DeepSeek-V4 and V4.1, which other models of the same family may set otherwise."""
_OBEYED_OF_V4: Mapping[str, Any] = {
    "q_head_norm": True,
    "hc_pre_from_prev_sublayer": False,
    "kv_source_layer_ids": [],
    "index_source_layer_ids": [],
    "candidate_source_layer_id": -1,
    "candidate_topk_blocks": 0,
    "candidate_block_size": 0,
}
_OBEYED_OF_V41: Mapping[str, Any] = {"hc_pre_from_prev_sublayer": True}
_WORDS = frozenset(
    {
        *("attention", "attentions", "attn", "candidate", "candidates", "compress", "compressed", "compression"),
        *("compressor", "csa", "dsa", "hc", "hca", "heads", "index", "indexer", "key", "keys", "kv", "latent", "mhc"),
        *("mla", "nsa", "position", "positions", "qk", "qkv", "queries", "query", "rope", "rotary", "sink", "sinks"),
        *("sliding", "softmax", "sparse", "swa", "topk", "window", "yarn"),
    }
)
"""Words that the name of a field of attention has."""


def refuse_unread(fields: Mapping[str, Any], name: str, *, v41: bool) -> None:
    """Raise GeometryError for fields that may change attention and that are not read.

    fields: of a Hugging Face configuration, without nesting; null counts as absent. name: of the configuration, for
    errors. v41: whether it is one of DeepSeek-V4.1. A field that is not listed here is refused if its name has a word
    of attention.
    """
    read = {*_READ_OF_BOTH, *(_READ_OF_V41 if v41 else _READ_OF_V4)}
    obeyed = {**_OBEYED, **(_OBEYED_OF_V41 if v41 else _OBEYED_OF_V4), "window_size": fields.get("sliding_window")}
    unread = []
    for key, value in fields.items():
        if value is None or key in read or key in _HARMLESS or key.startswith(_HARMLESS_PREFIXES):
            continue
        if key not in obeyed:
            unread += [key] if _speaks_of_attention(key) else []
        elif (list(value) if isinstance(value, tuple) else value) != obeyed[key]:
            version = "V4.1" if v41 else "V4"
            cure = f"this is not DeepSeek-{version}'s attention; leave the field out if it is a leftover"
            raise GeometryError(f"{name}: field {key!r}: expected {obeyed[key]!r}, got {value!r} -> {cure}")
    if unread:
        got = ", ".join(f"{key}={fields[key]!r}{did_you_mean(key, sorted(read))}" for key in unread)
        cure = "leave out what does not change attention"
        raise GeometryError(f"{name}: fields that may change attention and are not read here: {got} -> {cure}")


def _speaks_of_attention(key: str) -> bool:
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", key).lower()
    listed = re.search(r"head_(dim|size)|^layer_types$|^(local|global|full)_layers|^[qkvo]_", words)
    return listed is not None or not _WORDS.isdisjoint(words.split("_"))

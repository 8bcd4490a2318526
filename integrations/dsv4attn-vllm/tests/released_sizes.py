"""Sizes and formats of the released models of DeepSeek-V4. This module imports nothing of vLLM."""

from __future__ import annotations

from typing import Any

KINDS = {"swa": "sliding_attention", "c4a": "compressed_sparse_attention", "c128a": "heavily_compressed_attention"}
"""Transformers' names of the kinds of layers."""
RELEASED = {"index_n_heads": 64, "index_head_dim": 128, "max_position_embeddings": 65536}
MODELS: dict[str, dict[str, Any]] = {
    "flash": {
        "hidden_size": 4096,
        "num_attention_heads": 64,
        "q_lora_rank": 1024,
        "o_groups": 8,
        "o_lora_rank": 1024,
        "index_topk": 512,
    },
    "pro": {
        "hidden_size": 7168,
        "num_attention_heads": 128,
        "q_lora_rank": 1536,
        "o_groups": 16,
        "o_lora_rank": 1024,
        "index_topk": 1024,
    },
}
FP8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "weight_block_size": [128, 128],
    "activation_scheme": "dynamic",
    "scale_fmt": "ue8m0",
}
"""Linears of the released models."""

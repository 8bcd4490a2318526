"""Steps of vLLM's DeepSeek-V4.1 layers.

Faked, next to what conftest.py says: blocks have the tokens that they have on GPUs, 64 on sm_90 and else 128, because
vLLM sets 16 on a CPU. Each index source has a random selection of its own, because vLLM's indexer needs DeepGEMM.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from dsv4attn_vllm import serving
from dsv4attn_vllm.cuda import V41CUDAAttention
from dsv4attn_vllm.metadata import V41Backend
from engine import BEFORE_0_33, Engine, Request, bytes_of, config_of, generator, world
from torch import Tensor
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from whole import HiddenStates, products_in_fp64

RATIOS = (0, 2, 2, 1, 1, 1)
TEXT: dict[str, Any] = {
    "model_type": "deepseek_v41_text",
    "vocab_size": 256,
    "hidden_size": 256,
    "num_hidden_layers": len(RATIOS),
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 128,
    "o_lora_rank": 64,
    "o_groups": 2,
    "sliding_window": 128,
    # after the layers of the model come those of a draft
    "compress_ratios": [*RATIOS, 0],
    "kv_source_layer_ids": [1, 3],
    "index_source_layer_ids": [1, 3, 5],
    "index_n_heads": 16,
    "index_head_dim": 128,
    "index_topk": 32,
    "rms_norm_eps": 1e-20,
    "max_position_embeddings": 4096,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": {"rope_type": "yarn", "factor": 16, "original_max_position_embeddings": 65536},
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "num_nextn_predict_layers": 1,
    "dspark_block_size": 5,
    "dspark_target_layer_ids": [3, 4, 5],
}
since_0_33 = pytest.mark.skipif(BEFORE_0_33, reason="records of 528 bytes of vLLM 0.32 are refused")


@cache
def model_folder(**changed: Any) -> str:
    """A folder with the configuration of a small model, as a checkpoint has it."""
    folder = tempfile.mkdtemp(prefix="dsv4attn-vllm-")
    top = {"model_type": "deepseek_v41", "architectures": ["DeepseekV41ForCausalLM"], "dtype": "bfloat16"}
    Path(folder, "config.json").write_text(json.dumps({**top, "text_config": {**TEXT, **changed}}))
    return folder


def v41_config(sizes: dict[str, Any] | None = None, **arguments: Any) -> VllmConfig:
    """VLLM's own configuration of that model, with other sizes."""
    config = config_of(model_folder(**(sizes or {})), **arguments)
    [config.cache_config.block_size] = V41Backend.get_supported_kernel_block_sizes()
    return config


def fake_family(monkeypatch: pytest.MonkeyPatch, family: int) -> None:
    """Fake that this is a GPU of a family, such as 90."""
    is_family = classmethod(lambda _, other, *__: other == family)
    monkeypatch.setattr(type(current_platform), "is_device_capability_family", is_family)


class V41Engine(Engine):
    """Layers of V4.1. chosen: the selection [rows, 32] that each layer read in the last step, by prefix."""

    WINDOW_PAGE = 32

    def __init__(self, config: VllmConfig, *args: Any, **options: Any) -> None:
        self.BLOCK = config.cache_config.block_size
        super().__init__(config, *args, **options)

    def select(self, work: Sequence[tuple[Request, int]]) -> None:
        """Leave the selection to the index sources; rows that they do not write have an earlier step's selection."""
        self.topk.copy_(self.stale_selection())
        self.chosen: dict[str, Tensor] = {}

    def score_columns(self, layer: Any) -> int:
        """See `Engine`."""
        return int(layer.head_dim * layer.compress_ratio)

    def seed_of(self, layer: Any) -> int:
        """See `Engine`."""
        return int(layer.layer_id)

    def index(self, layer: Any, work: Sequence[tuple[Request, int]]) -> None:
        """What an index source would write: some visible entries of each token, with -1 among them."""
        row = 0
        for request, count in work:
            for position in range(request.tokens, request.tokens + count):
                seed = generator(position * 1009 + request.name + layer.layer_id)
                picks = torch.randperm((position + 1) // layer.compress_ratio, generator=seed).int()
                selection = torch.full((self.topk.shape[1],), -1, dtype=torch.int32)
                places = torch.randperm(len(selection), generator=seed)[: len(picks)]
                selection[places] = picks[: len(places)]
                self.topk[row] = selection
                row += 1

    def run(self, layer: Any, metadata: Any, work: Any, rows: int, *, attend: bool = True) -> Tensor:
        """Insert, compress and attend on one layer, through the methods that vLLM's layer calls."""
        q, kv, scores = self.inputs(layer, work, rows)
        positions = self.positions[:rows]
        q = layer._fused_qnorm_rope_kv_insert(q, kv, positions, metadata)
        if layer.compressor is not None:
            latent = layer.compressor(scores, positions)
            layer.compressor.insert_cache(latent, positions, layer.rotary_emb)
        if layer.indexer is not None:
            self.index(layer, work)
        out = torch.full_like(q, float("nan"))
        self.queries[layer.prefix], self.chosen[layer.prefix] = q, self.topk.clone()
        if attend:
            layer.forward_mqa(q, kv, positions, out)
        return out

    def entries_of(self, layer: Any) -> Any:
        """See `Engine`. Layers share the cache of the last source before them."""
        if not layer.compress_ratio:
            return None
        return self.layers[max(i for i in TEXT["kv_source_layer_ids"] if i <= layer.layer_id)]

    def selection_of(self, layer: Any) -> Tensor:
        """See `Engine`."""
        return self.chosen[layer.prefix]


class WholeV41Engine(HiddenStates, V41Engine):
    """An engine whose layers run as a whole, through vLLM's own `forward`, compressor and indexer.

    For vLLM's indexer contexts must be so short that it selects all entries, for which it needs no scores.
    """

    def stale_selection(self) -> Tensor:
        """Entries far outside: the indexer writes the rows of all tokens, and a row that it leaves out is seen."""
        return torch.full((self.topk.shape[1],), 10**6, dtype=torch.int32)

    def run(self, layer: Any, metadata: Any, work: Any, rows: int, *, attend: bool = True) -> Tensor:
        """The output [rows, hidden] of a layer. attend: else its keys are written and nothing more, by `forward_kv`."""
        hidden = self.hidden_states(layer, work, rows)
        if attend:
            return layer(self.positions[:rows], hidden)
        layer.forward_kv(self.positions[:rows], hidden)
        return hidden


def short_run(parts: str, **options: Any) -> tuple[list[Tensor], dict[str, Tensor], type]:
    """Outputs of the last step of two requests, caches of bytes by name, and the class of layer 1's compressor.

    The engine is new. A prompt has chunks that break windows of two tokens. parts, options: of `whole_v41_engine`.
    """
    serving._serving.cache_clear()
    torch.manual_seed(0)
    with whole_v41_engine(parts, **options) as engine:
        first, second = engine.request(), engine.request()
        for work in ([(first, 13)], [(first, 1), (second, 5)], [(first, 2), (second, 1)]):
            outs = engine.step(work)
        caches = {name: bytes_of(cache) for name, cache in engine.bound().items() if cache.dtype == torch.uint8}
        return outs, caches, type(engine.layers[1].compressor)


CANDIDATES = {"candidate_source_layer_id": 3, "candidate_topk_blocks": 5, "candidate_block_size": 8}


@contextmanager
def whole_v41_engine(
    parts: str = "auto", sizes: dict[str, Any] | None = None, drafts: int = 0, *, kv_cache_dtype: str = "auto"
) -> Iterator[WholeV41Engine]:
    """A `WholeV41Engine`. Faked: products in fp64 (`products_in_fp64`), and that no stream is being captured.

    parts: the variable that names those on dsv4attn. drafts: tokens that are verified at once.
    """
    blocks = torch.full((256, CANDIDATES["candidate_topk_blocks"]), -1, dtype=torch.int32)
    speculation = {"speculative_config": {"method": "dspark", "num_speculative_tokens": drafts}} if drafts else {}
    config = v41_config(sizes, **speculation)
    config.cache_config.cache_dtype = kv_cache_dtype
    with world(config), products_in_fp64(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        patch.setenv("DSV4ATTN_VLLM_PARTS", parts)
        yield WholeV41Engine(config, V41CUDAAttention, layers=len(RATIOS), candidate_block_buffer=blocks)

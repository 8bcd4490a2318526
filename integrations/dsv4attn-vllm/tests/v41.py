"""Steps of vLLM's DeepSeek-V4.1 layers, and the float64 oracle's word on them.

Faked, beside what conftest.py says: blocks of 128 tokens, as on GPUs, for vLLM sets 16 on a CPU; selections are random,
each index source's its own, for vLLM's indexer needs DeepGEMM.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine import Engine, Request, config_of, generator, world
from torch import Tensor
from vllm.config import VllmConfig
from whole import products_in_fp64

import dsv4attn as ds
from dsv4attn.testing import oracle

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
    # behind the layers of the model those of a draft
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
RECORDS = {584: (64, 8, True), 528: (32, 16, False)}
"""Codes under a scale, bytes of scales, and whether they are behind all codes of a page, by bytes of a record."""
WINDOW_PAGE, BLOCK = 32, 128


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
    config.cache_config.block_size = BLOCK
    return config


class V41Engine(Engine):
    """Layers of V4.1. chosen: the selection [rows, 32] that each layer read in the last step, by prefix."""

    def select(self, work: Sequence[tuple[Request, int]]) -> None:
        """Leave the selection to the index sources; rows that they do not write have an earlier step's selection."""
        self.topk.copy_(self.stale_selection())
        self.chosen: dict[str, Tensor] = {}

    def inputs(self, layer: Any, work: Sequence[tuple[Request, int]], rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """Q [rows, h, 512], kv [rows, 512] bf16 before the insert, and what the compressor gets, [rows, c] fp32."""
        parts = []
        for request, count in work:
            for position in range(request.tokens, request.tokens + count):
                seed = generator(position * 1009 + request.name * 31 + layer.layer_id)
                parts.append(torch.randn(512 * (layer.n_heads + 3), generator=seed, dtype=torch.float32))
        parts += [torch.full((512 * (layer.n_heads + 3),), 3.0, dtype=torch.float32)] * (rows - len(parts))
        q, kv, scores = torch.stack(parts).split([512 * layer.n_heads, 512, 1024], dim=1)
        heads = slice(layer.first_head, layer.first_head + layer.n_local_heads)
        q = q.view(rows, layer.n_heads, 512)[:, heads].bfloat16().contiguous()
        width = 512 * layer.compress_ratio
        return q, kv.bfloat16().contiguous(), scores[:, :width].contiguous()

    def index(self, layer: Any, work: Sequence[tuple[Request, int]]) -> None:
        """What an index source would write: some visible entries of each token, with -1 among them."""
        row = 0
        for request, count in work:
            for position in range(request.tokens, request.tokens + count):
                seed = generator(position * 1009 + request.name + layer.layer_id)
                picks = torch.randperm((position + 1) // layer.compress_ratio, generator=seed).int()
                own = torch.full((self.topk.shape[1],), -1, dtype=torch.int32)
                places = torch.randperm(len(own), generator=seed)[: len(picks)]
                own[places] = picks[: len(places)]
                self.topk[row] = own
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

    def bound(self) -> dict[str, Tensor]:
        """All caches that vLLM bound, by prefix."""
        context = self.config.compilation_config.static_forward_context
        return {name: layer.kv_cache for name, layer in context.items() if layer.kv_cache.numel()}

    def group_of(self, prefix: str) -> int:
        """The number of the group of caches that a layer's cache is in."""
        groups = self.caches.kv_cache_groups
        return next(i for i, group in enumerate(groups) if prefix in group.layer_names)

    def records(self, cache: Tensor, prefix: str, index: int, numbers: Sequence[int]) -> list[np.ndarray]:
        """Records of a request in float64, read from a cache by its block table."""
        page, table, (group, scales, split) = (
            cache.shape[1],
            self.tables[self.group_of(prefix)],
            RECORDS[cache.shape[2]],
        )
        rope = 64 if split else 0
        shape = {"block_size": page, "nope_dim": 512 - rope, "rope_dim": rope, "group_size": group, "fnuz": False}
        found = []
        for number in numbers:
            raw = cache[int(table[index][number // page])].as_strided((page * cache.shape[2],), (1,)).numpy()
            found.append(oracle.read_record(raw, number % page, **shape, scale_bytes=scales, split=split))
        return found

    def of_oracle(self, layer: Any, index: int, position: int, row: int, **rule: Any) -> np.ndarray:
        """One token's attention in float64, from the bytes in the caches. index, row: of its request and of itself.

        rule: of the window, see `oracle.visible_keys`.
        """
        ratio = layer.compress_ratio
        chosen = [entry for entry in self.chosen[layer.prefix][row].tolist() if entry >= 0]
        positions, entries = oracle.visible_keys(position, 128, ratio or None, chosen if ratio else None, **rule)
        swa = layer.swa_cache_layer
        rows = self.records(swa.kv_cache, swa.prefix, index, positions)
        if ratio:
            source = self.layers[max(i for i in TEXT["kv_source_layer_ids"] if i <= layer.layer_id)]
            rows += self.records(source.kv_cache, source.prefix, index, entries)
        q = self.queries[layer.prefix][row].double().numpy()
        return oracle.attend_row(q, np.array(rows), layer.attn_sink.double().numpy(), 512**-0.5)[0]

    def error(self, layer: Any, out: Tensor, index: int, position: int, row: int, **rule: Any) -> float:
        """The largest difference of a row to the oracle's, as a part of its largest value."""
        wanted = self.of_oracle(layer, index, position, row, **rule)
        return float(np.abs(out[row].double().numpy() - wanted).max() / np.abs(wanted).max())

    def of_own_builder(self, layer: Any, before: Sequence[tuple[int, int]], rows: int, pad: int = 0) -> Tensor:
        """The last step of a layer by dsv4attn's own MetadataBuilder. before: tokens in the caches, and new tokens."""
        serving, swa, counts = layer._serving, layer.swa_cache_layer, [count for _, count in before]
        window = self.group_of(swa.prefix)
        entries = self.group_of(layer.compressed_cache_prefix or swa.prefix)
        starts = torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32)
        lens = torch.tensor([tokens + count for tokens, count in before], dtype=torch.int32)
        builder = ds.MetadataBuilder(
            serving.model,
            serving.limits,
            short_prefills=True,
            backend=serving.backend,
            swa_block_size=WINDOW_PAGE,
            compressed_block_tokens=BLOCK,
        )
        batch = ds.Batch(
            num_reqs=len(counts),
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=lens,
            seq_lens_cpu=lens,
            slot_mapping=self.slots[window][: sum(counts)],
            block_table=self.tables[window][: len(counts)],
            compressed_block_table=self.tables[entries][: len(counts)],
        )
        caches = ds.LayerCaches(
            ds.PagedKVCache(swa.kv_cache, serving.swa_layout),
            ds.PagedKVCache(layer._compressed_kv_cache(), serving.compressed_layout) if layer.compress_ratio else None,
        )
        q = self.queries[layer.prefix]
        out, metadata = torch.full_like(q, float("nan")), builder.build_all(batch)[layer._geometry.key]
        addresses = q, caches, metadata, serving.backend, ds.WorkspaceManager(), out
        options = {"attn_sink": layer.attn_sink, "topk_indices": self.chosen[layer.prefix]}
        ds.forward_mqa(*addresses, layer=layer._geometry, limits=serving.limits, **options)
        return out


class WholeV41Engine(V41Engine):
    """An engine whose layers run as a whole, through vLLM's own `forward`, compressor and indexer.

    For vLLM's indexer contexts must be so short that it selects all entries, for which it needs no scores.
    """

    def stale_selection(self) -> Tensor:
        """Entries far outside: the indexer writes the rows of all tokens, and a row that it leaves out is seen."""
        return torch.full((self.topk.shape[1],), 10**6, dtype=torch.int32)

    def hidden_states(self, layer: Any, work: Sequence[tuple[Request, int]], rows: int) -> Tensor:
        """[rows, hidden] bf16, which depend on request, position and layer only; rows of padding are 3."""
        parts = []
        for request, count in work:
            for position in range(request.tokens, request.tokens + count):
                seed = generator(position * 1009 + request.name * 31 + layer.layer_id)
                parts.append(torch.randn(layer.hidden_size, generator=seed, dtype=torch.float32))
        parts += [torch.full((layer.hidden_size,), 3.0, dtype=torch.float32)] * (rows - len(parts))
        return torch.stack(parts).bfloat16()

    def run(self, layer: Any, metadata: Any, work: Any, rows: int, *, attend: bool = True) -> Tensor:
        """The output [rows, hidden] of a layer. attend: else its keys are written and nothing more, by `forward_kv`."""
        hidden = self.hidden_states(layer, work, rows)
        if attend:
            return layer(self.positions[:rows], hidden)
        layer.forward_kv(self.positions[:rows], hidden)
        return hidden


@contextmanager
def whole_v41_engine(
    layer_class: type,
    sizes: dict[str, Any] | None = None,
    drafts: int = 0,
    *,
    kv_cache_dtype: str = "auto",
    **options: Any,
) -> Iterator[WholeV41Engine]:
    """A `WholeV41Engine`. Faked: products in fp64 (`products_in_fp64`), and that no stream is being captured."""
    speculation = {"speculative_config": {"method": "dspark", "num_speculative_tokens": drafts}} if drafts else {}
    config = v41_config(sizes, **speculation)
    config.cache_config.cache_dtype = kv_cache_dtype
    with world(config), products_in_fp64(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        yield WholeV41Engine(config, layer_class, layers=len(RATIOS), **options)


class OwnV41Layers:
    """dsv4attn's own layers with the weights of an engine's, over caches, builder and pages of dsv4attn."""

    def __init__(self, engine: Engine) -> None:
        serving = engine.layers[0]._serving
        self.model, options = serving.model, {"index_layout": serving.index_layout, "backend": serving.backend}
        layouts = serving.swa_layout, serving.compressed_layout
        self.manager = ds.CacheManager(self.model, serving.limits, layouts[0], compressed_layout=layouts[1], **options)
        self.layers, self.sequences = [], {}
        for i, theirs in enumerate(engine.layers):
            weights = ds.AttentionWeights.from_dict(weights_of(theirs), self.model, i)
            space = {"workspace": ds.WorkspaceManager(), "cos_sin_cache": theirs.rotary_emb.cos_sin_cache}
            layer = ds.DeepseekV4Attention(
                theirs.prefix, self.model, i, serving.limits, serving.backend, weights, sources=self.layers, **space
            )
            layer.bind_kv_cache(self.manager.caches[i])
            self.layers.append(layer)

    def step(self, work: Sequence[tuple[Request, int]], hidden: Sequence[Tensor]) -> list[Tensor]:
        """The output of each layer of a step, of requests that are new here or ran in earlier steps."""
        for request, _ in work:
            self.sequences.setdefault(request.name, self.manager.new())
        requests = [(self.sequences[request.name], count) for request, count in work]
        with torch.no_grad(), ds.set_forward_context(self.manager.metadata(self.manager.batch(requests))):
            positions = self.manager.positions(requests)
            outs = [layer(own, positions) for layer, own in zip(self.layers, hidden, strict=True)]
        self.manager.advance(requests)
        return outs


def weights_of(layer: Any) -> dict[str, Tensor]:
    """The weights of a layer of vLLM by the names of DeepSeek's checkpoints."""
    lora, fused = layer.q_lora_rank, layer.fused_wqa_wkv.weight
    found = {name: getattr(layer, name).weight for name in ("q_norm", "wq_b", "kv_norm", "wo_a", "wo_b")}
    found |= {"wq_a": fused[:lora], "wkv": fused[lora:], "attn_sink": layer.attn_sink}
    if layer.compressor is not None:
        names = ("compressor.wkv", "compressor.wgate")[: layer.compress_ratio]
        found |= dict(zip(names, layer.compressor.fused_wkv_wgate.weight.split(512), strict=True))
        found["compressor.norm"] = layer.compressor.norm.weight
    if layer.indexer is not None:
        names = ("wq_b", "weights_proj", *(("wk", "k_norm") if layer.indexer.owns_k else ()))
        found |= {f"indexer.{name}": getattr(layer.indexer, name).weight for name in names}
    return {name: weight.detach() for name, weight in found.items()}

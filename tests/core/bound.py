"""A bound layer of the reference with one fresh prompt, for tests of layers."""

from __future__ import annotations

import torch
from attrs import define
from torch import Tensor

from dsv4attn.core.attention.mla_attention import DeepseekV4MLAAttention
from dsv4attn.core.cache.layout import KVCacheLayout, PagedKVCache
from dsv4attn.core.contract.limits import Limits
from dsv4attn.core.memory.workspace import WorkspaceManager
from dsv4attn.core.metadata.builder import MetadataBuilder
from dsv4attn.core.metadata.forward_context import set_forward_context
from dsv4attn.core.metadata.metadata import Batch, DeepseekSparseSWAMetadata, FlashMLASparseMetadata
from dsv4attn.core.model.geometry import LayerKind, ModelGeometry
from dsv4attn.core.model.rope import cos_sin_cache
from dsv4attn.selection import load_backend

GEOMETRY = ModelGeometry(
    num_heads=4,
    head_dim=32,
    rope_dim=8,
    window=8,
    index_topk=3,
    layers=((LayerKind.SWA, 1), (LayerKind.C4A, 4), (LayerKind.C128A, 16)),
    max_position=512,
    hidden_size=64,
    o_groups=2,
    o_lora_rank=16,
)
LIMITS = Limits(4, 64, 256)
LAYOUT = KVCacheLayout.fp8_ds_mla(24, 8, group_size=8)
TOKENS = 21
METADATA = dict[str, DeepseekSparseSWAMetadata | FlashMLASparseMetadata | None]


@define
class Bound:
    """A layer, one fresh prompt of 21 tokens for it, and its metadata."""

    layer: DeepseekV4MLAAttention
    metadata: METADATA
    q: Tensor
    kv: Tensor
    positions: Tensor

    def run(self) -> Tensor:
        """Insert and attend, as an engine does."""
        q, out = self.q.clone(), torch.empty_like(self.q)
        with set_forward_context(self.metadata):
            self.layer.fused_qnorm_rope_kv_insert(q, self.kv, self.positions)
            self.layer.forward_mqa(q, self.kv, self.positions, out)
        return out


def bound(kind: LayerKind, prefix: str = "model.layers.0.attn", seed: int = 0) -> Bound:
    """A layer of this kind with caches and one prompt."""
    torch.manual_seed(seed)
    geometry = GEOMETRY.layer_of_kind(kind)
    builder = MetadataBuilder(GEOMETRY, LIMITS, swa_block_size=4, compressed_block_tokens=16)
    starts, lens = torch.tensor([0, TOKENS], dtype=torch.int32), torch.tensor([TOKENS], dtype=torch.int32)
    blocks = torch.randperm(8).int()[None]
    positions = torch.arange(TOKENS)
    slots = blocks[0].long()[positions // 4] * 4 + positions % 4
    batch = Batch(
        num_reqs=1,
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=lens,
        seq_lens_cpu=lens,
        slot_mapping=slots,
        block_table=blocks,
        compressed_block_table=torch.tensor([[2, 0]], dtype=torch.int32),
    )
    both = builder.build_for(batch, [kind])[kind]
    layer = DeepseekV4MLAAttention(
        prefix,
        geometry,
        LIMITS,
        load_backend("reference"),
        attn_sink=torch.randn(4),
        cos_sin_cache=cos_sin_cache(geometry.rope, 512),
        topk_indices_buffer=torch.tensor([[0, -1, 2]] * 64, dtype=torch.int32),
        workspace=WorkspaceManager(),
    )
    compressed = None if kind is LayerKind.SWA else PagedKVCache.allocate(LAYOUT, 3, 16 // geometry.compress_ratio)
    if compressed is not None:
        layer.backend.quantize_and_insert_k_cache(torch.randn(12, 32), compressed, torch.arange(compressed.capacity))
    layer.bind_kv_cache(PagedKVCache.allocate(LAYOUT, 8, 4), compressed)
    metadata: METADATA = {layer.swa_prefix: both.swa, layer.prefix: both.compressed}
    q, kv = torch.randn(TOKENS, 4, 32).bfloat16(), torch.randn(TOKENS, 32).bfloat16()
    return Bound(layer, metadata, q, kv, positions)

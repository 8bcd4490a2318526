"""One attention layer over one step of random data, ready to be timed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import frozen
from torch import Tensor

from dsv4attn.core.builder import MetadataBuilder
from dsv4attn.core.caches import LayerCaches
from dsv4attn.core.contract import Backend
from dsv4attn.core.forward import forward_mqa
from dsv4attn.core.geometry import LayerGeometry, LayerKind, ModelGeometry
from dsv4attn.core.layout import KVCacheLayout, PagedKVCache
from dsv4attn.core.limits import Limits
from dsv4attn.core.metadata import AttentionMetadata, Batch
from dsv4attn.core.plan import plan_workspace
from dsv4attn.core.workspace import WorkspaceManager

__all__ = ["Problem", "make_problem"]

SWA_BLOCK, COMPRESSED_BLOCK = 64, 256


@frozen(eq=False)
class Problem:
    """Everything `forward_mqa` takes, and the number of keys each row attends to."""

    layer: LayerGeometry
    limits: Limits
    backend: Backend
    caches: LayerCaches
    metadata: AttentionMetadata
    workspace: WorkspaceManager
    q: Tensor
    out: Tensor
    attn_sink: Tensor
    topk_indices: Tensor | None
    keys_per_row: Tensor
    """[T] int64 on the host."""

    def run(self) -> None:
        """The step being timed."""
        forward_mqa(
            self.q,
            self.caches,
            self.metadata,
            self.backend,
            self.workspace,
            self.out,
            layer=self.layer,
            limits=self.limits,
            attn_sink=self.attn_sink,
            topk_indices=self.topk_indices,
        )

    @property
    def flops(self) -> int:
        """Multiplications and additions of q . k and p . v over the keys that exist, and no others."""
        return int(self.keys_per_row.sum()) * 4 * self.layer.num_heads * self.layer.head_dim


def make_problem(
    geometry: ModelGeometry,
    kind: LayerKind,
    requests: Sequence[tuple[int, int]],
    backend: Backend,
    *,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> Problem:
    """A layer of this kind over requests (prefix_len, query_len), caches full of random keys, pages in random order."""
    torch.manual_seed(seed)
    layer = geometry.layer_of_kind(kind)
    query_lens = torch.tensor([query for _, query in requests], dtype=torch.int32)
    seq_lens = torch.tensor([prefix + query for prefix, query in requests], dtype=torch.int32)
    starts = torch.nn.functional.pad(query_lens.cumsum(0), (1, 0)).int()
    tokens, longest = int(starts[-1]), int(seq_lens.max())
    limits = Limits(len(requests), tokens, max(longest, SWA_BLOCK))
    layout = KVCacheLayout.fp8_ds_mla(layer.nope_dim, layer.rope_dim)

    blocks = _tables(len(requests), -(-longest // SWA_BLOCK))
    swa = PagedKVCache.allocate(layout, int(blocks.numel()), SWA_BLOCK, device)
    table, compressed = None, None
    if kind is not LayerKind.SWA:
        table = _tables(len(requests), -(-longest // COMPRESSED_BLOCK))
        records = COMPRESSED_BLOCK // layer.compress_ratio
        compressed = PagedKVCache.allocate(layout, int(table.numel()), records, device)
    for cache in (swa, compressed):
        if cache is not None:
            for first in range(0, cache.capacity, 65536):
                slots = torch.arange(first, min(first + 65536, cache.capacity), device=device)
                keys = torch.randn(slots.shape[0], layer.head_dim, device=device).bfloat16()
                backend.quantize_and_insert_k_cache(keys, cache, slots)

    request = torch.repeat_interleave(torch.arange(len(requests)), query_lens)
    positions = (seq_lens - starts[1:])[request].long() + torch.arange(tokens)
    slots = blocks[request, positions // SWA_BLOCK].long() * SWA_BLOCK + positions % SWA_BLOCK
    builder = MetadataBuilder(geometry, limits, swa_block_size=SWA_BLOCK, device=device, backend=backend)
    batch = Batch(
        num_reqs=len(requests),
        query_start_loc=starts.to(device),
        query_start_loc_cpu=starts,
        seq_lens=seq_lens.to(device),
        seq_lens_cpu=seq_lens,
        slot_mapping=slots.to(device),
        block_table=blocks.to(device),
        compressed_block_table=None if table is None else table.to(device),
    )
    workspace = WorkspaceManager(device)
    workspace.reserve(plan_workspace(layer, limits, backend, layout))
    workspace.lock()

    entries = positions * 0 if kind is LayerKind.SWA else (positions + 1) // layer.compress_ratio
    selected = entries.clamp(max=layer.topk) if layer.topk else entries
    q = torch.randn(tokens, layer.num_heads, layer.head_dim, device=device).bfloat16()
    return Problem(
        layer,
        limits,
        backend,
        LayerCaches(swa, compressed),
        builder.build_for(batch, [kind])[kind],
        workspace,
        q,
        torch.empty_like(q),
        torch.randn(layer.num_heads, device=device),
        _topk(entries, layer.topk).to(device) if layer.topk else None,
        selected + (positions + 1).clamp(max=layer.window),
    )


def _tables(requests: int, columns: int) -> Tensor:
    return torch.randperm(requests * columns).int().view(requests, columns)


def _topk(entries: Tensor, topk: int) -> Tensor:
    """[T, topk] int32: distinct visible entries in no order, then -1, as an indexer leaves them."""
    out = torch.full((entries.shape[0], topk), -1, dtype=torch.int32)
    widest = max(int(entries.max()), topk)
    numbers = torch.arange(widest)
    for part in torch.arange(entries.shape[0]).split(max(2**22 // widest, 1)):
        hidden = numbers >= entries[part, None]
        order = torch.rand(hidden.shape).masked_fill_(hidden, 2.0).argsort(1)[:, :topk]
        out[part] = order.masked_fill_(hidden.gather(1, order), -1).int()
    return out

"""The same layers through this package: paged caches, steps of a scheduler, metadata, `forward_mqa`, projection."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from dsv4attn.core.attention.forward_mqa import forward_mqa
from dsv4attn.core.attention.projection import output_projection
from dsv4attn.core.cache.layer_caches import LayerCaches
from dsv4attn.core.cache.layout import KVCacheLayout, PagedKVCache
from dsv4attn.core.contract.backend import Backend
from dsv4attn.core.contract.limits import Limits
from dsv4attn.core.memory.plan import plan_workspace
from dsv4attn.core.memory.workspace import WorkspaceManager
from dsv4attn.core.metadata.builder import MetadataBuilder
from dsv4attn.core.metadata.metadata import AttentionMetadata, Batch
from dsv4attn.core.model.geometry import LayerGeometry, LayerKind, ModelGeometry
from dsv4attn.core.model.rope import cos_sin_cache
from tests.parity.hf import Trace

SWA_BLOCK, COMPRESSED_BLOCK_TOKENS = 4, 32
"""Small pages, so that every window spans several and no sequence fits into one."""
MAX_MODEL_LEN = 80


@frozen
class Mode:
    """How sequences are cut into steps."""

    name: str
    chunks: tuple[tuple[int, ...], ...]
    """Query tokens of each sequence, step by step."""
    starts: tuple[int, ...] = (0,)
    """Step in which each sequence arrives."""
    num_speculative_tokens: int = 0
    max_index_elements: int = 2**21

    @property
    def limits(self) -> Limits:
        """The tightest limits this mode keeps."""
        return Limits(
            max_num_reqs=len(self.chunks),
            max_num_batched_tokens=max(sum(n for _, n in step) for step in self.steps()),
            max_model_len=MAX_MODEL_LEN,
            num_speculative_tokens=self.num_speculative_tokens,
            max_index_elements=self.max_index_elements,
        )

    def steps(self) -> list[list[tuple[int, int]]]:
        """(sequence, query tokens) of each step, decodes first."""
        steps = []
        for step in range(max(start + len(c) for start, c in zip(self.starts, self.chunks, strict=True))):
            due = [(i, step - start) for i, start in enumerate(self.starts)]
            batch = [(i, self.chunks[i][at]) for i, at in due if 0 <= at < len(self.chunks[i])]
            steps.append(sorted(batch, key=lambda part: part[1] > 1 + self.num_speculative_tokens))
        return steps


MODES = (
    Mode("single", ((71,),)),
    Mode("sliced", ((71,),), max_index_elements=150),
    Mode("chunked", ((5, 18, 1, 17, 2, 27, 1),)),
    Mode("token", ((1,) * 71,)),
    Mode("mixed", ((23, *(1,) * 48), (17, 12, 1, 1, 9, *(1,) * 11), (1, 1, 30, 2, 7, 1)), (0, 4, 9)),
    Mode("verify", ((9, *(3, 1, 2) * 10, 2), (1, 1, 16, 3, 3, 2, 15)), (0, 3), num_speculative_tokens=2),
)
"""Whole prompt at once; the same in several chunks of one launch each; chunked prefill; decode from the first token;
three sequences that decode while others prefill, one fresh prompt of a single token among them; speculative decode."""


class Server:
    """One layer of one model, serving the sequences of some traces. Everything a test may want to break is a field."""

    def __init__(
        self,
        traces: Sequence[Trace],
        mode: Mode,
        layout: KVCacheLayout,
        backend: Backend,
        geometry: ModelGeometry,
        *,
        builder: type[MetadataBuilder] = MetadataBuilder,
        seed: int = 0,
    ) -> None:
        """Deal out shuffled pages of caches in which every byte reads as NaN."""
        self.traces, self.mode, self.backend, self.limits = traces, mode, backend, mode.limits
        self.layer: LayerGeometry = geometry.layer(traces[0].attention.layer_idx)
        self.table = cos_sin_cache(self.layer.rope, MAX_MODEL_LEN)
        self.generator = torch.Generator().manual_seed(seed)
        self.swa_blocks = self._pages(SWA_BLOCK)
        self.compressed_blocks = self._pages(COMPRESSED_BLOCK_TOKENS)
        swa = poisoned(layout, self.swa_blocks.numel() + 3, SWA_BLOCK)
        compressed = None
        if self.layer.kind is not LayerKind.SWA:
            records = COMPRESSED_BLOCK_TOKENS // self.layer.compress_ratio
            compressed = poisoned(layout, self.compressed_blocks.numel() + 3, records)
        self.caches = LayerCaches(swa, compressed)
        self.builder = builder(
            geometry,
            self.limits,
            swa_block_size=SWA_BLOCK,
            compressed_block_tokens=COMPRESSED_BLOCK_TOKENS,
            num_swa_blocks=swa.num_blocks,
            num_compressed_blocks=compressed.num_blocks if compressed else None,
        )
        self.workspace = WorkspaceManager(debug=True)
        self.workspace.reserve(plan_workspace(self.layer, self.limits, backend, layout))
        self.workspace.lock()
        self.inputs = [(*seen.raw_q_kv(), seen.topk_rows(self.layer.topk, self.generator)) for seen in self.traces]

    def _pages(self, tokens: int) -> Tensor:
        """[sequences, pages] int32 block tables without a common page or any order; 3 pages belong to no sequence."""
        n = -(-MAX_MODEL_LEN // tokens)
        pages = torch.randperm(len(self.traces) * n + 3, generator=self.generator)[3:]
        return pages.view(len(self.traces), n).int()

    def run(self) -> list[Tensor]:
        """[T, hidden] output of the layer for each sequence."""
        outputs: list[list[Tensor]] = [[] for _ in self.traces]
        done = [0] * len(self.traces)
        for step in self.mode.steps():
            parts = [slice(done[i], done[i] + n) for i, n in step]
            output = self._step([i for i, _ in step], parts).split([n for _, n in step])
            for (i, n), rows in zip(step, output, strict=True):
                outputs[i].append(rows)
                done[i] += n
        return [torch.cat(rows) for rows in outputs]

    def _step(self, sequences: list[int], parts: list[slice]) -> Tensor:
        position = torch.cat([torch.arange(part.start, part.stop) for part in parts])
        owner = torch.tensor(sequences).repeat_interleave(torch.tensor([part.stop - part.start for part in parts]))
        q, kv, topk = (
            torch.cat([self.inputs[i][item][part] for i, part in zip(sequences, parts, strict=True)])
            for item in range(3)
        )
        slots = self.swa_blocks[owner, position // SWA_BLOCK].long() * SWA_BLOCK + position % SWA_BLOCK
        metadata = self._metadata(sequences, parts, slots)
        self.backend.qnorm_rope_kv_insert(q, kv, self.caches.swa, slots, position, self.table, self.layer.eps)
        self._insert_entries(metadata, sequences, parts)
        out = torch.full_like(q, torch.nan)
        attention = self.traces[0].attention
        forward_mqa(
            q,
            self.caches,
            metadata,
            self.backend,
            self.workspace,
            out,
            layer=self.layer,
            limits=self.limits,
            attn_sink=attention.sinks,
            topk_indices=topk,
        )
        weights = attention.o_a_proj, attention.o_b_proj, attention.o_a_proj.n_groups
        return output_projection(self.backend, out, position, self.table, *weights, layer=self.layer)

    def _metadata(self, sequences: list[int], parts: list[slice], slots: Tensor) -> AttentionMetadata:
        lens = torch.tensor([part.stop for part in parts], dtype=torch.int32)
        starts = torch.tensor([0, *(part.stop - part.start for part in parts)]).cumsum(0).int()
        # only pages under a window are alive
        tables = self.swa_blocks[sequences].clone()
        for row, part in zip(tables, parts, strict=True):
            row[: max(part.start - self.layer.window + 1, 0) // SWA_BLOCK] = -1
        batch = Batch(
            num_reqs=len(parts),
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=lens,
            seq_lens_cpu=lens,
            slot_mapping=slots,
            block_table=tables,
            compressed_block_table=self.compressed_blocks[sequences],
        )
        return self.builder.build_for(batch, [self.layer.kind])[self.layer.kind]

    def _insert_entries(self, metadata: AttentionMetadata, sequences: list[int], parts: list[slice]) -> None:
        """Store the entries that tokens of this step complete, where the metadata says."""
        if metadata.compressed is None or self.caches.compressed is None:
            return
        ratio, rows = self.layer.compress_ratio, []
        for i, part in zip(sequences, parts, strict=True):
            entries = self.traces[i].entries
            for position in range(part.start, part.stop):
                completes = (position + 1) % ratio == 0
                rows.append(entries[position // ratio] if completes else torch.full((self.layer.head_dim,), torch.nan))
        slots = metadata.compressed.slot_mapping[: len(rows)]
        self.backend.quantize_and_insert_k_cache(torch.stack(rows), self.caches.compressed, slots)


def poisoned(layout: KVCacheLayout, num_blocks: int, block_size: int) -> PagedKVCache:
    """A cache whose every record reads as NaN until it is written."""
    cache = PagedKVCache.allocate(layout, num_blocks, block_size)
    for region in layout.regions(block_size):
        fill: Any = torch.nan if region.dtype.is_floating_point else 0xFF
        cache.region(region.name).fill_(fill)
    return cache

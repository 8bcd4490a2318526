"""A small engine: one bound layer in buffers whose addresses never change, and any batch within its limits."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from random import Random
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from dsv4attn.backends._triton.backend import TritonBackend
from dsv4attn.backends._triton.interpreted import INTERPRETED
from dsv4attn.backends._triton.launching.runtime import observed
from dsv4attn.backends._triton.tuning import DEFAULT, Tuning
from dsv4attn.backends.triton.launch import GenericBackend
from dsv4attn.core.attention.forward_mqa import forward_mqa
from dsv4attn.core.attention.mla_attention import DeepseekV4MLAAttention, _run_insert
from dsv4attn.core.cache.layer_caches import LayerCaches
from dsv4attn.core.cache.layout import KVCacheLayout, PagedKVCache
from dsv4attn.core.contract.limits import Limits
from dsv4attn.core.contract.warmup import WarmupSpec
from dsv4attn.core.memory.plan import plan_workspace
from dsv4attn.core.memory.workspace import WorkspaceManager
from dsv4attn.core.metadata.builder import MetadataBuilder
from dsv4attn.core.metadata.forward_context import set_forward_context
from dsv4attn.core.metadata.metadata import AttentionMetadata, Batch, CompressedMetadata, WindowMetadata
from dsv4attn.core.model.geometry import LayerKind, ModelGeometry
from dsv4attn.core.model.rope import cos_sin_cache
from dsv4attn.testing.kit.factories import tiny_geometry
from tests.backends._triton.cache.caches import DEVICE
from tests.backends._triton.index_ops.index_trials import operations

SWA_BLOCK, TOKENS_OF_BLOCK = 64, 256
PREFIX = "model.layers.0.attn"
INT = torch.int32
Request = tuple[int, int]
"""Tokens before this step, and of this step."""


class RecordedStep(NamedTuple):
    """What torch runs, see `operations`, for metadata and for a layer that inserts and attends; and kernels of both."""

    of_metadata: list[tuple[str, str]]
    of_layer: list[tuple[str, str]]
    launched: list[str]


class Engine:
    """A bound layer, its builder and caches, and the buffers that a step is described in.

    Every request has pages of its own in shuffled order; records are random and finite, from the first to the last.
    """

    def __init__(
        self,
        backend: TritonBackend,
        geometry: ModelGeometry,
        limits: Limits,
        kind: LayerKind,
        device: torch.device,
        *,
        layout: KVCacheLayout | None = None,
        q_dtype: torch.dtype = torch.bfloat16,
        sink: bool = True,
        swa_block: int = SWA_BLOCK,
        tokens_of_block: int = TOKENS_OF_BLOCK,
    ) -> None:
        """Allocate everything that a step will need."""
        self.backend, self.geometry, self.limits, self.kind, self.device = backend, geometry, limits, kind, device
        self.one = geometry.layer_of_kind(kind)
        self.swa_block, self.tokens_of_block, self.q_dtype = swa_block, tokens_of_block, q_dtype
        self.layout = layout or KVCacheLayout.fp8_ds_mla(self.one.nope_dim, self.one.rope_dim)
        tokens, requests = limits.max_num_batched_tokens, limits.max_num_reqs
        self.columns = -(-limits.max_model_len // swa_block), -(-limits.max_model_len // tokens_of_block)
        records = tokens_of_block // self.one.compress_ratio
        # of a long request's window only the last pages are alive, so their memory is used again and again
        window_pages = min(self.columns[0], -(-(self.one.window + tokens) // swa_block) + 2)
        self.pages = window_pages, self.columns[1]
        self.swa = self._cache(requests * self.pages[0], swa_block)
        self.compressed = None if kind is LayerKind.SWA else self._cache(requests * self.pages[1], records)
        self.builder = MetadataBuilder(
            geometry,
            limits,
            swa_block_size=swa_block,
            compressed_block_tokens=tokens_of_block,
            device=device,
            num_swa_blocks=self.swa.num_blocks,
            num_compressed_blocks=None if self.compressed is None else self.compressed.num_blocks,
            validate=False,
            backend=backend,
        )
        self.starts, self.seq_lens = self._ints(requests + 1), self._ints(requests)
        self.slots = self._ints(tokens, dtype=torch.int64)
        self.table, self.entry_table = (self._ints(requests, columns) for columns in self.columns)
        self.topk = self._ints(tokens, max(self.one.topk, 1))
        shape = (tokens, self.one.num_heads, self.one.head_dim)
        self.q, self.out = (torch.zeros(shape, dtype=q_dtype, device=device) for _ in range(2))
        self.kv = torch.zeros(tokens, self.one.head_dim, dtype=q_dtype, device=device)
        self.positions = self._ints(tokens, dtype=torch.int64)
        self.sinks = torch.linspace(-2, 2, self.one.num_heads, device=device) if sink else None
        self.workspace = WorkspaceManager(device)
        self.workspace.reserve(plan_workspace(self.one, limits, backend, self.layout))
        self.workspace.lock()
        self.layer = DeepseekV4MLAAttention(
            PREFIX,
            self.one,
            limits,
            backend,
            attn_sink=self.sinks,
            cos_sin_cache=cos_sin_cache(self.one.rope, limits.max_model_len, device),
            topk_indices_buffer=self.topk if kind is LayerKind.CSA else None,
            workspace=self.workspace,
        )
        self.layer.bind_kv_cache(self.swa, self.compressed)

    def _ints(self, *shape: int, dtype: torch.dtype = INT) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def _cache(self, blocks: int, block_size: int) -> PagedKVCache:
        cache = PagedKVCache.allocate(self.layout, blocks, block_size, self.device)
        if self.device.type == "meta":
            return cache
        g, layout, shape = torch.Generator(self.device).manual_seed(blocks), self.layout, (blocks, block_size)
        some: dict[str, Any] = {"generator": g, "device": self.device}
        if not layout.is_quantised:
            cache.region("row").copy_(torch.randn(*shape, layout.head_dim, **some))
            return cache
        codes = torch.randint(0x78, (*shape, layout.nope_dim), dtype=torch.uint8, **some)
        signs = torch.randint(2, codes.shape, dtype=torch.uint8, **some) << 7
        cache.region("nope").copy_(codes | signs)
        cache.region("rope").copy_(torch.randn(*shape, layout.rope_dim, **some))
        cache.region("scale").copy_(torch.randint(116, 121, (*shape, layout.scale_bytes), dtype=torch.uint8, **some))
        return cache

    def bounds(self) -> WarmupSpec:
        """What this engine promises before it warms up."""
        aligned = all(cache.page_stride % 16 == 0 for cache in (self.swa, self.compressed) if cache is not None)
        options: dict[str, Any] = {"swa_block_size": self.swa_block, "q_dtype": self.q_dtype, "aligned": aligned}
        options |= {"sink": self.sinks is not None, "lse": None}
        return WarmupSpec.of(self.geometry, self.limits, swa=self.layout, **options)

    def load(self, requests: Sequence[Request], rng: Random, *, reqs: int | None = None, extra: int = 0) -> Batch:
        """Describe a step in the buffers: decode requests first, then padding rows.

        reqs: requests that the step has with its padding, one token each; as many as given, by default. extra: rows of
        `slot_mapping` after the batch.
        """
        counts = [count for _, count in requests] + [1] * ((reqs or 0) - len(requests))
        starts = torch.tensor([sum(counts[:i]) for i in range(len(counts) + 1)], dtype=INT)
        n, tokens = len(counts), int(starts[-1])
        seq_lens, slots = torch.ones(n, dtype=INT), torch.full((tokens + extra,), -1, dtype=torch.int64)
        positions, topk = torch.zeros(tokens + extra, dtype=torch.int64), torch.full((tokens, self.topk.shape[1]), -1)
        table, entry_table = (torch.full((n, columns), -1, dtype=INT) for columns in self.columns)
        for i, (context, count) in enumerate(requests):
            first, end = int(starts[i]), context + count
            seq_lens[i] = end
            for pages, tensor in zip(self.pages, (table, entry_table), strict=True):
                blocks = list(range(i * pages, (i + 1) * pages))
                rng.shuffle(blocks)
                tensor[i] = torch.tensor(blocks, dtype=INT).repeat(-(-tensor.shape[1] // pages))[: tensor.shape[1]]
            at = torch.arange(context, end)
            positions[first : first + count] = at
            slots[first : first + count] = table[i, at // self.swa_block].long() * self.swa_block + at % self.swa_block
            if self.kind is LayerKind.CSA:
                for row in range(first, first + count):
                    entries = range((context + row - first + 1) // self.one.compress_ratio)
                    chosen = rng.sample(entries, min(len(entries), rng.randint(0, topk.shape[1])))
                    topk[row, : len(chosen)] = torch.tensor(chosen, dtype=torch.int64)
        for buffer, values in (
            (self.starts, starts),
            (self.seq_lens, seq_lens),
            (self.slots, slots),
            (self.positions, positions),
            (self.table, table),
            (self.entry_table, entry_table),
            (self.topk, topk),
        ):
            buffer[: values.shape[0]].copy_(values)
        self._queries(tokens + extra, rng.randrange(2**31))
        return Batch(
            num_reqs=n,
            query_start_loc=self.starts[: n + 1],
            query_start_loc_cpu=starts,
            seq_lens=self.seq_lens[:n],
            seq_lens_cpu=seq_lens,
            slot_mapping=self.slots[: tokens + extra],
            block_table=self.table[:n],
            compressed_block_table=None if self.kind is LayerKind.SWA else self.entry_table[:n],
        )

    def _queries(self, rows: int, seed: int) -> None:
        if self.device.type == "meta":
            return
        # a row's numbers do not depend on how many rows there are
        for buffer, key in ((self.q, seed), (self.kv, seed + 1)):
            g = torch.Generator().manual_seed(key)
            buffer[:rows].copy_(torch.randn(rows, *buffer.shape[1:], generator=g))

    def metadata(
        self, batch: Batch, *, full_width: bool = False
    ) -> dict[str, WindowMetadata | CompressedMetadata | None]:
        """Metadata of the layers of the step."""
        swa = self.builder.build(batch)
        part = None
        if self.kind is not LayerKind.SWA:
            part = self.builder.build_compressed(batch, swa, self.kind, full_width=full_width)
        return {PREFIX: part, f"{PREFIX}.swa_cache": swa}

    def insert(self, rows: int, metadata: dict[str, Any]) -> None:
        """Write the keys of a step of that many rows, and make its queries ready."""
        q, kv, positions = self.q[:rows], self.kv[:rows], self.positions[:rows]
        with set_forward_context(metadata):
            if self.device.type == "meta":  # where an op would be taken for a fake one, and do nothing
                _run_insert(q, kv, positions, self.layer.cos_sin_cache, None, self.layer.handle)
            else:
                self.layer.fused_qnorm_rope_kv_insert(q, kv, positions)
        part = metadata[PREFIX]
        if part is not None and self.compressed is not None:
            self.backend.quantize_and_insert_k_cache(self.kv[:rows], self.compressed, part.slot_mapping)

    def attend(self, rows: int, metadata: dict[str, Any], lse: Tensor | None = None) -> Tensor:
        """Attention of a step of that many rows, through the layer's own op, unless it cannot say what is wanted."""
        q, kv, out = self.q[:rows], self.kv[:rows], self.out[:rows]
        if lse is None and self.device.type != "meta":
            with set_forward_context(metadata):
                self.layer.forward_mqa(q, kv, self.positions[:rows], out)
            return out
        parts = AttentionMetadata(metadata[f"{PREFIX}.swa_cache"], metadata[PREFIX])
        options: dict[str, Any] = {"layer": self.one, "limits": self.limits, "attn_sink": self.sinks, "lse": lse}
        topk = self.layer.topk_indices_buffer
        caches = LayerCaches(self.swa, self.compressed)
        forward_mqa(q, caches, parts, self.backend, self.workspace, out, topk_indices=topk, **options)
        return out

    def recorded_step(self, requests: Sequence[Request]) -> RecordedStep:
        """What a step of these requests, and of three rows of padding, asks for; nothing is launched."""
        rows = sum(count for _, count in requests) + 3
        batch = self.load(requests, Random(0), extra=3)
        with launching_nothing(), observed() as launched:
            with operations() as of_metadata:
                metadata = self.metadata(batch)
            with operations() as of_layer:
                self.insert(rows, metadata)
                self.attend(rows, metadata)
        return RecordedStep(of_metadata, of_layer, [variant.name for variant in launched])

    def requests(self, rng: Random) -> list[Request]:
        """Any step within the limits: decodes first, up to the last token of everything."""
        limits = self.limits
        left, chunks = limits.max_num_batched_tokens, []
        for _ in range(rng.randint(1, limits.max_num_reqs)):
            most = min(left, limits.max_model_len)
            few = min(most, limits.decode_threshold)
            count = rng.choice([few, few, min(1, most), 0, rng.randint(0, most), rng.randint(0, min(most, 40))])
            left -= count
            most = limits.max_model_len - count
            chunks.append((rng.choice([0, most, rng.randint(0, most)]), count))
        return sorted(chunks, key=lambda request: request[1] > limits.decode_threshold)


LONGEST = 800 if INTERPRETED else 2**18
"""Number of tokens: a row's entries are then several parts in deterministic mode, and tables have several widths."""


class Interpreted(GenericBackend):
    """the triton backend with tiles so small that the few keys of a quick test are many of them."""

    tunings: Mapping[str, Tuning] = {DEFAULT: Tuning(heads=16, keys=16, split_keys=12 * 16)}


def served(
    kind: LayerKind, limits: Limits, *, deterministic: bool = False, q_dtype: torch.dtype | None = None
) -> Engine:
    """The triton backend serving a model as it is, or a tiny one in the interpreter."""
    options: dict[str, Any] = {"q_dtype": q_dtype or torch.bfloat16}
    if INTERPRETED:
        tiny, geometry = Interpreted(deterministic=deterministic), tiny_geometry(ratios=(2, 4))
        return Engine(tiny, geometry, limits, kind, DEVICE, swa_block=4, tokens_of_block=32, **options)
    backend, flash = GenericBackend(deterministic=deterministic), ModelGeometry.preset("flash")
    return Engine(backend, flash, limits, kind, DEVICE, **options)


@contextmanager
def neither_waiting_nor_allocating() -> Iterator[None]:
    """A block in which the host must not wait for the GPU, and no memory of the GPU is allocated."""
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it does not see all of them
        torch.cuda.set_sync_debug_mode("error")
    try:
        allocated = torch.cuda.memory_stats()["allocation.all.allocated"]
        yield
        after = torch.cuda.memory_stats()["allocation.all.allocated"]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert after == allocated


@contextmanager
def launching_nothing() -> Iterator[None]:
    """Where kernels are interpreted, do all of a launch but the kernel: what a launcher does is seen in its work."""
    with pytest.MonkeyPatch.context() as patch:
        if INTERPRETED:
            from triton.runtime.interpreter import InterpretedFunction

            nothing: Callable[..., None] = lambda *_, **__: None  # noqa: E731
            patch.setattr(InterpretedFunction, "run", nothing)
        yield

"""What tests of core share: a small model, its caches, metadata, calls of `forward_mqa`, bound layers, whole models.

Everything is on the CPU unless a test says otherwise. `tests/harness_v41.py` is the same for DeepSeek-V4.1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import product
from typing import Any

import pytest
import torch
from attrs import define, evolve
from torch import Tensor

from dsv4attn.backends.reference.launch import ReferenceBackend
from dsv4attn.core.attention.mla_attention import DeepseekV4MLAAttention
from dsv4attn.core.cache.layer_caches import LayerCaches
from dsv4attn.core.cache.layout import KVCacheLayout, PagedKVCache
from dsv4attn.core.contract.backend import Backend
from dsv4attn.core.contract.builder_ops import BuilderOps
from dsv4attn.core.contract.limits import Limits
from dsv4attn.core.layer.attention_layer import DeepseekV4Attention
from dsv4attn.core.memory.workspace import WorkspaceManager
from dsv4attn.core.metadata.builder import MetadataBuilder
from dsv4attn.core.metadata.forward_context import set_forward_context
from dsv4attn.core.metadata.metadata import AttentionMetadata, Batch, CompressedMetadata, WindowMetadata
from dsv4attn.core.model.geometry import LayerKind, ModelGeometry, Yarn
from dsv4attn.core.model.rope import cos_sin_cache
from dsv4attn.core.model.weights import AttentionWeights, weight_shapes
from dsv4attn.selection import load_backend
from dsv4attn.serving.cache_manager import CachedSequence, CacheManager

KINDS_AND_RATIOS = (LayerKind.SWA, 1), (LayerKind.CSA, 4), (LayerKind.HCA, 16)
SMALL = ModelGeometry(
    num_heads=4,
    head_dim=32,
    rope_dim=8,
    window=8,
    index_topk=3,
    layers=KINDS_AND_RATIOS,
    max_position=4096,
    hidden_size=48,
    o_groups=2,
    o_lora_rank=16,
    compress_yarn=Yarn(16.0, 256),
    q_lora_rank=24,
    index_n_heads=16,
    index_head_dim=32,
)
FP32 = KVCacheLayout.rows(24, 8, dtype=torch.float32)
FP8 = KVCacheLayout.fp8_ds_mla(24, 8, group_size=16)
Requests = Sequence[tuple[CachedSequence, int]]


def random_weights(
    geometry: ModelGeometry, index: int, seed: int = 0, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> dict[str, Tensor]:
    """Weights of a layer by name: matrices with outputs of unit size, norms around 1."""
    generator, weights = torch.Generator().manual_seed(1000 * seed + index), {}
    for name, shape in weight_shapes(geometry, index).items():
        value = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
        if name.endswith("norm"):
            value = 1 + 0.2 * value
        elif len(shape) == 2 and not name.endswith("ape"):
            value *= shape[1] ** -0.5 * (3 if name.endswith("wgate") else 1)
        weights[name] = value.to(device, dtype if len(shape) == 2 and not name.endswith("ape") else torch.float32)
    return weights


class LayerStack:
    """All layers of a model, each on the same hidden states."""

    def __init__(
        self,
        backend: Backend,
        layout: KVCacheLayout = FP32,
        *,
        geometry: ModelGeometry = SMALL,
        limits: Limits | None = None,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        weights: Mapping[int, Mapping[str, Any]] | None = None,
        layer_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.limits = limits or Limits(4, 64, 256)
        self.geometry, self.dtype, self.device = geometry, dtype, device
        self.manager = CacheManager(geometry, self.limits, layout, backend=backend, device=device, **options)
        self.workspace, self.layers = WorkspaceManager(device), list[DeepseekV4Attention]()
        self.weights: dict[int, Mapping[str, Any]] = {}
        for i in range(geometry.num_layers):
            tensors = (weights or {}).get(i) or random_weights(geometry, i, dtype=dtype, device=device)
            self.weights[i] = tensors
            layer_weights = AttentionWeights.from_dict(tensors, geometry, i)
            common = {"workspace": self.workspace, "sources": self.layers, **(layer_options or {})}
            layer = DeepseekV4Attention(f"layers.{i}", geometry, i, self.limits, backend, layer_weights, **common)
            layer.bind_kv_cache(self.manager.caches[i])
            self.layers.append(layer)

    def hidden(self, seed: int, count: int) -> Tensor:
        """[count, hidden] hidden states of a sequence."""
        generator = torch.Generator().manual_seed(seed)
        values = torch.randn(count, self.geometry.hidden_size, generator=generator, dtype=torch.float32, device="cpu")
        return values.to(self.device, self.dtype)

    def run(self, requests: Requests, hidden: Tensor, *, padding: int = 0) -> list[Tensor]:
        """Outputs [T, hidden] of every layer; sequences do not advance."""
        batch = self.manager.batch(requests, padding=padding)
        return self.forward(batch, hidden, self.manager.positions(requests, padding=padding))

    def forward(self, batch: Batch, hidden: Tensor, positions: Tensor) -> list[Tensor]:
        """Outputs of every layer for a batch that a test has made or changed."""
        with torch.no_grad(), set_forward_context(self.manager.metadata(batch)):
            return [layer(hidden, positions) for layer in self.layers]

    def step(self, requests: Requests, hidden: Tensor) -> list[Tensor]:
        """Outputs of a step that is done."""
        out = self.run(requests, hidden)
        self.manager.advance(requests)
        return out

    def cut(self, hidden: Tensor, cuts: Sequence[int]) -> tuple[CachedSequence, list[Tensor]]:
        """Run a new sequence in steps of `cuts` tokens. Returns it, and the outputs [T, hidden] of every layer."""
        sequence = self.manager.new()
        parts = [self.step([(sequence, part.shape[0])], part) for part in hidden.split(list(cuts))]
        return sequence, [torch.cat(outs) for outs in zip(*parts, strict=True)]

    @property
    def caches(self) -> list[PagedKVCache]:
        """Every cache of every layer, in order."""
        return [cache for caches in self.manager.caches for cache in caches.present.values()]

    def poison_caches(self) -> None:
        """Fill every cache with NaN."""
        for cache in self.caches:
            cache.tensor.fill_(0xFF if cache.tensor.dtype == torch.uint8 else torch.nan)

    def bytes_of(self, sequence: CachedSequence) -> list[Tensor]:
        """Pages of a sequence in every cache, in order."""
        pages = []
        for name, table in sequence.tables.items():
            blocks = torch.tensor([b for b in table.blocks if b >= 0], device=self.device)
            pages += [cache.tensor[blocks] for cache in self.manager._of_group(name)]
        return pages


def deterministic(limits: Limits) -> Limits:
    """Limits with which deterministic ranks give a token the same bits in any cut."""
    return evolve(limits, single_phase=True)


I32, F32, F16, BF16 = torch.int32, torch.float32, torch.float16, torch.bfloat16
SWA, C4A, C128A = LayerKind.SWA, LayerKind.CSA, LayerKind.HCA
KINDS = [SWA, C4A, C128A]
LIMITS = Limits(max_num_reqs=4, max_num_batched_tokens=64, max_model_len=256)
LAYOUT = KVCacheLayout.fp8_ds_mla(24, 8, group_size=8)
OTHER_DIMS = KVCacheLayout.fp8_ds_mla(32, 4, group_size=8)
QUERY, SEQ = [1, 1, 9, 20], [40, 5, 29, 20]
TOKENS, PADDED = sum(QUERY), sum(QUERY) + 3


def random_cache(layout: KVCacheLayout, block_size: int, blocks: int) -> PagedKVCache:
    """Return a cache of random but finite keys."""
    cache = PagedKVCache.allocate(layout, blocks, block_size)
    keys = torch.randn(cache.capacity, layout.head_dim, generator=torch.Generator().manual_seed(0))
    ReferenceBackend().quantize_and_insert_k_cache(keys, cache, torch.arange(cache.capacity))
    return cache


def caches_of(kind: LayerKind, layout: KVCacheLayout = LAYOUT, **changes: Any) -> LayerCaches:
    """Return the caches of a layer: window blocks of 4, compressed blocks of 32 tokens."""
    compressed = {SWA: None, C4A: random_cache(layout, 8, 32), C128A: random_cache(layout, 2, 32)}[kind]
    return LayerCaches(**{"swa": random_cache(layout, 4, 256), "compressed": compressed, **changes})


def batch_of(query: Sequence[int], seq: Sequence[int], **changes: Any) -> Batch:
    """Return a batch of requests with these query and sequence lengths; `changes` replaces fields.

    Window blocks hold 4 tokens. Each request has 64 columns of its own in the table of the window and 8 in the
    compressed table, and the slots of tokens are those of their positions in the table of the window.
    """
    starts, lens = torch.tensor([0, *query], dtype=I32).cumsum(0).to(I32), torch.tensor(seq, dtype=I32)
    fields: dict[str, Any] = {
        "num_reqs": len(query),
        "query_start_loc": starts,
        "query_start_loc_cpu": starts.clone(),
        "seq_lens": lens,
        "seq_lens_cpu": lens.clone(),
        "slot_mapping": torch.tensor(slots_of(query, seq, changes.get("block_table")), dtype=torch.int64),
        "block_table": torch.arange(len(query) * 64, dtype=I32).view(-1, 64),
        "compressed_block_table": torch.arange(len(query) * 8, dtype=I32).view(-1, 8),
    }
    return Batch(**{**fields, **changes})


def slots_of(query: Sequence[int], seq: Sequence[int], table: Tensor | None = None, block_size: int = 4) -> list[int]:
    """Return the slots of tokens in the blocks of a window table; where it has no block, in those of `batch_of`."""
    slots = []
    for i, (query_len, seq_len) in enumerate(zip(query, seq, strict=True)):
        for position in range(seq_len - query_len, seq_len):
            column, offset = divmod(position, block_size)
            block = -1
            if table is not None and table.dim() == 2 and i < len(table) and 0 <= column < table.shape[1]:
                block = int(table[i, column]) if table.device.type == "cpu" else -1
            slots.append((64 * i + column if block < 0 else block) * block_size + offset)
    return slots


def metadata_of(
    kind: LayerKind,
    query: list[int] = QUERY,
    seq: list[int] = SEQ,
    tables: dict[str, Any] | None = None,
    **options: Any,
) -> AttentionMetadata:
    """Return the metadata of `batch_of`; tables: block tables instead of those; options: those of the builder."""
    fixed: dict[str, Any] = {"limits": LIMITS, "swa_block_size": 4, "compressed_block_tokens": 32, "geometry": SMALL}
    return MetadataBuilder(**{**fixed, **options}).build_for(batch_of(query, seq, **(tables or {})), [kind])[kind]


def forward_args(kind: LayerKind) -> dict[str, Any]:
    """Return arguments of a call that works, with three padding rows; every output holds a sentinel."""
    return {
        "q": torch.randn(PADDED, 4, 32, generator=torch.Generator().manual_seed(1)),
        "caches": caches_of(kind),
        "metadata": metadata_of(kind),
        "backend": ReferenceBackend(),
        "workspace": WorkspaceManager(),
        "out": torch.full((PADDED, 4, 32), 7.0),
        "layer": SMALL.layer_of_kind(kind),
        "limits": LIMITS,
        "attn_sink": torch.zeros(4),
        "topk_indices": torch.arange(3, dtype=I32).expand(PADDED, 3),
        "lse": torch.full((PADDED, 4), 7.0),
    }


FORM_NAMES = [f"{keys}-{indices}" for keys, indices in product(("gathered", "paged"), ("dense", "ragged"))]


def backend_of(form: str) -> ReferenceBackend:
    """Build the reference from a name such as "paged-ragged"; decode takes the same form of indices."""
    keys, indices = form.split("-")
    backend = load_backend("reference", prefill_keys=keys, prefill_indices=indices, decode_indices=indices)
    assert isinstance(backend, ReferenceBackend)
    return backend


REFERENCE_FORMS = {name: backend_of(name) for name in FORM_NAMES}
all_kinds = pytest.mark.parametrize("kind", KINDS, ids=[kind.value for kind in KINDS])
all_forms = pytest.mark.parametrize("form", FORM_NAMES)


def storage_of(tensor: Tensor) -> Tensor:
    """The whole memory of a tensor, gaps included, as a flat tensor of its dtype."""
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage())


def same_memory_on(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device with its strides and all that lies between its elements: `to` would close the gaps."""
    return storage_of(tensor).to(device).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def bytes_of(tensor: Tensor) -> Tensor:
    """The bytes of a tensor's elements on the CPU, so that 0 and -0 differ and NaN equals itself."""
    return tensor.contiguous().cpu().view(torch.uint8)


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors hold the same bytes, so that 0 and -0 differ and NaN equals itself."""
    if left.shape != right.shape or left.dtype != right.dtype or not left.numel():
        return left.shape == right.shape and left.dtype == right.dtype
    copies = [t.clone(memory_format=torch.contiguous_format) for t in (left, right)]
    return torch.equal(*(t.view(torch.uint8) for t in copies))


def assert_same_bits(left: Sequence[Tensor], right: Sequence[Tensor]) -> None:
    """Assert that (out, lse) of two runs are equal byte for byte, or say where they first differ."""
    for name, a, b in zip(("out", "lse"), left, right, strict=True):
        if not same_bits(a, b):
            where = (a != b).nonzero()[:1].tolist()
            largest = (a.double() - b.double()).abs().max().item()
            pytest.fail(f"{name} differs, first at {where}, at most by {largest:.3g}")


BUILDER_OPS: dict[str, BuilderOps] = {"torch": BuilderOps()}
_reason = "Triton is not installed"
if find_spec("triton"):
    from dsv4attn.backends._triton.index_ops import builder as builder_kernels
    from dsv4attn.backends._triton.interpreted import INTERPRETED

    BUILDER_OPS["triton"] = builder_kernels.BUILDER_OPS
    _reason = "" if INTERPRETED else "kernels are compiled here, and cannot run on the CPU"
_off_cpu = pytest.mark.skipif(bool(_reason), reason=_reason)

all_builder_ops = pytest.mark.parametrize("builder_ops", ["torch", pytest.param("triton", marks=_off_cpu)])


PROMPT_TOKENS = 21
LayerMetadata = dict[str, WindowMetadata | CompressedMetadata | None]


@define
class BoundLayer:
    """A layer, one fresh prompt of 21 tokens for it, and its metadata."""

    layer: DeepseekV4MLAAttention
    metadata: LayerMetadata
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


def bound_layer(kind: LayerKind, prefix: str = "model.layers.0.attn", seed: int = 0) -> BoundLayer:
    """A layer of this kind with caches and one prompt."""
    torch.manual_seed(seed)
    geometry = SMALL.layer_of_kind(kind)
    builder = MetadataBuilder(SMALL, LIMITS, swa_block_size=4, compressed_block_tokens=16)
    blocks = torch.randperm(8).int()[None]
    positions = torch.arange(PROMPT_TOKENS)
    slots = blocks[0].long()[positions // 4] * 4 + positions % 4
    tables = {"block_table": blocks, "compressed_block_table": torch.tensor([[2, 0]], dtype=torch.int32)}
    batch = batch_of([PROMPT_TOKENS], [PROMPT_TOKENS], slot_mapping=slots, **tables)
    parts = builder.build_for(batch, [kind])[kind]
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
    metadata: LayerMetadata = {layer.swa_prefix: parts.swa, layer.prefix: parts.compressed}
    q, kv = torch.randn(PROMPT_TOKENS, 4, 32).bfloat16(), torch.randn(PROMPT_TOKENS, 32).bfloat16()
    return BoundLayer(layer, metadata, q, kv, positions)


STALE_POSITIONS = (2**40, -5, 0, 2**31 - 1, 1, -(2**62))
"""Positions that rows of padding have: what another step left there."""
BLOCK_TABLES = "block_table", "compressed_block_table", "c4a_state_block_table", "c128a_state_block_table"


def stale_positions(count: int) -> Tensor:
    """[count] positions of padding."""
    return torch.tensor([STALE_POSITIONS[i % len(STALE_POSITIONS)] for i in range(count)], dtype=torch.int64)


def padded_batch(batch: Batch, fill: int | None, counts: Sequence[int], *, rows_after: int = 0) -> Batch:
    """A batch with padding after its own requests: a request of each of these token counts, then further rows.

    fill: the elements of the tables' rows of padding; None: those of the first request.
    """
    starts = [*batch.query_start_loc_cpu.tolist()]
    for count in counts:
        starts.append(starts[-1] + count)
    lens = torch.cat([batch.seq_lens_cpu, torch.tensor(counts, dtype=torch.int32)])
    start_loc = torch.tensor(starts, dtype=torch.int32)
    slots = torch.full((sum(counts) + rows_after,), -1, dtype=torch.int64)
    changed: dict[str, Any] = {}
    for name in BLOCK_TABLES:
        table = getattr(batch, name)
        if table is not None:
            # an engine's tables have columns, also where no request has a block
            table = torch.nn.functional.pad(table, (0, int(not table.shape[1])), value=-1)
            row = table[:1] if fill is None and len(table) else table.new_full((1, table.shape[1]), fill or 0)
            changed[name] = torch.cat([table, row.expand(len(counts), -1)])
    return evolve(
        batch,
        num_reqs=batch.num_reqs + len(counts),
        query_start_loc=start_loc,
        query_start_loc_cpu=start_loc,
        seq_lens=lens,
        seq_lens_cpu=lens,
        slot_mapping=torch.cat([batch.slot_mapping, slots]),
        **changed,
    )


def with_padding(whole: LayerStack, fill: int | None, *, validate: bool = True) -> LayerStack:
    """Let every step of these layers have two requests of padding, and two rows after the tokens; all must be zero.

    fill: see `padded_batch`.
    """
    manager = whole.manager
    manager.builder.validate = validate

    def run(requests: Requests, hidden: Tensor, *, padding: int = 0) -> list[Tensor]:
        assert not padding
        most = max((count for _, count in requests), default=0)
        least = whole.limits.decode_threshold
        # padding is of the phase of the last request, as decodes come first
        counts, rows_after = [1 if most <= least else least + 1] * 2, 2
        batch = padded_batch(manager.batch(requests), fill, counts, rows_after=rows_after)
        rows = sum(counts) + rows_after
        positions = torch.cat([manager.positions(requests), stale_positions(rows)])
        values = torch.cat([hidden, torch.full((rows, hidden.shape[1]), torch.nan, dtype=hidden.dtype)])
        outs = whole.forward(batch, values, positions)
        for out in outs:
            assert not out[len(hidden) :].any(), "rows of padding are zero"
        return [out[: len(hidden)] for out in outs]

    whole.run = run  # type: ignore[method-assign]
    return whole


def all_bytes(whole: LayerStack) -> list[Tensor]:
    """Bytes of every cache of the layers."""
    return [bytes_of(cache.tensor) for cache in whole.caches]


@contextmanager
def caches_unchanged(whole: LayerStack) -> Iterator[None]:
    """Assert that no byte of any cache changes inside."""
    copies = [cache.tensor.clone() for cache in whole.caches]
    yield
    assert all(same_bits(tensor, cache.tensor) for tensor, cache in zip(copies, whole.caches, strict=True))


def check_step_without_tokens(whole: LayerStack, waiting: int, padding: int) -> None:
    """Check that a step of waiting requests and padding alone gives zeros and writes nothing."""
    requests = [(whole.manager.new(), 0) for _ in range(waiting)]

    with caches_unchanged(whole):
        outs = whole.run(requests, whole.hidden(0, padding), padding=padding)

    assert [tuple(out.shape) for out in outs] == [(padding, 48)] * len(whole.layers)
    assert not any(out.any() for out in outs)


def assert_outputs_close(outputs: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float) -> None:
    """Assert that outputs of layers differ by at most `tolerance` of the largest expected value of the layer."""
    for output, answer in zip(outputs, expected, strict=True):
        assert float((output - answer).abs().max()) <= tolerance * float(answer.abs().max())

"""Backends with one thing wrong each. All of these have been shipped by somebody; the kit must find every one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import attrs
import torch
from torch import Tensor

from dsv4attn.backends.reference import kernels
from dsv4attn.backends.reference.launch import ReferenceBackend
from dsv4attn.core.cache import fp4
from dsv4attn.core.cache.layout import Fp8Format, KVCacheLayout, PagedKVCache
from dsv4attn.core.cache.selected_keys import ChunkTokens, DenseIndices, GatheredKeys, PagedKeys
from dsv4attn.core.contract.backend import AttentionCall, Phase
from dsv4attn.core.contract.index_ops import IndexOps
from dsv4attn.core.model.geometry import LayerGeometry
from dsv4attn.core.tensorspec import BufferSpec
from dsv4attn.core.torch_ops import index_ops as indices

LN2 = 0.6931471805599453
right = ReferenceBackend.decode


def paged() -> ReferenceBackend:
    """The reference, reading pages in both phases."""
    return ReferenceBackend(prefill_keys="paged")


class NeighbourScales(ReferenceBackend):
    """Reads e2m1 codes under the scale of the next group, as a reader with groups of 32 does in every other one."""

    def __init__(self) -> None:
        super().__init__(prefill_keys="paged")

    def decode(self, call: AttentionCall) -> None:
        right_one = fp4.dequantize

        def wrong_one(codes: Tensor, scales: Tensor) -> Tensor:
            return right_one(codes, scales[..., ::2].repeat_interleave(2, -1))

        with mock.patch.object(fp4, "dequantize", wrong_one):
            super().decode(call)


def calls(wrong: Callable[[AttentionCall], None], *phases: str, made: ReferenceBackend | None = None) -> Any:
    """A backend whose call is wrong in some phases."""
    backend: Any = made or ReferenceBackend()
    for phase in ("decode", "prefill"):
        setattr(backend, phase, wrong if phase in (phases or ("decode", "prefill")) else lambda c: right(backend, c))
    return backend


def attend(call: AttentionCall) -> None:
    right(ReferenceBackend(), call)


def without_sink(call: AttentionCall) -> None:
    attend(attrs.evolve(call, attn_sink=None))


def sink_twice(call: AttentionCall) -> None:
    lse = torch.empty_like(call.q[..., 0], dtype=torch.float32)
    attend(attrs.evolve(call, lse=lse))
    if call.attn_sink is not None:
        call.out.mul_(torch.sigmoid(lse - call.attn_sink).nan_to_num(0)[..., None])
    if call.lse is not None:
        call.lse.copy_(lse)


def sink_scaled(call: AttentionCall) -> None:
    sink = None if call.attn_sink is None else call.attn_sink * call.layer.scale
    attend(attrs.evolve(call, attn_sink=sink))


def with_rows(change: Callable[[DenseIndices], DenseIndices]) -> Callable[[AttentionCall], None]:
    def wrong(call: AttentionCall) -> None:
        keys = call.keys
        if isinstance(keys, GatheredKeys):
            assert isinstance(keys.rows, DenseIndices)
            keys = attrs.evolve(keys, rows=change(keys.rows))
        else:
            keys = [attrs.evolve(s, rows=change(s.rows)) for s in keys if isinstance(s.rows, DenseIndices)]
        attend(attrs.evolve(call, keys=keys))

    return wrong


def every_column(rows: DenseIndices) -> DenseIndices:
    return DenseIndices(rows.indices, torch.full_like(rows.lens, rows.indices.shape[1]))


def stride_is_width(rows: DenseIndices) -> DenseIndices:
    n, width = rows.indices.shape
    packed = rows.indices.as_strided((n, width), (width, 1)) if n * width else rows.indices
    return DenseIndices(packed, rows.lens)


def zero_keys(call: AttentionCall) -> None:
    """An absent column within the length counts as a key of zeros, whose logit is 0."""
    segments = [call.keys] if isinstance(call.keys, GatheredKeys) else call.keys
    count = torch.zeros_like(call.q[:, 0, 0], dtype=torch.float32)
    for segment in segments:
        capacity = segment.kv.shape[0] if isinstance(segment, GatheredKeys) else segment.cache.capacity
        rows = segment.rows
        assert isinstance(rows, DenseIndices)
        inside = torch.arange(rows.indices.shape[1]) < rows.lens[:, None]
        count += (inside & ((rows.indices < 0) | (rows.indices >= capacity))).sum(1)
    lse = torch.empty_like(call.q[..., 0], dtype=torch.float32)
    attend(attrs.evolve(call, attn_sink=None, lse=lse))
    more = torch.logaddexp(lse, count.log()[:, None])
    weight = torch.exp(lse - more).nan_to_num(0)
    if call.attn_sink is not None:
        weight = weight * torch.sigmoid(more - call.attn_sink).nan_to_num(0)
    call.out.mul_(weight[..., None])
    if call.lse is not None:
        call.lse.copy_(more)


def tail_unwritten(call: AttentionCall) -> None:
    before = call.out[-1].clone()
    attend(call)
    call.out[-1] = before


def with_caches(change: Callable[[PagedKVCache], PagedKVCache]) -> Callable[[AttentionCall], None]:
    def wrong(call: AttentionCall) -> None:
        assert not isinstance(call.keys, GatheredKeys)
        attend(attrs.evolve(call, keys=[PagedKeys(change(s.cache), s.rows) for s in call.keys]))

    return wrong


def always_ocp(cache: PagedKVCache) -> PagedKVCache:
    return cache.with_layout(fp8_format=Fp8Format.OCP) if cache.layout.is_quantised else cache


def packed_pages(cache: PagedKVCache) -> PagedKVCache:
    stride = cache.layout.page_stride(cache.block_size) // cache.tensor.itemsize
    shape = cache.tensor.shape
    view = cache.tensor.as_strided(shape, (stride, shape[2], 1), cache.tensor.storage_offset())
    return PagedKVCache(view, cache.layout)


def int32_offsets(cache: PagedKVCache) -> PagedKVCache:
    """The pages one finds with block * stride in 32 bits."""
    t, page = cache.tensor, cache.layout.page_bytes(cache.block_size) // cache.tensor.itemsize
    offsets = [(b * t.stride(0) + 2**31) % 2**32 - 2**31 for b in range(cache.num_blocks)]
    if offsets == [b * t.stride(0) for b in range(cache.num_blocks)]:
        return cache
    parts = [t.as_strided((page,), (1,), t.storage_offset() + offset) for offset in offsets]
    return PagedKVCache(torch.stack(parts).view(t.shape), cache.layout)


def base_two(call: AttentionCall) -> None:
    attend(call)
    if call.lse is not None:
        call.lse.div_(LN2)


def lse_with_sink(call: AttentionCall) -> None:
    attend(call)
    if call.lse is not None and call.attn_sink is not None:
        call.lse.copy_(torch.logaddexp(call.lse, call.attn_sink))


def empty_lse_ignored(call: AttentionCall) -> None:
    attend(attrs.evolve(call, options=attrs.evolve(call.options, empty_lse=-torch.inf)))


def with_top(change: Callable[[AttentionCall, Tensor], Tensor]) -> Callable[[AttentionCall], None]:
    def wrong(call: AttentionCall) -> None:
        attend(call)
        if call.max_logits is not None:
            call.max_logits.copy_(change(call, call.max_logits.clone()))

    return wrong


def top_with_absent(call: AttentionCall, top: Tensor) -> Tensor:
    """Absent columns have the logit 0, but for rows that have nothing else."""
    return top.where(top == -torch.inf, top.clamp(min=0))


def top_with_sink(call: AttentionCall, top: Tensor) -> Tensor:
    return top if call.attn_sink is None else torch.maximum(top, call.attn_sink)


def top_moves_out(call: AttentionCall, top: Tensor) -> Tensor:
    """Another kernel runs where the largest logits are asked for, and rounds otherwise."""
    call.out.mul_(1 + 2.0**-7)
    return top


def mean_of_nothing(call: AttentionCall) -> None:
    """Rows without keys give the mean of slot 0 instead of zero."""
    lse = torch.empty_like(call.q[..., 0], dtype=torch.float32)
    attend(attrs.evolve(call, lse=lse))
    call.out.masked_fill_((lse == -torch.inf)[..., None], 1e-3)
    if call.lse is not None:
        call.lse.copy_(lse)


def reads_slot_zero(call: AttentionCall) -> None:
    """Absent columns are read from slot 0 and given the weight 0, and 0 * NaN is NaN."""
    attend(call)
    for segment in () if isinstance(call.keys, GatheredKeys) else call.keys:
        if segment.cache.capacity:
            call.out.add_(
                (0 * kernels.read_records(segment.cache, torch.zeros(1, dtype=torch.int64))).to(call.out.dtype)
            )


class NeighbourRow(ReferenceBackend):
    """A hole among the selected entries becomes the row before the request's own: somebody else's key."""

    def __init__(self) -> None:
        super().__init__()
        self.index_ops = attrs.evolve(IndexOps(), combine_topk_swa_indices=self._combine)

    @staticmethod
    def _combine(topk: Any, tokens: ChunkTokens, *, out: Any, **tables: Any) -> None:
        indices.combine_topk_swa_indices(topk, tokens, out=out, **tables)
        if topk is None or tokens.visible_lens is None:
            return
        rows, lens = out
        starts = tokens.query_start_loc
        request = indices.token_to_req_indices(starts - starts[0], rows.shape[0])
        is_seen = torch.arange(topk.shape[1]) < tokens.visible_lens[:, None]
        holes = ((topk < 0) & is_seen).any(1) & (request > 0) & tokens.is_valid
        for row in holes.nonzero()[:, 0].tolist():
            if lens[row] < rows.shape[1]:
                rows[row, lens[row]] = int(request[row]) * tokens.rows - 1
                lens[row] += 1


class Scratch(ReferenceBackend):
    """Asks for an accumulator. `room`: of what it asks for, how much its bound admits."""

    def __init__(self, *, room: float = 1.0, over: int = 0, clears: bool = True) -> None:
        super().__init__()
        self.room, self.over, self.clears = room, over, clears

    def scratch(self, phase: Phase, layer: LayerGeometry, tokens: int, width: int) -> Sequence[BufferSpec]:
        return [((tokens, layer.num_heads, layer.head_dim), torch.float32)]

    def scratch_bound(self, phase: Phase, layer: LayerGeometry, max_tokens: int, max_width: int) -> int:
        return int(self.room * max_tokens * layer.num_heads * layer.head_dim * 4) // 256 * 256

    def decode(self, call: AttentionCall) -> None:
        attend(call)
        sums = call.scratch[0]
        if self.clears:
            sums.zero_()
        sums.add_(call.out)
        call.out.copy_(sums)
        if self.over:
            sums.as_strided((self.over,), (1,), sums.storage_offset() + sums.numel()).zero_()


class LeadingRope(ReferenceBackend):
    """Rotates the leading dims instead of the trailing ones."""

    def qnorm_rope_kv_insert(
        self, q: Tensor, kv: Tensor, cache: PagedKVCache, slot_mapping: Tensor, positions: Tensor, table: Tensor,
        eps: float | None,
    ) -> None:  # fmt: skip
        rope = table.shape[-1]
        rolled = q.roll(-rope, -1)
        kernels.qnorm_rope(rolled, positions, table, eps)
        q.copy_(rolled.roll(rope, -1))
        keys = kernels.rotated(kv.roll(-rope, -1), positions, table).roll(rope, -1)
        self.quantize_and_insert_k_cache(keys, cache, slot_mapping)


class Overflow(ReferenceBackend):
    """Computes block * stride in 32 bits, reading and writing."""

    def __init__(self) -> None:
        super().__init__(prefill_keys="paged")

    def decode(self, call: AttentionCall) -> None:
        with_caches(int32_offsets)(call)


class Careless(ReferenceBackend):
    """One slip in each of the other steps; `slip` says which."""

    def __init__(self, slip: str) -> None:
        super().__init__()
        self.slip = slip

    def qnorm_rope_kv_insert(
        self, q: Tensor, kv: Tensor, cache: PagedKVCache, slot_mapping: Tensor, positions: Tensor, table: Tensor,
        eps: float | None,
    ) -> None:  # fmt: skip
        if self.slip == "all rows inserted":
            room = torch.arange(kv.shape[0] - slot_mapping.shape[0])
            slot_mapping = torch.cat([slot_mapping, room])
        eps = 1e-6 if self.slip == "norm without eps" else eps
        angles = table.roll(1, 0) if self.slip == "next position" else table
        super().qnorm_rope_kv_insert(q, kv, cache, slot_mapping, positions, angles, eps)
        if self.slip == "kv rotated in place":
            kv.copy_(kernels.rotated(kv, positions, table))

    def quantize_and_insert_k_cache(self, k: Tensor, cache: PagedKVCache, slot_mapping: Tensor) -> None:
        if self.slip == "floor of a group at 1":
            with mock.patch.object(KVCacheLayout, "amax_floor", 1.0):
                super().quantize_and_insert_k_cache(k, cache, slot_mapping)
        elif self.slip == "-7 wraps around":
            super().quantize_and_insert_k_cache(k, cache, slot_mapping.where(slot_mapping >= -1, slot_mapping % 50))
        else:
            super().quantize_and_insert_k_cache(k, cache, slot_mapping)

    def dequantize_and_gather_k_cache(
        self, out: Tensor, cache: PagedKVCache, seq_lens: Tensor, gather_lens: Tensor | None, block_table: Tensor,
        offset: int,
    ) -> None:  # fmt: skip
        if self.slip == "table packed":
            block_table = block_table.as_strided(block_table.shape, (block_table.shape[1], 1))
        super().dequantize_and_gather_k_cache(out, cache, seq_lens, gather_lens, block_table, offset)
        if self.slip == "gather clears the rest" and gather_lens is not None:
            out[:, :offset] = 0

    def inv_rope_o_proj(self, o: Tensor, positions: Tensor, table: Tensor, wo_a: Any, num_groups: int) -> Tensor:
        angles = table.clone()
        if self.slip == "rotated forward":
            angles[:, table.shape[1] // 2 :] *= -1
        return super().inv_rope_o_proj(o, positions, angles, wo_a, num_groups)

    def transient_bytes(self, layer: LayerGeometry, max_tokens: int, max_width: int, max_rows: int) -> int:
        true = super().transient_bytes(layer, max_tokens, max_width, max_rows)
        return {"temporaries denied": 1000, "no temporaries at all": 0}.get(self.slip, true)

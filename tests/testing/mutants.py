"""Backends with one thing wrong each: mutants, which the kit must find. A real backend once had each of them.

A mutant is a function that makes a backend. `with_attention` returns one whose backend attends wrongly, and `with_op`
one whose backend gives an op other arguments or another result. `test_kit_finds_*.py` have tables of mutants, with the
cases that must fail.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any
from unittest import mock

import attrs
import torch
from torch import Tensor

from dsv4attn.backends.reference import kernels
from dsv4attn.backends.reference.launch import ReferenceBackend
from dsv4attn.core.cache import fp4
from dsv4attn.core.cache.layout import Fp8Format, PagedKVCache
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


def with_attention(
    wrong: Callable[[AttentionCall], None], *phases: str, of: Callable[[], ReferenceBackend] = ReferenceBackend
) -> Callable[[], Any]:
    """Make a backend whose attention is wrong in some phases, by default in both."""

    def make() -> Any:
        backend: Any = of()
        for phase in ("decode", "prefill"):
            is_wrong = phase in (phases or ("decode", "prefill"))
            setattr(backend, phase, wrong if is_wrong else lambda call: right(backend, call))
        return backend

    return make


def attend(call: AttentionCall) -> None:
    right(ReferenceBackend(), call)


def biased_sums(call: AttentionCall) -> None:
    """Lose 2^-15 of the sum of weighted keys with each key of a token, as sums that are cut off at every step do."""
    attend(call)
    keys = torch.zeros(call.q.shape[0], device=call.q.device)
    for segment in [call.keys] if isinstance(call.keys, GatheredKeys) else call.keys:
        assert isinstance(segment.rows, DenseIndices)
        inside = torch.arange(segment.rows.width, device=keys.device) < segment.rows.lens[:, None]
        keys += (inside & (segment.rows.indices >= 0)).sum(1)
    call.out.mul_((1 - 2.0**-15 * keys)[:, None, None])


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


def heads_swapped(call: AttentionCall) -> None:
    attend(attrs.evolve(call, q=call.q.flip(1)))


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
    """A hole among the selected entries becomes the row before the request's own, which is a key of another request."""

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
    """Asks for an accumulator.

    bound: what `scratch_bound` returns, as a share of what is asked for. past: elements after the scratch that are
    written. clears: whether the accumulator is cleared first.
    """

    def __init__(self, *, bound: float = 1.0, past: int = 0, clears: bool = True) -> None:
        super().__init__()
        self.bound, self.past, self.clears = bound, past, clears

    def scratch(self, phase: Phase, layer: LayerGeometry, tokens: int, width: int) -> Sequence[BufferSpec]:
        return [((tokens, layer.num_heads, layer.head_dim), torch.float32)]

    def scratch_bound(self, phase: Phase, layer: LayerGeometry, max_tokens: int, max_width: int) -> int:
        return int(self.bound * max_tokens * layer.num_heads * layer.head_dim * 4) // 256 * 256

    def decode(self, call: AttentionCall) -> None:
        attend(call)
        sums = call.scratch[0]
        if self.clears:
            sums.zero_()
        sums.add_(call.out)
        call.out.copy_(sums)
        if self.past:
            sums.as_strided((self.past,), (1,), sums.storage_offset() + sums.numel()).zero_()


class LeadingRope(ReferenceBackend):
    """Rotates the leading dims instead of the trailing ones."""

    def qnorm_rope_kv_insert(
        self, q: Tensor, kv: Tensor, cache: PagedKVCache, slots: Tensor, positions: Tensor, table: Tensor, eps: Any
    ) -> None:
        rope = table.shape[-1]
        rolled = q.roll(-rope, -1)
        kernels.qnorm_rope(rolled, positions, table, eps)
        q.copy_(rolled.roll(rope, -1))
        keys = kernels.rotated(kv.roll(-rope, -1), positions, table).roll(rope, -1)
        self.quantize_and_insert_k_cache(keys, cache, slots)


class Overflow(ReferenceBackend):
    """Computes block * stride in 32 bits, reading and writing."""

    def __init__(self) -> None:
        super().__init__(prefill_keys="paged")

    def decode(self, call: AttentionCall) -> None:
        with_caches(int32_offsets)(call)


# ops with other arguments


Arguments = dict[str, Any]
INSERT, QUANTISE = "qnorm_rope_kv_insert", "quantize_and_insert_k_cache"
GATHER, PROJECT = "dequantize_and_gather_k_cache", "inv_rope_o_proj"


def with_op(
    name: str,
    *,
    after: Callable[[Any, Arguments], Any] | None = None,
    patched: tuple[Any, str, Any] | None = None,
    of: Callable[[], Any] = ReferenceBackend,
    **changes: Callable[[Arguments], Any],
) -> Callable[[], Any]:
    """Make a backend with one op that is wrong.

    changes: makes an argument from all arguments. after: makes the result from the right one and the arguments.
    patched: (module, name, replacement) while the op runs. of: makes the backend whose op is changed.
    """

    def make() -> Any:
        backend = of()
        right = getattr(backend, name)
        order = [*inspect.signature(right).parameters]

        def wrong(*args: Any, **options: Any) -> Any:
            arguments = {**dict(zip(order, args, strict=False)), **options}
            arguments |= {key: change(arguments) for key, change in changes.items()}
            with mock.patch.object(*patched) if patched else nullcontext():
                result = right(**arguments)
            return after(result, arguments) if after else result

        setattr(backend, name, wrong)
        return backend

    return make


def dense(tensor: Tensor) -> Tensor:
    """What stands where a tensor begins, if its rows are taken to follow each other."""
    return tensor.as_strided(tensor.shape, torch.empty(tensor.shape, device="meta").stride(), tensor.storage_offset())


def with_dense(op: str, name: str, *, of: Callable[[], Any] = ReferenceBackend) -> Callable[[], Any]:
    """As `with_op`, where the rows of an argument are taken to follow each other."""
    changes: dict[str, Any] = {name: lambda arguments: dense(arguments[name])}
    return with_op(op, of=of, **changes)


def first_slots(arguments: Arguments) -> Tensor:
    """The first 512 slots."""
    return torch.as_tensor(arguments["slot_mapping"][:512])


def slots_of_all_rows(arguments: Arguments) -> Tensor:
    """Slots of all rows, those of rows without one from 0 on."""
    slots, rows = arguments["slot_mapping"], arguments["kv"].shape[0]
    return torch.cat([slots, torch.arange(rows - slots.shape[0])])


def slot_0_for_want_of_slots(arguments: Arguments) -> Tensor:
    slots = arguments["slot_mapping"]
    return slots if slots.shape[0] else torch.zeros_like(arguments["positions"][:1])


def slots_from_the_end(arguments: Arguments) -> Tensor:
    """-1 is skipped, and other negative slots count from the end."""
    slots = arguments["slot_mapping"]
    return torch.as_tensor(slots.where(slots >= -1, slots % arguments["cache"].capacity))


def last_slot(arguments: Arguments) -> Tensor:
    """Slots behind the last one are taken to be the last one."""
    return torch.as_tensor(arguments["slot_mapping"].clamp(max=arguments["cache"].capacity - 1))


def unbounded_pages(arguments: Arguments) -> PagedKVCache:
    """Pages to the end of the memory, so that slots behind the last one are written there."""
    t = arguments["cache"].tensor
    left = t.untyped_storage().nbytes() // t.itemsize - t.storage_offset() - t[0].numel()
    pages = t.as_strided((1 + left // t.stride(0), *t.shape[1:]), t.stride())
    return PagedKVCache(pages, arguments["cache"].layout)


def positions_of_16_bits(arguments: Arguments) -> Tensor:
    return torch.as_tensor(arguments["positions"] % 2**16)


def keys_rotated_in_place(_: None, arguments: Arguments) -> None:
    kv, positions, table = (arguments[name] for name in ("kv", "positions", "cos_sin_cache"))
    kv.copy_(kernels.rotated(kv, positions, table))


def types_asserted(_: None, arguments: Arguments) -> None:
    """What core has checked: types of the fused insert's arguments."""
    assert arguments["kv"].dtype == arguments["q"].dtype
    types = [arguments[name].dtype for name in ("slot_mapping", "positions", "cos_sin_cache")]
    assert types == [torch.int64, torch.int64, torch.float32]


def rows_required(name: str) -> Callable[[Arguments], Tensor]:
    """The argument of this name, which must have a row."""

    def rows(arguments: Arguments) -> Tensor:
        if not arguments[name].shape[0]:
            raise RuntimeError("a grid of no programs")
        return torch.as_tensor(arguments[name])

    return rows


def first_requests(arguments: Arguments) -> Tensor:
    """Records of the first 32 requests."""
    lens = arguments["seq_lens"] if arguments["gather_lens"] is None else arguments["gather_lens"]
    return torch.as_tensor(lens.where(torch.arange(len(lens)) < 32, 0))


def first_records(arguments: Arguments) -> Tensor | None:
    """At most 1,024 records of a request."""
    lens = arguments["gather_lens"]
    return None if lens is None else torch.as_tensor(lens.clamp(max=1024))


def ends_of_first_records(arguments: Arguments) -> Tensor:
    lens, gathered = arguments["seq_lens"], arguments["gather_lens"]
    return torch.as_tensor(lens if gathered is None else lens - (gathered - 1024).clamp(min=0))


def first_blocks(arguments: Arguments) -> Tensor:
    return torch.as_tensor(arguments["block_table"][:, :1024])


def records_of_first_blocks(arguments: Arguments) -> Tensor:
    records = first_blocks(arguments).shape[1] * arguments["cache"].block_size
    return torch.as_tensor(arguments["seq_lens"].clamp(max=records))


def columns_behind_the_table(arguments: Arguments) -> Tensor:
    table, stride = arguments["block_table"], arguments["block_table"].stride(0)
    return torch.as_tensor(table.as_strided((table.shape[0], stride), (stride, 1)))


def rows_behind_the_output(arguments: Arguments) -> Tensor:
    out: Tensor = arguments["out"]
    if out.stride(0) <= out.stride(1) * out.shape[1]:
        return out
    return out.as_strided((out.shape[0], out.shape[1] + 1, out.shape[2]), out.stride(), out.storage_offset())


def rest_cleared(_: None, arguments: Arguments) -> None:
    """Rows in front of those that a gather writes are cleared."""
    if arguments["gather_lens"] is not None:
        arguments["out"][:, : arguments["offset"]] = 0


def absent_records_are_zeros(_: None, arguments: Arguments) -> None:
    arguments["out"][:, arguments["offset"] :][(arguments["seq_lens"] <= 0)] = 0


def angles_forward(arguments: Arguments) -> Tensor:
    """The table of angles, so that a rotation back becomes one forward."""
    cosines, sines = arguments["cos_sin_cache"].chunk(2, -1)
    return torch.cat([cosines, -sines], -1)


def first_outputs(arguments: Arguments) -> Tensor:
    """The first 512 rows of o; the others are zeros."""
    o: Tensor = arguments["o"]
    return o.where(torch.arange(len(o))[:, None, None] < 512, 0)


def weights_of_the_outputs_type(arguments: Arguments) -> Tensor:
    """The bytes of projection matrices are read as o's type."""
    wo_a = arguments["wo_a"]
    return torch.as_tensor(wo_a.view(arguments["o"].dtype)[:, : wo_a.shape[1]])

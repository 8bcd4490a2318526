"""Inputs of a case, made on the device from a seed. Letters: T tokens, H heads, D dims, R requests, W window."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4attn.core.cache.key_records import KEY_RECORDS
from dsv4attn.core.cache.layout import KVCacheLayout, PagedKVCache
from dsv4attn.core.cache.selected_keys import DenseIndices
from dsv4attn.core.model.geometry import LayerGeometry, LayerKind
from dsv4attn.core.reprs import frozen
from dsv4attn.tools.bench.accuracy import reference
from dsv4attn.tools.bench.cases import HEAD_DIM, WINDOW, WINDOW_PAGE, KernelCase

LAYOUT = KVCacheLayout.fp8_ds_mla()
_LAYOUTS = {str(layout.record_bytes): layout for layout in map(KVCacheLayout.of_record, KEY_RECORDS)}
_CHUNK = 65536
"""Records that are written at a time."""
_ELEMENTS = 2**24
"""Random numbers drawn at a time to choose keys from."""


class RandomNumbers:
    """Random numbers on a device, the same in every run for a seed."""

    def __init__(self, device: torch.device, seed: int) -> None:
        """Draw nothing yet."""
        self.device, self.generator = device, torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        """Standard normal numbers [*shape], fp32."""
        return torch.randn(shape, generator=self.generator, device=self.device, dtype=torch.float32)

    def permutation(self, count: int) -> Tensor:
        """[count] int64: the numbers below `count` in random order."""
        return torch.randperm(count, generator=self.generator, device=self.device)

    def pages(self, requests: int, columns: int) -> Tensor:
        """[R, N] int32 pages, none of which belongs to two requests."""
        return self.permutation(requests * columns).int().view(requests, columns)


@frozen(eq=False)
class CacheSegment:
    """One cache, and the keys and records that the case reads from it.

    cache: the paged cache.
    slots: [T, K] int32 slots of the keys of each token, with their lengths [T].
    local: [T, K] the same keys as positions among the gathered records of their request.
    table: [R, N] int32 pages.
    seq_lens: [R] int32 records of each request.
    gather_lens: [R] int32 number of its last records that are gathered.
    """

    cache: PagedKVCache
    slots: DenseIndices
    local: Tensor
    table: Tensor
    seq_lens: Tensor
    gather_lens: Tensor


@frozen(eq=False)
class Inputs:
    """Inputs of attention over pages, and for prefill kernels of the same attention over rows.

    case: the case.
    layer: geometry of the layer.
    q: [T, H, D] bf16.
    sink: [H] fp32.
    segments: window cache and, if the layer has one, compressed cache.
    rows: [R, M, D] bf16, each request's window records and from `offset` on its compressed ones; None without prefill.
    offset: first row of the compressed records.
    combined: keys of each token as indices into `rows`; None without prefill.
    keys: keys of all tokens.
    records: different records among them.
    stored: bytes of these records in the caches.
    """

    case: KernelCase
    layer: LayerGeometry
    q: Tensor
    sink: Tensor
    segments: tuple[CacheSegment, ...]
    rows: Tensor | None
    offset: int
    combined: DenseIndices | None
    keys: int
    records: int
    stored: int

    @property
    def flops(self) -> int:
        """Multiplications and additions of q . k and p . v, and nothing else."""
        return 4 * self.layer.num_heads * self.layer.head_dim * self.keys

    @property
    def bytes(self) -> int:
        """Least bytes that attention moves: every record once, q, out, and one index for each key."""
        read = 2 * HEAD_DIM * self.records if self.case.kernel == "prefill-rows" else self.stored
        return read + 2 * self.q.numel() * self.q.element_size() + 4 * self.keys


def query(case: KernelCase, random: RandomNumbers) -> Tensor:
    """[T, H, D] bf16, each element N(0, 1), as q-norm leaves it; with keys of that size logits are N(0, 1) too."""
    return random.normal(case.tokens, case.preset.heads, HEAD_DIM).bfloat16()


def fill(cache: PagedKVCache, random: RandomNumbers) -> None:
    """Fill all slots with normal random keys."""
    for slots in torch.arange(cache.capacity, device=cache.device).split(_CHUNK):
        keys = random.normal(len(slots), cache.layout.head_dim).bfloat16()
        reference().quantize_and_insert_k_cache(keys, cache, slots)


def read_records(cache: PagedKVCache, slots: Tensor) -> Tensor:
    """Keys [N, D] fp32 at slots [N] of a cache that is small enough to be read whole."""
    rows = torch.empty(1, cache.capacity, cache.layout.head_dim, dtype=torch.float32, device=cache.device)
    lens = torch.full((1,), cache.capacity, dtype=torch.int32, device=cache.device)
    table = torch.arange(cache.num_blocks, dtype=torch.int32, device=cache.device)[None]
    reference().dequantize_and_gather_k_cache(rows, cache, lens, None, table, 0)
    return rows[0, slots.long()]


def layouts(case: KernelCase) -> tuple[KVCacheLayout, KVCacheLayout]:
    """Layouts of the window cache and of the compressed cache, each in the first arrangement that it has."""
    window, compressed = (case.records or "584/584").split("/")
    return _LAYOUTS[window], _LAYOUTS[compressed]


def make_inputs(case: KernelCase, device: torch.device) -> Inputs:
    """Caches full of random keys, pages in random order, indices as an engine would make them."""
    preset, random = case.preset, RandomNumbers(device, case.seed)
    prefix, count = torch.tensor(case.requests, device=device, dtype=torch.int64).unbind(1)
    seqs = prefix + count
    request = torch.repeat_interleave(torch.arange(len(case.requests), device=device), count)
    position = torch.arange(case.tokens, device=device) - (count.cumsum(0) - count)[request] + prefix[request]

    first = (prefix - WINDOW + 1).clamp_min(0)
    start = (position - WINDOW + 1).clamp_min(0)
    numbers = start[:, None] + torch.arange(WINDOW, device=device)
    lens = (position + 1).clamp_max(WINDOW)
    swa, compressed = layouts(case)
    segments = [_segment(swa, WINDOW_PAGE, first, seqs, numbers, lens, request, random)]
    if preset.kind is not LayerKind.SWA:
        entries, visible = seqs // preset.ratio, (position + 1) // preset.ratio
        if preset.kind is LayerKind.CSA:
            numbers = _chosen(visible, int(entries.max()), preset.topk, random)
        else:
            numbers = torch.arange(preset.columns, device=device).expand(case.tokens, -1)
        lens = visible.clamp_max(preset.topk)
        nothing = torch.zeros_like(entries)
        segments.append(_segment(compressed, preset.page, nothing, entries, numbers, lens, request, random))
    rows, offset, combined = None, 0, None
    if case.kernel in ("prefill", "prefill-rows"):
        rows, offset, combined = _gathered(segments, request)
    keys = [int(segment.slots.lens.sum()) for segment in segments]
    records = [min(n, int(segment.gather_lens.sum())) for n, segment in zip(keys, segments, strict=True)]
    stored = sum(n * segment.cache.layout.record_bytes for n, segment in zip(records, segments, strict=True))
    q, sink = query(case, random), random.normal(preset.heads)
    sizes = sum(keys), sum(records), stored
    return Inputs(case, preset.layer, q, sink, tuple(segments), rows, offset, combined, *sizes)


def _segment(
    layout: KVCacheLayout,
    page: int,
    first: Tensor,
    ends: Tensor,
    numbers: Tensor,
    lens: Tensor,
    request: Tensor,
    random: RandomNumbers,
) -> CacheSegment:
    """A cache in which request r has its records first[r] .. ends[r]; before those its pages are gone."""
    device = first.device
    column = torch.arange(max(-(-int(ends.max()) // page), 1), device=device)
    is_visible = (column >= (first // page)[:, None]) & (column * page < ends[:, None])
    blocks = max(int(is_visible.sum()), 1)
    table = torch.full(is_visible.shape, -1, dtype=torch.int32, device=device)
    table[is_visible] = random.permutation(blocks)[: int(is_visible.sum())].int()
    cache = PagedKVCache.allocate(layout, blocks, page, device)
    fill(cache, random)
    absent = torch.arange(numbers.shape[1], device=device) >= lens[:, None]
    pages = table[request[:, None], (numbers // page).clamp(0, table.shape[1] - 1)]
    slots = (pages * page + numbers % page).masked_fill_(absent, -1).int()
    local = (numbers - first[request][:, None]).masked_fill(absent, -1)
    return CacheSegment(cache, DenseIndices(slots, lens.int()), local, table, ends.int(), (ends - first).int())


def _chosen(visible: Tensor, most: int, topk: int, random: RandomNumbers) -> Tensor:
    """[T, K] distinct numbers below visible [T], in no order. Columns after these hold arbitrary numbers."""
    out = torch.zeros(visible.shape[0], topk, dtype=torch.int64, device=visible.device)
    numbers, count = torch.arange(most, device=visible.device), min(topk, most)
    for part in torch.arange(visible.shape[0], device=visible.device).split(max(_ELEMENTS // max(most, 1), 1)):
        draw = torch.rand(part.shape[0], most, generator=random.generator, device=visible.device, dtype=torch.float32)
        draw.masked_fill_(numbers >= visible[part, None], 2.0)
        out[part, :count] = draw.topk(count, largest=False).indices
    return out


def _gathered(segments: list[CacheSegment], request: Tensor) -> tuple[Tensor, int, DenseIndices]:
    """Rows as gathering leaves them, where the compressed ones begin, and combined indices without holes."""
    widths = [int(segment.gather_lens.max()) for segment in segments]
    requests, device = segments[0].table.shape[0], request.device
    rows = torch.zeros(requests, sum(widths), HEAD_DIM, dtype=torch.bfloat16, device=device)
    columns, offset = [], 0
    for segment, width in zip(segments, widths, strict=True):
        reference().dequantize_and_gather_k_cache(
            rows, segment.cache, segment.seq_lens, segment.gather_lens, segment.table, offset
        )
        absent = segment.local < 0
        columns.append((segment.local + offset + request[:, None] * rows.shape[1]).masked_fill_(absent, -1))
        offset += width
    combined = torch.cat(columns, 1)
    # keys within the lengths first, in their order
    order = (combined < 0).int().argsort(dim=1, stable=True)
    lens = (combined >= 0).sum(1).int()
    return rows, widths[0], DenseIndices(combined.gather(1, order).int(), lens)

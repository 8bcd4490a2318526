"""FlashInfer's wrapper, played in torch: its signature, its demands, and the numbers its documentation promises.

Written from the documented contract. It asks for all that the compiled module asks for, and in two places for more: a
slot outside its cache, of which the real one reads whatever stands there, is an error; and scratch is filled with NaN,
so that a test fails if it overlaps with anything else. Arithmetic is fp32, without the rounding to fp8.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from math import inf, log2, nan
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor

LOG2E = log2(2.718281828459045)
HEADS = (8, 16, 32, 64, 128)
RECORD, NOPE, DATA, GROUP = 584, 448, 576, 64
DECODE = 64


class Segment(NamedTuple):
    """One cache as it is described to the planner."""

    width: int
    page_size: int
    page_stride: int
    index_stride: int


class Facts(NamedTuple):
    """What the planner of the real package knows of a call."""

    tokens: int
    heads: int
    main: Segment
    extra: Segment | None
    lse_stride: int
    has_sink: bool

    @property
    def scratch(self) -> int:
        """Rows of parts that decode kernels write."""
        splits = sum(-(-segment.width // 64) for segment in (self.main, self.extra) if segment is not None)
        return self.tokens * (8 if self.heads == 8 else -(-self.heads // 16) * 16) * splits

    def phases(self) -> Iterator[str]:
        """Which kernels may serve it."""
        if self.tokens <= DECODE:
            yield "decode"
        dense = all(segment is None or segment.index_stride == segment.width for segment in (self.main, self.extra))
        if self.heads in HEADS and self.main.width % 64 == 0 and dense:
            yield "prefill"


def need(condition: bool, text: str) -> None:
    """Refuse a call."""
    if not condition:
        raise ValueError(text)


def inspected(
    q: Tensor,
    cache: Tensor,
    indices: Tensor,
    output: Tensor,
    lengths: Tensor | None,
    sink: Tensor | None,
    extra: Tensor | None,
    extra_indices: Tensor | None,
    extra_lengths: Tensor | None,
    lse: Tensor | None,
    mid: Tensor | None,
    mlse: Tensor | None,
    records: tuple[int, int] = (RECORD, RECORD),
) -> Facts:
    """Everything that is asked of tensors. Raises ValueError. records: bytes of a record of each cache."""
    need(q.ndim == 3 and q.dtype == torch.bfloat16 and q.is_contiguous(), "q: contiguous [T, H, D] bf16")
    tokens, heads, dim = q.shape
    need(tokens > 0 and 0 < heads <= 128 and dim == 512, "q: 1 .. 128 heads of 512")
    need(output.shape == q.shape and output.dtype == q.dtype and output.is_contiguous(), "output: like q")
    need(q.data_ptr() % 16 == 0 and output.data_ptr() % 16 == 0, "q and output: 16-byte aligned")
    need((extra is None) == (extra_indices is None), "extra cache and indices: together")
    need(extra_lengths is None or extra is not None, "extra lengths: with a cache")
    need((mid is None) == (mlse is None), "scratch: together")
    for name, vector, count, dtype in (
        ("topk_length", lengths, tokens, torch.int32),
        ("extra_topk_length", extra_lengths, tokens, torch.int32),
        ("attn_sink", sink, heads, torch.float32),
    ):
        if vector is not None:
            good = vector.shape == (count,) and vector.dtype == dtype and vector.is_contiguous()
            need(good, f"{name}: contiguous [{count}] of {dtype}")
    if lse is not None:
        good = lse.ndim == 2 and lse.dtype == torch.float32 and lse.shape[0] >= tokens and lse.shape[1] >= heads
        need(good and lse.stride(1) == 1 and lse.stride(0) >= heads, "out_lse: [T, H] fp32, rows apart")
    for memory, dtype in ((mid, torch.bfloat16), (mlse, torch.float32)):
        if memory is not None:
            good = memory.dtype == dtype and memory.is_contiguous() and memory.data_ptr() % 16 == 0
            need(good, f"scratch: contiguous aligned {dtype}")
    tensors = (cache, indices, output, lengths, sink, extra, extra_indices, extra_lengths, lse, mid, mlse)
    need(all(tensor is None or tensor.device == q.device for tensor in tensors), "tensors: on one device")
    main = segment(tokens, cache, indices, records[0])
    second = None if extra is None or extra_indices is None else segment(tokens, extra, extra_indices, records[1])
    return Facts(tokens, heads, main, second, heads if lse is None else lse.stride(0), sink is not None)


def segment(tokens: int, cache: Tensor, indices: Tensor, record: int = RECORD) -> Segment:
    """A cache [B, P, 1, record] or [B, 1, P, record] and its rows of slots."""
    need(indices.dtype == torch.int32 and indices.ndim == 2 and indices.shape[0] == tokens, "indices: [T, K] int32")
    need(indices.shape[1] > 0, "indices: at least one column")
    need(indices.stride(1) == 1 and indices.stride(0) >= indices.shape[1], "indices: rows that do not overlap")
    need(cache.dtype == torch.uint8 and cache.ndim == 4 and cache.stride(3) == 1, "cache: 4-D bytes")
    need(cache.data_ptr() % 16 == 0 and cache.stride(0) % 16 == 0, "cache: pages at multiples of 16 bytes")
    need(1 in cache.shape[1:3], "cache: one head")
    axis = 2 if cache.shape[1] == 1 else 1
    size = cache.shape[axis]
    good = size > 0 and cache.shape[3] == record and cache.stride(axis) == record
    need(good, f"cache: packed rows of {record} bytes")
    need(cache.stride(0) >= size * record, "cache: pages that do not overlap")
    return Segment(indices.shape[1], size, cache.stride(0), indices.stride(0))


def rows_of(cache: Tensor, size: int, slots: Tensor) -> Tensor:
    """[n, 512] fp32 keys in these slots: 448 codes under scales of 64 each, then 64 values in bf16."""
    page = cache.as_strided((cache.shape[0], cache.stride(0)), (cache.stride(0), 1))
    if cache.shape[0] == 1:
        page = cache.as_strided((1, size * RECORD), (size * RECORD, 1))
    block, place = (slots // size)[:, None], (slots % size)[:, None]
    data = page[block, place * DATA + torch.arange(DATA, device=slots.device)]
    scales = page[block, size * DATA + place * 8 + torch.arange(NOPE // GROUP, device=slots.device)].int()
    values = data[:, :NOPE].contiguous().view(torch.float8_e4m3fn).float().unflatten(1, (-1, GROUP))
    powers = torch.exp2(scales.double() - 127).masked_fill(scales == 255, nan).float()
    return torch.cat([(values * powers[..., None]).flatten(1), data[:, NOPE:].contiguous().view(torch.bfloat16)], 1)


class RecordingWrapper:
    """Takes what `SparseMLASm120Wrapper` takes. calls: arguments of each run, by name."""

    refuses: Exception | None = None
    """Raised on construction."""
    records: tuple[int, int] = (RECORD, RECORD)
    readers: tuple[Callable[..., Tensor], Callable[..., Tensor]] = (rows_of, rows_of)

    def __init__(
        self, max_num_tokens: int | None = None, max_num_heads: int | None = None, *, device: Any = None
    ) -> None:
        if self.refuses is not None:
            raise self.refuses
        self.device = torch.device(device)
        self.calls: list[dict[str, Any]] = []

    def run(
        self,
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        indices: torch.Tensor,
        output: torch.Tensor,
        sm_scale: float,
        *,
        topk_length: Optional[torch.Tensor] = None,  # noqa: UP045 - the signature, letter by letter
        attn_sink: Optional[torch.Tensor] = None,  # noqa: UP045
        extra_kv_cache: Optional[torch.Tensor] = None,  # noqa: UP045
        extra_indices: Optional[torch.Tensor] = None,  # noqa: UP045
        extra_topk_length: Optional[torch.Tensor] = None,  # noqa: UP045
        out_lse: Optional[torch.Tensor] = None,  # noqa: UP045
        mid_out: Optional[torch.Tensor] = None,  # noqa: UP045
        mid_lse: Optional[torch.Tensor] = None,  # noqa: UP045
        prefill_impl: Optional[str] = None,  # noqa: UP045
        return_lse: bool = False,
        lse_scale: float = 1.0,
    ) -> Optional[torch.Tensor]:  # noqa: UP045
        """Check the call, spoil the scratch, then write output and lse."""
        arguments = dict(locals())
        self.calls.append({name: value for name, value in arguments.items() if name != "self"})
        need(all(type(number) is float for number in (sm_scale, lse_scale)), "scales: floats")
        need(q.device == self.device, "q: on the wrapper's device")
        caches = (extra_kv_cache, extra_indices, extra_topk_length)
        written = attn_sink, *caches, out_lse, mid_out, mid_lse
        facts = inspected(q, kv_cache, indices, output, topk_length, *written, self.records)
        need(bool(list(facts.phases())), f"no kernel for {facts}")
        # the real one would allocate what it is not given
        assert out_lse is not None
        assert mid_out is not None
        assert mid_lse is not None
        if facts.tokens <= DECODE:
            need(mid_out.numel() >= facts.scratch * 512 and mid_lse.numel() >= facts.scratch, "scratch: too small")
        mid_out.fill_(nan)
        mid_lse.fill_(nan)
        output.fill_(nan)
        lse = out_lse[: facts.tokens, : facts.heads]
        lse.fill_(nan)
        pairs = [(kv_cache, facts.main, indices, topk_length)]
        if facts.extra is not None:
            pairs.append((extra_kv_cache, facts.extra, extra_indices, extra_topk_length))  # type: ignore[arg-type]
        for token in range(facts.tokens):
            keys = torch.cat([self._keys(i, *pair, token) for i, pair in enumerate(pairs)])
            z = q[token].float() @ keys.T * (sm_scale * LOG2E)
            logits = z if attn_sink is None else torch.cat([z, attn_sink[:, None] * LOG2E], 1)
            top = logits.amax(1, keepdim=True) if logits.shape[1] else logits.new_zeros(facts.heads, 1)
            finite = top.clamp(-1e30, 1e30)
            total = torch.exp2(logits - finite).sum(1)
            output[token] = torch.where(total > 0, 1 / total, 0)[:, None] * (torch.exp2(z - finite) @ keys)
            lse[token] = (finite[:, 0] + total.log2()).masked_fill(total == 0, -inf) * lse_scale
        return lse if return_lse else None

    def _keys(
        self, number: int, cache: Tensor, facts: Segment, indices: Tensor, lengths: Tensor | None, token: int
    ) -> Tensor:
        count = facts.width if lengths is None else min(max(int(lengths[token]), 0), facts.width)
        slots = indices[token, :count].long()
        slots = slots[slots >= 0]
        assert (slots < cache.shape[0] * facts.page_size).all(), "memory outside of the cache is read"
        return self.readers[number](cache, facts.page_size, slots)


def rows_of_codes(
    cache: Tensor, size: int, slots: Tensor, codes: int, group: int, width: int = 512, inline: bool = False
) -> Tensor:
    """[n, 512] fp32 keys of a page of codes, and bf16 values, of all records, then their scales.

    codes: bytes of codes of a record: as many as values of fp8 under powers of two, or half as many of e2m1 under e4m3.
    width: values that are codes; the others are bf16. inline: whether scales follow the codes of their own record.
    """
    data, count = codes + 2 * (512 - width), -(-width // group)
    scales_of = {528: 16, 288: 32, 384: 32}[cache.shape[3]]
    if inline:
        # indices are rows of the whole cache, those of padding included; scales follow their codes
        need(cache.shape[0] == 1 or cache.stride(0) == size * cache.stride(1), "cache: dense pages")
        rows = cache.as_strided((cache.shape[0] * size, cache.shape[3]), (cache.stride(1), 1))[slots]
        record, scale = rows[:, :data], rows[:, data : data + count]
    else:
        page = cache.as_strided((cache.shape[0], size * cache.shape[3]), (cache.stride(0), 1))
        block, place = (slots // size)[:, None], (slots % size)[:, None]
        record = page[block, place * data + torch.arange(data)]
        scale = page[block, size * data + place * scales_of + torch.arange(count)]
    if codes == width:
        values, scales = record[:, :codes].contiguous().view(torch.float8_e4m3fn).double(), scale.double() - 127
        scales = torch.exp2(scales).masked_fill(scale == 255, nan)
    else:
        grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
        grid = torch.cat([grid, -grid])
        pairs = record[:, :codes].long()
        values = torch.stack([grid[pairs % 16], grid[pairs // 16]], -1).flatten(1)
        scales = scale.contiguous().view(torch.float8_e4m3fn).double()
    coded = (values.unflatten(1, (-1, group)) * scales[..., None]).flatten(1).float()
    return torch.cat([coded, record[:, codes:].contiguous().view(torch.bfloat16).float()], 1)


class FormatsWrapper(RecordingWrapper):
    """The wrapper of a release that has all formats of FlashInfer's caches."""

    def __init__(
        self,
        max_num_tokens: int | None = None,
        max_num_heads: int | None = None,
        *,
        kv_scale_format: str = "auto",
        kv_cache_format: str = "fp8",
        extra_kv_fp4: bool = False,
        device: Any = None,
    ) -> None:
        super().__init__(max_num_tokens, max_num_heads, device=device)
        main = partial(rows_of_codes, codes=512, group=32)
        fp4, nvfp4 = partial(rows_of_codes, codes=256, group=16), partial(rows_of_codes, codes=224, group=16, width=448)
        if kv_cache_format == "nvfp4":
            self.records, self.readers = (384, 384), (nvfp4, nvfp4)
        elif kv_scale_format in ("ue8m0_g32", "ue8m0_g32_inline"):
            extra, inline = fp4 if extra_kv_fp4 else main, kv_scale_format.endswith("_inline")
            self.records = 528, 288 if extra_kv_fp4 else 528
            self.readers = partial(main, inline=inline), partial(extra, inline=inline)


class Config:
    """What the package says of this model's cache: nearly everything, or with `old` the fixed sets of before."""

    page_block_size, max_num_tokens, min_topk, max_num_heads, bytes_per_token = 64, DECODE, 1, 128, RECORD

    def __init__(self, *, old: bool = False) -> None:
        self.old = old
        if not old:
            self.topk_is_runtime = self.page_block_size_is_runtime = True

    def supported_num_heads(self) -> tuple[int, ...]:
        """Head counts with kernels."""
        return HEADS if self.old else tuple(range(1, 129))

    def supported_topk(self) -> tuple[int, ...]:
        """Widths with kernels, or those that were measured."""
        return (128, 192, 256, 512, 1024)

    def supports_decode(
        self, num_heads: int, topk: int, *, num_tokens: int = 1, page_block_size: int | None = None
    ) -> bool:
        """Whether decode kernels take a call."""
        known = not self.old or (topk in self.supported_topk() and page_block_size in (None, 64))
        return known and num_heads in self.supported_num_heads() and num_tokens <= DECODE


class NarrowConfig(Config):
    """What the package says of the format "nvfp4": fixed sets."""

    bytes_per_token, extra_page_block_sizes = 384, frozenset({2, 32, 64})

    def __init__(self) -> None:
        super().__init__()
        self.topk_is_runtime = False

    def supported_num_heads(self) -> tuple[int, ...]:
        """Head counts with kernels."""
        return HEADS

    def supported_topk(self) -> tuple[int, ...]:
        """Widths with kernels."""
        return (128, 512)


class WideConfig(Config):
    """What the package says of V4.1's records."""

    bytes_per_token = 528


def all_configs(*, kv_cache_format: str = "fp8") -> dict[str, Config]:
    """What a release with all formats says of itself."""
    if kv_cache_format == "nvfp4":
        return {"dsv4": NarrowConfig()}
    return {"dsv4": Config(), "dsv4_1": WideConfig(), "dsv4_1_inline": WideConfig()}

"""Calls over small poisoned caches, and what float64 says of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from math import inf

import attrs
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dsv4attn.backends.sm120.flashinfer import FlashInferAttention
from dsv4attn.backends.sm120.probe import InstalledFlashInfer
from dsv4attn.core.cache.layout import KVCacheLayout, PagedKVCache
from dsv4attn.core.cache.selected_keys import DenseIndices, PagedKeys
from dsv4attn.core.contract.backend import AttentionCall, AttentionOptions
from dsv4attn.core.contract.problem import CacheFacts, Problem
from dsv4attn.core.memory.workspace import WorkspaceManager
from dsv4attn.core.model.geometry import LayerGeometry, LayerKind, Rope
from dsv4attn.testing.kit.oracle_cache import place_of
from dsv4attn.testing.kit.tolerances import Expected, read_row, written
from tests.backends._triton.cache.caches import DEVICE
from tests.backends.sm120.fake_flashinfer import Config, RecordingWrapper

LAYOUT = KVCacheLayout.fp8_ds_mla()
OUTSIDE = (10**6, 2**31 - 1, -7, -(2**31), -1)


def layer_of(heads: int, *, window: int = 128, topk: int = 0) -> LayerGeometry:
    """A layer of the model with this number of heads."""
    kind, ratio = (LayerKind.CSA, 4) if topk else (LayerKind.SWA, 1)
    return LayerGeometry(kind, ratio, heads, 512, Rope(64, 10000.0), window, topk)


def installed_flashinfer(
    wrapper: type = RecordingWrapper, *, old: bool = False, others: tuple[InstalledFlashInfer, ...] = ()
) -> InstalledFlashInfer:
    """FlashInfer as `find` returns it. others: the same for other formats."""
    return InstalledFlashInfer.of("0.7.2", wrapper, Config(old=old), others=others)


@attrs.frozen(eq=False, slots=False)
class Trial:
    """Rows of queries. Arenas hold slots, -1, with `outside` slots that do not exist, and after the lengths garbage.

    Of three rows one has no key at all, and one is longer than it has columns. pages: records of a page in each cache.
    """

    heads: int = 8
    tokens: int = 5
    widths: tuple[int, int] = (6, 9)
    pages: tuple[int, int] = (4, 2)
    sinks: Sequence[float] | None = None
    outside: bool = True
    seed: int = 0
    blocks: tuple[int, int] = (5, 7)
    layouts: tuple[KVCacheLayout, KVCacheLayout] = (LAYOUT, LAYOUT)

    @property
    def layer(self) -> LayerGeometry:
        """The layer that is called."""
        return layer_of(self.heads, window=max(self.widths[0], 1), topk=self.widths[1])

    @property
    def problem(self) -> Problem:
        """The same as a question."""
        facts = [CacheFacts.of(layout, size) for layout, size in zip(self.layouts, self.pages, strict=True)]
        second = facts[1] if self.widths[1] else None
        return Problem("decode", self.layer, facts[0], second, self.widths[1])

    @cached_property
    def sink(self) -> Tensor | None:
        """[H], the given ones over and over."""
        return None if self.sinks is None else torch.tensor(np.resize(self.sinks, self.heads)).float().to(DEVICE)

    @cached_property
    def q(self) -> Tensor:
        """[T, H, 512]."""
        rng = torch.Generator().manual_seed(self.seed)
        return torch.randn(self.tokens, self.heads, 512, generator=rng).bfloat16().to(DEVICE)

    @cached_property
    def caches(self) -> list[tuple[PagedKVCache, NDArray[np.float64]]]:
        """Each cache, its even slots written by the oracle and everything else NaN, and its keys."""
        rng, drawn = np.random.default_rng((self.seed, 1)), []
        for layout, size, blocks in zip(self.layouts, self.pages, self.blocks, strict=True):
            cache = PagedKVCache.allocate(layout, blocks, size, DEVICE)
            raw = cache.tensor.as_strided((blocks, cache.page_stride), (cache.page_stride, 1)).fill_(0xFF)
            keys = np.full((blocks * size, 512), np.nan)
            for slot in range(0, blocks * size, 2):
                record, (block, place) = written(rng.standard_normal(512), layout), divmod(slot, size)
                raw[block, torch.from_numpy(place_of(layout, place, size))] = torch.from_numpy(record.copy()).to(DEVICE)
                keys[slot] = read_row(record, layout)
            drawn.append((cache, keys))
        return drawn

    @cached_property
    def arenas(self) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """(slots, lengths) of each segment."""
        rng, drawn = np.random.default_rng((self.seed, 2)), []
        for width, size, blocks in zip(self.widths, self.pages, self.blocks, strict=True):
            slots = rng.choice(np.arange(0, max(size * blocks, 1), 2), (self.tokens, width))
            other = (*OUTSIDE, size * blocks) if self.outside else (-1,)
            slots = np.where(rng.random(slots.shape) < 0.3, rng.choice(other, slots.shape), slots)
            lens = rng.integers(0, width + 1, self.tokens)
            lens[::3], lens[2::3] = 0, width + 5
            for row, count in enumerate(lens):
                # odd slots hold NaN
                slots[row, count:] = rng.choice((1, *other), max(width - count, 0))
            drawn.append((slots, lens))
        return drawn

    @cached_property
    def expected(self) -> Expected:
        """What float64 says, row by row."""
        answer = Expected.empty(self.tokens, self.heads, 512)
        sink = None if self.sink is None else self.sink.double().cpu().numpy()
        for row, q in enumerate(self.q.double().cpu().numpy()):
            records: list[NDArray[np.float64]] = []
            for (cache, keys), (slots, lens) in zip(self.caches, self.arenas, strict=True):
                named = slots[row, : lens[row]]
                records += list(keys[named[(named >= 0) & (named < cache.capacity)]])
            with np.errstate(over="ignore"):
                answer.judge(row, q, records, sink, self.layer.scale)
        return answer

    def keys(self, *, pad: int = 0) -> tuple[PagedKeys, ...]:
        """Segments as a backend gets them. pad: columns of garbage between rows of indices."""
        paged = []
        for (cache, _), (slots, lens) in zip(self.caches, self.arenas, strict=True):
            wide = torch.full((self.tokens, slots.shape[1] + pad), 0x7FC00000, dtype=torch.int32)
            wide[:, : slots.shape[1]] = torch.from_numpy(slots).int()
            indices = wide.to(DEVICE)[:, : slots.shape[1]]
            paged.append(PagedKeys(cache, DenseIndices(indices, torch.from_numpy(lens).int().to(DEVICE))))
        return tuple(paged) if self.widths[1] else tuple(paged[:1])

    def call(self, *, lse: bool = False, pad: int = 0, empty_lse: float = -inf) -> AttentionCall:
        """The call, outputs NaN, scratch not there yet."""
        lse_out = torch.full((self.tokens, self.heads), torch.nan, device=DEVICE) if lse else None
        out = torch.full_like(self.q, torch.nan)
        return AttentionCall(
            self.layer,
            self.q,
            self.keys(pad=pad),
            self.sink,
            out,
            lse_out,
            options=AttentionOptions(empty_lse=empty_lse),
        )

    def run(self, attention: FlashInferAttention, call: AttentionCall) -> AttentionCall:
        """Run it over scratch full of NaN, and of slots that hold NaN, and look after every view of it."""
        memory = WorkspaceManager(DEVICE, debug=True)
        views = memory.get_simultaneous(*attention.scratch(self.layer, self.tokens, *self.widths))
        for view in views:
            if view.dtype == torch.int32:
                view.fill_(1)
        attention.run(call, views)
        memory.check_canaries()
        return call

"""Backends that compute something wrong, each as a real backend once did. All other parts are the reference's."""

from __future__ import annotations

from typing import Any

import torch
from attrs import evolve
from torch import Tensor

from dsv4attn.backends.reference.launch import ReferenceBackend
from dsv4attn.core.cache.layout import PagedKVCache
from dsv4attn.core.cache.selected_keys import DenseIndices, GatheredKeys
from dsv4attn.core.contract.backend import AttentionCall
from tests.tools.replay.small import GEOMETRY


class WithoutSink(ReferenceBackend):
    def decode(self, call: AttentionCall) -> None:
        super().decode(evolve(call, attn_sink=None))


class WithoutSinkInPrefill(ReferenceBackend):
    def prefill(self, call: AttentionCall) -> None:
        self.decode(evolve(call, attn_sink=None))


class LogOfBaseTwo(ReferenceBackend):
    def decode(self, call: AttentionCall) -> None:
        super().decode(call)
        assert call.lse is not None
        call.lse.mul_(1.4426950408889634)


class LastRowNotWritten(ReferenceBackend):
    def decode(self, call: AttentionCall) -> None:
        done = call.out.clone()
        super().decode(evolve(call, out=done))
        call.out[:-1] = done[:-1]


class Reindexed(ReferenceBackend):
    """Changes every index list before it attends."""

    def changed(self, rows: DenseIndices, segment: str) -> DenseIndices:
        """Segment: "window", "entries", or "gathered" for both in one list, entries first."""
        raise NotImplementedError

    def decode(self, call: AttentionCall) -> None:
        keys: Any
        if isinstance(call.keys, GatheredKeys):
            assert isinstance(call.keys.rows, DenseIndices)
            keys = evolve(call.keys, rows=self.changed(call.keys.rows, "gathered"))
        else:
            keys = []
            for part, segment in zip(call.keys, ("window", "entries"), strict=False):
                assert isinstance(part.rows, DenseIndices)
                keys.append(evolve(part, rows=self.changed(part.rows, segment)))
        super().decode(evolve(call, keys=keys))


class NeighboursKeys(Reindexed):
    """Each row reads what the row before it should."""

    def changed(self, rows: DenseIndices, segment: str) -> DenseIndices:
        return DenseIndices(rows.indices.roll(1, 0), rows.lens.roll(1, 0))


class AbsentIsSlotZero(Reindexed):
    """Lengths are not looked at, and -1 is read as slot 0."""

    def changed(self, rows: DenseIndices, segment: str) -> DenseIndices:
        return DenseIndices(rows.indices.clamp(min=0), torch.full_like(rows.lens, rows.indices.shape[1]))


class NarrowWindow(Reindexed):
    """A full window lacks its oldest key."""

    def changed(self, rows: DenseIndices, segment: str) -> DenseIndices:
        if segment == "entries":
            return rows
        oldest = (rows.lens - GEOMETRY.window).long()
        kept = rows.indices.gather(1, oldest.clamp(min=0)[:, None])
        changed = rows.indices.scatter(1, oldest.clamp(min=0)[:, None], kept.masked_fill((oldest >= 0)[:, None], -1))
        return DenseIndices(changed, rows.lens)


class NeighboursTable(ReferenceBackend):
    """A gather takes the block table of the request before."""

    def dequantize_and_gather_k_cache(
        self, out: Tensor, cache: PagedKVCache, seq_lens: Tensor, lens: Tensor | None, table: Tensor, offset: int
    ) -> None:
        super().dequantize_and_gather_k_cache(out, cache, seq_lens, lens, table.roll(1, 0), offset)


class ScalesOfTheNextRecord(ReferenceBackend):
    """Scales are addressed with an offset of one record."""

    def qnorm_rope_kv_insert(self, q: Tensor, kv: Tensor, cache: PagedKVCache, *rest: Any) -> None:
        scales = cache.region("scale")
        scales.copy_(scales.roll(-1, 1))
        super().qnorm_rope_kv_insert(q, kv, cache, *rest)
        scales.copy_(scales.roll(1, 1))


class KeysNotRotated(ReferenceBackend):
    def qnorm_rope_kv_insert(self, q: Tensor, kv: Tensor, cache: PagedKVCache, slots: Tensor, *rest: Any) -> None:
        super().qnorm_rope_kv_insert(q, kv, cache, slots[:0], *rest)
        self.quantize_and_insert_k_cache(kv, cache, slots)


class NormOfAllHeads(ReferenceBackend):
    def qnorm_rope_kv_insert(self, q: Tensor, *rest: Any) -> None:
        louder = q.float().norm(dim=-1, keepdim=True) / q.float().norm(dim=(-2, -1), keepdim=True)
        super().qnorm_rope_kv_insert(q, *rest)
        q.mul_(louder * q.shape[1] ** 0.5)


class ProjectsRotated(ReferenceBackend):
    """The output keeps the rotation of its keys."""

    def inv_rope_o_proj(self, o: Tensor, positions: Tensor, *rest: Any) -> Tensor:
        return super().inv_rope_o_proj(o, torch.zeros_like(positions), *rest)


class Interrupted(ReferenceBackend):
    """Ctrl-C in the middle of an attention."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        self.left = calls

    def decode(self, call: AttentionCall) -> None:
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt
        super().decode(call)

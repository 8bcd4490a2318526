"""Backends that are right alone and wrong where ranks share the compressed entries: more mutants."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import torch

from dsv4attn.backends.reference.launch import ReferenceBackend
from dsv4attn.core.cache.ownership import Ownership
from dsv4attn.core.cache.selected_keys import DenseIndices, GatheredKeys, PagedKeys
from dsv4attn.core.contract.backend import AttentionCall
from dsv4attn.core.contract.builder_ops import BuilderOps
from dsv4attn.core.torch_ops import index_ops as indices
from tests.testing.mutants import attend


def no_sink_is_zero(call: AttentionCall) -> None:
    """A kernel without a branch for calls that have no sink is given zeros."""
    sink = torch.zeros(call.q.shape[1]) if call.attn_sink is None else call.attn_sink
    attend(attrs.evolve(call, attn_sink=sink))


def zero_sink_in_lse(call: AttentionCall) -> None:
    """The same, where the sum of weights begins with that of the sink."""
    attend(call)
    if call.lse is not None and call.attn_sink is None:
        call.lse.copy_(torch.logaddexp(call.lse, torch.zeros(())))


def empty_lse(value: float) -> Callable[[AttentionCall], None]:
    """A running maximum that begins with a finite number."""

    def wrong(call: AttentionCall) -> None:
        attend(call)
        if call.lse is not None:
            call.lse.masked_fill_(call.lse == -torch.inf, value)

    return wrong


class WindowsKept(ReferenceBackend):
    """Binds the windows of a step once, as those of rank 0, and never sees that another rank has none."""

    def __init__(self) -> None:
        super().__init__(prefill_keys="paged")
        self._kept: DenseIndices | None = None

    def decode(self, call: AttentionCall) -> None:
        assert not isinstance(call.keys, GatheredKeys)
        window, *others = call.keys
        rows = window.rows
        assert isinstance(rows, DenseIndices)
        if rows.lens.any():
            self._kept = DenseIndices(rows.indices.clone(), rows.lens.clone())
        elif others and self._kept is not None and self._kept.lens.shape == rows.lens.shape:
            window = PagedKeys(window.cache, self._kept)
        super().decode(attrs.evolve(call, keys=[window, *others]))

    prefill = decode


class OneRanksSlots(ReferenceBackend):
    """Its own op for the slots of a rank's entries takes every rank for the first."""

    def __init__(self) -> None:
        super().__init__()
        self.builder_ops = BuilderOps(build_owned_slot_mapping=_slots_of_the_first_rank)


def _slots_of_the_first_rank(ownership: Ownership, *arguments: Any, **options: Any) -> None:
    indices.build_owned_slot_mapping(attrs.evolve(ownership, rank=0), *arguments, **options)

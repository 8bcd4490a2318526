"""Backends that share too much between layers, cut numbers to fewer bits, or know no running maximum: more mutants."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import torch
from attrs import evolve
from torch import Tensor

from dsv4attn.backends.reference import kernels
from dsv4attn.backends.reference.launch import ReferenceBackend
from dsv4attn.core.cache.selected_keys import DenseIndices, GatheredKeys
from dsv4attn.core.contract.backend import AttentionCall, Phase, Run
from dsv4attn.core.contract.index_ops import IndexOps, prepared_op
from dsv4attn.core.torch_ops import index_ops as indices
from tests.testing.mutants import attend, int32_offsets


class FirstLayers(ReferenceBackend):
    """A prepared call binds an argument of the first layer, which then serves the other layers of the step.

    fields: of `AttentionTensors`. phase: whose calls do so.
    """

    def __init__(self, *fields: str, phase: str = "") -> None:
        super().__init__()
        self._fields, self._phase = fields, phase

    def prepare(self, phase: Phase, call: AttentionCall) -> Run:
        prepared = super().prepare(phase, call)
        first = call.tensors._asdict()
        if not phase.value.startswith(self._phase):
            return prepared

        return lambda tensors: prepared(tensors._replace(**{field: first[field] for field in self._fields}))


@prepared_op
def _first_translation(topk: Tensor, *args: Any, out: tuple[Tensor, Tensor]) -> Callable[[Tensor], None]:
    """A prepared op that writes what the first layer had."""
    true: Any = indices.compute_global_topk_indices_and_lens
    true(topk, *args, out=out)
    first = [tensor.clone() for tensor in out]

    def replay(_: Tensor) -> None:
        for tensor, values in zip(out, first, strict=True):
            tensor.copy_(values)

    return replay


def replaying() -> Any:
    """A backend that translates top-k values once a step."""
    backend = ReferenceBackend()
    backend.index_ops = evolve(IndexOps(), compute_global_topk_indices_and_lens=_first_translation)
    return backend


def without_maximum(call: AttentionCall) -> None:
    """Sums of exp(z), with nothing subtracted from z."""
    every = slice(0, call.q.shape[0])
    gathered = isinstance(call.keys, GatheredKeys)
    k, present = kernels.read_gathered(call.keys, every) if gathered else kernels.read_paged(call.keys, every)  # type: ignore[arg-type]
    z = torch.bmm(call.q.float(), k.mT) * call.layer.scale
    p = z.exp().masked_fill(~present[:, None], 0)
    total = p.sum(-1, keepdim=True)
    row_lse = total.log()
    weight = 1 if call.attn_sink is None else torch.sigmoid(row_lse - call.attn_sink[:, None])
    call.out.copy_(torch.bmm(p, k) * (weight / total).masked_fill(~present.any(1)[:, None, None], 0))
    if call.lse is not None:
        call.lse.copy_(row_lse[..., 0])


def own_scale(call: AttentionCall) -> None:
    """The softmax scale is worked out from the dims."""
    attend(attrs.evolve(call, layer=attrs.evolve(call.layer, softmax_scale=None)))


def near_compressed(call: AttentionCall) -> None:
    """Addresses of pages have 32 bits in the compressed cache."""
    if not isinstance(call.keys, GatheredKeys):
        window, *rest = call.keys
        call = attrs.evolve(call, keys=[window, *(attrs.evolve(s, cache=int32_offsets(s.cache)) for s in rest)])
    attend(call)


def once(call: AttentionCall) -> None:
    """A slot that a row lists again is dropped."""

    def distinct(rows: Any) -> DenseIndices:
        result = rows.indices.clone()
        for i, row in enumerate(result.tolist()):
            for j, index in enumerate(row):
                if index in row[:j]:
                    result[i, j] = -1
        return DenseIndices(result, rows.lens)

    keys: Any = call.keys
    gathered = isinstance(keys, GatheredKeys)
    made = [attrs.evolve(segment, rows=distinct(segment.rows)) for segment in ([keys] if gathered else keys)]
    attend(attrs.evolve(call, keys=made[0] if gathered else made))

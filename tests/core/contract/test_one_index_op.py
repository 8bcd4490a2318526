"""What a backend writes to bring one index op: `evolve(IndexOps(), combine_topk_swa_indices=f)`, with a plain `f`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from attrs import evolve, fields
from torch import Tensor

from dsv4attn.backends.reference.launch import ReferenceBackend
from dsv4attn.core.contract import IndexOps
from dsv4attn.core.contract.index_ops import prepared_op
from dsv4attn.core.torch_ops import index_ops
from dsv4attn.testing.kit.random_step import StepFixture

REQUESTS = [(90, 9), (33, 20), (0, 7)]


def backend_with(combine: Callable[..., object]) -> ReferenceBackend:
    """The reference with one index op."""

    class OneOp(ReferenceBackend):
        index_ops = evolve(IndexOps(), combine_topk_swa_indices=combine)

    return OneOp()


def test_one_index_op_is_brought_by_one_field_and_no_other_differs() -> None:
    calls: list[int] = []

    def combine(topk_indices: Tensor | None, tokens: Any, **options: Any) -> None:
        calls.append(tokens.is_valid.shape[0])
        index_ops.combine_topk_swa_indices(topk_indices, tokens, **options)

    backend, inputs = backend_with(combine), StepFixture(kind="c4a", requests=REQUESTS, topk="garbage")
    outs = [inputs.run(subject) for subject in (backend, ReferenceBackend())]

    assert sum(calls) == 36
    assert all(torch.equal(*pair) for pair in zip(*outs, strict=True))
    ours, default = backend.index_ops, IndexOps()
    other = [field.name for field in fields(IndexOps) if getattr(ours, field.name) != getattr(default, field.name)]
    assert other == [name for name in other if ours.brings(name)] == ["combine_topk_swa_indices"]


def test_a_bug_in_the_op_is_found() -> None:
    def combine(topk_indices: Tensor | None, tokens: Any, **options: Any) -> None:
        index_ops.combine_topk_swa_indices(topk_indices, evolve(tokens, window=tokens.window - 1), **options)

    inputs = StepFixture(kind="c4a", requests=REQUESTS, topk="garbage")
    inputs.compare(*inputs.run(backend_with(index_ops.combine_topk_swa_indices)))
    with pytest.raises(AssertionError, match="rows are wrong"):
        inputs.compare(*inputs.run(backend_with(combine)))


def test_an_op_that_prepares_computes_at_once_too() -> None:
    @prepared_op
    def pack(indices: Tensor, lens: Tensor, num_slots: int, out: tuple[Tensor, Tensor]) -> Callable[[Tensor], None]:
        return lambda indices: index_ops.build_ragged_indices_from_dense(indices[:2], lens, num_slots, out)

    indices, lens = torch.tensor([[4, 1], [2, 9]], dtype=torch.int32), torch.tensor([1, 2], dtype=torch.int32)
    results = []
    for op in (pack, IndexOps().build_ragged_indices_from_dense):
        for at_once in (True, False):
            out = torch.zeros(4, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
            if at_once:
                op(indices, lens, 9, out=out)
            else:
                op.prepare(indices, lens, 9, out=out)(torch.cat([indices, indices]))
            results.append([out[0][:3].tolist(), out[1].tolist()])

    assert results == [[[4, 2, -1], [0, 1, 3]]] * 4

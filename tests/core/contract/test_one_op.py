"""What a backend writes to bring one op of the layer: `evolve(LayerOps(), select_topk=f)`."""

from __future__ import annotations

from typing import Any

import torch
from attrs import evolve, fields

from dsv4attn.backends.reference.launch import ReferenceBackend
from dsv4attn.core.contract import LayerOps
from tests.harness import LayerStack


def test_one_op_is_brought_by_one_field_and_no_other_differs() -> None:
    calls: list[int] = []

    def select_topk(*arguments: Any, **options: Any) -> None:
        calls.append(arguments[-2].shape[0])
        LayerOps().select_topk(*arguments, **options)

    class OneOp(ReferenceBackend):
        layer_ops = evolve(LayerOps(), select_topk=select_topk)

    stacks = LayerStack(OneOp()), LayerStack(ReferenceBackend())
    hidden = stacks[0].hidden(0, 40)
    outs = [stack.cut(hidden, [33, 7])[1] for stack in stacks]

    assert calls
    assert set(calls) == {33, 7}
    assert all(torch.equal(*pair) for pair in zip(*outs, strict=True))
    table, default = OneOp.layer_ops, LayerOps()
    changed = [op.name for op in fields(LayerOps) if getattr(table, op.name) is not getattr(default, op.name)]
    assert changed == ["select_topk"]
    assert [part for part, name in table.sources("one").items() if name == "one"] == ["selection"]

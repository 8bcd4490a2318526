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

    def select_topk(*given: Any, **options: Any) -> None:
        calls.append(given[-2].shape[0])
        LayerOps().select_topk(*given, **options)

    class OneOp(ReferenceBackend):
        layer_ops = evolve(LayerOps(), select_topk=select_topk)

    whole, torchs = LayerStack(OneOp()), LayerStack(ReferenceBackend())
    hidden = whole.hidden(0, 40)
    outs = [each.cut(hidden, [33, 7])[1] for each in (whole, torchs)]

    assert calls
    assert set(calls) == {33, 7}
    assert all(torch.equal(*pair) for pair in zip(*outs, strict=True))
    ours, default = OneOp.layer_ops, LayerOps()
    other = [f.name for f in fields(LayerOps) if getattr(ours, f.name) is not getattr(default, f.name)]
    assert other == ["select_topk"]
    assert [part for part, name in ours.sources("one").items() if name == "one"] == ["selection"]

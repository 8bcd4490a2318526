"""The layer's custom ops: `torch.compile`, torch's own checks, and who sees them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from dsv4attn.core import layer as layer_module
from dsv4attn.core.context import set_forward_context
from dsv4attn.core.geometry import LayerKind
from dsv4attn.core.layer import DeepseekV4MLAAttention
from tests.core.bound import bound


@pytest.mark.parametrize("kind", LayerKind)
def test_a_module_around_the_layer_compiles_with_fullgraph(kind: LayerKind) -> None:
    case = bound(kind)

    class Block(nn.Module):
        def __init__(self, layer: DeepseekV4MLAAttention) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, q: Tensor, kv: Tensor, positions: Tensor) -> Tensor:
            q = q * 1.0
            out = torch.empty_like(q)
            self.layer.fused_qnorm_rope_kv_insert(q, kv, positions)
            self.layer.forward_mqa(q, kv, positions, out)
            return out + 1

    expected = case.run() + 1
    compiled = torch.compile(Block(case.layer), fullgraph=True, backend="aot_eager")
    with set_forward_context(case.metadata):
        assert torch.equal(expected, compiled(case.q, case.kv, case.positions))
    # the metadata is looked up when the op runs, not when it was traced
    with set_forward_context(None):
        assert torch.equal(torch.ones_like(expected), compiled(case.q, case.kv, case.positions))


def test_the_custom_ops_pass_torchs_own_checks() -> None:
    case = bound(LayerKind.C4A)
    with set_forward_context(case.metadata):
        for op, args in (
            (torch.ops.dsv4attn.forward_mqa, (case.q, case.kv, case.positions, torch.empty_like(case.q))),
            (torch.ops.dsv4attn.qnorm_rope_kv_insert, (case.q.clone(), case.kv, case.positions)),
        ):
            torch.library.opcheck(op, (*args, case.layer.handle))


class Own(Tensor):
    """A tensor of somebody's class."""


class Ops(TorchDispatchMode):
    """Notes the ops that run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(op))
        return op(*args, **(kwargs or {}))


def by_profiler(step: Callable[..., Tensor], *tensors: Tensor) -> str:
    with torch.profiler.profile() as profiled:
        step(*tensors)
    return " ".join(event.name for event in profiled.events() or ())


def by_mode(step: Callable[..., Tensor], *tensors: Tensor) -> str:
    with Ops() as ops:
        step(*tensors)
    return " ".join(ops.names)


def by_make_fx(step: Callable[..., Tensor], *tensors: Tensor) -> str:
    return make_fx(step)(*tensors).code


def by_jit(step: Callable[..., Tensor], *tensors: Tensor) -> str:
    return str(torch.jit.trace(step, tensors, check_trace=False).graph)


LOOKING = {"a profiler": by_profiler, "a mode": by_mode, "make_fx": by_make_fx, "a tracer": by_jit}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("who", LOOKING)
def test_whoever_looks_for_ops_finds_both(who: str) -> None:
    case = bound(LayerKind.C4A)

    def step(q: Tensor, kv: Tensor, positions: Tensor, out: Tensor) -> Tensor:
        case.layer.fused_qnorm_rope_kv_insert(q, kv, positions)
        case.layer.forward_mqa(q, kv, positions, out)
        return out

    with set_forward_context(case.metadata):
        found = LOOKING[who](step, case.q.clone(), case.kv, case.positions, torch.empty_like(case.q))

    assert "qnorm_rope_kv_insert" in found
    assert "forward_mqa" in found


@pytest.mark.parametrize("which", ["none", "q", "kv", "positions", "out"])
def test_only_calls_with_tensors_of_other_classes_are_ops_in_eager_mode(
    which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, ops = bound(LayerKind.C4A), list[str]()
    for name in ("_op_insert", "_op_forward"):
        monkeypatch.setattr(layer_module, name, lambda *_, name=name: ops.append(name))
    given = {"q": case.q.clone(), "kv": case.kv, "positions": case.positions, "out": torch.empty_like(case.q)}
    q, kv, positions, out = (one.as_subclass(Own) if name == which else one for name, one in given.items())
    with set_forward_context(case.metadata):
        case.layer.fused_qnorm_rope_kv_insert(q, kv, positions)
        case.layer.forward_mqa(q, kv, positions, out)

    assert ops == {"none": [], "out": ["_op_forward"]}.get(which, ["_op_insert", "_op_forward"])

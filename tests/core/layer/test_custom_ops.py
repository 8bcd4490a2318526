"""The layer's custom ops: `torch.compile`, torch's own checks, and what makes a call an op."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from contextlib import nullcontext
from contextvars import copy_context
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._C._profiler import _ExperimentalConfig
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from dsv4attn.core.attention import mla_attention as layer_module
from dsv4attn.core.attention.mla_attention import DeepseekV4MLAAttention
from dsv4attn.core.cache.layout import PagedKVCache
from dsv4attn.core.metadata.forward_context import set_forward_context
from dsv4attn.core.model.geometry import LayerKind
from tests.harness import bound_layer


@pytest.mark.parametrize("kind", LayerKind)
def test_a_module_around_the_layer_compiles_with_fullgraph(kind: LayerKind) -> None:
    case = bound_layer(kind)

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
    case = bound_layer(LayerKind.CSA)
    layer, caches = case.layer, case.layer.caches
    assert caches is not None
    assert caches.compressed is not None
    swa, table = caches.swa.tensor, layer.cos_sin_cache
    read = swa, caches.compressed.tensor, layer.topk_indices_buffer, layer.attn_sink, table
    with set_forward_context(case.metadata):
        for op, args in (
            (torch.ops.dsv4attn.forward_mqa, (case.q, case.kv, case.positions, torch.empty_like(case.q), *read)),
            (torch.ops.dsv4attn.qnorm_rope_kv_insert, (case.q.clone(), case.kv, case.positions, table, swa)),
        ):
            torch.library.opcheck(op, (*args, layer.handle))


CLEARED = "ignore:.*Profiler clears events:UserWarning"
"""Torch 2.11 says so once in a process."""


class Own(Tensor):
    """A subclass of Tensor."""


class Ops(TorchDispatchMode):
    """Notes the ops that run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(op))
        return op(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    """Notes the functions of torch that are called, ops among them."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def by_profiler(step: Callable[..., Tensor], *tensors: Tensor) -> str:
    with torch.profiler.profile() as profiled:
        step(*tensors)
    return " ".join(event.name for event in profiled.events() or ())


def by_mode(step: Callable[..., Tensor], *tensors: Tensor) -> str:
    with Ops() as ops:
        step(*tensors)
    return " ".join(ops.names)


def by_function_mode(step: Callable[..., Tensor], *tensors: Tensor) -> str:
    with Functions() as functions:
        step(*tensors)
    return " ".join(functions.names)


def by_make_fx(step: Callable[..., Tensor], *tensors: Tensor) -> str:
    return make_fx(step)(*tensors).code


def before_dispatch(step: Callable[..., Tensor], *tensors: Tensor) -> str:
    return make_fx(step, pre_dispatch=True)(*tensors).code


def in_another_thread(step: Callable[..., Tensor], *tensors: Tensor) -> str:
    """A profiler of all threads sees a call in one of them."""
    config = _ExperimentalConfig(profile_all_threads=True)
    with torch.profiler.profile(experimental_config=config) as profiled:
        thread = threading.Thread(target=copy_context().run, args=(step, *tensors))
        thread.start()
        thread.join()
    return " ".join(event.name for event in profiled.events() or ())


def beside_another_mode(step: Callable[..., Tensor], *tensors: Tensor) -> str:
    """Another thread enters a mode before, and leaves it within, the mode of this one."""
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with Ops():
            entered.set()
            leave.wait()

    thread = threading.Thread(target=other)
    thread.start()
    entered.wait()
    with Ops() as ops:
        leave.set()
        thread.join()
        step(*tensors)
    return " ".join(ops.names)


def by_jit(step: Callable[..., Tensor], *tensors: Tensor) -> str:
    return str(torch.jit.trace(step, tensors, check_trace=False).graph)


SEEN = {
    "a profiler": by_profiler,
    "a profiler of all threads": in_another_thread,
    "a dispatch mode": by_mode,
    "a dispatch mode beside that of another thread": beside_another_mode,
    "a function mode": by_function_mode,
    "make_fx": by_make_fx,
    "make_fx before dispatch": before_dispatch,
    "a tracer": by_jit,
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning", CLEARED)
@pytest.mark.parametrize("by", SEEN)
def test_tracers_modes_and_profilers_see_both_ops(by: str) -> None:
    case = bound_layer(LayerKind.CSA)

    def step(q: Tensor, kv: Tensor, positions: Tensor, out: Tensor) -> Tensor:
        case.layer.fused_qnorm_rope_kv_insert(q, kv, positions)
        case.layer.forward_mqa(q, kv, positions, out)
        return out

    with set_forward_context(case.metadata):
        events = SEEN[by](step, case.q.clone(), case.kv, case.positions, torch.empty_like(case.q))

    assert "qnorm_rope_kv_insert" in events
    assert "forward_mqa" in events


@pytest.mark.parametrize("which", ["none", "q", "kv", "positions", "out"])
def test_only_calls_with_tensors_of_other_classes_are_ops_in_eager_mode(
    which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, ops = bound_layer(LayerKind.CSA), list[str]()
    for name in ("_op_insert", "_op_forward"):
        monkeypatch.setattr(layer_module, name, lambda *_, name=name: ops.append(name))
    arguments = {"q": case.q.clone(), "kv": case.kv, "positions": case.positions, "out": torch.empty_like(case.q)}
    q, kv, positions, out = (tensor.as_subclass(Own) if name == which else tensor for name, tensor in arguments.items())
    with set_forward_context(case.metadata):
        case.layer.fused_qnorm_rope_kv_insert(q, kv, positions)
        case.layer.forward_mqa(q, kv, positions, out)

    assert ops == {"none": [], "out": ["_op_forward"]}.get(which, ["_op_insert", "_op_forward"])


def test_a_transform_is_refused_as_torch_refuses_ops_without_rules() -> None:
    case = bound_layer(LayerKind.SWA)

    def step(q: Tensor) -> Tensor:
        out = torch.empty_like(q)
        case.layer.forward_mqa(q, case.kv, case.positions, out)
        return out

    with set_forward_context(case.metadata), pytest.raises(RuntimeError, match="Batching rule not implemented"):
        torch.vmap(step)(torch.stack([case.q, case.q]))


@pytest.mark.filterwarnings(CLEARED)
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
@pytest.mark.parametrize("profiled", [False, True])
def test_a_copy_of_a_layer_writes_its_own_caches(copied: Callable[[Any], Any], profiled: bool) -> None:
    case = bound_layer(LayerKind.SWA)
    assert case.layer.caches is not None
    layer, theirs = copied(case.layer), case.layer.caches.swa.tensor.clone()
    mine = PagedKVCache(torch.zeros_like(theirs), case.layer.caches.swa.layout)
    layer.bind_kv_cache(mine)
    with set_forward_context(case.metadata), torch.profiler.profile() if profiled else nullcontext():
        layer.fused_qnorm_rope_kv_insert(case.q.clone(), case.kv, case.positions)

    assert mine.tensor.any()
    assert torch.equal(theirs, case.layer.caches.swa.tensor)

"""Backends that derive from nothing: one wrapper each, layers that can be copied and pickled, shared prepared calls."""

from __future__ import annotations

import copy
import gc
import pickle
from typing import Any

import attrs
import pytest
import torch

from dsv4attn.core.contract import backend as contract
from dsv4attn.core.contract.backend import AttentionCall, Backend, BackendDefaults, Phase, complete
from dsv4attn.core.contract.phased import PhasedBackend
from dsv4attn.selection import load_backend
from tests.harness import KINDS_AND_RATIOS, SMALL, LayerStack

REFERENCE: Any = load_backend("reference")
MEMBERS = (
    "scratch",
    "scratch_bound",
    "transient_bytes",
    "quantize_and_insert_k_cache",
    "qnorm_rope_kv_insert",
    "dequantize_and_gather_k_cache",
    "inv_rope_o_proj",
)


class Alone:
    """A backend that derives from nothing, and counts what it prepares. It cannot be hashed or referenced weakly."""

    __slots__ = ("prepared",)
    __hash__ = None  # type: ignore[assignment]
    name, capabilities, steps = "alone", REFERENCE.capabilities, REFERENCE.steps

    def __init__(self) -> None:
        self.prepared = 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Alone)

    def decode(self, call: AttentionCall) -> None:
        REFERENCE.decode(call)

    def prefill(self, call: AttentionCall) -> None:
        REFERENCE.prefill(call)

    def prepare(self, phase: Phase, call: AttentionCall) -> Any:
        self.prepared += 1
        return lambda tensors: getattr(self, phase.value)(call.with_tensors(tensors))


for member in MEMBERS:
    setattr(Alone, member, staticmethod(getattr(REFERENCE, member)))
Derived = type(
    "Derived", (BackendDefaults,), {**{n: v for n, v in vars(Alone).items() if n not in {"__slots__", "prepared"}}}
)
Derived.__module__ = __name__


def through_pickle(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))  # noqa: S301


def of(base: type) -> Any:
    made: Any = base()
    return made


@pytest.mark.parametrize("base", [Alone, Derived])
def test_equal_layers_share_what_is_prepared(base: type) -> None:
    """A step of one prefill and one decode is prepared once for four equal layers, whatever the base class."""
    backend = of(base)
    whole = LayerStack(backend, geometry=attrs.evolve(SMALL, layers=(KINDS_AND_RATIOS[0],) * 4))
    first, second = whole.manager.new(), whole.manager.new()
    whole.step([(first, 9)], whole.hidden(0, 9))
    assert backend.prepared == 1
    whole.step([(first, 1), (second, 30)], whole.hidden(1, 31))
    assert backend.prepared == 3


def test_one_wrapper_for_one_object() -> None:
    one, other = of(Alone), of(Alone)
    wrapper = complete(one)
    assert complete(one) is wrapper
    assert complete(wrapper) is wrapper
    assert complete(other) is not wrapper  # though the backends are equal
    pair = PhasedBackend(one, one)
    assert pair.of(Phase.DECODE) is pair.of(Phase.PREFILL) is wrapper


def test_a_wrapper_lives_as_long_as_it_is_used() -> None:
    before = len(contract._wrappers)
    wrappers = [complete(of(Alone)) for _ in range(20)]
    assert len({id(wrapper) for wrapper in wrappers}) == len(contract._wrappers) - before == 20
    del wrappers
    gc.collect()
    assert len(contract._wrappers) == before


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, through_pickle])
def test_a_wrapper_is_copied_with_its_backend(again: Any) -> None:
    backend = of(Alone)
    backend.prepared = 7
    wrapper: Any = complete(backend)
    made = again(wrapper)
    assert type(made) is type(wrapper)
    assert (made is wrapper) is (again is copy.copy)  # a shallow copy has the same backend
    assert (made.prepared, made.name, made.deterministic) == (7, "alone", False)
    backend.prepared = 8
    assert made.prepared == (8 if again is copy.copy else 7)
    with pytest.raises(AttributeError):
        made.nothing_of_this_name  # noqa: B018


@pytest.mark.parametrize(
    ("again", "run_before"),
    [(copy.copy, False), (copy.copy, True), (copy.deepcopy, False), (copy.deepcopy, True), (through_pickle, False)],
)
def test_layers_are_copied(again: Any, run_before: bool) -> None:
    """Copies of all layers, on caches of their own, give the outputs of the reference backend's layers."""
    exact, whole = LayerStack(load_backend("reference")), LayerStack(of(Alone))
    if run_before:
        whole.step([(whole.manager.new(), 5)], whole.hidden(5, 5))
    layers = [again(layer) for layer in whole.layers] if again is copy.copy else again(whole.layers)
    fresh = LayerStack(of(Alone))
    for layer, caches in zip(layers, fresh.manager.caches, strict=True):
        layer.bind_kv_cache(caches)
    fresh.layers = layers
    a, b = exact.manager.new(), fresh.manager.new()
    for count in (21, 1, 3):
        hidden = whole.hidden(count, count)
        for out, wanted in zip(fresh.step([(b, count)], hidden), exact.step([(a, count)], hidden), strict=True):
            assert torch.equal(out, wanted)


def test_a_deepcopy_of_several_layers_has_one_backend() -> None:
    whole = LayerStack(of(Alone))
    copies = copy.deepcopy(whole.layers)
    backends: list[Backend] = [layer.backend for layer in copies]
    assert all(backend is backends[0] for backend in backends)
    assert backends[0] is not whole.layers[0].backend

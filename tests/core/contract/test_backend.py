"""`Backend`: its defaults, what no backend is, and layers of a backend of one's own, which are copied and pickled."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch

from dsv4attn.backends.reference.launch import ReferenceBackend
from dsv4attn.core.attention.mla_attention import DeepseekV4MLAAttention
from dsv4attn.core.attention.projection import o_proj
from dsv4attn.core.cache.layout import KVCacheLayout
from dsv4attn.core.contract.backend import (
    OPTIONAL_MEMBERS,
    REQUIRED_MEMBERS,
    AttentionCall,
    Backend,
    Phase,
    missing_members,
)
from dsv4attn.core.contract.device import DeviceFacts
from dsv4attn.core.contract.index_ops import IndexOps
from dsv4attn.core.contract.layer_ops import default_layer_ops
from dsv4attn.core.contract.phased import PhasedBackend
from dsv4attn.core.contract.rank_ops import RankOps
from dsv4attn.core.contract.warmup import WarmupSpec
from dsv4attn.core.contract.wrapped import WrappedBackend
from dsv4attn.core.layer.attention_layer import DeepseekV4Attention
from dsv4attn.core.memory.plan import plan_workspace
from dsv4attn.core.metadata.builder import MetadataBuilder
from dsv4attn.core.model.weights import AttentionWeights
from dsv4attn.errors import ArgumentError
from dsv4attn.selection import load_backend
from dsv4attn.testing.kit.factories import tiny_geometry
from dsv4attn.testing.kit.random_step import StepFixture
from tests.harness import KINDS_AND_RATIOS, LIMITS, SMALL, LayerStack, random_weights

REFERENCE: Any = load_backend("reference")
SWA = SMALL.layer_of_kind("swa")


class Counting(Backend):
    """A backend that brings the required members alone, those of the reference, and counts what it prepares."""

    name, capabilities = "counting", REFERENCE.capabilities

    def __init__(self) -> None:
        self.prepared = 0

    def decode(self, call: AttentionCall) -> None:
        REFERENCE.decode(call)

    def prefill(self, call: AttentionCall) -> None:
        REFERENCE.prefill(call)

    def prepare(self, phase: Phase, call: AttentionCall) -> Any:
        self.prepared += 1
        return super().prepare(phase, call)


for member in set(REQUIRED_MEMBERS) - set(vars(Counting)):
    setattr(Counting, member, staticmethod(getattr(REFERENCE, member)))


# members


def test_a_backend_with_the_required_members_alone_has_the_defaults_of_the_others() -> None:
    ran: list[str] = []

    class Plain(Backend):
        name = "plain"

        def decode(self, call: AttentionCall) -> None:
            ran.append("decode")

        def prefill(self, call: AttentionCall) -> None:
            ran.append("prefill")

        def kernel_variants(self, bounds: WarmupSpec, device: DeviceFacts) -> Sequence[object]:
            return ["a"]

    plain, bounds, cpu = Plain(), WarmupSpec.of(tiny_geometry(), LIMITS), torch.device("cpu")
    call = AttentionCall(SWA, torch.zeros(1, 4, 32), (), None, torch.zeros(1), None)
    for phase in Phase:
        plain.prepare(phase, call)(call.tensors)

    assert ran == ["decode", "prefill"]
    assert (plain.warmup(bounds, cpu), plain.builder_ops, plain.prepare_rows) == (0, None, None)
    assert (plain.deterministic, plain.projects_fp8, plain.prefers_pages(SWA, (), 0)) == (False, False, False)
    assert not plain.takes_raw_q(SWA, call.q, torch.bfloat16, ())
    assert plain.metadata_extension(SMALL, LIMITS, cpu) is None
    assert plain.layer_ops is default_layer_ops()
    assert list(plain.kernel_variants(bounds, DeviceFacts.named("cpu"))) == ["a"]
    assert (plain.index_ops, plain.rank_ops) == (IndexOps(), RankOps())


def test_members_are_required_or_optional() -> None:
    members = {name for name in {*vars(Backend), *Backend.__annotations__} if not name.startswith("_")}
    assert {*REQUIRED_MEMBERS, *OPTIONAL_MEMBERS} == members
    assert not {*REQUIRED_MEMBERS} & {*OPTIONAL_MEMBERS}


def test_required_members_that_a_backend_does_not_bring_are_named() -> None:
    class Half(Backend):
        name = "half"

        def decode(self, call: AttentionCall) -> None: ...

    assert set(missing_members(Half())) == {*REQUIRED_MEMBERS} - {"name", "decode"}
    assert set(missing_members(None)) == {*REQUIRED_MEMBERS}
    assert missing_members(Counting()) == missing_members(REFERENCE) == []
    assert missing_members(PhasedBackend(Counting(), REFERENCE)) == missing_members(WrappedBackend(Counting())) == []
    with pytest.raises(NotImplementedError):
        Half().scratch(Phase.DECODE, SWA, 1, 1)


def test_a_wrapper_has_the_members_of_the_other_backend_but_for_its_own() -> None:
    class Renamed(WrappedBackend):
        name = "renamed"

    other = ReferenceBackend(deterministic=True)
    wrapper = Renamed(other)
    assert (wrapper.name, other.name) == ("renamed", "reference")
    for name in {*REQUIRED_MEMBERS, *OPTIONAL_MEMBERS} - {"name"}:
        assert getattr(wrapper, name) == getattr(other, name)
    StepFixture(kind=SWA.kind, requests=[(17, 1), (0, 21)]).check(wrapper)


# what is no backend

NO_BACKENDS = {
    "name": "reference",
    "None": None,
    "class": ReferenceBackend,
    "another class": SimpleNamespace(
        **{name: getattr(REFERENCE, name) for name in (*REQUIRED_MEMBERS, *OPTIONAL_MEMBERS)}
    ),
}
ARGUMENTS = StepFixture(kind=SWA.kind, requests=[(5, 1)]).problem(REFERENCE)
TABLE = torch.zeros(LIMITS.max_model_len, SWA.rope_dim)


def layer(backend: Any) -> object:
    weights = AttentionWeights.from_dict(random_weights(SMALL, 0), SMALL, 0)
    return DeepseekV4Attention("layer", SMALL, 0, LIMITS, backend, weights)


ENTRIES: dict[str, Callable[[Any], object]] = {
    "forward_mqa": lambda backend: ARGUMENTS.run(backend, ARGUMENTS.workspace(REFERENCE)),
    "plan_workspace": lambda backend: plan_workspace(SWA, LIMITS, backend, KVCacheLayout.fp8_ds_mla(24, 8)),
    "MLA attention": lambda backend: DeepseekV4MLAAttention(
        "layer", SWA, LIMITS, backend, attn_sink=None, cos_sin_cache=TABLE
    ),
    "layer": layer,
    "projection": lambda backend: o_proj(backend, TABLE, TABLE, TABLE, TABLE, 1, layer=SWA),
    "two phases": lambda backend: PhasedBackend(REFERENCE, backend),
    "builder": lambda backend: MetadataBuilder(SMALL, LIMITS, backend=backend),
}


@pytest.mark.parametrize(
    ("entry", "value"),
    # a builder needs no backend
    [(entry, value) for entry in ENTRIES for value in NO_BACKENDS if (entry, value) != ("builder", "None")],
)
def test_what_is_no_backend_is_refused(entry: str, value: str) -> None:
    with pytest.raises(
        ArgumentError, match=r"^backend: expected a backend, got .* -> pass what load_backend\(name\) or"
    ):
        ENTRIES[entry](NO_BACKENDS[value])


# layers of a backend of one's own


def through_pickle(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))  # noqa: S301


def test_equal_layers_share_what_is_prepared() -> None:
    """A step of one prefill and one decode is prepared once for four equal layers."""
    backend = Counting()
    stack = LayerStack(backend, geometry=attrs.evolve(SMALL, layers=(KINDS_AND_RATIOS[0],) * 4))
    first, second = stack.manager.new(), stack.manager.new()
    stack.step([(first, 9)], stack.hidden(0, 9))
    assert backend.prepared == 1
    stack.step([(first, 1), (second, 30)], stack.hidden(1, 31))
    assert backend.prepared == 3


@pytest.mark.parametrize(
    ("again", "run_before"),
    [(copy.copy, False), (copy.copy, True), (copy.deepcopy, False), (copy.deepcopy, True), (through_pickle, False)],
)
def test_layers_are_copied(again: Any, run_before: bool) -> None:
    """Copies of all layers, on caches of their own, give the outputs of the reference backend's layers."""
    expected, stack = LayerStack(load_backend("reference")), LayerStack(Counting())
    if run_before:
        stack.step([(stack.manager.new(), 5)], stack.hidden(5, 5))
    layers = [again(layer) for layer in stack.layers] if again is copy.copy else again(stack.layers)
    copied = LayerStack(Counting())
    for layer, caches in zip(layers, copied.manager.caches, strict=True):
        layer.bind_kv_cache(caches)
    copied.layers = layers
    expected_request, copied_request = expected.manager.new(), copied.manager.new()
    for count in (21, 1, 3):
        hidden = stack.hidden(count, count)
        outs = copied.step([(copied_request, count)], hidden)
        for out, expected_out in zip(outs, expected.step([(expected_request, count)], hidden), strict=True):
            assert torch.equal(out, expected_out)


def test_a_deepcopy_of_several_layers_has_one_backend() -> None:
    stack = LayerStack(Counting())
    backends: list[Backend] = [layer.backend for layer in copy.deepcopy(stack.layers)]
    assert all(backend is backends[0] for backend in backends)
    assert backends[0] is not stack.layers[0].backend

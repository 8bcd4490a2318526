"""Two backends as one: every part of a step goes where the contract of `PhasedBackend` says."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from dsv4attn.backends.reference.launch import ReferenceBackend
from dsv4attn.core import indices
from dsv4attn.core.contract import (
    AttentionCall,
    Backend,
    CompiledBackend,
    ExtendingBackend,
    Forms,
    IndexForm,
    KeyForm,
    MetadataExtension,
    Phase,
)
from dsv4attn.core.device import DeviceFacts
from dsv4attn.core.geometry import LayerGeometry, LayerKind, ModelGeometry
from dsv4attn.core.layout import KVCacheLayout
from dsv4attn.core.limits import Limits
from dsv4attn.core.phased import PhasedBackend
from dsv4attn.core.warmup_spec import Bounds
from dsv4attn.core.workspace import BufferSpec
from dsv4attn.core.workspace_plan import plan_workspace
from dsv4attn.testing.scenario import Scenario
from dsv4attn.testing.world import tiny_geometry

FORMS = {
    "decode": Forms(IndexForm.RAGGED, IndexForm.DENSE, KeyForm.PAGED, 8),
    "prefill": Forms(IndexForm.DENSE, IndexForm.RAGGED, KeyForm.GATHERED, 64),
}
LAYER = tiny_geometry().layer_of_kind("c4a")


class Recorder(ReferenceBackend):
    """A reference that tells what it was asked, and asks for a little scratch."""

    def __init__(self, name: str, log: list[tuple[str, str]], size: int) -> None:
        super().__init__()
        self.name, self.log, self.size, self.forms = name, log, size, FORMS[name]

    def __getattribute__(self, name: str) -> Any:
        if name in PARTS:
            super().__getattribute__("log").append((super().__getattribute__("name"), name))
        return super().__getattribute__(name)

    def scratch(self, phase: Phase, layer: LayerGeometry, tokens: int, width: int) -> Sequence[BufferSpec]:
        return [((tokens, self.size), torch.uint8)]

    def scratch_bound(self, phase: Phase, layer: LayerGeometry, max_tokens: int, max_width: int) -> int:
        return -(-max_tokens * self.size // 256) * 256

    def transient_bytes(self, layer: LayerGeometry, max_tokens: int, max_width: int, max_rows: int) -> int:
        return self.size

    def decode(self, call: AttentionCall) -> None:
        assert [view.shape for view in call.scratch] == [(call.q.shape[0], self.size)]
        super().decode(call)


PARTS = {name for name, _ in inspect.getmembers(ReferenceBackend, inspect.isfunction) if not name.startswith("_")}


def pair(decode: int = 3, prefill: int = 5) -> tuple[PhasedBackend, list[tuple[str, str]]]:
    log: list[tuple[str, str]] = []
    return PhasedBackend(Recorder("decode", log, decode), Recorder("prefill", log, prefill)), log


def test_it_has_every_part_that_the_contract_asks_for() -> None:
    made, _ = pair()
    backend: Backend = made
    members = {name for name in {*vars(Backend), *Backend.__annotations__} if not name.startswith("_")}

    assert {name for name in members if not hasattr(backend, name)} == set()
    for name in members - {"name", "forms", "steps"}:
        assert inspect.signature(getattr(PhasedBackend, name)) == inspect.signature(getattr(Backend, name))


def test_each_phase_has_the_forms_of_its_own_backend() -> None:
    made, _ = pair()

    assert made.forms == Forms(IndexForm.RAGGED, IndexForm.RAGGED, KeyForm.GATHERED, 64)
    assert made.name == "decode+prefill"


@pytest.mark.parametrize(("phase", "bytes_of_a_token"), [(Phase.DECODE, 3), (Phase.PREFILL, 5)])
def test_scratch_is_that_of_the_phase(phase: Phase, bytes_of_a_token: int) -> None:
    made, _ = pair()

    assert made.scratch(phase, LAYER, 7, 100) == [((7, bytes_of_a_token), torch.uint8)]
    assert made.scratch_bound(phase, LAYER, 1024, 100) == 1024 * bytes_of_a_token


@pytest.mark.parametrize(("decode", "prefill"), [(3, 5), (5, 3)])
def test_temporaries_are_bounded_by_the_larger_of_both(decode: int, prefill: int) -> None:
    assert pair(decode, prefill)[0].transient_bytes(LAYER, 1, 1, 1) == 5


def test_a_plan_holds_the_lanes_of_both() -> None:
    made, _ = pair()
    limits, layout = Limits(4, 64, 256), KVCacheLayout.fp8_ds_mla(24, 8)
    alone = [plan_workspace(LAYER, limits, made.of(phase), layout).lanes[phase.value] for phase in Phase]

    assert list(plan_workspace(LAYER, limits, made, layout).lanes.values()) == alone


PLACES = {
    "quantize_and_insert_k_cache": "decode",
    "qnorm_rope_kv_insert": "decode",
    "dequantize_and_gather_k_cache": "prefill",
    "decode": "decode",
    "prefill": "prefill",
    "inv_rope_o_proj": "decode",
}


@pytest.mark.parametrize(("name", "place"), PLACES.items())
def test_all_that_a_decode_step_runs_is_the_decode_backends(name: str, place: str) -> None:
    """It may be captured as a whole, and only that backend was asked whether it can be."""
    made, log = pair()
    nothing: Any = torch.empty(0)
    with pytest.raises((AttributeError, IndexError, TypeError, RuntimeError, ValueError)):
        getattr(made, name)(*[nothing] * (len(inspect.signature(getattr(made, name)).parameters)))

    assert log[0] == (place, name)
    assert made.steps is made.of(Phase.DECODE).steps


def test_every_method_has_its_place() -> None:
    assert {*PLACES} == PARTS - {"scratch", "scratch_bound", "transient_bytes"}


@pytest.mark.parametrize("kind", list(LayerKind))
def test_a_mixed_batch_on_a_pair_equals_the_oracle(kind: LayerKind) -> None:
    made, log = pair()
    Scenario(kind=kind, requests=[(40, 1), (17, 1), (0, 21), (33, 9)]).check(made)

    assert {("decode", "decode"), ("prefill", "prefill"), ("prefill", "dequantize_and_gather_k_cache")} <= {*log}
    assert ("decode", "prefill") not in log


@pytest.mark.parametrize(("decode", "prefill"), [(False, False), (False, True), (True, False), (True, True)])
def test_largest_logits_are_told_if_both_tell_them(*, decode: bool, prefill: bool) -> None:
    backends = ReferenceBackend(), ReferenceBackend()
    for backend, told in zip(backends, (decode, prefill), strict=True):
        backend.forms = Forms(max_logits=told, empty_lse=told)

    forms = PhasedBackend(*backends).forms
    assert (forms.max_logits, forms.empty_lse) == (decode and prefill,) * 2


class Extending(ReferenceBackend):
    """A reference with steps and metadata of its own."""

    builder_steps = indices

    def metadata_extension(self, geometry: ModelGeometry, limits: Limits, device: torch.device) -> MetadataExtension:
        raise NotImplementedError


def test_what_a_builder_asks_for_is_the_decode_backends() -> None:
    own, other = Extending(), Extending()
    other.builder_steps = None  # type: ignore[assignment]
    made: Any = PhasedBackend(own, other)

    assert made.builder_steps is indices
    assert made.metadata_extension == own.metadata_extension
    assert made.metadata_extension != other.metadata_extension


@pytest.mark.parametrize("name", ["builder_steps", "metadata_extension"])
def test_what_the_decode_backend_does_not_bring_the_pair_does_not_have(name: str) -> None:
    """Nor does it take the prefill backend's, whose metadata the decode backend would not know."""
    assert hasattr(Extending(), name)
    assert not hasattr(PhasedBackend(ReferenceBackend(), Extending()), name)


BOUNDS, CPU = Bounds.of(tiny_geometry(), Limits(4, 64, 256)), torch.device("cpu")


class Compiled(ReferenceBackend):
    """A reference that has forms to compile, `each` kernels of every one."""

    def __init__(self, forms: Sequence[object], each: int = 1) -> None:
        super().__init__()
        self.compiles, self.each, self.warmed = forms, each, list[Any]()

    def kernel_variants(self, bounds: Bounds, device: DeviceFacts) -> Sequence[object]:
        assert bounds is BOUNDS
        return self.compiles

    def warmup(self, bounds: Bounds, device: torch.device) -> int:
        self.warmed.append((bounds, device))
        return len(set(self.compiles)) * self.each


@pytest.mark.parametrize("each", [1, 2])
def test_both_are_warmed_and_what_both_compile_counts_once(each: int) -> None:
    one, other = Compiled(["a", "b", "b"], each), Compiled(["b", "c", "d"], each)
    made: Any = PhasedBackend(one, other)

    assert list(made.kernel_variants(BOUNDS, DeviceFacts.named("cpu"))) == ["a", "b", "c", "d"]
    assert made.warmup(BOUNDS, CPU) == 4 * each
    assert one.warmed == other.warmed == [(BOUNDS, CPU)]


@pytest.mark.parametrize("turned", [False, True])
def test_a_compiled_backend_beside_one_that_is_not_is_warmed_alone(*, turned: bool) -> None:
    compiled = Compiled(["a", "b"])
    both = (compiled, ReferenceBackend())
    made: Any = PhasedBackend(*both[:: -1 if turned else 1])

    assert list(made.kernel_variants(BOUNDS, DeviceFacts.named("cpu"))) == ["a", "b"]
    assert made.warmup(BOUNDS, CPU) == 2
    assert len(compiled.warmed) == 1


def test_a_backend_that_serves_both_phases_is_warmed_once() -> None:
    compiled = Compiled(["a", "b"])
    made: Any = PhasedBackend(compiled, compiled)

    assert made.warmup(BOUNDS, CPU) == 2
    assert len(compiled.warmed) == 1


@pytest.mark.parametrize("name", ["kernel_variants", "warmup"])
def test_what_neither_compiles_the_pair_does_not_claim(name: str) -> None:
    assert not hasattr(PhasedBackend(ReferenceBackend(), ReferenceBackend()), name)


def test_one_that_only_warms_up_claims_no_forms() -> None:
    one = ReferenceBackend()
    vars(one)["warmup"] = lambda _bounds, _device: 7
    made: Any = PhasedBackend(one, Compiled(["a"]))

    assert made.warmup(BOUNDS, CPU) == 8
    assert not hasattr(PhasedBackend(one, ReferenceBackend()), "kernel_variants")


def test_every_optional_part_of_the_contract_is_forwarded() -> None:
    """Whatever a later version of the contract adds beside `Backend` needs a rule here."""
    optional = {name for extra in (CompiledBackend, ExtendingBackend) for name in vars(extra)} - {*vars(Backend)}
    optional = {name for name in optional if not name.startswith("_")} | {"builder_steps"}
    full: Any = Compiled(["a"])
    full.builder_steps, full.metadata_extension = indices, Extending().metadata_extension

    assert optional == {"builder_steps", "metadata_extension", "kernel_variants", "warmup"}
    assert {name for name in optional if hasattr(PhasedBackend(full, full), name)} == optional

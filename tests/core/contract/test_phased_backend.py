"""`PhasedBackend`: each member is that of the decode backend, of the prefill backend, or of both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from dsv4attn.backends.reference.launch import ReferenceBackend
from dsv4attn.core.cache.layout import KVCacheLayout
from dsv4attn.core.contract.backend import (
    OPTIONAL_MEMBERS,
    REQUIRED_MEMBERS,
    AttentionCall,
    Capabilities,
    IndexForm,
    KeyForm,
    MetadataExtension,
    Phase,
)
from dsv4attn.core.contract.builder_ops import BuilderOps
from dsv4attn.core.contract.device import DeviceFacts
from dsv4attn.core.contract.limits import Limits
from dsv4attn.core.contract.phased import PhasedBackend
from dsv4attn.core.contract.warmup import WarmupSpec
from dsv4attn.core.memory.plan import plan_workspace
from dsv4attn.core.model.geometry import LayerGeometry, LayerKind, ModelGeometry
from dsv4attn.core.tensorspec import BufferSpec
from dsv4attn.testing.kit.factories import tiny_geometry
from dsv4attn.testing.kit.random_step import StepFixture

CAPABILITIES = {
    "decode": Capabilities(IndexForm.RAGGED, IndexForm.DENSE, KeyForm.PAGED, 8),
    "prefill": Capabilities(IndexForm.DENSE, IndexForm.RAGGED, KeyForm.GATHERED, 64),
}
LAYER = tiny_geometry().layer_of_kind("c4a")


class Recorder(ReferenceBackend):
    """A reference that asks for a little scratch."""

    def __init__(self, name: str, size: int) -> None:
        super().__init__()
        self.name, self.size, self.capabilities = name, size, CAPABILITIES[name]

    def scratch(self, phase: Phase, layer: LayerGeometry, tokens: int, width: int) -> Sequence[BufferSpec]:
        return [((tokens, self.size), torch.uint8)]

    def scratch_bound(self, phase: Phase, layer: LayerGeometry, max_tokens: int, max_width: int) -> int:
        return -(-max_tokens * self.size // 256) * 256

    def transient_bytes(self, layer: LayerGeometry, max_tokens: int, max_width: int, max_rows: int) -> int:
        return self.size

    def decode(self, call: AttentionCall) -> None:
        assert [view.shape for view in call.scratch] == [(call.q.shape[0], self.size)]
        super().decode(call)


def pair(decode: int = 3, prefill: int = 5) -> PhasedBackend:
    return PhasedBackend(Recorder("decode", decode), Recorder("prefill", prefill))


def test_each_phase_has_the_capabilities_of_its_own_backend() -> None:
    phased = pair()

    assert phased.capabilities == Capabilities(IndexForm.RAGGED, IndexForm.RAGGED, KeyForm.GATHERED, 64)
    assert phased.name == "decode+prefill"


@pytest.mark.parametrize(("phase", "bytes_of_a_token"), [(Phase.DECODE, 3), (Phase.PREFILL, 5)])
def test_scratch_is_that_of_the_phase(phase: Phase, bytes_of_a_token: int) -> None:
    phased = pair()

    assert phased.scratch(phase, LAYER, 7, 100) == [((7, bytes_of_a_token), torch.uint8)]
    assert phased.scratch_bound(phase, LAYER, 1024, 100) == 1024 * bytes_of_a_token


@pytest.mark.parametrize(("decode", "prefill"), [(3, 5), (5, 3)])
def test_temporaries_are_bounded_by_the_larger_of_both(decode: int, prefill: int) -> None:
    assert pair(decode, prefill).transient_bytes(LAYER, 1, 1, 1) == 5


def test_a_plan_has_the_arenas_of_both() -> None:
    phased = pair()
    limits, layout = Limits(4, 64, 256), KVCacheLayout.fp8_ds_mla(24, 8)
    arenas = [plan_workspace(LAYER, limits, phased.of(phase), layout).arenas[phase.value] for phase in Phase]

    assert list(plan_workspace(LAYER, limits, phased, layout).arenas.values()) == arenas


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
    phased = pair()
    method = getattr(phased, name)

    assert method.__name__ == name
    assert method.__self__ is phased.of(Phase(place))
    assert phased.index_ops is phased.of(Phase.DECODE).index_ops


def test_every_required_method_has_its_place() -> None:
    by_phase = {"scratch", "scratch_bound", "transient_bytes"}
    assert {*PLACES} == {*REQUIRED_MEMBERS} - by_phase - {"name", "capabilities", "steps"}
    assert by_phase <= vars(PhasedBackend).keys()


@pytest.mark.parametrize("kind", list(LayerKind))
def test_a_mixed_batch_on_a_pair_equals_the_oracle(kind: LayerKind) -> None:
    phased = pair()
    StepFixture(kind=kind, requests=[(40, 1), (17, 1), (0, 21), (33, 9)]).check(phased)


@pytest.mark.parametrize(("decode", "prefill"), [(False, False), (False, True), (True, False), (True, True)])
def test_largest_logits_are_available_if_both_backends_have_them(*, decode: bool, prefill: bool) -> None:
    backends = ReferenceBackend(), ReferenceBackend()
    for backend, is_capable in zip(backends, (decode, prefill), strict=True):
        backend.capabilities = Capabilities(max_logits=is_capable, empty_lse=is_capable)

    capabilities = PhasedBackend(*backends).capabilities
    assert (capabilities.max_logits, capabilities.empty_lse) == (decode and prefill,) * 2


class Extending(ReferenceBackend):
    """A reference with builder ops and metadata of its own."""

    builder_ops = BuilderOps()

    def metadata_extension(
        self, geometry: ModelGeometry, limits: Limits, device: torch.device
    ) -> MetadataExtension[Any, Any]:
        raise NotImplementedError


def test_builder_ops_and_metadata_are_those_of_the_decode_backend() -> None:
    decode, prefill = Extending(), Extending()
    vars(prefill)["builder_ops"] = None
    phased: Any = PhasedBackend(decode, prefill)

    assert phased.builder_ops is not None
    with pytest.raises(NotImplementedError):
        phased.metadata_extension(tiny_geometry(), LIMITS, CPU)


def test_without_them_in_the_decode_backend_there_are_none() -> None:
    """Those of the prefill backend are not taken: the decode backend would not know their metadata."""
    phased = PhasedBackend(ReferenceBackend(), Extending())

    assert phased.builder_ops is None
    assert phased.metadata_extension(tiny_geometry(), LIMITS, CPU) is None


LIMITS = Limits(4, 64, 256)
BOUNDS, CPU = WarmupSpec.of(tiny_geometry(), LIMITS), torch.device("cpu")


class Compiled(ReferenceBackend):
    """A reference that has variants to compile, each `count` times."""

    def __init__(self, variants: Sequence[object], count: int = 1) -> None:
        super().__init__()
        self.variants, self.count, self.warmed = variants, count, list[Any]()

    def kernel_variants(self, bounds: WarmupSpec, device: DeviceFacts) -> Sequence[object]:
        assert bounds is BOUNDS
        return self.variants

    def warmup(self, bounds: WarmupSpec, device: torch.device) -> int:
        self.warmed.append((bounds, device))
        return len(set(self.variants)) * self.count


@pytest.mark.parametrize("count", [1, 2])
def test_both_are_warmed_and_variants_of_both_count_once(count: int) -> None:
    decode, prefill = Compiled(["a", "b", "b"], count), Compiled(["b", "c", "d"], count)
    phased: Any = PhasedBackend(decode, prefill)

    assert list(phased.kernel_variants(BOUNDS, DeviceFacts.named("cpu"))) == ["a", "b", "c", "d"]
    assert phased.warmup(BOUNDS, CPU) == 4 * count
    assert decode.warmed == prefill.warmed == [(BOUNDS, CPU)]


@pytest.mark.parametrize("is_prefill", [False, True])
def test_only_a_backend_that_compiles_is_warmed(*, is_prefill: bool) -> None:
    compiled = Compiled(["a", "b"])
    both = (compiled, ReferenceBackend())
    phased: Any = PhasedBackend(*both[:: -1 if is_prefill else 1])

    assert list(phased.kernel_variants(BOUNDS, DeviceFacts.named("cpu"))) == ["a", "b"]
    assert phased.warmup(BOUNDS, CPU) == 2
    assert len(compiled.warmed) == 1


def test_a_backend_that_serves_both_phases_is_warmed_once() -> None:
    compiled = Compiled(["a", "b"])
    phased: Any = PhasedBackend(compiled, compiled)

    assert phased.warmup(BOUNDS, CPU) == 2
    assert len(compiled.warmed) == 1


def test_a_pair_of_backends_that_compile_nothing_compiles_nothing() -> None:
    phased = PhasedBackend(ReferenceBackend(), ReferenceBackend())

    assert list(phased.kernel_variants(BOUNDS, DeviceFacts.named("cpu"))) == []
    assert phased.warmup(BOUNDS, CPU) == 0


def test_a_backend_may_warm_up_without_variants() -> None:
    decode = ReferenceBackend()
    vars(decode)["warmup"] = lambda _bounds, _device: 7
    phased = PhasedBackend(decode, Compiled(["a"]))

    assert phased.warmup(BOUNDS, CPU) == 8
    assert list(PhasedBackend(decode, ReferenceBackend()).kernel_variants(BOUNDS, DeviceFacts.named("cpu"))) == []


def test_every_optional_part_of_the_contract_is_forwarded() -> None:
    """Whatever a later version of the contract adds to `Backend` needs a rule in `PhasedBackend`."""
    attributes = {"builder_ops", "deterministic", "phases_agree", "index_ops", "layer_ops", "prepare_rows"}
    attributes |= {"projects_fp8", "rank_ops"}
    assert {*OPTIONAL_MEMBERS} == attributes | {
        "metadata_extension",
        "kernel_variants",
        "prefers_pages",
        "prepare",
        "prepare_entries",
        "takes_raw_q",
        "warmup",
    }
    assert attributes <= vars(PhasedBackend(ReferenceBackend(), ReferenceBackend())).keys()
    assert {*OPTIONAL_MEMBERS} - attributes <= vars(PhasedBackend).keys()

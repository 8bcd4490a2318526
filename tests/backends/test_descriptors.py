"""Where built-in backends are chosen, and which options they refuse: the same rules for all, from their descriptors."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve

from dsv4attn.backends._triton.codings import CODINGS
from dsv4attn.config import Settings
from dsv4attn.core.cache.key_records import KEY_RECORDS, KeyRecord
from dsv4attn.core.contract.backend import Phase, Rank
from dsv4attn.core.contract.device import DeviceFacts
from dsv4attn.core.contract.problem import KEY_LAYOUTS, CacheFacts, Problem, layouts_coded_by
from dsv4attn.core.model.geometry import LayerKind, ModelGeometry
from dsv4attn.errors import ArgumentError
from dsv4attn.plugins import PluginRegistry
from dsv4attn.selection import explain
from tests.backends.built_in import class_of, infos, known_devices, of_rank, triton_backends
from tests.harness import all_kinds

FLASH = ModelGeometry.preset("flash")
REGISTRY = PluginRegistry.load(entry_points=[])
VENDORS = of_rank(Rank.VENDOR)
PAIRS = [(name, arch) for name in VENDORS for arch in known_devices()]
NATIVE = [(name, arch) for name, arch in PAIRS if DeviceFacts.named(arch).matches(infos()[name].native)]
FOREIGN = [pair for pair in PAIRS if pair not in NATIVE]


@all_kinds
@pytest.mark.parametrize("phase", list(Phase))
@pytest.mark.parametrize(("name", "arch"), NATIVE)
def test_on_its_devices_a_vendors_backend_is_chosen_before_the_generic_one(
    name: str, arch: str, phase: Phase, kind: LayerKind
) -> None:
    problem, device = Problem.of(FLASH, kind, phase.value), DeviceFacts.named(arch)
    selection = explain(problem, device=device, backend="auto", settings=Settings(), registry=REGISTRY)

    assert selection.chosen is not None
    assert selection.chosen.info is REGISTRY.backends[name].info


@pytest.mark.parametrize(("name", "arch"), FOREIGN)
def test_elsewhere_it_must_be_asked_for_and_runs_only_where_its_descriptor_says(name: str, arch: str) -> None:
    device = DeviceFacts.named(arch)
    options = {"device": device, "settings": Settings(), "registry": REGISTRY}
    automatic = explain(Problem.of(FLASH), backend="auto", **options)  # type: ignore[arg-type]
    by_name = explain(Problem.of(FLASH), backend=name, **options)  # type: ignore[arg-type]

    assert automatic.chosen is None or automatic.chosen.info.name != name
    assert name in str(by_name)
    assert by_name.chosen is None or device.matches(infos()[name].runs_on)


@pytest.mark.parametrize(("codes", "scale"), [("int4", "ue8m0"), ("e4m3fn", "e4m3fn")])
def test_a_record_of_a_coding_that_no_kernel_knows_is_refused_by_every_backend(
    codes: str, scale: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert layouts_coded_by(CODINGS) == KEY_LAYOUTS, "the shared kernels know the coding of every record"
    planted = KeyRecord((codes,), 32, scale, {"split": 1}, codes_rope=True)
    monkeypatch.setitem(KEY_RECORDS, "planted", planted)
    monkeypatch.setitem(KEY_LAYOUTS, "planted", planted.codes)
    problem = evolve(Problem.of(FLASH), compressed=CacheFacts("planted", codes, group_size=32))
    for name in known_devices():
        selection = explain(problem, device=DeviceFacts.named(name), settings=Settings(), registry=REGISTRY)
        assert selection.chosen is None
        for info in infos().values():
            (reason,) = (one for one in info.support(DeviceFacts.named(name), problem) if one.code == "LAYOUT")
            assert reason.actual == f"compressed cache planted of {codes}"
            assert "planted" not in reason.allowed
    assert "LAYOUT  compressed cache planted" in str(explain(problem, backend="reference", registry=REGISTRY))


def test_every_vendors_backend_is_native_somewhere_and_elsewhere_not() -> None:
    assert {name for name, _ in NATIVE} == {name for name, _ in FOREIGN} == {*VENDORS}


@pytest.mark.parametrize("options", [{"tuning": "sm_70"}, {"deterministic": 1}, {"projection": "fp4"}], ids=str)
@pytest.mark.parametrize("name", triton_backends())
def test_an_option_with_a_wrong_value_says_what_it_may_be(name: str, options: dict[str, Any]) -> None:
    pytest.importorskip("triton", reason="needs Triton")
    (option,) = options
    with pytest.raises(ArgumentError, match=f"^{option}: expected"):
        class_of(name)(**options)

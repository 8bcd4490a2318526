"""From requests and this machine to a backend (promises G1, G6 and G9)."""

from __future__ import annotations

import itertools
import logging
import subprocess
import sys
from collections.abc import Iterator

import pytest

import dsv4attn
from dsv4attn import plugins
from dsv4attn.config import Settings
from dsv4attn.core.contract.backend import Rank
from dsv4attn.core.contract.device import DeviceFacts
from dsv4attn.core.contract.problem import Problem
from dsv4attn.core.model.geometry import LayerKind, ModelGeometry
from dsv4attn.errors import ArgumentError, ConfigError, NoBackendError
from dsv4attn.plugins import PluginRegistry
from dsv4attn.selection import backend_names, explain, resolve
from tests.backends.built_in import known_devices, of_rank
from tests.vendor_wheel import VendorWheels, plugin

FLASH = ModelGeometry.preset("flash")
PRO = ModelGeometry.preset("pro")
DECODE, PREFILL = Problem.of(FLASH, "c4a", "decode"), Problem.of(FLASH, "c4a", "prefill")
SM90 = DeviceFacts.named("sm90")
DEVICES = known_devices()


# the order of requests, on the real registry


def test_g9_argument_over_environment_over_file_over_automatic(
    wheels: VendorWheels, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("acme", "bolt", "zinc"):
        wheels.install(f"dsv4attn-{name}", plugin(name))
    requests = [resolve(DECODE).request]
    (wheels.folder / "dsv4attn.toml").write_text('backend = "acme"', encoding="utf-8")
    requests.append(resolve(DECODE).request)
    monkeypatch.setenv("DSV4ATTN_BACKEND", "bolt")
    requests.append(resolve(DECODE).request)
    requests += [resolve(DECODE, backend="zinc").request, resolve(DECODE, backend="auto").request]

    assert [request.value for request in requests] == ["auto", "acme", "bolt", "zinc", "auto"]
    assert [request.source for request in requests] == [
        "default",
        f"backend in {wheels.folder / 'dsv4attn.toml'}",
        "environment variable DSV4ATTN_BACKEND",
        "argument",
        "argument",
    ]


def test_g9_phases_are_resolved_separately(wheels: VendorWheels, monkeypatch: pytest.MonkeyPatch) -> None:
    wheels.install("dsv4attn-acme", plugin())
    monkeypatch.setenv("DSV4ATTN_BACKEND", "decode=acme")

    assert resolve(DECODE).require().info.name == "acme"
    assert resolve(PREFILL).require().info.name == "reference"
    assert resolve(PREFILL, backend="prefill=acme").require().info.name == "acme"
    assert resolve(DECODE, backend="prefill=reference").require().info.name == "acme"


@pytest.mark.parametrize("backend", ["decode=", "decode=a,decode=b"])
def test_an_argument_that_cannot_be_read_is_an_error(backend: str) -> None:
    with pytest.raises(ConfigError, match=r"^argument backend: expected NAME or"):
        resolve(DECODE, backend=backend)


def test_g9_a_configuration_that_names_a_denied_plugin_says_so(wheels: VendorWheels) -> None:
    wheels.install("dsv4attn-acme", plugin())
    path = wheels.folder / "dsv4attn.toml"
    path.write_text('backend = "acme"\nplugins.deny = ["acme"]', encoding="utf-8")

    with pytest.raises(NoBackendError) as caught:
        resolve(DECODE)
    lines = str(caught.value).splitlines()
    denied = f"not loaded: denied by plugins.deny in {path} (dsv4attn-acme 0.2) -> take it off that list to use it"
    assert lines[0] == f"backend 'acme' cannot be used: {denied}"
    assert f'  request    "acme"  (backend in {path})' in lines


def test_g9_an_automatic_choice_is_logged_once_with_its_reason(
    wheels: VendorWheels, caplog: pytest.LogCaptureFixture
) -> None:
    wheels.install("dsv4attn-acme", plugin(support="raise KeyError('boom')"))
    with caplog.at_level(logging.INFO, "dsv4attn"):
        for _ in range(3):
            resolve(DECODE)
        resolve(PREFILL)
        resolve(DECODE, backend="reference")

    line = "is broken: its support raised KeyError: 'boom' (dsv4attn-acme 0.2)"
    line += " -> report it to its authors, or leave it out: DSV4ATTN_PLUGINS_DENY=dsv4attn-acme"
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("INFO", "dsv4attn: decode runs on reference: the only backend native to cpu that can run this call"),
        ("WARNING", f"dsv4attn: backend acme was passed over: {line}"),
        ("INFO", "dsv4attn: prefill runs on reference: the only backend native to cpu that can run this call"),
    ]


def test_explaining_is_not_logged_and_does_not_raise(wheels: VendorWheels, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "dsv4attn"):
        assert explain(DECODE, device=SM90, backend="nobody").chosen is None
    assert caplog.records == []


def test_the_device_may_be_given_as_torch_names_it(wheels: VendorWheels) -> None:
    assert explain(DECODE, device="cpu").device == DeviceFacts.here("cpu")
    with pytest.raises(ArgumentError, match=r"^device: expected a device of this machine, got 'quantum'"):
        explain(DECODE, device="quantum")


# every device and problem


def problems_of_every_kind() -> Iterator[Problem]:
    for geometry, phase, pages in itertools.product((FLASH, PRO), ("decode", "prefill"), ((64, None), (256, 16))):
        for kind in geometry.kinds:
            compressed = None if kind is LayerKind.SWA else pages[1]
            yield Problem.of(geometry, kind, phase, swa_page_size=pages[0], compressed_page_size=compressed)


def automatic(name: str, registry: PluginRegistry) -> set[str | None]:
    """Names of the backends that are chosen on a device for problems of every kind; None if a problem has none."""
    device, chosen = DeviceFacts.named(name), set[str | None]()
    for problem in problems_of_every_kind():
        selection = explain(problem, device=device, settings=Settings(), registry=registry)
        if selection.chosen is None:
            assert f"never automatic on {device.arch} -> ask for it by name" in str(selection)
        chosen.add(None if selection.chosen is None else selection.chosen.info.name)
    return chosen


@pytest.mark.parametrize("name", DEVICES)
def test_g1_every_problem_has_a_backend_on_every_device(name: str) -> None:
    """Automatic wherever Triton runs, and by name everywhere. The slow reference is never automatic on a GPU."""
    registry = PluginRegistry.load(entry_points=[])
    device = DeviceFacts.named(name)
    for problem in problems_of_every_kind():
        by_name = explain(problem, device=device, backend="reference", settings=Settings(), registry=registry)
        assert by_name.require().info.name == "reference"

    chosen = automatic(name, registry)

    if native_of(device, registry) - {*of_rank(Rank.REFERENCE)}:
        assert None not in chosen
        ranks = {registry.backends[backend].info.rank for backend in chosen if backend}
        assert Rank.REFERENCE not in ranks
    else:
        assert chosen == {"reference" if name == "cpu" else None}


def native_of(device: DeviceFacts, registry: PluginRegistry) -> set[str]:
    """Names of the backends that are native to a device."""
    return {name for name, backend in registry.backends.items() if device.matches(backend.info.native)}


def test_g1_every_device_of_triton_has_a_native_backend() -> None:
    registry = PluginRegistry.load(entry_points=[])

    for name in known_devices("cuda", "hip", "xpu"):
        assert native_of(DeviceFacts.named(name), registry) >= {*of_rank(Rank.GENERIC)}


@pytest.mark.parametrize("name", known_devices("cuda", "hip", "xpu"))
def test_g1_the_generic_backend_alone_serves_every_device_of_triton(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The generic backend takes what a vendor's backend refuses."""
    generic = of_rank(Rank.GENERIC)
    monkeypatch.setattr(plugins, "BUILT_IN", (*generic, *of_rank(Rank.REFERENCE)))

    assert automatic(name, PluginRegistry.load(entry_points=[])) == {*generic}


@pytest.mark.parametrize("name", ["sm70", "sm75"])
def test_g1_a_device_without_matrix_units_for_bf16_is_refused_with_the_cause(name: str) -> None:
    selection = explain(DECODE, device=DeviceFacts.named(name), settings=Settings())

    assert selection.chosen is None
    assert "sm_80 or newer" in str(selection)


def test_g1_the_cpu_has_an_automatic_backend() -> None:
    assert resolve(DECODE, device=DeviceFacts.named("cpu")).require().info.name == "reference"


# weight

IMPORTS = (
    "selection",
    "plugins",
    "config",
    "hookspecs",
    "backends.reference",
    "core.contract.backend",
    "core.cache.selected_keys",
    "core.contract.problem",
    "core.contract.phased",
)
HEAVY = ("torch", "triton", "numpy")
CHOOSE = """
from dsv4attn.core.model.geometry import ModelGeometry
from dsv4attn.core.contract.problem import Problem
from dsv4attn.core.contract import device
from dsv4attn.core.contract.device import DeviceFacts
from dsv4attn.selection import backend_names, resolve
assert "reference" in backend_names()
resolve(Problem.of(ModelGeometry.preset("flash")), device=DeviceFacts.named("cpu"))
"""


@pytest.mark.parametrize("code", [*(f"import dsv4attn.{name}" for name in IMPORTS), CHOOSE])
def test_g6_choosing_loads_neither_torch_nor_triton_nor_numpy(code: str) -> None:
    code += f"\nimport sys\nprint(sorted({{*{HEAVY!r}}} & {{*sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_the_public_names_are_these() -> None:
    assert dsv4attn.resolve is resolve
    assert backend_names() == sorted(backend_names())

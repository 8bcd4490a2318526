"""Facts of devices: described by name, and read off a machine that a test describes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dsv4attn.core.contract import device as device_module
from dsv4attn.core.contract.device import DeviceFacts, may_have_accelerator, release_of, version_of
from dsv4attn.core.contract.devices import DEVICES
from dsv4attn.errors import ArgumentError, UnknownNameError

# by name


@pytest.mark.parametrize(
    ("name", "kind", "arch"),
    [
        ("cpu", "cpu", "cpu"),
        ("xpu", "xpu", "xpu"),
        ("npu", "npu", "npu"),
        ("sm80", "cuda", "sm_80"),
        ("sm_120", "cuda", "sm_120"),
        ("SM90", "cuda", "sm_90"),
        ("sm_999", "cuda", "sm_999"),
        ("gfx90a", "hip", "gfx90a"),
        ("gfx942:sramecc+:xnack-", "hip", "gfx942"),
        ("gfx1201", "hip", "gfx1201"),
        (" gfx950 ", "hip", "gfx950"),
    ],
)
def test_any_device_can_be_described_by_its_name(name: str, kind: str, arch: str) -> None:
    facts = DeviceFacts.named(name)

    assert (facts.kind, facts.arch, facts.present) == (kind, arch, False)
    assert facts.name
    assert str(facts).startswith(f'{arch} "')
    assert str(facts).endswith("described, not here")


@pytest.mark.parametrize(
    ("names", "arch"),
    [
        (["a100"], "sm_80"),
        (["rtx 3090", "RTX3090"], "sm_86"),
        (["l40s", "rtx4090", "NVIDIA GeForce RTX 4090"], "sm_89"),
        (["h100", "H200", "NVIDIA H200", "cuda"], "sm_90"),
        (["b200"], "sm_100"),
        (["b300"], "sm_103"),
        (["rtx5090", "rtx pro 6000"], "sm_120"),
        (["gb10", "DGX Spark", "dgx-spark"], "sm_121"),
        (["mi250x"], "gfx90a"),
        (["mi300x", "AMD Instinct MI300X"], "gfx942"),
        (["mi355x"], "gfx950"),
        (["rx 7900", "AMD Radeon RX 7900 XTX"], "gfx1100"),
        (["strix halo"], "gfx1151"),
        (["rx 9070"], "gfx1201"),
        (["b580", "Intel Arc B580"], "xpu"),
    ],
)
def test_devices_have_the_names_of_products(names: list[str], arch: str) -> None:
    assert {DeviceFacts.named(name).arch for name in names} == {arch}


def test_no_name_means_two_devices() -> None:
    names = [name for device in DEVICES for name in device.spellings]

    assert len(names) == len({*names})


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("xpuu", "xpu"),
        ("sm", "sm_"),
        ("gfx", "gfx"),
        ("h2O0", "h200"),
        ("mi30O", "mi300"),
        ("4090", "rtx4090"),
        ("rx580", "rx"),
        ("", ""),
    ],
)
def test_an_unknown_device_is_an_error_with_a_suggestion(name: str, suggestion: str) -> None:
    with pytest.raises(UnknownNameError, match=rf"^unknown device '{name}'") as caught:
        DeviceFacts.named(name)
    assert not suggestion or f"did you mean '{suggestion}" in str(caught.value)
    assert "sm_90" in str(caught.value)
    assert "mi300x" in str(caught.value)


@pytest.mark.parametrize(
    "name", ["h2O0", "b", "r", "rtx", "rx", "mi", "mi100", "b999", "a999", "x1", "300", "gb", "l", "m"]
)
def test_a_suggestion_is_of_one_vendor(name: str) -> None:
    with pytest.raises(UnknownNameError) as caught:
        DeviceFacts.named(name)
    suggestion = str(caught.value).partition(" (known:")[0].partition("did you mean")[2]
    kinds = {device.kind for device in DEVICES for spelling in device.spellings if f"'{spelling}'" in suggestion}

    assert len(kinds) <= 1
    assert {"h2O0": {"cuda"}, "mi100": {"hip"}}.get(name, kinds) == kinds


@pytest.mark.parametrize(
    ("name", "patterns", "expected"),
    [
        ("sm90", ("sm_90",), True),
        ("sm90", ("cuda",), True),
        ("sm121", ("sm_12*",), True),
        ("sm90", ("sm_12*", "hip"), False),
        ("cpu", ("*",), True),
        ("cpu", (), False),
        ("gfx1201", ("gfx9*",), False),
    ],
)
def test_a_pattern_is_of_a_kind_or_an_arch(name: str, patterns: tuple[str, ...], expected: bool) -> None:
    assert DeviceFacts.named(name).matches(patterns) is expected


# of this machine


@pytest.fixture
def dev(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty /dev."""
    monkeypatch.setattr(device_module, "_DEV", tmp_path)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr("importlib.metadata.entry_points", lambda **_: ())
    monkeypatch.setattr(device_module, "_has_torch_plugins", device_module._has_torch_plugins.__wrapped__)
    return tmp_path


@pytest.mark.parametrize(
    "node",
    ["nvidiactl", "nvidia3", "kfd", "dri/renderD129", "dxg", "davinci0", "accel/accel0", "hl0"],
)
def test_an_accelerator_is_seen_by_its_node(dev: Path, node: str) -> None:
    (dev / "null").touch()
    assert not may_have_accelerator()

    (dev / node).parent.mkdir(exist_ok=True)
    (dev / node).touch()
    assert may_have_accelerator()


@pytest.mark.parametrize(("platform", "expected"), [("win32", True), ("darwin", False), ("freebsd14", True)])
def test_elsewhere_torch_has_to_be_asked(
    dev: Path, monkeypatch: pytest.MonkeyPatch, platform: str, expected: bool
) -> None:
    monkeypatch.setattr(sys, "platform", platform)

    assert may_have_accelerator() is expected


def test_torch_is_asked_if_a_third_party_brings_a_device(dev: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.entry_points", lambda **_: ("torch_npu",))
    assert may_have_accelerator()

    def broken(group: str) -> None:
        raise ValueError(group)

    monkeypatch.setattr("importlib.metadata.entry_points", broken)
    assert may_have_accelerator()


def test_g6_a_machine_without_accelerator_is_known_without_torch(tmp_path: Path) -> None:
    code = f"""
import pathlib, sys
from dsv4attn.core.contract import device
device._DEV = pathlib.Path({str(tmp_path)!r})
print(device.DeviceFacts.here().arch, len(device.DeviceFacts.all_here()), "torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.split() == ["cpu", "1", "False"]


class Machine:
    """A machine with accelerators, as torch would show them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kind: str, count: int = 2, *, hip: str | None = None) -> None:
        properties = SimpleNamespace(major=12, minor=0, name="RTX", gcnArchName="gfx942:sramecc+:xnack-")
        accelerator = torch.device(kind) if count else None
        monkeypatch.setattr(device_module, "may_have_accelerator", lambda: True)
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: accelerator)
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
        monkeypatch.setattr(torch.xpu, "get_device_name", lambda _: "Arc B580")
        monkeypatch.setattr(torch.version, "hip", hip)


@pytest.mark.parametrize(
    ("torch_kind", "hip", "expected"),
    [
        ("cuda", None, ("cuda", "sm_120", "RTX")),
        ("cuda", "6.4", ("hip", "gfx942", "RTX")),
        ("xpu", None, ("xpu", "xpu", "Arc B580")),
        ("mps", None, ("mps", "mps", "mps")),
    ],
)
def test_the_first_accelerator_is_what_is_here(
    monkeypatch: pytest.MonkeyPatch, torch_kind: str, hip: str | None, expected: tuple[str, str, str]
) -> None:
    Machine(monkeypatch, torch_kind, hip=hip)
    facts = DeviceFacts.here()

    assert (facts.kind, facts.arch, facts.name) == expected
    assert facts.present
    assert "described" not in str(facts)
    assert [device.arch for device in DeviceFacts.all_here()] == [expected[1], expected[1], "cpu"]
    assert DeviceFacts.here("cpu").arch == DeviceFacts.here(torch.device("cpu")).arch == "cpu"
    assert DeviceFacts.here(torch.device(torch_kind, 1)).arch == expected[1]


def test_nodes_without_a_device_that_torch_knows_are_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    Machine(monkeypatch, "cpu", 0)

    assert DeviceFacts.here().arch == "cpu"
    assert [facts.arch for facts in DeviceFacts.all_here()] == ["cpu"]


@pytest.mark.parametrize("name", ["quantum", "cpu:x", "", "mps:first", "meta", "hip"])
def test_a_name_that_is_no_device_of_torch_is_an_argument_error(name: str) -> None:
    with pytest.raises(ArgumentError, match=rf"^device: expected a device of this machine, got '{name}'") as caught:
        DeviceFacts.here(name)
    assert str(caught.value).endswith(" -> give a name of torch; this machine has cpu")


def test_a_device_that_is_not_there_is_an_argument_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: torch.device) -> None:
        raise AssertionError("Torch not compiled with CUDA enabled")

    monkeypatch.setattr(device_module, "_identity", refuse)
    with pytest.raises(ArgumentError, match=r"got 'cpu:7' \(Torch not compiled with CUDA enabled\)"):
        DeviceFacts.here("cpu:7")


@pytest.mark.parametrize(("value", "expected"), [("1", True), ("true", True), ("ON", True), ("0", False), ("", False)])
def test_the_interpreter_of_triton_is_a_fact(monkeypatch: pytest.MonkeyPatch, value: str, expected: bool) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", value)
    facts = DeviceFacts.here("cpu")

    assert facts.interpreted is expected
    assert ("interpreted" in str(facts)) is expected


def test_versions_are_read_without_importing() -> None:
    assert torch.__version__.startswith(str(version_of("torch")))
    assert version_of("no-such-package") is None
    assert version_of("") is None


@pytest.mark.parametrize(
    ("version", "release"),
    [("3.6.0", (3, 6)), ("3.10.1", (3, 10)), ("3.5.1+git1b2c", (3, 5)), ("any", None), (None, None), ("", None)],
)
def test_a_release_is_the_first_two_numbers_of_a_version(version: str | None, release: tuple[int, int] | None) -> None:
    assert release_of(version) == release


@pytest.mark.parametrize(
    "distribution", ["triton", "pytorch-triton-rocm", "pytorch-triton-xpu", "triton-xpu", "triton-windows"]
)
def test_triton_has_the_version_of_the_distribution_that_brings_it(
    monkeypatch: pytest.MonkeyPatch, distribution: str
) -> None:
    monkeypatch.setattr(device_module, "version_of", lambda name: "3.2.0" if name == distribution else None)
    device_module._triton_version.cache_clear()
    try:
        assert device_module._triton_version() == "3.2.0"
    finally:
        device_module._triton_version.cache_clear()

"""`dsv4attn doctor`: what is wrong, and what to do."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from attrs import evolve

import dsv4attn
from dsv4attn.core.contract.device import DeviceFacts
from dsv4attn.tools.cli import installation
from dsv4attn.tools.cli.installation import Attempt
from tests.tools.cli.machine import Machine, device_of_no_backend, imported, without_triton
from tests.vendor_wheel import plugin

TRIED = installation.tried
"""The function before a test replaces it."""


def problems(machine: Machine, **environ: str) -> list[tuple[str, str]]:
    code, values = machine.json("doctor", **environ)
    assert code == (1 if values["problems"] else 0)
    return [(problem["what"], problem["cure"]) for problem in values["problems"]]


def test_a_healthy_installation_has_next_steps(machine: Machine) -> None:
    code, values = machine.json("doctor")

    assert (code, values["problems"], values["plugins"]) == (0, [], [])
    assert values["versions"]["dsv4attn"] == dsv4attn.__version__
    assert {"python", "torch", "triton", "attrs", "pluggy"} <= {*values["versions"]}
    assert [device["arch"] for device in values["devices"]] == ["cpu"]
    assert values["automatic"] == {"decode": "reference", "prefill": "reference"}
    assert any("dsv4attn run" in step for step in values["next"])
    assert machine.run("doctor")[1][-4] == "  nothing is wrong"


def test_every_value_has_its_source(machine: Machine) -> None:
    path = machine.wheels.folder / "dsv4attn.toml"
    path.write_text("prefill = 'reference'\noptions.reference.prefill_keys = 'paged'", encoding="utf-8")
    _, report = machine.json("doctor", DSV4ATTN_BACKEND="decode=reference", TRITON_INTERPRET="0")
    values = {row["key"]: (row["value"], row["source"]) for row in report["configuration"]["values"]}

    assert report["configuration"]["file"] == str(path)
    assert values == {
        "decode": ("reference", "environment variable DSV4ATTN_BACKEND"),
        "prefill": ("reference", f"prefill in {path}"),
        "plugins.allow": ("all", "default"),
        "plugins.deny": ("none", "default"),
        "options.reference": ("prefill_keys='paged'", str(path)),
    }
    assert report["environment"] == {"DSV4ATTN_BACKEND": "decode=reference", "TRITON_INTERPRET": "0"}


def test_ops_of_the_reference_and_the_trace_are_named(machine: Machine) -> None:
    _, report = machine.json("doctor", DSV4ATTN_REFERENCE_OPS="attend,select_topk", DSV4ATTN_TRACE="1")
    values = {row["key"]: (row["value"], row["source"]) for row in report["configuration"]["values"]}

    assert values["reference ops"] == ("attend, select_topk", "DSV4ATTN_REFERENCE_OPS")
    assert values["trace"] == ("stderr", "DSV4ATTN_TRACE")
    code, report = machine.json("doctor", DSV4ATTN_REFERENCE_OPS="nothing")
    assert code == 1
    assert "environment variable DSV4ATTN_REFERENCE_OPS: unknown op 'nothing'" in report["problems"][0]["what"]


def test_a_broken_pyproject_of_another_project_is_mentioned_and_no_problem(machine: Machine) -> None:
    path = machine.wheels.folder / "pyproject.toml"
    path.write_bytes(b'authors = ["Andr\xe9"]')
    _, values = machine.json("doctor")
    _, lines = machine.run("doctor", width=400)

    assert values["problems"] == []
    [ignored] = values["configuration"]["ignored"]
    assert ignored.startswith(f"{path}: cannot be read: 'utf-8' codec can't decode byte 0xe9")
    assert f"ignored: {ignored}" in [line.strip() for line in lines]


def test_a_broken_plugin_is_a_problem_with_a_traceback_and_a_cure(machine: Machine) -> None:
    machine.wheels.install("dsv4attn-lib", "def load():\n    raise ImportError('libacme.so [x]')\n\nload()")
    _, values = machine.json("doctor")
    [problem] = values["problems"]

    assert problem["what"] == "lib failed to load: ImportError: libacme.so [x] (dsv4attn-lib 0.2)"
    assert problem["cure"] == "repair or remove it, or leave it out: DSV4ATTN_PLUGINS_DENY=lib"
    assert "dsv4attn_lib.py" in problem["trace"]
    assert values["plugins"][0]["traceback"] == problem["trace"]
    assert values["next"] == [problem["cure"]]
    assert problems(machine, DSV4ATTN_PLUGINS_DENY="lib") == []

    code, lines = machine.run("doctor")
    assert code == 1
    assert "  1  lib failed to load: ImportError: libacme.so [x] (dsv4attn-lib 0.2)" in lines
    assert "     ImportError: libacme.so [x]" in lines
    assert max(map(len, lines)) <= 80


def test_a_backend_whose_support_raises_is_a_problem(machine: Machine) -> None:
    machine.install("raises", support="raise KeyError('boom')")

    assert problems(machine) == [
        (
            "raises is broken: its support raised KeyError: 'boom' (dsv4attn-raises 0.2)",
            "report it to its authors, or leave it out: DSV4ATTN_PLUGINS_DENY=dsv4attn-raises",
        )
    ]
    assert "dsv4attn_raises.py" in machine.json("doctor")[1]["problems"][0]["trace"]


@pytest.mark.parametrize(
    ("environ", "what"),
    [
        (
            {"DSV4ATTN_PLUGINS_DENY": "acmee"},
            "acmee is not installed: named by DSV4ATTN_PLUGINS_DENY; did you mean 'acme'?",
        ),
        ({"DSV4ATTN_BACKEND": "acme2"}, "decode: backend 'acme2' cannot be used: no backend has this name"),
        ({"DSV4ATTN_BAKEND": "x"}, "configuration: environment variable DSV4ATTN_BAKEND: unknown variable; did you"),
        (
            {"DSV4ATTN_CONFIG": "/no/file"},
            "configuration: environment variable DSV4ATTN_CONFIG: /no/file is not a file",
        ),
    ],
)
def test_mistakes_in_the_configuration_are_problems(machine: Machine, environ: dict[str, str], what: str) -> None:
    machine.install("acme")

    assert problems(machine, **environ)[0][0].startswith(what)


def test_a_file_that_cannot_be_read_is_not_said_to_be_missing(machine: Machine) -> None:
    (machine.wheels.folder / "dsv4attn.toml").write_text("decode = [", encoding="utf-8")
    text = " ".join(machine.run("doctor")[1])

    assert re.search(
        r"configuration\s+not read: problem 1 below says why\s.*\s1\s+configuration: .*not valid TOML", text
    )


def test_options_of_no_backend_are_a_problem(machine: Machine) -> None:
    (machine.wheels.folder / "dsv4attn.toml").write_text("options.refernz.a = 1", encoding="utf-8")

    assert "no backend has this name; did you mean 'reference'?" in problems(machine)[0][0]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "reference.foo = 1",
            "unknown option 'foo' (known: decode_indices, prefill_indices, prefill_keys, deterministic, raw_q)",
        ),
        ("reference.decode_indices = 'raged'", "unknown decode_indices form 'raged'; did you mean 'ragged'?"),
        ("rocm.nonsense = 1", "unknown option 'nonsense' (known: tuning, deterministic, projection)"),
        ("triton.tuning = 'sm_1'", "tuning: expected 'auto' or a row of the triton backend"),
    ],
)
def test_options_with_which_a_backend_refuses_to_load_are_a_problem(machine: Machine, line: str, said: str) -> None:
    path = machine.wheels.folder / "dsv4attn.toml"
    path.write_text(f"options.{line}", encoding="utf-8")
    [(what, cure)] = problems(machine)
    name = line.partition(".")[0]

    assert what.startswith(f"options.{name} in {path}: {said}")
    assert cure == f"correct it: {name} refuses to load with these options"
    code, values = machine.json("explain", "--backend", "reference")
    assert code == (2 if name == "reference" else 0)
    assert name != "reference" or said in values["error"]["message"]


def test_options_that_make_a_backend_break_are_a_problem_with_its_traceback(machine: Machine) -> None:
    source = plugin(factory="dsv4attn_acme:make", options={"tile": 4}) + "\n\ndef make(tile):\n    return None\n"
    machine.wheels.install("dsv4attn-acme", source)
    (machine.wheels.folder / "dsv4attn.toml").write_text("options.acme.tile = 8", encoding="utf-8")

    [(what, cure)] = problems(machine)
    assert what.startswith("backend 'acme' is broken: dsv4attn_acme:make: it made NoneType")
    assert cure == "report it to the authors of dsv4attn-acme 0.2"


def test_right_options_of_a_backend_that_lacks_triton_are_no_problem(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_triton(monkeypatch)
    (machine.wheels.folder / "dsv4attn.toml").write_text("options.xpu.deterministic = true", encoding="utf-8")

    assert problems(machine) == []


def test_a_device_without_an_automatic_backend_is_a_problem(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    unserved = DeviceFacts.named(device_of_no_backend(monkeypatch))
    monkeypatch.setattr(DeviceFacts, "all_here", lambda: [unserved])

    assert problems(machine) == [
        (
            f"{phase}: no backend native to abacus can run this call",
            f"ask for reference by name; `dsv4attn explain --phase {phase}` says why",
        )
        for phase in ("decode", "prefill")
    ]
    assert problems(machine, DSV4ATTN_BACKEND="reference") == []


def test_a_torch_that_cannot_be_asked_is_a_problem_and_not_a_crash(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> list[DeviceFacts]:
        raise OSError("libtorch.so: cannot open")

    monkeypatch.setattr(DeviceFacts, "all_here", broken)

    assert problems(machine)[0][0] == "devices: OSError: libtorch.so: cannot open"


@pytest.mark.parametrize("width", [80, 120])
def test_everything_is_aligned(machine: Machine, width: int) -> None:
    machine.install("acme")
    code, lines = machine.run("doctor", width=width, DSV4ATTN_PLUGINS_DENY="acme")
    names = [line[2:15].rstrip() for line in lines if line.startswith("  ") and line[2] not in " n"]

    assert code == 0
    assert names == [
        "versions",
        "system",
        "devices",
        "configuration",
        "environment",
        "backends",
        "automatic",
        "runs",
        "engines",
    ]
    assert max(map(len, lines)) <= width
    assert "                 acme not loaded: denied by DSV4ATTN_PLUGINS_DENY (dsv4attn-acme" in "\n".join(lines)


def with_torch(monkeypatch: pytest.MonkeyPatch, *, installed: bool = True, found: bool = True, **builds: str) -> None:
    """A torch of these builds, or none."""

    def tried(package: str) -> Attempt:
        attempt = imported(package)
        if package != "torch":
            return attempt
        return evolve(attempt, installed=installed, facts={**attempt.facts, "found": found, **builds})

    monkeypatch.setattr(installation, "tried", tried)


def with_node(name: str, vendor: str = "") -> None:
    """A device node, and the maker of a graphics device."""
    node = installation._DEV / name
    node.parent.mkdir(parents=True, exist_ok=True)
    node.touch()
    if vendor:
        folder = installation._SYS / "class" / "drm" / node.name / "device"
        folder.mkdir(parents=True)
        (folder / "vendor").write_text(f"{vendor}\n", encoding="ascii")


def test_an_absent_torch_is_a_problem(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    with_torch(monkeypatch, installed=False)

    assert problems(machine)[0] == (
        "torch is not installed",
        "install the build of torch for this device: https://pytorch.org/get-started/locally",
    )


@pytest.mark.parametrize("how", ["missing", "broken"])
def test_without_torch_the_doctor_ends_with_its_report(tmp_path: Path, how: str) -> None:
    what = "torch is not installed"
    code = "import sys; sys.modules['torch'] = None; "
    if how == "broken":
        (tmp_path / "torch.py").write_text("raise ImportError('libcudnn.so.9: cannot open')", encoding="utf-8")
        what, code = "`import torch` fails: ImportError: libcudnn.so.9: cannot open", ""
    path = os.pathsep.join([str(tmp_path), str(Path(dsv4attn.__file__).parents[1])])
    code += "from dsv4attn.tools.cli import main; main(['doctor', '--json'])"
    environ = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=False)
    values = json.loads(done.stdout)

    assert (done.returncode, done.stderr) == (1, "")
    assert what in [problem["what"] for problem in values["problems"]]


@pytest.mark.parametrize("package", ["torch", "triton"])
def test_an_import_that_fails_is_a_problem_with_its_last_line(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    folder = machine.wheels.folder / "first"
    (folder / package).mkdir(parents=True)
    (folder / package / "__init__.py").write_text("raise ImportError('libcudnn.so.9: cannot open')", encoding="utf-8")
    monkeypatch.setattr(installation, "tried", lambda name: (TRIED if name == package else imported)(name))
    monkeypatch.setenv("PYTHONPATH", str(folder))
    code, values = machine.json("doctor")
    problem = values["problems"][0]

    assert code == 1
    assert problem["what"] == f"`import {package}` fails: ImportError: libcudnn.so.9: cannot open"
    assert problem["cure"].startswith(f"reinstall {package}, ")
    assert "__init__.py" in problem["trace"]


@pytest.mark.matrix
def test_a_torch_that_works_says_what_it_is_built_for() -> None:
    attempt = TRIED("torch")

    assert attempt.works
    assert {*attempt.facts} == {"found", "memory", "version", "cuda", "hip", "xpu"}


@pytest.mark.parametrize(
    ("node", "vendor", "builds", "said"),
    [
        ("nvidia0", "", {}, "there is a device for CUDA, but torch 2.13.0+cpu is built for the CPU alone"),
        ("kfd", "", {}, "there is a device for ROCm, but torch 2.13.0+cpu is built for the CPU alone"),
        ("dri/renderD128", "0x8086", {}, "there is a device for XPU, but torch 2.13.0+cpu is built for the CPU alone"),
        ("nvidia0", "", {"hip": "7.1"}, "there is a device for CUDA, but torch 2.13.0+cpu is built for ROCm 7.1"),
        ("dri/renderD128", "0x1af4", {}, None),
        ("nvidiactl", "", {}, None),
        ("nvidia0", "", {"cuda": "12.8"}, None),
        ("kfd", "", {"hip": "7.1"}, None),
    ],
)
def test_a_device_that_torch_is_not_built_for_is_a_problem(
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
    node: str,
    vendor: str,
    builds: dict[str, str],
    said: str | None,
) -> None:
    with_torch(monkeypatch, **builds)  # type: ignore[arg-type]
    with_node(node, vendor)

    assert [what for what, _ in problems(machine)] == ([f"{installation._DEV / node}: {said}"] if said else [])


def test_a_driver_with_which_torch_finds_no_device_is_a_problem(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_torch(monkeypatch, found=False, cuda="12.8")
    with_node("nvidia0")
    [(what, cure)] = problems(machine)

    assert what.endswith("nvidia0: torch for CUDA 12.8 finds no device")
    assert cure.startswith("`nvidia-smi` says whether the driver works")
    assert problems(machine, CUDA_VISIBLE_DEVICES="") == []


NO_MODULE = "dsv4attn_acme_kernels:Make: ModuleNotFoundError: No module named 'dsv4attn_acme_kernels'"
MISSPELT = "dsv4attn_acme:Mak: AttributeError: module 'dsv4attn_acme' has no attribute 'Mak'"


@pytest.mark.parametrize(
    ("factory", "said"), [("dsv4attn_acme_kernels:Make", NO_MODULE), ("dsv4attn_acme:Mak", MISSPELT)]
)
def test_a_plugin_whose_backend_cannot_be_made_is_a_problem(machine: Machine, factory: str, said: str) -> None:
    machine.wheels.install("dsv4attn-acme", plugin(factory=factory))

    assert problems(machine) == [
        (f"backend 'acme' is broken: {said}", "report it to the authors of dsv4attn-acme 0.2"),
    ]


def test_a_plugin_that_brings_ops_which_its_descriptor_does_not_name_is_a_problem(machine: Machine) -> None:
    source = """

from dsv4attn.backends.reference.launch import ReferenceBackend


class Acme(ReferenceBackend):
    name = "acme"

    @property
    def layer_ops(self):
        from attrs import evolve
        return evolve(super().layer_ops, select_topk=lambda *args, **options: None)
"""
    machine.wheels.install("dsv4attn-acme", plugin(factory="dsv4attn_acme:Acme") + source)

    assert "BackendInfo.layer_ops names none, and its layer_ops bring selection" in problems(machine)[0][0]


def test_the_system_and_the_backend_that_runs_are_named(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    with_torch(monkeypatch, found=True, cuda="12.8", memory=[80 * 2**30])  # type: ignore[arg-type]
    (installation._SYS / "module" / "nvidia").mkdir(parents=True)
    (installation._SYS / "module" / "nvidia" / "version").write_text("580.95\n", encoding="ascii")
    installation._PROC.mkdir()
    (installation._PROC / "cpuinfo").write_text("model name\t: Acme 3000\n", encoding="ascii")
    machine.install("acme", native=("cpu",))
    _, values = machine.json("doctor", DSV4ATTN_BACKEND="decode=reference")

    assert values["system"]["os"]
    assert values["system"]["cpu"].startswith("Acme 3000, ")
    assert values["system"]["driver"] == "nvidia 580.95"
    assert values["system"]["torch build"] == "CUDA 12.8"
    assert values["system"]["gpu memory"] == "80 GiB"
    assert values["runs"] == {"decode": "reference", "prefill": "acme"}

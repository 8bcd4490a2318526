"""`dsv4attn new-plugin`: what it writes is the example, and a plugin that works."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import dsv4attn
from dsv4attn.plugins import BUILT_IN
from dsv4attn.testing.case import chosen
from dsv4attn.testing.cases.table import CASES
from dsv4attn.testing.conform import Subject, conform
from dsv4attn.tools.cli.new_plugin import NewPlugin, template_folder
from tests.tools.cli.machine import Machine

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[3]
ACME = ROOT / "examples" / "dsv4attn-acme"
SOME = "sink-matters-swa-*,lse-decode,insert-skips,project-1-bf16,scratch-swa,stale-swa,mhc-fused-bf16"
"""Patterns for cases of every area, few enough to be quick."""


def written(folder: Path) -> dict[str, str]:
    files = (file for file in folder.rglob("*") if file.is_file() and "__pycache__" not in file.parts)
    return {file.relative_to(folder).as_posix(): file.read_text(encoding="utf-8") for file in files}


def install(machine: Machine, project: Path) -> None:
    """Put a written project on the path, with the entry point of its pyproject.toml, as pip does."""
    metadata = tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (package,) = tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"][
        "packages"
    ]
    (project / package).rename(machine.wheels.folder / package)
    info = machine.wheels.folder / f"{metadata['name'].replace('-', '_')}-{metadata['version']}.dist-info"
    info.mkdir()
    text = f"Metadata-Version: 2.1\nName: {metadata['name']}\nVersion: {metadata['version']}\n"
    (info / "METADATA").write_text(text, encoding="utf-8")
    points = "".join(f"{name} = {value}\n" for name, value in metadata["entry-points"]["dsv4attn"].items())
    (info / "entry_points.txt").write_text(f"[dsv4attn]\n{points}", encoding="utf-8")
    machine.wheels.modules += [package, *(f"{package}.{part}" for part in ("kernels", "launch", "support", "tuning"))]
    machine.wheels.refresh()


def test_the_example_is_what_the_command_writes(machine: Machine, tmp_path: Path) -> None:
    code, values = machine.json("new-plugin", "acme", "--device", "acme1", "--dir", str(tmp_path / "new"))
    example = {
        path: text for path, text in written(ACME).items() if not path.startswith(("build/", "dsv4attn_acme.egg"))
    }

    assert code == 0
    assert written(tmp_path / "new") == example
    assert sorted(values["files"]) == sorted(example)


def test_the_wheel_contains_the_template(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"]["build"]["targets"][
        "wheel"
    ]
    assert wheel["force-include"] == {"examples/dsv4attn-acme": "dsv4attn/plugin_template"}
    assert template_folder() == ACME

    # as an installed wheel has it
    installed = tmp_path / "dsv4attn"
    (installed / "plugin_template").mkdir(parents=True)
    (installed / "plugin_template" / "pyproject.toml").write_text('name = "dsv4attn-acme"', encoding="utf-8")
    monkeypatch.setattr(dsv4attn, "__file__", str(installed / "__init__.py"))
    assert template_folder() == installed / "plugin_template"
    assert dict(NewPlugin.of("zephyr", None).files()) == {"pyproject.toml": 'name = "dsv4attn-zephyr"'}


def test_a_new_plugin_is_listed_passes_the_kit_and_is_chosen_on_its_device(machine: Machine) -> None:
    assert machine.run("new-plugin", "my-chip", "--device", "chip_7")[0] == 0
    project = Path("dsv4attn-my-chip")
    assert not [text for text in written(project).items() if "acme" in " ".join(text).lower()]
    install(machine, project)

    [row] = [row for row in machine.json("backends")[1]["backends"] if row["name"] == "my-chip"]
    assert (row["state"], row["distribution"], row["native"]) == ("available", "dsv4attn-my-chip", False)
    code, values = machine.json("doctor")
    assert (code, values["problems"]) == (0, [])
    assert "my-chip" in " ".join(machine.run("doctor")[1])
    assert machine.json("explain", "--device", "chip_7")[1]["chosen"] == "my-chip"
    code, values = machine.json("conform", "my-chip", "--filter", SOME)
    assert (code, values["counts"]["failed"]) == (0, 0)
    assert (
        values["counts"]["passed"]
        == len(chosen(CASES, SOME)) - values["counts"]["refused"] - values["counts"]["skipped"]
    )
    assert values["counts"]["passed"] > 5


def test_a_bug_in_a_new_plugin_fails_the_kit(machine: Machine) -> None:
    machine.run("new-plugin", "zephyr")
    kernels = Path("dsv4attn-zephyr", "dsv4attn_zephyr", "kernels.py")
    text = kernels.read_text(encoding="utf-8")
    kernels.write_text(
        text.replace("factor *= torch.sigmoid(lse - ", "factor *= torch.sigmoid(lse + "), encoding="utf-8"
    )
    assert kernels.read_text(encoding="utf-8") != text
    install(machine, Path("dsv4attn-zephyr"))
    cases = chosen(CASES, "sink-matters-swa-decode,insert-skips")
    outcomes = {o.case.name: o.state for o in conform(Subject.named("zephyr", device="cpu"), cases).outcomes}

    assert outcomes == {"sink-matters-swa-decode": "failed", "insert-skips": "passed"}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        *((name, f"got {name!r}, which is taken by dsv4attn") for name in BUILT_IN),
        ("vllm", "got 'vllm', which is taken by dsv4attn-vllm"),
        ("auto", "got 'auto', which is the word for automatic choice"),
        *((name, f"got {name!r}, which is a word of options") for name in ("all", "cpu", "decode", "prefill")),
        ("dsv4attn-zephyr", "the backend's name without dsv4attn-"),
        *(
            (name, "lower-case letters and digits")
            for name in ("Zephyr", "9x", "a.b", "a b", "a--b", "-a", "../a", "none")
        ),
    ],
)
def test_a_name_that_a_plugin_cannot_have_is_refused(machine: Machine, name: str, said: str) -> None:
    code, lines = machine.run("new-plugin", "--", name, width=400)

    assert code == 2
    assert lines[0].startswith("Error: NAME: expected ")
    assert said in lines[0]
    assert list(Path.cwd().iterdir()) == []


@pytest.mark.parametrize(("device", "arch"), [("h200", "sm_90"), ("MI300X", "gfx942"), ("chip_1*", "chip_1*")])
def test_a_device_may_be_a_product_or_a_pattern(device: str, arch: str) -> None:
    assert NewPlugin.of("zephyr", device).device == arch
    assert NewPlugin.of("zephyr", None).device == "zephyr"


@pytest.mark.parametrize(
    ("device", "said"),
    [
        ('a"b', "a kind or an architecture of devices, or a shell pattern"),
        ("CPU", "an accelerator, got 'CPU', on which the plugin would be chosen on every CPU"),
        ("*", "an accelerator, got '*', on which"),
    ],
)
def test_a_device_that_is_no_name_or_takes_every_cpu_is_refused(machine: Machine, device: str, said: str) -> None:
    code, lines = machine.run("new-plugin", "zephyr", "--device", device, width=400)

    assert code == 2
    assert lines[0].startswith(f"Error: --device: expected {said}")


def test_a_folder_with_files_is_refused_and_an_empty_one_is_filled(machine: Machine) -> None:
    folder, file = Path("new"), Path("file")
    folder.mkdir()
    file.touch()
    assert machine.run("new-plugin", "zephyr", "--dir", "new")[0] == 0
    for taken in (folder, file):
        code, lines = machine.run("new-plugin", "zephyr", "--dir", str(taken), width=400)
        assert code == 2
        assert lines[-1] == f"Error: {taken} exists and is not an empty folder -> name another one with --dir"

"""`dsv4attn compile`: the table, the object, and how it ends; once for real, in processes of its own."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from click.testing import CliRunner

from dsv4attn import selection

# imported here, while kernels are still interpreted: commands run in an environment of their own
from dsv4attn.backends._triton.compiling import aot
from dsv4attn.backends._triton.compiling.aot import Outcome, Resources
from dsv4attn.backends._triton.compiling.targets import TARGETS, Target
from dsv4attn.backends._triton.compiling.variant import Variant
from dsv4attn.core.contract.device import DeviceFacts
from dsv4attn.core.contract.devices import DEVICES
from dsv4attn.core.contract.problem import Reason
from dsv4attn.plugins import PluginRegistry
from dsv4attn.tools.cli import main, progress
from tests.backends.built_in import infos, triton_backends
from tests.forked_programs import run_forked
from tests.tools.cli.machine import Machine

ROOT = Path(__file__).resolve().parents[3]
KERNELS = """
from attrs import evolve
from dsv4attn.backends._triton.compiling.variant import Variant
from dsv4attn.backends.reference.launch import ReferenceBackend
from tests.backends._triton.launching.fake_drivers import attend_of, rows_of


class Acme(ReferenceBackend):
    def kernel_variants(self, bounds, device):
        yield rows_of(scale="none" if bounds.swa.is_quantised else "*fp32")
        yield rows_of(x="*fp32", scale="none" if bounds.swa.is_quantised else "*fp32")
        yield attend_of(64, 32, 8 if device.arch == "sm_90" else 4)
        yield rows_of(scale="none" if bounds.swa.is_quantised else "*fp32")


class Expecting(ReferenceBackend):
    def kernel_variants(self, bounds, device):
        yield rows_of()
        yield evolve(attend_of(64, 32, 8), spills=2944)


class Ranked(ReferenceBackend):
    def kernel_variants(self, bounds, device):
        if bounds.layers[0].num_heads == 8:
            yield rows_of()


class Odd(ReferenceBackend):
    def kernel_variants(self, bounds, device):
        return ["a kernel"]


class Broken(ReferenceBackend):
    def __init__(self):
        raise RuntimeError("no libacme.so")
"""


def vendor(
    machine: Machine, name: str = "acme", what: str = "Acme", *, runs_on: tuple[str, ...] = ("cuda", "hip")
) -> None:
    """Install a backend with kernels of its own."""
    machine.install(name, KERNELS, factory=f"{name}_kernels:{what}", native=(), runs_on=runs_on)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str, int]]:
    """No compiler: every kernel needs the same, `attend` too much of it. What was asked for: (target, variants)."""
    asked = []
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "kernels"))

    def compile_all(
        variants: Iterable[Variant], target: Target, *, progress: Callable[[Outcome], None], workers: int | None
    ) -> list[Outcome]:
        assert workers in (None, 2)
        outcomes = []
        wave = target.warp_size
        asked.append((target.name, len([*variants])))
        for variant in variants:
            for far in (False, True)[: 2 - target.is_cuda]:
                need = Resources(96, 0, 0, 0, 73_728, 4 * wave, 2, wave)
                if variant.name == "attend":
                    need = Resources(255, 2000, 944, 2944, 131_072, 4 * wave, 1, wave, 1024, 2)
                outcomes.append(Outcome(variant, far, need, tuple(need.reasons(target, spills=variant.spills))))
                progress(outcomes[-1])
        return outcomes

    monkeypatch.setattr(aot, "compile_all", compile_all)
    return asked


@pytest.mark.usefixtures("compiler")
def test_the_table_on_80_columns(machine: Machine) -> None:
    vendor(machine)
    code, lines = machine.run("compile", "--target", "sm_90", "--backend", "acme")

    assert code == 1
    assert max(map(len, lines)) <= 80
    text = [" ".join(line.split()) for line in lines]
    assert text[:2] == ["target sm_90", "backend acme"]
    assert "kernel, variant regs spill shared warps mma fit" in text
    assert text[text.index("rows") + 1] == "x:*bf16 96 0 73,728 4x32 0 2 ok"
    assert "x:*fp32 96 0 73,728 4x32 0 2 ok" in text
    assert "attend 255 2,944 131,072 4x32 1,024 1 spills" in text
    assert "SPILLS 2000 bytes stored and 944 loaded per thread, needs none ->" in text
    assert text[-1] == "3 kernels of acme for sm_90: 1 spill"
    _, lines = machine.run("compile", "--target", "sm_90", "--backend", "sm90", "--kernel", "combine")
    assert "topk:none entry_table:none 96 0" in " ".join(" ".join(lines).split()), "words stay whole"


@pytest.mark.usefixtures("compiler")
def test_spills_that_a_backend_expects_are_said_and_are_no_fault(machine: Machine) -> None:
    vendor(machine, what="Expecting")
    code, lines = machine.run("compile", "--target", "sm_90", "--backend", "acme")

    assert code == 0
    text = [" ".join(line.split()) for line in lines]
    assert "attend 255 2,944 131,072 4x32 1,024 1 ok" in text
    assert " ".join(text).endswith("of 232,448 bytes, at least 1 block per SM")
    assert "2 kernels of acme for sm_90: 1 spills no more than expected, largest" in " ".join(text)


def test_the_json_object(machine: Machine, compiler: list[tuple[str, int]]) -> None:
    vendor(machine)
    code, values = machine.json(
        "compile", "--target", "sm90", "--target", "gfx942", "--backend", "acme", "--preset", "pro"
    )

    assert code == 1
    assert compiler == [("sm_90", 3), ("gfx942", 3)]
    assert values["model"] == "deepseek-v4-pro"
    assert [(job["target"], job["backend"], len(job["kernels"])) for job in values["jobs"]] == [
        ("sm_90", "acme", 3),
        ("gfx942", "acme", 6),
    ]
    first, last = values["jobs"][0]["kernels"][0], values["jobs"][1]["kernels"][-1]
    assert (first["kernel"], first["variant"], first["registers"], first["reasons"]) == ("rows", "x:*bf16", 96, [])
    assert [(k["wave"], k["matrix"]) for k in (first, last)] == [(32, 0), (64, 1024)]
    assert [k["verdict"] for k in values["jobs"][0]["kernels"]] == ["ok", "ok", "spills"]
    assert last["verdict"] == "limit"
    assert values["jobs"][1]["summary"] == "6 kernels of acme for gfx942: 6 break a limit"
    assert (last["variant"], [reason["code"] for reason in last["reasons"]]) == (
        "beyond 2 GB",
        ["SHARED_MEMORY", "SPILLS"],
    )


def test_targets_have_the_names_that_explain_takes(machine: Machine, compiler: list[tuple[str, int]]) -> None:
    vendor(machine)
    machine.run("compile", "--target", "h200", "--device", "rtx 5090", "--target", "mi355x", "--backend", "acme")

    assert [name for name, _ in compiler] == ["sm_90", "sm_120", "gfx950"]


@pytest.mark.parametrize("command", ["compile", "explain"])
def test_help_lists_the_devices(machine: Machine, command: str) -> None:
    code, lines = machine.run(command, "--help")

    assert code == 0
    assert [" ".join(line.split()) for line in lines if "h200" in line][-1].startswith("sm_90 h100, h200")
    listed = {
        line.split()[0] for line in lines[lines.index("  Devices, by architecture or by any of these names:") :][1:]
    }
    assert listed == ({*TARGETS} if command == "compile" else {device.arch for device in DEVICES})


def test_caches_of_several_types_are_compiled_for_once_each(machine: Machine, compiler: list[tuple[str, int]]) -> None:
    vendor(machine)
    options = ["--dtype", "e4m3fn", "--dtype", "e4m3fnuz", "--dtype", "float32", "--dtype", "float32"]
    machine.run("compile", "--target", "sm_120", "--target", "sm_120", "--backend", "acme", *options)

    # the two dialects and the two equal kernels of each are one.
    assert compiler == [("sm_120", 5)]


def test_a_kernel_that_does_not_compile_has_no_numbers(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    reason = Reason("COMPILER", "Error: [no] power of 2", "a kernel that compiles")
    monkeypatch.setattr(
        aot, "compile_all", lambda variants, *_, **__: [Outcome(v, False, None, (reason,)) for v in variants]
    )
    vendor(machine)
    code, lines = machine.run("compile", "--target", "sm_90", "--backend", "acme")
    text = " ".join(" ".join(lines).split())

    assert code == 1
    assert "attend - - - - - - failed" in text
    assert "COMPILER Error: [no] power of 2, needs a kernel that compiles" in text
    assert "3 kernels of acme for sm_90: 3 do not compile" in text


def test_without_a_name_every_backend_that_runs_there_is_asked(
    machine: Machine, compiler: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    vendor(machine)
    vendor(machine, "bad", "Broken")
    vendor(machine, "far", runs_on=("sm_9*",))
    # without the built-in backends
    result = {name: one for name, one in machine.wheels.registry().backends.items() if one.distribution != "dsv4attn"}
    monkeypatch.setattr(selection, "registry_for", lambda _: PluginRegistry(result))
    code, lines = machine.run("compile", "--target", "sm_90", "--target", "sm_120")

    assert code == 1
    assert compiler == [("sm_90", 3), ("sm_90", 3), ("sm_120", 3)]
    text = " ".join(" ".join(lines).split())
    assert "not asked: backend 'bad' is broken: bad_kernels:Broken: RuntimeError: no libacme.so" in text
    assert [line.replace(":", "").split()[3:6] for line in lines[-3:]] == [
        ["acme", "for", "sm_90"],
        ["far", "for", "sm_90"],
        ["acme", "for", "sm_120"],
    ]

    monkeypatch.setattr(selection, "registry_for", lambda _: PluginRegistry())
    code, lines = machine.run("compile", "--target", "sm_90")

    assert code == 2
    assert "no backend has kernels to compile" in " ".join(lines)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--target", "gfx90"], "unknown target 'gfx90'; did you mean 'gfx90a'?"),
        (["--target", "h2O0"], "unknown target 'h2O0'; did you mean 'h200'? (known: h200, sm_90, mi300x, ...: "),
        (["--target", "b580", "--engine", "vllm"], "--target: expected a GPU of NVIDIA or AMD, got 'b580' (Intel GPU)"),
        (["--target", "ascend"], "expected a GPU of NVIDIA or AMD, got 'ascend' (Ascend NPU) -> its kernels are"),
        (["--target", "cpu"], "--target: expected a GPU of NVIDIA or AMD, got 'cpu'"),
        (["--target", "mi300x", "--engine", "sglang"], "a GPU of NVIDIA, got 'mi300x' (AMD MI300) -> leave --engine"),
        ([], "Missing option '--target'"),
        (["--target", "sm_90", "--backend", "reference"], "expected one with kernels to compile, got 'reference'"),
        (["--target", "sm_90", "--backend", "acmee"], "did you mean 'acme'?"),
        (["--target", "gfx942", "--backend", "far"], "expected a device of far: sm_9*, got gfx942"),
        (["--target", "sm_90", "--cache", ""], "for '--cache': '': expected a path; leave the option out"),
        (["--target", "sm_90", "--backend", "odd"], "kernel_variants of odd: expected Variants, got str"),
        (["--target", "sm_90", "--backend", "bad"], "no libacme.so"),
        (["--target", "sm_90", "--model", "flas"], "did you mean 'flash'?"),
        (["--target", "sm_90", "--option", "projektion=fp8"], "unknown option 'projektion'; did you mean 'projection'"),
        (["--target", "sm_90", "--option", "index_sums=x"], "lists them\n  index_sums: expected "),
        (["--target", "sm_90", "--backend", "acme", "--option", "nope=1"], "option 'nope' of backend acme: expected"),
        (["--target", "sm_90", "--max-model-len", "2000000"], "expected at most 1048576, the longest context of"),
    ],
)
def test_bad_input_is_code_2(machine: Machine, options: list[str], said: str) -> None:
    vendor(machine)
    vendor(machine, "odd", "Odd")
    vendor(machine, "bad", "Broken")
    vendor(machine, "far", runs_on=("sm_9*",))
    code, values = machine.json("compile", *options)

    assert code == 2
    assert said in values["error"]["message"]


@pytest.mark.usefixtures("compiler")
def test_a_line_of_stderr_says_what_has_been_compiled(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    vendor(machine)
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    result = CliRunner().invoke(main, ["compile", "--target", "sm_90", "--backend", "acme", "--jobs", "2"])

    assert re.match(r"1/3 compiled, \w+ for sm_90, \d+ s\n2/3 ", result.stderr), result.stderr
    assert result.stderr.count("\n") == 3


@pytest.mark.usefixtures("compiler")
def test_kernels_are_those_of_one_rank(machine: Machine) -> None:
    machine.install("acme", KERNELS, factory="acme_kernels:Ranked", native=(), runs_on=("cuda",))
    command = "compile", "--target", "sm_90", "--backend", "acme", "--tensor-parallel"
    counts = [len(machine.json(*command, ranks)[1]["jobs"][0]["kernels"]) for ranks in ("1", "8")]
    refused, lines = machine.run(*command, "3")

    assert (counts, refused) == ([0, 1], 2)
    assert "common divisor of 64 heads" in " ".join(lines)


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(
    ("options", "variables", "folder"),
    [
        (["--engine", "sglang"], {"SGLANG_CACHE_DIR": "image"}, "image/triton"),
        (["--engine", "sglang"], {"SGLANG_CACHE_DIR": "image", "TRITON_CACHE_DIR": "kernels"}, "kernels"),
        (["--engine", "sglang", "--cache", "own"], {"SGLANG_CACHE_DIR": "image"}, "own"),
        (["--engine", "sglang"], {"HOME": "root"}, "root/.cache/sglang/triton"),
        (["--engine", "vllm"], {"TRITON_HOME": "image"}, "image/.triton/cache"),
    ],
)
def test_kernels_go_where_an_engine_looks_for_them(
    machine: Machine, tmp_path: Path, options: list[str], variables: dict[str, str], folder: str
) -> None:
    unset = dict.fromkeys(("TRITON_CACHE_DIR", "TRITON_HOME", "SGLANG_CACHE_DIR"))
    variables, folder = {name: str(tmp_path / value) for name, value in variables.items()}, str(tmp_path / folder)
    options = [str(tmp_path / word) if word == "own" else word for word in options]
    vendor(machine)
    command = ["compile", "--target", "sm_90", "--backend", "acme", *options]
    _, lines = machine.run(*command, width=80, **{**unset, **variables})

    # the same folder in an image with another home and other variables
    words = [*command, "--cache", folder] if "--cache" not in command else command
    assert lines[-1].split() == ["ENV", f"TRITON_CACHE_DIR={folder}"]
    assert sorted(lines[-2].split()) == sorted(["RUN", "dsv4attn", *words])


@pytest.mark.parametrize("way", ["cache", "engine", "variable"])
def test_a_folder_that_cannot_be_written_is_said_once_before_anything_compiles(
    machine: Machine, tmp_path: Path, compiler: list[tuple[str, int]], way: str
) -> None:
    vendor(machine)
    below = tmp_path / "file" / "kernels"
    below.parent.write_text("", encoding="utf-8")
    options = {"cache": ["--cache", str(below)], "engine": ["--engine", "vllm"]}.get(way, [])
    command = ["compile", "--target", "sm_90", "--backend", "acme", *options]
    code, values = machine.json(*command, **{} if way == "cache" else {"TRITON_CACHE_DIR": str(below)})

    said = f"expected one that can be written, got {below}: Not a directory -> name another one with --cache"
    assert (code, values["error"]["message"]) == (2, f"folder of kernels: {said}")
    assert compiler == []


def test_kernels_have_the_names_of_the_table_and_their_own(machine: Machine, compiler: list[tuple[str, int]]) -> None:
    for name in ("gather", "gather_kernel"):
        machine.run("compile", "--target", "sm_90", "--backend", "sm90", "--kernel", name)
    code, lines = machine.run("compile", "--target", "sm_90", "--backend", "sm90", "--kernel", "names", width=2000)

    assert compiler[0] == compiler[1]
    assert compiler[0][1] > 0
    assert code == 2
    assert "unknown kernel 'names' (known: attend_tile, attention, " in lines[-1]


@pytest.mark.usefixtures("compiler")
def test_an_engine_gets_the_kernels_of_backends_that_it_chooses_from(machine: Machine, tmp_path: Path) -> None:
    command = ["compile", "--target", "sm_90", "--kernel", "gather", "--cache", str(tmp_path)]
    _, every = machine.json(*command)
    _, native = machine.json(*command, "--engine", "vllm")

    names, facts = {job["backend"] for job in native["jobs"]}, DeviceFacts.named("sm_90")
    assert names == {name for name in triton_backends() if facts.matches(infos()[name].native)}
    assert names < {job["backend"] for job in every["jobs"]}


@pytest.mark.usefixtures("compiler")
def test_the_line_of_a_dockerfile_has_the_options_of_backends(machine: Machine, tmp_path: Path) -> None:
    command = ["compile", "--target", "sm_90", "--backend", "sm90", "--engine", "vllm", "--kernel", "gather_kernel"]
    command += ["--option", "projection=bf16", "--option", "deterministic=true", "--num-speculative-tokens", "2"]
    folder = str(tmp_path / "a folder")
    _, lines = machine.run(*command, "--cache", folder, width=200)

    assert sorted(shlex.split(lines[-2])) == sorted(["RUN", "dsv4attn", *command, "--cache", folder])


@pytest.mark.matrix
def test_for_real_and_whatever_interprets_kernels_here(machine: Machine, tmp_path: Path) -> None:
    vendor(machine)
    vendor(machine, "bad", "Broken")
    path = os.pathsep.join(filter(None, [str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH")]))
    environ = {**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "1"}
    environ.pop("DSV4ATTN_BACKEND", None)
    command = ["-m", "dsv4attn", "compile", "--target", "sm_90", "--backend", "acme", "--json"]
    command += ["--cache", str(tmp_path / "cache")]
    done = run_forked(command, folder=ROOT, environ=environ)
    values = json.loads(done.stdout)

    assert done.returncode == (0 if values["ok"] else 1), done.stderr
    kernels = values["jobs"][0]["kernels"]
    assert [kernel["kernel"] for kernel in kernels] == ["rows", "rows", "attend"]
    assert kernels[0]["reasons"] == []
    assert kernels[2]["shared"] == 131_072
    assert [(k["wave"], k["products"], k["matrix"] > 0) for k in kernels] == [(32, 0, False)] * 2 + [(32, 2, True)]
    assert [*(tmp_path / "cache").glob("*/rows.cubin")]

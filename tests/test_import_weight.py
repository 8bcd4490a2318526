"""What importing the package costs and touches (promise G6), each time in a fresh interpreter.

Where only what follows torch counts, the interpreter has imported torch already.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import dsv4attn
from dsv4attn.core import metadata
from tests.backends.built_in import packages
from tests.forked_programs import run_forked

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "dsv4attn"
ENGINES = {
    "aiter",
    "cutlass",
    "deep_gemm",
    "flash_mla",
    "intel_extension_for_pytorch",
    "sglang",
    "tilelang",
    "vllm",
}
"""Engines and kernel libraries of the field, imported by a backend or not."""
VENDORS = sorted(ENGINES | {*packages()} - {"attrs", "numpy", "torch", "triton"})
HEAVY = ["torch", "triton", "numpy", *VENDORS]
CORE = sorted(
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
    for path in (PACKAGE / "core").rglob("*.py")
    if path.stem != "__init__"
)
SECONDS = 0.3


def fresh(code: str, *names: str, first_on_path: Path | None = None, after_torch: bool = False) -> Any:
    """Run a piece of code in a new interpreter, with `names` in its argv, and return the JSON it prints.

    after_torch: whether the interpreter has imported torch.
    """
    path = [str(p) for p in (first_on_path, ROOT) if p]
    command, environ = ["-c", code, *names], {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    if after_torch:
        done = run_forked(command, folder=ROOT, environ=environ)
    else:
        command = [sys.executable, *command]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=environ)

    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


# loads what argv names, one by one, and prints for each which packages it brought in.
LOAD = """
import importlib, json, sys
brought = {}
for name in sys.argv[1:]:
    before = {*sys.modules}
    importlib.import_module(name)
    brought[name] = sorted({m.partition(".")[0] for m in {*sys.modules} - before})
print(json.dumps(brought))
"""


def brought_in(
    *modules: str, of: list[str], first_on_path: Path | None = None, after_torch: bool = False
) -> dict[str, list[str]]:
    """Import modules in a new interpreter, and return which packages of a list each of them loaded, if any."""
    brought = fresh(LOAD, *modules, first_on_path=first_on_path, after_torch=after_torch)

    assert sorted(brought) == sorted(modules)
    return {module: hit for module, names in brought.items() if (hit := [n for n in names if n in of])}


@pytest.fixture(params=["ImportError", "AttributeError"])
def broken_vendors(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder in which every vendor package is installed and raises as soon as it is imported."""
    for name in VENDORS:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"raise {request.param}('stub of {name}')\n", encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize("module", ["dsv4attn", "dsv4attn.errors"])
def test_g6_importing_the_package_loads_nothing_heavy(module: str) -> None:
    assert brought_in(module, of=HEAVY) == {}


def test_the_measure_sees_a_heavy_import() -> None:
    assert brought_in("torch", of=HEAVY)["torch"][-1] == "torch"


def test_importing_the_package_is_fast() -> None:
    timed = "import time; t = time.perf_counter(); import dsv4attn; print(time.perf_counter() - t)"
    seconds = [float(fresh(timed)) for _ in range(5)]

    assert min(seconds) < SECONDS, f"best of {seconds}"


def test_g6_a_core_module_loads_neither_triton_nor_a_vendor() -> None:
    # torch first, so that what torch may load by itself is not laid at our door.
    assert brought_in(*CORE, of=["triton", *VENDORS], after_torch=True) == {}


def test_what_backends_import_is_watched() -> None:
    assert "flashinfer" in VENDORS


def test_there_are_core_modules() -> None:
    assert "dsv4attn.core.model.geometry" in CORE


def test_g6_broken_vendor_packages_do_not_hinder_the_import(broken_vendors: Path) -> None:
    modules = "dsv4attn", "dsv4attn.errors", *CORE
    assert brought_in(*modules, of=VENDORS, first_on_path=broken_vendors, after_torch=True) == {}


def test_the_stubs_do_break_whoever_imports_them(broken_vendors: Path) -> None:
    code = (
        "import json\ntry:\n    import vllm\nexcept (ImportError, AttributeError) as e:\n    print(json.dumps(str(e)))"
    )

    assert fresh(code, first_on_path=broken_vendors) == "stub of vllm"


def test_g6_importing_core_initialises_no_device() -> None:
    code = """
import importlib, json, sys
import torch
assert not any(name.startswith("dsv4attn") for name in sys.modules)
for name in sys.argv[1:]:
    importlib.import_module(name)
print(json.dumps([torch.cuda.is_initialized(), torch.xpu.is_initialized()]))
"""

    assert fresh(code, *CORE, after_torch=True) == [False, False]


@pytest.mark.parametrize("name", dsv4attn.__all__)
def test_every_public_name_resolves(name: str) -> None:
    value = getattr(dsv4attn, name)

    assert isinstance(value, str) or value.__module__.startswith("dsv4attn.")
    assert name in dir(dsv4attn)


def test_the_public_names_are_told_alike_to_everybody() -> None:
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    exported = {
        alias.name: str(node.module).removeprefix("dsv4attn.")
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }

    assert exported == dsv4attn._MODULE_OF
    assert {*dsv4attn.__all__} == {*exported, "__version__"}


def test_an_unknown_name_is_an_attribute_error_and_an_old_one_is_answered_with_the_new_one() -> None:
    said = "FlashMLASparseMetadata has another name now -> write CompressedMetadata"

    for name, text in (("forward_mha", "has no attribute 'forward_mha'"), ("FlashMLASparseMetadata", said)):
        with pytest.raises(AttributeError, match=text):
            getattr(dsv4attn, name)
    old = ("FlashMLASparseMetadata", "dsv4attn", "dsv4attn.core.metadata", "dsv4attn.core.metadata.metadata")
    for name, *modules in (old, ("CompressedMetadata", "dsv4attn.core.metadata")):
        for module in modules:
            with pytest.raises(ImportError, match=rf"{name} has another name now -> write (dsv4attn\.)?Compressed"):
                exec(f"from {module} import {name}")  # noqa: S102 - as a backend writes it
    assert {*metadata._PUBLIC.values()} <= {*dsv4attn.__all__}

"""A built-in backend costs one line outside its own folder: its name in the table BUILT_IN of `dsv4attn/plugins.py`.

A copy of the tree gets the folder of the generic backend once more, under another name, and that line. No file that
lists backends is edited besides.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dsv4attn.plugins import BUILT_IN
from tests.forked_programs import run_forked

ROOT = Path(__file__).resolve().parents[1]
NEW = "quartz"
COPIED = ("dsv4attn", "tests", "docs", "examples", "README.md", "CHANGELOG.md", "pyproject.toml", "Makefile")
LISTING = (
    "tests/backends/_triton/test_device.py",
    "tests/backends/_triton/launching/test_warmup_variants.py",
    "tests/backends/_triton/compiling/test_gates.py",
    "tests/backends/_triton/test_step_of_all_layers.py",
    "tests/backends/test_descriptors.py",
    "tests/backends/test_forms.py",
    "tests/backends/test_support_grid.py",
    "tests/compat/test_flash_mla.py",
    "tests/selection/test_build.py",
)
"""Files whose tests run once for each of several backends; one more, `test_hf_triton`, needs transformers."""
JUDGES = (
    "tests/test_layers.py",
    "tests/test_plugins.py",
    "tests/tools/cli/test_backends.py::test_the_json_object",
    "tests/tools/cli/test_explain.py::test_a_trace_is_folded_under_itself",
    "tests/selection/test_selection.py::test_g1_every_problem_has_a_backend_on_every_device",
)
"""Tests that would fail if the new backend broke a rule, or if a list in them lacked it."""

DOCUMENTS = "tests/test_backend_docs.py"
"""The file whose tests fail until the documents have the new backend: prose is written by hand."""


def with_one_more(root: Path) -> Path:
    """Fill a folder with this tree, the new backend's folder, and the one line."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, root / name, ignore=shutil.ignore_patterns("__pycache__", "build", "*.egg-info"))
        elif source.exists():
            shutil.copy(source, root / name)
    folder = root / "dsv4attn" / "backends" / NEW
    shutil.copytree(folder.with_name("triton"), folder)
    for path in folder.glob("*.py"):
        text = re.sub(r'(?<=")triton(?=")|(?<=backends\.)triton\b', NEW, path.read_text(encoding="utf-8"))
        # native to another device than the generic backend is: two natives of one rank are ambiguous
        path.write_text(text.replace('native=("cuda", "hip", "xpu")', f'native=("{NEW}",)'), encoding="utf-8")
    table = root / "dsv4attn" / "plugins.py"
    lines = table.read_text(encoding="utf-8").splitlines(keepends=True)
    [at] = [i for i, line in enumerate(lines) if line.startswith("BUILT_IN = (")]
    lines[at] = lines[at].replace("(", f'("{NEW}", ')
    table.write_text("".join(lines), encoding="utf-8")
    return root


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_one_more(tmp_path_factory.mktemp("copy"))


def python(copy: Path, *args: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run Python in the copy, on the copy's package and tests."""
    known = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": ""}
    return run_forked(args, folder=copy, environ={**known, **environ})


def printed(copy: Path, *args: str, **environ: str) -> Any:
    """The object that a command prints."""
    done = python(copy, "-m", "dsv4attn", *args, "--json", **environ)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


def test_the_commands_list_it_and_choose_it_by_name(copy: Path, tmp_path: Path) -> None:
    rows = {row["name"]: row for row in printed(copy, "backends")["backends"]}
    config = tmp_path / "dsv4attn.toml"
    config.write_text(f'decode = "{NEW}"\n[options.{NEW}]\ndeterministic = true\n', encoding="utf-8")
    explained = printed(copy, "explain", "--device", "h200", DSV4ATTN_CONFIG=str(config))

    assert {*rows} == {NEW, *BUILT_IN}
    assert rows[NEW]["distribution"] == "dsv4attn"
    assert explained["chosen"] == NEW


def test_a_wrong_option_in_its_settings_is_answered_with_those_it_has(copy: Path, tmp_path: Path) -> None:
    config = tmp_path / "dsv4attn.toml"
    config.write_text(f"options.{NEW}.tunings = 'sm_90'", encoding="utf-8")
    # without the imports that it tries in other processes
    code = "from dsv4attn.tools.cli import installation as i, main; i.tried = i.Attempt; main(['doctor'])"
    done = python(copy, "-c", code, DSV4ATTN_CONFIG=str(config))

    assert "unknown option 'tunings'; did you mean 'tuning'?" in " ".join(done.stdout.split()), done.stdout


@pytest.mark.matrix
def test_the_lists_that_tests_use_have_it(copy: Path) -> None:
    pytest.importorskip("triton", reason="needs Triton")
    code = f"""
import json
from dsv4attn.core.contract import Rank
from dsv4attn.core.model.geometry import ModelGeometry
from tests.backends import built_in as b
lists = [b.infos(), b.triton_backends(), b.forms(), b.of_rank(b.infos()["{NEW}"].rank)]
print(json.dumps([b.__file__, *map(list, lists)]))
"""
    done = python(copy, "-c", code, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr
    file, *lists = json.loads(done.stdout)

    assert Path(file).is_relative_to(copy)
    assert [NEW in lists_of_file for lists_of_file in lists] == [True] * 4

    # asserts need no rewriting: the files are collected only
    words = ("--collect-only", "-q", "--assert=plain", "-p", "no:cacheprovider")
    seen = python(copy, "-m", "pytest", *words, "-m", "slow or not slow", *LISTING).stdout
    ids = [line for line in seen.splitlines() if re.search(rf"\[(.*-)?{NEW}(-.*)?\]", line)]
    assert {line.partition("::")[0] for line in ids} == {*LISTING}, seen[-2000:]


@pytest.fixture(scope="module")
def judged(copy: Path) -> str:
    """What pytest says of the judges and of the documents, in the copy."""
    done = python(copy, "-m", "pytest", "-v", "-p", "no:cacheprovider", *JUDGES, DOCUMENTS)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return done.stdout


@pytest.mark.matrix
def test_the_layer_rules_and_the_tests_of_lists_pass_with_it(copy: Path, judged: str) -> None:
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+?)::", judged, re.MULTILINE)

    assert {*failed} <= {DOCUMENTS}, judged[-4000:]
    assert "test_a_file_imports_only_what_its_layer_may PASSED" in judged
    files = python(copy, "-c", "from tests.test_layers import FILES, module_name; print(*map(module_name, FILES))")
    assert f"dsv4attn.backends.{NEW}.launch" in files.stdout.split(), files.stderr
    assert all(f"{judge.rpartition('::')[2]}" in judged for judge in JUDGES)


@pytest.mark.matrix
def test_the_documents_that_lack_it_are_named_with_what_to_add(judged: str) -> None:
    assert "README.md, section Backends: add" in judged
    assert f"| `{NEW}` | " in judged
    assert f"| `tuning` | `{NEW}` | `auto` |" in judged


# no other list

ALLOWED = {
    "dsv4attn/plugins.py": "the table itself",
}
"""Files that list built-in backends by name, and why they must."""
NAMES = "|".join(map(re.escape, BUILT_IN))
NAMED = re.compile(rf"({NAMES})(?:$|[ :-])")
"""A backend's name, or a name with a form after it: "xpu fused"."""
ENUMERATED = re.compile(rf"(?:\b(?:{NAMES}), ){{2,}}(?:and |or )?(?:{NAMES})\b")
"""Three names or more in a text."""


def texts(nodes: Iterator[ast.expr | None]) -> set[str]:
    """The backends that string literals among these name."""
    values = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return {match[1] for value in values if (match := NAMED.match(value))}


def lists_in(source: str) -> list[str]:
    """One line for each list, tuple, set, dict, call or text of a source that names two or more backends."""
    lines = list[str]()
    if len({*re.findall(NAMES, source)}) < 2:
        return lines  # most files; to read a syntax tree takes long
    for node in ast.walk(ast.parse(source)):
        parts: list[Any] = []
        if isinstance(node, ast.List | ast.Tuple | ast.Set):
            parts = node.elts
        elif isinstance(node, ast.Dict):
            parts = node.keys
        elif isinstance(node, ast.Call):
            parts = node.args
        names = texts(iter(parts))
        if len(names) > 1:
            lines.append(f"line {node.lineno}: {', '.join(sorted(names))}")  # type: ignore[attr-defined]
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and ENUMERATED.search(node.value):
            lines.append(f"line {node.lineno}: {ENUMERATED.search(node.value)[0]}")  # type: ignore[index]
    return lines


def of_one_backend(path: Path) -> bool:
    """Whether a file lies in a backend's own folder, or in that of its tests."""
    parts = path.relative_to(ROOT).parts
    return parts[0] in ("dsv4attn", "tests") and parts[1:2] == ("backends",) and parts[2] in BUILT_IN


def test_no_other_file_lists_built_in_backends() -> None:
    files = [p for folder in ("dsv4attn", "tests", "examples") for p in sorted((ROOT / folder).rglob("*.py"))]
    shared = [p for p in files if not of_one_backend(p) and "fixtures" not in p.parts]
    lists_by_file = {str(p.relative_to(ROOT)): lists_in(p.read_text(encoding="utf-8")) for p in shared}

    assert len(shared) > 200
    assert {name: lists for name, lists in lists_by_file.items() if lists and name not in ALLOWED} == {}, (
        "derive these from tests/backends/built_in.py, or from the descriptors"
    )
    assert [name for name in ALLOWED if not lists_by_file[name]] == [], "an exception that nothing needs"


@pytest.mark.parametrize("name", ["pyproject.toml", "Makefile", ".pre-commit-config.yaml", ".ci/run"])
def test_no_setting_of_a_tool_lists_built_in_backends(name: str) -> None:
    path = ROOT / name
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []

    assert [line for line in lines if len({*re.findall(rf"\b(?:{NAMES})\b", line)}) > 1] == []


@pytest.mark.parametrize(
    "planted",
    [
        'BACKENDS = ("triton", "rocm")',
        'BACKENDS = {"triton": 1, "sm90": 2}',
        'FORMS = ["xpu fused", "rocm"]',
        'LANES = {"reference-ragged", "triton-paged"}',
        'assert name in {"sm120", "sm90"}',
        'each = dict.fromkeys(["triton", other, "xpu"])',
        'zip("triton", "xpu")',
        f"said = {', '.join(BUILT_IN)!r}",
    ],
)
def test_a_list_of_names_is_found(planted: str) -> None:
    assert lists_in(planted)


@pytest.mark.parametrize(
    "fine",
    [
        'one = ("triton", "acme")',
        'packages = ("torch", "triton>=3.6", "tritonclient", "xpu_smi")',
        'kinds = ("cuda", "hip", "xpu")',
        'PLANTED = [("dsv4attn.backends.rocm.launch", "from dsv4attn.backends.sm90 import tuning")]',
    ],
)
def test_a_list_of_other_things_is_none(fine: str) -> None:
    assert lists_in(fine) == []

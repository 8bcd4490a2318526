"""Who may import whom, read from the syntax trees; nothing is imported.

An import inside a function, under TYPE_CHECKING, or as a literal given to `import_module` counts like any other:
what a module knows of is what matters, not when it is loaded.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "dsv4attn"

# a layer is a top-level module or package of dsv4attn. Each folder under backends/ is a layer of its own too, and
# so are the parts of tools/, under their own names, and the files of the oracle. "root" is dsv4attn/__init__: a public
# name reached as `dsv4attn.load_backend`.
TOP = {"__main__", "backends", "compat", "config", "core", "errors", "hookspecs"} | {
    "integrations", "plugins", "selection", "serving", "single_layer", "testing", "tools"
}  # fmt: skip
DEVICE = "backends/<device>"
SHARED = "backends/_triton"
ORACLE = "testing/oracle"

MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "core": {"errors"},
    "serving": {"errors", "core"},
    "config": {"errors", "core"},
    "hookspecs": {"errors", "core"},
    "plugins": {"errors", "core", "config", "hookspecs"},
    "selection": {"errors", "core", "config", "hookspecs", "plugins"},
    # a first layer with defaults for everything
    "single_layer": {"errors", "core", "serving", "selection"},
    "root": {"errors", "core", "serving", "selection", "single_layer"},
    "backends": set(),
    SHARED: {"errors", "core"},
    DEVICE: {"errors", "core", "hookspecs", SHARED},
    # the oracle is an independent witness: it shares no line with what it judges.
    ORACLE: set(),
    # whole layers run over the caches that an engine would bring
    "testing": {"errors", "core", "serving", "selection", "root", ORACLE},
    "replay": {"errors", "core", "serving", "selection", "root", "testing", ORACLE},
    "bench": {"errors", "core", "serving", "selection", "root"},
    # other libraries' interfaces: front doors, so no module inside goes through them.
    "compat": {"errors", "core", "config", "selection"},
    # what plugs into other libraries: no module inside goes through it either.
    "integrations": {"errors", "core", "serving", "config", "selection", "root"},
    "cli": {
        "errors",
        "core",
        "serving",
        "config",
        "hookspecs",
        "plugins",
        "selection",
        "root",
        "testing",
        ORACLE,
        "replay",
        "bench",
        # what the wheels of engines share
        "integrations",
        # to cross-compile what backends say they have.
        SHARED,
    },
    "__main__": {"cli"},
    "tools": set(),
}
# the registry reaches a backend by a string, so that naming a backend is not importing it.
MAY_NAME_BACKENDS = {"plugins", "selection"}


def layer_of(module: str) -> str:
    """Return the layer of a dotted module name that begins with `dsv4attn`."""
    parts = module.split(".")
    if len(parts) == 1 or parts[1] not in TOP:
        return "root"
    if parts[1] == "backends" and len(parts) > 2:
        return f"backends/{parts[2]}"
    if parts[1:3] == ["testing", "oracle"]:
        return ORACLE
    if parts[1] == "tools" and len(parts) > 2:
        return parts[2]
    return parts[1]


def rule_of(layer: str) -> set[str]:
    """Return the layers that this one may import besides itself."""
    return MAY_IMPORT.get(layer, MAY_IMPORT[DEVICE] if layer.startswith("backends/") else set())


def text_start(node: ast.expr) -> str:
    """Return a string literal, or what is certain of an f-string: the text before its first hole."""
    if isinstance(node, ast.JoinedStr) and node.values:
        node = node.values[0]
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def imports(tree: ast.AST, module: str, *, is_package: bool) -> Iterator[tuple[int, str, bool]]:
    """Yield (line, absolute name, given as a string) of everything a module imports, ours or not.

    `from m import a` yields `m.a`: whether `a` is a module or a name, its prefix places it.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name, False) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = module.split(".")[: -node.level + is_package or None]
                base = ".".join([*above, *filter(None, [base])])
            yield from ((node.lineno, f"{base}.{alias.name}", False) for alias in node.names)
        elif isinstance(node, ast.Call) and node.args:
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in {"import_module", "__import__"} and (name := text_start(node.args[0])):
                yield node.lineno, name, True


def torch_parts(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield (line, part) for every `torch.<part>` a module names, however it came by it."""
    torches = {"torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            torches |= {a.asname for a in node.names if a.name == "torch" and a.asname}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in torches:
            yield node.lineno, node.attr
        elif (
            isinstance(node, ast.Call)
            and getattr(node.func, "id", "") == "getattr"
            and len(node.args) > 1
            and getattr(node.args[0], "id", "") in torches
        ):
            yield node.lineno, text_start(node.args[1])
    for line, name, _ in imports(tree, "none", is_package=False):
        if name.startswith("torch."):
            yield line, name.split(".")[1]


def forbidden_torch(module: str) -> set[str]:
    """Return the parts of torch that a module may not name, because they belong to one vendor."""
    layer = layer_of(module)
    if layer == "core" and module != "dsv4attn.core.contract.device":
        return {"cuda", "xpu"}
    return {"cuda"} if layer.startswith("backends/") else set()


def forbidden_outside(module: str) -> set[str]:
    """Return the packages that a module may not import: triton is for backends, which answer before they load it."""
    layer = layer_of(module)
    if not layer.startswith("backends/"):
        return set() if layer == "cli" else {"triton"}
    is_door = module.count(".") == 2
    return {"torch", "triton"} if layer != SHARED and (is_door or module.endswith(".support")) else set()


def violations(source: str, module: str, *, is_package: bool = False) -> list[str]:
    """Return every rule a source text breaks, one sentence each."""
    tree = ast.parse(source)
    layer, messages = layer_of(module), []
    for line, name, as_text in imports(tree, module, is_package=is_package):
        if name.split(".")[0] in forbidden_outside(module):
            messages.append(f"{module}:{line}: may not import {name.split('.')[0]}")
        if name.split(".")[0] != "dsv4attn":
            continue
        target = layer_of(name)
        names_backend = as_text and target.startswith("backends") and layer in MAY_NAME_BACKENDS
        if not (target == layer or target in rule_of(layer) or names_backend):
            messages.append(f"{module}:{line}: {layer} may not import {target} ({name})")
    banned = forbidden_torch(module)
    if any(part in source for part in banned):
        named = [(line, part) for line, part in torch_parts(tree) if part in banned]
        messages += [f"{module}:{line}: may not name torch.{part}" for line, part in named]
    return messages


def module_name(path: Path) -> str:
    """Return the dotted name of a file of the package."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = sorted(PACKAGE.rglob("*.py"))


def test_a_file_imports_only_what_its_layer_may() -> None:
    broken: list[str] = []
    for path in FILES:
        source = path.read_text(encoding="utf-8")
        broken += violations(source, module_name(path), is_package=path.name == "__init__.py")

    assert broken == []


def test_the_rules_saw_the_package() -> None:
    layers = {layer_of(module_name(path)) for path in FILES}

    assert {"root", "errors", "core"} <= layers
    assert {layer for layer in layers if layer.startswith("backends/")} - {SHARED}, "no backend was seen"
    assert {layer.partition("/")[0] for layer in layers} <= {"root", "bench", "cli", "replay", *TOP}
    assert len([path for path in FILES if layer_of(module_name(path)) == "core"]) > 1


def test_a_new_top_level_module_needs_a_rule() -> None:
    present = {path.stem if path.suffix else path.name for path in PACKAGE.iterdir() if path.suffix in {"", ".py"}}

    assert present - TOP - {"__init__", "__pycache__"} == set()


def test_every_backend_has_the_same_files() -> None:
    """`compat`: a compiler's names in its releases. `leading_values`: attention that only a front door calls.

    `served`: what kernels serve, without torch. `ops`: the table of layer ops. `flashinfer`: calls of that library. A
    backend with many files has a folder for each part. Functions under the names of other libraries stand in
    `dsv4attn/compat`.
    """
    needed = {"__init__", "launch"}
    allowed = {"kernels", "tuning", "metadata", "explain_notes", "probe", "served", "support"}
    allowed |= {"compat", "leading_values", "ops"}
    families = ("kernels_", "flashinfer")
    folders = {path.parent for path in FILES if layer_of(module_name(path)).startswith("backends/")}
    for folder in {folder for folder in folders if folder.parent == PACKAGE / "backends"} - {
        PACKAGE / "backends" / "_triton"
    }:
        stems = {path.stem for path in folder.iterdir() if path.suffix == ".py"}

        assert stems >= needed, folder.name
        assert {stem for stem in stems - needed - allowed if not stem.startswith(families)} == set(), folder.name


def test_the_table_is_closed_and_has_no_cycle() -> None:
    done: set[str] = set()
    while ready := {layer for layer, may in MAY_IMPORT.items() if layer not in done and may <= done}:
        done |= ready

    assert done == set(MAY_IMPORT)


JITS = {"jit", "stable_kernel", "stable_gluon"}


def mixture(source: str) -> list[str]:
    """Public host functions and classes of a file with kernels; "untyped" for a file that has none and is not strict.

    A kernel is a function that one of JITS decorates. Private host functions may make constants of kernels.
    """
    kernels: list[str] = []
    host: list[str] = []
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            marks = [mark.func if isinstance(mark, ast.Call) else mark for mark in node.decorator_list]
            names = {mark.attr if isinstance(mark, ast.Attribute) else getattr(mark, "id", "") for mark in marks}
            (kernels if names & JITS else host).append(node.name)
    if kernels:
        return [name for name in host if not name.startswith("_")]
    return ["untyped"] if re.search("^# mypy: .*allow", source, re.MULTILINE) else []


def backend_sources() -> dict[str, str]:
    return {module_name(p): p.read_text(encoding="utf-8") for p in FILES if PACKAGE / "backends" in p.parents}


def test_a_file_holds_kernels_or_the_host_functions_that_launch_them() -> None:
    """No exception: what launches kernels is typed strictly, and a kernel file is the only one that is not."""
    sources = backend_sources()

    assert {name: names for name, source in sources.items() if (names := mixture(source))} == {}
    # the rule saw the kernels: a file of each with one more host function breaks it
    extra = "\n\ndef one_more(x: int) -> int:\n    return x\n"
    broken = {name for name, source in sources.items() if mixture(source + extra) == ["one_more"]}
    compiled = {name for name, source in sources.items() if name.endswith(".kernels") and "import triton" in source}
    assert broken >= compiled >= {"dsv4attn.backends._triton.attention.kernels"}
    assert len(broken) > 15


@pytest.mark.parametrize("mark", ["triton.jit", "gluon.jit", "stable_kernel", "stable_gluon", "triton.jit(debug=True)"])
def test_a_kernel_beside_its_launcher_is_found(mark: str) -> None:
    launcher = backend_sources()["dsv4attn.backends._triton.cache.gather"]
    public = {"block_of", "dequantize_and_gather_k_cache", "dequant_gather_slots", "variants"}

    assert set(mixture(f"{launcher}\n\n@{mark}\ndef planted(x):\n    return x\n")) == public
    assert mixture(f"# mypy: ignore-errors, allow-untyped-defs\n{launcher}") == ["untyped"]


PLANTED = [
    ("dsv4attn.errors", "from dsv4attn.core import layout", "errors may not import core"),
    ("dsv4attn.core.cache.layout", "import dsv4attn.selection", "core may not import selection"),
    ("dsv4attn.core.cache.layout", "from dsv4attn import load_backend", "core may not import root"),
    ("dsv4attn.core.cache.layout", "from ... import plugins", "core may not import plugins"),
    ("dsv4attn.core.cache.layout", "from ...backends.xpu import launch", "core may not import backends/xpu"),
    ("dsv4attn.core.cache.layout", "def f():\n    import dsv4attn.tools.cli", "core may not import cli"),
    ("dsv4attn.core.cache.layout", "import torch\nx = torch.cuda.Event()", "may not name torch.cuda"),
    ("dsv4attn.core.cache.layout", "import torch as t\nx = t.xpu.synchronize()", "may not name torch.xpu"),
    ("dsv4attn.core.cache.layout", "from torch import cuda", "may not name torch.cuda"),
    ("dsv4attn.core.cache.layout", "from torch.xpu import Stream", "may not name torch.xpu"),
    ("dsv4attn.core.cache.layout", "import torch\nx = getattr(torch, 'cuda')", "may not name torch.cuda"),
    ("dsv4attn.core.cache.layout", "import triton.language as tl", "may not import triton"),
    ("dsv4attn.backends.xpu.launch", "import torch\nx = torch.cuda.current_stream()", "may not name torch.cuda"),
    ("dsv4attn.backends._triton.cache.insert", "import torch\nx = torch.cuda.Event", "may not name torch.cuda"),
    ("dsv4attn.backends._triton.cache.insert", "from dsv4attn import hookspecs", "may not import hookspecs"),
    ("dsv4attn.backends.rocm.launch", "from dsv4attn.backends.sm90 import tuning", "may not import backends/sm90"),
    ("dsv4attn.backends.rocm.launch", "from dsv4attn.backends import sm90", "may not import backends/sm90"),
    ("dsv4attn.backends.rocm.launch", "from ..sm90.kernels import decode_kernel", "may not import backends/sm90"),
    ("dsv4attn.backends.rocm.launch", "from dsv4attn import testing", "may not import testing"),
    ("dsv4attn.backends.rocm.launch", "from dsv4attn.testing import oracle", "may not import testing/oracle"),
    ("dsv4attn.backends.rocm.support", "import torch", "may not import torch"),
    ("dsv4attn.backends.rocm.support", "def f():\n    import triton", "may not import triton"),
    ("dsv4attn.selection", "from dsv4attn.backends.reference import launch", "may not import backends/reference"),
    ("dsv4attn.selection", "import dsv4attn.testing", "selection may not import testing"),
    ("dsv4attn.plugins", "from dsv4attn.selection import decide", "plugins may not import selection"),
    (
        "dsv4attn.core.attention.forward_mqa",
        "from importlib import import_module\nx = import_module('dsv4attn.backends.xpu.launch')",
        "core may not import backends/xpu",
    ),
    (
        "dsv4attn.tools.cli.run",
        "import importlib\nx = importlib.import_module(f'dsv4attn.backends.{n}')",
        "cli may not import",
    ),
    ("dsv4attn.testing.suite", "from dsv4attn.backends.reference.launch import Reference", "testing may not import"),
    ("dsv4attn.testing.cases.table", "from dsv4attn.tools.replay import trace", "testing may not import replay"),
    ("dsv4attn.testing.oracle.layer", "from dsv4attn.core.model.geometry import ModelGeometry", "may not import core"),
    ("dsv4attn.testing.oracle.attention", "from dsv4attn import errors", "may not import errors"),
    ("dsv4attn.testing.oracle.attention", "from ..cases import table", "may not import testing"),
    ("dsv4attn.testing.oracle.layer", "from dsv4attn.core.cache.layout import Fp8Format", "may not import core"),
    ("dsv4attn.testing.oracle.layer", "from dsv4attn.testing.kit.tolerances import rounded", "may not import testing"),
    ("dsv4attn.tools.replay.engine", "import dsv4attn.tools.cli.run", "replay may not import cli"),
    ("dsv4attn.testing.cases.table", "from dsv4attn.compat import flash_mla", "testing may not import compat"),
    ("dsv4attn.compat.flash_mla", "from dsv4attn.plugins import PluginRegistry", "compat may not import plugins"),
    ("dsv4attn.compat.vllm_xpu", "from dsv4attn.backends.xpu import launch", "compat may not import backends/xpu"),
    ("dsv4attn.tools.replay.engine", "from dsv4attn import plugins", "replay may not import plugins"),
    (
        "dsv4attn.integrations.transformers.x",
        "from dsv4attn.compat import direct",
        "integrations may not import compat",
    ),
    ("dsv4attn.selection", "from dsv4attn.integrations import transformers", "selection may not import integrations"),
    (
        "dsv4attn.core.cache.layout",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from dsv4attn.hookspecs import x",
        "core may not import hookspecs",
    ),
]


def test_a_planted_violation_is_caught() -> None:
    for module, source, said in PLANTED:
        assert said in " ".join(violations(source, module)), f"{module}: {source}"


ALLOWED = [
    (
        "dsv4attn.core.cache.layout",
        "from dsv4attn.core.model.geometry import ModelGeometry\nfrom dsv4attn import errors",
        False,
    ),
    ("dsv4attn.core", "from .layout import KVCacheLayout", True),
    ("dsv4attn.core.contract.device", "import torch\nx = torch.cuda.is_available(), torch.xpu.is_available()", False),
    ("dsv4attn.backends.xpu.launch", "from . import kernels\nfrom .._triton.insert import insert", False),
    ("dsv4attn.backends.xpu.launch", "import torch\nx = torch.xpu.current_stream()", False),
    ("dsv4attn.backends.xpu", "from dsv4attn.hookspecs import hookimpl\nfrom .support import support", True),
    ("dsv4attn.plugins", "import importlib\nx = importlib.import_module('dsv4attn.backends.xpu')", False),
    ("dsv4attn.testing.cases.table", "from dsv4attn import load_backend\nfrom dsv4attn.selection import decide", False),
    ("dsv4attn.tools.replay.engine", "import dsv4attn\nfrom dsv4attn.testing.oracle.attention import attend", False),
    ("dsv4attn.integrations.transformers", "from transformers import Cache\nfrom dsv4attn import load_backend", True),
    ("dsv4attn.testing.oracle.layer", "from dsv4attn.testing.oracle.attention import round_bf16", False),
    ("dsv4attn", "from dsv4attn.selection import load_backend", True),
]


def test_what_the_design_allows_is_allowed() -> None:
    for module, source, is_package in ALLOWED:
        assert violations(source, module, is_package=is_package) == []

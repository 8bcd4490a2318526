"""Kernels in a process where functions of `triton` are plain ones, as engines leave them. Prints JSON.

With the paths of files: which names of other packages the functions read that the compiler reads, in the package and in
these files, which of them get no key from Triton, and which get one that is not the same in every process. With
"compile": what the compiler says about each kernel.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import pkgutil
import sys
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import triton
import triton.language as tl
from attrs import evolve
from triton.runtime.jit import JITCallable

LANGUAGES = ("triton.language", "triton.experimental.gluon.language")
FORMS: list[tuple[str, dict[str, Any], str, str, int]] = [
    ("triton", {}, "sm_90", "flash", 1),
    ("triton", {"deterministic": True, "projection": "fp8"}, "sm_90", "flash", 1),
    ("triton", {}, "sm_90", "deepseek-v4.1-flash", 1),
    ("sm90", {"projection": "fp8"}, "sm_90", "flash", 1),
    ("sm90", {}, "sm_90", "flash", 8),
    ("sm120", {}, "sm_120", "flash", 1),
    ("xpu", {"decode": "gathered"}, "sm_90", "flash", 1),
]
"""Backend, its options, the device whose kernels it names, model and ranks: together they have every kernel."""


def replace_helpers() -> list[str]:
    """Put a plain function in the place of each function of `triton` that kernels may call; their names."""
    names = [name for name, value in vars(triton).items() if isinstance(value, JITCallable)]
    for name in names:
        setattr(triton, name, getattr(triton, name).fn)
    return names


def functions_of(modules: Iterable[ModuleType]) -> dict[str, Any]:
    """The functions that the compiler reads, by module and name; of each module its own."""
    return {
        f"{module.__name__}.{name}": value
        for module in modules
        for name, value in vars(module).items()
        if isinstance(value, JITCallable) and value.fn.__module__ == module.__name__
    }


def package() -> list[ModuleType]:
    """All modules of the package's backends."""
    from dsv4attn import backends

    return [
        importlib.import_module(found.name) for found in pkgutil.walk_packages(backends.__path__, "dsv4attn.backends.")
    ]


def outside_names(function: Any) -> list[str]:
    """Names in a function's text that are neither the package's own nor of Triton's languages."""
    own, scope = function.fn.__module__, function.get_capture_scope()
    local = {*function.fn.__code__.co_varnames}

    def is_outside(home: str) -> bool:
        is_language = any(f"{home}.".startswith(f"{language}.") for language in LANGUAGES)
        return not (is_language or home == own or home.partition(".")[0] == "dsv4attn")

    found = []
    for root, *attributes in _chains(function.fn):
        if root in local or root not in scope:
            continue
        value, path, homes = scope[root], [root], list[str]()
        while isinstance(value, ModuleType):
            homes.append(value.__name__)
            if not attributes or value.__name__.startswith(LANGUAGES):
                break
            path.append(attributes.pop(0))
            value = getattr(value, path[-1])
        # plain numbers have no module
        homes.append(getattr(value, "__module__", None) or own)
        if any(map(is_outside, homes)):
            found.append(".".join(path))
    return sorted({*found})


def _chains(function: Any) -> Iterator[list[str]]:
    """Each name that a function reads, with its attributes; not those of decorators."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            node.decorator_list = []
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        attributes, at = [], node
        while isinstance(at, ast.Attribute):
            attributes.append(at.attr)
            at = at.value
        if isinstance(at, ast.Name) and id(node) not in inner:
            yield [at.id, *reversed(attributes)]


def read(paths: Iterable[str]) -> dict[str, Any]:
    """What functions of the package and of these files read from outside, and errors of Triton about their keys."""
    from dsv4attn.backends._triton.compiling.kernel_keys import settle_key
    from tests.programs import import_text

    planted = [import_text(Path(path), Path(path).read_text(encoding="utf-8")) for path in paths]
    functions, errors, unstable = functions_of([*package(), *planted]), {}, {}
    for name, function in functions.items():
        try:
            settle_key(function)
        except Exception as error:  # noqa: BLE001 - whatever Triton raises
            errors[name] = str(error)
        if names := constants_in_order_of_addresses(function):
            unstable[name] = names
    outside = {name: names for name, function in functions.items() if (names := outside_names(function))}
    return {"functions": len(functions), "outside": outside, "errors": errors, "unstable": unstable}


def constants_in_order_of_addresses(function: Any) -> list[str]:
    """Constants that two modules write otherwise, also 1 and True. In Triton 3.6 addresses order the two in a key."""
    seen, found = dict[str, str](), list[str]()
    for (name, _), (value, _) in function.used_global_vals.items():
        if isinstance(value, tl.constexpr) and seen.setdefault(name, repr(value)) != repr(value):
            found.append(name)
    return found


def compiled() -> dict[str, Any]:
    """What the compiler says about one variant of each kernel, and the kernels that no backend named."""
    import torch

    from dsv4attn.backends.xpu import leading_values
    from dsv4attn.core.contract.device import DeviceFacts
    from dsv4attn.tools.cli.common import geometry_of
    from dsv4attn.tools.cli.compile import bounds_of
    from tests.backends._triton.compiling.each_kernel import compile_each
    from tests.backends.built_in import class_of

    variants = [*leading_values.variants(64, 512, 576, torch.bfloat16)]
    for name, options, device, model, ranks in FORMS:
        bounds = evolve(bounds_of(geometry_of(model).tensor_parallel(ranks), "e4m3fn"), over_ranks=True)
        variants += class_of(name)(**options).kernel_variants(bounds, DeviceFacts.named(device))
    said = compile_each(variants, "sm_90")
    kernels = {name for name, value in functions_of(package()).items() if getattr(value, "do_not_specialize", None)}
    return {"said": said, "missing": sorted(kernels - {*said})}


if __name__ == "__main__":
    replaced = replace_helpers()
    result = compiled() if sys.argv[1:] == ["compile"] else read(sys.argv[1:])
    print(json.dumps({"replaced": replaced, **result}))

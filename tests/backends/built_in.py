"""Lists of built-in backends for tests, derived from the table BUILT_IN and from what each backend's folder declares.

A backend enters these lists with its line in BUILT_IN. Tests of all Triton backends try each with its default options
and, where `tests/backends/<name>/forms.py` exists, with those that it declares as FORMS: options by name of the form.
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable, Mapping
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from dsv4attn import plugins
from dsv4attn.core.contract.backend import BackendInfo, Rank
from dsv4attn.core.contract.device import DeviceFacts
from dsv4attn.core.contract.devices import DEVICES
from dsv4attn.core.contract.limits import Limits
from dsv4attn.core.contract.warmup import WarmupSpec
from dsv4attn.core.model.geometry import ModelGeometry

PACKAGE = Path(plugins.__file__).parent


def infos() -> dict[str, BackendInfo]:
    """The descriptor of every built-in backend, by its name."""
    return dict(_infos())


@cache
def _infos() -> Mapping[str, BackendInfo]:
    """They are loaded once: neither the table nor a descriptor changes in a process."""
    registry = plugins.PluginRegistry.load(entry_points=[])
    assert sorted(registry.backends) == sorted(plugins.BUILT_IN), [str(failure) for failure in registry.failures]
    return {name: registration.info for name, registration in registry.backends.items()}


def of_rank(rank: Rank) -> list[str]:
    """Names of the built-in backends of a rank: "reference" is the only one of Rank.REFERENCE."""
    return [name for name, info in infos().items() if info.rank is rank]


EVERYWHERE = [*of_rank(Rank.REFERENCE), *of_rank(Rank.GENERIC)]
"""Backends that run on every device: torch's definitions, and the shared kernels."""


def runs(info: BackendInfo, device: DeviceFacts) -> bool:
    """Whether a descriptor names a device."""
    return device.matches(info.native + info.runs_on)


def triton_backends(device: DeviceFacts | None = None) -> list[str]:
    """Names of the backends whose class derives from TritonBackend; with a device, of those that run on it.

    The source of the factory's module is read, not imported: the list is the same on a machine without Triton.
    """
    return [
        name
        for name, info in infos().items()
        if (device is None or runs(info, device)) and "TritonBackend" in _imported(info.factory.partition(":")[0])
    ]


@cache
def _imported(module: str) -> set[str]:
    spec = find_spec(module)
    assert spec is not None, module
    assert spec.origin is not None, module
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    return {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}


def class_of(name: str) -> Any:
    """The class, or another callable, that a backend's descriptor names as its factory."""
    module, _, attribute = infos()[name].factory.partition(":")
    return getattr(importlib.import_module(module), attribute)


def forms(device: DeviceFacts | None = None) -> dict[str, Callable[..., Any]]:
    """Constructors of the Triton backends in their default form, and, as "name form", in the forms they declare."""
    factories: dict[str, Callable[..., Any]] = {}
    for name in triton_backends(device):
        factories[name] = class_of(name)
        factories |= {f"{name} {form}": partial(class_of(name), **options) for form, options in _declared(name).items()}
    return factories


def _declared(name: str) -> Mapping[str, Mapping[str, Any]]:
    module = f"tests.backends.{name}.forms"
    try:
        declared: Mapping[str, Mapping[str, Any]] = importlib.import_module(module).FORMS
    except ModuleNotFoundError as error:
        if not module.startswith(error.name or "?"):
            raise
        return {}
    return declared


@cache
def launching_alike(geometry: ModelGeometry) -> list[str]:
    """Names of the backends that ask, on a CPU, for exactly the kernels of the generic backend: its twins there."""
    bounds, cpu = WarmupSpec.of(geometry, Limits(8, 64, 4096)), DeviceFacts.named("cpu")
    variants = {name: {*class_of(name)().kernel_variants(bounds, cpu)} for name in triton_backends(cpu)}
    generic = of_rank(Rank.GENERIC)
    return [name for name in variants if name not in generic and variants[name] in [variants[name] for name in generic]]


def but_twins(*names: Any) -> list[Any]:
    """Names of backends as parameters of a test; one that launches here what another one does is slow."""
    is_interpreted = find_spec("triton") and DeviceFacts.here().arch == "cpu"
    twins = launching_alike(ModelGeometry.preset("flash")) if is_interpreted else []
    return [pytest.param(name, marks=pytest.mark.slow) if name in twins else name for name in names]


def known_devices(*kinds: str) -> list[str]:
    """Architectures of the table of devices, of these kinds or of all."""
    return [device.arch for device in DEVICES if not kinds or device.kind in kinds]


def packages() -> list[str]:
    """Top-level packages that the backends' files import, as statements or by name, besides Python's own and ours."""
    modules = set[str]()
    for path in PACKAGE.joinpath("backends").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                modules |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                modules.add(node.module or "")
            elif isinstance(node, ast.Call) and node.args:
                name, first = getattr(node.func, "attr", getattr(node.func, "id", "")), node.args[0]
                if name.endswith("import_module") and isinstance(first, ast.Constant):
                    modules.add(str(first.value))
    tops = {name.partition(".")[0] for name in modules}
    return sorted(tops - {*sys.stdlib_module_names, "dsv4attn", "__future__"})

"""`VendorWheels`: installed wheels of other vendors, a folder on the path with modules and metadata."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from collections.abc import Mapping
from pathlib import Path
from textwrap import dedent
from typing import TYPE_CHECKING, Any

from dsv4attn import selection
from dsv4attn.plugins import PluginFailure, PluginRegistry

if TYPE_CHECKING:
    from typing_extensions import Self

PLUGIN = """
from dsv4attn.core.contract import BackendInfo, Rank
from dsv4attn.core.contract.problem import Reason
from dsv4attn.hookspecs import hookimpl


def support(device, problem):
    {support}


@hookimpl
def dsv4attn_backends():
    return [BackendInfo(
        name={name!r}, api={api!r}, factory={factory!r}, support=support, summary="of another vendor",
        native={native!r}, runs_on={runs_on!r}, rank=Rank[{rank!r}], packages={packages!r}, options={options!r},
    )]
"""


DEFAULTS: Mapping[str, object] = {
    "api": "1.0",
    "factory": "dsv4attn.backends.reference.launch:ReferenceBackend",
    "support": "return []",
    "native": ("sm_90",),
    "runs_on": ("*",),
    "rank": "VENDOR",
    "packages": (),
    "options": {},
}
"""What `PLUGIN` has unless a test says otherwise."""


def plugin(name: str = "acme", **changes: object) -> str:
    """Source of a plugin with one backend. changes: see `DEFAULTS`."""
    assert changes.keys() <= DEFAULTS.keys()
    return PLUGIN.format(name=name, **{**DEFAULTS, **changes})


class VendorWheels:
    """A folder of installed wheels. It is on the path while the object is used as a context manager."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.modules: list[str] = []

    def __enter__(self) -> Self:
        sys.path.insert(0, str(self.folder))
        selection._registry.cache_clear()
        selection._log_once.cache_clear()
        return self

    def __exit__(self, *_: object) -> None:
        sys.path.remove(str(self.folder))
        for module in self.modules:
            sys.modules.pop(module, None)
        importlib.invalidate_caches()
        selection._registry.cache_clear()

    def install(
        self,
        distribution: str,
        source: str,
        *,
        point: str | None = None,
        version: str = "0.2",
        target: str | None = None,
        entry_points: str | None = None,
    ) -> None:
        """Install a distribution with one module, named after it, and one entry point.

        point: name of the entry point, by default the part of the distribution's name after its first dash.
        """
        module = distribution.replace("-", "_")
        point = point or distribution.partition("-")[2] or distribution
        self.modules.append(module)
        (self.folder / f"{module}.py").write_text(dedent(source), encoding="utf-8")
        self.refresh()
        info = self.folder / f"{module}-{version}.dist-info"
        info.mkdir()
        metadata = f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
        (info / "METADATA").write_text(metadata, encoding="utf-8")
        text = entry_points or f"[dsv4attn]\n{point} = {target or module}\n"
        (info / "entry_points.txt").write_text(text, encoding="utf-8")
        importlib.invalidate_caches()

    def refresh(self) -> None:
        """Make the next selection load the plugins again."""
        selection._registry.cache_clear()

    def points(self) -> list[importlib.metadata.EntryPoint]:
        """Entry points of this folder alone."""
        distributions = importlib.metadata.distributions(path=[str(self.folder)])
        return [point for package in distributions for point in package.entry_points if point.group == "dsv4attn"]

    def registry(self, **lists: Any) -> PluginRegistry:
        """The registry of built-ins and this folder."""
        return PluginRegistry.load(entry_points=self.points(), **lists)


def only_failure(registry: PluginRegistry) -> PluginFailure:
    """The failure of the only plugin that failed."""
    assert len(registry.failures) == 1, registry.failures
    return registry.failures[0]

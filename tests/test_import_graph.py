"""No file of the package imports in a circle, and no folder imports a folder that stands before it in its list."""

from __future__ import annotations

import pytest

from tests import import_graph


def test_the_package_has_no_circle() -> None:
    assert import_graph.circles(import_graph.modules()) == []


def test_folders_import_only_folders_after_them() -> None:
    graph = import_graph.modules()

    assert import_graph.upward_imports(graph) == []
    folders = {folder for module in graph if (folder := import_graph.folder_of(module))}
    assert folders == {*import_graph.CORE_FOLDERS}, "every folder of core is in the list"


@pytest.mark.parametrize(
    ("low", "high"),
    [
        ("core.model.geometry", "core.layer.attention_layer"),
        ("backends._triton.compiling.variant", "backends._triton.launching.runtime"),
        ("testing.kit.factories", "testing.cases.table"),
    ],
)
def test_a_planted_circle_and_a_planted_upward_import_are_found(low: str, high: str) -> None:
    graph = {**import_graph.modules()}
    graph[low] = {*graph[low], high}

    assert (low, high) in import_graph.upward_imports(graph)
    (circle,) = (group for group in import_graph.circles(graph) if low in group)
    assert high in circle


def test_packages_have_nothing_but_the_listed_folders() -> None:
    for package, listed in {**import_graph.FOLDERS, "core": import_graph.CORE_FOLDERS}.items():
        folder = import_graph.PACKAGE.joinpath(*package.split("."))
        found = {path.name for path in folder.iterdir() if (path / "__init__.py").is_file()}

        assert found == {*listed} - {"ground"}, package

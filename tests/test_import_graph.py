"""No file of the package imports in a circle, and no folder of core imports a folder that stands before it."""

from __future__ import annotations

from tests import import_graph


def test_the_package_has_no_circle() -> None:
    assert import_graph.circles(import_graph.modules()) == []


def test_folders_of_core_import_only_folders_after_them() -> None:
    graph = import_graph.modules()

    assert import_graph.upward_imports(graph) == []
    folders = {folder for module in graph if (folder := import_graph.folder_of(module))}
    assert folders == {*import_graph.CORE_FOLDERS}, "every folder of core is in the list"


def test_a_planted_circle_and_a_planted_upward_import_are_found() -> None:
    graph = {**import_graph.modules()}
    low, high = "core.model.geometry", "core.layer.attention_layer"
    graph[low] = {*graph[low], high}

    assert (low, high) in import_graph.upward_imports(graph)
    (circle,) = (group for group in import_graph.circles(graph) if low in group)
    assert high in circle


def test_folders_of_core_have_nothing_but_the_listed_folders() -> None:
    folders = {path.name for path in (import_graph.PACKAGE / "core").iterdir() if (path / "__init__.py").is_file()}

    assert folders == {*import_graph.CORE_FOLDERS} - {"ground"}

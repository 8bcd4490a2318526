"""Who imports whom in the package, read from its syntax trees. `python -m tests.import_graph` prints what it finds.

An import inside a function or under TYPE_CHECKING counts like any other: what a file knows matters, not when it loads.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import dsv4attn

__all__ = ["CORE_FOLDERS", "circles", "flowchart", "folder_of", "modules", "upward_imports"]

PACKAGE = Path(dsv4attn.__file__).parent
CORE_FOLDERS = (
    "layer",
    "context_parallel",
    "attention",
    "memory",
    "metadata",
    "contract",
    "torch_ops",
    "cache",
    "model",
    "ground",
)
"""Folders of `core`, each importing only what stands after it. "ground" is the files of `core` itself."""
SELECTION = {"plugins", "config"}
"""Modules of the top level that the flowchart draws as part of selection."""
SHARED = {"__init__", "arguments", "numerics", "support", "tuning", "untyped"}
"""Modules of `_triton` that all its folders import. The flowchart does not draw them."""

Graph = dict[str, set[str]]
"""Modules that each module imports, both without the leading `dsv4attn.`."""


def module_name(path: Path) -> str:
    """The dotted name of a file below the package; "" for the package itself."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(tree: ast.AST, known: Mapping[str, object]) -> Iterator[str]:
    """Modules of the package that a syntax tree imports. known: names of all modules."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "dsv4attn":
            base = str(node.module).partition(".")[2]
            for alias in node.names:
                inner = f"{base}.{alias.name}" if base else alias.name
                yield inner if inner in known else base
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "dsv4attn":
                    yield alias.name.partition(".")[2]


def modules() -> Graph:
    """The import graph of the whole package."""
    trees = {module_name(path): ast.parse(path.read_text(encoding="utf-8")) for path in sorted(PACKAGE.rglob("*.py"))}
    return {name: {*imported(tree, trees)} & {*trees} - {name} for name, tree in trees.items()}


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Groups of modules that import each other, directly or through others (strongly connected components)."""
    reach: dict[str, set[str]] = {}
    for start in graph:
        seen: set[str] = set()
        waiting = [*graph[start]]
        while waiting:
            module = waiting.pop()
            if module not in seen:
                seen.add(module)
                waiting += graph.get(module, set())
        reach[start] = seen
    groups = {tuple(sorted(b for b in reach[a] if a in reach.get(b, set()))) for a in graph if a in reach[a]}
    return [[*group] for group in sorted(groups)]


def folder_of(module: str) -> str | None:
    """The folder of a module of core; None for modules outside core, and for the package `core` itself."""
    first, *rest = module.split(".")
    if first != "core" or not rest:
        return None
    return rest[0] if rest[0] in CORE_FOLDERS else "ground"


def upward_imports(graph: Mapping[str, set[str]]) -> list[tuple[str, str]]:
    """(module, what it imports) where a folder of core imports one that stands before it in CORE_FOLDERS."""
    return [
        (module, other)
        for module, others in sorted(graph.items())
        for other in sorted(others)
        if (folder := folder_of(module)) and (target := folder_of(other))
        if CORE_FOLDERS.index(target) < CORE_FOLDERS.index(folder)
    ]


def _part_of(module: str) -> str | None:
    """The part that the flowchart draws for a module; None for modules that it does not draw."""
    first, *rest = module.split(".")
    if first == "backends":
        if not rest or rest[0] != "_triton":
            return "backends" if rest else None
        if len(rest) == 2 and rest[1] in SHARED:
            return None
        return f"_triton/{rest[1]}" if len(rest) > 2 else "_triton"
    if first == "tools":
        return f"tools/{rest[0]}" if rest else None
    if first in SELECTION:
        return "selection"
    return first if rest or first in {"hookspecs", "selection"} else None


def flowchart() -> str:
    """A Mermaid flowchart: an arrow from each part to those it imports, without arrows that follow from others."""
    edges: Graph = {}
    for module, others in modules().items():
        part = _part_of(module)
        for target in {_part_of(other) for other in others} - {None, part}:
            if part is not None and target is not None:
                edges.setdefault(part, set()).add(target)
    lines = ["flowchart TD"]
    for part in sorted(edges):
        for target in sorted(edges[part]):
            if part in edges.get(target, set()):
                if part < target:
                    lines.append(f"    {_node(part)} <--> {_node(target)}")
            elif not any(
                target in _reached(edges, third, {part})
                and part not in edges.get(third, set())
                and third not in edges.get(target, set())
                for third in edges[part] - {target}
            ):
                lines.append(f"    {_node(part)} --> {_node(target)}")
    return "\n".join(lines)


def _reached(edges: Graph, part: str, seen: set[str]) -> set[str]:
    """Parts that a part imports, directly or through others, besides those in `seen`, which grows."""
    for target in edges.get(part, set()) - seen:
        seen.add(target)
        _reached(edges, target, seen)
    return seen


def _node(part: str) -> str:
    return f'{part.strip("_").replace("/", "_")}["{part}"]'


def main() -> None:
    """Print core's folders in order, imports that run up, circles of the whole package, and the flowchart."""
    graph = modules()
    print("folders of core, each imports only folders after it:")
    for folder in CORE_FOLDERS:
        names = sorted(module for module in graph if folder_of(module) == folder)
        print(f"  {folder:<17} {len(names):>2} modules")
    print("upward imports:", *(f"\n  {module} -> {other}" for module, other in upward_imports(graph) or [("none", "")]))
    print("circles:", *(f"\n  {', '.join(group)}" for group in circles(graph) or [["none"]]))
    print(flowchart())


if __name__ == "__main__":
    main()

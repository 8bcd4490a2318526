"""Who imports whom in the package, read from its syntax trees.

`python -m tests.import_graph` prints what it finds. With `--draw` it writes docs/pictures/imports.svg.

An import inside a function or under TYPE_CHECKING counts like any other: what a file knows matters, not when it loads.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import dsv4attn

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
FOLDERS = {
    "backends._triton": ("layer", "attention", "cache", "index_ops", "launching", "compiling"),
    "testing": ("cases", "checks", "kit", "oracle"),
}
"""Folders of other packages, each importing no folder that stands before it. Files of the package itself are free."""
SELECTION = {"plugins", "config"}
"""Modules of the top level that the picture shows as part of selection."""
SHARED = {"__init__", "codings", "interpreted", "numerics", "sizes", "support", "tuning", "untyped"}
"""Modules of `_triton` that all its folders import. The picture does not show them."""
PICTURE = PACKAGE.parent / "docs" / "pictures" / "imports.svg"
BOX = (144, 30)
"""Width and height of a box of the picture, in pixels."""
PLACES = {
    "tools/cli": (3.0, 0),
    "tools/replay": (0.7, 1.9),
    "tools/bench": (1.75, 1.9),
    "integrations": (2.8, 1.9),
    "testing": (0.0, 3.1),
    "compat": (3.15, 3.1),
    "selection": (2.5, 4.2),
    "serving": (1.0, 5.2),
    "hookspecs": (3.4, 5.3),
    "backends": (4.65, 0),
    "_triton": (5.0, 1),
    "_triton/layer": (5.0, 2),
    "_triton/attention": (5.0, 3),
    "_triton/cache": (5.0, 4),
    "_triton/index_ops": (5.0, 5),
    "_triton/compiling": (4.35, 6.1),
    "_triton/launching": (5.6, 6.1),
    "core": (3.4, 7.4),
}
"""Column and row of each part in the picture."""
PICTURE_HEAD = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1030 510" width="1030" role="img" aria-labelledby="title">
<title id="title">Which part of dsv4attn imports which</title>
<style>
  text { font: 12.5px ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; fill: #1f2328; }
  rect { fill: #f6f8fa; stroke: #8c959f; }
  line { stroke: #59636e; }
  .head { fill: #59636e; }
  @media (prefers-color-scheme: dark) {
    text { fill: #f0f6fc; }
    rect { fill: #161b22; stroke: #656c76; }
    line { stroke: #9198a1; }
    .head { fill: #9198a1; }
  }
</style>
<defs>
<marker id="head" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" orient="auto-start-reverse">
<path class="head" d="M0 0.5 L8 4 L0 7.5 Z"/>
</marker>
</defs>"""

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


@functools.cache
def modules() -> Graph:
    """The import graph of the whole package, which is read once in a process; callers change nothing in it."""
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
    """(module, what it imports) where a folder imports one that stands before it in CORE_FOLDERS or FOLDERS."""
    return [
        (module, other)
        for module, others in sorted(graph.items())
        for other in sorted(others)
        if (place := _place_of(module)) and (target := _place_of(other))
        if place[0] == target[0] and target[1] < place[1]
    ]


def _place_of(module: str) -> tuple[str, int] | None:
    """The package of a module's folder, and the folder's index in the list of the package; None outside of folders."""
    if folder := folder_of(module):
        return "core", CORE_FOLDERS.index(folder)
    for package, folders in FOLDERS.items():
        inner = module.removeprefix(f"{package}.").split(".")
        if module.startswith(f"{package}.") and inner[0] in folders:
            return package, folders.index(inner[0])
    return None


def _part_of(module: str) -> str | None:
    """The part that the picture shows for a module; None for modules that it does not show."""
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


def arrows() -> list[tuple[str, str, bool]]:
    """(part, what it imports, whether that imports the part too), without arrows that follow from others."""
    edges: Graph = {}
    for module, others in modules().items():
        part = _part_of(module)
        for target in {_part_of(other) for other in others} - {None, part}:
            if part is not None and target is not None:
                edges.setdefault(part, set()).add(target)
    drawn = []
    for part in sorted(edges):
        for target in sorted(edges[part]):
            if part in edges.get(target, set()):
                if part < target:
                    drawn.append((part, target, True))
            elif not any(
                target in _reached(edges, third, {part})
                and part not in edges.get(third, set())
                and third not in edges.get(target, set())
                for third in edges[part] - {target}
            ):
                drawn.append((part, target, False))
    return drawn


def _reached(edges: Graph, part: str, seen: set[str]) -> set[str]:
    """Parts that a part imports, directly or through others, besides those in `seen`, which grows."""
    for target in edges.get(part, set()) - seen:
        seen.add(target)
        _reached(edges, target, seen)
    return seen


def picture() -> str:
    """The arrows as an SVG, which is docs/pictures/imports.svg. A part that has no place raises KeyError."""
    lines = [PICTURE_HEAD]
    for part, target, both in arrows():
        (x1, y1), (x2, y2) = _center(part), _center(target)
        if y1 == y2:
            side = 1 if x1 < x2 else -1
            x1, x2 = x1 + side * (BOX[0] / 2 + (9 if both else 1)), x2 - side * (BOX[0] / 2 + 1)
        else:
            y1, y2 = y1 + BOX[1] / 2 + (9 if both else 1), y2 - BOX[1] / 2 - 1
        marks = ' marker-start="url(#head)"' if both else ""
        lines.append(f'<line x1="{x1:.0f}" y1="{y1:.0f}" x2="{x2:.0f}" y2="{y2:.0f}" marker-end="url(#head)"{marks}/>')
    for part in PLACES:
        x, y = _center(part)
        lines.append(
            f'<rect x="{x - BOX[0] / 2:.0f}" y="{y - BOX[1] / 2:.0f}" width="{BOX[0]}" height="{BOX[1]}" rx="6"/>'
        )
        lines.append(f'<text x="{x:.0f}" y="{y + 4.5:.0f}" text-anchor="middle">{part}</text>')
    return "\n".join([*lines, "</svg>\n"])


def _center(part: str) -> tuple[float, float]:
    """The middle of a part's box, in pixels."""
    column, row = PLACES[part]
    return 80 + column * 155, 30 + row * 62


def main() -> None:
    """Print core's folders in order, imports that run up, and circles; with `--draw` write the picture of the docs."""
    if sys.argv[1:] == ["--draw"]:
        PICTURE.write_text(picture(), encoding="utf-8")
        return
    graph = modules()
    print("folders of core, each imports only folders after it:")
    for folder in CORE_FOLDERS:
        names = sorted(module for module in graph if folder_of(module) == folder)
        print(f"  {folder:<17} {len(names):>2} modules")
    print("upward imports:", *(f"\n  {module} -> {other}" for module, other in upward_imports(graph) or [("none", "")]))
    print("circles:", *(f"\n  {', '.join(group)}" for group in circles(graph) or [["none"]]))


if __name__ == "__main__":
    main()

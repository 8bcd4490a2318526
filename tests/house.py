"""The house in one picture: which wing of the package imports which, as a Mermaid flowchart. Run it to print it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import dsv4attn

__all__ = ["picture"]

PACKAGE = Path(dsv4attn.__file__).parent
TOP = {"plugins", "config"}
"""Modules of the top level that stand behind selection, and are drawn with it."""
GROUND = {"__init__", "arguments", "numerics", "support", "tuning", "untyped"}
"""Modules of `_triton` that all its wings import, and that are not drawn."""


def wing_of(path: Path) -> str | None:
    """The wing that a file belongs to; None for modules that every wing imports, and for the package's own names."""
    first, *rest = path.relative_to(PACKAGE).with_suffix("").parts
    if first == "backends":
        folder = rest[0]
        if folder != "_triton":
            return None if folder == "__init__" else "backends"
        return f"_triton/{rest[1]}" if len(rest) > 2 else None if rest[-1] in GROUND else "_triton"
    if first == "tools":
        return f"tools/{rest[0]}" if len(rest) > 1 else None
    return "selection" if first in TOP else first if rest or first == "hookspecs" else None


def imports() -> Iterator[tuple[str, str]]:
    """(wing, wing it imports) of every import, those for types included."""
    for path in sorted(PACKAGE.rglob("*.py")):
        own = wing_of(path)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if own else ():
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dsv4attn."):
                for found in {_file(f"{node.module}.{alias.name}") or _file(str(node.module)) for alias in node.names}:
                    other = None if found is None else wing_of(found)
                    if own and other and own != other:
                        yield own, other


def _file(module: str) -> Path | None:
    path = PACKAGE.parent.joinpath(*module.split("."))
    return next((p for p in (path.with_suffix(".py"), path / "__init__.py") if p.is_file()), None)


def picture() -> str:
    """A flowchart: an arrow from each wing to those it imports, without the arrows that follow from others."""
    edges: dict[str, set[str]] = {}
    for own, other in imports():
        edges.setdefault(own, set()).add(other)

    def reached(wing: str, seen: set[str]) -> set[str]:
        for other in edges.get(wing, set()) - seen:
            seen.add(other)
            reached(other, seen)
        return seen

    lines = ["flowchart TD"]
    for own in sorted(edges):
        for other in sorted(edges[own]):
            if own in edges.get(other, set()):
                if own < other:
                    lines.append(f"    {_node(own)} <--> {_node(other)}")
            elif not any(
                other in reached(third, {own})
                and own not in edges.get(third, set())
                and third not in edges.get(other, set())
                for third in edges[own] - {other}
            ):
                lines.append(f"    {_node(own)} --> {_node(other)}")
    return "\n".join(lines)


def _node(wing: str) -> str:
    return f'{wing.strip("_").replace("/", "_")}["{wing}"]'


if __name__ == "__main__":
    print(picture())

"""Extension of griffe for the API reference: each "name: meaning" of a docstring becomes an item of a list."""

from __future__ import annotations

import re
from typing import Any

import griffe

OTHERS = ("Raises", "Returns")
"""First words of a sentence that ends the meaning of the last name."""


def as_list(text: str, names: set[str]) -> str:
    """A docstring with each "name: meaning" on a line of its own, as Markdown.

    text: the docstring. names: those of the arguments, or of the fields, that it may explain.
    """
    known = "|".join(sorted(map(re.escape, names), key=len, reverse=True))
    begins = rf"(?:{known})(?:(?:, | and )(?:{known}))*: " if known else r"(?!)"
    blocks = []
    for block in text.split("\n\n"):
        # an indented block after a colon is code; shown as it is
        if re.match(r"    ", block):
            blocks.append(block)
            continue
        joined = " ".join(line.strip() for line in block.splitlines())
        items = re.split(rf"(?:^|(?<=[.;)]) )(?={begins}|(?:{'|'.join(OTHERS)})\b)", joined)
        lines = []
        for item in filter(None, (item.strip() for item in items)):
            explained = re.match(begins, item)
            if explained:
                lines.append(f"- `{explained[0].removesuffix(': ')}`: {item[explained.end() :]}")
            else:
                lines.append(f"\n{item}\n")
        blocks.append("\n".join(lines).strip("\n"))
    return re.sub(r"(?m)^(?!- )(.+)\n(?=- )", r"\1\n\n", "\n\n".join(blocks))


class ArgumentLines(griffe.Extension):
    """Rewrites the docstrings of a package once it is loaded."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:  # noqa: ANN401 - griffe's own
        """Rewrite all docstrings of `pkg`."""
        self._rewrite(pkg)

    def _rewrite(self, thing: griffe.Object) -> None:
        names: set[str] = set()
        if isinstance(thing, griffe.Function):
            names = {parameter.name for parameter in thing.parameters}
        elif isinstance(thing, griffe.Class):
            init = thing.members.get("__init__")
            names = {name for name, member in thing.members.items() if member.is_attribute}
            if isinstance(init, griffe.Function):
                names |= {parameter.name for parameter in init.parameters}
        if thing.docstring is not None:
            thing.docstring.value = as_list(thing.docstring.value, names - {"self", "cls"})
        for member in thing.members.values():
            if not member.is_alias:
                self._rewrite(member)  # type: ignore[arg-type]

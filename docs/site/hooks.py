"""Hooks of mkdocs: pages of the repository's root are pages of the site, README.md its home.

Links that leave these pages and docs/ are shown as paths in the repository.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[2]


PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "CODE_OF_CONDUCT.md": "code_of_conduct.md",
}
"""Pages of the root, with their names in the site."""


def on_files(files: Any, config: Any) -> Any:  # noqa: ANN401 - mkdocs' own types
    """Add the pages of the root, with their links to docs/ seen from there."""
    for source, page in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        for before in ("](", 'src="', 'srcset="'):
            text = text.replace(f"{before}docs/", f"{before}./")
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:  # noqa: ANN401 - mkdocs' own types
    """Replace links to files which the site does not have by their paths in the repository."""
    folder = posixpath.dirname(page.file.src_uri)
    of_root = page.file.src_uri in PAGES.values()

    def shown(link: re.Match[str]) -> str:
        text, target = link[1], link[2]
        if re.match(r"\w+:|#", target) or (of_root and target.startswith("./")):
            return link[0]
        path, _, heading = posixpath.normpath(posixpath.join("" if of_root else "docs", folder, target)).partition("#")
        if path in PAGES:
            there = posixpath.relpath(PAGES[path], folder or ".")
            return f"[{text}]({there}{'#' if heading else ''}{heading})"
        if path.startswith("docs/") and not (ROOT / path).is_dir():
            return link[0]
        return f"{text} (`{path}`)" if text.strip("`") != path else f"`{path}`"

    parts = re.split(r"(```.*?```)", markdown, flags=re.DOTALL)
    # a picture links to itself, to be seen in full on a narrow screen
    parts[::2] = [re.sub(r"(?m)^!\[([^\]]+)\]\((\S+)\)$", r"[![\1](\2)](\2)", prose) for prose in parts[::2]]
    parts[::2] = [re.sub(r"\[([^\]]+)\]\(([^)\s]+)\)", shown, prose) for prose in parts[::2]]
    return "".join(parts)

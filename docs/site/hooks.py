"""Hooks of mkdocs: README.md is the home page, and links that leave docs/ are shown as paths in the repository."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[2]


def on_files(files: Any, config: Any) -> Any:  # noqa: ANN401 - mkdocs' own types
    """Add README.md as the home page, with its links seen from docs/."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for before in ("](", 'src="', 'srcset="'):
        readme = readme.replace(f"{before}docs/", f"{before}./")
    files.append(File.generated(config, "index.md", content=readme))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:  # noqa: ANN401 - mkdocs' own types
    """Replace links to files outside of docs/, which the site does not have, by their paths in the repository."""
    folder = posixpath.dirname(page.file.src_uri)
    home = page.file.src_uri == "index.md"

    def shown(link: re.Match[str]) -> str:
        text, target = link[1], link[2]
        if re.match(r"\w+:|#", target) or (home and target.startswith("./")):
            return link[0]
        path = posixpath.normpath(posixpath.join("" if home else "docs", folder, target))
        if path.startswith("README.md"):
            return f"[{text}]({posixpath.relpath(path.replace('README.md', 'index.md'), folder or '.')})"
        if path.startswith("docs/") and not (ROOT / path.partition("#")[0]).is_dir():
            return link[0]
        return f"{text} (`{path}`)" if text.strip("`") != path else f"`{path}`"

    parts = re.split(r"(```.*?```)", markdown, flags=re.DOTALL)
    parts[::2] = [re.sub(r"\[([^\]]+)\]\(([^)\s]+)\)", shown, prose) for prose in parts[::2]]
    return "".join(parts)

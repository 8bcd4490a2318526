"""The tables of built-in backends in the documents say what the table BUILT_IN and the descriptors say."""

from __future__ import annotations

import re
from pathlib import Path

from tests.backends.built_in import infos

ROOT = Path(__file__).resolve().parents[1]


def rows_of(page: str, heading: str) -> list[list[str]]:
    """The cells of a table under a heading of a page, line by line, without the table's own heading."""
    section = (ROOT / page).read_text(encoding="utf-8").split(f"## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def words(cell: str) -> list[str]:
    """What stands between backticks in a cell."""
    return re.findall(r"`([^`]+)`", cell)


def test_the_readme_has_a_line_for_each_built_in_backend() -> None:
    known = infos()
    listed = [word for first, *_ in rows_of("README.md", "Backends") for word in words(first)]
    missing = [
        f"| `{name}` | {info.summary} | {', '.join(info.native)} | what its kernels ran on |"
        for name, info in known.items()
        if name not in listed
    ]

    assert not missing, "README.md, section Backends: add by hand, in your own words:\n" + "\n".join(missing)
    assert sorted(listed) == sorted(known), "README.md, section Backends: a line names no built-in backend, or two do"


def test_the_page_of_settings_has_every_option_of_each_built_in_backend() -> None:
    # docs/testing.md has these: no user needs them
    for_tests = ("decode_indices", "prefill_indices", "prefill_keys", "raw_q")
    declared = {
        (backend, option): str(default).lower() if isinstance(default, bool) else str(default)
        for backend, info in infos().items()
        for option, default in info.options.items()
        if backend != "reference" or option not in for_tests
    }
    listed = {
        (backend, option): default.strip("`")
        for options, backends, default, _ in rows_of("docs/selection.md", "Options")
        for option in words(options)
        for backend in words(backends)
    }
    missing = [f"| `{o}` | `{b}` | `{declared[b, o]}` |" for b, o in declared if (b, o) not in listed]

    assert not missing, "docs/selection.md, section Options: add, with what they mean:\n" + "\n".join(missing)
    assert listed == declared, "docs/selection.md, section Options: an option or a default is not the descriptor's"

"""Make the table of docs/versions.md from pyproject.toml, the Makefile, constraints.txt and the wheels' own constants.

`python release/versions.py` writes the table into the page; a test compares both.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "versions.md"
BEGIN, END = "<!-- versions: begin -->\n", "<!-- versions: end -->"


def found(file: str, pattern: str) -> str:
    """The one group of a pattern that matches once in a file of the project. Raises ValueError otherwise."""
    [match] = re.findall(pattern, (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE)
    return str(match)


def oldest(requirements: list[str], name: str) -> str:
    """The lower bound of a requirement, as in "torch>=2.6"."""
    [bound] = [match[1] for text in requirements if (match := re.match(rf"{name}>=([\d.]+)", text))]
    return bound


def pythons() -> list[str]:
    """The releases of Python that the classifiers name."""
    named = found("pyproject.toml", r"(?s)^classifiers = \[(.+?)^\]")
    return re.findall(r"Python :: (3\.\d+)", named)


def rows() -> list[tuple[str, str, str, str]]:
    """What is served: name, oldest release, newest release that was tested, and what happens with others."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    vllm, sglang = (
        re.findall(r'"([\d.]+)"', found(f"integrations/dsv4attn-{name}/dsv4attn_{name}/guard.py", r"tested=\((.+?)\)"))
        for name in ("vllm", "sglang")
    )
    pinned = "constraints.txt"
    return [
        ("Python", pythons()[0], pythons()[-1], "older: pip refuses; the wheel for vLLM needs 3.11"),
        ("torch", oldest(project["dependencies"], "torch"), found(pinned, r"^torch==(\S+)"), "older: pip refuses"),
        (
            "Triton, for every backend but `reference`",
            oldest(extras["triton"], "triton"),
            found("Makefile", r"^TRITON := triton==(\S+)"),
            "older: backends refuse, with the reason",
        ),
        (
            "transformers, for `dsv4attn.integrations.transformers`",
            found("Makefile", r"^TRANSFORMERS := .*transformers==(\S+)"),
            found(pinned, r"^transformers==([^;\s]+)"),
            "pip refuses others with the extra `transformers`",
        ),
        ("vLLM, by `dsv4attn-vllm`", vllm[0], vllm[-1], "refused; `DSV4ATTN_VLLM_ANY_VERSION=1` tries"),
        ("SGLang, by `dsv4attn-sglang`", sglang[0], sglang[-1], "refused; `DSV4ATTN_SGLANG_ANY_VERSION=1` tries"),
        (
            "FlashInfer, for `sm120`",
            "",
            found("Makefile", r"^FLASHINFER := .*flashinfer-python==(\S+)"),
            "asked what it serves; without it, kernels of this project run",
        ),
    ]


def table() -> str:
    """The table in Markdown."""
    head = "", "oldest", "newest tested", "other versions"
    lines = [head, ("---",) * len(head), *rows()]
    return "".join(f"| {' | '.join(cells)} |\n".replace("|  |", "| |") for cells in lines)


def page_with(new_table: str) -> str:
    """The page with a table between its marks."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    return f"{before}{BEGIN}\n{new_table}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page_with(table()), encoding="utf-8")

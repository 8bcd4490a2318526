"""Names of the kit's cases as a file, for completion in a shell, which must not wait for the import of torch.

`python -m dsv4attn.testing.case_list` writes the file again after cases have changed.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import frozen

if TYPE_CHECKING:
    from dsv4attn.testing.case import Case

__all__ = ["FILE", "ListedCase", "file_text", "listed_cases"]

FILE = Path(__file__).with_name("case_list.txt")
"""One line for each case: its name, its area, its clauses."""


@frozen
class ListedCase:
    """A line of the file.

    name: name of the case.
    area: its area, such as "decode".
    clauses: clauses of the contract that it tests.
    """

    name: str
    area: str
    clauses: tuple[str, ...]


def listed_cases() -> list[ListedCase]:
    """The cases of the file, in the order of the kit."""
    lines = FILE.read_text(encoding="utf-8").splitlines()
    return [ListedCase(name, area, tuple(clauses)) for name, area, *clauses in map(str.split, lines)]


def file_text(cases: Iterable[Case]) -> str:
    """What the file must hold for these cases."""
    return "".join(f"{case.name} {case.area.value} {' '.join(case.clauses)}\n" for case in cases)


if __name__ == "__main__":
    from dsv4attn.testing.cases import CASES

    FILE.write_text(file_text(CASES), encoding="utf-8")

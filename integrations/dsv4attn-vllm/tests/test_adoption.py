"""docs/adoption.md: its table of names is that of the wheel, and each test that it names exists."""

from __future__ import annotations

import re
from pathlib import Path

from integrations.internals_table import PAGE, written


def test_the_page_has_the_names_of_this_wheel() -> None:
    page = PAGE.read_text(encoding="utf-8")

    assert written(page, ("dsv4attn_vllm",)) == page, "run `python integrations/internals_table.py`"


def test_every_test_that_the_page_names_exists() -> None:
    named = set(re.findall(r"`(test_\w+)`", PAGE.read_text(encoding="utf-8")))
    code = "".join(path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("test_*.py"))

    assert len(named) > 10
    assert {name for name in named if f"def {name}(" not in code} == set()

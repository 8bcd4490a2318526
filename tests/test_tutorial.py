"""docs/tutorial.md: blocks print what it shows, the notebook is the page, and the pictures are those of the script."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from dsv4attn.core.model.geometry import LayerKind, ModelGeometry
from tests.programs import import_file

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE = (DOCS / "tutorial.md").read_text(encoding="utf-8")
REMAKE = "run `python docs/tutorial.py --draw`"


TUTORIAL = import_file(DOCS / "tutorial.py")


def test_the_blocks_run_in_order_and_print_what_the_page_shows() -> None:
    outputs = [output for kind, _, output in TUTORIAL.cells(PAGE) if kind == "code"]

    assert TUTORIAL.run(PAGE) == outputs, REMAKE
    assert sum(map(bool, outputs)) == PAGE.count("```text\n") >= 8
    assert "False" not in "".join(outputs)
    # a longer line is cut on the page, at 1,280 pixels
    assert [line for _, code, _ in TUTORIAL.cells(PAGE)[1::2] for line in code.splitlines() if len(line) > 88] == []


def test_the_page_counts_the_layers_of_the_released_models() -> None:
    flash, pro = (ModelGeometry.preset(name) for name in ("flash", "pro"))
    rows = re.findall(r"^\| \*\*(\w+)\*\* \|.*\| (\d+) \| (\d+) \|$", PAGE, re.MULTILINE)

    assert rows == [(kind.value, str(flash.count(kind)), str(pro.count(kind))) for kind in LayerKind]


def test_the_notebook_is_the_page() -> None:
    assert (DOCS / "tutorial.ipynb").read_text(encoding="utf-8") == TUTORIAL.notebook(PAGE), REMAKE


def test_a_page_becomes_cells_with_their_outputs() -> None:
    page = "# A\nb\n\n```python\nx = 1\n```\n\nc\n\n```python\nprint(x)\n```\n\n```text\n2\n```\n\n```\nd\n```\n"
    prose, quiet, _, loud, end = json.loads(TUTORIAL.notebook(page))["cells"]

    assert (prose["source"], quiet["source"], quiet["outputs"]) == (["# A\n", "b"], ["x = 1"], [])
    assert (loud["outputs"][0]["text"], end["source"]) == (["2\n"], ["```\n", "d\n", "```"])
    assert TUTORIAL.run(page) == ["", "1\n"]
    assert TUTORIAL.with_outputs(page) == page.replace("2\n", "1\n")


def test_the_step_of_the_picture_is_the_step_that_runs() -> None:
    runs = {kind.value: "".join(".x"[ran] for ran in TUTORIAL.recorded(kind)) for kind in LayerKind}

    assert runs == {"swa": "xxxx...xxxx", "c4a": "xxxxxxxxxxx", "c128a": "xxxxx..xxxx"}


@pytest.mark.matrix  # the pictures of the whole page
def test_the_pictures_are_those_that_the_script_draws(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.image import imread

    paths = TUTORIAL.draw(tmp_path)

    for path in paths:
        assert f"](pictures/{path.name})" in PAGE
        drawn, committed = imread(path), imread(DOCS / "pictures" / path.name)
        assert drawn.shape == committed.shape, REMAKE
        # fonts of another version of matplotlib differ a little
        assert abs(drawn - committed).mean() <= 0.02, REMAKE

"""The table of docs/adoption.md is that of the committed results of a run on a GPU."""

from __future__ import annotations

import json
from pathlib import Path

from on_gpu.report import BEGIN, END, collect, table, with_table

DOCS = Path(__file__).parents[3] / "docs"


def test_the_table_on_the_page_is_that_of_the_results() -> None:
    page = (DOCS / "adoption.md").read_text(encoding="utf-8")
    results = json.loads((DOCS / "bench" / "vllm-serving.json").read_text(encoding="utf-8"))

    assert page.count(BEGIN) == page.count(END) == 1
    assert with_table(page, results) == page
    assert results["scenarios"]


def test_figures_of_vllms_own_attention_stand_in_the_row_of_their_scenario(tmp_path: Path) -> None:
    figures = {"rms": 0.02, "gap": 0.03, "equal": 0.5, "backend": ["sm90"], "vllm:num_preemptions": 2.0}
    (tmp_path / "one.figures.json").write_text(json.dumps(figures))
    (tmp_path / "one-by-vllm.figures.json").write_text(json.dumps({"rms": 0.04, "gap": 0.1, "equal": 1.0}))

    lines = table({"scenarios": collect(tmp_path)}).splitlines()

    assert lines[0] == "| scenario | backend | rms | tokens equal | gap | rms of vLLM's own | notes |"
    assert lines[2:] == ["| one | sm90 | 0.0200 | 50.0% | 0.030 | 0.0400 | 2 preemptions |"]


def test_drafts_that_are_accepted_by_chance_have_no_share_of_equal_tokens(tmp_path: Path) -> None:
    figures = {"rms": 0.02, "backend": ["sm90"], "vllm:spec_decode_num_draft_tokens": 9.0, "vllm:num_preemptions": 0.0}
    (tmp_path / "one.figures.json").write_text(json.dumps({**figures, "vllm:spec_decode_num_accepted_tokens": 4.0}))
    (tmp_path / "two.figures.json").write_text(json.dumps({**figures, "gap": 0.0, "equal": 1.0}))

    [_, _, one, two] = table({"scenarios": collect(tmp_path)}).splitlines()

    assert one == "| one | sm90 | 0.0200 |  |  | 4 of 9 drafts accepted |"
    assert two == "| two | sm90 | 0.0200 | 100.0% | 0.000 | 0 of 9 drafts accepted |"

"""What README, engine guide and the page of commands show is what happens, and what pages link to is there."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from dsv4attn import errors
from dsv4attn.core.contract.backend import Rank
from dsv4attn.tools.cli import main
from dsv4attn.tools.replay.trace import short_trace
from tests import import_graph
from tests.backends.built_in import of_rank
from tests.tools.replay.small import CONFIG

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
LAYER = (ROOT / "docs" / "layer.md").read_text(encoding="utf-8")
GUIDE = (ROOT / "docs" / "engine-guide.md").read_text(encoding="utf-8")
FLASH_MLA = (ROOT / "docs" / "flash-mla.md").read_text(encoding="utf-8")
COMMANDS = (ROOT / "docs" / "command-line.md").read_text(encoding="utf-8")
OURS = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/*.md"))]
PAGES = [
    *OURS,
    ROOT / "changelog.d" / "README.md",
    *sorted(ROOT.glob("docs/api/*.md")),
    *sorted(ROOT.glob("examples/*/*.md")),
]


def python(page: str) -> list[str]:
    """Python examples of a page."""
    return re.findall(r"```python\n(.*?)```", page, re.DOTALL)


EXAMPLES = python(README)


def printed(examples: list[str]) -> list[str]:
    """Lines that Python examples print, one after the other in one namespace."""
    names: dict[str, object] = {"__name__": "__main__"}
    with contextlib.redirect_stdout(io.StringIO()) as out:
        for example in examples:
            exec(compile(example, "a page", "exec"), names)  # noqa: S102 - our own text
    return out.getvalue().splitlines()


def promised(examples: list[str]) -> list[str]:
    """What comments after `->` say is printed."""
    return re.findall(r"# -> (.+)$", "\n".join(examples), re.MULTILINE)


@pytest.mark.parametrize(
    "page", [README, GUIDE, LAYER, FLASH_MLA], ids=["README.md", "engine-guide.md", "layer.md", "flash-mla.md"]
)
def test_the_python_examples_run_in_order_and_print_what_they_say(page: str) -> None:
    torch.manual_seed(0)

    assert promised(python(page)) == printed(python(page))


@pytest.mark.parametrize("page", [GUIDE, LAYER], ids=["engine-guide.md", "layer.md"])
def test_an_engine_built_from_the_page_obeys_the_variable(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSV4ATTN_BACKEND", "no-such-backend")
    with pytest.raises(errors.NoBackendError, match="no-such-backend"):
        printed(python(page)[:1])


@pytest.mark.parametrize("page", [README, GUIDE, LAYER], ids=["README.md", "engine-guide.md", "layer.md"])
def test_the_layers_of_the_page_run_on_the_backend_of_the_variable(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("DSV4ATTN_BACKEND", "triton")
    # up to the line after the layers are bound: whole prompts take minutes in Triton's interpreter
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(python(page)[0].partition("request =")[0], "a page", "exec"), names)  # noqa: S102 - our own text
    layers = names.get("layers") or [names["layer"]]

    assert {layer.backend.name for layer in layers} == {"triton"}


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(README, id="README.md", marks=pytest.mark.matrix),
        pytest.param(GUIDE, id="engine-guide.md", marks=pytest.mark.slow),
        pytest.param(LAYER, id="layer.md", marks=pytest.mark.slow),
    ],
)
def test_the_python_examples_print_the_same_on_the_backend_of_the_variable(
    page: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    [generic], [reference] = of_rank(Rank.GENERIC), of_rank(Rank.REFERENCE)
    monkeypatch.setenv("DSV4ATTN_BACKEND", generic)
    torch.manual_seed(0)
    expected = [line.replace(f"{reference} [", f"{generic} [") for line in promised(python(page))]

    assert printed(python(page)) == expected


def test_the_readme_runs_a_prefill_and_a_decode_in_fifteen_lines() -> None:
    lines = [line for line in "".join(EXAMPLES).splitlines() if line.strip()]

    assert len(lines) <= 15
    assert len(promised(EXAMPLES)) == 2
    assert "SingleLayer(" in EXAMPLES[0]


def test_the_guide_binds_a_layer_of_an_engine() -> None:
    text = "".join(python(GUIDE))

    for name in ("DeepseekV4MLAAttention(", "set_forward_context("):
        assert name in text


def test_the_guide_shows_each_thing_an_engine_does() -> None:
    text = "".join(python(GUIDE))

    assert len(promised(python(GUIDE))) >= 9
    for name in (
        *('"swa", "c4a", "c128a"', "plan_workspace(", ".lock()", "Batch(", "pad_to=4", "num_speculative_tokens=2"),
        *(
            "select_backend(",
            "device=device",
            "set_forward_context(None)",
            "backend.warmup(bounds",
            "CUDAGraph()",
            "full_width=True",
            "PhasedBackend(",
        ),
    ):
        assert name in text


def test_every_error_the_guide_names_exists() -> None:
    named = set(re.findall(r"\b\w+Error\b", GUIDE))
    assert {"ArgumentError", "WorkspaceError", "NoForwardContextError", "NoBackendError"} <= named
    assert named <= set(errors.__all__)


def test_an_example_that_prints_something_else_is_found() -> None:
    assert promised(["print(1)  # -> 2\n"]) != printed(["print(1)  # -> 2\n"])
    with pytest.raises(NameError):
        printed(["print(nothing)\n"])


def test_the_trace_it_shows_is_served_by_the_command_it_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shown = re.findall(r"```\ncat > (\S+) << END\n(.*?)END\ndsv4attn (.*?)\n```", COMMANDS, re.DOTALL)
    [(name, trace, command)] = shown
    (tmp_path / name).write_text(trace, encoding="utf-8")
    # a small model with layers of every type: the real one is served in `test_run` and in `test_recipe`
    (tmp_path / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    done = CliRunner().invoke(main, [*shlex.split(command), "--model", "."], env={"OMP_NUM_THREADS": "1"})

    assert done.exit_code == 0, done.output
    assert "2 of 2 requests finished" in done.stdout


def test_the_report_it_shows_has_the_names_of_the_rows_that_are_printed(tmp_path: Path) -> None:
    def names(text: str) -> list[str]:
        table = re.split(r"\nok: |\n```", text[text.index("one layer of each type") :])[0]
        first = (re.split(r"  +(?=[\d-]|swa|ok)", line.strip())[0] for line in table.splitlines())
        return [re.sub(r"[\d.,]+(e-\d+)?%?", "0", name) for name in first if name.strip("─")]

    (tmp_path / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    done = CliRunner().invoke(main, ["run", "--model", str(tmp_path)], env={"OMP_NUM_THREADS": "1"})
    printed, shown = names(done.stdout), names(COMMANDS)

    assert done.exit_code == 0, done.output
    assert len(shown) > 20
    assert shown == printed
    assert set(names(README)) <= {*printed, "0"}


def test_the_requests_of_the_built_in_trace_are_those_it_names() -> None:
    trace = short_trace(0)
    longest = max(request.input_length + request.output_length for request in trace)

    assert f"trace generated ({len(trace)} requests, longest {longest:,} tokens)\n" in COMMANDS


@pytest.mark.matrix
def test_short_requests_print_the_line_that_the_page_of_commands_shows() -> None:
    [shown] = re.findall(r"(?m)^selection was not exercised: .*$", COMMANDS)
    short = ["run", "--trace", "long", "--layers", "c4a", "--max-requests", "1", "--max-tokens", "4"]
    done = CliRunner().invoke(main, short, env={"OMP_NUM_THREADS": "1"})

    assert done.exit_code == 0, done.output
    assert shown in " ".join(done.stdout.split())


def test_the_table_of_commands_lists_exactly_the_commands_there_are() -> None:
    listed = set(re.findall(r"^\| `dsv4attn (\w+)[^`]*` \|", COMMANDS, re.MULTILINE))
    shown = CliRunner().invoke(main, ["--help"]).output.partition("Commands:")[2]
    assert listed == set(re.findall(r"^  (\w+)", shown, re.MULTILINE))


@pytest.mark.parametrize("page", OURS, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_make_target_a_page_names_exists(page: Path) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"(?:`|^)make ([\w-]+)", page.read_text(encoding="utf-8"), re.MULTILINE))
    assert targets <= set(re.findall(r"^([\w-]+):", makefile, re.MULTILINE))


def test_the_readme_has_the_two_commands_for_a_clone() -> None:
    assert {"run", "test"} <= set(re.findall(r"(?:`|^)make ([\w-]+)", README, re.MULTILINE))


@pytest.mark.matrix
def test_the_picture_of_imports_is_drawn_from_the_code() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")

    assert "](pictures/imports.svg)" in text
    committed = import_graph.PICTURE.read_text(encoding="utf-8")
    assert committed == import_graph.picture(), "run `python -m tests.import_graph --draw`"
    assert {part for arrow in import_graph.arrows() for part in arrow[:2]} == {*import_graph.PLACES}


def test_every_path_of_the_layout_exists() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    layout = re.findall(r"^(dsv4attn/\S+|tests/)\s{2,}", text, re.MULTILINE)
    assert len(layout) > 3
    for path in layout:
        assert (ROOT / path).exists(), path


def test_every_file_of_the_road_and_of_what_to_change_exists() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = [
        name for line in text.splitlines() if line.startswith("| `") for name in re.findall(r"`([\w/<>]+\.py)`", line)
    ]
    named += re.findall(r"`((?:core|backends|selection|testing|tools)/[\w/.]*)`", text)

    assert len(named) > 25
    assert [name for name in named if "<" not in name and not [*(ROOT / "dsv4attn").rglob(name.rstrip("/"))]] == []


def links(text: str) -> list[str]:
    """Targets of the links and pictures of a page, without those in code."""
    prose = re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)
    return re.findall(r"\]\(([^)\s]+)\)", prose)


def anchors(page: Path) -> set[str]:
    """What links to headings of a page may name."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def dead(page: Path) -> list[str]:
    """Relative links of a page that lead nowhere: no such file, or no such heading in it."""
    dead_links = []
    for link in links(page.read_text(encoding="utf-8")):
        if re.match(r"\w+:", link):
            continue
        path, _, heading = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (heading and heading not in anchors(target)):
            dead_links.append(link)
    return dead_links


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_relative_link_is_dead(page: Path) -> None:
    assert dead(page) == []


def test_a_dead_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A title\n[a](page.md#a-title) [b](gone.md#a-title) [c](#no-title) ![d](x.png) [e](https:e)\n`[f](g)`"
    )

    assert dead(page) == ["gone.md#a-title", "#no-title", "x.png"]


def test_the_readme_has_every_page_of_the_docs() -> None:
    assert {f"docs/{path.name}" for path in ROOT.glob("docs/*.md")} <= set(links(README))


def test_the_changelog_has_each_heading_once_between_blank_lines() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")

    for version in text.split("\n## ")[1:]:
        titles = re.findall(r"^### (.+)$", version, re.MULTILINE)
        assert len(titles) == len(set(titles))
    assert not re.search(r"[^\n]\n#|^#[^\n]*\n[^\n]", text, re.MULTILINE)

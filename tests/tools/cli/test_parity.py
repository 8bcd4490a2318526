"""`dsv4attn parity`: the matrix, for people, for programs, and as a page to send."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import pytest

from dsv4attn.testing.case import chosen
from dsv4attn.testing.cases.table import CASES
from tests.tools.cli.machine import Machine
from tests.tools.cli.test_conform import heads, stops, wrong

FEW = "sink-none-*,quantise-ocp-64,codes-ocp-prefill,heads-3-decode"


def test_the_matrix_on_80_columns(machine: Machine) -> None:
    heads(machine)
    code, lines = machine.run("parity", "--backends", "reference:prefill_keys=paged,acme", "--filter", FEW)

    assert code == 0
    assert max(map(len, lines)) <= 80
    assert lines[1].split() == ["A", "reference:prefill_keys=paged"]
    assert lines[2].split() == ["B", "acme"]
    text = [" ".join(line.split()) for line in lines]
    assert "F5 heads-3-decode 0.04 refused" in text
    assert "C1 I4 quantise-ocp-64 same same" in text
    assert "B refused 1 x HEADS: 3, needs a multiple of 8 -> pad q" in text
    assert "B skipped 1 x does not apply: this backend reads gathered rows in prefill" in text


def test_the_json_object(machine: Machine) -> None:
    wrong(machine)
    code, values = machine.json("parity", "--backends", "reference,bad", "--filter", FEW)

    assert code == 1
    assert [(b["name"], b["ok"]) for b in values["backends"]] == [("reference", True), ("bad", False)]
    cases = {case["name"]: case["results"] for case in values["cases"]}
    assert cases["sink-none-decode"]["reference"]["state"] == "passed"
    assert 0 < cases["sink-none-decode"]["reference"]["fraction"] < 1
    assert cases["sink-none-decode"]["bad"]["state"] == "failed"
    assert cases["sink-none-decode"]["bad"]["fraction"] is None or cases["sink-none-decode"]["bad"]["fraction"] > 1
    assert {"contract", "versions", "environment", "date", "filter"} <= set(values)


def test_without_arguments_it_compares_the_forms_of_the_reference(machine: Machine) -> None:
    code, values = machine.json("parity", "--filter", "sink-none-*")

    assert code == 0
    assert [b["name"] for b in values["backends"]] == [
        "reference",
        "reference:prefill_keys=paged",
        "reference:decode_indices=ragged:prefill_indices=ragged",
    ]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--backends", "reference,referen"], "did you mean 'reference'?"),
        (["--backends", "reference,reference"], "expected each backend once, got reference twice"),
        (["--backends", " , "], "expected names separated by commas"),
        (["--backends", "reference:fast"], "expected NAME[:option=value]"),
        (["--filter", "sinc"], "'sinc', which none has"),
        (["--html", "nowhere/x.html"], "expected a file in a folder that exists"),
    ],
)
def test_bad_input_ends_with_2(machine: Machine, args: list[str], said: str) -> None:
    code, lines = machine.run("parity", *args)

    assert code == 2
    assert said in " ".join(" ".join(lines).split())


def test_g22_ctrl_c_keeps_what_ran_in_the_matrix_and_in_the_page(machine: Machine) -> None:
    stops(machine)
    args = ("parity", "--backends", "reference,stop", "--filter", "call-*-decode", "--html", "p.html")
    code, values = machine.json(*args)

    assert code == 130
    assert (values["ok"], values["complete"]) == (False, False)
    assert [[*case["results"]] for case in values["cases"]] == [["reference", "stop"]] * 4 + [["reference"]]
    assert [backend["complete"] for backend in values["backends"]] == [False, False]
    assert all("passed" not in backend["verdict"] for backend in values["backends"])
    text = Path("p.html").read_text(encoding="utf-8")
    asked = len(chosen(CASES, "call-*-decode"))
    assert f"interrupted: 5 of {asked} cases" in text
    assert f"INTERRUPTED: 4 of {asked} cases ran" in text
    assert "B not run" in text
    assert "keeps the contract" not in text
    code, lines = machine.run(*args)
    assert code == 130
    assert any(line.endswith("not run") for line in lines)


class Page(HTMLParser):
    """Which tags are open at the end, what is fetched from elsewhere, and the text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.outside: list[str] = []
        self.tags: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.outside += [f"{tag} {name}" for name, _ in attrs if name in ("src", "href", "onclick")]
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_needs_no_other_file_and_tells_states_in_words(machine: Machine) -> None:
    heads(machine)
    wrong(machine)
    machine.install("odd", support="return [Reason('HEADS', '<b>&', 'x')]")
    code, lines = machine.run("parity", "--backends", "reference,acme,bad,odd", "--filter", FEW, "--html", "p.html")
    source = Path("p.html").read_text(encoding="utf-8")
    page = Page()
    page.feed(source)

    assert code == 1
    assert lines[-1] == "  report: p.html"
    assert source.startswith("<!doctype html>")
    assert page.open == []
    assert page.outside == []
    assert {"script", "img", "link", "b>&"} & {*page.tags} == set()
    assert "url(" not in source
    assert "http" not in source
    assert 'name="viewport"' in source
    assert "$" not in source
    for said in ("keeps the contract", "BREAKS the contract", "D refused", "A same", "C FAIL", "HEADS: <b>&, needs x"):
        assert said in page.text
    assert "torch" in page.text
    assert "no kernel [image]" in page.text
    assert str(Path.cwd()) not in source, "a page is sent to others"
    # failed cases stand first, equal ones together, and nowhere else
    heads_of = source[source.index("<h2>Cases</h2>") :].split("<h2>")[2:]
    assert 'first heads-3-decode</span></h2><p class="soft">raised RuntimeError: no kernel [image]' in heads_of[0]
    failed = [part.startswith("Failed") for part in heads_of]
    assert failed == sorted(failed, reverse=True)
    assert 'class="tag failed"' not in "".join(part for part in heads_of if not part.startswith("Failed"))
    assert source.count('<span class="name mono">heads-3-decode') == 1

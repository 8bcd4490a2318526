"""`dsv4attn show`: the keys of each token, as text, JSON and picture, against masks written down independently."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from attrs import evolve

from dsv4attn.core.model.geometry import LayerKind, ModelGeometry
from dsv4attn.errors import ArgumentError
from dsv4attn.tools.cli.show import seen_keys
from tests.tools.cli.machine import Machine

FLASH = ModelGeometry.preset("flash")
SMALL = evolve(FLASH, window=5, index_topk=2)


@pytest.mark.parametrize("kind", LayerKind)
@pytest.mark.parametrize(("length", "rows"), [(1, 1), (31, 31), (70, 9), (70, 1)])
def test_keys_are_those_of_the_definition(kind: LayerKind, length: int, rows: int) -> None:
    ratio = {"swa": 1, "c4a": 4, "c128a": 16}[kind.value]
    seen = seen_keys(SMALL.with_own_layers([(kind, ratio)]), kind, length, rows=rows)

    positions = range(length - rows, length)
    assert seen.windows == [(max(p - 4, 0), p) for p in positions]
    assert seen.visible == [(p + 1) // ratio if kind is not LayerKind.SWA else 0 for p in positions]
    for visible, entries in zip(seen.visible, seen.entries, strict=True):
        assert entries == sorted(set(entries))
        assert set(entries) <= set(range(visible))
        assert len(entries) == (min(visible, 2) if kind is LayerKind.CSA else visible)


def test_a_given_selection_is_shown_without_entries_that_a_token_does_not_see() -> None:
    given = torch.tensor([[1, 0], [-1, 2], [2, 5], [1, -1]])

    assert seen_keys(SMALL, "c4a", 12, topk_indices=given, rows=4).entries == [[0, 1], [], [], [1]]
    for wrong in (given[:3], given.flatten(), torch.zeros(4, 3, dtype=torch.int64)):
        with pytest.raises(ArgumentError, match=r"topk_indices: expected \[4, K\] with at most 2 columns"):
            seen_keys(SMALL, "c4a", 12, topk_indices=wrong, rows=4)
    with pytest.raises(ArgumentError, match="rows: expected at most the 3 tokens"):
        seen_keys(SMALL, "c4a", 3, rows=4)


def test_text_json_and_picture_of_a_small_prompt(machine: Machine, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    options = ["show", "--length", "9", "--window", "3", "--topk", "1", "--entries", "1", "--layer", "c4a"]
    code, lines = machine.run(*options, "--plot", str(tmp_path / "keys.svg"))

    assert code == 0
    assert lines == [
        "c4a: window of 3 tokens, entries of 4 tokens, at most 1 selected",
        "token  keys of tokens  entries",
        *(f"    {p}  {row}" for p, row in enumerate(["#........  ..", "##.......  ..", "###......  .."])),
        *("    3  .###.....  o.", "    4  ..###....  o.", "    5  ...###...  o.", "    6  ....###..  o."),
        *("    7  .....###.  o#", "    8  ......###  o#"),
        "token 8 attends to tokens 6 to 8 and 1 of 2 entries: 4 keys",
    ]
    assert (tmp_path / "keys.svg").read_text(encoding="utf-8").startswith("<?xml")
    _, values = machine.json(*options)
    assert values["layers"][0]["tokens"][7] == {
        "position": 7,
        "window": [5, 7],
        "visible_entries": 2,
        "entries": [1],
    }


def test_of_a_long_prompt_the_last_token_is_described(machine: Machine) -> None:
    _, lines = machine.run("show", "--length", "1M", "--layer", "c128a", width=200)
    _, v41 = machine.json("show", "--model", "v4.1-flash", "--length", "8k")

    _, wide = machine.run("show", "--length", "9", "--window", str(2**31 - 1), "--layer", "swa")

    assert lines[1].endswith("and 8,192 of 8,192 entries: 8,320 keys")
    assert wide[-1] == "token 8 attends to tokens 0 to 8: 9 keys"
    assert [layer["compress_ratio"] for layer in v41["layers"]] == [1, 2, 1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--entries", "9" * 5000], "expected different entry numbers with commas"),
        (["--length", "9" * 5000 + "k"], "is not a valid number of tokens"),
        (["--length", "2M"], "--length: expected at most 1048576, the longest context of deepseek-v4-flash"),
        (["--length", "4k", "--plot", "x.png"], "--length: expected at most 2,048 with --plot, got 4096"),
        (["--compress-ratio", "4"], "--compress-ratio: expected a kind of layers with entries, got None"),
        (["--layer", "c128a", "--compress-ratio", "1"], "compress_ratio: expected 1 for window-only layers"),
        (["--entries", "1,x"], "expected different entry numbers with commas, as in 0,3,7"),
        (["--entries", "1,1"], "expected different entry numbers with commas, as in 0,3,7"),
        (["--entries", "0,1,2", "--topk", "2"], "--entries: expected at most 2 entries, which a token selects, got 3"),
        (["--entries", "10", "--length", "40"], "--entries: expected numbers below 10, the entries of 40 tokens"),
        (["--entries", "1", "--layer", "swa"], "--entries: expected a c4a layer, got swa"),
        (["--topk", "1", "--layer", "c128a"], "--topk: expected a c4a layer, got c128a"),
        (["--model", "v4.1-flash", "--layer", "c128a"], "unknown layer kind of deepseek-v4.1-flash 'c128a'"),
    ],
)
def test_bad_input_is_refused(machine: Machine, options: list[str], message: str) -> None:
    pytest.importorskip("matplotlib")
    code, values = machine.json("show", *options)

    assert code == 2
    assert message in values["error"]["message"]

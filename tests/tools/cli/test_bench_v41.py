"""`dsv4attn bench` on layers of V4.1 prints, and writes, the pair of records and the speed by that on 584 bytes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.tools.bench.sample_runs import ROOF
from tests.tools.cli.machine import machine


def test_v41_layers_are_shown_with_their_speed_by_that_on_584_byte_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsv4attn.tools.bench.runner.Roofline.measure", lambda _: ROOF)
    asked = "decode", "--cases", "v41_r1", "--batches", "1", "--rounds", "2", "--json", "run.json"
    with machine(tmp_path, monkeypatch) as here:
        code, lines = here.run("bench", *asked, width=160)
        shown = here.run("bench", "--from", "run.json", width=160)
    told = json.loads(Path("run.json").read_text(encoding="utf-8"))

    assert code == 0
    assert shown == (0, lines)
    (heading,) = [line for line in lines if "time us" in line]
    assert heading.endswith("x 584/584")
    found = [(r["case"], r["records"]) for r in told["rows"]]
    assert found == [(f"decode v41_r1 b=1 {pair}", pair) for pair in ("584/584", "528/528", "528/288")]
    first, *others = told["rows"]
    assert first["vs_584"] is None
    for r in others:
        assert r["vs_584"] == pytest.approx(first["median"] / r["median"])
        ratio = f"{r['vs_584']:.2f}"
        assert any(r["case"].removeprefix("decode ") in line and line.endswith(f" {ratio}") for line in lines)
        said = f"decode: on {r['records']} reference runs at {ratio} of its own speed on 584/584"
        assert f"{said} (geometric mean of 1 cases)" in lines
    means = [(m["kernel"], m["by"], m["records"], m["speed"]) for m in told["beside_584"]]
    assert means == [("decode", "reference", r["records"], pytest.approx(r["vs_584"])) for r in others]

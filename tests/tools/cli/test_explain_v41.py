"""`dsv4attn explain` about layers of DeepSeek-V4.1: every ratio, every pair of records, and who runs which part."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tools.cli.machine import Machine, machine, plugin

V41 = ("explain", "--model", "v4.1-flash")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    with machine(tmp_path, monkeypatch) as made:
        yield made


@pytest.mark.parametrize("device", ["h200", "a100", "mi300x", "b580", "rtx5090"])
@pytest.mark.parametrize("records", ["584/584", "528/528", "528/288"])
@pytest.mark.parametrize("ratio", [0, 1, 2])
def test_v41_layers_are_asked_about_by_ratio_and_records(here: Machine, device: str, records: str, ratio: int) -> None:
    code, told = here.json(*V41, "--device", device, "--ratio", str(ratio), "--records", records)
    entries = "+v41_fp4 e2m1" if ratio and records == "528/288" else ""
    window = "e4m3fn" if records == "584/584" else "v41_fp8 e4m3fn"

    assert code == 0
    assert f"decode  {'c4a' if ratio else 'swa'}  " in told["problem"]
    assert f"compress_ratio={ratio or 1}  " in told["problem"]
    assert f"kv={window}{entries}  q=bfloat16  no q norm" in told["problem"]
    assert [c["name"] for c in told["candidates"] if c["state"] == "chosen"] == [told["chosen"]]
    parts = ["compressor", "indexer", "selection", "candidates"] if ratio else []
    assert told["layer_steps"] == dict.fromkeys([*parts, "hyper_connections"], told["chosen"])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "--ratio: expected one of [1, 2], the ratios of the c4a layers of deepseek-v4.1-flash, got none"),
        (["--ratio", "4"], "--ratio: expected one of [0, 1, 2], the ratios of deepseek-v4.1-flash, got 4"),
        (["--ratio", "1", "--layer", "swa"], "--ratio 1 is not of swa layers of deepseek-v4.1-flash"),
        (["--ratio", "1", "--records", "528/288", "--dtype", "bfloat16"], "--records 528/288 are of e4m3fn"),
        (["--ratio", "1", "--records", "288/288"], "'288/288' is not one of"),
    ],
)
def test_v41_layers_that_do_not_exist_are_refused(here: Machine, options: list[str], said: str) -> None:
    code, told = here.json(*V41, *options)

    assert code == 2
    assert said in told["error"]["message"]


def test_records_that_a_backend_does_not_read_are_its_reason(here: Machine) -> None:
    refuses = "problem.compressed.layout != 'fp8_ds_mla'"
    reason = "Reason('LAYOUT', problem.compressed.layout, 'fp8_ds_mla')"
    here.shelf.install("dsv4attn-acme", plugin(native=("sm_999",), support=f"return [{reason}] if {refuses} else []"))
    asked = ("explain", "--device", "sm_999", "--backend", "acme")

    assert here.json(*asked)[0] == 0
    code, told = here.json(*asked, "--records", "528/288")
    [acme] = [c for c in told["candidates"] if c["name"] == "acme"]
    # and core says that records are younger than the backend's contract
    actual = [reason["actual"].split(",")[0] for reason in acme["reasons"]]
    assert (code, actual) == (1, ["records v41_fp8", "records v41_fp4", "v41_fp4"])


def test_a_backend_of_an_older_contract_is_refused_for_v41_layers_with_the_cure(here: Machine) -> None:
    here.shelf.install("dsv4attn-acme", plugin(native=("sm_999",)))
    code, told = here.json(*V41, "--ratio", "1", "--device", "sm_999", "--backend", "acme")

    assert code == 1
    [acme] = [c for c in told["candidates"] if c["name"] == "acme"]
    assert [reason["code"] for reason in acme["reasons"]] == ["Q_NORM"]


def test_a_ratio_alone_names_the_kind(here: Machine) -> None:
    assert "decode  c128a  " in here.json("explain", "--ratio", "128")[1]["problem"]
    assert "decode  c4a  " in here.json("explain")[1]["problem"]

"""`dsv4attn bench-context`: what is refused before a group is made, and runs of two ranks under torchrun."""

from __future__ import annotations

import json
import sys
from math import ceil
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from dsv4attn.tools.cli import bench_device, main
from tests.ranks import torchrun

LAUNCHED = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
SMALL = ("bench-context", "--device", "cpu", "--requests", "2", "--context", "2100", "--rounds", "2")

WRONG_RANK = """
import os, pathlib
from dsv4attn.tools.bench import context
from dsv4attn.tools.cli import main

made = context.over_ranks

def spoilt(*given):
    many = made(*given)
    if os.environ["RANK"] == "1" and many.keys is not None:
        many.keys.region("nope").zero_()
    return many

context.over_ranks = spoilt
try:
    main()
except SystemExit as end:
    pathlib.Path(os.environ["RANK"]).write_text(str(end.code))
"""
"""Rank 1 proposes other entries than it should. Each rank writes its exit code: torchrun ends all after the first."""


def refused(*args: str, **env: str | None) -> str:
    result = CliRunner().invoke(main, ["bench-context", *args], env={**LAUNCHED, **env})
    assert result.exit_code == 2, result.output
    assert not result.stdout
    return str(result.stderr)


@pytest.mark.parametrize("absent", LAUNCHED)
def test_without_torchrun_the_error_has_the_command(absent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["dsv4attn", "bench-context", "--requests", "4"])
    said = refused(**{absent: None})

    assert "bench-context: expected processes that torchrun has started, got one process, without torchrun" in said
    assert "type: torchrun --standalone --nproc-per-node 2 -m dsv4attn bench-context --requests 4" in said


def test_bad_sizes_are_refused_with_the_option() -> None:
    assert "'--requests': 0 is not in the range" in refused("--requests", "0")
    assert "'--context': '8x': expected numbers" in refused("--context", "8x")
    assert "--context: expected at least 2,052 tokens on flash_c4, for more than 512 entries" in refused(
        "--device", "cpu", "--context", "8192,2051"
    )
    assert "--context: expected at least 256 tokens on flash_c128, for entries on each of 2 ranks, got 255" in refused(
        "--device", "cpu", "--context", "255", "--cases", "flash_c128"
    )
    assert "--context: expected at most 1,048,576 tokens" in refused("--device", "cpu", "--context", "1048577")
    assert "--interleave: expected a divisor of 2, the records in a page of flash_c128, got 4" in refused(
        "--device", "cpu", "--interleave", "4"
    )
    assert "unknown case 'flash_swa'" in refused("--device", "cpu", "--cases", "flash_swa")


def test_devices_and_graphs_that_ranks_cannot_have_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "--device: expected a kind of device: rank r of a host has its device number r, got cuda:1" in refused(
        "--device", "cuda:1"
    )
    assert "--graph: expected a device that captures graphs, with NCCL, got cpu" in refused(
        "--device", "cpu", "--graph"
    )
    monkeypatch.setattr(bench_device, "device_named", lambda _: torch.device("xpu", 0))
    assert "--device: expected cpu or cuda, got xpu" in refused("--device", "xpu")
    monkeypatch.setattr(bench_device, "device_named", lambda _: torch.device("cuda", 0))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    said = refused("--device", "cuda", LOCAL_WORLD_SIZE="2")
    assert "--device: expected 2 devices on this host, one for each of its ranks, got 1 -> type: --nproc-per-n" in said


def test_each_rank_has_the_device_of_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[Any] = []
    monkeypatch.setattr(bench_device, "device_named", lambda _: torch.device("cuda", 0))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    for rank in "01":
        monkeypatch.setenv("LOCAL_RANK", rank)
        assert bench_device.device_of_rank("cuda") == (torch.device("cuda", int(rank)), "nccl")
    assert current == [torch.device("cuda", 0), torch.device("cuda", 1)]


@pytest.mark.matrix
def test_two_ranks_print_and_save_once_and_agree_with_one(tmp_path: Path) -> None:
    done = torchrun(tmp_path, "-m", "dsv4attn", *SMALL, "--save", "run.json")

    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines.count("2 ranks, interleave 1, gloo; reference, eager calls, medians of 2 rounds") == 1
    assert sum("scores, selection" in line for line in lines) == 1
    assert sum("attention, merge" in line for line in lines) == 2
    checked = " ".join(done.stdout.split())
    assert "of the norm from one rank's output; the same 1,024 entries are selected" in checked

    saved = json.loads((tmp_path / "run.json").read_text())
    assert saved["ok"]
    assert saved["schema"] == "dsv4attn-bench-context/1"
    assert (saved["ranks"], saved["process_group"], saved["backend"], saved["graph"]) == (2, "gloo", "reference", False)
    assert saved["command"] == "dsv4attn bench-context --requests 2 --context 2100 --rounds 2 --device cpu"
    c4a, c128a = saved["results"]
    assert [time["part"] for time in c4a["times"]] == ["scores, selection", "attention, merge", "both"]
    assert [time["part"] for time in c128a["times"]] == ["attention, merge"]
    for result in (c4a, c128a):
        assert 0 < result["error"] < 5e-3
        assert result["sent"] == result["formula"]
        for time in result["times"]:
            assert time["speed"] == time["one"]["median"] / time["ranks"]["median"] > 0
    assert c4a["formula"] == {"attention": 65792, "candidates": 4096}
    assert c128a["formula"] == {"attention": 65792}
    # 525 entries: 9 pages of 64 on one rank, and 5 where 263 are
    assert (c4a["share"], c4a["one_bytes"]["entries"], c4a["selected"]) == (5 / 9, 2 * 9 * 37440, 1024)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [3, 4, 8])
def test_any_number_of_ranks_agrees_with_one(tmp_path: Path, ranks: int) -> None:
    option = "--option", f"deterministic={'true' if ranks == 4 else 'false'}"
    done = torchrun(tmp_path, "-m", "dsv4attn", *SMALL, "--save", "run.json", *option, ranks=ranks)

    assert done.returncode == 0, done.stderr
    saved = json.loads((tmp_path / "run.json").read_text())
    assert (saved["ranks"], saved["ok"]) == (ranks, True)
    for result in saved["results"]:
        assert 0 < result["error"] < 5e-3
        assert result["sent"] == result["formula"]
    # 525 entries are 9 pages of 64 on one rank
    assert saved["results"][0]["share"] == ceil(ceil(525 / ranks) / 64) / 9


def test_options_reach_the_backend() -> None:
    said = refused("--device", "cpu", "--backend", "reference", "--option", "exact=1")
    assert "option 'exact' of backend reference" in said


@pytest.mark.mutation
def test_a_disagreement_on_one_rank_fails_on_all(tmp_path: Path) -> None:
    (tmp_path / "wrong_rank.py").write_text(WRONG_RANK, encoding="utf-8")
    done = torchrun(tmp_path, "wrong_rank.py", *SMALL)

    assert [(tmp_path / rank).read_text() for rank in "01"] == ["1", "1"], done.stderr
    said = " ".join(done.stdout.split())
    assert "wrong: flash_c4 b=2 n=2100: rank 1 of 2: topk_indices of 2 of 2 tokens are not those" in said
    assert "scores, selection" not in said, "what is wrong has no time"
    assert "attention, merge" in said, "the other case is right"

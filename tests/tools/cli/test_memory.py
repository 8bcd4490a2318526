"""`dsv4attn memory`: what fits, as text, JSON and picture, and the table of the page of older GPUs."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from dsv4attn.core.contract.devices import DEVICES, MEMORY_GIB, device_named, memory_gib
from dsv4attn.selection import load_backend
from tests.core.model.test_configurations import OTHER_FIELDS, RELEASED
from tests.tools.cli.machine import Machine

GIB = 2**30
DOCS = Path(__file__).parents[3] / "docs"
PAGE, FAQ = ((DOCS / name).read_text(encoding="utf-8") for name in ("older-gpus.md", "faq.md"))


@pytest.fixture(scope="module", autouse=True)
def _kernels() -> None:
    """Load the kernels before `machine` takes the variable away that lets Triton's interpreter run them."""
    load_backend("triton")


def test_every_size_is_of_a_known_product() -> None:
    names = {name for device in DEVICES for name in device.names}

    assert set(MEMORY_GIB) <= names
    assert [memory_gib(name) for name in ("NVIDIA RTX 4090", "H200", "mi300", "sm_90")] == [24, 141, None, None]
    assert device_named("NVIDIA RTX 4090").arch == "sm_89"


def test_the_page_of_older_gpus_shows_what_the_command_prints(machine: Machine) -> None:
    shown = re.findall(r"```\n(dsv4attn memory .+?)\n\n(.+?)```", PAGE, re.DOTALL)

    assert len(shown) == 2
    for command, expected in shown:
        _, lines = machine.run(*shlex.split(command.replace("\\\n", " "))[1:], width=100)
        assert "\n".join(lines).rstrip() == expected.rstrip()


def test_the_answers_to_questions_show_the_first_lines_that_the_command_prints(machine: Machine) -> None:
    shown = re.findall(r"\$ dsv4attn (memory .+)\n(.+)", FAQ)

    assert len(shown) == 4
    assert shown == [(command, machine.run(*shlex.split(command), width=100)[1][0]) for command, _ in shown]


def test_the_page_has_the_weights_and_the_bytes_of_a_token(machine: Machine) -> None:
    weights = {}
    for ranks in (1, 4, 8):
        _, values = machine.json("memory", "--gib", "400", "--tensor-parallel", str(ranks), "--drafts", "1")
        weights[ranks] = sum(size for name, size in values["weights"].items() if name != "draft layers")
        if ranks == 1:
            growing = (values["request"]["entries"] + values["request"]["index keys"]) / values["limits"][
                "max_model_len"
            ]
            drafts = values["weights"]["draft layers"]

    divided = (weights[4] - weights[8]) * 8
    assert f"weights of {weights[1] / 1e9:.1f} GB. Of these, {divided / 1e9:.1f} GB are divided" in PAGE
    assert f"of four has {weights[4] / GIB:.1f} GiB, and a rank of eight has {weights[8] / GIB:.1f} GiB" in PAGE
    assert f"draft layer adds {drafts / 1e9:.1f} GB over all ranks" in PAGE
    assert f"| **grows with the context** | | | | **{growing:,.0f}** |" in PAGE


def test_flash_fits_eight_cards_of_24_gib_and_not_one(machine: Machine, tmp_path: Path) -> None:
    options = ["--device", "rtx4090", "--max-model-len", "4k", "--max-num-batched-tokens", "2k", "--other-gib", "1"]
    saved, picture = tmp_path / "memory.json", tmp_path / "memory.svg"
    code, values = machine.json("memory", *options, "--save", str(saved), "--plot", str(picture))

    assert (code, values["left"] < 0, values["least_tensor_parallel"]) == (1, True, 8)
    assert values["verdict"].endswith("-> it fits with --tensor-parallel 8")
    assert json.loads(saved.read_text(encoding="utf-8")) == values
    assert picture.read_text(encoding="utf-8").startswith("<?xml")
    assert max(map(len, machine.run("memory", *options)[1])) <= 80
    code, values = machine.json("memory", *options, "--tensor-parallel", "8")
    used = [values[name] for name in ("workspace", "temporaries", "other", "left")]
    parts = [*values["weights"].values(), *values["caches"].values()]
    assert (code, values["backend"], sum([*used, *parts])) == (0, "triton", values["budget"])
    assert values["budget"] == int(0.9 * 24 * GIB)
    assert values["longest_context"] > 4096


def test_a_config_json_and_ranks_of_every_kind(machine: Machine, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**RELEASED, **OTHER_FIELDS, "max_position_embeddings": 65_536}), encoding="utf-8")
    ranks = ["--tensor-parallel", "4", "--pipeline-parallel", "2", "--context-parallel", "2", "--drafts", "1"]
    code, values = machine.json("memory", "--model", str(path), "--gib", "80", *ranks, "--shared-tokens", "1k")

    assert (code, values["ranks"]) == (0, {"tensor": 4, "pipeline": 2, "context": 2, "all": 8})
    assert (values["limits"]["max_model_len"], values["longest_context"]) == (65_536, 65_536)
    assert (values["layers"], "draft layers" in values["weights"]) == ([21, 43], True)
    _, lines = machine.run("memory", "--model", "v4.1-flash", "--device", "rtx4090", "--dtype", "v41_fp4")
    _, vllm = machine.json("memory", "--gib", "400", "--engine", "vllm", "--max-model-len", "4k")
    assert (vllm["engine"], vllm["caches"]["entries"] + vllm["caches"]["index keys"]) == ("vllm", 8 * 16 * 1_002_240)
    assert lines[-1] == "not counted: weights of engram and vision"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "the size of the memory is missing -> add --device h200"),
        (["--device", "mi300"], "expected a product of one size, got mi300, AMD MI300 -> add --gib N"),
        (["--device", "v100"], "unknown device 'v100'"),
        (["--gib", "much"], "expected a number, as in 23.5"),
        (["--gib", "0"], "--gib: expected a size above 0, got 0"),
        (
            ["--gib", "80", "--utilization", "1.5"],
            "--utilization: expected a part of the memory, above 0 and at most 1",
        ),
        (["--gib", "80", "--max-model-len", "2M"], "--max-model-len: expected at most 1048576"),
        (["--gib", "80", "--engine", "vllm", "--dtype", "bfloat16"], "--dtype: expected e4m3fn with --engine vllm"),
        (["--gib", "80", "--tensor-parallel", "3"], "tensor parallel size: expected a common divisor of 64 heads"),
    ],
)
def test_bad_input_is_refused(machine: Machine, options: list[str], message: str) -> None:
    code, values = machine.json("memory", *options)

    assert code == 2
    assert message in values["error"]["message"]

"""`dsv4attn bench`: what it prints, saves, compares and draws, and how it says no."""

from __future__ import annotations

import json
import re
import sys
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from click.testing import CliRunner
from rich.console import Console

from dsv4attn.backends.reference.launch import ReferenceBackend
from dsv4attn.core.contract.backend import AttentionCall
from dsv4attn.core.model.geometry import LayerKind
from dsv4attn.tools.bench import whole_layer
from dsv4attn.tools.bench.cases import LAYER_OPS
from dsv4attn.tools.bench.layer_op_peers import DeepGEMM
from dsv4attn.tools.bench.layer_ops import layer_op_cases
from dsv4attn.tools.bench.overhead import overhead
from dsv4attn.tools.bench.peers import PEERS
from dsv4attn.tools.bench.report import comparison_text, run_text
from dsv4attn.tools.bench.result import load
from dsv4attn.tools.bench.runner import FAILED, REFUSED, WRONG
from dsv4attn.tools.bench.scaling import Cliff
from dsv4attn.tools.bench.whole_layer import LayerCase
from dsv4attn.tools.cli import main
from tests.tools.bench.sample_runs import HERE, ROOF, row, run
from tests.tools.cli.machine import Machine

ROOT = Path(__file__).resolve().parents[3]
QUICK = ("decode", "--cases", "flash_swa", "--batches", "2", "--rounds", "2")


@pytest.fixture(autouse=True)
def _known_roofline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsv4attn.tools.bench.runner.Roofline.measure", lambda _: ROOF)


def save(path: Path, *rows: Any, **facts: Any) -> str:
    path.write_text(json.dumps(run(rows, **facts).as_json()), encoding="utf-8")
    return str(path)


def test_every_time_has_its_error_in_the_same_line(machine: Machine) -> None:
    code, lines = machine.run("bench", *QUICK)

    assert code == 0
    (values,) = [line.split() for line in lines if "flash_swa" in line]
    assert "decode, reference" in lines
    assert values[:2] == ["flash_swa", "b=2"]
    assert 0 < float(values[-1]) < 3e-3
    assert any(
        line.startswith("roofline of this run: 100 TFLOP/s (bfloat16 matrix product), 1,000 GB/s") for line in lines
    )


def test_threads_of_the_cpu_are_chosen_shown_and_saved(machine: Machine) -> None:
    code, lines = machine.run("bench", *QUICK, "--threads", "1", width=200)

    assert code == 0
    assert "1 thread of " in lines[0]
    assert any(line.startswith("1 thread of ") and line.endswith("(--threads)") for line in lines)
    _, values = machine.json("bench", *QUICK, OMP_NUM_THREADS="1")
    assert values["machine"]["threads_from"] == "OMP_NUM_THREADS"
    assert values["machine"]["threads"] <= values["machine"]["cores"]
    _, values = machine.json("bench", *QUICK, OMP_NUM_THREADS="")
    assert "cores of this process" in values["machine"]["threads_from"]


def test_all_kernels_are_measured_by_default(machine: Machine) -> None:
    code, values = machine.json("bench", "--cases", "flash_swa", "--batches", "1", "--tokens", "2", "--rounds", "1")

    assert code == 0
    assert [row["kernel"] for row in values["rows"]] == [
        "decode",
        "prefill",
        "prefill-rows",
        "insert",
        "quantize",
        "gather",
    ]
    assert {row["by"] for row in values["rows"]} == {"reference"}
    assert values["schema"] == "dsv4attn-bench/1"
    assert {"torch", "triton", "name", "dsv4attn"} <= {*values["machine"]}
    assert values["command"] == "dsv4attn bench --cases flash_swa --batches 1 --tokens 2 --rounds 1"
    assert values["date"]
    for one in values["rows"]:
        assert 0 < one["p10"] <= one["median"] <= one["p90"]
        assert one["error"] < 1e-2
        assert one["roofline"] > 0


def test_steps_scaling_and_the_host_are_asked_for_by_name(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsv4attn.tools.bench.overhead.seconds", lambda call, _: call() or 1.0)
    monkeypatch.setattr("dsv4attn.tools.bench.runner.overhead", partial(overhead, rounds=4))
    code, values = machine.json(
        "bench", "step", "scaling", "host", "--cases", "flash_swa", "--batches", "1", "--tokens", "2", "--rounds", "1"
    )

    assert code == 0
    assert {row["series"] for row in values["rows"]} == {"", "batch", "context-c128", "context-c4", "topk", "requests"}
    assert {row["by"] for row in values["rows"] if row["kernel"] == "step"} == {"reference", "products"}
    assert [share["layer"] for share in values["host"]] == ["swa", "c4a", "c128a"]


def test_steps_around_attention_are_asked_for_by_name(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    few = {case.kernel: case for case in layer_op_cases(LAYER_OPS, small=True)}
    monkeypatch.setattr("dsv4attn.tools.bench.layer_ops.layer_op_cases", lambda kernels, **_: [few[k] for k in kernels])
    for name in ("deep_gemm", "flashinfer", "vllm"):
        monkeypatch.setitem(sys.modules, name, None)
    code, values = machine.json("bench", *LAYER_OPS, "--rounds", "1", "--peers")

    assert code == 0
    fp8 = {row["kernel"]: row["fp8"] for row in values["rows"]}
    assert [*fp8] == [*LAYER_OPS]
    assert [name for name, is_fp8 in fp8.items() if is_fp8] == [*LAYER_OPS][:2]
    # torch is a peer of products alone, and is always there
    assert [row["kernel"] for row in values["rows"]].count("products") == 2
    assert values["roofline"]["fp8_flops_s"] is None
    of_layers = {name for name, peer in PEERS.items() if isinstance(peer, DeepGEMM)}
    assert set(values["unavailable"]) == of_layers, "peers that have one of these steps"


@pytest.mark.matrix
def test_whole_layers_are_timed_with_the_price_of_deterministic_ones(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = LayerCase(LayerKind.HCA, 1, 2, 256)
    monkeypatch.setattr("dsv4attn.tools.bench.whole_layer.layer_cases", lambda *_, small: [one] if small else [])
    # to draw them takes longer than all runs
    monkeypatch.setattr("dsv4attn.tools.bench.whole_layer._weights", cache(whole_layer._weights))

    code, values = machine.json("bench", "layer", "--rounds", "1")

    assert code == 0
    [time] = values["layers"]
    assert (time["by"], time["layer"]) == ("reference", "c128a")
    assert 0 < time["plain_s"] < 60
    assert 0 < time["deterministic_s"] < 60
    assert time["text"].startswith("layer c128a, 1 sequence, 2 new tokens, 256 in the cache: ")
    assert f" ms ({time['deterministic_s'] / time['plain_s']:.2f} times as long)" in time["text"]
    assert time["phase"] == "prompt"
    assert {"mHC pre", "projections", "compress + store", "attention"} < {part["name"] for part in time["parts"]}
    assert all(part["seconds"] > 0 and part["launches"] is None for part in time["parts"])
    shown = " ".join(" ".join(machine.run("bench", "layer", "--rounds", "1")[1]).split())
    assert "parts of layer c128a, reference part prompt us share " in shown
    assert " prompt: 1 sequence, 2 new tokens, 256 in the cache " in shown
    assert " (copy, read + written); 1 round " in shown
    assert " times as long)" in shown


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        ((1, 32, 256), "layer c4a, 1 sequence, 32 new tokens, 256 in the cache"),
        ((64, 1, 8192), "layer c4a, 64 sequences, 1 new token each, 8,128 to 8,191 in the cache"),
        ((64, 1, 8192, 8), "layer c4a, 8 heads, 64 sequences, 1 new token each, 8,128 to 8,191 in the cache"),
    ],
)
def test_names_of_whole_layer_cases_can_be_read(shape: tuple[int, ...], said: str) -> None:
    assert LayerCase(LayerKind.CSA, *shape).name == said


class FirstRowZero(ReferenceBackend):
    """A backend whose first row of a decode is wrong."""

    def decode(self, call: AttentionCall) -> None:
        super().decode(call)
        call.out[0] = torch.zeros(())


def test_what_is_wrong_gets_no_time_and_code_1(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsv4attn.tools.cli.bench._backends", lambda *_: {"reference": FirstRowZero()})
    code, lines = machine.run("bench", *QUICK, width=200)

    assert code == 1
    (values,) = [line.split() for line in lines if line.split()[:2] == ["flash_swa", "b=2"]]
    assert values[2] == "wrong"
    assert len(values) == 4, "a name, a verdict and an error"
    assert any(line.startswith("wrong: decode flash_swa b=2, reference: error") for line in lines)
    assert machine.json("bench", *QUICK)[0] == 1


def test_nothing_measured_is_a_failure(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> str:
        return "HEADS 64, needs 8"

    monkeypatch.setattr("dsv4attn.tools.bench.runner.Runner._why_not", refuse)
    code, lines = machine.run("bench", *QUICK)
    assert code == 1
    assert "refused: decode flash_swa b=2, reference: HEADS 64, needs 8" in lines


@pytest.mark.matrix
def test_a_saved_run_is_shown_compared_and_drawn_without_measuring(machine: Machine, tmp_path: Path) -> None:
    code, first = machine.run("bench", *QUICK, "--save", "run.json")
    assert code == 0
    code, again = machine.run("bench", "--from", "run.json", "--compare", "run.json", "--plot", "pictures")

    assert code == 0
    assert again[: len(first)] == first
    assert any(line.startswith("1.000 of the speed before") for line in again)
    assert [path.name for path in (tmp_path / "pictures").iterdir()] == ["decode.png"]


@pytest.mark.matrix
def test_several_saved_runs_are_shown_and_drawn_together(machine: Machine, tmp_path: Path) -> None:
    peer = {"flash_mla": 1.5}
    decode = save(tmp_path / "decode.json", row(us=50, vs=peer), row(by="flash_mla", us=75, is_peer=True))
    prefill = save(tmp_path / "prefill.json", row("prefill flash_c4 t=8", us=70, vs=peer))
    code, lines = machine.run("bench", "--from", decode, "--from", prefill, "--plot", "pictures", width=200)

    assert code == 0
    assert [line for line in lines if line in ("decode", "prefill, ours")] == ["decode", "prefill, ours"]
    assert sorted(path.name for path in (tmp_path / "pictures").iterdir()) == ["decode.png", "prefill.png", "speed.png"]


def test_one_failed_run_of_several_is_code_1(machine: Machine, tmp_path: Path) -> None:
    good = save(tmp_path / "good.json", row())
    bad = save(tmp_path / "bad.json", row("prefill flash_c4 t=8"), row("prefill flash_c4 t=8", by="b", state=WRONG))
    assert machine.run("bench", "--from", good)[0] == 0
    assert machine.run("bench", "--from", good, "--from", bad)[0] == 1


def test_runs_that_cannot_be_drawn_together_are_refused(machine: Machine, tmp_path: Path) -> None:
    first, second = save(tmp_path / "a.json", row()), save(tmp_path / "b.json", row())
    other = save(tmp_path / "c.json", row("prefill flash_c4 t=8"), machine=evolve(HERE, name="Other"))
    insert, gather = save(tmp_path / "d.json", row("insert a t=1")), save(tmp_path / "e.json", row("gather a 8x1"))
    refused = [
        (first, second, "got two for decode.png"),
        (insert, gather, "got two for memory.png"),
        (first, other, "expected files of one machine"),
    ]
    for first, file, said in refused:
        code, lines = machine.run("bench", "--from", first, "--from", file, "--plot", "pictures", width=400)
        assert code == 2
        assert said in " ".join(lines)
        assert machine.run("bench", "--from", first, "--from", file)[0] == 0


def test_a_run_without_kernels_is_said_to_have_no_picture(machine: Machine, tmp_path: Path) -> None:
    result = CliRunner().invoke(
        main, ["bench", "--from", str(ROOT / "docs" / "bench" / "layer.json"), "--plot", str(tmp_path / "a" / "b")]
    )
    assert result.exit_code == 0
    assert "nothing drawn: there are pictures of kernels only" in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.matrix
@pytest.mark.parametrize("page", ["README.md", pytest.param("docs/performance.md", marks=pytest.mark.slow)])
def test_the_command_of_a_page_draws_its_pictures(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.image import imread
    from PIL import Image

    text = (ROOT / page).read_text(encoding="utf-8")
    (command,) = re.findall(r"dsv4attn (bench (?:--from docs/bench/\S+ )+--plot docs/bench)", text)
    shown = {Path(name).name for name in re.findall(r"!\[[^]]*]\(\S*?bench/(\S+[.]png)\)", text)}
    monkeypatch.chdir(ROOT)
    result = CliRunner().invoke(main, [*command.split()[:-1], str(tmp_path)])

    assert result.exit_code == 0
    drawn = {path.name: path for path in tmp_path.iterdir()}
    assert shown <= {*drawn}
    for name, path in drawn.items():
        kept = ROOT / "docs" / "bench" / name
        with Image.open(kept) as old, Image.open(path) as new:
            same_version = old.info["Software"] == new.info["Software"]
        pictures = imread(kept), imread(path)
        assert pictures[0].shape == pictures[1].shape, name
        # the last bit of a colour may differ between processors, and with another matplotlib the place of a letter
        assert abs(pictures[0] - pictures[1]).mean() <= (1e-6 if same_version else 0.02), name


def test_what_got_slower_is_named_with_code_1(machine: Machine, tmp_path: Path) -> None:
    old = save(tmp_path / "old.json", row(us=50), row("prefill a t=1", us=70))
    new = save(tmp_path / "new.json", row(us=100), row("gather a 8x1"))
    code, lines = machine.run("bench", "--from", new, "--compare", old, width=200)

    assert code == 1
    assert "compared with Toy, torch 2.11, Triton 3.6, dsv4attn 0.1.0, 2026-11-20 12:00 UTC" in lines
    assert "slower: decode flash_c4 b=8, ours: 50.0 us -> 100.0 us (+100.0 %, noise 6.7 %)" in lines
    assert "only before: prefill a t=1, ours" in lines
    assert "only now: gather a 8x1, ours" in lines
    code, values = machine.json("bench", "--from", new, "--compare", old)
    assert code == 1
    assert values["compared"]["changes"][0]["state"] == "slower"


def test_files_of_another_machine_are_warned_about(machine: Machine, tmp_path: Path) -> None:
    old = save(tmp_path / "old.json", row(us=50))
    new = save(tmp_path / "new.json", row(us=100), machine=evolve(HERE, name="Other"))
    code, lines = machine.run("bench", "--from", new, "--compare", old, width=200)

    assert code == 0
    assert any(line.startswith("warning: measured on 'Toy' then and 'Other' now") for line in lines)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["decod"], "unknown measurement 'decod'; did you mean 'decode'?"),
        (["foo"], "(known: compress, decode, gather"),
        ([""], "'': expected names; leave it out for all"),
        (["--cases", ","], "',': expected names; leave it out for all"),
        (["--peers", ""], "'': expected names; leave it out for all"),
        (["--cases", "flash_c5"], "unknown case 'flash_c5'; did you mean 'flash_c4'?"),
        (["--backend", "reverence"], "unknown backend 'reverence'; did you mean 'reference'?"),
        (["--peers", "flashmla"], "unknown peer 'flashmla'; did you mean 'flash_mla'?"),
        (["--batches", "8,x"], "expected numbers from 1 to 2147483647 with commas"),
        (["--batches", "0"], "expected numbers from 1 to 2147483647 with commas"),
        (["--batches", "9" * 5000], "expected numbers from 1 to 2147483647 with commas"),
        (["--rounds", "0"], "0 is not in the range"),
        (["layer", "--heads", "8,12"], "--heads: expected heads of a rank's layer, [8, 16, 32, 64], got 12"),
        (["layer", "--cases", "pro_c4"], "--cases: expected a layer of Flash for whole layers, got pro_c4"),
        (["--device", "tpu:0"], "device: expected a device of this machine"),
        (["--compare", "none.json"], "--compare: expected a file that `dsv4attn bench --save FILE` wrote"),
        (["--from", "none.json"], "--from: expected a file"),
        (["decode", "--from", "none.json"], "--from shows a saved run"),
        (["--from", "a.json", "--from", "b.json", "--save", "c.json"], "--save and --compare go with one --from"),
        (["--from", "a.json", "--from", "b.json", "--compare", "c.json"], "--save and --compare go with one --from"),
        (["--plot", "file/below"], "a folder: expected one that can be written, got file/below: Not a directory"),
        (["--save", "nowhere/run.json"], "expected a file in a folder that exists"),
    ],
)
def test_a_mistake_is_found_before_anything_runs(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str
) -> None:
    def never(*_: Any) -> None:
        raise AssertionError("it ran")

    monkeypatch.setattr("dsv4attn.tools.bench.runner.Runner.run", never)
    (tmp_path / "file").write_text("", encoding="utf-8")
    code, lines = machine.run("bench", *arguments, width=400)

    assert code == 2
    assert said in " ".join(lines)


def test_without_matplotlib_pictures_are_refused_before_anything_runs(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, values = machine.json("bench", *QUICK, "--plot", "pictures")

    assert code == 2
    assert 'pip install "dsv4attn[plot]", or save with --save FILE' in values["error"]["message"]


def test_what_is_saved_is_what_json_prints(machine: Machine, tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["bench", *QUICK, "--json", "--save", "run.json"])

    assert result.exit_code == 0
    assert json.loads(result.stdout) == json.loads((tmp_path / "run.json").read_text(encoding="utf-8"))
    assert load(tmp_path / "run.json", "--from").rows[0].case == "decode flash_swa b=2"


def test_a_peer_that_is_not_here_is_no_failure(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("flash_mla", "vllm", "flashinfer"):
        monkeypatch.setitem(sys.modules, name, None)
    code, values = machine.json("bench", *QUICK, "--peers")

    assert code == 0
    assert values["unavailable"] == {name: f"{name} is not installed" for name in ("flash_mla", "vllm", "flashinfer")}


def printed(values: Any, width: int = 60) -> list[str]:
    out = Console(width=width, file=sys.stdout, no_color=True)
    with out.capture() as captured:
        out.print(values, crop=False)
    return [line.rstrip() for line in captured.get().splitlines()]


def test_no_number_is_cut_off_in_a_narrow_terminal() -> None:
    rows = [row(us=123_456_789.0, vs={"flash_mla": 1.25}), row(by="flash_mla + gather", us=12.34, is_peer=True)]
    shown = printed(run_text(run(rows)))

    assert "…" not in "".join(shown)
    assert any({"123,456,789", "2.0e-03"} <= {*line.split()} for line in shown)


def test_a_run_with_peers_fits_80_columns_with_all_its_figures() -> None:
    peers = {"p": 2.0, "vllm_auto_topk": 8.0, "flash_mla": 0.84}
    case = "select paged b=64 t=1 k=262144 K=1024"
    rows = [row(case, us=123_456.0, vs=peers, exposed=True), row(case, by="triton", us=9.0, vs={**peers, "p": 0.5})]
    rows += [row(case, by=f"{name} + gather", us=1_000.5, is_peer=True) for name in peers]
    rows += [row("index a", vs={"p": 3.0}), row("index a", by="p", is_peer=True)]
    lines = printed(run_text(run(rows)), width=80)
    words = [line.split() for line in lines]

    assert max(map(len, lines)) <= 80
    for by, us in (("ours", "123,456*"), ("triton", "9.0"), *((f"{name} + gather", "1,000.5") for name in peers)):
        assert any(line[:-5] == [*by.split(), us] and line[-1] == "2.0e-03" for line in words), by
    start = words.index(["case", "over", "ours", "triton"])
    assert [line[-3:] for line in words[start + 2 : start + 6] if len(line) > 2] == [
        ["flash_mla", "0.84", "0.84"],
        ["p", "2.00", "0.50"],
        ["vllm_auto_topk", "8.00", "8.00"],
    ], "the fastest first"
    assert ["a", "p", "3.00"] in words
    assert "select: ours runs at 0.84 of the best peer's speed (geometric mean of 1 case)" in lines


def test_named_layers_have_selections_at_several_lengths(machine: Machine) -> None:
    code, values = machine.json(
        "bench", "select", "--cases", "flash_c4,pro_c4", "--batches", "1", "--tokens", "3", "--rounds", "1"
    )

    assert code == 0
    shapes = ["b=1 t=3 k=2048", "b=1 t=1 k=2048"]
    assert [row["case"] for row in values["rows"]] == [
        f"select paged {shape}{model}" for model in ("", " K=1024") for shape in shapes
    ]


def test_the_end_names_ratios_cliffs_and_reasons() -> None:
    rows = [
        row(vs={"p": 2.0}),
        row("decode b b=1", us=None, state=WRONG, reason="error 5.0e-01, limit 1e-02"),
        row("decode b b=2", us=None, state=FAILED, reason="RuntimeError: no kernel image"),
        row("decode b b=4", us=None, state=REFUSED, reason="HEADS 64, needs 8"),
        row("prefill b t=1", us=7.0, exposed=True),
        row("prefill b t=1", by="p + gather", is_peer=True, reason="rows gathered by sm90"),
    ]
    cliff = Cliff("batch", "ours", 1, 2, 3.0, 2.0)
    shown = " ".join(printed(run_text(run(rows, cliffs=(cliff,), unavailable={"vllm": "vllm is not installed"}))))

    for said in (
        "decode: ours runs at 2.00 of p's speed (geometric mean of 1 case)",
        "cliff: batch, ours: from 1 to 2 time grows x3.00, work x2.00",
        "wrong: decode b b=1, ours: error 5.0e-01, limit 1e-02",
        "failed: decode b b=2, ours: RuntimeError: no kernel image",
        "refused: decode b b=4, ours: HEADS 64, needs 8",
        "not here: vllm: vllm is not installed",
        "p + gather: rows gathered by sm90",
        " 7.0* ",
        "*: the host's own time is part of it",
    ):
        assert said in shown


def test_many_rows_with_one_reason_are_one_line() -> None:
    rows = [row(f"index a b={i}", us=None, state=REFUSED, reason="HEADS 64, needs 8") for i in range(9)]
    shown = printed(run_text(run(rows)))

    assert " ".join(shown).count("refused: ") == 1
    assert "refused: index a b=0 and 8 more cases, ours: HEADS 64, needs 8" in " ".join(shown)


def test_the_fp8_product_is_part_of_the_roofline_where_there_is_one() -> None:
    values = run([row()], roofline=evolve(ROOF, fp8_flops_s=2e14))

    assert " 200 TFLOP/s (fp8 matrix product);" in " ".join(printed(run_text(values)))


def test_long_lists_of_changes_are_cut_short() -> None:
    from dsv4attn.tools.bench.compare import compare

    old, new = ([row(f"decode a b={i}", us=us) for i in range(30)] for us in (50, 100))
    shown = printed(comparison_text(compare(run(old), run(new))))

    assert any(line.startswith("slower: and 18 more") for line in shown)


def test_g22_ctrl_c_keeps_the_cases_that_were_measured(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pressed in the second of three cases: one is kept, in a file that can be shown again."""
    from dsv4attn.tools.bench.runner import Runner

    right, begun = Runner.run, []

    def stopped(runner: Runner, case: Any) -> Any:
        begun.append(case)
        if len(begun) == 2:
            raise KeyboardInterrupt
        return right(runner, case)

    monkeypatch.setattr(Runner, "run", stopped)
    code, lines = machine.run(
        "bench",
        "decode",
        "--cases",
        "flash_swa",
        "--batches",
        "1",
        "--heads",
        "2,3,4",
        "--rounds",
        "1",
        "--save",
        "b.json",
    )
    values = json.loads(Path("b.json").read_text(encoding="utf-8"))

    assert code == 130
    assert "interrupted: 1 of 3 cases were measured" in lines
    assert (values["ok"], values["complete"], values["asked"], values["ran"]) == (False, False, 3, 1)
    assert [row["case"] for row in values["rows"]] == ["decode flash_swa_h2 b=1"]
    assert load(Path("b.json"), "--from").ran == 1
    code, lines = machine.run("bench", "--from", "b.json")
    assert code == 1
    assert "interrupted: 1 of 3 cases were measured" in lines


def test_v41_layers_are_shown_with_their_speed_by_that_on_584_byte_records(machine: Machine) -> None:
    asked = "decode", "--cases", "v41_r1", "--batches", "1", "--rounds", "2", "--save", "run.json"
    code, lines = machine.run("bench", *asked, width=160)
    shown = machine.run("bench", "--from", "run.json", width=160)
    values = json.loads(Path("run.json").read_text(encoding="utf-8"))

    assert code == 0
    assert shown == (0, lines)
    assert [line.split() for line in lines if " over " in line] == [["case", "over", "reference"]]
    result = [(r["case"], r["records"]) for r in values["rows"]]
    assert result == [(f"decode v41_r1 b=1 {pair}", pair) for pair in ("584/584", "528/528", "528/288")]
    first, *others = values["rows"]
    assert first["vs_584"] is None
    for r in others:
        assert r["vs_584"] == pytest.approx(first["median"] / r["median"])
        ratio = f"{r['vs_584']:.2f}"
        assert [*r["case"].split()[1:], "584/584", ratio] in [line.split() for line in lines]
        said = f"decode: on {r['records']} reference runs at {ratio} of its own speed on 584/584"
        assert f"{said} (geometric mean of 1 case)" in lines
    means = [(m["kernel"], m["by"], m["records"], m["speed"]) for m in values["beside_584"]]
    assert means == [("decode", "reference", r["records"], pytest.approx(r["vs_584"])) for r in others]

"""`dsv4attn run`, from its arguments to its exit code."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from dsv4attn import selection
from dsv4attn.tools.cli import main
from dsv4attn.tools.cli.options import TokenCount
from dsv4attn.tools.cli.run import run
from tests.tools.replay import bugs, layer_bugs
from tests.tools.replay.small import CONFIG

MOONCAKE = """\
{"timestamp": 0, "input_length": 70, "output_length": 5, "hash_ids": [1]}
{"timestamp": 5, "input_length": 1, "output_length": 4, "hash_ids": [2]}
{"timestamp": 9, "input_length": 33, "output_length": 9, "hash_ids": [1]}
"""
AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,40,6
2023-11-16 18:15:47.6805900,9,3
"""
TOTALS = {"requests", "finished", "steps", "prefill_tokens", "decode_tokens", "recomputed_tokens", "preemptions"}
SETTINGS = {"model", "backend", "options", "cache", "trace", "seed", "block_size"}
SETTINGS |= {"max_num_batched_tokens", "max_num_seqs"}


@pytest.fixture(autouse=True)
def _no_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """No progress, however slow this machine is today."""
    monkeypatch.setattr("dsv4attn.tools.cli.progress.LINE_SECONDS", float("inf"))


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    return str(tmp_path)


@pytest.fixture
def trace(tmp_path: Path) -> str:
    (tmp_path / "trace.jsonl").write_text(MOONCAKE, encoding="utf-8")
    return str(tmp_path / "trace.jsonl")


def invoke(*args: object) -> Any:
    return CliRunner().invoke(main, ["run", *map(str, args)])


def as_json(*args: object) -> dict[str, Any]:
    result = invoke(*args, "--json")
    values: dict[str, Any] = json.loads(result.stdout)
    assert result.stdout.count("\n") == 1
    assert result.stderr == ""
    assert values["ok"] is (result.exit_code == 0)
    return {"code": result.exit_code, **values}


# what goes well


def test_a_trace_is_served_and_reported(model: str, trace: str) -> None:
    result = invoke("--model", model, "--trace", trace, "--max-num-batched-tokens", 32)

    assert result.exit_code == 0
    assert result.stderr == ""
    assert "3 of 3 requests finished" in result.stdout
    assert re.search(r"verdict +ok +ok +ok", result.stdout)


def test_the_json_object_holds_all_that_the_table_shows(model: str, trace: str) -> None:
    values = as_json("--model", model, "--trace", trace, "--max-num-batched-tokens", 32, "--layers", "c4a,swa")

    assert TOTALS | SETTINGS | {"layers", "wall_s", "other_s", "interrupted"} <= set(values)
    assert (values["requests"], values["finished"], values["trace"]) == (3, 3, trace)
    assert values["prefill_tokens"] + values["decode_tokens"] == 74 + 4 + 41
    assert [layer["kind"] for layer in values["layers"]] == ["swa", "c4a"]
    for layer in values["layers"]:
        assert layer["tokens"] == 119
        assert layer["tokens_per_s"] > 0
        assert layer["check"]["ok"] is True
        assert layer["check"]["rows"] > 0
        assert 0 < layer["check"]["worst"]["out"] < layer["check"]["tolerance"]["out"]


def test_the_built_in_trace_is_the_default(model: str) -> None:
    values = as_json("--model", model, "--max-tokens", 60)

    assert (values["code"], values["trace"], values["requests"]) == (0, "generated", 4)
    assert as_json("--model", model, "--max-requests", 2, "--max-tokens", 60)["requests"] == 2


def test_the_long_trace_makes_the_indexer_select_and_the_short_one_is_chunked_and_mixed() -> None:
    model = ["--model", "flash", "--layers", "c4a", "--check-rows", 0, "--max-kv-mib", 1]
    short, long = (invoke(*model, "--trace", name).stderr for name in ("short", "long"))
    lengths = [int(re.findall(r"request 2 \((\d+) tokens\)", text)[0]) for text in (short, long)]

    assert lengths[0] < 400
    assert lengths[1] > 2052


def test_the_steps_of_the_short_trace_are_small_enough_to_divide_its_longest_prompt(model: str) -> None:
    values = as_json("--model", model)
    long = as_json("--model", model, "--trace", "long", "--layers", "swa")

    assert values["trace"] == "generated"
    assert values["max_num_batched_tokens"] < values["longest_request"]
    assert values["decode_tokens"] > 0
    assert (long["trace"], long["requests"]) == ("generated, long", 4)


def test_a_trace_is_read_from_standard_input(model: str) -> None:
    result = CliRunner().invoke(main, ["run", "--model", model, "--trace", "-", "--json"], input=MOONCAKE)
    assert json.loads(result.stdout)["requests"] == 3

    result = CliRunner().invoke(main, ["run", "--model", model, "--trace", "-"], input="{")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "standard input:1: truncated or malformed JSON" in result.stderr


@pytest.mark.parametrize("name", ["cuda:99", "h200", "meta"])
def test_a_device_that_this_machine_lacks_is_bad_input_before_anything_runs(model: str, name: str) -> None:
    result = invoke("--model", model, "--device", name)

    assert (result.exit_code, result.stdout) == (2, "")
    [line] = result.stderr.splitlines()
    assert line.startswith(f"Error: device: expected a device of this machine, got {name!r}")
    assert " -> give a name of torch; this machine has cpu" in line


def test_the_device_decides_about_backend_caches_weights_and_report(
    model: str, trace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []
    resolve = selection.resolve

    def recorded(*problems: Any, device: object, **options: Any) -> Any:
        asked.append(device)
        return resolve(*problems, **options)

    monkeypatch.setattr(selection, "resolve", recorded)
    assert as_json("--model", model, "--trace", trace, "--device", "cpu")["device"] == "the CPU"

    assert asked == [torch.device("cpu")] * 2


@pytest.mark.device
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
def test_a_trace_is_served_and_checked_on_an_accelerator(model: str, trace: str) -> None:
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    values = as_json("--model", "flash", "--trace", trace, "--device", kind.type)

    assert values["ok"]
    assert values["device"] != "the CPU"
    assert values["threads"] == {}


def test_ranks_do_not_take_a_device(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsv4attn.tools.cli.bench_device.device_named", lambda _: torch.device("cuda", 0))
    monkeypatch.setattr("dsv4attn.tools.cli.ranks.check_ranks", lambda *_: None)
    result = invoke("--model", model, "--context-parallel", "2", "--device", "cuda")

    assert result.exit_code == 2
    assert "--device: expected cpu, with --context-parallel, got cuda:0 -> " in result.stderr


def test_numbers_of_tokens_take_k_and_m(model: str, trace: str) -> None:
    sizes = ["--max-num-batched-tokens", "1k", "--max-tokens", "1M"]

    assert as_json("--model", model, "--trace", trace, *sizes)["ok"]
    assert [TokenCount().convert(x, None, None) for x in ("640", "4k", " 4K", "1M")] == [640, 4096, 4096, 2**20]


def test_what_is_printed_fits_a_screen_and_begins_with_the_verdict(model: str) -> None:
    env = {"COLUMNS": "80"}
    lines = CliRunner().invoke(main, ["run", "--model", model], env=env).stdout.splitlines()
    verbose = CliRunner().invoke(main, ["run", "--model", model, "-v"], env=env).stdout.splitlines()

    assert re.fullmatch(r"ok: all 24 checked rows are within their limits; \d of them selected entries", lines[0])
    assert lines[1].startswith("backend reference on the CPU (")
    assert lines[2] == "limits of errors: out 5.5e-03, lse 1.5e-04, projection 1.1e-02"
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 80
    assert len(verbose) > len(lines)
    names, all_names = ({re.split(r"  +|:|\d", line.strip())[0] for line in text} for text in (lines, verbose))
    assert {name.strip("─") for name in names} < {name.strip("─") for name in all_names}


def test_a_page_is_written_next_to_what_is_printed(model: str, trace: str, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    result = invoke("--model", model, "--trace", trace, "--html", page)

    assert result.exit_code == 0
    assert result.stdout.endswith(f"page: {page}\n")
    assert result.stdout.splitlines()[0] in page.read_text(encoding="utf-8")
    page.unlink()
    assert as_json("--model", model, "--trace", trace, "--html", page)["ok"]
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")


def test_a_page_that_was_there_is_kept_if_nothing_ran(model: str, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert invoke("--model", model, "--trace", "no/such/trace", "--html", page).exit_code == 2
    assert not page.exists()
    page.write_text("kept", encoding="utf-8")
    assert invoke("--model", model, "--trace", "no/such/trace", "--html", page).exit_code == 2
    assert page.read_text(encoding="utf-8") == "kept"


def test_a_csv_trace_is_recognised(model: str, tmp_path: Path) -> None:
    (tmp_path / "log").write_text(AZURE, encoding="utf-8")
    values = as_json("--model", model, "--trace", tmp_path / "log")

    assert (values["code"], values["prefill_tokens"] + values["decode_tokens"]) == (0, 45 + 11)


def test_a_trace_in_seconds_is_read_where_it_is_said(model: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"timestamp": 0.5, "input_length": 33, "output_length": 2, "hash_ids": [1, 2, 3]}\n', encoding="utf-8"
    )
    units = "--trace-time-unit", "s", "--trace-block-tokens", 16

    assert "trace.jsonl:1: timestamp: expected whole mill" in invoke("--model", model, "--trace", path).stderr
    assert as_json("--model", model, "--trace", path, *units, "--layers", "swa")["ok"]
    refused = invoke("--model", model, *units)
    assert refused.exit_code == 2
    assert "--trace-time-unit: expected a file with --trace, got the built-in trace short" in refused.stderr


def test_long_requests_are_shrunk(model: str, trace: str) -> None:
    values = as_json("--model", model, "--trace", trace, "--max-tokens", 20, "--max-requests", 1)

    assert values["prefill_tokens"] + values["decode_tokens"] == 19


def test_every_setting_reaches_the_replay(model: str) -> None:
    options = ["--option", "prefill_keys=paged", "--option", "decode_indices=ragged", "--cache", "bf16"]
    limits = ["--max-num-batched-tokens", 48, "--max-num-seqs", 3, "--block-size", 5, "--seed", 7, "--max-kv-mib", 3]
    values = as_json("--model", model, "--max-tokens", 60, *options, *limits, "--check-rows", 0)

    assert values["options"] == {"prefill_keys": "paged", "decode_indices": "ragged"}
    assert (values["cache"], values["seed"], values["block_size"]) == ("bf16", 7, 5)
    assert (values["max_num_batched_tokens"], values["max_num_seqs"]) == (48, 3)
    assert [layer["check"] for layer in values["layers"]] == [None] * 3


def test_a_config_json_may_be_named_itself(model: str) -> None:
    assert as_json("--model", f"{model}/config.json", "--max-requests", 1)["ok"]


def test_the_progress_bar_is_for_people_only(model: str) -> None:
    assert invoke("--model", model, "--max-requests", 1).stderr == ""


@pytest.mark.matrix
def test_without_a_terminal_progress_is_plain_lines_on_stderr(
    model: str, trace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsv4attn.tools.cli.progress.LINE_SECONDS", 0.0)
    result = invoke("--model", model, "--trace", trace, "--max-num-batched-tokens", 32)
    lines = result.stderr.splitlines()

    assert len(lines) == 3 * as_json("--model", model, "--trace", trace, "--max-num-batched-tokens", 32)["steps"]
    assert all(re.fullmatch(r"\d+/119 tokens, [\d,]+/s, step \d+: \d running, \d waiting, \d+ s", x) for x in lines)
    assert lines[-1].startswith("119/119 tokens")
    assert "tokens, " not in result.stdout.partition("\n\n")[0].replace("119 tokens: ", "")


def test_the_number_of_threads_is_chosen_shown_and_put_back(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before, cores = torch.get_num_threads(), len(os.sched_getaffinity(0))
    small = ["--model", model, "--max-requests", "1", "--max-tokens", "8"]
    monkeypatch.setenv("OMP_NUM_THREADS", str(before))

    values = as_json(*small, "--threads", 1)["threads"]
    assert (values["count"], values["source"]) == (1, "--threads")
    assert re.search(r"(?m)^threads 1 of \d+ cores? \(--threads\)$", invoke(*small, "--threads", 1, "-v").stdout)
    assert as_json(*small)["threads"]["source"] == "OMP_NUM_THREADS"
    monkeypatch.delenv("OMP_NUM_THREADS")
    values = as_json(*small)["threads"]
    assert 1 <= values["count"] <= values["cores"] <= cores
    assert "cores of this process" in values["source"]
    assert torch.get_num_threads() == before


@pytest.mark.matrix
def test_real_geometry_is_the_default() -> None:
    values = as_json("--max-requests", 1, "--max-tokens", 4, "--layers", "swa")

    assert (values["code"], values["model"]) == (0, "deepseek-v4-flash")
    assert values["layers"][0]["check"]["tolerance"]["out"] < 6e-3
    assert [p.name for p in run.params if p.default == "flash"] == ["model"]


@pytest.mark.matrix
@pytest.mark.parametrize("options", [["--layers", "swa"], ["--cache", "bf16"], ["--cache", "fp32"], ["--seed", "5"]])
def test_whole_layers_run_in_any_setting_and_are_repeatable(model: str, trace: str, options: list[str]) -> None:
    first, second = (as_json("--model", model, "--trace", trace, *options) for _ in range(2))

    assert first["code"] == 0
    assert [layer["check"] for layer in first["layers"]] == [layer["check"] for layer in second["layers"]]


def test_whole_layers_are_served_in_little_memory(model: str, trace: str) -> None:
    values = as_json("--model", model, "--trace", trace, "--max-kv-mib", 1, "--max-num-batched-tokens", 8)

    assert (values["code"], values["finished"]) == (0, 3)
    assert sum(layer["kv_bytes_peak"] for layer in values["layers"]) <= 2**20


def test_the_table_of_whole_layers_has_each_operation_and_each_stage(model: str, trace: str) -> None:
    text = invoke("--model", model, "--trace", trace, "--verbose").stdout

    for name in ("projections of q and keys", "compressor", "indexer: scores, selection", "attention"):
        assert len(re.findall(rf"(?m)^    {name}(: [\d.]+%)? ", text)) == 2, name
    for name in ("window keys", "entries", "index keys", "selection", "and compressor states"):
        assert re.search(rf"(?m)^ +{name}", text), name
    assert "whole layers, with random weights\n" in text


@pytest.mark.matrix
def test_the_default_trace_exercises_selection_on_the_default_model() -> None:
    values = as_json("--layers", "c4a")
    (layer,) = values["layers"]

    assert values["code"] == 0
    assert (layer["topk"], layer["selecting_tokens"], values["model_topk"]) == (64, 260, 512)
    assert layer["check"]["selecting"] > 0
    assert layer["check"]["worst"]["selection"] is not None
    assert layer["check"]["worst"]["index_query"] > 0


@pytest.mark.mutation
@pytest.mark.parametrize("steps", [layer_bugs.Worst, layer_bugs.NotSelected, layer_bugs.OneTwice])
def test_the_default_trace_finds_a_wrong_selection(
    monkeypatch: pytest.MonkeyPatch, steps: type[layer_bugs.Steps]
) -> None:
    monkeypatch.setattr(selection, "load_backend", lambda *_, **__: layer_bugs.backend_with(steps))
    result = invoke("--layers", "c4a")

    assert result.exit_code == 1
    assert re.search(r"(?m)^c4a: .*selection ", result.stdout)


@pytest.mark.matrix
def test_the_number_of_selected_entries_is_an_option_and_is_said(model: str, trace: str) -> None:
    def topk(*options: object) -> tuple[int, int | None]:
        values = as_json("--model", model, "--layers", "c4a", *options)
        return values["layers"][0]["topk"], values["model_topk"]

    assert topk() == (6, None)
    assert topk("--index-topk", 4) == (4, 6)
    assert topk("--trace", trace, "--index-topk", 3) == (3, 6)
    said = invoke("--model", model, "--index-topk", 4).stdout
    assert " with index_topk 4 instead of 6, cache fp8_ds_mla\n" in said
    assert "instead of" not in invoke("--model", model, "--layers", "swa", "--index-topk", 4).stdout
    assert "instead of" not in invoke("--model", model).stdout


@pytest.mark.matrix
def test_short_requests_are_said_not_to_exercise_the_selection(model: str, trace: str) -> None:
    short = ["--model", model, "--trace", trace, "--max-tokens", 28]  # the last token is never fed back
    line = "selection was not exercised: no token saw more than 6 entries -> serve a prompt of 28 tokens one layer of "

    assert line in " ".join(invoke(*short).stdout.split())
    assert as_json(*short)["layers"][1]["check"]["worst"]["selection"] is None
    for others in ([], ["--check-rows", 0, "--max-tokens", 28], ["--layers", "swa"]):
        assert "not exercised" not in invoke("--model", model, "--trace", trace, *others).stdout
    assert as_json("--model", model, "--trace", trace)["layers"][1]["check"]["worst"]["selection"] is not None


def test_the_head_counts_the_requests_and_names_the_longest(
    model: str, trace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(trace).parent)

    def head(*args: object) -> str:
        return str(re.findall(r"(?m)^trace .*$", invoke("--model", model, *args).stdout)[0])

    one = ["--trace", "trace.jsonl", "--max-requests", 1]
    assert head("--trace", "trace.jsonl") == "trace trace.jsonl (3 requests, longest 75 tokens)"
    assert head(*one, "--max-tokens", 20) == "trace trace.jsonl (1 request, longest 20 tokens)"
    assert head("--max-requests", 1).startswith("trace generated (1 request, longest ")
    assert as_json("--model", model, "--trace", trace)["longest_request"] == 75


def test_help_says_what_bounds_a_request_and_that_nothing_may_be_checked() -> None:
    text = " ".join(invoke("--help").output.split())

    assert "Tokens of the longest request. Longer requests are shrunk." in text
    assert "Rows that are checked in each step and kind of layer. 0 checks none." in text


# what goes wrong


def test_a_failed_check_is_code_1(model: str, trace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "load_backend", lambda *_, **__: bugs.WithoutSink())
    values = as_json("--model", model, "--trace", trace)
    result = invoke("--model", model, "--trace", trace)

    assert values["code"] == result.exit_code == 1
    assert not any(layer["check"]["ok"] for layer in values["layers"])
    assert result.stdout.startswith("not ok: ")


def test_ctrl_c_leaves_a_partial_report(model: str, trace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "load_backend", lambda *_, **__: bugs.Interrupted(20))
    values = as_json("--model", model, "--trace", trace, "--max-num-batched-tokens", 16)
    result = invoke("--model", model, "--trace", trace, "--max-num-batched-tokens", 16)

    assert values["code"] == result.exit_code == 130
    assert values["interrupted"] is True
    assert values["steps"] > 0
    assert values["layers"][0]["tokens"] > 0
    assert "interrupted" in result.stdout


def test_layers_that_have_not_run_have_no_speed(model: str, trace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stopped(bugs.Interrupted):
        def prefill(self, call: object) -> None:
            raise KeyboardInterrupt

    monkeypatch.setattr(selection, "load_backend", lambda *_, **__: Stopped(0))
    result = invoke("--model", model, "--trace", trace, "--verbose")
    rows = {line.strip().split("  ")[0]: line.split()[-3:] for line in result.stdout.splitlines() if line.strip()}

    assert result.exit_code == 130
    for name in ("tokens/s", "q-norm, RoPE, insert", "attention", "inverse RoPE, projection"):
        assert rows[name] == ["-", "-", "-"], name


@pytest.mark.matrix
def test_a_signal_leaves_a_partial_report(model: str) -> None:
    code = """
import signal, sys, time
from dsv4attn.tools.cli import main
from dsv4attn.tools.replay import engine
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that runs tests behind its back has it ignored
run = engine.Replay.run
def wait(state):
    print(state.step, file=sys.stderr, flush=True)
    time.sleep(60 if state.step == 2 else 0)
engine.Replay.run = lambda self, progress: run(self, wait)
main()
"""
    many = ["--max-num-batched-tokens", "1", "--max-num-seqs", "1", "--json"]
    command = [sys.executable, "-c", code, "run", "--model", model, *many]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as running:
        assert running.stderr is not None
        assert next(line for line in running.stderr if line == "2\n")
        running.send_signal(signal.SIGINT)
        out, err = running.communicate(timeout=60)

    assert running.returncode == 130
    assert "Traceback" not in err
    assert json.loads(out)["ok"] is False
    assert json.loads(out)["interrupted"] is True
    assert json.loads(out)["steps"] >= 1


BAD = [
    (["--backend", "reverence"], "UnknownNameError", "unknown backend 'reverence'; did you mean 'reference'?"),
    (["--model", "flsh"], "UnknownNameError", "unknown model 'flsh'; did you mean 'flash'?"),
    (["--model", "no/such/config.json"], "GeometryError", "no such file"),
    (["--layers", "swa,c4b"], "UnknownNameError", "unknown layer kind 'c4b'; did you mean 'c4a'?"),
    (["--layers", ""], "UnknownNameError", "unknown layer kind ''"),
    (["--cache", "fp8"], "UnknownNameError", "unknown cache 'fp8'"),
    (["--option", "prefil_keys=paged"], "ArgumentError", "did you mean 'prefill_keys'?"),
    (["--option", "prefill_keys"], "BadParameter", "expected key=value"),
    (["--option", "prefill_keys=page"], "UnknownNameError", "unknown prefill_keys form 'page'"),
    (["--trace", "no/such/trace"], "TraceError", "no/such/trace: cannot be read: No such file or directory -> give"),
    (["--max-kv-mib", "1"], "ArgumentError", "--max-kv-mib: expected at least 6, so that request 2 (306"),
    (["--max-kv-mib", "1", "--trace", "long"], "ArgumentError", "expected at least 22, so that request 2 (2096"),
    (["--max-kv-mib", "1"], "ArgumentError", "fits, got 1 -> allow more memory"),
    (["--max-tokens", str(10**20)], "BadParameter", "100000000000000000000 is larger than 2147483647"),
    (["--max-tokens", "1"], "BadParameter", "1 is not in the range x>=2"),
    (["--max-requests", "0"], "BadParameter", "0 is not in the range x>=1"),
    (["--max-num-batched-tokens", "-5"], "BadParameter", "-5 is not in the range x>=1"),
    (["--block-size", "0"], "BadParameter", "0 is not in the range x>=1"),
    (["--check-rows", "-1"], "BadParameter", "-1 is not in the range x>=0"),
    (["--threads", "0"], "BadParameter", "0 is not in the range x>=1"),
    (["--seed", "x"], "BadParameter", "'x' is not a valid whole number"),
    (["--seed", "1k"], "BadParameter", "'1k' is not a valid whole number"),
    (["--max-tokens", "4g"], "BadParameter", "'4g' is not a valid number of tokens (such as 640, 4k or 1M)"),
    (["--max-tokens", "-1k"], "BadParameter", "'-1k' is not a valid number of tokens"),
    (["--html", "no/such/page.html"], "BadParameter", "expected a file in a folder that exists"),
    (["--html", "/proc/page.html"], "BadParameter", "'/proc/page.html' cannot be written: "),
]


@pytest.mark.parametrize(("args", "error", "problem"), BAD, ids=lambda x: " ".join(x) if isinstance(x, list) else "")
def test_bad_input_is_one_clear_line_and_code_2(args: list[str], error: str, problem: str) -> None:
    values, result = as_json(*args), invoke(*args)

    assert values["code"] == result.exit_code == 2
    assert values["error"]["type"] == error
    assert problem in values["error"]["message"]
    assert result.stdout == ""
    assert problem in result.stderr
    assert "Traceback" not in result.stderr


def test_a_bad_line_is_named_and_nothing_has_run(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "trace").write_text(MOONCAKE + MOONCAKE.splitlines()[0][:30] + "\n", encoding="utf-8")
    monkeypatch.setattr(selection, "load_backend", lambda *_, **__: pytest.fail("must not come this far"))
    result = invoke("--model", model, "--trace", tmp_path / "trace")

    assert result.exit_code == 2
    assert re.match(r"Error: .*trace:4: truncated or malformed JSON", result.stderr)


def test_a_config_that_lacks_a_field_is_named(tmp_path: Path) -> None:
    fields = {name: value for name, value in CONFIG.items() if name != "index_topk"}
    (tmp_path / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    result = invoke("--model", tmp_path)

    assert result.exit_code == 2
    assert "field 'index_topk' is missing" in result.stderr


def test_a_request_too_long_for_the_model_is_found_before_anything_runs(model: str, tmp_path: Path) -> None:
    (tmp_path / "long").write_text('{"timestamp": 0, "input_length": 5000, "output_length": 2}\n', encoding="utf-8")
    result = invoke("--model", model, "--trace", tmp_path / "long")

    assert result.exit_code == 2
    assert "request 0: expected at most the 4096 positions" in result.stderr
    assert invoke("--model", model, "--trace", tmp_path / "long", "--max-tokens", 40).exit_code == 0

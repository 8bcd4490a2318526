"""on_gpu/measure_serving.py with engines that are made up, and its tables in docs/performance.md."""

from __future__ import annotations

import gc
import json
import os
import time
from multiprocessing import active_children, get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from commands import refusal
from on_gpu import measure_serving
from on_gpu.measure_serving import OF_DSV4ATTN, OF_VLLM
from on_gpu.measured import BEGIN, END, main, with_tables

READY_S = {OF_DSV4ATTN: 12.0, OF_VLLM: 10.0}
PER_TOKEN_MS = {OF_DSV4ATTN: 3.0, OF_VLLM: 4.0}
STEADY = {"decode_ms": 2.0, "step_ms": 1.5, "longest_step_ms": 90.0}
DOCS = Path(__file__).parents[3] / "docs"
FAILS = "FAILS"
"""A variable that says how vLLM's engine fails."""


def serve_made_up(link: Connection, log: str, environment: dict[str, str], options: dict[str, Any]) -> None:
    """Take the place of `serve`: figures grow with each turn, and vLLM's engine fails if it is told to."""
    plugin = OF_VLLM if environment["DSV4ATTN_VLLM"] == "0" else OF_DSV4ATTN
    fails = os.environ.get(FAILS, "") if plugin == OF_VLLM else ""
    # options of vLLM's arrive
    multiprocessing = environment["VLLM_ENABLE_V1_MULTIPROCESSING"]
    Path(log).write_text(f"first line {json.dumps(options)}\n{multiprocessing=}\nlast line of {plugin}\n")
    if fails == "slowly":
        time.sleep(60)
    if fails == "at start":
        raise SystemExit(1)
    link.send((READY_S[plugin], {"device": "a device", "torch": "2", "triton": "3", "vllm": "0"}))
    turn = 0
    while (work := link.recv()) is not None:
        prompts, tokens, folder = work
        if folder is not None:
            of_decode = float(len(prompts) < 4)
            link.send({"step_ms": 3.0, "busy_ms": 2.5, "of_decode": of_decode, "prompts": len(prompts), "to": folder})
            continue
        turn += 1
        if fails == "at turn 4" and turn == 4:
            raise SystemExit(1)
        figures = {"first_token_s": 0.5 * len(prompts), "per_token_ms": PER_TOKEN_MS[plugin] + turn % 3}
        link.send({**figures, **STEADY, "tokens_per_s": 1000.0 * tokens})


@pytest.fixture
def started_by() -> str:
    """How processes start: a copy of this one imports nothing again."""
    return "fork"


@pytest.fixture(autouse=True)
def _made_up(monkeypatch: pytest.MonkeyPatch, started_by: str) -> None:
    start = get_context(started_by).Process
    monkeypatch.setattr(measure_serving, "serve", serve_made_up)
    monkeypatch.setattr(get_context("spawn"), "Process", start)


def run(tmp_path: Path, *options: str) -> tuple[dict[str, Any], Result]:
    """The file of results, and what the command printed."""
    file = tmp_path / "out.json"
    result = CliRunner().invoke(
        measure_serving.main, ["--json", str(file), "--cases", "1x8,2x8", "--turns", "2", *options]
    )
    return json.loads(file.read_text()), result


def options_in(folder: Path) -> dict[str, Any]:
    """Options of an engine whose log is in a folder."""
    log = (folder / f"{OF_DSV4ATTN}.log").read_text()
    return dict(json.loads(log.split("\n")[0].removeprefix("first line ")))


def test_engines_are_measured_by_turns(tmp_path: Path) -> None:
    report, result = run(tmp_path, "--memory", "1.5", "--options", '{"max_num_batched_tokens": 512}')

    assert result.exit_code == 0
    assert report["ready_s"] == READY_S
    assert (report["device"], report["memory_gib"], report["max_num_batched_tokens"]) == ("a device", 1.5, 512)
    assert report["experts"] == 256
    first, second = report["cases"]
    # turns 2 and 3, as the first one is not counted; then 5 and 6
    turns = first[OF_VLLM].pop("of_turns"), second[OF_DSV4ATTN].pop("of_turns")
    assert first[OF_VLLM] == {"first_token_s": 0.5, "per_token_ms": 5.0, "tokens_per_s": 64000.0, **STEADY}
    assert second[OF_DSV4ATTN] == {"first_token_s": 1.0, "per_token_ms": 4.0, "tokens_per_s": 64000.0, **STEADY}
    assert [[figures["per_token_ms"] for figures in several] for several in turns] == [[6.0, 4.0], [5.0, 3.0]]
    assert "0.800" in result.output
    assert "ratio 1.200" in " ".join(result.output.split())
    options = options_in(Path(result.stderr.split("logs: ")[1].split("\n")[0]))
    assert (options["kv_cache_memory_bytes"], options["max_num_batched_tokens"]) == (3 * 2**29, 512)


@pytest.mark.parametrize(("fails", "both"), [("at start", 0), ("at turn 4", 1)])
def test_an_engine_that_fails_is_left_out_with_the_end_of_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str, both: int
) -> None:
    monkeypatch.setenv(FAILS, fails)

    report, result = run(tmp_path)

    assert result.exit_code == 0
    assert report["failed"][OF_VLLM].startswith("the process ended")
    assert report["failed"][OF_VLLM].endswith("last line of vllm")
    assert "last line of vllm" in result.output
    assert [OF_DSV4ATTN in case for case in report["cases"]] == [True, True]
    assert sum(OF_VLLM in case for case in report["cases"]) == both

    report, result = run(tmp_path, "--only", OF_VLLM)

    assert (result.exit_code == 0, len(report["cases"])) == (both > 0, both)


def test_an_engine_that_does_not_start_in_time_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FAILS, "slowly")
    engine = measure_serving.engine_of(OF_VLLM, {}, tmp_path, "all", {})

    with pytest.raises(measure_serving.EngineError, match="no answer after 1 s"):
        engine.receive(1)

    assert not engine.process.is_alive()


def test_a_model_has_the_experts_of_one_rank(tmp_path: Path) -> None:
    report, result = run(tmp_path, "--model", "pro", "--layers", "c4a c128a c4a", "--experts", "48")

    assert (report["layers"], report["experts"]) == (["c4a", "c128a", "c4a"], 48)
    options = options_in(Path(result.stderr.split("logs: ")[1].split("\n")[0]))
    config = json.loads(Path(options["model"], "config.json").read_text())
    assert (config["n_routed_experts"], config["num_hidden_layers"], config["moe_intermediate_size"]) == (48, 3, 3072)


@pytest.mark.parametrize("started_by", ["spawn"])
def test_one_engine_alone(tmp_path: Path) -> None:
    report, result = run(tmp_path, "--only", OF_DSV4ATTN)

    assert result.exit_code == 0
    assert report["ready_s"] == {OF_DSV4ATTN: 12.0}
    assert all(case.keys() == {"requests", "prompt", OF_DSV4ATTN} for case in report["cases"])


def test_engines_that_start_at_once_have_no_time_of_start(tmp_path: Path) -> None:
    """Their caches stay in the folder that is asked for, and more options reach both."""
    folder = tmp_path / "kept"

    report, result = run(tmp_path, "--at-once", "--folder", str(folder), "--options", '{"seed": 3}')

    assert result.exit_code == 0
    assert (report["ready_s"], report["options"]) == ({}, {"seed": 3})
    assert report["cases"][0].keys() == {"requests", "prompt", OF_DSV4ATTN, OF_VLLM}
    for plugin in (OF_DSV4ATTN, OF_VLLM):
        assert '"seed": 3' in (folder / f"{plugin}.log").read_text()


def test_profiles_of_cases_sizes_of_graphs_and_routing_are_asked_for(tmp_path: Path) -> None:
    folder, profiles = tmp_path / "kept", tmp_path / "profiles"
    options = ["--only", OF_DSV4ATTN, "--cases", "4x8,3x8,2x8", "--folder", str(folder), "--profile", str(profiles)]

    report, result = run(tmp_path, *options, "--captured", "8 16", "--routing", "model")

    lines = [line.partition("profile of ")[2] for line in result.stderr.splitlines() if "profile of" in line]
    for line, case, count in zip(lines, ("4x8", "3x8", "2x8"), (4, 3, 2), strict=True):
        expected = {"step_ms": 3.0, "busy_ms": 2.5, "of_decode": float(count < 4), "prompts": count}
        expected |= {"to": str(profiles / case / OF_DSV4ATTN)}
        assert json.loads(line.removeprefix(f"{case}: ")) == expected
    # prompts were in the profiled steps of the first case
    assert [case[OF_DSV4ATTN].get("busy_ms") for case in report["cases"]] == [None, 2.5, 2.5]
    assert "device busy" in result.output
    assert report["routing"] == "model"
    assert '"cudagraph_capture_sizes": [8, 16]' in (folder / "dsv4attn.log").read_text()


def test_engines_run_in_processes_of_their_own_where_nothing_is_profiled(tmp_path: Path) -> None:
    folder, options = tmp_path / "kept", ["--only", OF_VLLM, "--cases", "1x8"]

    for more, multiprocessing in (["--engine-process"], "1"), (["--gpus", "8"], "1"), ([], "0"):
        report, result = run(tmp_path, *options, "--folder", str(folder), *more)
        assert result.exit_code == 0
        assert report.get("engine_process", False) is ("--engine-process" in more)
        assert report.get("gpus", 1) == (8 if "--gpus" in more else 1)
        log = (folder / "vllm.log").read_text()
        assert f"{multiprocessing=}" in log
        assert ('"tensor_parallel_size": 8' in log) is ("8 x a device" in result.output) is ("--gpus" in more)


def test_an_engine_holds_what_one_of_several_ranks_has(tmp_path: Path) -> None:
    report, result = run(tmp_path, "--rank-of", "8", "--only", OF_DSV4ATTN, "--folder", str(tmp_path))

    config = json.loads(Path(options_in(tmp_path)["model"], "config.json").read_text())
    assert [config[name] for name in measure_serving.SHARED] == [8, 1, 256, 16160]
    assert (config["n_routed_experts"], config["index_n_heads"]) == (256, 64)
    assert report["rank_of"] == 8
    assert "flash, 6 layers of one of 8 ranks, a device" in " ".join(result.output.split())


def test_drafts_are_accepted_by_chance_and_graphs_hold_them(tmp_path: Path) -> None:
    report, _ = run(tmp_path, "--drafts", "3", "--captured", "1 8", "--only", OF_DSV4ATTN, "--folder", str(tmp_path))

    options = options_in(tmp_path)
    assert report["drafts"] == options["speculative_config"]["num_speculative_tokens"] == 3
    assert options["speculative_config"]["synthetic_acceptance_length"] == 2.5
    assert options["compilation_config"] == {"cudagraph_capture_sizes": [4, 32]}


def test_steps_of_decode_alone_are_those_between_the_last_first_token_and_the_first_last_token() -> None:
    """Tokens come a little before a step ends. The step of 9 s is a stall; in the last two, requests are missing."""
    ends = [1.0, 2.0, 4.0, 6.0, 15.0, 17.0, 18.0, 19.0]

    assert measure_serving.decode_steps(ends, 1.9, 16.9) == [2.0, 2.0, 9.0, 2.0]
    # the first request is done before the last one has a token
    assert measure_serving.decode_steps(ends, 16.9, 5.9) == [1.0, 1.0]


def test_time_of_overlapping_kernels_counts_once() -> None:
    assert measure_serving.busy([(5.0, 6.0), (0.0, 2.0), (1.0, 3.0), (1.5, 1.75)]) == 4.0
    assert measure_serving.busy([]) == 0.0


def test_functions_run_around_each_step_and_collections_are_timed() -> None:
    class Engine:
        def step(self) -> str:
            calls.append("step")
            return "outputs"

    calls, engine = list[str](), Engine()
    with measure_serving.around_steps(engine, lambda: calls.append("before"), lambda: calls.append("after")):
        assert engine.step() == "outputs"
    engine.step()
    with measure_serving.collections() as seconds:
        gc.collect()
    gc.collect()
    assert len(seconds) == 1

    assert calls == ["before", "step", "after", "step"]


def test_values_of_weights_follow_from_their_names() -> None:
    """Finite ones of either sign, whatever was drawn before, and in whatever order weights come."""

    def values(*names: str) -> dict[str, torch.Tensor]:
        model = torch.nn.Module()
        for name in names:
            model.register_parameter(name, torch.nn.Parameter(torch.empty(64, 64).to(torch.float8_e4m3fn), False))
        measure_serving.give_values(model)
        return {name: weight.float() for name, weight in model.named_parameters()}

    first, second = values("a", "b"), values("b", "a")

    assert all(torch.equal(first[name], second[name]) for name in "ab")
    assert not torch.equal(first["a"], first["b"])
    assert first["a"].isfinite().all()
    assert (first["a"] < 0).float().mean() == pytest.approx(0.5, abs=0.05)


def test_tokens_are_spread_over_experts_evenly() -> None:
    """Through vLLM's own router; a step may be larger than the first one."""
    from vllm.model_executor.layers.fused_moe.router.routing_simulator_router import RoutingSimulator

    measure_serving.route_evenly()
    for tokens in (3, 8, 2):
        inputs = torch.zeros(tokens, 4), torch.zeros(tokens, 16)
        weights, experts = RoutingSimulator.simulate_routing(*inputs, measure_serving.EVEN, 6)

        assert experts.tolist() == [[(6 * token + i) % 16 for i in range(6)] for token in range(tokens)]
        assert experts.dtype == torch.int32
        assert torch.equal(weights, torch.full((tokens, 6), 1 / 6))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--json missing/out.json", "Invalid value for '--json': 'missing/out.json': expected a file in a folder that"),
        (
            "--folder file/below",
            "'--folder': a folder: expected one that can be written, got file/below: Not a directory",
        ),
        ("--profile file", "'--profile': a folder: expected one that can be written, got file: Not a directory"),
        ("--cases 8x1024,64", "expected different cases such as 8x1024, got '8x1024,64'"),
        ("--cases 257x8", "at most 256 requests of 16384 tokens with their answers, got 257x8"),
        ("--cases 1x16321", "got 1x16321 and 64 tokens"),
        ("--layers c4", "expected some of swa, c4a, c128a"),
        ("--options []", "expected a JSON object, got '[]'"),
        ("--options seed", "expected a JSON object, got 'seed'"),
        ("--tokens 1", "1 is not in the range x>=2"),
        ("--turns 0", "0 is not in the range x>=1"),
        ("--rank-of 3", "ranks with equal shares of a model of flash, got 3"),
        ("--engine-process --profile new", "--profile needs steps in the process that it profiles"),
        ("--gpus 2 --profile new", "--profile needs steps in the process that it profiles: take one GPU"),
    ],
)
def test_what_cannot_be_measured_or_written_is_refused_before_an_engine_starts(
    options: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure_serving, "engine_of", lambda *_: pytest.fail("an engine started"))
    assert message in refusal(measure_serving.main, options.split(), tmp_path, monkeypatch)


@pytest.mark.parametrize("options", [[], ["--at-once"]])
def test_engines_end_with_the_command_whatever_happens(
    tmp_path: Path, options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(measure_serving.Run, "start", interrupted)
    _, result = run(tmp_path, *options)

    assert result.exit_code == 1
    assert not active_children()


def test_a_run_that_is_killed_leaves_the_cases_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure = measure_serving.Run.measure

    def measure_once(self: Any, count: int, length: int) -> None:
        if self.report["cases"]:
            raise KeyboardInterrupt
        measure(self, count, length)

    monkeypatch.setattr(measure_serving.Run, "measure", measure_once)

    report, _ = run(tmp_path)

    assert [case["requests"] for case in report["cases"]] == [1]


def report_of(**changes: Any) -> dict[str, Any]:
    """A report with figures that are made up."""
    figures = {"first_token_s": 1.5, "per_token_ms": 10.0, "decode_ms": 6.0, "step_ms": 4.0, "tokens_per_s": 20000.0}
    own = {"first_token_s": 1.0, "per_token_ms": 8.0, "decode_ms": 5.0, "step_ms": 5.0, "tokens_per_s": 25000.0}
    return {
        "device": "NVIDIA H100",
        "torch": "2.11",
        "triton": "3.6",
        "vllm": "0.33.0",
        "date": "2026-11-27",
        "model": "flash",
        "layers": ["swa", "c4a", "c4a"],
        "experts": 256,
        "tokens": 64,
        "turns": 3,
        "parts": "all",
        "max_num_batched_tokens": 8192,
        "memory_gib": 8.0,
        "routing": "even",
        "options": {},
        "ready_s": {OF_DSV4ATTN: 30.0, OF_VLLM: 40.0},
        "failed": {},
        "cases": [{"requests": 64, "prompt": 1024, OF_DSV4ATTN: figures, OF_VLLM: own}],
        **changes,
    }


def pages_of(tmp_path: Path, *reports: dict[str, Any]) -> tuple[list[dict[str, Any]], list[str]]:
    """The reports in the file, and the lines of the page, after all of these were put there one after another."""
    file, page, new = (tmp_path / name for name in ("file.json", "page.md", "new.json"))
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    for report in reports:
        new.write_text(json.dumps(report))
        main(str(file), str(page), str(new))
    return json.loads(file.read_text())["reports"], page.read_text().splitlines()


def test_a_report_is_a_paragraph_and_a_table(tmp_path: Path) -> None:
    _, lines = pages_of(tmp_path, report_of(gpus=2, rank_of=8, drafts=3))
    assert "256 experts in each, with the share of one of 8 tensor-parallel ranks (their exchange was not" in lines[3]
    assert "was not measured). 2 x NVIDIA H100, torch" in lines[3]
    assert "8 GiB of caches on each GPU, tokens" in lines[3]
    assert "evenly, drafts in a step: 3, half of them accepted by chance, the engine in a process of" in lines[3]
    (tmp_path / "file.json").unlink()
    _, lines = pages_of(tmp_path, report_of())

    assert lines == [
        "before",
        BEGIN,
        "",
        (
            "**Flash's sizes, 3 layers** (1 swa, 2 c4a), 256 experts in each. NVIDIA H100, torch 2.11, Triton 3.6, "
            "vLLM 0.33.0, 2026-11-27; parts `all`, 64 tokens of each answer, at most 8,192 tokens in a step, 8 GiB of "
            "caches, tokens spread "
            "over experts evenly, medians of 3 turns. Start-up: 30.0 s with dsv4attn, 40.0 s with vLLM's own "
            "attention (ratio 0.750)."
        ),
        "",
        (
            "| requests | prompt | first token, s: dsv4attn | vLLM | ratio | per token, ms: dsv4attn | vLLM | ratio "
            "| in decode, ms: dsv4attn | vLLM | ratio | step, ms: dsv4attn | vLLM | ratio "
            "| tokens/s: dsv4attn | vLLM | ratio |"
        ),
        f"|{' --- |' * 17}",
        (
            "| 64 | 1024 | 1.500 | 1.000 | 1.500 | 10.00 | 8.00 | 1.250 | 6.00 | 5.00 | 1.200 | 4.00 | 5.00 | 0.800 "
            "| 20,000 | 25,000 | 0.800 |"
        ),
        "",
        END,
        "after",
    ]


def test_reports_of_models_machines_and_days_are_kept_apart(tmp_path: Path) -> None:
    others = [{"model": "pro"}, {"device": "NVIDIA H200"}, {"date": "2026-11-28"}, {"memory_gib": 4.0}]

    reports, lines = pages_of(tmp_path, report_of(), *(report_of(**changes) for changes in others))

    known = [(r["date"], r["model"], r["device"]) for r in reports]
    assert known == [
        ("2026-11-28", "flash", "NVIDIA H100"),
        ("2026-11-27", "flash", "NVIDIA H100"),
        ("2026-11-27", "flash", "NVIDIA H100"),
        ("2026-11-27", "flash", "NVIDIA H200"),
        ("2026-11-27", "pro", "NVIDIA H100"),
    ]
    assert sum(line.startswith("| requests") for line in lines) == 5


def test_a_second_report_of_the_same_run_adds_its_cases(tmp_path: Path) -> None:
    [case] = report_of()["cases"]
    longer, again = {**case, "prompt": 8192}, {**case, OF_VLLM: case[OF_DSV4ATTN]}

    [report], _ = pages_of(tmp_path, report_of(), report_of(cases=[longer, again], ready_s={OF_DSV4ATTN: 20.0}))

    assert report["cases"] == [again, longer]
    assert report["ready_s"] == {OF_DSV4ATTN: 20.0, OF_VLLM: 40.0}


def test_of_an_engine_that_failed_the_page_has_its_name_and_no_log(tmp_path: Path) -> None:
    [case] = report_of()["cases"]
    alone = {name: value for name, value in case.items() if name != OF_VLLM}
    failed = report_of(cases=[alone], ready_s={OF_DSV4ATTN: 30.0}, failed={OF_VLLM: "a log with a folder"})

    [report], lines = pages_of(tmp_path, failed)

    assert report["failed"] == [OF_VLLM]
    assert lines[3].endswith("Start-up: 30.0 s with dsv4attn. The engine with vLLM's own attention failed.")
    assert lines[7] == "| 64 | 1024 | 1.500 |  |  | 10.00 |  |  | 6.00 |  |  | 4.00 |  |  | 20,000 |  |  |"


def test_a_report_without_cases_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no case"):
        pages_of(tmp_path, report_of(cases=[]))


def test_the_tables_on_the_page_are_those_of_the_reports() -> None:
    page = (DOCS / "performance.md").read_text(encoding="utf-8")
    reports = json.loads((DOCS / "bench" / "vllm-measured.json").read_text(encoding="utf-8"))["reports"]

    assert page.count(BEGIN) == page.count(END) == 1
    assert with_tables(page, reports) == page

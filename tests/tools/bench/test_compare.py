"""What is slower by more than noise is named, and nothing else is."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from attrs import asdict, evolve

from dsv4attn.errors import ArgumentError
from dsv4attn.tools.bench.compare import compare
from dsv4attn.tools.bench.result import SCHEMA, Run, load, peer_versions
from dsv4attn.tools.bench.runner import FAILED, WRONG, BenchRow
from dsv4attn.tools.bench.scaling import SERIES, Cliff, cliffs, scaling_cases
from tests.tools.bench.sample_runs import HERE, ROOF, row, run


def states(old: BenchRow, new: BenchRow) -> list[str]:
    return [change.state for change in compare(run([old]), run([new])).changes]


@pytest.mark.parametrize(("us", "state"), [(104, "same"), (106, "slower"), (96, "same"), (94, "faster")])
def test_less_than_five_percent_is_noise(us: float, state: str) -> None:
    steady: dict[str, Any] = {"p10": None, "p90": None}
    assert states(row(us=100, **steady), row(us=us, **steady)) == [state]


def test_times_of_a_cpu_are_compared_with_the_same_number_of_threads_only() -> None:
    machine, other_machine = (evolve(HERE, arch="cpu", threads=threads, cores=2) for threads in (1, 2))

    assert compare(run([row()], machine), run([row()], evolve(machine, cores=0))).comparable
    assert not compare(run([row()], machine), run([row()], other_machine)).comparable
    assert compare(run([row()], HERE), run([row()], evolve(HERE, threads=2))).comparable


def test_what_spreads_more_may_differ_more() -> None:
    wide = row(us=100, p10=90e-6, p90=110e-6)

    assert states(wide, row(us=128)) == ["same"]
    assert states(wide, row(us=135)) == ["slower"]
    assert states(row(us=100), evolve(wide, median=128e-6)) == ["same"]


def test_a_time_that_was_lost_is_no_better_than_a_slow_one() -> None:
    values = compare(run([row()]), run([row(us=None, state=WRONG, reason="limit 1e-02")]))

    assert [change.state for change in values.changes] == ["lost"]
    assert "no time now: wrong: limit 1e-02" in str(values.changes[0])
    assert not values.ok


def test_rows_that_only_one_run_has_are_named() -> None:
    values = compare(run([row("decode a b=1"), row("decode a b=2")]), run([row("decode a b=2"), row("decode a b=4")]))

    assert values.only_old == ["decode a b=1, ours"]
    assert values.only_new == ["decode a b=4, ours"]
    assert values.ok


def test_runs_without_a_time_in_common_are_not_fine() -> None:
    values = compare(run([row()]), run([]))

    assert (values.changes, values.only_old, values.ok) == ([], ["decode flash_c4 b=8, ours"], False)


def test_a_row_that_never_had_a_time_is_new_once_it_has_one() -> None:
    values = compare(run([row(us=None, state=FAILED)]), run([row()]))
    assert (values.changes, values.only_new, values.ok) == ([], ["decode flash_c4 b=8, ours"], True)


def test_one_row_of_ours_that_is_wrong_makes_a_run_that_failed() -> None:
    assert run([row(), row(us=None, state=WRONG, is_peer=True)]).ok
    assert not run([row(), row(us=None, state=WRONG)]).ok
    assert not run([row(), row(us=None, state=FAILED)]).ok
    assert not run([row(is_peer=True)]).ok


def test_a_peer_may_get_slower() -> None:
    assert compare(run([row(is_peer=True)]), run([row(us=500, is_peer=True)])).changes == []


def test_across_machines_nothing_is_a_regression() -> None:
    values = compare(run([row()]), run([row(us=900)], evolve(HERE, name="Other")))

    assert not values.comparable
    assert values.of("slower")
    assert values.ok


def test_whole_layers_and_the_host_are_compared() -> None:
    def measured(layer: float | None, host: float) -> Run:
        whole = {"by": "ours", "case": "layer swa", "layer": "swa", "plain_s": layer, "deterministic_s": None}
        return run([], layers=(whole,), host=({"by": "ours", "layer": "swa", "plain_us": host, "plain_percent": 9.0},))

    slower = compare(measured(1e-4, 20), measured(1.1e-4, 41)).of("slower")
    assert [(change.case, change.by) for change in slower] == [
        ("host swa, plain", "ours"),
        ("layer swa, plain", "ours"),
    ]
    assert len(compare(measured(1e-4, 20), measured(1.04e-4, 39)).of("same")) == 2
    assert len(compare(measured(1e-4, 20), measured(0.9e-4, 9)).of("faster")) == 2
    # the host's time does not count: it varies too much
    assert compare(measured(1e-4, 20), measured(2e-4, 1)).speed == pytest.approx(0.5)
    lost = compare(measured(1e-4, 20), measured(None, 20))
    assert [change.case for change in lost.of("lost")] == ["layer swa, plain"]
    assert not lost.ok


def test_speed_is_a_geometric_mean() -> None:
    values = compare(run([row(), row("decode b b=1")]), run([row(us=50), row("decode b b=1", us=200)]))
    assert values.speed == pytest.approx(1.0)
    assert compare(run([]), run([])).speed is None
    assert values.as_json()["ok"] is False


def saved(tmp_path: Path, **changes: Any) -> Path:
    path = tmp_path / "run.json"
    values = run([row(), row(us=None, state=WRONG, error=float("inf"))], command="dsv4attn bench").as_json()
    path.write_text(json.dumps({**values, **changes}, allow_nan=False), encoding="utf-8")
    return path


def test_a_run_survives_a_file(tmp_path: Path) -> None:
    cliff = Cliff("batch", "ours", 1, 2, 3.0, 2.0)
    whole = run(
        [row(vs={"p": 2.0}), row(us=None, state=WRONG)], cliffs=(cliff,), unavailable={"vllm": "no"}, command="x"
    )
    path = tmp_path / "run.json"
    path.write_text(json.dumps(whole.as_json()), encoding="utf-8")

    assert load(path, "--from") == whole


def test_an_error_that_is_no_number_is_null(tmp_path: Path) -> None:
    assert load(saved(tmp_path), "--from").rows[1].error is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "which is no JSON"),
        ("[" * 100_000, "which is no JSON"),
        ("[1, 2]", "schema None"),
        ('{"schema": "dsv4attn-bench/99"}', "schema dsv4attn-bench/99 -> measure again"),
        (f'{{"schema": "{SCHEMA}", "machine": {{"name": "Toy"', "which is no JSON"),
        (f'{{"schema": "{SCHEMA}"}}', "bad.json, in which machine is missing"),
    ],
)
def test_a_file_that_is_no_run_says_what_it_is(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text, encoding="utf-8")

    with pytest.raises(ArgumentError) as caught:
        load(path, "--compare")
    assert said in str(caught.value)
    assert str(caught.value).startswith("--compare: expected a file that `dsv4attn bench --save FILE` wrote")


LAYER = {"by": "ours", "layer": "swa", "case": "layer swa", "text": "layer swa: 1 ms", "plain_s": 1e-3, "phase": ""}
LAYER |= {
    "deterministic_s": None,
    "step": "",
    "completing": 0,
    "parts": [{"name": "", "launches": 1, "seconds": "1 us"}],
}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rows": [{"case": "decode a b=1"}]}, "rows[0].kernel is missing"),
        ({"rows": None}, "rows is null instead of a list"),
        ({"rows": [{**row().as_json(), "median": "fast"}]}, 'rows[0].median is "fast" instead of a number from 0 on'),
        ({"rows": [row().as_json(), {**row().as_json(), "p90": -1}]}, "rows[1].p90 is -1 instead of a number"),
        ({"roofline": {**asdict(ROOF), "bytes_s": 10**400}}, "roofline.bytes_s is 1000"),
        ({"rows": [{**row().as_json(), "vs": {"p": True}}]}, "rows[0].vs.p is true instead of a number"),
        ({"machine": []}, "machine is [] instead of an object"),
        ({"machine": {**asdict(HERE), "threads": 1.5}}, "machine.threads is 1.5 instead of a whole number"),
        ({"host": [{"by": "ours"}]}, "host[0].layer is missing"),
        ({"layers": [LAYER]}, 'layers[0].parts[0].seconds is "1 us" instead of a number'),
    ],
)
def test_a_field_that_was_edited_is_named_with_its_file(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(f"run.json, in which {said}")):
        load(saved(tmp_path, **changes), "--from")


def test_fields_that_older_files_do_not_have_are_not_missing(tmp_path: Path) -> None:
    newer = {"fp8", "records", "vs_584"}
    older = {name: value for name, value in row(fp8=True).as_json().items() if name not in newer}

    assert load(saved(tmp_path, rows=[older]), "--from").rows == (row(),)


def test_a_file_that_is_not_there_says_so(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="No such file"):
        load(tmp_path / "none.json", "--from")


def test_versions_are_of_what_is_installed() -> None:
    assert peer_versions(["flash_mla"]) == {}
    assert set(peer_versions(["torch"])) == {"torch"}


def line(*points: tuple[int, float, float], by: str = "ours") -> list[BenchRow]:
    """(x, microseconds, least microseconds)."""
    return [row(f"batch f b={x}", by, us, least=1e-6 * least, series="batch", x=x) for x, us, least in points]


def test_a_cliff_is_where_time_outgrows_work() -> None:
    smooth = line((1, 10, 1), (2, 11, 2), (4, 20, 4), (8, 45, 8), by="theirs")
    values = cliffs([*line((4, 20, 4), (1, 10, 1), (2, 27, 2), (8, 41, 8)), *smooth, row()])

    assert [(cliff.by, cliff.start, cliff.stop) for cliff in values] == [("ours", 1, 2)]
    assert str(values[0]) == "batch, ours: from 1 to 2 time grows x2.70, work x2.00"


def test_a_point_without_a_time_breaks_no_line() -> None:
    points = line((1, 10, 1), (4, 39, 4))
    gap = row("batch f b=2", us=None, series="batch", x=2, state=FAILED)
    assert cliffs([*points, gap]) == []


@pytest.mark.parametrize("small", [True, False])
def test_lines_grow_in_one_thing(small: bool) -> None:
    cases = scaling_cases(small=small)

    assert len({case.name for case in cases}) == len(cases)
    assert {case.series for case in cases} == {*SERIES}
    for series in SERIES:
        points = [case.x for case in cases if case.series == series]
        assert points == sorted({*points})
        assert len(points) >= 2


def test_lines_reach_as_far_as_models_do() -> None:
    most = {case.series: case for case in scaling_cases(small=False)}

    assert (len(most["batch"].requests), len(most["requests"].requests)) == (1024, 64)
    assert {most[name].requests[0] for name in ("context-c4", "context-c128")} == {(2**20 - 1, 1)}
    assert (most["context-c128"].preset.topk, most["topk"].preset.topk) == (8192, 8192)
    assert len({count for _, count in most["requests"].requests}) > 16

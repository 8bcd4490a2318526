"""What a report says, to people and to programs."""

from __future__ import annotations

import io
import json
import re
from html import escape

import pytest
from attrs import evolve
from rich.console import Console

from dsv4attn.tools.replay.page import as_html
from dsv4attn.tools.replay.report import as_json, as_text, sections
from dsv4attn.tools.replay.results import CheckResult, Errors, LayerReport, Report

LIMITS = Errors(4e-3, 8e-3, 8e-3)


def report_of(*errors: Errors, checked: bool = True, kinds: tuple[str, ...] = ("swa", "c4a", "c128a")) -> Report:
    """A large report: numbers as wide as they get."""
    layers = []
    for kind in kinds:
        check = CheckResult(LIMITS) if checked else None
        layers.append(
            LayerReport(
                kind=kind,
                layers_in_model=21,
                kv_bytes_per_token=1234.5,
                window_bytes_per_sequence=123_456_789,
                kv_bytes_peak=987_654_321_000,
                workspace_bytes_peak=2**30 - 100_000,
                workspace_bytes_planned=2**30 - 100_000,
                transient_bytes_bound=2**30 - 100_000,
                tokens=12_345_678,
                seconds={"insert": 1.0, "attend": 2.0, "project": 1.0},
                check=check,
            )
        )
        for i, error in enumerate(errors):
            if check is not None:
                check.add(error, f"step {i}, request 3, position 4")
    return Report(
        model="deepseek-v4-flash",
        backend="reference",
        cache="fp8_ds_mla",
        seed=0,
        block_size=64,
        max_num_batched_tokens=1024,
        max_num_seqs=32,
        requests=400,
        layers=layers,
        finished=399,
        steps=123_456,
        prefill_tokens=12_000_000,
        decode_tokens=345_678,
        wall_s=1234.5,
        other_s={"inputs": 12.0, "scheduling": 3.0, "checks": 100.0},
        trace="../shared/data/some_trace.jsonl",
    )


def text_of(report: Report, width: int = 80, *, verbose: bool = True) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(as_text(report, verbose=verbose))
    shown = console.file
    assert isinstance(shown, io.StringIO)
    return shown.getvalue()


@pytest.mark.parametrize("width", [80, 120])
def test_no_number_of_the_table_is_cut_or_folded(width: int) -> None:
    text = text_of(report_of(Errors(1e-3, 2e-3, 3e-3)), width)
    rows = [line for line in text.splitlines() if line.startswith("  ")]

    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    assert all(len(line.split()) >= 4 for line in rows if line.strip())
    for number in ("3,086,420", "1,234.50", "117.7 MiB", "919.8 GiB", "1.0e-03"):
        assert text.count(number) == 3, number
    assert text.count("1,023.9 MiB") == 3 * 3


def test_a_good_report_says_so() -> None:
    report = report_of(Errors(1e-3, 2e-3, 3e-3), Errors(2e-3, 1e-3, 1e-3))

    assert report.ok
    assert text_of(report).startswith("ok: all 6 checked rows are within their limits\n")
    assert "399 of 400 requests finished in 123,456 steps" in text_of(report)
    assert "12,345,678 tokens: 12,000,000 prefill, 345,678 decode\n" in text_of(report)


def test_a_failed_check_is_named_counted_and_described() -> None:
    text = text_of(report_of(*[Errors(0.5, 0.0, float("inf"))] * 8), 120)

    assert "not ok: 24 of 24 checked rows are beyond a limit" in text
    assert text.count("FAIL ") + text.count("FAIL\n") == 3
    assert "c4a: step 0, request 3, position 4: out 0.5, projection inf" in text
    assert "c4a: and 3 more rows" in text


def test_what_was_not_checked_is_not_called_ok() -> None:
    for report in (report_of(checked=False), report_of()):
        assert report.ok
        assert text_of(report).count("not checked") == 3
        assert text_of(report).startswith("nothing was checked\n")
    assert "relative" not in text_of(report_of(checked=False))


def test_an_interrupted_report_is_not_ok_and_says_so() -> None:
    report = evolve(report_of(Errors()), interrupted=True)

    assert not report.ok
    assert "interrupted" in text_of(report)
    assert as_json(report)["ok"] is False


def test_options_and_preemptions_are_shown_when_there_are_any() -> None:
    plain = report_of(Errors())
    values = text_of(evolve(plain, options={"prefill_keys": "paged"}, preemptions=3, recomputed_tokens=77), 120)

    assert "\nbackend reference (prefill_keys=paged) on the CPU\n" in values
    assert "345,678 decode; 3 preemptions, 77 tokens served again" in values
    assert "preemptions" not in text_of(plain)


def test_as_json_is_plain_and_complete() -> None:
    values = json.loads(json.dumps(as_json(report_of(Errors(1e-3, float("inf"), 2e-3))), allow_nan=False))
    layer = values["layers"][1]

    assert (values["ok"], values["interrupted"], values["model"]) == (False, False, "deepseek-v4-flash")
    assert values["other_s"]["checks"] == 100.0
    assert layer["kind"] == "c4a"
    assert layer["tokens_per_s"] == pytest.approx(12_345_678 / 4)
    assert layer["share_of_time"] == pytest.approx(1 / 3)
    assert layer["seconds"] == {"insert": 1.0, "attend": 2.0, "project": 1.0}
    assert layer["check"]["worst"] == {"out": 1e-3, "lse": None, "projection": 2e-3}
    assert layer["check"]["tolerance"] == {"out": 4e-3, "lse": 8e-3, "projection": 8e-3}
    assert (layer["check"]["rows"], layer["check"]["failed"], layer["check"]["ok"]) == (1, 1, False)
    assert layer["check"]["failures"] == ["step 0, request 3, position 4: lse inf"]


def test_shares_count_layers_of_the_model_when_asked() -> None:
    report = report_of()
    report.layers[0].layers_in_model = 0

    assert report.shares() == pytest.approx([1 / 3] * 3)
    assert report.model_shares() == pytest.approx([0, 0.5, 0.5])
    assert "\n  share of time in all 42 layers " in text_of(report)
    report.layers[:] = report.layers[1:2]
    report.layers[0].layers_in_model = 1
    assert "\n  share of time in 1 layer " in text_of(report)


def whole_report() -> Report:
    """Whole layers, with numbers as wide as they get; window-only layers have fewer stages."""
    report = report_of()
    limits = Errors(4e-3, 8e-3, 8e-3, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0)
    for layer in report.layers:
        layer.seconds = {
            "projections": 4567.8,
            "insert": 1234.5,
            "compressor": 5678.9,
            "indexer": 6789.1,
            "attend": 2345.6,
            "project": 3456.7,
        }
        layer.state_bytes_per_sequence = 1023 * 1024
        layer.check = CheckResult(limits)
        stages = {} if layer.kind == "swa" else {"entry": 0.25, "index_key": 0.5, "index_query": 0.75, "selection": 0.0}
        layer.check.add(Errors(1e-3, 2e-3, 3e-3, key=0.125, query=0.375, **stages), "here")
    return report


def test_whole_layers_have_a_row_for_each_operation_and_stage_within_80_columns() -> None:
    text = text_of(whole_report())

    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80
    _, _, rows = text.partition("\nerror, share of allowed rounding (≤1) ")
    shares = rows.partition("\n  out, relative (≤4.0e-03) ")[0]
    for line in ("window keys", "queries", "entries", "index keys", "index queries", "selection, of what fp32 sums"):
        assert f"\n  {line} " in shares
    assert "\n  lse, absolute (≤8.0e-03) " in rows
    assert "\n  projection, relative (≤8.0e-03) " in rows
    assert text.count("6789.10 s") == text.count("1,023.0 KiB") == 3
    assert [line.split()[-3:] for line in text.splitlines() if "entries" in line] == [["-", "0.25", "0.25"]]
    assert "ok: all 3 checked rows" in text


def test_a_short_report_of_failed_rows_has_one_row_of_each_layer_type_and_fits_a_screen() -> None:
    text = text_of(report_of(*[Errors(0.5, 0.0, float("inf"))] * 8), verbose=False)

    assert text.startswith("not ok: 24 of 24 checked rows are beyond a limit\nswa: step 0, request 3, ")
    assert text.count("; and 7 more rows") == 3
    assert "tokens/s" not in text
    assert "tokens/s" in text_of(whole_report(), verbose=False)
    assert (
        max(len(text_of(report, verbose=False).splitlines()) for report in (whole_report(), report_of(Errors()))) <= 40
    )
    assert len(text.splitlines()) <= 40


def test_a_page_has_the_verdict_every_row_of_the_table_and_pictures_that_need_nothing_else() -> None:
    report = whole_report()
    page = as_html(evolve(report, trace="<trace>"))
    failed = as_html(report_of(Errors(0.5, 0.0, float("inf"))))

    for title, lines in sections(report):
        assert escape(title) in page
        assert all(f">{escape(name.strip())}</td>" in page for name, _ in lines)
    assert '<h1 class="ok">ok: all 3 checked rows are within their limits</h1>' in page
    assert page.count("<svg ") == 2
    assert "trace &lt;trace&gt; (" in page
    assert not re.search("<script|<link|<img|src=|href=|url\\(", page)
    assert '<h1 class="bad">not ok: 3 of 3 checked rows are beyond a limit</h1>' in failed
    assert failed.count('<p class="bad">') == 3
    assert failed.count('class="over"') == 6
    assert "<svg " not in as_html(evolve(report_of(), layers=[evolve(x, seconds={}) for x in report_of().layers]))


def test_a_page_of_what_has_not_run_is_a_page() -> None:
    report = evolve(report_of(checked=False), interrupted=True, wall_s=0.0)

    assert "interrupted; the report is what had run until then." in as_html(report)


def test_json_of_whole_layers_has_null_for_what_was_not_compared() -> None:
    values = json.loads(json.dumps(as_json(whole_report()), allow_nan=False))
    swa, c4a, _ = (layer["check"]["worst"] for layer in values["layers"])

    assert swa == {
        "out": 1e-3,
        "lse": 2e-3,
        "projection": 3e-3,
        "key": 0.125,
        "query": 0.375,
        "entry": None,
        "index_key": None,
        "index_query": None,
        "selection": None,
    }
    assert (c4a["entry"], c4a["selection"]) == (0.25, 0.0)
    assert values["layers"][1]["state_bytes_per_sequence"] == 1023 * 1024


def test_the_verdict_counts_the_rows_of_which_selection_left_entries_out() -> None:
    report = whole_report()
    assert report.layers[1].check is not None
    assert "selected entries" not in text_of(report)
    report.layers[1].check.selecting = 2
    assert "rows are within their limits; 2 of them selected entries\n" in text_of(report)


def test_a_selection_without_scores_has_no_error_and_is_said_not_to_be_exercised() -> None:
    report = whole_report()
    c4a = report.layers[1]
    assert c4a.check is not None
    c4a.topk, c4a.selecting_tokens = 512, 2052
    assert "not exercised" not in text_of(report)
    c4a.check.worst = Errors(1e-3, 2e-3, 3e-3, key=0.125, query=0.375, entry=0.25, index_key=0.5)
    line = "selection was not exercised: no token saw more than 512 entries -> serve a prompt of 2,052 tokens"

    assert f"\n{line}\n\none layer of each type " in text_of(report, 120)
    assert "than 512 entries -> --trace long\n" in text_of(evolve(report, trace="generated"))
    assert [x.split()[-2] for x in text_of(report).splitlines() if x.startswith("  selection")] == ["-"]
    assert as_json(report)["layers"][1]["check"]["worst"]["selection"] is None
    c4a.check = None
    assert "not exercised" not in text_of(report)


def test_a_stage_beyond_its_limit_is_named() -> None:
    check = CheckResult(Errors(1.0, 1.0, 1.0, key=1.0, entry=1.0))
    check.add(Errors(key=0.5, entry=1.5), "here")
    check.add(Errors(key=0.75), "there")

    assert (check.rows, check.failed, check.failures) == (2, 1, ["here: entry 1.5"])
    assert check.worst == Errors(key=0.75, entry=1.5)

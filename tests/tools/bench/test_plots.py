"""Pictures are drawn of whatever was measured, and say where and when."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from dsv4attn.errors import ArgumentError
from dsv4attn.tools.bench.cases import KERNELS, LAYER_OPS, PRESETS, CaseSizes, cases_of
from dsv4attn.tools.bench.layer_ops import layer_op_cases
from dsv4attn.tools.bench.plots import check_folder, draw
from dsv4attn.tools.bench.report import run_text
from dsv4attn.tools.bench.result import Run
from dsv4attn.tools.bench.runner import BenchRow
from dsv4attn.tools.bench.scaling import cliffs, scaling_cases
from tests.tools.bench.sample_runs import row, run


def everything() -> Run:
    rows: list[BenchRow] = []
    cases = cases_of([*KERNELS, "step"], list(PRESETS), CaseSizes((8, 64, 256), 64, 64, 64, 3)) + scaling_cases(
        small=True
    )
    for i, case in enumerate(cases):
        facts: dict[str, Any] = {"series": case.series, "x": case.x, "flops": 10**9}
        if case.kernel in ("insert", "quantize", "gather"):
            facts["flops"] = 0
        rows += [row(case.name, by, 50.0 + 7 * i, **facts) for by in ("one", "two")]
        rows.append(row(case.name, "other", 90.0 + 11 * i, is_peer=True, **facts))
    for around in layer_op_cases(LAYER_OPS, small=True):
        rows += [row(around.name, by, 40.0, vs={"other": 2.0}) for by in ("one", "two")]
        rows.append(row(around.name, "other", 80.0, is_peer=True))
    return run(rows, cliffs=tuple(cliffs(rows)))


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Figures, as they are saved."""
    from matplotlib.figure import Figure

    kept: list[Any] = []
    save = Figure.savefig

    def keep(self: Any, *arguments: Any, **options: Any) -> None:
        kept.append(self)
        save(self, *arguments, **options)

    monkeypatch.setattr(Figure, "savefig", keep)
    return kept


def words(figure: Any) -> str:
    from matplotlib.text import Text

    return "\n".join(text.get_text() for text in figure.findobj(Text))


def test_every_kernel_has_its_picture(tmp_path: Path, figures: list[Any]) -> None:
    paths = draw(everything(), tmp_path)

    names = ["decode", "prefill", "prefill-rows", "step", "memory", *LAYER_OPS, "scaling"]
    assert [path.stem for path in paths] == names
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)
    for figure in figures:
        said = words(figure)
        assert "Toy, torch 2.11, Triton 3.6, dsv4attn 0.1.0, 2026-11-20 12:00 UTC" in said
        assert "median of 20" in said
        assert {"one", "two", "other"} <= {*said.split("\n")}


def test_bars_are_as_high_as_the_rates_and_labelled_with_times(tmp_path: Path, figures: list[Any]) -> None:
    values = [row(us=100.0, flops=2 * 10**10), row(by="two", us=25.0, flops=2 * 10**10)]
    draw(run(values), tmp_path)

    (figure,) = figures
    axis = figure.axes[0]
    assert [bar.get_height() for bar in axis.patches] == pytest.approx([200.0, 800.0])
    assert {"100 us", "25.0 us", "b=8"} <= {*words(figure).split("\n")}
    # flops per least time
    assert axis.lines[0].get_ydata()[0] == pytest.approx(2e10 / 1e-5 / 1e12)


def test_each_bar_says_its_speed_by_that_of_a_peer_as_the_table_does(tmp_path: Path, figures: list[Any]) -> None:
    values = run([row(us=100.0, vs={"flash_mla": 1.253}), row(by="flash_mla", us=125.3, is_peer=True)])
    draw(values, tmp_path)
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(run_text(values))

    assert "100 us, 1.25x FlashMLA" in words(figures[0]).split("\n")
    assert "1.25" in console.export_text()


def test_axes_have_names_and_units_and_the_method_is_named(tmp_path: Path, figures: list[Any]) -> None:
    draw(everything(), tmp_path)
    for figure in figures:
        assert "whole calls by `dsv4attn bench`" in words(figure)
        shown = [axis for axis in figure.axes if axis.get_visible()]
        assert all(axis.get_xlabel() for axis in shown)
        assert any(unit in shown[0].get_ylabel() for unit in ("(TFLOP/s)", "(GB/s)", "(us)"))


def test_what_has_no_time_has_no_bar(tmp_path: Path, figures: list[Any]) -> None:
    draw(run([row(), row(by="wrong", us=None, state="wrong")]), tmp_path)

    assert len(figures[0].axes[0].patches) == 1
    assert draw(run([row(us=None, state="wrong")]), tmp_path) == []


def test_cliffs_have_rings(tmp_path: Path, figures: list[Any]) -> None:
    def at(x: int, us: float) -> BenchRow:
        return row(f"batch flash_c4 b={x}", us=us, least=1e-6 * x, series="batch", x=x)

    rows = [at(1, 10), at(2, 11), at(4, 60)]
    draw(run(rows, cliffs=tuple(cliffs(rows))), tmp_path)
    rings = [line for line in figures[0].axes[0].lines if line.get_fillstyle() == "none"]
    assert [list(line.get_xdata()) for line in rings] == [[4]]


def test_a_folder_is_made(tmp_path: Path) -> None:
    check_folder(tmp_path / "a" / "b")
    assert list((tmp_path / "a" / "b").iterdir()) == []


def test_a_folder_that_cannot_be_written_is_an_error_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(ArgumentError, match="a folder that can be written"):
        check_folder(tmp_path / "file" / "below")


def test_without_matplotlib_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ArgumentError, match=r'pip install "dsv4attn\[plot\]"'):
        check_folder(tmp_path)


def test_labels_of_bars_stay_below_the_title_of_their_panel(tmp_path: Path, figures: list[Any]) -> None:
    draw(run([row("index paged b=1 t=1 k=8", "one", vs={"deep_gemm": 1.1})]), tmp_path)

    axis = figures[0].axes[0]
    figures[0].canvas.draw()
    top = axis.get_window_extent().y1
    assert all(text.get_window_extent().y1 <= top for text in axis.texts)
    assert axis.get_xlabel() == "requests (b), tokens (t), index keys (k)"

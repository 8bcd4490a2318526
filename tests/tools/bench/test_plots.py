"""Pictures are drawn of whatever was measured, and say where and when."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from dsv4attn.tools.bench.cases import KERNELS, LAYER_OPS, PRESETS, CaseSizes, cases_of
from dsv4attn.tools.bench.layer_ops import layer_op_cases
from dsv4attn.tools.bench.plots import draw
from dsv4attn.tools.bench.report import run_text
from dsv4attn.tools.bench.result import Run, load
from dsv4attn.tools.bench.runner import BenchRow
from dsv4attn.tools.bench.scaling import cliffs, scaling_cases
from tests.tools.bench.sample_runs import row, run

ROOT = Path(__file__).resolve().parents[3]


def everything() -> Run:
    rows: list[BenchRow] = []
    some = ["flash_c4", "pro_c128", "v41_r1"]
    cases = cases_of([*KERNELS, "step"], some, CaseSizes((8, 64), 64, 64, 64, 3)) + scaling_cases(small=True)
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


@contextmanager
def kept_figures() -> Iterator[list[Any]]:
    """Figures, as they are saved."""
    from matplotlib.figure import Figure

    kept: list[Any] = []
    save = Figure.savefig

    def keep(self: Any, *arguments: Any, **options: Any) -> None:
        kept.append(self)
        save(self, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", keep)
        yield kept


@pytest.fixture
def figures() -> Iterator[list[Any]]:
    with kept_figures() as kept:
        yield kept


RUNS = {
    "of all kinds": lambda: [everything()],
    "near the roofline": lambda: [of_windows_and_pro()],
    "of many batches": lambda: [of_many_batches()],
    "committed": lambda: [committed("decode"), committed("prefill"), committed("around"), committed("scaling")],
}


@pytest.fixture(scope="module")
def drawn_runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, tuple[Path, Any]]]:
    """Files and figures of one of RUNS, by the name of the file; they are drawn once."""

    @cache
    def drawn(name: str) -> dict[str, tuple[Path, Any]]:
        with kept_figures() as kept:
            paths = draw(RUNS[name](), tmp_path_factory.mktemp("pictures"))
        return {path.stem: (path, figure) for path, figure in zip(paths, kept, strict=True)}

    return drawn


@pytest.fixture(params=[pytest.param(name, marks=[pytest.mark.slow] * (name != "near the roofline")) for name in RUNS])
def drawn(request: pytest.FixtureRequest, drawn_runs: Any) -> dict[str, Any]:
    """Figures of each of RUNS by the name of their file."""
    return {name: figure for name, (_, figure) in drawn_runs(request.param).items()}


def words(figure: Any) -> str:
    from matplotlib.text import Text

    return "\n".join(text.get_text() for text in figure.findobj(Text))


@pytest.mark.matrix
def test_every_kernel_has_its_picture(drawn_runs: Any) -> None:
    pictures = drawn_runs("of all kinds")

    assert [*pictures] == ["decode", "prefill", "prefill-rows", "step", "memory", *LAYER_OPS, "scaling"]
    for path, figure in pictures.values():
        assert path.read_bytes().startswith(b"\x89PNG")
        said = words(figure)
        assert "Toy, torch 2.11, Triton 3.6, dsv4attn 0.1.0, 2026-11-20 12:00 UTC" in said
        assert "median of 20" in said
        assert {"one", "two", "other"} <= {*said.split("\n")}


def test_bars_are_as_high_as_the_rates_and_labelled_with_times(tmp_path: Path, figures: list[Any]) -> None:
    values = [row(us=100.0, flops=2 * 10**10), row(by="two", us=25.0, flops=2 * 10**10)]
    draw([run(values)], tmp_path)

    (figure,) = figures
    axis = figure.axes[0]
    assert [bar.get_height() for bar in axis.patches] == pytest.approx([200.0, 800.0])
    assert {"100 us", "25.0 us", "b=8"} <= {*words(figure).split("\n")}
    # flops per least time
    assert axis.lines[0].get_ydata()[0] == pytest.approx(2e10 / 1e-5 / 1e12)


@pytest.mark.matrix
def test_each_bar_says_its_speed_by_that_of_a_peer_as_the_table_does(tmp_path: Path, figures: list[Any]) -> None:
    values = run([row(us=100.0, vs={"flash_mla": 1.253}), row(by="flash_mla", us=125.3, is_peer=True)])
    draw([values], tmp_path)
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(run_text(values))

    said = words(figures[0]).split("\n")
    assert "100 us, 1.25x" in said
    assert any("how many times the speed of FlashMLA" in line for line in said)
    assert "1.25" in console.export_text()


@pytest.mark.matrix
def test_axes_have_names_and_units_and_the_method_is_named(drawn_runs: Any) -> None:
    for _, figure in drawn_runs("of all kinds").values():
        assert "whole calls by `dsv4attn bench`" in words(figure)
        shown = [axis for axis in figure.axes if axis.get_visible()]
        assert all(axis.get_xlabel() for axis in shown)
        assert any(unit in shown[0].get_ylabel() for unit in ("(TFLOP/s)", "(GB/s)", "(us)"))


@pytest.mark.matrix
def test_what_has_no_time_has_no_bar(tmp_path: Path, figures: list[Any]) -> None:
    draw([run([row(), row(by="wrong", us=None, state="wrong")])], tmp_path)

    assert len(figures[0].axes[0].patches) == 1
    assert draw([run([row(us=None, state="wrong")])], tmp_path) == []


@pytest.mark.matrix
def test_cliffs_have_rings(tmp_path: Path, figures: list[Any]) -> None:
    def at(x: int, us: float) -> BenchRow:
        return row(f"batch flash_c4 b={x}", us=us, least=1e-6 * x, series="batch", x=x)

    rows = [at(1, 10), at(2, 11), at(4, 60)]
    draw([run(rows, cliffs=tuple(cliffs(rows)))], tmp_path)
    rings = [line for line in figures[0].axes[0].lines if line.get_fillstyle() == "none"]
    assert [list(line.get_xdata()) for line in rings] == [[4]]


@pytest.mark.matrix
def test_labels_of_bars_stay_below_the_title_of_their_panel(tmp_path: Path, figures: list[Any]) -> None:
    draw([run([row("index paged b=1 t=1 k=8", "one", vs={"deep_gemm": 1.1})])], tmp_path)

    axis = figures[0].axes[0]
    figures[0].canvas.draw()
    top = axis.get_window_extent().y1
    assert all(text.get_window_extent().y1 <= top for text in axis.texts)
    assert axis.get_xlabel() == "requests (b), tokens (t), index keys (k)"


@pytest.mark.matrix
def test_several_peers_are_named_on_the_bars(tmp_path: Path, figures: list[Any]) -> None:
    draw([run([row(us=100.0, vs={"flash_mla": 1.253, "vllm": 2.0})])], tmp_path)
    assert "100 us, 1.25x FlashMLA, 2.00x vLLM" in words(figures[0]).split("\n")


def committed(name: str) -> Run:
    return load(ROOT / "docs" / "bench" / f"{name}.json", "--from")


def of_windows_and_pro() -> Run:
    """Rates close to the roofline, on which labels would run through it, and far from it."""
    rows: list[BenchRow] = []
    for i, (preset, by) in enumerate(product(("flash_swa", "pro_c4", "pro_c128"), ("one", "two", "flash_mla"))):
        for batch, us in ((1, 12.0), (64, 2.1), (256, 1.4)):
            peer = by == "flash_mla"
            vs = {} if peer else {"flash_mla": 1.05 - 0.1 * i}
            facts: dict[str, Any] = {"flops": 3 * 10**8, "least": 1.2e-6, "is_peer": peer, "vs": vs}
            rows.append(row(f"decode {preset} b={batch}", by, us + 0.2 * i, **facts))
    return run(rows)


def of_many_batches() -> Run:
    """Decodes of V4's layers compared with FlashMLA, more than fit the usual width."""
    presets = [name for name, preset in PRESETS.items() if not preset.v41]
    cases = cases_of(["decode", "prefill"], presets, CaseSizes((1, 16, 64, 128, 256), 64, 64, 64, 3))
    return run([row(case.name, by, vs={"flash_mla": 0.97}) for case in cases for by in ("one", "two", "three")])


def box(text: Any) -> tuple[float, float, float, float]:
    extent = text.get_window_extent()
    return extent.x0, extent.y0, extent.x1, extent.y1


def overlap(a: tuple[float, ...], b: tuple[float, ...], pixels: float = 1.0) -> bool:
    return min(a[2], b[2]) - max(a[0], b[0]) > pixels and min(a[3], b[3]) - max(a[1], b[1]) > pixels


def texts_of(figure: Any) -> list[Any]:
    """Texts that are shown: those of an axis that is hidden, of hidden ticks and beyond the limits are not."""
    from matplotlib.text import Text

    figure.canvas.draw()
    shown = [*figure.texts]
    for axis in figure.axes:
        if axis.get_visible():
            ticks = [*axis.get_xticklabels(), *axis.get_yticklabels()]
            limits = axis.get_window_extent().padded(1)
            inside = [t for t in ticks if t.get_visible() and _at_a_tick(t, limits)]
            shown += [*axis.texts, axis.xaxis.label, axis.yaxis.label, axis._left_title, *inside]
    return [text for text in shown if isinstance(text, Text) and text.get_text()]


def _at_a_tick(text: Any, limits: Any) -> bool:
    x, y = text.get_transform().transform(text.get_position())
    return bool(limits.x0 <= x <= limits.x1 or limits.y0 <= y <= limits.y1)


@pytest.mark.matrix
def test_no_text_is_cut_at_an_edge(drawn: dict[str, Any]) -> None:
    for name, figure in drawn.items():
        width, height = figure.canvas.get_width_height()
        for text in texts_of(figure):
            x0, y0, x1, y1 = box(text)
            assert min(x0, y0, width - x1, height - y1) > 2, (name, text.get_text())


@pytest.mark.matrix
def test_no_text_covers_another(drawn: dict[str, Any]) -> None:
    for name, figure in drawn.items():
        boxes = [(text.get_text(), box(text)) for text in texts_of(figure)]
        for (text, a), (other, b) in combinations(boxes, 2):
            assert not overlap(a, b), (name, text, other)


def test_no_line_runs_through_a_label_and_every_line_is_within_the_axis(drawn: dict[str, Any]) -> None:
    for name, figure in drawn.items():
        figure.canvas.draw()
        for axis in figure.axes:
            low, high = axis.get_ylim()
            for line in axis.lines:
                ys = line.get_ydata()
                assert min(ys) >= low, (name, axis.get_title("left"))
                assert max(ys) <= high, (name, axis.get_title("left"))
                path = line.get_transform().transform_path(line.get_path())
                for text in axis.texts:
                    assert not path.intersects_bbox(text.get_window_extent(), filled=False), (name, text.get_text())


@pytest.mark.matrix
def test_the_roofline_of_every_panel_is_drawn(tmp_path: Path, figures: list[Any]) -> None:
    values = of_windows_and_pro()
    draw([values], tmp_path)
    assert len(figures[0].axes) == 3
    for axis in figures[0].axes:
        assert [line.get_ydata()[0] for line in axis.lines] == pytest.approx([250.0] * 3)


@pytest.mark.matrix
def test_speeds_have_a_panel_for_decodes_and_one_for_prompts(tmp_path: Path, figures: list[Any]) -> None:
    decode, prefill = committed("decode"), committed("prefill")
    assert [path.stem for path in draw([decode, prefill], tmp_path)] == ["decode", "prefill", "prefill-rows", "speed"]

    of_decode, of_prefill = figures[-1].axes
    for axis, measured in ((of_decode, decode), (of_prefill, prefill)):
        speeds = [one.vs["flash_mla"] for one in measured.rows if one.vs]
        assert sorted(bar.get_height() for bar in axis.patches) == pytest.approx(sorted(speeds))
        assert [list(line.get_ydata()) for line in axis.lines] == [[1, 1]], "FlashMLA"
        assert axis.get_ylabel() == "times FlashMLA's speed"
        assert axis.get_xlabel()
        assert {f"{speed:.2f}" for speed in speeds} <= {text.get_text() for text in axis.texts}
    assert [text.get_text() for text in of_prefill.get_xticklabels()] == ["bf16 rows\nt=2048", "fp8 pages\nt=2048"] * 2
    said = words(figures[-1])
    assert "NVIDIA H100 80GB HBM3, 2026-11-27. Higher is better." in said
    backends = {one.by for measured in (decode, prefill) for one in measured.rows if not one.is_peer}
    assert {"Decode", "Prefill", *backends} <= {*said.split("\n")}


@pytest.mark.matrix
def test_speeds_of_one_file_have_one_panel(tmp_path: Path, figures: list[Any]) -> None:
    draw([committed("prefill")], tmp_path)
    assert [axis.get_title("left") for axis in figures[-1].axes] == ["Prefill"]


def test_texts_are_measured_in_the_fonts_of_the_settings() -> None:
    from matplotlib import rc_context

    from dsv4attn.tools.bench.plots.sheet import text_width

    usual = text_width("iiiiiiii", 10)
    with rc_context({"font.family": "monospace"}):
        assert text_width("iiiiiiii", 10) > 1.5 * usual
    assert text_width("iiiiiiii", 10) == usual

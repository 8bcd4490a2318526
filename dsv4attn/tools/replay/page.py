"""The report of a replay as one page of HTML with pictures: nothing is loaded, and it fits narrow and wide screens."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from dsv4attn.testing.page import document
from dsv4attn.tools.replay.report import ERRORS, OPERATIONS, SHARES, failures, head, notes, sections, verdict
from dsv4attn.tools.replay.results import LayerReport, Report

_STYLE = """
:root{--ok:#1a7f37;--bad:#c62828;--c0:#0b6bcb;--c1:#b35900;--c2:#6b4fbb}
@media(prefers-color-scheme:dark){:root{--ok:#5fd07f;--bad:#ff8a80;--c0:#6db3f8;--c1:#ffb066;--c2:#b9a3f5}}
h2{margin:0 0 .4rem}h1.ok{color:var(--ok)}h1.bad,p.bad{color:var(--bad)}
.cards{grid-template-columns:repeat(auto-fit,minmax(min(100%,24rem),1fr))}
svg{display:block;width:100%;max-width:100%;height:auto}
svg text{fill:var(--ink);font:12px system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
svg .soft{fill:var(--soft)}svg .track{fill:var(--line)}svg line{stroke:var(--soft)}
.c0{fill:var(--c0)}.c1{fill:var(--c1)}.c2{fill:var(--c2)}svg .over{fill:var(--bad)}
.scrolls{overflow-x:auto}table{border-collapse:collapse;width:100%;font-size:.9rem;overflow-wrap:normal}
th,td{padding:.15rem .5rem;text-align:right;white-space:nowrap;font-variant-numeric:tabular-nums}
th:first-child,td:first-child{text-align:left;white-space:normal;min-width:9rem}tr.title th{padding-top:.8rem}
td.part{padding-left:1.4rem}
tbody tr:not(.title){border-top:1px solid var(--line)}
@media(max-width:30rem){table{font-size:.8rem}th,td{padding:.15rem .2rem}th:first-child,td:first-child{min-width:7rem}
td.part{padding-left:.8rem}}
"""


def as_html(report: Report) -> str:
    """The verdict, failed rows, totals, pictures of errors and times, and the whole table."""
    state = "ok" if report.ok else "bad"
    title = escape(verdict(report).plain)
    pictures = [
        ("Error, share of its limit", _bars(report, _errors(report), limit=1.0, form=".2f")),
        ("Seconds of each operation, one layer of each type", _bars(report, _seconds(report), limit=None, form=".2f")),
    ]
    parts = [
        f'<h1 class="{state}">{title}</h1>',
        *(f'<p class="bad">{escape(line)}</p>' for line in failures(report)),
        *(f"<p>{escape(line)}</p>" for line in head(report)),
        *(f'<p class="soft">{escape(line)}</p>' for line in notes(report)),
        '<div class="cards">',
        *(f'<section class="card"><h2>{name}</h2>{picture}</section>' for name, picture in pictures if picture),
        "</div>",
        f'<section class="card"><h2>One layer of each type</h2><div class="scrolls">{_table(report)}</div></section>',
    ]
    return document(f"dsv4attn run: {verdict(report).plain}", _STYLE, parts)


_Rows = Sequence[tuple[str, Sequence[float | None]]]
"""Names of a picture's rows, and a number for each layer type."""


def _errors(report: Report) -> _Rows:
    """Largest errors as shares of their limits."""

    def share(layer: LayerReport, name: str) -> float | None:
        if layer.check is None or not layer.check.rows:
            return None
        error, limit = getattr(layer.check.worst, name), getattr(layer.check.tolerance, name)
        return error / limit if error is not None and limit else None

    names = {**{name: text.partition(",")[0] for name, text in SHARES.items()}, **dict.fromkeys(ERRORS)}
    rows = [(text or name, [share(layer, name) for layer in report.layers]) for name, text in names.items()]
    return [(name, values) for name, values in rows if any(value is not None for value in values)]


def _seconds(report: Report) -> _Rows:
    rows = [(text, [layer.seconds.get(name) for layer in report.layers]) for name, text in OPERATIONS.items()]
    return [(name, values) for name, values in rows if any(values)]


_WIDTH, _BAR, _LABELS, _NUMBERS = 380, 12, 160, 44
"""Sizes of a picture in units of its view box: its width, the height of a bar, the widths of names and of numbers."""


def _bars(report: Report, rows: _Rows, *, limit: float | None, form: str) -> str:
    """An SVG picture with one bar for each row and layer type. limit: draws a line there; larger numbers are red."""
    numbers = [value for _, values in rows for value in values if value is not None]
    if not numbers:
        return ""
    finite = [value for value in numbers if value < float("inf")]
    longest = max([*finite, limit or 0.0]) or 1.0
    scale = (_WIDTH - _LABELS - _NUMBERS) / longest
    kinds = [layer.kind for layer in report.layers]
    shapes = [
        f'<rect class="c{i % 3}" x="{_LABELS + 70 * i}" y="2" width="10" height="10"/>'
        f'<text x="{_LABELS + 70 * i + 15}" y="12">{escape(kind)}</text>'
        for i, kind in enumerate(kinds)
    ]
    top = 24
    for name, values in rows:
        present = [(i, value) for i, value in enumerate(values) if value is not None]
        height = _BAR * len(present)
        shapes.append(f'<text x="0" y="{top + height / 2 + 4:g}">{escape(name)}</text>')
        for place, (i, value) in enumerate(present):
            y, width = top + _BAR * place, min(value, longest) * scale
            over = limit is not None and not value <= limit
            shapes.append(
                f'<rect class="{"over" if over else f"c{i % 3}"}" x="{_LABELS}" y="{y}" width="{max(width, 1):.1f}" '
                f'height="{_BAR - 2}"><title>{escape(f"{name}, {kinds[i]}: {value:{form}}")}</title></rect>'
                f'<text class="soft" x="{_WIDTH}" y="{y + _BAR - 2}" text-anchor="end">{value:{form}}</text>'
            )
        top += height + 10
    if limit is not None:
        x = _LABELS + limit * scale
        shapes.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="20" y2="{top - 6}" stroke-dasharray="3 3"/>')
    label = escape(", ".join(name for name, _ in rows))
    return f'<svg viewBox="0 0 {_WIDTH} {top}" role="img" aria-label="{label}">{"".join(shapes)}</svg>'


def _table(report: Report) -> str:
    columns = "".join(f"<th>{escape(layer.kind)}</th>" for layer in report.layers)
    lines = [f"<table><thead><tr><th></th>{columns}</tr></thead><tbody>"]
    for title, rows in sections(report):
        lines.append(f'<tr class="title"><th colspan="{len(report.layers) + 1}">{escape(title)}</th></tr>')
        for name, cells in rows:
            numbers = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
            part = ' class="part"' if name.startswith(" ") else ""
            lines.append(f"<tr><td{part}>{escape(name.strip())}</td>{numbers}</tr>")
    return "\n".join([*lines, "</tbody></table>"])

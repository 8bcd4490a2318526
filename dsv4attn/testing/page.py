"""Pages of HTML that need no other file: the frame of every page, and the page of runs of the kit."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

from dsv4attn.core.contract.backend import API_VERSION
from dsv4attn.core.reprs import counted
from dsv4attn.testing.case import Case
from dsv4attn.testing.cases.table import GROUPS
from dsv4attn.testing.conform import STATES, Certificate, Failures, Outcome, environment, versions
from dsv4attn.testing.parity import Parity, cell

OPEN = 3
"""Kinds of failures whose first case is open to begin with."""

_FRAME = """
:root{color-scheme:light dark;--ink:#1b2330;--soft:#5b6675;--line:#dde3ea;--page:#f6f8fa;--card:#fff}
@media(prefers-color-scheme:dark){:root{--ink:#e6ebf2;--soft:#9aa6b5;--line:#2c3644;--page:#10151c;--card:#18202a}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);overflow-wrap:anywhere;
font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:72rem;margin:0 auto;padding:1.2rem 1rem 3rem}
h1{font-size:1.4rem;line-height:1.3;margin:0 0 .6rem}h2{font-size:1.1rem}p{margin:.3rem 0}.soft{color:var(--soft)}
.cards{display:grid;gap:.8rem;margin:1rem 0}
.card{background:var(--card);border:1px solid var(--line);border-radius:.6rem;padding:.8rem 1rem;min-width:0}
"""

_KIT = """
:root{--good:#0b6bcb;--goodbg:#e3f0fc;--bad:#b23c00;--badbg:#ffe7d6;--no:#5b6675;--nobg:#eceff3}
@media(prefers-color-scheme:dark){:root{--good:#7cb8f7;--goodbg:#12304f;--bad:#ffb38a;--badbg:#4a2410;--no:#9aa6b5;
--nobg:#232d39}}
h2{margin:2rem 0 .5rem}
.mono{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;font-size:.86em}
.facts{display:flex;flex-wrap:wrap;gap:.2rem 1.4rem;margin:.8rem 0;font-size:.9rem}.facts b{font-weight:600}
.cards{grid-template-columns:repeat(auto-fit,minmax(16rem,1fr))}
.card h3{margin:0;font-size:1rem}.card p{font-size:.9rem}
.key{display:flex;flex-wrap:wrap;gap:.4rem 1rem;font-size:.88rem;margin:.6rem 0}
.tag{display:inline-block;min-width:4.2em;padding:.1em .5em;border-radius:.4em;text-align:center;white-space:nowrap;
font-size:.86rem;font-variant-numeric:tabular-nums}
.passed{background:var(--goodbg);color:var(--good)}
.failed{background:var(--badbg);color:var(--bad);font-weight:700;outline:2px solid var(--bad)}
.refused,.skipped{background:var(--nobg);color:var(--no)}.refused{border:1px dashed var(--no)}
.group{background:var(--card);border:1px solid var(--line);border-radius:.6rem;margin:.6rem 0;overflow:hidden}
.row{border-top:1px solid var(--line)}.row:first-of-type{border-top:0}
summary{display:grid;grid-template-columns:minmax(0,1fr) auto;gap:.3rem .8rem;align-items:center;padding:.5rem .9rem;
cursor:pointer;list-style:none}
summary::-webkit-details-marker{display:none}summary:hover{background:var(--page)}
summary:focus-visible{outline:2px solid var(--good);outline-offset:-2px}
.name::before{content:"+ ";color:var(--soft)}details[open] .name::before{content:"- "}
.cells{display:flex;gap:.4rem}.cells .tag{min-width:7.4em}
.detail{padding:.1rem .9rem .8rem 1.9rem;font-size:.9rem}.detail dl{margin:.4rem 0 0}
.detail dt{font-weight:600}.detail dd{margin:0 0 .4rem}
@media(max-width:40rem){summary{grid-template-columns:1fr}.cells{flex-wrap:wrap}}
@media print{details{break-inside:avoid}}
"""


def document(title: str, style: str, parts: Iterable[str]) -> str:
    """A whole page.

    title: of the page's window, without marks.
    style: what this page adds to the style of every page.
    parts: what the page shows, as HTML.
    """
    begin = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{_text(title)}</title><style>{_FRAME}{style}</style></head><body><main>"
    )
    return "\n".join([begin, *parts, "</main></body></html>", ""])


def as_html(parity: Parity) -> str:
    """The whole page.

    parity: the outcomes of all backends.
    """
    environment_of_run = {"contract": API_VERSION, **versions(), **environment()}
    facts = [f"<span><b>{_text(name)}</b> {_text(value)}</span>" for name, value in environment_of_run.items()]
    facts.append(f"<span><b>date</b> <time>{_text(parity.date)}</time></span>")
    if parity.chosen:
        facts.append(f"<span><b>filter</b> {_text(parity.chosen)}</span>")
    key = [
        f"{_tag('passed', '0.42')} passed, with that part of its budget",
        f"{_tag('passed', 'same')} passed, equal bits",
        f"{_tag('failed', 'FAIL 3')} failed, with that many budgets",
        f"{_tag('refused', 'refused')} the backend says it cannot",
        f"{_tag('skipped', 'skipped')} nothing to judge here",
    ]
    letters = [f"{_letter(i)} is {_text(name)}" for i, name in enumerate(parity.names)]
    command = "parity" if len(parity.names) > 1 else "conform"
    title = f"dsv4attn {command}: {counted(len(parity.names), 'backend')}, {_ran(parity)}"
    said = (
        "How much of its error budget each backend of DeepSeek-V4 attention used, case by case, against an oracle in "
        "float64 that shares no code with any of them. Budgets follow from the formats."
    )
    parts = [
        f"<h1>{_text(title)}</h1>",
        f'<p class="soft">{said}</p>',
        f'<div class="facts">{"".join(facts)}</div>',
        f'<div class="cards">{"".join(_card(i, c) for i, c in enumerate(parity.certificates))}</div>',
        "<h2>Cases</h2>",
        f'<p class="key">{"".join(f"<span>{entry}</span>" for entry in key)}</p>',
        f'<p class="soft">In each row, {", ".join(letters)}. Tap a case for its clauses, reasons and numbers.</p>',
        *_groups(parity),
    ]
    return document(title, _KIT, parts)


def _text(value: object) -> str:
    return html.escape(str(value))


def _ran(parity: Parity) -> str:
    ran, total = len(parity.rows), len(parity.cases)
    shown = f"{ran} of {total} cases" if ran < total else f"{total} cases"
    return f"interrupted: {shown}" if parity.interrupted else shown


def _letter(i: int) -> str:
    return chr(ord("A") + i) if i < 26 else f"no. {i + 1}"


def _tag(state: str, text: str) -> str:
    return f'<span class="tag {state}">{_text(text)}</span>'


def _card(i: int, certificate: Certificate) -> str:
    subject, worst = certificate.subject, certificate.worst
    owner = f"{subject.distribution} {subject.version}".strip() or "not registered"
    state, verdict = ("passed", "keeps the contract") if certificate.ok else ("failed", "BREAKS the contract")
    if not certificate.executed:
        verdict = "PROVES nothing"
    elif certificate.interrupted:
        verdict = f"INTERRUPTED: {len(certificate.outcomes)} of {certificate.asked} cases ran"
    counts = ", ".join(f"{n} {s}" for s in STATES if (n := len(certificate.of(s))))
    near = ""
    if worst is not None and worst.measure is not None:
        near = f"<p>nearest to its budget: {_text(worst.measure.shown)} in {_text(worst.case.name)}</p>"
    return (
        f'<section class="card"><h3>{_letter(i)}: {_text(subject.label)}</h3>'
        f"<p>{_tag(state, verdict)}</p>"
        f'<p>{_text(counts)}</p>{near}<p class="soft">{_text(owner)}<br>{_text(subject.device)}: '
        f"{_text(subject.facts)}<br>{certificate.seconds:.0f} s</p></section>"
    )


Row = tuple[Case, "list[Outcome | None]"]


def _groups(parity: Parity) -> Iterable[str]:
    """Failed cases first, equal failures together; then the others under the clause they name first."""
    rows = [*parity.rows]
    of_case = {case.name: (case, outcomes) for case, outcomes in rows}
    failures = Failures.grouped(o for _, outcomes in rows for o in outcomes if o is not None)
    # a case that failed in two ways is listed under the first
    shown: set[str] = set()
    for number, group in enumerate(failures):
        names = [n for n in dict.fromkeys(o.case.name for o in group.outcomes) if n not in shown]
        shown.update(names)
        if names:
            title = f"{counted(len(names), 'case')}, first {group.first.case.name}"
            said = f'<p class="soft">{_text(group.first.message)}</p>'
            group_rows = [of_case[name] for name in names]
            yield _section("Failed", title, group_rows, parity, said, opened=1 if number < OPEN else 0)
    for letter, title in GROUPS.items():
        group_rows = [row for row in rows if row[0].clauses[0][0] == letter and row[0].name not in shown]
        if group_rows:
            yield _section(letter, title, group_rows, parity)


def _section(head: str, title: str, rows: Sequence[Row], parity: Parity, said: str = "", *, opened: int = 0) -> str:
    """A heading and its cases, of which the first ones are open."""
    cases = "".join(_case(*row, parity, opened=i < opened) for i, row in enumerate(rows))
    return f'<h2>{_text(head)} <span class="soft">{_text(title)}</span></h2>{said}<div class="group">{cases}</div>'


def _case(case: Case, outcomes: Sequence[Outcome | None], parity: Parity, *, opened: bool) -> str:
    cells = "".join(
        _tag(o.state if o else "skipped", f"{_letter(i)} {cell(o)}" if len(outcomes) > 1 else cell(o))
        for i, o in enumerate(outcomes)
    )
    detail = "".join(_detail(name, o) for name, o in zip(parity.names, outcomes, strict=True) if o is not None)
    return (
        f'<details class="row"{" open" if opened else ""}><summary><span class="name mono">{_text(case.name)}</span>'
        f'<span class="cells">{cells}</span></summary><div class="detail"><p>{_text(case.says)}</p>'
        f'<p class="soft">{_text(case.area.value)}; clauses {_text(", ".join(case.clauses))}</p>'
        f"<dl>{detail}</dl></div></details>"
    )


def _detail(name: str, outcome: Outcome) -> str:
    said = outcome.state
    if outcome.measure is not None and outcome.measure.budget:
        said += f": error {outcome.measure.error:.3g} of a budget of {outcome.measure.budget:.3g}"
    elif outcome.measure is not None:
        said += ": equal bits"
    if outcome.without_lse:
        said += ", lse not judged"
    message = f"<br>{_text(outcome.message)}" if outcome.message else ""
    return f'<dt class="mono">{_text(name)}</dt><dd>{_text(said)} ({outcome.seconds:.2f} s){message}</dd>'

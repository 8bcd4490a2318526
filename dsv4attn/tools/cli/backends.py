"""`dsv4attn backends`: lists the installed backends, with their states on this machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click
from attrs import asdict

from dsv4attn.config import AUTO, PHASES, Settings, load_settings
from dsv4attn.core.contract.problem import Problem
from dsv4attn.core.model.geometry import ModelGeometry
from dsv4attn.errors import did_you_mean
from dsv4attn.tools.cli import print_json
from dsv4attn.tools.cli.common import console, grid, reason_json, simple_table
from dsv4attn.tools.cli.options import JSON

if TYPE_CHECKING:
    from rich.table import Table

    from dsv4attn.core.contract.device import DeviceFacts
    from dsv4attn.plugins import PluginRegistry
    from dsv4attn.selection import Selection

_STYLES = {"automatic": "green", "available": "", "unavailable": "yellow", "denied": "dim", "absent": "yellow"}
MODEL = "flash"
"""The model whose layers the backends are asked about."""


@click.command()
@JSON
def backends(*, as_json: bool) -> None:
    """List the backends, and which of them run on this machine.

    Every backend is asked about every kind of layer of DeepSeek-V4-Flash, in decode and prefill. `dsv4attn explain`
    asks about one problem. The states are:

    \b
    automatic    chosen if the user names no backend
    available    runs here if the user names it
    unavailable  cannot run here; the reasons are shown
    broken       raised an error, or gave an answer of a wrong type
    failed       its plugin cannot be used; `dsv4attn doctor` has the traceback
    denied       left out by the configuration
    absent       named by the configuration, but not installed

    \b
    Exit codes:
      0    the list was printed, whatever the states
      2    bad input
    """  # noqa: D301 - click wants the character
    from dsv4attn.core.contract.device import DeviceFacts
    from dsv4attn.selection import registry_for

    settings, device = load_settings(), DeviceFacts.here()
    registry = registry_for(settings)
    phases = automatic(registry, device)
    rows = listed(registry, device, phases)
    if as_json:
        requested = {phase: settings.request(phase).value for phase in phases}
        chosen = {phase: s.chosen.info.name if s.chosen else None for phase, s in phases.items()}
        facts = {"device": asdict(device), "request": requested, "automatic": chosen}
        print_json({"ok": True, **facts, "backends": rows})
        return
    requests = {phase: settings.request(phase) for phase in phases}
    request_lines = merged({p: f"{a.value}  ({a.source}){_absent(a.value, registry)}" for p, a in requests.items()})
    verdicts = merged({phase: selection.verdict for phase, selection in phases.items()})
    from rich.padding import Padding

    wide = max(len(name) for name in ("automatic", *(row["name"] for row in rows)))
    out = console()
    out.print(grid([("device", [str(device)]), ("request", request_lines), ("automatic", verdicts)], wide=wide))
    out.print(Padding(_table(rows, wide), (0, 0, 0, 1)))
    styles = [_STYLES.get(row["state"], "red") for row in rows]
    # a reason that several backends have is said once
    firsts: dict[tuple[str, ...], str] = {}
    whys = [(row["name"], _why(row)) for row in rows]
    whys = [(n, why if firsts.setdefault(tuple(why), n) == n else [f"as {firsts[tuple(why)]}"]) for n, why in whys]
    out.print(grid(whys, styles, wide=wide))


def automatic(registry: PluginRegistry, device: DeviceFacts) -> dict[str, Selection]:
    """The automatic choice on a device for each phase of a released model."""
    from dsv4attn.selection import explain

    geometry = ModelGeometry.preset(MODEL)
    problems = {phase: [Problem.of(geometry, kind, phase) for kind in geometry.kinds] for phase in PHASES}
    return {
        phase: explain(of_phase, device=device, settings=Settings(), registry=registry)
        for phase, of_phase in problems.items()
    }


def listed(registry: PluginRegistry, device: DeviceFacts, phases: Mapping[str, Selection]) -> list[dict[str, Any]]:
    """Every backend, and every plugin that cannot be used, as JSON values."""
    rows = []
    for i, (name, registration) in enumerate(registry.backends.items()):
        candidates = [selection.trace[i] for selection in phases.values()]
        states = {candidate.state for candidate in candidates}
        reasons = list(dict.fromkeys(reason for candidate in candidates for reason in candidate.reasons))
        state = "unavailable" if reasons else "available"
        state = "automatic" if "chosen" in states else state
        state = "broken" if "broken" in states else state
        notes = [
            c.lines[0] if c.state == "broken" else c.note for c in candidates if c.state in ("broken", "not native")
        ]
        rows.append(
            {
                "name": name,
                "distribution": registration.distribution,
                "version": registration.version,
                "state": state,
                "native": device.matches(registration.info.native),
                "runnable": state in ("automatic", "available"),
                "reasons": [reason_json(reason) for reason in reasons],
                "note": notes[0] if notes else registration.info.summary,
            }
        )
    for failure in registry.failures:
        if failure.stage == "built-in":
            continue
        reason = {"code": failure.stage.upper(), "actual": failure.error, "allowed": "", "cure": failure.cure}
        rows.append(
            {
                "name": failure.plugin,
                "distribution": failure.distribution,
                "version": failure.version,
                "state": failure.stage if failure.stage in ("denied", "absent") else "failed",
                "native": None,
                "runnable": False,
                "reasons": [{**reason, "text": failure.summary}],
                "note": failure.summary,
            }
        )
    return rows


def merged(phases: Mapping[str, str]) -> list[str]:
    """One line for each phase, or one for both phases if their texts are equal."""
    if len(set(phases.values())) == 1:
        phases = {" and ".join(phases): next(iter(phases.values()))}
    return [f"{phase}: {text}" for phase, text in phases.items()]


def _absent(request: str, registry: PluginRegistry) -> str:
    """A note for a requested name that no backend has, else ""."""
    if request == AUTO or request in registry.backends:
        return ""
    return f": no backend has this name, so every call is refused{did_you_mean(request, registry.backends)}"


def _table(rows: list[dict[str, Any]], wide: int) -> Table:
    from rich.text import Text

    table = simple_table()
    table.add_column("backend", min_width=wide, no_wrap=True)
    for column in ("state", "native", "runs", "from"):
        table.add_column(column, overflow="fold")
    marks = {True: "yes", False: "no", None: ""}
    for row in rows:
        style, owner = _STYLES.get(row["state"], "red"), f"{row['distribution']} {row['version']}".strip()
        name, state = Text(row["name"], style="bold"), Text(row["state"], style=style)
        table.add_row(name, state, marks[row["native"]], marks[row["runnable"]], Text(owner))
    return table


def _why(row: dict[str, Any]) -> list[str]:
    """Reasons, or one sentence."""
    wide = max((len(reason["code"]) for reason in row["reasons"]), default=0)
    lines = [f"{reason['code']:<{wide}}  {reason['text']}" for reason in row["reasons"] if reason["allowed"]]
    return lines or [row["note"]]

"""`dsv4attn explain`: shows which backend would run a problem, and the reasons against the others."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click
from attrs import asdict, evolve

from dsv4attn.config import AUTO, PHASES, load_settings, parse_request
from dsv4attn.core.contract.devices import DEVICES
from dsv4attn.core.contract.problem import Problem
from dsv4attn.errors import ArgumentError, NoBackendError
from dsv4attn.tools.cli import FAILED, OK, complete, print_json
from dsv4attn.tools.cli.common import console, device_facts, epilog, geometry_of, grid, reason_json, with_layouts
from dsv4attn.tools.cli.options import JSON, MODEL, choice, flag, integer, options, text

if TYPE_CHECKING:
    from dsv4attn.core.contract.device import DeviceFacts
    from dsv4attn.core.model.geometry import ModelGeometry
    from dsv4attn.selection import Selection

_DTYPES = ("e4m3fn", "e4m3fnuz", "bfloat16", "float32")
_RECORDS = {
    "584/584": ("fp8_ds_mla", "fp8_ds_mla"),
    "528/528": ("v41_fp8", "v41_fp8"),
    "528/288": ("v41_fp8", "v41_fp4"),
    "384/384": ("v4_nvfp4", "v4_nvfp4"),
}
"""Records of both caches by their bytes."""
_PLAIN = next(iter(_RECORDS))
_STYLES = {"chosen": "green", "supported": "", "not native": "", "refused": "yellow", "broken": "red"}


@click.command(epilog=epilog(DEVICES))
@options(
    text(
        "--device",
        help="Device, such as h200, mi300x, sm_90 or cpu. All names are below.  [default: the device of this machine]",
        shell_complete=complete.devices,
    ),
    MODEL,
    text(
        "--layer",
        metavar="KIND",
        help="Kind of layer: swa, c4a or c128a.  [default: c4a, or the kind that has --ratio]",
        shell_complete=complete.layers,
    ),
    integer(
        "--ratio",
        least=0,
        help="Tokens of an entry in layers of V4.1: 0, 1 or 2. 0 is swa.  [default: that of the kind]",
    ),
    choice("--phase", words=PHASES, default="decode", help="Phase of the call."),
    integer("--heads", help="Query heads on this device.  [default: the model's]"),
    integer("--topk", least=0, help="Entries that the indexer selects.  [default: the model's]"),
    integer("--page-size", "swa_page_size", default=64, help="Records of a page of the window cache."),
    integer(
        "--compressed-page-size",
        help="Records of a page of the compressed cache.  [default: the entries of 256 tokens]",
    ),
    choice("--dtype", words=_DTYPES, default="e4m3fn", help="Element type of both caches."),
    choice(
        "--records",
        words=tuple(_RECORDS),
        default=_PLAIN,
        help="Bytes of a record of the window cache and of the compressed cache.",
    ),
    choice("--q-dtype", words=("bfloat16", "float32"), default="bfloat16", help="Dtype of the queries."),
    integer(
        "--max-model-len",
        default=1_048_576,
        show_default=False,
        help="Tokens of the longest sequence.  [default: 1,048,576]",
    ),
    flag("--no-sink", help="The layer has no sinks."),
    integer("--query-len", default=1, help="Query tokens of a request in a decode."),
    integer(
        "--window-columns",
        least=0,
        default=0,
        show_default=False,
        help="Columns of a row of window slots.  [default: the window]",
    ),
    flag("--capture", help="The call is captured in a graph."),
    flag("--deterministic", help="The bits of a token must not depend on the rest of the batch."),
    flag("--lse", help="The call also returns the log-sum-exp."),
    text(
        "--backend",
        help="Backend to ask.  [default: the variable DSV4ATTN_BACKEND, the configuration, the automatic choice]",
        shell_complete=complete.requests_of_backends,
    ),
    JSON,
)
@click.pass_context
def explain(
    ctx: click.Context,
    /,
    *,
    device: str | None,
    model: str,
    layer: str | None,
    ratio: int | None,
    phase: str,
    records: str,
    no_sink: bool,
    backend: str | None,
    as_json: bool,
    **facts: Any,  # noqa: ANN401 - what `Problem.of` takes
) -> None:
    """Say which backend would run a problem, and why not the others.

    Nothing is launched, and the device need not be here. The packages of a device that is only described are taken to
    be installed. A device that only a plugin knows has the name that the plugin gives it. For layers of DeepSeek-V4.1
    use --model v4.1-flash with --ratio and --records. Window-only layers have the first of the two records.

    \b
    Exit codes:
      0    a backend was chosen
      1    no backend can run the problem, or two are equally good
      2    bad input
    """  # noqa: D301 - click wants the character
    from dsv4attn.selection import explain as explained
    from dsv4attn.selection.build import check_options

    geometry = geometry_of(model)
    kind, ratio = _kind(geometry, layer, ratio)
    if records != _PLAIN and facts["dtype"] != "e4m3fn":
        raise click.UsageError(f"--records {records} say the type: leave out --dtype {facts['dtype']}")
    problem = Problem.of(geometry, kind, phase, compress_ratio=ratio, sink=not no_sink, **facts)
    problem = _with_records(problem, records)
    settings = load_settings()
    _check_backends(backend)
    selection = explained(problem, backend=backend, device=_device(device), settings=settings)
    if selection.request.source == "argument" and "=" in (backend or ""):
        selection = evolve(selection, request=evolve(selection.request, source=f"argument {backend}"))
    if selection.chosen is not None:
        check_options(selection.chosen.info, settings)
    if as_json:
        print_json(_as_json(selection))
    else:
        _show(selection)
    ctx.exit(FAILED if selection.chosen is None else OK)


def _check_backends(backend: str | None) -> None:
    """Raise UnknownNameError for a name in `--backend` that no backend and no failed plugin has."""
    from dsv4attn.selection import registered

    for name in parse_request(backend or "", "argument backend").values():
        if name != AUTO:
            with suppress(NoBackendError):  # the trace has the failure of its plugin
                registered(name)


def _kind(geometry: ModelGeometry, layer: str | None, ratio: int | None) -> tuple[str, int | None]:
    """Kind and ratio of the layers that --layer and --ratio mean; 0 is the ratio of window-only layers."""
    kinds = {sizes.compress_ratio: sizes.kind.value for sizes in geometry.distinct_layers if sizes.has_entries}
    if ratio is not None and ratio not in (0, *kinds):
        expected = f"one of {[0, *sorted(kinds)]}, the ratios of {geometry.name}"
        raise ArgumentError("--ratio", expected=expected, actual=ratio)
    if ratio is not None and layer not in (None, "swa" if ratio == 0 else kinds[ratio]):
        raise click.UsageError(f"--ratio {ratio} is not of {layer} layers of {geometry.name}: leave out --layer")
    if ratio is not None:
        return ("swa", None) if ratio == 0 else (kinds[ratio], ratio)
    kind = layer or "c4a"
    ratios = sorted(ratio for ratio, name in kinds.items() if name == kind)
    if len(ratios) > 1:
        expected = f"one of {ratios}, the ratios of the {kind} layers of {geometry.name}"
        raise ArgumentError("--ratio", expected=expected, actual="none", hint=f"add --ratio {ratios[0]}")
    return kind, None


def _with_records(problem: Problem, records: str) -> Problem:
    """The problem with caches of these records, in the first arrangement that each has."""
    if records == _PLAIN:
        return problem
    from dsv4attn.core.cache.layout import KVCacheLayout

    return with_layouts(problem, *map(KVCacheLayout.of_record, _RECORDS[records]))


def _device(name: str | None) -> DeviceFacts:
    """Facts of the named device, or of this machine's own."""
    from dsv4attn.core.contract.device import DeviceFacts

    return DeviceFacts.here() if name is None else device_facts(name)


def _assumed(device: DeviceFacts) -> str:
    """A note for a described GPU whose architecture is not in the table of devices, else ""."""
    is_listed = any(device.arch == listed.arch for listed in DEVICES)
    if device.present or is_listed or device.kind not in {listed.kind for listed in DEVICES}:
        return ""
    return "unknown architecture, served by the generic row of each backend"


def _as_json(selection: Selection) -> dict[str, Any]:
    return {
        "ok": selection.chosen is not None,
        "chosen": None if selection.chosen is None else selection.chosen.info.name,
        "verdict": selection.verdict,
        "phase": selection.problems[0].phase,
        "problem": str(selection.problems[0]),
        "device": asdict(selection.device),
        "assumed": _assumed(selection.device),
        "request": {"value": selection.request.value, "source": selection.request.source},
        "candidates": [
            {
                "name": c.name,
                "from": c.owner,
                "state": c.state,
                "reasons": [reason_json(reason) for reason in c.reasons],
                "note": c.note,
                "ways": list(c.ways),
            }
            for c in selection.trace
        ],
        "layer_parts": selection.layer_parts,
        "reference_ops": list(selection.reference_ops) if selection.replaced else [],
        "failures": [asdict(failure) for failure in selection.failures],
        "ignored": list(selection.ignored),
    }


def _show(selection: Selection) -> None:
    """Print the trace of a selection, as exceptions have it, folded to the width of the terminal."""
    out = console()
    out.print(selection.verdict, style="bold green" if selection.chosen else "bold red", soft_wrap=False)
    rows = selection.rows
    if assumed := _assumed(selection.device):
        rows[1] = ("device", [*rows[1][1], assumed])
    styles = ["", "", ""] + [_STYLES.get(c.state, "") for c in selection.trace]
    around = [""] * (bool(selection.layer_parts) + bool(selection.replaced))
    out.print(grid(rows, styles + around + ["red"] * len(selection.failures)))

"""Functions that commands share: names of models and devices, and output of facts and reasons as text and JSON."""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any, TextIO, cast

import click
from attrs import asdict, evolve

from dsv4attn.config import AUTO, PHASES, load_settings, parse_request
from dsv4attn.core.cache.key_records import KEY_RECORDS
from dsv4attn.core.contract.devices import DEVICES, KnownDevice, described, named_by_number, unknown
from dsv4attn.core.contract.problem import CacheFacts, Problem, Reason
from dsv4attn.core.model.geometry import LayerKind, ModelGeometry, is_path
from dsv4attn.errors import ArgumentError, NoBackendError, UnknownNameError
from dsv4attn.tools.cli import BAD_INPUT

if TYPE_CHECKING:
    import torch
    from rich.console import Console
    from rich.table import Table

    from dsv4attn.core.cache.layout import KVCacheLayout
    from dsv4attn.core.contract.backend import Backend
    from dsv4attn.core.contract.device import DeviceFacts

_ANY = "any sm_* and gfx* is taken too; `nvidia-smi --query-gpu=compute_cap --format=csv` and `rocminfo` say which"
_MAKERS = {
    "nvidia": "of NVIDIA, name a card (h200, rtx4090) or an architecture (sm_90): any sm_* is taken",
    "amd": "of AMD, name a card (mi300x, rx9070) or an architecture (gfx942): any gfx* is taken",
    "intel": "of Intel, name xpu",
}
"""Hints for the name of a maker in place of a device."""
COMPILED_FOR = tuple(device for device in DEVICES if device.kind in ("cuda", "hip"))
"""Devices that `compile` has targets for. Kernels for Intel are compiled at their first launch, on the device."""
RECORDS = tuple(name for name in KEY_RECORDS if name != "fp8_ds_mla")
"""Records that `--dtype` takes. That of 584 bytes has the names of its element types."""
_ENDLESS = 10_000
"""Columns of a console that is a pipe."""


def geometry_of(model: str) -> ModelGeometry:
    """The model of a preset's name, or of a config.json or the folder that holds it."""
    return ModelGeometry.from_config(model) if is_path(model) else ModelGeometry.preset(model)


def longest_context(geometry: ModelGeometry, asked: int | None, default: int) -> int:
    """Tokens of the longest sequence: `--max-model-len`, or a default. Raises ArgumentError beyond the model's own."""
    longest = geometry.max_position
    if asked is not None and asked > longest:
        expected = f"at most {longest}, the longest context of {geometry.name}"
        raise ArgumentError("--max-model-len", expected=expected, actual=asked)
    return asked or min(default, longest)


def layouts_of(geometry: ModelGeometry, dtype: str) -> tuple[KVCacheLayout, KVCacheLayout]:
    """Layouts of window and compressed caches, by an element type or one of `RECORDS`."""
    import torch

    from dsv4attn.core.cache.layout import Fp8Format, KVCacheLayout

    dims = geometry.head_dim - geometry.rope_dim, geometry.rope_dim
    if dtype in RECORDS:
        window = KEY_RECORDS[dtype].window_record or dtype
        return KVCacheLayout.of_record(window, *dims), KVCacheLayout.of_record(dtype, *dims)
    if dtype in tuple(Fp8Format):
        layout = KVCacheLayout.fp8_ds_mla(*dims, fp8_format=Fp8Format(dtype))
    else:
        layout = KVCacheLayout.rows(*dims, dtype=getattr(torch, dtype))
    return layout, layout


def with_layouts(problem: Problem, window: KVCacheLayout, entries: KVCacheLayout) -> Problem:
    """The problem with caches of these layouts, on pages of the same sizes."""
    swa, compressed = problem.swa, problem.compressed
    return evolve(
        problem,
        swa=CacheFacts.of(window, swa.page_size),
        compressed=compressed and CacheFacts.of(entries, compressed.page_size),
    )


def device_facts(name: str) -> DeviceFacts:
    """Facts of a device by name. If this machine has such a device, they are its own facts.

    sm_90a and sm_120f, which compilers use for features of one architecture or family, mean that architecture. A name
    that is not in the table of devices may be one that the backend of an installed plugin is native to. For an unknown
    name only close names of the same family are suggested: V100 is not a misspelt H100.
    """
    from dsv4attn.core.contract.device import DeviceFacts

    try:
        return DeviceFacts.here_or_named(re.sub(r"^(\s*sm_?\d+)[af]\s*$", r"\1", name, flags=re.IGNORECASE))
    except UnknownNameError as error:
        of_plugins = devices_of_plugins()
        if facts := _plugin_device(name.strip().lower(), of_plugins):
            return facts
        lower = re.sub(r"[\s_-]", "", name.lower())
        maker = next((line for word, line in _MAKERS.items() if lower.startswith(word)), "")
        others = [maker or _ANY]
        if of_plugins:
            listed = ", ".join(f"{pattern} ({owner})" for pattern, owner in of_plugins.items())
            others.append(f"devices of installed plugins: {listed}")
        near = _family(lower, error.known) or get_close_matches(name.strip().lower(), of_plugins, n=1, cutoff=0.8)
        raise unknown("device", name, DEVICES, others, near=near) from None


def devices_of_plugins() -> dict[str, str]:
    """Kinds and architectures, or shell patterns of them, that only backends of plugins are native to, with the owners.

    Names of the table of devices, and any sm_* and gfx*, are left out.
    """
    from dsv4attn.plugins import BUILT_IN
    from dsv4attn.selection import registry_for

    listed = {name for device in DEVICES for name in (device.kind, *device.spellings)}
    owners: dict[str, str] = {}
    for name, entry in registry_for(load_settings()).backends.items():
        if name not in BUILT_IN:
            names = (n for n in entry.info.native if n not in listed and not re.match(r"sm_|gfx|\*", n))
            owners |= {n: owners.get(n, entry.owner) for n in names}
    return owners


def _plugin_device(name: str, of_plugins: Mapping[str, str]) -> DeviceFacts | None:
    """Facts of a device that a plugin's backend is native to: read off this machine if it has such a device."""
    from dsv4attn.core.contract.device import DeviceFacts, version_of

    pattern = next((pattern for pattern in of_plugins if fnmatchcase(name, pattern.lower())), None)
    if pattern is None:
        return None
    described_facts = DeviceFacts(name, name, f"of {of_plugins[pattern]}", version_of("torch"), present=False)
    here = (facts for facts in DeviceFacts.all_here() if name in (facts.kind, facts.arch))
    return next(here, described_facts)


def _family(name: str, names: Iterable[str]) -> list[str]:
    """Names of devices that may be meant: equally long with the same letters in front, or beginning with the name."""
    if numbered := named_by_number(name, names):
        return numbered
    letters = re.split(r"\d", name)[0]
    near = [
        n for n in names if re.split(r"\d", n)[0].rstrip("_") == letters and (name == letters or len(n) == len(name))
    ]
    if name == letters and not near:
        near = get_close_matches(name, names, n=1, cutoff=0.8)
    kinds = {device.kind for device in DEVICES for near_name in near if near_name in device.spellings}
    return near if len(kinds) == 1 else []


def require_torch(ctx: click.Context) -> None:
    """End a command with exit code 2 and one line if torch cannot be imported."""
    try:
        import torch  # noqa: F401
    except (ImportError, OSError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        missing = isinstance(error, ModuleNotFoundError) and error.name == "torch"
        why = "which is not installed" if missing else f"which cannot be imported: {lines[0]}"
        problem = click.ClickException(f"`{ctx.command_path}` needs torch, {why} -> `dsv4attn doctor` says what to do")
        problem.exit_code = BAD_INPUT  # type: ignore[misc]
        raise problem from None


def check_matplotlib(otherwise: str = "") -> None:
    """Raise ArgumentError unless matplotlib can be imported. otherwise: what to do without it, for the hint."""
    try:
        import matplotlib as mpl  # noqa: F401
    except ImportError as error:
        hint = f'pip install "dsv4attn[plot]"{otherwise}'
        raise ArgumentError("--plot", expected="matplotlib", actual="no such package", hint=hint) from error


def check_folder(folder: Path, what: str, hint: str = "") -> None:
    """Raise ArgumentError unless files can be written into a folder. One that is missing is not made."""
    try:
        with TemporaryFile(dir=next(part for part in (folder, *folder.parents) if part.exists())):
            pass
    except OSError as error:
        actual = f"{folder}: {error.strerror}"
        raise ArgumentError(what, expected="one that can be written", actual=actual, hint=hint) from error


def check_request(backend: str | None) -> None:
    """Raise for a name in `--backend` that no backend has, and for a plugin that failed. Nothing of torch is imported.

    backend: NAME, "auto", or "decode=NAME,prefill=NAME"; None: nothing is named.
    """
    from dsv4attn.selection import registered

    for name in parse_request(backend, "argument backend").values() if backend is not None else ():
        if name != AUTO:
            registered(name)


def chosen_backend(
    name: str | None,
    options: Mapping[str, str],
    geometry: ModelGeometry,
    kinds: Iterable[LayerKind],
    device: torch.device | str = "cpu",
    **facts: Any,  # noqa: ANN401 - those of Problem.of
) -> Backend:
    """The backend that runs these layers on a device: the named one, else that of the settings or of selection.

    options: options of that backend. facts: arguments of `Problem.of` that differ from the model.
    """
    from dsv4attn.selection import load_backend, resolve, select_backend
    from dsv4attn.selection.build import check_reference_ops

    layers = [layer for kind in kinds for layer in geometry.layers_of_kind(kind)]
    problems = [Problem.of(layer, phase=phase, **facts) for phase in PHASES for layer in layers]
    check_reference_ops(load_settings(), problems)
    if name is not None and name != AUTO and "=" not in name:
        _check_named(name, problems, device)
    chosen = {
        resolve([p for p in problems if p.phase == phase], backend=name, device=device).require().info.name
        for phase in PHASES
    }
    if len(chosen) == 1:
        return load_backend(*chosen, **options)
    if options:
        actual = f"{' and '.join(sorted(chosen))} sharing the work"
        raise ArgumentError("--option", expected="one backend", actual=actual, hint="set options in dsv4attn.toml")
    return select_backend(*problems, backend=name, device=device)


def _check_named(name: str, problems: Sequence[Problem], device: torch.device | str) -> None:
    """Check that a backend that the command line names runs the problems.

    Raises UnknownNameError for a name that no backend has, and NoBackendError with the cures first. What other backends
    say is left out: `dsv4attn explain` shows it.
    """
    from dsv4attn.selection import explain, registered, registry_of

    registered(name)
    for phase in PHASES:
        of_phase = [problem for problem in problems if problem.phase == phase]
        selection = explain(of_phase, backend=name, device=device, registry=registry_of(name))
        reasons = next(candidate.reasons for candidate in selection.trace if candidate.name == name)
        if selection.chosen is None and reasons:
            cures = ", then ".join(dict.fromkeys(reason.cure for reason in reasons if reason.cure))
            lines = [f"backend {name!r} cannot run this call{f' -> {cures}' if cures else ''}"]
            lines += [f"{reason.code}: {reason.actual}, needs {reason.allowed}" for reason in reasons]
            raise NoBackendError("\n  ".join([*lines, "`dsv4attn explain` shows what other backends say"]))


def console() -> Console:
    """Standard output without markup: brackets in an error message stay as they are.

    In a pipe or a file no table is cut. Lines are folded at COLUMNS, or not at all without it. No line ends with
    blanks. Characters that the encoding lacks are replaced.
    """
    from rich.console import Console

    piped, columns = not sys.stdout.isatty(), os.environ.get("COLUMNS", "").isdigit()

    class Whole(Console):
        def print(self, *objects: Any, **options: Any) -> None:  # noqa: ANN401 - rich's own
            if piped:
                for shown in objects:
                    _uncut(shown, fold=columns)
            super().print(*objects, **{"crop": False, **options})

    if isinstance(sys.stdout, io.TextIOWrapper):
        # names of files may have bytes that are no letters
        sys.stdout.reconfigure(errors="backslashreplace")
    plain: dict[str, Any] = {"highlight": False, "markup": False, "emoji": False}
    # a text-only stream has no encoding
    stream, encoding = sys.stdout, sys.stdout.encoding or "utf"
    if not encoding.lower().startswith("utf"):
        stream = cast("TextIO", _Changed(stream, partial(_plain, encoding=encoding)))
    if columns or not piped:
        return Whole(**plain, file=None if stream is sys.stdout else stream)
    return Whole(**plain, width=_ENDLESS, file=cast("TextIO", _Changed(stream, _trimmed)))


def _uncut(shown: object, *, fold: bool) -> None:
    """Give the columns of all tables the width that they need, or fold them."""
    from rich.console import Group
    from rich.padding import Padding
    from rich.table import Table

    if isinstance(shown, Padding):
        _uncut(shown.renderable, fold=fold)
    elif isinstance(shown, Group):
        for part in shown.renderables:
            _uncut(part, fold=fold)
    elif isinstance(shown, Table):
        for column in shown.columns:
            if not fold:
                column.max_width = None
            if column.overflow == "ellipsis":
                column.overflow, column.no_wrap = "fold", column.no_wrap and not fold


class _Changed(io.TextIOBase):
    """A stream that passes text on to another stream, changed by a function."""

    def __init__(self, stream: TextIO, change: Callable[[str], str]) -> None:
        self._stream, self._change = stream, change

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    def write(self, text: str, /) -> int:
        self._stream.write(self._change(text))
        return len(text)

    def flush(self) -> None:
        self._stream.flush()


def _trimmed(text: str) -> str:
    """Whole lines without the blanks that fill them up to the width of the console."""
    return "\n".join(line.rstrip() for line in text.split("\n"))


def _plain(text: str, encoding: str) -> str:
    """A text whose characters an encoding has: `<=`, `+-`, and escapes for other letters."""
    # the second character replaces one of two adjacent blanks, so that columns stay aligned
    text = re.sub(r"≤(\S*)( (?= ))?", r"<=\1", text)
    text = re.sub(r"((?<= ) )?±", "+-", text)
    return text.encode(encoding, "backslashreplace").decode(encoding)


def grid(rows: Sequence[tuple[str, Sequence[str]]], styles: Sequence[str] = (), *, wide: int = 0) -> Table:
    """Names and their lines, aligned; a long line is folded under itself.

    styles: style of each row's lines. wide: least width of the names.
    """
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, min_width=wide + 2)
    table.add_column(overflow="fold")
    for i, (name, lines) in enumerate(rows):
        style = styles[i] if i < len(styles) else ""
        for j, line in enumerate(lines):
            table.add_row(Text("" if j else f"  {name}", style="bold"), Text(line, style=style))
    return table


def simple_table(caption: str = "", *, padding: tuple[int, int, int, int] = (0, 1, 0, 0)) -> Table:
    """An empty table as commands print it. caption: explains its columns."""
    from rich import box
    from rich.table import Table

    style: dict[str, Any] = {"caption_justify": "left", "caption_style": "dim"}
    return Table(box=box.SIMPLE_HEAD, padding=padding, caption=caption or None, **style)


def epilog(devices: Iterable[KnownDevice]) -> str:
    """The end of a command's help: names of devices, one architecture a line."""
    return "\b\nDevices, by architecture or by any of these names:\n" + "\n".join(
        f"  {line}" for line in described(devices)
    )


def write_file(path: Path, content: str) -> None:
    """Write a file. If that fails, raise a UsageError of one line."""
    try:
        path.write_text(content, encoding="utf-8")
    except OSError as error:
        raise click.UsageError(f"{path} cannot be written: {error.strerror}") from error


def reason_json(reason: Reason) -> dict[str, str]:
    """A reason, in parts and as one line."""
    return {**asdict(reason), "text": reason.text}

"""`dsv4attn new-plugin`: writes the package of a new backend, as a copy of the template with other names.

The template is the example `examples/dsv4attn-acme`, which the wheel contains as `dsv4attn/plugin_template`.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

import click
from attrs import frozen

import dsv4attn
from dsv4attn.config import AUTO
from dsv4attn.core.contract.devices import device_named
from dsv4attn.errors import ArgumentError, UnknownNameError
from dsv4attn.plugins import BUILT_IN
from dsv4attn.tools.cli import complete, print_json
from dsv4attn.tools.cli.common import console, grid
from dsv4attn.tools.cli.options import JSON, PATH, options, text

_NAME = re.compile(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*")
_DEVICE = re.compile(r"[a-z0-9_.*?\[\]-]+")
_ADAPTERS = ("vllm", "sglang")
"""Names whose distribution, such as dsv4attn-vllm, is one of this project."""
_WORDS_OF_OPTIONS = ("all", "cpu", "decode", "prefill")
"""Names that mean something else where a backend is named, as in `DSV4ATTN_BACKEND=decode=NAME`."""
_SUFFIXES = (".py", ".toml", ".md")
_WORDS = re.compile("acme1|dsv4attn-acme|dsv4attn_acme|Acme|acme")
"""Words of the template that are replaced: device, distribution, module, class, backend."""


@frozen
class NewPlugin:
    """The names of a new plugin.

    name: of the backend, and of the entry point.
    device: kind or architecture that the backend is native to.
    """

    name: str
    device: str

    @classmethod
    def of(cls, name: str, device: str | None) -> NewPlugin:
        """Check the names. Raises ArgumentError if a plugin cannot have them.

        device: also a product, such as h200, which stands for its architecture; None: a device with the backend's name.
        """
        if not _NAME.fullmatch(name) or keyword.iskeyword(_class_of(name)):
            expected = "lower-case letters and digits that begin with a letter, in parts with - or _ between them"
            raise ArgumentError("NAME", expected=expected, actual=repr(name), hint="such as my-chip")
        prefix, bare = name[:9], name[9:]
        if prefix in {"dsv4attn-", "dsv4attn_"}:
            expected = "the backend's name without dsv4attn-, which the package's name begins with"
            raise ArgumentError("NAME", expected=expected, actual=repr(name), hint=f"dsv4attn new-plugin {bare}")
        taken = dict.fromkeys(BUILT_IN, "taken by dsv4attn") | {n: f"taken by dsv4attn-{n}" for n in _ADAPTERS}
        taken |= dict.fromkeys(_WORDS_OF_OPTIONS, "a word of options and variables")
        taken[AUTO] = "the word for automatic choice"
        if name in taken:
            raise ArgumentError("NAME", expected="a name that is free", actual=f"{name!r}, which is {taken[name]}")
        arch = (name if device is None else device).strip().lower()
        try:
            arch = device_named(arch).arch
        except UnknownNameError:
            if not _DEVICE.fullmatch(arch):
                expected = "a kind or an architecture of devices, or a shell pattern"
                raise ArgumentError("--device", expected=expected, actual=repr(device)) from None
        if fnmatchcase("cpu", arch):
            actual = f"{device!r}, on which the plugin would be chosen on every CPU"
            hint = f"leave --device out; asked for by name, {name} runs on a CPU too"
            raise ArgumentError("--device", expected="an accelerator", actual=actual, hint=hint)
        return cls(name, arch)

    @property
    def distribution(self) -> str:
        """Name of the distribution, and of its folder."""
        return f"dsv4attn-{self.name.replace('_', '-')}"

    @property
    def module(self) -> str:
        """Name of the package that is imported."""
        return f"dsv4attn_{self.name.replace('-', '_')}"

    def files(self) -> Iterator[tuple[str, str]]:
        """Path and content of each file of the plugin."""
        template = template_folder()
        for file in sorted(template.rglob("*")):
            place = file.relative_to(template)
            if file.suffix in _SUFFIXES and not {"build", "__pycache__"}.intersection(place.parts):
                yield self._renamed(place.as_posix()), self._renamed(file.read_text(encoding="utf-8"))

    def _renamed(self, template_text: str) -> str:
        """A text of the template with the words of this plugin."""
        replacements = {
            "acme1": self.device,
            "dsv4attn-acme": self.distribution,
            "dsv4attn_acme": self.module,
            "Acme": _class_of(self.name),
            "acme": self.name,
        }
        return _WORDS.sub(lambda word: replacements[word[0]], template_text)


def _class_of(name: str) -> str:
    """The first part of the name of the backend's class."""
    return "".join(part.capitalize() for part in re.split("[-_]", name))


def template_folder() -> Path:
    """The folder of the template: in the installed wheel, or the example of a checkout."""
    package = Path(dsv4attn.__file__).parent
    folders = package / "plugin_template", package.parent / "examples" / "dsv4attn-acme"
    folder = next((folder for folder in folders if (folder / "pyproject.toml").is_file()), None)
    if folder is None:
        raise click.UsageError(f"{folders[0]} is missing -> install dsv4attn again")
    return folder


@click.command("new-plugin")
@click.argument("name")
@options(
    text(
        "--device",
        help="Kind or architecture of the devices of the backend, such as sm_90, gfx942 or my_chip.  [default: NAME]",
        shell_complete=complete.devices,
    ),
    text("--dir", "folder", metavar="DIR", type=PATH, help="Folder to write.  [default: dsv4attn-NAME]"),
    JSON,
)
def new_plugin(name: str, device: str | None, folder: Path | None, *, as_json: bool) -> None:
    """Write the package of a new backend called NAME: a plugin that works, to start from.

    The folder has a pyproject.toml with the entry point, the descriptor with its support answers, a backend that
    derives from the base class and computes with torch, a row of tuning, a test that runs the conformance kit, and a
    README. The backend passes the kit on a CPU as it is; you then replace its kernels one by one, which
    docs/writing-a-backend.md explains. On the devices of --device it is chosen automatically.

    \b
    Exit codes:
      0    the package was written
      2    bad input, or the folder has files already
    """  # noqa: D301 - click wants the character
    plugin = NewPlugin.of(name, device)
    target = folder or Path(plugin.distribution)
    written = _write(plugin, target)
    steps = [
        f"cd {target}",
        "pip install -e '.[test]'",
        f"dsv4attn backends                # has a row {name}",
        f"dsv4attn conform {name}",
        "python -m pytest",
    ]
    if as_json:
        values = {"name": name, "device": plugin.device, "distribution": plugin.distribution, "module": plugin.module}
        print_json({"ok": True, **values, "folder": str(target), "files": written, "next": steps})
        return
    rows = [
        ("backend", [f"{name}, native to {plugin.device}; on a CPU when asked for by name"]),
        ("written", [str(target / file) for file in written]),
        ("next", steps),
    ]
    console().print(grid(rows))


def _write(plugin: NewPlugin, target: Path) -> list[str]:
    """Write all files, and return their paths in the folder. Raises UsageError for a folder that has files."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise click.UsageError(f"{target} exists and is not an empty folder -> name another one with --dir")
    written = []
    try:
        for path, content in plugin.files():
            (target / path).parent.mkdir(parents=True, exist_ok=True)
            (target / path).write_text(content, encoding="utf-8")
            written.append(path)
    except OSError as error:
        raise click.UsageError(f"{target} cannot be written: {error.strerror}") from error
    return written

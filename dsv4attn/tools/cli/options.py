"""Options of commands as tables: descriptions that several commands share, and kinds of options by what they take."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from dsv4attn.errors import ArgumentError
from dsv4attn.tools.cli import complete
from dsv4attn.tools.cli.common import check_folder

_LARGEST = 2**31 - 1
"""Largest number that an option without a bound of its own takes: what a 32-bit index can count."""
_Command = TypeVar("_Command", bound=Callable[..., Any])
Option = Callable[[Any], Any]


class WholeNumber(click.IntRange):
    """An integer within bounds that error messages call a whole number, not an integer range as click does."""

    name = "whole number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:  # noqa: ANN401 - click's
        """Check the bounds, and that a 32-bit index can count what has no upper bound of its own."""
        number = super().convert(value, param, ctx)
        if self.max is None and number > _LARGEST:
            self.fail(f"{number} is larger than {_LARGEST}", param, ctx)
        return number


class TokenCount(WholeNumber):
    """A number of tokens within bounds: 1k and 1K are 1,024, and 1M is 1,048,576."""

    name = "number of tokens (such as 640, 4k or 1M)"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:  # noqa: ANN401 - click's
        """Parse the suffix, then check the bounds."""
        return super().convert(_without_suffix(value) if isinstance(value, str) else value, param, ctx)


class _SomePath(click.Path):
    """A path that is not empty: an empty one, as of a variable that is not set, would mean the working directory."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:  # noqa: ANN401 - click's
        """Refuse an empty path."""
        if not str(value):
            self.fail("'': expected a path; leave the option out for its default", param, ctx)
        return super().convert(value, param, ctx)


def _without_suffix(text: str) -> str:
    """The digits of a number that may end with k, K or M. Any other text stays as it is."""
    match = re.fullmatch(r"\s*([0-9]{1,20})([kKM])\s*", text)
    return str(int(match[1]) * (2**20 if match[2] == "M" else 2**10)) if match else text


def options(*table: Option) -> Callable[[_Command], _Command]:
    """All options of a command, in the order of its help."""

    def decorate(command: _Command) -> _Command:
        for option in reversed(table):
            command = option(command)
        return command

    return decorate


def text(*names: str, help: str, metavar: str | None = "NAME", **extra: Any) -> Option:  # noqa: A002, ANN401 - click's names
    """An option that takes a word. With a default, its help shows the default."""
    return click.option(*names, metavar=metavar, help=help, **{"show_default": "default" in extra, **extra})


def choice(*names: str, words: Sequence[str], help: str, **extra: Any) -> Option:  # noqa: A002, ANN401 - click's names
    """An option that takes one of some words."""
    return text(*names, metavar=None, type=click.Choice(words), help=help, **extra)


def integer(
    *names: str,
    help: str,  # noqa: A002 - click's name
    least: int = 1,
    most: int | None = None,
    metavar: str | None = "N",
    kind: type[WholeNumber] = WholeNumber,
    **extra: Any,  # noqa: ANN401 - click's own
) -> Option:
    """An option that takes a number from `least` to `most`. With a default, its help shows the default."""
    return click.option(
        *names,
        metavar=metavar,
        type=kind(min=least, max=most),
        help=help,
        **{"show_default": "default" in extra, **extra},
    )


def token_count(*names: str, help: str, **extra: Any) -> Option:  # noqa: A002, ANN401 - click's names
    """An option that takes a number of tokens, such as 640, 4k or 1M."""
    return integer(*names, help=help, kind=TokenCount, **extra)


def output_file(*names: str, help: str) -> Option:  # noqa: A002 - click's name
    """An option that takes the path of a file to write."""
    return text(*names, metavar="FILE", callback=target_file, shell_complete=complete.files, help=help)


def torch_device(help: str, **extra: Any) -> Option:  # noqa: A002, ANN401 - click's names
    """The option `--device` that takes a torch device."""
    return text("--device", metavar="DEVICE", help=help, shell_complete=complete.torch_devices, **extra)


def flag(*names: str, help: str, **extra: Any) -> Option:  # noqa: A002, ANN401 - click's names
    """An option that takes nothing."""
    return click.option(*names, is_flag=True, help=help, **extra)


def pairs(_: click.Context, parameter: click.Parameter, values: Sequence[str]) -> dict[str, str]:
    """Parse `--option key=value`, given any number of times."""
    for value in values:
        if "=" not in value:
            raise click.BadParameter(f"{value!r}: expected key=value, as in deterministic=true", param=parameter)
    return dict(value.split("=", 1) for value in values)


def number_list(_: click.Context, parameter: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    """Parse `8,64,256`. A number may end with k, K or M, as in 4k."""
    if value is None:
        return None
    parts = [_without_suffix(part.strip()) for part in value.split(",")]
    if not all(part.isdecimal() and len(part) <= 20 and 0 < int(part) <= _LARGEST for part in parts):
        expected = f"expected numbers from 1 to {_LARGEST} with commas, as in 8,64,256"
        raise click.BadParameter(f"{value!r}: {expected}", param=parameter)
    return tuple(int(part) for part in parts)


def named_words(_: click.Context, parameter: click.Parameter, value: Any) -> Any:  # noqa: ANN401 - text, or a tuple of it
    """Names, with commas between them. Text without a name would mean all of them."""
    for text in value if isinstance(value, tuple) else (value,):
        if text is not None and not text.replace(",", "").strip():
            raise click.BadParameter(f"{text!r}: expected names; leave it out for all", param=parameter)
    return value


def target_file(ctx: click.Context, parameter: click.Parameter, value: str | None) -> Path | None:
    """The path of an output file that can be written, checked before anything runs, but not for completion."""
    if value is None:
        return None
    path = Path(value)
    if ctx.resilient_parsing:
        return path
    if path.is_dir() or not path.parent.is_dir():
        raise click.BadParameter(f"{value!r}: expected a file in a folder that exists", param=parameter)
    is_new = not path.exists()
    try:
        path.open("a", encoding="utf-8").close()
    except OSError as error:
        raise click.BadParameter(f"{value!r} cannot be written: {error.strerror}", param=parameter) from error
    if is_new:
        path.unlink()
    return path


def target_folder(ctx: click.Context, parameter: click.Parameter, value: Path | None) -> Path | None:
    """The path of a folder that files can be written into, checked as `target_file` does. It is not made."""
    if value is not None and not ctx.resilient_parsing:
        try:
            check_folder(value, "a folder")
        except ArgumentError as error:
            raise click.BadParameter(str(error), param=parameter) from None
    return value


PATH = _SomePath(path_type=Path)
JSON = flag("--json", "as_json", help="Print one JSON object.")
SAVE = output_file("--save", help="Write the JSON object to FILE.")
DECIDED_BACKEND = text(
    "--backend",
    help="Backend to run.  [default: as `dsv4attn explain` says]",
    shell_complete=complete.requests_of_backends,
)
FILTER = text(
    "--filter",
    "chosen",
    metavar="PATTERNS",
    callback=named_words,
    help="Clauses (S, A1), areas (decode) or names (sink-*) of cases, with commas; ! leaves cases out (!requests-*).",
)
HTML = output_file("--html", "page", help="Write the report as one HTML page.")
MODEL = text(
    "--model",
    default="flash",
    help="Model: flash, pro, v4.1-flash, or the path of a config.json.",
    shell_complete=complete.models,
)


def backend_option(default: str = "") -> Option:
    """An option that takes options of the backend. default: in words, for the help."""
    return text(
        "--option",
        "backend_options",
        metavar="KEY=VALUE",
        multiple=True,
        callback=pairs,
        help="Option of the backend; may be repeated." + (f"  [default: {default}]" if default else ""),
        shell_complete=complete.backend_options,
    )


OPTION = backend_option()


def command_line(ctx: click.Context, *left_out: str) -> list[str]:
    """The words of this command line after the command's name. left_out: names of parameters that are left out.

    Options that have their default value are left out too, and the order is that of the help.
    """
    words: list[str] = []
    for parameter in ctx.command.params:
        value = ctx.params.get(parameter.name or "")
        if parameter.name in left_out or value in (None, (), False) or value == parameter.get_default(ctx):
            continue
        if isinstance(parameter, click.Argument):
            words += value
            continue
        assert isinstance(parameter, click.Option)
        name = max(parameter.opts, key=len)
        if parameter.is_flag or value == parameter.flag_value:
            words.append(name)
        elif parameter.multiple:
            items = [f"{key}={word}" for key, word in value.items()] if isinstance(value, dict) else value
            words += [word for item in items for word in (name, str(item))]
        else:
            words += [name, ",".join(map(str, value)) if isinstance(value, tuple) else str(value)]
    return words

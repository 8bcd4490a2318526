"""The `dsv4attn` command: its list of commands, exit codes and error output. A command's module is imported on call."""

from __future__ import annotations

import errno
import importlib
import json
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout, suppress
from contextvars import ContextVar
from typing import Any, NoReturn, TextIO

import click

from dsv4attn import __version__
from dsv4attn.errors import Dsv4AttnError, did_you_mean
from dsv4attn.testing.kit.interpreter_warnings import ignore_interpreter_warnings

__all__ = ["main", "print_json"]

_COMMANDS = {
    "backends": "List the backends, and which of them run on this machine.",
    "bench": "Time kernels, and compare them with the roofline and other libraries.",
    "bench-context": "Time decode over ranks, under torchrun, and compare it with one rank.",
    "bench-memory": "Show how memory grows with the context of selections.",
    "compile": "Compile every kernel for devices that need not be here.",
    "conform": "Run the conformance kit on a backend, and write a certificate.",
    "doctor": "Look for what is wrong with this installation, and say what to do.",
    "explain": "Say which backend would run a problem, and why not the others.",
    "memory": "Say whether a model fits a device, and what remains for the caches.",
    "new-plugin": "Write the package of a new backend, to start from.",
    "parity": "Compare backends with the float64 oracle, case by case.",
    "run": "Serve a request trace through attention layers, and check the results.",
    "show": "Show which keys each token of a prompt attends to.",
}
"""Lines of the list of commands, by name. A command's module and function have its name."""

OK, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130
"""Exit codes. FAILED: a check failed, or an unexpected error occurred."""

_stdout: ContextVar[TextIO | None] = ContextVar("stdout", default=None)
"""Stream for the object of `--json`."""


def print_json(values: object) -> None:
    """Print the one object of `--json`. Other output, such as that of a plugin, goes to stderr meanwhile."""
    click.echo(json.dumps(values, allow_nan=False), file=_stdout.get())


class _Commands(click.Group):
    """Imports commands on call, and handles the errors of all of them.

    A Dsv4AttnError is one line on stderr and exit code 2, never a traceback. With `--json` it is one object with `ok`
    false on stdout instead. An unexpected exception is shown with its traceback.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module = importlib.import_module(f"dsv4attn.tools.cli.{cmd_name.replace('-', '_')}")
        # `compile` alone is a name of Python
        command: click.Command = getattr(module, "compile_" if cmd_name == "compile" else cmd_name.replace("-", "_"))
        command.short_help = _COMMANDS[cmd_name]
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in _COMMANDS and not args[0].startswith("-"):
            names = ", ".join(sorted(_COMMANDS))
            ctx.fail(f"unknown command {args[0]!r}{did_you_mean(args[0], _COMMANDS)} (known: {names})")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        # click would import every command for its help
        with formatter.section("Commands"):
            formatter.write_dl(sorted(_COMMANDS.items()))

    def main(self, args: Sequence[str] | None = None, *rest: Any, **options: Any) -> NoReturn:  # noqa: ANN401 - click's own
        args = list(sys.argv[1:] if args is None else args)
        as_json = "--json" in args
        _stdout.set(sys.stdout)
        try:
            with redirect_stdout(sys.stderr) if as_json else nullcontext(), warnings.catch_warnings(), _os_errors():
                ignore_interpreter_warnings()
                code = super().main(args, *rest, **{**options, "standalone_mode": False})
        except click.ClickException as error:
            message = error.format_message()
            if isinstance(error, click.NoSuchOption) and error.ctx is not None:
                options_of = [max(p.opts, key=len) for p in error.ctx.command.params if isinstance(p, click.Option)]
                message = f"{message} (options: {', '.join(sorted(options_of))})"
                error = click.UsageError(message, error.ctx)
            if as_json:
                _print_error(error, message)
            else:
                error.show()
            code = error.exit_code
        except Dsv4AttnError as error:
            if as_json:
                _print_error(error, str(error))
            else:
                click.echo(f"Error: {error}", err=True)
            code = BAD_INPUT
        except (click.Abort, KeyboardInterrupt) as stop:
            # click wraps the interrupt; its message names the interrupted work if there is one
            during = str(stop.__cause__ if isinstance(stop, click.Abort) and stop.__cause__ else stop)
            if as_json:
                print_json({"ok": False, "interrupted": True, **({"during": during} if during else {})})
            else:
                click.echo(f"interrupted {during}".strip(), err=True)
            code = INTERRUPTED
        except Exception as error:
            if as_json:
                _print_error(error, str(error))
            raise
        sys.exit(code if isinstance(code, int) else OK)


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Errors of a write that is no fault of the command. click itself ends a command whose reader has gone."""


@contextmanager
def _os_errors() -> Iterator[None]:
    """Turn a name that is too long, and a failed write of the output, also at the end, into an error of one line."""
    stdout = _stdout.get()
    assert stdout is not None
    try:
        yield
        stdout.flush()
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise click.UsageError(f"{error.filename!r}: {error.strerror}") from None
        if error.filename is not None or error.errno not in _FULL:
            raise
        # the interpreter would fail again, on what is buffered
        with suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stdout.fileno())
            os.close(nowhere)
        # with --json too: an object would be written to the same place
        click.echo(f"Error: the output cannot be written: {error.strerror}", err=True)
        raise SystemExit(FAILED) from None


def _print_error(error: Exception, message: str) -> None:
    print_json({"ok": False, "error": {"type": type(error).__name__, "message": message}})


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="dsv4attn")
def main() -> None:
    """DeepSeek-V4 attention, the same on every accelerator.

    `dsv4attn COMMAND --help` has the options and exit codes of a command.
    """

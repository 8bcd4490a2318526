"""Values of options and arguments for completion in a shell. None of these functions imports torch.

Each function takes click's context, the parameter, and the text that the user has typed, and returns the words that
begin with that text. A list with commas is completed after its last comma. If something fails, such as a configuration
file that cannot be read, there is nothing to complete, and the user sees no error.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO

import click
from click.shell_completion import CompletionItem

from dsv4attn.errors import ConfigError

Words = Mapping[str, str]
"""Words that complete, each with a line that zsh and fish show next to it, or ""."""
Completer = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]
"""What click takes as `shell_complete`."""


def words(*fixed: str) -> Completer:
    """Complete one of these words."""
    return _completer(lambda _, __: dict.fromkeys(fixed, ""))


def _completer(words_of: Callable[[click.Context, str], Words], *, or_file: bool = False) -> Completer:
    """A completer from a function that takes the context and the typed text. or_file: a file completes too."""

    def complete(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem]:
        try:
            # a plugin that prints must not add to the words that the shell reads
            with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
                known = words_of(ctx, incomplete)
        except Exception:  # noqa: BLE001 - a plugin or a setting is broken: other commands report it
            known = {}
        items = [CompletionItem(word, help=text or None) for word, text in known.items() if word.startswith(incomplete)]
        # bash drops all words that come before a file
        return [CompletionItem(incomplete, type="file"), *items] if or_file else items

    return complete


def several(complete: Completer) -> Completer:
    """Complete a list with commas, after its last comma, without the words that it has already."""

    def complete_last(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
        before, comma, last = incomplete.rpartition(",")
        present = set(before.split(","))
        items = [item for item in complete(ctx, parameter, last) if item.value not in present]
        return [CompletionItem(f"{before}{comma}{item.value}", help=item.help) for item in items]

    return complete_last


def _registered() -> Words:
    """The names of built-in and installed backends, with their summaries."""
    from dsv4attn.config import Settings, load_settings
    from dsv4attn.selection import registry_for

    try:
        settings = load_settings()
    except ConfigError:
        settings = Settings()
    return {name: entry.info.summary for name, entry in registry_for(settings).backends.items()}


def _named_devices(ctx: click.Context, _: str) -> Words:
    from dsv4attn.core.contract.devices import DEVICES
    from dsv4attn.tools.cli.common import devices_of_plugins

    built_in = {spelling: device.text for device in DEVICES for spelling in device.spellings}
    return {**built_in, **{name: f"of {owner}" for name, owner in devices_of_plugins().items() if "*" not in name}}


def _targets(_: click.Context, __: str) -> Words:
    from dsv4attn.tools.cli.common import COMPILED_FOR

    return {spelling: device.text for device in COMPILED_FOR for spelling in device.spellings}


def _torch_devices(_: click.Context, __: str) -> Words:
    """Names of torch's devices for the nodes of this machine, and the CPU."""
    from dsv4attn.tools.cli.installation import nodes

    kinds = [{"hip": "cuda"}.get(kind, kind) for kind in nodes().values()]
    names = {"cpu": ""}
    for kind in dict.fromkeys(kinds):
        names |= dict.fromkeys([kind, *(f"{kind}:{i}" for i in range(kinds.count(kind)))], "")
    return names


def _requests(_: click.Context, incomplete: str) -> Words:
    """What `--backend` of explain and run takes: a name, auto, or a name for a phase."""
    from dsv4attn.config import AUTO, PHASES

    names = {**_registered(), AUTO: "as selection decides"}
    before, comma, last = incomplete.rpartition(",")
    phase, equals = last.partition("=")[:2]
    if equals:
        return {f"{before}{comma}{phase}={name}": text for name, text in names.items()}
    phases = {f"{before}{comma}{phase}=": f"backend of {phase}" for phase in PHASES if f"{phase}=" not in before}
    return phases if comma else {**names, **phases}


def _options_of_backend(ctx: click.Context, _: str) -> Words:
    """Options of the backend that the command line names, as `key=`."""
    from dsv4attn.selection import registered

    name = ctx.params.get("backend")
    return {f"{key}=": f"default {default!r}" for key, default in registered(name).info.options.items()} if name else {}


def _measurements(ctx: click.Context, _: str) -> Words:
    """What `bench` measures, without what was named before."""
    from dsv4attn.tools.bench.cases import MEASUREMENTS

    return dict.fromkeys((name for name in MEASUREMENTS if name not in (ctx.params.get("what") or ())), "")


def _bench_cases(_: click.Context, __: str) -> Words:
    from dsv4attn.tools.bench.cases import PRESETS

    return {name: preset.model for name, preset in PRESETS.items()}


def _listed(path: str) -> Callable[[click.Context, str], Words]:
    """The words of a table, "module:name", imported when a word is completed. Texts of a dict are its values."""

    def words_of(_: click.Context, __: str) -> Words:
        module, name = path.split(":")
        table = getattr(importlib.import_module(module), name)
        texts = table if isinstance(table, Mapping) else dict.fromkeys(getattr(w, "value", w) for w in table)
        return {word: text if isinstance(text, str) else "" for word, text in texts.items()}

    return words_of


_short_models, _presets = (_listed(f"dsv4attn.core.model.geometry:{name}") for name in ("SHORT_NAMES", "PRESETS"))
files = _completer(lambda _, __: {}, or_file=True)
traces = _completer(lambda _, __: dict.fromkeys(("short", "long", "-"), ""), or_file=True)
models = _completer(lambda ctx, text: {**_short_models(ctx, text), **_presets(ctx, text)}, or_file=True)
devices = _completer(_named_devices)
targets = _completer(_targets)
torch_devices = _completer(_torch_devices)
backends = _completer(lambda _, __: _registered())
requests_of_backends = _completer(_requests)
backend_options = _completer(_options_of_backend)
layers = _completer(_listed("dsv4attn.core.model.geometry:LayerKind"))
cache_formats = _completer(_listed("dsv4attn.tools.replay:CACHES"))
measurements = several(_completer(_measurements))
bench_cases = several(_completer(_bench_cases))
context_cases = several(_completer(_listed("dsv4attn.tools.bench.cases:CONTEXT_CASES")))
peers = several(_completer(_listed("dsv4attn.tools.bench.cases:PEER_NAMES")))

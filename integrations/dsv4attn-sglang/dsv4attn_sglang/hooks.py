"""What is replaced in SGLang, and when. Everything goes through `HookRegistry`, SGLang's own way to do it.

1. SGLang loads the plugin: a hook on the constructor of the scheduler, in processes that have imported one. Nothing is
   imported for it.
2. A scheduler is made: a hook on the function that builds attention. The scheduler imports its module anyway. If
   V4.1's own records are asked for by name, also one on the function that chooses records, before pools are made.
3. Attention of DeepSeek-V4 is built: the model and the backends are checked, then FlashMLA's functions are replaced,
   and what `parts` asks for. SGLang binds one of the functions in the constructor of its
   attention, so this happens before. Models of other kinds never come here, and for them nothing is replaced.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from dsv4attn_sglang import __version__
from dsv4attn_sglang.functions import GATHER, INDEXER
from dsv4attn_sglang.guard import GUARD, LOG, RefusedError

SCHEDULER = "sglang.srt.managers.scheduler"
ATTENTION = "sglang.srt.model_executor.model_runner_components.attention_backend_setup.build_attention_backends"

RECORDS = "sglang.srt.mem_cache.deepseek_v4_memory_pool.select_dsv4_kv_layout"
"""The function that chooses the records of caches, which the plan of their memory follows."""
_PARTS = {"indexer": (INDEXER, "REPLACE"), "gather": (GATHER, "AROUND")}
"""For each of `parts.PARTS`, which is also the name of a module, what it replaces, and how."""

_registered: set[str] = set()
"""Targets for which this package has registered a hook. SGLang would call a second hook too."""


def watch_scheduler() -> None:
    """Step 1. A process without a scheduler runs no model: it needs nothing.

    An SGLang whose scheduler is elsewhere never makes one that is hooked: the log says that nothing will be replaced.
    """
    engine = sys.modules.get("sglang")
    if engine is not None and not any(map(_scheduler_in, engine.__path__)):
        LOG.error("not used: SGLang has no %s -> %s, which was tested", SCHEDULER, GUARD.install)
    if SCHEDULER in sys.modules:
        _hook(f"{SCHEDULER}.Scheduler.__init__", _scheduler_is_made, "BEFORE")


def _scheduler_in(folder: str) -> bool:
    """Whether a folder of SGLang's package has the module of the scheduler. It is not imported."""
    return Path(folder, *SCHEDULER.split(".")[1:]).with_suffix(".py").exists()


def _scheduler_is_made(*args: object, **kwargs: object) -> None:
    """Step 2, before the constructor of a scheduler. If SGLang builds attention elsewhere, the log says so.

    Nothing is refused here, because the model may be another one.
    """
    try:
        _find(ATTENTION)
    except RefusedError as error:
        LOG.error("not used: %s", error)
        return
    _hook(ATTENTION, _attention_is_built, "AROUND")
    from dsv4attn_sglang import records

    if records.are_named():
        _hook(RECORDS, records.select_dsv4_kv_layout, "AROUND")
    _apply()


def _attention_is_built(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
    """Step 3, around `build_attention_backends(*, model_runner)`, once for every model of the process."""
    runner: Any = kwargs.get("model_runner", args[0] if args else None)
    if "dsv4" in (runner.prefill_attention_backend_str, runner.decode_attention_backend_str):
        _serve(runner)
    return original(*args, **kwargs)


def _serve(runner: Any) -> None:  # noqa: ANN401 - SGLang's ModelRunner
    """Check a model, replace the functions, and say so. Raises RefusedError or NoBackendError."""
    version = GUARD.check()
    from dsv4attn_sglang import internals

    internals.check(version, runner)
    # it imports what was checked
    from dsv4attn_sglang import attention, parts, records, serving

    targets, served_parts = serving.targets(runner.device), parts.chosen(parts.Device.here())
    checked = {*served_parts, "records"} if records.are_asked_for() else served_parts
    internals.check_functions(version, targets, checked)
    chosen = serving.check(runner, served_parts)
    new_targets = _replace(targets, attention, "AROUND")
    for part in filter(served_parts.__contains__, parts.PARTS):
        of_part, kind = _PARTS[part]
        new_targets += _replace(of_part, importlib.import_module(f"dsv4attn_sglang.{part}"), kind)
    if new_targets:
        way_out = f"set {GUARD.engine.switch}=0 for SGLang's own"
        text = "SGLang %s attends for DeepSeek-V4 on dsv4attn, by version %s of this wheel (%s)"
        LOG.info(text, version, __version__, way_out)
        LOG.info("replaced %s", ", ".join(new_targets))
    for line in chosen:
        LOG.info("%s", line)


def _replace(targets: Mapping[str, str], module: ModuleType, kind: str) -> list[str]:
    """Replace functions of SGLang by those of a module, unless they are replaced. Returns those that were not.

    targets: names in the module by what they replace. kind: of the hooks. Raises RefusedError if a function is not
    there.
    """
    new_targets = [target for target in targets if target not in _registered]
    functions = {target: _find(target) for target in new_targets}
    for target in new_targets:
        _hook(target, getattr(module, targets[target]), kind)
    _apply()
    for target, function in functions.items():
        if _find(target) is function:
            cure = "see what SGLang logged above, or remove the plugin that hooks it already"
            raise RefusedError(target, expected="a function that SGLang replaces", actual="the same one", cure=cure)
    return new_targets


def _find(target: str) -> Any:  # noqa: ANN401 - a function of SGLang
    """The function at a dotted path. Raises RefusedError with the cause if its module cannot be imported."""
    owner, _, name = target.rpartition(".")
    module, _, class_name = owner.rpartition(".")
    try:
        if class_name[0].isupper():
            return getattr(getattr(importlib.import_module(module), class_name), name)
        return getattr(importlib.import_module(owner), name)
    except (ImportError, AttributeError, OSError) as error:
        cure = f"{GUARD.install}, which was tested"
        raise RefusedError(target, expected="a function of SGLang", actual=str(error), cure=cure) from error


def _hook(target: str, function: Callable[..., Any], kind: str) -> None:
    """Give a hook to SGLang's registry, once."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType

    if target not in _registered:
        _registered.add(target)
        source = HookSource("dsv4attn", "dsv4attn-sglang")
        HookRegistry.register(target, function, HookType[kind], source=source)


def _apply() -> None:
    """Let SGLang put its hooks in place; those that are there already stay. Failures are logged, not raised."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    HookRegistry.apply_hooks()

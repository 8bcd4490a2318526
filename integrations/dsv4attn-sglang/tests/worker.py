"""What a process of SGLang does with plugins, as a function for a process that a test starts."""

# ruff: noqa: ARG005 - a fake has the arguments of what it replaces
from __future__ import annotations

import logging
import sys
import unittest
from typing import Any

import fakes


def plain() -> dict[str, Any]:
    """A process that runs no model, such as SGLang's detokenizer: plugins are loaded, and that is all."""
    fakes.install()
    from sglang.srt.plugins import load_plugins
    from sglang.srt.plugins.hook_registry import HookRegistry

    loaded = set(sys.modules)
    load_plugins()
    new = sorted(set(sys.modules) - loaded)
    return {"new": new, "hooks": [target for target, hooks in HookRegistry._hooks.items() if hooks]}


def scheduler(*, hidden: bool = False, builds: int = 3) -> dict[str, Any]:
    """A process that runs a model: attention is built, some times, and the first one decodes, as SGLang's kit has it.

    hidden: as if this package were not installed: SGLang finds no entry point of it.
    """
    fakes.install()
    from integrations.interpreter import round_as_torch

    round_as_torch("fp8e4nv")
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    logging.getLogger().setLevel(logging.INFO)
    if hidden:
        import sglang.srt.plugins

        sglang.srt.plugins.entry_points = lambda group: []
    import kit

    loaded_kit = kit.loaded()
    fakes.on_cuda(setattr)
    case, called = kit.case("decode", "DECODE", (5, 200)), ""
    try:
        loaded_kit.run_dsv4_attention_case(unittest.TestCase(), case, device="cpu")
    except fakes.FlashMLACalled as operator:
        called = str(operator)
    for _ in range(builds - 1):
        loaded_kit.ATTENTION_BACKENDS["dsv4"](kit.runner_of(case))
    from sglang.srt.plugins import load_plugins

    load_plugins()
    hooked = sorted(name for name in sys.modules if name.startswith("dsv4attn"))
    return {"lines": lines, "flash_mla": called, "modules": hooked}


def older_gpu(sm: int) -> dict[str, Any]:
    """A process on a GPU without DeepGEMM: attention of a model with c4a layers is built, as SGLang builds it."""
    fakes.install()
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    logging.getLogger().setLevel(logging.INFO)
    import kit

    loaded_kit = kit.loaded()
    fakes.on_cuda(setattr, sm)
    attention = loaded_kit.ATTENTION_BACKENDS["dsv4"](kit.runner_of(kit.case("decode", "DECODE", (5,)), (0, 4, 128)))
    from dsv4attn_sglang import indexer
    from sglang.srt.layers.attention.dsv4.metadata import PagedIndexerMetadata

    replaced = {
        "forward_c4_indexer": type(attention).forward_c4_indexer,
        "plan_selection": PagedIndexerMetadata.__post_init__,
    }
    return {
        "lines": lines,
        "replaced": [name for name, wrapper in replaced.items() if _wraps(wrapper, indexer, name)],
    }


def _wraps(wrapper: Any, module: Any, name: str) -> bool:
    """Whether SGLang's wrapper of a hook calls a function of a module."""
    return any(cell.cell_contents is getattr(module, name) for cell in wrapper.__closure__ or ())

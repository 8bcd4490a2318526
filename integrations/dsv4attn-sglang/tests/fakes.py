"""SGLang's own Python on a CPU, and everything that is faked to run it.

Faked, for all tests and the processes they start:
- `flash_mla._loader`: FlashMLA's libraries need CUDA. Its Python is FlashMLA's own; a call of one of its operators is
  recorded and raises `FlashMLACalled`.
- `torchvision`: has no build for this torch that pip would take. SGLang imports it for images.
- `is_cuda` of SGLang says that this is a machine of CUDA where it decides which functions its attention calls. Its
  capability is 9.0, and DeepGEMM is installed, unless a test says otherwise.
- The cast to fp8 of Triton's interpreter, in which SGLang's kernels run: a mantissa that is rounded up to the next
  power of two loses its carry. torch's cast takes its place.
- The plans of a step for compressor and indexer, made by compiled kernels: there are none. Both run before attention,
  and not at all in these tests: SGLang's kit writes what they would have written.
- SGLang's test kit saves the state of a CUDA generator: nothing is saved.

Real are the entry point, `load_plugins`, `HookRegistry`, the builder of attention, `DeepseekV4AttnBackend` with its
metadata and kernels, the pools of caches and their writers, and the reference of SGLang's test kit. There is no server:
the constructor of the scheduler runs until it needs one.
"""

# ruff: noqa: ARG005 - a fake has the arguments of what it replaces
from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

os.environ.update(CUDA_VISIBLE_DEVICES="", TRITON_INTERPRET="1", HF_HUB_OFFLINE="1", SGLANG_PLUGINS="dsv4attn")

SCHEDULER = "sglang.srt.managers.scheduler"
FLASH_MLA = "sglang.kernels.ops.attention.flash_mla_interface"


class FlashMLACalled(Exception):  # noqa: N818 - no error: what a test may wait for
    """An operator of FlashMLA was called."""


_CALLS: list[str] = []


class _Operators:
    """In place of FlashMLA's libraries."""

    def __getattr__(self, name: str) -> Any:
        def operator(*args: object) -> None:
            _CALLS.append(name)
            raise FlashMLACalled(name)

        return operator


class _Anything(types.ModuleType):
    """A package with a class of any name."""

    __path__ = ()  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__getattr__": lambda *_: None})


class _Torchvision(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds `torchvision` and everything in it."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        is_torchvision = name.partition(".")[0] == "torchvision"
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if is_torchvision else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Anything(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def install() -> None:
    """Put what is faked in place, before SGLang is imported. Once a process."""
    if "flash_mla._loader" in sys.modules:
        return
    # before the finder: transformers looks for torchvision on import
    from transformers.utils import is_torchvision_available

    is_torchvision_available()
    sys.meta_path.append(_Torchvision())
    loader = types.ModuleType("flash_mla._loader")
    loader.has_legacy = lambda: True  # type: ignore[attr-defined]
    loader.get_ops = lambda use_legacy: _Operators()  # type: ignore[attr-defined]
    sys.modules["flash_mla._loader"] = loader


def flash_mla_calls() -> list[str]:
    """Operators of FlashMLA that were called."""
    return _CALLS


def on_cuda(put: Callable[[Any, str, Any], None], sm: int = 90, *, deep_gemm: bool = True) -> None:
    """Fake what is faked in SGLang's modules. put: sets an attribute. deep_gemm: whether it is installed."""
    import sglang.srt.utils
    import torch
    from sglang.srt.layers.attention import deepseek_v4_backend
    from sglang.srt.layers.attention.dsv4 import compressor_v2
    from sglang.srt.layers.attention.dsv4.metadata import PagedIndexerMetadata

    for module in (sglang.srt.utils, deepseek_v4_backend):
        put(module, "is_cuda", lambda: True)
    put(sglang.srt.utils.common, "get_device_sm", lambda: sm)
    if importlib.util.find_spec("dsv4attn_sglang") is not None:
        # it is not in the process of a test that uninstalls it
        from dsv4attn_sglang import parts

        put(parts, "find_spec", lambda name: deep_gemm or None)
    for module in (deepseek_v4_backend, compressor_v2):
        put(module, "create_paged_compressor_data", lambda **arguments: None)
    put(PagedIndexerMetadata, "__post_init__", lambda self: None)
    put(torch.cuda, "get_rng_state", lambda device: None)
    put(torch.cuda, "set_rng_state", lambda state, device: None)


def scheduler_made() -> None:
    """Construct SGLang's scheduler, which ends in the middle of its constructor: there is no server to run."""
    from sglang.srt.managers.scheduler import Scheduler

    try:
        Scheduler(None, None)
    except ValueError as error:
        assert "not published" in str(error)  # noqa: PT017 - no test
    else:
        raise AssertionError("a scheduler without a server")

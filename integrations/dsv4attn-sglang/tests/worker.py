"""What a process of SGLang does with plugins, as a function for a process that a test starts."""

# ruff: noqa: ARG005 - a fake has the arguments of what it replaces
from __future__ import annotations

import logging
import sys
import unittest
from typing import Any

import fakes

PARTS = ("indexer", "selection")
"""Parts of the layer around attention that may run on dsv4attn in SGLang; the gather is a part of every backend."""


def plain() -> dict[str, Any]:
    """A process that runs no model, such as SGLang's detokenizer: plugins are loaded, and that is all."""
    fakes.install()
    from sglang.srt.plugins import load_plugins
    from sglang.srt.plugins.hook_registry import HookRegistry

    loaded = set(sys.modules)
    load_plugins()
    new = sorted(set(sys.modules) - loaded)
    return {"new": new, "hooks": [target for target, hooks in HookRegistry._hooks.items() if hooks]}


def logged_lines() -> list[str]:
    """The list to which this process adds each line of its log from now on."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    logging.getLogger().setLevel(logging.INFO)
    return lines


def scheduler(*, hidden: bool = False, builds: int = 3) -> dict[str, Any]:
    """A process that runs a model: attention is built, some times, and the first one decodes, as SGLang's kit has it.

    hidden: as if this package were not installed: SGLang finds no entry point of it.
    """
    fakes.install()
    from integrations.interpreter import round_as_torch

    round_as_torch("fp8e4nv")
    lines = logged_lines()
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
    lines = logged_lines()
    import kit

    loaded_kit = kit.loaded()
    fakes.on_cuda(setattr, sm)
    attention = loaded_kit.ATTENTION_BACKENDS["dsv4"](kit.runner_of(kit.case("decode", "DECODE", (5,)), (0, 4, 128)))
    from dsv4attn_sglang import gather, indexer
    from sglang.srt.layers.attention import deepseek_v4_backend
    from sglang.srt.layers.attention.dsv4.metadata import PagedIndexerMetadata

    replaced = [
        (type(attention).forward_c4_indexer, indexer.forward_c4_indexer),
        (PagedIndexerMetadata.__post_init__, indexer.plan_selection),
        # the name in the module that calls it
        (deepseek_v4_backend.dequantize_k_cache_paged_dsv4, gather.dequantize_k_cache_paged_dsv4),
    ]
    return {
        "lines": lines,
        "replaced": [function.__name__ for wrapper, function in replaced if _wraps(wrapper, function)],
    }


def _wraps(wrapper: Any, function: Any) -> bool:
    """Whether SGLang's wrapper of a hook calls a function."""
    return any(cell.cell_contents is function for cell in wrapper.__closure__ or ())


def compiled_gather(*capabilities: int) -> dict[str, str]:
    """For each capability, what Triton says when it compiles SGLang's kernel that gathers keys; empty: it does."""
    import os

    fakes.install()
    os.environ.pop("TRITON_INTERPRET")
    from sglang.kernels.ops.attention.dsv4 import dequant_k_cache
    from triton import compiler
    from triton.backends.compiler import GPUTarget
    from triton.errors import TritonError

    kernel, page = dequant_k_cache._dequantize_k_cache_paged_kernel, 256
    pointers = {"output_ptr": "*bf16", "buf_fp8_ptr": "*fp8e4nv", "buf_bf16_ptr": "*bf16", "buf_uint8_ptr": "*u8"}
    types = {**pointers, "page_table_ptr": "*i32", "output_stride_0": "i32", "num_tokens": "i32"}
    names = [name for name in kernel.arg_names if name not in types]
    numbers = {"BYTES_PER_PAGE": 149760, "PAGE_SIZE": page, "S_OFFSET_BYTES": page * 576, "TOKENS_PER_PROG": 4}
    constants = {name: numbers.get(name) or getattr(dequant_k_cache, name) for name in names}
    source = compiler.ASTSource(kernel, types | dict.fromkeys(names, "constexpr"), constants)
    said = {}
    for capability in capabilities:
        try:
            compiler.compile(source, target=GPUTarget("cuda", capability, 32))
            said[str(capability)] = ""
        except TritonError as error:
            said[str(capability)] = str(error)
    return said


def compiled_kernels(*targets: str) -> dict[str, Any]:
    """What the compiler says about one variant of each kernel that this wheel launches, in a process that runs a model.

    A kernel that backends of several targets launch is compiled for the first one.
    replaced: whether SGLang has put its function in the place of Triton's. keeps: whether it leaves Triton's cache in a
    folder that was chosen before, as docs/engines.md says. otherwise: the folder that it chooses itself, and the one of
    `dsv4attn compile --engine sglang`.
    """
    import os
    import tempfile

    folder = os.environ.setdefault("TRITON_CACHE_DIR", tempfile.mkdtemp())
    fakes.install()
    os.environ.pop("TRITON_INTERPRET")
    from dsv4attn_sglang.records import LAYOUTS
    from sglang.srt.environ import third_party_cache_defaults
    from sglang.srt.model_executor import model_runner  # noqa: F401 - all that SGLang imports on a GPU
    from sglang.srt.utils import common
    from triton import next_power_of_2

    from dsv4attn import Limits, ModelGeometry, load_backend
    from dsv4attn.core.contract.device import DeviceFacts
    from dsv4attn.core.contract.warmup import WarmupSpec
    from dsv4attn.integrations.engines import SGLANG
    from tests.backends._triton.compiling.each_kernel import compile_each

    windows = {"v4": LAYOUTS["v4"], "v41_new": LAYOUTS["v41_new"], "v41_fp4_new": LAYOUTS["v41_new"]}
    model, limits, said, done = ModelGeometry.preset("flash"), Limits(64, 1024, 2**20), {}, set[Any]()
    for target in targets:
        backend, variants = load_backend({"sm_90": "sm90"}.get(target, "triton")), []
        for name, compressed in LAYOUTS.items():
            layouts = {"swa": windows[name], "compressed": compressed}
            bounds = WarmupSpec.of(model, limits, layer_parts=True, parts=PARTS, **layouts)
            variants += backend.kernel_variants(bounds, DeviceFacts.named(target))
        said[target] = compile_each([variant for variant in variants if variant.kernel not in done], target)
        done |= {variant.kernel for variant in variants}
    keeps = os.environ.pop("TRITON_CACHE_DIR") == folder
    otherwise = [third_party_cache_defaults()["TRITON_CACHE_DIR"], str(SGLANG.kernel_folder())]
    replaced = next_power_of_2 is common.next_power_of_2
    return {"replaced": replaced, "keeps": keeps, "otherwise": otherwise, "said": said}

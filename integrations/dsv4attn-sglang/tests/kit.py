"""SGLang's own kit for tests of DeepSeek-V4 attention, on a CPU, its backend built where SGLang builds it."""

from __future__ import annotations

import functools
import warnings
from importlib import import_module
from typing import Any

import fakes
import torch

KIT = "sglang.test.kits.attention_unittest"


@functools.cache
def loaded() -> Any:
    """The kit, in a process in which SGLang has loaded its plugins and made a scheduler."""
    with warnings.catch_warnings():
        # of torch and SGLang, on import: what is about to be dropped, and what a CPU cannot do
        warnings.simplefilter("ignore")
        import_module(fakes.SCHEDULER)
        from sglang.srt.plugins import load_plugins

        load_plugins()
        fakes.scheduler_made()
        import_module("sglang.srt.layers.attention.deepseek_v4_backend")
        # before `is_cuda` says true: SGLang would import CUDA's kernels
        import_module(f"{KIT}.runner_modes.speculative_draft_extend_runner")
        dsv4_attention = import_module(f"{KIT}.attention_methods.dsv4_attention")
    dsv4_attention.ATTENTION_BACKENDS = {"dsv4": _built}
    # a runner publishes SGLang's configuration, which the wheel reads, for the whole process
    _runner_of(dsv4_attention, _case(dsv4_attention, "decode", "DECODE", (5,)))
    return dsv4_attention


def _built(runner: Any) -> Any:
    from sglang.srt.configs.model_config import AttentionArch
    from sglang.srt.model_executor.model_runner_components import attention_backend_setup

    # the kit's runner has no more than the attention itself reads
    runner.model_config.attention_arch = AttentionArch.MLA
    return attention_backend_setup.build_attention_backends(model_runner=runner).attn_backend


def case(name: str, mode: str, prefixes: tuple[int, ...], extends: tuple[int, ...] = (), **options: Any) -> Any:
    """A case of the kit. prefixes: tokens of each request in the caches. extends: new ones of each, if not decode."""
    return _case(loaded(), name, mode, prefixes, extends, **options)


def runner_of(test_case: Any, ratios: tuple[int, ...] = (0, 4, 128), **options: Any) -> Any:
    """SGLang's runner of a case as far as attention reads it, with caches for layers of these ratios."""
    return _runner_of(loaded(), test_case, ratios, **options)


def _case(
    kit: Any, name: str, mode: str, prefixes: tuple[int, ...], extends: tuple[int, ...] = (), **options: Any
) -> Any:
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    arguments = {"num_heads": 8, "page_size": 256, "attn_sink_value": 0.5, **options}
    return kit.DSV4AttentionCase(
        name, "dsv4", ForwardMode[mode], prefix_lens=prefixes, extend_lens=extends, **arguments
    )


def _runner_of(kit: Any, test_case: Any, ratios: tuple[int, ...] = (0, 4, 128), **options: Any) -> Any:
    config = kit.TinyDSV4ModelConfig(num_heads=test_case.num_heads, context_len=512, compression_ratios=list(ratios))
    sizes = {"dtype": torch.bfloat16, "device": "cpu", "max_context_len": 512, "swa_size": 2048, **options}
    return kit.MockDSV4ModelRunner(case=test_case, model_config=config, compression_ratios=list(ratios), **sizes)

"""SGLang's own kit for tests of DeepSeek-V4 attention, on a CPU, its backend built where SGLang builds it."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import fakes


@functools.cache
def loaded() -> Any:
    """The kit, in a process in which SGLang has loaded its plugins and made a scheduler."""
    with warnings.catch_warnings():
        # of torch and SGLang, on import: what is about to be dropped, and what a CPU cannot do
        warnings.simplefilter("ignore")
        import sglang.srt.managers.scheduler
        from sglang.srt.plugins import load_plugins

        load_plugins()
        fakes.scheduler_made()
        import sglang.srt.layers.attention.deepseek_v4_backend
        from sglang.test.kits.attention_unittest.attention_methods import dsv4_attention
        from sglang.test.kits.attention_unittest.runner_modes import speculative_draft_extend_runner

    dsv4_attention.ATTENTION_BACKENDS = {"dsv4": _built}
    return dsv4_attention


def _built(runner: Any) -> Any:
    from sglang.srt.configs.model_config import AttentionArch
    from sglang.srt.model_executor.model_runner_components import attention_backend_setup

    # the kit's runner has no more than the attention itself reads
    runner.model_config.attention_arch = AttentionArch.MLA
    return attention_backend_setup.build_attention_backends(model_runner=runner).attn_backend


def case(name: str, mode: str, prefixes: tuple[int, ...], extends: tuple[int, ...] = (), **more: Any) -> Any:
    """A case of the kit. prefixes: tokens of each request in the caches. extends: new ones of each, if not decode."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    given = {"num_heads": 8, "page_size": 256, "attn_sink_value": 0.5, **more}
    return loaded().DSV4AttentionCase(name, "dsv4", ForwardMode[mode], prefix_lens=prefixes, extend_lens=extends, **given)

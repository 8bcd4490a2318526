"""DeepSeek-V4.1's own records on Hopper: `SGLANG_DSV4_KV_LAYOUT=v41_new`, a value of SGLang's own variable.

SGLang serves it on sm_100 alone, whose FlashMLA reads these records, and raises elsewhere. One function of SGLang
decides for the pools of caches and for the plan of their memory. On sm_90 it is hooked, and answers as on sm_100. What
writes the records there is SGLang's: its kernels compile for sm_90 too. What reads them is dsv4attn's.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from dsv4attn import KVCacheLayout
from dsv4attn_sglang.guard import RefusedError

_VARIABLE, NAME = "SGLANG_DSV4_KV_LAYOUT", "v41_new"
LAYOUTS = {"v4": KVCacheLayout.fp8_ds_mla(), NAME: KVCacheLayout.v41_fp8(), "v41_fp4_new": KVCacheLayout.v41_fp4()}
"""Layouts of caches by SGLang's names. Each token's scales follow its codes in the last two."""


def are_named() -> bool:
    """Whether the environment names these records."""
    return os.environ.get(_VARIABLE, "").strip().lower() == NAME


def are_asked_for() -> bool:
    """Whether this process keeps these records because dsv4attn reads them: by name, on sm_90, for FlashMLA."""
    from sglang.srt.runtime_context import get_exec, get_platform
    from sglang.srt.utils import is_cuda

    # other backends have records of their own
    through_flash_mla = get_exec().kernel.dsv4_attn_backend in ("auto", "flashmla")
    return are_named() and is_cuda() and get_platform().device_sm == 90 and through_flash_mla


def select_dsv4_kv_layout(original: Callable[[], Any]) -> Any:  # noqa: ANN401 - SGLang's KVLayout, and an option
    """The layout of window caches, and what `SGLANG_DSV4_COMPRESSED_KV_LAYOUT` says of compressed ones."""
    if not are_asked_for():
        return original()
    from sglang.kernels.ops.attention.dsv4.kv_layout import KVLayout
    from sglang.srt.environ import envs

    return KVLayout.V41_NEW, envs.SGLANG_DSV4_COMPRESSED_KV_LAYOUT.get().lower()


def check(pool: Any) -> None:  # noqa: ANN401 - SGLang's DeepSeekV4TokenToKVPool
    """Refuse these records for layers of DeepSeek-V4, whose entries would be widened to 528 bytes and no more."""
    if others := sorted({4, 128}.intersection(pool.present_ratios)):
        expected, cure = "layers of DeepSeek-V4.1, of ratios 0, 1 and 2", f"leave {_VARIABLE} out"
        raise RefusedError(f"{_VARIABLE}={NAME}", expected=expected, actual=f"ratios {others}", cure=cure)

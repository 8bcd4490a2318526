"""The plugin that TokenSpeed's kernel package loads: its DeepSeek-V4 ops run on dsv4attn.

`register` is the entry point. It registers a kernel for each op of `OPS`, in the priority band of plugins, so that the
op chooses it by itself on every GPU.

    attention  decode, prefill and V4.1's selected attention, by FlashMLA's interface on dsv4attn
    insert     the norm and rotation of q, and the window's keys
    topk       the indexer's selection
"""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version

__all__ = ["OPS", "TESTED", "__version__", "register"]

__version__ = "0.1.0"
TESTED = "0.1.4"
"""The version of tokenspeed_kernel whose Python the tests of this package ran with."""
SWITCH, ANY_VERSION = "DSV4ATTN_TOKENSPEED", "DSV4ATTN_TOKENSPEED_ANY_VERSION"
OPS = (
    *("dsv4_decode", "dsv4_prefill", "dsv4_swa_cache_insert", "dsv4_decode_topk", "dsv4_prefill_topk"),
    "dsv41_selected_attention",
)
"""Ops for which a kernel is registered, under the name `dsv4attn_` and the name of the op."""


def register() -> None:
    """Register a kernel for each op, unless `DSV4ATTN_TOKENSPEED=0`. TokenSpeed's `discover_plugins` calls it.

    Raises RuntimeError for a version that was not tested, and for a variable that is neither 0 nor 1, which TokenSpeed
    shows as a warning before it goes on with its own kernels. `DSV4ATTN_TOKENSPEED_ANY_VERSION=1` tries such a version.
    """
    for name in (SWITCH, ANY_VERSION):
        if os.environ.get(name, "").strip() not in ("", "0", "1"):
            raise RuntimeError(f"dsv4attn-tokenspeed: environment variable {name}: expected 0 or 1 -> correct it")
    if os.environ.get(SWITCH, "").strip() == "0":
        return
    try:
        installed = version("tokenspeed_kernel")
    except PackageNotFoundError:
        installed = "a tokenspeed_kernel without version"
    if installed != TESTED and os.environ.get(ANY_VERSION, "").strip() != "1":
        cure = f"install tokenspeed_kernel=={TESTED}, or set {ANY_VERSION}=1 to try this version"
        raise RuntimeError(
            f"dsv4attn-tokenspeed: version of tokenspeed_kernel: expected {TESTED}, got {installed} -> {cure}"
        )
    from dsv4attn_tokenspeed import attention, insert, topk

    for module in (attention, insert, topk):
        module.register()

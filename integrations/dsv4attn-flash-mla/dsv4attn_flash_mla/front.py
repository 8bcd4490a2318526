"""FlashMLA's Python interface for DeepSeek-V4 on dsv4attn, imported as `flash_mla`. It says so in the log, once.

The functions are those of `dsv4attn.compat.flash_mla`, with two differences. `flash_mla_sparse_fwd` returns no largest
logits unless it is asked for them. `get_mla_metadata` refuses to plan dense attention.
"""

from __future__ import annotations

import logging
from typing import Any

from dsv4attn.compat import flash_mla as _door
from dsv4attn.compat.flash_mla import (
    FlashMLASchedMeta,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_mla_with_kvcache,
    get_mla_decoding_metadata,
    has_legacy,
)
from dsv4attn.errors import UnsupportedError
from dsv4attn_flash_mla import VARIABLE, __version__, other_flash_mla

__all__ = [
    "FlashMLASchedMeta",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_mla_sparse_fwd",
    "flash_mla_with_kvcache",
    "get_mla_decoding_metadata",
    "get_mla_metadata",
    "has_legacy",
]

_KEEP = f"for other models than DeepSeek-V4 uninstall dsv4attn-flash-mla, or set {VARIABLE}=0"


def flash_mla_sparse_fwd(*args: Any, need_max_logits: bool = False, **kwargs: Any) -> tuple[Any, Any, Any]:  # noqa: ANN401
    """See `dsv4attn.compat.flash_mla.flash_mla_sparse_fwd`, whose arguments these are.

    need_max_logits: whether the second result has the largest logits; it is empty otherwise. Engines do not read it.
    """
    return _door.flash_mla_sparse_fwd(*args, need_max_logits=need_max_logits, **kwargs)


def get_mla_metadata(*args: Any, **kwargs: Any) -> tuple[FlashMLASchedMeta, None]:  # noqa: ANN401 - of old versions
    """A new FlashMLASchedMeta, and None. With the arguments of old versions, `topk` must be a number.

    Raises UnsupportedError for dense attention, so that an engine that takes it because `flash_mla` can be imported
    fails when it plans, and not in its first step.
    """
    if (args or kwargs) and kwargs.get("topk", args[5] if len(args) > 5 else None) is None:
        raise UnsupportedError("topk", expected="sparse attention of DeepSeek-V4", actual="dense attention", hint=_KEEP)
    return _door.get_mla_metadata()


def _say() -> None:
    hidden = other_flash_mla()
    instead = f"instead of {hidden}, as {VARIABLE}=1 asks" if hidden else "FlashMLA is not installed"
    logging.getLogger("flash_mla").warning(
        "flash_mla is dsv4attn-flash-mla %s: DeepSeek-V4's sparse attention runs on dsv4attn (%s)", __version__, instead
    )


_say()

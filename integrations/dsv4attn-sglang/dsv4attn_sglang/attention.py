"""FlashMLA's two functions as SGLang calls them, on dsv4attn. Hooks around SGLang's own functions.

Calls that are not DeepSeek-V4's (other records, dense attention) go on to SGLang's function, unchanged. Backends are
chosen as everywhere in dsv4attn: `DSV4ATTN_BACKEND`, configuration file, automatic.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from dsv4attn.compat import flash_mla

HEAD_DIM = 512
_records = {584}
"""Bytes of the window records that are read here."""
_DEFAULTS = {"block_table": None, "cache_seqlens": None, "is_fp8_kvcache": True}
"""Arguments that some of SGLang's functions do not have."""


def serve(record: int) -> None:
    """Let calls with window caches of these records come here. Other models may have records of as many bytes."""
    _records.add(record)


def flash_mla_with_kvcache(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
    """Attention over paged caches: decode, and prefill of few tokens.

    q [T, 1, H, 512] bf16; k_cache and extra_k_cache [pages, page, 1, 584], or 528 and 288 of V4.1's own records, pages
    any distance apart; indices [T, 1, n]
    int32, -1 is absent; topk_length [T] int32. SGLang fills T up to a captured size with rows of index 0 and length 1.
    Returns (out like q, lse [T, H, 1]).
    """
    arguments = _by_name(original, args, kwargs)
    indices, cache = arguments.get("indices"), arguments["k_cache"]
    if indices is None or arguments["q"].shape[-1] != HEAD_DIM or cache.shape[-1] not in _records:
        return original(*args, **kwargs)
    if arguments.get("tile_scheduler_metadata") is None:
        # on XPU and sm_120 SGLang has none
        arguments = {**arguments, "tile_scheduler_metadata": flash_mla.get_mla_metadata()[0]}
    return flash_mla.flash_mla_with_kvcache(**{**_DEFAULTS, **arguments})


def flash_mla_sparse_fwd(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
    """Attention over rows that SGLang has gathered: prefill of many tokens.

    q [T, H, 512] bf16; kv [rows, 1, 512] bf16; indices [T, 1, n] int32; topk_length [T] int32. Returns (out like q,
    None, None): SGLang does not look at the statistics.
    """
    arguments = _by_name(original, args, kwargs)
    if not arguments["q"].shape[-1] == arguments["kv"].shape[-1] == HEAD_DIM:
        return original(*args, **kwargs)
    return flash_mla.flash_mla_sparse_fwd(**{**arguments, "return_log2_lse": False})


def _by_name(original: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Arguments by name. SGLang's order is not FlashMLA's."""
    return inspect.signature(original).bind(*args, **kwargs).arguments if args else kwargs

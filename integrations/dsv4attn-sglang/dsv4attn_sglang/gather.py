"""The keys of a prompt as SGLang gathers them, on dsv4attn: for GPUs on which SGLang's own kernel does not run.

SGLang reads the pages of a prompt's keys into bf16 rows with a Triton kernel that loads e4m3 as such, which Triton
compiles from sm_89 on, and from V4.1's own records on sm_100 alone. This is a hook around that function. For other
records it calls SGLang's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dsv4attn import Backend, PagedKVCache
from dsv4attn.core.attention.overlap import check_results_apart
from dsv4attn_sglang.records import LAYOUTS

_backends: dict[torch.device, Backend] = {}


def serve(device: torch.device, backend: Backend) -> None:
    """Let a backend gather on a device."""
    _backends[device] = backend


def dequantize_k_cache_paged_dsv4(
    original: Callable[..., Tensor],
    quant_k_cache: Tensor,
    page_table_1_flattened: Tensor,
    page_size: int,
    out: Tensor | None = None,
    layout: Any = "v4",  # noqa: ANN401 - SGLang's KVLayout, or its name
) -> Tensor:
    """The records of slots, as rows.

    quant_k_cache: [pages, bytes of a page], any dtype. page_table_1_flattened: [n] int32 or int64 - slots, at least 0.
    out: [n, 1, 512] bf16, rows any distance apart. Returns it, or a new one.
    """
    own = LAYOUTS.get(getattr(layout, "value", layout))
    if own is None:
        return original(quant_k_cache, page_table_1_flattened, page_size, out=out, layout=layout)
    slots, pages = page_table_1_flattened, quant_k_cache.view(torch.uint8)
    check_results_apart({"out": out}, quant_k_cache=pages, page_table_1_flattened=slots)
    if out is None:
        out = torch.empty(slots.shape[0], 1, own.head_dim, dtype=torch.bfloat16, device=pages.device)
    cache = PagedKVCache(pages[:, : page_size * own.record_bytes].view(-1, page_size, own.record_bytes), own)
    # each slot is the last record of a request with one page
    lens, table = (slots % page_size + 1).int(), (slots // page_size).int()[:, None]
    _backends[pages.device].dequantize_and_gather_k_cache(out, cache, lens, torch.ones_like(lens), table, 0)
    return out

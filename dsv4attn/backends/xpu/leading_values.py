"""Attention whose values are the leading dims of the keys, as in DeepSeek-V3.2: the launcher of its kernel."""

from __future__ import annotations

from functools import lru_cache
from itertools import product
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from dsv4attn.backends._triton.cache.records import alignment_of_rows
from dsv4attn.backends._triton.interpreted import INTERPRETED
from dsv4attn.backends._triton.launching.recorded import meta_rows, recorded
from dsv4attn.backends._triton.launching.runtime import launch
from dsv4attn.backends._triton.sizes import cdiv
from dsv4attn.backends._triton.tuning import padded
from dsv4attn.backends.xpu import kernels
from dsv4attn.backends.xpu.tuning import TUNING

_SMALL = TUNING["xpu"]
"""Tuning whose tiles fit every device, also for keys with a tail after the values."""


def attend_leading_values(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    lens: Tensor | None,
    scale: float,
    sink: Tensor | None,
    out: Tensor,
    max_logits: Tensor,
    lse: Tensor,
) -> None:
    """Attend over rows whose leading dims are the values: keys are longer than values.

    q: [T, H, Dqk] bf16 or fp32. kv: [S, 1, Dqk], of at most 128 dims more than out. indices: [T, K] int32 rows of kv.
    lens: [T] int32, leading columns that count; None: all columns. sink: [H] fp32 or None. out: [T, H, Dv], Dv at most
    512, like q. max_logits, lse: [T, H] fp32, contiguous.
    """
    constants = _constants(q.shape[1], out.shape[2], q.shape[2], (q.dtype, kv.dtype), alignment_of_rows(kv))
    launch(
        kernels.attend_leading_values,
        (q.shape[0] * cdiv(q.shape[1], constants["BH"]),),
        (
            q, kv, indices, lens, sink, out, max_logits, lse,
            q.stride(0), q.stride(1), kv.stride(0), indices.stride(0), out.stride(0), out.stride(1),
            indices.shape[1], min(kv.shape[0], 2**31) - 1, float(scale),
        ),
        constants,
        num_warps=_SMALL.warps,
    )  # fmt: skip


@lru_cache(maxsize=256)
def _constants(heads: int, d_v: int, d_qk: int, dtypes: tuple[torch.dtype, torch.dtype], rows: int) -> dict[str, Any]:
    values, exact = padded(d_v), torch.float32 in dtypes
    pieces = 1 if values <= 256 else 2
    return {
        "H": heads,
        "DV": d_v,
        "DQK": d_qk,
        "ROW_ALIGNED": rows,
        "BH": _SMALL.heads,
        "N": _SMALL.keys,
        "C": values // pieces,
        "PIECES": pieces,
        "TAIL": padded(d_qk - d_v),
        "DT": tl.float32 if INTERPRETED or exact else tl.bfloat16,
        "EXACT_CASTS": not INTERPRETED,
    }


@recorded
def variants(heads: int, d_v: int, d_qk: int, dtype: torch.dtype) -> None:
    """Every variant of the kernel for q and contiguous kv of this dtype, with values in the leading dims of keys."""
    q, out = (meta_rows(2, heads, dim, dtype=dtype) for dim in (d_qk, d_v))
    kv, lse = torch.empty(2, 1, d_qk, dtype=dtype, device="meta"), meta_rows(2, heads, dtype=torch.float32)
    for lens, sink in product((None, meta_rows(2)), (None, lse[0])):
        attend_leading_values(q, kv, meta_rows(2, 2), lens, 1.0, sink, out, lse, lse)

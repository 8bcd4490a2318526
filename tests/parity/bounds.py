"""How far a cache format may move the output of a layer; derived, not measured.

One key element. u(bf16) = 2^-8: bf16 keeps 8 significant bits. A RoPE element k is stored as bf16, so it moves by at
most 2^-8 |k|. So does every element of bf16 rows. A NoPE element is rounded to bf16, then to e4m3 times the scale 2^e
of its group. e4m3 keeps 4 significant bits: a normal code is off by at most 2^-4 of the value. A subnormal code is off
by at most half of its step 2^-9, hence 2^-10 2^e, and 2^e < 2 amax / 448 since it is the smallest power of two that
reaches amax: 2^-9 amax / 448. Writers with other largest codes (240 with step 2^-10, or 224 of those) stay below that
too. Nothing saturates, for amax / 2^e is at most the largest code. Together, with amax at least the writer's 1e-4:

    |dk| <= b,  b = 2^-8 |k| + (1 + 2^-8) max(2^-4 |k|, 2^-9 max(amax, 1e-4) / 448)      RoPE: b = 2^-8 |k|

One head of one query. Its weights are p_j over keys k_j and p_s for the sink, which acts as a key of zeros. Keys are
values, so o = sum_j p_j k_j. A logit moves by exactly t_j = scale q.dk_j, so |t_j| <= e_j = scale sum_i |q_i| b_ji; the
sink's does not move. The new output is o' = sum_j p_j exp(t_j) (k_j + dk_j) / Z with Z = p_s + sum_j p_j exp(t_j).
Because sum_j p_j (k_j - o) is zero with the sink counted in,

    Z (o' - o) = sum_j p_j (exp(t_j) - 1) (k_j - o) + sum_j p_j exp(t_j) dk_j

All that follows is linear: inverse RoPE, o_a, o_b. As one matrix M per query and head it gives, for each output,

    |dy| <= sum_heads (L + V) / (p_s + sum_j p_j exp(-e_j))
    L = sum_j p_j (exp(e_j) - 1) |M (k_j - o)|,  V = sum_j p_j exp(e_j) |M| b_j

No step takes errors to be small, random or independent: the bound is rigorous, for every output of every token.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from dsv4attn.core.cache.layout import Fp8Format, KVCacheLayout
from dsv4attn.testing.oracle import attention as oracle
from tests.parity.hf import Trace

BF16, E4M3 = 2.0**-8, 2.0**-4
"""Largest relative error of rounding to nearest."""
SMALLEST_AMAX = 1e-4


def stored(keys: Tensor, layout: KVCacheLayout) -> Tensor:
    """Keys [J, D] as float64 after a stay in a cache, by the oracle's rules and none of the package's."""
    rows = keys.double().numpy()
    if not layout.is_quantised:
        return torch.from_numpy(oracle.round_bf16(rows) if layout.dtype == torch.bfloat16 else rows)
    sizes = {
        "nope_dim": layout.nope_dim,
        "rope_dim": layout.rope_dim,
        "group_size": layout.group_size,
        "scale_bytes": layout.scale_bytes,
    }
    fnuz = layout.fp8_format is Fp8Format.FNUZ
    records = [oracle.quantize_record(row, fnuz=fnuz, **sizes) for row in rows]
    return torch.from_numpy(np.stack([oracle.dequantize_record(r, fnuz=fnuz, **sizes) for r in records]))


def key_bound(keys: Tensor, layout: KVCacheLayout) -> Tensor:
    """How far the format may move each element of keys [J, D]: b [J, D]."""
    size = keys.double().abs()
    bound = BF16 * size
    if not layout.is_quantised:
        return bound if layout.dtype == torch.bfloat16 else torch.zeros_like(size)
    for group in range(0, layout.nope_dim, layout.group_size):
        part = slice(group, min(group + layout.group_size, layout.nope_dim))
        amax = size[:, part].amax(1, keepdim=True).clamp(min=SMALLEST_AMAX)
        bound[:, part] += (1 + BF16) * torch.maximum(E4M3 * size[:, part], 2.0**-9 * amax / 448)
    return bound


def output_bound(seen: Trace, moved: Tensor) -> Tensor:
    """[T, hidden] float64: how far the layer's outputs may move if key elements move by at most moved [J, D]."""
    matrix, keys = after(seen), seen.keys.double()
    p = seen.weights.double()
    e: Tensor = seen.attention.scaling * seen.query.double().abs() @ moved.T
    sink = 1 - p.sum(-1)
    least = (p * (-e).exp()).sum(-1) + sink
    spread = torch.einsum("tmhd,jd->tmhj", matrix, keys) - torch.einsum("tmhd,thd->tmh", matrix, p @ keys)[..., None]
    of_logits = torch.einsum("thj,tmhj->tmh", p * e.expm1(), spread.abs())
    of_values = torch.einsum("thd,tmhd->tmh", (p * e.exp()) @ moved, matrix.abs())
    return ((of_logits + of_values) / least[:, None]).sum(-1)


def after(seen: Trace) -> Tensor:
    """M [T, hidden, H, D] float64: all that follows attention, as one matrix per token: inverse RoPE, o_a, o_b."""
    attention = seen.attention
    groups = attention.config.o_groups
    wo_a = attention.o_a_proj.weight.double().unflatten(0, (groups, -1))
    wo_b = attention.o_b_proj.weight.double().unflatten(1, (groups, -1))
    matrix = torch.einsum("mgr,gri->mgi", wo_b, wo_a).flatten(1).unflatten(1, seen.query.shape[1:])
    tables = seen.arguments["position_embeddings"][attention.rope_layer_type]
    cos, sin = (table[0].double()[:, None, None] for table in tables)
    nope, rope = matrix.split([matrix.shape[-1] - 2 * cos.shape[-1], 2 * cos.shape[-1]], -1)
    even, odd = rope.unflatten(-1, (-1, 2)).unbind(-1)
    # y = even (cos e + sin o) + odd (cos o - sin e)
    turned = torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)
    return torch.cat([nope.expand(*turned.shape[:-1], -1), turned], -1)

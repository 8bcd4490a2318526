"""FlashMLA's fused attention of DeepSeek-V4.1 as a definition: what its kernels compute, for any device to check with.

Names, arguments and results are those of FlashMLA's module of this name. In one call: an RMSNorm of q if asked for,
RoPE of q, sparse attention, inverse RoPE of its output, and e4m3 codes of that with a scale for 32 channels. Here these
are steps in torch around `dsv4attn.compat.flash_mla` in fp32: made to be right, not fast. FlashMLA's run on SM100 and
SM103 alone.

q comes from weights that `permute_q_b_proj` has rearranged, and the codes are for weights of `permute_wv_proj`:

- q: chunks of 16 dims, each chunk of all heads, [32, H, 16] for each token, instead of [H, 512].
- codes: in each group chunks of 32 dims, each of all heads of the group, [16, 8, 32], instead of [8, 512].

Compared with the formula in float64 by the tests; FlashMLA's kernels have not been run for comparison.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4attn.compat.direct import HEAD_DIM, ROPE_DIM
from dsv4attn.compat.flash_mla import flash_mla_sparse_fwd, flash_mla_with_kvcache, get_mla_metadata
from dsv4attn.compat.flash_mla_arguments import check_switch
from dsv4attn.core.attention.checks import check_same_device
from dsv4attn.core.model.rope import apply_rope
from dsv4attn.core.tensorspec import check_tensor
from dsv4attn.core.torch_modes import without_modes
from dsv4attn.errors import ArgumentError

__all__ = ["decode", "permute_q_b_proj", "permute_wv_proj", "prefill"]

Q_CHUNK, O_CHUNK = 16, 32
"""Dims of a chunk of q, and of the output; the latter share a scale."""
GROUP_HEADS = 8
_LARGEST, _LEAST_AMAX = 448.0, 1e-10
"""Largest code, and the least of the largest magnitude of a chunk."""


@without_modes
def prefill(
    enable_q_norm: bool,
    rms_norm_eps: float,
    token_positions: Tensor,
    is_rope_neox_style: bool,
    rope_dim: int,
    cos_sin_cache: Tensor,
    n_wv_group: int,
    num_per_channels: int,
    use_tma_aligned_col_major_sf: bool,
    round_sf: bool,
    use_packed_ue8m0: bool,
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: Tensor | None = None,
    topk_length: Tensor | None = None,
    use_legacy: bool = False,
    *,
    backend: str | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Attention of many queries over selected rows of one matrix of keys.

    enable_q_norm, rms_norm_eps: whether each head of q is divided by the root of its mean square plus eps, which here
       scales its logits. token_positions: [s_q] int32. cos_sin_cache: [positions, 64] fp32, cosines before sines.
       n_wv_group: groups of 8 heads.
    q: [s_q, h_q, 512] bf16, in the order of permuted weights, before RoPE. kv: [s_kv, 1, 512] bf16, rotated. indices:
       [s_q, 1, topk] int32. sm_scale, d_v, attn_sink, topk_length, use_legacy, backend: of `flash_mla_sparse_fwd`.
    is_rope_neox_style: must be False.
    rope_dim: must be 64.
    num_per_channels: must be 32.
    use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0: must be True.

    Returns (out_fp8 [s_q, n_wv_group, 4096] e4m3, out_sf [s_q, n_wv_group, 32] int32, max_logits [s_q, h_q] fp32, lse
    [s_q, h_q] fp32). Rotated q is rounded to bf16. Each int32 has the UE8M0 exponents of four chunks, the first in its
    lowest byte: of the least power of two that is at least amax / 448, amax being at least 1e-10. Tokens of out_sf are
    contiguous, padded to a multiple of four. A query without keys gets zeros, -inf and +inf.
    Raises ArgumentError, UnsupportedError, or NoBackendError.
    """
    _check_switches(
        is_rope_neox_style, rope_dim, num_per_channels, use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0
    )
    angles = _angles(q, token_positions, cos_sin_cache, n_wv_group)
    rotated = _rotated(q, angles, rms_norm_eps if enable_q_norm else None)
    out, top, lse = flash_mla_sparse_fwd(
        rotated, kv, indices, sm_scale, d_v, attn_sink, topk_length, use_legacy, backend=backend
    )
    return *_cast(out, angles, n_wv_group), top, lse


@without_modes
def decode(
    enable_q_norm: bool,
    rms_norm_eps: float,
    token_positions: Tensor,
    is_rope_neox_style: bool,
    rope_dim: int,
    cos_sin_cache: Tensor,
    n_wv_group: int,
    num_per_channels: int,
    use_tma_aligned_col_major_sf: bool,
    round_sf: bool,
    use_packed_ue8m0: bool,
    q: Tensor,
    k_cache: Tensor,
    indices_in_kvcache: Tensor,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: Tensor | None = None,
    topk_length: Tensor | None = None,
    extra_k_cache: Tensor | None = None,
    extra_indices_in_kvcache: Tensor | None = None,
    extra_topk_length: Tensor | None = None,
    use_legacy: bool = False,
    *,
    backend: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention of queries over selected records of one or two paged caches.

    k_cache, extra_k_cache: of V4.1's records, as `flash_mla_with_kvcache` takes them.
    indices_in_kvcache, extra_indices_in_kvcache: [s_q, topk] int32.
    topk_length, extra_topk_length: [s_q] int32.
    enable_q_norm, rms_norm_eps, token_positions, is_rope_neox_style, rope_dim, cos_sin_cache: as in `prefill`.
    n_wv_group, num_per_channels, use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0: as in `prefill`.
    q: [s_q, h_q, 512] bf16, as in `prefill`.
    use_legacy: whether the scales of a page are after all its codes.
    sm_scale, d_v, attn_sink, backend: as in `flash_mla_with_kvcache`.

    Returns (out_fp8, out_sf, lse), as `prefill`. Raises as `prefill`.
    """
    _check_switches(
        is_rope_neox_style, rope_dim, num_per_channels, use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0
    )
    check_switch("use_legacy", use_legacy)
    angles = _angles(q, token_positions, cos_sin_cache, n_wv_group)
    extra = extra_indices_in_kvcache
    for name, rows in (("indices_in_kvcache", indices_in_kvcache), ("extra_indices_in_kvcache", extra)):
        if rows is not None or name == "indices_in_kvcache":
            check_tensor(name, rows, "s_q topk", torch.int32, {"s_q": q.shape[0]})
    rotated = _rotated(q, angles, rms_norm_eps if enable_q_norm else None)
    # each query is a sequence: its length is its own
    out, lse = flash_mla_with_kvcache(
        rotated[:, None],
        k_cache,
        None,
        None,
        d_v,
        get_mla_metadata()[0],
        softmax_scale=sm_scale,
        indices=indices_in_kvcache[:, None],
        attn_sink=attn_sink,
        extra_k_cache=extra_k_cache,
        extra_indices_in_kvcache=None if extra is None else extra[:, None],
        topk_length=topk_length,
        extra_topk_length=extra_topk_length,
        use_legacy=use_legacy,
        kv_format="V41",
        backend=backend,
    )
    return *_cast(out[:, 0], angles, n_wv_group), lse[:, :, 0]


def permute_q_b_proj(weight_and_sf: tuple[Tensor, Tensor], h_q: int, d_q: int) -> tuple[Tensor, Tensor]:
    """Rearrange the weight that makes q, once, so that q comes in the order that `prefill` and `decode` take.

    weight_and_sf: [h_q * d_q, lora] of any dtype, and its scales [h_q * d_q, n] int32. d_q: a multiple of 16. Row
    (d // 16) * h_q * 16 + h * 16 + d % 16 of the result is row h * d_q + d. Returns both, scales as contiguous along
    the rows as they came.
    h_q: number of query heads.
    """
    if d_q % Q_CHUNK:
        raise ArgumentError("d_q", expected=f"a multiple of {Q_CHUNK}", actual=d_q)
    for name, rows in zip(("q_b_proj", "q_b_sf"), weight_and_sf, strict=True):
        check_tensor(name, rows, f"{h_q * d_q} _", rows.dtype, {}, any_strides=True)
    order = torch.arange(h_q * d_q, device=weight_and_sf[0].device)
    order = order.view(h_q, d_q // Q_CHUNK, Q_CHUNK).transpose(0, 1).flatten()
    return _reordered(weight_and_sf[0], order, 0), _reordered(weight_and_sf[1], order, 0)


def permute_wv_proj(weight_and_sf: tuple[Tensor, Tensor], wv_group_size: int, d_o: int) -> tuple[Tensor, Tensor]:
    """Rearrange the weight that takes the output, once, to the order of the codes of `prefill` and `decode`.

    weight_and_sf: [groups, out, wv_group_size * d_o] of any dtype, and its scales [groups, out, wv_group_size * d_o /
    128] int32, each with the exponents of four times 32 columns. d_o: a multiple of 32. Column (d // 32) *
    wv_group_size * 32 + h * 32 + d % 32 of the result is column h * d_o + d. Returns both, scales as contiguous along
    the rows as they came.
    wv_group_size: heads of a group.
    """
    chunks, columns = wv_group_size * d_o // O_CHUNK, wv_group_size * d_o
    if d_o % O_CHUNK or chunks % 4:
        expected = f"a multiple of {O_CHUNK}, with a multiple of four such chunks in a group"
        raise ArgumentError("d_o", expected=expected, actual=d_o)
    weight, scales = weight_and_sf
    letters: dict[str, int] = {}
    check_tensor("wv_proj", weight, f"groups out {columns}", weight.dtype, letters, any_strides=True)
    check_tensor("wv_sf", scales, f"groups out {chunks // 4}", torch.int32, letters, any_strides=True)
    order = torch.arange(chunks, device=weight.device).view(wv_group_size, -1).T.flatten()
    across = (order[:, None] * O_CHUNK + torch.arange(O_CHUNK, device=weight.device)).flatten()
    exponents = _unpacked(scales)[..., order]
    rearranged = torch.empty_strided(scales.shape, scales.stride(), dtype=torch.int32, device=scales.device)
    return _reordered(weight, across, 2), rearranged.copy_(_packed(exponents))


def _check_switches(neox: bool, rope_dim: int, channels: int, *others: bool) -> None:
    """Raise ArgumentError for a switch that has not its one value."""
    switches: dict[str, tuple[object, object]] = {
        "is_rope_neox_style": (neox, False),
        "rope_dim": (rope_dim, ROPE_DIM),
        "num_per_channels": (channels, O_CHUNK),
    }
    names = ("use_tma_aligned_col_major_sf", "round_sf", "use_packed_ue8m0")
    switches |= {name: (value, True) for name, value in zip(names, others, strict=True)}
    for name, (value, only) in switches.items():
        if value != only:
            raise ArgumentError(name, expected=f"{only}, as FlashMLA", actual=value)


def _angles(q: Tensor, positions: Tensor, table: Tensor, groups: int) -> Tensor:
    """[s_q, 1, 64] cosines and sines of the queries, whose arguments are checked."""
    letters: dict[str, int] = {}
    check_tensor("q", q, f"s_q h_q {HEAD_DIM}", torch.bfloat16, letters)
    check_tensor("token_positions", positions, "s_q", torch.int32, letters)
    check_tensor("cos_sin_cache", table, f"_ {ROPE_DIM}", torch.float32, letters)
    check_same_device(q, token_positions=positions, cos_sin_cache=table)
    if letters["h_q"] != groups * GROUP_HEADS:
        expected = f"groups of {GROUP_HEADS} heads, {letters['h_q'] / GROUP_HEADS:g} for {letters['h_q']} heads"
        raise ArgumentError("n_wv_group", expected=expected, actual=groups)
    return table[positions.long()][:, None]


def _rotated(q: Tensor, angles: Tensor, eps: float | None) -> Tensor:
    """[s_q, h_q, 512] fp32 of permuted q: rotated, rounded to bf16, and divided by its norm if eps is given."""
    tokens, heads, dim = q.shape
    plain = q.reshape(tokens, dim // Q_CHUNK, heads, Q_CHUNK).transpose(1, 2).reshape(tokens, heads, dim).float()
    turned = apply_rope(plain[..., -ROPE_DIM:], angles)
    rotated = torch.cat([plain[..., :-ROPE_DIM], turned], -1).bfloat16().float()
    return rotated if eps is None else rotated * torch.rsqrt(plain.square().mean(-1, keepdim=True) + eps)


def _cast(out: Tensor, angles: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Codes and packed scales of outputs [s_q, h_q, 512] fp32, which are rotated back."""
    tokens = out.shape[0]
    back = torch.cat([out[..., :-ROPE_DIM], apply_rope(out[..., -ROPE_DIM:], angles, inverse=True)], -1)
    # [s_q, groups, chunks of a head, heads, 32]
    chunks = back.view(tokens, groups, GROUP_HEADS, -1, O_CHUNK).transpose(2, 3)
    mantissa, exponent = torch.frexp(chunks.abs().amax(-1).clamp_min(_LEAST_AMAX) / _LARGEST)
    exponent = exponent - (mantissa == 0.5).to(exponent.dtype)
    codes = torch.ldexp(chunks, -exponent[..., None]).clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn)
    packed = _packed((exponent + 127).flatten(2))
    rows = out.new_zeros((groups, packed.shape[2], -(-tokens // 4) * 4), dtype=torch.int32)
    scales = rows.permute(2, 0, 1)[:tokens]
    return codes.flatten(2), scales.copy_(packed)


def _reordered(x: Tensor, order: Tensor, dim: int) -> Tensor:
    """Rows or columns in another order; the memory is ordered as that of x. Codes of one byte are moved as bytes."""
    reordered = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
    raw, to = (x.view(torch.uint8), reordered.view(torch.uint8)) if x.dtype.itemsize == 1 else (x, reordered)
    to.copy_(raw.index_select(dim, order))
    return reordered


def _packed(exponents: Tensor) -> Tensor:
    """[..., n] int32 of bytes [..., 4 n], the first of four in the lowest bits."""
    shifts = torch.tensor([0, 8, 16, 24], dtype=torch.int32, device=exponents.device)
    parts: Tensor = exponents.int().unflatten(-1, (-1, 4)) << shifts
    return parts.sum(-1, dtype=torch.int32)


def _unpacked(scales: Tensor) -> Tensor:
    """[..., 4 n] int32: the bytes of int32 [..., n]."""
    shifts = torch.tensor([0, 8, 16, 24], dtype=torch.int32, device=scales.device)
    return ((scales[..., None] >> shifts) & 255).flatten(-2)

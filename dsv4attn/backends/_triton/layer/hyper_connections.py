"""Hyper-connections: the launchers of `kernels_hyper_connections`, with tiles by the number of tokens.

`mhc_pre`, `mhc_fused_post_pre`, their delayed forms and `hc_head` take two launches for each chunk of tokens: the first
makes the products of the streams with their mixes, the second mixes the streams, which are in the device's cache then.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import torch
from attrs import frozen
from torch import Tensor

from dsv4attn.backends._triton.cache.records import alignment_of_rows
from dsv4attn.backends._triton.launching.runtime import architecture, launch, multiprocessors
from dsv4attn.backends._triton.layer.hyper_connections_tuning import (
    FEW,
    Tile,
    Tuning,
    alignment,
    fused_constants,
    heads_of,
    mix_block,
    mix_constants,
    post_constants,
    products_constants,
    tile_of,
    tuning_for,
)
from dsv4attn.backends._triton.layer.kernels_hyper_connections import (
    mix_kernel,
    post_kernel,
    post_products_kernel,
    products_kernel,
)
from dsv4attn.core.torch_modes import without_modes

__all__ = [
    "Delayed", "hc_head", "mhc_collapse", "mhc_fused_post_pre", "mhc_fused_post_pre_delayed", "mhc_post", "mhc_pre",
    "mhc_pre_delayed", "mix", "results", "transient_bytes",
]  # fmt: skip

Numbers: TypeAlias = tuple[float, float, float, float, int, float]
"""rms_eps, pre_eps, sinkhorn_eps, factor of post, iterations, norm_eps."""
NO_NUMBERS: Numbers = (0.0, 0.0, 0.0, 0.0, 0, 0.0)


@frozen(eq=False)
class Delayed:
    """What DeepSeek-V4.1 weighs streams by, and what it leaves for the next sublayer.

    previous: [T, n] fp32, the pre of the sublayer before; None for stream 0.
    pre: [T, n] fp32, dense, to be written; None where streams are collapsed.
    """

    previous: Tensor | None
    pre: Tensor | None = None


@without_modes
def mhc_pre(
    residual: Tensor,
    fn: Tensor,
    hc_scale: Tensor,
    hc_base: Tensor,
    rms_eps: float,
    hc_pre_eps: float,
    hc_sinkhorn_eps: float,
    hc_post_mult_value: float = 2.0,
    sinkhorn_repeat: int = 20,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
    *,
    deterministic: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `definitions`, mhc_pre.

    deterministic: the bits of a token do not depend on the number of tokens; they never depend on the other tokens.
    """
    post, comb, out = results(residual)
    numbers = rms_eps, hc_pre_eps, hc_sinkhorn_eps, hc_post_mult_value, sinkhorn_repeat, norm_eps
    _pre(residual, fn, hc_scale, hc_base, norm_weight, post, comb, out, numbers, None, deterministic=deterministic)
    return post, comb, out


@without_modes
def mhc_post(x: Tensor, residual: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """See `definitions`, mhc_post. The bits of a token never depend on the other tokens."""
    count, n, hidden = residual.shape
    out = torch.empty_like(residual, memory_format=torch.contiguous_format)
    block, aligned = _tuning().post, alignment_of_rows(x, residual)
    launch(
        post_kernel,
        (-(-count // block.tokens) * -(-hidden // block.columns),),
        (x, residual, post, comb, out, count, *_strides(x, residual, post, comb)),
        post_constants(block, n, hidden, aligned, alignment(hidden, out.dtype)),
        num_warps=block.warps,
    )
    return out


@without_modes
def mhc_fused_post_pre(
    x: Tensor,
    residual: Tensor,
    post: Tensor,
    comb: Tensor,
    fn: Tensor,
    hc_scale: Tensor,
    hc_base: Tensor,
    rms_eps: float,
    hc_pre_eps: float,
    hc_sinkhorn_eps: float,
    hc_post_mult_value: float = 2.0,
    sinkhorn_repeat: int = 20,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
    *,
    deterministic: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `definitions`, mhc_fused_post_pre. deterministic: as of `mhc_pre`."""
    numbers = rms_eps, hc_pre_eps, hc_sinkhorn_eps, hc_post_mult_value, sinkhorn_repeat, norm_eps
    given = x, residual, post, comb, fn, hc_scale, hc_base, norm_weight
    return _fused(*given, numbers, None, deterministic=deterministic)


@without_modes
def mhc_pre_delayed(
    residual: Tensor,
    previous_pre: Tensor | None,
    fn: Tensor,
    hc_scale: Tensor,
    hc_base: Tensor,
    rms_eps: float,
    hc_pre_eps: float,
    hc_sinkhorn_eps: float,
    hc_post_mult_value: float = 2.0,
    sinkhorn_repeat: int = 20,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
    *,
    deterministic: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `definitions`, mhc_pre_delayed. deterministic: as of `mhc_pre`."""
    post, comb, out = results(residual)
    pre = torch.empty_like(post[:, :, 0])
    numbers = rms_eps, hc_pre_eps, hc_sinkhorn_eps, hc_post_mult_value, sinkhorn_repeat, norm_eps
    given = residual, fn, hc_scale, hc_base, norm_weight, post, comb, out, numbers
    _pre(*given, Delayed(previous_pre, pre), deterministic=deterministic)
    return pre, post, comb, out


@without_modes
def mhc_fused_post_pre_delayed(
    x: Tensor,
    residual: Tensor,
    post: Tensor,
    comb: Tensor,
    previous_pre: Tensor | None,
    fn: Tensor,
    hc_scale: Tensor,
    hc_base: Tensor,
    rms_eps: float,
    hc_pre_eps: float,
    hc_sinkhorn_eps: float,
    hc_post_mult_value: float = 2.0,
    sinkhorn_repeat: int = 20,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
    *,
    deterministic: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See `definitions`, mhc_fused_post_pre_delayed. deterministic: as of `mhc_pre`."""
    pre = post.new_empty(residual.shape[:2])
    numbers = rms_eps, hc_pre_eps, hc_sinkhorn_eps, hc_post_mult_value, sinkhorn_repeat, norm_eps
    given = x, residual, post, comb, fn, hc_scale, hc_base, norm_weight, numbers
    new, new_post, new_comb, out = _fused(*given, Delayed(previous_pre, pre), deterministic=deterministic)
    return new, pre, new_post, new_comb, out


@without_modes
def mhc_collapse(streams: Tensor, pre: Tensor) -> Tensor:
    """See `definitions`, mhc_collapse. The bits of a token never depend on the other tokens."""
    count, _, hidden = streams.shape
    out = streams.new_empty(count, hidden)
    mix(streams, None, None, None, None, None, None, out, 0, count, NO_NUMBERS, FEW + 1, Delayed(pre))
    return out


@without_modes
def hc_head(
    streams: Tensor,
    hc_fn: Tensor,
    hc_scale: Tensor,
    hc_base: Tensor,
    rms_eps: float,
    hc_eps: float,
    *,
    deterministic: bool = False,
) -> Tensor:
    """See `definitions`, hc_head. deterministic: as of `mhc_pre`."""
    out = streams.new_empty(streams.shape[0], streams.shape[2])
    numbers = rms_eps, hc_eps, 0.0, 0.0, 0, 0.0
    _pre(streams, hc_fn, hc_scale, hc_base, None, None, None, out, numbers, None, deterministic=deterministic)
    return out


def transient_bytes(max_tokens: int, n: int, hidden: int) -> int:
    """Upper bound on the temporaries of a step: the products of a chunk of tokens."""
    tuning = _tuning()
    tiles = tuning.few, tuning.many, tuning.fused_few, tuning.fused_many, tuning.plain
    splits = -(-hidden // min(tile.columns for tile in tiles))
    return 4 * min(max_tokens, tuning.chunk) * splits * _width(2 * n + n * n)


def _tuning() -> Tuning:
    return tuning_for(architecture())


def _tokens(streams: Tensor, *, deterministic: bool) -> int:
    """The number of tokens that tiles follow."""
    return FEW + 1 if deterministic else streams.shape[0]


def _pre(
    streams: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    norm: Tensor | None,
    post: Tensor | None,
    comb: Tensor | None,
    out: Tensor,
    numbers: Numbers,
    delayed: Delayed | None,
    *,
    deterministic: bool,
) -> None:
    """Fill post and comb, which the head does not have, and out from streams that stay as they are."""
    _, n, hidden = streams.shape
    aligned, tokens = alignment_of_rows(streams), _tokens(streams, deterministic=deterministic)
    tile = tile_of(_tuning(), tokens, n, streams.dtype, aligned, fused=False)
    sizes = tile, n, hidden, fn.shape[0], streams.dtype, aligned, _fn_alignment(fn, hidden)
    for first, end, products, groups in _chunks(streams, fn, tile):
        launch(
            products_kernel,
            (groups * products.shape[1],),
            (streams, fn, products, first, end, groups, streams.stride(0), streams.stride(1), fn.stride(0)),
            products_constants(*sizes),
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
        mix(streams, products, scale, base, norm, post, comb, out, first, end, numbers, tokens, delayed)


def _fused(
    x: Tensor,
    residual: Tensor,
    post: Tensor,
    comb: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    norm: Tensor | None,
    numbers: Numbers,
    delayed: Delayed | None,
    *,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(new streams, post, comb, input of the sublayer)."""
    hidden, n = residual.shape[2], residual.shape[1]
    new = torch.empty_like(residual, memory_format=torch.contiguous_format)
    new_post, new_comb, out = results(residual)
    aligned, tokens = alignment_of_rows(x, residual), _tokens(residual, deterministic=deterministic)
    tile = tile_of(_tuning(), tokens, n, residual.dtype, aligned, fused=True)
    sizes = tile, n, hidden, fn.shape[0], residual.dtype, aligned, _fn_alignment(fn, hidden)
    strides = *_strides(x, residual, post, comb), fn.stride(0)
    for first, end, products, groups in _chunks(residual, fn, tile):
        launch(
            post_products_kernel,
            (groups * products.shape[1],),
            (x, residual, post, comb, fn, new, products, first, end, groups, *strides),
            fused_constants(*sizes, alignment(hidden, new.dtype)),
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
        mix(new, products, scale, base, norm, new_post, new_comb, out, first, end, numbers, tokens, delayed)
    return new, new_post, new_comb, out


def results(residual: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Empty post, comb and layer_input."""
    count, n, hidden = residual.shape
    post = residual.new_empty(count, n, 1, dtype=torch.float32)
    return post, post.new_empty(count, n, n), residual.new_empty(count, hidden)


def _strides(x: Tensor, residual: Tensor, post: Tensor, comb: Tensor) -> tuple[int, ...]:
    inner = post.stride(0), post.stride(1), comb.stride(0), comb.stride(1)
    return x.stride(0), residual.stride(0), residual.stride(1), *inner


def _fn_alignment(fn: Tensor, hidden: int) -> int:
    """Bytes that divide the address of a stream's columns in every row of fn."""
    return min(alignment(hidden, fn.dtype), alignment_of_rows(fn))


def _width(mixes: int) -> int:
    """Elements of a row of products and squares: a multiple of 32 bytes."""
    return 8 * (mixes // 8 + 1)


def _chunks(streams: Tensor, fn: Tensor, tile: Tile) -> Iterator[tuple[int, int, Tensor, int]]:
    """(first token, end, memory for products, groups of programs) of each pair of launches."""
    count, _, hidden = streams.shape
    chunk, splits = _tuning().chunk, -(-hidden // tile.columns)
    products = fn.new_empty(min(count, chunk), splits, _width(fn.shape[0]), dtype=torch.float32)
    groups = max(tile.programs * multiprocessors() // splits, 1) if tile.held else count
    for first in range(0, count, chunk):
        end = min(first + chunk, count)
        yield first, end, products, min(groups, -(-(end - first) // tile.tokens))


def mix(
    streams: Tensor,
    products: Tensor | None,
    scale: Tensor | None,
    base: Tensor | None,
    norm: Tensor | None,
    post: Tensor | None,
    comb: Tensor | None,
    out: Tensor,
    first: int,
    end: int,
    numbers: Numbers,
    tokens: int,
    delayed: Delayed | None = None,
) -> None:
    """Launch `mix_kernel`: post, comb, which the head does not have, and out of tokens first .. end.

    products: [end - first or more, splits, width] fp32 - of the streams with their mixes; see `store_products`; None,
    with scale and base, where streams are collapsed. tokens: how many of them the block follows.
    """
    _, n, hidden = streams.shape
    tuning = _tuning()
    block = mix_block(tuning, tokens, streams.dtype, normed=norm is not None)
    aligned = alignment_of_rows(streams), 1 if norm is None else alignment_of_rows(norm), alignment(hidden, out.dtype)
    mixes, splits = n if base is None else len(base), 1 if products is None else products.shape[1]
    constants = mix_constants(block, heads_of(tuning, tokens), tuning.summed, n, hidden, mixes, splits, *aligned)
    blocks = -(-hidden // block.columns) if norm is None else 1
    tiles = 0 if comb is None else -(-(end - first) // constants["BLOCK_R"])
    rms_eps, pre_eps, comb_eps, factor, repeat, norm_eps = numbers
    previous, pre = (None, None) if delayed is None else (delayed.previous, delayed.pre)
    weights = (0, 0) if previous is None else previous.stride()
    launch(
        mix_kernel,
        (tiles + -(-(end - first) // block.tokens) * blocks,),
        (
            streams, products, scale, base, norm, previous, pre, post, comb, out, first, end, streams.stride(0),
            streams.stride(1), *weights, float(rms_eps), float(pre_eps), float(comb_eps), float(factor), repeat,
            float(norm_eps),
        ),
        constants,
        num_warps=block.warps,
    )  # fmt: skip

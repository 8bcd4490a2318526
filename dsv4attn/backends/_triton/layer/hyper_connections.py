"""Hyper-connections: the launchers of `kernels_hyper_connections`, with tiles by the number of tokens.

`mhc_pre`, `mhc_fused_post_pre` and `hc_head` take two launches for each chunk of tokens: the first makes the products
of the streams with their mixes, the second mixes the streams, which are in the device's cache then.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import product
from typing import Any, TypeAlias

import torch
import triton
from torch import Tensor

from dsv4attn.backends._triton.cache.records import alignment_of_rows, row_alignments
from dsv4attn.backends._triton.compiling.variant import Variant, pointer_type
from dsv4attn.backends._triton.launching.runtime import INTERPRETED, WIDE, architecture, launch, multiprocessors
from dsv4attn.backends._triton.layer.hyper_connections_tuning import (
    FEW,
    Block,
    Tile,
    Tuning,
    heads_of,
    mix_block,
    tile_of,
    tuning_for,
)
from dsv4attn.backends._triton.layer.kernels_hyper_connections import (
    mix_kernel,
    post_kernel,
    post_products_kernel,
    products_kernel,
)
from dsv4attn.backends._triton.untyped import Kernel

__all__ = [
    "hc_head", "mhc_fused_post_pre", "mhc_post", "mhc_pre", "mix", "mix_variants", "results", "transient_bytes",
    "variants",
]  # fmt: skip

LEAST = 16
"""Fewest columns of a matrix product."""
MOST_SPLITS = 128
"""Most splits that are added at a time."""

Numbers: TypeAlias = tuple[float, float, float, float, int, float]
"""rms_eps, pre_eps, sinkhorn_eps, factor of post, iterations, norm_eps."""


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
    """See `LayerSteps.mhc_pre`.

    deterministic: the bits of a token do not depend on the number of tokens; they never depend on the other tokens.
    """
    post, comb, out = results(residual)
    numbers = rms_eps, hc_pre_eps, hc_sinkhorn_eps, hc_post_mult_value, sinkhorn_repeat, norm_eps
    _pre(residual, fn, hc_scale, hc_base, norm_weight, post, comb, out, numbers, deterministic=deterministic)
    return post, comb, out


def mhc_post(x: Tensor, residual: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """See `LayerSteps.mhc_post`. The bits of a token never depend on the other tokens."""
    count, n, hidden = residual.shape
    out = torch.empty_like(residual, memory_format=torch.contiguous_format)
    block, aligned = _tuning().post, alignment_of_rows(x, residual)
    launch(
        post_kernel,
        (-(-count // block.tokens) * -(-hidden // block.columns),),
        (x, residual, post, comb, out, count, *_strides(x, residual, post, comb)),
        _post_constants(block, n, hidden, aligned, _alignment(hidden, out.dtype)),
        num_warps=block.warps,
    )
    return out


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
    """See `LayerSteps.mhc_fused_post_pre`. deterministic: as of `mhc_pre`."""
    hidden = residual.shape[2]
    new = torch.empty_like(residual, memory_format=torch.contiguous_format)
    new_post, new_comb, out = results(residual)
    numbers = rms_eps, hc_pre_eps, hc_sinkhorn_eps, hc_post_mult_value, sinkhorn_repeat, norm_eps
    aligned = alignment_of_rows(x, residual)
    tokens, n = _tokens(residual, deterministic=deterministic), residual.shape[1]
    tile = tile_of(_tuning(), tokens, n, residual.dtype, aligned, fused=True)
    sizes = tile, n, hidden, fn.shape[0], residual.dtype, aligned, _fn_alignment(fn, hidden)
    strides = *_strides(x, residual, post, comb), fn.stride(0)
    for first, end, products, groups in _chunks(residual, fn, tile):
        launch(
            post_products_kernel,
            (groups * products.shape[1],),
            (x, residual, post, comb, fn, new, products, first, end, groups, *strides),
            _fused_constants(*sizes, _alignment(hidden, new.dtype)),
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
        mix(new, products, hc_scale, hc_base, norm_weight, new_post, new_comb, out, first, end, numbers, tokens)
    return new, new_post, new_comb, out


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
    """See `LayerSteps.hc_head`. deterministic: as of `mhc_pre`."""
    out = streams.new_empty(streams.shape[0], streams.shape[2])
    numbers = rms_eps, hc_eps, 0.0, 0.0, 0, 0.0
    _pre(streams, hc_fn, hc_scale, hc_base, None, None, None, out, numbers, deterministic=deterministic)
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
            _products_constants(*sizes),
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
        mix(streams, products, scale, base, norm, post, comb, out, first, end, numbers, tokens)


def results(residual: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Empty post, comb and layer_input."""
    count, n, hidden = residual.shape
    post = residual.new_empty(count, n, 1, dtype=torch.float32)
    return post, post.new_empty(count, n, n), residual.new_empty(count, hidden)


def _strides(x: Tensor, residual: Tensor, post: Tensor, comb: Tensor) -> tuple[int, ...]:
    inner = post.stride(0), post.stride(1), comb.stride(0), comb.stride(1)
    return x.stride(0), residual.stride(0), residual.stride(1), *inner


def _alignment(hidden: int, dtype: torch.dtype) -> int:
    """Alignment of the rows of a dense tensor [.., hidden]."""
    return 1 if hidden * dtype.itemsize % WIDE else WIDE


def _fn_alignment(fn: Tensor, hidden: int) -> int:
    """Bytes that divide the address of a stream's columns in every row of fn."""
    return min(_alignment(hidden, fn.dtype), alignment_of_rows(fn))


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
    products: Tensor,
    scale: Tensor,
    base: Tensor,
    norm: Tensor | None,
    post: Tensor | None,
    comb: Tensor | None,
    out: Tensor,
    first: int,
    end: int,
    numbers: Numbers,
    tokens: int,
) -> None:
    """Launch `mix_kernel`: post, comb, which the head does not have, and out of tokens first .. end.

    products: [end - first or more, splits, width] fp32 - of the streams with their mixes; see `store_products`.
    tokens: how many of them the block follows.
    """
    _, n, hidden = streams.shape
    tuning = _tuning()
    block = mix_block(tuning, tokens, streams.dtype, normed=norm is not None)
    aligned = alignment_of_rows(streams), 1 if norm is None else alignment_of_rows(norm), _alignment(hidden, out.dtype)
    constants = _mix_constants(
        block, heads_of(tuning, tokens), tuning.summed, n, hidden, len(base), products.shape[1], *aligned
    )
    blocks = -(-hidden // block.columns) if norm is None else 1
    tiles = 0 if comb is None else -(-(end - first) // constants["BLOCK_R"])
    rms_eps, pre_eps, comb_eps, factor, repeat, norm_eps = numbers
    launch(
        mix_kernel,
        (tiles + -(-(end - first) // block.tokens) * blocks,),
        (
            streams, products, scale, base, norm, post, comb, out, first, end, streams.stride(0), streams.stride(1),
            float(rms_eps), float(pre_eps), float(comb_eps), float(factor), repeat, float(norm_eps),
        ),
        constants,
        num_warps=block.warps,
    )  # fmt: skip


@cache
def _products_constants(
    tile: Tile, n: int, hidden: int, mixes: int, dtype: torch.dtype, aligned: int, fn_aligned: int
) -> dict[str, Any]:
    return {
        "N": n,
        "HIDDEN": hidden,
        "MIXES": mixes,
        "BLOCK_M": tile.tokens,
        "BLOCK_K": tile.columns,
        "BLOCK_C": max(triton.next_power_of_2(mixes), LEAST),
        "STAGES": tile.stages,
        "HELD": tile.held,
        "ALIGNED": aligned,
        "FN_ALIGNED": fn_aligned,
        # interpreted bf16 is multiplied as bit patterns
        "IN_BF16": dtype == torch.bfloat16 and not INTERPRETED,
    }


@cache
def _fused_constants(
    tile: Tile, n: int, hidden: int, mixes: int, dtype: torch.dtype, aligned: int, fn_aligned: int, out_aligned: int
) -> dict[str, Any]:
    constants = _products_constants(tile, n, hidden, mixes, dtype, aligned, fn_aligned)
    return {**constants, "OUT_ALIGNED": out_aligned, "EXACT_CASTS": not INTERPRETED}


@cache
def _post_constants(block: Block, n: int, hidden: int, aligned: int, out_aligned: int) -> dict[str, Any]:
    return {
        "N": n,
        "HIDDEN": hidden,
        "BLOCK_M": block.tokens,
        "BLOCK": min(block.columns, triton.next_power_of_2(hidden)),
        "ALIGNED": aligned,
        "OUT_ALIGNED": out_aligned,
        "EXACT_CASTS": not INTERPRETED,
    }


@cache
def _mix_constants(
    block: Block, rows: int, summed: int, n: int, hidden: int, mixes: int, splits: int,
    aligned: int, norm_aligned: int, out_aligned: int,
) -> dict[str, Any]:  # fmt: skip
    added = max(summed // (rows * triton.next_power_of_2(mixes + 1)), 1)
    return {
        **_post_constants(block, n, hidden, aligned, out_aligned),
        "MIXES": mixes,
        "SPLITS": splits,
        "BLOCK_R": rows,
        "BLOCK_S": min(triton.next_power_of_2(splits), added),
        "BLOCK_A": min(triton.next_power_of_2(splits), MOST_SPLITS),
        "NORM_ALIGNED": norm_aligned,
    }


def variants(
    n: int,
    hidden: int,
    dtype: torch.dtype,
    norm_dtype: torch.dtype | None = None,
    *,
    aligned: bool = True,
    arch: str = "",
) -> Iterator[Variant]:
    """Every form that the steps can ask for on an architecture, with streams of this dtype.

    norm_dtype: of the weight of the norm, or None without one. aligned: whether rows of streams, x and fn begin at
    multiples of 16 bytes.
    """
    tuning, mixes, out_aligned = tuning_for(arch), 2 * n + n * n, _alignment(hidden, dtype)
    rows, fn_rows = (row_alignments(hidden, each, aligned=aligned) for each in (dtype, torch.float32))
    types = _types(dtype)
    for row in rows:
        constants = _post_constants(tuning.post, n, hidden, row, out_aligned)
        yield Variant.from_types(post_kernel, types, constants, num_warps=tuning.post.warps)
    for count, row, fn_row in product((FEW, FEW + 1), rows, fn_rows):
        tile = tile_of(tuning, count, n, dtype, row, fused=False)
        fused = tile_of(tuning, count, n, dtype, row, fused=True)
        for width in (mixes, n):
            constants = _products_constants(tile, n, hidden, width, dtype, row, fn_row)
            yield _form(products_kernel, types, constants, tile)
        constants = _fused_constants(fused, n, hidden, mixes, dtype, row, fn_row, out_aligned)
        yield _form(post_products_kernel, types, constants, fused)
        splits, own = -(-hidden // tile.columns), -(-hidden // fused.columns)
        for most in (FEW, FEW + 1):
            for used, at, norm, head in (
                (splits, row, norm_dtype, False), (own, out_aligned, norm_dtype, False), (splits, row, None, True)
            ):  # fmt: skip
                yield from mix_variants((n, hidden, dtype), norm, used, at, most, head=head, aligned=aligned, arch=arch)


def mix_variants(
    dims: tuple[int, int, torch.dtype], norm_dtype: torch.dtype | None, splits: int, row: int, tokens: int, *,
    head: bool = False, aligned: bool, arch: str,
) -> Iterator[Variant]:  # fmt: skip
    """Forms of `mix_kernel` for so many tokens of n streams of hidden columns, in rows aligned to `row` bytes."""
    (n, hidden, dtype), tuning = dims, tuning_for(arch)
    types = {**_types(dtype), "NORM": "none" if norm_dtype is None else pointer_type(norm_dtype)}
    if head:
        types |= {"POST": "none", "COMB": "none"}
    block = mix_block(tuning, tokens, dtype, normed=norm_dtype is not None)
    width, out_aligned = n if head else 2 * n + n * n, _alignment(hidden, dtype)
    for norm_aligned in (1,) if norm_dtype is None else (WIDE,) if aligned else (WIDE, 1):
        sizes = n, hidden, width, splits, row, norm_aligned, out_aligned
        constants = _mix_constants(block, heads_of(tuning, tokens), tuning.summed, *sizes)
        yield Variant.from_types(mix_kernel, types, constants, num_warps=block.warps)


def _types(dtype: torch.dtype) -> dict[str, str]:
    streams = dict.fromkeys(("X", "STREAMS", "OUT"), pointer_type(dtype))
    return {**streams, **dict.fromkeys(("POST", "COMB", "FN", "PRODUCTS", "SCALE", "BASE"), "*fp32")}


def _form(kernel: Kernel, types: dict[str, str], constants: dict[str, Any], tile: Tile) -> Variant:
    return Variant.from_types(kernel, types, constants, num_warps=tile.warps, num_stages=tile.stages)

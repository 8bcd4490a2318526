"""Every compiled form of the hyper-connections, for warm-up and cross-compilation."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import torch

from dsv4attn.backends._triton.cache.records import row_alignments
from dsv4attn.backends._triton.compiling.variant import Variant, pointer_type
from dsv4attn.backends._triton.launching.runtime import WIDE
from dsv4attn.backends._triton.layer.hyper_connections_tuning import (
    FEW,
    Tile,
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
from dsv4attn.backends._triton.untyped import Kernel

__all__ = ["mix_variants", "variants"]


def variants(
    n: int,
    hidden: int,
    dtype: torch.dtype,
    norm_dtype: torch.dtype | None = None,
    *,
    delayed: bool = False,
    aligned: bool = True,
    arch: str = "",
) -> Iterator[Variant]:
    """Every variant that the steps can need on an architecture, with streams of this dtype.

    norm_dtype: of the weight of the norm, or None without one. delayed: the steps of DeepSeek-V4.1 instead of V4's.
    aligned: whether rows of streams, x and fn begin at multiples of 16 bytes.
    """
    tuning, mixes, out_aligned = tuning_for(arch), 2 * n + n * n, alignment(hidden, dtype)
    rows, fn_rows = (row_alignments(hidden, each, aligned=aligned) for each in (dtype, torch.float32))
    types = _types(dtype)
    for row in rows:
        constants = post_constants(tuning.post, n, hidden, row, out_aligned)
        yield Variant.from_types(post_kernel, types, constants, num_warps=tuning.post.warps)
    for count, row, fn_row in product((FEW, FEW + 1), rows, fn_rows):
        tile = tile_of(tuning, count, n, dtype, row, fused=False)
        fused = tile_of(tuning, count, n, dtype, row, fused=True)
        for width in (mixes,) if delayed else (mixes, n):
            constants = products_constants(tile, n, hidden, width, dtype, row, fn_row)
            yield _form(products_kernel, types, constants, tile)
        constants = fused_constants(fused, n, hidden, mixes, dtype, row, fn_row, out_aligned)
        yield _form(post_products_kernel, types, constants, fused)
        splits, own = -(-hidden // tile.columns), -(-hidden // fused.columns)
        forms = partial(mix_variants, (n, hidden, dtype), aligned=aligned, arch=arch)
        for most in (FEW, FEW + 1):
            for used, at in ((splits, row), (own, out_aligned)):
                yield from forms(norm_dtype, used, at, most, delayed=delayed)
            last = "collapse" if delayed else "head"
            yield from forms(None, 1 if delayed else splits, row, most, last=last)


def mix_variants(
    dims: tuple[int, int, torch.dtype], norm_dtype: torch.dtype | None, splits: int, row: int, tokens: int, *,
    delayed: bool = False, last: str = "", aligned: bool, arch: str,
) -> Iterator[Variant]:  # fmt: skip
    """Forms of `mix_kernel` for so many tokens of n streams of hidden columns, in rows aligned to `row` bytes.

    last: "head" or "collapse", V4.1's, behind the last layer.
    """
    (n, hidden, dtype), tuning = dims, tuning_for(arch)
    types = {**_types(dtype), "NORM": "none" if norm_dtype is None else pointer_type(norm_dtype)}
    if last:
        types |= {"POST": "none", "COMB": "none"}
    if last == "collapse":
        types |= {"PRODUCTS": "none", "SCALE": "none", "BASE": "none"}
    previous = ("*fp32",) if last == "collapse" else ("none", "*fp32") if delayed else ("none",)
    types["PRE"] = "*fp32" if delayed else "none"
    block = mix_block(tuning, tokens, dtype, normed=norm_dtype is not None)
    width, out_aligned = n if last else 2 * n + n * n, alignment(hidden, dtype)
    for norm_aligned in (1,) if norm_dtype is None else (WIDE,) if aligned else (WIDE, 1):
        sizes = n, hidden, width, splits, row, norm_aligned, out_aligned
        constants = mix_constants(block, heads_of(tuning, tokens), tuning.summed, *sizes)
        for given in previous:
            yield Variant.from_types(mix_kernel, types | {"PREVIOUS": given}, constants, num_warps=block.warps)


def _types(dtype: torch.dtype) -> dict[str, str]:
    streams = dict.fromkeys(("X", "STREAMS", "OUT"), pointer_type(dtype))
    return {**streams, **dict.fromkeys(("POST", "COMB", "FN", "PRODUCTS", "SCALE", "BASE"), "*fp32")}


def _form(kernel: Kernel, types: dict[str, str], constants: dict[str, Any], tile: Tile) -> Variant:
    return Variant.from_types(kernel, types, constants, num_warps=tile.warps, num_stages=tile.stages)

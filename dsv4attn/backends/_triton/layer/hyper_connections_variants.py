"""Every variant of the kernels of the hyper-connections, for warm-up and cross-compilation."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
from attrs import evolve, frozen

from dsv4attn.backends._triton.cache.records import row_alignments
from dsv4attn.backends._triton.compiling.variant import Variant, pointer_type
from dsv4attn.backends._triton.launching.runtime import WIDE
from dsv4attn.backends._triton.layer.hyper_connections_tuning import (
    FEW,
    Tile,
    Tuning,
    alignment,
    fused_constants,
    heads_of,
    mix_block,
    mix_constants,
    overlaps,
    post_constants,
    products_constants,
    tile_of,
    tuning_for,
    uses_factors,
)
from dsv4attn.backends._triton.layer.kernels_hyper_connections import (
    mix_kernel,
    post_kernel,
    post_products_kernel,
    products_kernel,
)
from dsv4attn.backends._triton.untyped import Kernel

__all__ = ["StreamForms", "mix_variants", "variants"]


@frozen
class StreamForms:
    """The streams that hyper-connections are compiled for, and the architecture.

    n: residual streams.
    hidden: elements of a stream of a token.
    dtype: of the streams.
    delayed: whether the ops are those of DeepSeek-V4.1 instead of V4's.
    aligned: whether rows of streams, x and fn begin at multiples of 16 bytes.
    arch: the architecture.
    deterministic: whether the calls are.
    sinkhorn_eps: epsilon of Sinkhorn's iterations.
    """

    n: int
    hidden: int
    dtype: torch.dtype
    delayed: bool = False
    aligned: bool = True
    arch: str = ""
    deterministic: bool = False
    sinkhorn_eps: float = 1e-6

    @property
    def tuning(self) -> Tuning:
        """Of these calls."""
        return tuning_for(self.arch, deterministic=self.deterministic)


def variants(streams: StreamForms, norm_dtype: torch.dtype | None = None) -> Iterator[Variant]:
    """Every variant that the ops can need. norm_dtype: of the weight of the norm, or None without a norm."""
    n, hidden, dtype, tuning = streams.n, streams.hidden, streams.dtype, streams.tuning
    # these ops have one form for plain and deterministic calls
    plain = evolve(streams, deterministic=False)
    mixes, out_aligned, types = 2 * n + n * n, alignment(hidden, dtype), _types(dtype)
    alignments = row_alignments(hidden, dtype, aligned=streams.aligned)
    fn_alignments = row_alignments(hidden, torch.float32, aligned=streams.aligned)
    for row in alignments:
        constants = post_constants(plain.tuning.post, n, hidden, row, out_aligned)
        yield Variant.from_types(post_kernel, types, constants, num_warps=plain.tuning.post.warps)
    counts = (FEW + 1,) if streams.deterministic else (FEW, FEW + 1)
    for tokens, row, fn_row in product(counts, alignments, fn_alignments):
        tile = tile_of(tuning, tokens, n, dtype, row, fused=False)
        fused_tile, overlapped = tile_of(tuning, tokens, n, dtype, row, fused=True), overlaps(tuning, tokens)
        for width in (mixes,) if streams.delayed else (mixes, n):
            constants = products_constants(tile, n, hidden, width, dtype, row, fn_row, overlapped=overlapped)
            yield _products_variant(products_kernel, types, constants, tile)
        constants = fused_constants(
            fused_tile, n, hidden, mixes, dtype, row, fn_row, out_aligned, overlapped=overlapped
        )
        yield _products_variant(post_products_kernel, types, constants, fused_tile)
        splits, fused_splits = -(-hidden // tile.columns), -(-hidden // fused_tile.columns)
        yield from mix_variants(streams, norm_dtype, splits, row, tokens)
        yield from mix_variants(streams, norm_dtype, fused_splits, out_aligned, tokens)
        if not streams.delayed:
            yield from mix_variants(streams, None, splits, row, tokens, last="head")
    for row in alignments if streams.delayed else ():
        yield from mix_variants(plain, None, 1, row, FEW + 1, last="collapse")


def mix_variants(
    streams: StreamForms, norm_dtype: torch.dtype | None, splits: int, row: int, tokens: int, *, last: str = ""
) -> Iterator[Variant]:
    """Variants of `mix_kernel` for one number of tokens.

    norm_dtype: of the weight of the norm, or None without a norm. splits: of the products. row: bytes that divide the
    address of every row of the streams. last: "head", or V4.1's "collapse", after the last layer; "" elsewhere.
    """
    n, hidden, dtype, tuning = streams.n, streams.hidden, streams.dtype, streams.tuning
    types = {**_types(dtype), "NORM": "none" if norm_dtype is None else pointer_type(norm_dtype)}
    if last:
        types |= {"POST": "none", "COMB": "none"}
    if last == "collapse":
        types |= {"PRODUCTS": "none", "SCALE": "none", "BASE": "none"}
        previous_types: tuple[str, ...] = ("*fp32",)
    else:
        previous_types = ("none", "*fp32") if streams.delayed else ("none",)
    types["PRE"] = "*fp32" if streams.delayed and not last else "none"
    block = mix_block(tuning, tokens, dtype, normed=norm_dtype is not None)
    width, out_aligned = n if last else 2 * n + n * n, alignment(hidden, dtype)
    for norm_aligned in (1,) if norm_dtype is None else (WIDE,) if streams.aligned else (WIDE, 1):
        constants = mix_constants(
            block, heads_of(tuning, tokens), tuning.summed, n, hidden, width, splits, row, norm_aligned, out_aligned,
            by_factors=not last and uses_factors(tuning, n, streams.sinkhorn_eps), early=tuning.early,
            overlapped=overlaps(tuning, tokens),
        )  # fmt: skip
        for previous_type in previous_types:
            yield Variant.from_types(mix_kernel, types | {"PREVIOUS": previous_type}, constants, num_warps=block.warps)


def _types(dtype: torch.dtype) -> dict[str, str]:
    rows = dict.fromkeys(("X", "STREAMS", "OUT"), pointer_type(dtype))
    return {**rows, **dict.fromkeys(("POST", "COMB", "FN", "PRODUCTS", "SCALE", "BASE"), "*fp32")}


def _products_variant(kernel: Kernel, types: dict[str, str], constants: dict[str, Any], tile: Tile) -> Variant:
    variant = Variant.from_types(kernel, types, constants, num_warps=tile.warps, num_stages=tile.stages)
    return evolve(variant, spills=tile.spills)

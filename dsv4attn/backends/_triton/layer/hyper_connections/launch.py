"""Hyper-connections: the launchers of `kernels`, with tiles by the number of tokens.

`mhc_pre`, `mhc_fused_post_pre`, their delayed forms and `hc_head` take two launches for each chunk of tokens. The first
launch makes the products of the streams with the mixes. The second launch mixes the streams, which then are in the
cache of the device. `dsv4attn.core.torch_ops.hyper_connections` says what each op computes. In every op the bits of a
token never depend on the other tokens. deterministic: they do not depend on the number of tokens either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from dsv4attn.backends._triton.cache.records import alignment_of_rows, alignment_of_tokens, row_alignments
from dsv4attn.backends._triton.compiling.variant import WIDE
from dsv4attn.backends._triton.launching.recorded import meta_rows, recorded
from dsv4attn.backends._triton.launching.runtime import architecture, launch, multiprocessors
from dsv4attn.backends._triton.layer.hyper_connections.kernels import mix_kernel, post_kernel, products_kernel
from dsv4attn.backends._triton.layer.hyper_connections.tuning import (
    FEW,
    Tile,
    Tuning,
    alignment,
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
from dsv4attn.core.reprs import fields_repr, frozen
from dsv4attn.core.torch_modes import without_modes
from dsv4attn.core.torch_ops.arguments import MixWeights


@frozen(eq=False)
class Delayed:
    """What V4.1's delayed hyper-connections read and write in addition to V4's.

    previous_pre: [T, n] fp32 - the pre of the previous sublayer, which weighs the streams; None for stream 0.
    pre: [T, n] fp32, dense - to be written, for the next sublayer; None where streams are collapsed.
    """

    previous_pre: Tensor | None
    pre: Tensor | None = None


class MixResults(NamedTuple):
    """The dense tensors that `mix` writes; T tokens, n streams, d hidden size.

    post: [T, n, 1] fp32; None in the head and where streams are collapsed.
    comb: [T, n, n] fp32; None where post is None.
    layer_input: [T, d] like the streams - input of the sublayer, output of the head, or collapsed streams.
    """

    post: Tensor | None
    comb: Tensor | None
    layer_input: Tensor

    def __repr__(self) -> str:
        """With dtypes and shapes of tensors."""
        return fields_repr(self)


FusedPostPre: TypeAlias = Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]
"""A function with the arguments and results of `fused_post_pre`."""


@without_modes
def mhc_pre(residual: Tensor, weights: MixWeights, *, deterministic: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """See `torch_ops.hyper_connections`."""
    post, comb, layer_input = empty_results(residual)
    _pre(residual, weights, MixResults(post, comb, layer_input), None, deterministic=deterministic)
    return post, comb, layer_input


@without_modes
def mhc_pre_delayed(
    residual: Tensor, previous_pre: Tensor | None, weights: MixWeights, *, deterministic: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `torch_ops.hyper_connections`."""
    post, comb, layer_input = empty_results(residual)
    pre = post.new_empty(residual.shape[:2])
    results, delayed = MixResults(post, comb, layer_input), Delayed(previous_pre, pre)
    _pre(residual, weights, results, delayed, deterministic=deterministic)
    return pre, post, comb, layer_input


@without_modes
def mhc_post(x: Tensor, residual: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """See `torch_ops.hyper_connections`."""
    count, n, hidden = residual.shape
    out = torch.empty_like(residual, memory_format=torch.contiguous_format)
    block, aligned = tuning_of_calls().post, alignment_of_rows(x, residual)
    launch(
        post_kernel,
        (-(-count // block.tokens) * -(-hidden // block.columns),),
        (
            x, residual, post, comb, out, count, x.stride(0), residual.stride(0), residual.stride(1), post.stride(0),
            post.stride(1), comb.stride(0), comb.stride(1),
        ),
        post_constants(block, n, hidden, aligned, alignment(hidden, out.dtype)),
        num_warps=block.warps,
    )  # fmt: skip
    return out


def fused_post_pre(
    x: Tensor,
    residual: Tensor,
    post: Tensor,
    comb: Tensor,
    weights: MixWeights,
    delayed: Delayed | None,
    *,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(new residual, post, comb, layer_input): new streams, and their mixes. Of V4.1 if `delayed` is not None."""
    new_residual = torch.empty_like(residual, memory_format=torch.contiguous_format)
    made, fused = empty_results(residual), (x, post, comb, new_residual)
    _pre(residual, weights, MixResults(*made), delayed, deterministic=deterministic, fused=fused)
    return new_residual, *made


@without_modes
def mhc_fused_post_pre(
    x: Tensor,
    residual: Tensor,
    post: Tensor,
    comb: Tensor,
    weights: MixWeights,
    *,
    deterministic: bool = False,
    fused: FusedPostPre = fused_post_pre,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `torch_ops.hyper_connections`. fused: what launches the kernels."""
    return fused(x, residual, post, comb, weights, None, deterministic=deterministic)


@without_modes
def mhc_fused_post_pre_delayed(
    x: Tensor,
    residual: Tensor,
    post: Tensor,
    comb: Tensor,
    previous_pre: Tensor | None,
    weights: MixWeights,
    *,
    deterministic: bool = False,
    fused: FusedPostPre = fused_post_pre,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See `torch_ops.hyper_connections`. fused: what launches the kernels."""
    pre = post.new_empty(residual.shape[:2])
    residual, post, comb, layer_input = fused(
        x, residual, post, comb, weights, Delayed(previous_pre, pre), deterministic=deterministic
    )
    return residual, pre, post, comb, layer_input


@without_modes
def mhc_collapse(streams: Tensor, pre: Tensor) -> Tensor:
    """See `torch_ops.hyper_connections`."""
    count, _, hidden = streams.shape
    out = streams.new_empty(count, hidden)
    mix(streams, None, None, MixResults(None, None, out), Delayed(pre), 0, count, FEW + 1, tuning_of_calls())
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
    """See `torch_ops.hyper_connections`."""
    out = streams.new_empty(streams.shape[0], streams.shape[2])
    # the head has no post and no comb, so their constants are not read
    weights = MixWeights(
        hc_fn, hc_scale, hc_base, rms_eps, hc_pre_eps=hc_eps, hc_sinkhorn_eps=0.0, hc_post_mult_value=0.0,
        sinkhorn_repeat=0, norm_eps=0.0,
    )  # fmt: skip
    _pre(streams, weights, MixResults(None, None, out), None, deterministic=deterministic)
    return out


def transient_bytes(max_tokens: int, n: int, hidden: int) -> int:
    """Upper bound on the temporaries of an op: the products of a chunk of tokens."""
    most = 0
    for tuning in (tuning_of_calls(), tuning_of_calls(deterministic=True)):
        tiles = tuning.few, tuning.many, tuning.fused_few, tuning.fused_many, tuning.plain
        splits = -(-hidden // min(tile.columns for tile in tiles))
        most = max(most, 4 * min(max_tokens, tuning.chunk) * splits * _width(2 * n + n * n))
    return most


def empty_results(residual: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Post, comb and layer_input for streams [T, n, d], without values; see `MixResults`."""
    count, n, hidden = residual.shape
    post = residual.new_empty(count, n, 1, dtype=torch.float32)
    return post, post.new_empty(count, n, n), residual.new_empty(count, hidden)


def tuning_of_calls(*, deterministic: bool = False) -> Tuning:
    """The tuning of plain or deterministic calls on this device."""
    return tuning_for(architecture(), deterministic=deterministic)


def _pre(
    streams: Tensor,
    weights: MixWeights,
    results: MixResults,
    delayed: Delayed | None,
    *,
    deterministic: bool,
    fused: tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
) -> None:
    """Fill results from streams, or from new streams.

    fused: x, post and comb of new streams, and [T, n, d], dense - memory of these; None: streams as they are.
    """
    tokens, n, hidden = streams.shape
    if deterministic:  # tiles are those of many tokens
        tokens = FEW + 1
    fn, dtype = weights.fn, streams.dtype
    x, post, comb, new = fused or (None, None, None, None)
    aligned, strides = alignment_of_tokens(streams), (0, 0, 0, 0, 0)
    if x is not None and post is not None and comb is not None:
        aligned = alignment_of_tokens(x, streams)
        strides = x.stride(0), post.stride(0), post.stride(1), comb.stride(0), comb.stride(1)
    tuning = tuning_of_calls(deterministic=deterministic)
    tile = tile_of(tuning, tokens, n, dtype, aligned, fused=new is not None)
    # of a stream's columns in every row of fn
    fn_aligned, overlapped = min(alignment(hidden, fn.dtype), alignment_of_rows(fn)), overlaps(tuning, tokens)
    constants = products_constants(tile, n, hidden, fn.shape[0], dtype, aligned, fn_aligned, overlapped=overlapped)
    for first, end, products, groups in _chunks(streams, fn, tile, tuning.chunk):
        launch(
            products_kernel,
            (groups * products.shape[1],),
            (
                streams, fn, products, x, post, comb, new, first, end, groups, fn.stride(0), streams.stride(0),
                streams.stride(1), *strides,
            ),
            constants,
            num_warps=tile.warps,
            num_stages=tile.stages,
            spills=tile.spills,
        )  # fmt: skip
        mix(streams if new is None else new, products, weights, results, delayed, first, end, tokens, tuning)


def _width(mixes: int) -> int:
    """Elements of a row of products and squares: a multiple of 32 bytes."""
    return 8 * (mixes // 8 + 1)


def _chunks(streams: Tensor, fn: Tensor, tile: Tile, chunk: int) -> Iterator[tuple[int, int, Tensor, int]]:
    """(first token, end token, memory for products, groups of programs) of each pair of launches.

    chunk: tokens of such a pair.
    """
    count, _, hidden = streams.shape
    splits = -(-hidden // tile.columns)
    products = fn.new_empty(min(count, chunk), splits, _width(fn.shape[0]), dtype=torch.float32)
    groups = max(tile.programs * multiprocessors() // splits, 1) if tile.held else count
    for first in range(0, count, chunk):
        end = min(first + chunk, count)
        yield first, end, products, min(groups, -(-(end - first) // tile.tokens))


def mix(
    streams: Tensor,
    products: Tensor | None,
    weights: MixWeights | None,
    results: MixResults,
    delayed: Delayed | None,
    first: int,
    end: int,
    tokens: int,
    tuning: Tuning,
) -> None:
    """Launch `mix_kernel`, which fills the rows first .. end of results.

    products: [end - first or more, splits, width] fp32 - of the streams with the mixes; see `store_products`.
    weights: of the mixes. products and weights are None where `delayed.previous_pre` collapses the streams.
    tokens: the number of tokens that the blocks of `tuning` are chosen for.
    """
    _, n, hidden = streams.shape
    post, comb, out = results
    scale = base = norm = None
    mixes, splits, repeat = n, 1, 0
    rms_eps = pre_eps = comb_eps = factor = norm_eps = 0.0
    if weights is not None:
        scale, base, norm = weights.hc_scale, weights.hc_base, weights.norm_weight
        mixes, repeat, rms_eps, pre_eps = len(base), weights.sinkhorn_repeat, weights.rms_eps, weights.hc_pre_eps
        comb_eps, factor, norm_eps = weights.hc_sinkhorn_eps, weights.hc_post_mult_value, weights.norm_eps
    if products is not None:
        splits = products.shape[1]
    previous_pre, pre = (None, None) if delayed is None else (delayed.previous_pre, delayed.pre)
    previous_stride, weight_stride = (0, 0) if previous_pre is None else previous_pre.stride()
    block, rows = mix_block(tuning, tokens, streams.dtype, normed=norm is not None), heads_of(tuning, tokens)
    norm_aligned, out_aligned = 1 if norm is None else alignment_of_rows(norm), alignment(hidden, out.dtype)
    constants = mix_constants(
        block, rows, tuning.summed, n, hidden, mixes, splits, alignment_of_tokens(streams), norm_aligned, out_aligned,
        by_factors=comb is not None and uses_factors(tuning, n, comb_eps), early=tuning.early,
        overlapped=overlaps(tuning, tokens),
    )  # fmt: skip
    blocks = -(-hidden // block.columns) if norm is None else 1
    tiles = 0 if comb is None else -(-(end - first) // constants["BLOCK_R"])
    launch(
        mix_kernel,
        (tiles + -(-(end - first) // block.tokens) * blocks,),
        (
            streams, products, scale, base, norm, previous_pre, pre, post, comb, out, first, end, streams.stride(0),
            streams.stride(1), previous_stride, weight_stride, float(rms_eps), float(pre_eps), float(comb_eps),
            float(factor), repeat, float(norm_eps),
        ),
        constants,
        num_warps=block.warps,
    )  # fmt: skip


@recorded
def variants(
    n: int,
    hidden: int,
    dtype: torch.dtype,
    norm_dtype: torch.dtype | None = None,
    *,
    delayed: bool = False,
    aligned: bool = True,
    deterministic: bool = False,
    sinkhorn_eps: float = 1e-6,
) -> None:
    """Every variant that the ops can need for n streams [T, n, hidden] of a dtype.

    norm_dtype: of the weight of the norm, or None without a norm. delayed: whether the ops are those of DeepSeek-V4.1
    instead of V4's. aligned: whether rows of streams, x, fn and the norm's weight begin at multiples of 16 bytes.
    deterministic: whether the calls are. sinkhorn_eps: epsilon of Sinkhorn's iterations.
    """
    row_forms = row_alignments(hidden, dtype, aligned=aligned)
    for rows, fn_rows in product(row_forms, row_alignments(hidden, torch.float32, aligned=aligned)):
        for norm_rows in (WIDE,) if aligned or norm_dtype is None else (WIDE, 1):
            norm = None if norm_dtype is None else meta_rows(hidden, dtype=norm_dtype, alignment=norm_rows)
            weights = meta_weights(n, hidden, norm, sinkhorn_eps, alignment=fn_rows)
            # with all of these numbers of tokens, each tile and each block has its turn
            for tokens in (FEW, FEW + 1):
                streams = meta_streams(tokens, n, hidden, dtype, alignment=rows)
                _launch_ops(streams, weights, delayed=delayed, deterministic=deterministic)


def _launch_ops(
    streams: tuple[Tensor, Tensor, Tensor, Tensor], weights: MixWeights, *, delayed: bool, deterministic: bool
) -> None:
    """Call every op of V4, or of V4.1 if `delayed`. streams: of `meta_streams`."""
    x, residual, post, comb = streams
    mhc_post(x, residual, post, comb)
    if not delayed:
        mhc_pre(residual, weights, deterministic=deterministic)
        mhc_fused_post_pre(x, residual, post, comb, weights, deterministic=deterministic)
        n, scale = residual.shape[1], weights.hc_scale
        hc_head(residual, weights.fn[:n], scale[:1], weights.hc_base[:n], 0.0, 0.0, deterministic=deterministic)
        return
    pre = post[:, :, 0]
    mhc_collapse(residual, pre)
    for previous_pre in (None, pre):
        mhc_pre_delayed(residual, previous_pre, weights, deterministic=deterministic)
        mhc_fused_post_pre_delayed(x, residual, post, comb, previous_pre, weights, deterministic=deterministic)


def meta_streams(
    tokens: int, n: int, hidden: int, dtype: torch.dtype, *, alignment: int = WIDE
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, residual, post and comb without memory. alignment: of the rows of x and residual."""
    x, residual = (meta_rows(*shape, hidden, dtype=dtype, alignment=alignment) for shape in ((tokens,), (tokens, n)))
    post, comb, _ = empty_results(residual)
    return x, residual, post, comb


def meta_weights(n: int, hidden: int, norm: Tensor | None, sinkhorn_eps: float, *, alignment: int = WIDE) -> MixWeights:
    """Weights of the mixes without memory. norm: weight of the norm, or None. alignment: of the rows of fn."""
    fn = meta_rows(2 * n + n * n, n * hidden, dtype=torch.float32, alignment=alignment)
    scale, base = (meta_rows(size, dtype=torch.float32) for size in (3, len(fn)))
    return MixWeights(
        fn, scale, base, rms_eps=0.0, hc_pre_eps=0.0, hc_sinkhorn_eps=sinkhorn_eps, hc_post_mult_value=1.0,
        sinkhorn_repeat=1, norm_weight=norm, norm_eps=0.0,
    )  # fmt: skip

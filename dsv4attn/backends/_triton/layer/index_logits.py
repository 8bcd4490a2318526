"""Scores of index keys: the launcher of `kernels_index_logits`.

Tiles depend on the architecture and on the number of tokens of a request.

`fp8_paged_mqa_logits` and `fp8_mqa_logits` have the names of other libraries. Selection calls `score`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from math import inf
from typing import Any

import torch
import triton.language as tl
from attrs import frozen
from torch import Tensor

from dsv4attn.backends._triton.attention.launch import divider
from dsv4attn.backends._triton.cache.records import alignment_of_rows, row_alignments
from dsv4attn.backends._triton.compiling.variant import Variant, pointer_type
from dsv4attn.backends._triton.launching.runtime import INTERPRETED, WIDE, architecture, launch, multiprocessors
from dsv4attn.backends._triton.layer.kernels_index_logits import CODES, NATIVE, NIBBLES, ROWS, score_kernel
from dsv4attn.backends._triton.sizes import cdiv
from dsv4attn.backends._triton.support import FP8_UNITS
from dsv4attn.backends._triton.tuning import COMPILED
from dsv4attn.core.cache.layout import Fp8Format, KVCacheLayout, PagedKVCache
from dsv4attn.core.reprs import fields_repr
from dsv4attn.core.torch_modes import without_modes
from dsv4attn.core.torch_ops.arguments import TokenMap
from dsv4attn.core.torch_ops.indexer import IndexQuery, check_paged_logits, dialect_of

__all__ = ["LANES", "fp8_mqa_logits", "fp8_paged_mqa_logits", "multiplies_codes", "score", "variants"]

LANES = 64
"""Number of maxima that `score` writes for each run of entries."""
PAGE = 64
"""Consecutive entries that are in one page if the page size is a multiple of PAGE."""


@frozen
class Tile:
    """Tokens and entries of a tile, warps and pipeline stages of its program, programs of a multiprocessor."""

    tokens: int
    entries: int
    warps: int
    stages: int
    programs: int = 4


@frozen
class Tiles:
    """Tiles for requests of one token, of two tokens, and of more.

    measured: hardware and date of the measurement, or that nothing was measured.
    """

    one: Tile
    two: Tile
    many: Tile
    measured: str

    def of(self, tokens: float) -> Tile:
        """The tile for requests of this many tokens."""
        return self.one if tokens <= 1 else self.two if tokens <= 2 else self.many


_PLAIN = Tile(1, 64, 8, 2, 2)
PLAIN = Tiles(_PLAIN, _PLAIN, _PLAIN, COMPILED)
TILES: Mapping[str, Tiles] = {
    **dict.fromkeys(FP8_UNITS, Tiles(Tile(1, 64, 4, 3), Tile(2, 64, 8, 3), Tile(2, 64, 8, 3), COMPILED)),
    "sm_90": Tiles(
        Tile(1, 64, 4, 5, 4),
        Tile(2, 64, 4, 5, 3),
        Tile(2, 128, 4, 4, 2),
        "H200, torch 2.11, Triton 3.6, 2026-11-22: dsv4attn bench index",
    ),
}
"""Of codes that a matrix unit multiplies. Everywhere else, and of other records, PLAIN."""


def multiplies_codes(layout: KVCacheLayout, arch: str) -> bool:
    """Whether the matrix unit of an architecture multiplies the codes of these index keys as they are.

    Sums of such products keep fewer bits than fp32: on an H200 errors are up to 130 times 2^-24 of the product of the
    norms (measured 2026-11-22, as large as DeepGEMM's on the same inputs).
    """
    return layout.fp8_format is Fp8Format.OCP and arch in FP8_UNITS and not INTERPRETED


def tiles_for(layout: KVCacheLayout, arch: str) -> Tiles:
    """Tiles of index keys on an architecture."""
    return TILES[arch] if multiplies_codes(layout, arch) else PLAIN


def score(
    query: IndexQuery,
    cache: PagedKVCache,
    token_map: TokenMap,
    scores: Tensor,
    maxima: Tensor | None,
    run: int,
    *,
    exact_rows: bool = False,
) -> None:
    """Write the score of each entry that a token sees to scores [T, E] fp32; NaN for entries without a block.

    query: queries of T tokens.
    cache: index keys.
    token_map: blocks of `cache`, whose table is not empty, and the request and the visible entries of each token.
    maxima: [T, LANES * E / run] fp32 - receives the largest score of the entries e with the same e // run and
       e % LANES. None: not wanted.
    run: a multiple of 128, or 0 without maxima.
    exact_rows: whether bits must not depend on how many tokens a request has. All calls then have the tile of requests
       of many tokens: a tile of one token reads the keys of a prompt once for each of its tokens, and two requests of
       one token take little longer in one tile than in two.
    """
    tokens, entries = scores.shape
    tiles = tiles_for(cache.layout, architecture())
    tile = tiles.many if exact_rows else tiles.of(tokens / token_map.block_table.shape[0])
    runs = max(run // tile.entries, 1)
    _launch(
        query,
        pages_of(cache, tile),
        _Rows(token_map.visible_lens, token_map.block_table, token_map.token_to_req),
        scores,
        tile,
        _span(tile, tokens, entries, runs),
        maxima=maxima,
        run=runs,
        fill=False,
    )


@without_modes
def fp8_paged_mqa_logits(
    q: Tensor,
    kv_cache: PagedKVCache | Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    schedule_metadata: object = None,
    max_model_len: int = 0,
) -> Tensor:
    """See `torch_ops.indexer.fp8_paged_mqa_logits`."""
    cache, lens = check_paged_logits(q, kv_cache, weights, context_lens)
    requests, tokens_per_req, _, _ = q.shape
    logits = torch.empty(requests * tokens_per_req, max_model_len, dtype=torch.float32, device=q.device)
    if not (logits.numel() and block_tables.numel() and cache.num_blocks):
        return logits.fill_(-inf)
    tile = tiles_for(cache.layout, architecture()).of(tokens_per_req)
    span = _span(tile, requests * tokens_per_req, max_model_len)
    rows = _Rows(lens.reshape(-1).contiguous(), block_tables, tokens_per_req=tokens_per_req)
    _launch(IndexQuery(q.flatten(0, 1), weights), pages_of(cache, tile), rows, logits, tile, span, fill=True)
    return logits


@without_modes
def fp8_mqa_logits(
    q: Tensor, kv: tuple[Tensor, Tensor], weights: Tensor, cu_seqlen_ks: Tensor, cu_seqlen_ke: Tensor
) -> Tensor:
    """See `torch_ops.indexer.fp8_mqa_logits`."""
    rows, scales = kv
    layout = KVCacheLayout.index_fp8(rows.shape[1], fp8_format=dialect_of(q))
    logits = torch.empty(q.shape[0], rows.shape[0], dtype=torch.float32, device=q.device)
    tile = tiles_for(layout, architecture()).many
    if logits.numel():
        keys = _Keys(raw(rows), scales, layout, 0, 1, (0, rows.stride(0), 0, 1), dense_stride(layout, rows.stride(0)))
        span = _span(tile, q.shape[0], rows.shape[0])
        _launch(IndexQuery(q, weights), keys, _Rows(cu_seqlen_ke, first=cu_seqlen_ks), logits, tile, span, fill=True)
    return logits


def _span(tile: Tile, tokens: int, entries: int, runs: int = 1) -> int:
    """Entries per program: the smallest multiple of `runs` tiles that gives one wave of programs."""
    programs = max(tile.programs * multiprocessors() // -(-tokens // tile.tokens), 1)
    tiles = -(-entries // tile.entries)
    return -(-tiles // programs // runs) * runs * tile.entries


@frozen(eq=False)
class _Keys:
    """Index keys as arguments of the kernel.

    strides: strides of pages and records, offset of the scales' region, and stride of scales.
    stride: stride of records if the records of a tile are contiguous, in one page. Otherwise 0.
    """

    tensor: Tensor
    scales: Tensor | None
    layout: KVCacheLayout
    num_blocks: int
    page_size: int
    strides: tuple[int, int, int, int]
    stride: int

    __repr__ = fields_repr

    @property
    def aligned(self) -> int:
        """Bytes that divide the address of every record: those of the widest access, or those of an element."""
        item = self.tensor.element_size()
        step = self.tensor.data_ptr() | (self.strides[0] | self.strides[1]) * item
        return WIDE if step % WIDE == 0 else item


@frozen(eq=False)
class _Rows:
    """Which keys each row of the scores is of, as arguments of the kernel.

    lens: [T] int32 - end of the keys that a token sees.
    block_table: blocks of the keys; None for gathered keys.
    token_to_req: [T] int32 - None: `tokens_per_req` tokens of each request follow each other.
    first: [T] int32 - start of the keys that a token sees; None: 0.
    """

    lens: Tensor
    block_table: Tensor | None = None
    token_to_req: Tensor | None = None
    first: Tensor | None = None
    tokens_per_req: int = 1

    __repr__ = fields_repr


def dense_stride(layout: KVCacheLayout, stride: int) -> int:
    """The stride of contiguous records, in elements; 0 if the records are not contiguous."""
    contiguous = layout.data_bytes // layout.dtype.itemsize
    return contiguous if stride == contiguous else 0


def pages_of(cache: PagedKVCache, tile: Tile) -> _Keys:
    strides = cache.memory.record_strides
    whole = cache.block_size % min(tile.entries, PAGE) == 0
    stride = dense_stride(cache.layout, strides[1]) if whole else 0
    return _Keys(cache.tensor, None, cache.layout, cache.num_blocks, cache.block_size, strides, stride)


def raw(tensor: Tensor) -> Tensor:
    """Codes as bytes."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


def _launch(
    query: IndexQuery,
    keys: _Keys,
    rows: _Rows,
    out: Tensor,
    tile: Tile,
    span: int,
    *,
    fill: bool,
    maxima: Tensor | None = None,
    run: int = 1,
) -> None:
    (tokens, entries), values, scales = out.shape, raw(query.values), query.scales
    table = rows.block_table
    requests, columns = (0, 0) if table is None else table.shape
    launch(
        score_kernel,
        (cdiv(tokens, tile.tokens) * cdiv(entries, span),),
        (
            values, scales, query.weights, keys.tensor, keys.scales, table, rows.token_to_req, rows.lens, rows.first,
            out, maxima, tokens, requests, rows.tokens_per_req, entries, span, run, values.stride(0), values.stride(1),
            0 if scales is None else scales.stride(0), query.weights.stride(0), 0 if table is None else table.stride(0),
            columns, keys.num_blocks, keys.page_size, *divider(keys.page_size), *keys.strides, out.stride(0),
            0 if maxima is None else maxima.stride(0),
        ),
        constants_of(
            keys.layout, values.shape[1], tile, keys.aligned, keys.stride, alignment_of_rows(values), fill,
            multiplies_codes(keys.layout, architecture()),
        ),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )  # fmt: skip


@cache
def constants_of(
    layout: KVCacheLayout,
    heads: int,
    tile: Tile,
    aligned: int,
    stride: int,
    q_aligned: int,
    fill: bool,  # noqa: FBT001 - constants of a launch
    native: bool,  # noqa: FBT001 - as above
) -> dict[str, Any]:
    kind = ROWS if not layout.is_quantised else NIBBLES if layout.fp8_format is None else NATIVE if native else CODES
    half = tl.float16 if layout.fp8_format else tl.bfloat16
    return {
        "ALIGNED": aligned,
        "STRIDE": stride,
        "Q_ALIGNED": q_aligned,
        "TOKENS": tile.tokens,
        "HEADS": heads,
        "DIM": layout.head_dim,
        "KIND": kind.value,
        "FNUZ": layout.fp8_format is Fp8Format.FNUZ,
        "BLOCK": tile.entries,
        "LANES": min(LANES, tile.entries),
        "FILL": fill,
        "STAGES": tile.stages,
        "ASM": native,
        "DT": tl.float32 if INTERPRETED or layout.dtype == torch.float32 else half,
    }


def variants(layout: KVCacheLayout, heads: int, arch: str, *, aligned: bool = True) -> Iterator[Variant]:
    """Every variant that selection can need on an architecture, with keys of this layout.

    aligned: whether caches, and rows of plain queries, are aligned to 16 bytes.
    """
    tiles, native = tiles_for(layout, arch), multiplies_codes(layout, arch)
    dtype = pointer_type(torch.uint8 if layout.is_quantised else layout.dtype)
    types = {"Q": dtype, "KEYS": dtype, "W": "*fp32", "OUT": "*fp32", "SCALES": "none", "FIRST": "none"}
    types["Q_SCALES"] = "*u8" if layout.is_quantised and layout.fp8_format is None else "none"
    dense, item = dense_stride(layout, layout.data_bytes // layout.dtype.itemsize), layout.dtype.itemsize
    packed = layout.head_dim * layout.code_bits // 8 if layout.is_quantised else layout.head_dim
    alignments = row_alignments(packed, torch.uint8 if layout.is_quantised else layout.dtype, aligned=aligned)
    steps = (WIDE,) if aligned and layout.data_bytes % WIDE == 0 else (WIDE, item)
    for tile in dict.fromkeys((tiles.one, tiles.two, tiles.many)):
        for step in steps:
            for stride in (dense, 0):
                for rows in alignments:
                    constants = constants_of(layout, heads, tile, step, stride, rows, False, native)
                    for maxima in ("none", "*fp32"):
                        named = {**types, "MAXIMA": maxima}
                        yield Variant.from_types(
                            score_kernel, named, constants, num_warps=tile.warps, num_stages=tile.stages
                        )

"""Scores of index keys: the launcher of `kernels`.

Tiles depend on the architecture and on the number of tokens of a request.

`fp8_paged_mqa_logits` and `fp8_mqa_logits` have the names of other libraries. Selection calls `score`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from itertools import product
from math import inf
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from dsv4attn.backends._triton.attention.launch import divider
from dsv4attn.backends._triton.cache.records import alignment_of_rows, row_alignments, table_numbers
from dsv4attn.backends._triton.compiling.variant import WIDE
from dsv4attn.backends._triton.interpreted import INTERPRETED
from dsv4attn.backends._triton.launching.launch_cache import Constants
from dsv4attn.backends._triton.launching.pdl import uses_pdl
from dsv4attn.backends._triton.launching.recorded import meta_cache, meta_rows, recorded
from dsv4attn.backends._triton.launching.runtime import architecture, launch, multiprocessors
from dsv4attn.backends._triton.layer.indexer.forms import KeyNumbers, QueryStrides, ScoreForm
from dsv4attn.backends._triton.layer.indexer.kernels import (
    CODES,
    NATIVE,
    NIBBLES,
    ROWS,
    score_blocks_kernel,
    score_kernel,
)
from dsv4attn.backends._triton.layer.selection import launch as select
from dsv4attn.backends._triton.sizes import cdiv, next_power_of_2
from dsv4attn.backends._triton.support import FP8_UNITS
from dsv4attn.backends._triton.tuning import COMPILED
from dsv4attn.core.cache.layout import Fp8Format, KVCacheLayout, PagedKVCache
from dsv4attn.core.reprs import frozen
from dsv4attn.core.torch_modes import without_modes
from dsv4attn.core.torch_ops.arguments import TokenMap
from dsv4attn.core.torch_ops.indexer import IndexQuery, check_paged_logits, dialect_of

LANES = 64
"""Number of maxima that `score` writes for each run of entries."""
SPILLS = 320
"""Bytes that a thread stores and loads in the tile of 128 entries with maxima on sm_90 with Triton 3.6, with which that
tile was measured; with Triton 3.9 none."""
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


def multiplies_codes(layout: KVCacheLayout, arch: str, *, exact_sums: bool = False) -> bool:
    """Whether the matrix unit of an architecture multiplies the codes of these index keys as they are.

    Sums of such products keep fewer bits than fp32: on an H200 errors are up to 130 times 2^-24 of the product of the
    norms (measured 2026-11-22, as large as DeepGEMM's on the same inputs). exact_sums: codes are multiplied in 16 bits,
    where they and their products are exact, and sums keep the bits of fp32.
    """
    return layout.fp8_format is Fp8Format.OCP and arch in FP8_UNITS and not INTERPRETED and not exact_sums


def tiles_for(layout: KVCacheLayout, arch: str, *, exact_sums: bool = False) -> Tiles:
    """Tiles of index keys on an architecture."""
    return TILES[arch] if multiplies_codes(layout, arch, exact_sums=exact_sums) else PLAIN


def score(
    query: IndexQuery,
    cache: PagedKVCache,
    token_map: TokenMap,
    scores: Tensor,
    maxima: Tensor | None,
    run: int,
    *,
    exact_rows: bool = False,
    exact_sums: bool = False,
    by_length: bool = True,
) -> tuple[int, int]:
    """Write the score of each entry that a token sees to scores [T, E] fp32; NaN for entries without a block.

    query: queries of T tokens.
    cache: index keys.
    token_map: blocks of `cache`, whose table is not empty, and the request and the visible entries of each token.
    maxima: [T, columns] fp32 - receives the largest score of the entries e with the same e // run and e % LANES. None:
       not wanted.
    run: a multiple of 128, or 0 without maxima.
    by_length: whether the kernel computes the runs of a tile from what its tokens see, so that all columns but LANES
       suffice, see `power_of`; then run is not used.
    exact_rows: whether bits must not depend on how many tokens a request has. All calls then have the tile of requests
       of many tokens: a tile of one token reads the keys of a prompt once for each of its tokens, and two requests of
       one token take little longer in one tile than in two.
    exact_sums: see `multiplies_codes`.
    Returns entries of a run, and 0; or the least entries of a run, and how many tokens have runs of the same length.
    """
    tile = _tile_of(cache, token_map, exact_rows=exact_rows, exact_sums=exact_sums)
    groups = maxima.shape[1] - LANES if by_length and maxima is not None else 0
    _launch(
        query, pages_of(cache, tile), token_map.block_table, token_map.visible_lens, scores, tile, scores.shape[1],
        token_to_req=token_map.token_to_req, maxima=maxima, run=1 if groups else max(run // tile.entries, 1),
        groups=groups, exact_sums=exact_sums,
    )  # fmt: skip
    return (tile.entries, tile.tokens) if groups else (run, 0)


def score_maxima(
    query: IndexQuery,
    cache: PagedKVCache,
    token_map: TokenMap,
    maxima: Tensor,
    block_size: int,
    max_entries: int,
    *,
    exact_rows: bool = False,
    exact_sums: bool = False,
) -> None:
    """Write the largest score of each block of entries that a token sees to maxima [T, >= blocks] fp32.

    It is a finite number, NaN for a block without scores, and infinity for the block of the newest entry. block_size:
    entries of a block, a power of two. Other arguments are those of `score`.
    """
    tile = _tile_of(cache, token_map, exact_rows=exact_rows, exact_sums=exact_sums)
    _launch(
        query, pages_of(cache, tile), token_map.block_table, token_map.visible_lens, None, tile, max_entries,
        token_to_req=token_map.token_to_req, maxima=maxima, run=max(block_size // tile.entries, 1), group=block_size,
        exact_sums=exact_sums,
    )  # fmt: skip


def score_inside(
    query: IndexQuery,
    cache: PagedKVCache,
    token_map: TokenMap,
    blocks: Tensor,
    counts: Tensor,
    block_size: int,
    scores: Tensor,
    max_entries: int,
    *,
    exact_sums: bool = False,
) -> None:
    """Write the scores of the entries of a token's blocks to scores [T, >= counts] fp32, NaN for what it does not see.

    blocks: [T, 2 N] int32 and counts: [T] int32, as `order_kernel` writes them. Other arguments are those of `score`.
    Bits of a token depend on no other.
    """
    tile, (tokens, width) = tiles_for(cache.layout, architecture(), exact_sums=exact_sums).one, scores.shape
    keys, table, values = pages_of(cache, tile), token_map.block_table, raw(query.values)
    splits = _splits(tile, tokens, width)
    launch(
        score_blocks_kernel,
        (tokens * splits,),
        (
            values, query.scales, query.weights, keys.tensor, table, token_map.token_to_req, token_map.visible_lens,
            blocks, counts, scores, tokens, max_entries, splits, query_strides(query),
            table_numbers(table), keys.numbers, blocks.stride(0), scores.stride(0),
        ),
        _inside_constants(
            facts_of(keys, values, tile, exact_sums=exact_sums), architecture(), block_size, blocks.shape[1] // 2,
            whole=cache.block_size % block_size == 0,
        ),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )  # fmt: skip


def _tile_of(cache: PagedKVCache, token_map: TokenMap, *, exact_rows: bool, exact_sums: bool) -> Tile:
    tiles = tiles_for(cache.layout, architecture(), exact_sums=exact_sums)
    return tiles.many if exact_rows else tiles.of(len(token_map.visible_lens) / len(token_map.block_table))


@without_modes
def fp8_paged_mqa_logits(
    q: Tensor,
    kv_cache: PagedKVCache | Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    schedule_metadata: object = None,
    max_model_len: int = 0,
    *,
    exact_sums: bool = False,
) -> Tensor:
    """See `torch_ops.indexer.fp8_paged_mqa_logits`. exact_sums: see `multiplies_codes`."""
    cache, lens = check_paged_logits(q, kv_cache, weights, context_lens)
    requests, tokens_per_req, _, _ = q.shape
    logits = torch.empty(requests * tokens_per_req, max_model_len, dtype=torch.float32, device=q.device)
    if not (logits.numel() and block_tables.numel() and cache.num_blocks):
        return logits.fill_(-inf)
    tile = tiles_for(cache.layout, architecture(), exact_sums=exact_sums).of(tokens_per_req)
    _launch(
        IndexQuery(q.flatten(0, 1), weights), pages_of(cache, tile), block_tables, lens.reshape(-1).contiguous(),
        logits, tile, max_model_len, tokens_per_req=tokens_per_req, fill=True, exact_sums=exact_sums,
    )  # fmt: skip
    return logits


@without_modes
def fp8_mqa_logits(
    q: Tensor,
    kv: tuple[Tensor, Tensor],
    weights: Tensor,
    cu_seqlen_ks: Tensor,
    cu_seqlen_ke: Tensor,
    *,
    exact_sums: bool = False,
) -> Tensor:
    """See `torch_ops.indexer.fp8_mqa_logits`. exact_sums: see `multiplies_codes`."""
    rows, scales = kv
    layout = KVCacheLayout.index_fp8(rows.shape[1], fp8_format=dialect_of(q))
    logits = torch.empty(q.shape[0], rows.shape[0], dtype=torch.float32, device=q.device)
    tile = tiles_for(layout, architecture(), exact_sums=exact_sums).many
    if logits.numel():
        numbers = KeyNumbers(0, 1, 0, 0, 0, rows.stride(0), 0, 1)
        keys = _Keys(raw(rows), scales, layout, numbers, dense_stride(layout, rows.stride(0)))
        _launch(
            IndexQuery(q, weights), keys, None, cu_seqlen_ke, logits, tile, rows.shape[0], first=cu_seqlen_ks,
            fill=True, exact_sums=exact_sums,
        )  # fmt: skip
    return logits


def _splits(tile: Tile, tokens: int, entries: int, runs: int = 1) -> int:
    """Programs that share what a tile of tokens sees, for one wave of programs. runs: tiles that stay together."""
    programs = max(tile.programs * multiprocessors() // -(-tokens // tile.tokens), 1)
    return min(programs, -(-entries // (tile.entries * runs)))


@frozen(eq=False)
class _Keys:
    """Index keys as arguments of the kernel.

    stride: stride of records if the records of a tile are contiguous, in one page. Otherwise 0.
    """

    tensor: Tensor
    scales: Tensor | None
    layout: KVCacheLayout
    numbers: KeyNumbers
    stride: int

    @property
    def aligned(self) -> int:
        """Bytes that divide the address of every record: those of the widest access, or those of an element."""
        item = self.tensor.element_size()
        step = self.tensor.data_ptr() | (self.numbers.page_stride | self.numbers.data_stride) * item
        return WIDE if step % WIDE == 0 else item


def dense_stride(layout: KVCacheLayout, stride: int) -> int:
    """The stride of contiguous records, in elements; 0 if the records are not contiguous."""
    contiguous = layout.data_bytes // layout.dtype.itemsize
    return contiguous if stride == contiguous else 0


def pages_of(cache: PagedKVCache, tile: Tile) -> _Keys:
    strides = cache.memory.record_strides
    whole = cache.block_size % min(tile.entries, PAGE) == 0
    stride = dense_stride(cache.layout, strides[1]) if whole else 0
    numbers = KeyNumbers(cache.num_blocks, cache.block_size, *divider(cache.block_size), *strides)
    return _Keys(cache.tensor, None, cache.layout, numbers, stride)


def query_strides(query: IndexQuery) -> QueryStrides:
    """Strides of queries as arguments of kernels."""
    token, head, _ = query.values.stride()
    return QueryStrides(token, head, 0 if query.scales is None else query.scales.stride(0), query.weights.stride(0))


def raw(tensor: Tensor) -> Tensor:
    """Codes as bytes."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


def facts_of(keys: _Keys, values: Tensor, tile: Tile, *, exact_sums: bool) -> tuple[Any, ...]:
    """Arguments of `form_of`."""
    native = multiplies_codes(keys.layout, architecture(), exact_sums=exact_sums)
    kind = ROWS if not keys.layout.is_quantised else NIBBLES if keys.layout.fp8_format is None else CODES
    kind = (NATIVE if native else kind).value
    return keys.layout, values.shape[1], tile, keys.aligned, keys.stride, alignment_of_rows(values), kind


def _launch(
    query: IndexQuery,
    keys: _Keys,
    table: Tensor | None,
    lens: Tensor,
    out: Tensor | None,
    tile: Tile,
    entries: int,
    *,
    exact_sums: bool,
    token_to_req: Tensor | None = None,
    tokens_per_req: int = 1,
    first: Tensor | None = None,
    maxima: Tensor | None = None,
    run: int = 1,
    groups: int = 0,
    group: int = 0,
    fill: bool = False,
) -> None:
    """Launch `score_kernel`.

    table: None for gathered keys. lens, first: [T] int32 - end and start of the keys that a token sees; None: 0.
    """
    values = raw(query.values)
    tokens, splits = values.shape[0], _splits(tile, values.shape[0], entries, run)
    launch(
        score_kernel,
        (cdiv(tokens, tile.tokens) * splits,),
        (
            values, query.scales, query.weights, keys.tensor, keys.scales, table, token_to_req, lens, first, out,
            maxima, tokens, tokens_per_req, entries, splits, run, groups, select.SPLIT_LENGTH, query_strides(query),
            table_numbers(table), keys.numbers, 0 if out is None else out.stride(0),
            0 if maxima is None else maxima.stride(0),
        ),
        _constants(
            facts_of(keys, values, tile, exact_sums=exact_sums), architecture(), fill=fill, group=group
        ),
        num_warps=tile.warps,
        num_stages=tile.stages,
        spills=SPILLS if maxima is not None and tile.entries > LANES else 0,
    )  # fmt: skip


def form_of(
    layout: KVCacheLayout, heads: int, tile: Tile, aligned: int, stride: int, q_aligned: int, kind: int
) -> ScoreForm:
    """The form of scores without maxima, of entries that tokens see. aligned, stride: of `_Keys`."""
    half = tl.float16 if layout.fp8_format else tl.bfloat16
    dtype = tl.float32 if INTERPRETED or layout.dtype == torch.float32 else half
    of_query = layout.fp8_format is Fp8Format.FNUZ, heads, max(next_power_of_2(heads), 16), layout.head_dim
    alignments = aligned, q_aligned, stride
    of_tile, lanes = (tile.tokens, tile.entries), min(LANES, tile.entries)
    form = ScoreForm(kind, *of_query, *of_tile, dtype, *alignments, lanes)
    return form._replace(stages=tile.stages, assembly=kind == NATIVE.value)


@cache
def _constants(facts: tuple[Any, ...], arch: str, *, fill: bool, group: int) -> Constants:
    form = form_of(*facts)
    lanes = form.block // min(group, form.block) if group else form.lanes
    form = form._replace(lanes=lanes, group=group, fill=fill)
    # tiles of more tokens would need up to 28 registers more, and spill
    overlapped = uses_pdl(arch) and form.tokens == 1 and not INTERPRETED
    return Constants({"FORM": form, "PDL": overlapped})


@cache
def _inside_constants(facts: tuple[Any, ...], arch: str, block_size: int, places: int, *, whole: bool) -> Constants:
    """Constants of `score_blocks_kernel`. places: N. whole: whether pages have whole blocks."""
    blocks = {"SIZE": block_size, "N": places, "WHOLE": whole}
    return Constants({"FORM": form_of(*facts), **blocks, "PDL": uses_pdl(arch) and not INTERPRETED})


@recorded
def variants(
    layout: KVCacheLayout,
    heads: int,
    *,
    aligned: bool = True,
    exact_sums: bool = False,
    block_size: int = 0,
    places: int = 0,
) -> None:
    """Every variant that selection can need, with keys of this layout.

    aligned: whether caches, and rows of plain queries, are aligned to 16 bytes. block_size: of candidates; 0: of none.
    places: a power of two, at least the number of candidates. exact_sums: see `multiplies_codes`.
    """
    dtype, scales, columns = layout.dtype, None, layout.head_dim
    if layout.is_quantised and layout.fp8_format is None:
        scales, columns = meta_rows(3, heads, layout.num_groups, dtype=torch.uint8), columns * layout.code_bits // 8
    scores = meta_rows(3, LANES, dtype=torch.float32)
    lens, blocks = meta_rows(3), meta_rows(3, 2 * places)
    steps = (WIDE,) if aligned and layout.data_bytes % WIDE == 0 else (WIDE, dtype.itemsize)
    for step, rows in product(steps, row_alignments(columns, dtype, aligned=aligned)):
        values = meta_rows(3, heads, columns, dtype=dtype, alignment=rows)
        query = IndexQuery(values, meta_rows(3, heads, dtype=torch.float32), scales)
        # entries of a tile are in one page; blocks of candidates are in one page; neither
        for size in dict.fromkeys((PAGE, block_size or 1, 1)):
            cache = meta_cache(layout, step, block_size=size)
            # requests of one token, of two and of three
            for tokens in (1, 2, 3):
                part, token_map = query.tokens(slice(tokens)), TokenMap(meta_rows(1, 2), lens, lens[:tokens])
                for maxima in (None, scores[:tokens]):
                    score(part, cache, token_map, scores[:tokens], maxima, 128, exact_sums=exact_sums)
                if block_size:
                    score_maxima(
                        part, cache, token_map, scores[:tokens], block_size, LANES, exact_sums=exact_sums
                    )  # fmt: skip
            if block_size:
                all_tokens = TokenMap(meta_rows(1, 2), lens, lens)
                score_inside(
                    query, cache, all_tokens, blocks, lens, block_size, scores, LANES, exact_sums=exact_sums
                )  # fmt: skip

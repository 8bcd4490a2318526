"""Selection in two levels of DeepSeek-V4.1: blocks by their largest scores, and entries of a token's blocks."""

from __future__ import annotations

from torch import Tensor, int32

from dsv4attn.backends._triton.cache.records import table_numbers
from dsv4attn.backends._triton.interpreted import INTERPRETED
from dsv4attn.backends._triton.launching.pdl import uses_pdl
from dsv4attn.backends._triton.launching.recorded import meta_cache, meta_rows, recorded
from dsv4attn.backends._triton.launching.runtime import architecture, launch
from dsv4attn.backends._triton.layer.indexer.kernels import order_kernel
from dsv4attn.backends._triton.layer.indexer.launch import score_inside, score_maxima
from dsv4attn.backends._triton.layer.selection.launch import plan_in_parts, select
from dsv4attn.backends._triton.layer.selection.scratch import parts
from dsv4attn.backends._triton.sizes import next_power_of_2
from dsv4attn.core.cache.layout import KVCacheLayout, PagedKVCache
from dsv4attn.core.torch_ops.arguments import TokenMap
from dsv4attn.core.torch_ops.indexer import IndexQuery

WARPS = 8
"""Of a program that orders candidates."""


def select_blocks(
    query: IndexQuery,
    cache: PagedKVCache,
    token_map: TokenMap,
    out: Tensor,
    block_size: int,
    max_entries: int,
    *,
    exact_rows: bool,
    exact_sums: bool = False,
) -> None:
    """Write the numbers of the blocks with the largest scores of each token to out [T, N] int32, ascending, then -1.

    exact_rows, exact_sums: see `launch.score`. Other arguments are those of the op. Scores of single entries are
    not stored.
    """
    blocks = -(-max_entries // block_size)
    plan = plan_in_parts(out, blocks, out.shape[1])
    for part, (scores, memory) in parts(out, blocks, plan.columns):
        some = token_map.tokens(part)
        exact: dict[str, bool] = {"exact_rows": exact_rows, "exact_sums": exact_sums}
        score_maxima(query.tokens(part), cache, some, scores, block_size, max_entries, **exact)
        select(
            scores, None, some.visible_lens, out[part], blocks, run=0, unit=block_size, plan=plan, memory=memory
        )  # fmt: skip


def select_inside(
    query: IndexQuery,
    cache: PagedKVCache,
    token_map: TokenMap,
    candidates: Tensor,
    block_size: int,
    out: Tensor,
    max_entries: int,
    *,
    exact_sums: bool = False,
) -> None:
    """Write the K entries of candidates [T, N] int32 with the largest scores of each token to out [T, K] int32.

    Only these entries are scored. exact_sums: see `launch.multiplies_codes`.
    """
    most = min(candidates.shape[1], -(-max_entries // block_size)) * block_size
    places = 2 * next_power_of_2(candidates.shape[1])
    plan = plan_in_parts(out, most, out.shape[1], places, 1)
    for part, (scores, memory, ordered, count) in parts(out, most, plan.columns, places, 1):
        some, blocks = token_map.tokens(part), ordered.view(int32)[:, :places]
        counts = count.view(int32).flatten()[: blocks.shape[0]]
        order(candidates[part], cache, some, blocks, counts, block_size, max_entries)
        score_inside(
            query.tokens(part), cache, some, blocks, counts, block_size, scores, max_entries, exact_sums=exact_sums
        )  # fmt: skip
        select(
            scores, None, counts, out[part], most, run=0, plan=plan, memory=memory, blocks=(blocks, block_size)
        )  # fmt: skip


def order(
    candidates: Tensor,
    cache: PagedKVCache,
    token_map: TokenMap,
    blocks: Tensor,
    counts: Tensor,
    block_size: int,
    max_entries: int,
) -> None:
    """Write the candidates [T, M] int32 that a token sees to blocks [T, 2 N] int32, each once, ascending.

    Then where they are, see `order_kernel`; what follows each is anything. N is a power of two, at least M. counts: [T]
    int32 - receives the entries of these blocks.
    """
    (tokens, most), table = candidates.shape, token_map.block_table
    launch(
        order_kernel,
        (tokens,),
        (
            candidates, token_map.visible_lens, table, token_map.token_to_req, blocks, counts, candidates.stride(0),
            blocks.stride(0), most, max_entries, table_numbers(table), cache.num_blocks,
            cache.block_size,
        ),
        {
            "SIZE": block_size, "N": blocks.shape[1] // 2, "PDL": uses_pdl(architecture()) and not INTERPRETED,
        },
        num_warps=WARPS,
    )  # fmt: skip


@recorded
def variants(block_size: int, most: int) -> None:
    """Every variant that this module can need, but for those of scores and of `select`. most: candidates of a token."""
    lens, cache, blocks = meta_rows(1), meta_cache(KVCacheLayout.index_fp8()), meta_rows(1, 2 * next_power_of_2(most))
    order(meta_rows(1, most), cache, TokenMap(meta_rows(1, 1), lens, lens), blocks, lens, block_size, 1)

"""The launcher of `kernels_few_heads`, for ranks of few heads on V4's fp8 records."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import product

import torch

from dsv4attn.backends._triton.attention import launch as attention_launch
from dsv4attn.backends._triton.interpreted import INTERPRETED
from dsv4attn.backends._triton.launching.launch_cache import Constants
from dsv4attn.backends._triton.launching.pdl import uses_pdl
from dsv4attn.backends._triton.launching.recorded import recorded
from dsv4attn.backends._triton.launching.runtime import Launch
from dsv4attn.backends.sm90.attention.key_format import FP8_RECORDS
from dsv4attn.backends.sm90.attention.meta_calls import NUMBERS, meta_calls
from dsv4attn.backends.sm90.attention.small_decode import combining
from dsv4attn.backends.sm90.tuning import FewHeadsSizes, few_heads_costs
from dsv4attn.core.contract.backend import AttentionCall, AttentionTensors, Run

if INTERPRETED:
    from dsv4attn.backends.sm90.interpreted.kernels_few_heads import attend_few_heads
else:
    from dsv4attn.backends.sm90.attention.kernels_few_heads import attend_few_heads

WARPS = 4
"""Warps of a program."""


def prepare(call: AttentionCall, numbers: Sequence[int], sizes: FewHeadsSizes) -> Run:
    """Launches of a call on V4's fp8 records: one if rows are whole, or else a second one, which combines their parts.

    numbers: of both segments, see `sm90.launch`. Parts are in the call's scratch.
    """
    q, top, (tokens, heads, _) = call.q, call.max_logits, call.q.shape
    widths = [rows.width for rows in attention_launch.index_rows(call.keys)]
    parts, blocks = sizes.parts(widths), -(-heads // sizes.columns)
    constants = _constants(len(widths), heads, sizes.columns, whole=sizes.is_whole)
    results = attention_launch.result_strides(call)
    numbers = *q.stride()[:2], *results, *numbers, parts, sizes.tiles, sizes.shift
    launch = Launch(attend_few_heads, constants, (*numbers, call.layer.scale, call.empty_lse), WARPS)
    programs = tokens * parts * blocks
    window_indices, window_lens, compressed_indices, compressed_lens = attention_launch.index_tensors(call.keys)
    # other kernels fill this memory with fp32: parts in fp16 need half of it, and their sums less than the rest
    memory = call.scratch[0]
    part, sums = memory.view(torch.float16), memory.view(-1)[memory.numel() // 2 :]
    combine, combiners = None, 0
    if not sizes.is_whole:
        shape = heads, sizes.columns, 64 * sizes.tiles, parts, widths[0], widths[1] if len(widths) == 2 else 0
        combine, combiners = combining(tokens, heads, parts, (*results, *shape, 0, call.empty_lse))
    has_compressed = len(widths) > 1

    def run(tensors: AttentionTensors) -> None:
        q, out, lse, attn_sink, _, window_cache, compressed_cache = tensors
        # an only segment is passed twice
        window = compressed = window_cache.tensor
        if has_compressed and compressed_cache is not None:
            compressed = compressed_cache.tensor
        launch(
            programs,
            (
                q, out, lse, top, attn_sink, part, sums,
                window, window_indices, window_lens, compressed, compressed_indices, compressed_lens,
            ),
        )  # fmt: skip
        if combine is not None:
            combine(combiners, (part, sums, out, lse, top, attn_sink, window_lens, compressed_lens))

    return run


@cache
def _constants(segments: int, heads: int, columns: int, *, whole: bool) -> Constants:
    chosen = {"SEGMENTS": segments, "H": heads, "BH": columns, "WHOLE": whole}
    return Constants(chosen if INTERPRETED else {**chosen, "PDL": uses_pdl("sm_90")})


@recorded
def variants(segments: int, heads: int, *, sinks: Sequence[bool], lses: Sequence[bool]) -> None:
    """Every variant that can be needed. sinks, lses: see `meta_calls`."""
    costs = few_heads_costs(heads)
    if costs is None:
        return
    for call, tiles in product(meta_calls(segments, FP8_RECORDS, heads, sinks=sinks, lses=lses), (0, 1)):
        prepare(call, NUMBERS, FewHeadsSizes(costs.columns, tiles))(call.tensors)

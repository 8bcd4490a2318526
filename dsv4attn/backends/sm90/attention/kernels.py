"""The entry point of Hopper's Gluon kernels: on fp8 pages `kernels_pages`, on bf16 rows `kernels_rows`."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton.language as tl
from triton.experimental.gluon import language as gl

from dsv4attn.backends._triton.launching.kernels_pdl import wait_prior_grid
from dsv4attn.backends._triton.launching.runtime import stable_gluon
from dsv4attn.backends.sm90.attention.kernels_common import LINE_L, SHORT_L, load_sink
from dsv4attn.backends.sm90.attention.kernels_pages import attend_pages
from dsv4attn.backends.sm90.attention.kernels_rows import attend_rows
from dsv4attn.backends.sm90.attention.kernels_schedule import BF16_ROWS, SHORT, Keys, Query, Results, Segment, share


@stable_gluon
def attention(
    q,  # [T, H, 512] bf16
    out,  # [T, H, 512] bf16
    lse,  # [T, H] fp32, or None
    max_logits,  # [T, H] fp32, or None
    sink,  # [H] fp32, or None
    part,  # [programs, 2, 64, 512] fp16, in the order of `place_in_part`
    part_powers,  # [programs, 2, 8192] uint8
    part_lse,  # [programs, 2, 64] fp32
    part_max,  # [programs, 2, 64] fp32, or None
    table,  # [lines, 2] int32
    window_keys,  # [pages, page bytes] uint8, or [N, 512] bf16
    window_rows,  # [T, width0] int32
    window_lens,  # [T] int32
    compressed_keys,  # [pages, page bytes] uint8, or [N, 512] bf16
    compressed_rows,  # [T, width1] int32
    compressed_lens,  # [T] int32
    positions,  # [T] int64, if q is neither normalised nor rotated; else None
    angles,  # [num_positions, 64] fp32, cosines before sines; or None
    groups,  # [T + 1, 4] int32 of `list_groups`, or None
    q_token: tl.int64, q_head: tl.int64, out_token: tl.int64, out_head: tl.int64,
    lse_token: tl.int64, lse_head: tl.int64, max_token: tl.int64, max_head: tl.int64,
    width0: tl.int32, stride0: tl.int64, size0: tl.int32,
    factor0: tl.int32, log0: tl.int32, pitch0: tl.int32, last_slot0: tl.int32,
    width1: tl.int32, stride1: tl.int64, size1: tl.int32,
    factor1: tl.int32, log1: tl.int32, pitch1: tl.int32, last_slot1: tl.int32,
    angles_stride: tl.int64, num_positions: tl.int64, eps: tl.float32,
    tokens: tl.int32, least: tl.int32, scale: tl.float32, empty_lse: tl.float32,
    SEGMENTS: gl.constexpr, KIND: gl.constexpr, INTERLEAVED: gl.constexpr, H: gl.constexpr, BT: gl.constexpr,
    WHOLE_ROWS: gl.constexpr, VALUES: gl.constexpr, PRODUCE: gl.constexpr, FETCH: gl.constexpr, PDL: gl.constexpr,
    HEADS: gl.constexpr,
):  # fmt: skip
    """Grid: (programs x blocks of 64 heads,), heads fastest, so that programs that share keys run together.

    KIND: FP8_PAGES, BF16_ROWS or another; INTERLEAVED: as of `coded_page_of`. q, out, pages and rows
    begin at multiples of 16 bytes. Arguments are as the fields of `Query`, `Segment` and `Results` have them; least, BT
    and WHOLE_ROWS, as `share` does; VALUES, PRODUCE, FETCH: registers of the second role and of those that produce
    keys. The first role has what they leave. HEADS: how many rows of products a row of q has: at least H where rows
    are in groups.
    """
    wait_prior_grid(PDL)
    BLOCKS: gl.constexpr = (H + 63) // 64
    program = gl.program_id(0)
    head0 = (program % BLOCKS) * 64
    query = Query(q, q_token, q_head, scale, head0, positions, angles, angles_stride, num_positions, eps)
    first = Segment(window_keys, window_rows, window_lens, width0, stride0, size0, factor0, log0, pitch0, last_slot0)
    second = None
    if SEGMENTS == 2:
        second = Segment(
            compressed_keys, compressed_rows, compressed_lens, width1, stride1, size1, factor1, log1, pitch1, last_slot1
        )
    keys = Keys(first, second, KIND == BF16_ROWS, groups)
    if groups is not None:
        tokens = gl.load(groups + tokens * 4)
    results = Results(
        out, lse, max_logits, sink, part, part_powers, part_lse, part_max, table,
        out_token, out_head, lse_token, lse_head, max_token, max_head, empty_lse,
    )  # fmt: skip
    bias = load_sink(sink, head0, H, HEADS)
    ONCE: gl.constexpr = BT == SHORT
    # each warp of a short call has all its rows
    at = gl.arange(0, BT, layout=SHORT_L if ONCE else LINE_L)
    line_program, line_programs = program // BLOCKS, gl.num_programs(0) // BLOCKS
    chunk, t, pos, count = share(keys, tokens, line_program, line_programs, least, at, BT, ONCE, WHOLE_ROWS)
    if KIND == BF16_ROWS:
        attend_rows(query, keys, results, bias, chunk, t, pos, H, VALUES, PRODUCE)
    else:
        attend_pages(
            query, keys, results, bias, chunk, t, pos, count, KIND, INTERLEAVED, H, HEADS, VALUES, PRODUCE, FETCH
        )

"""The twin of both Gluon kernels, for Triton's interpreter, which runs no Gluon: same arguments, schedule and results.

Of pages it goes two ways over a chunk at once, as the roles of `kernels` do: rows one after the other as `scores`,
tiles as `produce`. Keys come from where the second stands, so the two have to agree. The roles of `kernels_rows` all go
by rows, and attend pairs of tiles, one tile after the other.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from dsv4attn.backends._triton import numerics
from dsv4attn.backends._triton.attention.kernels import LN2, LOG2E, NOTHING
from dsv4attn.backends._triton.attention.keys import widen
from dsv4attn.backends._triton.launching.runtime import stable_kernel
from dsv4attn.backends.sm90.kernels_schedule import (
    ROWS,
    TOLERANCE,
    advance,
    enter,
    page_of,
    pairs_of,
    part_of,
    row_of,
    row_slots,
    settle,
    share,
    slots,
    tiles_of,
    told,
)


@triton.jit
def read_page(data, scale, ok):
    """[64, 512] fp32 of records; zeros where not ok."""
    column = tl.arange(0, 512)[None, :]
    is_code, is_rope = ok[:, None] & (column < 448), ok[:, None] & (column >= 448)
    code = tl.load(data.to(tl.pointer_type(tl.uint8))[:, None] + column, mask=is_code, other=0)
    byte = tl.load(scale.to(tl.pointer_type(tl.uint8))[:, None] + column // 64, mask=is_code, other=127)
    rope = tl.load(data.to(tl.pointer_type(tl.bfloat16))[:, None] + (column - 224), mask=is_rope, other=0.0)
    value = numerics.dequantize(code.to(tl.int32), byte.to(tl.int32), False)
    return tl.where(is_code, value, widen(rope, tl.float32))


@triton.jit
def read_row(key, ok):
    """[64, 512] fp32 of rows; zeros where not ok."""
    return widen(tl.load(key[:, None] + tl.arange(0, 512)[None, :], mask=ok[:, None], other=0.0), tl.float32)


@stable_kernel
def attention(
    q,
    out,
    lse,
    max_logits,
    sink,
    part,
    part_lse,
    part_max,
    table,
    cache0,
    rows0,
    lens0,
    cache1,
    rows1,
    lens1,
    q_token: tl.int64,
    q_head: tl.int64,
    out_token: tl.int64,
    out_head: tl.int64,
    lse_token: tl.int64,
    lse_head: tl.int64,
    max_token: tl.int64,
    max_head: tl.int64,
    width0: tl.int32,
    stride0: tl.int64,
    size0: tl.int32,
    factor0: tl.int32,
    log0: tl.int32,
    pitch0: tl.int32,
    count0: tl.int32,
    width1: tl.int32,
    stride1: tl.int64,
    size1: tl.int32,
    factor1: tl.int32,
    log1: tl.int32,
    pitch1: tl.int32,
    count1: tl.int32,
    tokens: tl.int32,
    least: tl.int32,
    scale: tl.float32,
    empty_lse: tl.float32,
    SEGMENTS: tl.constexpr,
    KIND: tl.constexpr,
    H: tl.constexpr,
    BT: tl.constexpr,
):
    """See `kernels.attention`; KIND ROWS, `kernels_rows.attention`."""
    BLOCKS: tl.constexpr = (H + 63) // 64
    program = tl.program_id(0)
    within = tl.arange(0, 64)
    head = (program % BLOCKS) * 64 + within
    live, column, row = head < H, tl.arange(0, 512), tl.arange(0, 64)
    at = tl.arange(0, BT)
    lo, hi, chunk, extra, t, pos, count = share(
        lens0, lens1, tokens, width0, width1, program // BLOCKS, tl.num_programs(0) // BLOCKS, least, at, SEGMENTS, BT
    )
    paging = (size0, factor0, log0, pitch0, count0, size1, factor1, log1, pitch1, count1)
    # where the producer stands
    m0, m1, i, end = enter(lens0, lens1, t, pos, lo, hi, tokens, width0, width1, SEGMENTS)
    u, there, m0, m1, i, end = settle(
        lens0, lens1, t, pos, lo, hi, extra, tokens, width0, width1, m0, m1, i, end, SEGMENTS
    )
    done = count * 0
    while (pos < hi) & (t < tokens):
        n0, n1, first, last = enter(lens0, lens1, t, pos, lo, hi, tokens, width0, width1, SEGMENTS)
        n = tiles_of(n0, n1)
        token = t.to(tl.int64)
        q_row = q + token * q_token + head.to(tl.int64)[:, None] * q_head + column[None, :]
        query = widen(tl.load(q_row, mask=live[:, None], other=0.0), tl.float32)
        largest, total = tl.full([64], NOTHING, tl.float32), tl.zeros([64], tl.float32)
        # what weights are relative to: of pages the largest logit so far
        reference, tolerance = largest, TOLERANCE if KIND == ROWS else 0.0
        acc = tl.zeros([64, 512], tl.float32)
        for k in range(first, first + pairs_of(first, last) * 2 if KIND == ROWS else last):
            if KIND == ROWS:
                ok, key = row_of(row_slots(rows0, stride0, t, n0, last, k, row), cache0, pitch0, count0)
                keys = read_row(key, ok)
            else:
                slot, inside = slots(rows0, rows1, stride0, stride1, u, tokens, i, m0, m1, row, SEGMENTS)
                # of a tile that nobody produces, no key would ever arrive
                slot = tl.where(done < count, slot, -1)
                ok, data, scales = page_of(slot, inside, cache0, cache1, paging, SEGMENTS)
                keys = read_page(data, scales, ok)
            z = tl.dot(query, tl.trans(keys), input_precision="ieee") * (scale * LOG2E)
            # as the roles do: a NaN in q reaches a row of pages whose keys are all absent, and no row of gathered keys
            if KIND == ROWS:
                z = tl.where(ok[None, :], z, -float("inf"))
            else:
                z += tl.where(ok, 0.0, -float("inf"))[None, :]
            most = tl.max(z, 1)
            largest = tl.maximum(largest, most)
            moved = tl.where(most > reference + tolerance, most, reference)
            shrink = tl.exp2(reference - moved)
            p = tl.exp2(z - moved[:, None])
            reference = moved
            total = total * shrink + tl.sum(p, 1)
            acc = tl.dot(p, keys, acc * shrink[:, None], input_precision="ieee")
            done += 1
            u, there, m0, m1, i, end = advance(
                lens0, lens1, u, there, lo, hi, extra, tokens, width0, width1, m0, m1, i, end, SEGMENTS
            )
        whole = (first == 0) & (last == n)
        side = part_of(program, pos, lo)
        empty = total == 0.0
        factor = 1.0 / total
        if whole:  # noqa: SIM102 - a value, and a constant
            if sink is not None:
                factor = 1.0 / (total + tl.exp2(tl.load(sink + head, mask=live, other=0.0) * LOG2E - reference))
        result = acc * tl.where(empty, 0.0, factor)[:, None]
        if whole:
            to = out + token * out_token + head.to(tl.int64)[:, None] * out_head + column[None, :]
            tl.store(to, numerics.round_to(result, out.dtype.element_ty, False), mask=live[:, None])
            if lse is not None:
                at = token * lse_token + head.to(tl.int64) * lse_head
                tl.store(lse + at, tl.where(empty, empty_lse, (reference + tl.log2(total)) * LN2), mask=live)
            if max_logits is not None:
                at = token * max_token + head.to(tl.int64) * max_head
                top = tl.where(empty, -float("inf"), numerics.or_nan(largest, total) * LN2)
                tl.store(max_logits + at, top, mask=live)
        else:
            line = side * 64 + within
            tl.store(part + line[:, None] * 512 + column[None, :], result)
            tl.store(part_lse + line, tl.where(empty, -float("inf"), reference + tl.log2(total)))
            if max_logits is not None:
                tl.store(part_max + line, tl.where(empty, -float("inf"), largest))
        if first == 0:
            told(table, t, pos, n, lo, chunk)
        pos += tl.maximum(n, 1) + extra
        t += 1

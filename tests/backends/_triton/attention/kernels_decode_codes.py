"""A kernel that decodes codes and nothing else, so that a test can try every code under every scale."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton.language as tl

from dsv4attn.backends._triton.attention import keys
from dsv4attn.backends._triton.launching.runtime import stable_kernel

__all__ = ["ROWS", "nibbles_kernel", "words_kernel"]

ROWS = tl.constexpr(16)
"""Rows of words that a program decodes."""


@stable_kernel
def words_kernel(WORDS, BYTES, OUT, dialect: tl.int32, W: tl.constexpr, FNUZ: tl.constexpr, ASM: tl.constexpr):
    """OUT [n, 2 * W] int32: two bf16 values each, of WORDS [n, W] int32: four codes each, under scale BYTES [n] int32.

    FNUZ: None reads `dialect`, 1 is FNUZ.
    """
    row, word, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, W), tl.arange(0, 2 * W)
    words = tl.load(WORDS + row[:, None] * W + word[None, :])
    scale = tl.broadcast_to(keys.scale_of(tl.load(BYTES + row), ASM)[:, None], [ROWS, W])
    fnuz = (dialect == 1) if FNUZ is None else FNUZ
    tl.store(OUT + row[:, None] * (2 * W) + column[None, :], keys.codes(words, scale, fnuz, ROWS, W, ASM))


@stable_kernel
def nibbles_kernel(WORDS, BYTES, OUT, W: tl.constexpr, ASM: tl.constexpr):
    """OUT [n, 4 * W] int32: two bf16 values each, of WORDS [n, W] int32: eight e2m1 codes each.

    BYTES: [n, 2] int64 - 16 scales of e4m3fn, of W / 16 words each.
    """
    row, word, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, W), tl.arange(0, 4 * W)
    words = tl.load(WORDS + row[:, None] * W + word[None, :])
    scale = keys.scales_of_codes(tl.load(BYTES + row[:, None] * 2 + tl.arange(0, 2)[None, :]), ROWS, 16, ASM)
    values = keys.pairs(words, keys.spread(scale, ROWS, 16), ROWS, W, ASM)
    tl.store(OUT + row[:, None] * (4 * W) + column[None, :], values)

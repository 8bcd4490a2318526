"""What both Gluon kernels of Hopper are made of: numbers, layouts, and steps of a few lines."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

__all__ = [
    "FLAT_S",
    "KEYS_S",
    "LINE_L",
    "LOG2E",
    "NOTHING",
    "ONE_L",
    "SCORES_L",
    "WIDE_L",
    "barriers",
    "here",
    "load_sink",
    "scalar",
    "single",
    "write_sums",
]

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
NOTHING = gl.constexpr(-1e30)
"""Where the running maximum starts: finite, so that a tile without keys makes no NaN."""

SCORES_L = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
"""Of products of q and a tile, 64 heads by 64 keys."""
WIDE_L = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
"""Sixteen bytes of bf16 in each of four warps' threads."""
LINE_L = gl.constexpr(gl.BlockedLayout([8], [32], [4], [0]))
ONE_L = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))

KEYS_S = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
FLAT_S = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def here(x):
    """x, int32, worked out where it stands: what follows from it is not carried through a loop in registers."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def scalar(view):
    """The number that one place of shared memory holds."""
    return gl.max(view.load(ONE_L), 0)


@gluon.jit
def single(x, DT: gl.constexpr):
    """A number as what `scalar` reads."""
    return gl.full([1], x, DT, layout=ONE_L)


@gluon.jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """So many barriers, whose phase ends after so many arrivals."""
    made = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for b in gl.static_range(COUNT):
        mbarrier.init(made.index(b), count=ARRIVALS)
    return made


@gluon.jit
def load_sink(sink, head0, H: gl.constexpr):
    """[64] fp32 in shared memory: sinks of a block of heads, in base 2; nothing where there are none."""
    sink_s = gl.allocate_shared_memory(gl.float32, [64], FLAT_S)
    if sink is not None:
        head = head0 + gl.arange(0, 64, layout=ONE_L)
        sink_s.store(gl.load(sink + head, mask=head < H, other=0.0) * LOG2E)
    return sink_s


@gluon.jit
def write_sums(
    lse, max_logits, part_lse, part_max, to, t, whole, side, total, reference, largest, empty_lse, head0,
    H: gl.constexpr,
):  # fmt: skip
    """What row t of 64 heads sums to, and its largest logit; of a row that is not whole, in place `side` of parts.

    total: of weights below `reference`, which is of base 2, as is largest; both [64] in rows of SCORES_L.
    """
    _out_token, _out_head, lse_token, lse_head, max_token, max_head = to
    within = here(gl.arange(0, 64, layout=gl.SliceLayout(1, SCORES_L)))
    empty = total == 0.0
    if whole:
        head = head0 + within
        if lse is not None:
            at = t.to(gl.int64) * lse_token + head.to(gl.int64) * lse_head
            gl.store(lse + at, gl.where(empty, empty_lse, (reference + gl.log2(total)) * LN2), mask=head < H)
        if max_logits is not None:
            at = t.to(gl.int64) * max_token + head.to(gl.int64) * max_head
            # maxima pass over a NaN among logits, and the total of weights does not; a finite one adds nothing
            gl.store(max_logits + at, gl.where(empty, -float("inf"), largest * LN2 + total * 0.0), mask=head < H)
    else:
        aside = side * 64 + within
        gl.store(part_lse + aside, gl.where(empty, -float("inf"), reference + gl.log2(total)))
        if max_logits is not None:
            gl.store(part_max + aside, gl.where(empty, -float("inf"), largest))

"""What the roles of both Gluon kernels share: layouts, barriers, and steps of a few lines."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from dsv4attn.backends._triton.numerics import LOG2E

SCORES_L = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
"""Products of q and a tile, 64 heads by 64 keys."""
WIDE_L = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
"""Sixteen bytes of bf16 in each of four warps' threads."""
LINE_L = gl.constexpr(gl.BlockedLayout([8], [32], [4], [0]))
SHORT_L = gl.constexpr(gl.BlockedLayout([4], [32], [4], [0]))
"""SHORT numbers in each of four warps, which add them up without waiting for each other."""
ONE_L = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))

KEYS_S = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
FLAT_S = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def here(x):
    """x, int32, computed at its use: values that follow from it are not carried through a loop in registers."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def scalar(view):
    """The number that a view of one element of shared memory holds."""
    return gl.max(view.load(ONE_L), 0)


@gluon.jit
def single(x, DT: gl.constexpr):
    """A number in the form that `scalar` reads."""
    return gl.full([1], x, DT, layout=ONE_L)


@gluon.jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """COUNT barriers, whose phase ends after ARRIVALS arrivals."""
    made = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for b in gl.static_range(COUNT):
        mbarrier.init(made.index(b), count=ARRIVALS)
    return made


@gluon.jit
def load_sink(sink, head0, H: gl.constexpr):
    """[64] fp32 in shared memory: sinks of a block of heads, in base 2; undefined if there are none."""
    sink_s = gl.allocate_shared_memory(gl.float32, [64], FLAT_S)
    if sink is not None:
        head = head0 + gl.arange(0, 64, layout=ONE_L)
        sink_s.store(gl.load(sink + head, mask=head < H, other=0.0) * LOG2E)
    return sink_s


@gluon.jit
def normalized(sink, sink_s, total, reference, whole):
    """[64] factors of a row's sums: 1 / total, with the sink if the row is whole, and 0 for a row without keys."""
    factor = 1.0 / total
    if whole:  # noqa: SIM102 - a value, and a constant
        if sink is not None:
            # one more logit of value zero; a sink of +inf leaves nothing
            factor = 1.0 / (total + gl.exp2(sink_s.load(gl.SliceLayout(1, SCORES_L)) - reference))
    return gl.where(total == 0.0, 0.0, factor)


@gluon.jit
def write_part(part, result, place, FIRST: gl.constexpr, N: gl.constexpr, LAYOUT: gl.constexpr):
    """N columns of 64 heads of a row that is split, from FIRST on. place: of its first element in part."""
    line = here(gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT)))
    across = FIRST + gl.arange(0, N, layout=gl.SliceLayout(0, LAYOUT))
    aside = gl.multiple_of(part + place + line * 512, [16])
    gl.store(gl.expand_dims(aside, 1) + gl.expand_dims(across, 0), result)

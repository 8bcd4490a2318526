"""What the roles of both Gluon kernels share: layouts, barriers, and steps of a few lines."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from dsv4attn.backends._triton.numerics import LOG2E
from dsv4attn.backends.sm90.attention.kernels_schedule import powers_of

SCORES_L = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
"""Products of q and a tile, 64 heads by 64 keys."""
WIDE_L = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
"""Sixteen bytes of bf16 in each of four warps' threads."""
LINE_L = gl.constexpr(gl.BlockedLayout([8], [32], [4], [0]))
SHORT_L = gl.constexpr(gl.BlockedLayout([4], [32], [4], [0]))
"""SHORT numbers in each of four warps, which add them up without waiting for each other."""
ONE_L = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
PIECE = gl.constexpr(32)
"""Columns of a part that are scaled together: powers of more take more registers than there are."""

KEYS_S = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
FLAT_S = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


def _unless_all_are_one(n: int) -> str:
    """Instructions that multiply n numbers in place by n more, of which two in turns belong to either row of a thread.

    A warp in which no row shrinks skips the products.
    """
    lines = [
        ".reg .pred p, r;",
        f"setp.neu.f32 p, ${2 * n}, 0f3F800000;",
        f"setp.neu.f32 r, ${2 * n + 2}, 0f3F800000;",
        "or.pred p, p, r;",
        "vote.sync.any.pred p, p, 0xffffffff;",
        "@!p bra.uni DONE;",
        *(f"mul.f32 ${i}, ${i}, ${2 * n + i};" for i in range(n)),
        "DONE:",
    ]
    return "\n".join(["{", *lines, "}"])


_PACK = 64
PACK = gl.constexpr(_PACK)
"""Numbers of a thread that one block of instructions multiplies."""
SHRINK = gl.constexpr(_unless_all_are_one(_PACK))
SHRINK_REGISTERS = gl.constexpr(",".join(["=f"] * _PACK + [str(i) for i in range(_PACK)] + ["f"] * _PACK))
"""Each result is in the register of its operand: a copy would be held next to sums that a matrix product is to take."""


@gluon.jit
def rescaled(acc, shrink):
    """[64, N] times [64], which mostly is 1; N: a multiple of 128.

    Instructions, since Gluon has no branch that one warp takes alone.
    """
    by = gl.convert_layout(shrink, gl.SliceLayout(1, acc.type.layout))
    by = gl.expand_dims(by, 1) + gl.zeros_like(acc)
    return gl.inline_asm_elementwise(SHRINK, SHRINK_REGISTERS, [acc, by], dtype=gl.float32, is_pure=False, pack=PACK)


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
def load_sink(sink, head0, H: gl.constexpr, HEADS: gl.constexpr = 64):
    """[64] fp32: sinks of a block of heads, or None. Early, since nothing waits for them before `store_sink`.

    HEADS: heads that follow each other before the first comes again, of the next row of a group.
    """
    bias = None
    if sink is not None:
        head = head0 + gl.arange(0, 64, layout=ONE_L) % HEADS
        bias = gl.load(sink + head, mask=head < H, other=0.0)
    return bias


@gluon.jit
def store_sink(bias):
    """[64] fp32 in shared memory: what `load_sink` returned, in base 2; undefined if there are no sinks."""
    sink_s = gl.allocate_shared_memory(gl.float32, [64], FLAT_S)
    if bias is not None:
        sink_s.store(bias * LOG2E)
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
def halve(x, N: gl.constexpr):
    """[64, N] as two of [64, N // 2]."""
    return gl.split(gl.permute(gl.reshape(x, [64, 2, N // 2]), (0, 2, 1)))


@gluon.jit
def write_part(results, result, place, FIRST: gl.constexpr, N: gl.constexpr):
    """N columns of 64 heads of a row that is split, from FIRST on, in the order of `place_in_part`.

    place: of the part's first element. A thread has 16 bytes in a row of each 16 columns, and a warp 512.
    """
    GROUPS: gl.constexpr = N // 16
    if N > PIECE:
        x, y = halve(result, N)
        write_part(results, x, place, FIRST, N // 2)
        write_part(results, y, place, FIRST + N // 2, N // 2)
    else:
        # warps, halves of 16 heads, heads, groups of 16 columns, halves, pairs of columns, columns: threads first
        eights = gl.permute(gl.reshape(result, [4, 2, 8, GROUPS, 2, 4, 2]), (0, 2, 5, 3, 4, 1, 6))
        eights = gl.reshape(eights, [128, GROUPS, 2, 2, 2])
        exponent, inverse = powers_of(gl.max(gl.max(gl.abs(eights), 4), 2))
        eights *= gl.expand_dims(gl.expand_dims(inverse, 2), 4)
        eights = gl.reshape(eights.to(gl.float16), [128, GROUPS, 8])
        low, high = gl.split(exponent)
        thread = here(gl.arange(0, 128, layout=gl.SliceLayout(1, gl.SliceLayout(2, eights.type.layout))))
        group = gl.arange(0, GROUPS, layout=gl.SliceLayout(0, gl.SliceLayout(2, eights.type.layout)))
        within = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, eights.type.layout)))
        to = place + (thread // 32 * 8192 + thread % 32 * 8)
        words = results.part_powers.to(gl.pointer_type(gl.int16), bitcast=True) + to // 8
        words = gl.expand_dims(words, 1) + gl.expand_dims(group * 32 + 2 * FIRST, 0)
        gl.store(gl.convert_layout(words, low.type.layout, assert_trivial=True), (low | (high << 8)).to(gl.int16))
        to = gl.expand_dims(gl.multiple_of(results.part + to, [16]), 1) + gl.expand_dims(group * 256 + 16 * FIRST, 0)
        gl.store(gl.expand_dims(to, 2) + gl.expand_dims(gl.expand_dims(within, 0), 1), eights)

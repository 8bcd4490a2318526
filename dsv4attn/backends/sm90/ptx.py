"""PTX that decodes codes to bf16, as `gl.inline_asm_elementwise` takes it."""

from __future__ import annotations


def codes(*, last: bool, scale: int = 16) -> str:
    """PTX of four words of e4m3 codes, as `keys.DECODE` does one.

    $0..$7: of each word its first two values, then of each its last two. $8: the largest code so far, twice, at least
    $20: without its sign, where bf16 has exponent and mantissa. $12..$15: words. $16: four scale bytes, of which $24
    picks one. What would be equal in all four operands is read from the first.
    last: whether the values of the last word are NaN if the largest code is. scale: the operand read instead of $16.
    """
    lines = [
        ".reg .b32 scale, unit, zero, seen, t;",
        ".reg .b32 low<4>, high<4>, a<4>, b<4>;",
        ".reg .pred p;",
        "mov.b32 zero, 0x80008000;",
        "mov.b32 unit, 0x7b807b80;",
        # a bf16 power of two, twice; of byte 0 the subnormal 2^-127
        f"prmt.b32 scale, ${scale}, 0, $24;",
        "shl.b32 scale, scale, 7;",
        "max.u32 scale, scale, 0x00400040;",
        "mov.b32 seen, $20;",
    ]
    for i in range(4):
        lines += [
            # this half first: with Triton 3.9, the other order spills
            f"shl.b32 low{i}, ${12 + i}, 4;",
            f"and.b32 low{i}, low{i}, 0xf0f0f0f0;",
            f"shr.u32 high{i}, ${12 + i}, 4;",
            f"and.b32 high{i}, high{i}, 0x07070707;",
            f"lop3.b32 high{i}, ${12 + i}, 0x80808080, high{i}, 0xea;",
            f"prmt.b32 a{i}, low{i}, high{i}, 0x5140;",
            f"prmt.b32 b{i}, low{i}, high{i}, 0x7362;",
            # bits of bf16 are ordered like those of f16: one instruction on Hopper
            f"abs.f16x2 low{i}, a{i};",
            f"abs.f16x2 high{i}, b{i};",
            f"max.f16x2 low{i}, low{i}, high{i};",
            f"max.f16x2 seen, seen, low{i};",
            f"fma.rn.bf16x2 a{i}, a{i}, unit, zero;",
            f"fma.rn.bf16x2 b{i}, b{i}, unit, zero;",
        ]
        if last and i == 3:
            lines += [
                "add.u32 t, seen, 0x00100010;",
                "and.b32 t, t, 0x08000800;",
                "setp.ne.u32 p, t, 0;",
                "selp.b32 scale, 0x7fc07fc0, scale, p;",
            ]
        lines += [f"fma.rn.bf16x2 ${i}, a{i}, scale, zero;", f"fma.rn.bf16x2 ${4 + i}, b{i}, scale, zero;"]
    lines += [f"mov.b32 ${8 + i}, seen;" for i in range(4)]
    return "{\n" + "\n".join(lines) + "\n}\n"


def nibbles(piece: int) -> str:
    """PTX of four words of e2m1 codes, eight in each.

    $0..$3: of each word its first two values; $4..$7, $8..$11, $12..$15: the next ones. $16..$19: words.
    $20 + piece: four scales, of which $24 picks that of the first two words; the one behind it is of the others.
    The bytes of a code's bf16 value are looked up by its three low bits; a fourth bit would pick a sign.
    """
    lines = [
        ".reg .b32 scale<2>, zero, unit, pick, t, m;",
        ".reg .b32 w, x, high, low, a, b;",
        ".reg .pred p;",
        "mov.b32 zero, 0x80008000;",
        "mov.b32 unit, 0x7b807b80;",
        "mov.b32 pick, $24;",
    ]
    for i in range(2):
        lines += [
            f"prmt.b32 t, ${20 + piece}, 0, pick;",
            "and.b32 m, t, 0x007f007f;",
            "setp.eq.u32 p, m, 0x007f007f;",
            "shl.b32 m, m, 4;",
            "shl.b32 t, t, 8;",
            "lop3.b32 m, t, 0x80008000, m, 0xea;",
            f"fma.rn.bf16x2 scale{i}, m, unit, zero;",
            f"selp.b32 scale{i}, 0x7fc07fc0, scale{i}, p;",
            "add.u32 pick, pick, 0x0101;",
        ]
    for i in range(4):
        lines += [f"and.b32 w, ${16 + i}, 0x77777777;", f"shl.b32 x, ${16 + i}, 4;"]
        for half in range(2):
            signs = (0x9D8C, 0xBFAE)[half]
            lines += [
                "prmt.b32 high, 0x3f3f3f00, 0x40404040, w;",
                "prmt.b32 low, 0xc0800000, 0xc0804000, w;",
                f"prmt.b32 t, ${16 + i}, x, {signs:#x};",
                "lop3.b32 high, t, 0x80808080, high, 0xea;",
                "prmt.b32 a, low, high, 0x5140;",
                "prmt.b32 b, low, high, 0x7362;",
                f"fma.rn.bf16x2 ${8 * half + i}, a, scale{i // 2}, zero;",
                f"fma.rn.bf16x2 ${8 * half + 4 + i}, b, scale{i // 2}, zero;",
            ]
            lines += ["shr.u32 w, w, 16;"] if half == 0 else []
    return "{\n" + "\n".join(lines) + "\n}\n"

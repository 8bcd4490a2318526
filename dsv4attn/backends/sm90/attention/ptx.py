"""PTX that decodes codes to bf16, as `gl.inline_asm_elementwise` takes it."""

from __future__ import annotations

from dsv4attn.backends._triton.attention.ptx import CONVERSION_REGISTERS, conversions


def codes(*, spoils: bool = False, scale: int = 12) -> str:
    """PTX of four words of e4m3 codes.

    $0..$7: of each word its first two values, then of each its last two. $8..$11: words. $12..$15: four scale bytes
    each, of which $16 picks one of $12, or of another operand, `scale`. What is equal in all four operands is read from
    the first. spoils: whether all values are NaN if $20 is not 0.
    """
    lines = [
        CONVERSION_REGISTERS,
        ".reg .b32 scale;",
        ".reg .pred p;",
        # a power of two, twice; of byte 0 the subnormal 2^-127
        f"prmt.b32 scale, ${scale}, 0, $16;",
        "shl.b32 scale, scale, 7;",
        "max.u32 scale, scale, 0x00400040;",
    ]
    if spoils:
        lines += ["setp.ne.u32 p, $20, 0;", "selp.b32 scale, 0x7fc07fc0, scale, p;"]
    lines += [conversions(f"${8 + i}", f"${i}", f"${4 + i}", "scale") for i in range(4)]
    return "{\n" + "\n".join(lines) + "\n}\n"


def nibbles(piece: int) -> str:
    """PTX of four words of e2m1 codes, eight in each.

    $0..$3: of each word its first two values; $4..$7, $8..$11, $12..$15: the next ones. $16..$19: words.
    $20 + piece: four scales, of which $24 picks that of the first two words; the one after it is of the others.
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

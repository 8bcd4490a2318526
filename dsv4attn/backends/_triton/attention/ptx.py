"""PTX that decodes keys to bf16 in the shared kernel, as `keys` gives it to `tl.inline_asm_elementwise`."""

from __future__ import annotations

import triton.language as tl

CONVERSION_REGISTERS = """.reg .b32 zero, f<4>;
.reg .b16 low, high, h<4>;
mov.b32 zero, 0x80008000;"""
"""What stands before `conversions`."""


def conversions(word: str, first: str, second: str, scale: str) -> str:
    """PTX that makes `first` and `second`, two bf16 values each, of four e4m3 codes in `word`. NaN stays NaN.

    Codes become f16, fp32 and bf16, exactly; then they are multiplied by `scale`, a power of two, twice in a word.
    Hopper has an instruction for the first step alone, but there four codes take 14 clocks of a scheduler by these
    steps, and 20 by shifts and masks.
    """
    lines = [f"mov.b32 {{low, high}}, {word};"]
    for to, half in ((first, "low"), (second, "high")):
        lines += [
            f"cvt.rn.f16x2.e4m3x2 f0, {half};",
            "mov.b32 {h0, h1}, f0;",
            "cvt.f32.f16 f1, h0;",
            "cvt.f32.f16 f2, h1;",
            "cvt.rn.bf16x2.f32 f3, f2, f1;",
            f"fma.rn.bf16x2 {to}, f3, {scale}, zero;",
        ]
    return "\n".join(lines)


CONVERT = tl.constexpr("\n".join(["{", CONVERSION_REGISTERS, conversions("$2", "$0", "$1", "$3"), "}\n"]))
"""PTX that makes $0 and $1, two bf16 values each, of four e4m3 codes $2 and a scale $3, twice in a word."""

DECODE = tl.constexpr("""
{
.reg .b32 low, high, a, b, zero;
mov.b32 zero, 0x80008000;
shr.u32 high, $2, 4;
and.b32 high, high, 0x07070707;
lop3.b32 high, $2, 0x80808080, high, 0xea;
shl.b32 low, $2, 4;
and.b32 low, low, 0xf0f0f0f0;
prmt.b32 a, low, high, 0x5140;
prmt.b32 b, low, high, 0x7362;
fma.rn.bf16x2 a, a, $4, zero;
fma.rn.bf16x2 b, b, $4, zero;
fma.rn.bf16x2 $0, a, $3, zero;
fma.rn.bf16x2 $1, b, $3, zero;
}
""")
"""PTX that makes $0 and $1, two bf16 values each, of four e4m3 codes $2, a scale $3 and unit $4, each twice in a word.

The upper bytes of all four values are made at once, and so are the lower ones; then they are put next to each other.
"""

DECODE_E2M1 = tl.constexpr("""
{
.reg .b32 low, high, shifted, a, b, c, d, zero;
mov.b32 zero, 0x80008000;
shr.u32 high, $4, 2;
and.b32 high, high, 0x01010101;
shl.b32 shifted, $4, 4;
lop3.b32 high, shifted, 0x80808080, high, 0xea;
shl.b32 low, $4, 6;
and.b32 low, low, 0xc0c0c0c0;
prmt.b32 a, low, high, 0x5140;
prmt.b32 b, low, high, 0x7362;
shr.u32 high, $4, 6;
and.b32 high, high, 0x01010101;
lop3.b32 high, $4, 0x80808080, high, 0xea;
shl.b32 low, $4, 2;
and.b32 low, low, 0xc0c0c0c0;
prmt.b32 c, low, high, 0x5140;
prmt.b32 d, low, high, 0x7362;
prmt.b32 $0, a, c, 0x5410;
prmt.b32 $1, a, c, 0x7632;
prmt.b32 $2, b, d, 0x5410;
prmt.b32 $3, b, d, 0x7632;
fma.rn.bf16x2 $0, $0, $6, zero;
fma.rn.bf16x2 $1, $1, $6, zero;
fma.rn.bf16x2 $2, $2, $6, zero;
fma.rn.bf16x2 $3, $3, $6, zero;
fma.rn.bf16x2 $0, $0, $5, zero;
fma.rn.bf16x2 $1, $1, $5, zero;
fma.rn.bf16x2 $2, $2, $5, zero;
fma.rn.bf16x2 $3, $3, $5, zero;
}
""")
"""PTX that makes $0 to $3, two bf16 values each, of eight e2m1 codes $4, a scale $5 and unit $6, each twice in a word.

The upper and the lower bytes of the four even codes are made at once, then those of the odd codes.
"""

"""An emulator of the few PTX instructions that kernels use, on integers of numpy, to test assembly without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from dsv4attn.testing.kit.tolerances import F64
from dsv4attn.testing.oracle import attention as oracle

U32 = Any  # what numpy makes of shifted uint32 arrays depends on its version


def prmt(a: U32, b: U32, selector: U32) -> U32:
    """Four bytes picked from the eight of b and a, a's first; of a byte picked with 8 or more, eight times its sign."""
    pool = np.stack([(x >> np.uint32(8 * i)) & 255 for x in (a, b) for i in range(4)])
    result = np.zeros_like(a)
    for i in range(4):
        pick = (selector >> np.uint32(4 * i)) & 15
        (byte,) = np.take_along_axis(pool, (pick & 7)[None].astype(np.int64), axis=0)
        result |= np.where(pick & 8, (byte >> 7) * 255, byte).astype(np.uint32) << np.uint32(8 * i)
    return result


def lop3(a: U32, b: U32, c: U32, table: int) -> U32:
    """Any function of three bits: bit 4a + 2b + c of its table."""
    result = np.zeros_like(a)
    for i in range(8):
        if table >> i & 1:
            result |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
    return result


def of_bf16(bits: U32) -> F64:
    """Values of the lower halves."""
    values: F64 = ((bits & 0xFFFF) << 16).astype(np.uint32).view(np.float32).astype(np.float64)
    return values


def to_bf16(values: F64) -> U32:
    """Bits of values, rounded once; NaN as CUDA makes it."""
    bits = np.ascontiguousarray(oracle.round_bf16(values).astype(np.float32)).view(np.uint32) >> 16
    return np.where(np.isnan(values), np.uint32(0x7FFF), bits)


def f16_of_e4m3(codes: U32) -> U32:
    """Two codes in the lower half as two numbers of f16."""
    result = np.zeros_like(codes)
    for shift in (0, 8):
        values = oracle.decode_e4m3(((codes >> shift) & 255).astype(np.uint8), False).astype(np.float16)
        bits = np.where(np.isnan(values), np.uint16(0x7FFF), values.view(np.uint16))
        result |= bits.astype(np.uint32) << (2 * shift)
    return result


def f32_of_f16(bits: U32) -> U32:
    """A number of f16 in fp32."""
    return (bits & 0xFFFF).astype(np.uint16).view(np.float16).astype(np.float32).view(np.uint32)


def bf16_of_f32(high: U32, low: U32) -> U32:
    """Two numbers of fp32 in bf16, the first in the upper half."""
    high_word, low_word = (to_bf16(x.view(np.float32).astype(np.float64)) for x in (high, low))
    return low_word | (high_word << 16)


def fma(a: U32, b: U32, c: U32) -> U32:
    """Both halves of a * b + c: exact in float64, then rounded once."""
    with np.errstate(all="ignore"):
        low, high = (to_bf16(of_bf16(a >> s) * of_bf16(b >> s) + of_bf16(c >> s)) for s in (0, 16))
    return low | (high << 16)


OPERATIONS: dict[str, Callable[..., U32]] = {
    "mov.b32": lambda a: a,
    "prmt.b32": prmt,
    "shr.u32": lambda a, n: a >> n,
    "shl.b32": lambda a, n: a << n,
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "lop3.b32": lambda a, b, c, t: lop3(a, b, c, int(t.flat[0])),
    "add.u32": lambda a, b: a + b,
    "max.u32": np.maximum,
    "fma.rn.bf16x2": fma,
    "cvt.rn.f16x2.e4m3x2": f16_of_e4m3,
    "cvt.f32.f16": f32_of_f16,
    "cvt.rn.bf16x2.f32": bf16_of_f32,
    "setp.ne.u32": lambda a, b: a != b,
    "setp.eq.u32": lambda a, b: a == b,
    "selp.b32": lambda a, b, p: np.where(p, a, b),
}
"""By name, of arrays of uint32."""


def instructions(text: str) -> list[str]:
    """Those of a block of assembly, without declarations."""
    lines = [line.strip().rstrip(";") for line in text.strip(" \n{}").split("\n")]
    return [line for line in lines if line and not line.startswith((".reg", "{", "}"))]


def run(lines: Sequence[str], operands: Mapping[str, U32]) -> dict[str, U32]:
    """Registers after some instructions; operands: "$2" and so on, alike in shape."""
    registers = dict(operands)
    shape = next(iter(operands.values())).shape
    for line in lines:
        name, _, rest = line.partition(" ")
        if rest.startswith("{"):
            low, high, whole = (word.strip(" {}") for word in rest.split(","))
            registers |= {low: registers[whole] & 0xFFFF, high: registers[whole] >> 16}
            continue
        target, *words = (word.strip() for word in rest.split(","))
        values = [registers[w] if w in registers else np.full(shape, int(w, 0), np.uint32) for w in words]
        registers[target] = OPERATIONS[name](*values)
    return registers

"""Codes are decoded exactly: all finite ones under every scale byte, by plain integers and by the packed assembly.

No GPU is needed for the assembly: its text is read here, and run on numpy's integers.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from dsv4attn.backends._triton import keys
from dsv4attn.backends._triton.runtime import INTERPRETED, launch
from dsv4attn.testing import oracle
from dsv4attn.testing.judge import F64
from tests.backends._triton.caches import DEVICE
from tests.backends._triton.kernels_words import ROWS, words_kernel

U32 = Any  # what numpy makes of shifted uint32 arrays depends on its version
CODES, BYTES = np.tile(np.arange(256, dtype=np.uint8), (256, 1)), np.arange(256)
WORDS = CODES.view("<u4").astype(np.uint32)
"""[256, 64]: four codes each, the same in every row; a row for each scale byte."""
NVIDIA = not INTERPRETED and torch.version.cuda is not None
dialects = pytest.mark.parametrize("fnuz", [False, True], ids=["ocp", "fnuz"])


def defined(*, fnuz: bool) -> tuple[F64, NDArray[np.bool_]]:
    """Values [256, 256] of every code in the row of every byte, exact, and which of them mean anything."""
    values = oracle.decode_e4m3(CODES, fnuz)
    return values * np.ldexp(1.0, BYTES - 127)[:, None], np.isfinite(values) & (BYTES < oracle.E8M0_NAN)[:, None]


def decoded(codes: NDArray[np.uint8], scales: NDArray[Any], *, fnuz: bool, known: bool, assembly: bool) -> F64:
    """[n, 256] values of codes [n, 256] under scale bytes [n], by the kernel."""
    n = len(codes)
    out = torch.zeros(n, 128, dtype=torch.int32, device=DEVICE)
    words = torch.from_numpy(np.ascontiguousarray(codes).view(np.int32)).to(DEVICE)
    given = torch.from_numpy(scales.astype(np.int32)).to(DEVICE)
    constants = {"W": 64, "FNUZ": fnuz if known else None, "ASM": assembly}
    launch(words_kernel, (n // ROWS.value,), (words, given, out, int(fnuz)), constants)
    return out.cpu().view(torch.bfloat16).double().numpy()


constant = pytest.mark.parametrize("known", [True, False], ids=["constant", "runtime"])
either = pytest.mark.parametrize(
    "assembly", [False, pytest.param(True, marks=pytest.mark.skipif(not NVIDIA, reason="PTX needs an NVIDIA GPU"))]
)


@dialects
@constant
@either
def test_every_code_that_bf16_can_hold_is_exact(assembly: bool, known: bool, fnuz: bool) -> None:
    exact, meant = defined(fnuz=fnuz)
    held = meant & (oracle.round_bf16(exact) == exact)
    # others of its word are NaN with a NaN code
    codes = np.where(np.isnan(oracle.decode_e4m3(CODES, fnuz)), 0, CODES).astype(np.uint8)

    got = decoded(codes, BYTES, fnuz=fnuz, known=known, assembly=assembly)

    assert held.sum() > 240 * 250
    assert np.array_equal(got[held], exact[held])
    assert np.array_equal(np.signbit(got[held]), np.signbit(exact[held]))
    assert np.isnan(got[oracle.E8M0_NAN]).all()


@dialects
@constant
@either
def test_words_with_a_nan_code_are_nan_and_no_others(assembly: bool, known: bool, fnuz: bool) -> None:
    """Every code beside each that is NaN or next to it, at each place of a word, beside codes that carry or borrow."""
    edges = [0x00, 0x01, 0x7E, 0x7F, 0x80, 0x81, 0xFE, 0xFF]
    pairs = np.array([pair for a in range(256) for b in edges for pair in ((a, b), (b, a))])
    words = np.concatenate([np.full((len(pairs), 4), fill, np.uint8) for fill in (0x00, 0x7E, 0xFE, 0x81)])
    for i, at in enumerate((0, 1, 2, 1)):
        words[len(pairs) * i : len(pairs) * (i + 1), at : at + 2] = pairs
    codes = words.reshape(-1, 256)
    values = oracle.decode_e4m3(codes, fnuz)
    wanted = np.isnan(values).reshape(-1, 4).any(-1)

    got = decoded(codes, np.full(len(codes), 127), fnuz=fnuz, known=known, assembly=assembly)

    assert wanted.any()
    assert np.array_equal(np.isnan(got).reshape(-1, 4).all(-1), wanted)
    finite = ~np.repeat(wanted, 4).reshape(codes.shape)
    assert np.array_equal(got[finite], values[finite])


# the assembly, without a GPU


def prmt(a: U32, b: U32, selector: int) -> U32:
    """Four bytes picked from the eight of b and a, a's first."""
    pool = [(a >> (8 * i)) & 255 for i in range(4)] + [(b >> (8 * i)) & 255 for i in range(4)]
    picked = [pool[(selector >> (4 * i)) & 7] << (8 * i) for i in range(4)]
    return picked[0] | picked[1] | picked[2] | picked[3]


def lop3(a: U32, b: U32, c: U32, table: int) -> U32:
    """Any function of three bits: bit 4a + 2b + c of its table."""
    found = np.zeros_like(a)
    for i in range(8):
        if table >> i & 1:
            found |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
    return found


def of_bf16(bits: U32) -> F64:
    """Values of the lower halves."""
    values: F64 = ((bits & 0xFFFF) << 16).astype(np.uint32).view(np.float32).astype(np.float64)
    return values


def to_bf16(values: F64) -> U32:
    """Bits of values, rounded once; NaN as CUDA makes it."""
    bits = np.ascontiguousarray(oracle.round_bf16(values).astype(np.float32)).view(np.uint32) >> 16
    return np.where(np.isnan(values), np.uint32(0x7FFF), bits)


def fma(a: U32, b: U32, c: U32) -> U32:
    """Both halves of a * b + c: exact in float64, then rounded once."""
    with np.errstate(all="ignore"):
        low, high = (to_bf16(of_bf16(a >> s) * of_bf16(b >> s) + of_bf16(c >> s)) for s in (0, 16))
    return low | (high << 16)


OPERATIONS: dict[str, Callable[..., U32]] = {
    "mov.b32": lambda a: a,
    "prmt.b32": lambda a, b, s: prmt(a, b, int(s.flat[0])),
    "shr.u32": lambda a, n: a >> n,
    "and.b32": lambda a, b: a & b,
    "lop3.b32": lambda a, b, c, t: lop3(a, b, c, int(t.flat[0])),
    "fma.rn.bf16x2": fma,
}


def assembly_of(source: str) -> list[str]:
    """Instructions of the assembly in a source."""
    (text,) = re.findall(r'DECODE = tl\.constexpr\("""(.*?)"""', source, re.DOTALL)
    lines = [line.strip().rstrip(";") for line in text.strip(" \n{}").split("\n")]
    return [line for line in lines if line and not line.startswith((".reg", "{", "}"))]


def run(lines: list[str], *operands: U32) -> tuple[U32, U32]:
    """Two outputs of some instructions; operands are $2, $3 and so on."""
    registers: dict[str, Any] = {f"${i + 2}": value for i, value in enumerate(operands)}
    shape = operands[0].shape
    for line in lines:
        name, _, rest = line.partition(" ")
        target, *given = (word.strip() for word in rest.split(","))
        values = [registers[w] if w in registers else np.full(shape, int(w, 0), np.uint32) for w in given]
        registers[target] = OPERATIONS[name](*values)
    return registers["$0"], registers["$1"]


def emulated(source: str, *, fnuz: bool) -> F64:
    """[256, 256] values, by the assembly."""
    byte = BYTES.astype(np.uint32)
    half = np.where(byte == 0, 0x40, np.where(byte == 255, 0x7FC0, byte << 7)).astype(np.uint32)
    scale = np.broadcast_to((half | half << 16)[:, None], WORDS.shape)
    unit = np.full(WORDS.shape, 0x7B007B00 if fnuz else 0x7B807B80, np.uint32)
    first, second = run(assembly_of(source), WORDS, scale, unit)
    values = np.stack([of_bf16(first), of_bf16(first >> 16), of_bf16(second), of_bf16(second >> 16)], axis=-1)
    return values.reshape(256, 256)


@dialects
def test_the_packed_assembly_equals_the_definition(fnuz: bool) -> None:
    """For every finite code, also where bf16 overflows or has to round a subnormal."""
    exact, meant = defined(fnuz=fnuz)
    want = oracle.round_bf16(exact)

    got = emulated(inspect.getsource(keys), fnuz=fnuz)

    assert np.array_equal(got[meant], want[meant])
    zeros = meant & (CODES & 0x7F == 0)
    assert np.array_equal(np.signbit(got[zeros]), np.broadcast_to(CODES >= 0x80, got.shape)[zeros])
    assert np.isnan(got[oracle.E8M0_NAN]).all()


def test_the_scale_in_the_assembly_is_what_the_kernel_makes_of_a_byte() -> None:
    """The constants that `emulated` gives to the assembly stand in the source as they stand here."""
    source = inspect.getsource(keys)

    for text in ("tl.where(byte == 0, 0x40, tl.where(byte == 255, 0x7FC0, byte << 7))", "0x7B007B00, 0x7B807B80"):
        assert text in source


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("0x1404", "0x0414"),
        ("0x3424", "0x2434"),
        ("shr.u32 c, a, 4", "shr.u32 c, a, 3"),
        ("0x07f007f0", "0x03f003f0"),
        ("0xea", "0xc0"),
        ("fma.rn.bf16x2 $0, a, $3, zero", "fma.rn.bf16x2 $0, a, $4, zero"),
        ("0x80008000;\nprmt", "0;\nprmt"),
    ],
)
def test_a_wrong_instruction_is_seen(old: str, new: str) -> None:
    source = inspect.getsource(keys)
    assert old in source, f"{old!r} is gone: plant the bug anew"
    exact, meant = defined(fnuz=False)

    got = emulated(source.replace(old, new), fnuz=False)

    right = (got == oracle.round_bf16(exact)) & (np.signbit(got) == np.signbit(exact))
    assert not right[meant].all()

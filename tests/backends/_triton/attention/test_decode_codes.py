"""Codes are decoded exactly by integers, shifts and conversions: all finite codes under every scale byte.

No GPU is needed for the assembly: its text is read here, and run on numpy's integers.
"""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from dsv4attn.backends._triton.attention import keys, ptx
from dsv4attn.backends._triton.attention.keys import CONVERTED, SHIFTED
from dsv4attn.backends._triton.interpreted import INTERPRETED
from dsv4attn.backends._triton.launching.runtime import launch
from dsv4attn.testing.kit.tolerances import F64
from dsv4attn.testing.oracle import attention as oracle
from tests.backends._triton.attention.kernels_decode_codes import ROWS, words_kernel
from tests.backends._triton.cache.caches import DEVICE
from tests.backends._triton.compiling.ptx import instructions, of_bf16, run

# every code, neighbours unlike each other
CODES, BYTES = np.tile((37 * np.arange(256)).astype(np.uint8), (256, 1)), np.arange(256)
WORDS = CODES.view("<u4").astype(np.uint32)
"""[256, 64]: four codes each, the same in every row; a row for each scale byte."""
NVIDIA = not INTERPRETED and torch.version.cuda is not None
dialects = pytest.mark.parametrize("fnuz", [False, True], ids=["ocp", "fnuz"])


def defined(*, fnuz: bool) -> tuple[F64, NDArray[np.bool_]]:
    """Values [256, 256] of every code in the row of every byte, exact, and which of them mean anything."""
    values = oracle.decode_e4m3(CODES, fnuz)
    return values * np.ldexp(1.0, BYTES - 127)[:, None], np.isfinite(values) & (BYTES < oracle.E8M0_NAN)[:, None]


def decoded(codes: NDArray[np.uint8], scales: NDArray[Any], *, fnuz: bool, known: bool, assembly: int) -> F64:
    """[n, 256] values of codes [n, 256] under scale bytes [n], by the kernel."""
    n = len(codes)
    out = torch.zeros(n, 128, dtype=torch.int32, device=DEVICE)
    words = torch.from_numpy(np.ascontiguousarray(codes).view(np.int32)).to(DEVICE)
    scale_tensor = torch.from_numpy(scales.astype(np.int32)).to(DEVICE)
    constants = {"W": 64, "FNUZ": fnuz if known else None, "ASM": assembly}
    launch(words_kernel, (n // ROWS.value,), (words, scale_tensor, out, int(fnuz)), constants)
    return out.cpu().view(torch.bfloat16).double().numpy()


constant = pytest.mark.parametrize("known", [True, False], ids=["constant", "runtime"])
on_nvidia = pytest.mark.skipif(not NVIDIA, reason="PTX needs an NVIDIA GPU")
each = pytest.mark.parametrize(
    ("assembly", "fnuz"),
    [
        pytest.param(0, False, id="plain-ocp"),
        pytest.param(0, True, id="plain-fnuz"),
        pytest.param(SHIFTED.value, False, marks=on_nvidia, id="shifted-ocp"),
        pytest.param(SHIFTED.value, True, marks=on_nvidia, id="shifted-fnuz"),
        pytest.param(CONVERTED.value, False, marks=on_nvidia, id="converted-ocp"),
    ],
)


@constant
@each
def test_every_code_that_bf16_can_hold_is_exact(assembly: int, known: bool, fnuz: bool) -> None:
    exact, meant = defined(fnuz=fnuz)
    held = meant & (oracle.round_bf16(exact) == exact)
    # others of its word are NaN with a NaN code
    codes = np.where(np.isnan(oracle.decode_e4m3(CODES, fnuz)), 0, CODES).astype(np.uint8)

    got = decoded(codes, BYTES, fnuz=fnuz, known=known, assembly=assembly)

    assert held.sum() > 240 * 250
    assert np.array_equal(got[held], exact[held])
    assert np.array_equal(np.signbit(got[held]), np.signbit(exact[held]))
    assert np.isnan(got[oracle.E8M0_NAN]).all()


@constant
@each
def test_nan_codes_or_their_words_are_nan_and_no_others(assembly: int, known: bool, fnuz: bool) -> None:
    """Pairs of any code and a code at the edge of NaN, at each place of a word, next to codes that carry or borrow."""
    edges = [0x00, 0x01, 0x7E, 0x7F, 0x80, 0x81, 0xFE, 0xFF]
    pairs = np.array([pair for a in range(256) for b in edges for pair in ((a, b), (b, a))])
    words = np.concatenate([np.full((len(pairs), 4), fill, np.uint8) for fill in (0x00, 0x7E, 0xFE, 0x81)])
    for i, at in enumerate((0, 1, 2, 1)):
        words[len(pairs) * i : len(pairs) * (i + 1), at : at + 2] = pairs
    codes = words.reshape(-1, 256)
    values = oracle.decode_e4m3(codes, fnuz)
    expected = np.isnan(values).reshape(-1, 4).any(-1)

    got = decoded(codes, np.full(len(codes), 127), fnuz=fnuz, known=known, assembly=assembly)

    assert expected.any()
    if assembly == CONVERTED.value:
        assert np.array_equal(np.isnan(got), np.isnan(values))
    else:
        assert np.array_equal(np.isnan(got).reshape(-1, 4).all(-1), expected)
    finite = ~np.repeat(expected, 4).reshape(codes.shape)
    assert np.array_equal(got[finite], values[finite])


# the assembly, without a GPU


def emulated(text: str, *, fnuz: bool = False) -> F64:
    """[256, 256] values, by the assembly."""
    byte = BYTES.astype(np.uint32)
    half = np.where(byte == 0, 0x40, np.where(byte == 255, 0x7FC0, byte << 7)).astype(np.uint32)
    scale = np.broadcast_to((half | half << 16)[:, None], WORDS.shape)
    unit = np.full(WORDS.shape, 0x7B007B00 if fnuz else 0x7B807B80, np.uint32)
    registers = run(instructions(text), {"$2": WORDS, "$3": scale, "$4": unit})
    first, second = registers["$0"], registers["$1"]
    values = np.stack([of_bf16(first), of_bf16(first >> 16), of_bf16(second), of_bf16(second >> 16)], axis=-1)
    return values.reshape(256, 256)


def is_right(got: F64, *, fnuz: bool = False) -> bool:
    """Whether every finite code has the value and the sign of the definition, also where bf16 rounds or overflows."""
    exact, meant = defined(fnuz=fnuz)
    expected = oracle.round_bf16(exact)
    return bool(((got == expected) & (np.signbit(got) == np.signbit(expected)))[meant].all())


@dialects
def test_the_packed_assembly_equals_the_definition(fnuz: bool) -> None:
    got = emulated(ptx.DECODE.value, fnuz=fnuz)

    assert is_right(got, fnuz=fnuz)
    assert np.isnan(got[oracle.E8M0_NAN]).all()


def test_the_conversions_equal_the_definition() -> None:
    got = emulated(ptx.CONVERT.value)

    assert is_right(got)
    assert np.array_equal(np.isnan(got[0]), np.isnan(oracle.decode_e4m3(CODES[0], False)))
    assert np.isnan(got[oracle.E8M0_NAN]).all()


def test_the_scale_in_the_assembly_is_what_the_kernel_makes_of_a_byte() -> None:
    """The constants that `emulated` gives to the assembly stand in the source as they stand here."""
    source = inspect.getsource(keys)

    for text in ("tl.where(byte == 0, 0x40, tl.where(byte == 255, 0x7FC0, byte << 7))", "0x7B007B00, 0x7B807B80"):
        assert text in source


SHIFTS = [
    ("0x5140", "0x4150"),
    ("0x7362", "0x6372"),
    ("shr.u32 high, $2, 4", "shr.u32 high, $2, 3"),
    ("shl.b32 low, $2, 4", "shl.b32 low, $2, 5"),
    ("0x07070707", "0x03030303"),
    ("0xf0f0f0f0", "0xe0e0e0e0"),
    ("0xea", "0xc0"),
    ("fma.rn.bf16x2 $0, a, $3, zero", "fma.rn.bf16x2 $0, a, $4, zero"),
    ("0x80008000;\nshr", "0;\nshr"),
]
CONVERSIONS = [
    ("{low, high}", "{high, low}"),
    ("f0, low", "f0, high"),
    ("cvt.f32.f16 f2, h1", "cvt.f32.f16 f2, h0"),
    ("f3, f2, f1", "f3, f1, f2"),
    ("$1, f3, $3", "$1, f0, $3"),
    ("0x80008000", "0"),
]


@pytest.mark.parametrize(
    ("text", "old", "new"),
    [(ptx.DECODE.value, *row) for row in SHIFTS] + [(ptx.CONVERT.value, *row) for row in CONVERSIONS],
    ids=[old for old, _ in SHIFTS + CONVERSIONS],
)
def test_a_wrong_instruction_is_seen(text: str, old: str, new: str) -> None:
    assert old in text, f"{old!r} is gone: write the mutant anew"
    assert not is_right(emulated(text.replace(old, new)))

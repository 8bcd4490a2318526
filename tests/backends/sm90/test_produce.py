"""The assembly that decodes keys on Hopper: exact for every code and scale, and NaN where one of a key's is.

No GPU is needed: the text is run on numpy's integers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from dsv4attn.backends.sm90 import kernels_produce
from dsv4attn.testing import oracle
from tests.backends._triton.compiling.ptx import instructions, of_bf16, run

DECODE, LAST = str(kernels_produce.DECODE.value), str(kernels_produce.LAST.value)
RANDOM = np.random.default_rng(0)
WORDS = np.stack([RANDOM.permutation(256).astype(np.uint8).view("<u4") for _ in range(256)]).astype(np.uint32)
"""[256, 64]: every code once in each row; a row for each scale byte, 16 threads with four words each."""
FINITE = np.where(np.isin(WORDS.view(np.uint8), (0x7F, 0xFF)), 0x7E, WORDS.view(np.uint8)).view(np.uint32)
BYTES = np.arange(256)
NAN = 0x07F007F0


def decoded(text: str, words: Any, *, byte: int = 0, seen: int = 0) -> tuple[NDArray[np.float64], Any]:
    """[256, 256] values, and [256, 16] what has been seen. byte: which one of four the scale is; others are 255."""
    quads = words.reshape(256, 16, 4)
    scales = np.broadcast_to(((BYTES << (8 * byte)) | (0xFFFFFFFF & ~(0xFF << (8 * byte))))[:, None], (256, 16))
    operands = {f"${12 + i}": quads[..., i] for i in range(4)}
    operands |= {"$16": scales.astype(np.uint32), "$20": np.full((256, 16), seen, np.uint32)}
    operands |= {"$24": np.full((256, 16), 0x4040 + 0x0101 * byte, np.uint32)}
    after = run(instructions(text), operands)
    assert all(np.array_equal(after["$8"], after[f"${8 + i}"]) for i in range(4))
    pairs = [after[f"${half + i}"] >> shift for i in range(4) for half in (0, 4) for shift in (0, 16)]
    return np.stack([of_bf16(pair) for pair in pairs], axis=-1).reshape(256, 256), after["$8"]


def wanted(words: Any) -> NDArray[np.float64]:
    """By the definition, rounded to bf16."""
    values = oracle.decode_e4m3(words.view(np.uint8), False) * np.ldexp(1.0, BYTES - 127)[:, None]
    return oracle.round_bf16(values)


def is_right(text: str, byte: int = 0) -> bool:
    """Whether finite codes under finite scales are decoded to the same bits."""
    got, want = decoded(text, FINITE, byte=byte)[0][:255], wanted(FINITE)[:255]
    return bool((got == want).all() and (np.signbit(got) == np.signbit(want)).all())


@pytest.mark.parametrize("byte", range(4))
@pytest.mark.parametrize("text", [DECODE, LAST], ids=["decode", "last"])
def test_every_finite_code_is_exact_under_every_scale(text: str, byte: int) -> None:
    assert is_right(text, byte)
    assert not (decoded(text, FINITE, byte=byte)[1] >= NAN).any()


def test_a_nan_code_is_seen_by_its_thread_alone() -> None:
    has_nan: Any = np.isin(WORDS.view(np.uint8).reshape(256, 16, 16), (0x7F, 0xFF)).any(axis=-1)

    seen = decoded(DECODE, WORDS)[1]

    halves = np.stack([seen & 0xFFFF, seen >> 16])
    assert np.array_equal((halves == 0x07F0).any(0), has_nan)
    assert (halves <= 0x07F0).all()
    assert 0 < has_nan.mean() < 1


@pytest.mark.parametrize("seen", [NAN, 0x000007F0, 0x07F00000])
def test_what_was_seen_before_makes_the_last_word_nan_and_no_other(seen: int) -> None:
    got, after = decoded(LAST, FINITE, seen=seen)

    threads = got.reshape(256, 16, 4, 4)[:255]
    assert np.isnan(threads[:, :, 3]).all()
    assert not np.isnan(threads[:, :, :3]).any()
    assert (np.maximum(after & 0xFFFF, after >> 16) == 0x07F0).all()


def test_one_nan_among_the_last_words_is_enough() -> None:
    has_nan: Any = np.isin(WORDS.view(np.uint8).reshape(256, 16, 16), (0x7F, 0xFF)).any(axis=-1)

    got = decoded(LAST, WORDS)[0].reshape(256, 16, 4, 4)[:255]

    assert np.array_equal(np.isnan(got[:, :, 3]).all(axis=-1), has_nan[:255])


@pytest.mark.parametrize("place", range(8))
def test_a_scale_of_255_is_found_and_no_other(place: int) -> None:
    scales = RANDOM.integers(0, 255, (4096, 8))
    words = (scales << (8 * np.arange(8) % 32)).reshape(-1, 2, 4).sum(-1).astype(np.uint32).astype(np.int64)
    spoilt: Any = kernels_produce.spoilt.fn

    def found(words: NDArray[np.int64]) -> NDArray[np.bool_]:
        low, high = words[:, 0], words[:, 1] & 0xFFFFFF
        none = (spoilt(low) | spoilt(high)) & 0x80808080
        return np.asarray(none != 0)

    assert not found(words).any()
    words[:, place // 4] |= 0xFF << (8 * (place % 4))
    # the eighth byte of a record's scales means nothing
    assert found(words).all() == (place < 7)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("0x5140", "0x4150"),
        ("0x7362", "0x6372"),
        ("shr.u32 high2, $14, 4", "shr.u32 high2, $14, 3"),
        ("shl.b32 low3, $15, 4", "shl.b32 low3, $15, 5"),
        ("0x07070707", "0x03030303"),
        ("0xf0f0f0f0", "0xe0e0e0e0"),
        ("0xea", "0xc0"),
        ("$1, a1, scale", "$1, b1, scale"),
        ("0x00400040", "0x00000000"),
        ("scale, scale, 7", "scale, scale, 8"),
    ],
)
def test_a_wrong_instruction_is_seen(old: str, new: str) -> None:
    assert old in DECODE, f"{old!r} is gone: plant the bug anew"
    assert not is_right(DECODE.replace(old, new))

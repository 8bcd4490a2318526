"""The assembly that decodes V4.1's records on Hopper: exact for every code and scale, and NaN where one of a key's is.

No GPU is needed: the text is run on numpy's integers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from dsv4attn.backends.sm90.attention import kernels_load_v4, kernels_load_v41
from dsv4attn.testing.oracle import attention as oracle
from tests.backends._triton.compiling.ptx import instructions, of_bf16, run

CODES = [str(getattr(kernels_load_v41, f"CODES_{i}").value) for i in range(4)]
SPOIL, SEEN = str(kernels_load_v41.SPOIL_3.value), str(kernels_load_v41.SEEN.value)
NIBBLES = [str(getattr(kernels_load_v41, f"NIBBLES_{i}").value) for i in range(4)]
RANDOM = np.random.default_rng(0)
BYTES = np.arange(256)


def quads(words: NDArray[np.uint32], first: int) -> dict[str, Any]:
    """Four operands from $first on, of words [..., 4]."""
    return {f"${first + i}": words[..., i] for i in range(4)}


def of_words(after: dict[str, Any], order: list[int]) -> NDArray[np.float64]:
    """Values of two halves of each of these results, in this order."""
    return np.stack([of_bf16(after[f"${i}"] >> shift) for i in order for shift in (0, 16)], axis=-1)


def scale_words(byte: NDArray[np.int64], word: int, place: int, rest: int) -> NDArray[np.uint32]:
    """[n, 4] words whose byte `place` of `word` is given; all other bytes are `rest`."""
    words = np.full((len(byte), 16), rest, np.uint8)
    words[:, 4 * word + place] = byte
    return words.view("<u4").astype(np.uint32)


@pytest.mark.parametrize("piece", range(8))
@pytest.mark.parametrize("half", [0, 1])
def test_codes_are_exact_under_the_scale_of_their_piece_and_half(piece: int, half: int) -> None:
    codes = np.stack([RANDOM.permutation(256).astype(np.uint8)[:16] for _ in range(256)])
    place = 2 * (piece % 2) + half
    scales = scale_words(BYTES, piece // 2, place, 77)
    operands = quads(codes.view("<u4").astype(np.uint32), 8) | quads(scales, 12)
    operands |= {"$16": np.full(256, 0x4040 + 0x0101 * place, np.uint32)}

    after = run(instructions(CODES[piece // 2]), operands)

    actual = of_words(after, [0, 4, 1, 5, 2, 6, 3, 7])[:255]
    expected = oracle.round_bf16(oracle.decode_e4m3(codes, False) * np.ldexp(1.0, BYTES - 127)[:, None])[:255]
    assert np.array_equal(actual, expected, equal_nan=True)
    assert np.isnan(expected).any()


def test_a_scale_of_255_makes_a_piece_nan() -> None:
    scales = RANDOM.integers(0, 255, (64, 16)).astype(np.uint8)
    scales[np.arange(16), np.arange(16)] = 255
    none: Any = kernels_load_v4.spoilt.fn(scales.view("<u4").astype(np.int64)) & 0xFFFFFFFF
    seen = run(instructions(SEEN), quads(none.astype(np.uint32), 4))

    assert ((seen["$0"] != 0) == (np.arange(64) < 16)).all()
    assert all(np.array_equal(seen["$0"], seen[f"${i}"]) for i in range(4))
    operands = quads(np.full((64, 4), 0x38383838, np.uint32), 8) | quads(np.full((64, 4), 0x7F7F7F7F, np.uint32), 12)
    operands |= {f"${20 + i}": seen[f"${i}"] for i in range(4)} | {"$16": np.full(64, 0x4040, np.uint32)}
    got = of_words(run(instructions(SPOIL), operands), [0, 4, 1, 5, 2, 6, 3, 7])
    assert np.isnan(got[:16]).all()
    assert not np.isnan(got[16:]).any()


def nibbles(text: str, piece: int, place: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """[n, 32] values of random codes under all scales, two at a time: as the text has them, and as they are defined."""
    codes = RANDOM.integers(0, 16, (256, 32)).astype(np.uint8)
    codes[:16] = np.arange(16)[:, None]
    packed = (codes[:, ::2] | (codes[:, 1::2] << 4)).astype(np.uint8)
    second = RANDOM.permutation(256)
    scales = scale_words(BYTES, piece, place, 0x7F)
    scales[:, piece] = (scales[:, piece] & ~np.uint32(0xFF << (8 * place + 8))) | (second << (8 * place + 8)).astype(
        np.uint32
    )
    operands = quads(packed.view("<u4").astype(np.uint32), 16) | quads(scales, 20)
    operands |= {"$24": np.full(256, 0x4040 + 0x0101 * place, np.uint32)}
    after = run(instructions(text), operands)
    got = of_words(after, [i + 4 * j for i in range(4) for j in range(4)])
    magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    signed = np.where(codes & 8, -1.0, 1.0) * magnitudes[codes & 7]
    factors = oracle.decode_e4m3(np.stack([BYTES, second], axis=1).astype(np.uint8), False)
    return got, signed * np.repeat(factors, 16, axis=1)


def is_right(text: str, piece: int = 0, place: int = 0) -> bool:
    actual, expected = nibbles(text, piece, place)
    same = (actual == expected) & (np.signbit(actual) == np.signbit(expected))
    return bool((same | (np.isnan(actual) & np.isnan(expected))).all())


@pytest.mark.parametrize("piece", range(4))
@pytest.mark.parametrize("place", [0, 2])
def test_nibbles_are_exact_under_every_scale_and_nan_under_nan(piece: int, place: int) -> None:
    assert is_right(NIBBLES[piece], piece, place)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("0x9d8c", "0x9c8d"),
        ("0xbfae", "0xbfea"),
        ("0x3f3f3f00", "0x3f3f3f3f"),
        ("0xc0804000", "0xc0800040"),
        ("shl.b32 m, m, 4", "shl.b32 m, m, 5"),
        ("0x80008000, m", "0x00000000, m"),
        ("add.u32 pick, pick, 0x0101", "add.u32 pick, pick, 0x0000"),
        ("selp.b32 scale1, 0x7fc07fc0", "selp.b32 scale1, 0x00000000"),
        ("a, scale0, zero", "a, scale1, zero"),
    ],
)
def test_a_wrong_instruction_is_seen(old: str, new: str) -> None:
    assert old in NIBBLES[0], f"{old!r} is gone: plant the bug anew"
    assert not is_right(NIBBLES[0].replace(old, new))

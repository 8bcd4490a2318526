"""The assembly that decodes keys on Hopper: exact for every code and scale, and NaN where one of a key's is.

No GPU is needed: the text is run on numpy's integers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from dsv4attn.backends.sm90.attention import kernels_load_v4
from dsv4attn.testing.oracle import attention as oracle
from tests.backends._triton.compiling.ptx import instructions, of_bf16, run

DECODE, SPOIL = str(kernels_load_v4.DECODE.value), str(kernels_load_v4.SPOIL.value)
RANDOM = np.random.default_rng(0)
WORDS = np.stack([RANDOM.permutation(256).astype(np.uint8).view("<u4") for _ in range(256)]).astype(np.uint32)
"""[256, 64]: every code once in each row; a row for each scale byte, 16 threads with four words each."""
BYTES = np.arange(256)


def decoded(text: str, *, byte: int = 0, none: int = 0) -> NDArray[np.float64]:
    """[256, 256] values. byte: which of four the scale is; others are 255. none: of `kernels_load_v4.decoded`."""
    quads = WORDS.reshape(256, 16, 4)
    scales = np.broadcast_to(((BYTES << (8 * byte)) | (0xFFFFFFFF & ~(0xFF << (8 * byte))))[:, None], (256, 16))
    operands = {f"${8 + i}": quads[..., i] for i in range(4)}
    operands |= {"$12": scales.astype(np.uint32), "$20": np.full((256, 16), none, np.uint32)}
    operands |= {"$16": np.full((256, 16), 0x4040 + 0x0101 * byte, np.uint32)}
    after = run(instructions(text), operands)
    pairs = [after[f"${half + i}"] >> shift for i in range(4) for half in (0, 4) for shift in (0, 16)]
    return np.stack([of_bf16(pair) for pair in pairs], axis=-1).reshape(256, 256)


def expected() -> NDArray[np.float64]:
    """By the definition, rounded to bf16."""
    values = oracle.decode_e4m3(WORDS.view(np.uint8), False) * np.ldexp(1.0, BYTES - 127)[:, None]
    return oracle.round_bf16(values)


def is_right(text: str, byte: int = 0) -> bool:
    """Whether codes under finite scales are decoded to the same bits, and NaN to NaN."""
    got, want = decoded(text, byte=byte)[:255], expected()[:255]
    same = (got == want) & (np.signbit(got) == np.signbit(want))
    return bool((same | (np.isnan(got) & np.isnan(want))).all())


@pytest.mark.parametrize("byte", range(4))
@pytest.mark.parametrize("text", [DECODE, SPOIL], ids=["decode", "spoil"])
def test_every_code_is_exact_under_every_scale(text: str, byte: int) -> None:
    assert is_right(text, byte)
    assert np.isnan(expected()[:255]).sum() == 2 * 255


def test_a_key_without_a_scale_has_nan_everywhere_in_one_piece() -> None:
    assert np.isnan(decoded(SPOIL, none=0x00800000)).all()
    assert not np.isnan(decoded(DECODE, none=0x00800000)[:255]).all(axis=1).any()


@pytest.mark.parametrize("place", range(8))
def test_a_scale_of_255_is_found_and_no_other(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    scales = RANDOM.integers(0, 255, (4096, 8))
    words = (scales << (8 * np.arange(8) % 32)).reshape(-1, 2, 4).sum(-1).astype(np.uint32).astype(np.int64)
    spoilt: Any = kernels_load_v4.spoilt.fn
    monkeypatch.setattr(kernels_load_v4, "spoilt", spoilt)

    def has_255(words: NDArray[np.int64]) -> NDArray[np.bool_]:
        without: Any = kernels_load_v4.without_scale.fn(words[:, 0], words[:, 1])
        return np.asarray((without & 0xFFFFFFFF) != 0)

    assert not has_255(words).any()
    words[:, place // 4] |= 0xFF << (8 * (place % 4))
    # the eighth byte of a record's scales means nothing
    assert has_255(words).all() == (place < 7)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("{low, high}, $9", "{high, low}, $9"),
        ("f0, low", "f0, high"),
        ("cvt.f32.f16 f2, h1", "cvt.f32.f16 f2, h0"),
        ("f3, f2, f1", "f3, f1, f2"),
        ("$1, f3, scale", "$1, f0, scale"),
        ("0x00400040", "0x00000000"),
        ("scale, scale, 7", "scale, scale, 8"),
        ("0x80008000", "0x00000000"),
    ],
)
def test_a_wrong_instruction_is_seen(old: str, new: str) -> None:
    assert old in DECODE, f"{old!r} is gone: plant the bug anew"
    assert not is_right(DECODE.replace(old, new))

"""Instructions of the Gluon kernels: sums shrink, and are left alone where no row of a warp does."""

from __future__ import annotations

import re

import numpy as np
import pytest
from numpy.typing import NDArray

from dsv4attn.backends.sm90.attention.kernels_common import PACK, SHRINK, SHRINK_REGISTERS

F32 = NDArray[np.float32]
LANES = 32


def emulated(text: str, sums: F32, factors: F32) -> tuple[F32, bool]:
    """[n, LANES] sums of a warp after the instructions, and whether it has multiplied."""
    n = len(sums)
    registers = {f"${i}": row for i, row in enumerate(sums)} | {f"${2 * n + i}": row for i, row in enumerate(factors)}
    flags: dict[str, NDArray[np.bool_]] = {}
    lines, at, multiplied = [line.rstrip(";") for line in text.splitlines()], 0, False
    while at < len(lines):
        words = re.split(r"[ ,]+", lines[at])
        at += 1
        match words:
            case ["{" | "}" | "DONE:"] | [".reg", *_]:
                pass
            case ["setp.neu.f32", to, a, "0f3F800000"]:
                flags[to] = registers[a] != 1
            case ["or.pred", to, a, b]:
                flags[to] = flags[a] | flags[b]
            case ["vote.sync.any.pred", to, a, "0xffffffff"]:
                flags[to] = np.full(LANES, flags[a].any())
            case ["@!p", "bra.uni", "DONE"]:
                assert len({*flags["p"]}) == 1, "the warp parts"
                at = at if flags["p"][0] else lines.index("DONE:")
            case ["mul.f32", to, a, b]:
                registers[to], multiplied = registers[a] * registers[b], True
            case _:
                pytest.fail(f"what is {lines[at - 1]!r}?")
    return np.stack([registers[f"${i}"] for i in range(n)]), multiplied


def warp(shrinking: tuple[int, ...]) -> tuple[F32, F32]:
    """Sums, and factors, below 1 in these of a warp's 64 rows: rows i and i + 32 are of lane i, in turns of two."""
    rng = np.random.default_rng(1)
    sums = rng.standard_normal((PACK.value, LANES)).astype(np.float32)
    of_row = np.ones(2 * LANES, np.float32)
    of_row[[*shrinking]] = rng.random(len(shrinking)).astype(np.float32)
    both = of_row.reshape(2, LANES)
    return sums, np.stack([both[i // 2 % 2] for i in range(PACK.value)])


def wrong(text: str) -> int:
    """Warps that are not what the multiplication says, or multiply for nothing."""
    mistakes = 0
    for shrinking in [(), (0,), (63,), (5, 40), tuple(range(64))]:
        sums, factors = warp(shrinking)
        got, multiplied = emulated(text, sums, factors)
        mistakes += not np.array_equal(got, sums * factors) or multiplied != bool(shrinking)
    return mistakes


def test_sums_shrink_by_their_row_s_factor_or_nothing_is_done() -> None:
    assert wrong(SHRINK.value) == 0


def test_a_factor_that_is_no_number_reaches_the_sums() -> None:
    sums, factors = warp(())
    factors[:, 7] = np.nan
    got, _ = emulated(SHRINK.value, sums, factors)

    assert np.isnan(got[:, 7]).all()
    assert np.isfinite(got[:, :7]).all()


def test_a_sum_stays_in_its_register() -> None:
    n = PACK.value
    numbers = {int(number) for number in re.findall(r"\$(\d+)", SHRINK.value)}

    assert numbers == {*range(n), *range(2 * n, 3 * n)}
    assert SHRINK_REGISTERS.value.split(",") == ["=f"] * n + [str(i) for i in range(n)] + ["f"] * n


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("setp.neu.f32 r, $130", "setp.neu.f32 r, $128"),
        ("or.pred p, p, r", "or.pred p, p, p"),
        ("vote.sync.any.pred p, p, 0xffffffff", "or.pred p, p, p"),
        ("@!p bra.uni DONE;\n", ""),
        ("mul.f32 $63, $63, $191", "mul.f32 $63, $63, $189"),
        ("mul.f32 $1, $1, $129", "mul.f32 $1, $0, $129"),
    ],
)
def test_a_wrong_instruction_is_seen(old: str, new: str) -> None:
    assert old in SHRINK.value, f"{old!r} is gone: plant the bug anew"
    try:
        mistakes = wrong(SHRINK.value.replace(old, new))
    except AssertionError:
        mistakes = 1

    assert mistakes

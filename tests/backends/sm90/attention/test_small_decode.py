"""Decodes of few tokens by programs of one tile: results against the float64 oracle, and which decodes they serve.

In the interpreter `interpreted.kernels_small_decode` runs; on an H200 the Gluon kernels run.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random

import pytest
from attrs import evolve

from dsv4attn.backends._triton.interpreted import INTERPRETED
from dsv4attn.backends._triton.launching.runtime import observed
from dsv4attn.backends.sm90 import launch, tuning
from dsv4attn.backends.sm90.attention import small_decode
from dsv4attn.backends.sm90.launch import Sm90Backend
from dsv4attn.backends.sm90.tuning import COMBINE_ROUNDS, TILE_SIZES, TileSizes, combine_rounds_of, tile_sizes_of
from dsv4attn.core.cache.layout import KVCacheLayout
from dsv4attn.core.contract.backend import Phase
from dsv4attn.testing.cases.table import CASES
from dsv4attn.testing.conform import Subject, run_case
from tests.backends._triton.attention.attention_trials import FNUZ, OCP, Trial
from tests.backends._triton.cache.caches import DEVICE
from tests.backends._triton.triton_backends import planned
from tests.backends.sm90.attention.mutants import plant
from tests.backends.sm90.attention.test_attention import BASE, CODED, NIBBLES, PARTS, ROW, SCALES_LAST, WITHIN
from tests.backends.sm90.calls import Result, check_a_scale_of_nan, check_rows_without_keys, measured_lines, run, served

UNITS = 132
LONG = evolve(BASE, widths=(100, 640), tokens=1, seed=31)


@pytest.fixture(autouse=True)
def units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scratch for more programs than the interpreter's four, no kernel of few heads, and few programs that combine."""
    monkeypatch.setattr(launch, "few_heads_sizes_of", lambda *_, **__: None)
    if INTERPRETED:
        monkeypatch.setattr(launch, "multiprocessors", lambda: 60)
        monkeypatch.setattr(small_decode, "combine_rounds_of", lambda *_: COMBINE_ROUNDS[-1])


def attended(trial: Trial, sizes: TileSizes | None, monkeypatch: pytest.MonkeyPatch) -> Result:
    """A trial by programs of these sizes, or of those that are chosen."""
    if sizes is not None:
        monkeypatch.setattr(launch, "tile_sizes_of", lambda *_: sizes)
    with observed() as seen:
        result = run(trial, backend=Sm90Backend())
    assert Counter(variant.name for variant in seen) == {"attend_tile": 1, "combine_tiles": 1}
    return result


TRIALS = {
    "pages": BASE,
    "one segment": evolve(BASE, layouts=(OCP,), widths=(130, 0), seed=32),
    "a block and a bit": evolve(BASE, heads=65, tokens=2, seed=33),
    "two blocks": evolve(BASE, heads=128, tokens=1, widths=(64, 65), seed=34),
    "one head": evolve(BASE, heads=1, seed=35),
    "no sink": evolve(BASE, sink=False, seed=36),
    "neither lse nor largest logits": evolve(BASE, wants_lse=False, seed=37),
    "odd pages": evolve(BASE, pages=(5, 53), seed=38),
    "no window": evolve(BASE, widths=(0, 100), seed=39),
    "one key": evolve(BASE, widths=(1, 1), seed=40),
    "nobody": evolve(BASE, widths=(0, 1), seed=41),
    "many tiles": PARTS,
    "codes, scales within": evolve(BASE, layouts=(CODED[WITHIN],) * 2, seed=43),
    "codes, scales behind": evolve(BASE, layouts=(CODED[SCALES_LAST],) * 2, pages=(5, 53), heads=17, seed=44),
    "codes, one key": evolve(BASE, layouts=(CODED[WITHIN],) * 2, widths=(1, 1), tokens=7, seed=49),
    "codes, one segment": evolve(BASE, layouts=(CODED[WITHIN],), widths=(130, 0), seed=45),
    "nibbles, scales within": evolve(BASE, layouts=(CODED[WITHIN], NIBBLES[WITHIN]), seed=46),
    "nibbles, scales behind": evolve(
        BASE, layouts=(CODED[SCALES_LAST], NIBBLES[SCALES_LAST]), pages=(5, 53), heads=65, tokens=2, seed=47
    ),
    "nibbles, no window": evolve(BASE, layouts=(CODED[WITHIN], NIBBLES[WITHIN]), widths=(0, 100), seed=48),
}
LAYOUTS = (
    (OCP,),
    (OCP, OCP),
    *((CODED[where],) for where in CODED),
    *((CODED[where], kind[where]) for where in CODED for kind in (CODED, NIBBLES)),
)


@pytest.mark.in_turn
@pytest.mark.parametrize("sizes", TILE_SIZES, ids=str)
@pytest.mark.parametrize("name", TRIALS)
def test_each_size_of_a_program_is_right(name: str, sizes: TileSizes, monkeypatch: pytest.MonkeyPatch) -> None:
    assert attended(TRIALS[name], sizes, monkeypatch).error <= 1


@pytest.mark.parametrize("sizes", TILE_SIZES[::3], ids=str)
@pytest.mark.parametrize("rounds", COMBINE_ROUNDS)
def test_parts_are_combined_alike_in_rounds_of_any_size(
    rounds: tuple[int, int], sizes: TileSizes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(small_decode, "combine_rounds_of", lambda *_: rounds)

    # more tiles than any round has
    assert sizes.of_rows(LONG.widths) > 5
    assert attended(LONG, sizes, monkeypatch).error <= 1


@pytest.mark.parametrize("seed", range(8 if INTERPRETED else 100))
def test_any_decode_of_few_tokens_is_right(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = Random(seed)
    widths = [rng.choice([1, 63, 64, 65, 128, 130, 200]) for _ in range(2)]
    heads = rng.choice([1, 2, 7, 16, 33, 64, 65] if INTERPRETED else [7, 64, 128])
    pages = [rng.choice([1, 2, 5, 53, 64]) for _ in range(2)]
    layouts = rng.choice(LAYOUTS)
    trial = Trial(layouts=layouts, pages=pages, widths=widths, heads=heads, tokens=rng.randint(1, 2), seed=seed)

    assert attended(trial, None, monkeypatch).error <= 1


@pytest.mark.parametrize("empty", [math.inf, 0.0])
@pytest.mark.parametrize("trial", [evolve(BASE, tokens=7, seed=2), evolve(BASE, widths=(0, 0), tokens=2)])
def test_rows_without_keys_are_told_as_the_call_wants_it(trial: Trial, empty: float) -> None:
    check_rows_without_keys(trial, Sm90Backend(), empty)


@pytest.mark.parametrize("segment", [0, 1])
@pytest.mark.parametrize("layouts", LAYOUTS[4:], ids=lambda pair: f"{pair[1].name} {pair[1].arrangement.value}")
def test_a_scale_of_nan_makes_the_rows_of_its_key_nan(layouts: Sequence[KVCacheLayout], segment: int) -> None:
    trial = evolve(BASE, layouts=layouts, widths=(70, 70), tokens=7, pages=(5, 53), seed=52)
    check_a_scale_of_nan(trial, segment, 14, lambda trial: run(trial, backend=Sm90Backend()))


@pytest.mark.matrix
def test_which_kernel_serves_a_decode() -> None:
    few = Trial(layouts=(OCP,), widths=(130,), tokens=1, heads=3, seed=42)
    coded = evolve(few, layouts=(CODED[WITHIN],))
    nibbles = evolve(few, layouts=(CODED[SCALES_LAST], NIBBLES[SCALES_LAST]), widths=(130, 70))
    rows = evolve(ROW, tokens=1)
    many = evolve(few, tokens=30 if INTERPRETED else 66, heads=65)

    assert served(Sm90Backend(), few) == {"attend_tile", "combine_tiles"}
    assert served(Sm90Backend(small="shared"), few) == {"attention", "reduce"}
    assert served(Sm90Backend(small="gluon"), few) == {"gluon", "combine_parts"}
    for trial in (coded, nibbles):
        assert served(Sm90Backend(), trial) == {"attend_tile", "combine_tiles"}
        assert served(Sm90Backend(small="shared"), trial) == {"attention", "reduce"}
        assert served(Sm90Backend(small="gluon"), trial) == {"gluon", "combine_parts"}
    assert served(Sm90Backend(), rows) == {"attention", "reduce"}
    assert served(Sm90Backend(), evolve(coded, layouts=(FNUZ,))) == {"attention", "reduce"}
    for trial in (many, evolve(many, layouts=(CODED[WITHIN],))):
        assert served(Sm90Backend(), trial) == {"gluon", "combine_parts"}
    assert served(Sm90Backend(), few, Phase.PREFILL) == {"gluon", "combine_parts"}
    assert served(Sm90Backend(deterministic=True), few) == {"gluon"}


PLANTS = {
    "indices behind the length": (
        "tiles",
        "slot = tl.where(key < n, slot, -1)",
        "slot = tl.where(key < width, slot, -1)",
    ),
    "the other segment's length": ("schedule", "(tile - before) * N, second.width", "(tile - before) * N, first.width"),
    "columns behind those of the window": ("schedule", "(tile - before) * N, second.width", "tile * N, second.width"),
    "a tile is left out": ("tiles", "for i in range(there):", "for i in range(1, there):"),
    "a tile without keys is combined": ("tiles", "for i in range(there):", "for i in range(there + 1):"),
    "tiles of the window are as many as can be": ("schedule", "where(i < of_first, i,", "where(i < before, i,"),
    "heads of another place": ("tiles", "head % 8 // 2", "head % 4 // 2"),
    "no sink": ("tiles", "whole += tl.exp2(", "whole += 0.0 * tl.exp2("),
    "parts of one row weigh the same": ("tiles", "tl.exp2(m - top)", "(m > -1e30).to(tl.float32)"),
    "the total of the last part": ("tiles", "total = total * shrink + ", "total = 0.0 * shrink + "),
    "an empty row's lse": ("tiles", "tl.where(empty, empty_lse,", "tl.where(empty, 1.0,"),
    "parts without their powers": ("tiles", "(power[None, :] * weight[:, None])", "weight[:, None]"),
    "powers of the columns before": (
        "tiles",
        "power = tl.load(sums + 2 * block + ",
        "power = tl.load(sums + 2 * block - 1 + ",
    ),
    "the power of the first key": (
        "tiles",
        "tl.max(bounds, 0)",
        "tl.max(tl.where(tl.arange(0, N)[:, None] == 0, bounds, 0), 0)",
    ),
    "parts beyond fp16": ("tiles", "rope[:, None] - 7, byte)", "rope[:, None] - 16, byte - 9)"),
    "powers of what must not be read": ("tiles", "coded = ok[:, None] & (of < 7)", "coded = of < 7"),
}
CODED_PLANTS = {
    "powers of codes that must not be read": ("tiles", "there = ok[:, None] & (of < 16)", "there = of < 16"),
    "one power for 64 columns": ("tiles", "column // (512 // POWERS)", "column // 64 * 2"),
    "parts of codes beyond fp16": (
        "tiles",
        "mask=there, other=0).to(tl.int32)\n    return",
        "mask=there, other=0).to(tl.int32) - 9\n    return",
    ),
    "codes of the first segment's size": ("schedule", "inside + 256, inside + 32", "inside + 512, inside + 16"),
    "scales of records after the page": (
        "tiles",
        "slot, inside, KIND, INTERLEAVED)",
        "slot, inside, KIND, not INTERLEAVED)",
    ),
    "the window's records read as nibbles": (
        "tiles",
        "scales, ok, inside, KIND)\n            bounds",
        "scales, ok, 0, KIND)\n            bounds",
    ),
    "parts of nibbles beyond fp16": ("tiles", "(127 - 9 - 3)", "(127 - 9 - 9)"),
    "one of two scales of nibbles": ("tiles", "tl.maximum((byte >> 3) & 15, (other >> 3) & 15)", "(byte >> 3) & 15"),
    "powers of nibbles from scales of codes": (
        "tiles",
        "& (inside == 0):\n        byte",
        "& (inside > 1):\n        byte",
    ),
}
HARD = [
    evolve(BASE, widths=(64, 200), tokens=4, seed=1),
    evolve(BASE, widths=(130, 70), tokens=3, heads=17, seed=13),
    evolve(BASE, tokens=2, widths=(0, 1)),
    PARTS,
]
HARD_CODED = [TRIALS[name] for name in TRIALS if name.startswith(("codes", "nibbles"))]


def reads_codes_of_columns_apart() -> bool:
    """Whether programs of one tile read records exactly whose scales are far from each other."""
    (case,) = (case for case in CASES if case.name == "codes-v41-copies-few-decode")
    with observed() as seen:
        outcome = run_case(Subject.named("sm90", device=str(DEVICE)), case)
    assert {variant.name for variant in seen} == {"attend_tile", "combine_tiles"}
    return outcome.state == "passed"


@pytest.mark.mutation
@pytest.mark.skipif(not INTERPRETED, reason="the planted text is of the interpreted kernels")
def test_one_power_for_two_scales_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert reads_codes_of_columns_apart()
    old = "tl.load(scale + of, mask=there, other=0).to(tl.int32)"
    plant(monkeypatch, tmp_path, "tiles", old, f"tl.maximum({old}, {old.replace('of,', '(of ^ 1),')})")

    assert not reads_codes_of_columns_apart()


@pytest.mark.mutation
@pytest.mark.skipif(not INTERPRETED, reason="the planted text is of the interpreted kernels")
@pytest.mark.parametrize("bug", [*PLANTS, *CODED_PLANTS])
def test_a_planted_bug_is_found(bug: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, tmp_path, *(PLANTS | CODED_PLANTS)[bug])
    monkeypatch.setattr(launch, "tile_sizes_of", lambda *_: TILE_SIZES[0])

    trials = HARD_CODED if bug in CODED_PLANTS else HARD
    assert any(run(trial, backend=Sm90Backend()).error > 1 for trial in trials)


def decodes() -> Iterator[tuple[str, int, int, tuple[int, ...], dict[TileSizes | None, float]]]:
    """Measured decodes: name, tokens, heads, widths, and microseconds by sizes, or by the Gluon kernel (None)."""
    for name, *rest in measured_lines("tiles_h200.txt"):
        tokens, heads, *widths = map(int, rest[:4])
        cells = zip((*TILE_SIZES, None), rest[4:], strict=True)
        yield name, tokens, heads, tuple(widths), {sizes: float(cell) for sizes, cell in cells if cell != "-"}


def regrets(units: int = UNITS) -> list[float]:
    """Time of the choice for each decode, relative to the fastest. units: that the rule is given."""
    losses = []
    for _, tokens, heads, widths, times in decodes():
        losses.append(times.get(tile_sizes_of(tokens, heads, widths, units), math.inf) / min(times.values()))
    return losses


def test_the_choice_is_that_of_the_measured_times() -> None:
    lost = regrets()

    assert len(lost) == 97
    assert max(lost) < 1.01


@pytest.mark.parametrize("heads", [3, 65])
@pytest.mark.parametrize("sizes", TILE_SIZES, ids=str)
def test_parts_of_all_programs_fit_into_the_scratch(sizes: TileSizes, heads: int) -> None:
    part, *_ = planned(Sm90Backend(), evolve(BASE, heads=heads)).scratch
    programs = launch._programs(heads) * sizes.most

    # parts of two bytes in one half of it, sums of four in the other
    assert programs * 512 * sizes.heads * 2 <= part.nbytes // 2
    assert programs * (2 * sizes.heads + 16) * 4 <= part.nbytes // 2


def test_a_model_without_what_programs_cost_chooses_worse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "US_PER_FURTHER_PROGRAM", 0.0)
    monkeypatch.setattr(f"{__name__}.tile_sizes_of", tile_sizes_of.__wrapped__)

    assert max(regrets()) > 1.02
    assert max(regrets(units=0)) > 1.5


def test_what_a_round_has_follows_from_programs_and_tiles() -> None:
    assert [combine_rounds_of(*arguments) for arguments in ((5, 64, 10), (6, 64, 10), (1, 128, 18), (99, 64, 5))] == [
        (10, 1), (10, 2), (10, 1), (5, 2)
    ]  # fmt: skip
    assert [combine_rounds_of(*arguments) for arguments in ((1, 64, 2), (16, 64, 2), (64, 3, 2), (65, 3, 2))] == [
        (5, 2), (2, 8), (5, 2), (2, 8)
    ]  # fmt: skip

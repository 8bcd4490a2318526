"""Ranks of few heads: results of their kernel against the float64 oracle, and which calls it serves.

In the interpreter `interpreted.kernels_few_heads` runs; on an H200 the Gluon kernel runs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from attrs import evolve

from dsv4attn.backends._triton.interpreted import INTERPRETED
from dsv4attn.backends._triton.launching.runtime import observed
from dsv4attn.backends.sm90 import launch
from dsv4attn.backends.sm90.launch import Sm90Backend
from dsv4attn.backends.sm90.tuning import FEW_HEADS, FewHeadsSizes, few_heads_sizes_of
from dsv4attn.core.contract.backend import Phase
from tests.backends._triton.attention.attention_trials import OCP, Trial
from tests.backends._triton.triton_backends import planned
from tests.backends.sm90.attention.mutants import plant
from tests.backends.sm90.attention.test_attention import BASE, CODED, WITHIN
from tests.backends.sm90.calls import Result, check_a_scale_of_nan, check_rows_without_keys, measured_lines, run, served

UNITS = 132
SIZES = [FewHeadsSizes(columns, tiles) for columns in (8, 16) for tiles in (0, 1, 3)]


def attended(trial: Trial, sizes: FewHeadsSizes, monkeypatch: pytest.MonkeyPatch) -> Result:
    """A trial by programs of these sizes; rows that are whole as a prompt."""
    monkeypatch.setattr(launch, "few_heads_sizes_of", lambda *_, **__: sizes)
    with observed() as seen:
        result = run(trial, Phase.PREFILL if sizes.is_whole else Phase.DECODE, Sm90Backend(prefill="paged"))
    launched = ["attend_few_heads", *([] if sizes.is_whole else ["combine_tiles"])]
    assert Counter(variant.name for variant in seen) == Counter(launched)
    return result


TRIALS = {
    "pages": BASE,
    "one segment": evolve(BASE, layouts=(OCP,), widths=(130, 0), seed=32),
    "a block and a bit": evolve(BASE, heads=17, widths=(128, 300), tokens=2, seed=33),
    "one head": evolve(BASE, heads=1, seed=35),
    "no sink": evolve(BASE, sink=False, seed=36),
    "neither lse nor largest logits": evolve(BASE, wants_lse=False, seed=37),
    "odd pages": evolve(BASE, pages=(5, 53), seed=38),
    "no window": evolve(BASE, widths=(0, 100), seed=39),
    "one key": evolve(BASE, widths=(1, 1), seed=40),
    "nobody": evolve(BASE, widths=(0, 1), seed=41),
    "many tiles": evolve(BASE, layouts=(OCP,), widths=(900,), tokens=1, seed=42),
}


@pytest.mark.in_turn
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("name", TRIALS)
def test_each_size_of_a_program_is_right(name: str, sizes: FewHeadsSizes, monkeypatch: pytest.MonkeyPatch) -> None:
    assert attended(TRIALS[name], sizes, monkeypatch).error <= 1


@pytest.mark.parametrize("seed", range(6 if INTERPRETED else 100))
def test_any_call_of_few_heads_is_right(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = Random(seed)
    widths = [rng.choice([1, 63, 64, 65, 128, 130, 200]) for _ in range(2)]
    heads = rng.choice([1, 5, 8, 13, 16] if INTERPRETED else [5, 8, 16])
    pages = [rng.choice([1, 2, 5, 53, 64]) for _ in range(2)]
    layouts = rng.choice([(OCP,), (OCP, OCP)])
    trial = Trial(layouts=layouts, pages=pages, widths=widths, heads=heads, tokens=rng.randint(1, 3), seed=seed)

    assert attended(trial, rng.choice(SIZES), monkeypatch).error <= 1


@pytest.mark.parametrize("empty", [math.inf, 0.0])
@pytest.mark.parametrize("tiles", [0, 1])
def test_rows_without_keys_are_told_as_the_call_wants_it(
    tiles: int, empty: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "few_heads_sizes_of", lambda *_, **__: FewHeadsSizes(8, tiles))

    check_rows_without_keys(evolve(BASE, tokens=7, seed=2), Sm90Backend(), empty)


@pytest.mark.parametrize("tiles", [0, 1])
def test_a_scale_of_nan_makes_the_rows_of_its_key_nan(tiles: int, monkeypatch: pytest.MonkeyPatch) -> None:
    trial = evolve(BASE, widths=(70, 70), tokens=7, pages=(5, 53), seed=52)
    check_a_scale_of_nan(trial, 1, 4, lambda trial: attended(trial, FewHeadsSizes(8, tiles), monkeypatch))


def test_which_kernel_serves_a_call() -> None:
    many = evolve(BASE, tokens=40, widths=(64, 64), seed=42)
    few, coded = {"attend_few_heads"}, evolve(many, layouts=(CODED[WITHIN],) * 2)

    assert served(Sm90Backend(), many) == served(Sm90Backend(prefill="paged"), many, Phase.PREFILL) == few
    assert "attend_few_heads" not in served(Sm90Backend(), evolve(many, heads=17, tokens=9))
    assert "attend_few_heads" not in served(Sm90Backend(), coded)
    for backend in (Sm90Backend(small="gluon"), Sm90Backend(small="shared"), Sm90Backend(deterministic=True)):
        assert "attend_few_heads" not in served(backend, evolve(many, tokens=9))


PLANTS = {
    "indices behind the length": ("few", "mask=key < end, other=-1", "mask=key < end + 1, other=-1"),
    "the other segment's length": ("few", "* 64 + row, n1", "* 64 + row, n0"),
    "columns behind those of the window": ("few", "(begin + k - edge) * 64", "(begin + k) * 64"),
    "a tile is left out": ("few", "for k in range(count):", "for k in range(1, count):"),
    "no sink": ("few", "whole += tl.exp2(", "whole += 0.0 * tl.exp2("),
    "tiles weigh the same": ("few", "tl.exp2(largest - grown), tl", "tl.exp2(largest - largest), tl"),
    "an empty row's lse": ("few", "tl.where(empty, empty_lse,", "tl.where(empty, 1.0,"),
    "parts beyond fp16": ("few", "tl.minimum(scales + shift, 254)", "tl.minimum(scales + shift - 9, 254)"),
    "parts begin at the row's begin": ("few", "index, index - before) * most", "0, 0) * most"),
}


@pytest.mark.mutation
@pytest.mark.skipif(not INTERPRETED, reason="the planted text is of the interpreted kernel")
@pytest.mark.parametrize("bug", PLANTS)
def test_a_planted_bug_is_found(bug: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, tmp_path, *PLANTS[bug])

    trials = evolve(BASE, widths=(64, 200), tokens=4, seed=1), evolve(BASE, tokens=2, widths=(0, 1))
    assert any(attended(trial, sizes, monkeypatch).error > 1 for trial in trials for sizes in SIZES[:2])


def calls() -> Iterator[tuple[int, int, tuple[int, ...], bool, dict[int | None, float]]]:
    """Measured calls: tokens, heads, widths, whether a decode; microseconds by tiles, or by other kernels (None)."""
    for name, *rest in measured_lines("few_heads_h200.txt"):
        tokens, heads, *widths = map(int, rest[:4])
        cells = zip((None, 0, 3, 6), rest[4:], strict=True)
        times = {tiles: float(cell) for tiles, cell in cells if cell != "-"}
        yield tokens, heads, tuple(widths), not name.startswith("prompt"), times


def regrets(units: int = UNITS) -> list[float]:
    """Time of the choice for each call, relative to the fastest. units: that the rule is given."""
    losses = []
    for tokens, heads, widths, decode, times in calls():
        sizes = few_heads_sizes_of(tokens, heads, widths, units, decode=decode)
        losses.append(times.get(sizes.tiles if sizes else None, math.inf) / min(times.values()))
    return losses


def test_the_choice_is_that_of_the_measured_times() -> None:
    lost = regrets()

    assert len(lost) == 144
    assert max(lost) < 1.07
    assert sum(loss > 1.03 for loss in lost) <= 6


def test_another_number_of_multiprocessors_chooses_worse() -> None:
    assert max(regrets(units=10)) > 1.2
    assert max(regrets(units=10**6)) > 1.2


def test_parts_of_all_programs_fit_into_the_scratch() -> None:
    for costs in FEW_HEADS:
        part, *_ = planned(Sm90Backend(), evolve(BASE, heads=costs.columns)).scratch
        programs = launch._programs(costs.columns) * 2
        # parts of two bytes in one half of it, sums of four in the other
        assert programs * 512 * costs.columns * 2 <= part.nbytes // 2
        assert programs * (2 * costs.columns + 8) * 4 <= part.nbytes // 2

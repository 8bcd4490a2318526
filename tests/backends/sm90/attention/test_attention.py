"""What the sm90 backend computes, against the float64 oracle.

In the interpreter `interpreted.kernels` runs, on four programs; on an H200 the Gluon kernel runs.
"""

from __future__ import annotations

import math
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from attrs import evolve

from dsv4attn.backends._triton.interpreted import INTERPRETED
from dsv4attn.backends._triton.launching.runtime import multiprocessors, observed
from dsv4attn.backends.sm90 import launch
from dsv4attn.backends.sm90.launch import Sm90Backend
from dsv4attn.backends.sm90.tuning import V4_PAGES_ROLES
from dsv4attn.compat.flash_mla import flash_mla_sparse_fwd
from dsv4attn.core.cache.layout import Arrangement, KVCacheLayout
from dsv4attn.core.contract.backend import Phase
from tests.backends._triton.attention.attention_trials import (
    BF16_ROWS,
    FNUZ,
    FP32_ROWS,
    OCP,
    SPLIT_OCP,
    TINY,
    Answer,
    Trial,
    rising,
)
from tests.backends._triton.cache.caches import DEVICE
from tests.backends.sm90.attention.mutants import plant
from tests.backends.sm90.calls import check_rows_without_keys, run
from tests.harness import same_bits

BASE = Trial(layouts=(OCP, OCP), pages=(64, 2), widths=(128, 200), tokens=3, heads=8)
ROW = Trial(layouts=(BF16_ROWS,), pages=(1,), widths=(200,), tokens=3, heads=8)
GATHERED = Trial(layouts=(BF16_ROWS,), form="gathered", widths=(300,), tokens=3, heads=8)
SPLIT_ROWS = evolve(GATHERED, widths=(700,), tokens=5)
PARTS = Trial(layouts=(OCP,), widths=(1400,), tokens=1, heads=65, seed=20)
"""One row of many parts, of two blocks of heads, of which the last has one."""

ARRANGEMENTS = (Arrangement.SPLIT, Arrangement.INTERLEAVED)
CODED = {arrangement: KVCacheLayout.v41_fp8(arrangement=arrangement) for arrangement in ARRANGEMENTS}
NIBBLES = {arrangement: KVCacheLayout.v41_fp4(arrangement=arrangement) for arrangement in ARRANGEMENTS}
NVFP4 = KVCacheLayout.of_record("v4_nvfp4")
SCALES_LAST, WITHIN = Arrangement.SPLIT, Arrangement.INTERLEAVED

MORE = multiprocessors() + 9
"""More rows than programs of a block of heads, on any device."""
OWN: dict[str, Trial] = {
    "pages": BASE,
    "one segment": evolve(BASE, layouts=(OCP,), widths=(130, 0)),
    "one row": evolve(BASE, tokens=1, seed=3),
    "more rows than programs": evolve(BASE, tokens=MORE, widths=(70, 65), seed=4),
    "rows over several programs": evolve(BASE, layouts=(OCP,), tokens=MORE, widths=(1000, 0), seed=4),
    "the same, of two blocks of heads": evolve(BASE, layouts=(OCP,), tokens=MORE, widths=(1000, 0), heads=65, seed=4),
    "one head": evolve(BASE, heads=1, seed=5),
    "a block and a bit": evolve(BASE, heads=65, widths=(64, 90), seed=6),
    "no sink": evolve(BASE, sink=False, seed=7),
    "neither lse nor largest logits": evolve(BASE, wants_lse=False, seed=8),
    "odd pages": evolve(BASE, pages=(5, 53), seed=9),
    "no window": evolve(BASE, widths=(0, 100), seed=10),
    "nobody": evolve(BASE, widths=(0, 0), seed=11),
    "codes, scales within": evolve(BASE, layouts=(CODED[WITHIN],) * 2, seed=21),
    "codes, scales behind": evolve(BASE, layouts=(CODED[SCALES_LAST],) * 2, pages=(5, 53), seed=22),
    "codes, one segment": evolve(BASE, layouts=(CODED[WITHIN],), widths=(130, 0), seed=23),
    "nibbles, scales within": evolve(BASE, layouts=(CODED[WITHIN], NIBBLES[WITHIN]), seed=24),
    "nibbles, scales behind": evolve(BASE, layouts=(CODED[SCALES_LAST], NIBBLES[SCALES_LAST]), pages=(5, 53), seed=25),
    "nibbles, no window": evolve(BASE, layouts=(CODED[WITHIN], NIBBLES[WITHIN]), widths=(0, 100), seed=26),
    "nvfp4": evolve(BASE, layouts=(NVFP4, NVFP4), pages=(5, 53), seed=27),
    "nvfp4, one segment": evolve(BASE, layouts=(NVFP4,), pages=(53,), widths=(130, 0), seed=28),
    "rows of a cache": ROW,
    "rows of pages": evolve(ROW, pages=(64,)),
    "gathered": GATHERED,
    "gathered, rows over several programs": evolve(GATHERED, tokens=MORE, widths=(2000,), seed=4),
    "gathered, no sink": evolve(GATHERED, sink=False, heads=66, widths=(70,), seed=12),
}
SHARED: dict[str, Trial] = {
    "another dialect": evolve(BASE, layouts=(OCP, FNUZ)),
    "scales behind each record": evolve(BASE, layouts=(SPLIT_OCP, OCP)),
    "arrangements that differ": evolve(BASE, layouts=(CODED[WITHIN], NIBBLES[SCALES_LAST])),
    "codes and nibbles next to bf16 values": evolve(BASE, layouts=(OCP, NVFP4)),
    "other dims": evolve(BASE, layouts=(TINY, TINY)),
    "q in fp32": evolve(BASE, q_dtype=torch.float32),
    "not at 16 bytes": evolve(BASE, aligned=False, pages=(5, 3)),
    "ragged": evolve(BASE, form="ragged"),
    "two caches of rows": evolve(BASE, layouts=(BF16_ROWS, BF16_ROWS)),
    "rows in fp32": evolve(ROW, layouts=(FP32_ROWS,)),
    "gathered and ragged": evolve(GATHERED, form="gathered-ragged"),
    "many heads": evolve(BASE, heads=129, widths=(20, 30)),
}


@pytest.mark.parametrize("name", OWN)
def test_the_gluon_kernel_is_right(name: str) -> None:
    result = run(OWN[name], Phase.PREFILL if "gathered" in name else Phase.DECODE)

    assert result.is_gluon
    assert result.error <= 1


@pytest.mark.parametrize("name", SHARED)
def test_other_calls_go_to_the_shared_kernel_with_the_same_answers(name: str) -> None:
    result = run(SHARED[name], Phase.PREFILL if "gathered" in name else Phase.DECODE)

    assert not result.is_gluon
    assert result.error <= 1


@pytest.mark.parametrize("heads", [3, 65])
def test_the_shared_kernel_serves_decodes_of_few_tokens_if_asked(heads: int) -> None:
    tiles = multiprocessors() // 2 - 1
    few = Trial(layouts=(OCP,), widths=(64 * tiles,), tokens=1, heads=heads, seed=30)
    longer = evolve(few, tokens=3)
    rows = Trial(layouts=(BF16_ROWS,), form="gathered", widths=(60,), tokens=1, heads=heads, seed=31)
    results = [
        run(few, backend=Sm90Backend(small="shared")),
        run(few, backend=Sm90Backend(small="gluon")),
        run(few, Phase.PREFILL, Sm90Backend(small="shared")),
        run(longer, backend=Sm90Backend(small="shared")),
        run(rows, backend=Sm90Backend(small="shared")),
    ]

    assert [result.is_gluon for result in results] == [False, True, True, True, True]
    assert max(result.error for result in results) <= 1


@pytest.mark.parametrize("together", [(2, 8), (8, 1), (8, 2), (16, 4)])
@pytest.mark.parametrize("heads", [3, 65])
def test_parts_are_added_up_alike_by_programs_of_any_size(
    heads: int, together: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    of_program, parts = together
    monkeypatch.setattr(launch, "V4_PAGES_ROLES", evolve(V4_PAGES_ROLES, heads=of_program, parts=parts))
    monkeypatch.setattr(launch, "_constants", launch._constants.__wrapped__)
    # one row, whose parts take several rounds
    result = run(evolve(PARTS, heads=heads))

    assert result.is_gluon
    assert result.error <= 1


COMPANY: dict[str, Trial] = {
    "pages": evolve(BASE, tokens=6, widths=(70, 400), seed=41),
    "more rows than programs": evolve(BASE, tokens=MORE, widths=(70, 65), seed=42),
    "two blocks of heads": evolve(BASE, layouts=(OCP,), heads=65, widths=(300, 0), seed=43),
    "nibbles": evolve(BASE, layouts=(CODED[WITHIN], NIBBLES[WITHIN]), widths=(70, 150), sink=False, seed=44),
    "nvfp4": evolve(BASE, layouts=(NVFP4, NVFP4), widths=(70, 150), sink=False, seed=47),
    "a dialect that the shared kernel reads": evolve(BASE, layouts=(OCP, FNUZ), widths=(70, 650), seed=45),
    "ragged": evolve(BASE, form="ragged", widths=(70, 650), seed=46),
}


def differences(trial: Trial, backend: Sm90Backend) -> list[str]:
    """The ways to compute the rows of a trial that give other bits than a decode of all rows."""

    def answer(other: Trial, phase: Phase = Phase.DECODE) -> Answer:
        result = run(other, phase, backend)
        assert result.error <= 1
        return Answer(result.call.out, result.call.lse, result.call.max_logits)

    together = answer(trial)
    ways = {
        "prefill": together.equals(answer(trial, Phase.PREFILL)),
        "other pages": together.equals(answer(evolve(trial, pages_seed=9))),
    }
    for row in range(min(trial.tokens, 4)):
        ways[f"row {row} alone"] = together.equals(answer(trial.rows(row)), slice(row, row + 1))
    return [way for way, is_equal in ways.items() if not is_equal]


@pytest.mark.parametrize("name", COMPANY)
def test_a_deterministic_row_has_the_same_bits_in_any_company_and_in_both_phases(name: str) -> None:
    assert differences(COMPANY[name], Sm90Backend(deterministic=True)) == []


def test_without_that_option_the_bits_of_a_row_depend_on_its_company() -> None:
    assert differences(COMPANY["pages"], Sm90Backend(small="gluon"))


def test_deterministic_calls_launch_the_gluon_kernel_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    trial = COMPANY["pages"]
    for phase in Phase:
        with observed() as seen:
            assert run(trial, phase, Sm90Backend(deterministic=True)).is_gluon
        assert [dict(variant.constants).get("WHOLE_ROWS") for variant in seen] == [True]
    # a device with another number of multiprocessors
    usual = run(trial, backend=Sm90Backend(deterministic=True)).call
    monkeypatch.setattr(launch, "multiprocessors", lambda: 3)
    assert same_bits(usual.out, run(trial, backend=Sm90Backend(deterministic=True)).call.out)


def test_a_call_without_scratch_goes_to_the_shared_kernel() -> None:
    result = run(BASE, change=lambda call: evolve(call, scratch=()))

    assert not result.is_gluon
    assert result.error <= 1


@pytest.mark.parametrize("empty", [math.inf, 0.0])
@pytest.mark.parametrize("trial", [evolve(BASE, tokens=7, seed=2), evolve(BASE, widths=(0, 0), tokens=2)])
def test_rows_without_keys_are_told_as_the_call_wants_it(trial: Trial, empty: float) -> None:
    assert check_rows_without_keys(trial, Sm90Backend(small="gluon"), empty).is_gluon


def test_nothing_happens_without_rows() -> None:
    assert run(evolve(BASE, tokens=0)).is_gluon


def any_trial(seed: int) -> Trial:
    """Any call that the Gluon kernel serves."""
    rng = Random(seed)
    form: Any = rng.choice(["dense", "dense", "dense", "gathered"])
    rows = form == "gathered" or rng.random() < 0.2
    number = 1 if rows else rng.choice([1, 2, 2])
    widths = [rng.choice([0, 1, 63, 64, 65, 128, 130, 200]) for _ in range(number)]
    # on a device each form compiles for some seconds
    records = [
        (OCP, OCP),
        (NVFP4, NVFP4),
        *((CODED[a], other[a]) for a in ARRANGEMENTS for other in (CODED, NIBBLES)),
    ]
    heads, tokens = rng.choice([1, 2, 7, 16, 33, 64, 65, 128] if INTERPRETED else [7, 64, 128]), rng.randint(1, 6)
    has_lse = rng.random() < 0.7
    while INTERPRETED and tokens * -(-heads // 64) * (sum(widths) // 64 + 1) > 12:
        widths, tokens, heads = [w * 2 // 3 for w in widths], max(tokens - 1, 1), -(-heads // 2)
    return Trial(
        layouts=[BF16_ROWS] if rows else rng.choice(records)[:number],
        pages=[rng.choice([1, 2, 5, 53, 64]) for _ in range(number)],
        widths=widths,
        heads=heads,
        tokens=tokens,
        form=form,
        sink=rng.random() < 0.7 if INTERPRETED else has_lse,
        wants_lse=has_lse,
        seed=seed,
    )


@pytest.mark.parametrize("seed", range(16 if INTERPRETED else 200))
def test_any_call_that_it_serves_is_right(seed: int) -> None:
    trial = any_trial(seed)
    result = run(trial, Phase.PREFILL if trial.form == "gathered" else Phase.DECODE)

    assert result.is_gluon
    assert result.error <= 1


RISING = (0.0, 3.0, 5.5, 5.625, 20.0, 19.0, 60.0, 0.0)
"""Logits of each tile's keys: some exceed those before by less than TOLERANCE, 8 in base 2 or 5.545, some by more."""

OF_WEIGHTS = {
    "what weights are relative to, as the largest logit": (
        "schedule",
        '-float("inf"), largest * LN2',
        "0.0, reference * LN2",
    ),
    "the same of a part": ("schedule", '-float("inf"), largest))', '-float("inf"), reference))'),
    "the largest logit, as what weights are relative to": (
        "schedule",
        "(reference + tl.log2(total)) * LN2",
        "(largest + tl.log2(total)) * LN2",
    ),
    "sums that do not shrink": ("interpreted", "total * shrink + tl.sum", "total + tl.sum"),
}
PLANTS = {
    "a slot that does not exist is slot 0": (
        "schedule",
        "slot = tl.where(ok, slot, 0)\n",
        "slot = tl.where(ok, slot, 0)\n    ok = slot >= 0\n",
    ),
    "scales of nibbles where those of codes are": (
        "schedule",
        "inside + 256, inside + 32",
        "inside + 256, inside + 16",
    ),
    "scales of the record before": ("schedule", "at.to(tl.int64) * SCALES)", "(at.to(tl.int64) // 2 * 2) * SCALES)"),
    "scales of nvfp4 without their padding": ("schedule", "FP8_PAGES else 32", "FP8_PAGES else 28"),
    "groups of nvfp4 twice as long": ("interpreted", "column // 16, mask=is_code", "column // 32, mask=is_code"),
    "bf16 values after the scales": ("interpreted", "column - 448 + 112", "column - 448 + 120"),
    "the wrong part": ("parts", "tl.where(i + u == 0, 1, 0)", "tl.where(i + u == 0, 0, 1)"),
    "a part too many": ("parts", "tl.where(i + u < count", "tl.where(i + u <= count"),
    "parts of a later round weigh the same": ("parts", "tl.where(of_first, shrink0[:, None], shrink1[:, None])", "1.0"),
    "lines of programs where no row begins": ("interpreted", "    clear_split(table, chunk)\n", ""),
    "the row of a program's line, for the program": ("parts", "tl.where(by_program, line, other)", "other"),
    "parts of one row weigh the same": (
        "parts",
        "tl.exp2(lses0[u] - grown0), tl.exp2(lses1[u] - grown1)",
        "(lses0[u] > -1e30).to(tl.float32), (lses1[u] > -1e30).to(tl.float32)",
    ),
    "parts without the sink": ("parts", "if sink is not None:", "if sink is None:"),
    "the sink in every part": ("interpreted", "        if whole:  # noqa", "        if total.shape[0] > 0:  # noqa"),
    "an empty row's lse": ("schedule", "tl.where(empty, results.empty_lse,", "tl.where(empty, 1.0,"),
    "a row that is not whole is written": (
        "interpreted",
        "        whole = (first_tile == 0)",
        "        whole = (first_tile <= last)",
    ),
    "one tile is left out": ("schedule", "tl.minimum(hi, start + n)", "tl.minimum(hi - 1, start + n)"),
    "the largest logit of the last part": (
        "parts",
        "top1 = tl.maximum(top1, tl.load(",
        "top1 = tl.maximum(-1e38, tl.load(",
    ),
    "heads of a pair change places": ("parts", "(number // 2 % 2 == 0)", "(number // 2 % 2 == 1)"),
    "heads of a pair change places in the output": ("parts", "r // (R // 2) * 8", "(1 - r // (R // 2)) * 8"),
    "pairs for halves": ("parts", "(4, 1, 0, 3, 2, 5)", "(1, 4, 0, 3, 2, 5)"),
    "one lse of a pair": ("parts", "lse_head, end1,", "lse_head, end0,"),
    "heads of another block": ("parts", "sixteen % 4 * 1024", "sixteen * 1024"),
    "one power of a pair of heads": ("parts", "(both >> 8 & 0xFF) << 23", "(both & 0xFF) << 23"),
    "powers of a pair change places": ("schedule", "2 * 2 + head % 16 // 8", "2 * 2 + 1 - head % 16 // 8"),
    "powers of the columns before": ("parts", "tl.max_contiguous(own, [1])", "own - eight // (2 * R) % 2 * 32"),
    "powers of a thread's neighbour": ("parts", "tl.max_contiguous(own, [1])", "own // 2 * 2"),
    "parts beyond fp16": ("schedule", "15) - 14", "17) - 16"),
    "the first block's parts": ("parts", "* BLOCKS + sixteen // 4", "* BLOCKS"),
    "sums of pages that do not shrink": ("interpreted", "values, acc * shrink[:, None]", "values, acc"),
    "columns of a part in another order": ("schedule", "column % 8 // 2 * 8", "(3 - column % 8 // 2) * 8"),
    "halves of 16 columns change places": ("schedule", "column % 16 // 8 * 4", "(1 - column % 16 // 8) * 4"),
    **OF_WEIGHTS,
}
HARD = [
    OWN["nibbles, scales within"],
    OWN["nvfp4, one segment"],
    evolve(BASE, tokens=2, seed=1),
    evolve(BASE, tokens=6, seed=13),
    evolve(BASE, tokens=1, seed=14),
    evolve(BASE, tokens=2, widths=(0, 0)),
    evolve(BASE, layouts=(OCP,), tokens=5, widths=(700, 0), seed=3),
    evolve(BASE, layouts=(OCP,), tokens=3, widths=(1400, 0), heads=3, seed=2),
    PARTS,
    OWN["rows over several programs"],
]


@pytest.mark.mutation
@pytest.mark.skipif(not INTERPRETED, reason="the planted text is of the interpreted kernels")
@pytest.mark.parametrize("bug", PLANTS)
def test_a_planted_bug_is_found(bug: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, tmp_path, *PLANTS[bug])
    is_found = any(run(trial).error > 1 for trial in HARD)
    further = evolve(PARTS, heads=3), rising(5, RISING), rising(1, RISING)
    assert is_found or any(run(trial).error > 1 for trial in further)


def rising_rows(tokens: int) -> float:
    """Error in budgets of gathered rows with such logits, where each query has the tiles in another order."""
    draw = torch.Generator().manual_seed(1)
    keys = torch.randn(64 * len(RISING), 512, generator=draw).bfloat16()
    keys[:, 0] = torch.tensor(RISING).repeat_interleave(64)
    q = torch.zeros(tokens, 5, 512, dtype=torch.bfloat16)
    q[..., 0] = torch.tensor([1.0, 0.5, -1.0, 0.0, -0.25])
    rows = torch.stack([torch.arange(len(keys)).roll(64 * t) for t in range(tokens)]).int()[:, None]
    arguments = q.to(DEVICE), keys[:, None].to(DEVICE), rows.to(DEVICE)
    out, largest, lse = (tensor.cpu().double() for tensor in flash_mla_sparse_fwd(*arguments, 1.0, backend="sm90"))
    z = q.double() @ keys.double().T
    right = z.softmax(-1) @ keys.double()
    errors = [(largest - z.amax(-1)).abs().max() / 1e-4, (lse - z.logsumexp(-1)).abs().max() / 1e-4]
    errors += [(out - right).norm() / (4e-3 * right.norm())]
    return float(torch.stack(errors).max())


@pytest.mark.parametrize("tokens", [1, 5])
def test_weights_that_are_relative_to_less_than_the_largest_logit_are_right_and_so_is_that(tokens: int) -> None:
    assert rising_rows(tokens) <= 1
    assert run(rising(tokens, RISING)).error <= 1


def far_apart() -> float:
    """Largest error, relative to each value, of rows of many copies of one key, whose columns are far apart in size."""
    draw = torch.Generator().manual_seed(2)
    # of a record every 16 columns may have a scale of their own
    size = torch.arange(-96, 96, 6).roll(5)[torch.randperm(32, generator=draw)].repeat_interleave(16)
    key = ((torch.rand(5, 512, generator=draw) + 1) * 2.0**size).bfloat16()
    rows = torch.arange(5)[:, None].expand(5, 64 * 11).clone()
    rows[1::2, 500:] = -1
    arguments = torch.zeros(5, 7, 512, dtype=torch.bfloat16).to(DEVICE), key[:, None].to(DEVICE)
    out, *_ = flash_mla_sparse_fwd(*arguments, rows.int()[:, None].to(DEVICE), 1.0, backend="sm90")
    expected = key.double()[:, None]
    return float(((out.cpu().double() - expected) / expected).abs().max())


def test_columns_of_a_split_row_may_be_far_apart_in_size() -> None:
    assert far_apart() <= 2.0**-9


@pytest.mark.mutation
@pytest.mark.skipif(not INTERPRETED, reason="the planted text is of the interpreted kernels")
@pytest.mark.parametrize(
    "wrong",
    [
        "tl.max(tl.abs(result), 1)[:, None, None]",
        "tl.max(tl.abs(tl.reshape(result, (64, 16, 32))), 2)[:, :, None].broadcast_to(64, 16, 2).reshape(64, 32, 1)",
    ],
)
def test_fewer_powers_are_found(wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = "tl.max(tl.abs(tl.reshape(fours, (64, 32, 4, 4))), 3)"
    plant(monkeypatch, tmp_path, "interpreted", right, f"{right} * 0.0 + {wrong}")
    assert far_apart() > 2.0**-9


OF_ROWS = {
    "a row behind the last": (
        "schedule",
        "(slot <= segment.last_slot)",
        "(slot <= segment.last_slot + 1)",
    ),
    "the row before": (
        "schedule",
        "tl.where(ok, slot, 0).to(tl.int64)",
        "tl.where(ok, slot // 2 * 2, 0).to(tl.int64)",
    ),
    "rows without the gap between them": (
        "schedule",
        "tl.where(ok, slot, 0).to(tl.int64) * segment.pitch.to(tl.int64) * 8",
        "tl.where(ok, slot, 0).to(tl.int64) * 512",
    ),
    **OF_WEIGHTS,
}


@pytest.mark.mutation
@pytest.mark.skipif(not INTERPRETED, reason="the planted text is of the interpreted kernels")
@pytest.mark.parametrize("bug", OF_ROWS)
def test_a_bug_planted_in_how_gathered_rows_are_attended_is_found(
    bug: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, tmp_path, *OF_ROWS[bug])
    result = run(GATHERED, Phase.PREFILL)

    assert result.is_gluon
    errors = result.error, run(SPLIT_ROWS, Phase.PREFILL).error, rising_rows(1), rising_rows(5)
    assert not all(error <= 1 for error in errors)

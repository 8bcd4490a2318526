"""The attention kernel agrees with the oracle on any call, and reads only the keys that an index names."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve

from dsv4attn.backends._triton.attention import launch as attention_launch
from dsv4attn.backends._triton.interpreted import INTERPRETED
from dsv4attn.backends._triton.launching.runtime import observed
from dsv4attn.backends._triton.tuning import Tuning
from dsv4attn.core.cache.layout import KVCacheLayout
from dsv4attn.core.contract.backend import AttentionOptions
from dsv4attn.core.memory.workspace import simultaneous_bytes
from dsv4attn.core.model.geometry import LayerGeometry, ModelGeometry
from tests.backends._triton.attention.attention_trials import (
    BF16_ROWS,
    FNUZ,
    FP32_ROWS,
    OCP,
    SPLIT_OCP,
    TINY,
    Answer,
    Trial,
    any_trial,
)
from tests.backends._triton.attention.mutants import far_away, mutate
from tests.backends._triton.cache.caches import DEVICE

SEEDS, BLOCK = 60 if INTERPRETED else 20, 10
# on a device nearly every seed compiles kernels of its own
SMALL = Tuning(heads=16, keys=16, reduce_parts=2)


@pytest.mark.parametrize("start", range(0, SEEDS, BLOCK))
def test_any_call_equals_the_oracle_and_writes_nothing_but_its_outputs(start: int) -> None:
    for seed in range(start, start + BLOCK):
        trial = any_trial(seed)
        error = trial.error(trial.run_it())
        assert error <= 1, f"seed {seed}: {error:.3g} budgets, {trial}"


def test_q_read_anew_for_each_tile_gives_what_the_oracle_gives() -> None:
    """As the tuning of RDNA asks for: q is read half a piece at a time, or 64 columns next to 64 of the keys."""
    with observed() as seen:
        for seed in range(8):
            trial = any_trial(seed)
            trial = evolve(trial, tuning=evolve(trial.tuning, reload=True))
            error = trial.error(trial.run_it())
            assert error <= 1, f"seed {seed}: {error:.3g} budgets, {trial}"

    assert {dict(form.constants)["TILE"].reload for form in seen if form.name == "attention"} == {True, False}


def test_the_seeds_reach_every_corner() -> None:
    trials = [any_trial(seed) for seed in range(60)]

    assert {t.form for t in trials} == {"dense", "ragged", "gathered", "gathered-ragged"}
    assert {page for t in trials for page in t.pages} == {1, 2, 5, 53, 64}
    assert {(t.splits > 0, t.run > 0) for t in trials} == {(False, False), (True, False), (True, True)}
    assert {t.splits for t in trials} >= {0, 1, 2, 3, 7}
    assert {(t.aligned, t.sink, t.wants_lse) for t in trials} == {
        (a, s, t) for a in (0, 1) for s in (0, 1) for t in (0, 1)
    }
    assert min(sum(t.widths) for t in trials) < 3
    assert max(sum(t.widths) for t in trials) > 300
    assert {t.heads for t in trials} >= {1, 2, 3, 7, 16, 17, 33, 64, 128}
    pairs = {tuple(layout.dtype for layout in t.layouts) for t in trials if t.layouts[0].head_dim == 512 and t.aligned}
    record, row, exact = torch.uint8, torch.bfloat16, torch.float32
    assert pairs >= {(record,), (record, record), (record, row), (exact,), (exact, exact)}


# what is not chosen at random


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize(
    "layouts",
    [(OCP, OCP), (OCP, FNUZ), (FNUZ, OCP), (FNUZ, FNUZ), (SPLIT_OCP, SPLIT_OCP), (OCP, SPLIT_OCP), (BF16_ROWS, OCP)],
    ids=lambda pair: "-".join(layout.fingerprint.replace(":", ".") for layout in pair),
)
def test_every_pair_of_caches_is_read_as_what_it_is(layouts: Sequence[KVCacheLayout], aligned: bool) -> None:
    for prefetch in (True, False):
        tuning = Tuning(heads=16, keys=32, prefetch=prefetch)
        Trial(layouts=layouts, widths=(40, 33), tokens=2, aligned=aligned, tuning=tuning, seed=3).check()


@pytest.mark.parametrize("q_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("layout", [FP32_ROWS, BF16_ROWS, OCP, TINY], ids=lambda layout: layout.fingerprint)
def test_every_type_of_query_and_key_goes_together(layout: KVCacheLayout, q_dtype: torch.dtype) -> None:
    Trial(layouts=(layout, layout), widths=(40, 33), tokens=2, q_dtype=q_dtype, seed=4).check()


@pytest.mark.parametrize("heads", [1, 2, 3, 5, 8, 15, 16, 17, 31, 33, 64, 65, 127, 128])
def test_any_number_of_heads_is_attended_without_padding(heads: int) -> None:
    for most in (16, 64):
        Trial(layouts=(TINY,), widths=(20,), heads=heads, tuning=Tuning(heads=most, keys=32), seed=heads).check()


@pytest.mark.parametrize("form", ["dense", "ragged"])
@pytest.mark.parametrize("splits", [0, 2])
@pytest.mark.parametrize("widths", [(0, 0), (0, 20), (20, 0), (1, 1)])
def test_segments_without_columns_are_no_keys(widths: Sequence[int], splits: int, form: str) -> None:
    trial = Trial(layouts=(OCP, OCP), widths=widths, splits=splits, form=form, tuning=SMALL)  # type: ignore[arg-type]

    answer = trial.check()

    if not any(widths):
        assert answer.lse is not None
        assert answer.max_logits is not None
        assert bool((answer.out == 0).all())
        assert bool((answer.lse == -math.inf).all())
        assert bool((answer.max_logits == -math.inf).all())


def test_no_rows_are_no_launch() -> None:
    for splits in (0, 3):
        trial = Trial(layouts=(TINY,), widths=(9,), tokens=0, splits=splits)
        with observed() as seen:
            assert trial.run_it().out.shape == (0, trial.heads, 32)
        assert not seen


def test_lse_and_largest_logits_may_be_asked_for_alone() -> None:
    both = Trial(layouts=(TINY, TINY), widths=(20, 9), tuning=SMALL)
    for splits in (0, 3):
        trial = evolve(both, splits=splits)
        answer = trial.check()
        for missing in ("lse", "max_logits"):
            call, _ = trial.call()
            nothing: dict[str, Any] = {missing: None}
            attention_launch.attend(
                evolve(call, **(nothing if missing == "lse" else {"options": AttentionOptions()})), SMALL
            )
            alone = Answer(call.out, call.lse, call.max_logits)._replace(**nothing)
            assert answer.equals(alone)


@pytest.mark.skipif(not INTERPRETED, reason="gigabytes of memory, which the CPU only promises")
@pytest.mark.parametrize("layout", [OCP, TINY, BF16_ROWS], ids=lambda layout: layout.fingerprint)
@pytest.mark.parametrize("form", ["dense", "gathered"])
def test_nothing_is_too_far_away(layout: KVCacheLayout, form: Any) -> None:
    """Rows of q and out, of lists, of keys, and pages: more than 2^31 elements from one to the next."""
    trial = Trial(layouts=(layout,), pages=(2,), widths=(9,), tokens=2, tuning=SMALL, seed=1)
    trial = evolve(trial, form=form)

    assert all(len(trial.segments[0].named(row)) for row in range(2))
    assert trial.check().equals(far_away(trial))


# how a row is cut


@pytest.mark.parametrize("layouts", [(OCP, OCP), (TINY, TINY), (FP32_ROWS,)], ids=len)
def test_a_row_may_be_cut_into_any_number_of_parts(layouts: Sequence[KVCacheLayout]) -> None:
    whole = Trial(layouts=layouts, widths=(60, 50), tokens=2, tuning=SMALL, seed=5)
    for splits in range(8):
        evolve(whole, splits=splits).check()


def parts(trial: Trial) -> int:
    """Parts of fixed length that every row of a trial has room in."""
    tiles = -(-sum(trial.widths) // trial.tuning.keys) + 1
    return -(-tiles // trial.run)


@pytest.mark.parametrize("q_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("layouts", [(OCP, OCP), (BF16_ROWS, BF16_ROWS), (FP32_ROWS,), (TINY,)], ids=len)
def test_parts_of_fixed_length_hold_all_keys(layouts: Sequence[KVCacheLayout], q_dtype: torch.dtype) -> None:
    """Tiles of fp32 keys are smaller than the tuning says, and parts must not be."""
    # two tiles of 128 keys in bf16 fill more than a block's shared memory
    for run, keys in ((1, 128 if INTERPRETED else 64), (2, 64), (1, 16)):
        trial = Trial(layouts=layouts, widths=(100, 90), tokens=2, q_dtype=q_dtype, run=run, seed=6)
        trial = evolve(trial, tuning=Tuning(heads=16, keys=keys))
        evolve(trial, splits=parts(trial)).check()


@pytest.mark.parametrize("layouts", [(OCP, OCP), (TINY, TINY)], ids=lambda pair: pair[0].fingerprint)
@pytest.mark.parametrize("run", [1, 2])
def test_with_parts_of_fixed_length_a_row_does_not_depend_on_anything_around_it(
    layouts: Sequence[KVCacheLayout], run: int
) -> None:
    """More parts than it needs, the order of pages, rows next to it."""
    trial = Trial(layouts=layouts, widths=(60, 50), run=run, tuning=SMALL, seed=8)
    trial = evolve(trial, splits=parts(trial))
    answer = trial.check()

    assert answer.equals(evolve(trial, splits=trial.splits + 3).run_it())
    assert answer.equals(evolve(trial, pages_seed=9).run_it())
    for row in range(trial.tokens):
        assert answer.equals(trial.rows(row).run_it(), slice(row, row + 1))


@pytest.mark.parametrize("form", ["dense", "ragged"])
def test_rows_that_are_launched_in_parts_have_the_bits_of_one_launch(form: Any) -> None:
    """As many rows are launched together as there is memory for their splits."""
    trial = Trial(layouts=(TINY, TINY), widths=(30, 70), tokens=5, heads=5, form=form, tuning=SMALL, seed=12)
    call, _ = trial.call()
    assert call.lse is not None
    assert call.max_logits is not None
    splits, answers = attention_launch.fixed_splits(sum(trial.widths), SMALL, 2), []
    for most in (1, 2 * splits, 3 * splits + 1, 5 * splits):
        specs = attention_launch.fixed_scratch(trial.tokens, trial.layer, splits, most)
        assert specs[0][0][0] == max(most // splits, 1)
        scratch = [torch.full(tuple(shape), -1, dtype=dtype, device=DEVICE) for shape, dtype in specs]
        for part in scratch[:-1]:
            part.fill_(math.nan)
        out, lse, top = (torch.full_like(tensor, math.nan) for tensor in (call.out, call.lse, call.max_logits))
        changed = evolve(call, out=out, lse=lse, options=AttentionOptions(top), scratch=scratch)
        attention_launch.prepare_fixed(changed, SMALL, 2)(changed.tensors)
        answers.append(Answer(out, lse, top))
        assert trial.error(answers[-1]) <= 1

    assert splits > 2
    assert all(answer.equals(answers[0]) for answer in answers)


def test_a_row_of_one_split_has_the_bits_of_a_row_that_is_not_split() -> None:
    """In a batch of long rows and in one of short rows."""
    trial = Trial(layouts=(OCP, OCP), widths=(30, 30), tokens=9, tuning=SMALL, seed=13)
    tiles = sum(-(-width // SMALL.keys) for width in trial.widths)
    answer = trial.check()

    assert answer.equals(evolve(trial, splits=3, run=tiles).run_it())
    # three rows would do on some processors
    assert not answer.equals(evolve(trial, splits=3, run=1).run_it())


def test_flash_and_pro_have_selections_of_one_split() -> None:
    for name, topk in (("flash", 512), ("pro", 1024)):
        layer = ModelGeometry.preset(name).layer_of_kind("c4a")
        assert layer.topk == topk
        for keys in (16, 64, 128):
            tuning = Tuning(keys=keys)
            tiles = tuning.tiles_per_split(layer)
            assert attention_launch.fixed_splits(layer.window + layer.topk, tuning, tiles) == 1
            assert tuning.tiles_per_split(evolve(layer, topk=2048)) == -(-640 // keys) + 1


def test_a_row_that_is_not_cut_does_not_depend_on_the_rows_beside_it() -> None:
    trial = Trial(layouts=(OCP, OCP), widths=(60, 50), tuning=SMALL, seed=8)
    answer = trial.check()

    assert answer.equals(evolve(trial, pages_seed=9).run_it())
    for row in range(trial.tokens):
        assert answer.equals(trial.rows(row).run_it(), slice(row, row + 1))


def test_parts_are_enough_to_fill_a_device_and_no_more_than_there_are_tiles() -> None:
    tuning = Tuning(heads=64, keys=64)
    for tokens in (0, 1, 2, 7, 64, 1000):
        for heads in (1, 64, 65, 128):
            for width in (0, 1, 64, 640, 8320):
                splits = attention_launch.splits_of(tokens, heads, width, tuning, 132)
                rows = tokens * -(-heads // 64)
                assert 1 <= splits <= max(1, -(-width // 64))
                assert splits == 1 or rows * splits <= 132


def test_scratch_is_what_its_bound_says_at_most() -> None:
    layer: LayerGeometry = Trial(layouts=(OCP, OCP)).layer
    for rows in (1, 2, 66, 132):
        for splits in {1, 2, rows}:
            specs = attention_launch.scratch(rows // splits, layer, splits)
            assert simultaneous_bytes(list(specs)) <= attention_launch.scratch_bound(layer, rows)
    assert attention_launch.scratch(5, layer, 1) == ()
    assert attention_launch.scratch_bound(layer, 0) == 0


# mutants

MASK = 'z = tl.where(seen, z * (numbers.scale * LOG2E), -float("inf"))'
MUTANTS = {
    "lengths ignored": ("attention", "tl.minimum(tl.maximum(count, 0), numbers.width)", "count * 0 + numbers.width"),
    "absent lanes are keys of zeros": ("attention", MASK, "z = z * (numbers.scale * LOG2E)"),
    "sink twice": ("attention", "tl.exp2(tl.load(sink", "2.0 * tl.exp2(tl.load(sink"),
    "sink scaled": ("attention", "other=0.0) * LOG2E - largest", "other=0.0) * LOG2E * 0.5 - largest"),
    "sink forgotten by the reduction": ("reduce", "tl.load(sink + head) * LOG2E", "0.0 * tl.load(sink + head) - 1e4"),
    "last tile forgotten": ("attention", "first_tiles = tl.cdiv(window_length, N)", "first_tiles = window_length // N"),
    "sums not brought to the new maximum": ("attention", "acc_left * shrink[:, None]", "acc_left"),
    "parts without keys added": ("reduce", '(its_lse > -float("inf"))[:, None]', "(split < splits)[:, None]"),
    "parts not brought to the new maximum": ("reduce", "acc * shrink", "acc"),
    "rows of one split combined": ("reduce", "if count <= 1:", "if count <= 0:"),
    "last split forgotten": ("attention", "cdiv(tiles, tiles_per_split), 1)", "cdiv(tiles, tiles_per_split) - 1, 1)"),
    "lse in base 2": ("attention", "(largest + tl.log2(total)) * LN2", "(largest + tl.log2(total))"),
    "one dialect for both caches": ("attention", "else inside == WINDOW.fnuz", "else WINDOW.fnuz"),
    "one scale for two groups": ("keys", "shift + 16", "shift"),
    "scale of another group": ("keys", "column // FORM.group", "column // (FORM.group + 1)"),
    "scales of a page of 64": ("keys", "behind = page + pages.size.to(tl.int64) * 576", "behind = page + 64 * 576"),
    "rope from the codes": ("keys", "(data + PACKED))", "data)"),
}


@pytest.fixture(scope="module")
def witnesses() -> list[Trial]:
    """Few trials, in which each of the kernel's ways is taken."""
    plain = Trial(layouts=(OCP, FNUZ), widths=(20, 33), pages=(5, 64), tokens=3, tuning=SMALL, seed=8)
    tiny = Trial(layouts=(TINY, TINY), widths=(40, 9), pages=(5, 2), tokens=3, tuning=SMALL, seed=3)
    counted = evolve(tiny, run=2)
    return [tiny, evolve(tiny, splits=4), evolve(counted, splits=parts(counted)), plain]


def test_without_a_bug_the_witnesses_are_right(witnesses: list[Trial]) -> None:
    for trial in witnesses:
        trial.check()
        for segment in trial.segments:
            assert sum(len(segment.named(row)) > 1 for row in range(trial.tokens)) > 1


@pytest.mark.mutation
@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_found(name: str, witnesses: list[Trial], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mutate(monkeypatch, tmp_path, *MUTANTS[name])

    assert any(trial.error(trial.run_it()) > 1 for trial in witnesses)


FAR_MUTANTS = {
    "pages": ("keys", "page.to(tl.int64) * page_stride", "(page * page_stride.to(tl.int32)).to(tl.int64)"),
    "lists": (
        "attention",
        "rows + token * numbers.index_stride",
        "rows + token.to(tl.int32) * numbers.index_stride.to(tl.int32)",
    ),
    "queries": ("attention", "token * strides.q_token", "token.to(tl.int32) * strides.q_token.to(tl.int32)"),
    "outputs": ("attention", "token * strides.out_token", "token.to(tl.int32) * strides.out_token.to(tl.int32)"),
    "lse": ("attention", "token * strides.lse_token", "token.to(tl.int32) * strides.lse_token.to(tl.int32)"),
}


@pytest.mark.mutation
@pytest.mark.skipif(not INTERPRETED, reason="a wrong address ends a device's context")
@pytest.mark.parametrize("name", FAR_MUTANTS)
def test_an_address_of_32_bits_is_seen(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    trial = Trial(layouts=(OCP,), pages=(2,), widths=(9,), tokens=2, tuning=SMALL, seed=22)
    mutate(monkeypatch, tmp_path, *FAR_MUTANTS[name])

    assert not trial.check().equals(far_away(trial))


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 48, 53, 64, 255, 256, 1000, 65537, 2**30, 2**30 + 1, 2**31 - 1])
def test_a_slot_is_divided_by_its_page_size_without_a_division(size: int) -> None:
    factor, log = attention_launch.divider(size)
    slots = {0, 1, size - 1, size, size + 1, 2**31 - 1, 2**31 - 2, 2**31 // size * size - 1, 2**31 // size * size}
    slots |= {min(k * size + d, 2**31 - 1) for k in (2, 3, 1000, 2**20) for d in (-1, 0, 1) if k * size < 2**31}

    assert -(2**31) <= factor < 2**31
    assert all((2 * s * (factor % 2**32)) >> (32 + log) == s // size for s in slots if s < 2**31)

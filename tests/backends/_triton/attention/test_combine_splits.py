"""Combined splits of a row equal the float64 sum, however many splits are loaded together."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from attrs import evolve, frozen
from torch import Tensor

from dsv4attn.backends._triton.attention import launch as attention_launch
from dsv4attn.backends._triton.attention.meta_calls import meta_calls, meta_pages
from dsv4attn.backends._triton.interpreted import INTERPRETED
from dsv4attn.backends._triton.launching.recorded import meta_cache
from dsv4attn.backends._triton.launching.runtime import launch, observed
from dsv4attn.backends._triton.tuning import Tuning, padded
from dsv4attn.core.model.geometry import LayerKind
from dsv4attn.testing.kit.factories import tiny_geometry
from tests.backends._triton.attention.attention_trials import TINY, Answer, Trial
from tests.backends._triton.attention.mutants import mutate
from tests.backends._triton.cache.caches import DEVICE

TOKENS, HEADS, FAR = 3, 3, 40
EMPTY_LSE = 123.0
LN2 = math.log(2.0)


@frozen
class Sums:
    """Rows in parts, and how they are added up. dim, rope: columns, and how many of them the rotation turns."""

    parts: int = 11
    together: int = 4
    dim: int = 512
    rope: int = 64
    dtype: torch.dtype = torch.float32
    sink: bool = True
    turned: bool = False
    trailing: int = 0
    """Further splits, all without keys, after the splits of each row."""
    row: int | None = None
    """Only this row."""

    @property
    def rows(self) -> slice:
        """Rows of the tensors that `tensors` draws."""
        return slice(None) if self.row is None else slice(self.row, self.row + 1)

    def tensors(self) -> dict[str, Tensor]:
        """Tensors part [T, parts, H, D], part_lse and part_max [T, parts, H], sink [H], positions [T], table.

        The first token has no keys at all, the second in a few parts only. A part without keys was never written.
        """
        rng = np.random.default_rng(self.parts)
        part = rng.standard_normal((TOKENS, self.parts, HEADS, self.dim))
        lse = rng.standard_normal((TOKENS, self.parts, HEADS)) * 20
        has_part = rng.random((TOKENS, self.parts, HEADS)) < 0.7
        has_part[0] = False
        has_part[1, 1:-1] = False
        has_part[2, (0, -1)] = True
        lse[~has_part], part[~has_part] = -np.inf, np.nan
        turns = rng.uniform(0, 7, (FAR, self.rope // 2))
        arrays = {
            "part": part,
            "part_lse": lse,
            "part_max": lse - 1,
            "sink": np.array([-np.inf, 0.7, 30.0]),
            "positions": np.array([3, 0, FAR - 1]),
            "table": np.concatenate([np.cos(turns), np.sin(turns)], 1),
        }
        values = {name: torch.from_numpy(value) for name, value in arrays.items()}
        return {name: value if name == "positions" else value.float() for name, value in values.items()}

    def run_it(self) -> Answer:
        """What the kernel gives. Memory after the parts is NaN."""
        tensors = self.tensors()
        for name in ("part", "part_lse", "part_max", "positions"):
            tensors[name] = tensors[name][self.rows]
        tokens = tensors["part"].shape[0]
        for name in ("part", "part_lse", "part_max"):
            fill = math.nan if name == "part" else -math.inf
            further_parts = torch.full((tokens, self.trailing, *tensors[name].shape[2:]), fill)
            whole = torch.cat([tensors[name], further_parts], 1)
            after = torch.full((self.together, *whole.shape[1:]), math.nan)
            tensors[name] = torch.cat([whole, after])[:tokens]
        tensors = {name: tensor.to(DEVICE) for name, tensor in tensors.items()}
        out = torch.full((tokens, HEADS, self.dim), math.nan, dtype=self.dtype, device=DEVICE)
        lse, top = (torch.full((tokens, HEADS), math.nan, device=DEVICE) for _ in range(2))
        angles = (tensors["positions"], tensors["table"]) if self.turned else (None, None)
        parts = tensors["part"], tensors["part_lse"], tensors["part_max"]
        sink = tensors["sink"] if self.sink else None
        strides = (*out.stride()[:2], *lse.stride(), *top.stride())
        numbers = (*strides, self.parts + self.trailing, self.rope, FAR, EMPTY_LSE)
        constants = {
            "H": HEADS,
            "D": self.dim,
            "DP": padded(self.dim),
            "ROPE": self.rope,
            "UNIT": 1,
            "N": self.together,
            "EXACT_CASTS": not INTERPRETED,
            "PDL": False,
        }
        args = (*parts, None, out, lse, top, sink, *angles, *numbers)
        kernel = vars(attention_launch)["reduce"]  # which mutants replace
        launch(kernel, (tokens * HEADS,), args, constants, num_warps=4)
        return Answer(out.cpu(), lse.cpu(), top.cpu())

    def expected(self) -> Answer:
        """The same in float64, of the parts that have keys."""
        tensors = {name: tensor.double().numpy() for name, tensor in self.tensors().items()}
        out, lse = np.zeros((TOKENS, HEADS, self.dim)), np.full((TOKENS, HEADS), EMPTY_LSE)
        top = np.full((TOKENS, HEADS), -np.inf)
        for token, head in np.ndindex(TOKENS, HEADS):
            its_lse = tensors["part_lse"][token, :, head]
            keys = np.isfinite(its_lse)
            if keys.any():
                weight = np.exp2(its_lse[keys])
                sink = np.exp(tensors["sink"][head]) if self.sink else 0.0
                out[token, head] = weight @ tensors["part"][token, keys, head] / (weight.sum() + sink)
                lse[token, head] = np.log(weight.sum())
                top[token, head] = tensors["part_max"][token, keys, head].max() * LN2
            if self.turned:
                cos, sin = np.split(tensors["table"][int(tensors["positions"][token])], 2)
                first = self.dim - self.rope
                pairs = (out[token, head, first::2] + 1j * out[token, head, first + 1 :: 2]) * (cos - 1j * sin)
                out[token, head, first::2], out[token, head, first + 1 :: 2] = pairs.real, pairs.imag
        return Answer(*(torch.from_numpy(array)[self.rows] for array in (out, lse, top)))

    def error(self) -> float:
        """Largest error of what the kernel gives; infinite where it gives NaN, or infinities that are not due."""
        largest = 0.0
        for actual, expected in zip(self.run_it(), self.expected(), strict=True):
            assert actual is not None
            assert expected is not None
            off = torch.where(
                actual.double() == expected, 0.0, (actual.double() - expected).abs() / (1 + expected.abs())
            )
            largest = max(largest, off.nan_to_num(math.inf, math.inf).max().item())
        return largest


BUDGET = 1e-5
CASES = {
    "one": Sums(parts=1),
    "fewer than go together": Sums(parts=3),
    "as many as go together": Sums(parts=4),
    "one more": Sums(parts=5),
    "many": Sums(),
    "many, alone": Sums(together=1),
    "many, all together": Sums(together=16),
    "many, without a sink": Sums(sink=False),
    "many, turned": Sums(turned=True),
    "few columns": Sums(dim=40, rope=8, turned=True),
    "unaligned columns": Sums(dim=23, rope=0),
}


@pytest.mark.parametrize("name", CASES)
def test_parts_are_added_up_however_many_are_loaded_together(name: str) -> None:
    assert CASES[name].error() <= BUDGET


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_parts_without_keys_after_a_row_and_rows_beside_it_change_no_bits(dtype: torch.dtype) -> None:
    sums = Sums(dtype=dtype)
    answer = sums.run_it()

    for trailing in (1, 2, 7):
        assert answer.equals(evolve(sums, trailing=trailing).run_it())
    for row in range(TOKENS):
        assert answer.equals(evolve(sums, row=row, trailing=row).run_it(), slice(row, row + 1))


@pytest.mark.parametrize("parts", [1, 2, 8])
def test_a_tuning_says_how_many_are_loaded_together(parts: int) -> None:
    tuning = Tuning(heads=16, keys=16, reduce_parts=parts)
    trial = Trial(layouts=(TINY,), widths=(40,), tokens=1, splits=3, tuning=tuning)
    with observed() as seen:
        trial.check()
    layer = tiny_geometry(head_dim=32, rope_dim=8).layer_of_kind(LayerKind.SWA)
    calls = meta_calls(layer, meta_pages([meta_cache(TINY)]), torch.bfloat16, sinks=[True], lses=[True])
    listed = attention_launch.variants(calls, tuning)

    for variants in (seen, listed):
        assert [dict(variant.constants)["N"] for variant in variants if variant.name == "reduce"] == [parts]


MUTANTS = {
    "parts without keys read": ('(its_lse > -float("inf"))[:, None]', "(split < count)[:, None]"),
    "last parts forgotten": ("range(0, count, N)", "range(0, count - count % N, N)"),
    "first parts alone": ("range(0, count, N)", "range(0, min(count, N), N)"),
    "every other part twice": ("begin + tl.arange(0, N)", "begin + tl.arange(0, N) // 2 * 2"),
    "sums not brought to the new maximum": ("acc * shrink", "acc"),
    "weights not brought to the new maximum": ("total * shrink", "total"),
    "largest logits of the last parts": ("tl.maximum(top, tl.max(", "tl.maximum(top * 0 + NOTHING, tl.max("),
}


@pytest.mark.mutation
@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_found(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mutate(monkeypatch, tmp_path, "reduce", *MUTANTS[name])

    assert Sums().error() > 100 * BUDGET


def test_bits_that_depend_on_the_number_of_parts_are_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Steps from the last part to the first: right, but other parts go together if there are more of them."""
    lane, sums = "begin + tl.arange(0, N)", Sums()
    mutate(monkeypatch, tmp_path, "reduce", lane, f"tl.where({lane} < count, count - 1 - ({lane}), count)")

    assert sums.error() <= BUDGET
    assert not sums.run_it().equals(evolve(sums, trailing=1).run_it())

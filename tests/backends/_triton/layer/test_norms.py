"""Norms of the latent of q and of the key: those of the definition, which is that of float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import nan

import attrs
import pytest
import torch
from torch import Tensor

from dsv4attn.backends._triton.launching.runtime import observed
from dsv4attn.backends._triton.layer.projections import norms
from dsv4attn.core.torch_ops.norms import norm_q_kv as definition
from dsv4attn.errors import ArgumentError
from tests.backends._triton.cache.caches import DEVICE, seeded, strided

BF16, FP32 = torch.bfloat16, torch.float32
EPS = 1e-3
Op = Callable[..., tuple[Tensor, Tensor]]


@attrs.define(eq=False, slots=False)
class Rows:
    """Slices of one random product, and weights of both norms. Odd seeds put rows out of step with 16 bytes."""

    q_dim: int = 40
    kv_dim: int = 24
    source: torch.dtype = FP32
    weight: torch.dtype = FP32
    out: torch.dtype = BF16
    count: int = 5
    seed: int = 0

    def __attrs_post_init__(self) -> None:
        g = seeded(self.seed)
        both = torch.randn(self.count, self.q_dim + self.kv_dim, generator=g).to(self.source)
        both[:1] *= 1e-3
        self.q, self.kv = strided(both, 8 - 5 * (self.seed % 2)).split([self.q_dim, self.kv_dim], -1)
        scale = (1 + 0.3 * torch.randn(self.q_dim + self.kv_dim, generator=g)).to(self.weight).to(DEVICE)
        self.weights = scale[: self.q_dim].clone(), scale[self.q_dim :].clone()

    def run(self, op: Op = norms.norm_q_kv) -> tuple[Tensor, Tensor]:
        """Both results."""
        q, kv = op(self.q, self.kv, *self.weights, EPS, self.out)
        return q.cpu(), kv.cpu()

    def exact(self) -> tuple[Tensor, Tensor]:
        """In float64."""
        results = []
        for x, weight in zip((self.q.cpu(), self.kv.cpu()), self.weights, strict=True):
            wide = x.double()
            results.append(wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.cpu().double())
        return results[0], results[1]


def near(actual: tuple[Tensor, Tensor], rows: Rows) -> bool:
    """Whether results have their dtype and shape, and are float64's, rounded once."""
    bound = 2.0**-8 if rows.out == BF16 else 2e-6
    return all(
        (one.dtype, one.shape) == (rows.out, exact.shape)
        and one.is_contiguous()
        and bool(((one.double() - exact).abs() <= bound * 1.01 * exact.abs()).all())
        for one, exact in zip(actual, rows.exact(), strict=True)
    )


@pytest.mark.parametrize("op", [norms.norm_q_kv, definition], ids=["kernel", "torch"])
@pytest.mark.parametrize("out", [BF16, FP32], ids=str)
def test_both_norms_are_those_of_float64(op: Op, out: torch.dtype) -> None:
    for seed, (source, weight) in enumerate([(FP32, FP32), (BF16, FP32), (FP32, BF16), (BF16, BF16)]):
        for dims in ((40, 24), (33, 7), (1024, 512)):
            rows = Rows(*dims, source, weight, out, seed=seed)
            assert near(rows.run(op), rows)


def test_bits_of_a_row_depend_on_that_row_alone() -> None:
    """In torch with the option for it."""
    rows = Rows(64, 32, count=70)
    for op in (norms.norm_q_kv, partial(definition, deterministic=True)):
        whole = rows.run(op)
        for part in (slice(0, 1), slice(3, 9), slice(69, None)):
            few = op(rows.q[part], rows.kv[part], *rows.weights, EPS, BF16)
            assert all(torch.equal(some.cpu(), all_rows[part]) for some, all_rows in zip(few, whole, strict=True))


def test_a_step_without_rows_and_what_is_no_number() -> None:
    assert [result.shape for result in Rows(count=0).run()] == [(0, 40), (0, 24)]
    rows = Rows()
    rows.kv[2, 3] = nan
    q, kv = rows.run()
    assert not q.isnan().any()
    assert kv[2].isnan().all()
    assert not kv[[0, 1, 3, 4]].isnan().any()


def test_two_dtypes_are_widened() -> None:
    """Where a weight stays alone, its product has another dtype."""
    rows = Rows(source=BF16)
    rows.kv = rows.kv.float()
    rows.weights = rows.weights[0].bfloat16(), rows.weights[1]
    assert near(rows.run(), rows)


def test_weights_of_other_sizes_and_rows_apart_in_the_last_dimension_are_refused_before_a_launch() -> None:
    rows = Rows()
    with observed() as seen:
        with pytest.raises(ArgumentError, match=r"^q_weight: expected \[40\]"):
            norms.norm_q_kv(rows.q, rows.kv, rows.weights[1], rows.weights[1], EPS, BF16)
        with pytest.raises(ArgumentError, match=r"^q: "):
            norms.norm_q_kv(rows.q[:, ::2], rows.kv, *rows.weights, EPS, BF16)
        with pytest.raises(ArgumentError, match=r"^kv: expected \[T, _\] .* with T=5"):
            norms.norm_q_kv(rows.q, rows.kv[:3], *rows.weights, EPS, BF16)
        with pytest.raises(ArgumentError, match=r"^kv_weight: expected a dense tensor, of stride 1"):
            norms.norm_q_kv(rows.q, rows.kv, rows.weights[0], rows.weights[0][:24].repeat_interleave(2)[::2], EPS, BF16)
    assert seen == []


@pytest.mark.parametrize("aligned", [False, True])
def test_warm_up_foresees_every_form_that_is_launched(aligned: bool) -> None:
    for seed in range(8):
        out = (BF16, FP32)[seed // 4]
        source, weight = (FP32, out)[seed % 2], (FP32, BF16)[seed // 2 % 2]
        rows = Rows(32, 16, source, weight, out, seed=2 * seed if aligned else seed)
        with observed() as seen:
            rows.run()
        assert set(seen) <= {*norms.variants(32, 16, out, (FP32, BF16), aligned_rows=aligned)}
        assert len(seen) == 1


# mutants


def weights_changed(rows: Rows) -> None:
    rows.weights = rows.weights[0].flip(0), rows.weights[1]


def a_row_off(rows: Rows) -> None:
    rows.kv = rows.kv.roll(1, 0)


@pytest.mark.mutation
@pytest.mark.parametrize("plant", [weights_changed, a_row_off])
def test_a_planted_bug_is_found(plant: Callable[[Rows], None]) -> None:
    rows, wrong = Rows(), Rows()
    plant(wrong)
    assert near(rows.run(), rows)
    assert not near(wrong.run(), rows)

"""Hyper-connections, judged by the kit in float64 and by their definition in torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from math import inf, nan
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from dsv4attn.backends._triton.launching.runtime import architecture, launch, observed
from dsv4attn.backends._triton.layer import hyper_connections as hc
from dsv4attn.backends._triton.layer import hyper_connections_tuning as tuning
from dsv4attn.backends._triton.layer import hyper_connections_variants as forms
from dsv4attn.backends._triton.layer.hyper_connections_tuning import Block, Tile, Tuning
from dsv4attn.backends.triton.launch import GenericBackend
from dsv4attn.testing.case import chosen
from dsv4attn.testing.cases import CASES
from dsv4attn.testing.conform import Subject, conform
from tests.backends._triton.cache.caches import DEVICE, each_dtype, seeded, strided
from tests.backends._triton.layer.kernels_factors import parts_kernel
from tests.layer_ops import TorchOps

TORCH = TorchOps()
TINY = Tuning(
    few=Tile(4, 32, 4),
    many=Tile(2, 16, 4, held=True, programs=1),
    fused_few=Tile(4, 32, 4),
    fused_many=Tile(2, 16, 4, held=True, programs=1),
    plain=Tile(4, 16, 4),
    chunk=7,
    mix_few=Block(1, 16, 4),
    mix_many=Block(2, 32, 4),
    whole_few=Block(1, 16, 4),
    whole_many=Block(4, 64, 4),
    summed=64,
    post=Block(2, 16, 4),
)
"""Several splits, tiles of a program, chunks and blocks, with a few tokens of a few columns."""


@contextmanager
def with_tiles(tiles: Tuning, few: int = 4) -> Iterator[None]:
    """Use these tiles in the steps, and those for few tokens up to so many."""
    with ExitStack() as stack:
        for module in (hc, forms):
            stack.enter_context(mock.patch.object(module, "tuning_for", return_value=tiles))
        for module in (hc, forms, tuning):
            stack.enter_context(mock.patch.object(module, "FEW", few))
        yield


class Steps(TorchOps):
    """The kernels, and torch for what is not theirs."""

    mhc_pre = staticmethod(hc.mhc_pre)
    mhc_post = staticmethod(hc.mhc_post)
    mhc_fused_post_pre = staticmethod(hc.mhc_fused_post_pre)
    hc_head = staticmethod(hc.hc_head)
    mhc_pre_delayed = staticmethod(hc.mhc_pre_delayed)
    mhc_fused_post_pre_delayed = staticmethod(hc.mhc_fused_post_pre_delayed)
    mhc_collapse = staticmethod(hc.mhc_collapse)


KERNELS = Steps()


class Owner(GenericBackend):
    """A backend with these steps."""

    @property
    def layer_ops(self) -> Any:
        """The ops."""
        return KERNELS.table()


@pytest.mark.parametrize(
    "name", [
        "mhc-pre-bf16", "mhc-fused-norm-bf16", "hc-head-eps", "mhc-fused-fp32", "delayed-pre-bf16",
        "delayed-first-bf16", "delayed-fused-fp32", "delayed-collapse-bf16", "delayed-norm-bf16", "delayed-apart",
    ],
)  # fmt: skip
def test_the_kit_passes_with_many_splits_tiles_and_chunks(name: str) -> None:
    with with_tiles(TINY, 2):
        certificate = conform(Subject.of(Owner(), device=DEVICE.type), chosen(CASES, name))

    assert [(o.case.name, o.state, o.message) for o in certificate.outcomes] == [(name, "passed", "")]


NAMES = "post", "comb", "entering", "moved", "fused", "fused_post", "fused_comb", "fused_entering", "head"


class Call:
    """Random streams with rows apart, and the parameters of their mixes."""

    def __init__(
        self,
        n: int,
        hidden: int,
        count: int,
        dtype: torch.dtype = torch.bfloat16,
        seed: int = 0,
        *,
        normed: bool = False,
        pad: int = 0,
    ) -> None:
        """Draw one. pad: elements of NaN behind each row, and streams behind those of a token."""
        g = seeded(seed)

        def drawn(*shape: int, dtype: torch.dtype = torch.float32, pad: int = 0) -> Tensor:
            return strided(torch.randn(*shape, generator=g).to(dtype), pad)

        mixes = 2 * n + n * n
        self.x = drawn(count, hidden, dtype=dtype, pad=pad)
        wide = drawn(count, n + (pad > 0), hidden, dtype=dtype, pad=pad)
        self.residual = wide[:, :n]
        self.post = drawn(count, n + pad, 1)[:, :n].sigmoid() if pad == 0 else drawn(count, n + pad, 1)[:, :n]
        self.comb = drawn(count, n, n, pad=pad)
        self.fn = drawn(mixes, n * hidden, pad=pad) / (n * hidden) ** 0.5
        self.scale = torch.tensor([0.7, 1.3, 2.1], device=DEVICE)
        self.base = drawn(mixes)
        self.norm = drawn(hidden, dtype=dtype) if normed else None
        self.previous = drawn(count, n, pad=pad)
        self.eps = 1e-3, 0.02, 0.005

    def mixing(self, repeat: int = 3, factor: float = 1.5) -> tuple[Any, ...]:
        """Arguments of `mhc_pre` behind the streams."""
        return self.fn, self.scale, self.base, *self.eps, factor, repeat, self.norm, 0.01

    def run(self, steps: Any, repeat: int = 3, **options: Any) -> dict[str, Tensor]:
        """All results, by name. The streams must stay."""
        before = self.residual.clone(), self.x.clone()
        post, comb, entering = steps.mhc_pre(self.residual, *self.mixing(repeat), **options)
        moved = steps.mhc_post(self.x, self.residual, self.post, self.comb)
        fused = steps.mhc_fused_post_pre(self.x, self.residual, self.post, self.comb, *self.mixing(repeat), **options)
        n = self.residual.shape[1]
        gate = self.fn[:n], self.scale[:1], self.base[:n], 1e-3, 0.03
        head = steps.hc_head(self.residual, *gate, **options)
        later = steps.mhc_pre_delayed(self.residual, self.previous, *self.mixing(repeat), **options)
        early = steps.mhc_pre_delayed(self.residual, None, *self.mixing(repeat), **options)
        around = self.x, self.residual, self.post, self.comb, self.previous
        delayed = steps.mhc_fused_post_pre_delayed(*around, *self.mixing(repeat), **options)
        collapsed = steps.mhc_collapse(self.residual, self.previous)
        for now, then in zip((self.residual, self.x), before, strict=True):
            assert torch.equal(now.nan_to_num(7), then.nan_to_num(7))
        found = dict(zip(NAMES, (post, comb, entering, moved, *fused, head), strict=True))
        for name, made in (("later", later), ("early", early), ("delayed", delayed[1:])):
            found |= dict(zip((f"{name}_{result}" for result in ("pre", *NAMES[:3])), made, strict=True))
        return found | {"delayed": delayed[0], "collapsed": collapsed}

    def check(self, repeat: int = 3, **options: Any) -> None:
        """Compare with the definition; what follows new streams, by those that were found.

        A device may round some of them to the other neighbour.
        """
        found, wanted = self.run(KERNELS, repeat, **options), self.run(TORCH, repeat)
        after = TORCH.mhc_pre(found["fused"], *self.mixing(repeat))
        wanted |= dict(zip(("fused_post", "fused_comb", "fused_entering"), after, strict=True))
        next_one = TORCH.mhc_pre_delayed(found["delayed"], self.previous, *self.mixing(repeat))
        wanted |= dict(zip((f"delayed_{name}" for name in ("pre", *NAMES[:3])), next_one, strict=True))
        near(found, wanted)


def near(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """Fail unless results differ by sums in another order: by a unit of bf16, or by a few of fp32."""
    for name, each in found.items():
        assert each.shape == wanted[name].shape, name
        assert each.dtype == wanted[name].dtype, name
        assert each.is_contiguous(), name
        unit = 2.0**-7 if each.dtype == torch.bfloat16 else 2.0**-18
        error = (each.double() - wanted[name].double()).abs()
        assert (error <= unit * wanted[name].abs() + 2.0**-19).all(), f"{name}: {float(error.max())}"


SIZES = [(4, 96, 5), (4, 100, 9), (3, 50, 3), (8, 40, 2), (1, 33, 2), (2, 65, 1), (5, 24, 4), (4, 1, 3)]
each_size = pytest.mark.parametrize("sizes", SIZES, ids=str)


@each_size
@each_dtype
def test_the_steps_are_their_definition(sizes: tuple[int, int, int], dtype: torch.dtype) -> None:
    for seed, (normed, pad) in enumerate(((False, 0), (True, 3), (True, 8))):
        Call(*sizes, dtype, seed, normed=normed, pad=pad).check()


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("count", [1, 2, 7, 8, 23])
def test_every_edge_of_tiles_and_chunks(count: int, deterministic: bool) -> None:
    with with_tiles(TINY):
        for seed, hidden in enumerate((32, 48, 40)):
            Call(4, hidden, count, seed=seed, normed=bool(seed % 2), pad=8 * seed).check(deterministic=deterministic)


@pytest.mark.parametrize("repeat", [0, 1, 2, 20])
def test_iterations_are_counted(repeat: int) -> None:
    for n in (3, 4):
        Call(n, 16, 3).check(repeat)


def test_weights_of_another_dtype_than_the_streams() -> None:
    call = Call(4, 32, 3, normed=True)
    assert call.norm is not None
    call.norm = call.norm.float()
    call.check()


def test_nothing_is_launched_without_tokens() -> None:
    call = Call(4, 32, 3)
    call.residual, call.x = call.residual[:0], call.x[:0]
    call.post, call.comb, call.previous = call.post[:0], call.comb[:0], call.previous[:0]
    with observed() as seen:
        found = call.run(KERNELS)

    assert seen == []
    assert {name: tuple(each.shape) for name, each in found.items()} == {
        "post": (0, 4, 1), "comb": (0, 4, 4), "entering": (0, 32), "moved": (0, 4, 32), "fused": (0, 4, 32),
        "fused_post": (0, 4, 1), "fused_comb": (0, 4, 4), "fused_entering": (0, 32), "head": (0, 32),
        "delayed": (0, 4, 32), "collapsed": (0, 32),
    } | {
        f"{name}_{result}": shape
        for name in ("later", "early", "delayed")
        for result, shape in (("pre", (0, 4)), ("post", (0, 4, 1)), ("comb", (0, 4, 4)), ("entering", (0, 32)))
    }  # fmt: skip


Spoil = Callable[[Call], None]


def a_stream(call: Call) -> None:
    call.residual[2, 1, 5] = nan


def an_output(call: Call) -> None:
    call.x[2, 7] = nan


def an_infinity(call: Call) -> None:
    call.residual[2, 0, 0] = inf


def a_weight(call: Call) -> None:
    call.comb[2, 3, 1] = nan


@pytest.mark.parametrize("tiles", [TINY, tuning.INTERPRETER], ids=["tiny", "large"])
@pytest.mark.parametrize("spoil", [a_stream, an_output, an_infinity, a_weight])
def test_what_is_no_number_reaches_its_own_token_as_the_definition_says(spoil: Spoil, tiles: Tuning) -> None:
    call = Call(4, 48, 6, normed=True)
    with with_tiles(tiles):
        clean = call.run(KERNELS)
        spoil(call)
        wanted, found = call.run(TORCH), call.run(KERNELS)
    others = [0, 1, 3, 4, 5]
    for name, each in found.items():
        assert torch.equal(each[others], clean[name][others]), name
        assert torch.equal(each[2].isnan(), wanted[name][2].isnan()), name


def test_bits_of_a_token_do_not_depend_on_the_number_of_tokens_if_that_is_asked_for() -> None:
    call = Call(4, 48, 9, normed=True)
    found = []
    with with_tiles(TINY):
        for first in (8, 5, 0):
            part = Call(4, 48, 9 - first, normed=True)
            for name in ("fn", "scale", "base", "norm"):
                setattr(part, name, getattr(call, name))
            for name in ("x", "residual", "post", "comb", "previous"):
                setattr(part, name, getattr(call, name)[first:])
            found.append({name: each[-1] for name, each in part.run(KERNELS, deterministic=True).items()})

    for other in found[1:]:
        assert [name for name in other if not torch.equal(other[name], found[0][name])] == []


def test_parts_of_a_factor_are_bf16_numbers_whose_sum_it_is() -> None:
    g = seeded()
    factors = torch.randn(1024, generator=g) * torch.exp2(torch.randint(-60, 60, (1024,), generator=g).float())
    factors[:4] = torch.tensor([0.0, -0.0, 1.0, 3.3895314e38])
    out = torch.empty(3, 1024, device=DEVICE)
    launch(parts_kernel, (1,), (factors.to(DEVICE), out), {"C": 1024})

    assert torch.equal(out, out.bfloat16().float())
    assert torch.equal(out[0] + out[1] + out[2], factors.to(DEVICE))
    assert torch.equal((out[0].double() + out[1] + out[2]).cpu(), factors.double())


def test_temporaries_stay_within_their_bound() -> None:
    for n, hidden, count in ((4, 96, 5), (4, 300, 70), (8, 64, 3), (4, 16, 20)):
        call = Call(n, hidden, count)
        for tile in (TINY.few, TINY.many, TINY.plain):
            with with_tiles(TINY):
                chunks = [*hc._chunks(call.residual, call.fn, tile)]
                assert [first for first, *_ in chunks] == [*range(0, count, TINY.chunk)]
                assert max(products.nbytes for *_, products, _ in chunks) <= hc.transient_bytes(count, n, hidden)


@pytest.mark.parametrize("aligned", [False, True])
@each_dtype
def test_warm_up_foresees_every_form_that_is_launched(dtype: torch.dtype, aligned: bool) -> None:
    for tiles in (TINY, tuning.HOPPER):
        for seed, (count, hidden) in enumerate(((3, 64), (1, 64), (9, 64), (2, 30), (9, 30))):
            pad = 8 * seed if aligned else seed
            call = Call(2, hidden, count, dtype, seed, pad=pad, normed=bool(seed % 2))
            with with_tiles(tiles):
                with observed() as seen:
                    call.run(KERNELS)
                    call.run(KERNELS, deterministic=True)
                norm = None if call.norm is None else call.norm.dtype
                every = partial(forms.variants, 2, hidden, dtype, norm, aligned=aligned, arch=architecture())
                promised = {*every(), *every(delayed=True)}

            assert len({variant.name for variant in seen}) == 4
            assert set(seen) <= promised


def test_promises_of_alignment_only_take_forms_away() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        sizes = 4, 4096, dtype, torch.bfloat16
        for delayed in (False, True):
            some = set(forms.variants(*sizes, delayed=delayed))
            assert some < set(forms.variants(*sizes, delayed=delayed, aligned=False))


# mutants


def transposed(call: Call) -> None:
    call.comb = call.comb.mT.contiguous()


def one_stream_off(call: Call) -> None:
    call.residual = call.residual.roll(1, 1)


def a_column_of_the_mixes(call: Call) -> None:
    call.fn[3, -1] += 0.5


def another_eps(call: Call) -> None:
    call.eps = 1e-6, 1e-6, 1e-6


def another_sublayers_weights(call: Call) -> None:
    call.previous = call.previous.roll(1, 1)


@pytest.mark.parametrize(
    "plant", [another_sublayers_weights, transposed, one_stream_off, a_column_of_the_mixes, another_eps]
)
def test_a_planted_bug_is_found(plant: Spoil) -> None:
    call, wrong = Call(4, 40, 3), Call(4, 40, 3)
    plant(wrong)
    wanted, found = call.run(TORCH), wrong.run(KERNELS)

    with pytest.raises(AssertionError):
        near(found, wanted)

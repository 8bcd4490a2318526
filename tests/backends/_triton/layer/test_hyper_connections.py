"""Hyper-connections, compared with the oracle of the kit in float64 and with the ops in torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from itertools import product
from math import inf, nan
from typing import Any
from unittest import mock

import pytest
import torch
from attrs import evolve
from torch import Tensor

from dsv4attn.backends._triton.compiling.variant import Variant
from dsv4attn.backends._triton.interpreted import INTERPRETED
from dsv4attn.backends._triton.launching.runtime import launch, observed
from dsv4attn.backends._triton.layer.hyper_connections import launch as hc
from dsv4attn.backends._triton.layer.hyper_connections import tuning as hc_tuning
from dsv4attn.backends._triton.layer.hyper_connections.tuning import Block, Tile, Tuning
from dsv4attn.backends.triton.launch import GenericBackend
from dsv4attn.core.torch_ops.arguments import MixWeights
from dsv4attn.testing.case import chosen
from dsv4attn.testing.cases.table import CASES
from dsv4attn.testing.conform import Subject, conform
from dsv4attn.testing.oracle import layer as oracle_layer
from tests.backends._triton.cache.caches import DEVICE, each_dtype, seeded, strided
from tests.backends._triton.engine import launching_nothing
from tests.backends._triton.layer.kernels_factors import factors_kernel, parts_kernel
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
"""A few tokens of a few columns have several splits, tiles of a program, chunks and blocks."""


FIXED = evolve(
    TINY,
    many=Tile(2, 32, 4, held=True, programs=2),
    fused_many=Tile(4, 32, 4),
    chunk=5,
    mix_many=Block(1, 64, 4),
    whole_many=Block(2, 32, 4),
    heads_many=2,
    summed=128,
    by_factors=True,
    early=True,
)
"""Differs from TINY in each tile and block that deterministic calls of four streams or fewer take."""


@contextmanager
def with_tuning(tuning: Tuning, few: int = 4, fixed: Tuning | None = None) -> Iterator[None]:
    """Use this tuning in the ops and for their variants, with the tiles for few tokens up to `few` tokens.

    fixed: the tuning of deterministic calls; None: the same.
    """

    def tuning_for(_: str, *, deterministic: bool = False) -> Tuning:
        return fixed if deterministic and fixed is not None else tuning

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(hc, "tuning_for", tuning_for))
        for module in (hc, hc_tuning):
            stack.enter_context(mock.patch.object(module, "FEW", few))
        yield


class KernelOps(TorchOps):
    """The ops by kernels, and torch's other ops."""

    mhc_pre = staticmethod(hc.mhc_pre)
    mhc_post = staticmethod(hc.mhc_post)
    mhc_fused_post_pre = staticmethod(hc.mhc_fused_post_pre)
    hc_head = staticmethod(hc.hc_head)
    mhc_pre_delayed = staticmethod(hc.mhc_pre_delayed)
    mhc_fused_post_pre_delayed = staticmethod(hc.mhc_fused_post_pre_delayed)
    mhc_collapse = staticmethod(hc.mhc_collapse)


KERNELS = KernelOps()


class BackendOfKernels(GenericBackend):
    """A backend with these ops."""

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
    with with_tuning(TINY, 2):
        certificate = conform(Subject.of(BackendOfKernels(), device=DEVICE.type), chosen(CASES, name))

    assert [(o.case.name, o.state, o.message) for o in certificate.outcomes] == [(name, "passed", "")]


MIXES = "post", "comb", "layer_input"
DELAYED_MIXES = "pre", *MIXES


class StreamsCall:
    """Random streams, whose rows may lie apart, and the arguments of every op."""

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
        """Draw streams [count, n, hidden]. pad: elements of NaN after each row; with it, a stream after each token."""
        g = seeded(seed)

        def drawn(*shape: int, dtype: torch.dtype = torch.float32, pad: int = 0) -> Tensor:
            return strided(torch.randn(*shape, generator=g).to(dtype), pad)

        mixes = 2 * n + n * n
        self.x = drawn(count, hidden, dtype=dtype, pad=pad)
        self.residual = drawn(count, n + (pad > 0), hidden, dtype=dtype, pad=pad)[:, :n]
        self.post = drawn(count, n + pad, 1)[:, :n].sigmoid() if pad == 0 else drawn(count, n + pad, 1)[:, :n]
        self.comb = drawn(count, n, n, pad=pad)
        self.weights = MixWeights(
            fn=drawn(mixes, n * hidden, pad=pad) / (n * hidden) ** 0.5,
            hc_scale=torch.tensor([0.7, 1.3, 2.1], device=DEVICE),
            hc_base=drawn(mixes),
            rms_eps=1e-3,
            hc_pre_eps=0.02,
            hc_sinkhorn_eps=0.005,
            hc_post_mult_value=1.5,
            sinkhorn_repeat=3,
            norm_weight=drawn(hidden, dtype=dtype) if normed else None,
            norm_eps=0.01,
        )
        self.previous_pre = drawn(count, n, pad=pad)

    def change_weights(self, **fields: Any) -> None:
        """Replace fields of the weights."""
        self.weights = evolve(self.weights, **fields)

    def tokens(self, tokens: slice) -> StreamsCall:
        """The same call for some of the tokens."""
        part = copy(self)
        for name in ("x", "residual", "post", "comb", "previous_pre"):
            setattr(part, name, getattr(self, name)[tokens])
        return part

    def run(self, ops: Any, **options: Any) -> dict[str, Tensor]:
        """The results of all ops, by name. The streams must not change."""
        residual_copy, x_copy = self.residual.clone(), self.x.clone()
        x, residual, post, comb, weights = self.x, self.residual, self.post, self.comb, self.weights
        n = residual.shape[1]
        head_fn, head_scale, head_base = weights.fn[:n], weights.hc_scale[:1], weights.hc_base[:n]
        moved = ops.mhc_post(x, residual, post, comb)
        fused, *fused_mixes = ops.mhc_fused_post_pre(x, residual, post, comb, weights, **options)
        delayed, *delayed_mixes = ops.mhc_fused_post_pre_delayed(
            x, residual, post, comb, self.previous_pre, weights, **options
        )
        results = {
            **named("", MIXES, ops.mhc_pre(residual, weights, **options)),
            "moved": moved,
            "fused": fused,
            **named("fused_", MIXES, fused_mixes),
            "head": ops.hc_head(residual, head_fn, head_scale, head_base, 1e-3, 0.03, **options),
            **named("later_", DELAYED_MIXES, ops.mhc_pre_delayed(residual, self.previous_pre, weights, **options)),
            **named("first_", DELAYED_MIXES, ops.mhc_pre_delayed(residual, None, weights, **options)),
            "delayed": delayed,
            **named("delayed_", DELAYED_MIXES, delayed_mixes),
            "collapsed": ops.mhc_collapse(residual, self.previous_pre),
        }
        assert torch.equal(residual.nan_to_num(7), residual_copy.nan_to_num(7))
        assert torch.equal(x.nan_to_num(7), x_copy.nan_to_num(7))
        return results

    def check(self, **options: Any) -> None:
        """Compare the kernels with torch. What follows new streams is computed from the streams of the kernels.

        A device may round some of the new streams to the other neighbour.
        """
        results, expected = self.run(KERNELS, **options), self.run(TORCH)
        expected |= named("fused_", MIXES, TORCH.mhc_pre(results["fused"], self.weights))
        delayed_mixes = TORCH.mhc_pre_delayed(results["delayed"], self.previous_pre, self.weights)
        expected |= named("delayed_", DELAYED_MIXES, delayed_mixes)
        check_near(results, expected)


def named(prefix: str, names: Sequence[str], results: Sequence[Tensor]) -> dict[str, Tensor]:
    """Results by prefix and name."""
    return {f"{prefix}{name}": result for name, result in zip(names, results, strict=True)}


def check_near(results: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Fail unless results differ only by sums in another order: by a unit of bf16, or by a few of fp32."""
    for name, result in results.items():
        assert result.shape == expected[name].shape, name
        assert result.dtype == expected[name].dtype, name
        assert result.is_contiguous(), name
        unit = 2.0**-7 if result.dtype == torch.bfloat16 else 2.0**-18
        error = (result.double() - expected[name].double()).abs()
        assert (error <= unit * expected[name].abs() + 2.0**-19).all(), f"{name}: {float(error.max())}"


SIZES = [(4, 96, 5), (4, 100, 9), (3, 50, 3), (8, 40, 2), (1, 33, 2), (2, 65, 1), (5, 24, 4), (4, 1, 3)]
"""n, hidden, count."""


@pytest.mark.matrix
@pytest.mark.in_turn
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@each_dtype
def test_the_ops_are_those_of_torch(sizes: tuple[int, int, int], dtype: torch.dtype) -> None:
    for seed, (normed, pad) in enumerate(((False, 0), (True, 3), (True, 8))):
        StreamsCall(*sizes, dtype, seed, normed=normed, pad=pad).check()


@pytest.mark.matrix
@pytest.mark.in_turn
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("count", [1, 2, 7, 8, 23])
def test_every_edge_of_tiles_and_chunks(count: int, deterministic: bool) -> None:
    with with_tuning(TINY, fixed=FIXED):
        for seed, hidden in enumerate((32, 48, 40)):
            call = StreamsCall(4, hidden, count, seed=seed, normed=bool(seed % 2), pad=8 * seed)
            call.check(deterministic=deterministic)


BY_FACTORS = evolve(hc_tuning.INTERPRETER, by_factors=True, early=True, heads_few=4)


@pytest.mark.parametrize("tuning", [hc_tuning.INTERPRETER, BY_FACTORS], ids=["matrices", "factors"])
@pytest.mark.parametrize("repeat", [0, 1, 2, 20])
def test_iterations_are_counted(repeat: int, tuning: Tuning) -> None:
    for n in (3, 4):
        call = StreamsCall(n, 16, 3)
        call.change_weights(sinkhorn_repeat=repeat)
        with with_tuning(tuning):
            call.check()


@pytest.mark.parametrize("sizes", [(4, 96, 5), (3, 50, 9), (1, 33, 2), (5, 24, 2)], ids=str)
def test_mixes_by_factors_are_those_of_torch(sizes: tuple[int, int, int]) -> None:
    """Weights of the norm and of gates are loaded early too. Then one logit is far above the others of its row."""
    call = StreamsCall(*sizes, normed=True)
    with with_tuning(BY_FACTORS):
        call.check()
        call.weights.hc_base[-1] += 30
        call.change_weights(hc_sinkhorn_eps=1e-6, sinkhorn_repeat=20)
        call.check()


def test_factors_that_would_leave_fp32_are_not_used() -> None:
    """Without epsilon three columns that share one row make each iteration's factors three times as large."""
    call = StreamsCall(4, 32, 3)
    logits = torch.full((4, 4), -200.0)
    logits[0, :3] = logits[1:, 3] = 0.0
    call.weights.hc_base[8:] = logits.flatten()
    call.change_weights(hc_scale=torch.zeros(3, device=DEVICE), hc_sinkhorn_eps=0.0, sinkhorn_repeat=100)
    with with_tuning(BY_FACTORS):
        call.check()


@pytest.mark.parametrize("scale", [1.0, 100.0, 3e37])
def test_mixes_by_factors_are_near_those_in_float64(scale: float) -> None:
    logits = torch.randn(128, 4, 4, generator=seeded()) * scale
    for eps, repeat in product((hc_tuning.LEAST_EPS, 1e-6, 0.005), (1, 20)):
        out = torch.empty(128, 4, 4, device=DEVICE)
        launch(factors_kernel, (1,), (logits.to(DEVICE), out, repeat, eps), {"C": 128, "N": 4, "ASM": not INTERPRETED})
        expected = torch.from_numpy(oracle_layer.sinkhorn(logits.double().numpy(), eps, repeat))
        assert (out.cpu() - expected).abs().max() <= 2.0**-19, (eps, repeat)


def test_a_norm_weight_of_another_dtype_than_the_streams() -> None:
    call = StreamsCall(4, 32, 3, normed=True)
    assert call.weights.norm_weight is not None
    call.change_weights(norm_weight=call.weights.norm_weight.float())
    call.check()


def test_nothing_is_launched_without_tokens() -> None:
    with observed() as launched:
        results = StreamsCall(4, 32, 3).tokens(slice(0)).run(KERNELS)

    assert launched == []
    shapes = {
        "pre": (0, 4), "post": (0, 4, 1), "comb": (0, 4, 4), "layer_input": (0, 32), "moved": (0, 4, 32),
        "fused": (0, 4, 32), "head": (0, 32), "delayed": (0, 4, 32), "collapsed": (0, 32),
    }  # fmt: skip
    for prefix in ("fused_", "later_", "first_", "delayed_"):
        shapes |= {f"{prefix}{name}": shapes[name] for name in DELAYED_MIXES}
    del shapes["pre"], shapes["fused_pre"]
    assert {name: tuple(result.shape) for name, result in results.items()} == shapes


Change = Callable[[StreamsCall], None]


def nan_in_a_stream(call: StreamsCall) -> None:
    call.residual[2, 1, 5] = nan


def nan_in_x(call: StreamsCall) -> None:
    call.x[2, 7] = nan


def infinity_in_a_stream(call: StreamsCall) -> None:
    call.residual[2, 0, 0] = inf


def nan_in_comb(call: StreamsCall) -> None:
    call.comb[2, 3, 1] = nan


@pytest.mark.parametrize("tuning", [TINY, hc_tuning.INTERPRETER, BY_FACTORS], ids=["tiny", "large", "factors"])
@pytest.mark.parametrize("spoil", [nan_in_a_stream, nan_in_x, infinity_in_a_stream, nan_in_comb])
def test_what_is_no_number_reaches_its_own_token_as_in_torch(spoil: Change, tuning: Tuning) -> None:
    call = StreamsCall(4, 48, 6, normed=True)
    with with_tuning(tuning):
        clean = call.run(KERNELS)
        spoil(call)
        expected, results = call.run(TORCH), call.run(KERNELS)
    other_tokens = [0, 1, 3, 4, 5]
    for name, result in results.items():
        assert torch.equal(result[other_tokens], clean[name][other_tokens]), name
        assert torch.equal(result[2].isnan(), expected[name][2].isnan()), name


def unequal_names(results: dict[str, Tensor], expected: dict[str, Tensor], tokens: slice) -> list[str]:
    """Names of results whose bits are not those of the tokens in `expected`."""
    return [name for name, result in results.items() if not torch.equal(result, expected[name][tokens])]


@pytest.mark.matrix
@pytest.mark.parametrize("tuning", [FIXED, hc_tuning.FIXED["sm_90"]], ids=["tiny", "hopper"])
def test_bits_of_a_token_are_the_same_for_every_number_of_tokens_if_deterministic(tuning: Tuning) -> None:
    call = StreamsCall(4, 48, 7, normed=True)
    with with_tuning(TINY, few=3, fixed=tuning):
        expected = call.run(KERNELS, deterministic=True)
        for count in range(1, 7):
            results = call.tokens(slice(count)).run(KERNELS, deterministic=True)
            assert unequal_names(results, expected, slice(count)) == [], count


def rows_of_x_apart(call: StreamsCall) -> None:
    call.x = strided(call.x, 1)


def tokens_apart(call: StreamsCall) -> None:
    call.residual = strided(call.residual.flatten(1), 1).unflatten(1, call.residual.shape[1:])


@pytest.mark.parametrize("move", [rows_of_x_apart, tokens_apart])
def test_bits_of_one_token_are_those_of_more_if_its_rows_are_not_aligned_and_deterministic(move: Change) -> None:
    """The address of one row says nothing about the next one, and kernels for other alignments have other tiles."""
    call = StreamsCall(4, 64, 2, normed=True)
    move(call)
    with with_tuning(TINY, few=0, fixed=FIXED):
        expected = call.run(KERNELS, deterministic=True)
        results = call.tokens(slice(1)).run(KERNELS, deterministic=True)

    assert unequal_names(results, expected, slice(1)) == []


def test_bits_of_a_token_do_not_depend_on_its_place_if_deterministic() -> None:
    """Tiles are small, because numpy's products in large ones depend on the place of a row."""
    call = StreamsCall(4, 48, 9, normed=True)
    with with_tuning(TINY, fixed=FIXED):
        expected = call.run(KERNELS, deterministic=True)
        for first in (8, 5):
            tokens = slice(first, None)
            assert unequal_names(call.tokens(tokens).run(KERNELS, deterministic=True), expected, tokens) == [], first


def test_deterministic_calls_have_tiles_and_blocks_of_their_own_on_hopper() -> None:
    hopper, fixed = (hc_tuning.tuning_for("sm_90", deterministic=exact) for exact in (False, True))

    assert hopper == hc_tuning.TUNINGS["sm_90"]
    assert fixed == evolve(hopper, many=fixed.many, heads_many=fixed.heads_many) != hopper
    for arch in ("sm_80", "sm_100", "gfx942", "gfx1100", "cpu"):
        assert hc_tuning.tuning_for(arch, deterministic=True) is hc_tuning.tuning_for(arch)


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
        call = StreamsCall(n, hidden, count)
        for tuning in (TINY, FIXED):
            for tile in (tuning.few, tuning.many, tuning.fused_many, tuning.plain):
                with with_tuning(TINY, fixed=FIXED):
                    chunks = [*hc._chunks(call.residual, call.weights.fn, tile, tuning.chunk)]
                    assert [first for first, *_ in chunks] == [*range(0, count, tuning.chunk)]
                    assert max(products.nbytes for *_, products, _ in chunks) <= hc.transient_bytes(count, n, hidden)


def foreseen_variants(call: StreamsCall, **forms: Any) -> set[Variant]:
    """Those of V4 and V4.1 for streams and a norm like these. forms: more arguments of `hc.variants`."""
    _, n, hidden = call.residual.shape
    norm_dtype = None if call.weights.norm_weight is None else call.weights.norm_weight.dtype
    forms["sinkhorn_eps"] = call.weights.hc_sinkhorn_eps
    sizes = n, hidden, call.residual.dtype, norm_dtype
    return {variant for delayed in (False, True) for variant in hc.variants(*sizes, delayed=delayed, **forms)}


def launched_variants(call: StreamsCall, **options: Any) -> set[Variant]:
    """Those that all ops launch, also where no sublayer has run before."""
    with launching_nothing(), observed() as launched:
        call.run(KERNELS, **options)
        KERNELS.mhc_fused_post_pre_delayed(call.x, call.residual, call.post, call.comb, None, call.weights, **options)
    return set(launched)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("aligned", [False, True])
@each_dtype
def test_warm_up_foresees_every_variant_that_is_launched(
    dtype: torch.dtype, aligned: bool, deterministic: bool
) -> None:
    for tuning, fixed in ((TINY, FIXED), (hc_tuning.HOPPER, hc_tuning.FIXED["sm_90"])):
        for seed, (count, hidden) in enumerate(((3, 64), (1, 64), (9, 64), (2, 30), (9, 30))):
            call = StreamsCall(2, hidden, count, dtype, seed, pad=8 * seed if aligned else seed, normed=bool(seed % 2))
            call.change_weights(hc_sinkhorn_eps=0.0 if seed == 2 else 1e-6)
            with with_tuning(tuning, fixed=fixed):
                launched = launched_variants(call, deterministic=deterministic)
                foreseen = foreseen_variants(call, aligned=aligned, deterministic=deterministic)

            assert {variant.name for variant in launched} == {"products_kernel", "post_kernel", "mix_kernel"}
            assert launched <= foreseen


@pytest.mark.parametrize(("n", "normed"), [(4, False), (4, True), (8, True)])
@each_dtype
def test_warm_up_of_a_deterministic_backend_foresees_only_what_is_launched(
    dtype: torch.dtype, n: int, normed: bool
) -> None:
    for tuning, fixed in ((TINY, FIXED), (hc_tuning.HOPPER, hc_tuning.FIXED["sm_90"])):
        launched = set[Variant]()
        for count in (1, 3, 9):
            call = StreamsCall(n, 64, count, dtype, normed=normed)
            with with_tuning(tuning, fixed=fixed):
                now = launched_variants(call, deterministic=True)
                foreseen = foreseen_variants(call, deterministic=True)
            # one form for every number of tokens
            assert not launched or now == launched
            launched = now

        assert launched == foreseen


def test_promises_of_alignment_only_take_variants_away() -> None:
    for dtype, delayed in product((torch.bfloat16, torch.float32), (False, True)):
        aligned, unaligned = (
            set(hc.variants(4, 4096, dtype, torch.bfloat16, delayed=delayed, aligned=aligned))
            for aligned in (True, False)
        )
        assert aligned < unaligned


# mutants


def transposed_comb(call: StreamsCall) -> None:
    call.comb = call.comb.mT.contiguous()


def one_stream_off(call: StreamsCall) -> None:
    call.residual = call.residual.roll(1, 1)


def a_column_of_the_mixes(call: StreamsCall) -> None:
    call.weights.fn[3, -1] += 0.5


def another_eps(call: StreamsCall) -> None:
    call.change_weights(rms_eps=1e-6, hc_pre_eps=1e-6, hc_sinkhorn_eps=1e-6)


def another_previous_pre(call: StreamsCall) -> None:
    call.previous_pre = call.previous_pre.roll(1, 1)


@pytest.mark.mutation
@pytest.mark.parametrize(
    "change", [another_previous_pre, transposed_comb, one_stream_off, a_column_of_the_mixes, another_eps]
)
def test_a_planted_bug_is_found(change: Change) -> None:
    call, wrong_call = StreamsCall(4, 40, 3), StreamsCall(4, 40, 3)
    change(wrong_call)
    expected, results = call.run(TORCH), wrong_call.run(KERNELS)

    with pytest.raises(AssertionError):
        check_near(results, expected)

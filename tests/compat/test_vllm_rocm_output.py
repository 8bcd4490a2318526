"""The output projection under the ROCm name: float64 answers for every form of weight, and errors before any launch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dsv4attn.backends._triton import kernels_projection, projection
from dsv4attn.backends._triton.compiling import variant
from dsv4attn.backends._triton.launching.runtime import observed
from dsv4attn.compat.vllm_rocm_output import rocm_inv_rope_einsum
from dsv4attn.core.model import quantized_weight as weights
from dsv4attn.errors import ArgumentError
from dsv4attn.testing.kit.tolerances import F64
from dsv4attn.testing.oracle import attention as oracle
from tests.backends._triton.cache.caches import DEVICE, each_dtype, seeded, strided
from tests.core.model.scaled import OCP, Scaled, each_dialect, each_form, each_name

BF16, FP32_STEPS = 2.0**-8, 2.0**-20
NOPE, ROPE, GROUPS, HEADS, RANK, POSITIONS = 72, 8, 2, 4, 70, 11
DIM = NOPE + ROPE
SHAPE = GROUPS * RANK, HEADS // GROUPS * DIM
META = torch.device("meta")


class Asked:
    """One call whose weight has partial blocks in both directions. Between rows of o there is NaN."""

    def __init__(self, seed: int, tokens: int = 5, dtype: torch.dtype = torch.bfloat16) -> None:
        """Draw one; its weight is fp8 with fp32 scales."""
        g = seeded(seed)
        self.o = strided(torch.randn(tokens, HEADS, DIM, generator=g).to(dtype), 8 * (seed % 2))
        self.table = torch.randn(POSITIONS, ROPE, generator=g)
        self.positions = torch.randint(0, POSITIONS, (tokens,), generator=g)
        drawn = Scaled.draw(seed, *SHAPE, OCP, "fp32")
        self.wo_a: Any = drawn.module()
        self.matrix = drawn.values
        self.sizes: tuple[int, int, int] = ROPE, GROUPS, RANK

    def run(self, turned_rows: int = 0) -> Tensor:
        """Call it; o must stay."""
        original = self.o.clone()
        rotary = SimpleNamespace(cos_sin_cache=self.table.to(DEVICE))
        positions = self.positions.to(DEVICE)
        z = rocm_inv_rope_einsum(rotary, self.o, positions, *self.sizes, self.wo_a, turned_rows=turned_rows)
        assert torch.equal(self.o, original)
        return z

    def check(self, z: Tensor, values: F64 | None = None) -> None:
        """Fail unless z is right: one rounding of turned values, fp32 sums, one rounding of the result.

        values: what o is before the keys' rotation is undone, if that is not what it holds.
        """
        assert (z.shape, z.dtype) == ((self.o.shape[0], GROUPS, RANK), self.o.dtype)
        values = self.o.double().cpu().numpy() if values is None else values
        weight = self.matrix.reshape(GROUPS, RANK, -1)
        in_rope = np.tile(np.arange(DIM) >= NOPE, HEADS // GROUPS)
        unit = BF16 if z.dtype == torch.bfloat16 else FP32_STEPS
        for t, position in enumerate(self.positions.tolist()):
            cos, sin = np.split(self.table[position].double().numpy(), 2)
            expected = oracle.inverse_rope_project(values[t], cos, sin, ROPE, weight, None)
            x = oracle.apply_rope(values[t], cos, sin, ROPE, inverse=True).reshape(GROUPS, -1)
            rounding = np.linalg.norm(x[:, in_rope], axis=1)[:, None] * np.linalg.norm(weight[..., in_rope], axis=2)
            summing = np.linalg.norm(x, axis=1)[:, None] * np.linalg.norm(weight, axis=2)
            budget = unit * (rounding + np.abs(expected)) + FP32_STEPS * summing
            assert (np.abs(z[t].double().cpu().numpy() - expected) <= budget).all()


@each_dialect
@each_form
@each_name
def test_every_form_of_an_fp8_weight_gives_the_float64_answer(dialect: torch.dtype, form: str, name: str) -> None:
    call = Asked(1)
    drawn = Scaled.draw(21, *SHAPE, dialect, form)
    call.wo_a, call.matrix = drawn.module(name), drawn.values
    call.check(call.run())


@each_dtype
@pytest.mark.parametrize("wide", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", ["tensor", "module with a scale left over"])
def test_a_weight_that_is_not_fp8_is_taken_as_it_is(dtype: torch.dtype, wide: torch.dtype, kind: str) -> None:
    call = Asked(2, dtype=dtype)
    weight = strided(torch.randn(SHAPE, generator=seeded()).to(wide), 8)
    call.matrix = weight.double().cpu().numpy()
    left_over = torch.full((2, 2), 64.0, device=DEVICE)
    call.wo_a = weight if kind == "tensor" else SimpleNamespace(weight=weight, weight_scale_inv=left_over)
    call.check(call.run())


@each_dtype
@pytest.mark.parametrize("tokens", [1, 17, 130])
def test_any_number_of_tokens(dtype: torch.dtype, tokens: int) -> None:
    call = Asked(tokens, tokens, dtype)
    call.check(call.run())


def test_nothing_happens_without_tokens() -> None:
    call = Asked(3, tokens=0)

    assert call.run().shape == (0, GROUPS, RANK)


def test_a_second_call_finds_the_copy_of_the_first() -> None:
    call = Asked(4)
    first = call.run()
    copy = weights.dense_weight(call.wo_a)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(weights, "_product", lambda *_: pytest.fail("computed again"))
        assert torch.equal(call.run(), first)
    assert weights.dense_weight(call.wo_a) is copy


def test_outputs_may_lie_heads_first() -> None:
    call = Asked(5)
    expected = call.run()
    call.o = call.o.transpose(0, 1).contiguous().transpose(0, 1)

    assert not call.o.is_contiguous()
    assert torch.equal(call.run(), expected)


def test_an_fp8_weight_may_lie_by_columns() -> None:
    call = Asked(6)
    expected = call.run()
    call.wo_a.weight = call.wo_a.weight.view(torch.uint8).t().contiguous().t().view(OCP)

    assert torch.equal(call.run(), expected)


def test_parameters_of_an_engine_serve() -> None:
    call = Asked(7)
    module = nn.Linear(SHAPE[1], SHAPE[0], bias=False, device=DEVICE, dtype=torch.bfloat16)
    call.wo_a, call.matrix = module, module.weight.detach().double().cpu().numpy()
    call.check(call.run())
    with torch.inference_mode():
        call.check(call.run())


def test_a_padding_row_at_no_position_leaves_the_others_alone() -> None:
    call = Asked(8)
    expected = call.run()
    call.positions[3:] = torch.tensor([-(2**62), 2**62])

    assert torch.equal(call.run()[:3], expected[:3])


# rows that are turned already


@each_dtype
@pytest.mark.parametrize("turned", [0, 1, 3, 17, 18])
def test_leading_rows_may_have_been_turned_by_whoever_attended_them(dtype: torch.dtype, turned: int) -> None:
    """Turning them in float64 beforehand, and rounding them, gives what turning them here gives."""
    call = Asked(9, 18, dtype)
    values = call.o.double().cpu().numpy().copy()
    for t, position in enumerate(call.positions[:turned].tolist()):
        cos, sin = np.split(call.table[position].double().numpy(), 2)
        row = oracle.apply_rope(values[t], cos, sin, ROPE, inverse=True)
        call.o[t] = torch.from_numpy(row).to(call.o)
    z = call.run(turned)
    call.check(z, values)
    if turned:
        with pytest.raises(AssertionError):
            call.check(call.run(turned - 1), values)
    if turned < len(values):
        with pytest.raises(AssertionError):
            call.check(call.run(turned + 1), values)


def test_angles_of_turned_rows_are_not_looked_at() -> None:
    call = Asked(10)
    call.positions = torch.tensor([7, 7, 1, 2, 3])
    expected = call.run(2)
    call.table[7] = torch.nan

    assert torch.equal(call.run(2), expected)
    assert call.run(1)[1].isnan().all()

    call.positions[:2] = torch.tensor([-(2**62), 2**62])
    assert torch.equal(call.run(2), expected)


def test_turned_rows_compile_nothing_of_their_own() -> None:
    call = Asked(11)
    with observed() as seen:
        for turned in (0, 1, 5):
            call.run(turned)
    variants = projection.variants(HEADS, NOPE, ROPE, GROUPS, RANK, torch.bfloat16, torch.bfloat16, aligned=False)

    assert len(seen) == 3
    assert len(set(seen)) == 1
    assert "turned" in variant._unspecialised(kernels_projection.project_kernel)
    assert set(seen) <= set(variants)


# bugs


def with_rotation(call: Asked) -> None:
    call.table[:, ROPE // 2 :] *= -1


def with_other_positions(call: Asked) -> None:
    call.positions = (call.positions + 1) % POSITIONS


def with_groups_swapped(call: Asked) -> None:
    call.wo_a.weight = call.wo_a.weight.view(torch.uint8).roll(RANK, 0).view(OCP)


def with_scales_forgotten(call: Asked) -> None:
    call.wo_a = call.wo_a.weight.bfloat16()


def with_scales_applied_twice(call: Asked) -> None:
    call.wo_a.weight_scale_inv = call.wo_a.weight_scale_inv**2


def with_scales_of_the_next_block(call: Asked) -> None:
    call.wo_a.weight_scale_inv = call.wo_a.weight_scale_inv.roll(1, 1)


@pytest.mark.mutation
@pytest.mark.parametrize(
    "change",
    [
        with_rotation, with_other_positions, with_groups_swapped, with_scales_forgotten, with_scales_applied_twice,
        with_scales_of_the_next_block,
    ],
)  # fmt: skip
def test_a_planted_bug_is_found(change: Callable[[Asked], None]) -> None:
    call, wrong = Asked(12), Asked(12)
    change(wrong)
    call.check(call.run())
    with pytest.raises(AssertionError):
        call.check(wrong.run())


# bad input


FP8 = Scaled.draw(13, *SHAPE, OCP, "fp32")
TABLE = torch.zeros(POSITIONS, ROPE, device=DEVICE)
O = torch.zeros(3, HEADS, DIM, dtype=torch.bfloat16, device=DEVICE)  # noqa: E741
GOOD: Mapping[str, Any] = {
    "rotary_emb": SimpleNamespace(cos_sin_cache=TABLE),
    "o": O,
    "positions": torch.zeros(3, dtype=torch.int64, device=DEVICE),
    "rope_head_dim": ROPE,
    "n_local_groups": GROUPS,
    "o_lora_rank": RANK,
    "wo_a": FP8.module(),
    "turned_rows": 0,
}


def table(cos_sin_cache: Any) -> Mapping[str, Any]:
    return {"rotary_emb": SimpleNamespace(cos_sin_cache=cos_sin_cache)}


BAD: Mapping[str, tuple[Mapping[str, Any], str]] = {
    "no table": ({"rotary_emb": TABLE}, "rotary_emb.cos_sin_cache"),
    "a table in bf16": (table(TABLE.bfloat16()), r"rotary_emb.cos_sin_cache: expected float32, got bfloat16 -> build"),
    "a table in fp64": (table(TABLE.double()), "rotary_emb.cos_sin_cache"),
    "angles for other dims": (table(TABLE[:, :6]), "rotary_emb.cos_sin_cache"),
    "a table of no positions": (table(TABLE[:0]), "rotary_emb.cos_sin_cache"),
    "a table elsewhere": (table(TABLE.to(META)), "rotary_emb.cos_sin_cache"),
    "a table with gaps": (table(TABLE.repeat(1, 2)[:, ::2]), "rotary_emb.cos_sin_cache"),
    "o in fp16": ({"o": O.half()}, "o"),
    "o without heads": ({"o": O[:, 0]}, "o"),
    "o of no heads": ({"o": O[:, :0]}, "n_local_groups"),
    "o with gaps": ({"o": O.repeat(1, 1, 2)[..., ::2]}, "o"),
    "positions of other tokens": ({"positions": GOOD["positions"][:2]}, "positions"),
    "positions in int32": ({"positions": GOOD["positions"].int()}, "positions"),
    "positions with gaps": ({"positions": GOOD["positions"].repeat(2)[::2]}, "positions"),
    "positions elsewhere": ({"positions": GOOD["positions"].to(META)}, "positions"),
    "odd rotation": ({"rope_head_dim": 7, **table(TABLE[:, :7])}, "rope_head_dim"),
    "no rotation": ({"rope_head_dim": 0, **table(TABLE[:, :0])}, "rope_head_dim"),
    "nothing but rotation": ({"o": O[..., :ROPE]}, "rope_head_dim"),
    "groups that do not divide": ({"n_local_groups": 3}, "n_local_groups"),
    "no groups": ({"n_local_groups": 0}, "n_local_groups"),
    "another rank": ({"o_lora_rank": RANK - 1}, "wo_a.weight"),
    "no rank": ({"o_lora_rank": 0}, "o_lora_rank"),
    "other groups": ({"n_local_groups": 1}, "wo_a.weight"),
    "rows turned that are not there": ({"turned_rows": 4}, "turned_rows"),
    "fewer than no rows turned": ({"turned_rows": -1}, "turned_rows"),
    "no weight": ({"wo_a": SimpleNamespace()}, "wo_a"),
    "scales of other blocks": ({"wo_a": FP8.module(weight_scale_inv=torch.ones(1, 1))}, "wo_a.weight_scale_inv"),
    "a weight elsewhere": ({"wo_a": FP8.weight().bfloat16().to(META)}, "wo_a"),
    "a wide weight with gaps": ({"wo_a": FP8.weight().bfloat16().t().contiguous().t()}, "wo_a"),
}


@pytest.mark.parametrize("case", BAD.values(), ids=BAD)
def test_bad_input_is_an_error_before_any_launch(
    case: tuple[Mapping[str, Any], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    changed, said = case
    monkeypatch.setattr(weights, "_product", lambda *_: pytest.fail("computed"))
    with observed() as seen, pytest.raises(ArgumentError, match=rf"^{said if ':' in said else f'{said}: expected'}"):
        rocm_inv_rope_einsum(**{**GOOD, **changed})

    assert not seen


def test_the_good_input_of_these_cases_is_good() -> None:
    assert not rocm_inv_rope_einsum(**GOOD).any()

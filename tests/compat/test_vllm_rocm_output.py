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
from dsv4attn.testing import oracle
from dsv4attn.testing.tolerances import F64
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
        given = Scaled.draw(seed, *SHAPE, OCP, "fp32")
        self.wo_a: Any = given.module()
        self.matrix = given.values
        self.sizes: tuple[int, int, int] = ROPE, GROUPS, RANK

    def run(self, turned_rows: int = 0) -> Tensor:
        """Call it; o must stay."""
        before = self.o.clone()
        rotary = SimpleNamespace(cos_sin_cache=self.table.to(DEVICE))
        positions = self.positions.to(DEVICE)
        z = rocm_inv_rope_einsum(rotary, self.o, positions, *self.sizes, self.wo_a, turned_rows=turned_rows)
        assert torch.equal(self.o, before)
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
            wanted = oracle.inverse_rope_project(values[t], cos, sin, ROPE, weight, None)
            x = oracle.apply_rope(values[t], cos, sin, ROPE, inverse=True).reshape(GROUPS, -1)
            rounding = np.linalg.norm(x[:, in_rope], axis=1)[:, None] * np.linalg.norm(weight[..., in_rope], axis=2)
            summing = np.linalg.norm(x, axis=1)[:, None] * np.linalg.norm(weight, axis=2)
            budget = unit * (rounding + np.abs(wanted)) + FP32_STEPS * summing
            assert (np.abs(z[t].double().cpu().numpy() - wanted) <= budget).all()


@each_dialect
@each_form
@each_name
def test_every_form_of_an_fp8_weight_gives_the_float64_answer(dialect: torch.dtype, form: str, name: str) -> None:
    asked = Asked(1)
    given = Scaled.draw(21, *SHAPE, dialect, form)
    asked.wo_a, asked.matrix = given.module(name), given.values
    asked.check(asked.run())


@each_dtype
@pytest.mark.parametrize("wide", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", ["tensor", "module with a scale left over"])
def test_a_weight_that_is_not_fp8_is_taken_as_it_is(dtype: torch.dtype, wide: torch.dtype, kind: str) -> None:
    asked = Asked(2, dtype=dtype)
    weight = strided(torch.randn(SHAPE, generator=seeded()).to(wide), 8)
    asked.matrix = weight.double().cpu().numpy()
    left_over = torch.full((2, 2), 64.0, device=DEVICE)
    asked.wo_a = weight if kind == "tensor" else SimpleNamespace(weight=weight, weight_scale_inv=left_over)
    asked.check(asked.run())


@each_dtype
@pytest.mark.parametrize("tokens", [1, 17, 130])
def test_any_number_of_tokens(dtype: torch.dtype, tokens: int) -> None:
    asked = Asked(tokens, tokens, dtype)
    asked.check(asked.run())


def test_nothing_happens_without_tokens() -> None:
    asked = Asked(3, tokens=0)

    assert asked.run().shape == (0, GROUPS, RANK)


def test_a_second_call_finds_the_copy_of_the_first() -> None:
    asked = Asked(4)
    first = asked.run()
    copy = weights.dense_weight(asked.wo_a)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(weights, "_product", lambda *_: pytest.fail("computed again"))
        assert torch.equal(asked.run(), first)
    assert weights.dense_weight(asked.wo_a) is copy


def test_outputs_may_lie_heads_first() -> None:
    asked = Asked(5)
    wanted = asked.run()
    asked.o = asked.o.transpose(0, 1).contiguous().transpose(0, 1)

    assert not asked.o.is_contiguous()
    assert torch.equal(asked.run(), wanted)


def test_an_fp8_weight_may_lie_by_columns() -> None:
    asked = Asked(6)
    wanted = asked.run()
    asked.wo_a.weight = asked.wo_a.weight.view(torch.uint8).t().contiguous().t().view(OCP)

    assert torch.equal(asked.run(), wanted)


def test_parameters_of_an_engine_serve() -> None:
    asked = Asked(7)
    module = nn.Linear(SHAPE[1], SHAPE[0], bias=False, device=DEVICE, dtype=torch.bfloat16)
    asked.wo_a, asked.matrix = module, module.weight.detach().double().cpu().numpy()
    asked.check(asked.run())
    with torch.inference_mode():
        asked.check(asked.run())


def test_a_padding_row_at_no_position_leaves_the_others_alone() -> None:
    asked = Asked(8)
    wanted = asked.run()
    asked.positions[3:] = torch.tensor([-(2**62), 2**62])

    assert torch.equal(asked.run()[:3], wanted[:3])


# rows that are turned already


@each_dtype
@pytest.mark.parametrize("turned", [0, 1, 3, 17, 18])
def test_leading_rows_may_have_been_turned_by_whoever_attended_them(dtype: torch.dtype, turned: int) -> None:
    """Turning them in float64 beforehand, and rounding them, gives what turning them here gives."""
    asked = Asked(9, 18, dtype)
    values = asked.o.double().cpu().numpy().copy()
    for t, position in enumerate(asked.positions[:turned].tolist()):
        cos, sin = np.split(asked.table[position].double().numpy(), 2)
        row = oracle.apply_rope(values[t], cos, sin, ROPE, inverse=True)
        asked.o[t] = torch.from_numpy(row).to(asked.o)
    z = asked.run(turned)
    asked.check(z, values)
    if turned:
        with pytest.raises(AssertionError):
            asked.check(asked.run(turned - 1), values)
    if turned < len(values):
        with pytest.raises(AssertionError):
            asked.check(asked.run(turned + 1), values)


def test_angles_of_turned_rows_are_not_looked_at() -> None:
    asked = Asked(10)
    asked.positions = torch.tensor([7, 7, 1, 2, 3])
    wanted = asked.run(2)
    asked.table[7] = torch.nan

    assert torch.equal(asked.run(2), wanted)
    assert asked.run(1)[1].isnan().all()

    asked.positions[:2] = torch.tensor([-(2**62), 2**62])
    assert torch.equal(asked.run(2), wanted)


def test_turned_rows_compile_nothing_of_their_own() -> None:
    asked = Asked(11)
    with observed() as seen:
        for turned in (0, 1, 5):
            asked.run(turned)
    told = projection.variants(HEADS, NOPE, ROPE, GROUPS, RANK, torch.bfloat16, torch.bfloat16, aligned=False)

    assert len(seen) == 3
    assert len(set(seen)) == 1
    assert "turned" in variant._unspecialised(kernels_projection.project_kernel)
    assert set(seen) <= set(told)


# bugs


def with_rotation(asked: Asked) -> None:
    asked.table[:, ROPE // 2 :] *= -1


def with_other_positions(asked: Asked) -> None:
    asked.positions = (asked.positions + 1) % POSITIONS


def with_groups_swapped(asked: Asked) -> None:
    asked.wo_a.weight = asked.wo_a.weight.view(torch.uint8).roll(RANK, 0).view(OCP)


def with_scales_forgotten(asked: Asked) -> None:
    asked.wo_a = asked.wo_a.weight.bfloat16()


def with_scales_applied_twice(asked: Asked) -> None:
    asked.wo_a.weight_scale_inv = asked.wo_a.weight_scale_inv**2


def with_scales_of_the_next_block(asked: Asked) -> None:
    asked.wo_a.weight_scale_inv = asked.wo_a.weight_scale_inv.roll(1, 1)


@pytest.mark.parametrize(
    "change",
    [
        with_rotation, with_other_positions, with_groups_swapped, with_scales_forgotten, with_scales_applied_twice,
        with_scales_of_the_next_block,
    ],
)  # fmt: skip
def test_a_planted_bug_is_found(change: Callable[[Asked], None]) -> None:
    asked, wrong = Asked(12), Asked(12)
    change(wrong)
    asked.check(asked.run())
    with pytest.raises(AssertionError):
        asked.check(wrong.run())


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


def table(given: Any) -> Mapping[str, Any]:
    return {"rotary_emb": SimpleNamespace(cos_sin_cache=given)}


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
    "a plain fp8 tensor": ({"wo_a": FP8.weight()}, "wo_a"),
    "raw codes": ({"wo_a": SimpleNamespace(weight=FP8.codes.to(DEVICE))}, "wo_a.weight"),
    "an fp8 weight without scales": ({"wo_a": SimpleNamespace(weight=FP8.weight())}, "wo_a.weight"),
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

"""The insert kernels write the reference's bytes and no others. q is the oracle's to half a unit in the last place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve
from torch import Tensor

from dsv4attn.backends._triton.cache import insert
from dsv4attn.backends._triton.cache.forms import WriterForm
from dsv4attn.backends._triton.cache.records import writer_form
from dsv4attn.backends._triton.launching.runtime import launch, observed
from dsv4attn.backends.reference import kernels as reference
from dsv4attn.core.cache import key_codecs
from dsv4attn.core.cache.layout import Fp8Format, KVCacheLayout, PagedKVCache
from dsv4attn.testing.oracle import attention as oracle
from tests.backends._triton.attention.kernels_quantize import GROUPS, groups_kernel
from tests.backends._triton.cache.caches import (
    CPU,
    DEVICE,
    FNUZ,
    LAYOUTS,
    OCP,
    draw,
    each_dtype,
    each_layout,
    memory,
    poisoned,
    seeded,
    strided,
)

HALF_UNIT = {torch.bfloat16: 2.0**-8, torch.float32: 2.0**-21}
"""What rounding once may cost a value; in fp32, what a sum and a root may."""


class Step:
    """One random call of the fused step: ragged, shuffled, with garbage slots, padded rows and a misplaced cache."""

    def __init__(
        self, layout: KVCacheLayout, dtype: torch.dtype, seed: int, *, kv_dtype: torch.dtype | None = None
    ) -> None:
        """Draw one."""
        g = seeded(seed)
        self.layout, self.heads, tokens = layout, draw(g, 1, 9), draw(g, 1, 9)
        blocks, size = draw(g, 1, 4), draw(g, 1, 5)
        step = max(layout.dtype.itemsize, 2)
        self.gap, self.start = (step * draw(g, 0, 9), step * draw(g, 0, 9)) if seed % 2 else (0, 0)
        self.shape = blocks, size
        pad = draw(g, 1, 5) if seed % 2 else 0
        scale = torch.exp2(torch.randint(-20, 20, (tokens, self.heads, 1), generator=g).float())
        q = torch.randn(tokens, self.heads, layout.head_dim, generator=g) * scale
        self.q = strided(q.to(dtype), pad)
        kv = torch.randn(tokens, layout.head_dim, generator=g) * scale[:, 0]
        self.kv = strided(kv.to(kv_dtype or dtype), pad)
        garbage = torch.tensor([-1, -7, -(2**40), blocks * size, 2**40, 2**62])
        slots = torch.cat([torch.randperm(blocks * size, generator=g), garbage])
        self.slots = slots[torch.randperm(len(slots), generator=g)][: draw(g, 0, tokens + 2)].to(DEVICE)
        self.table = strided(torch.randn(13, layout.rope_dim, generator=g), pad)
        self.positions = torch.randint(0, 13, (tokens,), generator=g).to(DEVICE)
        self.eps: float | None = 1e-6

    def cache(self, device: torch.device = DEVICE) -> PagedKVCache:
        """Return an unwritten cache."""
        return poisoned(self.layout, *self.shape, gap=self.gap, start=self.start, device=device)

    def run(self) -> tuple[Tensor, PagedKVCache]:
        """Run the kernel: (q, cache). kv must stay, and what stands between the rows of q."""
        wide = self.q.clone() if self.q.is_contiguous() else self.q._base
        assert wide is not None
        whole = wide.clone()
        q, cache, original = whole[..., : self.layout.head_dim], self.cache(), self.kv.clone()
        insert.qnorm_rope_kv_insert(q, self.kv, cache, self.slots, self.positions, self.table, self.eps)
        assert torch.equal(self.kv, original)
        assert whole[..., self.layout.head_dim :].isnan().all()
        return q, cache

    def expected(self) -> Tensor:
        """Return the bytes that the reference leaves in memory."""
        cache = self.cache(CPU)
        rotated = reference.rotated(self.kv.cpu(), self.positions.cpu(), self.table.cpu())
        reference.insert(rotated, cache, self.slots.cpu())
        return memory(cache)

    def check(self) -> None:
        """Fail unless cache and q are right."""
        q, cache = self.run()
        assert torch.equal(memory(cache), self.expected())
        rope = self.layout.rope_dim
        for t, position in enumerate(self.positions.tolist()):
            cos, sin = np.split(self.table[position].double().cpu().numpy(), 2)
            expected = oracle.q_norm_rope(self.q[t].double().cpu().numpy(), cos, sin, rope, self.eps)
            size = np.abs(expected)
            size[:, -rope:] = np.repeat(np.hypot(expected[:, -rope::2], expected[:, -rope + 1 :: 2]), 2, axis=1)
            error = np.abs(q[t].double().cpu().numpy() - expected) / (size + 1e-30)
            assert error.max() <= HALF_UNIT[q.dtype] * 1.001


@pytest.mark.in_turn
@each_layout
@each_dtype
def test_q_is_normalised_and_rotated_and_keys_are_the_reference_s_bytes(
    layout: KVCacheLayout, dtype: torch.dtype
) -> None:
    for seed in range(3):
        Step(layout, dtype, seed).check()


@each_dtype
def test_without_eps_q_is_rotated_only_and_its_other_dims_keep_their_bits(dtype: torch.dtype) -> None:
    for seed in range(3):
        step = Step(LAYOUTS[3], dtype, seed)
        step.eps = None
        with observed() as seen:
            step.check()
        rotated, dims = step.run()[0], step.layout.nope_dim

        assert torch.equal(rotated[..., :dims], step.q[..., :dims])
        known = insert.variants(LAYOUTS[3], step.heads, dtype, aligned=False, aligned_rows=False, norm=False)
        assert set(seen) <= set(known)


@each_layout
@each_dtype
def test_keys_are_inserted_without_queries(layout: KVCacheLayout, dtype: torch.dtype) -> None:
    for seed in range(2):
        step, cache = Step(layout, dtype, seed), None
        with observed() as seen:
            cache = step.cache()
            arguments = step.kv, cache, step.slots, step.positions, step.table, step.eps
            insert.qnorm_rope_kv_insert(step.q[:, :0], *arguments)

        assert torch.equal(memory(cache), step.expected())
        assert set(seen) <= set(insert.variants(layout, 0, dtype, aligned=False, aligned_rows=False))


def test_q_and_kv_may_have_different_dtypes() -> None:
    for seed in range(2):
        Step(LAYOUTS[3], torch.bfloat16, seed, kv_dtype=torch.float32).check()
        Step(LAYOUTS[9], torch.float32, seed, kv_dtype=torch.bfloat16).check()


@pytest.mark.in_turn
@each_layout
@each_dtype
def test_rotated_keys_are_written_as_they_are(layout: KVCacheLayout, dtype: torch.dtype) -> None:
    for seed in range(4):
        step = Step(layout, dtype, 100 + seed)
        actual, expected = step.cache(), step.cache(CPU)
        insert.quantize_and_insert_k_cache(step.kv, actual, step.slots)
        reference.insert(step.kv.cpu(), expected, step.slots.cpu())
        assert torch.equal(memory(actual), memory(expected))


@pytest.mark.parametrize(
    "layout",
    [
        # codes alone, whose scales have no padding
        KVCacheLayout.v41_fp8(80, 0),
        evolve(KVCacheLayout.fp8_ds_mla(24, 8, group_size=8), scale_padding=1),
        evolve(KVCacheLayout.of_record("v4_nvfp4", 36, 6), scale_padding=16),
    ],
    ids=lambda layout: layout.fingerprint,
)
def test_scales_have_the_padding_of_their_layout(layout: KVCacheLayout) -> None:
    keys = torch.randn(6, layout.head_dim, generator=seeded())
    slots = torch.randperm(6, generator=seeded())
    actual, expected = poisoned(layout, 2, 3), poisoned(layout, 2, 3, device=CPU)
    insert.quantize_and_insert_k_cache(keys.to(DEVICE), actual, slots.to(DEVICE))
    reference.insert(keys, expected, slots)

    assert torch.equal(memory(actual), memory(expected))
    if layout.rope_dim:
        Step(layout, torch.bfloat16, 0).check()


def test_nothing_happens_without_tokens_or_without_slots() -> None:
    step = Step(LAYOUTS[3], torch.bfloat16, 1)
    q, kv, none = step.q[:0], step.kv[:0], step.slots[:0]
    cache = step.cache()
    insert.qnorm_rope_kv_insert(q, kv, cache, none, step.positions[:0], step.table, 1e-6)
    insert.quantize_and_insert_k_cache(step.kv, cache, none)
    insert.quantize_and_insert_k_cache(kv, cache, step.slots)

    assert (memory(cache) == 0xFF).all()


def test_garbage_positions_of_padding_rows_read_no_memory_after_the_table() -> None:
    step = Step(LAYOUTS[3], torch.bfloat16, 0)
    step.slots = step.slots[:0]
    step.positions = torch.full_like(step.positions, 2**62)
    q, _ = step.run()

    step.positions.fill_(12)
    assert torch.equal(q, step.run()[0])


MAGNITUDES: dict[str, Callable[[Tensor], Tensor]] = {
    "below the floor": lambda x: x * 1e-30,
    "subnormal": lambda x: x * 1e-39,
    "largest": lambda x: x.sign() * 3.3e38,
    "spread over 60 octaves": lambda x: x * torch.exp2(torch.linspace(-30, 30, x.shape[-1])),
    "negative zero": lambda x: -torch.zeros_like(x),
    "infinite": lambda x: torch.where(x > 2, torch.inf, x),
    "negative infinite": lambda x: torch.where(x > 2, -torch.inf, x * 1e30),
}


@pytest.mark.parametrize("layout", [LAYOUTS[0], LAYOUTS[1], LAYOUTS[4], LAYOUTS[6]], ids=lambda x: x.fingerprint)
@pytest.mark.parametrize("magnitude", MAGNITUDES)
@each_dtype
def test_values_of_any_size_are_quantised_like_the_reference_does(
    layout: KVCacheLayout, magnitude: str, dtype: torch.dtype
) -> None:
    rows = MAGNITUDES[magnitude](torch.randn(4, layout.head_dim, generator=seeded())).to(dtype)
    actual, expected = poisoned(layout, 2, 2), poisoned(layout, 2, 2, device=CPU)
    insert.quantize_and_insert_k_cache(rows.to(DEVICE), actual, torch.arange(4, device=DEVICE))
    reference.insert(rows, expected, torch.arange(4))

    assert torch.equal(memory(actual), memory(expected))


def quantised(groups: Tensor, layout: KVCacheLayout) -> tuple[Tensor, Tensor]:
    """Return codes [n, S] and bytes [n] that the kernel makes of groups [n, S]."""
    n, size = groups.shape
    padded = torch.cat([groups, groups.new_zeros(-n % GROUPS.value, size)]).to(DEVICE)
    codes, scales = torch.zeros_like(padded, dtype=torch.int32), torch.zeros_like(padded[:, 0], dtype=torch.int32)
    constants = {"S": size, "WRITER": writer_form(layout, 1)}
    launch(groups_kernel, (len(padded) // GROUPS.value,), (padded, codes, scales), constants)
    return codes[:n].cpu(), scales[:n].cpu()


def dialect_of(fp8_format: Fp8Format, fp8_max: float, size: int) -> KVCacheLayout:
    return KVCacheLayout.fp8_ds_mla(size, 2, group_size=size, fp8_format=fp8_format, fp8_max=fp8_max)


def all_bf16() -> Tensor:
    """Return the bit patterns that are no NaN."""
    values = torch.arange(2**16, dtype=torch.int32).bitwise_left_shift(16).view(torch.float32)
    return values[~values.isnan()]


each_writer = pytest.mark.parametrize(("fp8_format", "fp8_max"), [(OCP, 448.0), (FNUZ, 240.0), (FNUZ, 224.0)])


@each_writer
def test_every_bf16_maximum_gets_the_reference_s_scale_and_codes(fp8_format: Fp8Format, fp8_max: float) -> None:
    layout = dialect_of(fp8_format, fp8_max, 4)
    groups = all_bf16()[:, None] * torch.tensor([1.0, -0.5, 2.0**-9, 0.0])
    groups = groups.nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf).bfloat16().float()
    codes, scales = quantised(groups, layout)
    expected, bytes_ = key_codecs.quantize_keys(groups, layout)

    assert torch.equal(scales, bytes_[:, 0].int())
    assert torch.equal(codes, expected.int())


@each_writer
def test_every_bf16_value_under_a_fixed_maximum_gets_the_reference_s_code(
    fp8_format: Fp8Format, fp8_max: float
) -> None:
    layout = dialect_of(fp8_format, fp8_max, 2)
    values = all_bf16()
    values = values[values.abs() <= fp8_max]
    # ties and their neighbours among them; the scale is 1
    groups = torch.stack([values, torch.full_like(values, fp8_max)], 1)
    codes, scales = quantised(groups, layout)

    assert (scales == 127).all()
    assert torch.equal(codes, key_codecs.quantize_keys(groups, layout)[0].int())
    assert np.array_equal(codes[:, 0].numpy(), oracle.encode_e4m3(values.double().numpy(), fp8_format is FNUZ))


@each_writer
def test_nan_stays_nan_and_the_rest_of_its_group_is_scaled_as_the_reference_does(
    fp8_format: Fp8Format, fp8_max: float
) -> None:
    layout = dialect_of(fp8_format, fp8_max, 2)
    groups = torch.tensor([[torch.nan, 1.0], [3e38, torch.nan]])
    codes, scales = quantised(groups, layout)
    expected, _ = key_codecs.quantize_keys(groups, layout)

    assert scales.tolist() == [254, 254]
    assert torch.equal(codes & 0x7F, expected.int() & 0x7F)
    assert np.isnan(oracle.decode_e4m3(codes.numpy().astype(np.uint8), fp8_format is FNUZ)[[0, 1], [0, 1]]).all()


@pytest.mark.parametrize("layout", [LAYOUTS[0], LAYOUTS[3], LAYOUTS[9]], ids=lambda layout: layout.fingerprint)
def test_warm_up_foresees_every_form_that_is_launched(layout: KVCacheLayout) -> None:
    for seed in range(4):
        step = Step(layout, torch.bfloat16, seed)
        with observed() as seen:
            step.run()
            for k in (step.kv, step.kv.float()):
                insert.quantize_and_insert_k_cache(k, step.cache(), step.slots)
        known = set(insert.variants(layout, step.heads, torch.bfloat16, aligned=False, aligned_rows=False))

        assert set(seen) <= known
        assert len(known) == 12
        # odd seeds misplace everything
        usual = set(insert.variants(layout, step.heads, torch.bfloat16))
        assert seed % 2 or not layout.is_quantised or set(seen) <= usual


MUTANTS: dict[str, Callable[[WriterForm], WriterForm]] = {
    "the other dialect": lambda form: form._replace(fnuz=not form.fnuz),
    "a floor of 1e-8": lambda form: form._replace(floor=0x322BCC77),
    "the other largest code": lambda form: form._replace(largest=0x43700000),
    "RoPE one pair early": lambda form: form._replace(nope=form.nope - 2, rope=form.rope + 2),
}


@pytest.mark.mutation
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_is_found(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step(LAYOUTS[3], torch.float32, 2)
    step.kv[0, :8] = 1e-6
    step.slots = torch.tensor([0], device=DEVICE)
    step.check()
    right = insert._fused_constants

    def changed(*facts: Any, norm: bool) -> dict[str, Any]:
        constants = right(*facts, norm=norm)
        return {**constants, "WRITER": MUTANTS[mutant](constants["WRITER"])}

    monkeypatch.setattr(insert, "_fused_constants", changed)
    with pytest.raises(AssertionError):
        step.check()

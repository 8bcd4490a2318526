"""The sm90 backend: its options, which kernel serves what, and what `dsv4attn explain` says of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import evolve

from dsv4attn import errors
from dsv4attn.backends._triton.launching.runtime import multiprocessors, observed
from dsv4attn.backends.sm90 import INFO, launch
from dsv4attn.backends.sm90.attention.key_format import FP8_RECORDS, ROWS
from dsv4attn.backends.sm90.explain_notes import notes
from dsv4attn.backends.sm90.launch import Sm90Backend, _key_format
from dsv4attn.compat import flash_mla
from dsv4attn.core.cache.layout import Arrangement, Fp8Format, KVCacheLayout
from dsv4attn.core.contract.backend import Capabilities, KeyForm
from dsv4attn.core.contract.device import DeviceFacts
from dsv4attn.core.contract.limits import Limits
from dsv4attn.core.contract.problem import CacheFacts, Problem
from dsv4attn.core.memory.plan import plan_workspace
from dsv4attn.core.model.geometry import LayerKind, ModelGeometry
from dsv4attn.selection import load_backend
from tests.backends._triton.cache.caches import DEVICE

FLASH = ModelGeometry.preset("flash")
SM90 = DeviceFacts.named("sm90")
OWN = "the Gluon kernel for Hopper"


@pytest.mark.parametrize(
    "options",
    [{"prefill": "rows"}, {"prefill": True}, {"small": "own"}],
    ids=str,
)
def test_options_are_checked(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(errors.ArgumentError, match=f"^{name}: expected"):
        Sm90Backend(**options)


def test_what_prefill_may_be_is_said() -> None:
    with pytest.raises(errors.ArgumentError, match="'paged' or 'gathered', got 'rows'"):
        load_backend("sm90", prefill="rows")


def test_prefill_may_choose_unless_told() -> None:
    assert INFO.options["prefill"] == "auto"
    paged = Capabilities(prefill_keys=KeyForm.PAGED, max_logits=True, empty_lse=True)
    gathered = evolve(paged, prefill_keys=KeyForm.GATHERED, prefill_pages=True)
    assert load_backend("sm90").capabilities == load_backend("sm90", prefill="gathered").capabilities == gathered
    assert load_backend("sm90", prefill="paged").capabilities == paged
    assert load_backend("sm90", deterministic=True).capabilities == paged


def test_layers_of_the_shared_kernel_stay_on_pages() -> None:
    long, layer = [(65536, 4096)], FLASH.layer_of_kind(LayerKind.CSA)

    assert not Sm90Backend().prefers_pages(layer, long, 70000)
    assert Sm90Backend().prefers_pages(evolve(layer, num_heads=192), long, 70000)
    assert not Sm90Backend(prefill="gathered").prefers_pages(layer, [(0, 1)], 1)


@pytest.mark.parametrize("kind", list(LayerKind))
def test_only_gathered_keys_take_workspace(kind: LayerKind) -> None:
    limits, layer = Limits(4, 4096, 65536), FLASH.layer_of_kind(kind)
    plans = [
        plan_workspace(layer, limits, Sm90Backend(prefill=form), KVCacheLayout.fp8_ds_mla())
        for form in ("paged", "gathered")
    ]
    entries = 0 if kind is LayerKind.SWA else 65536 // layer.compress_ratio
    paged, gathered = (plan.arenas["prefill"] for plan in plans)

    assert 0 <= gathered - paged - (entries + layer.window - 1 + 4096) * 1024 < 4096
    assert plans[0].arenas["decode"] == plans[1].arenas["decode"]


CODES = CacheFacts("v41_fp8", arrangement="interleaved", group_size=32)
NIBBLES = CacheFacts("v41_fp4", "e2m1", arrangement="interleaved", group_size=16)
NVFP4 = CacheFacts.of(KVCacheLayout.of_record("v4_nvfp4"), 64)


def of_v41(window: CacheFacts, entries: CacheFacts | None) -> Problem:
    """A problem with these caches."""
    return evolve(Problem.of(FLASH, "swa" if entries is None else "c4a"), swa=window, compressed=entries)


@pytest.mark.parametrize(
    ("problem", "said"),
    [
        (Problem.of(FLASH), OWN),
        (Problem.of(FLASH, "swa", "prefill", heads=1), OWN),
        (Problem.of(FLASH, heads=128), OWN),
        (Problem.of(FLASH, heads=129), "129 heads, more than 128"),
        (Problem.of(FLASH, q_dtype="float32"), "q is float32"),
        (Problem.of(FLASH, dtype="e4m3fnuz"), "not all fp8_ds_mla of e4m3fn"),
        (Problem.of(FLASH, dtype="bfloat16"), "not all fp8_ds_mla of e4m3fn"),
        (of_v41(CODES, CODES), OWN),
        (of_v41(CODES, NIBBLES), OWN),
        (of_v41(CODES, evolve(NIBBLES, arrangement="split")), "scales elsewhere"),
        (of_v41(NVFP4, NVFP4), OWN),
        (of_v41(NVFP4, None), OWN),
        (of_v41(CacheFacts(), NVFP4), "not all fp8_ds_mla of e4m3fn, nor v4_nvfp4"),
        (of_v41(CacheFacts(), CODES), "not all fp8_ds_mla"),
        (of_v41(evolve(CacheFacts(), arrangement="interleaved"), None), "scales elsewhere"),
        (Problem.of(FLASH, "swa", dtype="bfloat16"), OWN),
    ],
)
def test_explain_says_which_kernel_serves_and_why(problem: Problem, said: str) -> None:
    line, *_ = notes(SM90, problem)

    assert said in line
    assert (OWN in line) == (said == OWN)
    # only decodes are left to the shared kernel
    assert (" for few tokens" in line) == (said == OWN and problem.phase == "decode")


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_explain_says_that_deterministic_calls_have_one_kernel(phase: str) -> None:
    said = notes(SM90, Problem.of(FLASH, "c4a", phase, deterministic=True))

    assert OWN in said[0]
    assert "the same in both phases, and no row is split" in said[0]
    assert not any("for few tokens" in line or "prefill=auto" in line for line in said)


def test_deterministic_prefill_reads_pages() -> None:
    for prefill in ("auto", "paged", "gathered"):
        backend = Sm90Backend(deterministic=True, prefill=prefill)
        assert backend.capabilities.prefill_keys is KeyForm.PAGED
        assert not backend.capabilities.prefill_pages


@pytest.mark.parametrize(
    ("kind", "said"), [("c4a", "from 1,024, 256, 512 tokens on"), ("swa", "from 4,096, 4,096, 4,096 tokens on")]
)
def test_explain_says_which_chunks_prefill_auto_gathers(kind: str, said: str) -> None:
    (line,) = [line for line in notes(SM90, Problem.of(FLASH, kind, "prefill")) if "prefill=auto" in line]

    assert said in line
    for other in (Problem.of(FLASH, kind), Problem.of(FLASH, kind, "prefill", q_dtype="float32")):
        assert not any("prefill=auto" in line for line in notes(SM90, other))


def test_what_a_kernel_reads_follows_from_layouts() -> None:
    record, rows = KVCacheLayout.fp8_ds_mla(), KVCacheLayout.rows()
    others = [
        KVCacheLayout.fp8_ds_mla(fp8_format=Fp8Format.FNUZ),
        KVCacheLayout.fp8_ds_mla(arrangement=Arrangement.INTERLEAVED),
        KVCacheLayout.fp8_ds_mla(24, 8, group_size=8),
        evolve(record, group_size=32),
        evolve(record, scale_padding=1),
        # look-alikes by dims and groups, which V4's word reader would misread
        evolve(record, name="v41_fp8"),
        KVCacheLayout.v41_fp4(),
        KVCacheLayout.v41_fp8(24, 8),
        KVCacheLayout.rows(dtype=torch.float32),
        KVCacheLayout.rows(24, 8),
    ]

    assert _key_format(record) == _key_format(record, record) == FP8_RECORDS
    assert _key_format(rows) == ROWS
    assert [_key_format(*pair) for layout in others for pair in ([layout], [record, layout], [layout, record])] == [
        None
    ] * 30
    nvfp4 = KVCacheLayout.of_record("v4_nvfp4")
    assert _key_format(nvfp4) == _key_format(nvfp4, nvfp4) == (4, False)
    for pair in ([record, nvfp4], [nvfp4, record], [KVCacheLayout.of_record("v4_nvfp4", 36, 6)]):
        assert _key_format(*pair) is None
    for interleaved, arrangement in enumerate((Arrangement.SPLIT, Arrangement.INTERLEAVED)):
        codes, nibbles = (make(arrangement=arrangement) for make in (KVCacheLayout.v41_fp8, KVCacheLayout.v41_fp4))
        assert _key_format(codes) == _key_format(codes, codes) == (2, interleaved)
        assert _key_format(codes, nibbles) == (3, interleaved)
        (other,) = {Arrangement.SPLIT, Arrangement.INTERLEAVED} - {arrangement}
        assert _key_format(codes, evolve(nibbles, arrangement=other)) is None
    assert _key_format(rows, rows) is _key_format(record, rows) is _key_format(rows, record) is None


def served(kv: torch.Tensor, heads: int = 4, **options: Any) -> set[str]:
    """Kernels that FlashMLA's own call of prefill launches."""
    q = torch.randn(3, heads, 512, generator=torch.Generator().manual_seed(1)).bfloat16().to(DEVICE)
    rows = torch.arange(3 * 70, dtype=torch.int32, device=DEVICE).view(3, 1, 70) % (kv.shape[0] + 3) - 1
    with observed() as seen:
        out, largest, lse = flash_mla.flash_mla_sparse_fwd(q, kv, rows, 512**-0.5, backend="sm90", **options)
    keys = kv[:, 0].double()
    ok = (rows >= 0) & (rows < len(keys))
    z = torch.einsum("thd,tkd->thk", q.double(), keys[rows[:, 0].clamp(0, len(keys) - 1).long()]) * 512**-0.5
    z = torch.where(ok, z, -torch.inf)

    assert torch.allclose(lse.double(), z.logsumexp(-1), atol=1e-3)
    assert torch.allclose(largest.double(), z.amax(-1), atol=1e-3)
    right = torch.einsum("thk,tkd->thd", z.softmax(-1), keys[rows[:, 0].clamp(0, len(keys) - 1).long()])
    assert (out.double() - right).norm() <= 4e-3 * right.norm()
    return {variant.name for variant in seen}


def test_flash_mla_s_prefill_takes_the_gluon_kernel_with_largest_logits() -> None:
    kv = torch.randn(100, 1, 512, generator=torch.Generator().manual_seed(2)).bfloat16().to(DEVICE)

    assert served(kv) == {"attention", "combine_parts"}
    # rows that do not lie at multiples of 16 bytes
    wide = torch.zeros(100, 1, 515, dtype=torch.bfloat16, device=DEVICE)
    wide[..., :512] = kv
    assert "combine_parts" not in served(wide[..., :512])


def test_a_device_s_programs_are_shared_by_blocks_of_heads() -> None:
    units = multiprocessors()

    assert launch._programs(1) == launch._programs(64) == units
    assert launch._programs(65) == launch._programs(128) == max(units // 2, 1) * 2

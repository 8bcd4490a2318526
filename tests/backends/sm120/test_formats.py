"""Formats of FlashInfer's caches besides V4's own: V4.1's records and NVFP4. None of them was run on a card."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
import pytest
import torch

from dsv4attn.backends._triton.interpreted import INTERPRETED
from dsv4attn.backends.sm120.explain_notes import _assumed
from dsv4attn.backends.sm120.flashinfer import FlashInferAttention
from dsv4attn.backends.sm120.probe import InstalledFlashInfer, find, forget
from dsv4attn.backends.sm120.served import reasons
from dsv4attn.core.cache.layout import Arrangement, KVCacheLayout, PagedKVCache
from dsv4attn.core.cache.selected_keys import PagedKeys
from dsv4attn.core.contract.problem import CacheFacts, Reason
from dsv4attn.errors import Dsv4AttnError
from dsv4attn.testing.kit.tolerances import tolerance
from tests.backends.sm120.decode_calls import LAYOUT, Trial
from tests.backends.sm120.fake_flashinfer import FormatsWrapper, RecordingWrapper, all_configs
from tests.backends.sm120.test_probe import install, working

SPLIT = Arrangement.SPLIT
INLINE_FP8, INLINE_FP4 = KVCacheLayout.v41_fp8(), KVCacheLayout.v41_fp4()
FP8, FP4 = KVCacheLayout.v41_fp8(arrangement=SPLIT), KVCacheLayout.v41_fp4(arrangement=SPLIT)
NVFP4 = KVCacheLayout.of_record("v4_nvfp4")
PAIRS = {
    "fp8_dsv41": (FP8, FP8),
    "fp8_dsv41_fp4_ca": (FP8, FP4),
    "fp8_dsv41_inline": (INLINE_FP8, INLINE_FP8),
    "fp8_dsv41_inline_fp4_ca": (INLINE_FP8, INLINE_FP4),
    "nvfp4": (NVFP4, NVFP4),
}
BEFORE_INLINE = ["fp8_dsv41", "fp8_dsv41_fp4_ca", "nvfp4"]
BUDGET = tolerance(LAYOUT, torch.bfloat16) + 2**-9
needs_cpu = pytest.mark.skipif(not INTERPRETED, reason="the stand-in takes the CPU's tensors, and kernels do not")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[InstalledFlashInfer]:
    forget()
    package = working(SparseMLASm120Wrapper=FormatsWrapper, supported_sparse_mla_sm120_configs=all_configs)
    install(monkeypatch, package)
    answer = find()
    assert isinstance(answer, InstalledFlashInfer)
    yield answer
    forget()


def trial_of(name: str, **fields: Any) -> Trial:
    """A small call; NVFP4 has kernels for windows of 128 and 512 columns and 2, 32 or 64 entries a page alone."""
    widths, pages = ((128, 9), (64, 2)) if name == "nvfp4" else ((6, 9), (5, 3))
    return Trial(**{"widths": widths, "pages": pages, "layouts": PAIRS[name], "heads": 16, "tokens": 4, **fields})


def names(installed: InstalledFlashInfer) -> list[str]:
    return [other.format.name for other in installed.others]


def test_formats_are_those_that_the_installed_version_has(
    installed: InstalledFlashInfer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert names(installed) == [*PAIRS]
    assert [other.config.bytes_per_token for other in installed.others] == [528, 528, 528, 528, 384]

    def none_of_nvfp4() -> dict[str, Any]:
        return all_configs()

    def none_inline(**question: str) -> dict[str, Any]:
        return {name: config for name, config in all_configs(**question).items() if name != "dsv4_1_inline"}

    for changes, expected in (
        ({"SparseMLASm120Wrapper": RecordingWrapper}, []),
        ({"supported_sparse_mla_sm120_configs": none_of_nvfp4}, [*PAIRS][:-1]),
        ({"supported_sparse_mla_sm120_configs": none_inline}, BEFORE_INLINE),
    ):
        forget()
        contents = {
            "SparseMLASm120Wrapper": FormatsWrapper,
            "supported_sparse_mla_sm120_configs": all_configs,
            **changes,
        }
        install(monkeypatch, working(**contents))
        answer = find()
        assert isinstance(answer, InstalledFlashInfer)
        assert names(answer) == expected


def test_the_real_package_has_those_of_its_release() -> None:
    forget()
    answer = find()
    if isinstance(answer, Reason):
        pytest.skip(answer.text)
    assert names(answer) == (BEFORE_INLINE if answer.version.startswith("0.7.2") else [*PAIRS])
    # `explain` knows its version alone
    assert [other.format.name for other in _assumed(answer.version).others] == names(answer)[:-1]
    forget()


@needs_cpu
@pytest.mark.parametrize("name", PAIRS)
def test_calls_of_each_format_agree_with_float64(name: str, installed: InstalledFlashInfer) -> None:
    trial = trial_of(name, sinks=(0.4, -torch.inf, 2.5))
    attention = FlashInferAttention(installed, lossy=True)
    call = trial.run(attention, trial.call(lse=True))

    assert trial.expected.errors(call.out, call.lse).max() <= BUDGET + 2**-9
    alone = attrs.evolve(trial, widths=(trial.widths[0], 0))
    call = alone.run(attention, alone.call())
    assert alone.expected.errors(call.out, None).max() <= BUDGET
    wrapper = attention._wrapper(call.q.device, installed.for_caches(*facts(trial)) or installed)
    assert [cache.shape[-1] for cache in (wrapper.calls[0]["kv_cache"], wrapper.calls[0]["extra_kv_cache"])] == [
        layout.record_bytes for layout in trial.layouts
    ]


def facts(trial: Trial) -> tuple[Any, Any]:
    window, compressed = (CacheFacts.of(layout, 1) for layout in trial.layouts)
    return tuple((c.layout, c.dtype, c.arrangement, c.group_size) for c in (window, compressed))  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("layouts", "name", "changes", "said"),
    [
        ((INLINE_FP8, FP8), "fp8_dsv41", {}, "cache: expected layout fp8_ds_mla"),
        ((LAYOUT, FP4), "fp8_dsv41", {}, "cache: expected layout fp8_ds_mla"),
        ((NVFP4, FP8), "nvfp4", {}, "cache: expected layout fp8_ds_mla"),
        ((FP8, FP4), "fp8_dsv41", {"heads": 128, "tokens": 65}, "HEADS: expected at most 64 for more than 64 tokens"),
        ((INLINE_FP8, INLINE_FP4), "fp8_dsv41", {"heads": 65, "tokens": 65}, "HEADS: expected at most 64 for more"),
        ((NVFP4, NVFP4), "nvfp4", {"widths": (64, 9)}, "WINDOW: expected 128, 512"),
        ((NVFP4, NVFP4), "nvfp4", {"pages": (64, 4)}, "PAGE_SIZE: expected 2, 32, 64"),
    ],
)
def test_what_a_format_does_not_have_is_refused_before_any_write(
    layouts: Any, name: str, changes: dict[str, Any], said: str, installed: InstalledFlashInfer
) -> None:
    trial = trial_of(name, **{**changes, "layouts": layouts})
    attention, call = FlashInferAttention(installed, lossy=True), trial.call()
    with pytest.raises(Dsv4AttnError, match=f"^{said}"):
        attention.prepare(call)
    assert attention.fit(call) is None
    assert bool(call.out.isnan().all())


def test_a_format_that_rounds_queries_to_four_bits_is_used_only_if_it_is_asked_for(
    installed: InstalledFlashInfer,
) -> None:
    call = trial_of("nvfp4").call()
    with pytest.raises(Dsv4AttnError, match=r"^nvfp4: .* -> ask for option kernel=flashinfer"):
        FlashInferAttention(installed).prepare(call)
    FlashInferAttention(installed, lossy=True).prepare(call)


def test_reasons_are_those_of_the_format_of_the_caches(installed: InstalledFlashInfer) -> None:
    problem = trial_of("fp8_dsv41").problem
    assert reasons(installed, problem, tokens=4) == []
    other = attrs.evolve(problem, swa=attrs.evolve(problem.swa, group_size=64))
    (reason,) = reasons(installed, other, tokens=4)
    assert reason.code == "LAYOUT"
    assert reason.allowed == (
        "fp8_ds_mla of e4m3fn, split, groups of 64 or v41_fp8 of e4m3fn, split, groups of 32"
        " or v41_fp8 of e4m3fn, interleaved, groups of 32 or v4_nvfp4 of e2m1, split, groups of 16"
    )
    mixed = attrs.evolve(problem, compressed=trial_of("nvfp4").problem.compressed)
    assert [reason.code for reason in reasons(installed, mixed, tokens=4)] == ["LAYOUT"]


def test_padding_between_pages_of_an_inline_format_is_refused_as_its_rows_would_count(
    installed: InstalledFlashInfer,
) -> None:
    trial = trial_of("fp8_dsv41_inline")
    call, (window, entries) = trial.call(), trial.keys()
    memory = torch.zeros(3 * 6 * 528, dtype=torch.uint8, device=call.q.device)
    padded = PagedKVCache(memory.as_strided((3, 5, 528), (6 * 528, 528, 1)), INLINE_FP8)
    call = attrs.evolve(call, keys=(PagedKeys(padded, window.rows), entries))
    with pytest.raises(Dsv4AttnError, match=r"^cache: expected pages every 2640 bytes, without padding.*got 3168"):
        FlashInferAttention(installed).prepare(call)
    assert FlashInferAttention(installed).fit(call) is None


@needs_cpu
def test_heads_are_padded_for_decode_kernels_of_fixed_head_counts_alone(installed: InstalledFlashInfer) -> None:
    trial = trial_of("fp8_dsv41_inline", heads=12)
    for lossy, heads in ((False, 12), (True, 16)):
        attention = FlashInferAttention(installed, lossy=lossy)
        call = trial.run(attention, trial.call(lse=True))
        wrapper = attention._wrapper(call.q.device, installed.for_caches(*facts(trial)) or installed)

        assert trial.expected.errors(call.out, call.lse).max() <= BUDGET + 2**-9
        assert {arguments["q"].shape[1] for arguments in wrapper.calls} == {heads}

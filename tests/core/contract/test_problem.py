"""Descriptions of calls, and reasons."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import evolve

from dsv4attn.core.cache.layout import Arrangement, Fp8Format, KVCacheLayout
from dsv4attn.core.contract.backend import Phase
from dsv4attn.core.contract.problem import CacheFacts, Problem, Reason
from dsv4attn.core.model.geometry import LayerKind, ModelGeometry
from dsv4attn.errors import ArgumentError, UnknownNameError

FLASH = ModelGeometry.preset("flash")


def test_a_problem_has_the_values_of_the_model() -> None:
    problem = Problem.of(FLASH)

    assert (problem.phase, problem.layer, problem.topk) == ("decode", FLASH.layer_of_kind("c4a"), 512)
    assert (problem.swa, problem.compressed) == (CacheFacts(), CacheFacts(page_size=64))


def test_the_problems_of_window_only_and_c128a_layers() -> None:
    swa, c128a = Problem.of(FLASH, "swa"), Problem.of(FLASH, LayerKind.HCA, max_model_len=100_000)

    assert (swa.compressed, swa.topk) == (None, 0)
    # 782 entries, in a table whose width is a multiple of 128
    assert (c128a.compressed, c128a.topk) == (CacheFacts(page_size=2), 896)


def test_keywords_override_the_values_of_the_model() -> None:
    problem = Problem.of(
        FLASH,
        "c4a",
        "prefill",
        heads=24,
        topk=1152,
        swa_page_size=16,
        compressed_page_size=7,
        dtype="bfloat16",
        q_dtype="float32",
        sink=False,
        lse=True,
        query_len=3,
        capture=True,
        deterministic=True,
    )

    assert (problem.layer.num_heads, problem.layer.topk, problem.topk) == (24, 1152, 1152)
    assert problem.swa == CacheFacts("rows", "bfloat16", 16)
    assert problem.compressed == CacheFacts("rows", "bfloat16", 7)
    assert (problem.q_dtype, problem.sink, problem.lse) == ("float32", False, True)
    assert (problem.query_len, problem.capture, problem.deterministic) == (3, True, True)


def test_topk_may_be_0() -> None:
    problem = Problem.of(FLASH, topk=0)

    assert (problem.topk, problem.layer.topk) == (0, 512)


def test_the_problem_of_a_layer_is_that_of_its_model() -> None:
    assert Problem.of(FLASH.layer_of_kind("c4a")) == Problem.of(FLASH, "c4a")


def test_problems_can_be_compared_and_kept_in_sets() -> None:
    assert len({Problem.of(FLASH), Problem.of(FLASH), Problem.of(FLASH, heads=8)}) == 2


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_a_phase_is_a_word_or_a_phase_of_the_contract(phase: str) -> None:
    assert Problem.of(FLASH, phase=Phase(phase)) == Problem.of(FLASH, phase=phase)
    assert Problem.of(FLASH, phase=Phase(phase)).phase == phase
    assert str(Problem.of(FLASH, phase=Phase(phase))).startswith(f"{phase}  ")


def test_values_that_do_not_fit_each_other_are_errors() -> None:
    swa = FLASH.layer_of_kind("swa")
    with pytest.raises(UnknownNameError, match=r"^unknown phase 'decod'; did you mean 'decode'\?"):
        Problem("decod", swa)
    with pytest.raises(ArgumentError, match=r"^topk: expected 0 on a window-only layer, got 512"):
        Problem.of(FLASH, "swa", topk=512)
    with pytest.raises(ArgumentError, match=r"^compressed: expected none on a window-only layer, got a page size of 4"):
        Problem.of(FLASH, "swa", compressed_page_size=4)
    with pytest.raises(
        ArgumentError, match=r"^compressed: expected none on a window-only layer, got a cache of e4m3fn"
    ):
        Problem("decode", swa, compressed=CacheFacts())
    with pytest.raises(ArgumentError, match=r"^compressed: expected a cache on a c4a layer, got none"):
        Problem("decode", FLASH.layer_of_kind("c4a"))
    with pytest.raises(UnknownNameError, match=r"^unknown layer kind 'c5a'"):
        Problem.of(FLASH, "c5a")


@pytest.mark.parametrize("size", ["swa_page_size", "compressed_page_size", "heads", "query_len", "topk"])
def test_sizes_are_positive(size: str) -> None:
    sizes: dict[str, Any] = {size: -1}
    with pytest.raises(ArgumentError, match="expected an integer of at least"):
        Problem.of(FLASH, **sizes)


def test_a_problem_is_shown_on_one_line() -> None:
    full = Problem.of(FLASH, topk=640, dtype="float32", lse=True, capture=True, sink=False, query_len=3)

    assert str(Problem.of(FLASH)) == (
        "decode  c4a  heads=64  head_dim=512 (448 fp8 + 64 bf16)  window=128  compress_ratio=4  topk=512"
        "  pages=64+64  kv=e4m3fn  q=bfloat16"
    )
    assert str(full) == (
        "decode  c4a  heads=64  head_dim=512 (448 + 64)  window=128  compress_ratio=4  topk=640"
        "  pages=64+64  kv=float32  q=bfloat16  query_len=3  lse  capture  no sink"
    )
    assert "pages=64  " in str(Problem.of(FLASH, "swa"))
    mixed = evolve(Problem.of(FLASH), compressed=CacheFacts(dtype="e4m3fnuz"))
    assert "kv=e4m3fn+e4m3fnuz  " in str(mixed)


@pytest.mark.parametrize(
    ("layout", "facts"),
    [
        (KVCacheLayout.fp8_ds_mla(), CacheFacts(page_size=16)),
        (
            KVCacheLayout.fp8_ds_mla(fp8_format=Fp8Format.FNUZ, arrangement=Arrangement.INTERLEAVED, group_size=32),
            CacheFacts("fp8_ds_mla", "e4m3fnuz", 16, "interleaved", 32),
        ),
        (KVCacheLayout.rows(), CacheFacts("rows", "bfloat16", 16)),
        (KVCacheLayout.rows(dtype=torch.float32), CacheFacts("rows", "float32", 16)),
    ],
)
def test_a_layout_is_described_without_torch(layout: KVCacheLayout, facts: CacheFacts) -> None:
    assert CacheFacts.of(layout, 16) == facts


@pytest.mark.parametrize("dtype", ["e4m3fn", "e4m3fnuz", "bfloat16", "float32"])
def test_a_built_in_layout_has_a_short_name(dtype: str) -> None:
    assert CacheFacts.named(dtype, 8).dtype == dtype
    assert CacheFacts.named(dtype, 8).layout == ("fp8_ds_mla" if "e4m3" in dtype else "rows")


def test_a_reason_has_parts_for_programs_and_a_line_for_people() -> None:
    reason = Reason("HEADS", 24, "64 or\n128", "pad q")

    assert (reason.code, reason.actual, reason.allowed, reason.cure) == ("HEADS", "24", "64 or\n128", "pad q")
    assert str(reason) == "HEADS  24, needs 64 or 128 -> pad q"
    assert str(Reason("HEADS", "24", "64")) == "HEADS  24, needs 64"

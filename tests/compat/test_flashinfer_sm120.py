"""The wrapper on our own kernel: float64 answers through every mix of ranks, and errors before anything is launched."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve

from dsv4attn.backends._triton.attention import launch as attention_launch
from dsv4attn.backends._triton.interpreted import INTERPRETED
from dsv4attn.backends._triton.launching.runtime import observed
from dsv4attn.compat.flashinfer_sm120 import SparseMLASm120Wrapper, get_padded_num_q_heads
from dsv4attn.errors import ArgumentError, UnsupportedError
from tests.backends._triton.attention.attention_trials import OCP, Answer, Trial
from tests.backends._triton.cache.caches import DEVICE

LOG2E = 1 / math.log(2)
BASE = Trial(layouts=(OCP, OCP), pages=(64, 2), widths=(128, 40), tokens=2, heads=8)
TRIALS = {
    "model": BASE,
    "window": Trial(layouts=(OCP,), pages=(64,), widths=(40,), heads=3),
    "no sink": evolve(BASE, sink=False, heads=1),
    "no extra columns": evolve(BASE, widths=(20, 0)),
    "128 heads": evolve(BASE, heads=128, tokens=1, widths=(20, 33)),
    "odd pages": evolve(BASE, pages=(5, 3), widths=(33, 20), aligned=False),
}


def arguments(trial: Trial, deep: str = "") -> dict[str, Any]:
    """What a trial's call passes to the wrapper. deep: arguments that get a singleton axis."""
    call, _ = trial.call()
    keys: Any = call.keys
    names = ("kv_cache", "indices", "topk_length"), ("extra_kv_cache", "extra_indices", "extra_topk_length")
    named: dict[str, Any] = {"q": call.q, "output": call.out, "attn_sink": call.attn_sink}
    for (cache, indices, lens), segment in zip(names, keys, strict=False):
        named |= {cache: segment.cache.tensor, indices: segment.rows.indices, lens: segment.rows.lens}
    for name in filter(None, deep.split()):
        named[name] = named[name].unsqueeze(2 if name.endswith("cache") else 1)
    return {**named, "sm_scale": trial.layer.scale}


def ran(trial: Trial, wrapper: Any = None, /, deep: Any = "", **changes: Any) -> tuple[Any, Any]:
    """A trial's call through the wrapper: out, and what it returned."""
    named = arguments(trial, deep)
    lse = (wrapper or SparseMLASm120Wrapper()).run(**{**named, **changes})
    out = named["output"]
    return out.squeeze(1) if out.ndim == 4 else out, lse


def expected_lse(trial: Trial, scale: float = 1.0) -> Any:
    """[T, H] base 2, with the sink."""
    natural = trial.expected[0].lse
    sinks = np.full(trial.heads, -np.inf) if trial.sinks is None else trial.sinks
    return np.logaddexp(natural, np.broadcast_to(sinks, natural.shape)) * LOG2E * scale


@pytest.mark.parametrize("deep", ["", "q", "q output indices", "kv_cache extra_kv_cache extra_indices"])
@pytest.mark.parametrize("name", TRIALS)
def test_every_mix_of_ranks_gives_the_oracles_answer(name: str, deep: str) -> None:
    trial = evolve(TRIALS[name], wants_lse=False)
    deep = " ".join(part for part in deep.split() if len(trial.layouts) == 2 or not part.startswith("extra"))
    out, lse = ran(trial, deep=deep)

    assert lse is None
    assert trial.error(Answer(out, None, None)) <= 1


@pytest.mark.parametrize("scale", [1.0, math.log(2)])
@pytest.mark.parametrize("sink", [False, True])
def test_the_lse_has_base_two_and_the_sink(*, sink: bool, scale: float) -> None:
    trial = evolve(BASE, wants_lse=False, sink=sink, tokens=7)
    lse = torch.full((9, 8), math.nan, device=DEVICE)
    out, lse_out = ran(trial, out_lse=lse, return_lse=True, lse_scale=scale)
    _, alone = ran(trial, return_lse=True, lse_scale=scale)

    right = expected_lse(trial, scale)
    assert trial.error(Answer(out, None, None)) <= 1
    assert lse_out.data_ptr() == lse.data_ptr()
    assert torch.equal(lse_out, alone)
    np.testing.assert_allclose(lse_out.double().cpu().numpy(), right, rtol=1e-5, atol=1e-4)
    assert np.isneginf(right).any() or sink
    assert bool(lse[7:].isnan().all())


def test_without_lengths_all_columns_count() -> None:
    trial = evolve(BASE, wants_lse=False)
    for segment in trial.segments:
        width = segment.slots.shape[1]
        segment.slots[np.arange(width) >= segment.lens[:, None]] = -1
        segment.lens[:] = width
    out, _ = ran(trial, topk_length=None, extra_topk_length=None)

    assert trial.error(Answer(out, None, None)) <= 1


def test_few_tokens_share_rows_and_many_do_not_and_both_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    import dsv4attn.compat.flashinfer_sm120 as module

    monkeypatch.setattr(module, "_MOST_SPLIT_TOKENS", 1)
    few, many = evolve(BASE, wants_lse=False, tokens=1), evolve(BASE, wants_lse=False)
    with observed() as seen:
        out, _ = ran(few)
    assert few.error(Answer(out, None, None)) <= 1
    assert {variant.name for variant in seen} == {"attention", "reduce"}
    with observed() as seen:
        out, _ = ran(many)
    assert many.error(Answer(out, None, None)) <= 1
    assert {variant.name for variant in seen} == {"attention"}


@pytest.mark.parametrize("parts", [0, 1, 2, 5])
def test_a_caller_may_bring_memory_for_as_many_parts_as_fit(parts: int) -> None:
    trial = evolve(BASE, wants_lse=False, tokens=1)
    mid = torch.full((parts * 8 * 512 * 2,), math.nan, dtype=torch.bfloat16, device=DEVICE)
    lse = torch.full((parts * 8,), math.nan, device=DEVICE)
    with observed() as seen:
        out, _ = ran(trial, mid_out=mid, mid_lse=lse)

    assert trial.error(Answer(out, None, None)) <= 1
    assert ("reduce" in {variant.name for variant in seen}) == (parts >= 2)


def test_what_engines_cannot_run_today_runs() -> None:
    """64 heads and 1,152 entries found no kernel."""
    trial = Trial(layouts=(OCP, OCP), pages=(64, 64), widths=(128, 1152), heads=64, tokens=1, wants_lse=False)
    out, _ = ran(trial)

    assert trial.error(Answer(out, None, None)) <= 1


def test_nothing_is_launched_for_no_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_launch, "prepare", lambda *_, **__: pytest.fail("launched"))
    out, lse = ran(evolve(BASE, tokens=0, wants_lse=False), return_lse=True)

    assert (out.shape, lse.shape) == ((0, 8, 512), (0, 8))


def test_answers_are_right_in_memory_that_was_reserved_for_more() -> None:
    wrapper = SparseMLASm120Wrapper(4, 16, device=DEVICE)
    for tokens, heads in ((1, 8), (4, 16), (1, 8), (2, 3)):
        trial = evolve(BASE, wants_lse=False, tokens=tokens, heads=heads)
        out, _ = ran(trial, wrapper)
        assert trial.error(Answer(out, None, None)) <= 1


@pytest.mark.device
@pytest.mark.skipif(INTERPRETED or not torch.cuda.is_available(), reason="needs an accelerator with graphs")
@pytest.mark.parametrize("maxima", [(4, 128), (None, None)], ids=["maxima", "none"])
def test_a_captured_run_is_right_after_larger_ones(maxima: tuple[int | None, int | None]) -> None:
    small = evolve(BASE, wants_lse=False, tokens=1)
    for segment in small.segments:
        width = segment.slots.shape[1]
        segment.slots[np.arange(width) >= segment.lens[:, None]] = -1
        segment.lens[:] = width
    wrapper, all_columns = SparseMLASm120Wrapper(*maxima), dict.fromkeys(("topk_length", "extra_topk_length"))
    ran(small, None if maxima[0] else wrapper, **all_columns)  # compiles, and allocates where nothing was said
    named = {**arguments(small), **all_columns}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        wrapper.run(**named)
    for tokens, heads in ((4, 8), (2, 128), (4 if maxima[0] else 70, 64)):
        ran(evolve(BASE, wants_lse=False, tokens=tokens, heads=heads), wrapper, **all_columns)
        # whatever was freed is someone else's now
        spoiled = [torch.full((2**n,), 77, dtype=torch.int32, device=DEVICE) for n in range(8, 24)]
        named["output"].fill_(math.nan)
        graph.replay()
        torch.cuda.synchronize()
        del spoiled

        assert small.error(Answer(named["output"], None, None)) <= 1, (tokens, heads)


def test_heads_are_padded_to_what_flashinfer_has() -> None:
    assert [get_padded_num_q_heads(n) for n in (1, 8, 9, 33, 64, 65, 128)] == [8, 8, 16, 64, 64, 128, 128]
    for wrong in (0, 129):
        with pytest.raises(ArgumentError, match="num_heads"):
            get_padded_num_q_heads(wrong)


# bad input

INT = torch.int32
BAD: Mapping[str, tuple[Mapping[str, Any], str]] = {
    "q in fp32": ({"q": torch.zeros(2, 8, 512)}, "q"),
    "q of other dims": ({"q": torch.zeros(2, 8, 576).bfloat16()}, "q"),
    "two queries a row": ({"q": torch.zeros(2, 2, 8, 512).bfloat16()}, "q"),
    "too many heads": ({"q": torch.zeros(2, 129, 512).bfloat16(), "attn_sink": None}, "output"),
    "output of other heads": ({"output": torch.zeros(2, 7, 512).bfloat16()}, "output"),
    "records of another size": ({"kv_cache": torch.zeros(2, 64, 528, dtype=torch.uint8)}, "kv_cache"),
    "a cache of another type": ({"extra_kv_cache": torch.zeros(2, 64, 584)}, "extra_kv_cache"),
    "pages that overlap": (
        {"kv_cache": torch.zeros(9000, dtype=torch.uint8, device=DEVICE).as_strided((3, 4, 584), (584, 584, 1))},
        "cache tensor",
    ),
    "no columns": ({"indices": torch.zeros(2, 0, dtype=INT)}, "indices"),
    "indices in int64": ({"indices": torch.zeros(2, 8, dtype=torch.int64)}, "indices"),
    "indices of other rows": ({"extra_indices": torch.zeros(3, 8, dtype=INT)}, "extra_indices"),
    "extra indices without a cache": ({"extra_kv_cache": None}, "extra_kv_cache"),
    "an extra cache without indices": ({"extra_indices": None}, "extra_indices"),
    "extra lengths alone": ({"extra_kv_cache": None, "extra_indices": None}, "extra_topk_length"),
    "lengths of other rows": ({"topk_length": torch.zeros(3, dtype=INT)}, "topk_length"),
    "sinks of other heads": ({"attn_sink": torch.zeros(16)}, "attn_sink"),
    "an lse of fewer rows": ({"out_lse": torch.zeros(1, 8)}, "out_lse"),
    "an lse of other heads": ({"out_lse": torch.zeros(2, 16)}, "out_lse"),
    "half of the memory": ({"mid_out": torch.zeros(9)}, "mid_lse"),
    "memory with gaps": ({"mid_out": torch.zeros(9, 2)[:, 0], "mid_lse": torch.zeros(9)}, "mid_out"),
    "a cache elsewhere": ({"kv_cache": torch.zeros(2, 64, 584, dtype=torch.uint8, device="meta")}, "kv_cache"),
}


@pytest.mark.parametrize("case", BAD.values(), ids=BAD)
def test_bad_input_is_an_error_before_any_launch(
    case: tuple[Mapping[str, Any], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    changed, argument = case
    monkeypatch.setattr(attention_launch, "prepare", lambda *_, **__: pytest.fail("launched"))
    moved = {
        name: value.to(DEVICE) if isinstance(value, torch.Tensor) and value.is_cpu and value.is_contiguous() else value
        for name, value in changed.items()
    }
    with pytest.raises(ArgumentError) as raised:
        ran(evolve(BASE, wants_lse=False), **moved)

    assert raised.value.argument == argument


def test_what_is_not_deepseek_v4_is_refused_by_name() -> None:
    every: tuple[dict[str, Any], ...] = (
        {"d_v": 1024},
        {"kv_scale_format": "ue8m0_g32"},
        {"kv_cache_format": "nvfp4"},
        {"extra_kv_fp4": True},
        {"compute_precision": "fp8"},
        {"backend": "cake"},
    )
    for wrong in every:
        with pytest.raises(UnsupportedError, match=next(iter(wrong))):
            SparseMLASm120Wrapper(**wrong)
    with pytest.raises(UnsupportedError, match="prefill_impl"):
        ran(evolve(BASE, wants_lse=False), prefill_impl="swapab")

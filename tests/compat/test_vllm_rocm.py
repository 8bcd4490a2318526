"""Attention under the field's names on the rocm backend: float64 answers, and errors before anything is launched."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve

from dsv4attn.backends._triton.attention import launch as attention_launch
from dsv4attn.backends._triton.index_ops import ragged
from dsv4attn.backends._triton.launching.runtime import observed
from dsv4attn.backends.reference.launch import ReferenceBackend
from dsv4attn.compat.vllm_rocm import rocm_sparse_attn_decode, rocm_sparse_attn_prefill
from dsv4attn.core.cache.layout import KVCacheLayout, PagedKVCache
from dsv4attn.core.cache.selected_keys import RaggedIndices
from dsv4attn.core.memory.workspace import WorkspaceManager
from dsv4attn.core.model.rope import cos_sin_cache
from dsv4attn.errors import ArgumentError
from tests.backends._triton.attention.attention_trials import FNUZ, OCP, Answer, Trial
from tests.backends._triton.cache.caches import DEVICE

INT = torch.int32


def listed(rows: Any) -> tuple[Any, Any, Any, Any]:
    """(dense indices, lens, ragged indices, indptr) of one segment, two of them None."""
    if isinstance(rows, RaggedIndices):
        return None, None, rows.indices, rows.indptr
    return rows.indices, rows.lens, None, None


def decoded(trial: Trial, *, as_tensors: bool = True, **changes: Any) -> tuple[Answer, int]:
    """A trial's call under the field's name, and what it returned."""
    call, _ = trial.call()
    keys: Any = call.keys
    first, *rest = [(segment.cache, *listed(segment.rows)) for segment in keys]
    cache, indices, lens, flat, indptr = rest[0] if rest else (None,) * 5
    layout = trial.layouts[0]
    formats = {"swa_fp8_format": layout.fp8_format, "fp8_format": trial.layouts[-1].fp8_format}
    swa, other = first[0].tensor if as_tensors else first[0], cache.tensor if cache and as_tensors else cache
    turned = rocm_sparse_attn_decode(
        call.q, other, swa, not rest, indices, lens, *first[1:], flat, indptr, call.attn_sink, trial.layer.scale,
        layout.head_dim, layout.nope_dim, layout.rope_dim, call.out, **{**formats, **changes},
    )  # fmt: skip
    return Answer(call.out, None, None), turned


DECODES = {
    "model": Trial(layouts=(OCP, OCP), pages=(64, 2), widths=(128, 40), tokens=2, heads=8, form="ragged"),
    "mixed dialects": Trial(layouts=(FNUZ, OCP), pages=(64, 64), widths=(40, 30), form="ragged"),
    "mixed the other way": Trial(layouts=(OCP, FNUZ), pages=(5, 64), widths=(40, 30), form="ragged", aligned=False),
    "dense": Trial(layouts=(OCP, OCP), widths=(20, 40)),
    "window": Trial(layouts=(OCP,), pages=(64,), widths=(40,), heads=3, form="ragged"),
    "no columns": Trial(layouts=(OCP, OCP), pages=(64, 64), widths=(20, 0), form="ragged"),
    "no tokens": Trial(layouts=(OCP, OCP), tokens=0, form="ragged"),
    "no sink": Trial(layouts=(OCP, OCP), widths=(9, 20), sink=False, heads=1, aligned=False, form="ragged"),
    "fp32": Trial(layouts=(OCP, OCP), widths=(9, 20), q_dtype=torch.float32, form="ragged"),
}


@pytest.mark.parametrize("as_tensors", [True, False])
@pytest.mark.parametrize("name", DECODES)
def test_decode_gives_the_oracles_answer(name: str, *, as_tensors: bool) -> None:
    trial = evolve(DECODES[name], wants_lse=False)
    answer, turned = decoded(trial, as_tensors=as_tensors)

    assert trial.error(answer) <= 1
    assert turned == 0


def test_a_dialect_taken_for_the_other_is_found() -> None:
    trial = evolve(DECODES["mixed dialects"], wants_lse=False)
    answer, _ = decoded(trial, swa_fp8_format="e4m3fn")

    assert trial.error(answer) > 1


def test_lists_may_be_ragged_for_one_cache_and_dense_for_the_other() -> None:
    trial = evolve(DECODES["dense"], wants_lse=False)
    ragged = evolve(trial, form="ragged")
    (call, _), (other, _) = trial.call(), ragged.call()
    dense, packed = [listed(s.rows) for s in call.keys], [listed(s.rows) for s in other.keys]  # type: ignore[union-attr]
    caches: Any = [segment.cache.tensor for segment in call.keys]  # type: ignore[union-attr]
    dims = OCP.head_dim, OCP.nope_dim, OCP.rope_dim
    rocm_sparse_attn_decode(
        call.q, caches[1], caches[0], False, *dense[1][:2], *packed[0], None, None, call.attn_sink, trial.layer.scale,
        *dims, call.out,
    )  # fmt: skip

    assert trial.error(Answer(call.out, None, None)) <= 1


def test_nothing_is_packed_for_a_call_that_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists of two forms are made one, but not before everything was looked at."""
    monkeypatch.setattr(ragged, "Launch", lambda *_: pytest.fail("launched"))
    named = {**arguments(), "swa_ragged_indices": None, "swa_indices": ints(0, 0).view(2, 1), "swa_lens": ints(1, 1)}
    with pytest.raises(ArgumentError, match="positions"):
        rocm_sparse_attn_decode(**named, cos_sin_cache=torch.zeros(4, 64, device=DEVICE))


def test_parts_are_added_up_in_scratch_memory() -> None:
    trial = evolve(DECODES["model"], wants_lse=False)
    workspace = WorkspaceManager(DEVICE, debug=True)
    with observed() as seen:
        answer, _ = decoded(trial, workspace=workspace)
    workspace.check_canaries()

    assert trial.error(answer) <= 1
    assert "reduce" in {variant.name for variant in seen}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_rotation_is_undone_where_parts_are_added_up(dtype: torch.dtype) -> None:
    trial = evolve(DECODES["model"], wants_lse=False, q_dtype=dtype)
    table = cos_sin_cache(trial.layer.rope, 50).to(DEVICE)
    positions = torch.tensor([7, 49], device=DEVICE)
    plain, _ = decoded(trial, workspace=WorkspaceManager(DEVICE))
    turned, count = decoded(trial, workspace=WorkspaceManager(DEVICE), positions=positions, cos_sin_cache=table)
    alone, none = decoded(trial, positions=positions, cos_sin_cache=table)

    right = plain.out.double()
    cos, sin = table[positions, None].double().chunk(2, -1)
    even, odd = right[..., 448::2].clone(), right[..., 449::2].clone()
    right[..., 448::2], right[..., 449::2] = even * cos + odd * sin, odd * cos - even * sin
    assert (count, none) == (2, 0)
    assert torch.equal(turned.out[..., :448], plain.out[..., :448])
    torch.testing.assert_close(turned.out.double(), right, rtol=2.0**-8, atol=1e-5)
    assert trial.error(alone) <= 1


def test_more_sinks_than_heads_are_those_of_padded_heads() -> None:
    trial = evolve(DECODES["window"], wants_lse=False)
    call, _ = trial.call()
    assert call.attn_sink is not None
    sinks = torch.cat([call.attn_sink, call.attn_sink.new_full((5,), math.nan)])
    (segment,) = call.keys  # type: ignore[misc]
    rocm_sparse_attn_decode(
        call.q, None, segment.cache.tensor, True, None, None, *listed(segment.rows), None, None, sinks,
        trial.layer.scale, 512, 448, 64, call.out,
    )  # fmt: skip

    assert trial.error(Answer(call.out, None, None)) <= 1


# prefill

ROWS = KVCacheLayout.rows(448, 64)
PREFILLS = {
    "ragged": Trial(layouts=(ROWS,), widths=(40,), form="gathered-ragged"),
    "dense": Trial(layouts=(ROWS,), widths=(40,), form="gathered", heads=20),
    "fp32": Trial(layouts=(ROWS,), widths=(17,), form="gathered-ragged", q_dtype=torch.float32),
    "no columns": Trial(layouts=(ROWS,), widths=(0,), form="gathered"),
    "no tokens": Trial(layouts=(ROWS,), tokens=0, form="gathered-ragged"),
}


def prefilled(trial: Trial, **changed: Any) -> Answer:
    call, _ = trial.call()
    keys: Any = call.keys
    indices, lens, flat, indptr = listed(keys.rows)
    if flat is not None:
        indices = torch.empty(trial.tokens, 1, 0, dtype=INT, device=DEVICE)  # what is dense has no columns
    named = {"indices": indices, "topk_length": lens, "ragged_indices": flat, "ragged_indptr": indptr, **changed}
    rest = named.pop("indices"), named.pop("topk_length"), trial.layer.scale, 512, 448, 64, call.attn_sink, call.out
    rocm_sparse_attn_prefill(call.q, keys.kv.unsqueeze(1), *rest, **named)
    return Answer(call.out, None, None)


@pytest.mark.parametrize("name", PREFILLS)
def test_prefill_gives_the_oracles_answer(name: str) -> None:
    trial = evolve(PREFILLS[name], wants_lse=False)

    assert trial.error(prefilled(trial)) <= 1


def test_without_lengths_every_column_counts_and_an_absent_one_loses_nobody() -> None:
    trial = evolve(PREFILLS["dense"], wants_lse=False)
    (segment,) = trial.segments
    segment.slots[np.arange(40) >= segment.lens[:, None]] = -1
    segment.lens[:] = 40
    segment.slots[:, 0] = -1

    assert trial.error(prefilled(trial, topk_length=None)) <= 1


# bad input

TRIAL = Trial(layouts=(OCP, OCP), pages=(4, 2), widths=(4, 6), tokens=2, heads=2, form="ragged", wants_lse=False)


def arguments() -> dict[str, Any]:
    """A good call of the decode, by name."""
    call, _ = TRIAL.call()
    swa, other = call.keys  # type: ignore[misc]
    lists: dict[str, Any] = {}
    for name, rows in (("swa", swa.rows), ("topk", other.rows)):
        keys = "indices", "lens", "ragged_indices", "ragged_indptr"
        lists |= {f"{name}_{key}": tensor for key, tensor in zip(keys, listed(rows), strict=True)}
    return {
        "q": call.q, "kv_cache": other.cache.tensor, "swa_k_cache": swa.cache.tensor, "swa_only": False, **lists,
        "attn_sink": call.attn_sink, "scale": 0.1, "head_dim": 512, "nope_head_dim": 448, "rope_head_dim": 64,
        "output": call.out,
    }  # fmt: skip


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=INT, device=DEVICE)


FNUZ_CACHE = PagedKVCache.allocate(FNUZ, 2, 4, DEVICE)
BAD: Mapping[str, tuple[Mapping[str, Any], str]] = {
    "dims that do not add up": ({"head_dim": 576}, "head_dim"),
    "no rope": ({"nope_head_dim": 512, "rope_head_dim": 0}, "head_dim"),
    "dims of V3.2": ({"head_dim": 576, "nope_head_dim": 512}, "head_dim"),
    "more heads than the contract has": ({"q": torch.zeros(2, 129, 512).bfloat16()}, "q"),
    "q in fp16": ({"q": torch.zeros(2, 2, 512).half()}, "q"),
    "output of another type": ({"output": torch.zeros(2, 2, 512)}, "output"),
    "output of other heads": ({"output": torch.zeros(2, 3, 512).bfloat16()}, "output"),
    "too few sinks": ({"attn_sink": torch.zeros(1)}, "attn_sink"),
    "no compressed cache": ({"kv_cache": None}, "kv_cache"),
    "records of another size": ({"kv_cache": torch.zeros(2, 4, 528, dtype=torch.uint8)}, "kv_cache"),
    "a layout of the other dialect": ({"swa_k_cache": FNUZ_CACHE}, "swa_k_cache"),
    "a type of the other dialect": ({"kv_cache": FNUZ_CACHE.tensor.view(torch.float8_e4m3fnuz)}, "kv_cache"),
    "ocp bytes said to be fnuz": (
        {"kv_cache": FNUZ_CACHE.tensor.view(torch.float8_e4m3fn), "fp8_format": "e4m3fnuz"},
        "kv_cache",
    ),
    "a dialect that does not exist": ({"fp8_format": "e5m2"}, "fp8_format"),
    "rows that are not quantised": ({"swa_k_cache": PagedKVCache.allocate(ROWS, 2, 4, DEVICE)}, "swa_k_cache"),
    "indptr of other rows": ({"swa_ragged_indptr": ints(0, 1)}, "swa_ragged_indptr"),
    "indptr in int64": ({"topk_ragged_indptr": ints(0, 1, 1).long()}, "topk_ragged_indptr"),
    "indptr that begins late": ({"swa_ragged_indptr": ints(1, 1, 2)}, "swa_ragged_indptr[0]"),
    "indptr that goes back": ({"swa_ragged_indptr": ints(0, 3, 2)}, "swa_ragged_indptr[2]"),
    "indptr past the list": ({"topk_ragged_indptr": ints(0, 3, 99)}, "topk_ragged_indptr[2]"),
    "neither form of list": ({"swa_ragged_indices": None}, "swa_indices"),
    "a list with gaps": ({"swa_ragged_indices": torch.zeros(8, dtype=INT, device=DEVICE)[::2]}, "swa_ragged_indices"),
    "positions alone": ({"positions": torch.zeros(2, dtype=torch.int64)}, "cos_sin_cache"),
    "a table alone": ({"cos_sin_cache": torch.zeros(4, 64)}, "positions"),
    "a table of other dims": (
        {"positions": torch.zeros(2, dtype=torch.int64), "cos_sin_cache": torch.zeros(4, 32)},
        "cos_sin_cache",
    ),
    "a list elsewhere": ({"topk_ragged_indices": torch.zeros(8, dtype=INT, device="meta")}, "topk_ragged_indices"),
}


@pytest.mark.parametrize("case", BAD.values(), ids=BAD)
def test_bad_input_is_an_error_before_any_launch(
    case: tuple[Mapping[str, Any], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    changed, argument = case
    monkeypatch.setattr(attention_launch, "attend", lambda *_, **__: pytest.fail("launched"))
    named = arguments()
    if DEVICE.type != "cpu" and "[" in argument:
        pytest.skip("what indptr holds is not read from a device")
    for name, value in changed.items():
        is_on_cpu = isinstance(value, torch.Tensor) and value.device.type == "cpu"
        named[name] = value.to(DEVICE) if is_on_cpu else value
    output = named["output"].clone()
    with pytest.raises(ArgumentError) as raised:
        rocm_sparse_attn_decode(**named)

    assert raised.value.argument == argument
    assert torch.equal(named["output"].isnan(), output.isnan())


def test_the_good_call_is_good() -> None:
    assert rocm_sparse_attn_decode(**arguments()) == 0


def test_the_reference_reads_the_same_lists() -> None:
    trial = evolve(DECODES["mixed dialects"], wants_lse=False)
    call, _ = trial.call()
    ReferenceBackend().decode(call)

    assert trial.error(Answer(call.out, None, None)) <= 1

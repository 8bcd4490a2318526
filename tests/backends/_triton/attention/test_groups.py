"""Rows of one request that are computed together: whatever the drafts, each row's result is that of the oracle."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve

from dsv4attn.backends._triton.attention import kernels_groups
from dsv4attn.backends._triton.attention import launch as attention_launch
from dsv4attn.backends._triton.attention.kernels import attention
from dsv4attn.backends._triton.backend import TritonBackend
from dsv4attn.backends._triton.interpreted import INTERPRETED
from dsv4attn.backends._triton.launching.runtime import observed
from dsv4attn.backends._triton.tuning import Tuning
from dsv4attn.core.cache.selected_keys import DenseIndices, PagedKeys, RequestRows
from dsv4attn.core.contract.backend import AttentionCall, Phase
from dsv4attn.core.model.geometry import LayerKind
from dsv4attn.selection import load_backend
from dsv4attn.testing.kit.factories import tiny_geometry
from dsv4attn.testing.kit.random_step import StepFixture
from tests.backends._triton.cache.caches import DEVICE
from tests.harness import same_bits
from tests.programs import import_text

ENTRY = 16
"""Tokens of an entry of the tiny model's c128a layer; its window has 8."""
RAGGED = ((15, 9), (5, 2), (0, 3), (ENTRY * 3 - 2, 4), (120, 1), (63, 8, 3), (17, 4, 4))
"""Entries that are completed inside a step, contexts of 0 to several windows, rejected drafts, requests of padding."""


def step(requests: Sequence[tuple[int, ...]], kind: LayerKind = LayerKind.HCA, **changes: Any) -> StepFixture:
    """A step of the tiny model, whose unused bytes are NaN."""
    fields: dict[str, Any] = {"num_speculative_tokens": 8, "poison": 0xFF, "extra_rows": 3, "device": str(DEVICE)}
    geometry = tiny_geometry(num_heads=16 if kind is LayerKind.SWA else 4)
    return StepFixture(kind=kind, requests=requests, geometry=geometry, **{**fields, **changes})


def groups_in(backend: TritonBackend, fixture: StepFixture) -> set[int]:
    """Check a step, and return the sizes of groups of the launches of attention."""
    with observed() as seen:
        fixture.check(backend)
    return {dict(form.constants)["TILE"].group for form in seen if form.name == attention.fn.__name__}


def triton_backend(**options: Any) -> TritonBackend:
    """The backend, which splits no row here."""
    backend = load_backend("triton", **options)
    assert isinstance(backend, TritonBackend)
    return backend


@pytest.mark.parametrize("kind", [LayerKind.SWA, LayerKind.HCA], ids=lambda kind: kind.value)
def test_ragged_drafts_rejected_ones_and_padding_give_what_the_oracle_gives(kind: LayerKind) -> None:
    assert groups_in(triton_backend(), step(RAGGED, kind)) == {4 if kind is LayerKind.SWA else 8}


@pytest.mark.parametrize("kind", [LayerKind.SWA, LayerKind.HCA], ids=lambda kind: kind.value)
def test_prompts_are_computed_in_groups(kind: LayerKind) -> None:
    prompts = ((40, 1), (15, 9), (0, 21), (ENTRY * 3 - 2, 11), (63, 8))
    fixture = step(prompts, kind, num_speculative_tokens=0, extra_rows=0, pages_seed=4)

    assert groups_in(triton_backend(), fixture) == {1, 4 if kind is LayerKind.SWA else 8}


def test_windows_that_begin_late_and_pages_in_another_order() -> None:
    shuffled = step(((40, 4), (13, 2), (64, 9)), replay=(38, 0, 60), pages_seed=5, num_speculative_tokens=8)

    assert groups_in(triton_backend(), shuffled) == {8}


def test_selected_entries_and_deterministic_rows_are_computed_by_themselves() -> None:
    """The bits of a deterministic row do not depend on the drafts of its step."""
    assert groups_in(triton_backend(), step(((14, 4), (30, 2)), LayerKind.CSA)) == {1}
    backend, whole = triton_backend(deterministic=True), step(((14, 4), (30, 2)), num_speculative_tokens=3)

    assert groups_in(backend, whole) == {1}
    out, _ = whole.run(backend)
    alone, _ = whole.at((14, 1), (30, 2)).run(backend)
    assert same_bits(out[:1], alone[:1])
    assert same_bits(out[4:6], alone[1:3])


def test_a_request_without_drafts_for_each_row_is_not_grouped() -> None:
    assert groups_in(triton_backend(), step(((14, 1), (30, 1), (8, 1)), extra_rows=0)) == {1}


@pytest.mark.parametrize("kind", [LayerKind.SWA, LayerKind.HCA], ids=lambda kind: kind.value)
def test_a_prepared_call_serves_steps_with_other_drafts(kind: LayerKind) -> None:
    """As a captured graph is replayed: the same memory, other numbers of rows of each request, and of requests."""
    backend = triton_backend()
    first = step(((14, 4), (30, 4), (62, 4)), kind, extra_rows=0)
    later = [((14, 1), (30, 9), (62, 2)), ((14, 9), (30, 2, 1), (62, 1)), ((14, 12, 8),)]
    args = first.problem(backend)
    rows = args.metadata.swa.decode_requests
    assert rows is not None
    captured = prepared_on_buffers(backend, args, rows)
    for requests in later:
        fixture = evolve(first, requests=requests, num_speculative_tokens=11)
        problem = fixture.problem(backend)
        fixture.compare(*captured(problem))


def prepared_on_buffers(backend: TritonBackend, args: Any, rows: RequestRows) -> Any:
    """A call on copies of the metadata's tensors, which runs with the contents of the metadata of another step."""

    def segments(problem: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
        swa, compressed = problem.metadata.swa, problem.metadata.compressed
        found = [(swa.decode_swa_indices[:, 0], swa.decode_swa_lens)]
        if compressed is not None:
            found.append((compressed.c128a_global_decode_topk_indices[:, 0], compressed.c128a_decode_topk_lens))
        return found

    caches = [cache for cache in (args.caches.swa, args.caches.compressed) if cache is not None]
    buffers = [(slots.new_full((slots.shape[0], 128), -1), lens.clone()) for slots, lens in segments(args)]
    starts = rows.query_start_loc.clone()
    kept = RequestRows(rows.token_to_req.clone(), starts, rows.max_tokens)
    keys = [PagedKeys(cache, DenseIndices(*pair)) for cache, pair in zip(caches, buffers, strict=True)]
    out, lse = torch.empty_like(args.q), args.q.new_empty(args.q.shape[:2], dtype=torch.float32)
    call = AttentionCall(args.layer, args.q, keys, args.attn_sink, out, lse, (), request_rows=kept)
    with observed() as seen:
        run = backend.prepare(Phase.DECODE, call)
        run(call.tensors)
    assert {dict(form.constants)["TILE"].group for form in seen} == {
        attention_launch.group_of_call(call, backend.tuning)
    }
    assert attention_launch.group_of_call(call, backend.tuning) > 1

    def replay(problem: Any) -> tuple[torch.Tensor, torch.Tensor]:
        for (slots, lens), (new_slots, new_lens) in zip(buffers, segments(problem), strict=True):
            slots.fill_(-1)
            slots[:, : new_slots.shape[1]] = new_slots
            lens.copy_(new_lens)
        new = problem.metadata.swa.decode_requests
        kept.token_to_req.copy_(new.token_to_req)
        starts.fill_(new.query_start_loc[-1])
        starts[: new.query_start_loc.shape[0]] = new.query_start_loc[: starts.shape[0]]
        compressed = problem.caches.compressed
        tensors = call.tensors._replace(q=problem.q, window=problem.caches.swa, compressed=compressed)
        out.fill_(torch.nan)
        run(tensors)
        return out, lse

    return replay


def test_groups_are_as_large_as_tiles_and_drafts_allow() -> None:
    def size(kind: LayerKind, heads: int, most: int, **options: Any) -> int:
        layer = tiny_geometry(num_heads=heads, window=128).layer_of_kind(kind)
        return Tuning().group_of(layer, most, **options)

    assert [size(LayerKind.HCA, 8, most) for most in (1, 2, 3, 4, 5, 8, 9, 4000)] == [1, 2, 4, 4, 8, 8, 8, 8]
    assert [size(LayerKind.HCA, heads, 8) for heads in (1, 8, 12, 16, 32, 33, 64, 128)] == [8, 8, 4, 4, 2, 1, 1, 1]
    assert [size(LayerKind.SWA, heads, 4) for heads in (8, 16, 32, 64)] == [1, 4, 2, 1]
    assert size(LayerKind.SWA, 8, 8) == 8
    assert size(LayerKind.CSA, 8, 4) == 1
    assert size(LayerKind.HCA, 8, 4, exact=True) == 2


PLANTS = {
    "a row more of the last window": ("columns - length", "columns - length + 1"),
    "rows of the request before": ("tl.load(groups.requests + t + j, mask=here, other=-1) == request", "t >= 0"),
    "a union as long as its first row": ("own + last, 0", "own, 0"),
}


@pytest.mark.mutation
@pytest.mark.skipif(not INTERPRETED, reason="one thing wrong is enough to see in the interpreter")
@pytest.mark.parametrize("name", PLANTS)
def test_one_thing_wrong_is_seen(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    old, new = PLANTS[name]
    text = inspect.getsource(kernels_groups)
    assert old in text
    mutant = import_text(tmp_path / f"mutant_groups_{tmp_path.name}.py", text.replace(old, new))
    monkeypatch.setitem(attention.fn.__globals__, "group_of", mutant.group_of)
    with pytest.raises(AssertionError):
        step(((15, 4), (5, 2), (46, 3)), extra_rows=0).check(triton_backend())

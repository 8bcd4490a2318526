"""A backend's attention on the inputs of a case, called as core calls it, and the support question of that case."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from attrs import evolve
from torch import Tensor

from dsv4attn.core.cache.layout import KVCacheLayout, PagedKVCache
from dsv4attn.core.cache.selected_keys import DenseIndices, GatheredKeys, PagedKeys, RaggedIndices, RequestRows
from dsv4attn.core.contract.backend import AttentionCall, Backend, IndexForm, KeyForm, Phase
from dsv4attn.core.contract.problem import CacheFacts, Problem
from dsv4attn.core.memory.plan import ragged_specs
from dsv4attn.core.memory.workspace import WorkspaceManager
from dsv4attn.core.model.geometry import LayerGeometry, LayerKind, Rope
from dsv4attn.tools.bench.cases import KernelCase
from dsv4attn.tools.bench.inputs import Inputs, layouts

_ROWS = KVCacheLayout.rows()


def problem_of(case: KernelCase, prefill_keys: KeyForm = KeyForm.PAGED) -> Problem:
    """The support question of a case. On gathered rows there is one segment, described as the window."""
    preset = case.preset
    if case.kernel == "prefill-rows":
        swa = CacheFacts("rows", "bfloat16", 1) if prefill_keys is KeyForm.PAGED else CacheFacts()
        return Problem("prefill", _rows_layer(case), swa)
    # insert, quantize and gather are part of either phase
    decodes = case.kernel not in ("prefill", "step") or case.tokens <= len(case.requests)
    phase = "decode" if decodes else "prefill"
    if preset.kind is LayerKind.SWA:
        return Problem.of(preset.layer, phase=phase)
    problem = Problem.of(preset.layer, phase=phase, topk=preset.columns, compressed_page_size=preset.page)
    window, entries = layouts(case)
    return evolve(
        problem, swa=CacheFacts.of(window, problem.swa.page_size), compressed=CacheFacts.of(entries, preset.page)
    )


def prepare_attention(backend: Backend, inputs: Inputs, out: Tensor) -> Callable[[], None]:
    """The call, ready to run. It builds ragged lists and gathers rows if the backend's capabilities need them."""
    kernel, capabilities, q = inputs.case.kernel, backend.capabilities, inputs.q
    phase = Phase.DECODE if kernel == "decode" else Phase.PREFILL
    form = capabilities.decode_indices if phase is Phase.DECODE else capabilities.prefill_indices
    gathered = phase is Phase.PREFILL and capabilities.prefill_keys is KeyForm.GATHERED
    if gathered and kernel == "prefill" and inputs.rows is not None:
        rows_of = inputs.rows.shape[0] * inputs.rows.shape[1]
        gathered = not backend.prefers_pages(inputs.layer, inputs.case.requests, rows_of)
    on_rows = gathered or kernel == "prefill-rows"
    layer = _rows_layer(inputs.case) if kernel == "prefill-rows" else inputs.layer
    lists = (
        [_combined(inputs, capabilities.index_alignment)] if on_rows else [segment.slots for segment in inputs.segments]
    )
    widths = [dense.indices.shape[1] for dense in lists]
    ragged = [spec for w in widths for spec in ragged_specs(q.shape[0], w)] if form is IndexForm.RAGGED else []
    specs = [*ragged, *backend.scratch(phase, layer, q.shape[0], sum(widths))]
    views = WorkspaceManager(q.device).get_simultaneous(*specs, caller=f"{backend.name}.{phase.value}")
    formed: list[DenseIndices | RaggedIndices] = list(lists)
    if ragged:
        formed = [RaggedIndices(views[2 * i], views[2 * i + 1], w) for i, w in enumerate(widths)]

    steps: list[Callable[[], None]] = []
    keys: Sequence[PagedKeys] | GatheredKeys
    if on_rows:
        assert inputs.rows is not None
        rows = inputs.rows
        if kernel == "prefill":
            rows = torch.full_like(rows, torch.nan)
            steps.append(lambda: gather_rows(backend, inputs, rows))
        flat = rows.flatten(0, 1)
        # a backend that reads pages gets pages of one row
        keys = GatheredKeys(flat, formed[0]) if gathered else [PagedKeys(PagedKVCache(flat[:, None], _ROWS), formed[0])]
        slots = [flat.shape[0]]
    else:
        keys = [PagedKeys(segment.cache, f) for segment, f in zip(inputs.segments, formed, strict=True)]
        slots = [segment.cache.capacity for segment in inputs.segments]
    shared = None if on_rows else request_rows(inputs.case, q.device)
    call = AttentionCall(layer, q, keys, inputs.sink, out, None, views[len(ragged) :], request_rows=shared)
    for dense, target, count in zip(lists, formed, slots, strict=True):
        if isinstance(target, RaggedIndices):
            steps.append(_packing(backend, dense, target, count))
    attention = backend.prepare(phase, call)

    def run() -> None:
        for step in steps:
            step()
        attention(call.tensors)

    return run


def request_rows(case: KernelCase, device: torch.device) -> RequestRows | None:
    """Which rows of a call are of one request; None where every request has one token."""
    counts = torch.tensor([count for _, count in case.requests], dtype=torch.int32, device=device)
    if case.tokens <= len(case.requests):
        return None
    starts = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
    requests = torch.repeat_interleave(torch.arange(len(counts), device=device), counts).int()
    return RequestRows(requests, starts, int(counts.max()))


def gather_rows(backend: Backend, inputs: Inputs, rows: Tensor) -> None:
    """All records that a prefill needs, from pages to rows [R, M, D]."""
    for segment, offset in zip(inputs.segments, (0, inputs.offset), strict=False):
        backend.dequantize_and_gather_k_cache(
            rows, segment.cache, segment.seq_lens, segment.gather_lens, segment.table, offset
        )


def _packing(backend: Backend, dense: DenseIndices, ragged: RaggedIndices, slots: int) -> Callable[[], None]:
    build, out = backend.index_ops.build_ragged_indices_from_dense, (ragged.indices, ragged.indptr)
    return partial(build.prepare(dense.indices, dense.lens, slots, out=out), dense.indices)


def _combined(inputs: Inputs, alignment: int) -> DenseIndices:
    assert inputs.combined is not None
    dense = inputs.combined
    short = -dense.indices.shape[1] % alignment
    return evolve(dense, indices=torch.nn.functional.pad(dense.indices, (0, short), value=-1)) if short else dense


def _rows_layer(case: KernelCase) -> LayerGeometry:
    """Gathered rows as the only segment of a layer: all columns are its window."""
    layer = case.preset.layer
    rope, window = Rope(layer.rope_dim, 10000.0), layer.window + case.preset.columns
    return LayerGeometry(LayerKind.SWA, 1, layer.num_heads, layer.head_dim, rope, window, 0)

"""The Backend for Intel GPUs: fused or gathered decode, and prefill on gathered rows."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, cached_property
from itertools import product
from typing import Any

import torch
from attrs import evolve, frozen
from torch import Tensor

from dsv4attn.backends._triton.attention.meta_calls import meta_gathered, meta_pages
from dsv4attn.backends._triton.backend import TritonBackend, with_keys_as_in_decode
from dsv4attn.backends._triton.cache.gather import TILE, WARPS
from dsv4attn.backends._triton.cache.records import (
    alignment_of_records,
    alignment_of_rows,
    page_numbers,
    record_alignments,
    record_form,
)
from dsv4attn.backends._triton.launching.launch_cache import Constants
from dsv4attn.backends._triton.launching.recorded import meta_cache, meta_rows, recorded
from dsv4attn.backends._triton.launching.runtime import launch
from dsv4attn.backends._triton.sizes import cdiv, next_power_of_2
from dsv4attn.backends._triton.tuning import DEFAULT, Tuning
from dsv4attn.backends.xpu import kernels, leading_values
from dsv4attn.backends.xpu.tuning import DECODE, FUSED, GATHERED, RUN_BYTES, TUNING
from dsv4attn.core.argument_checks import round_up
from dsv4attn.core.attention.checks import check_attention_strides
from dsv4attn.core.cache.layout import KVCacheLayout
from dsv4attn.core.cache.selected_keys import DenseIndices, GatheredKeys, PagedKeys
from dsv4attn.core.contract.backend import AttentionCall, AttentionTensors, Capabilities, KeyForm, Phase, Run
from dsv4attn.core.contract.device import DeviceFacts
from dsv4attn.core.contract.warmup import WarmupSpec
from dsv4attn.core.memory import workspace
from dsv4attn.core.memory.plan import gathers_keys
from dsv4attn.core.model.geometry import LayerGeometry
from dsv4attn.core.tensorspec import BufferSpec
from dsv4attn.errors import ArgumentError

COLUMNS = 16
"""Columns of packed indices, and those of prefill, are a multiple of this."""


@frozen
class GatherTile:
    """Number of tokens whose keys are gathered together, and columns of each token."""

    tokens: int
    columns: int

    @classmethod
    def of(cls, tokens: int, width: int, head_dim: int) -> GatherTile:
        """The most tokens that fit into RUN_BYTES, at least one. width: selected keys of a token."""
        columns = round_up(max(width, 1), COLUMNS)
        return cls(max(min(tokens, RUN_BYTES // (2 * columns * head_dim)), 1), columns)

    @property
    def rows(self) -> int:
        """Rows of bf16 for the keys: at least those of two tokens, so that the fp32 keys of one token fit too."""
        return max(self.tokens, 2) * self.columns


class XpuBackend(TritonBackend):
    """Attention of decode on pages or on rows that it gathers, and of prefill on rows that core gathers.

    With `deterministic` prefill runs as decode does.

    decode: "fused", "gathered", or "auto": the form that `DECODE` has for the device. tuning, deterministic,
    projection: see `TritonBackend`.
    """

    name = "xpu"
    tunings = TUNING
    capabilities = Capabilities(
        prefill_keys=KeyForm.GATHERED, index_alignment=COLUMNS, max_logits=True, empty_lse=True, prefill_pages=True
    )

    attend_leading_values = staticmethod(leading_values.attend_leading_values)

    def __init__(
        self, *, decode: str = "auto", tuning: str = "auto", deterministic: bool = False, projection: str = "bf16"
    ) -> None:
        """Choose a form of decode and numbers, touch no device."""
        super().__init__(tuning=tuning, deterministic=deterministic, projection=projection)
        if decode not in ("auto", FUSED, GATHERED):
            raise ArgumentError("decode", expected=f"'auto', '{FUSED}' or '{GATHERED}'", actual=repr(decode))
        self._form = decode
        if deterministic:
            self.capabilities = with_keys_as_in_decode(self.capabilities)

    @cached_property
    def gathers(self) -> bool:
        """Whether decode gathers, on the device that is here."""
        return self._gathers(DeviceFacts.here())

    def _gathers(self, device: DeviceFacts) -> bool:
        form = DECODE.get(device.arch, DECODE[DEFAULT]) if self._form == "auto" else self._form
        return form == GATHERED

    def _gathers_in(self, phase: Phase) -> bool:
        """Whether the backend itself gathers keys in a phase."""
        return self.gathers and (self.deterministic or phase is Phase.DECODE)

    def scratch(self, phase: Phase, layer: LayerGeometry, tokens: int, width: int) -> Sequence[BufferSpec]:
        """Splits of rows. Where decode gathers, the keys, packed indices and lengths of one run come before."""
        if not self._gathers_in(phase):
            return super().scratch(phase, layer, tokens, width)
        run = GatherTile.of(tokens, width, layer.head_dim)
        gathered = [
            ((run.rows, layer.head_dim), torch.bfloat16),
            ((run.tokens, run.columns), torch.int32),
            ((run.tokens,), torch.int32),
        ]
        return [*gathered, *super().scratch(phase, layer, run.tokens, run.columns)]

    def scratch_bound(self, phase: Phase, layer: LayerGeometry, max_tokens: int, max_width: int) -> int:
        """A run is either one token, or at most RUN_BYTES of keys."""
        if not self._gathers_in(phase):
            return super().scratch_bound(phase, layer, max_tokens, max_width)
        tokens, columns, row_bytes = max(max_tokens, 1), round_up(max(max_width, 1), COLUMNS), 2 * layer.head_dim
        rows = max(min(tokens * columns, RUN_BYTES // row_bytes), 2 * columns)
        gathered = rows * (row_bytes + 4) + 4 * tokens + 3 * workspace.ALIGNMENT
        return round_up(gathered + super().scratch_bound(phase, layer, tokens, columns), workspace.ALIGNMENT)

    def prepare(self, phase: Phase, call: AttentionCall) -> Run:
        """See `contract.Backend`. Where keys are gathered: run after run, each in the same scratch memory."""
        if not self._gathers_in(phase) or isinstance(call.keys, GatheredKeys):
            return super().prepare(phase, call)
        check_attention_strides(call)
        segments: Any = call.keys
        kv, packed, lens, *parts = call.scratch
        row_dtype = segments[0].cache.layout.row_dtype
        if row_dtype != kv.dtype:
            kv = kv.view(-1).view(row_dtype).view(-1, kv.shape[1])
        step = min(kv.shape[0] // packed.shape[1], packed.shape[0])
        runs = []
        for first in range(0, call.q.shape[0], step):
            tokens = slice(first, min(first + step, call.q.shape[0]))
            n = tokens.stop - first
            rows = DenseIndices(packed[:n], lens[:n])
            part = evolve(
                call.with_tensors(call.tensors.of_tokens(tokens)),
                keys=GatheredKeys(kv, rows),
                scratch=[view[:n] for view in parts],
                options=evolve(call.options, max_logits=_rows_of(call.max_logits, tokens)),
            )
            runs.append((tokens, rows, super().prepare(phase, part)))

        def run(tensors: AttentionTensors) -> None:
            caches = (tensors.window, tensors.compressed)[: len(segments)]
            pages = [evolve(segment, cache=cache) for segment, cache in zip(segments, caches, strict=True)]
            for tokens, rows, attend in runs:
                gather_selected(kv, rows, pages, tokens)
                attend(tensors.of_tokens(tokens))

        return run

    def _attend_within(self, bounds: WarmupSpec, layer: LayerGeometry, tuning: Tuning) -> None:
        """Gathered rows in prefill; in decode the same, or pages."""
        self._attend_rows(bounds, layer, tuning)

    def _launch_within(self, bounds: WarmupSpec, device: DeviceFacts) -> None:
        """See `TritonBackend`. Only what the chosen form of decode asks for."""
        super()._launch_within(bounds, device)
        tuning, gathers = self._tuning(device), self._gathers(device)
        for layer in bounds.layers:
            if gathers:
                self._attend_rows(bounds, layer, tuning, decode=True)
                variants([layout for layout, _ in bounds.caches(layer)], aligned=bounds.aligned)
            if not gathers or not gathers_keys(layer, self):
                self._attend_pages(bounds, layer, tuning)


def _rows_of(tensor: Tensor | None, part: slice) -> Tensor | None:
    return None if tensor is None else tensor[part]


def gather_selected(kv: Tensor, packed: DenseIndices, segments: Sequence[PagedKeys], part: slice) -> None:
    """Copy the keys that the tokens in `part` select to rows of kv, and write the numbers of these rows to `packed`.

    kv: [>= n * columns, D]. packed: indices [n, columns] contiguous, lens [n]; the columns of the segments follow each
    other, each segment has its own lengths, and slots that do not exist are -1.
    """
    n, window_lens, window_width = packed.lens.shape[0], None, 0
    for segment in segments:
        rows, cache = segment.rows, segment.cache
        assert isinstance(rows, DenseIndices)
        indices, lens = rows.indices[part], rows.lens[part]
        width = indices.shape[1]
        memory = cache.memory
        constants = _constants(cache.layout, alignment_of_rows(kv), alignment_of_records(cache.layout, memory))
        launch(
            kernels.gather_selected,
            (n * max(cdiv(width, constants["BLOCK_R"]), 1),),
            (
                kv, packed.indices, packed.lens, cache.tensor, indices, lens, window_lens,
                packed.indices.shape[1], width, window_width, indices.stride(0), kv.stride(0),
                page_numbers(cache, memory),
            ),
            constants,
            num_warps=WARPS,
        )  # fmt: skip
        window_lens, window_width = lens, width


@cache
def _constants(layout: KVCacheLayout, rows: int, records: int) -> Constants:
    block = max(TILE // next_power_of_2(layout.head_dim), 1)
    return Constants({"BLOCK_R": block, "ROW_ALIGNED": rows, "RECORD": record_form(layout, records)})


@recorded
def variants(layouts: Sequence[KVCacheLayout], *, aligned: bool = True) -> None:
    """Every variant of `gather_selected` for the caches of a layer, the window's first.

    aligned: whether they begin at multiples of 16 bytes.
    """
    for alignments in product(*(record_alignments(layout, aligned=aligned) for layout in layouts)):
        pages = meta_pages([meta_cache(*form) for form in zip(layouts, alignments, strict=True)])
        keys = meta_gathered(layouts[0])
        packed = DenseIndices(meta_rows(2, 2 * len(layouts)), meta_rows(2))
        gather_selected(keys.kv, packed, pages, slice(None))

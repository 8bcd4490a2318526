"""The base class of every Triton backend: the shared ops, and attention straight on pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from inspect import unwrap
from itertools import product
from typing import Any

import torch
from attrs import evolve
from torch import Tensor

from dsv4attn.backends._triton import projection
from dsv4attn.backends._triton.attention import launch as attention_launch
from dsv4attn.backends._triton.attention import ranks
from dsv4attn.backends._triton.attention.meta_calls import meta_calls, meta_gathered, meta_pages, meta_request
from dsv4attn.backends._triton.cache import fill, gather, insert
from dsv4attn.backends._triton.cache.records import row_alignments
from dsv4attn.backends._triton.compiling.variant import WIDE, Variant
from dsv4attn.backends._triton.index_ops import builder, dense
from dsv4attn.backends._triton.launching.recorded import meta_cache
from dsv4attn.backends._triton.launching.runtime import multiprocessors, recording
from dsv4attn.backends._triton.launching.warmup import warm
from dsv4attn.backends._triton.layer import ops
from dsv4attn.backends._triton.layer.projections import few_rows, output, products
from dsv4attn.backends._triton.layer.warmup import launch_within
from dsv4attn.backends._triton.tuning import MOST_ROWS, Tuning, tuning_for
from dsv4attn.core.argument_checks import round_up
from dsv4attn.core.cache.layout import KVCacheLayout
from dsv4attn.core.cache.selected_keys import GatheredKeys, PagedKeys
from dsv4attn.core.contract import IndexOps, RankOps
from dsv4attn.core.contract.backend import (
    AttentionCall,
    Backend,
    Capabilities,
    IndexForm,
    KeyForm,
    Phase,
    PrepareRows,
    Run,
)
from dsv4attn.core.contract.builder_ops import BuilderOps
from dsv4attn.core.contract.device import DeviceFacts
from dsv4attn.core.contract.info import LAYER_PARTS
from dsv4attn.core.contract.layer_ops import LayerOps
from dsv4attn.core.contract.warmup import WarmupSpec
from dsv4attn.core.memory.workspace import ALIGNMENT
from dsv4attn.core.model.geometry import LayerGeometry, LayerKind
from dsv4attn.core.model.quantized_weight import Weight, dense_weight, scaled_weight
from dsv4attn.core.tensorspec import BufferSpec, check_strides
from dsv4attn.errors import ArgumentError

PRODUCTS = ("bf16", "fp8")
"""Values of option `projection`."""
SPLITS_OF_MULTIPROCESSOR = 4
"""Splits of fixed length of a launch, for each multiprocessor."""


class TritonBackend(Backend):
    """Attention on pages in both phases. A subclass sets `name` and `tunings`, and overrides the methods that differ.

    name: name of the backend.
    tunings: tuning table of the backend, by architecture or kind of device.
    tuning: row of the tuning table. "auto": the row of the device.
    deterministic: the bits of a row depend on its own query and keys alone, and they are the same in both phases. One
    kernel then serves decode and prefill on pages, and a row is cut into splits of fixed length.
    projection: "fp8" multiplies block-scaled fp8 matrices of the output projection without conversion, and rounds the
    attention outputs to fp8. "bf16" converts the matrices.
    index_sums: "exact" multiplies the fp8 codes of index keys in 16 bits, so that scores keep the bits of fp32. "fp8"
    leaves them to the matrix unit, which keeps 14 bits on NVIDIA from sm_89 on.
    """

    name: str
    tunings: Mapping[str, Tuning]
    capabilities = Capabilities(prefill_keys=KeyForm.PAGED, max_logits=True, empty_lse=True)
    index_ops: IndexOps = dense.INDEX_OPS
    builder_ops: BuilderOps | None = builder.BUILDER_OPS
    rank_ops: RankOps = ranks.RANK_OPS

    @property
    def _ragged(self) -> bool:
        return self.capabilities.decode_indices is IndexForm.RAGGED

    def __init__(
        self,
        *,
        tuning: str = "auto",
        deterministic: bool = False,
        projection: str = "bf16",
        index_sums: str = "fp8",
    ) -> None:
        """Check the options; no device is touched."""
        if tuning != "auto" and tuning not in self.tunings:
            expected = f"'auto' or a row of the {self.name} backend: {', '.join(self.tunings)}"
            raise ArgumentError("tuning", expected=expected, actual=repr(tuning))
        if not isinstance(deterministic, bool):
            raise ArgumentError("deterministic", expected="true or false", actual=repr(deterministic))
        if projection not in PRODUCTS:
            raise ArgumentError("projection", expected="'bf16' or 'fp8'", actual=repr(projection))
        if index_sums not in ("fp8", "exact"):
            raise ArgumentError("index_sums", expected="'fp8' or 'exact'", actual=repr(index_sums))
        self._exact_sums = index_sums == "exact"
        self._row, self.deterministic, self.projects_fp8 = tuning, deterministic, projection == "fp8"

    @cached_property
    def tuning(self) -> Tuning:
        """The tuning of this machine's device."""
        return self._tuning(DeviceFacts.here())

    def _tuning(self, device: DeviceFacts) -> Tuning:
        row = tuning_for(self.tunings, device.arch if self._row == "auto" else self._row, device.kind)
        return row.on(device.arch)

    def tuning_of(self, phase: Phase, layer: LayerGeometry, tokens: int, width: int) -> Tuning:
        """The tuning of a call. It depends on shapes; with `deterministic` all calls have the tuning of decode."""
        if self.deterministic:
            return self.tuning
        if phase is Phase.PREFILL:
            return self.tuning.of(phase)
        return self.tuning.of_call(tokens, layer.num_heads, width, multiprocessors())

    def _splits(self, phase: Phase, layer: LayerGeometry, tokens: int, width: int) -> int:
        """Number of splits of each row. It depends on shapes."""
        tuning = self.tuning_of(phase, layer, tokens, width)
        return attention_launch.splits_of(tokens, layer.num_heads, width, tuning, multiprocessors())

    def _fixed_splits(self, layer: LayerGeometry, width: int) -> int:
        """Splits of fixed length that are enough for rows of `width` keys; 0 for a layer whose rows are never split.

        A layer whose rows grow with the sequence has one kernel for rows of all lengths, also in a batch of short ones.
        """
        splits = attention_launch.fixed_splits(width, self.tuning, self.tuning.tiles_per_split(layer))
        return splits if splits > 1 or layer.kind is LayerKind.HCA else 0

    def _splits_at_once(self, layer: LayerGeometry) -> int:
        """Splits of all rows of a launch, at most, unless one row has more: so many that they fill the device."""
        return max(SPLITS_OF_MULTIPROCESSOR * multiprocessors() // self.tuning.blocks(layer.num_heads), 1)

    def scratch(self, phase: Phase, layer: LayerGeometry, tokens: int, width: int) -> Sequence[BufferSpec]:
        """Memory for the results of splits, where several programs share a row."""
        if self.deterministic:
            splits, most = self._fixed_splits(layer, width), self._splits_at_once(layer)
            return attention_launch.fixed_scratch(tokens, layer, splits, most)
        return attention_launch.scratch(tokens, layer, self._splits(phase, layer, tokens, width))

    def scratch_bound(self, phase: Phase, layer: LayerGeometry, max_tokens: int, max_width: int) -> int:
        """Rows are split only if they do not fill the device. So there are at most as many splits as programs."""
        if self.deterministic:
            splits = self._fixed_splits(layer, max_width)
            rows = min(max_tokens * splits, max(self._splits_at_once(layer), splits))
            counts = round_up(4 * max(max_tokens, 1), ALIGNMENT) + ALIGNMENT
            return attention_launch.scratch_bound(layer, max(rows, 1)) + counts if splits else 0
        return attention_launch.scratch_bound(layer, multiprocessors())

    def transient_bytes(self, layer: LayerGeometry, max_tokens: int, max_width: int, max_rows: int) -> int:
        """What the output projection makes of outputs. All other kernels write to memory that the caller gives."""
        arch = DeviceFacts.here().arch
        if self.projects_fp8:
            return output.transient_bytes(max_tokens, layer.num_heads, layer.head_dim)
        return projection.transient_bytes(max_tokens, layer.num_heads, layer.rope_dim, arch)

    @cached_property
    def layer_ops(self) -> LayerOps:
        """See `contract.Backend`."""
        return ops.layer_ops(deterministic=self.deterministic, exact_sums=self._exact_sums)

    multiply_codes = staticmethod(output.multiply_codes)
    quantize_and_insert_k_cache = staticmethod(insert.quantize_and_insert_k_cache)
    qnorm_rope_kv_insert = staticmethod(insert.qnorm_rope_kv_insert)
    dequantize_and_gather_k_cache = staticmethod(gather.dequantize_and_gather_k_cache)

    @cached_property
    def prepare_rows(self) -> PrepareRows | None:
        """See `contract.Backend`. None in subclasses with another gather or other index ops."""
        is_shared = unwrap(self.dequantize_and_gather_k_cache) is unwrap(gather.dequantize_and_gather_k_cache)
        return fill.prepare_rows if is_shared and self.index_ops is dense.INDEX_OPS else None

    def prepare(self, phase: Phase, call: AttentionCall) -> Run:
        """See `contract.Backend`. One kernel serves both phases, and gathered rows too."""
        if self.deterministic:
            return attention_launch.prepare_fixed(call, self.tuning, self.tuning.tiles_per_split(call.layer))
        width = sum(rows.width for rows in attention_launch.index_rows(call.keys))
        tuning = self.tuning_of(phase, call.layer, call.q.shape[0], width) if call.scratch else self.tuning.of(phase)
        rows = call.request_rows
        if phase is Phase.PREFILL and rows is not None and rows.are_several:
            # one form for prompts, of any length
            longest = max(rows.max_tokens, MOST_ROWS)
            call = evolve(call, request_rows=evolve(rows, max_tokens=longest))
        return attention_launch.prepare(call, tuning)

    def decode(self, call: AttentionCall) -> None:
        """See `contract.Backend`."""
        self.prepare(Phase.DECODE, call)(call.tensors)

    def prefill(self, call: AttentionCall) -> None:
        """See `contract.Backend`."""
        self.prepare(Phase.PREFILL, call)(call.tensors)

    def inv_rope_o_proj(
        self, o: Tensor, positions: Tensor, cos_sin_cache: Tensor, wo_a: Weight, num_groups: int
    ) -> Tensor:
        """See `contract.Backend`. wo_a may be block-scaled fp8, which is converted unless `projects_fp8`."""
        check_strides(o=o, positions=positions, cos_sin_cache=cos_sin_cache)
        scaled = scaled_weight(wo_a) if self.projects_fp8 else None
        if scaled is not None:
            options: dict[str, Any] = {"deterministic": self.deterministic, "multiply": self.multiply_codes}
            return output.project_fp8(o, positions, cos_sin_cache, scaled, num_groups, **options)
        weight = dense_weight(wo_a)
        check_strides(wo_a=weight)
        return projection.inv_rope_o_proj(
            o, positions, cos_sin_cache, weight, num_groups, deterministic=self.deterministic
        )

    def kernel_variants(self, bounds: WarmupSpec, device: DeviceFacts) -> Sequence[Variant]:
        """See `contract.Backend`. What launches compile is recorded, see `launching.recorded`."""
        with recording(device.arch) as variants:
            self._launch_within(bounds, device)
        return list(variants)

    def _launch_within(self, bounds: WarmupSpec, device: DeviceFacts) -> None:
        """Launch every form that calls within the bounds can ask for, inside a recording for the device."""
        dense.variants()
        alignments = {"aligned": bounds.aligned, "aligned_rows": bounds.aligned_rows}
        for layer in bounds.layers:
            builder.variants(layer.window)
            layouts = [layout for layout, _ in bounds.caches(layer)]
            for layout in layouts:
                insert.variants(layout, layer.num_heads, bounds.q_dtype, **alignments, norm=layer.q_norm)
                gather.variants(layout, **alignments)
            if self.capabilities.prefill_keys is KeyForm.GATHERED and self.prepare_rows is not None:
                ragged = self.capabilities.prefill_indices is IndexForm.RAGGED
                entries = layouts[1] if len(layouts) > 1 else None
                fill.variants(layouts[0], entries, ragged=ragged, aligned=bounds.aligned)
            dims = layer.num_heads, layer.nope_dim, layer.rope_dim, bounds.num_groups, bounds.o_lora_rank
            for dtype in bounds.wo_a_dtypes:
                projection.variants(*dims, bounds.q_dtype, dtype, aligned=bounds.aligned_rows)
            if self.projects_fp8:
                dims = layer.num_heads, layer.head_dim, layer.rope_dim, bounds.num_groups, bounds.o_lora_rank
                output.variants(*dims, bounds.q_dtype, aligned=bounds.aligned_rows, blocks=bounds.wo_a_blocks)
            if bounds.over_ranks and layer.has_entries:
                options: dict[str, Any] = {"sinks": bounds.with_sink, "aligned": bounds.aligned_rows}
                ranks.variants(layer.num_heads, layer.head_dim, bounds.q_dtype, **options)
            self._attend_within(bounds, layer, self._tuning(device))
        if bounds.model is not None:
            launch_within(bounds, deterministic=self.deterministic, exact_sums=self._exact_sums)
            if self.deterministic:
                products.variants()
            if {*LAYER_PARTS} <= {*bounds.parts}:  # whole layers; engines multiply by themselves
                few_rows.variants()

    def _attend_within(self, bounds: WarmupSpec, layer: LayerGeometry, tuning: Tuning) -> None:
        """Launch attention in both phases, inside a recording."""
        self._attend_pages(bounds, layer, tuning)
        if self.capabilities.prefill_keys is KeyForm.GATHERED:
            self._attend_rows(bounds, layer, tuning)

    def _attend_rows(self, bounds: WarmupSpec, layer: LayerGeometry, tuning: Tuning, *, decode: bool = False) -> None:
        """Launch attention over keys in the workspace. decode: whether decodes too."""
        self._attend_over(bounds, layer, tuning, meta_gathered(bounds.swa, ragged=self._ragged), decode=decode)

    def _attend_pages(self, bounds: WarmupSpec, layer: LayerGeometry, tuning: Tuning) -> None:
        """Launch attention over keys in caches."""
        layouts = [layout for layout, _ in bounds.caches(layer)]
        for alignments in product(*(_alignments(layout, aligned=bounds.aligned) for layout in layouts)):
            caches = [meta_cache(*form) for form in zip(layouts, alignments, strict=True)]
            self._attend_over(bounds, layer, tuning, meta_pages(caches, ragged=self._ragged))

    def _attend_over(
        self,
        bounds: WarmupSpec,
        layer: LayerGeometry,
        tuning: Tuning,
        keys: Sequence[PagedKeys] | GatheredKeys,
        *,
        decode: bool = True,
        aligned_q: bool = True,
    ) -> None:
        """Launch attention over some keys. decode: whether decodes too. aligned_q: whether rows of q may be aligned."""
        for rows in row_alignments(layer.head_dim, bounds.q_dtype, aligned=bounds.aligned_rows):
            if rows == WIDE and not aligned_q:
                continue
            options: dict[str, Any] = {"sinks": bounds.with_sink, "lses": bounds.with_lse, "alignment": rows}
            calls = list(meta_calls(layer, keys, bounds.q_dtype, **options))
            if self.deterministic:
                # rows of selected entries are split if they are longer than two splits, or have a wide window
                splits = (True,) if layer.kind is LayerKind.HCA else (False, True)
                attention_launch.variants(calls, tuning, splits=splits, tiles_per_split=1)
                continue
            for phase_tuning in dict.fromkeys(map(tuning.of, Phase)):
                attention_launch.variants(calls, phase_tuning)
            for small_tuning in tuning.small if decode else ():
                attention_launch.variants(calls, small_tuning, splits=(True,))
            rows_of = {Phase.PREFILL: MOST_ROWS}
            if decode:
                rows_of[Phase.DECODE] = bounds.limits.decode_threshold
            for phase, most in rows_of.items():
                several = [evolve(call, request_rows=meta_request(call, most)) for call in calls]
                attention_launch.variants(several, tuning.of(phase), splits=(False,))

    def warmup(self, bounds: WarmupSpec, device: torch.device) -> int:
        """See `contract.Backend`."""
        return warm(self.kernel_variants(bounds, DeviceFacts.here(device)), device, name=self.name)


def with_keys_as_in_decode(capabilities: Capabilities) -> Capabilities:
    """Capabilities of a backend whose prefill gets keys as its decode does, so that tiles have the same keys.

    capabilities: those without the option `deterministic`.
    """
    return evolve(
        capabilities,
        prefill_keys=KeyForm.PAGED,
        prefill_pages=False,
        prefill_indices=capabilities.decode_indices,
    )


def _alignments(layout: KVCacheLayout, *, aligned: bool) -> tuple[int, ...]:
    """Alignments of a cache of which attention has a variant each. aligned: whether it is to 16 bytes."""
    if aligned and (layout.is_quantised or layout.data_bytes % WIDE == 0):
        return (WIDE,)
    forms = {attention_launch.segment_form(layout, aligned=n == WIDE): n for n in (1, WIDE)}
    return tuple(forms.values())

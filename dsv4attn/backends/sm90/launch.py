"""The Backend for Hopper: its Gluon kernels where they serve a call, and the shared kernel for other calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, cached_property, partial
from math import prod
from typing import Any

import torch
from attrs import evolve
from torch import Tensor

from dsv4attn.backends._triton.attention import launch as attention_launch
from dsv4attn.backends._triton.attention import meta_calls as shared_calls
from dsv4attn.backends._triton.attention.launch import divider
from dsv4attn.backends._triton.attention.meta_calls import meta_request
from dsv4attn.backends._triton.backend import TritonBackend
from dsv4attn.backends._triton.cache import insert
from dsv4attn.backends._triton.compiling.variant import WIDE
from dsv4attn.backends._triton.interpreted import INTERPRETED
from dsv4attn.backends._triton.launching.launch_cache import Constants
from dsv4attn.backends._triton.launching.pdl import uses_pdl
from dsv4attn.backends._triton.launching.recorded import recorded
from dsv4attn.backends._triton.launching.runtime import Launch, multiprocessors
from dsv4attn.backends._triton.sizes import next_power_of_2
from dsv4attn.backends._triton.tuning import MOST_ROWS, Tuning
from dsv4attn.backends.sm90 import ops
from dsv4attn.backends.sm90.attention import few_heads, small_decode
from dsv4attn.backends.sm90.attention.kernels_combine import combine_parts
from dsv4attn.backends.sm90.attention.kernels_groups import LISTED, list_groups
from dsv4attn.backends.sm90.attention.kernels_schedule import SHORT
from dsv4attn.backends.sm90.attention.key_format import FP8_RECORDS, ROWS, V4_RECORDS, KeyFormat, format_of
from dsv4attn.backends.sm90.attention.meta_calls import NUMBERS, meta_calls
from dsv4attn.backends.sm90.hyper_connections import launch as hyper_connections
from dsv4attn.backends.sm90.indexer import launch as index_logits
from dsv4attn.backends.sm90.output import launch as output
from dsv4attn.backends.sm90.selection import group_select, index_select
from dsv4attn.backends.sm90.served import DIM, against_layer, keys_of
from dsv4attn.backends.sm90.tuning import (
    BF16_ROWS_ROLES,
    PAGES_TUNING,
    PREFILL_COST_MODEL,
    RAW_Q_ROLES,
    TUNING,
    V4_PAGES_ROLES,
    V41_PAGES_ROLES,
    FewHeadsSizes,
    TileSizes,
    WarpRoles,
    few_heads_sizes_of,
    group_is_faster,
    is_small,
    tile_sizes_of,
)
from dsv4attn.core.attention.checks import check_attention_strides
from dsv4attn.core.cache.layout import KVCacheLayout
from dsv4attn.core.cache.selected_keys import DenseIndices, GatheredKeys, PagedKeys
from dsv4attn.core.contract.backend import AttentionCall, AttentionTensors, ChunkCost, EntryIndices, KeyForm, Phase, Run
from dsv4attn.core.contract.device import DeviceFacts
from dsv4attn.core.contract.layer_ops import LayerOps
from dsv4attn.core.contract.problem import CacheFacts
from dsv4attn.core.contract.warmup import WarmupSpec
from dsv4attn.core.memory.workspace import ALIGNMENT
from dsv4attn.core.model.geometry import LayerGeometry, LayerKind
from dsv4attn.core.tensorspec import BufferSpec
from dsv4attn.errors import ArgumentError

if INTERPRETED:
    from dsv4attn.backends.sm90.interpreted.kernels import attention
else:
    from dsv4attn.backends.sm90.attention.kernels import attention

HEADS = 64
"""Heads of a block."""
ROTATED = 64
"""Rotated dims of raw q."""
FARTHEST = WIDE * 2**31
"""Smallest stride of pages or rows, in bytes, that the kernel's int32 strides cannot hold."""
GROUP_SPILLS = 640
"""Bytes that a thread of the Gluon kernel may store and load for what is computed once for a group."""
LINE = 1024
"""Rows whose lengths a program loads together when it computes its share of the tiles."""


class Sm90Backend(TritonBackend):
    """Attention on pages in decode, and on pages or on gathered bf16 rows in prefill.

    Layers of up to 16 heads on V4's fp8 records have a kernel of their own, `kernels_few_heads`, where it is faster.

    prefill: "paged" gathers nothing and needs no workspace for keys. "gathered" copies the keys of a chunk to rows
    first. "auto" needs the workspace of "gathered" and chooses the faster way for each chunk, see
    `tuning.PrefillCostModel`.
    tuning: tuning of the shared kernel, see `TritonBackend`.
    deterministic: no row is split, and the same kernel serves both phases on pages: the Gluon kernel, or the shared
    kernel where the former does not read the pages. `prefill` and `small` then change nothing.
    projection: see `TritonBackend`.
    index_sums: see `TritonBackend`. With "exact" the shared kernels compute index scores.
    small: for tests, no option of a user: which kernels serve decodes of few tokens where they are faster. "auto":
    `kernels_small_decode` on V4's fp8 records and V4.1's, see `tuning.tile_sizes_of`, and on others the shared kernel,
    see `tuning.is_small`; "shared": the shared kernel on all; "gluon": neither. `kernels_few_heads` serves with "auto"
    only.
    """

    name = "sm90"
    tunings = TUNING

    def __init__(
        self,
        *,
        prefill: str = "auto",
        tuning: str = "auto",
        deterministic: bool = False,
        projection: str = "bf16",
        index_sums: str = "fp8",
        small: str = "auto",
    ) -> None:
        """Check the options; no device is touched."""
        super().__init__(tuning=tuning, deterministic=deterministic, projection=projection, index_sums=index_sums)
        if small not in ("auto", "shared", "gluon"):
            raise ArgumentError("small", expected="'auto', 'shared' or 'gluon'", actual=repr(small))
        self._small = small
        if prefill not in (*KeyForm, "auto"):
            expected = " or ".join(f"'{form}'" for form in ("auto", *(form.value for form in KeyForm)))
            raise ArgumentError("prefill", expected=expected, actual=repr(prefill))
        self._chooses = prefill == "auto"
        # tiles of gathered rows have other keys than those of a decode's pages
        keys = KeyForm.PAGED if deterministic else KeyForm.GATHERED if self._chooses else KeyForm(prefill)
        self.capabilities = evolve(self.capabilities, prefill_keys=keys, prefill_pages=keys is KeyForm.GATHERED)

    multiply_codes = staticmethod(output.multiply_codes)

    @cached_property
    def layer_ops(self) -> LayerOps:
        """See `contract.Backend`."""
        return ops.layer_ops(deterministic=self.deterministic, exact_sums=self._exact_sums)

    def _may_serve(self, layer: LayerGeometry) -> bool:
        """Whether the Gluon kernels serve some calls of a layer."""
        return not against_layer(layer)

    def prefers_pages(self, layer: LayerGeometry, requests: Sequence[tuple[int, int]], rows: int) -> bool:
        """See `contract.Backend`."""
        if not self._chooses:
            return False
        is_served = self._may_use_few_heads
        return not self._may_serve(layer) or PREFILL_COST_MODEL.prefers_pages(
            layer, requests, rows, few_heads=is_served
        )

    def takes_raw_q(self, layer: LayerGeometry, q: Tensor, row_dtype: torch.dtype, chunks: Sequence[ChunkCost]) -> bool:
        """See `contract.Backend`: where the Gluon kernel serves gathered rows."""
        dtypes = q.dtype == row_dtype == torch.bfloat16
        if self.deterministic:
            return False
        if not self._may_serve(layer) or layer.rope_dim != ROTATED or not dtypes or not _is_wide(q):
            return False
        return not (self._chooses and chunks) or PREFILL_COST_MODEL.prefers_raw_q(
            layer, chunks, few_heads=self._may_use_few_heads
        )

    def _may_leave_raw(self, bounds: WarmupSpec, layer: LayerGeometry) -> bool:
        """Whether some calls within bounds take raw q."""
        gathers = self.capabilities.prefill_keys is KeyForm.GATHERED and layer.rope_dim == ROTATED and layer.q_norm
        return gathers and self._may_serve(layer) and bounds.q_dtype == bounds.swa.row_dtype == torch.bfloat16

    def scratch(self, phase: Phase, layer: LayerGeometry, tokens: int, width: int) -> Sequence[BufferSpec]:
        """Two parts for each program, their lse and largest logits, for each row which programs share it, and groups.

        The splits of the shared kernel and the partial results of `kernels_small_decode` fit into the same memory.
        """
        if not self._may_serve(layer):
            return super().scratch(phase, layer, tokens, width)
        lines = _programs(layer.num_heads) * 2 * HEADS
        if self.deterministic:
            splits = super().scratch(phase, layer, tokens, width)
            lines = max(lines, -(-prod(splits[0][0]) // DIM) if splits else 0)
        return [
            ((lines, DIM), torch.float32),
            ((lines,), torch.float32),
            ((lines,), torch.float32),
            ((max(tokens, 1), 2), torch.int32),
            ((tokens + 1, 4), torch.int32),
        ]

    def scratch_bound(self, phase: Phase, layer: LayerGeometry, max_tokens: int, max_width: int) -> int:
        """See `scratch`. Only the sizes of the last two buffers depend on the call."""
        if not self._may_serve(layer):
            return super().scratch_bound(phase, layer, max_tokens, max_width)
        lines = _programs(layer.num_heads) * 2 * HEADS
        if self.deterministic:
            splits = super().scratch_bound(phase, layer, max_tokens, max_width)
            lines = max(lines, -(-splits // (4 * DIM)))
        return lines * (DIM + 2) * 4 + max(max_tokens, 1) * 8 + (max_tokens + 1) * 16 + 5 * ALIGNMENT

    def prepare(self, phase: Phase, call: AttentionCall) -> Run:
        """See `contract.Backend`. Pages and gathered rows are both served, whatever option `prefill` says."""
        if not call.scratch or not self._may_serve(call.layer):
            return super().prepare(phase, call)
        check_attention_strides(call)
        widths = tuple(rows.width for rows in attention_launch.index_rows(call.keys))
        format_and_numbers, (tokens, heads, _) = _key_format_and_numbers(call), call.q.shape
        if format_and_numbers is None and call.raw_q is not None:
            expected, hint = "None for this call", "ask takes_raw_q, and prepare q where it says no"
            raise ArgumentError("raw_q", expected=expected, actual="a RawQuery", hint=hint)
        if format_and_numbers is not None:
            kind, numbers = format_and_numbers
            decode = phase is Phase.DECODE and not isinstance(call.keys, GatheredKeys)
            group = self._group(phase, kind, call)
            requests = 0 if call.request_rows is None else call.request_rows.requests
            alone = group == 1 or (decode and not group_is_faster(heads, tokens, min(requests, tokens)))
            if alone and (sizes := self._few_heads_sizes(phase, kind, call)):
                return few_heads.prepare(call, numbers, sizes)
            if decode and (tiles := self._small_decode_tiles(kind, call, group)):
                return small_decode.prepare(call, kind, numbers, tiles)
            if not (
                decode and self._may_use_shared_kernel(kind) and is_small(tokens, heads, sum(widths), multiprocessors())
            ):
                return _prepare(call, kind, numbers, whole_rows=self.deterministic, group=group)
        # the splits of the shared kernel, in the same memory
        shapes = [shape for shape, _ in super().scratch(phase, call.layer, tokens, sum(widths))]
        pairs = zip(call.scratch, shapes, strict=False)
        parts = [buffer.view(-1)[: prod(shape)].view(*shape) for buffer, shape in pairs]
        return super().prepare(phase, evolve(call, scratch=parts))

    def prepare_entries(self, call: AttentionCall, entries: EntryIndices) -> Run | None:
        """See `contract.Backend`. For calls of `kernels_small_decode` whose index tensors have no gaps."""
        if not call.scratch or not self._may_serve(call.layer) or not small_decode.reads(call, entries):
            return None
        check_attention_strides(call)
        direct = small_decode.with_entries(call, entries)
        # no Gluon kernel reads these keys: the format of rows then, of which `_small_decode_tiles` serves none
        kind, numbers = _key_format_and_numbers(direct) or (ROWS, ())
        tiles = self._small_decode_tiles(kind, direct)
        if tiles is None or self._few_heads_sizes(Phase.DECODE, kind, direct, reads_entries=True):
            return None
        return small_decode.prepare(direct, kind, numbers, tiles, entries)

    def _few_heads_sizes(
        self, phase: Phase, kind: KeyFormat, call: AttentionCall, *, reads_entries: bool = False
    ) -> FewHeadsSizes | None:
        """Sizes of the programs of `kernels_few_heads`; None if it does not serve the call.

        reads_entries: whether `kernels_small_decode` reads entries otherwise.
        """
        tokens, heads, _ = call.q.shape
        if not tokens or kind != FP8_RECORDS or not self._may_use_few_heads:
            return None
        widths = tuple(rows.width for rows in attention_launch.index_rows(call.keys))
        decode = phase is Phase.DECODE
        return few_heads_sizes_of(tokens, heads, widths, multiprocessors(), decode=decode, reads_entries=reads_entries)

    @property
    def _may_use_few_heads(self) -> bool:
        """Whether `kernels_few_heads` may serve calls on V4's fp8 records."""
        return self._small == "auto" and not self.deterministic

    def _group(self, phase: Phase, kind: KeyFormat, call: AttentionCall) -> int:
        """Rows of a request that the Gluon kernel on pages computes together; 1 if each is by itself."""
        rows, layer, tokens = call.request_rows, call.layer, call.q.shape[0]
        if rows is None or not rows.are_several:
            return 1
        if phase is Phase.DECODE:
            return self._largest_group(phase, kind, layer, rows.max_tokens)
        widths = [segment.width for segment in attention_launch.index_rows(call.keys)]
        few_heads = kind == FP8_RECORDS and self._may_use_few_heads
        faster = PREFILL_COST_MODEL.prefers_groups(layer, tokens, rows.requests, widths, few_heads=few_heads)
        # one form for prompts of any length
        return self._largest_group(phase, kind, layer, MOST_ROWS) if faster else 1

    def _largest_group(self, phase: Phase, kind: KeyFormat, layer: LayerGeometry, most: int) -> int:
        """Most rows of a group of requests of at most `most` rows.

        Decodes of window-only layers were slower: 25 us and not 18 for 64 requests of 4 tokens of 8 heads (H200, torch
        2.11, Triton 3.6, 2026-11-28).
        """
        shares = phase is Phase.PREFILL or layer.kind is LayerKind.HCA
        shares = shares and kind.is_paged and not self.deterministic
        return PAGES_TUNING.group_of(layer, most) if shares else 1

    def _small_decode_tiles(self, kind: KeyFormat, call: AttentionCall, group: int = 1) -> TileSizes | None:
        """Sizes of the programs of `kernels_small_decode`; None if it does not serve the decode.

        group: rows that the Gluon kernel on pages would compute together.
        """
        (tokens, heads, _), requests = call.q.shape, call.request_rows
        widths, groups = tuple(rows.width for rows in attention_launch.index_rows(call.keys)), None
        if group > 1 and requests is not None:
            groups = max(-(-tokens // group), min(requests.requests, tokens))
        return (
            tile_sizes_of(tokens, heads, widths, _programs(heads), groups)
            if tokens and self._may_use_small_decode(kind)
            else None
        )

    def _may_use_small_decode(self, kind: KeyFormat) -> bool:
        """Whether `kernels_small_decode` may serve decodes on keys of this format."""
        return self._small == "auto" and kind.has_tiles and not self.deterministic

    def _may_use_shared_kernel(self, kind: KeyFormat) -> bool:
        """Whether the shared kernel may serve decodes that the Gluon kernels could serve, on keys of this format."""
        return not self.deterministic and (self._small == "shared" or (self._small == "auto" and not kind.has_tiles))

    def _launch_within(self, bounds: WarmupSpec, device: DeviceFacts) -> None:
        """See `TritonBackend`."""
        super()._launch_within(bounds, device)
        for layer in bounds.layers:
            if self._may_leave_raw(bounds, layer):
                # writing keys alone, for a prefill whose q stays raw
                insert.variants(bounds.swa, 0, bounds.q_dtype, aligned=bounds.aligned, aligned_rows=bounds.aligned_rows)
            if self.projects_fp8 and device.arch == "sm_90":
                output.variants(bounds, layer)
        own_scores = not (self.deterministic or self._exact_sums)
        if bounds.model is not None and own_scores and index_logits.may_serve(bounds):
            if not INTERPRETED:
                index_logits.variants()
            if "selection" in bounds.parts:
                _select_within(bounds)
        hyper_connections.variants(bounds, deterministic=self.deterministic)

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
        """Launch the Gluon kernels, and the shared kernel for the calls that it may serve."""
        options: dict[str, Any] = {"sinks": bounds.with_sink, "lses": bounds.with_lse}
        gathered, segments = isinstance(keys, GatheredKeys), len(attention_launch.index_rows(keys))
        (call, *_) = shared_calls.meta_calls(layer, keys, bounds.q_dtype, **options)
        found = _key_format_and_numbers(call) if self._may_serve(layer) else None
        if found is not None:
            kind = found[0]
            # the Gluon kernels serve all calls on gathered rows and on aligned records with aligned q and out, but not
            # on pages of bf16 rows
            serves_all = gathered or (kind.is_paged and not self._may_use_shared_kernel(kind))
            aligned_q = aligned_q and not serves_all
        super()._attend_over(bounds, layer, tuning, keys, decode=decode, aligned_q=aligned_q)
        if found is None:
            return
        form = segments, kind, layer.num_heads
        variants(*form, **options, whole_rows=self.deterministic)
        if gathered and self._may_leave_raw(bounds, layer):
            variants(*form, **options, raw=True)
        rows_of = {} if gathered else {Phase.DECODE: bounds.limits.decode_threshold, Phase.PREFILL: MOST_ROWS}
        for group in {self._largest_group(phase, kind, layer, most) for phase, most in rows_of.items()} - {1}:
            variants(*form, **options, group=group)
        if self._may_use_small_decode(kind):
            small_decode.variants(*form, **options)
        if kind == FP8_RECORDS and self._may_use_few_heads:
            few_heads.variants(segments, layer.num_heads, **options)


def _select_within(bounds: WarmupSpec) -> None:
    """Launch selection in one launch and by groups."""
    sizes = {
        (layer.topk, layer.entries(bounds.limits.max_model_len)): None
        for layer in bounds.layers
        if layer.kind is LayerKind.CSA
    }
    for topk, entries in sizes:
        group_select.variants(topk, entries)
        if not INTERPRETED:
            index_select.variants(topk)


def _programs(heads: int) -> int:
    """Number of programs of a Gluon kernel: all that run at once, divided evenly among the blocks of heads."""
    blocks = -(-heads // HEADS)
    return max(multiprocessors() // blocks, 1) * blocks


def _prepare(call: AttentionCall, kind: KeyFormat, numbers: Sequence[int], *, whole_rows: bool, group: int = 1) -> Run:
    """Prepare both launches: the Gluon kernel, which writes rows and parts of rows, and `combine_parts`.

    whole_rows: whether no row is split; then nothing is combined.
    group: rows of a request that are computed together.
    """
    q, top, keys = call.q, call.max_logits, call.keys
    tokens, heads, _ = q.shape
    roles, raw = _warp_roles(kind, raw=call.raw_q is not None), call.raw_q
    segments = len(attention_launch.index_rows(keys))
    short = _has_short(segments, kind) and tokens <= SHORT.value
    constants, combining, programs_per_row = _constants(
        segments, kind, heads, raw=raw is not None, short=short, whole_rows=whole_rows, group=group
    )
    programs = _programs(heads)
    lines = min(tokens, programs // -(-heads // HEADS))
    results = attention_launch.result_strides(call)
    scale, empty_lse = call.layer.scale, call.empty_lse
    positions = table = None
    rotation: tuple[float, ...] = (0, 0, 0.0)
    if raw is not None:
        positions, table = raw.positions, raw.cos_sin_cache
        rotation = table.stride(0), table.shape[0], raw.eps
    launch_attention = Launch(
        attention,
        constants,
        (*q.stride()[:2], *results, *numbers, *rotation, tokens, roles.least, scale, empty_lse),
        # what rows of a group see stays in memory but for the tiles in which they differ
        spills=GROUP_SPILLS if group > 1 else 0,
    )
    most = programs // -(-heads // HEADS)
    combine = Launch(combine_parts, combining, (*results, empty_lse, tokens, most), roles.warps)
    programs, combiners = programs if tokens else 0, 0 if whole_rows else lines * programs_per_row
    part, part_lse, part_max, splits, groups = call.scratch
    list_rows = None if group == 1 else _prepare_list(call, groups, numbers, group)
    listed = None if group == 1 else groups
    # other kernels fill this memory with fp32: parts in fp16 need half of it, and powers less than the rest
    part, part_powers = part.view(torch.float16), part.view(-1)[part.numel() // 2 :].view(torch.uint8)
    maxima = None if top is None else part_max
    gathered = keys.kv if isinstance(keys, GatheredKeys) else None
    window_indices, window_lens, compressed_indices, compressed_lens = attention_launch.index_tensors(keys)

    def run(tensors: AttentionTensors) -> None:
        q, out, lse, attn_sink, _, window_cache, compressed_cache = tensors
        # an only segment is passed twice
        window = compressed = window_cache.tensor if gathered is None else gathered
        if segments > 1 and compressed_cache is not None:
            compressed = compressed_cache.tensor
        if list_rows is not None:
            list_rows()
        launch_attention(
            programs,
            (
                q, out, lse, top, attn_sink, part, part_powers, part_lse, maxima, splits,
                window, window_indices, window_lens, compressed, compressed_indices, compressed_lens,
                positions, table, listed,
            ),
        )  # fmt: skip
        if combiners:
            results = part, part_powers, part_lse, maxima, splits, out, lse, top, attn_sink
            combine(combiners, (*results, listed))

    return run


def _prepare_list(call: AttentionCall, groups: Tensor, numbers: Sequence[int], group: int) -> Callable[[], None]:
    """The launch that lists groups of up to `group` rows. numbers: of both segments."""
    rows, tokens = call.request_rows, call.q.shape[0]
    assert rows is not None
    _, window_lens, _, compressed_lens = attention_launch.index_tensors(call.keys)
    segments = len(attention_launch.index_rows(call.keys))
    constants = Constants({"G": group, "PDL": uses_pdl("sm_90") and not INTERPRETED})
    widths = numbers[0], numbers[len(numbers) // 2]
    starts = rows.query_start_loc
    launch = Launch(list_groups, constants, (starts.shape[0] - 1, tokens, *widths), 8)
    tensors = groups, rows.token_to_req, starts, window_lens, compressed_lens if segments > 1 else None
    return partial(launch, -(-tokens // LISTED.value), tensors)


def _key_format_and_numbers(call: AttentionCall) -> tuple[KeyFormat, Sequence[int]] | None:
    """Format of the keys, and numbers of both segments; None if the shared kernel serves the call."""
    q, out, keys = call.q, call.out, call.keys
    if q.dtype != torch.bfloat16 or out.dtype != torch.bfloat16 or not (_is_wide(q) and _is_wide(out)):
        return None
    if isinstance(keys, GatheredKeys):
        return _of_rows(keys)
    return _of_pages(keys) if all(isinstance(segment.rows, DenseIndices) for segment in keys) else None


def _warp_roles(kind: KeyFormat, *, raw: bool = False) -> WarpRoles:
    """Warp roles of the Gluon kernel for a key format. raw: whether q is raw."""
    if kind.is_paged:
        return V4_PAGES_ROLES if kind in V4_RECORDS.values() else V41_PAGES_ROLES
    return RAW_Q_ROLES if raw else BF16_ROWS_ROLES


def _has_short(segments: int, kind: KeyFormat) -> bool:
    """Whether calls of few tokens have their own variant. Only two segments on V4's fp8 pages were measured."""
    return kind in V4_RECORDS.values() and segments == 2


@cache
def _constants(
    segments: int,
    kind: KeyFormat,
    heads: int,
    *,
    raw: bool = False,
    short: bool = False,
    whole_rows: bool = False,
    group: int = 1,
) -> tuple[Constants, Constants, int]:
    """Constants of the Gluon kernel, constants of `combine_parts`, and programs of `combine_parts` for each row.

    raw: whether q is raw.
    short: whether the call has at most SHORT tokens. Only where `_has_short` is true.
    whole_rows: whether no row is split.
    group: rows of a request that are computed together.
    """
    roles = _warp_roles(kind, raw=raw)
    chosen = {"SEGMENTS": segments, "KIND": kind.number, "INTERLEAVED": kind.interleaved, "H": heads}
    grouped = {"GROUP": group, "HEADS": HEADS if group == 1 else next_power_of_2(heads)}
    chosen |= {"BT": SHORT.value if short else LINE, "WHOLE_ROWS": whole_rows, "HEADS": grouped["HEADS"]}
    if not INTERPRETED:
        chosen |= {"VALUES": roles.values, "PRODUCE": roles.produce, "FETCH": roles.fetch, "PDL": uses_pdl("sm_90")}
    combining = {"H": heads, "R": roles.heads, "N": roles.parts, "EXACT_CASTS": not INTERPRETED}
    combining["PDL"] = uses_pdl("sm_90") and not INTERPRETED
    combining |= grouped if group > 1 else {"GROUP": 1, "HEADS": 1 << 16}
    lines = heads if group == 1 else group * grouped["HEADS"]
    return Constants(chosen), Constants(combining), -(-lines // 16) * (16 // roles.heads)


def _is_wide(tensor: Tensor) -> bool:
    """Whether a tensor and its rows begin at multiples of 16 bytes."""
    return attention_launch.wide_unit(tensor, *tensor.stride()[:-1]) > 1


@cache
def _key_format(*layouts: KVCacheLayout) -> KeyFormat | None:
    """Format of the keys of aligned caches with these layouts; None if the Gluon kernels do not read them."""
    first = layouts[0]
    if any((layout.nope_dim, layout.rope_dim) != (first.nope_dim, first.rope_dim) for layout in layouts):
        return None
    keys = keys_of([CacheFacts.of(layout, 1) for layout in layouts], (first.nope_dim, first.rope_dim))
    if isinstance(keys, str):
        return None
    # facts of a cache do not have the bytes of its scales, which differ in a layout that is changed by hand
    records = [layout for layout in layouts if layout.is_quantised]
    usual = all(layout.scale_bytes == KVCacheLayout.of_record(layout.name).scale_bytes for layout in records)
    return format_of(keys) if usual else None


def _of_pages(keys: Sequence[Any]) -> tuple[KeyFormat, tuple[int, ...]] | None:
    """`_key_format_and_numbers` of keys on pages."""
    caches = [segment.cache for segment in keys]
    kind = _key_format(*(cache.layout for cache in caches))
    if kind is None or any(cache.tensor.data_ptr() % WIDE or cache.page_stride % WIDE for cache in caches):
        return None
    numbers: list[int] = []
    for segment in keys:
        cache, indices, size = segment.cache, segment.rows.indices, segment.cache.block_size
        pitch = cache.page_stride
        if not kind.is_paged:
            pitch = cache.tensor.stride(1) * 2 if size > 1 else pitch
            # contiguous pages of rows are read as rows
            if pitch * size != cache.page_stride or pitch % WIDE:
                return None
        if pitch >= FARTHEST:
            return None
        last_slot = min(cache.capacity, attention_launch.MOST_SLOTS) - 1
        numbers += (indices.shape[1], indices.stride(0), size, *divider(size), pitch // WIDE, last_slot)
    return kind, tuple(numbers * (3 - len(keys)))


def _of_rows(keys: GatheredKeys) -> tuple[KeyFormat, tuple[int, ...]] | None:
    """`_key_format_and_numbers` of gathered rows."""
    kv, rows, pitch = keys.kv, keys.rows, keys.kv.stride(0) * 2
    if kv.dtype != torch.bfloat16 or not _is_wide(kv) or pitch >= FARTHEST or not isinstance(rows, DenseIndices):
        return None
    last_slot = min(kv.shape[0], attention_launch.MOST_SLOTS) - 1
    numbers = rows.indices.shape[1], rows.indices.stride(0), 1, *divider(1), pitch // WIDE, last_slot
    return ROWS, numbers * 2


@recorded
def variants(
    segments: int,
    kind: KeyFormat,
    heads: int,
    *,
    sinks: Sequence[bool],
    lses: Sequence[bool],
    raw: bool = False,
    whole_rows: bool = False,
    group: int = 1,
) -> None:
    """Every variant of these kernels that `forward_mqa` can need.

    sinks, lses: see `meta_calls`.
    raw: whether q is raw.
    whole_rows: whether no row is split; then nothing is combined.
    group: rows of a request that are computed together.
    """
    for tokens in (1, SHORT.value + 1):
        for call in meta_calls(segments, kind, heads, sinks=sinks, lses=lses, tokens=tokens, raw=raw):
            grouped = evolve(call, request_rows=meta_request(call, group)) if group > 1 else call
            _prepare(grouped, kind, NUMBERS, whole_rows=whole_rows, group=group)(call.tensors)

"""`Backend`: what core asks of the kernels of a device. It is the base class of every backend.

A backend declares which indices and keys it takes (`Capabilities`). Core prepares exactly these, and calls `decode` and
`prefill` with one `AttentionCall`. Every backend keeps these rules in both phases:

1. An index that is -1, outside the cache, or in a column at or past its row's length is absent, wherever it stands.
2. A row without keys gives exactly 0, and lse -inf, or the call's `empty_lse`.
3. The sink is one more logit with value zero. It is not scaled, and is applied once. -inf is no sink, +inf gives zeros.
4. `lse` is fp32, natural log, without the sink.
5. Bytes of a cache that no index names never reach an output, not even as NaN.
6. Addresses are computed in 64 bits.
7. A NaN in a key that a row names makes the row's out, lse and largest logits NaN in every head and dim, whether the
   NaN is a code, a scale byte or a plain value. Writers write a NaN so that the key reads as NaN.
8. The last dimension of a tensor has stride 1. Rows, and heads of q, o and out, may lie any distance apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

from dsv4attn.core.argument_checks import shown
from dsv4attn.core.cache.selected_keys import (
    ChunkRows,
    DenseIndices,
    EntryIndices,
    GatheredKeys,
    PagedKeys,
    PageTable,
    RaggedIndices,
    RequestRows,
)
from dsv4attn.core.contract.attention_call import AttentionCall, AttentionOptions, AttentionTensors, Run
from dsv4attn.core.contract.capabilities import Capabilities, IndexForm, KeyForm, Phase, Products
from dsv4attn.core.contract.info import API_VERSION, COMPUTING, LAYER_PARTS, BackendInfo, Rank
from dsv4attn.core.contract.metadata_extension import MetadataExtension
from dsv4attn.core.contract.raw_query import RawQuery
from dsv4attn.core.model.geometry import LayerGeometry
from dsv4attn.core.reprs import one_line
from dsv4attn.errors import ArgumentError

if TYPE_CHECKING:
    # descriptors load where torch is not installed
    import torch
    from torch import Tensor

    from dsv4attn.core.cache.layout import PagedKVCache
    from dsv4attn.core.contract.builder_ops import BuilderOps
    from dsv4attn.core.contract.device import DeviceFacts
    from dsv4attn.core.contract.index_ops import IndexOps
    from dsv4attn.core.contract.layer_ops import LayerOps
    from dsv4attn.core.contract.limits import Limits
    from dsv4attn.core.contract.rank_ops import RankOps
    from dsv4attn.core.contract.warmup import WarmupSpec
    from dsv4attn.core.model.geometry import ModelGeometry
    from dsv4attn.core.tensorspec import BufferSpec

__all__ = [
    "API_VERSION",
    "LAYER_PARTS",
    "OPTIONAL_MEMBERS",
    "REQUIRED_MEMBERS",
    "AttentionCall",
    "AttentionOptions",
    "AttentionTensors",
    "Backend",
    "BackendInfo",
    "Capabilities",
    "ChunkCost",
    "ChunkRows",
    "DenseIndices",
    "EntryIndices",
    "FillRows",
    "GatheredKeys",
    "IndexForm",
    "KeyForm",
    "MetadataExtension",
    "PageTable",
    "PagedKeys",
    "Phase",
    "PrepareRows",
    "Products",
    "RaggedIndices",
    "Rank",
    "RawQuery",
    "RequestRows",
    "Run",
    "check_is_backend",
    "missing_members",
]

ChunkCost: TypeAlias = "tuple[Sequence[tuple[int, int]], int]"
"""The size of a prefill chunk: (requests, rows to gather), with (tokens before the chunk, tokens in it) per request."""

FillRows: TypeAlias = "Callable[[Tensor | None, PagedKVCache, PagedKVCache | None], None]"
"""Fills the gathered rows and the index lists of a chunk for one layer: `fill(topk_indices, window, compressed)`.

The tensors have the signatures (`tensorspec.signature`) of those that `PrepareRows` got."""

PrepareRows: TypeAlias = "Callable[[ChunkRows, Tensor | None, PagedKVCache, PagedKVCache | None], FillRows]"
"""The type of `Backend.prepare_rows`: `prepare_rows(chunk, topk_indices, window, compressed)` returns a `FillRows`."""


class Backend:
    """The kernels of a device. Core checks all arguments before it calls a method.

    A subclass has the attributes `name` and `capabilities`, and overrides the methods that raise
    NotImplementedError here. Everything else has a default. Methods of a subclass that compute run with autocast off
    and record no gradients.

    name: what users write.
    capabilities: the indices and keys that core prepares for this backend.
    builder_ops: the index arithmetic of `MetadataBuilder`; None: torch's.
    deterministic: whether no row's bits depend on the other rows of a call.
    phases_agree: whether a deterministic row has the same bits in prefill as in decode.
    projects_fp8: whether `inv_rope_o_proj` takes a `BlockScaledWeight` as it is, and then rounds outputs to fp8.
    """

    name: str
    capabilities: Capabilities
    builder_ops: BuilderOps | None = None
    deterministic: bool = False
    phases_agree: bool = True
    projects_fp8: bool = False

    def __init_subclass__(cls, **options: object) -> None:
        """Guard the methods that compute against autocast and the recording of gradients, for every caller."""
        super().__init_subclass__(**options)
        if not COMPUTING.isdisjoint(vars(cls)):
            from dsv4attn.core.torch_modes import guard_methods

            guard_methods(cls, COMPUTING)

    @one_line
    def __repr__(self) -> Iterator[str]:
        """Name, forms of keys and indices, and the parts of the layer whose ops are the backend's own."""
        yield self.name
        forms = self.capabilities
        yield f"decode on pages by {forms.decode_indices.value} indices"
        yield f"prefill on {forms.prefill_keys.value} keys by {forms.prefill_indices.value} indices"
        yield "deterministic" if self.deterministic else ""
        # a table that was not asked for yet is not made for a repr: that may ask the driver for the device
        layer_ops = vars(self).get("layer_ops") or getattr(type(self), "layer_ops", None)
        if layer_ops is not None and hasattr(layer_ops, "sources"):
            own = [part for part, source in layer_ops.sources(self.name).items() if source == self.name]
            yield f"layer ops: {' '.join(own) or 'of torch'}"

    # Every backend has these.

    def scratch(self, phase: Phase, layer: LayerGeometry, tokens: int, width: int) -> Sequence[BufferSpec]:
        """The workspace views of an attention call with `tokens` rows of at most `width` keys.

        The answer depends on the arguments alone.
        phase: decode or prefill.
        layer: the layers of the call.
        tokens: rows of q.
        width: most keys of a row, of both caches together.
        """
        raise NotImplementedError

    def scratch_bound(self, phase: Phase, layer: LayerGeometry, max_tokens: int, max_width: int) -> int:
        """Upper bound in bytes of `scratch` over all smaller calls. It need not be tight.

        phase: decode or prefill.
        layer: the layers of the calls.
        max_tokens: most rows of q in a call.
        max_width: most keys of a row, of both caches together.
        """
        raise NotImplementedError

    def transient_bytes(self, layer: LayerGeometry, max_tokens: int, max_width: int, max_rows: int) -> int:
        """Upper bound in bytes on what any one method allocates with torch; 0 for kernels.

        Of `inv_rope_o_proj` what it makes of outputs is included. Results and copies of weights are not: their memory
        follows from weights that core never sees.
        layer: the layers of the calls.
        max_tokens: most rows of q in a call.
        max_width: most keys of a row, of both caches together.
        max_rows: most cache records that one gather or insert touches.
        """
        raise NotImplementedError

    def quantize_and_insert_k_cache(self, k: Tensor, cache: PagedKVCache, slot_mapping: Tensor) -> None:
        """Write rotated keys to their slots of a cache.

        Slots that are negative or do not exist are skipped.
        k: [T, D] bf16 or fp32, rotated.
        cache: the cache to write. Its layout says how a key becomes a record.
        slot_mapping: [T] int64 slot of each row: page * page size + offset.
        """
        raise NotImplementedError

    def qnorm_rope_kv_insert(
        self,
        q: Tensor,
        kv: Tensor,
        cache: PagedKVCache,
        slot_mapping: Tensor,
        positions: Tensor,
        cos_sin_cache: Tensor,
        eps: float | None,
    ) -> None:
        """Normalise and rotate q [T, H, D] in place; rotate a copy of kv [T, D], which has q's dtype, and insert it.

        Of rows at or past len(slot_mapping) q is processed, and kv is not inserted. For q without heads see
        `takes_raw_q`.
        q: [T', H, D] bf16 or fp32, changed in place. H may be 0, see `takes_raw_q`.
        kv: [T', D] of q's dtype.
        cache: the window cache to write.
        slot_mapping: [T] int64 slot of each row, T at most T'; negative for none.
        positions: [T'] int64.
        cos_sin_cache: [positions, rope dims] fp32, cosines then sines.
        eps: of the norm; None: q is rotated only, as in DeepSeek-V4.1.
        """
        raise NotImplementedError

    def dequantize_and_gather_k_cache(
        self,
        out: Tensor,
        cache: PagedKVCache,
        seq_lens: Tensor,
        gather_lens: Tensor | None,
        block_table: Tensor,
        offset: int,
    ) -> None:
        """Write record `seq_lens[i] - gather_lens[i] + j` of each request i to `out[i, offset + j]`.

        Lengths may be any int32. A record is absent if its position is negative, or if its column of the block table or
        its row of out does not exist. Rows that receive no record are not written.
        out: [n, M, D] in the layout's row dtype.
        gather_lens: None: all records of every request.
        offset: at least 0.
        cache: the cache to read.
        seq_lens: [n] int32 - records of each request in the cache.
        block_table: [n, columns] int32 - pages of each request.
        """
        raise NotImplementedError

    def decode(self, call: AttentionCall) -> None:
        """Attention of few rows over pages; each row may have any number of keys.

        call: rows, key indices, caches and where to write.
        """
        raise NotImplementedError

    def prefill(self, call: AttentionCall) -> None:
        """Attention of many rows over keys in the form of `Capabilities.prefill_keys`.

        call: rows, keys and where to write.
        """
        raise NotImplementedError

    def inv_rope_o_proj(
        self, o: Tensor, positions: Tensor, cos_sin_cache: Tensor, wo_a: Tensor, num_groups: int
    ) -> Tensor:
        """Undo the rotation of o [T, H, D] at the query's position, then project each group of heads.

        o: [T, H, D] bf16 or fp32; it stays as it is.
        positions: [T] int64.
        cos_sin_cache: [positions, rope dims] fp32, cosines then sines.
        num_groups: G, which divides the heads.
        wo_a: [G * rank, H / G * D], bf16 or fp32. Core converts block-scaled fp8 before the call, unless the backend
           `projects_fp8`.
        Returns [T, G, rank] in the dtype of o.
        """
        raise NotImplementedError

    # All that follows has a default.

    @cached_property
    def layer_ops(self) -> LayerOps:
        """The ops around attention, by default torch's. A backend that brings some has `evolve(LayerOps(), ...)`."""
        from dsv4attn.core.contract.layer_ops import default_layer_ops

        return default_layer_ops(deterministic=self.deterministic)

    @cached_property
    def rank_ops(self) -> RankOps:
        """The ops over ranks. A backend that brings some has `evolve(RankOps(), ...)` as this attribute."""
        from dsv4attn.core.contract.rank_ops import RankOps

        return RankOps()

    @cached_property
    def index_ops(self) -> IndexOps:
        """Index arithmetic. A backend that brings some of it has `evolve(IndexOps(), ...)` as this attribute."""
        from dsv4attn.core.contract.index_ops import IndexOps

        return IndexOps()

    def prepare(self, phase: Phase, call: AttentionCall) -> Run:
        """Check and plan a call once, for all layers of a kind in a step. Nothing is launched or written.

        The prepared call keeps index rows, scratch and options of the call. Each run gets the other tensors, see
        `AttentionTensors`. This default calls `decode` or `prefill` in each run.
        phase: decode or prefill.
        call: shapes, index rows, scratch and options; the tensors of the first run too.
        """
        attend: Callable[[AttentionCall], None] = getattr(self, phase.value)
        return lambda tensors: attend(call.with_tensors(tensors))

    def prepare_entries(self, call: AttentionCall, entries: EntryIndices) -> Run | None:
        """`prepare` of a decode that finds the slots of selected entries itself; None if the backend does not.

        Each run reads the entries from `AttentionTensors.topk_indices`, and their slots from the block table. After
        None, core calls `prepare`, and translates the entries to index rows in every run. Core asks backends whose
        decode indices are dense.
        call: as `prepare` gets it, but the index rows of its second segment hold nothing.
        entries: those of the first layer.
        """
        return None

    @cached_property
    def prepare_rows(self) -> PrepareRows | None:
        """A function that prepares the fill of all gathered rows and index lists of a prefill chunk, or None.

        `prepare_rows(chunk, topk_indices, window, compressed)` checks and plans once, for all layers of a kind in a
        step, and returns the `FillRows`. Nothing is launched or written. Where it is None, core calls
        `dequantize_and_gather_k_cache` and the index ops one by one: `gathered.fill_by_ops` is the definition.
        topk_indices: [t, K] int32 - entry numbers of the chunk's tokens; None on window-only layers.
        window, compressed: the caches; compressed is None on window-only layers.
        """
        return None

    def prefers_pages(self, layer: LayerGeometry, requests: Sequence[tuple[int, int]], rows: int) -> bool:
        """Whether attention of a prefill chunk is faster on pages than on gathered rows.

        Core asks backends whose prefill keys are GATHERED. A backend that answers True takes both forms in `prepare`,
        and needs no more memory for pages.
        layer: the layers of the chunk.
        requests: per request (tokens before this chunk, tokens in it); the host may know upper bounds only.
        rows: number of rows that core would gather.
        """
        return False

    def takes_raw_q(self, layer: LayerGeometry, q: Tensor, row_dtype: torch.dtype, chunks: Sequence[ChunkCost]) -> bool:
        """Whether prefill on gathered rows takes q as it was projected, see `AttentionOptions.raw_q`.

        Core asks backends whose prefill keys are GATHERED. A backend that ever answers True has a
        `qnorm_rope_kv_insert` that takes q without heads, and then writes kv alone.
        layer: the layers of the step.
        q: [T, H, D], of all tokens of a step. Core asks about out too. Only dtype, shape, strides and alignment count.
        row_dtype: dtype of the gathered rows.
        chunks: every chunk of the step. Return True only if raw q is faster overall; all chunks are then gathered.
           Without chunks: whether calls with raw q run at all.
        """
        return False

    def metadata_extension(
        self, geometry: ModelGeometry, limits: Limits, device: torch.device
    ) -> MetadataExtension[Any, Any] | None:
        """Allocate the buffers of the backend's own metadata for batches within the limits; None if it has none.

        geometry: of the model, on this rank.
        limits: of all batches.
        device: where the buffers lie.
        """
        return None

    def kernel_variants(self, bounds: WarmupSpec, device: DeviceFacts) -> Iterable[object]:
        """Every kernel variant of calls within the bounds on a device, which need not be present.

        Variants are hashable. Two variants that are compiled as one are equal.
        bounds: the calls: geometry, limits, layouts, dtypes.
        device: facts of the device.
        """
        return ()

    def warmup(self, bounds: WarmupSpec, device: torch.device) -> int:
        """Compile `kernel_variants` on a device of this machine, and return how many. Later calls compile nothing.

        bounds: the calls: geometry, limits, layouts, dtypes.
        device: the device to compile for.
        """
        return 0


REQUIRED_MEMBERS = (
    "decode",
    "dequantize_and_gather_k_cache",
    "capabilities",
    "inv_rope_o_proj",
    "name",
    "prefill",
    "qnorm_rope_kv_insert",
    "quantize_and_insert_k_cache",
    "scratch",
    "scratch_bound",
    "transient_bytes",
)
"""Members that every backend brings."""

OPTIONAL_MEMBERS = tuple(name for name in vars(Backend) if not name.startswith("_") and name not in REQUIRED_MEMBERS)
"""Members with a default."""


def missing_members(backend: object) -> list[str]:
    """The names of required members that `backend` lacks, or has from `Backend` alone.

    backend: the backend to check.
    """

    def is_missing(name: str) -> bool:
        member = getattr(backend, name, None)
        return member is None or getattr(member, "__func__", member) is vars(Backend).get(name)

    return [name for name in REQUIRED_MEMBERS if is_missing(name)]


def check_is_backend(value: object) -> None:
    """Raise ArgumentError unless a value is a backend: a name, a class or an object of another class is none.

    value: what a user passed as a backend.
    """
    if not isinstance(value, Backend):
        hint = "pass what load_backend(name) or select_backend(problem) returns"
        raise ArgumentError("backend", expected="a backend", actual=shown(value), hint=hint)

"""The contract between core and a backend: `Backend`, its optional parts, and the types of its calls.

A backend declares the form of indices and keys that it takes (`Capabilities`); core prepares exactly that, and calls
`decode` and `prefill` with one `AttentionCall`. Semantics of every backend, in both phases:

1. An index that is -1, outside the cache, or in a column at or past its length is absent, at any place of a row.
2. A row without keys gives exactly 0, and lse -inf, or the call's `empty_lse`.
3. The sink is one more logit with value zero, not scaled, applied once; -inf is no sink, +inf gives zeros.
4. `lse` is fp32, natural log, without the sink.
5. Bytes of a cache that no index names never reach an output, not even NaN.
6. Addresses are computed in 64 bits.
7. A NaN in a key that a row names, be it a code, a scale byte or a plain value, makes the row's out, lse and largest
   logits NaN, in every head and dim. Writers write a NaN so that the key reads as NaN.
8. The last dimension of a tensor has stride 1; rows, and heads of q, o and out, may lie any distance apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from importlib import import_module
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, cast
from weakref import WeakValueDictionary

from attrs import frozen

from dsv4attn.core.argument_checks import shown
from dsv4attn.core.cache.selected_keys import (
    ChunkRows,
    DenseIndices,
    EntryIndices,
    GatheredKeys,
    PagedKeys,
    PageTable,
    RaggedIndices,
)
from dsv4attn.core.contract.capabilities import Capabilities, IndexForm, KeyForm, Phase, Products
from dsv4attn.core.contract.index_ops import (
    IndexStep,
    IndexSteps,
    MetadataExtension,
    RaggedSteps,
    RankSteps,
)
from dsv4attn.core.contract.info import API_VERSION, COMPUTING, LAYER_PARTS, BackendInfo, Rank
from dsv4attn.core.contract.raw_query import RawQuery
from dsv4attn.core.model.geometry import LayerGeometry
from dsv4attn.errors import ArgumentError

if TYPE_CHECKING:
    # descriptors must load where torch is not wanted yet
    import torch
    from torch import Tensor

    from dsv4attn.core.cache.layout import PagedKVCache
    from dsv4attn.core.contract.builder_ops import BuilderOps
    from dsv4attn.core.contract.device import DeviceFacts
    from dsv4attn.core.contract.layer_ops import LayerOps
    from dsv4attn.core.contract.limits import Limits
    from dsv4attn.core.contract.warmup import WarmupSpec
    from dsv4attn.core.model.geometry import ModelGeometry
    from dsv4attn.core.tensorspec import BufferSpec
    from dsv4attn.core.torch_ops.hyper_connections import MixWeights

__all__ = [
    "API_VERSION",
    "LAYER_PARTS",
    "AttentionCall",
    "AttentionOptions",
    "AttentionTensors",
    "Backend",
    "BackendDefaults",
    "BackendInfo",
    "BuilderOps",
    "Capabilities",
    "ChunkCost",
    "ChunkRows",
    "CompleteBackend",
    "DenseIndices",
    "EntryIndices",
    "FillRows",
    "GatheredKeys",
    "IndexForm",
    "IndexStep",
    "IndexSteps",
    "KeyForm",
    "LayerOps",
    "MetadataExtension",
    "MixWeights",
    "PageTable",
    "PagedKeys",
    "Phase",
    "PrepareRows",
    "Products",
    "RaggedIndices",
    "RaggedSteps",
    "Rank",
    "RankSteps",
    "RawQuery",
    "Run",
    "complete",
]


@frozen
class AttentionOptions:
    """What a call asks for beyond out and lse. `forward_mqa` sets `raw_q` alone.

    max_logits: [T, H] fp32 or None - the largest z of each row, -inf for rows without keys; only for backends with
       `Capabilities.max_logits`.
    empty_lse: lse of rows without keys; other than -inf only for backends with `Capabilities.empty_lse`.
    raw_q: q is neither normalised nor rotated, and the call does both; only where `takes_raw_q` says so.
    """

    max_logits: Tensor | None = None
    empty_lse: float = -inf
    raw_q: RawQuery | None = None


_PLAIN = AttentionOptions()


class AttentionTensors(NamedTuple):
    """What differs between the layers that run one prepared call: all else is bound when the call is prepared.

    The tensors have the signatures (`tensorspec.signature`) of those that the call was prepared with. q, out, lse and
    topk_indices may have more rows after those of the call.

    q: [>= T, H, D] bf16 or fp32.
    out: [>= T, H, D] like q.
    lse: [>= T, H] fp32 or None.
    attn_sink: [H] fp32 or None.
    topk_indices: [>= T, K] int32 - the indexer's entries; read by calls of `Backend.prepare_entries` alone.
    window: the window cache; not read where keys are gathered.
    compressed: the compressed cache; not read where keys are gathered, nor on window-only layers.
    """

    q: Tensor
    out: Tensor
    lse: Tensor | None
    attn_sink: Tensor | None
    topk_indices: Tensor | None
    window: PagedKVCache
    compressed: PagedKVCache | None

    def of_tokens(self, tokens: slice) -> AttentionTensors:
        """The rows of some tokens, without topk_indices."""
        q, out, lse, attn_sink, _, window, compressed = self
        lse = None if lse is None else lse[tokens]
        return AttentionTensors(q[tokens], out[tokens], lse, attn_sink, None, window, compressed)


# an instance a call of a wrapped backend: construction of frozen classes with slots takes twice as long
@frozen(slots=False)
class AttentionCall:
    """One attention over selected keys, all segments in one softmax.

    layer: geometry of the layer.
    q: [T, H, D] bf16 or fp32 - normalised and rotated, unless `options.raw_q` is given.
    keys: paged segments (window, then compressed if the layer has it), or gathered rows.
    attn_sink: [H] fp32 or None - one more logit per head, with value zero.
    out: [T, H, D] like q - written in full.
    lse: [T, H] fp32 or None - natural log, without the sink.
    scratch: the views of `Backend.scratch`.
    options: see `AttentionOptions`.
    """

    layer: LayerGeometry
    q: Tensor
    keys: Sequence[PagedKeys] | GatheredKeys
    attn_sink: Tensor | None
    out: Tensor
    lse: Tensor | None
    scratch: Sequence[Tensor] = ()
    options: AttentionOptions = _PLAIN

    @property
    def tensors(self) -> AttentionTensors:
        """The tensors of the call itself: `backend.prepare(phase, call)(call.tensors)` computes the call."""
        window = compressed = None
        if not isinstance(self.keys, GatheredKeys):
            window, compressed = [*[segment.cache for segment in self.keys], None, None][:2]
        # a call on gathered keys reads no cache
        return AttentionTensors(self.q, self.out, self.lse, self.attn_sink, None, window, compressed)  # type: ignore[arg-type]

    def with_tensors(self, tensors: AttentionTensors) -> AttentionCall:
        """The same call on other tensors; rows after those of the call are cut off."""
        num_tokens, keys = self.q.shape[0], self.keys
        q, out, lse, attn_sink, _, window, compressed = tensors
        if num_tokens < q.shape[0]:
            q, out, lse = q[:num_tokens], out[:num_tokens], None if lse is None else lse[:num_tokens]
        if not isinstance(keys, GatheredKeys):
            caches = (window,) if compressed is None else (window, compressed)
            keys = [PagedKeys(cache, segment.rows) for cache, segment in zip(caches, keys, strict=False)]
        return AttentionCall(self.layer, q, keys, attn_sink, out, lse, self.scratch, self.options)

    @property
    def max_logits(self) -> Tensor | None:
        """See `AttentionOptions`."""
        return self.options.max_logits

    @property
    def empty_lse(self) -> float:
        """See `AttentionOptions`."""
        return self.options.empty_lse

    @property
    def raw_q(self) -> RawQuery | None:
        """See `AttentionOptions`."""
        return self.options.raw_q


ChunkCost: TypeAlias = "tuple[Sequence[tuple[int, int]], int]"
"""Requests and gathered rows of a prefill chunk, as `BackendDefaults.prefers_pages` gets them."""

Run: TypeAlias = "Callable[[AttentionTensors], None]"
"""A prepared call of a backend: `run(tensors)` computes it for the tensors of one layer."""

FillRows: TypeAlias = "Callable[[Tensor | None, PagedKVCache, PagedKVCache | None], None]"
"""A prepared filling of a chunk's rows and lists: `fill(topk_indices, window, compressed)`, with entries and caches of
the signatures of those that it was prepared with."""

PrepareRows: TypeAlias = "Callable[[ChunkRows, Tensor | None, PagedKVCache, PagedKVCache | None], FillRows]"
"""`BackendDefaults.prepare_rows`: `prepare_rows(chunk, topk_indices, window, compressed)`."""


class Backend(Protocol):
    """The kernels of a device. Core checks all arguments before it calls a method."""

    name: str
    capabilities: Capabilities
    steps: IndexSteps

    def scratch(self, phase: Phase, layer: LayerGeometry, tokens: int, width: int) -> Sequence[BufferSpec]:
        """Workspace views for attention of `tokens` rows of at most `width` keys; a pure function of its arguments."""

    def scratch_bound(self, phase: Phase, layer: LayerGeometry, max_tokens: int, max_width: int) -> int:
        """Upper bound in bytes of `scratch` over all smaller calls; need not be tight, must be true."""

    def transient_bytes(self, layer: LayerGeometry, max_tokens: int, max_width: int, max_rows: int) -> int:
        """Upper bound on temporaries of the framework's allocator in any one method; 0 for kernels.

        max_rows: most cache records that one gather or insert touches. `inv_rope_o_proj` is not part of it: its
        memory follows from weights that core never sees.
        """

    def quantize_and_insert_k_cache(self, k: Tensor, cache: PagedKVCache, slot_mapping: Tensor) -> None:
        """Write k [T, D], bf16 or fp32, to the slots; k is already rotated.

        Slots that are negative or do not exist are skipped.
        """

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

        eps: of the norm; None: q is rotated only, as in DeepSeek-V4.1.
        Rows at or past len(slot_mapping) have their q processed and nothing inserted. For q without heads see
        `takes_raw_q`.
        """

    def dequantize_and_gather_k_cache(
        self,
        out: Tensor,
        cache: PagedKVCache,
        seq_lens: Tensor,
        gather_lens: Tensor | None,
        block_table: Tensor,
        offset: int,
    ) -> None:
        """out[i, offset + j] = record seq_lens[i] - gather_lens[i] + j of request i; all records if lens is None.

        out: [n, M, D] in the layout's row dtype; rows that receive no record are not written. offset: at least 0. A
        record is absent, and its row not written, if its position is negative, or its column of the block table, or its
        row of out, does not exist: lengths may be any int32.
        """

    def decode(self, call: AttentionCall) -> None:
        """Attend over pages, few rows of any length."""

    def prefill(self, call: AttentionCall) -> None:
        """Attend over keys in the form of `Capabilities.prefill_keys`, many rows."""

    def inv_rope_o_proj(
        self, o: Tensor, positions: Tensor, cos_sin_cache: Tensor, wo_a: Tensor, num_groups: int
    ) -> Tensor:
        """Undo the rotation of o [T, H, D] at the query's position, then project each group of heads.

        wo_a: [G * rank, H / G * D], bf16 or fp32. Core converts block-scaled fp8 before it calls, unless the backend
        says that it `projects_fp8`. Returns [T, G, rank] in the dtype of o.
        """


class BackendDefaults(Protocol):
    """The optional parts of a backend, and their defaults. Derive from it, or define some of the parts.

    builder_ops, rank_steps: index arithmetic of `MetadataBuilder`, and the merge over ranks; None: torch's.
    deterministic: whether no row's bits depend on the other rows of a call.
    projects_fp8: whether `inv_rope_o_proj` takes a `BlockScaledWeight` as it is, and rounds outputs to fp8 then.
    """

    builder_ops: BuilderOps | None = None
    rank_steps: RankSteps | None = None
    deterministic: bool = False
    projects_fp8: bool = False

    def __init_subclass__(cls, **options: object) -> None:
        """Methods of a backend run with autocast off and record no gradients, from wherever they are called."""
        super().__init_subclass__(**options)
        if not COMPUTING.isdisjoint(vars(cls)):
            from dsv4attn.core.torch_modes import guard_methods

            guard_methods(cls, COMPUTING)

    @cached_property
    def layer_ops(self) -> LayerOps:
        """The ops around attention. A backend that brings some has `evolve(LayerOps(), ...)` as this attribute."""
        from dsv4attn.core.contract.layer_ops import default_layer_ops

        return default_layer_ops(deterministic=self.deterministic)

    @property
    def translate_to_ragged(self) -> Callable[..., object] | None:
        """The step of `RaggedSteps` that `IndexSteps` lacks, or None."""
        return getattr(cast("Backend", self).steps, "compute_global_topk_ragged_indices_and_indptr", None)

    def prepare(self, phase: Phase, call: AttentionCall) -> Run:
        """Check and plan a call once, for all layers of a kind in a step; nothing is launched or written.

        Index rows, scratch and options of the call are bound; the rest is given in every run, see `AttentionTensors`.
        This default calls `decode` or `prefill`.
        """
        attend: Callable[[AttentionCall], None] = getattr(self, phase.value)
        return lambda tensors: attend(call.with_tensors(tensors))

    def prepare_entries(self, call: AttentionCall, entries: EntryIndices) -> Run | None:
        """`prepare` of a decode that finds the slots of its second segment itself.

        Each run reads the entries from `AttentionTensors.topk_indices`, and their slots from the block table.
        call: as `prepare` gets it. Nothing is written to the index rows of the second segment.
        entries: of the first layer.
        None: core translates entries to these rows in every run, and calls `prepare`. Core asks backends whose decode
        indices are dense.
        """
        return None

    @cached_property
    def prepare_rows(self) -> PrepareRows | None:
        """`prepare_rows(chunk, topk_indices, window, compressed)`: a step that fills all rows and lists of a chunk.

        It checks and plans for all layers of a kind in a step, and returns what fills; nothing is launched or written.
        topk_indices: [t, K] int32 - entry numbers of the chunk's tokens; None on window-only layers.
        window, compressed: the caches; compressed is None on window-only layers.
        None: core calls `dequantize_and_gather_k_cache` and the index steps one by one (`gathered.fill_by_steps`, the
        definition).
        """
        return None

    def prefers_pages(self, layer: LayerGeometry, requests: Sequence[tuple[int, int]], rows: int) -> bool:
        """Whether a prefill chunk that core would gather is attended faster on pages. False: it is gathered.

        Core asks backends whose form of prefill keys is GATHERED. One that answers True takes both forms in `prepare`,
        and needs no more memory for pages.
        requests: per request (tokens before this chunk, tokens in it); the host may know upper bounds only.
        rows: rows to be gathered.
        """
        return False

    def takes_raw_q(self, layer: LayerGeometry, q: Tensor, row_dtype: torch.dtype, chunks: Sequence[ChunkCost]) -> bool:
        """Whether prefill on gathered rows takes q as it was projected, see `AttentionOptions.raw_q`.

        Core asks backends whose form of prefill keys is GATHERED. One that ever answers True has a
        `qnorm_rope_kv_insert` that takes q without heads, and then writes kv alone.
        q: [T, H, D], of all tokens of a step; also asked of out. Only dtype, shape, strides and alignment count.
        row_dtype: of the rows.
        chunks: every chunk of the step. Return True only if raw q is faster overall; all chunks are then gathered.
        Without chunks: whether calls with raw q run at all.
        """
        return False

    def metadata_extension(
        self, geometry: ModelGeometry, limits: Limits, device: torch.device
    ) -> MetadataExtension[Any, Any] | None:
        """Allocate the buffers of the backend's own metadata within the limits, or None if it has none."""
        return None

    def kernel_variants(self, bounds: WarmupSpec, device: DeviceFacts) -> Iterable[object]:
        """Every kernel variant of calls within the bounds on a device, which need not be present.

        Variants are hashable, and equal if they are compiled once.
        """
        return ()

    def warmup(self, bounds: WarmupSpec, device: torch.device) -> int:
        """Compile `kernel_variants` on a device of this machine, and return how many; later calls compile nothing."""
        return 0


class CompleteBackend(BackendDefaults, Backend, Protocol):
    """A backend with all of `BackendDefaults`, its own or the defaults."""


def complete(backend: Backend) -> CompleteBackend:
    """The backend if it derives from `BackendDefaults`, else a wrapper with its parts, and defaults of the others.

    A backend has one wrapper as long as anything uses the wrapper: prepared calls are shared by layers whose backend is
    the same object.
    """
    if BackendDefaults in type(backend).__mro__:
        return cast("CompleteBackend", backend)
    if isinstance(cast("object", backend), (str, type(None))):  # a name, where a backend that was built belongs
        hint = "pass what load_backend(name) or select_backend(problem) returns"
        raise ArgumentError("backend", expected="a backend", actual=shown(backend), hint=hint)
    wrapper = _wrappers.get(id(backend)) or _wrappers.setdefault(id(backend), _Completed(backend))
    return cast("CompleteBackend", wrapper)


_OPTIONAL = [name for name in vars(BackendDefaults) if not name.startswith("_") and name != "translate_to_ragged"]


class _Completed(BackendDefaults):
    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        for name in _OPTIONAL:
            if hasattr(backend, name):
                setattr(self, name, getattr(backend, name))

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - any attribute of the backend
        if name == "_backend" or (name.startswith("__") and name.endswith("__")):
            # protocols of Python such as copying are this object's own, also before it has its backend
            raise AttributeError(name)
        return getattr(self._backend, name)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy is the wrapper of the backend, or of the backend's copy."""
        return complete, (self._backend,)


_wrappers: WeakValueDictionary[int, _Completed] = WeakValueDictionary()
"""By the address of the backend, which the wrapper keeps alive."""


def __getattr__(name: str) -> Any:  # noqa: ANN401 - of a module
    """Names that need torch are loaded when they are asked for, because descriptors load without torch."""
    if name in _NEED_TORCH:
        return getattr(import_module(f"dsv4attn.core.{_NEED_TORCH[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


_NEED_TORCH = {
    "LayerOps": "contract.layer_ops",
    "BuilderOps": "contract.builder_ops",
    "MixWeights": "torch_ops.hyper_connections",
}
"""Names that are loaded late, with the modules of core that have them."""

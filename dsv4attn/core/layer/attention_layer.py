"""`DeepseekV4Attention`: one attention layer from hidden states to hidden states, over paged caches, on any backend.

Code that torch compiles sees a call of a layer as one custom op, `torch.ops.dsv4attn.attention_layer`. Its schema names
the caches and the buffers that the layer shares with others; weights belong to the layer.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor

from dsv4attn.core.argument_checks import check_type
from dsv4attn.core.attention.checks import check_backend, check_metadata, check_same_device
from dsv4attn.core.attention.custom_ops import Handles, define_op
from dsv4attn.core.attention.mla_attention import DeepseekV4MLAAttention
from dsv4attn.core.attention.projection import output_projection
from dsv4attn.core.cache.layer_caches import DeepseekV4Caches, LayerCaches, all_caches_of, check_op_tensors, op_tensor
from dsv4attn.core.cache.layout import PagedKVCache
from dsv4attn.core.context_parallel.context import ContextParallel
from dsv4attn.core.context_parallel.heads import check_heads
from dsv4attn.core.context_parallel.selection import select_topk_over_ranks
from dsv4attn.core.contract.backend import Backend
from dsv4attn.core.contract.limits import Limits
from dsv4attn.core.layer.compressor import Compressor, LatentCompressor
from dsv4attn.core.layer.entries import NO_ENTRIES, StepEntries
from dsv4attn.core.layer.indexer import Candidates, Indexer
from dsv4attn.core.layer.projections import CodedLinear, Projections
from dsv4attn.core.layer.shared_sources import BoundSources, own_buffer
from dsv4attn.core.memory.workspace import WorkspaceManager
from dsv4attn.core.metadata.forward_context import ForwardContext, get_forward_context
from dsv4attn.core.metadata.metadata import AttentionMetadata, WindowMetadata
from dsv4attn.core.model.geometry import LayerKind, LayerRole, ModelGeometry, Rope
from dsv4attn.core.model.quantized_weight import CodedMatrix, check_weight, nan_scales
from dsv4attn.core.model.rope import cos_sin_cache
from dsv4attn.core.model.weight_copies import WeightCopies, check_not_captured
from dsv4attn.core.model.weights import AttentionWeights
from dsv4attn.core.reprs import layer_text, one_line
from dsv4attn.core.tensorspec import check_strides, check_tensor
from dsv4attn.core.torch_modes import without_modes
from dsv4attn.errors import ArgumentError, Dsv4AttnError, NoForwardContextError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["DeepseekV4Attention"]

_log = logging.getLogger("dsv4attn")
_handles: Handles[DeepseekV4Attention] = Handles()

_OF_HIDDEN_STATES = (
    "wq_a",
    "wkv",
    "compressor.wkv",
    "compressor.wgate",
    "indexer.compressor.wkv",
    "indexer.compressor.wgate",
    "indexer.weights_proj",
)
"""Weights that multiply hidden states."""
_OF_LATENT = "wq_b", "indexer.wq_b"
"""Weights that multiply the latent of q. Queries of the indexer come last: a step may do without them."""
_IN_FP32 = frozenset(name for name in _OF_HIDDEN_STATES if "compressor." in name)
"""Weights whose products are fp32 in every model: states of compressors."""


class DeepseekV4Attention:
    """Attention of one layer: projections, compressor, indexer, attention, output projection.

    prefix: name of the layer; see `DeepseekV4MLAAttention`. geometry: of the model, on one rank
    (`ModelGeometry.tensor_parallel`). index: number of the layer. limits: of every batch. weights: of the layer, on
    this rank. cos_sin_cache: [positions, rope] fp32 of the layer; made here if None. topk_indices_buffer: [max tokens,
    K] int32, which c4a layers may share; made here if None. workspace: default: the context's. process_group: ranks to
    sum the output over, or None. sources: layers made before this one; where layers share compressed caches and
    selected entries (V4.1), those that this one reads from are among them. candidates_buffer: [max tokens, candidate
    blocks] int32 of a layer that publishes candidates; made here if None. context_parallel: ranks that share the
    compressed entries of every sequence, or None; metadata and caches are of a `CacheManager` with the same. If they
    divide heads, geometry and weights are of one rank, and process_group is usually the group of the context. With a
    deterministic backend a token's bits depend on the tokens before it and on nothing else; with context_parallel, and
    where one backend serves decode and another serves prefill, that takes `Limits.single_phase`. Raises ArgumentError
    unless all of them fit each other.

    A layer says by `role` what it has of its own, and by `sources` whose caches and entries it reads. Layers run in
    order: a layer reads what its sources left in the same step.

    A layer keeps its weights. Tensors that multiply the same input become views of one memory (`WeightCopies.joined`).
    A layer reads weights as they are, or copies of them. It makes copies again when it sees in a step, eager or
    compiled, that a weight has changed: `TensorState` says what is seen. After other changes, and before graphs are
    replayed, call `refresh`.
    backend: runs attention, inserts, projection, and the ops that it brings.
    """

    @torch.inference_mode(mode=False)  # buffers are written in and out of the mode
    @torch.no_grad()
    def __init__(  # noqa: PLR0915 - one statement for each part of a layer
        self,
        prefix: str,
        geometry: ModelGeometry,
        index: int,
        limits: Limits,
        backend: Backend,
        weights: AttentionWeights,
        *,
        cos_sin_cache: Tensor | None = None,
        topk_indices_buffer: Tensor | None = None,
        workspace: WorkspaceManager | None = None,
        process_group: ProcessGroup | None = None,
        sources: Iterable[DeepseekV4Attention] = (),
        candidates_buffer: Tensor | None = None,
        context_parallel: ContextParallel | None = None,
    ) -> None:
        check_type("geometry", geometry, ModelGeometry, cure="pass the geometry of the whole model")
        layer, self.prefix, self.index = geometry.layer(index), prefix, index
        check_backend(backend, layer)
        check_type("limits", limits, Limits, cure="pass the Limits that the workspace is planned for")
        check_type("weights", weights, AttentionWeights, cure="pass AttentionWeights.from_dict(weights, geometry, i)")
        self.sources = geometry.sources(index)
        if context_parallel is not None and geometry.shared_latent:
            hint = "entries of V4.1 are not spread over ranks yet"
            raise ArgumentError("context_parallel", expected=f"None with {geometry.name}", actual="ranks", hint=hint)
        _check_limits(geometry, limits)
        weights.check(geometry, index)
        self._weights, self._forms = weights, _forms(weights)
        _check_one_device(self._forms)
        _name_nan_scales(prefix, weights)
        _check_output_weights(weights, backend)
        _check_phases(backend, limits, context_parallel)
        self.geometry, self.layer, self.limits, self.backend = geometry, layer, limits, backend
        self._copies, self._group = WeightCopies(), process_group
        self._context = context_parallel if layer.has_entries else None
        self._arithmetic = backend.layer_ops.arithmetic(deterministic=backend.deterministic)
        product, coded = self._arithmetic.linear, backend.layer_ops.coded
        self._linear = product if coded is None else CodedLinear(product, coded)
        most_rows = None if coded is None else coded.rows
        self._of_hidden_states = Projections("hidden_states", self._copies, self._linear, _IN_FP32, most_rows)
        self._of_latent = Projections("latent", self._copies, self._linear, most_rows=most_rows)
        sink = self._load_own(weights)
        self.device = device = _matrix(self._wo_b).device
        self._sources = bound = BoundSources.find(self.sources, sources, geometry, limits, device)
        table = _table(layer.rope, limits, device) if cos_sin_cache is None else cos_sin_cache
        self.topk_indices = topk_indices_buffer
        if layer.kind is LayerKind.CSA:
            shape, chosen = (limits.max_num_batched_tokens, layer.topk), None
            if bound.index is not None:
                chosen = bound.index.topk_indices
            self.topk_indices = own_buffer("topk_indices_buffer", topk_indices_buffer, chosen, shape, device)
        self.candidates = self._candidates(candidates_buffer)
        self.attention = DeepseekV4MLAAttention(
            prefix,
            layer,
            limits,
            backend,
            attn_sink=sink,
            cos_sin_cache=table,
            topk_indices_buffer=self.topk_indices,
            workspace=workspace,
            context_parallel=context_parallel,
            raw_q=True,
        )
        ops = backend.layer_ops
        self.compressor: Compressor | LatentCompressor | None = None
        self.indexer: Indexer | None = None
        if weights.compressor is not None:
            compressor_class = LatentCompressor if geometry.shared_latent else Compressor
            self.compressor = compressor_class(layer, weights.compressor, table, ops, self._copies)
        if weights.indexer is not None:
            select = None
            if context_parallel is not None:
                select = partial(select_topk_over_ranks, context_parallel, ops, self._arithmetic)
            self.indexer = Indexer(
                geometry,
                layer,
                limits,
                weights.indexer,
                table,
                ops,
                product,
                self._copies,
                shortcut=not backend.deterministic,
                select_topk=select,
                latents=self.compressor if isinstance(self.compressor, LatentCompressor) else None,
                publishes=self.candidates if bound.candidates is None else None,
                restricts=self.candidates if bound.candidates is not None else None,
            )
        self.caches: DeepseekV4Caches | None = None
        self._source_caches: DeepseekV4Caches | None = None
        self.selected_in: tuple[ReferenceType[WindowMetadata], ReferenceType[ForwardContext]] | None = None
        """Metadata and context of the step in which the indexer selected last, on layers that others read from."""
        self._weight_dtype = self._forms["wq_a"][0]
        self._op_tensors: tuple[Tensor | None, ...] = (None,) * 5
        self._register()

    @one_line
    def __repr__(self) -> Iterator[str]:
        """Prefix, model, kind, heads, backend, device and whether caches are bound."""
        yield self.prefix
        yield f"layer {self.index} of {self.geometry.name}"
        yield layer_text(self.layer)
        yield f"{self.layer.num_heads} heads"
        yield f"backend {self.backend.name}"
        yield f"on {self.device}"
        yield "no caches" if self.caches is None else "caches bound"

    def _register(self) -> None:
        """Take a handle of its own."""
        self._handle = _handles.give(self, self.prefix)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy is a layer of its own, for ops too."""
        self.__dict__.update(state)
        if self.caches is not None:
            self._op_tensors = _op_tensors(self.caches)
        self._register()

    def _load_own(self, weights: AttentionWeights) -> Tensor | None:
        """Take all weights but those that the compressor and the indexer read themselves. Returns the sinks."""
        copies, named = self._copies, dict(weights.named())
        self._of_hidden_states.load({name: named.get(name) for name in _OF_HIDDEN_STATES})
        self._of_latent.load({name: named.get(name) for name in _OF_LATENT})
        coded = self.backend.layer_ops.coded
        self._wo_b = copies.coded("wo_b", weights.wo_b, None if coded is None else coded.rows)
        keeps_codes = self.backend.projects_fp8
        self._wo_a = (copies.scaled if keeps_codes else copies.dense)("wo_a", weights.wo_a)
        plain = partial(copies.plain, is_checked=True)
        self._q_norm, self._kv_norm = (plain(name, getattr(weights, name)) for name in ("q_norm", "kv_norm"))
        return None if weights.attn_sink is None else copies.plain("attn_sink", weights.attn_sink, torch.float32)

    @torch.inference_mode(mode=False)  # copies are written in and out of the mode
    @torch.no_grad()
    def refresh(self, weights: AttentionWeights | None = None) -> None:
        """Make every copy of a weight again, in the same memory, so that captured graphs read the new values.

        Call it after changes that a step does not see, such as `parameter.data.copy_` or the step of a fused optimizer,
        and after any change that only graphs are replayed after. weights: others to take from now on, with the shapes,
        dtypes and device of those before; those that are read as they are may lie elsewhere then, so that graphs must
        be captured again. So must graphs of few tokens that read fp8 codes (`LayerOps.coded`), if codes or scales lie
        elsewhere now or the backend no longer takes them.
        Raises ArgumentError, and changes nothing, for weights that do not fit, and while a graph is captured. After any
        other error, such as that of full memory, the next step makes all copies again, of the weights before.
        """
        weights = self._weights if weights is None else weights
        prefix = self.prefix
        check_not_captured(self.device, prefix)
        weights.check(self.geometry, self.index)
        forms = _forms(weights)
        for name, form in self._forms.items():
            if forms.get(name) != form:
                hint = "make the layer again"
                raise ArgumentError(f"weights.{name}", expected=_shown(form), actual=_shown(forms.get(name)), hint=hint)
        for name, value in weights.named():
            if not isinstance(value, Tensor) or value.element_size() == 1:
                check_weight(name, value)
        if weights is not self._weights:
            _name_nan_scales(prefix, weights)
        _check_output_weights(weights, self.backend)
        with self._copies.taking():
            self.attention.attn_sink = self._load_own(weights)
            if self.compressor is not None:
                assert weights.compressor is not None
                self.compressor.load(weights.compressor)
            if self.indexer is not None:
                assert weights.indexer is not None
                self.indexer.load(weights.indexer)
        self._weights = weights

    def _see_weights(self) -> None:
        """Take all weights again if a change of one is seen, or if they were not all taken the last time."""
        if self._copies.changed():
            self.refresh()

    @property
    def role(self) -> LayerRole:
        """What the layer has of its own: on V4.1's layers a compressed cache, an indexer, or neither."""
        return self.sources.role

    def _candidates(self, buffer: Tensor | None) -> Candidates | None:
        """Candidates that the layer publishes, or those that its indexer is restricted to."""
        sharing, source = self.geometry.sharing, self._sources.candidates
        publishes = sharing is not None and sharing.candidate_source_layer_id == self.index
        if sharing is None or not (publishes or source is not None):
            if buffer is not None:
                expected = f"None on layer {self.index}, which has no candidates"
                raise ArgumentError("candidates_buffer", expected=expected, actual="a tensor")
            return None
        shape = self.limits.max_num_batched_tokens, sharing.candidate_topk_blocks
        theirs = None if source is None or source.candidates is None else source.candidates.blocks
        blocks = own_buffer("candidates_buffer", buffer, theirs, shape, self.device)
        return Candidates(blocks, sharing.candidate_block_size)

    def bind_kv_cache(self, caches: DeepseekV4Caches) -> None:
        """Bind the caches of this layer. Raises ArgumentError or LayoutMismatchError unless they fit it.

        A layer that reads the compressed cache of another takes that layer's, which is bound before. If that layer is
        bound to other caches later, this one takes them in its next step. With
        `context_parallel` all ranks must bind at the same time, and if one rank refuses, all do.
        caches: window, compressed, index and state caches of this layer.
        """
        check_type("caches", caches, DeepseekV4Caches, cure="pass manager.caches[i], or DeepseekV4Caches(...)")
        context = self._context
        if context is not None:
            part = None if self._group is None else (self._group.rank(), self._group.size())
            same = {} if context.divides_heads else {"heads": part}
            context.check_caches(f"caches of {self.attention.prefix}", caches, **same)
            if context.divides_heads:
                check_heads(context, self.attention.prefix, part)
        with self.attention.exchange.together(f"caches of {self.attention.prefix}"):
            caches = self._sources.caches(caches, self.index, index=self.indexer is not None)
            self._check_caches(caches)
        self.attention.bind_kv_cache(caches.attention.swa, caches.attention.compressed)
        self.caches, self._op_tensors = caches, _op_tensors(caches)
        self._source_caches = None if self._sources.kv is None else self._sources.kv.caches

    def _bind_again(self, caches: DeepseekV4Caches) -> DeepseekV4Caches:
        """Take the caches that the layer's source got since those of this layer were bound."""
        window = LayerCaches(caches.attention.swa)
        self.bind_kv_cache(DeepseekV4Caches(window, caches.state, index_state=caches.index_state))
        assert self.caches is not None
        return self.caches

    def _take_rows(self, metadata: AttentionMetadata | None, topk_indices: Tensor | None, rows: Tensor) -> None:
        """Let attention read some rows of what the layer's source selected."""
        assert metadata is not None
        assert metadata.source_rows is not None
        assert topk_indices is not None
        selected = topk_indices[rows[: metadata.swa.num_actual_tokens]]
        metadata.source_rows.selected[self.attention] = selected

    def __getstate__(self) -> dict[str, Any]:
        """A copy has selected nothing yet."""
        return {**self.__dict__, "selected_in": None}

    def _check_caches(self, caches: DeepseekV4Caches) -> None:
        """Raise ArgumentError unless there are the caches that this layer has, with its layouts."""
        geometry, kind = self.geometry, self.layer.kind
        stateful = self.compressor if self.layer.has_states else None
        compressors = {"state": stateful, "index_state": self.indexer.compressor if self.indexer else None}
        widths = {name: compressor.width if compressor else None for name, compressor in compressors.items()}
        for name, width in widths.items():
            cache = getattr(caches, name)
            if (cache is None) is not (width is None):
                expected = f"a cache of states on a {kind.value} layer" if width else f"none on a {kind.value} layer"
                raise ArgumentError(f"caches.{name}", expected=expected, actual=cache)
            if cache is not None and (cache.layout.name, cache.layout.head_dim) != (
                "compressor_state",
                2 * (width or 0),
            ):
                expected = f"layout KVCacheLayout.compressor_state({width})"
                raise ArgumentError(f"caches.{name}", expected=expected, actual=cache.layout.fingerprint)
        if (caches.index is None) is not (self.indexer is None):
            expected = "index keys" if self.indexer else f"none on a {kind.value} layer"
            raise ArgumentError("caches.index", expected=expected, actual=caches.index)
        if caches.index is not None:
            layout = caches.index.layout
            if layout.head_dim != geometry.index_head_dim or layout.name not in ("index_fp8", "index_mxfp4", "rows"):
                expected = f"a layout of index keys of {geometry.index_head_dim} dims"
                raise ArgumentError("caches.index", expected=expected, actual=layout.fingerprint)
            compressed = caches.attention.compressed
            if compressed is not None and compressed.block_size != caches.index.block_size:
                expected = f"{compressed.block_size} records in a page, as the compressed cache has"
                raise ArgumentError("caches.index", expected=expected, actual=caches.index.block_size)

    @without_modes
    def __call__(self, hidden_states: Tensor, positions: Tensor) -> Tensor:
        """Hidden states [T', hidden] to hidden states, for the step that is being run.

        hidden_states: in the dtype of the weights; with fp32 weights bf16 too. q, keys and the result have its dtype,
        and products with fp32 weights are fp32. positions: [T'] int64; padding rows may have any. Rows past the
        tokens of the step are padding. In a warm-up memory is reserved, and attention gives zeros. Autocast is off,
        and no gradients are recorded.
        """
        blocks = None if self.candidates is None else self.candidates.blocks
        if not torch.compiler.is_compiling():
            return self._run(hidden_states, positions, self.caches, self.topk_indices, blocks)
        swa, compressed, state, index, index_state = self._op_tensors
        out: Tensor = _op(
            hidden_states,
            positions,
            swa,
            compressed,
            state,
            index,
            index_state,
            self.topk_indices,
            blocks,
            self._handle,
        )
        return out

    def _run(
        self,
        hidden_states: Tensor,
        positions: Tensor,
        caches: DeepseekV4Caches | None,
        topk_indices: Tensor | None,
        candidates: Tensor | None,
    ) -> Tensor:
        """The call, with the caches and buffers of the layer, or copies of them in a compiled graph."""
        self._see_weights()
        attention, size = self.attention, self.geometry.hidden_size
        letters: dict[str, int] = {}
        weight_dtype = self._weight_dtype
        dtypes, like = (
            ((weight_dtype, torch.bfloat16), "") if weight_dtype == torch.float32 else ((weight_dtype,), "the weights")
        )
        check_tensor("hidden_states", hidden_states, f"T {size}", dtypes, letters, like=like)
        check_tensor("positions", positions, "T", torch.int64, letters)
        check_same_device(hidden_states, "hidden_states", positions=positions, weights=_matrix(self._wo_b))
        bound = self.caches
        if caches is None or bound is None:
            raise Dsv4AttnError(f"layer {attention.prefix} has no caches -> call bind_kv_cache first")
        source = self._sources.kv
        if source is not None and source.caches is not self._source_caches:
            if caches is not bound:
                hint = "call the layer once without the compiler, which binds them, then compile it again"
                raise Dsv4AttnError(
                    f"layer {attention.prefix}: its source has other caches than when it was compiled -> {hint}"
                )
            caches = bound = self._bind_again(bound)
        context, rows = get_forward_context(), None
        kind, ratio = self.layer.key
        metadata, entries = context.for_layer(attention.prefix, attention.swa_prefix, kind, ratio), NO_ENTRIES
        if metadata is not None:
            self._check_step(metadata, bound, hidden_states.shape[0])
            rows = self._sources.rows(metadata, context, self.prefix)
            entries = self._checked_entries(context, metadata)
        products, q, kv = self._project(hidden_states, metadata, entries.inject)
        # what attention is bound to, unless a compiled graph has copies of it
        keys = attention.caches if caches is bound else caches.attention
        chosen = attention.topk_indices_buffer if topk_indices is self.topk_indices else topk_indices
        attention.insert_into(keys, q, kv, positions)
        latents = None
        if metadata is not None and self.compressor is not None:
            latents = self._compress(products, positions, metadata, caches)
        if metadata is not None and self.indexer is not None:
            self._select(products, latents, positions, metadata, caches, topk_indices, rows, candidates, entries)
            if self.geometry.sharing is not None:
                self.selected_in = ref(metadata.swa), ref(context)
        elif rows is not None:
            self._take_rows(metadata, topk_indices, rows)
        out = torch.empty_like(q)
        attention.attend_from(keys, chosen, q, kv, positions, out)
        return output_projection(
            self.backend,
            out,
            positions,
            attention.cos_sin_cache,
            self._wo_a,
            self._wo_b,
            self.geometry.o_groups,
            layer=self.layer,
            process_group=self._group,
            linear=self._linear,
        )

    def _checked_entries(self, context: ForwardContext, metadata: AttentionMetadata) -> StepEntries:
        """Entries that the layer records or takes in a step. Raises ArgumentError unless they fit."""
        if self.indexer is None or not (context.record_entries or context.inject_entries):
            return NO_ENTRIES
        assert self.topk_indices is not None
        return StepEntries.checked(
            context,
            self.prefix,
            metadata,
            self.topk_indices,
            over_ranks=self._context is not None,
            captured=self.indexer.is_captured(),
        )

    def _project(
        self, hidden_states: Tensor, metadata: AttentionMetadata | None, entries: Tensor | None
    ) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        """(products by the name of the weight, q [T', H, D], kv [T', D]): all that follows from hidden states alone.

        Queries of the indexer are among the products where the step needs them. entries: that the step takes, or None.
        """
        products, dtype, indexer = self._of_hidden_states(hidden_states), hidden_states.dtype, self.indexer
        latent, keys, eps = products["wq_a"], products["wkv"], self.geometry.eps
        qr, kv = self.backend.layer_ops.norm_q_kv(latent, keys, self._q_norm, self._kv_norm, eps, dtype)
        needs_queries = metadata is not None and indexer is not None and indexer.needs_queries(metadata, entries)
        products |= self._of_latent(qr, None if needs_queries else _OF_LATENT[:1])
        return products, products["wq_b"].to(dtype).unflatten(-1, (self.layer.num_heads, self.layer.head_dim)), kv

    def _compress(
        self, products: Mapping[str, Tensor], positions: Tensor, metadata: AttentionMetadata, caches: DeepseekV4Caches
    ) -> Tensor | None:
        """Store the entries of a step. Returns the latents that index keys are made of, in V4.1."""
        compressor, compressed = self.compressor, caches.attention.compressed
        assert compressed is not None
        kv = products["compressor.wkv"]
        if isinstance(compressor, LatentCompressor):
            return compressor(kv, products.get("compressor.wgate"), positions, metadata, caches.state, compressed)
        assert compressor is not None
        assert caches.state is not None
        compressor(kv, products["compressor.wgate"], positions, metadata, caches.state, compressed)
        return None

    def _select(
        self,
        products: Mapping[str, Tensor],
        latents: Tensor | None,
        positions: Tensor,
        metadata: AttentionMetadata,
        caches: DeepseekV4Caches,
        topk_indices: Tensor | None,
        rows: Tensor | None,
        candidates: Tensor | None,
        entries: StepEntries,
    ) -> None:
        """Store the index keys of a step, and select, or take entries."""
        indexer, kv_and_score = self.indexer, None
        assert indexer is not None
        assert caches.index is not None
        assert topk_indices is not None
        if self.selected_in is not None:
            self.selected_in = None  # also if this raises
        if indexer.compressor is not None:
            kv_and_score = products["indexer.compressor.wkv"], products["indexer.compressor.wgate"]
        indexer(
            products.get("indexer.wq_b"),
            products["indexer.weights_proj"],
            kv_and_score,
            positions,
            metadata,
            caches.index_state,
            caches.index,
            topk_indices,
            latents=latents,
            candidate_rows=rows,
            candidates=candidates,
            entries=entries.inject,
        )
        entries.keep(topk_indices, metadata)

    def _check_step(self, metadata: AttentionMetadata, caches: DeepseekV4Caches, rows: int) -> None:
        """Check caches and metadata before anything is written: rows for all tokens, and states where there are any."""
        caches.check_memory()
        tokens, layer = metadata.swa.num_actual_tokens, self.layer
        if tokens > rows:
            raise ArgumentError(
                "hidden_states", expected=f"a row for each of the {tokens} tokens", actual=f"{rows} rows"
            )
        if layer.has_entries:
            metadata.check_owner(self.attention.exchange.ownership)
        if self.geometry.shared_latent:
            check_metadata(metadata, caches.attention, layer, self.limits, rows)
        if self.compressor is None or not layer.has_states:
            return
        if metadata.state is None:
            cure = f"give Batch.{layer.kind.value}_state_block_table"
            prefix = self.prefix
            raise NoForwardContextError(f"attn_metadata of {prefix} has no compressor states -> {cure}")
        for name in ("state", "index_state"):
            cache: PagedKVCache | None = getattr(caches, name)
            if cache is not None and cache.block_size != metadata.state.block_size:
                expected = f"{cache.block_size}, the records per block of caches.{name}"
                hint = "give MetadataBuilder these state_block_sizes"
                size = metadata.state.block_size
                raise ArgumentError("metadata.state.block_size", expected=expected, actual=size, hint=hint)
        if self.geometry.shared_latent:
            ring = metadata.state.block_table.shape[1] * metadata.state.block_size
            # a request has `max_query_len` tokens at least: `max_seq_len` may be more than any has
            drafts = min(layer.compress_ratio + self.limits.num_speculative_tokens, metadata.swa.max_query_len)
            least = max(layer.compress_ratio, drafts)
            if tokens and ring < least:
                expected = f"blocks for at least {least} tokens of a request: a ring of the ratio and all drafts"
                raise ArgumentError("metadata.state.block_table", expected=expected, actual=f"blocks for {ring}")


def _matrix(weight: Tensor | CodedMatrix) -> Tensor:
    """The bf16 copy of a weight that has codes too; any other as it is."""
    return weight if isinstance(weight, Tensor) else weight.weight


def _forms(weights: AttentionWeights) -> dict[str, tuple[torch.dtype, torch.device]]:
    """The dtype in which each weight is read, bf16 for fp8, and its device."""
    forms = {}
    for name, value in weights.named():
        tensor = value if isinstance(value, Tensor) else value.weight
        forms[name] = torch.bfloat16 if tensor.element_size() == 1 else tensor.dtype, tensor.device
    return forms


def _check_one_device(forms: Mapping[str, tuple[torch.dtype, torch.device]]) -> None:
    """Raise ArgumentError unless all weights are on the device of the first: torch multiplies by a meta tensor too."""
    (first, (_, device)), *others = forms.items()
    for name, (_, other) in others:
        if other != device:
            hint = f"load weights.{name}" if other.type == "meta" else "move all weights to the device of the layer"
            expected = f"a tensor on {device}, like weights.{first}"
            raise ArgumentError(f"weights.{name}", expected=expected, actual=f"one on {other}", hint=hint)


def _name_nan_scales(prefix: str, weights: AttentionWeights) -> None:
    """Log the weights that have scales of NaN. Memory may be filled later, so this is no error."""
    text = (
        "layer %s: %s scales of weights.%s are NaN, which some quantisers write for zeros; products with them are NaN"
    )
    for name, count in nan_scales(weights.named()).items():
        _log.warning(text, prefix, count, name)


def _check_output_weights(weights: AttentionWeights, backend: Backend) -> None:
    """Raise ArgumentError unless rows of the weights of the output projection that are read as they are, are dense.

    The output projection would say so too, but after the caches of a step are written.
    """
    for name, value in (("wo_a", weights.wo_a), ("wo_b", weights.wo_b)):
        tensor = value if isinstance(value, Tensor) else value.weight
        if tensor.element_size() > 1 or (name == "wo_a" and backend.projects_fp8):
            check_strides(**{f"weights.{name}": tensor})


def _shown(form: tuple[torch.dtype, torch.device] | None) -> str:
    """A dtype and a device, as errors show them."""
    return "nothing" if form is None else f"{str(form[0]).removeprefix('torch.')} on {form[1]}, or its codes"


def _check_phases(backend: Backend, limits: Limits, context_parallel: ContextParallel | None) -> None:
    """Raise ArgumentError for a deterministic layer whose decode and prefill give a token other bits."""
    if not backend.deterministic or limits.single_phase or (backend.phases_agree and context_parallel is None):
        return
    where = "over ranks" if backend.phases_agree else "with one backend in decode and another in prefill"
    expected = f"Limits(..., single_phase=True) {where}, with deterministic backends"
    hint = "pass such limits, or build the backend without deterministic"
    raise ArgumentError("limits", expected=expected, actual="single_phase=False", hint=hint)


def _check_limits(geometry: ModelGeometry, limits: Limits) -> None:
    if limits.max_model_len > geometry.max_position:
        expected = f"at most {geometry.max_position}, the max_position_embeddings of {geometry.name}"
        raise ArgumentError("limits.max_model_len", expected=expected, actual=limits.max_model_len)


def _table(rope: Rope, limits: Limits, device: torch.device) -> Tensor:
    """The layer's own table; `cos_sin_cache` is an argument where this is called."""
    return cos_sin_cache(rope, limits.max_model_len, device)


def _op_tensors(caches: DeepseekV4Caches) -> tuple[Tensor | None, ...]:
    """What the op of a layer is given for its caches, in the order of its arguments."""
    return tuple(map(op_tensor, caches.in_order))


@without_modes
def _attention_layer(
    hidden_states: Tensor,
    positions: Tensor,
    swa: Tensor | None,
    compressed: Tensor | None,
    state: Tensor | None,
    index: Tensor | None,
    index_state: Tensor | None,
    topk_indices: Tensor | None,
    candidates: Tensor | None,
    layer: str,
) -> Tensor:
    bound = _handles.layer(layer)
    caches = bound.caches
    if caches is not None:
        check_op_tensors(bound.prefix, caches.in_order, bound._op_tensors)  # noqa: SLF001 - it is the layer's op
        caches = all_caches_of(caches, swa, compressed, state, index, index_state)
    return bound._run(hidden_states, positions, caches, topk_indices, candidates)  # noqa: SLF001 - it is the layer's op


def _like_hidden_states(hidden_states: Tensor, *_: object) -> Tensor:
    return hidden_states.new_empty(hidden_states.shape)


_op = define_op(
    "attention_layer(Tensor hidden_states, Tensor positions, Tensor(a!)? swa, Tensor(b!)? compressed, "
    "Tensor(c!)? state, Tensor(d!)? index, Tensor(e!)? index_state, Tensor(f!)? topk_indices, "
    "Tensor(g!)? candidates, str layer) -> Tensor",
    _attention_layer,
    _like_hidden_states,
)

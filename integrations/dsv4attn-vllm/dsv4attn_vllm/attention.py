"""What a layer of vLLM runs on dsv4attn: KV insert, attention, and output projection up to `wo_b`.

In DeepSeek-V4.1 layers read the compressed cache and the selection of another layer, queries are not normalised, and
`wo_a` may have a scale for each 32 columns: `Dsv41Attention`.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.quantization.utils.mxfp8_utils import dequant_mxfp8_to_bf16
from vllm.models.deepseek_v4.attention import DeepseekV4Indexer

from dsv4attn import AttentionMetadata, DeepseekV4MLAAttention, LayerCaches, LayerKind, PagedKVCache
from dsv4attn.core.attention.checks import check_insert
from dsv4attn.core.attention.projection import o_proj
from dsv4attn.core.model.quantized_weight import Weight, check_weight, dense_weight
from dsv4attn.core.model.rope import apply_rope
from dsv4attn.core.torch_modes import without_modes
from dsv4attn_vllm.arguments import backend_of_vllm
from dsv4attn_vllm.compressor import adopt, adopt_insert
from dsv4attn_vllm.entries import recorder_of
from dsv4attn_vllm.guard import GUARD, LOG, RefusedError
from dsv4attn_vllm.indexer import (
    IndexCache,
    IndexerParts,
    V41IndexCache,
    V41Indexer,
    check_selector,
    indexer_class,
    indexer_globals,
)
from dsv4attn_vllm.metadata import Backend, SWABackend, V41Backend, V41SWABackend
from dsv4attn_vllm.parts import COMPRESSOR, INDEXER, register_remaining, without_warmup
from dsv4attn_vllm.records import V41IndexPages, v41_records
from dsv4attn_vllm.replacements import original
from dsv4attn_vllm.serving import serving_of

if TYPE_CHECKING:
    from vllm.models.deepseek_v4.attention import DeepseekV4Attention as _Layer
    from vllm.models.deepseek_v41.attention import DeepseekV4Attention as _V41Layer
else:
    _Layer = _V41Layer = object


class Dsv4Attention(_Layer):
    """Goes before vLLM's class of a platform among the bases of that platform's layer.

    Projections before attention stay vLLM's; compressor and indexer run where `parts` says. The constructor
    refuses what cannot be served.
    """

    backend_cls: ClassVar[Any] = Backend
    swa_backend_cls: ClassVar[Any] = SWABackend
    use_fp8_ds_mla_layout = True
    is_v41: ClassVar[bool] = False

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - vLLM's signature
        serving, requested = serving_of(vllm_config, v41=self.is_v41), backend_of_vllm(vllm_config)
        if requested is not None:
            LOG.warning(
                "--attention-backend %s is not looked at on this platform, where vLLM's DeepSeek-V4 has "
                "one backend; %s=0 runs that one",
                requested,
                GUARD.engine.switch,
            )
        self._serving = serving
        names = indexer_globals() if INDEXER in serving.parts and not self.is_v41 else nullcontext()
        with without_warmup(vllm_config, serving.parts) as others_remain, names:
            super().__init__(vllm_config, *args, **kwargs)
        if others_remain:
            register_remaining(self, vllm_config)
        self._invariant_product = serving.layer_ops.arithmetic(deterministic=True).linear
        indexer = self.indexer
        self._recorder = None if indexer is None else recorder_of(vllm_config, self.prefix, indexer.topk_tokens)
        self._keep_wo_a()
        self._put_parts()
        self._attention = DeepseekV4MLAAttention(
            self.prefix,
            serving.layer(self.compress_ratio),
            serving.limits,
            serving.backend,
            attn_sink=self.attn_sink,
            cos_sin_cache=self.rotary_emb.cos_sin_cache,
            topk_indices_buffer=self.topk_indices_buffer,
            raw_q=True,
        )
        self._geometry = layer = self._attention.geometry
        self._has_entries, self._selects = layer.has_entries, layer.kind is LayerKind.CSA
        serving.start_compiling()

    # ---------------------------------------------------------------- parts around attention, see `parts`

    def _get_indexer_cls(self, vllm_config: Any) -> Any:  # noqa: ANN401 - a class of vLLM's
        engine_class = super()._get_indexer_cls(vllm_config)
        return indexer_class(engine_class) if INDEXER in serving_of(vllm_config).parts else engine_class

    def _put_parts(self) -> None:
        """Turn compressors, and an indexer whose class vLLM's layer for CPUs has changed, into those of dsv4attn."""
        indexer, parts = self.indexer, self._serving.parts
        if INDEXER in parts and indexer is not None and not isinstance(indexer, IndexerParts):
            indexer.__class__, indexer.k_cache.__class__ = indexer_class(DeepseekV4Indexer), IndexCache
        if INDEXER in parts and indexer is not None:
            check_selector(self.prefix, indexer)
        if COMPRESSOR in parts:
            for compressor in self._compressors():
                adopt(compressor, self._serving)

    def _compressors(self) -> list[Any]:
        """The layer's compressor and that of its indexer, if the layer has them."""
        compressors = [self.compressor, None if self.indexer is None else self.indexer.compressor]
        return [compressor for compressor in compressors if compressor is not None]

    def _run_parallel_input_projections(self, hidden_states: Tensor) -> tuple[Tensor | None, ...]:
        """What attention, compressors and indexer get, as vLLM's layer of this model returns it.

        vLLM makes scores of compressors by `torch.mm` with `out_dtype`, which its batch-invariant mode leaves as it is:
        a library picks a kernel, and the order of its sums, by the number of rows. On a deterministic backend they are
        products of dsv4attn's, and all products are computed one after another.
        """
        if not self._serving.backend.deterministic:
            results: tuple[Tensor | None, ...] = super()._run_parallel_input_projections(hidden_states)
            return results
        return self._invariant_inputs(hidden_states)

    def _invariant_inputs(self, hidden_states: Tensor) -> tuple[Tensor | None, ...]:
        """Queries and keys, scores of the layer's compressor and of its indexer's, weights of the indexer."""
        indexer = self.indexer
        index_scores = self._scores(hidden_states, None if indexer is None else indexer.compressor)
        weights = None if indexer is None else indexer.weights_proj(hidden_states)[0]
        queries_and_keys = self._fused_wqa_wkv_gemm(hidden_states)
        return queries_and_keys, self._scores(hidden_states, self.compressor), index_scores, weights

    def _scores(self, hidden_states: Tensor, compressor: Any) -> Tensor | None:  # noqa: ANN401 - vLLM's module
        """What a compressor gets: [T, columns] fp32, whose row bits do not depend on the number of rows."""
        if compressor is None:
            return None
        return self._invariant_product(hidden_states, compressor.fused_wkv_wgate.weight, torch.float32)

    @classmethod
    def get_padded_num_q_heads(cls, num_heads: int) -> int:
        """Return the number of q heads as it is: no head is added as padding."""
        return num_heads

    # ---------------------------------------------------------------- weights

    def _keep_wo_a(self) -> None:
        """Keep `wo_a` as the checkpoint has it: vLLM repacks it for the kernel of each platform."""
        method = self.wo_a.quant_method
        process = method.process_weights_after_loading

        def process_others(layer: torch.nn.Module) -> None:
            if layer is not self.wo_a:
                process(layer)

        method.process_weights_after_loading = process_others

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Check `wo_a`, and convert it now if it is fp8 and the backend takes bf16: never inside a captured graph.

        vLLM calls this method again when weights are loaded again. The new weights are in the old parameters, and torch
        has not counted the writes. The copy is computed again at its old address, which captured graphs read.
        """
        inherited = getattr(super(), "process_weights_after_loading", None)
        if inherited is not None:
            inherited(act_dtype)
        converts = not self._serving.backend.projects_fp8
        try:
            check_weight("wo_a", self.wo_a, converts=converts)
            if converts:
                dense_weight(self.wo_a, recompute=True)
        except ValueError as error:
            expected = "bf16, or fp8 with a scale for each block of 128 x 128 or 32 x 32"
            cure = "use a checkpoint with such a wo_a"
            raise RefusedError(f"{self.prefix}.wo_a", expected=expected, actual=error, cure=cure) from error

    # ---------------------------------------------------------------- steps

    def _entries(self) -> Tensor:
        """The compressed cache that this layer reads, if it reads one."""
        return self.kv_cache

    def _entries_prefix(self) -> str:
        """The prefix of that cache, under which vLLM keeps its metadata."""
        return self.prefix

    def _weight(self) -> Weight:
        """`wo_a` for the backend."""
        return self.wo_a

    def _caches(self) -> LayerCaches:
        """The caches that vLLM bound last. vLLM binds other caches when it wakes up from sleep."""
        window, entries = self.swa_cache_layer.kv_cache, self._entries() if self._has_entries else None
        attention, serving = self._attention, self._serving
        bound = attention.caches
        if (
            bound is None
            or bound.swa.tensor is not window
            or (bound.compressed and bound.compressed.tensor) is not entries
        ):
            compressed = None if entries is None else PagedKVCache(entries, serving.compressed_layout)
            attention.bind_kv_cache(PagedKVCache(window, serving.swa_layout), compressed)
            # a module that was moved since has another table
            attention.cos_sin_cache, bound = self.rotary_emb.cos_sin_cache, attention.caches
            assert bound is not None
        return bound

    def _step(self, by_prefix: Any) -> AttentionMetadata:  # noqa: ANN401 - vLLM's metadata, by prefix
        """dsv4attn's metadata of a step."""
        window = by_prefix[self.swa_cache_layer.prefix].dsv4attn
        entries = by_prefix[self._entries_prefix()].dsv4attn if self._has_entries else None
        return AttentionMetadata(window, entries)

    def insert_keys(self, kv: Tensor, positions: Tensor, slots: Tensor) -> None:
        """Rotate a copy of kv [T, D], which has no queries, and write it to the window cache.

        Writes the bytes that `insert` writes. Raises ArgumentError before anything is written.
        """
        cache, table, layer = self._caches().swa, self.rotary_emb.cos_sin_cache, self._geometry
        check_insert(None, kv, positions, slots, table, cache, layer)
        dims = table.shape[1]
        # positions of padding may be anything, as in `insert`
        angles = table[positions.clamp(0, len(table) - 1)]
        rotated = apply_rope(kv[:, -dims:], angles).to(kv.dtype)
        keys = torch.cat([kv[:, :-dims], rotated], dim=1)
        self._serving.backend.quantize_and_insert_k_cache(keys, cache, slots)

    def _fused_qnorm_rope_kv_insert(
        self,
        q: Tensor,
        kv: Tensor,
        positions: Tensor,
        attn_metadata: Any,  # noqa: ANN401 - by prefix, or not a dict when vLLM measures memory
    ) -> Tensor:
        if isinstance(attn_metadata, dict):
            of_window = attn_metadata[self.swa_cache_layer.prefix]
            # metadata of both caches, and scratch memory, are needed where attention may prepare q itself
            step = space = None
            if of_window.dsv4attn.num_prefill_tokens:
                step, space = self._step(attn_metadata), self._serving.workspace()
            self._attention.insert_step(step, self._caches(), space, of_window.slot_mapping, q, kv, positions)
        return q

    @without_modes
    def forward_mqa(self, q: Tensor, kv: Tensor, positions: Tensor, output: Tensor) -> None:
        """Attention of this step into output [T', h, D]; without metadata, reserve memory and compile kernels.

        q: [T', h, D] after the insert, with rows of padding after the tokens. kv: not read. positions: those of the
        insert, read where it left q of prefill tokens raw.
        """
        by_prefix, serving = get_forward_context().attn_metadata, self._serving
        if by_prefix is None:
            serving.warm_up(self._geometry, q.device)
            output.zero_()
            return
        if self._recorder is not None:
            block_tokens = self._entries().shape[1] * self.compress_ratio
            self._recorder.keep(self.prefix, self.topk_indices_buffer[: len(q)], block_tokens)
        topk = self.topk_indices_buffer if self._selects else None
        step, caches, space = self._step(by_prefix), self._caches(), serving.workspace()
        self._attention.attend_step(step, caches, space, topk, self.attn_sink, q, positions, output)

    def _o_proj(self, o: Tensor, positions: Tensor) -> Tensor:
        """Inverse RoPE and `wo_a` on the backend; `wo_b`, and the sum over ranks, in vLLM's linear."""
        table, backend = self.rotary_emb.cos_sin_cache, self._serving.backend
        z = o_proj(backend, o, positions, table, self._weight(), self.n_local_groups, layer=self._geometry)
        return self._wo_b(z.flatten(1))

    def _wo_b(self, z: Tensor) -> Tensor:
        return self.wo_b(z)


# ---------------------------------------------------------------- DeepSeek-V4.1


_GROUPS = [1, 32]
"""Rows and columns under one scale of vLLM's MXFP8 weights."""


class Dsv41Attention(Dsv4Attention, _V41Layer):
    """Goes before vLLM's class of a platform among the bases of that platform's layer."""

    backend_cls = V41Backend
    swa_backend_cls = V41SWABackend
    is_v41 = True
    _dense: Tensor | None = None

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - vLLM's signature
        with v41_records(vllm_config):
            super().__init__(vllm_config, *args, **kwargs)
        serving = self._serving
        for cache, actual, layout in (
            ("window", self.swa_bytes_per_token, serving.swa_layout),
            ("compressed", self.compressed_bytes_per_token, serving.compressed_layout),
        ):
            if actual != layout.record_bytes:
                expected, cure = f"records of {layout.record_bytes} bytes", "install a version of vLLM that was tested"
                raise RefusedError(f"{self.prefix}: {cache} cache", expected=expected, actual=actual, cure=cure)

    # ---------------------------------------------------------------- parts around attention, see `parts`

    def _indexer_cls(self, k_cache: Any) -> Any:  # noqa: ANN401 - a cache and a class of vLLM's
        if INDEXER in self._serving.parts:
            k_cache.__class__ = V41IndexCache
            return V41Indexer
        if self._serving.is_fp4:
            k_cache.__class__ = V41IndexPages
        return super()._indexer_cls(k_cache)

    def _put_parts(self) -> None:
        if INDEXER in self._serving.parts and self.indexer is not None:
            check_selector(self.prefix, self.indexer)
        if self.compressor is None:
            return
        if COMPRESSOR in self._serving.parts:
            adopt(self.compressor, self._serving)
        elif self._serving.inserts_entries:
            adopt_insert(self.compressor, self._serving)

    def _invariant_inputs(self, hidden_states: Tensor) -> tuple[Tensor | None, ...]:
        """Queries and keys, scores of the compressor, weights of the indexer, which has no compressor of its own."""
        weights = None if self.indexer is None else self.indexer.weights_proj(hidden_states)[0]
        return self._fused_wqa_wkv_gemm(hidden_states), self._scores(hidden_states, self.compressor), weights

    # ---------------------------------------------------------------- caches

    def _entries(self) -> Tensor:
        return self._compressed_kv_cache()

    def _entries_prefix(self) -> str:
        prefix = self.compressed_cache_prefix
        assert prefix is not None
        return prefix

    # ---------------------------------------------------------------- weights

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Convert an MXFP8 `wo_a` to bf16, at the address that captured graphs read; others as in V4."""
        if getattr(self.wo_a, "weight_block_size", None) != _GROUPS:
            super().process_weights_after_loading(act_dtype)
            return
        dense = dequant_mxfp8_to_bf16(self.wo_a.weight.data, self.wo_a.weight_scale.data)
        self._dense = dense if self._dense is None else self._dense.copy_(dense)

    def _weight(self) -> Weight:
        return self.wo_a if self._dense is None else self._dense

    # ---------------------------------------------------------------- steps

    def forward_kv(self, positions: Tensor, hidden_states: Tensor) -> None:
        """Write what `forward` writes to the caches, without queries, selection and attention."""
        by_prefix = get_forward_context().attn_metadata
        qr_kv, kv_score, _ = self._run_parallel_input_projections(hidden_states)
        kv = self._split_qkv_and_norm(qr_kv)[2]
        if isinstance(by_prefix, dict):
            self.insert_keys(kv, positions, by_prefix[self.swa_cache_layer.prefix].slot_mapping)
        if self.compressor is None:
            return
        latent = self.compressor(kv_score, positions)
        self.compressor.insert_cache(latent, positions, self.rotary_emb)
        if self.indexer is not None and self.indexer.owns_k:
            self.indexer._produce_k(latent, positions, self.indexer_rotary_emb)  # noqa: SLF001 - as vLLM's layer does

    def _wo_b(self, z: Tensor) -> Tensor:
        return self._wo_b_proj(z)


# ---------------------------------------------------------------- drafts


def insert_context_kv(attn: Any, kv: Tensor, positions: Tensor, slot_mapping: Tensor) -> None:  # noqa: ANN401
    """Write the keys of a DSpark draft's context, kv [T, D], which have no queries.

    attn: a draft layer; one that is not dsv4attn's is left to vLLM.
    """
    if not isinstance(attn, Dsv4Attention):
        original(f"{type(attn).__module__.rpartition('.')[0]}.dspark._insert_context_kv")(
            attn, kv, positions, slot_mapping
        )
        return
    attn.insert_keys(kv, positions, slot_mapping)

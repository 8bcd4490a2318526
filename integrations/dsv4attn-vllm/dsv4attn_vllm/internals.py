"""The names of vLLM that this package replaces, calls, writes or reads: one table, checked before a model is served.

`model.activate` calls `check` before it replaces anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dsv4attn.integrations import engine_internals
from dsv4attn.integrations.engine_internals import Called, Internal, Named, Overridden, Stored, Written, names_of
from dsv4attn_vllm.guard import GUARD, is_before_0_33

_V4, _V41 = "vllm.models.deepseek_v4", "vllm.models.deepseek_v41"
_BACKENDS = "vllm.v1.attention.backends"
_INDEXER = "vllm.model_executor.layers.sparse_attn_indexer:SparseAttnIndexer"

_LAYER = names_of(
    "attn_sink compress_ratio compressor indexer n_local_groups prefix rotary_emb swa_cache_layer "
    "topk_indices_buffer wo_a wo_b"
)
_COMPRESSOR = names_of(
    "_static_forward_context compress_ratio head_dim k_cache_prefix norm prefix rms_norm_eps state_cache"
)
_RUNNER = ("vllm.v1.worker.gpu.attn_utils",)
_NAMES = ("vllm.v1.worker.utils",)
_OLD, _NEW = "before 0.33", "since 0.33"
_CLASS = "_select_dsv4_attn_cls"
_INSERT = "_insert_context_kv"

_MHC_OPS = {"MHCPreOp": "_PreOp", "MHCPostOp": "_PostOp", "MHCFusedPostPreOp": "_FusedPostPreOp", "HCHeadOp": "_HeadOp"}


def _replaced(
    owner: str, replacement: str, hooks: str | tuple[str, ...], like: str = "", callers: tuple[str, ...] = ()
) -> Overridden:
    """Methods or functions of vLLM, and the class or function of this package, "module:name", that replaces them."""
    return Overridden(owner, f"dsv4attn_vllm.{replacement}", hooks, like=like, callers=callers)


TABLE: Mapping[str, tuple[Internal, ...]] = {
    "all": (
        Named("vllm.config", "CompilationMode get_current_vllm_config get_current_vllm_config_or_none"),
        Named("vllm.config:CompilationMode", "NONE"),
        Stored(
            "vllm.config:VllmConfig",
            "attention_config cache_config compilation_config device_config kernel_config "
            "model_config parallel_config scheduler_config speculative_config",
        ),
        Written("vllm.config:AttentionConfig", "backend"),
        Stored("vllm.config:CacheConfig", "cache_dtype"),
        Stored("vllm.config:CompilationConfig", "cudagraph_mode max_cudagraph_capture_size mode"),
        Stored("vllm.config:DeviceConfig", "device_type"),
        Written("vllm.config:KernelConfig", "enable_jit_warmup"),
        Stored("vllm.config:KernelConfig", "moe_backend"),
        Stored("vllm.config:ModelConfig", "architectures dtype hf_config max_model_len"),
        Stored(
            "vllm.config:ParallelConfig",
            "decode_context_parallel_size prefill_context_parallel_size tensor_parallel_size",
        ),
        Stored("vllm.config:SchedulerConfig", "max_num_batched_tokens max_num_seqs"),
        Stored("vllm.config:SpeculativeConfig", "num_speculative_tokens use_dspark"),
        Written("vllm.engine.arg_utils:EngineArgs", "create_engine_config"),
        Named("vllm.envs", "VLLM_BATCH_INVARIANT"),
        Named("vllm.forward_context", "get_forward_context"),
        Stored("vllm.forward_context:ForwardContext", "attn_metadata"),
        Named(
            "vllm.platforms.interface:Platform",
            "get_device_capability is_cpu is_device_capability_family is_fp8_fnuz is_rocm is_xpu support_deep_gemm",
        ),
        Called("vllm.utils.deep_gemm", "has_deep_gemm"),
        Called("vllm.utils.multi_stream_utils", "maybe_execute_in_parallel", 5),
        Named("vllm.v1.attention.backend", "AttentionCGSupport AttentionMetadataBuilder"),
        Named("vllm.v1.attention.backend:AttentionCGSupport", "ALWAYS UNIFORM_BATCH"),
        Called("vllm.v1.attention.backend", "max_decode_query_len", 1),
        Stored(
            "vllm.v1.attention.backend:CommonAttentionMetadata",
            "block_table_tensor max_query_len max_seq_len num_actual_tokens num_reqs "
            "positions query_start_loc seq_lens slot_mapping",
        ),
        Called("vllm.v1.attention.backend:CommonAttentionMetadata", "token_to_req_indices", 1),
        _replaced(
            "vllm.v1.attention.backend:AttentionMetadataBuilder",
            "index_metadata:IndexMetadataBuilder",
            "build update_draft_decode_metadata",
        ),
        Stored(
            "vllm.v1.attention.backend:AttentionMetadataBuilder",
            "kv_cache_spec supports_draft_decode_metadata_update vllm_config",
        ),
        Called("vllm.model_executor.warmup.jit_warmup:VllmJitKernel", "register_warmup"),
        Named("vllm.models.common.ops", "_FUSED_Q_KV_RMSNORM_KERNEL"),
        Named(f"{_BACKENDS}.mla.compressor_utils", "_COMPRESSED_SLOT_MAPPING_KERNEL"),
        Named(
            f"{_BACKENDS}.mla.sparse_swa",
            "_COMPUTE_DSPARK_NONCAUSAL_SWA_INDICES_KERNEL _COMPUTE_PREFILL_METADATA_KERNEL "
            "_COMPUTE_SWA_INDICES_AND_LENS_KERNEL",
        ),
        Called(f"{_BACKENDS}.mla.compressor_utils", "get_compressed_slot_mapping", 7, "out"),
        Called(f"{_BACKENDS}.mla.compressor_utils", "get_dspark_swa_index_width", 2),
        Called(f"{_BACKENDS}.mla.indexer", "dsa_indexer_uses_fp4", 1),
        Stored(
            f"{_BACKENDS}.mla.indexer:DeepseekV32IndexerMetadata",
            "block_table max_seq_len num_decode_tokens num_decodes num_prefill_tokens "
            "num_prefills seq_lens slot_mapping",
        ),
        Named(f"{_BACKENDS}.mla.indexer", "DeepseekV4IndexerBackend"),
        _replaced(
            f"{_BACKENDS}.mla.indexer:DeepseekV4IndexerBackend",
            "index_metadata:IndexBackend",
            "get_builder_cls supports_batch_invariance",
            callers=_RUNNER,
        ),
        Stored(
            f"{_BACKENDS}.mla.sparse_swa:DeepseekSparseSWAMetadata",
            "block_size block_table decode_swa_indices decode_swa_lens is_valid_token "
            "num_decode_tokens num_decodes num_prefill_tokens num_prefills "
            "prefill_gather_lens prefill_query_lens_cpu prefill_seq_lens prefill_seq_lens_cpu "
            "prefill_swa_indices prefill_swa_lens query_start_loc query_start_loc_cpu "
            "seq_lens slot_mapping token_to_req_indices",
        ),
        _replaced(
            f"{_BACKENDS}.mla.sparse_swa:DeepseekSparseSWAMetadataBuilder",
            "metadata:SWAMetadataBuilder",
            "build build_tile_scheduler get_varlen_cudagraph_max_query_len",
            callers=_RUNNER,
        ),
        Stored(
            f"{_BACKENDS}.mla.sparse_swa:DeepseekSparseSWAMetadataBuilder",
            "_cudagraph_support max_model_len window_size",
        ),
        _replaced(
            f"{_BACKENDS}.mla.sparse_swa:DeepseekSparseSWABackend",
            "metadata:SWABackend",
            "get_builder_cls supported_kv_cache_layouts supports_batch_invariance",
            callers=(*_RUNNER, f"{_BACKENDS}.utils"),
        ),
        Called(f"{_BACKENDS}.mla.indexer:DeepseekV4IndexerBackend", "supported_kv_cache_layouts"),
        Named(f"{_BACKENDS}.registry:AttentionBackendEnum", "CUSTOM"),
        Called(f"{_BACKENDS}.registry:AttentionBackendEnum", "register", 2),
        Called(f"{_BACKENDS}.utils", "split_decodes_and_prefills", 1, "decode_threshold"),
        Named("vllm.v1.worker.workspace", "current_workspace_manager is_workspace_manager_initialized"),
        Called("vllm.v1.worker.workspace:WorkspaceManager", "get_persistent_resource", 2),
        Called("vllm.v1.worker.workspace:WorkspaceManager", "is_locked"),
        Called("vllm.v1.worker.workspace:WorkspaceManager", "_get_workspace_id"),
        Stored("vllm.v1.worker.workspace:WorkspaceManager", "_num_lanes"),
        Written("vllm.v1.worker.workspace:WorkspaceManager", "_persistent_resources"),
        Written(
            "vllm.model_executor.layers.quantization.base_config:QuantizeMethodBase", "process_weights_after_loading"
        ),
    ),
    "v4": (
        Named(
            _V4, "DSparkDeepseekV4ForCausalLM DeepSeekV4MTP DeepseekV4ForCausalLM DeepseekV4ForConditionalGeneration"
        ),
        _replaced(
            f"{_V4}.attention:DeepseekV4Attention",
            "attention:Dsv4Attention",
            "_fused_qnorm_rope_kv_insert _o_proj _run_parallel_input_projections forward_mqa get_padded_num_q_heads",
        ),
        Called(f"{_V4}.attention:DeepseekV4Attention", "_fused_wqa_wkv_gemm", 1),
        Stored(
            f"{_V4}.attention:DeepseekV4Attention",
            (*_LAYER, "backend_cls", "kv_cache", "swa_backend_cls", "use_fp8_ds_mla_layout"),
        ),
        _replaced(f"{_V4}.attention:DeepseekV4IndexerCache", "indexer:IndexCache", "get_attn_backend", callers=_RUNNER),
        Stored(f"{_V4}.attention:DeepseekV4IndexerCache", "kv_cache prefix"),
        _replaced(f"{_V4}.attention:DeepseekV4Indexer", "indexer:IndexerParts", "forward"),
        Called(f"{_V4}.attention:DeepseekV4Indexer", "_wq_b_proj", 2),
        Stored(
            f"{_V4}.attention:DeepseekV4Indexer",
            "aux_stream compress_ratio compressor head_dim indexer_op k_cache ln_events "
            "n_head topk_indices_buffer topk_tokens weights_proj",
        ),
        _replaced(_INDEXER, "indexer:Selector", "forward", like="forward_cuda"),
        _replaced(f"{_V4}.compressor:DeepseekCompressor", "compressor:Compressor", "forward"),
        Stored(f"{_V4}.compressor:DeepseekCompressor", (*_COMPRESSOR, "ape", "coff", "fused_wkv_wgate", "overlap")),
        _replaced(
            f"{_V4}.compressor:CompressorStateCache", "compressor:StateCache", "get_attn_backend", callers=_RUNNER
        ),
        _replaced(
            f"{_V4}.compressor:CompressorBackend", "metadata:StateBackend", "supports_batch_invariance", callers=_RUNNER
        ),
        Stored(f"{_V4}.compressor:CompressorMetadata", "block_table c128_boundary slot_mapping token_to_req_indices"),
        _replaced(
            f"{_V4}.sparse_mla:DeepseekV4SparseMLAMetadataBuilder", "metadata:CompressedMetadataBuilder", "build"
        ),
        Stored(
            f"{_V4}.sparse_mla:DeepseekV4SparseMLAMetadataBuilder", "compress_ratio device model_config vllm_config"
        ),
        Stored("vllm.v1.attention.backend:AttentionMetadataBuilder", "reorder_batch_threshold"),
        Stored(
            f"{_V4}.sparse_mla:DeepseekV4FlashMLAMetadata",
            "block_size block_table c128a_decode_topk_lens c128a_global_decode_topk_indices "
            "c128a_prefill_topk_indices max_query_len max_seq_len num_actual_tokens num_reqs "
            "query_start_loc req_id_per_token slot_mapping topk_tokens",
        ),
        _replaced(
            f"{_V4}.sparse_mla:DeepseekV4SparseMLABackend",
            "metadata:Backend",
            "get_builder_cls get_name supports_batch_invariance supports_compute_capability",
            callers=(*_NAMES, *_RUNNER),
        ),
    ),
    _OLD: (Written(f"{_V4}.attention", "DeepseekV4Indexer DeepseekV4IndexerCache SparseAttnIndexer"),),
    _NEW: (
        Called("vllm.utils.deep_gemm", "mqa_logits_use_mx_scales"),
        _replaced(f"{_V4}.attention:DeepseekV4Attention", "attention:Dsv4Attention", "_get_indexer_cls"),
        _replaced(
            f"{_V4}.attention:DeepseekV4Indexer", "indexer:IndexerParts", "_get_attn_cls _get_cache_cls _q_rope_quant"
        ),
    ),
    f"entries {_NEW}": (
        Called("vllm.distributed", "get_tensor_model_parallel_rank"),
        Stored("vllm.config:ParallelConfig", "pipeline_parallel_size use_ubatching"),
        Stored("vllm.v1.core.sched.output:SchedulerOutput", "finished_req_ids"),
        Written("vllm.v1.worker.gpu.model_runner:GPUModelRunner", "execute_model execute_model_state"),
        Stored("vllm.v1.worker.gpu.model_runner:GPUModelRunner", "req_states"),
        Stored("vllm.v1.worker.gpu.model_runner:ExecuteModelState", "attn_metadata input_batch"),
        Stored("vllm.v1.worker.gpu.input_batch:InputBatch", "num_reqs positions query_start_loc req_ids"),
        Stored("vllm.v1.worker.gpu.states:RequestState", "all_token_ids req_id_to_index total_len"),
        Stored("vllm.v1.worker.gpu.buffer_utils:StagedWriteTensor", "gpu"),
    ),
    f"rocm {_OLD}": (Named("vllm.envs", "VLLM_ROCM_MONO_DECODE"),),
    f"rocm {_NEW}": (Stored("vllm.config:KernelConfig", "monokernel"),),
    "v4 cuda": (
        _replaced(f"{_V4}.nvidia.model", "cuda:select_attention", _CLASS),
        _replaced(f"{_V4}.nvidia.dspark", "attention:insert_context_kv", _INSERT),
    ),
    "v4 rocm": (
        Named(f"{_V4}.amd.model", "DeepseekV4ROCMAiterMLAAttention"),
        _replaced(f"{_V4}.amd.dspark", "attention:insert_context_kv", _INSERT),
        _replaced(f"{_V4}.amd.rocm:DeepseekV4ROCMAiterMLAAttention", "rocm:ROCmAttention", "_prepare_fp8_wo_a"),
        Called(f"{_V4}.amd.rocm:DeepseekV4ROCMAiterMLAAttention", "_bpre_attn_gemm", 3, "reduce_tp"),
        Stored(f"{_V4}.amd.rocm:DeepseekV4ROCMAiterMLAAttention", "_wo_b_scale"),
    ),
    "v4 xpu": (
        Named(f"{_V4}.xpu.model", "DeepseekV4XPUAttention"),
        Named(f"{_V4}.xpu.xpu_sparse", "DeepseekV4XPUAttention"),
        _replaced(f"{_V4}.xpu.dspark", "attention:insert_context_kv", _INSERT),
    ),
    "v4 cpu": (
        Named(f"{_V4}.cpu.model", "DeepseekV4CPUAttention"),
        _replaced(
            f"{_V4}.cpu.cpu_sparse:DeepseekV4CPUAttention",
            "cpu:CPUAttention",
            "_wrap_wo_a_process_weights_after_loading",
        ),
    ),
    "v41": (
        Named(_V41, "DSparkDeepseekV4ForCausalLM DeepseekV41ForCausalLM"),
        Named("vllm.model_executor.layers.quantization.utils.mxfp8_utils", "dequant_mxfp8_to_bf16"),
        Stored("vllm.config:AttentionConfig", "indexer_sparse_logits"),
        _replaced(
            f"{_V41}.attention:DeepseekV4Attention",
            "attention:Dsv41Attention",
            "_fused_qnorm_rope_kv_insert _indexer_cls _o_proj _run_parallel_input_projections forward_kv forward_mqa",
            callers=(f"{_V41}.amd.model", f"{_V41}.nvidia.model"),
        ),
        Called(f"{_V41}.attention:DeepseekV4Attention", "_compressed_kv_cache"),
        Called(f"{_V41}.attention:DeepseekV4Attention", "_fused_wqa_wkv_gemm", 1),
        Called(f"{_V41}.attention:DeepseekV4Attention", "_split_qkv_and_norm", 1),
        Called(f"{_V41}.attention:DeepseekV4Attention", "_wo_b_proj", 1),
        _replaced(f"{_V41}.attention:DeepseekV4Attention", "attention:Dsv41Attention", "get_padded_num_q_heads"),
        Stored(
            f"{_V41}.attention:DeepseekV4Attention",
            (
                *_LAYER,
                "backend_cls",
                "compressed_bytes_per_token",
                "compressed_cache_prefix",
                "indexer_rotary_emb",
                "swa_backend_cls",
                "swa_bytes_per_token",
                "use_fp8_ds_mla_layout",
            ),
        ),
        _replaced(
            f"{_V41}.attention:DeepseekV4IndexerCache", "indexer:V41IndexCache", "get_attn_backend", callers=_RUNNER
        ),
        _replaced(
            f"{_V41}.attention:DeepseekV4IndexerCache", "records:V41IndexPages", "get_kv_cache_spec", callers=_RUNNER
        ),
        Written(f"{_V41}.attention", "_use_v41_mxfp8_kv_record"),
        _replaced(f"{_V41}.attention:DeepseekV4Indexer", "indexer:V41Indexer", "_produce_k forward forward_q"),
        Called(f"{_V41}.attention:DeepseekV4Indexer", "_wq_b_proj", 2),
        Stored(
            f"{_V41}.attention:DeepseekV4Indexer",
            "attn_cls compress_ratio head_dim indexer_op k_cache k_norm n_head owns_k "
            "topk_indices_buffer topk_tokens weights_proj wk",
        ),
        _replaced(_INDEXER, "indexer:V41Selector", "forward", like="forward_cuda"),
        _replaced(
            f"{_V41}.compressor:DeepseekCompressor",
            "compressor:V41Compressor",
            "forward",
            callers=(f"{_V41}.attention",),
        ),
        _replaced(
            f"{_V41}.compressor:DeepseekCompressor",
            "compressor:V41Insert",
            "insert_cache",
            callers=(f"{_V41}.attention",),
        ),
        Stored(f"{_V41}.compressor:DeepseekCompressor", (*_COMPRESSOR, "fused_wkv_wgate")),
        _replaced(
            f"{_V41}.compressor:CompressorStateCache", "compressor:V41StateCache", "get_attn_backend", callers=_RUNNER
        ),
        _replaced(f"{_V41}.compressor:CompressorMetadataBuilder", "metadata:V41StateMetadataBuilder", "build"),
        Stored(f"{_V41}.compressor:CompressorMetadata", "token_to_req_indices"),
        _replaced(f"{_V41}.compressor:CompressorBackend", "metadata:V41StateBackend", "get_builder_cls"),
        _replaced(
            f"{_V41}.sparse_mla:DeepseekV4SparseMLAMetadataBuilder", "metadata:V41CompressedMetadataBuilder", "build"
        ),
        Stored(
            f"{_V41}.sparse_mla:DeepseekV4SparseMLAMetadataBuilder", "compress_ratio device model_config vllm_config"
        ),
        Named(f"{_V41}.sparse_mla", "DeepseekV4FlashMLAMetadata"),
        _replaced(
            f"{_V41}.sparse_mla:DeepseekV41SparseSWAMetadataBuilder",
            "metadata:V41SWAMetadataBuilder",
            "build build_tile_scheduler get_varlen_cudagraph_max_query_len",
            callers=_RUNNER,
        ),
        _replaced(
            f"{_V41}.sparse_mla:DeepseekV4SparseMLABackend",
            "metadata:V41Backend",
            "get_builder_cls get_name supports_compute_capability",
            callers=_NAMES,
        ),
        Called(f"{_V41}.sparse_mla:DeepseekV4SparseMLABackend", "get_supported_kernel_block_sizes"),
        _replaced(
            f"{_BACKENDS}.mla.indexer:DeepseekV41IndexerBackend", "index_metadata:V41IndexBackend", "get_builder_cls"
        ),
    ),
    "v41 cuda": (
        _replaced(f"{_V41}.nvidia.model", "cuda:select_v41_attention", _CLASS),
        _replaced(f"{_V41}.nvidia.dspark", "attention:insert_context_kv", _INSERT),
    ),
    "v41 rocm": (
        _replaced(f"{_V41}.amd.model", "rocm:select_v41_attention", _CLASS),
        _replaced(f"{_V41}.amd.dspark", "attention:insert_context_kv", _INSERT),
        Named(f"{_V41}.amd.rocm", "DeepseekV41ROCMAiterMLAAttention"),
        Called(f"{_V41}.amd.rocm:DeepseekV41ROCMAiterMLAAttention", "_wo_b_after_wo_a", 1),
        Called(f"{_V41}.attention:DeepseekV4Attention", "_alloc_attn_out", 2),
    ),
    "mhc": (
        Named("vllm.model_executor.custom_op", "op_registry_oot"),
        *(
            _replaced(
                f"vllm.model_executor.layers.mhc:{engine_class}",
                f"hyper_connections:{op}",
                "forward",
                like=f"forward_{device}",
            )
            for engine_class, op in _MHC_OPS.items()
            for device in ("hip", "xpu", "cpu")
        ),
    ),
    "mhc cuda": (
        Named(f"{_V4}.nvidia.mtp", "hc_head_fused_kernel_tilelang mhc_post_tilelang"),
        Named(f"{_V4}.nvidia.dspark", "hc_head_fused_kernel_tilelang mhc_post_tilelang"),
        Named(f"{_V4}.nvidia.model", "DeepseekV4DecoderLayer DeepseekV4Model"),
        _replaced(f"{_V4}.nvidia.model", "hyper_connections:hc_head", "hc_head_fused_kernel_tilelang"),
        *(
            _replaced(f"{_V4}.nvidia.model", f"hyper_connections:{name}", f"{name}_tilelang")
            for name in ("mhc_pre", "mhc_pre_broadcast", "mhc_post", "mhc_fused_post_pre")
        ),
    ),
}
"""What each part of this package needs: all models, a version of the model, and with it a platform; versions of vLLM,
and with them a platform. See `groups_of`."""


def _since(version: str) -> str:
    """How the parts of TABLE for versions like this one are named."""
    return _OLD if is_before_0_33(version) else _NEW


def parts_of(version: str) -> tuple[str, ...]:
    """The parts of TABLE that a version of vLLM must have, of all platforms."""
    other = _OLD if _since(version) == _NEW else _NEW
    return tuple(part for part in TABLE if not part.endswith(other))


def groups_of(model: str, platform: str, *, version: str, mhc: bool = False, entries: bool = False) -> tuple[str, ...]:
    """The parts of TABLE that a process needs.

    model: "v4" or "v41", whose names are replaced. The names of both are needed, because one module of this package has
        the layers of both.
    platform: as `replacements.platform_name` returns it.
    version: of vLLM.
    mhc: whether hyper-connections run on dsv4attn.
    entries: whether selected entries are recorded.
    """
    layers = ("v4 rocm", "v41 rocm") if platform == "rocm" else (f"{model} {platform}",)
    since = _since(version)
    options = (*(("mhc", f"mhc {platform}") if mhc else ()), *((f"entries {since}",) if entries else ()))
    groups = ("all", "v4", "v41", *layers, since, f"{platform} {since}", *options)
    return tuple(group for group in groups if group in TABLE)


def lacking(groups: Sequence[str]) -> list[str]:
    """What the installed vLLM lacks of these groups: one line for each name, in the order of the table."""
    return engine_internals.lacking((entry for group in groups for entry in TABLE[group]), "vllm")


def check(version: str, groups: Sequence[str]) -> None:
    """Raise RefusedError with all names of these groups that the installed vLLM lacks. version: of that vLLM."""
    GUARD.refuse_missing(version, lacking(groups))

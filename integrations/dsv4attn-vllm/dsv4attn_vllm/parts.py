"""Which parts around attention run on dsv4attn instead of on vLLM's own kernels: `DSV4ATTN_VLLM_PARTS`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from attrs import frozen

from dsv4attn.integrations.engines import parts_named, words_of
from dsv4attn.integrations.variables import VLLM_PARTS
from dsv4attn_vllm.guard import RefusedError

VARIABLE = VLLM_PARTS
"""Parts by name, with commas between them; or `auto`, `all`, `none`. Unset is `auto`."""

INDEXER, COMPRESSOR, PROJECTION, MHC = PARTS = ("indexer", "compressor", "projection", "mhc")
"""indexer: queries of the indexer, selection, and their metadata. compressor: states and entries of both compressors.
projection: fp8 `wo_a` is multiplied as it is; without it, it is converted to bf16. mhc: hyper-connections."""

AUTO = frozenset({INDEXER, COMPRESSOR, PROJECTION})
"""Parts that `auto` means where vLLM has no kernels for them."""


@frozen
class Device:
    """What the choice of parts depends on.

    platform: as `replacements.platform_name`. deep_gemm: whether DeepGEMM is installed and runs on this device; vLLM's
    indexer on CUDA has nothing else. packed_scales: whether vLLM's index keys have four exponents where dsv4attn's have
    an fp32 scale, as on sm_100. mxfp4: whether index keys have 4 bits. compiled: whether vLLM runs torch.compile on
    models that it can compile. Of the DeepSeek-V4 models it can compile that for CPUs.
    """

    platform: str
    deep_gemm: bool
    packed_scales: bool = False
    mxfp4: bool = False
    compiled: bool = False

    @classmethod
    def here(cls, vllm_config: Any) -> Device:  # noqa: ANN401 - vLLM's VllmConfig
        """The device of this process."""
        from vllm.config import CompilationMode
        from vllm.platforms import current_platform
        from vllm.utils import deep_gemm
        from vllm.v1.attention.backends.mla.indexer import dsa_indexer_uses_fp4

        from dsv4attn_vllm.replacements import platform_name

        platform = platform_name()
        return cls(
            platform,
            deep_gemm=platform == "cuda" and current_platform.support_deep_gemm() and deep_gemm.has_deep_gemm(),
            # vLLM 0.32 has an fp32 scale on every device
            packed_scales=getattr(deep_gemm, "mqa_logits_use_mx_scales", lambda: False)(),
            mxfp4=dsa_indexer_uses_fp4(vllm_config),
            compiled=vllm_config.compilation_config.mode != CompilationMode.NONE,
        )


def requested_parts() -> frozenset[str] | None:
    """The parts that the variable names, or None for `auto`. Raises RefusedError for any other word."""
    return parts_named(VARIABLE, PARTS, RefusedError)


def is_named(part: str) -> bool:
    """Whether the variable names this part itself, not by `all` or `auto`. A named part that cannot run is refused."""
    return part in words_of(VARIABLE)


def chosen(device: Device) -> frozenset[str]:
    """The parts that run on dsv4attn on a device.

    Raises RefusedError for what cannot run: one of indexer and compressor without the other where vLLM's format
    differs, 4 bits on ROCm, whose pages are vLLM's own, and hyper-connections inside of compiled code.
    """
    named = requested_parts()
    if named is None:
        if device.platform == "cpu" or (device.platform == "cuda" and not device.deep_gemm):
            return AUTO
        # where vLLM's own layers round outputs to fp8 as well
        return frozenset({PROJECTION}) if device.platform == "cuda" else frozenset()
    if MHC in named and device.platform == "cpu" and device.compiled:
        cure = f"pass --enforce-eager, or leave {MHC} out of {VARIABLE}"
        raise RefusedError(MHC, expected="a model that is not compiled", actual="torch.compile", cure=cure)
    together = {INDEXER, COMPRESSOR}
    if device.platform == "rocm" and device.mxfp4 and named & together:
        cure = f"leave indexer_kv_dtype out, or name neither in {VARIABLE}"
        raise RefusedError("indexer_kv_dtype", expected="fp8, for parts of dsv4attn on ROCm", actual="mxfp4", cure=cure)
    if len(named & together) == 1 and device.packed_scales and not device.mxfp4:
        expected = "indexer and compressor, or neither: vLLM's index keys have another format on this GPU"
        cure = "name both of them"
        raise RefusedError(
            f"environment variable {VARIABLE}", expected=expected, actual=", ".join(sorted(named)), cure=cure
        )
    return named


def v41_parts(device: Device) -> frozenset[str]:
    """The parts around attention of DeepSeek-V4.1 that run on dsv4attn on a device: indexer and compressor, or none.

    Raises RefusedError for another part that is named, for one of the two without the other, as index keys of vLLM have
    another format on some GPUs, for index keys of 4 bits on ROCm, and for `none` where vLLM's indexer does not run.
    """
    named, both = requested_parts(), frozenset({INDEXER, COMPRESSOR})
    for part in filter(is_named, (PROJECTION, MHC)):
        expected, cure = "indexer and compressor, as the others of DeepSeek-V4.1 are vLLM's", f"leave {part} out"
        raise RefusedError(f"environment variable {VARIABLE}", expected=expected, actual=part, cure=cure)
    lacks_indexer = device.platform == "cuda" and not device.deep_gemm
    parts = (both if lacks_indexer else frozenset()) if named is None else named & both
    if len(parts) == 1:
        expected, cure = "indexer and compressor, or neither, for DeepSeek-V4.1", "name both of them"
        raise RefusedError(f"environment variable {VARIABLE}", expected=expected, actual=min(parts), cure=cure)
    if lacks_indexer and not parts:
        expected, cure = "indexer and compressor, as vLLM's need DeepGEMM", f"leave {VARIABLE} out"
        raise RefusedError(f"environment variable {VARIABLE}", expected=expected, actual="none", cure=cure)
    if parts and device.platform == "rocm" and device.mxfp4:
        cure = f"leave indexer_kv_dtype out, or name neither in {VARIABLE}"
        raise RefusedError("indexer_kv_dtype", expected="fp8, for parts of dsv4attn on ROCm", actual="mxfp4", cure=cure)
    return parts


_asked_for_warmup: ContextVar[bool | None] = ContextVar("asked_for_warmup", default=None)
"""Whether the configuration asks vLLM to compile ahead, while `without_mhc_warmup` says that it does not."""


@contextmanager
def without_warmup(vllm_config: Any, parts: frozenset[str]) -> Iterator[bool]:  # noqa: ANN401 - vLLM's VllmConfig
    """Let layers that are built here not register kernels that will not run, and do not compile on every GPU.

    vLLM compiles registered kernels ahead and fails if one of them cannot be. It registers those of indexer, compressor
    and projection together with those that still run. Where it must not register the former, the `with` statement gives
    True if the latter are to be registered by `register_remaining`.
    """
    kernels, requested = vllm_config.kernel_config, _asked_for_warmup.get()
    was_enabled = kernels.enable_jit_warmup
    is_asked, replaces = was_enabled if requested is None else requested, bool(parts & {INDEXER, COMPRESSOR})
    kernels.enable_jit_warmup = is_asked and not replaces
    try:
        yield is_asked and replaces
    finally:
        kernels.enable_jit_warmup = was_enabled


def register_remaining(layer: Any, vllm_config: Any) -> None:  # noqa: ANN401 - vLLM's layer and VllmConfig
    """Register the kernels of vLLM that a layer of attention runs though indexer and compressor are dsv4attn's.

    They make the metadata of windows and of compressed caches, and the norms of q and kv. vLLM compiles them ahead.
    """
    from vllm.models.common.ops import _FUSED_Q_KV_RMSNORM_KERNEL
    from vllm.v1.attention.backends.mla.compressor_utils import _COMPRESSED_SLOT_MAPPING_KERNEL
    from vllm.v1.attention.backends.mla.sparse_swa import (
        _COMPUTE_DSPARK_NONCAUSAL_SWA_INDICES_KERNEL,
        _COMPUTE_PREFILL_METADATA_KERNEL,
        _COMPUTE_SWA_INDICES_AND_LENS_KERNEL,
    )

    windows = {"window_size": layer.window_size, "block_size": layer.swa_cache_layer.block_size}
    images = {"max_image_tokens": layer.max_image_tokens} if hasattr(layer, "max_image_tokens") else {}
    _COMPUTE_PREFILL_METADATA_KERNEL.register_warmup()
    _COMPUTE_SWA_INDICES_AND_LENS_KERNEL.register_warmup(**windows, **images)
    _FUSED_Q_KV_RMSNORM_KERNEL.register_warmup()
    if layer.compress_ratio > 1:
        _COMPRESSED_SLOT_MAPPING_KERNEL.register_warmup()
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.use_dspark():
        drafts = {"num_speculative_tokens": speculative.num_speculative_tokens}
        _COMPUTE_DSPARK_NONCAUSAL_SWA_INDICES_KERNEL.register_warmup(**windows, **drafts)


@contextmanager
def without_mhc_warmup(vllm_config: Any) -> Iterator[None]:  # noqa: ANN401 - vLLM's VllmConfig
    """Let a model that is built here not register kernels of hyper-connections. Layers of attention still register.

    vLLM imports TileLang for the registration, which need not be installed where dsv4attn runs that part.
    """
    kernels = vllm_config.kernel_config
    was_enabled = kernels.enable_jit_warmup
    token = _asked_for_warmup.set(was_enabled if _asked_for_warmup.get() is None else _asked_for_warmup.get())
    kernels.enable_jit_warmup = False
    try:
        yield
    finally:
        kernels.enable_jit_warmup = was_enabled
        _asked_for_warmup.reset(token)

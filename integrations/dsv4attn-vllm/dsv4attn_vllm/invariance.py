"""vLLM's batch-invariant mode, `VLLM_BATCH_INVARIANT=1`: what refuses it.

In this mode the bits of a request do not depend on the other requests of a step. vLLM changes its linears, norms,
experts, sampler and all-reduce. Attention and the parts around it are invariant on a deterministic backend of dsv4attn.
"""

from __future__ import annotations

from typing import Any

from dsv4attn_vllm.guard import RefusedError
from dsv4attn_vllm.parts import COMPRESSOR, INDEXER, MHC, VARIABLE

SWITCH = "VLLM_BATCH_INVARIANT"
"""vLLM's variable."""

PLATFORMS = ("cuda",)
"""Where the mode is served, as `replacements.platform_name`. On other platforms vLLM's layers multiply by kernels that
the mode does not change (ROCm, CPU), or nothing of it was tried (Intel GPUs)."""

_NEEDED = (INDEXER, COMPRESSOR, MHC)
_MEGA_MOE = "mega_moe"


def is_invariant() -> bool:
    """Whether vLLM runs in its batch-invariant mode."""
    from vllm import envs

    return bool(envs.VLLM_BATCH_INVARIANT)


def check_invariance(vllm_config: Any, parts: frozenset[str], platform: str, *, v41: bool) -> None:  # noqa: ANN401
    """Raise RefusedError for what would make bits depend on the batch.

    vllm_config: vLLM's VllmConfig. parts: those around attention that run on dsv4attn. v41: whether the model is
    DeepSeek-V4.1, whose hyper-connections are vLLM's.
    """
    leave, name = f"leave {SWITCH} out", f"environment variable {SWITCH}"
    if platform not in PLATFORMS:
        expected = "unset: other parts of vLLM's layers on this platform depend on the batch, or were not tried"
        raise RefusedError(name, expected=expected, actual="1", cure=leave)
    if v41:
        expected = "unset for DeepSeek-V4.1, whose hyper-connections are vLLM's and depend on the number of tokens"
        raise RefusedError(name, expected=expected, actual="1", cure=leave)
    missing = [part for part in _NEEDED if part not in parts]
    if missing:
        expected = f"{', '.join(_NEEDED)} on dsv4attn, as vLLM's kernels of these parts depend on the batch"
        actual, cure = f"those of vLLM for {', '.join(missing)}", f"set {VARIABLE}=all, or {leave}"
        raise RefusedError(name, expected=expected, actual=actual, cure=cure)
    experts = vllm_config.kernel_config.moe_backend
    if _MEGA_MOE in experts:
        expected = "experts that are routed in the same way for any number of tokens"
        raise RefusedError("--moe-backend", expected=expected, actual=experts, cure=f"leave it out, or {leave}")

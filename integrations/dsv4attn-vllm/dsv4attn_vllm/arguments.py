"""Whether DeepSeek-V4 runs on dsv4attn, and what is refused when vLLM has resolved its arguments.

Where vLLM has an attention of its own for the device, dsv4attn must be asked for: by `--attention-backend DSV4ATTN` or
`CUSTOM`, or by `DSV4ATTN_VLLM=1`. Where vLLM has none, it is used if it is installed.

Nothing of vLLM is imported until it is needed: vLLM loads this package in every process.
"""

from __future__ import annotations

import os
import sys
from functools import wraps
from multiprocessing import parent_process
from typing import Any

from dsv4attn.integrations.variables import VLLM_PARTS
from dsv4attn_vllm.guard import GUARD, LOG, RefusedError

NAME = "DSV4ATTN"
"""What `--attention-backend` calls this package."""

_SWITCH = GUARD.engine.switch
_set_here: list[str] = []
"""The switch, if `share_request` has set it, for drafts and for the processes that vLLM starts."""


def has_attention_of_vllm() -> bool:
    """Whether an attention of vLLM's own for DeepSeek-V4 runs on this device.

    On CUDA vLLM's indexer needs DeepGEMM, which vLLM runs on sm_90, sm_100 and sm_120. On a CPU vLLM's builders cannot
    describe its layers.
    """
    from vllm.platforms import current_platform

    from dsv4attn_vllm.replacements import platform_name

    platform = platform_name()
    return current_platform.support_deep_gemm() if platform == "cuda" else platform != "cpu"


def backend_of_vllm(vllm_config: Any) -> str | None:  # noqa: ANN401 - vLLM's VllmConfig
    """The backend of vLLM's own that `--attention-backend` names."""
    requested = _requested(vllm_config)
    return None if requested in (None, NAME, "CUSTOM") else requested


def is_requested(vllm_config: Any = None) -> bool:  # noqa: ANN401 - as above
    """Whether the user asks for dsv4attn. vllm_config: None if it is not known yet.

    Raises RefusedError for a switch that is neither 0 nor 1.
    """
    return GUARD.is_requested() or _requested(vllm_config) in (NAME, "CUSTOM")


def is_used(vllm_config: Any = None) -> bool:  # noqa: ANN401 - as above
    """Whether layers of DeepSeek-V4 run on dsv4attn unless `--attention-backend` names one of vLLM's."""
    return is_requested(vllm_config) or not has_attention_of_vllm()


def share_request(vllm_config: Any) -> None:  # noqa: ANN401 - as above
    """Make a request by argument one by variable, until the arguments of the next model are resolved."""
    if is_requested(vllm_config) and not GUARD.is_requested():
        os.environ[_SWITCH] = "1"
        _set_here.append(_SWITCH)


def log_unused() -> None:
    """Say that this package is installed and not asked for. A warning if the user has chosen something for it."""
    without_effect = [name for name in ("DSV4ATTN_BACKEND", VLLM_PARTS) if os.environ.get(name, "").strip()]
    text = (
        "installed, but not asked for: vLLM's own attention runs DeepSeek-V4 on this device; --attention-backend %s or "
        "%s=1 asks for dsv4attn"
    )
    if without_effect:
        LOG.warning(text + "; until then %s has no effect", NAME, _SWITCH, " and ".join(without_effect))
    else:
        LOG.info(text, NAME, _SWITCH)


def _requested(vllm_config: Any) -> str | None:  # noqa: ANN401 - as above
    backend = None if vllm_config is None else vllm_config.attention_config.backend
    return None if backend is None else str(backend.name)


def prepare() -> None:
    """Let `--attention-backend` take NAME, and vLLM call `resolve` with its configuration. Any number of times."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    # a vLLM that is not served may lack this
    register = getattr(AttentionBackendEnum, "register", None)
    if register is not None and NAME not in AttentionBackendEnum.__members__:
        register(NAME, "dsv4attn_vllm.metadata.Backend")
    # workers, and the process that looks at model classes, resolve no arguments
    main = getattr(sys.modules["__main__"], "__spec__", None)
    is_inspection = getattr(main, "name", "") == "vllm.model_executor.models.registry"
    if "vllm.engine.arg_utils" in sys.modules or not (is_inspection or parent_process()):
        from vllm.engine.arg_utils import EngineArgs

        _wrap(EngineArgs)


def _wrap(arguments_class: Any) -> None:  # noqa: ANN401 - vLLM's EngineArgs
    """Call `resolve` with each configuration that vLLM makes of its arguments."""
    create = getattr(arguments_class, "create_engine_config", None)
    if create is None or hasattr(create, "of_dsv4attn"):
        return

    @wraps(create)
    def create_engine_config(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - vLLM's signature
        vllm_config = create(*args, **kwargs)
        resolve(vllm_config)
        return vllm_config

    create_engine_config.of_dsv4attn = True  # type: ignore[attr-defined]
    arguments_class.create_engine_config = create_engine_config


def resolve(vllm_config: Any) -> None:  # noqa: ANN401 - as above
    """Refuse what cannot be served, before a process is started or a weight is read.

    Models that are not DeepSeek-V4 are left alone, and so is vLLM where dsv4attn is not asked for. A request by
    argument becomes one by variable, for the processes that vLLM starts: a draft does not inherit the argument.
    Raises RefusedError, NoBackendError and UnknownNameError, as the layers do later for what is only known then.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from dsv4attn_vllm import ARCHITECTURES

    while _set_here:
        os.environ.pop(_set_here.pop(), None)
    model_config, attention = vllm_config.model_config, vllm_config.attention_config
    architectures = set(() if model_config is None else model_config.architectures) & ARCHITECTURES.keys()
    is_named = _requested(vllm_config) == NAME
    if not architectures:
        if is_named:
            actual, cure = "another model", "name another --attention-backend"
            raise RefusedError(f"--attention-backend {NAME}", expected="DeepSeek-V4", actual=actual, cure=cure)
        return
    v41 = any("V41" in name for name in architectures)
    if not is_used(vllm_config):
        log_unused()
        _follow(vllm_config, v41=v41)
        return
    if is_named:
        # a member that every process has
        attention.backend = AttentionBackendEnum.CUSTOM
    share_request(vllm_config)
    _refuse(vllm_config, v41=v41)
    _follow(vllm_config, v41=v41)


def _follow(vllm_config: Any, *, v41: bool) -> None:  # noqa: ANN401 - as above
    """Replace vLLM's names, or give them back, if an earlier model of this process was of the same kind."""
    module = sys.modules.get("dsv4attn_vllm.model")
    if module is not None:
        module.follow("v41" if v41 else "v4", vllm_config)


def _refuse(vllm_config: Any, *, v41: bool) -> None:  # noqa: ANN401 - as above
    """Refuse what the arguments, the variables and the device decide, unless vLLM's own layers will run."""
    from dsv4attn_vllm.replacements import PLATFORMS, V41_PLATFORMS, platform_name

    platform = platform_name()
    replaced = (V41_PLATFORMS if v41 else PLATFORMS).get(platform, ())
    chooses = any(replacement.is_choice for replacement in replaced)
    if not replaced or (chooses and backend_of_vllm(vllm_config) is not None):
        return
    GUARD.check()
    from dsv4attn_vllm.serving import check_arguments

    check_arguments(vllm_config, v41=v41)
    if platform == "rocm":
        refuse_monokernel(vllm_config)


def refuse_monokernel(vllm_config: Any) -> None:  # noqa: ANN401 - as above
    """Raise RefusedError for `--monokernel` of ROCm, which is an environment variable in vLLM 0.32."""
    from vllm import envs

    kernels = vllm_config.kernel_config
    is_option = hasattr(kernels, "monokernel")
    name = "--monokernel" if is_option else "environment variable VLLM_ROCM_MONO_DECODE"
    if kernels.monokernel if is_option else envs.VLLM_ROCM_MONO_DECODE:
        cure = f"leave {name.rsplit(maxsplit=1)[-1]} out"
        raise RefusedError(name, expected="off: it runs whole layers itself", actual="on", cure=cure)

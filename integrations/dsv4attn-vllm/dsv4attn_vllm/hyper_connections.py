"""vLLM's hyper-connections (mHC) on dsv4attn: its functions on CUDA, its custom ops elsewhere. Off unless asked for."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers import mhc

from dsv4attn import Backend
from dsv4attn.core.contract.layer_ops import LayerOps
from dsv4attn.core.torch_ops.arguments import MixWeights
from dsv4attn_vllm.guard import RefusedError
from dsv4attn_vllm.parts import MHC, VARIABLE, without_mhc_warmup
from dsv4attn_vllm.replacements import Replacement, original, replace

_serving: list[tuple[str, LayerOps]] = []
"""The backend of the first model by name, and its layer ops."""


def serve(backend: Backend) -> None:
    """Run hyper-connections on a backend, for every model of the process: vLLM's calls do not name their model.

    Raises RefusedError if an earlier model of the process runs on another backend.
    """
    if not _serving:
        _serving.append((backend.name, backend.layer_ops))
    elif (name := _serving[0][0]) != backend.name:
        expected = f"{name}, the backend of the model that was built first"
        cure = f"set DSV4ATTN_BACKEND to one backend for all models of a process, or leave {MHC} out of {VARIABLE}"
        raise RefusedError(MHC, expected=expected, actual=backend.name, cure=cure)


def _layer_ops() -> LayerOps:
    if not _serving:
        cure = "build the layers of the model first"
        raise RefusedError(MHC, expected="a backend", actual="none", cure=cure)
    return _serving[0][1]


# ---------------------------------------------------------------- vLLM's functions: names and arguments are vLLM's


def mhc_pre(
    residual: Tensor,
    fn: Tensor,
    hc_scale: Tensor,
    hc_base: Tensor,
    rms_eps: float,
    hc_pre_eps: float,
    hc_sinkhorn_eps: float,
    hc_post_mult_value: float,
    sinkhorn_repeat: int,
    n_splits: int = 1,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
) -> tuple[Tensor, Tensor, Tensor]:
    """(post [..., n, 1], comb [..., n, n], layer input [..., d]) of residual [..., n, d]. n_splits is not used."""
    constants = rms_eps, hc_pre_eps, hc_sinkhorn_eps, hc_post_mult_value, sinkhorn_repeat
    weights = MixWeights(fn, hc_scale, hc_base, *constants, norm_weight, norm_eps)
    post, comb, layer_input = _layer_ops().mhc_pre(_flat(residual, 2), weights)
    outer = residual.shape[:-2]
    return post.unflatten(0, outer), comb.unflatten(0, outer), layer_input.unflatten(0, outer)


def mhc_pre_broadcast(
    residual: Tensor,
    fn: Tensor,
    *mixes: Any,  # noqa: ANN401 - the other arguments of `mhc_pre`
    fn_broadcast: Tensor | None = None,
    **options: Any,  # noqa: ANN401
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(streams, post, comb, layer input) of the embedding [T, d], which all streams [T, n, d] begin with.

    The streams are a view of the embedding, which is read once for all of them.
    """
    count = fn.shape[1] // residual.shape[-1]
    streams = residual[:, None].expand(-1, count, -1)
    return streams, *mhc_pre(streams, fn, *mixes, **options)


def mhc_post(x: Tensor, residual: Tensor, post_layer_mix: Tensor, comb_res_mix: Tensor) -> Tensor:
    """New residual [..., n, d] from the output x [..., d] of a sublayer."""
    post, comb = _flat(post_layer_mix, 2), _flat(comb_res_mix, 2)
    return _layer_ops().mhc_post(_flat(x, 1), _flat(residual, 2), post, comb).view_as(residual)


def mhc_fused_post_pre(
    x: Tensor,
    residual: Tensor,
    post_layer_mix: Tensor,
    comb_res_mix: Tensor,
    fn: Tensor,
    hc_scale: Tensor,
    hc_base: Tensor,
    rms_eps: float,
    hc_pre_eps: float,
    hc_sinkhorn_eps: float,
    hc_post_mult_value: float,
    sinkhorn_repeat: int,
    n_splits: int = 1,
    tile_n: int = 1,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(residual, post, comb, layer input): `mhc_post`, then `mhc_pre` of its result. The tuning is not used."""
    constants = rms_eps, hc_pre_eps, hc_sinkhorn_eps, hc_post_mult_value, sinkhorn_repeat
    weights = MixWeights(fn, hc_scale, hc_base, *constants, norm_weight, norm_eps)
    results = _layer_ops().mhc_fused_post_pre(
        _flat(x, 1), _flat(residual, 2), _flat(post_layer_mix, 2), _flat(comb_res_mix, 2), weights
    )
    residual, post, comb, layer_input = (tensor.unflatten(0, residual.shape[:-2]) for tensor in results)
    return residual, post, comb, layer_input


def hc_head(
    hidden_states: Tensor, hc_fn: Tensor, hc_scale: Tensor, hc_base: Tensor, rms_norm_eps: float, hc_eps: float
) -> Tensor:
    """[..., d] of streams [..., n, d]."""
    out = _layer_ops().hc_head(_flat(hidden_states, 2), hc_fn, hc_scale, hc_base, rms_norm_eps, hc_eps)
    return out.unflatten(0, hidden_states.shape[:-2])


def _flat(tensor: Tensor, dims: int) -> Tensor:
    """Flatten all dims but the last `dims` into one."""
    return tensor.flatten(0, tensor.ndim - dims - 1)


# ---------------------------------------------------------------- vLLM's ops


class _PreOp(mhc.MHCPreOp):
    forward = staticmethod(mhc_pre)


class _PostOp(mhc.MHCPostOp):
    forward = staticmethod(mhc_post)


class _FusedPostPreOp(mhc.MHCFusedPostPreOp):
    forward = staticmethod(mhc_fused_post_pre)


class _HeadOp(mhc.HCHeadOp):
    forward = staticmethod(hc_head)


OPS = {"MHCPreOp": _PreOp, "MHCPostOp": _PostOp, "MHCFusedPostPreOp": _FusedPostPreOp, "HCHeadOp": _HeadOp}
"""By the name of vLLM's class: the class that vLLM constructs instead."""

_MODEL = "vllm.models.deepseek_v4.nvidia.model"
_NAMES = {
    "model": ("mhc_pre", "mhc_pre_broadcast", "mhc_post", "mhc_fused_post_pre", "hc_head"),
    "mtp": ("mhc_post", "hc_head"),
    "dspark": ("mhc_post", "hc_head"),
}
FUNCTIONS = tuple(
    Replacement(
        f"vllm.models.deepseek_v4.nvidia.{module}",
        "hc_head_fused_kernel_tilelang" if name == "hc_head" else f"{name}_tilelang",
        f"dsv4attn_vllm.hyper_connections:{name}",
    )
    for module, names in _NAMES.items()
    for name in names
)
"""The functions that vLLM's modules for CUDA call, which do not use the ops."""

CONSTRUCTORS = (
    Replacement(_MODEL, "DeepseekV4DecoderLayer.__init__", "dsv4attn_vllm.hyper_connections:build_decoder_layer"),
    Replacement(_MODEL, "DeepseekV4Model.__init__", "dsv4attn_vllm.hyper_connections:build_model"),
)
"""Where vLLM registers kernels of hyper-connections, to be compiled ahead."""


def build_decoder_layer(layer: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - vLLM's
    """Build a decoder layer of vLLM for CUDA, whose kernels of hyper-connections will not run."""
    with without_mhc_warmup(vllm_config):
        original(str(CONSTRUCTORS[0]))(layer, vllm_config, *args, **kwargs)


def build_model(model: Any, *, vllm_config: Any, **kwargs: Any) -> None:  # noqa: ANN401 - vLLM's
    """Build vLLM's model of decoder layers for CUDA, whose kernels of hyper-connections will not run."""
    with without_mhc_warmup(vllm_config):
        original(str(CONSTRUCTORS[1]))(model, vllm_config=vllm_config, **kwargs)


def install(platform: str) -> tuple[str, ...]:
    """Replace vLLM's hyper-connections on a platform, and return the names; a second call changes nothing.

    Ops are registered out of tree, for every model of the process. Raises RefusedError, before anything is replaced, if
    another plugin has done so or a name is missing.
    """
    if platform == "cuda":
        replace((*FUNCTIONS, *CONSTRUCTORS))
        return tuple(map(str, FUNCTIONS))
    for name, op in OPS.items():
        if op_registry_oot.get(name, op) is not op:
            actual, cure = f"{op_registry_oot[name]} of another plugin", f"leave {MHC} out of {VARIABLE}"
            raise RefusedError(name, expected="vLLM's own", actual=actual, cure=cure)
    for name in OPS.keys() - op_registry_oot.keys():
        getattr(mhc, name).register_oot(OPS[name])
    return tuple(OPS)

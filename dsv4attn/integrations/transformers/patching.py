"""`patch`: puts the attention of a model of transformers on pages, in place; `unpatch`: undoes it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dsv4attn.core.argument_checks import check_count, shown
from dsv4attn.core.cache.layout import Fp8Format, KVCacheLayout
from dsv4attn.core.contract.backend import Backend, Phase
from dsv4attn.core.contract.limits import Limits
from dsv4attn.core.contract.problem import CacheFacts, Problem
from dsv4attn.core.layer.attention_layer import DeepseekV4Attention
from dsv4attn.core.memory.workspace import WorkspaceManager
from dsv4attn.core.model.geometry import LayerKind, ModelGeometry, Rope
from dsv4attn.core.model.rope import cos_sin_cache, inverse_frequencies
from dsv4attn.errors import ArgumentError, UnknownNameError, UnsupportedError, did_you_mean
from dsv4attn.integrations.transformers.choice import checked_backend, config_of
from dsv4attn.integrations.transformers.pages import Pages
from dsv4attn.integrations.transformers.releases import ModelArguments, check_release
from dsv4attn.integrations.transformers.weights import attention_weights
from dsv4attn.selection import select_backend
from dsv4attn.serving.cache_manager import CacheManager

if TYPE_CHECKING:
    from dsv4attn.integrations.transformers.patched import PatchedModel

_LAYOUTS = ("fp8_ds_mla", "bf16", "fp32")
_ROWS = {"bf16": torch.bfloat16, "fp32": torch.float32}
_INDEX_LAYOUTS = ("index_fp8", "index_mxfp4", *_ROWS)
_MOST_TOKENS = 16384
"""New tokens in a call, unless the caller says otherwise: index buffers take some kB for each."""


def patch(
    model: Any,  # noqa: ANN401 - transformers is not imported yet
    backend: str | Backend | None = None,
    *,
    kv_layout: str | KVCacheLayout = "fp8_ds_mla",
    index_layout: str | KVCacheLayout | None = None,
    max_batch: int = 8,
    max_len: int | None = None,
    max_tokens: int | None = None,
    num_blocks: dict[str, int] | None = None,
    keep_windows: bool = False,
    deterministic: bool = False,
) -> PatchedModel:
    """Put the attention of a DeepSeek-V4 model of transformers on paged caches, in place: all of `self_attn`.

    Calls of the model and `generate` run on it from now on. Weights are shared, except those that are stored in another
    form: the projections of compressors as fp32, and fp8 as bf16. Names of parameters stay as they are. Weights that
    change are taken by the next call; `PatchedModel.refresh` says which changes are seen.

    model: a DeepseekV4Model or DeepseekV4ForCausalLM, in bf16 or fp32, on one device. backend: a name, "auto" or
    "decode=NAME,prefill=NAME", as in `select_backend`; or a backend that `load_backend` made; by default the choice of
    `select_backend`. kv_layout: of window and compressed caches: "fp8_ds_mla", "bf16", "fp32" or a layout.
    index_layout: of index keys: "index_fp8", "index_mxfp4", "bf16", "fp32" or a layout; default: see `CacheManager`.
    max_batch: most sequences of a call, and of all caches together if they are `max_len` long. max_len: most tokens of
    a sequence, by default 4096. max_tokens: most new tokens of a call, by default 16384. num_blocks, keep_windows: see
    `CacheManager`; keep_windows allows forks and crops to any length. deterministic: bits of a token's attention depend
    on the tokens before it alone.

    Returns the model's attribute `dsv4attn`: its pages, and what they hold.
    Raises UnsupportedError, ArgumentError, UnknownNameError or NoBackendError, with the model unchanged. A transformers
    that was not tested is refused: see `releases`.
    """
    check_release()
    inner = _inner(model)
    arguments = ModelArguments.of(type(inner))
    geometry = ModelGeometry.from_config(inner.config, name="config of the model")
    device, dtype = _place(model, inner, geometry)
    _check_rope(inner, geometry)
    if max_len is None:
        max_len = min(4096, geometry.max_position)
    if check_count("max_len", max_len, 1) > geometry.max_position:
        expected = f"at most {geometry.max_position}, the max_position_embeddings of the model"
        raise ArgumentError("max_len", expected=expected, actual=max_len)
    tokens = min(check_count("max_batch", max_batch, 1) * max_len, max(_MOST_TOKENS, max_batch))
    tokens = tokens if max_tokens is None else check_count("max_tokens", max_tokens, 1)
    layout = _layout(kv_layout, geometry)
    keys_layout = None if index_layout is None else _index_layout(index_layout, layout, geometry)
    loaded = _backend(backend, geometry, layout, dtype, device, max_len, deterministic=deterministic)
    limits = Limits(max_batch, tokens, max_len, single_phase=loaded.deterministic and not loaded.phases_agree)
    names = [f"layers.{i}.self_attn" for i in range(geometry.num_layers)]
    weights = [
        attention_weights(layer.self_attn, geometry, geometry.layer(i), name)
        for i, (layer, name) in enumerate(zip(inner.layers, names, strict=True))
    ]
    manager = CacheManager(
        geometry,
        limits,
        layout,
        index_layout=keys_layout,
        device=device,
        num_blocks=num_blocks,
        keep_windows=keep_windows,
        backend=loaded,
    )
    with torch.inference_mode(False), torch.no_grad():
        attentions = _attentions(geometry, limits, loaded, names, weights, device)
    for attention, caches in zip(attentions, manager.caches, strict=True):
        attention.bind_kv_cache(caches)
    # transformers' classes are subclassed there
    from dsv4attn.integrations.transformers.patched import PatchedModel

    patched = PatchedModel(model, inner, arguments, Pages(manager), attentions)
    patched.install()
    return patched


def unpatch(model: Any) -> None:  # noqa: ANN401
    """Put the modules back that `patch` replaced, with the same weights. Caches of the model are of no use then.

    Raises ArgumentError for a model that is not patched, UnsupportedError if it was wrapped by something else since.
    """
    Pages.of(model)
    model.dsv4attn.remove()


def _inner(model: Any) -> Any:  # noqa: ANN401
    """The `DeepseekV4Model` of a model. Raises UnsupportedError or ArgumentError for other models and patched ones."""
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4ForCausalLM, DeepseekV4Model

    config_of(model)
    if not isinstance(model, (DeepseekV4Model, DeepseekV4ForCausalLM)):
        hint = "for a wrapped model, pass the model inside"
        expected = "a DeepseekV4Model or a DeepseekV4ForCausalLM"
        raise UnsupportedError("model", expected=expected, actual=shown(model), hint=hint)
    inner = model.model if isinstance(model, DeepseekV4ForCausalLM) else model
    if hasattr(model, "dsv4attn") or hasattr(inner, "dsv4attn"):
        hint = "call unpatch(model) first"
        raise UnsupportedError("model", expected="one that is not patched", actual="a patched one", hint=hint)
    return inner


def _place(model: Any, inner: Any, geometry: ModelGeometry) -> tuple[torch.device, torch.dtype]:  # noqa: ANN401
    """Device and dtype of a model. Raises UnsupportedError unless all of it is in the memory of one device."""
    if getattr(model, "_tp_size", None) is not None or any(type(p).__name__ == "DTensor" for p in model.parameters()):
        hint = "load the model without tp_plan"
        raise UnsupportedError("model", expected="a model of one rank", actual="tensor parallel weights", hint=hint)
    tensors: list[Tensor] = [*model.parameters(), *model.buffers()]
    devices = sorted({str(tensor.device) for tensor in tensors})
    if devices != [devices[0]] or devices == ["meta"]:
        hint = "load it with device_map={'': device}, without offloading"
        raise UnsupportedError("model", expected="weights on one device", actual=", ".join(devices), hint=hint)
    if len(inner.layers) != geometry.num_layers:
        expected = f"the {geometry.num_layers} layers of its configuration"
        raise UnsupportedError("model", expected=expected, actual=f"{len(inner.layers)} layers")
    dtype = inner.layers[0].self_attn.q_a_proj.weight.dtype
    if dtype not in (torch.bfloat16, torch.float32) and dtype.itemsize > 1:
        hint = "load the model with dtype=torch.bfloat16"
        raise UnsupportedError("model", expected="weights in bfloat16 or float32", actual=dtype, hint=hint)
    return tensors[0].device, torch.bfloat16 if dtype.itemsize == 1 else dtype


_ROUNDING = 2 * torch.finfo(torch.bfloat16).eps
"""Largest relative difference of frequencies that is taken for a cast of the model to another dtype and back."""


def _check_rope(inner: Any, geometry: ModelGeometry) -> None:  # noqa: ANN401
    """Raise UnsupportedError if the model turns queries and keys by other angles than its configuration says here.

    transformers has values that are not DeepSeek-V4's for some of what is left out: cosines and sines are longer
    without an `attention_factor` in nested `rope_parameters`. And a configuration may have changed since the model was
    made.
    """
    ropes = {
        "main": Rope(geometry.rope_dim, geometry.main_theta),
        "compress": Rope(geometry.rope_dim, geometry.compress_theta, geometry.compress_yarn),
    }
    for table, rope in ropes.items():
        in_model = getattr(inner.rotary_emb, f"{table}_inv_freq").detach().cpu()
        in_model_factor = getattr(inner.rotary_emb, f"{table}_attention_scaling")
        configured = inverse_frequencies(rope).to(in_model.dtype)
        # a model in bf16 has its frequencies in bf16
        tolerance = max(1e-5, 2 * torch.finfo(in_model.dtype).eps)
        if (
            in_model.shape == configured.shape
            and in_model_factor == 1
            and torch.allclose(in_model, configured, rtol=tolerance, atol=0)
        ):
            continue
        if in_model.shape == configured.shape and in_model_factor == 1:
            off = ((in_model.double() - configured.double()) / configured.double()).abs()
            if float(off.max()) <= _ROUNDING:
                pair = int(off.argmax())
                expected = f"{float(configured[pair]):.8g} for pair {pair}, as its configuration says"
                actual = f"{float(in_model[pair]):.8g}, which was rounded by a cast"
                hint = (
                    "load the model in the dtype that it runs in; .half().float() and the like round buffers for good"
                )
                raise UnsupportedError(f"RoPE frequencies {table!r}", expected=expected, actual=actual, hint=hint)
        expected, actual = (
            f"{2 * len(inv)} rotated dims, the last pair by {float(inv[-1]):.3g} a token, with a factor of {factor:.4g}"
            for inv, factor in ((configured, 1.0), (in_model, in_model_factor))
        )
        hint = f"write rope_theta, partial_rotary_factor and attention_factor into rope_parameters[{table!r}]"
        raise UnsupportedError(f"RoPE {table!r} of the model", expected=expected, actual=actual, hint=hint)


def _layout(layout: str | KVCacheLayout, geometry: ModelGeometry) -> KVCacheLayout:
    if isinstance(layout, KVCacheLayout):
        return layout
    dims = geometry.head_dim - geometry.rope_dim, geometry.rope_dim
    if layout not in _LAYOUTS:
        raise UnknownNameError("kv_layout", str(layout), _LAYOUTS)
    if layout == "fp8_ds_mla":
        return KVCacheLayout.fp8_ds_mla(*dims)
    return KVCacheLayout.rows(*dims, dtype=_ROWS[layout])


def _index_layout(requested: object, layout: KVCacheLayout, geometry: ModelGeometry) -> KVCacheLayout:
    """The requested layout of index keys. layout: of the keys."""
    dim, rope = geometry.index_head_dim, geometry.rope_dim
    try:
        if requested == "index_fp8":
            return KVCacheLayout.index_fp8(dim, fp8_format=layout.fp8_format or Fp8Format.OCP)
        if requested == "index_mxfp4":
            return KVCacheLayout.index_mxfp4(dim)
    except ArgumentError as error:
        raise ArgumentError(
            "index_layout", expected=f"a layout for {dim} dims", actual=f"{requested!r} ({error})"
        ) from error
    if isinstance(requested, str) and requested in _ROWS:
        return KVCacheLayout.rows(dim - rope, rope, dtype=_ROWS[requested])
    if isinstance(requested, KVCacheLayout):
        if requested.name in ("index_fp8", "index_mxfp4", "rows") and requested.head_dim == dim:
            return requested
        actual = requested.fingerprint
    else:
        actual = shown(requested) + (did_you_mean(requested, _INDEX_LAYOUTS) if isinstance(requested, str) else "")
    expected = f"{', '.join(_INDEX_LAYOUTS)}, or a layout of index keys of {dim} dims"
    hint = "pass KVCacheLayout.index_fp8(...) or KVCacheLayout.index_mxfp4(...)"
    raise ArgumentError("index_layout", expected=expected, actual=actual, hint=hint)


def _backend(
    request: object,
    geometry: ModelGeometry,
    layout: KVCacheLayout,
    dtype: torch.dtype,
    device: torch.device,
    max_len: int,
    *,
    deterministic: bool,
) -> Backend:
    """The backend that was asked for, or selected for all kinds of layers of the model."""
    if isinstance(request, Backend):
        if deterministic and not request.deterministic:
            hint = f"pass load_backend({request.name!r}, deterministic=True)"
            raise ArgumentError("backend", expected="a deterministic one", actual=f"{request.name!r}", hint=hint)
        return request
    if request in _LAYOUTS:
        hint = f"kv_layout={request!r}?"
        raise ArgumentError("backend", expected="the name of a backend", actual=f"the layout {request!r}", hint=hint)
    request = checked_backend(request)
    assert request is None or isinstance(request, str)
    problems, window, of_q = [], CacheFacts.of(layout, 64), str(dtype).removeprefix("torch.")
    for layer in map(geometry.layer_of_kind, geometry.kinds):
        pages = None if layer.kind is LayerKind.SWA else CacheFacts.of(layout, 256 // layer.compress_ratio)
        columns = layer.table_columns(max_len) if layer.kind is LayerKind.HCA else layer.topk
        problems += [
            Problem(phase.value, layer, window, pages, columns, q_dtype=of_q, deterministic=deterministic)
            for phase in Phase
        ]
    return select_backend(*problems, backend=request, device=device)


def _attentions(
    geometry: ModelGeometry,
    limits: Limits,
    backend: Backend,
    names: list[str],
    weights: list[Any],
    device: torch.device,
) -> list[DeepseekV4Attention]:
    """The layers, which share scratch memory, tables of angles, and the buffer of selected entries."""
    workspace, tables, selected = WorkspaceManager(device), dict[Rope, Tensor](), None
    if LayerKind.CSA in geometry.kinds:
        shape = limits.max_num_batched_tokens, geometry.index_topk
        selected = torch.full(shape, -1, dtype=torch.int32, device=device)
    attentions = []
    for i, (name, layer_weights) in enumerate(zip(names, weights, strict=True)):
        layer = geometry.layer(i)
        if layer.rope not in tables:
            tables[layer.rope] = cos_sin_cache(layer.rope, limits.max_model_len, device)
        buffer = selected if layer.kind is LayerKind.CSA else None
        arguments = geometry, i, limits, backend, layer_weights
        attention = DeepseekV4Attention(
            name, *arguments, cos_sin_cache=tables[layer.rope], topk_indices_buffer=buffer, workspace=workspace
        )
        attentions.append(attention)
    return attentions

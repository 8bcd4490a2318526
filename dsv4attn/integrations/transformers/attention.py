"""`register`: attn_implementation "dsv4attn" of transformers, and the attention function that it names.

transformers calls the function once a layer, with the keys of window and compressor in one tensor and a mask that says
which query sees which of them. The backend gets these keys as rows and the visible ones as indices: no key is copied
for a head, and keys that no query sees are not read.

Letters of shapes are those of `core.model.geometry`, and N sequences of a batch, S query tokens and L keys of each.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from attrs import frozen
from torch import Tensor

from dsv4attn.core.cache.layout import KVCacheLayout, PagedKVCache
from dsv4attn.core.cache.selected_keys import GatheredKeys, PagedKeys
from dsv4attn.core.contract.backend import AttentionCall, Backend, KeyForm, Phase
from dsv4attn.core.contract.problem import CacheFacts, Problem
from dsv4attn.core.memory.workspace import WorkspaceManager
from dsv4attn.core.model.geometry import LayerGeometry, LayerKind, ModelGeometry, Rope
from dsv4attn.errors import ArgumentError, UnsupportedError
from dsv4attn.integrations.transformers.choice import checked_backend, config_of
from dsv4attn.integrations.transformers.masks import VisibleKeys
from dsv4attn.integrations.transformers.releases import check_release
from dsv4attn.selection import select_backend

NAME = "dsv4attn"
"""Of the attn_implementation."""
_DTYPES = (torch.bfloat16, torch.float32)
_EAGER = 'attn_implementation="eager"'


def register(backend: str | Backend | None = None) -> None:
    """Register attn_implementation "dsv4attn" for the DeepSeek-V4 of transformers, in this process.

    Models take it from `from_pretrained` or `from_config`, or later by `model.set_attn_implementation("dsv4attn")`.
    A further call replaces the backend, of models in use too.

    backend: NAME, "auto" or "decode=NAME,prefill=NAME", as in `select_backend`; or a backend that `load_backend` made.
    Default: `DSV4ATTN_BACKEND`, configuration file or automatic choice, in the first call on each device.

    Raises UnsupportedError for a transformers that was not tested (see `releases`), UnknownNameError for names that no
    backend has, ArgumentError for other values. A call of the model raises
    NoBackendError if no backend serves it; UnsupportedError for a model other than DeepSeek-V4, dtypes other than
    bfloat16 and float32, attention weights as output, dropout, gradients, and masks with biases.
    """
    check_release()
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask

    # a compiled model leaves its graph for the attention, whose launches are prepared on the host
    AttentionInterface.register(NAME, torch.compiler.disable(_Attention(checked_backend(backend))))
    AttentionMaskInterface.register(NAME, eager_mask)


@frozen(eq=False)
class _Plan:
    """Everything that the calls of a module share.

    key: device, heads, dtypes and scale of these calls.
    layer: geometry of the attention: all keys of a query are described as its window.
    layout: of the keys.
    backend: the one asked for, or selected.
    """

    key: tuple[object, ...]
    layer: LayerGeometry
    layout: KVCacheLayout
    backend: Backend


class _Attention:
    """transformers' attention function, with the backends and the scratch memory of one `register`."""

    def __init__(self, backend: str | Backend | None) -> None:
        self._requested = backend
        self._plans: WeakKeyDictionary[torch.nn.Module, _Plan] = WeakKeyDictionary()
        self._chosen: dict[tuple[object, ...], Backend] = {}
        # a workspace for each thread and stream: calls overwrite each other's scratch memory unless they run in order
        self._local = threading.local()

    def __call__(
        self,
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        s_aux: Tensor | None = None,
        **options: Any,  # noqa: ANN401 - any option of transformers
    ) -> tuple[Tensor, None]:
        """Attention of one layer.

        query: [N, H, S, D] bf16 or fp32 - normalised and rotated.
        key, value: [N, 1, L, D] bf16 or fp32 - one tensor.
        attention_mask: [N or 1, 1, S, L] - see `VisibleKeys.of_mask`; None: see `VisibleKeys.of_window`.
        scaling: softmax scale; D ** -0.5 if None. dropout: must be 0. s_aux: [H] - sinks.

        Returns (out [N, S, H, D] like query, None). A query without keys gets zeros.
        Raises the errors that `register` names, before anything is launched.
        """
        plan = self._plan(module, query, key, scaling)
        _check_inference(module, query, key, dropout, options)
        n, heads, s, dim = query.shape
        if value.data_ptr() != key.data_ptr() or key.shape != (n, 1, key.shape[-2], dim) or key.shape != value.shape:
            actual = f"{list(key.shape)} and {list(value.shape)}"
            raise ArgumentError("key, value", expected=f"one tensor [{n}, 1, L, {dim}] for both", actual=actual)
        if not isinstance(s_aux, Tensor) or s_aux.shape != (heads,):
            actual = "None" if s_aux is None else str(list(s_aux.shape))
            raise UnsupportedError("s_aux", expected=f"sinks of {heads} heads, as DeepSeek-V4 has", actual=actual)
        sinks, keys = s_aux.detach().to(torch.float32).contiguous(), key.shape[2]
        if n * s * heads == 0 or keys == 0:
            return query.new_zeros((n, s, heads, dim)), None
        if attention_mask is None:
            layer: Any = module
            window = layer.sliding_window if layer.compressor is None else None
            seen = VisibleKeys.of_window(n, s, keys, window, query.device)
        else:
            seen = VisibleKeys.of_mask(attention_mask, n, s, keys)
        if not seen.width:
            return query.new_zeros((n, s, heads, dim)), None
        q, out = query.transpose(1, 2).flatten(0, 1), query.new_empty((n * s, heads, dim))
        self._attend(Phase.DECODE if s == 1 else Phase.PREFILL, plan, q, key[:, 0].flatten(0, 1), seen, sinks, out)
        return out.view(n, s, heads, dim), None

    def _attend(
        self, phase: Phase, plan: _Plan, q: Tensor, rows: Tensor, seen: VisibleKeys, sinks: Tensor, out: Tensor
    ) -> None:
        """Call the backend. q, out: [N * S, H, D]. rows: [N * L, D]."""
        backend, capabilities, decode = plan.backend, plan.backend.capabilities, phase is Phase.DECODE
        indices = seen.indices(
            capabilities.decode_indices if decode else capabilities.prefill_indices, capabilities.index_alignment
        )
        keys: Sequence[PagedKeys] | GatheredKeys = GatheredKeys(rows, indices)
        if decode or capabilities.prefill_keys is KeyForm.PAGED:
            # pages of one row: slot numbers are row numbers
            keys = (PagedKeys(PagedKVCache(rows.unsqueeze(1), plan.layout), indices),)
        specs = backend.scratch(phase, plan.layer, q.shape[0], indices.width)
        caller = f"{NAME} in transformers, {phase.value}"
        scratch = self._workspace(q.device).get_simultaneous(*specs, arena=phase.value, caller=caller)
        call = AttentionCall(plan.layer, q, keys, sinks, out, None, scratch)
        (backend.decode if decode else backend.prefill)(call)

    def _workspace(self, device: torch.device) -> WorkspaceManager:
        """Scratch memory of this thread, on this device, for its current stream."""
        stream = 0 if device.type == "cpu" else torch.accelerator.current_stream(device).stream_id
        managers: dict[tuple[torch.device, int], WorkspaceManager] = self._local.__dict__.setdefault("managers", {})
        if (device, stream) not in managers:
            managers[device, stream] = WorkspaceManager(device)
        return managers[device, stream]

    def _plan(self, module: torch.nn.Module, query: Tensor, key: Tensor, scaling: float | None) -> _Plan:
        """The plan of a module's calls; made in the first one, and when device, heads, dtypes or scale change."""
        facts = (query.device, query.shape[1], query.shape[3], query.dtype, key.dtype, scaling)
        plan = self._plans.get(module)
        if plan is None or plan.key != facts:
            geometry = _geometry(module)
            if query.shape[3] != geometry.head_dim:
                expected = f"[N, H, S, {geometry.head_dim}], as the configuration has it"
                raise ArgumentError("query", expected=expected, actual=list(query.shape))
            for name, tensor in (("query", query), ("key", key)):
                if tensor.dtype not in _DTYPES:
                    hint = "load the model with dtype=torch.bfloat16"
                    raise UnsupportedError(name, expected="bfloat16 or float32", actual=tensor.dtype, hint=hint)
            layer = _layer(geometry, query.shape[1], scaling)
            layout = KVCacheLayout.rows(layer.nope_dim, layer.rope_dim, dtype=key.dtype)
            plan = self._plans[module] = _Plan(facts, layer, layout, self._backend(layer, layout, query))
        return plan

    def _backend(self, layer: LayerGeometry, layout: KVCacheLayout, query: Tensor) -> Backend:
        """The backend that was asked for, or selected for these calls."""
        requested = self._requested
        if requested is not None and not isinstance(requested, str):
            return requested
        key = (layer, layout.dtype, query.dtype, query.device)
        if key not in self._chosen:
            cache, dtype = CacheFacts.of(layout, 1), str(query.dtype).removeprefix("torch.")
            problems = [Problem(phase.value, layer, cache, q_dtype=dtype) for phase in Phase]
            self._chosen[key] = select_backend(*problems, backend=requested, device=query.device)
        return self._chosen[key]


def _check_inference(
    module: torch.nn.Module, query: Tensor, key: Tensor, dropout: float, options: dict[str, Any]
) -> None:
    """Raise UnsupportedError for features that only eager attention has."""
    config = getattr(module, "config", None)
    if options.get("output_attentions") or getattr(config, "output_attentions", False):
        expected, hint = "False: attention weights are never in memory", f"for the weights use {_EAGER}"
        raise UnsupportedError("output_attentions", expected=expected, actual=True, hint=hint)
    if dropout:
        hint = f"train with {_EAGER}, or call model.eval()"
        raise UnsupportedError("dropout", expected="0: this attention is for inference", actual=dropout, hint=hint)
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad):
        hint = f"call the model under torch.no_grad(), or model.generate; train with {_EAGER}"
        actual = "tensors that require gradients"
        raise UnsupportedError("query, key", expected="no gradients", actual=actual, hint=hint)


def _geometry(module: torch.nn.Module) -> ModelGeometry:
    """Geometry of the model of a DeepSeek-V4 attention module. Raises UnsupportedError for other modules."""
    config, kind = config_of(module)
    if config is None or kind != "deepseek_v4" or not hasattr(module, "sinks"):
        sinks = "" if hasattr(module, "sinks") else ", without sinks"
        actual = f"{type(module).__name__} of model type {kind!r}{sinks}"
        hint = f'use {_EAGER} or "sdpa" for this model'
        raise UnsupportedError("module", expected="an attention layer of deepseek_v4", actual=actual, hint=hint)
    return ModelGeometry.from_config(config, name="config of the model")


def _layer(geometry: ModelGeometry, heads: int, scaling: float | None) -> LayerGeometry:
    """The attention of all layers of a model as that of one kind: most keys that a query sees, in one segment."""
    ratios = {LayerKind.SWA: 0, LayerKind.CSA: geometry.index_topk}
    widest = max(ratios.get(kind, geometry.max_position // ratio) for kind, ratio in geometry.layers)
    # the angles are not used, because queries and keys are rotated already
    rope, window = Rope(geometry.rope_dim, geometry.main_theta), geometry.window + widest
    return LayerGeometry(LayerKind.SWA, 1, heads, geometry.head_dim, rope, window, 0, softmax_scale=scaling)

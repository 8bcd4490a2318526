"""Weights of an attention module of transformers under the names of DeepSeek's checkpoints, and `WeightsWatch`.

Layers of a patched model read aliases of its parameters, or copies of them. `WeightsWatch` sees that a parameter has
changed, and the layers take all weights again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dsv4attn.core.layer.attention_layer import DeepseekV4Attention
from dsv4attn.core.model.geometry import LayerGeometry, LayerKind, ModelGeometry
from dsv4attn.core.model.quantized_weight import Weight
from dsv4attn.core.model.tensor_state import Place, TensorState, have_changed
from dsv4attn.core.model.weights import AttentionWeights
from dsv4attn.errors import ArgumentError, UnsupportedError

_FP8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
_GROUPED = "DeepseekV4GroupedLinear"
_BLOCK_SCALED = ("FP8Linear", "FP8GroupedLinear")


def attention_weights(attention: Any, geometry: ModelGeometry, layer: LayerGeometry, name: str) -> AttentionWeights:  # noqa: ANN401
    """Weights of a `DeepseekV4Attention` of transformers: its own tensors, and its fp8 modules as they are.

    name: of the module, for errors. Raises UnsupportedError for a projection that is not a plain or block-scaled linear
    layer, such as an adapter's, or has a bias.
    """

    def linear(path: str) -> Weight:
        return _linear(attention.get_submodule(path), f"{name}.{path}")

    weights: dict[str, Weight] = {
        "wq_a": linear("q_a_proj"),
        "q_norm": attention.q_a_norm.weight.detach(),
        "wq_b": linear("q_b_proj"),
        "wkv": linear("kv_proj"),
        "kv_norm": attention.kv_norm.weight.detach(),
        "wo_a": linear("o_a_proj"),
        "wo_b": linear("o_b_proj"),
        "attn_sink": attention.sinks.detach(),
    }
    compressors = {"compressor.": "compressor"} if layer.kind is not LayerKind.SWA else {}
    if layer.kind is LayerKind.CSA:
        compressors["indexer.compressor."] = indexer = "compressor.indexer"
        weights["indexer.wq_b"] = linear(f"{indexer}.q_b_proj")
        weights["indexer.weights_proj"] = linear(f"{indexer}.scorer.weights_proj")
    for prefix, path in compressors.items():
        compressor = attention.get_submodule(path)
        weights[f"{prefix}wkv"], weights[f"{prefix}wgate"] = linear(f"{path}.kv_proj"), linear(f"{path}.gate_proj")
        weights[f"{prefix}ape"] = compressor.position_bias.detach()
        weights[f"{prefix}norm"] = compressor.kv_norm.weight.detach()
    return AttentionWeights.from_dict(weights, geometry, layer)


def _linear(module: Any, name: str) -> Weight:  # noqa: ANN401
    """The weight of a linear layer: its tensor, or the module itself if the weight is fp8."""
    kind, weight = type(module).__name__, getattr(module, "weight", None)
    fp8 = isinstance(weight, Tensor) and weight.dtype in _FP8
    # adapters have a `Linear` of their own, with a weight
    plain = type(module) is torch.nn.Linear or kind == _GROUPED
    if not isinstance(weight, Tensor) or not (kind in _BLOCK_SCALED or (plain and not fp8)):
        hint = "merge adapters into the model, and load it in bfloat16 or block-scaled fp8"
        raise UnsupportedError(name, expected="a linear layer in bf16, fp32 or fp8", actual=f"a {kind}", hint=hint)
    if getattr(module, "bias", None) is not None:
        raise UnsupportedError(name, expected="no bias, as DeepSeek-V4 has none", actual="a bias")
    return module if fp8 else weight.detach()


class WeightsWatch:
    """The weights of the layers of a patched model: noticed when they change, and taken again.

    modules: the attention of each layer, in transformers. attentions: the layers that were made of them.
    """

    def __init__(self, modules: list[torch.nn.Module], attentions: list[DeepseekV4Attention], names: list[str]) -> None:
        self._layers = [*zip(modules, attentions, names, strict=True)]
        self._places = self._found()
        self._was_loaded = False
        # a state dict that is loaded in inference mode writes what torch does not count
        self._hooks = [module.register_load_state_dict_post_hook(self._loaded) for module in modules]

    def _loaded(self, *_: object) -> None:
        self._was_loaded = True

    def check(self) -> None:
        """Take all weights again if a state dict was loaded, or a parameter has changed as `TensorState` sees it."""
        if self._was_loaded or have_changed(self._places):
            self.refresh()

    def remove(self) -> None:
        """Leave the modules."""
        for hook in self._hooks:
            hook.remove()

    def refresh(self) -> None:
        """Take all weights again; copies of them are made again in the same memory.

        Raises UnsupportedError for weights of another shape, dtype or device than those that `patch` found.
        """
        # states first: what is written meanwhile is seen later
        places = self._found()
        try:
            for module, attention, name in self._layers:
                attention.refresh(attention_weights(module, attention.geometry, attention.layer, name))
        except ArgumentError as error:
            hint = "unpatch(model), then patch it again"
            expected = "the weights that patch() found, or others of their shapes, dtypes and device"
            raise UnsupportedError("model", expected=expected, actual=f"others ({error})", hint=hint) from error
        self._places, self._was_loaded = places, False

    def _found(self) -> list[Place]:
        """All parameters of the layers, where their modules have them."""
        owners = [inner._parameters for module, _, _ in self._layers for inner in module.modules()]  # noqa: SLF001 - read in every step
        return [
            (owner, name, TensorState(value)) for owner in owners for name, value in owner.items() if value is not None
        ]

"""Weights of an attention module of transformers under the names of DeepSeek's checkpoints, and `WeightsWatch`.

Layers of a patched model read the parameters of the model, or copies of them. `WeightsWatch` sees that a parameter was
written or replaced, and the layers take all weights again.
"""

from __future__ import annotations

from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from dsv4attn.core.layer.attention_layer import DeepseekV4Attention
from dsv4attn.core.model.geometry import LayerGeometry, LayerKind, ModelGeometry
from dsv4attn.core.model.quantized_weight import Weight
from dsv4attn.core.model.tensor_state import TensorState
from dsv4attn.core.model.weights import AttentionWeights
from dsv4attn.core.reprs import fields_repr
from dsv4attn.errors import ArgumentError, UnsupportedError

__all__ = ["WeightsWatch", "attention_weights"]

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


@frozen(eq=False)
class _Seen:
    """The parameters of the layers as they were when the layers took them.

    places: owner's parameters, name, the tensor, and its state.
    samples: bytes of the parameters on other devices than the CPU, whose states have none.
    """

    places: tuple[tuple[dict[str, Any], str, Tensor, TensorState], ...]
    samples: Tensor | None

    __repr__ = fields_repr

    @classmethod
    def of(cls, modules: list[torch.nn.Module]) -> _Seen:
        """Of these modules and of all modules in them."""
        owners = [owner._parameters for module in modules for owner in module.modules()]  # noqa: SLF001 - read in every step
        parameters = [(owner, name, value) for owner in owners for name, value in owner.items() if value is not None]
        # states first: what is written meanwhile is seen later
        places = tuple((owner, name, value, TensorState(value)) for owner, name, value in parameters)
        return cls(places, _samples([value for *_, value in parameters if _is_on_device(value)]))

    def has_changed(self, *, sampled: bool) -> bool:
        """Whether a parameter was written, moved or replaced. sampled: whether bytes of other devices are compared."""
        for parameters, name, value, state in self.places:
            if parameters.get(name) is not value or not state.holds(value):
                return True
        if not sampled or self.samples is None:
            return False
        now = _samples([value for _, _, value, _ in self.places if _is_on_device(value)])
        return now is None or not torch.equal(now, self.samples)


class WeightsWatch:
    """The weights of the layers of a patched model: noticed when they change, and taken again.

    modules: the attention of each layer, in transformers. attentions: the layers that were made of them.
    """

    def __init__(self, modules: list[torch.nn.Module], attentions: list[DeepseekV4Attention], names: list[str]) -> None:
        self._layers = [*zip(modules, attentions, names, strict=True)]
        self._seen = _Seen.of(modules)

    def check(self, *, sampled: bool) -> None:
        """Take all weights again if one has changed. sampled: see `_Seen.has_changed`."""
        if self._seen.has_changed(sampled=sampled):
            self.refresh()

    def refresh(self) -> None:
        """Take all weights again; copies of them are made again in the same memory.

        Raises UnsupportedError for weights of another shape, dtype or device than those that `patch` found.
        """
        seen = _Seen.of([module for module, _, _ in self._layers])
        try:
            for module, attention, name in self._layers:
                attention.refresh(attention_weights(module, attention.geometry, attention.layer, name))
        except ArgumentError as error:
            hint = "unpatch(model), then patch it again"
            expected = "the weights that patch() found, or others of their shapes, dtypes and device"
            raise UnsupportedError("model", expected=expected, actual=f"others ({error})", hint=hint) from error
        self._seen = seen


_SAMPLES = 64
"""Elements of a parameter that are compared on a device."""


def _is_on_device(value: Tensor) -> bool:
    """Whether the host has no access to the memory of a tensor."""
    return value.device.type != "cpu"


def _samples(values: list[Tensor]) -> Tensor | None:
    """Bytes of elements that are spread over each of these tensors, together; None of no tensors."""
    parts: dict[torch.dtype, list[Tensor]] = {}
    for value in values:
        flat = value.detach().view(-1) if value.is_contiguous() else value.detach().reshape(-1)
        # numbers are compared by their bits: NaN is equal to itself
        parts.setdefault(value.dtype, []).append(flat[:: max(1, flat.numel() // _SAMPLES)])
    bytes_of = [
        torch.cat([sample.view(_BITS[dtype.itemsize]) for sample in samples]).view(torch.uint8)
        for dtype, samples in parts.items()
    ]
    return torch.cat(bytes_of) if bytes_of else None


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

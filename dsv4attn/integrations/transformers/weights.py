"""Weights of an attention module of transformers under the names of DeepSeek's checkpoints, and `WeightsWatch`."""

from __future__ import annotations

from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from dsv4attn.core.geometry import LayerGeometry, LayerKind, ModelGeometry
from dsv4attn.core.layer_weights import AttentionWeights
from dsv4attn.core.weights import Weight
from dsv4attn.errors import UnsupportedError

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

    found: dict[str, Weight] = {
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
    if layer.kind is LayerKind.C4A:
        compressors["indexer.compressor."] = indexer = "compressor.indexer"
        found["indexer.wq_b"] = linear(f"{indexer}.q_b_proj")
        found["indexer.weights_proj"] = linear(f"{indexer}.scorer.weights_proj")
    for prefix, path in compressors.items():
        one = attention.get_submodule(path)
        found[f"{prefix}wkv"], found[f"{prefix}wgate"] = linear(f"{path}.kv_proj"), linear(f"{path}.gate_proj")
        found[f"{prefix}ape"] = one.position_bias.detach()
        found[f"{prefix}norm"] = one.kv_norm.weight.detach()
    return AttentionWeights.from_dict(found, geometry, layer)


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
class WeightsWatch:
    """Finds changes of weights after layers were made of them: some of them are copies.

    seen: owner's parameters, name, the tensor, and its state at that time.
    """

    seen: tuple[tuple[dict[str, Any], str, Tensor, tuple[int, int]], ...]

    @classmethod
    def of(cls, modules: list[torch.nn.Module]) -> WeightsWatch:
        """Watch the parameters of these modules and of all in them."""
        owners = [owner for module in modules for owner in module.modules()]
        return cls(
            tuple(
                (owner._parameters, name, value, _state(value))  # noqa: SLF001 - read in every step
                for owner in owners
                for name, value in owner._parameters.items()  # noqa: SLF001
                if value is not None
            )
        )

    def check(self) -> None:
        """Raise UnsupportedError if a weight was written, moved or replaced."""
        for parameters, name, value, state in self.seen:
            if parameters.get(name) is not value or _state(value) != state:
                hint = "unpatch(model), then patch it again; do so around load_state_dict and to()"
                expected, actual = "the weights that patch() found", f"another {name}"
                raise UnsupportedError("model", expected=expected, actual=actual, hint=hint)


def _state(value: Tensor) -> tuple[int, int]:
    return value.data_ptr(), 0 if value.is_inference() else value._version  # noqa: SLF001

"""Weights of one attention layer under the names of DeepSeek's checkpoints, checked against the model's geometry."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from attrs import evolve
from torch import Tensor

from dsv4attn.core.argument_checks import check_type
from dsv4attn.core.model.geometry import LayerGeometry, LayerKind, LayerRole, ModelGeometry
from dsv4attn.core.model.quantized_weight import Weight
from dsv4attn.core.reprs import frozen
from dsv4attn.errors import ArgumentError, did_you_mean

__all__ = ["AttentionWeights", "CompressorWeights", "HyperConnectionWeights", "IndexerWeights", "weight_shapes"]


@frozen(eq=False)
class CompressorWeights:
    """Weights of a compressor of d dims. w is 2 d with overlap, d without.

    wkv: [w, hidden] - of kv.
    wgate: [w, hidden] - of the scores; None with V4.1's ratio 1.
    ape: [r, w] - added to the scores, by the position in a window; None in V4.1.
    norm: [d] - of the RMSNorm of an entry.
    """

    wkv: Weight
    wgate: Weight | None
    ape: Tensor | None
    norm: Tensor


@frozen(eq=False)
class IndexerWeights:
    """Weights of the indexer of a c4a layer.

    wq_b: [Hi * Di, q_lora_rank] - of its queries, from the latent of q.
    weights_proj: [Hi, hidden] - of the weights of its heads.
    compressor: of its keys; None in V4.1, whose keys are made of the latents of the layer's compressor.
    wk: [Di, D] - V4.1: of its keys, from latents, on layers that own a compressed cache.
    k_norm: [Di] - of the RMSNorm of these keys.
    """

    wq_b: Weight
    weights_proj: Weight
    compressor: CompressorWeights | None = None
    wk: Weight | None = None
    k_norm: Tensor | None = None


@frozen(eq=False)
class AttentionWeights:
    """Weights of one attention layer, on one rank.

    wq_a: [q_lora_rank, hidden] - latent of q.
    q_norm: [q_lora_rank] - of the RMSNorm of that latent.
    wq_b: [H * D, q_lora_rank] - q.
    wkv: [D, hidden] - keys.
    kv_norm: [D] - of the RMSNorm of keys.
    wo_a: [G * rank, H / G * D] - output, group by group; may be block-scaled fp8.
    wo_b: [hidden, G * rank] - output; may be block-scaled fp8.
    attn_sink: [H] - a logit for each head, or None.
    compressor: of layers that own a compressed cache.
    indexer: of layers that select entries.
    """

    wq_a: Weight
    q_norm: Tensor
    wq_b: Weight
    wkv: Weight
    kv_norm: Tensor
    wo_a: Weight
    wo_b: Weight
    attn_sink: Tensor | None
    compressor: CompressorWeights | None = None
    indexer: IndexerWeights | None = None

    @classmethod
    def from_dict(
        cls, weights: Mapping[str, Weight], geometry: ModelGeometry, layer: LayerGeometry | int
    ) -> AttentionWeights:
        """Weights by name, such as "wq_a" and "indexer.compressor.ape".

        weights: tensors, block-scaled weights or modules by name, without the layer's prefix.
        geometry: of the model, on this rank.
        layer: number of the layer, or its geometry; see `weight_shapes`.
        Raises ArgumentError for a name that is missing or unknown, and for a weight of another shape.
        """
        check_type("weights", weights, Mapping, cure="pass a dict of weights by name")
        shapes = weight_shapes(geometry, layer)
        missing, unknown = [name for name in shapes if name not in weights], [n for n in weights if n not in shapes]
        if unknown:
            bare = unknown[0].removesuffix(".weight")
            ends = max((name for name in shapes if f".{bare}".endswith(f".{name}")), key=len, default="")
            meant = f"; did you mean {ends!r}?" if ends else did_you_mean(bare, missing or shapes)
            expected = f"names of a {_shown(geometry, layer)} layer: {', '.join(shapes)}"
            raise ArgumentError("weights", expected=expected, actual=f"{unknown[0]!r}{meant}")
        if missing:
            raise ArgumentError(f"weights[{missing[0]!r}]", expected=f"a weight {shapes[missing[0]]}", actual="nothing")
        fields: dict[str, Any] = {name: value for name, value in weights.items() if "." not in name}
        compressor = _compressor(weights, "compressor.") if "compressor.wkv" in shapes else None
        indexer = None
        if "indexer.wq_b" in shapes:
            keys = _compressor(weights, "indexer.compressor.") if "indexer.compressor.wkv" in shapes else None
            own_keys: list[Any] = [weights.get(f"indexer.{name}") for name in ("wk", "k_norm")]
            indexer = IndexerWeights(weights["indexer.wq_b"], weights["indexer.weights_proj"], keys, *own_keys)
        loaded = cls(**fields, compressor=compressor, indexer=indexer)
        loaded.check(geometry, layer)
        return loaded

    def named(self) -> Iterator[tuple[str, Weight]]:
        """(name, weight) of every weight, as `from_dict` takes them."""
        yield from _named(self, "")

    def check(self, geometry: ModelGeometry, layer: LayerGeometry | int) -> None:
        """Raise ArgumentError for a weight that is missing or of another shape, naming it.

        geometry: of the model, on this rank.
        layer: number of the layer, or its geometry; see `weight_shapes`.
        """
        unchecked = dict(self.named())
        for name, shape in weight_shapes(geometry, layer).items():
            value = unchecked.pop(name, None)
            if value is None and name != "attn_sink":
                raise ArgumentError(f"weights.{name}", expected=f"a tensor {list(shape)}", actual=None)
            actual = _shape(value)
            if value is not None:
                _check_kind(f"weights.{name}", value, vector=len(shape) == 1 or name.endswith("ape"))
            if value is not None and actual != shape:
                hint = "pass the part of this rank" if name in _SHARDED else ""
                hint = "transpose it" if actual == shape[::-1] else hint
                shown = type(value).__name__ if actual is None else list(actual)
                raise ArgumentError(f"weights.{name}", expected=f"shape {list(shape)}", actual=shown, hint=hint)
        for name in unchecked:
            raise ArgumentError(
                f"weights.{name}", expected=f"none on a {_shown(geometry, layer)} layer", actual="a weight"
            )

    def shard(self, rank: int, size: int) -> AttentionWeights:
        """The weights of one rank of `size`: heads and output groups are divided, everything else is replicated.

        Tensors only: a block-scaled weight is divided before it is given. All parts share the memory of the whole
        weights: a layer sees what is written there.
        rank: 0 to `size` - 1.
        size: number of tensor-parallel ranks. It divides the heads and the output groups.
        """
        parts: dict[str, Any] = {}
        for name, dim in _SHARDED.items():
            value = getattr(self, name)
            if value is None:
                continue
            if not isinstance(value, Tensor) or value.shape[dim] % size:
                actual = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
                expected = f"a tensor whose dimension {dim} is a multiple of {size}"
                raise ArgumentError(f"weights.{name}", expected=expected, actual=actual)
            parts[name] = value.chunk(size, dim)[rank]
        return evolve(self, **parts)


@frozen(eq=False)
class HyperConnectionWeights:
    """Weights of the hyper-connections around a sublayer, fp32; n streams of d elements, m = 2 n + n * n.

    fn: [m, n * d] - of the mixes.
    base: [m] - added to them: pre, post, comb.
    scale: [3] - factor of each of the three.
    """

    fn: Tensor
    base: Tensor
    scale: Tensor

    def check(self, geometry: ModelGeometry) -> None:
        """Raise ArgumentError unless all have the shapes of the model, and two bytes or more an element.

        geometry: of the model.
        """
        n, d = geometry.hc_mult, geometry.hidden_size
        for name, shape in (("fn", (2 * n + n * n, n * d)), ("base", (2 * n + n * n,)), ("scale", (3,))):
            actual = _shape(getattr(self, name))
            if actual != shape:
                sizes = None if actual is None else list(actual)
                raise ArgumentError(f"hyper_connections.{name}", expected=f"shape {list(shape)}", actual=sizes)
            weight: Tensor = getattr(self, name)
            if not weight.is_floating_point() or weight.element_size() == 1:
                dtype = str(weight.dtype).removeprefix("torch.")
                raise ArgumentError(f"hyper_connections.{name}", expected="float32 or bfloat16", actual=dtype)


_SHARDED = {"wq_b": 0, "wo_a": 0, "wo_b": 1, "attn_sink": 0}
"""Weights that are divided among ranks, with the dimension."""


def weight_shapes(geometry: ModelGeometry, layer: LayerGeometry | int) -> dict[str, tuple[int, ...]]:
    """Shape of every weight of a layer, by name.

    layer: its number. Its geometry serves where that says all, which is not so where layers share compressed caches:
    there the role of a layer says which weights it has.
    """
    layer, role = _resolved(geometry, layer)
    hidden, lora, dim, heads = geometry.hidden_size, geometry.q_lora_rank, layer.head_dim, layer.num_heads
    rank, groups, index_dim = geometry.o_lora_rank, geometry.o_groups, geometry.index_head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "wq_a": (lora, hidden),
        "q_norm": (lora,),
        "wq_b": (heads * dim, lora),
        "wkv": (dim, hidden),
        "kv_norm": (dim,),
        "wo_a": (groups * rank, heads // groups * dim),
        "wo_b": (hidden, groups * rank),
        "attn_sink": (heads,),
    }

    def compressor(prefix: str, dim: int) -> dict[str, tuple[int, ...]]:
        width = 2 * dim if layer.overlap else dim
        parts = {"wkv": (width, hidden), "wgate": (width, hidden), "ape": (layer.compress_ratio, width), "norm": (dim,)}
        if geometry.shared_latent:
            del parts["ape"]
        if not layer.has_states:
            parts.pop("wgate", None)
        return {prefix + name: shape for name, shape in parts.items()}

    owns = role is LayerRole.FULL
    if owns:
        shapes |= compressor("compressor.", dim)
    if layer.kind is LayerKind.CSA and (owns or role is LayerRole.REINDEX):
        shapes["indexer.wq_b"] = geometry.index_n_heads * index_dim, lora
        shapes["indexer.weights_proj"] = geometry.index_n_heads, hidden
        if owns and geometry.shared_latent:
            shapes |= {"indexer.wk": (index_dim, dim), "indexer.k_norm": (index_dim,)}
        elif owns:
            shapes |= compressor("indexer.compressor.", index_dim)
    return shapes


def _resolved(geometry: ModelGeometry, layer: LayerGeometry | int) -> tuple[LayerGeometry, LayerRole]:
    """A layer, and its role. Raises ArgumentError if its geometry does not say the role."""
    if not isinstance(layer, LayerGeometry):
        return geometry.layer(layer), geometry.sources(layer).role
    roles = {geometry.sources(i).role for i, key in enumerate(geometry.layers) if key == layer.key}
    if layer.has_entries and geometry.sharing is not None and roles != {LayerRole.FULL}:
        expected = f"the number of the layer, as layers of {geometry.name} share compressed caches"
        hint = "pass i, not geometry.layer(i): the role of layer i says which weights it has"
        raise ArgumentError("layer", expected=expected, actual="a LayerGeometry", hint=hint)
    return layer, LayerRole.FULL if layer.has_entries else LayerRole.WINDOW_ONLY


def _shown(geometry: ModelGeometry, layer: LayerGeometry | int) -> str:
    """The kind of a layer; its role too where layers share compressed caches."""
    resolved, role = _resolved(geometry, layer)
    return resolved.kind.value if geometry.sharing is None else f"{role.value} {resolved.kind.value}"


def _compressor(weights: Mapping[str, Weight], prefix: str) -> CompressorWeights:
    parts: list[Any] = [weights.get(prefix + name) for name in ("wkv", "wgate", "ape", "norm")]
    return CompressorWeights(*parts)


def _named(owner: object, prefix: str) -> Iterator[tuple[str, Weight]]:
    for name in owner.__slots__:  # type: ignore[attr-defined] # of attrs classes
        value = getattr(owner, name, None)
        if isinstance(value, (CompressorWeights, IndexerWeights)):
            yield from _named(value, f"{prefix}{name}.")
        elif value is not None and not name.startswith("__"):
            yield prefix + name, value


def _check_kind(name: str, value: Weight, *, vector: bool) -> None:
    """Check that a weight is a tensor of a type that a layer computes with, or a matrix that is block-scaled."""
    if isinstance(value, Tensor):
        plain = value.dtype in (torch.bfloat16, torch.float32)
        if not plain and (vector or value.element_size() > 1 or value.dtype in (torch.uint8, torch.int8)):
            expected = "bfloat16 or float32" + ("" if vector else ", or fp8 with scales")
            dtype = str(value.dtype).removeprefix("torch.")
            raise ArgumentError(name, expected=expected, actual=dtype, hint="pass it .to(torch.bfloat16)")
    elif vector or not isinstance(getattr(value, "weight", None), Tensor):
        expected = "a tensor" if vector else "a tensor, a BlockScaledWeight, or a module with a weight"
        hint = "pass its .weight" if isinstance(getattr(value, "weight", None), Tensor) else ""
        raise ArgumentError(name, expected=expected, actual=type(value).__name__, hint=hint)


def _shape(value: Weight) -> tuple[int, ...] | None:
    """Shape of a tensor, or of the `weight` of something that has one; None of anything else, or if it is not known."""
    tensor = value if isinstance(value, Tensor) else getattr(value, "weight", None)
    if not isinstance(tensor, torch.Tensor) or torch.nn.parameter.is_lazy(tensor):
        return None
    return tuple(tensor.shape)

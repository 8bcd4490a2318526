"""Reads the geometry of a model from the fields of its Hugging Face configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from dsv4attn.core.layer_geometry import LayerKind, Yarn
from dsv4attn.core.sharing import LayerSharing
from dsv4attn.core.versions import is_v41
from dsv4attn.errors import GeometryError

__all__ = ["geometry_fields", "layers_of", "v41_layers"]

_KIND_OF_RATIO = {0: LayerKind.SWA, 1: LayerKind.SWA, 4: LayerKind.C4A, 128: LayerKind.C128A}
_KIND_OF_TYPE = {
    "sliding_attention": LayerKind.SWA,
    "compressed_sparse_attention": LayerKind.C4A,
    "heavily_compressed_attention": LayerKind.C128A,
}
_LAYER_SIZES = "q_lora_rank", "index_n_heads", "index_head_dim", "hc_mult", "hc_sinkhorn_iters"
"""Sizes of the layer around attention, which a configuration may leave to their defaults, those of transformers."""
_TYPE_OF_KIND = {kind: name for name, kind in _KIND_OF_TYPE.items()}


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(fields: Mapping[str, Any], key: str, name: str, default: float | None = None) -> float:
    value = fields.get(key)
    value = default if value is None else value
    if value is None:
        raise GeometryError(f"{name}: field {key!r} is missing")
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < float("inf"):
        raise GeometryError(f"{name}: field {key!r}: expected a positive number, got {value!r}")
    return float(value)


def geometry_fields(fields: dict[str, Any], name: str) -> dict[str, Any]:
    """The arguments of `ModelGeometry` that a configuration gives. Raises GeometryError for what is missing or wrong.

    fields: of the configuration. name: of the configuration, for errors.
    """
    v41 = is_v41(fields, name)
    if v41:
        fields = _text_fields(fields, name)

    def need(key: str) -> int:
        value = fields.get(key)
        if value is None:
            cure = "this is not the config.json of a DeepSeek-V4 or V4.1 model"
            raise GeometryError(f"{name}: field {key!r} is missing -> {cure}")
        if not _is_int(value) or value < 1:
            raise GeometryError(f"{name}: field {key!r}: expected a positive integer, got {value!r}")
        return value

    model_type = fields.get("model_type", "deepseek_v4")
    if not v41 and (not isinstance(model_type, str) or not model_type.startswith("deepseek_v4")):
        raise GeometryError(f"{name}: field 'model_type': expected 'deepseek_v4' or 'deepseek_v41', got {model_type!r}")
    head_dim = need("head_dim")
    if fields.get("qk_rope_head_dim") is not None:
        rope_dim = need("qk_rope_head_dim")
    elif fields.get("partial_rotary_factor") is not None:
        rope_dim = int(head_dim * _number(fields, "partial_rotary_factor", name))
    else:
        raise GeometryError(f"{name}: field 'qk_rope_head_dim' is missing, and 'partial_rotary_factor' too")
    main_theta, compress_theta, yarn = _rope_of(fields, name)
    sizes: dict[str, Any] = {key: need(key) for key in _LAYER_SIZES if fields.get(key) is not None}
    num_layers = need("num_hidden_layers")
    if v41:
        sizes |= {key: need(key) for key in ("q_lora_rank", "index_n_heads", "index_head_dim")}
        sizes |= {"layers": _v41_layers(fields, num_layers, name), "sharing": _sharing(fields, name)}
        sizes |= {"q_norm": _flag(fields, "q_head_norm", name), "shared_latent": True}
    else:
        sizes["layers"] = _layers_of(fields, num_layers, name)
    return dict(
        num_heads=need("num_attention_heads"),
        head_dim=head_dim,
        rope_dim=rope_dim,
        window=need("sliding_window"),
        index_topk=need("index_topk"),
        max_position=need("max_position_embeddings"),
        hidden_size=need("hidden_size"),
        o_groups=need("o_groups"),
        o_lora_rank=need("o_lora_rank"),
        main_theta=main_theta,
        compress_theta=compress_theta,
        compress_yarn=yarn,
        eps=_number(fields, "rms_norm_eps", name, None if v41 else 1e-6),
        hc_eps=_number(fields, "hc_eps", name, 1e-6),
        **sizes,
    )


def _layers_of(fields: dict[str, Any], num_layers: int, name: str) -> tuple[tuple[LayerKind, int], ...]:
    types, ratios = fields.get("layer_types"), fields.get("compress_ratios")
    given = types if types is not None else ratios
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise GeometryError(f"{name}: expected a list in 'layer_types' or 'compress_ratios', got {given!r}")
    if len(given) < num_layers:
        raise GeometryError(f"{name}: {len(given)} layers are described, but num_hidden_layers is {num_layers}")
    if types is None:
        for i, ratio in enumerate(given[:num_layers]):
            if not _is_int(ratio) or ratio not in _KIND_OF_RATIO:
                raise GeometryError(f"{name}: compress_ratios[{i}]: expected 0, 1, 4 or 128, got {ratio!r}")
        return layers_of(given[:num_layers])
    rates = _mapping(fields, "compress_rates", name)
    defaults = {LayerKind.C4A: 4, LayerKind.C128A: 128}
    ratio_of = {kind: rates.get(_TYPE_OF_KIND[kind], ratio) for kind, ratio in defaults.items()}
    for kind, ratio in ratio_of.items():
        if not _is_int(ratio) or ratio < 2:
            key = f"compress_rates[{_TYPE_OF_KIND[kind]!r}]"
            raise GeometryError(f"{name}: {key}: expected an integer above 1, got {ratio!r}")
    for i, layer_type in enumerate(given[:num_layers]):
        if not isinstance(layer_type, str) or layer_type not in _KIND_OF_TYPE:
            types = ", ".join(_KIND_OF_TYPE)
            raise GeometryError(f"{name}: layer_types[{i}]: expected one of {types}, got {layer_type!r}")
    kinds = [_KIND_OF_TYPE[layer_type] for layer_type in given[:num_layers]]
    return tuple((kind, ratio_of.get(kind, 1)) for kind in kinds)


def layers_of(ratios: Sequence[int]) -> tuple[tuple[LayerKind, int], ...]:
    """(kind, compress ratio) of each layer of V4; window-only layers have ratio 1, which some write as 0."""
    return tuple((_KIND_OF_RATIO[ratio], max(ratio, 1)) for ratio in ratios)


def v41_layers(ratios: Sequence[int]) -> tuple[tuple[LayerKind, int], ...]:
    """(kind, compress ratio) of each layer of V4.1: 0 is window-only, 1 and 2 are compressed caches."""
    return tuple((LayerKind.C4A, ratio) if ratio else (LayerKind.SWA, 1) for ratio in ratios)


def _v41_layers(fields: dict[str, Any], num_layers: int, name: str) -> tuple[tuple[LayerKind, int], ...]:
    """Layers past the list are window-only, as engines read it."""
    ratios = fields.get("compress_ratios")
    if not isinstance(ratios, Sequence) or isinstance(ratios, str):
        raise GeometryError(f"{name}: field 'compress_ratios': expected a list, got {ratios!r}")
    for i, ratio in enumerate(ratios[:num_layers]):
        if not _is_int(ratio) or ratio not in (0, 1, 2):
            cure = "a config with ratios 4 and 128 is one of 'deepseek_v4'"
            raise GeometryError(f"{name}: compress_ratios[{i}]: expected 0, 1 or 2, got {ratio!r} -> {cure}")
    return v41_layers([*ratios[:num_layers], *[0] * (num_layers - len(ratios))])


def _sharing(fields: dict[str, Any], name: str) -> LayerSharing:
    lists: list[tuple[int, ...]] = []
    for key in ("kv_source_layer_ids", "index_source_layer_ids"):
        ids = fields.get(key)
        if not isinstance(ids, Sequence) or isinstance(ids, str) or not all(map(_is_int, ids)):
            cure = "give the layers that own a compressed cache, or run an indexer"
            raise GeometryError(f"{name}: field {key!r}: expected a list of layer numbers, got {ids!r} -> {cure}")
        lists.append(tuple(ids))
    candidates = []
    for key, default in (("candidate_source_layer_id", -1), ("candidate_topk_blocks", 0), ("candidate_block_size", 0)):
        value = fields.get(key)
        value = default if value is None else value
        if not _is_int(value) or value < default:
            cure = "leave it out for none"
            raise GeometryError(f"{name}: field {key!r}: expected an integer from {default}, got {value!r} -> {cure}")
        candidates.append(value)
    kv, index = lists
    return LayerSharing(kv, index, *candidates)


def _flag(fields: Mapping[str, Any], key: str, name: str) -> bool:
    value = fields.get(key)
    if value is not None and not isinstance(value, bool):
        raise GeometryError(f"{name}: field {key!r}: expected true or false, got {value!r} -> leave it out for false")
    return bool(value)


def _text_fields(fields: dict[str, Any], name: str) -> dict[str, Any]:
    """Fields of a V4.1 configuration, with those of the nested text configuration on the top level."""
    text = fields.get("text_config")
    to_dict = getattr(text, "to_dict", None)
    text = to_dict() if to_dict else text
    if text is None:
        return fields
    if not isinstance(text, Mapping):
        raise GeometryError(f"{name}: field 'text_config': expected an object, got {text!r}")
    return {**fields, **{key: value for key, value in text.items() if value is not None}}


def _mapping(fields: Mapping[str, Any], key: str, name: str) -> Mapping[str, Any]:
    value = fields.get(key) or {}
    if not isinstance(value, Mapping):
        raise GeometryError(f"{name}: field {key!r}: expected an object, got {value!r}")
    return value


def _rope_of(fields: dict[str, Any], name: str) -> tuple[float, float, Yarn | None]:
    """(main theta, compress theta, YaRN of the compress table) from either spelling of a config."""
    given = _mapping(fields, "rope_parameters", name) or _mapping(fields, "rope_scaling", name)
    main = given["main"] if isinstance(given.get("main"), Mapping) else {}
    compress = given["compress"] if isinstance(given.get("compress"), Mapping) else given
    main_theta = _number(main, "rope_theta", name, _number(fields, "rope_theta", name, 10000.0))
    compress_theta = _number(fields, "compress_rope_theta", name, 160000.0)
    if compress is not given:
        compress_theta = _number(compress, "rope_theta", name, compress_theta)
    scaling = compress.get("rope_type", compress.get("type", "default"))
    if scaling == "default":
        return main_theta, compress_theta, None
    if scaling != "yarn":
        raise GeometryError(f"{name}: rope_type: expected 'default' or 'yarn', got {scaling!r}")
    what = f"{name}: YaRN parameters"
    factor, length = (_number(compress, key, what) for key in ("factor", "original_max_position_embeddings"))
    fast, slow = _number(compress, "beta_fast", what, 32.0), _number(compress, "beta_slow", what, 1.0)
    return main_theta, compress_theta, Yarn(factor, int(length), fast, slow)

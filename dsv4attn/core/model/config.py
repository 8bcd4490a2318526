"""Reads the geometry of a model from the fields of its Hugging Face configuration."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard

from dsv4attn.core.model.cross_layer_sharing import LayerSharing
from dsv4attn.core.model.layer_geometry import LayerKind, Yarn
from dsv4attn.core.model.unread_fields import refuse_unread
from dsv4attn.errors import ArgumentError, GeometryError, did_you_mean

__all__ = ["geometry_fields", "is_v41", "layers_of", "refuse_v41", "v41_layers"]

_KIND_OF_RATIO = {0: LayerKind.SWA, 1: LayerKind.SWA, 4: LayerKind.CSA, 128: LayerKind.HCA}
_KIND_OF_TYPE = {
    "sliding_attention": LayerKind.SWA,
    "compressed_sparse_attention": LayerKind.CSA,
    "heavily_compressed_attention": LayerKind.HCA,
}
_LAYER_SIZES = "q_lora_rank", "index_n_heads", "index_head_dim", "hc_mult", "hc_sinkhorn_iters"
"""Sizes of the layer around attention, which a configuration may leave to their defaults, those of transformers."""
_OLDER_RATES = {LayerKind.CSA: "compress_rate_csa", LayerKind.HCA: "compress_rate_hca"}
_TABLES = "main", "compress"
"""Keys of nested RoPE parameters: of window-only layers, and of all others."""
_YARN_KEYS = "factor", "original_max_position_embeddings", "beta_fast", "beta_slow"
_ONE = "leave one of the two out"
_OBEYED = {"attention_factor": 1.0, "truncate": True}
"""Parameters that have one value in DeepSeek-V4. Nothing here scales cosines or sines, whatever mscale is."""
_ROPE_KEYS = (
    *("rope_type", "type", "rope_theta", "partial_rotary_factor", *_YARN_KEYS, *_OBEYED, "mscale", "mscale_all_dim"),
    *("rope_dim", "is_deepseek_v4"),
)
"""Keys of RoPE parameters that are understood; vLLM adds the last two."""
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
    refuse_unread(fields, name, v41=v41)
    head_dim = need("head_dim")
    rope_dim = _rope_dim(fields, name, head_dim, need)
    main_theta, compress_theta, yarn = _rope_of(fields, name, head_dim, rope_dim)
    sizes: dict[str, Any] = {key: need(key) for key in _LAYER_SIZES if fields.get(key) is not None}
    num_layers = need("num_hidden_layers")
    if v41:
        sizes |= {key: need(key) for key in ("q_lora_rank", "index_n_heads", "index_head_dim")}
        sizes |= {"layers": _v41_layers(fields, num_layers, name), "sharing": _sharing(fields, num_layers, name)}
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


def _rope_dim(fields: Mapping[str, Any], name: str, head_dim: int, need: Callable[[str], int]) -> int:
    """Rotated dims of a head, which a configuration gives as a number, or as a part of the head, or as both."""
    is_given = fields.get("qk_rope_head_dim") is not None
    if fields.get("partial_rotary_factor") is None:
        if not is_given:
            raise GeometryError(f"{name}: field 'qk_rope_head_dim' is missing, and 'partial_rotary_factor' too")
        return need("qk_rope_head_dim")
    rotated = int(head_dim * _number(fields, "partial_rotary_factor", name))
    if is_given and need("qk_rope_head_dim") != rotated:
        factor = f"partial_rotary_factor={fields['partial_rotary_factor']!r}, which is {rotated} of {head_dim}"
        expected = f"qk_rope_head_dim={fields['qk_rope_head_dim']} rotated dims"
        raise GeometryError(f"{name}: expected {expected}, got {factor} -> leave one of the two out")
    return rotated


def _layers_of(fields: dict[str, Any], num_layers: int, name: str) -> tuple[tuple[LayerKind, int], ...]:
    types, ratios = fields.get("layer_types"), fields.get("compress_ratios")
    described = types if types is not None else ratios
    if not isinstance(described, Sequence) or isinstance(described, str):
        raise GeometryError(f"{name}: expected a list in 'layer_types' or 'compress_ratios', got {described!r}")
    if len(described) < num_layers:
        raise GeometryError(f"{name}: {len(described)} layers are described, but num_hidden_layers is {num_layers}")
    if types is None:
        return _layers_of_ratios(fields, described[:num_layers], name)
    layers = _layers_of_types(fields, described[:num_layers], name)
    if ratios is not None:
        _check_ratios(ratios, layers, described, name)
    return layers


def _layers_of_ratios(
    fields: Mapping[str, Any], ratios: Sequence[object], name: str
) -> tuple[tuple[LayerKind, int], ...]:
    numbers = []
    for i, ratio in enumerate(ratios):
        if not _is_int(ratio) or ratio not in _KIND_OF_RATIO:
            raise GeometryError(f"{name}: compress_ratios[{i}]: expected 0, 1, 4 or 128, got {ratio!r}")
        numbers.append(ratio)
    layers = layers_of(numbers)
    rates = _rates(fields, name, dict(layers))
    for kind, ratio in layers:
        if rates.get(kind, ratio) != ratio:
            actual = f"{rates[kind]} as the rate of {_TYPE_OF_KIND[kind]} layers"
            cure = "give layer_types instead of compress_ratios"
            raise GeometryError(f"{name}: compress_ratios: expected {ratio}, as they say, got {actual} -> {cure}")
    return layers


def _layers_of_types(
    fields: Mapping[str, Any], types: Sequence[object], name: str
) -> tuple[tuple[LayerKind, int], ...]:
    ratio_of = _rates(fields, name, {LayerKind.CSA: 4, LayerKind.HCA: 128})
    kinds = []
    for i, layer_type in enumerate(types):
        if not isinstance(layer_type, str) or layer_type not in _KIND_OF_TYPE:
            known = ", ".join(_KIND_OF_TYPE)
            raise GeometryError(f"{name}: layer_types[{i}]: expected one of {known}, got {layer_type!r}")
        kinds.append(_KIND_OF_TYPE[layer_type])
    return tuple((kind, ratio_of.get(kind, 1)) for kind in kinds)


def _check_ratios(ratios: object, layers: Sequence[tuple[LayerKind, int]], types: Sequence[str], name: str) -> None:
    """Raise GeometryError where `compress_ratios` describe other layers than `layer_types`.

    ratios: of the configuration. layers: kind and ratio of each, as `layer_types` and the rates say. types: of the
    configuration. name: of the configuration, for errors.
    """
    ratios = _checked_ratios(ratios, name)
    if len(ratios) < len(layers):
        actual = f"{len(ratios)} in compress_ratios"
        raise GeometryError(f"{name}: expected {len(layers)} layers, as layer_types has, got {actual} -> {_ONE}")
    for i, (kind, ratio) in enumerate(layers):
        allowed = (0, 1) if kind is LayerKind.SWA else (ratio,)
        if not _is_int(ratios[i]) or ratios[i] not in allowed:
            expected = f"{' or '.join(map(str, allowed))}, as layer_types[{i}]={types[i]!r} says"
            cure = "correct one of the two lists, or leave it out"
            raise GeometryError(f"{name}: compress_ratios[{i}]: expected {expected}, got {ratios[i]!r} -> {cure}")


def _checked_ratios(ratios: object, name: str) -> Sequence[Any]:
    if not isinstance(ratios, Sequence) or isinstance(ratios, str):
        raise GeometryError(f"{name}: field 'compress_ratios': expected a list, got {ratios!r}")
    return ratios


def _rates(fields: Mapping[str, Any], name: str, defaults: Mapping[LayerKind, int]) -> dict[LayerKind, int]:
    """The compress ratio of each kind of layers, from `compress_rates` or the older scalars."""
    rates = _mapping(fields, "compress_rates", name)
    thetas = {}
    for kind, older in _OLDER_RATES.items():
        new, old = rates.get(_TYPE_OF_KIND[kind]), fields.get(older)
        key = f"compress_rates[{_TYPE_OF_KIND[kind]!r}]"
        if old is not None and new not in (None, old):
            raise GeometryError(f"{name}: {key}: expected {older}={old!r}, got {new!r} -> leave one of the two out")
        ratio = defaults.get(kind) if old is None and new is None else old if new is None else new
        if ratio is not None and (not _is_int(ratio) or ratio < 2):
            raise GeometryError(f"{name}: {key if old is None else older}: expected an integer above 1, got {ratio!r}")
        if ratio is not None:
            thetas[kind] = ratio
    return thetas


def layers_of(ratios: Sequence[int]) -> tuple[tuple[LayerKind, int], ...]:
    """(kind, compress ratio) of each layer of V4; window-only layers have ratio 1, which some write as 0."""
    return tuple((_KIND_OF_RATIO[ratio], max(ratio, 1)) for ratio in ratios)


def v41_layers(ratios: Sequence[int]) -> tuple[tuple[LayerKind, int], ...]:
    """(kind, compress ratio) of each layer of V4.1: 0 is window-only, 1 and 2 are compressed caches."""
    return tuple((LayerKind.CSA, ratio) if ratio else (LayerKind.SWA, 1) for ratio in ratios)


def _v41_layers(fields: dict[str, Any], num_layers: int, name: str) -> tuple[tuple[LayerKind, int], ...]:
    """Layers past the list are window-only, as engines read it."""
    ratios = _checked_ratios(fields.get("compress_ratios"), name)
    for i, ratio in enumerate(ratios[:num_layers]):
        if not _is_int(ratio) or ratio not in (0, 1, 2):
            cure = "a config with ratios 4 and 128 is one of 'deepseek_v4'"
            raise GeometryError(f"{name}: compress_ratios[{i}]: expected 0, 1 or 2, got {ratio!r} -> {cure}")
    return v41_layers([*ratios[:num_layers], *[0] * (num_layers - len(ratios))])


def _sharing(fields: dict[str, Any], num_layers: int, name: str) -> LayerSharing:
    """Sources past the last layer are absent, as engines read a configuration with fewer layers."""
    lists: list[tuple[int, ...]] = []
    for key in ("kv_source_layer_ids", "index_source_layer_ids"):
        ids = fields.get(key)
        if not isinstance(ids, Sequence) or isinstance(ids, str) or not all(map(_is_int, ids)):
            cure = "give the layers that own a compressed cache, or run an indexer"
            raise GeometryError(f"{name}: field {key!r}: expected a list of layer numbers, got {ids!r} -> {cure}")
        lists.append(tuple(i for i in ids if i < num_layers))
    candidates = []
    for key, default in (("candidate_source_layer_id", -1), ("candidate_topk_blocks", 0), ("candidate_block_size", 0)):
        value = fields.get(key)
        value = default if value is None else value
        if not _is_int(value) or value < default:
            cure = "leave it out for none"
            raise GeometryError(f"{name}: field {key!r}: expected an integer from {default}, got {value!r} -> {cure}")
        candidates.append(value)
    if candidates[0] >= num_layers:
        candidates[0] = -1
    kv, index = lists
    return LayerSharing(kv, index, *candidates)


def _flag(fields: Mapping[str, Any], key: str, name: str) -> bool:
    value = fields.get(key)
    if value is not None and not isinstance(value, bool):
        raise GeometryError(f"{name}: field {key!r}: expected true or false, got {value!r} -> leave it out for false")
    return bool(value)


def _text_fields(fields: dict[str, Any], name: str) -> dict[str, Any]:
    """Fields of a V4.1 configuration, with those of the nested text configuration on the top level."""
    text = _text_config(fields)
    if text is None:
        return fields
    if not isinstance(text, Mapping):
        raise GeometryError(f"{name}: field 'text_config': expected an object, got {text!r}")
    return {**fields, **{key: value for key, value in text.items() if value is not None}}


def _text_config(fields: Mapping[str, Any]) -> object:
    """The nested text configuration, as fields if it is an object of transformers; None if there is none."""
    text = fields.get("text_config")
    to_dict = getattr(text, "to_dict", None)
    return to_dict() if to_dict else text


def _mapping(fields: Mapping[str, Any], key: str, name: str) -> Mapping[str, Any]:
    value = fields.get(key) or {}
    if not isinstance(value, Mapping):
        raise GeometryError(f"{name}: field {key!r}: expected an object, got {value!r}")
    return value


def _rope_of(fields: dict[str, Any], name: str, head_dim: int, rope_dim: int) -> tuple[float, float, Yarn | None]:
    """(main theta, compress theta, YaRN of the compress table) of a configuration, as transformers reads it.

    `rope_scaling` is read if it says anything, and `rope_parameters` otherwise. Either is flat, which describes the
    compress table, or has the keys "main" and "compress". What transformers would not read, or this package would not
    obey, is refused, unless it says the same as what is read. Absent keys have the values of DeepSeek-V4: no factor on
    cosines and sines, and `rope_dim` rotated dims.
    """
    scaling, parameters = (_mapping(fields, key, name) for key in ("rope_scaling", "rope_parameters"))
    source, dims = f"{name}: {'rope_scaling' if scaling else 'rope_parameters'}", (head_dim, rope_dim)
    thetas = _number(fields, "rope_theta", name, 10000.0), _number(fields, "compress_rope_theta", name, 160000.0)
    flat, parts = _parts(scaling or parameters)
    compress: Mapping[str, Any] = flat
    where = source
    if all(key in parts for key in _TABLES):
        main, compress = (parts.pop(key) for key in _TABLES)
        of_main, where = f"{source}.main", f"{source}.compress"
        thetas = _number(main, "rope_theta", of_main, thetas[0]), _number(compress, "rope_theta", where, thetas[1])
        if _is_yarn(main, of_main):
            raise GeometryError(f"{of_main}: rope_type: expected 'default', got 'yarn' -> V4 scales 'compress' only")
        _check_obeyed(main, of_main, None, dims)
    if parts:
        cure = "write 'main' and 'compress', both, in their place"
        raise GeometryError(f"{source}: expected the keys 'main' and 'compress', or none, got {[*parts]} -> {cure}")
    yarn = _yarn_of(compress, where)
    _check_obeyed(compress, where, yarn, dims)
    _check_said(flat, source, "", yarn, thetas, dims)
    if scaling:
        flat, parts = _parts(parameters)
        for key, part in {"": flat, **parts}.items():
            _check_said(part, f"{name}: rope_parameters{'.' if key else ''}{key}", key, yarn, thetas, dims)
    return (*thetas, yarn)


def _parts(fields: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Mapping[str, Any]]]:
    """Flat parameters, and those of each table or layer type by its name."""
    parts = {key: fields[key] for key in (*_TABLES, *_KIND_OF_TYPE) if isinstance(fields.get(key), Mapping)}
    return {key: value for key, value in fields.items() if key not in parts}, parts


def _is_yarn(part: Mapping[str, Any], where: str) -> bool:
    """Whether parameters are those of YaRN; null counts as absent, and `rope_type` wins over `type`."""
    kind = part.get("rope_type")
    kind = part.get("type") if kind is None else kind
    # engines call the YaRN of DeepSeek's models deepseek_yarn in configurations that they have loaded
    if kind not in (None, "default", "yarn", "deepseek_yarn"):
        raise GeometryError(f"{where}: rope_type: expected 'default' or 'yarn', got {kind!r}")
    return kind in ("yarn", "deepseek_yarn")


def _yarn_of(part: Mapping[str, Any], where: str) -> Yarn | None:
    if not _is_yarn(part, where):
        return None
    what = f"{where}: YaRN parameters"
    factor, length = (_number(part, key, what) for key in ("factor", "original_max_position_embeddings"))
    fast, slow = _number(part, "beta_fast", what, 32.0), _number(part, "beta_slow", what, 1.0)
    return Yarn(factor, int(length), fast, slow)


def _check_obeyed(part: Mapping[str, Any], where: str, yarn: Yarn | None, dims: tuple[int, int]) -> None:
    """Raise GeometryError for parameters that this package does not know or does not obey.

    yarn: what was read of them. dims: of a head, and the rotated ones.
    """
    head_dim, rope_dim = dims
    for key, value in part.items():
        if value is None:
            continue
        if key not in _ROPE_KEYS:
            known = ", ".join(_ROPE_KEYS)
            raise GeometryError(f"{where}: unknown key {key!r}{did_you_mean(str(key), _ROPE_KEYS)} (known: {known})")
        if key in _YARN_KEYS and yarn is None:
            cure = f"give rope_type 'yarn', or leave {key} out"
            raise GeometryError(f"{where}: {key!r} is one of YaRN's parameters, without YaRN -> {cure}")
        if key in _OBEYED and value != _OBEYED[key]:
            raise GeometryError(f"{where}: {key}: expected {_OBEYED[key]}, the value of DeepSeek-V4, got {value!r}")
        rotated = int(head_dim * _number(part, key, where)) if key == "partial_rotary_factor" else value
        if key in ("partial_rotary_factor", "rope_dim") and rotated != rope_dim:
            actual = f"{value!r}, which is {rotated} of {head_dim}"
            raise GeometryError(f"{where}: {key}: expected qk_rope_head_dim={rope_dim}, got {actual}")


def _check_said(
    part: Mapping[str, Any],
    where: str,
    table: str,
    yarn: Yarn | None,
    thetas: tuple[float, float],
    dims: tuple[int, int],
) -> None:
    """Raise GeometryError for parameters that say something else than what was read.

    where: for errors. table: the table or layer type that they are of; "" for flat ones. yarn, thetas: what was read:
    of the compress table, and of both. dims: see `_check_obeyed`.
    """
    main = table in ("main", "sliding_attention")
    scaled = None if main else yarn
    if _is_yarn(part, where) and scaled is None:
        raise GeometryError(f"{where}: rope_type: expected 'default', as was read before, got 'yarn' -> {_ONE}")
    _check_obeyed(part, where, scaled, dims)
    read: dict[str, tuple[float, ...]] = {"rope_theta": (thetas[0 if main else 1],) if table else thetas}
    if scaled is not None:
        values = scaled.factor, scaled.original_max_position, scaled.beta_fast, scaled.beta_slow
        read |= {key: (value,) for key, value in zip(_YARN_KEYS, values, strict=True)}
    for key, allowed in read.items():
        if part.get(key) is not None and _number(part, key, where) not in allowed:
            expected = " or ".join(f"{value:g}" for value in allowed)
            # transformers does not read a flat rope_theta
            cure = _ONE if len(allowed) == 1 else "write it as rope_theta or compress_rope_theta, on the top level"
            raise GeometryError(f"{where}: {key}: expected {expected}, as was read before, got {part[key]!r} -> {cure}")


_FIELDS = ("kv_source_layer_ids", "index_source_layer_ids", "candidate_source_layer_id", "engram_layer_ids")
"""Fields of DeepSeek-V4.1 configurations that those of V4 do not have."""


def is_v41(fields: Mapping[str, Any], name: str) -> bool:
    """Whether a configuration is one of DeepSeek-V4.1, in which ratio 1 is a compressed cache.

    fields: of a Hugging Face configuration. name: of the configuration, for errors. V4.1 is recognised by `model_type`
    or `architectures`, in the nested text configuration too. Without a `model_type`, a ratio of 4 or 128 means V4;
    otherwise a field that only V4.1 has, or a ratio of 1 next to others, is an ArgumentError: it may be either.
    """
    if _said(fields) is not None:
        return True
    for level in _levels(fields):
        ratios = level.get("compress_ratios")
        numbers = [n for n in ratios if isinstance(n, int)] if isinstance(ratios, Sequence) else []
        if level.get("model_type") is not None or 4 in numbers or 128 in numbers:
            continue
        hint = "set model_type to 'deepseek_v41', where a layer of ratio 1 has a compressed cache, or to 'deepseek_v4'"
        for key in _FIELDS:
            if level.get(key) is not None:
                expected = "none without a model_type"
                raise ArgumentError(f"{name}: field {key!r}", expected=expected, actual=repr(level[key]), hint=hint)
        if 1 in numbers and len({*numbers}) > 1:
            expected, actual = "no 1 next to other ratios without a model_type", sorted({*numbers})
            raise ArgumentError(f"{name}: field 'compress_ratios'", expected=expected, actual=actual, hint=hint)
    return False


def refuse_v41(fields: Mapping[str, Any], name: str) -> None:
    """Raise ArgumentError for a configuration that says that it is DeepSeek-V4.1, where only V4 is served.

    fields: of a Hugging Face configuration. name: of the configuration, for errors.
    """
    answer = _said(fields)
    if answer is not None:
        hint = "DeepSeek-V4.1 is not served yet: its layers of ratio 1 have a compressed cache"
        key, value = answer
        raise ArgumentError(f"{name}: field {key!r}", expected="that of DeepSeek-V4", actual=repr(value), hint=hint)


def _levels(fields: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The fields, and those of the nested text configuration."""
    text = _text_config(fields)
    return [fields, text] if isinstance(text, Mapping) else [fields]


def _said(fields: Mapping[str, Any]) -> tuple[str, str] | None:
    """The field, and its value, that names DeepSeek-V4.1."""
    for level in _levels(fields):
        for key in ("model_type", "architectures"):
            values = level.get(key)
            for value in values if isinstance(values, (list, tuple)) else (values,):
                if isinstance(value, str) and re.search(r"deepseek[-_]?v4[._-]?1", value, re.IGNORECASE):
                    return key, value
    return None

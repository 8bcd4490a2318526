"""The geometry of a DeepSeek-V4 model's attention: heads, dims, window, the schedule of layers.

Letters used in every shape of this package:

    T  tokens in a batch          H  query heads           D  head dim (nope + rope, rope is the trailing part)
    R  requests in a batch        K  selected keys         W  sliding window
    B  blocks (pages) of a cache  P  records per block     r  compress ratio of a layer (1, or e.g. 4 and 128)
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

from attrs import evolve, field, frozen, validators

from dsv4attn.core.layer_geometry import TABLE_COLUMNS, LayerGeometry, LayerKind, Rope, Yarn
from dsv4attn.core.versions import refuse_v41
from dsv4attn.errors import ArgumentError, GeometryError, UnknownNameError

__all__ = ["PRESETS", "TABLE_COLUMNS", "LayerGeometry", "LayerKind", "ModelGeometry", "Rope", "Yarn"]


_KIND_OF_RATIO = {0: LayerKind.SWA, 1: LayerKind.SWA, 4: LayerKind.C4A, 128: LayerKind.C128A}
_KIND_OF_TYPE = {
    "sliding_attention": LayerKind.SWA,
    "compressed_sparse_attention": LayerKind.C4A,
    "heavily_compressed_attention": LayerKind.C128A,
}
_LAYER_SIZES = "q_lora_rank", "index_n_heads", "index_head_dim", "hc_mult", "hc_sinkhorn_iters"
"""Sizes of the layer around attention, which a configuration may leave to their defaults, those of transformers."""
_TYPE_OF_KIND = {kind: name for name, kind in _KIND_OF_TYPE.items()}
_positive = validators.ge(1)


@frozen
class ModelGeometry:
    """Attention geometry of a whole model. Build it with `from_config` or `preset`.

    num_heads: H - query heads. head_dim: D - elements of a head. rope_dim: how many of them, the trailing ones, rotate.
    window: W - tokens of the sliding window. index_topk: K - entries that the indexer selects for a c4a query.
    layers: (kind, compress ratio) of each layer, MTP layers excluded: those are window-only.
    max_position: longest context, in tokens. hidden_size: elements of a token between layers.
    o_groups: G - groups of heads in the output projection. o_lora_rank: elements that it makes of each group.
    main_theta: base of the RoPE frequencies of window-only layers. compress_theta: base of the other layers.
    compress_yarn: frequency scaling of the other layers, or None. eps: epsilon of the RMSNorms. q_lora_rank: elements
    of the latent that both q and the indexer's q are projected from. index_n_heads: Hi - heads of the indexer.
    index_head_dim: Di - elements of an index head and index key; the trailing `rope_dim` rotate. hc_mult: streams
    of hyper-connections. hc_sinkhorn_iters: their normalisations. hc_eps: their epsilon. name: for messages.
    q_norm: whether each head of q is normalised, as in V4; in V4.1 it is not.
    """

    num_heads: int = field(validator=_positive)
    head_dim: int = field(validator=_positive)
    rope_dim: int = field(validator=_positive)
    window: int = field(validator=_positive)
    index_topk: int = field(validator=_positive)
    layers: tuple[tuple[LayerKind, int], ...]
    max_position: int = field(validator=_positive)
    hidden_size: int = field(validator=_positive)
    o_groups: int = field(validator=_positive)
    o_lora_rank: int = field(validator=_positive)
    main_theta: float = 10000.0
    compress_theta: float = 160000.0
    compress_yarn: Yarn | None = None
    eps: float = 1e-6
    name: str = "custom"
    q_lora_rank: int = field(default=1024, validator=_positive)
    index_n_heads: int = field(default=64, validator=_positive)
    index_head_dim: int = field(default=128, validator=_positive)
    hc_mult: int = field(default=4, validator=_positive)
    hc_sinkhorn_iters: int = field(default=20, validator=_positive)
    hc_eps: float = 1e-6
    q_norm: bool = True

    def __attrs_post_init__(self) -> None:
        if not 0 < self.rope_dim < self.head_dim or self.rope_dim % 2:
            expected = f"an even number below head_dim={self.head_dim}"
            raise GeometryError(f"qk_rope_head_dim: expected {expected}, got {self.rope_dim}")
        if self.num_heads % self.o_groups:
            raise GeometryError(f"o_groups: expected a divisor of {self.num_heads} heads, got {self.o_groups}")
        if self.index_head_dim < self.rope_dim:
            expected = f"at least qk_rope_head_dim={self.rope_dim}"
            raise GeometryError(f"index_head_dim: expected {expected}, got {self.index_head_dim}")
        if not self.layers:
            raise GeometryError("layers: expected at least one layer, got none")

    @property
    def num_layers(self) -> int:
        """Layers without the MTP ones."""
        return len(self.layers)

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The kinds this model has, in the order swa, c4a, c128a."""
        present = {kind for kind, _ in self.layers}
        return tuple(kind for kind in LayerKind if kind in present)

    def count(self, kind: LayerKind) -> int:
        """Return how many layers are of this kind."""
        return sum(k is kind for k, _ in self.layers)

    def layer(self, index: int) -> LayerGeometry:
        """Geometry of layer `index`; an index at or past the last layer is an MTP layer, which is window-only."""
        if index < 0:
            raise ArgumentError("layer index", expected=">= 0", actual=index)
        kind, ratio = self.layers[index] if index < self.num_layers else (LayerKind.SWA, 1)
        return self._layer(kind, ratio)

    def layer_of_kind(self, kind: LayerKind | str) -> LayerGeometry:
        """Geometry shared by all layers of a kind."""
        try:
            kind = LayerKind(kind)
        except ValueError:
            raise UnknownNameError("layer kind", str(kind), [k.value for k in LayerKind]) from None
        ratios = {LayerKind.SWA: 1, **dict(reversed(self.layers))}  # of the first layer of each kind
        if kind not in ratios:
            raise UnknownNameError(f"layer kind of {self.name}", kind.value, [k.value for k in self.kinds])
        return self._layer(kind, ratios[kind])

    def _layer(self, kind: LayerKind, ratio: int) -> LayerGeometry:
        theta, yarn = (self.main_theta, None) if kind is LayerKind.SWA else (self.compress_theta, self.compress_yarn)
        rope = Rope(self.rope_dim, theta, yarn)
        topk = self.index_topk if kind is LayerKind.C4A else 0
        sizes = self.num_heads, self.head_dim, rope, self.window, topk, self.eps
        return LayerGeometry(kind, ratio, *sizes, q_norm=self.q_norm)

    def tensor_parallel(self, size: int) -> ModelGeometry:
        """Geometry of one rank: heads and output groups are divided, everything else is replicated."""
        if size < 1 or self.num_heads % size or self.o_groups % size:
            expected = f"a common divisor of {self.num_heads} heads and {self.o_groups} output groups"
            raise ArgumentError("tensor parallel size", expected=expected, actual=size)
        return evolve(self, num_heads=self.num_heads // size, o_groups=self.o_groups // size)

    @classmethod
    def preset(cls, name: str) -> ModelGeometry:
        """Geometry of a released model: `deepseek-v4-flash` (or `flash`) and `deepseek-v4-pro` (or `pro`)."""
        key = name.lower()
        key = key if key.startswith("deepseek-v4-") else f"deepseek-v4-{key}"
        if key not in PRESETS:
            raise UnknownNameError("model", name, [*PRESETS, *(n.rsplit("-", 1)[1] for n in PRESETS)])
        return PRESETS[key]

    @classmethod
    def from_config(cls, config: str | Path | Mapping[str, Any] | object, *, name: str = "") -> ModelGeometry:
        """Read a Hugging Face configuration.

        config: a path to `config.json` or to the folder that holds it, a dict, or a config object.
        Layers come from `layer_types`, else from `compress_ratios`; entries past `num_hidden_layers` belong to MTP
        layers and are dropped. Without either the schedule is an error: the default of transformers is not the
        schedule of any released model. Raises GeometryError for what is missing or wrong, and ArgumentError for
        DeepSeek-V4.1, which is not served yet.
        """
        if isinstance(config, (str, Path)):
            path = Path(config)
            path = path / "config.json" if path.is_dir() else path
            name = name or str(path)
            config = _read_json(path)
        to_dict = getattr(config, "to_dict", None)
        fields = config if isinstance(config, Mapping) else to_dict() if to_dict else getattr(config, "__dict__", None)
        if fields is None:
            raise GeometryError(f"config: expected a path, a dict or a config object, got {type(config).__name__}")
        # in transformers this is an attribute only
        rope_dim = fields.get("qk_rope_head_dim", getattr(config, "qk_rope_head_dim", None))
        return _from_fields({**fields, "qk_rope_head_dim": rope_dim}, name or "config")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        presets = ", ".join(PRESETS)
        raise GeometryError(f"{path}: no such file -> give a config.json, its folder, or one of {presets}") from None
    except (json.JSONDecodeError, UnicodeDecodeError, OSError) as error:
        raise GeometryError(f"{path}: not a readable JSON file: {error}") from error
    if not isinstance(fields, dict):
        raise GeometryError(f"{path}: expected a JSON object, got {type(fields).__name__}")
    return fields


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


def _from_fields(fields: dict[str, Any], name: str) -> ModelGeometry:
    def need(key: str) -> int:
        value = fields.get(key)
        if value is None:
            cure = "this is not the config.json of a DeepSeek-V4 model"
            raise GeometryError(f"{name}: field {key!r} is missing -> {cure}")
        if not _is_int(value) or value < 1:
            raise GeometryError(f"{name}: field {key!r}: expected a positive integer, got {value!r}")
        return value

    refuse_v41(fields, name)
    model_type = fields.get("model_type", "deepseek_v4")
    if not isinstance(model_type, str) or not model_type.startswith("deepseek_v4"):
        raise GeometryError(f"{name}: field 'model_type': expected 'deepseek_v4', got {model_type!r}")
    head_dim = need("head_dim")
    if fields.get("qk_rope_head_dim") is not None:
        rope_dim = need("qk_rope_head_dim")
    elif fields.get("partial_rotary_factor") is not None:
        rope_dim = int(head_dim * _number(fields, "partial_rotary_factor", name))
    else:
        raise GeometryError(f"{name}: field 'qk_rope_head_dim' is missing, and 'partial_rotary_factor' too")
    main_theta, compress_theta, yarn = _rope_of(fields, name)
    sizes: dict[str, Any] = {key: need(key) for key in _LAYER_SIZES if fields.get(key) is not None}
    return ModelGeometry(
        num_heads=need("num_attention_heads"),
        head_dim=head_dim,
        rope_dim=rope_dim,
        window=need("sliding_window"),
        index_topk=need("index_topk"),
        layers=_layers_of(fields, need("num_hidden_layers"), name),
        max_position=need("max_position_embeddings"),
        hidden_size=need("hidden_size"),
        o_groups=need("o_groups"),
        o_lora_rank=need("o_lora_rank"),
        main_theta=main_theta,
        compress_theta=compress_theta,
        compress_yarn=yarn,
        eps=_number(fields, "rms_norm_eps", name, 1e-6),
        hc_eps=_number(fields, "hc_eps", name, 1e-6),
        name=name,
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
        return _layers(given[:num_layers])
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


def _layers(ratios: Sequence[int]) -> tuple[tuple[LayerKind, int], ...]:
    """(kind, compress ratio) of each layer; window-only layers have ratio 1, which configurations may write as 0."""
    return tuple((_KIND_OF_RATIO[ratio], max(ratio, 1)) for ratio in ratios)


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


def _released(name: str, ratios: list[int], *sizes: int) -> ModelGeometry:
    """sizes: heads, hidden size, q_lora_rank, selected entries, output groups."""
    heads, hidden, lora, topk, groups = sizes
    attention: dict[str, Any] = {"num_heads": heads, "head_dim": 512, "rope_dim": 64, "window": 128, "index_topk": topk}
    around: dict[str, Any] = {"max_position": 1_048_576, "hidden_size": hidden, "q_lora_rank": lora, "o_groups": groups}
    yarn = Yarn(16.0, 65536)
    return ModelGeometry(
        **attention, **around, layers=_layers(ratios), o_lora_rank=1024, compress_yarn=yarn, name=f"deepseek-v4-{name}"
    )


PRESETS: Mapping[str, ModelGeometry] = {
    "deepseek-v4-flash": _released("flash", [0, 0, *[4, 128] * 20, 4], 64, 4096, 1024, 512, 8),
    "deepseek-v4-pro": _released("pro", [128, 128, *[4, 128] * 29, 4], 128, 7168, 1536, 1024, 16),
}
"""The released models, from their public config.json files."""

"""The geometry of a DeepSeek-V4 or V4.1 model's attention: heads, dims, window, the schedule of layers.

Letters used in every shape of this package:

    T  tokens in a batch          H  query heads           D  head dim (nope + rope, rope is the trailing part)
    R  requests in a batch        K  selected keys         W  sliding window
    B  blocks (pages) of a cache  P  records per block     r  compress ratio of a layer (e.g. 4 and 128; 1 and 2)
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import evolve, field, frozen

from dsv4attn.core.argument_checks import at_least, check_count, check_type
from dsv4attn.core.model.config import geometry_fields, layers_of, v41_layers
from dsv4attn.core.model.cross_layer_sharing import LayerRole, LayerSharing, LayerSources
from dsv4attn.core.model.layer_geometry import TABLE_COLUMNS, LayerGeometry, LayerKind, Rope, Yarn
from dsv4attn.errors import ArgumentError, GeometryError, UnknownNameError

__all__ = [
    "PRESETS",
    "SHORT_NAMES",
    "TABLE_COLUMNS",
    "LayerGeometry",
    "LayerKind",
    "LayerRole",
    "LayerSharing",
    "LayerSources",
    "ModelGeometry",
    "Rope",
    "Yarn",
]


_positive = at_least(1)
_LATENT_RATIOS = (1, 2)
"""Tokens of an entry whose latent is shared with the index key: those of DeepSeek-V4.1."""


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
    q_norm: whether each head of q is normalised, as in V4; in V4.1 it is not. sharing: layers that share compressed
    caches and selected entries (V4.1); None: each layer has its own. shared_latent: whether index keys are made of the
    latent of the layer's own compressor, whose entries do not overlap and which has no state at ratio 1 (V4.1); in V4
    the indexer has a compressor of its own, and entries of c4a layers overlap.
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
    sharing: LayerSharing | None = None
    shared_latent: bool = False

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
        if self.shared_latent:
            self._check_shared_latent()
        if self.sharing is not None:
            self.sharing.check(self.layers)

    def _check_shared_latent(self) -> None:
        for i, (kind, ratio) in enumerate(self.layers):
            if kind is not LayerKind.SWA and (kind is not LayerKind.CSA or ratio not in _LATENT_RATIOS):
                expected = "window-only layers, and c4a layers of ratio 1 or 2, with shared_latent=True"
                actual = f"a {kind.value} layer of ratio {ratio} at {i}"
                raise GeometryError(f"layers: expected {expected}, got {actual} -> leave out shared_latent for V4")
        if self.sharing is None:
            hint = "pass LayerSharing(...), or leave out shared_latent for V4"
            raise GeometryError(f"sharing: expected a LayerSharing with shared_latent=True, got None -> {hint}")

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
        """Return how many layers are of this kind.

        kind: the kind to count.
        """
        return sum(k is kind for k, _ in self.layers)

    def layer(self, index: int) -> LayerGeometry:
        """Geometry of layer `index`; an index at or past the last layer is an MTP layer, which is window-only.

        index: number of the layer, from 0.
        """
        check_count("layer index", index, 0)
        kind, ratio = self.layers[index] if index < self.num_layers else (LayerKind.SWA, 1)
        return self._layer(kind, ratio)

    def layer_of_kind(self, kind: LayerKind | str, compress_ratio: int | None = None) -> LayerGeometry:
        """Geometry shared by all layers of a kind, and of a ratio, which may be left out if the kind has one ratio.

        kind: a kind, or its name, such as "c4a".
        compress_ratio: tokens of an entry, if the kind has several ratios.
        Raises UnknownNameError for a kind that the model does not have, ArgumentError for the ratio.
        """
        try:
            kind = LayerKind(kind)
        except ValueError:
            raise UnknownNameError("layer kind", str(kind), [k.value for k in LayerKind]) from None
        ratios = sorted({ratio for layer_kind, ratio in self.layers if layer_kind is kind})
        ratios = ratios or ([1] if kind is LayerKind.SWA else [])  # MTP layers
        if not ratios:
            raise UnknownNameError(f"layer kind of {self.name}", kind.value, [k.value for k in self.kinds])
        if compress_ratio is None and len(ratios) == 1:
            compress_ratio = ratios[0]
        if compress_ratio not in ratios:
            expected = f"one of {ratios}, the ratios of the {kind.value} layers of {self.name}"
            hint = "name the ratio, or take layer(i)"
            raise ArgumentError("compress_ratio", expected=expected, actual=compress_ratio, hint=hint)
        return self._layer(kind, compress_ratio)

    @property
    def distinct_layers(self) -> tuple[LayerGeometry, ...]:
        """One layer of each kind and ratio, in the order swa, c4a, c128a, and of the model for several ratios."""
        return tuple(
            self._layer(*layer) for kind in LayerKind for layer in dict.fromkeys(self.layers) if layer[0] is kind
        )

    def layers_of_kind(self, kind: LayerKind | str) -> tuple[LayerGeometry, ...]:
        """One layer of each ratio of a kind. Raises UnknownNameError as `layer_of_kind` does.

        kind: a kind, or its name, such as "c4a".
        """
        layers = tuple(layer for layer in self.distinct_layers if layer.kind == kind)
        return layers or (self.layer_of_kind(kind),)

    def sources(self, index: int) -> LayerSources:
        """Whose compressed cache and selected entries layer `index` reads; by default its own.

        index: number of the layer, from 0.
        """
        kind = self.layer(index).kind
        if kind is LayerKind.SWA:
            return LayerSources(index)
        if self.sharing is not None:
            return self.sharing.sources(index)
        return LayerSources(index, index, index if kind is LayerKind.CSA else None)

    @property
    def entries_per_token(self) -> float:
        """Compressed records of all layers together for a token of context: 2.5 in V4.1-Flash; as many index keys."""
        owners = (i for i in range(self.num_layers) if self.sources(i).role is LayerRole.FULL)
        return sum(1 / self.layers[i][1] for i in owners)

    def _layer(self, kind: LayerKind, ratio: int) -> LayerGeometry:
        theta, yarn = (self.main_theta, None) if kind is LayerKind.SWA else (self.compress_theta, self.compress_yarn)
        rope = Rope(self.rope_dim, theta, yarn)
        topk = self.index_topk if kind is LayerKind.CSA else 0
        sizes = self.num_heads, self.head_dim, rope, self.window, topk, self.eps
        overlap = kind is LayerKind.CSA and not self.shared_latent
        return LayerGeometry(kind, ratio, *sizes, overlap=overlap, q_norm=self.q_norm)

    def with_own_layers(self, layers: Sequence[tuple[LayerKind, int]]) -> ModelGeometry:
        """The model with other layers, (kind, ratio) of each, which read from no other layer.

        layers: kind and compress ratio of each layer.
        """
        publishers = tuple(i for i, (kind, _) in enumerate(layers) if kind is not LayerKind.SWA)
        return evolve(
            self, layers=tuple(layers), sharing=LayerSharing(publishers, publishers) if self.shared_latent else None
        )

    def tensor_parallel(self, size: int) -> ModelGeometry:
        """Geometry of one rank: heads and output groups are divided, everything else is replicated.

        size: number of ranks. It divides the heads and the output groups.
        """
        check_count("tensor parallel size", size, 1)
        if self.num_heads % size or self.o_groups % size:
            expected = f"a common divisor of {self.num_heads} heads and {self.o_groups} output groups"
            raise ArgumentError("tensor parallel size", expected=expected, actual=size)
        return evolve(self, num_heads=self.num_heads // size, o_groups=self.o_groups // size)

    @classmethod
    def preset(cls, name: str) -> ModelGeometry:
        """Geometry of a released model: `deepseek-v4-flash`, `deepseek-v4-pro` or `deepseek-v4.1-flash`.

        Short names are `flash`, `pro` and `v4.1-flash`.
        name: name of the model.
        """
        check_type("name", name, str, cure=f"pass one of {', '.join(PRESETS)}")
        key = name.lower()
        if SHORT_NAMES.get(key, key) not in PRESETS:
            raise UnknownNameError("model", name, [*PRESETS, *SHORT_NAMES])
        return PRESETS[SHORT_NAMES.get(key, key)]

    @classmethod
    def from_config(cls, config: str | Path | Mapping[str, Any] | object, *, name: str = "") -> ModelGeometry:
        """Read a Hugging Face configuration.

        config: a path to `config.json` or to the folder that holds it, a dict, or a config object.
        Layers come from `layer_types` or `compress_ratios`, which have to agree if both are there. Entries past
        `num_hidden_layers` belong to MTP layers and are dropped, and so are V4.1's sources past it, as engines read a
        configuration with fewer layers. Without either the schedule is an error: the default of transformers is not the
        schedule of any released model. A `model_type` of DeepSeek-V4.1, also that of a nested `text_config`, decides
        that ratio 1 is a compressed cache; in V4 it is window-only. `rope_scaling` and `rope_parameters` are read as
        transformers reads them: the first wins if both are there, and what the second says has to agree. Raises
        GeometryError for what is missing, wrong, contradicted or not understood, also for a field whose name speaks of
        attention and that is not read, such as `index_topk_pattern`, and ArgumentError for a configuration
        that does not say which of the two models it is.
        name: name of the model for reports.
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
        name = name or "config"
        return cls(**geometry_fields({**fields, "qk_rope_head_dim": rope_dim}, name), name=name)


def is_path(model: str) -> bool:
    """Whether a text names a configuration's file or folder, there or missing. Names of presets come first."""
    path = Path(model)
    known = SHORT_NAMES.get(model.lower(), model.lower()) in PRESETS
    is_there = os.path.exists(model)  # noqa: PTH110 - False, not an error, for a name that is too long
    return not known and (is_there or path.suffix == ".json" or len(path.parts) > 1)


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


def _released(name: str, layers: tuple[tuple[LayerKind, int], ...], *sizes: int, **others: Any) -> ModelGeometry:  # noqa: ANN401 - fields
    """sizes: heads, hidden size, q_lora_rank, selected entries, output groups. others: further fields, by name."""
    heads, hidden, lora, topk, groups = sizes
    attention: dict[str, Any] = {"num_heads": heads, "head_dim": 512, "rope_dim": 64, "window": 128, "index_topk": topk}
    around: dict[str, Any] = {"max_position": 1_048_576, "hidden_size": hidden, "q_lora_rank": lora, "o_groups": groups}
    yarn = Yarn(16.0, 65536)
    return ModelGeometry(
        **attention, **around, layers=layers, o_lora_rank=1024, compress_yarn=yarn, name=f"deepseek-{name}", **others
    )


_V41_FLASH = LayerSharing((2, 8, 14, 20), (2, 8, 14, 20, 24, 28, 32, 36), 20, 2048, 8)
PRESETS: Mapping[str, ModelGeometry] = {
    "deepseek-v4-flash": _released("v4-flash", layers_of([0, 0, *[4, 128] * 20, 4]), 64, 4096, 1024, 512, 8),
    "deepseek-v4-pro": _released("v4-pro", layers_of([128, 128, *[4, 128] * 29, 4]), 128, 7168, 1536, 1024, 16),
    "deepseek-v4.1-flash": _released(
        *("v4.1-flash", v41_layers([0, 0, *[2] * 18, *[1] * 20]), 64, 5120, 1280, 512, 8),
        index_n_heads=32,
        eps=1e-20,
        q_norm=False,
        sharing=_V41_FLASH,
        shared_latent=True,
    ),
}
"""The released models, from their public config.json files."""
SHORT_NAMES: Mapping[str, str] = {key.removeprefix("deepseek-").removeprefix("v4-"): key for key in PRESETS}
"""Names of `PRESETS` by their short names: "flash", "pro"."""

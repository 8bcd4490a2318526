"""`ModelGeometry`: presets, config.json in every spelling, and refusals that name the field."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest

from dsv4attn.core.model.geometry import PRESETS, LayerGeometry, LayerKind, ModelGeometry, Rope, Yarn
from dsv4attn.errors import ArgumentError, GeometryError, UnknownNameError

SWA, C4A, C128A = LayerKind.SWA, LayerKind.CSA, LayerKind.HCA
TYPES = {
    SWA: "sliding_attention",
    C4A: "compressed_sparse_attention",
    C128A: "heavily_compressed_attention",
}
FLASH_RATIOS = [0, 0, *[4, 128] * 20, 4]


def released(**changes: Any) -> dict[str, Any]:
    """Return the fields of the released Flash config.json that attention reads, changed; None removes a field."""
    fields: dict[str, Any] = {
        "model_type": "deepseek_v4",
        "hidden_size": 4096,
        "num_hidden_layers": 43,
        "num_attention_heads": 64,
        "num_key_value_heads": 1,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "q_lora_rank": 1024,
        "o_groups": 8,
        "o_lora_rank": 1024,
        "sliding_window": 128,
        "index_n_heads": 64,
        "index_head_dim": 128,
        "index_topk": 512,
        "compress_ratios": [*FLASH_RATIOS, 0],
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 1_048_576,
        "rope_theta": 10000,
        "compress_rope_theta": 160000,
        "rope_scaling": {
            "type": "yarn",
            "factor": 16,
            "original_max_position_embeddings": 65536,
            "beta_fast": 32,
            "beta_slow": 1,
        },
    }
    return {key: value for key, value in {**fields, **changes}.items() if value is not None}


def tiny(**changes: Any) -> dict[str, Any]:
    """Return the 4-head, 32-dim model of facts 17.1."""
    fields = {
        "vocab_size": 64,
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "head_dim": 32,
        "qk_rope_head_dim": 8,
        "layer_types": list(TYPES.values()),
        "compress_rates": {TYPES[C4A]: 4, TYPES[C128A]: 16},
        "sliding_window": 8,
        "o_groups": 2,
        "o_lora_rank": 16,
        "index_topk": 3,
        "max_position_embeddings": 4096,
        "rope_parameters": {
            "rope_type": "yarn",
            "type": "yarn",
            "factor": 16.0,
            "original_max_position_embeddings": 256,
            "beta_fast": 32,
            "beta_slow": 1,
        },
    }
    return {**fields, **changes}


def same(left: ModelGeometry, right: ModelGeometry) -> bool:
    """Compare everything but the name."""
    return attrs.evolve(left, name="") == attrs.evolve(right, name="")


@pytest.mark.parametrize(
    ("name", "swa", "c4a", "c128a", "heads", "topk", "groups"),
    [("deepseek-v4-flash", 2, 21, 20, 64, 512, 8), ("deepseek-v4-pro", 0, 30, 31, 128, 1024, 16)],
)
def test_a_preset_has_the_counts_of_the_released_model(
    name: str, swa: int, c4a: int, c128a: int, heads: int, topk: int, groups: int
) -> None:
    model = ModelGeometry.preset(name)

    assert [model.count(kind) for kind in (SWA, C4A, C128A)] == [swa, c4a, c128a]
    assert model.num_layers == swa + c4a + c128a
    assert (model.num_heads, model.index_topk, model.o_groups) == (heads, topk, groups)
    assert (model.head_dim, model.rope_dim, model.window, model.o_lora_rank) == (512, 64, 128, 1024)
    assert model.kinds == tuple(kind for kind in (SWA, C4A, C128A) if model.count(kind))


def test_pro_begins_with_two_heavily_compressed_layers_and_not_with_three() -> None:
    model = ModelGeometry.preset("pro")

    assert [ratio for _, ratio in model.layers[:5]] == [128, 128, 4, 128, 4]
    assert model.layers[-1] == (C4A, 4)


@pytest.mark.parametrize("name", ["flash", "FLASH", "deepseek-v4-flash", "DeepSeek-V4-Flash"])
def test_a_preset_answers_to_its_short_name_in_any_case(name: str) -> None:
    assert ModelGeometry.preset(name) is PRESETS["deepseek-v4-flash"]


@pytest.mark.parametrize(
    ("name", "meant"), [("flsh", "flash"), ("deepseek-v4-prp", "deepseek-v4-pro"), ("DeepSeek-V4-Flsh", "flash")]
)
def test_an_unknown_preset_is_answered_with_the_nearest_name(name: str, meant: str) -> None:
    with pytest.raises(UnknownNameError, match=rf"unknown model '{name}'; did you mean '[a-z0-9-]*{meant}'\?") as info:
        ModelGeometry.preset(name)

    assert "known: deepseek-v4-flash, deepseek-v4-pro, deepseek-v4.1-flash, flash, pro, v4.1-flash" in str(info.value)


def test_the_released_config_is_the_preset() -> None:
    assert same(ModelGeometry.from_config(released()), ModelGeometry.preset("flash"))


def test_a_config_is_read_from_a_file_its_folder_a_dict_and_an_object(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(released()), encoding="utf-8")
    plain = type("Config", (), {})()
    vars(plain).update(released())

    models = [ModelGeometry.from_config(c) for c in (path, str(path), tmp_path, str(tmp_path), released(), plain)]

    assert all(same(model, ModelGeometry.preset("flash")) for model in models)
    assert [m.name for m in models] == [*[str(path)] * 4, "config", "config"]
    assert ModelGeometry.from_config(path, name="mine").name == "mine"


def test_reading_a_config_leaves_it_alone() -> None:
    fields = released()
    ModelGeometry.from_config(fields)

    assert fields == released()


@pytest.mark.parametrize("extra", [[], [0], [0, 0, 99]])
def test_trailing_entries_of_mtp_layers_are_dropped_and_mtp_layers_are_window_only(extra: list[int]) -> None:
    model = ModelGeometry.from_config(released(compress_ratios=[*FLASH_RATIOS, *extra]))

    assert model.num_layers == 43
    assert model.layer(42).kind is C4A
    assert model.layer(43) == model.layer(100) == model.layer(0)
    assert model.layer(43).kind is SWA


def test_compress_rates_say_what_ratio_a_layer_type_has() -> None:
    model = ModelGeometry.from_config(tiny())

    assert model.layers == ((SWA, 1), (C4A, 4), (C128A, 16))


def test_both_spellings_of_rope_mean_the_same() -> None:
    flat = released()["rope_scaling"]
    nested = {
        "main": {"rope_type": "default", "rope_theta": 10000, "partial_rotary_factor": 0.125},
        "compress": {**flat, "rope_type": "yarn", "rope_theta": 160000, "partial_rotary_factor": 0.125},
    }
    without = {"rope_scaling": None, "rope_theta": None, "compress_rope_theta": None}

    for changes in ({"rope_parameters": nested}, {"rope_parameters": {**flat, "rope_type": "yarn"}}):
        assert same(ModelGeometry.from_config(released(**without, **changes)), ModelGeometry.preset("flash"))


def test_nested_rope_parameters_carry_their_own_thetas() -> None:
    nested = {
        "main": {"rope_type": "default", "rope_theta": 500.0},
        "compress": {"rope_type": "default", "rope_theta": 900},
    }
    model = ModelGeometry.from_config(released(rope_scaling=None, rope_parameters=nested))

    assert model.layer(0).rope == Rope(64, 500.0)
    assert model.layer(2).rope == Rope(64, 900.0)


def test_only_compressed_layers_have_yarn() -> None:
    model = ModelGeometry.preset("flash")

    assert model.layer_of_kind("swa").rope == Rope(64, 10000.0)
    assert model.layer_of_kind("c4a").rope == model.layer_of_kind(C128A).rope == Rope(64, 160000.0, Yarn(16.0, 65536))


def test_a_layer_knows_its_dims_scale_and_topk() -> None:
    layer = ModelGeometry.preset("pro").layer_of_kind("c4a")

    assert (layer.num_heads, layer.head_dim, layer.nope_dim, layer.rope_dim) == (128, 512, 448, 64)
    assert layer.scale == 512**-0.5
    assert (layer.topk, layer.compress_ratio, layer.window) == (1024, 4, 128)
    assert ModelGeometry.preset("pro").layer_of_kind("c128a").topk == 0
    assert ModelGeometry.preset("pro").layer_of_kind("swa").compress_ratio == 1


def test_a_rotary_factor_stands_in_for_the_rope_dims() -> None:
    model = ModelGeometry.from_config(released(qk_rope_head_dim=None, partial_rotary_factor=0.125))

    assert model.rope_dim == 64


def test_a_model_of_four_heads_and_32_dims_is_as_good_as_any() -> None:
    model = ModelGeometry.from_config(tiny())

    assert (model.num_heads, model.head_dim, model.rope_dim, model.window) == (4, 32, 8, 8)
    assert model.layer(1) == LayerGeometry(C4A, 4, 4, 32, Rope(8, 160000.0, Yarn(16.0, 256)), 8, 3)
    assert model.layer(1).scale == 32**-0.5


def test_tensor_parallel_divides_heads_and_groups_and_nothing_else() -> None:
    whole = ModelGeometry.preset("flash")
    rank = whole.tensor_parallel(4)

    assert (rank.num_heads, rank.o_groups) == (16, 2)
    assert same(rank.tensor_parallel(1), rank)
    assert rank.layer(2).scale == whole.layer(2).scale
    assert (rank.layers, rank.index_topk, rank.o_lora_rank) == (whole.layers, whole.index_topk, whole.o_lora_rank)


REQUIRED = [
    "head_dim",
    "num_attention_heads",
    "sliding_window",
    "index_topk",
    "num_hidden_layers",
    "max_position_embeddings",
    "hidden_size",
    "o_groups",
    "o_lora_rank",
    "qk_rope_head_dim",
]


@pytest.mark.parametrize("field", REQUIRED)
def test_a_missing_field_is_named(field: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(released(**{field: None})), encoding="utf-8")

    with pytest.raises(GeometryError, match=rf"config\.json: field '{field}' is missing"):
        ModelGeometry.from_config(path)


@pytest.mark.parametrize("field", REQUIRED)
@pytest.mark.parametrize("value", ["64", 64.0, True, 0, -1, [64]])
def test_a_field_of_a_wrong_type_or_sign_is_named(field: str, value: object) -> None:
    with pytest.raises(GeometryError, match=rf"config: field '{field}': expected a positive integer, got "):
        ModelGeometry.from_config(released(**{field: value}))


YARN = released()["rope_scaling"]
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"compress_ratios": None}, "expected a list in 'layer_types' or 'compress_ratios', got None"),
    ({"compress_ratios": "0,4"}, "expected a list"),
    ({"compress_ratios": 4}, "expected a list"),
    ({"compress_ratios": [0, 4]}, "2 layers are described, but num_hidden_layers is 43"),
    ({"layer_types": [TYPES[SWA]] * 42}, "42 layers are described, but num_hidden_layers is 43"),
    ({"compress_ratios": [0, 8, *[4] * 41]}, r"compress_ratios\[1\]: expected 0, 1, 4 or 128, got 8"),
    ({"compress_ratios": [4.0] * 43}, r"compress_ratios\[0\]: expected 0, 1, 4 or 128, got 4\.0"),
    ({"compress_ratios": [True] * 43}, r"compress_ratios\[0\]: .* got True"),
    ({"compress_ratios": [[4]] * 43}, r"compress_ratios\[0\]: .* got \[4\]"),
    ({"layer_types": ["full_attention"] * 43}, r"layer_types\[0\]: expected one of sliding.*, got 'full_attention'"),
    ({"layer_types": [[TYPES[SWA]]] * 43}, r"layer_types\[0\]: expected one of"),
    ({"layer_types": [TYPES[C4A]] * 43, "compress_rates": {TYPES[C4A]: 0}}, "compress_rates.*above 1, got 0"),
    ({"layer_types": [TYPES[C4A]] * 43, "compress_rates": {TYPES[C4A]: "4"}}, "compress_rates.*above 1, got '4'"),
    ({"layer_types": [TYPES[C4A]] * 43, "compress_rates": [4]}, r"'compress_rates': expected an object, got \[4\]"),
    ({"rope_scaling": {"type": "yarn", "factor": 16}}, "'original_max_position_embeddings' is missing"),
    ({"rope_scaling": {"type": "yarn", "original_max_position_embeddings": 9}}, "'factor' is missing"),
    ({"rope_scaling": {**YARN, "factor": "x"}}, "'factor': expected a positive number, got 'x'"),
    ({"rope_scaling": {**YARN, "beta_fast": -1}}, "'beta_fast': expected a positive number, got -1"),
    ({"rope_scaling": {**YARN, "type": "linear"}}, "rope_type: expected 'default' or 'yarn', got 'linear'"),
    ({"rope_scaling": [1]}, r"'rope_scaling': expected an object, got \[1\]"),
    ({"rope_theta": "x"}, "'rope_theta': expected a positive number, got 'x'"),
    ({"compress_rope_theta": -1}, "'compress_rope_theta': expected a positive number, got -1"),
    ({"rms_norm_eps": float("nan")}, "'rms_norm_eps': expected a positive number, got nan"),
    ({"qk_rope_head_dim": None, "partial_rotary_factor": "x"}, "'partial_rotary_factor': expected a positive number"),
    ({"qk_rope_head_dim": 63}, "qk_rope_head_dim: expected an even number below head_dim=512, got 63"),
    ({"qk_rope_head_dim": 512}, "qk_rope_head_dim: expected an even number below"),
    ({"o_groups": 7}, "o_groups: expected a divisor of 64 heads, got 7"),
]


@pytest.mark.parametrize(("changes", "said"), WRONG, ids=[said[:48] for _, said in WRONG])
def test_a_config_that_contradicts_itself_is_refused_with_the_reason(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(GeometryError, match=said):
        ModelGeometry.from_config(released(**changes))


BAD_FILES: list[tuple[Callable[[Path], object], str]] = [
    (lambda p: p.write_text("{not json", encoding="utf-8"), "not a readable JSON file"),
    (lambda p: p.write_bytes(b"\xff\xfe\x00"), "not a readable JSON file"),
    (lambda p: p.write_text("[1, 2]", encoding="utf-8"), "expected a JSON object, got list"),
    (lambda p: p.mkdir(), "not a readable JSON file|no such file"),
    (lambda _: None, "no such file -> give a config.json, its folder, or one of deepseek-v4-flash"),
]


@pytest.mark.parametrize(("write", "said"), BAD_FILES)
def test_a_file_that_is_no_config_is_refused_by_its_path(
    write: Callable[[Path], object], said: str, tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    write(path)

    with pytest.raises(GeometryError, match=said) as info:
        ModelGeometry.from_config(path)

    assert str(path) in str(info.value)


@pytest.mark.parametrize("config", [None, 3, [1], object()])
def test_what_is_no_config_at_all_is_refused(config: object) -> None:
    with pytest.raises(
        GeometryError, match=rf"expected a path, a dict or a config object, got {type(config).__name__}"
    ):
        ModelGeometry.from_config(config)


def test_a_layer_that_does_not_exist_is_refused() -> None:
    flash = ModelGeometry.preset("flash")

    with pytest.raises(ArgumentError, match="layer index: expected an integer of at least 0, got -1"):
        flash.layer(-1)
    with pytest.raises(UnknownNameError, match="unknown layer kind 'c4'; did you mean 'c4a'"):
        flash.layer_of_kind("c4")
    with pytest.raises(UnknownNameError, match="unknown layer kind of config 'c4a'"):
        ModelGeometry.from_config(released(compress_ratios=[0] * 43)).layer_of_kind("c4a")
    assert ModelGeometry.preset("pro").layer_of_kind("swa").kind is SWA


@pytest.mark.parametrize(
    ("kind", "ratio", "topk", "argument"),
    [(SWA, 4, 0, "compress_ratio"), (C128A, 1, 0, "compress_ratio"), (C4A, 4, 0, "topk"), (C128A, 128, 8, "topk")],
)
def test_a_layer_whose_parts_do_not_fit_is_refused(kind: LayerKind, ratio: int, topk: int, argument: str) -> None:
    with pytest.raises(ArgumentError, match=rf"^{argument}: expected"):
        LayerGeometry(kind, ratio, 4, 32, Rope(8, 1e4), 8, topk)


def test_the_tiny_transformers_config_is_read_too() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.DeepseekV4Config(**tiny(), mlp_layer_types=["hash_moe", "moe", "moe"])

    assert same(ModelGeometry.from_config(config), ModelGeometry.from_config(tiny()))

"""DeepSeek-V4.1 is refused by name, however its configuration says it; V4's are read as before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dsv4attn.core.geometry import LayerKind, ModelGeometry
from dsv4attn.errors import ArgumentError
from tests.core.test_geometry import released

V41 = [0, 0, *[2] * 18, *[1] * 20, 0, 0, 0]
"""The schedule of V4.1-Flash."""


@pytest.mark.parametrize("model_type", ["deepseek_v41", "deepseek_v41_text", "deepseek_v4_1", "DeepSeek-V4.1"])
def test_its_model_type_is_refused_whatever_else_it_says(model_type: str) -> None:
    for ratios in (V41, [0] * 2 + [1] * 41, [0, 0, *[4, 128] * 20, 4]):
        with pytest.raises(ArgumentError, match=r"V4\.1 is not served yet") as info:
            ModelGeometry.from_config(released(model_type=model_type, compress_ratios=ratios))

        assert f"field 'model_type': expected that of DeepSeek-V4, got {model_type!r}" in str(info.value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"architectures": ["DeepseekV41ForCausalLM"]}, "field 'architectures'"),
        ({"model_type": None, "text_config": {"model_type": "deepseek_v41_text"}}, "field 'model_type'"),
        ({"model_type": None, "compress_ratios": [0] * 2 + [1] * 41}, r"'compress_ratios': .* got \[0, 1\]"),
        (
            {"model_type": None, "compress_ratios": V41, "num_hidden_layers": 40},
            r"'compress_ratios': .* got \[0, 1, 2\]",
        ),
        ({"model_type": None, "compress_ratios": [1] * 43, "kv_source_layer_ids": [2]}, "field 'kv_source_layer_ids'"),
    ],
)
def test_its_signs_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ArgumentError, match=rf"{said}.*V4\.1 is not served yet"):
        ModelGeometry.from_config(released(**changes))


def test_its_file_with_a_nested_configuration_is_refused(tmp_path: Path) -> None:
    text = {**released(compress_ratios=V41, num_hidden_layers=40), "model_type": "deepseek_v41_text"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "deepseek_v41", "text_config": text}))

    with pytest.raises(ArgumentError, match=r"V4\.1 is not served yet"):
        ModelGeometry.from_config(tmp_path)


@pytest.mark.parametrize(
    ("ratios", "windows"),
    [([1, 1, *[4, 128] * 20, 4], 2), ([0, 0, *[4, 128] * 20, 4], 2), ([1] * 43, 43), ([0] * 43, 43)],
)
@pytest.mark.parametrize("model_type", ["deepseek_v4", None])
def test_v4_is_read_with_either_way_to_say_window_only(model_type: str | None, ratios: list[int], windows: int) -> None:
    model = ModelGeometry.from_config(released(model_type=model_type, compress_ratios=ratios))

    assert model.count(LayerKind.SWA) == windows


def test_both_ways_are_v4_s_where_it_says_so() -> None:
    assert ModelGeometry.from_config(released(compress_ratios=[0, 1] * 22)).count(LayerKind.SWA) == 43

"""Ratio 1 means a compressed cache in DeepSeek-V4.1 and a window-only layer in V4. A config has to say which it is."""

from __future__ import annotations

from typing import Any

import pytest

from dsv4attn.core.model.config import refuse_v41
from dsv4attn.core.model.geometry import LayerKind, ModelGeometry
from dsv4attn.errors import ArgumentError
from tests.core.model.test_geometry import released

V41 = [0, 0, *[2] * 18, *[1] * 20, 0, 0, 0]
"""The schedule of V4.1-Flash."""


@pytest.mark.parametrize("model_type", ["deepseek_v41", "deepseek_v41_text", "deepseek_v4_1", "DeepSeek-V4.1"])
def test_what_serves_v4_alone_refuses_the_model_type_of_v41(model_type: str) -> None:
    with pytest.raises(ArgumentError, match=r"V4\.1 is not served yet") as info:
        refuse_v41({"model_type": model_type}, "config")

    assert f"field 'model_type': expected that of DeepSeek-V4, got {model_type!r}" in str(info.value)


@pytest.mark.parametrize(
    "fields",
    [
        {"architectures": ["DeepseekV41ForCausalLM"]},
        {"text_config": {"model_type": "deepseek_v41_text"}},
        {"model_type": "deepseek_v41", "compress_ratios": [4, 128]},
    ],
)
def test_what_serves_v4_alone_refuses_other_signs(fields: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=r"V4\.1 is not served yet"):
        refuse_v41(fields, "config")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"compress_ratios": [0] * 2 + [1] * 41}, r"'compress_ratios': .* got \[0, 1\]"),
        ({"compress_ratios": V41, "num_hidden_layers": 40}, r"'compress_ratios': .* got \[0, 1, 2\]"),
        ({"compress_ratios": [1] * 43, "kv_source_layer_ids": [2]}, "field 'kv_source_layer_ids'"),
    ],
)
def test_a_configuration_that_may_be_either_has_to_say_which(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ArgumentError, match=rf"{said}.* -> set model_type to 'deepseek_v41'"):
        ModelGeometry.from_config(released(model_type=None, **changes))


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

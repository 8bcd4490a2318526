"""`SingleLayer`: a first layer with defaults for everything, in any cuts, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from dsv4attn import LayerKind
from dsv4attn.core.model.weights import weight_shapes
from dsv4attn.errors import ArgumentError, Dsv4AttnError, GeometryError, NoBackendError, UnknownNameError
from dsv4attn.single_layer import SingleLayer
from tests.harness import SMALL
from tests.harness_v41 import SMALL_V41


def small(kind: str = "c4a", **options: Any) -> SingleLayer:
    defaults = {"device": "cpu", "dtype": torch.float32, "max_requests": 3, "max_tokens": 96, "max_model_len": 128}
    return SingleLayer(SMALL, kind, **{**defaults, **options})


@pytest.mark.parametrize("kind", [kind.value for kind in LayerKind])
def test_a_prompt_in_one_step_equals_the_prompt_token_by_token_next_to_another_request(kind: str) -> None:
    layer = small(kind)
    hidden, other = layer.random_hidden(37), layer.random_hidden(12)
    (whole,) = layer.step((layer.new_request(), hidden))
    first, second = layer.new_request(), layer.new_request()

    begun, _ = layer.step((first, hidden[:25]), (second, other))
    rest = [layer.step((second, other[:2]), (first, token))[1] for token in hidden[25:28].split(1)]
    rest += layer.step((first, hidden[28:]))

    assert_close(torch.cat([begun, *rest]), whole, rtol=1e-4, atol=1e-5)
    assert (first.length, second.length) == (37, 18)


def test_weights_are_the_same_in_every_process_and_can_be_given() -> None:
    first, second = small(), small()
    hidden = first.random_hidden(20)
    (expected,) = first.step((first.new_request(), hidden))
    assert torch.equal(second.step((second.new_request(), hidden))[0], expected)
    shapes = weight_shapes(first.geometry, 0)
    zeros = small(weights={name: torch.zeros(shape) for name, shape in shapes.items()})
    assert not zeros.step((zeros.new_request(), hidden))[0].any()


def test_layers_of_v41_read_from_no_other_layer() -> None:
    layer = SingleLayer(SMALL_V41, "c4a", compress_ratio=1, device="cpu", max_tokens=64, max_model_len=64)
    assert layer.geometry.layers == ((LayerKind.CSA, 1),)
    (out,) = layer.step((layer.new_request(), layer.random_hidden(33)))
    assert out.shape == (33, layer.hidden_size)
    assert out.isfinite().all()


def test_a_model_is_a_preset_or_a_configuration(tmp_path: Path) -> None:
    assert "SingleLayer deepseek-v4-flash, swa, 64 heads, backend reference, on cpu" in repr(
        SingleLayer("flash", "swa", device="cpu", max_tokens=8, max_model_len=64, max_requests=1)
    )
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 8}))
    with pytest.raises(GeometryError, match=r"config\.json: "):
        SingleLayer(tmp_path)
    with pytest.raises(UnknownNameError, match=r"model .flesh.*flash"):
        SingleLayer("flesh")
    with pytest.raises(UnknownNameError, match="unknown model 'xxx"):
        SingleLayer("x" * 5000)  # no name of a file
    with pytest.raises(ArgumentError, match=r"^compress_ratio: expected one of"):
        SingleLayer("v4.1-flash", "c4a")


def test_what_does_not_fit_is_refused_and_the_request_goes_on() -> None:
    layer = small(max_requests=2)
    request, hidden = layer.new_request(), layer.random_hidden(9)
    layer.step((request, hidden))
    for steps, expected in (
        (((request, hidden.bfloat16()),), r"^hidden: expected \[n, d\] float32"),
        (((request, hidden[:, :-1]),), r"^hidden: expected \[n, d\] float32"),
        (((0, hidden),), "^request: expected a CachedSequence"),
        ((request, hidden), r"^requests: expected pairs \(request, hidden\), got CachedSequence -> pass step\(\("),
        (((request, hidden), (request, hidden)), "requests: expected each sequence once"),
        (((request, layer.random_hidden(97)),), "96"),
    ):
        with pytest.raises((ArgumentError, Dsv4AttnError), match=expected):
            layer.step(*steps)
    assert request.length == 9
    layer.step((request, hidden[:1]))
    assert request.length == 10
    assert layer.step() == []
    with pytest.raises(ArgumentError, match=r"^num_tokens: expected an integer of at least 0"):
        layer.random_hidden(-1)
    with pytest.raises(NoBackendError, match="no backend"):
        small(backend="sm91")

"""The output projection against that of transformers, in fp32."""

from __future__ import annotations

import pytest
import torch

from dsv4attn.core.attention.projection import o_proj, output_projection
from dsv4attn.core.model.geometry import LayerKind, ModelGeometry
from dsv4attn.core.model.quantized_weight import BlockScaledWeight, dense_weight
from dsv4attn.core.model.rope import cos_sin_cache
from dsv4attn.selection import load_backend
from tests.parity import hf

pytest.importorskip("transformers.models.deepseek_v4")

TOKENS = 29
TOLERANCE = 1e-5
each_kind = pytest.mark.parametrize("kind", hf.KINDS, ids=[kind.value for kind in hf.KINDS])


def theirs(kind: LayerKind, o: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Z [T, G, rank] and y [T, hidden] of transformers for o [T, H, D]: rotation undone, o_a_proj, o_b_proj."""
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import apply_rotary_pos_emb

    model = hf.model(0)
    attention = model.layers[hf.KINDS.index(kind)].self_attn
    cos, sin = model.rotary_emb(o, torch.arange(TOKENS)[None], layer_type=attention.rope_layer_type)
    turned = apply_rotary_pos_emb(o.transpose(0, 1)[None], cos, -sin)[0].transpose(0, 1)
    z = attention.o_a_proj(turned.reshape(TOKENS, attention.config.o_groups, -1))
    return z, attention.o_b_proj(z.flatten(1))


@each_kind
def test_it_is_transformers_o_a_proj_and_o_b_proj(kind: LayerKind) -> None:
    geometry = ModelGeometry.from_config(hf.config())
    layer, attention = geometry.layer_of_kind(kind), hf.model(0).layers[hf.KINDS.index(kind)].self_attn
    o = torch.randn(TOKENS, hf.HEADS, hf.HEAD_DIM, generator=torch.Generator().manual_seed(5))
    inputs = o, torch.arange(TOKENS), cos_sin_cache(layer.rope, TOKENS), attention.o_a_proj
    wanted_z, wanted_y = theirs(kind, o)

    z = o_proj(load_backend("reference"), *inputs, geometry.o_groups, layer=layer)
    y = output_projection(load_backend("reference"), *inputs, attention.o_b_proj, geometry.o_groups, layer=layer)

    assert float((z - wanted_z).abs().max()) <= TOLERANCE * float(wanted_z.abs().max())
    assert float((y - wanted_y).abs().max()) <= TOLERANCE * float(wanted_y.abs().max())
    turned = float((y - theirs(kind, o.flip(0))[1]).abs().max())
    assert turned > 0.1 * float(wanted_y.abs().max())


def test_fp8_weights_are_those_that_transformers_has_after_conversion() -> None:
    """The module of transformers with the converted weights is the yardstick for the fp8 weights themselves."""
    kind, geometry = LayerKind.CSA, ModelGeometry.from_config(hf.config())
    layer, attention = geometry.layer_of_kind(kind), hf.model(0).layers[hf.KINDS.index(kind)].self_attn
    o = torch.randn(TOKENS, hf.HEADS, hf.HEAD_DIM, generator=torch.Generator().manual_seed(6))
    fp8 = []
    for weight in (attention.o_a_proj.weight, attention.o_b_proj.weight):
        scale = weight.abs().max().reshape(1, 1) / 448
        fp8.append(BlockScaledWeight((weight / scale).to(torch.float8_e4m3fn), scale))
    saved = [module.weight.clone() for module in (attention.o_a_proj, attention.o_b_proj)]
    try:
        for module, weight in zip((attention.o_a_proj, attention.o_b_proj), fp8, strict=True):
            module.weight.copy_(dense_weight(weight))
        _, expected = theirs(kind, o)
    finally:
        attention.o_a_proj.weight.copy_(saved[0])
        attention.o_b_proj.weight.copy_(saved[1])
    inputs = o, torch.arange(TOKENS), cos_sin_cache(layer.rope, TOKENS)
    y = output_projection(load_backend("reference"), *inputs, fp8[0], fp8[1], geometry.o_groups, layer=layer)

    assert float((y - expected).abs().max()) <= TOLERANCE * float(expected.abs().max())
    assert float((expected - theirs(kind, o)[1]).abs().max()) > 1e-3 * float(expected.abs().max())

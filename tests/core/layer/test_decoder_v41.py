"""`DeepseekV41DecoderLayer`: delayed hyper-connections around layers of V4.1, against the oracle."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from dsv4attn.core.layer.decoder_layer import DeepseekV41DecoderLayer
from dsv4attn.core.layer.hyper_connections import HyperConnections
from dsv4attn.core.metadata.forward_context import set_forward_context
from dsv4attn.core.model.weights import HyperConnectionWeights
from dsv4attn.testing.oracle import layer as oracle_layer
from tests.harness_v41 import SMALL_V41, v41_stack


def test_decoder_layers_hand_the_pre_of_each_sublayer_to_the_next() -> None:
    stack, geometry, n = v41_stack(), SMALL_V41, SMALL_V41.hc_mult
    generator, m = torch.Generator().manual_seed(0), 2 * n + n * n
    weights = [
        HyperConnectionWeights(
            torch.randn(m, n * geometry.hidden_size, generator=generator) * 0.1,
            torch.randn(m, generator=generator),
            torch.rand(3, generator=generator),
        )
        for _ in range(4)
    ]
    layer_ops = stack.layers[0].backend.layer_ops
    connections = [HyperConnections(geometry, sublayer_weights, layer_ops) for sublayer_weights in weights]
    layers = [
        DeepseekV41DecoderLayer(stack.layers[0], torch.tanh, connections[0], connections[1]),
        DeepseekV41DecoderLayer(stack.layers[1], torch.tanh, connections[2], connections[3]),
    ]
    first_streams = torch.randn(12, n, geometry.hidden_size, generator=generator)
    requests = [(stack.manager.new(), 12)]
    positions = stack.manager.positions(requests)
    with set_forward_context(stack.manager.metadata(stack.manager.batch(requests))):
        streams, pre = first_streams, None
        for layer in layers:
            streams, pre = layer(streams, positions, pre)
        assert pre is not None
        output = connections[3].collapse(streams, pre)
        sublayers = [stack.layers[0], torch.tanh, stack.layers[1], torch.tanh]
        expected = output_of_oracle(first_streams.double().numpy(), weights, sublayers, positions)

    assert np.abs(output.double().numpy() - expected).max() <= 1e-4 * np.abs(expected).max()


def output_of_oracle(
    streams: Any, weights: list[HyperConnectionWeights], sublayers: list[Any], positions: torch.Tensor
) -> Any:
    """The same by the oracle, sublayer by sublayer. Attention runs on the inputs that the oracle computed."""
    geometry, n, pre = SMALL_V41, SMALL_V41.hc_mult, None
    for sublayer_weights, sublayer in zip(weights, sublayers, strict=True):
        fn, base, scale = (
            tensor.double().numpy() for tensor in (sublayer_weights.fn, sublayer_weights.base, sublayer_weights.scale)
        )
        inputs = [oracle_layer.collapse(x, None if pre is None else pre[t]) for t, x in enumerate(streams)]
        hidden = torch.from_numpy(np.stack(inputs)).float()
        output = (sublayer(hidden) if sublayer is torch.tanh else sublayer(hidden, positions)).double().numpy()
        new_streams, new_pre = [], []
        for x, y in zip(streams, output, strict=True):
            logits = oracle_layer.hc_logits(oracle_layer.hc_mixes(x, fn, geometry.eps), scale, base, (n, n, n * n))
            new_pre.append(oracle_layer.sigmoid(logits[0]) + geometry.hc_eps)
            comb = oracle_layer.sinkhorn(logits[2].reshape(n, n), geometry.hc_eps, geometry.hc_sinkhorn_iters)
            new_streams.append(oracle_layer.hc_post(y, x, 2 * oracle_layer.sigmoid(logits[1]), comb))
        streams, pre = np.stack(new_streams), np.stack(new_pre)
    assert pre is not None
    return np.stack([oracle_layer.collapse(x, token_pre) for x, token_pre in zip(streams, pre, strict=True)])

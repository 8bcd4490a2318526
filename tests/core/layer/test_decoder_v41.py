"""`DeepseekV41DecoderLayer`: delayed hyper-connections around layers of V4.1, against the oracle."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from dsv4attn.core.layer.decoder_layer import DeepseekV41DecoderLayer
from dsv4attn.core.layer.hyper_connections import HyperConnections
from dsv4attn.core.metadata.forward_context import set_forward_context
from dsv4attn.core.model.weights import HyperConnectionWeights
from dsv4attn.testing import oracle_layer
from tests.harness_v41 import SMALL_V41, v41_stack


def test_decoder_layers_hand_the_pre_of_each_sublayer_to_the_next() -> None:
    whole, sizes, n = v41_stack(), SMALL_V41, SMALL_V41.hc_mult
    generator, m = torch.Generator().manual_seed(0), 2 * n + n * n
    around = [
        HyperConnectionWeights(
            torch.randn(m, n * sizes.hidden_size, generator=generator) * 0.1,
            torch.randn(m, generator=generator),
            torch.rand(3, generator=generator),
        )
        for _ in range(4)
    ]
    steps = whole.layers[0].backend.layer_ops
    connected = [HyperConnections(sizes, weights, steps) for weights in around]
    layers = [DeepseekV41DecoderLayer(whole.layers[i], torch.tanh, *connected[2 * i : 2 * i + 2]) for i in (0, 1)]
    first = torch.randn(12, n, sizes.hidden_size, generator=generator)
    requests = [(whole.manager.new(), 12)]
    positions = whole.manager.positions(requests)
    with set_forward_context(whole.manager.metadata(whole.manager.batch(requests))):
        streams, pre = first, None
        for layer in layers:
            streams, pre = layer(streams, positions, pre)
        assert pre is not None
        found = connected[3].collapse(streams, pre)
        sublayers = [whole.layers[0], torch.tanh, whole.layers[1], torch.tanh]
        wanted = mixed(first.double().numpy(), around, sublayers, positions)

    assert np.abs(found.double().numpy() - wanted).max() <= 1e-4 * np.abs(wanted).max()


def mixed(streams: Any, around: list[HyperConnectionWeights], sublayers: list[Any], positions: torch.Tensor) -> Any:
    """The same by the oracle, sublayer by sublayer. Attention runs on what the oracle made."""
    sizes, n, pre = SMALL_V41, SMALL_V41.hc_mult, None
    for weights, run in zip(around, sublayers, strict=True):
        fn, base, scale = (getattr(weights, name).double().numpy() for name in ("fn", "base", "scale"))
        inputs = [oracle_layer.collapse(x, None if pre is None else pre[t]) for t, x in enumerate(streams)]
        given = torch.from_numpy(np.stack(inputs)).float()
        output = (run(given) if run is torch.tanh else run(given, positions)).double().numpy()
        after, weighed = [], []
        for x, y in zip(streams, output, strict=True):
            logits = oracle_layer.hc_logits(oracle_layer.hc_mixes(x, fn, sizes.eps), scale, base, (n, n, n * n))
            weighed.append(oracle_layer.sigmoid(logits[0]) + sizes.hc_eps)
            comb = oracle_layer.sinkhorn(logits[2].reshape(n, n), sizes.hc_eps, sizes.hc_sinkhorn_iters)
            after.append(oracle_layer.hc_post(y, x, 2 * oracle_layer.sigmoid(logits[1]), comb))
        streams, pre = np.stack(after), np.stack(weighed)
    assert pre is not None
    return np.stack([oracle_layer.collapse(x, weights) for x, weights in zip(streams, pre, strict=True)])

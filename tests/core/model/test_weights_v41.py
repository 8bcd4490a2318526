"""Layers of DeepSeek-V4.1 with checkpoint weights: fp8 with an exponent for each block of 32 x 32."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dsv4attn.core.cache.layout import KVCacheLayout
from dsv4attn.core.model.quantized_weight import BlockScaledWeight
from dsv4attn.selection import load_backend
from dsv4attn.testing.oracle import attention as oracle
from tests.core.model.scaled import E8M0
from tests.harness import LayerStack, random_weights
from tests.harness_v41 import LIMITS_V41, SMALL_V41

FORMS = ("pair", "weight_scale_inv", "weight_scale", "scale")


def published(weight: Tensor, form: str) -> tuple[Any, Tensor]:
    """A matrix in blocks of 32 x 32 as callers pass it, and its values in bf16."""
    rows, columns = weight.shape
    grid = -(-rows // 32), -(-columns // 32)
    exponents = np.random.default_rng(rows * columns).integers(116, 122, grid).astype(np.uint8)
    factors = np.kron(np.ldexp(1.0, exponents.astype(int) - 127), np.ones((32, 32)))[:rows, :columns]
    codes = oracle.encode_e4m3(weight.double().numpy() / factors, fnuz=False)
    values = oracle.round_bf16((oracle.decode_e4m3(codes, fnuz=False) * factors).astype(np.float32))
    scale: Tensor = torch.from_numpy(exponents)
    if E8M0 is not None:
        scale = scale.view(E8M0)
    fp8 = torch.from_numpy(codes).view(torch.float8_e4m3fn)
    scaled_weight = BlockScaledWeight(fp8, scale) if form == "pair" else SimpleNamespace(**{"weight": fp8, form: scale})
    return scaled_weight, torch.from_numpy(values).bfloat16()


def test_a_released_checkpoint_is_what_its_codes_and_exponents_stand_for() -> None:
    """Bit for bit as with bf16 weights, whose values are computed here."""
    fp8: dict[int, dict[str, Any]] = {}
    bf16: dict[int, dict[str, Any]] = {}
    for i in range(SMALL_V41.num_layers):
        fp8[i], bf16[i] = (random_weights(SMALL_V41, i, dtype=torch.bfloat16) for _ in range(2))
        for n, (name, value) in enumerate(fp8[i].items()):
            if value.dim() == 2:
                fp8[i][name], bf16[i][name] = published(value, FORMS[n % len(FORMS)])
    outs = []
    for weights in (fp8, bf16):
        whole = LayerStack(
            load_backend("reference"),
            KVCacheLayout.rows(48, 16, dtype=torch.bfloat16),
            geometry=SMALL_V41,
            limits=LIMITS_V41,
            dtype=torch.bfloat16,
            weights=weights,
        )
        sequence = whole.manager.new()
        outs.append(
            [*whole.step([(sequence, 20)], whole.hidden(1, 20)), *whole.step([(sequence, 1)], whole.hidden(2, 1))]
        )

    assert all(map(torch.equal, *outs))
    assert all(bool(out.any()) for out in outs[0])

"""Weights of hyper-connections that change: seen by the next call, or taken by `refresh`."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import pytest
import torch
from torch import Tensor, nn

from dsv4attn.core.contract.backend import complete
from dsv4attn.core.layer.hyper_connections import HyperConnections
from dsv4attn.core.model import tensor_state
from dsv4attn.core.model.weights import HyperConnectionWeights
from dsv4attn.errors import ArgumentError
from dsv4attn.selection import load_backend
from tests.core.layer.weight_changes import changed, differ, in_place, other_memory, state_dict, through_data
from tests.harness import SMALL

BF16, FP32 = torch.bfloat16, torch.float32


def mixes(dtype: torch.dtype) -> tuple[HyperConnectionWeights, Tensor]:
    """Weights, and the weight of the norm."""
    n, d, g = SMALL.hc_mult, SMALL.hidden_size, torch.Generator().manual_seed(2)
    m = 2 * n + n * n
    shapes = {"fn": (m, n * d), "base": (m,), "scale": (3,)}
    made = {
        k: nn.Parameter((torch.randn(s, generator=g) * 0.3).to(dtype), requires_grad=False) for k, s in shapes.items()
    }
    norm = nn.Parameter((1 + 0.2 * torch.randn(d, generator=g)).to(dtype), requires_grad=False)
    return HyperConnectionWeights(**made), norm


def through(connections: HyperConnections) -> list[Tensor]:
    g = torch.Generator().manual_seed(4)
    streams = torch.randn(3, SMALL.hc_mult, SMALL.hidden_size, generator=g).to(BF16)
    post, comb, hidden = connections.pre(streams)
    return [post, comb, hidden, *connections.after(hidden, streams, post, comb)]


def connected(weights: HyperConnectionWeights, norm: Tensor) -> HyperConnections:
    return HyperConnections(SMALL, weights, complete(load_backend("reference")).layer_ops, norm)


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("change", [in_place, through_data, other_memory, state_dict])
@pytest.mark.parametrize("name", ["fn", "base", "scale", "norm"])
def test_every_weight_of_hyper_connections_is_seen(dtype: torch.dtype, change: Callable[..., None], name: str) -> None:
    weights, norm = mixes(dtype)
    subject = connected(weights, norm)
    before, copies = through(subject), dict(subject._copies._made)
    tensor = norm if name == "norm" else getattr(weights, name)
    change(tensor, changed(tensor), None, "")
    after = through(subject)
    assert differ(after, before)
    assert not differ(after, through(connected(weights, norm)))
    assert all(subject._copies._made[key] is made for key, made in copies.items())


def test_hyper_connections_are_refreshed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_state, "_view", lambda _: None)
    weights, norm = mixes(BF16)
    subject = connected(weights, norm)
    through(subject)
    through_data(weights.base, changed(weights.base))
    wanted = through(connected(weights, norm))
    assert differ(through(subject), wanted)
    subject.refresh()
    assert not differ(through(subject), wanted)
    others, another = mixes(FP32)
    subject.refresh(others, another)
    assert not differ(through(subject), through(connected(others, another)))
    with pytest.raises(ArgumentError, match=r"^hyper_connections\.fn: expected a tensor on cpu, got one on meta"):
        subject.refresh(attrs.evolve(others, fn=others.fn.to("meta")))
    with pytest.raises(ArgumentError, match=r"^hyper_connections\.base: expected shape"):
        subject.refresh(attrs.evolve(others, base=others.scale))

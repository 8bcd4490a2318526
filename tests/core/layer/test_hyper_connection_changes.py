"""Changed weights of hyper-connections are seen by the next call, or after `refresh`."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import pytest
import torch
from torch import Tensor, nn

from dsv4attn.core.contract import LayerOps, MixWeights
from dsv4attn.core.layer.hyper_connections import HyperConnections
from dsv4attn.core.model.weight_copies import WeightCopies
from dsv4attn.core.model.weights import HyperConnectionWeights
from dsv4attn.errors import ArgumentError
from dsv4attn.selection import load_backend
from tests.core.layer.weight_changes import CHANGES, changed, differ, in_place, through_data
from tests.harness import SMALL

BF16, FP32 = torch.bfloat16, torch.float32


def random_weights(dtype: torch.dtype) -> tuple[HyperConnectionWeights, Tensor]:
    """Weights of the mixes, and the weight of the norm."""
    n, d, g = SMALL.hc_mult, SMALL.hidden_size, torch.Generator().manual_seed(2)
    m = 2 * n + n * n
    shapes = {"fn": (m, n * d), "base": (m,), "scale": (3,)}
    parameters = {
        name: nn.Parameter((torch.randn(shape, generator=g) * 0.3).to(dtype), requires_grad=False)
        for name, shape in shapes.items()
    }
    norm = nn.Parameter((1 + 0.2 * torch.randn(d, generator=g)).to(dtype), requires_grad=False)
    return HyperConnectionWeights(**parameters), norm


def results_of(connections: HyperConnections) -> list[Tensor]:
    """Results of `pre` and `after` for the same streams in every call."""
    g = torch.Generator().manual_seed(4)
    streams = torch.randn(3, SMALL.hc_mult, SMALL.hidden_size, generator=g).to(BF16)
    post, comb, hidden = connections.pre(streams)
    return [post, comb, hidden, *connections.after(hidden, streams, post, comb)]


def connected(weights: HyperConnectionWeights, norm: Tensor) -> HyperConnections:
    return HyperConnections(SMALL, weights, load_backend("reference").layer_ops, norm)


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("change", CHANGES[:-2])
@pytest.mark.parametrize("name", ["fn", "base", "scale", "norm"])
def test_every_weight_of_hyper_connections_is_seen(dtype: torch.dtype, change: Callable[..., None], name: str) -> None:
    weights, norm = random_weights(dtype)
    connections = connected(weights, norm)
    old_results, copies = results_of(connections), dict(connections._copies._made)
    tensor = norm if name == "norm" else getattr(weights, name)
    change(tensor, changed(tensor), None, "")
    new_results = results_of(connections)
    assert differ(new_results, old_results)
    assert not differ(new_results, results_of(connected(weights, norm)))
    assert all(connections._copies._made[key] is copy for key, copy in copies.items())
    # of what is read as it is there is no copy
    assert len(copies) == (3 if dtype == BF16 else 0)


def test_hyper_connections_are_refreshed() -> None:
    weights, norm = random_weights(BF16)
    connections = connected(weights, norm)
    results_of(connections)
    through_data(weights.base, changed(weights.base))
    expected = results_of(connected(weights, norm))
    assert differ(results_of(connections), expected)
    connections.refresh()
    assert not differ(results_of(connections), expected)
    new_weights, new_norm = random_weights(FP32)
    connections.refresh(new_weights, new_norm)
    assert not differ(results_of(connections), results_of(connected(new_weights, new_norm)))
    with pytest.raises(ArgumentError, match=r"^hyper_connections\.fn: expected a tensor on cpu, got one on meta"):
        connections.refresh(attrs.evolve(new_weights, fn=new_weights.fn.to("meta")))
    with pytest.raises(ArgumentError, match=r"^hyper_connections\.base: expected shape"):
        connections.refresh(attrs.evolve(new_weights, base=new_weights.scale))


def test_after_an_error_while_copies_are_made_all_of_them_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, norm = random_weights(BF16)
    connections = connected(weights, norm)
    in_place(weights.fn, changed(weights.fn))
    with monkeypatch.context() as patch:
        patch.setattr(WeightCopies, "_memory", lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError()))
        with pytest.raises(torch.OutOfMemoryError):
            results_of(connections)
    assert not differ(results_of(connections), results_of(connected(weights, norm)))


def test_weights_of_hyper_connections_that_do_not_fit_are_refused_by_their_names() -> None:
    """Torch would multiply by memory that a meta tensor does not have, and by fp8 codes without their scales."""
    weights, norm = random_weights(FP32)
    for changes, other_norm, said in (
        ({"base": weights.base.to("meta")}, norm, r"^hyper_connections\.base: expected a tensor on cpu.*on meta"),
        ({"fn": weights.fn.to("meta")}, norm, r"^hyper_connections\.base: expected a tensor on meta.*got one on cpu"),
        ({"fn": weights.fn.to(torch.float8_e4m3fn)}, norm, r"^hyper_connections\.fn: expected float32 or bf"),
        ({"scale": weights.scale.long()}, norm, r"^hyper_connections\.scale: expected float32 or bfloat16, got int64"),
        ({}, norm.to("meta"), r"^norm_weight: expected a tensor on cpu"),
        ({}, norm[:1], r"^norm_weight: expected"),
        ({}, [1.0], r"^norm_weight: expected a tensor"),
    ):
        with pytest.raises(ArgumentError, match=said):
            connected(attrs.evolve(weights, **changes), other_norm)  # type: ignore[arg-type]


def test_an_op_gets_the_weights_as_one_struct_that_is_made_once() -> None:
    """A vendor imports the struct from the contract."""
    weights, norm = random_weights(FP32)
    received: list[MixWeights] = []

    def mhc_pre(residual: Tensor, weights: MixWeights) -> tuple[Tensor, Tensor, Tensor]:
        received.append(weights)
        return LayerOps().mhc_pre(residual, weights)

    connections = HyperConnections(SMALL, weights, attrs.evolve(LayerOps(), mhc_pre=mhc_pre), norm)
    streams = torch.zeros(3, SMALL.hc_mult, SMALL.hidden_size)
    for _ in range(2):
        connections.pre(streams)
    first, second = received
    assert first is second
    assert (first.hc_pre_eps, first.sinkhorn_repeat) == (SMALL.hc_eps, SMALL.hc_sinkhorn_iters)

    in_place(weights.base, changed(weights.base), None, "")
    connections.pre(streams)
    assert torch.equal(received[-1].hc_base, weights.base)


def test_the_op_of_compiled_code_passes_torchs_own_checks() -> None:
    connections, (n, d) = connected(*random_weights(BF16)), (SMALL.hc_mult, SMALL.hidden_size)
    streams, output, post, comb, pre = (torch.rand(3, *sizes) for sizes in ((n, d), (d,), (n, 1), (n, n), (n,)))
    arguments: dict[str, list[Tensor | None]] = {
        "mhc_pre": [streams],
        "mhc_fused_post_pre": [output, streams, post, comb],
        "mhc_pre_delayed": [streams, None],
        "mhc_fused_post_pre_delayed": [output, streams, post, comb, pre],
    }
    for op, tensors in arguments.items():
        torch.library.opcheck(torch.ops.dsv4attn.hyper_connections, (tensors, op, connections._handle))

"""Hyper-connections of many tokens on Hopper, by their definition in torch; and when the shared kernels serve."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4attn.backends._triton.launching.runtime import INTERPRETED, architecture, observed
from dsv4attn.backends.sm90 import hyper_connections
from tests.backends._triton.compiling.gates import broken_limits
from tests.backends._triton.layer.test_hyper_connections import Call, near
from tests.layer_ops import TorchOps

TORCH = TorchOps()
NAMES = "streams", "post", "comb", "entering"


def made(call: Call, *, deterministic: bool = False) -> tuple[dict[str, Tensor], list[str]]:
    """Results by name, and the kernels that made them."""
    given = call.x, call.residual, call.post, call.comb
    with observed() as seen:
        found = hyper_connections.mhc_fused_post_pre(*given, *call.mixing(), deterministic=deterministic)
    return dict(zip(NAMES, found, strict=True)), [variant.name for variant in seen]


def defined(call: Call, new: Tensor) -> dict[str, Tensor]:
    """What the definition makes; behind the new streams, of those that were found.

    A device may round some of them to the other neighbour.
    """
    own = TORCH.mhc_post(call.x, call.residual, call.post, call.comb)
    return dict(zip(NAMES, (own, *TORCH.mhc_pre(new, *call.mixing())), strict=True))


@pytest.mark.device
@pytest.mark.skipif(INTERPRETED or architecture() != "sm_90", reason="needs a Hopper GPU")
class TestOnDevice:
    @pytest.mark.parametrize(
        ("hidden", "count", "pad"),
        [(128, 1, 0), (128, 63, 8), (256, 64, 0), (384, 65, 8), (4096, 300, 0), (7168, 520, 16), (1024, 3000, 8)],
    )
    def test_it_is_the_definition(self, hidden: int, count: int, pad: int) -> None:
        for seed in (0, 1):
            call = Call(4, hidden, count, seed=seed, normed=seed == 1, pad=pad)
            call.post, call.comb = call.post.contiguous(), call.comb.contiguous()
            found, kernels = made(call, deterministic=True)

            assert kernels[0].startswith("post_products_tiles")
            near(found, defined(call, found["streams"]))

    def test_several_chunks_are_one(self, monkeypatch: pytest.MonkeyPatch) -> None:
        call = Call(4, 512, 700, normed=True)
        whole, _ = made(call)
        monkeypatch.setattr(hyper_connections, "CHUNK", 192)
        found, _ = made(call)

        assert all(torch.equal(found[name], whole[name]) for name in NAMES)

    def test_a_tokens_bits_do_not_depend_on_the_others(self) -> None:
        call = Call(4, 512, 400, normed=True)
        whole, _ = made(call, deterministic=True)
        for kept in (slice(0, 1), slice(130, 333)):
            part = Call(4, 512, 400, normed=True)
            for name in ("x", "residual", "post", "comb"):
                setattr(part, name, getattr(part, name)[kept])
            found, _ = made(part, deterministic=True)
            assert all(torch.equal(found[name], whole[name][kept]) for name in NAMES)

    def test_a_nan_stays_in_its_token(self) -> None:
        call = Call(4, 256, 300)
        call.residual[77, 2, 5] = torch.nan
        found, _ = made(call)

        spoilt = {name: each.flatten(1).isnan().any(1).nonzero().flatten().tolist() for name, each in found.items()}
        assert spoilt == {name: [77] for name in NAMES}

    def test_it_is_captured(self) -> None:
        call = Call(4, 256, 300, normed=True)
        wanted, _ = made(call)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found, _ = made(call)
        for each in found.values():
            each.fill_(torch.nan)
        graph.replay()

        assert all(torch.equal(found[name], wanted[name]) for name in NAMES)


def spoil(call: Call, case: str) -> None:
    if case == "rows":
        call.x = torch.cat([call.x, call.x[:, :1]], 1)[:, :-1]
    elif case == "post":
        call.post = torch.cat([call.post, call.post], 1)[:, ::2]
    elif case == "comb":
        call.comb = torch.cat([call.comb, call.comb], 2)[:, :, :4]


@pytest.mark.parametrize(
    ("case", "n", "hidden", "count", "dtype"),
    [
        ("rows", 4, 128, 5, torch.bfloat16),
        ("post", 4, 128, 5, torch.bfloat16),
        ("comb", 4, 128, 5, torch.bfloat16),
        ("streams", 3, 128, 5, torch.bfloat16),
        ("columns", 4, 192, 5, torch.bfloat16),
        ("fp32", 4, 128, 5, torch.float32),
        ("few", 4, 128, 5, torch.bfloat16),
    ],
)
def test_what_it_does_not_serve_is_left_to_the_shared_kernels(
    case: str, n: int, hidden: int, count: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("launched")

    monkeypatch.setattr(hyper_connections, "INTERPRETED", False)
    monkeypatch.setattr(hyper_connections, "launch", refuse)
    call = Call(n, hidden, count, dtype)
    spoil(call, case)
    found, kernels = made(call, deterministic=case != "few")

    assert [name.split("[")[0] for name in kernels] == ["post_products_kernel", "mix_kernel"]
    near(found, defined(call, found["streams"]))


def test_its_form_keeps_every_limit() -> None:
    """It is also foreseen: a command that is asked for a kernel that no backend names fails."""
    assert broken_limits("sm90", ["sm_90"], "--kernel", "post_products_tiles") == []

"""Hyper-connections of many tokens on Hopper, compared with torch, and the calls that the shared kernels serve."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4attn.backends._triton.launching.runtime import INTERPRETED, architecture, observed
from dsv4attn.backends.sm90 import hyper_connections
from dsv4attn.backends.sm90.ops import layer_ops
from tests.backends._triton.compiling.gates import broken_limits
from tests.backends._triton.layer.test_hyper_connections import MIXES, StreamsCall, check_near, named
from tests.layer_ops import TorchOps

TORCH = TorchOps()


def run_fused(call: StreamsCall, *, deterministic: bool = False) -> tuple[dict[str, Tensor], list[str]]:
    """Results of `mhc_fused_post_pre` by name, and the kernels that were launched."""
    with observed() as launched:
        residual, *mixes = layer_ops(deterministic=deterministic).mhc_fused_post_pre(
            call.x, call.residual, call.post, call.comb, call.weights
        )
    return {"residual": residual, **named("", MIXES, mixes)}, [variant.name for variant in launched]


def expected_of(call: StreamsCall, new_residual: Tensor) -> dict[str, Tensor]:
    """The results of torch. What follows the new streams is computed from the streams of the kernel.

    A device may round some of the new streams to the other neighbour.
    """
    residual = TORCH.mhc_post(call.x, call.residual, call.post, call.comb)
    return {"residual": residual, **named("", MIXES, TORCH.mhc_pre(new_residual, call.weights))}


def equal(results: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    """Whether all results have the same bits."""
    return all(torch.equal(results[name], expected[name]) for name in expected)


@pytest.mark.device
@pytest.mark.skipif(INTERPRETED or architecture() != "sm_90", reason="needs a Hopper GPU")
class TestOnDevice:
    @pytest.mark.parametrize(
        ("hidden", "count", "pad"),
        [(128, 1, 0), (128, 63, 8), (256, 64, 0), (384, 65, 8), (4096, 300, 0), (7168, 520, 16), (1024, 3000, 8)],
    )
    def test_it_is_torchs_op(self, hidden: int, count: int, pad: int) -> None:
        for seed in (0, 1):
            call = StreamsCall(4, hidden, count, seed=seed, normed=seed == 1, pad=pad)
            call.post, call.comb = call.post.contiguous(), call.comb.contiguous()
            results, kernels = run_fused(call, deterministic=True)

            assert kernels[0].startswith("post_products_tiles")
            check_near(results, expected_of(call, results["residual"]))

    def test_several_chunks_are_one(self, monkeypatch: pytest.MonkeyPatch) -> None:
        call = StreamsCall(4, 512, 700, normed=True)
        in_one_chunk, _ = run_fused(call)
        monkeypatch.setattr(hyper_connections, "CHUNK", 192)
        in_chunks, _ = run_fused(call)

        assert equal(in_chunks, in_one_chunk)

    def test_a_tokens_bits_do_not_depend_on_the_others(self) -> None:
        call = StreamsCall(4, 512, 400, normed=True)
        of_all_tokens, _ = run_fused(call, deterministic=True)
        for tokens in (slice(0, 1), slice(130, 333)):
            results, _ = run_fused(call.tokens(tokens), deterministic=True)
            assert equal(results, {name: result[tokens] for name, result in of_all_tokens.items()})

    def test_a_nan_stays_in_its_token(self) -> None:
        call = StreamsCall(4, 256, 300)
        call.residual[77, 2, 5] = torch.nan
        results, _ = run_fused(call)

        for name, result in results.items():
            assert result.flatten(1).isnan().any(1).nonzero().flatten().tolist() == [77], name

    def test_it_is_captured(self) -> None:
        call = StreamsCall(4, 256, 300, normed=True)
        expected, _ = run_fused(call)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results, _ = run_fused(call)
        for result in results.values():
            result.fill_(torch.nan)
        graph.replay()

        assert equal(results, expected)


def break_alignment(call: StreamsCall, case: str) -> None:
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
    call = StreamsCall(n, hidden, count, dtype)
    break_alignment(call, case)
    results, kernels = run_fused(call, deterministic=case != "few")

    assert [name.split("[")[0] for name in kernels] == ["post_products_kernel", "mix_kernel"]
    check_near(results, expected_of(call, results["residual"]))


def test_its_variant_keeps_every_limit() -> None:
    """Warm-up also foresees the variant: the command fails for a kernel that no backend names."""
    assert broken_limits("sm90", ["sm_90"], "--kernel", "post_products_tiles") == []

"""Two ranks over gloo against one: their heads are those of one rank, and the sum of their projections its output."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from processes import run
from torch import Tensor

BEFORE = [(150, 1), (40, 1), (0, 20)]


def whole(shape: tuple[int, ...], seed: int) -> Tensor:
    """A weight of the whole model."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).mul(0.05).bfloat16()


def steps_of_a_rank(rank: int, size: int, folder: str) -> None:
    """Run a step on a rank's layers; attention and projection of each layer go to a file."""
    if size > 1:
        import conftest  # noqa: F401 - the environment, in a process of its own
    from dsv4attn_vllm.cuda import CUDAAttention
    from engine import Engine, config_of, world

    torch.manual_seed(0)
    config = config_of(tensor_parallel_size=size)
    with world(config, rank, size, f"file://{folder}/store{size}"):
        engine = Engine(config, CUDAAttention)
        for i, layer in enumerate(engine.layers):
            part = slice(rank * layer.n_local_heads, (rank + 1) * layer.n_local_heads)
            layer.attn_sink.data.copy_(whole((4,), 7 * i).float()[part] * 20)
            rows = slice(rank * 64 * layer.n_local_groups, (rank + 1) * 64 * layer.n_local_groups)
            layer.wo_a.weight.data.copy_(whole((128, 1024), 7 * i + 1)[rows])
            layer.wo_b.weight.data.copy_(whole((256, 128), 7 * i + 2)[:, rows])
            for weight in [] if layer.compressor is None else [layer.compressor.ape, layer.compressor.norm.weight]:
                weight.data.copy_(whole(tuple(weight.shape), 7 * i + 3))
        outs = engine.step([(engine.request(tokens), count) for tokens, count in BEFORE])
        ys = [layer._o_proj(out, engine.positions[:22]) for layer, out in zip(engine.layers, outs, strict=True)]
        torch.save((outs, ys), f"{folder}/{size}-{rank}.pt")


def test_two_ranks_equal_one(tmp_path: Path) -> None:
    steps_of_a_rank(0, 1, str(tmp_path))
    run(tmp_path, steps_of_a_rank, *({"rank": rank, "size": 2, "folder": str(tmp_path)} for rank in (0, 1)))

    def said(size: int, rank: int) -> Any:
        return torch.load(tmp_path / f"{size}-{rank}.pt")

    (outs, ys), ranks = said(1, 0), [said(2, 0), said(2, 1)]
    for i, out in enumerate(outs):
        heads = torch.cat([ranks[0][0][i], ranks[1][0][i]], dim=1)
        # torch multiplies matrices of another size in another order
        assert torch.allclose(out.float(), heads.float(), rtol=0.01, atol=1e-3)
        assert torch.equal(ranks[0][1][i], ranks[1][1][i])
        assert torch.allclose(ys[i].float(), ranks[0][1][i].float(), rtol=0, atol=0.02 * ys[i].abs().max().item())

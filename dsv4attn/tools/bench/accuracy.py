"""Expected results of a case, in fp32 torch on the same device, and the error of a result."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import frozen
from torch import Tensor

from dsv4attn.core.contract.backend import Products
from dsv4attn.tools.bench.inputs import Inputs
from dsv4attn.tools.bench.records import read

__all__ = ["Error", "attention", "error", "limit", "normalised", "rotated"]

_TILE_BYTES = 2**28


@frozen
class Error:
    """Relative error of a result, in 2-norms.

    total: norm of the difference over the norm of the expected output.
    worst: the same of the worst row.
    """

    total: float
    worst: float

    def within(self, limit: float) -> bool:
        """Whether a result is right. A single row may have a larger error than the whole output. NaN is never right."""
        return self.total <= limit and self.worst <= 5 * limit


def limit(products: Products) -> float:
    """Largest error of a right result. bf16 products typically give 2e-3, fp8 products up to 16 times as much."""
    return 1e-2 if products is Products.BF16 else 1e-1


def error(pairs: Sequence[tuple[Tensor, Tensor]]) -> Error:
    """Largest error of several (result, expected) pairs. Each is [..., D]; a row is the last dim."""
    totals, worsts = [], []
    for got, expected in pairs:
        tiles = (tensor.flatten(0, -2).split(65536) for tensor in (got, expected))
        away, size = [], []
        for part, wanted in zip(*tiles, strict=True):
            away.append((part.float() - wanted.float()).square().sum(-1))
            size.append(wanted.float().square().sum(-1))
        off, all_ = torch.cat(away).double(), torch.cat(size).double()
        # a row that should be zero is judged by the size of the others
        mean = all_.mean().clamp_min(1e-30)
        totals.append(float((off.sum() / all_.sum().clamp_min(1e-30)).sqrt()))
        worsts.append(float((off / torch.where(all_ > 1e-6 * mean, all_, mean)).max().sqrt()))
    # `max` would drop a NaN that is not the first value
    return Error(*(next((v for v in values if v != v), max(values)) for values in (totals, worsts)))  # noqa: PLR0124


def attention(inputs: Inputs) -> Tensor:
    """[T, H, D] fp32: attention of every token over its own keys, read from the pages, with the sink."""
    q, layer = inputs.q, inputs.layer
    out = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    width = sum(segment.slots.indices.shape[1] for segment in inputs.segments)
    step = max(_TILE_BYTES // (width * 4 * (2 * layer.head_dim + 2 * layer.num_heads)), 1)
    sink = inputs.sink[:, None].expand(-1, 1)
    for start in range(0, q.shape[0], step):
        part = slice(start, start + step)
        keys, present = [], []
        for segment in inputs.segments:
            indices, lens = segment.slots.indices[part], segment.slots.lens[part]
            present.append(torch.arange(indices.shape[1], device=q.device) < lens[:, None])
            rows = read(segment.cache, indices.clamp_min(0).flatten())
            keys.append(rows.unflatten(0, indices.shape))
        k, there = torch.cat(keys, 1), torch.cat(present, 1)[:, None]
        z = torch.bmm(q[part].float(), k.mT).mul_(layer.scale).masked_fill_(~there, -torch.inf)
        p = torch.softmax(torch.cat([z, sink.expand(z.shape[0], -1, -1)], -1), -1)[..., :-1]
        out[part] = torch.bmm(p, k)
    return out


def normalised(q: Tensor, eps: float) -> Tensor:
    """Each head of q [..., D] by its root mean square, in fp32."""
    x = q.float()
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()


def rotated(x: Tensor, cos_sin: Tensor) -> Tensor:
    """Pairs (2i, 2i + 1) of the trailing dims of x [T, ..., D] turned by cos_sin [T, dim]: cosines, then sines."""
    half = cos_sin.shape[1] // 2
    shape = (cos_sin.shape[0], *[1] * (x.dim() - 2), half)
    turn = torch.complex(cos_sin[:, :half].reshape(shape), cos_sin[:, half:].reshape(shape))
    tail = torch.view_as_complex(x[..., -2 * half :].float().reshape(*x.shape[:-1], half, 2))
    return torch.cat([x[..., : -2 * half].float(), torch.view_as_real(tail * turn).flatten(-2)], -1)

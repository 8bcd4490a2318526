"""Outputs that share memory with an input are refused. The test for shared memory is exact."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4attn.core.attention.forward_mqa import forward_mqa
from dsv4attn.core.attention.overlap import share_memory
from dsv4attn.core.cache.layout import KVCacheLayout, PagedKVCache
from dsv4attn.core.model.geometry import LayerKind
from dsv4attn.errors import ArgumentError
from tests.harness import SWA, forward_args, metadata_of


def bytes_named(tensor: Tensor) -> set[int]:
    """The address of every byte of every element, one by one."""
    starts = {tensor.data_ptr()}
    for stride, n in zip(tensor.stride(), tensor.shape, strict=True):
        starts = {start + i * stride * tensor.element_size() for start in starts for i in range(n)}
    return {start + byte for start in starts for byte in range(tensor.element_size())} if tensor.numel() else set()


def test_against_every_byte() -> None:
    """Views of one buffer with the same strides, at random places: the answer is whether a byte is in both."""
    choice, seen = random.Random(0), [0, 0]
    buffer = torch.zeros(4096, dtype=torch.int16)
    for _ in range(400):
        inner = choice.choice([(1, 4), (2, 4), (3, 6)])
        strides = (choice.choice([24, 30, 48]), inner[1] * choice.choice([1, 2]), 1)
        views = []
        for _ in range(2):
            shape = choice.randrange(5), choice.randrange(1, 4), choice.randrange(1, inner[1] + 1)
            views.append(buffer.as_strided(shape, strides, choice.randrange(80)))
        a, b = views
        if (shape[1] - 1) * strides[1] + shape[2] > strides[0]:
            continue
        meets = not bytes_named(a).isdisjoint(bytes_named(b))
        seen[meets] += 1
        if all((v.shape[1] - 1) * strides[1] + v.shape[2] <= strides[0] for v in views) and all(
            n > 1 for v in views for n in v.shape
        ):
            assert share_memory(a, b) is meets
        else:  # tensors of different dimensions may be refused though they lie apart
            assert share_memory(a, b) >= meets
        assert share_memory(a, b) is share_memory(b, a)
    assert min(seen) > 50


def test_tensors_without_memory_share_none() -> None:
    meta_tensor = torch.zeros(4, device="meta")
    assert not share_memory(meta_tensor, meta_tensor)
    empty = torch.zeros(0, 4)
    assert not share_memory(empty, empty)


def of(kind: Any, **changes: Any) -> dict[str, Any]:
    return {**forward_args(kind), "metadata": metadata_of(kind), **changes}


def test_out_that_is_q_or_overlaps_it() -> None:
    call = of(SWA)
    q = call["q"]
    buffer = torch.zeros(q.shape[0] + 1, *q.shape[1:], dtype=q.dtype)
    buffer[1:].copy_(q)
    original = buffer.clone()
    for query, out in ((q, q), (buffer[1:], buffer[:-1]), (q, q.view(q.shape))):
        with pytest.raises(ArgumentError, match=r"^out: expected memory apart from that of q, got .* -> a kernel may"):
            forward_mqa(**{**call, "q": query, "out": out})
    assert torch.equal(buffer, original)


def test_it_is_seen_after_steps_that_are_known() -> None:
    """A step is planned with tensors that lie apart; the same step with tensors of the same form that do not."""
    call = of(SWA)
    for _ in range(2):
        forward_mqa(**call)
    q = call["q"].clone()
    with pytest.raises(ArgumentError, match=r"^out: expected memory apart from that of q"):
        forward_mqa(**{**call, "q": q, "out": q})
    assert torch.equal(q, call["q"])
    heads, tokens = q.shape[1], q.shape[0]
    for _ in range(2):
        forward_mqa(**{**call, "lse": torch.zeros(tokens, heads)})
    for name in ("q", "out"):
        lse = call[name].view(-1).view(torch.float32)[: tokens * heads].view(tokens, heads)
        with pytest.raises(ArgumentError, match=f"^lse: expected memory apart from that of {name}"):
            forward_mqa(**{**call, "lse": lse})
    assert torch.equal(q, call["q"])


def test_columns_of_one_buffer_are_apart() -> None:
    call = of(SWA)
    q, expected = call["q"], call["out"]
    forward_mqa(**call)
    both = torch.zeros(q.shape[0], 2 * q.shape[1], q.shape[2], dtype=q.dtype)
    heads = q.shape[1]
    both[:, :heads].copy_(q)
    columns = {**call, "q": both[:, :heads], "out": both[:, heads:]}
    for _ in range(2):
        forward_mqa(**columns)
    apart, own = (memory[:, heads].view(torch.float32)[:, :heads] for memory in (both.clone(), both))
    for _ in range(2):
        forward_mqa(**{**columns, "lse": apart})
    with pytest.raises(ArgumentError, match=r"^lse: expected memory apart from that of out"):
        forward_mqa(**{**columns, "lse": own})
    assert torch.equal(both[:, heads:], expected)
    assert torch.equal(both[:, :heads], q)


def test_other_arguments() -> None:
    call = of(LayerKind.CSA)
    q = call["q"]
    tokens, heads = q.shape[:2]
    raw = torch.zeros(tokens * heads + heads)
    lse = raw[: tokens * heads].view(tokens, heads)
    for name, changes in {
        "attn_sink": {"lse": lse, "attn_sink": raw[tokens * heads - 1 : tokens * heads - 1 + heads]},
        "out": {"lse": call["out"].view(-1).view(torch.float32)[: tokens * heads].view(tokens, heads)},
    }.items():
        with pytest.raises(ArgumentError, match=f"^lse: expected memory apart from that of {name}"):
            forward_mqa(**{**call, **changes})
    buffer = call["topk_indices"]
    memory = torch.zeros(q.numel() + buffer.numel(), dtype=torch.int32)
    memory[: buffer.numel()].copy_(buffer.reshape(-1))
    out = memory.view(q.dtype)[: q.numel()].view(q.shape)
    inside = memory[: buffer.numel()].view(buffer.shape)
    with pytest.raises(ArgumentError, match=r"^out: expected memory apart from that of topk_indices"):
        forward_mqa(**{**call, "topk_indices": inside, "out": out})
    swa = call["caches"].swa
    assert isinstance(swa, PagedKVCache)
    assert isinstance(swa.layout, KVCacheLayout)
    storage = swa.tensor.untyped_storage()
    assert storage.nbytes() >= q.numel() * q.element_size()
    out = torch.empty(0, dtype=q.dtype).set_(storage, 0, q.shape, q.contiguous().stride())
    with pytest.raises(ArgumentError, match=r"^out: expected memory apart from that of caches\.swa"):
        forward_mqa(**{**call, "out": out})

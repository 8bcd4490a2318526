"""Selection at a context of a million tokens allocates no matrix of scores, and no more than the plan says."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dsv4attn.core.cache.layout import KVCacheLayout, PagedKVCache
from dsv4attn.core.torch_ops.arguments import TokenMap
from dsv4attn.core.torch_ops.indexer import IndexQuery
from dsv4attn.selection import load_backend

TOKENS, HEADS, DIM, TOPK, ENTRIES = 24, 2, 32, 16, 262_144


class Largest(TorchDispatchMode):
    """Bytes of the largest storage that an operation makes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN204
        result = func(*args, **(kwargs or {}))
        for item in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(item, torch.Tensor):
                self.bytes = max(self.bytes, item.untyped_storage().nbytes())
        return result


def test_g22_a_million_tokens_are_selected_from_in_tiles() -> None:
    layout = KVCacheLayout.index_fp8(DIM)
    cache = PagedKVCache.allocate(layout, 8, 64)
    table = torch.zeros(1, ENTRIES // 64, dtype=torch.int32)
    table[0, -1] = 7  # a page of its own for the last entries
    cache.region("nope")[7] = torch.ones(64, DIM).to(torch.float8_e4m3fn).view(torch.uint8)
    cache.region("scale")[:] = 1
    query = IndexQuery(torch.ones(TOKENS, HEADS, DIM).to(torch.float8_e4m3fn), torch.ones(TOKENS, HEADS))
    lens = torch.full((TOKENS,), ENTRIES, dtype=torch.int32)
    out, request = torch.full((TOKENS, TOPK), -1, dtype=torch.int32), torch.zeros(TOKENS, dtype=torch.int32)
    steps = load_backend("reference").layer_ops

    with Largest() as seen:
        steps.select_topk(query, cache, TokenMap(table, request, lens), out, ENTRIES)

    expected = torch.arange(ENTRIES - 64, ENTRIES - 64 + TOPK, dtype=torch.int32)
    assert torch.equal(out, expected.expand(TOKENS, -1))
    assert seen.bytes < 4 * TOKENS * ENTRIES / 8
    assert seen.bytes < steps.transient_bytes(TOKENS)

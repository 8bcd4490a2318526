"""Memory of selections of growing contexts: what an allocator holds after them, beside what the plan says.

Letters: T tokens, R requests, E entries that each token sees, Hi index heads.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from attrs import frozen

from dsv4attn.core.cache.layout import KVCacheLayout, PagedKVCache
from dsv4attn.core.contract.layer_ops import LayerOps
from dsv4attn.core.torch_ops.arguments import TokenMap
from dsv4attn.core.torch_ops.indexer import IndexQuery

_PAGE, _DIM, _TOPK, _BLOCKS, _BLOCK_SIZE = 64, 128, 512, 2048, 8


@frozen
class Growing:
    """Calls of one op, whose contexts grow.

    op: name of the op in `LayerOps`. requests: R. tokens: of each request. entries: E of the last call. steps: calls.
    """

    op: str
    requests: int
    tokens: int
    entries: int
    steps: int

    @property
    def name(self) -> str:
        """The op, and its calls."""
        return f"{self.op}, {self.requests} x {self.tokens} tokens, up to {self.entries:,} entries"


@frozen
class Growth:
    """What calls did to the memory of torch's allocator, in bytes.

    name: of the calls. planned: `LayerOps.transient_bytes` of these tokens. peak: the most that was allocated beside
    the arguments. reserved: how much the memory that the allocator reserves has grown.
    """

    name: str
    planned: int
    peak: int
    reserved: int


def growing_calls(*, small: bool) -> list[Growing]:
    """A prompt, and decodes, of each op that selects. small: for a test."""
    shapes = ((2, 1, 1024, 2), (1, 2, 1024, 2)) if small else ((64, 1, 262_144, 64), (1, 1024, 189_440, 64))
    ops = "select_topk", "select_candidates", "select_topk_of_candidates"
    return [Growing(op, *shape) for op in ops for shape in shapes]


def measure(ops: LayerOps, calls: Growing, device: torch.device) -> Growth:
    """Run the calls on an accelerator, and read its allocator."""
    memory = torch.get_device_module(device)
    steps = runs(ops, calls, device)
    next(steps)  # arguments
    memory.synchronize(device)
    memory.reset_peak_memory_stats(device)
    allocated, reserved = memory.memory_allocated(device), memory.memory_reserved(device)
    for _ in steps:
        pass
    memory.synchronize(device)
    peak, grown = memory.max_memory_allocated(device) - allocated, memory.memory_reserved(device) - reserved
    return Growth(calls.name, ops.transient_bytes(calls.requests * calls.tokens), peak, grown)


def runs(ops: LayerOps, calls: Growing, device: torch.device) -> Iterator[None]:
    """Make the arguments, and then run a call for each step."""
    tokens, pages = calls.requests * calls.tokens, -(-calls.entries // _PAGE)
    layout, heads = KVCacheLayout.index_fp8(_DIM), 64 if calls.op == "select_topk" else 32
    cache = PagedKVCache.allocate(layout, calls.requests * pages, _PAGE, device)
    q = torch.randn(tokens, heads, _DIM, dtype=torch.float32, device=device).to(torch.float8_e4m3fn)
    query = IndexQuery(q, torch.randn(tokens, heads, dtype=torch.float32, device=device))
    table = torch.arange(calls.requests * pages, dtype=torch.int32, device=device).view(calls.requests, pages)
    requests = torch.arange(tokens, dtype=torch.int32, device=device) // calls.tokens
    lens = torch.zeros(tokens, dtype=torch.int32, device=device)
    blocks = torch.arange(_BLOCKS, dtype=torch.int32, device=device).repeat(tokens, 1)
    out, op = torch.empty(tokens, _TOPK, dtype=torch.int32, device=device), getattr(ops, calls.op)
    between = {"select_topk": (out,), "select_candidates": (blocks, _BLOCK_SIZE)}
    arguments = between.get(calls.op, (blocks, _BLOCK_SIZE, out))
    yield
    for step in range(1, calls.steps + 1):
        entries = calls.entries * step // calls.steps
        lens.fill_(entries)
        op(query, cache, TokenMap(table, requests, lens), *arguments, entries)
        yield

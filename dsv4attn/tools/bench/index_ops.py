"""Index logits and selection of entries: inputs, calls, and expected results in fp32 torch.

Every token sees all keys of its request. Letters: R requests, n tokens of each, T = R n, E keys of each request, Hi
heads and Di dims of the indexer, K selected entries.
"""

from __future__ import annotations

from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from dsv4attn.core.cache.layout import KVCacheLayout, PagedKVCache
from dsv4attn.core.contract.backend import Backend, complete
from dsv4attn.core.model.geometry import ModelGeometry
from dsv4attn.core.torch_ops.indexer import IndexQuery
from dsv4attn.errors import UnsupportedError
from dsv4attn.tools.bench.contenders import Contender, Task, returning
from dsv4attn.tools.bench.layer_ops import LayerOpCase
from dsv4attn.tools.bench.records import coded, write_index

__all__ = ["PAGE", "IndexInputs", "index_task", "select_task", "selection_bounds"]

_FLASH = ModelGeometry.preset("deepseek-v4-flash")
HEADS, DIM, TOPK = _FLASH.index_n_heads, _FLASH.index_head_dim, _FLASH.index_topk
PAGE = 64
_LAYOUT = KVCacheLayout.index_fp8(DIM)
_LIMIT = 5e-3
"""Largest error of right logits, and of the selected scores about the last one: products of fp8 codes are exact, and
only their sums are rounded, by some matrix units to 14 bits."""
_TILE_BYTES = 2**28


@frozen(eq=False)
class IndexInputs:
    """Queries and keys of an indexer.

    case: the case.
    q: [R, n, Hi, Di] fp8.
    weights: [T, Hi] fp32.
    codes: [R, E, Di] fp8 keys by request, in order.
    scales: [R, E] fp32 of them.
    cache: the same keys on pages in random order; None in a gathered case.
    table: [R, E / PAGE] int32 pages; empty in a gathered case.
    lens: [R, n] int32 - E.
    logits: [T, E] fp32, as expected.
    """

    case: LayerOpCase
    q: Tensor
    weights: Tensor
    codes: Tensor
    scales: Tensor
    cache: PagedKVCache | None
    table: Tensor
    lens: Tensor
    logits: Tensor

    @property
    def flops(self) -> int:
        """Operations of the products q . k, and nothing else."""
        return 2 * self.logits.numel() * HEADS * DIM

    @property
    def bytes(self) -> int:
        """Least bytes that are read: every key, query and weight once, and the block table."""
        keys = self.codes.numel() + 4 * self.scales.numel() + 4 * self.table.numel()
        return keys + self.q.numel() + 4 * self.weights.numel()


def index_task(case: LayerOpCase, device: torch.device) -> Task:
    """Logits of all tokens, with keys on pages or gathered."""
    given = _index_inputs(case, device)
    arguments: tuple[Any, ...]

    def contender(name: str, backend: Backend) -> Contender:
        step = "fp8_mqa_logits" if given.cache is None else "fp8_paged_mqa_logits"
        logits = getattr(complete(backend).layer_ops, step, None)
        if logits is None:
            raise UnsupportedError("layer_steps", expected=step, actual="none")
        return returning(name, lambda: [logits(*arguments)])

    if given.cache is None:
        first = torch.zeros_like(given.lens[0])
        arguments = given.q[0], (given.codes[0], given.scales[0]), given.weights, first, given.lens[0]
    else:
        # a plan is for engines that have one: ours make none
        arguments = given.q, given.cache, given.weights, given.lens, given.table, None, case.keys
    return Task(
        case, given.flops, given.bytes + 4 * given.logits.numel(), [given.logits], contender, given, _LIMIT, fp8=True
    )


def select_task(case: LayerOpCase, device: torch.device) -> Task:
    """Scores and the largest of them in one step."""
    given = _index_inputs(case, device)
    cache = given.cache
    assert cache is not None
    query = IndexQuery(given.q.flatten(0, 1), given.weights)
    request = torch.arange(case.requests, dtype=torch.int32, device=device).repeat_interleave(case.tokens)
    last = given.logits.topk(TOPK).values[:, -1:]

    def contender(name: str, backend: Backend) -> Contender:
        out = torch.empty(case.count, TOPK, dtype=torch.int32, device=device)
        select, seen = complete(backend).layer_ops.select_topk, given.lens.flatten()

        def run() -> None:
            select(query, cache, given.table, request, seen, out, case.keys)

        return Contender(name, run, lambda: _blank(out), lambda: selection_bounds(given, out))

    moved = given.bytes + 4 * TOPK * case.count
    return Task(case, given.flops, moved, [last.expand(-1, 2)], contender, given, _LIMIT, fp8=True)


def selection_bounds(given: IndexInputs, chosen: Tensor) -> list[Tensor]:
    """[T, 2] of entries [T, K]: the lowest score chosen, and the highest left out, or the lowest if that is higher.

    Both are the K-th largest score if the choice is right. NaN in a row with an entry that does not exist or is twice.
    """
    entries = chosen.long()
    strange = (entries < 0) | (entries >= given.logits.shape[1])
    ordered = entries.sort(-1).values
    wrong = strange.any(-1) | (ordered[:, 1:] == ordered[:, :-1]).any(-1)
    entries = entries.masked_fill(strange, 0)
    lowest = given.logits.gather(1, entries).amin(-1)
    rest = given.logits.scatter(1, entries, -torch.inf).amax(-1)
    return [torch.stack([lowest, torch.maximum(rest, lowest)], -1).masked_fill(wrong[:, None], torch.nan)]


def _blank(out: Tensor) -> None:
    out.fill_(-1)


def _index_inputs(case: LayerOpCase, device: torch.device) -> IndexInputs:
    generator = torch.Generator(device).manual_seed(case.seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.float32)

    requests, tokens, keys = case.requests, case.tokens, case.keys
    q = normal(requests, tokens, HEADS, DIM).to(torch.float8_e4m3fn)
    weights = normal(case.count, HEADS)
    codes = torch.empty(requests, keys, DIM, dtype=torch.float8_e4m3fn, device=device)
    scales = torch.empty(requests, keys, device=device, dtype=torch.float32)
    for r in range(requests):
        # keys of different sizes, so that scales differ
        codes[r], scales[r] = coded(normal(keys, DIM) * torch.exp2(normal(keys, 1)))
    lens = torch.full((requests, tokens), keys, dtype=torch.int32, device=device)
    cache, table = None, lens.new_empty(requests, 0)
    if case.step == "paged":
        pages = requests * keys // PAGE
        table = torch.randperm(pages, generator=generator, device=device).int().view(requests, -1)
        cache = PagedKVCache.allocate(_LAYOUT, pages, PAGE, device)
        entry = torch.arange(keys, device=device)
        for r in range(requests):
            write_index(cache, table[r, entry // PAGE].long() * PAGE + entry % PAGE, codes[r], scales[r])
    return IndexInputs(case, q, weights, codes, scales, cache, table, lens, _logits(q, weights, codes, scales))


def _logits(q: Tensor, weights: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    """[T, E] fp32: sum over heads of weight * max(0, q . k)."""
    requests, tokens, heads, _ = q.shape
    out = torch.empty(requests, tokens, codes.shape[1], device=q.device, dtype=torch.float32)
    step = max(_TILE_BYTES // (8 * heads * codes.shape[1]), 1)
    for r, (k, scale) in enumerate(zip(codes, scales, strict=True)):
        keys, mix = (k.float() * scale[:, None]).T, weights.view(requests, tokens, 1, heads)[r]
        for first in range(0, tokens, step):
            part = slice(first, first + step)
            out[r, part] = torch.bmm(mix[part], (q[r, part].float() @ keys).relu_())[:, 0]
    return out.flatten(0, 1)

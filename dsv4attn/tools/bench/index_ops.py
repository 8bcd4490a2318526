"""Index logits and selection of entries: inputs and calls.

Every token sees all keys of its request. Letters: R requests, n tokens of each, T = R n, E keys of each request, Hi
heads and Di dims of the indexer, K selected entries.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from attrs import field
from torch import Tensor

from dsv4attn.core.cache.index_records import store_index_keys
from dsv4attn.core.cache.layout import KVCacheLayout, PagedKVCache
from dsv4attn.core.contract.backend import Backend
from dsv4attn.core.model.geometry import ModelGeometry
from dsv4attn.core.reprs import frozen
from dsv4attn.core.torch_ops.arguments import TokenMap
from dsv4attn.core.torch_ops.indexer import IndexQuery
from dsv4attn.errors import UnsupportedError
from dsv4attn.tools.bench.accuracy import reference
from dsv4attn.tools.bench.contenders import Contender, Task, returning
from dsv4attn.tools.bench.inputs import RandomNumbers
from dsv4attn.tools.bench.layer_ops import LayerOpCase

_FLASH = ModelGeometry.preset("deepseek-v4-flash")
HEADS, DIM = _FLASH.index_n_heads, _FLASH.index_head_dim
PAGE = 64
_LAYOUT = KVCacheLayout.index_fp8(DIM)
_LIMIT = 5e-3
"""Largest error of right logits, and of the selected scores about the last one: products of fp8 codes are exact, and
only their sums are rounded, by some matrix units to 14 bits."""


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
    logits: [T, E] fp32 of the reference backend.
    """

    case: LayerOpCase
    q: Tensor
    weights: Tensor
    codes: Tensor
    scales: Tensor
    cache: PagedKVCache | None
    table: Tensor
    lens: Tensor
    logits: Tensor = field(repr=False)

    @logits.default
    def _logits_of_the_reference(self) -> Tensor:
        if self.case.requests > 1:
            return self.logits_call(reference())()
        # the keys of one request are read once for all of its tokens
        return self._of_one_request(reference().layer_ops.fp8_mqa_logits)()

    def logits_call(self, backend: Backend) -> Callable[[], Tensor]:
        """A backend's op on these inputs. Raises UnsupportedError if the backend has none."""
        op_name = "fp8_mqa_logits" if self.cache is None else "fp8_paged_mqa_logits"
        op = getattr(backend.layer_ops, op_name, None)
        if op is None:
            raise UnsupportedError("layer_ops", expected=op_name, actual="none")
        if self.cache is not None:
            # a plan is for engines that have one: our backends make none
            return partial(op, self.q, self.cache, self.weights, self.lens, self.table, None, self.case.keys)
        return self._of_one_request(op)

    def _of_one_request(self, op: Callable[..., Tensor]) -> Callable[[], Tensor]:
        """An op on gathered keys, those of the first request."""
        first, keys = torch.zeros_like(self.lens[0]), (self.codes[0], self.scales[0])
        return partial(op, self.q[0], keys, self.weights, first, self.lens[0])

    @property
    def flops(self) -> int:
        """Operations of the products q . k, and nothing else."""
        return 2 * self.case.count * self.case.keys * HEADS * DIM

    @property
    def bytes(self) -> int:
        """Least bytes that are read: every key, query and weight once, and the block table."""
        keys = self.codes.numel() + 4 * self.scales.numel() + 4 * self.table.numel()
        return keys + self.q.numel() + 4 * self.weights.numel()


def index_task(case: LayerOpCase, device: torch.device) -> Task:
    """Logits of all tokens, with keys on pages or gathered."""
    inputs = _index_inputs(case, device)

    def contender(name: str, backend: Backend, _: torch.dtype) -> Contender:
        call = inputs.logits_call(backend)
        return returning(name, lambda: [call()])

    moved = inputs.bytes + 4 * case.count * case.keys
    return Task(case, inputs.flops, moved, contender, inputs, _LIMIT, fp8=True)


def select_task(case: LayerOpCase, device: torch.device) -> Task:
    """Scores and the largest of them in one step."""
    inputs = _index_inputs(case, device)
    cache = inputs.cache
    assert cache is not None
    query = IndexQuery(inputs.q.flatten(0, 1), inputs.weights)
    request = torch.arange(case.requests, dtype=torch.int32, device=device).repeat_interleave(case.tokens)

    def contender(name: str, backend: Backend, _: torch.dtype) -> Contender:
        out = torch.empty(case.count, case.topk, dtype=torch.int32, device=device)
        token_map = TokenMap(inputs.table, request, inputs.lens.flatten())
        select = partial(backend.layer_ops.select_topk, query, cache, token_map, out, case.keys)
        return Contender(name, select, lambda: out.fill_(-1), lambda: selection_bounds(inputs, out))

    moved = inputs.bytes + 4 * case.topk * case.count
    expected = [inputs.logits.topk(case.topk).values[:, -1:].expand(-1, 2)]
    return Task(case, inputs.flops, moved, contender, inputs, _LIMIT, fp8=True, expected=expected)


def selection_bounds(inputs: IndexInputs, chosen: Tensor) -> list[Tensor]:
    """[T, 2] of entries [T, K]: the lowest score chosen, and the highest left out, or the lowest if that is higher.

    Both are the K-th largest score if the choice is right. NaN in a row with an entry that does not exist or is twice.
    """
    entries = chosen.long()
    unknown = (entries < 0) | (entries >= inputs.logits.shape[1])
    ordered = entries.sort(-1).values
    wrong = unknown.any(-1) | (ordered[:, 1:] == ordered[:, :-1]).any(-1)
    entries = entries.masked_fill(unknown, 0)
    lowest = inputs.logits.gather(1, entries).amin(-1)
    rest = inputs.logits.scatter(1, entries, -torch.inf).amax(-1)
    return [torch.stack([lowest, torch.maximum(rest, lowest)], -1).masked_fill(wrong[:, None], torch.nan)]


def _index_inputs(case: LayerOpCase, device: torch.device) -> IndexInputs:
    random = RandomNumbers(device, case.seed)
    requests, tokens, keys = case.requests, case.tokens, case.keys
    q = random.normal(requests, tokens, HEADS, DIM).to(torch.float8_e4m3fn)
    weights = random.normal(case.count, HEADS)
    table = random.pages(requests, -(-keys // PAGE))
    cache = PagedKVCache.allocate(_LAYOUT, table.numel(), PAGE, device)
    entry = torch.arange(keys, device=device)
    page, place = table[:, entry // PAGE].long(), entry % PAGE
    for r in range(requests):
        # keys of different sizes, so that scales differ
        store_index_keys(random.normal(keys, DIM) * torch.exp2(random.normal(keys, 1)), cache, page[r] * PAGE + place)
    codes = cache.region("nope")[page, place].view(torch.float8_e4m3fn)
    scales = cache.region("scale")[page, place, 0]
    lens = torch.full((requests, tokens), keys, dtype=torch.int32, device=device)
    if case.step == "paged":
        return IndexInputs(case, q, weights, codes, scales, cache, table, lens)
    return IndexInputs(case, q, weights, codes, scales, None, table[:, :0], lens)

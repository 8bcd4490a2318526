"""Cases of attention over ranks: decodes and prefills against float64, and exchanges that run during attention."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from math import inf, nan
from typing import Any

import attrs
import torch
from torch import Tensor

from dsv4attn.core.attention.call import ForwardCall
from dsv4attn.core.cache.layer_caches import LayerCaches
from dsv4attn.core.cache.layout import PagedKVCache
from dsv4attn.core.context_parallel.attention import forward_mqa_over_ranks
from dsv4attn.core.context_parallel.context import ContextParallel
from dsv4attn.core.context_parallel.metadata import OwnedMetadataBuilder
from dsv4attn.core.contract.limits import Limits
from dsv4attn.core.memory import rank_buffers
from dsv4attn.core.memory.workspace import WorkspaceManager
from dsv4attn.core.model.geometry import LayerKind
from tests.harness import FP32, REFERENCE_FORMS, SMALL, batch_of

RAGGED = [(70, 1), (5, 1), (200, 3), (3, 1), (64, 40), (9, 9), (130, 66)]
"""(tokens after the step, query tokens); decodes first."""


def context_over(group: Any, interleave: int = 1) -> ContextParallel:
    return ContextParallel(group, interleave, divides_heads=False)


def same_everywhere(group: Any, value: Tensor) -> None:
    gathered = context_over(group).gather(value.contiguous().view(torch.uint8), "a result")
    assert all(torch.equal(tensor, gathered[0]) for tensor in gathered)


class Watched(ContextParallel):
    """A context that notes when parts begin and end to be sent, and whether rows of `out` are still to come."""

    out: Tensor

    @cached_property
    def notes(self) -> list[str]:
        return []

    def start(self, mine: Tensor, what: str, *, out: Tensor | None = None) -> Callable[[], Tensor]:
        return self._noted(what, partial(super().start, mine, what, out=out))

    def start_all_to_all(self, mine: Tensor, what: str, *, out: Tensor) -> Callable[[], Tensor]:
        return self._noted(what, partial(super().start_all_to_all, mine, what, out=out))

    def _noted(self, what: str, start: Callable[[], Callable[[], Tensor]]) -> Callable[[], Tensor]:
        if what != "attention":
            return start()
        self.notes.append("begin before others" if bool(torch.isnan(self.out).any()) else "begin")
        finish = start()

        def noted() -> Tensor:
            self.notes.append("end")
            return finish()

        return noted


def exchanges_during_attention(group: Any, kind: LayerKind, form: str, *, divides_heads: bool = False) -> None:
    """Exchanges of a prefill run during the attention of later chunks, two at a time."""
    sizes, heads = (rank_buffers.PIECE_BYTES, rank_buffers.PART_TOKENS), 2 if divides_heads else 4
    # about eight tokens, and chunks of at least twice as many
    rank_buffers.PIECE_BYTES, rank_buffers.PART_TOKENS = 8 * group.size() * heads * (32 * 4 + 4), 16
    context = Watched(group, 2, divides_heads)
    try:
        attention(group, kind, form, context)
    finally:
        rank_buffers.PIECE_BYTES, rank_buffers.PART_TOKENS = sizes
    notes = context.notes
    # 115 tokens of prefill, then six of decode
    assert len(notes) == 2 * (15 + 1)
    assert notes[:4] == ["begin before others", "begin before others", "end", "begin before others"]
    # the last chunk's pieces, and the decodes', begin when all rows are there
    assert notes[-3:] == ["begin", "end", "end"]
    assert notes.count("begin before others") >= 8


def attention(
    group: Any,
    kind: LayerKind,
    form: str,
    context: ContextParallel | None = None,
    sink: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    *,
    keys_of_all: bool = False,
) -> None:
    """Ragged decodes and prefills with random keys, NaN in every other slot, against float64.

    sink: of all heads, -inf for none; None: random. Where ranks divide heads, each has two. keys_of_all: prefill
    attends to the keys of all ranks.
    """
    context, layer = context or context_over(group, 2), SMALL.layer_of_kind(kind)
    every, mine = layer.num_heads, slice(None)
    if context.divides_heads:
        layer, every = attrs.evolve(layer, num_heads=2), 2 * group.size()
        mine = slice(2 * group.rank(), 2 * group.rank() + 2)
    ownership, limits, ratio = context.ownership, Limits(8, 128, 768), layer.compress_ratio
    draw = torch.Generator().manual_seed(3)
    page, tokens_per_page, window_page = 64 // ratio, 64, 16
    sizes: dict[str, Any] = {"swa_block_size": window_page, "compressed_block_tokens": tokens_per_page}
    columns = -(-256 // (tokens_per_page * ownership.size))
    window = PagedKVCache(torch.full((7 * 16, window_page, 32), nan), FP32)
    compressed = PagedKVCache(torch.full((7 * columns + 2, page, 32), nan), FP32)
    tables = [torch.randperm(7 * n, generator=draw).int().reshape(7, n) for n in (16, columns)]
    starts, slots, q = [0], [], torch.randn(121, every, 32, generator=draw)
    keys = [(torch.randn(n, 32, generator=draw), torch.randn(n // ratio, 32, generator=draw)) for n, _ in RAGGED]
    for i, (n, count) in enumerate(RAGGED):
        live = torch.arange(max(n - count - 7, 0), n)
        window.tensor[tables[0][i, live // window_page], live % window_page] = keys[i][0][live]
        held = [e for e in range(n // ratio) if ownership.owner(e) == ownership.rank]
        local = torch.tensor([ownership.local(e) for e in held], dtype=torch.long)
        compressed.tensor[tables[1][i, local // page], local % page] = keys[i][1][held]
        starts.append(starts[-1] + count)
        slots += [int(tables[0][i, p // window_page]) * window_page + p % window_page for p in range(n - count, n)]
    block_tables: dict[str, Any] = {"block_table": tables[0], "compressed_block_table": tables[1]}
    query, seq = [count for _, count in RAGGED], [n for n, _ in RAGGED]
    batch = batch_of(query, seq, slot_mapping=torch.tensor(slots), **block_tables)
    limits = attrs.evolve(limits, num_speculative_tokens=2, max_workspace_bytes=2**18)
    options: dict[str, Any] = {"backend": REFERENCE_FORMS[form], "num_compressed_blocks": 7 * columns}
    options |= {"prefill_keys": keys_of_all, "divides_heads": context.divides_heads}
    metadata = OwnedMetadataBuilder(ownership, SMALL, limits, **sizes, **options).build_for(batch, [kind])[kind]
    assert (metadata.whole is not None) is keys_of_all
    chosen, global_chosen = None, []
    seen = [(n - count + j + 1) // ratio for n, count in RAGGED for j in range(count)]
    if kind is LayerKind.CSA:
        global_chosen = [torch.randperm(n, generator=draw)[: layer.topk].tolist() for n in seen]
        rows = torch.tensor([row + [-1] * (layer.topk - len(row)) for row in global_chosen], dtype=torch.int32)
        whole_from = 6 if keys_of_all else 121
        chosen = torch.cat([ownership.local_numbers(rows[:whole_from]), rows[whole_from:]])
    else:
        global_chosen = [list(range(n)) for n in seen]
    sink = torch.randn(every, generator=draw) if sink is None else sink
    q = q.to(dtype)
    workspace, (out, lse) = WorkspaceManager("cpu"), (torch.full_like(q[:, mine], nan), torch.full((121, every), nan))
    lse = lse[:, mine].contiguous()
    own_sink = None if bool((sink == -inf).all()) else sink[mine].contiguous()
    context.__dict__["out"] = out
    if context.divides_heads:
        specs = rank_buffers.merge_specs(ownership.size, 121, 2, 32, dtype, divides_heads=True)
        views = workspace.get_simultaneous(*specs, arena=rank_buffers.ARENA)
        context.__dict__["out"] = views[-2].fill_(nan)
    call = ForwardCall(
        q[:, mine],
        LayerCaches(window, compressed),
        metadata,
        REFERENCE_FORMS[form],
        workspace,
        out,
        layer,
        limits,
        own_sink,
        topk_indices=chosen,
        lse=lse,
    )
    forward_mqa_over_ranks(context, call)

    rtol, atol = (1e-5, 2e-6) if dtype == torch.float32 else (2e-2, 2e-2)
    expected = []
    for (n, count), first, request_keys in zip(RAGGED, starts, keys, strict=False):
        tokens, token, place = slice(first, first + count), torch.arange(n - count, n)[:, None], torch.arange(n)
        selected = torch.zeros(count, n // ratio, dtype=torch.bool)
        for row, entries in zip(selected, global_chosen[tokens], strict=True):
            row[entries] = True
        seen_keys = torch.cat([(token - layer.window < place) & (place <= token), selected], 1)
        all_keys = torch.cat(request_keys).double()
        logits = (q[tokens].double() @ all_keys.T * layer.scale).masked_fill(~seen_keys[:, None], -inf)
        # logits are finite, so a sink of +inf takes all
        given_sink = sink.double().clamp(max=1e6)[:, None].expand(count, -1, -1)
        weights = torch.cat([logits, given_sink], 2).softmax(2)[..., :-1]
        expected.append(((weights @ all_keys)[:, mine], logits.logsumexp(2)[:, mine]))
    wanted_out, wanted_lse = (torch.cat(parts) for parts in zip(*expected, strict=True))
    torch.testing.assert_close(out.double(), wanted_out, rtol=rtol, atol=atol)
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=1e-5, atol=2e-6)
    if not context.divides_heads:
        same_everywhere(group, out)

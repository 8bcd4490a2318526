"""Attention over the keys of all ranks: each rank attends to its own keys, and every rank merges the results."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import torch
from attrs import evolve
from torch import Tensor

from dsv4attn.core.attention.call import ForwardCall
from dsv4attn.core.attention.checks import check_forward_call
from dsv4attn.core.attention.forward_mqa import attend
from dsv4attn.core.cache.layer_caches import LayerCaches
from dsv4attn.core.context_parallel.exchange import RankExchange
from dsv4attn.core.context_parallel.heads import by_rank, gather_queries
from dsv4attn.core.context_parallel.keys import KeyGathering
from dsv4attn.core.context_parallel.prefill import Shares
from dsv4attn.core.contract.backend import Backend, Phase, check_is_backend
from dsv4attn.core.contract.rank_ops import RankOps
from dsv4attn.core.memory.rank_buffers import (
    ALL_HEADS_VIEWS,
    ARENA,
    all_heads,
    attention_bytes,
    merge_specs,
    part_tokens,
    piece_bytes,
)
from dsv4attn.core.memory.workspace import WorkspaceManager
from dsv4attn.core.tensorspec import ALIGNMENT
from dsv4attn.core.torch_modes import without_modes
from dsv4attn.errors import ArgumentError

__all__ = ["forward_mqa_over_ranks", "merge_over_ranks"]


@without_modes
def forward_mqa_over_ranks(context: RankExchange, call: ForwardCall) -> None:
    """`forward_mqa` over the entries of all ranks, the same bits on each of them.

    The fields of the call are the arguments of `forward_mqa`, with metadata of an `OwnedMetadataBuilder`, and entry
    numbers of this rank in `topk_indices`. What is sent, received and merged lies in the workspace. A warm-up reserves
    it, and sends nothing.
    Where ranks divide heads, q, out, lse, attn_sink and layer are of the heads of this rank: queries of all ranks are
    gathered, the backend attends with all heads to the entries of this rank, and each rank merges its own heads.
    Metadata with a `WholePrefill` have prefill attend to the keys of all ranks, which are gathered while the decode
    tokens are attended to; the numbers of its tokens in `topk_indices` are of whole sequences then.
    """
    metadata = call.metadata
    if metadata is None:
        attend(evolve(call, attn_sink=None))
        plan = context.plan(call.layer, call.limits, call.backend, call.caches.swa.layout, call.q.dtype)
        call.workspace.reserve(plan, caller=f"warm-up on {context.label}")
        return
    metadata.check_owner(context.ownership)
    if metadata.whole is None:
        _attend_to_own_entries(context, call)
        return
    _check_whole(context)
    check_forward_call(call)
    whole_metadata = metadata.whole.metadata
    check_forward_call(evolve(call, metadata=whole_metadata))
    assert call.caches.compressed is not None
    keys = KeyGathering(context, call.caches.compressed, metadata.whole.pages, call.workspace)
    if metadata.swa.num_decode_tokens:
        _attend_to_own_entries(context, evolve(call, phase=Phase.DECODE))
    tokens = slice(whole_metadata.swa.num_decode_tokens, whole_metadata.swa.num_actual_tokens)
    shares = Shares(context, whole_metadata.swa.num_prefill_tokens)
    prefill_call = evolve(
        call,
        caches=LayerCaches(call.caches.swa, keys.finish()),
        metadata=whole_metadata,
        phase=Phase.PREFILL,
        token_ranges=shares.ranges,
    )
    rows = [tensor[tokens] for tensor in (call.out, call.lse) if tensor is not None]
    attend(prefill_call, after_each=lambda written: shares.reached(written.stop - tokens.start, rows))
    shares.finish()


def _attend_to_own_entries(context: RankExchange, call: ForwardCall) -> None:
    """Attend to the entries of this rank, and merge the results of all ranks; for the tokens of `call.phase`."""
    metadata, ranks, rows = call.window_metadata, context.ownership.size, call.q.shape[0]
    if call.phase is Phase.DECODE:
        rows = metadata.num_decode_tokens
    if context.divides_heads:
        check_forward_call(call)
    check_is_backend(call.backend)
    rank_ops = call.backend.rank_ops
    rank_lse, *scratch = _views(context, call.out, call.workspace, rank_ops)
    rank_lse = rank_lse if call.lse is None else call.lse
    q, out, lse, layer, sources = call.q, call.out, rank_lse, call.layer, None
    if context.divides_heads:
        q, out, lse = scratch[-ALL_HEADS_VIEWS:]
        scratch = scratch[:-ALL_HEADS_VIEWS]
        layer, sources = all_heads(call.layer, ranks), by_rank(ranks, out, lse)
        sent, received, *_ = scratch
        gather_queries(context, call.q[:rows], q, sent, received)
    first = metadata.num_decode_tokens if metadata.num_prefill_tokens and call.phase is None else 0
    merging = _Merging(context, call.out[:rows], rank_lse[:rows], call.attn_sink, scratch, first, rank_ops, sources)
    row_bytes = attention_bytes(call.layer.num_heads, call.layer.head_dim, call.out.element_size())
    rank_call = evolve(
        call,
        q=q,
        out=out,
        layer=layer,
        attn_sink=None,
        lse=lse,
        chunk_tokens=part_tokens(ranks, row_bytes),
        result_buffers=None if metadata.num_prefill_tokens else merging.sent_views(),
    )
    attend(rank_call, after_each=lambda written: merging.reached(written.stop))
    merging.finish()


def _check_whole(context: RankExchange) -> None:
    """Raise ArgumentError unless the layer's ranks gather keys, as the metadata say."""
    if not context.prefill_keys:
        hint = "build the metadata without prefill_keys, or give the layer a context with it"
        raise ArgumentError("metadata", expected="metadata without a WholePrefill", actual="one with it", hint=hint)


@without_modes
def merge_over_ranks(
    context: RankExchange,
    out: Tensor,
    lse: Tensor,
    attn_sink: Tensor | None,
    workspace: WorkspaceManager,
    *,
    backend: Backend | None = None,
) -> None:
    """Replace the attention of one rank's keys by that of all ranks' keys, in place.

    out: [T, H, D] bf16 or fp32, and lse: [T, H] fp32, natural log, both without the sink. attn_sink: [H] fp32 - applied
    once, to the whole; None: none. lse stays without it. workspace: of the views of `merge_specs`. backend: that the
    workspace was planned with, whose `rank_ops` merge; None: torch does. Every rank sends a token's out and lse in
    one exchange, and merges all partials in the order of ranks: so all ranks have the same bits, if they merge alike.
    Raises ArgumentError where ranks divide heads: what a rank attends to then has more heads than what it gets.
    """
    if context.divides_heads:
        expected, hint = "a context whose ranks have the same heads", "call forward_mqa_over_ranks"
        raise ArgumentError("context", expected=expected, actual="divides_heads=True", hint=hint)
    if backend is not None:
        check_is_backend(backend)
    rank_ops = RankOps() if backend is None else backend.rank_ops
    _, *scratch = _views(context, out, workspace, rank_ops)
    _Merging(context, out, lse, attn_sink, scratch, 0, rank_ops).finish()


def _views(context: RankExchange, out: Tensor, workspace: WorkspaceManager, rank_ops: RankOps) -> list[Tensor]:
    tokens, heads, dim = out.shape
    specs = merge_specs(
        *(context.ownership.size, tokens, heads, dim, out.dtype),
        divides_heads=context.divides_heads,
        merge_scratch=rank_ops.merge_scratch,
    )
    return workspace.get_simultaneous(*specs, arena=ARENA, caller=f"attention on {context.label}")


class _Merging:
    """`merge_over_ranks` piece by piece, in the views of `merge_specs` but the first. Nothing is allocated.

    A piece is sent as soon as its rows are there, and merged when the place of what it received is needed again. So an
    exchange runs during the attention of later rows. Pieces and their order follow from numbers of rows alone: ranks
    may cut prefill in different chunks.
    """

    def __init__(
        self,
        context: RankExchange,
        out: Tensor,
        lse: Tensor,
        attn_sink: Tensor | None,
        scratch: Sequence[Tensor],
        first: int,
        rank_ops: RankOps,
        sources: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """first: row at which prefill begins, whose rows come before those of decode.

        sources: out and lse of the heads of each rank, as of `by_rank`; None: out and lse are sent to all ranks.
        """
        self._context, self._out, self._lse, self._sink, self._rank_ops = context, out, lse, attn_sink, rank_ops
        self._divided, self._sources = sources is not None, sources or (out[None], lse[None])
        self._sent, self._received, *self._scratch = scratch
        (rows, heads, dim), size = out.shape, out.element_size()
        cut = partial(context.pieces, row_bytes=attention_bytes(heads, dim, size))
        self._first, self._waiting = first, deque([*cut(rows, first=first), *cut(first)])
        self._place, self._under_way = 0, deque[tuple[slice, Callable[[], Tensor]]]()
        self._is_packed = False

    def sent_views(self) -> tuple[Tensor, Tensor] | None:
        """Out and lse of all rows where they are sent from: the caller writes them there, and nothing is packed.

        None where rows are not one piece, where ranks divide heads, and where lse would not begin at a multiple of
        ALIGNMENT.
        """
        out_bytes, piece_size = _bytes_of(self._out)
        if self._divided or len(self._waiting) != 1 or out_bytes % ALIGNMENT:
            return None
        self._is_packed = True
        out, lse = _parts(self._sent[0, :piece_size][None], out_bytes, self._out)
        return out[0], lse[0]

    def reached(self, stop: int) -> None:
        """Send the pieces of prefill that end here, or before."""
        while self._waiting and self._first <= self._waiting[0].start and self._waiting[0].stop <= stop:
            self._send(self._waiting.popleft())

    def finish(self) -> None:
        """Send all other pieces, and merge."""
        while self._waiting:
            self._send(self._waiting.popleft())
        while self._under_way:
            self._merge_one()

    def _send(self, piece: slice) -> None:
        """Begin the exchange of these rows."""
        if len(self._under_way) == len(self._sent):
            self._merge_one()
        out, ranks = self._out[piece], self._context.ownership.size
        out_bytes, piece_size = _bytes_of(out)
        sent, received = self._sent[self._place], self._received[self._place][: ranks * piece_size]
        sent = sent[: piece_size * len(self._sources[0])].view(-1, piece_size)
        parts = _parts(sent, out_bytes, out)
        if self._divided:
            for part, source in zip(parts, self._sources, strict=True):
                part.copy_(source[:, piece])
        elif not self._is_packed:
            self._rank_ops.pack_partial(out, self._lse[piece], parts[0][0], parts[1][0])
        if self._divided:
            finish = self._context.start_all_to_all(sent, "attention", out=received)
        else:
            finish = self._context.start(sent[0], "attention", out=received)
        self._under_way.append((piece, finish))
        self._place = (self._place + 1) % len(self._sent)

    def _merge_one(self) -> None:
        """End the oldest exchange, and write the rows of all ranks."""
        piece, finish = self._under_way.popleft()
        out = self._out[piece]
        out_bytes, _ = _bytes_of(out)
        outs, lses = _parts(finish(), out_bytes, out)
        scratch = [view[: out.shape[0]] for view in self._scratch]
        self._rank_ops.merge_partials(outs, lses, out, self._lse[piece], self._sink, scratch)


def _bytes_of(out: Tensor) -> tuple[int, int]:
    """`piece_bytes` of rows of out."""
    rows, heads, dim = out.shape
    return piece_bytes(rows, heads, dim, out.element_size())


def _parts(sent: Tensor, out_bytes: int, out: Tensor) -> tuple[Tensor, Tensor]:
    """([R, t, H, D] out, [R, t, H] lse) of each rank in its bytes [R, n].

    out_bytes: bytes of out, after which lse begins.
    """
    outs = sent[:, : out.numel() * out.element_size()].view(out.dtype)
    return outs.unflatten(1, out.shape), sent[:, out_bytes:].view(torch.float32).unflatten(1, out.shape[:2])

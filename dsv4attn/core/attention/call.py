"""The calls between `forward_mqa` and a backend.

`ForwardCall`: the arguments of one `forward_mqa`. `PhaseCall`: the part of a forward call that is one call of the
backend, decode or one prefill chunk. `PreparedCall`: a phase call that was checked and planned for the first layer of a
kind. Every layer whose tensors differ in addresses and values alone runs the same prepared call.

A `PreparedForward` is an entry of `WindowMetadata.prepared` and lives as long as these metadata. Its key is the
identities of backend, layer, limits, workspace and compressed metadata, and the signatures of caches and tensors
(`tensorspec.signature`). Addresses and values of tensors are not part of the key.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import TypeAlias

import torch
from attrs import define, evolve
from torch import Tensor

from dsv4attn.core.cache.layer_caches import LayerCaches
from dsv4attn.core.cache.layout import PagedKVCache
from dsv4attn.core.cache.selected_keys import DenseIndices, GatheredKeys, PagedKeys, RaggedIndices, RequestRows
from dsv4attn.core.contract.backend import AttentionCall, AttentionOptions, Backend, Phase, RawQuery, Run
from dsv4attn.core.contract.limits import Limits
from dsv4attn.core.memory.chunking import PrefillChunk, cut_chunk, plan_prefill_chunks, plan_row_chunks
from dsv4attn.core.memory.plan import gathers_keys, prefill_bounds
from dsv4attn.core.memory.workspace import WorkspaceManager
from dsv4attn.core.metadata.metadata import AttentionMetadata, CompressedMetadata, WindowMetadata
from dsv4attn.core.model.geometry import LayerGeometry, LayerKind
from dsv4attn.core.reprs import fields_repr, frozen
from dsv4attn.core.tensorspec import BufferSpec

__all__ = ["INT", "MAX_PREPARED", "ForwardCall", "IndexRows", "PhaseCall", "PreparedCall", "PreparedForward"]

INT = torch.int32
IndexRows: TypeAlias = DenseIndices | RaggedIndices
"""The slots, or rows, of the keys of each token of a call."""


# not frozen: every `forward_mqa` makes a call, and a frozen class takes three times as long to make and to read
@define(eq=False, slots=False)
class ForwardCall:
    """The arguments of one `forward_mqa`; `checks.check_forward_call` checks them. Nothing changes them afterwards.

    The arguments of `forward_mqa` have their names here. The other fields are:

    chunk_tokens: most tokens of a prefill chunk; 0: as many as the workspace allows.
    phase: the only phase that runs; None: both.
    token_ranges: (first token, end) of the prefill tokens that are attended to, numbered from the first prefill token;
       None: all of them. Rows of other tokens are not written.
    result_buffers: contiguous tensors like out and lse, which receive the results instead of out and lse; None: out and
       lse receive them.
    """

    q: Tensor
    caches: LayerCaches
    metadata: AttentionMetadata | None
    backend: Backend
    workspace: WorkspaceManager
    out: Tensor
    layer: LayerGeometry
    limits: Limits
    attn_sink: Tensor | None
    topk_indices: Tensor | None = None
    lse: Tensor | None = None
    raw_q: RawQuery | None = None
    chunk_tokens: int = 0
    phase: Phase | None = None
    token_ranges: tuple[tuple[int, int], ...] | None = None
    result_buffers: tuple[Tensor, Tensor] | None = None

    __repr__ = fields_repr

    @property
    def window_metadata(self) -> WindowMetadata:
        """The window part of the metadata; a warm-up has none."""
        assert self.metadata is not None
        return self.metadata.swa

    @property
    def compressed_metadata(self) -> CompressedMetadata | None:
        """The compressed part of the metadata; a warm-up, and a window-only layer, have none."""
        return None if self.metadata is None else self.metadata.compressed

    @cached_property
    def segments(self) -> Sequence[PagedKVCache]:
        """The caches that this kind of layer reads: window, then compressed."""
        return self.caches.segments(self.layer)

    @cached_property
    def gathers(self) -> bool:
        """Whether the keys of prefill requests are gathered: windows wider than the layer's are read on pages."""
        columns = self.window_metadata.prefill_swa_indices.shape[2]
        return gathers_keys(self.layer, self.backend) and columns <= self.layer.window

    def takes_raw_q(self, chunks: Sequence[PrefillChunk] = ()) -> bool:
        """Whether the backend takes raw q of prefill tokens.

        chunks: all chunks of the call; the answer is then also whether raw q is faster. Empty: whether it works at all.
        """
        costs = [(self.requests_of(chunk), _gathered_rows(chunk)) for chunk in chunks]
        row_dtype, takes_raw_q = self.caches.swa.layout.row_dtype, self.backend.takes_raw_q
        return self.gathers and all(takes_raw_q(self.layer, rows, row_dtype, costs) for rows in (self.q, self.out))

    @property
    def prefill_phase(self) -> Phase:
        """The phase of the calls for prefill requests: every backend reads pages in decode, not all in prefill."""
        paged = not gathers_keys(self.layer, self.backend)
        return Phase.PREFILL if paged or self.gathers else Phase.DECODE

    def chunks(self) -> Sequence[PrefillChunk]:
        """The prefill tokens, or `token_ranges` of them, cut so that no chunk needs more memory than planned."""
        metadata = self.window_metadata
        if not metadata.num_prefill_tokens or self.phase is Phase.DECODE:
            return ()
        chunks = [chunk for chunk in self._all_chunks() if chunk.num_tokens]
        if self.token_ranges is None:
            return chunks
        query_lens, chosen = metadata.prefill_query_lens_cpu.tolist(), list[PrefillChunk]()
        for first, end in self.token_ranges:
            for chunk in chunks:
                start, stop = max(first, chunk.token_start), min(end, chunk.token_end)
                if start >= stop:
                    continue
                if self.gathers:
                    chosen += cut_chunk(chunk, start, stop, query_lens, self.layer)
                else:  # rows on pages need no other token's
                    chosen.append(evolve(chunk, token_start=start, token_end=stop))
        return chosen

    def _all_chunks(self) -> Iterable[PrefillChunk]:
        metadata = self.window_metadata
        seq_lens, query_lens = metadata.prefill_seq_lens_cpu.tolist(), metadata.prefill_query_lens_cpu.tolist()
        if self.prefill_phase is Phase.DECODE:
            max_tokens = min(self.limits.max_decode_tokens, self.chunk_tokens or metadata.num_prefill_tokens)
            return plan_row_chunks(seq_lens, metadata.num_prefill_tokens, self.layer, max_tokens)
        bounds = prefill_bounds(self.layer, self.limits, self.backend, self.caches.swa.layout)
        if not self.gathers:
            bounds = evolve(bounds, window=metadata.prefill_swa_indices.shape[2])
        if self.chunk_tokens:
            bounds = evolve(bounds, tokens=self.chunk_tokens)
        return plan_prefill_chunks(seq_lens, query_lens, self.layer, bounds)

    def chunk_topk_indices(self, chunk: PrefillChunk) -> Tensor | None:
        """Entry numbers of a chunk's tokens: the indexer's on c4a, all on c128a, None on window-only layers."""
        if self.layer.kind is LayerKind.CSA and self.topk_indices is not None:
            return self.topk_indices[self.prefill_tokens(chunk)]
        if self.layer.kind is LayerKind.HCA and self.compressed_metadata is not None:
            topk_indices = self.compressed_metadata.c128a_prefill_topk_indices
            width = max(chunk.topk, 1)
            return None if topk_indices is None else topk_indices[chunk.token_start : chunk.token_end, :width]
        return None

    def requests_of(self, chunk: PrefillChunk) -> Sequence[tuple[int, int]]:
        """Per request of a chunk: (tokens before this chunk, tokens in it), from host-side lengths."""
        metadata, requests = self.window_metadata, slice(chunk.request_start, chunk.request_end)
        seq_lens = metadata.prefill_seq_lens_cpu[requests].tolist()
        counts = [chunk.num_tokens] if chunk.is_slice else metadata.prefill_query_lens_cpu[requests].tolist()
        return [(n - chunk.tail - count, count) for n, count in zip(seq_lens, counts, strict=True)]

    def gathers_chunk(self, chunk: PrefillChunk) -> bool:
        """Whether a chunk's keys are gathered: the only place that decides it.

        The workspace plan of a backend that gathers has memory for rows, and that is enough for pages.
        """
        if not self.gathers or self.raw_q is not None:
            return self.gathers
        return not self.backend.prefers_pages(self.layer, self.requests_of(chunk), _gathered_rows(chunk))

    def prefill_tokens(self, chunk: PrefillChunk) -> slice:
        """A chunk's tokens among those of the batch."""
        num_decode_tokens = self.window_metadata.num_decode_tokens
        return slice(num_decode_tokens + chunk.token_start, num_decode_tokens + chunk.token_end)


def _gathered_rows(chunk: PrefillChunk) -> int:
    """Rows that are gathered for a chunk."""
    return chunk.num_requests * (chunk.entries + chunk.gather)


class PhaseCall:
    """The part of a `ForwardCall` that is one call of the backend: all decode tokens, or one prefill chunk.

    forward: the call that this is a part of.
    phase: the backend's phase that runs.
    tokens: the tokens of the batch that the call computes.
    specs: views of the workspace before the backend's own scratch.
    width: index columns of a token.
    request_rows: see `AttentionCall`.
    name: the call's name in profiles.
    """

    request_rows: RequestRows | None = None

    def __init__(
        self, forward: ForwardCall, phase: Phase, tokens: slice, specs: Sequence[BufferSpec], width: int
    ) -> None:
        self.forward, self.phase, self.tokens = forward, phase, tokens
        scratch = forward.backend.scratch(phase, forward.layer, tokens.stop - tokens.start, width)
        self._specs, self._caller = [*specs, *scratch], f"{forward.backend.name}.{phase.value}"
        self.name = f"dsv4attn::{phase.value}[{forward.layer.kind.value}]"

    def require(self) -> None:
        """Raise WorkspaceError unless the views will fit."""
        self.forward.workspace.require(*self._specs, arena=self.phase.value, caller=self._caller)

    def views(self) -> list[Tensor]:
        """The views of `specs`, then the backend's scratch."""
        return self.forward.workspace.get_simultaneous(*self._specs, arena=self.phase.value, caller=self._caller)

    def prepare_attention(self, keys: Sequence[PagedKeys] | GatheredKeys, scratch: Sequence[Tensor]) -> Run:
        """The backend's attention, prepared."""
        return self.forward.backend.prepare(self.phase, self.attention_call(keys, scratch))

    def attention_call(self, keys: Sequence[PagedKeys] | GatheredKeys, scratch: Sequence[Tensor]) -> AttentionCall:
        """The arguments of the backend's attention."""
        forward, tokens = self.forward, self.tokens
        raw_q = forward.raw_q if self.phase is Phase.PREFILL else None
        out, lse = forward.result_buffers or (forward.out, forward.lse)
        return AttentionCall(
            layer=forward.layer,
            q=forward.q[tokens],
            keys=keys,
            attn_sink=forward.attn_sink,
            out=out[tokens],
            lse=None if lse is None else lse[tokens],
            scratch=scratch,
            options=AttentionOptions(raw_q=None if raw_q is None else raw_q.of(tokens)),
            request_rows=self.request_rows,
        )


MAX_PREPARED = 64
"""Most entries of one metadata object; kinds of layers x sizes of padding are far fewer."""


@frozen(eq=False)
class PreparedCall:
    """One prepared `PhaseCall`.

    name: the call's name in profiles.
    tokens: the rows of q and out that it computes.
    run: `run(tensors)` fills the index buffers of the call and attends, for the tensors of one layer, of all tokens.
    """

    name: str
    tokens: slice
    run: Run


@define(eq=False)
class PreparedForward:
    """The prepared calls of one `ForwardCall`.

    num_tokens: number of tokens of the batch; later rows of q are padding.
    calls: prepared calls, in order; None once their views of the workspace were released.
    owners: the objects whose identities are in the key.
    q_bytes, out_bytes, lse_bytes: bytes from the first element of q, out and lse to the end of the last one.
    """

    num_tokens: int
    calls: Iterable[PreparedCall] | None
    owners: tuple[object, ...]
    q_bytes: int = 0
    out_bytes: int = 0
    lse_bytes: int = 0

    def release(self) -> None:
        """Drop the views of a workspace whose memory moved; the next layer prepares its calls again."""
        self.calls = None

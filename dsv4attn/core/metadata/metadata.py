"""The metadata of a batch: `Batch`, as an engine describes it, and the parts that `MetadataBuilder` makes of it.

Order of a batch: decode requests first, then prefill requests; tokens are concatenated in request order. `seq_lens`
counts tokens after this step, so the j-th query token of a request has position seq_len - query_len + j.

Metadata are immutable: the first layer of a step derives and prepares what all other layers share.

Letters in addition to those of `geometry`: Rd, Rp requests, Td, Tp tokens of the decode and the prefill part; S rows of
`slot_mapping` (at least the tokens of the batch when padded); N columns of a block table.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from attrs import define
from torch import Tensor

from dsv4attn.core.argument_checks import check_type
from dsv4attn.core.cache.ownership import Ownership
from dsv4attn.core.cache.selected_keys import RaggedIndices, RequestRows, StepTokens
from dsv4attn.core.model.geometry import LayerKind
from dsv4attn.core.reprs import fields_repr, frozen
from dsv4attn.core.tensorspec import check_declared, check_tensor, size, tensor
from dsv4attn.core.torch_ops.arguments import TokenMap
from dsv4attn.errors import ArgumentError

if not TYPE_CHECKING:
    from dsv4attn.core.metadata import __getattr__  # noqa: F401 - answers old names

__all__ = [
    "AttentionMetadata",
    "Batch",
    "CompressedMetadata",
    "CompressorMetadata",
    "SourceRows",
    "WholePrefill",
    "WindowMetadata",
]


@define(kw_only=True, eq=False)
class Batch:
    """One step as a scheduler describes it; the input of `MetadataBuilder`.

    Tensors are on the device, `*_cpu` on the host. Those on the device are not copied: with captured graphs their
    addresses must not change.

    num_reqs: R - requests, with those of padding.
    query_start_loc: [R+1] int32 - number of each request's first token; the last element counts the tokens.
    query_start_loc_cpu: [R+1] int32 - the same on the host.
    seq_lens: [R] int32 - tokens of each request after this step: in the caches before it, plus its query tokens.
    seq_lens_cpu: [R] int32 - the same on the host. It may be an upper bound, as under asynchronous speculation, of at
       most `Limits.max_model_len`: it only sizes things. Tables need columns for the true lengths alone.
    slot_mapping: [S] int64 - slot of the window cache, block * block size + offset, that each token is written to.
       Negative for padding: such a token is not real. It attends to nothing, and nothing of it is stored; its position,
       its values, and the rows that tables have for a request of padding alone may be anything. S is the tokens of the
       batch, and padding.
    block_table: [R, N] int32 - blocks of the window cache: position p of a request is in column p // block size. Only
       blocks that overlap a window need to be alive; the others may be -1.
    compressed_block_table: [R, _] int32 - blocks of the compressed caches: position p is in column
       p // compressed_block_tokens. None where only window-only layers run.
    c4a_state_block_table: [R, _] int32 - blocks of the compressor states of c4a layers, of the indexer's too. Only
       blocks that overlap a window of the compressor need to be alive. In V4.1 a ring of N blocks for each request,
       with position p in row p % (N * block size) and rows for the ratio and all drafts; a table that grows with the
       request is such a ring too. None where the engine compresses itself, and where all entries have one token.
    c128a_state_block_table: [R, _] int32 - the same of c128a layers.
    replay_start: [_] int32 - first position of each request that may be in a window, as the keys before it are not in
       the window cache; at least R elements. None: 0, all positions.
    num_cached_tokens: [_] int32 - end of each request's prefix hit: entries and index keys of the tokens below it are
       in the caches, where other requests may read them, and are not written. At least R elements. None: 0, no hit;
       refused with `replay_start` where layers have entries. Tokens from `replay_start` up to it are replayed: they run
       again because their window keys are lost. These are written to `slot_mapping`, so window pages must be the
       request's own. A replayed token sees the entries of the hit, as any token does.
    num_cached_states: [_] int32 - end of the tokens whose compressor states are in the state caches: the states of
       the tokens below it are not written. At least R elements. None: `num_cached_tokens`, states are part of the hit,
       and an entry that is completed after the hit reads those of its tokens before the hit's end. 0 where the states
       are lost: then replayed tokens write their states, to pages that must be the request's own, and `replay_start` is
       at or before the first state that an entry after the hit reads (`LayerGeometry.first_state`). In V4.1 the states
       of an entry that lies on both sides of the end are written either way, and no other entry reads one before it.
    causal: whether a token of a decode request sees the window up to itself. If not, its query tokens are a draft
       block: each sees the W tokens before the block, and the whole block, for which `Limits.decode_window_columns`
       needs W and the block's tokens. Prefill requests are causal either way, and so are compressed entries.
    """

    num_reqs: int = size("R")
    query_start_loc: Tensor = tensor("R+1", torch.int32)
    query_start_loc_cpu: Tensor = tensor("R+1", torch.int32, cpu=True)
    seq_lens: Tensor = tensor("R", torch.int32)
    seq_lens_cpu: Tensor = tensor("R", torch.int32, cpu=True)
    slot_mapping: Tensor = tensor("S", torch.int64)
    block_table: Tensor = tensor("R N", torch.int32)
    compressed_block_table: Tensor | None = tensor("R _", torch.int32, optional=True)
    c4a_state_block_table: Tensor | None = tensor("R _", torch.int32, optional=True)
    c128a_state_block_table: Tensor | None = tensor("R _", torch.int32, optional=True)
    replay_start: Tensor | None = tensor("_", torch.int32, optional=True)
    num_cached_tokens: Tensor | None = tensor("_", torch.int32, optional=True)
    num_cached_states: Tensor | None = tensor("_", torch.int32, optional=True)
    causal: bool = True

    __repr__ = fields_repr

    def __attrs_post_init__(self) -> None:
        check_declared(self)
        self.check_lengths()

    def check_lengths(self) -> None:
        """Raise ArgumentError unless optional fields that have an element for each request are long enough."""
        for name in ("replay_start", "num_cached_tokens", "num_cached_states"):
            value: Tensor | None = getattr(self, name)
            if value is not None and value.shape[0] < self.num_reqs:
                expected = f"an element for each of the {self.num_reqs} requests"
                raise ArgumentError(f"Batch.{name}", expected=expected, actual=f"{value.shape[0]} elements")


@define
class BuildState:
    """Whether the tensors of metadata still hold their step: a builder has the same tensors for every step.

    is_last: whether the builder has built no other `Batch` since.
    """

    is_last: bool = True


@frozen(kw_only=True, eq=False)
class WindowMetadata:
    """Window part of a batch: the same for all layers. Made by `MetadataBuilder`.

    num_decodes: Rd - decode requests, which come first.
    num_prefills: Rp - prefill requests.
    num_decode_tokens: Td - query tokens of the decode requests.
    num_prefill_tokens: Tp - query tokens of the prefill requests.
    block_size: records per block of the window cache.
    window_size: W - tokens that a query sees through the window, itself included.
    max_query_len: most query tokens of a request.
    max_seq_len: most tokens of a request after this step, from `seq_lens_cpu`.
    block_table: [R, N] int32 - of the batch.
    slot_mapping: [S] int64 - of the batch.
    seq_lens: [R] int32 - of the batch.
    query_start_loc: [R+1] int32 - of the batch.
    query_start_loc_cpu: [R+1] int32 - of the batch, on the host.
    is_valid_token: [T] bool - whether a token is real: whether its request is not -1.
    token_to_req_indices: [T] int32 - request of each token; -1 for a token that is not real. All ops obey it.
    decode_swa_indices: [Td, 1, _] int32 - slots of each decode token's window in ascending position, then -1; at least
       W columns, at most `Limits.decode_window_columns`.
    decode_swa_lens: [Td] int32 - how many slots each row has.
    prefill_swa_indices: [Tp, 1, _] int32 - the same for prefill tokens; at most `Limits.prefill_window_columns`.
    prefill_swa_lens: [Tp] int32 - how many slots each row has.
    prefill_seq_lens: [Rp] int32 - tokens of each prefill request after this step.
    prefill_gather_lens: [Rp] int32 - trailing tokens of each prefill request that its queries see through the window.
    prefill_seq_lens_cpu: [Rp] int32 - on the host.
    prefill_query_lens_cpu: [Rp] int32 - query tokens of each prefill request, on the host.
    decode_requests: which decode rows are of one request, and so share keys of the window, see `RequestRows`; None:
       rows may list any keys, as rows of more than W columns may. `MetadataBuilder` gives it where requests may have
       drafts and the batch is causal.
    prefill_requests: the same of the prefill rows. Their entries on c128a layers are shared too, because
       `c128a_prefill_topk_indices` numbers them from 0 in every row.
    build_state: of the build that made the metadata: layers refuse metadata after a later one. None: not known, as of
       metadata that an engine fills itself, or that were built with `full_width` for a graph, which a replay reads.

    An engine may fill this class itself. Rows of windows are its own then: any slots in any order, -1 among them. Rows
    of W columns in prefill are an exception: backends that gather keys look at `prefill_gather_lens` instead, and take
    each window to be the W positions up to the token's own, none before those that are gathered. Tensors of a phase
    without requests (`decode_*`, `prefill_*`) may be None.
    """

    num_decodes: int = size("Rd")
    num_prefills: int = size("Rp")
    num_decode_tokens: int = size("Td")
    num_prefill_tokens: int = size("Tp")
    block_size: int
    window_size: int = size("W")
    max_query_len: int
    max_seq_len: int
    block_table: Tensor = tensor("R N", torch.int32)
    slot_mapping: Tensor = tensor("S", torch.int64)
    seq_lens: Tensor = tensor("R", torch.int32)
    query_start_loc: Tensor = tensor("R+1", torch.int32)
    query_start_loc_cpu: Tensor = tensor("R+1", torch.int32, cpu=True, copied=True)
    is_valid_token: Tensor = tensor("T", torch.bool)
    token_to_req_indices: Tensor = tensor("T", torch.int32)
    decode_swa_indices: Tensor = tensor("Td 1 _", torch.int32, none_without="Td")
    decode_swa_lens: Tensor = tensor("Td", torch.int32, none_without="Td")
    prefill_swa_indices: Tensor = tensor("Tp 1 _", torch.int32, none_without="Tp")
    prefill_swa_lens: Tensor = tensor("Tp", torch.int32, none_without="Tp")
    prefill_seq_lens: Tensor = tensor("Rp", torch.int32, none_without="Rp")
    prefill_gather_lens: Tensor = tensor("Rp", torch.int32, none_without="Rp")
    prefill_seq_lens_cpu: Tensor = tensor("Rp", torch.int32, cpu=True, copied=True, none_without="Rp")
    prefill_query_lens_cpu: Tensor = tensor("Rp", torch.int32, cpu=True, copied=True, none_without="Rp")
    decode_requests: RequestRows | None = None
    prefill_requests: RequestRows | None = None
    build_state: BuildState | None = None

    def __attrs_post_init__(self) -> None:
        check_declared(self)
        for name in ("decode_swa_indices", "prefill_swa_indices"):
            rows, _, columns = getattr(self, name).shape
            if rows and columns < self.window_size:
                expected = f"at least the {self.window_size} columns of the window"
                raise ArgumentError(f"WindowMetadata.{name}", expected=expected, actual=columns)

    @cached_property
    def prepared(self) -> dict[object, Any]:
        """Prepared calls that use these metadata, see `core.attention.call`."""
        return {}

    @cached_property
    def takes_raw_q(self) -> dict[object, Any]:
        """Answers of `raw_q.prefill_takes_raw_q`."""
        return {}

    @cached_property
    def num_actual_tokens(self) -> int:
        """Tokens of the batch, without padding."""
        return self.num_decode_tokens + self.num_prefill_tokens

    @property
    def step_tokens(self) -> StepTokens:
        """All tokens of the step, as index ops take them."""
        return StepTokens(self.query_start_loc, self.seq_lens, self.token_to_req_indices, self.is_valid_token)

    @property
    def decode_swa_ragged(self) -> RaggedIndices | None:
        """Windows of the decode tokens in ragged form, where a backend's own metadata has them."""
        return None


@frozen(kw_only=True, eq=False)
class CompressedMetadata:
    """Compressed part of a batch: the same for all layers of one kind. Made by `MetadataBuilder`.

    kind: c4a or c128a.
    compress_ratio: tokens per compressed entry.
    num_reqs: R - requests of the batch.
    num_actual_tokens: T - tokens of the batch, without padding.
    max_query_len: most query tokens of a request.
    max_seq_len: most tokens of a request after this step, from `seq_lens_cpu`.
    block_size: tokens of a block of the compressed cache, which holds `block_size // compress_ratio` records.
    topk_tokens: entries that the indexer selects for a query; 0 on c128a layers.
    query_start_loc: [R+1] int32 - of the batch.
    slot_mapping: [S] int64 - slot of the compressed entry that a token completes, -1 for tokens that complete none, and
       for entries that a prefix hit has (`Batch.num_cached_tokens`).
    block_table: [R, N] int32 - blocks of the compressed cache.
    req_id_per_token: [T] int32 - request of each token; -1 for a token that is not real.
    compressed_lens: [T] int32 - entries visible to each token: (pos + 1) // compress_ratio, its own limit for every
       token of a verify step; 0 for a token that is not real.
    c128a_global_decode_topk_indices: [Td, 1, K] int32 - slots of all visible entries of each decode token, then -1. The
       row stride may exceed K. None on c4a layers, as the two below.
    c128a_decode_topk_lens: [Td] int32 - how many slots each row has.
    c128a_prefill_topk_indices: [Tp, K] int32 - local entry numbers 0, 1, 2, ... of each prefill token, of which
       `compressed_lens` count. All rows are the same memory (row stride 0), so columns past the length are not -1.
    decode_requests: as of the window part, of the rows of `c128a_global_decode_topk_indices`.
    """

    kind: LayerKind
    compress_ratio: int
    num_reqs: int = size("R")
    num_actual_tokens: int = size("T")
    max_query_len: int
    max_seq_len: int
    block_size: int
    topk_tokens: int
    query_start_loc: Tensor = tensor("R+1", torch.int32)
    slot_mapping: Tensor = tensor("S", torch.int64)
    block_table: Tensor = tensor("R N", torch.int32)
    req_id_per_token: Tensor = tensor("T", torch.int32)
    compressed_lens: Tensor = tensor("T", torch.int32)
    c128a_global_decode_topk_indices: Tensor | None = tensor("Td 1 K", torch.int32, optional=True)
    c128a_decode_topk_lens: Tensor | None = tensor("Td", torch.int32, optional=True)
    c128a_prefill_topk_indices: Tensor | None = tensor("Tp K", torch.int32, optional=True)
    decode_requests: RequestRows | None = None

    def __attrs_post_init__(self) -> None:
        check_declared(self)

    @cached_property
    def token_map(self) -> TokenMap:
        """The same for all layers of a step, and made once."""
        return TokenMap(self.block_table, self.req_id_per_token, self.compressed_lens)

    @property
    def records_per_block(self) -> int:
        """Records per block of the compressed cache."""
        return self.block_size // self.compress_ratio

    @property
    def c128a_decode_ragged(self) -> RaggedIndices | None:
        """Slots of the decode tokens' visible entries in ragged form, where a backend's own metadata has them."""
        return None


@frozen(kw_only=True, eq=False)
class CompressorMetadata:
    """Where the tokens of a batch have their compressor states: the same for all layers of a kind.

    block_size: records per block of the state caches.
    block_table: [R, N] int32 - of the batch.
    slot_mapping: [S] int64 - state slot of each token, -1 for padding and for tokens whose state is in the cache
       (`Batch.num_cached_states`). None where the states of a request are a ring (V4.1): the token at position p has
       the row p % (N * block_size) of its blocks.
    req_id_per_token: [T] int32 - of a ring: request of each token whose state is written or read, -1 for others. None:
       as in the window part.
    """

    block_size: int
    block_table: Tensor = tensor("R N", torch.int32)
    slot_mapping: Tensor | None = tensor("S", torch.int64, optional=True)
    req_id_per_token: Tensor | None = tensor("T", torch.int32, optional=True)

    def __attrs_post_init__(self) -> None:
        check_declared(self)


LayerKey: TypeAlias = "LayerKind | tuple[LayerKind, int]"
"""Names metadata of layers that are alike: their kind, or (kind, compress ratio) where a kind has several ratios."""


@define
class AttentionMetadata:
    """All parts of a batch's metadata, as one layer needs them.

    swa: the window part.
    compressed: the compressed part of the layer's kind. Window-only layers do not read it.
    state: the compressor's part of the layer's kind; None where the engine compresses itself.
    ownership: `Ownership` of the entries that slots, tables and counts are of; None: all entries.
    whole: of prefill that attends to the keys of all ranks; None: every rank attends to its own.
    source_rows: where layers that read the selection of another one run on some of its rows only (V4.1): which rows.
       None: the layers that they read from run on the same rows, with the same metadata.
    """

    swa: WindowMetadata
    compressed: CompressedMetadata | None = None
    state: CompressorMetadata | None = None
    ownership: Ownership | None = None
    whole: WholePrefill | None = None
    source_rows: SourceRows | None = None

    def check_owner(self, ownership: Ownership | None) -> None:
        """Raise ArgumentError unless these metadata are of this ownership; None: of whole sequences.

        ownership: entries that the caller's rank has; None if it has all.
        """
        if self.ownership != ownership:
            expected, actual = (f"metadata of {owner or 'all entries'}" for owner in (ownership, self.ownership))
            hint = "give context_parallel to the layer and to the CacheManager, or to neither"
            raise ArgumentError("metadata", expected=expected, actual=actual, hint=hint)


@frozen(eq=False)
class SourceRows:
    """Which rows of a step the rows of a part of it are: of the last tokens of each request, say.

    A layer of DeepSeek-V4.1 that attends to entries which an earlier layer selected then runs on fewer rows than that
    layer did. The metadata of the part are built from a batch of its own.

    source: window metadata of the step that the earlier layers ran.
    rows: [T] int64 - for each token of the part, its row in that step.
    """

    source: WindowMetadata
    rows: Tensor

    def __attrs_post_init__(self) -> None:
        check_type("source", self.source, WindowMetadata, cure="give the swa of the step's metadata")
        check_tensor("rows", self.rows, "T", torch.int64, {})
        tokens = self.source.num_actual_tokens
        if self.rows.device.type == "cpu" and bool(((self.rows < 0) | (self.rows >= tokens)).any()):
            actual = f"{int(self.rows.min())} .. {int(self.rows.max())}"
            raise ArgumentError("rows", expected=f"rows in [0, {tokens}), the tokens of the source", actual=actual)

    @cached_property
    def selected(self) -> dict[object, Tensor]:
        """Selected entries of the rows of this part, by the layer that attends to them: [T, K] int32 each."""
        return {}


@frozen(eq=False)
class WholePrefill:
    """Prefill of a step on one of several ranks, over the compressed keys of all of them.

    Selected entries of prefill tokens have their numbers in whole sequences then, those of decode tokens the numbers of
    this rank.

    metadata: as a rank with all entries has them; `compressed.block_table` names pages of a cache that holds the
       compressed pages of the prefill requests: those of request i, from i * pages / requests on.
    pages: [requests, n] int32 - pages of this rank that hold its part of them, negative for none.
    """

    metadata: AttentionMetadata
    pages: Tensor

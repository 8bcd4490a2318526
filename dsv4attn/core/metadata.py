"""What `forward_mqa` is told about a batch.

Order of a batch: decode requests first, then prefill requests; tokens are concatenated in request order. `seq_lens`
counts tokens after this step, so the j-th query token of a request has position seq_len - query_len + j.

Metadata never change once they are made: what follows from them is worked out for the first layer of a step alone.

Letters beside those of `geometry`: Rd, Rp requests, Td, Tp tokens of the decode and the prefill part; S rows of
`slot_mapping` (at least the tokens of the batch when padded); N columns of a block table.
"""

from __future__ import annotations

import torch
from attrs import define, frozen
from torch import Tensor

from dsv4attn.core.contract import RaggedIndices
from dsv4attn.core.geometry import LayerKind
from dsv4attn.core.tensorspec import check_declared, size, tensor

__all__ = [
    "AttentionMetadata",
    "Batch",
    "DeepseekSparseSWAMetadata",
    "DeepseekV4FlashMLAMetadata",
    "FlashMLASparseMetadata",
]


@define(kw_only=True, eq=False)
class Batch:
    """One step as a scheduler describes it; the input of `MetadataBuilder`.

    Tensors on the device stay the engine's own: keep their addresses fixed if you capture graphs.
    """

    num_reqs: int = size("R")
    query_start_loc: Tensor = tensor("R+1", torch.int32)
    """Index of each request's first token; the last element counts the tokens."""
    query_start_loc_cpu: Tensor = tensor("R+1", torch.int32, cpu=True)
    seq_lens: Tensor = tensor("R", torch.int32)
    seq_lens_cpu: Tensor = tensor("R", torch.int32, cpu=True)
    """May be an upper bound of `seq_lens` under asynchronous speculation: it only sizes things."""
    slot_mapping: Tensor = tensor("S", torch.int64)
    """Slot of the window cache each token is written to; negative for padding rows, which attend to nothing."""
    block_table: Tensor = tensor("R N", torch.int32)
    """Blocks of the window cache. Only blocks that overlap a window need to be alive."""
    compressed_block_table: Tensor | None = tensor("R _", torch.int32, optional=True)
    """Blocks of the compressed cache, each standing for `compressed_block_tokens` tokens."""

    def __attrs_post_init__(self) -> None:
        """Check every declared field."""
        check_declared(self)


@frozen(kw_only=True, eq=False)
class DeepseekSparseSWAMetadata:
    """Window part of a batch: the same for all layers."""

    num_decodes: int = size("Rd")
    num_prefills: int = size("Rp")
    num_decode_tokens: int = size("Td")
    num_prefill_tokens: int = size("Tp")
    block_size: int
    """Records per block of the window cache."""
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
    decode_swa_indices: Tensor = tensor("Td 1 W", torch.int32)
    """Slots of each decode token's window in ascending position, then -1."""
    decode_swa_lens: Tensor = tensor("Td", torch.int32)
    prefill_swa_indices: Tensor = tensor("Tp 1 W", torch.int32)
    prefill_swa_lens: Tensor = tensor("Tp", torch.int32)
    prefill_seq_lens: Tensor = tensor("Rp", torch.int32)
    prefill_gather_lens: Tensor = tensor("Rp", torch.int32)
    """Trailing tokens of each prefill request that its queries can see through the window."""
    prefill_seq_lens_cpu: Tensor = tensor("Rp", torch.int32, cpu=True, copied=True)
    prefill_query_lens_cpu: Tensor = tensor("Rp", torch.int32, cpu=True, copied=True)

    def __attrs_post_init__(self) -> None:
        """Check every declared field."""
        check_declared(self)

    @property
    def num_actual_tokens(self) -> int:
        """Tokens of the batch, without padding."""
        return self.num_decode_tokens + self.num_prefill_tokens

    @property
    def decode_swa_ragged(self) -> RaggedIndices | None:
        """Windows of the decode tokens in ragged form, where a backend's own metadata has them."""
        return None


@frozen(kw_only=True, eq=False)
class FlashMLASparseMetadata:
    """Compressed part of a batch: the same for all layers of one kind."""

    kind: LayerKind
    compress_ratio: int
    num_reqs: int = size("R")
    num_actual_tokens: int = size("T")
    max_query_len: int
    max_seq_len: int
    block_size: int
    """Tokens a block of the compressed cache stands for; it holds `block_size // compress_ratio` records."""
    topk_tokens: int
    query_start_loc: Tensor = tensor("R+1", torch.int32)
    slot_mapping: Tensor = tensor("S", torch.int64)
    """Slot of the compressed entry a token completes, -1 for all tokens that complete none."""
    block_table: Tensor = tensor("R N", torch.int32)
    req_id_per_token: Tensor = tensor("T", torch.int32)
    compressed_lens: Tensor = tensor("T", torch.int32)
    """Entries visible to each token: (pos + 1) // compress_ratio, its own limit for every token of a verify step."""
    c128a_global_decode_topk_indices: Tensor | None = tensor("Td 1 K", torch.int32, optional=True)
    """Slots of all visible entries of each decode token, then -1. The row stride may exceed K."""
    c128a_decode_topk_lens: Tensor | None = tensor("Td", torch.int32, optional=True)
    c128a_prefill_topk_indices: Tensor | None = tensor("Tp K", torch.int32, optional=True)
    """Local entry numbers 0, 1, 2, ... of each prefill token; `compressed_lens` says how many count. All rows are the
    same memory (row stride 0), so columns past the length are not -1."""

    def __attrs_post_init__(self) -> None:
        """Check every declared field."""
        check_declared(self)

    @property
    def records_per_block(self) -> int:
        """Records per block of the compressed cache."""
        return self.block_size // self.compress_ratio

    @property
    def c128a_decode_ragged(self) -> RaggedIndices | None:
        """Slots of the decode tokens' visible entries in ragged form, where a backend's own metadata has them."""
        return None


DeepseekV4FlashMLAMetadata = FlashMLASparseMetadata


@define
class AttentionMetadata:
    """Both parts, as one layer needs them; `compressed` is not read by window-only layers."""

    swa: DeepseekSparseSWAMetadata
    compressed: FlashMLASparseMetadata | None = None

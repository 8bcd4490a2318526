"""Metadata of the index keys: a builder that needs neither DeepGEMM nor a GPU.

vLLM's own builder expands block tables for each token, cuts prefills into chunks and plans DeepGEMM's kernel. Selection
on dsv4attn takes all tokens of a step at once. It needs the request of each token and how many entries the token sees.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadataBuilder, CommonAttentionMetadata
from vllm.v1.attention.backends.mla.compressor_utils import get_compressed_slot_mapping
from vllm.v1.attention.backends.mla.indexer import (
    DeepseekV4IndexerBackend,
    DeepseekV32IndexerMetadata,
    DeepseekV41IndexerBackend,
)
from vllm.v1.attention.backends.utils import split_decodes_and_prefills

from dsv4attn_vllm.metadata import visible_entries, visible_entries_of_replayed


@dataclass
class IndexMetadata(DeepseekV32IndexerMetadata):
    """vLLM's metadata of the index keys, without its plans for decode and prefill.

    token_to_req: [T] int32 - the request of each token. visible_lens: [T] int32 - entries that each token sees, 0 for
    padding. block_table: [R, N] int32.
    """

    token_to_req: Tensor | None = None
    visible_lens: Tensor | None = None


class IndexMetadataBuilder(AttentionMetadataBuilder[IndexMetadata]):
    """Builds `IndexMetadata`, in buffers at fixed addresses, which captured graphs read."""

    # all metadata are made on the device, for each token
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS
    supports_draft_decode_metadata_update = True

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:  # noqa: ANN401
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        scheduler, speculative = vllm_config.scheduler_config, vllm_config.speculative_config
        self._ratio = int(kv_cache_spec.tokens_per_state)
        self._threshold = 1 + (speculative.num_speculative_tokens if speculative else 0)
        tokens = scheduler.max_num_batched_tokens
        self._requests = torch.zeros(tokens, dtype=torch.int32, device=device)
        self._visible = torch.zeros(tokens, dtype=torch.int32, device=device)
        self._slots = torch.full((tokens,), -1, dtype=torch.int64, device=device)
        self._numbers = torch.arange(scheduler.max_num_seqs + 1, dtype=torch.int32, device=device)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,  # noqa: FBT001, FBT002
    ) -> IndexMetadata:
        """Describe the index keys of a step."""
        common = common_attn_metadata
        tokens = common.num_actual_tokens
        parts = (0, 0, 0, 0)
        slots, requests, visible = self._slots[:0], self._requests[:0], self._visible[:0]
        if tokens:
            parts = split_decodes_and_prefills(common, decode_threshold=self._threshold)
            slots = get_compressed_slot_mapping(
                tokens,
                common.slot_mapping,
                common.query_start_loc,
                common.seq_lens,
                common.block_table_tensor,
                self.kv_cache_spec.num_states,
                self._ratio,
                out=self._slots,
            )
            requests = common.token_to_req_indices(self._requests)
            visible = self._entries(common)
        decodes, prefills, decode_tokens, prefill_tokens = parts
        return IndexMetadata(
            seq_lens=common.seq_lens,
            max_seq_len=min(common.max_seq_len, self.vllm_config.model_config.max_model_len),
            slot_mapping=slots,
            num_decodes=decodes,
            num_decode_tokens=decode_tokens,
            num_prefills=prefills,
            num_prefill_tokens=prefill_tokens,
            block_table=common.block_table_tensor,
            token_to_req=requests,
            visible_lens=visible,
        )

    def _entries(self, common: CommonAttentionMetadata) -> Tensor:
        return visible_entries(common, self._ratio, self._visible)

    def update_draft_decode_metadata(self, metadata: IndexMetadata) -> None:
        """Make the tensors of a step of one token a request again, from lengths that changed in place."""
        tokens, numbers = metadata.num_decode_tokens, self._numbers
        if not tokens:
            return
        assert metadata.visible_lens is not None
        assert metadata.token_to_req is not None
        assert metadata.block_table is not None
        lens, table = metadata.seq_lens[:tokens], metadata.block_table[:tokens]
        metadata.token_to_req[:tokens].copy_(numbers[:tokens])
        torch.div(lens, self._ratio, rounding_mode="floor", out=metadata.visible_lens[:tokens])
        get_compressed_slot_mapping(
            tokens,
            numbers[:tokens],
            numbers[: tokens + 1],
            lens,
            table,
            self.kv_cache_spec.num_states,
            self._ratio,
            out=metadata.slot_mapping,
        )


class IndexBackend(DeepseekV4IndexerBackend):
    """vLLM's description of the index cache, with dsv4attn's builder."""

    @staticmethod
    def get_name() -> str:
        """Return the name in vLLM's log."""
        return "DSV4ATTN_INDEXER"

    @staticmethod
    def get_builder_cls() -> type[IndexMetadataBuilder]:
        """Return the builder."""
        return IndexMetadataBuilder

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """Whether vLLM's batch-invariant mode is served: `invariance` refuses what is not."""
        return True


class V41IndexMetadataBuilder(IndexMetadataBuilder):
    """Builds metadata of V4.1's index keys, for parts on dsv4attn."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:  # noqa: ANN401
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        tokens = vllm_config.scheduler_config.max_num_batched_tokens
        self._places = torch.arange(tokens, dtype=torch.int32, device=device)

    def _entries(self, common: CommonAttentionMetadata) -> Tensor:
        return visible_entries_of_replayed(common, self._ratio, self._visible, self._places)


class V41IndexBackend(DeepseekV41IndexerBackend):
    """vLLM's description of V4.1's index cache, with dsv4attn's builder."""

    @staticmethod
    def get_name() -> str:
        """Return the name in vLLM's log."""
        return "DSV4ATTN_V41_INDEXER"

    @staticmethod
    def get_builder_cls() -> type[V41IndexMetadataBuilder]:
        """Return the builder."""
        return V41IndexMetadataBuilder

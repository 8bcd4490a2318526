"""vLLM's metadata builders of DeepSeek-V4.1, with dsv4attn's metadata hung on what they build; see `metadata`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.models.deepseek_v41 import compressor, sparse_mla
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.mla.indexer import DeepseekV41IndexerBackend
from vllm.v1.attention.backends.mla.sparse_swa import DeepseekSparseSWABackend

from dsv4attn import FlashMLASparseMetadata, LayerKind
from dsv4attn_vllm import index_metadata
from dsv4attn_vllm.metadata import VariableDecodes, Windows, positions_of

__all__ = ["Backend", "CompressedMetadata", "IndexBackend", "SWABackend", "StateBackend", "visible_entries"]


class SWAMetadataBuilder(Windows, sparse_mla.DeepseekV41SparseSWAMetadataBuilder):
    """Builds `metadata.SWAMetadata` of V4.1."""


@dataclass
class CompressedMetadata(sparse_mla.DeepseekV4FlashMLAMetadata):
    """vLLM's compressed metadata. dsv4attn: the same step for dsv4attn."""

    dsv4attn: FlashMLASparseMetadata | None = None


class CompressedMetadataBuilder(VariableDecodes, sparse_mla.DeepseekV4SparseMLAMetadataBuilder):
    """Builds `CompressedMetadata` of the layers that own a compressed cache; those that share it read these."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - vLLM's signature
        super().__init__(*args, **kwargs)
        tokens = self.vllm_config.scheduler_config.max_num_batched_tokens
        # [tokens] int32 - entries that each token sees, at an address that captured graphs may read
        self._visible = torch.zeros(tokens, dtype=torch.int32, device=self.device)
        self._numbers = torch.arange(tokens, dtype=torch.int32, device=self.device)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,  # noqa: FBT001, FBT002 - vLLM's signature
    ) -> CompressedMetadata:
        """Build vLLM's metadata of a step, and dsv4attn's."""
        base = super().build(common_prefix_len, common_attn_metadata, fast_build)
        visible = visible_entries(common_attn_metadata, self.compress_ratio, self._visible, self._numbers)
        ours = FlashMLASparseMetadata(
            kind=LayerKind.C4A,
            compress_ratio=self.compress_ratio,
            num_reqs=base.num_reqs,
            num_actual_tokens=base.num_actual_tokens,
            max_query_len=base.max_query_len,
            max_seq_len=min(base.max_seq_len, self.model_config.max_model_len),
            block_size=base.block_size,
            topk_tokens=base.topk_tokens,
            query_start_loc=base.query_start_loc[: base.num_reqs + 1],
            slot_mapping=base.slot_mapping,
            block_table=base.block_table[: base.num_reqs],
            req_id_per_token=base.req_id_per_token[: base.num_actual_tokens],
            compressed_lens=visible,
        )
        return CompressedMetadata(**vars(base), dsv4attn=ours)


def visible_entries(common: CommonAttentionMetadata, ratio: int, buffer: Tensor, numbers: Tensor) -> Tensor:
    """[T] int32 - entries that each token sees, (position + 1) // ratio, 0 for padding; computed on the device.

    Padding is what lies behind the last request. A slot of -1 does not tell: tokens that are computed again for their
    windows alone have one here, and see their entries.
    numbers: 0, 1, 2, ...
    """
    entries = (positions_of(common) + 1).div_(ratio, rounding_mode="floor")
    return buffer[: len(entries)].copy_(entries.masked_fill_(_is_padding(common, numbers), 0))


def _is_padding(common: CommonAttentionMetadata, numbers: Tensor) -> Tensor:
    return numbers[: common.num_actual_tokens] >= common.query_start_loc[common.num_reqs]


class Backend(sparse_mla.DeepseekV4SparseMLABackend):
    """vLLM's description of a DeepSeek-V4.1 backend, for any device that dsv4attn has a backend for."""

    @staticmethod
    def get_name() -> str:
        """Return the name in vLLM's log."""
        return "DSV4ATTN"

    @staticmethod
    def get_builder_cls() -> type[CompressedMetadataBuilder]:
        """Return the builder of compressed metadata."""
        return CompressedMetadataBuilder

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:  # noqa: ANN401, ARG003 - vLLM's DeviceCapability
        """Whether a device is served: dsv4attn's own selection decides when the layers are built."""
        return True


class SWABackend(DeepseekSparseSWABackend):
    """The same for the window caches."""

    @staticmethod
    def get_builder_cls() -> type[SWAMetadataBuilder]:
        """Return the builder of window metadata."""
        return SWAMetadataBuilder


class IndexMetadataBuilder(index_metadata.IndexMetadataBuilder):
    """Builds metadata of V4.1's index keys, for steps on dsv4attn."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:  # noqa: ANN401
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        tokens = vllm_config.scheduler_config.max_num_batched_tokens
        self._places = torch.arange(tokens, dtype=torch.int32, device=device)

    def _entries(self, common: CommonAttentionMetadata) -> Tensor:
        return visible_entries(common, self._ratio, self._visible, self._places)


class IndexBackend(DeepseekV41IndexerBackend):
    """vLLM's description of V4.1's index cache, with dsv4attn's builder."""

    @staticmethod
    def get_name() -> str:
        """Return the name in vLLM's log."""
        return "DSV4ATTN_V41_INDEXER"

    @staticmethod
    def get_builder_cls() -> type[IndexMetadataBuilder]:
        """Return the builder."""
        return IndexMetadataBuilder


@dataclass
class StateMetadata(compressor.CompressorMetadata):
    """vLLM's metadata of the compressor's rings.

    ring_table: [R, 1] int32 - the block of each request's ring, -1 if it has none. requests: [T] int32 - the request of
    each token, -1 for padding.
    """

    ring_table: Tensor | None = None
    requests: Tensor | None = None


class StateMetadataBuilder(compressor.CompressorMetadataBuilder):
    """Builds `StateMetadata`, in buffers at fixed addresses, which captured graphs read."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - vLLM's signature
        super().__init__(*args, **kwargs)
        scheduler = self.vllm_config.scheduler_config
        tokens = scheduler.max_num_batched_tokens
        self._requests = torch.zeros(tokens, dtype=torch.int32, device=self.device)
        self._places = torch.arange(tokens, dtype=torch.int32, device=self.device)
        # a captured step may be padded with requests
        self._rings = torch.zeros(max(scheduler.max_num_seqs, tokens), 1, dtype=torch.int32, device=self.device)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,  # noqa: FBT001, FBT002 - vLLM's signature
    ) -> StateMetadata:
        """Build vLLM's metadata of a step, and what steps on dsv4attn need."""
        common = common_attn_metadata
        base = super().build(common_prefix_len, common, fast_build)
        tokens, reqs = common.num_actual_tokens, common.num_reqs
        own = base.token_to_req_indices[:tokens].masked_fill(_is_padding(common, self._places), -1)
        table = common.block_table_tensor[:reqs, :1]
        # vLLM gives block 0 to requests that have none
        rings = self._rings[:reqs].copy_(table.masked_fill(table == 0, -1))
        return StateMetadata(**vars(base), ring_table=rings, requests=self._requests[:tokens].copy_(own))


class StateBackend(compressor.CompressorBackend):
    """vLLM's description of the rings, with dsv4attn's builder."""

    @staticmethod
    def get_builder_cls() -> type[StateMetadataBuilder]:
        """Return the builder."""
        return StateMetadataBuilder

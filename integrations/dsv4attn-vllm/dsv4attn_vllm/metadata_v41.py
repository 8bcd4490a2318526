"""vLLM's metadata builders of DeepSeek-V4.1, with dsv4attn's metadata hung on what they build; see `metadata`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.models.deepseek_v41 import sparse_mla
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.mla.sparse_swa import DeepseekSparseSWABackend

from dsv4attn import FlashMLASparseMetadata, LayerKind
from dsv4attn_vllm.metadata import VariableDecodes, Windows, positions_of

__all__ = ["Backend", "CompressedMetadata", "SWABackend", "visible_entries"]


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
    tokens = common.num_actual_tokens
    entries = (positions_of(common) + 1).div_(ratio, rounding_mode="floor")
    padding = numbers[:tokens] >= common.query_start_loc[common.num_reqs]
    return buffer[:tokens].copy_(entries.masked_fill_(padding, 0))


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

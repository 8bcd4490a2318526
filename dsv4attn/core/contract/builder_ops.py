"""`BuilderOps`: index arithmetic of `MetadataBuilder`, one field an op. Part of the contract."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from attrs import frozen

from dsv4attn.core.torch_ops import index_ops

__all__ = ["BuilderOps"]

Op: TypeAlias = Callable[..., Any]


@frozen
class BuilderOps:
    """The index arithmetic of the metadata builder, once a step. The default of each op is torch's definition.

    Outputs are views of persistent buffers. No op reads a tensor value on the host. `build_token_maps` alone decides
    whether a token is real: all other ops take a token of request -1 as absent. Arguments are those of the definitions,
    `torch_ops.index_ops`.
    build_token_maps: request and position of each token, and whether the token is real.
    build_window_indices: slots of each token's window, and how many there are.
    build_gather_lens: number of window keys that each prefill request reads.
    build_cached_mask: which tokens a prefix hit has already, so that they write no entry.
    build_compressed_slot_mapping: slot of the entry that each token completes.
    build_owned_slot_mapping: the same for entries of one rank of context parallelism.
    compute_global_topk_indices_and_lens: slots of all visible entries of a c128a layer, and how many there are.
    """

    build_token_maps: Op = index_ops.build_token_maps
    build_window_indices: Op = index_ops.build_window_indices
    build_gather_lens: Op = index_ops.build_gather_lens
    build_cached_mask: Op = index_ops.build_cached_mask
    build_compressed_slot_mapping: Op = index_ops.build_compressed_slot_mapping
    build_owned_slot_mapping: Op = index_ops.build_owned_slot_mapping
    compute_global_topk_indices_and_lens: Op = index_ops.compute_global_topk_indices_and_lens

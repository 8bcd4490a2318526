"""Context parallelism: one sequence over the ranks of a process group, each with a part of the compressed entries."""

from __future__ import annotations

from dsv4attn.core.context_parallel.attention import forward_mqa_over_ranks, merge_over_ranks
from dsv4attn.core.context_parallel.exchange import ContextParallel, agreed, together
from dsv4attn.core.context_parallel.heads import check_heads
from dsv4attn.core.context_parallel.metadata import OwnedMetadataBuilder, metadata_builder, on_rank
from dsv4attn.core.context_parallel.ownership import Ownership, build_owned_slot_mapping
from dsv4attn.core.context_parallel.reshard import reshard_cache
from dsv4attn.core.context_parallel.selection import select_topk_over_ranks

__all__ = [
    "ContextParallel",
    "OwnedMetadataBuilder",
    "Ownership",
    "agreed",
    "build_owned_slot_mapping",
    "check_heads",
    "forward_mqa_over_ranks",
    "merge_over_ranks",
    "metadata_builder",
    "on_rank",
    "reshard_cache",
    "select_topk_over_ranks",
    "together",
]

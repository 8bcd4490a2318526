"""A caller may reuse, move and resize its own tensors between calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4attn.backends.reference.launch import ReferenceBackend
from dsv4attn.backends.triton.launch import GenericBackend
from dsv4attn.core.attention.forward_mqa import forward_mqa
from dsv4attn.core.contract.limits import Limits
from dsv4attn.core.metadata.builder import MetadataBuilder
from dsv4attn.core.model.geometry import LayerKind
from dsv4attn.errors import ArgumentError
from tests.harness import C4A, KINDS, SMALL, batch_of, forward_args, metadata_of

both = pytest.mark.parametrize("backend", [ReferenceBackend(), GenericBackend()], ids=lambda backend: backend.name)


def moved_by_data(tensor: Tensor, new: Tensor) -> None:
    tensor.data = new


def moved_by_set(tensor: Tensor, new: Tensor) -> None:
    tensor.set_(new.untyped_storage(), 0, new.shape, new.stride())


@both
@pytest.mark.parametrize("move", [moved_by_data, moved_by_set])
@pytest.mark.parametrize("query", [[1, 1, 1, 1], [1, 1, 9, 20]], ids=["decodes", "mixed"])
def test_entry_numbers_are_read_where_their_tensor_is_now(
    backend: Any, move: Callable[[Tensor, Tensor], None], query: list[int]
) -> None:
    step = {**forward_args(C4A), "backend": backend, "metadata": metadata_of(C4A, query=query)}
    chosen = step["topk_indices"] = step["topk_indices"].contiguous()
    forward_mqa(**step)
    first = step["out"].clone()
    new = torch.full_like(chosen, -1)
    move(chosen, new)
    forward_mqa(**step)
    fresh = {**forward_args(C4A), "backend": backend, "metadata": metadata_of(C4A, query=query), "topk_indices": new}
    forward_mqa(**fresh)

    assert not torch.equal(first, fresh["out"])
    assert torch.equal(step["out"], fresh["out"])
    assert torch.equal(step["lse"], fresh["lse"])


@both
def test_entry_numbers_that_became_fewer_are_refused_in_a_known_step(backend: Any) -> None:
    step = {**forward_args(C4A), "backend": backend}
    chosen = step["topk_indices"] = step["topk_indices"].contiguous()
    forward_mqa(**step)
    step["out"].fill_(7)
    chosen.resize_(3, 3)

    with pytest.raises(ArgumentError, match=r"^topk_indices: expected a row for each of 31 tokens"):
        forward_mqa(**step)
    assert bool((step["out"] == 7).all())


@both
def test_memory_that_was_freed_and_given_to_another_tensor_is_another_step(
    backend: Any,
) -> None:
    step = {**forward_args(C4A), "backend": backend}
    chosen = step["topk_indices"] = step["topk_indices"].contiguous()
    forward_mqa(**step)
    at, other = chosen.data_ptr(), torch.full_like(chosen, -1)
    # the storage moves, and with it all views of it
    chosen.resize_(50_000, 3).zero_()
    assert chosen.data_ptr() != at
    step["topk_indices"] = other
    forward_mqa(**step)
    fresh = {**forward_args(C4A), "backend": backend, "topk_indices": other.clone()}
    forward_mqa(**fresh)

    assert torch.equal(step["out"], fresh["out"])


@both
def test_other_tensor_objects_over_the_same_entry_numbers_are_the_same_step(backend: Any) -> None:
    step = {**forward_args(C4A), "backend": backend}
    chosen = step["topk_indices"] = step["topk_indices"].contiguous()
    forward_mqa(**step)
    first = step["out"].clone()
    step["topk_indices"] = chosen.view(chosen.shape)
    chosen.copy_(chosen.flip(0) - 1)
    forward_mqa(**step)
    fresh = {**forward_args(C4A), "backend": backend, "topk_indices": chosen.clone()}
    forward_mqa(**fresh)

    assert not torch.equal(first, step["out"])
    assert torch.equal(step["out"], fresh["out"])


@pytest.mark.parametrize("kind", KINDS)
def test_host_lengths_may_be_written_again_once_metadata_are_built(kind: LayerKind) -> None:
    batch = batch_of([9, 20], [29, 20])
    starts_cpu, lens_cpu = batch.query_start_loc_cpu, batch.seq_lens_cpu
    limits = Limits(max_num_reqs=4, max_num_batched_tokens=64, max_model_len=256, max_index_elements=64)
    builder = MetadataBuilder(SMALL, limits, swa_block_size=4, compressed_block_tokens=32)
    metadata = builder.build_for(batch, [kind])[kind]
    step = {**forward_args(kind), "metadata": metadata, "limits": limits}
    forward_mqa(**step)
    first = step["out"].clone()
    starts_cpu.copy_(torch.tensor([0, 1, 2]))
    lens_cpu.copy_(torch.tensor([256, 1]))
    other = {**forward_args(kind), "metadata": metadata, "limits": limits}
    forward_mqa(**other)

    assert torch.equal(other["out"], first)
    assert metadata.swa.query_start_loc_cpu.tolist() == [0, 9, 29]
    assert metadata.swa.prefill_seq_lens_cpu.tolist() == [29, 20]

"""`CacheManager.select`: forks, reuse and release of sequences for beam search."""

from __future__ import annotations

import pytest
import torch

from dsv4attn.core.cache.layout import KVCacheLayout
from dsv4attn.core.contract.limits import Limits
from dsv4attn.core.model.geometry import ModelGeometry
from dsv4attn.errors import ArgumentError, OutOfPagesError
from dsv4attn.serving.cache_manager import CachedSequence, CacheManager


def manager(**options: int) -> CacheManager:
    layers = [("sliding_attention", 0), ("compressed_sparse_attention", 4)]
    geometry = ModelGeometry.from_config(
        {
            "model_type": "deepseek_v4",
            "num_hidden_layers": 2,
            "layer_types": [kind for kind, _ in layers],
            "num_attention_heads": 2,
            "head_dim": 16,
            "qk_rope_head_dim": 8,
            "sliding_window": 8,
            "index_topk": 4,
            "index_head_dim": 16,
            "index_n_heads": 2,
            "q_lora_rank": 8,
            "max_position_embeddings": 1024,
            "hidden_size": 32,
            "o_groups": 1,
            "o_lora_rank": 8,
        }
    )
    return CacheManager(geometry, Limits(4, 64, 64), KVCacheLayout.rows(8, 8), num_blocks={**options})


def filled(pages: CacheManager, *lengths: int) -> list[CachedSequence]:
    sequences = [pages.new() for _ in lengths]
    requests = [*zip(sequences, lengths, strict=True)]
    pages.batch(requests)
    pages.advance(requests)
    for cache in pages.caches[1].present.values():
        cache.tensor.copy_(torch.randint(1, 50, cache.tensor.shape))
    return sequences


def keys(pages: CacheManager, sequence: CachedSequence) -> torch.Tensor:
    return pages.caches[1].attention.swa.tensor[sequence.tables["window"].blocks]


def test_each_is_returned_once_and_forked_then() -> None:
    pages = manager()
    first, second, third = filled(pages, 5, 6, 7)

    selected = pages.select([first, second, third], [2, 0, 2])

    assert [sequence.length for sequence in selected] == [7, 5, 7]
    assert selected[:2] == [third, first]
    assert selected[2] is not third
    assert torch.equal(keys(pages, selected[2]), keys(pages, third))
    assert second.owner is None
    assert pages.select(selected, []) == []
    assert set(pages.kv_bytes.values()) == {0}


def test_pages_of_sequences_that_are_not_named_serve_the_forks() -> None:
    pages = manager(compressed=2)
    first, second = filled(pages, 5, 6)

    assert [sequence.length for sequence in pages.select([first, second], [1, 1])] == [6, 6]


def test_too_few_pages_and_unknown_numbers_change_nothing() -> None:
    pages = manager(compressed=2)
    both, used_bytes = filled(pages, 5, 6), pages.kv_bytes

    with pytest.raises(OutOfPagesError, match=r"1 compressed pages needed, 0 of 2 are free.*nothing was changed"):
        pages.select(both, [0, 1, 1])
    with pytest.raises(ArgumentError, match="rows"):
        pages.select(both, [0, 2])
    assert all(sequence.owner for sequence in both)
    assert pages.kv_bytes == used_bytes


def test_a_sequence_that_is_given_twice_and_rows_that_are_no_numbers_change_nothing() -> None:
    pages = manager()
    (first, second), used_bytes = filled(pages, 5, 6), pages.kv_bytes

    with pytest.raises(
        ArgumentError, match=r"^sequences: expected each sequence once, got one twice -> name a sequence"
    ):
        pages.select([first, second, first], [0])
    for row in (True, 0.0, "0", None, -1):
        with pytest.raises(ArgumentError, match=r"^rows: expected numbers in 0 .. 1"):
            pages.select([first, second], [row])  # type: ignore[list-item]
    assert first.owner is second.owner is pages
    assert pages.kv_bytes == used_bytes


def test_a_fork_that_takes_fewer_pages_than_its_source_holds_is_no_reason_to_refuse() -> None:
    pages = manager(compressed=4, c4a_state=10)
    (source,) = filled(pages, 5)
    # pages that are reserved for tokens to come are not copied: 8 pages of states, of which 5 tokens need two
    pages.reserve([(source, 27)])

    assert [sequence.length for sequence in pages.select([source], [0, 0])] == [5, 5]

"""`TokenMap` and the queries of some tokens, and the map that all layers of a step share."""

from __future__ import annotations

import torch

import dsv4attn
from dsv4attn.core.contract import layer_ops
from dsv4attn.core.torch_ops.arguments import TokenMap
from dsv4attn.core.torch_ops.indexer import IndexQuery
from dsv4attn.selection import load_backend
from tests.harness import LayerStack


def test_some_tokens_have_the_same_blocks_and_their_own_rows() -> None:
    table, requests = torch.arange(6).view(2, 3).int(), torch.tensor([0, 0, 1, -1]).int()
    token_map = TokenMap(table, requests, torch.tensor([1, 2, 3, 0]).int()).tokens(slice(1, 3))
    query = IndexQuery(torch.arange(8.0).view(4, 1, 2), torch.arange(4.0).view(4, 1)).tokens(slice(1, 3))

    assert token_map.block_table is table
    assert [token_map.token_to_req.tolist(), token_map.visible_lens.tolist()] == [[0, 1], [2, 3]]
    assert [query.values.flatten().tolist(), query.weights.flatten().tolist()] == [[2, 3, 4, 5], [1, 2]]
    assert query.scales is None


def test_all_layers_of_a_step_share_one_map_of_the_metadata() -> None:
    manager = LayerStack(load_backend("reference")).manager
    metadata = manager.metadata(manager.batch([(manager.new(), 9)]))
    compressed = [part.compressed for part in metadata.values() if part.compressed is not None]

    assert compressed
    for part in compressed:
        token_map = part.token_map
        assert token_map is part.token_map
        assert token_map.block_table is part.block_table
        assert token_map.token_to_req is part.req_id_per_token
        assert token_map.visible_lens is part.compressed_lens


def test_third_parties_import_them_from_the_contract_or_the_package() -> None:
    for name in ("EntryNorm", "StatePages", "TokenMap"):
        assert getattr(layer_ops, name) is getattr(dsv4attn, name)

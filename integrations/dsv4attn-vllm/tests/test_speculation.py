"""MTP and DSpark: several tokens a request, drafts of window-only layers, and metadata that vLLM updates in place."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from dsv4attn_vllm import serving
from dsv4attn_vllm.attention import insert_context_kv
from dsv4attn_vllm.cuda import CUDAAttention
from engine import Engine, config_of, world
from models import V4, V41, draft_engine
from vllm.forward_context import set_forward_context

import dsv4attn as ds
from dsv4attn.core.cache.selected_keys import DenseIndices
from dsv4attn.core.torch_ops.request_rows import check_request_rows


@pytest.fixture
def mtp(backend: str) -> Iterator[Engine]:
    config = config_of(speculative_config={"method": "mtp", "num_speculative_tokens": 2})
    with world(config):
        yield Engine(config, CUDAAttention)


DRAFTS = [(V4, "reference"), (V4, "triton"), (V41, "reference")]


@pytest.fixture(params=DRAFTS, ids=lambda pair: " ".join(map(str, pair)))
def dspark(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with draft_engine(*request.param) as layers:
        yield layers


def test_verification_of_drafts_is_what_own_builder_and_oracle_say(mtp: Engine) -> None:
    mtp.check_step([(150, 3), (126, 2), (40, 1), (0, 30)], [0, 2, 4, 5])


def test_rows_of_one_request_share_keys_as_vllm_lists_them(mtp: Engine) -> None:
    work = [(mtp.request(tokens), count) for tokens, count in [(150, 3), (126, 3), (40, 1)]]
    metadata, checked = mtp.describe(work), set()
    for layer in mtp.layers:
        swa, cache = metadata[layer.swa_cache_layer.prefix].dsv4attn, layer._geometry
        rows = swa.decode_requests
        assert (rows.token_to_req.tolist(), rows.max_tokens) == ([0, 0, 0, 1, 1, 1, 2], 3)
        entries = None
        if cache.kind is ds.LayerKind.HCA:
            compressed = metadata[layer.prefix].dsv4attn
            assert compressed.decode_requests.max_tokens == 3
            slots = compressed.c128a_global_decode_topk_indices[:, 0]
            entries = DenseIndices(slots, compressed.c128a_decode_topk_lens)
            assert len(set(entries.lens[3:6].tolist())) == 2, "an entry is completed inside the step"
        check_request_rows(rows, DenseIndices(swa.decode_swa_indices[:, 0], swa.decode_swa_lens), entries)
        checked.add(cache.kind)
    assert {ds.LayerKind.SWA, ds.LayerKind.HCA} <= checked


def test_rows_of_a_prompt_share_keys_as_vllm_lists_them(mtp: Engine) -> None:
    metadata = mtp.describe([(mtp.request(tokens), count) for tokens, count in [(150, 3), (126, 9), (0, 30)]])
    swa = next(m.dsv4attn for m in metadata.values() if hasattr(m.dsv4attn, "prefill_requests"))
    rows = swa.prefill_requests

    assert (rows.token_to_req.tolist(), rows.max_tokens, rows.requests) == ([1] * 9 + [2] * 30, 30, 2)
    check_request_rows(rows, DenseIndices(swa.prefill_swa_indices[:, 0], swa.prefill_swa_lens))


def test_rejected_drafts_leave_nothing_behind(mtp: Engine) -> None:
    request, other = mtp.request(150), mtp.request(60)
    mtp.step([(request, 3), (other, 3)])
    request.tokens, other.tokens = 151, 61  # of three tokens, the first is accepted

    outs = mtp.step([(request, 3), (other, 1)])

    mtp.check_rows(outs, [(151, 3), (61, 1)], [0, 1, 2, 3])


def test_decode_steps_may_be_captured_and_their_requests_may_differ(mtp: Engine) -> None:
    for group in [group for groups in mtp.groups for group in groups if "swa" in group.layer_names[0]]:
        builder, spec = group.get_metadata_builder(), group.kv_cache_spec
        assert builder.get_cudagraph_support(mtp.config, spec).name == "UNIFORM_BATCH"
        assert builder.get_varlen_cudagraph_max_query_len(mtp.config, spec) == 3


def test_a_draft_layer_is_window_only_and_shares_the_backend(mtp: Engine) -> None:
    draft = replace(mtp.config, model_config=mtp.config.speculative_config.draft_model_config)

    layer = CUDAAttention(draft, prefix="model.layers.3.mtp_block.attn", topk_indices_buffer=mtp.topk)

    assert layer._geometry.kind is ds.LayerKind.SWA
    assert layer._serving is mtp.layers[0]._serving


def test_metadata_updated_in_place_are_seen_without_another_build(mtp: Engine) -> None:
    """What vLLM's speculator does between the steps of a draft, inside a captured graph."""
    layer, requests = mtp.layers[0], [(150, 1), (70, 1)]
    work = [(mtp.request(tokens), count) for tokens, count in requests]
    metadata = mtp.describe(work)
    swa = metadata[layer.swa_cache_layer.prefix]
    with set_forward_context(metadata, mtp.config, num_tokens=2):
        mtp.run(layer, metadata, work, 2)

        for request, _ in work:
            request.tokens += 1
        swa.seq_lens += 1
        mtp.positions[:2] += 1
        for i, (request, _) in enumerate(work):
            at = request.tokens
            swa.slot_mapping[i] = swa.block_table[i, at // 64].long() * 64 + at % 64
        group = next(
            group for groups in mtp.groups for group in groups if layer.swa_cache_layer.prefix in group.layer_names
        )
        assert group.supports_draft_decode_metadata_update
        group.update_draft_decode_metadata(metadata)
        out = mtp.run(layer, metadata, work, 2)

    check_rows_of(mtp, layer, out, [(0, 151), (1, 71)])


def check_rows_of(engine: Engine, layer: Any, out: torch.Tensor, rows: list[tuple[int, int]]) -> None:
    """Hold every row of one layer, (request, position), against the oracle."""
    for row, (index, position) in enumerate(rows):
        expected = torch.from_numpy(engine.of_oracle(layer, index, position, row))
        assert torch.allclose(out[row].double(), expected, rtol=0, atol=0.012 * expected.abs().max().item()), row


def test_tokens_of_a_draft_block_see_each_other_and_the_window_before(dspark: Engine) -> None:
    requests, [layer] = [(150, 5), (40, 5)], dspark.layers
    work = [(dspark.request(tokens), count) for tokens, count in requests]

    [out] = dspark.step(work, causal=False)

    assert layer._geometry.kind is ds.LayerKind.SWA
    for i, (tokens, count) in enumerate(requests):
        block, window_keys = range(tokens, tokens + count), range(max(tokens - 128, 0), tokens + count)
        for j in range(count):
            error = dspark.error(layer, out, i, tokens + j, i * 5 + j, block=block, window_keys=window_keys)
            assert error < 0.012, (i, j)


def test_limits_hold_the_columns_of_a_draft_block(dspark: Engine) -> None:
    [layer] = dspark.layers
    limits, described = layer._serving.limits, dspark.describe([(dspark.request(9), 5)], causal=False)

    rows = described[layer.swa_cache_layer.prefix].decode_swa_indices
    assert limits.decode_window_columns == rows.shape[-1] > 128
    assert layer._serving is serving.serving_of(dspark.config, v41=layer.is_v41)


def test_context_keys_of_a_draft_are_those_that_a_step_inserts(dspark: Engine) -> None:
    [layer], request = dspark.layers, dspark.request(20)
    dspark.describe([(request, 20)])
    request.tokens = 0
    dspark.step([(request, 20)], attend=False)
    cache, page_size = layer.swa_cache_layer.kv_cache, dspark.WINDOW_PAGE
    slots, inserted = dspark.slots[dspark.group_of(layer.swa_cache_layer.prefix), :20].clone(), cache.clone()
    request.tokens = 0
    _, kv, _ = dspark.inputs(layer, [(request, 20)], 20)
    cache.fill_(0xFF)

    insert_context_kv(layer, kv, torch.arange(20), slots)

    for slot in slots.tolist():
        page, row = divmod(slot, page_size)
        written, inserted_page = (pages[page].as_strided((page_size * 584,), (1,)) for pages in (cache, inserted))
        data, first_scale = slice(row * 576, row * 576 + 576), page_size * 576 + row * 8
        scales = slice(first_scale, first_scale + 7)
        assert torch.equal(written[data], inserted_page[data])
        assert torch.equal(written[scales], inserted_page[scales])

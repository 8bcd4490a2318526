"""MTP and DSpark: several tokens a request, drafts of window-only layers, and metadata that vLLM updates in place."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from dsv4attn_vllm.attention import insert_context_kv
from dsv4attn_vllm.cuda import CUDAAttention
from engine import Engine, config_of, world
from vllm.forward_context import set_forward_context

import dsv4attn as ds


@pytest.fixture
def mtp(backend: str) -> Iterator[Engine]:
    config = config_of(speculative_config={"method": "mtp", "num_speculative_tokens": 2})
    with world(config):
        yield Engine(config, CUDAAttention)


@pytest.fixture
def dspark(backend: str) -> Iterator[Engine]:
    config = config_of(speculative_config={"method": "dspark", "num_speculative_tokens": 5})
    with world(config):
        # a draft of window-only layers, built with the draft's configuration as vLLM's loader does
        draft = replace(config, model_config=config.speculative_config.draft_model_config)
        yield Engine(config, lambda _, **options: CUDAAttention(draft, **options), layers=1)


def test_verification_of_drafts_is_what_own_builder_and_oracle_say(mtp: Engine) -> None:
    before = [(150, 3), (126, 2), (40, 1), (0, 30)]
    work = [(mtp.request(tokens), count) for tokens, count in before]

    outs = mtp.step(work)

    for layer, out in zip(mtp.layers, outs, strict=True):
        assert torch.equal(mtp.of_own_builder(layer, before, len(out)), out), layer.prefix
    mtp.check_rows(outs, before, [0, 2, 4, 5])


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
    layer, before = mtp.layers[0], [(150, 1), (70, 1)]
    work = [(mtp.request(tokens), count) for tokens, count in before]
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
        wanted = torch.from_numpy(engine.of_oracle(layer, index, position, row))
        assert torch.allclose(out[row].double(), wanted, rtol=0, atol=0.012 * wanted.abs().max().item()), row


def test_tokens_of_a_draft_block_see_each_other_and_the_window_before(dspark: Engine) -> None:
    before = [(150, 5), (40, 5)]
    work = [(dspark.request(tokens), count) for tokens, count in before]

    [out] = dspark.step(work, causal=False)

    [layer] = dspark.layers
    for i, (tokens, count) in enumerate(before):
        for j in range(count):
            seen = range(max(tokens - 128, 0), tokens + count)
            wanted = torch.from_numpy(dspark.of_oracle(layer, i, tokens + j, i * 5 + j, window_keys=seen))
            found = out[i * 5 + j].double()
            assert torch.allclose(found, wanted, rtol=0, atol=0.012 * wanted.abs().max().item()), (i, j)


def test_limits_hold_the_columns_of_a_draft_block(dspark: Engine) -> None:
    limits = dspark.layers[0]._serving.limits

    assert (
        limits.decode_window_columns
        == dspark.describe([(dspark.request(9), 5)], causal=False)[
            "model.layers.0.attn.swa_cache"
        ].decode_swa_indices.shape[-1]
    )
    assert limits.decode_window_columns > 128


def test_context_keys_of_a_draft_are_those_that_a_step_inserts(dspark: Engine) -> None:
    [layer], request = dspark.layers, dspark.request(20)
    dspark.describe([(request, 20)])
    request.tokens = 0
    dspark.step([(request, 20)], attend=False)
    cache, swa = layer.swa_cache_layer.kv_cache, layer.swa_cache_layer.prefix
    slots = dspark.slots[dspark.group_of(swa)]
    wanted = cache.clone()
    request.tokens = 0
    _, kv, _ = dspark.inputs(layer, [(request, 20)], 20)
    cache.fill_(0xFF)

    insert_context_kv(layer, kv, torch.arange(20), slots[:20])

    for slot in slots[:20].tolist():
        page, at = divmod(slot, 64)
        flat, expected = (t[page].as_strided((64 * 584,), (1,)) for t in (cache, wanted))
        data, scales = slice(at * 576, at * 576 + 576), slice(64 * 576 + at * 8, 64 * 576 + at * 8 + 7)
        assert torch.equal(flat[data], expected[data])
        assert torch.equal(flat[scales], expected[scales])

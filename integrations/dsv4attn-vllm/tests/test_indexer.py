"""The indexer on dsv4attn: against vLLM's own kernel of queries, its own builder, and scores in float64."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve
from dsv4attn_vllm.cuda import CUDAAttention
from dsv4attn_vllm.guard import RefusedError
from dsv4attn_vllm.index_metadata import IndexMetadata, IndexMetadataBuilder
from dsv4attn_vllm.indexer import Selector
from torch import Tensor
from vllm.forward_context import set_forward_context
from vllm.models.deepseek_v4.common.ops.fused_indexer_q import _FUSED_INDEXER_Q_ROPE_QUANT_TRITON_KERNEL
from vllm.v1.attention.backends.mla.indexer import DeepseekV32IndexerMetadataBuilder
from vllm.v1.attention.ops.rocm_aiter_mla_sparse import fp8_paged_mqa_logits_torch
from whole import WholeEngine, whole_engine, with_op

from dsv4attn import TokenMap

PREFIX = "model.layers.0.attn"
KEYS = f"{PREFIX}.indexer.k_cache"


@pytest.fixture
def engine(backend: str) -> Iterator[WholeEngine]:
    with whole_engine(CUDAAttention, kinds=("c4a",)) as engine:
        yield engine


@pytest.fixture
def mtp(backend: str) -> Iterator[WholeEngine]:
    speculation = {"method": "mtp", "num_speculative_tokens": 2}
    with whole_engine(CUDAAttention, kinds=("c4a",), speculative_config=speculation) as engine:
        yield engine


class Seen:
    """What a selection was given: values [T, Hi, 128] and weights [T, Hi], and the selected rows [T, K]."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps: list[tuple[Tensor, Tensor, Tensor]] = []
        forward = Selector.forward

        def wrapped(op: Selector, hidden: Tensor, q: Any, k: Tensor | None, weights: Tensor) -> Tensor:
            out = forward(op, hidden, q, k, weights)
            self.steps.append((q.clone(), weights.clone(), out.clone()))
            return out

        monkeypatch.setattr(Selector, "forward", wrapped)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    return Seen(monkeypatch)


def index_table(engine: WholeEngine) -> Tensor:
    """The pages of the index keys of each request in the last step, [R, B]."""
    names = [group.layer_names for group in engine.caches.kv_cache_groups]
    return engine.tables[next(i for i, name in enumerate(names) if KEYS in name)]


def index_key(engine: WholeEngine, request: int, entry: int) -> np.ndarray:
    """An index key in float64, from the bytes of its page: 64 times 128 codes, then 64 scales."""
    page = int(index_table(engine)[request, entry // 64])
    page = engine.layers[0].indexer.k_cache.kv_cache[page].as_strided((64 * 132,), (1,))
    codes = page[(entry % 64) * 128 :][:128].view(torch.float8_e4m3fn).double().numpy()
    scale = page[64 * 128 + 4 * (entry % 64) :][:4].numpy().view(np.float32)[0]
    return codes * np.float64(scale)


def check_selection(engine: WholeEngine, seen: Seen, requests: Sequence[tuple[int, int]]) -> None:
    """Hold the last selection against scores in float64. before: tokens in the caches before the step, and new ones."""
    [*_, (q, weights, out)], row, chosen_of_many = seen.steps, 0, 0
    for request, (tokens, count) in enumerate(requests):
        keys = [index_key(engine, request, entry) for entry in range((tokens + count) // 4)]
        for position in range(tokens, tokens + count):
            visible, picked = (position + 1) // 4, [entry for entry in out[row].tolist() if entry >= 0]
            assert out[row].tolist() == sorted(picked) + [-1] * (out.shape[1] - len(picked)), row
            assert len(set(picked)) == len(picked) == min(visible, out.shape[1]), row
            if visible:
                products = np.maximum(q[row].double().numpy() @ np.array(keys[:visible]).T, 0)
                scores = weights[row].double().numpy() @ products
                left = np.delete(scores, picked)
                tolerance = 1e-5 * np.abs(weights[row].double().numpy()) @ products.max(1)
                assert not len(left) or scores[picked].min() >= left.max() - tolerance, (row, picked)
                chosen_of_many += bool(len(left))
            row += 1
    assert chosen_of_many, "no token of this test had more entries than it selects"


def check_against_vllms_scores(engine: WholeEngine, seen: Seen, contexts_and_counts: Sequence[tuple[int, int]]) -> None:
    """Hold the last selection against the largest scores of vLLM's `fp8_paged_mqa_logits_torch`. before: as above.

    Faked: vLLM calls this function on ROCm without AITER; on CUDA it calls DeepGEMM, which a CPU lacks. The pages are
    copied, because they are strided here and the function takes contiguous ones. Each token is a request of one token,
    tokens of a prompt too, for which vLLM gathers keys and calls another function. Pages, visible entries and the best
    of the scores are computed here, not by vLLM.
    """
    [*_, (q, weights, out)] = seen.steps
    requests = torch.tensor([request for request, (_, count) in enumerate(contexts_and_counts) for _ in range(count)])
    positions = torch.cat([torch.arange(tokens, tokens + count) for tokens, count in contexts_and_counts])
    visible, table, rows = (positions + 1) // 4, index_table(engine)[requests], len(positions)
    pages = engine.layers[0].indexer.k_cache.kv_cache.contiguous()
    assert pages.shape[1:] == (64, 132)

    scores = fp8_paged_mqa_logits_torch(q[:rows, None], pages, weights[:rows], visible, table, 256)

    chosen_of_many = 0
    for row, seen_entries in enumerate(visible.tolist()):
        picked, count = {entry for entry in out[row].tolist() if entry >= 0}, min(seen_entries, out.shape[1])
        best = scores[row].topk(count)
        assert len(picked) == count, row
        if count:
            exchanged = scores[row][[*picked.symmetric_difference(best.indices.tolist())]]
            # products are added in another order
            tolerance = 1e-6 * scores[row, :seen_entries].abs().max()
            assert ((exchanged - best.values[-1]).abs() <= tolerance).all(), row
            chosen_of_many += seen_entries > count
    assert chosen_of_many, "no token of this test had more entries than it selects"


CASES = {
    "decode": ([(70, 1), (39, 1)], {}),
    "prefill": ([(0, 50)], {}),
    "chunk": ([(41, 30)], {}),
    "mixed": ([(70, 1), (39, 1), (33, 20), (0, 9)], {"extra_rows": 3}),
    "padding": ([(70, 1), (45, 1)], {"pad": 2}),
    "edges": ([(0, 1), (3, 1), (2, 1), (35, 1)], {}),  # no entry, the first entry, still none, a ninth
}


@pytest.mark.parametrize("case", CASES)
def test_selected_are_the_entries_of_the_largest_scores(engine: WholeEngine, seen: Seen, case: str) -> None:
    requests, options = CASES[case]
    work = [(engine.request(tokens), count) for tokens, count in requests]

    engine.step(work, **options)

    check_selection(engine, seen, requests)
    tokens = sum(count for _, count in requests)
    assert (engine.topk[tokens : tokens + options.get("pad", 0)] == -1).all()


@pytest.mark.parametrize(
    "contexts_and_counts",
    [[(70, 3), (41, 3)], [(70, 3), (41, 2), (37, 1), (0, 30)]],
    ids=["uniform", "different lengths"],
)
def test_drafts_that_are_verified_select_for_each_token(
    mtp: WholeEngine, seen: Seen, contexts_and_counts: list[tuple[int, int]]
) -> None:
    work = [(mtp.request(tokens), count) for tokens, count in contexts_and_counts]

    mtp.step(work)

    check_selection(mtp, seen, contexts_and_counts)


@pytest.mark.parametrize(
    "contexts_and_counts",
    [[(70, 1), (39, 1), (600, 1)], [(0, 50), (280, 30)], [(290, 1), (33, 20), (0, 40)]],
    ids=["decode", "prefill", "mixed"],
)
def test_selected_are_the_entries_of_vllms_largest_scores(
    engine: WholeEngine, seen: Seen, contexts_and_counts: list[tuple[int, int]]
) -> None:
    """Up to equal scores. Some requests have entries on several pages."""
    work = [(engine.request(tokens), count) for tokens, count in contexts_and_counts]

    engine.step(work)

    check_against_vllms_scores(engine, seen, contexts_and_counts)


def test_planted_bugs_of_scores_are_found(engine: WholeEngine, seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    """A query of the token before, and a selection that sees one entry less."""
    ops, requests = engine.layers[0]._serving.backend.layer_ops, [(70, 1), (60, 1)]
    work = [(engine.request(tokens), count) for tokens, count in requests]
    select = ops.select_topk

    def mixed_up(query: Any, *rest: Any) -> None:
        select(dataclass_like(query, query.values.flip(0)), *rest)

    def dataclass_like(query: Any, values: Tensor) -> Any:
        return type(query)(values.contiguous(), query.weights, query.scales)

    def one_less(query: Any, cache: Any, token_map: TokenMap, *rest: Any) -> None:
        select(query, cache, evolve(token_map, visible_lens=token_map.visible_lens - 10), *rest)

    for bug in (mixed_up, one_less):
        with_op(monkeypatch, engine, select_topk=bug)
        engine.step(work)
        for request, _ in work:
            request.tokens -= 1
        for check in (check_selection, check_against_vllms_scores):
            with pytest.raises(AssertionError):
                check(engine, seen, requests)
    with_op(monkeypatch, engine, select_topk=select)
    engine.step(work)
    check_selection(engine, seen, requests)
    check_against_vllms_scores(engine, seen, requests)


def test_chunks_of_a_prompt_select_what_the_prompt_in_one_step_does(engine: WholeEngine, seen: Seen) -> None:
    """Hidden states depend on name and position, so both requests have the same."""
    whole, parts = engine.request(), engine.request()
    parts.name = whole.name
    engine.step([(whole, 60)])
    together, rows = seen.steps[-1][2][:60], []
    for count in (45, 1, 14):
        engine.step([(parts, count)])
        rows.append(engine.topk[:count].clone())

    assert torch.equal(together, torch.cat(rows))


def test_queries_are_vllms_byte_for_byte(engine: WholeEngine) -> None:
    """VLLM's Triton kernel, interpreted. Weights are products of the same factors in another order."""
    indexer, rotary = engine.layers[0].indexer, engine.layers[0].rotary_emb
    positions = torch.tensor([0, 3, 77, 900, 12])
    for scale in (1.0, 1e-6, 300.0):
        q = (torch.randn(5, 16, 128, dtype=torch.float32) * scale).bfloat16()
        weights = torch.randn(5, 16).bfloat16()

        codes, folded = indexer._q_rope_quant(positions, q, rotary, weights)

        arguments = rotary.cos_sin_cache, weights, indexer.softmax_scale, indexer.n_head**-0.5
        theirs, theirs_folded = torch.empty_like(codes), torch.empty_like(folded)
        _FUSED_INDEXER_Q_ROPE_QUANT_TRITON_KERNEL(
            positions, q, *arguments, theirs, theirs_folded, fp8_max=448.0, use_fnuz=False
        )
        assert codes.dtype == theirs.dtype == torch.float8_e4m3fn
        assert torch.equal(codes.view(torch.uint8), theirs.view(torch.uint8))
        assert torch.allclose(folded, theirs_folded, rtol=3e-7, atol=0)


def test_short_contexts_select_everything_and_store_keys(engine: WholeEngine, seen: Seen) -> None:
    requests = [(31, 1), (0, 20), (2, 1)]
    work = [(engine.request(tokens), count) for tokens, count in requests]
    work = [work[0], work[2], work[1]]
    assert not seen.steps  # no request was longer than 35 tokens

    engine.step(work, pad=2)

    positions = [31, 2, *range(20)]
    for row, position in enumerate(positions):
        visible = (position + 1) // 4
        assert engine.topk[row].tolist() == [*range(visible)] + [-1] * (8 - visible)
    assert (engine.topk[len(positions) : len(positions) + 2] == -1).all()
    assert not seen.steps
    assert np.abs(index_key(engine, 2, 4)).max() > 0


def test_a_graph_is_captured_with_the_longest_context_and_without_the_short_way(
    engine: WholeEngine, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Faked: the capture, of which there is none on a CPU."""
    from dsv4attn_vllm import indexer

    widths: list[object] = []
    monkeypatch.setattr(indexer, "is_capturing", lambda _: True)
    with_op(monkeypatch, engine, select_topk=lambda *all_of_them: widths.append(all_of_them[-1]))

    engine.step([(engine.request(), 1)])

    assert widths == [1024 // 4]


def test_metadata_are_those_of_vllms_builder(mtp: WholeEngine) -> None:
    """Slots of entries, and the entries that each token sees, in decodes and in chunks of prefills."""
    requests = [(70, 3), (41, 2), (37, 1), (50, 30), (0, 9)]
    work = [(mtp.request(tokens), count) for tokens, count in requests[:4]]
    ours, common, group = described(mtp, work)
    width = mtp.tables[0].shape[1]
    theirs_builder = DeepseekV32IndexerMetadataBuilder(
        group.kv_cache_spec, [KEYS], mtp.config, torch.device("cpu"), block_table_width=width
    )

    theirs = theirs_builder.build(0, common)

    assert torch.equal(ours.slot_mapping, theirs.slot_mapping)
    decode, [chunk] = theirs.decode, theirs.prefill.chunks
    assert decode.decode_lens.shape[0] == theirs.num_decode_tokens == 6  # a row for each token
    assert torch.equal(ours.visible_lens[:6], decode.seq_lens.view(-1))
    assert torch.equal(
        ours.block_table[ours.token_to_req[:6].long()], decode.block_table[:, : ours.block_table.shape[1]]
    )
    assert torch.equal(ours.visible_lens[6:], chunk.cu_seqlen_ke - chunk.cu_seqlen_ks)
    assert ours.token_to_req.tolist() == [0, 0, 0, 1, 1, 2, *[3] * 30]
    counts = "num_decodes", "num_prefills", "num_decode_tokens", "num_prefill_tokens"
    assert [getattr(ours, name) for name in counts] == [getattr(theirs, name) for name in counts]


def described(engine: WholeEngine, work: Sequence[Any]) -> tuple[IndexMetadata, Any, Any]:
    """The metadata of the index keys, what they were made from, and their group."""
    common_metadata, build = [], IndexMetadataBuilder.build

    def wrapped(builder: Any, prefix: int, common: Any, *rest: Any, **options: Any) -> Any:
        common_metadata.append(common)
        return build(builder, prefix, common, *rest, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(IndexMetadataBuilder, "build", wrapped)
        metadata = engine.describe(work)
    group = next(group for groups in engine.groups for group in groups if KEYS in group.layer_names)
    return metadata[KEYS], common_metadata[0], group


def test_metadata_that_a_draft_updates_in_place_are_those_of_a_new_build(engine: WholeEngine) -> None:
    requests = [(70, 1), (42, 1)]
    work = [(engine.request(tokens), count) for tokens, count in requests]
    updated, _, group = described(engine, work)
    lens, slots = updated.visible_lens.tolist(), updated.slot_mapping.tolist()
    updated.seq_lens += 1
    group.get_metadata_builder(0).update_draft_decode_metadata(updated)
    tensors = [tensor.clone() for tensor in (updated.visible_lens, updated.slot_mapping, updated.token_to_req)]
    for request, _ in work:
        request.tokens += 1

    built, _, _ = described(engine, work)

    assert all(map(torch.equal, tensors, (built.visible_lens, built.slot_mapping, built.token_to_req)))
    assert lens != built.visible_lens.tolist()
    assert slots != built.slot_mapping.tolist()


def test_a_step_without_tokens_has_metadata_and_selects_nothing(engine: WholeEngine) -> None:
    metadata, common, group = described(engine, [(engine.request(), 4)])
    nothing = dataclasses.replace(common, num_actual_tokens=0, num_reqs=0, slot_mapping=common.slot_mapping[:0])

    metadata = group.get_metadata_builder(0).build(0, nothing)

    sizes = metadata.num_decode_tokens, metadata.num_prefill_tokens, *metadata.visible_lens.shape
    assert (*sizes, *metadata.slot_mapping.shape) == (0, 0, 0, 0)
    layer, empty = engine.layers[0], torch.empty(0, engine.layers[0].hidden_size, dtype=torch.bfloat16)
    metadata.max_seq_len = 1000
    engine.topk.fill_(5)
    with set_forward_context({KEYS: metadata}, engine.config, num_tokens=0):
        q, weights = torch.empty(0, 16, 128, dtype=torch.float8_e4m3fn), torch.empty(0, 16, dtype=torch.float32)
        layer.indexer.indexer_op(empty, q, None, weights)
    assert (engine.topk == 5).all()


def test_positions_that_the_runner_does_not_pass_are_refused(engine: WholeEngine) -> None:
    _, common, group = described(engine, [(engine.request(), 4)])

    with pytest.raises(RefusedError, match=r"CommonAttentionMetadata.positions: expected a tensor, got None"):
        group.get_metadata_builder(0).build(0, dataclasses.replace(common, positions=None))


def test_without_metadata_the_buffer_stays(engine: WholeEngine) -> None:
    layer = engine.layers[0]
    engine.topk.fill_(5)
    with set_forward_context(None, engine.config, num_tokens=3):
        layer(torch.zeros(3, dtype=torch.int64), torch.randn(3, layer.hidden_size).bfloat16())

    assert (engine.topk == 5).all()

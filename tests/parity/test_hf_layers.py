"""Whole layers against transformers' DeepSeek-V4 in fp32: attention modules, hyper-connections, decoder layers.

Each of our layers gets the hidden states that transformers' layer got. Errors are relative to the largest output of a
layer. Measured: 2e-7 to 6e-7 for attention, the same as transformers against itself in chunks (6e-7).
"""

from __future__ import annotations

import functools
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from dsv4attn.core.cache.layout import KVCacheLayout
from dsv4attn.core.contract.layer_ops import TokenMap
from dsv4attn.core.layer.decoder_layer import DeepseekV4DecoderLayer
from dsv4attn.core.layer.hyper_connections import HyperConnections
from dsv4attn.core.model.weights import HyperConnectionWeights
from dsv4attn.selection import load_backend
from tests.layer_ops import TorchOps
from tests.parity import hf
from tests.parity.hf import deviation
from tests.parity.layers import Stack

pytest.importorskip("transformers.models.deepseek_v4", reason="needs transformers >= 5.23, which needs Python >= 3.11")

TOLERANCE = 1e-5
SEEDS = 0, 1, 2
CUTS = {"single": [71], "chunks": [5, 18, 1, 17, 2, 28], "token": [1] * 71}
NOPE, ROPE = hf.HEAD_DIM - hf.ROPE_DIM, hf.ROPE_DIM
FP32 = KVCacheLayout.rows(NOPE, ROPE, dtype=torch.float32)


@functools.cache
def traces(seed: int) -> list[hf.Trace]:
    return hf.run(hf.model(seed), hf.prompt(seed))


def outputs(stack: Stack, seen: list[hf.Trace], cuts: list[int]) -> list[Tensor]:
    sequence, done, parts = stack.manager.new(), 0, []
    for count in cuts:
        parts.append(stack.step([(sequence, count)], [x.hidden[done : done + count] for x in seen]))
        done += count
    return [torch.cat(outs) for outs in zip(*parts, strict=True)]


@pytest.mark.in_turn
@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize("seed", SEEDS)
def test_g23_a_layer_from_hidden_states_equals_the_published_model(seed: int, cuts: list[int]) -> None:
    stack = Stack(hf.model(seed), load_backend("reference"), FP32)

    errors = [
        deviation(got, seen.output) for got, seen in zip(outputs(stack, traces(seed), cuts), traces(seed), strict=True)
    ]

    print(errors)
    assert max(errors) <= TOLERANCE


def test_a_comparison_in_which_ties_decide_is_refused() -> None:
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Model

    # with one index head half of the scores are exactly 0
    one_head = hf.seeded(lambda: DeepseekV4Model(hf.config(index_n_heads=1)), 0)
    with pytest.raises(AssertionError, match="selections are decided by ties: compare with more index heads"):
        hf.run(one_head, hf.prompt(0))


def test_g15_several_sequences_and_tokens_of_a_step_equal_it() -> None:
    stack, seen = Stack(hf.model(0), load_backend("reference"), FP32), traces(0)
    first, second = stack.manager.new(), stack.manager.new()
    stack.step([(first, 40)], [x.hidden[:40] for x in seen])

    out = stack.step([(first, 3), (second, 29)], [torch.cat([x.hidden[40:43], x.hidden[:29]]) for x in seen])

    for got, trace in zip(out, seen, strict=True):
        assert deviation(got, torch.cat([trace.output[40:43], trace.output[:29]])) <= TOLERANCE


class NoOverlap(TorchOps):
    def compress_norm_rope_store(self, *args: Any, **options: Any) -> None:
        row = args[0].cache.region("row")
        saved_row, width = row.clone(), row.shape[-1] // 2
        if options["overlap"]:  # the first channels of the scores are those of the window before
            row[..., width : width + width // 2] = -torch.inf
        super().compress_norm_rope_store(*args, **options)
        row.copy_(saved_row)


class LateRope(TorchOps):
    def compress_norm_rope_store(self, *args: Any, **options: Any) -> None:
        norm = attrs.evolve(args[4], cos_sin_cache=args[4].cos_sin_cache.roll(-1, 0))
        super().compress_norm_rope_store(*args[:4], norm, *args[5:], **options)


class FirstEntries(TorchOps):
    @staticmethod
    def select_topk(_: Any, keys: Any, token_map: TokenMap, out: torch.Tensor, max_entries: int) -> None:  # noqa: ARG004
        numbers = torch.arange(out.shape[1], dtype=torch.int32)
        out.copy_(torch.where(numbers < token_map.visible_lens[:, None], numbers, -1))


@pytest.mark.mutation
@pytest.mark.parametrize(("steps", "layers"), [(NoOverlap, (1,)), (LateRope, (1, 2)), (FirstEntries, (1,))])
def test_a_planted_bug_is_seen(steps: type[TorchOps], layers: tuple[int, ...]) -> None:
    backend = load_backend("reference")
    vars(backend)["layer_ops"] = steps().table()
    stack = Stack(hf.model(0), backend, FP32)

    outs = outputs(stack, traces(0), [71])

    for i in layers:
        assert deviation(outs[i], traces(0)[i].output) > 1e-3


def connections(module: Any, stack: Stack, norm: Any) -> HyperConnections:
    weights = HyperConnectionWeights(module.fn.detach(), module.base.detach(), module.scale.detach())
    return HyperConnections(stack.geometry, weights, load_backend("reference").layer_ops, norm.weight)


@pytest.mark.parametrize("seed", SEEDS)
def test_hyper_connections_equal_transformers(seed: int) -> None:
    model = hf.model(seed)
    stack, streams = Stack(model, load_backend("reference"), FP32), torch.randn(1, 23, 4, 64)
    with torch.no_grad():
        for layer in model.layers:
            attention, mlp_connection = layer.attn_hc, layer.ffn_hc
            post, comb, hidden = attention(streams)
            ours = connections(attention, stack, layer.input_layernorm)
            got_post, got_comb, got = ours.pre(streams[0])
            assert deviation(got_post[..., 0], post[0]) < 1e-6
            assert deviation(got_comb, comb[0]) < 1e-6
            assert deviation(got, layer.input_layernorm(hidden)[0]) < 1e-6

            block_output = torch.randn(1, 23, 64)
            mixed = post[..., None] * block_output[..., None, :] + comb.transpose(-1, -2) @ streams
            theirs = (mixed, *mlp_connection(mixed))
            second = connections(mlp_connection, stack, layer.post_attention_layernorm)
            ours_after = second.after(block_output[0], streams[0], got_post, got_comb)
            assert deviation(ours_after[0], theirs[0][0]) < 1e-6
            assert deviation(ours_after[3], layer.post_attention_layernorm(theirs[3])[0]) < 2e-6
        head, steps = model.hc_head, load_backend("reference").layer_ops
        got = steps.hc_head(streams[0], head.hc_fn, head.hc_scale, head.hc_base, stack.geometry.eps, head.eps)
        assert deviation(got, head(streams)[0]) < 1e-6


@pytest.mark.parametrize("cuts", [[71], [40, 1, 30]], ids=["single", "chunks"])
def test_decoder_layers_with_the_model_s_own_experts_equal_it(cuts: list[int]) -> None:
    from dsv4attn.core.metadata.forward_context import set_forward_context

    model, ids = hf.model(1), hf.prompt(1)
    stack, now = Stack(model, load_backend("reference"), FP32), dict[str, Tensor]()
    layers = []
    for layer, attention in zip(model.layers, stack.layers, strict=True):

        def experts(x: Tensor, mlp: Any = layer.mlp) -> Tensor:
            result: Tensor = mlp(x[None], input_ids=now["ids"][None])[0]
            return result

        around = connections(layer.attn_hc, stack, layer.input_layernorm)
        after = connections(layer.ffn_hc, stack, layer.post_attention_layernorm)
        layers.append(DeepseekV4DecoderLayer(attention, experts, around, after))
    sequence, done, parts = stack.manager.new(), 0, []
    with torch.no_grad():
        for count in cuts:
            now["ids"], request = ids[done : done + count], [(sequence, count)]
            streams = model.embed_tokens(now["ids"])[:, None].expand(-1, 4, -1).contiguous()
            positions = stack.manager.positions(request)
            with set_forward_context(stack.manager.metadata(stack.manager.batch(request))):
                for decoder_layer in layers:
                    streams = decoder_layer(streams, positions)
            parts.append(model.norm(model.hc_head(streams[None]))[0])
            stack.manager.advance(request)
            done += count
        expected = model(input_ids=ids[None], use_cache=False).last_hidden_state[0]

    assert deviation(torch.cat(parts), expected) <= TOLERANCE

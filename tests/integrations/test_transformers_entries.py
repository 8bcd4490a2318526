"""Entries that a patched model selected are replayed with gradients by a model of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4attn.errors import ArgumentError, UnsupportedError
from tests.integrations.paged import call, chunked, generated, ids_of, new_model, patched
from tests.parity import hf

pytest.importorskip("transformers.models.deepseek_v4", reason="needs transformers >= 5.23, which needs Python >= 3.11")
pytestmark = pytest.mark.skipif(torch.accelerator.is_available(), reason="models run on the CPU")


def logprobs(logits: Tensor) -> Tensor:
    return logits.float().log_softmax(-1)


def test_a_trainer_has_the_log_probabilities_of_the_sampler_though_its_indexer_has_changed() -> None:
    from dsv4attn.integrations.transformers import DeepseekV4PagedCache, replay_entries

    model = new_model()
    ids = torch.cat([ids_of(model, 60, number) for number in range(2)])
    with patched(model, index_layout="fp32"), model.dsv4attn.record_entries() as records:
        cache = DeepseekV4PagedCache(model)
        sampled = chunked(model, ids, [23, 1, 36], cache)
        entries = [records.of(sequence) for sequence in cache.sequences]
    assert all(len(rows) == 60 for by_layer in entries for rows in by_layer.values())
    # the trainer's indexer is another by now
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "indexer" in name:
                parameter.add_(torch.randn_like(parameter), alpha=float(parameter.std()))

    model.requires_grad_(True)
    with replay_entries(model, entries):
        trained = model(input_ids=ids).logits
    torch.testing.assert_close(logprobs(trained), logprobs(sampled), rtol=0, atol=2e-5)
    logprobs(trained).gather(-1, ids[..., None]).sum().backward()
    layer: Any = model.model.layers[min(entries[0])].self_attn
    assert float(layer.q_b_proj.weight.grad.abs().max()) > 0
    assert layer.compressor.indexer.q_b_proj.weight.grad is None
    # without them it selects others
    assert (logprobs(call(model, ids).logits) - logprobs(sampled)).abs().max() > 1e-3


def test_what_has_no_entries_is_refused() -> None:
    from dsv4attn.integrations.transformers import DeepseekV4PagedCache, replay_entries

    model = new_model()
    ids = ids_of(model, 20)
    with patched(model):
        with pytest.raises(UnsupportedError, match=r"not patched.*unpatch"), replay_entries(model, []):
            pass
        late = DeepseekV4PagedCache(model)
        call(model, ids, **hf.passing(late))
        with model.dsv4attn.record_entries() as records:
            with pytest.raises(ArgumentError, match="first 20 tokens are recorded"):
                call(model, ids[:, :1], **hf.passing(late))
            cache = DeepseekV4PagedCache(model)
            generated(model, 3, input_ids=ids, **hf.passing(cache))
            (entries,) = [records.of(sequence) for sequence in cache.sequences]
    assert {len(rows) for rows in entries.values()} == {22}
    with pytest.raises(ArgumentError, match=r"entries\[0\]: expected entries of layers .*, got none of layer"):
        replay_entries(model, [{}]).__enter__()
    with replay_entries(model, [entries]):
        call(model, ids)
        with pytest.raises(ArgumentError, match="a mapping for each of 2 rows"):
            call(model, ids.repeat(2, 1))
        with pytest.raises(ArgumentError, match="entries of position 24 for layer"):
            call(model, ids_of(model, 25))
        with pytest.raises(ArgumentError, match=r"position_ids\[0\]: .* no padding before the tokens, got \[0, 0\]"):
            call(model, ids, position_ids=(torch.arange(20) - 3).clamp(min=0)[None])
        for positions in ([*range(12), *range(8)], [*range(-1, 19)]):
            with pytest.raises(ArgumentError, match=r"position_ids\[0\]: expected positions of one sequence"):
                call(model, ids, position_ids=torch.tensor([positions]))
        padded = call(model, ids, position_ids=torch.tensor([[*range(15), *[1] * 5]])).logits
        torch.testing.assert_close(padded[:, :15], call(model, ids).logits[:, :15], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        # what the wheel for vLLM writes for a token that it did not record
        (lambda rows: rows.index_fill(0, torch.tensor([9]), -2), r"\[1\]\[9\]: expected ascending .* got \[-2, "),
        (lambda rows: rows.index_fill(0, torch.tensor([9]), 2), r"\[1\]\[9\]: expected ascending numbers below 2"),
        (lambda rows: rows + 0.5, r"\[1\]: expected \[tokens, 3\] int32, got \[20, 3\] float32"),
        (lambda rows: rows[:, :2], r"\[1\]: expected \[tokens, 3\] int32, got \[20, 2\] int32"),
        (lambda rows: rows.tolist(), r"\[1\]: expected a Tensor, got list"),
    ],
    ids=["unknown", "unseen", "floats", "columns", "list"],
)
def test_entries_that_nobody_recorded_are_refused(changed: Any, message: str) -> None:
    from dsv4attn.integrations.transformers import replay_entries

    model = new_model()
    visible = (torch.arange(20) + 1) // 4
    rows = torch.where(torch.arange(3) < visible[:, None], torch.arange(3), -1).int()
    entries = {i: rows for i, kind in enumerate(model.config.layer_types) if kind == "compressed_sparse_attention"}
    with replay_entries(model, [entries]):
        call(model, ids_of(model, 20))
    with pytest.raises(ArgumentError, match=rf"entries\[0\]{message}"):
        replay_entries(model, [{**entries, 1: changed(rows)}]).__enter__()

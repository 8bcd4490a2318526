"""What users of a patched model get wrong at first, and the cure that each error names."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dsv4attn.core.cache.layout import KVCacheLayout
from dsv4attn.errors import ArgumentError
from tests.integrations.paged import call, causal_model, filled, generated, ids_of, left_padded, patched
from tests.parity import hf

pytest.importorskip("transformers.models.deepseek_v4", reason="needs transformers >= 5.23, which needs Python >= 3.11")
pytestmark = pytest.mark.skipif(torch.accelerator.is_available(), reason="models run on the CPU")


@pytest.mark.parametrize("number", [-3, -1, 0, 1, 3])
def test_crop_means_what_it_means_in_transformers(number: int) -> None:
    from transformers import DynamicCache

    model = causal_model()
    dynamic_cache = DynamicCache(config=model.config)
    call(model, ids_of(model, 7), **hf.passing(dynamic_cache))
    with patched(model):
        cache = filled(model, ids_of(model, 7))
        if number > 0:
            with pytest.raises(ValueError, match="positive value") as said:
                dynamic_cache.crop(number)
            with pytest.raises(ArgumentError) as refused:
                cache.crop(number)
            assert str(refused.value).endswith(str(said.value))
        else:
            dynamic_cache.crop(number)
            cache.crop(number)
        assert cache.get_seq_length() == dynamic_cache.get_seq_length() == 7 + min(number, 0)


# generate


def ran(*_: Any) -> None:
    raise AssertionError("a refused call was run")


PADDED = {"input_ids": torch.ones(2, 5, dtype=torch.int64), "attention_mask": torch.tensor([[1] * 5, [0] * 5])}
FIVE = {"input_ids": PADDED["input_ids"][:1]}


@pytest.mark.parametrize(
    ("new", "options", "said"),
    [
        (
            61,
            FIVE,
            r"max_len: expected 65 or more, got 64: a prompt of 5 tokens and 61 new ones -> .*max_new_tokens=60",
        ),
        (61, {**FIVE, "use_cache": False}, "max_len: expected 65 or more"),
        (61, {**FIVE, "num_beams": 2}, "max_len: expected 65 or more"),
        (None, {**FIVE, "max_length": 66}, "max_len: expected 65 or more, .* 61 new ones .* with a larger max_len"),
        (62, {**PADDED, "attention_mask": torch.tensor([[0, 1, 1, 1, 1], [0] * 3 + [1] * 2])}, "a prompt of 4 tokens"),
        (1, {"input_ids": torch.ones(1, 65, dtype=torch.int64)}, "65 tokens and 1 new ones -> patch the model again"),
        (3, PADDED, r"attention_mask\[1\]: expected a token, got padding only -> leave this row out"),
        (3, {"input_ids": FIVE["input_ids"][:, :0]}, r"input_ids: expected at least one token, got shape \[1, 0\]"),
    ],
)
def test_a_call_of_generate_that_cannot_end_well_does_not_begin(
    new: int | None, options: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = causal_model()
    monkeypatch.setattr(model.model.embed_tokens, "forward", ran)
    with patched(model, max_len=64) as handle, pytest.raises(ArgumentError, match=said):
        model.generate(**options, do_sample=False, **({} if new is None else {"max_new_tokens": new}))
    assert handle.num_sequences == 0


@pytest.mark.parametrize("options", [{}, {"prefill_chunk_size": 2}, {"num_beams": 2}], ids=str)
def test_a_call_of_generate_that_just_fits_runs(options: dict[str, Any]) -> None:
    model = causal_model()
    batch = left_padded(ids_of(model, 5), ids_of(model, 3))
    with patched(model, max_len=16):
        assert generated(model, 12, **batch, **options).shape == (2, 12)


def test_embeddings_count_as_a_prompt() -> None:
    model = causal_model()
    with torch.no_grad(), patched(model, max_len=16):
        rows = model.model.embed_tokens(ids_of(model, 5))
        with pytest.raises(ArgumentError, match=r"max_len: .*a prompt of 5 tokens and 13 new ones"):
            model.generate(inputs_embeds=rows, max_new_tokens=13)


@pytest.mark.parametrize("length", [0, 12, 20])
def test_a_turn_that_is_shorter_than_the_cache_is_refused(length: int) -> None:
    model = causal_model()
    with patched(model):
        cache = filled(model, ids_of(model, 20))
        said = f"input_ids: .*the cache holds 20 tokens, got a prompt of {length} -> give the whole conversation, crop"
        with pytest.raises(ArgumentError, match=said):
            generated(model, 3, input_ids=ids_of(model, length), **hf.passing(cache))
        assert cache.lengths == [20]
        # the new tokens alone are served with a mask of all
        mask = torch.ones(1, 23, dtype=torch.int64)
        arguments = {"input_ids": ids_of(model, 3), "attention_mask": mask, **hf.passing(cache)}
        assert generated(model, 3, **arguments).shape == (1, 3)
        assert cache.lengths == [25]


def test_later_turns_of_unequal_lengths_are_refused_with_the_cure() -> None:
    model = causal_model()
    with patched(model):
        cache = filled(model, ids_of(model, 8), ids_of(model, 8, 1))
        turn = torch.cat([ids_of(model, 4), ids_of(model, 4, 1)])
        for place in (0, 8):
            mask = torch.ones(2, 12, dtype=torch.int64)
            mask[1, place] = 0
            with pytest.raises(ArgumentError, match=r"attention_mask\[1\].* one cache for each conversation"):
                call(model, turn, attention_mask=mask, **hf.passing(cache))
        assert cache.lengths == [8, 8]


@pytest.mark.parametrize("shape", [(1, 0), (0, 4)])
def test_a_call_without_a_token_is_refused(shape: tuple[int, int]) -> None:
    model = causal_model()
    with patched(model), pytest.raises(ArgumentError, match="input_ids: expected at least one token"):
        call(model, torch.zeros(shape, dtype=torch.int64))


# patch


@pytest.mark.parametrize("name", ["index_fp8", "index_mxfp4", "bf16", "fp32"])
def test_a_layout_of_index_keys_has_a_name(name: str) -> None:
    model = causal_model(large=True)
    with patched(model, index_layout=name) as handle:
        assert not call(model, ids_of(model, 200)).logits.isnan().any()
        (layout,) = {caches.index.layout for caches in handle.pages.manager.caches if caches.index}
    rows = {"bf16": torch.bfloat16, "fp32": torch.float32}
    layouts = {"index_fp8": KVCacheLayout.index_fp8(), "index_mxfp4": KVCacheLayout.index_mxfp4()}
    assert layout == (layouts[name] if name in layouts else KVCacheLayout.rows(64, 64, dtype=rows[name]))

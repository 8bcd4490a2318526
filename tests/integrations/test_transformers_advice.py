"""What users of a patched model get wrong at first, and the cure that each error names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4attn.errors import ArgumentError
from tests.integrations.paged import causal_model, ids_of, patched

pytest.importorskip("transformers.models.deepseek_v4", reason="needs transformers >= 5.23, which needs Python >= 3.11")
pytestmark = pytest.mark.skipif(torch.accelerator.is_available(), reason="models run on the CPU")


def call(model: Any, ids: Tensor, **given: Any) -> Any:
    with torch.no_grad():
        return model(input_ids=ids, **given)


def filled(model: Any, *sequences: Tensor) -> Any:
    """A cache of these sequences [1, n] of one length."""
    return call(model, torch.cat(sequences), use_cache=True).past_key_values


@pytest.mark.parametrize("number", [-3, -1, 0, 1, 3])
def test_crop_means_what_it_means_in_transformers(number: int) -> None:
    from transformers import DynamicCache

    model = causal_model()
    theirs = DynamicCache(config=model.config)
    call(model, ids_of(model, 7), past_key_values=theirs)
    with patched(model):
        cache = filled(model, ids_of(model, 7))
        if number > 0:
            with pytest.raises(ValueError, match="positive value") as said:
                theirs.crop(number)
            with pytest.raises(ArgumentError) as ours:
                cache.crop(number)
            assert str(ours.value).endswith(str(said.value))
        else:
            theirs.crop(number)
            cache.crop(number)
        assert cache.get_seq_length() == theirs.get_seq_length() == 7 + min(number, 0)

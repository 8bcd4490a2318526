"""A patched model under autocast: layers compute outside of it, and the rest of the model is transformers' own."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from tests.integrations.paged import causal_model, patched


def error(actual: Tensor, exact: Tensor) -> float:
    return float((actual.double() - exact.double()).norm() / exact.double().norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_patched_model_under_autocast_is_as_near_as_transformers_is(dtype: torch.dtype) -> None:
    """Exact: the model of transformers in fp32, without autocast."""
    model = copy.deepcopy(causal_model()).eval()
    ids = torch.randint(1, model.config.vocab_size, (1, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        exact = model(ids, use_cache=False).logits
        model.to(dtype)
        with torch.autocast("cpu", torch.bfloat16):
            unpatched = model(ids, use_cache=False).logits
        with patched(model), torch.autocast("cpu", torch.bfloat16):
            actual = model(ids, use_cache=False).logits
            tokens = model.generate(ids, max_new_tokens=3, do_sample=False)

    assert actual.dtype == unpatched.dtype
    assert error(actual, exact) <= 1.5 * error(unpatched, exact) < 0.05
    assert tokens.shape == (1, 43)

"""Weights of a patched model that change, as trainers write them: the next call has the logits of transformers.

What is expected is what a copy of the model, which is not patched, computes with the same weights.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers", reason="needs transformers")

from dsv4attn.errors import UnsupportedError
from tests.integrations.paged import causal_model, ids_of, logits_of, patched
from tests.parity import hf
from tests.parity.hf import deviation

LENGTH = 40
"""Tokens of a prompt: more entries than the indexer selects."""


def fresh() -> Any:
    return copy.deepcopy(causal_model()).eval()


def new_values(model: Any, seed: int = 1) -> dict[str, Tensor]:
    """Other values of all weights."""
    g = torch.Generator().manual_seed(seed)
    return {
        name: (value + 0.05 * torch.randn(value.shape, generator=g)).detach().to(value.dtype)
        for name, value in model.named_parameters()
    }


def in_place(model: Any, new: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, value in model.named_parameters():
            if name in new:
                value.copy_(new[name])


def through_data(model: Any, new: dict[str, Tensor]) -> None:
    for name, value in model.named_parameters():
        if name in new:
            value.data.copy_(new[name])


def other_memory(model: Any, new: dict[str, Tensor]) -> None:
    for name, value in model.named_parameters():
        if name in new:
            value.data = new[name].clone()


def load(model: Any, new: dict[str, Tensor]) -> None:
    model.load_state_dict(new, strict=False)


def load_assigned(model: Any, new: dict[str, Tensor]) -> None:
    model.load_state_dict({name: value.clone() for name, value in new.items()}, strict=False, assign=True)


def rebound(model: Any, new: dict[str, Tensor]) -> None:
    for name, value in new.items():
        path, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(path), attribute, nn.Parameter(value.clone()))


CHANGES = (in_place, other_memory, load, load_assigned, rebound)
Change = Callable[[Any, dict[str, Tensor]], None]


@pytest.mark.parametrize("change", CHANGES)
def test_all_weights_at_once(change: Change) -> None:
    model, plain = fresh(), fresh()
    ids = ids_of(model, LENGTH)
    new = new_values(model)
    load(plain, new)
    expected = logits_of(plain, ids)
    with patched(model):
        assert deviation(logits_of(model, ids), expected) > 0.01
        change(model, new)
        assert deviation(logits_of(model, ids), expected) <= 1e-5
    assert deviation(logits_of(model, ids), expected) <= 1e-6


def names() -> list[str]:
    """Of all weights of the attention of a layer of each kind."""
    return [name for name, _ in causal_model().named_parameters() if ".self_attn." in name]


@pytest.mark.matrix
@pytest.mark.parametrize("shift", range(2))
def test_each_weight_of_attention_alone(shift: int) -> None:
    """One after the other, in every way in turn."""
    model, plain = fresh(), fresh()
    ids, new = ids_of(model, LENGTH), new_values(model)
    assert len(names()) > 30
    with patched(model):
        logits_of(model, ids)
        for number, name in enumerate(names()):
            change = CHANGES[(number + 3 * shift) % len(CHANGES)]
            value = {name: new[name] * 1.5}
            load(plain, value)
            change(model, value)
            # in every third, so that a change that was not seen shows in a later one
            if number % 3 == 2:
                assert deviation(logits_of(model, ids), logits_of(plain, ids)) <= 1e-5, name


def test_a_change_between_the_tokens_of_a_cache_is_seen() -> None:
    """Entries of tokens before it stay those of the old weights."""
    model = fresh()
    ids, new = ids_of(model, LENGTH), new_values(model)
    outputs = []
    for change in (in_place, other_memory):
        patched_model = fresh()
        with patched(patched_model), torch.no_grad():
            cache = hf.cache_of(patched_model(ids[:, :-1], use_cache=True))
            change(patched_model, new)
            outputs.append(patched_model(ids[:, -1:], **hf.passing(cache), use_cache=True).logits)
    assert torch.equal(*outputs)


def test_a_state_dict_that_is_loaded_in_inference_mode_is_taken() -> None:
    """Also that of one layer. Torch counts no writes to tensors of this mode."""
    with torch.inference_mode():
        model, plain = fresh(), fresh()
        ids = ids_of(model, LENGTH)
        with patched(model):
            logits_of(model, ids)
            for layer in (model, model.model.layers[1].self_attn):
                new = {
                    name: value * 1.5
                    for name, value in layer.named_parameters()
                    if layer is not model or ".self_attn." in name
                }
                layer.load_state_dict(new, strict=False)
                load(plain, model.state_dict())
                assert deviation(logits_of(model, ids), logits_of(plain, ids)) <= 1e-5
        attention = model.model.layers[1].self_attn
        assert not attention._load_state_dict_post_hooks


def test_refresh_takes_weights_between_the_tokens_of_a_cache() -> None:
    outputs = []
    for change in (in_place, through_data):
        model = fresh()
        ids, new = ids_of(model, LENGTH), new_values(model)
        with patched(model) as handle, torch.no_grad():
            cache = hf.cache_of(model(ids[:, :-1], use_cache=True))
            change(model, new)
            handle.refresh()
            outputs.append(model(ids[:, -1:], **hf.passing(cache), use_cache=True).logits)
    assert torch.equal(*outputs)


def test_weights_of_another_shape_are_refused_and_a_patch_is_made_again() -> None:
    model = fresh()
    module = model.model.layers[1].self_attn
    with patched(model):
        old = module.sinks
        module.sinks = nn.Parameter(torch.zeros(len(old) + 1))
        with pytest.raises(UnsupportedError, match=r"the weights that patch\(\) found.*sink.*patch it again"):
            logits_of(model, ids_of(model, 5))
        module.sinks = old
        logits_of(model, ids_of(model, 5))


def test_bf16_models_have_no_weight_that_is_half_seen() -> None:
    """Sinks and position terms are copied for a bf16 model, and others are not: all of them are new, or none."""
    model, plain = fresh().to(torch.bfloat16), fresh().to(torch.bfloat16)
    ids, new = ids_of(model, LENGTH), new_values(model)
    load(plain, new)
    with patched(plain):
        expected = logits_of(plain, ids)
    for change in CHANGES:
        patched_model = copy.deepcopy(model)
        with patched(patched_model):
            logits_of(patched_model, ids)
            change(patched_model, new)
            assert torch.equal(logits_of(patched_model, ids), expected)

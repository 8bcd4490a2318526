"""transformers' DeepSeek-V4 with attn_implementation "dsv4attn" against its own eager attention, in fp32."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from attrs import evolve
from torch import Tensor

from dsv4attn.backends.reference.launch import ReferenceBackend
from dsv4attn.core.contract.backend import Backend, Phase, Rank
from dsv4attn.core.contract.phased import PhasedBackend
from dsv4attn.selection import load_backend
from tests.backends.built_in import EVERYWHERE, but_twins, class_of, infos
from tests.integrations.paged import generated, logits_of, new_model
from tests.parity import hf
from tests.parity.hf import deviation

pytest.importorskip("transformers.models.deepseek_v4", reason="needs transformers >= 5.23, which needs Python >= 3.11")
pytestmark = pytest.mark.skipif(torch.accelerator.is_available(), reason="models run on the CPU")

TOLERANCE = 1e-5
"""Relative to the largest logit."""
PLANTED = 1e-3
NAME = "dsv4attn"
CHUNKS = {"whole": (71,), "chunks": (5, 18, 1, 17, 2, 27, 1), "tokens": (1,) * 40}


def register(backend: Any = None) -> None:
    from dsv4attn.integrations import transformers

    transformers.register(backend)


@pytest.fixture(autouse=True)
def _the_default_is_registered() -> Iterator[None]:
    register()
    yield
    register()


@functools.cache
def causal_model(seed: int = 0) -> Any:
    """A model whose implementation of attention these tests change."""
    return new_model(seed=seed)


def prompts(*lengths: int, seed: int = 0) -> dict[str, Tensor]:
    """Token ids [N, longest] and their mask, padded on the left."""
    longest = max(lengths)
    ids = torch.stack([hf.prompt(seed, i)[:longest] for i in range(len(lengths))])
    seen = torch.arange(longest) >= longest - torch.tensor(lengths)[:, None]
    return {"input_ids": ids.where(seen, 0), "attention_mask": seen.long()}


def logits(model: Any, implementation: str, chunks: Sequence[int], *, cached: bool, **inputs: Tensor) -> Tensor:
    """[N, T, vocabulary] of the first tokens, at once or through transformers' own cache."""
    from transformers.cache_utils import DynamicCache

    model.set_attn_implementation(implementation)
    cache, done, parts = DynamicCache(config=model.config) if cached else None, 0, []
    with torch.no_grad():
        for n in chunks:
            arguments = {"input_ids": inputs["input_ids"][:, done : done + n]}
            if "attention_mask" in inputs:
                arguments["attention_mask"] = inputs["attention_mask"][:, : done + n]
            parts.append(model(**arguments, **hf.passing(cache), use_cache=cached).logits)
            done += n
    return torch.cat(parts, 1)


def parity(chunks: Sequence[int], *, cached: bool, model: Any = None, **inputs: Tensor) -> float:
    model = causal_model() if model is None else model
    eager = logits(model, "eager", chunks, cached=cached, **inputs)
    return deviation(logits(model, NAME, chunks, cached=cached, **inputs), eager)


# equal to eager


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(("mode", "cached"), [("whole", False), ("whole", True), ("chunks", True), ("tokens", True)])
def test_logits_equal_eager(mode: str, cached: bool, seed: int) -> None:
    measured = parity(CHUNKS[mode], cached=cached, model=causal_model(seed), **prompts(71, 71, seed=seed))

    print(f"{mode} {measured:.1e}")
    assert measured <= TOLERANCE


@hf.each_form
def test_every_form_of_keys_and_indices_is_served(forms: dict[str, str]) -> None:
    register(load_backend("reference", **forms))

    assert parity((5, 18, 1, 2), cached=True, **prompts(26, 20)) <= TOLERANCE


def test_generate_gives_the_tokens_of_eager_with_batch_and_left_padding() -> None:
    inputs = prompts(23, 9, 17, 1)
    tokens = []
    for implementation in ("eager", NAME):
        causal_model().set_attn_implementation(implementation)
        tokens.append(generated(causal_model(), 40, **inputs))

    assert tokens[0].shape == (4, 40)
    assert len(tokens[0].unique()) > 10
    assert torch.equal(*tokens)


def test_a_model_is_made_with_the_name() -> None:
    model = new_model(attn_implementation=NAME)

    assert model.config._attn_implementation == NAME
    got = logits_of(model, prompts(30)["input_ids"])
    assert deviation(got, logits(causal_model(), "eager", (30,), cached=False, **prompts(30))) <= TOLERANCE


@pytest.mark.matrix
def test_a_compiled_layer_equals_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = causal_model().model.layers[1].self_attn
    monkeypatch.setattr(layer, "forward", torch.compile(layer.forward, backend="eager"))

    assert parity((20,), cached=False, **prompts(20, 13)) <= TOLERANCE


@pytest.mark.parametrize("name", EVERYWHERE)
def test_inference_mode_and_no_grad_may_alternate(name: str) -> None:
    if name != "reference":
        pytest.importorskip("triton", reason="needs Triton")
    register(name)
    model, inputs = causal_model(), prompts(9, 7)
    want = logits(model, "eager", (9,), cached=False, **inputs)
    model.set_attn_implementation(NAME)

    for mode in (torch.inference_mode, torch.no_grad, torch.inference_mode):
        with mode():
            assert deviation(model(**inputs, use_cache=True).logits, want) <= TOLERANCE


def test_bf16_is_as_near_to_fp32_as_eager_in_bf16() -> None:
    inputs = prompts(40, 31)
    true = logits(causal_model(), "eager", (40,), cached=False, **inputs)
    model = new_model().to(torch.bfloat16)
    eager, of_dsv4attn = (
        deviation(logits(model, name, (40,), cached=False, **inputs).float(), true) for name in ("eager", NAME)
    )

    print(f"eager {eager:.1e} ours {of_dsv4attn:.1e}")
    assert of_dsv4attn <= 1.5 * eager


# kernels


@pytest.mark.matrix
@pytest.mark.parametrize(
    "name", but_twins(*(name for name, info in infos().items() if info.rank is not Rank.REFERENCE))
)
def test_kernels_equal_eager(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="needs Triton")
    ran: list[str] = []
    backend = class_of(name)
    for phase in Phase:
        attend = getattr(backend, phase.value)

        def seen(self: Backend, call: Any, phase: Phase = phase, attend: Any = attend) -> None:
            ran.append(f"{self.name} {phase.value}")
            attend(self, call)

        monkeypatch.setattr(backend, phase.value, seen)
    register(name)
    measured = parity((18, 1, 3, 1), cached=True, **prompts(23, 20))

    print(f"{name} {measured:.1e}")
    assert measured <= TOLERANCE
    assert ran == [f"{name} {phase}" for phase in ("prefill", "decode") * 2 for _ in hf.KINDS]


def test_gathered_prefill_of_a_paged_backend_equals_eager() -> None:
    pytest.importorskip("triton", reason="needs Triton")
    register(load_backend("sm90", prefill="gathered"))

    assert parity((18,), cached=False, **prompts(18, 11)) <= TOLERANCE


def test_each_phase_runs_on_its_own_backend() -> None:
    calls: list[tuple[str, Phase]] = []

    class Seen(ReferenceBackend):
        def __init__(self, name: str) -> None:
            super().__init__(prefill_keys="paged" if name == "prefill" else "gathered")
            self.name = name

        def decode(self, call: Any) -> None:
            calls.append((self.name, Phase.DECODE))
            ReferenceBackend.decode(self, call)

        def prefill(self, call: Any) -> None:
            calls.append((self.name, Phase.PREFILL))
            ReferenceBackend.decode(self, call)

    both: Backend = PhasedBackend(Seen("decode"), Seen("prefill"))
    register(both)

    assert parity((9, 1), cached=True, **prompts(10)) <= TOLERANCE
    assert calls == [("prefill", Phase.PREFILL)] * 3 + [("decode", Phase.DECODE)] * 3


# what can go wrong is seen


class NoSinks(ReferenceBackend):
    def decode(self, call: Any) -> None:
        super().decode(evolve(call, attn_sink=None))


def test_dropped_sinks_are_seen() -> None:
    register(NoSinks())

    assert parity((30,), cached=False, **prompts(30)) > PLANTED

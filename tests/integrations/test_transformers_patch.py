"""A patched model of transformers against the same model unpatched, in fp32: logits and tokens."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4attn.core.contract.backend import Phase, Rank
from tests.backends.built_in import class_of, infos
from tests.integrations.paged import causal_model, chunked, generated, ids_of, left_padded, logits_of, patched
from tests.parity import hf
from tests.parity.hf import deviation

pytest.importorskip("transformers.models.deepseek_v4", reason="needs transformers >= 5.23, which needs Python >= 3.11")
pytestmark = pytest.mark.skipif(torch.accelerator.is_available(), reason="models run on the CPU")

TOLERANCE = 1e-5
"""Relative to the largest logit; 1e-6 was measured."""
PROMPTS = 23, 9, 17


def prompts(model: Any, *lengths: int) -> list[Tensor]:
    return [ids_of(model, length, number) for number, length in enumerate(lengths)]


# logits


@pytest.mark.in_turn
@pytest.mark.parametrize("chunks", [(71,), (5, 18, 1, 17, 2, 27, 1), (1,) * 71], ids=["whole", "chunks", "tokens"])
@pytest.mark.parametrize("seed", [0, 1])
def test_logits_equal_transformers(chunks: tuple[int, ...], seed: int) -> None:
    model = causal_model(seed=seed)
    ids = ids_of(model, 71)
    want = logits_of(model, ids)

    with patched(model):
        measured = deviation(chunked(model, ids, chunks), want)

    print(f"{measured:.1e}")
    assert measured <= TOLERANCE


LONG = {"whole": (640,), "chunks": (200, 100, 1, 1, 39, 299), "last 40 alone": (255, 345, *[1] * 40)}


@pytest.mark.matrix
@pytest.mark.parametrize(
    "mode", [pytest.param(mode, marks=[] if mode == "chunks" else pytest.mark.matrix) for mode in LONG]
)
def test_logits_of_large_heads_equal_transformers(mode: str) -> None:
    model = causal_model(large=True)
    ids = ids_of(model, 640)
    want = logits_of(model, ids)

    with patched(model, max_len=640):
        measured = deviation(chunked(model, ids, LONG[mode]), want)

    print(f"{mode} {measured:.1e}")
    assert measured <= TOLERANCE


@pytest.mark.slow
def test_logits_of_large_heads_equal_transformers_in_every_mode_of_three_seeds() -> None:
    for seed in range(3):
        model = causal_model(large=True, seed=seed)
        ids = ids_of(model, 1000, seed)
        want = logits_of(model, ids)
        for chunks in ((1000,), (333, 1, 333, 333), *([(1,) * 1000] if not seed else [])):
            with patched(model, max_len=1000):
                measured = deviation(chunked(model, ids, chunks), want)
            print(f"seed {seed}, {len(chunks)} calls: {measured:.1e}")
            assert measured <= TOLERANCE


@pytest.mark.parametrize("large", [False, pytest.param(True, marks=pytest.mark.matrix)])
def test_a_prefix_hit_and_a_fork_equal_transformers(large: bool) -> None:
    model = causal_model(large=large)
    total, shared = (640, 301) if large else (71, 37)
    ids, other = ids_of(model, total), ids_of(model, total, 1)
    other[:, :shared] = ids[:, :shared]
    want, changed = logits_of(model, ids), logits_of(model, other)

    with patched(model, max_len=640, keep_windows=True):
        from dsv4attn.integrations.transformers import DeepseekV4PagedCache

        cache = DeepseekV4PagedCache(model)
        chunked(model, ids[:, :-6], (total - 9, 3), cache)
        hit, twin = cache.fork(shared), copy.deepcopy(cache)
        measured = [
            deviation(chunked(model, other[:, shared:], (1, total - shared - 1), hit), changed[:, shared:]),
            deviation(chunked(model, ids[:, -6:], (6,), twin), want[:, -6:]),
            deviation(chunked(model, ids[:, -6:], (1, 5), cache), want[:, -6:]),
        ]
        assert [hit.lengths, twin.lengths, cache.lengths] == [[total]] * 3

    print(measured)
    assert max(measured) <= TOLERANCE


def test_a_batch_with_padding_equals_each_sequence_alone() -> None:
    model = causal_model()
    sequences = prompts(model, 40, 31, 1)
    want = [logits_of(model, ids) for ids in sequences]
    batch = left_padded(*sequences)

    with patched(model):
        # in the second run, calls end in the padding of the others, and a prompt of one token is a decode
        for chunks in ((40,), (3, 7, 29, 1)):
            got = chunked(model, batch["input_ids"], chunks, mask=batch["attention_mask"])
            for row, logits in zip(got, want, strict=True):
                assert deviation(row[-logits.shape[1] :], logits[0]) <= TOLERANCE


def test_the_base_model_alone_is_served() -> None:
    model = causal_model().model
    ids = ids_of(model, 30)
    with torch.no_grad():
        want = model(ids).last_hidden_state
        with patched(model) as handle:
            # by position: mask and position ids, then no cache
            got = model(ids, torch.ones_like(ids), torch.arange(30)[None], None, None, False)
            assert hf.cache_of(got) is None
            assert handle.num_sequences == 0
    assert deviation(got.last_hidden_state, want) <= TOLERANCE


def test_bf16_is_as_near_to_fp32_as_transformers_in_bf16() -> None:
    model = causal_model()
    ids = ids_of(model, 60)
    true = logits_of(model, ids)
    half = copy.deepcopy(model).to(torch.bfloat16)
    eager = deviation(logits_of(half, ids).float(), true)
    with patched(half, kv_layout="bf16"):
        of_dsv4attn = deviation(logits_of(half, ids).float(), true)

    print(f"transformers {eager:.1e} ours {of_dsv4attn:.1e}")
    assert of_dsv4attn <= 1.5 * eager


# tokens


@pytest.mark.matrix
def test_generate_gives_the_tokens_of_each_prompt_alone() -> None:
    model = causal_model()
    sequences = prompts(model, *PROMPTS)
    want = torch.cat([generated(model, 30, input_ids=ids) for ids in sequences])

    with patched(model) as handle:
        got = generated(model, 30, **left_padded(*sequences))
        assert handle.num_sequences == 0

    assert torch.equal(got, want)
    assert len(want.unique()) > 10


@pytest.mark.matrix
@pytest.mark.parametrize("options", [{}, {"prefill_chunk_size": 7}, {"use_cache": False}], ids=str)
def test_generate_with_options_gives_the_tokens_of_transformers(options: dict[str, Any]) -> None:
    model = causal_model()
    ids = torch.cat(prompts(model, 20, 20, 20))
    want = generated(model, 30, input_ids=ids)

    with patched(model):
        assert torch.equal(generated(model, 30, input_ids=ids, **options), want)


def test_beam_search_gives_the_tokens_of_transformers() -> None:
    model = causal_model()
    ids = torch.cat(prompts(model, 20, 20))
    want = generated(model, 12, input_ids=ids, num_beams=3)

    with patched(model, max_batch=6) as handle:
        assert torch.equal(generated(model, 12, input_ids=ids, num_beams=3), want)
        assert handle.num_sequences == 0


@pytest.mark.matrix
def test_several_turns_with_one_cache_give_the_tokens_of_transformers() -> None:
    from transformers import DynamicCache

    from dsv4attn.integrations.transformers import DeepseekV4PagedCache

    model = causal_model()
    turns = prompts(model, 11, 6, 13)

    def talk(cache: Any) -> list[list[int]]:
        said, answers = torch.zeros(1, 0, dtype=torch.int64), []
        for turn in turns:
            said = torch.cat([said, turn], 1)
            mask = torch.ones_like(said)  # answers may have the padding id
            answer = generated(model, 9, input_ids=said, attention_mask=mask, **hf.passing(cache))
            said = torch.cat([said, answer], 1)
            answers.append(answer[0].tolist())
        return answers

    want = talk(DynamicCache(config=model.config))
    with patched(model):
        cache = DeepseekV4PagedCache(model)
        assert talk(cache) == want
        # the last token of an answer is not in it
        assert cache.lengths == [11 + 6 + 13 + 3 * 9 - 1]


# attention of transformers' models calls every backend alike: `test_kernels_equal_eager` runs each
@pytest.mark.matrix
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if info.rank is Rank.GENERIC else pytest.mark.slow)
        for name, info in infos().items()
        if info.rank is not Rank.REFERENCE
    ],
)
def test_kernels_give_the_tokens_of_transformers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="needs Triton")
    ran: set[Phase] = set()
    backend = class_of(name)
    prepare = backend.prepare

    def seen(self: Any, phase: Phase, call: Any) -> Any:
        ran.add(phase)
        return prepare(self, phase, call)

    monkeypatch.setattr(backend, "prepare", seen)
    model = causal_model()
    sequences = prompts(model, 11, 6)
    want = torch.cat([generated(model, 8, input_ids=ids) for ids in sequences])

    with patched(model, name) as handle:
        got = generated(model, 8, **left_padded(*sequences))

    assert torch.equal(got, want)
    assert handle.backend == name
    assert ran == {*Phase}

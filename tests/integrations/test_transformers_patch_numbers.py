"""A patched model with fp8 pages against fp32 without them, and bits that do not depend on the batch."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from attrs import frozen
from torch import Tensor

from tests.backends.built_in import EVERYWHERE
from tests.fast_interpreter.products import multiplied_alike
from tests.integrations.invariant import token_by_token
from tests.integrations.paged import causal_model, chunked, ids_of, left_padded, logits_of, new_model, patched
from tests.parity import hf
from tests.parity.hf import deviation

pytest.importorskip("transformers.models.deepseek_v4", reason="needs transformers >= 5.23, which needs Python >= 3.11")
pytestmark = pytest.mark.skipif(torch.accelerator.is_available(), reason="models run on the CPU")

MARGIN = 0.03
"""Of the largest logit. Of a random model a third of the positions have a top-2 margin below it in fp32.

With fp8 pages, the largest deviation among the logits of a position is about as large, in the median over positions.
"""


@frozen
class Agreement:
    """Logits against those in fp32. Deviations and margins are relative to the largest logit.

    positions: their number. top1: share of positions with the same largest logit. clear: share of positions with a
    margin above MARGIN between the two largest logits in fp32. clear_top1: `top1` of these. largest, rms: deviations.
    """

    positions: int
    top1: float
    clear: float
    clear_top1: float
    largest: float
    rms: float

    @classmethod
    def of(cls, got: Tensor, want: Tensor) -> Agreement:
        size = want.abs().max()
        same = (got.argmax(-1) == want.argmax(-1)).flatten()
        margin = want.topk(2).values.diff().abs().flatten() / size
        clear, deviation = margin > MARGIN, (got - want) / size
        return cls(
            len(same),
            float(same.float().mean()),
            float(clear.float().mean()),
            float(same[clear].float().mean()),
            float(deviation.abs().max()),
            float(deviation.square().mean().sqrt()),
        )


def agreement(kv_layout: str, tokens: int, numbers: int) -> Agreement:
    """Over some sequences."""
    model, got, want = causal_model(large=True), [], []
    for number in range(numbers):
        ids = ids_of(model, tokens, number)
        want.append(logits_of(model, ids))
        with patched(model, kv_layout=kv_layout, max_len=tokens):
            got.append(logits_of(model, ids))
    return Agreement.of(torch.cat(got, 1), torch.cat(want, 1))


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("kv_layout", "tokens", "numbers", "top1", "clear_top1", "largest", "rms"),
    [
        ("fp8_ds_mla", 640, 1, 0.9, 0.99, 0.08, 0.012),
        pytest.param("fp8_ds_mla", 2000, 2, 0.92, 0.99, 0.13, 0.013, marks=pytest.mark.slow),
        pytest.param("bf16", 640, 1, 0.98, 1, 0.08, 0.003, marks=pytest.mark.matrix),
    ],
)
def test_rounded_pages_agree_with_fp32_on_the_likeliest_token(
    kv_layout: str, tokens: int, numbers: int, top1: float, clear_top1: float, largest: float, rms: float
) -> None:
    agreed = agreement(kv_layout, tokens, numbers)

    print(agreed)
    assert agreed.positions == tokens * numbers
    assert agreed.clear > 0.5
    assert agreed.clear_top1 >= clear_top1
    assert agreed.top1 >= top1
    assert agreed.largest <= largest
    assert agreed.rms <= rms


def repeating(count: int, length: int, seed: int) -> Tensor:
    """[count, length] ids: nine times of ten the token of four before, so that only attention can know it."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 64, (count, length), generator=generator)
    for t in range(4, length):
        again = torch.rand(count, generator=generator) < 0.9
        ids[:, t] = torch.where(again, ids[:, t - 4], ids[:, t])
    return ids


@pytest.mark.slow
def test_a_trained_model_says_the_same_token_at_99_of_100_of_4000_positions() -> None:
    """Random weights give near ties that no format could keep; half a minute of training gives margins."""
    model = new_model().train().requires_grad_()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(150):
        ids = repeating(16, 48, step)
        loss = model(ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.eval().requires_grad_(requires_grad=False)
    got, want = [], []
    for number in range(2):
        ids = repeating(1, 2000, 10_000 + number)
        want.append(logits_of(model, ids))
        with patched(model, kv_layout="fp8_ds_mla", max_len=2000):
            got.append(logits_of(model, ids))
    actual = Agreement.of(torch.cat(got, 1), torch.cat(want, 1))

    print(actual)
    assert actual.positions == 4000
    assert actual.top1 >= 0.99
    assert actual.rms <= 0.01


@pytest.mark.matrix
def test_a_kernel_on_fp8_pages_agrees_with_the_reference() -> None:
    pytest.importorskip("triton", reason="needs Triton")
    model = causal_model()
    ids = ids_of(model, 30)

    def logits(backend: str) -> Tensor:
        with patched(model, backend, kv_layout="fp8_ds_mla"):
            return logits_of(model, ids)

    actual = Agreement.of(logits("triton"), logits("reference"))

    print(actual)
    assert actual.rms <= 0.02


# bits

CHUNKS = {"whole": (37,), "chunks": (5, 18, 1, 13), "tokens": (1,) * 37}


def with_one_quick(modes: Iterable[str], quick: str) -> pytest.MarkDecorator:
    """Modes and layouts, of which the default run takes one: the kit's cases of clause D2 run layers in any steps."""
    every = itertools.product(modes, ("fp32", "fp8_ds_mla"))
    params = [
        pytest.param(*both, marks=[] if both == (quick, "fp8_ds_mla") else [pytest.mark.matrix]) for both in every
    ]
    return pytest.mark.parametrize(("mode", "layout"), params)


@functools.cache
def bits(name: str, layout: str, mode: str) -> Tensor:
    """Logits [1, 37, vocabulary] of a sequence alone."""
    model = causal_model()
    with patched(model, name, kv_layout=layout, deterministic=True), token_by_token(model):
        return chunked(model, ids_of(model, 37), CHUNKS[mode])


@pytest.mark.matrix
@with_one_quick(["chunks", "tokens"], "tokens")
def test_deterministic_bits_do_not_depend_on_chunks(mode: str, layout: str) -> None:
    assert torch.equal(bits("reference", layout, mode), bits("reference", layout, "whole"))


@pytest.mark.matrix
@with_one_quick(CHUNKS, "chunks")
def test_deterministic_bits_do_not_depend_on_the_batch(mode: str, layout: str) -> None:
    model = causal_model()
    batch = left_padded(*[ids_of(model, n, i) for i, n in enumerate((37, 20, 3))])
    options: Any = {"kv_layout": layout, "deterministic": True}
    with patched(model, "reference", **options) as handle, token_by_token(model):
        assert handle.deterministic
        got = chunked(model, batch["input_ids"], CHUNKS[mode], mask=batch["attention_mask"])

    assert torch.equal(got[:1], bits("reference", layout, "whole"))


def test_rows_of_such_a_product_keep_their_bits() -> None:
    draw = np.random.default_rng(0)
    for depth, columns in ((32, 32), (64, 16), (512, 16)):
        rows, other = (draw.standard_normal(shape, np.float32) for shape in ((16, depth), (depth, columns)))
        whole = multiplied_alike(rows, other, np.float32)
        assert np.allclose(whole, rows @ other, atol=1e-4)
        assert all((multiplied_alike(np.roll(rows, n, 0), other)[n] == whole[0]).all() for n in range(16))


@pytest.mark.matrix
def test_deterministic_bits_of_a_kernel_do_not_depend_on_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="needs Triton")
    # by which Triton's interpreter multiplies
    monkeypatch.setattr(np, "matmul", multiplied_alike)

    assert torch.equal(bits("triton", "fp32", "chunks"), bits("triton", "fp32", "whole"))


def test_without_deterministic_the_same_comparison_finds_a_difference() -> None:
    model = causal_model()
    with patched(model), token_by_token(model):
        whole, parts = (chunked(model, ids_of(model, 37), CHUNKS[mode]) for mode in ("whole", "chunks"))

    assert not torch.equal(whole, parts)


@pytest.mark.matrix
@pytest.mark.parametrize("backend", EVERYWHERE)
def test_index_keys_whose_dims_all_have_rope_equal_transformers(backend: str) -> None:
    model = new_model(hf.config(index_head_dim=hf.ROPE_DIM), 3)
    ids = ids_of(model, 60)
    want = logits_of(model, ids)
    with patched(model, backend) as handle:
        (index,) = [caches.index for caches in handle.pages.manager.caches if caches.index is not None]
        got = chunked(model, ids, [33, 20, 1, 6])

    assert (index.layout.nope_dim, index.layout.rope_dim) == (0, hf.ROPE_DIM)
    assert deviation(got, want) <= 1e-5

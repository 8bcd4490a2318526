"""Caches of a patched model: their pages, failed calls, bad calls, and what `unpatch` leaves."""

from __future__ import annotations

import gc
import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4attn.errors import ArgumentError, Dsv4AttnError, OutOfPagesError, UnsupportedError
from tests.integrations.paged import call, causal_model, chunked, filled, generated, ids_of, left_padded, patched
from tests.parity import hf
from tests.parity.hf import deviation
from tests.serving.test_failed_allocations import contents, each_failure, same

pytest.importorskip("transformers.models.deepseek_v4", reason="needs transformers >= 5.23, which needs Python >= 3.11")
pytestmark = pytest.mark.skipif(torch.accelerator.is_available(), reason="models run on the CPU")

NAME = hf.cache_name()


def new_cache(model: Any) -> Any:
    from dsv4attn.integrations.transformers import DeepseekV4PagedCache

    return DeepseekV4PagedCache(model)


def fill(model: Any, tokens: int = 20, number: int = 0) -> Any:
    """A cache with one sequence."""
    return filled(model, ids_of(model, tokens, number))


@contextmanager
def failing(module: Any) -> Iterator[None]:
    """A module that raises when it has run."""

    def fail(*_: Any) -> None:
        raise RuntimeError("planted")

    handle = module.register_forward_hook(fail)
    try:
        yield
    finally:
        handle.remove()


# pages


@pytest.mark.usefixtures("few_objects")
def test_pages_are_given_back_by_reset_deletion_and_calls_without_a_cache() -> None:
    model = causal_model()
    with patched(model) as handle:
        empty = handle.kv_bytes()
        assert set(empty) == {"window", "compressed", "c4a_state", "c128a_state"}
        assert set(empty.values()) == {0}
        first, second = fill(model), fill(model, 30, 1)
        full = handle.kv_bytes()
        assert all(full.values())
        assert handle.num_sequences == 2
        first.reset()
        assert first.lengths == []
        assert 0 < handle.kv_bytes()["compressed"] < full["compressed"]
        assert hf.cache_of(call(model, ids_of(model, 9), use_cache=False)) is None
        del second
        gc.collect()
        assert handle.kv_bytes() == empty
        assert handle.num_sequences == 0
        # a cache that was reset serves a batch of another size
        both = torch.cat([ids_of(model, 5), ids_of(model, 5, 1)])
        call(model, both, **hf.passing(first))
        assert first.lengths == [5, 5]


def test_windows_that_are_past_are_given_back_unless_kept() -> None:
    model = causal_model()
    used = {}
    for kept in (False, True):
        with patched(model, keep_windows=kept) as handle:
            cache = fill(model, 200)
            used[kept] = handle.kv_bytes()
            if kept:
                assert cache.fork(50).lengths == [50]
            else:
                with pytest.raises(ArgumentError, match=r"-> patch\(model, \.\.\., keep_windows=True\)"):
                    cache.fork(50)
                assert handle.num_sequences == 1
            del cache
    assert used[False]["window"] < used[True]["window"]
    assert used[False]["compressed"] == used[True]["compressed"]


def test_more_sequences_than_there_are_pages_are_refused_with_the_cure() -> None:
    model = causal_model()
    with patched(model, num_blocks={"compressed": 2}) as handle:
        first, second = fill(model), fill(model, 20, 1)
        used_bytes = handle.kv_bytes()
        with pytest.raises(OutOfPagesError, match=r"1 compressed pages needed.*delete or reset.*max_batch"):
            fill(model, 20, 2)
        assert handle.kv_bytes() == used_bytes
        with pytest.raises(OutOfPagesError):
            first.fork()
        assert handle.num_sequences == 2
        first.reset()
        assert fill(model, 20, 2).lengths == [20]
        assert second.lengths == [20]


def test_several_caches_do_not_touch_each_other() -> None:
    model = causal_model()
    ids = [ids_of(model, 40, number) for number in range(3)]
    want = [call(model, sequence_ids).logits for sequence_ids in ids]

    with patched(model, max_batch=3):
        caches = [new_cache(model) for _ in ids]
        got: list[list[Tensor]] = [[], [], []]
        for part in range(4):
            for i, cache in enumerate(caches):
                mine = ids[i][:, part * 10 : part * 10 + 10]
                got[i].append(call(model, mine, **hf.passing(cache)).logits)
        for parts, logits in zip(got, want, strict=True):
            assert deviation(torch.cat(parts, 1), logits) <= 1e-5


def test_a_batch_is_selected_repeated_and_cropped() -> None:
    model = causal_model()
    sequences = [ids_of(model, n, n) for n in (20, 13)]
    batch, following = left_padded(*sequences), ids_of(model, 1, 9)
    want = [call(model, torch.cat([ids, following], 1)).logits[:, -1] for ids in sequences]

    with patched(model, keep_windows=True) as handle:
        cache = hf.cache_of(call(model, batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=True))
        cache.batch_repeat_interleave(2)
        assert cache.lengths == [20, 20, 13, 13]
        cache.batch_select_indices(torch.tensor([3, 1]))
        assert handle.num_sequences == 2
        call(model, following.expand(2, 1), **hf.passing(cache))
        cache.crop(-1)
        assert cache.lengths == [13, 20]
        got = call(model, following.expand(2, 1), **hf.passing(cache)).logits[:, -1]
        assert deviation(got, torch.cat(want[::-1])) <= 1e-5
        for wrong, said in ((-22, r"expected -21 \.\. 0"), (-1.0, "an integer")):
            with pytest.raises(ArgumentError, match=f"tokens_to_remove: .*{said}"):
                cache.crop(wrong)
        assert cache.lengths == [14, 21]
        for indices, said in (
            (
                torch.tensor([True, False, True]),
                r"a tensor of numbers of sequences, or of 2 bools, got torch.bool \[3\]",
            ),
            (torch.tensor([[0]]), r"got torch.int64 \[1, 1\]"),
            (torch.tensor([0.0]), "got torch.float32"),
            ([0], "got list"),
        ):
            with pytest.raises(ArgumentError, match=f"^indices: .*{said}"):
                cache.batch_select_indices(indices)
        cache.batch_select_indices(torch.tensor([False, True]))
        assert cache.lengths == [21]
        cache.batch_select_indices(torch.tensor([0, 0]))
        assert cache.lengths == [21, 21]


def test_a_crop_to_pages_that_are_gone_changes_nothing() -> None:
    model = causal_model()
    with patched(model):
        cache = fill(model, 200)
        assert not cache.is_croppable
        # of the first sequence nothing was given back
        both = left_padded(ids_of(model, 3), ids_of(model, 200))
        batch = hf.cache_of(call(model, both["input_ids"], attention_mask=both["attention_mask"], use_cache=True))
        with pytest.raises(ArgumentError, match="given back"):
            batch.crop(-150)
        assert batch.lengths == [3, 200]
        with pytest.raises(ArgumentError, match=r"length: .*given back, got 50 -> patch\(model, .*keep_windows=True\)"):
            cache.crop(-150)
        assert cache.lengths == [200]
        assert cache.get_seq_length() == 200


# failed calls


@pytest.mark.parametrize("used", [False, True])
def test_a_failed_call_can_be_made_again(used: bool) -> None:
    model = causal_model()
    ids = ids_of(model, 50)
    want = call(model, ids).logits

    with patched(model) as handle:
        cache = new_cache(model)
        if used:
            call(model, ids[:, :30], **hf.passing(cache))
        lengths, rest = cache.lengths, ids[:, cache.get_seq_length() :]
        for layer in (0, 2):
            with failing(model.model.layers[layer].mlp), pytest.raises(RuntimeError, match="planted"):
                call(model, rest, **hf.passing(cache))
            assert cache.lengths == lengths
        if not used:
            assert handle.num_sequences == 0
            assert set(handle.kv_bytes().values()) == {0}
        got = call(model, rest, **hf.passing(cache)).logits
        assert deviation(got, want[:, -rest.shape[1] :]) <= 1e-5


CALLS: dict[str, Callable[[Any], Any]] = {
    "fork": lambda cache: cache.fork(14),
    "crop": lambda cache: cache.crop(-3),
    "repeat": lambda cache: cache.batch_repeat_interleave(2),
    # pages of the sequence that is not named serve the forks
    "select": lambda cache: cache.batch_select_indices(torch.tensor([1, 1])),
}


@pytest.mark.parametrize("name", CALLS)
def test_full_memory_in_a_call_of_a_cache_changes_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each allocation fails in turn; the last call, in which none does, goes on from what was there."""
    model, sequences = causal_model(), [18, 12]
    prompts = [ids_of(model, n, n) for n in sequences]
    batch = left_padded(*prompts)
    with patched(model, keep_windows=True) as handle:
        manager = handle.pages.manager
        cache = hf.cache_of(call(model, batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=True))
        own = [*cache._sequences]
        before, in_use = [contents(manager, one) for one in own], handle.kv_bytes()
        failed, result = 0, None
        for memory in each_failure(monkeypatch):
            try:
                with memory:
                    result = CALLS[name](cache)
            except torch.OutOfMemoryError:
                failed += 1
                assert handle.kv_bytes() == in_use
                assert (handle.num_sequences, cache.get_seq_length()) == (2, 18)
                assert cache._sequences == own
                assert all(same(old, contents(manager, one)) for old, one in zip(before, own, strict=True))
        assert failed > 3 or name == "crop"
        expected = {"fork": [14, 8], "crop": [15, 9], "repeat": [18, 18, 12, 12]}
        assert (result or cache).lengths == expected.get(name, [12, 12])
        if result is not None:
            result.reset()
        cache.reset()
        assert set(handle.kv_bytes().values()) == {0}


@pytest.mark.matrix
@pytest.mark.parametrize("used", [False, True])
def test_full_memory_before_a_call_runs_leaves_the_cache_as_it_was(used: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Allocations that plan a call of the model fail in turn. Pages for its tokens may stay with the cache."""
    model = causal_model()
    ids = ids_of(model, 30)
    want = call(model, ids).logits[:, -1]
    with patched(model) as handle:
        cache, first = new_cache(model), 20 if used else 0
        if used:
            call(model, ids[:, :first], **hf.passing(cache))
        lengths, sequences, failed = cache.lengths, [*cache._sequences], 0
        for memory in each_failure(monkeypatch, every=11):
            try:
                with memory:
                    begun = handle._begin((ids[:, first:],), {**hf.passing(cache)})
            except torch.OutOfMemoryError:
                failed += 1
                assert (cache.lengths, cache.get_seq_length()) == (lengths, first)
                assert cache._sequences == sequences
                assert used or set(handle.kv_bytes().values()) == {0}
                assert handle.step is None
            else:
                handle._end(begun, done=False)
        assert failed > 8
        got = call(model, ids[:, first:], **hf.passing(cache)).logits[:, -1]
        assert deviation(got, want) <= 1e-5
        cache.reset()
        assert set(handle.kv_bytes().values()) == {0}


@pytest.mark.usefixtures("few_objects")
@pytest.mark.parametrize("use_cache", [False, True])
def test_a_failed_call_without_a_cache_leaves_nothing(use_cache: bool) -> None:
    model = causal_model()
    with patched(model) as handle:
        with failing(model.model.layers[1].mlp), pytest.raises(RuntimeError, match="planted"):
            call(model, ids_of(model, 20), use_cache=use_cache)
        gc.collect()
        assert set(handle.kv_bytes().values()) == {0}
        assert handle.step is None


def test_a_call_within_a_call_is_refused() -> None:
    model = causal_model()
    errors: list[BaseException] = []

    def other() -> None:
        try:
            call(model, ids_of(model, 5))
        except Dsv4AttnError as error:
            errors.append(error)

    def meanwhile(*_: Any) -> None:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()

    with patched(model):
        handle = model.model.layers[1].mlp.register_forward_hook(meanwhile)
        want = call(model, ids_of(model, 20)).logits
        handle.remove()
        assert "one thread at a time" in str(errors[0])
        assert torch.equal(call(model, ids_of(model, 20)).logits, want)


# bad calls


ONES = torch.ones(2, 12, dtype=torch.int64)


def with_zero(*places: tuple[int, int], columns: int = 12) -> Tensor:
    mask = torch.ones(2, columns, dtype=torch.int64)
    for place in places:
        mask[place] = 0
    return mask


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"attention_mask": with_zero((1, 11))}, UnsupportedError, r"attention_mask\[1\].*at the end.*padding_side"),
        ({"attention_mask": with_zero((0, 9))}, UnsupportedError, r"attention_mask\[0\].*hole"),
        ({"attention_mask": with_zero((0, 0))}, ArgumentError, r"attention_mask\[0\]: expected 8 tokens among"),
        ({"attention_mask": ONES[:, :4]}, ArgumentError, r"shape \[2, 12\]: 8 columns in the cache and 4 new ones"),
        ({"attention_mask": ONES.float()}, UnsupportedError, "attention_mask: expected None, or .*integers or bools"),
        ({"attention_mask": ONES[:, None, None]}, UnsupportedError, "attention_mask"),
        ({"attention_mask": {"full_attention": None}}, UnsupportedError, "attention_mask.*a dict"),
        ({"position_ids": torch.arange(4)[None]}, ArgumentError, r"position_ids\[0\]: expected ids that continue at 8"),
        ({"position_ids": torch.tensor([[8, 9, 10, 12]])}, ArgumentError, r"position_ids\[0\]"),
        ({"position_ids": torch.arange(8, 13)[None]}, ArgumentError, "position_ids: expected shape"),
        ({"output_attentions": True}, UnsupportedError, "output_attentions.*never in memory.*unpatch"),
    ],
)
def test_a_bad_call_is_refused_before_any_write(options: dict[str, Any], error: type[Exception], said: str) -> None:
    model = causal_model()
    first, second = (torch.cat([ids_of(model, n), ids_of(model, n, 1)]) for n in (8, 4))
    with patched(model) as handle:
        cache = hf.cache_of(call(model, first, use_cache=True))
        stores = [store.tensor for caches in handle.pages.manager.caches for store in caches.present.values()]
        copies = [store.clone() for store in stores]
        with pytest.raises(error, match=said):
            call(model, second, **hf.passing(cache), **options)
        assert all(map(torch.equal, stores, copies))
        assert cache.lengths == [8, 8]


def test_position_ids_of_padding_are_not_read() -> None:
    model = causal_model()
    batch = left_padded(ids_of(model, 9), ids_of(model, 5))
    ids = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
    with patched(model):
        want = call(model, batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        got = call(model, batch["input_ids"], attention_mask=batch["attention_mask"].bool(), position_ids=ids).logits
    assert torch.equal(got, want)


def dynamic(model: Any) -> Any:
    from transformers import DynamicCache

    return DynamicCache(config=model.config)


def other_cache(_: Any = None) -> Any:
    with patched(causal_model(seed=1)):
        return new_cache(causal_model(seed=1))


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (
            dynamic,
            UnsupportedError,
            f"{NAME}: expected a DeepseekV4PagedCache.*DynamicCache.*the outputs have it as {NAME}",
        ),
        (other_cache, ArgumentError, f"{NAME}.*one of another model, or of an earlier patch"),
    ],
)
def test_a_cache_of_another_kind_is_refused(make: Callable[[Any], Any], error: type[Exception], said: str) -> None:
    model = causal_model()
    with patched(model):
        cache = make(model)
        with pytest.raises(error, match=said):
            call(model, ids_of(model, 5), **hf.passing(cache))
        with pytest.raises(error, match=said):
            generated(model, 3, input_ids=ids_of(model, 5), **hf.passing(cache))


@pytest.mark.parametrize("kind", ["static", "offloaded", "quantized"])
def test_other_caches_of_generate_are_refused(kind: str) -> None:
    model = causal_model()
    with patched(model), pytest.raises(UnsupportedError, match=r"cache_implementation.*leave it out"):
        generated(model, 3, input_ids=ids_of(model, 5), cache_implementation=kind)


def test_a_batch_that_does_not_fit_is_refused_with_the_argument_of_patch() -> None:
    model = causal_model()
    with patched(model, max_batch=2, max_len=32, max_tokens=40) as handle:
        for rows, tokens, said in ((3, 5, "max_batch: expected at most 2"), (1, 33, "max_len: expected at most 32")):
            with pytest.raises(ArgumentError, match=said):
                call(model, torch.ones(rows, tokens, dtype=torch.int64))
        with pytest.raises(ArgumentError, match=r"max_tokens: expected at most 40.*prefill_chunk_size"):
            call(model, torch.ones(2, 21, dtype=torch.int64))
        cache = fill(model, 9)
        with pytest.raises(ArgumentError, match="expected 1 sequences, as in the cache"):
            call(model, torch.ones(2, 1, dtype=torch.int64), **hf.passing(cache))
        assert cache.lengths == [9]
        assert handle.num_sequences == 1


def test_an_assistant_is_refused() -> None:
    model = causal_model()
    with patched(model), pytest.raises(ValueError, match="assisted generation is not supported"):
        generated(model, 3, input_ids=ids_of(model, 5), assistant_model=causal_model(seed=1))
    with patched(model), pytest.raises(UnsupportedError, match="assistant_model: expected a model that is not patched"):
        generated(model, 3, input_ids=ids_of(model, 5), is_assistant=True)


def test_a_cache_of_ours_is_refused_by_a_model_that_is_not_patched() -> None:
    cache = other_cache()
    with pytest.raises(UnsupportedError, match=r"cache: .*after unpatch, use a DynamicCache"):
        call(causal_model(), ids_of(causal_model(), 5), **hf.passing(cache))
    with pytest.raises(ArgumentError, match=r"model: expected a patched model.*call patch\(model\)"):
        new_cache(causal_model())
    with pytest.raises(UnsupportedError, match="in this process"):
        pickle.dumps(cache)


# NaN


@pytest.mark.matrix
def test_nan_stays_in_its_sequence() -> None:
    from tests.integrations.invariant import token_by_token

    model = causal_model()
    ids = torch.cat([ids_of(model, 30, number) for number in range(3)])

    def poison(_: Any, __: Any, out: Tensor) -> Tensor:
        out = out.clone()
        out[1, 5:7] = torch.nan
        return out

    with patched(model, deterministic=True) as handle, token_by_token(model):
        want = call(model, ids).logits
        hook = model.model.embed_tokens.register_forward_hook(poison)
        cache = hf.cache_of(call(model, ids[:, :20], use_cache=True))
        hook.remove()
        got = call(model, ids[:, 20:], **hf.passing(cache)).logits
        assert got[1].isnan().all()
        assert torch.equal(got[::2], want[::2, 20:])
        del cache
        assert set(handle.kv_bytes().values()) == {0}
        # its pages, with NaN in them, serve other sequences
        assert torch.equal(call(model, ids).logits, want)
        assert torch.equal(chunked(model, ids, (7, 23)), want)

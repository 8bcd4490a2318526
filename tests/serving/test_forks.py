"""Forks of a sequence at every length either continue like the sequence itself, or are refused."""

from __future__ import annotations

import contextlib

import attrs
import pytest
import torch

from dsv4attn.core.cache.layout import KVCacheLayout
from dsv4attn.core.contract.limits import Limits
from dsv4attn.core.model.config import v41_layers
from dsv4attn.core.model.geometry import LayerKind, LayerSharing, ModelGeometry
from dsv4attn.errors import ArgumentError
from dsv4attn.selection import load_backend
from dsv4attn.serving.cache_manager import CachedSequence
from tests.harness import FP32, SMALL, LayerStack
from tests.harness_v41 import FP32_V41, SMALL_V41

WIDE_V41 = attrs.evolve(SMALL_V41, layers=v41_layers([2]), sharing=LayerSharing((0,), (0,)), window=16)
LENGTH = 62


def filled(
    geometry: ModelGeometry,
    layout: KVCacheLayout,
    *,
    keep_windows: bool,
    drafts: int = 0,
    limits: Limits | None = None,
) -> LayerStack:
    """Layers whose pages hold NaN at first."""
    limits = limits or Limits(64, 64, 128, num_speculative_tokens=drafts)
    stack = LayerStack(
        load_backend("reference"),
        layout,
        geometry=geometry,
        limits=limits,
        swa_block_size=16,
        compressed_block_tokens=16,
        keep_windows=keep_windows,
        shuffle_seed=1,
    )
    stack.poison_caches()
    return stack


@pytest.mark.parametrize(("keep_windows", "drafts"), [(False, 0), (False, 3), (True, 0)])
@pytest.mark.parametrize(
    ("geometry", "layout", "possible"),
    [
        # the window's pages of 16 tokens are there from token 32 on, so lengths from 47 on have their window of 16. The
        # states' pages of 4 are there from 60 on. An odd length needs the state of one token before, an even one none
        (WIDE_V41, FP32_V41, {0, *range(48, 62, 2), 60, 61, 62}),
        # c4a states are there from 56 on, and the entry that token 59 completes needs those from 52 on
        (SMALL, FP32, {0, 60, 61, 62}),
    ],
    ids=["v41", "v4"],
)
def test_a_fork_of_any_length_goes_on_as_the_sequence_did(
    geometry: ModelGeometry, layout: KVCacheLayout, possible: set[int], *, keep_windows: bool, drafts: int
) -> None:
    whole = filled(geometry, layout, keep_windows=keep_windows, drafts=drafts)
    again = filled(geometry, layout, keep_windows=False)
    hidden = whole.hidden(0, LENGTH + 2)
    sequence, _ = whole.cut(hidden[:LENGTH], [LENGTH])
    _, expected = again.cut(hidden, [LENGTH + 2])
    forks: dict[int, CachedSequence] = {}
    for length in range(LENGTH + 1):
        with contextlib.suppress(ArgumentError):
            forks[length] = whole.manager.fork(sequence, length)
            kept = whole.manager.what_to_keep(sequence, length).values()
            assert all(block >= 0 for pages in kept for block in pages.blocks), length
    for later in range(2):
        # the tokens that the sequence had there: what follows is what it gave then
        tokens = torch.tensor([length + later for length in forks])
        outs = whole.step([(fork, 1) for fork in forks.values()], hidden[tokens])
        for layer, (out, rows) in enumerate(zip(outs, expected, strict=True)):
            torch.testing.assert_close(out, rows[tokens], rtol=1e-4, atol=1e-5, msg=f"layer {layer}, {later}")

    if keep_windows:
        assert forks.keys() == {*range(LENGTH + 1)}
    elif not drafts:
        assert forks.keys() == possible
    else:
        assert {0, *range(LENGTH - drafts, LENGTH + 1)} <= forks.keys()


@pytest.mark.matrix
@pytest.mark.parametrize(("geometry", "layout"), [(WIDE_V41, FP32_V41), (SMALL, FP32)], ids=["v41", "v4"])
def test_what_is_kept_continues_in_another_manager_at_every_length(
    geometry: ModelGeometry, layout: KVCacheLayout
) -> None:
    """All pages of the other manager hold NaN but for those that are kept."""
    lengths, later = range(1, 301), 2
    limits = Limits(len(lengths), 320, 320)
    whole, other = (filled(geometry, layout, keep_windows=keep, limits=limits) for keep in (True, False))
    hidden = whole.hidden(0, lengths[-1] + later)
    sequence, expected = whole.cut(hidden, [len(hidden)])
    restored = {}
    for length in lengths:
        restored[length] = other.manager.restore(length)
        kept, pages = whole.manager.what_to_keep(sequence, length), other.manager.what_to_keep(restored[length])
        for name, source in kept.items():
            for ours, theirs in zip(pages[name].caches, source.caches, strict=True):
                ours.tensor[pages[name].blocks] = theirs.tensor[source.blocks]
    for step in range(later):
        tokens = torch.tensor([length + step for length in lengths])
        outs = other.step([(each, 1) for each in restored.values()], hidden[tokens])
        for layer, (out, rows) in enumerate(zip(outs, expected, strict=True)):
            torch.testing.assert_close(out, rows[tokens], rtol=1e-4, atol=1e-5, msg=f"layer {layer}, {step}")


def test_what_cannot_be_kept_or_restored_is_refused_and_takes_no_page() -> None:
    whole = filled(SMALL, FP32, keep_windows=False)
    sequence, _ = whole.cut(whole.hidden(0, 40), [40])
    held = whole.manager.pages_in_use
    for length, message in ((41, "at most 40"), (20, "were not given back"), (-1, "length")):
        with pytest.raises(ArgumentError, match=message):
            whole.manager.what_to_keep(sequence, length)
    for length in (129, 10**15):
        with pytest.raises(ArgumentError, match="length: expected at most 128, the max_model_len"):
            whole.manager.restore(length)
    assert all(not kept.blocks for kept in whole.manager.what_to_keep(sequence, 0).values())
    assert whole.manager.pages_in_use == held


def test_a_fork_without_tokens_is_a_new_sequence() -> None:
    whole = filled(SMALL, FP32, keep_windows=False)
    hidden = whole.hidden(0, 40)
    sequence, _ = whole.cut(hidden, [40])
    held = whole.manager.kv_bytes
    fork = whole.manager.fork(sequence, 0)

    assert whole.manager.kv_bytes == held
    assert [table.blocks for table in fork.tables.values()] == [[] for _ in fork.tables]
    assert [table.first_token for table in fork.tables.values()] == [0 for _ in fork.tables]
    other = whole.hidden(1, 30)
    outs, (_, expected) = whole.step([(fork, 30)], other), whole.cut(other, [30])
    for out, rows in zip(outs, expected, strict=True):
        assert torch.equal(out, rows)


def test_a_fork_of_a_fork_knows_what_the_first_one_never_had() -> None:
    geometry = attrs.evolve(SMALL, layers=((LayerKind.SWA, 1),))
    whole = filled(geometry, FP32, keep_windows=False, drafts=1)
    sequence, _ = whole.cut(whole.hidden(0, 44), [44])
    fork = whole.manager.fork(sequence)

    # its window begins at token 36 (a draft may be rejected), in a page that begins at token 32
    assert fork.tables["window"].first_token == 36
    assert whole.manager.fork(fork, 43).length == 43
    with pytest.raises(
        ArgumentError, match=r"window pages, from token 35 on \(the sequence has them from token 36 on\)"
    ):
        whole.manager.fork(fork, 42)
    with pytest.raises(ArgumentError, match=r"window pages, from token 35 on .*, were not given back, got 42"):
        whole.manager.truncate(fork, 42)
    # the sequence itself has the whole page
    assert whole.manager.fork(sequence, 42).length == 42

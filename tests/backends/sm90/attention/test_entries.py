"""Decodes of few tokens that read entries through the block table, against the same decodes of translated slots.

`core.torch_ops.index_ops` is the definition of the translation. `test_tiles` shows that the other decodes are right.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve, frozen
from torch import Tensor

from dsv4attn.backends._triton.interpreted import INTERPRETED
from dsv4attn.backends._triton.launching.runtime import observed
from dsv4attn.backends.sm90 import launch
from dsv4attn.backends.sm90.launch import Sm90Backend
from dsv4attn.backends.sm90.tuning import TILE_SIZES, FewHeadsSizes, TileSizes
from dsv4attn.core.cache.selected_keys import DenseIndices, EntryIndices, GatheredKeys, PagedKeys, PageTable
from dsv4attn.core.contract.backend import AttentionCall, Phase
from dsv4attn.core.torch_ops.index_ops import compute_global_topk_indices_and_lens
from tests.backends._triton.attention.attention_trials import FNUZ, Trial
from tests.backends._triton.cache.caches import DEVICE
from tests.backends._triton.triton_backends import planned
from tests.backends.sm90.attention.mutants import plant
from tests.backends.sm90.attention.test_attention import BASE, CODED, NIBBLES, WITHIN
from tests.backends.sm90.attention.test_small_decode import units  # noqa: F401 - a fixture of all tests here too

INT = torch.int32
MOST = 2**31 - 1
TRIALS = {
    "pages of two": evolve(BASE, tokens=6, pages=(64, 2), widths=(70, 200), seed=61),
    "pages of 64": evolve(BASE, tokens=6, pages=(5, 64), widths=(130, 70), seed=62),
    "pages of 53, two blocks of heads": evolve(BASE, tokens=6, heads=65, pages=(64, 53), widths=(1, 65), seed=63),
    "no window": evolve(BASE, tokens=6, widths=(0, 130), seed=64),
    "codes": evolve(BASE, layouts=(CODED[WITHIN],) * 2, tokens=6, pages=(5, 64), widths=(130, 70), seed=65),
    "nibbles": evolve(
        BASE, layouts=(CODED[WITHIN], NIBBLES[WITHIN]), tokens=6, pages=(64, 2), widths=(70, 200), seed=66
    ),
}


@frozen
class DrawnCall:
    """A call of translated slots, and the entries that they are of."""

    call: AttentionCall
    entries: EntryIndices


def random_entries(trial: Trial, call: AttentionCall) -> DrawnCall:
    """Entries anywhere in their rows, among numbers that name nothing, through a table inside a larger one."""
    draw = torch.Generator().manual_seed(trial.seed)
    cache, real, tokens = call.keys[-1].cache, rows_of(call).indices, trial.tokens  # type: ignore[index]
    width, size = real.shape[1], cache.block_size
    # a request of its own for each token, and a column for each block that its slots name, in any order
    columns, requests = cache.num_blocks, tokens + 2
    order = torch.stack([torch.randperm(columns, generator=draw) for _ in range(requests)])
    larger = torch.randint(0, columns, (requests + 3, columns + 4), generator=draw, dtype=INT)
    table = larger[1:-2, 1 : columns + 1].copy_(order)
    owner = torch.randperm(requests, generator=draw)[:tokens].to(INT)
    slots = real.cpu().long()
    place = order.argsort(1)[owner.long()].gather(1, (slots.clamp(0, cache.capacity - 1) // size))
    entry = torch.where((slots >= 0) & (slots < cache.capacity), place * size + slots % size, slots).to(INT)
    # after the lengths too, as no length says where entries end; a block that is gone, and one that is garbage
    visible = torch.full((tokens,), columns * size, dtype=INT)
    visible[0], visible[1:3] = 0, columns * size // 2
    table[owner[-1].long(), ::3], table[owner[-2].long(), ::2] = -1, 2**30
    owner[3] = requests
    entry[:, ::7] = torch.randint(columns * size, columns * size + 3 * size, entry[:, ::7].shape, generator=draw).to(
        INT
    )
    visible[4] = MOST
    wide = torch.full((tokens + 2, width + 3), 5, dtype=INT)
    wide[:tokens, :width] = entry
    tensors = [tensor.to(DEVICE) for tensor in (wide, visible, owner, larger)]
    table = tensors[3][1:-2, 1 : columns + 1]
    entries = EntryIndices(
        tensors[0][:tokens, :width], tensors[1], tensors[2], PageTable(table, size, cache.num_blocks)
    )
    out = torch.empty(tokens, width, dtype=INT, device=DEVICE), torch.empty(tokens, dtype=INT, device=DEVICE)
    args = entries.indices, entries.visible_lens, entries.token_to_req, table
    compute_global_topk_indices_and_lens(*args, size, out)
    return DrawnCall(with_rows(call, *out), entries)


def draw_call(trial: Trial) -> DrawnCall:
    return random_entries(trial, planned(Sm90Backend(), trial))


def rows_of(call: AttentionCall) -> DenseIndices:
    """Of the second segment."""
    assert not isinstance(call.keys, GatheredKeys)
    rows = call.keys[-1].rows
    assert isinstance(rows, DenseIndices)
    return rows


def with_rows(call: AttentionCall, indices: Tensor, lens: Tensor | None = None) -> AttentionCall:
    """With other rows of the second segment."""
    assert not isinstance(call.keys, GatheredKeys)
    window, compressed = call.keys
    rows = DenseIndices(indices, rows_of(call).lens if lens is None else lens)
    return evolve(call, keys=[window, PagedKeys(compressed.cache, rows)])


def answers(drawn: DrawnCall, backend: Sm90Backend, *, straight: bool) -> list[Tensor]:
    """Out, lse and largest logits, from entries or from slots."""
    call = drawn.call
    results = [tensor for tensor in (call.out, call.lse, call.max_logits) if tensor is not None]
    for tensor in results:
        tensor.fill_(float("nan"))
    with observed() as seen:
        if straight:
            # no kernel reads the slots
            unread = with_rows(call, torch.zeros_like(rows_of(call).indices))
            run: Any = backend.prepare_entries(unread, drawn.entries)
            run(call.tensors._replace(topk_indices=drawn.entries.indices))
        else:
            backend.prepare(Phase.DECODE, call)(call.tensors)
    assert Counter(form.name for form in seen) == {"attend_tile": 1, "combine_tiles": 1}
    return [tensor.clone() for tensor in results]


def differs(trial: Trial, backend: Sm90Backend | None = None) -> bool:
    drawn, backend = draw_call(trial), backend or Sm90Backend()
    pairs = zip(answers(drawn, backend, straight=False), answers(drawn, backend, straight=True), strict=True)
    return any(not torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in pairs)


@pytest.mark.in_turn
@pytest.mark.parametrize("sizes", TILE_SIZES, ids=str)
@pytest.mark.parametrize("name", TRIALS)
def test_entries_are_the_slots_that_core_translates(
    name: str, sizes: TileSizes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "tile_sizes_of", lambda *_: sizes)

    assert not differs(TRIALS[name])


PLANTS = {
    "numbers past the visible": ("schedule", "(entry < visible)", "(entry < 0x7FFFFFFF)"),
    "-1 is entry 0": ("schedule", "there = (entry >= 0) & (entry", "entry = tl.maximum(entry, 0)\n    there = (entry"),
    "requests past the table": ("schedule", "(request < entries.known)", "(request < 0x7FFFFFFF)"),
    "columns past the table": ("schedule", "(column < entries.columns)", "(column < entries.columns + 2)"),
    "a garbage block in 32 bits": ("schedule", "block.to(tl.int64) * second.size", "block * second.size"),
    "the first token's request": ("schedule", "tl.load(entries.requests + t)", "tl.load(entries.requests)"),
    "pages of the window": ("schedule", "divided(entry, second.factor, second.log)", "entry // 64"),
    "the offset of an entry is left out": ("schedule", "(entry - column * second.size)", "(entry - entry)"),
    "lengths count": ("schedule", "tl.load(second.lens + t), least)", "tl.load(second.lens + t), 0)"),
    "tiles of entries are as many as can be seen": (
        "tiles",
        "tl.load(compressed_lens + t), least1)",
        "tl.load(compressed_lens + t), least1 // 2)",
    ),
    "entries of the window": ("tiles", "if (inside == 0) & (least1", "if (inside >= 0) & (least1"),
}


@pytest.mark.mutation
@pytest.mark.skipif(not INTERPRETED, reason="the planted text is of the interpreted kernels")
@pytest.mark.parametrize("bug", PLANTS)
def test_a_planted_bug_is_found(bug: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, tmp_path, *PLANTS[bug])

    assert any(differs(trial) for trial in TRIALS.values())


def test_core_translates_where_another_kernel_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    trial = TRIALS["pages of 64"]
    other = evolve(trial, layouts=(FNUZ, FNUZ))
    drawn = draw_call(trial)
    entries = drawn.entries

    assert Sm90Backend().prepare_entries(drawn.call, entries) is not None
    for backend in (Sm90Backend(small="gluon"), Sm90Backend(small="shared"), Sm90Backend(deterministic=True)):
        assert backend.prepare_entries(drawn.call, entries) is None
    assert Sm90Backend().prepare_entries(draw_call(other).call, entries) is None
    assert Sm90Backend().prepare_entries(evolve(drawn.call, scratch=()), entries) is None
    for change in (
        {"indices": entries.indices[:, ::2]},
        {"visible_lens": entries.visible_lens.repeat_interleave(2)[::2]},
        {"token_to_req": entries.token_to_req.repeat_interleave(2)[::2]},
        {"pages": evolve(entries.pages, block_table=entries.pages.block_table[:, ::2])},
        {"pages": evolve(entries.pages, block_size=entries.pages.block_size * 2)},
    ):
        assert Sm90Backend().prepare_entries(drawn.call, evolve(entries, **change)) is None
    monkeypatch.setattr(launch, "few_heads_sizes_of", lambda *_, **__: FewHeadsSizes(8))
    assert Sm90Backend().prepare_entries(drawn.call, entries) is None


def test_an_empty_table_has_no_entries() -> None:
    trial = evolve(TRIALS["pages of 64"], tokens=2)
    drawn = draw_call(evolve(trial, tokens=6))
    pages = evolve(drawn.entries.pages, block_table=drawn.entries.pages.block_table[:0])
    entries = evolve(drawn.entries, pages=pages)
    call = with_rows(drawn.call, torch.full_like(rows_of(drawn.call).indices, -1))
    expected = answers(DrawnCall(call, entries), Sm90Backend(), straight=False)

    actual = answers(DrawnCall(call, entries), Sm90Backend(), straight=True)
    assert all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(expected, actual, strict=True))

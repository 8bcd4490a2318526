"""`replay_entries`: a model of transformers attends to entries that were recorded, with gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch as replaced

import torch
from torch import Tensor

from dsv4attn.core.argument_checks import shown
from dsv4attn.errors import ArgumentError, UnsupportedError


@contextmanager
def replay_entries(model: Any, entries: Sequence[Mapping[int, Tensor]]) -> Iterator[None]:  # noqa: ANN401
    """Let the c4a layers of a model of transformers attend to recorded entries, as in training on sampled tokens.

    Calls inside are transformers' own in everything else, and gradients flow as ever; indexers get none, since they do
    not score. With activation checkpointing call `backward` inside too: it runs layers again. A row of a call holds
    tokens of one sequence by their `position_ids`, without padding before them. Give padding after them rows of -1.

    model: a model that is not patched.
    entries: for each row of a call, [tokens, K] of each c4a layer, by number: what `EntryRecords.of` returned.

    Raises UnsupportedError for a patched model or one without c4a layers. A call raises ArgumentError if a layer, a row
    or a position has no entries, or some that it does not see, and for padding before the tokens of a row.
    """
    indexers = {}
    if not hasattr(model, "dsv4attn"):
        for layer in getattr(getattr(model, "model", model), "layers", ()):
            indexer = getattr(getattr(getattr(layer, "self_attn", None), "compressor", None), "indexer", None)
            if indexer is not None:
                indexers[layer.self_attn.layer_idx] = indexer
    if not indexers:
        hint = "call unpatch(model) first" if hasattr(model, "dsv4attn") else ""
        expected, actual = "a DeepSeek-V4 model with c4a layers, not patched", shown(model)
        raise UnsupportedError("model", expected=expected, actual=actual, hint=hint)
    for row, by_layer in enumerate(entries):
        missing = sorted(indexers.keys() - by_layer.keys())
        if missing:
            expected = f"entries of layers {sorted(indexers)}"
            raise ArgumentError(f"entries[{row}]", expected=expected, actual=f"none of layer {missing[0]}")
    with ExitStack() as stack:
        for index, indexer in indexers.items():
            recorded = [by_layer[index] for by_layer in entries]
            stack.enter_context(replaced.object(indexer, "forward", _indexer(index, indexer.compress_rate, recorded)))
        yield


def _indexer(layer: int, ratio: int, entries: Sequence[Tensor]) -> Callable[..., Tensor]:
    """What replaces the forward of an indexer: [N, S, K] int64, -1 for none."""

    def forward(hidden_states: Tensor, _: Tensor, position_ids: Tensor, *__: object, **___: object) -> Tensor:
        rows = hidden_states.shape[0]
        if rows != len(entries):
            raise ArgumentError("entries", expected=f"a mapping for each of {rows} rows", actual=len(entries))
        selected = []
        for row, (positions, of_row) in enumerate(zip(position_ids.expand(rows, -1), entries, strict=True)):
            last, first_two = int(positions.max()), positions[:2].tolist()
            if first_two != [first_two[0] + i for i in range(len(first_two))]:
                # transformers counts padding among the tokens of entries
                expected = "positions that ascend by 1: no padding before the tokens"
                raise ArgumentError(f"position_ids[{row}]", expected=expected, actual=f"{first_two} ...")
            if last >= len(of_row):
                expected = f"entries of position {last} for layer {layer}"
                raise ArgumentError(f"entries[{row}]", expected=expected, actual=f"{len(of_row)} positions")
            of_positions = of_row.to(hidden_states.device, torch.int64)[positions]
            unseen = (of_positions.amax(1) >= (positions + 1) // ratio).nonzero()[:, 0].tolist()
            if unseen:
                expected = f"entries that position {int(positions[unseen[0]])} sees on layer {layer}"
                raise ArgumentError(f"entries[{row}]", expected=expected, actual=f"{of_positions[unseen[0]].tolist()}")
            selected.append(of_positions)
        return torch.stack(selected)

    return forward
